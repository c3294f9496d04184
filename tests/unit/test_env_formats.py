"""Stored objects: golden files, round trips, and everything hostile refused before a write."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env import inventory, manifest
from bootseer.env.canonical import canonical, sha256_of
from bootseer.env.inputs import Observed
from bootseer.env.inventory import Entry, sort_key
from bootseer.env.key import KeyDocument
from bootseer.env.manifest import SnapshotManifest
from bootseer.errors import ConfigError, DataError

GOLDEN = Path(__file__).parent.parent / "golden" / "env"
NAME = "2088628c59b07f1d91b7b24fbacdca650295ca15b038cf4e733214bf92c63dda/4c04dcf0e1aade22b2c07540f3f53aaf831684c103ede3a0c431df09519b1c1f"  # noqa: E501
ROOT = Entry("0", "d", 0o755, 0, 0, 0, 1)


def make_manifest(**changed: object) -> SnapshotManifest:
    document = KeyDocument(targets=["/opt/env"], command=["pip", "install", "x"])
    base = SnapshotManifest(
        key=document.key,
        document=document,
        inputs=Observed(),
        tree="ab" * 32,
        size=10,
        stored=5,
        inventory="cd" * 32,
        entries=1,
        base=[""],
        result=["ef"],
        created=1_700_000_000,
        node="n",
        seconds=1.5,
    )
    return msgspec.structs.replace(base, **changed)


def line(*fields: object) -> bytes:
    return canonical(list(fields))


def stored(*lines: bytes, count: int | None = None) -> bytes:
    head = canonical({"magic": "bootseer-env-list", "version": 1, "entries": len(lines) if count is None else count})
    return zstandard.ZstdCompressor().compress(b"\n".join([head, *lines]) + b"\n")


def entry(path: str, kind: str = "f", data: str = "00") -> bytes:
    return line(path, kind, 0o644, 0, 0, 1, 5, data, {})


TOP = entry("0", "d", "")


def test_golden_inventory() -> None:
    data = (GOLDEN / "inventory.zst").read_bytes()
    entries = inventory.decode(data, targets=1)
    assert [item.kind for item in entries] == ["d", "d", "f", "h", "l", "o", "w"]
    assert entries[2].xattrs == {"user.note": b"\x00\xff"}
    assert entries[2].mtime_ns == -1_500_000_001
    assert entries[4].path == "0/odd \udcff\n"
    raw = zstandard.ZstdDecompressor().decompress(data)
    assert zstandard.ZstdDecompressor().decompress(inventory.encode(entries)) == raw


def test_golden_manifest() -> None:
    data = (GOLDEN / "manifest.json").read_bytes().rstrip(b"\n")
    found = manifest.decode(data, NAME)
    assert found.document.targets == ["/opt/env"]
    assert found.encode() == data


names = st.text(st.characters(exclude_characters="/\0", codec=None), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)


@given(
    st.lists(
        st.tuples(
            names, st.sampled_from("dofl"), st.integers(-(2**62), 2**62), st.dictionaries(st.text(), st.binary())
        ),
        unique_by=lambda row: row[0],
        max_size=8,
    )
)
def test_inventories_come_back(rows: list[tuple[str, str, int, dict[str, bytes]]]) -> None:
    entries = [ROOT]
    for name, kind, mtime, xattrs in rows:
        if any("\ud800" <= char <= "\udfff" and not "\udc80" <= char <= "\udcff" for char in name):
            continue  # no file name decodes to these
        kept = {key: value for key, value in xattrs.items() if not key.startswith("trusted.overlay.")}
        entries.append(Entry(f"0/{name}", kind, 0o644, 1, 2, 3, mtime, "x", kept))  # type: ignore[arg-type]
    entries.sort(key=lambda item: sort_key(item.path))
    data = inventory.encode(entries)
    assert inventory.decode(data, targets=1, expect=inventory.digest(data)) == entries


def test_a_directory_is_followed_by_its_content() -> None:
    paths = ["0", "0/a", "0/a-b", "0/a/c", "0/a.d"]
    assert sorted(paths, key=sort_key) == ["0", "0/a", "0/a/c", "0/a-b", "0/a.d"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([TOP, entry("0/../x")], "not a plain relative path"),
        ([TOP, entry("../x")], "not a plain relative path"),
        ([TOP, entry("/etc/passwd")], "not a plain relative path"),
        ([TOP, entry("0//x")], "not a plain relative path"),
        ([TOP, entry("0/./x")], "not a plain relative path"),
        ([TOP, entry("0/a\0b")], "not a plain relative path"),
        ([TOP, entry("")], "not a plain relative path"),
        ([TOP, entry("1", "d")], "belongs to no target"),
        ([TOP, entry("0/a"), entry("0/a")], "appears twice"),
        ([TOP, entry("0/l", "l", "/etc"), entry("0/l/passwd")], "lies under no directory"),
        ([TOP, entry("0/w", "w"), entry("0/w/x")], "lies under no directory"),
        ([TOP, entry("0/a/b"), entry("0/a", "d")], "lies under no directory"),
        ([TOP, entry("0/h", "h", "0/nothing")], "links to no earlier file"),
        ([TOP, entry("0/h", "h", "../../etc/shadow")], "links to no earlier file"),
        ([TOP, entry("0/c", "c")], "Invalid enum value 'c'"),
        ([entry("0", "l", "/etc")], "is not a directory"),
        ([], "lacks target"),
        ([TOP, line("0/x", "f", 0, 0, 0, 1, 5, "00", {"trusted.overlay.opaque": "eQ=="})], "overlay attributes"),
        ([TOP, line("0/x", "f", 0, 0, 0, 1, 5, "00", {"user.x": "!"})], "Invalid base64"),
        ([TOP, line("0/x", "f", -1, 0, 0, 1, 5, "00", {})], "Expected `int` >= 0"),
        ([TOP, line("0/x", "f", 0, 0, 0, True, 5, "00", {})], "Expected `int`, got `bool`"),
        ([TOP, line("0/x", "f", 0, 0, 0, 1, 1 << 63, "00", {})], "0/x"),
        ([TOP, line("0/x", "f", 0)], "without nine fields"),
        ([TOP, b"[["], "cannot read the inventory"),
    ],
)
def test_hostile_inventories_are_refused(lines: list[bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        inventory.decode(stored(*lines), targets=1)


def test_inventory_damage() -> None:
    good = stored(TOP)
    with pytest.raises(DataError, match="wrong checksum"):
        inventory.decode(good + b"x", targets=1, expect=inventory.digest(good))
    with pytest.raises(DataError, match="not an inventory"):
        inventory.decode(stored(TOP, count=2), targets=1)
    with pytest.raises(DataError, match="cannot read"):
        inventory.decode(b"nonsense", targets=1)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    claims = bytearray(bomb)
    with pytest.raises(DataError):
        inventory.decode(bytes(claims[:40]), targets=1)


def forged(**changed: object) -> bytes:
    fields = msgspec.to_builtins(make_manifest())
    fields.update(changed)
    return canonical({**fields, "sum": sha256_of(fields)})


def with_targets(*targets: str) -> tuple[bytes, str]:
    document = KeyDocument(targets=list(targets), command=["x"])
    fields = msgspec.to_builtins(make_manifest(document=document, key=document.key))
    return canonical({**fields, "sum": sha256_of(fields)}), f"{document.key}/{Observed().name}"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tree": "../../etc/passwd"}, "bad digest"),
        ({"inventory": "../x"}, "bad digest"),
        ({"version": 1}, "unknown format"),
        ({"magic": "other"}, "unknown format"),
        ({"key": "0" * 64}, "another key"),
        ({"inputs": {"files": {"/job/r.txt": "00"}}}, "another key"),
        ({"base": []}, "contradicts itself"),
        ({"size": -1}, "contradicts itself"),
        ({"surprise": 1}, "cannot read the manifest"),
        ({"created": "now"}, "cannot read the manifest"),
    ],
)
def test_hostile_manifests_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        manifest.decode(forged(**changed), make_manifest().name)


@pytest.mark.parametrize("target", ["../x", "relative", "/a/../../etc", "/a/./b", "/a\0b"])
def test_hostile_targets_are_refused(target: str) -> None:
    data, key = with_targets(target)
    with pytest.raises(DataError, match="bad target"):
        manifest.decode(data, key)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b'{"sum":1}', b"[" * 100_000])
def test_junk_manifests_are_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        manifest.decode(data, f"{0:064}/{0:064}")


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_any_flipped_bit_of_a_manifest_is_seen(position: int, bit: int) -> None:
    good = make_manifest()
    data = bytearray(good.encode())
    data[position % len(data)] ^= 1 << bit
    try:
        found = manifest.decode(bytes(data), good.name)
    except DataError:
        return
    assert found == good  # a flip that JSON reads the same, such as the case of an escape


def test_manifest_keys() -> None:
    name = f"{'a' * 64}/{'b' * 64}"
    assert manifest.manifest_key(name) == f"env/snapshots/{name}.json"
    for bad in ("../x", "A" * 64, "a" * 64, f"{name}0", f"{'a' * 64}/../b", ""):
        with pytest.raises(ConfigError):
            manifest.manifest_key(bad)


def test_an_inventory_bomb_costs_little() -> None:
    """Two megabytes of it took gigabytes and a minute."""
    import tracemalloc

    import zstandard

    row = b'["0/%d","d",0,0,0,0,0,"",{}]'
    lines = [b'{"entries":800000,"magic":"bootseer-env-list","version":1}', b'["0","d",0,0,0,0,0,"",{}]']
    many = b"\n".join([*lines, *(row % (number % 10) for number in range(799_999))])
    count = b'{"entries":2000000,"magic":"bootseer-env-list","version":1}'
    for text in (b"x" * (400 << 20), many, b"[" * (1 << 20), count):
        stored = zstandard.ZstdCompressor(level=3).compress(text)
        tracemalloc.start()
        with pytest.raises(DataError):
            inventory.decode(stored, targets=1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 << 20
