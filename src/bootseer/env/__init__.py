"""Snapshots of a job's runtime dependencies: the set-up command runs once per distinct input, everyone else restores.
``run`` is the whole stage; ``docs/internals/snapshot.md`` describes what is stored."""

from bootseer.env.publication import Publication
from bootseer.env.result import EnvResult
from bootseer.env.spec import EnvSpec, MissError, Outcome, Target, resolve_in
from bootseer.env.stage import run

__all__ = ["EnvResult", "EnvSpec", "MissError", "Outcome", "Publication", "Target", "resolve_in", "run"]
