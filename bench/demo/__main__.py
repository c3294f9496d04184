"""``scripts/demo --full``: the comparison of `bootseer demo` with torch, a registry, HDFS and containerd."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bootseer.cli.demo import compare, say

Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the report (JSON) there")]


def demo(
    output: Output = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where image, index and checkpoint are kept (default: the cache)")
    ] = None,
    job: Annotated[str, typer.Option(help="torch, or small: standard library only, for a quick look")] = "torch",
    rate: Annotated[float, typer.Option(metavar="MBIT", min=10, help="Limit of the node's link in Mbit/s")] = 1000,
    subnet: Annotated[str, typer.Option(help="A /24 network that is free on this machine")] = "10.77.0.0/24",
    rounds: Annotated[int, typer.Option(min=1, help="Times that each start is done; figures are of medians")] = 3,
) -> None:
    """Start a real training job ordinarily and with bootseer behind a shaped link, and compare.

    Builds a torch image, a package index and a checkpoint once, then starts the same job six times on an emulated
    node: ordinary (containerd, pip, Hadoop's client), local (all there already), with the strongest other tools (nydus,
    uv, hdfs-native), with bootseer first, first with uv as the other tools have it, and again; in alternating order,
    several rounds. Cards and figures are of medians.
    Needs root and, the first time, 40 GB of disk and a package registry.
    """
    from bench.demo.full import WORKLOADS, Full
    from bench.demo.reported import Reported
    from bootseer import config
    from bootseer.errors import ConfigError, PrivilegeError

    if job not in WORKLOADS:
        raise ConfigError(f"--job {job} is none of {', '.join(WORKLOADS)}")
    if os.geteuid() != 0:
        raise PrivilegeError("the demo mounts file systems and makes network namespaces", hint="run it with sudo")
    place = (cache or Path(config.load().cache_dir, "demo")) / job
    place.mkdir(parents=True, exist_ok=True)
    run = Reported(Full(WORKLOADS[job], place, rate, subnet), place, rounds=rounds, say=say)
    try:
        compare(run)
    finally:
        if output and run.report.figures:
            run.report.write(output)
            say(f"report: {output}")
    local = run.median("local").seconds
    print(f"everything already on the node: first step after {local:.1f} s; overhead counts from there")
    for figure in run.report.figures:
        if not figure.met:
            print(f"missed: {figure.name} is {figure.value:g} {figure.unit}, wanted {figure.target}")


if __name__ == "__main__":
    from bootseer.cli.main import carry_out

    carry_out(lambda: typer.run(demo))
