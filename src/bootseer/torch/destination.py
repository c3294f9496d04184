"""Where the chunks of a load go: each chunk as the pieces of the callers' memory, and of scratch, that make it up.

A chunk is received in its place also when several tensors share it. What nobody here wants of it goes into scratch
memory, because its CRC, and a rank that it is sent to, need all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from crc32c import crc32c

from bootseer.ranges import runs
from bootseer.stripefs.files.reader import ChunkFile, StripedFile
from bootseer.torch.shared_plan import FileId, Needs, Span

Request = tuple[ChunkFile, int, memoryview]
"""Fill the memory with the bytes of the file from that offset."""
Range = tuple[int, memoryview]


def id_of(file: ChunkFile) -> FileId:
    return FileId(file.identity, file.unit, file.size)


class Chunk:
    """One chunk: ``parts`` make it up in order. ``spare``: bytes of them that are scratch, not the caller's.

    ``copies``: (offset in the chunk, target) to be filled after it, where two requests want the same bytes.
    """

    def __init__(self, start: int, length: int, wanted: Sequence[Range]) -> None:
        self.parts: list[memoryview] = []
        self.wanted: list[Range] = []
        self.copies: list[Range] = []
        self.spare, at = 0, start
        for offset, view in sorted(wanted, key=lambda one: one[0]):
            low, high = max(offset, start), min(offset + len(view), start + length)
            if low < at:  # the same bytes twice: all of them are copied from a whole chunk in scratch memory
                self.parts, self.wanted, self.spare = [memoryview(bytearray(length))], [], length
                self.copies = [_clip(start, length, *one) for one in wanted]
                return
            self._skip(low - at)
            self.parts.append(view[low - offset : high - offset])
            self.wanted.append((low, self.parts[-1]))
            at = high
        self._skip(start + length - at)

    def _skip(self, count: int) -> None:
        if count:
            self.parts.append(memoryview(bytearray(count)))
            self.spare += count

    def fill(self, data: memoryview) -> None:
        """Take the bytes of the whole chunk from elsewhere."""
        at = 0
        for part in self.parts:
            part[:] = data[at : at + len(part)]
            at += len(part)

    def finish(self) -> None:
        """After ``parts`` were filled."""
        for at, target in self.copies:
            target[:] = self.parts[0][at : at + len(target)]

    def crc(self) -> int:
        found = 0
        for part in self.parts:
            found = crc32c(part, found)
        return found


def _clip(start: int, length: int, offset: int, view: memoryview) -> Range:
    low, high = max(offset, start), min(offset + len(view), start + length)
    return low - start, view[low - offset : high - offset]


class Destination:
    """The memory of ``requests``. Raises `DataError` for a range past the end of its file."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.files: dict[FileId, ChunkFile] = {}
        self.size = 0
        self._wanted: dict[FileId, dict[int, list[Range]]] = {}
        for file, offset, memory in requests:
            view = memory.cast("B")
            file.check_range(offset, len(view))
            if not len(view):
                continue
            name = id_of(file)
            self.files.setdefault(name, file)
            self.size += len(view)
            chunks = self._wanted.setdefault(name, {})
            one = (offset, view)
            for chunk in range(offset // file.unit, -(-(offset + len(view)) // file.unit)):
                chunks.setdefault(chunk, []).append(one)

    def needs(self) -> Needs:
        return {name: tuple(runs(chunks)) for name, chunks in self._wanted.items()}

    def chunk(self, name: FileId, chunk: int) -> Chunk:
        """Its places; the scratch memory among them is new."""
        return Chunk(chunk * name.unit, name.bytes_of(chunk, 1), self._wanted[name][chunk])

    def read(self, spans: Iterable[Span], *, whole: bool) -> tuple[dict[tuple[FileId, int], Chunk], int]:
        """Read ``spans`` from the store: their chunks, and the bytes that were read.

        Without ``whole`` only what is wanted of them is there after it. Errors of `ChunkFile.readinto`.
        """
        chunks = {(span.file, n): self.chunk(span.file, n) for span in spans for n in _numbers(span)}
        ranges: dict[FileId, list[Range]] = {}
        scratch: list[tuple[Chunk, memoryview]] = []
        for (name, number), chunk in chunks.items():
            found = ranges.setdefault(name, [])
            if len(chunk.parts) == 1 and not chunk.spare:
                found.append((number * name.unit, chunk.parts[0]))
            elif not whole and not chunk.copies and not isinstance(self.files[name], StripedFile):
                found += chunk.wanted  # nothing checks a chunk of a plain file: no need for the rest of it
            else:
                scratch.append((chunk, memoryview(bytearray(name.bytes_of(number, 1)))))
                found.append((number * name.unit, scratch[-1][1]))
        for name, found in ranges.items():
            self.files[name].readinto_many(found)
        for chunk, data in scratch:
            chunk.fill(data)
        for chunk in chunks.values():
            chunk.finish()
        return chunks, sum(len(view) for found in ranges.values() for _, view in found)

    @property
    def cached(self) -> int:
        """Bytes that came from the node cache so far."""
        return sum(file.cached for file in self.files.values())

    def keep(self, name: FileId, number: int, chunk: Chunk) -> None:
        """Put a chunk that another rank has read into the node cache, if it has the store's CRC."""
        file = self.files[name]
        if isinstance(file, StripedFile):
            file.local.keep(number, chunk.parts)

    def expected_crc(self, name: FileId, number: int) -> int | None:
        """CRC-32C that the store says of a chunk; None for a plain file."""
        file = self.files[name]
        return file.chunk_crc(number) if isinstance(file, StripedFile) else None


def _numbers(span: Span) -> Iterator[int]:
    return iter(range(span.first, span.first + span.chunks))
