"""`Stream`: what protects the bytes of a connection after the login, whatever sends and receives them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from bootseer.errors import extra
from bootseer.hdfs.sasl.login import Seal

_PIECE = 65536 - 64
"""Bytes of one sealed message: with what is added to it, no more than Hadoop's 64 KiB."""
_LIMIT = 1 << 20


class Stream:
    """Both ways of one connection. ``in_place``: what came can be made what was meant where it lies, by `fill`."""

    in_place = False

    def out(self, views: Iterable[memoryview | bytes]) -> list[memoryview]:
        """What goes over the wire."""
        raise NotImplementedError

    def plain(self, data: bytes) -> bytes:
        """What came over the wire, as it was meant; perhaps nothing yet."""
        raise NotImplementedError

    def fill(self, views: Sequence[memoryview]) -> None:
        """Make what came, which is in ``views``, what was meant."""
        raise NotImplementedError


class Framed(Stream):
    """Messages of a `Seal`, each behind its length as 4 bytes."""

    def __init__(self, seal: Seal, limit: int = _LIMIT) -> None:
        self._seal, self._limit, self._raw = seal, limit, bytearray()

    def out(self, views: Iterable[memoryview | bytes]) -> list[memoryview]:
        data = b"".join(views)
        pieces = (data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
        return [memoryview(self.message(self._seal.wrap(piece))) for piece in pieces]

    def plain(self, data: bytes) -> bytes:
        self._raw += data
        found, at = [], 0
        while len(self._raw) - at >= 4:
            end = at + 4 + int.from_bytes(self._raw[at : at + 4], "big")
            if end - at > self._limit:
                raise OSError(f"a sealed message that claims {end - at} bytes")
            if end > len(self._raw):
                break
            found.append(self._seal.unwrap(self.sealed(bytes(self._raw[at + 4 : end]))))
            at = end
        del self._raw[:at]
        return b"".join(found)

    def message(self, sealed: bytes) -> bytes:
        """``sealed`` as it goes over the wire."""
        return struct.pack(">I", len(sealed)) + sealed

    def sealed(self, body: bytes) -> bytes:
        """What is sealed in the message ``body``, which comes without its length."""
        return body


class Aes(Stream):
    """AES in counter mode, a key and a counter for each way: no byte more than without."""

    in_place = True

    def __init__(self, there: tuple[bytes, bytes], back: tuple[bytes, bytes]) -> None:
        with extra("hdfs", "encryption of HDFS"):
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._encrypt, self._decrypt = (
            Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor() for key, counter in (there, back)
        )

    def out(self, views: Iterable[memoryview | bytes]) -> list[memoryview]:
        return [memoryview(self._encrypt.update(view)) for view in views]

    def plain(self, data: bytes) -> bytes:
        return self._decrypt.update(data)

    def fill(self, views: Sequence[memoryview]) -> None:
        for view in views:
            self._decrypt.update_into(view, view)
