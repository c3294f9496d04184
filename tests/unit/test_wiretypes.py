"""msgspec knows each type before a second thread can decode it, and no document is too deep to be refused."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer import config, wiretypes
from bootseer.cli import node_install, profile_serve
from bootseer.closing import descriptor
from bootseer.errors import BootseerError
from bootseer.launch import job
from bootseer.objects import signature
from bootseer.profile import logs

ROOT = Path(__file__).parents[2] / "src/bootseer"

FIRST_USE = """
import sys, threading
sys.setswitchinterval(1e-6)
import msgspec
from bootseer.wiretypes import known

TYPES = '''
import msgspec
from typing import Annotated, Literal, NamedTuple
class Entry(msgspec.Struct, frozen=True, array_like=True):
    path: str
    kind: Literal["d", "o", "f"]
    size: Annotated[int, msgspec.Meta(ge=0)]
    attributes: dict[str, bytes] = {}
class Pair(NamedTuple):
    first: Entry
    second: int
class Document(msgspec.Struct):
    entries: list[Entry]
    pair: Pair
'''
entry = ["a", "d", 1]
document = {"entries": [entry], "pair": [entry, 1]}
raw = msgspec.json.encode(document)

def read(names):
    together.wait()
    msgspec.json.decode(raw, type=known(names["Document"]))
    msgspec.convert([entry, 1], known(names["Pair"]))
    msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=known(names["Entry"]))

for _ in range(200):
    together, names = threading.Barrier(8), {}
    exec(TYPES, names)
    threads = [threading.Thread(target=read, args=[names]) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_that_decode_a_type_for_the_first_time() -> None:
    """Without `known` this ends in a segmentation fault each time."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], stderr=subprocess.PIPE, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def unknown(source: str) -> Iterator[str]:
    """Where ``source`` gives msgspec a type without `known`, or might."""
    tree = ast.parse(source)
    called = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("msgspec", "tomllib"):
            yield f"{node.lineno}: names of msgspec and tomllib are said with its own name before them"
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if node in called and re.fullmatch(r"(json|tomllib)\.loads?|msgspec\.json\.decode", name):
            yield f"{node.lineno}: {name} raises RecursionError, json_as and loaded do not"
        if not re.fullmatch(r"msgspec\.([a-z]+\.)?(decode|convert|Decoder)", name):
            continue
        if (call := called.get(node)) is None:  # type: ignore[call-overload]
            yield f"{node.lineno}: {name} is called elsewhere"
            continue
        at = 0 if name.endswith("Decoder") else 1
        kinds = [*call.args[at : at + 1], *(word.value for word in call.keywords if word.arg in (None, "type"))]
        for kind in kinds:
            if not (isinstance(kind, ast.Call) and ast.unparse(kind.func).split(".")[-1] == "known"):
                yield f"{node.lineno}: {ast.unparse(call)}"


def test_each_type_is_known_before_it_is_decoded() -> None:
    paths = [path for path in ROOT.rglob("*.py") if path.name != "wiretypes.py"]
    assert len(paths) > 300
    assert {path: found for path in paths if (found := list(unknown(path.read_text())))} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("msgspec.msgpack.decode(raw)", 0),
        ("msgspec.msgpack.decode(raw, type=known(Reply))", 0),
        ("msgspec.json.decode(raw, type=known(Reply))", 1),
        ("json.loads(raw)", 1),
        ("tomllib.load(file)", 1),
        ("from tomllib import loads", 1),
        ("loaded(json.loads, raw)", 0),
        ("msgspec.msgpack.decode(raw, type=Reply)", 1),
        ("msgspec.yaml.decode(raw, type=Reply)", 1),
        ("def f(x):\n  return [msgspec.convert(x, Reply), msgspec.convert(x, type=Reply, strict=False)]", 2),
        ("_decode = msgspec.json.Decoder(Reply).decode", 1),
        ("_decode = msgspec.json.Decoder(type=wiretypes.known(Reply), strict=False).decode", 0),
        ("msgspec.yaml.decode(raw, **{'type': Reply})", 1),
        ("from msgspec.json import decode", 1),
        ("read = partial(msgspec.convert, type=Reply)", 1),
        ("decode = msgspec.json.decode if text else msgspec.yaml.decode\ndecode(raw, type=Reply)", 2),
    ],
)
def test_a_type_without_is_found(source: str, count: int) -> None:
    assert len(list(unknown(source))) == count


documents = pytest.mark.parametrize(
    "read",
    [
        logs.patterns,
        job.load,
        profile_serve.token_in,
        signature.signing_key,
        lambda file: config.load({"BOOTSEER_CONFIG": str(file)}),
        lambda file: node_install.install(None, check=True, containerd=True, containerd_config=str(file)),
    ],
    ids=["patterns", "job", "token", "key", "settings", "containerd"],
)


@documents
def test_a_named_document_of_holes_takes_no_memory(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """Red before: `MemoryError`, or as much memory as somebody's file says."""
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 41)
    with pytest.raises(BootseerError, match="more than 16 MiB"):
        read(tmp_path / "holes")


@documents
def test_nobody_waits_for_ever_for_a_pipe_that_nobody_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    """Red before: it did, also where a neighbour had put the pipe in a file's place."""
    monkeypatch.setattr(wiretypes, "SILENT", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BootseerError, match="nobody has written to it"):
        read(tmp_path / "pipe")


def test_a_document_may_be_a_pipe() -> None:
    read, write = os.pipe()
    with descriptor(read):
        os.write(write, b"a = 1\n")
        os.close(write)
        assert wiretypes.document(f"/dev/fd/{read}") == b"a = 1\n"
