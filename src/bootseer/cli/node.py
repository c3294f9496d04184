"""``bootseer node``: the daemon that mounts images for the users of a node."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

import typer

from bootseer.cli._shared import AsJson, answer, count_text, settings, time_text

app = typer.Typer(no_args_is_help=True, help="The daemon that mounts images for the users of a node")


@app.command()
def serve() -> None:
    """Be the daemon, as root, until a signal or `bootseer node drain` ends it. What is mounted stays.

    It adopts what an earlier daemon has mounted. It uses the store and the limits of the settings.
    """
    import logging

    from bootseer.loglimit import LogRateLimit
    from bootseer.node.daemon import Daemon

    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRateLimit())  # any user can cause lines
    Daemon(settings()).run()


@app.command()
def status(as_json: AsJson = False) -> None:
    """Say what the daemon does. As root, `bootseer image status` lists its mounts."""
    from bootseer.node import client

    found = client.node(config=settings())
    state = "is being drained: it mounts nothing more" if found.draining else "serves"
    answer(
        found,
        as_json,
        f"node daemon {found.pid} of bootseer {found.version} {state}, since {time_text(found.started)}",
        f"  {count_text(found.mounts, 'mount', 'mounts')}, {count_text(found.running, 'request', 'requests')} running",
        f"  answered: {_counts(found.done)}",
        f"  failed: {_counts(found.failed)}",
    )


@app.command()
def drain(as_json: AsJson = False) -> None:
    """Have the daemon refuse new mounts, and end when none is left. A restart of the daemon takes this back."""
    from bootseer.node import client

    config = settings()
    client.drain(config=config)
    answer({"draining": True}, as_json)


@app.command()
def metrics() -> None:
    """Print the daemon's figures for Prometheus, as for the text files that node_exporter collects."""
    from bootseer.node import client
    from bootseer.node import unit as site

    typer.echo(site.metrics(client.node(config=settings())), nl=False)


@app.command()
def unit() -> None:
    """Print the systemd unit of the daemon.

    Example: bootseer node unit > /etc/systemd/system/bootseer-node.service
    """
    from bootseer.node import unit as site

    program = shutil.which(sys.argv[0]) or sys.argv[0]
    words = [os.path.abspath(program), "-v"]
    if chosen := os.environ.get("BOOTSEER_CONFIG"):
        words += ["--config", os.path.abspath(chosen)]
    typer.echo(site.systemd_unit(shlex.join([*words, "node", "serve"])), nl=False)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "nothing"
