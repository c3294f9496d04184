"""How long `bootseer store du` takes for a store of 100,000 objects, in a folder and on HDFS.

    scripts/bench account [--quick] [--runs N] [--out report.json]

The store has 260 images, whose records, manifests and maps are read, and empty objects of packs that nothing needs up
to the number; ``seconds`` is the command from its start to its end. --quick: 10,000 objects.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options, say
from bench.common.report import Report, Run
from bootseer.blocks.publish.tree import TreeWriter
from bootseer.demo.programs import BOOTSEER
from bootseer.errors import DataError
from bootseer.hdfs.namenode import NameNode
from bootseer.image import record
from bootseer.objects import Store, open_store
from support.hadoop import HadoopCluster
from support.records import record_of

_IMAGES, _PACKS, _BLOCK = 260, 3, 4096
_THREADS = 8


def _publish(store: Store, number: int, work: Path) -> None:
    """An image of ``_PACKS`` packs that no other has."""
    folder = work / f"tree-{number}"
    folder.mkdir()
    with TreeWriter(store, folder, block_size=_BLOCK) as out:
        for _ in range(_PACKS):
            out.packs.next_pack()
            out.packs.write(random.Random(number).randbytes(_BLOCK))
        tree = out.seal(b"%064d" % number).digest
    record.save(store, msgspec.structs.replace(record_of("a", tree), image=f"sha256:{number:064x}"))


def _in_folder(root: Path) -> Callable[[str], None]:
    def touch(key: str) -> None:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(root / key, os.O_CREAT | os.O_WRONLY))

    return touch


def _on_hdfs(url: str) -> Callable[[str], None]:
    names, root = NameNode.connect(url), "/" + url.partition("://")[2].partition("/")[2]

    def touch(key: str) -> None:
        names.complete(f"{root}/{key}", names.create(f"{root}/{key}").file_id, None)

    return touch


def _filled(url: str, touch: Callable[[str], None], count: int, work: Path) -> int:
    """How many objects the store at ``url`` has then: ``count`` at least."""
    store = open_store(url)
    work.mkdir()
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda number: _publish(store, number, work), range(_IMAGES)))
        there = sum(1 for _ in store.list(""))
        keys = (f"blobs/{number % 256:02x}/{number:064x}" for number in range(count - there))
        list(pool.map(touch, keys))
    return max(count, there)


def _measure(variant: str, number: int, url: str, count: int, made: Report) -> None:
    began = time.monotonic()
    done = subprocess.run([*BOOTSEER, "store", "du", "--json", "--store", url], stdout=subprocess.PIPE, check=True)
    seconds = time.monotonic() - began
    found = msgspec.json.decode(done.stdout)
    counted = sum(kind["objects"] for kind in found["kinds"].values())
    if (counted, len(found["takers"])) != (count, _IMAGES):
        raise DataError(f"{url} has {count} objects of {_IMAGES} images, and store du said otherwise: {done.stdout!r}")
    say(f"{variant}: {seconds:.2f} s")
    made.runs.append(Run(variant=variant, n=number, seconds=round(seconds, 3), details={"objects": counted}))


def _run(options: Options, made: Report) -> None:
    count = 10_000 if options.quick else 100_000
    with HadoopCluster(options.work / "hdfs", 1, settings={"dfs.replication": "1"}) as cluster:
        stores = {
            "folder": (str(options.work / "store"), _in_folder(options.work / "store")),
            "hdfs": (f"{cluster.url}/store", _on_hdfs(f"{cluster.url}/store")),
        }
        sizes = {
            name: _filled(url, touch, count, options.work / f"{name}-packs") for name, (url, touch) in stores.items()
        }
        say(f"both stores have {count} objects")
        for number in range(1, options.runs + 1):
            for name, (url, _) in stores.items():
                _measure(name, number, url, sizes[name], made)


def compute(made: Report, say: Say) -> Figures:
    """Replace the figures of the report."""
    found = Figures(made, say)
    found.median("store_du_folder_s", "<= 10", "folder", unit="s")
    found.median("store_du_hdfs_s", "<= 60", "hdfs", unit="s")
    return found


if __name__ == "__main__":
    parser = invocation.parser("account", __doc__, quick="10,000 objects, once", runs=(3, 1), work=True)
    sys.exit(invocation.carry_out(parser, _run, compute))
