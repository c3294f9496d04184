"""References: which objects of a store are needed, and by what: records of images, manifests of environments, trees
that were published by themselves, notes of use. What cannot be read for certain is an error: nobody may conclude that
what it refers to is not needed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from bootseer.blocks.metadata import fetch
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.manifest import MAX_MANIFEST, TreeManifest, tree_key
from bootseer.env import manifest
from bootseer.errors import DataError, NotFoundError, NotWritableError
from bootseer.image import record
from bootseer.objects import ObjectInfo, Store, uses, withdrawn

log = logging.getLogger(__name__)

_SNAPSHOT = re.compile(rf"{manifest.FOLDER}/([0-9a-f]{{64}}/[0-9a-f]{{64}})\.json")
_INDEX = re.compile(r"env/index/[0-9a-f]{64}/[0-9]{12}-[0-9a-f]{64}-[0-9a-f]{64}")
_PROFILE = re.compile(r"profiles/(?:owned/)?([0-9a-f]{64})/")
_AHEAD = 86_400.0
"""A note that is so much younger than the store says that it is now was given its time by hand."""

Kind = Literal["image", "environment", "tree", "use"]


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """What needs a tree. ``made`` and ``used``: when, in seconds since 1970; 0: not known."""

    kind: Kind
    name: str
    tree: str
    keys: list[str] = []
    """What else it needs, itself included."""
    made: float = 0.0
    used: float = 0.0


class Look:
    """A look at the references of a store, which may be taken again: what names its content is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._trees: dict[str, list[str]] = {}

    def roots(self, objects: Mapping[str, ObjectInfo], began: float, ended: float) -> list[Root]:
        """What needs trees. ``began`` and ``ended``: when ``objects`` were listed, which may have taken days. Raises
        `DataError` for a record or manifest that may refer to anything, `UnavailableError`."""
        used, held = self._uses(objects, began, ended)
        found = [*self._images(objects, used), *self._environments(objects, used)]
        for key, info in objects.items():
            folder, _, tree = key.partition("/")
            if folder == uses.PUBLISHED and hashing.is_hexdigest(tree):
                at = max(info.mtime, used.get(tree, 0.0))
                found.append(Root(kind="tree", name=tree[:12], tree=tree, made=info.mtime, used=at))
        named = {root.tree for root in found}
        for tree, at in held.items():
            if tree not in named and tree_key(tree) in objects and self._is_whole(tree):
                found.append(Root(kind="use", name=tree[:12], tree=tree, used=at))
        return found

    def _is_whole(self, tree: str) -> bool:
        """Anybody may note a use: a tree that nobody can read is not kept for one, and stops nothing."""
        try:
            return bool(self.tree(tree))
        except (DataError, NotWritableError) as exc:
            log.warning("a note of use of tree %s in store %s does not count: %s", tree[:12], self._store.shown, exc)
            return False

    def _images(self, objects: Iterable[str], used: Mapping[str, float]) -> Iterator[Root]:
        for key in objects:
            if key.startswith(f"{record.FOLDER}/") and (raw := self._get(key, record.MAX_STORED)) is not None:
                found = record.decode(raw, f"{key} in store {self._store.shown}")
                at, tree = float(found.converted), found.tree
                yield Root(kind="image", name=found.reference, tree=tree, keys=[key], made=at, used=used.get(tree, at))

    def _environments(self, objects: Iterable[str], used: Mapping[str, float]) -> Iterator[Root]:
        for key in objects:
            if (named := _SNAPSHOT.fullmatch(key)) and (raw := self._get(key, manifest.MAX_STORED)) is not None:
                found = manifest.decode(raw, named[1])
                keys = [key, manifest.index_key(found), manifest.inventory_key(found.inventory)]
                at = max(found.created, used.get(found.tree, 0.0))
                yield Root(kind="environment", name=found.name, tree=found.tree, keys=keys, made=found.created, used=at)

    def _uses(
        self, objects: Mapping[str, ObjectInfo], began: float, ended: float
    ) -> tuple[dict[str, float], dict[str, float]]:
        """When each tree was used last, and the same of those that are held by their notes."""
        used, held = dict[str, float](), dict[str, float]()
        for key, info in objects.items():
            if not (tree := uses.tree_of(key)):
                continue
            if info.mtime > ended + _AHEAD:
                log.warning("%s in store %s has a time to come and does not count", key, self._store.shown)
                continue
            used[tree] = max(info.mtime, used.get(tree, 0.0))
            if began - used[tree] < uses.LIFE:
                held[tree] = used[tree]
        return used, held

    def _get(self, key: str, most: int) -> bytes | None:
        try:
            return self._store.get(key, most=most)
        except NotFoundError:  # removed in this moment
            return None

    def tree(self, digest: str) -> list[str]:
        """The keys of a tree: manifest, metadata, map, packs. None of them when its manifest is missing. Raises
        `DataError` when it is damaged."""
        if digest not in self._trees:
            key = tree_key(digest)
            if (raw := self._get(key, MAX_MANIFEST)) is None:
                log.warning("tree %s is missing in store %s", digest[:12], self._store.shown)
                return [key]
            found = TreeManifest.decode(raw, digest)
            try:
                packs = BlockMap.packs_of(fetch(self._store, found.map))
            except NotFoundError as exc:  # nodes that have the map may read its packs
                raise DataError(
                    f"tree {digest[:12]} is not whole: {exc.message}",
                    hint="convert its image with --repair, or remove it",
                ) from None
            self._trees[digest] = [key, *(ref.key for ref in (found.meta_stored, found.map, *packs))]
        return self._trees[digest]

    def needed(self, objects: Mapping[str, ObjectInfo], roots: Iterable[Root]) -> set[str]:
        """The keys that ``roots`` need, and of ``objects`` all that are not known to be of a tree or an environment."""
        trees, keys = set[str](), set[str]()
        for root in roots:
            trees.add(root.tree)
            try:
                keys.update(root.keys, self.tree(root.tree))
            except DataError as exc:
                raise DataError(f"{root.kind} {root.name}: {exc.message}", hint=exc.hint) from None
        for key in objects:
            if key.startswith("profiles/"):
                named = _PROFILE.match(key)
                spared = named is None or named[1] in trees
            else:
                spared = not (withdrawn.may_go(key) or _INDEX.fullmatch(key))
            if spared:
                keys.add(key)
        return keys
