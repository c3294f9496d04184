"""What the mount of a striped store says of files and folders to the kernel."""

import errno
import os
import random
import shutil
import stat
import time
from typing import cast

import pytest

from bootseer.backends.folder import FolderBackend
from bootseer.backends.interface import Entry, Permissions
from bootseer.fsmount.memory import MountMemory
from bootseer.fsmount.operations import StripeOperations
from bootseer.kernel import fuse
from bootseer.kernel import fuse_wire as wire
from bootseer.kernel.fuse_loop import Loop
from bootseer.stripefs import open_fs
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.nodecache import NodeCache
from support.forgery import forge

CONTEXT = cast(fuse.Context, None)
UNIT = 1 << 16


@pytest.mark.parametrize("folder", ["", "private"])
def test_a_folder_that_a_process_is_in_becomes_private(tmp_path, monkeypatch, folder):
    def told(self: FolderBackend, path: str) -> Entry:
        return real(self, path)._replace(permissions=Permissions(1, 1, modes.get(path, 0o755)))

    real, modes = FolderBackend.stat, dict[str, int]()
    monkeypatch.setattr(FolderBackend, "stat", told)
    (tmp_path / "private").mkdir()
    ops = StripeOperations(open_fs(str(tmp_path)), cast(ReadAhead, None), shared=True)
    node = ops.lookup(fuse.ROOT, folder, CONTEXT).node if folder else fuse.ROOT
    assert stat.S_IMODE(ops.getattr(node, CONTEXT).mode) == 0o755
    modes[folder] = 0o700
    assert stat.S_IMODE(ops.getattr(node, CONTEXT).mode) == 0o700


def test_what_a_server_before_had_open_is_read_from_the_node_cache_until_it_is_closed(tmp_path):
    fs, cache = open_fs(str(tmp_path / "store")), NodeCache(tmp_path / "cache")
    data = random.Random(1).randbytes(5 * UNIT)
    with fs.create("f", width=2, unit=UNIT, striped=True) as out:
        out.write(data)
    ahead = ReadAhead()
    memory = MountMemory()
    before = StripeOperations(fs, ahead, cache=cache, journal=memory.journal)
    node = before.lookup(fuse.ROOT, "f", CONTEXT).node
    ops = StripeOperations(fs, ahead, cache=cache, journal=memory.journal, generation=1)
    asks = fuse.Context(1, node, 0)
    other = ops.open(node, 0, CONTEXT)
    with fs.open("f") as file:
        file.attach(cache.open(file))
        ahead.prefetch(file, 0, 5)
    cache.sync()
    found = ops.read(77, UNIT, 100, asks)
    assert isinstance(found, tuple)
    ops.release(other, CONTEXT)
    cache.sync()  # closes what nobody uses
    (tmp_path / "else").write_bytes(bytes(len(data)))
    with open(tmp_path / "else", "rb"):  # perhaps as the same number
        assert os.pread(found[0], 100, found[1]) == data[UNIT : UNIT + 100]
    ops.release(77, CONTEXT)
    cache.sync()
    assert cache.find(fs.open("f").identity) is None
    ahead.close()
    cache.close()


def test_a_file_that_replaces_one_with_the_same_uuid_and_checksums_is_another_node(tmp_path):
    """Else the kernel would show the pages that it has of the one before."""
    fs, other = (open_fs(str(tmp_path / name)) for name in ("store", "other"))
    with fs.create("f", width=2, unit=UNIT, striped=True) as out:
        out.write(bytes(3 * UNIT))
    forge(fs, "f", tmp_path / "other" / "f")
    ahead = ReadAhead()
    ops = StripeOperations(other, ahead)
    forged = ops.lookup(fuse.ROOT, "f", CONTEXT).node
    handle = ops.open(forged, 0, CONTEXT)
    assert bytes(ops.read(handle, 0, 6, CONTEXT)) == b"FORGED"
    shutil.copytree(tmp_path / "store" / ".bsx", tmp_path / "other" / ".bsx", dirs_exist_ok=True)
    shutil.copy2(tmp_path / "store" / "f", tmp_path / "other" / "new")
    (tmp_path / "other" / "new").rename(tmp_path / "other" / "f")
    node = ops.lookup(fuse.ROOT, "f", CONTEXT).node
    assert node != forged
    assert bytes(ops.read(ops.open(node, 0, CONTEXT), 0, 6, CONTEXT)) == bytes(6)
    ahead.close()


@pytest.mark.parametrize("fails", ["backing", "backed"])
def test_an_open_that_fails_leaves_nothing_open(tmp_path, monkeypatch, fails):
    """Else its file could not be evicted, and was never read by the kernel again, until the mount ended."""

    class Failing(fuse.Operations):
        def __init__(self) -> None:
            self.opened, self.released, self.trouble = 0, list[int](), fails

        def _fail(self, what: str) -> None:
            if self.trouble == what:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        def open(self, node: int, flags: int, ctx: fuse.Context) -> int:
            self.opened += 1
            return self.opened

        def backing(self, fh: int) -> int:
            self._fail("backing")
            return 9

        def backed(self, node: int, backing: int) -> None:
            self._fail("backed")

        def release(self, fh: int, ctx: fuse.Context) -> None:
            self.released.append(fh)

    asked = []

    def ioctl(device: int, request: int, data: bytes) -> int:
        asked.append((request, bytes(data[:4])))
        return 5

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    ops = Failing()
    loop = Loop(ops, tmp_path, fuse.Options(passthrough=True))
    loop.backings.enabled = True
    request = memoryview(wire.OPEN_IN.pack(os.O_RDONLY, 0))
    with pytest.raises(OSError, match="Input/output"):
        loop.answer(wire.OPEN, fuse.Context(1, 2, 0), request)
    assert ops.released == [1]
    assert len(asked) == (2 if fails == "backed" else 0), "the kernel has the number back"
    ops.trouble = ""
    assert wire.OPEN_OUT.unpack(loop.answer(wire.OPEN, fuse.Context(2, 2, 0), request))[2] == 5


def test_a_folder_that_is_read_in_parts_is_listed_once_and_its_files_are_not_read(tmp_path, monkeypatch):
    """`ls -l` of 100,000 names took minutes: each part listed the folder again, and each small file was read."""
    for number in range(5000):
        (tmp_path / f"f{number:04}").write_bytes(b"%d" % number)
    ops = StripeOperations(open_fs(str(tmp_path)), cast(ReadAhead, None))
    now = time.monotonic()
    names = [entry.name for entry in ops.readdir(fuse.ROOT, CONTEXT)]
    listed = time.monotonic()
    asked = []
    monkeypatch.setattr(time, "monotonic", lambda: now + 0.4)
    for name in ("list", "open"):
        monkeypatch.setattr(FolderBackend, name, lambda self, path, name=name, **other: asked.append((name, path)))
    for at in range(0, len(names), 20):
        found = ops.lookups(fuse.ROOT, names[at : at + 20], CONTEXT)
        assert [entry.attr.size for entry in found if entry] == [
            len(str(int(name[1:]))) for name in names[at : at + 20]
        ]
    monkeypatch.setattr(time, "monotonic", lambda: listed + 0.6)
    with pytest.raises(TypeError):
        ops.lookups(fuse.ROOT, names[:20], CONTEXT)
    assert asked == [("list", "")]


def test_of_a_folder_with_stripes_small_files_are_read(tmp_path):
    fs = open_fs(str(tmp_path))
    with fs.create("striped", width=2, unit=UNIT, striped=True) as out:
        out.write(bytes(3 * UNIT))
    (tmp_path / "plain").write_bytes(b"x")
    ops = StripeOperations(fs, cast(ReadAhead, None))
    found = ops.lookups(fuse.ROOT, ["plain", "striped"], CONTEXT)
    assert [entry.attr.size for entry in found if entry] == [1, 3 * UNIT]
