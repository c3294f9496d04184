"""The verdict on a set of stripes that no pointer names: lost, kept, or garbage. The first row that fits says it; why:
docs/internals/stripe.md, "Garbage, and what is not". A collection deletes what the last row calls garbage, and what is
lost only when it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["lost-pointer", "kept-stripes", "unreferenced-stripes"]


class Facts(NamedTuple):
    """What is known of the set and its folder."""

    whole: bool
    """All its stripes are there and belong together."""
    listed: bool
    """A COMMIT lists it."""
    unfinished: bool
    """A temporary file of its uuid is there: its writer did not finish, or somebody was removing it."""
    replaced: bool
    """A pointer of its name has the same or a larger epoch."""
    unsure: bool
    """A striped file of the folder is damaged, or a COMMIT that may list the set."""
    remnants: bool
    """A plain file of the folder may be what is left of a pointer."""


class Row(NamedTuple):
    when: Mapping[str, bool]
    """By fields of `Facts`; of the others it does not matter what they are."""
    kind: Kind
    why: str = ""
    """Why it is kept; "" when the one who asks knows that."""


TABLE = (
    Row({"whole": True, "listed": True}, "lost-pointer"),
    Row({"whole": True, "unfinished": False, "replaced": False}, "lost-pointer"),
    Row({"listed": True}, "kept-stripes", "a COMMIT lists it"),
    Row({"unsure": True}, "kept-stripes"),
    Row(
        {"whole": True, "unfinished": False, "remnants": True},
        "kept-stripes",
        "a file of this folder may be what is left of its pointer",
    ),
    Row({}, "unreferenced-stripes"),
)


def verdict(facts: Facts) -> Row:
    return next(row for row in TABLE if all(getattr(facts, name) is value for name, value in row.when.items()))
