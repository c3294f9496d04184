"""The snapshotter under a real kubelet and containerd 2, with images from a real registry."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bootseer import image, oci
from bootseer.kernel import mount
from bootseer.profile import analysis, events
from bootseer.profile import kubernetes as imported
from bootseer.stripefs.store import open_fs
from support.hadoop import HadoopCluster
from support.images import Member, folder, write_image
from support.layouts import push
from support.netns import ShapedNetwork
from support.registry import DockerRegistry, without_tls
from support.waits import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.registry,
    pytest.mark.runtime,
    pytest.mark.hdfs,
    pytest.mark.serial,
]
pytest.importorskip("grpc")

from support import kubernetes  # noqa: E402
from support.kubernetes import Kubernetes, Machine  # noqa: E402

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


DEPLOY = Path(__file__).parents[2] / "deploy/kubernetes"


class Site(NamedTuple):
    cluster: Kubernetes
    layer_bytes: int
    checkpoint: str
    converted: str
    sharing: str
    plain: str


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    here = Path(tempfile.mkdtemp(prefix="bootseer-pytest-kubernetes-", dir="/var/tmp"))
    here.chmod(0o755)
    try:
        with (
            ShapedNetwork("bsk8s", nodes=2, rate_mbit=10_000, subnet="10.84.0.0/24") as network,
            HadoopCluster(here / "hdfs", 1, bind=network.host) as hadoop,
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
            record = image.ensure(refs["converted"], str(here / "store"), work_dir=here / "work").record
            (here / "cluster").mkdir()
            used = kubernetes.Site(registry.address, pause, str(here / "store"), f"{hadoop.url}/{{namespace}}/")
            (here / "model").write_bytes(NOISE)
            open_fs(checkpoint := f"{hadoop.url}/default/step-1").put(here / "model", "model")
            with Kubernetes(here / "cluster", network.nodes, used) as cluster:
                cluster.kubectl("apply", "-k", str(DEPLOY))
                yield Site(cluster, record.layer_bytes, checkpoint, **refs)
            assert not mount.below(here)
            for node in cluster.nodes:
                assert not list(Path("/sys/fs/cgroup").glob(f"*/{node.cgroup}"))
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
    before = cluster.nodes[0].node.bytes_received()
    cluster.pod("sum", site.converted, "sha256sum", "/data/noise")
    cluster.await_phase("sum", "Succeeded")
    assert cluster.kubectl("logs", "sum").split()[0] == SUM
    assert cluster.nodes[0].node.bytes_received() - before < site.layer_bytes / 2


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


def reads_on(cluster: Kubernetes, pod: str) -> None:
    """It reads from now on once more at least, and has never read anything else than what it should."""

    def turns() -> int:
        lines = cluster.kubectl("logs", pod).splitlines()
        assert {line.split()[0] for line in lines} <= {SUM}
        return len(lines)

    before = turns()
    until(lambda: turns() > before, 60.0, f"another turn of {pod}")


def test_a_pod_outlives_snapshotter_and_containerd(site: Site) -> None:
    """Both are killed under a container that reads, and a pod that comes later starts."""
    cluster = site.cluster
    loop = "while true; do sha256sum /data/noise || exit 1; sleep 0.2; done"
    cluster.pod("reader", site.converted, "sh", "-c", loop)
    cluster.await_phase("reader", "Running")
    reads_on(cluster, "reader")
    node = cluster.nodes[0]
    node.kill("service")
    node.kill("containerd")
    node.start("service", "containerd")
    cluster.pod("later", site.converted, "sha256sum", "/data/noise")
    cluster.await_phase("later", "Succeeded")
    reads_on(cluster, "reader")
    assert cluster.await_phase("reader", "Running")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_the_documents_of_a_pod_are_a_start_up(site: Site) -> None:
    cluster = site.cluster
    cluster.pod("timed", site.plain, "sleep", "1")
    cluster.await_phase("timed", "Succeeded")
    document = cluster.kubectl("get", "pods,events", "-o", "json")
    log = events.parse(imported.events(document.encode(), "timed"))
    report = analysis.analyse(log)
    assert report.job == "timed"
    assert [node.node for node in report.nodes] == [cluster.nodes[0].name], document
    (node,) = report.nodes
    assert {"alloc", "image"} <= node.stages.keys()
    assert {cell.state for cell in node.stages.values()} == {"DONE"}


VOLUMES = {
    "image": "sha256sum < /v/data/noise",
    "image of Kubernetes": "sha256sum < /v/data/noise",
    "checkpoint": "sha256sum < /v/model",
}


@pytest.mark.parametrize("kind", VOLUMES)
def test_a_pod_has_volumes(site: Site, kind: str) -> None:
    """Its processes are those of a user that no node knows; the driver is killed under them."""
    cluster = site.cluster
    before = cluster.nodes[0].node.bytes_received()
    volume: dict[str, Any] = {"name": "v"}
    if kind == "image of Kubernetes":  # that the kubelet has containerd pull and mount
        volume["image"] = {"reference": site.converted}
    else:
        attributes = {kind: site.converted if kind == "image" else site.checkpoint}
        volume["csi"] = {"driver": "bootseer.io", "volumeAttributes": attributes}
    loop = f"while true; do {VOLUMES[kind]} || exit 1; sleep 0.2; done"
    user = {"securityContext": {"runAsUser": 4711}, "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    cluster.pod("volume", site.plain, "sh", "-c", loop, container=user, volumes=[volume])
    cluster.await_phase("volume", "Running")
    reads_on(cluster, "volume")
    if kind != "checkpoint":
        assert cluster.nodes[0].node.bytes_received() - before < site.layer_bytes / 2
    cluster.nodes[0].kill("service")
    cluster.nodes[0].start("service")
    reads_on(cluster, "volume")


def test_a_volume_that_a_pod_may_not_have(site: Site) -> None:
    cluster = site.cluster
    cluster.kubectl("create", "namespace", "others")
    try:
        attributes = {"checkpoint": site.checkpoint}
        volume = {"name": "v", "csi": {"driver": "bootseer.io", "volumeAttributes": attributes}}
        mounted = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
        cluster.pod("thief", site.plain, "ls", "/v", container=mounted, volumes=[volume], namespace="others")
        said = "pods of namespace others may not mount"
        until(lambda: said in cluster.kubectl("get", "events", "-n", "others", "-o", "json"), 60.0, said, step=0.5)
    finally:
        cluster.kubectl("delete", "namespace", "others")


def test_an_indexed_job_on_two_nodes(site: Site) -> None:
    cluster = site.cluster
    before = [node.node.bytes_received() for node in cluster.nodes]
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"job": "train"}},
    }
    command = ["sh", "-c", "sha256sum /data/noise; echo $JOB_COMPLETION_INDEX"]
    pod = kubernetes.pod_spec(site.converted, *command, topologySpreadConstraints=[spread])
    template = {"metadata": {"labels": {"job": "train"}}, "spec": pod}
    job = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"},
        "spec": {
            "completions": 2, "parallelism": 2, "completionMode": "Indexed", "backoffLimit": 0, "template": template,
        },
    }  # fmt: skip
    cluster.kubectl("apply", "-f", "-", given=job)
    cluster.kubectl("wait", "--for=condition=complete", "job/train", "--timeout=110s")
    pods = json.loads(cluster.kubectl("get", "pods", "-l", "job=train", "-o", "json"))["items"]
    assert {pod["spec"]["nodeName"] for pod in pods} == {node.name for node in cluster.nodes}
    said = [cluster.kubectl("logs", pod["metadata"]["name"]).split() for pod in pods]
    assert sorted((words[0], words[-1]) for words in said) == [(SUM, "0"), (SUM, "1")]
    for node, count in zip(cluster.nodes, before, strict=True):
        assert node.node.bytes_received() - count < site.layer_bytes / 2


SYSTEMCTL = """#!/bin/sh
echo "$@" >{asked}/$$.new && mv {asked}/$$.new {asked}/$$.ask
while [ ! -e {asked}/$$.done ]; do sleep 0.1; done
"""
"""Has somebody outside of the pod do what systemd would, which these nodes do not have."""


class Host:
    """What the pods of the DaemonSet find on ``node``, whose containerd is an ordinary one meanwhile: folders of its
    own for units and programs, and a ``systemctl``."""

    def __init__(self, node: Machine, here: Path) -> None:
        self.node, self._asked, self._over = node, here / "asked", threading.Event()
        self.unit, self.programs = here / "units/bootseer-node.service", here / "programs"
        self.serves = False
        self._here = here

    def __enter__(self) -> Host:
        here, node = self._here, self.node
        for place in (self._asked, self.unit.parent, self.programs):
            place.mkdir(parents=True)
        (here / "systemctl").write_text(SYSTEMCTL.format(asked=self._asked))
        (here / "systemctl").chmod(0o755)
        places = {"units": "/etc/systemd/system", "programs": "/opt/bootseer-node", "systemctl": "/usr/bin/systemctl"}
        steps = [f"mount --bind {here}/{name} {at}" for name, at in places.items()]
        with contextlib.ExitStack() as undo:
            with contextlib.suppress(FileExistsError):
                Path("/opt/bootseer-node").mkdir()
                undo.callback(Path("/opt/bootseer-node").rmdir)
            subprocess.run(node.inside("sh", "-ec", "\n".join(steps)), check=True)
            undo.callback(subprocess.run, node.inside("umount", *places.values()), check=True)
            node.stop("containerd")
            node.stop("service")
            undo.callback(node.start, "service", "containerd")
            undo.callback((node.here / "containerd.toml").write_text, (node.here / "containerd.toml").read_text())
            (node.here / "containerd.toml").write_text(node.plain)
            node.start("containerd")
            undo.callback(node.stop, "containerd")
            undo.callback(lambda: self.serves and node.stop("service"))
            thread = threading.Thread(target=self._serve)
            thread.start()
            undo.callback(thread.join)
            undo.callback(self._over.set)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _serve(self) -> None:
        while not self._over.wait(0.1):
            for ask in self._asked.glob("*.ask"):
                verb = ask.read_text().split()[0]
                if verb in ("stop", "restart") and self.serves:
                    self.node.stop("service")
                    self.serves = False
                if verb == "restart":
                    self.node.start("service", argv=self.words())
                    until(lambda: self.status() == 0, 60.0, "the service of the unit")
                    self.serves = True
                ask.rename(ask.with_suffix(".done"))

    def words(self) -> list[str]:
        (line,) = [line for line in self.unit.read_text().splitlines() if line.startswith("ExecStart=")]
        return shlex.split(line.partition("=")[2])

    def status(self) -> int:
        argv = self.node.command([self.words()[0], "node", "status"])
        return subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode


def test_a_daemonset_installs_updates_and_removes_the_service_under_a_pod(site: Site, tmp_path: Path) -> None:
    """By ``deploy/kubernetes``. The service is none of its pods' processes."""
    cluster, node = site.cluster, site.cluster.nodes[1]
    registry, name = site.plain.partition("/")[0], "kube-system"
    program = """#!/bin/sh
        code="import sys; sys.argv[0] = '/opt/bootseer-node/{version}/bin/bootseer'"
        exec env {environ} {python} -c "$code; from bootseer.cli.main import main; main()" "$@"
    """
    environ = shlex.join(f"{key}={value}" for key, value in node.environ.items())
    for version in ("v1", "v2"):
        text = program.format(version=version, environ=environ, python=sys.executable)
        bin = f"opt/bootseer-node/{version}/bin"
        layer = [
            *BUSYBOX,
            *(
                Member(f"bin/{one}", "symlink", link="busybox")
                for one in ("cp", "mv", "rm", "grep", "nsenter", "mount")
            ),
            *map(folder, ("opt", "opt/bootseer-node", f"opt/bootseer-node/{version}", bin)),
            Member(f"{bin}/bootseer", data=text.encode(), mode=0o755),
            Member(f"{bin}/busybox", data=Path("/bin/busybox").read_bytes(), mode=0o755),
        ]
        write_image(tmp_path / "layout", [layer], tag=version)
        push(f"oci:{tmp_path}/layout:{version}", f"{registry}/kubernetes/node:{version}")
    shutil.copytree(DEPLOY, tmp_path / "kubernetes")

    def apply(base: str, version: str, *changes: dict[str, object]) -> None:
        there = "/spec/template/spec"
        patch = [
            {"op": "add", "path": f"{there}/hostNetwork", "value": True},
            {"op": "replace", "path": f"{there}/nodeSelector", "value": {"kubernetes.io/hostname": node.name}},
            *changes,
        ]
        kind = {
            "resources": [f"../kubernetes/{base}"],
            "images": [{"name": "registry.example.org/bootseer-node", "newName": f"{registry}/kubernetes/node",
                        "newTag": version}],
            "patches": [{"target": {"kind": "DaemonSet"}, "patch": json.dumps(patch)}],
        }  # fmt: skip
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site/kustomization.yaml").write_text(json.dumps(kind))
        cluster.kubectl("apply", "-k", str(tmp_path / "site"))

    def rolled_out() -> None:
        cluster.kubectl("rollout", "status", "-n", name, "daemonset/bootseer-node", "--timeout=110s")

    args = ["install", "--csi", f"--kubelet-dir={node.here}/kubelet"]
    change = {"op": "replace", "path": "/spec/template/spec/initContainers/0/args", "value": args}
    with Host(node, tmp_path / "host") as host:
        try:
            apply("node-service", "v1", change)
            rolled_out()
            assert host.words()[0] == "/opt/bootseer-node/v1/bin/bootseer"
            assert "--csi" in host.words()

            volume = {"name": "v", "csi": {"driver": "bootseer.io", "volumeAttributes": {"image": site.converted}}}
            loop = "while true; do sha256sum < /v/data/noise || exit 1; sleep 0.2; done"
            mounted = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
            cluster.pod("reader", site.plain, "sh", "-c", loop, container=mounted, volumes=[volume], nodeName=node.name)
            cluster.await_phase("reader", "Running")
            reads_on(cluster, "reader")
            command = node.inside("/opt/bootseer-node/v1/bin/busybox", "sleep", "1000")
            with subprocess.Popen(command, start_new_session=True) as lasting:
                apply("node-service", "v2", change)
                rolled_out()
                assert host.words()[0] == "/opt/bootseer-node/v2/bin/bootseer"
                assert sorted(os.listdir(host.programs)) == ["v1", "v2"]  # somebody runs what is in it
                reads_on(cluster, "reader")
                pod = cluster.await_phase("reader", "Running")
                assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
                os.killpg(lasting.pid, signal.SIGKILL)

            apply("node-removal", "v2")
            said = "1 volume of a pod is mounted"
            every = ("-n", name, "-l", "app=bootseer-node")

            def refused() -> bool:
                with contextlib.suppress(AssertionError):  # it is about to be tried again
                    return said in cluster.kubectl("logs", *every, "-c", "node")
                return False

            until(refused, 60.0, said, step=0.5)
            assert host.unit.exists()
            reads_on(cluster, "reader")
            cluster.kubectl("delete", "pod", "reader", "--grace-period=1")
            cluster.kubectl("delete", "pod", *every)  # its next one begins at once
            rolled_out()
            assert not host.unit.exists()
            assert not host.serves
            assert os.listdir(host.programs) == []
            cluster.kubectl("delete", "-k", str(tmp_path / "site"))
        finally:
            cluster.kubectl("delete", "daemonset", "-n", name, "--all", "--wait")


def test_uninstalling_says_what_is_left_to_do(site: Site) -> None:
    """While images are there that could not start without the snapshotter nothing is changed, afterwards nothing is
    left."""
    cluster, node = site.cluster, site.cluster.nodes[1]
    cluster.pod("one", site.converted, "sleep", "1000", nodeName=node.name)
    cluster.await_phase("one", "Running")
    done = node.bootseer("uninstall")
    assert done.returncode == 70
    assert f"crictl rmi {site.converted}" in done.stdout
    cluster.clear(site.converted)
    node.stop("containerd")
    node.stop("service")
    done = node.bootseer("uninstall")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not node.root.exists()
    node.start("service", "containerd")
