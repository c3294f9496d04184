"""CPU time of ranges from a real registry: by our client, and by urllib3, in the same process and by turns.

    python bench/registry_client.py [--quick] [--out report.json]

Needs docker-registry (scripts/setup installs it). A range of 1 MiB at a random place of a blob of 64 MiB, over one kept
connection of loopback; `process_time` per range, medians of the rounds. ``urllib3`` is there as a dependency of what
reads S3; it is asked for the whole body as bytes, as ours is.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import urllib3

from bootseer import oci, report
from bootseer.oci.registry import Registry
from bootseer.oci.spec import Descriptor, digest_of
from support.registry import DockerRegistry

MIB = 1 << 20
SIZE = 64 * MIB

Read = Callable[[int], bytes]


def ours(registry: Registry, item: Descriptor) -> Read:
    return lambda offset: registry.read_range(item, offset, MIB)


def theirs(pool: urllib3.PoolManager, url: str) -> Read:
    def read(offset: int) -> bytes:
        answer = pool.request("GET", url, headers={"Range": f"bytes={offset}-{offset + MIB - 1}"}, timeout=30.0)
        assert answer.status == 206
        return answer.data

    return read


def measure(read: Read, content: bytes, count: int) -> float:
    """CPU seconds per range."""
    offsets = [random.randrange(SIZE - MIB) for _ in range(count)]
    assert read(offsets[0]) == content[offsets[0] : offsets[0] + MIB]
    began = time.process_time()
    for offset in offsets:
        read(offset)
    return (time.process_time() - began) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds, count = (2, 50) if options.quick else (9, 200)
    document = report.new("registry_client")
    content = os.urandom(SIZE)
    item = Descriptor("application/octet-stream", digest_of(content), SIZE)
    with DockerRegistry() as server, Registry(oci.Reference.parse(f"{server.address}/bench:x"), mirrors=()) as registry:
        registry.put_blob(item, content)
        url = f"http://{server.address}/v2/bench/blobs/{item.digest}"
        with urllib3.PoolManager(maxsize=1) as pool:
            clients = {"bootseer": ours(registry, item), "urllib3": theirs(pool, url)}
            for number in range(1, rounds + 1):
                for name in random.sample(sorted(clients), len(clients)):
                    seconds = measure(clients[name], content, count)
                    document.runs.append(report.Run(variant=name, n=number, seconds=seconds))
    found = {name: [run.seconds for run in document.runs if run.variant == name] for name in clients}
    for name, took in found.items():
        middle = statistics.median(one for one in took if one is not None)
        print(f"{name:10} {middle * 1e3:6.3f} ms of CPU per 1 MiB range")
    pairs = zip(found["bootseer"], found["urllib3"], strict=True)
    ratio = statistics.median(mine / other for mine, other in pairs if mine is not None and other is not None)
    document.figure("range_cpu_vs_urllib3", ratio, unit="ratio", target="<= 1", n=rounds, of="median")
    print(f"ratio to urllib3 {ratio:.2f}")
    if options.out:
        document.write(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
