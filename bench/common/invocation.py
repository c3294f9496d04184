"""One invocation of a benchmark: its options, what it says, its report, its exit code."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.common import report
from bench.common.figures import Figures, Say
from bootseer.errors import BootseerError, ConfigError

Options = argparse.Namespace
_began = time.monotonic()


def say(line: str) -> None:
    """A line of progress, with the seconds since the start."""
    print(f"{time.monotonic() - _began:4.0f} s  {line}", file=sys.stderr, flush=True)


def parser(
    name: str, doc: str | None, *, quick: str, runs: tuple[int, int], append: bool = False, work: bool = False
) -> argparse.ArgumentParser:
    """The options that benchmarks have in common. ``quick``: what ``--quick`` makes smaller; ``runs``: how many there
    are of each variant, usually and then; ``append``: whether runs may be added to a report; ``work``: it needs a
    folder, which is ``options.work``."""
    text = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=f"scripts/bench {name}", description=doc, formatter_class=text)
    made.set_defaults(name=name, usual=runs, append=False)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--runs", type=int, help=f"of each variant (default {runs[0]}, quick {runs[1]})")
    if append:
        made.add_argument("--append", action="store_true", help="add to the runs of the report that is there")
    if work:
        made.add_argument(
            "--work", type=Path, default=Path("/var/tmp"), help="where its files go (default %(default)s)"
        )
    made.add_argument("--out", type=Path, metavar="FILE", help="write the report (JSON) there")
    return made


def carry_out(
    parser: argparse.ArgumentParser,
    run: Callable[[Options, report.Report], None],
    compute: Callable[[report.Report, Say], Figures],
) -> int:
    """Run a benchmark, compute the figures of its report, also when it failed on the way; its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = parser.parse_args()
    options.runs = options.runs or options.usual[options.quick]
    with tempfile.TemporaryDirectory(
        prefix=f"bench-{options.name}-", dir=getattr(options, "work", None), ignore_cleanup_errors=True
    ) as folder:
        options.work = Path(folder)
        try:
            made = _document(options)
            try:
                run(options, made)
            finally:
                if made.runs:
                    compute(made, say).show()
                    if options.out:
                        made.write(options.out)
        except BootseerError as exc:
            print(f"error: {exc}", file=sys.stderr)
            return exc.exit_code
        except KeyboardInterrupt:
            return 130
    return 0


def _document(options: Options) -> report.Report:
    """A new report; or the one that is there, to add to."""
    suffix = ("-quick" if options.quick else "") + ("-against" if getattr(options, "against", None) else "")
    made = report.new(f"{options.name}{suffix}")
    if options.append and options.out and options.out.exists():
        old = msgspec.json.decode(options.out.read_bytes(), type=report.Report)
        if (old.name, old.machine) != (made.name, made.machine):
            raise BootseerError(f"{options.out} is of another bench or machine", hint="leave out --append")
        made.runs = old.runs
        made.commit = " ".join(dict.fromkeys([*old.commit.split(), made.commit]))
    return made


def chosen(given: str, known: Sequence[str]) -> list[str]:
    """Those of ``known`` that a comma-separated list names, in the order of ``known``; empty: all. A trailing ``*``
    stands for any ending. Raises `ConfigError`."""
    patterns = given.split(",") if given else ["*"]
    found = []
    for pattern in patterns:
        some = [n for n in known if n == pattern or (pattern.endswith("*") and n.startswith(pattern[:-1]))]
        if not some:
            raise ConfigError(f"there is no {pattern}", hint=f"there are: {', '.join(known)}")
        found += some
    return [name for name in known if name in found]
