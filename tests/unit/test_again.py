"""A failed test is run once more, alone."""

import json

import pytest

from support import again


@pytest.fixture
def failed(tmp_path):
    """Writes down failures of tests in a file that has one test which passes and one which does not."""
    (tmp_path / "test_it.py").write_text("def test_fine():\n    pass\n\n\ndef test_broken():\n    assert False\n")

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


def test_many_failures_are_no_accident(failed, capfd):
    assert failed(*(f"test_fine[{number}]" for number in range(6))) == 1
    assert "too many" in capfd.readouterr().out
