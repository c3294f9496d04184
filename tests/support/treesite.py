"""A site of one published tree, and a node there that mounts it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from bootseer import erofs
from bootseer.blocks import tree
from bootseer.blocks.tree import ProfileKey, TreeMount
from bootseer.config import Config
from bootseer.kernel import mount as mounts
from bootseer.objects.folder import FolderStore
from support.waits import until


def publish_tree(base: Path) -> str:
    """Publish the folder ``tree`` of ``base`` in ``store`` beside it, whence each `TreeSite` has a copy. The digest."""
    erofs.build(base / "tree", base / "meta", base / "data")
    found = tree.publish(FolderStore(base / "store"), base / "meta", base / "data", block_size=64 << 10)
    (base / "digest").write_text(found.digest)
    return found.digest


class TreeSite:
    """What `publish_tree` made in ``base``, and a node below ``folder``: caches, state, mount points. ``profile`` and
    ``settings`` are those of its mounts."""

    def __init__(self, base: Path, folder: Path, *, profile: ProfileKey | None = None, **settings: object) -> None:
        self.folder, self.source = folder, base / "tree"
        self.digest = (base / "digest").read_text()
        shutil.copytree(base / "store", folder / "store")
        self.store = FolderStore(folder / "store")
        self.state = folder / "state"
        self.mounted: list[TreeMount] = []
        self._profile, self._settings = profile, {"background_fill": False, **settings}

    def mount(
        self, name: str = "mnt", *, cache: str = "cache", server: Sequence[str] = tree.SERVER, **set: object
    ) -> TreeMount:
        """``set``: more settings, and the ``profile``."""
        found = {"profile": self._profile, **self._settings, **set}
        made = tree.mount(
            self.store.url, self.digest, self.folder / name, cache_dir=self.folder / cache, state_dir=self.state,
            profile=found.pop("profile"), server=server, config=Config(**found),  # type: ignore[arg-type]
        )  # fmt: skip
        self.mounted.append(made)
        return made

    def want(self, name: str) -> bytes:
        """The content of a file."""
        return (self.source / name).read_bytes()

    @property
    def log(self) -> str:
        return (self.state / "trees" / f"{self.digest[:16]}.log").read_text()

    def clean(self) -> bool:
        """No mount, no process, no state of a running tree."""
        left = [path for path in (self.state / "trees").glob("*") if path.is_dir()]
        return not left and not [entry for entry in mounts.entries() if entry.target.startswith(str(self.folder))]

    def close(self) -> None:
        for made in self.mounted:
            made.unmount()
        until(self.clean)
