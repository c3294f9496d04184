"""Extended attributes as EROFS stores them: behind their inode, or once in a shared area."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from bootseer.erofs import format as fmt
from bootseer.errors import DataError

Pairs = tuple[tuple[bytes, bytes], ...]
_MAX_VALUE = 0xFFFF
_MAX_BODY = 12 + 4 * (0xFFFF - 1)
_MAX_SHARED = 255


def representable(name: bytes) -> bool:
    """Whether EROFS has a name for this attribute that Linux takes: ``user.*``, ``trusted.*``, ``security.*`` and POSIX
    ACLs, of at most 255 bytes in all (EROFS would hold 255 without the prefix, which no call could ask for)."""
    index, rest = _split(name)
    return bool(index) and (len(name) <= fmt.MAX_NAME and bool(rest) != (index in (2, 3)))


def checked(xattrs: Mapping[bytes, bytes]) -> Pairs:
    """``xattrs`` sorted by name; `DataError` for names, values or totals that no EROFS inode can hold."""
    pairs = tuple(sorted(xattrs.items()))
    total = 12
    for name, value in pairs:
        if not representable(name) or b"\0" in name:
            raise DataError(f"extended attribute {name!r} cannot be stored in EROFS")
        if len(value) > _MAX_VALUE:
            raise DataError(f"extended attribute {name!r} has {len(value)} bytes, more than {_MAX_VALUE}")
        total += -(-(4 + len(name) + len(value)) // 4) * 4
    if total > _MAX_BODY:
        raise DataError(f"extended attributes of {total} bytes, more than {_MAX_BODY}")
    return pairs


def _split(name: bytes) -> tuple[int, bytes]:
    for prefix, index in fmt.XATTR_PREFIXES:
        if name.startswith(prefix):
            return index, name[len(prefix) :]
    return 0, name


def _entry(name: bytes, value: bytes) -> bytes:
    index, rest = _split(name)
    entry = fmt.XATTR_ENTRY.pack(len(rest), index, len(value)) + rest + value
    return entry + bytes(-len(entry) % 4)


class Bodies:
    """Encodes the attributes of all inodes of one image. What several inodes have is stored once, in ``shared``."""

    def __init__(self, inodes: Iterable[Pairs]) -> None:
        self.shared = bytearray()
        """The shared area; ids count its 4-byte units."""
        self._ids: dict[tuple[bytes, bytes], int] = {}
        self._cache: dict[Pairs, bytes] = {(): b""}
        count = Counter(pair for pairs in inodes for pair in pairs)
        for pair in sorted(pair for pair, times in count.items() if times > 1):
            self._ids[pair] = len(self.shared) // 4
            self.shared += _entry(*pair)

    def body(self, pairs: Pairs) -> bytes:
        """What lies behind an inode with these attributes; empty or at least 16 bytes, a multiple of 4."""
        body = self._cache.get(pairs)
        if body is None:
            shared = [pair for pair in pairs if pair in self._ids][:_MAX_SHARED]
            inline = [pair for pair in pairs if pair not in shared]
            parts = [fmt.XATTR_HEADER.pack(0, len(shared))]
            parts += [self._ids[pair].to_bytes(4, "little") for pair in shared]
            parts += [_entry(*pair) for pair in inline]
            body = self._cache[pairs] = b"".join(parts)
        return body


def icount(body: bytes) -> int:
    """The inode's field for a body of this length."""
    return (len(body) - 12) // 4 + 1 if body else 0
