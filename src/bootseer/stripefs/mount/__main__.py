"""The server process of a mount: `bootseer.stripefs.mount.client` runs ``python -m bootseer.stripefs.mount``.

It takes a `ServerSpec` on stdin, and answers on stdout when the mount works: with its `Record`, or with class, message
and hint of the error that kept it from starting.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading

import msgspec

from bootseer.errors import BootseerError, from_os_error
from bootseer.stripefs.mount.server import Record, Server, ServerSpec


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerSpec)
    if os.fork():
        os._exit(0)  # the starter waits for this process only; the server has no parent to reap it
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir("/")

    def answer(found: Record | tuple[str, str, str]) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            os.write(1, msgspec.json.encode(found))
        os.dup2(2, 1)

    try:
        Server(spec).run(stop, answer)
    except (BootseerError, OSError) as exc:
        error = exc if isinstance(exc, BootseerError) else from_os_error(exc, f"serve {spec.mountpoint}")
        answer((type(error).__name__, error.message, error.hint))
        os._exit(error.exit_code)


if __name__ == "__main__":
    main()
