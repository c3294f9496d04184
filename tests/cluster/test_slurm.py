"""Jobs of a real Slurm on four nodes: both ways of `docs/howto/slurm.md`, and what goes wrong on the way."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import image, oci
from bootseer.demo.programs import WITH_US
from support.images import Member, programs, write_image
from support.layouts import push
from support.registry import DockerRegistry, without_tls
from support.slurm import WAIT, SlurmCluster
from support.waits import until

pytestmark = [pytest.mark.root, pytest.mark.registry, pytest.mark.slurm, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples/slurm"
BOOTSEER = f"{sys.executable} -m bootseer.cli.main"
JOBS = "/run/bootseer-slurm"


RANKS = f"""
export BOOTSEER_STORE=$HOME/caches BOOTSEER_CACHE_DIR=/var/spool/local/c BOOTSEER_STATE_DIR=/var/spool/local/s
srun --ntasks=2 {BOOTSEER} env run --cache triton sh -c 'mkdir -p $TRITON_CACHE_DIR; cd $TRITON_CACHE_DIR
    [ -e $SLURM_PROCID.so ] && cat $SLURM_PROCID.so || echo compiled >$SLURM_PROCID.so; sleep 2' 2>&1
echo the end
"""


STARTS = f"""
export BOOTSEER_STORE=$HOME/starts BOOTSEER_CACHE_DIR=/var/spool/local/c2 BOOTSEER_STATE_DIR=/var/spool/local/s2
srun --ntasks=2 sh -c '{BOOTSEER} --config SETTINGS run starts.toml --summary $SLURM_JOB_ID-$SLURM_PROCID.json' 2>&1
echo the end
"""
START = """
[job]
name = "ranks"
command = ["sh", "-c", "mkdir -p $D; N=$D/$SLURM_PROCID; [ -e $N ] && cat $N || echo compiled >$N; sleep 3"]
env = { D = "/run/bootseer/caches/triton" }
[image]
ref = "IMAGE"
convert = true
[caches]
kinds = ["triton"]
"""


class Site:
    """The cluster, an image in a registry that its nodes reach, and the hooks."""

    def __init__(self, slurm: SlurmCluster, registry: str) -> None:
        self.slurm, self.registry = slurm, registry
        self.settings = slurm.root / "site.toml"
        self.hooks = slurm.root / "hooks"

    def install(self, seconds: int = 100) -> dict[str, list[str]]:
        words = ["--config", str(self.settings), "node", "install", "--slurm", f"--slurm-dir={self.hooks}"]
        words += [f"--unit={self.slurm.root}/bootseer-node.service", f"--slurm-limit={seconds}", "--json"]
        found = self.slurm.run("n1", [*BOOTSEER.split(), *words])
        return json.loads(found)  # type: ignore[no-any-return]

    def submit(self, user: str, script: str, *options: str, comment: str = "", without: str = "n[2-4]") -> str:
        """A batch job ``without`` these nodes, whose script has ``$exec`` for the way into its image."""
        name = self.slurm.home(user) / "job.sh"
        name.write_text(f'#!/bin/bash\nexec="{BOOTSEER} exec"\n{script}\n')
        comment = comment or f"site=x bootseer={self.registry}/team/small:v1"
        return self.slurm.submit(user, f"--comment={comment}", f"--exclude={without}", *options, name)

    def serve(self, faults: str = "") -> subprocess.Popen[bytes]:
        """A node daemon on n1, with these `bootseer.faults`."""
        words = [*BOOTSEER.split(), "--config", str(self.settings), "node"]
        serve = self.slurm.argv("n1", ["env", f"BOOTSEER_FAULTS={faults}", *words, "serve"])
        with open(self.slurm.root / "log/daemon.log", "ab") as out:
            process = subprocess.Popen([*WITH_US, *serve], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        metrics = [*words, "status", "--metrics"]
        until(lambda: self.slurm.run("n1", metrics, check=False).startswith("# HELP"), WAIT, "the daemon")
        return process

    def daemon(self) -> dict[str, Any]:
        """The status of that daemon."""
        words = [*BOOTSEER.split(), "--config", str(self.settings), "node", "status", "--json"]
        return json.loads(self.slurm.run("n1", words))  # type: ignore[no-any-return]

    def stopped(self, node: str) -> list[str]:
        """The numbers of processes there that a fault has stopped."""
        known = self.slurm.run(node, ["ps", "-eo", "pid=,state="]).splitlines()
        return [pid for pid, state in map(str.split, known) if state == "T"]

    @contextlib.contextmanager
    def faults(self, what: str) -> Iterator[None]:
        """Prologs that begin meanwhile, and what they start, have these `bootseer.faults`."""
        prolog = self.hooks / "prolog"
        good = prolog.read_text()
        prolog.write_text(good.replace("export HOME", f"export BOOTSEER_FAULTS={what} HOME"))
        try:
            yield
        finally:
            prolog.write_text(good)

    def processes(self, node: str) -> list[str]:
        """The numbers of bootseer's processes on a node."""
        return self.slurm.run(node, ["pgrep", "-f", r"bootseer\.(slurm|blocks)"], check=False).split()

    def says(self, user: str, job: str, what: str) -> None:
        until(lambda: what in self.slurm.output(user, job), WAIT, f"{what!r} in the output of {user}'s job", step=0.1)

    def left(self, node: str) -> str:
        """Job folders and mounts on a node."""
        script = f"ls -A {JOBS} 2>/dev/null | grep -v ^log; grep ' /run/bootseer' /proc/self/mountinfo"
        return self.slurm.run(node, ["sh", "-c", script], check=False)

    def clean(self) -> None:
        """All nodes become idle, and nothing is left on them."""
        until(self.slurm.idle, WAIT, "idle nodes", step=0.2)
        until(lambda: not any(map(self.left, self.slurm.names)), WAIT, "the end of all mounts", step=0.2)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    root = Path(tempfile.mkdtemp(prefix="bootseer-slurm-", dir="/var/tmp"))
    root.chmod(0o755)
    try:
        with (
            SlurmCluster(root, users={"alice": 5001, "bob": 5002}) as slurm,
            DockerRegistry(host=slurm.host) as registry,
        ):
            site = Site(slurm, registry.address)
            with without_tls(registry.address):
                files = [*programs("sh", "cat", "sleep", "id", "mkdir"), Member("marker", data=b"of the image\n")]
                config = oci.ContainerConfig(env=("PATH=/bin", "FROM_IMAGE=yes"))
                write_image(root / "layout", [files], config=config)
                ref = f"{registry.address}/team/small:v1"
                push(f"oci:{root}/layout:v1", ref)
                image.ensure(ref, str(root / "store"), work_dir=root / "work")
                write_image(root / "layout", [files[:1]], tag="plain")
                push(f"oci:{root}/layout:plain", f"{registry.address}/team/plain:v1")
            site.settings.write_text(
                f'store = "{root}/store"\ncache_dir = "/var/spool/bootseer"\nplain_http = ["{registry.address}"]\n'
            )
            found = site.install()
            assert [line.split()[0] for line in found["to_change"]] == ["PrologFlags", "BatchStartTimeout"]
            slurm.configure(*found["slurm_conf"])
            assert site.install()["to_change"] == []
            yield site
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_jobs(site: Site) -> Iterator[None]:
    """A test that fails leaves the nodes to the next one."""
    yield
    site.slurm.run("head", ["scancel", "--partition=main"])
    site.slurm.boot()


def test_a_job_runs_in_its_image_on_four_nodes(site: Site) -> None:
    script = 'echo "$(cat /marker) $FROM_IMAGE $(id -u) $SLURM_NODEID $HOME"'
    comment = f"--comment=bootseer={site.registry}/team/small:v1,bootseer.job=small"
    job = site.slurm.submit("alice", comment, EXAMPLES / "prolog.sbatch", "sh", "-c", script)
    ended = site.slurm.ended(job)
    said = site.slurm.output("alice", job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), said
    home = site.slurm.home("alice")
    assert sorted(said.splitlines()) == [f"of the image yes 5001 {rank} {home}" for rank in range(4)]
    site.clean()


def test_a_job_without_an_administrator(site: Site) -> None:
    """The set-up command runs once in the cluster, for two starts of four nodes."""
    home = site.slurm.home("bob")
    (home / "setup.sh").write_text('mkdir -p "$1"; echo "import os; found = os.uname().nodename" > "$1/package.py"\n')
    with (home / "setup.sh").open("a") as out:
        out.write(f"echo ran >> {home}/setups\n")
    (home / "train.py").write_text("import package\nprint('trained on', package.found, package.__file__)\n")
    for _ in range(2):
        job = site.slurm.submit("bob", "--export=ALL,NODE_DISK=/var/spool/local", EXAMPLES / "no-admin.sbatch")
        ended = site.slurm.ended(job)
        said = site.slurm.output("bob", job)
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), said
        for name in site.slurm.names:
            assert f"trained on {name} /var/spool/local/bob/env/package.py" in said
        assert "trained" in said.partition("readiness")[0], said  # the card comes last
    assert (home / "setups").read_text() == "ran\n"


def test_a_job_that_a_requeued_one_submitted(site: Site) -> None:
    """It inherits the count of the other one: Slurm sets the variable only where it is not 0."""
    count = "--export=ALL,SLURM_RESTART_COUNT=1"
    job = site.submit("alice", "$exec cat /marker", count)
    assert site.slurm.ended(job)["ExitCode"] == "0:0", site.slurm.output("alice", job)
    assert site.slurm.output("alice", job) == "of the image\n"
    job = site.submit("alice", "echo goes on", count, comment="bootseer=NONE")
    assert site.slurm.ended(job)["ExitCode"] == "0:0"
    said = site.slurm.output("alice", job).splitlines()
    assert (len(said), said[-1]) == (2, "goes on"), said
    assert "bad image reference 'NONE'" in said[0]  # by the TaskProlog


def test_two_users_on_one_node_and_broken_settings_in_the_epilog(site: Site) -> None:
    hold = '$exec sh -c "cat /marker; while [ ! -e go ]; do sleep 0.2; done"'
    first = site.submit("alice", f"{hold}; exit 3")
    site.says("alice", first, "of the image")
    others = f"{JOBS}/{first}.0/rootfs"
    second = site.submit("bob", f"SLURM_JOB_ID={first} $exec id; echo $?; $exec --image {others} id; echo $?\n{hold}")
    site.says("bob", second, "of the image")
    said = site.slurm.output("bob", second).splitlines()
    assert ([said[1], said[3]], len(said)) == (["77", "77"], 5), said
    assert all("another user's" in line for line in (said[0], said[2]))
    site.slurm.run("head", ["scancel", second])
    assert site.slurm.ended(second)["JobState"] == "CANCELLED"
    until(lambda: f"{second}.0" not in site.left("n1"), WAIT, "the end of the second job's image", step=0.2)
    assert f"{others} " in site.left("n1")
    good = site.settings.read_text()
    try:
        site.settings.write_text("store = [nonsense\n")
        (site.slurm.home("alice") / "go").touch()
        assert site.slurm.ended(first)["ExitCode"] == "3:0"
        site.clean()
    finally:
        site.settings.write_text(good)


def test_images_through_the_node_daemon(site: Site) -> None:
    """Two users' jobs; the daemon is killed under them, and another one has what it mounted unmounted."""
    slurm = site.slurm

    def kill(number: str) -> None:
        slurm.run("n1", ["kill", number, str(site.daemon()["pid"])])
        process.wait(WAIT)

    process = site.serve()
    for user in ("alice", "bob"):  # of another test
        (slurm.home(user) / "go").unlink(missing_ok=True)
    try:
        hold = '$exec sh -c "cat /marker; while [ ! -e go ]; do sleep 0.2; done; cat /marker"; $exec cat /marker'
        jobs = {user: site.submit(user, hold) for user in ("alice", "bob")}
        for user, job in jobs.items():
            site.says(user, job, "of the image")
            assert slurm.run("n1", ["sh", "-c", f"ls -A {JOBS}/{job}.0/rootfs"]) == ""
        assert site.daemon()["mounts"] == 2
        kill("-9")
        process = site.serve()
        for user in jobs:
            (slurm.home(user) / "go").touch()
        for user, job in jobs.items():
            assert slurm.ended(job)["ExitCode"] == "0:0", slurm.output(user, job)
            assert slurm.output(user, job) == 3 * "of the image\n"
        site.clean()
        assert site.daemon()["mounts"] == 0
    finally:
        for user in ("alice", "bob"):
            (slurm.home(user) / "go").unlink(missing_ok=True)
        kill("-TERM")


def test_a_job_that_is_requeued_after_the_death_of_a_node(site: Site) -> None:
    """The Epilog of the first attempt, however late, leaves the image of the second alone."""
    slurm = site.slurm
    script = """
        export attempt=${SLURM_RESTART_COUNT:-0}
        srun $exec sh -c 'echo attempt $attempt; while [ ! -e go2 ]; do sleep 0.2; done; cat /marker'"""
    job = site.submit("alice", script, "--nodes=2", "--requeue", "--open-mode=append", without="n4")
    until(lambda: slurm.output("alice", job).count("attempt 0") == 2, WAIT, "the first attempt", step=0.1)
    slurm.kill("n2")

    def again() -> bool:
        """Slurm lets a requeued job wait for two minutes, from the end of the Epilog on. It tells attempts apart by
        the second: a node that gets the next one in the same second does not run the Prolog."""
        slurm.run("head", ["scontrol", "update", f"jobid={job}", "starttime=now+3"], check=False)
        until(lambda: slurm.job(job)["JobState"] == "RUNNING" and slurm.job(job)["Restarts"] == "1", 15, step=0.2)
        return True

    until(again, WAIT, "the second attempt", step=0.5)
    until(lambda: f"{job}.0" not in site.left("n1"), WAIT, "the Epilog of the first attempt", step=0.2)
    until(lambda: slurm.output("alice", job).count("attempt 1") == 2, WAIT, "the second attempt", step=0.1)
    began = slurm.run("n1", ["cat", f"{JOBS}/{job}.1/began"])
    # a late Epilog of the attempt before: it began before this one's Prolog did
    late = ["env", f"SLURM_JOB_ID={job}", "SLURM_JOB_RESTART_COUNT=1", sys.executable, "-I", "-m"]
    slurm.run("n1", [*late, "bootseer.slurm.hooks", "epilog", "60", f"{float(began) - 0.01}"])
    assert f"{JOBS}/{job}.1/rootfs " in site.left("n1")
    (slurm.home("alice") / "go2").touch()
    assert slurm.ended(job)["JobState"] == "COMPLETED"
    assert slurm.output("alice", job).count("of the image") == 2
    slurm.boot()
    site.clean()


def test_an_image_that_is_not_there_and_a_comment_that_is_not_understood(site: Site) -> None:
    """The job says why, and no node is drained."""
    for comment, said in (
        (f"bootseer={site.registry}/team/none:v1", "team/none:v1"),
        (
            f"bootseer={site.registry}/team/plain:v1",
            f"is not converted in store {site.slurm.root}/store; run bootseer image convert {site.registry}/team/plain",
        ),
        (
            f"bootseer={site.registry}/team/small:v1 bootseer.user=x",
            "'bootseer.user=x' in the job's comment is not known",
        ),
        ("bootseer=docker-archive:/etc/shadow", "is no image in a registry"),
    ):
        job = site.submit("bob", "echo goes on; $exec id", comment=comment)
        assert site.slurm.ended(job)["ExitCode"] == "66:0"
        lines = site.slurm.output("bob", job).splitlines()
        assert (len(lines), lines[1]) == (3, "goes on"), lines
        for line in (lines[0], lines[2]):  # by the TaskProlog, by exec
            assert said in line
    site.clean()


def test_a_job_whose_number_an_earlier_job_had_gets_its_own_image(site: Site) -> None:
    """The controller lost its state, and with it the Epilog of the first one."""

    def hook(verb: str, user: int) -> None:
        comment = f"bootseer={site.registry}/team/small:v1"
        words = [f"SLURM_JOB_ID=90000 SLURM_JOB_UID={user} SLURM_JOB_COMMENT={comment}", str(site.hooks / verb)]
        site.slurm.run("n3", ["sh", "-c", " ".join(words)])

    script = f"SLURM_JOB_ID=90000 {BOOTSEER} exec cat /marker"
    hook("prolog", 5001)
    assert site.slurm.run("n3", ["sh", "-c", script], "alice") == "of the image"
    hook("prolog", 5002)
    assert "another user's" in site.slurm.run("n3", ["sh", "-c", script], "alice", check=False)
    assert site.slurm.run("n3", ["sh", "-c", script], "bob") == "of the image"
    hook("epilog", 5002)
    site.clean()
    words = [*BOOTSEER.split(), "node", "uninstall", "--slurm", f"--slurm-dir={site.hooks}"]
    assert "remove the line Prolog=... from slurm.conf" in site.slurm.run("n3", words, check=False)


def test_a_slow_and_a_killed_prolog(site: Site) -> None:
    with socket.create_server((site.slurm.host, 0)) as silent:
        comment = f"bootseer={site.slurm.host}:{silent.getsockname()[1]}/team/small:v1"
        try:
            site.install(15)  # the client of the registry itself waits for longer than what is left of that
            job = site.submit("alice", "$exec id", comment=comment)
            assert site.slurm.ended(job)["ExitCode"] == "66:0"
            said = site.slurm.output("alice", job)
            assert "not mounted within 15 s" in said or "not ready in time" in said, (
                said
            )  # the latter on a busy machine
        finally:
            site.install()
        job = site.submit("alice", "$exec id", comment=comment)
        until(lambda: f"{job}.0" in site.left("n1"), WAIT, "the Prolog", step=0.1)
        site.slurm.run("head", ["scancel", job])
        assert site.slurm.ended(job)["JobState"] == "CANCELLED"
        site.clean()


BEFORE_OVERLAY, BEFORE_RELEASE = "image.mount.before-overlay", "image.mount.before-release"


@pytest.mark.parametrize(
    ("step", "dies"),
    [
        (BEFORE_OVERLAY, "node"),
        (BEFORE_OVERLAY, "all"),
        (BEFORE_OVERLAY, "worker"),
        (BEFORE_RELEASE, "all"),
    ],
)
def test_a_node_that_dies_in_the_prolog(site: Site, step: str, dies: str) -> None:
    """Its power fails, or its processes are killed. Its next job has its image, whatever is left on the disk."""
    slurm = site.slurm
    slurm.run("n1", ["rm", "-rf", "/var/spool/bootseer"])
    with site.faults(f"{step}=stop"):
        job = site.submit("alice", "echo goes on; $exec cat /marker")
        until(lambda: site.stopped("n1"), WAIT, f"the Prolog to come to {step}", step=0.1)
        if dies == "node":
            slurm.kill("n1")
            slurm.run("head", ["scancel", job])
            slurm.boot()
        else:
            slurm.run("n1", ["kill", "-9", *(site.stopped("n1") if dies == "worker" else site.processes("n1"))])
            assert slurm.ended(job)["ExitCode"] == "66:0", slurm.output("alice", job)
            *told, on, refused = slurm.output("alice", job).splitlines()
            why = "preparing the image failed" if dies == "worker" else f"the image of job {job} was not ready in time"
            assert on == "goes on"
            assert all(why in line for line in (refused, *told))
            assert len(told) == (dies == "worker")
    site.clean()
    job = site.submit("alice", "$exec cat /marker")
    assert slurm.ended(job)["ExitCode"] == "0:0", slurm.output("alice", job)
    assert slurm.output("alice", job) == "of the image\n"
    site.clean()
    until(lambda: not site.processes("n1"), WAIT, "the end of all processes", step=0.2)


def test_a_node_daemon_that_is_killed_in_the_prolog(site: Site) -> None:
    """The job says why it has no image, the node is not drained, and the next daemon ends what was begun."""
    slurm = site.slurm
    process = site.serve(f"{BEFORE_RELEASE}=stop")
    job = site.submit("alice", "echo goes on; $exec cat /marker")
    until(lambda: site.stopped("n1"), WAIT, "the mount", step=0.1)
    slurm.run("n1", ["kill", "-9", str(site.daemon()["pid"])])
    process.wait(WAIT)
    assert slurm.ended(job)["ExitCode"] == "66:0", slurm.output("alice", job)
    told, on, refused = slurm.output("alice", job).splitlines()
    assert on == "goes on"
    assert all(
        "the node daemon at /run/bootseer-node/node.sock ended before it answered" in it for it in (told, refused)
    )
    process = site.serve()
    try:
        job = site.submit("alice", "$exec cat /marker")
        assert slurm.ended(job)["ExitCode"] == "0:0", slurm.output("alice", job)
        site.clean()
        assert site.daemon()["mounts"] == 0
    finally:
        slurm.run("n1", ["kill", str(site.daemon()["pid"])])
        process.wait(WAIT)


def test_a_node_without_room_for_the_folder_of_a_job(site: Site) -> None:
    """It is not drained, and its next job has an image as soon as there is room."""
    slurm = site.slurm
    slurm.run("n1", ["sh", "-c", "mount -o remount,size=8m /run && ! cat /dev/zero > /run/filler"])
    try:
        job = site.submit("alice", "echo goes on; $exec cat /marker")
        assert slurm.ended(job)["ExitCode"] == "66:0", slurm.output("alice", job)
        on, refused = slurm.output("alice", job).splitlines()
        assert on == "goes on"
        assert f"job {job} has no image here; " in refused
        assert refused.endswith("and room in /run")
    finally:
        slurm.run("n1", ["sh", "-c", "rm /run/filler; mount -o remount,size=50% /run"])
    site.clean()
    job = site.submit("alice", "$exec cat /marker")
    assert slurm.ended(job)["ExitCode"] == "0:0", slurm.output("alice", job)
    site.clean()


def test_uninstalled(site: Site) -> None:
    """Nothing of it is left, and jobs run as before. The last test of this module."""
    slurm = site.slurm
    words = [*BOOTSEER.split(), "node", "uninstall", "--slurm", f"--slurm-dir={site.hooks}"]
    job = site.submit("alice", "$exec cat /marker")
    assert slurm.ended(job)["ExitCode"] == "0:0", slurm.output("alice", job)
    site.clean()
    slurm.configure()
    until(lambda: "removed" in slurm.run("n1", words, check=False), WAIT, "that Slurm has read its settings", step=0.5)
    assert not site.hooks.exists()
    job = site.submit("alice", "$exec cat /marker; echo goes on")
    assert slurm.ended(job)["ExitCode"] == "0:0"
    refused, on = slurm.output("alice", job).splitlines()
    assert ("has no image here" in refused, on) == (True, "goes on")
    assert slurm.states() == ["idle"] * 4
    assert not any(map(site.left, slurm.names))
    assert not any(map(site.processes, slurm.names))


def test_ranks_of_a_step_share_what_they_compile_with_the_next_job(site: Site) -> None:
    first = site.submit("alice", RANKS, "--ntasks=2")
    site.says("alice", first, "the end")
    second = site.submit("alice", RANKS, "--ntasks=2", without="n1,n[3-4]")
    site.says("alice", second, "the end")
    said = site.slurm.output("alice", second)
    assert (said.count("compiled\n"), said.count("restored"), said.count("compiled 0")) == (2, 2, 2), said
    site.clean()


def test_starts_of_a_step_share_what_they_compile_with_the_next_job(site: Site) -> None:
    home = site.slurm.home("alice")
    (home / "starts.toml").write_text(START.replace("IMAGE", f"{site.registry}/team/small:v1"))
    for number, without in enumerate(("n[2-4]", "n1,n[3-4]")):
        job = site.submit("alice", STARTS.replace("SETTINGS", str(site.settings)), "--ntasks=2", without=without)
        site.says("alice", job, "the end")
        said = site.slurm.output("alice", job)
        found = [json.loads((home / f"{job}-{rank}.json").read_text()) for rank in range(2)]
        assert [one["exit_code"] for one in found] == [0, 0], said
        assert said.count("compiled\n") == 2 * number, said
        assert max(one["caches"]["restored"] for one in found) == 2 * number, (found, said)
    site.clean()
