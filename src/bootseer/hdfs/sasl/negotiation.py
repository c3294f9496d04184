"""The login at a NameNode: by a token where there is one for it, so that a thousand nodes ask no KDC, else by a ticket.

    negotiate ->            who may log in how: TOKEN (DIGEST-MD5), KERBEROS (GSSAPI), SIMPLE: anybody
    initiate, response ->   what the mechanism says, until "success"; with integrity or privacy, "wrap" around all after

What the NameNode claims to be is compared with the site's ``dfs.namenode.kerberos.principal``: any service of the realm
could claim to be it."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import socket
from collections.abc import Iterable
from fnmatch import fnmatchcase

from bootseer.errors import ConfigError, NotWritableError, PrivilegeError, UnavailableError, UnsupportedError, logged
from bootseer.hdfs import nameservice
from bootseer.hdfs.connection import Connection
from bootseer.hdfs.deadline import Workers
from bootseer.hdfs.dial import host_port
from bootseer.hdfs.errors import ANOTHER_TOKEN, RemoteError, remote
from bootseer.hdfs.framing import frame, line, parse, take, text
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.sasl import tokens
from bootseer.hdfs.sasl.digest import Digest
from bootseer.hdfs.sasl.gssapi import Kerberos
from bootseer.hdfs.sasl.login import Identity, LoginFailed, Mechanism, qops
from bootseer.hdfs.sasl.streams import Framed

_log = logging.getLogger(__name__)

_HELLO = b"hrpc\x09\x00\xdf"
_CALL = -33
_SUCCESS, _NEGOTIATE, _INITIATE, _CHALLENGE, _RESPONSE, _WRAP = range(6)
_ROUNDS = 8
_LIMIT = 128 << 20  # as that of an answer
_LOOKUP = 2.0  # s
_resolvers = Workers()


def log_in(connection: Connection, who: Identity) -> str:
    """Log in over a new connection to a NameNode; as whom, as a phrase. A token of somebody else than ``who`` acts for
    is not used. `LoginFailed`, `RemoteError`, `DataError`, and the errors of `nameservice.setting`."""
    connection.send(_HELLO)
    told = _ask(connection, wire.RpcSasl(state=_NEGOTIATE))
    try:
        auth, mechanism, by = _choose(connection, {auth.method: auth for auth in map(_readable, told.auths)}, who)
        first = mechanism.answer(auth.challenge) if mechanism else b""
    except LoginFailed as exc:
        why = exc.why + _unfit(connection, who)
        raise LoginFailed(why, exc.hint, exc.kind, passing=exc.passing) from None
    chosen = wire.RpcSasl.Auth(
        method=auth.method, mechanism=auth.mechanism, protocol=auth.protocol, server_id=auth.server_id
    )
    if mechanism is None:
        connection.send(_framed(wire.RpcSasl(state=_INITIATE, auths=[chosen])))
        return ""
    said = wire.RpcSasl(state=_INITIATE, token=first, auths=[chosen])
    for _ in range(_ROUNDS):
        told = _ask(connection, said)
        if told.state == _SUCCESS:
            mechanism.finish(told.token)
            if mechanism.qop != "auth":
                connection.protect(Wrapped(mechanism, _LIMIT))
            return f"{by} of {mechanism.user}"
        if told.state != _CHALLENGE:
            break
        said = wire.RpcSasl(state=_RESPONSE, token=mechanism.answer(told.token))
    raise LoginFailed("the NameNode's part of the login makes no sense", "is it a NameNode?", UnavailableError)


def _readable(auth: wire.RpcSasl.Auth) -> wire.RpcSasl.Auth:
    """An offer, with a line of text wherever text should be."""
    said = {name: line(getattr(auth, name)) for name in ("method", "mechanism", "protocol", "server_id")}
    return wire.RpcSasl.Auth(challenge=auth.challenge, **said)


def _choose(
    connection: Connection, offers: dict[str, wire.RpcSasl.Auth], who: Identity
) -> tuple[wire.RpcSasl.Auth, Mechanism | None, str]:
    allowed = qops(nameservice.setting("hadoop.rpc.protection"))
    for token in _fit(connection, who) if "TOKEN" in offers else ():
        if who.proxied in ("", token.owner):
            auth, name, password = offers["TOKEN"], *map(base64.b64encode, (token.identifier, token.password))
            server = f"{auth.protocol}/{auth.server_id}"
            return auth, Digest(name, password, server, allowed, known_as=token.owner), "token"
    if "KERBEROS" in offers:
        auth = offers["KERBEROS"]
        return auth, Kerberos(_principal(auth, connection), allowed, who.tickets, connection.left), "ticket"
    if "SIMPLE" in offers:
        if nameservice.setting("ipc.client.fallback-to-simple-auth-allowed").lower() != "true":
            hint = "is it the right one? ipc.client.fallback-to-simple-auth-allowed in core-site.xml allows it"
            raise LoginFailed("the NameNode lets anybody in, and the site wants Kerberos", hint, UnsupportedError)
        return offers["SIMPLE"], None, ""
    raise LoginFailed(
        f"the NameNode offers {', '.join(offers) or 'no way'} to log in", "kinit, or fetch a token", UnsupportedError
    )


def _fit(connection: Connection, who: Identity) -> list[tokens.Token]:
    """The tokens that are for this NameNode."""
    given = tokens.read(who.token_file)
    return [token for token in given if token.fits(connection.peer, *connection.address, who.service)]


def _unfit(connection: Connection, who: Identity) -> str:
    """What tokens there are, where they are for others; "" else."""
    with contextlib.suppress(LoginFailed):
        fit = _fit(connection, who)
        if others := [token.owner for token in fit if who.proxied not in ("", token.owner)]:
            return f" (HADOOP_PROXY_USER is {who.proxied}, and the token is of {others[0]})"
        if who.token_file and not fit:
            known = ", ".join(sorted({token.service for token in tokens.read(who.token_file)})) or "none of HDFS"
            return f" ({who.token_file} has no token for {who.service or host_port(connection.address)}: {known})"
    return ""


def _principal(auth: wire.RpcSasl.Auth, connection: Connection) -> str:
    """The service that the NameNode says it is, where the site says so, too."""
    if (folder := nameservice.folder()) is None:
        hint = "set HADOOP_CONF_DIR to the folder of the site's core-site.xml and hdfs-site.xml"
        raise LoginFailed("the NameNode wants Kerberos, and HADOOP_CONF_DIR is not set", hint, ConfigError)
    key = "dfs.namenode.kerberos.principal"
    pattern, exact = nameservice.setting(f"{key}.pattern"), nameservice.setting(key)
    wanted, _, realm = (pattern or exact).partition("@")
    told = f"{auth.protocol}/{auth.server_id}"
    right = fnmatchcase(told, wanted) if pattern else wanted.replace("_HOST", auth.server_id) == told
    if not right or ("_HOST" in exact and not pattern and auth.server_id.lower() not in _names(connection)):
        site = folder / "hdfs-site.xml"
        known = f"{key} in {site} is {wanted or 'not set'}" if site.exists() else f"there is no {site}"
        raise LoginFailed(f"the NameNode says that it is {told}", f"{known}; is it the right site?", ConfigError)
    # without its realm the library looks for it in krb5.conf
    return f"{told}@{realm}" if realm and "*" not in realm else f"{auth.protocol}@{auth.server_id}"


def _names(connection: Connection) -> Iterable[str]:
    """The host's names, lower case: that in the URL, and those by which others know it."""
    host = connection.address[0].strip("[]")
    yield host.lower()

    def ask() -> list[str]:
        canonical = socket.getaddrinfo(host, None, flags=socket.AI_CANONNAME)[0][3]
        return [canonical, socket.gethostbyaddr(connection.peer)[0]]

    with logged(_log.info, "whether %s has another name cannot be told", host, kinds=OSError):
        yield from map(str.lower, _resolvers.call(ask, _LOOKUP))


def _framed(message: wire.RpcSasl) -> bytes:
    header = wire.RpcRequestHeader(rpc_kind=2, rpc_op=0, call_id=_CALL, client_id=b"", retry_count=-1)
    return frame(header, message)


def _ask(connection: Connection, message: wire.RpcSasl) -> wire.RpcSasl:
    connection.send(_framed(message))
    head = bytearray(4)
    connection.fill([memoryview(head)], 4)
    length = int.from_bytes(head, "big")
    if length > 1 << 20:
        raise LoginFailed(f"an answer that claims {length} bytes", "is it a NameNode?", UnavailableError)
    body = bytearray(length)
    connection.fill([memoryview(body)], length)
    try:
        return _told(body)
    except RemoteError as exc:  # of nobody knows whom yet: what it says is told, and says nothing about files
        if exc.elsewhere:
            raise RemoteError(exc.java, "", fatal=True) from None
        known, why = remote(exc, "log in"), f"it refused the login ({exc})".replace(": ", ", ")
        if isinstance(known, PrivilegeError | NotWritableError):
            raise LoginFailed(why, ANOTHER_TOKEN if "DIGEST-MD5" in why else known.hint, type(known)) from None
        raise LoginFailed(why, "is it a NameNode of this site?", UnavailableError) from None


def _told(body: bytes | bytearray) -> wire.RpcSasl:
    view = memoryview(body)
    head, end = take(view, 0)
    header = parse(wire.RpcResponseHeader, head)
    if header.status:
        raise RemoteError(text(header.exception), text(header.message), fatal=True)
    return parse(wire.RpcSasl, take(view, end)[0])


class Wrapped(Framed):
    """Calls and answers inside of messages of the login."""

    def message(self, sealed: bytes) -> bytes:
        return _framed(wire.RpcSasl(state=_WRAP, token=sealed))

    def sealed(self, body: bytes) -> bytes:
        with contextlib.suppress(RemoteError):
            if (told := _told(body)).state == _WRAP:
                return told.token
        raise LoginFailed("a message came unprotected", "check the network", UnavailableError, passing=True)


def ignored(user: str) -> None:
    """Say that a name in the environment is not who this process is there, if it is so."""
    named = os.environ.get("HADOOP_USER_NAME", "")
    if named and named not in user.replace("@", " ").replace("/", " ").split():
        _log.warning("HADOOP_USER_NAME=%s counts for nothing here: a login says who one is (%s)", named, user)
