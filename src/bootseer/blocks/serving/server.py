"""The block server: the program that serves one lazy tree on a node, as a supervisor, a FUSE server and a fetcher.

`bootseer.kernel.background` starts it. Its request names the folder of its state, with its `ServerSpec` in
``spec.json``. It answers ``ok DRIVER`` when the tree may be mounted, or ``error CODE TEXT``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.blocks.serving import supervisor
from bootseer.blocks.serving.protocol import LOCK, SPEC, ServerSpec
from bootseer.errors import BootseerError, UnavailableError, doing
from bootseer.kernel import background, mount
from bootseer.kernel.flock import lock
from bootseer.loglimit import LogRateLimit
from bootseer.objects import Store, open_store
from bootseer.units import one_line

log = logging.getLogger(__name__)

_LOG_BYTES = 4 << 20
_LOCK_SECONDS = 0.1
"""Who looks whether a server lives holds the lock for a moment."""


def main(*, store_for: Callable[[str], Store] = open_store) -> int:
    """Serve until the end. ``store_for`` opens the store, in the fetcher; benchmarks pass one that wraps it with a rate
    limit."""
    folder = Path(os.fsdecode(background.request("bootseer-blocks")))
    answer = background.Answer()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRateLimit())
    try:
        _write_to(folder.with_suffix(".log"))
        spec = msgspec.json.decode((folder / SPEC).read_bytes(), type=ServerSpec)
        os.chdir("/")
        if spec.config.server_cgroup:
            _go_to_cgroup(spec.config.server_cgroup)
        running = supervisor.start(spec, folder, store_for, _lock(folder), answer)
    except BootseerError as exc:
        log.error("%s", exc)
        answer(f"error {exc.exit_code} {one_line(str(exc))}")
        return exc.exit_code
    except Exception as exc:
        log.exception("the block server failed")
        answer(f"error 70 {one_line(repr(exc))}")
        return 70
    if not answer(f"ok {running.driver}"):
        log.warning("nobody waits for tree %s any more", spec.id)
        running.end()
    return running.run()


def _write_to(path: Path) -> None:
    """Standard output and errors go to the end of the file ``path``."""
    with doing(f"write {path}"):
        if path.exists() and path.stat().st_size > _LOG_BYTES:
            os.replace(path, path.with_suffix(".log.old"))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)


def _go_to_cgroup(name: str) -> None:
    """Leave the cgroups of who mounts: other jobs on the tree outlive them."""
    tops = [entry.target for entry in mount.entries() if entry.fstype in ("cgroup", "cgroup2")]
    found = [path for top in tops if (path := Path(top, name.lstrip("/"), "cgroup.procs")).exists()]
    if not found:
        log.warning("there is no cgroup %s: this server stays in that of the job which mounts first", name)
    for path in found:
        try:
            path.write_text("0")
        except OSError as exc:
            log.warning("this server cannot go to the cgroup %s: %s", path.parent, exc.strerror)


def _lock(folder: Path) -> int:
    """Show that a server lives in ``folder``, for as long as one of its processes does."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not lock(fd, _LOCK_SECONDS):
        os.close(fd)
        raise UnavailableError(f"another block server lives in {folder}")
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpgid(0), 0)
    return fd


if __name__ == "__main__":
    sys.exit(main())
