"""The striped store's folder: files that change under a reader, and storage that cannot rename in one step."""

import errno
import os
import socket
from pathlib import Path

import pytest

from bootseer.backends.folder import FolderBackend
from bootseer.errors import DataError, NotFoundError, NotWritableError, UnavailableError
from bootseer.kernel import libc
from bootseer.stripefs import open_fs
from bootseer.stripefs.maintenance import check

SIZE = 64 << 10


def read(source, offset: int, size: int = SIZE) -> bytes:
    buffer = bytearray(size)
    source.readinto(offset, [memoryview(buffer)])
    return bytes(buffer)


@pytest.mark.parametrize("how", ["overwritten", "appended to", "truncated"])
def test_a_pinned_file_gives_bytes_of_one_version(tmp_path, how):
    path = tmp_path / "f"
    path.write_bytes(b"a" * 2 * SIZE)
    os.utime(path, ns=(1, 1))
    pinned, loose = (FolderBackend(tmp_path).open("f", pinned=which) for which in (True, False))
    assert read(pinned, 0) == b"a" * SIZE
    with open(path, "r+b") as file:
        if how == "overwritten":
            file.write(b"b" * 2 * SIZE)
        elif how == "truncated":
            file.truncate(2 * SIZE - 1)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"b")
    with pytest.raises(DataError, match="f was changed while it was read"):
        read(pinned, 10, SIZE)
    assert len(read(loose, 10)) == SIZE
    again = FolderBackend(tmp_path).open("f", pinned=True)
    assert read(again, 10) == (b"b" if how == "overwritten" else b"a") * SIZE


def test_a_plain_file_that_is_overwritten_in_place_is_an_error_of_its_reader(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"a" * 2 * SIZE)
    os.utime(path, ns=(1, 1))
    with open_fs(str(tmp_path)).open("f") as file:
        assert file.read(0, SIZE) == b"a" * SIZE
        with open(path, "r+b") as out:
            out.write(b"b" * 2 * SIZE)
        with pytest.raises(DataError, match=r"was (changed|replaced) while it was read"):
            file.read(SIZE, SIZE)


def test_a_file_that_is_replaced_is_read_on(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"a" * 2 * SIZE)
    source = FolderBackend(tmp_path).open("f", pinned=True)
    (tmp_path / "new").write_bytes(b"b" * 2 * SIZE)
    os.replace(tmp_path / "new", path)
    assert read(source, SIZE) == b"a" * SIZE


@pytest.mark.parametrize("size", [100, 9 << 20])
def test_a_local_file_that_changes_while_it_is_stored_is_not_stored(tmp_path, size):
    local = tmp_path / "local"
    local.write_bytes(b"a" * size)
    os.utime(local, ns=(1, 1))
    fs = open_fs(str(tmp_path / "store"))
    fs.put(local, "f")

    def change(done: int, total: int) -> None:
        if done == size:
            with open(local, "r+b") as out:
                out.write(b"b" * size)

    with pytest.raises(DataError, match="local was changed while it was stored"):
        fs.put(local, "f", progress=change)
    with fs.open("f") as file:
        assert file.read(0, size) == b"a" * size
    assert check.fsck(fs.backend).findings == ()


@pytest.fixture(params=[0, errno.EINVAL, errno.ENOSYS])
def rename(request, monkeypatch) -> None:
    """As on NFS, and on a kernel or library without renameat2."""

    def refuse(source_folder: int, source: str, target_folder: int, target: str) -> None:
        raise OSError(request.param, os.strerror(request.param), target)

    if request.param:
        monkeypatch.setattr(libc, "rename_new", refuse)


def test_folders_where_nothing_renames_without_replacing(tmp_path, rename):
    fs = open_fs(str(tmp_path))
    for name in ("a/x", "b/y"):
        with fs.create(name) as out:
            out.write(b"data")
    (tmp_path / "empty").mkdir()
    for taken in ("b", "empty"):
        with pytest.raises(FileExistsError):
            fs.backend.rename("a", taken, overwrite=False)
    with pytest.raises(NotWritableError):
        fs.rename("a", "b/y")
    fs.rename("a", "c")
    assert fs.files() == ["b/y", "c/x"]
    fs.remove_tree("c")
    assert fs.files() == ["b/y"]
    with fs.create("z") as out:
        out.write(b"z")
    with pytest.raises(NotWritableError):
        fs.rename("z", "b/y", overwrite=False)
    fs.rename("z", "b/z", overwrite=False)
    assert fs.files() == ["b/y", "b/z"]
    with pytest.raises(NotFoundError):
        fs.backend.rename("none", "other", overwrite=False)


def test_a_folder_goes_though_another_removes_its_manifest_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    for name in ("COMMIT", "a"):
        (tmp_path / "run" / name).write_bytes(b"x")
    real = os.unlink

    def unlink(path, **flags):
        if path == "COMMIT":
            real(path, **flags)
        real(path, **flags)

    monkeypatch.setattr(os, "unlink", unlink)
    FolderBackend(tmp_path).remove_folder("run", first=("COMMIT",))
    assert os.listdir(tmp_path) == []


def test_a_link_to_a_folder_is_removed_not_what_it_points_to(tmp_path, rename):
    there = tmp_path / "elsewhere"
    there.mkdir()
    (there / "f").write_bytes(b"keep")
    store = tmp_path / "store"
    store.mkdir()
    (store / "link").symlink_to(there)
    fs = open_fs(str(store))
    fs.remove_tree("link")
    assert not os.path.lexists(store / "link")
    assert (there / "f").read_bytes() == b"keep"
    assert os.listdir(store) == []


def bind(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path)


@pytest.mark.parametrize("make", [os.mkfifo, bind])
def test_what_is_no_plain_file_is_not_replaced(tmp_path, monkeypatch, make):
    """Root that names a device by mistake keeps the device."""
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    make("special")
    mode = (tmp_path / "special").stat().st_mode
    (tmp_path / "f").write_bytes(b"x")
    with pytest.raises(NotWritableError, match="special is no plain file"):
        open_fs(str(tmp_path)).put(tmp_path / "f", "special")
    assert (tmp_path / "special").stat().st_mode == mode
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".bsx") == ["f", "special"]


def test_a_folder_that_goes_away_is_a_storage_that_does_not_answer(tmp_path: Path) -> None:
    """As one on a network that is not mounted for a moment: a name that is missing there is not final."""
    root = tmp_path / "store"
    backend = FolderBackend(root)
    with pytest.raises(NotFoundError):
        backend.stat("f")  # it was never there
    root.mkdir()
    (root / "f").write_bytes(b"x")
    assert backend.stat("f").size == 1
    with pytest.raises(NotFoundError):
        backend.open("g")
    root.rename(tmp_path / "away")
    for call in (backend.stat, backend.open, backend.list):
        with pytest.raises(UnavailableError, match="is not there any more"):
            call("f")
    root.mkdir()  # as where nothing is mounted
    for call in (backend.stat, backend.open):
        with pytest.raises(UnavailableError, match="is not there any more"):
            call("f")
    root.rmdir()
    (tmp_path / "away").rename(root)
    assert backend.stat("f").size == 1
    with pytest.raises(NotFoundError):
        backend.open("g")


def test_a_folder_that_was_made_anew_is_the_storage_once_it_has_something(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    backend = FolderBackend(tmp_path / "store")
    (tmp_path / "store").mkdir()
    assert backend.list("") == []
    (tmp_path / "store").rename(tmp_path / "old")
    (tmp_path / "store").mkdir()
    with pytest.raises(UnavailableError):
        backend.stat("f")
    assert backend.list("") == []
    with pytest.raises(NotFoundError):
        backend.stat("f")


@pytest.mark.parametrize("striped", [True, False])
def test_a_file_is_the_same_one_from_whichever_folder_it_is_opened(tmp_path: Path, striped: bool) -> None:
    with open_fs(str(tmp_path)).create("a/f", striped=striped) as out:
        out.write(b"x" * 100)
    names = {
        f"{root}": str(tmp_path / "a/f").removeprefix(root).lstrip("/")
        for root in ("/", f"{tmp_path}", f"{tmp_path}/a")
    }
    opened = [open_fs(root).open(path) for root, path in names.items()]
    try:
        assert len({one.identity for one in opened}) == 1
    finally:
        for one in opened:
            one.close()
