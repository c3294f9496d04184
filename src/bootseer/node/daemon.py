"""The node daemon: who may ask for what, and what becomes of it.

Concurrency: one thread, one loop, which never waits for anything but events. What takes time is done by forked
processes (`Worker`). What it mounts is kept by `Entries`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from bootseer import __version__, build, image, oci
from bootseer.config import Config
from bootseer.errors import ConfigError, PrivilegeError, UnavailableError, UnsupportedError, logged
from bootseer.folders import private_folder
from bootseer.image.lookup import readable_for
from bootseer.kernel import libc, procfs
from bootseer.kernel.child import ended
from bootseer.kernel.flock import lock
from bootseer.kernel.parts import Part, tell_systemd
from bootseer.loglimit import USER
from bootseer.node import access, errand, places, protocol, thin
from bootseer.node.accounts import ROOT, Accounts, totals
from bootseer.node.door import Client, Door
from bootseer.node.entries import Entries, MountRecord
from bootseer.node.loop import Loop
from bootseer.node.protocol import Mount, NodeReply, NodeRequest, NodeStatus, PartStatus
from bootseer.node.session import Session
from bootseer.node.worker import Worker, Workers
from bootseer.objects import open_store

log = logging.getLogger(__name__)

MAX_MOUNTS = 32
"""Of one user; root may have any number."""
PART = "node"
"""Its name among the parts of the service."""
_LOCK_SECONDS = 20.0
_DRAIN_SECONDS = 1.0
_NICE = -10
"""Of this process, not of those that it starts: what one user has it start delays no other user's request."""


class Daemon:
    """Serves until the service is drained, or an exception such as that of a signal ends `run`; its mounts stay."""

    def __init__(
        self,
        config: Config,
        parts: Mapping[str, Part] | None = None,
        errand: Callable[[list[str], int], bool] | None = None,
    ) -> None:
        """``parts``: of the service, itself among them. ``errand`` does what a command line of root's says, for the
        child of this process, or, without a trace, does not. Raises `PrivilegeError` unless root calls,
        `ConfigError` when others could replace the folder of the socket, `UnavailableError` when another daemon serves
        there, or processes of an earlier one do not end."""
        if os.geteuid() != 0:
            raise PrivilegeError("the node daemon needs root", hint="run with sudo, or bootseer node install")
        os.environ.pop("SUDO_UID", None)  # who became root by sudo is a user like others here
        self._config, self._errand, self._stamp = config, errand, thin.stamp()
        self._version = build()  # now: others may be installed while this one serves
        self._parts = parts or {PART: Part(pid=os.getpid(), starts=1)}
        self._part = self._parts[PART]
        self._folder = private_folder(Path(config.node_dir))
        self._state = private_folder(Path(config.state_dir))
        records = private_folder(self._folder, sub="records")
        self._places = private_folder(self._folder, sub="mounts")
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not lock(self._lock, _LOCK_SECONDS):
            os.close(self._lock)
            raise UnavailableError(f"another node daemon serves in {self._folder}", hint="look at bootseer node status")
        self._places.chmod(0o711)
        self._folder.chmod(0o755)
        self._loop = Loop()
        self._accounts, self._totals = Accounts(), totals()
        path = protocol.socket_path(str(self._folder))
        self._door = Door(path, self._loop, self._accounts, self._totals.connections, self._serve)
        self._workers = Workers(self._loop, self._lock, self._totals.running)
        self._entries = Entries(self._loop, self._workers, records, self._places, self._state)
        self._started = time.time()

    def run(self) -> None:
        """Adopt what an earlier daemon has mounted and serve. Returns once all of the service is drained. Raises
        `BootseerError`."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # logins of pods pass through
        libc.hide()
        with logged(log.info, "the node daemon has no priority over its requests", kinds=OSError):
            if not os.getpriority(os.PRIO_PROCESS, 0):  # else whoever runs it has decided
                os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        self._entries.adopt()
        with self._door.opened():
            log.info("the node daemon serves in %s", self._folder)
            self._part.serves = True
            tell_systemd()
            while not self._part.draining or self._busy():
                self._loop.turn()
        log.info("the node daemon ends: it is drained")

    def _busy(self) -> bool:
        """Whether something is mounted, here or by another part, which tells nobody when it has done."""
        if others := any(part.mounts for part in self._parts.values()):
            self._loop.later(self, _DRAIN_SECONDS, lambda: None)
        return bool(others or self._entries or self._workers)

    # -- requests --------------------------------------------------------------------------------------------------

    def _serve(self, client: Client, request: NodeRequest) -> None:
        kinds = {
            "mount": self._mount,
            "unmount": self._unmount,
            "ready": self._ask_server,
            "look": self._ask_server,
            "mounts": self._list,
            "node": self._status,
            "drain": self._drain,
            "digest": self._digest,
            "errand": self._do_errand,
        }
        if request.do not in kinds:
            raise ConfigError(f"the node daemon of bootseer {__version__} cannot do {request.do[:64]!r}")
        client.asked = request.do
        kinds[request.do](client, request)

    def _mount(self, client: Client, request: NodeRequest) -> None:
        owner = client.uid if request.user == -1 else request.user
        if client.uid not in (0, owner):
            raise PrivilegeError(f"user {client.uid} cannot mount for user {owner}", hint="only root can")
        protocol.check_word(request.job, "job")
        protocol.check_word(request.profile, "profile")
        if unknown := sorted(set(request.logins) - set(protocol.LOGINS)):
            raise ConfigError(f"logins cannot come from the variable {unknown[0][:64]!r}")
        if len(request.ref.encode(errors="replace")) > protocol.MAX_REF:
            raise ConfigError(f"the image's name is longer than {protocol.MAX_REF} bytes: {request.ref[:64]}...")
        if oci.in_files(request.ref):
            raise UnsupportedError(
                "the node daemon mounts images of registries, not those in files", hint="have root mount it on a DIR"
            )
        reference = oci.Reference.parse(request.ref)
        if self._part.draining:
            raise UnavailableError("the node daemon is being drained: it mounts nothing more", hint="ask root")
        if client.uid:
            self._check_mounts(client.account)
        self._workers.check(client.account)
        session, pidfd = (None, -1) if request.job else _session_of(client, request.process)
        like = access.limits_of(client.pid, client.pidfd)
        place = self._places / secrets.token_hex(6)
        made = Mount(
            id=place.name, folder=str(places.root_of(place)), reference=str(reference), uid=owner, job=request.job,
            made=time.time(),
        )  # fmt: skip
        entry = self._entries.add(MountRecord(id=made.id, mount=made, session=session), pidfd)
        text = "user %d has %s mounted as %s for user %d"
        log.info(text, client.uid, reference, made.id, owner, extra={USER: client.account})

        def work() -> NodeReply:
            store, user = open_store(self._config.store_url), access.user_of(owner)
            asker = access.Asker(user, request.logins, like)
            record = readable_for(
                reference, store, self._config, lambda ref: access.digest_for(asker, ref, self._config)
            )
            config = msgspec.structs.replace(record.config.config or oci.ContainerConfig(), labels=None)
            if len(msgspec.json.encode(config)) > protocol.MAX_CONFIG:
                raise UnsupportedError(f"the configuration of {reference} has more than {protocol.MAX_CONFIG} bytes")
            places.make(place, user)
            image.mount(
                reference, places.tree_of(place), store_url=store.url, config=self._config,
                job=request.profile or None, owner=owner, writable=False, record=record,
            )  # fmt: skip
            places.show(place, user)
            return NodeReply(mount=msgspec.structs.replace(made, image=record.image, state="mounted", config=config))

        def finish(reply: NodeReply) -> None:
            entry.making = None
            if reply.mount is not None:
                done = msgspec.structs.replace(reply.mount, config=None)
                if error := self._entries.keep(entry, done):
                    reply = protocol.failure(error)
            if not self._door.answer(client, reply) or reply.mount is None:
                self._entries.end(entry)

        entry.making = self._start(client, "mount", work, finish)

    def _check_mounts(self, account: str) -> None:
        """Raises `UnavailableError` when ``account`` has too many, or all but root have."""
        held = Counter(map(self._accounts.of, self._entries.held()))
        hint = f"bootseer unmount ends one; {self._entries.lingering} have been ended, but are in use"
        if held[account] >= MAX_MOUNTS:
            raise UnavailableError(f"{account} has {held[account]} mounts", hint=hint)
        if (others := held.total() - held[ROOT]) >= self._totals.mounts:
            raise UnavailableError(f"the users of this node have {others} mounts", hint=hint)

    def _unmount(self, client: Client, request: NodeRequest) -> None:
        entry = self._entries.mounted(client.uid, request.id)
        self._workers.check(client.account)
        log.info("user %d ends %s", client.uid, entry.mount.id, extra={USER: client.account})
        self._entries.end(entry, client.account, lambda reply: self._door.answer(client, reply))

    def _ask_server(self, client: Client, request: NodeRequest) -> None:
        """Tell the block server of a mount that its job is ready, or answer with its counters."""
        tree = places.tree_of(self._places / self._entries.mounted(client.uid, request.id).mount.id)
        self._workers.check(client.account)

        def work() -> NodeReply:
            mounted = image.attach(tree, self._state)
            if request.do == "look":
                return NodeReply(tree=mounted.status())
            mounted.ready()
            return NodeReply()

        self._start(client, request.do, work, lambda reply: self._door.answer(client, reply))

    def _digest(self, client: Client, request: NodeRequest) -> None:
        """Ask a registry for somebody who is no user of this node and has just the logins that root gives: a process
        of its own reads them, and nothing of them is left in the memory of the daemon."""
        if client.uid:
            raise PrivilegeError("only root asks a registry for others", hint="run with sudo")
        if oci.in_files(request.ref):
            raise ConfigError(f"{request.ref[:64]!r} is no image in a registry")
        ref, file = oci.Reference.parse(request.ref), client.file
        like = access.limits_of(client.pid, client.pidfd)

        def work() -> NodeReply:
            given = protocol.read_logins(file)
            return NodeReply(digest=access.digest_for(access.Asker(access.NOBODY, {}, like, given), ref, self._config))

        self._start(client, "digest", work, lambda reply: self._door.answer(client, reply), *([file] * (file >= 0)))

    def _do_errand(self, client: Client, _: NodeRequest) -> None:
        """See `errand`."""
        if client.uid or client.file < 0 or self._errand is None or self._part.draining:
            raise PrivilegeError("the node daemon goes on no such errand")
        pid, pidfd, file, do, stamp = client.pid, client.pidfd, client.file, self._errand, self._stamp
        like = access.limits_of(pid, pidfd)

        def work() -> NodeReply:
            try:
                access.join(like.cgroups)
                done = do(*errand.become(pid, pidfd, file, stamp))
            except Exception as exc:
                raise UnavailableError(f"who asks has to do it: {exc}") from None
            return NodeReply() if done else protocol.failure(UnavailableError("who asks has to do it"))

        self._start(client, "errand", work, lambda reply: self._door.answer(client, reply), file, pidfd)

    def _list(self, client: Client, request: NodeRequest) -> None:
        after = [one for one in self._entries.mounts(client.uid) if one.id > request.id]
        self._door.answer(client, NodeReply(mounts=after[: protocol.PAGE]))

    def _status(self, client: Client, _: NodeRequest) -> None:
        status = NodeStatus(
            pid=os.getpid(),
            version=self._version,
            started=self._started,
            draining=self._part.draining,
            mounts=len(self._entries),
            lingering=self._entries.lingering,
            running=len(self._workers),
            connections=len(self._door),
            done=dict(self._door.done),
            failed=dict(self._door.failed),
            cgroup=_cgroup(),
            parts={
                name: PartStatus(part.pid, part.starts, part.serves, part.mounts) for name, part in self._parts.items()
            },
        )
        self._door.answer(client, NodeReply(node=status))

    def _drain(self, client: Client, _: NodeRequest) -> None:
        if client.uid:
            raise PrivilegeError("draining the node daemon needs root", hint="run with sudo")
        log.info("the service ends after its mounts, %d of users among them", len(self._entries))
        for part in self._parts.values():
            part.draining = True
        self._door.answer(client, NodeReply())

    def _start(
        self,
        client: Client,
        name: str,
        work: Callable[[], NodeReply],
        finish: Callable[[NodeReply], object],
        *fds: int,
    ) -> Worker | None:
        """Have a process do ``work``; it is given up when ``client`` ends."""
        worker = self._workers.start(client.account, name, work, finish, *fds)
        if worker is not None:
            client.dropped = lambda: worker.give_up("its client has ended")
        return worker


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
