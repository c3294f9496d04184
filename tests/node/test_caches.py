"""Caches that starts hand on to each other: generations are united, and a start is right whatever is wrong with one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zstandard

from bootseer import erofs
from bootseer.blocks.publish.tree import publish
from bootseer.config import Config
from bootseer.env import generation, inventory, manifest, overlay, users
from bootseer.env.cacheuse import Use
from bootseer.env.generation import Cache, Held
from bootseer.env.inventory import Entry
from bootseer.env.spec import Technique
from bootseer.errors import BootseerError
from bootseer.kernel import mount as mounts
from bootseer.launch.caches import Caches, may_begin_again
from bootseer.objects import open_store
from support import forked
from support.waits import until

pytestmark = pytest.mark.root


class Nodes:
    """Empty nodes with one store, and what is held on them."""

    def __init__(self, root: Path, how: Technique) -> None:
        self.root, self.how, self.store = root, how, root / "store"
        self.cache = Cache(group="compile", path="/run/bootseer/caches", owner=(0, 0))
        self.held: list[Held] = []

    def start(self, node: str, cache: Cache | None = None) -> Held:
        config = Config(cache_dir=str(self.root / node / "cache"), state_dir=str(self.root / node / "state"))
        held = generation.restore(cache or self.cache, str(self.store), config, how=self.how)
        self.held.append(held)
        return held

    def end(self) -> None:
        for held in self.held:
            held.close()

    @property
    def generations(self) -> list[int]:
        found = generation.generations(open_store(str(self.store)), self.cache.document.key, Config())
        return [generation.number_of(one) for one in found]


@pytest.fixture(params=["mount", "unpack"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, request.param)
    yield nodes
    nodes.end()


def add(held: Held, *names: str, text: str = "compiled") -> None:
    for name in names:
        path = held.folder / "inductor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text} {name}\n" * 50)


def captured(held: Held) -> tuple[bool, str]:
    publication = held.capture(last=True)
    return publication.wait(60) if publication else (False, "nothing was added")


def names(held: Held) -> set[str]:
    return {path.removeprefix("inductor/") for path in held.entries()}


def test_what_a_start_adds_is_there_on_the_next_empty_node(nodes: Nodes) -> None:
    first = nodes.start("a")
    assert (first.said, names(first)) == ("cold", set())
    add(first, "aa/one.so", "aa/two.so", "locks/one.lock", ".1.tmp")
    assert captured(first) == (True, "")
    second = nodes.start("b")
    assert second.said == "restored generation 1"
    assert names(second) == {"aa/one.so", "aa/two.so"}
    assert not (second.folder / "inductor/locks").exists()
    assert (second.folder / "inductor/aa/one.so").read_text() == "compiled aa/one.so\n" * 50
    assert captured(second) == (False, "nothing was added")
    add(second, "bb/three.so")
    assert captured(second) == (True, "")
    assert names(nodes.start("c")) == {"aa/one.so", "aa/two.so", "bb/three.so"}
    assert nodes.generations == [2, 1]


def test_a_text_with_a_credential_stays_on_the_node(nodes: Nodes) -> None:
    first = nodes.start("a")
    add(first, "aa/one.so")
    add(first, "aa/log.txt", text="export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMIK7MDENGbPxRfiCYzzzzzzzzzzzz")
    assert captured(first) == (True, "")
    second = nodes.start("b")
    assert names(second) == {"aa/one.so"}
    add(second, "aa/log.txt", text="export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMIK7MDENGbPxRfiCYzzzzzzzzzzzz")
    assert captured(second) == (False, "nothing is new")
    assert nodes.generations == [1]


@pytest.mark.parametrize("nodes", ["mount"], indirect=True)
def test_two_nodes_that_end_at_once_both_count(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = nodes.start("a"), nodes.start("b")
    add(first, "aa/one.so", "aa/both.so")
    add(second, "bb/two.so", "aa/both.so", text="compiled elsewhere")
    monkeypatch.setenv("BOOTSEER_FAULTS", "env.gather.before-manifest=sleep:3")
    running = [held.capture(last=True) for held in (first, second)]
    assert [one.wait(60) for one in running if one] == [(True, ""), (True, "")]
    assert names(nodes.start("c")) == {"aa/one.so", "aa/both.so", "bb/two.so"}
    assert nodes.generations == [2, 1]


@pytest.mark.parametrize("step", ["build", "tree", "manifest"])
@pytest.mark.parametrize("fault", ["kill", "enospc"])
def test_a_capture_that_fails_or_is_killed_leaves_the_generation_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, fault: str
) -> None:
    nodes = Nodes(tmp_path, "mount")
    first = nodes.start("a")
    add(first, "aa/one.so")
    assert captured(first) == (True, "")
    add(first, "aa/two.so")
    monkeypatch.setenv("BOOTSEER_FAULTS", f"env.gather.before-{step}={fault}")
    running = first.capture(last=True)
    assert running
    published, why = running.wait(60)
    assert (published, fault == "kill" or "not published: " in why) == (False, True), why
    monkeypatch.delenv("BOOTSEER_FAULTS")
    first.retract()
    assert names(nodes.start("b")) == {"aa/one.so"}
    assert captured(first) == (True, "")
    assert names(nodes.start("c")) == {"aa/one.so", "aa/two.so"}
    nodes.end()
    assert not mounts.below(tmp_path)


def test_what_changes_after_its_capture_is_captured_again(nodes: Nodes) -> None:
    first = nodes.start("a")
    add(first, "aa/one.so", text="half")
    assert captured(first) == (True, "")
    add(first, "aa/one.so", text="whole")
    assert captured(first) == (True, "")
    second = nodes.start("b")
    assert (second.folder / "inductor/aa/one.so").read_text() == "whole aa/one.so\n" * 50
    add(second, "aa/one.so", text="another")
    assert captured(second) == (True, "")
    assert (nodes.start("c").folder / "inductor/aa/one.so").read_text() == "another aa/one.so\n" * 50


def test_what_was_captured_before_the_first_step_ended_counts_as_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LOOK", "_SETTLED", "_UNTOLD"):
        monkeypatch.setattr(f"bootseer.launch.caches.{name}", 2.5, raising=False)
    nodes = Nodes(tmp_path, "mount")
    held = nodes.start("a")
    held.close()
    caches = Caches(held.cache, ["inductor"], held.store_url, held.config)
    with caches.seen_out():
        caches.begin()
        add(held, "aa/one.so", "aa/two.so")
        until(lambda: nodes.generations == [1], 60, "a capture")
        add(held, "aa/three.so")
        assert caches.stepped(40.0).compiled == 3
    again = nodes.start("b")
    assert again.restored
    assert again.restored.seconds == 40.0  # what is saved later is against that
    assert names(again) == {"aa/one.so", "aa/two.so", "aa/three.so"}
    nodes.end()


@pytest.mark.parametrize("what", ["tree", "blobs", "manifest"])
def test_damage_is_cold_or_the_generation_before(nodes: Nodes, what: str) -> None:
    first = nodes.start("a")
    add(first, "aa/one.so")
    assert captured(first) == (True, "")
    for path in {
        "tree": nodes.store.glob("trees/*"),
        "blobs": (path for path in nodes.store.glob("blobs/**/*") if path.is_file()),
        "manifest": nodes.store.glob("env/snapshots/*/*.json"),
    }[what]:
        path.write_bytes(path.read_bytes()[:-9] + b"damaged!!")
    second = nodes.start("b")
    if what == "blobs" and second.restored:  # seen when it is read
        with pytest.raises(OSError, match="Input/output"):
            (second.folder / "inductor/aa/one.so").read_text()
        assert second.group
        assert not second.group.intact
    else:
        assert second.said.startswith("cold"), second.said
        assert names(second) == set()
        add(second, "aa/one.so")
        assert captured(second)[0]


def test_what_no_start_uses_goes_and_what_is_beyond_the_limits(nodes: Nodes) -> None:
    cache = msgspec.structs.replace(nodes.cache, generations=2, most_files=3)
    for number in range(4):
        held = nodes.start(f"n{number}", cache)
        add(held, f"aa/{number}.so")
        assert held.capture(["inductor/aa/0.so"], last=True).wait(60) == (True, "")  # type: ignore[union-attr]
    assert names(nodes.start("last", cache)) == {"aa/0.so", "aa/2.so", "aa/3.so"}


def test_a_store_that_cannot_be_written_to_or_read(nodes: Nodes) -> None:
    held = nodes.start("a")
    add(held, "aa/one.so")
    nodes.store.mkdir(exist_ok=True)
    (nodes.store / "env").write_text("no folder")
    published, why = captured(held)
    assert not published
    assert "not published" in why
    again = nodes.start("b")
    assert again.said.startswith("cold")
    add(again, "aa/one.so")


def test_links_and_devices_of_a_job_are_no_entries(nodes: Nodes) -> None:
    held = nodes.start("a")
    add(held, "aa/one.so")
    folder = held.folder / "inductor"
    (folder / "link.so").symlink_to("/etc/shadow")
    (folder / "up").symlink_to("/etc")
    os.mkfifo(folder / "fifo.so")
    (folder / "aa/one.so").chmod(0o6777)
    assert captured(held) == (True, "")
    again = nodes.start("b")
    assert names(again) == {"aa/one.so"}
    assert (again.folder / "inductor/aa/one.so").stat().st_mode & 0o7777 == 0o755
    assert not (again.folder / "inductor/up").is_symlink()


def test_a_generation_that_goes_takes_nothing_of_another_cache_along(nodes: Nodes) -> None:
    """Which holds the very same files, of the same times."""
    other = msgspec.structs.replace(nodes.cache, salt="x")
    held = nodes.start("a")
    for one in (held, nodes.start("b", other)):
        add(one, "aa/one.so")
        for folder, _, files in os.walk(one.folder, topdown=False):
            for path in (*files, "."):
                os.utime(Path(folder, path), ns=(10**18, 10**18))
        assert captured(one) == (True, "")
    for name in ("aa/two.so", "aa/three.so"):
        add(held, name)
        assert captured(held) == (True, "")
    assert nodes.generations == [3, 2]
    assert names(nodes.start("c", other)) == {"aa/one.so"}


@contextlib.contextmanager
def another_user(held: Held) -> Iterator[None]:
    """Another process of the node that uses the cache, too."""
    state = Path(held.config.state_dir)
    with subprocess.Popen(["sleep", "300"]) as process:
        try:
            (group,) = overlay.groups_on([held.folder], state, 0)
            group.mine = users.named([process.pid])
            group.join()
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("last", [False, True])
def test_who_joined_keeps_the_cache_when_another_start_has_captured_and_ended(tmp_path: Path, last: bool) -> None:
    nodes = Nodes(tmp_path, "mount")
    held = nodes.start("a")
    add(held, "aa/one.so")
    ended = threading.Event()

    def write() -> None:  # what is written just now is captured at a job's end alone
        while not ended.wait(0.02):
            os.utime(held.folder / "inductor/aa/one.so")

    writer = threading.Thread(target=write)
    with another_user(held):
        running = held.capture(last=last)
        assert running
        writer.start()
        try:
            assert running.wait(60)[0] == last
        finally:
            ended.set()
            writer.join()
        held.close()
        assert names(held) == {"aa/one.so"}
    held.close()
    assert not mounts.below(tmp_path)


def test_who_joins_while_a_capture_gives_up_keeps_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path, "mount")
    held = nodes.start("a")
    add(held, "aa/one.so")
    told = generation.Gather(
        cache=held.cache, view=str(held.folder.parent), work="", used=[], changed=[], seconds=0, last=True,
        store_url=str(nodes.store), config=held.config,
    )  # fmt: skip
    read = overlay.groups_on([held.folder], Path(held.config.state_dir), 0)
    with another_user(held):
        monkeypatch.setattr(overlay, "groups_on", lambda *_: read)
        generation.give_up(told)
        assert names(held) == {"aa/one.so"}
    held.close()
    assert not mounts.below(tmp_path)


@contextlib.contextmanager
def namespace(*options: str, program: str = "read line") -> Iterator[subprocess.Popen[str]]:
    """A mount namespace that somebody makes now, so with copies of all mounts, and a program in it."""
    argv = ["unshare", "-m", *options, "sh", "-c", f"echo; {program}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield process
        finally:
            process.communicate()


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[Held]:
    nodes = Nodes(tmp_path, "mount")
    first = nodes.start("a")
    add(first, "aa/one.so", text=os.urandom(100_000).hex())
    assert captured(first) == (True, "")
    first.close()
    yield nodes.start("b")
    nodes.end()
    until(lambda: not [*tmp_path.glob("b/state/trees/*/")], 40, "the end of the block server")


@pytest.mark.serial  # a namespace that another test makes meanwhile would have a copy, too
@pytest.mark.parametrize("propagation", ["private", "slave"])
def test_a_namespace_that_somebody_made_meanwhile_keeps_nothing_of_it(restored: Held, propagation: str) -> None:
    base = Path(restored.config.cache_dir).parent
    with namespace("--propagation", propagation) as other:
        assert [entry for entry in mounts.entries(other.pid) if str(base) in entry.target]
        restored.close()
        assert not mounts.below(base)
        assert not [entry for entry in mounts.entries(other.pid) if str(base) in entry.target]
        assert [*base.glob("state/trees/*/"), *base.glob("cache/env/*")] == []


RENAMED = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\\xff\\n\\x1b[31m'); print(flush=True); sys.stdin.read()"


@pytest.mark.serial  # a namespace that another test makes meanwhile would have a copy, too
def test_a_process_that_has_a_copy_may_have_any_name(restored: Held, caplog: pytest.LogCaptureFixture) -> None:
    with namespace("--user", "--map-root-user", program=f'exec {sys.executable} -c "{RENAMED}"') as other:
        assert other.stdout
        other.stdout.readline()
        restored.close()
        lines = [line for line in caplog.text.splitlines() if f"process {other.pid} " in line]
        assert len(lines) == 1, caplog.text
        assert r"\n\x1b[31m) has a copy of the mount on " in lines[0]


@pytest.mark.serial  # a namespace that another test makes meanwhile would have a copy, too
@pytest.mark.parametrize("options", [["--propagation", "private"], ["--user", "--map-root-user"]])
def test_a_copy_that_is_in_use_or_locked_is_left_and_named(
    restored: Held, options: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = restored.folder / "inductor/aa/one.so"
    with namespace(*options, program=f"exec <{path}; cat") as other:
        until(lambda: os.readlink(f"/proc/{other.pid}/fd/0") == str(path), 10, "the open file")
        restored.close()
        assert f"process {other.pid} " in caplog.text
        assert f" has a copy of the mount on {restored.folder}" in caplog.text
        assert not mounts.is_mounted(restored.folder)


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[tuple[Nodes, Held]]:
    """A cache that was restored, and of which not all can be read."""
    nodes = Nodes(tmp_path, "mount")
    first = nodes.start("a")
    add(first, "aa/one.so", text=os.urandom(5_000).hex())
    assert captured(first) == (True, "")
    first.close()
    pack = max(
        (path for path in nodes.store.glob("blobs/**/*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    pack.write_bytes(bytes(pack.stat().st_size))
    held = nodes.start("b")
    assert held.restored
    with pytest.raises(OSError, match="Input/output"):
        (held.folder / "inductor/aa/one.so").read_text()
    add(held, "aa/two.so")
    yield nodes, held
    nodes.end()
    assert not mounts.below(tmp_path)


def test_a_start_does_not_take_a_damaged_cache_from_one_that_runs(damaged: tuple[Nodes, Held]) -> None:
    nodes, held = damaged
    with another_user(held):
        with pytest.raises(BootseerError, match=r"not all can be read is in use by process \d+ \(sleep\)"):
            nodes.start("b")
        assert names(held) == {"aa/one.so", "aa/two.so"}
    assert names(nodes.start("b")) == set()


def test_a_start_begins_again_beside_another_one_without_caches(damaged: tuple[Nodes, Held]) -> None:
    _, held = damaged
    caches = Caches(held.cache, ["triton"], held.store_url, held.config)
    with another_user(held):
        assert caches.begin().startswith("no cache: a cache of which not all can be read")
        assert caches.close().how == "no cache"
        assert names(held) == {"aa/one.so", "aa/two.so"}


def test_a_command_begins_again_only_after_a_failure_of_its_own_and_soon() -> None:
    assert may_begin_again(1, 5)
    assert not may_begin_again(0, 5)
    assert not may_begin_again(137, 5)
    assert not may_begin_again(1, 3600)


UNMOUNT = "import os, subprocess; subprocess.run(['umount', os.path.dirname(os.environ['TRITON_CACHE_DIR'])], check=1)"
TOO_LONG = """
import os
os.makedirs(os.environ['TRITON_CACHE_DIR'])
os.chdir(os.environ['TRITON_CACHE_DIR'])
open('one.so', 'w').write('compiled')
for _ in range(30):
    os.mkdir('d' * 200)
    os.chdir('d' * 200)
open('deep.so', 'w').write('compiled')
"""


def own(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """The command line of a command with the cache of Triton, and its variables."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("BOOTSEER_", "TRITON_"))}
    environ |= {f"BOOTSEER_{name.upper()}_DIR": str(tmp_path / name) for name in ("cache", "state")}
    environ |= {"BOOTSEER_STORE": str(tmp_path / "store")}
    return [sys.executable, "-m", "bootseer.cli.main", "env", "run", "--cache", "triton", "--"], environ


@pytest.mark.parametrize("job", [UNMOUNT, TOO_LONG])
def test_the_exit_code_is_the_jobs_whatever_it_does_to_its_cache(tmp_path: Path, job: str) -> None:
    argv, environ = own(tmp_path)
    argv += [sys.executable, "-c", f"{job}\nraise SystemExit(3)"]
    done = forked.run(*argv[1:], env=environ)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert not mounts.below(tmp_path)
    if job == TOO_LONG:
        show = "import os; print(os.listdir(os.environ['TRITON_CACHE_DIR']))"
        shown = forked.run(*argv[1:-1], show, env=environ)
        assert shown.stdout == "['one.so']\n", done.stderr + shown.stderr


def test_a_start_that_is_broken_off_waits_for_no_capture(tmp_path: Path) -> None:
    argv, environ = own(tmp_path)
    job = (
        "import os, time; os.makedirs(p := os.environ['TRITON_CACHE_DIR']); open(p + '/one.so', 'w').write('compiled')"
    )
    argv += [sys.executable, "-c", f"{job}; open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(60)"]
    environ["BOOTSEER_FAULTS"] = "env.gather.before-build=sleep:60"
    with forked.Popen(argv, env=environ, stderr=subprocess.PIPE, text=True) as process:
        until((tmp_path / "ready").exists, 60, "the command's begin")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert time.monotonic() - began < 20, said
    assert "caches: cold, compiled 1" in said
    assert not mounts.below(tmp_path)


def test_one_entry_beyond_the_limit_drives_out_no_other(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "unpack")
    cache = msgspec.structs.replace(nodes.cache, most_bytes=100_000)
    first = nodes.start("a", cache)
    add(first, "aa/one.so")
    assert captured(first) == (True, "")
    add(first, "aa/large.so", text="x" * 5_000)
    add(first, "aa/two.so")
    assert captured(first) == (True, "")
    assert names(nodes.start("b", cache)) == {"aa/one.so", "aa/two.so"}


KERNEL = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def add(out, x):
    tl.store(out + tl.program_id(0), tl.load(x) + 1)

triton.compile(ASTSource(add, {"out": "*fp32", "x": "*fp32"}), target=GPUTarget("cuda", 90, 32))
"""


def test_kernels_of_triton_are_found_where_the_nodes_folder_is_another(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    argv, environ = own(tmp_path)
    (tmp_path / "kernel.py").write_text(KERNEL)
    said = []
    for node in ("one", "other", "other"):
        environ["BOOTSEER_CACHE_DIR"] = str(tmp_path / node)
        run = [*argv, sys.executable, str(tmp_path / "kernel.py")]
        done = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        said += [line.split(", ") for line in done.stderr.splitlines() if line.startswith("caches: ")]
    assert said[0][0] == "caches: cold"
    for _, used, compiled, *_ in said[1:]:
        assert (used[:5], compiled) == ("used ", "compiled 0 anew"), said
        assert int(used[5:]) > 2, said


GROUPS = (
    "[]",
    '{"child_paths": 1}',
    '{"child_paths": {"a": 1}}',
    '{"child_paths": {"a": "/etc/passwd"}}',
    "[" * 99_999,
)


def test_what_is_no_group_of_triton_stays_as_it_is_or_leads_into_the_cache(nodes: Nodes) -> None:
    first = nodes.start("a")
    folders = [f"inductor/triton/0/{number}" for number in range(len(GROUPS))]  # as the inductor places them
    for folder, group in zip(folders, GROUPS, strict=True):
        path = first.folder / folder / "__grp__a.json"
        path.parent.mkdir(parents=True)
        path.write_text(group)
    assert captured(first) == (True, "")
    second = nodes.start("b")
    second.lead_here()
    for folder, group in zip(folders, GROUPS, strict=True):
        path = second.folder / folder / "__grp__a.json"
        assert nodes.how == "mount" or path.stat().st_atime_ns == 0, "no program has read it"
        expected = group.replace("/etc/", f"{path.parent}/")
        assert path.read_text().replace(" ", "") == expected.replace(" ", "")
    assert captured(second) == (False, "nothing was added")


WITHOUT_MOUNTS = """
import sys
from pathlib import Path
from bootseer.config import Config
from bootseer.env import generation
from bootseer.env.generation import Cache
base, node = sys.argv[1:]
config = Config(cache_dir=f"{base}/{node}/cache", state_dir=f"{base}/{node}/state")
cache = Cache(group="compile", path="/run/bootseer/caches", owner=(0, 0))
held = generation.restore(cache, f"{base}/store", config)
print(held.said, *held.entries())
Path(f"{held.folder}/inductor").mkdir(exist_ok=True)
Path(f"{held.folder}/inductor/one.so").write_text("compiled")
running = held.capture(last=True)
print(running and running.wait(60)[0])
held.close()
"""


def test_root_that_may_not_mount_gets_a_plain_folder(tmp_path: Path) -> None:
    base = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", WITHOUT_MOUNTS, str(tmp_path)]
    for node, expected in (("a", "cold\nTrue\n"), ("b", "restored generation 1 inductor/one.so\nTrue\n")):
        said = subprocess.run([*base, node], capture_output=True, text=True, timeout=120, check=False)
        assert said.stdout == expected, said.stderr
        assert not list((tmp_path / node / "cache/env").iterdir())


@pytest.mark.parametrize(("auto", "kinds", "says"), [
    (False, ["triton", "torch-extensions"], "nor what it uses: torch-extensions"),
    (True, ["triton", "torch-extensions"], ""),
    (True, ["jax"], "nor what it uses: jax"),
])  # fmt: skip
def test_a_kind_that_no_program_uses_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, auto: bool, kinds: list[str], says: str
) -> None:
    nodes = Nodes(tmp_path, "unpack")
    held = nodes.start("a")
    held.close()
    caches = Caches(held.cache, kinds, held.store_url, held.config, auto=auto)
    with caches.seen_out():
        caches.begin()
        if "triton" in kinds:
            held.folder.joinpath("triton").mkdir()
            held.folder.joinpath("triton/k.cubin").write_text("compiled")
        caches.stepped()
    assert (says in caplog.text, "nor what it uses" in caplog.text) == (True, bool(says)), caplog.text


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_capture_that_failed_had_is_captured_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    nodes = Nodes(tmp_path, "mount")
    held = nodes.start("a")
    held.close()
    log = Path(held.config.state_dir, "env/publications.log")
    for name, seconds in (("_LOOK", 2.5), ("_PAUSE", 5.0)):
        monkeypatch.setattr(f"bootseer.launch.caches.{name}", seconds)
    caches = Caches(held.cache, ["triton"], held.store_url, held.config)
    with caches.seen_out():
        caches.begin()
        add(held, "aa/one.so")
        caches.stepped()
        monkeypatch.setenv("BOOTSEER_FAULTS", "env.gather.before-manifest=kill")
        until(log.exists, 60, "the first capture")
        time.sleep(1)
        monkeypatch.delenv("BOOTSEER_FAULTS")
        assert nodes.generations == []
        if not ends:
            add(held, "aa/two.so")
            until(lambda: nodes.generations == [1], 60, "the second capture")
    assert names(nodes.start("b")) == ({"aa/one.so"} if ends else {"aa/one.so", "aa/two.so"})
    nodes.end()


def test_who_comes_later_does_not_hide_what_another_start_uses(tmp_path: Path) -> None:
    """Where the times of access tell: in a plain folder."""
    nodes = Nodes(tmp_path, "unpack")
    first = nodes.start("a")
    add(first, "aa/one.so")
    assert captured(first) == (True, "")
    here = nodes.start("b")
    use = Use(here)
    (here.folder / "inductor/aa/one.so").read_text()
    later = nodes.start("b")
    assert use.ended() == (1, {"inductor/aa/one.so"})
    assert Use(later).ended() == (0, None)


def test_a_cache_that_starts_did_not_use_is_restored_all_the_same(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "mount")
    held = nodes.start("a")
    add(held, "aa/one.so")
    assert captured(held) == (True, "")
    held.close()
    begun = []
    for step in (None, None, 5.0, 5.0, 5.0, 5.0):
        caches = Caches(held.cache, ["inductor"], held.store_url, held.config)
        with caches.seen_out():
            begun.append(caches.begin().partition(" ")[0])
            if step:
                caches.stepped(step)
    assert begun == ["restored"] * 6
    assert not mounts.below(tmp_path)


OTHERS: dict[str, tuple[dict[str, object], str]] = {
    "threads": ({"facts": {"OMP_NUM_THREADS": "1"}}, "variable OMP_NUM_THREADS changed: 2 -> 1"),
    "processor": ({"facts": {"OMP_NUM_THREADS": "2", "cpu": "avx2"}}, "variable cpu changed: unset -> avx2"),
    "torch": ({"facts": {"OMP_NUM_THREADS": "2", "packages": "torch-3 /t"}}, "variable packages changed"),
    "image": ({"image": "sha256:1"}, "image changed: none -> sha256:1"),
    "salt": ({"salt": "x"}, "salt changed: none -> x"),
    "user": ({"owner": (1234, 1234)}, ""),
    "tenant": ({"tenant": "uid 5001"}, ""),
}


def test_a_start_that_nothing_fits_is_cold_and_says_why(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "unpack")
    cache = msgspec.structs.replace(nodes.cache, facts={"OMP_NUM_THREADS": "2"})
    held = nodes.start("a", cache)
    add(held, "aa/one.so")
    assert captured(held) == (True, "")
    for what, (changed, why) in OTHERS.items():
        other = nodes.start(what, msgspec.structs.replace(cache, **changed))
        said = f"cold: missed because {why}" if why else "cold"
        assert (names(other), other.said.startswith(said)) == (set(), True), other.said
        assert why or other.said == "cold"  # of others nothing is told


RANK = """
import os, sys, time
from pathlib import Path
folder, base = Path(os.environ["TRITON_CACHE_DIR"]), Path(sys.argv[1])
folder.mkdir(exist_ok=True)
for rank in map(str, range(4)):
    print((folder / f"{rank}.so").exists() and (folder / f"{rank}.so").read_text())
(folder / f"{sys.argv[2]}.so").exists() or (folder / f"{sys.argv[2]}.so").write_text("compiled")
(base / sys.argv[2]).touch()
until = time.monotonic() + 60
while len(list(base.iterdir())) < 4 and time.monotonic() < until:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("mounts_allowed", [True, False])
def test_ranks_of_a_node_share_what_they_compile_with_the_next_node(tmp_path: Path, mounts_allowed: bool) -> None:
    argv, environ = own(tmp_path)
    argv = argv if mounts_allowed else ["setpriv", "--bounding-set=-sys_admin", *argv]
    for node in "ab":
        (here := tmp_path / node).mkdir()
        environ |= {f"BOOTSEER_{name.upper()}_DIR": f"{here}-{name}" for name in ("cache", "state")}
        here_argv = [*argv, sys.executable, "-c", RANK, str(here)]
        ranks = [
            forked.Popen([*here_argv, str(rank)], env=environ, stdout=-1, stderr=-1, text=True) for rank in range(4)
        ]
        said = [rank.communicate(timeout=200) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * 4, said
        if node == "b":
            assert [out for out, _ in said] == ["compiled\n" * 4] * 4, said
            assert all("compiled 0" in err and "not used" not in err for _, err in said), said
    assert not mounts.below(tmp_path)


def test_a_store_that_is_read_only(nodes: Nodes) -> None:
    first = nodes.start("a")
    add(first, "aa/one.so")
    assert captured(first) == (True, "")
    subprocess.run(["mount", "--bind", str(nodes.store), str(nodes.store)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(nodes.store)], check=True)
        second = nodes.start("b")
        assert names(second) == {"aa/one.so"}
        add(second, "aa/two.so")
        published, why = captured(second)
        assert (published, why.startswith("not published: ")) == (False, True), why
        assert names(second) == {"aa/one.so", "aa/two.so"}
        second.close()
    finally:
        subprocess.run(["umount", str(nodes.store)], check=True)


def test_a_disk_that_is_nearly_full(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    held = nodes.start("a")
    held.close()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=(1 << 30) - 1))
    caches = Caches(held.cache, ["triton"], held.store_url, held.config)
    with caches.seen_out():
        said = caches.begin()
        assert (said.startswith("no cache: "), "has 1023 MiB free, a cache needs 1024" in said) == (True, True), said
        assert (caches.folder, caches.variables({}, "/x")) == (None, {})


def forge(nodes: Nodes, tree: Path | None = None, **changed: object) -> None:
    """The newest generation is as somebody has it who may write to the store: it shows ``tree``."""
    store = open_store(str(nodes.store))
    (found, *_) = generation.generations(store, nodes.cache.document.key, Config())
    if tree:
        parts = nodes.root / "meta", nodes.root / "data"
        erofs.build(tree, *parts)
        changed["tree"] = publish(store, *parts).digest
    store_file = nodes.store / manifest.manifest_key(found.name)
    store_file.write_bytes(msgspec.structs.replace(found, **changed).encode())


def begun(nodes: Nodes) -> Held:
    first = nodes.start("a")
    add(first, "aa/one.so")
    assert captured(first) == (True, "")
    return first


LISTS: dict[str, Callable[[list[Entry]], bytes]] = {
    "up": lambda listed: inventory.encode([*listed, msgspec.structs.replace(listed[-1], path="0/../../evil.so")]),
    "absolute": lambda listed: inventory.encode([*listed, msgspec.structs.replace(listed[-1], path="/etc/evil.so")]),
    "bomb": lambda _: zstandard.compress(bytes(1 << 29)),
}


@pytest.mark.parametrize("what", [*LISTS, "other bytes", "gone"])
def test_a_generation_whose_list_is_forged_or_damaged_is_cold_at_worst(nodes: Nodes, what: str) -> None:
    begun(nodes)
    (path,) = nodes.store.glob("env/lists/*")
    if what in LISTS:
        data = LISTS[what](inventory.decode(path.read_bytes(), targets=1))
        open_store(str(nodes.store)).put(manifest.inventory_key(inventory.digest(data)), data)
        forge(nodes, inventory=inventory.digest(data))
    elif what == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5] + b"other")
    second = nodes.start("b")
    assert second.said.startswith("cold: " if nodes.how == "unpack" else "restored"), second.said
    add(second, "bb/two.so")
    assert captured(second)[0], "one bad generation ends no cache"
    assert "bb/two.so" in names(nodes.start("c"))
    assert not [*nodes.root.rglob("evil.so")]


def test_a_tree_of_another_making_gives_nobody_rights_and_leads_nowhere(nodes: Nodes) -> None:
    begun(nodes)
    outside, made = nodes.root / "outside", nodes.root / "tree/0/inductor"
    for folder in (outside, made / "aa"):
        folder.mkdir(parents=True)
    (outside / "secret.so").write_text("of this node")
    (outside / "__grp__a.json").write_text(note := '{"child_paths": {"a": "/x/a"}}')
    (made / "aa/__grp__c.json").write_text(note)
    beside = "aa/.__grp__c.json.bootseer"  # where its successor is written
    for name, target in (("up", outside), ("aa/link.so", outside / "secret.so"), ("aa/__grp__b.json", outside),
                         (beside, outside / "secret.so")):  # fmt: skip
        (made / name).symlink_to(target)
    os.mknod(made / "aa/null.so", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (made / "aa/rights.so").write_text("x")
    os.chown(made / "aa/rights.so", 1234, 1234)
    (made / "aa/rights.so").chmod(0o6777)
    forge(nodes, made.parents[1])
    second = nodes.start("b")
    assert second.restored
    second.lead_here()
    flags = os.statvfs(second.folder).f_flag
    if nodes.how == "mount":
        assert (flags & os.ST_NOSUID, flags & os.ST_NODEV) == (os.ST_NOSUID, os.ST_NODEV)
    else:
        there = {path.name for path in second.folder.rglob("*")}
        assert there in (set(), {"inductor", "aa", "rights.so", "__grp__c.json"})
    add(second, "bb/two.so")
    assert captured(second)[0]
    last = nodes.start("c")
    assert names(last) - {"aa/rights.so", "aa/__grp__c.json"} == {"bb/two.so"}
    if (rights := last.folder / "inductor/aa/rights.so").exists():
        assert (rights.stat().st_uid, rights.stat().st_mode & 0o7777) == (0, 0o755)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {
        "secret.so": "of this node", "__grp__a.json": note,
    }  # fmt: skip


def test_a_tree_that_is_larger_than_it_says_fills_no_disk(nodes: Nodes) -> None:
    nodes.cache = cache = msgspec.structs.replace(nodes.cache, most_bytes=100_000)
    begun(nodes)
    (made := nodes.root / "tree/0/inductor").mkdir(parents=True)
    (made / "large.so").write_bytes(os.urandom(1 << 20))
    forge(nodes, made.parents[1])
    second = nodes.start("b")
    if nodes.how == "unpack":
        assert second.said.startswith("cold: "), second.said
        assert "more than" in second.said
    add(second, "bb/two.so")
    captured(second)
    second.close()
    assert not [path for path in (nodes.root / "b").rglob("large.so") if "tree" not in path.parts]
    assert names(nodes.start("c", cache)) >= {"bb/two.so"}


def test_a_disk_that_fills_while_a_cache_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path, "unpack")
    first = nodes.start("a")
    for number in range(8):
        (first.folder / "inductor").mkdir(exist_ok=True)
        (first.folder / f"inductor/{number}.so").write_bytes(os.urandom(1 << 20))
    assert captured(first) == (True, "")
    small = tmp_path / "b"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(small)], check=True)
    monkeypatch.setattr(generation, "_FREE", 1 << 20)
    monkeypatch.setattr("bootseer.blocks.extract.tree.shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    try:
        fill = small / "fill"
        fill.write_bytes(bytes(6 << 20))
        second = nodes.start("b")
        assert (second.said.startswith("cold: "), names(second)) == (True, set()), second.said
        assert not [*small.rglob("new-*")]
        fill.unlink()
        add(second, "bb/two.so")
        assert captured(second) == (True, "")
        second.close()
        assert len(names(nodes.start("b"))) == 9, "the generation was good: it is not in quarantine"
    finally:
        nodes.end()
        subprocess.run(["umount", "-l", str(small)], check=True)
