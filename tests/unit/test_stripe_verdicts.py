"""What becomes of stripes that no pointer names: each row of the table, and what no row may do."""

from __future__ import annotations

from itertools import product

import pytest

from bootseer.stripefs.maintenance.verdicts import TABLE, Facts, verdict

EVERY = [Facts(*values) for values in product((False, True), repeat=len(Facts._fields))]
LOST, KEPT, GARBAGE = "lost-pointer", "kept-stripes", "unreferenced-stripes"


def facts(text: str) -> Facts:
    return Facts(**{name: name in text.split() for name in Facts._fields})


ROWS = [
    ("whole listed", 0, LOST),
    ("whole listed unfinished replaced unsure remnants", 0, LOST),
    ("whole", 1, LOST),
    ("whole unsure remnants", 1, LOST),
    ("listed", 2, KEPT),
    ("listed unfinished unsure", 2, KEPT),
    ("unsure", 3, KEPT),
    ("whole unfinished unsure", 3, KEPT),
    ("whole replaced unsure remnants", 3, KEPT),
    ("whole replaced remnants", 4, KEPT),
    ("", 5, GARBAGE),
    ("unfinished remnants", 5, GARBAGE),
    ("whole replaced", 5, GARBAGE),
    ("whole unfinished", 5, GARBAGE),
    ("whole unfinished replaced remnants", 5, GARBAGE),
]


@pytest.mark.parametrize(("text", "row", "kind"), ROWS)
def test_each_row(text: str, row: int, kind: str) -> None:
    assert verdict(facts(text)) is TABLE[row]
    assert TABLE[row].kind == kind


def test_each_row_is_needed() -> None:
    assert {TABLE.index(verdict(one)) for one in EVERY} == {row for _, row, _ in ROWS} == set(range(len(TABLE)))


def test_only_what_something_says_is_old_or_unfinished_is_garbage() -> None:
    garbage = {one for one in EVERY if verdict(one).kind == GARBAGE}
    assert garbage == {
        one
        for one in EVERY
        if not one.listed
        and not one.unsure
        and (not one.whole or one.unfinished or (one.replaced and not one.remnants))
    }


def test_a_pointer_is_made_of_whole_sets_only() -> None:
    assert all(one.whole for one in EVERY if verdict(one).kind == LOST)


def test_what_is_kept_says_why() -> None:
    assert all(row.why for row in TABLE if row.kind == KEPT and "unsure" not in row.when)
