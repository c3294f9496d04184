"""``bootseer demo``: one real training job, started the ordinary way and the bootseer way, side by side."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bootseer.demo.comparison import Comparison


def demo(
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it keeps what it makes once (default: in the cache)")
    ] = None,
    rate: Annotated[float, typer.Option(metavar="MBIT", min=10, max=10_000, help="Limit of the link, Mbit/s")] = 300,
) -> None:
    """Start a real training job ordinarily and with bootseer behind a slow link, and compare.

    Makes an image of this machine's Python with JAX, a package index and a checkpoint once, then starts the same job
    three times: ordinary, first and again with bootseer. Needs root, runc or crun, and the first time PyPI and 4 GB of
    disk.
    """
    from bootseer import config
    from bootseer.demo import workplace
    from bootseer.demo.comparison import Comparison
    from bootseer.demo.light import Light
    from bootseer.errors import PrivilegeError
    from bootseer.kernel import mount

    if os.geteuid() != 0:
        raise PrivilegeError("the demo mounts file systems and runs containers", hint="run it with sudo")
    mount.private_namespace()  # what a killed demo has mounted goes with it
    place = workplace.claim(cache or Path(config.load().cache_dir, "demo"))
    _examine(place)
    compare(Comparison(Light(place, rate), place, say=say))


def say(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(f"==> {line}", highlight=False, markup=False, soft_wrap=True)


def compare(run: Comparison) -> None:
    """Start all of the recipe, and print the comparison."""
    run.run()
    _show(run)


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


def _show(run: Comparison) -> None:
    from rich.console import Console

    from bootseer.demo.comparison import ORDER
    from bootseer.profile import card

    console = Console()
    medians = {variant: run.median(variant) for variant in ORDER}
    console.print(card.render_side_by_side([(variant, done.report) for variant, done in medians.items()], run.rows()))

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    say(f"The image was converted once, in {run.recipe.conversion['seconds']:.0f} s. A node's link had")
    say(f"{run.recipe.rate_mbit:g} Mbit/s for all. The losses were the same in all starts.")
    if os.getloadavg()[1] > 2 * len(os.sched_getaffinity(0)):
        say(f"This machine is busy with other work (load {os.getloadavg()[1]:.0f}): run it again when it is not.")
    program = sys.argv[0] if os.access(sys.argv[0], os.X_OK) else "bootseer"
    say("\nwhat to look at next, as root:")
    say(f"  {program} profile show {run.kept}/events")
    if (run.kept / "store").exists():
        say(f"  {program} store ls --store {run.kept}/store")
