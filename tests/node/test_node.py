"""The node daemon: images for ordinary users of a node, and nothing more than images."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from bootseer import __version__, image, oci, stripefs
from bootseer.config import Config
from bootseer.errors import (
    BootseerError,
    ConfigError,
    FullError,
    NotFoundError,
    NotWritableError,
    PrivilegeError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.image.lookup import converted
from bootseer.kernel import mount as mounts
from bootseer.kernel.child import close_others
from bootseer.node import access, client, places
from bootseer.node.daemon import Daemon
from bootseer.node.door import MAX_CONNECTIONS, SO_PEERPIDFD, Client
from bootseer.node.userimage import UserImage
from bootseer.objects import open_store
from bootseer.oci.credentials import Logins, given
from support import forked
from support.images import Member, folder, programs, tar_of
from support.layouts import push, write_layout
from support.nodedaemon import NodeDaemon, User, command, listens
from support.registry import PASSWORD, USER, DockerRegistry
from support.waits import later, until

T = TypeVar("T")

pytestmark = [pytest.mark.root, pytest.mark.registry]

ALICE, BOB = 65534, 1
"""Users that every node has: nobody and daemon."""
NOISE = os.urandom(6_000_000)
_PROGRAMS = ("id", "sh", "cat", "rm", "mkdir", "sleep", "sha256sum")


class Site:
    """A registry that wants a login, an open one, an image in both that was converted from the first, and ``free``."""

    def __init__(self, folder: Path, private: str, public: str) -> None:
        self.folder = folder
        self.ref, self.copy, self.free = f"{private}/team/x:v1", f"{public}/copy/x:v1", f"{public}/free:v1"
        self.wordy = f"{public}/wordy:v1"
        """Its configuration is larger than an answer of the daemon."""
        self.store = str(folder / "store")

    def login(self, uid: int, password: str = PASSWORD) -> dict[str, str]:
        """The logins of a user, in files that are this user's alone."""
        place = self.folder / f"login-{uid}-{len(list(self.folder.iterdir()))}"
        place.mkdir(mode=0o700)
        auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
        (place / "config.json").write_text(json.dumps({"auths": {self.ref.partition("/")[0]: {"auth": auth}}}))
        for path in (place / "config.json", place):
            os.chown(path, uid, uid)
        return {"DOCKER_CONFIG": str(place)}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="bootseer-site-", dir="/var/tmp") as path:
        os.chmod(path, 0o755)  # logins are the users' own, and read by them
        yield from _site(Path(path))


def _site(base: Path) -> Iterator[Site]:
    before = os.environ.get("DOCKER_CONFIG")
    with DockerRegistry(login=True) as private, DockerRegistry() as public:
        site = Site(base, private.address, public.address)
        members = [
            one if one.name != "bin/id" else Member("bin/id", data=one.data, mode=0o4755)
            for one in programs(*_PROGRAMS)
        ]
        (base / "0.tar").write_bytes(tar_of([*members, folder("data"), Member("data/noise", data=NOISE)]))
        write_layout(base / "layout", [base / "0.tar"], oci.ContainerConfig(env=("FROM_IMAGE=yes",)), "v1")
        os.environ.update(site.login(0))
        try:
            push(f"oci:{base}/layout:v1", site.ref)
            push(f"oci:{base}/layout:v1", site.copy)
            (base / "1.tar").write_bytes(tar_of([Member("free", data=b"for all")]))
            write_layout(base / "layout1", [base / "1.tar"], oci.ContainerConfig(), "v1")
            push(f"oci:{base}/layout1:v1", site.free)
            write_layout(base / "layout2", [base / "1.tar"], oci.ContainerConfig(env=("X=" + 200_000 * "x",)), "v1")
            push(f"oci:{base}/layout2:v1", site.wordy)
            for ref in (site.ref, site.free, site.wordy):
                image.ensure(ref, site.store, work_dir=base / "work")
        finally:
            del os.environ["DOCKER_CONFIG"]
            if before is not None:
                os.environ["DOCKER_CONFIG"] = before
        yield site


@pytest.fixture
def daemon(place: Path, site: Site) -> Iterator[NodeDaemon]:
    running = NodeDaemon(place, site.store)
    try:
        running.start()
        yield running
        if running.serves:
            for one in client.mounts(config=running.config):
                with contextlib.suppress(BootseerError):  # it ends by itself
                    client.unmount(one.id, config=running.config)
            until(lambda: not running.left(), 60.0, f"the end of {running.left()}")
    finally:
        running.kill()


def gone(daemon: NodeDaemon) -> None:
    until(lambda: not client.mounts(config=daemon.config), 60.0, f"the end of the mounts ({daemon.log})")
    until(lambda: not daemon.left(), 10.0, f"the end of {daemon.left()}")


def attempt_harm(root: str) -> list[str]:
    """What the owner of a mount could change around it."""
    above, done = os.path.dirname(root), []
    for name, call in {
        "chmod": lambda: os.chmod(above, 0o777),
        "rmdir": lambda: os.rmdir(root),
        "rename": lambda: os.rename(root, f"{root}2"),
        "make": lambda: os.mkdir(f"{above}/x"),
        "write": lambda: open(f"{root}/data/new", "w").close(),
    }.items():
        try:
            call()
            done.append(name)
        except OSError:
            pass
    return done


def run(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def test_a_user_mounts_what_the_own_login_may_read(daemon: NodeDaemon, site: Site) -> None:
    config = daemon.config
    with User(ALICE, site.login(ALICE)) as alice, User(BOB) as bob:
        code, said = alice.do(command, ["image", "mount", site.ref], config)
        assert code == 0, said
        root = said.strip()
        assert alice.do(Path.read_bytes, Path(root, "data/noise")) == NOISE
        assert os.stat(f"{root}/bin/id").st_mode & 0o4000
        assert alice.do(run, f"{root}/bin/id", "-u") == str(ALICE)
        for flag in (os.ST_NOSUID, os.ST_NODEV):
            assert os.statvfs(root).f_flag & flag
        assert os.stat(f"{root}/bin/id").st_uid == ALICE
        assert alice.do(attempt_harm, root) == []
        assert mounts.is_mounted(root)
        (mine,) = alice.do(client.mounts, config=config)
        assert (mine.folder, mine.uid, mine.state, mine.reference) == (root, ALICE, "mounted", site.ref)
        code, said = alice.do(command, ["image", "status"], config)
        assert (code, root in said, "mounted" in said, "nobody" in said) == (0, True, True, True)
        code, said = command(["image", "status", "--json"], config)  # as root, whose mount it is made of
        told = {one["user"]: (one["folder"], time.time() - one["since"] < 60) for one in json.loads(said)}
        assert (code, told["nobody"], told["root"][1]) == (0, (root, True), True), said
        alice.do(client.ready, mine.id, config=config)
        assert alice.do(client.status, mine.id, config=config).digest

        for path in (root, f"{daemon.config.node_dir}/mounts/{mine.id}/closed/tree"):
            with pytest.raises(PermissionError):
                bob.do(os.listdir, path)
        with pytest.raises(PermissionError):
            alice.do(os.listdir, path)
        assert bob.do(client.mounts, config=config) == []
        for call in (client.unmount, client.ready, client.status):
            with pytest.raises(NotFoundError, match=f"user {BOB} has no mount"):
                bob.do(call, mine.id, config=config)
        with pytest.raises(PrivilegeError, match="denies access"):
            bob.do(client.mount_image, site.ref, config=config)
        # The same image where everybody may read it: it was not converted from there.
        with pytest.raises(PrivilegeError, match="denies access"):
            bob.do(client.mount_image, site.copy, config=config)
        with pytest.raises(PrivilegeError, match="cannot mount for user"):
            bob.do(client.mount_image, site.ref, config=config, user=ALICE)
        with pytest.raises(PrivilegeError, match="needs root"):
            bob.do(client.drain, config=config)
        with pytest.raises(NotFoundError):
            alice.do(client.mount_image, site.ref.replace("x:v1", "y:v1"), config=config)
        with pytest.raises(UnsupportedError, match="the configuration of"):
            alice.do(client.mount_image, site.wordy, config=config)
        with pytest.raises(UnsupportedError, match="images of registries"):
            alice.do(client.mount_image, f"oci:{site.folder}/layout:v1", config=config)
        until(lambda: [one.id for one in client.mounts(config=config)] == [mine.id], 30.0)

        second = alice.do(client.mount_image, site.copy, config=config)
        code, said = alice.do(command, ["unmount", second.folder], config)
        assert code == 0, said
        assert [one.id for one in client.mounts(config=config)] == [mine.id]
    gone(daemon)  # with the session of who asked
    assert f"user {BOB}: mount failed" in daemon.log.read_text()


def profiles(site: Site) -> list[str]:
    return [info.key for info in open_store(site.store).list("profiles")]


def test_doctor_says_what_a_start_of_this_user_gets(daemon: NodeDaemon, site: Site, place: Path) -> None:
    """With the daemon images are lazy without root; and whether this user's logins are good for them."""
    store = {"BOOTSEER_STORE": site.store}
    with User(ALICE, {**site.login(ALICE), **store}) as alice, User(BOB, store) as bob:

        def examined(user: User, uid: int) -> tuple[int, dict[str, dict[str, str]]]:
            own = place / f"own-{uid}"
            own.mkdir(exist_ok=True)
            os.chown(own, uid, uid)
            config = msgspec.structs.replace(daemon.config, cache_dir=str(own / "c"), state_dir=str(own / "s"))
            code, said = user.do(command, ["doctor", "--json"], config)
            assert PASSWORD not in said
            return code, {one["name"]: one for one in json.loads(said)["checks"]}

        for user, uid, status in ((alice, ALICE, "ok"), (bob, BOB, "limited")):
            code, found = examined(user, uid)
            assert code == 0, found
            for name in ("node daemon", "lazy images", "runtime"):
                assert found[name]["status"] == "ok", found[name]
            assert found["registries"]["status"] == status, found["registries"]
        assert f"denies access to image {site.ref.partition(':v1')[0]}" in found["registries"]["detail"]
        assert "docker login" in found["registries"]["fix"]
        daemon.stop()
        code, found = examined(alice, ALICE)
        assert (code, found["node daemon"]["status"], found["lazy images"]["status"]) == (77, "missing", "missing")


def test_a_user_names_no_profile_of_others(daemon: NodeDaemon, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads is published, by the daemon's rights, as its own alone, and within a budget."""
    monkeypatch.setenv("BOOTSEER_BACKGROUND_FILL", "false")  # a tree that is whole on the node is not recorded
    daemon.stop()
    daemon.start()
    before = set(profiles(site))
    names = ["llama-of-bob", "default", *(f"n{number}" for number in range(8))]
    with User(ALICE, site.login(ALICE)) as alice:
        for name in names:
            mine = alice.do(client.mount_image, site.ref, config=daemon.config, profile=name)
            assert alice.do(Path.read_bytes, Path(mine.folder, "data/noise")) == NOISE
            alice.do(client.ready, mine.id, config=daemon.config)
            alice.do(client.unmount, mine.id, config=daemon.config)
    made = sorted(set(profiles(site)) - before)
    assert made
    assert {(one.split("/")[1], one.split("/")[3]) for one in made} == {("owned", f"uid-{ALICE}")}, made
    assert len({one.split("/")[4] for one in made}) == 8


class Home:
    """A folder of user ``uid`` below ``place``, and how this user runs ``bootseer``."""

    def __init__(self, place: Path, config: Config, uid: int, login: dict[str, str]) -> None:
        self.folder = place / f"home-{uid}"
        self.folder.mkdir()
        os.chown(self.folder, uid, uid)
        place.chmod(0o755)
        known = {k: v for k, v in os.environ.items() if not k.startswith(("BOOTSEER_", "DOCKER_CONFIG"))}
        self.env = {
            **known,
            **login,
            "HOME": str(self.folder),
            "BOOTSEER_NODE_DIR": config.node_dir,
            "BOOTSEER_STORE": config.store,
            "BOOTSEER_CACHE_DIR": f"{self.folder}/cache",
            "BOOTSEER_STATE_DIR": f"{self.folder}/state",
        }
        self._uid = uid

    def start(self, *words: str) -> subprocess.Popen[str]:
        return forked.Popen(
            [sys.executable, "-m", "bootseer.cli.main", *words], env=self.env, cwd="/", text=True, stdout=-1, stderr=-1,
            user=self._uid, group=self._uid, extra_groups=[],
        )  # fmt: skip

    def run(self, *words: str) -> tuple[int, str, str]:
        with self.start(*words) as process:
            said, errors = process.communicate(timeout=120)
            return process.returncode, said, errors

    def left(self) -> list[str]:
        return [str(path) for path in self.folder.glob("cache/starts/*")]


CHANGE = """
    id -u; echo $FROM_IMAGE $GIVEN; cd /; rm -r /data; mkdir /data /new; echo mine > /data/own; cat /data/own
    test ! -e /root-only && test -e /proc/self/fd && test ! -e "$HOME/x"; cat /shown/file; echo > /shown/no; exit 7"""


def test_a_user_runs_a_command_in_an_image(daemon: NodeDaemon, site: Site, place: Path) -> None:
    alice, bob = (Home(place, daemon.config, uid, site.login(uid)) for uid in (ALICE, BOB))
    bob.env.update(DOCKER_CONFIG="/nonexistent")
    (alice.folder / "file").write_text("shown\n")
    words = ["image", "run", "-e", "GIVEN=1", "-v", f"{alice.folder}:/shown:ro", site.ref, "sh", "-c", CHANGE]
    wanted = f"{ALICE}\nyes 1\nmine\nshown\n"
    for _ in range(2):  # nothing lasts
        code, said, errors = alice.run(*words)
        assert (code, said) == (7, wanted), errors
        assert len(errors.splitlines()) == 1, errors  # of the shell, which may not write
    assert alice.run("image", "run", site.ref, "nonesuch")[0] == NotFoundError.exit_code
    code, _, errors = bob.run("image", "run", site.ref, "id")
    assert (code, "denies access" in errors) == (PrivilegeError.exit_code, True), errors
    code, _, errors = alice.run("image", "run", "--network", "none", site.ref, "id")
    assert (code, "need root" in errors) == (PrivilegeError.exit_code, True), errors
    begin, loop = ["image", "run", "--stop-grace", "1", site.ref, "sh", "-c"], "echo on; while :; do sleep 0.1; done"
    for trap, code in (("trap 'exit 9' TERM", 9), (":", 128 + signal.SIGTERM), ("trap '' TERM", 128 + signal.SIGKILL)):
        with alice.start(*begin, f"{trap}; {loop}") as one:
            assert one.stdout is not None
            assert one.stdout.readline() == "on\n"
            one.terminate()
            assert one.wait(60) == code
    with alice.start(*begin, "echo $$; exec sleep 1000") as one:
        assert one.stdout is not None
        pid = int(one.stdout.readline())
        one.kill()
        until(lambda: not os.path.exists(f"/proc/{pid}"), 30.0, "the end of the command with who runs it")
    gone(daemon)
    daemon.kill()
    code, said, errors = alice.run(*words)
    assert (code, said) == (7, wanted), errors
    assert "extracting all of" in errors
    assert alice.left() == []


def test_a_command_reads_on_while_daemons_come_and_go(daemon: NodeDaemon, site: Site, place: Path) -> None:
    alice = Home(place, daemon.config, ALICE, site.login(ALICE))
    script = "echo on; while [ ! -e /shown/stop ]; do sha256sum /data/noise || exit 1; sleep 0.05; done"
    with alice.start("image", "run", "-v", f"{alice.folder}:/shown", site.ref, "sh", "-c", script) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "on\n"
        daemon.kill()
        daemon.start()
        client.drain(config=daemon.config)
        with pytest.raises(UnavailableError, match="drained"):
            client.mount_image(site.free, config=daemon.config, job="1")
        (alice.folder / "stop").touch()
        said, errors = reader.communicate(timeout=60)
        assert reader.returncode == 0, errors
    assert {line.split()[0] for line in said.splitlines()} == {hashlib.sha256(NOISE).hexdigest()}
    assert daemon.process is not None
    assert daemon.process.wait(60) == 0  # the command has ended its mount
    assert not daemon.left()


@pytest.mark.usefixtures("open_device")
@pytest.mark.parametrize("mounts", [False, True], ids=["", "mounts"])
@pytest.mark.parametrize("served", [True, False], ids=["daemon", "extracted"])
def test_a_user_starts_a_job(daemon: NodeDaemon, site: Site, place: Path, served: bool, mounts: bool) -> None:
    """Image by the daemon, environment and checkpoint with the user's own rights; the second start restores."""
    alice = Home(place, daemon.config, ALICE, site.login(ALICE))
    alice.env.update(BOOTSEER_STORE=f"{alice.folder}/store")
    if not served:
        daemon.kill()
        shutil.copytree(daemon.config.store, alice.folder / "store")
        for path in [alice.folder / "store", *(alice.folder / "store").rglob("*")]:
            os.chown(path, ALICE, ALICE)
    fs = stripefs.open_fs(str(alice.folder / "saved"))
    (place / "weights").write_bytes(NOISE)
    fs.put(place / "weights", "last/weights")
    fs.commit("last")
    for path in (alice.folder / "saved").rglob("*"):
        os.chown(path, ALICE, ALICE)
    os.chown(alice.folder / "saved", ALICE, ALICE)
    job = alice.folder / "job.toml"
    train = "cat /env/made; sha256sum /checkpoint/weights; touch /checkpoint/no 2>/dev/null; test -e /changed; exit $?"
    text = f"""
        [job]
        name = "small"
        command = ["sh", "-c", "{train}"]
        gpus = 8
        [image]
        ref = "{site.ref}"
        [env]
        command = ["sh", "-c", "echo set up; echo 1 > /changed; echo made > /env/made"]
        targets = ["/env"]
        [checkpoint]
        url = "{alice.folder}/saved/last"
        path = "/checkpoint"
        """
    shown = "".join(f'[[mounts]]\nsource = "{alice.folder}/{one}"\ntarget = "/{one}"\n' for one in ("a", "b"))
    for name in ("a", "b"):
        (alice.folder / name).mkdir()
    job.write_text(text + (shown if mounts else ""))
    line = f"{hashlib.sha256(NOISE).hexdigest()}  /checkpoint/weights\n"
    for start, (said, how) in enumerate((("set up\n", "ran-and-published"), ("", "restored-unpack"))):
        alice.env |= {"BOOTSEER_NODE": f"n{start}", "SLURM_JOB_ID": f"{start + 7}", "SLURM_PROCID": "0"}
        code, out, errors = alice.run("run", str(job), "--no-card", "--summary", str(alice.folder / "summary"))
        assert (code, out) == (1, f"{said}made\n{line}"), errors  # 1: what is changed elsewhere does not last
        done = json.loads((alice.folder / "summary").read_text())
        ways = (done["image"]["how"], done["env"]["how"], done["checkpoint"]["how"])
        assert ways == ("lazy" if served else "extracted", how, "striped"), errors
        assert alice.left() == []
        if served:
            gone(daemon)
    if not served:
        return
    job.write_text(text.replace('"/env"', '"/data"'))
    code, _, errors = alice.run("run", str(job))
    assert (code, "image has files in /data" in errors) == (ConfigError.exit_code, True), errors
    job.write_text(text.replace("gpus = 8", 'gpus = "all"'))
    assert alice.run("run", str(job))[0] == UnsupportedError.exit_code
    gone(daemon)


@pytest.mark.usefixtures("open_device")
@pytest.mark.parametrize("closed", ["folder", "store", "file"])
@pytest.mark.parametrize("latest", [False, True])
def test_a_checkpoint_that_another_user_owns(
    daemon: NodeDaemon, site: Site, place: Path, closed: str, latest: bool
) -> None:
    """One line ends the start. The newest is not passed over, as one that is not complete is: steps would be lost."""
    alice = Home(place, daemon.config, ALICE, site.login(ALICE))
    store, checkpoint = place / "bobs", place / "bobs/last-2"
    fs = stripefs.open_fs(str(store))
    (place / "weights").write_bytes(NOISE[:1000])
    for name in ("earlier-1", "last-2"):
        fs.put(place / "weights", f"{name}/weights")
        fs.commit(name)
    for path in [store, *store.rglob("*")]:
        os.chown(path, BOB, BOB)
    (place / "new/lost+found").mkdir(mode=0o700, parents=True)  # of a file system, as it is before the first save
    code, _, errors = alice.run("fs", "ls", "--latest", str(place / "new"))
    assert (code, "no complete checkpoint" in errors) == (NotFoundError.exit_code, True), errors
    {"folder": checkpoint, "store": store, "file": checkpoint / "weights"}[closed].chmod(0o700)
    job = alice.folder / "job.toml"
    job.write_text(f"""
        [job]
        name = "small"
        command = ["sh", "-c", "echo trains; cat /checkpoint/weights"]
        [image]
        ref = "{site.ref}"
        [checkpoint]
        url = "{store if latest else checkpoint}"
        path = "/checkpoint"
        latest = {str(latest).lower()}
        """)
    code, out, errors = alice.run("run", str(job), "--no-card")
    assert (code, out, errors.count("\n")) == (NotWritableError.exit_code, "", 1), errors
    what = store if latest and closed == "store" else checkpoint / ("weights" if closed == "file" else "COMMIT")
    assert re.search(f"(open|list) {what}: Permission denied; check its owner and mode", errors), errors
    assert alice.left() == []
    gone(daemon)


def read_on(path: str, stop: str) -> int:
    """Read the file again and again, past the page cache, until ``stop`` exists; how often it was right."""
    count = 0
    while not count or not os.path.exists(stop):
        fd = os.open(path, os.O_RDONLY)
        try:
            data = b"".join(os.pread(fd, 1 << 20, at) for at in range(0, len(NOISE), 1 << 20))
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        assert data == NOISE
        count += 1
    return count


def root(call: Callable[..., T], *args: object) -> T:
    return call(*args)


def test_a_killed_daemon_costs_no_reader_anything(daemon: NodeDaemon, site: Site, place: Path) -> None:
    config, login = daemon.config, site.login(ALICE)
    with User(ALICE, login) as reader, User(ALICE, login) as quitter:
        job = reader.do(client.mount_image, site.ref, config=config, job="17.0")
        own = reader.do(client.mount_image, site.ref, config=config)
        quitter.do(client.mount_image, site.ref, config=config)
        with pytest.raises(PrivilegeError, match="denies access"):
            client.mount_image(site.ref, config=config, job="17.0", user=BOB)
        for_bob = client.mount_image(site.free, config=config, job="17.0", user=BOB)
        assert for_bob.uid == BOB
        reader.start(read_on, f"{own.folder}/data/noise", str(place / "stop"))
        daemon.kill()
        assert not listens(config)
        with pytest.raises(client.AbsentError, match="no node daemon"):
            client.mounts(config=config)
        quitter.end()
        daemon.start()
        until(lambda: len(client.mounts(config=config)) == 3, 60.0, "the end of the session that ended meanwhile")
        assert {one.id for one in client.mounts(config=config)} == {job.id, own.id, for_bob.id}
        time.sleep(0.2)
        (place / "stop").touch()
        assert reader.result() > 0
        assert client.node(config=config).mounts == 3

        client.drain(config=config)
        with pytest.raises(UnavailableError, match="drained"):
            reader.do(client.mount_image, site.ref, config=config)
        for ask, ends in ((reader.do, job), (root, for_bob)):  # each user's own ones, and all of the job for root
            code, said = ask(command, ["unmount", "--for-job", "17.0"], config)
            assert (code, said) == (0, f"unmounted {ends.folder}\n")
        assert daemon.process is not None
        assert daemon.process.poll() is None
    assert daemon.process.wait(60) == 0
    assert not daemon.left()
    assert not listens(config)


def test_a_daemon_killed_while_it_mounts(
    daemon: NodeDaemon, site: Site, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had mounted is read on, and what it was about to is ended by the next one."""
    step = "image.mount.before-release"
    config, login = daemon.config, site.login(ALICE)
    with User(ALICE, login) as reader, User(ALICE, login) as other:
        own = reader.do(client.mount_image, site.ref, config=config)
        reader.start(read_on, f"{own.folder}/data/noise", str(place / "stop"))
        daemon.kill()
        with monkeypatch.context() as patch:
            patch.setenv("BOOTSEER_FAULTS", f"{step}=stop")
            daemon.start()
        other.start(client.mount_image, site.ref, config=config, job="1")
        until(lambda: any(map(stopped, descendants(daemon.pid))), 60.0, f"step {step}")
        left = descendants(daemon.pid)
        daemon.kill()
        with pytest.raises(UnavailableError, match="ended before it answered"):
            other.result()
        until(lambda: not alive(left), 30.0, "the end of its processes")
        daemon.start()
        until(lambda: [one.id for one in client.mounts(config=config)] == [own.id], 60.0, "the end of the other mount")
        again = other.do(client.mount_image, site.ref, config=config, job="1")
        assert other.do(Path.read_bytes, Path(again.folder, "data/noise")) == NOISE
        client.unmount(again.id, config=config)
        (place / "stop").touch()
        assert reader.result() > 0
    gone(daemon)


def stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    return False


def send(config: Config, packet: bytes) -> str:
    """What the daemon answers to a packet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(30)
        sock.connect(f"{config.node_dir}/node.sock")
        sock.send(packet)
        return sock.recv(1 << 20).decode()


def crowd(config: Config, count: int) -> int:
    """Connect ``count`` times and say nothing, for as long as this process lives. How many of them were refused."""
    socks = []
    for _ in range(count):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(1)
        sock.connect(f"{config.node_dir}/node.sock")
        socks.append(sock)
    refused = 0
    for sock in socks[MAX_CONNECTIONS:]:
        refused += b"connections" in sock.recv(1 << 16)
    _kept.extend(socks)
    return refused


_kept: list[socket.socket] = []


def test_nothing_that_is_sent_breaks_it(daemon: NodeDaemon, site: Site) -> None:
    config = daemon.config
    start = b'{"version":1,"do":'
    bad = {
        b"[" * 8000: "understand",
        start + b'"node","id":' + b"[" * 7000: "understand",
        start + b'"node","else":{"a":[]}}': "understand",
        start + b'"mounts","id":"' + b"x" * 140_000 + b'"}': "too long",
        b"\xff\xfe": "understand",
        b'{"version":2,"do":"node"}': "version 2",
        start + b'"fl\\u001b\\ny"}': "cannot do",
        start + b'"unmount","id":"../../x\\n"}': "no mount",
        start + b'"mount","ref":"h:1/x:v1\\nroot: all is well"}': "reference",
        start + b'"mount","ref":"h:1/x","job":"a\\nb"}': "bad job",
        start + b'"mount","ref":"h:1/' + b"x" * 2000 + b'"}': "longer than",
        start + b'"mount","ref":"h:1/x","logins":{"LD_PRELOAD":"/x"}}': "logins cannot",
        start + b'"mount","ref":"h:1/x","user":123456789012345678901234}': "",
        start + b'"mount","ref":"127.0.0.1:1/x","user":4000000000,"job":"x"}': "no user 4000000000",
    }
    with User(BOB) as bob, User(ALICE, site.login(ALICE)) as alice:
        for packet, reason in bad.items():
            answer = send(config, packet)
            assert reason in answer, (packet[:40], answer)
            assert '"code"' in answer
        assert "too long" in bob.do(send, config, start + b'"mounts","id":"' + b"x" * 8200 + b'"}')
        with pytest.raises(PrivilegeError, match="only root asks"):
            bob.do(client.digest_with, oci.Reference.parse("h:1/x"), Logins(), config=config)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, pytest.raises(OSError, match="wrong type"):
            sock.connect(f"{config.node_dir}/node.sock")
        assert bob.do(crowd, config, MAX_CONNECTIONS + 4) == 4
        with pytest.raises(UnavailableError, match="connections"):
            bob.do(client.mounts, config=config)
        assert alice.do(client.mounts, config=config) == []
    gone(daemon)
    assert client.node(config=config).pid == daemon.pid
    log = daemon.log.read_text()
    assert "Traceback" not in log
    assert not any(line.startswith("root: all is well") for line in log.splitlines())


def fork_sleeper() -> int:
    """A child that has the connections of this process, and outlives it."""
    pid = os.fork()
    if not pid:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
        close_others(*(fd for fd in fds if os.path.islink(link := f"/proc/self/fd/{fd}") and is_socket(link)))
        time.sleep(300)
        os._exit(0)
    return pid


def is_socket(link: str) -> bool:
    return os.readlink(link).startswith("socket:")


def crowds(config: Config, uids: list[int]) -> int:
    """How many connections of ``uids`` are held, of which each makes as many as one user may have."""
    for uid in uids:
        os.seteuid(uid)
        for _ in range(MAX_CONNECTIONS):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(f"{config.node_dir}/node.sock")
            _kept.append(sock)
        os.seteuid(0)
    return client.node(config=config).connections - 1


def test_many_numbers_of_a_user_do_not_fill_it(daemon: NodeDaemon) -> None:
    """As rootless containers have: the daemon may have 1,024 descriptors, 640 connections would take 1,280."""
    daemon.kill()
    daemon.start("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))")
    with User(0) as many, User(BOB) as bob:
        assert many.do(crowds, daemon.config, [4_000_000_000 + number for number in range(40)]) == MAX_CONNECTIONS
        assert bob.do(client.node, config=daemon.config).pid == client.node(config=daemon.config).pid == daemon.pid


def queue(config: Config, count: int) -> int:
    """Connect ``count`` times to a daemon that does not accept, without waiting. How many find no place."""
    refused = 0
    for _ in range(count):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(f"{config.node_dir}/node.sock")
        except BlockingIOError:
            refused += 1
        _kept.append(sock)
    return refused


def test_a_flood_of_one_user_delays_others_little(daemon: NodeDaemon, site: Site) -> None:
    """There is a place in the queue for others, and the daemon goes before what it has started for whoever asks."""
    with User(ALICE) as alice, User(BOB) as bob:
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert alice.do(queue, daemon.config, 500) == 0
            bob.start(client.mount_image, site.free, config=daemon.config)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        made = bob.result()
        tree = places.tree_of(Path(daemon.config.node_dir, "mounts", made.id))
        server = image.attach(tree, daemon.config.state_dir).status().pid
        nice = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, server, daemon.pid)]
        assert nice == [nice[0], nice[0], -10]


def hold(path: str) -> int:
    return os.open(path, os.O_RDONLY)


def test_what_lingers_counts(daemon: NodeDaemon, site: Site) -> None:
    """A mount in use is detached, and its servers stay: these count until the last descriptor is closed."""
    daemon.kill()
    daemon.start("from bootseer.node import daemon; daemon.MAX_MOUNTS = 3")
    config = daemon.config
    with User(ALICE, site.login(ALICE)) as alice, User(ALICE) as holder, User(BOB) as bob:
        for number in range(1, 4):
            mine = alice.do(client.mount_image, site.ref, config=config)
            holder.do(hold, f"{mine.folder}/data/noise")
            alice.do(client.unmount, mine.id, config=config)
            found = client.node(config=config)
            assert (found.mounts, found.lingering) == (0, number)
        with pytest.raises(UnavailableError, match=f"user {ALICE} has 3 mounts"):
            alice.do(client.mount_image, site.ref, config=config)
        assert "3 more were ended" in command(["node", "status"], config)[1]
        assert bob.do(client.mount_image, site.free, config=config).state == "mounted"
        holder.end()
        until(lambda: client.node(config=config).lingering == 0, 30.0, "the end of what lingers")
        again = alice.do(client.mount_image, site.ref, config=config)
        assert alice.do(Path.read_bytes, Path(again.folder, "data/noise")) == NOISE


def shout(config: Config, count: int) -> None:
    for number in range(count):
        with contextlib.suppress(NotFoundError):
            client.unmount(f"nonesuch-{number}", config=config)


def test_no_user_drowns_what_others_asked_for(daemon: NodeDaemon) -> None:
    with User(ALICE) as alice, User(BOB) as bob:
        alice.do(shout, daemon.config, 250)
        bob.do(shout, daemon.config, 1)
    said = daemon.log.read_text()
    assert 100 <= said.count(f"user {ALICE}: unmount failed") < 250
    assert f"user {BOB}: unmount failed" in said


def test_a_mount_that_is_not_done_ends_with_its_client(daemon: NodeDaemon, site: Site, place: Path) -> None:
    config, login = daemon.config, site.login(ALICE)
    stuck = Path(login["DOCKER_CONFIG"], "config.json")
    stuck.unlink()
    os.mkfifo(stuck)
    os.chown(stuck, ALICE, ALICE)
    with User(ALICE, login) as alice, User(ALICE, login) as other:
        alice.do(in_thread, site.ref, config)
        until(lambda: client.mounts(config=config), 30.0, "the mount to begin")
        (begun,) = other.do(client.mounts, config=config)
        assert begun.state == "mounting"
        with pytest.raises(UnavailableError, match="is mounting just now"):
            other.do(client.unmount, begun.id, config=config)
        asking = asked(daemon)
        code, said = other.do(command, ["unmount", begun.id], config)
        assert (code, "is mounting just now" in said) == (UnavailableError.exit_code, True), said
        # One that cannot be ended keeps no other mount of the job from its end; no job's mounts are in no job.
        done = client.mount_image(site.free, config=config, job="1", user=BOB)
        with pytest.raises(ConfigError, match="no job"):
            client.unmount_job("", config=config)
        with pytest.raises(UnavailableError, match="is mounting just now"):
            client.unmount_job("1", config=config)
        assert done.id not in {one.id for one in client.mounts(config=config)}
        heir = alice.do(fork_sleeper)
        alice.end()  # its child has the connection, too
        gone(daemon)
        until(lambda: not alive(asking), 30.0, "the end of the question")
        os.kill(heir, signal.SIGKILL)

        other.start(client.mount_image, site.ref, config=config, job="1")
        asking = asked(daemon)
        daemon.kill()
        with pytest.raises(UnavailableError, match="ended before it answered"):
            other.result()
        until(lambda: not listens(config), 30.0, "the end of the socket")
        until(lambda: not alive(asking), 30.0, "the end of the question")
        daemon.start(alone=True)
        gone(daemon)
    # Idle, it is small, and does not even wake up.
    until(lambda: rests(daemon.pid), 30.0, "that the daemon does nothing")
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 60_000
    assert re.search(r"Max core file size +0 +0 ", Path(f"/proc/{daemon.pid}/limits").read_text())
    assert "bootseer_node_mounts 0" in command(["node", "status", "--metrics"], config)[1]
    assert "KillMode=process" in command(["node", "install", "--unit=-"], config)[1]


def in_thread(ref: str, config: Config) -> None:
    """Begin a mount that this user does not wait for."""
    later(lambda: client.mount_image(ref, config=config, job="1"))
    until(lambda: client.mounts(config=config), 30.0)


def asked(daemon: NodeDaemon) -> list[int]:
    """The processes that ask a registry for the daemon as user `ALICE`, once there are any."""
    found: list[int] = []

    def look() -> bool:
        found[:] = [pid for pid in descendants(daemon.pid) if uid_of(pid) == ALICE]
        return bool(found)

    until(look, 30.0, "the question at the registry")
    return found


def descendants(pid: int) -> list[int]:
    found, new = [], [pid]
    while new:
        parent = new.pop()
        with contextlib.suppress(OSError):
            children = [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
            found += children
            new += children
    return found


def uid_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/status").read_text().partition("\nUid:")[2].split()[0])
    return -1


def alive(pids: list[int]) -> bool:
    return any(os.path.exists(f"/proc/{pid}") for pid in pids)


def rests(pid: int) -> bool:
    """Whether the process does not even wake up for a while."""

    def switches() -> str:
        return Path(f"/proc/{pid}/status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0]

    before = switches()
    time.sleep(0.5)
    return switches() == before


SLEEP = 1_000_000 + os.getpid()
"""Of no other process on this machine."""
HELPER = """#!/bin/sh
{ cat /proc/self/status; ls -l /proc/self/fd; keyctl show @s 2>&1; env; cat /proc/self/cgroup; } > %(said)s
setsid sleep %(seconds)s > /dev/null 2>&1 < /dev/null &
(trap "" HUP TERM; sleep %(seconds)s) > /dev/null 2>&1 &
echo "oom $(cat /proc/self/oom_score_adj)" >> %(said)s
echo '{"Username": "%(user)s", "Secret": "%(password)s"}'
"""


def test_helpers_of_logins_are_the_users_own_and_end(site: Site, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    login, said = site.login(ALICE), place / "said"
    programs, config = place / "bin", Path(login["DOCKER_CONFIG"], "config.json")
    programs.mkdir()
    said.touch()
    os.chown(said, ALICE, ALICE)
    helper = programs / "docker-credential-own"
    helper.write_text(HELPER % {"said": said, "user": USER, "password": PASSWORD, "seconds": SLEEP})
    helper.chmod(0o755)
    config.write_text(json.dumps({"credsStore": "own"}))
    monkeypatch.setattr(access, "_PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("ROOTS_SECRET", "root's")
    monkeypatch.setenv("HTTPS_PROXY", "http://site:proxys-password@proxy.invalid:3128")
    score = min(1000, max(0, int(Path("/proc/self/oom_score_adj").read_text())) + 100)
    with User(ALICE) as alice:
        Path(f"/proc/{alice.pid}/oom_score_adj").write_text(str(score))
        asker = access.Asker(access.user_of(ALICE), login, limits(alice.pid))
        digest = access.digest_for(asker, oci.Reference.parse(site.ref), Config())
    assert converted(oci.Reference.parse(site.ref), digest, open_store(site.store), Config()).reference == site.ref
    text = said.read_text()
    assert f"Uid:\t{ALICE}\t{ALICE}\t{ALICE}\t{ALICE}" in text
    assert "CapEff:\t0000000000000000" in text
    assert "ROOTS_SECRET" not in text
    assert "proxys-password" not in text
    assert f"oom {score}\n" in text
    assert "/dev/tty" not in text
    assert "/dev/pts" not in text
    until(lambda: not asleep(), 30.0, "the end of what the helper had started")
    # Root's own logins do not help a user.
    monkeypatch.setenv("DOCKER_CONFIG", site.login(0)["DOCKER_CONFIG"])
    with pytest.raises(PrivilegeError, match="denies access"):
        access.digest_for(asker._replace(logins={}, like=limits(os.getpid())), oci.Reference.parse(site.ref), Config())


def limits(pid: int) -> access.Limits:
    pidfd = os.pidfd_open(pid)
    try:
        return access.limits_of(pid, pidfd)
    finally:
        os.close(pidfd)


def remembers(pid: int, text: bytes) -> bool:
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                with contextlib.suppress(OSError):
                    memory.seek(first)
                    if text in memory.read(last - first):
                        return True
    return False


def test_the_daemon_reads_no_pull_secrets(daemon: NodeDaemon, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.kill()
    monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", site.ref.partition("/")[0])
    daemon.start()
    host, secret = site.ref.partition("/")[0], f"{PASSWORD}-and-more"
    other = {"username": "u", "password": secret}
    login = {"auths": {host: {"username": USER, "password": PASSWORD}, "h.invalid": other}}
    with User(0) as driver:
        digest = driver.do(digest_with, site.ref, json.dumps(login), daemon.config)
        assert digest.startswith("sha256:")
        with pytest.raises(PrivilegeError, match="denies access"):
            driver.do(digest_with, site.ref, "{}", daemon.config)
        assert remembers(driver.pid, secret.encode()), "else this does not see it"
    assert not remembers(daemon.pid, secret.encode())


def digest_with(ref: str, logins: str, config: Config) -> str:
    _kept_texts.append(logins)
    return client.digest_with(oci.Reference.parse(ref), given(logins), config=config)


_kept_texts: list[str] = []


def test_the_limits_of_a_process_that_has_ended_are_nobody_elses() -> None:
    """Its number may be another process's by now."""
    with subprocess.Popen(["sleep", "100"]) as other:
        pidfd = os.pidfd_open(other.pid)
        assert access.limits_of(other.pid, pidfd) == limits(os.getpid())
        other.kill()
    with pytest.raises(UnavailableError, match="has ended"):
        access.limits_of(os.getpid(), pidfd)
    os.close(pidfd)


def test_what_the_daemon_starts_is_ended_before_jobs_are(daemon: NodeDaemon, site: Site) -> None:
    daemon.kill()
    daemon.start("import os; os.system('echo -500 2>/dev/null > /proc/$PPID/oom_score_adj')")  # where that is allowed
    with User(ALICE, site.login(ALICE)) as alice:
        mine = alice.do(client.mount_image, site.ref, config=daemon.config, job="1")
        assert alice.do(Path.read_bytes, Path(mine.folder, "data/noise")) == NOISE
    found = client.status(mine.id, config=daemon.config)
    for pid in (found.pid, found.server_pid, found.fetcher_pid):
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) >= 0
    bound = re.search(r"Max data size +(\d+|unlimited)", Path(f"/proc/{found.fetcher_pid}/limits").read_text())
    assert bound
    assert int(bound[1]) < 100 << 30
    client.unmount(mine.id, config=daemon.config)


def test_a_registry_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_SECONDS", 2.0)
    asker = access.Asker(access.NOBODY, {}, limits(os.getpid()), Logins())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ref = oci.Reference.parse(f"127.0.0.1:{silent.getsockname()[1]}/a:1")
        with pytest.raises(UnavailableError, match="within 2 s"):
            access.digest_for(asker, ref, Config(plain_http=(ref.registry,)))


def asleep() -> list[str]:
    """The processes that the helper has left."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cmdline").read_bytes() == f"sleep\0{SLEEP}\0".encode():
                found.append(path.name)
    return found


def test_nobody_reaches_a_place_before_it_is_read_only(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its owner could put a link where root is about to mount."""
    mine, calls = place / "mine", []
    really = mounts.mount

    def watched(source: str, target: Path, fstype: str, *, flags: int = 0, data: str = "") -> None:
        really(source, target, fstype, flags=flags, data=data)
        calls.append(fstype)
        with User(ALICE) as alice, pytest.raises(OSError, match="Permission denied"):
            alice.do(os.chmod, target, 0o777)

    monkeypatch.setattr("bootseer.kernel.mount.mount", watched)
    places.make(mine, access.user_of(ALICE))
    assert calls == ["tmpfs", ""]
    with User(ALICE) as alice:
        assert alice.do(os.listdir, places.root_of(mine)) == []
        with pytest.raises(OSError, match="Read-only"):
            alice.do(os.chmod, places.root_of(mine).parent, 0o777)
    places.remove(mine, place / "state", killed=False)
    assert not mine.exists()


def test_folders_and_sockets_that_somebody_planted(place: Path, site: Site) -> None:
    planted, link, loose = place / "planted", place / "link", place / "loose"
    planted.mkdir(mode=0o755)
    os.chown(planted, BOB, BOB)
    link.symlink_to(planted)
    loose.mkdir()
    loose.chmod(0o777)
    for bad, reason in ((planted, "belongs to user"), (link, "is a link"), (loose, "others can write")):
        with pytest.raises(ConfigError, match=reason):
            Daemon(Config(node_dir=str(bad), state_dir=str(place / "state"), cache_dir=str(place / "cache")))
        assert not os.listdir(bad)
    config = Config(node_dir=str(loose))
    with User(BOB) as bob:
        bob.do(listen, str(loose / "node.sock"))
        with pytest.raises(PrivilegeError, match="is not root's"):
            client.mounts(config=config)
        with pytest.raises(PrivilegeError, match="is not root's"):
            UserImage(site.ref, place / "image", config)
        assert client.in_daemon_cgroup(config) == config
        with pytest.raises(PrivilegeError, match="needs root"):
            bob.do(Daemon, config)


def listen(path: str) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(path)
    os.chmod(path, 0o666)
    sock.listen()
    _kept.append(sock)


def test_a_second_daemon_is_refused(daemon: NodeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.node.daemon._LOCK_SECONDS", 0.1)
    with pytest.raises(UnavailableError, match="another node daemon"):
        Daemon(daemon.config)
    theirs = client.in_daemon_cgroup(daemon.config).server_cgroup
    assert theirs in [line.split(":", 2)[2] for line in Path(f"/proc/{daemon.pid}/cgroup").read_text().splitlines()]
    assert daemon.stop() == 128 + signal.SIGTERM
    assert not listens(daemon.config)


class ClientGone(socket.socket):
    """The end of a connection whose maker has been seen to end, on kernels that give no pidfd of such a process."""

    def getsockopt(self, level: int, option: int, *size: int) -> Any:
        if option == SO_PEERPIDFD:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().getsockopt(level, option, *size)


def test_a_process_with_the_number_of_one_that_ended_is_no_client() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, ClientGone(fileno=ours.detach()) as gone, pytest.raises(OSError, match="Invalid argument"):
        Client(gone)


def test_commands_with_words_that_are_no_text(place: Path) -> None:
    config = Config(node_dir=str(place))
    assert command(["image", "mount", "h:1/x\udcff"], config)[0] == ConfigError.exit_code


def test_the_unit_finds_the_settings_from_any_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("BOOTSEER_CONFIG", "node.toml")
    assert f"--config {place}/node.toml node serve" in command(["node", "install", "--unit=-"], Config())[1]


@pytest.mark.parametrize("full", ["node", "state", "cache"])
def test_a_full_disk(site: Site, place: Path, full: str) -> None:
    """It costs new mounts, with one line, and no other. Nothing is left of them, and there is room again afterwards."""
    (place / full).mkdir()
    mounts.mount("tmpfs", place / full, "tmpfs", data="size=48m,mode=755")
    daemon = NodeDaemon(place, site.store)
    config = daemon.config
    try:
        Path(config.node_dir, "records").mkdir(mode=0o700, parents=True)
        Path(config.node_dir, "records/.begun.json").touch()  # by a daemon that was killed
        daemon.start()
        with User(ALICE, site.login(ALICE)) as alice:
            own = alice.do(client.mount_image, site.free, config=config)
            with (place / full / "filler").open("wb", buffering=0) as out, contextlib.suppress(OSError):
                while True:
                    out.write(bytes(4096))
            with pytest.raises(FullError, match="No space left on device"):
                alice.do(client.mount_image, site.ref, config=config)
            assert alice.do(Path.read_bytes, Path(own.folder, "free")) == b"for all"
            alice.do(client.unmount, own.id, config=config)
            gone(daemon)
            (place / full / "filler").unlink()
            root = alice.do(client.mount_image, site.ref, config=config).folder
            assert alice.do(Path.read_bytes, Path(root, "data/noise")) == NOISE
        gone(daemon)
        assert "Traceback" not in daemon.log.read_text()
    finally:
        daemon.kill()
        for entry in reversed(mounts.below(place)):
            mounts.unmount(entry.target, lazy=True)


def test_a_daemon_that_speaks_another_version(site: Site, place: Path) -> None:
    """A user's commands end with a line that says so; root's, which can do without it, go on."""
    daemon = NodeDaemon(place, site.store)
    try:
        daemon.start("protocol.VERSION = 2")
        alice = Home(place, daemon.config, ALICE, site.login(ALICE))
        (alice.folder / "job.toml").write_text(f"""
            job = {{name = "small", command = ["sh"]}}
            image = {{ref = "{site.ref}"}}
            """)
        for words in (
            ("image", "run", site.ref, "id"),
            ("image", "mount", site.ref),
            ("run", str(alice.folder / "job.toml")),
            ("node", "status"),
        ):
            code, out, errors = alice.run(*words)
            assert (code, out, errors.count("\n")) == (ConfigError.exit_code, "", 1), errors
            assert f"the request: it has version 1; use a client of bootseer {__version__}" in errors
        assert client.in_daemon_cgroup(daemon.config) == daemon.config
    finally:
        daemon.kill()
