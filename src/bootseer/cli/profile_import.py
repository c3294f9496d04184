"""``bootseer profile import``: start-up events from what other programs wrote."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import write_out
from bootseer.errors import DataError, doing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from datetime import datetime
    from typing import IO

    from bootseer.profile.logs import Pattern

log = logging.getLogger(__name__)

_MOST = 1 << 30
"""Bytes of what a program told of all that it knows."""
_LOG = "Log of a training program that the patterns know, such as HF's Trainer or Megatron-LM; - is stdin"
_TORCHRUN = re.compile(r"(?P<run>[^/]+)/attempt_(?P<cycle>\d{1,6})/(?P<rank>\d{1,9})/(?:stdout|stderr)\.log$")
_PROCESS = re.compile(
    r"(?:^|/)(?P<run>workerlog|std_log_process|(?:[^/]*[_.-])?(?<!node[_.-])(?<!host[_.-])(?<!machine[_.-])rank)"
    r"[._-]?(?P<rank>\d{1,9})(?:/std(?:out|err)|\.[a-z]+)?$"
)
"""Logs of single processes, as Paddle, Azure and Open MPI name them, or the rank is in the name, if not of a node."""
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
    ranks_per_node: Annotated[
        int,
        typer.Option("--ranks-per-node", min=0, help="Ranks of a node, where a log is of several (default: --gpus)"),
    ] = 0,
    patterns: Annotated[
        Path | None, typer.Option("--patterns", metavar="FILE", help="Patterns instead of ours")
    ] = None,
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
        lines = _of_logs(
            logs or [], known(patterns), node, job=job, attempt=attempt, gpus=gpus,
            ranks_per_node=ranks_per_node or gpus,
        )  # fmt: skip
    write_out(lines, output)


def _of_sacct(file: Path, job: str) -> Iterator[bytes]:
    from bootseer.profile import sacct as accounting

    found = accounting.read(_text(file))
    if found.bad:
        log.warning("%d records of sacct were not understood; the first: %s", len(found.bad), found.bad[0])
    return accounting.events(found.attempts, job)


def _text(file: Path) -> bytes:
    with doing(f"read {file}"), _opened(file) as opened:
        text = opened.read(_MOST + 1)
    if len(text) > _MOST:
        raise DataError(f"{file} has more than {_MOST >> 30} GiB", hint="name fewer jobs, or a shorter time")
    return text


def _opened(file: Path) -> AbstractContextManager[IO[bytes]]:
    """Nobody waits for who might write to a pipe."""
    if str(file) == "-":
        return nullcontext(sys.stdin.buffer)
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return os.fdopen(fd, "rb")


def _of_logs(
    files: Sequence[Path], known: Sequence[Pattern], node: str, *, job: str, attempt: str, gpus: int,
    ranks_per_node: int,
) -> Iterator[bytes]:  # fmt: skip
    import msgspec

    from bootseer.profile.logs import Source, extract

    sources = []
    for file, name in zip(files, _names(files), strict=True):
        path = str(file.absolute())
        of = _TORCHRUN.search(path)
        one = of or _PROCESS.search(path)
        sources.append(
            Source(
                _lines(file), node or (of["run"] if of else name), rank=int(one["rank"]) if one else None,
                cycle=int(of["cycle"]) if of else 0, path="" if str(file) == "-" else os.path.realpath(file),
                written=_written(file),
            )
        )  # fmt: skip
    found = extract(
        sources, known, job=job or sources[0].node, attempt=attempt, gpus=gpus, ranks_per_node=ranks_per_node
    )
    hint = "have each line begin with its time: kubectl logs --timestamps, or the program's own log format"
    if not found.events:
        said = f"{found.timeless} lines that are known carry no time" if found.timeless else "no line is known"
        raise DataError(
            f"no start-up in {', '.join(map(str, files))}: {said}", hint=hint if found.timeless else "see --patterns"
        )
    if found.timeless:
        log.warning("%d lines that are known carry no time and were left out; %s", found.timeless, hint)
    if found.divided:
        log.warning("%s: taken as nodes of %d ranks (--ranks-per-node)", ", ".join(found.divided), ranks_per_node)
    elif found.most_ranks > 8:
        log.warning("%d ranks count as one node; --ranks-per-node tells its nodes apart", found.most_ranks)
    if found.steps:
        log.warning("first_step is of up to %d steps: the log says nothing of single ones", found.steps)
    return (msgspec.json.encode(event) + b"\n" for event in found.events)


def _names(files: Sequence[Path]) -> list[str]:
    """A name of a node for each log: its own, or where several have one name what tells their folders apart."""
    places = []
    for file in files:
        place = file.absolute()
        if of := _PROCESS.search(str(place)):  # those of one folder are of one node
            place = Path(str(place)[: of.start()]) / (of["run"].removesuffix("rank").rstrip("_.-") or "rank")
        places.append(place)
    names = [
        "stdin" if str(file) == "-" else place.name.removesuffix(".log")
        for file, place in zip(files, places, strict=True)
    ]
    if len(set(names)) == len(set(places)):
        return names
    parts = [place.parts for place in places]
    first = next((at for at, found in enumerate(zip(*parts, strict=False)) if len(set(found)) > 1), 0)
    return ["/".join(mine[first:-1]) or name for mine, name in zip(parts, names, strict=True)]


def _lines(file: Path) -> Iterator[str]:
    from bootseer.profile import loglines

    with doing(f"read {file}"), _opened(file) as opened:
        yield from loglines.read(opened)  # type: ignore[arg-type]


def _written(file: Path) -> datetime | None:
    from datetime import UTC, datetime

    if str(file) == "-":
        return None
    with doing(f"read {file}"):
        return datetime.fromtimestamp(file.stat().st_mtime, UTC)
