"""Delegation tokens: files of Hadoop's (``HADOOP_TOKEN_FILE_LOCATION``), and which of a file is for which NameNode.

old    "HDTS" 00 | count | alias, identifier, password, kind, service of each     (numbers as Hadoop's VLong)
new    "HDTS" 01 | length as a varint | a protocol buffer with the same
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from bootseer.errors import ConfigError
from bootseer.hdfs.framing import locate, text
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.sasl.login import LoginFailed, opened

KIND = "HDFS_DELEGATION_TOKEN"
_VARIABLE = "HADOOP_TOKEN_FILE_LOCATION"
_MAGIC, _MOST = b"HDTS", 16 << 20


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    service: str
    identifier: bytes = field(repr=False)
    password: bytes = field(repr=False)

    @property
    def owner(self) -> str:
        """Whose rights it has: the first text of the identifier, behind its version; "" when there is none."""
        with contextlib.suppress(ValueError):
            return next(_texts(self.identifier, 1, 1)).decode(errors="replace")
        return ""

    def fits(self, ip: str, host: str, port: int, service: str) -> bool:
        """Whether it is for the NameNode at this address, or one of the name ``service`` ("": of none)."""
        if service and self.service == f"ha-hdfs:{service}":
            return True
        name, _, number = self.service.rpartition(":")
        if number != str(port) or (service and name == "ha-hdfs"):
            return False
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(name.strip("[]")) == ipaddress.ip_address(ip)
        return name.lower() == host.strip("[]").lower()


def read(path: str) -> list[Token]:
    """The tokens for NameNodes in the file ``path``; none when that is "". Read anew each time, as who renews a token
    writes another one. `LoginFailed`: there is no such file, or it is another one, or one that is just being
    written."""
    if not path:
        return []
    why, hint, kind = f"{path} ({_VARIABLE}) is no token file", "hdfs fetchdt writes one", ConfigError
    try:
        with opened(path) as file:
            data = file.read(_MOST) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
        return [token for token in parse(data) if token.kind == KIND]
    except FileNotFoundError:
        why, hint = f"the token file {path} ({_VARIABLE}) is not there", f"{hint}, or unset the variable and kinit"
        raise LoginFailed(why, hint, kind, passing=True) from None  # no `NotFoundError`: that says it of files in HDFS
    except OSError as exc:
        why, hint = f"cannot read the token file {path} ({_VARIABLE}): {exc.strerror}", "check its owner and mode"
        raise LoginFailed(why, hint, kind, passing=True) from None
    except (ValueError, DecodeError):
        raise LoginFailed(why, hint, kind, passing=True) from None


def parse(data: bytes) -> list[Token]:
    """All tokens of a file; `ValueError` or `DecodeError`."""
    if data[:4] != _MAGIC or data[4:5] not in (b"\0", b"\1"):
        raise ValueError("not a token file")
    if data[4]:
        found = locate(data, 5)
        if found is None or found[1] > len(data):
            raise ValueError("torn")
        tokens = [each.token for each in wire.Credentials.FromString(data[slice(*found)]).tokens]
        return [Token(text(each.kind), text(each.service), each.identifier, each.password) for each in tokens]
    count, at = _number(data, 5)
    texts = _texts(data, at, 5 * count)
    made = []
    for _ in range(count):
        _, identifier, password, kind, service = (next(texts) for _ in range(5))
        made.append(Token(text(kind), text(service), identifier, password))
    return made


def _texts(data: bytes, at: int, count: int) -> Iterator[bytes]:
    """So many byte strings from ``at``, each behind its length. `ValueError`."""
    for _ in range(count):
        length, at = _number(data, at)
        if not 0 <= length <= len(data) - at:
            raise ValueError("torn")
        yield data[at : at + length]
        at += length


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number as Hadoop writes it (`WritableUtils.writeVLong`), and where the next thing begins."""
    if at >= len(data):
        raise ValueError("torn")
    first = data[at] - 256 if data[at] > 127 else data[at]
    if first >= -112:
        return first, at + 1
    size = -112 - first if first >= -120 else -120 - first
    value = int.from_bytes(data[at + 1 : at + 1 + size], "big")
    return (value if first >= -120 else ~value), at + 1 + size
