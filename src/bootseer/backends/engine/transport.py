"""An open HDFS file whose blocks this process reads from DataNodes itself: where they are, and one transfer of them.

A block's bytes do not change, except when its file is appended to or truncated, which gives it a new generation: what
was read is of one version as long as blocks, generations and length are what they were when the file was opened.
Nothing here knows of locks or threads; `backends.engine.engine` calls it in its workers."""

from __future__ import annotations

import itertools
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from bootseer.backends.engine.model import Attempt, BlockRange, Checksums, CopyBack, Outcome, Place
from bootseer.backends.interface import DEADLINE, SLOWEST, Piece
from bootseer.errors import BootseerError, DataError, NotFoundError
from bootseer.hdfs.replica_errors import Cancelled, CorruptReplica, OwnLimit, StaleReplica, UncheckedReplica

if TYPE_CHECKING:
    from bootseer.hdfs.records import DataNode, FileBlocks, Located


class Files(Protocol):
    """What is asked of the NameNode."""

    def blocks(self, path: str) -> FileBlocks:
        """Where the blocks of ``path`` are now."""

    def report(self, replica: Located) -> None:
        """The block is damaged on the one DataNode of ``replica``."""


class Replicas:
    """What the engine knows of a `Place`: the block, and its DataNodes by key. Replaced as a whole."""

    def __init__(self, located: Located) -> None:
        self.located = located
        self.nodes: dict[str, DataNode] = {node.uuid: node for node in located.nodes}


def replicas_of(place: Place) -> Replicas:
    return cast(Replicas, place.tag)


class BlockFile:
    """``path`` as it was when ``blocks`` were asked for. Its places change under the engine's lock only.
    ``unfinished``: its writer had not closed it then; ``size`` is what its complete blocks hold."""

    def __init__(self, files: Files, path: str, blocks: FileBlocks) -> None:
        self.files, self.path = files, path
        self.size, self.unfinished = blocks.length, blocks.under_construction
        known = [block for block in blocks.blocks if block.offset + block.block.length <= blocks.length]
        sums = Checksums()
        self.places = [Place(self, [node.uuid for node in block.nodes], Replicas(block), sums) for block in known]
        *expected, covered = itertools.accumulate((block.block.length for block in known), initial=0)
        self._starts = [block.offset for block in known]
        if covered != self.size or self._starts != expected:
            raise DataError(f"the blocks of {path} hold {covered} bytes, not {self.size}", hint="run hdfs fsck on it")

    def locate(self) -> FileBlocks:
        """Fresh locations of the same blocks. `DataError` when the file at the path is another one now."""
        try:
            fresh = self.files.blocks(self.path)
        except NotFoundError:
            raise self._replaced() from None
        blocks = {block.block.id: block.block for block in fresh.blocks}
        for place in self.places:
            old = replicas_of(place).located.block
            if (new := blocks.get(old.id)) is None or new.length < old.length or new.generation < old.generation:
                raise self._replaced()
            if new.generation != old.generation and new.length != old.length:
                raise self._replaced()  # appended to or truncated
        return fresh

    def _replaced(self) -> DataError:
        return DataError(f"{self.path} was replaced while it was read", hint="open it again")

    def relocate(self, fresh: FileBlocks) -> None:
        """Take what `locate` found, under the engine's lock."""
        blocks = {block.block.id: block for block in fresh.blocks}
        for place in self.places:
            found = blocks[replicas_of(place).located.block.id]
            place.keys, place.tag = tuple(node.uuid for node in found.nodes), Replicas(found)
            place.bad.clear()
            place.unchecked.clear()

    def spans(self, piece: Piece, split: list[Callable[[], None]]) -> Iterator[BlockRange]:
        """The parts of ``piece`` by block. ``split`` gets the checks of those in several, for when all is there."""
        at = piece.offset
        if at < 0 or at + sum(map(len, piece.parts)) > self.size:
            raise DataError(f"{self.path} ends at {self.size}, more was expected")
        views: list[memoryview] = []
        starts: list[int] = []
        index = first = -1
        for number, part in enumerate(piece.parts):
            if not len(part):
                continue
            now = bisect_right(self._starts, at) - 1
            block = replicas_of(self.places[now]).located
            whole = at + len(part) <= block.offset + block.block.length
            if views and (now != index or not whole):
                yield self._span(index, starts, views, piece, first)
                views = []
            if whole:
                if not views:
                    index, first, starts = now, number, [at - block.offset]
                views.append(part)
                starts.append(at + len(part) - block.offset)
            else:
                yield from self._cut(now, at, part, piece)
                if piece.check is not None:
                    split.append(partial(piece.check, number, part))
            at += len(part)
        if views:
            yield self._span(index, starts, views, piece, first)

    def _span(self, index: int, starts: list[int], views: list[memoryview], piece: Piece, first: int) -> BlockRange:
        return BlockRange(self.places[index], starts, verify=piece.check is None, tag=Views(views, piece.check, first))

    def _cut(self, index: int, at: int, part: memoryview, piece: Piece) -> Iterator[BlockRange]:
        """A part that lies in several blocks."""
        done = 0
        while done < len(part):
            block = replicas_of(self.places[index]).located
            begin = at + done - block.offset
            count = min(len(part) - done, block.block.length - begin)
            if count:
                views, verify = Views([part[done : done + count]], None, 0), piece.check is None
                yield BlockRange(self.places[index], [begin, begin + count], verify=verify, split=True, tag=views)
            done, index = done + count, index + 1


class Views:
    """Memory of a span's parts; ``check`` knows the first of them as number ``first``."""

    def __init__(self, parts: list[memoryview], check: Callable[[int, memoryview], None] | None, first: int) -> None:
        self.parts, self.judge, self.first = parts, check, first

    def check(self, parts: Sequence[memoryview], first: int) -> None:
        """Raises `DataError` when ``parts``, bytes for the parts from ``first`` on, are wrong."""
        if self.judge is not None:
            for number, part in enumerate(parts, self.first + first):
                self.judge(number, part)


def views(span: BlockRange) -> Views:
    return cast(Views, span.tag)


Read = Callable[..., None]
"""How bytes of a block are had; arguments of `bootseer.hdfs.datanode.read`."""


def transfer(attempt: Attempt, read: Read) -> tuple[Outcome, BootseerError | None]:
    """Transfer and check. Other errors than those of the other side and of the bytes are raised."""
    where = replicas_of(attempt.place)
    node = where.nodes.get(attempt.node.key)
    if node is None:  # it has lost the block since
        return Outcome.REFUSED, None
    parts = _memory(attempt)
    try:
        read(
            node,
            where.located,
            attempt.offset,
            parts,
            deadline=DEADLINE + attempt.size / SLOWEST,
            verify=attempt.verify,
            transfer=attempt.handle,
        )
        if attempt.run is not None:
            views(attempt.run.span).check(parts, attempt.run.first)
    except Cancelled:
        return Outcome.CANCELLED, None
    except OwnLimit as exc:
        return Outcome.UNASKED, exc
    except StaleReplica as exc:
        return Outcome.REFUSED, exc
    except UncheckedReplica as exc:
        return Outcome.UNCHECKED, exc
    except CorruptReplica as exc:
        return Outcome.CORRUPT, exc
    except DataError as exc:
        return Outcome.DAMAGED, exc
    except BootseerError as exc:
        return Outcome.FAILED, exc
    finally:
        del parts  # an error keeps this frame, and that the caller's memory
    return Outcome.DONE, None


def _memory(attempt: Attempt) -> list[memoryview]:
    """The caller's for a primary attempt, scratch memory for others."""
    run = attempt.run
    if run is not None and attempt.kind == "primary":
        return views(run.span).parts[run.first : run.last]
    attempt.tag = buffer = bytearray(attempt.size)
    whole = memoryview(buffer)
    if run is None:
        return [whole]
    starts = run.span.starts
    return [whole[starts[i] - run.offset : starts[i + 1] - run.offset] for i in range(run.first, run.last)]


def land(landing: CopyBack) -> None:
    """Copy a hedge's bytes into the caller's memory."""
    run, data, at = landing.run, memoryview(cast(bytearray, landing.attempt.tag)), 0
    for part in views(run.span).parts[run.first : run.last]:
        part[:] = data[at : at + len(part)]
        at += len(part)


def wrong(checks: Sequence[Callable[[], None]]) -> BaseException | None:
    """What the first of ``checks`` says that finds something."""
    try:
        for check in checks:
            check()
    except Exception as exc:
        return exc
    return None


def let_go(error: BaseException) -> None:
    """Drop what the frames of ``error`` hold: memory of which there is a view can be neither resized nor unmapped."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
