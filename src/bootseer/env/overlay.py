"""Overlays over targets: one group per run, with a record that survives the process, so that anyone can release it.

A group's record is ``<state_dir>/env/<id>.json``, written before the first mount. Its area ``<cache_dir>/env/<id>/``
(disk, not memory) holds ``upper/<n>`` and ``work/<n>`` per target and the mount point ``tree`` of the snapshot.
Both go away with `Group.unmount`; what an earlier boot left is removed by `sweep`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import uuid
from pathlib import Path

import msgspec

from bootseer.blocks import tree
from bootseer.config import Config
from bootseer.env import quarantine, scan
from bootseer.env.inputs import Observed
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.publication import Publication
from bootseer.env.spec import Target
from bootseer.errors import BootseerError, from_os_error
from bootseer.kernel import mount as mounts
from bootseer.private import private_folder, trusted

log = logging.getLogger(__name__)

# What the upper directory means must not depend on the kernel's build options: no entry that another overlay
# cannot read by itself.
_JOIN_SECONDS = 20.0
"""How long `Group.unmount` waits for a cancelled publication, which still reads what is to be deleted."""
_OPTIONS = "redirect_dir=off,metacopy=off,index=off"


class GroupRecord(msgspec.Struct, kw_only=True):
    """Overlays of the command of ``key``."""

    id: str
    key: str
    targets: list[Target]
    area: str
    boot: str
    tree: str = ""
    """Digest of the snapshot's tree; empty when the command filled the overlay."""
    mark: str = ""
    """Names the snapshot for the quarantine."""
    frozen: bool = False
    """Nothing changes ``upper`` any more: the job writes to ``top``."""
    inputs: Observed = Observed()
    """What the command read besides what its key states."""
    marks: str = ""
    """What the writable directories held when the targets showed the result; empty before. See `Group.untouched`."""


class Group:
    """The overlays of one run. Not safe for two threads; two processes are kept apart by the lock of the stage."""

    def __init__(self, record: GroupRecord, state_dir: Path) -> None:
        self.record = record
        self.publication: Publication | None = None
        """Reads ``upper`` in this process."""
        self._state_dir = state_dir

    @property
    def area(self) -> Path:
        return Path(self.record.area)

    @property
    def upper(self) -> Path:
        """Holds one upper directory per target, ``0``, ``1``, ...: an overlayfs layer each."""
        return self.area / "upper"

    @property
    def tree_point(self) -> Path:
        return self.area / "tree"

    @property
    def intact(self) -> bool:
        """Whether every target is still mounted as recorded, over a tree that has served every read."""
        if not all(_is_ours(target.host) for target in self.record.targets):
            return False
        status = self._tree_status()
        return status.failed_reads == 0 if status else not self.record.tree

    @property
    def untouched(self) -> bool:
        """Whether nobody has written to the targets since `complete`."""
        return bool(self.record.marks) and self.record.marks == self._marks()

    def _marks(self) -> str:
        text = hashlib.sha256()
        for name in ("top",) if self.record.frozen else ("top", "upper"):
            for path, mark in sorted(scan.snapshot_marks(self.area / name).items()):
                text.update(os.fsencode(f"{name}/{path}\0{tuple(mark)}\n"))
        return text.hexdigest()

    def complete(self) -> None:
        """Note that the targets show the result now. Raises `BootseerError`; the mounts are as good without it."""
        try:
            self.record.marks = self._marks()
        except OSError as exc:
            raise from_os_error(exc, f"read {self.area}") from exc
        self.save()

    @property
    def _record_file(self) -> Path:
        return self._state_dir / "env" / f"{self.record.id}.json"

    @property
    def _left(self) -> Path:
        return self.area / "left"

    def save(self) -> None:
        path = self._record_file
        tmp = path.with_suffix(".tmp")
        try:
            private_folder(self._state_dir, sub="env")
            tmp.write_bytes(msgspec.json.encode(self.record))
            os.replace(tmp, path)
        except OSError as exc:
            raise from_os_error(exc, f"write {path}") from exc

    def mount_tree(self, store_url: str, config: Config, job: str) -> None:
        tree.mount(
            store_url,
            self.record.tree,
            self.tree_point,
            cache_dir=Path(config.cache_dir),
            state_dir=Path(config.state_dir),
            profile=tree.ProfileKey(job) if job else tree.ProfileKey(),
            config=config,
        )

    def mount_targets(self) -> None:
        """Mount an overlay on each target: the snapshot's layer (when there is one) over what the target held."""
        for number, target in enumerate(self.record.targets):
            self._mount_one(number, target.host)

    def _mount_one(self, number: int, host: Path) -> None:
        upper, layer = self.upper / str(number), self.tree_point / str(number)
        try:
            for folder in (upper, self.area / "work" / str(number), self.area / "empty", host):
                folder.mkdir(parents=True, exist_ok=True)
            _copy_root(layer if self.record.tree else host, upper)
        except OSError as exc:
            raise from_os_error(exc, f"prepare an overlay on {host}") from exc
        self._overlay(number, host)

    def _overlay(self, number: int, host: Path) -> None:
        upper, work = self.upper / str(number), self.area / "work" / str(number)
        lower = [self.tree_point / str(number)] if self.record.tree else []
        # Leaving out an empty directory saves a level: the kernel stacks no more than two (a container's root is one).
        if not scan.is_empty(host):
            lower.append(host)
        mounts.mount_overlay(lower or [self.area / "empty"], host, upper=upper, work=work, options=_OPTIONS)

    def freeze(self) -> bool:
        """Put a new upper directory on each target and the captured one, which nothing changes any more, beneath it.

        False, with a log line, when that is not possible; what was captured is still whole and mounted then, but may
        change. Raises `BootseerError` when a target cannot be mounted again; the group is unmounted then.
        """
        for number, target in enumerate(self.record.targets):
            try:
                mounts.unmount(target.host)
            except BootseerError as exc:
                log.warning("%s; publishing before the job goes on", exc)
                return False
            try:
                self._mount_frozen(number, target.host)
            except (BootseerError, OSError) as exc:
                try:
                    self._overlay(number, target.host)
                except (BootseerError, OSError) as worse:
                    self.unmount()
                    raise BootseerError(f"cannot mount the overlay on {target.host} again: {worse}") from exc
                log.warning("%s; publishing before the job goes on", exc)
                return False
        self.record.frozen = True
        return True

    def _mount_frozen(self, number: int, host: Path) -> None:
        captured = self.upper / str(number)
        upper, work = self.area / "top" / str(number), self.area / "top-work" / str(number)
        try:
            for folder in (upper, work):
                folder.mkdir(parents=True)
            _copy_root(captured, upper)
        except OSError as exc:
            raise from_os_error(exc, f"prepare an overlay on {host}") from exc
        lower = [captured] if scan.is_empty(host) else [captured, host]
        mounts.mount_overlay(lower, host, upper=upper, work=work, options=_OPTIONS)

    def _tree(self) -> tree.TreeMount:
        return tree.mounted(self.tree_point, self.record.tree, self._state_dir)

    def _tree_status(self) -> tree.TreeStatus | None:
        if not self.record.tree:
            return None
        try:
            return self._tree().status()
        except BootseerError as exc:
            log.info("the tree of snapshot %s is not served: %s", self.record.key[:12], exc)
            return None

    def _note_damage(self) -> None:
        status = self._tree_status()
        if status and status.failed_reads and status.bad_blocks:
            why = f"{status.bad_blocks} blocks of it are damaged in the store"
            log.warning("snapshot %s: %s; quarantined on this node", self.record.key[:12], why)
            quarantine.put(self.area.parent.parent, self.record.mark, why)

    def unmount(self) -> None:
        """Take all down and delete what the overlays held. A target in use is detached lazily, with a log line.

        What somebody still uses or reads is never deleted: such an area is left to the `sweep` after the next boot.
        """
        if self._left.exists():
            return
        self._note_damage()
        in_use = "" if self._publication_ended() else "a publication still reads it"
        for target in reversed(self.record.targets):
            if _is_ours(target.host) and _detach(target.host):
                in_use = f"{target.host} is in use"
        if self.record.tree:
            self._tree().unmount()
        if in_use:
            log.warning("%s is left until the next boot: %s", self.area, in_use)
            # The targets are not ours any more: nothing else says that the area is not free.
            with contextlib.suppress(OSError):
                self._left.touch()
            self._record_file.unlink(missing_ok=True)
            return
        if scan.mount_points_below(self.area):
            log.warning("%s is left: something is still mounted there", self.area)
            return
        shutil.rmtree(self.area, ignore_errors=True)
        self._record_file.unlink(missing_ok=True)

    def _publication_ended(self) -> bool:
        if self.publication is None:
            return True
        self.publication.cancel()
        return self.publication.ended(_JOIN_SECONDS)


def new_group(key: str, targets: tuple[Target, ...], config: Config, found: SnapshotManifest | None = None) -> Group:
    """A group with its record and area on disk, nothing mounted yet; ``found`` is the snapshot it is to show."""
    ident = uuid.uuid4().hex[:12]
    area = Path(config.cache_dir).absolute() / "env" / ident
    record = GroupRecord(id=ident, key=key, targets=list(targets), area=str(area), boot=boot_id())
    if found:
        record.tree, record.mark, record.inputs = found.tree, quarantine.mark_of(found), found.inputs
    group = Group(record, Path(config.state_dir).absolute())
    group.save()
    try:
        private_folder(area.parent.parent, sub=f"env/{ident}")
        (area / "boot").write_text(record.boot)
    except OSError as exc:
        group.unmount()
        raise from_os_error(exc, f"make {area}") from exc
    return group


def groups(state_dir: Path) -> list[Group]:
    """The groups recorded on this node, oldest first."""
    base = trusted(state_dir)
    out: list[tuple[int, Group]] = []
    for path in base.glob("env/*.json"):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=GroupRecord)
            out.append((path.stat().st_mtime_ns, Group(record, base)))
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as exc:
            log.warning("ignoring the mount record %s: %s", path, exc)
    return [group for _, group in sorted(out, key=lambda item: item[0])]


def groups_on(targets: tuple[Target, ...] | list[Path], state_dir: Path) -> list[Group]:
    """The groups that cover one of ``targets``, newest first: the order in which they come off."""
    hosts = {str(item.host if isinstance(item, Target) else item) for item in targets}
    found = [group for group in groups(state_dir) if hosts & {str(target.host) for target in group.record.targets}]
    return found[::-1]


def sweep(config: Config) -> None:
    """Remove areas of an earlier boot, which no mount can use."""
    for folder in trusted(Path(config.cache_dir)).glob("env/*"):
        try:
            if (folder / "boot").read_text() == boot_id():
                continue
        except OSError:
            continue
        shutil.rmtree(folder, ignore_errors=True)
    for group in groups(Path(config.state_dir)):
        if group.record.boot != boot_id():
            group.unmount()


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_ours(path: Path) -> bool:
    entry = mounts.find(path)
    return entry is not None and entry.fstype == "overlay"


def _detach(path: Path) -> bool:
    """Whether it could only be detached lazily: its users keep it."""
    try:
        mounts.unmount(path)
    except BootseerError as exc:
        log.warning("%s; detached lazily", exc)
        mounts.unmount(path, lazy=True)
        return True
    return False


def _copy_root(source: Path, upper: Path) -> None:
    # The root of an overlay shows the attributes of its upper directory.
    found = os.stat(source)
    os.chown(upper, found.st_uid, found.st_gid)
    os.chmod(upper, found.st_mode & 0o7777)
    os.utime(upper, ns=(found.st_atime_ns, found.st_mtime_ns))
