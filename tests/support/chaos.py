"""Chaos: a crowd reads a lazy tree while its processes are killed and stopped and its store has bad weather.

`Chaos.run` counts what went wrong. Wrong bytes, zeros and hangs must never be; errors may, where the plan has
disturbances that lead to them (``docs/internals/chaos.md``). ``scripts/chaos`` is the long form.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bootseer.blocks.tree import TreeMount, TreeStatus
from bootseer.errors import BootseerError, UnavailableError
from bootseer.kernel import mount as mounts
from bootseer.objects import open_store
from support import torture
from support.crowd import Crowd, Tally, files_of
from support.node import Node, alive, damage, pids, restarts
from support.registry import DockerRegistry
from support.tokens import TokenServer
from support.torture import Site
from support.waits import until
from support.weather import Weather

log = logging.getLogger(__name__)

DEADLINE = 30.0
"""A read of a missing block fails after this many seconds."""
LIMIT = 3 * DEADLINE
"""A read that takes longer hangs: the deadline may begin anew with another server, and the machine be busy."""
_BACK_SECONDS = 20.0
_DISTURBANCES = ("fetcher", "server", "supervisor", "stop", "outage", "squall", "poor")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What happens, how often; the run ends when all of it has."""

    fetcher: int = 20
    """``kill -9`` of the fetcher."""
    server: int = 8
    """... of the FUSE server."""
    supervisor: int = 0
    """... of the supervisor."""
    stop: int = 0
    """SIGSTOP of the fetcher, for up to a second."""
    outage: int = 0
    """The store is down, for up to a second."""
    squall: int = 0
    """For up to two seconds the store is slow, fails, gives wrong and too few bytes."""
    poor: int = 0
    """The FUSE server has next to no descriptors, for up to half a second: reads may fail."""
    readers: int = 16
    seed: int = 1
    crashes: float = 0.2
    """Share of rounds that end with the death of everything after the unmount; the next one goes on with the cache."""
    torn: float = 0.2
    """Share of rounds after which the bitmap is damaged; the next one begins with that."""
    seconds: float = 600.0
    """Give up after that."""

    @property
    def todo(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _DISTURBANCES if getattr(self, name)}


class Outcome(msgspec.Struct, kw_only=True):
    """``tally``: of all rounds; ``final``: of the last, undisturbed one, which reads every file."""

    done: dict[str, int] = {}
    rounds: int = 0
    lost: int = 0
    """Rounds whose tree gave errors for good, as supervisor and server had died in the same moment."""
    crashes: int = 0
    torn: int = 0
    restarts: int = 0
    taken_over: int = 0
    failed: int = 0
    bad_blocks: int = 0
    tally: Tally = Tally()
    final: Tally = Tally()
    seconds: float = 0.0
    findings: str = ""

    @property
    def clean(self) -> bool:
        """No wrong byte, no zeros, no hang; and every file right in the end."""
        both = self.tally + self.final
        return not (both.mismatches or both.zeros or both.hangs or self.final.errors)


class Chaos:
    """One run over the node ``node``, whose tree has the content of the folder ``reference``."""

    def __init__(self, node: Node, reference: Path, plan: Plan) -> None:
        self._node, self._reference, self._plan = node, reference, plan
        self._rand = random.Random(plan.seed)
        self._todo = dict(plan.todo)
        self._files = files_of(reference)
        self.outcome = Outcome(done=dict.fromkeys(self._todo, 0))

    def run(self) -> Outcome:
        began = time.monotonic()
        self._end = began + self._plan.seconds
        while self._todo and time.monotonic() < self._end:
            self._round()
        self._final()
        self.outcome.seconds = round(time.monotonic() - began, 1)
        return self.outcome

    def _round(self) -> None:
        rand, node, outcome = self._rand, self._node, self.outcome
        ending = rand.random()
        crash, torn = ending < self._plan.crashes, 1 - self._plan.torn < ending
        Weather().make(node.weather)
        made = self._mount()
        outcome.rounds += 1
        enough = time.monotonic() + (rand.uniform(1.0, 4.0) if crash else 60.0)
        crowd = self._crowd(made, 0, self._plan.readers)
        lost = False
        last = made.status()
        try:
            with crowd:
                while self._todo and time.monotonic() < min(enough, self._end) and not crowd.tally().hangs:
                    status = self._status(made)
                    if status is None:
                        lost = True
                        break
                    last = status
                    if status.complete:
                        break
                    self._disturb(rand.choice(list(self._todo)), made, status)
                    self._pause(rand.uniform(0.02, 0.3))
                last = self._status(made) or last
        finally:
            outcome.tally += crowd.stop()
            outcome.findings += crowd.findings
            outcome.lost += lost
            outcome.restarts += restarts(last)
            outcome.taken_over += last.taken_over
            outcome.failed += last.failed_reads
            outcome.bad_blocks += last.bad_blocks
            Weather().make(node.weather)
        if crash and not lost:
            self._crash(made)
        else:
            made.unmount()
        # Killed readers may have left requests with the server: it stays until these are answered.
        until(lambda: not node.left(), _BACK_SECONDS, f"the end of the server ({', '.join(node.left())})")
        if torn and (node.data / "bitmap").exists():
            outcome.torn += 1
            damage(node.data / "bitmap", rand.choice(["flip", "truncate", "empty", "extend"]), rand, unit=16)
        elif not crash:
            node.forget_cache()

    def _mount(self) -> TreeMount:
        return self._node.mount(demand_deadline=DEADLINE)

    def _crowd(self, made: TreeMount, passes: int, readers: int) -> Crowd:
        folder = self._node.folder / f"crowd-{self.outcome.rounds}-{passes}"
        return Crowd(
            made.target, self._reference, folder, files=self._files, readers=readers, passes=passes,
            limit=LIMIT, seed=self._rand.randrange(1 << 30), drop=0.5,
        )  # fmt: skip

    def _status(self, made: TreeMount) -> TreeStatus | None:
        """None: the tree has nobody any more who could serve it."""
        try:
            status = made.status()
        except UnavailableError:
            return None
        return status if alive(status.pid) else None

    def _crash(self, made: TreeMount) -> None:
        """As when the node loses its power between two syncs, but for what the kernel wrote out anyway."""
        with contextlib.suppress(BootseerError, ProcessLookupError):
            group = os.getpgid(made.status().pid)
            mounts.unmount(made.target)
            os.killpg(group, signal.SIGKILL)
            self.outcome.crashes += 1
        made.unmount()

    # -- disturbances ----------------------------------------------------------------------------------------------

    def _disturb(self, what: str, made: TreeMount, status: TreeStatus) -> None:
        if what in ("fetcher", "server", "supervisor"):
            if not self._kill(what, made, status):
                return
        elif what == "stop":
            with self._stopped(status.fetcher_pid):
                self._pause(self._rand.uniform(0.1, 1.0))
        elif what == "poor":
            with self._poor(pids(status)["server"]):
                self._pause(self._rand.uniform(0.1, 0.5))
        else:
            bad = Weather(down=True) if what == "outage" else Weather(fail=0.3, flip=0.3, cut=0.2, latency=0.02)
            bad.make(self._node.weather)
            self._pause(self._rand.uniform(0.2, 1.0 if what == "outage" else 2.0))
            Weather().make(self._node.weather)
        self.outcome.done[what] += 1
        self._todo[what] -= 1
        if not self._todo[what]:
            del self._todo[what]

    def _kill(self, who: str, made: TreeMount, status: TreeStatus) -> bool:
        """Kill it, and wait until another is there. Without that wait, supervisor and server might die together."""
        pid = pids(status)[who]
        if not pid or not alive(pid):
            return False
        os.kill(pid, signal.SIGKILL)

        def back() -> bool:
            now = self._status(made)
            return now is None or now.complete or (pids(now)[who] != pid and alive(pids(now)[who]))

        until(back, _BACK_SECONDS, f"another {who}")
        return True

    @contextlib.contextmanager
    def _stopped(self, pid: int) -> Iterator[None]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def _poor(self, pid: int) -> Iterator[None]:
        try:
            used = len(os.listdir(f"/proc/{pid}/fd"))
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 3, before[1]))
        except (OSError, ValueError):
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    def _pause(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self._end - time.monotonic())))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _final(self) -> None:
        """Nothing is disturbed any more: every file must be right, from whatever the cache has now."""
        self._node.rate = 0.0
        made = self._mount()
        slowest = LIMIT * 2 + sum(os.path.getsize(self._reference / name) for name in self._files) / 10e6
        with self._crowd(made, 1, 2) as crowd:
            self.outcome.final = crowd.join(slowest)
            self.outcome.findings += crowd.findings
        made.unmount()


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Kill the processes that serve a lazy image, again and again, while readers compare every byte. "
        "Exit code 0: no wrong byte, no zeros, no hang, and every file right in the end. Needs root.",
    )
    parser.add_argument("--image", default="", metavar="REF", help="default: the torture image; needs its size on disk")
    parser.add_argument(
        "--registry", action="store_true", help="from a registry whose tokens end after 30 s, instead of a folder"
    )
    parser.add_argument("--fetcher", type=int, default=200, help="kills of the fetcher (%(default)s)")
    parser.add_argument("--server", type=int, default=50, help="of the FUSE server (%(default)s)")
    parser.add_argument("--supervisor", type=int, default=25, help="of the supervisor (%(default)s)")
    parser.add_argument("--stop", type=int, default=10, help="times the fetcher is stopped for up to 1 s")
    parser.add_argument("--outage", type=int, default=10, help="of the store, up to 1 s each")
    parser.add_argument("--squall", type=int, default=10, help="times of wrong bytes and errors, up to 2 s each")
    parser.add_argument("--poor", type=int, default=5, help="times without descriptors: these readers may get errors")
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--rate", type=float, default=4.0, help="of the store, MB/s (%(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=30.0, help="give up after (%(default)s)")
    parser.add_argument("--work-dir", type=Path, default=Path("/var/tmp"), help="a disk (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    given = _arguments(argv)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    # Else a mount namespace that somebody makes meanwhile has copies of our mounts: trees would stay in use.
    mounts.private_namespace()
    place = Path(tempfile.mkdtemp(prefix="bootseer-chaos-", dir=given.work_dir))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    undo = contextlib.ExitStack()
    try:
        site = torture.prepare(given.image or torture.write(place / "layout"), place)
        store, tokens = str(site.store), None
        if given.registry:
            store, tokens = _in_registry(site, place, undo)
        plan = Plan(
            **{name: getattr(given, name) for name in _DISTURBANCES},
            readers=given.readers,
            seed=given.seed,
            seconds=given.minutes * 60,
        )
        node = Node(place / "node", store, site.tree, rate=given.rate * 1e6)
        try:
            outcome = Chaos(node, site.reference, plan).run()
        except BaseException:
            print(f"failed, seed {given.seed}; the end of its log:\n{node.log[-5000:]}", flush=True)
            raise
        finally:
            node.close()
        _print(given.seed, outcome)
        if tokens is not None:
            print(f"  tokens     {len(tokens.issued)}")
    finally:
        undo.close()
        shutil.rmtree(place)
    return 0 if outcome.clean and outcome.done == plan.todo else 1


def _in_registry(site: Site, place: Path, undo: contextlib.ExitStack) -> tuple[str, TokenServer]:
    """The converted image's objects in a registry of their own: its store URL, and who gives the tokens."""
    tokens = undo.enter_context(TokenServer(place / "tokens", lifetime=30.0))
    registry = undo.enter_context(DockerRegistry(root=place / "registry", tokens=tokens))
    url = f"registry://{registry.address}/chaos"
    source, target = open_store(str(site.store)), open_store(url)
    with target.batch():
        for folder in ("blobs", "trees"):
            for info in source.list(folder):
                target.put(info.key, source.get(info.key, most=info.size))
    return url, tokens


def _print(seed: int, outcome: Outcome) -> None:
    print(f"{'clean' if outcome.clean else 'NOT CLEAN'}, seed {seed}", flush=True)
    print(msgspec.structs.replace(outcome, findings=""), flush=True)
    for line in [line for line in outcome.findings.splitlines() if " wrong" in line][:20]:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
