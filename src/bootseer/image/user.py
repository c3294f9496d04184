"""The container of an ordinary user: no runtime, `bootseer.rootless` instead. The command is this user, with the host's
processes and network in sight. What it writes in the image lies in memory. All of it ends with this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from bootseer import oci, rootless
from bootseer.image import container
from bootseer.image.container import Bind
from bootseer.kernel.enter import Shown

_KEPT = ("HOME", "USER", "LOGNAME", "TERM")


def run(
    rootfs: Path,
    config: oci.ImageConfig,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    mounts: Sequence[Bind] = (),
    cwd: str = "",
    stop_grace: float | None = None,
    stdin: bool = True,
) -> int:
    """As `runtime.run`, by an ordinary user who may enter ``rootfs``."""
    own = {name: os.environ[name] for name in _KEPT if name in os.environ}
    inner = config.config or oci.ContainerConfig()
    command = rootless.Command(
        root=str(rootfs),
        argv=container.command_of(config, argv),
        env={"PATH": container.DEFAULT_PATH, **inner.variables, **own, **env},
        shown=[
            *(Shown(path, path) for path in rootless.SYSTEM),
            *(Shown(os.path.abspath(bind.source), bind.target, bind.readonly) for bind in mounts),
        ],
        made=[path for path, there in container.volumes(rootfs, config).items() if not there],
        folders=[container.folder_of(inner, cwd)],
        must=bool(cwd),
    )
    return rootless.run(command, stop_grace=stop_grace, stdin=stdin)
