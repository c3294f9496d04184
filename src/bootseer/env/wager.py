"""The wager of a node that waits for another one's result: whether it would have it sooner by the command itself.

The other node says how long its command took and how its publication goes. Pure: all that counts is handed in.
"""

from __future__ import annotations

from bootseer.objects.lease import Progress

FEW = 3
"""Nodes of a start that may all ask the package index at once. With more, that is the bottleneck: one asks alone, as
each one more would take at least as long to be served as what it waits for takes to be stored."""
LEAST = 1.0
"""Seconds for which nobody gives up a wait."""


def waits(told: Progress, nodes: int) -> bool:
    """Whether to wait on. ``nodes``: how many the start has; 0, which nobody knows, counts as many.

    What is left of the publication is compared with the command as a whole, so that a node is never later than by the
    smaller of both. Before anything was sent, as much is left as it took so far.
    """
    if not 0 < nodes <= FEW:
        return True
    left = told.left / told.rate if told.rate else told.since
    return left <= max(told.elapsed, LEAST)
