"""What the demo starts: the full job (torch, a small Llama) or the small one that tests use (standard library only)."""

from __future__ import annotations

from pathlib import Path

import msgspec

HERE = Path(__file__).parent


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """One job and the image around it."""

    name: str
    job: Path
    """Folder with ``train.py``, ``setup.sh`` and ``requirements.txt``, as the image has it at ``/job``."""
    packages: tuple[str, ...]
    """Python packages in the image, as ``name==version``, or by name with the version of the demo's environment."""
    disk_gib: float
    """Free disk the demo asks for when nothing is cached: an estimate with some air, not a measured peak."""
    steps_saved: int = 10
    steps_resumed: int = 3


TORCH = Recipe(name="torch", job=HERE / "job", packages=("torch", "numpy"), disk_gib=40.0)
SMALL = Recipe(name="small", job=HERE / "job_small", packages=(), disk_gib=4.0)
RECIPES = {recipe.name: recipe for recipe in (TORCH, SMALL)}
