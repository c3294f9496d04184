"""Striped files as they are read: footers, the checksums of their chunks, and those of the sectors of a chunk. A
request that wants little of a chunk reads only those sectors, once it has their checksums, which the footer proves.
Concurrency: as in `reader`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
from collections.abc import Container, Iterable, Mapping, Sequence

from crc32c import crc32c

from bootseer.backends.interface import Backend, Piece, Source
from bootseer.backends.pool import parallel
from bootseer.errors import BootseerError, DataError, NotFoundError
from bootseer.ranges import runs
from bootseer.stripefs import layout
from bootseer.stripefs.files.reader import ChunkFile, Copies, PlainFile, Views, content_of, identity_of, read_pointer
from bootseer.stripefs.layout import SECTOR, Footer, Pointer

_log = logging.getLogger(__name__)

_TRIES = 5
"""How often a file that is replaced all the time is opened."""
_TABLES, _ENTRIES = 256, 1024
"""Parts of the tables of sectors that an open file holds, and checksums in each."""

Tables = dict[tuple[int, int], bytes]
"""Checksums of sectors, by stripe and part of its table."""


class StripedFile(ChunkFile):
    """A striped file, whose ``pointer`` was read from a file of that ``version``. Opening checks every footer."""

    def __init__(self, backend: Backend, path: str, pointer: Pointer, version: str = "") -> None:
        super().__init__(backend, path, pointer.geometry)
        self.pointer, self.content = pointer, content_of(version, pointer.uuid)
        self.identity = identity_of(backend, path, self.content)
        self._footers: tuple[Footer, ...] = ()
        self._per_chunk = self.unit // self.geometry.grain
        # so many sectors of a chunk a request reads by themselves; who wants more gets all of it, which is kept
        self._few = max(1, self._per_chunk // 4) if self._per_chunk > 1 else 0
        self._apart = bytearray(self.geometry.chunks)  # sectors that jumps have read, by chunk
        self._page = max(1, _ENTRIES // self._per_chunk)  # chunks whose sectors have their checksums in one of:
        self._tables = Tables()
        try:
            self._footers = self._read_footers()
        except BaseException:
            self.close()
            raise

    def _open_source(self, stripe: int) -> Source:
        name = self.pointer.stripe_path(self.path, stripe)
        try:
            source = self._backend.open(name)
        except NotFoundError:
            raise self._gone(f"stripe {stripe} of {self.path} is missing ({name})") from None
        if source.size != (expected := self.geometry.stripe_length(stripe)):
            found = source.size
            with contextlib.closing(source):
                layout.check_version(source.read(0, min(layout.HEADER_SIZE, found)), f"{self.path} ({name})")
            raise DataError(f"stripe {stripe} of {self.path} has {found} bytes, not {expected} ({name})")
        return source

    def _gone(self, problem: str) -> BootseerError:
        """What a missing stripe means: a writer replaced the file, or a part of it is lost."""
        try:
            now = read_pointer(self._backend, self.path)
        except BootseerError:
            now = None
        if now is None or now.uuid != self.pointer.uuid:
            return DataError(f"{self.path} was replaced while it was read", hint="open it again")
        return DataError(problem, hint="a checkpoint must be moved or copied with its .bsx folder")

    def _read_footers(self) -> tuple[Footer, ...]:
        stripes, footers = range(self.pointer.width), dict[int, Footer]()

        def piece(stripe: int) -> Piece:
            def check(part: int, data: memoryview) -> None:
                footers[stripe] = self._decode_footer(stripe, data)

            buffer = memoryview(bytearray(layout.footer_length(self.geometry.stripe_chunks(stripe))))
            offset = self.geometry.footer_offset(stripe)
            return Piece(self._source(stripe), offset, [buffer], check, self._reopened(stripe), self.path)

        parallel(self._source, stripes)
        self._backend.read_many([piece(i) for i in stripes])
        return tuple(footers[i] for i in stripes)

    def by_stripe(self, wanted: Mapping[int, memoryview], *, keep: Container[int] | None = None) -> list[Piece]:
        every, wanted = wanted, self.local.fill(wanted)
        with self._lock:
            self.cached += sum(len(view) for chunk, view in every.items() if chunk not in wanted)
        return super().by_stripe(wanted, keep=keep)

    def _decode_footer(self, stripe: int, data: memoryview) -> Footer:
        name = self.pointer.stripe_path(self.path, stripe)
        footer, crc = layout.decode_footer(bytes(data), f"{self.path} ({name})")
        if crc != self.pointer.footers[stripe] or footer.stripe != stripe or footer.size != self.size:
            raise DataError(f"{name} is not stripe {stripe} of {self.path}")
        return footer

    def _piece(self, stripe: int, first: int, parts: Sequence[memoryview], keep: Container[int] | None) -> Piece:
        crcs = self._footers[stripe].crcs

        def check(part: int, data: memoryview) -> None:
            position = first + part
            chunk = position * self.geometry.width + stripe
            if crc32c(data) != crcs[position]:
                raise self._damaged(chunk)
            if keep is None or chunk in keep:
                self.local.keep(chunk, [data])

        source, offset = self._source(stripe), self.geometry.chunk_offset(first)
        return Piece(source, offset, parts, check, self._reopened(stripe), self.path)

    def _damaged(self, chunk: int) -> DataError:
        name = self.pointer.stripe_path(self.path, chunk % self.geometry.width)
        return DataError(f"chunk {chunk} of {self.path} is damaged ({name})", hint="restore it from a copy")

    def apart(self, offset: int, size: int) -> bool:
        found = dict[int, int]()
        for chunk in range(offset // self.unit, -(-(offset + size) // self.unit)):
            low, high = max(offset, chunk * self.unit), min(offset + size, (chunk + 1) * self.unit)
            sectors = -(-high // SECTOR) - low // SECTOR
            if sectors > self._few or self.local.has(chunk):
                return False
            found[chunk] = self._apart[chunk] + sectors
        often = max(found.values()) > min(self._per_chunk, 255)  # that took as many bytes as all of the chunk
        for chunk, sectors in found.items():
            self._apart[chunk] = 0 if often else sectors
        return not often

    def _read(self, views: Views) -> int:
        whole, parts = self._split(views)
        if not parts:
            return super()._read(views)
        tables = self._tables = self._tables if len(self._tables) < _TABLES else {}
        try:
            fetched = self._fetch(self._missing_tables({offset // self.unit for offset, _ in parts}, tables))
        except DataError as exc:
            _log.warning("%s; chunks of this file are read whole", exc.message)
            self._few = 0
            return super()._read(views)
        copies: Copies = []
        sectors = self._sectors(self._cut(parts, copies, SECTOR), tables)
        return fetched + self._fetch([*self._pieces(whole, copies), *sectors], copies)

    def _split(self, views: Views) -> tuple[Views, Views]:
        """``views``, cut at chunks: what is read in whole chunks, and what of chunks of which they want little."""
        if not self._few or not views:
            return views, ()
        first = min(offset for offset, _ in views) // self.unit
        last = -(-max(offset + len(view) for offset, view in views) // self.unit)
        if sum(len(view) for _, view in views) > (last - first) * self._few * SECTOR:
            return views, ()
        wanted = dict[int, set[int]]()
        cut = list[tuple[int, memoryview]]()
        for offset, view in views:
            end = offset + len(view)
            head = min(end, -(-(offset + 1) // self.unit) * self.unit)
            tail = max(head, end // self.unit * self.unit)
            for start, stop in ((offset, head), (head, tail), (tail, end)):
                if start < stop:
                    cut.append((start, view[start - offset : stop - offset]))
                    wanted.setdefault(start // self.unit, set()).update(range(start // SECTOR, -(-stop // SECTOR)))
        few = {
            chunk
            for chunk, sectors in wanted.items()
            if len(sectors) <= self._few
            and len(sectors) * SECTOR < self.geometry.chunk_length(chunk)
            and not self.local.has(chunk)
        }
        return (
            [part for part in cut if part[0] // self.unit not in few],
            [part for part in cut if part[0] // self.unit in few],
        )

    def _sectors(self, wanted: Mapping[int, memoryview], tables: Tables) -> list[Piece]:
        """Sectors by their numbers in the file, each into its memory."""
        pieces = list[Piece]()
        for chunk, numbers in itertools.groupby(sorted(wanted), lambda number: number // self._per_chunk):
            position, stripe = divmod(chunk, self.geometry.width)
            page, row = divmod(position, self._page)
            crcs = self._row(tables[stripe, page], row, chunk)
            for first, count in runs(numbers):
                at = first % self._per_chunk

                def check(
                    part: int, data: memoryview, chunk: int = chunk, crcs: Sequence[int] = crcs, at: int = at
                ) -> None:
                    if crc32c(data) != crcs[at + part]:
                        raise self._damaged(chunk)

                parts = [wanted[number] for number in range(first, first + count)]
                offset = self.geometry.chunk_offset(position) + at * SECTOR
                pieces.append(Piece(self._source(stripe), offset, parts, check, self._reopened(stripe), self.path))
        return pieces

    def _row(self, part: bytes | memoryview, row: int, chunk: int) -> tuple[int, ...]:
        """The checksums of the sectors of ``chunk``, which is number ``row`` in a part of a table."""
        count = -(-self.geometry.chunk_length(chunk) // SECTOR)
        return struct.unpack_from(f"<{count}I", part, 4 * self._per_chunk * row)

    def _missing_tables(self, chunks: Iterable[int], tables: Tables) -> list[Piece]:
        """What ``tables`` lacks of the checksums of the sectors of ``chunks``; to be read into it."""
        width = self.geometry.width
        return [
            self._table(*page, tables)
            for page in sorted({(chunk % width, chunk // width // self._page) for chunk in chunks} - tables.keys())
        ]

    def _table(self, stripe: int, page: int, tables: Tables) -> Piece:
        first = page * self._page
        rows = range(min(self._page, self.geometry.stripe_chunks(stripe) - first))
        begin = self.geometry.table_offset(stripe) + 4 * self._per_chunk * first
        end = min(begin + 4 * self._per_chunk * len(rows), self.geometry.footer_offset(stripe))

        def check(part: int, data: memoryview) -> None:
            for row in rows:
                chunk = (first + row) * self.geometry.width + stripe
                length = self.geometry.chunk_length(chunk)
                if layout.joined(self._row(data, row, chunk), length) != self.chunk_crc(chunk):
                    name = self.pointer.stripe_path(self.path, stripe)
                    raise DataError(f"the checksums of the sectors of chunk {chunk} are damaged ({name})")
            tables[stripe, page] = bytes(data)

        parts = [memoryview(bytearray(end - begin))]
        return Piece(self._source(stripe), begin, parts, check, self._reopened(stripe), self.path)

    def check_rest(self) -> None:
        """Read and check what reads of the whole content do not need: headers of stripes, checksums of sectors."""
        if self._few:
            for chunk in range(0, self.geometry.chunks, self._page * self.geometry.width):
                self._fetch(
                    self._missing_tables(range(chunk, min(chunk + self.geometry.width, self.geometry.chunks)), {})
                )
        for stripe in range(self.geometry.width):
            name = self.pointer.stripe_path(self.path, stripe)
            header = layout.decode_header(self._source(stripe).read(0, layout.HEADER_SIZE), name)
            expected = (self.pointer.uuid, stripe, self.pointer.width, self.pointer.unit, self.pointer.epoch)
            if (header.uuid.hex(), header.stripe, header.width, header.unit, header.epoch) != expected:
                raise DataError(f"{name} is not stripe {stripe} of {self.path}")

    def chunk_crc(self, chunk: int) -> int:
        """CRC-32C that ``chunk`` must have."""
        return self._footers[chunk % self.geometry.width].crcs[chunk // self.geometry.width]


def open_file(backend: Backend, path: str) -> ChunkFile:
    """Open the file at ``path``, striped or plain, as it is now: one that is replaced meanwhile is opened again."""
    for left in reversed(range(_TRIES)):
        file = PlainFile(backend, path)
        if not layout.is_pointer(file.head):
            break
        try:
            with file:
                text = file.head if len(file.head) == file.size else file.read(0, file.size)
            return StripedFile(backend, path, layout.decode_pointer(text, path), file.version)
        except DataError:
            if not left or backend.stat(path).version == file.version:
                raise
    return file
