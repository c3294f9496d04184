"""The reader of blocks against DataNodes that answer in every way, also in ways that no DataNode does."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, UnavailableError
from bootseer.hdfs import checksum, datanode
from bootseer.hdfs.connection import Connection, Transfer
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import DataNode
from bootseer.hdfs.replica_errors import Cancelled, CorruptReplica, StaleReplica, UncheckedReplica
from support.fakedatanode import FakeBlock, FakeDataNode, Script, agreed, packet, refused
from support.waits import together

GUARD = 64
ZEROS = checksum.function(checksum.CRC32C)(bytes(512), 0).to_bytes(4, "big")


@pytest.fixture(autouse=True)
def _no_kept_connections() -> Iterator[None]:
    datanode.idle.clear()
    yield
    datanode.idle.clear()


class Memory:
    """``size`` bytes in parts that lie apart, with guards between: what is read must land there and nowhere else."""

    def __init__(self, size: int, cuts: list[int]) -> None:
        edges = sorted({0, size, *(cut % (size + 1) for cut in cuts)})
        self.whole = memoryview(bytearray(b"\xa5" * (size + GUARD * (len(edges) + 1))))
        self.parts: list[memoryview] = []
        self._spans: list[tuple[int, int]] = []
        at = GUARD
        for begin, end in itertools.pairwise(edges):
            self._spans.append((at, at + end - begin))
            self.parts.append(self.whole[at : at + end - begin])
            at += end - begin + GUARD

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)

    def guarded(self) -> bool:
        rest, at = b"", 0
        for begin, end in self._spans:
            rest += bytes(self.whole[at:begin])
            at = end
        rest += bytes(self.whole[at:])
        return rest == b"\xa5" * len(rest)


def read(
    fake: FakeDataNode, block: FakeBlock, offset: int, memory: Memory, verify: bool = True, **more: object
) -> None:
    datanode.read(
        fake.node,
        block.located,
        offset,
        memory.parts,
        **{"deadline": 5.0, "verify": verify, **more},  # type: ignore
    )


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


# -- checksums --------------------------------------------------------------------------------------------------------


def test_checksums_are_those_of_hadoop():
    assert checksum.function(checksum.CRC32)(b"123456789", 0) == 0xCBF43926
    assert checksum.function(checksum.CRC32C)(b"123456789", 0) == 0xE3069283


@given(
    kind=st.sampled_from([checksum.CRC32, checksum.CRC32C]),
    step=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 64, 100, 512]),
    sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_a_run_of_chunks_is_right_when_each_chunk_is(kind, step, sizes, seed):
    chance, crc = random.Random(seed), checksum.function(kind)
    chunks = checksum.Chunks(kind, step)
    for size in sizes:  # one object for runs of several lengths: nothing of one is left for the next
        data = bytearray(chance.randbytes(size))
        sums = bytearray(
            b"".join(crc(bytes(data[at : at + step]), 0).to_bytes(4, "big") for at in range(0, size, step))
        )
        cut = chance.randint(0, size)
        pieces = [memoryview(data)[:cut], memoryview(data)[cut:]]
        assert chunks.first_wrong(memoryview(sums), pieces) is None
        where = sorted({chance.randrange(size) for _ in range(chance.randint(1, 3))})
        for at in where:
            data[at] ^= 1 << chance.randrange(8)
        assert chunks.first_wrong(memoryview(sums), pieces) == where[0] // step
        for at in where:
            data[at] = 0  # and the checksum of what is there now, for one of them
        first = where[0] // step
        sums[first * 4 : first * 4 + 4] = crc(bytes(data[first * step : (first + 1) * step]), 0).to_bytes(4, "big")
        found = chunks.first_wrong(memoryview(sums), pieces)
        assert found is None or found > first


# -- right answers ----------------------------------------------------------------------------------------------------


@given(
    size=st.integers(1, 300_000),
    kind=st.sampled_from([checksum.CRC32, checksum.CRC32C]),
    step=st.sampled_from([1, 5, 64, 512, 4096, 100_000, 1 << 20]),
    uneven=st.booleans(),
    verify=st.booleans(),
    cuts=st.lists(st.integers(0, 300_000), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_any_range_lands_in_its_parts(size, kind, step, uneven, verify, cuts, seed):
    chance = random.Random(seed)
    step = max(step, size // 3000)  # a few thousand chunks do
    per_packet = (lambda number: chance.randint(1, 40)) if uneven else chance.choice([0, 1, 3, 128])
    block = FakeBlock(chance.randbytes(size), kind, step, per_packet)
    begin = chance.randrange(size)
    memory = Memory(chance.randint(0, size - begin), cuts)
    with FakeDataNode(block.answer) as fake:
        for _ in range(2):  # again on the same connection
            read(fake, block, begin, memory, verify)
    assert memory.content == block.data[begin : begin + len(memory.content)]
    assert memory.guarded()
    if memory.content:
        assert fake.connections == 1
        assert fake.statuses == [6 if verify else 0] * 2
        assert fake.requests[0].send_checksums is verify


def test_it_does_not_matter_how_the_network_cuts_the_answer():
    block = FakeBlock(noise(150_000), step=512, per_packet=20)

    def dribble(request: wire.ReadBlock) -> Iterator[bytes | float]:
        chance, left = random.Random(3), b"".join(block.answer(request))
        while left:
            cut = chance.choice([1, 2, 30, 31, 100, 7000])
            yield left[:cut]
            left = left[cut:]

    with FakeDataNode(dribble) as fake:
        for verify in (True, False):
            memory = Memory(140_000, [5, 70_000])
            read(fake, block, 5_001, memory, verify)
            assert memory.content == block.data[5_001:145_001]
            assert memory.guarded()


def test_fields_a_header_may_have_some_day_are_skipped():
    block = FakeBlock(noise(3000), step=512)
    extra = wire.PacketHeader(offset=0, number=0, last=False, length=0, sync=True).SerializeToString()[25:]

    def answer(request: wire.ReadBlock) -> Iterator[bytes]:
        yield agreed(checksum.CRC32C, 512, 0)
        for number, at in enumerate(range(0, 3000, 1024)):
            first = at // 512
            yield packet(at, number, block.data[at : at + 1024], b"".join(block.sums[first : first + 2]), extra)
        yield packet(3000, 3, b"", b"", extra)

    with FakeDataNode(answer) as fake:
        memory = Memory(3000, [])
        read(fake, block, 0, memory)
        assert memory.content == block.data


def test_parts_may_be_of_other_types_and_empty():
    block = FakeBlock(noise(64))
    whole = bytearray(64)
    parts = [memoryview(whole)[:0], memoryview(whole)[:32].cast("I"), memoryview(whole)[32:].cast("d", (2, 2))]
    with FakeDataNode(block.answer) as fake:
        datanode.read(fake.node, block.located, 0, parts, deadline=5, verify=True)
        datanode.read(fake.node, block.located, 64, [], deadline=5, verify=True)
        with pytest.raises(ValueError, match="outside block 7 of 64 bytes"):
            datanode.read(fake.node, block.located, 1, parts, deadline=5, verify=True)
    assert whole == block.data
    assert len(fake.requests) == 1


def test_ipv6():
    block = FakeBlock(noise(1000))
    try:
        fake = FakeDataNode(block.answer, "::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with fake:
        memory = Memory(1000, [])
        read(fake, block, 0, memory)
        assert memory.content == block.data
        fake.script = lambda request: [refused(1, "disk")]
        with pytest.raises(UnavailableError, match=r"DataNode \[::1\]:\d+"):
            read(fake, block, 0, memory)


# -- wrong answers ----------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), uneven=st.booleans(), verify=st.booleans())
def test_a_damaged_answer_is_an_error_or_harmless(seed, uneven, verify):
    chance = random.Random(seed)
    size = chance.randint(1, 20_000)
    per_packet = (lambda number: chance.randint(1, 5)) if uneven else 4
    block = FakeBlock(chance.randbytes(size), chance.choice([1, 2]), chance.choice([64, 512]), per_packet)
    begin = chance.randrange(size)
    memory = Memory(chance.randint(1, size - begin), [chance.randrange(size)])

    def damage(request: wire.ReadBlock) -> Iterator[bytes | None]:
        raw = bytearray(b"".join(block.answer(request)))
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(raw))
            if chance.random() < 0.3:  # where the structure is
                at %= 60
            match chance.randrange(4):
                case 0:
                    raw[at] ^= 1 << chance.randrange(8)
                case 1:
                    raw[at : at + chance.randint(1, 9)] = chance.randbytes(chance.randint(1, 9))
                case 2:
                    del raw[at:]
                    raw += b"x"
                case _:
                    raw[at : at + 4] = chance.choice(
                        [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\0"]
                    )
        yield bytes(raw)
        yield None

    with FakeDataNode(damage) as fake:
        try:
            read(fake, block, begin, memory, verify)
        except BootseerError:
            pass
        else:
            if verify:
                assert memory.content == block.data[begin : begin + len(memory.content)]
    assert memory.guarded()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 5000,
        b"\x80" * 5000,
        b"\0",
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 40,
        refused(0),
        agreed(2, 0, 0),
        agreed(2, 512, 512),
        agreed(2, 512, 1 << 63),
        agreed(2, 0xFFFFFFFF, 0) + packet(0, 0, b"x" * 1000, b"12345678"),
        agreed(2, 512, 0) + packet(512, 0, bytes(2048), ZEROS * 4) + packet(2048, 1, b""),
        agreed(2, 512, 0) + packet(0, 1, bytes(2048), ZEROS * 4) + packet(2048, 2, b""),
        agreed(2, 512, 0)
        + packet(0, 0, bytes(512), ZEROS)
        + packet(0, 1, bytes(1536), ZEROS * 3)
        + packet(2048, 2, b""),
        agreed(2, 512, 0) + packet(0, 0, b""),
        agreed(2, 512, 0) + packet(0, 0, b"x" * 5000, b"1234" * 10),
        agreed(2, 512, 0) + packet(0, 0, b"x" * 512, b""),
        agreed(2, 512, 0) + b"\0" * 5000,
        agreed(2, 512, 0) + packet(0, 0, bytes(3000), ZEROS * 6) + packet(3000, 1, b""),
        agreed(2, 512, 0)
        + struct.pack(">IH", 4 + (1 << 30), 25)
        + packet(0, 0, b"")[6:-4]
        + struct.pack("<i", 1 << 30),
        agreed(2, 512, 0) + struct.pack(">IH", 0, 25) + packet(0, 0, b"")[6:-4] + struct.pack("<i", -4),
        agreed(2, 512, 0) + struct.pack(">IH", 0xFFFFFFFF, 25) + packet(0, 0, b"x")[6:31],
        agreed(2, 512, 0) + struct.pack(">IH", 5, 0xFFFF) + packet(0, 0, b"x")[6:31],
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_nonsense_is_one_line(answer, verify):
    block = FakeBlock(bytes(2000))
    memory = Memory(1500, [])
    with FakeDataNode(lambda request: [answer, None]) as fake:
        with pytest.raises((UnavailableError, CorruptReplica)) as caught:
            read(fake, block, 100, memory, verify)
        assert "\n" not in str(caught.value)
        assert datanode.idle.count((fake.node.host, fake.node.port)) == 0
    assert memory.guarded()


def test_an_endless_answer_ends():
    block = FakeBlock(bytes(2000))

    def endless(request: wire.ReadBlock) -> Iterator[bytes]:
        yield agreed(0, 512, 0)
        number = 0
        while True:
            yield packet(number * 512, number, bytes(512))
            number += 1

    memory = Memory(1000, [])
    with FakeDataNode(endless) as fake, pytest.raises(UnavailableError, match="past 1000"):
        read(fake, block, 0, memory, verify=False)
    assert memory.guarded()


@pytest.mark.parametrize("step", [512, 1 << 20])
@pytest.mark.parametrize("kind", [checksum.CRC32, checksum.CRC32C])
def test_damage_on_disk_is_found_and_placed(kind, step):
    block = FakeBlock(noise(3 << 20), kind, step)
    block.data = block.data[:2_000_001] + bytes([block.data[2_000_001] ^ 1]) + block.data[2_000_002:]
    memory = Memory(2 << 20, [100])
    with FakeDataNode(block.answer) as fake:
        with pytest.raises(CorruptReplica, match="block 7 is damaged within") as caught:
            read(fake, block, 1000, memory)
        assert caught.value.offset == 2_000_001 // step * step
        read(fake, block, 1000, memory, verify=False)  # the caller's own checksums would see it
        assert memory.content == block.data[1000 : 1000 + (2 << 20)]


def test_what_a_datanode_refuses():
    block = FakeBlock(bytes(100))
    cases: list[tuple[bytes, type[BootseerError], str]] = [
        (refused(5), StaleReplica, "block token"),
        (
            refused(1, "opReadBlock x received exception org.apache.ReplicaNotFoundException: gone\n at"),
            StaleReplica,
            "gone at",
        ),
        (refused(1, "Replica gen stamp < block genstamp, block=x"), StaleReplica, "gen stamp"),
        (refused(1, "received exception java.io.IOException: Input/output error"), UnavailableError, "error received"),
        (refused(77), UnavailableError, "77$"),
        (agreed(0, 512, 0) + packet(0, 0, bytes(100)) + packet(100, 1, b""), UncheckedReplica, "has no checksums"),
    ]
    with FakeDataNode(lambda request: []) as fake:
        for answer, kind, text in cases:
            fake.script = lambda request, answer=answer: [answer, None]
            with pytest.raises(kind, match=text) as caught:
                read(fake, block, 0, Memory(100, []))
            assert type(caught.value) is kind


# -- connections ------------------------------------------------------------------------------------------------------


def test_a_connection_closed_while_idle_is_replaced_once():
    block = FakeBlock(noise(1000))
    with FakeDataNode(block.answer) as fake:
        memory = Memory(1000, [])
        read(fake, block, 0, memory)
        read(fake, block, 0, memory)
        assert fake.connections == 1
        fake.drop()
        read(fake, block, 0, memory)
        assert fake.connections == 2

        # closed at the moment of the request: nothing to see before
        served = [0]

        def close_first(request: wire.ReadBlock) -> Iterator[bytes | None]:
            served[0] += 1
            if served[0] == 1:
                yield None
            yield from block.answer(request)

        fake.script = close_first
        read(fake, block, 0, memory)
        assert fake.connections == 3
        fake.script = lambda request: [None]
        with pytest.raises(UnavailableError, match="closed the connection without an answer"):
            read(fake, block, 0, memory)
        assert fake.connections == 4
        with pytest.raises(UnavailableError, match="closed the connection without an answer"):
            read(fake, block, 0, memory)
        assert fake.connections == 5


def test_a_connection_on_which_more_came_than_was_asked_for_serves_no_other_read():
    block = FakeBlock(noise(10))
    with FakeDataNode(lambda request: [b"".join([*block.answer(request), b"more"])]) as fake:  # type: ignore[list-item]
        for connection in (1, 2):
            memory = Memory(10, [])
            read(fake, block, 0, memory)
            assert (memory.content, fake.connections) == (block.data, connection)


@pytest.mark.parametrize("trouble", [ConnectionResetError(errno.ECONNRESET, "reset"), TimeoutError()])
def test_bytes_that_are_there_survive_the_loss_of_the_connection(monkeypatch, trouble):
    block, memory, send = FakeBlock(noise(1000)), Memory(1000, []), Connection.send
    sent: list[bytes] = []

    def broken(connection: Connection, data: bytes) -> None:
        sent.append(data)
        if len(sent) == 2:  # the status at the end
            raise trouble
        send(connection, data)

    monkeypatch.setattr(Connection, "send", broken)
    with FakeDataNode(block.answer) as fake:
        read(fake, block, 0, memory)
        assert (memory.content, len(sent)) == (block.data, 2)
        assert datanode.idle.count((fake.node.host, fake.node.port)) == 0
        read(fake, block, 0, memory)
        assert fake.connections == 2


def test_a_name_is_looked_up_within_the_deadline(monkeypatch):
    block = FakeBlock(noise(100))
    memory = Memory(100, [])
    with FakeDataNode(block.answer) as fake:
        fake.node = DataNode("named", "localhost", fake.node.port)
        read(fake, block, 0, memory)
        assert memory.content == block.data
        datanode.idle.clear()
        release, lookup = threading.Event(), socket.getaddrinfo

        def slow(*args: object, flags: int = 0, **more: object) -> object:
            if not flags:
                release.wait(20)
            return lookup(*args, flags=flags, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "getaddrinfo", slow)
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"DataNode localhost:\d+: no answer within 0\.2 s"):
            read(fake, block, 0, memory, deadline=0.2)
        assert time.monotonic() - began < 2
        release.set()


def test_a_closed_listener_is_refused_at_once():
    block = FakeBlock(bytes(10))
    with FakeDataNode(block.answer) as fake:
        pass
    with pytest.raises(UnavailableError, match=r"read block 7 at 0 from DataNode 127.0.0.1:\d+: Connection refused"):
        read(fake, block, 0, Memory(10, []))


def test_torn_in_the_middle():
    block = FakeBlock(noise(100_000))
    for keep in (1, 12, 40, 70_000):

        def torn(request: wire.ReadBlock, keep: int = keep) -> list[bytes | None]:
            return [b"".join(block.answer(request))[:keep], None]

        with FakeDataNode(torn) as fake, pytest.raises(UnavailableError, match="closed the connection"):
            read(fake, block, 0, Memory(100_000, []))
        assert fake.connections == 1


def test_idle_connections_are_few_and_forgotten_in_time(monkeypatch):
    block = FakeBlock(noise(10))
    gate = threading.Barrier(datanode.idle.most + 3)

    def at_once(request: wire.ReadBlock) -> Iterator[bytes]:
        gate.wait(20)
        yield from block.answer(request)

    with FakeDataNode(at_once) as fake:
        address = (fake.node.host, fake.node.port)
        together(lambda number: read(fake, block, 0, Memory(10, [])), range(gate.parties))
        assert fake.connections == gate.parties
        assert datanode.idle.count(address) == datanode.idle.most
        fake.script = block.answer
        monkeypatch.setattr(datanode.idle, "seconds", 0.0)
        read(fake, block, 0, Memory(10, []))
        assert fake.connections == gate.parties + 1
        assert datanode.idle.count(address) <= 1


def test_idle_connections_to_all_datanodes_are_few(monkeypatch):
    monkeypatch.setattr(datanode.idle, "most", 2)
    block = FakeBlock(noise(10))
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(FakeDataNode(block.answer)) for _ in range(4)]
        for fake in fakes:
            read(fake, block, 0, Memory(10, []))
        assert [datanode.idle.count((fake.node.host, fake.node.port)) for fake in fakes] == [0, 0, 1, 1]


_END = """
import atexit
made = []
atexit.register(lambda: print([sock.fileno() for sock in made]))  # runs last
from bootseer.hdfs import datanode, dial
from support.fakedatanode import FakeBlock, FakeDataNode
block = FakeBlock(bytes(10))
fake = FakeDataNode(block.answer).__enter__()
datanode.read(fake.node, block.located, 0, [memoryview(bytearray(10))], deadline=5, verify=True)
made += dial._open
print(len(made))
fake.__exit__(None, None, None)
"""


def test_the_end_of_a_process_closes_its_connections():
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", _END], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "1\n[-1]\n")


_FORK = """
import os, sys
from support.fakedatanode import FakeBlock, FakeDataNode
from bootseer.hdfs import datanode
block = FakeBlock(bytes(range(200)))
def read():
    got = bytearray(200)
    datanode.read(fake.node, block.located, 0, [memoryview(got)], deadline=5, verify=True)
    return bytes(got) == block.data
with FakeDataNode(block.answer) as fake:
    assert read() and fake.connections == 1
    datanode.idle._lock.acquire()  # as if another thread had it
    child = os.fork()
    if not child:
        ok = datanode.idle.count((fake.node.host, fake.node.port)) == 0 and read()
        os._exit(0 if ok else 1)
    datanode.idle._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read() and fake.connections == 2, fake.connections
"""


def test_a_forked_child_has_connections_of_its_own():
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# -- time -------------------------------------------------------------------------------------------------------------


def _silent(begin: bytes) -> Script:
    def silent(request: wire.ReadBlock) -> Iterator[bytes | float]:
        yield begin
        yield 4.0

    return silent


def _in_thread(function) -> BaseException | None:  # type: ignore[no-untyped-def]
    caught: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as exc:
            caught.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    return caught[0] if caught else None


@pytest.mark.parametrize(
    "begin", [b"", b"\x01", agreed(2, 512, 0), agreed(2, 512, 0) + packet(0, 0, bytes(512), bytes(4))[:200]]
)
@pytest.mark.parametrize("thread", [True, False])
def test_silence_ends_with_the_deadline(begin, thread):
    block = FakeBlock(bytes(1 << 20))
    memory = Memory(1 << 20, [])
    with FakeDataNode(_silent(begin)) as fake:
        began = time.monotonic()

        def attempt() -> None:
            read(fake, block, 0, memory, deadline=0.2)

        if thread:
            error = _in_thread(attempt)
        else:
            with pytest.raises(UnavailableError) as caught:
                attempt()
            error = caught.value
        assert 0.15 < time.monotonic() - began < 2
        assert isinstance(error, UnavailableError)
        assert "no answer within 0.2 s" in str(error)
        fake.drop()


def test_a_slow_dribble_ends_with_the_deadline():
    block = FakeBlock(noise(1 << 20))

    def dribble(request: wire.ReadBlock) -> Iterator[bytes | float]:
        raw = b"".join(block.answer(request))
        for at in range(0, len(raw), 10_000):
            yield raw[at : at + 10_000]
            yield 0.02

    with FakeDataNode(dribble) as fake:
        began = time.monotonic()
        error = _in_thread(lambda: read(fake, block, 0, Memory(1 << 20, []), deadline=0.3))
        assert isinstance(error, UnavailableError)
        assert time.monotonic() - began < 1.5


@pytest.mark.parametrize("step", [512, 1 << 20])
def test_a_slow_read_is_seen_to_go_on(step):
    block, transfer, seen = FakeBlock(noise(1 << 20), step=step), Transfer(), set()

    def slowly(request: wire.ReadBlock) -> Iterator[bytes | float]:
        raw = b"".join(block.answer(request))
        for at in range(0, len(raw), 100_000):
            seen.add(transfer.received)
            yield raw[at : at + 100_000]
            yield 0.03

    memory = Memory(1 << 20, [])
    with FakeDataNode(slowly) as fake:
        assert _in_thread(lambda: read(fake, block, 0, memory, transfer=transfer)) is None
    assert memory.content == block.data
    assert len(seen) > 6
    assert transfer.received == 1 << 20


def test_signals_do_not_lengthen_a_wait():
    hits = [0]

    def hit(number: int, frame: object) -> None:
        hits[0] += 1

    before = signal.signal(signal.SIGALRM, hit)
    try:
        with FakeDataNode(_silent(b"")) as fake:
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            began = time.monotonic()
            with pytest.raises(UnavailableError, match="no answer"):
                read(fake, FakeBlock(bytes(9)), 0, Memory(9, []), deadline=0.4)
            took = time.monotonic() - began
            signal.setitimer(signal.ITIMER_REAL, 0)
            fake.drop()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits[0] > 5
    assert took < 2


def test_an_unreachable_datanode_ends_with_the_deadline_or_when_cancelled():
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)  # its queue is full after one connection: the kernel drops what comes then
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        node = DataNode("full", *listener.getsockname())
        located = FakeBlock(bytes(9)).located

        def attempt(transfer: Transfer, deadline: float) -> None:
            parts = [memoryview(bytearray(9))]
            datanode.read(node, located, 0, parts, deadline=deadline, verify=True, transfer=transfer)

        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"no answer within 0\.2 s"):
            attempt(Transfer(), 0.2)
        transfer = Transfer()
        threading.Timer(0.1, transfer.cancel).start()
        with pytest.raises(Cancelled):
            attempt(transfer, 20.0)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("begin", [b"", agreed(2, 512, 0) + packet(0, 0, bytes(512), bytes(4))[:200]])
def test_a_read_is_cancelled_from_another_thread(begin):
    block = FakeBlock(bytes(1 << 20))
    transfer = Transfer()
    with FakeDataNode(_silent(begin)) as fake:
        threading.Timer(0.1, transfer.cancel).start()
        began = time.monotonic()
        error = _in_thread(lambda: read(fake, block, 0, Memory(1 << 20, []), deadline=20.0, transfer=transfer))
        assert isinstance(error, Cancelled)
        assert time.monotonic() - began < 2
        with pytest.raises(Cancelled):  # before it begins
            read(fake, block, 0, Memory(1 << 20, []), transfer=transfer)
        fake.drop()


def test_cancelling_late_hits_nobody_else():
    block = FakeBlock(noise(1000))
    with FakeDataNode(block.answer) as fake:
        transfer = Transfer()
        read(fake, block, 0, Memory(1000, []), transfer=transfer)
        assert transfer.received == 1000
        transfer.cancel()
        read(fake, block, 0, Memory(1000, []))
        assert fake.connections == 1


def test_cancels_at_any_moment():
    block = FakeBlock(noise(300_000), step=512, per_packet=2)
    chance = random.Random(5)
    with FakeDataNode(block.answer) as fake:
        for _ in range(40):
            memory, transfer = Memory(250_000, [100]), Transfer()
            timer = threading.Timer(chance.random() * 0.004, transfer.cancel)
            timer.start()
            error = _in_thread(lambda m=memory, t=transfer: read(fake, block, 77, m, transfer=t))
            timer.join()
            assert error is None or isinstance(error, Cancelled)
            if error is None:
                assert memory.content == block.data[77:250_077]
            else:
                after = bytes(memory.whole)
                time.sleep(0.001)
                assert bytes(memory.whole) == after  # nothing writes to it any more
            assert memory.guarded()
