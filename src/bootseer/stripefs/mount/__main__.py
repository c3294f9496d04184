"""The server process of a mount: `bootseer.stripefs.mount.client` runs ``python -m bootseer.stripefs.mount``."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bootseer.errors import BootseerError, from_os_error
from bootseer.stripefs.mount.server import Paths, Record, Server, ServerSpec, born, write_atomically
from bootseer.stripefs.store import open_fs


def tell(fd: int, answer: int | BootseerError) -> None:
    """The server's side: its pid, or why it does not start."""
    if isinstance(answer, int):
        line = f"ok {answer}\n"
    else:
        packed = msgspec.json.encode((type(answer).__name__, answer.message, answer.hint)).decode()
        line = f"error {packed}\n"
    with contextlib.suppress(OSError):
        os.write(fd, line.encode())
    os.close(fd)


def main(argv: Sequence[str]) -> None:
    """The server process: its `ServerSpec` on stdin, the pipe to answer on as its argument."""
    answer_fd = int(argv[0])
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerSpec)
    if os.fork():
        os._exit(0)  # the starter waits for this process only; the server has no parent to reap it
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir("/")
    paths = Paths(Path(spec.state), Path(spec.mountpoint))
    try:
        cache = Path(spec.cache_dir) if spec.cache_dir else None
        server = Server(
            open_fs(spec.url),
            Path(spec.mountpoint),
            prefetch=spec.prefetch,
            cache_dir=cache,
            cache_budget=spec.cache_budget,
            memory=spec.memory,
            status_file=paths.status,
        )
        server.start()
        record = Record(spec.url, spec.mountpoint, os.getpid(), born(os.getpid()))
        write_atomically(paths.record, msgspec.json.encode(record))
    except BootseerError as exc:
        tell(answer_fd, exc)
        os._exit(exc.exit_code)
    except OSError as exc:
        tell(answer_fd, from_os_error(exc, f"serve {spec.mountpoint}"))
        os._exit(1)
    tell(answer_fd, os.getpid())
    server.run(stop)


if __name__ == "__main__":
    main(sys.argv[1:])
