"""The snapshotter under a real containerd, with images from a real registry."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bootseer import image
from bootseer.image.record import ImageRecord
from bootseer.kernel import fuse, mount
from support import keys
from support.images import Member, folder, write_image
from support.layouts import push
from support.registry import DockerRegistry

pytestmark = [pytest.mark.root, pytest.mark.registry, pytest.mark.runtime]
grpc = pytest.importorskip("grpc")

from bootseer.containerd import service  # noqa: E402
from support.containerd import ContainerdNode  # noqa: E402
from support.waits import until  # noqa: E402

BUSYBOX = [
    folder("bin"),
    Member("bin/busybox", data=Path("/bin/busybox").read_bytes(), mode=0o755),
    *(Member(f"bin/{name}", "symlink", link="busybox") for name in ("sh", "cat", "sleep", "sha256sum", "dd", "ls")),
    folder("etc"),
    Member("etc/base", data=b"base"),
    Member("etc/hidden", data=b"hidden"),
]
NOISE = random.Random(7).randbytes(24 << 20)
SUM = hashlib.sha256(NOISE).hexdigest()
OTHER = random.Random(8).randbytes(1 << 20)


class Site(NamedTuple):
    """``converted`` and ``away`` are converted images of two layers; ``sharing`` is not, and has the lowest layer of
    ``converted``; ``plain`` shares nothing; ``copy`` is ``converted`` by another name."""

    node: ContainerdNode
    store: Path
    converted: str
    away: str
    sharing: str
    plain: str
    copy: str
    record: ImageRecord
    away_record: ImageRecord


@pytest.fixture(scope="module")
def site(registry: DockerRegistry) -> Iterator[Site]:
    here = Path(tempfile.mkdtemp(prefix="bootseer-pytest-containerd-", dir="/var/tmp"))
    here.chmod(0o755)
    images = {
        "converted": [BUSYBOX, [folder("data"), Member("data/noise", data=NOISE)]],
        "away": [[*BUSYBOX, Member("etc/away", data=b"away")], [folder("data"), Member("data/other", data=OTHER)]],
        "sharing": [BUSYBOX, [folder("etc"), Member("etc/.wh.hidden"), Member("etc/own", data=b"own")]],
        "plain": [[*BUSYBOX, Member("etc/plain", data=b"plain")], [folder("etc"), Member("etc/top", data=b"top")]],
    }
    refs, records = {}, {}
    for name, layers in images.items():
        refs[name] = f"{registry.address}/containerd/{name}:1"
        write_image(here / "layout", layers, tag=name)
        push(f"oci:{here}/layout:{name}", refs[name])
        if name in ("converted", "away"):
            records[name] = image.ensure(refs[name], str(here / "store"), work_dir=here / "work").record
    refs["copy"] = f"{registry.address}/containerd/copy:1"
    push(f"oci:{here}/layout:converted", refs["copy"])
    node = ContainerdNode(here, str(here / "store"))
    try:
        node.start()
        yield Site(node, here / "store", **refs, record=records["converted"], away_record=records["away"])
    finally:
        node.stop()
        node.clear()
        for entry in reversed(mount.below(here)):
            mount.unmount(entry.target, lazy=True, force=True)
        shutil.rmtree(here)


def said(done: subprocess.CompletedProcess[bytes]) -> str:
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@contextlib.contextmanager
def pulled(site: Site, *refs: str) -> Iterator[None]:
    """These images are there. Afterwards they are removed, and nothing of them is left."""
    node = site.node
    for ref in refs:
        node.pull(ref)
    try:
        yield
    finally:
        for ref in reversed(refs):
            node.remove_image(ref)
        until(lambda: not mount.below(node.root), 60.0, "the unmount of trees that are not needed")
        until(lambda: not list((node.root / "snapshots").iterdir()), 60.0, "the end of snapshots")
        until(lambda: not list((node.here / "state/trees").glob("*/")), 60.0, "the end of block servers")


def test_a_pull_of_a_converted_image_moves_almost_nothing(site: Site) -> None:
    node = site.node
    with pulled(site, site.converted):
        assert node.content_bytes() < 0.05 * site.record.layer_bytes
        assert said(node.run(site.converted, "sum", "sha256sum", "/data/noise")).split()[0] == SUM
        written = "echo new > /data/more && rm /etc/hidden && cat /data/more && ls /etc"
        assert said(node.run(site.converted, "write", "sh", "-c", written)).split() == ["new", "base"]
        assert said(node.run(site.converted, "again", "ls", "/etc")).split() == ["base", "hidden"]


def test_who_has_a_copy_of_the_manifest_has_to_pull_the_layers(site: Site) -> None:
    """The same image by another name: it gets what the registry gives it there, and nothing out of the store."""
    node = site.node
    with pulled(site, site.copy):
        assert node.content_bytes() > 0.9 * site.record.layer_bytes
        assert not mount.below(node.root / "trees")
        assert said(node.run(site.copy, "sum", "sha256sum", "/data/noise")).split()[0] == SUM
        assert f"it was converted from {site.converted}" in node.log.read_text()


def test_annotations_of_a_pod_make_nothing_lazy(site: Site) -> None:
    """CRI gives them to the snapshot of a container as labels."""
    node, chain = site.node, site.record.config.rootfs.chain_ids[0]
    labels = {service.REF: chain, service.MANIFEST: site.record.image, service.IMAGE: site.converted}
    with node.preparing(["container"], "", labels) as (call,):
        assert call.result().mounts[0].type == "bind"
    node.remove_snapshot("container")


def test_images_that_are_not_converted(site: Site) -> None:
    """Alone they are ordinary; over a layer that was not pulled, that is downloaded."""
    node = site.node
    with pulled(site, site.plain, site.converted, site.sharing):
        assert said(node.run(site.plain, "plain", "cat", "/etc/base", "/etc/plain", "/etc/top")) == "baseplaintop"
        assert said(node.run(site.sharing, "sharing", "sh", "-c", "cat /etc/*")) == "baseown"
        assert said(node.run(site.converted, "sum", "sha256sum", "/data/noise")).split()[0] == SUM
        assert "another image, which is not converted, shares them" in node.log.read_text()


def test_a_store_that_is_away_holds_up_nobody_else(site: Site) -> None:
    """It answers what an image is, but not with its tree: containers are told to try again, and others start."""
    node, manifest = site.node, site.store / f"trees/{site.away_record.tree}.json"
    content, back = manifest.read_bytes(), threading.Event()

    def read(offset: int, size: int, _: object) -> bytes:
        back.wait(60.0)
        return content[offset : offset + size]

    hanging = fuse.SingleFile(manifest.name, len(content), read)
    with pulled(site, site.converted), fuse.Server(hanging, manifest.parent):
        node.pull(site.away)
        try:
            with node.preparing(
                [f"waiting-{n}" for n in range(24)], site.away_record.config.rootfs.chain_ids[-1]
            ) as waiting:
                assert said(node.run(site.converted, "other", "cat", "/etc/base")) == "base"
                assert {call.exception().code().name for call in waiting} == {"UNAVAILABLE"}
                assert "did not come within 5 s; the node goes on to bring them" in waiting[0].exception().details()
            back.set()
            assert said(node.run(site.away, "late", "cat", "/etc/away")) == "away"
        finally:
            back.set()
            node.remove_image(site.away)


STEPS = [
    *("create.before-insert", "create.inserted", "lazy.inserted", "committed", "removed", "collect"),
    *("adopt.before-update", "tree.before-use", "tree.before-mount", "tree.mounted", "tree.unmounted"),
]


@pytest.mark.parametrize("step", STEPS)
def test_a_snapshotter_killed_at_each_step_leaves_nothing(site: Site, step: str) -> None:
    """Whatever containerd was told or not: what it asks for again is right, and what it removes is gone. It finds a
    snapshotter that was restarted again after a while."""
    node, refs = site.node, (site.converted, site.sharing)
    node.stop("snapshotter")
    node.environ["BOOTSEER_FAULTS"] = f"containerd.{step}=kill"
    try:
        node.start("snapshotter")
    finally:
        del node.environ["BOOTSEER_FAULTS"]

    def pulls(ref: str) -> bool:
        with contextlib.suppress(grpc.RpcError):
            node.pull(ref)
            return True
        return False

    for ref in refs:
        until(lambda ref=ref: node.snapshotter_died or pulls(ref), 60.0, f"a pull of {ref}", step=0.5)
        if not node.snapshotter_died:
            node.run(ref, "first", "cat", "/etc/base")
    for ref in refs:
        with contextlib.suppress(grpc.RpcError):
            node.remove_image(ref)
    until(lambda: node.snapshotter_died, 60.0, f"step {step}")
    node.kill("snapshotter")
    node.start("snapshotter")
    until(lambda: pulls(site.converted), 60.0, "another pull", step=0.5)
    with pulled(site, *refs):
        assert said(node.run(site.converted, "sum", "sha256sum", "/data/noise")).split()[0] == SUM
        assert said(node.run(site.sharing, "sharing", "sh", "-c", "cat /etc/*")) == "baseown"


def test_images_that_were_answered_before_they_had_to_be_signed(site: Site) -> None:
    """They are not used any more: their layers are pulled after all."""
    node = site.node
    with pulled(site, site.converted):
        node.environ["BOOTSEER_VERIFY_KEY"] = keys.pair(node.here)["verify_key"]
        try:
            node.stop("snapshotter")
            node.start("snapshotter")
            assert said(node.run(site.converted, "sum", "sha256sum", "/data/noise")).split()[0] == SUM
            assert "is not signed" in node.log.read_text()
            assert "layers of" in node.log.read_text()
        finally:
            del node.environ["BOOTSEER_VERIFY_KEY"]
            node.stop("snapshotter")
            node.start("snapshotter")


def test_the_configuration(site: Site) -> None:
    node = site.node
    done = node.bootseer("install", "--check", f"--containerd-config={node.config}")
    assert (done.returncode, done.stdout) == (0, "")
    default = subprocess.run(["containerd", "config", "default"], capture_output=True, check=True, timeout=30).stdout
    (node.here / "default.toml").write_bytes(default)
    done = node.bootseer("install", "--check", f"--containerd-config={node.here}/default.toml")
    assert done.returncode == 78
    assert [line.split("]")[0] for line in done.stdout.splitlines()] == [
        "look: [proxy_plugins.bootseer",
        'look: [plugins."io.containerd.grpc.v1.cri".containerd',
        'look: [plugins."io.containerd.grpc.v1.cri".containerd',
    ]
    assert done.stderr.count("\n") == 1
    unit, file = node.here / "bootseer-node.service", f"--containerd-config={node.here}/default.toml"
    done = node.bootseer("install", f"--unit={unit}", file, "--csi")
    assert done.returncode == 0
    text = unit.read_text()
    assert f"node serve --containerd --csi --containerd-root={node.root} --containerd-socket={node.socket}\n" in text
    assert "Before=containerd.service" in text
    assert f'    address = "{node.socket}"\n' in done.stdout
    assert done.stdout.splitlines()[-1].startswith("look: [plugins.")


def test_a_full_disk(site: Site) -> None:
    """A pull says so, leaves nothing, and works again when there is room."""
    node, filler = site.node, site.node.root / "filler"
    before = len(node.log.read_text())
    node.stop("snapshotter")
    mount.mount("tmpfs", node.root, "tmpfs", data="size=32m,mode=700")
    try:
        node.start("snapshotter")
        with filler.open("wb", buffering=0) as out, contextlib.suppress(OSError):
            while True:
                out.write(bytes(4096))
        for ref in (site.plain, site.converted):
            with pytest.raises(grpc.RpcError) as caught:
                node.pull(ref)
            assert re.search(f"bootseer: cannot .* {node.root}.*(disk is full|No space left)", caught.value.details())
        filler.unlink()
        with pulled(site, site.plain, site.converted):
            assert said(node.run(site.plain, "plain", "cat", "/etc/top")) == "top"
            assert said(node.run(site.converted, "sum", "sha256sum", "/data/noise")).split()[0] == SUM
        assert "Traceback" not in node.log.read_text()[before:]
    finally:
        node.stop("snapshotter")
        mount.unmount(node.root)
        node.start("snapshotter")


@pytest.mark.parametrize("part", ["containerd", "csi"])
def test_folders_and_sockets_that_somebody_planted(site: Site, part: str) -> None:
    """Neither service uses them, and each says in one line which they are."""
    with tempfile.TemporaryDirectory(prefix="bootseer-pytest-planted-", dir="/var/tmp") as path:
        here = Path(path)
        here.chmod(0o755)
        (here / "kubelet/plugins_registry").mkdir(parents=True)
        root = here / "kubelet/plugins/bootseer.io" if part == "csi" else here / "root"
        endpoint = here / ("kubelet/plugins_registry/bootseer.io-reg.sock" if part == "csi" else "root/a.sock")
        options = {
            "csi": [f"--kubelet-dir={here}/kubelet"],
            "containerd": [f"--containerd-root={root}", f"--containerd-socket={endpoint}"],
        }

        def refused(said: str) -> None:
            argv = [sys.executable, "-m", "bootseer.cli.main", "node", "serve", f"--{part}", *options[part]]
            environ = {**os.environ, **site.node.environ}
            environ |= {"BOOTSEER_STATE_DIR": f"{here}/state", "BOOTSEER_NODE_DIR": f"{here}/node"}
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environ, check=False)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1), done.stderr
            assert said in done.stderr

        root.mkdir(parents=True)
        os.chown(root, 1, 1)
        refused(f"{root} belongs to user 1")
        os.chown(root, 0, 0)
        root.chmod(0o777)
        refused(f"others can write to {root}")
        root.rmdir()
        (here / "elsewhere").mkdir()
        root.symlink_to(here / "elsewhere")
        refused(f"{root} is a link")
        root.unlink()
        endpoint.parent.mkdir(exist_ok=True, mode=0o700)
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.bind(str(endpoint))
            theirs.listen()
            refused(f"{endpoint} is not free")
        endpoint.unlink()
        endpoint.symlink_to("/run/nowhere")
        refused(f"{endpoint} is not free")
        assert list((here / "elsewhere").iterdir()) == []


def test_uninstall(site: Site) -> None:
    """It takes nothing from anybody, says what has to go first, and leaves nothing. The last test of this module."""
    node = site.node
    node.pull(site.converted)
    said(node.run(site.converted, "running", "sleep", "1000", detach=True))
    done = node.bootseer("uninstall")
    assert done.returncode == 70
    assert done.stdout.splitlines() == ["ctr -n k8s.io containers rm running", f"crictl rmi {site.converted}"]
    node.end("running")
    node.remove_image(site.converted)
    done = node.bootseer("uninstall")
    assert (done.returncode, done.stdout) == (78, "")
    assert "systemctl stop bootseer-node" in done.stderr
    node.stop("snapshotter")
    assert node.bootseer("uninstall").returncode == 0
    assert not node.root.exists()
    assert not node.socket.exists()
    assert not mount.below(node.here)
