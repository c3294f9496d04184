"""Volumes of pods: an image, an environment or a checkpoint, mounted read-only in the folder that the kubelet names.

A pod may ask for anything, with the node's rights at store and registries behind it. So an image is mounted for a pod
that the registry gives it to (`image.lookup.readable_for`), an environment for one that knows its whole name,
which is a digest of all that went in, and a checkpoint where the settings let the pod's namespace.

What is mounted for a volume is below ``<state_dir>/csi/<volume>``, which only root can enter, and bound to the folder
of the pod. That and the kernel's mount table are all that is remembered: a driver that starts again finds it there."""

from __future__ import annotations

import logging
import re
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from bootseer import faults, oci
from bootseer import fsmount as fs
from bootseer.blocks import tree
from bootseer.config import Config
from bootseer.env import manifest
from bootseer.errors import ConfigError, DataError, PrivilegeError, UnavailableError, doing
from bootseer.folders import private_folder
from bootseer.image.lookup import readable_for
from bootseer.kernel import mount as mounts
from bootseer.kernel.parts import Part
from bootseer.node import client
from bootseer.objects import Store, open_store, signature
from bootseer.oci import credentials

log = logging.getLogger(__name__)

KINDS = ("image", "env", "checkpoint")
_OPTIONS = {"image": set[str](), "env": {"target"}, "checkpoint": {"prefetch"}}
_KUBELET = "csi.storage.k8s.io/"
_FS = "fs"
"""The folder that a checkpoint is mounted on; others have a digest for their name."""
_LOGINS = ".dockerconfigjson"
_MEMORY = 64 << 20
"""Read-ahead of a checkpoint: a pod may have many, and its own limits do not count here."""
_URL = re.compile(r"[a-z0-9+]+://(?!.*::)[\w.:@=,+~/-]+", re.ASCII)


class PodVolume(NamedTuple):
    """What a pod asks for."""

    kind: str
    name: str
    options: Mapping[str, str]
    namespace: str
    logins: credentials.Logins
    shown: str
    """The pod, for the log."""


def wish(context: Mapping[str, str], secrets: Mapping[str, str], target: Path) -> PodVolume:
    """What a volume with these attributes and secrets is to be; ``target`` is the folder that a kubelet gives it,
    ``.../POD/volumes/kubernetes.io~csi/NAME/mount``. Raises `ConfigError` for what is not understood, and when not the
    kubelet says whose the volume is."""
    told = {key.removeprefix(_KUBELET): value for key, value in context.items() if key.startswith(_KUBELET)}
    asked = {key: value for key, value in context.items() if not key.startswith(_KUBELET)}
    uid, namespace = told.get("pod.uid", ""), told.get("pod.namespace", "")
    # A pod could write these itself where the kubelet does not: but not its uid, which it gets later.
    if told.get("ephemeral") != "true" or not namespace or uid != target.parts[-5]:
        raise ConfigError(
            "only inline volumes of pods can be mounted, and the kubelet has to say of which pod",
            hint="kubectl apply -k deploy/kubernetes makes the CSIDriver object as it is needed",
        )
    kinds = [kind for kind in KINDS if asked.get(kind)]
    if len(kinds) != 1:
        raise ConfigError("volumeAttributes must name one of image, env, checkpoint", hint="one volume for each")
    kind = kinds[0]
    if unknown := sorted(asked.keys() - _OPTIONS[kind] - {kind}):
        known = ", ".join(sorted({kind, *_OPTIONS[kind]}))
        raise ConfigError(f"volumeAttributes has the unknown {unknown[0]!r}", hint=f"with {kind} it may have: {known}")
    if secrets and _LOGINS not in secrets:
        raise ConfigError(
            f"the secret of the volume has no {_LOGINS}", hint="kubectl create secret docker-registry makes one"
        )
    logins = credentials.given(secrets[_LOGINS]) if secrets else credentials.Logins()
    return PodVolume(kind, asked[kind], asked, namespace, logins, f"{namespace}/{told.get('pod.name', uid)}")


class Volumes:
    """The volumes of a node, with store and rights of ``config``. Methods block; for one volume at a time."""

    def __init__(self, config: Config, part: Part) -> None:
        """Raises `ConfigError` for folders that others can write to."""
        self._config, self._part = config, part
        self._root = private_folder(Path(config.state_dir), sub="csi")
        self._guard = threading.Lock()
        self._busy: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._count()

    def publish(self, volume: str, target: Path, wish: PodVolume) -> None:
        """Mount what ``wish`` says on ``target``, unless something is mounted there: then this volume is. Raises
        `ConfigError`, `NotFoundError`, `PrivilegeError`, `UnavailableError`, and others of the mounts."""
        with self._alone(volume):
            if mounts.is_mounted(target):
                return
            folder = private_folder(self._root, sub=volume)
            self._count()  # first: who drains the service waits for what it sees
            try:
                if self._part.draining:
                    raise UnavailableError("the node service is being drained: it mounts nothing more", hint="ask root")
                self._clear(folder)
                faults.point("csi.publish.before-mount")
                source = self._mount(folder, wish)
                with doing(f"make {target}"):
                    target.mkdir(mode=0o750, exist_ok=True)
                if not stat.S_ISDIR(source.lstat().st_mode):
                    raise DataError(f"{wish.kind} {wish.name} is no folder")
                faults.point("csi.publish.before-bind")
                mounts.mount_for(0, 0, source, target)
                faults.point("csi.publish.after-bind")
            except BaseException:
                self._clear(folder)
                folder.rmdir()
                raise
            finally:
                self._count()
            log.info("pod %s has %s %r on %s", wish.shown, wish.kind, wish.name, target)

    def unpublish(self, volume: str, target: Path) -> None:
        """End what `publish` has made or begun; safe to call twice. Raises `BootseerError` while it is in use."""
        with self._alone(volume):
            while mounts.is_mounted(target):
                mounts.unmount(target)
            folder = self._root / volume
            if folder.exists():
                self._clear(folder)
                folder.rmdir()
                self._count()
            with doing(f"remove {target}"):
                if target.exists():
                    target.rmdir()
            log.info("volume %s is gone from %s", volume, target)

    def _count(self) -> None:
        with self._guard:
            self._part.mounts = sum(1 for _ in self._root.iterdir())

    def _alone(self, volume: str) -> threading.Lock:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", volume):
            raise ConfigError(f"{volume!r} is no name of a volume")
        with self._guard:
            return self._busy.setdefault(volume, threading.Lock())

    def _clear(self, folder: Path) -> None:
        """Unmount what is mounted, or begun to be, in the folder of a volume."""
        for point in folder.iterdir():
            if point.name != _FS:
                tree.mounted(point, point.name, Path(self._config.state_dir)).unmount()
            elif found := fs.find(point, config=self._config):
                found.unmount()
            with doing(f"remove {point}"):
                point.rmdir()

    def _mount(self, folder: Path, wish: PodVolume) -> Path:
        """The folder that the pod is to see."""
        if wish.kind == "checkpoint":
            url = checkpoint_url(wish, self._config.pod_checkpoints)
            prefetch = ["" if item == "." else item for item in wish.options.get("prefetch", "").split()]
            fs.start(url, folder / _FS, prefetch=prefetch, memory=_MEMORY, config=self._config)
            return folder / _FS
        if wish.kind == "image":
            return self._image(folder, wish)
        return self._env(folder, wish)

    def _image(self, folder: Path, wish: PodVolume) -> Path:
        if oci.in_files(wish.name):
            raise PrivilegeError(f"{wish.name} is in no registry, so nothing says who may read it")
        store, ref = open_store(self._config.store_url), oci.Reference.parse(wish.name)

        def digest_for(ref: oci.Reference) -> str:
            logins = credentials.with_providers(wish.logins, ref.registry, ref.name)
            return client.digest_with(ref, logins, config=self._config)

        record = readable_for(ref, store, self._config, digest_for)
        return self._tree(folder, record.tree, store, wish)

    def _env(self, folder: Path, wish: PodVolume) -> Path:
        store = open_store(self._config.store_url)
        found = manifest.decode(store.get(manifest.manifest_key(wish.name), most=manifest.MAX_STORED), wish.name)
        manifest.check_signed(found, signature.trusted_keys(self._config))
        targets = found.document.targets
        wanted = wish.options.get("target") or (targets[0] if len(targets) == 1 else "")
        if wanted not in targets:
            raise ConfigError(f"volumeAttributes.target must be one of {', '.join(targets)}")
        number = targets.index(wanted)
        if found.base[number]:
            raise ConfigError(
                f"{wanted} of snapshot {found.shown} is a change to files of the image: alone it is not whole",
                hint="have the set-up command fill a folder of its own",
            )
        return self._tree(folder, found.tree, store, wish) / str(number)

    def _tree(self, folder: Path, digest: str, store: Store, wish: PodVolume) -> Path:
        config = self._config
        tree.mount(
            store.url,
            digest,
            point := folder / digest,
            cache_dir=Path(config.cache_dir),
            state_dir=Path(config.state_dir),
            profile=tree.ProfileKey("default", f"pods-{wish.namespace}"),
            config=config,
            store=store,
        )
        return point


def checkpoint_url(wish: PodVolume, allowed: tuple[str, ...]) -> str:
    """The URL of the checkpoint, when one of the ``allowed`` prefixes, of which ``{namespace}`` is the pod's, is above
    it. Raises `PrivilegeError`."""
    url = wish.name.rstrip("/")
    scheme, _, path = url.partition("://")
    # what is a folder of the node can hold links, which root would follow
    if not _URL.fullmatch(url) or scheme in ("file", "local") or {"", ".", ".."} & set(path.split("/")):
        raise PrivilegeError(f"{wish.name!r} is no URL of a checkpoint", hint="write hdfs://HOST:PORT/FOLDER")
    for prefix in allowed:
        if f"{url}/".startswith(f"{prefix.replace('{namespace}', wish.namespace).rstrip('/')}/"):
            return url
    raise PrivilegeError(
        f"pods of namespace {wish.namespace} may not mount {url}",
        hint="pod_checkpoints in the settings of the node says what they may",
    )
