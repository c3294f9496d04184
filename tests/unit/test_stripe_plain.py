"""Plain files that change under a reader: their own bytes or an error, never those of another file or version."""

import os
from pathlib import Path
from typing import cast

import pytest

from bootseer.backends.engine.transport import BlockFile
from bootseer.backends.hdfs_direct import DirectSource
from bootseer.backends.hdfs_native import READERS, NativeSource
from bootseer.backends.interface import Backend, Source
from bootseer.errors import DataError, NotWritableError
from bootseer.fsmount.operations import StripeOperations
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.proto.hdfs_pb2 import Token
from bootseer.hdfs.records import Block, DataNode, FileBlocks, Located
from bootseer.stripefs import open_fs
from bootseer.stripefs.copy import copy_file
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.nodecache import NodeCache
from bootseer.stripefs.store import StripeFS

TIME = 1_750_000_000_000_000_000
SIZE = 10_000


def place(fs: StripeFS, name: str, data: bytes, time: int = TIME) -> None:
    """A new file at ``name``, by a rename as other tools do it, with a modification time of its own choice."""
    target = Path(fs.url, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f"{target.name}.new")
    new.write_bytes(data)
    os.utime(new, ns=(time, time))
    new.rename(target)


@pytest.mark.parametrize("disk", [False, True])
def test_files_of_equal_size_and_time_do_not_share_a_cache(fs, tmp_path, disk):
    cache = NodeCache(tmp_path / "cache") if disk else None
    loader = ReadAhead(memory=8 << 20)
    try:
        for name in ("a", "b"):
            place(fs, name, name.encode() * SIZE)
        for name in ("a", "b"):
            with fs.open(name) as file:
                if cache:
                    assert cache.open(file) is None, "nothing says what its bytes must be"
                found = loader.read(file, 0, SIZE)
                data = os.pread(found[0], SIZE, found[1]) if isinstance(found, tuple) else bytes(found)
                assert data == name.encode() * SIZE
    finally:
        loader.close()
        if cache:
            cache.close()


def test_stores_of_equal_paths_do_not_share_an_identity(tmp_path):
    identities = set()
    for name in ("one", "two"):
        fs = open_fs(str(tmp_path / name))
        place(fs, "f", b"x" * SIZE)
        with fs.open("f") as file:
            identities.add(file.identity)
            assert Path(file.identity).name == file.identity  # it names a file of the node cache
    assert len(identities) == 2


def test_ranges_one_behind_the_other_are_one_piece(fs, monkeypatch):
    data = os.urandom(3 << 20)
    place(fs, "f", data)
    asked, read_many = [], fs.backend.read_many
    monkeypatch.setattr(fs.backend, "read_many", lambda pieces: asked.append(pieces) or read_many(pieces))
    buffers = [bytearray(1 << 20), bytearray(10), bytearray(1 << 20)]
    starts = [0, 1 << 20, (1 << 20) + 20]
    with fs.open("f") as file:
        asked.clear()
        file.readinto_many([(start, memoryview(buffer)) for start, buffer in zip(starts, buffers, strict=True)])
    assert [(piece.offset, len(piece.parts)) for piece in asked[0]] == [(0, 2), (starts[2], 1)]
    assert buffers == [data[start : start + len(buffer)] for start, buffer in zip(starts, buffers, strict=True)]


@pytest.mark.parametrize("time", [TIME, TIME + 1])
def test_a_file_opened_again_is_the_same_version(fs, time):
    place(fs, "f", b"a" * SIZE)
    with fs.open("f") as file:
        place(fs, "f", b"b" * SIZE, time)
        assert file.read(0, 3) == b"aaa"  # the open file is still the old one
        file._drop(0)  # as after a failed read
        with pytest.raises(DataError, match="was replaced while it was read"):
            file.read(0, 3)


def test_a_mount_opens_what_is_there_now_and_has_the_kernel_forget_what_was(fs):
    """A name that leads to a newer file since it was looked up is no error: "Stale file handle" ended programs that
    poll a file."""
    place(fs, "f", b"a" * SIZE)
    loader = ReadAhead(memory=1 << 20)
    operations, forgotten = StripeOperations(fs, loader), list[int]()
    operations.invalidate = forgotten.append
    try:
        old = operations.lookup(1, "f", None)  # type: ignore[arg-type]
        handle = operations.open(old.node, os.O_RDONLY, None)  # type: ignore[arg-type]
        operations.release(handle, None)  # type: ignore[arg-type]
        place(fs, "f", b"b" * SIZE)
        handle = operations.open(old.node, os.O_RDONLY, None)  # type: ignore[arg-type]
        assert forgotten == [old.node]
        assert bytes(operations.read(handle, 0, 3, None)) == b"bbb"  # type: ignore[arg-type]
        place(fs, "f", b"c" * SIZE)  # while it is open
        other = operations.open(old.node, os.O_RDONLY, None)  # type: ignore[arg-type]
        assert bytes(operations.read(other, 0, 3, None)) == b"bbb"  # type: ignore[arg-type]
        assert operations.lookup(1, "f", None).node != old.node  # type: ignore[arg-type]
        assert forgotten == [old.node]
    finally:
        loader.close()


def test_a_file_of_a_checkpoint_is_checked_when_copied_out(fs, tmp_path):
    for name in ("ck/f", "ck/sub/g"):
        place(fs, name, b"a" * SIZE)
    fs.commit("ck")
    for name in ("ck/f", "ck/sub/g"):
        assert fs.get(name, tmp_path / "good") == SIZE
        place(fs, name, b"a" * (SIZE - 1) + b"b")
        with pytest.raises(DataError, match="does not have the digest of its COMMIT"):
            fs.get(name, tmp_path / "bad")
    place(fs, "ck/later", b"x")  # not listed
    assert fs.get("ck/later", tmp_path / "later") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "later", "store"]


class Unfinished:
    """A folder in which the file ``f`` is still being written, as HDFS would say of it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def open(self, path: str, *, pinned: bool = False) -> Source:
        source = self._backend.open(path, pinned=pinned)
        if path == "f":
            source.unfinished = True  # type: ignore[attr-defined]
        return source


def test_a_file_that_is_being_written_is_read_but_not_taken_as_a_whole(fs, tmp_path, caplog):
    place(fs, "f", b"a" * SIZE)
    place(fs, "g", b"a" * SIZE)
    fs = StripeFS(Unfinished(fs.backend))
    with fs.open("f") as file:
        assert file.read(0, SIZE) == b"a" * SIZE
    assert f"f is still being written: only the {SIZE} bytes of it that are complete are read" in caplog.text
    refused = pytest.raises(NotWritableError, match="f is still being written")
    with refused:
        fs.get("f", tmp_path / "got")
    other = open_fs(str(tmp_path / "other"))
    place(other, "f", b"a" * SIZE)
    for resume in (False, True):
        with refused:
            copy_file(fs, "f", other, "f", resume=resume)
    with refused, fs.append("f"):
        pass
    assert not (tmp_path / "got").exists()
    caplog.clear()
    assert fs.get("g", tmp_path / "got") == copy_file(fs, "g", other, "g").size == SIZE
    assert "still being written" not in caplog.text


def test_a_file_in_hdfs_knows_that_it_is_being_written():
    length = 5
    block = Located(Block("p", 1, 1, length), 0, (DataNode("u", "h", 1),), Token())
    for unfinished in (False, True):
        source = DirectSource("hdfs://n:1", "/f", FileBlocks(length, (block,), unfinished), None)
        assert (source.unfinished, source.size) == (unfinished, length)
    with pytest.raises(DataError, match="hold 5 bytes, not 6"):
        BlockFile(None, "/f", FileBlocks(length + 1, (block,), True))


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def read(self, offset: int, length: int, *, deadline: float) -> bytes:
        return self.data[offset : offset + length]

    def close(self) -> None:
        pass


class Client:
    """An HDFS of one file, replaced by another of the same size just before it is opened for the ``late``-th time."""

    def __init__(self, late: int = 0) -> None:
        self.data, self.mtime_ms, self.opened = b"a" * (2 << 20), 1750000000123, 0
        self._late = late

    def open(self, path: str) -> Reader:
        self.opened += 1
        if self.opened == self._late:
            self.data, self.mtime_ms = b"b" * len(self.data), self.mtime_ms + 1
        return Reader(self.data)

    def source(self) -> NativeSource:
        return NativeSource(cast(HdfsClient, self), "/f", lambda: str(self.mtime_ms), unfinished=False)


@pytest.mark.parametrize("late", [1, 2, 4])
def test_readers_of_one_hdfs_file_have_one_version(late):
    client, seen = Client(late), []

    def read() -> None:
        file = client.source()
        for _ in range(READERS + 1):
            seen.append(file.read(0, 1))

    with pytest.raises(DataError, match="replaced while it was read"):
        read()
    assert set(seen) <= {b"a"}


def test_unchanged_hdfs_files_are_read_through_several_readers():
    client = Client()
    file = client.source()
    assert b"".join(file.read(0, 1) for _ in range(9)) == b"a" * 9
    assert client.opened == READERS


def test_a_plain_file_that_is_replaced_by_a_striped_one_while_it_is_opened_is_not_served_as_its_pointer(
    fs, monkeypatch
):
    place(fs, "f", b"plain")
    real, replaced = fs.backend.open, []

    def late(path: str, *, pinned: bool = False) -> Source:
        if pinned and not replaced:
            replaced.append(path)
            with fs.create(path, striped=True) as out:
                out.write(b"striped")
        return real(path, pinned=pinned)

    monkeypatch.setattr(fs.backend, "open", late)
    with fs.open("f") as file:
        assert file.read(0, file.size) == b"striped"
    assert replaced == ["f"]
