"""One invocation of a benchmark: what it says, its exit code, its report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import msgspec

from bootseer.demo import report
from bootseer.errors import BootseerError


def say(line: str) -> None:
    """A line of progress."""
    print(f"==> {line}", file=sys.stderr, flush=True)


def main(run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Run a bench; its exit code."""
    try:
        run(options)
    except BootseerError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def document(name: str, options: argparse.Namespace) -> report.Report:
    """A new report of the bench ``name``; or the one that is there, to add to."""
    suffix = "-against" if getattr(options, "against", None) else ""
    made = report.new(f"{name}-quick{suffix}" if options.quick else f"{name}{suffix}")
    if options.append and options.out and options.out.exists():
        old = msgspec.json.decode(options.out.read_bytes(), type=report.Report)
        if (old.name, old.machine) != (made.name, made.machine):
            raise BootseerError(f"{options.out} is of another bench or machine", hint="leave out --append")
        made.runs = old.runs
        made.commit = " ".join(dict.fromkeys([*old.commit.split(), made.commit]))
    return made
