"""The account of a store: bytes by kind and age, and what each image and environment takes."""

from __future__ import annotations

import time
from collections import Counter
from operator import attrgetter

import msgspec

from bootseer.errors import DataError
from bootseer.objects import Store
from bootseer.upkeep.references import Kind, Look

_MONTH = 30 * 86_400.0


class Amount(msgspec.Struct, kw_only=True):
    """``month``: the bytes of it that were written more than 30 days ago."""

    objects: int = 0
    bytes: int = 0
    month: int = 0


class Taker(msgspec.Struct, frozen=True, kw_only=True):
    """An image, an environment, or a tree in use that belongs to neither any more. Bytes: ``alone`` of objects that
    nothing else needs, ``all`` of all that it needs. ``made`` and ``used`` in seconds since 1970; 0: not known."""

    kind: Kind
    name: str
    alone: int
    all: int
    made: float
    used: float


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """``unneeded``: bytes that a collection would condemn or delete. ``why`` takers and ``unneeded`` are not known."""

    kinds: dict[str, Amount]
    takers: list[Taker] = []
    unneeded: int = 0
    why: str = ""


def take(store: Store) -> Account:
    """The account; takers with the most bytes alone first. Raises `UnavailableError` and kin."""
    objects = {info.key: info for info in store.list("")}
    now, kinds = time.time(), dict[str, Amount]()
    for key, info in objects.items():
        row = kinds.setdefault(key.partition("/")[0], Amount())
        row.objects += 1
        row.bytes += info.size
        row.month += info.size if info.mtime and now - info.mtime > _MONTH else 0
    look = Look(store)
    try:
        roots = look.roots(objects, now, now)
        wants = [{*root.keys, *look.tree(root.tree)} for root in roots]
        needed = look.needed(objects, roots)
    except DataError as exc:
        return Account(kinds=kinds, why=f"what images and environments take is not known: {exc}")
    shares = Counter(key for keys in wants for key in keys)
    takers = []
    for root, keys in zip(roots, wants, strict=True):
        there = [objects[key] for key in keys if key in objects]
        takers.append(
            Taker(
                kind=root.kind,
                name=root.name,
                alone=sum(info.size for info in there if shares[info.key] == 1),
                all=sum(info.size for info in there),
                made=root.made,
                used=root.used,
            )
        )
    takers.sort(key=attrgetter("alone"), reverse=True)
    unneeded = sum(info.size for key, info in objects.items() if key not in needed)
    return Account(kinds=kinds, takers=takers, unneeded=unneeded)
