"""What the mount of a striped store says of files and folders to the kernel."""

import os
import random
import stat
from typing import cast

import pytest

from bootseer.kernel import fuse
from bootseer.storage.folder import FolderBackend
from bootseer.storage.interface import Entry, Permissions
from bootseer.stripefs import open_fs
from bootseer.stripefs.files.nodecache import NodeCache
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.mount.nodes import Known
from bootseer.stripefs.mount.operations import StripeOperations

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
    ahead = ReadAhead(cache)
    told: dict[int, Known] = {}
    before = StripeOperations(fs, ahead, cache=cache, tell=lambda node: told.update({node.number: cast(Known, node)}))
    node = before.lookup(fuse.ROOT, "f", CONTEXT).node
    ops = StripeOperations(fs, ahead, cache=cache, known=list(told.values()), generation=1)
    asks = fuse.Context(1, node, 0)
    other = ops.open(node, 0, CONTEXT)
    ahead.prefetch(fs.open("f"), 0, 5)
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
