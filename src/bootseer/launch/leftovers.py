"""What starts that were killed left on the node, and how it is ended. All mounts of a start lie in its own folder
``<cache_dir>/starts/<name>`` (`owned_folder`); but for environments whose targets are in folders of the host, which the
next start with these targets takes over."""

from __future__ import annotations

import time
from pathlib import Path

from bootseer import fsmount, image
from bootseer.config import Config
from bootseer.env import overlay
from bootseer.folders import clear, trusted
from bootseer.image.mount import STARTS, SWEEP_SECONDS, unmount_in
from bootseer.kernel import mount as mounts
from bootseer.mountrecords import end_left

CHECKPOINT = "checkpoint"
EVENTS = "events"
ROOTFS = "rootfs"


def sweep(config: Config, seconds: float = SWEEP_SECONDS) -> None:
    """End what killed starts left: containers, mounts, and the servers behind these. See `image.sweep`."""
    until = time.monotonic() + seconds
    image.sweep(Path(config.state_dir), seconds)
    starts = trusted(Path(config.cache_dir)) / STARTS
    end_left(starts.glob("[!.]*"), lambda folder: _end(folder, config), until)


def _end(folder: Path, config: Config) -> None:
    state = trusted(Path(config.state_dir))
    for group in reversed(overlay.groups(state)):
        if any(folder in target.host.parents for target in group.record.targets):
            group.unmount()
    if checkpoint := fsmount.find(folder / CHECKPOINT, config=config):
        checkpoint.unmount()
    unmount_in(folder, state)
    if mounts.is_mounted(folder / ROOTFS):  # by containerd, which keeps its snapshot
        mounts.unmount(folder / ROOTFS, lazy=True)
    clear(folder)
