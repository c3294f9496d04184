"""The snapshotter, a part of the node service. Mounts and block servers outlive it: containers go on, and the next one
finds its state in the database."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from bootseer.config import Config
from bootseer.containerd.images import Images
from bootseer.containerd.proto import snapshots_pb2 as messages
from bootseer.containerd.service import Service
from bootseer.containerd.snapshots import ExistsError, MissingError, Snapshots, StateError
from bootseer.errors import BootseerError, ConfigError, FullError, PrivilegeError, UnavailableError
from bootseer.folders import private_folder
from bootseer.kernel.parts import Part, alone
from bootseer.rpc import server
from bootseer.rpc.server import StatusCode

_CODES = (
    (MissingError, StatusCode.NOT_FOUND),
    (ExistsError, StatusCode.ALREADY_EXISTS),
    (StateError, StatusCode.FAILED_PRECONDITION),
    (UnavailableError, StatusCode.UNAVAILABLE),
    (FullError, StatusCode.RESOURCE_EXHAUSTED),
    (BootseerError, StatusCode.UNKNOWN),
)
"""containerd goes by the first three: no other error may look like one of them."""


def serve(root: Path, socket: Path, config: Config, part: Part) -> None:
    """Be the ``part`` of the service that serves snapshots in the folder ``root`` at ``socket``. Raises
    `PrivilegeError` without root, `ConfigError` for folders that others can write to, bad settings, and when another
    process serves this ``root`` or ``socket``."""
    if os.geteuid() != 0:
        raise PrivilegeError("the snapshotter needs root", hint="run it as a service of root")
    root = private_folder(root)
    if re.search(r"[,:\\\s]", str(root)):
        raise ConfigError(f"the folder {root} has a character that mounts cannot name", hint="choose another --root")
    with alone(root, "a snapshotter"), contextlib.closing(Snapshots(root)) as snapshots:
        service = Service(snapshots, Images(snapshots, config, part), config.demand_deadline)
        calls: server.Calls = {
            "Prepare": (messages.CreateRequest, service.prepare),
            "View": (messages.CreateRequest, service.view),
            "Mounts": (messages.KeyRequest, service.mounts),
            "Commit": (messages.CommitRequest, service.commit),
            "Remove": (messages.KeyRequest, service.remove),
            "Stat": (messages.KeyRequest, service.stat),
            "Update": (messages.UpdateRequest, service.update),
            "List": (messages.ListRequest, service.list),
            "Usage": (messages.KeyRequest, service.usage),
            "Cleanup": (messages.KeyRequest, service.cleanup),
        }
        server.serve([socket], {"containerd.services.snapshots.v1.Snapshots": calls}, _CODES, part)
