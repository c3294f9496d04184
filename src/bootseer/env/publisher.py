"""The publisher: what a set-up command makes, on its way to being a snapshot.

``python -m bootseer.env.publisher FD`` is the process of a `Publication`; who waits for it anyway uses `Work` itself.
It takes two messages from FD: one that the command begins, and, when something can be read from its standard input,
another that it has succeeded. Meanwhile it stores files that have settled in the upper layers. It says at the end that
the snapshot is published, or why not."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import math
import os
import pickle
import select
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bootseer import faults, loglimit
from bootseer.blocks.fetch.predict import predict_profiles
from bootseer.blocks.publish.dedup import KnownBlocks
from bootseer.blocks.publish.tree import TreeWriter
from bootseer.chunks.blockmap import DEFAULT_BLOCK
from bootseer.env import layer, leads, place, pyc, scan, snapshots
from bootseer.env.contents import Contents, File, read_layers
from bootseer.env.inputs import Opened
from bootseer.env.publication import Begin, End
from bootseer.env.publish import Made, publish
from bootseer.env.unpack import undoing
from bootseer.errors import BootseerError, ConfigError, DataError, FullError, NotWritableError, UnavailableError
from bootseer.folders import private_folder
from bootseer.kernel import background, beneath, bounds
from bootseer.kernel.removal import discard_tree
from bootseer.objects import lease, open_store, signature

log = logging.getLogger(__name__)

_SETTLED = 0.2
"""Seconds without a change after which a file counts as finished. What changes later was stored in vain, once."""
_ROUND, _SHARE = 0.2, 10.0
"""Seconds between two looks for such files; at least so many times the processor seconds that it took to find them."""
_SCORE = 1000
"""Of the kernel's killer of processes: nobody loses anything by the end of this one, and the job is beside it."""
_PACK = 16 << 20
"""Bytes of a stored object: while one is sent the next is made."""


class Work:
    """Context manager; `settled` may be called while the command runs, then `publish` once."""

    def __init__(self, begin: Begin) -> None:
        self._begin, self._spec = begin, begin.spec
        self._stack = contextlib.ExitStack()
        self._put = self._ready = self._total = 0
        self._kin: list[str] = []
        config = begin.config
        self._early = self.failed = False
        """While the command ran: whether something was stored, and whether that is of no use."""
        self._may_publish = bool(config.sign_key) or not (config.verify_key or config.require_signature)

    def __enter__(self) -> Work:
        self.start()
        return self

    def start(self) -> None:
        """Once more: what was stored so far does not count."""
        self._stack.close()
        self._put = self._ready = self._total = 0
        self._early = self.failed = False
        self._settled = scan.Settled()
        with self._stack as stack:
            self._work = self._folder(stack)
            self.store = open_store(self._begin.store_url)
            self._tree = stack.enter_context(
                TreeWriter(self.store, self._work, known=self._known(), progress=self._count, pack_limit=_PACK)
            )
            self._contents = Contents(self._tree.packs)
            self._stack = stack.pop_all()

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _folder(self, stack: contextlib.ExitStack) -> Path:
        """In the area of the overlays; else beside the first target: there it is most likely on its file system, where
        hard links stage gigabytes in a moment, and the next start removes what is left of it."""
        if not self._begin.area:
            with contextlib.suppress(PermissionError, ConfigError):
                return stack.enter_context(undoing(self._spec.targets[0])).folder
        base = Path(self._begin.area or private_folder(Path(self._begin.config.cache_dir), sub="env"))
        folder = Path(tempfile.mkdtemp(prefix="publication-", dir=base))
        stack.callback(discard_tree, folder)
        return folder

    def _known(self) -> KnownBlocks | None:
        """The blocks of the newest snapshots of these targets: of one that was damaged none, which would stay so."""
        if self._begin.replaces is not None:
            return None
        keys = signature.trusted_keys(self._begin.config)
        self._kin = snapshots.newest_trees(self.store, self._begin.document, keys)
        return KnownBlocks.of_trees(self.store, self._kin, DEFAULT_BLOCK)

    def _placed(self) -> int:
        return self._contents.placed_bytes if hasattr(self, "_contents") else 0

    def _count(self, put: int, ready: int) -> None:
        self._put, self._ready = put, ready

    def progress(self, seconds: float) -> Callable[[], lease.Progress]:
        """What other nodes are told from now on, after a command that took so long. What was not read yet is taken for
        as well compressible as what was."""
        began, before = time.monotonic(), self._put

        def told() -> lease.Progress:
            since, placed = time.monotonic() - began, self._placed()
            share = self._ready / placed if placed and self._ready else 1.0
            left = max(0, self._total - placed) * share + self._ready - self._put
            return lease.Progress(seconds, since, left, max(0, self._put - before) / since if since else 0.0)

        return told

    def settled(self, stop: Callable[[], bool]) -> float:
        """Store the files of the upper layers that nobody has changed for a while, until it is to ``stop``. The
        processor seconds that it took to look for them."""
        if not self._may_publish or self.failed:
            return 0.0
        self._early = True
        try:
            upper, before = Path(self._begin.area, "upper"), time.time() - _SETTLED
            began = time.thread_time()  # at idle priority it may take long to get a moment of a processor
            found = [*scan.walk(upper, settled=self._settled, before=before)]
            looked = time.thread_time() - began
            self._stored(upper, found, before, stop)
            return looked
        except (BootseerError, OSError) as exc:
            log.info("nothing is stored before the command has ended: %s", exc)
            self.failed = True
            return 0.0

    def _stored(
        self,
        layers: Path,
        found: Iterable[tuple[str, os.stat_result]],
        before: float = math.inf,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """What of ``found`` last changed before then, as far as nobody has it open for writing, goes on its way."""
        with beneath.folder(layers) as root:
            files = [File(root, path, status) for path, status in found if stat.S_ISREG(status.st_mode)]
            for _ in self._contents.early(files, before):
                faults.point("env.publish.early")
                self._tree.packs.hand_over()
                if stop():
                    break
        self._tree.packs.hand_over()

    def publish(self, end: End) -> tuple[bool, str]:
        """(published, why not). Raises `BootseerError`, `OSError` when it could not be. What was stored early, when it
        is not all in the store, is stored again."""
        if not self.failed:
            try:
                return self._publish(end)
            except (FullError, NotWritableError, UnavailableError) as exc:
                if not self._early:
                    raise
                log.info("all is stored again: %s", exc)
        self.start()
        return self._publish(end)

    def _publish(self, end: End) -> tuple[bool, str]:
        begin, targets = self._begin, range(len(self._spec.targets))
        self._settled.clear()  # all is listed anew
        if not self._may_publish:
            return False, "not published: snapshots must be signed here, and no sign_key is set"
        faults.point("env.publish.before-capture")
        with ThreadPoolExecutor(1, "inputs") as beside:
            hashed = beside.submit(end.inputs.digested, self._spec, begin.config)  # at once: the job may write to these
            layers = self._staged(end) if end.changes else Path(begin.area, "upper")
            listed, _ = layer.list_layers(len(targets), layers)
            self._total = sum(item.status.st_size for item in listed if stat.S_ISREG(item.status.st_mode))
            if begin.area:  # first: the link is busy while the rest is made
                self._stored(layers, ((item.path, item.status) for item in listed))
            read = hashed.result()
        compiled = self._work / "compiled"
        for number, target in enumerate(self._spec.targets):
            pyc.compile_missing(self._spec, target, layers / str(number), compiled / str(number))
        faults.point("env.publish.before-build")
        found = read_layers(self._contents, len(targets), layers, compiled, known=listed)
        if found.secrets:
            path, what = found.secrets[0]
            log.warning("not published: %s in %s (%d in all)", what, path, len(found.secrets))
            return False, f"not published: {what} in {path}"
        faults.point("env.publish.before-tree")
        meta = self._contents.seal(found.items, found.entries)
        rows = [layer.merged(base, found.own, number, content=bool(base)) for number, base in enumerate(begin.base)]
        bytes_of = lambda name, most, at=0: _bytes_of(layers / name, most, at)  # noqa: E731
        seen = leads.added(self._spec, begin.config, read, found.own, bytes_of, end.began)
        if begin.area:
            Opened(seen).keep(Path(begin.area))
        made = Made(
            inputs=seen,
            seal=lambda beside: self._tree.seal(meta, self._contents.dead(), beside),
            entries=found.entries,
            base=[scan.fingerprint(base) for base in begin.base],
            result=[scan.fingerprint(found) for found in rows],
            seconds=end.seconds,
        )
        unchanged = lambda: layer.check_unchanged(layers, found.own)  # noqa: E731
        tree = publish(self.store, begin.document, made, begin.replaces, unchanged, begin.config.sign_key)
        if not tree:
            return False, "not published: there is a snapshot of this key already"
        predict_profiles(self.store, tree.digest, self._kin, work=self._work)
        return True, ""

    def _staged(self, end: End) -> Path:
        """The layers of what a scan found, as hard links: read beside a job, which may change its own files."""
        base = self._work / "layers"
        for number, (target, changes) in enumerate(zip(self._spec.targets, end.changes, strict=True)):
            with place.opened(target, make=True) as host:
                layer.stage_layer(host, base / str(number), changes.changed, changes.deleted, changes.marks)
            for path, status in scan.walk(base / str(number)):
                mark = changes.marks.get(path)
                if (
                    mark
                    and (status.st_size, status.st_mtime_ns) != (mark.size, mark.mtime_ns)
                    and not stat.S_ISDIR(status.st_mode)
                ):
                    raise DataError(f"{path} changed before it was captured")
        return base


def _bytes_of(path: Path, most: int, at: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), most, at)


def entered(name: str) -> tuple[io.BytesIO, int]:
    """What this process, a `Publication`, was told by now, and the descriptor of its answer."""
    loglimit.to_stderr()
    background.call_it(name)
    bounds.be_ended_early(_SCORE)
    bounds.limit_memory()
    gc.disable()  # it would go through hundreds of thousands of objects, none of them garbage
    fd, answer = int(sys.argv[1]), os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _cancelled)
    return io.BytesIO(os.pread(fd, os.fstat(fd).st_size, 0)), answer


def main() -> int:
    messages, answer = entered("bootseer-env")
    fd = int(sys.argv[1])
    begin: Begin = pickle.load(messages)
    try:
        with contextlib.ExitStack() as stack:
            work = stack.push(Work(begin))
            if begin.area:
                work.start()
            if not _await_end(work if begin.area else None):
                log.info("the command did not succeed, or who ran it has ended: nothing is published")
                return 0
            end: End = pickle.loads(os.pread(fd, os.fstat(fd).st_size, messages.tell()))
            lead = end.lead and stack.enter_context(
                end.lead.resumed(open_store(begin.store_url), work.progress(end.seconds))
            )
            if not end.alone:
                threading.Thread(target=_end_with_caller, name="caller", daemon=True).start()
            if not begin.area:
                work.start()
            try:
                done, why = work.publish(end)
            except (BootseerError, OSError) as exc:
                done, why = False, f"not published: {exc}"
            if lead and not done:
                lead.unshared(why)
    except (BootseerError, OSError) as exc:
        log.warning("the snapshot was not published: %s", exc)
        done, why = False, f"not published: {exc}"
    log.info("snapshot %s: %s", begin.document.key[:12], "published" if done else why)
    with contextlib.suppress(OSError):  # nobody waits for it
        os.write(answer, (b"published" if done else why.encode(errors="replace")))
    return 0


def _await_end(work: Work | None) -> bool:
    """Whether the command has succeeded. Until then what has settled is stored."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    pause = 0.0
    while not poll.poll(int(pause * 1000) if work else None):
        assert work
        pause = max(_ROUND, _SHARE * work.settled(lambda: bool(poll.poll(0))))
    return bool(os.read(0, 1))


def _end_with_caller() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _cancelled(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGTERM)  # what it has compile keeps the targets in use
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
