"""Docs and ``--help`` use the words of ``docs/glossary.md``, and none that they replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from bootseer.cli.verbs import assemble

ROOT = Path(__file__).parents[2]
REPLACED = {
    "announce": "(nothing)",
    "board": "shared state",
    "borrowed": "(nothing)",
    "calm": "back-off, or ignore signals",
    "crew": "worker pool",
    "fanotify": "FUSE",
    "fence": "fencing token",
    "foresight": "prefetch",
    "heed": "handle",
    "holder": "supervisor",
    "hush": "silence",
    "inorder": "sequential reader",
    "keeper": "FUSE server",
    "lane": "parallel range, connection",
    "lanes": "parallel ranges, connections",
    "pilot": "request",
    "pulse": "heartbeat",
    "secede": "detach",
    "sparing": "rate limit",
    "standby server": "block server",
    "strand": "give up",
    "survey": "scan",
    "touch log": "access trace",
    "twin": "block server",
}
"""Word -> what stands in its place. As whole words, in any case."""
ALLOWED = {
    "docs/internals/hdfs.md": {"holder"},  # of a lease, in HDFS's own words
    "docs/compare.md": {"fanotify"},  # of another tool
}
HISTORY = {"CHANGELOG.md", "docs/benchmarks.md"}
MEASURED = "docs/benchmarks/"
"""Names of variants, from the reports."""


def documents() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = {path: str(path.relative_to(ROOT)) for path in found}
    return [path for path, name in names.items() if name not in HISTORY and not name.startswith(MEASURED)]


def found_in(text: str, allowed: frozenset[str] | set[str] = frozenset()) -> list[str]:
    words = [word for word in REPLACED if word not in allowed]
    return [f"{word} -> {REPLACED[word]}" for word in words if re.search(rf"\b{word}\b", text, re.IGNORECASE)]


def commands(command: object, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_use_the_words_of_the_glossary(path: Path) -> None:
    assert found_in(path.read_text(), ALLOWED.get(str(path.relative_to(ROOT)), set())) == []


def test_help_uses_the_words_of_the_glossary() -> None:
    app = assemble()
    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 20
    for words in found:
        shown = CliRunner().invoke(app, [*words, "--help"])
        assert shown.exit_code == 0, words
        assert (words, found_in(shown.output)) == (words, [])


def test_the_test_finds_what_it_looks_for() -> None:
    assert found_in("The Keeper's pulse") == ["keeper -> FUSE server", "pulse -> heartbeat"]
    assert found_in("a keepers' plane") == []
