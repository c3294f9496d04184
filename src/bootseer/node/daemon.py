"""The node daemon: who may ask for what, and what becomes of it.

Concurrency: one thread, one loop, which never waits for anything but events. What takes time is done by forked
processes (`Worker`). A mount has one of them at a time: it is made, then it may be ended, then its record goes; what
was made by half is ended in the same way. What must outlive the daemon is in `Records`, in the mounts themselves and in
their block servers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer import __version__, image, oci
from bootseer.config import Config
from bootseer.errors import (
    BootseerError,
    ConfigError,
    NotFoundError,
    PrivilegeError,
    UnavailableError,
    UnsupportedError,
    from_os_error,
)
from bootseer.folders import private_folder
from bootseer.image.lookup import readable_for
from bootseer.kernel import mount as mounts
from bootseer.kernel import procfs
from bootseer.kernel.child import ended
from bootseer.kernel.flock import lock
from bootseer.node import access, places, protocol
from bootseer.node.door import Client, Door
from bootseer.node.loop import Loop
from bootseer.node.protocol import Mount, NodeStatus, Reply, Request
from bootseer.node.records import Record, Records, Session
from bootseer.node.worker import Worker
from bootseer.objects import open_store

log = logging.getLogger(__name__)

MAX_RUNNING, MAX_MOUNTS = 8, 32
"""Of one user; root may have any number."""
_RETRY_SECONDS = 30.0
_LOCK_SECONDS = 20.0


class _Entry:
    """A mount; ``pidfd`` is that of its session's leader, -1 without one."""

    def __init__(self, record: Record, pidfd: int) -> None:
        self.record, self.pidfd = record, pidfd
        self.making: Worker | None = None


class Daemon:
    """Serves until it is drained, or an exception such as that of a signal ends `run`; its mounts stay."""

    def __init__(self, config: Config) -> None:
        """Raises `PrivilegeError` unless root calls, `ConfigError` when others could replace the folder of the socket,
        `UnavailableError` when another daemon serves there, or processes of an earlier one do not end."""
        if os.geteuid() != 0:
            raise PrivilegeError("the node daemon needs root", hint="run with sudo, or install its unit")
        os.environ.pop("SUDO_UID", None)  # who became root by sudo is a user like others here
        self._config = config
        self._folder = private_folder(Path(config.node_dir))
        self._state = private_folder(Path(config.state_dir))
        self._records = Records(private_folder(self._folder, sub="records"))
        self._places = private_folder(self._folder, sub="mounts")
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not lock(self._lock, _LOCK_SECONDS):
            os.close(self._lock)
            raise UnavailableError(f"another node daemon serves in {self._folder}", hint="look at bootseer node status")
        self._places.chmod(0o711)
        self._folder.chmod(0o755)
        self._loop = Loop()
        self._door = Door(protocol.socket_path(str(self._folder)), self._loop, self._serve)
        self._entries: dict[str, _Entry] = {}
        self._running: Counter[int] = Counter()
        self._draining = False
        self._started = time.time()

    def run(self) -> None:
        """Adopt what an earlier daemon has mounted and serve. Returns once drained. Raises `BootseerError`."""
        self._adopt()
        with self._door.opened():
            log.info("the node daemon serves in %s", self._folder)
            _tell_systemd()
            while not self._draining or self._entries or self._running.total():
                self._loop.turn()
        log.info("the node daemon ends: it is drained")

    # -- requests --------------------------------------------------------------------------------------------------

    def _serve(self, client: Client, request: Request) -> None:
        kinds = {
            "mount": self._mount,
            "unmount": self._unmount,
            "ready": self._ask_server,
            "look": self._ask_server,
            "mounts": self._list,
            "node": self._status,
            "drain": self._drain,
        }
        if request.do not in kinds:
            raise ConfigError(f"the node daemon of bootseer {__version__} cannot do {request.do[:64]!r}")
        client.asked = request.do
        kinds[request.do](client, request)

    def _mount(self, client: Client, request: Request) -> None:
        owner = client.uid if request.user == -1 else request.user
        if client.uid not in (0, owner):
            raise PrivilegeError(f"user {client.uid} cannot mount for user {owner}", hint="only root can")
        protocol.check_word(request.job, "job")
        protocol.check_word(request.profile, "profile")
        if unknown := sorted(set(request.logins) - set(protocol.LOGINS)):
            raise ConfigError(f"logins cannot come from the variable {unknown[0][:64]!r}")
        if len(request.ref.encode(errors="replace")) > protocol.MAX_REF:
            raise ConfigError(f"the image's name is longer than {protocol.MAX_REF} bytes: {request.ref[:64]}...")
        reference = oci.Reference.parse(request.ref)
        if not reference.registry:
            raise UnsupportedError(
                "the node daemon mounts images of registries, not those in files", hint="have root mount it on a DIR"
            )
        if self._draining:
            raise UnavailableError("the node daemon is being drained: it mounts nothing more", hint="ask root")
        if client.uid and sum(one.record.mount.uid == owner for one in self._entries.values()) >= MAX_MOUNTS:
            raise UnavailableError(f"user {owner} has {MAX_MOUNTS} mounts", hint="bootseer unmount ends one")
        self._check_running(client)
        session, pidfd = (None, -1) if request.job else _session_of(client, request.process)
        place = self._places / secrets.token_hex(6)
        made = Mount(
            id=place.name, folder=str(places.root_of(place)), reference=str(reference), uid=owner, job=request.job,
            made=time.time(),
        )  # fmt: skip
        entry = _Entry(Record(mount=made, session=session), pidfd)
        self._entries[made.id] = entry
        self._watch_session(entry)
        log.info("user %d has %s mounted as %s for user %d", client.uid, reference, made.id, owner)

        def work() -> Reply:
            store, user = open_store(self._config.store_url), access.user_of(owner)
            asker = access.Asker(user, request.logins, client.pid)
            record = readable_for(
                reference, store, self._config, lambda ref: access.digest_for(asker, ref, self._config)
            )
            config = msgspec.structs.replace(record.config.config or oci.ContainerConfig(), labels=None)
            if len(msgspec.json.encode(config)) > protocol.MAX_CONFIG:
                raise UnsupportedError(f"the configuration of {reference} has more than {protocol.MAX_CONFIG} bytes")
            places.make(place, user)
            image.mount(
                reference, places.tree_of(place), store_url=store.url, config=self._config,
                job=request.profile or None, writable=False, record=record,
            )  # fmt: skip
            places.show(place, user)
            return Reply(mount=msgspec.structs.replace(made, image=record.image, state="mounted", config=config))

        def finish(reply: Reply) -> None:
            entry.making = None
            if reply.mount is not None:
                done = msgspec.structs.replace(reply.mount, config=None)
                if error := self._keep(entry, done):
                    reply = protocol.failure(error)
            if not self._door.answer(client, reply) or reply.mount is None:
                self._end(entry, None)

        if error := self._keep(entry, made):
            self._end(entry, None)
            raise error
        entry.making = self._start(client, client.uid, "mount", work, finish)

    def _unmount(self, client: Client, request: Request) -> None:
        entry = self._mounted(client, request.id)
        self._check_running(client)
        log.info("user %d ends %s", client.uid, entry.record.mount.id)
        self._end(entry, client)

    def _ask_server(self, client: Client, request: Request) -> None:
        """Tell the block server of a mount that its job is ready, or answer with its counters."""
        tree = places.tree_of(self._places / self._mounted(client, request.id).record.mount.id)
        self._check_running(client)

        def work() -> Reply:
            mounted = image.attach(tree, self._state)
            if request.do == "look":
                return Reply(tree=mounted.status())
            mounted.ready()
            return Reply()

        self._start(client, client.uid, request.do, work, lambda reply: self._door.answer(client, reply))

    def _list(self, client: Client, request: Request) -> None:
        found = [entry.record.mount for _, entry in sorted(self._entries.items())]
        after = [one for one in found if client.uid in (0, one.uid) and one.id > request.id]
        self._door.answer(client, Reply(mounts=after[: protocol.PAGE]))

    def _status(self, client: Client, _: Request) -> None:
        status = NodeStatus(
            pid=os.getpid(),
            version=__version__,
            started=self._started,
            draining=self._draining,
            mounts=len(self._entries),
            running=self._running.total(),
            connections=len(self._door),
            done=dict(self._door.done),
            failed=dict(self._door.failed),
            cgroup=_cgroup(),
        )
        self._door.answer(client, Reply(node=status))

    def _drain(self, client: Client, _: Request) -> None:
        if client.uid:
            raise PrivilegeError("draining the node daemon needs root", hint="run with sudo")
        log.info("the node daemon ends after its %d mounts", len(self._entries))
        self._draining = True
        self._door.answer(client, Reply())

    # -- mounts ----------------------------------------------------------------------------------------------------

    def _mounted(self, client: Client, id: str) -> _Entry:
        """The mount with this id or folder that the client's user may use."""
        for entry in self._entries.values():
            mount = entry.record.mount
            if id in (mount.id, mount.folder) and client.uid in (0, mount.uid):
                if mount.state == "mounted":
                    return entry
                raise UnavailableError(f"{mount.id} is {mount.state} just now", hint="wait for that, then try again")
        raise NotFoundError(f"user {client.uid} has no mount {id[:200]!r}", hint="bootseer image status lists them")

    def _check_running(self, client: Client) -> None:
        running = self._running[client.uid]
        if client.uid and running >= MAX_RUNNING:
            raise UnavailableError(f"{running} requests of user {client.uid} are being worked off", hint="try again")

    def _start(
        self, client: Client | None, uid: int, name: str, work: Callable[[], Reply], finish: Callable[[Reply], object]
    ) -> Worker | None:
        """Have a process do ``work`` for user ``uid``; it is given up when ``client`` ends. ``finish`` comes later."""

        def end(reply: Reply) -> None:
            self._running[uid] -= 1
            finish(reply)

        self._running[uid] += 1
        try:
            worker = Worker(self._loop, name, self._lock, work, end)
        except OSError as exc:
            error = from_os_error(exc, f"work off a {name} request")
            self._loop.later(finish, 0.0, lambda: end(protocol.failure(error)))
            return None
        if client is not None:
            client.dropped = lambda: worker.give_up("its client has ended")
        return worker

    def _keep(self, entry: _Entry, mount: Mount) -> BootseerError | None:
        """From now on ``mount`` is what is known of it; the error is why the next daemon will not know."""
        entry.record.mount = mount
        try:
            self._records.save(entry.record)
        except OSError as exc:
            return from_os_error(exc, f"keep the record of {mount.id}")
        return None

    def _watch_session(self, entry: _Entry) -> None:
        if entry.pidfd >= 0:
            self._loop.watch(entry.pidfd, lambda: self._see_session_end(entry))

    def _see_session_end(self, entry: _Entry) -> None:
        if entry.pidfd < 0 or not ended(entry.pidfd):
            return
        self._loop.forget(entry.pidfd)
        if entry.making is not None:
            entry.making.give_up("its session has ended")
        elif entry.record.mount.state == "mounted":
            log.info("%s ends with its session", entry.record.mount.id)
            self._end(entry, None)

    def _end(self, entry: _Entry, client: Client | None) -> None:
        """Unmount, and tell ``client``. What fails is tried again later; nobody can use the mount from now on."""
        mount = entry.record.mount
        killed = mount.state != "mounted"
        if error := self._keep(entry, msgspec.structs.replace(mount, state="ending")):
            log.warning("%s; it ends all the same", error)

        def work() -> Reply:
            places.remove(self._places / mount.id, self._state, killed=killed)
            return Reply()

        def finish(reply: Reply) -> None:
            if client is not None:
                self._door.answer(client, reply)
            if reply.code:
                log.warning("%s has not ended, trying again in %.0f s: %r", mount.id, _RETRY_SECONDS, reply.error)
                self._loop.later(entry, _RETRY_SECONDS, lambda: self._end(entry, None))
                return
            del self._entries[mount.id]
            if entry.pidfd >= 0:
                self._loop.forget(entry.pidfd)
                os.close(entry.pidfd)
                entry.pidfd = -1
            self._records.delete(mount.id)

        self._start(None, client.uid if client else 0, "unmount", work, finish)

    def _adopt(self) -> None:
        """Go on with the mounts of an earlier daemon; end those whose session has ended or that were not done."""
        known = self._records.load()
        left = {path.name for path in self._places.iterdir()} - {record.mount.id for record in known}
        for name in sorted(left):
            folder = str(places.root_of(self._places / name))
            known.append(Record(mount=Mount(id=name, folder=folder, reference="", uid=0)))
        for record in known:
            whole, pidfd = record.mount.state == "mounted" and mounts.is_mounted(record.mount.folder), -1
            if whole and record.session is not None:
                try:
                    pidfd = record.session.reopened()
                except OSError:
                    whole = False
            entry = self._entries[record.mount.id] = _Entry(record, pidfd)
            self._watch_session(entry)
            log.info("%s of an earlier daemon is %s", record.mount.id, "adopted" if whole else "ended")
            if not whole:
                self._end(entry, None)


def _session_of(client: Client, alone: bool) -> tuple[Session, int]:
    with contextlib.suppress(OSError):
        session, pidfd = Session.of(client.pid, alone=alone)
        if not ended(client.pidfd):  # else the number may have been another process's
            return session, pidfd
        os.close(pidfd)
    raise UnavailableError(
        "the first process of the client's session has ended: nothing would end the mount", hint="mount it for a job"
    )


def _cgroup() -> str:
    """The path of this process in the hierarchy of systemd, or of cgroup v2; empty without one."""
    return next((path for controllers, path in procfs.cgroups() if controllers in ("", "name=systemd")), "")


def _tell_systemd() -> None:
    """Say that clients are served, where the unit has ``Type=notify`` (sd_notify(3))."""
    if address := os.environ.pop("NOTIFY_SOCKET", ""):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"READY=1", address.replace("@", "\0", 1) if address.startswith("@") else address)
