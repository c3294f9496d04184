"""A write whose storage fails under it: what is tried again, what is left, and writers that wake up late."""

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.backends import folder
from bootseer.backends.interface import Backend, Entry
from bootseer.errors import DataError, FullError, NotWritableError, ReplacedError, UnavailableError
from bootseer.kernel import finalisers
from bootseer.stripefs import layout, open_fs
from bootseer.stripefs.copy import copy_file
from bootseer.stripefs.files import publication, stripe
from bootseer.stripefs.files.reader import content_of
from bootseer.stripefs.files.stripe import StripeLost
from bootseer.stripefs.layout import POINTER_LINE
from bootseer.stripefs.maintenance import check, collect
from bootseer.stripefs.store import StripeFS
from support.forks import in_child
from support.modes import KeepsModes
from support.stripes import content

UNIT = 4096


def stripes(fs: StripeFS) -> list[str]:
    return [path.name for path in Path(fs.url).rglob("*") if path.parent.name == ".bsx" and path.suffix]


def content_at(fs: StripeFS, name: str) -> str:
    found = fs.stat(name)
    return content_of(found.version, found.uuid)


def renewed(real: Callable[[Backend, str], Entry | None]) -> Callable[[Backend, str], Entry | None]:
    """What is claimed is claimed by another whenever one looks."""

    def entry_at(backend: Backend, path: str) -> Entry | None:
        found = real(backend, path)
        return found and found._replace(version=str(time.monotonic()))

    return entry_at


class Flaky:
    """Makes the storage lose stripes: the first ``failures`` writes of a chunk to stripe 1 fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self.left = failures
        real = folder.FolderSink.write

        def failing(sink: folder.FolderSink, data: bytes | memoryview) -> None:
            if self.left and sink._path.suffix == ".1" and len(data) == UNIT and data[:1] != b"B":
                self.left -= 1
                raise UnavailableError("every DataNode of a block failed")
            real(sink, data)

        monkeypatch.setattr(folder.FolderSink, "write", failing)


def test_put_begins_anew_when_a_stripe_is_lost(fs, tmp_path, monkeypatch, caplog):
    data = os.urandom(layout.PLAIN_BELOW + 5)
    (tmp_path / "large").write_bytes(data)
    Flaky(monkeypatch, 1)
    fs.put(tmp_path / "large", "f", unit=UNIT)
    assert content(fs, "f") == data
    assert "storing" in caplog.text
    assert "again from its beginning" in caplog.text
    assert len(stripes(fs)) == 4  # none of the first attempt


def test_put_gives_up_the_second_time(fs, tmp_path, monkeypatch):
    (tmp_path / "large").write_bytes(bytes(layout.PLAIN_BELOW + 5))
    Flaky(monkeypatch, 2)
    with pytest.raises(StripeLost, match="every DataNode"):
        fs.put(tmp_path / "large", "f", unit=UNIT)
    assert stripes(fs) == []


def test_a_lost_stripe_ends_a_write_whose_bytes_are_gone(fs, monkeypatch):
    Flaky(monkeypatch, 1)
    with pytest.raises(StripeLost), fs.create("f", striped=True, unit=UNIT) as out:
        out.write(b"x" * 100 * UNIT)
    assert stripes(fs) == []


def test_publishing_waits_for_a_storage_that_is_away(fs, monkeypatch, caplog):
    monkeypatch.setattr(publication, "OUTAGE", 0.1)  # the rename waits longer: it may have happened
    real, calls = folder.FolderBackend.rename, [0]

    def away(self: folder.FolderBackend, src: str, dst: str, *, overwrite: bool) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise UnavailableError("no answer")
        if calls[0] == 2:  # it happens, but the answer is lost
            real(self, src, dst, overwrite=overwrite)
            raise UnavailableError("no answer")
        real(self, src, dst, overwrite=overwrite)

    monkeypatch.setattr(folder.FolderBackend, "rename", away)
    with fs.create("f", striped=True, unit=UNIT) as out:
        out.write(b"x" * 9 * UNIT)
    assert calls[0] == 3
    assert content(fs, "f") == b"x" * 9 * UNIT
    assert "publishing goes on" in caplog.text


def test_a_storage_that_stays_away_is_an_error_in_time(fs, monkeypatch):
    monkeypatch.setattr(publication, "UNKNOWN", 0.3)

    def away(*args: object, **options: object) -> None:
        raise UnavailableError("no answer")

    monkeypatch.setattr(folder.FolderBackend, "rename", away)
    begin = time.monotonic()
    with pytest.raises(UnavailableError), fs.create("f", striped=True, unit=UNIT) as out:
        out.write(b"x" * 9 * UNIT)
    assert time.monotonic() - begin < 10


def test_a_storage_that_hangs_is_an_error_in_time(fs, monkeypatch):
    monkeypatch.setattr(stripe, "STALL", 0.5)
    release = threading.Event()

    def hanging(sink: folder.FolderSink, data: bytes | memoryview) -> None:
        release.wait(30)

    monkeypatch.setattr(folder.FolderSink, "write", hanging)
    out = fs.create("f", striped=True, unit=UNIT, width=1)
    try:
        with pytest.raises(UnavailableError, match="has not gone on"):
            out.write(b"x" * 50 * UNIT)
    finally:
        release.set()
        out.abandon()


def test_a_stripe_that_hangs_hides_no_error_and_keeps_no_other_from_going(fs, monkeypatch):
    monkeypatch.setattr(stripe, "STALL", 0.5)
    release, real = threading.Event(), folder.FolderSink.write

    def hanging(sink: folder.FolderSink, data: bytes | memoryview) -> None:
        if sink._path.name.endswith(".0"):
            release.wait(30)
        real(sink, data)

    def fail() -> None:
        with fs.create("f", striped=True, unit=UNIT, width=2) as out:
            out.write(b"x" * 8 * UNIT)  # the queue of the first stripe is full now
            raise ValueError("mine")

    monkeypatch.setattr(folder.FolderSink, "write", hanging)
    try:
        with pytest.raises(ValueError, match="mine"):
            fail()
        assert not [entry.name for entry in fs.backend.list(layout.FOLDER) if entry.name.endswith(".1")]
    finally:
        release.set()


def test_many_small_writes_and_changing_memory(fs):
    data, buffer = os.urandom(3 * UNIT * 7 + 5), bytearray(77)
    with fs.create("f", striped=True, unit=UNIT, width=3) as out:
        for at in range(0, len(data), 77):
            piece = data[at : at + 77]
            buffer[: len(piece)] = piece
            assert out.write(memoryview(buffer)[: len(piece)]) == len(piece)
    assert content(fs, "f") == data


def test_an_array_of_nothing_is_written_and_filled(fs):
    np = pytest.importorskip("numpy")
    with fs.create("f") as out:
        assert [out.write(array) for array in (np.zeros((0, 3)), np.ones((2, 3)), np.zeros((3, 0)))] == [0, 48, 0]
    with fs.open("f") as file:
        file.readinto(0, memoryview(np.zeros((0, 3))))


ZOMBIE = """
import sys
from bootseer.errors import BootseerError
from bootseer.stripefs import open_fs
fs = open_fs(sys.argv[1])
try:
    with fs.create("ck/f", striped=True, unit=4096, width=3) as out:
        out.write(b"zombie" * 9000)
except BootseerError as exc:
    sys.exit(exc.exit_code)
"""


@pytest.mark.parametrize(("point", "code"), [("stripe@5", 73), ("close@2", 73), ("pointer", 73), ("rename", 0)])
def test_a_writer_that_wakes_up_after_a_takeover(fs, point, code):
    """Before its check of the pointer it gives up. Between check and rename it may win: then the file is wholly its."""
    with fs.create("ck/f", striped=True, unit=UNIT, width=3) as out:
        out.write(b"first" * 9000)
    name, _, nth = point.partition("@")
    fault = f"stripefs.write.{name}=stop{'@' + nth if nth else ''}"
    zombie = subprocess.Popen([sys.executable, "-c", ZOMBIE, fs.url], env={**os.environ, "BOOTSEER_FAULTS": fault})
    try:
        # it stops itself where the fault says, and is continued after another writer has published
        assert os.WIFSTOPPED(os.waitpid(zombie.pid, os.WUNTRACED)[1])
        with fs.create("ck/f", striped=True, unit=UNIT, width=3) as out:
            out.write(b"second" * 9000)
        assert content(fs, "ck/f") == b"second" * 9000
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(20) == code
    finally:
        zombie.kill()
        zombie.wait(20)
    assert content(fs, "ck/f") == (b"second" if code else b"zombie") * 9000
    fs.verify("ck")
    if code:
        assert len(stripes(fs)) == 3


def test_no_temporary_file_is_left_by_a_storage_whose_sinks_keep_what_was_closed(fs, monkeypatch):
    def refuse(pointer: object) -> None:
        raise UnavailableError("not now")

    real = folder.FolderSink.abandon
    monkeypatch.setattr(folder.FolderSink, "abandon", lambda sink: None if sink._file.closed else real(sink))
    for striped in (False, True):
        with (
            pytest.raises(UnavailableError, match="not now"),
            fs.create("f", striped=striped, unit=UNIT, before=refuse) as out,
        ):
            out.write(b"x")
    assert [path for path in Path(fs.url).rglob("*") if path.is_file()] == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("reason", [None, ValueError])
def test_a_forked_child_leaves_its_parents_file_alone(fs, reason):
    with fs.create("f", striped=True, unit=UNIT) as out:
        out.write(b"x" * 9 * UNIT)
        leave = (lambda: out.__exit__(None, None, None)) if reason is None else out.abandon
        assert in_child(leave) == 0
        assert len(stripes(fs)) == 4
        out.write(b"y" * UNIT)
        assert in_child(lambda: out.write(b"z")) == 3
        assert in_child(out.finish) == 3
        out.finish()
        assert in_child(leave) == 0
    assert content(fs, "f") == b"x" * 9 * UNIT + b"y" * UNIT


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_a_file_is_published_leaves_it_alone(fs):
    def fork(pointer: object) -> None:
        def unwind() -> None:
            frames.append(1)
            raise ZeroDivisionError

        if not (child := os.fork()):
            unwind()
        children.append(os.waitpid(child, 0)[1])

    frames: list[int] = []
    children: list[int] = []
    try:
        with fs.create("f", striped=True, unit=UNIT, before=fork) as out:
            out.write(b"x" * 9 * UNIT)
    finally:
        if frames:
            os._exit(len(stripes(fs)))
    assert [os.waitstatus_to_exitcode(status) for status in children] == [4]
    assert content(fs, "f") == b"x" * 9 * UNIT


def test_a_forgotten_writer_leaves_no_threads_and_no_files(fs, caplog):
    def mine() -> int:
        return sum(thread.name.startswith("bootseer-write") for thread in threading.enumerate())

    before = mine()
    for index in range(3):
        writer = fs.create(f"f{index}", striped=True, unit=4096, width=3)
        writer.write(b"x" * 20000)
        assert mine() > before
        del writer
        gc.collect()
        finalisers.settle(30)
        assert mine() == before
        assert f"f{index} is not published" in caplog.text
    assert [path for path in Path(fs.url).rglob("*") if path.is_file()] == []


def test_content_that_looks_like_a_pointer_is_striped_however_it_is_written(tmp_path):
    fs, data = open_fs(str(tmp_path)), POINTER_LINE + bytes(3 * UNIT)
    with fs.create("f", unit=UNIT, width=3) as out:
        for number in range(len(data)):
            out.write(data[number : number + 1])
        assert out.finish().uuid
    with fs.open("f") as file:
        assert file.read(0, file.size) == data
    assert check.fsck(fs.backend).findings == ()


def test_stripes_that_cannot_be_removed_are_garbage_later(tmp_path, monkeypatch, caplog):
    fs = open_fs(str(tmp_path))
    for data in (b"old", b"new"):
        with fs.create("f", striped=True, unit=UNIT, width=3) as out:
            out.write(data)
            if data == b"new":
                monkeypatch.setattr(os, "unlink", refused)
    assert "are left behind" in caplog.text
    monkeypatch.undo()
    with fs.open("f") as file:
        assert file.read(0, 3) == b"new"
    assert collect.gc(fs.backend, age=0)
    assert len(os.listdir(tmp_path / ".bsx")) == 3
    assert check.fsck(fs.backend).findings == ()


def refused(*_, **__):
    raise PermissionError(errno.EACCES, "no")


@pytest.mark.parametrize("error", [NotWritableError("permission denied"), FullError("the disk is full")])
@pytest.mark.parametrize("exists", [False, True])
def test_an_error_after_the_rename_costs_no_stripe(fs, monkeypatch, caplog, error, exists):
    """As of a folder that can be written and not read: its name is changed, and it cannot be synced."""
    if exists:
        with fs.create("f", striped=True, unit=UNIT) as out:
            out.write(b"old")
    real = fs.backend.rename

    def rename(src: str, dst: str, *, overwrite: bool) -> None:
        real(src, dst, overwrite=overwrite)
        if dst == "f":
            raise error

    monkeypatch.setattr(fs.backend, "rename", rename)
    writer = fs.create("f", striped=True, unit=UNIT)
    writer.write(b"new")
    with pytest.raises(type(error)):
        writer.finish()
    assert "its stripes are left in place" in caplog.text
    assert content(fs, "f") == b"new"
    collect.gc(fs.backend, age=0)
    fs.verify()
    assert check.fsck(fs.backend).findings == ()


def test_a_folder_that_cannot_be_read_keeps_what_was_published(fs, monkeypatch):
    real = os.open

    def refuse(path: Path, flags: int, *more: int, **named: int) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "no")
        return real(path, flags, *more, **named)

    writer = fs.create("f", striped=True, unit=UNIT)
    writer.write(b"new")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NotWritableError):
        writer.finish()
    monkeypatch.undo()
    assert content(fs, "f") == b"new"


@pytest.mark.parametrize("how", ["appended to", "striped in place"])
def test_a_private_file_that_is_stored_anew_stays_private_and_whose_it_is(tmp_path, how):
    backend = KeepsModes(tmp_path)
    (tmp_path / "f").write_bytes(b"secret" * (1 << 20))
    backend.change("f", mode=0o640, owner=("alice", "research"))
    fs = StripeFS(backend)
    if how == "appended to":
        with fs.append("f") as out:
            out.write(b"more")
    else:
        copy_file(fs, "f", fs, "f")
    assert fs.stat("f").striped
    assert {mode for path, mode in backend.made if ".bsx" in path} == {0o640}  # from the start
    assert backend.rights() == {(0o640, ("alice", "research"))}


def test_what_is_no_file_or_may_not_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes went to a pipe's place, and were left there; another user's private file was replaced."""
    fs = open_fs(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "private").write_bytes(b"theirs" * 1_000_000)
    real = folder.FolderBackend.open

    def opened(self: folder.FolderBackend, path: str, *, pinned: bool = False) -> object:
        if path == "private":
            raise NotWritableError("Permission denied")
        return real(self, path, pinned=pinned)

    monkeypatch.setattr(folder.FolderBackend, "open", opened)
    for path in ("pipe", "private"):
        with pytest.raises((NotWritableError, DataError)):
            fs.create(path, striped=True)
    assert stripes(fs) == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["private"]


class TestClaims:
    """Who replaces a file claims its name meanwhile."""

    @pytest.fixture(autouse=True)
    def short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(publication, "_STEP", 0.2)

    def replace(self, fs: StripeFS, data: bytes) -> None:
        with fs.create("a", known=content_at(fs, "a")) as out:
            out.write(data)

    def test_that_of_a_writer_that_died_is_taken_away(self, tmp_path: Path) -> None:
        fs = open_fs(str(tmp_path))
        with fs.create("a") as out:
            out.write(b"old")
        with publication.alone(fs.backend, "a"):
            (left,) = tmp_path.glob(".tmp-*")
        left.touch()
        self.replace(fs, b"new")
        assert content(fs, "a") == b"new"
        assert list(tmp_path.glob(".tmp-*")) == []

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("maker", [os.geteuid(), pytest.param(65534, marks=pytest.mark.root)])
    def test_a_link_to_nothing_in_its_place_is_not_waited_for_without_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: int
    ) -> None:
        fs = open_fs(str(tmp_path))
        with fs.create("a") as out:
            out.write(b"old")
        with publication.alone(fs.backend, "a"):
            (left,) = tmp_path.glob(".tmp-*")
        left.symlink_to(tmp_path / "nothing")
        os.chown(left, maker, maker, follow_symlinks=False)
        monkeypatch.setattr(publication, "OUTAGE", 1.0)
        with contextlib.suppress(NotWritableError):  # one that nobody can see is one of others, or was taken away
            self.replace(fs, b"new")
        assert content(fs, "a") in (b"old", b"new")

    def test_who_was_taken_for_dead_replaces_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As after an outage in which both waited."""
        fs = open_fs(str(tmp_path))
        with fs.create("a") as out:
            out.write(b"old")
        real, calls = folder.FolderBackend.rename, list[str]()

        def rename(self: folder.FolderBackend, src: str, dst: str, *, overwrite: bool) -> None:
            calls.append(src)
            if len(calls) == 1:
                time.sleep(0.3)
                other = threading.Thread(target=TestClaims().replace, args=(fs, b"another's"))
                other.start()
                other.join(10)
                raise UnavailableError("the NameNode does not answer")
            real(self, src, dst, overwrite=overwrite)

        monkeypatch.setattr(folder.FolderBackend, "rename", rename)
        with pytest.raises(ReplacedError):
            self.replace(fs, b"late")
        assert content(fs, "a") == b"another's"

    def test_a_name_that_is_claimed_all_the_time_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fs = open_fs(str(tmp_path))
        with fs.create("a") as out:
            out.write(b"old")
        monkeypatch.setattr(publication, "OUTAGE", 0.5)
        monkeypatch.setattr(publication, "entry_at", renewed(publication.entry_at))
        with publication.alone(fs.backend, "a"), pytest.raises(NotWritableError, match="all the time"):
            publication.alone(fs.backend, "a").__enter__()
