"""All runs of one invocation of bench/image: conversion, recording, the rounds of starts, the readings."""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

import _convert
import _parts
import _reading
import _site
from _node import Order, Outcome
from bootseer import image, report
from bootseer.blocks import tree
from bootseer.blocks.cache.metadata import LocalTree, localize, localize_manifest
from bootseer.blocks.formats import pagelist
from bootseer.blocks.formats.pagelist import PageList
from bootseer.blocks.formats.trace import UNIT, Trace
from bootseer.blocks.profiles.library import ProfileKey, load_own, load_pages
from bootseer.demo import workplace
from bootseer.demo.site import WITH_US
from bootseer.errors import BootseerError
from bootseer.report import Run
from bootseer.store import open_store

NODE = Path(__file__).with_name("_node.py")
DRIVERS = ("fanotify", "fuse")
NO_FILL = {"BOOTSEER_BACKGROUND_FILL": "false"}
NO_RECORD = {**NO_FILL, "BOOTSEER_RECORD_SECONDS": "0.001"}
NO_READAHEAD = {"BOOTSEER_READAHEAD": "false"}
FAR = "-10ms"
_DEADLINE = 1000.0
_GIVE_UP = 2
"""Failures after which a variant is not tried again."""


def starts() -> list[str]:
    """All variants that are starts, in the order of a round."""
    ours = [
        f"{kind}-{driver}{suffix}"
        for driver in DRIVERS
        for kind, suffix in (("hot", ""), ("hot", FAR), ("on-demand", ""), ("warm", ""), ("warm", "-norecord"))
    ]
    return [
        "local",
        "local-warm",
        *ours,
        "nydus",
        "nydus-prefetch",
        f"nydus{FAR}",
        f"nydus-prefetch{FAR}",
        "containerd",
    ]


SPARE = ["hot-fuse-10ms", "warm-fuse", "warm-fuse-norecord", "read-filled-fuse"]
"""What no figure needs where the fanotify driver works; they run when they are named."""
OTHERS = ["convert", "convert-tools", "read-complete", *(f"read-filled-{driver}" for driver in DRIVERS)]


def say(line: str) -> None:
    """A line of progress."""
    print(f"==> {line}", file=sys.stderr, flush=True)


class Bench:
    """All runs of one invocation; ``document`` grows by them."""

    def __init__(self, options: argparse.Namespace, work: Path, site: _site.Site, parts: _parts.Parts,
                 document: report.Report, variants: list[str]) -> None:  # fmt: skip
        self.options, self.work, self.site, self.parts = options, work, site, parts
        self.document, self.variants = document, variants
        self.before = Counter(run.variant for run in document.runs)
        self.failures: Counter[str] = Counter()
        self.record_file = work / "record.json"
        self.full: LocalTree | None = None
        self.digest = ""

    def run(self) -> None:
        """Convert and record what the variants need, then the rounds, then the readings."""
        chosen = [name for name in starts() if name in self.variants]
        self._convert()
        if any(name.startswith(("local", "read-")) for name in self.variants):
            self._complete()
        for driver in DRIVERS:
            if any(name.startswith((f"hot-{driver}", f"warm-{driver}")) for name in chosen):
                for number in range(1, pagelist.ENOUGH + 1):
                    self._guarded(f"record-{driver}", number, partial(self._record, driver, number))
        for number in range(1, self.options.runs + 1):
            for name in chosen:
                self._guarded(name, number, partial(self._start, name, number))
            if number <= self.options.conversions:
                for name, convert in (("convert", _convert.ours), ("convert-tools", _convert.tools)):
                    if name in self.variants:
                        self._guarded(name, number, partial(self._conversion, convert, number))
        for name in OTHERS[2:]:
            if name in self.variants:
                self._guarded(name, 1, partial(self._read, name))
        for driver in DRIVERS:
            if f"warm-{driver}" in chosen:
                self._guarded(f"page-list-{driver}", 1, partial(self._listed, driver))

    def _guarded(self, name: str, number: int, action: Callable[[], Run | None]) -> None:
        """Add the run; or, when it fails, its reason."""
        if self.failures[name] >= _GIVE_UP:
            return
        try:
            made = action()
        except (BootseerError, OSError) as exc:
            self.failures[name] += 1
            made = Run(variant=name, n=number, failed=str(exc))
        if made is not None:
            self.note(made)

    def note(self, run: Run) -> None:
        run.n += self.before[run.variant]
        self.document.runs.append(run)
        self.write()
        if run.failed:
            say(f"{run.variant:24} {run.n}  failed: {run.failed}")
            return
        more = {**run.stages, **run.bytes, **run.details}
        shown = " ".join(f"{key}={more[key]}" for key in more if not isinstance(more[key], dict))
        say(f"{run.variant:24} {run.n}  {run.seconds:9.3f} s  {shown[:160]}")

    def write(self) -> None:
        if self.options.out:
            self.document.write(self.options.out)

    def _convert(self) -> None:
        """The image into the site's store."""
        store = self.site.store()
        assert store is not None
        say("conversion into the store of the runs")
        began = time.monotonic()
        record = image.convert(self.site.ref(), store, work_dir=self.work / "convert")
        self.record_file.write_bytes(msgspec.json.encode(record))
        self.digest = record.tree
        say(f"converted in {time.monotonic() - began:.0f} s: {record.stored_bytes / 1e6:.0f} MB in the store")

    def _complete(self) -> None:
        """All of the tree in a node cache, without crossing the link."""
        store = self.site.store()
        assert store is not None
        tree.prefetch(store, self.digest, cache_dir=self.work / "full")
        self.full = localize(open_store(store), self.digest, self.work / "full")

    def _order(self, how: str, place: Path, *, far: bool = False) -> Order:
        return Order(how=how, work=str(place), link=self.site.node.link, command=self.parts.command,
                     ref=self.site.ref(far), record=str(self.record_file))  # fmt: skip

    def _ours(self, place: Path, driver: str, job: str | None, *, far: bool = False) -> Order:
        order = self._order("lazy", place, far=far)
        order.driver, order.job = driver, job
        store = self.site.store(far)
        if store is None:
            raise BootseerError("the store cannot be reached through the latency proxy")
        order.store = store
        return order

    def _record(self, driver: str, number: int) -> Run:
        """One of the starts that make the profile of ``driver``. The node cache of the first stays, for the ``warm``
        variants; the others prefetch by what is known so far, on an empty node, and say how much of it was wasted."""
        with self._place() as place:
            order = self._ours(place, driver, f"bench-{driver}")
            order.environ, order.settle = dict(NO_FILL), True
            order.cache = str(self.work / f"warm-{driver}") if number == 1 else ""
            return self._outcome(f"record-{driver}", number, order)

    def _start(self, name: str, number: int) -> Run:
        far = name.endswith(FAR)
        with self._place() as place:
            kind, _, driver = name.removesuffix(FAR).removesuffix("-norecord").rpartition("-")
            if name.startswith("local"):
                order = self._order("local", place)
                assert self.full is not None
                order.options = {"meta": str(self.full.meta), "data": str(self.full.cache / "data")}
                if name == "local-warm":
                    order.options["warm"] = "yes"
            elif name.startswith("nydus"):
                order = self._order("nydus", place)
                order.options = {
                    "registry": self.site.registry(far), "repository": _parts.NYDUS,
                    "bootstrap": str(self.parts.bootstrap), "prefetch": "yes" if "prefetch" in name else "",
                }  # fmt: skip
            elif name == "containerd":
                order = self._order("containerd", place)
            else:
                # warm starts leave their traces elsewhere: hot ones are to prefetch by starts like themselves
                job = None if kind == "on-demand" else f"{'warm' if kind == 'warm' else 'bench'}-{driver}"
                order = self._ours(place, driver, job, far=far)
            if kind == "warm":
                order.cache = str(self.work / f"warm-{driver}")
                # with readahead there would be little to record, and little to compare
                order.environ = {**(NO_RECORD if name.endswith("-norecord") else NO_FILL), **NO_READAHEAD}
            return self._outcome(name, number, order)

    def _outcome(self, name: str, number: int, order: Order) -> Run:
        """Run the order on the node."""
        argv = [sys.executable, str(NODE), msgspec.json.encode(order).decode()]
        log = self.work / "node.log"
        with open(log, "ab+") as err:
            at = err.tell()
            process = subprocess.Popen(
                [*WITH_US, *self.site.node.argv(argv)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, start_new_session=True,
            )  # fmt: skip
            output = _communicate(process)
            err.seek(at)
            said = err.read().decode(errors="replace").strip().splitlines()
        if process.returncode:
            raise BootseerError(said[-1] if said else f"the start ended with code {process.returncode}")
        outcome = msgspec.json.decode(output.strip().split(b"\n")[-1], type=Outcome)
        details = {"cpu_seconds": outcome.cpu, **outcome.details}
        return Run(variant=name, n=number, seconds=outcome.seconds, stages=outcome.stages,
                   bytes={"link": outcome.link_bytes}, details=details)  # fmt: skip

    def _conversion(self, convert: Callable[[str, Path, int], Run], number: int) -> Run:
        _drop_caches()
        return convert(self.site.ref(), self.work / "conversion", number)

    def _listed(self, driver: str) -> Run:
        """What of the page list of ``driver`` those starts did not touch that it is not made of, and that nothing was
        read ahead of: the ``warm`` ones. Those without recording leave a millisecond of it, which is not compared."""
        url = self.site.store()
        assert url is not None
        store = open_store(url)
        size = localize_manifest(store, self.digest, self.work / "parts").manifest.data_size
        keys = [info.key for info in store.list(ProfileKey(f"bench-{driver}").prefix(self.digest))]
        keys = [key for key in keys if key.endswith(f".{driver}.pages")]
        traces = load_own(store, self.digest, ProfileKey(f"warm-{driver}"), size)
        longest = max((trace.touches[-1].ms for trace in traces if trace.touches), default=0)
        whole = [trace for trace in traces if trace.touches and 2 * trace.touches[-1].ms >= longest]
        if not keys or not whole:
            raise BootseerError(f"there is no page list of {driver}, or no start to compare it with")
        pages = load_pages(store, keys[0], self.digest, size)
        wasted = statistics.median(unused(pages, trace) for trace in whole)
        details = {"ranges": len(pages.ranges), "starts": len(whole), "unused": round(wasted, 4)}
        return Run(variant=f"page-list-{driver}", n=1, seconds=0.0, bytes={"listed": pages.size}, details=details)

    def _read(self, name: str) -> None:
        """Readings through our mount beside plain ones; the runs are noted here."""
        assert self.full is not None
        store = self.site.store()
        assert store is not None
        driver = name.removeprefix("read-filled-") if "filled" in name else "auto"
        with self._place() as place:
            cache = self.work / "full" if driver == "auto" else place / "cache"
            with _reading.mounted(store, self.digest, place, driver, cache) as made:
                local = self.full
                if driver != "auto":
                    _reading.fill(made)
                    local = localize(open_store(store), self.digest, cache)
                data = local.cache / "data"
                for run in _reading.compare(name, made.target, local.meta, data, place, self.options.runs):
                    self.note(run)

    @contextlib.contextmanager
    def _place(self) -> Iterator[Path]:
        """An empty folder for one run, deleted at its end with everything that a run that failed left there."""
        place = self.work / "place"
        place.mkdir()
        try:
            yield place
        finally:
            workplace.remove(place)


def unused(pages: PageList, trace: Trace) -> float:
    """The share of the list's bytes that the start which left ``trace`` did not touch."""
    touched = {unit for touch in trace.touches for unit in range(touch.unit, touch.unit + touch.count)}
    listed = [unit for one in pages.ranges for unit in range(one.data // UNIT, (one.data + one.length) // UNIT)]
    return sum(unit not in touched for unit in listed) / max(len(listed), 1)


def _communicate(process: subprocess.Popen[bytes]) -> bytes:
    """The process's output; on Ctrl-C or past the deadline it may clean up after itself before it is killed."""
    try:
        return process.communicate(timeout=_DEADLINE)[0]
    except BaseException as exc:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        if process.poll() is None:
            process.kill()
            process.wait()
        if isinstance(exc, subprocess.TimeoutExpired):
            raise BootseerError(f"the start did not end within {_DEADLINE:.0f} s") from None
        raise


def _drop_caches() -> None:
    subprocess.run(["sync"], check=False, timeout=300)
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
