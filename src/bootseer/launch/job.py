"""The job file: what to start, from which image, with which set-up command and checkpoint. Reference:
``docs/reference/job-file.md``, checked by a test. Every technique has ``enabled``: false starts that stage without
it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from bootseer.env import cachekinds
from bootseer.env.spec import check_plain
from bootseer.errors import ConfigError, NotFoundError
from bootseer.units import MOST_SECONDS, parse_age
from bootseer.wiretypes import document_and_owner, in_words, known, loaded

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]

Passed = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\*?$")]
"""The name of a variable, or how names begin, with ``*`` after it."""

Variable = Annotated[str, msgspec.Meta(pattern=r"^[^=\0]+$")]
Text = Annotated[str, msgspec.Meta(pattern=r"^[^\0]*$")]

Inside = Annotated[str, msgspec.Meta(pattern=r"^/[^\0]*[^/\0][^\0]*$")]
"""A whole path, as the job sees it, and not the root."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the job file: unknown keys are refused."""


class JobTable(_Table, frozen=True, kw_only=True):
    """``[job]``: the training command."""

    name: Name
    """Names the job in events, traces and reports."""
    command: Annotated[list[str], msgspec.Meta(min_length=1)]
    """The training command, as run in the container."""
    gpus: Annotated[int, msgspec.Meta(ge=0)] | Literal["all"] | list[str] = 0
    """GPUs this node holds while it starts, for the GPU-hours lost; or which ones: ``all`` that this job may use, or
    names (see `bootseer.image.cdi`)."""
    devices: list[str] = []
    """Further devices, ``vendor.com/class=name`` each."""
    env: dict[Variable, Text] = {}
    """Environment variables of the set-up and training commands."""
    pass_: list[Passed] = msgspec.field(name="pass", default_factory=list)
    """Names of variables of the start's own environment that these commands get, too. The values are in no record."""
    cwd: str = ""
    """Their working directory; empty: the image's."""
    auto: bool = False
    """Whether Python programs of the training command record their own start, as `bootseer.profile.auto` says."""
    stop_grace: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)] = 0.0
    """Seconds after SIGTERM or SIGINT until a command that handles them is killed; 0: it may take its time."""


class ImageTable(_Table, frozen=True, kw_only=True):
    """``[image]``: the container image."""

    ref: str
    """``host[:port]/name[:tag|@digest]``, ``oci:DIR[:name]``, ``docker-archive:FILE[:name]`` or
    ``oci-archive:FILE[:name]``."""
    enabled: bool = True
    """True: lazy mount with hot-block prefetch. False: pulled and unpacked whole."""
    verify_key: str = ""
    """Public keys (a PEM file), one of which must have signed the image's conversion. Empty: that of the settings."""
    require_signature: bool = False
    """True: refuse the image when neither names a key."""
    convert: bool = False
    """True: convert the image when it is not converted; one node of those that start together does."""


class EnvTable(_Table, frozen=True, kw_only=True):
    """``[env]``: the set-up command and what it fills."""

    command: Annotated[list[str], msgspec.Meta(min_length=1)]
    targets: Annotated[list[str], msgspec.Meta(min_length=1)]
    """Folders (as the job sees them) whose content after the command is the snapshot."""
    key_files: list[str] = []
    """Files (as the job sees them) whose content decides whether a snapshot fits."""
    key_env: list[str] = []
    """Variables of ``[job] env`` whose values do."""
    salt: str = ""
    max_age: str = ""
    """Oldest snapshot to accept, such as ``7d``; for set-up commands that do not pin versions."""
    wait: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)] = 1800.0
    """Most seconds to wait for another node that runs the command; 0: do not."""
    frozen: bool = False
    """True: never run the command; without a snapshot that fits the start fails."""
    check: list[str] = []
    """Command that tries the result after a restore and before a publication; empty: nothing does."""
    enabled: bool = True
    """False: run the command on this node, as today."""


class CachesTable(_Table, frozen=True, kw_only=True):
    """``[caches]``: what programs compile and fetch, handed on from start to start."""

    kinds: list[str] | Literal["auto"]
    """Of ``inductor``, ``triton``, ``jax``, ``cuda`` and ``torch-extensions``, which the training command fills, and of
    ``pip`` and ``uv``, which the set-up command does; or ``auto``, all of these."""
    salt: str = ""
    """Any text; starts with another one have caches of their own."""
    most_bytes: Annotated[int, msgspec.Meta(ge=0)] = 4 << 30
    """What a generation holds at most; what was not used for longest goes."""
    most_files: Annotated[int, msgspec.Meta(ge=0)] = 50_000
    generations: Annotated[int, msgspec.Meta(ge=1)] = 20
    """So many generations an entry stays that no start uses."""
    enabled: bool = True
    """False: programs use what they have."""


class CheckpointTable(_Table, frozen=True, kw_only=True):
    """``[checkpoint]``: where the training command finds what it resumes from."""

    url: str
    """Striped folder in a store, such as ``hdfs://namenode:8020/job/checkpoint``."""
    path: Inside
    """Where the container sees it."""
    latest: bool = False
    """True: ``url`` is the folder that the job saves its checkpoints in, and the newest complete one is meant. While
    there is none, as at the first start, the container sees an empty folder."""
    enabled: bool = True
    """True: striped mount; what earlier starts read is prefetched. False: copy it all first."""


class MountTable(_Table, frozen=True, kw_only=True):
    """``[[mounts]]``: a host folder or file the container sees."""

    source: str
    target: Inside
    readonly: bool = True


class Job(_Table, frozen=True, kw_only=True):
    """A whole job file."""

    job: JobTable
    image: ImageTable
    env: EnvTable | None = None
    caches: CachesTable | None = None
    checkpoint: CheckpointTable | None = None
    mounts: list[MountTable] = []

    def __post_init__(self) -> None:
        for name in self.env.key_env if self.env else ():
            if self.passes(name):
                raise ValueError(f"[env] key_env names {name}, which [job] pass passes: its value is in no record")
        for path in self.env.targets if self.env else ():
            check_plain(path)
        if self.env and self.env.max_age:
            parse_age(self.env.max_age)
        if self.caches:
            cachekinds.chosen(self.caches.kinds, "compile")

    def passes(self, name: str) -> bool:
        """Whether the job is to get the variable ``name`` from the environment of its start."""
        names = self.job.pass_
        return name not in self.job.env and any(
            name.startswith(one[:-1]) if one.endswith("*") else name == one for one in names
        )

    def without(self, techniques: set[str]) -> Job:
        """The same job without the named techniques (of `TECHNIQUES`)."""
        replaced = {
            name: msgspec.structs.replace(table, enabled=False)
            for name in techniques
            if (table := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(self, **replaced)


TECHNIQUES = ("image", "env", "caches", "checkpoint")


def load(path: Path) -> tuple[Job, int]:
    """A job file, and the user whose file it is. Raises `NotFoundError`, or `ConfigError` that names the bad key."""
    try:
        read, state = document_and_owner(path)
        text, owner = read.decode(), state.st_uid
    except FileNotFoundError:
        raise NotFoundError(f"no job file {path}") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read job file {path}: {exc}") from None
    try:
        return msgspec.convert(loaded(tomllib.loads, text), known(Job)), owner
    except msgspec.ValidationError as exc:
        raise ConfigError(
            f"job file {path}: {in_words(exc)}", hint="docs/reference/job-file.md lists every key"
        ) from None
    except ConfigError as exc:
        raise ConfigError(f"job file {path}: {exc.message}", hint=exc.hint) from None
    except ValueError as exc:
        raise ConfigError(f"job file {path} is not TOML: {exc}") from None
