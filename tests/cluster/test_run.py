"""`bootseer run`: whole starts of a small job in a real container, every technique on, off, and failing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import blake3
import pytest
import zstandard

from bootseer import image, oci, stripefs
from bootseer.kernel import pressure
from bootseer.profile import analysis, card, events
from support import forked
from support.images import Member, folder, programs, write_image

pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.timeout(180)]

TRAIN = b"""
trap 'exit 99' INT TERM  # process 1 has no default for either
. /run/bootseer/python/bootseer/profile/emit.sh
bootseer_span import -- sleep ${BEFORE:-0.2}
bootseer_span checkpoint_load -- cat /checkpoint/weights > /tmp/weights
case $BOOTSEER_CHECKPOINT in */striped/checkpoint)  # as bootseer.torch does that reads some of it by its URL
note='{"files":[{"path":"optimizer","size":9000000,"ranges":[[0,1048576]]}],"version":1}'
echo $note > ${BOOTSEER_EVENTS%.jsonl}.7.access
esac
[ -z "$CRASH" ] || exit $CRASH
bootseer_span first_step -- cat /env/package
cat /tmp/weights
sleep ${AFTER:-0.3} &
wait $!
exit ${CODE:-0}
"""
SETUP = b"mkdir -p /env && cat /job/requirements > /env/package && echo set-up ran && exit ${SETUP_CODE:-0}"
WEIGHTS = bytes(range(33, 123)) * 100_000  # 9 MB: striped, and greppable


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted image, a striped checkpoint with COMMIT, and the same checkpoint as plain files."""
    base = tmp_path_factory.mktemp("site")
    files = [folder("job"), folder("env"), folder("checkpoint"), folder("tmp", mode=0o1777),
             Member("job/train.sh", data=TRAIN), Member("job/setup.sh", data=SETUP),
             Member("job/requirements", data=b"package 1.0\n")]  # fmt: skip
    needed = programs("sh", "cat", "sleep", "mkdir", "date", "env")
    write_image(base / "layout", [needed, files], config=oci.ContainerConfig(env=("PATH=/bin", "PYTHONPATH=/image")))
    image.ensure(f"oci:{base}/layout:v1", str(base / "store"), work_dir=base / "work")
    (base / "plain").mkdir()
    (base / "plain/weights").write_bytes(WEIGHTS)
    fs = stripefs.open_fs(str(base / "striped"))
    fs.put(base / "plain/weights", "checkpoint/weights")
    fs.put(base / "plain/weights", "checkpoint/optimizer")  # nobody reads all of it
    fs.put(base / "plain/weights", "torn/weights")
    fs.commit("checkpoint")
    return base


class Place:
    """A node: its cache and state, and how jobs are started on it."""

    def __init__(self, site: Path, here: Path) -> None:
        self.site, self.here = site, here
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("BOOTSEER_")},
            "BOOTSEER_CACHE_DIR": str(here / "cache"),
            "BOOTSEER_STATE_DIR": str(here / "state"),
            "BOOTSEER_STORE": str(site / "store"),
            "BOOTSEER_NODE": "n0",
        }

    def argv(self, *options: str, checkpoint: str = "checkpoint", latest: str = "false", **variables: str) -> list[str]:
        job = self.here / "job.toml"
        shown = ", ".join(f'{k} = "{v}"' for k, v in variables.items())
        job.write_text(f"""
[job]
name = "small"
command = ["sh", "/job/train.sh"]
gpus = 8
env = {{ {shown} }}
[image]
ref = "oci:{self.site}/layout:v1"
[env]
command = ["sh", "/job/setup.sh"]
targets = ["/env"]
key_files = ["/job/requirements"]
key_env = ["WHICH"]
[checkpoint]
url = "{self.site}/striped/{checkpoint}"
path = "/checkpoint"
latest = {latest}
""")
        return [sys.executable, "-m", "bootseer.cli.main", "run", str(job), "--events", str(self.here / "events"),
                "--summary", str(self.here / "summary.json"), *options]  # fmt: skip

    def start(self, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.argv(*options, **more))

    def run(self, argv: list[str]) -> subprocess.CompletedProcess[str]:
        return forked.run(*argv[1:], env=self.env)

    def summary(self) -> dict[str, dict[str, object]]:
        return json.loads((self.here / "summary.json").read_text())


@pytest.fixture
def node(site: Path, tmp_path: Path) -> Place:
    return Place(site, tmp_path)


def clean(node: Place) -> bool:
    """Nothing of the start is left on disk."""
    return not list((node.here / "cache/starts").iterdir()) and not list((node.here / "state").glob("images/*"))


def image_span(node: Place) -> dict[str, object]:
    """The attributes of the span ``image`` of the only start on ``node``."""
    (span,) = (one for one in events.read((node.here / "events").rglob("*.jsonl")).spans if one.stage == "image")
    return span.attrs


def what_if(node: Place) -> list[str]:
    report = analysis.analyse(events.read((node.here / "events").rglob("*.jsonl")))
    return [change.name for change in report.what_if]


def test_first_start_captures_second_restores_both_see_the_same(node: Place, tmp_path: Path) -> None:
    first = node.start(WHICH="a")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("set-up ran\npackage 1.0\n")
    assert first.stdout.endswith(WEIGHTS.decode())
    assert node.summary()["env"]["how"] == "ran-and-published"
    assert node.summary()["ready_seconds"]
    said = image_span(node)
    moved = node.summary()["image"]
    assert {name: said[name] for name in ("bytes_demand", "bytes_hot", "link_rate")} == {
        name: moved[name] for name in ("bytes_demand", "bytes_hot", "link_rate")
    }
    assert said["bytes_demand"] > 0
    assert said["link_rate"] > 0
    assert 0 < said["waited_seconds"] < node.summary()["ready_seconds"]
    assert 0 < said["lookup_seconds"] < node.summary()["stages"]["image"]
    assert pressure.totals().keys() <= said.keys()
    assert "the image's hot blocks are prefetched" in what_if(node)
    assert clean(node)
    assert not list((node.here / "events").rglob("*.access"))  # what it read was handed over
    cold = Place(node.site, tmp_path / "cold")
    cold.here.mkdir()
    cold.env["BOOTSEER_JOB"] = "run-4711"  # names this run, in its events; the job is still the same
    second = cold.start(WHICH="a")
    assert second.returncode == 0, second.stderr
    assert second.stdout == "package 1.0\n" + WEIGHTS.decode()
    summary = cold.summary()
    assert summary["env"]["how"] == "restored-mount"
    assert summary["image"]["how"] == "lazy"
    assert summary["checkpoint"]["how"] == "striped"
    # what the first start read, by the mount and by the URL, is all that the second one prefetches
    assert node.summary()["checkpoint"]["recorded"] == 0
    read = len(WEIGHTS) + (1 << 20)
    assert summary["checkpoint"]["recorded"] == summary["checkpoint"]["prefetch_total"] == read
    assert summary["ready_seconds"]
    assert image_span(cold)["bytes_hot"] > 0
    assert set(summary["stages"]) == {"image", "env", "init"}
    assert clean(cold)


def test_what_is_passed_is_in_no_record(node: Place) -> None:
    """The programs get it; nothing that outlives them has it: stores, caches, state, events, logs and summary."""
    shutil.copytree(node.site / "store", node.here / "store")
    secret = "xyzzy-4711-of-nowhere"
    argv = ["-v", *node.argv(WHICH="pass")[3:]]
    file = node.here / "job.toml"
    text = file.read_text().replace("[image]", 'pass = ["MY_TOKEN", "PIP_*"]\n[caches]\nkinds = "auto"\n[image]')
    told = "test ${#MY_TOKEN} = 21 && test ${#PIP_INDEX_URL} = 21 && test -z $OTHER && sh /job"
    file.write_text(re.sub(r'"sh", "/job/(\w+).sh"', rf'"sh", "-c", "{told}/\1.sh"', text))
    given = {"MY_TOKEN": secret, "OTHER": secret, "PIP_INDEX_URL": secret, "BOOTSEER_STORE": str(node.here / "store")}
    keys = []
    for turned in (secret, secret[::-1]):
        environ = {**node.env, **given, "MY_TOKEN": turned}
        done = forked.cli(*argv, env=environ)
        assert done.returncode == 0, done.stderr
        assert not {secret, secret[::-1]} & set(re.findall(r"[\w-]{21}", done.stdout + done.stderr))
        keys.append(node.summary()["env"]["key"])
    assert keys[0] == keys[1]
    files = [path for path in node.here.rglob("*") if path.is_file()]
    assert len(files) > 20
    digest = hashlib.sha256(secret.encode()).hexdigest().encode(), blake3.blake3(secret.encode()).hexdigest().encode()
    for path in files:
        held = path.read_bytes()
        with contextlib.suppress(zstandard.ZstdError):
            held += zstandard.ZstdDecompressor().decompressobj().decompress(held)
        assert not [one for one in (secret.encode(), secret[::-1].encode(), *digest) if one in held], path


def test_the_profile_hears_how_much_of_the_image_is_here(node: Place, tmp_path: Path) -> None:
    assert node.start(WHICH="hot").returncode == 0
    assert "hot_total" not in image_span(node), "nothing was known, or all came at once"
    slow = Place(node.site, tmp_path / "slow")
    slow.here.mkdir()
    slow.env["BOOTSEER_FAULTS"] = "blocks.hot.part=sleep:20"
    assert slow.start(WHICH="hot", BEFORE="4").returncode == 0
    (log,) = (slow.here / "events").rglob("*.jsonl")
    notes = [json.loads(line)["attrs"] for line in log.read_text().splitlines() if '"hot_ready"' in line]
    assert notes[0]["hot_ready"] < notes[0]["hot_total"]
    assert len({note["hot_ready"] for note in notes}) == len(notes), "only what is new"


def test_a_block_server_that_is_older_than_the_start_tells_it_nothing(node: Place) -> None:
    there = node.here / "there"
    forked.cli("image", "mount", f"oci:{node.site}/layout:v1", there, env=node.env).check_returncode()
    try:
        assert node.start(WHICH="d").returncode == 0
    finally:
        forked.cli("unmount", there, env=node.env).check_returncode()
    assert node.summary()["image"]["reads"]
    assert not {"bytes_demand", "bytes_hot", "waited_seconds", "link_rate"}.intersection(image_span(node))


def test_nodes_that_start_together_convert_and_set_up_once(site: Path, tmp_path: Path) -> None:
    nodes = [Place(site, tmp_path / name) for name in ("n0", "n1")]
    for place in nodes:
        place.here.mkdir()
        place.env |= {"BOOTSEER_STORE": str(tmp_path / "store"), "BOOTSEER_NODE": place.here.name}
    refused = nodes[0].start(WHICH="b")
    assert refused.returncode == 66
    assert "is not converted in store" in refused.stderr
    slow = {"BOOTSEER_ATTEMPT": "7", "BOOTSEER_FAULTS": "lease.taken=sleep:5@1"}  # so that the other one waits
    starts = [
        forked.Popen(place.argv("--convert", WHICH="b"), env=place.env | slow, stdout=-1, stderr=-1, text=True)
        for place in nodes
    ]
    said = [start.communicate(timeout=150) for start in starts]
    assert [start.returncode for start in starts] == [0, 0], said
    assert sum(out.count("set-up ran") for out, _ in said) == 1
    assert sorted(str(place.summary()["env"]["how"]) for place in nodes) == ["ran-and-published", "restored-mount"]
    assert sum("waiting for n" in err and "which converts oci:" in err for _, err in said) == 1
    log = events.read(tmp_path.glob("n*/events/small/*/*.jsonl"))
    stages = {span.id: span.stage for span in log.spans}
    assert [stages[span.parent] for span in log.spans if span.stage == events.WAIT].count("image") == 1
    assert any(node.stages["image"].wait > 1 for node in analysis.analyse(log).nodes)
    assert not [path for path in (tmp_path / "store/leases").rglob("*") if path.is_file()]
    assert all(clean(place) for place in nodes)


def test_what_a_killed_start_left_is_ended_by_the_next(node: Place) -> None:
    mounts = Path("/proc/self/mounts")
    for options in ((), ("--without", "all")):
        with forked.Popen(node.argv(*options, WHICH="k", AFTER="600"), env=node.env, stderr=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as child:  # fmt: skip
            assert child.stderr is not None
            while "ready after" not in (line := child.stderr.readline()):
                assert line, "it ended before its first step"
            child.kill()
        assert list((node.here / "cache/starts").iterdir())
        assert (str(node.here) in mounts.read_text()) is (options == ())
        done = node.start("--no-card", *options, WHICH="k")
        assert done.returncode == 0, done.stderr
        assert "left by a process that was killed" in done.stderr
        assert clean(node)
        assert str(node.here) not in mounts.read_text()


def test_a_script_in_a_mount_counts_though_it_is_no_key_file(node: Place) -> None:
    job = node.here / "files"
    job.mkdir()
    for name, text in (("train.sh", TRAIN), ("setup.sh", SETUP), ("requirements", b"package 1.0\n")):
        (job / name).write_bytes(text)

    def start() -> subprocess.CompletedProcess[str]:
        argv = node.argv(WHICH="mount")
        with open(node.here / "job.toml", "a") as file:
            file.write(f'[[mounts]]\nsource = "{job}"\ntarget = "/job"\n')
        return node.run(argv)

    assert start().stdout.startswith("set-up ran\n")
    assert start().stdout.startswith("package 1.0\n")
    (job / "setup.sh").write_bytes(SETUP.replace(b"set-up ran", b"another set-up ran"))
    assert start().stdout.startswith("another set-up ran\n")
    assert node.summary()["env"]["reason"] == (
        "missed because /job/setup.sh, which the command reads, changed; it is published in the background, "
        f"{node.here}/state/env/publications.log says how"
    )


def test_everything_the_ordinary_way(node: Place) -> None:
    done = node.start("--without", "all", "--no-card", WHICH="b")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "set-up ran\npackage 1.0\n" + WEIGHTS.decode()
    summary = node.summary()
    assert (summary["image"]["how"], summary["env"]["how"], summary["checkpoint"]["how"]) == (
        "unpacked",
        "ran",
        "copied",
    )
    assert done.stderr == ""
    assert clean(node)


def test_the_exit_code_is_the_training_commands(node: Place) -> None:
    assert node.start("--without", "all", CODE="42").returncode == 42
    assert clean(node)


def test_a_set_up_command_that_fails_ends_the_start_with_its_code(node: Place) -> None:
    done = node.start("--no-card", WHICH="c", SETUP_CODE="7")
    assert done.returncode == 7
    assert "package" not in done.stdout
    assert "set-up command failed with exit code 7" in done.stderr
    assert "Traceback" not in done.stderr
    assert clean(node)


@pytest.mark.parametrize(
    ("given", "code", "how"),
    [({"CRASH": "3"}, 3, "exit code 3 in init"), ({"SETUP_CODE": "7", "WHICH": "e"}, 7, "exit code 7 in env")],
)
def test_a_start_that_crashed_says_how_it_ended(node: Place, given: dict[str, str], code: int, how: str) -> None:
    done = node.start(**given)
    assert done.returncode == code
    report = analysis.analyse(events.read((node.here / "events").rglob("*.jsonl")), now=time.time_ns())
    assert (report.goes_on, report.still) == (False, [])
    assert [(one.how, one.nodes) for one in report.ended] == [(how, ["n0"])]
    assert card.unfinished(report).strip() == f"has ended    before the first step: 1 node (n0): {how}"


def test_two_starts_are_two_attempts(node: Place) -> None:
    for number in range(2):
        assert node.start("--without", "all", "--no-card").returncode == 0
        assert node.summary()["attempt"] == str(number)
    assert len(list((node.here / "events/small").glob("attempt-*/n0.jsonl"))) == 2


def test_gpus_that_nobody_describes_start_nothing(node: Place) -> None:
    argv = node.argv("--no-card")
    job = node.here / "job.toml"
    job.write_text(job.read_text().replace("gpus = 8", 'gpus = ["no-such-gpu"]'))
    done = node.run(argv)
    assert done.returncode == 66
    assert "no GPU no-such-gpu is described in /etc/cdi or /var/run/cdi" in done.stderr
    assert not (node.here / "events").exists()


def test_training_code_records_its_own_start(node: Place) -> None:
    code = node.here / "code"
    (code / "torch").mkdir(parents=True)
    (code / "torch/__init__.py").touch()
    (code / "train.py").write_text("import sys, torch\nprint(sys.path[1:3], 'sitecustomize' in sys.modules)\n")
    argv = node.argv()
    (node.here / "job.toml").write_text(f"""
[job]
name = "small"
command = ["/usr/bin/python3", "-S", "-c", "import os; os.execv('/usr/bin/python3', ['python3', '/code/train.py'])"]
auto = true
[image]
ref = "oci:{node.site}/layout:v1"
[[mounts]]
source = "/usr"
target = "/usr"
[[mounts]]
source = "{code}"
target = "/code"
""")
    done = node.run(argv)
    assert (done.returncode, done.stdout) == (0, "['/image', '/run/bootseer/python'] False\n"), done.stderr
    spans = events.read(node.here / "events").spans
    assert [(span.stage, span.state.value) for span in spans][-2:] == [("init", "DONE"), ("import", "DONE")]
    assert spans[-1].parent == spans[-2].id


HOSTILE = b"""
cd /run/bootseer/events || exit 1
rm -f n0.jsonl n1.jsonl
ln -s "$1/profile.d/zz.sh" n0.jsonl
ln -s "$1/profile.d/yy.sh" n1.jsonl
mkdir -p /env && echo 1 > /env/package
"""


@pytest.mark.parametrize("planted", ["link", "/dev/zero", "pipe"])
def test_a_job_that_plays_with_its_events_reaches_nothing_of_the_host(node: Place, planted: str) -> None:
    """What root writes of a start goes on, to its own file, whatever a container of root puts in the place of its."""
    code, host = node.here / "job", node.here / "host"
    code.mkdir()
    (host / "profile.d").mkdir(parents=True)
    (node.here / "events/small/attempt-0").mkdir(parents=True)
    (node.here / "events/small/attempt-0/n1.jsonl").write_text("another node's\n")
    again = {"link": "true", "/dev/zero": "ln -s /dev/zero n0.jsonl", "pipe": "mkfifo n0.jsonl"}[planted]
    (code / "setup.sh").write_bytes(HOSTILE)
    (code / "train.sh").write_text(f"cd /run/bootseer/events; [ {planted} = link ] || rm n0.jsonl; {again}; sleep 1")
    argv = node.argv("--no-card")
    (node.here / "job.toml").write_text(f"""
[job]
name = "small"
command = ["sh", "/job/train.sh"]
[image]
ref = "oci:{node.site}/layout:v1"
[env]
command = ["sh", "/job/setup.sh", "{host}"]
targets = ["/env"]
[[mounts]]
source = "{code}"
target = "/job"
[[mounts]]
source = "/bin"
target = "/bin"
[[mounts]]
source = "/lib"
target = "/lib"
[[mounts]]
source = "/usr"
target = "/usr"
""")
    began = time.monotonic()
    done = node.run(argv)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    assert not list((host / "profile.d").iterdir())
    (attempt,) = (node.here / "events/small").iterdir()
    assert {path.name for path in attempt.iterdir()} == {"n0.jsonl", "n1.jsonl"}
    assert (attempt / "n1.jsonl").read_text() == "another node's\n"
    ours = events.read(attempt / "n0.jsonl")
    assert {"image", "env", "init"} <= {span.stage for span in ours.spans}
    assert clean(node)


def test_nothing_of_one_start_is_in_the_key(node: Place, tmp_path: Path) -> None:
    """Another node, job of Slurm, rank and working folder: the second start of a job with mounts restores."""
    for start, how in enumerate(("ran-and-published", "restored-mount")):
        one = Place(node.site, tmp_path / f"{start}")
        one.here.mkdir()
        argv = one.argv("--no-card", WHICH="mounted")
        with (one.here / "job.toml").open("a") as job:
            job.write(f'[[mounts]]\nsource = "{tmp_path}"\ntarget = "/shown"\n')
        one.env |= {"SLURM_JOB_ID": f"{start}", "SLURM_PROCID": "0", "BOOTSEER_NODE": f"n{start}"}
        own_name = ["unshare", "--uts", "sh", "-c", f'hostname node-{start}; exec "$@"', "sh"]
        done = subprocess.run(
            [*own_name, *argv], env=one.env, cwd=one.here, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, one.summary()["env"]["how"]) == (0, how), done.stderr


def test_a_missing_node_is_noticed(node: Place) -> None:
    node.env |= {"SLURM_JOB_ID": "48", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}
    done = node.start("--without", "all")
    assert "the first step has ended on 1 of 2 nodes" in done.stderr
    assert "1 of 2 nodes have no data" in done.stderr
    assert (node.here / "events/small/attempt-48.0.0/n0.jsonl").exists()


def test_a_dead_block_server_after_the_first_step_does_not_change_the_jobs_result(node: Place) -> None:
    argv = node.argv("--no-card", WHICH="e", AFTER="3")
    process = forked.Popen(argv, env=node.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        events = node.here / "events/small/attempt-0/n0.jsonl"
        end = time.monotonic() + 60
        while '"first_step"' not in (events.read_text() if events.exists() else "") and time.monotonic() < end:
            time.sleep(0.01)
        groups = [int(path.read_text()) for path in (node.here / "state/trees").glob("*/server.lock")]
        assert groups
        for group in groups:
            os.killpg(group, signal.SIGKILL)
        _, stderr = process.communicate(timeout=90)
    finally:
        process.kill()
    assert b"Traceback" not in stderr
    assert process.returncode in (0, 126, 127, 135), stderr  # the command's own: it may need a byte that cannot come


@pytest.mark.parametrize(("which", "code", "says"), [("nowhere", 66, "nowhere"), ("torn", 65, "COMMIT")])
def test_a_checkpoint_that_is_missing_or_unfinished(node: Place, which: str, code: int, says: str) -> None:
    done = node.start(checkpoint=which)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert clean(node)


def test_the_newest_complete_checkpoint_or_none(site: Path, node: Place) -> None:
    """As a job lives: its first start finds nothing, a later one what was saved last, but not what a kill cut short."""
    done = node.start("--no-card", checkpoint="life", latest="true", WHICH="e")
    assert "the job starts without a checkpoint" in done.stderr
    assert node.summary()["checkpoint"] == {"how": "none"}
    assert "cat: /checkpoint/weights" in done.stderr  # the job's own affair
    fs = stripefs.open_fs(str(site / "striped"))
    (node.here / "old").write_bytes(b"of step 100")
    for step, file in ((100, node.here / "old"), (200, site / "plain/weights")):
        fs.put(file, f"life/step-{step}/weights")
        fs.commit(f"life/step-{step}")
    fs.put(node.here / "old", "life/step-300/weights")
    done = node.start("--no-card", checkpoint="life", latest="true", WHICH="e")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(WEIGHTS.decode())
    assert node.summary()["checkpoint"]["how"] == "striped"
    assert clean(node)


def test_an_unknown_technique_or_key_is_one_line(node: Place) -> None:
    done = node.start("--without", "magic")
    assert (done.returncode, len(done.stderr.splitlines())) == (78, 1)
    node.argv()
    job = node.here / "job.toml"
    job.write_text(job.read_text().replace("gpus", "gpu_count"))
    done = forked.cli("run", job)
    assert done.returncode == 78
    assert "gpu_count" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_store_away_does_not_stop_an_ordinary_start(node: Place) -> None:
    node.env["BOOTSEER_STORE"] = str(node.here / "file")
    (node.here / "file").write_text("not a folder")
    done = node.start("--without", "image", "--no-card")
    assert done.returncode == 0, done.stderr
    assert node.summary()["env"]["how"] == "ran"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_leaves_nothing(node: Place, number: signal.Signals) -> None:
    process = forked.Popen(node.argv(WHICH="d", AFTER="60"), env=node.env, stdout=-1, stderr=-1, text=True)
    try:
        events = node.here / "events/small/attempt-0/n0.jsonl"
        end = time.monotonic() + 60
        while '"first_step"' not in (events.read_text() if events.exists() else "") and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 99, stderr  # the signal reached the command, its code reached us
    assert "Traceback" not in stderr
    assert clean(node)


def test_a_users_link_at_the_place_of_the_environment_covers_nothing_of_the_host(node: Place) -> None:
    """Root's job fills a folder of a user's, who puts a link to /etc there before the next start."""
    alice, etc = node.here / "alice", node.here / "etc"
    alice.mkdir()
    os.chown(alice, 65534, 65534)
    node.here.chmod(0o755)
    etc.mkdir()
    (etc / "passwd").write_text("root")
    argv = node.argv(AFTER="0")
    job = Path(argv[4])
    text = job.read_text().replace('targets = ["/env"]', 'targets = ["/env", "/alice/env"]')
    job.write_text(f'{text}[[mounts]]\nsource = "{alice}"\ntarget = "/alice"\n')
    for step, why in (("a folder", "others can replace"), ("a link", "is a link or no folder")):
        if step == "a folder":
            (alice / "env").mkdir()
        else:
            (alice / "env").rmdir()
            (alice / "env").symlink_to(etc)
        done = node.run(argv)
        assert done.returncode == 0, done.stderr
        assert why in done.stderr
        assert node.summary()["env"]["how"] == "ran"
        assert (os.listdir(etc), etc.stat().st_uid) == (["passwd"], 0)
