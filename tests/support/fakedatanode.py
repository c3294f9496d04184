"""A DataNode that says what a test wants: right packets, torn ones, or anything at all.

It speaks the reading half of the data transfer protocol over real sockets, in this process. What a real DataNode does
is tested against real ones; this is for what those never do.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from bootseer.hdfs import checksum
from bootseer.hdfs.framing import delimited
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import Block, DataNode, Located

Step = bytes | bytearray | memoryview | float | None
Script = Callable[[wire.ReadBlock], Iterable[Step]]
"""What to send for a request: bytes; a pause in seconds; None closes the connection."""


def agreed(kind: int, step: int, at: int) -> bytes:
    """The answer that packets follow: checksum type, bytes per checksum, where in the block the packets begin."""
    told = wire.ReadChecksum(checksum=wire.Checksum(type=kind, bytes_per_checksum=step), chunk_offset=at)
    return delimited(wire.BlockOpResponse(status=0, read_checksum=told))


def refused(status: int, message: str = "") -> bytes:
    return delimited(wire.BlockOpResponse(status=status, message=message))


def packet(at: int, number: int, data: bytes, sums: bytes = b"", extra: bytes = b"") -> bytes:
    """One packet; without data the last one. ``extra``: more fields of the header."""
    head = wire.PacketHeader(offset=at, number=number, last=not data, length=len(data)).SerializeToString() + extra
    return struct.pack(">IH", 4 + len(sums) + len(data), len(head)) + head + sums + data


class FakeBlock:
    """A block of ``data`` with checksums as a DataNode keeps them; `answer` is the script of a correct DataNode.

    ``per_packet``: chunks in a packet, or a function from packet number to that.
    """

    def __init__(
        self, data: bytes, kind: int = checksum.CRC32C, step: int = 512, per_packet: int | Callable[[int], int] = 0
    ) -> None:
        self.data, self.kind, self.step = data, kind, step
        self.per_packet = per_packet or max(1, -(-65536 // step))
        crc = checksum.function(kind) if kind else None
        chunks = [data[at : at + step] for at in range(0, len(data), step)]
        self.sums = [crc(chunk, 0).to_bytes(4, "big") if crc else b"" for chunk in chunks]

    def answer(self, request: wire.ReadBlock) -> Iterator[bytes]:
        sums = bool(request.send_checksums and self.kind)
        step = self.step if sums else 512
        at = request.offset - request.offset % step
        stop = request.offset + request.length
        stop = min(stop + -stop % step, len(self.data))
        yield agreed(self.kind if sums else 0, step, at)
        number = 0
        while at < stop:
            chunks = self.per_packet(number) if callable(self.per_packet) else self.per_packet
            data = self.data[at : min(at + chunks * step, stop)]
            first = at // step
            yield packet(at, number, data, b"".join(self.sums[first : first + -(-len(data) // step)]) if sums else b"")
            at, number = at + len(data), number + 1
        yield packet(at, number, b"")

    @property
    def located(self) -> Located:
        return Located(
            Block("BP-1", 7, 1001, len(self.data)), 0, (), wire.Token(identifier=b"", password=b"", kind="", service="")
        )


class FakeDataNode:
    """Listens on ``host`` at a free port while it is a context; answers each request with the ``script``.

    ``requests`` are those it got, ``connections`` how many came, ``statuses`` what readers said at the end.
    """

    def __init__(self, script: Script, host: str = "127.0.0.1") -> None:
        self.script = script
        self.requests: list[wire.ReadBlock] = []
        self.statuses: list[int] = []
        self.connections = 0
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self.node = DataNode(f"fake-{host}", host, self._listener.getsockname()[1])

    def __enter__(self) -> FakeDataNode:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        for thread in self._threads:
            thread.join(10)

    def drop(self) -> None:
        """Close all connections, as a restart does."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _start(self, function: Callable[[], None]) -> None:
        thread = threading.Thread(target=function, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            self._sockets.append(sock)
            self._start(lambda sock=sock: self._serve(sock))  # type: ignore[misc]

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as stream, contextlib.suppress(OSError, ValueError):
            while head := stream.read(3):
                if head != struct.pack(">HB", 28, 81):
                    raise ValueError(f"not a request to read a block: {head!r}")
                request = wire.ReadBlock.FromString(_message(stream.read))
                self.requests.append(request)
                for step in self.script(request):
                    if step is None:
                        return
                    if isinstance(step, float):
                        self._ended.wait(step)
                    else:
                        sock.sendall(step)
                self.statuses.append(wire.ReadStatus.FromString(_message(stream.read)).status)


def _message(read: Callable[[int], bytes]) -> bytes:
    length = shift = 0
    while True:
        byte = read(1)[0:1] or b"\0"
        length |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            return read(length)
