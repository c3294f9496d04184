"""Capture: what a command changed in the targets, as overlayfs layers. By an overlay over each target (root, exact: its
upper directory is the difference; changes outside the targets are not seen), or a stat-scan before and after
(anywhere)."""

from __future__ import annotations

import logging
import os

from bootseer.config import Config
from bootseer.env import overlay, place, scan
from bootseer.env.scan import Changes, Mark
from bootseer.env.spec import EnvSpec, Target
from bootseer.errors import BootseerError, UnsupportedError

log = logging.getLogger(__name__)


class ScanCapture:
    """The command writes into the targets themselves; what it changed is read there afterwards, if it is still so."""

    def __init__(self, targets: tuple[Target, ...]) -> None:
        self._targets = targets
        self._before = [place.marks(target) for target in targets]

    def changes(self) -> list[Changes]:
        """What the command changed, as it is now."""
        return [self._change(*each) for each in zip(self._targets, self._before, strict=True)]

    def _change(self, target: Target, before: dict[str, Mark]) -> Changes:
        after = place.marks(target)
        changed, deleted = scan.difference(before, after)
        folders = {path for each in (*changed, *deleted) for path in scan.above(each) if path in after}
        return Changes({path: after[path] for path in (*changed, *folders)}, changed, deleted)


def begin(spec: EnvSpec, key: str, config: Config) -> overlay.Group | ScanCapture:
    """Get ready for the command: overlays where they are allowed and wanted, in whose upper directories it writes then;
    a scan elsewhere (with a log line). Raises `BootseerError` or `OSError` when neither is possible; nothing is left
    mounted then."""
    if may_mount(spec):
        group = overlay.new_group(key, spec.targets, config, caller=spec.caller)
        try:
            group.mount_targets()
            return group
        except BaseException as exc:
            group.take_down()
            if not isinstance(exc, BootseerError):
                raise
            log.warning("%s; capturing by a scan of the targets", exc)
    if os.geteuid() == 0 and spec.shared:
        raise UnsupportedError(f"other containers may change {spec.shared} while root reads it")
    return ScanCapture(spec.targets)


def may_mount(spec: EnvSpec) -> bool:
    """Whether overlays over the targets are wanted and allowed: root, and no mount below one that would be hidden."""
    if spec.restore == "unpack" or os.geteuid() != 0:
        return False
    for target in spec.targets:
        if below := scan.mount_points_below(target.host):
            log.warning("%s has mounts below it (%s): not mounting over it", target.host, min(below))
            return False
    return True
