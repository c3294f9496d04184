"""`fs gc --keep`: the newest checkpoints of a folder stay, and what a start may be loading."""

from __future__ import annotations

import os
import time

import pytest

from bootseer.errors import ConfigError, NotFoundError
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.maintenance import collect
from bootseer.stripefs.store import StripeFS

HOUR = 3600.0


def save(fs: StripeFS, name: str, hours: float, *, whole: bool = True) -> None:
    """A checkpoint that was committed so long ago."""
    with fs.create(f"run/{name}/weights", striped=True, unit=4096, width=2) as out:
        out.write(bytes(20_000))
    if whole:
        fs.commit(f"run/{name}")
        then = time.time() - hours * HOUR
        os.utime(f"{fs.url}/run/{name}/{commit.NAME}", (then, then))


def left(fs: StripeFS) -> list[str]:
    return sorted(name for name in os.listdir(f"{fs.url}/run") if not name.startswith("."))


@pytest.mark.parametrize(
    ("saved", "keep", "age", "stays"),
    [
        ({"s1": 90, "s2": 80, "s3": 70, "s4": 60}, 2, 24, ["s3", "s4"]),
        ({"s1": 90, "s2": 80}, 2, 24, ["s1", "s2"]),
        ({"s1": 90, "s2": 80}, 9, 24, ["s1", "s2"]),
        # a start that began when s2 was the newest may be at it: s3 came ten hours ago
        ({"s1": 90, "s2": 80, "s3": 10}, 1, 24, ["s2", "s3"]),
        ({"s1": 90, "s2": 80, "s3": 10}, 1, 9, ["s3"]),
        ({"s9": 90, "s10": 80}, 1, 24, ["s10"]),  # by number, as `fs ls --latest`
        ({"s10": 90, "s9": 50}, 1, 24, ["s10"]),
        # other names are no older ones of a series
        ({"s1": 90, "s2": 80, "s3": 70, "best-s1": 85, "final": 60}, 1, 24, ["s3", "best-s1", "final"]),
        ({"epoch=1-step=9": 90, "epoch=2-step=18": 80}, 1, 24, ["epoch=2-step=18"]),
    ],
)
def test_the_newest_stay_and_what_a_start_may_load(
    fs: StripeFS, saved: dict[str, float], keep: int, age: float, stays: list[str]
) -> None:
    for name, hours in saved.items():
        save(fs, name, hours)
    said = collect.gc(fs.backend, "run", age=age * HOUR, keep=keep, dry_run=True)
    assert left(fs) == sorted(saved)
    done = collect.gc(fs.backend, "run", age=age * HOUR, keep=keep)
    assert left(fs) == sorted(stays)
    assert sorted(one.path for one in done if not one.kept) == [f"run/{name}" for name in sorted(saved.keys() - stays)]
    assert [(one.path, one.kept) for one in said] == [(one.path, one.kept) for one in done]
    assert all(one.kind == "checkpoint" and one.size >= 20_000 for one in done)
    for name in stays:
        fs.checkpoint(f"run/{name}")
    assert collect.gc(fs.backend, age=0) == []


def test_what_is_not_complete_neither_counts_nor_goes(fs: StripeFS) -> None:
    for number, name in enumerate(("s1", "s2", "s3")):
        save(fs, name, 90 - number)
    save(fs, "s4", 0, whole=False)
    save(fs, "s5", 80)
    os.unlink(f"{fs.url}/run/s5/weights")
    os.mkdir(f"{fs.url}/run/logs")
    assert [one.path for one in collect.gc(fs.backend, "run", keep=1) if one.kind == "checkpoint"] == [
        "run/s2",
        "run/s1",
    ]
    assert left(fs) == ["logs", "s3", "s4", "s5"]
    assert fs.latest("run") == "run/s3"
    with pytest.raises(ConfigError):
        collect.gc(fs.backend, "run", keep=-1)
    with pytest.raises(NotFoundError):
        collect.gc(fs.backend, "run/s3/weights", keep=1)


def test_a_checkpoint_that_another_one_removed_is_no_error(fs: StripeFS, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        save(fs, f"s{number}", 90 - number)
    found = collect.namespace.remove_tree

    def twice(backend: object, path: str) -> None:
        found(fs.backend, path)
        found(fs.backend, path)

    monkeypatch.setattr(collect.namespace, "remove_tree", twice)
    assert [one.kept for one in collect.gc(fs.backend, "run", keep=1)] == ["", ""]
    assert left(fs) == ["s2"]
