"""The login at a DataNode, before an operation: by the block's token, or by a key of the NameNode's where all transfers
are encrypted (``dfs.encrypt.data.transfer``). It sends nothing itself, so that any connection can make it.

    client  DE AD BE EF | TransferSasl
    server  TransferSasl: challenge
    client  TransferSasl: response, and with privacy "AES, if you please"
    server  TransferSasl: its proof, and with privacy the keys of AES, or none: then DIGEST-MD5's own cipher stays"""

from __future__ import annotations

import base64
import functools
import logging
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from bootseer.errors import UnavailableError
from bootseer.hdfs import nameservice
from bootseer.hdfs.framing import delimited, line, text
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.sasl.digest import Digest
from bootseer.hdfs.sasl.login import LoginFailed, qops
from bootseer.hdfs.sasl.streams import Aes, Framed, Stream

_log = logging.getLogger(__name__)

_MAGIC = bytes.fromhex("DEADBEEF")
_SERVICE = "hdfs/0"
_PROTECTION = "dfs.data.transfer.protection"
_AES = 2
_PRIVILEGED = 1024  # ports below can be taken by root only, which is proof enough for Hadoop

AES_SETTING = "dfs.encrypt.data.transfer.cipher.suites = AES/CTR/NoPadding"
"""What a site sets at its DataNodes so that privacy is quick."""
COMPARE = "compare dfs.data.transfer.protection here and there"
"""What to do where a login at DataNodes fails, or ends without a word because they want one."""
_said: set[str] = set()


def is_slow() -> bool:
    """Whether the site asks for privacy, and not for AES: as Hadoop is set up where nobody thinks of it."""
    wanted = nameservice.setting(_PROTECTION).lower().split(",")[0].strip() == "privacy"
    encrypts = nameservice.setting("dfs.encrypt.data.transfer").lower() == "true"
    return (wanted or encrypts) and not nameservice.setting("dfs.encrypt.data.transfer.cipher.suites")


class TokenRefused(LoginFailed):
    """The block's token is old: the NameNode gives another one."""


class KeyRefused(LoginFailed):
    """The DataNode does not know the key; the next `Guard.handshake` has another one."""


class Guard:
    """How connections to the DataNodes of a cluster begin. ``secured``: whether its NameNode wanted a login. ``ask``:
    asks it for the key for all transfers until a time (monotonic seconds); None where the cluster does not encrypt
    them."""

    def __init__(self, secured: Callable[[], bool], ask: Callable[[float], wire.DataKey | None]) -> None:
        self.secured, self._ask = secured, ask
        self._key: wire.DataKey | None = None

    def handshake(self, port: int, token: wire.Token, until: float) -> Handshake | None:
        """What a connection to the DataNode at ``port`` begins with, for the block of ``token``; None: with nothing."""
        key = self._key  # threads that ask at once have a good one each, and the last one stays
        if key is None or key.expires < time.time() * 1000:
            self._key = key = self._ask(until)
        if key:
            name = b"%d %s %s" % (key.id, text(key.pool).encode(), base64.b64encode(key.nonce))
            digest = Digest(name, base64.b64encode(key.key), _SERVICE, ("auth-conf",))
            return Handshake(digest, functools.partial(self._refused, key))
        wanted = nameservice.setting(_PROTECTION)
        # a site that does not say it means: none; of one that is not known a DataNode says it
        if not self.secured() or port < _PRIVILEGED or (not wanted and nameservice.folder()):
            return None
        name, password = base64.b64encode(token.identifier), base64.b64encode(token.password)
        return Handshake(Digest(name, password, _SERVICE, qops(wanted, _PROTECTION)), lambda: None)

    def _refused(self, key: wire.DataKey) -> None:
        if self._key is key:  # else another thread has a newer one already
            self._key = None


OPEN = Guard(lambda: False, lambda until: None)
"""Of a cluster where connections begin with nothing."""


class Handshake:
    """One login. ``stream``: what protects the connection when it is over; None: nothing."""

    def __init__(self, digest: Digest, refused: Callable[[], None]) -> None:
        self.stream: Stream | None = None
        self._digest, self._refused, self._responded = digest, refused, False

    def begin(self) -> bytes:
        """What is sent first."""
        return _MAGIC + delimited(wire.TransferSasl(status=0, payload=b""))

    def answer(self, message: bytes) -> bytes:
        """What is sent after ``message`` has come, b"" when the login is over. `LoginFailed`."""
        try:
            told = wire.TransferSasl.FromString(message)
        except DecodeError:
            raise LoginFailed("its part of the login makes no sense", "is it a DataNode?", UnavailableError) from None
        if told.status or told.token_error:
            raise self._error(told)
        if not self._responded:
            self._responded = True
            reply = wire.TransferSasl(status=0, payload=self._digest.answer(told.payload))
            if self._digest.qop == "auth-conf":
                reply.ciphers.add(suite=_AES)
            return delimited(reply)
        self._digest.finish(told.payload)
        if self._digest.qop == "auth-conf" and told.ciphers:
            cipher = told.ciphers[0]
            there, back = self._digest.unwrap(cipher.in_key), self._digest.unwrap(cipher.out_key)
            try:
                self.stream = Aes((there, cipher.in_iv), (back, cipher.out_iv))
            except ValueError as exc:
                raise LoginFailed(f"its keys are none of AES: {exc}", "is it a DataNode?", UnavailableError) from None
        elif self._digest.qop != "auth":
            self.stream = Framed(self._digest)
            self._tell_slow()
        return b""

    def _error(self, told: wire.TransferSasl) -> LoginFailed:
        why = line(told.message) or "it refused the login"
        if told.status == 1:
            self._refused()
            return KeyRefused(why, "try again", UnavailableError, passing=True)
        kind = TokenRefused if told.token_error or "token" in why.lower() else LoginFailed
        return kind(why, COMPARE, UnavailableError)

    def _tell_slow(self) -> None:
        if (cipher := self._digest.cipher) and cipher not in _said:
            _said.add(cipher)
            _log.warning("DataNodes encrypt with %s, which is slow; at the DataNodes set %s", cipher, AES_SETTING)
