"""Converted images, as the snapshotter needs them: which layers they have, their mounted trees, and the long way where
a tree cannot stand for a layer.

Methods block; `service` calls them in threads of their own (`tasks`). The record of an image is kept with the
snapshots as the store had it, signature and all: it is verified each time it is used, with the keys of this process,
and a restart needs no store for it."""

from __future__ import annotations

import enum
import logging
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

import msgspec

from bootseer import faults, oci
from bootseer.blocks import tree
from bootseer.chunks.manifest import tree_key
from bootseer.config import Config
from bootseer.containerd.snapshots import Layer, MissingError, Snapshot, Snapshots
from bootseer.errors import ConfigError, DataError, NotFoundError, UnavailableError, doing, logged
from bootseer.folders import private_folder
from bootseer.image import record as records
from bootseer.image.lookup import same_repository
from bootseer.image.record import ImageRecord
from bootseer.kernel import libc
from bootseer.kernel import mount as mounts
from bootseer.kernel.parts import Part
from bootseer.kernel.removal import discard_tree
from bootseer.objects import Store, open_store, signature

log = logging.getLogger(__name__)


class Match(enum.Enum):
    """What a layer, with those below it, is of a converted image."""

    NONE = enum.auto()
    PART = enum.auto()
    WHOLE = enum.auto()


class Images:
    """The converted images in the store of ``config``; their trees are mounted in ``<root>/trees/<digest>``. While
    ``part`` is being drained images are pulled, and none is mounted that is not."""

    def __init__(self, snapshots: Snapshots, config: Config, part: Part) -> None:
        """Raises `ConfigError` for a bad key, and the errors of making folders."""
        self._snapshots, self._config, self._part = snapshots, config, part
        self._keys = signature.trusted_keys(config)
        self._opened: Store | None = None
        self._opening = threading.Lock()
        self._platform = oci.host_platform()
        self._trees = private_folder(snapshots.root, sub="trees")
        self._work = private_folder(snapshots.root, sub="unpacking")
        for left in self._work.iterdir():
            discard_tree(left)
        self._guard = threading.Lock()
        self._busy: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._count()

    def find(self, manifest: str, *, anew: bool = False) -> ImageRecord:
        """The record of the converted image ``manifest``; ``anew``: as the store has it now. Raises `NotFoundError`
        (not converted), `DataError` (damaged, not signed as the settings want), `UnavailableError`."""
        kept = None if anew else self._snapshots.record(manifest)
        if kept is not None:
            try:
                return self._read(kept, manifest, "kept on this node")
            except DataError as exc:
                log.warning("%s; asking the store", exc.message)
        store = self._store()
        content = store.get(records.key_of(manifest, self._platform), most=records.MAX_STORED)
        found = self._read(content, manifest, f"in store {store.shown}")
        self._snapshots.keep_record(manifest, content)
        return found

    def _store(self) -> Store:
        """Opened at the first use: a store that is away must not keep the snapshotter from starting."""
        with self._opening:
            if self._opened is None:
                self._opened = open_store(self._config.store_url)
            return self._opened

    def _read(self, content: bytes, manifest: str, where: str) -> ImageRecord:
        found = records.read(content, manifest, self._platform, self._keys, where=where)
        tree_key(found.tree)  # it becomes the name of a folder
        return found

    def match(self, layer: Layer) -> Match:
        """What ``layer`` is of the converted image that it was asked for; nothing when that was pulled by another name,
        as then its own registry did not say who may have it. Raises `UnavailableError`."""
        if self._part.draining:
            return Match.NONE
        try:
            found = self.find(layer.manifest)
            origin, pulled = oci.Reference.parse(found.reference), oci.Reference.parse(layer.image)
        except NotFoundError:
            return Match.NONE
        except (DataError, ConfigError) as exc:
            log.warning("%s is pulled: %s", layer.image, exc)
            return Match.NONE
        if not same_repository(pulled, origin, self._config.registry_mirrors.get(origin.registry, ())):
            log.info("%s is pulled: it was converted from %s, which did not say who may have it", layer.image, origin)
            return Match.NONE
        chains = found.config.rootfs.chain_ids
        if layer.chain not in chains:
            return Match.NONE
        return Match.WHOLE if layer.chain == chains[-1] else Match.PART

    def files(self, snapshot: Snapshot) -> Path:
        """A folder with the files of the lazy ``snapshot`` and of all below it: the mounted tree of its image when it
        is the topmost layer of that, else its layers, which are downloaded and unpacked then. Raises `UnavailableError`
        and whatever keeps both ways from working."""
        snapshot = self._snapshots.get(snapshot.name)  # it may have got its files since the caller looked
        layer = snapshot.layer
        assert layer is not None
        if snapshot.folder:
            return self._snapshots.files(snapshot)
        why = "another image, which is not converted, shares them"
        for anew in (False, True):
            try:
                found = self.find(layer.manifest, anew=anew)
                if found.config.rootfs.chain_ids[-1] != layer.chain:
                    break
                return self._mounted(snapshot, found.tree)
            except MissingError:
                raise  # it was removed meanwhile
            except (NotFoundError, DataError) as exc:
                why = exc.message
        log.warning("layers of %s are downloaded and unpacked: %s", layer.image, why)
        try:
            return self._unpacked(snapshot, layer)
        except (NotFoundError, DataError, ConfigError) as exc:
            raise type(exc)(
                f"layers of {layer.image} are not on this node ({why}) and cannot be downloaded: {exc.message}",
                hint=f"remove it (crictl rmi {layer.image}) and pull it again",
            ) from exc

    def _mounted(self, snapshot: Snapshot, digest: str) -> Path:
        target, config = self._trees / digest, self._config
        with self._alone(digest):
            if self._part.draining and not mounts.is_mounted(target):
                raise UnavailableError("the node service is being drained: it mounts nothing more", hint="ask root")
            with doing(f"make {target}"):
                target.mkdir(mode=0o700, exist_ok=True)  # first: `release` finds what a kill leaves of what follows
            self._count()
            faults.point("containerd.tree.before-use")
            self._snapshots.use_tree(snapshot, digest)
            faults.point("containerd.tree.before-mount")
            if mounts.is_mounted(target):
                there = tree.mounted(target, digest, Path(config.state_dir))
                try:
                    there.status()
                    return target
                except UnavailableError as exc:
                    log.warning("%s; mounting the tree again", exc)
                    there.unmount()  # also an error when the server lives, but does not answer
            store = self._store()
            tree.mount(
                store.url,
                digest,
                target,
                cache_dir=Path(config.cache_dir),
                state_dir=Path(config.state_dir),
                profile=tree.ProfileKey("default", "containerd"),
                config=config,
                store=store,
            )
            faults.point("containerd.tree.mounted")
        return target

    def unused(self) -> list[str]:
        """The trees that are mounted, or begun to be, and that no snapshot needs."""
        return sorted({target.name for target in self._trees.iterdir()} - self._snapshots.trees())

    def release(self, digest: str) -> None:
        """Unmount the tree ``digest``, unless a snapshot needs it again."""
        with self._alone(digest):
            if digest not in self._snapshots.trees():
                unmount(self._trees / digest, self._config)
                self._count()

    def _count(self) -> None:
        with self._guard:
            self._part.mounts = sum(1 for _ in self._trees.iterdir())

    def _alone(self, digest: str) -> threading.Lock:
        """Held while the tree ``digest`` is mounted or unmounted."""
        with self._guard:
            return self._busy[digest]

    def _unpacked(self, snapshot: Snapshot, layer: Layer) -> Path:
        """Unpack the layers that ``layer`` names, as its manifest lists them, from where the image was pulled."""
        ref = msgspec.structs.replace(oci.Reference.parse(layer.image), digest=layer.manifest)
        with oci.open_image(ref) as image:
            chains = image.config.rootfs.chain_ids
            if layer.chain not in chains:
                raise DataError(f"image {ref} has no layer {layer.chain}")
            with doing(f"unpack layers in {self._work}"):
                work = Path(tempfile.mkdtemp(dir=self._work))
                try:
                    oci.unpack(image.bottom(chains.index(layer.chain) + 1), made := work / "fs")
                    libc.syncfs(str(made))  # what the database names has to be on the disk
                    return self._snapshots.adopt(snapshot, made)
                finally:
                    discard_tree(work)


def unmount(target: Path, config: Config) -> None:
    """Unmount the tree on ``target``, or end what was killed while it mounted that, and remove the folder. What cannot
    be is a line in the log."""
    with logged(log.warning, "%s stays mounted", target):
        tree.mounted(target, target.name, Path(config.state_dir)).unmount()
        faults.point("containerd.tree.unmounted")
        target.rmdir()
