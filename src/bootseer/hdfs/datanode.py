"""Ranges of a block from a DataNode, received into the caller's memory: operation READ_BLOCK of Hadoop's protocol.

One read is a request, the DataNode's answer, then packets: a header, the checksums of the packet's chunks, its data; an
empty packet ends it, and the reader's status, after which the connection serves the next read. A DataNode begins at the
checksum chunk that holds the offset and ends with the one that holds the end: what is too much at both ends goes to
scratch memory. ``docs/internals/hdfs.md`` has the format.

A DataNode cuts a read into packets of one size, usually 64 KiB, so the places of coming headers are known after the
first: `_Reader` receives about a MiB of headers, checksums and data together, each into its place, then looks whether
the headers are what they had to be. If one is not, what follows it is put back, and packets are read one
by one from there. No call waits for more bytes than must come in any case, however they are cut.

Concurrency: any thread; a read uses one connection alone. When `read` has returned or raised, nothing writes to the
caller's memory any more."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import struct
import time
from bisect import bisect_right
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from bootseer.errors import BootseerError, ConfigError, UnavailableError
from bootseer.hdfs.checksum import CRC32, CRC32C, SIZE, Chunks
from bootseer.hdfs.connection import Connection, Pool, Transfer, connect
from bootseer.hdfs.dial import Address, host_port, own_limit
from bootseer.hdfs.framing import (
    BAD_TOKEN,
    CHECKSUM_OK,
    READ_BLOCK,
    SUCCESS,
    delimited,
    line,
    locate,
    operation,
    status_text,
)
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import DataNode, Located
from bootseer.hdfs.replica_errors import Cancelled, CorruptReplica, OwnLimit, StaleReplica, UncheckedReplica
from bootseer.hdfs.sasl.transfer import KeyRefused, TokenRefused

__all__ = ["Transfer", "read"]

_log = logging.getLogger(__name__)

idle = Pool(4.0, 64)
"""Connections that wait for the next read: as long as a DataNode keeps them (``dfs.datanode.socket.reuse.keepalive``).
"""

# What a DataNode says when it has not the replica the NameNode spoke of: Hadoop has no status of its own for these.
_GONE = (
    "ReplicaNotFoundException",
    "gen stamp",
    "is not readable",
    "don't match block",
    "bytes available",
    "FileNotFoundException",
    "No data exists for block",
    "is not valid",
    "not found in volumeMap",
)

BUFFER_SETTING = "io.file.buffer.size = 131072"
"""What a site sets at its DataNodes so that reads after a login are quick."""

_PREFIX = struct.Struct(">IH")  # length of the packet from the checksums' end of the header on, length of the header
_FIELDS = struct.Struct("<BqBqBBBi")  # offset in block, number, last, length of data, each after its protobuf tag
_HEADER = _PREFIX.size + _FIELDS.size
_TAGS = (0x09, 0x11, 0x18, 0x25)

_BATCH = 1 << 20
"""Bytes received at once."""

_PACKETS = 128
"""Packets received at once."""

_ANSWER = 512
"""Bytes asked for first: the DataNode's answer, and as much of the packets as came with it."""

_SMALL, _LONG = 16 << 10, 256 << 10
"""Packets of at most so many bytes are told of, in a read of so many: they cost both sides more than the bytes do."""

_MOST = 64 << 20
"""Bytes of a packet or of scratch memory beyond which an answer is no DataNode's: those refuse more than 16 MiB."""


@functools.lru_cache(maxsize=64)
def _packed(sums: int) -> struct.Struct:
    """A header, its prefix as bytes, and so many bytes of checksums to skip."""
    return struct.Struct(f"<{_PREFIX.size}sBqBqBBBi{sums}x")


def read(
    node: DataNode,
    located: Located,
    offset: int,
    parts: Sequence[memoryview],
    *,
    deadline: float,
    verify: bool,
    transfer: Transfer | None = None,
) -> None:
    """Fill ``parts``, writable and contiguous, in order with the block's bytes from ``offset`` in the block, as
    ``node`` has them. ``deadline``: seconds from now for everything. ``verify``: ask for HDFS's checksums and check
    them; without, the caller has checksums of its own.

    Raises `StaleReplica` (refresh the locations), `CorruptReplica` and `UncheckedReplica` (only with ``verify``),
    `UnavailableError` (refused, closed, not in time, not understood), `Cancelled`. After an error the parts hold
    anything. A kept connection that the DataNode had closed meanwhile is replaced by a fresh one, once."""
    views = [part if part.format == "B" and part.ndim == 1 else part.cast("B") for part in parts if part.nbytes]
    size = sum(map(len, views))
    if offset < 0 or offset + size > located.block.length:
        raise ValueError(f"{offset}+{size} is outside block {located.block.id} of {located.block.length} bytes")
    if not size:
        return
    until, transfer = time.monotonic() + deadline, transfer or Transfer()
    address = (node.host, node.port)
    try:
        kept = idle.take(address)
        if kept is not None:
            try:
                return _turn(kept, until, transfer, _Reader(kept, located, offset, views, verify, transfer))
            except _ClosedBefore as exc:
                _log.debug("kept connection to %s was closed (%s); connecting again", node.address, exc.__cause__)
        fresh = _connect(address, located, until, transfer)
        _turn(fresh, until, transfer, _Reader(fresh, located, offset, views, verify, transfer))
    except TokenRefused as exc:
        why = f"DataNode {node.address}, block {located.block.id}: {exc}"
        raise StaleReplica(why, hint="fetch the locations again") from None
    except (OSError, EOFError, ConfigError, _Malformed) as exc:
        doing = f"cannot read block {located.block.id} at {offset} from DataNode {node.address}"
        raise _unavailable(doing, exc, deadline) from exc


def _connect(address: Address, located: Located, until: float, transfer: Transfer, *, again: bool = True) -> Connection:
    """A connection that is ready for operations: logged in, where the cluster wants that."""
    connection = connect(address, until, transfer)
    try:
        if handshake := located.guard.handshake(address[1], located.token, until):
            connection.begin(until, transfer)
            said = handshake.begin()
            while said:
                connection.send(said)
                said = handshake.answer(_message(connection, connection.some(_ANSWER)))
            connection.protect(handshake.stream)
        return connection
    except KeyRefused:
        connection.close()
        if not again:
            raise
        return _connect(address, located, until, transfer, again=False)
    except BaseException as exc:
        connection.close()
        if transfer.cancelled and isinstance(exc, OSError | EOFError):
            raise Cancelled("the read was cancelled") from None
        raise


def _message(connection: Connection, raw: bytes) -> bytes:
    """The message that begins with ``raw``, which has come; what came behind it is given back."""
    try:
        while (found := locate(raw)) is None or len(raw) < found[1]:
            if found and found[1] > 1 << 20:
                raise _Malformed("its answer is too long")
            raw += connection.some(_ANSWER)
    except ValueError:
        raise _Malformed("its answer makes no sense") from None
    connection.unread(raw[found[1] :])
    return raw[slice(*found)]


def _unavailable(doing: str, exc: Exception, deadline: float) -> UnavailableError:
    hint = "check that it runs and is reachable"
    if isinstance(exc, OSError) and (limit := own_limit(exc)):
        return OwnLimit(f"{doing}: {limit}", hint="raise that limit, or read less at once")
    if isinstance(exc, TimeoutError) and exc.errno is None:
        return UnavailableError(f"{doing}: no answer within {deadline:.3g} s", hint=hint)
    if isinstance(exc, OSError):
        return UnavailableError(f"{doing}: {exc.strerror or exc}", hint=hint)
    if isinstance(exc, _Malformed):
        hint = "is it a DataNode of Hadoop 2 or 3?"
    return UnavailableError(f"{doing}: {exc}", hint=hint)


def _turn(connection: Connection, until: float, transfer: Transfer, reader: _Reader) -> None:
    try:
        connection.begin(until, transfer)
        keep = reader.receive()
    except BaseException as exc:
        connection.close()
        if transfer.cancelled and isinstance(exc, OSError | EOFError):
            raise Cancelled("the read was cancelled") from None
        if isinstance(exc, (EOFError, ConnectionError)) and not reader.answered:
            raise _ClosedBefore(str(exc) or type(exc).__name__) from exc
        raise
    if keep:
        idle.give_back(connection)
    else:
        connection.close()


@functools.cache
def tell_small() -> None:
    """Say once that DataNodes send small packets: after a login, and wherever they do without sendfile, as large as
    their buffers, which Hadoop makes of 4 KiB."""
    _log.warning("DataNodes send small packets, which is slow; at the DataNodes set %s", BUFFER_SETTING)


class _ClosedBefore(EOFError):
    """Closed before the first byte of an answer."""

    def __str__(self) -> str:
        return (
            "it closed the connection without an answer (its limit of connections is reached, it is stopping, or "
            "dfs.data.transfer.protection is another one there)"
        )


class _Malformed(Exception):
    """The other side does not speak this protocol, or not so as a DataNode does."""


class _Reader:
    """One read on one connection."""

    def __init__(
        self,
        connection: Connection,
        located: Located,
        offset: int,
        parts: Sequence[memoryview],
        verify: bool,
        transfer: Transfer,
    ) -> None:
        self.answered = False
        self._who = f"DataNode {host_port(connection.address)}"
        self._connection, self._located, self._transfer = connection, located, transfer
        self._parts, self._verify = parts, verify
        self._ends = list(itertools.accumulate(map(len, parts)))
        self._begin, self._end = offset, offset + self._ends[-1]  # in the block
        self._chunks: Chunks | None = None
        self._step = 512  # chunks begin at multiples of it
        self._at = 0  # where in the block the next packet begins
        self._number = 0
        self._data, self._sums = 0, 0  # bytes of the packet whose header was read last
        self._single = False  # packets are not as foreseen

    def receive(self) -> bool:
        """Ask for the range and receive all of it. Whether the connection serves another read."""
        self._connection.send(self._request())
        self._answer()
        self._transfer.received = 0
        head = memoryview(bytearray(_HEADER))
        self._connection.fill([head], _HEADER)
        more = self._take(head)
        if more and self._data <= _SMALL and self._end - self._begin >= _LONG:
            tell_small()
        while more:
            head = self._batch()
            more = self._take(head)
        try:
            status = wire.ReadStatus(status=CHECKSUM_OK if self._verify else SUCCESS)
            self._connection.send(delimited(status))
        except OSError:  # the bytes are there and checked: only the connection is lost
            return False
        return True

    def _request(self) -> bytes:
        base = wire.BaseHeader(block=self._located.block.message, token=self._located.token)
        request = wire.ReadBlock(
            header=wire.ClientHeader(base=base, client=f"bootseer_{os.getpid()}"),
            offset=self._begin,
            length=self._end - self._begin,
            send_checksums=self._verify,
        )
        return operation(READ_BLOCK, request)

    def _answer(self) -> None:
        raw = self._connection.some(_ANSWER)
        self.answered = True
        try:
            answer = wire.BlockOpResponse.FromString(_message(self._connection, raw))
        except DecodeError:
            raise _Malformed("its answer makes no sense") from None
        if answer.status != SUCCESS:
            raise self._refused(answer)
        if not answer.HasField("read_checksum"):
            raise _Malformed("its answer lacks the checksum's type")
        self._agree(answer.read_checksum)

    def _refused(self, answer: wire.BlockOpResponse) -> BootseerError:
        where = f"{self._who}, block {self._located.block.id}: "
        if answer.status == BAD_TOKEN:
            return StaleReplica(
                where + "the block token is missing, wrong or expired", hint="fetch the locations again"
            )
        said = line(answer.message)
        if any(sign in said for sign in _GONE):
            return StaleReplica(f"{where}{said}", hint="fetch the locations again")
        return UnavailableError(where + f"{status_text(answer.status)} {said}".rstrip())

    def _agree(self, told: wire.ReadChecksum) -> None:
        kind, step = told.checksum.type, told.checksum.bytes_per_checksum
        if self._verify:
            if kind not in (CRC32, CRC32C):
                raise UncheckedReplica(
                    f"{self._who} has no checksums of block {self._located.block.id}",
                    hint="read the file without verification, or see whether its .meta file is lost there",
                )
            if not step:
                raise _Malformed("chunks of no bytes")
            self._chunks = Chunks(kind, step)
        self._step = max(step, 1)
        self._at = told.chunk_offset
        if not self._begin - self._step < self._at <= self._begin or self._begin - self._at > _MOST:
            raise _Malformed(f"it begins at {self._at}")

    def _take(self, raw: memoryview) -> bool:
        """Look at the next packet's header; False when it is the empty packet at the end."""
        length, header = _PREFIX.unpack_from(raw)
        tag0, at, tag1, number, tag2, last, tag3, data = _FIELDS.unpack_from(raw, _PREFIX.size)
        if (tag0, tag1, tag2, tag3) != _TAGS or not _FIELDS.size <= header <= 1 << 10:
            raise _Malformed("a packet's header makes no sense")
        if extra := header - _FIELDS.size:  # fields that DataNodes may have some day
            self._connection.fill([memoryview(bytearray(extra))], extra)
        sums = length - 4 - data
        if (
            (at, number) != (self._at, self._number)
            or not 0 <= data <= _MOST
            or not 0 <= sums <= _MOST
            or bool(last) != (data == 0)
        ):
            raise _Malformed(f"packet {number} of {data} + {sums} bytes at {at} comes after {self._number - 1}")
        if last:
            if self._at < self._end:
                raise _Malformed(f"it ends at {self._at}, before {self._end}")
            return False
        if self._at >= self._end or at + data - self._end >= self._step:
            raise _Malformed(f"it goes on to {at + data}, past {self._end}")
        if self._chunks and sums != -(-data // self._step) * SIZE:
            raise _Malformed(f"{sums} bytes of checksums for {data} bytes in chunks of {self._step}")
        self._data, self._sums = data, sums
        return True

    def _batch(self) -> memoryview:
        """Receive and check the packet whose header was read, as many more as are sure to come, and the next header."""
        count, stride = self._foreseen(), _HEADER + self._sums
        # of each packet the header and the checksums; the first header was read already
        control = memoryview(bytearray(count * stride + _HEADER))
        places = self._places(count)
        views = [control[_HEADER:stride], *places[0]] if self._sums else list(places[0])
        for i in range(1, count):
            views.append(control[i * stride : (i + 1) * stride])
            views += places[i]
        views.append(control[count * stride :])
        self._connection.fill(views, count * (stride + self._data))
        good = self._alike(control[stride : count * stride])
        if self._chunks is not None:
            for i in range(good):
                self._check(self._chunks, i, places[i], control[i * stride + _HEADER : (i + 1) * stride])
        self._at += good * self._data
        self._number += good
        self._transfer.received = max(0, min(self._at, self._end) - self._begin)
        if good < count:
            left = [control[good * stride + _HEADER : (good + 1) * stride], *places[good]]
            for i in range(good + 1, count):
                left += [control[i * stride : (i + 1) * stride], *places[i]]
            self._connection.unread(b"".join([*left, control[count * stride :]]))
            self._single = True
        return control[good * stride :][:_HEADER]

    def _foreseen(self) -> int:
        """How many packets of one size to receive at once, counting the one whose header was read: they and the next
        header are no more bytes than must come, however they are cut."""
        if self._single:
            return 1
        more = _HEADER + self._sums
        left = self._end - self._at - self._data
        return max(1, min(_BATCH // self._data, _PACKETS, 1 + left // (self._data + more)))

    def _alike(self, control: memoryview) -> int:
        """How many packets are as foreseen: the first, and those whose headers (and checksums) ``control`` has."""
        start = _PREFIX.pack(4 + self._sums + self._data, _FIELDS.size)
        at, number = self._at, self._number
        for found in _packed(self._sums).iter_unpack(control):
            at, number = at + self._data, number + 1
            if found != (start, _TAGS[0], at, _TAGS[1], number, _TAGS[2], 0, _TAGS[3], self._data):
                return number - self._number
        return number - self._number + 1

    def _check(self, chunks: Chunks, index: int, pieces: list[memoryview], sums: memoryview) -> None:
        if (wrong := chunks.first_wrong(sums, pieces)) is not None:
            at = self._at + index * self._data + wrong * self._step
            raise CorruptReplica(
                f"{self._who}: block {self._located.block.id} is damaged within {self._step} bytes from {at}",
                offset=at,
            )

    def _places(self, count: int) -> list[list[memoryview]]:
        """`_place` of the next ``count`` packets; quick for those that lie in one part, as nearly all do."""
        found, size, room = list[list[memoryview]](), self._data, 0
        for at in range(self._at, self._at + count * size, size):
            if room < size and self._begin <= at < self._end:
                index = bisect_right(self._ends, at - self._begin)
                part, room = self._parts[index], self._begin + self._ends[index] - at
                start = len(part) - room
            if room < size:
                found.append(self._place(at, size))
                room = 0
            else:
                found.append([part[start : start + size]])
                start, room = start + size, room - size
        return found

    def _place(self, at: int, length: int) -> list[memoryview]:
        """Where ``length`` bytes from ``at`` in the block go: the caller's parts, and scratch before and after them."""
        pieces: list[memoryview] = []
        stop = at + length
        if at < self._begin:
            before = min(self._begin, stop) - at
            pieces.append(memoryview(bytearray(before)))
            at += before
        last = min(stop, self._end)
        if at < last:
            index = bisect_right(self._ends, at - self._begin)
            while at < last:
                part = self._parts[index]
                start = len(part) - (self._begin + self._ends[index] - at)
                piece = part[start : start + last - at]
                pieces.append(piece)
                at, index = at + len(piece), index + 1
        if at < stop:
            pieces.append(memoryview(bytearray(stop - at)))
        return pieces
