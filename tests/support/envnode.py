"""Nodes on which tests run set-up commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer import env
from bootseer.config import Config
from bootseer.env import EnvResult, EnvSpec, Target, overlay


def spec_for(host: Path, **changed: object) -> EnvSpec:
    """A command in a container, for which ``/opt/env`` is the folder ``host``."""
    base = EnvSpec(
        targets=(Target("/opt/env", str(host)),), command=("make-env",), image_digest="sha256:1", background=False
    )
    return msgspec.structs.replace(base, **changed)


def config_in(home: Path) -> Config:
    """With the cache and the state below ``home``."""
    return Config(cache_dir=str(home / "cache"), state_dir=str(home / "state"))


def run(
    home: Path, store: Path | str, runner: Callable[[], int], host: Path | None = None, **changed: object
) -> EnvResult:
    """One start on the node whose folders are in ``home``; the target is ``host``, else ``target`` there."""
    spec = spec_for(host or home / "target", **changed)
    return env.run(spec, runner, store_url=str(store), config=config_in(home))


def release(state: Path | str) -> None:
    """Unmount the environments of a node."""
    for group in overlay.groups(Path(state))[::-1]:
        group.unmount()
