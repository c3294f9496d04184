"""Shell scripts of the repository: what they share."""

from __future__ import annotations

import subprocess
from pathlib import Path

COMMON = Path(__file__).parents[2] / "scripts/_common.sh"


def test_a_look_at_the_disk_changes_no_variable_of_its_caller(tmp_path: Path) -> None:
    """`scripts/test --clients` emptied the repository: its ``place`` was the last folder that was looked at."""
    script = f"ROOT={tmp_path}; CACHE={tmp_path}; place=my; free=my; need_disk 0; echo $place $free; need_disk 99999"
    command = ["sh", "-c", f". {COMMON}; {script}", COMMON.parent / "test"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (found.stdout, found.returncode) == ("my my\n", 1), found.stderr
