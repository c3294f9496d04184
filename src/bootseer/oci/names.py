"""Which of the images in a layout or an archive a name means."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from bootseer.errors import ConfigError, NotFoundError
from bootseer.oci.reference import Reference

T = TypeVar("T")


def chosen(images: Iterable[tuple[Collection[str], T]], wanted: str, where: str) -> list[T]:
    """The images, each with its names, that ``wanted`` names: exactly, else by a name that means the same (``x:1`` is
    ``docker.io/library/x:1``), else by its tag alone; when it is empty, the only image or the one named ``latest``.
    Several are found only under one name: one for each platform. Raises `ConfigError` when there are others to choose
    from, `NotFoundError`."""
    rows = list(images)
    names = {name for has, _ in rows for name in has}
    if not wanted and 1 in (len({frozenset(has) for has, _ in rows}), len({image for _, image in rows})):
        return [image for _, image in rows]
    for told in (
        names & {wanted or "latest"},
        {name for name in names if _whole(name) == _whole(wanted)},
        {name for name in names if name.rpartition(":")[2] == wanted},
    ):
        found = [image for has, image in rows if told.intersection(has)]
        if len(found) > 1 and len(set(map(_whole, told))) > 1:
            raise several(where, told)
        if found:
            return found
    if rows and not wanted:
        raise several(where, names)
    hint = f"it has {', '.join(sorted(names)) or 'none with a name'}"
    raise NotFoundError(f"image {wanted or 'latest'} does not exist in {where}", hint=hint)


def several(where: str, names: Iterable[str]) -> ConfigError:
    known = ", ".join(sorted(names)) or "their digests: they have no names"
    return ConfigError(f"{where} holds several images", hint=f"name one of {known}")


def _whole(name: str) -> str:
    try:
        return str(Reference.parse(name))
    except ConfigError:
        return name
