import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from bootseer import launch
from bootseer.config import Config
from bootseer.errors import ConfigError, UnavailableError
from bootseer.launch.attempt import begin_events, join_attempt, open_events
from bootseer.launch.identity import identify
from bootseer.launch.job import ImageTable, Job, JobTable


def test_slurm_torchrun_and_kubernetes():
    slurm = identify("j", {"SLURM_NODEID": "3", "SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "n3"})
    assert (slurm.rank, slurm.node, slurm.job) == (3, "n3", "j")
    assert identify("j", {"GROUP_RANK": "5", "GROUP_WORLD_SIZE": "6"}).nodes == 6
    assert identify("j", {"JOB_COMPLETION_INDEX": "7"}).rank == 7
    assert identify("j", {"SLURM_JOB_NODELIST": "n[1-9]", "SLURM_STEP_NODELIST": "n[1-2]"}).nodelist == "n[1-2]"


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_JOB_ID": "48", "SLURM_STEP_ID": "1"}, "48.0.1"),
        ({"SLURM_JOB_ID": "48", "SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "2"}, "48.2.1"),
        ({"SLURM_JOB_ID": "48", "SLURM_RESTART_COUNT": "2"}, ""),  # a batch script may start it twice
        ({"TORCHELASTIC_RUN_ID": "a/b:c", "TORCHELASTIC_RESTART_COUNT": "3"}, "a_b_c.0"),
        ({"TORCHELASTIC_RUN_ID": "/nfs/rdzv"}, "9c8e360502eb8e8c"),
        ({"TORCHELASTIC_RUN_ID": "r" * 110}, "b269299bc36af221"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "3"}, ""),
        ({"SLURM_JOB_ID": "48", "SLURM_STEP_ID": "1", "BOOTSEER_ATTEMPT": "mine"}, "mine"),
        ({}, ""),
    ],
)
def test_the_scheduler_names_a_start(environ, name):
    assert identify("j", environ).attempt == name


@pytest.mark.parametrize("variable", ["BOOTSEER_JOB", "BOOTSEER_ATTEMPT", "BOOTSEER_NODE"])
@pytest.mark.parametrize("text", ["../x", "a/b", "..", "x" * 101])
def test_what_names_a_file_is_a_name(variable, text):
    with pytest.raises(ConfigError, match="cannot name a file"):
        identify("j", {variable: text})


def starts(folder, *nodes):
    return [join_attempt(folder, identify("j", {"BOOTSEER_NODE": node})) for node in nodes]


def test_nodes_that_start_together_agree_on_the_attempt(tmp_path):
    assert starts(tmp_path, "n1", "n2", "n1") == ["0", "0", "1"]
    assert starts(tmp_path, "n2", "n2") == ["1", "2"]  # n2 alone
    os.utime(tmp_path / "j/attempt-2", (1, 1))
    assert starts(tmp_path, "n1", "n2", "n3") == ["3", "3", "3"]


@pytest.mark.parametrize("off", [-600.0, 600.0])
def test_nodes_whose_clocks_are_off_by_minutes_agree_on_the_attempt(tmp_path, monkeypatch, off):
    """Times of files are those of the server of the folder."""
    assert starts(tmp_path, "n1") == ["0"]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + off)
    assert starts(tmp_path, "n2") == ["0"]
    assert [path.name for path in (tmp_path / "j").iterdir()] == ["attempt-0"]


@pytest.mark.timeout(10)
def test_a_link_to_nothing_in_the_place_of_a_nodes_events_is_no_reason_to_look_for_ever(tmp_path):
    (tmp_path / "j/attempt-0").mkdir(parents=True)
    (tmp_path / "j/attempt-0/n1.jsonl").symlink_to("nowhere")
    assert starts(tmp_path, "n1") == ["1"]


def test_links_that_others_planted_are_no_attempts(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "events/j").mkdir(parents=True)
    (tmp_path / "events/j/attempt-0").symlink_to(tmp_path / "other")
    (tmp_path / "events/j/attempt-1").touch()
    (tmp_path / "events/j/attempt-٣").mkdir()
    (tmp_path / "events/j/attempt-99999999999999999999").mkdir()
    assert starts(tmp_path / "events", "n1", "n2") == ["2", "2"]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/j").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=r"symbolic|directory"):
        starts(tmp_path / "linked", "n1")
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("place", ["j", "j/attempt-7", "j/attempt-7/n1.jsonl"])
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "hard link"])
def test_a_nodes_events_are_below_their_folder(tmp_path, place, kind):
    other, path = tmp_path / "other", tmp_path / "events" / place
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard link":
        other.write_text("precious")
        os.link(other, path)
    else:
        if kind == "link":
            other.touch() if path.suffix else other.mkdir()
        path.symlink_to(other)
    with pytest.raises(OSError, match=r"links|directory|device|no file"):
        open_events(tmp_path / "events", identify("j", {"BOOTSEER_NODE": "n1", "BOOTSEER_ATTEMPT": "7"}))
    if other.is_dir():
        assert not list(other.iterdir())
    path.unlink()
    fd = open_events(tmp_path / "events", identify("j", {"BOOTSEER_NODE": "n1", "BOOTSEER_ATTEMPT": "7"}))
    os.write(fd, b"x")
    os.close(fd)
    assert (tmp_path / "events/j/attempt-7/n1.jsonl").read_text() == "x"


@pytest.mark.parametrize("kind", ["link", "hard link", "folder", "pipe"])
@pytest.mark.parametrize("place", ["j", "j/attempt-7/n1.jsonl"])
@pytest.mark.parametrize("attempt", ["7", ""])
def test_what_is_in_the_place_of_a_nodes_events_ends_no_start(tmp_path, caplog, place, kind, attempt):
    path, own = tmp_path / "events" / place, tmp_path / "own"
    path.parent.mkdir(parents=True)
    own.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(own)
    else:
        (tmp_path / "other").touch()
        os.link(tmp_path / "other", path)
    given = identify("j", {"BOOTSEER_NODE": "n1", "BOOTSEER_ATTEMPT": attempt})
    found, events, fd = begin_events(tmp_path / "events", given, own)
    os.write(fd, b"x")
    os.close(fd)
    assert events.read_text() == "x"
    if (kind, place) == ("folder", "j") or (place != "j" and not attempt):  # there is room beside it
        assert (events.parent.parent, events.parent.name) == (tmp_path / "events/j", f"attempt-{found.attempt}")
        assert not caplog.messages
    else:
        assert (events, found.attempt) == (own / "n1.jsonl", attempt or "0")
        assert [message.partition(":")[0] for message in caplog.messages] == ["the events of this start are not kept"]


def test_a_start_goes_on_where_its_events_cannot_be_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / "events/j/attempt-7/n1.jsonl").mkdir(parents=True)
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    job = Job(job=JobTable(name="j", command=["true"]), image=ImageTable(ref="127.0.0.1:1/x:1"))
    who = identify("j", {"BOOTSEER_NODE": "n1", "BOOTSEER_ATTEMPT": "7"})
    with pytest.raises(UnavailableError, match="registry"):  # the next step
        launch.start(job, config=config, identity=who, events_dir=tmp_path / "events")
    assert "events of this start are not kept" in caplog.text
    assert not list((tmp_path / "cache/starts").iterdir())


@pytest.mark.parametrize("number", ["999999999", "9" * 18, "9" * 19, "200000"])
def test_a_number_that_nobody_counted_up_to_is_no_attempt(tmp_path, number):
    assert starts(tmp_path, "n1") == ["0"]
    (tmp_path / f"j/attempt-{number}").mkdir()
    os.utime(tmp_path / f"j/attempt-{number}", (1, 1))
    assert starts(tmp_path, "n2", "n1", "n1") == ["0", "1", "2"]


@pytest.mark.root
def test_roots_events_go_where_others_cannot_lead_them(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "host").mkdir()
    (tmp_path / "tenant/own").mkdir(parents=True)
    (tmp_path / "ours").symlink_to(tmp_path / "tenant")
    for path in (tmp_path / "tenant", tmp_path / "tenant/own"):
        os.chown(path, 65534, 65534)
    (tmp_path / "tenant/link").symlink_to(tmp_path / "host")
    for folder in (tmp_path / "tenant/link", tmp_path / "tenant/link/new"):
        with pytest.raises(OSError, match=r"links|Not a directory"):
            starts(folder, "n1")
    assert not list((tmp_path / "host").iterdir())
    assert starts(tmp_path / "new/er", "n1") == ["0"]
    assert starts(tmp_path / "ours/own/new", "n1", "n2") == ["0", "0"]
    assert (tmp_path / "tenant/own/new/j/attempt-0/n1.jsonl").is_file()


def test_a_start_that_has_all_its_nodes_is_joined_by_none(tmp_path):
    def attempts(nodes):
        found = (identify(f"j{nodes}", {"BOOTSEER_NODE": f"n{i}", "BOOTSEER_NODES": nodes}) for i in range(4))
        return [join_attempt(tmp_path, one) for one in found]

    assert attempts("1") == ["0", "1", "2", "3"]
    assert attempts("2") == ["0", "0", "1", "1"]


def test_many_nodes_that_start_at_once_agree(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        for number in range(3):
            assert set(pool.map(lambda i: starts(tmp_path, f"n{i}")[0], range(16))) == {str(number)}


def test_our_own_variables_win():
    found = identify("j", {"BOOTSEER_JOB": "k", "BOOTSEER_NODE_RANK": "1", "SLURM_NODEID": "3", "BOOTSEER_NODE": "me"})
    assert (found.job, found.rank, found.node) == ("k", 1, "me")
    assert found.environ(8)["BOOTSEER_GPUS"] == "8"
    assert "BOOTSEER_RANK" not in found.environ(8), "a process's rank is its framework's to say"


def test_restarts_by_torchrun_are_cycles_of_one_attempt(tmp_path):
    """The emitters in the same process add what torchrun says to what they are told here."""
    elastic = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2", "LOCAL_WORLD_SIZE": "1"}
    found = identify("j", {**elastic, "BOOTSEER_CYCLE": "5", "BOOTSEER_NODE": "n1"})
    assert (found.cycle, found.environ(8)["BOOTSEER_CYCLE"]) == (7, "5")
    nvrx = identify("j", {**elastic, "NVRX_CYCLE": "4"})  # it counts for all nodes
    assert (nvrx.cycle, nvrx.environ(8)["BOOTSEER_CYCLE"]) == (4, "0")
    assert starts(tmp_path, "n1", "n1") == ["0", "1"]
    assert join_attempt(tmp_path, found) == "1"


def test_not_a_number():
    with pytest.raises(ConfigError, match="SLURM_NODEID"):
        identify("j", {"SLURM_NODEID": "three"})
