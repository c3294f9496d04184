"""Images through a real registry into a store and back out as files: compared with skopeo and umoci."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from bootseer import config as settings
from bootseer import image, oci
from bootseer.blocks import tree as trees
from bootseer.blocks.formats.trace import Touch, Trace
from bootseer.blocks.metadata import localize
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.errors import BootseerError, NotFoundError
from bootseer.objects import open_store
from bootseer.oci.registry import Registry
from support import forked, keys
from support.images import CHANGES, Member, folder, one_of_each, write_image
from support.layouts import push
from support.registry import DockerRegistry
from support.trees import is_spread, scan

pytestmark = [pytest.mark.root, pytest.mark.registry]

LOWER = one_of_each(os.urandom(3_000_000))
UPPER = CHANGES


@pytest.fixture
def config(tmp_path: Path) -> settings.Config:
    return settings.Config(
        cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"), store=str(tmp_path / "store")
    )


def convert(ref: str, config: settings.Config, tmp_path: Path) -> image.ImageRecord:
    return image.ensure(ref, config.store_url, work_dir=tmp_path / "work").record


@pytest.mark.parametrize(("compression", "writable"), [("gzip", True), ("zstd", False)])
def test_the_mounted_tree_is_the_one_of_umoci(
    tmp_path: Path, registry: DockerRegistry, config: settings.Config, compression: str, writable: bool
) -> None:
    digest = write_image(tmp_path / "layout", [LOWER, UPPER], compression=compression)  # type: ignore[arg-type]
    ref = f"{registry.address}/t/{compression}:v1"
    assert push(f"oci:{tmp_path}/layout:v1", ref) == digest
    record = convert(ref, config, tmp_path)
    assert record.image == digest
    if compression == "zstd":  # umoci 0.4 knows gzip only
        write_image(tmp_path / "reference", [LOWER, UPPER])
    else:
        subprocess.run(["skopeo", "copy", "-q", "--src-tls-verify=false", f"docker://{ref}",
                        f"oci:{tmp_path}/reference:v1"], check=True)  # fmt: skip
    subprocess.run(["umoci", "unpack", "--image", f"{tmp_path}/reference:v1", f"{tmp_path}/umoci"], check=True)
    mounted = image.mount(ref, tmp_path / "m", store_url=config.store_url, config=config, writable=writable)
    try:
        assert scan(mounted.rootfs) == scan(tmp_path / "umoci/rootfs")
        assert (mounted.upper is not None) == writable
        assert not writable or is_spread(tmp_path / "cache/overlays")
        assert [m.rootfs for m in image.mounts(Path(config.state_dir))] == [mounted.rootfs]
    finally:
        mounted.unmount()
    assert list((tmp_path / "state").rglob("mount.json")) == []
    assert list((tmp_path / "cache" / "overlays").glob("*")) == []


def test_images_pushed_by_skopeo_as_docker_v2(
    tmp_path: Path, registry: DockerRegistry, config: settings.Config
) -> None:
    write_image(tmp_path / "layout", [LOWER, UPPER])
    ref = f"{registry.address}/t/docker:v2s2"
    subprocess.run(["skopeo", "copy", "-q", "--format=v2s2", "--dest-tls-verify=false", f"oci:{tmp_path}/layout:v1",
                    f"docker://{ref}"], check=True)  # fmt: skip
    with oci.open_image(ref) as opened:
        assert opened.manifest.media_type == "application/vnd.docker.distribution.manifest.v2+json"
    assert convert(ref, config, tmp_path).tree == convert(f"oci:{tmp_path}/layout:v1", config, tmp_path).tree


def test_a_second_conversion_is_immediate_and_a_moved_tag_is_seen(
    tmp_path: Path, registry: DockerRegistry, config: settings.Config
) -> None:
    ref = f"{registry.address}/t/moving:latest"
    write_image(tmp_path / "layout", [LOWER])
    push(f"oci:{tmp_path}/layout:v1", ref)
    first = convert(ref, config, tmp_path)
    assert convert(ref, config, tmp_path) == first
    assert image.resolve(ref, config.store_url) == first
    digest = write_image(tmp_path / "layout", [LOWER, UPPER])
    push(f"oci:{tmp_path}/layout:v1", ref)
    with pytest.raises(NotFoundError, match="not converted in store"):
        image.resolve(ref, config.store_url)
    second = convert(ref, config, tmp_path)
    assert (second.image, second.tree != first.tree) == (digest, True)
    assert [r.image for r in image.records(open_store(config.store_url))] == sorted([first.image, second.image])


def test_an_image_of_a_file_gains_the_registry_that_has_it(
    tmp_path: Path, registry: DockerRegistry, config: settings.Config
) -> None:
    """Until then only root has it, as no registry says who may. A signature is not lost for it."""
    ref, store, work = f"{registry.address}/t/gains:v1", str(tmp_path / "store"), tmp_path / "work"
    write_image(tmp_path / "layout", [[Member("a", data=b"1")]])
    push(layout := f"oci:{tmp_path}/layout:v1", ref)
    key = keys.pair(tmp_path)
    image.ensure(layout, store, work_dir=work, sign_key=(secret := Path(key["sign_key"])))
    assert image.ensure(ref, store, work_dir=work).record.reference == layout
    assert image.ensure(ref, store, work_dir=work, sign_key=secret).record.reference == ref
    assert image.resolve(ref, store, config=msgspec.structs.replace(config, verify_key=key["verify_key"]))
    assert image.ensure(layout, store, work_dir=work).record.reference == ref


def test_a_digest_needs_no_registry(tmp_path: Path, config: settings.Config) -> None:
    digest = write_image(tmp_path / "layout", [LOWER])
    record = convert(f"oci:{tmp_path}/layout:v1", config, tmp_path)
    assert image.resolve(f"127.0.0.1:1/gone@{digest}", config.store_url) == record


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_is_cleaned_up(tmp_path: Path, config: settings.Config, number: int) -> None:
    write_image(tmp_path / "layout", [LOWER])
    argv = [sys.executable, "-m", "bootseer.cli.main", "image", "convert", f"oci:{tmp_path}/layout:v1"]
    argv += ["--store", config.store_url, "--work-dir", str(tmp_path / "work")]
    env = {**os.environ, "BOOTSEER_FAULTS": "pack.end=sleep:20"}
    with forked.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as child:
        end = time.monotonic() + 15
        while not list((tmp_path / "work").glob("*/pack-0")) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.2)
        child.send_signal(number)
        _, error = child.communicate(timeout=15)
    assert child.returncode == 128 + number
    assert "Traceback" not in error
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("point", ["image.mount.before-overlay", "image.mount.before-release"])
def test_a_failed_mount_leaves_nothing(
    tmp_path: Path, config: settings.Config, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    write_image(tmp_path / "layout", [LOWER])
    ref = f"oci:{tmp_path}/layout:v1"
    convert(ref, config, tmp_path)
    monkeypatch.setenv("BOOTSEER_FAULTS", f"{point}=eio")
    with pytest.raises(BootseerError, match="Input/output error"):
        image.mount(ref, tmp_path / "m", store_url=config.store_url, config=config)
    assert not (tmp_path / "m").exists()
    assert image.mounts(Path(config.state_dir)) == []
    assert list((tmp_path / "cache" / "overlays").glob("*")) == []


def test_two_writable_mounts_do_not_see_each_other(tmp_path: Path, config: settings.Config) -> None:
    write_image(tmp_path / "layout", [LOWER])
    ref = f"oci:{tmp_path}/layout:v1"
    convert(ref, config, tmp_path)
    one = image.mount(ref, tmp_path / "one", store_url=config.store_url, config=config)
    try:
        two = image.mount(ref, tmp_path / "two", store_url=config.store_url, config=config)
        try:
            (one.rootfs / "etc/passwd").write_text("changed")
            assert (two.rootfs / "etc/passwd").read_bytes() == LOWER[2].data
            assert one.upper is not None
            assert (one.upper / "etc/passwd").read_text() == "changed"
            assert image.attach(one.rootfs, Path(config.state_dir)).status().blocks_total > 0
            with pytest.raises(BootseerError, match="something is mounted there"):
                image.mount(ref, two.rootfs, store_url=config.store_url, config=config)
        finally:
            two.unmount()
    finally:
        one.unmount()
    one.unmount()
    with pytest.raises(NotFoundError, match="no image is mounted"):
        image.attach(one.rootfs, Path(config.state_dir))


def test_images_beside_their_converted_form_in_one_registry(tmp_path: Path, registry: DockerRegistry) -> None:
    store_url = f"registry://{registry.address}/t/beside"
    base = [folder("lib"), Member("lib/base.so", data=os.urandom(2_000_000))]
    for tag, layers in (("one", [base, LOWER]), ("two", [base, UPPER[2:]])):
        write_image(tmp_path / "layout", layers, tag=tag)
        push(f"oci:{tmp_path}/layout:{tag}", f"{registry.address}/t/beside:{tag}")
    first, second = (
        image.ensure(f"{registry.address}/t/beside:{tag}", store_url, work_dir=tmp_path / "work").record
        for tag in ("one", "two")
    )
    assert (first.shared_bytes, second.shared_bytes > 1_900_000) == (0, True)
    assert image.resolve(f"{registry.address}/t/beside:two", store_url) == second
    trees.extract(open_store(store_url), second.tree, tmp_path / "files")
    with oci.open_image(f"oci:{tmp_path}/layout:two") as opened:
        oci.unpack(opened, tmp_path / "unpacked")
    assert scan(tmp_path / "files") == scan(tmp_path / "unpacked")
    with oci.open_image(f"{registry.address}/t/beside:two") as opened:
        assert opened.digest == second.image, "its tags are still those of images"


def test_a_predicted_hot_pack_is_copied_along_with_its_image(tmp_path: Path, registry: DockerRegistry) -> None:
    store_url, found = f"registry://{registry.address}/t/along", []
    store, base = open_store(store_url), [folder("lib"), Member("lib/base.so", data=os.urandom(2_000_000))]
    for tag in ("one", "two"):
        write_image(tmp_path / "layout", [base, [Member(tag)]], tag=tag)
        push(f"oci:{tmp_path}/layout:{tag}", ref := f"{registry.address}/t/along:{tag}")
        found.append(image.ensure(ref, store_url, work_dir=tmp_path / "work").record)
        if tag == "one":
            tree = localize(store, found[0].tree, tmp_path / "cache")
            start = Trace(found[0].tree, tree.map.size, 5, True, (Touch(0, 7, 0, 100),))
            assert library.publish(store, ProfileKey("train"), start, tree.map) == "published"
    copy = open_store(f"{store_url}@{found[1].image}")
    with Registry(oci.Reference.parse(ref)) as source:
        titles = set()
        for item in source.referrers(found[1].image):
            layers = json.loads(source.manifest(item.digest)[0])["layers"]
            titles |= {layer["annotations"]["org.opencontainers.image.title"] for layer in layers}
    mine = {title.rpartition(".")[2] for title in titles if title.startswith(f"profiles/{found[1].tree}/train/")}
    assert mine == {"trace", "pack"}
    assert library.has_traces(copy, f"profiles/{found[1].tree}")
