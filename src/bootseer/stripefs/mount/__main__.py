"""The processes of a mount: `bootseer.stripefs.mount.client` runs ``python -m bootseer.stripefs.mount``.

It takes a `ServerSpec` on stdin, and answers on stdout when the mount works: with its `Record`, or with class, message
and hint of the error that kept it from starting.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys

import msgspec

from bootseer.errors import BootseerError, from_os_error
from bootseer.loglimit import LogRateLimit
from bootseer.stripefs.mount.server import ServerSpec
from bootseer.stripefs.mount.supervisor import Answer, Supervisor


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerSpec)
    if os.fork():
        os._exit(0)  # the starter waits for this process only; the supervisor has no parent to reap it
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRateLimit())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each file that is open is several here
    os.chdir("/")

    def answer(found: Answer) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            os.write(1, msgspec.json.encode(found))
        os.dup2(2, 1)

    try:
        Supervisor(spec, answer).run()
    except (BootseerError, OSError) as exc:
        error = exc if isinstance(exc, BootseerError) else from_os_error(exc, f"serve {spec.mountpoint}")
        logging.error("%s", error)
        answer((type(error).__name__, error.message, error.hint))
        os._exit(error.exit_code)


if __name__ == "__main__":
    main()
