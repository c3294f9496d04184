"""`bootseer` without a part of how a start fetches its checkpoint: ``python -m bench.cluster.started VARIANT ...``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

IN_TURN, BESIDE, EVERYTHING, NEITHER = "in-turn", "beside", "everything", "everything-beside"
STRICT = "strict"
STARTED = (sys.executable, "-m", "bench.cluster.started")
"""Begins the command line, before the variant."""
VARIANTS = {
    BESIDE: "what was recorded, beside the image's hot blocks",
    IN_TURN: "what was recorded, after them",
    EVERYTHING: "all of the checkpoint, after them",
    NEITHER: "all of the checkpoint, beside them",
    STRICT: "what was recorded, after them, however late they are",
}


def main() -> None:
    variant = sys.argv.pop(1)
    from bootseer.cli import main as cli
    from bootseer.launch import turn
    from bootseer.launch.checkpoint import CheckpointStage
    from bootseer.stripefs.checkpoint import access

    if variant in (EVERYTHING, NEITHER):
        access.load = lambda *given: None
    begin: Callable[[Any], None] = CheckpointStage.begin
    release: Callable[[Any], None] = CheckpointStage.release

    def both(self: CheckpointStage) -> None:
        begin(self)
        release(self)

    if variant in (BESIDE, NEITHER):
        CheckpointStage.begin = both  # type: ignore[method-assign]
    if variant == STRICT:
        turn.TURN_SECONDS = turn.HOT_SECONDS
    cli.main()


if __name__ == "__main__":
    main()
