"""The read engine's threads over DataNodes in memory: right bytes or an error, and nobody's memory touched later."""

import gc
import os
import signal
import threading
import time
import weakref
from dataclasses import replace

import pytest
from crc32c import crc32c

from bootseer.backends.engine.engine import Engine
from bootseer.backends.engine.model import Tuning
from bootseer.backends.hdfs_direct import DirectSource
from bootseer.backends.interface import DEADLINE, Piece
from bootseer.errors import BootseerError, DataError, UnavailableError
from bootseer.hdfs.replica_errors import OwnLimit, UncheckedReplica
from support.datanodes import FakeHdfs
from support.waits import together, until

MB = 1 << 20
UNIT = 256 << 10
AROUND = ["abc", "bcd", "cda", "dab"]
QUICK = Tuning(stall=0.1, round_wait=0.02, min_run=UNIT, max_run=MB, small=65536)


@pytest.fixture
def hdfs() -> FakeHdfs:
    return FakeHdfs(*"abcd")


@pytest.fixture
def engine(hdfs) -> Engine:
    return Engine(lambda *args, **more: hdfs.read(*args, **more), tuning=QUICK)


class Wanted:
    """Pieces over the whole of some files, with chunks of `UNIT` bytes that are checked."""

    def __init__(self, hdfs: FakeHdfs, files: dict[str, bytes], unit: int = UNIT, checked: bool = True) -> None:
        self.files, self.buffers, self.pieces = files, {}, []
        for path, data in files.items():
            buffer = self.buffers[path] = bytearray(len(data))
            parts = [memoryview(buffer)[start : start + unit] for start in range(0, len(data), unit)]
            crcs = [crc32c(data[start : start + unit]) for start in range(0, len(data), unit)]

            def check(number, part, crcs=crcs, path=path):
                if crc32c(part) != crcs[number]:
                    raise DataError(f"chunk {number} of {path} is damaged")

            file = hdfs.open(path)
            self.pieces.append((file, Piece(None, 0, parts, check if checked else None, name=path)))

    def right(self) -> bool:
        return all(self.buffers[path] == data for path, data in self.files.items())


def striped(hdfs: FakeHdfs, total: int = 16 * MB, *, replicas=AROUND, block_size: int = 128 * MB) -> dict[str, bytes]:
    files = {f"s{i}": os.urandom(total // len(replicas)) for i in range(len(replicas))}
    for (path, data), keys in zip(files.items(), replicas, strict=True):
        hdfs.put(path, data, [keys], block_size=block_size)
    return files


def nothing_under_way(engine: Engine) -> bool:
    until = time.monotonic() + 3.0
    while engine.scheduler.busy and time.monotonic() < until:
        time.sleep(0.01)
    return not engine.scheduler.busy


def test_all_bytes_from_all_datanodes(hdfs, engine):
    for node in hdfs.nodes.values():
        node.rate = 100 * MB
    wanted = Wanted(hdfs, striped(hdfs))
    engine.read(wanted.pieces)
    assert wanted.right()
    assert all(served > MB for served in hdfs.served.values())
    assert nothing_under_way(engine)


@pytest.mark.parametrize("block_size", [UNIT, 100_000, MB + 17])
@pytest.mark.parametrize("checked", [True, False])
def test_parts_that_lie_in_several_blocks(hdfs, engine, block_size, checked):
    data = os.urandom(3 * MB + 5)
    hdfs.put("f", data, ["ab", "bc", "cd"], block_size=block_size)
    wanted = Wanted(hdfs, {"f": data}, checked=checked)
    engine.read(wanted.pieces)
    assert wanted.right()
    hdfs.corrupt |= {("a", block) for block in range(1, 40)}
    again = Wanted(hdfs, {"f": data}, checked=checked)
    engine.read(again.pieces)
    assert again.right()


@pytest.mark.parametrize("how", ["frozen", "dead"])
def test_a_datanode_that_stops_in_the_middle(hdfs, engine, how, caplog):
    for node in hdfs.nodes.values():
        node.rate = 20 * MB
    wanted = Wanted(hdfs, striped(hdfs))
    threading.Timer(0.1, setattr, (hdfs.nodes["b"], how, True)).start()
    engine.read(wanted.pieces)
    assert wanted.right()
    assert "b is left alone" in caplog.text.replace("DataNode b:1", "b")
    setattr(hdfs.nodes["b"], how, False)
    before, until = hdfs.served["b"], time.monotonic() + 10
    while hdfs.served["b"] == before:  # how long it is left alone depends on how often it failed
        assert time.monotonic() < until
        again = Wanted(hdfs, striped(hdfs))
        engine.read(again.pieces)
        assert again.right()
    assert nothing_under_way(engine)


def test_wrong_bytes_are_read_elsewhere_and_the_replica_is_reported(hdfs, engine, caplog):
    wanted = Wanted(hdfs, striped(hdfs))
    hdfs.corrupt = {("a", 1), ("b", 1), ("c", 2)}
    engine.read(wanted.pieces)
    assert wanted.right()
    assert nothing_under_way(engine)
    for _ in range(3):  # until each was asked once
        engine.read(Wanted(hdfs, wanted.files).pieces)
    until = time.monotonic() + 3
    while not hdfs.reported and time.monotonic() < until:
        time.sleep(0.01)
    assert hdfs.reported
    assert hdfs.reported <= hdfs.corrupt
    assert "is damaged" in caplog.text


def test_wrong_bytes_everywhere_are_an_error_that_names_them(hdfs, engine):
    wanted = Wanted(hdfs, striped(hdfs))
    hdfs.corrupt = {(key, 2) for key in "abcd"}
    with pytest.raises(DataError, match=r"of s1 is damaged|block 2 on . is damaged"):
        engine.read(wanted.pieces)
    assert nothing_under_way(engine)


@pytest.mark.parametrize(
    ("without", "corrupt", "said"), [("", "ac", ""), ("a", "b", ""), ("abc", "", "f: a block has no checksums in HDFS")]
)
def test_plain_bytes_are_verified_by_hdfs(hdfs, engine, caplog, without, corrupt, said):
    """By checksums of another replica where one has lost them; a file that was written without any is read."""
    data = os.urandom(4 * MB)
    hdfs.put("f", data, ["abc"])
    hdfs.without_checksums, hdfs.corrupt = {(key, 1) for key in without}, {(key, 1) for key in corrupt}
    wanted = Wanted(hdfs, {"f": data}, checked=False)
    engine.read(wanted.pieces)
    assert wanted.right()
    assert nothing_under_way(engine)
    assert hdfs.reported <= hdfs.corrupt
    assert without != "a" or hdfs.served["c"] >= len(data)
    assert said in caplog.text
    assert said or "no checksums" not in caplog.text


def drop_reported(hdfs: FakeHdfs, path: str):
    """The NameNode leaves a replica out of the locations from its report on."""

    def report(replica):
        kept = "".join(node.uuid for node in hdfs.blocks(path).blocks[0].nodes if node not in replica.nodes)
        FakeHdfs.report(hdfs, replica)
        hdfs.move(path, 0, kept)

    return report


@pytest.mark.parametrize("blocks", [1, 2])
def test_no_bytes_without_checksums_from_a_file_that_has_them(hdfs, engine, caplog, monkeypatch, blocks):
    data = os.urandom(MB)
    hdfs.put("f", data, ["ab", "c"], block_size=MB // blocks)
    hdfs.without_checksums, hdfs.corrupt = {("a", 1)}, {("b", 1)}
    monkeypatch.setattr(hdfs, "report", drop_reported(hdfs, "f"))
    file, buffer = hdfs.open("f"), bytearray(len(data))
    for _ in range(2):
        with pytest.raises((DataError, UncheckedReplica), match="block 1"):
            engine.read([(file, Piece(None, 0, [memoryview(buffer)]))])
        assert nothing_under_way(engine)
        until = time.monotonic() + 3
        while len(hdfs.blocks("f").blocks[0].nodes) > 1 and time.monotonic() < until:
            time.sleep(0.01)
    assert [node.uuid for node in hdfs.blocks("f").blocks[0].nodes] == ["a"]
    assert "without them" not in caplog.text


@pytest.mark.parametrize("block_size", [128 * MB, 300_000])
def test_a_replica_without_checksums_serves_who_has_checksums_of_its_own(hdfs, engine, block_size):
    data = os.urandom(MB)
    hdfs.put("f", data, ["ab"], block_size=block_size)
    blocks = range(1, 5)
    hdfs.without_checksums, hdfs.corrupt = {("a", block) for block in blocks}, {("b", block) for block in blocks}
    for _ in range(4):
        wanted = Wanted(hdfs, {"f": data})
        engine.read(wanted.pieces)
        assert wanted.right()


@pytest.mark.parametrize("how", ["gone", "dead"])
def test_only_when_all_replicas_say_so_a_file_has_no_checksums(hdfs, engine, how, caplog):
    data = os.urandom(MB)
    hdfs.put("f", data, ["abc"])
    hdfs.without_checksums = {("a", 1), ("b", 1)}
    if how == "gone":
        hdfs.gone = {("c", 1)}
    else:
        hdfs.nodes["c"].dead = True
    with pytest.raises(BootseerError):
        engine.read(Wanted(hdfs, {"f": data}, checked=False).pieces)
    assert "without them" not in caplog.text


def test_blocks_that_moved_are_found(hdfs, engine, caplog):
    caplog.set_level("INFO")
    wanted = Wanted(hdfs, striped(hdfs))
    hdfs.move("s0", 0, "d")
    engine.read(wanted.pieces)
    assert wanted.right()
    assert "asked again where the blocks of s0 are" in caplog.text


def test_a_replaced_file_is_an_error(hdfs, engine):
    wanted = Wanted(hdfs, striped(hdfs))
    hdfs.gone |= {(key, 1) for key in "abcd"}
    hdfs.put("s0", os.urandom(4 * MB), ["abc"])
    with pytest.raises(DataError, match="was replaced while it was read"):
        engine.read(wanted.pieces)


def test_no_datanode_at_all(hdfs, engine):
    wanted = Wanted(hdfs, striped(hdfs))
    for node in hdfs.nodes.values():
        node.dead = True
    with pytest.raises(UnavailableError, match="refuses"):
        engine.read(wanted.pieces)
    assert nothing_under_way(engine)
    for node in hdfs.nodes.values():
        node.dead = False
    engine.read(wanted.pieces)
    assert wanted.right()


def test_trouble_of_our_own_opens_no_breaker(hdfs, caplog, monkeypatch):
    engine = Engine(
        lambda *args, **more: hdfs.read(*args, **more), tuning=replace(QUICK, stall=30.0)
    )  # a busy machine may well be silent for a moment
    wanted = Wanted(hdfs, striped(hdfs))

    def no_socket(*args, **more):
        raise OwnLimit("this process has too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(hdfs, "read", no_socket)
        with pytest.raises(OwnLimit, match="too many open files"):
            engine.read(wanted.pieces)
    assert nothing_under_way(engine)
    assert "left alone" not in caplog.text
    assert all(node.breaker.closed for node in engine.scheduler.nodes.values())
    engine.read(wanted.pieces)
    assert wanted.right()


def test_after_an_error_nobody_touches_the_callers_memory(hdfs, engine):
    for node in hdfs.nodes.values():
        node.rate = 20 * MB
    hdfs.linger = 0.1
    wanted = Wanted(hdfs, striped(hdfs))
    hdfs.corrupt = {(key, 2) for key in "abcd"}
    with pytest.raises(DataError):
        engine.read(wanted.pieces)
    for buffer in wanted.buffers.values():
        buffer[:] = bytes(len(buffer))
    time.sleep(0.3)
    assert not any(any(buffer) for buffer in wanted.buffers.values())


def test_an_interrupted_caller_gets_its_memory_back(hdfs, engine, request):
    # a process started in the background by a shell ignores SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    hdfs.nodes["a"].frozen = True
    for node in hdfs.nodes.values():
        node.rate = 4 * MB
    hdfs.linger = 0.1
    wanted = Wanted(hdfs, striped(hdfs))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.read(wanted.pieces)
    assert time.monotonic() - began < 2.5
    for buffer in wanted.buffers.values():
        buffer[:] = bytes(len(buffer))
    time.sleep(0.2)
    assert not any(any(buffer) for buffer in wanted.buffers.values())
    assert nothing_under_way(engine)


def test_the_callers_memory_is_not_held_after_the_call(hdfs, engine):
    """A bytearray that somebody has a view of cannot be resized, a mapping not be closed."""
    wanted = Wanted(hdfs, striped(hdfs))
    hdfs.corrupt = {("a", 1), ("b", 1), ("b", 2)}
    hdfs.gone = {("c", 2), ("d", 3)}
    gc.collect()
    gc.disable()
    try:
        engine.read(wanted.pieces)
        wanted.pieces.clear()
        for buffer in wanted.buffers.values():
            buffer.extend(b"x")
    finally:
        gc.enable()


def test_a_stopped_transfer_may_write_once_more(hdfs, engine):
    """The bytes of the hedge that was quicker come after that."""
    for _ in range(3):
        hdfs.linger = 0.05
        for node in hdfs.nodes.values():
            node.rate = 40 * MB
        wanted = Wanted(hdfs, striped(hdfs, 8 * MB))
        threading.Timer(0.05, setattr, (hdfs.nodes["c"], "frozen", True)).start()
        engine.read(wanted.pieces)
        assert wanted.right()
        hdfs.nodes["c"].frozen = False
        time.sleep(0.3)


def test_many_callers_and_few_threads(hdfs, engine):
    files = striped(hdfs)

    def reader(seed: int) -> None:
        for step in range(4):
            some = dict(list(files.items())[(seed + step) % 3 :])
            wanted = Wanted(hdfs, some)
            engine.read(wanted.pieces)
            assert wanted.right()

    together(reader, range(16))
    assert engine.threads <= QUICK.total + QUICK.small_total


@pytest.mark.parametrize("block_size", [128 * MB, 300_000])
def test_a_check_with_a_bug_reaches_the_caller(hdfs, engine, block_size):
    data = os.urandom(MB)
    hdfs.put("f", data, ["abc"], block_size=block_size)

    def check(number, part):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.read([(hdfs.open("f"), Piece(None, 0, [memoryview(bytearray(MB))], check))])
    assert nothing_under_way(engine)


def test_reads_outside_of_the_file(hdfs, engine):
    hdfs.put("f", b"12345", ["abc"])
    with pytest.raises(DataError, match="ends at 5"):
        engine.read([(hdfs.open("f"), Piece(None, 0, [memoryview(bytearray(6))]))])
    engine.read([(hdfs.open("f"), Piece(None, 0, [memoryview(bytearray(0))]))])
    engine.read([])


def test_chance_faults(hdfs, engine):
    """DataNodes freeze, die, and lose and damage replicas at random under many readers; one good one is always left."""
    files = striped(hdfs, replicas=["abd", "bcd", "cda", "dab"])
    stop = threading.Event()
    for node in hdfs.nodes.values():
        node.rate = 200 * MB

    def trouble() -> None:
        step = 0
        while not stop.wait(0.05):
            step += 1
            node = hdfs.nodes["abc"[step % 3]]
            node.frozen, node.dead = step % 5 == 0, step % 7 == 0
            if step % 6 == 0:
                hdfs.corrupt = {("abc"[step % 3], 1 + step % 4)}
            if step % 4 == 0:
                hdfs.gone = {("abc"[step % 3], 1 + step % 4)}

    def reader(seed: int) -> None:
        for _ in range(5):
            wanted = Wanted(hdfs, files)
            engine.read(wanted.pieces)
            assert wanted.right()

    troubling = threading.Thread(target=trouble)
    troubling.start()
    try:
        together(reader, range(4))
    finally:
        stop.set()
        troubling.join()
    for node in hdfs.nodes.values():
        node.frozen = False
    assert nothing_under_way(engine)


def test_a_copy_that_fails_is_an_error_not_zeros(hdfs, engine, monkeypatch):
    """The bytes of a hedge that won, but did not get into the caller's memory."""

    def land(landing) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("bootseer.backends.engine.engine.land", land)
    data, failed = os.urandom(UNIT), 0
    hdfs.put("f", data, ["ab"])
    for frozen in "abab":
        hdfs.nodes[frozen].frozen = True
        wanted = Wanted(hdfs, {"f": data})
        try:
            engine.read(wanted.pieces)
            assert wanted.right()
        except MemoryError:
            failed += 1
        hdfs.nodes[frozen].frozen = False
        assert nothing_under_way(engine)
    assert failed
    assert nothing_under_way(engine)


@pytest.mark.parametrize("how", ["corrupt", "dead", "split"])
def test_the_callers_memory_is_not_held_by_an_error_that_is_gone(hdfs, engine, how):
    class Memory(bytearray):
        pass

    def check(number, part):
        raise DataError("the part that lies in several blocks is wrong")

    for node in hdfs.nodes.values():
        node.dead = how == "dead"
    hdfs.put("f", os.urandom(MB), ["abc"], block_size=300_000 if how == "split" else 128 * MB)
    if how == "corrupt":
        hdfs.corrupt = {(key, 1) for key in "abc"}
    buffer = Memory(MB)
    held = weakref.ref(buffer)
    pieces = [(hdfs.open("f"), Piece(None, 0, [memoryview(buffer)], check if how == "split" else None))]
    gc.collect()
    gc.disable()
    try:
        try:
            engine.read(pieces)
        except BootseerError as exc:
            kept = exc if how == "split" else None
        else:
            raise AssertionError
        nothing_under_way(engine)
        del pieces, buffer
        assert held() is None
        del kept
    finally:
        gc.enable()


def test_large_runs_have_more_time(hdfs, engine, monkeypatch):
    data, seen = os.urandom(12 * MB), []

    def read(*args, deadline, **options):
        seen.append(deadline)
        FakeHdfs.read(hdfs, *args, deadline=deadline, **options)

    monkeypatch.setattr(hdfs, "read", read)
    hdfs.put("f", data, ["a"])
    engine.read(Wanted(hdfs, {"f": data}, unit=12 * MB).pieces)
    assert seen == [pytest.approx(DEADLINE + 24)]


@pytest.mark.parametrize("step", ["node", "submit"])
def test_a_request_that_there_is_no_memory_for_is_an_error(hdfs, engine, monkeypatch, step):
    wanted = Wanted(hdfs, striped(hdfs))
    real, errors = getattr(engine.scheduler, step), []

    def none_left(*args):
        monkeypatch.setattr(engine.scheduler, step, real)
        raise MemoryError

    def read() -> None:
        try:
            engine.read(wanted.pieces)
        except MemoryError as exc:
            errors.append(exc)

    monkeypatch.setattr(engine.scheduler, step, none_left)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30)
    assert not reader.is_alive()
    assert len(errors) == 1
    engine.read(wanted.pieces)
    assert wanted.right()


CONTENT = os.urandom(9 * MB + 5)


@pytest.fixture
def source(hdfs, engine, monkeypatch) -> DirectSource:
    """A plain file of 9 MB and a bit, in blocks of 4 MB, read through ``engine``."""
    monkeypatch.setattr("bootseer.backends.engine.engine.shared", lambda: engine)
    hdfs.put("f", CONTENT, AROUND, block_size=4 * MB)
    source = DirectSource("hdfs://n:1", "f", hdfs.blocks("f"), None)
    source.file = hdfs.open("f")
    return source


def test_a_long_read_comes_from_several_datanodes(hdfs, source):
    for node in hdfs.nodes.values():
        node.rate = 50 * MB
    assert source.read(3, 3 * MB) == CONTENT[3 : 3 * MB + 3]
    assert sum(served >= MB for served in hdfs.served.values()) >= 2


def test_pieces_come_in_order_while_the_next_are_read(hdfs, engine, source):
    lengths = [700_000] * 13
    came = source.pieces(5, lengths)
    first = next(came)
    until(lambda: sum(hdfs.served.values()) >= 4 * 700_000, 20, "what nobody has asked for yet")
    assert first + b"".join(came) == CONTENT[5 : 5 + sum(lengths)]
    assert list(source.pieces(0, [])) == []
    assert nothing_under_way(engine)


def test_pieces_that_nobody_wants_any_more_are_not_read_on(hdfs, engine, source):
    came = source.pieces(0, [MB] * 9)
    next(came)
    for node in hdfs.nodes.values():
        node.frozen = True
    assert len(next(came)) == MB  # of the first read
    began = time.monotonic()
    came.close()
    assert time.monotonic() - began < 5
    assert nothing_under_way(engine)


def test_pieces_past_the_end_are_an_error(source):
    with pytest.raises(DataError, match="f ends at"):
        list(source.pieces(9 * MB, [6]))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_reading_that_crosses_a_fork_ends_in_the_child(hdfs, engine):
    """The parent's threads go on with it; the child has none of them, and maybe a lock that one of them had."""
    for node in hdfs.nodes.values():
        node.rate = 20 * MB
    wanted = Wanted(hdfs, striped(hdfs))
    reading = engine.begin(wanted.pieces)
    with engine._lock:
        if not (child := os.fork()):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            try:
                reading.leave()
                reading.wait()
            except UnavailableError:
                os._exit(3)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    reading.wait()
    assert wanted.right()
