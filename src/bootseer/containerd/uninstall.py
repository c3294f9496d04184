"""The end of the snapshotter on a node: nothing is taken from under containers and images that need it."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

from bootseer.config import Config
from bootseer.containerd.images import unmount
from bootseer.containerd.service import IMAGE
from bootseer.containerd.snapshots import Kind, Snapshots
from bootseer.errors import BootseerError, ConfigError
from bootseer.folders import trusted
from bootseer.kernel import mount as mounts
from bootseer.kernel.parts import alone
from bootseer.kernel.removal import discard_tree
from bootseer.rpc.server import remove_dead


def needed(root: Path) -> list[str]:
    """The commands that remove what could not run any more without the snapshotter in ``root``, while it still serves:
    containers, and images with layers that were never pulled."""
    if not (trusted(root) / "state.db").exists():
        return []
    with contextlib.closing(Snapshots(trusted(root))) as snapshots:
        found = {item.name: item for item in snapshots.listing()}
    containers: set[str] = set()
    images: set[str] = set()
    for item in found.values():
        if item.kind != Kind.COMMITTED:
            namespace, _, key = item.name.partition("/")
            containers.add(shlex.join(["ctr", "-n", namespace, "containers", "rm", key.rpartition("/")[2]]))
            continue
        below = item
        while below.parent in found and not below.layer:
            below = found[below.parent]
        if below.layer:
            images.add(shlex.join(["crictl", "rmi", item.labels.get(IMAGE) or below.layer.image]))
    return sorted(containers) + sorted(images)


def remove(root: Path, socket: Path, config: Config) -> None:
    """Unmount the trees in ``root``, end their block servers unless others use them, delete ``root`` and ``socket``.
    Raises `ConfigError` for another folder, a socket in use, and while the snapshotter still runs, `BootseerError` when
    something stays mounted."""
    root = trusted(root)
    if not root.exists():
        return
    if not (root / "state.db").is_file():
        raise ConfigError(f"{root} is no folder of the snapshotter", hint="look what --containerd-root of its unit is")
    with alone(root, "a snapshotter"):
        remove_dead(socket)
        for target in sorted((root / "trees").glob("*")):
            unmount(target, config)
        if left := mounts.below(root):
            raise BootseerError(f"{left[0].target} is still mounted", hint="end what uses it, then run this again")
        discard_tree(root)
