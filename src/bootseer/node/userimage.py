"""An image for a command of an ordinary user: mounted by the node daemon, or extracted where there is none."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from bootseer import image, oci
from bootseer.blocks.extract.tree import extract
from bootseer.blocks.profiles.library import ProfileKey, owner_of
from bootseer.blocks.tree import TreeStatus
from bootseer.config import Config
from bootseer.errors import BootseerError
from bootseer.kernel.removal import discard_tree
from bootseer.node import client
from bootseer.node.protocol import Mount
from bootseer.objects import open_store

log = logging.getLogger(__name__)


class UserImage:
    """An image in the folder ``rootfs`` until `unmount`, at the latest until the end of this process."""

    points: Sequence[Path] = ()
    """What this process has mounted: nothing."""

    def __init__(self, ref: str, folder: Path, config: Config, *, job: str = "", own: bool = False) -> None:
        """``folder``: where it is extracted to if it must be, and does not exist. ``job``: whose earlier starts to
        prefetch by. ``own``: the store or the keys of ``config`` are not those of the node, so the daemon is not asked.
        Raises as `client.mount_image`, or as `image.resolve` and `extract`."""
        self._node = config
        self._mount: Mount | None = None
        reason = "settings of this command are not the node daemon's"
        if not oci.Reference.parse(ref).registry:
            reason = "the node daemon mounts images of registries only"
        elif not own:
            try:
                self._mount = client.mount_image(ref, config=config, process=True, profile=job)
            except client.AbsentError as exc:
                reason = exc.message
        if self._mount is None:
            log.warning("%s: extracting all of %s", reason, ref)
            self._extract(ref, folder, config, job)
            return
        self.rootfs, self.digest = Path(self._mount.folder), self._mount.image
        self.config = oci.ImageConfig("", "linux", oci.RootFS(()), self._mount.config)

    @property
    def lazy(self) -> bool:
        """Whether the daemon has mounted it."""
        return self._mount is not None

    def _extract(self, ref: str, folder: Path, config: Config, job: str) -> None:
        store = open_store(config.store_url)
        record = image.resolve(ref, store, config=config)
        self.rootfs, self.digest, self.config = folder, record.image, record.config
        try:
            profile = ProfileKey(job or "default", owner_of(os.getuid()))
            extract(store, record.tree, folder, profile=profile)
        except BaseException:
            discard_tree(folder)
            raise

    def status(self) -> TreeStatus | None:
        """Counters of the block server; None without one. Raises `BootseerError`."""
        return client.status(self._mount.id, config=self._node) if self._mount else None

    def ready(self) -> None:
        """The job is ready: recording may stop. Raises `BootseerError`."""
        if self._mount:
            client.ready(self._mount.id, config=self._node)

    def unmount(self) -> None:
        """End the mount, or remove what was extracted. What goes wrong is a line in the log: the command has ended."""
        if self._mount is None:
            discard_tree(self.rootfs)
            return
        try:
            client.unmount(self._mount.id, config=self._node)
        except BootseerError as exc:
            log.warning("%s; the mount of %s ends with this process", exc, self._mount.reference)
