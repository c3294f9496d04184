"""What the snapshotter knows: snapshots in SQLite, and a folder for each that has files of its own.

``ROOT/state.db`` is the truth. ``ROOT/snapshots/<random>/`` has ``fs`` and ``work`` of one snapshot; the name is never
used again, so that nothing that deletes a folder can meet another snapshot's. A *lazy* snapshot stands for a layer that
was not pulled: it is committed from the start and has no folder, unless its files had to be unpacked after all.
Removing a snapshot only forgets it; `collect` deletes the folders that nobody names. Concurrency: any thread; one lock
guards the database and the making of folders, and is never held while files of layers are read, written or deleted."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bootseer import faults
from bootseer.errors import BootseerError, DataError, FullError, NotFoundError, doing
from bootseer.kernel.mount import copy_root
from bootseer.kernel.removal import discard_tree
from bootseer.wiretypes import loaded

_SCHEMA = """
pragma journal_mode = wal;
pragma synchronous = full;
create table if not exists snapshot(
    id integer primary key autoincrement, name text not null unique, parent text not null, kind integer not null,
    labels text not null, created integer not null, updated integer not null, folder text not null,
    chain text not null, manifest text not null, image text not null, tree text not null);
create index if not exists snapshot_parent on snapshot(parent);
create table if not exists record(manifest text primary key, content blob not null);
pragma user_version = 1;
"""
_VERSION = 1
_COLUMNS = "name, parent, kind, labels, created, updated, folder, chain, manifest, image"


def _new_name() -> str:
    """Of a folder. It is short: the options of an overlay name those of all layers, and have to fit into one page."""
    return secrets.token_hex(8)


class Kind(enum.IntEnum):
    """What containerd calls the kinds of snapshots."""

    VIEW = 1
    ACTIVE = 2
    COMMITTED = 3


class MissingError(NotFoundError):
    """No such snapshot."""


class ExistsError(BootseerError):
    """A snapshot has that name."""


class StateError(BootseerError):
    """The snapshot, or its parent, is not one with which this can be done."""


class Layer(NamedTuple):
    """Which layer a lazy snapshot stands for."""

    chain: str
    """Its chain id: it names this layer and all below it."""
    manifest: str
    """Digest of the manifest of the converted image that it was pulled for."""
    image: str
    """The name of that image, as it was pulled."""


class Snapshot(NamedTuple):
    """One row. Times in nanoseconds since 1970."""

    id: int
    name: str
    parent: str
    """Name of the snapshot below; empty: none."""
    kind: Kind
    labels: dict[str, str]
    created: int
    updated: int
    folder: str
    """Name of its folder; empty: it has none."""
    layer: Layer | None
    """Set for a lazy one."""


class Snapshots:
    """The snapshots in ``root``, a private folder. One process writes at a time (see `server.serve`)."""

    def __init__(self, root: Path) -> None:
        """Raises `DataError` when the database is damaged or a newer version's."""
        self.root = root
        self._lock = threading.Lock()
        self._folders = root / "snapshots"
        try:
            with doing(f"use the folder {root}"):
                self._folders.mkdir(mode=0o700, exist_ok=True)
            self._db = sqlite3.connect(root / "state.db", check_same_thread=False, isolation_level=None)
            (version,) = self._db.execute("pragma user_version").fetchone()
            if version > _VERSION:
                raise DataError(f"{root}/state.db has version {version}", hint="a newer bootseer made it")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as exc:
            raise DataError(f"cannot use {root}/state.db: {exc}") from None

    def close(self) -> None:
        self._db.close()

    def _execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        """Raises `FullError` and `BootseerError` for what SQLite does."""
        try:
            return self._db.execute(statement, values)
        except sqlite3.OperationalError as exc:
            kind = FullError if exc.sqlite_errorcode == sqlite3.SQLITE_FULL else BootseerError
            raise kind(f"cannot use {self.root}/state.db: {exc}", hint="look at its disk") from None

    def create(self, name: str, parent: str, kind: Kind, labels: Mapping[str, str], like: Path | None) -> Snapshot:
        """A new snapshot with a folder, whose ``fs`` has owner and mode of the folder ``like``. Raises `ExistsError`,
        `MissingError` (no such parent), `StateError` (it is not committed)."""
        with self._lock:
            self._check_parent(name, parent)
            folder = self._folders / _new_name()
            with doing(f"make a snapshot in {self.root}"):
                folder.mkdir(mode=0o700)
                for part, mode in (("fs", 0o755), ("work", 0o711)):
                    (folder / part).mkdir()
                    (folder / part).chmod(mode)
                if like is not None:
                    copy_root(like, folder / "fs")
            faults.point("containerd.create.before-insert")
            self._insert(name, parent, kind, labels, folder.name, Layer("", "", ""))
            faults.point("containerd.create.inserted")
            return self._get(name)

    def create_lazy(self, name: str, parent: str, labels: Mapping[str, str], layer: Layer) -> Snapshot:
        """The committed snapshot that stands for ``layer`` on ``parent``: a new one, or the one that does already."""
        with self._lock:
            row = self._execute(
                "select name from snapshot where parent = ? and chain = ? and kind = ?",
                (parent, layer.chain, Kind.COMMITTED),
            ).fetchone()
            if row is None:
                self._check_parent(name, parent)
                self._insert(name, parent, Kind.COMMITTED, labels, "", layer)
                faults.point("containerd.lazy.inserted")
            return self._get(row[0] if row else name)

    def _check_parent(self, name: str, parent: str) -> None:
        if self._execute("select 1 from snapshot where name = ?", (name,)).fetchone():
            raise ExistsError(f"snapshot {name} exists")
        if parent and self._get(parent).kind != Kind.COMMITTED:
            raise StateError(f"snapshot {parent} is not committed, so nothing can be on top of it")

    def _insert(self, name: str, parent: str, kind: Kind, labels: Mapping[str, str], folder: str, layer: Layer) -> None:
        now = time.time_ns()
        values = (name, parent, kind, json.dumps(dict(labels)), now, now, folder, *layer, "")
        marks = ", ".join("?" * len(values))
        self._execute(f"insert into snapshot({_COLUMNS}, tree) values ({marks})", values)

    def get(self, name: str) -> Snapshot:
        """Raises `MissingError`."""
        with self._lock:
            return self._get(name)

    def _get(self, name: str) -> Snapshot:
        for found in self._select("where name = ?", name):
            return found
        raise MissingError(f"there is no snapshot {name}")

    def _select(self, where: str, *values: object) -> Iterator[Snapshot]:
        for row in self._execute(f"select id, {_COLUMNS} from snapshot {where}", values).fetchall():
            ident, name, parent, kind, labels, created, updated, folder, *layer = row
            lazy = Layer(*layer) if layer[0] else None
            yield Snapshot(ident, name, parent, Kind(kind), loaded(json.loads, labels), created, updated, folder, lazy)

    def listing(self) -> list[Snapshot]:
        with self._lock:
            return list(self._select(""))

    def below(self, name: str) -> list[Snapshot]:
        """The snapshot ``name`` and those below it, the nearest first, down to a lazy one, which has the files of all
        below it. Empty for no name. Raises `MissingError`."""
        found: list[Snapshot] = []
        with self._lock:
            while name and not (found and found[-1].layer):
                found.append(self._get(name))
                name = found[-1].parent
        return found

    def commit(self, key: str, name: str, labels: Mapping[str, str]) -> None:
        """The active snapshot ``key`` is from now on the committed ``name``, with more ``labels``. Raises
        `MissingError`, `StateError`, `ExistsError`."""
        with self._lock:
            found = self._get(key)
            if found.kind != Kind.ACTIVE:
                raise StateError(f"snapshot {key} is not active")
            if key != name and self._execute("select 1 from snapshot where name = ?", (name,)).fetchone():
                raise ExistsError(f"snapshot {name} exists")
            self._execute(
                "update snapshot set name = ?, kind = ?, labels = ?, updated = ? where id = ?",
                (name, Kind.COMMITTED, json.dumps(found.labels | dict(labels)), time.time_ns(), found.id),
            )
        faults.point("containerd.committed")

    def remove(self, key: str) -> None:
        """Forget it. Raises `MissingError`, `StateError` when others are on top of it."""
        with self._lock:
            found = self._get(key)
            if self._execute("select 1 from snapshot where parent = ?", (key,)).fetchone():
                raise StateError(f"snapshot {key} has others on top of it")
            self._execute("delete from snapshot where id = ?", (found.id,))
        faults.point("containerd.removed")

    def relabel(self, name: str, labels: Mapping[str, str], paths: Iterable[str]) -> Snapshot:
        """Replace all labels (``labels`` in ``paths``, or no path), or those of ``labels.NAME``, one that is empty by
        none. Raises `MissingError`, `StateError` for another path."""
        with self._lock:
            new = dict(self._get(name).labels)
            for path in list(paths) or ["labels"]:
                word, _, label = path.partition(".")
                if word != "labels":
                    raise StateError(f"{path} of a snapshot cannot be changed")
                if not label:
                    new = dict(labels)
                elif value := labels.get(label):
                    new[label] = value
                else:
                    new.pop(label, None)
            self._execute(
                "update snapshot set labels = ?, updated = ? where name = ?", (json.dumps(new), time.time_ns(), name)
            )
            return self._get(name)

    def files(self, snapshot: Snapshot) -> Path:
        """Where its own files are."""
        return self._folders / snapshot.folder / "fs"

    def work(self, snapshot: Snapshot) -> Path:
        """The working folder of an overlay over it."""
        return self._folders / snapshot.folder / "work"

    def adopt(self, snapshot: Snapshot, made: Path) -> Path:
        """The folder ``made``, beside those of snapshots, has the files of the lazy ``snapshot``; it is moved. Where
        they are now. Raises `MissingError` when the snapshot was removed meanwhile."""
        with self._lock:
            folder = self._folders / _new_name()
            self._get(snapshot.name)
            with doing(f"make a snapshot in {self.root}"):
                folder.mkdir(mode=0o700)
                made.rename(folder / "fs")
            faults.point("containerd.adopt.before-update")
            self._execute("update snapshot set folder = ? where id = ?", (folder.name, snapshot.id))
            return folder / "fs"

    def collect(self) -> None:
        """Delete the folders of forgotten snapshots, and forget the records of images that no snapshot is of."""
        with self._lock:
            known = {name for (name,) in self._execute("select folder from snapshot")}
            stale = [path for path in self._folders.iterdir() if path.name not in known]
            self._execute(
                "delete from record where manifest not in (select manifest from snapshot where manifest != '')"
            )
        for path in stale:
            faults.point("containerd.collect")
            discard_tree(path)

    def usage(self, snapshot: Snapshot) -> tuple[int, int]:
        """Bytes on the disk and inodes of its own files; of a lazy one nothing, its blocks are the node cache's."""
        seen: dict[tuple[int, int], int] = {}
        top = self.files(snapshot) if snapshot.folder else None
        for base, _, files in os.walk(top) if top else ():
            for name in (".", *files):
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(os.path.join(base, name))
                    seen[found.st_dev, found.st_ino] = found.st_blocks * 512
        return sum(seen.values()), len(seen)

    def record(self, manifest: str) -> bytes | None:
        """The stored form of the image record that was kept, or None."""
        with self._lock:
            row = self._execute("select content from record where manifest = ?", (manifest,)).fetchone()
        return bytes(row[0]) if row else None

    def keep_record(self, manifest: str, content: bytes) -> None:
        with self._lock:
            self._execute("insert or replace into record values (?, ?)", (manifest, content))

    def use_tree(self, snapshot: Snapshot, tree: str) -> None:
        """Note that the lazy ``snapshot`` needs the mounted ``tree``. Raises `MissingError` when it was removed."""
        with self._lock:
            if not self._execute("update snapshot set tree = ? where id = ?", (tree, snapshot.id)).rowcount:
                raise MissingError(f"there is no snapshot {snapshot.name}")

    def trees(self) -> set[str]:
        """The trees that snapshots need."""
        with self._lock:
            return {tree for (tree,) in self._execute("select distinct tree from snapshot where tree != ''")}
