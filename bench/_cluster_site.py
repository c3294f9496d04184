"""An emulated cluster: nodes and DataNodes in network namespaces with links of their own, and one link for the rest.

Registry, package index and NameNode are on this host, whose own link to the nodes is limited too. Nodes share the two
processors, the memory and the disk of this machine, so links must be slow enough to be what a start waits for; each run
tells the processor time that it used.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from bootseer import stripefs
from bootseer.demo import comparison, starts, workplace
from bootseer.demo.ingredients import JOB_ENV, SETTINGS, STATE, Ingredients
from bootseer.demo.programs import BOOTSEER, run
from bootseer.demo.starts import Measured
from bootseer.launch.job import CheckpointTable, EnvTable, ImageTable, Job, JobTable
from bootseer.store import open_store
from comparison.site import containerd, file_server
from support.hadoop import HadoopCluster
from support.layouts import push
from support.netns import ShapedNetwork
from support.registry import DockerRegistry, without_tls

Way = Literal["local", "ordinary", "first", "again", "restart", "replaced"]
DATANODES = 4
_JOB = """
import contextlib
try:
    from bootseer.profile.emit import span
except ImportError:
    span = lambda stage: contextlib.nullcontext()
with span("import"):
    import einops, jax, optax, safetensors
with span("checkpoint_load"):
    with open("/checkpoint/STATE", "rb") as file:
        while file.read(4 << 20):
            pass
with span("first_step"):
    pass
"""
_PUBLICATION_SECONDS = 120.0


class Scenario(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is started in each round and how the cluster is. Rates in Mbit/s; shares are of a rate."""

    ways: list[Way]
    node_mbit: float = 100.0
    registry_mbit: float = 200.0
    datanode_mbit: float = 100.0
    slow_node: float = 1.0
    slow_datanode: float = 1.0


class Fleet(msgspec.Struct, kw_only=True):
    """One start of all nodes. ``cpu``: seconds of all processors of this machine; ``egress``: bytes that left the host
    (registry, index, NameNode) until the last node had ended."""

    nodes: list[Measured]
    cpu: float
    egress: int
    index_requests: int

    @property
    def seconds(self) -> float:
        """Until the last node is ready: before that no rank can train."""
        return max(done.seconds for done in self.nodes)

    @property
    def setup_runs(self) -> int:
        return sum(str(done.record.env.get("how", "")).startswith("ran") for done in self.nodes)


class Cluster:
    """The cluster of ``scenario`` with ``count`` nodes, in the folder ``work``; see `started`."""

    def __init__(self, work: Path, parts: Ingredients, scenario: Scenario, count: int) -> None:
        self._work, self._parts, self._scenario, self.count = work, parts, scenario, count

    @contextlib.contextmanager
    def started(self) -> Iterator[Cluster]:
        """Its servers run meanwhile, and the image is converted."""
        given, work, parts = self._scenario, self._work, self._parts
        prefix = workplace.prefix(work)
        with contextlib.ExitStack() as stack:
            network = stack.enter_context(
                ShapedNetwork(prefix, nodes=self.count + DATANODES, rate_mbit=given.node_mbit, subnet="10.79.0.0/24")
            )
            self.nodes, datanodes = network.nodes[: self.count], network.nodes[self.count :]
            for node in datanodes:
                node.limit(given.datanode_mbit)
            self._network = network
            registry = stack.enter_context(DockerRegistry(host=network.host, root=work / "registry"))
            stack.enter_context(without_tls(registry.address))
            self._index = stack.enter_context(file_server(parts.index, network.host, work))
            self._host = network.host
            hdfs = stack.enter_context(
                HadoopCluster(
                    work / "hdfs",
                    bind=network.host,
                    datanode_hosts=[node.address for node in datanodes],
                    wrap=lambda i: datanodes[i].argv([]),
                    settings={"dfs.replication": "2"},
                    racks={node.address: f"/r{i}" for i, node in enumerate(datanodes)},
                )
            )
            self._hdfs, self._hdfs_client = hdfs.url, shlex.join(hdfs.shell_argv([]))
            self._ref = f"{registry.address}/bench/cluster:1"
            push(f"oci:{parts.site / 'image'}", self._ref)
            hdfs.fs_shell(["-mkdir", "-p", "/plain"])
            hdfs.fs_shell(["-put", str(parts.checkpoint), "/plain/checkpoint"])
            fs = stripefs.open_fs(f"{self._hdfs}/striped")
            fs.put(parts.checkpoint / STATE, f"checkpoint/{STATE}")
            fs.commit("checkpoint")
            self.store = f"{self._hdfs}/bootseer"
            run([*BOOTSEER, "image", "convert", self._ref, "--store", self.store], env=dict(SETTINGS))
            self._sockets = []
            if "ordinary" in given.ways:
                for node in self.nodes:
                    folder = work / f"containerd-{node.name}"
                    self._sockets.append(stack.enter_context(containerd(folder, node.argv([]), folder)))
            network.limit_host(given.registry_mbit)
            self.nodes[0].limit(given.node_mbit * given.slow_node)
            datanodes[0].limit(given.datanode_mbit * given.slow_datanode)
            for folder in (parts.site, parts.rootfs, parts.job_env, work / "registry"):
                starts.read_all(folder)
            yield self

    def start(self, way: Way) -> Fleet:
        """Start the job on all nodes at once and wait for its end there. `BootseerError` when one fails."""
        work = self._work / "starts"
        if way == "first":
            self._forget()
        if way == "ordinary":
            for socket in self._sockets:
                if self._ref in run(["ctr", "--address", str(socket), "images", "list", "--quiet"]).split():
                    run(["ctr", "--address", str(socket), "images", "rm", "--sync", self._ref])
        requests, egress, cpu = self._requests(), self._network.host_bytes_sent(), _cpu()
        with ThreadPoolExecutor(self.count) as threads:
            nodes = list(threads.map(partial(self._one, work, way), range(self.count)))
        found = Fleet(
            nodes=nodes,
            cpu=_cpu() - cpu,
            egress=self._network.host_bytes_sent() - egress,
            index_requests=self._requests() - requests,
        )
        workplace.await_end(work, _PUBLICATION_SECONDS)  # the next start is to find what this one recorded
        return found

    def _one(self, work: Path, way: Way, number: int) -> Measured:
        node, folder = self.nodes[number], work / str(number)
        kept = way == "restart" or (way == "replaced" and number)
        cache = folder / f"cache-{'again' if kept else way}"
        for place in (*(() if kept else (cache,)), folder / f"state-{way}"):
            shutil.rmtree(place, ignore_errors=True)
        environ = {
            **SETTINGS,
            "BOOTSEER_STORE": self.store,
            "BOOTSEER_CACHE_DIR": str(cache),
            "BOOTSEER_HDFS_CLIENT": self._hdfs_client,
            "BOOTSEER_NODES": str(self.count),
        }
        plain = way in ("local", "ordinary")
        return starts.run(
            way,
            self._local() if way == "local" else self._job(number),
            folder,
            environ=environ,
            received=node.bytes_received,
            without="all" if plain else "",
            node=node.name,
            prefix=node.argv([]),
        )

    def _forget(self) -> None:
        """Nobody has started the job yet."""
        store = open_store(self.store)
        for kind in ("profiles/", "env/"):
            for entry in list(store.list(kind)):
                store.delete(entry.key)

    def _requests(self) -> int:
        return (self._work / "index.log").read_text(errors="replace").count('"GET ')

    def _job(self, number: int) -> Job:
        pip = "python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-cache-dir"
        command = [*pip.split(), "--no-deps", "--index-url", f"{self._index}/simple", "--trusted-host", self._host]
        socket = str(self._sockets[number]) if self._sockets else ""
        return Job(
            job=_TRAINING,
            image=ImageTable(ref=self._ref, containerd=socket) if socket else ImageTable(ref=self._ref),
            env=EnvTable(
                command=[*command, "--target", JOB_ENV, "--requirement", "/job/requirements.txt"],
                targets=[JOB_ENV],
                key_files=["/job/requirements.txt"],
            ),
            checkpoint=CheckpointTable(
                url=f"{self._hdfs}/striped/checkpoint",
                ordinary_url=f"{self._hdfs}/plain/checkpoint",
                path="/checkpoint",
            ),
        )

    def _local(self) -> Job:
        return msgspec.structs.replace(comparison.local_job(self._parts), job=_TRAINING)


_TRAINING = JobTable(
    name="cluster",
    command=["python3", "-c", _JOB.replace("STATE", STATE)],
    gpus=8,
    env={"PYTHONPATH": JOB_ENV},
    cwd="/job",
)


def _cpu() -> float:
    """Seconds that all processors were busy since boot."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(None, 4)[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")
