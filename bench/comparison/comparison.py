"""The demo: one job started ordinarily, the bootseer way for the first time, and again on a cold node; side by side.

Beside them runs ``local``: the same start where image, environment and checkpoint are already on the node. Start-up
overhead is the time to the end of the first step minus that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench.common import ordinary
from bench.comparison import starts
from bench.comparison.ingredients import Ingredients
from bench.comparison.recipe import Recipe
from bench.comparison.site import containerd, file_server
from bootseer import report, stripefs
from bootseer.demo import tree, workplace
from bootseer.demo.programs import BOOTSEER, run
from bootseer.demo.starts import Measured, read_all, same_losses
from bootseer.errors import PrivilegeError
from bootseer.launch.job import Job
from bootseer.objects import open_store
from support.hadoop import HadoopCluster
from support.netns import Node, ShapedNetwork
from support.registry import DockerRegistry, without_tls

log = logging.getLogger(__name__)

Say = Callable[[str], None]

_SETTLE_SECONDS = 300.0


class Demo:
    """All starts of one demo, in a work folder that is removed at the end; the events are kept in ``results``."""

    def __init__(
        self, recipe: Recipe, cache: Path, *, rate_mbit: float, subnet: str, rounds: int, results: Path, say: Say
    ) -> None:
        self.ingredients = Ingredients(recipe, cache)
        self.cache, self.rate_mbit, self.subnet, self.results, self.say = cache, rate_mbit, subnet, results, say
        self.rounds = rounds
        self.report = report.new("demo" if recipe.name == "torch" else f"demo-{recipe.name}")
        self.starts: dict[str, list[Measured]] = {}
        self.conversion: dict[str, float] = {}
        self.entries = 0
        self.differences: list[str] = []

    def run(self) -> None:
        """Prepare, start four times, compare. Raises `BootseerError`; whatever was mounted or started is gone after."""
        if os.geteuid() != 0:
            raise PrivilegeError("the demo mounts file systems and makes network namespaces", hint="run it with sudo")
        self.cache.mkdir(parents=True, exist_ok=True)
        with workplace.only_one(self.cache):
            workplace.sweep(self.cache)
            self.ingredients.prepare(self.say)
            work = workplace.make(self.cache)
            try:
                with contextlib.ExitStack() as stack:
                    self._starts(work, stack)
            finally:
                with contextlib.suppress(OSError):
                    shutil.copytree(work / "job/events", self.results / "events", dirs_exist_ok=True)
                workplace.remove(work)

    def _starts(self, work: Path, stack: contextlib.ExitStack) -> None:
        parts = self.ingredients
        network = stack.enter_context(
            ShapedNetwork(workplace.prefix(self.cache), rate_mbit=self.rate_mbit, subnet=self.subnet)
        )
        node, logs = network.nodes[0], work
        registry = stack.enter_context(DockerRegistry(host=network.host, root=parts.registry))
        stack.enter_context(without_tls(registry.address))
        index = stack.enter_context(file_server(parts.index, network.host, logs))
        self.say("HDFS: a NameNode and 4 DataNodes start")
        # one replica: all DataNodes share this machine's disk, more would only cost space
        hdfs = stack.enter_context(HadoopCluster(work / "hdfs", bind=network.host, settings={"dfs.replication": "1"}))
        self.say("checkpoint: stored as plain files and as striped files")
        hdfs.fs_shell(["-mkdir", "-p", "/plain"])
        hdfs.fs_shell(["-put", str(parts.checkpoint), "/plain/checkpoint"])
        fs = stripefs.open_fs(f"{hdfs.url}/striped")
        for file in sorted(parts.checkpoint.iterdir()):
            fs.put(file, f"checkpoint/{file.name}")
        fs.commit("checkpoint")
        socket = stack.enter_context(containerd(work / "containerd", node.argv([]), logs))
        site = starts.Site(
            ref=f"{registry.address}/{parts.repository}:1",
            index_url=f"{index}/simple",
            index_host=network.host,
            store=f"{hdfs.url}/bootseer",
            striped=f"{hdfs.url}/striped/checkpoint",
            plain=f"{hdfs.url}/plain/checkpoint",
            hdfs_client=shlex.join(hdfs.shell_argv([])),
            containerd=str(socket),
        )
        self.say("image convert: once for each image in a cluster")
        self._convert(site)
        # servers are warm, nodes are cold: each start has a new node cache, and containerd has no image
        for folder in (parts.registry, parts.index, parts.job_env, parts.checkpoint):
            read_all(folder)
        began = time.monotonic()
        for number in range(self.rounds):
            self.say(f"round {number + 1} of {self.rounds}")
            halves = [self._ordinary_starts, self._bootseer_starts]
            for starts_of in halves if number % 2 == 0 else reversed(halves):
                starts_of(site, node, work / "job")
        self.say("file trees: the container's of the ordinary and of the bootseer start, entry by entry")
        self._compare(site, node.argv([]), work)
        self.report_figures(time.monotonic() - began)

    def _ordinary_starts(self, site: starts.Site, node: Node, work: Path) -> None:
        parts, ctr = self.ingredients, ["ctr", "--address", site.containerd, "images"]
        if site.ref in run([*ctr, "list", "--quiet"]).split():
            run([*ctr, "rm", "--sync", site.ref])
        self._start("ordinary", "containerd pulls, pip installs, Hadoop's client copies", site, node, work)
        local = starts.job_file(site, local_env=parts.job_env, local_checkpoint=parts.checkpoint)
        self._start("local", "the same with everything on the node already", site, node, work, local)

    def _bootseer_starts(self, site: starts.Site, node: Node, work: Path) -> None:
        store = open_store(site.store)
        for prefix in ("profiles/", "env/"):
            for entry in list(store.list(prefix)):
                store.delete(entry.key)
        self._start(
            "first", "lazy image without a profile, set-up command captured, striped checkpoint", site, node, work
        )
        self._start("again", "hot blocks prefetched, environment mounted, striped checkpoint", site, node, work)

    def _start(
        self, variant: str, what: str, site: starts.Site, node: Node, work: Path, job: Job | None = None
    ) -> None:
        self.say(f"{variant}: {what}")
        for kind in ("cache", "state"):
            shutil.rmtree(work / f"{kind}-{variant}", ignore_errors=True)
        without = "all" if variant in ("ordinary", "local") else ""
        job = job or starts.job_file(site, plain=variant == "ordinary")
        program = ordinary.PROGRAM if without else BOOTSEER
        done = starts.run(site, node, variant, job, work, without=without, program=program)
        workplace.await_end(work, _SETTLE_SECONDS)  # the next start is to find the hot pack, and the cores
        self.starts.setdefault(variant, []).append(done)
        self.say(f"{variant}: first step after {done.seconds:.1f} s, {done.bytes_ready / 1e6:.0f} MB over the link")

    def _convert(self, site: starts.Site) -> None:
        began = time.monotonic()
        told = run([*BOOTSEER, "image", "convert", site.ref, "--store", site.store, "--json"])
        self.conversion = {"seconds": round(time.monotonic() - began, 1)}
        steps = json.loads(told).get("seconds", {})
        self.conversion.update({f"{step}_seconds": value for step, value in steps.items()})
        self.say(f"image convert: {self.conversion['seconds']:.0f} s")

    def _compare(self, site: starts.Site, prefix: list[str], work: Path) -> None:
        """Mount both root file systems read-only, the bootseer one from the ``again`` node's own cache, and compare."""
        plain, fast = work / "tree-ordinary", work / "tree-bootseer"
        environ = {
            "BOOTSEER_STORE": site.store,
            "BOOTSEER_CACHE_DIR": str(work / "job/cache-again"),
            "BOOTSEER_STATE_DIR": str(work / "job/state-again"),
        }
        plain.mkdir()
        fast.mkdir()
        with contextlib.ExitStack() as stack:
            ctr = ["ctr", "--address", site.containerd, "images"]
            run([*ctr, "mount", site.ref, str(plain)])
            stack.callback(run, [*ctr, "unmount", "--rm", str(plain)])
            run([*prefix, *BOOTSEER, "image", "mount", site.ref, str(fast)], env=environ)
            stack.callback(run, [*prefix, *BOOTSEER, "unmount", str(fast)], env=environ)
            self.entries, self.differences = tree.differences(plain, fast)
        for line in self.differences:
            log.error("file trees differ: %s", line)

    def report_figures(self, total: float) -> None:
        """Runs and figures of the report, from what was measured."""
        for n, done in ((n, done) for found in self.starts.values() for n, done in enumerate(found, 1)):
            self.report.runs.append(
                report.Run(
                    variant=done.variant,
                    n=n,
                    seconds=round(done.seconds, 3),
                    bytes={"link_until_first_step": done.bytes_ready, "link_total": done.bytes_total},
                    stages=done.record.stages,
                    details={
                        "bound_seconds": round(self.bound(done), 3),
                        "image": done.record.image,
                        "env": done.record.env,
                        "checkpoint": done.record.checkpoint,
                        "losses": {str(step): loss for step, loss in done.losses.items()},
                    },
                )
            )
        self.report.runs.append(
            report.Run(variant="convert", n=1, seconds=self.conversion["seconds"], details=dict(self.conversion))
        )
        add, n = self.report.figure, self.rounds
        add("overhead_reduction_first", self.reduction("first"), unit="ratio", target=">= 0.5", n=n, of="median")
        add("overhead_reduction_again", self.reduction("again"), unit="ratio", target=">= 0.8", n=n, of="median")
        ratios = [done.seconds / self.bound(done) for done in self.starts["again"]]
        add("again_vs_bound", statistics.median(ratios), unit="ratio", target="<= 1.5", n=n, of="median")
        add("tree_identical", self.entries > 0 and not self.differences, unit="bool", target="== 1", n=1, of="single")
        add("loss_continues", self.loss_continues(), unit="bool", target="== 1", n=4 * n, of="min")
        env = self.median("again").record.env
        seconds = env["seconds"] if env["how"] == "restored-mount" else {}
        if isinstance(seconds, dict) and "restore" in seconds:
            add("env_mount_ms", seconds["restore"] * 1000, unit="ms", target="<= 100", n=1, of="single")
        else:
            log.error("no env_mount_ms: the environment was not mounted (%s)", env["reason"])
        add("total_seconds", total, unit="s", target=f"<= {360 * n}", n=1, of="single")

    def median(self, variant: str) -> Measured:
        """The start of ``variant`` that took the median of seconds (of an even number, the slower one)."""
        found = sorted(self.starts[variant], key=lambda done: done.seconds)
        return found[len(found) // 2]

    def bound(self, done: Measured) -> float:
        """Seconds that no start with these bytes can be faster than: the local start's, or what the link needs."""
        return max(self.median("local").seconds, done.bytes_ready * 8 / (self.rate_mbit * 1e6))

    def overhead(self, variant: str) -> float:
        """Seconds to the first step beyond those of the local start, of medians."""
        return self.median(variant).seconds - self.median("local").seconds

    def reduction(self, variant: str) -> float:
        """Share of the ordinary start-up overhead that ``variant`` saves."""
        return 1 - self.overhead(variant) / self.overhead("ordinary")

    def loss_continues(self) -> bool:
        """Whether every start's losses are those of the run that wrote the checkpoint, step by step."""
        wanted = self.ingredients.reference_losses()
        return all(same_losses(wanted, done.losses) for found in self.starts.values() for done in found)
