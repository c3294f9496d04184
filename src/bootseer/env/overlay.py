"""Overlays over targets: one group per run, with a record that survives the process, so that anyone can release it.

A group's record is ``<state_dir>/env/<id>.json``, written before the first mount. Its area ``<cache_dir>/env/<id>/``
(disk, not memory) holds ``upper/<n>`` and ``work/<n>`` per target and the mount point ``tree`` of the snapshot.
Both go away with `Group.unmount` when no other process uses the group any more; what cannot go then is removed by the
`sweep` of a later run. Groups of other mount namespaces (of other pods, with the same folders) are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bootseer.blocks import tree
from bootseer.config import Config
from bootseer.env import layer, place, publication, quarantine, scan, users
from bootseer.env import lock as locks
from bootseer.env.inputs import Opened
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.spec import Target
from bootseer.errors import BootseerError, NotWritableError, doing, logged
from bootseer.folders import private_folder, spread, trusted
from bootseer.kernel import mount as mounts
from bootseer.kernel.copies import withdraw
from bootseer.kernel.removal import discard_tree
from bootseer.mountrecords import Record, Records

log = logging.getLogger(__name__)

# What the upper directory means must not depend on the kernel's build options. Without redirects a folder of what the
# target held could not be renamed.
_OPTIONS = "redirect_dir=on,metacopy=off,index=off"
_LOCK_SECONDS = 60.0
"""How long it waits for a stage that may just be joining the group."""
_MAKING_SECONDS = 86400.0
"""So old is an area of another mount namespace before one that is not mounted counts as left, not as being made."""
_UNKNOWN = "unknown"
"""For the marks of a result that is in place, but not to be found later."""


class InUseError(NotWritableError):
    """Another process uses what covers a target."""


class GroupRecord(Record, kw_only=True):
    """Overlays of the command of ``key``."""

    key: str
    targets: list[Target]
    area: str
    namespace: str = ""
    """The mount namespace that the overlays are in."""
    users: list[str] = msgspec.field(default_factory=list)
    """Processes (`users.users`) that the group was handed to."""
    tree: str = ""
    """Digest of the snapshot's tree; empty when the command filled the overlay."""
    mark: str = ""
    """Names the snapshot for the quarantine."""
    made: list[int] = msgspec.field(default_factory=list)
    """The targets that were not there before."""
    leaves: bool = True
    """Whether these stay, as empty folders: not where the command asks for them."""
    frozen: bool = False
    """Nothing changes ``upper`` any more: the job writes to ``top``."""
    publisher: str = ""
    """The process (`users.named`) that publishes what is in ``upper``."""
    inputs: Opened = Opened()
    """What the command read besides what its key states; see `Group.inputs`."""
    marks: str = ""
    """What the writable directories held when the targets showed the result; empty before. See `Group.untouched`."""


class Group:
    """The overlays of one run. Not safe for two threads; two processes are kept apart by the lock of the stage, which
    the caller of all methods but `unmount` and `published_by` holds."""

    def __init__(self, record: GroupRecord, state_dir: Path, mine: list[str]) -> None:
        self.record = record
        self.mine = mine
        """The processes (`users.users`) that this one speaks for."""
        self._state_dir = state_dir
        self._over: set[int] = set()
        """The targets that held something before."""

    @property
    def area(self) -> Path:
        return Path(self.record.area)

    @property
    def inputs(self) -> Opened:
        """What is known by now of what the command read, and of what its result leads to."""
        return self.record.inputs.kept(self.area)

    @property
    def upper(self) -> Path:
        """Holds one upper directory per target, ``0``, ``1``, ...: an overlayfs layer each."""
        return self.area / "upper"

    @property
    def tree_point(self) -> Path:
        return self.area / "tree"

    @property
    def here(self) -> bool:
        """Whether it is of this mount namespace. (A number that is used again does no harm: nothing is mounted.)"""
        return self.record.namespace == mounts.namespace() and self.record.boot == mounts.boot_id()

    @property
    def made(self) -> float | None:
        """When it was made, in seconds since 1970; None of one whose area is not here."""
        try:
            return (self.area / "boot").stat().st_mtime
        except FileNotFoundError:
            return None

    @property
    def mounted(self) -> list[Path]:
        """The targets that show this group, here."""
        return [target.host for target in self._showing()]

    @property
    def points(self) -> list[Path]:
        """All that it has mounted, in that order."""
        return [*(self._tree().points if self.record.tree else []), *self.mounted]

    def _showing(self) -> list[Target]:
        if not self.here:
            return []
        found = [(target, mounts.find(target.host)) for target in self.record.targets]
        return [target for target, entry in found if entry and entry.source == self._source]

    def _unmount(self, target: Target, *, lazy: bool = False) -> None:
        with place.name_of(target) as name:
            mounts.unmount(name, lazy=lazy)

    def _busy(self, target: Target) -> bool:
        with place.name_of(target) as name:
            return mounts.in_use(name)

    @property
    def _source(self) -> str:
        return f"bootseer-env-{self.record.id}"

    def _others(self) -> list[str]:
        """The other processes that it was handed to and that still run. A result that never was is nobody's."""
        return users.alive(set(self.record.users) - set(self.mine)) if self.record.marks else []

    @property
    def in_use(self) -> str:
        """Who uses it beside `mine`, or empty: who it was handed to, or has a file or a working directory in it. Not
        who only looks at what a command left that failed, or was killed."""
        if not self.record.marks:
            return ""
        if others := self._others():
            return users.shown(others[0])
        busy = next((target.host for target in self._showing() if self._busy(target)), None)
        return f"a process that has files open in {busy}" if busy else ""

    def freed(self) -> str:
        """`in_use`, when the publication has ended that runs the interpreter in it; if nobody else uses it, it does."""
        if self.record.publisher and self.in_use and not self._others():
            publication.end(self.record.publisher)
        return self.in_use

    def join(self) -> None:
        """Note that `mine` use it, too."""
        self.record.users = [*self._others(), *self.mine]
        self.save()

    def published_by(self, publisher: str, *, also_used: bool) -> None:
        """Note who publishes what is in ``upper``, and whether that uses the group, beside all who do by now. Not for
        who holds the lock of the stage. Raises `BootseerError`, `OSError`."""
        with locks.locked(tuple(self.record.targets), self._state_dir, wait=_LOCK_SECONDS):
            self.record = _records(self._state_dir).read(self.record.id)
            self.record.publisher = publisher
            self.record.users += [publisher] if also_used else []
            self.save()

    @property
    def intact(self) -> bool:
        """Whether every target is still mounted as recorded, over a tree that has served every read."""
        if len(self.mounted) < len(self.record.targets):
            return False
        status = self._tree_status()
        return status.failed_reads == 0 if status else not self.record.tree

    @property
    def untouched(self) -> bool:
        """Whether nobody has written to the targets since `complete`."""
        try:
            return bool(self.record.marks) and self.record.marks == self._marks()
        except OSError as exc:  # such as deeper than any path may be long
            log.info("%s cannot be read: %s", self.area, exc.strerror)
            return False

    def _marks(self) -> str:
        text = hashlib.sha256()
        for name in ("top",) if self.record.frozen else ("top", "upper"):
            for path, mark in sorted(scan.snapshot_marks(self.area / name).items()):
                text.update(os.fsencode(f"{name}/{path}\0{tuple(mark)}\n"))
        return text.hexdigest()

    def complete(self, *, known: bool = True) -> None:
        """Note that the targets show the result now; when it is not ``known`` what that depends on, it is shared while
        it is in use, and not taken for the result afterwards. Raises `BootseerError`; the mounts are as good then."""
        self.record.marks = _UNKNOWN
        try:
            if known:
                with doing(f"read {self.area}"):
                    self.record.marks = self._marks()
        finally:
            self.save()

    def save(self) -> None:
        private_folder(self._state_dir, sub="env")
        _records(self._state_dir).save(self.record)

    def mount_tree(self, store_url: str, config: Config, job: str) -> None:
        tree.mount(
            store_url,
            self.record.tree,
            self.tree_point,
            cache_dir=Path(config.cache_dir),
            state_dir=Path(config.state_dir),
            profile=tree.ProfileKey(job),
            config=config,
        )

    def mount_targets(self) -> None:
        """Mount an overlay on each target: the snapshot's layer (when there is one) over what the target held."""
        for number, target in enumerate(self.record.targets):
            self._make(number, target, frozen=False)
            self._mount(number, target, frozen=False)

    def _make(self, number: int, target: Target, *, frozen: bool) -> None:
        """The folders of an overlay on ``target``; see `_mount`."""
        upper, work = self._writable(number, frozen)
        if not os.path.lexists(target.host):
            self.record.made.append(number)
            self.save()  # before it is there, as this process may be killed
        with doing(f"prepare an overlay on {target.host}"), place.opened(target, make=True) as host:
            for folder in (upper, work, self.area / "empty"):
                folder.mkdir(parents=True, exist_ok=True)
            # of a folder of root's own, a snapshot does not say whose it is
            keeps = os.geteuid() == 0 and not target.within
            mounts.copy_root(host if keeps else next(iter(self._layers(number, frozen)), host), upper)

    def _mount(self, number: int, target: Target, *, frozen: bool) -> None:
        upper, work = self._writable(number, frozen)
        lower = self._layers(number, frozen)
        with place.opened(target) as host:
            # Leaving out an empty directory saves a level: the kernel stacks no more than two (a container's root is
            # one).
            if not scan.is_empty(host):
                lower.append(host)
                self._over.add(number)
            mounts.mount_overlay(
                lower or [self.area / "empty"],
                host,
                upper=upper,
                work=work,
                options=_OPTIONS,
                source=self._source,
                volatile=True,
            )

    def _writable(self, number: int, frozen: bool) -> tuple[Path, Path]:
        """What is written to the target, and overlayfs' own folder."""
        upper, work = ("top", "top-work") if frozen else ("upper", "work")
        return self.area / upper / str(number), self.area / work / str(number)

    def _layers(self, number: int, frozen: bool) -> list[Path]:
        """What lies between that and what the target held: what was captured, or the snapshot."""
        if frozen:
            return [self.upper / str(number)]
        return [self.tree_point / str(number)] if self.record.tree else []

    def unfold(self) -> None:
        """Have the upper directories hold all of what the command left, also of folders that it only renamed."""
        for number in sorted(self._over):
            try:
                with place.opened(self.record.targets[number]) as host:
                    layer.unfold(self.upper / str(number), host)
            except (BootseerError, OSError, subprocess.SubprocessError) as exc:
                log.warning("cannot capture a renamed folder of %s: %s", self.record.targets[number].path, exc)

    def freeze(self) -> bool:
        """Put a new upper directory on each target and the captured one, which nothing changes any more, beneath it.
        False, with a log line, when that is not possible; what was captured is still whole and mounted then, but may
        change. Raises `BootseerError` when a target cannot be mounted again; the group is unmounted then."""
        for number, target in enumerate(self.record.targets):
            try:
                self._unmount(target)
            except BootseerError as exc:
                log.warning("%s; publishing before the job goes on", exc)
                return False
            try:
                self._make(number, target, frozen=True)
                self._mount(number, target, frozen=True)
            except (BootseerError, OSError) as exc:
                try:
                    discard_tree(self.area / "work" / str(number))  # it says that it was volatile
                    (self.area / "work" / str(number)).mkdir()
                    self._mount(number, target, frozen=False)
                except (BootseerError, OSError) as worse:
                    self.take_down()
                    raise BootseerError(f"cannot mount the overlay on {target.host} again: {worse}") from exc
                log.warning("%s; publishing before the job goes on", exc)
                return False
        self.record.frozen = True
        return True

    def _tree(self) -> tree.TreeMount:
        return tree.mounted(self.tree_point, self.record.tree, self._state_dir)

    def _tree_status(self) -> tree.TreeStatus | None:
        if not self.record.tree:
            return None
        with logged(log.info, "the tree of snapshot %s is not served", self.record.key[:12], kinds=BootseerError):
            return self._tree().status()
        return None

    def unmount(self, *, copies: bool = False) -> None:
        """Give the group up for `mine`; take it down unless other processes use it, and the ``copies`` that other mount
        namespaces have by chance. Safe to call twice."""
        try:
            with locks.locked(tuple(self.record.targets), self._state_dir, wait=_LOCK_SECONDS):
                try:
                    self.record = _records(self._state_dir).read(self.record.id)
                except FileNotFoundError:
                    return
                if self.record.publisher in self.mine:  # it has published
                    self.record.publisher = ""
                if others := self._others():
                    self.record.users = others
                    self.save()
                    log.info("%s stays for %s", self.record.targets[0].host, users.shown(others[0]))
                else:
                    if copies:
                        withdraw(self.points)
                    self.take_down()
        except BootseerError as exc:
            log.warning("%s; %s is left", exc, self.area)

    def take_down(self) -> None:
        """Unmount all and delete what the overlays held, but never what somebody still uses or reads: such an area is
        left to a later `sweep`. A target in use is detached lazily, with a log line."""
        status = self._tree_status()
        if status and status.failed_reads and status.bad_blocks:
            why = f"{status.bad_blocks} blocks of it are damaged in the store"
            log.warning("snapshot %s: %s; quarantined on this node", self.record.key[:12], why)
            quarantine.put(self.area.parent.parent, self.record.mark, why)
        if self.record.publisher:
            publication.end(self.record.publisher)
        for target in reversed(self._showing()):
            try:
                self._unmount(target)
            except BootseerError as exc:
                log.warning("%s; detached lazily", exc)
                self._unmount(target, lazy=True)
        if self.record.tree:
            self._tree().unmount()
        if not self._free():
            log.warning("%s is left for now: files in it are in use", self.area)
            self.record.users = []  # only what is in use counts any more
            with contextlib.suppress(BootseerError):
                self.save()
        else:
            self._delete()

    def _free(self) -> bool:
        """Whether no overlay has its upper directories any more, in whichever mount namespace."""
        try:
            tops = [(name, path) for name in ("top", "upper") for path in (self.area / name).glob("*")]
            return not any(mounts.upper_in_use(path, self.area / "spare" / name / path.name) for name, path in tops)
        except (BootseerError, OSError) as exc:
            log.warning("%s; taking %s for in use", exc, self.area)
            return False

    def forget(self) -> None:
        """`take_down` for who may not mount: no overlay can have the upper directories."""
        if self.mounted or mounts.is_mounted(self.tree_point):
            self.take_down()
        else:
            self._delete()

    def _delete(self) -> None:
        discard_tree(self.area)
        for target in () if self.record.leaves else (self.record.targets[number] for number in self.record.made):
            with contextlib.suppress(BootseerError, OSError):
                place.check([target])  # nobody else leads the name elsewhere
                with place.name_of(target) as name:
                    os.rmdir(name)
        if not self.area.exists():
            _records(self._state_dir).delete(self.record.id)

    @property
    def left(self) -> bool:
        """Whether processes that ended left it, or an earlier boot."""
        if self.record.boot != mounts.boot_id():
            return True
        if self.here:
            return not self.mounted and not users.alive(self.record.users)
        made = self.made  # None: of a pod with another cache
        return made is not None and time.time() - made >= _MAKING_SECONDS and self._free()

    def clear(self) -> None:
        """Delete it if it is left."""
        if self.left:
            if self.here and self.record.boot == mounts.boot_id():
                self.take_down()
            else:
                self._delete()


def new_group(
    key: str, targets: tuple[Target, ...], config: Config, found: SnapshotManifest | None = None, caller: int = 0
) -> Group:
    """A group with its record and area on disk, nothing mounted yet; ``found`` is the snapshot it is to show, and
    ``caller`` the process that uses it beside this one."""
    ident = os.urandom(6).hex()
    area = Path(config.cache_dir).absolute() / "env" / ident
    mine = users.users(caller)
    record = GroupRecord(
        id=ident,
        key=key,
        targets=list(targets),
        area=str(area),
        namespace=mounts.namespace(),
        users=mine,
    )
    if found:
        record.tree, record.mark, record.inputs = found.tree, quarantine.mark_of(found), Opened(found.inputs)
    group = Group(record, Path(config.state_dir).absolute(), mine)
    group.save()
    try:
        with doing(f"make {area}"):
            spread(private_folder(area.parent.parent, sub="env"))  # the one before may have been deleted just now
            private_folder(area.parent.parent, sub=f"env/{ident}")
            (area / "boot").write_text(record.boot)
    except BootseerError:
        group.take_down()
        raise
    return group


def groups(state_dir: Path, caller: int = 0) -> list[Group]:
    """The groups of this mount namespace, oldest first, for this process and ``caller``."""
    return [group for group in _recorded(state_dir, users.users(caller)) if group.here]


def groups_on(hosts: Sequence[Path], state_dir: Path, caller: int) -> list[Group]:
    """The groups that cover one of ``hosts``, newest first: the order in which they come off."""
    real = {mounts.real(host) for host in hosts}
    return [group for group in groups(state_dir, caller)[::-1] if real & {mounts.real(host) for host in group.mounted}]


def left_areas(config: Config) -> list[Path]:
    """The folders that `sweep` would remove."""
    areas = [group.area for group in _recorded(Path(config.state_dir), users.users()) if group.left]
    return list(dict.fromkeys([*_of_earlier_boots(config), *areas]))


def _of_earlier_boots(config: Config) -> Iterator[Path]:
    for folder in trusted(Path(config.cache_dir)).glob("env/*"):
        with contextlib.suppress(OSError):
            if (folder / "boot").read_text() != mounts.boot_id():
                yield folder


def _recorded(state_dir: Path, mine: list[str]) -> list[Group]:
    base = trusted(state_dir)
    return [Group(record, base, mine) for record in _records(base).all()]


def _records(state_dir: Path) -> Records[GroupRecord]:
    return Records(state_dir / "env", GroupRecord)


def sweep(config: Config, held: Sequence[Target] = ()) -> None:
    """Remove what earlier boots left, and processes that ended: no mount uses it. Folders that were made for targets go
    with it where nobody else makes these just now: the caller has ``held`` locked."""
    for folder in _of_earlier_boots(config):
        discard_tree(folder)
    for group in _recorded(Path(config.state_dir), users.users()):
        if not {*group.record.targets} <= {*held}:
            group.record.made = []
        try:
            group.clear()
        except BootseerError as exc:  # no reason not to start what is to start now
            log.warning("%s; %s is left for now", exc, group.area)
