"""Imports point down only: what ``docs/internals/architecture.md`` draws is so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src/bootseer"
PARTS = {"image", "env", "stripefs"}
BLOCKS = ["formats", "cache", "publish", "profiles", "fetch", "extract", "serving"]
"""Sub-packages of `bootseer.blocks`, from below; modules beside them are on top, those with an underscore below."""


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """The names that the module imports, wherever in it, without ``bootseer``."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "bootseer" and rest:
                yield tuple(rest)


def modules(package: str = "") -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


def packages() -> dict[str, set[str]]:
    """Which packages (and modules) right below ``bootseer`` each of them imports."""
    graph: dict[str, set[str]] = {}
    for path in modules():
        mine = path.relative_to(ROOT).parts[0].removesuffix(".py")
        graph.setdefault(mine, set()).update(name[0] for name in imports(path) if name[0] != mine)
    return graph


def test_packages_import_each_other_in_one_direction() -> None:
    graph = packages()
    done: set[str] = set()
    while left := graph.keys() - done:
        free = {name for name in left if not graph[name] & left}
        assert free, f"these import each other: { ({name: sorted(graph[name] & left) for name in sorted(left)}) }"
        done |= free


@pytest.mark.parametrize("part", sorted(PARTS))
def test_the_three_parts_do_not_know_each_other(part: str) -> None:
    assert not packages()[part] & (PARTS - {part})


def test_doubles_are_for_tests_and_the_demo() -> None:
    assert {name for name, used in packages().items() if "testing" in used} <= {"demo"}


def test_blocks_point_down() -> None:
    for path in modules("blocks"):
        first, *rest = path.relative_to(ROOT / "blocks").parts
        mine = BLOCKS.index(first) if rest else -1 if first.startswith("_") else len(BLOCKS)
        for package, *names in imports(path):
            if package == "blocks" and names and names[0] in BLOCKS:
                assert BLOCKS.index(names[0]) <= mine, f"{path} imports {'.'.join(names)}"
            elif package == "blocks" and names and (ROOT / f"blocks/{names[0]}.py").exists():
                assert names[0].startswith("_") or mine == len(BLOCKS), f"{path} imports {names[0]}"


def test_modules_of_blocks_make_no_circles() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules("blocks")}
    left: dict[str, set[str]] = {}
    for name, path in names.items():
        used = {".".join(one[:end]) for one in imports(path) for end in range(2, len(one) + 1)}
        left[name] = used & names.keys() - {name}
    while free := [name for name, used in left.items() if not used & left.keys()]:
        for name in free:
            del left[name]
    left = {name for name in left if not name.startswith(("blocks.serving", "blocks.tree"))}
    assert not left, f"these import each other, or what does: {sorted(left)}"
