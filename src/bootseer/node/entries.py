"""The mounts of the node daemon: each is made by one process, then it may be ended by another, then its record goes.
What was made by half is ended in the same way. What must outlive the daemon is in `Records`, in the mounts themselves
and in their block servers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.errors import BootseerError, NotFoundError, UnavailableError
from bootseer.kernel import mount as mounts
from bootseer.kernel.child import ended
from bootseer.kernel.unmounts import Unmounts
from bootseer.loglimit import USER
from bootseer.mountrecords import Record, Records
from bootseer.node import places
from bootseer.node.accounts import ROOT
from bootseer.node.loop import Loop
from bootseer.node.protocol import Mount, NodeReply
from bootseer.node.session import Session
from bootseer.node.worker import Worker, Workers

log = logging.getLogger(__name__)

_RETRY_SECONDS = 30.0


class MountRecord(Record, kw_only=True):
    """``session`` None: the mount is a job's."""

    mount: Mount
    session: Session | None = None


class Entry:
    """A mount; ``pidfd`` is that of its session's leader, -1 without one. ``making``: the process that mounts it."""

    def __init__(self, record: MountRecord, pidfd: int) -> None:
        self.record, self.pidfd = record, pidfd
        self.making: Worker | None = None
        self.watch = -1
        """By which `Unmounts` tells of its end."""

    @property
    def mount(self) -> Mount:
        return self.record.mount


class Entries:
    """All of them, in the folder ``places``; ``records``: what is known of them, ``state_dir``: their block servers."""

    def __init__(self, loop: Loop, workers: Workers, records: Path, places: Path, state_dir: Path) -> None:
        self._loop, self._workers, self._records = loop, workers, Records(records, MountRecord)
        self._places, self._state = places, state_dir
        self._entries: dict[str, Entry] = {}
        self._unmounts = Unmounts()
        self._lingering: dict[int, int] = {}
        """Watch -> user."""
        if self._unmounts.fileno() >= 0:
            loop.watch(self._unmounts.fileno(), self._see_unmounts)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def lingering(self) -> int:
        """Mounts that were ended, but that somebody still uses, and with them their block servers."""
        self._see_unmounts()
        return len(self._lingering)

    def held(self) -> list[int]:
        """For which user each mount is held, those that linger among them."""
        self._see_unmounts()
        return [*(entry.mount.uid for entry in self._entries.values()), *self._lingering.values()]

    def mounts(self, uid: int) -> list[Mount]:
        """Those that user ``uid`` may see, by id."""
        found = [entry.mount for _, entry in sorted(self._entries.items())]
        return [mount for mount in found if uid in (0, mount.uid)]

    def mounted(self, uid: int, id: str) -> Entry:
        """The mount with this id or folder that user ``uid`` may use."""
        for mount in self.mounts(uid):
            if id in (mount.id, mount.folder):
                if mount.state == "mounted":
                    return self._entries[mount.id]
                raise UnavailableError(f"{mount.id} is {mount.state} just now", hint="wait for that, then try again")
        raise NotFoundError(f"user {uid} has no mount {id[:200]!r}", hint="bootseer image status lists them")

    def add(self, record: MountRecord, pidfd: int) -> Entry:
        """A mount that is about to be made. Raises `BootseerError` when it cannot be written down."""
        entry = self._enter(record, pidfd)
        if error := self.keep(entry, record.mount):
            self.end(entry)
            raise error
        return entry

    def keep(self, entry: Entry, mount: Mount) -> BootseerError | None:
        """From now on ``mount`` is what is known of it; the error is why the next daemon will not know."""
        entry.record.mount = mount
        if mount.state == "mounted":
            self._watch(entry)
        try:
            self._records.save(entry.record)
        except BootseerError as exc:
            return exc
        return None

    def end(self, entry: Entry, account: str = ROOT, tell: Callable[[NodeReply], object] = lambda _: None) -> None:
        """Unmount for ``account``, and ``tell`` how that went. What fails is tried again later; nobody can use the
        mount from now on."""
        mount = entry.mount
        killed = mount.state != "mounted"
        if error := self.keep(entry, msgspec.structs.replace(mount, state="ending")):
            log.warning("%s; it ends all the same", error, extra={USER: mount.uid})

        def work() -> NodeReply:
            places.remove(self._places / mount.id, self._state, killed=killed)
            return NodeReply()

        def finish(reply: NodeReply) -> None:
            tell(reply)
            if reply.code:
                text = "%s has not ended, trying again in %.0f s: %r"
                log.warning(text, mount.id, _RETRY_SECONDS, reply.error, extra={USER: mount.uid})
                self._loop.later(entry, _RETRY_SECONDS, lambda: self.end(entry))
                return
            del self._entries[mount.id]
            self._see_unmounts()
            if entry.watch >= 0:
                text = "%s has ended, but user %d still uses it: it counts until that ends"
                log.info(text, mount.id, mount.uid, extra={USER: mount.uid})
                self._lingering[entry.watch] = mount.uid
            if entry.pidfd >= 0:
                self._loop.forget(entry.pidfd)
                os.close(entry.pidfd)
                entry.pidfd = -1
            self._records.delete(mount.id)

        self._workers.start(account, "unmount", work, finish)

    def adopt(self) -> None:
        """Go on with the mounts of an earlier daemon; end those whose session has ended or that were not done."""
        self._records.clean()
        known = self._records.all()
        left = {path.name for path in self._places.iterdir()} - {record.id for record in known}
        for name in sorted(left):
            folder = str(places.root_of(self._places / name))
            known.append(MountRecord(id=name, mount=Mount(id=name, folder=folder, reference="", uid=0)))
        for record in known:
            whole, pidfd = record.mount.state == "mounted" and mounts.is_mounted(record.mount.folder), -1
            if whole and record.session is not None:
                try:
                    pidfd = record.session.reopened()
                except OSError:
                    whole = False
            entry = self._enter(record, pidfd)
            if whole:
                self._watch(entry)
            log.info("%s of an earlier daemon is %s", record.mount.id, "adopted" if whole else "ended")
            if not whole:
                self.end(entry)

    def _enter(self, record: MountRecord, pidfd: int) -> Entry:
        entry = self._entries[record.mount.id] = Entry(record, pidfd)
        if pidfd >= 0:
            self._loop.watch(pidfd, lambda: self._see_session_end(entry))
        return entry

    def _see_session_end(self, entry: Entry) -> None:
        if entry.pidfd < 0 or not ended(entry.pidfd):
            return
        self._loop.forget(entry.pidfd)
        if entry.making is not None:
            entry.making.give_up("its session has ended")
        elif entry.mount.state == "mounted":
            log.info("%s ends with its session", entry.mount.id, extra={USER: entry.mount.uid})
            self.end(entry)

    def _watch(self, entry: Entry) -> None:
        if entry.watch < 0:
            entry.watch = self._unmounts.watch(places.tree_of(self._places / entry.mount.id))

    def _see_unmounts(self) -> None:
        if gone := set(self._unmounts.ended()):
            self._lingering = {watch: uid for watch, uid in self._lingering.items() if watch not in gone}
            for entry in self._entries.values():
                if entry.watch in gone:
                    entry.watch = -1
