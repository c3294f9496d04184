"""DIGEST-MD5 (RFC 2831), the client's side: both sides prove that they know the password of a token, which is not sent.
Its ciphers are 3des and rc4, of which rc4 is the quicker by far. They, and the MD5, are Hadoop's choice, not ours."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bootseer.errors import UnavailableError, UnsupportedError, extra
from bootseer.hdfs.sasl.login import LoginFailed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

_FIELD = re.compile(rb'([a-zA-Z0-9-]+)=(?:"((?:[^"\\]|\\.)*)"|([^,]*))')
_MAC, _NUMBERED = 10, b"\x00\x01"  # bytes of a message's HMAC; the version behind it, before the number
_TAIL = len(_NUMBERED) + 4
_LONGEST = 2048  # bytes that no challenge has (RFC 2831, 2.1.1)
_CIPHERS = (b"rc4", b"3des")
_SEAL = b"Digest H(A1) to %s sealing key magic constant"
_SIGN = b"Digest session key to %s signing key magic constant"
_THERE, _BACK = b"client-to-server", b"server-to-client"


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


class Digest:
    """One login as ``user`` with ``password`` at ``service`` (``protocol/server``), with the first of ``qops`` that the
    server offers. ``cipher``: by which messages are encrypted, if they are."""

    def __init__(self, user: bytes, password: bytes, service: str, qops: Sequence[str], *, known_as: str = "") -> None:
        self._login, self._password, self._service, self._qops = user, password, service.encode(), qops
        self.qop, self.user, self.cipher = "", known_as, ""
        self._expected, self._sent, self._received = b"", 0, 0
        self._encrypt: CipherContext | None = None
        self._decrypt: CipherContext | None = None

    def answer(self, challenge: bytes) -> bytes:
        if len(challenge) >= _LONGEST:
            raise LoginFailed("its DIGEST-MD5 challenge is too long", "is it a daemon of HDFS?", UnavailableError)
        fields = {key: quoted or bare for key, quoted, bare in _FIELD.findall(challenge)}
        offered = [each.strip() for each in fields.get(b"qop", b"auth").split(b",")]
        if b"nonce" not in fields:
            raise LoginFailed("it sent no DIGEST-MD5 challenge", "is it a daemon of HDFS?", UnavailableError)
        self.qop = next((each for each in self._qops if each.encode() in offered), "")
        if not self.qop:
            said = f"it offers {b', '.join(offered).decode(errors='replace')}, and the site wants {self._qops[0]}"
            hint = "compare hadoop.rpc.protection and dfs.data.transfer.protection here and there"
            raise LoginFailed(said, hint, UnsupportedError)
        return self._respond(fields.get(b"realm", b""), fields[b"nonce"], fields.get(b"cipher", b"").split(b","))

    def _respond(self, realm: bytes, nonce: bytes, ciphers: Sequence[bytes]) -> bytes:
        own, qop = base64.b64encode(secrets.token_bytes(18)), self.qop.encode()
        key = _md5(b":".join((_md5(b":".join((self._login, realm, self._password))), nonce, own)))
        said = b":" + b"0" * 32 if self.qop != "auth" else b""

        def proof(method: bytes) -> bytes:
            what = _md5(method + b":" + self._service + said).hex().encode()
            return _md5(b":".join((key.hex().encode(), nonce, b"00000001", own, qop, what))).hex().encode()

        self._expected = b"rspauth=" + proof(b"")
        self._sign, self._check = (_md5(key + _SIGN % way) for way in (_THERE, _BACK))
        text = b'charset=utf-8,username="%s",realm="%s",nonce="%s",nc=00000001,cnonce="%s",digest-uri="%s",maxbuf=65536'
        text = text % (self._login, realm, nonce, own, self._service)
        text += b",response=%s,qop=%s" % (proof(b"AUTHENTICATE"), qop)
        if self.qop == "auth-conf":
            chosen = next((each for each in _CIPHERS if each in [name.strip() for name in ciphers]), b"")
            if not chosen:
                raise LoginFailed("it offers neither rc4 nor 3des", "use AES for privacy", UnsupportedError)
            self.cipher = chosen.decode()
            self._encrypt = cipher(chosen, _md5(key + _SEAL % _THERE), decrypt=False)
            self._decrypt = cipher(chosen, _md5(key + _SEAL % _BACK), decrypt=True)
            text += b',cipher="%s"' % chosen
        return text

    def finish(self, last: bytes) -> None:
        if not self._expected or not hmac.compare_digest(last[: len(self._expected)], self._expected):
            hint = "does the token belong to this cluster?"
            raise LoginFailed("the server does not know the password of the token", hint)

    def wrap(self, data: bytes) -> bytes:
        number = struct.pack(">I", self._sent)
        self._sent += 1
        mac = hmac.digest(self._sign, number + data, "md5")[:_MAC]
        body = data + mac
        if self._encrypt is not None:
            if self.cipher == "3des":
                fill = 8 - len(body) % 8
                body = data + bytes([fill]) * fill + mac
            body = self._encrypt.update(body)
        return body + _NUMBERED + number

    def unwrap(self, data: bytes) -> bytes:
        number = struct.pack(">I", self._received)
        self._received += 1
        body = data[:-_TAIL]
        if self._decrypt is not None and len(body) % (8 if self.cipher == "3des" else 1) == 0:
            body = self._decrypt.update(body)
        found, mac = body[:-_MAC], body[-_MAC:]
        if self.cipher == "3des" and found:
            found = found[: -found[-1]] if found[-1] <= len(found) else b""
        right = hmac.digest(self._check, number + found, "md5")[:_MAC]
        if data[-_TAIL:] != _NUMBERED + number or not hmac.compare_digest(mac, right):
            raise LoginFailed("a message was changed on its way", "check the network", UnavailableError, passing=True)
        return found


def cipher(name: bytes, key: bytes, *, decrypt: bool) -> CipherContext:
    """What encrypts one way, or decrypts."""
    with extra("hdfs", "privacy of HDFS"):
        from cryptography.hazmat.decrepit.ciphers.algorithms import ARC4, TripleDES
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

    if name == b"rc4":
        return Cipher(ARC4(key), mode=None).encryptor()
    first, second = _spread(key[:7]), _spread(key[7:14])
    made = Cipher(TripleDES(first + second + first), modes.CBC(key[8:]))
    return made.decryptor() if decrypt else made.encryptor()


def _spread(key: bytes) -> bytes:
    """56 bits as the 8 bytes of a DES key, each with a bit of parity that nobody looks at."""
    bits = int.from_bytes(key, "big")
    return bytes((bits >> 49 - 7 * i & 0x7F) << 1 for i in range(8))
