"""A failed test is run once more, alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import again


@pytest.fixture
def failed(tmp_path):
    """Writes down failures of tests in a file that has one test which passes and one which does not."""
    (tmp_path / "test_it.py").write_text(
        "def test_fine():\n    pass\n\n\ndef test_broken():\n    assert False\n"
        "\n\ndef test_skipped():\n    import pytest\n\n    pytest.skip()\n"
    )

    def write(*names):
        lines = [json.dumps([f"{tmp_path}/test_it.py::{name}", f"first failure of {name}"]) for name in names]
        (tmp_path / "failures").write_text("\n".join(lines))
        return again.main(tmp_path / "failures", ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"])

    return write


def test_what_passes_alone_is_named_and_no_failure(failed, capfd):
    assert failed("test_fine", "test_fine") == 0
    out = capfd.readouterr().out
    assert out.count("test_it.py::test_fine failed once, passed alone") == 1
    assert "first failure of test_fine" in out


def test_what_fails_twice_is_a_failure(failed, capfd):
    assert failed("test_broken", "test_fine") == 1
    assert "failed twice: " in capfd.readouterr().out


def test_what_is_skipped_alone_has_not_passed(failed, capfd):
    assert failed("test_skipped") == 1
    assert "failed, then skipped: " in capfd.readouterr().out


def test_a_module_that_is_not_read_is_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOTSEER_TEST_FAILURES", str(tmp_path / "failures"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "test_it.py").write_text("raise ImportError\n")
    argv = [sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", "-p", "conftest"]
    root = Path(__file__).parents[1]
    done = subprocess.run([*argv, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(root)}, check=False)
    assert done.returncode == 2
    assert list(again.failures(tmp_path / "failures")) == ["test_it.py"]


def test_many_failures_are_no_accident(failed, capfd):
    assert failed(*(f"test_fine[{number}]" for number in range(21))) == 1
    assert "too many" in capfd.readouterr().out


def test_failures_of_many_modules_are_no_accident(tmp_path, capfd):
    lines = [json.dumps([f"{tmp_path}/test_{number}.py::test", "failure"]) for number in range(6)]
    (tmp_path / "failures").write_text("\n".join(lines))
    assert again.main(tmp_path / "failures", ["-q"]) == 1
    assert "too many" in capfd.readouterr().out
