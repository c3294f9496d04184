"""Imports point down only: what ``docs/internals/architecture.md`` draws is so."""

from __future__ import annotations

import ast
import functools
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src/bootseer"
PARTS = {"image", "env", "fsmount"}
BLOCKS = ["formats", "publish", "profiles", "fetch", "extract", "serving"]
"""Sub-packages of `bootseer.blocks`, from below; modules beside them are on top."""
LOWEST = {"metadata"}
"""Modules beside them that are below them all."""


@functools.cache
def statements(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Those that import, wherever in the module with this source."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """The names that the module imports, wherever in it, without ``bootseer``."""
    for node in statements(path.read_text()):
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


def needs(source: str, known: Container[str]) -> set[str]:
    """Which of the modules ``known`` the module with this source imports.

    What counts: every import statement, also one inside of a function, which would only hide a circle, and one for
    types alone. A name that is imported from a package is that of its module where there is one, else the package's own
    ``__init__``, as is the package in ``import package``. What does not: those that Python makes by itself, of the
    packages around a module.
    """
    found: set[str] = set()
    for node in statements(source):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in known}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules each of which imports, perhaps through others, all of the others."""
    reached = {name: _reached(name, graph) for name in graph}
    found = {frozenset({name} | {other for other in reached[name] if name in reached[other]}) for name in graph}
    return sorted(sorted(circle) for circle in found if len(circle) > 1 or reached[min(circle)] & circle)


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


@functools.cache
def everything() -> dict[str, set[str]]:
    """Which modules each module of ``bootseer`` imports."""
    names = {}
    for path in modules():
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: needs(path.read_text(), names) for name, path in names.items()}


def modules(package: str = "") -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@functools.cache
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


def test_the_two_fillers_do_not_know_each_other() -> None:
    graph = packages()
    assert not graph["blocks"] & {"stripefs", "fsmount"}
    assert "blocks" not in graph["stripefs"] | graph["fsmount"] | graph["served"]


def test_the_three_parts_do_not_know_each_other() -> None:
    assert not {part: known for part in PARTS if (known := packages()[part] & (PARTS - {part}))}


def test_blocks_point_down() -> None:
    for path in modules("blocks"):
        first, *rest = path.relative_to(ROOT / "blocks").parts
        mine = BLOCKS.index(first) if rest else -1 if first.removesuffix(".py") in LOWEST else len(BLOCKS)
        for package, *names in imports(path):
            if package == "blocks" and names and names[0] in BLOCKS:
                assert BLOCKS.index(names[0]) <= mine, f"{path} imports {'.'.join(names)}"
            elif package == "blocks" and names and (ROOT / f"blocks/{names[0]}.py").exists():
                assert names[0] in LOWEST or mine == len(BLOCKS), f"{path} imports {names[0]}"


def test_no_modules_import_each_other() -> None:
    assert circles(everything()) == []


KNOWN = {"a", "a.b", "a.c"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b", {"a.b"}),
        ("from a import b, other", {"a.b", "a"}),
        ("from a.c import name", {"a.c"}),
        ("def f():\n    from a import b", {"a.b"}),
        ("class C:\n    try:\n        import a.b\n    except ImportError:\n        import json", {"a.b"}),
        ("if TYPE_CHECKING:\n    import a.b\nelse:\n    import a.c", {"a.b", "a.c"}),
    ],
)
def test_what_counts_as_an_import(source: str, expected: set[str]) -> None:
    assert needs(source, KNOWN) == expected


def test_a_planted_circle_is_found() -> None:
    graph = dict(everything())
    assert "bootseer.hdfs.records" in graph["bootseer.hdfs.datanode"]
    planted = needs("def f():\n    from bootseer.hdfs import datanode", graph)
    graph["bootseer.hdfs.records"] = graph["bootseer.hdfs.records"] | planted
    assert ["bootseer.hdfs.datanode", "bootseer.hdfs.records"] in circles(graph)


NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}
"""What is everybody's of a named tuple."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def private_names(source: str) -> Iterator[str]:
    """The dotted names with a private part that a module imports, or takes from what it has imported."""
    nodes, imported = list(ast.walk(ast.parse(source))), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name: alias.name for alias in node.names}
    taken = {
        f"{imported[node.value.id]}.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported
    }
    for name in {*imported.values(), *taken}:
        if name.split(".")[0] in ("bootseer", "support") and any(map(private, name.split("."))):
            yield name


def owner(name: str) -> str:
    """The package whose modules may say the private ``name``."""
    parts = name.split(".")
    before = parts[: next(at for at, part in enumerate(parts) if private(part))]
    root = ROOT.parents[1] / ("tests" if before[0] == "support" else "src")
    while not root.joinpath(*before).is_dir():
        before.pop()
    return ".".join(before)


def test_private_names_stay_in_their_package() -> None:
    """A test calls what others may call, too; ``setattr`` of a private constant is a test's own affair."""
    wrong = []
    for path in [*modules(), *sorted((ROOT.parents[1] / "tests").rglob("*.py"))]:
        base = ROOT.parent if path.is_relative_to(ROOT) else ROOT.parents[1] / "tests"
        mine = ".".join(path.relative_to(base).parent.parts)
        for name in private_names(path.read_text()):
            if not f"{mine}.".startswith(f"{owner(name)}."):
                wrong.append(f"{path}: {name}")
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from bootseer.kernel import mount, _libc", {"bootseer.kernel._libc"}),
        ("from bootseer.env import unpack as lib\nlib._move(1)\nlib.move(2)", {"bootseer.env.unpack._move"}),
        ("from bootseer.kernel._fuse import Loop", {"bootseer.kernel._fuse.Loop"}),
        ("from bootseer.a import T\nT._fields\nT.__doc__\nother._x", set()),
    ],
)
def test_private_names_are_seen(source: str, names: set[str]) -> None:
    assert set(private_names(source)) == names


@functools.cache
def defines(module: str) -> set[str]:
    """The names at the top of the module ``bootseer...``, of its modules, too; empty where they are made as it runs."""
    path = ROOT.parent.joinpath(*module.split("."))
    found = {one.stem for one in path.glob("*") if one.suffix == ".py" or one.is_dir()}
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if module.endswith("_pb2") or not path.exists():
        return set()
    made = [*ast.parse(path.read_text()).body]
    while made:
        node = made.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Import() | ast.ImportFrom():
                found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            case _:
                found |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                made += [one for one in ast.walk(node) if isinstance(one, (ast.stmt, ast.alias)) and one is not node]
    return set() if "__getattr__" in found else found | {"__file__", "__name__", "__doc__", "__path__"}


def missing(source: str) -> Iterator[str]:
    """What the source names of modules of bootseer that they have not."""
    nodes = list(ast.walk(ast.parse(source)))
    named, bound = dict[str, str](), set[str]()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                bound.add(name)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "bootseer":
                for alias in node.names:
                    if (names := defines(module)) and alias.name not in names:
                        yield f"{module}.{alias.name}"
                    named[alias.asname or alias.name] = f"{module}.{alias.name}"
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in named and name not in bound:
                if (names := defines(named[name])) and attribute not in names:
                    yield f"{named[name]}.{attribute}"


@pytest.mark.parametrize("folder", ["tests", "bench"])
def test_what_tests_name_is_there(folder: str) -> None:
    """Many tests run late, and types are checked of the product alone."""
    found = {str(path): list(missing(path.read_text())) for path in (ROOT.parents[1] / folder).rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_name_that_is_gone_is_found() -> None:
    source = "from bootseer.profile import card, nothing\nfrom bootseer.units import no_size\ncard.no_words"
    assert list(missing(source)) == [
        "bootseer.profile.nothing",
        "bootseer.units.no_size",
        "bootseer.profile.card.no_words",
    ]
