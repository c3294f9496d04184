"""Lines that repeat themselves are left out, and counted."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer import loglimit
from bootseer.loglimit import LogRateLimit, OneLine


def line(text: str, *args: object, level: int = logging.WARNING, user: object = None) -> logging.LogRecord:
    record = logging.LogRecord("a", level, "", 0, text, args, None)
    record.__dict__[loglimit.USER] = user
    return record


def test_words_of_others_do_nothing_in_a_traceback_either() -> None:
    try:
        raise ValueError("no \x1b[2J\n2026-01-01 INFO all is well")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "a \r request failed", (), sys.exc_info())
    first, *traceback = OneLine("%(levelname)s %(message)s").format(record).splitlines()
    assert first == "ERROR a \\r request failed"
    assert all(each.startswith("  ") and each.isprintable() for each in traceback), traceback
    assert traceback[-2:] == ["  ValueError: no \\x1b[2J", "  2026-01-01 INFO all is well"]


def test_most_lines_of_a_kind_pass_then_none_then_one_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(loglimit.time, "monotonic", lambda: now[0])
    few = LogRateLimit(3, 10.0)
    assert [few.filter(line("block %d", number)) for number in range(5)] == [True] * 3 + [False] * 2
    assert few.filter(line("block %d", 1, level=logging.ERROR))
    assert few.filter(line("another"))
    now[0] += 10.0
    record = line("block %d", 7)
    assert few.filter(record)
    assert record.getMessage() == "block 7 (and 2 such lines before it, left out)"
    record = line("another")
    assert few.filter(record)
    assert record.getMessage() == "another"


def test_each_user_has_lines_and_what_was_left_out_is_told_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(loglimit.time, "monotonic", lambda: now[0])
    few = LogRateLimit(3, 10.0)
    assert sum(few.filter(line("failed: %d", number, user=65534)) for number in range(300)) == 3
    assert sum(few.filter(line("failed: %d", number, user="user 7")) for number in range(4)) == 3
    assert few.filter(line("failed: %d", 1, user=1))
    now[0] += 9.0
    assert not few.filter(line("failed: %d", 1, user=65534))
    now[0] += 1.0
    record = line("failed: %d", 9, user=65534)
    assert few.filter(record)
    assert record.getMessage() == (
        "failed: 9 (and 298 such lines of user 65534 before it, left out; left out: 1 lines of user 7 as 'failed: %d')"
    )
    assert few.filter(again := line("failed: %d", 9, user=65534))
    assert again.getMessage() == "failed: 9"


def test_what_is_counted_is_bounded() -> None:
    few = LogRateLimit(3, 1000.0)
    for number in range(5000):
        assert few.filter(line("failed", user=number))
    assert sum(few.filter(line("failed", user=0)) for _ in range(9)) == 3


def test_a_log_that_two_processes_write_has_an_upper_size(tmp_path: Path) -> None:
    program = (
        "import logging, sys; from bootseer.loglimit import LogSizeLimit; logging.basicConfig(format='%(message)s');"
        "logging.getLogger().handlers[0].addFilter(LogSizeLimit(10_000));"
        "[logging.warning('%s %d %s', sys.argv[1], n, 'x' * 50) for n in range(2000)]"
    )
    path = tmp_path / "server.log"
    with path.open("ab") as log:
        for one in [subprocess.Popen([sys.executable, "-c", program, name], stderr=log) for name in "ab"]:
            assert one.wait(60) == 0
    assert path.stat().st_size < 11_000
    assert 0 < (tmp_path / "server.log.old").stat().st_size < 11_000
    assert sorted(os.listdir(tmp_path)) == ["server.log", "server.log.old"]
    assert all(len(line.split()) == 3 for line in path.read_text().splitlines()[1:])
    assert re.search(r"^[ab] 1999 x{50}$", path.read_text(), re.M)


@pytest.mark.parametrize(
    "code",
    [
        "from bootseer import loglimit; loglimit.to_stderr(); logging.error('%s', said)",
        "from bootseer.slurm import hooks, jobfolder; jobfolder.BASE = pathlib.Path(sys.argv[1])\n"
        "os.environ['SLURM_JOB_ID'] = said; hooks.main(['epilog', '60', '0'])",
    ],
    ids=["server", "hook"],
)
def test_what_others_wrote_begins_no_line_and_moves_no_cursor(tmp_path: Path, code: str) -> None:
    """Red before: root's logs had it as it was."""
    code = f"import logging, os, pathlib, sys; said = 'a\\nERROR b\\x1b[2J'; {code}"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, timeout=60
    )
    text = done.stderr + "".join(path.read_text() for path in tmp_path.iterdir())
    assert (text.count("\n"), "a\\nERROR b\\x1b[2J" in text) == (1, True), text
