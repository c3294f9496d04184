"""Kerberos by the system's ``libgssapi_krb5.so.2`` (RFC 4752, the client's side): the proof is a ticket of the user.

The library finds the tickets (``KRB5CCNAME``), gets those for services from the KDC, and makes new ones from a keytab
where ``KRB5_CLIENT_KTNAME`` names one. It reads the tickets anew at each login, so one that was renewed or replaced is
used at once. It asks a KDC with timeouts of its own, so that its caller waits for a thread, as for a name's address.

Concurrency: one thread logs in; then one may `wrap` while another one may `unwrap`. The library allows one at a time.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint32, c_void_p

from bootseer.errors import BootseerError, ConfigError, PrivilegeError, UnavailableError, UnsupportedError
from bootseer.hdfs.deadline import Workers
from bootseer.hdfs.sasl.login import QOPS, LoginFailed, check_own, default_tickets, opened

KDC = 4.0
"""Seconds for which a KDC is waited for."""

_KRB5 = b"\x2a\x86\x48\x86\xf7\x12\x01\x02\x02"
_HOSTBASED = _KRB5[:-1] + b"\x01\x04"
_PRINCIPAL = _KRB5 + b"\x01"
_FLAGS = 2 | 4 | 8 | 16 | 32  # mutual, replay, sequence, confidentiality, integrity
_OUT_OF_ORDER = 2 | 4 | 8 | 16  # duplicate, old, unsequenced, gap: no errors to the library
_MOST = b"\xff\xff\xff"  # bytes that a message to us may have

_AWAY = "check that a KDC of krb5.conf (KRB5_CONFIG) runs and is reachable from here"

# what the library says, but for names of files; the first match wins: (pattern, what to do, error, whether a later try
# may work)
_CAUSES: tuple[tuple[str, str, type[BootseerError], bool], ...] = (
    (
        r"revoked|entry in database has expired|[Pp]assword has expired",
        "ask who runs the KDC: the principal is locked or expired there",
        PrivilegeError,
        True,
    ),
    (r"expired", "kinit again, or kinit -R before a renewable ticket ends", PrivilegeError, True),
    (r"[Cc]lock skew|not yet valid", "set the clock of this machine, as NTP does", UnavailableError, True),
    (r"Cannot (contact|find) any KDC|Cannot resolve", _AWAY, UnavailableError, True),
    (
        r"KDC for|[Dd]efault realm|Server .*not found|realm",
        "compare the realm of klist, of krb5.conf (KRB5_CONFIG) and of dfs.namenode.kerberos.principal",
        ConfigError,
        False,
    ),
    (
        r"encryption type",
        "compare permitted_enctypes of krb5.conf (KRB5_CONFIG) with klist -e",
        ConfigError,
        False,
    ),
    (r"integrity check|Preauth|Client .*not found", "fetch the keytab anew (klist -k), or kinit", PrivilegeError, True),
    (r"configuration file|[Pp]rofile", "see krb5.conf (KRB5_CONFIG)", ConfigError, False),
    (r"credential|ticket|[Cc]ache|[Kk]eytab|KCM", "kinit, or set KRB5CCNAME to your tickets", PrivilegeError, True),
)


class _Buffer(ctypes.Structure):
    _fields_ = (("length", c_size_t), ("value", c_void_p))


class _Oid(ctypes.Structure):
    _fields_ = (("length", c_uint32), ("elements", c_void_p))


_kdcs = Workers("Kerberos")
_keep: list[object] = []


@functools.cache
def _lib() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libgssapi_krb5.so.2")
    except OSError as exc:
        hint = "install the package libgssapi-krb5-2 (krb5-libs)"
        raise LoginFailed(f"Kerberos needs libgssapi_krb5.so.2: {exc}", hint, UnsupportedError) from None
    number, handle, buffer, oid = POINTER(c_uint32), POINTER(c_void_p), POINTER(_Buffer), POINTER(_Oid)
    given = c_void_p
    for name, arguments in {
        "import_name": (buffer, oid, handle),
        "init_sec_context": (
            given,
            handle,
            given,
            oid,
            c_uint32,
            c_uint32,
            given,
            buffer,
            given,
            buffer,
            number,
            number,
        ),
        "inquire_context": (given, handle, handle, number, given, number, given, given),
        "display_name": (given, buffer, given),
        "krb5_ccache_name": (ctypes.c_char_p, given),
        "wrap": (given, c_int, c_uint32, buffer, POINTER(c_int), buffer),
        "unwrap": (given, buffer, buffer, POINTER(c_int), number),
        "display_status": (c_uint32, c_int, oid, number, buffer),
        "release_buffer": (buffer,),
        "release_name": (handle,),
        "delete_sec_context": (handle, given),
    }.items():
        function = getattr(lib, f"gss_{name}")
        function.argtypes, function.restype = [number, *arguments], c_uint32
    return lib


@functools.cache
def _oid(raw: bytes) -> _Oid:
    memory = ctypes.create_string_buffer(raw, len(raw))
    _keep.append(memory)
    return _Oid(len(raw), ctypes.cast(memory, c_void_p))


def _call(name: str, *arguments: object) -> int:
    """The status of a function; `LoginFailed` for an error."""
    minor = c_uint32()
    status: int = getattr(_lib(), f"gss_{name}")(byref(minor), *arguments)
    if status & 0xFFFF0000:
        why = (minor.value and _text(minor.value, 2)) or _text(status, 1)
        said = re.sub(r"\(filename: .*\)", "", why)
        known = next((cause for cause in _CAUSES if re.search(cause[0], said)), None)
        _, hint, kind, passing = known or ("", "see klist and krb5.conf (KRB5_CONFIG)", PrivilegeError, True)
        raise LoginFailed(f"Kerberos: {why}", hint, kind, passing=passing)
    return status


def _text(code: int, kind: int) -> str:
    out, more, minor = _Buffer(), c_uint32(), c_uint32()
    if _lib().gss_display_status(byref(minor), code, kind, byref(_oid(_KRB5)), byref(more), byref(out)):
        return ""
    return _taken(out).decode(errors="replace")


def _taken(buffer: _Buffer) -> bytes:
    data = ctypes.string_at(buffer.value, buffer.length) if buffer.value else b""
    _lib().gss_release_buffer(byref(c_uint32()), byref(buffer))
    return data


class _Given(_Buffer):
    """Bytes for the library, which stay in memory with it."""

    def __init__(self, data: bytes) -> None:
        self._memory = ctypes.create_string_buffer(data, len(data))
        super().__init__(len(data), ctypes.cast(self._memory, c_void_p))


def _keytab() -> str:
    """The keytab that tickets are to be made from, "" for none. Of one that is none the library says nothing."""
    if not (named := os.environ.get("KRB5_CLIENT_KTNAME", "")):
        return ""
    try:
        with opened(named.removeprefix("FILE:")) as file:
            return f"keytab {named}" if file.read(1) == b"\5" else f"{named} is no keytab"
    except OSError as exc:
        return f"keytab {named}: {exc.strerror}"


class Kerberos:
    """A login at the service ``name``: ``primary/host@REALM``, or ``primary@host`` where its realm is not known.
    ``tickets``: where they are, "": where the library looks by itself. ``seconds``: for which a KDC may be waited for,
    at most `KDC`."""

    def __init__(self, name: str, qops: Sequence[str], tickets: str = "", seconds: float = KDC) -> None:
        self._process, self._turn = os.getpid(), threading.Lock()
        self._tickets, self._seconds = tickets, min(seconds, KDC)
        self.qop = self.user = ""
        self._qops, self._ready = qops, False
        self._name, self._context = c_void_p(), c_void_p()
        kind = _oid(_PRINCIPAL if "/" in name else _HOSTBASED)
        _call("import_name", byref(_Given(name.encode())), byref(kind), byref(self._name))

    def __del__(self) -> None:
        if os.getpid() != self._process:  # another thread of the parent may have had the library's lock
            return
        minor = byref(c_uint32())
        if self._name:
            _lib().gss_release_name(minor, byref(self._name))
        if self._context:
            _lib().gss_delete_sec_context(minor, byref(self._context), None)

    def answer(self, challenge: bytes) -> bytes:
        if not self._ready:
            try:
                return _kdcs.call(lambda: self._step(challenge), self._seconds)
            except LoginFailed as exc:
                config = os.environ.get("KRB5_CONFIG", "")
                known = [self._tickets, _keytab()] if exc.kind is PrivilegeError else []
                if exc.kind is ConfigError and config and not any(map(os.path.exists, config.split(":"))):
                    known = [f"there is no {config}"]
                if more := ", ".join(each for each in known if each and each not in exc.why):
                    raise LoginFailed(f"{exc.why} ({more})", exc.hint, exc.kind, passing=exc.passing) from None
                raise
            except TimeoutError:
                why = f"Kerberos: no KDC answered within {self._seconds:.0f} s"
                raise LoginFailed(why, _AWAY, UnavailableError, passing=True) from None
        offered = self.unwrap(challenge)[:1] or b"\0"
        self.qop = next((each for each in self._qops if offered[0] & 1 << QOPS.index(each)), "")
        if not self.qop:
            hint = "compare hadoop.rpc.protection here and there"
            raise LoginFailed(f"the NameNode does not offer {self._qops[0]}", hint, ConfigError)
        most = b"\0\0\0" if self.qop == "auth" else _MOST
        return self._wrap(bytes([1 << QOPS.index(self.qop)]) + most, secret=False)

    def _step(self, challenge: bytes) -> bytes:
        out = _Buffer()
        # of this thread, which ends with the call; the library by itself chooses among the tickets of a collection
        if self._tickets and self._tickets != default_tickets():
            _call("krb5_ccache_name", os.fsencode(self._tickets), None)
        else:
            check_own(self._tickets)
        try:
            status = _call(
                *("init_sec_context", None, byref(self._context), self._name, byref(_oid(_KRB5)), _FLAGS, 0),
                *(None, byref(_Given(challenge)), None, byref(out), None, None),
            )
        finally:
            answer = _taken(out)
        self._ready = not status & 0xFFFF
        if self._ready:
            self.user = self._whose()
        return answer

    def _whose(self) -> str:
        name, text = c_void_p(), _Buffer()
        _call("inquire_context", self._context, byref(name), None, None, None, None, None, None)
        try:
            _call("display_name", name, byref(text), None)
            return _taken(text).decode(errors="replace")
        finally:
            _lib().gss_release_name(byref(c_uint32()), byref(name))

    def finish(self, last: bytes) -> None:
        if not self.qop:
            raise LoginFailed("the NameNode ended the login too soon", "is it a NameNode?", UnavailableError)

    def _wrap(self, data: bytes, *, secret: bool) -> bytes:
        out = _Buffer()
        with self._turn:
            _call("wrap", self._context, secret, 0, byref(_Given(data)), byref(c_int()), byref(out))
        return _taken(out)

    def wrap(self, data: bytes) -> bytes:
        return self._wrap(data, secret=self.qop == "auth-conf")

    def unwrap(self, data: bytes) -> bytes:
        out, secret = _Buffer(), c_int()
        with self._turn:
            status = _call("unwrap", self._context, byref(_Given(data)), byref(out), byref(secret), byref(c_uint32()))
        found = _taken(out)
        if status & _OUT_OF_ORDER:
            why = "a message came twice or out of order"
            raise LoginFailed(why, "check the network", UnavailableError, passing=True)
        if self.qop == "auth-conf" and not secret:
            raise LoginFailed("a message came unencrypted", "check the network", UnavailableError)
        return found
