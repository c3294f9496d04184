"""What goes through ``hdfs-native`` when a call fails or is late. The native client is a double."""

import threading
from collections.abc import Callable

import pytest

from bootseer.errors import BootseerError, ConfigError, DataError, UnavailableError, UnsupportedError
from bootseer.hdfs.client import HdfsClient, HdfsReader, HdfsWriter
from support.forks import in_child
from support.waits import until


class Native:
    """A native client, and a native writer, of one file. ``step`` is called by each write, ``end`` by each close."""

    def __init__(self) -> None:
        self.data = b""
        self.deleted: list[str] = []
        self.closed = 0
        self.step: Callable[[], None] = lambda: None
        self.end: Callable[[], None] = lambda: None

    def write(self, data: bytes) -> None:
        self.step()
        self.data += data

    def close(self) -> None:
        self.end()
        self.closed += 1

    def delete(self, path: str, recursive: bool) -> bool:
        self.deleted.append(path)
        return True


@pytest.fixture
def native() -> Native:
    return Native()


@pytest.fixture
def out(native) -> HdfsWriter:
    client = HdfsClient("hdfs://n:1", deadline=5.0)
    client._client = native
    return HdfsWriter(client, "/f", native)


def fail() -> None:
    raise OSError("every DataNode failed")


def goes_on(out: HdfsWriter) -> None:
    for step in (lambda: out.write(b"b"), out.close, out.close):
        with pytest.raises(UnavailableError, match="an earlier write of it failed") as caught:
            step()
        assert caught.value.__cause__ is not None


def test_after_a_write_that_failed_no_other_one_and_no_close_succeeds(out, native):
    native.step = fail
    with pytest.raises(BootseerError, match="every DataNode failed"):
        out.write(b"a")
    native.step = lambda: None
    goes_on(out)
    assert (native.data, native.closed) == (b"", 0)
    out.abandon()
    out.abandon()
    assert native.deleted == ["/f"]


def test_after_a_write_that_is_late_none_runs_beside_it(out, native):
    release = threading.Event()
    native.step = lambda: release.wait(20)
    out._client.deadline = 0.05
    with pytest.raises(UnavailableError, match="no answer within"):
        out.write(b"a")
    out._client.deadline = 5.0
    goes_on(out)
    release.set()
    until(lambda: native.data == b"a")
    out.abandon()


def test_a_close_that_failed_is_no_success_the_second_time(out, native):
    native.end = fail
    with pytest.raises(BootseerError, match="every DataNode failed"):
        out.close()
    native.end = lambda: None
    goes_on(out)
    assert native.closed == 0
    out.abandon()


def test_a_context_whose_close_fails_removes_the_file_and_one_that_succeeds_does_not(out, native):
    with out:
        out.write(b"a")
    out.close()
    assert (native.closed, native.deleted) == (1, [])
    with pytest.raises(ZeroDivisionError), out:
        raise ZeroDivisionError
    assert native.deleted == []
    with pytest.raises(ValueError, match="closed"):
        out.write(b"b")
    late = HdfsWriter(out._client, "/g", native)  # type: ignore[arg-type]
    native.end = fail
    with pytest.raises(BootseerError), late:
        late.write(b"a")
    out.abandon()  # it is closed
    late.abandon()
    assert native.deleted == ["/g"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_file_alone(out, native, monkeypatch, tmp_path):
    monkeypatch.setattr(Native, "delete", lambda *_: (tmp_path / "deleted").touch())
    out._client._client = native  # type: ignore[assignment]
    for step in (out.abandon, lambda: out.__exit__(None, None, None)):
        assert in_child(step) == 0
    for step in (lambda: out.write(b"x"), out.close):
        assert in_child(step) == 3
    assert not (tmp_path / "deleted").exists()


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
def test_what_cannot_be_a_host_is_one_line(host):
    with pytest.raises(ConfigError, match="cannot be the name of a host"):
        HdfsClient(f"hdfs://{host}:8020").open("/")


XOR = 'UnsupportedErasureCodingPolicy("codec: xor")'


@pytest.mark.parametrize(
    ("said", "error", "asked"),
    [
        ([XOR], None, 2),
        ([XOR, XOR], UnavailableError, 2),
        ([XOR, "ChecksumError"], DataError, 2),
        (['UnsupportedErasureCodingPolicy("ID: 7")'], UnsupportedError, 1),
        (["ChecksumError"], DataError, 1),
    ],
)
def test_cells_of_an_xor_code_that_a_late_datanode_has_are_asked_for_once_more(native, said, error, asked):
    """Red before: the read of a file that was whole was an error whenever a DataNode was slow."""
    left, calls = list(said), []

    class Reader:
        def __len__(self) -> int:
            return 3

        def read_range(self, offset: int, length: int) -> bytes:
            calls.append((offset, length))
            if left:
                raise RuntimeError(left.pop(0))
            return b"bc"

    client = HdfsClient("hdfs://n:1", deadline=5.0)
    client._client = native
    reader = HdfsReader(client, "/f", Reader())  # type: ignore[arg-type]
    if error is None:
        assert reader.read(1, 2) == b"bc"
    else:
        with pytest.raises(error, match="cannot read /f"):
            reader.read(1, 2)
    assert calls == [(1, 2)] * asked
