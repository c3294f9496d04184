"""The gathering: the process that makes the next generation of a cache beside the job (`generation.Held.capture`).

Every entry that is on this node, and every one of the newest generation that is not, but for those that nobody has used
for long, and those beyond the limits. Where all that is here is in that generation already, nothing is written. What
the job changes meanwhile is looked at again; what it is just writing waits for the next time."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from bootseer import faults
from bootseer.blocks import tree
from bootseer.blocks.publish.dedup import KnownBlocks
from bootseer.blocks.publish.tree import TreeWriter
from bootseer.chunks.blockmap import DEFAULT_BLOCK
from bootseer.chunks.manifest import TreeRef
from bootseer.env import cachekinds, generation, layer, manifest, packages, quarantine, scan, snapshots
from bootseer.env.contents import Contents, File
from bootseer.env.generation import USED, Gather
from bootseer.env.inventory import Entry, sort_key
from bootseer.env.layer import Item
from bootseer.env.publish import Made, publish
from bootseer.env.publisher import entered
from bootseer.errors import BootseerError, DataError, NotFoundError
from bootseer.kernel import beneath
from bootseer.kernel.removal import discard_tree
from bootseer.objects import Store, open_store, signature

log = logging.getLogger(__name__)

_FRESH = 2.0
"""Seconds without a change before a file counts as written."""
_TRIES = 5
_MANY, _PAUSE = 20, 600
"""After so many generations there is one in so many seconds: some programs name entries anew at each start."""
_LITTLE = 20
"""Less than this part more of packages is not worth reading, and so fetching, all that are there."""
_PACK = 16 << 20


def gather(told: Gather) -> tuple[bool, str]:
    """(published, why not). Raises `BootseerError`, `OSError` when it could not be."""
    config = told.config
    if not config.sign_key and (config.verify_key or config.require_signature):
        return False, "not published: generations must be signed here, and no sign_key is set"
    store = open_store(told.store_url)
    bad = set[str]()
    for number in range(_TRIES):
        work = Path(tempfile.mkdtemp(prefix="publication-", dir=told.work))
        try:
            union = _Union(told, store, work, bad)
            return union.publish()
        except (_LateError, DataError, NotFoundError) as exc:
            if number == _TRIES - 1:
                raise
            log.info("%s; once more", exc)
            if number and union.last and not isinstance(exc, _LateError):
                log.warning("%s; what is in generation %s is not handed on", exc, union.last.shown)
                bad.add(union.last.name)
            time.sleep(_FRESH)
        finally:
            discard_tree(work)
    raise AssertionError


class _LateError(BootseerError):
    """Another node made the generation of this number."""


class _Union:
    def __init__(self, told: Gather, store: Store, work: Path, bad: Collection[str]) -> None:
        """``bad``: names of generations that could not be read."""
        self._told, self._store, self._work, self._cache = told, store, work, told.cache
        self._document = told.cache.document
        cache_dir = Path(told.config.cache_dir)
        found = [
            one
            for one in generation.generations(store, self._document.key, told.config)
            if one.name not in bad and not quarantine.reason(cache_dir, quarantine.mark_of(one))
        ]
        self._older = found[1:]
        self.last = found[0] if found else None
        self._number = (generation.number_of(self.last) if self.last else 0) + 1
        taken = set(snapshots.names(store, self._document.key))  # also by damaged ones
        while f"{self._document.key}/{generation.named(self._number).name}" in taken:
            self._number += 1
        self._listed: dict[str, Entry] = {}

    def publish(self) -> tuple[bool, str]:
        if self.last:
            listed = snapshots.entries(self._store, self.last)
            self._listed = {one.inner: one for one in listed if one.kind in "fh" and cachekinds.is_entry(one.inner)}
        view, last, anew = Path(self._told.view), self._work / "last", self._work / "anew"
        here = dict(scan.walk(view / "0", skip=scan.UNREADABLE))
        files = {path: status for path, status in here.items() if self._is_whole(path, status)}
        if packed := self._cache.group == "packages":
            unknown = {path: status for path, status in files.items() if not _same(self._listed.get(path), status)}
            public = packages.public(view / "0", unknown, anew / "0")
            files = {path: status for path, status in files.items() if path in public or path not in unknown}
        changed = {path for path in self._told.changed if not _same(self._listed.get(path), files.get(path))}
        own = {path for path in files if path not in self._listed or (path in changed and not packed)}
        if not own:
            return False, generation.NOTHING
        if self.last and self._number > _MANY and time.time() - self.last.created < _PAUSE:
            return False, f"not published: generation {self._number - 1} is younger than {_PAUSE} s"
        if packed and self._is_little(own, files):
            return False, "what is new is little beside what is there"
        same = {path for path, one in self._listed.items() if (packed and path in files) or _same(one, files.get(path))}
        others = self._listed.keys() - own - same
        used = self._used(own)
        kept = self._kept(used, {path: self._size(path, files) for path in used})
        if others & kept:
            assert self.last
            tree.extract(self._store, self.last.tree, last, most=2 * self._cache.most_bytes, seen=False)
        places = {path: last if path in others else view for path in kept}
        places |= {path: anew for path in kept - others if (anew / "0" / path).exists()}
        for path in kept:
            for above in scan.above(path):
                places.setdefault(above, view if stat.S_ISDIR(_mode(here, above)) else last)
        faults.point("env.gather.before-build")
        entries, ref = self._tree(places, used)
        if own.isdisjoint(one.inner for one in entries):
            return False, generation.NOTHING

        def seal(beside: Callable[[], None]) -> TreeRef:
            beside()
            return ref

        seconds = (self.last.seconds if self.last else 0.0) or self._told.seconds
        made = Made(generation.named(self._number), seal, entries, [""], [""], seconds)
        faults.point("env.gather.before-manifest")
        if not publish(self._store, self._document, made, None, lambda: None, self._told.config.sign_key):
            raise _LateError(f"another node made generation {self._number}")
        log.info("generation %d: %d entries, %d new; %d went", self._number, len(kept), len(own), len(used) - len(kept))
        self._drop()
        return True, ""

    def _is_whole(self, path: str, status: os.stat_result) -> bool:
        written = stat.S_ISREG(status.st_mode) and (self._told.last or time.time() - status.st_ctime > _FRESH)
        return cachekinds.is_entry(path) and (written or (path in self._listed and stat.S_ISREG(status.st_mode)))

    def _is_little(self, own: set[str], files: Mapping[str, os.stat_result]) -> bool:
        """Whether less is new than it is worth to read all for that: no wheel was built, and little was fetched."""
        new, old = sum(files[path].st_size for path in own), sum(one.size for one in self._listed.values())
        return _LITTLE * new < old and not any(path.endswith(".whl") for path in own)

    def _used(self, own: set[str]) -> dict[str, int]:
        """When each entry was last used, but for those that are to go because that is long ago."""
        used = {path: _number(one) or self._number - 1 for path, one in self._listed.items()}
        used |= dict.fromkeys(own | (set(self._told.used) & used.keys()), self._number)
        return {path: last for path, last in used.items() if self._number - last <= self._cache.generations}

    def _size(self, path: str, files: Mapping[str, os.stat_result]) -> int:
        return files[path].st_size if path in files else self._listed[path].size

    def _kept(self, used: Mapping[str, int], sizes: Mapping[str, int]) -> set[str]:
        """What the limits allow, the last used first."""
        units: dict[str, list[str]] = {}
        for path in used:
            units.setdefault(cachekinds.unit_of(path), []).append(path)
        whole = {unit: sum(sizes[path] for path in paths) for unit, paths in units.items()}
        kept, gone, left = set[str](), list[str](), self._cache.most_bytes
        for unit in sorted(units, key=lambda unit: (-max(used[path] for path in units[unit]), whole[unit], unit)):
            if whole[unit] > left or len(kept) + len(units[unit]) > self._cache.most_files:
                gone.append(unit)
                continue
            left -= whole[unit]
            kept.update(units[unit])
        if gone:
            limits = self._cache.most_bytes, self._cache.most_files
            log.warning("beyond the limits, %d bytes and %d files, %d go, such as %s", *limits, len(gone), gone[0])
        return kept

    def _tree(self, places: Mapping[str, Path], used: Mapping[str, int]) -> tuple[list[Entry], tree.TreeRef]:
        keys = signature.trusted_keys(self._told.config)
        trees = [self.last.tree] if self.last else []
        trees += [one for one in snapshots.newest_trees(self._store, self._document, keys) if one not in trees]
        known = KnownBlocks.of_trees(self._store, trees, DEFAULT_BLOCK)
        with contextlib.ExitStack() as stack:
            roots = {root: stack.enter_context(beneath.folder(root)) for root in set(places.values())}
            writer = stack.enter_context(TreeWriter(self._store, self._work, known=known, pack_limit=_PACK))
            contents, secrets = Contents(writer.packs), list[tuple[str, str]]()
            while True:
                found = [self._item(path, root, roots[root]) for path, root in places.items()]
                items = sorted((item for item in found if item), key=lambda item: sort_key(item.path))
                first = layer.firsts(items)
                files = [File(roots[item.base], item.path, item.status) for item in first.values()]
                if not (secrets := contents.finish(files)):
                    break
                for path, what in secrets:
                    log.warning("%s is no part of the cache: %s in it", path, what)
                gone = {cachekinds.unit_of(path) for path, _ in secrets}
                places = {path: root for path, root in places.items() if cachekinds.unit_of(path) not in gone}
            faults.point("env.gather.before-tree")
            entries = layer.entries_of(items, first, contents.digest)
            ref = writer.seal(contents.seal(items, entries), contents.dead())
        notes = {path: {USED: str(number).encode()} for path, number in used.items()}
        notes[""] = {generation.OF: self._document.key.encode()}
        return [msgspec.structs.replace(one, xattrs=notes.get(one.inner, one.xattrs)) for one in entries], ref

    def _item(self, path: str, root: Path, fd: int) -> Item | None:
        """None for what went away meanwhile."""
        name = f"0/{path}" if path else "0"
        try:
            with beneath.parent(fd, name) as (folder, inner):
                found = os.stat(inner, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return Item(name, root, _owned(found, self._cache.owner), {})

    def _drop(self) -> None:
        """The generations before the last one: it may just be restored elsewhere."""
        try:
            for one in self._older:
                self._store.delete(manifest.manifest_key(one.name))
                self._store.delete(manifest.index_key(one))
        except BootseerError as exc:  # the new one is published all the same
            log.warning("older generations of the cache stay in the store: %s", exc)


def _mode(here: Mapping[str, os.stat_result], path: str) -> int:
    return here[path].st_mode if path in here else 0 if path else stat.S_IFDIR


def _number(one: Entry) -> int:
    text = one.xattrs.get(USED, b"")
    return int(text) if text.isdigit() and len(text) <= 12 else 0


def _same(one: Entry | None, status: os.stat_result | None) -> bool:
    return bool(one and status and (one.size, one.mtime_ns) == (status.st_size, status.st_mtime_ns))


def _owned(found: os.stat_result, owner: tuple[int, int]) -> os.stat_result:
    """As it is, but the owner's, and without rights."""
    rows = list(found[:10])
    rows[0] = found.st_mode & ~0o7022 | (0o700 if stat.S_ISDIR(found.st_mode) else 0o600)
    rows[4:6] = owner
    return os.stat_result(rows, {name: getattr(found, name) for name in dir(found) if name.startswith("st_")})


def main() -> int:
    messages, answer = entered("bootseer-cache")
    told: Gather = pickle.load(messages)
    os.read(0, 1)
    try:
        done, why = gather(told)
    except (BootseerError, OSError) as exc:
        done, why = False, f"not published: {exc}"
    log.info("cache %s: %s", told.cache.document.key[:12], "published" if done else why)
    with contextlib.suppress(OSError):  # nobody waits for it
        os.write(answer, b"published" if done else why.encode(errors="replace"))
    if told.last:
        with contextlib.suppress(BootseerError, OSError):  # the next start on the node does it
            generation.give_up(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
