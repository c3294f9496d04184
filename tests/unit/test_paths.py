"""Modules that work where others can write open nothing by a plain name: `bootseer.kernel.beneath` and
`bootseer.kernel.links` do it for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "bootseer"

GUARDED = (
    "backends",
    "objects",
    "oci/layout.py",
    "oci/members.py",
    "kernel/beneath.py",
    "kernel/links.py",
    "env/keyfile.py",
    "env/place.py",
    "env/packages.py",
    "env/unpack.py",
    "image/container.py",
    "image/pins.py",
    "launch/ready.py",
    "profile/files.py",
    "profile/emit.py",
    "containerd/images.py",
    "node/door.py",
)
"""Modules and packages whose paths others can change. Who mends another one adds it."""

ALLOWED = {
    ("backends/interface.py", "_write", "open"): "a local file that the caller publishes, of its own",
    ("objects/registry.py", "_descriptor_of", "open"): "a local file that the caller publishes, of its own",
    ("kernel/beneath.py", "folder", "os.open"): "a folder that is trusted, and the way to it",
    ("kernel/links.py", "open_followed", "os.open"): "the descriptor that was looked at, by /proc",
    ("kernel/links.py", "_numbers", "Path('/proc/self/uid_map').read_text"): "the kernel's",
    ("env/keyfile.py", "_open_plainly", "os.open"): "no more than held, then looked at, then opened by /proc",
    ("env/packages.py", "public", "(anew / name / path).parent.mkdir"): "a new folder of the process that captures",
    ("env/place.py", "_open", "real.mkdir"): "where `folders.settled` says that nobody else changes names",
    ("env/unpack.py", "undoing", "base.mkdir"): "below a folder of which the same is known",
    ("env/unpack.py", "_note", "open"): "the journal in it, which is looked at when it is read",
    ("env/unpack.py", "_note", "os.open"): "as above",
    ("env/unpack.py", "move_in", "near.mkdir"): "a new folder below a descriptor",
    ("image/container.py", "_open_inside", "os.open"): "the root of a container, which root has mounted",
    ("image/pins.py", "pins", "folder.mkdir"): "in the private folder of the run",
    ("image/pins.py", "pins", "pin.place.mkdir"): "as above",
    ("image/pins.py", "pins", "pin.place.touch"): "as above",
    ("profile/emit.py", "_read_boot_id", "open"): "the kernel's",
    ("containerd/images.py", "_mounted", "target.mkdir"): "in the service's private folder",
}
"""Module, function and call, with the reason why a link, a pipe or a huge file does no harm there."""

_METHODS = {"read_bytes", "read_text", "write_bytes", "write_text", "touch", "mkdir"}
_SAFE = {"O_NOFOLLOW", "O_EXCL"}


def _names(tree: ast.AST) -> set[str]:
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def plain_calls(code: str) -> Iterator[tuple[str, str, int]]:
    """Function, call and line of what opens, reads or makes something by a name that may be a link by now."""
    tree = ast.parse(code)
    safe = set(_SAFE)
    for node in ast.walk(tree):  # constants and variables that say it
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value and _names(node.value) & safe:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                safe |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}

    def within(node: ast.AST, function: str) -> Iterator[tuple[str, str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from within(child, function or child.name)
                continue
            if isinstance(child, ast.Call) and (call := _plain(child, safe)):
                yield function, call, child.lineno
            yield from within(child, function)

    yield from within(tree, "")


def _plain(call: ast.Call, safe: set[str]) -> str:
    text = ast.unparse(call.func)
    below = any(word.arg == "dir_fd" for word in call.keywords)
    if text == "os.fwalk":  # it opens what was a folder a moment ago
        return text
    if text in ("open", "io.open"):
        first = ast.unparse(call.args[0]) if call.args else ""
        return "" if first in ("fd", "file.fileno()") or first.startswith("beneath.open_") else "open"
    if text == "os.open":
        return "" if any(_names(part) & safe for part in (*call.args[1:], *call.keywords)) else text
    if text == "os.makedirs":
        return text
    return text if text.rpartition(".")[2] in _METHODS and "." in text and not below else ""


def found() -> dict[tuple[str, str, str], list[int]]:
    calls: dict[tuple[str, str, str], list[int]] = {}
    for name in GUARDED:
        paths = [SOURCE / name] if name.endswith(".py") else sorted((SOURCE / name).rglob("*.py"))
        assert paths, f"there is no {name}"
        for path in paths:
            for function, call, line in plain_calls(path.read_text()):
                calls.setdefault((str(path.relative_to(SOURCE)), function, call), []).append(line)
    return calls


def test_nothing_is_opened_by_a_plain_name_where_others_can_write() -> None:
    assert {key: lines for key, lines in found().items() if key not in ALLOWED} == {}


def test_each_exception_is_one_and_has_a_reason() -> None:
    assert ALLOWED.keys() - found().keys() == set()
    assert all(ALLOWED.values())


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ("def f(p):\n    return p.read_bytes()", ["p.read_bytes"]),
        ("def f(fd):\n    return list(os.fwalk('.', dir_fd=fd))", ["os.fwalk"]),
        ("def f(p):\n    with open(p) as file:\n        return lambda: open(p)", ["open", "open"]),
        ("async def f(p):\n    self.root.mkdir(parents=True)", ["self.root.mkdir"]),
        ("os.makedirs(p)", ["os.makedirs"]),
        ("os.mkdir(p)", ["os.mkdir"]),
        ("os.mkdir(p, dir_fd=fd)", []),
        ("os.open(p, os.O_RDONLY, dir_fd=fd)", ["os.open"]),
        ("os.open(p, os.O_RDONLY | os.O_NOFOLLOW)", []),
        ("os.open(p, os.O_WRONLY | os.O_CREAT | os.O_EXCL)", []),
        ("_FLAGS = os.O_RDONLY | os.O_NOFOLLOW\nos.open(p, _FLAGS | os.O_PATH)", []),
        ("store.open(p)\nbeneath.read_regular(p, 9)\nos.fdopen(fd)\nmkdir(p)", []),
    ],
)
def test_what_counts_as_plain(code: str, calls: list[str]) -> None:
    assert [call for _, call, _ in plain_calls(code)] == calls
