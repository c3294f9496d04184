"""What a job asks for in its comment: ``sbatch --comment=bootseer=REF``, beside whatever else a site puts there."""

from __future__ import annotations

import re
from typing import NamedTuple

from bootseer.errors import ConfigError
from bootseer.oci import Reference, in_files

_KNOWN = ("bootseer", "bootseer.job")
_HINT = "write --comment=bootseer=HOST/NAME:TAG, and bootseer.job=NAME for a profile of its own"


class JobImage(NamedTuple):
    """The image to mount."""

    reference: str
    job: str
    """The profile to prefetch by and to record into; empty: the image's default one."""


def concerns_us(comment: str) -> bool:
    """Whether a word of ``comment`` is meant for bootseer, understood or not."""
    return bool(_words(comment))


def parse(comment: str) -> JobImage:
    """What `concerns_us` in ``comment``. Raises `ConfigError` with what to change."""
    found: dict[str, str] = {}
    for word in _words(comment):
        key, sign, value = word.partition("=")
        if key not in _KNOWN or not sign:
            raise ConfigError(f"{word!r} in the job's comment is not known", hint=_HINT)
        if key in found:
            raise ConfigError(f"the job's comment has {key}= twice", hint="leave one")
        found[key] = value
    if not found.get("bootseer"):
        raise ConfigError("the job's comment names no image", hint=_HINT)
    if in_files(found["bootseer"]):  # root would read files for a user who may not
        raise ConfigError(f"{found['bootseer']} is no image in a registry", hint=_HINT)
    Reference.parse(found["bootseer"])
    return JobImage(found["bootseer"], found.get("bootseer.job", ""))


def _words(comment: str) -> list[str]:
    return [word for word in re.split(r"[\s,;]+", comment) if word.startswith("bootseer")]
