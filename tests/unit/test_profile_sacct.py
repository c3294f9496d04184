"""What Slurm's accounting says: the output of Slurm 22.05, of newer ones as they are documented, and damaged ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, DataError
from bootseer.profile import events, sacct
from bootseer.profile.analysis import analyse

GOLDEN = Path(__file__).parents[1] / "golden/slurm"
JSON = (GOLDEN / "sacct-22.05.json").read_bytes()


def log(text, job=""):
    return events.parse(sacct.events(sacct.read(text).attempts, job))


def test_queue_alloc_and_requeue():
    """A job of two nodes that was requeued, 10 s after its submission in all, and one with a separator in its name."""
    found = log(JSON)
    assert not sacct.read(JSON).bad
    assert set(found.identities()) == {("llama-7b", "1.0.0", 0), ("llama-7b", "1.1.0", 0), ("pipe|name", "2.0", 0)}
    first, again, other = (analyse(found, (job, attempt, 0)) for job, attempt in
                           (("llama-7b", "1.0.0"), ("llama-7b", "1.1.0"), ("pipe|name", "2.0")))  # fmt: skip
    assert [report.queue_seconds for report in (first, again, other)] == [0, 6, 4]
    assert [report.gpus for report in (first, again, other)] == [16, 16, 4]
    assert [node.node for node in again.nodes] == ["n1", "n2"]
    assert (again.stage("alloc").max, again.nodes_expected, again.startup_seconds) == (1, 2, None)
    assert again.nodes[0].stages["alloc"].attrs["restart"] == 1
    assert log(JSON, "mine").identities()[0][0] == "mine"
    twice = events.parse([*sacct.events(sacct.read(JSON).attempts), *sacct.events(sacct.read(JSON).attempts)])
    assert (twice.duplicates, len(twice.spans)) == (found.events, len(found.spans))


def test_it_joins_what_a_start_under_srun_recorded():
    about = b'"span":"aa","stage":"image","job":"llama-7b","attempt":"1.1.0","node":"n1"'
    times = ((b"begin", 1795423229_100000000), (b"end", 1795423239_100000000))
    lines = [b'{"bootseer":2,"ev":"%s",%s,"wall":%d}\n' % (kind, about, wall) for kind, wall in times]
    report = analyse(events.parse([*sacct.events(sacct.read(JSON).attempts), *lines]), ("llama-7b", "1.1.0", 0))
    assert [stage.stage for stage in report.stages] == ["alloc", "image"]
    assert report.elapsed_seconds == pytest.approx(11.1)


def test_newer_json_has_numbers_and_states_of_other_shapes():
    def number(value):
        return {"set": value is not None, "infinite": False, "number": value or 0}

    job = {
        "job_id": 7, "name": "j", "nodes": "n[1-2]", "state": {"current": ["RUNNING", "CONFIGURING"]},
        "time": {"submission": 1795423200, "start": 1795423300, "end": 0},
        "tres": {"allocated": [{"type": "gres", "name": "gpu", "count": 16}]},
        "steps": [{"step": {"id": "7.batch"}, "time": {"start": number(1795423301)}},
                  {"step": {"id": "7.0"}, "time": {"start": number(1795423305)}}],
    }  # fmt: skip
    pending = {"job_id": 8, "nodes": "None assigned", "time": {"submission": number(1795423200), "start": number(None)}}
    found = log(json.dumps({"jobs": [job, pending, 3, {"job_id": 9}]}).encode())
    report = analyse(found, ("j", "7.0.0", 0))
    assert (report.queue_seconds, report.gpus, report.stage("alloc").max) == (100, 16, 5)
    assert [span.state.value for span in found.spans if span.attempt == "8.0"] == ["OPEN"]


def job(number, **more):
    times = {"submission": 100, "start": 110, "end": 900}
    return {"job_id": number, "name": "j", "nodes": "n1", "time": times, **more}


def test_a_batch_script_without_srun_ends_alloc():
    steps = [{"step": {"id": name}, "time": {"start": start}} for name, start in (("5.extern", 110), ("5.batch", 112))]
    assert analyse(log(json.dumps({"jobs": [job(5, steps=steps)]}).encode())).stage("alloc").max == 2


def test_what_is_not_understood_is_counted_and_the_rest_shown():
    bad = [job("x"), job(9, time={"submission": "yesterday", "start": 1}), job(9, nodes="n[1-"), job(9, time={}), 3]
    found = sacct.read(json.dumps({"jobs": [*json.loads(JSON)["jobs"], *bad]}).encode())
    assert (len(found.attempts), len(found.bad)) == (3, 5)
    assert found.bad[0].endswith("'x' is no job")


@pytest.mark.parametrize(
    "text", [b"", b"hello\n", b"{}", b"{", b'{"jobs": 3}', b'{"jobs": [{}]}', b"JobIDRaw|Submit|Start\n5|100|110\n"]
)
def test_what_is_no_output_of_sacct_is_one_line(text):
    with pytest.raises(DataError, match="sacct"):
        sacct.read(text)


@given(data=st.binary(max_size=40), at=st.integers(0, len(JSON)))
def test_no_bytes_make_a_traceback(data, at):
    try:
        found = sacct.read(JSON[:at] + data + JSON[at + len(data) :])
    except BootseerError:
        return
    assert events.parse(sacct.events(found.attempts)).foreign == 0


def test_the_command(tmp_path):
    cli = [sys.executable, "-m", "bootseer.cli.main", "profile", "import", "--sacct"]
    out = tmp_path / "sacct.jsonl"
    text = json.dumps({"jobs": [*json.loads(JSON)["jobs"], 3]}).encode()
    done = subprocess.run([*cli, "-", "-o", str(out)], input=text, capture_output=True, timeout=60, check=True)
    assert done.stderr.count(b"\n") == 1
    assert b"1 records of sacct were not understood; the first: job 4" in done.stderr
    assert len(events.read(out).identities()) == 3
    for path, code in ((tmp_path / "no", 66), (out, 65)):
        done = subprocess.run([*cli, str(path)], capture_output=True, timeout=60, check=False)
        assert (done.returncode, done.stderr.count(b"\n")) == (code, 1)
