"""Runs each failed test once more, alone: a machine that was busy fails no run, and a bug fails twice.

    python -m support.again FAILURES [PYTEST ARGUMENTS]

FAILURES is what tests/conftest.py wrote: a line of JSON for each failure, ``[test, what it said]``. Exit code 0 when
all pass now; each of them is then named, with its first failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path

MODULES, TESTS = 5, 20
"""Of failures in more modules, or of more tests, something else than the load of the machine is the reason.

Tests of one module share a server: when it does not answer in time, all of them fail.
"""


def failures(path: Path) -> dict[str, str]:
    """What each failed test said first, by its name."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, said = json.loads(line)
        found.setdefault(name, said)
    return found


def main(path: Path, arguments: Sequence[str]) -> int:
    failed = failures(path)
    if len(failed) > TESTS or len({name.partition("::")[0] for name in failed}) > MODULES:
        print(f"{len(failed)} tests failed, too many to run again:", *failed, sep="\n  ")
        return 1
    code = 0
    for name, said in failed.items():
        with tempfile.NamedTemporaryFile() as told:
            argv = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={told.name}", name]
            bad = subprocess.run(argv, check=False).returncode
            ran = bad or any(case.find("skipped") is None for case in xml.parse(told.name).iter("testcase"))
        if bad or not ran:
            print(f"{'failed twice' if bad else 'failed, then skipped'}: {name}", flush=True)
            code = 1
        else:
            print(f"{said}\nflaky: {name} failed once, passed alone", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
