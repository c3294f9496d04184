"""A converted image, mounted by the kernel from its stored form, is the tree that unpacking the image makes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bootseer import image, oci
from bootseer.blocks.formats.trace import Touch, Trace
from bootseer.blocks.metadata import localize
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.layout import layout_of
from bootseer.blocks.profiles.library import ProfileKey, Target
from bootseer.chunks.zstd import decompress
from bootseer.cli.verbs import assemble
from bootseer.config import Config
from bootseer.kernel import mount
from bootseer.objects import open_store
from support.images import CHANGES, Member, one_of_each, write_image
from support.trees import Found, scan
from support.waits import until

pytestmark = pytest.mark.root

NOISE = random.Random(1).randbytes(3_000_000)
LOWER = [
    *one_of_each(NOISE),
    Member("opt/twin", data=NOISE),
    Member("opt/sparse", data=b"a" + bytes(2_000_000) + b"b" * 70_000),
    *(Member(f"etc/many-{n:04d}", data=NOISE[n * 100 : n * 140]) for n in range(500)),
]
UPPER = [*CHANGES, Member("opt/.wh.twin"), Member("etc/more", data=NOISE[1_000_000:2_500_000])]


def mounted(place: Path, store_url: str, digest: str) -> Found:
    """All that is seen of a tree whose data file is made from its packs."""
    store = open_store(store_url)
    tree = localize(store, digest, place / "cache")
    packs = [store.get(pack.key, most=1 << 30) for pack in tree.map.packs]
    with open(place / "data", "wb") as data:
        for block in range(tree.map.count):
            length, start = tree.map.lengths[block], tree.map.offsets[block]
            if length:
                frame = packs[tree.map.pack_of[block]][start : start + length]
                data.seek(block << tree.map.shift)
                data.write(decompress(frame, tree.map.length_of(block)))
        data.truncate(tree.map.size)
    (place / "m").mkdir()
    mount.mount_erofs(tree.meta, place / "data", place / "m")
    try:
        return scan(place / "m")
    finally:
        mount.unmount(place / "m")
        (place / "m").rmdir()


def test_so_is_one_whose_blocks_are_those_of_other_images(place: Path) -> None:
    store = f"{place}/store"
    for number, layers in enumerate([[LOWER], [UPPER], [LOWER[:8], [Member("x", data=NOISE[:700_000])]]]):
        write_image(place / "layout", layers, tag=f"t{number}")
        image.ensure(f"oci:{place}/layout:t{number}", store, work_dir=place / "work")
    write_image(place / "layout", [LOWER, UPPER], tag="last")
    record = image.ensure(f"oci:{place}/layout:last", store, work_dir=place / "work").record
    assert record.shared_bytes > 3_000_000
    assert record.stored_bytes < 200_000
    with oci.open_image(f"oci:{place}/layout:last") as opened:
        oci.unpack(opened, place / "unpacked")
    assert mounted(place, store, record.tree) == scan(place / "unpacked")


_CONVERT = """
import sys
from pathlib import Path
from bootseer import image
print(image.ensure(sys.argv[1], sys.argv[2] + "/store", work_dir=Path(sys.argv[2], "work")).record.tree)
"""


def test_conversion_needs_no_rights(place: Path) -> None:
    write_image(place / "layout", [LOWER, UPPER])
    ref = f"oci:{place}/layout:v1"
    (place / "nobody").mkdir()
    os.chown(place / "nobody", 65534, 65534)
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c", _CONVERT, ref,
         str(place / "nobody")], capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    assert done.stdout.strip() == image.ensure(ref, f"{place}/store", work_dir=place / "work").record.tree


def start(place: Path, store_url: str, digest: str) -> None:
    """Leave what a start of the job ``train`` would: it read two files."""
    store, key = open_store(store_url), ProfileKey("train")
    tree = localize(store, digest, place / "cache")
    parts = {part.path: part for part in layout_of(tree.meta)}
    read = tuple(Touch(n, 7, parts[name].unit, 1) for n, name in enumerate((b"opt/twin", b"etc/many-0003")))
    assert library.publish(store, key, Trace(digest, tree.map.size, 5, True, read), tree.map) == "published"


def test_the_next_build_of_a_started_image_has_a_predicted_profile(place: Path) -> None:
    store_url, work = f"{place}/store", place / "work"
    write_image(place / "layout", [LOWER], tag="v1")
    before = image.ensure(f"oci:{place}/layout:v1", store_url, work_dir=work).record
    start(place, store_url, before.tree)
    store, key = open_store(store_url), ProfileKey("train")

    write_image(place / "layout", [[Member("new", data=NOISE[:300_000])], LOWER], tag="v2")
    after = image.ensure(f"oci:{place}/layout:v2", store_url, work_dir=work).record
    assert after.tree != before.tree
    command = ["image", "touched", f"oci:{place}/layout:v2", "--store", store_url]
    shown = CliRunner().invoke(assemble(), command)
    assert f"predicted from tree {before.tree[:12]}" in shown.output
    assert "opt/twin" in shown.output
    local = localize(store, after.tree, place / "cache")
    assert library.newest_pack(store, key.prefix(after.tree), Target(after.tree, local.map_digest.hex(), local.map))
    assert list(work.iterdir()) == []


def test_a_build_that_was_converted_before_the_one_before_was_started_is_foretold_at_its_first_start(
    place: Path,
) -> None:
    store_url, records = f"{place}/store", []
    for tag, more in (("v1", []), ("v2", [[Member("new", data=NOISE[:300_000])]])):
        write_image(place / "layout", [*more, LOWER], tag=tag)
        records.append(image.ensure(f"oci:{place}/layout:{tag}", store_url, work_dir=place / "work").record)
    start(place, store_url, records[0].tree)
    config = Config(cache_dir=f"{place}/cache", state_dir=f"{place}/state", store=store_url, background_fill=False)
    made = image.mount(f"oci:{place}/layout:v2", place / "m", store_url=store_url, config=config, job="train")
    try:
        until(lambda: 0 < made.status().hot_total == made.status().hot_ready, 20, "what is foretold")
        assert made.status().bytes_demand == 0
    finally:
        made.unmount()


@pytest.mark.parametrize("earlier", [True, False])
def test_a_mount_that_is_gone_hides_no_new_one_on_the_same_folder(place: Path, earlier: bool) -> None:
    """Its record stays after a crash, or an unmount by hand; what is mounted there next is what the folder means."""
    config = Config(cache_dir=str(place / "cache"), state_dir=str(place / "state"))
    store_url, state = str(place / "store"), place / "state"
    refs = [f"oci:{place}/{name}:v1" for name in ("old", "new")]
    for ref in refs:
        write_image(Path(ref[4:-3]), [[Member("file", data=ref.encode())]])
        image.ensure(ref, store_url, work_dir=place / "work")
    image.mount(refs[0], place / "m", store_url=store_url, config=config).unmount()
    old = image.mount(refs[0], place / "m", store_url=store_url, config=config)
    kept = (state / "images" / old.record.id / "mount.json").read_bytes()
    old.unmount()
    first = "0" * len(old.record.id)
    (state / "images" / first).mkdir(mode=0o700)
    kept = kept.replace(old.record.id.encode(), first.encode())
    kept = kept.replace(mount.boot_id().encode(), b"before") if earlier else kept
    (state / "images" / first / "mount.json").write_bytes(kept)
    (gone,) = image.mounts(state)
    assert gone.dead() or not earlier
    made = image.mount(refs[1], place / "m", store_url=store_url, config=config)
    try:
        assert image.attach(place / "m", state).record.id == made.record.id
        assert [one.record.id for one in image.mounts(state)] == [first, made.record.id][earlier:]
    finally:
        made.unmount()
        gone.unmount()
    assert image.mounts(state) == []
