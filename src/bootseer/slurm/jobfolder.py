"""What Prolog, Epilog and the steps of one attempt of a job tell each other on one node: a folder of its own.

``/run/bootseer-slurm/<job id>.<restart count>/``. Only root writes; the job's user may pass through it (an ACL, since
users may share a group) but not list it. Files, in the order of their making:

- ``began``: when the Prolog began, in seconds since boot
- ``lock``: who prepares the image holds it (flock), and has its process id in it
- ``daemon``: the ``node_dir`` of the node daemon that mounts the image
- ``state``: else the ``state_dir`` that it is mounted by, on
- ``rootfs``
- ``image.json`` (`Image`) when it is ready, or ``error``, a line for the user, when it will not be
- ``ended``: the Epilog has come; what is left is to be removed by whoever sees it"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from bootseer.closing import whole
from bootseer.errors import BootseerError, ConfigError, NotFoundError, PrivilegeError, doing
from bootseer.folders import private_folder, trusted
from bootseer.kernel import flock
from bootseer.kernel.removal import discard_tree
from bootseer.wiretypes import json_as

BASE = Path("/run/bootseer-slurm")
LOG = "log"
LOCK, ROOTFS, ENDED = "lock", "rootfs", "ended"
DAEMON, STATE = "daemon", "state"
_BEGAN, _IMAGE, _ERROR = "began", "image.json", "error"


class Attempt(NamedTuple):
    """One start of a job by Slurm."""

    job: int
    restart: int
    """How often the job was requeued before."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Attempt:
        """That of the hook or step with these variables. Raises `ConfigError` outside of a job."""
        job = environ.get("SLURM_JOB_ID", "")
        # hooks have the first of them, steps the second, and those of a job that was never requeued none
        restart = environ.get("SLURM_JOB_RESTART_COUNT") or environ.get("SLURM_RESTART_COUNT") or "0"
        if not job.isdecimal() or not restart.isdecimal():
            raise ConfigError("this is no job of Slurm", hint="run it in one, or name a folder with --image")
        return cls(int(job), int(restart))

    @property
    def folder(self) -> Path:
        return BASE / f"{self.job}.{self.restart}"


class Image(msgspec.Struct, frozen=True):
    """A mounted image, as the steps of the job see it."""

    reference: str
    env: tuple[str, ...]
    """``NAME=VALUE``, as the image's configuration has them."""
    working_dir: str
    root: str = ""
    """Where it is mounted; empty: on ``rootfs`` in the attempt's folder."""


def base() -> Path:
    """`BASE`, made when it is missing. Raises `ConfigError` when it is not root's own."""
    folder = private_folder(BASE)
    if folder.stat().st_mode & 0o777 == 0o700:  # just made
        folder.chmod(0o711)
    return folder


def make(attempt: Attempt, user: int, began: float) -> tuple[Path, int] | None:
    """The attempt's folder, new, for the job of ``user``, and the descriptor of its ``lock``, which is held. None when
    it is there already. Raises `BootseerError` when it cannot be made."""
    with doing(f"make {attempt.folder}"):
        hidden, lock = Path(tempfile.mkdtemp(prefix=".new-", dir=base())), -1
        try:
            os.setxattr(hidden, "system.posix_acl_access", _only(user))
            (hidden / ROOTFS).mkdir(mode=0o755)
            (hidden / _BEGAN).write_text(f"{began}")
            lock = os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            flock.lock(lock)
            hidden.rename(attempt.folder)
        except OSError as exc:
            if lock >= 0:
                os.close(lock)
            discard_tree(hidden)
            if exc.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return None
            raise
    return attempt.folder, lock


def note(folder: Path, name: str, used: str) -> None:
    """The daemon (``name``: `DAEMON`) or the state (`STATE`) in the folder ``used`` is about to mount something; empty:
    it is not after all. Raises `OSError`."""
    write(folder / name, used.encode(), 0o600)


def noted(folder: Path, name: str) -> Path | None:
    """What `note` has noted; None: nothing was to be mounted by it."""
    with contextlib.suppress(FileNotFoundError):
        return Path(text) if (text := (folder / name).read_text()) else None
    return None


def show(folder: Path, image: Image) -> None:
    """The image is mounted. Raises `OSError`."""
    write(folder / _IMAGE, msgspec.json.encode(image), 0o644)


def fail(folder: Path, why: str) -> None:
    """There will be no image. Raises `OSError`."""
    write(folder / _ERROR, f"{why}\n".encode(), 0o644)


def image(attempt: Attempt) -> tuple[Path, Image]:
    """The root folder of the attempt's image, and what is known of it, for a step. Raises `NotFoundError` with the
    reason when there is none."""
    folder = trusted(BASE) / attempt.folder.name
    if not folder.exists():  # a job has the count of the requeued one that submitted it: Slurm sets it only above 0
        folder = folder.with_name(f"{attempt.job}.0")
    hint = "the administrator finds more in /run/bootseer-slurm/log of the node"
    try:
        if (folder / ENDED).exists():
            raise NotFoundError(f"the image of job {attempt.job} was unmounted", hint=hint)
        found = json_as((folder / _IMAGE).read_bytes(), Image)
        return Path(found.root) if found.root else folder / ROOTFS, found
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            raise NotFoundError(
                f"job {attempt.job} has no image here: {(folder / _ERROR).read_text().strip()}"
            ) from None
        if folder.exists():
            raise NotFoundError(f"the image of job {attempt.job} was not ready in time", hint=hint) from None
        raise NotFoundError(
            f"job {attempt.job} has no image here",
            hint="submit it with --comment=bootseer=HOST/NAME:TAG; the node needs `bootseer node install --slurm` "
            "and room in /run",
        ) from None
    except PermissionError:
        raise PrivilegeError(f"job {attempt.job} is another user's", hint="enter the image of your own job") from None
    except (OSError, ValueError) as exc:
        raise BootseerError(f"cannot read the image of job {attempt.job}: {exc}", hint=hint) from None


def has_answer(folder: Path) -> bool:
    """Whether `show` or `fail` was called."""
    return (folder / _IMAGE).exists() or (folder / _ERROR).exists()


def end(job: int, began: float) -> None:
    """Mark all attempts that an Epilog of ``job`` ends that began at ``began``, in seconds since boot: all that began
    before it. Its restart count does not tell: the Epilog of an attempt that is requeued has that of the next attempt,
    whose Prolog may run before a slow Epilog has come as far as here."""
    for folder in BASE.glob(f"{job}.*"):
        with contextlib.suppress(FileNotFoundError):
            if float((folder / _BEGAN).read_text()) < began:
                (folder / ENDED).touch(0o600)  # whoever can open it can lock it


def present() -> list[Path]:
    """The folders of all attempts on this node, ended or not."""
    return sorted(path.parent for path in BASE.glob(f"[!.]*/{_BEGAN}"))


def ended() -> Iterator[Path]:
    """The folders that are to be removed."""
    return (path.parent for path in sorted(BASE.glob(f"[!.]*/{ENDED}")))


def write(path: Path, content: bytes, mode: int) -> None:
    """Make or replace a file in one step."""
    with whole(path) as new:
        os.fchmod(new.fileno(), mode)
        new.write(content)


def _only(user: int) -> bytes:
    """The access control list by which root does everything, ``user`` passes through, and nobody else does anything."""
    owner, named, group, mask, other, nobody = 0x01, 0x02, 0x04, 0x10, 0x20, 0xFFFFFFFF
    entries = ((owner, 7, nobody), (named, 1, user), (group, 0, nobody), (mask, 1, nobody), (other, 0, nobody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
