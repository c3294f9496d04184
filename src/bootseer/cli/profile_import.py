"""``bootseer profile import``: start-up events from what other programs wrote."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import write_out
from bootseer.errors import DataError, doing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bootseer.profile.logs import Pattern

log = logging.getLogger(__name__)

_LOG = "Log of torchrun, Megatron-LM, NeMo, Lightning or HF's Trainer; - is stdin"
_PODS = "What kubectl get pods,events -o json printed; - is stdin"
_SACCT = "What sacct -D --json printed (Slurm 21.08 or newer); - is stdin"


def import_(
    logs: Annotated[list[Path] | None, typer.Option("--log", metavar="FILE", help=_LOG)] = None,
    sacct: Annotated[Path | None, typer.Option("--sacct", metavar="FILE", help=_SACCT)] = None,
    kubernetes: Annotated[Path | None, typer.Option("--kubernetes", metavar="FILE", help=_PODS)] = None,
    job: Annotated[str, typer.Option("--job", help="Name of the job (default: Slurm's, or the first log's name)")] = "",
    attempt: Annotated[str, typer.Option("--attempt", help="Which attempt of the job the logs are of")] = "0",
    node: Annotated[str, typer.Option("--node", help="Node of lines that name none (default: the log's name)")] = "",
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="GPUs of each node in the logs")] = 0,
    patterns: Annotated[
        Path | None, typer.Option("--patterns", metavar="FILE", help="Patterns instead of ours")
    ] = None,
    utc: Annotated[bool, typer.Option("--utc", help="Times of logs that name no zone are UTC, not local time")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Events file to write; - is stdout")] = Path("-"),
) -> None:
    """Write events of what others know of a start: its logs, Slurm's accounting (queue, alloc), or Kubernetes' pods
    (queue, alloc, image, and init containers as env).

    Logs are for code that nobody can change. Their lines must carry a time: `kubectl logs --timestamps --prefix`, or a
    log format with the time.

    Example: bootseer profile import --log node1.log --log node2.log --gpus 8 -o llm.jsonl

    Example: sacct -D --json -j 48211 | bootseer profile import --sacct - -o events/sacct.jsonl

    Example: kubectl get pods,events -o json | bootseer profile import --kubernetes - -o events/pods.jsonl
    """
    from bootseer.profile.logs import patterns as known

    if (logs or None, sacct, kubernetes).count(None) != 2:
        raise typer.BadParameter("name one kind of input", param_hint="--log, --sacct, --kubernetes")
    if sacct is not None:
        lines = _of_sacct(sacct, job)
    elif kubernetes is not None:
        from bootseer.profile import kubernetes as pods

        lines = pods.events(_text(kubernetes), job)
    else:
        lines = _of_logs(logs or [], known(patterns), job=job, attempt=attempt, node=node, gpus=gpus, utc=utc)
    write_out(lines, output)


def _of_sacct(file: Path, job: str) -> Iterator[bytes]:
    from bootseer.profile import sacct as accounting

    found = accounting.read(_text(file))
    if found.bad:
        log.warning("%d records of sacct were not understood; the first: %s", len(found.bad), found.bad[0])
    return accounting.events(found.attempts, job)


def _text(file: Path) -> bytes:
    with doing(f"read {file}"):
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()


def _of_logs(
    files: Sequence[Path], known: Sequence[Pattern], *, job: str, attempt: str, node: str, gpus: int, utc: bool
) -> Iterator[bytes]:
    import datetime

    import msgspec

    from bootseer.profile.logs import extract

    zone = datetime.UTC if utc else None
    events, timeless = [], 0
    names = ["stdin" if str(file) == "-" else file.name.removesuffix(".log") for file in files]
    for file, name in zip(files, names, strict=True):
        found = extract(
            _lines(file), known, job=job or names[0], node=node or name, gpus=gpus, attempt=attempt, year=_year(file),
            zone=zone,
        )  # fmt: skip
        events += found.events
        timeless += found.timeless
    hint = "have each line begin with its time: kubectl logs --timestamps, or the program's own log format"
    if not events:
        said = f"{timeless} lines that are known carry no time" if timeless else "no line is known"
        raise DataError(
            f"no start-up in {', '.join(map(str, files))}: {said}", hint=hint if timeless else "see --patterns"
        )
    if timeless:
        log.warning("%d lines that are known carry no time and were left out; %s", timeless, hint)
    return (msgspec.json.encode(event) + b"\n" for event in events)


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
