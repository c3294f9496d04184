"""The recipe of ``scripts/demo --full``: a torch job (or a small one) from a registry, HDFS and containerd.

The node is a network namespace behind a link of limited rate; the servers stand on the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from bench.common import ordinary, peers
from bench.common.debian import Workload
from bench.demo import strongest
from bench.demo.ingredients import Ingredients
from bench.demo.strongest import USES_UV, Strongest, uv_index
from bootseer import stripefs
from bootseer.demo import starts, workplace
from bootseer.demo.comparison import Recipe, Say
from bootseer.demo.programs import BOOTSEER, run
from bootseer.launch.job import CheckpointTable, EnvTable, ImageTable, Job, JobTable, MountTable
from bootseer.objects import open_store
from support.hadoop import HadoopCluster
from support.netns import Node, ShapedNetwork
from support.registry import DockerRegistry, without_tls
from support.trees import differences

JOB_ENV = "/opt/job-env"
_CHECKPOINT = "/checkpoint"
_SETTLE_SECONDS = 300.0
_HERE = Path(__file__).parent
WORKLOADS = {
    "torch": Workload(name="torch", job=_HERE / "job", packages=("torch", "numpy"), disk_gib=40.0),
    "small": Workload(name="small", job=_HERE / "job_small", packages=(), disk_gib=4.0),
}


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where the servers are, as nodes see them. ``striped`` and ``plain``: the checkpoint, in both forms."""

    ref: str
    index_url: str
    store: str
    striped: str
    plain: str
    hdfs_client: str
    containerd: str = ""

    def variables(self) -> dict[str, str]:
        """What a start is told of them."""
        return {
            "BOOTSEER_STORE": self.store,
            "BENCH_HDFS_CLIENT": self.hdfs_client,
            "BENCH_CONTAINERD": self.containerd,
        }

    def job(self, *, plain: bool = False, local: Ingredients | None = None) -> Job:
        """The job. ``plain``: its checkpoint is in plain files; ``local``: these parts are on the node, and nothing is
        left to load but the image."""
        mounts = []
        if local:
            mounts = [MountTable(source=str(local.job_env), target=JOB_ENV)]
            mounts += [MountTable(source=str(local.checkpoint), target=_CHECKPOINT)]
        host = self.index_url.split("/")[2].split(":")[0]
        return Job(
            job=JobTable(
                name="demo",
                command=["python3", "/job/train.py", "--resume", _CHECKPOINT],
                gpus=8,
                env={"PYTHONPATH": JOB_ENV, "INDEX_URL": self.index_url, "INDEX_HOST": host},
                cwd="/job",
            ),
            image=ImageTable(ref=self.ref),
            env=None
            if local
            else EnvTable(
                command=["sh", "/job/setup.sh"],
                targets=[JOB_ENV],
                key_files=["/job/setup.sh", "/job/requirements.txt"],
                key_env=["INDEX_URL"],
            ),
            checkpoint=None if local else CheckpointTable(url=self.plain if plain else self.striped, path=_CHECKPOINT),
            mounts=mounts,
        )


def stored(hdfs: HadoopCluster, checkpoint: Path) -> dict[str, str]:
    """Put ``checkpoint`` into HDFS as plain files and as striped ones; these fields of `Addresses`."""
    hdfs.fs_shell(["-mkdir", "-p", "/plain"])
    hdfs.fs_shell(["-put", str(checkpoint), "/plain/checkpoint"])
    fs = stripefs.open_fs(f"{hdfs.url}/striped")
    for file in sorted(checkpoint.iterdir()):
        fs.put(file, f"checkpoint/{file.name}")
    fs.commit("checkpoint")
    return {
        "store": f"{hdfs.url}/bootseer",
        "striped": f"{hdfs.url}/striped/checkpoint",
        "plain": f"{hdfs.url}/plain/checkpoint",
        "hdfs_client": shlex.join(hdfs.shell_argv([])),
    }


class Full(Recipe):
    """``workload`` is started; what it needs is made below ``cache``."""

    halves = (("ordinary", "local", "strongest"), ("first-uv", "first", "again"))
    what: ClassVar[Mapping[str, str]] = {
        "ordinary": "containerd pulls, pip installs, Hadoop's client copies",
        "local": "the same with everything on the node already",
        "strongest": "nydus prefetches what the job opens, uv has a full cache, hdfs-native copies",
        "first-uv": "as first, with the set-up command of strongest: uv and its full cache",
        "first": "lazy image without a profile, set-up command captured, striped checkpoint",
        "again": "hot blocks prefetched, environment mounted, striped checkpoint",
    }
    kept = ("job/events",)

    def __init__(self, workload: Workload, cache: Path, rate_mbit: float, subnet: str) -> None:
        self.name = "demo" if workload.name == "torch" else f"demo-{workload.name}"
        """Of the report."""
        self.cache, self.rate_mbit, self.subnet = cache, rate_mbit, subnet
        self.ingredients = Ingredients(workload, cache)

    def prepare(self, say: Say) -> None:
        self.ingredients.prepare(say)

    @property
    def reference_losses(self) -> Mapping[int, float]:
        return self.ingredients.reference_losses

    @contextlib.contextmanager
    def open(self, work: Path, say: Say) -> Iterator[FullSite]:
        parts = self.ingredients
        with contextlib.ExitStack() as stack:
            network = ShapedNetwork(workplace.prefix(self.cache), rate_mbit=self.rate_mbit, subnet=self.subnet)
            node = stack.enter_context(network).nodes[0]
            root = work / "registry"
            shutil.copytree(parts.registry, root, copy_function=os.link)  # what is pushed goes with it
            registry = stack.enter_context(DockerRegistry(host=network.host, root=root))
            stack.enter_context(without_tls(registry.address))
            index = stack.enter_context(peers.file_server(uv_index(parts.index, work), network.host, work))
            say("HDFS: a NameNode and 4 DataNodes start")
            # one replica: all DataNodes share this machine's disk, more would only cost space
            hdfs = HadoopCluster(work / "hdfs", bind=network.host, settings={"dfs.replication": "1"})
            stack.enter_context(hdfs)
            say("checkpoint: stored as plain files and as striped files")
            addresses = Addresses(
                ref=f"{registry.address}/{parts.repository}:1",
                index_url=f"{index}/simple",
                **stored(hdfs, parts.checkpoint),
                containerd=stack.enter_context(peers.containerd(work / "containerd", node.argv([]), built=False))[-1],
            )
            self.conversion = _convert(addresses)
            say(f"image convert: {self.conversion['seconds']:.0f} s, once for each image in a cluster")
            local, requirements = addresses.job(local=parts), parts.workload.job / "requirements.txt"
            mix = Strongest(work, addresses.ref, addresses.index_url, local, requirements)
            # servers are warm, nodes are cold: each start has a new node cache, and containerd has no image
            for folder in (parts.registry, parts.index, parts.job_env, parts.checkpoint):
                starts.read_all(folder)
            yield FullSite(parts, addresses, node, mix, say)


def _convert(addresses: Addresses) -> dict[str, float]:
    began = time.monotonic()
    told = run([*BOOTSEER, "image", "convert", addresses.ref, "--store", addresses.store, "--json"])
    steps = json.loads(told).get("seconds", {})
    return {"seconds": round(time.monotonic() - began, 1)} | {f"{step}_seconds": steps[step] for step in steps}


class FullSite:
    """The servers at ``addresses``, and ``node``, which reaches them."""

    def __init__(self, parts: Ingredients, addresses: Addresses, node: Node, mix: Strongest, say: Say) -> None:
        self._parts, self.addresses, self._node, self.mix, self._say = parts, addresses, node, mix, say

    def start(self, variant: str, work: Path, *, program: Sequence[str] = BOOTSEER) -> starts.Measured:
        """``program`` as of `starts.run`."""
        self.mix.fill(variant, self._say)
        mix = self.mix if variant == "strongest" else None
        if variant == "ordinary" or (mix and mix.needs_containerd):
            forget_image(self.addresses)
        if variant in ("first", "first-uv"):
            forget_starts(self.addresses.store)
        usual = variant in ("ordinary", "local")
        job = self.addresses.job(plain=usual or mix is not None, local=self._parts if variant == "local" else None)
        done = starts.run(
            variant,
            self.mix.job(job) if variant in USES_UV else job,
            work,
            environ={**self.addresses.variables(), **(mix.variables() if mix else {})},
            received=self._node.bytes_received,
            without="all" if usual or mix else "",
            node=self._node.name,
            prefix=self._node.argv([]),
            program=strongest.PROGRAM if mix else ordinary.PROGRAM if usual else program,
        )
        workplace.await_end(work, _SETTLE_SECONDS)  # the next start is to find the hot pack, and the cores
        return done

    def differences(self, work: Path) -> tuple[int, list[str]]:
        """Of the image that containerd has and that of the ``again`` node, mounted from its own cache."""
        ref, prefix = self.addresses.ref, self._node.argv([])
        plain, fast = work / "tree-ordinary", work / "tree-bootseer"
        environ = {
            "BOOTSEER_STORE": self.addresses.store,
            "BOOTSEER_CACHE_DIR": str(work / "job/cache-again"),
            "BOOTSEER_STATE_DIR": str(work / "job/state-again"),
        }
        plain.mkdir()
        fast.mkdir()
        with contextlib.ExitStack() as stack:
            ctr = ["ctr", "--address", self.addresses.containerd, "images"]
            run([*ctr, "mount", ref, str(plain)])
            stack.callback(run, [*ctr, "unmount", "--rm", str(plain)])
            run([*prefix, *BOOTSEER, "image", "mount", ref, str(fast)], env=environ)
            stack.callback(run, [*prefix, *BOOTSEER, "unmount", str(fast)], env=environ)
            return differences(plain, fast)


def forget_starts(store_url: str) -> None:
    """Delete from the store what earlier starts left for later ones."""
    store = open_store(store_url)
    for prefix in ("profiles/", "env/"):
        for entry in list(store.list(prefix)):
            store.delete(entry.key)


def forget_image(addresses: Addresses) -> None:
    """Remove the image from the node's containerd."""
    ctr = ["ctr", "--address", addresses.containerd, "images"]
    if addresses.ref in run([*ctr, "list", "--quiet"]).split():
        run([*ctr, "rm", "--sync", addresses.ref])
