"""Asking the node daemon: what the command line and other programs use as any user. Never blocks beyond a deadline."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time

import msgspec

from bootseer import config as settings
from bootseer import oci
from bootseer.blocks.tree import TreeStatus
from bootseer.config import Config
from bootseer.errors import (
    BootseerError,
    ConfigError,
    NotFoundError,
    PrivilegeError,
    UnavailableError,
    from_exit_code,
)
from bootseer.node.protocol import (
    LOGINS,
    MAX_REPLY,
    REQUEST_SECONDS,
    VERSION,
    Mount,
    NodeReply,
    NodeRequest,
    NodeStatus,
    credentials,
    socket_path,
)
from bootseer.oci.credentials import Logins
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 30.0
"""The daemon answers at once, or, when it has work to do first, gives that up by itself; a client waits this much
longer."""


class AbsentError(UnavailableError):
    """There is no node daemon on this node."""


def mount_image(
    ref: str,
    *,
    config: Config | None = None,
    job: str | None = None,
    process: bool = False,
    user: int | None = None,
    profile: str = "",
) -> Mount:
    """Have the converted image ``ref`` mounted read-only, in a folder that only ``user`` (a number; None: whoever asks;
    others only for root) can enter, and where this user owns what root does in the image. It ends with `unmount`, at
    the latest with the session of this process (with ``process``: with this process), or, when ``job`` names one, with
    `unmount_job`. ``profile`` says whose earlier starts to prefetch by. Raises `AbsentError`, `PrivilegeError` (that
    user's logins may not read it at the registry it was converted from), `NotFoundError` (no such image, or not
    converted), `UnavailableError`, `UnsignedError`, `ConfigError`, and what `bootseer.image.mount` raises."""
    logins = {name: os.path.abspath(os.environ[name]) for name in LOGINS if os.environ.get(name)}
    mount = _ask(
        "mount",
        config,
        ref=ref,
        job=job or "",
        process=process,
        profile=profile,
        user=-1 if user is None else user,
        logins=logins if user is None else {},
    ).mount
    assert mount is not None
    return mount


def unmount(id: str, *, config: Config | None = None) -> None:
    """End the mount with this id or folder. Raises `NotFoundError` when this user has none, `BootseerError`."""
    _ask("unmount", config, id=id)


def unmount_job(job: str, *, config: Config | None = None) -> list[Mount]:
    """End all mounts of ``job`` that this user may end, and return them. One that cannot be ended, as it is being made,
    keeps no other from its end; then raises as `unmount`. Raises `ConfigError` for no job."""
    if not job:
        raise ConfigError("no job is named to end the mounts of", hint="a mount for no job ends with its session")
    until, ended, failed = time.monotonic() + REQUEST_SECONDS, [], None
    for mount in mounts(config=config):
        if mount.job != job or mount.state == "ending":
            continue
        try:
            unmount(mount.id, config=config)
            ended.append(mount)
        except NotFoundError:  # ended meanwhile
            pass
        except BootseerError as exc:
            failed = failed or exc
            if time.monotonic() >= until:
                break
    if failed:
        raise failed
    return ended


def ready(id: str, *, config: Config | None = None) -> None:
    """The job that uses the mount is ready: recording may stop, and its trace be published."""
    _ask("ready", config, id=id)


def status(id: str, *, config: Config | None = None) -> TreeStatus:
    """Counters of the block server of a mount."""
    tree = _ask("look", config, id=id).tree
    assert tree is not None
    return tree


def digest_with(ref: oci.Reference, logins: Logins, *, config: Config | None = None) -> str:
    """The digest of the manifest that the registry of ``ref`` gives to somebody with these ``logins`` and no others.
    For root. Raises `AbsentError`, `PrivilegeError`, `NotFoundError`, `UnavailableError` (also when it takes longer
    than a minute)."""
    with os.fdopen(os.memfd_create("logins", os.MFD_CLOEXEC), "wb") as file:
        file.write(msgspec.json.encode(logins))
        file.flush()
        return _ask("digest", config, file.fileno(), ref=str(ref)).digest


def mounts(*, config: Config | None = None) -> list[Mount]:
    """The mounts of this user; all of them for root. Raises `AbsentError`, `UnavailableError`."""
    found: list[Mount] = []
    while page := _ask("mounts", config, id=found[-1].id if found else "").mounts:
        found += page
    return found


def node(*, config: Config | None = None) -> NodeStatus:
    """The daemon's own state. Raises `AbsentError`, `UnavailableError`."""
    found = _ask("node", config).node
    assert found is not None
    return found


def drain(*, config: Config | None = None) -> None:
    """Have the daemon refuse new mounts and end when none is left. Raises `PrivilegeError` unless root asks."""
    _ask("drain", config)


def in_daemon_cgroup(config: Config) -> Config:
    """These settings, so that the block servers that root starts go where the daemon's are: a tree is shared by the
    jobs of a node, and the cgroup of the job that mounts it first ends with this job. Unchanged where the settings name
    a cgroup themselves, for other users, and, with a line in the log, where no daemon answers."""
    if os.geteuid() or config.server_cgroup:
        return config
    try:
        return msgspec.structs.replace(config, server_cgroup=node(config=config).cgroup)
    except BootseerError as exc:
        log.info("%s; block servers stay in the cgroup of this process", exc.message)
        return config


def _connect(config: Config) -> socket.socket:
    path = socket_path(config.node_dir)
    until = time.monotonic() + _CONNECT_SECONDS
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.settimeout(_CONNECT_SECONDS)
        while True:
            try:
                sock.connect(str(path))
                break
            except BlockingIOError:  # its queue is full
                if time.monotonic() >= until:
                    raise UnavailableError(f"the node daemon at {path} accepts nobody", hint="try again") from None
                time.sleep(0.05)
            except OSError as exc:
                raise AbsentError(
                    f"no node daemon answers at {path}: {exc.strerror or exc}",
                    hint="have root start it (bootseer node serve), or mount on a DIR as root",
                ) from None
        if credentials(sock)[1] != 0:
            raise PrivilegeError(
                f"the socket {path} is not root's", hint="somebody planted it; tell your administrator"
            )
        undo.pop_all()
    return sock


def _ask(do: str, config: Config | None, *fds: int, **fields: object) -> NodeReply:
    path = socket_path((config := config or settings.load()).node_dir)
    try:
        packet = msgspec.json.encode(NodeRequest(do=do, version=VERSION, **fields))  # type: ignore[arg-type]
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{exc.object!r} is no text in UTF-8", hint="the node daemon takes no other") from None
    with _connect(config) as sock:
        try:
            with contextlib.suppress(BrokenPipeError):  # it has answered already: this user has too many connections
                socket.send_fds(sock, [packet], fds)
            slow = do not in ("mounts", "node", "drain")
            sock.settimeout(_ANSWER_SECONDS + (REQUEST_SECONDS if slow else 0.0))
            try:
                answer = sock.recv(MAX_REPLY)
            except ConnectionResetError:  # it has answered without reading the request: that is told first
                answer = sock.recv(MAX_REPLY)
        except OSError as exc:
            raise UnavailableError(
                f"the node daemon at {path} does not answer: {exc}", hint="its log says more"
            ) from None
    try:
        reply = json_as(answer, NodeReply)
    except ValueError:
        why = "answers something else" if answer else "ended before it answered"
        raise UnavailableError(f"the node daemon at {path} {why}", hint="try again; is it of this version?") from None
    if reply.code:
        raise from_exit_code(reply.code, reply.error, hint=reply.hint)
    return reply
