"""Conversion without mounts: same input, same bytes; errors name layers; nothing stays behind; blocks are shared."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer import faults, image, oci
from bootseer.blocks.metadata import LocalTree, localize
from bootseer.chunks import hashing
from bootseer.chunks.zstd import decompress
from bootseer.erofs import Reader
from bootseer.errors import DataError, FullError, NotFoundError
from bootseer.image import ImageRecord
from bootseer.image.record import key_of
from bootseer.objects.folder import FolderStore
from support import forked
from support.images import Member, folder, tar_of, write_image
from support.layouts import Compression
from support.waits import until

BLOCK = 65536


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


BASE = [folder("opt"), *(Member(f"opt/{n}", data=noise(10_000 * n, n)) for n in range(1, 40))]
ONE = [Member("one", data=noise(300_000, 100)), Member("opt/.wh.1"), Member("opt/39", data=b"replaced")]
TWO = [Member("two", data=noise(300_000, 200))]


class Rig:
    """Layouts, a store, and a work folder that must be empty after whatever happens."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.work = place / "work"
        self.store = FolderStore(place / "store")

    def image(self, *layers: list[Member], tag: str = "v1", compression: Compression = "gzip") -> str:
        write_image(self.place / "layout", layers, tag=tag, compression=compression)
        return f"oci:{self.place}/layout:{tag}"

    def convert(self, ref: str, store: str = "", **more: object) -> ImageRecord:
        try:
            return image.ensure(ref, store or self.store.url, work_dir=self.work, **more).record  # type: ignore[arg-type]
        finally:
            assert list(self.work.iterdir()) == []

    def tree(self, record: ImageRecord) -> LocalTree:
        return localize(self.store, record.tree, self.place / "cache")

    def files(self, record: ImageRecord) -> dict[bytes, bytes]:
        """Contents by path, read by way of map, packs and our own reader of EROFS."""
        tree = self.tree(record)
        data = bytearray()
        packs = [self.store.get(pack.key, most=1 << 30) for pack in tree.map.packs]
        for block in range(tree.map.count):
            length, start = tree.map.length_of(block), tree.map.offsets[block]
            frame = packs[tree.map.pack_of[block]][start : start + tree.map.lengths[block]] if packs else b""
            plain = decompress(frame, length) if frame else bytes(length)
            assert tree.map.matches(block, plain)
            data += plain
        reader = Reader(tree.meta.read_bytes(), lambda offset, length: bytes(data[offset : offset + length]))
        return {path.strip(b"/"): reader.read(inode, 0, inode.size) for path, inode in reader.walk() if inode.is_file}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def contents(*layers: list[Member]) -> dict[bytes, bytes]:
    """What is left of the files of ``layers``, as the tests here make them."""
    found: dict[bytes, bytes] = {}
    for layer in layers:
        for member in layer:
            parent, _, name = member.name.rpartition("/")
            if name.startswith(".wh."):
                del found[os.fsencode(f"{parent}/{name[4:]}")]
            elif member.kind == "file":
                found[os.fsencode(member.name)] = member.data
    return found


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_every_file_comes_back(rig: Rig, compression: Compression) -> None:
    record = rig.convert(rig.image(BASE, ONE, compression=compression))
    assert rig.files(record) == contents(BASE, ONE)
    assert (record.members, record.packs, record.shared_bytes) == (43, 2, 0)
    assert (
        record.stored_bytes
        == sum(info.size for info in rig.store.list("blobs")) + rig.store.stat(f"trees/{record.tree}.json").size
    )
    assert set(record.seconds) == {"layers", "tree", "pack", "publish"}


def test_same_layers_same_bytes_whatever_the_compression(rig: Rig, tmp_path: Path) -> None:
    wanted: dict[str, bytes] = {}
    for compression in ("gzip", "zstd", "none"):
        store = FolderStore(tmp_path / compression)
        ref = rig.image(BASE, ONE, compression=compression, tag=compression)  # type: ignore[arg-type]
        rig.convert(ref, store.url)
        made = {
            info.key: store.get(info.key, most=1 << 30) for info in store.list("") if not info.key.startswith("images/")
        }
        assert made == (wanted or made)
        wanted = made


def test_an_image_on_the_same_base_stores_its_own_layer_only(rig: Rig) -> None:
    first = rig.convert(rig.image(BASE, [Member("one", data=noise(300_000, 100))], tag="one"))
    second = rig.convert(rig.image(BASE, TWO, tag="two"))
    assert second.stored_bytes < 330_000
    assert second.shared_bytes > 7_000_000
    assert rig.tree(first).map.packs[0] == rig.tree(second).map.packs[0]
    assert rig.files(second) == contents(BASE, TWO)
    third = rig.convert(rig.image(BASE, ONE, tag="three"))
    assert third.stored_bytes < 60_000, "the last block of its first file, which is in other company here"
    assert rig.files(third) == contents(BASE, ONE)


def test_a_large_file_in_other_company_is_stored_once(rig: Rig) -> None:
    wheel = Member("lib/wheel.so", data=noise(3_000_000, 1))
    rig.convert(rig.image([folder("lib"), wheel], tag="one"))
    second = rig.convert(rig.image([Member("etc/hosts", data=b"x" * 70_001)], [folder("lib"), wheel], tag="two"))
    assert second.shared_bytes > 2_900_000
    assert second.stored_bytes < 150_000


def test_blocks_of_hidden_files_only_are_zeros_in_the_map(rig: Rig) -> None:
    hidden, kept = Member("big", data=noise(20 * BLOCK, 1)), Member("kept", data=noise(BLOCK, 2))
    record = rig.convert(rig.image([hidden, kept], [Member(".wh.big")]))
    blocks = rig.tree(record).map
    assert [blocks.is_zero(block) for block in range(blocks.count)] == [True] * 20 + [False]
    assert rig.files(record) == {b"kept": kept.data}
    gone = rig.convert(rig.image([hidden], [Member(".wh.big")], tag="gone"))
    assert gone.packs == 0
    assert rig.files(gone) == {}


def test_holes_cost_nothing(rig: Rig) -> None:
    record = rig.convert(rig.image([Member("zeros", data=bytes(5_000_000) + b"end")]))
    assert record.stored_bytes < 10_000
    assert rig.files(record) == {b"zeros": bytes(5_000_000) + b"end"}


def test_progress_and_an_empty_image(rig: Rig) -> None:
    seen: list[tuple[str, int, int]] = []
    rig.convert(rig.image(BASE), progress=lambda *step: seen.append(step))
    for step in ("download", "convert", "publish"):
        done = [count for name, count, _ in seen if name == step]
        assert done == sorted(done)
        assert done
    assert seen[-1][1] == seen[-1][2]
    record = rig.convert(rig.image([folder("only")], tag="empty"))
    assert (record.packs, rig.files(record)) == (0, {})


def test_nothing_but_packs_is_on_the_disk(rig: Rig) -> None:
    names: set[str] = set()
    rig.convert(
        rig.image(BASE, ONE),
        progress=lambda *step: names.update(path.name for path in rig.work.glob("*/*")),
    )
    assert names <= {"lock", "pack-0", "pack-1"}
    assert "pack-0" in names


@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "swapped", "missing"])
@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_a_damaged_layer_is_named(rig: Rig, damage: str, compression: Compression) -> None:
    ref = rig.image(BASE, ONE, compression=compression)
    with oci.open_image(ref) as opened:
        layer, other = (item.digest for item in opened.layers)
    path = rig.place / "layout/blobs/sha256" / layer[7:]
    raw = bytearray(path.read_bytes())
    if damage == "flipped":
        raw[len(raw) // 2] ^= 1
    elif damage == "truncated":
        del raw[len(raw) // 2 :]
    elif damage == "longer":
        raw += bytes(1024)
    elif damage == "swapped":
        raw = bytearray((path.parent / other[7:]).read_bytes())
    path.write_bytes(raw) if damage != "missing" else path.unlink()
    with pytest.raises((DataError, NotFoundError), match=layer[7:]):
        rig.convert(ref)
    assert list(rig.store.list("trees")) == []
    assert list(rig.store.list("images")) == []


@pytest.mark.parametrize("content", [b"no tar at all" * 100, tar_of([Member("../out")]), tar_of(BASE)[:70_000]])
def test_a_layer_that_is_no_proper_tar_is_named(rig: Rig, content: bytes) -> None:
    write_image(rig.place / "layout", [BASE, content])
    ref = f"oci:{rig.place}/layout:v1"
    with oci.open_image(ref) as opened:
        layer = opened.layers[1].digest
    with pytest.raises(DataError, match=f"layer {layer} of oci:.* is corrupt: "):
        rig.convert(ref)
    assert list(rig.store.list("trees")) == []


def test_a_wrong_diff_id_is_found_before_anything_is_visible(rig: Rig) -> None:
    rig.image(BASE, tag="a")
    ref = rig.image(TWO, tag="b")
    blobs = rig.place / "layout/blobs/sha256"
    with oci.open_image(f"oci:{rig.place}/layout:a") as a, oci.open_image(ref) as b:
        mine, theirs = (opened.config.rootfs.diff_ids[0] for opened in (b, a))
        layer, config = b.layers[0].digest, b.manifest.config
    forged = (blobs / config.hex).read_bytes().replace(mine.encode(), theirs.encode())
    _replace(blobs, rig.place / "layout/index.json", config.hex, forged)
    with pytest.raises(DataError, match=f"{layer}.*diff id"):
        rig.convert(ref)
    assert list(rig.store.list("trees")) == []


def _replace(blobs: Path, index: Path, old: str, content: bytes) -> None:
    """Put ``content`` in the place of the blob ``old``, and correct every digest above it."""
    import hashlib

    new = hashlib.sha256(content).hexdigest()
    (blobs / new).write_bytes(content)
    for path in [*blobs.iterdir(), index]:
        raw = path.read_bytes()
        if old.encode() in raw and path.name != new:
            changed = raw.replace(old.encode(), new.encode())
            if path == index:
                path.write_bytes(changed)
            else:
                _replace(blobs, index, path.name, changed)


POINTS = [
    "image.convert.after-layer@2",
    "pack.end",
    "store.put.before-publish",
    "store.put.before-publish@2",
    "image.convert.before-publish",
    "image.convert.before-record",
]


def faulty(point: str, action: str) -> str:
    name, _, visit = point.partition("@")
    return f"{name}={action}" + (f"@{visit}" if visit else "")


@pytest.mark.parametrize("point", POINTS)
def test_a_full_disk_anywhere_leaves_nothing_half(rig: Rig, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    ref = rig.image(BASE, ONE)
    faults.visits.clear()
    monkeypatch.setenv("BOOTSEER_FAULTS", faulty(point, "enospc"))
    with pytest.raises((FullError, OSError), match="No space left"):
        rig.convert(ref)
    monkeypatch.delenv("BOOTSEER_FAULTS")
    assert list(rig.store.list("images")) == []
    if point != "image.convert.before-record":
        assert list(rig.store.list("trees")) == []
    assert rig.files(rig.convert(ref)) == contents(BASE, ONE)


_CONVERT = """
import os, sys
from pathlib import Path
from bootseer import image
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
image.ensure(sys.argv[1], sys.argv[2], work_dir=Path(sys.argv[3]))
"""
_PEAK = """
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_conversion_is_unseen_and_cleaned_up_by_the_next(
    rig: Rig, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    ref = rig.image(BASE, ONE)
    environ = {**os.environ, "BOOTSEER_FAULTS": faulty(point, "kill")}
    assert forked.run("-c", _CONVERT, ref, rig.store.url, rig.work, env=environ).returncode == -9
    assert len(list(rig.work.iterdir())) == 1
    with pytest.raises(NotFoundError):
        image.resolve(ref, rig.store.url)
    for info in rig.store.list("blobs"):
        assert hashing.hexdigest(rig.store.get(info.key, most=1 << 30)) == info.key.rpartition("/")[2], (
            "no object is half"
        )
    record = rig.convert(ref)
    assert "left by an interrupted conversion" in caplog.text
    assert rig.files(record) == contents(BASE, ONE)


def test_memory_does_not_grow_with_the_image(rig: Rig) -> None:
    members = [Member(str(n), data=noise(40_000_000, n)) for n in range(4)]
    ref = rig.image(members, compression="none")
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT + _PEAK, ref, rig.store.url, str(rig.work)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) < 130_000, "in KiB; measured 59,000"


def _packs(work: Path) -> list[Path]:
    try:
        return list(work.glob("*/pack-*"))
    except FileNotFoundError:  # of a folder that has just been renamed
        return []


def test_a_conversion_at_work_is_not_cleaned_up(rig: Rig) -> None:
    ref = rig.image(BASE)
    with forked.Popen(
        [sys.executable, "-c", _CONVERT, ref, rig.store.url, str(rig.work)],
        env={**os.environ, "BOOTSEER_FAULTS": "pack.end=sleep:60"},
    ) as other:
        try:
            until(lambda: other.poll() is not None or _packs(rig.work), 60, "a pack of the other conversion")
            assert other.poll() is None
            image.ensure(rig.image(TWO, tag="two"), rig.store.url, work_dir=rig.work)
            assert other.poll() is None
            assert len(list(rig.work.glob("*/pack-*"))) == 1
        finally:
            other.kill()
    rig.convert(ref)


def test_repair_replaces_damaged_packs_and_shares_nothing(rig: Rig) -> None:
    rig.convert(rig.image(BASE, ONE, tag="one"))
    ref = rig.image(BASE, TWO, tag="two")
    second = rig.convert(ref)
    for pack in rig.tree(second).map.packs:
        raw = rig.store.get(pack.key, most=1 << 30)
        rig.store.put(pack.key, raw[:-1] + bytes([raw[-1] ^ 1]), overwrite=True)
    assert rig.convert(ref) == second, "without repair nothing is looked at"
    healed = rig.convert(ref, repair=True)
    assert healed.shared_bytes == 0
    assert rig.files(healed) == contents(BASE, TWO)
    assert image.resolve(ref, rig.store.url) == healed


def test_a_lost_pack_of_another_image_is_stored_again(rig: Rig) -> None:
    first = rig.convert(rig.image(BASE, ONE, tag="one"))
    rig.store.delete(rig.tree(first).map.packs[0].key)
    second = rig.convert(rig.image(BASE, TWO, tag="two"))
    assert rig.files(second) == contents(BASE, TWO)
    assert rig.files(first) == contents(BASE, ONE), "its pack has come back with the same bytes"


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_damaged_pack_of_another_image_is_not_referred_to(rig: Rig, part: float) -> None:
    first = rig.convert(rig.image(BASE, ONE, tag="one"))
    blocks = rig.tree(first).map
    framed = [block for block in range(blocks.count) if blocks.lengths[block] and blocks.pack_of[block] == 0]
    block = framed[int(part * (len(framed) - 1))]
    key = blocks.packs[0].key
    raw = bytearray(rig.store.get(key, most=1 << 30))
    raw[blocks.offsets[block] + blocks.lengths[block] // 2] ^= 1
    rig.store.put(key, bytes(raw), overwrite=True)
    second = rig.convert(rig.image(BASE, TWO, tag="two"))
    assert rig.files(second) == contents(BASE, TWO)


def test_a_record_whose_tree_is_gone_is_converted_again(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = rig.image(BASE)
    record, fresh = image.ensure(ref, rig.store.url, work_dir=rig.work)
    assert fresh
    with monkeypatch.context() as patch:
        patch.setenv("BOOTSEER_FAULTS", "image.convert.after-layer=eio")  # no layer is read again
        assert image.ensure(ref, rig.store.url, work_dir=rig.work) == (record, False)
    rig.store.delete(f"trees/{record.tree}.json")
    again, fresh = image.ensure(ref, rig.store.url, work_dir=rig.work)
    assert fresh
    assert "is missing in store" in caplog.text
    assert rig.files(again) == contents(BASE)
    assert image.resolve(ref, rig.store.url) == again


@pytest.mark.parametrize("damage", [b"{}", b'{"image":"sha256:', b"\xff"])
def test_a_damaged_record_says_what_heals_it(rig: Rig, damage: bytes) -> None:
    ref = rig.image(BASE)
    record = rig.convert(ref)
    rig.store.put(key_of(record.image, record.platform), damage, overwrite=True)
    with pytest.raises(DataError) as caught:
        rig.convert(ref)
    assert "--repair" in (caught.value.hint or "")
    healed = rig.convert(ref, repair=True)
    assert image.resolve(ref, rig.store.url) == healed
