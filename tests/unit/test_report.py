import json

import pytest

from bench.common import report
from bootseer.errors import NotFoundError


def test_the_document(tmp_path):
    made = report.new("x")
    made.runs.append(report.Run(variant="a", n=1, seconds=1.5, bytes={"link": 3}))
    made.runs.append(report.Run(variant="nydus", n=0, failed="nydusd is not installed"))
    made.figure("a_vs_b", 0.5, unit="ratio", target="<= 0.6", n=5, of="median")
    made.figure("same", True, unit="bool", target="== 1", n=1, of="single")
    made.figure("gain", 0.5, unit="ratio", target=">= 0.6", n=5, of="median")
    made.write(tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["schema"] == 1
    assert found["machine"]["cores"] >= 1
    assert found["runs"][1]["failed"]
    assert [f["met"] for f in found["figures"]] == [True, True, False]


def test_a_target_must_be_checkable():
    with pytest.raises(ValueError, match="fast"):
        report.new("x").figure("a", 1.0, unit="s", target="fast", n=1, of="single")


def test_a_report_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(NotFoundError, match="gone"):
        report.new("x").write(tmp_path / "gone" / "r.json")
