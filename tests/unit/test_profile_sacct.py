"""What Slurm's accounting says: the output of Slurm 22.05 and 24.11, of others as they are documented, and damaged."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, DataError
from bootseer.profile import events, sacct
from bootseer.profile.analysis import analyse
from support import forked

GOLDEN = Path(__file__).parents[1] / "golden/slurm"
JSON = (GOLDEN / "sacct-22.05.json").read_bytes()


def log(text, job=""):
    return events.parse(sacct.events(sacct.read(text).attempts, job))


def test_queue_alloc_and_requeue():
    """A job of two nodes that was requeued, 10 s after its submission in all, and one with a separator in its name."""
    found = log(JSON)
    assert not sacct.read(JSON).bad
    assert set(found.identities()) == {("llama-7b", "1.0.0", 0), ("llama-7b", "1.1.0", 0), ("pipe|name", "2.0.0", 0)}
    first, again, other = (analyse(found, (job, attempt, 0)) for job, attempt in
                           (("llama-7b", "1.0.0"), ("llama-7b", "1.1.0"), ("pipe|name", "2.0.0")))  # fmt: skip
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


def test_slurm_24_11():
    found = sacct.read((GOLDEN / "sacct-24.11.json").read_bytes())
    report = analyse(events.parse(sacct.events(found.attempts)), ("train", "1.0.0", 0))
    assert (found.bad, report.queue_seconds, report.stage("alloc").max, report.gpus) == ([], 0, 0, 0)
    assert [node.node for node in report.nodes] == ["n1", "n2", "n3", "n4"]
    assert {node.stages["alloc"].attrs["team"] for node in report.nodes} == {"research"}


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
    assert [span.state.value for span in found.spans if span.attempt == "8.0.0"] == ["OPEN"]


def job(number, **more):
    times = {"submission": 100, "start": 110, "end": 900}
    return {"job_id": number, "name": "j", "nodes": "n1", "time": times, **more}


NUMBERS = ("het", "job_id", "submission", "eligible", "start", "end")


def accounts(*rows, columns="job_id|submission|eligible|start|end|state|nodes|name"):
    """An output of ``sacct --json``, of rows in short; that of a step, such as ``7.0|||130``, follows its job's."""
    jobs = []
    for row in rows:
        at = dict(zip(columns.split("|"), row.split("|"), strict=True))
        if "." in at["job_id"]:
            jobs[-1]["steps"].append({"step": {"id": at["job_id"]}, "time": {"start": int(at["start"])}})
            continue
        at |= {name: int(at[name] or 0) for name in NUMBERS if name in at}
        tres = [{"type": "gres", "name": "gpu", "count": int(at["gpus"])}] if "gpus" in at else []
        times = {name: at[name] for name in NUMBERS[2:] if name in at}
        about = {name: at[name] for name in ("job_id", "nodes", "name", "cluster", "account", "user") if name in at}
        more = {"time": times, "state": {"current": at.get("state")}, "tres": {"allocated": tres}, "steps": []}
        jobs.append(about | more | ({"het": {"job_id": at["het"]}} if "het" in at else {}))
    return json.dumps({"jobs": jobs}).encode()


def told(text):
    """Of each span of an output: attempt, node, stage, and begin and end in s."""
    return [(span.attempt, span.node, span.stage, *(at and at.wall // 10**9 for at in (span.begin, span.end)))
            for span in log(text).spans]  # fmt: skip


PENDING, RUNNING, STEP, DONE = (
    "7|100|100|||PENDING|None assigned|j", "7|100|100|110||RUNNING|n1|j", "7.0|||130|||n1|x",
    "7|100|100|110|900|COMPLETED|n1|j",
)  # fmt: skip
ONCE = [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 130)]
HETEROGENEOUS = [("7.0.0", "slurm", "queue", 100, 110)]
HETEROGENEOUS += [("7.0.0", f"n{n}", "alloc", 110, end) for n, end in ((1, 130), (2, 131), (3, 131), (4, 130))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (accounts("7|100|160|86400", columns="job_id|submission|start|end"), [("7.0.0", "slurm", "queue", 100, 160)]),
        (accounts("7|100|100|||PENDING|None assigned|a"), [("7.0.0", "slurm", "queue", 100, None)]),
        (accounts("7|100|100||150|CANCELLED by 5|(null)|j"), [("7.0.0", "slurm", "queue", 100, 150)]),
        (accounts("7|100|100|110|120|RESIZING|n1|j", "7|100|100|120|900|COMPLETED|n[1-2]|j", "7.0|||130|||n1|x"),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 130)]),
        (accounts("7|100|100|110|120|FAILED|n1|j|a", "7|100|100|110|120|FAILED|n1|j|b",
               columns="job_id|submission|eligible|start|end|state|nodes|name|cluster"),
         [(f"7.0@{c}", *rest) for c in "ab" for rest in (("slurm", "queue", 100, 110), ("n1", "alloc", 110, 120))]),
        (json.dumps({"jobs": [{"job_id": 7, "restart_cnt": 3, "name": "j", "nodes": "n1",
                               "time": {"submission": 100, "start": 110, "end": 120}}]}).encode(),
         [("7.3.0", "slurm", "queue", 100, 110), ("7.3.0", "n1", "alloc", 110, 120)]),
        (json.dumps({"jobs": [{"job_id": 7, "name": "j", "nodes": None, "state": None, "tres": None, "steps": None,
                               "time": {"submission": 100, "start": 110, "end": None}}]}).encode(),
         [("7.0.0", "slurm", "queue", 100, 110)]),
        (accounts("7|100|100|110|120|REQUEUED|n1|j", "7|120||||REQUEUE_HOLD|None assigned|j"),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 120),
          ("7.1.0", "slurm", "queue", 120, None)]),
        (accounts("7|100|100|110|120|RESIZING|n[1-2]|j", "7|100|100|120|130|RESIZING|n1|j",
               "7|100|100|130|900|COMPLETED|n1|j", "7.0|||111|||n1|x"),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 111),
          ("7.0.0", "n2", "alloc", 110, 111)]),
        (accounts("7|100|100||150|REVOKED|None assigned|j"), [("7.0.0", "slurm", "queue", 100, 150)]),
        (accounts("7|100|100|110|105|FAILED|n1|j"),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 110)]),
        (accounts("7|100|100|110|900|COMPLETED|n1|j", "7.interactive|||112|||n1|x", "7.extern|||110|||n1|x"),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 112)]),
        (accounts("8|100|5000|5010||RUNNING|n1|"),
         [("8.0.0", "slurm", "queue", 100, 5010), ("8.0.0", "n1", "alloc", 5010, None)]),
        (json.dumps({"jobs": [job(7, steps=[
            {"step": {"id": {"job_id": 7, "step_id": name}}, "time": {"start": start}}
            for name, start in (("extern", 110), ("batch", 112), ("0", 130), ("1", 500))])]}).encode(),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 130)]),
        (json.dumps({"jobs": [job(7, steps=[{"step": None}, 3,
                                            {"step": {"id": "7.0"}, "time": {"start": 130}}])]}).encode(),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 130)]),
        (accounts("7|100|100|110|900|COMPLETED|n1|j", "7.0+1|||130|||n1|x", "7.1|||500|||n1|x"),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 130)]),
        (json.dumps({"jobs": [job(7, state={"current": ["PENDING", "RESIZING"]}),
                              job(7, time={"submission": 100, "start": 900, "end": 950})]}).encode(),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 950)]),
        (accounts(PENDING, RUNNING, STEP, DONE, STEP), ONCE),
        (accounts(DONE), [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 110)]),
        (accounts(DONE, STEP, RUNNING, STEP, PENDING), ONCE),
        (accounts(PENDING, "7|100|100||150|CANCELLED|None assigned|j"), [("7.0.0", "slurm", "queue", 100, 150)]),
        (accounts(*2 * ("7|100|100|110|120|REQUEUED|n1|j", "7.0|||111|||n1|x", "7|120|120|130||RUNNING|n2|j")),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 111),
          ("7.1.0", "slurm", "queue", 120, 130), ("7.1.0", "n2", "alloc", 130, None)]),
        *((accounts(*2 * ("7|100|100|110|120|RESIZING|n1|j", f"7|{submit}|100|120|900|FAILED|n[1-2]|j")),
           [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 900)]) for submit in (100, 120)),
        (json.dumps({"jobs": [job(7, time={"submission": 100, "start": 110, "end": 0}), job(7)]}).encode(),
         [("7.0.0", "slurm", "queue", 100, 110), ("7.0.0", "n1", "alloc", 110, 900)]),
        (json.dumps({"jobs": [
            job(7 + n, nodes=nodes, het={"job_id": 7, "job_offset": {"set": True, "number": n}}, steps=[
                {"step": {"id": {"job_id": 7 + n, "step_id": step}}, "time": {"start": begun}}
                for step, begun in (("batch", 111), ("0", 130 + n)) if n == 0 or (n, step) == (1, "0")
            ])
            for n, nodes in enumerate(("n1", "n[2-3]", "n4"))]}).encode(), HETEROGENEOUS),
    ],
    ids=["no nodes said", "pending", "cancelled", "resized", "two clusters", "restarts", "nulls", "held again",
         "resized twice", "revoked", "ended before it began", "interactive", "without a name",
         "steps are objects", "odd steps", "step of a het job", "resized, in a list",
         "asked for again while it goes on", "without its steps", "later ones first",
         "pending, then cancelled", "requeued, twice",
         "resized, twice", "resized, twice, with another submission", "twice, running at first", "het job"],
)  # fmt: skip
def test_records_as_they_are(text, expected):
    assert told(text) == expected


@pytest.mark.parametrize(("gpus", "nodes", "expected"), [
    (9, "n[1-2]", {"n1": 5, "n2": 4}), (1, "n[1-2]", {"n1": 1, "n2": 0}), (16, "n[1-2]", {"n1": 8, "n2": 8}),
    (0, "n[1-2]", {"n1": 0, "n2": 0}), (7, "n[1-3]", {"n1": 3, "n2": 2, "n3": 2}),
])  # fmt: skip
def test_all_gpus_of_a_job_are_counted(gpus, nodes, expected):
    row = f"7|100|100|110|900|COMPLETED|{nodes}|j|{gpus}"
    found = log(accounts(row, columns="job_id|submission|eligible|start|end|state|nodes|name|gpus"))
    assert {span.node: span.gpus for span in found.spans if span.stage == "alloc"} == expected
    assert analyse(found).gpus == gpus


def test_a_het_job_is_one_start_of_all_its_nodes():
    columns = "het|job_id|submission|eligible|start|end|state|nodes|name|gpus"
    rows = (f"7|{7 + n}|100|100|110|900|COMPLETED|{nodes}|{'jk'[n]}|{gpus}"
            for n, (nodes, gpus) in enumerate((("n1", 0), ("n[2-3]", 16))))  # fmt: skip
    report = analyse(log(accounts(*rows, columns=columns)), ("j", "7.0.0", 0))
    assert (report.gpus, report.nodes_expected, report.nodes_missing) == (16, 3, 0)
    assert {node.node: node.gpus for node in report.nodes} == {"n1": 0, "n2": 8, "n3": 8}


def test_how_long_a_job_held_nodes_that_changed_is_not_known():
    rows = "7|100|100|110|120|RESIZING|n[1-2]|j", "7|100|100|120|900|COMPLETED|n1|j"
    assert all("run_seconds" not in span.attrs for span in log(accounts(*rows)).spans)
    assert log(accounts("7|100|100|110|900|COMPLETED|n1|j")).spans[-1].attrs["run_seconds"] == 790


@pytest.mark.parametrize("never", [4294967294, 4294967295])
def test_no_value_is_no_time(never):
    times = {"submission": 100, "eligible": never, "start": never, "end": never}
    found = log(json.dumps({"jobs": [job(7, time=times)]}).encode()).spans
    assert [(span.stage, span.end, span.attrs.get("held_seconds")) for span in found] == [("queue", None, None)]


def test_an_odd_step_is_counted_and_its_job_shown():
    found = sacct.read(json.dumps({"jobs": [job(7, steps=[{"step": None}, 3])]}).encode())
    assert (len(found.attempts), len(found.bad)) == (1, 2)


def test_a_state_that_is_null_is_none():
    text = json.dumps({"jobs": [{**job(7), "state": None}]}).encode()
    assert log(text).spans[0].attrs["state"] == ""


def test_held_time_and_team():
    columns = "job_id|submission|eligible|start|end|state|nodes|name|account|user"
    for account, user, team in (("physics", "me", "physics"), ("", "me", "me")):
        queue = log(accounts(f"7|100|400|1300||RUNNING|n1|j|{account}|{user}", columns=columns)).spans[0]
        assert (queue.duration.ns / 1e9, queue.attrs["held_seconds"], queue.attrs["team"]) == (1200, 300, team)


def test_one_node_and_one_attempt_have_one_name():
    """Slurm's n1 is the host n1.example.org, and JOB.RESTART, as a batch script names it, is of its first step."""
    lines = sacct.events(sacct.read(accounts("7|100|100|110|900|RUNNING|n[1-2]|j", "7.0|||130|||n1|x")).attempts)
    own = b'{"bootseer":2,"ev":"begin","span":"%s","stage":"env","job":"j","attempt":"7.0","node":"%s","wall":131}\n'
    found = events.parse([*lines, *(own % (node[:2], node) for node in (b"n1.example.org", b"n2.example.org"))])
    assert found.identities() == [("j", "7.0.0", 0)]
    assert {span.node for span in found.spans} == {"slurm", "n1", "n2"}
    others = {"n1", "n1.a.org", "n1.b.org", "10.0.0.1"}  # whose n1 is meant is not known
    other = events.parse(own % (node[::-1].encode(), node.encode()) for node in others)
    assert {span.node for span in other.spans} == others


def test_a_batch_script_without_srun_ends_alloc():
    steps = [{"step": {"id": name}, "time": {"start": start}} for name, start in (("5.extern", 110), ("5.batch", 112))]
    assert analyse(log(json.dumps({"jobs": [job(5, steps=steps)]}).encode())).stage("alloc").max == 2


def test_what_is_not_understood_is_counted_and_the_rest_shown():
    bad = [job("x"), job(9, time={"submission": "yesterday", "start": 1}), job(9, nodes="n[1-"), job(9, time={}), 3]
    found = sacct.read(json.dumps({"jobs": [*json.loads(JSON)["jobs"], *bad]}).encode())
    assert (len(found.attempts), len(found.bad)) == (3, 5)
    assert found.bad[0].endswith("'x' is no job")


@pytest.mark.parametrize(
    "text", [b"", b"hello\n", b"{}", b"{", b'{"jobs": 3}', b'{"jobs": [{}]}', b"JobIDRaw|Submit\n5|100\n"]
)
def test_what_is_no_output_of_sacct_is_one_line(text):
    """Nothing, where sacct knows no --json or lacks its plugin; a table, which is not read."""
    with pytest.raises(DataError, match="sacct") as said:
        sacct.read(text)
    assert "serializer/json" in said.value.hint
    assert "\n" not in str(said.value)


@given(data=st.binary(max_size=40), at=st.integers(0, len(JSON)))
def test_no_bytes_make_a_traceback(data, at):
    try:
        found = sacct.read(JSON[:at] + data + JSON[at + len(data) :])
    except BootseerError:
        return
    assert events.parse(sacct.events(found.attempts)).foreign == 0


def test_the_command(tmp_path):
    cli = ("profile", "import", "--sacct")
    out = tmp_path / "sacct.jsonl"
    text = json.dumps({"jobs": [*json.loads(JSON)["jobs"], 3]}).encode()
    done = forked.cli(*cli, "-", "-o", out, input=text, text=False)
    assert done.stderr.count(b"\n") == 1
    assert b"1 records of sacct were not understood; the first: job 4" in done.stderr
    assert len(events.read(out).identities()) == 3
    for path, code in ((tmp_path / "no", 66), (out, 65)):
        done = forked.cli(*cli, path)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1)


def test_a_job_of_many_components_takes_as_long_as_its_size_asks_for():
    """Red before: each was looked for among all."""
    rows = (f"1000|{1000 + n}|100|110|900|COMPLETED|n{n}" for n in range(12_000))
    text = accounts(*rows, columns="het|job_id|submission|start|end|state|nodes")
    begun = time.process_time()
    assert sum(1 for _ in sacct.events(sacct.read(text).attempts)) > 20_000
    assert time.process_time() - begun < 5
