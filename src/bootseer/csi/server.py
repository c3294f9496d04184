"""The CSI driver, a part of the node service: it registers at the kubelet, and mounts and unmounts volumes of pods.
Mounts and their servers outlive it: pods go on, and the next one ends them."""

from __future__ import annotations

import logging
import os
import resource
import socket
from importlib.metadata import version
from pathlib import Path

from bootseer.config import Config
from bootseer.csi.proto import csi_pb2 as messages
from bootseer.csi.volumes import Volumes, wish
from bootseer.errors import BootseerError, ConfigError, FullError, NotFoundError, PrivilegeError, UnavailableError
from bootseer.folders import private_folder
from bootseer.kernel import libc
from bootseer.kernel.parts import Part, alone
from bootseer.rpc import server
from bootseer.rpc.server import StatusCode
from bootseer.rpc.tasks import Tasks, within

log = logging.getLogger(__name__)

NAME = "bootseer.io"
"""Of the driver, in the manifests of pods."""
_SECONDS = 90.0
"""A kubelet waits for two minutes, and asks again."""
_CODES = (
    (ConfigError, StatusCode.INVALID_ARGUMENT),
    (NotFoundError, StatusCode.NOT_FOUND),
    (PrivilegeError, StatusCode.PERMISSION_DENIED),
    (UnavailableError, StatusCode.UNAVAILABLE),
    (FullError, StatusCode.RESOURCE_EXHAUSTED),
    (BootseerError, StatusCode.INTERNAL),
)


def serve(kubelet: Path, config: Config, part: Part) -> None:
    """Be the ``part`` of the service that serves volumes to the kubelet with the root folder ``kubelet``. Raises
    `PrivilegeError` without root, `ConfigError` when there is no kubelet, for folders that others can write to, and
    when another process serves this kubelet."""
    if os.geteuid() != 0:
        raise PrivilegeError("the CSI driver needs root", hint="run it as a service of root")
    if not (kubelet / "plugins_registry").is_dir():
        raise ConfigError(f"{kubelet} is not the folder of a kubelet", hint="--kubelet-dir names its --root-dir")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # logins of pods pass through
    libc.hide()
    endpoint = private_folder(kubelet / "plugins", sub=NAME) / "csi.sock"
    with alone(endpoint.parent, "a CSI driver"):
        node = Node(kubelet, endpoint, Volumes(config, part))
        services: dict[str, server.Calls] = {
            "csi.v1.Identity": {
                "GetPluginInfo": (messages.Empty, node.plugin),
                "GetPluginCapabilities": (messages.Empty, node.nothing),
                "Probe": (messages.Empty, node.nothing),
            },
            "csi.v1.Node": {
                "NodeGetInfo": (messages.Empty, node.info),
                "NodeGetCapabilities": (messages.Empty, node.nothing),
                "NodePublishVolume": (messages.PublishRequest, node.publish),
                "NodeUnpublishVolume": (messages.UnpublishRequest, node.unpublish),
            },
            "pluginregistration.Registration": {
                "GetInfo": (messages.Empty, node.registration),
                "NotifyRegistrationStatus": (messages.RegistrationStatus, node.registered),
            },
        }
        # The kubelet asks as soon as the second is there.
        server.serve([endpoint, kubelet / "plugins_registry" / f"{NAME}-reg.sock"], services, _CODES, part)


class Node:
    """The calls of CSI, and those by which the kubelet takes the driver that serves at ``endpoint``: each a coroutine
    that takes a message and returns one."""

    def __init__(self, kubelet: Path, endpoint: Path, volumes: Volumes) -> None:
        self._pods, self._volumes, self._tasks = Path(os.path.realpath(kubelet), "pods"), volumes, Tasks()
        self._endpoint = str(endpoint)

    async def plugin(self, _: messages.Empty) -> messages.PluginInfoResponse:
        return messages.PluginInfoResponse(name=NAME, vendor_version=version("bootseer"))

    async def nothing(self, _: messages.Empty) -> messages.Empty:
        """An answer without fields: no capabilities besides those that all drivers have, and ready."""
        return messages.Empty()

    async def info(self, _: messages.Empty) -> messages.NodeInfoResponse:
        return messages.NodeInfoResponse(node_id=socket.gethostname())

    async def publish(self, request: messages.PublishRequest) -> messages.Empty:
        target = self._target(request.target_path)
        asked = wish(request.volume_context, request.secrets, target)
        task = self._tasks.start(
            ("publish", request.volume_id), lambda: self._volumes.publish(request.volume_id, target, asked)
        )
        await within(task, _SECONDS, f"{asked.kind} {asked.name}")
        return messages.Empty()

    async def unpublish(self, request: messages.UnpublishRequest) -> messages.Empty:
        target = self._target(request.target_path)
        task = self._tasks.start(
            ("unpublish", request.volume_id), lambda: self._volumes.unpublish(request.volume_id, target)
        )
        await within(task, _SECONDS, f"the end of volume {request.volume_id}")
        return messages.Empty()

    async def registration(self, _: messages.Empty) -> messages.PluginInfo:
        return messages.PluginInfo(type="CSIPlugin", name=NAME, endpoint=self._endpoint, supported_versions=["1.0.0"])

    async def registered(self, request: messages.RegistrationStatus) -> messages.Empty:
        if request.plugin_registered:
            log.info("the kubelet has registered %s", NAME)
        else:
            log.error("the kubelet has refused %s: %s", NAME, request.error)
        return messages.Empty()

    def _target(self, path: str) -> Path:
        """``path``, when it is one that a kubelet chooses: it is unmounted and removed."""
        parts = Path(path).parts[-5:]
        target = self._pods.joinpath(*parts)
        shape = len(parts) == 5 and (*parts[1:3], parts[4]) == ("volumes", "kubernetes.io~csi", "mount")
        if not shape or ".." in parts or os.path.realpath(Path(path).parent) != str(target.parent):
            raise ConfigError(f"{path!r} is not the folder of a volume in {self._pods}")
        return target
