"""An open HDFS file whose blocks this process reads from DataNodes itself: where they are, and one transfer of them.

A block's bytes do not change, except when its file is appended to or truncated, which gives it a new generation: what
was read is of one version as long as blocks, generations and length are what they were when the file was opened.

Nothing here knows of locks or threads; `bootseer.stripefs.scheduler.threads` calls it in its workers.
"""

from __future__ import annotations

import traceback
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol, cast

from bootseer.errors import BootseerError, DataError, NotFoundError
from bootseer.hdfs.records import DataNode, FileBlocks, Located
from bootseer.hdfs.replica_errors import Cancelled, CorruptReplica, OwnLimit, StaleReplica, UncheckedReplica
from bootseer.storage.interface import DEADLINE, Piece
from bootseer.stripefs.scheduler.model import (
    SLOWEST,
    Attempt,
    Checksums,
    Join,
    Outcome,
    Place,
    Run,
    Span,
    Transfer,
)


class Files(Protocol):
    """What is asked of the NameNode."""

    def blocks(self, path: str) -> FileBlocks:
        """Where the blocks of ``path`` are now."""

    def report(self, replica: Located) -> None:
        """The block is damaged on the one DataNode of ``replica``."""


def located(place: Place) -> Located:
    """The block, and the DataNodes that have it. Replaced as a whole."""
    return cast(Located, place.tag)


class BlockFile:
    """``path`` as it was when ``blocks`` were asked for. Its places change under the engine's lock only.

    ``unfinished``: its writer had not closed it then; ``size`` is what its complete blocks hold.
    """

    def __init__(self, files: Files, path: str, blocks: FileBlocks) -> None:
        self.files, self.path = files, path
        self.size, self.unfinished = blocks.length, blocks.under_construction
        known = [block for block in blocks.blocks if block.offset + block.block.length <= blocks.length]
        sums = Checksums()
        self.places = [Place(self, [node.uuid for node in block.nodes], block, sums) for block in known]
        self._starts = [block.offset for block in known]
        *starts, covered = accumulate((block.block.length for block in known), initial=0)
        if covered != self.size or self._starts != starts:
            raise DataError(f"the blocks of {path} hold {covered} bytes, not {self.size}", hint="run hdfs fsck on it")

    def locate(self) -> FileBlocks:
        """Fresh locations of the same blocks. `DataError` when the file at the path is another one now."""
        try:
            fresh = self.files.blocks(self.path)
        except NotFoundError:
            raise self._replaced() from None
        blocks = {block.block.id: block.block for block in fresh.blocks}
        for place in self.places:
            old = located(place).block
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
            found = blocks[located(place).block.id]
            place.keys, place.tag = tuple(node.uuid for node in found.nodes), found
            place.bad.clear()
            place.unchecked.clear()

    def spans(self, piece: Piece) -> list[Span]:
        """The parts of ``piece``: neighbours that lie in one block together, those in several blocks by themselves."""
        at, verify = piece.offset, piece.check is None
        if at < 0 or at + sum(map(len, piece.parts)) > self.size:
            raise DataError(f"{self.path} ends at {self.size}, more was expected")
        found: list[Span] = []
        last: Views | None = None
        for number, part in enumerate(piece.parts):
            cuts = self._cuts(at, part)
            at += len(part)
            if len(cuts) > 1:
                join = Join(len(cuts), Views([part], piece.check, number)) if piece.check else None
                for place, begin, view in cuts:
                    tag = Views([view], None, 0)
                    found.append(Span(place, [begin, begin + len(view)], verify=verify, tag=tag, join=join))
                last = None
                continue
            for place, begin, view in cuts:
                if last is None or found[-1].place is not place:
                    last = Views([], piece.check, number)
                    found.append(Span(place, [begin], verify=verify, tag=last))
                found[-1].starts.append(begin + len(view))
                last.parts.append(view)
        return found

    def _cuts(self, at: int, part: memoryview) -> list[tuple[Place, int, memoryview]]:
        """Where ``part``, which is at ``at`` of the file, lies: places, offsets in their blocks, and its memory."""
        found, done, index = [], 0, bisect_right(self._starts, at) - 1
        while done < len(part):
            block = located(self.places[index])
            begin = at + done - block.offset
            if count := min(len(part) - done, block.block.length - begin):
                found.append((self.places[index], begin, part[done : done + count]))
            done, index = done + count, index + 1
        return found


class Views:
    """Memory of a span's parts; ``check`` knows the first of them as number ``first``."""

    def __init__(self, parts: list[memoryview], check: Callable[[int, memoryview], None] | None, first: int) -> None:
        self.parts, self.judge, self.first = parts, check, first

    def check(self, parts: Sequence[memoryview], first: int = 0) -> None:
        """Raises `DataError` when ``parts``, bytes for the parts from ``first`` on, are wrong."""
        if self.judge is not None:
            for number, part in enumerate(parts, self.first + first):
                self.judge(number, part)


def views(of: Span | Join) -> Views:
    return cast(Views, of.tag)


class Transport(Protocol):
    """How bytes of a block are had: the module `bootseer.hdfs.datanode`, or a double of it."""

    def Transfer(self) -> Transfer: ...

    def read(
        self,
        node: DataNode,
        located: Located,
        offset: int,
        parts: Sequence[memoryview],
        *,
        deadline: float,
        verify: bool,
        transfer: Any,
    ) -> None: ...


def transfer(attempt: Attempt, transport: Transport) -> tuple[Outcome, BootseerError | None]:
    """Transfer and check. Other errors than those of the other side and of the bytes are raised."""
    where = located(attempt.place)
    node = next((node for node in where.nodes if node.uuid == attempt.node.key), None)
    if node is None:  # it has lost the block since
        return Outcome.REFUSED, None
    parts = _memory(attempt)
    try:
        transport.read(
            node,
            where,
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


def land(run: Run) -> None:
    """Copy the bytes of the hedge that won into the caller's memory."""
    assert run.won is not None
    data, at = memoryview(cast(bytearray, run.won.tag)), 0
    for part in views(run.span).parts[run.first : run.last]:
        part[:] = data[at : at + len(part)]
        at += len(part)


def let_go(error: BaseException) -> None:
    """Drop what the frames of ``error`` hold: memory of which there is a view can be neither resized nor unmapped."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
