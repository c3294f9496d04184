"""Observed inputs: what a set-up command read counts, and a snapshot is never used after it changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from bootseer import env
from bootseer.config import Config
from bootseer.env import EnvResult, EnvSpec, Outcome, Target, inputs, overlay, remembered, snapshots
from bootseer.kernel import mount as mounts
from bootseer.kernel import opens as lib_opens
from bootseer.kernel.opens import Opens
from bootseer.objects.folder import FolderStore

pytestmark = pytest.mark.root


class Node:
    """One node with a working folder of its own; ``script`` makes ``env/made`` of what it reads."""

    def __init__(self, root: Path) -> None:
        self.work, self.store = root / "work", root / "store"
        self.target = self.work / "env"
        self.config = Config(cache_dir=str(root / "cache"), state_dir=str(root / "state"))
        self.runs = 0
        self.work.mkdir()
        self.write("r.txt", "torch==2.5\n")
        self.write("s.sh", "mkdir -p env; cat r.txt > env/made\n")

    def write(self, name: str, text: str) -> Path:
        path = self.work / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def run(self, act: Callable[[], object] = lambda: None, **changed: object) -> EnvResult:
        def runner() -> int:
            self.runs += 1
            act()
            return subprocess.run(["sh", "s.sh"], cwd=self.work, check=False).returncode

        base = EnvSpec(
            targets=(Target(str(self.target)),), command=("sh", "s.sh"), cwd=str(self.work), background=False
        )
        spec = msgspec.structs.replace(base, **changed)
        return env.run(spec, runner, store_url=str(self.store), config=self.config)

    def observed(self) -> inputs.Observed:
        store = FolderStore(self.store)
        (name,) = snapshots.names(store)
        return snapshots.load(store, name).inputs

    def release(self) -> None:
        for group in overlay.groups(Path(self.config.state_dir))[::-1]:
            group.unmount()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.release()


@pytest.mark.parametrize("restore", ["mount", "unpack"])
@pytest.mark.parametrize("released", [False, True])
def test_a_file_that_the_script_reads_counts(node: Node, restore: str, released: bool) -> None:
    def again() -> EnvResult:
        if released:
            node.release()
        return node.run(restore=restore)

    assert node.run(restore=restore).outcome is Outcome.RAN_AND_PUBLISHED
    assert set(node.observed().files) == {str(node.work / "s.sh"), str(node.work / "r.txt")}
    assert again().outcome is not Outcome.RAN_AND_PUBLISHED
    assert node.runs == 1

    node.write("r.txt", "torch==2.6\n")
    result = again()
    assert result.reason == f"missed because {node.work}/r.txt, which the command reads, changed"
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert (node.target / "made").read_text() == "torch==2.6\n"
    assert node.runs == 2
    again()
    assert node.runs == 2

    node.write("r.txt", "torch==2.5\n")
    assert again().outcome is not Outcome.RAN_AND_PUBLISHED
    assert (node.target / "made").read_text() == "torch==2.5\n"


def test_what_a_node_lacks_does_not_count(node: Node) -> None:
    node.run()
    node.release()
    (node.work / "r.txt").unlink()
    assert node.run().reason == "hit"
    assert (node.target / "made").read_text() == "torch==2.5\n"


def test_what_the_command_made_or_only_wrote_does_not_count(node: Node, tmp_path: Path) -> None:
    log, netrc, cache = node.write("log", "old\n"), node.write(".netrc", "x"), node.write("cache/wheel", "w")
    secret = node.write(".env", "A=1\n")
    node.write(
        "s.sh",
        "echo a > made; cat made made; echo b > made; rm made; echo c > made.tmp; mv made.tmp kept; cat kept\n"
        "cat r.txt .netrc cache/wheel .env /etc/hostname > env/made; echo x >> log\n",
    )
    result = node.run(environ={"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(cache.parent)})
    assert result.outcome is Outcome.RAN_AND_PUBLISHED, result.reason
    names = {os.path.relpath(path, node.work) for path in node.observed().files}
    assert names == {"s.sh", "r.txt", ".env"}
    assert (log.read_text(), netrc.read_text(), secret.read_text()) == ("old\nx\n", "x", "A=1\n")


@pytest.mark.parametrize("how", ["written", "replaced", "removed"])
def test_an_input_that_changes_meanwhile_stops_publication(node: Node, how: str) -> None:
    change = {"written": "echo y >> r.txt", "replaced": "echo y > n; mv n r.txt", "removed": "rm r.txt"}[how]
    node.write("s.sh", f"cat r.txt > env/made; {change}\n")
    result = node.run()
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert f"not published: {node.work}/r.txt changed while the command ran" in result.reason
    assert not snapshots.names(FolderStore(node.store))
    node.write("r.txt", "torch==2.5\n")
    node.run()
    assert node.runs == 2


def test_what_an_earlier_build_left_stops_publication(node: Node) -> None:
    node.write(
        "s.sh", "mkdir -p env build/lib; cp -n r.txt build/lib/r; cp build/lib/r env/made; echo x > a.egg-info/y\n"
    )
    node.write("a.egg-info/y", "x")
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    assert {os.path.basename(path) for path in node.observed().files} == {"s.sh", "r.txt"}
    node.write("r.txt", "torch==2.6\n")
    assert f"not published: {node.work}/build/lib/r is left from an earlier build" in node.run().reason


def test_where_files_have_no_time_of_birth_what_is_made_stops_no_publication(node: Node) -> None:
    (node.work / "tmp").mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", node.work / "tmp"], check=True)
    try:
        node.write("s.sh", "mkdir -p env; cat r.txt > tmp/made; cat tmp/made > env/made\n")
        result = node.run()
    finally:
        mounts.unmount(node.work / "tmp")
    assert result.outcome is Outcome.RAN_AND_PUBLISHED, result.reason
    assert result.reason.endswith(f"the file system of {node.work}/tmp/made does not tell what the command made")


def test_a_file_without_an_end_is_not_read(node: Node) -> None:
    digests = inputs.Digests(EnvSpec(targets=(Target(str(node.target)),), command=("x",)), node.config)
    assert digests.of("/proc/kallsyms") == "?"
    assert digests.of("/proc/self/status") == "?"


def test_digests_of_large_files_are_remembered_while_they_are_as_they_were(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EnvSpec(targets=(Target(str(node.target)),), command=("x",))
    path = node.write("program", "x" * (5 << 20))

    def digest() -> str:
        return inputs.Digests(spec, node.config).of(str(path))

    first = digest()
    assert not (Path(node.config.cache_dir) / "env-facts").exists()  # it may change in the same tick
    with monkeypatch.context() as patch:
        ahead = time.time() + 300
        patch.setattr(time, "time", lambda: ahead)
        assert digest() == first
    assert not (Path(node.config.cache_dir) / "env-facts").exists()  # whatever this node's clock says
    monkeypatch.setattr(remembered, "_SETTLED", -1.0)
    assert digest() == first
    assert len(list((Path(node.config.cache_dir) / "env-facts").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", None)
        assert digest() == first
    os.utime(path)
    path.write_text("y" * (5 << 20))
    assert digest() != first


def test_a_new_source_file_of_a_project_counts(node: Node) -> None:
    node.write("proj/pyproject.toml", "")
    node.write("proj/a.py", "")
    node.write("b.py", "")
    node.write(
        "s.sh", "mkdir -p env; cat proj/pyproject.toml > env/made; ls . proj > env/list; : > proj/generated.py\n"
    )
    node.run()
    node.write("proj/slurm.out", "")
    node.write("c.py", "")  # not of the project
    assert node.run().outcome is Outcome.RESTORED_MOUNT
    node.release()
    assert node.run().reason == "hit"
    node.write("proj/new.py", "")
    result = node.run()
    assert result.reason == f"missed because {node.work}/proj/new.py is new"
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert node.run().outcome is Outcome.RESTORED_MOUNT
    assert node.runs == 2


def test_a_device_is_not_opened(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that only holds the name is no opening."""
    spec = EnvSpec(targets=(Target(str(node.target)),), command=("x",))
    opened, seen = os.open, list[int]()

    def noted(path: str, flags: int, *more: int, **named: int) -> int:
        seen.append(flags)
        return opened(path, flags, *more, **named)

    monkeypatch.setattr("os.open", noted)
    assert inputs.Digests(spec, node.config).of("/dev/null") == ""
    assert all(flags & os.O_PATH for flags in seen)


def test_opens_are_named_by_the_mounts_of_the_command(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when they are read late: paths of a mount that is gone begin at its root."""
    take, late = Opens.take, threading.Event()

    def slow(self: Opens, data: bytes) -> None:
        late.wait(0.5)
        take(self, data)

    monkeypatch.setattr(Opens, "take", slow)
    (node.work / "mnt").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", node.work / "mnt"], check=True)
    try:
        node.write("mnt/r.txt", "x")
        node.write("s.sh", "cat mnt/r.txt > env/made")
        node.run()
        assert str(node.work / "mnt/r.txt") in node.observed().files
    finally:
        mounts.unmount(node.work / "mnt")


def test_a_lost_event_is_said(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(self: Opens, data: bytes) -> None:
        raise ValueError("no such event")

    monkeypatch.setattr(Opens, "take", lose)
    assert node.run().reason.endswith("; only its stated inputs count: an event was lost: no such event")


def test_the_reader_of_events_does_not_wait_for_who_holds_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system of its own: tests beside this one watch that of ``tmp_path``, and would lose the event, too."""
    place = tmp_path / "place"
    place.mkdir()
    watch, ready = Opens.watch, threading.Event()
    monkeypatch.setattr(Opens, "watch", lambda self: (ready.wait(60), watch(self)))
    monkeypatch.setattr("bootseer.kernel.opens._JOIN_SECONDS", 2.0)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    opens = Opens()
    with contextlib.ExitStack() as undo:
        undo.callback(signal.signal, signal.SIGIO, before)
        mounts.mount("none", place, "tmpfs")
        undo.callback(mounts.unmount, place)
        opens.begin()
        undo.callback(opens.end)
        held = os.open(place / "r.txt", os.O_RDWR | os.O_CREAT)
        undo.callback(os.close, held)
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        ready.set()
        opens.end()
    assert opens.failure.startswith("an event was lost")


def test_a_mount_whose_server_does_not_answer_stops_no_start(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.kernel.opens._MARK_SECONDS", 0.5, raising=False)
    place = node.work / "hung"
    place.mkdir()
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,default_permissions"
    mounts.mount("hung", place, "fuse", data=options)
    late = threading.Timer(15, lambda: mounts.unmount(place, force=True, lazy=True))
    late.start()
    try:
        result = node.run()
        assert late.is_alive()
    finally:
        late.cancel()
        os.close(device)
        if mounts.is_mounted(place):
            mounts.unmount(place, force=True, lazy=True)
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert result.reason.endswith("only its stated inputs count: the kernel refused it: a file system did not answer")


def test_others_who_never_stop_opening_files_delay_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.kernel.opens._JOIN_SECONDS", 20.0)
    for number in range(2000):
        node.write(f"many/{number}", "")
    endless = "import os\nwhile True:\n for n in os.listdir(): os.close(os.open(n, os.O_RDONLY))"
    opens = Opens([(str(node.work), "/work")])
    opens.begin()
    others = [subprocess.Popen([sys.executable, "-c", endless], cwd=node.work / "many") for _ in range(3)]
    try:
        time.sleep(1)
        opens.end()
        assert opens.failure != "a file system did not answer"
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_an_event_that_the_kernel_drops_delays_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose file the observer may not open: it is counted, and never comes."""
    waiting = lib_opens.waiting
    monkeypatch.setattr(lib_opens, "waiting", lambda fd: waiting(fd) + lib_opens.EVENT.size)
    monkeypatch.setattr(lib_opens, "_JOIN_SECONDS", 6.0)
    opens = Opens()
    opens.begin()
    (node.work / "r.txt").read_bytes()
    opens.end()
    assert opens.failure == ""
    assert str(node.work / "r.txt") in opens.seen


def test_without_a_thread_the_command_runs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        if self.name == "env-opens":
            raise RuntimeError("can't start new thread")
        start(self)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    result = node.run()
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert "only its stated inputs count: the kernel refused it: can't start new thread" in result.reason


def test_without_its_reader_nothing_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Opens, "take", None)
    opens = Opens()
    opens.begin()
    try:
        assert opens._thread
        os.listdir()
        opens._thread.join(10)
        assert os.readlink(f"/proc/self/fd/{opens._events}") == "anon_inode:[eventfd]"
    finally:
        opens.end()


def test_a_namespace_that_cannot_be_left_again_is_not_entered(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = os.readlink("/proc/thread-self/ns/mnt"), os.getcwd()
    monkeypatch.setattr("bootseer.kernel.libc.setns", refuse)
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    assert (os.readlink("/proc/thread-self/ns/mnt"), os.getcwd()) == before


def test_imports_count_by_their_source(node: Node) -> None:
    module = node.write("lib/m.py", "X = 1\n")
    node.write("s.sh", f"PYTHONPATH=lib {sys.executable} -c 'import m; print(m.X)' > env/made\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(module.parent)], check=True)
    node.run()
    found = node.observed().files
    assert str(module) in found
    assert not [path for path in found if path.startswith(str(node.work)) and path.endswith(".pyc")]


@pytest.mark.parametrize("why", ["refused", "files", "bytes", "namespace", "mounted", "overflow", "name"])
def test_what_cannot_be_observed_is_said(
    node: Node, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = {
        "refused": "the kernel refused it: Operation not permitted",
        "files": "it read more than 1 files",
        "bytes": "it read more than 0 MiB",
        "namespace": "it started unshare",
        "mounted": f"{node.work}/mnt was mounted or unmounted meanwhile",
        "name": "it read a file whose name is not UTF-8",
        "overflow": "too many files were opened at once",
    }[why]
    if why == "refused":

        def refuse(self: Opens) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(Opens, "begin", refuse)
    elif why == "name":
        (node.work / "\udcff").write_text("x")
        node.write("s.sh", "mkdir -p env; cat * > env/made 2> env/errors; :\n")
    elif why == "files":
        monkeypatch.setattr(inputs, "MAX_FILES", 1)
    elif why == "bytes":
        monkeypatch.setattr(inputs, "MAX_BYTES", 1)
    elif why == "namespace":
        node.write("s.sh", "unshare -m cat r.txt > env/made\n")
    elif why == "mounted":
        node.write("s.sh", "cat r.txt > env/made; mkdir mnt; mount -t tmpfs none mnt\n")
    else:
        monkeypatch.setattr("bootseer.kernel.opens._OVERFLOW", 0x20)
    result = node.run()
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert result.reason.endswith(f"; only its stated inputs count: {text}")
    assert node.observed() == inputs.Observed(unobserved=text)
    assert not mounts.is_mounted(node.work / "mnt")
    again = node.run()
    assert again.reason == f"already in place on this node; only its stated inputs count: {text}"


def test_a_snapshot_with_unknown_inputs_does_not_stand_in_for_one_that_changed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.run()
    node.release()
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "MAX_FILES", 0)
        node.write("r.txt", "torch==2.6\n")
        assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    node.release()
    assert len(snapshots.names(FolderStore(node.store))) == 2
    node.write("r.txt", "torch==2.7\n")
    result = node.run()
    assert "r.txt, which the command reads, changed" in result.reason
    assert (node.target / "made").read_text() == "torch==2.7\n"


def test_of_many_snapshots_the_newest_are_compared(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.env.lookup._CANDIDATES", 2)
    monkeypatch.setattr("time.time", iter(range(1_800_000_000, 1_900_000_000, 10)).__next__)
    for number in range(4):
        node.write("r.txt", f"torch==2.{number}\n")
        assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
        node.release()
    for number, known in ((3, True), (2, True), (0, False)):
        node.write("r.txt", f"torch==2.{number}\n")
        assert (node.run().reason == "hit") is known
        node.release()


@pytest.mark.parametrize("thread", [False, True])
def test_the_caller_keeps_its_mounts_and_its_folder(node: Node, thread: bool) -> None:
    def place() -> tuple[str, str, str]:
        return os.readlink("/proc/thread-self/ns/mnt"), os.getcwd(), os.readlink("/proc/thread-self/root")

    def interrupt() -> None:
        assert place()[0] != before[0]
        threading.Thread(target=done.wait, args=(20,)).start()  # shares its folder with who starts it
        raise KeyboardInterrupt

    def work() -> None:
        nonlocal before
        before = place()
        node.run()
        node.release()
        assert place() == before
        with pytest.raises(KeyboardInterrupt):
            node.run(interrupt, salt="other")
        assert place() == before
        finished.append(True)

    before, done, finished = ("", "", ""), threading.Event(), list[bool]()
    try:
        if thread:
            other = threading.Thread(target=work)
            other.start()
            other.join(60)
        else:
            work()
    finally:
        done.set()
    assert finished


@pytest.mark.runtime
@pytest.mark.parametrize("late", [False, True])
def test_what_a_container_reads_of_the_host_counts(
    node: Node, tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bootseer import image, oci
    from bootseer.oci.spec import RootFS

    if late:  # events are read when the container has ended
        drained, watch, ended = Opens.drained, Opens.watch, threading.Event()
        monkeypatch.setattr(Opens, "watch", lambda self: (ended.wait(60), watch(self)))
        monkeypatch.setattr(Opens, "drained", lambda self: (ended.set(), drained(self))[1])
    for folder in ("root", "up", "wk"):
        (tmp_path / folder).mkdir()
    root = tmp_path / "root"
    mounts.mount_overlay([Path("/")], root, upper=tmp_path / "up", work=tmp_path / "wk")
    node.write("other", "x")
    script = "cat /bootseer-job/r.txt > /opt/bootseer-env/made"

    def start() -> EnvResult:
        def runner() -> int:
            node.runs += 1
            (node.work / "other").read_text()  # on this host, by somebody else
            config = oci.ImageConfig("amd64", "linux", RootFS(()))
            bind = image.runtime.Bind(str(node.work), "/bootseer-job", readonly=True)
            return image.runtime.run(root, config, ["/bin/sh", "-c", script], cwd="/", mounts=[bind])

        spec = EnvSpec(
            targets=(Target("/opt/bootseer-env", str(root / "opt/bootseer-env")),),
            command=("sh", "-c", script),
            image_digest="sha256:1",
            mounts=((str(node.work), "/bootseer-job"),),
            background=False,
        )
        return env.run(spec, runner, store_url=str(node.store), config=node.config)

    try:
        assert start().outcome is Outcome.RAN_AND_PUBLISHED
        assert node.observed().unobserved == ""
        assert set(node.observed().files) == {"/bootseer-job/r.txt"}
        assert start().outcome is not Outcome.RAN_AND_PUBLISHED
        node.write("r.txt", "torch==2.6\n")
        assert start().reason == "missed because /bootseer-job/r.txt, which the command reads, changed"
        assert node.runs == 2
    finally:
        node.release()
        mounts.unmount(root)


def test_a_container_of_another_job_does_not_count(node: Node, tmp_path: Path) -> None:
    """One that shows other folders of the same file system at the same path."""

    def box(source: Path, script: str) -> int:
        script = f"mount --bind {source} /mnt && {script}"
        return subprocess.run(["unshare", "-m", "sh", "-c", script], check=False).returncode

    def runner() -> int:
        deep = "import os; [(os.path.isdir('d' * 250) or os.mkdir('d' * 250), os.chdir('d' * 250)) for _ in range(20)]"
        deep = f'cd /mnt && {sys.executable} -c "{deep}; os.listdir()"'
        assert box(tmp_path / "theirs", f"cat /mnt/r.txt /mnt/x; sleep 0.3; {deep}") == 0
        return box(node.work, f"cat /mnt/r.txt > {tmp_path}/target/made; sleep 0.3")

    for name in ("theirs", "target"):
        (tmp_path / name).mkdir()
    for name in ("r.txt", "x"):
        (tmp_path / "theirs" / name).write_text("theirs\n")
    spec = EnvSpec(
        targets=(Target("/opt/bootseer-env", str(tmp_path / "target")),),
        command=("sh", "-c", "x"),
        image_digest="sha256:1",
        mounts=((str(node.work), "/mnt"),),
        background=False,
    )
    result = env.run(spec, runner, store_url=str(node.store), config=node.config)
    assert result.outcome is Outcome.RAN_AND_PUBLISHED, result.reason
    assert set(node.observed().files) == {"/mnt/r.txt"}


def test_a_mount_with_the_number_of_one_that_is_gone_is_seen(node: Node, tmp_path: Path) -> None:
    """Of many that are gone, as when another job ends: the container's own mounts get their numbers."""
    target, places = tmp_path / "target", [tmp_path / f"m{number}" for number in range(90)]
    target.mkdir()

    def runner() -> int:
        for place in places:
            mounts.unmount(place)
        script = f"mount --bind {node.work} /mnt && cat /mnt/r.txt > {target}/made; sleep 0.3"
        return subprocess.run(["unshare", "-m", "sh", "-c", script], check=False).returncode

    for place in places:
        place.mkdir()
        mounts.mount("none", place, "tmpfs")
    spec = EnvSpec(
        targets=(Target("/opt/bootseer-env", str(target)),),
        command=("sh", "-c", "x"),
        image_digest="sha256:1",
        mounts=((str(node.work), "/mnt"),),
        background=False,
    )
    assert env.run(spec, runner, store_url=str(node.store), config=node.config).exit_code == 0
    assert set(node.observed().files) == {"/mnt/r.txt"}


def test_the_command_line_names_the_file(node: Node) -> None:
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith("BOOTSEER_")},
        "BOOTSEER_STORE": str(node.store),
        "BOOTSEER_CACHE_DIR": node.config.cache_dir,
        "BOOTSEER_STATE_DIR": node.config.state_dir,
    }

    def cli(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bootseer.cli.main", *args],
            cwd=node.work, env=environ, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip

    command = ("--target", "env", "--no-background", "--", "sh", "s.sh")
    assert "env: ran-and-published" in cli("env", "run", *command).stderr
    assert "already in place" in cli("env", "run", *command).stderr
    told = cli("env", "run", "-n", *command).stdout
    assert f"same    {node.work}/r.txt" in told
    node.write("r.txt", "torch==2.6\n")
    told = cli("env", "run", "-n", *command).stdout
    assert f"changed {node.work}/r.txt" in told
    assert f"missed because {node.work}/r.txt, which the command reads, changed" in told
    assert f"missed because {node.work}/r.txt, which the command reads, changed" in cli("env", "run", *command).stderr
    assert (node.target / "made").read_text() == "torch==2.6\n"
    names = re.findall(r"\b[0-9a-f]{12}/[0-9a-f]{8}\b", cli("store", "ls").stdout)
    assert len(names) == 2
    assert (
        f"{node.work}/r.txt, which the command reads, changed"
        in cli("env", "inspect", names[0], "--against", names[1]).stdout
    )
