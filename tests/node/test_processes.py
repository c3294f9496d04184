"""The processes that serve a tree, killed in every order: right bytes or an error, never zeros, never a hang."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.blocks import tree
from bootseer.blocks.serving import client
from bootseer.blocks.tree import TreeMount
from bootseer.errors import BootseerError, UnavailableError
from bootseer.kernel import mount as mounts
from bootseer.objects import uses
from bootseer.objects.folder import FolderStore
from bootseer.served.client import await_exit
from support.node import alive, kill_group
from support.treesite import TreeSite, publish_tree
from support.waits import until

pytestmark = pytest.mark.root

RATE = 6e6
SLOW = (
    sys.executable,
    "-c",
    "import sys; from bootseer.blocks.serving.server import main; from bootseer.objects import open_store\n"
    "from support.stores import RateLimitedStore\n"
    f"sys.exit(main(store_for=lambda url: RateLimitedStore(open_store(url), rate={RATE}, latency=0.01)))",
)
TROUBLED = (
    sys.executable,
    "-c",
    """import errno, os, sys, threading, time
from bootseer.blocks.serving import supervisor
from bootseer.blocks.serving.server import main
from bootseer.served import keeper

def when(name, real, act):
    def fake(*args, **more):
        if os.path.exists(os.environ["BOOTSEER_TROUBLE"] + name):
            act()
        return real(*args, **more)
    return fake

def fail(number):
    raise OSError(number, os.strerror(number))

supervisor._SERVER_SILENCE = supervisor._FETCHER_SILENCE = 3.0
os.fork = when("fork", os.fork, lambda: fail(errno.EAGAIN))
supervisor.FetcherProcess = when("fetcher", supervisor.FetcherProcess, lambda: fail(errno.EIO))
supervisor.Supervisor._serve_fuse = when("slow", supervisor.Supervisor._serve_fuse, lambda: time.sleep(0.4))
def die():
    os.unlink(os.environ["BOOTSEER_TROUBLE"] + "server")
    os.kill(os.getpid(), 9)

supervisor.Supervisor._serve_fuse = when("server", supervisor.Supervisor._serve_fuse, die)
finish = supervisor.Supervisor._finish
def slow_finish(self):
    finish(self)
    when("slow end", int, lambda: time.sleep(2.0))()

supervisor.Supervisor._finish = slow_finish
def no_thread():
    raise RuntimeError("can't start new thread")

start = threading.Thread.start
threading.Thread.start = lambda self: when("no " + self.name, start, no_thread)(self)
class Child(keeper.Child):
    def __init__(self, name, *args):
        super().__init__(name, *args)
        if name == "fetcher":
            when("twice", int, lambda: time.sleep(0.6))()
keeper.Child = Child
sys.exit(main())
""",
)
"""A server that has the troubles for which there is a file."""
_MOUNT = """
import os, sys
from pathlib import Path
from bootseer.blocks import tree
from bootseer.config import Config
job, servers, store, digest, folder = sys.argv[1:]
if job:
    Path(job, "cgroup.procs").write_text("0")
tree.mount(store, digest, Path(folder, "mnt"), cache_dir=Path(folder, "cache"), state_dir=Path(folder, "state"),
           config=Config(background_fill=False, server_cgroup=servers))
"""
"""Mounts, in the cgroup ``job``, and ends."""
FILES = 24
FILE_SIZE = 400_000
DEADLINE = 20.0
ERRORS = (errno.EIO, errno.ECONNABORTED, errno.ENOTCONN)
"""What a reader gets whose FUSE server is gone for good."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "tree").mkdir()
    rand = random.Random(7)
    for index in range(FILES):
        (folder / "tree" / f"f{index:02}").write_bytes(rand.randbytes(FILE_SIZE))
    publish_tree(folder)
    return folder


class Node(TreeSite):
    def mount(self, name: str = "mnt", *, slow: bool = True, command: Sequence[str] = (), **set: object) -> TreeMount:
        return super().mount(name, server=command or (SLOW if slow else tree.SERVER), **set)  # type: ignore[arg-type]

    @property
    def data(self) -> Path:
        (folder,) = (self.folder / "cache" / "blocks").iterdir()
        return folder / "data"


@pytest.fixture
def node(base: Path, tmp_path: Path) -> Iterator[Node]:
    node = Node(base, tmp_path, demand_deadline=DEADLINE)
    yield node
    node.close()


def read(path: Path) -> bytes | int | None:
    try:
        return path.read_bytes()
    except OSError as exc:
        return exc.errno


server = pytest.param("FUSE server", marks=pytest.mark.takeover)


def test_a_lingering_server_serves_the_next_mount(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.served.client._BUSY_SECONDS", 0.2)
    made = node.mount(slow=False)
    pid = made.status().pid
    with open(made.target / "f05", "rb") as file:
        made.unmount()
        again = node.mount("again", slow=False)
        assert again.status().pid == pid
        assert not again.status().lingering
        assert file.read() == node.want("f05")
    time.sleep(0.6)
    assert read(again.target / "f06") == node.want("f06")


def test_a_mount_whose_server_died_says_so_and_hides_nobody(node: Node) -> None:
    made = node.mount(slow=False)
    assert not made.dead()
    os.killpg(os.getpgid(made.status().pid), signal.SIGKILL)
    until(made.dead)
    made.unmount()
    assert not made.dead()


def test_logs_of_servers_that_ended_long_ago_go(node: Node) -> None:
    base = node.state / "trees"
    base.mkdir(mode=0o700, parents=True)
    long_ago = time.time() - 2 * 86_400
    for name in ("old.log", "old.log.old", "young.log"):
        (base / name).touch()
        if name != "young.log":
            os.utime(base / name, (long_ago, long_ago))
    made = node.mount(slow=False)
    log = base / f"{made.id}.log"
    os.utime(log, (long_ago, long_ago))
    node.mount("again", slow=False).unmount()
    assert {path.name for path in base.glob("*.log*")} == {"young.log", log.name}
    made.unmount()


def test_sigterm_waits_for_the_unmount(node: Node) -> None:
    made = node.mount(slow=False)
    pid = made.status().pid
    os.kill(pid, signal.SIGTERM)
    until(lambda: "still in use" in node.log)
    assert read(made.target / "f00") == node.want("f00")
    mounts.unmount(made.target)
    until(lambda: not alive(pid))


def right(node: Node, target: Path, names: range = range(FILES)) -> bool:
    """Whether a reader gets right bytes, or at worst errors."""
    return all(read(target / f"f{i:02}") == node.want(f"f{i:02}") for i in names)


@pytest.mark.parametrize("complete", [True, False])
def test_a_mount_with_another_cache_folder_joins_the_server(
    node: Node, complete: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = node.mount(slow=False)
    if complete:
        assert right(node, made.target)
        made.unmount()
        made = node.mount(slow=False)
    other = node.mount("other", slow=False, cache="cache2")
    assert other.status().driver == ("local" if complete else "fuse")
    assert other.status().pid == made.status().pid
    assert f"is served out of {node.folder / 'cache'}" in caplog.text
    made.unmount()
    assert right(node, other.target)


@pytest.mark.parametrize("killed", ["", "supervisor", "fetcher"])
@pytest.mark.parametrize("gone", ["old", "new"])
def test_the_store_that_a_later_mount_names_is_read_too(node: Node, gone: str, killed: str) -> None:
    first, old, new = node.mount(slow=False), node.store.root, node.folder / "elsewhere"
    shutil.copytree(old, new, ignore=shutil.ignore_patterns("uses"))  # in which the server notes its use just now
    if gone == "old":
        until(lambda: shutil.rmtree(old, ignore_errors=True) or not old.exists())
    node.store = FolderStore(new)
    other = node.mount("other", slow=False)
    if gone == "new":  # a mistake of who mounts it second hurts nobody else
        until(lambda: shutil.rmtree(new, ignore_errors=True) or not new.exists())
    if killed:
        status = first.status()
        pid = status.pid if killed == "supervisor" else status.fetcher_pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: first.status().supervisor_restarts + first.status().fetcher_restarts)
    assert right(node, other.target, range(4))
    assert read(first.target / "f05") == node.want("f05")
    if gone == "old":
        until(lambda: any(uses.tree_of(info.key) == node.digest for info in node.store.list(uses.FOLDER)))


def test_a_server_in_another_mount_namespace_is_joined(node: Node) -> None:
    command = ["unshare", "-m", "--propagation", "private", sys.executable, "-c", _MOUNT, "", ""]
    subprocess.run([*command, node.store.url, node.digest, str(node.folder)], timeout=60, check=True)
    first = tree.attach(node.folder / "mnt", node.folder / "state")
    assert not mounts.is_mounted(first.target)
    pid = first.status().pid
    other = node.mount("other", slow=False)
    assert other.status().pid == pid
    assert right(node, other.target)
    subprocess.run(["nsenter", "-t", str(pid), "-m", "umount", str(first.target)], check=True)
    first.unmount()
    assert right(node, other.target)


_READ = """
import subprocess, sys
from pathlib import Path
from bootseer.blocks import tree
from bootseer.config import Config
store, digest, folder, *server = sys.argv[1:]
tree.mount(store, digest, Path(folder, "mnt"), cache_dir=Path(folder, "cache"), state_dir=Path(folder, "state"),
           server=server, config=Config(background_fill=False, demand_deadline=1.5))
reader = subprocess.Popen(["cat", f"{folder}/mnt/f00"], stdout=subprocess.DEVNULL)
print(reader.pid, flush=True)
reader.wait()
"""
"""Mounts, and reads what does not come."""


def mounts_of(pid: int) -> str:
    """Its mount namespace; empty when it has ended."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/mnt")
    return ""


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 15),
    reason="this kernel has no time limit for requests to FUSE servers",
)
@pytest.mark.soak
def test_all_processes_of_a_mount_namespace_die_while_a_read_waits(node: Node) -> None:
    """As when a job with mounts of its own is killed: the last of them unmounts the tree while it has FUSE open."""
    server = [SLOW[0], SLOW[1], SLOW[2].replace(f"rate={RATE}", "rate=100")]
    command = ["unshare", "-m", "--propagation", "private", sys.executable, "-c", _READ, node.store.url, node.digest]
    job = subprocess.Popen([*command, str(node.folder), *server], stdout=subprocess.PIPE, text=True)
    assert job.stdout
    reader = int(job.stdout.readline())
    until(lambda: Path(f"/proc/{reader}/stat").read_text().rpartition(")")[2].split()[0] == "D", DEADLINE)
    theirs = mounts_of(reader)
    assert theirs not in ("", mounts_of(os.getpid()))
    pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mounts_of(pid) == theirs]
    servers = [pid for pid in pids if pid not in (reader, job.pid)]
    assert len(servers) > 2
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (job.pid, reader, *servers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    until(lambda: not any(map(alive, pids)), 60.0)
    job.stdout.close()
    job.wait()
    made = node.mount(slow=False)
    assert right(node, made.target)
    made.unmount()


_LOCAL = """
from bootseer.blocks import tree
import sys
from pathlib import Path
store, digest, folder = sys.argv[1:]
where = {"cache_dir": Path(folder, "cache"), "state_dir": Path(folder, "state")}
tree.prefetch(store, digest, cache_dir=where["cache_dir"])
assert tree.mount(store, digest, Path(folder, "mnt"), **where).status().driver == "local"
"""
"""Mounts a tree that is whole in its cache folder, and ends."""


def test_the_file_of_a_server_in_another_mount_namespace_is_not_that_of_the_same_name(node: Node) -> None:
    node.mount(slow=False).unmount()  # a cache with holes
    (node.folder / "theirs").mkdir(mode=0o700)
    script = 'mount --bind "$3/theirs" "$3/cache" && exec "$0" -c "$4" "$1" "$2" "$3"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, sys.executable]
    subprocess.run([*command, node.store.url, node.digest, str(node.folder), _LOCAL], timeout=60, check=True)
    first = tree.attach(node.folder / "mnt", node.folder / "state")
    try:
        other = node.mount("other", slow=False)
        assert other.status().pid == first.status().pid
        assert right(node, other.target)
    finally:
        subprocess.run(["nsenter", "-t", str(first.status().pid), "-m", "umount", str(first.target)], check=True)
        first.unmount()


class Trouble:
    """Makes the processes of a `TROUBLED` server meet trouble, by name, while in the context."""

    def __init__(self, folder: Path) -> None:
        self._base = folder

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        (self._base / name).touch()
        yield
        (self._base / name).unlink()


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trouble:
    (tmp_path / "trouble").mkdir()
    monkeypatch.setenv("BOOTSEER_TROUBLE", f"{tmp_path}/trouble/")
    return Trouble(tmp_path / "trouble")


@pytest.mark.takeover
@pytest.mark.parametrize("who", ["fetcher", "FUSE server", "supervisor"])
def test_no_process_can_be_started_for_a_while(node: Node, trouble: Trouble, who: str) -> None:
    made = node.mount(command=TROUBLED)
    status = made.status()
    pids = {"supervisor": status.pid, "FUSE server": status.server_pid, "fetcher": status.fetcher_pid}
    with trouble("fork"):
        os.kill(pids.pop(who), signal.SIGKILL)
        time.sleep(1.5)
        assert all(map(alive, pids.values()))
    until(lambda: read(made.target / "f05") == node.want("f05"))
    until(lambda: alive(made.status().pid))
    os.kill(made.status().server_pid, signal.SIGKILL)
    assert read(made.target / "f06") == node.want("f06")


@pytest.mark.parametrize("who", ["fetcher", server])
def test_a_process_without_a_sign_of_life_is_replaced(node: Node, trouble: Trouble, who: str) -> None:
    made = node.mount(command=TROUBLED)
    status = made.status()
    pid = status.fetcher_pid if who == "fetcher" else status.server_pid
    os.kill(pid, signal.SIGSTOP)
    assert read(made.target / "f05") == node.want("f05")
    until(lambda: not alive(pid))  # the file may have been on this node before
    assert "no sign of life" in node.log


@pytest.mark.parametrize("who", ["fetcher", server])
def test_the_supervisor_dies_while_another_process_starts(node: Node, trouble: Trouble, who: str) -> None:
    made = node.mount(command=TROUBLED)
    status = made.status()
    with trouble("twice" if who == "fetcher" else "slow"):
        os.kill(status.fetcher_pid if who == "fetcher" else status.server_pid, signal.SIGKILL)
        time.sleep(0.25)
        os.kill(status.pid, signal.SIGKILL)
    until(lambda: made.status().supervisor_restarts == 1)
    assert made.status().fetcher_restarts == (who == "fetcher")
    if who != "fetcher":
        os.kill(made.status().server_pid, signal.SIGKILL)
    assert right(node, made.target)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """One of version 2 with the two cgroups ``job`` and ``servers``, each of which can be killed."""
    tops = [Path(entry.target) for entry in mounts.entries() if entry.fstype == "cgroup2"]
    if not tops or not os.access(tops[0], os.W_OK):
        pytest.skip("needs cgroup v2, writable")
    base = tops[0] / f"bootseer-test-{os.getpid()}"
    made = (base, base / "job", base / "servers")
    for folder in made:
        folder.mkdir()
    yield base
    for folder in reversed(made):
        (folder / "cgroup.kill").write_text("1")
        until(lambda folder=folder: "populated 0" in (folder / "cgroup.events").read_text())
        folder.rmdir()


@pytest.mark.parametrize("leaves", [True, False])
def test_the_end_of_the_job_that_mounted_first(node: Node, cgroup: Path, leaves: bool) -> None:
    """In a cgroup of its own the server outlives it; else other jobs on the tree get errors, never zeros, and a new
    mount works at once."""
    servers = f"{cgroup.name}/servers" if leaves else ""
    command = [sys.executable, "-c", _MOUNT, str(cgroup / "job"), servers, node.store.url, node.digest]
    subprocess.run([*command, str(node.folder)], timeout=60, check=True)
    node.mounted.append(tree.attach(node.folder / "mnt", node.folder / "state"))
    other = node.mount("other", slow=False)
    pid = other.status().pid
    assert read(other.target / "f00") == node.want("f00")
    (cgroup / "job" / "cgroup.kill").write_text("1")
    until(lambda: "populated 0" in (cgroup / "job" / "cgroup.events").read_text())
    if leaves:
        assert other.status().pid == pid
        assert right(node, other.target)
        return
    assert all(read(other.target / f"f{i:02}") in (node.want(f"f{i:02}"), *ERRORS) for i in range(FILES))
    assert read(other.target / "f20") in ERRORS
    assert right(node, node.mount("new", slow=False).target)


def test_a_cgroup_that_is_not_there_is_a_line_in_the_log(node: Node) -> None:
    made = node.mount(slow=False, server_cgroup="/no/such")
    assert "there is no cgroup /no/such" in node.log
    assert read(made.target / "f00") == node.want("f00")


def test_supervisor_and_server_dead_at_once_is_an_error_and_ends_the_fetcher(node: Node) -> None:
    made = node.mount(slow=False)
    status = made.status()
    with ThreadPoolExecutor(1) as pool:
        os.kill(status.fetcher_pid, signal.SIGSTOP)
        future = pool.submit(read, made.target / "f00")
        time.sleep(0.2)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(status.pid, number)
            os.kill(status.server_pid, number)
        os.kill(status.fetcher_pid, signal.SIGCONT)
        assert future.result(DEADLINE) in ERRORS
    assert read(made.target / "f01") in ERRORS
    made.unmount()
    until(lambda: not alive(status.fetcher_pid), 20)


@pytest.mark.parametrize("how", ["killed", "told to end"])
def test_a_tree_that_is_complete_is_mounted_without_a_server(node: Node, how: str) -> None:
    made = node.mount(slow=False, background_fill=True, fill_quiet=0.1)
    made.ready()
    until(lambda: made.status().complete)
    made.unmount()
    until(node.clean)
    shutil.rmtree(node.store.root)
    again = node.mount(slow=False)
    status = again.status()
    assert (status.driver, status.server_pid, status.fetcher_pid) == ("local", 0, 0)
    assert status.complete
    if how == "killed":
        kill_group(status.pid)
    else:
        os.kill(status.pid, signal.SIGTERM)
        until(lambda: not alive(status.pid))
    assert right(node, again.target)
    tree.attach(again.target, node.folder / "state").unmount()
    until(node.clean)


def test_a_detached_mount_in_use_keeps_its_server(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bootseer.served.client._BUSY_SECONDS", 0.2)
    made = node.mount(slow=False)
    pid = made.status().pid
    with open(made.target / "f05", "rb") as file:
        made.unmount()
        assert "is in use; detaching it" in caplog.text
        assert not mounts.is_mounted(made.target)
        assert made.status().lingering
        os.kill(made.status().fetcher_pid, signal.SIGKILL)
        os.kill(pid, signal.SIGTERM)
        assert file.read() == node.want("f05")
    until(node.clean)
    until(lambda: not alive(pid))


def test_no_fetcher_means_errors_soon_and_recovery(node: Node, trouble: Trouble) -> None:
    """Also from the start on, which waits for none."""
    with trouble("fetcher"):
        made = node.mount(command=TROUBLED)
        began = time.monotonic()
        assert read(made.target / "f00") == errno.EIO
        assert time.monotonic() - began < DEADLINE
    until(lambda: read(made.target / "f01") == node.want("f01"), 15)
    assert made.status().fetcher_restarts > 0


def test_a_fetcher_that_ends_before_its_supervisor_looks_is_not_replaced(node: Node, trouble: Trouble) -> None:
    """Nobody would tell another one to end."""
    made = node.mount(command=TROUBLED)
    with trouble("slow end"):
        began = time.monotonic()
        made.unmount()
        until(lambda: "the server of tree" in node.log)
    assert time.monotonic() - began < DEADLINE
    assert "starting another" not in node.log


def test_a_start_needs_no_thread_that_only_makes_it_faster(node: Node, trouble: Trouble) -> None:
    with trouble("no prefetch"), trouble("no sync"):
        made = node.mount(command=TROUBLED)
        assert right(node, made.target)
        assert made.status().fetcher_restarts == 0


def test_a_fuse_server_that_dies_while_it_starts_is_replaced(node: Node, trouble: Trouble, tmp_path: Path) -> None:
    (tmp_path / "trouble" / "server").touch()
    made = node.mount(command=TROUBLED)
    assert made.status().server_restarts == 1
    assert right(node, made.target)


def test_a_stopped_supervisor_is_waited_for_and_not_killed(node: Node) -> None:
    made = node.mount(slow=False)
    pid = made.status().pid
    folder = node.folder / "state" / "trees" / node.digest[:16]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(UnavailableError, match="does not answer"):
            client.ask(folder, "status", timeout=0.5)
        assert read(made.target / "f00") == node.want("f00")
    finally:
        os.kill(pid, signal.SIGCONT)
    made.unmount()
    until(lambda: not alive(pid))


def test_a_stopped_server_that_nobody_needs_is_killed(node: Node) -> None:
    made = node.mount(slow=False)
    status = made.status()
    folder = node.folder / "state" / "trees" / node.digest[:16]
    mounts.unmount(made.target)
    pids = (status.pid, status.server_pid, status.fetcher_pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await_exit(folder, 0.2)
    until(lambda: not any(map(alive, pids)))
    client.clear(folder)


def test_the_successor_of_a_lingering_supervisor_ends_with_the_last_user(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.served.client._BUSY_SECONDS", 0.2)
    made = node.mount(slow=False)
    pid = made.status().pid
    with open(made.target / "f05", "rb") as file:
        made.unmount()
        os.kill(pid, signal.SIGKILL)
        until(lambda: made.status().supervisor_restarts == 1)
        assert made.status().lingering
        assert file.read() == node.want("f05")
    until(node.clean)


def test_a_second_signal_does_not_cut_the_end_short(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "chunks.fdatasync=sleep:1.5")
    made = node.mount(slow=False)
    monkeypatch.delenv("BOOTSEER_FAULTS")
    assert read(made.target / "f00") == node.want("f00")
    pid = made.status().pid
    mounts.unmount(made.target)
    for _ in range(3):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.3)
    until(lambda: not alive(pid), 20)
    assert (node.data.parent / "bitmap").exists()
    assert "does not finish" not in node.log


def test_an_aborted_connection_is_no_reason_to_start_servers(node: Node) -> None:
    made = node.mount(slow=False)
    with pytest.raises(BootseerError, match="in use"):  # which aborts the connection all the same
        mounts.unmount(node.folder / "state" / "trees" / made.id / "fuse", force=True)
    until(lambda: made.status().server_pid == 0)
    assert made.status().server_restarts == 0
    assert read(made.target / "f07") in ERRORS


def test_state_is_private(node: Node) -> None:
    made = node.mount(slow=False)
    base = node.folder / "state" / "trees"
    for path in (base, base / made.id, base / f"{made.id}.log"):
        assert path.stat().st_mode & 0o077 == 0, path
