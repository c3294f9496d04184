"""What others write is decoded or refused: whatever the bytes, with `BootseerError`, in seconds and in little memory.

Bytes are made from valid ones: cut, flipped, put together anew, and where they are JSON with other values in them.
Checksums are put right afterwards, as whoever writes the bytes can do. ``--soak`` takes ``--fuzz-seconds`` for all.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import msgspec
import pytest
import zstandard
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from bootseer import oci
from bootseer.blocks.formats.hotpack import HotPack, index_size, shape_of
from bootseer.blocks.formats.pagelist import PageList
from bootseer.blocks.formats.trace import Trace
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.chunks.chunklist import ChunkList
from bootseer.chunks.manifest import TreeManifest
from bootseer.env import inventory, key, manifest
from bootseer.env.canonical import sha256_of
from bootseer.errors import BootseerError
from bootseer.image import record
from bootseer.node import protocol
from bootseer.objects import lease, open_store
from bootseer.oci import spec, tar
from bootseer.profile import analysis, events, hostlist, kubernetes, logs, page, sacct, starts
from bootseer.slurm import comment
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import access, commit
from bootseer.wiretypes import json_as, known
from support.images import Member, tar_of

GOLDEN = Path(__file__).parents[1] / "golden"
TREE = "ab" * 32
PACKED = BlockMap(
    65536, 9 * 65536, [ObjectRef(TREE, 900)], [bytes(32)] * 9, [100 * block for block in range(9)], [100] * 9
)
"""The map of the golden hot pack."""
MOST_MEMORY, MOST_SECONDS = 256 << 20, 20.0


class Format(NamedTuple):
    """``read`` puts right what a writer would, and decodes."""

    valid: Callable[[], list[bytes]]
    read: Callable[[bytes], object]


def golden(name: str) -> Callable[[], list[bytes]]:
    return lambda: [(GOLDEN / name).read_bytes()]


def every(pattern: str) -> Callable[[], list[bytes]]:
    return lambda: [one.read_bytes() for one in sorted(GOLDEN.glob(pattern))]


def hashed(raw: bytes) -> bytes:
    body = raw[: -hashing.SIZE]
    return body + hashing.digest(body)


def each(*readers: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Read by all of them, whatever the others say."""

    def read(raw: bytes) -> None:
        for one in readers:
            try:
                one(raw)
            except BootseerError:
                continue

    return read


def hot_pack(raw: bytes) -> object:
    end = index_size(*shape_of(raw))
    return HotPack.decode(hashed(raw[:end]) + raw[end:], 65843, TREE, "cd" * 32, PACKED)


def env_manifest(raw: bytes) -> object:
    name = "0" * 64
    with contextlib.suppress(Exception):
        fields = json.loads(raw)
        del fields["sum"]
        raw = json.dumps(fields | {"sum": sha256_of(fields)}).encode()
        name = msgspec.convert(fields, known(manifest.SnapshotManifest)).name
    return manifest.decode(raw, name)


def text(line: bytes, decode: Callable[[bytes, str], object]) -> Callable[[bytes], object]:
    def read(raw: bytes) -> object:
        body = line + b"".join(raw.splitlines(keepends=True)[1:2])
        return decode(body + b"crc32c %08x\n" % crc32c(body), "x")

    return read


def footer(raw: bytes) -> object:
    return layout.decode_footer(raw[:-4] + crc32c(raw[:-4]).to_bytes(4, "little"), "x")


def header(raw: bytes) -> object:
    return layout.decode_header(raw, "x")


def key_document(raw: bytes) -> object:
    try:
        return key.document_from(json_as(raw, object))
    except ValueError:  # those who compare with it pass it over, too
        return None


def image_record(raw: bytes) -> object:
    return record.read(raw, "sha256:" + "ab" * 32, "linux/amd64", (), where="x")


def take_turn(raw: bytes, *, folder: list[Path] = []) -> object:  # noqa: B006
    """As a node does that finds this lease of another one."""
    store = open_store(str(folder[0]))
    name = "".join(random.choices("abcdef", k=20))
    store.put(f"{lease.FOLDER}/{name}/0", raw)
    settled = itertools.chain([False], itertools.repeat(True))
    return lease.take_turn(store, name, work="is fuzzed", seconds=0.1, settled=lambda: next(settled))


def start_ups(raw: bytes) -> object:
    """All that the pages do with an event file."""
    log = events.parse(raw.splitlines(keepends=True))
    rows = []
    for identity, one in log.by_identity().items():
        try:
            found = analysis.look(one, identity)
        except BootseerError:
            continue
        page.body(*found).encode(errors="surrogatepass")
        rows.append(starts.row(found[0], one))
    return starts.table(rows) if rows else None


def accounted(raw: bytes) -> object:
    return events.parse(sacct.events(sacct.read(raw).attempts))


def pods(raw: bytes) -> object:
    return events.parse(kubernetes.events(raw))


def log_lines(raw: bytes) -> object:
    source = logs.Source(raw.decode("utf-8", "replace").split("\n"), "n")
    return logs.extract([source], logs.patterns(), job="j", ranks_per_node=2)


def archive(raw: bytes) -> object:
    reader = tar.ChunkReader(iter([raw]))
    return [(entry, reader.exact(entry.size)) for entry in tar.entries(reader)]


def archives() -> list[bytes]:
    members = [Member(f"a/{number}", "file", b"x" * number, xattrs={"user.a": b"b"}) for number in (0, 700)]
    return [tar_of(members)]


def a_pod() -> list[bytes]:
    status = {
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"}],
        "containerStatuses": [{"state": {"running": {"startedAt": "2026-01-02T03:05:05Z"}}}],
        "initContainerStatuses": [
            {"state": {"terminated": {"startedAt": "2026-01-02T03:04:15Z", "finishedAt": "2026-01-02T03:04:35Z"}}}
        ],
    }
    meta = {"name": "p", "uid": "u", "creationTimestamp": "2026-01-02T03:04:00Z", "labels": {"job-name": "j"}}
    limits = {"limits": {"nvidia.com/gpu": "8"}}
    pod = {"kind": "Pod", "metadata": meta, "spec": {"nodeName": "n", "containers": [{"resources": limits}]}}
    event = {
        "kind": "Event", "reason": "Pulling", "eventTime": "2026-01-02T03:04:06.5Z",
        "involvedObject": {"kind": "Pod", "uid": "u"},
    }  # fmt: skip
    return [json.dumps({"kind": "List", "items": [pod | {"status": status}, event]}).encode()]


TREE_MANIFEST = TreeManifest(
    meta=ObjectRef(TREE, 10), meta_stored=ObjectRef(TREE, 10), map=ObjectRef(TREE, 10), data_size=1
)
CONFIG = b'{"architecture":"amd64","os":"linux","config":{"Env":["A=b"],"User":"1:1","Cmd":["sh"]},"rootfs":{"type":"layers","diff_ids":["sha256:00"]}}'  # noqa: E501
INDEX = b'{"schemaVersion":2,"manifests":[{"mediaType":"x","digest":"sha256:00","size":1,"platform":{"os":"linux","architecture":"amd64"},"annotations":{"a":"b"}}]}'  # noqa: E501
REQUEST = b'{"do":"mount","version":1,"ref":"r.example/x:1","job":"4711","logins":{"HOME":"/home/a"}}'
COMMENT = b"site=1 bootseer=r.example/x:1,bootseer.job=train; x"
NODES = [b"n[01-04,7],m3", b"a[1-9]b[1-9]"]
LOG = [b"[pod/a/b] 2026-01-02T03:04:05.5Z [rank3]: starting worker group\nI0102 03:04:05.123456 3: training\n"]

FORMATS: dict[str, Format] = {
    "tree-manifest": Format(
        lambda: [TREE_MANIFEST.encode()], lambda raw: TreeManifest.decode(raw, hashing.hexdigest(raw))
    ),
    "env-manifest": Format(golden("env/manifest.json"), env_manifest),
    "inventory": Format(
        lambda: [zstandard.decompress((GOLDEN / "env/inventory.zst").read_bytes())],
        each(
            lambda raw: inventory.decode(zstandard.compress(raw), targets=1),
            lambda raw: inventory.decode(raw, targets=1),
        ),
    ),
    "key-document": Format(golden("env/document.json"), key_document),
    "block-map": Format(golden("blocks/blockmap-v2.bin"), lambda raw: BlockMap.decode(hashed(raw))),
    "hot-pack": Format(golden("blocks/hotpack-v2.bin"), hot_pack),
    "trace": Format(golden("blocks/trace-v4.bin"), lambda raw: Trace.decode(hashed(raw))),
    "page-list": Format(
        lambda: [zstandard.decompress((GOLDEN / "blocks/pagelist-v1.bin").read_bytes())],
        each(
            lambda raw: PageList.decode(zstandard.compress(hashed(raw)), TREE, 1 << 40),
            lambda raw: PageList.decode(raw, TREE, 1 << 40),
        ),
    ),
    "chunk-list": Format(every("blocks/chunks-*"), lambda raw: ChunkList.decode(hashed(raw))),
    "pointer": Format(golden("stripe/pointer-1"), text(layout.POINTER_LINE, layout.decode_pointer)),
    "footer": Format(golden("stripe/footer-2"), footer),
    "header": Format(every("stripe/*header-2"), header),
    "commit": Format(golden("stripe/commit-1"), text(b"bootseer checkpoint 1\n", commit.decode)),
    "access-record": Format(golden("stripe/access-1.json"), access.decode),
    "image-record": Format(golden("image/record-v2.json"), image_record),
    "image-config": Format(lambda: [CONFIG], lambda raw: spec.decode(raw, oci.ImageConfig, "x")),
    "image-index": Format(lambda: [INDEX], lambda raw: spec.decode(raw, spec.Index, "x")),
    "node-request": Format(lambda: [REQUEST], lambda raw: protocol.decode_request(raw, True)),
    "job-comment": Format(lambda: [COMMENT], lambda raw: comment.parse(raw.decode("utf-8", "replace"))),
    "layer": Format(archives, archive),
    "lease": Format(lambda: [b'{"state":"held","node":"n","failures":1,"code":3,"message":"m","at":1.5}'], take_turn),
    "events": Format(golden("events/v2.jsonl"), start_ups),
    "sacct": Format(golden("slurm/sacct-22.05.json"), accounted),
    "kubernetes": Format(a_pod, pods),
    "log": Format(lambda: LOG, log_lines),
    "node-list": Format(lambda: NODES, lambda raw: hostlist.expand(raw.decode("utf-8", "replace"))),
}  # fmt: skip

DEEP, HUGE = "-- a place that is deep --", "-- a number that is none --"
HOSTILE: list[Any] = [
    None, True, 0, -1, 1, 1 << 31, 1 << 32, (1 << 53) + 1, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 10**400, 1e308,
    -1e308, 5e-324, float("nan"), float("inf"), HUGE, "", "\0", "..", "/", "../x", "/etc/passwd", "x" * 5000,
    "9" * 5000, "1" * 18, "\ud800", "\u202e", "n[0-99999]", "0001-01-01T00:00:00", "9999-12-31T23:59:59+00:00",
    [], {}, [[]], [{}], {"": {}}, ["x"] * 3000, DEEP,
]  # fmt: skip


def places(document: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is in a document."""
    if here:
        yield here
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(document, dict):
        inner = document.items()
    elif isinstance(document, list):
        inner = enumerate(document)
    for name, value in inner:
        yield from places(value, (*here, name))


def document(chance: random.Random, raw: bytes) -> bytes:
    """A JSON document with something else in some places."""
    made = json.loads(raw)
    for _ in range(chance.randint(1, 4)):
        found = list(places(made))
        if not found:
            break
        *above, last = chance.choice(found)
        inner = made
        for name in above:
            inner = inner[name]
        how = chance.choice(["value", "value", "value", "gone", "more", "twice"])
        other = copy.deepcopy(chance.choice(HOSTILE))
        if how == "gone":
            del inner[last]
        elif how == "more" and isinstance(inner, dict):
            inner[chance.choice(["", "x", "9" * 50])] = other
        elif how == "twice" and isinstance(inner, list):
            inner.extend(copy.deepcopy(inner[last]) for _ in range(chance.randint(1, 200)))
        else:
            inner[last] = other
    deep = b"[" * 50_000 + b"]" * 50_000
    text = json.dumps(made).encode()
    return text.replace(json.dumps(DEEP).encode(), deep).replace(json.dumps(HUGE).encode(), b"9e999")


def changed(chance: random.Random, raw: bytes) -> bytes:
    """Bytes with some of them changed, gone, twice or in between."""
    data = bytearray(raw)
    for _ in range(chance.randint(1, 6)):
        at, length = chance.randint(0, len(data)), chance.choice([1, 1, 2, 4, 8, 32, 200])
        how = chance.choice(["flip", "number", "cut", "gone", "twice", "noise"])
        if how == "flip" and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif how == "number":
            data[at : at + length] = chance.choice([b"\0", b"\xff", b"\x7f", b"\x80", b"\x01"]) * length
        elif how == "cut":
            del data[at:]
        elif how == "gone":
            del data[at : at + length]
        elif how == "twice":
            data[at:at] = data[at : at + length] * chance.randint(1, 50)
        else:
            data[at : at + length] = chance.randbytes(chance.randint(0, 64))
    return bytes(data)


def hostile(chance: random.Random, valid: list[bytes]) -> bytes:
    raw = chance.choice(valid)
    how = chance.choice(["noise", "bytes", "bytes", "document", "document", "document", "document"])
    if how == "noise":
        return chance.randbytes(chance.randint(0, 300))
    if how == "document":
        with contextlib.suppress(ValueError):
            json.loads(raw)
            return document(chance, raw)
        lines = raw.splitlines()
        there = [place for place, line in enumerate(lines) if line.startswith((b"{", b"["))]
        for place in set(chance.choices(there, k=3) if there else ()):
            with contextlib.suppress(ValueError):
                lines[place] = document(chance, lines[place])
        if there:
            return b"\n".join(lines) + b"\n"
    return changed(chance, raw)


def once(one: Format, raw: bytes) -> None:
    tracemalloc.reset_peak()
    before, began = tracemalloc.get_traced_memory()[0], time.monotonic()
    with contextlib.suppress(BootseerError):
        one.read(raw)
    assert tracemalloc.get_traced_memory()[1] - before < MOST_MEMORY
    assert time.monotonic() - began < MOST_SECONDS


def fuzz(one: Format, seconds: float, examples: int) -> None:
    valid = one.valid()

    @hypothesis.settings(max_examples=examples, database=None)
    @given(seed=st.integers(0, (1 << 64) - 1))
    def some(seed: int) -> None:
        if time.monotonic() < until:
            once(one, hostile(random.Random(seed), valid))

    until = time.monotonic() + seconds
    tracemalloc.start()
    try:
        while True:
            some()
            if time.monotonic() + 1 > until or examples < 100:
                return
    finally:
        tracemalloc.stop()


@pytest.fixture(autouse=True)
def store_of_leases(tmp_path: Path) -> None:
    assert take_turn.__kwdefaults__ is not None
    take_turn.__kwdefaults__["folder"][:] = [tmp_path]


each_format = pytest.mark.parametrize("name", FORMATS)


@each_format
def test_what_others_write_is_decoded_or_refused(name: str) -> None:
    fuzz(FORMATS[name], 30, 40)


@each_format
def test_what_is_valid_is_decoded(name: str) -> None:
    for raw in FORMATS[name].valid():
        FORMATS[name].read(raw)


@pytest.mark.parametrize(
    "depth", [150, 950, 50_000, *(pytest.param(depth, marks=pytest.mark.soak) for depth in (800, 900, 980))]
)
@each_format
def test_what_is_nested_deeply_is_refused_or_left_out(name: str, depth: int) -> None:
    """At each kind of place of the first document, and beside what is there."""
    format = FORMATS[name]
    for raw in format.valid():
        lines = [raw] if raw.startswith(b"{\n") else raw.splitlines()
        for at, line in enumerate(lines):
            if line.startswith((b"{", b'["')):
                for text in deep(json.loads(line), depth):
                    once(format, b"\n".join([*lines[:at], text, *lines[at + 1 :]]) + b"\n" * (len(lines) > 1))
                break


def deep(document: Any, depth: int) -> Iterator[bytes]:
    kinds = {tuple("*" if isinstance(one, int) else one for one in place): place for place in places(document)}
    for *above, last in [(DEEP,), *kinds.values()]:
        made = copy.deepcopy(document)
        inner = made
        for name in above:
            inner = inner[name]
        if isinstance(inner, list):
            inner.insert(0 if last == DEEP else last, DEEP)
        else:
            inner[last] = DEEP
        text = json.dumps(made).encode()
        yield text.replace(json.dumps(DEEP).encode(), b"[" * depth + b"]" * depth)
        yield text.replace(json.dumps(DEEP).encode(), b'{"a":' * depth + b"1" + b"}" * depth)


@pytest.mark.soak
@pytest.mark.timeout(0)
@each_format
def test_for_longer_what_others_write_is_decoded_or_refused(name: str, pytestconfig: pytest.Config) -> None:
    fuzz(FORMATS[name], pytestconfig.getoption("--fuzz-seconds") / len(FORMATS), 500)
