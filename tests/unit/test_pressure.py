"""What the kernel counts of waiting for a processor; a kernel that counts nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.kernel import pressure


@pytest.mark.skipif(not Path("/proc/pressure/cpu").exists(), reason="this kernel counts no pressure")
def test_more_processes_than_processors_wait_for_one() -> None:
    before = pressure.totals()
    assert set(before) == {"cpu_pressure_seconds", "io_pressure_seconds", "memory_pressure_seconds"}
    program = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4 * (os.cpu_count() or 1))]
    assert [process.wait(60) for process in busy] == [0] * len(busy)
    after = pressure.since(before)
    assert after["cpu_pressure_seconds"] > 0.5
    assert set(after) == set(before)


def test_a_kernel_that_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of it, one of them only, or something else than numbers."""
    monkeypatch.setattr(pressure, "_FILES", {"a": str(tmp_path / "a"), "b": str(tmp_path / "b"), "c": str(tmp_path)})
    assert pressure.totals() == {}
    (tmp_path / "a").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 total=1\n")
    (tmp_path / "b").write_text("")
    assert pressure.totals() == {"a": 1.5}
    assert pressure.since({}) == {}
    assert pressure.since({"a": 0.25, "b": 9.0}) == {"a": 1.25}
