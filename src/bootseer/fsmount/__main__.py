"""The processes of a mount, a server of `bootseer.served`: starts with a `ServerSpec`, answers when it works."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import msgspec

from bootseer.fsmount.memory import Inherited, MountMemory
from bootseer.fsmount.record import FsStatus, ServerSpec
from bootseer.fsmount.server import mount_options
from bootseer.fsmount.supervisor import Supervisor
from bootseer.kernel import fuse
from bootseer.served import entry
from bootseer.served.control import ControlServer
from bootseer.wiretypes import json_as

_NAME = "bootseer-fs"


def main() -> int:
    return entry.run(_NAME, _serve)


def _serve(begun: entry.Begun) -> int:
    spec = json_as(begun.spec, ServerSpec)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each file that is open is several here
    control, memory = ControlServer(begun.folder), MountMemory()
    memory.status.write(msgspec.json.encode(FsStatus(url="", mountpoint=spec.mountpoint)))
    device = fuse.Device.open(Path(spec.mountpoint), mount_options(spec))
    return Supervisor(Inherited(spec, begun.folder, begun.lock, device, control, memory), begun.answer).run()


if __name__ == "__main__":
    if sys.argv[1:]:  # `Inherited.start_supervisor`
        os._exit(Supervisor(Inherited.read(entry.inherit(_NAME)), None).run())
    os._exit(main())
