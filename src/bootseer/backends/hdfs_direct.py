"""A file in HDFS whose blocks this process reads from the DataNodes itself, through its engine."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bootseer.backends.engine import engine
from bootseer.backends.engine.transport import BlockFile
from bootseer.backends.interface import Piece, Source
from bootseer.errors import DataError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.records import FileBlocks, FileStatus, Located

_PART = 1 << 20
"""Longer memory is cut, so that several DataNodes may fill it."""
_AHEAD, _AT_ONCE = 2 << 20, 2
"""Bytes of one read of `DirectSource.pieces`, and how many of them are under way: while what came is worked on, the
next comes. More would share the link with the first, for which somebody waits."""


@dataclass(frozen=True, slots=True)
class _Files:
    """The NameNode, as `BlockFile` asks it. It is found anew for each question: objects do not survive a fork."""

    url: str

    def blocks(self, path: str) -> FileBlocks:
        return NameNode.connect(self.url).blocks(path)

    def report(self, replica: Located) -> None:
        NameNode.connect(self.url).report_bad_blocks([replica])


class DirectSource(Source):
    """The file at ``path``, an absolute one, of the cluster at ``url``. ``status``: with which it was pinned, if it
    was."""

    def __init__(self, url: str, path: str, blocks: FileBlocks, status: FileStatus | None) -> None:
        self.file = BlockFile(_Files(url), path, blocks)
        self.size, self.unfinished = self.file.size, self.file.unfinished
        self.version = status.version if status is not None else ""
        self._url, self._status = url, status

    def readinto(self, offset: int, parts: Sequence[memoryview]) -> None:
        cut = [part[at : at + _PART] for part in parts for at in range(0, len(part), _PART)]
        read_directly([Piece(self, offset, cut, name=self.file.path)])

    def pieces(self, offset: int, lengths: Sequence[int]) -> Iterator[bytes]:
        under_way: deque[tuple[engine.Reading, list[bytearray]]] = deque()
        reads = iter(self._reads(lengths))
        try:
            while True:
                for some in itertools.islice(reads, _AT_ONCE - len(under_way)):
                    memory = [bytearray(length) for length in some]
                    piece = Piece(self, offset, [memoryview(part) for part in memory], name=self.file.path)
                    under_way.append((engine.shared().begin([(self.file, piece)]), memory))
                    offset += sum(some)
                if not under_way:
                    return
                under_way[0][0].wait()
                self.check()
                yield from map(bytes, under_way.popleft()[1])
        finally:
            for reading, _ in under_way:
                reading.leave()

    @staticmethod
    def _reads(lengths: Sequence[int]) -> Iterator[Sequence[int]]:
        """``lengths`` as one read after another."""
        first, size = 0, 0
        for last, length in enumerate(lengths):
            if size and size + length > _AHEAD:
                yield lengths[first:last]
                first, size = last, 0
            size += length
        if first < len(lengths):
            yield lengths[first:]

    def check(self) -> None:
        """`DataError` when bytes that were just read may be of another version than `version`: the file was changed in
        place (truncated, appended to). One that was removed or replaced keeps its blocks."""
        if self._status is not None:
            now = NameNode.connect(self._url).info(self.file.path)
            if now is not None and now.file_id == self._status.file_id and now.version != self.version:
                raise DataError(f"{self.file.path} was replaced while it was read", hint="open it again")


def read_directly(pieces: Iterable[Piece]) -> None:
    """What `bootseer.backends.interface.Backend.read_many` promises, of pieces whose sources are all direct."""
    direct = [(piece.source, piece) for piece in pieces if isinstance(piece.source, DirectSource)]
    if direct:
        engine.shared().read([(source.file, piece) for source, piece in direct])
        for source in {id(source): source for source, _ in direct}.values():
            source.check()
