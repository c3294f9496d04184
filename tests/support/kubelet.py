"""The CSI driver of a node as a kubelet uses it: its folders, and its calls over gRPC."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from bootseer.csi.proto import csi_pb2 as messages
from support.service import service
from support.waits import until

_SECONDS = 120.0
EMPTY = messages.Empty()


class Volume(NamedTuple):
    """An inline volume of a pod."""

    id: str
    target: Path
    context: Mapping[str, str]


class Kubelet:
    """Its root folder is ``here/kubelet``, a link, the node's state in ``here``; the driver runs between `start` and
    `stop`."""

    def __init__(self, here: Path, environ: Mapping[str, str]) -> None:
        self.root, self._log = here / "kubelet", here / "driver.log"
        (here / "disk").mkdir()
        self.root.symlink_to(here / "disk")
        for name in ("pods", "plugins", "plugins_registry"):
            (self.root / name).mkdir(parents=True, mode=0o750)
        self.endpoint = self.root / "plugins/bootseer.io/csi.sock"
        self.registration = self.root / "plugins_registry/bootseer.io-reg.sock"
        self.state = here / "state"
        self.environ = {
            "BOOTSEER_CACHE_DIR": str(here / "cache"),
            "BOOTSEER_STATE_DIR": str(self.state),
            "BOOTSEER_NODE_DIR": str(here / "node"),
            **environ,
        }
        self._running = contextlib.ExitStack()

    def argv(self) -> list[str]:
        return [sys.executable, "-m", "bootseer.cli.main", "-v", "node", "serve", "--csi", f"--kubelet-dir={self.root}"]

    def start(self, **more: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**self.environ, **more}.items():
                patch.setenv(name, value)
            self._process = self._running.enter_context(service(self.argv(), self._log))
        until(lambda: self.registration.exists() and self._answers(), 60.0, "the start of the driver", step=0.05)

    def _answers(self) -> bool:
        """Whether both do, the driver and the daemon that mounts for it: a kubelet would try again."""
        with (
            contextlib.suppress(grpc.RpcError, OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon,
        ):
            daemon.connect(f"{self.environ['BOOTSEER_NODE_DIR']}/node.sock")
            self.call("csi.v1.Identity/Probe", EMPTY)
            return True
        return False

    def kill(self) -> None:
        """As ``kill -9`` of all of the service does; returns when it is dead."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def ended(self) -> int:
        """The exit status of the service, once it has ended."""
        return self._process.wait(30)

    def stop(self) -> None:
        self._running.close()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, name: str, message: Any, answer: type[Any] = messages.Empty, *, at: Path | None = None) -> Any:
        """Raises `grpc.RpcError`."""
        with grpc.insecure_channel(f"unix:{at or self.endpoint}") as channel:
            ask = channel.unary_unary(
                f"/{name}", request_serializer=type(message).SerializeToString, response_deserializer=answer.FromString
            )
            return ask(message, timeout=_SECONDS)

    def volume(self, *, namespace: str = "team", **attributes: str) -> Volume:
        """A volume with these attributes, of a new pod."""
        uid = str(uuid.uuid4())
        target = self.root / f"pods/{uid}/volumes/kubernetes.io~csi/data/mount"
        target.parent.mkdir(parents=True)
        told = {"ephemeral": "true", "pod.uid": uid, "pod.name": "train", "pod.namespace": namespace}
        context = {**attributes, **{f"csi.storage.k8s.io/{key}": value for key, value in told.items()}}
        return Volume(f"csi-{uuid.uuid4().hex}{uuid.uuid4().hex}", target, context)

    def publish(self, volume: Volume, **logins: str) -> None:
        """``logins``: NAME=PASSWORD at the registry ``logins['at']``, as a pull secret. Raises `grpc.RpcError`."""
        secrets = {}
        if at := logins.pop("at", ""):
            ((user, password),) = logins.items()
            secrets[".dockerconfigjson"] = json.dumps({"auths": {at: {"username": user, "password": password}}})
        self.call(
            "csi.v1.Node/NodePublishVolume",
            messages.PublishRequest(
                volume_id=volume.id, target_path=str(volume.target), volume_context=volume.context, secrets=secrets
            ),
        )

    def refused(self, volume: Volume, left: Collection[str] = (), **logins: str) -> tuple[str, str]:
        """The code and the words with which `publish` fails; nothing is left of it, and of others those ``left``."""
        try:
            self.publish(volume, **logins)
        except grpc.RpcError as exc:
            assert not volume.target.exists()
            assert {path.name for path in (self.state / "csi").iterdir()} == set(left)
            return exc.code().name, str(exc.details())
        raise AssertionError("it was published")

    def unpublish(self, volume: Volume) -> None:
        self.call(
            "csi.v1.Node/NodeUnpublishVolume",
            messages.UnpublishRequest(volume_id=volume.id, target_path=str(volume.target)),
        )
        assert not volume.target.exists()
        assert not (self.state / "csi" / volume.id).exists()

    @contextlib.contextmanager
    def published(self, volume: Volume, **logins: str) -> Iterator[Path]:
        self.publish(volume, **logins)
        try:
            yield volume.target
        finally:
            self.unpublish(volume)

    def run(self) -> subprocess.CompletedProcess[str]:
        """Another driver, until it ends by itself."""
        return subprocess.run(
            self.argv(), env={**os.environ, **self.environ}, capture_output=True, text=True, timeout=60, check=False
        )
