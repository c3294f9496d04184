"""Chaos on HDFS: a crowd reads and writes striped files while DataNodes and the NameNode fail, one at a time.

What must never be: wrong bytes, and an operation that does not end. Errors must not be either while a single DataNode
is frozen, slow or dead, has damaged replicas, or loses some; they may be while the NameNode is away.

    scripts/chaos --stripefs [--minutes N] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bootseer import fsmount
from bootseer.config import Config
from bootseer.errors import BootseerError
from bootseer.hdfs import client as hdfs
from bootseer.stripefs import layout, open_fs
from support.replicas import Replicas
from support.shapedhdfs import ShapedHadoop
from support.stripecrowd import Sample, StripeCrowd, Tally, Task, content
from support.webhdfs import BlockAt

SETTINGS = {
    "dfs.replication": "2",
    "dfs.blocksize": str(4 << 20),  # several blocks in each stripe
}
UNIT = 1 << 18
READABLE = [Sample("a", (17 << 20) + 1), Sample("b", (6 << 20) + 12345), Sample("c", 5 << 20)]
WRITABLE = [Sample("w0", (9 << 20) + 7), Sample("w1", 5 << 20)]
_CALM_SECONDS = 90.0


class Outcome(msgspec.Struct, kw_only=True):
    """``done``: disturbances by name. ``excused``: errors while the NameNode was away, among those of ``tally``."""

    done: dict[str, int] = {}
    excused: int = 0
    reported: int = 0
    tally: Tally = Tally(0, 0, 0, 0, 0.0)
    seconds: float = 0.0
    findings: str = ""

    @property
    def clean(self) -> bool:
        return not (self.tally.wrong or self.tally.hangs or self.tally.errors > self.excused)


def prepare(site: ShapedHadoop, folder: str) -> str:
    """Write the files that a crowd starts from into ``folder``; the URL of the store."""
    url = f"{site.cluster.url}{folder}"
    fs = open_fs(url)
    for sample in (*READABLE, *WRITABLE):
        with fs.create(sample.path, unit=UNIT, striped=True) as out:
            out.write(content(sample.path, 0, sample.size))
    return url


def stripes(url: str, folder: str, path: str) -> list[str]:
    """Absolute paths of the stripes of the file ``path`` in the store ``folder``, on the HDFS ``url``."""
    pointer = layout.decode_pointer(hdfs.connect(url).read(f"{folder}/{path}"), path)
    return [f"{folder}/{pointer.stripe_path(path, index)}" for index in range(pointer.width)]


def tasks(url: str, *, readers: int = 2, mountpoint: str = "", writers: int = 0) -> list[Task]:
    """A crowd's: ``readers`` through StripeFS, one through the mount if there is one, ``writers`` of a file each."""
    made = [Task(kind="read", url=url, samples=READABLE, seed=i + 1) for i in range(readers)]
    if mountpoint:
        made.append(Task(kind="mount", url=url, samples=READABLE, mountpoint=mountpoint, seed=9))
    return made + [Task(kind="write", url=url, samples=[sample], unit=UNIT) for sample in WRITABLE[:writers]]


class StripeChaos:
    """One run over ``site``, in which ``folder`` has what `prepare` wrote."""

    def __init__(self, site: ShapedHadoop, folder: str, crowd: StripeCrowd, *, seed: int) -> None:
        self._site, self._cluster, self._folder, self._crowd = site, site.cluster, folder, crowd
        self._rand = random.Random(seed)
        self._replicas = Replicas(site.cluster)
        self._damaged: list[tuple[BlockAt, int]] = []
        self.outcome = Outcome()
        self._kinds: dict[str, Callable[[], None]] = {
            "freeze": self._freeze,
            "slow": self._slow,
            "kill": self._kill,
            "damage": self._damage,
            "move": self._move,
            "writer": lambda: self._crowd.kill("write"),
            "namenode-freeze": self._namenode_freeze,
            "namenode-kill": self._namenode_kill,
        }

    def run(self, seconds: float) -> Outcome:
        """Disturb for so long, each kind as often as the others; ends early for a hang or wrong bytes."""
        began, outcome = time.monotonic(), self.outcome
        names: list[str] = []
        while time.monotonic() < began + seconds:
            names = names or self._rand.sample(list(self._kinds), len(self._kinds))
            name = names.pop()
            before = self._crowd.tally().errors
            self._kinds[name]()
            self._calm()
            outcome.done[name] = outcome.done.get(name, 0) + 1
            tally = self._crowd.tally()
            if name.startswith("namenode"):
                outcome.excused += tally.errors - before
            if tally.wrong or tally.hangs:
                break
        outcome.tally, outcome.findings = self._crowd.tally(), self._crowd.findings()
        outcome.reported = sum(index in self._replicas.reported(block) for block, index in self._damaged)
        outcome.seconds = round(time.monotonic() - began, 1)
        return outcome

    def _calm(self) -> None:
        """The next fault must find another replica of everything; and the crowd must get on."""
        self._crowd.wait(1, deadline=self._crowd.limit + 30)  # writes under a fault may end with one replica
        self._cluster.wait_whole(deadline=_CALM_SECONDS)

    # -- disturbances ---------------------------------------------------------------------------------------------

    def _any(self) -> int:
        return self._rand.randrange(len(self._cluster.datanodes))

    def _freeze(self) -> None:
        with self._cluster.frozen(self._any()):
            time.sleep(self._rand.uniform(0.2, 8.0))

    def _slow(self) -> None:
        with self._site.slowed(self._any(), self._rand.choice([0.1, 0.03])):
            time.sleep(self._rand.uniform(1.0, 8.0))

    def _kill(self) -> None:
        index = self._any()
        self._cluster.kill(index)
        time.sleep(self._rand.uniform(0.0, 3.0))
        self._cluster.restart(index)

    def _block(self) -> BlockAt:
        stripe = self._rand.choice(stripes(self._cluster.url, self._folder, self._rand.choice(READABLE).path))
        return self._rand.choice(self._replicas.blocks(stripe, replicas=2))

    def _damage(self) -> None:
        block = self._block()
        index = self._rand.choice(self._replicas.holders(block))
        for _ in range(8):
            self._replicas.damage(block, index, self._rand.randrange(block.length))
        self._damaged.append((block, index))
        self._crowd.wait(3, deadline=self._crowd.limit)

    def _move(self) -> None:
        block = self._block()
        holders = self._replicas.holders(block)
        free = [i for i in range(len(self._cluster.datanodes)) if i not in holders]
        self._replicas.move(block, self._rand.choice(holders), self._rand.choice(free))

    def _namenode_freeze(self) -> None:
        with self._cluster.frozen_namenode():
            time.sleep(self._rand.uniform(0.5, 5.0))

    def _namenode_kill(self) -> None:
        self._cluster.kill_namenode()
        time.sleep(self._rand.uniform(0.0, 3.0))
        self._cluster.restart_namenode()


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos --stripefs",
        description="Freeze, slow and kill DataNodes and the NameNode of a real HDFS, damage and move blocks, kill "
        "writers, while others read, write and compare every byte. Exit code 0: no wrong byte, no hang, and no error "
        "but while the NameNode was away. Needs root and Hadoop's jars.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (%(default)s)")
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--writers", type=int, default=2, help="at most 2")
    parser.add_argument("--rate", type=float, default=40.0, help="of each DataNode's link, MiB/s (%(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--work-dir", type=Path, default=Path("/var/tmp"), help="a disk (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    given = _arguments(argv)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    place = Path(tempfile.mkdtemp(prefix="bootseer-chaos-", dir=given.work_dir))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    config = Config(cache_dir=str(place / "cache"), state_dir=str(place / "state"))
    try:
        with contextlib.ExitStack() as stack:
            site = ShapedHadoop(place / "hdfs", "bschaos", "10.80.0.0/24", mib_per_s=given.rate, settings=SETTINGS)
            stack.enter_context(site)
            url = prepare(site, "/chaos")
            mounted = fsmount.start(url, place / "mnt", config=config, memory=8 << 20)
            stack.callback(mounted.unmount)
            work = tasks(url, readers=given.readers, mountpoint=str(place / "mnt"), writers=given.writers)
            with StripeCrowd(work, place / "log", limit=90.0) as crowd:
                chaos = StripeChaos(site, "/chaos", crowd, seed=given.seed)
                try:
                    outcome = chaos.run(given.minutes * 60)
                except BootseerError:
                    print(f"failed, seed {given.seed}\n{crowd.findings()}", flush=True)
                    raise
            _print(given.seed, outcome)
            open_fs(url).verify()  # nobody writes any more
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return 0 if outcome.clean else 1


def _print(seed: int, outcome: Outcome) -> None:
    print(f"stripefs: {'clean' if outcome.clean else 'NOT CLEAN'}, seed {seed}", flush=True)
    print(msgspec.structs.replace(outcome, findings=""), flush=True)
    if not outcome.clean:
        print(outcome.findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
