"""Looking into converted images and their profiles from the command line, without a mount."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from bootseer import folders, image
from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.blocks.without_mount import look
from bootseer.cli import image_look, store
from bootseer.cli.image import app
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, UnavailableError
from bootseer.image import record as records
from bootseer.objects.folder import FolderStore
from support.images import Member, folder, write_image

BIG = os.urandom(300_000)
LAYER = [
    folder("bin"),
    Member("bin/big", data=BIG, mode=0o755, uid=5, gid=6),
    Member("bin/other", data=b"o" * 200_000),
    Member("bin/link", "symlink", link="/bin/big"),
    Member("bin/hard", "hardlink", link="bin/big"),
    Member("bin/null", "char", device=(1, 3)),
    folder("etc"),
    Member("etc/new\nline", data=b"small"),
    Member("etc/caps", data=b"c", xattrs={"user.note": b"hello"}),
]


class Site:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.store = FolderStore(base / "store")
        self.ref = f"oci:{base / 'layout'}:v1"
        write_image(base / "layout", [LAYER])
        self.record = image.ensure(self.ref, self.store.url, work_dir=base / "work").record
        self.other = f"oci:{base / 'layout'}:v2"
        write_image(base / "layout", [LAYER, [Member("bin/other", data=b"p" * 200_000)]], tag="v2")
        image.ensure(self.other, self.store.url, work_dir=base / "work")

    def images(self) -> list[dict[str, object]]:
        """What `store ls` says."""
        done = CliRunner().invoke(store.app, ["ls", "--store", self.store.url, "--json"])
        found: list[dict[str, object]] = json.loads(done.stdout)["images"]
        return found

    def call(self, *args: str) -> bytes:
        """Output of the command, in this process: starting Python for each of 30 would take longer than all else."""
        environ = {"BOOTSEER_STORE": self.store.url, "BOOTSEER_CACHE_DIR": str(self.base / "cache")}
        done = CliRunner().invoke(app, args, env={**environ}, catch_exceptions=True)
        if done.exception is not None:
            raise done.exception
        return done.stdout_bytes

    def text(self, *args: str) -> str:
        return self.call(*args).decode()

    def json(self, *args: str) -> object:
        return json.loads(self.call(*args, "--json"))

    def start(self, ref: str, job: str, began: int, *paths: bytes) -> str:
        """Record a start that touched the first unit of each of ``paths``; returns the trace's digest."""
        record = image.resolve(ref, self.store.url)
        with look(self.store, record.tree, self.base / "cache") as opened:
            touches = []
            for number, path in enumerate(paths):
                (extent, *_) = opened.reader.extents(opened.reader.stat(path))
                touches.append(Touch(100 * number, 7, extent.data_offset // UNIT, 1))
            trace = Trace(record.tree, opened.map.size, began, True, tuple(touches))
            before = {info.key for info in self.store.list("profiles")}
            assert library.publish(self.store, ProfileKey(job), trace, opened.map) == "published"
        ((key),) = {info.key for info in self.store.list("profiles")} - before
        return key.rpartition("/")[2].removesuffix(".trace")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("look"))


def test_files_of_an_image(site: Site) -> None:
    lines = site.text("ls", site.ref, "/bin").splitlines()
    assert [line.split(" /", 1)[1] for line in lines] == [
        "bin/big",
        "bin/hard",
        "bin/link -> /bin/big",
        "bin/null",
        "bin/other",
    ]
    assert lines[0].startswith("-rwxr-xr-x   2 5:6 ")
    assert " 300000 2017-07-14 02:40 /bin/big" in lines[0]
    assert lines[3].startswith("crw-r--r--")
    assert "1, 3" in lines[3]
    assert len(site.text("ls", site.ref, "-R").splitlines()) == 9
    assert "/etc/new\\nline" in site.text("ls", site.ref, "etc/")
    (row,) = site.json("ls", site.ref, "/etc/caps")
    assert (row["path"], row["kind"], row["mode"], row["size"]) == ("/etc/caps", "file", "0644", 1)
    assert row["xattrs"] == {"user.note": b"hello".hex()}
    (row,) = site.json("ls", site.ref, "/bin/link")
    assert (row["kind"], row["target"]) == ("symlink", "/bin/big")
    assert site.json("ls", site.ref, "/bin/null")[0]["device"] == [1, 3]


@pytest.mark.root
@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o755, 65534)])
def test_root_extracts_nothing_where_others_change_names(site: Site, tmp_path: Path, mode: int, owner: int) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(mode)
    os.chown(tmp_path / "theirs", owner, owner)
    for target in (tmp_path / "theirs", tmp_path / "theirs/new"):
        with pytest.raises(ConfigError, match="others can replace"):
            site.call("extract", site.ref, str(target))
    assert not list((tmp_path / "theirs").iterdir())


@pytest.mark.root
def test_root_extracts_nothing_into_a_folder_that_a_neighbour_was_quick_to_make(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    target = tmp_path / "new"

    def settled(path: Path) -> Path:
        found = folders.settled(path)
        if not target.exists():
            target.mkdir()
            os.chown(target, 65534, 65534)
        return found

    monkeypatch.setattr(image_look, "settled", settled)
    with pytest.raises(ConfigError, match="others can replace"):
        site.call("extract", site.ref, str(target))
    assert not list(target.iterdir())
    target.rmdir()
    target.touch()
    with pytest.raises(BootseerError, match=f"{target}: "):
        site.call("extract", site.ref, str(target))


def test_images_of_a_store(site: Site) -> None:
    assert {row["reference"] for row in site.images()} == {site.ref, site.other}
    done = CliRunner().invoke(store.app, ["du", "--store", site.store.url, "--json"])
    kinds = json.loads(done.stdout)["kinds"]
    assert kinds["images"]["objects"] == 2
    assert kinds["blobs"]["bytes"] == sum(info.size for info in site.store.list("blobs"))


def test_what_a_record_says_moves_no_cursor(tmp_path: Path) -> None:
    site = Site(tmp_path)
    hostile = msgspec.structs.replace(site.record, reference="a\x1b[2Jb", platform="x\ny", image="sha256:" + "0" * 64)
    assert records.save(site.store, hostile)
    text = CliRunner().invoke(store.app, ["ls", "--store", site.store.url]).stdout
    assert "\x1b" not in text
    assert len(text.splitlines()) == 6  # with three of the head


@pytest.mark.parametrize("make", [lambda trap: trap.symlink_to(trap), os.mkfifo, Path.mkdir])
def test_what_somebody_puts_beside_the_records_hides_none(tmp_path: Path, make: Callable[[Path], None]) -> None:
    site = Site(tmp_path)
    for name in ("images/trap.json", "env/snapshots/trap.json"):
        trap = site.store.root / name
        trap.parent.mkdir(parents=True, exist_ok=True)
        make(trap)
    done = CliRunner().invoke(store.app, ["ls", "--store", site.store.url, "--json"])
    assert done.exit_code == 0, done.output
    assert {row["reference"] for row in site.images()} == {site.ref, site.other}


def test_an_image_is_inspected_and_removed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert site.json("inspect", site.ref)["tree"] == site.record.tree
    assert site.record.image in site.text("inspect", site.ref)
    said = site.json("rm", site.ref, "--dry-run")
    assert (said["dry_run"], [one["image"] for one in said["removed"]]) == (True, [site.record.image])
    assert len(site.images()) == 2
    assert site.text("rm", site.ref).startswith(f"removed {site.ref} (")
    assert [one["reference"] for one in site.images()] == [site.other]
    assert site.text("ls", site.other, "/bin")  # what the two share is there
    with pytest.raises(NotFoundError, match="is not converted"):
        site.text("inspect", site.ref)


def test_images_are_named_by_digest_digits_and_platform(tmp_path: Path) -> None:
    site = Site(tmp_path)
    arm = msgspec.structs.replace(site.record, platform="linux/arm64")
    assert records.save(site.store, arm)
    host = site.record.platform
    digest = site.record.image
    for name in (digest, digest[7:19], digest[7:13], digest[:15]):
        assert site.json("inspect", name)["platform"] == host
        assert site.json("inspect", name, "--platform", "linux/arm64/v8")["platform"] == "linux/arm64"
        assert site.text("ls", name, "/bin", "--platform", "linux/arm64")
        assert site.call("extract", name, "--platform", "linux/arm64", "--file", "/bin/big") == BIG
    for name, says in (("0" * 12, "no image 0+ in store"), ("sha256:" + "0" * 6, "no image")):
        with pytest.raises(NotFoundError, match=says):
            site.text("inspect", name)
    with pytest.raises(NotFoundError, match=r"not converted for linux/s390x in store .*; it is for .*linux/arm64"):
        site.text("inspect", digest, "--platform", "linux/s390x")
    assert "linux/arm64" in site.text("rm", digest, "--platform", "linux/arm64", "--json")
    with pytest.raises(NotFoundError, match="not converted for linux/arm64"):
        site.text("rm", digest, "--platform", "linux/arm64")
    assert {row["platform"] for row in site.images()} == {host}


def test_a_name_goes_before_the_digits_of_another_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> str:
        raise UnavailableError("no such registry")

    monkeypatch.setattr("bootseer.oci.resolve_digest", gone)
    site = Site(tmp_path)
    for digits in (site.record.image[7:13], site.record.image[7:18]):
        named = msgspec.structs.replace(
            site.record, reference=f"docker.io/library/{digits}:latest", image=f"sha256:{'5' * 64}"
        )
        assert records.save(site.store, named)
        said = site.text("rm", digits)
        assert said.startswith(f"removed docker.io/library/{digits}:latest (5555"), said
        assert len(site.images()) == 2
        assert site.text("inspect", digits)


def test_only_another_platform_is_found_by_digits(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for platform in ("linux/arm64", "linux/s390x"):
        assert records.save(site.store, msgspec.structs.replace(site.record, platform=platform))
    image.remove(site.store, [site.record])
    with pytest.raises(ConfigError, match=r"several platforms.*linux/arm64, linux/s390x"):
        site.text("inspect", site.record.image)
    site.text("rm", site.record.image[7:19])
    assert [row["reference"] for row in site.images()] == [site.other]
    for gone in (site.record.image, site.record.image[:15], site.record.image[7:19]):
        with pytest.raises(NotFoundError, match=f"no image {gone}"):
            site.text("rm", gone)


def test_all_that_is_listed_is_removed(tmp_path: Path) -> None:
    """Also what was converted from a file that is gone, or has another image now; what is missing ends nothing."""
    site = Site(tmp_path)
    shutil.rmtree(tmp_path / "layout")
    with pytest.raises(NotFoundError, match="nosuch"):
        site.text("rm", f"oci:{tmp_path}/nosuch", site.other, site.ref)
    assert site.images() == []

    site = Site(tmp_path / "again")
    write_image(tmp_path / "again" / "layout", [[Member("new", data=b"n")]], tag="v1")
    site.text("rm", site.ref)
    assert [row["reference"] for row in site.images()] == [site.other]
    assert records.save(site.store, msgspec.structs.replace(site.record, reference=site.other))
    shutil.rmtree(tmp_path / "again" / "layout")
    with pytest.raises(ConfigError, match=rf"several images were converted from .*{site.record.image[7:19]}"):
        site.text("rm", site.other)


def test_a_conversion_says_what_it_did(site: Site, tmp_path: Path) -> None:
    ref = f"oci:{tmp_path / 'layout'}:v1"
    write_image(tmp_path / "layout", [LAYER, [Member("later", data=b"l" * 100_000)]])
    text = site.text("convert", ref, "--work-dir", str(tmp_path / "work"))
    assert text.startswith("converted: ")
    assert "shared with other images" in text
    assert " packs, " in text
    for _ in range(2):
        assert site.text("convert", ref, "--work-dir", str(tmp_path / "work")).startswith("converted before: ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, ""),
        (lambda one: one._replace(mode=0o700), "'bin/big' has another mode"),
        (lambda one: one._replace(uid=6), "'bin/big' has another owner"),
        (lambda one: one._replace(mtime_ns=1), "'bin/big' has another time"),
        (lambda one: one._replace(data=BIG[:-1]), "'bin/big' has another size"),
        (lambda one: one._replace(data=BIG[:-1] + b"?"), "'bin/big' has other bytes"),
        (lambda one: one._replace(xattrs={"user.x": b"1"}), "'bin/big' has another attribute"),
        (lambda one: one._replace(kind="symlink", link="/x", data=b""), "'bin/big' has another type"),
        (lambda one: one._replace(name="bin/bag"), "'bin/bag' is not in its layers.*'bin/big' is missing"),
        (lambda one: Member("bin/hard", data=BIG, mode=0o755, uid=5, gid=6), "'bin/hard' is linked to others"),
        (lambda one: Member("bin/link", "symlink", link="/bin/bag"), "'bin/link' has another target"),
        (lambda one: Member("bin/null", "char", device=(1, 5)), "'bin/null' has another device"),
    ],
)
def test_a_conversion_is_compared_with_its_source(site: Site, tmp_path: Path, change: Any, says: str) -> None:
    """Another tree under its record stands for a conversion that went wrong."""
    layer = [*LAYER, Member("sparse", data=b"a" + bytes(900_000) + b"b" + bytes(70_000))]
    write_image(tmp_path / "layout", [layer])
    ref, store, more = f"oci:{tmp_path / 'layout'}:v1", site.store, ("--work-dir", str(tmp_path / "work"))
    right = image.ensure(ref, store.url, work_dir=tmp_path / "work", repair=True).record
    if change is None:
        assert "checked 11 entries" in site.text("convert", ref, "--check", *more)
        return
    changed = change(layer[1])
    left_out = {changed.name, "bin/big" if changed.name == "bin/bag" else ""}
    kept = [one._replace(link=changed.name) if one.link in left_out else one for one in layer]
    kept = [one for one in kept if one.name not in left_out]
    write_image(tmp_path / "other", [[kept[0], changed, *kept[1:]]])
    wrong = image.ensure(f"oci:{tmp_path / 'other'}:v1", store.url, work_dir=tmp_path / "work").record
    records.save(store, msgspec.structs.replace(right, tree=wrong.tree), overwrite=True)
    with pytest.raises(DataError, match=f"converted to another tree: .*{says}.*--repair") as caught:
        site.text("convert", ref, "--check", *more)
    assert len(str(caught.value).splitlines()) == 1


def test_one_file_of_an_image(site: Site) -> None:
    assert site.call("extract", site.ref, "--file", "/bin/link") == BIG


def test_an_image_as_a_folder(site: Site) -> None:
    dest = site.base / "plain"
    assert "extracted" in site.text("extract", site.ref, str(dest))
    assert (dest / "bin" / "hard").read_bytes() == BIG
    assert (dest / "bin" / "hard").stat().st_ino == (dest / "bin" / "big").stat().st_ino
    assert (dest / "bin" / "big").stat().st_uid == os.geteuid(), "also for root, nobody is given anything"
    assert os.getxattr(dest / "etc" / "caps", "user.note") == b"hello"
    with pytest.raises(BootseerError, match="not empty"):
        site.call("extract", site.ref, str(dest))


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("ls", "REF", "/nothing"), 66, "the image has no /nothing"),
        (("ls", "REF", "/bin/big/x"), 66, "the image has no"),
        (("ls", "oci:/nowhere:v1"), 66, "nowhere"),
        (("convert", "REF", "--work-dir", "/dev/null"), 73, "cannot work in /dev/null: File exists"),
        (("convert", "REF", "--work-dir", "/dev/null/x"), 66, "cannot work in /dev/null/x: Not a directory"),
        (("extract", "REF", "--file", "/bin"), 70, "it is no file but a folder"),
        (("extract", "REF", "--file", "/bin/big", "-o", "/"), 73, "cannot write /: Is a directory"),
        (("extract", "REF", "--file", "/nothing"), 66, "the image has no /nothing"),
        (("touched", "REF", "--job", "nobody"), 66, "no start of a job nobody"),
        (("touched", "REF", "--against", "REF#nobody"), 66, "no start of"),
    ],
)
def test_mistakes(site: Site, args: tuple[str, ...], code: int, says: str) -> None:
    with pytest.raises(BootseerError, match=says) as caught:
        site.call(*(arg.replace("REF", site.ref) for arg in args))
    assert caught.value.exit_code == code
    assert len(str(caught.value).splitlines()) == 1


def test_what_starts_touched(site: Site) -> None:
    assert "no start of" in site.text("touched", site.other)
    assert site.json("touched", site.other) == {"traces": [], "chosen": None, "start": None}
    first = site.start(site.ref, "train", 100_000_000, b"bin/big", b"etc/caps")
    second = site.start(site.ref, "serve", 100_000_100, b"bin/other", b"bin/big")
    site.start(site.other, "train", 100_000_200, b"bin/big", b"bin/other")

    text = site.text("touched", site.ref)
    for word in ("train", "serve", first[:12], second[:12], "/bin/other", "1973-03-03"):
        assert word in text
    for chosen in (("--job", "train"), ("--trace", first[:8])):
        found = site.json("touched", site.ref, *chosen)
        assert found["chosen"] == first
        assert [one["path"] for one in found["start"]["files"]] == ["/bin/big", "/etc/caps"]

    jobs = site.json("touched", site.ref, "--job", "train", "--against", f"{site.ref}#{second[:10]}")
    assert (jobs["only_there"], jobs["both"], jobs["same_tree"]) == (UNIT, UNIT, True)
    assert "/etc/caps" in site.text("touched", site.ref, "--job", "train", "--against", f"{site.ref}#serve")
    images = site.json("touched", site.ref, "--against", site.other)
    assert not images["same_tree"]
    assert images["shared_blocks"] > 0
