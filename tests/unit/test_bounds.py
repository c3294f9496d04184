"""A process that works off what others have written is ended before the jobs of the node are."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.kernel import bounds


def in_child(do: Callable[[], object]) -> str:
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(write, str(do()).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read) as file:
        return file.read()


@pytest.mark.parametrize(
    ("own", "left"), [("-999", "0"), ("-500\n", "0"), ("0\n", "0\n"), ("300\n", "300\n"), ("", "")]
)
def test_the_protection_of_who_starts_it_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, left: str
) -> None:
    score = tmp_path / "score"
    monkeypatch.setattr(bounds, "_SCORE", score)
    bounds.be_ended_early()
    score.write_text(own)
    bounds.be_ended_early()
    assert score.read_text() == left


def test_memory_that_it_may_not_have_is_an_error_of_its_own() -> None:
    def take() -> str:
        bounds.limit_memory()
        most = resource.getrlimit(resource.RLIMIT_DATA)[0]
        assert (256 << 20) < most < (64 << 30)
        bytearray(128 << 20)
        try:
            bytearray(most)
        except MemoryError:
            return "MemoryError"
        return "taken"

    assert in_child(take) == "MemoryError"


@pytest.mark.parametrize("stack", [8 << 20, 1 << 40, (1 << 63) - 1, resource.RLIM_INFINITY])
def test_stacks_of_threads_have_room_besides(monkeypatch: pytest.MonkeyPatch, stack: int) -> None:
    limits = {
        resource.RLIMIT_DATA: (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        resource.RLIMIT_STACK: (stack, -1),
    }
    made = list[int]()

    def note(kind: int, limit: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_DATA
        if limit[0] >= 1 << 63:
            raise OverflowError("Python int too large to convert to C long")
        made.append(limit[0])

    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", note)
    bounds.limit_memory()
    assert made == [] if stack > 1 << 60 else made[0] >= (512 << 20) + 128 * max(stack, 8 << 20)
