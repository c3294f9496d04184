"""The parts of bench/checkpoint with limited links: resumes, saves, and saves while a DataNode is frozen.

The second resume and its local file are compared in one state: dropped from the page cache and read back into it, from
one disk and in order, right before; each is the first of the two in every second round. What was written a moment ago
lies in smaller pieces of memory than what was read, and gives its bytes more slowly.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

import torch
from msgspec import structs
from safetensors.torch import save_file

import bootseer.torch
from bench.checkpoint import client, mounts, once
from bench.checkpoint.state import Made, digest_of
from bench.common.report import Report
from bench.stripes.capped import CAP
from bench.stripes.client import Answer, Task
from bench.stripes.faults import Faults
from bench.stripes.runner import Runner
from bootseer.errors import UnsupportedError
from support.shapedhdfs import ShapedHadoop

PARTS = ("save", "frozen", "resume", "tensors", "once", "sharing")
FOLDER, PLAIN, STRIPED = "/run", "plain", "striped"
SAVED, MAPPED = "/saved", "/mapped"


def _read_back(path: Path) -> None:
    """Drop a file from the page cache, and bring it in again in order."""
    if path.is_file():
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(8 << 20):
                pass


class Capped:
    """``large`` is resumed from, ``small`` is saved, ``few`` is saved while a DataNode freezes.

    ``program`` is the client; ``rounds``: runs of each variant.
    Clients and mounts are on this host, whose own link has no limit.
    """

    def __init__(
        self, work: Path, report: Report, large: Made, small: Made, few: Made, program: str, *, rounds: int
    ) -> None:
        self._work, self._report, self._large, self._small, self._few = work, report, large, small, few
        self._program, self._rounds, self._number = program, rounds, 0
        self._site = ShapedHadoop(
            work / "hdfs", "bsck", "10.82.0.0/24", mib_per_s=CAP, settings={"dfs.replication": "1"}
        )

    def run(self, parts: Collection[str]) -> None:
        """``parts``: those of `PARTS` to run."""
        with self._site as site:
            self._files = self._runner(self._large.path, "")
            self._tensors = self._runner(self._large.path, self._large.digest)
            if "save" in parts:
                self._saves()
            if set(parts) & {*PARTS} - {"save"}:
                site.cluster.restart_namenode(settings={"dfs.replication": "2"})
            if "frozen" in parts:
                self._frozen()
            if "tensors" in parts:
                self._mapped()
            if {"resume", "once", "sharing"} & set(parts):
                self._write_large()
            if "resume" in parts:
                for n in range(self._rounds):
                    self._resumes(local_first=n % 2 > 0)
            for part, ways in (("once", once.WAYS), ("sharing", once.SHARING)):
                if part in parts:
                    self._once(ways)

    def _runner(self, content: Path, expected: str) -> Runner:
        return Runner(self._report, "capped", self._site.cluster, content, program=self._program, expected=expected)

    def _place(self) -> Path:
        """A folder for one mount, or for the caches of one client."""
        self._number += 1
        return self._work / f"place-{self._number}"

    def _fresh(self, runner: Runner, task: Task) -> Answer:
        """A client on a node that has nothing."""
        place = self._place()
        try:
            return runner.client(
                task, environ={"BOOTSEER_CACHE_DIR": f"{place}/cache", "BOOTSEER_STATE_DIR": f"{place}/state"}
            )
        finally:
            shutil.rmtree(place, ignore_errors=True)

    # -- resumes --------------------------------------------------------------------------------------------------

    def _write_large(self) -> None:
        for way, path in (("native", PLAIN), ("striped", STRIPED)):
            self._files.client(self._files.written(way, FOLDER, path, replication=2))

    def _resumes(self, *, local_first: bool) -> None:
        files, tensors, url = self._files, self._tensors, self._site.cluster.url

        def vanilla() -> AbstractContextManager[Path]:
            return mounts.peer("hdfs-native", f"{url}{FOLDER}/{PLAIN}", self._place())

        def through(runner: Runner, way: str, mount: AbstractContextManager[Path], name: str = "") -> Answer:
            with mount as root:
                path = root / name
                return runner.client(Task(way=way, url="", path=str(path), size=runner.size))

        def ours(place: Path, *, keep: bool = False) -> AbstractContextManager[Path]:
            return mounts.ours(f"{url}{FOLDER}", place, keep=keep)

        files.record("mount-hdfs-native", lambda: through(files, "mounted", vanilla()))
        files.record("mount", lambda: through(files, "mounted", ours(self._place()), STRIPED))
        tensors.record("torch-hdfs-native", lambda: tensors.client(tensors.task("torch-native", FOLDER, PLAIN)))
        tensors.record("torch-mount-hdfs-native", lambda: through(tensors, "torch-file", vanilla()))
        tensors.record("torch-load", lambda: self._fresh(tensors, tensors.task("torch", FOLDER, STRIPED)))

        def twice(way: str, name: str) -> None:
            node = self._place()
            local = Task(way=way, url="", path=str(tensors.content), size=tensors.size)
            runs = {
                name: lambda: through(tensors, way, ours(node, keep=True), STRIPED),
                name.replace("mount", "local"): lambda: tensors.client(local),
            }
            tensors.record(name, runs[name])
            for file in (tensors.content, *node.rglob("*")):
                _read_back(file)
            for variant, run in list(runs.items())[:: -1 if local_first else 1]:
                tensors.record(f"{name}-second" if variant == name else variant, run)
            shutil.rmtree(node, ignore_errors=True)

        twice("torch-file", "torch-mount")
        twice("torch-mmap", "torch-mount-mmap")

    # -- tensors that the kernel maps -----------------------------------------------------------------------------

    def _mapped(self) -> None:
        """Cold loads of a safetensors file through a new mount, and one sequential read of it."""
        tensors = torch.load(self._large.path, weights_only=True)
        content = self._work / "large.safetensors"
        save_file(tensors, content)
        runs = {"tensors-in-order": self._runner(content, "")}
        names = sorted(tensors)
        for way, wanted in (("tensors", names), ("tensors-shuffled", names), ("tensors-some", client.some(names))):
            used = {name: tensors[name] for name in wanted}
            runs[way] = self._runner(content, digest_of(used))
            runs[way].size = sum(tensor.nbytes for tensor in used.values())
        del tensors, used
        files = runs["tensors-in-order"]
        files.client(files.written("striped", MAPPED, content.name, replication=2))
        for n in range(self._rounds):
            for way, run in list(runs.items())[:: -1 if n % 2 else 1]:
                run.record(way, functools.partial(self._map, run, way, content.name))
        files.remove(MAPPED)
        content.unlink()

    def _map(self, run: Runner, way: str, name: str) -> Answer:
        nodes = self._site.network.nodes
        before = sum(node.bytes_sent() for node in nodes)
        with mounts.ours(f"{self._site.cluster.url}{MAPPED}", self._place()) as root:
            how = "mounted" if way == "tensors-in-order" else way
            answer = run.client(Task(way=how, url="", path=str(root / name), size=run.size))
        sent = sum(node.bytes_sent() for node in nodes) - before
        return structs.replace(answer, details={**answer.details, "sent_of_used": round(sent / run.size, 3)})

    def _once(self, ways: Mapping[str, str]) -> None:
        path = f"{FOLDER}/{STRIPED}"
        once.run(self._site, self._report, path, self._large, rounds=self._rounds, ways=ways)

    # -- saves ----------------------------------------------------------------------------------------------------

    def _saves(self) -> None:
        run = self._runner(self._small.path, self._small.digest)
        plain = self._runner(self._small.path, "")
        saves: dict[str, Callable[[], Answer]] = {
            "save-torch": lambda: self._fresh(run, run.written("torch", SAVED, "torch")),
            "save-mount": lambda: self._save_to_mount(run),
            "save-dcp": lambda: self._save_with_dcp(run),
        }
        written = {"save-torch": ("torch", "torch"), "save-mount": ("torch", "mount"), "save-dcp": ("dcp", "dcp")}
        for n in range(self._rounds):
            plain.record("save-hdfs-native", lambda: plain.client(plain.written("native", SAVED, "native")))
            for name, save in saves.items():
                took = run.record(name, save)
                if took is not None and n == self._rounds - 1:
                    way, path = written[name]
                    run.check(run.task(way, SAVED, path))
        run.remove(SAVED)

    def _save_to_mount(self, run: Runner) -> Answer:
        with mounts.ours(f"{self._site.cluster.url}{SAVED}", self._place(), options=["--rw"]) as root:
            task = run.written("torch-file", SAVED, "mount")
            return run.client(structs.replace(task, url="", path=str(root / "mount")))

    def _save_with_dcp(self, run: Runner) -> Answer:
        if not hasattr(bootseer.torch, "StorageWriter"):
            raise UnsupportedError("could not run: this version has no writer for torch.distributed.checkpoint")
        run.remove(f"{SAVED}/dcp")
        return self._fresh(run, run.written("dcp", SAVED, "dcp"))

    def _frozen(self) -> None:
        """`bootseer.torch.save` healthy, and with a DataNode frozen after a third of the time that this takes."""
        run = self._runner(self._few.path, self._few.digest)
        task = run.written("torch", "/frozen", "torch")
        faults = Faults(self._site, run, task)
        healthy: list[float] = []
        for n in range(self._rounds):
            took = run.record("save-replicated", lambda: run.client(task))
            healthy += [] if took is None else [took]
            if healthy:
                faults.frozen("save-frozen", n % 4, median(healthy) / 3)
                run.check(run.task("torch", "/frozen", "torch"))
            run.remove("/frozen")
