"""A TCP proxy that adds a round-trip time, for links of machines whose kernel has no netem.

``python -m bootseer.testing.latency HOST PORT TARGET_HOST TARGET_PORT SECONDS`` serves until it is ended. Each
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
from collections import deque
from pathlib import Path
from types import TracebackType

from bootseer.testing.service import service, wait_for_port

_IN_FLIGHT = 8 << 20
"""Bytes held per direction before the sender is stopped: 10 times what 1 Gbit/s moves in 5 ms."""


class _Side(asyncio.Protocol):
    """One end of a proxied connection; what it receives goes to ``peer`` after ``delay`` seconds."""

    def __init__(self, delay: float, handshake: float = 0.0) -> None:
        self.delay, self.handshake = delay, handshake
        self.peer: _Side | None = None
        self.transport: asyncio.Transport | None = None
        self._held: deque[bytes] = deque()
        self._bytes = 0
        self._open_at = 0.0
        self._blocked = False
        self._ended = False
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._open_at = self._loop.time() + self.handshake
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._hold(data)
        self._throttle()

    def eof_received(self) -> bool:
        self._hold(b"")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self.peer is not None and self.peer.transport is not None:
            self.peer.transport.abort()

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        if self.peer is not None:
            self.peer._throttle()

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._bytes += len(data)
        self._loop.call_at(max(self._loop.time(), self._open_at) + self.delay, self._release)

    def _release(self) -> None:
        data = self._held.popleft()  # first in, first out, whichever timer fires first
        self._bytes -= len(data)
        other = self.peer.transport if self.peer is not None else None
        if other is not None and not other.is_closing():
            if data:
                other.write(data)
            else:
                other.write_eof()
        if not data:
            self._ended = True
            if self.peer is not None and self.peer._ended:
                for side in (self, self.peer):
                    if side.transport is not None:
                        side.transport.close()
        self._throttle()

    def _throttle(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._bytes > _IN_FLIGHT or (self.peer is not None and self.peer._blocked):
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()


async def serve(host: str, port: int, target: tuple[str, int], rtt: float) -> None:
    """Proxy connections to ``host:port`` on to ``target``, with ``rtt`` seconds of round trip, until cancelled."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    class Client(_Side):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            assert self.transport is not None
            self.transport.pause_reading()  # until there is somewhere to send it to
            task = loop.create_task(self._connect())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def _connect(self) -> None:
            far = _Side(rtt / 2)
            far.peer = self
            try:
                await loop.create_connection(lambda: far, *target)
            except OSError:
                if self.transport is not None:
                    self.transport.abort()
                return
            self.peer = far
            self._throttle()

    server = await loop.create_server(lambda: Client(rtt / 2, rtt), host, port, backlog=256)
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
