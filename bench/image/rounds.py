"""All runs of one invocation of bench/image: conversion, recording, the rounds of starts, the readings."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from bench.common import report
from bench.common.invocation import say
from bench.common.report import Run
from bench.image import conversion, reading, rebuilt
from bench.image import hdfs as image_hdfs
from bench.image import parts as image_parts
from bench.image import site as image_site
from bench.image.ablated import FAR
from bench.image.checkout import BEFORE, HERE, Checkout
from bench.image.node import Order, Outcome
from bootseer import image
from bootseer.blocks import tree
from bootseer.blocks.formats.pagelist import PageList
from bootseer.blocks.formats.trace import UNIT, Trace
from bootseer.blocks.metadata import LocalTree, localize, localize_manifest
from bootseer.blocks.profiles.library import ProfileKey, load_own, load_pages
from bootseer.chunks import hashing
from bootseer.demo import workplace
from bootseer.demo.programs import WITH_US, finish
from bootseer.errors import BootseerError, ConfigError
from bootseer.folders import spread
from bootseer.image.record import ImageRecord
from bootseer.objects import open_store

NO_FILL = {"BOOTSEER_BACKGROUND_FILL": "false"}
NO_RECORD = {**NO_FILL, "BOOTSEER_RECORD_SECONDS": "0.001"}
NO_READAHEAD = {"BOOTSEER_READAHEAD": "false"}
OURS = ["hot", f"hot{FAR}", "on-demand", f"on-demand{FAR}", "warm", "warm-norecord"]
REBUILT, REBUILT_WARM, REBASED = "rebuilt", "rebuilt-warm", "rebased"
BUILDS = {REBUILT: 2, REBUILT_WARM: 2, REBASED: 3}
"""Starts of our own, in the order of a round."""
STARTS = [
    "local", "local-warm", *OURS, *BUILDS, *image_hdfs.STARTS, "unpack", "extract",
    "nydus", "nydus-prefetch", f"nydus{FAR}", "containerd",
]  # fmt: skip
"""All variants that are starts, in the order of a round."""
READINGS = ["read-complete", "read-filled"]
CONVERSIONS = {"convert": conversion.ours, "convert-tools": conversion.tools}
OTHERS = [*CONVERSIONS, *READINGS]
_RECORDINGS = 3
"""Starts that the profile of the others is made of."""
_DEADLINE = 1000.0
_GIVE_UP = 2
"""Failures after which a variant is not tried again."""


class Bench:
    """All runs of one invocation; ``document`` grows by them."""

    def __init__(self, options: argparse.Namespace, work: Path, site: image_site.Site, parts: image_parts.Parts,
                 document: report.Report, variants: list[str], against: Checkout | None = None,
                 peers: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self.options, self.work, self.site, self.parts = options, work, site, parts
        self.document, self.variants, self.against = document, variants, against
        self.before = Counter(run.variant for run in document.runs)
        self.failures: Counter[str] = Counter()
        self.peers = peers or {}
        self.record_file = work / "record.json"
        self.full: LocalTree | None = None
        self.digest = ""
        self._places = 0
        spread(work)

    def run(self) -> None:
        """Convert and record what the variants need, then the rounds, then the readings."""
        chosen = [name for name in STARTS if name in self.variants]
        checkouts = [HERE, self.against] if self.against else [HERE]
        for checkout in checkouts:
            self.convert(checkout)
        if any(name.startswith(("local", "read-", REBUILT_WARM)) for name in self.variants):
            self._complete()
        if any(name.startswith(("hot", "warm", *BUILDS)) for name in chosen):
            for checkout in checkouts:
                self.record(checkout)
        if self.site.hdfs is not None and any(name in image_hdfs.STARTS for name in chosen):
            self.convert(store=self.site.hdfs.url)
            self.record(store=self.site.hdfs.url)
        for build in sorted({BUILDS[name] for name in chosen if name in BUILDS}):
            self.rebuild(build)
        chosen += self.peers
        for number in range(1, self.options.runs + 1):
            for name in chosen:
                # The two of a pair begin by turns: the second one finds another disk than the first.
                for checkout in (checkouts[:: 1 if number % 2 else -1]) if name in OURS else [HERE]:
                    self.guarded(f"{name}{checkout.suffix}", number, partial(self._start, name, number, checkout))
            if number <= self.options.conversions:
                for name, convert in [*CONVERSIONS.items()][:: 1 if number % 2 else -1]:
                    if name in self.variants:
                        self.guarded(name, number, partial(self._conversion, convert, number))
        for name in READINGS:
            if name in self.variants:
                self.guarded(name, 1, partial(self._read, name))
        if "warm" in chosen:
            self.guarded("page-list", 1, self._listed)

    def guarded(self, name: str, number: int, action: Callable[[], Run | None]) -> None:
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
        """Add ``run`` to the report. Runs of a pair have the same number, also when they are added to others."""
        run.n += self.before[run.variant.removesuffix(BEFORE)]
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

    def convert(self, checkout: Checkout = HERE, *, store: str = "") -> None:
        """The image into the store of ``checkout``, or into another one; by this one's code, as the formats are the
        same."""
        began = time.monotonic()
        say(f"conversion into the store of the runs{checkout.suffix} {store}")
        store = store or self.site.store(suffix=_plain(checkout.suffix))
        record = image.ensure(self.site.ref(), store, work_dir=self.work / "convert").record
        self.record_file.write_bytes(msgspec.json.encode(record))
        self.digest = record.tree
        say(f"converted in {time.monotonic() - began:.0f} s: {record.stored_bytes / 1e6:.0f} MB in the store")

    def _complete(self) -> None:
        """All of the tree in a node cache, without crossing the link."""
        store = self.site.store()
        tree.prefetch(store, self.digest, cache_dir=self.work / "full")
        self.full = localize(open_store(store), self.digest, self.work / "full")

    def _order(self, how: str, place: Path, *, far: bool = False) -> Order:
        return Order(how=how, work=str(place), link=self.site.node.link, command=self.parts.command,
                     ref=self.site.ref(far), record=str(self.record_file))  # fmt: skip

    def ours(self, place: Path, job: str | None, *, far: bool = False, checkout: Checkout = HERE) -> Order:
        """A start of ours in the folder ``place``."""
        order = self._order("lazy", place, far=far)
        suffix = _plain(checkout.suffix)
        order.job = f"{job}{suffix}" if job else None
        order.store = self.site.store(far, suffix)
        return order

    def record(self, checkout: Checkout = HERE, *, store: str = "") -> None:
        """The starts that make the profile, in the store of ``checkout`` or in another one. The node cache of the first
        stays, for the ``warm`` variants; the others prefetch by what is known so far, on an empty node, and say how
        much of it was wasted."""
        name = image_hdfs.RECORD if store else f"record{checkout.suffix}"

        def start(number: int) -> Run:
            with self.place() as place:
                order = self.ours(place, "bench", checkout=checkout)
                order.store = store or order.store
                # What is read ahead of a start is not seen: it would neither be recorded nor say what is wasted.
                order.environ, order.settle = {**NO_FILL, **NO_READAHEAD}, True
                order.cache = self._warm(checkout) if number == 1 and not store else ""
                return self.outcome(name, number, order, checkout)

        for number in range(1, _RECORDINGS + 1):
            self.guarded(name, number, partial(start, number))

    def rebuild(self, build: int) -> None:
        """A next build of the image into the store. Each of its starts is a first one, with a profile of its own that
        is predicted from the recordings."""
        say(f"build {build} of the image")
        store = open_store(self.site.store())
        size = localize_manifest(store, self.digest, self.work / "parts").manifest.data_size
        for trace in load_own(store, self.digest, ProfileKey("bench"), size):
            raw = trace.encode()
            for number in range(1, self.options.runs + 1):
                for name in (one for one in BUILDS if BUILDS[one] == build):
                    folder = ProfileKey(f"{name}-{number}").prefix(self.digest)
                    store.put(f"{folder}/{hashing.hexdigest(raw)}.trace", raw)
        rebuilt.build(self.site.ref(), new := self.site.ref(build=build), self.work, rebased=build == BUILDS[REBASED])
        began = time.monotonic()
        record = image.ensure(new, self.site.store(), work_dir=self.work / "convert").record
        self._record_of(build).write_bytes(msgspec.json.encode(record))
        say(f"converted in {time.monotonic() - began:.1f} s: {record.stored_bytes / 1e6:.0f} MB in the store")

    def _record_of(self, build: int) -> Path:
        return self.work / f"record-{build}.json"

    def _warm(self, checkout: Checkout) -> str:
        """The node cache of the ``warm`` variants."""
        return str(self.work / f"warm{_plain(checkout.suffix)}")

    def _start(self, name: str, number: int, checkout: Checkout) -> Run:
        far = name.endswith(FAR)
        with self.place() as place:
            if name.startswith("local"):
                order = self._order("local", place)
                assert self.full is not None
                order.options = {"meta": str(self.full.meta), "data": str(self.full.cache / "data")}
                if name == "local-warm":
                    order.options["warm"] = "yes"
            elif name.startswith("nydus"):
                order = self._order("nydus", place)
                order.options = {
                    "registry": self.site.registry(far), "repository": image_parts.NYDUS,
                    "bootstrap": str(self.parts.bootstrap), "prefetch": "yes" if "prefetch" in name else "",
                }  # fmt: skip
            elif name == "containerd":
                order = self._order("containerd", place)
            elif name in self.peers:
                order = self._order("peer", place)
                order.options = {"program": self.peers[name]}
            elif name in ("unpack", "extract"):
                order = self._order("written", place)
                order.store = self.site.store() if name == "extract" else ""
            elif name in image_hdfs.STARTS:
                hdfs = self.site.hdfs
                assert hdfs is not None
                order = self.ours(place, "bench")
                order.store = hdfs.url
                with hdfs.trouble(image_hdfs.STARTS[name], number):
                    return self.outcome(name, number, order)
            elif name in BUILDS:
                order = self.ours(place, f"{name}-{number}")
                order.ref, order.record = self.site.ref(build=BUILDS[name]), str(self._record_of(BUILDS[name]))
                if name == REBUILT_WARM:
                    return self._on_the_build_before(number, order)
            elif name.startswith("warm"):
                # These leave their traces elsewhere: hot starts are to prefetch by starts like themselves.
                order = self.ours(place, "warm", checkout=checkout)
                order.cache = self._warm(checkout)
                # with readahead there would be little to record, and little to compare
                order.environ = {**(NO_RECORD if name.endswith("-norecord") else NO_FILL), **NO_READAHEAD}
            else:
                job = None if name.startswith("on-demand") else "bench"
                order = self.ours(place, job, far=far, checkout=checkout)
            return self.outcome(f"{name}{checkout.suffix}", number, order, checkout)

    def _on_the_build_before(self, number: int, order: Order) -> Run:
        """A start on a node that holds all of the build before, which it does again afterwards."""
        assert self.full is not None
        record = msgspec.json.decode(self._record_of(BUILDS[REBUILT_WARM]).read_bytes(), type=ImageRecord)
        order.cache, order.environ = str(self.work / "full"), NO_FILL
        try:
            run = self.outcome(REBUILT_WARM, number, order)
        finally:
            for kept in (self.full.meta.parent, self.full.cache):
                for folder in kept.parent.iterdir():
                    if folder != kept:
                        shutil.rmtree(folder)
        run.details["bytes_vs_changed"] = round(run.bytes["link"] / record.stored_bytes, 3)
        return run

    def outcome(self, name: str, number: int, order: Order, checkout: Checkout = HERE) -> Run:
        """Run the order on the node."""
        log = self.work / "node.log"
        with open(log, "ab+") as err:
            at = err.tell()
            process = subprocess.Popen(
                [*WITH_US, *self.site.node.argv(checkout.argv(order))], env=checkout.environ(),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, start_new_session=True,
            )  # fmt: skip
            output, _ = finish(process, _DEADLINE)
            err.seek(at)
            said = err.read().decode(errors="replace").strip().splitlines()
        if process.returncode:
            raise BootseerError(said[-1] if said else f"the start ended with code {process.returncode}")
        outcome = msgspec.json.decode(output.strip().split(b"\n")[-1], type=Outcome)
        details = {"cpu_seconds": outcome.cpu, **outcome.details}
        if checkout.suffix:
            details["commit"] = report.commit(checkout.root)
        return Run(variant=name, n=number, seconds=outcome.seconds, stages=outcome.stages,
                   bytes={"link": outcome.link_bytes}, details=details)  # fmt: skip

    def _conversion(self, convert: Callable[[str, Path, int], Run], number: int) -> Run:
        _drop_caches()
        return convert(self.site.ref(), self.work / "conversion", number)

    def _listed(self) -> Run:
        """What of the page list those starts did not touch that it is not made of, and that nothing was read ahead of:
        the ``warm`` ones. Those without recording leave a millisecond of it, which is not compared."""
        store = open_store(self.site.store())
        size = localize_manifest(store, self.digest, self.work / "parts").manifest.data_size
        keys = [info.key for info in store.list(ProfileKey("bench").prefix(self.digest))]
        keys = [key for key in keys if key.endswith(".pages")]
        traces = load_own(store, self.digest, ProfileKey("warm"), size)
        longest = max((trace.touches[-1].ms for trace in traces if trace.touches), default=0)
        whole = [trace for trace in traces if trace.touches and 2 * trace.touches[-1].ms >= longest]
        if not keys or not whole:
            raise BootseerError("there is no page list, or no start to compare it with")
        pages = load_pages(store, keys[0], self.digest, size)
        wasted = statistics.median(unused(pages, trace) for trace in whole)
        details = {"ranges": len(pages.ranges), "starts": len(whole), "unused": round(wasted, 4)}
        return Run(variant="page-list", n=1, seconds=0.0, bytes={"listed": pages.size}, details=details)

    def _read(self, name: str) -> None:
        """Readings through our mount beside plain ones; the runs are noted here."""
        assert self.full is not None
        store = self.site.store()
        filled = name == "read-filled"
        with self.place() as place:
            cache = place / "cache" if filled else self.work / "full"
            with reading.mounted(store, self.digest, place, cache) as made:
                local = self.full
                if filled:
                    reading.fill(made)
                    local = localize(open_store(store), self.digest, cache)
                data = local.cache / "data"
                for run in reading.compare(name, made.target, local.meta, data, place, self.options.runs):
                    self.note(run)

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """An empty folder for one run, deleted at its end with everything that a run that failed left there. It lies
        elsewhere on the disk than the one before, whose files were just deleted: a new node has none such."""
        self._places += 1
        place = self.work / f"place{self._places}"
        place.mkdir()
        try:
            yield place
        finally:
            workplace.remove(place)


def brought(given: Sequence[str]) -> dict[str, str]:
    """The variants of ``NAME=PROGRAM``. Raises `ConfigError`."""
    found = dict[str, str]()
    for text in given:
        name, _, program = text.partition("=")
        path = shutil.which(program)
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) or path is None or f"peer:{name}" in found:
            raise ConfigError(f"--peer {text!r} is not NAME=PROGRAM", hint="each name once, and a program that runs")
        found[f"peer:{name}"] = str(Path(path).absolute())
    return found


def _plain(suffix: str) -> str:
    """``suffix`` of a variant as names of folders, profiles and repositories have it."""
    return suffix.replace("@", "-")


def unused(pages: PageList, trace: Trace) -> float:
    """The share of the list's bytes that the start which left ``trace`` did not touch."""
    touched = {unit for touch in trace.touches for unit in range(touch.unit, touch.unit + touch.count)}
    listed = [unit for one in pages.ranges for unit in range(one.data // UNIT, (one.data + one.length) // UNIT)]
    return sum(unit not in touched for unit in listed) / max(len(listed), 1)


def _drop_caches() -> None:
    subprocess.run(["sync"], check=False, timeout=300)
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
