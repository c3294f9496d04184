"""The snapshotter under a real kubelet and containerd 2, with images from a real registry."""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bootseer import image, oci
from bootseer.kernel import mount
from bootseer.profile import analysis, events
from bootseer.profile import kubernetes as imported
from support.images import Member, folder, write_image
from support.layouts import push
from support.netns import ShapedNetwork
from support.registry import DockerRegistry, without_tls
from support.waits import until

pytestmark = [pytest.mark.root, pytest.mark.registry, pytest.mark.runtime, pytest.mark.serial]
pytest.importorskip("grpc")

from support import kubernetes  # noqa: E402
from support.kubernetes import Kubernetes  # noqa: E402

if reason := kubernetes.missing():
    pytest.skip(reason, allow_module_level=True)

BUSYBOX = [
    folder("bin"),
    folder("etc"),
    Member("bin/busybox", data=Path("/bin/busybox").read_bytes(), mode=0o755),
    *(Member(f"bin/{name}", "symlink", link="busybox") for name in ("sh", "cat", "sleep", "sha256sum", "ls")),
]
NOISE = random.Random(7).randbytes(24 << 20)
SUM = hashlib.sha256(NOISE).hexdigest()
LAYERS = {
    "converted": [BUSYBOX, [folder("data"), Member("data/noise", data=NOISE)]],
    "sharing": [BUSYBOX, [folder("etc"), Member("etc/own", data=b"own")]],
    "plain": [[*BUSYBOX, Member("etc/plain", data=b"plain")]],
}


class Site(NamedTuple):
    cluster: Kubernetes
    layer_bytes: int
    converted: str
    sharing: str
    plain: str


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    here = Path(tempfile.mkdtemp(prefix="bootseer-pytest-kubernetes-", dir="/var/tmp"))
    here.chmod(0o755)
    try:
        with (
            ShapedNetwork("bsk8s", rate_mbit=10_000, subnet="10.84.0.0/24") as network,
            DockerRegistry(host=network.host) as registry,
            without_tls(registry.address),
        ):
            refs = {}
            for name, layers in LAYERS.items():
                refs[name] = f"{registry.address}/kubernetes/{name}:1"
                write_image(here / "layout", layers, tag=name)
                push(f"oci:{here}/layout:{name}", refs[name])
            sleeping = oci.ContainerConfig(cmd=("/bin/sleep", "1000000"))
            write_image(here / "layout", LAYERS["plain"], tag="pause", config=sleeping)
            push(f"oci:{here}/layout:pause", pause := f"{registry.address}/kubernetes/pause:1")
            record = image.convert(refs["converted"], str(here / "store"), work_dir=here / "work")
            (here / "node").mkdir()
            with Kubernetes(here / "node", network.nodes[0], registry.address, pause, str(here / "store")) as cluster:
                yield Site(cluster, record.layer_bytes, **refs)
            assert not mount.below(here)
            assert not list(Path("/sys/fs/cgroup").glob(f"*/{cluster.cgroup}"))
    finally:
        for entry in reversed(mount.below(here)):
            mount.unmount(entry.target, lazy=True, force=True)
        shutil.rmtree(here)


@pytest.fixture(autouse=True)
def cleared(site: Site, nothing_left: None) -> Iterator[None]:
    yield
    site.cluster.clear(site.converted, site.sharing, site.plain)


def test_a_pod_of_a_converted_image_starts_without_its_layers(site: Site) -> None:
    cluster = site.cluster
    before = cluster.node.bytes_received()
    cluster.pod("sum", site.converted, "sha256sum", "/data/noise")
    cluster.await_phase("sum", "Succeeded")
    assert cluster.kubectl("logs", "sum").split()[0] == SUM
    assert cluster.node.bytes_received() - before < site.layer_bytes / 2


def test_pods_of_images_that_are_not_converted(site: Site) -> None:
    """One shares a layer with the converted image, whose layers were not pulled."""
    cluster = site.cluster
    cluster.pod("lazy", site.converted, "sleep", "1000")
    cluster.await_phase("lazy", "Running")
    cluster.pod("sharing", site.sharing, "cat", "/etc/own")
    cluster.pod("plain", site.plain, "cat", "/etc/plain")
    for name, said in (("sharing", "own"), ("plain", "plain")):
        cluster.await_phase(name, "Succeeded")
        assert cluster.kubectl("logs", name) == said


def test_a_pod_outlives_snapshotter_and_containerd(site: Site) -> None:
    """Both are killed under a container that reads, and a pod that comes later starts."""
    cluster = site.cluster
    loop = "while true; do sha256sum /data/noise || exit 1; sleep 0.2; done"
    cluster.pod("reader", site.converted, "sh", "-c", loop)
    cluster.await_phase("reader", "Running")

    def turns() -> int:
        lines = cluster.kubectl("logs", "reader").splitlines()
        assert {line.split()[0] for line in lines} <= {SUM}
        return len(lines)

    until(turns, 60.0, "the first turn of the reader")
    cluster.kill("snapshotter")
    cluster.kill("containerd")
    cluster.start("snapshotter", "containerd")
    cluster.pod("later", site.converted, "sha256sum", "/data/noise")
    cluster.await_phase("later", "Succeeded")
    before = turns()
    until(lambda: turns() > before, 60.0, "another turn of the reader")
    assert cluster.await_phase("reader", "Running")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_the_documents_of_a_pod_are_a_start_up(site: Site) -> None:
    cluster = site.cluster
    cluster.pod("timed", site.plain, "sleep", "1")
    cluster.await_phase("timed", "Succeeded")
    document = cluster.kubectl("get", "pods,events", "-o", "json")
    log = events.parse(imported.events(document.encode(), "timed"))
    report = analysis.analyse(log)
    assert report.job == "timed"
    (node,) = [node for node in report.nodes if node.node == kubernetes.NODE]
    assert {"alloc", "image"} <= node.stages.keys()
    assert {cell.state for cell in node.stages.values()} == {"DONE"}
