"""A node with a real containerd and the snapshotter beside it, in a folder; CRI's pull, `ctr` for the rest."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from bootseer.config import Config
from bootseer.containerd import settings
from bootseer.containerd.images import unmount
from bootseer.containerd.proto import snapshots_pb2 as messages
from bootseer.kernel import mount
from bootseer.oci import host_platform
from support.service import service
from support.waits import until

_SECONDS = 120.0
_NAMESPACE = "k8s.io"
"""That of CRI."""
_CONFIG = """
root = "{here}/containerd"
state = "{here}/run"
disabled_plugins = ["io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{here}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{here}/cni"
"""


class ContainerdNode:
    """Both run between `start` and `stop`, and may be killed meanwhile."""

    def __init__(self, here: Path, store: str) -> None:
        self.here = here
        self.root, self.socket = here / "snapshotter", here / "socket/snapshotter.sock"
        self.log = here / "snapshotter.log"
        self._address = str(here / "containerd.sock")
        self.config = here / "config.toml"
        ours = settings.text("1.6", self.root, self.socket, host_platform())
        version, _, rest = ours.partition("\n\n")
        self.config.write_text(f"{version}\n{_CONFIG.format(here=here)}\n{rest}")
        self.environ = {
            "BOOTSEER_STORE": store,
            "BOOTSEER_CACHE_DIR": str(here / "cache"),
            "BOOTSEER_STATE_DIR": str(here / "state"),
            "BOOTSEER_NODE_DIR": str(here / "node"),
            "BOOTSEER_DEMAND_DEADLINE": "5",
        }
        self._running: dict[str, contextlib.ExitStack] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    # -- processes -----------------------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """``snapshotter`` and ``containerd``; returns when they answer."""
        for name in names or ("snapshotter", "containerd"):
            argv = {
                "snapshotter": [sys.executable, "-m", "bootseer.cli.main", "-v", "node", "serve", "--containerd",
                                f"--containerd-root={self.root}", f"--containerd-socket={self.socket}"],
                "containerd": ["containerd", "--config", str(self.config)],
            }[name]  # fmt: skip
            if name == "snapshotter":
                self._began = len(self.log.read_text()) if self.log.exists() else 0
            with contextlib.ExitStack() as undo, _environment(self.environ):
                process = undo.enter_context(service(argv, self.here / f"{name}.log"))
                self._processes[name], self._running[name] = process, undo.pop_all()
            until(functools.partial(self._answers, name), 60.0, f"the start of {name}", step=0.05)
        if "containerd" in self._running:  # it connects again after a while; where it has snapshots, this waits for it
            listing = ("snapshots", "--snapshotter", "bootseer", "ls")
            until(lambda: self._ctr(*listing).returncode == 0, 60.0, "an answer of the snapshotter to containerd")

    def _answers(self, name: str) -> bool:
        assert self._processes[name].poll() is None, (self.here / f"{name}.log").read_text()[-2000:]
        if name == "containerd":
            return self._ctr("version").returncode == 0 and b"cri" in self._ctr("plugins", "ls").stdout
        return self._served()

    def _served(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(self.socket))
            return True
        return False

    @property
    def snapshotter_died(self) -> bool:
        """Whether that part of the service did since it was started."""
        return "part containerd has ended (killed by signal 9)" in self.log.read_text()[self._began :]

    def kill(self, *names: str) -> None:
        """As ``kill -9`` does. What serves snapshots is a child of the service, which dies after it: a containerd that
        starts meanwhile, and does not reach it a moment later, forgets its images."""
        for name in names or ("snapshotter", "containerd"):
            self._processes[name].kill()
            self._processes[name].wait(30)
            self._running.pop(name).close()
            if name == "snapshotter":
                until(lambda: not self._served(), 30.0, "the end of what serves snapshots")

    def stop(self, *names: str) -> None:
        for name in names or ("containerd", "snapshotter"):
            if name in self._running:
                self._running.pop(name).close()

    def clear(self) -> None:
        """After a failure: end the containers, with their shims, and unmount what is left."""
        for path in (self.here / "runc").glob("*/*"):
            subprocess.run(
                ["runc", "--root", str(path.parent), "delete", "--force", path.name], timeout=60, check=False
            )
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = entry.read_text().split("\0")
                if "containerd-shim" in words[0] and self._address in words:
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        for left in reversed(mount.below(self.here / "run")):
            mount.unmount(left.target, lazy=True)
        for target in (self.root / "trees").glob("*"):
            unmount(target, Config(state_dir=self.environ["BOOTSEER_STATE_DIR"]))

    def bootseer(self, *args: str) -> subprocess.CompletedProcess[str]:
        """The verb ``bootseer node`` for the snapshotter."""
        where = (f"--containerd-root={self.root}", f"--containerd-socket={self.socket}")
        argv = [sys.executable, "-m", "bootseer.cli.main", "node", *args, "--containerd", *where]
        return subprocess.run(
            argv, capture_output=True, text=True, env={**os.environ, **self.environ}, timeout=_SECONDS, check=False
        )

    # -- what a kubelet and an administrator do ------------------------------------------------------------------------

    def pull(self, ref: str) -> None:
        """As a kubelet does, which tries again while containerd connects to a snapshotter that was started again.
        Raises `grpc.RpcError`."""
        until_then = time.monotonic() + 30.0
        while True:
            try:
                return cri(self._address, "ImageService/PullImage", _field(1, ref.encode()))
            except grpc.RpcError as exc:
                connects = re.search("while dialing|connection closed|broken pipe", exc.details() or "")
                if not connects or self.snapshotter_died or time.monotonic() > until_then:
                    raise
                time.sleep(0.1)

    def remove_image(self, ref: str) -> None:
        """As ``crictl rmi`` does: with its snapshots, when this returns."""
        remove_image(self._address, ref)

    def run(self, ref: str, name: str, *command: str, detach: bool = False) -> subprocess.CompletedProcess[bytes]:
        """A container; it and its snapshot go when it ends, unless it is detached. As a kubelet does, try again where
        the snapshotter says so: this machine may be busy. And where a command that has ended well said nothing: ctr
        loses the output of a short one now and then, and each of ours says something, or may be run twice."""
        how = ["--detach"] if detach else ["--rm"]
        runtime = ("--runc-root", str(self.here / "runc"))  # else one for all containerds of this machine
        until_then = time.monotonic() + _SECONDS
        while True:
            done = self._ctr("run", "--snapshotter", "bootseer", *runtime, *how, ref, name, *command)
            lost = not (detach or done.returncode or done.stdout)
            if not (lost or b"try again" in done.stderr) or time.monotonic() > until_then:
                return done

    def end(self, name: str) -> None:
        """End a detached container and remove it."""
        self._ctr("tasks", "kill", "--signal", "SIGKILL", name)
        until(lambda: self._ctr("tasks", "rm", "--force", name).returncode == 0, 60.0, f"the end of {name}")
        assert self._ctr("containers", "rm", name).returncode == 0

    def _ctr(self, *args: str) -> subprocess.CompletedProcess[bytes]:
        argv = ["ctr", "--address", self._address, "--namespace", _NAMESPACE, *args]
        return subprocess.run(argv, capture_output=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL)

    # -- containerd's own API ------------------------------------------------------------------------------------------

    def content_bytes(self) -> int:
        """What containerd has pulled and keeps."""
        blobs = self.here / "containerd/io.containerd.content.v1.content/blobs"
        return sum(path.stat().st_size for path in blobs.rglob("*") if path.is_file())

    @contextlib.contextmanager
    def preparing(self, keys: Iterable[str], parent: str, labels: Mapping[str, str] = {}) -> Iterator[list[Any]]:
        """Calls of Prepare for ``keys`` over ``parent`` on their way, as for containers; their snapshots stay."""
        with grpc.insecure_channel(f"unix:{self._address}") as channel:
            call = channel.unary_unary(
                "/containerd.services.snapshots.v1.Snapshots/Prepare",
                request_serializer=messages.CreateRequest.SerializeToString,
                response_deserializer=messages.MountsResponse.FromString,
            )
            yield [
                call.future(
                    messages.CreateRequest(snapshotter="bootseer", key=key, parent=parent, labels=labels),
                    timeout=_SECONDS,
                    metadata=(("containerd-namespace", _NAMESPACE),),
                )
                for key in keys
            ]

    def remove_snapshot(self, key: str) -> None:
        assert self._ctr("snapshots", "--snapshotter", "bootseer", "rm", key).returncode == 0


def remove_image(address: str, ref: str) -> None:
    """As ``crictl rmi`` does: with its snapshots, when this returns."""
    cri(address, "ImageService/RemoveImage", _field(1, ref.encode()))


def cri(address: str, method: str, value: bytes) -> None:
    """Call CRI with a request whose only field is ``value``. Raises `grpc.RpcError`."""
    with grpc.insecure_channel(f"unix:{address}") as channel:
        call = channel.unary_unary(f"/runtime.v1.{method}", request_serializer=bytes, response_deserializer=bytes)
        call(_field(1, value), timeout=_SECONDS, wait_for_ready=True)


def _field(number: int, value: bytes) -> bytes:
    """A field of bytes or of a message, as protobuf writes it."""
    assert len(value) < 128
    return bytes([number << 3 | 2, len(value)]) + value


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
