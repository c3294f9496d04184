"""``bootseer profile serve``, two start-ups beside each other, and the token of a server."""

from __future__ import annotations

import logging
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import print_json, print_whole
from bootseer.cli.profile_fleet import Paths, given_paths
from bootseer.errors import ConfigError, NotFoundError, doing, extra
from bootseer.loglimit import LogRateLimit
from bootseer.wiretypes import document

if TYPE_CHECKING:
    from bootseer.profile.events import EventLog


def serve(
    paths: Paths = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen at; 0: any free one")] = 8742,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Ask for the token in this file; not needed at loopback"),
    ] = None,
    receive: Annotated[
        Path | None,
        typer.Option(
            "--receive",
            metavar="DIR",
            help="Take events of `profile export --to` into this folder; needs a token",
        ),
    ] = None,
) -> None:
    """Show start-ups as web pages that follow them while they last: jobs, one job, two compared, the fleet.

    Each page is there as .json and .csv, too. Ends with Ctrl-C.

    Example: bootseer profile serve /shared/jobs
    """
    with extra("serve", "profile serve"):
        import uvicorn

        from bootseer.profile.web import access, app, connection
    from bootseer.profile.index import Index

    token = token_in(token_file)
    if not token and (receive is not None or not access.loopback(host)):
        what = "to receive events" if receive is not None else f"for pages at {host}, which others can reach,"
        raise ConfigError(
            f"{what} a token is needed",
            hint="python -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE; --token-file FILE",
        )
    shown = given_paths(paths) if paths or receive is None else []
    if receive is not None:
        shown.append(receive)
    with doing("receive events"):
        if receive is not None:
            receive.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in shown:
        if not path.exists():
            raise NotFoundError(f"no file or folder {path}")
    index = Index(shown)
    config = uvicorn.Config(
        app.make(index, access.Access(token), receive),
        http=connection.Connection,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        limit_concurrency=_connections(),
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with doing(f"listen at {host} port {port}"):
        listener = socket.create_server((host, port), family=family)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRateLimit())  # whoever reaches the port makes a line by each bad request
    with listener:
        name = f"[{host}]" if ":" in host else host
        typer.echo(f"start-ups at http://{name}:{listener.getsockname()[1]}/", err=True)
        uvicorn.Server(config).run(sockets=[listener])


def _connections() -> int:
    """How many there may be, so that descriptors are left for the files; others are told to come back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        soft = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(64, min(soft, 65_536) - 256) if soft != resource.RLIM_INFINITY else 65_536


def side_by_side(before: list[Path], after: list[Path], as_json: bool) -> None:
    """The last start-up of ``after`` beside that of ``before``; where these are the same, beside the one before it."""
    from bootseer.profile import analysis, card, events, starts
    from bootseer.profile import compare as comparison
    from bootseer.profile.events import identity_text

    logs = [events.read(before), events.read(after)]
    chosen = [log.identities()[-1] for log in logs]
    if before == after:
        chosen[0] = _earlier(logs[0])
    if as_json:
        first, second = (next(starts.of(log.by_identity()[one], one)) for log, one in zip(logs, chosen, strict=True))
        print_json(comparison.rows(first, second))
        return
    reports = [analysis.analyse(log.by_identity()[one], one) for log, one in zip(logs, chosen, strict=True)]
    titles = [identity_text(*one) for one in chosen]
    print_whole(card.render_side_by_side(list(zip(titles, reports, strict=True))))


def _earlier(log: EventLog) -> tuple[str, str, int]:
    """The last start-up of the same job before the last one."""
    known = log.identities()
    same = [one for one in known[:-1] if one[0] == known[-1][0]]
    if not same:
        raise NotFoundError(
            "there is only one start-up of this job in the events", hint="name the events of another one as well"
        )
    return same[-1]


def token_in(file: Path | None) -> str:
    if file is None:
        return ""
    with doing(f"read {file}"):
        text = document(file)
    try:
        token = text.decode().strip()
    except UnicodeDecodeError:
        raise ConfigError(f"the token in {file} is no text") from None
    if len(token) < 16:
        raise ConfigError(f"the token in {file} is shorter than 16 characters")
    return token
