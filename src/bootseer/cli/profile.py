"""``bootseer profile``: show, record, import and export start-up events."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._completed import values
from bootseer.cli._shared import AsJson, Group, Limit, add_verbs, mistake, print_json, settings, understood, write_out
from bootseer.cli.profile_fleet import check, fleet, given_paths, growth
from bootseer.cli.profile_import import import_
from bootseer.cli.profile_serve import serve, side_by_side, token_in
from bootseer.errors import ConfigError
from bootseer.units import count_text, one_line, size_text

if TYPE_CHECKING:
    from bootseer.profile.events import EventLog, Identity

log = logging.getLogger(__name__)
app = typer.Typer(cls=Group, no_args_is_help=True, help="Where a start-up's time went")

_FORMATS = ("chrome", "html", "otlp", "prometheus")
Events = Annotated[
    list[Path] | None, typer.Argument(help="Event files, or folders of *.jsonl; default: $BOOTSEER_EVENTS")
]
JobName = Annotated[str | None, typer.Option("--job", help="This job; default: the one that began last (export: all)")]
Attempt = Annotated[str | None, typer.Option("--attempt", help="This attempt; default: the last")]
Cycle = Annotated[int | None, typer.Option("--cycle", help="This cycle; default: the last")]


def show(
    events: Events = None,
    job: JobName = None,
    attempt: Attempt = None,
    cycle: Cycle = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="PATH", help="Beside the last start-up in these events; the same: the one before"
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every start-up in the events, the oldest first")] = False,
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", metavar="N|LIST", help="How many nodes the job has, or which: n[01-04,7],m3"),
    ] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """Show the start-up card and the node x stage table of a job. --json prints a report, with --all a list of them.

    With --against two start-ups stand beside each other, stage by stage, the earlier one first.

    Example: bootseer profile show /shared/jobs/llama-7b/events
    """
    from rich.console import Console
    from rich.text import Text

    from bootseer.profile import analysis, card

    if against is not None:
        side_by_side([against], given_paths(events), as_json)
        return
    count, names = _nodes(nodes)
    log = _read(events)
    chosen = _choose(log, job, attempt, cycle, every)
    parts, now = log.by_identity(), time.time_ns()
    reports = [analysis.analyse(parts[identity], identity, nodes=count, names=names, now=now) for identity in chosen]
    if as_json:
        print_json(reports if every else reports[0])
        return
    console = Console()
    for place, report in enumerate(reports):
        if place:
            console.print()
        console.print(card.render(report, max_nodes=limit or sys.maxsize))
    others = len(log.identities()) - len(chosen)
    if others:
        console.print(Text(f"{others} more in these events: see --all, --job, --attempt, --cycle"))
    offenders = analysis.repeat_offenders(reports)
    if offenders:
        console.print(
            Text("stragglers in more than one: " + ", ".join(f"{one_line(node)} ({n})" for node, n in offenders))
        )


def wrap(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="The command, after all options")],
    stage: Annotated[str, typer.Option("--stage", help="Stage this command is, for example env")] = "",
    attr: Annotated[list[str] | None, typer.Option("--attr", help="NAME=VALUE, kept with the span")] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Its Python programs record their stages themselves: import, ... first_step")
    ] = False,
    events: Annotated[Path | None, typer.Option("--events", help="Events file; default: $BOOTSEER_EVENTS")] = None,
) -> None:
    """Run a command inside a span, or with --auto what it is made of; its exit code, signals and streams stay its own.

    --auto takes programs that nobody changed: import, dist_init, checkpoint_load, ... and first_step are recorded.

    Example: bootseer profile wrap --auto torchrun --nproc-per-node 8 train.py
    """
    from bootseer.profile import auto as hooks
    from bootseer.profile import wrap as wrapper
    from bootseer.profile.events import AttrValue

    if not stage and not auto:
        raise mistake(f"name the stage: bootseer profile wrap --stage env {shlex.join(command)}, or say --auto")
    attrs: dict[str, AttrValue] = {}
    for text in attr or []:
        name, sign, value = text.partition("=")
        if not name or not sign:
            raise ConfigError(f"--attr {text!r} is not NAME=VALUE")
        attrs[name] = int(value) if value.isdecimal() and value.isascii() and len(value) < 16 else value
    if given := str(events or os.environ.get("BOOTSEER_EVENTS") or ""):
        os.environ["BOOTSEER_EVENTS"] = os.path.abspath(given)
        if auto:
            os.environ.update(hooks.variables(os.environ.get("PYTHONPATH", "")))
    elif auto:
        log.warning("no events file is named (--events, BOOTSEER_EVENTS): nothing is recorded")
    if not stage:
        wrapper.become(command)
    sys.exit(wrapper.leave(wrapper.run(stage, command, attrs)))


def export(
    events: Events = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; - is stdout")] = Path("-"),
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="chrome (trace for ui.perfetto.dev), html (one page, one start-up), otlp, prometheus, or parquet (one "
            "row for each start-up)",
            autocompletion=values(*_FORMATS, "parquet"),
        ),
    ] = "chrome",
    job: JobName = None,
    attempt: Attempt = None,
    cycle: Cycle = None,
    to: Annotated[
        str, typer.Option("--to", metavar="URL", help="Send the events to a `profile serve`: http://HOST:PORT/events")
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="With --to: file with the server's token")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="With --to: gives up after so many seconds")
    ] = 60.0,
) -> None:
    """Write the spans in another program's format: every start-up, or the one chosen. With --to send them as they are.

    What is sent again changes nothing. Of nodes that share no folder, each sends its file at the end of the job.

    Example: bootseer profile export /shared/jobs --format parquet -o /shared/starts/2026-11.parquet

    Example: bootseer profile export events.jsonl --to https://monitor/events --token-file token
    """
    import msgspec

    from bootseer.profile import chrome, otlp, page, prometheus, send, starts
    from bootseer.profile.emit import redact
    from bootseer.stripefs.localcopy import replaced

    if to:
        token = token_in(token_file)
        if token and _plain(to):
            raise ConfigError(
                f"the token would go to {one_line(to)} without TLS: whoever is on the way can read it",
                hint="use https://, or name HOST:PORT as plain_http in the settings",
            )
        count = send.send(given_paths(events), to, token, timeout=timeout)
        typer.echo(f"{redact('', to)}: {size_text(count)}", err=True)
        return
    if form == "parquet":
        if str(output) == "-" or any(part is not None for part in (job, attempt, cycle)):
            raise typer.BadParameter("parquet is for every start-up, in a file: name it with -o")
        document, count = starts.compact(given_paths(events))
        with replaced(output) as file:
            file.write(document)
        typer.echo(f"{output}: {count_text(count, 'start-up', 'start-ups')}", err=True)
        return
    if form not in _FORMATS:
        raise ConfigError(f"export format {form!r} is not known", hint="use chrome, html, otlp, prometheus or parquet")
    held = _read(events)
    named = any(part is not None for part in (job, attempt, cycle))
    picked = _choose(held, job, attempt, cycle, False)[0] if named else None
    if form == "chrome":
        document = msgspec.json.encode(chrome.export(held, picked)) + b"\n"
    elif form == "otlp":
        document = msgspec.json.encode(otlp.export(held, picked)) + b"\n"
    elif form == "html":
        document = page.html(held, picked, now=time.time_ns()).encode()
    else:
        document = prometheus.text(starts.of(held, picked)).encode()
    write_out([document], output)


def _plain(url: str) -> bool:
    """Whether what is sent there leaves this machine without TLS, to where the settings do not say so."""
    from urllib.parse import urlsplit

    from bootseer.oci.reference import is_loopback

    try:
        parts = urlsplit(url)
        there = is_loopback(parts.hostname or "") or parts.netloc in settings().plain_http
        return parts.scheme == "http" and not there
    except ValueError:
        return False


def _nodes(given: str | None) -> tuple[int | None, list[str]]:
    """How many nodes the job has, and which, as far as ``--nodes`` says it."""
    from bootseer.profile import hostlist

    if given is None:
        return None, []
    if given.isdecimal() and given.isascii() and 0 < len(given) < 8:
        names: list[str] = []
        count = int(given)
    else:
        names = understood(hostlist.expand)(given)
        count = len(names)
    if not count:
        raise typer.BadParameter("--nodes names no node")
    return count, names


def _read(paths: list[Path] | None) -> EventLog:
    from bootseer.profile import events as event_files

    return event_files.read(given_paths(paths))


def _choose(log: EventLog, job: str | None, attempt: str | None, cycle: int | None, every: bool) -> list[Identity]:
    from bootseer.errors import NotFoundError
    from bootseer.profile import events as event_files

    known = log.identities()
    attempt = attempt and event_files.attempt_name(attempt)
    found = [
        identity
        for identity in known
        if all(want is None or want == have for want, have in zip((job, attempt, cycle), identity, strict=True))
    ]
    if not found:
        there = "; ".join(event_files.identity_text(*identity) for identity in known[-5:])
        raise NotFoundError("no such start-up in the events", hint=f"there are: {there}" if there else "there is none")
    return found if every else found[-1:]


add_verbs(
    app,
    {
        "Show": (show, fleet, growth, check, serve),
        "Record and bring in": (wrap, import_),
        "Hand on": (export,),
    },
)
