"""What a caller asks of the environment stage, and how that ends."""

from __future__ import annotations

import enum
import itertools
import os
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from bootseer.errors import BootseerError, ConfigError

Technique = Literal["auto", "mount", "unpack"]


class Target(msgspec.Struct, frozen=True):
    """One directory that the command fills. ``path`` is where the job sees it (part of the key); ``host_path`` is where
    it lies on this host, such as inside the root file system of a container. Both absolute; equal when there is
    none."""

    path: str
    host_path: str = ""
    within: str = ""
    """The folder of this host, with ``host_path`` in it, in which a container may change every name: the container's
    root file system, or what it is shown beside. No link in it is followed."""

    @property
    def host(self) -> Path:
        return Path(self.host_path or self.path)


class EnvSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of one environment stage. Relative key files are looked up in ``cwd`` of this host."""

    targets: tuple[Target, ...]
    command: tuple[str, ...]
    key_files: tuple[str, ...] = ()
    """Host paths of files (or folders, hashed whole) whose content decides what the command does."""
    key_env: tuple[str, ...] = ()
    """Names of environment variables whose values decide it."""
    salt: str = ""
    max_age: float | None = None
    """Seconds after which a snapshot is a miss; for commands whose requirements are not pinned."""
    since: float = 0.0
    """What was made before this time (seconds since 1970) is not used either."""
    frozen: bool = False
    """Never run the command: without a snapshot that fits the stage fails."""
    only_restore: bool = False
    """Raise `MissError` instead of running the command, before anything is waited for."""
    image_digest: str = ""
    """Digest of the container image the command runs in; it stands for that image's Python and libc."""
    cwd: str = ""
    """Working folder of the command, as the job sees it; empty: this process's, or the image's."""
    mounts: tuple[tuple[str, str], ...] = ()
    """(folder of this host, where the job sees it): what a container shows the command beside its image."""
    rootfs: str = ""
    """The root file system of that container on this host."""
    python: str = ""
    """Interpreter the environment is for, runnable on this host; empty: ``python3`` on PATH (none with an image)."""
    environ: Mapping[str, str] | None = None
    """Where ``key_env`` is looked up; this process's environment when None."""
    restore: Technique = "auto"
    snapshot: bool = True
    """False: only run the command."""
    background: bool = True
    """Publish while the caller goes on (see ``EnvResult.publication``)."""
    wait: float = 1800.0
    """Longest wait, in seconds, for another node that runs the same command; it ends when that node is seen no more."""
    nodes: int = 0
    """How many nodes start together; 0: nobody said."""
    rank: int = -1
    """The number of this one. See `wager` for when it runs the command though another one does."""
    caller: int = 0
    """Process that uses the targets when this one has ended, such as the script that ran `bootseer env run`."""
    job: str = ""
    """Names the trace profile of the tree; empty: the default profile."""

    @property
    def shared(self) -> str:
        """The first target, by its path, in what the container is shown: other containers may change it meanwhile, with
        root's rights. Empty when there is none."""
        sources = {source for source, _ in self.mounts}
        return next((target.path for target in self.targets if target.within in sources), "")

    @property
    def env(self) -> Mapping[str, str]:
        return os.environ if self.environ is None else self.environ

    @property
    def folder(self) -> Path:
        return Path(self.cwd or os.getcwd())

    @property
    def contained(self) -> bool:
        """Whether the command runs in a container, with an interpreter and a libc that are not this host's."""
        return bool(self.image_digest) or any(str(target.host) != target.path for target in self.targets)

    def in_image(self, target: Target) -> bool:
        """Whether what ``target`` holds before the command follows from the image's digest."""
        return bool(self.image_digest) and target.within == self.rootfs

    def root_of(self, path: str | Path) -> str:
        """The folder of this host in which ``path`` lies, and a container may change every name; else empty."""
        roots = [root for root in (self.rootfs, *(source for source, _ in self.mounts)) if root]
        return max((root for root in roots if Path(path).is_relative_to(root)), key=len, default="")

    def on_host(self, path: str) -> str:
        """Where ``path``, as the job sees it, lies on this host; empty for what is in a container's image."""
        if not self.contained:
            return path
        below = [
            (source, to.rstrip("/")) for source, to in self.mounts if (path + "/").startswith(to.rstrip("/") + "/")
        ]
        source, to = max(below, key=lambda item: len(item[1]), default=("", path))
        return source and source + path[len(to) :]

    def check(self) -> None:
        """Raise `ConfigError` for targets that are relative, the root, or inside one another, or for no command."""
        if not self.command:
            raise ConfigError("no set-up command given", hint="put it after --")
        if not self.targets:
            raise ConfigError("no target given", hint="name the directory that the command fills with --target")
        for target in self.targets:
            check_plain(target.path)
            check_plain(str(target.host))
        paths = sorted(str(target.host).rstrip("/") + "/" for target in self.targets)
        for outer, inner in itertools.pairwise(paths):
            if inner.startswith(outer):
                raise ConfigError(f"target {inner.rstrip('/')} lies inside target {outer.rstrip('/')}")


class MissError(BootseerError):
    """There is nothing that can be restored here and now."""


class Outcome(enum.StrEnum):
    """How the stage ended."""

    RESTORED_MOUNT = "restored-mount"
    RESTORED_UNPACK = "restored-unpack"
    RAN_AND_PUBLISHED = "ran-and-published"
    RAN_AND_PUBLISHING = "ran-and-publishing"
    """It goes on in the background."""
    RAN = "ran"


def resolve_in(root: Path, path: str) -> Path:
    """Where the container path ``path`` lies on the host below ``root``, with the container's symbolic links followed:
    absolute ones start again at ``root``; ``..`` never leaves it. Parts that do not exist are kept as written. Raises
    `ConfigError` when more than 40 links are met."""
    todo = path.split("/")[::-1]
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            del done[-1:]
            continue
        here = root.joinpath(*done, part)
        if not here.is_symlink():
            done.append(part)
            continue
        links += 1
        if links > 40:
            raise ConfigError(f"too many symbolic links in {path}")
        text = os.readlink(here)
        if text.startswith("/"):
            done = []
        todo.extend(text.split("/")[::-1])
    return root.joinpath(*done)


def check_plain(path: str) -> None:
    """Raise `ConfigError` for a target that is relative or the root, or has ``.`` or ``..`` in it."""
    if not path.startswith("/") or posixpath.normpath(path) != path.rstrip("/") or "\0" in path:
        raise ConfigError(f"target {path!r} is not a plain absolute path", hint="write it without . and ..")
