"""Generations of a cache: snapshots that are united instead of guarded.

A set-up command makes the same at each start, so that its snapshot is there once. A cache grows: each generation holds
what the one before held, and what the starts since have added. It is a snapshot of the key of its cache, whose number
stands in the place of the observed inputs, so that of two nodes that make the same number at once one comes too late,
and makes the next. `gathering` makes them; here they are restored: as a writable overlay, where that is allowed, else
as files of the node's own folder."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from bootseer.blocks import tree
from bootseer.config import Config
from bootseer.env import cachekinds, lookup, manifest, overlay, quarantine, scan, snapshots
from bootseer.env import lock as locks
from bootseer.env.inputs import Observed
from bootseer.env.key import KeyDocument
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.publication import Publication
from bootseer.env.spec import Target, Technique
from bootseer.errors import BootseerError, DataError, FullError, NotFoundError, PrivilegeError, doing
from bootseer.folders import private_folder
from bootseer.kernel import background
from bootseer.kernel import mount as mounts
from bootseer.kernel.removal import discard_tree
from bootseer.objects import Store, open_store, signature
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

PROGRAM = background.program("bootseer.env.gathering")
_NUMBER = "/generation"
USED = "user.bootseer.used"
"""In the inventory, not in the tree: the number of the last generation whose makers used the entry."""
OF = "user.bootseer.cache"
"""The same of the folder itself: the key, so that no two caches have one inventory, which may go with a generation."""
NOTHING = "nothing is new"
"""Why a capture has published nothing, when all is there already."""
_KEPT = 8
"""Generations of a key that a start looks at; two are kept."""
_LOCK_SECONDS = 60.0
_END_SECONDS = 3.0
"""For processes that compile beside a program, and end after it."""
_LONGEST = 300
"""Characters that say why it is cold."""
_NOTE = 1 << 20
"""Bytes of a note that is looked at."""
_FREE = 1 << 30
"""Bytes that are free on the disk before a cache is kept there: programs end that cannot write to theirs."""


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """The caches of one group, in one folder. What decides whether a generation fits is all but the limits."""

    group: cachekinds.Group
    path: str
    """Where programs see it."""
    owner: tuple[int, int]
    """User and group whose files it holds: who runs the programs. Other users' starts have caches of their own."""
    tenant: str = ""
    """Of `Config.tenant`; the same holds for these."""
    facts: dict[str, str] = {}
    image: str = ""
    salt: str = ""
    most_bytes: int = 4 << 30
    most_files: int = 50_000
    generations: int = 20
    """So many generations an entry stays that no start uses."""

    @property
    def document(self) -> KeyDocument:
        return KeyDocument(
            targets=[self.path],
            command=["(cache)", self.group],
            env=dict(sorted(self.facts.items())),
            image=self.image,
            machine=os.uname().machine,
            tenant="{}:{} {}".format(*self.owner, self.tenant).rstrip(),
            salt=self.salt,
        )


class _Note(msgspec.Struct):
    child_paths: dict[str, str]


class Gather(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told that makes the next generation out of the folder ``view``."""

    cache: Cache
    view: str
    """The folder that has the cache as its ``0``."""
    work: str
    used: list[str]
    """Entries that its starts have used."""
    changed: list[str]
    """Entries that were there before, and are not what they were."""
    seconds: float
    last: bool
    store_url: str
    config: Config


def number_of(found: SnapshotManifest) -> int:
    """Of a generation. Raises `DataError` for another snapshot."""
    names = found.inputs.folders.get(_NUMBER, [])
    if len(names) != 1 or not names[0].isdecimal() or len(names[0]) > 12:
        raise DataError(f"snapshot {found.shown} is no generation of a cache")
    return int(names[0])


def named(number: int) -> Observed:
    """What makes generations of one key differ."""
    return Observed(folders={_NUMBER: [str(number)]})


def generations(store: Store, key: str, config: Config) -> list[SnapshotManifest]:
    """Those in the store, the newest first, that may be used here. Raises `UnavailableError`."""
    keys, found = signature.trusted_keys(config), []
    for name in snapshots.names(store, key)[: _KEPT * 4]:
        try:
            one = manifest.decode(store.get(manifest.manifest_key(name), most=manifest.MAX_STORED), name)
            manifest.check_signed(one, keys)
            found.append((number_of(one), one))
        except NotFoundError:
            continue
        except (DataError, signature.UnsignedError) as exc:
            log.warning("%s; that generation of the cache is not used", exc)
    return [one for _, one in sorted(found, key=lambda item: -item[0])]


class Held:
    """A cache on this node. ``said`` tells people how it began."""

    def __init__(self, cache: Cache, store_url: str, config: Config) -> None:
        self.cache, self.store_url, self.config = cache, store_url, config
        self.folder = Path(config.cache_dir).absolute() / "caches" / cache.document.key[:24] / "0"
        self.restored: SnapshotManifest | None = None
        self.said = "cold"
        self.group: overlay.Group | None = None
        self.joined = False
        """Others of this node began it, and capture what is added."""
        self._known: dict[str, tuple[int, int]] = {}
        self._captured: dict[str, tuple[int, int]] = {}
        self._before: dict[str, tuple[int, int]] = {}
        self._lock = -1

    @property
    def target(self) -> Target:
        return Target(self.cache.path, str(self.folder))

    def entries(self) -> dict[str, os.stat_result]:
        """All that is in it now."""
        return _entries(self.folder)

    def known(self) -> set[str]:
        """The entries that were restored."""
        return set(_entries(self.group.tree_point / "0")) if self.group and self.restored else set(self._known)

    def _was_there(self, path: str) -> bool:
        there = os.path.lexists(self.group.tree_point / "0" / path) if self.group else path in self._known
        return there or path in self._captured

    def compiled(self) -> dict[str, tuple[int, int]]:
        """(size, time) of the entries that are new or changed since it was restored."""
        place = self.group.upper / "0" if self.group else self.folder
        found = {path: (status.st_size, status.st_mtime_ns) for path, status in _entries(place).items()}
        return {path: state for path, state in found.items() if self._known.get(path) != state}

    def added(self) -> dict[str, tuple[int, int]]:
        """Those of them that no capture has handed on."""
        return {path: state for path, state in self.compiled().items() if self._captured.get(path) != state}

    def lead_here(self) -> None:
        """Triton's notes of which files are of one kernel say where these lay on the node that compiled it: have them
        say where they lie here. Nothing is added by that, nor used."""
        for path in self.known() if self.restored and not self.joined else ():
            folder, _, name = path.rpartition("/")
            if not name.startswith("__grp__"):
                continue
            file, anew = self.folder / path, b""
            was = file.stat()
            with contextlib.suppress(ValueError):
                note = json_as(file.read_bytes() if was.st_size < _NOTE else b"", _Note)
                here = {one: str(self.folder / folder / os.path.basename(at)) for one, at in note.child_paths.items()}
                anew = msgspec.json.encode(_Note(here)) if here != note.child_paths else b""
            if anew:
                beside = file.with_name(f".{file.name}.bootseer")
                beside.unlink(missing_ok=True)
                with beside.open("xb") as made:  # the tree of another may have a link there
                    made.write(anew)
                beside.replace(file)  # whole or not at all: Triton ends the job for half a note
            elif self.group:
                continue
            os.utime(file, ns=(0, was.st_mtime_ns))
            self._known[path] = file.stat().st_size, was.st_mtime_ns

    @property
    def damaged(self) -> bool:
        """Whether not all that was restored could be read."""
        return bool(self.group and self.restored and not self.group.intact)

    def capture(self, used: Iterable[str] = (), *, seconds: float = 0.0, last: bool = False) -> Publication | None:
        """Have a process of idle priority make the next generation, when anything was added. ``used``: the entries that
        this start has used beside those; ``seconds``: how long it took to fill a cache that was empty. ``last``: nobody
        writes to it any more: the process gives it up if this one has ended. Raises `BootseerError`, `OSError`."""
        added = self.added()
        if not added:
            return None
        message = Gather(
            cache=self.cache,
            view=str(self.folder.parent),
            work=str(self.group.area if self.group else self.folder.parent),
            used=sorted({*used, *added}),
            changed=[path for path in added if self._was_there(path)],
            seconds=seconds,
            last=last,
            store_url=self.store_url,
            config=self.config,
        )
        started = Publication(message, Path(self.config.state_dir), PROGRAM)
        if self.group:
            try:
                self.group.published_by(started.named, also_used=last)
            except (BootseerError, OSError):
                started.give_up()
                raise
        if why := started.go_on(None):
            raise BootseerError(why)
        self._before, self._captured = self._captured, self._captured | added
        return started

    def retract(self) -> None:
        """The last capture has failed: what it was to hand on is still to be captured."""
        self._captured = self._before

    def alone(self) -> bool:
        """Whether no other process of the node uses the plain folder, as this one does from now on."""
        if self._lock < 0:
            self._lock = os.open(self.folder.parent / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        return True

    def close(self) -> None:
        """Give it up; the overlay goes with its last user on the node. Safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self.group:
            until = time.monotonic() + _END_SECONDS
            try:
                while mounts.in_use(self.folder) and time.monotonic() < until:
                    time.sleep(0.05)
            except (BootseerError, OSError) as exc:
                log.info("%s", exc)
            finally:
                self.group.unmount(copies=True)


def give_up(told: Gather) -> None:
    """Take the cache down if nobody uses it."""
    for group in overlay.groups_on([Path(told.view, "0")], Path(told.config.state_dir), 0):
        group.unmount(copies=True)


def restore(
    cache: Cache, store_url: str, config: Config, *, job: str = "", use: bool = True, how: Technique = "auto"
) -> Held:
    """The cache in its folder of this node, with the newest generation of the store that is good, unless it is not to
    be of ``use``. ``job`` names the trace profile. Trouble with a generation or the store is a log line: it is cold
    then. Raises `BootseerError` and `OSError` when there can be no such folder."""
    held = Held(cache, store_url, config)
    base = private_folder(Path(config.cache_dir), sub=f"caches/{held.folder.parent.name}")
    if (free := shutil.disk_usage(base).free) < _FREE:
        raise FullError(f"{base} has {free >> 20} MiB free, a cache needs {_FREE >> 20}")
    state = Path(config.state_dir)
    with locks.locked((held.target,), state, wait=_LOCK_SECONDS):
        if not _joined(held, state):
            overlay.sweep(config)
            with doing(f"make {held.folder}"):
                held.folder.mkdir(mode=0o755, exist_ok=True)
                if os.geteuid() == 0:
                    os.chown(held.folder, *cache.owner)
            found = _newest(held) if use else []
            if os.geteuid() == 0 and how != "unpack":
                try:
                    _begin(held, _mount, found, job)
                    return held
                except PrivilegeError as exc:  # as in most containers
                    log.info("%s; the cache is a plain folder", exc)
            _begin(held, _unpack, found, job)
    return held


def _joined(held: Held, state: Path) -> bool:
    """Whether it is in place already, for other processes of the node, and shared from now on. Raises `BootseerError`
    when they have it, and not all of it can be read: it is not taken from them."""
    with locks.groups_locked(state):
        for group in overlay.groups_on([held.folder], state, 0):
            if not (user := group.in_use):
                group.take_down()
                continue
            if not group.intact:
                raise BootseerError(f"a cache of which not all can be read is in use by {user}")
            group.join()
            held.group, held.joined, held.said = group, True, "shared with others on this node"
            return True
    return False


def _newest(held: Held) -> list[SnapshotManifest]:
    """The generations to try."""
    document = held.cache.document
    try:
        store = open_store(held.store_url)
        found = generations(store, document.key, held.config)
        if not found and snapshots.names(store, document.key):
            held.said = "cold: none of its generations may be used, the log says why"
        elif not found and any(True for _ in store.list(manifest.index_prefix(document))):
            held.said = f"cold: {lookup.explained(store, document)[:_LONGEST]}"
    except (BootseerError, OSError) as exc:
        held.said = f"cold: the store did not answer: {exc}"
        log.warning("%s; the cache begins empty", exc)
        return []
    except Exception as exc:  # others wrote what is in the store
        held.said = f"cold: the store holds what cannot be read: {type(exc).__name__}"
        log.warning("cannot look for the cache: %r", exc)
        return []
    good = []
    for one in found[:_KEPT]:
        if why := quarantine.reason(Path(held.config.cache_dir), quarantine.mark_of(one)):
            held.said = f"cold: quarantined on this node: {why}"
        elif one.size > 2 * held.cache.most_bytes:
            held.said = f"cold: a generation of {one.size >> 20} MiB is beyond the limit"
        else:
            good.append(one)
    return good


_Way = Callable[[Held, SnapshotManifest | None, str], None]


def _begin(held: Held, way: _Way, found: Sequence[SnapshotManifest], job: str) -> None:
    """Show the first of ``found`` that can be shown, else an empty folder. Raises `PrivilegeError` when this process
    may mount nothing."""
    for one in [*found, None]:
        try:
            way(held, one, job)
        except (BootseerError, OSError) as exc:
            if isinstance(exc, PrivilegeError) and way is _mount:
                raise
            if one is None:
                log.warning("%s; the cache is a plain folder", exc)
                return
            held.said = f"cold: {exc}"
            log.warning("cannot restore the cache %s: %s", one.shown, exc)
            if isinstance(exc, (DataError, NotFoundError)):
                quarantine.put(Path(held.config.cache_dir), quarantine.mark_of(one), str(exc))
            continue
        if one:
            held.restored, held.said = one, f"restored generation {number_of(one)}"
        return


def _mount(held: Held, found: SnapshotManifest | None, job: str) -> None:
    group = overlay.new_group(held.cache.document.key, (held.target,), held.config, found)
    try:
        if found:
            group.mount_tree(held.store_url, held.config, job)
        group.mount_targets()
        group.complete(known=False)
    except PrivilegeError:
        group.forget()
        raise
    except BaseException:
        group.take_down()
        raise
    held.group = group


def _unpack(held: Held, found: SnapshotManifest | None, job: str) -> None:
    """Add what the folder lacks: it stays from start to start, and has what other generations brought. The times of
    access tell what is used from now on, but to who comes when others use it: they would lose theirs."""
    held.joined = not held.alone()
    base = held.folder.parent
    for left in base.glob("new-*"):
        discard_tree(left)
    if found is None:
        return
    store = open_store(held.store_url)
    listed = [entry.inner for entry in snapshots.entries(store, found) if cachekinds.is_entry(entry.inner)]
    if not listed or not all((held.folder / path).exists() for path in listed):
        stage = Path(tempfile.mkdtemp(prefix="new-", dir=base))
        try:
            tree.extract(store, found.tree, stage / "tree", most=2 * held.cache.most_bytes, seen=False)
            for path in _entries(stage / "tree/0"):
                (held.folder / path).parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.link(stage / "tree/0" / path, held.folder / path)
        finally:
            discard_tree(stage)
    here = held.entries()
    for path in here.keys() & set(listed):
        held._known[path] = here[path].st_size, here[path].st_mtime_ns
        if not held.joined:
            os.utime(held.folder / path, ns=(0, here[path].st_mtime_ns))


def _entries(folder: Path) -> dict[str, os.stat_result]:
    return {
        path: status
        for path, status in scan.walk(folder, skip=scan.UNREADABLE)
        if stat.S_ISREG(status.st_mode) and cachekinds.is_entry(path)
    }
