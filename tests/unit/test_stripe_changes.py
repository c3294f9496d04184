"""Files that are written through a mount by several at once: in which order their requests come."""

import errno
import os
import threading
from collections.abc import Iterator

import pytest

from bootseer import faults
from bootseer.errors import DataError, NotWritableError
from bootseer.fsmount.changes import WritableStripes
from bootseer.fsmount.openfiles import OpenFiles
from bootseer.fsmount.spool import Spools
from bootseer.fsmount.unfinished import Unfinished
from bootseer.kernel import fuse
from bootseer.stripefs import open_fs
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.store import StripeFS
from support.modes import KeepsModes


@pytest.fixture
def ops(tmp_path) -> Iterator[WritableStripes]:
    fs = open_fs(str(tmp_path / "store"))
    fs.backend.make_folder("")
    ahead = ReadAhead()
    made = WritableStripes(fs, ahead, Spools(tmp_path))
    yield made
    made.close()
    ahead.close()


def asks() -> fuse.Context:
    return fuse.Context(1, 0, os.getpid(), os.geteuid(), os.getegid())


def stored(ops: WritableStripes, path: str) -> bytes | None:
    fs = ops._fs
    if path not in [found.path for found in fs.ls()]:
        return None
    with fs.open(path) as file:
        return file.read(0, file.size)


def put(ops: WritableStripes, name: str, data: bytes) -> tuple[int, int]:
    """A new file that is not closed yet: its node and handle."""
    entry, handle = ops.create(fuse.ROOT, name, os.O_WRONLY, 0o644, asks())
    ops.write(handle, 0, memoryview(data), asks())
    return entry.node, handle


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC])
def test_a_file_that_is_opened_again_while_it_is_released(ops, monkeypatch, flags):
    """RELEASE comes after close(2) has returned, beside what the process asks next."""
    node, first = put(ops, "f", b"old")
    ops.flush(first, asks())

    real = Unfinished.truncate

    def truncate(self, size):
        real(self, size)
        if ops._versions.opened(first):
            ops.release(first, asks())

    monkeypatch.setattr(Unfinished, "truncate", truncate)
    second = ops.open(node, flags, asks())
    assert stored(ops, "f") == b"old"
    if ops._versions.opened(first):
        ops.release(first, asks())
    ops.write(second, 0 if flags & os.O_TRUNC else 3, memoryview(b"new"), asks())
    ops.flush(second, asks())
    ops.release(second, asks())
    assert stored(ops, "f") == (b"new" if flags & os.O_TRUNC else b"oldnew")


def test_a_file_whose_last_handle_goes_while_another_is_opened(ops, monkeypatch):
    node, first = put(ops, "f", b"old")
    ops.flush(first, asks())
    real = OpenFiles.hand_out

    def hand_out(self, *args):
        if self._versions.opened(first):
            self.release(first, asks())
        return real(self, *args)

    monkeypatch.setattr(OpenFiles, "hand_out", hand_out)
    second = ops.open(node, os.O_WRONLY, asks())
    ops.write(second, 3, memoryview(b"new"), asks())
    ops.flush(second, asks())
    ops.release(second, asks())
    assert stored(ops, "f") == b"oldnew"


def test_a_checkpoint_above_is_looked_for_once_for_a_small_file(ops, monkeypatch):
    """On HDFS each look is a call of the NameNode, in every folder up to the root."""
    looked: list[str] = []
    real = type(ops._fs.backend).stat
    monkeypatch.setattr(type(ops._fs.backend), "stat", lambda *args: looked.append(args[1]) or real(*args))  # type: ignore[func-returns-value]
    for name in ("first", "second"):
        looked.clear()
        _, handle = put(ops, name, b"bytes")
        ops.flush(handle, asks())
        ops.release(handle, asks())
    manifests = [path for path in looked if path.rpartition("/")[2] == "COMMIT"]
    assert len(manifests) <= len(set(manifests)) + 2, "in its own folder also when it is opened"
    ops._fs.commit("")
    with pytest.raises(OSError, match="Operation not permitted"):
        put(ops, "third", b"bytes")


def test_a_handle_of_a_server_before_this_one_does_not_empty_the_file(ops):
    node, handle = put(ops, "f", b"old")
    ops.flush(handle, asks())
    ops.release(handle, asks())
    with pytest.raises(OSError, match="Input/output error"):
        ops.setattr(node, fuse.Change(size=0, fh=handle), asks())
    assert stored(ops, "f") == b"old"


def test_a_file_that_is_written_and_closed_while_it_is_renamed_is_at_its_new_name(ops, monkeypatch):
    _, handle = put(ops, "tmp", b"abc")
    real, closing = ops._fs.rename, []

    def write_and_close():
        ops.write(handle, 3, memoryview(b"def"), asks())
        ops.flush(handle, asks())

    def rename(*args, **kwargs):
        real(*args, **kwargs)
        closing.append(threading.Thread(target=write_and_close))
        closing[0].start()
        closing[0].join(0.5)

    monkeypatch.setattr(ops._fs, "rename", rename)
    ops.rename(fuse.ROOT, "tmp", fuse.ROOT, "f", asks(), overwrite=True)
    closing[0].join(10)
    assert stored(ops, "tmp") is None
    assert stored(ops, "f") == b"abcdef"


def test_a_file_that_is_made_private_while_it_is_open_has_private_stripes_from_then_on(tmp_path):
    backend = KeepsModes(tmp_path)
    ahead = ReadAhead()
    ops = WritableStripes(StripeFS(backend), ahead, Spools(tmp_path), width=2)
    node, handle = put(ops, "f", b"x")
    ops.fsync(handle, asks())
    ops.setattr(node, fuse.Change(mode=0o600), asks())
    backend.made.clear()
    ops.write(handle, 1, memoryview(bytes(5 << 20)), asks())
    ops.flush(handle, asks())
    ops.close()
    ahead.close()
    assert {mode for path, mode in backend.made if ".bsx" in path} == {0o600}


@pytest.mark.parametrize("when", ["copied", "lost", "removed"])
def test_a_file_that_is_written_while_it_moves_to_another_folder_stays(ops, monkeypatch, when):
    def write() -> None:
        with ops._fs.create("a/f", striped=True) as out:
            out.write(b"new")

    def point(name: str) -> None:
        real(name)
        if name == ("stripefs.move.remove" if when == "removed" else "stripefs.move.copy"):
            monkeypatch.setattr(faults, "point", real)
            write()
            if when == "lost":
                raise DataError("a/f was replaced while it was read")

    with ops._fs.create("a/f", striped=True) as out:
        out.write(b"old")
    real = faults.point
    monkeypatch.setattr(faults, "point", point)
    with pytest.raises(NotWritableError, match="a/f was written while it was moved: that version stays"):
        ops._fs.rename("a/f", "b/f")
    with ops._fs.open("a/f") as file:
        assert file.read(0, file.size) == b"new"


@pytest.mark.parametrize("size", [5000, 5 << 20])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_whose_times_were_set_while_it_is_open_is_added_to(tmp_path, size, replaced):
    """Unless it is another writer's by then."""
    fs, ahead = open_fs(str(tmp_path / "store")), ReadAhead()
    fs.backend.make_folder("")
    ops = WritableStripes(fs, ahead, Spools(tmp_path, 0), width=2)
    node, handle = put(ops, "f", b"a" * size)
    ops.fsync(handle, asks())
    if replaced:
        with fs.create("f", width=2) as out:
            out.write(b"b" * size)
    ops.setattr(node, fuse.Change(mtime_ns=10**18), asks())
    if replaced:
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            ops.write(handle, size, memoryview(b"c"), asks())
    else:
        ops.write(handle, size, memoryview(b"c"), asks())
        ops.flush(handle, asks())
        assert stored(ops, "f") == b"a" * size + b"c"
    ops.close()
    ahead.close()
