"""Whether somebody may read an image: a user of this node, by the logins that this user has, or a pod, by its own.

The registry is asked. Logins of users may name programs (credential helpers), and what those run may be the user's own.
So the question is asked by a process that has become the user (for a pod: nobody), in a session, keyring and process
namespace of its own: all that it starts ends with it. It reads nothing of the settings but which registries have no
TLS, and asks no mirrors, as these let anybody in."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - as the user it could not be read where root alone sees this program
import os
import pwd
import resource
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bootseer import oci
from bootseer.config import Config
from bootseer.errors import BootseerError, PrivilegeError, UnavailableError, from_exit_code
from bootseer.kernel import bounds, child, libc, procfs
from bootseer.kernel import mount as mounts
from bootseer.kernel.child import close_others, die_with, ended
from bootseer.oci.credentials import Logins
from bootseer.wiretypes import json_as

_SECONDS = 60.0
_MEMORY = 2 << 30
_MAX_ANSWER = 1 << 16
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEPT = ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "ssl_cert_file", "ssl_cert_dir")
"""Variables of the daemon by which registries are reached."""


class _Answer(msgspec.Struct):
    """Of the process that asks: a digest, or an error."""

    digest: str = ""
    code: int = 0
    message: str = ""
    hint: str = ""


class User(NamedTuple):
    uid: int
    gid: int
    name: str
    home: str


NOBODY = User(65534, 65534, "nobody", "/nonexistent")


def user_of(uid: int) -> User:
    """Raises `PrivilegeError` for a number that this node has no user for."""
    try:
        found = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        raise PrivilegeError(f"this node has no user {uid}", hint="ask its administrator") from None
    return User(found.pw_uid, found.pw_gid, found.pw_name, found.pw_dir)


class Limits(NamedTuple):
    """Those of a process: its cgroups, and how early it is killed where memory is short."""

    cgroups: tuple[procfs.Cgroup, ...]
    score: int


def limits_of(pid: int, pidfd: int) -> Limits:
    """Raises `UnavailableError` when the process ``pidfd`` has ended: then ``pid`` may be another one's number."""
    try:
        score = int(Path(f"/proc/{pid}/oom_score_adj").read_text())
        found = Limits(tuple(procfs.cgroups(pid)), max(0, score))
    except (OSError, ValueError):
        found = None
    if found is None or ended(pidfd):
        raise UnavailableError("the process that asks has ended", hint="ask again")
    return found


class Asker(NamedTuple):
    """Who is to ask: ``user``, with the ``logins`` that these variables name, or with those ``given`` and no others,
    limited as a process with the limits ``like``."""

    user: User
    logins: Mapping[str, str]
    like: Limits
    given: Logins | None = None


def digest_for(asker: Asker, ref: oci.Reference, config: Config) -> str:
    """The digest of the manifest that the registry gives the user for ``ref``."""
    parent = os.getpid()
    said = child.answer("access check", lambda out: _apart(out, asker, ref, config, parent), _SECONDS, _MAX_ANSWER)
    try:
        answer = json_as(said, _Answer)
    except ValueError:
        raise UnavailableError(
            f"nobody could ask as user {asker.user.name} for {ref} within {_SECONDS:.0f} s",
            hint="do the logins of that user work? The log of the node daemon may say more",
        ) from None
    if answer.code:
        raise from_exit_code(answer.code, answer.message, hint=answer.hint)
    return answer.digest


def _apart(out: int, asker: Asker, ref: oci.Reference, config: Config, parent: int) -> int:
    """In a process that becomes nobody: the next one is the first of a process namespace, which ends with it."""
    die_with(parent)
    join(asker.like.cgroups)
    bounds.be_ended_early(asker.like.score)
    libc.unshare(libc.CLONE_NEWPID)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    close_others(out)
    pid = os.fork()
    if pid:
        os.close(out)
        os.waitpid(pid, 0)
        return 0
    answer = _Answer()
    try:
        _become(asker.user, config, asker.logins)
        answer.digest = oci.digest_for(ref, asker.given)
    except BootseerError as exc:
        answer = _Answer(code=exc.exit_code, message=exc.message, hint=exc.hint)
    except BaseException as exc:
        answer = _Answer(code=BootseerError.exit_code, message=f"cannot ask for {ref}: {exc!r}"[:1000])
    with contextlib.suppress(OSError):
        os.write(out, msgspec.json.encode(answer))
    os._exit(0)


def join(cgroups: Sequence[procfs.Cgroup]) -> None:
    """Be limited as who asks is, and end with its job: what a login runs is not to count for the daemon."""
    tops = [entry for entry in mounts.entries() if entry.fstype in ("cgroup", "cgroup2")]
    for controllers, path in cgroups:
        for top in tops:
            if set(controllers.split(",")) <= set(top.options) if controllers else top.fstype == "cgroup2":
                with contextlib.suppress(OSError):  # a hierarchy that is mounted elsewhere too, or not ours
                    Path(top.target, path.lstrip("/"), "cgroup.procs").write_text("0")


def _become(user: User, config: Config, logins: Mapping[str, str]) -> None:
    """Be ``user`` and nobody else, for good. Raises `OSError`."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(int(_SECONDS))
    os.setsid()
    for kind, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, _MEMORY)):
        resource.setrlimit(kind, (limit, limit))
    os.initgroups(user.name, user.gid)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    libc.hide()
    libc.die_with_parent()  # not before: a change of user clears it
    libc.leave_keyring()
    kept = {name: value for name, value in os.environ.items() if name.lower() in _KEPT}
    os.environ.clear()
    os.environ.update(kept, HOME=user.home, USER=user.name, LOGNAME=user.name, PATH=_PATH)
    os.environ.update(logins, XDG_RUNTIME_DIR=f"/run/user/{user.uid}")
    for name, value in kept.items():
        if "@" in value:  # the site's login at its proxy: used by this process, not seen by what it starts
            os.unsetenv(name)
    os.environ.update(BOOTSEER_CONFIG=os.devnull, BOOTSEER_PLAIN_HTTP=",".join(config.plain_http))
