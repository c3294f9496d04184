"""``bootseer clean``: what killed processes left on this node."""

from __future__ import annotations

from pathlib import Path

from bootseer.cli._shared import AsJson, DryRun, answer, settings
from bootseer.errors import BootseerError
from bootseer.units import count_text

_SECONDS = 120.0


def clean(dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """End and remove what killed processes left on this node: containers, starts, mounts of images and environments.

    Each start does so for its own kind; `bootseer cache gc` gives back the disk of what is left in the cache.
    """
    from bootseer.env import overlay
    from bootseer.image import inventory
    from bootseer.launch import leftovers

    config = settings()

    def stale() -> list[inventory.Item]:
        images = [
            item
            for item in inventory.listing(Path(config.state_dir), Path(config.cache_dir))
            if item.state == inventory.STALE
        ]
        left = [
            inventory.Item(kind="environment", id=area.name, state=inventory.STALE, what="", folder=str(area))
            for area in overlay.left_areas(config)
        ]
        return images + left

    before, left = stale(), set[str]()
    if not dry_run:
        leftovers.sweep(config, _SECONDS)
        overlay.sweep(config)
        left = {item.id for item in stale()}
    gone = [item for item in before if item.id not in left]
    done = "would end" if dry_run else "ended"
    lines = [f"{done} {item.kind} {item.id}: {item.folder}" for item in gone] or ["nothing was left over"]
    answer({"dry_run": dry_run, "removed": gone}, as_json, *lines)
    if left:
        raise BootseerError(f"{count_text(len(left), 'item is', 'items are')} still stale", hint="run it again later")
