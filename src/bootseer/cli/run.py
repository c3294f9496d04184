"""``bootseer run``: one node's start of a job."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import StoreUrl, mistake, settings
from bootseer.errors import logged

if TYPE_CHECKING:
    from bootseer.launch.node import Start

log = logging.getLogger(__name__)


def run(
    ctx: typer.Context,
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="What to start: docs/reference/job-file.md")],
    without: Annotated[
        str,
        typer.Option(metavar="LIST", help="Do without these: image,env,caches,checkpoint (comma-separated), or all"),
    ] = "",
    convert: Annotated[bool, typer.Option("--convert", help="Convert the image if it is not, on one node")] = False,
    store: StoreUrl = "",
    events: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for start-up events (default: in the cache)")
    ] = None,
    summary: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what this start did, as JSON, when it is over")
    ] = None,
    card: Annotated[bool, typer.Option(help="Show the start-up card on stderr after the first step")] = True,
) -> None:
    """Start a job on this node: image, environment, initialisation, then its training command.

    The exit code is the training command's, or the set-up command's when that failed. The node's number, how
    many nodes there are and the attempt come from Slurm, torchrun, Kubernetes or BOOTSEER_NODE_RANK, BOOTSEER_NODES
    and BOOTSEER_ATTEMPT.

    Example: bootseer run job.toml --without env
    """
    import msgspec

    if ctx.args or not (job_file.suffix or job_file.exists()):
        words = shlex.join([str(job_file), *ctx.args])
        raise mistake(f"{job_file} is no job file; a command in an image: bootseer image run REF {words}")
    from bootseer import launch
    from bootseer.errors import ConfigError, doing
    from bootseer.kernel import background

    background.lend()
    job, owner = launch.job.load(job_file)
    chosen = set(launch.job.TECHNIQUES) if without == "all" else {name for name in without.split(",") if name}
    if unknown := chosen.difference(launch.job.TECHNIQUES):
        raise ConfigError(
            f"--without {','.join(sorted(unknown))} names no technique",
            hint="there are image, env, caches and checkpoint",
        )
    if summary:
        with doing(f"write summary {summary}"):
            _try(summary)
    if convert:
        job = msgspec.structs.replace(job, image=msgspec.structs.replace(job.image, convert=True))
    config = settings(store)
    if owner and not os.geteuid() and not config.tenant:
        config = msgspec.structs.replace(config, tenant=f"uid {owner}")
    identity = launch.identity.identify(job.job.name)

    def ready(record: Start) -> None:
        if card:
            _show_card(Path(record.events))

    done = launch.node.start(
        job.without(chosen),
        config=config,
        identity=identity,
        events_dir=events or Path(config.cache_dir, "events"),
        on_ready=ready,
    )
    if summary:
        with logged(log.warning, "cannot write summary %s", summary):
            summary.write_bytes(msgspec.json.format(msgspec.json.encode(done), indent=2) + b"\n")
    sys.exit(done.exit_code)


def _try(file: Path) -> None:
    """Raise `OSError` where ``file`` cannot be written: before the job, not after it."""
    if not file.exists():
        file.touch()
        file.unlink()  # who looks for it would take it for whole
    elif file.is_file():  # to open a pipe says something to who reads it
        file.open("ab").close()


def _show_card(events: Path) -> None:
    """Print the card on stderr; trouble with it is a log line, never the job's."""
    with logged(log.warning, "cannot show the start-up card", kinds=Exception):
        from rich.console import Console

        from bootseer.profile import analysis, card
        from bootseer.profile import events as event_files

        report = analysis.analyse(event_files.read([events]), whole=False)
        console = Console(stderr=True)
        console.print(card.render(report))
        name = shlex.quote(str(events))
        line = f"again: bootseer profile show {name}; as a page: bootseer profile serve {name}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
