"""Why a login at a NameNode failed, and what both mechanisms of one have in common."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple, Protocol

from bootseer.errors import BootseerError, ConfigError, PrivilegeError
from bootseer.hdfs import nameservice
from bootseer.kernel import mount as mounts
from bootseer.kernel.links import believed

QOPS = ("auth", "auth-int", "auth-conf")
"""Qualities of protection, the cheapest first: who it is; that nobody changed the bytes; that nobody reads them."""

VARIABLES = ("KRB5CCNAME", "HADOOP_TOKEN_FILE_LOCATION")
"""Where they say another thing, this process is somebody else."""

_NAMES = dict(zip(("authentication", "integrity", "privacy"), QOPS, strict=True))


class LoginFailed(OSError):
    """``kind`` is the error that it is for the user. ``passing``: a later try may work, without anything done here."""

    def __init__(
        self, why: str, hint: str, kind: type[BootseerError] = PrivilegeError, *, passing: bool = False
    ) -> None:
        super().__init__(why)
        self.why, self.hint, self.kind, self.passing = why, hint, kind, passing

    def error(self, doing: str) -> BootseerError:
        return self.kind(f"cannot {doing}: {self.why}", hint=self.hint)


class Identity(NamedTuple):
    """Who logs in: ``service``, the name of the NameNodes ("": one by its address); for whom it acts (``proxied``, "":
    for itself); where its ``tickets`` and its ``token_file`` are ("": nobody knows; none)."""

    service: str
    proxied: str
    tickets: str
    token_file: str

    @classmethod
    def now(cls, service: str, proxied: str) -> Identity:
        """As the environment says now: who it is stays so, whatever the environment says later."""
        tickets, token_file = (os.environ.get(name, "") for name in VARIABLES)
        if nameservice.folder():  # without the site's settings no ticket is used
            tickets = tickets or default_tickets()
        return cls(service, proxied, tickets, token_file)


def opened(path: str) -> BinaryIO:
    """A file of the environment, which may be a FIFO. `OSError`."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def default_tickets() -> str:
    """Where tickets are by krb5.conf while ``KRB5CCNAME`` says nothing; "" while it does, and without Kerberos."""
    if os.environ.get("KRB5CCNAME"):
        return ""
    try:
        lib = ctypes.CDLL("libkrb5.so.3")
    except OSError:
        return ""
    context, lib.krb5_cc_default_name.restype = ctypes.c_void_p(), ctypes.c_char_p
    if lib.krb5_init_context(ctypes.byref(context)):
        return ""
    try:
        return os.fsdecode(lib.krb5_cc_default_name(context) or b"")
    finally:
        lib.krb5_free_context(context)


def check_own(tickets: str) -> None:
    """Raise `LoginFailed` for the `default_tickets` where somebody else was quicker to make them, in a folder in which
    all may make files: as whoever that is, this process would write files that are theirs. A file that is mounted there
    root has put there."""
    kind, _, path = tickets.partition(":") if ":" in tickets else ("FILE", "", tickets)
    path = path.lstrip(":")
    try:
        made, folder = os.lstat(path).st_uid, os.stat(os.path.dirname(path))
    except OSError:  # the library says what is wrong
        return
    if kind not in ("FILE", "DIR") or folder.st_mode & 0o1002 != 0o1002 or made == folder.st_uid:
        return
    if not believed(made) and not mounts.is_mounted(path):
        hint = "have them or root remove these, then kinit; KRB5CCNAME names others"
        raise LoginFailed(f"the tickets in {tickets} belong to user {made}", hint, passing=True)


class Seal(Protocol):
    """What the bytes of a connection go through, in order, each message whole."""

    def wrap(self, data: bytes) -> bytes: ...

    def unwrap(self, data: bytes) -> bytes:
        """`LoginFailed` for a message that is not the other side's next one."""


class Mechanism(Seal, Protocol):
    """One side of a login. ``qop``: what was agreed on; ``user``: who this process is then, as far as is known."""

    qop: str
    user: str

    def answer(self, challenge: bytes) -> bytes:
        """The answer to a message of the server. `LoginFailed`."""

    def finish(self, last: bytes) -> None:
        """`LoginFailed` unless the server, whose last message is ``last``, has proved who it is."""


def qops(setting: str, name: str = "hadoop.rpc.protection") -> Sequence[str]:
    """What a site's setting allows (``authentication``, ``integrity,privacy``), and what is stronger than all of that;
    "": everything. `ConfigError` for other words: nobody knows how strong they were meant."""
    words = [each.strip().lower() for each in setting.split(",") if each.strip()]
    if unknown := [word for word in words if word not in _NAMES]:
        raise ConfigError(f"{name} has {unknown[0]!r}", hint=f"it is a list of {', '.join(_NAMES)}")
    named = [_NAMES[word] for word in words]
    strongest = max((QOPS.index(each) for each in named), default=-1)
    return [*named, *QOPS[strongest + 1 :]]
