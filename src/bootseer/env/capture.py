"""Capture: what a command changed in the targets, as overlayfs layers.

Two techniques. An overlay over each target (root, exact: its upper directory is the difference; changes outside the
targets are not seen), or a stat-scan before and after (anywhere; the difference is staged with hard links).
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from bootseer.config import Config
from bootseer.env import overlay, place, scan
from bootseer.env.layer import stage_layer
from bootseer.env.spec import EnvSpec, Target
from bootseer.errors import BootseerError, ConfigError, UnsupportedError
from bootseer.folders import settled
from bootseer.kernel.removal import discard_tree

log = logging.getLogger(__name__)


class OverlayCapture:
    """The command writes into the upper directories of ``group``, which stay mounted: its result is in place."""

    def __init__(self, group: overlay.Group) -> None:
        self.group: overlay.Group | None = group
        self.work = group.area

    def layers(self) -> Path:
        """The folder that holds the layers ``0``, ``1``, ...; to be read only while nobody writes to the targets."""
        assert self.group is not None
        return self.group.upper

    def close(self) -> None:
        """The overlays stay; only what publishing left goes."""
        for name in ("meta", "data"):
            (self.work / name).unlink(missing_ok=True)


class ScanCapture:
    """The command writes into the targets themselves; the difference is staged beside the first of them."""

    def __init__(self, targets: tuple[Target, ...], cache_dir: Path) -> None:
        self.group: overlay.Group | None = None
        self._targets = targets
        self._before = [place.marks(target) for target in targets]
        self.work = _work_folder(targets[0].host, cache_dir)

    def layers(self) -> Path:
        base = self.work / "layers"
        for number, target in enumerate(self._targets):
            with place.opened(target, make=True) as host:
                changed, deleted = scan.difference(self._before[number], scan.snapshot_marks(host))
                stage_layer(host, base / str(number), changed, deleted)
        return base

    def close(self) -> None:
        discard_tree(self.work)


Capture = OverlayCapture | ScanCapture


def begin(spec: EnvSpec, key: str, config: Config) -> Capture:
    """Get ready for the command: overlays where they are allowed and wanted, a scan elsewhere (with a log line).

    Raises `BootseerError` or `OSError` when neither is possible; nothing is left mounted then.
    """
    if may_mount(spec):
        group = overlay.new_group(key, spec.targets, config, caller=spec.caller)
        try:
            group.mount_targets()
            return OverlayCapture(group)
        except BaseException as exc:
            group.take_down()
            if not isinstance(exc, BootseerError):
                raise
            log.warning("%s; capturing by a scan of the targets", exc)
    if os.geteuid() == 0 and spec.shared:
        raise UnsupportedError(f"other containers may change {spec.shared} while root reads it")
    return ScanCapture(spec.targets, Path(config.cache_dir))


def may_mount(spec: EnvSpec) -> bool:
    """Whether overlays over the targets are wanted and allowed: root, and no mount below one that would be hidden."""
    if spec.restore == "unpack" or os.geteuid() != 0:
        return False
    for target in spec.targets:
        if below := scan.mount_points_below(target.host):
            log.warning("%s has mounts below it (%s): not mounting over it", target.host, min(below))
            return False
    return True


def _work_folder(host: Path, cache_dir: Path) -> Path:
    # Beside the target it is most likely on its file system, where hard links stage gigabytes in a moment.
    parent = next(folder for folder in host.parents if folder.is_dir())
    for base in (parent, cache_dir / "env"):
        with contextlib.suppress(PermissionError, ConfigError):
            if os.geteuid() == 0:
                settled(base / "work")
            base.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=".bootseer-", dir=base))
    return Path(tempfile.mkdtemp(prefix="bootseer-"))
