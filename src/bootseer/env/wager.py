"""The wager of a node that waits for another one's result: whether it would have it sooner by the command itself. The
other node says how long its command took and how its publication goes. Pure: all that counts is handed in."""

from __future__ import annotations

from bootseer.objects.lease import Progress

FEW = 3
"""Nodes that may ask the package index at once: with more, that is the bottleneck."""
LEAST = 1.0
"""Seconds for which nobody gives up a wait."""


def waits(told: Progress, nodes: int, rank: int) -> bool:
    """Whether node ``rank`` of ``nodes`` is to wait on. It waits where nobody knows these (0; -1).

    What is left of the publication is compared with the command as a whole. Where that is shorter, the first ``FEW``
    nodes run it, the next ones when these have had the time for it, and so on: a node is never later than it would be
    with the result, and at most by two commands later than its turn. Before anything was sent, as much is left as it
    took so far."""
    if not 0 <= rank < nodes:
        return True
    left = told.left / told.rate if told.rate else told.since
    command = max(told.elapsed, LEAST)
    return left <= command or told.since < rank // FEW * command
