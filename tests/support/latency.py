"""A TCP proxy that adds a round-trip time, for links of machines whose kernel has no netem.

``python -m support.latency HOST PORT TARGET_HOST TARGET_PORT SECONDS`` serves until it is ended. Each
direction holds its bytes for half the round trip, and a connection's first bytes for one round trip more, which its
handshake would take. What it does not imitate: a congestion window that grows by round trips, so a long transfer is
at full rate at once. One process, one thread (asyncio).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path
from types import TracebackType

from support.service import service, wait_for_port

_PIECE = 256 << 10
_HELD = 32
"""Pieces held per direction before the sender is stopped: 8 MiB, 10 times what 1 Gbit/s moves in 5 ms."""


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float, opens: float) -> None:
    """Pass on what ``reader`` gives until its end, ``delay`` seconds after it came, and after ``opens``."""
    loop = asyncio.get_running_loop()
    held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD)

    async def send() -> None:
        while True:
            due, data = await held.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        data = b"more"
        while data:
            data = await reader.read(_PIECE)
            await held.put((max(loop.time(), opens) + delay, data))


async def serve(host: str, port: int, target: tuple[str, int], rtt: float) -> None:
    """Proxy connections to ``host:port`` on to ``target``, with ``rtt`` seconds of round trip, until cancelled."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opens = asyncio.get_running_loop().time() + rtt
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*target, limit=_PIECE)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(_carry(reader, far_writer, rtt / 2, opens))
                group.create_task(_carry(far_reader, writer, rtt / 2, 0.0))
        except (OSError, ExceptionGroup):  # one side is gone: the other must see that, and not an orderly end
            for each in writers:
                each.transport.abort()
        for each in writers:
            each.close()

    server = await asyncio.start_server(connected, host, port, backlog=256, limit=_PIECE)
    async with server:
        await server.serve_forever()


class LatencyProxy:
    """Runs the proxy as a process between ``__enter__`` and ``__exit__``; it ends when this process is killed.

    ``address`` is ``host:port`` to use instead of ``target`` (``host:port``). ``rtt`` is in seconds.
    """

    def __init__(self, target: str, *, rtt: float, host: str = "127.0.0.1") -> None:
        self.target, self.rtt, self.host = target, rtt, host
        self.port = 0
        self.pid = 0
        self._running = contextlib.ExitStack()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def __enter__(self) -> LatencyProxy:
        with socket.create_server((self.host, 0)) as probe:
            self.port = int(probe.getsockname()[1])
        argv = [sys.executable, "-m", __name__, self.host, str(self.port), *self.target.rsplit(":", 1), str(self.rtt)]
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(service(argv, Path(os.devnull)))
            wait_for_port(self.host, self.port, "latency proxy", process)
            self._running, self.pid = stack.pop_all(), process.pid
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._running.close()


def main(argv: list[str]) -> int:
    host, port, target, target_port, rtt = argv
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(host, int(port), (target, int(target_port)), float(rtt)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
