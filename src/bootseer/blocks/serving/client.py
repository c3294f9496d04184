"""What a program does with a block server: join or start one, ask it, clean up after one that died."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from bootseer.blocks.serving.mount_readahead import NAMES
from bootseer.blocks.serving.protocol import FUSE_FOLDER, ServerSpec, TreeRecord, TreeStatus
from bootseer.errors import BootseerError
from bootseer.kernel import background
from bootseer.kernel import mount as mounts
from bootseer.served import client
from bootseer.served.protocol import GoneError, Request

log = logging.getLogger(__name__)

SERVER = background.program("bootseer.blocks.serving.server")
MORE = NAMES, FUSE_FOLDER
"""What is in a server's state folder besides the files of `bootseer.served`."""
_GRACE_SECONDS = 3.0
_TAKE_BACK_SECONDS = 1.0


def ask(
    folder: Path, do: str, target: Path | str = "", *, store: str = "", timeout: float = client.PATIENCE
) -> TreeStatus:
    """One request to the server whose state is in ``folder``, see `client.ask`."""
    return client.ask(folder, Request(do, str(target), store), TreeStatus, timeout=timeout)


def join_or_start(folder: Path, spec: ServerSpec, server: Sequence[str]) -> TreeStatus:
    """See to it that a server for ``spec`` runs and knows its target; of one that was started here only the driver is
    known, and ``pid`` is 0. Raises what kept it from starting."""
    if folder.exists():
        try:
            status = ask(folder, "add", spec.target, store=spec.store_url)
        except GoneError as exc:  # any other error says that it lives, and others may use it
            log.warning("%s; cleaning up after it", exc)
            clear(folder)
        except BaseException:
            with contextlib.suppress(BootseerError):  # it may have heard of the mount that is not to be
                ask(folder, "remove", spec.target, timeout=_TAKE_BACK_SECONDS)
            raise
        else:
            if status.digest != spec.digest:
                raise BootseerError(f"tree id {spec.id} is taken by {status.digest}")
            if status.cache_dir != spec.cache_dir:
                log.warning("tree %s is served out of %s until all its mounts end", spec.id, status.cache_dir)
            return status
    try:
        record = TreeRecord(id=folder.name, digest=spec.digest, target=spec.target)
        driver = client.start(folder, server, spec, str, record=record, cgroup=spec.config.server_cgroup)
    except BaseException:
        clear(folder)
        raise
    return TreeStatus(id=spec.id, digest=spec.digest, pid=0, driver=driver, cache_dir=spec.cache_dir)


def clear(folder: Path) -> None:
    """Remove what a server that ended or died left: stuck processes, a dead FUSE mount, its state files."""
    client.await_exit(folder, _GRACE_SECONDS)  # one that failed to start is about to end by itself
    if mounts.is_mounted(folder / FUSE_FOLDER):
        log.warning("detaching the FUSE mount that a block server left in %s", folder)
        mounts.unmount(folder / FUSE_FOLDER, lazy=True)
    client.remove(folder, *MORE)
