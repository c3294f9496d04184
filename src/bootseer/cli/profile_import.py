"""``bootseer profile import``: start-up events from what other programs wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.errors import ConfigError, DataError, doing

if TYPE_CHECKING:
    from collections.abc import Iterator


def register(app: typer.Typer) -> None:
    app.command("import")(import_)


def import_(
    log: Annotated[
        list[Path],
        typer.Option(
            "--log", metavar="FILE", help="Log of torchrun, Megatron-LM, NeMo, Lightning or HF's Trainer; - is stdin"
        ),
    ],
    job: Annotated[str, typer.Option("--job", help="Name of the job; default: the first log's name")] = "",
    attempt: Annotated[str, typer.Option("--attempt", help="Which attempt of the job this is")] = "0",
    node: Annotated[str, typer.Option("--node", help="Node of lines that name none; default: the log's name")] = "",
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="GPUs of each node")] = 0,
    patterns: Annotated[
        Path | None, typer.Option("--patterns", metavar="FILE", help="Patterns instead of ours")
    ] = None,
    utc: Annotated[bool, typer.Option("--utc", help="Times that name no zone are UTC; default: local time")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Events file to write; - is stdout")] = Path("-"),
) -> None:
    """Read a start-up from logs, for code that nobody can change: the lines say when each stage began.

    Times come from the lines: use `kubectl logs --timestamps --prefix`, or a log format with the time.

    Example: bootseer profile import --log node1.log --log node2.log --gpus 8 -o llm.jsonl
    """
    import datetime

    import msgspec

    from bootseer.profile import logs

    known = logs.patterns(patterns)
    zone = datetime.UTC if utc else None
    events, timeless = [], 0
    names = ["stdin" if str(file) == "-" else file.name.removesuffix(".log") for file in log]
    for file, name in zip(log, names, strict=True):
        found = logs.extract(
            _lines(file), known, job=job or names[0], node=node or name, gpus=gpus, attempt=attempt, year=_year(file),
            zone=zone,
        )  # fmt: skip
        events += found.events
        timeless += found.timeless
    hint = "have each line begin with its time: kubectl logs --timestamps, or the program's own log format"
    if not events:
        lines = f"{timeless} lines that are known carry no time" if timeless else "no line is known"
        raise DataError(
            f"no start-up in {', '.join(map(str, log))}: {lines}", hint=hint if timeless else "see --patterns"
        )
    if timeless:
        typer.echo(f"{timeless} lines that are known carry no time and were left out; {hint}", err=True)
    document = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
    if str(output) == "-":
        sys.stdout.buffer.write(document)
        return
    if output.suffix != ".jsonl":
        raise ConfigError(f"events file {output} does not end in .jsonl", hint="other files in a folder are not read")
    with doing(f"write {output}"):
        output.write_bytes(document)


def _lines(file: Path) -> Iterator[str]:
    if str(file) == "-":
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        yield from sys.stdin
        return
    with doing(f"read {file}"), file.open(errors="replace") as lines:
        yield from lines


def _year(file: Path) -> int | None:
    """That of the last change, for times that name no year."""
    import datetime

    if str(file) == "-":
        return None
    with doing(f"read {file}"):
        return datetime.datetime.fromtimestamp(file.stat().st_mtime).year
