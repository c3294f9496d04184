"""The collection: deletes what nothing in a store needs, in two steps with a grace time between.

A first run notes since when an object is not needed (``collection/condemned``). A run after the grace time withdraws it
(`bootseer.objects.withdrawn`), looks once more at all that may need it, and then puts it back or deletes it. What a run
that was killed has withdrawn, the next one goes on with. `bootseer.objects.uses.hold` is the other side: a publication
notes the use of its tree, then sees whether all is in its place. Neither relies on the other's clock or speed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

import msgspec
import zstandard

from bootseer import faults
from bootseer.chunks.manifest import tree_key
from bootseer.errors import DataError, NotFoundError, UnsupportedError
from bootseer.objects import ObjectInfo, Store, lease, uses, withdrawn
from bootseer.upkeep.references import Look, Root
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

GRACE = 3 * 86_400.0
"""Seconds between condemning and deleting, for starts that have read a record and not noted their use yet."""
SETTLE = 130.0
"""Seconds for what others have just written to be seen from here, and what is withdrawn to be seen by them: a client of
NFS may believe for a minute what it saw last, of files and of folders."""
_MOST = 500_000
"""Objects that one run withdraws, into one folder."""
_CONDEMNED = "collection/condemned"
_CLOCK = "collection/clock"
_LEASE = re.compile(rf"{lease.FOLDER}/.+/(?:0|[1-9][0-9]{{0,8}})", re.DOTALL)
_LEASES = 30 * 86_400.0
"""A lease that nobody has written to for so long is of no start."""
_MAX_STORED = 64 << 20
_MAX_UNPACKED = 512 << 20
_Key = Annotated[str, msgspec.Meta(min_length=len("blobs/aa/") + 64)]
"""What can be condemned has no shorter one: shorter ones would be many more, and take many times the memory."""


def now(store: Store, dry_run: bool) -> float:
    """By the clock of the store, which all its dates are of; in a dry run by that of this machine."""
    if dry_run:
        return time.time()
    store.put(_CLOCK, b"", overwrite=True)
    return store.stat(_CLOCK).mtime


class Sum(msgspec.Struct, kw_only=True):
    """Objects and their bytes."""

    objects: int = 0
    bytes: int = 0


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did, or would do: ``removed`` by kind (first part of the key), what is ``condemned`` and goes
    after the grace time, and what is kept by notes of use alone, ``held``."""

    removed: dict[str, Sum]
    condemned: Sum
    held: Sum


class _Collection:
    def __init__(self, store: Store, grace: float, settle: float, dry_run: bool) -> None:
        self._store, self._grace, self._settle, self._dry = store, grace, settle, dry_run
        self._look = Look(store)
        self._removed: dict[str, Sum] = {}

    def _now(self) -> float:
        return now(self._store, self._dry)

    def run(self) -> Collected:
        self._store.check_listed()
        now, left = self._now(), self._withdrawn()
        objects = {info.key: info for info in self._store.list("")}
        roots = self._look.roots(objects | left, now, self._now())
        needed = self._look.needed(objects, roots)
        before = self._before()
        since = {
            key: min(now, max(info.mtime, before.get(key, now)))
            for key, info in objects.items()
            if key not in needed and now - info.mtime >= self._grace
        }
        # manifests first: a tree that is there is whole
        due = sorted((key for key, at in since.items() if now - at >= self._grace), key=_manifests_first)[:_MOST]
        if self._dry:
            for key in due:
                self._count(objects[key])
        elif due or left:
            self._delete(objects, due)
        if not self._dry and self._now() - now < self._grace / 2:  # who stood still knows nothing any more
            self._save({key: at for key, at in since.items() if key not in due})
            self._tidy(objects, now)
        others = self._look.needed({}, [root for root in roots if root.kind != "use"])
        held = self._look.needed({}, [root for root in roots if root.kind == "use"]) - others
        return Collected(
            removed=self._removed,
            condemned=total(objects[key] for key in since.keys() - set(due)),
            held=total(objects[key] for key in held if key in objects),
        )

    def _before(self) -> dict[str, float]:
        try:
            raw = self._store.get(_CONDEMNED, most=_MAX_STORED)
            if not 0 <= zstandard.frame_content_size(raw) <= _MAX_UNPACKED:
                raise ValueError("absurd size")
            return json_as(zstandard.ZstdDecompressor().decompress(raw), dict[_Key, float])
        except NotFoundError:
            return {}
        except (DataError, ValueError, zstandard.ZstdError) as exc:
            log.warning("%s in store %s is written anew, it is not understood: %s", _CONDEMNED, self._store.shown, exc)
            return {}

    def _save(self, since: dict[str, float]) -> None:
        raw = zstandard.ZstdCompressor(level=3).compress(msgspec.json.encode(since))
        self._store.put(_CONDEMNED, raw, overwrite=True)

    def _withdrawn(self) -> dict[str, ObjectInfo]:
        """By key, what is withdrawn: its size, date and place."""
        places = ((withdrawn.key_at(info.key), info) for info in self._store.list(withdrawn.FOLDER))
        return {key: info for key, info in places if key}

    def _delete(self, objects: Mapping[str, ObjectInfo], due: Collection[str]) -> None:
        """Withdraw what is ``due``, and delete all that is withdrawn or put it back."""
        self._store.withdraw((key for key in due if withdrawn.may_go(key)), os.urandom(8).hex())
        faults.point("upkeep.withdrawn")
        time.sleep(self._settle)
        # in this order: what was withdrawn is looked up first, then who may need it
        left, now = self._withdrawn(), self._now()
        self._store.check_listed()
        seen = {info.key: info for info in self._store.list("")}
        both = seen | {key: info for key, info in left.items() if key not in seen}
        needed = self._look.needed(both, self._look.roots(both, now, self._now()))
        for key in left.keys() & needed - seen.keys():  # first: a deletion may be refused
            if not self._store.put_back(key):
                log.info("%s in store %s went away while it was put back", key, self._store.shown)
        for key, info in left.items():
            faults.point("upkeep.delete")
            if key in seen and now - info.mtime < uses.LIFE:
                # an object store copies and then deletes: the collection that withdrew it may still be at that
                continue
            if key in seen or key not in needed:
                self._store.delete(info.key)
                self._count(msgspec.structs.replace(info, key=key))
        for key in due:  # what makes a start faster only
            if not withdrawn.may_go(key) and key not in needed and key in seen:
                self._remove(objects[key])

    def _tidy(self, objects: Mapping[str, ObjectInfo], now: float) -> None:
        """Delete notes and leases whose time is over; the newest note of a tree stays, for its last use."""
        newest: dict[str, float] = {}
        for key, info in objects.items():
            if (tree := uses.tree_of(key)) and tree_key(tree) in objects:
                newest[tree] = max(info.mtime, newest.get(tree, 0.0))
        for key, info in objects.items():
            age = now - info.mtime
            if (_LEASE.fullmatch(key) and age > _LEASES) or (
                (tree := uses.tree_of(key)) and age > uses.LIFE and info.mtime != newest.get(tree)
            ):
                self._remove(info)

    def _remove(self, info: ObjectInfo) -> None:
        """Unless it was written again."""
        with contextlib.suppress(NotFoundError):
            # some stores round in lists; what is written again is younger by days
            if abs(self._store.stat(info.key).mtime - info.mtime) < 1:
                self._store.delete(info.key)
                self._count(info)

    def _count(self, info: ObjectInfo) -> None:
        row = self._removed.setdefault(info.key.partition("/")[0], Sum())
        row.objects += 1
        row.bytes += info.size


def _manifests_first(key: str) -> tuple[bool, str]:
    return not key.startswith("trees/"), key


def total(infos: Iterable[ObjectInfo]) -> Sum:
    sizes = [info.size for info in infos]
    return Sum(objects=len(sizes), bytes=sum(sizes))


def collect(store: Store, *, grace: float = GRACE, dry_run: bool = False, settle: float = SETTLE) -> Collected:
    """Condemn what nothing in ``store`` needs, delete what has been condemned for ``grace`` seconds and is still not
    needed. ``settle``: seconds to wait before, where there is anything to delete. Raises `DataError`, and has deleted
    nothing, when a record or a tree that is needed cannot be understood, `UnsupportedError` for a registry,
    `NotWritableError`, `UnavailableError`."""
    if not store.dated:
        raise UnsupportedError(
            f"store {store.shown} does not say when its objects were written: nothing is collected there",
            hint="a registry gives space back by its own garbage collection, of tags that its operator removes",
        )
    return _Collection(store, grace, settle, dry_run).run()


def unused(store: Store, age: float, *, dry_run: bool = False) -> list[Root]:
    """The environments of ``store`` that nobody has used for ``age`` seconds, the longest unused first."""
    store.check_listed()
    before = now(store, dry_run) - age
    objects = {info.key: info for folder in ("env/snapshots", uses.FOLDER) for info in store.list(folder)}
    found = Look(store).roots(objects, time.time(), time.time())
    return sorted(
        (root for root in found if root.kind == "environment" and root.used < before), key=lambda root: root.used
    )
