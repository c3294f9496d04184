"""What a command looks for in vain is seen by the kernel: its own, from where it works, and nobody else's."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bootseer.env import names
from bootseer.kernel import bpf
from bootseer.kernel.lookups import Lookups

pytestmark = [pytest.mark.root]

WAYS = {
    "a test": ("[ -e {0}/no ]", "no"),
    "where it works": ("cd {0}/a && cat no", "a/no"),
    "above": ("cd {0}/a/b && test -f ../no", "a/no"),
    "in a child's folder": ("(cd {0}/a; (cd b; cat no)); cat {0}/no", "a/b/no"),
    "and in its own again": ("cd {0}; (cd a; cd b); cat no", "no"),
    "through a file": ("cat {0}/f/no", "f/no"),
    "a program": ("PATH={0}/a:$PATH; ls", "a/ls"),
    "in another program": ("exec env -C {0}/a sh -c 'sh -c \"cat no\"'", "a/no"),
    "a link": ("readlink {0}/no", "no"),
    "by a number": ("python3 -c 'import os; os.chdir(\"{0}\"); os.path.exists(chr(110))'", "n"),
    "in a thread": (
        "python3 -c 'import os, threading as t; t.Thread(target=os.path.exists, args=[\"{0}/no\"]).start()'",
        "no",
    ),
    "by a thread that becomes another program": (
        'python3 -c \'import os, threading as t; a = ["cat", "{0}/no"];'
        ' x = t.Thread(target=os.execv, args=["/bin/cat", a]); x.start(); x.join()\'',
        "no",
    ),
    "in a folder that another thread entered": (
        "python3 -c 'import os, threading as t; e = t.Event();"
        ' x = t.Thread(target=lambda: (e.wait(), os.access("no", 4))); x.start(); os.chdir("{0}/a"); e.set()\'',
        "a/no",
    ),
    "above a link": ("cd {0}/l; test -e ../no", "a/no"),
    "through a link": ("test -e {0}/l/../no", "a/no"),
    "where find began": ("cd {0}; find . -name f -exec test -e no ';'", "no"),
    "one that is long": ("cat {0}/" + "/".join(["n" * 200] * 15), "/".join(["n" * 200] * 15)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_looked_for_in_vain_is_seen(way: str, tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "f").touch()
    (tmp_path / "l").symlink_to("a/b")
    command, path = WAYS[way]
    lookups = Lookups()
    lookups.begin()
    subprocess.run(command.format(tmp_path), shell=True, capture_output=True, check=False)
    lookups.end()
    assert f"{tmp_path}/{path}" in lookups.absent
    assert not lookups.failure


def test_what_is_there_is_not_among_it_nor_what_is_removed(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    lookups = Lookups()
    lookups.begin()
    subprocess.run(f"cd {tmp_path}; cat there; rm -f gone; mkdir made; cat no", shell=True, capture_output=True)
    lookups.end()
    assert {path for path in lookups.absent if path.startswith(f"{tmp_path}/")} == {f"{tmp_path}/no"}
    assert lookups.made == {f"{tmp_path}/made"}


def test_others_are_not_seen(tmp_path: Path) -> None:
    """A neighbour that runs before and beside it, our own threads, and what the command's children do afterwards."""
    loop = "import os, sys\nwhile os.getppid() != 1:\n os.path.exists(sys.argv[1]); print('.', flush=True)"
    other = subprocess.Popen([sys.executable, "-c", loop, f"{tmp_path}/other"], stdout=subprocess.PIPE)
    try:
        assert other.stdout
        other.stdout.read(1)
        lookups = Lookups()
        lookups.begin()
        thread = threading.Thread(target=os.path.exists, args=[f"{tmp_path}/thread"])
        thread.start()
        thread.join()
        os.path.exists(tmp_path / "own")
        other.stdout.read(1 << 12)
        subprocess.run(f"cat {tmp_path}/no", shell=True, capture_output=True, check=False)
        lookups.end()
        subprocess.run(f"cat {tmp_path}/later", shell=True, capture_output=True, check=False)
    finally:
        other.kill()
        other.communicate()
    assert {path for path in lookups.absent if path.startswith(f"{tmp_path}/")} == {f"{tmp_path}/no"}


def test_two_at_once_see_each_their_own(tmp_path: Path) -> None:
    found = dict[str, set[str]]()
    both = threading.Barrier(2)

    def look(name: str) -> None:
        lookups = Lookups()
        lookups.begin()
        both.wait(60)
        subprocess.run(f"cat {tmp_path}/{name}", shell=True, capture_output=True, check=False)
        both.wait(60)
        lookups.end()
        found[name] = {path for path in lookups.absent if path.startswith(f"{tmp_path}/")}

    threads = [threading.Thread(target=look, args=[name]) for name in "ab"]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == {name: {f"{tmp_path}/{name}"} for name in "ab"}


def test_a_process_with_many_descriptors_sees_what_is_looked_for(tmp_path: Path) -> None:
    """As a job that calls `bootseer.env.run` may be."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    lookups = Lookups()
    try:
        lookups.begin()
        subprocess.run(f"cat {tmp_path}/no", shell=True, capture_output=True, check=False)
        lookups.end()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (f"{tmp_path}/no" in lookups.absent, lookups.failure) == (True, "")


def _descriptors() -> set[str]:
    """When none is closed any more."""
    for thread in threading.enumerate():
        if thread.name == "env-lookups-end":
            thread.join(20)
    return set(os.listdir("/proc/self/fd"))


def test_nothing_is_left_of_it() -> None:
    before = _descriptors()
    for _ in range(3):
        lookups = Lookups()
        lookups.begin()
        lookups.end()
        lookups.end()
    assert _descriptors() == before


@pytest.mark.parametrize("at", ["create", "load", "attach_raw", "attach"])
def test_a_kernel_that_refuses_leaves_nothing(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(1, "Operation not permitted")

    before = _descriptors()
    monkeypatch.setattr(bpf, at, refuse)
    lookups = Lookups()
    with pytest.raises(OSError, match="not permitted"):
        lookups.begin()
    lookups.end()
    assert _descriptors() == before
    assert not lookups.failure


def test_a_number_that_another_process_may_get_is_nobodys() -> None:
    """The number of a first thread whose process became another program by another one: whoever got it was observed."""
    lookups = Lookups()
    lookups.begin()
    code = "import os, threading as t; print(t.get_native_id(), flush=True)"
    code += "; x = t.Thread(target=os.execv, args=['/bin/sh', ['sh', '-c', 'read x']]); x.start(); x.join()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout
    child.stdout.readline()
    child.communicate(b"\n")
    members = lookups._members
    with pytest.raises(OSError, match="No such file"):
        bpf.look_up(members, child.pid.to_bytes(4, "little"), 1)
    lookups.end()


def test_too_many_at_once_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody takes them out of the queue meanwhile."""
    monkeypatch.setattr(Lookups, "_read", lambda self, until: True)
    lookups = Lookups()
    lookups.begin()
    flood = f"import os\nfor _ in range(200000): os.path.exists('{tmp_path}/' + 'n' * 200)"
    subprocess.run([sys.executable, "-c", flood], check=True)
    lookups.end()
    assert lookups.failure == "a lookup was lost: there were too many at once"


@pytest.mark.parametrize("by", ["absolute", "relative"])
def test_names_take_a_bounded_part_of_the_memory(by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A million of 4 KiB would take 8 GB."""
    monkeypatch.setattr("bootseer.kernel.lookups._ROOM", 8 << 20)
    lookups = Lookups()
    lookups.begin()
    folder = f"{tmp_path}/" if by == "absolute" else ""
    flood = f"import os\nfor i in range(4000): os.path.exists('{folder}' + ('n' * 250 + '/') * 14 + str(i))"
    subprocess.run([sys.executable, "-c", flood], check=True, cwd=tmp_path)
    lookups.end()
    assert lookups.failure == "a lookup was lost: the names take more than 8 MiB"
    assert sum(map(sys.getsizeof, lookups.absent)) < 8 << 20


def test_what_a_command_leaves_behind_is_not_waited_for() -> None:
    """It was for a minute, and nothing was published."""
    lookups = Lookups()
    lookups.begin()
    code = "import os\nprint(flush=True)\nwhile 1: os.path.exists('/no')"
    left = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert left.stdout
    left.stdout.readline()
    began = time.monotonic()
    lookups.end()
    took = time.monotonic() - began
    left.kill()
    left.communicate()
    assert took < 20
    assert not lookups.failure


def test_nobody_waits_until_the_kernel_lets_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Red before: the job waited for it, 60 to 90 ms."""
    let_go, close = threading.Event(), os.close
    lookups = Lookups()
    lookups.begin()
    attached = set(lookups._attached)
    monkeypatch.setattr(os, "close", lambda fd: (fd in attached and let_go.wait(20), close(fd)))
    subprocess.run(["cat", f"{tmp_path}/no"], capture_output=True, check=False)
    lookups.end()
    assert f"{tmp_path}/no" in lookups.absent
    assert all(os.path.exists(f"/proc/self/fd/{fd}") for fd in attached)
    let_go.set()
    assert not {str(fd) for fd in attached} & _descriptors()


def test_names_that_are_no_inputs(tmp_path: Path) -> None:
    """Secrets, URLs with logins, what lies in a folder that the command made or below another name, byte code. What
    lies in a home has two names."""
    wanted = [f"{tmp_path}/no", f"{tmp_path}/home/rc"]
    key = "ghp_" + "a1B2" * 9
    other = [
        "made/x",
        "made",
        "no/below",
        "https:/u@host/x",
        "pkg @ https:/bob:S3cr3tPw@host/x.whl",
        "__pycache__/a.pyc",
        ".git/shallow",
        "hunter2",
        "x-S3cr3t-S3cr3t",
        key,
    ]
    absent = [*wanted, *(f"{tmp_path}/{name}" for name in other)]
    env = {"HOME": f"{tmp_path}/home", "DEPLOY_TOKEN": "hunter2", "API_KEY": "home"[:3], "SECRET": "S3cr3t-S3cr3t"}
    lookups = Lookups()
    lookups.absent, lookups.made = set(absent), {f"{tmp_path}/made"}
    found = names.seen(lookups, env, f"{tmp_path}/work", [], lambda _: True)
    assert dict(found) == dict.fromkeys([*wanted, "~/rc"], "")
    (tmp_path / "b/.x").mkdir(parents=True)
    (tmp_path / "b/.x/rc").touch()
    looked_up = {"~/.x/rc": ""}
    assert names.difference(looked_up, {"HOME": f"{tmp_path}/home"}, lambda *_: False) == ""
    assert names.difference(looked_up, {"HOME": f"{tmp_path}/b"}, lambda *_: False) == f"{tmp_path}/b/.x/rc is new"
