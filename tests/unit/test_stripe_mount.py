"""What the mount of a striped store says of files and folders to the kernel."""

import stat
from typing import cast

import pytest

from bootseer.kernel import fuse
from bootseer.storage.folder import FolderBackend
from bootseer.storage.interface import Entry, Permissions
from bootseer.stripefs import open_fs
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.mount.operations import StripeOperations

CONTEXT = cast(fuse.Context, None)


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
