"""Where ``scripts/`` keep what they fetch and build: Hadoop's jars, Kubernetes, peers of benchmarks, environments."""

from __future__ import annotations

import os
from pathlib import Path


def folder(*below: str) -> Path:
    """The development cache, as ``scripts/_common.sh`` says it, or what is ``below`` it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("BOOTSEER_DEV_CACHE") or os.path.join(base, "bootseer-dev"), *below)
