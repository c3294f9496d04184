"""``python -m comparison``: one real training job, started the ordinary way and the bootseer way, side by side."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from bench.comparison.comparison import Demo


def demo(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report (JSON) there")] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where image, index and checkpoint are kept (default: the cache)")
    ] = None,
    job: Annotated[str, typer.Option(help="torch, or small: standard library only, for a quick look")] = "torch",
    rate: Annotated[float, typer.Option(metavar="MBIT", min=10, help="Limit of the node's link in Mbit/s")] = 1000,
    subnet: Annotated[str, typer.Option(help="A /24 network that is free on this machine")] = "10.77.0.0/24",
    rounds: Annotated[int, typer.Option(min=1, help="Times that each start is done; figures are of medians")] = 3,
    results: Annotated[Path, typer.Option(metavar="DIR", help="Where the events of all starts are kept")] = Path(
        "bootseer-demo"
    ),
) -> None:
    """Start a real training job ordinarily and with bootseer behind a shaped link, and compare.

    Builds a torch image, a package index and a checkpoint once, then starts the same job four times on an emulated
    node: ordinary (containerd, pip, Hadoop's client), local (all there already), first and again with bootseer; in
    alternating order, several rounds. Cards and figures are of medians.
    Needs root and, the first time, 40 GB of disk and a package registry.
    """
    from rich.console import Console

    from bench.comparison.comparison import Demo
    from bench.comparison.recipe import RECIPES
    from bootseer import config
    from bootseer.errors import ConfigError, DataError

    if job not in RECIPES:
        raise ConfigError(f"--job {job} is none of {', '.join(RECIPES)}")
    try:
        if ipaddress.IPv4Network(subnet).prefixlen != 24:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--subnet {subnet} is no network of 256 addresses", hint="such as 10.77.0.0/24") from None
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(f"[bold]==>[/] {line}", highlight=False)

    results.mkdir(parents=True, exist_ok=True)
    place = (cache or Path(config.load().cache_dir, "demo")) / job
    run = Demo(RECIPES[job], place, rate_mbit=rate, subnet=subnet, rounds=rounds, results=results, say=say)
    run.run()
    _show(run, Console())
    if out:
        run.report.write(out)
        say(f"report: {out}")
    for name in ("tree_identical", "loss_continues"):
        if not all(figure.value for figure in run.report.figures if figure.name == name):
            raise DataError(f"{name} is false: the starts did not see the same bytes", hint="see the log above")
    say(f"look closer: bootseer profile show {results}/events; bootseer profile export {results}/events -o trace.json")


def _show(run: Demo, console: Console) -> None:
    from rich.table import Table

    from bootseer.profile import card

    order = ("ordinary", "first", "again")
    rows = {
        "over the link until then": [f"{run.median(v).bytes_ready / 1e6:,.0f} MB" for v in order],
        "bound: local, or the link": [f"{run.bound(run.median(v)):.1f} s" for v in order],
        "start-up overhead": [f"{run.overhead(v):.1f} s" for v in order],
        "less than ordinary": ["", *(f"{run.reduction(v):.1%}" for v in order[1:])],
    }
    console.print(card.render_side_by_side([(v, run.median(v).report) for v in order], rows))
    local = run.median("local").seconds
    console.print(f"everything already on the node: first step after {local:.1f} s (overhead counts from there)")
    console.print(f"image conversion, once per image in a cluster: {run.conversion['seconds']:.0f} s")
    table = Table("figure", "value", "target", "met")
    for figure in run.report.figures:
        shown = str(figure.value) if isinstance(figure.value, bool) else f"{figure.value:g} {figure.unit}"
        table.add_row(figure.name, shown, figure.target, "yes" if figure.met else "NO")
    console.print(table)


if __name__ == "__main__":
    from bootseer.cli.main import carry_out

    carry_out(lambda: typer.run(demo))
