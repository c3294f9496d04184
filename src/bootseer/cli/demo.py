"""``bootseer demo``: one real training job, started the ordinary way and the bootseer way, side by side."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from bootseer.demo.comparison import Demo


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("demo")(demo)


def demo(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report (JSON) there")] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it keeps what it makes once (default: in the cache)")
    ] = None,
    rate: Annotated[float, typer.Option(metavar="MBIT", min=10, max=10_000, help="Limit of the link, Mbit/s")] = 300,
) -> None:
    """Start a real training job ordinarily and with bootseer behind a slow link, and compare.

    Makes an image of this machine's Python with JAX, a package index and a checkpoint once, then starts the same job
    five times: local (all there already; twice), ordinary, first and again with bootseer. Needs root, runc or crun,
    and the first time PyPI and 4 GB of disk.
    """
    from rich.console import Console

    from bootseer import config
    from bootseer.demo import workplace
    from bootseer.demo.comparison import Demo
    from bootseer.errors import PrivilegeError
    from bootseer.kernel import mount

    if os.geteuid() != 0:
        raise PrivilegeError("the demo mounts file systems and runs containers", hint="run it with sudo")
    mount.private_namespace()  # what a killed demo has mounted goes with it
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(f"==> {line}", highlight=False, markup=False, soft_wrap=True)

    place = workplace.claim(cache or Path(config.load().cache_dir, "demo"))
    _examine(place)
    run = Demo(place, rate_mbit=rate, say=say)
    try:
        run.run()
    finally:
        if out and run.report.figures:
            run.report.write(out)
            say(f"report: {out}")
    _show(run, Console())


def _examine(place: Path) -> None:
    """Raise `UnsupportedError` or `PrivilegeError` for the first thing that this machine lacks."""
    import msgspec

    from bootseer import config
    from bootseer.doctor import examine
    from bootseer.errors import PrivilegeError, UnsupportedError

    report = examine(msgspec.structs.replace(config.load(), cache_dir=str(place), store=""))
    for check in report.checks:
        if check.status == "missing" and (check.essential or check.name == "runtime"):
            kind = PrivilegeError if check.privilege else UnsupportedError
            raise kind(f"the demo does not run here: {check.name}: {check.detail}", hint=check.fix)


def _show(run: Demo, console: Console) -> None:
    from bootseer.profile import card

    order = ("ordinary", "first", "again")
    rows = {
        "over the link until then": [f"{run.measured[v].bytes_ready / 1e6:,.0f} MB" for v in order],
        "start-up overhead": [f"{run.overhead(v):.1f} s" for v in order],
        "less than ordinary": ["", *(f"{-run.reduction(v):+.0%}" for v in order[1:])],
    }
    console.print(card.render_side_by_side([(v, run.measured[v].report) for v in order], rows))
    kept = run.kept

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    say(f"everything already on the node: first step after {run.measured['local'].seconds:.1f} s; overhead counts from")
    say(f"there. The image was converted once, in {run.ingredients.conversion_seconds:.0f} s. A node's link had")
    say(f"{run.rate_mbit:g} Mbit/s for all. Same files and same losses in all starts: yes.")
    if os.getloadavg()[1] > 2 * len(os.sched_getaffinity(0)):
        say(f"This machine is busy with other work (load {os.getloadavg()[1]:.0f}): run it again when it is not.")
    missed = [f"{f.name} is {f.value:g} {f.unit}, wanted {f.target}" for f in run.report.figures if not f.met]
    for line in missed:
        say(f"missed: {line}")
    program = sys.argv[0] if os.access(sys.argv[0], os.X_OK) else "bootseer"
    say("\nwhat to look at next, as root:")
    say(f"  {program} profile show {kept}/events")
    say(f"  {program} store ls --store {kept}/store")
