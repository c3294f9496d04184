"""What an environment costs the node that makes it, and those that get it: beside pip alone and uv with a full cache.

    scripts/bench env [--files 20000] [--parts linked,...] [--quick] [--runs N] [--out report.json]

The packages are made here: Python sources and one binary file in each. ``plain``: pip installs them into a virtual
environment; ``first``: the same command through `bootseer env run`, until that ends; ``linked``: the same on a node
whose link to the store has 100 Mbit/s, where ``published`` are the seconds from the end of the command until another
node may mount. ``uv``: uv with a full cache on the same file system. ``mount`` and ``unpack``: `bootseer env run` on a
node that has none of it; ``again`` and ``served``: a mount on a node that had it before, without and with the node
daemon. ``changed``: the command with one of ten packages in another version, ``moved`` the bytes that it stores.
``renewed``: another command on a node whose environment of the one before is removed first.
``linked-without``: nothing is stored before the command has ended; ``mount-without``: the process that loads servers is
no copy of the caller, but begins anew; ``unpack-without``: one process makes all files; ``renewed-without``: all
environments lie in one place of the disk.
Processor seconds are those of the whole command, and of what the daemon does for it, without what goes on behind it.
What is on record ran on an ext4 with a journal (``--work``): one without takes seconds to make files beside others that
were just deleted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options, say
from bench.common.report import Report, Run
from bench.env.without import EARLY, LENT, SPREAD, WITHOUT, WRITERS
from bootseer.demo.programs import BOOTSEER, run
from bootseer.errors import BootseerError
from bootseer.folders import spread
from support.netns import Node, ShapedNetwork
from support.objectserver import BUCKET, ObjectServer
from support.waits import until

PARTS = ("first", "linked", "hits", "renewed", "changed")
PACKAGES = 10
_RATE = 100.0
_BINARY = 3 << 20
_SOURCE = 2500
_PUBLISHED_SECONDS = 600.0
_FOLDERS = 20


def packages(folder: Path, files: int) -> None:
    """``PACKAGES`` wheels with so many files in all, and another version of the first."""
    for number, version in [(number, 1) for number in range(PACKAGES)] + [(0, 2)]:
        made, name = random.Random(number * 10 + version), f"part{number}"
        info = f"{name}-{version}.dist-info"
        content = {
            f"{name}/m{i % _FOLDERS}/f{i}.py": b"x = %r\n" % made.randbytes(made.randrange(10, _SOURCE)).hex()
            for i in range(files // PACKAGES)
        }
        content[f"{name}/data.bin"] = made.randbytes(_BINARY)
        content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"]).encode()
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
            for path, data in content.items():
                archive.writestr(path, data)


class Bench:
    """The commands, and a new node for each start."""

    def __init__(self, options: Options, report: Report) -> None:
        self.report, self.work, self.count = report, options.work, 0
        self.target, self.wheels = self.work / "venv", self.work / "wheels"
        self.old = self.work / "old"
        spread(self.work)  # as a new node has it: see `away`
        self.wheels.mkdir()
        self.old.mkdir()
        packages(self.wheels, options.files)
        self.environ = {"UV_CACHE_DIR": str(self.work / "uv"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.environ["PYTHONDONTWRITEBYTECODE"] = ""  # an installed program has its byte code
        self.uv(0)

    def command(self, version: int = 1) -> list[str]:
        """pip, which copies and compiles package by package."""
        names = " ".join([f"part0=={version}", *(f"part{number}" for number in range(1, PACKAGES))])
        pip = f"{sys.executable} -m pip --python {self.target}/bin/python install -q --no-cache-dir --no-index"
        venv = f"{sys.executable} -m venv --without-pip {self.target}"
        return ["sh", "-c", f"{venv} && {pip} --find-links {self.wheels} {names}"]

    def uv(self, n: int) -> None:
        """uv; the first time it fills its cache, which does not count."""
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "-q", "--no-index", "--no-config"]
        names = [f"part{number}" for number in range(PACKAGES)]
        argv = [*uv, "--find-links", str(self.wheels), "--target", str(self.work / "uv-target"), *names]
        with self.noted("uv", n) as details:
            self.timed(details, argv)
        self.away(self.work / "uv-target")

    def plain(self, n: int) -> None:
        with self.noted("plain", n) as details:
            self.timed(details, self.command())
        self.away(self.target)

    def first(self, n: int, variant: str = "first", version: int = 1, store: str = "") -> None:
        """The command through `env run`, until that ends; then what it stores is waited for."""
        store = store or str(self.work / f"store{n}")
        before = _stored(Path(store))
        with self.noted(variant, n) as details, self.node(store) as environ:
            self.start(details, environ, self.command(version), "ran-and-publishing")
            index = Path(store, "env/index")
            details["background"] = _until(lambda: len([*index.glob("*/*")]) > (variant != "first"))
            details["moved"], details["stored"] = _stored(Path(store)) - before, _stored(Path(store))

    def linked(self, n: int, node: Node, host: str, variant: str = "linked", without: str = "") -> None:
        """As `first`, on a node with a slow link to the store."""
        with ObjectServer(host=host) as server, self.noted(variant, n) as details:
            store = f"s3://{BUCKET}/store"
            login = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
            with self.node(store) as environ:
                environ = {**environ, **login, "AWS_DEFAULT_REGION": "here"}
                prefix = node.argv([])
                self.start(details, environ, self.command(), "ran-and-publishing", prefix=prefix, without=without)
                details["published"] = _until(lambda: any("env/snapshots/" in key for key in [*server.objects]))
                details["stored"] = sum(len(one.data) for one in server.objects.values())
                details["link_seconds"] = details["stored"] * 8 / (_RATE * 1e6)

    def hit(self, n: int, how: str, variant: str = "", without: str = "") -> None:
        with self.noted(variant or how, n) as details, self.node(str(self.work / f"store{n}")) as environ:
            self.start(details, environ, self.command(), f"restored-{how}", "--restore", how, without=without)

    def renewed(self, n: int, variant: str = "renewed", without: str = "") -> None:
        store = self.work / f"{variant}{n}"
        with self.node(str(store)) as environ, self.noted(variant, n) as details:
            for salt in "12":
                self.start(details, environ, self.command(), "ran-and-publishing", "--salt", salt, without=without)
        self.away(store)

    def again(self, n: int) -> None:
        with self.node(str(self.work / f"store{n}")) as environ:
            environ["BOOTSEER_NODE_DIR"] = str(self.work / "daemon")
            self.start({}, environ, self.command(), "restored-mount")
            for variant, daemon in (("again", contextlib.nullcontext()), ("served", self.daemon(environ))):
                run([*BOOTSEER, "unmount", "--environments"], env=environ)
                self.away(self.target)
                with daemon as seconds, self.noted(variant, n) as details:
                    before = seconds() if seconds else 0.0
                    self.start(details, environ, self.command(), "restored-mount")
                    if seconds:
                        details["daemon_seconds"] = seconds() - before
                        details["cpu_seconds"] += details["daemon_seconds"]

    @contextlib.contextmanager
    def daemon(self, environ: Mapping[str, str]) -> Iterator[Callable[[], float]]:
        """A node daemon meanwhile, and the processor seconds of its requests by now."""
        folder = Path(environ["BOOTSEER_NODE_DIR"])
        with subprocess.Popen(
            [*BOOTSEER, "node", "serve"], env={**os.environ, **self.environ, **environ}, stderr=subprocess.DEVNULL
        ) as process:
            try:
                until(lambda: (folder / "node.sock").exists(), 30.0, "the node daemon")
                stat, second = Path(f"/proc/{process.pid}/stat"), os.sysconf("SC_CLK_TCK")
                yield lambda: sum(map(int, stat.read_text().rpartition(")")[2].split()[13:15])) / second
            finally:
                process.terminate()
                process.wait(30)
                shutil.rmtree(folder, ignore_errors=True)

    def changed(self, n: int) -> None:
        self.first(n, "changed", version=2)
        self.away(self.work / f"store{n}")

    def away(self, path: Path) -> None:
        """As a new node has it: where many files were just deleted, ext4 takes seconds to make others."""
        if path.exists():
            path.rename(self.old / str(len(list(self.old.iterdir()))))

    # -- how ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def node(self, store: str) -> Iterator[dict[str, str]]:
        """The settings of a node that has nothing yet; at the end what is mounted is released."""
        self.count += 1
        folder = self.work / f"node{self.count}"
        own = {name: str(folder / name) for name in ("cache", "state")}
        environ = {**self.environ, "BOOTSEER_STORE": store}
        environ |= {f"BOOTSEER_{name.upper()}_DIR": path for name, path in own.items()}
        try:
            yield environ
        finally:
            run([*BOOTSEER, "unmount", "--environments"], env=environ)
            for path in (self.target, folder):
                self.away(path)

    def start(
        self,
        details: dict[str, Any],
        environ: Mapping[str, str],
        command: list[str],
        outcome: str,
        *options: str,
        prefix: list[str] | None = None,
        without: str = "",
    ) -> None:
        program = [*WITHOUT, without] if without else BOOTSEER
        argv = [*(prefix or []), *program, "env", "run", "--json", *options, "--target", str(self.target), "--"]
        answer = json.loads(self.timed(details, [*argv, *command], environ))
        if answer["outcome"] != outcome:
            raise BootseerError(f"{answer['outcome']}: {answer['reason']}")
        details.update(answer["timings"])

    def timed(self, details: dict[str, Any], argv: list[str], environ: Mapping[str, str] | None = None) -> str:
        """What ``argv`` prints; its seconds and processor seconds go to ``details``."""
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            argv, env={**os.environ, **self.environ, **(environ or {})}, capture_output=True, text=True, check=False
        )
        details["seconds"], after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        details["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if done.returncode:
            raise BootseerError((done.stderr.strip().splitlines() or ["no message"])[-1])
        return done.stdout

    @contextlib.contextmanager
    def noted(self, variant: str, n: int) -> Iterator[dict[str, Any]]:
        details: dict[str, Any] = {}
        made = Run(variant=variant, n=n)
        try:
            yield details
        except BootseerError as exc:
            made.failed = str(exc)
        if n:
            made.details = {name: round(value, 4) for name, value in details.items() if isinstance(value, (int, float))}
            made.seconds = made.details.pop("seconds", None)
            self.report.runs.append(made)
            say(f"{variant} {n}: {made.failed or f'{made.seconds} s, {made.details}'}")


def _until(ready: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not ready():
        if time.monotonic() - began > _PUBLISHED_SECONDS:
            raise BootseerError("nothing was published")
        time.sleep(0.02)
    return time.monotonic() - began


def _stored(store: Path) -> int:
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


def compute(made: Report, say: Say) -> Figures:
    """Replace the figures of the report."""
    found = Figures(made, say)
    pairs = _pairs(made, "first", "plain", lambda ours, other: _took(ours) / _took(other) - 1)
    found.add("env_first_node_overhead", "<= 0.1", pairs)
    linked = [run.details for run in made.runs if run.variant == "linked" and not run.failed]
    waits = [details["published"] / details["link_seconds"] for details in linked]
    found.add("env_publication_vs_link", "<= 0.5", waits)
    found.rounds("env_mount_vs_uv_warm", "<= 1", "mount", "uv")
    found.median("env_mount_cpu_seconds", "<= 0.2", "mount", "cpu_seconds", unit="s")
    for variant in ("again", "served"):
        found.rounds(f"env_{variant}_vs_uv_warm", "<= 1", variant, "uv")
        found.median(f"env_{variant}_cpu_seconds", "<= 0.2", variant, "cpu_seconds", unit="s")
    found.rounds("env_unpack_vs_pip", "<= 0.2", "unpack", "plain")
    saved = _pairs(
        made, "linked", "linked-without", lambda one, other: 1 - one.details["published"] / other.details["published"]
    )
    found.add("env_gain_early", ">= 5", [100 * one for one in saved], "%")
    found.gain("env_gain_lent", "mount", "mount-without")
    found.gain("env_gain_writers", "unpack", "unpack-without")
    found.gain("env_gain_spread", "renewed", "renewed-without")
    share = _pairs(made, "changed", "first", lambda ours, other: ours.details["moved"] / other.details["stored"])
    found.add("env_moved_vs_whole", "<= 0.1", share)
    return found


def _took(run: Run) -> float:
    assert run.seconds
    return run.seconds


def _pairs(made: Report, ours: str, other: str, what: Callable[[Run, Run], float]) -> list[float]:
    there = {(run.variant, run.n): run for run in made.runs if not run.failed}
    rounds = sorted({n for _, n in there})
    return [what(there[ours, n], there[other, n]) for n in rounds if {(ours, n), (other, n)} <= there.keys()]


def _run(options: Options, made: Report) -> None:
    given = options.parts or ("first,linked,hits" if options.quick else "")
    bench, parts = Bench(options, made), invocation.chosen(given, PARTS)
    with ShapedNetwork("bsenv", nodes=1, rate_mbit=_RATE, subnet="10.83.0.0/24") as network:
        for n in range(1, options.runs + 1):
            turn = 1 if n % 2 else -1
            if {"first", "hits", "changed"} & {*parts}:
                both: list[Callable[[int], None]] = [bench.plain, bench.first]
                for one in both[::turn]:
                    one(n)
            late = functools.partial(bench.linked, variant="linked-without", without=EARLY)
            for linked in (bench.linked, late)[::turn] if "linked" in parts else ():
                linked(n, network.nodes[0], network.host)
            if "hits" in parts:
                mount = functools.partial(bench.hit, how="mount")
                alone = functools.partial(mount, variant="mount-without", without=LENT)
                hits: list[Callable[[int], None]] = [bench.uv, mount, alone]
                for one in hits[::turn]:
                    one(n)
                bench.again(n)
                unpack = functools.partial(bench.hit, how="unpack")
                by_one = functools.partial(unpack, variant="unpack-without", without=WRITERS)
                for one in (unpack, by_one)[::turn]:
                    one(n)
            crowded = functools.partial(bench.renewed, variant="renewed-without", without=SPREAD)
            for renewed in (bench.renewed, crowded)[::turn] if "renewed" in parts else ():
                renewed(n)
            if "changed" in parts:
                bench.changed(n)


if __name__ == "__main__":
    parser = invocation.parser("env", __doc__, quick="two runs of first, linked and hits", runs=(5, 2), work=True)
    parser.add_argument("--parts", default="", help=f"only these of {', '.join(PARTS)}")
    parser.add_argument(
        "--files", type=int, default=20_000, help="of all packages (default 20000: pip takes at least 5 s)"
    )
    sys.exit(invocation.carry_out(parser, _run, compute))
