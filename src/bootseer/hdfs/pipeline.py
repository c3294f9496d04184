"""One write pipeline: the connection over which a block goes to its DataNodes, each handing it on to the next.

Hadoop's data transfer protocol, operation 80 (WRITE_BLOCK): a request, its answer, then packets one way and one
acknowledgement per packet the other way, sent when every DataNode has the packet. A packet:

    u32 4 + c + d | u16 h | h bytes: PacketHeader | c bytes: checksums, 4 each | d bytes: data           (big-endian)

Checksums are CRC-32C, one per ``bytes_per_checksum`` from the beginning of the block, so every packet but the last one
with data holds whole chunks. A packet without data that says it is the last one ends the block.

A DataNode waits more than a minute for the one behind it, and an acknowledgement does not tell who is late. So when
acknowledgements stop for a moment (`STALL`) every DataNode is asked directly (`bootseer.hdfs.probe`). ``watch`` may
know better, from what is written beside: it is asked every `WATCH` seconds.

Concurrency: one thread at a time uses a pipeline (`bootseer.hdfs.output` has a lock); it sends and takes
acknowledgements in turn, with a non-blocking socket, so no thread of its own is needed. System calls release the GIL.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.errors import BootseerError, ConfigError, DataError
from bootseer.hdfs import probe
from bootseer.hdfs.dial import dial, own_limit
from bootseer.hdfs.framing import SUCCESS, TRANSFER_BLOCK, WRITE_BLOCK, M, line, locate, operation, parse, status_text
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import DataNode, Located, storage_ids
from bootseer.hdfs.sasl.login import LoginFailed
from bootseer.hdfs.sasl.streams import Stream
from bootseer.hdfs.sasl.transfer import COMPARE, KeyRefused

CONNECT = 5.0
"""Seconds for a connection to the first DataNode, and for the key of its login."""
_LONGEST = 1 << 20  # bytes of a message of a DataNode
STALL = 0.3
"""Seconds without an acknowledgement after which the DataNodes are asked whether they live; each time that all do, a
pipeline doubles them, up to `LONGEST_STALL`: a slow cluster is asked a few times per block."""
LONGEST_STALL = 2.4
"""So a DataNode that freezes late in a slow block is found as soon, within these seconds and those of a probe."""
PATIENCE = 60.0
"""Seconds without an acknowledgement after which a pipeline is given up though its DataNodes live (or none does)."""
WATCH = 0.05
"""Seconds of a wait after which ``watch`` is asked."""
_IOV = 512
_HEARTBEAT = -1  # the number of its packet

# stages of a block under construction, as a DataNode is told of them
CREATE, RECOVER, CLOSE = 6, 3, 5


class Broken(Exception):
    """A pipeline that cannot go on. ``bad``: positions in it of the DataNodes at fault, at least one. ``slow``: they
    answer, but are to be left."""

    def __init__(self, reason: str, bad: Sequence[int], *, slow: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.bad, self.slow = reason, tuple(bad), slow


class Packet(NamedTuple):
    """``number`` counts the packets of a block; ``offset`` is that of its data in the block."""

    number: int
    offset: int
    length: int
    sums: bytes
    parts: tuple[memoryview, ...]
    last: bool = False

    def views(self) -> list[memoryview]:
        """What goes over the wire."""
        header = wire.PacketHeader(
            offset=self.offset, number=self.number, last=self.last, length=self.length
        ).SerializeToString()
        size = 4 + len(self.sums) + self.length
        return [memoryview(struct.pack(">IH", size, len(header)) + header + self.sums), *self.parts]


class Terms(NamedTuple):
    """What a pipeline is set up with: lease holder, block size of the file, bytes per checksum."""

    client: str
    block_size: int
    bytes_per_checksum: int


class Setup(NamedTuple):
    """How a block stands: ``stage``; the new ``generation`` of its replicas (0 at first); bytes acknowledged, sent.
    ``copy_to``: no packets follow; the DataNode copies the block, which it has whole, to that one, and answers when
    that is done, which nobody waits for (`Pipeline.look_after`)."""

    stage: int = CREATE
    generation: int = 0
    acked: int = 0
    sent: int = 0
    copy_to: DataNode | None = None


def _request(located: Located, terms: Terms, setup: Setup) -> bytes:
    block = located.block._replace(length=setup.acked if setup.copy_to else terms.block_size)
    types, ids = [node.storage_type for node in located.nodes], storage_ids(located.nodes)
    base = wire.BaseHeader(block=block.message, token=located.token)
    # without a client it is a copy between DataNodes, of which the other one tells the NameNode
    header = wire.ClientHeader(base=base, client="" if setup.copy_to else terms.client)
    if (to := setup.copy_to) is not None:
        kind, known = [to.storage_type], storage_ids([to])
        copy = wire.TransferBlock(
            header=header, targets=[to.message], target_storage_types=kind, target_storage_ids=known
        )
        return operation(TRANSFER_BLOCK, copy)
    request = wire.WriteBlock(
        header=header,
        targets=[node.message for node in located.nodes[1:]],
        stage=setup.stage,
        pipeline_size=len(located.nodes),
        min_bytes=setup.acked,
        max_bytes=setup.sent,
        generation=setup.generation,
        checksum=wire.Checksum(type=2, bytes_per_checksum=terms.bytes_per_checksum),
        caching=wire.CachingStrategy(),
        storage_type=types[0],
        target_storage_types=types[1:],
        target_storage_ids=ids[1:],
    )
    if ids:
        request.storage_id = ids[0]
    return operation(WRITE_BLOCK, request)


def _connect(node: DataNode) -> socket.socket:
    try:
        return dial(node.host, node.port, time.monotonic() + CONNECT)
    except ConfigError as exc:
        raise Broken(f"cannot connect to {node.address}: {exc.message}", (0,)) from None
    except OSError as exc:
        if limit := own_limit(exc):
            # no other DataNode would do better, and this one is not to be avoided because of it
            raise BootseerError(f"cannot connect to {node.address}: {limit}", hint="raise that limit") from exc
        raise Broken(f"cannot connect to {node.address}: {exc.strerror or exc}", (0,)) from None


class Pipeline:
    """A pipeline to the DataNodes of ``located``, set up and ready for packets. ``unacked``: packets sent, or being
    sent, that are not on every DataNode yet. ``acked``: bytes of the block that are. ``waited``: seconds that its user
    waited for it. ``watch``: called while its user waits; raises `Broken` where it had better not. ``took``: called
    with the DataNodes and the bytes of a packet that is on all of them. Every method raises `Broken` when a DataNode
    fails, and then only `close` may be called. What this process lacks for a connection (files, ports, memory) is
    `BootseerError`."""

    def __init__(
        self,
        located: Located,
        terms: Terms,
        setup: Setup,
        watch: Callable[[], None] = lambda: None,
        took: Callable[[Sequence[DataNode], int], None] = lambda nodes, length: None,
    ) -> None:
        self.located, self.nodes, self.copy_to = located, located.nodes, setup.copy_to
        self.acked, self.in_flight = setup.acked, 0
        self.unacked: deque[Packet] = deque()
        self.waited, self._watch, self._took = 0.0, watch, took
        self._received, self._ready = bytearray(), False
        # since when nothing has come, when it was last looked for, and when all DataNodes were last heard or asked
        self._replaceable = setup.stage == CREATE
        self._stall = STALL
        self._stream: Stream | None = None
        self._connect()
        try:
            self._log_in()
            self._send([memoryview(_request(located, terms, setup))])
            if setup.copy_to is None:
                self._answered(self._next())
                self._ready, self._replaceable, self.waited = True, False, 0.0
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        self._sock, self._poll = _connect(self.nodes[0]), select.poll()
        self._moved = self._looked = self._sure = self.used = time.monotonic()
        self._sock.setblocking(False)
        self._poll.register(self._sock, select.POLLIN)

    def _log_in(self, *, again: bool = True) -> None:
        """As whom the block's token says, where the cluster wants that."""
        handshake = self.located.guard.handshake(self.nodes[0].port, self.located.token, time.monotonic() + CONNECT)
        said = handshake.begin() if handshake else b""
        try:
            while handshake and said:
                self._send([memoryview(said)])
                said = handshake.answer(self._next())
        except LoginFailed as exc:
            if not isinstance(exc, KeyRefused) or not again:
                raise Broken(f"no login at {self.nodes[0].address}: {exc}; {exc.hint}", (0,)) from None
            self._sock.close()
            self._connect()
            return self._log_in(again=False)
        if self._received:
            raise Broken(f"{self.nodes[0].address} sent more than its login", (0,))
        self._stream = handshake.stream if handshake else None

    def _next(self) -> bytes:
        while (message := self._message()) is None:
            self._wait(select.POLLIN)
            self._receive()
        return message

    def look_after(self) -> bool:
        """Of a copy: whether it is there; raises `Broken` where it is known to have failed. Waits as `heartbeat`."""
        self.collect()
        if (message := self._message()) is not None:
            self._answered(message)
        return message is not None

    def _answered(self, message: bytes) -> None:
        answer = self._understood(wire.BlockOpResponse, message, "does not speak Hadoop's data transfer protocol")
        if answer.status != SUCCESS:
            at = [i for i, node in enumerate(self.nodes) if node.address == answer.first_bad_link]
            what = line(answer.message) or status_text(answer.status)
            bad = at[0] if at else 0
            raise Broken(f"{self.nodes[bad].address} refused to take part: {what}", (bad,))

    def _understood(self, kind: type[M], message: bytes, else_: str) -> M:
        try:
            return parse(kind, message)
        except DataError:
            raise Broken(f"{self.nodes[0].address} {else_}", (0,)) from None

    def send(self, packet: Packet) -> None:
        """Send ``packet`` whole; acknowledgements that arrive meanwhile are taken."""
        self._begin_waiting()
        self.unacked.append(packet)
        self.in_flight += packet.length
        self._send(packet.views())

    def drain(self, left: int) -> None:
        """Wait until at most ``left`` bytes of data are unacknowledged; with 0 also packets without data."""
        while self.in_flight > left or (not left and self.unacked):
            self._wait(select.POLLIN)
            self._receive()

    def heartbeat(self) -> None:
        """Keep an idle pipeline alive: its DataNodes close it after a minute without a packet. Waits for nobody, but
        for the answers of the DataNodes (`probe.PROBE`) when the connection has ended."""
        self._poll.modify(self._sock, select.POLLIN | select.POLLOUT)
        events = self._poll.poll(0)
        if events and events[0][1] & ~select.POLLOUT:
            self._receive()
        if events and events[0][1] & select.POLLOUT:  # else what is on its way keeps it alive
            self._begin_waiting()
            self._send(Packet(_HEARTBEAT, 0, 0, b"", ()).views())

    def collect(self) -> None:
        """Take the acknowledgements that are there; waits as `heartbeat` does."""
        self._poll.modify(self._sock, select.POLLIN)
        if self._poll.poll(0):
            self._receive()

    def _begin_waiting(self) -> None:
        """An idle pipeline is no late one."""
        if not self.unacked:
            self._moved = self._looked = time.monotonic()

    def _send(self, views: list[memoryview]) -> None:
        if self._stream is not None:
            views = self._stream.out(views)
        while views:
            events = self._wait(select.POLLIN | select.POLLOUT)
            if events & ~select.POLLOUT:
                self._receive()
            if not events & select.POLLOUT:
                continue
            try:
                count = self._sock.sendmsg(views[:_IOV])
            except BlockingIOError:
                continue
            except OSError as exc:
                raise self._lost(exc.strerror or str(exc)) from None
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]
        self.used = time.monotonic()

    def _wait(self, events: int) -> int:
        """Wait for ``events`` of the socket, and look after the DataNodes when nothing comes."""
        self._poll.modify(self._sock, events)
        while True:
            begin = time.monotonic()
            left = self._looked + self._stall - begin
            found = self._poll.poll(min(max(left, 0.001), WATCH) * 1000)
            if not found and left <= 0:
                self._look()
            self.waited += time.monotonic() - begin
            if found:
                return found[0][1]
            if self._ready:
                self._watch()

    def _look(self) -> None:
        silent = probe.silent(self.nodes, self.located.block.pool, self._sure)
        self._looked = self._sure = time.monotonic()
        if silent and any(event & select.POLLIN for _, event in self._poll.poll(0)):
            return  # an acknowledgement came meanwhile: slow links are no frozen DataNodes
        late = self._looked - self._moved
        # all of them: they may thaw, and have what nobody else has; but a new block goes elsewhere, after a second look
        # where they are several: what pauses the whole cluster must not cost a block its replicas
        hopeless = self._replaceable and (len(self.nodes) == 1 or self._stall > STALL)
        if silent and (len(silent) < len(self.nodes) or hopeless):
            names = ", ".join(self.nodes[i].address for i in silent)
            raise Broken(f"{names} does not answer", silent)
        if late < PATIENCE:
            self._stall = min(2 * self._stall, LONGEST_STALL)
            return
        # all are alive, or none: the last one has nobody behind it that could be to blame
        bad = silent or (len(self.nodes) - 1,)
        raise Broken(f"no acknowledgement within {late:.0f} s", bad)

    def _lost(self, reason: str) -> Broken:
        """The first DataNode closed the connection: because of itself, unless another one does not answer."""
        first = self.nodes[0].address
        silent = probe.silent(self.nodes, self.located.block.pool, self._sure)
        if not self._ready and self._stream is None and self.located.guard.secured():
            reason += f"; {COMPARE}"
        return Broken(f"the connection to {first} ended: {reason}", silent or (0,))

    def _receive(self) -> None:
        try:
            data = self._sock.recv(65536)
            if data and self._stream is not None:
                self._received += self._stream.plain(data)
        except BlockingIOError:
            return
        except OSError as exc:
            raise self._lost(exc.strerror or str(exc)) from None
        if not data:
            raise self._lost("closed")
        if self._stream is None:
            self._received += data
        while self._ready and (message := self._message()) is not None:
            self._acknowledge(message)

    def _message(self) -> bytes | None:
        """The next message received whole: its length as a varint, then itself."""
        try:
            found = locate(self._received)
        except ValueError:
            raise Broken(f"{self.nodes[0].address} sent something that is no acknowledgement", (0,)) from None
        if found and found[1] > _LONGEST:
            raise Broken(f"{self.nodes[0].address} announces a message of {found[1]} bytes", (0,))
        if found is None or len(self._received) < found[1]:
            return None
        message = bytes(self._received[slice(*found)])
        del self._received[: found[1]]
        return message

    def _acknowledge(self, message: bytes) -> None:
        ack = self._understood(wire.PipelineAck, message, "sent something that is no acknowledgement")
        # a flag holds the status in its lower 4 bits, above it whether the DataNode is congested
        states = [flag & 15 for flag in ack.flag] or list(ack.reply)
        for position in reversed(range(len(states))):
            if states[position] != SUCCESS and position < len(self.nodes):
                what = status_text(states[position])
                raise Broken(f"{self.nodes[position].address} answered: {what}", (position,))
        if ack.number == _HEARTBEAT:
            return
        expected = self.unacked[0].number if self.unacked else None
        if ack.number != expected or len(states) < len(self.nodes):
            raise Broken(f"{self.nodes[0].address} acknowledged packet {ack.number}, not {expected}", (0,))
        packet = self.unacked[0]
        self.unacked.popleft()
        self.in_flight -= packet.length
        self.acked = packet.offset + packet.length
        self._took(self.nodes, packet.length)
        self._moved = self._looked = self._sure = time.monotonic()

    def close(self) -> None:
        """Close the connection; the DataNodes keep what they have."""
        self._sock.close()
