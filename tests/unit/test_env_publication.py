"""Publications in the background: the stage ends with the command, what the job does afterwards is not published, and a
start's end waits for what still reads the layers."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import mmap
import os
import platform
import py_compile
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from bootseer import env
from bootseer.blocks.formats.trace import Touch, Trace
from bootseer.blocks.metadata import LocalTree, localize
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.layout import layout_of
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.env import EnvResult, EnvSpec, Outcome, Target, inventory, publisher, pyc, scan, snapshots
from bootseer.env.contents import ALIGN, Contents, File, read_layers
from bootseer.env.inputs import Opened
from bootseer.env.key import KeyDocument
from bootseer.env.publication import Begin, End, Publication
from bootseer.kernel import beneath
from bootseer.launch import node
from bootseer.launch.node import Start, seen_out
from bootseer.objects import lease, open_store
from support import envnode
from support.waits import until


class Site:
    """A node without mounts; the command makes 20 files."""

    def __init__(self, root: Path) -> None:
        self.root, self.store, self.target = root, root / "store", root / "target"
        self.config = envnode.config_in(root)

    def run(self, act: Callable[[Path], object] = lambda root: None, **changed: object) -> EnvResult:
        def runner() -> int:
            (self.target / "pkg").mkdir(parents=True, exist_ok=True)
            for number in range(20):
                (self.target / f"pkg/{number}").write_text(f"{number} made by the command")
            act(self.target)
            return 0

        return envnode.run(self.root, self.store, runner, restore="unpack", **{"background": True, **changed})

    @property
    def manifests(self) -> list[Path]:
        return list(self.store.glob("env/snapshots/*/*.json"))

    @property
    def leases(self) -> list[Path]:
        return list(self.store.glob("leases/env/*/*"))

    @property
    def left(self) -> list[Path]:
        return list(self.root.glob(".bootseer-*"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_stage_ends_with_the_command_and_the_publication_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "env.publish.before-build=sleep:2")
    result = site.run()
    assert (result.outcome, result.exit_code) == (Outcome.RAN_AND_PUBLISHING, 0)
    assert result.publication
    assert str(result.publication.log) in result.reason
    assert not site.manifests
    publisher = int(result.publication.named.partition(":")[0])
    until(
        lambda: Path(f"/proc/{publisher}/oom_score_adj").read_text() == "1000\n", 10, "that it is ended before the job"
    )
    until(lambda: resource.prlimit(publisher, resource.RLIMIT_DATA)[0] > 0, 10, "its limit of memory")
    assert result.publication.wait(30) == (True, "")
    assert site.manifests
    assert not site.leases
    assert not site.left
    subprocess.run(["rm", "-r", str(site.target)], check=True)
    assert site.run().outcome is Outcome.RESTORED_UNPACK
    assert (site.target / "pkg/7").read_text() == "7 made by the command"


def test_an_empty_result_is_not_published_without_a_word(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    def runner() -> int:
        (site.target / "cache/inductor").mkdir(parents=True)
        return 0

    target = Target("/opt/env", str(site.target))
    spec = EnvSpec(targets=(target,), command=("mkdir",), image_digest="sha256:1", restore="unpack")
    result = env.run(spec, runner, store_url=str(site.store), config=site.config)
    assert "it left no file in its targets" in result.reason
    assert "its snapshot is empty" in caplog.text
    assert result.publication
    assert result.publication.wait(30)[0]
    assert "left no file" not in site.run().reason


@pytest.mark.parametrize("how", ["written", "in place", "gone", "added"])
def test_what_the_job_changes_afterwards_is_not_published(
    site: Site, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "env.publish.before-capture=sleep:1")
    result = site.run()
    file = site.target / "pkg/7"
    before = file.stat()
    match how:
        case "written":
            file.write_text("by the job")
        case "in place":
            with open(file, "r+") as text:
                text.write("8")
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        case "gone":
            file.unlink()
        case "added":
            (site.target / "pkg/__pycache__").mkdir()
            (site.target / "pkg/__pycache__/a.pyc").touch()
    assert result.publication
    published, why = result.publication.wait(30)
    assert published is (how == "added"), why
    assert bool(site.manifests) is published
    assert not site.left
    if published:
        subprocess.run(["rm", "-r", str(site.target)], check=True)
        assert site.run().outcome is Outcome.RESTORED_UNPACK
        assert not (site.target / "pkg/__pycache__").exists()
    else:
        assert "pkg/7" in why


def test_it_ends_with_who_ran_the_command(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "env.publish.before-build=sleep:60")
    folder = str(Path(__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {folder!r}); import test_env_publication as t\n"
        f"result = t.Site(t.Path({str(site.root)!r})).run()\n"
        "print(result.publication.named, flush=True); t.os.kill(t.os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    publisher = done.stdout.strip()
    assert publisher
    until(lambda: not env.publication.users.alive([publisher]), 20)
    assert not site.manifests
    assert not site.leases
    monkeypatch.delenv("BOOTSEER_FAULTS")
    result = site.run()
    assert result.publication
    assert result.publication.wait(30)[0]


def publishers() -> list[str]:
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return [pid for pid in children if "env.publisher" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.usefixtures("children")
def test_nobody_waits_for_one_that_was_killed_while_the_command_ran(site: Site) -> None:
    def kill(root: Path) -> None:
        until(lambda: len(publishers()) == 1)  # the child has become its program
        (publisher,) = publishers()
        os.kill(int(publisher), signal.SIGKILL)
        until(lambda: Path(f"/proc/{publisher}/stat").read_text().rpartition(")")[2].split()[0] == "Z")

    result = site.run(kill)
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert "not published" in result.reason
    (left,) = site.leases
    assert b'"unshared"' in left.read_bytes()


@pytest.mark.usefixtures("children")
def test_it_runs_when_nobody_else_does(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "env.publish.before-capture=sleep:5")
    result = site.run()
    assert result.publication
    pid = int(result.publication.named.partition(":")[0])
    assert (os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)) == (os.SCHED_IDLE, 19)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    result.publication.cancel()
    assert result.publication.wait(10)[0] is False


def test_what_another_snapshot_of_these_targets_has_is_not_stored_again(site: Site) -> None:
    noise = {name: os.urandom(300_000) for name in "abcdefghij"}

    def fill(root: Path) -> None:
        for name, data in noise.items():
            (root / name).mkdir(exist_ok=True)
            (root / name / "large").write_bytes(data)
            for number in range(30):
                (root / name / f"small{number}").write_bytes(data[number * 5000 :][:5000])

    def stored() -> int:
        return sum(path.stat().st_size for path in site.store.rglob("*") if path.is_file())

    assert site.run(fill, salt="1", background=False).outcome is Outcome.RAN_AND_PUBLISHED
    whole = stored()
    subprocess.run(["rm", "-r", str(site.target)], check=True)
    noise["d"] = os.urandom(300_000)
    assert site.run(fill, salt="2", background=False).outcome is Outcome.RAN_AND_PUBLISHED
    assert stored() - whole < 0.2 * whole
    subprocess.run(["rm", "-r", str(site.target)], check=True)
    assert site.run(fill, salt="2").outcome is Outcome.RESTORED_UNPACK
    assert (site.target / "d/large").read_bytes() == noise["d"]
    assert (site.target / "e/small3").read_bytes() == noise["e"][15000:20000]


def test_the_next_snapshot_of_these_targets_has_a_predicted_profile(site: Site) -> None:
    def snapshot(salt: str) -> LocalTree:
        assert site.run(fill, salt=salt, background=False).outcome is Outcome.RAN_AND_PUBLISHED
        subprocess.run(["rm", "-r", str(site.target)], check=True)
        (made,) = [one for one in snapshots.everything(store) if one.document.salt == salt]
        return localize(store, made.tree, site.root / "look")

    fill = lambda root: (root / "lib.so").write_bytes(bytes(range(256)) * 2000)  # noqa: E731
    store, key = open_store(str(site.store)), ProfileKey("train")
    before = snapshot("1")
    (part,) = [part for part in layout_of(before.meta) if part.path == b"0/lib.so"]
    read = Trace(before.digest, before.map.size, 5, True, (Touch(1, 7, part.unit + 3, 4),))
    assert library.publish(store, key, read, before.map) == "published"
    fill = lambda root: (root / "lib.so").write_bytes(bytes(range(255)) * 2000)  # noqa: E731
    after = snapshot("2")
    (found,) = library.load_own(store, after.digest, key, after.map.size)
    assert found.source == before.digest


def test_after_one_that_was_killed_the_next_is_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that ends at once, such as a container for this alone, would publish at none."""
    monkeypatch.setattr(lease, "DEAD", 0.5)
    with monkeypatch.context() as patch:
        patch.setenv("BOOTSEER_FAULTS", "env.publish.before-build=sleep:20")
        publication = site.run().publication
        assert publication
        until(lambda: bool(site.leases))
        publication.give_up()
    assert site.leases
    assert site.run().outcome is Outcome.RAN_AND_PUBLISHED


def test_where_no_thread_can_be_started_the_command_runs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        if self.name == "env-publication":
            raise RuntimeError("can't start new thread")
        begin(self)

    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    assert site.run().outcome is Outcome.RAN_AND_PUBLISHED


def test_byte_code_of_the_same_source_is_stored_once_whenever_it_was_made(site: Site) -> None:
    sources = {f"m{number}": f"x = {os.urandom(1500).hex()!r}\n" for number in range(60)}

    def install(at: float) -> Callable[[Path], object]:
        def fill(root: Path) -> None:
            for name, text in sources.items():
                (root / f"{name}.py").write_text(text)
                os.utime(root / f"{name}.py", (at, at))
                py_compile.compile(str(root / f"{name}.py"), doraise=True)

        return fill

    def stored() -> int:
        return sum(path.stat().st_size for path in site.store.rglob("blobs/*/*"))

    def run(salt: str, at: float) -> Outcome:
        return site.run(install(at), salt=salt, background=False).outcome

    assert run("1", 1.7e9) is Outcome.RAN_AND_PUBLISHED
    whole = stored()
    subprocess.run(["rm", "-r", str(site.target)], check=True)
    assert run("2", 1.8e9) is Outcome.RAN_AND_PUBLISHED
    assert stored() - whole < 0.1 * whole
    subprocess.run(["rm", "-r", str(site.target)], check=True)
    assert run("2", 1.9e9) is Outcome.RESTORED_UNPACK
    tag = sys.implementation.cache_tag
    for name, text in sources.items():
        source = site.target / f"{name}.py"
        assert source.read_text() == text
        assert source.stat().st_mtime < 1.7e9, "older than what anybody writes from now on"
        said = (site.target / f"__pycache__/{name}.{tag}.pyc").read_bytes()[4:16]
        assert said == struct.pack("<III", 0, int(source.stat().st_mtime), len(text)), "it counts"


def test_a_source_that_was_stored_before_its_byte_code_gets_its_time_from_its_content(tmp_path: Path) -> None:
    written = io.BytesIO()
    source, contents = tmp_path / "0/m.py", Contents(written)
    source.parent.mkdir()
    source.write_text("x = 1\n")

    def early() -> None:
        with beneath.folder(tmp_path) as root:
            files = [File(root, path, status) for path, status in scan.walk(tmp_path)]
            [*contents.early([file for file in files if stat.S_ISREG(file.status.st_mode)], time.time() + 1)]

    early()
    assert b"x = 1" in written.getvalue()
    py_compile.compile(str(source), doraise=True)
    early()
    content = read_layers(contents, 1, tmp_path)
    (entry,) = [entry for entry in content.entries if entry.path == "0/m.py"]
    assert entry.mtime_ns < 1.4e18
    assert struct.pack("<III", 0, entry.mtime_ns // 10**9, 6) in written.getvalue(), "its byte code says so"
    assert struct.pack("<III", 0, int(source.stat().st_mtime), 6) not in written.getvalue()


def test_what_was_stored_early_and_renamed_with_its_folder_is_as_if_it_had_been_there(tmp_path: Path) -> None:
    """Red before: byte code named another time than its source had, and what a wheel had brought was taken for a
    secret."""
    written = io.BytesIO()
    made, contents = tmp_path / "0/new", Contents(written)
    (made / "m-1.dist-info").mkdir(parents=True)
    source, text = made / "m.py", "x = 'https://user:hunter2hunter2@example.com/x'\n"
    source.write_text(text)
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    (made / "n.py").write_text("x = 1\n")
    (made / "m-1.dist-info/RECORD").write_text(f"m.py,sha256={digest},{len(text)}\n")

    def early() -> None:
        with beneath.folder(tmp_path) as root:
            files = [File(root, path, status) for path, status in scan.walk(tmp_path)]
            [*contents.early([file for file in files if stat.S_ISREG(file.status.st_mode)], time.time() + 1)]

    early()
    py_compile.compile(str(made / "n.py"), doraise=True)
    early()
    made.rename(tmp_path / "0/old")
    content = read_layers(contents, 1, tmp_path)
    assert not content.secrets
    entries = {entry.path: entry for entry in content.entries}
    assert entries["0/old/n.py"].mtime_ns < 1.4e18
    (code,) = (entry for path, entry in entries.items() if path.endswith(".pyc"))
    says = struct.pack("<III", 0, entries["0/old/n.py"].mtime_ns // 10**9, 6)
    data = (tmp_path / code.path).read_bytes()
    assert code.data == blake3(data[:4] + says + data[16:]).hexdigest()


def test_what_settled_early_is_not_read_again(tmp_path: Path) -> None:
    written: list[bytes] = []

    class Sink:
        def write(self, data: object, /) -> None:
            written.append(bytes(data))  # type: ignore[call-overload]

    (tmp_path / "0/pkg").mkdir(parents=True)
    (tmp_path / "0/pkg/large").write_bytes(os.urandom(100_000))
    (tmp_path / "0/pkg/changed").write_text("early")
    (tmp_path / "0/pkg/gone").write_text("https://user:hunter2hunter2@example.com/x")
    contents, root = Contents(Sink()), os.open(tmp_path, os.O_RDONLY)
    found = [File(root, path, status) for path, status in scan.walk(tmp_path) if path.count("/") == 2]
    assert len([*contents.early(found, time.time() + 1)]) == 2
    early = b"".join(written)
    assert (tmp_path / "0/pkg/large").read_bytes() in early
    assert b"hunter2" not in early, "what may be a secret is not stored"
    (tmp_path / "0/pkg/changed").write_text("in the end")
    (tmp_path / "0/pkg/gone").unlink()
    content = read_layers(contents, 1, tmp_path)
    assert not content.secrets
    late = b"".join(written)[len(early) :]
    assert late.strip(b"\0") == b"in the end"
    assert contents.seal(content.items, content.entries)
    assert sum(length for _, length in contents.dead()) >= 4096
    os.close(root)


def test_a_change_in_one_small_package_moves_nothing_of_the_others(tmp_path: Path) -> None:
    def blocks(early: bool) -> set[bytes]:
        written = io.BytesIO()
        contents = Contents(written)
        if early:
            with beneath.folder(tmp_path) as root:
                walked = [File(root, path, status) for path, status in scan.walk(tmp_path)]
                files = [file for file in walked if stat.S_ISREG(file.status.st_mode)]
                before = files[0].status.st_ctime  # the others of its unit have not settled
                assert [*contents.early(files, before)] == []
        content = read_layers(contents, 1, tmp_path)
        contents.seal(content.items, content.entries)
        return {written.getvalue()[at : at + ALIGN] for at in range(0, written.tell(), ALIGN)}

    for package in range(40):
        for number in range(8):
            file = tmp_path / f"0/lib/p{package:02}/m{number % 4}/{number}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(os.urandom(2500 if package < 20 else 16000))
    before = blocks(early=False)
    assert blocks(early=True) == before
    for package in (3, 23):
        (tmp_path / f"0/lib/p{package:02}/m0/new.py").write_bytes(os.urandom(5000))
    assert len(blocks(early=False) - before) < 0.25 * len(before)


def test_what_somebody_may_write_through_a_mapping_is_not_read_early(tmp_path: Path) -> None:
    """The kernel changes the times of a file at the first write to a page, and for half a minute not at the next."""
    written: list[bytes] = []

    class Sink:
        def write(self, data: object, /) -> None:
            written.append(bytes(data))  # type: ignore[call-overload]

    (tmp_path / "0").mkdir()
    (tmp_path / "0/index").write_bytes(bytes(4096))
    contents = Contents(Sink())
    with (
        beneath.folder(tmp_path) as root,
        open(tmp_path / "0/index", "r+b") as file,
        mmap.mmap(file.fileno(), 4096) as mapped,
    ):
        mapped[:4] = b"half"
        [*contents.early([File(root, "0/index", os.stat(tmp_path / "0/index"))], time.time() + 1)]
        mapped[:4] = b"done"
    read_layers(contents, 1, tmp_path)
    assert b"done" in b"".join(written)
    assert b"half" not in b"".join(written)


def begun(site: Site) -> Begin:
    """A command that has made a file by now."""
    upper = site.root / "area/upper/0"
    upper.mkdir(parents=True)
    (upper / "early").write_bytes(os.urandom(6 << 20))
    document = KeyDocument(targets=["/opt/env"], command=["x"])
    spec = EnvSpec(targets=(Target("/opt/env", str(site.target)),), command=("x",))
    return Begin(spec, document, None, [{}], str(site.root / "area"), str(site.store), site.config)


def test_a_look_that_waits_for_a_processor_is_no_reason_for_a_pause(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has the idle priority. Red before: after a look that took it half a second of 20 ms of work nothing
    was stored for five seconds, in which the command ended."""
    walk = scan.walk
    monkeypatch.setattr(scan, "walk", lambda *given, **more: (time.sleep(0.3), walk(*given, **more))[1])
    with publisher.Work(begun(site)) as work:
        assert work.settled(lambda: False) < 0.1


def test_a_folder_that_has_settled_is_listed_once_while_the_command_runs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, scandir = list[int](), os.scandir
    monkeypatch.setattr(os, "scandir", lambda fd: (listed.append(fd), scandir(fd))[1])
    monkeypatch.setattr(publisher, "_SETTLED", -5.0)
    with publisher.Work(begun(site)) as work:
        upper = site.root / "area/upper/0"
        work.settled(lambda: False)
        before = len(listed)
        (upper / "early").write_bytes(b"changed in place, which its folder does not tell")
        work.settled(lambda: False)
        assert (before, len(listed)) == (2, 2)
        (upper / "late").write_bytes(b"new")
        work.settled(lambda: False)
        assert len(listed) == 3
        assert work.publish(End(Opened(), 0, 1.0, [], None, alone=True)) == (True, "")
    (path,) = site.store.glob("env/lists/*")
    found = {entry.path: entry.size for entry in inventory.decode(path.read_bytes(), targets=1)}
    assert found == {"0": 0, "0/early": 48, "0/late": 3}


@pytest.mark.parametrize("when", ["command", "end"])
def test_a_store_that_was_away_while_the_command_ran_gets_the_snapshot(
    site: Site, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The process stores files early with one writer, and begins anew after an error of it, also when that comes only
    after the command."""
    monkeypatch.setattr(publisher, "_SETTLED", -1.0)
    with publisher.Work(begun(site)) as work:
        (site.store / "blobs").parent.mkdir(exist_ok=True)
        (site.store / "blobs").write_text("in the way")
        work.settled(lambda: False)
        if when == "command":
            until(lambda: work.settled(lambda: False) or work.failed)
        (site.store / "blobs").unlink()
        work.settled(lambda: False)
        assert work.publish(End(Opened(), 0, 1.0, [], None, alone=True)) == (True, "")
    assert site.manifests


def test_byte_code_is_that_of_the_environment(tmp_path: Path) -> None:
    version = platform.python_version_tuple()
    layer, out, place = tmp_path / "upper", tmp_path / "out", f"lib/python3.{version[1]}/site-packages"
    for folder in (place, "lib/python3.4/site-packages", "node_modules/x"):
        (layer / "venv" / folder / "pkg").mkdir(parents=True)
        (layer / "venv" / folder / "pkg/a.py").write_text("x = 1\n")
        (layer / "venv" / folder / "pkg/bad.py").write_text("print 'two'\n")
    (layer / "venv/bin").mkdir()
    (layer / "venv/bin/python").symlink_to(sys.executable)
    target = Target(str(layer))
    spec = EnvSpec(targets=(target,), command=("sh", "-c", "uv venv"), environ={"PATH": "/nowhere"})
    pyc.compile_missing(spec, target, layer, out)
    (made,) = [path for path in out.rglob("*") if path.is_file()]
    assert made.relative_to(out) == Path("venv", place, f"pkg/__pycache__/a.cpython-3{version[1]}.pyc")
    assert f"{layer}/venv/{place}/pkg/a.py".encode() in made.read_bytes()
    assert not list(layer.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["{bin}/python3.99", "-m", "pip"], "python3.99"),
        (["pip", "install"], "python3.98"),
        (["uv", "pip", "install", "-p", "3.99"], "python3.99"),
        (["uv", "pip", "install", "--python=3.98"], "python3.98"),
        (["sh", "s.sh"], "python3"),
    ],
)
def test_packages_in_a_flat_folder_are_for_the_interpreter_of_the_command(
    tmp_path: Path, command: list[str], found: str
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("python3.99", "python3.98", "python3", "uv"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin/pip").write_text(f"#!{tmp_path}/bin/python3.98\n")
    (tmp_path / "bin/pip").chmod(0o755)
    (tmp_path / "layer/six-1.dist-info").mkdir(parents=True)
    words = tuple(word.format(bin=tmp_path / "bin") for word in command)
    target = Target(str(tmp_path / "layer"))
    spec = EnvSpec(targets=(target,), command=words, environ={"PATH": str(tmp_path / "bin")})
    assert [*pyc.homes(spec, target, tmp_path / "layer")] == [pyc.Home(str(tmp_path / "bin" / found), "")]


def test_a_start_without_standard_descriptors_publishes_too(site: Site) -> None:
    command = f"bootseer env run --restore unpack --target {site.target} --store {site.store} mkdir {site.target}"
    environ = {"BOOTSEER_CACHE_DIR": site.config.cache_dir, "BOOTSEER_STATE_DIR": site.config.state_dir}
    subprocess.run(["bash", "-c", f"exec {command} <&- >&- 2>&-"], env=os.environ | environ, check=True)
    until(lambda: bool(site.manifests))


# -- the end of a start ---------------------------------------------------------------------------------------------


def record() -> Start:
    start = Start(job="j", attempt=0, cycle=0, node="n", events="")
    start.env = {"how": "ran", "reason": "miss"}
    return start


@pytest.mark.parametrize("kind", [None, KeyboardInterrupt])
def test_the_end_of_a_start_cancels_what_is_not_done(
    site: Site, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException] | None
) -> None:
    monkeypatch.setattr(node, "_PUBLICATION_DEADLINE", 0.1)
    monkeypatch.setenv("BOOTSEER_FAULTS", "env.publish.before-capture=sleep:20")
    publication, start = site.run().publication, record()
    assert isinstance(publication, Publication)
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), seen_out(publication, start):
        if kind:
            raise kind
    assert publication.ended(0)
    assert time.monotonic() - began < 15
    assert start.env["how"] == "ran"
    assert "cancelled" in str(start.env["reason"])
    assert not site.manifests


def test_a_publication_that_ends_in_time_counts(site: Site) -> None:
    publication, start = site.run().publication, record()
    assert publication
    with seen_out(publication, start):
        pass
    assert start.env["how"] == "ran-and-published"
