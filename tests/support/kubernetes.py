"""A real Kubernetes, whose nodes have containerd 2, the snapshotter and the CSI driver, in namespaces that end with it.

``scripts/kube`` builds the programs. Network, mounts and processes are each node's own, and so are the files of
``/proc/sys`` that a kubelet writes; its cgroups are below one that is removed at the end. Ready means that all nodes
are. The first node has the control plane.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from bootseer.containerd import settings
from bootseer.oci import host_platform
from support import devcache
from support.containerd import cri, remove_image
from support.netns import Node
from support.service import service
from support.waits import until

KUBE, CONTAINERD = devcache.folder("kube/bin"), devcache.folder("peers/bin")
_SECONDS = 120.0
_SYSCTLS = (
    "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
)  # fmt: skip
"""What a kubelet writes, of the whole machine."""
_CGROUPS = Path("/sys/fs/cgroup")
_CONTAINERD = """
root = "{here}/containerd"
state = "{here}/run"
[grpc]
  address = "{here}/containerd.sock"
[ttrpc]
  address = "{here}/containerd.ttrpc"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.images'.registry]
  config_path = "{here}/hosts"
[plugins.'io.containerd.transfer.v1.local']
  config_path = "{here}/hosts"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni", "/opt/cni/bin"]
    conf_dir = "{here}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
"""
_KUBELET: dict[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "enforceNodeAllocatable": [],
    "failCgroupV1": False,
    "failSwapOn": False,
    "healthzPort": 0,
    "readOnlyPort": 0,
    "oomScoreAdj": 0,  # lower, and more files, need CAP_SYS_RESOURCE
    "maxOpenFiles": 4096,
    "makeIPTablesUtilChains": False,
    "localStorageCapacityIsolation": False,
    "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
    "imageGCHighThresholdPercent": 100,
    "nodeStatusUpdateFrequency": "2s",
    "syncFrequency": "5s",
}
_CNI = {"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "loopback"}]}


def missing() -> str:
    """Why there can be no cluster; "" when there can."""
    for folder, name in ((KUBE.parent, "key"), (CONTAINERD, "containerd")):
        if not (folder / name).exists():
            return "Kubernetes is not built: run scripts/kube"
    return ""


class Site(NamedTuple):
    """What a cluster uses. ``registry``: asked without TLS; ``pause``: the image of sandboxes; ``store``: of converted
    images; ``checkpoints``: those that pods may mount."""

    registry: str
    pause: str
    store: str
    checkpoints: str = ""


class Machine:
    """A node called ``name`` with its files in ``here``, on the network of ``node``. Context manager: its namespaces
    and cgroups; `start` what is to run there. ``config``: how to reach the control plane."""

    def __init__(self, here: Path, name: str, node: Node, site: Site, config: Path) -> None:
        self.here, self.name, self.node = here, name, node
        self._address, self._config = node.address, f"--kubeconfig={config}"
        self.root, self.socket = here / "snapshotter", here / "socket/snapshotter.sock"
        self.containerd = str(here / "containerd.sock")
        self.environ = {
            "BOOTSEER_STORE": site.store,
            "BOOTSEER_CACHE_DIR": str(here / "cache"),
            "BOOTSEER_STATE_DIR": str(here / "state"),
            "BOOTSEER_NODE_DIR": str(here / "node"),
            "BOOTSEER_PLAIN_HTTP": site.registry,
            "BOOTSEER_POD_CHECKPOINTS": site.checkpoints,
        }
        self.cgroup = f"bootseer-test-{secrets.token_hex(4)}"
        self._write(site)

    def _write(self, site: Site) -> None:
        here = self.here
        for folder in ("cni", "pki", "kubelet/plugins_registry", f"hosts/{site.registry}", "sysctl"):
            (here / folder).mkdir(parents=True)
        ours = settings.text("2", self.root, self.socket, host_platform())
        version, _, rest = ours.partition("\n\n")
        self.plain = f"{version}\n{_CONTAINERD.format(here=here, pause=site.pause)}\n"
        """The settings of containerd without the snapshotter."""
        (here / "containerd.toml").write_text(self.plain + rest)
        (here / "hosts" / site.registry / "hosts.toml").write_text(f'server = "http://{site.registry}"\n')
        (here / "cni/10-none.conflist").write_text(json.dumps(_CNI))
        runtime = {"containerRuntimeEndpoint": f"unix://{self.containerd}", "cgroupRoot": f"/{self.cgroup}"}
        more = {"podLogsDir": str(here / "logs"), "volumePluginDir": str(here / "kubelet/plugins")}
        (here / "kubelet.json").write_text(json.dumps({**_KUBELET, **runtime, **more}))
        for path in _SYSCTLS:
            (here / "sysctl" / path.replace("/", ".")).write_text(Path("/proc/sys", path).read_text())

    def __enter__(self) -> Machine:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._cgroups())
            stack.enter_context(self._namespaces())
            self._services = stack.enter_context(contextlib.ExitStack())
            self._running: dict[str, subprocess.Popen[bytes]] = {}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def _cgroups(self) -> Iterator[None]:
        tops = [_CGROUPS]  # cgroup v2; else a hierarchy of each controller, some by two names
        if not (_CGROUPS / "cgroup.procs").exists():
            tops = sorted({path.resolve() for path in _CGROUPS.iterdir() if (path / "cgroup.procs").exists()})
        made = [top / self.cgroup for top in tops]
        try:
            for path in made:
                path.mkdir()
                for name in ("cpuset.cpus", "cpuset.mems"):  # cgroup v1: empty at first, and then nobody can enter
                    if (path / name).exists() and (path.parent / "tasks").exists():
                        (path / name).write_text((path.parent / name).read_text())
            yield
        finally:
            for path in made:
                folders = sorted((*path.rglob("*/"), path), key=lambda folder: -len(folder.parts))
                for folder in folders:
                    with contextlib.suppress(OSError):
                        folder.rmdir()

    @contextlib.contextmanager
    def _namespaces(self) -> Iterator[None]:
        files = [(self.here / "sysctl" / path.replace("/", "."), f"/proc/sys/{path}") for path in _SYSCTLS]
        steps = ["mount --make-rshared /", *(shlex.join(["mount", "--bind", str(a), b]) for a, b in files)]
        steps += [f"touch {self.here}/ready", "exec sleep infinity"]
        argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        with service([*self.node.argv(argv), "sh", "-ec", "\n".join(steps)], self.here / "namespaces.log") as keeper:
            until(lambda: (self.here / "ready").exists() or keeper.poll() is not None, 30.0, "the namespaces")
            (self._inner,) = _children(keeper.pid)
            try:
                yield
            finally:
                os.kill(self._inner, signal.SIGKILL)  # and with it all of its processes
                keeper.wait(30)

    def start(self, *names: str, argv: Sequence[str] = ()) -> None:
        """Start these programs; ``argv``: another command for it."""
        for name in names:
            words = argv or self._argv(name)
            self._running[name] = self._services.enter_context(service(self.command(words), self.here / f"{name}.log"))
            if name == "service" and not argv:
                until(lambda: self.socket.exists(), 60.0, "the service", step=0.05)

    def kill(self, name: str) -> None:
        """As ``kill -9`` does."""
        process = self._running.pop(name)
        for pid in _children(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(30)
        if name == "service":
            self.socket.unlink(missing_ok=True)

    def stop(self, name: str) -> None:
        """As its service manager does."""
        process = self._running.pop(name)
        for pid in _children(process.pid) if process.poll() is None else ():
            os.kill(pid, signal.SIGTERM)
        process.wait(30)

    def inside(self, *argv: str) -> list[str]:
        """``argv`` as run on the node."""
        return ["nsenter", "-t", str(self._inner), "--mount", "--pid", "--net", "--", *argv]

    def _argv(self, name: str) -> list[str]:
        here, bootseer = self.here, [sys.executable, "-m", "bootseer.cli.main", "-v"]
        return {
            "kubelet": [str(KUBE / "kubelet"), self._config, "--config", f"{here}/kubelet.json",
                        "--root-dir", f"{here}/kubelet", "--cert-dir", f"{here}/pki/kubelet",
                        "--hostname-override", self.name, "--node-ip", self._address],
            "containerd": [str(CONTAINERD / "containerd"), "--config", f"{here}/containerd.toml"],
            "service": [*bootseer, "node", "serve", "--containerd", "--csi", f"--containerd-root={self.root}",
                        f"--containerd-socket={self.socket}", f"--kubelet-dir={here}/kubelet"],
        }[name]  # fmt: skip

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` as run on the node with its settings."""
        path = f"PATH={CONTAINERD}:{os.environ['PATH']}:/usr/sbin"  # containerd starts its shim, that runc
        return self.inside("env", path, *(f"{key}={value}" for key, value in self.environ.items()), *argv)

    def bootseer(self, *args: str) -> subprocess.CompletedProcess[str]:
        """The verb ``bootseer node`` for the snapshotter, on the node."""
        where = (f"--containerd-root={self.root}", f"--containerd-socket={self.socket}")
        argv = self.command([sys.executable, "-m", "bootseer.cli.main", "node", *args, "--containerd", *where])
        return subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False)

    def clear(self, *images: str) -> None:
        """Remove what is left of pods that were deleted, and ``images``; returns when nothing of their trees is."""
        kind = 'labels."io.cri-containerd.kind"==sandbox'
        for sandbox in self._ctr("containers", "ls", "--quiet", kind):  # a kubelet does it in a minute
            for verb in ("Stop", "Remove"):
                cri(self.containerd, f"RuntimeService/{verb}PodSandbox", sandbox.encode())
        for ref in images:
            remove_image(self.containerd, ref)
        until(lambda: not list((self.here / "state/trees").glob("*/")), 60.0, "the end of block servers")

    def _ctr(self, *args: str) -> list[str]:
        argv = [str(CONTAINERD / "ctr"), "--address", self.containerd, "--namespace", "k8s.io", *args]
        done = subprocess.run(self.command(argv), capture_output=True, text=True, timeout=_SECONDS, check=True)
        return done.stdout.split()

    def content_bytes(self) -> int:
        """What containerd has pulled and keeps."""
        blobs = self.here / "containerd/io.containerd.content.v1.content/blobs"
        return sum(path.stat().st_size for path in blobs.rglob("*") if path.is_file())


class Kubernetes:
    """Context manager: the cluster in the folder ``here``, with a node on each network of ``nodes``."""

    def __init__(self, here: Path, nodes: Sequence[Node], site: Site) -> None:
        self.here, self._config = here, here / "kubeconfig"
        self._front = nodes[0]
        self._api = f"https://{self._front.address}:6443"
        self._token = secrets.token_hex(16)
        self.nodes = [
            Machine(here / f"node{number}", f"node{number}", node, site, self._config)
            for number, node in enumerate(nodes, 1)
        ]
        self._write()

    def _write(self) -> None:
        here = self.here
        (here / "pki").mkdir()
        (here / "pki/tokens.csv").write_text(f"{self._token},admin,1,system:masters\n")
        subprocess.run(["openssl", "genrsa", "-out", str(here / "pki/sa.key"), "2048"], check=True, capture_output=True)
        cluster = {"server": self._api, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": self._token}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }  # fmt: skip
        self._config.write_text(json.dumps(config))

    def __enter__(self) -> Kubernetes:
        with contextlib.ExitStack() as stack:
            for machine in self.nodes:
                stack.enter_context(machine)
            programs = self._programs()
            for name in ("etcd", "kube-apiserver"):
                self.nodes[0].start(name, argv=[str(KUBE / name), *programs[name]])
            for machine in self.nodes:
                machine.start("service", "containerd")
            until(lambda: self._kubectl("get", "--raw", "/readyz").stdout == b"ok", _SECONDS, "the API server")
            for name in ("kube-scheduler", "kube-controller-manager"):
                self.nodes[0].start(name, argv=[str(KUBE / name), *programs[name]])
            for machine in self.nodes:
                machine.start("kubelet")
            until(self._is_ready, _SECONDS, f"the nodes; see the logs in {self.here}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def _is_ready(self) -> bool:
        told = self._kubectl("get", "nodes", "-o", "json")
        nodes = json.loads(told.stdout)["items"] if not told.returncode else []
        conditions = [one for node in nodes for one in node["status"].get("conditions", [])]
        ready = [one for one in conditions if one["type"] == "Ready" and one["status"] == "True"]
        return len(ready) == len(self.nodes) and not self._kubectl("get", "serviceaccount", "default").returncode

    def _programs(self) -> dict[str, list[str]]:
        here, address, config = self.here, self._front.address, f"--kubeconfig={self._config}"
        etcd = [f"http://{address}:{port}" for port in (2379, 2380)]
        return {
            "etcd": ["--data-dir", f"{here}/etcd", "--unsafe-no-fsync", "--log-level", "warn",
                     "--listen-client-urls", etcd[0], "--advertise-client-urls", etcd[0],
                     "--listen-peer-urls", etcd[1], "--initial-advertise-peer-urls", etcd[1],
                     "--initial-cluster", f"default={etcd[1]}"],
            "kube-apiserver": ["--etcd-servers", etcd[0], "--bind-address", address, "--advertise-address", address,
                               "--cert-dir", f"{here}/pki/api", "--service-cluster-ip-range", "10.96.0.0/16",
                               "--service-account-issuer", "https://kubernetes.example",
                               "--service-account-key-file", f"{here}/pki/sa.key",
                               "--service-account-signing-key-file", f"{here}/pki/sa.key",
                               "--token-auth-file", f"{here}/pki/tokens.csv", "--authorization-mode", "RBAC",
                               "--allow-privileged", "--kubelet-preferred-address-types", "InternalIP"],
            "kube-scheduler": [config, "--leader-elect=false", "--secure-port", "0"],
            "kube-controller-manager": [config, "--leader-elect=false", "--secure-port", "0",
                                        "--service-account-private-key-file", f"{here}/pki/sa.key",
                                        "--root-ca-file", f"{here}/pki/api/apiserver.crt"],
        }  # fmt: skip

    # -- what users and an administrator do ----------------------------------------------------------------------------

    def kubectl(self, *args: str, given: object = None) -> str:
        """What it prints; ``given``: a document for its standard input. `AssertionError` when it fails."""
        done = self._kubectl(*args, given=json.dumps(given).encode() if given else b"")
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def _kubectl(self, *args: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        argv = [str(KUBE / "kubectl"), f"--kubeconfig={self._config}", *args]
        home = {**os.environ, "HOME": tempfile.gettempdir()}
        return subprocess.run(
            self._front.argv(argv), input=given, capture_output=True, timeout=_SECONDS, check=False, env=home
        )

    def clear(self, *images: str) -> None:
        """Delete all pods and jobs, and remove ``images`` from the nodes."""
        self.kubectl("delete", "job,pod", "--all", "--grace-period=1")
        for machine in self.nodes:
            machine.clear(*images)

    def pod(
        self,
        name: str,
        image: str,
        *command: str,
        container: Mapping[str, object] | None = None,
        namespace: str = "default",
        **spec: object,
    ) -> None:
        """Have a pod of one container, with ``container`` and ``spec`` beside what it needs; on the first node, unless
        ``spec`` says where."""
        made = pod_spec(image, *command, **{"nodeName": self.nodes[0].name, **spec})
        made["containers"][0].update(container or {})
        told = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": made}
        self.kubectl("apply", "-f", "-", given=told)

    def await_phase(self, name: str, *phases: str) -> dict[str, Any]:
        """The pod, once it is in one of ``phases``."""
        found: dict[str, Any] = {}

        def reached() -> bool:
            found.update(json.loads(self.kubectl("get", "pod", name, "-o", "json")))
            return found["status"].get("phase") in phases

        try:
            until(reached, _SECONDS, f"{name} to be {' or '.join(phases)}", step=0.2)
        except AssertionError:
            print(self.kubectl("describe", "pod", name))
            raise
        return found


def pod_spec(image: str, *command: str, **more: object) -> dict[str, Any]:
    """That of a pod of one container, which shares the node's network, as the cluster has no other."""
    return {
        "hostNetwork": True, "automountServiceAccountToken": False, "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "main", "image": image, "command": list(command)}], **more,
    }  # fmt: skip


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
