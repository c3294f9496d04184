"""Caches that starts hand on to each other: generations are united, and a start is right whatever is wrong with one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.config import Config
from bootseer.env import generation
from bootseer.env.generation import Cache, Held
from bootseer.env.spec import Technique
from bootseer.objects import open_store

pytestmark = pytest.mark.root


class Nodes:
    """Empty nodes with one store, and what is held on them."""

    def __init__(self, root: Path, how: Technique) -> None:
        self.root, self.how, self.store = root, how, root / "store"
        self.cache = Cache(group="compile", path="/run/bootseer/caches", owner=(0, 0))
        self.held: list[Held] = []

    def start(self, node: str, cache: Cache | None = None) -> Held:
        config = Config(cache_dir=str(self.root / node / "cache"), state_dir=str(self.root / node / "state"))
        held = generation.restore(cache or self.cache, str(self.store), config, how=self.how)
        self.held.append(held)
        return held

    def end(self) -> None:
        for held in self.held:
            held.close()

    @property
    def generations(self) -> list[int]:
        found = generation.generations(open_store(str(self.store)), self.cache.document.key, Config())
        return [generation.number_of(one) for one in found]


@pytest.fixture(params=["mount", "unpack"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, request.param)
    yield nodes
    nodes.end()


def add(held: Held, *names: str, text: str = "compiled") -> None:
    for name in names:
        path = held.folder / "inductor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text} {name}\n" * 50)


def captured(held: Held, *used: str) -> tuple[bool, str]:
    for path, status in held.entries().items():  # as if it were settled
        assert time.time() - status.st_ctime < 1000, path
    time.sleep(2.1)
    publication = held.capture(used)
    return publication.wait(60) if publication else (False, "nothing was added")


def names(held: Held) -> set[str]:
    return {path.removeprefix("inductor/") for path in held.entries()}


def test_what_a_start_adds_is_there_on_the_next_empty_node(nodes: Nodes) -> None:
    first = nodes.start("a")
    assert (first.said, names(first)) == ("cold", set())
    add(first, "aa/one.so", "aa/two.so", "locks/one.lock", ".1.tmp")
    assert captured(first) == (True, "")
    second = nodes.start("b")
    assert second.said == "restored generation 1"
    assert names(second) == {"aa/one.so", "aa/two.so"}
    assert not (second.folder / "inductor/locks").exists()
    assert (second.folder / "inductor/aa/one.so").read_text() == "compiled aa/one.so\n" * 50
    assert captured(second) == (False, "nothing was added")
    add(second, "bb/three.so")
    assert captured(second) == (True, "")
    assert names(nodes.start("c")) == {"aa/one.so", "aa/two.so", "bb/three.so"}
    assert nodes.generations == [2, 1]


def test_a_text_with_a_credential_stays_on_the_node(nodes: Nodes) -> None:
    first = nodes.start("a")
    add(first, "aa/one.so")
    add(first, "aa/log.txt", text="export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMIK7MDENGbPxRfiCYzzzzzzzzzzzz")
    assert captured(first) == (True, "")
    second = nodes.start("b")
    assert names(second) == {"aa/one.so"}
    add(second, "aa/log.txt", text="export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMIK7MDENGbPxRfiCYzzzzzzzzzzzz")
    assert captured(second) == (False, "nothing is new")
    assert nodes.generations == [1]
