"""Where the pieces of a load go: the callers' memory, and scratch memory for a piece that is not in one place there. A
piece is consecutive whole chunks of one file. It is read, sent and received as a whole, also where the requests want
parts of its chunks only: a CRC, and a rank that it is sent to, need all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from crc32c import crc32c

from bootseer.ranges import flat, runs
from bootseer.stripefs.files.reader import ChunkFile
from bootseer.stripefs.files.striped import StripedFile
from bootseer.torch.shared_plan import FileId, Needs, Span

Request = tuple[ChunkFile, int, memoryview]
"""Fill the memory with the bytes of the file from that offset."""
_CRC = 4
"""Bytes behind a piece of a plain file: the store has no CRC of it to compare with. They cover which piece it is."""


class Place(NamedTuple):
    """Memory for one piece: all of ``data`` is sent. It is a part of ``view``, a caller's memory, or scratch."""

    piece: Span
    data: memoryview
    view: memoryview | None


class Destination:
    """The memory of ``requests``. Raises `DataError` for a range past the end of its file."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.files: dict[FileId, ChunkFile] = {}
        self.size = 0
        self._wanted: dict[FileId, dict[int, list[tuple[int, memoryview]]]] = {}
        for file, offset, memory in requests:
            view = flat(memory)
            file.check_range(offset, len(view))
            if not len(view):
                continue
            name = FileId(file.identity, file.unit, file.size)
            self.files.setdefault(name, file)
            self.size += len(view)
            chunks = self._wanted.setdefault(name, {})
            one = (offset, view)
            for chunk in range(offset // file.unit, -(-(offset + len(view)) // file.unit)):
                chunks.setdefault(chunk, []).append(one)

    def needs(self) -> Needs:
        return {name: tuple(runs(chunks)) for name, chunks in self._wanted.items()}

    @property
    def read_so_far(self) -> tuple[int, int]:
        """Bytes that came from the store, and from the node cache."""
        files = self.files.values()
        return sum(file.fetched for file in files), sum(file.cached for file in files)

    def place(self, piece: Span) -> Place:
        striped = isinstance(self.files[piece.file], StripedFile)
        if striped:
            for offset, view in self._wanted[piece.file][piece.first]:
                at = piece.start - offset
                if at >= 0 and at + piece.size <= len(view):
                    return Place(piece, view[at : at + piece.size], view)
        return Place(piece, memoryview(bytearray(piece.size + (0 if striped else _CRC))), None)

    def read(self, pieces: Sequence[Span]) -> list[Place]:
        """Read whole pieces from the store, to be sent. Errors of `ChunkFile.readinto`."""
        places = [self.place(piece) for piece in pieces]
        self._read((piece.file, piece.start, data[: piece.size]) for piece, data, _ in places)
        for place in places:
            if len(place.data) > place.piece.size:
                place.data[-_CRC:] = _plain_crc(place).to_bytes(_CRC)
            self._copy(place)
        return places

    def read_alone(self, pieces: Sequence[Span]) -> None:
        """Read what is wanted of ``pieces`` from the store. Errors as of `read`."""
        self._read((piece.file, *part) for piece in pieces for part in self._parts(piece))

    def _read(self, parts: Iterable[tuple[FileId, int, memoryview]]) -> None:
        ranges: dict[FileId, list[tuple[int, memoryview]]] = {}
        for name, offset, view in parts:
            ranges.setdefault(name, []).append((offset, view))
        for name, found in ranges.items():
            self.files[name].readinto_many(found)

    def received(self, place: Place) -> list[Span]:
        """Take what another rank has read, also into the node cache. Those of its chunks that are damaged."""
        piece, file = place.piece, self.files[place.piece.file]
        if not isinstance(file, StripedFile):
            if _plain_crc(place) != int.from_bytes(place.data[-_CRC:]):
                return [piece]
            self._copy(place)
            return []
        damaged = []
        for chunk in piece.cut(1):
            data = place.data[chunk.start - piece.start :][: chunk.size]
            if crc32c(data) != file.chunk_crc(chunk.first):
                damaged.append(chunk)
            else:
                file.local.keep(chunk.first, [data])
        self._copy(place)
        return damaged

    def _copy(self, place: Place) -> None:
        """From its place to the other requests that want something of it."""
        for offset, part in self._parts(place.piece, place.view):
            at = offset - place.piece.start
            part[:] = place.data[at : at + len(part)]

    def _parts(self, piece: Span, apart: memoryview | None = None) -> Iterator[tuple[int, memoryview]]:
        """(offset in the file, memory) of what the requests want of ``piece``, without the one for ``apart``."""
        chunks = self._wanted[piece.file]
        wanted = {id(one): one for n in range(piece.first, piece.first + piece.chunks) for one in chunks[n]}
        for offset, view in wanted.values():
            if view is not apart:
                low, high = max(offset, piece.start), min(offset + len(view), piece.start + piece.size)
                yield low, view[low - offset : high - offset]


def _plain_crc(place: Place) -> int:
    piece = place.piece
    found: int = crc32c(place.data[:-_CRC], crc32c(f"{piece.file.identity}:{piece.first}".encode()))
    return found
