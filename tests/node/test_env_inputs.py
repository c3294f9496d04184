"""Observed inputs: what a set-up command read counts, and a snapshot is never used after it changed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from bootseer import env
from bootseer.env import (
    EnvResult,
    EnvSpec,
    Outcome,
    Target,
    hardware,
    inputs,
    names,
    observer,
    place,
    remembered,
    snapshots,
)
from bootseer.kernel import libc
from bootseer.kernel import mount as mounts
from bootseer.kernel import opens as lib_opens
from bootseer.kernel.opens import Opens
from bootseer.objects.folder import FolderStore
from support import envnode

pytestmark = pytest.mark.root


class Node:
    """One node with a working folder of its own; ``script`` makes ``env/made`` of what it reads."""

    def __init__(self, root: Path) -> None:
        self.work, self.store = root / "work", root / "store"
        self.target = self.work / "env"
        self.config = envnode.config_in(root)
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
        envnode.release(self.config.state_dir)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.release()


def test_a_working_folder_that_goes_meanwhile_ends_no_start(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(node.work)
    change = os.fchdir

    def act() -> None:
        def fchdir(fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}") == str(node.work):
                raise OSError(errno.ESTALE, "its server has gone")
            change(fd)

        monkeypatch.setattr(os, "fchdir", fchdir)

    assert node.run(act).exit_code == 0
    assert (node.target / "made").read_text() == "torch==2.5\n"


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


SETTINGS = {
    ".npmrc": ("//one/:_authToken={}\n", "registry=https://me:{}@{}/\n"),
    ".yarnrc": ('"//one/:_authToken" "{}"\nlastUpdateCheck 1{}\n', "registry {1}\n"),
    ".yarnrc.yml": ("npmScopes:\n  own:\n    npmAuthToken: {}\n", "npmRegistryServer: {1}\n"),
    ".pip/pip.conf": ("# {}\n", "[global]\nuser = yes\nindex-url = https://me:{}@{}/simple\n"),
    ".config/uv/uv.toml": ("# {}\n", "index-url = 'https://me:{}@{}/simple'\n"),
    ".condarc": ("# {}\n", "channels:\n- https://me:{}@{}/main\n"),
    ".cargo/config.toml": ('[registries.own]\ntoken = "{}"\n', '[source.own]\nregistry = "{1}"\n'),
    ".gemrc": (":rubygems_api_key: {}\n", ":sources:\n- https://me:{}@{}/\n"),
    ".bundle/config": ('---\nBUNDLE_GEMS__CORP__COM: "me:{}"\n', 'BUNDLE_MIRROR__ALL: "{1}"\n'),
    ".config/pypoetry/config.toml": (
        '[http-basic.own]\nusername = "me"\npassword = "{}"\n', '[virtualenvs]\npath = "{1}"\n',
    ),
    ".wgetrc": ("http_user = me\nhttp_password = {}\n", "base = https://{1}/\n"),
    ".curlrc": ('-u me:{}\nheader = "Authorization: Basic {}"\n', "url = https://{1}/\n"),
    ".netrc": ("machine one login me password {}\n", ""),
    ".config/pypoetry/auth.toml": ('[pypi-token]\npypi = "{}"\n', ""),
    ".cargo/credentials.toml": ('[registry]\ntoken = "{}"\n', ""),
}  # fmt: skip


@pytest.mark.parametrize("first", ["none", "logins"])
def test_of_settings_in_a_private_home_logins_alone_do_not_count(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Red before: of a new `.npmrc` its registry did not count either, and of others the logins did."""
    home = tmp_path / "home"
    settings = {home / name: setting for name, (_, setting) in SETTINGS.items() if setting}
    for name in SETTINGS:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    monkeypatch.setenv("HOME", str(home))
    node.write(
        "s.sh", "mkdir -p env; >env/made\n" + "".join(f"[ -e ~/{name} ] && cat ~/{name}\n" for name in SETTINGS) + ":\n"
    )

    def logins(word: str) -> dict[Path, str]:
        return {home / name: login.format(word, word) for name, (login, _) in SETTINGS.items()}

    def reason(texts: dict[Path, str]) -> str:
        for path, text in texts.items():
            path.write_text(text) if text else path.unlink(missing_ok=True)
        node.release()
        return node.run().reason

    states = [dict.fromkeys(logins(""), ""), logins("a")]
    assert reason(states.pop(first == "logins")) != "hit"
    for texts in (*states, logins("b")):
        assert reason(texts) == "hit"
    for path, setting in settings.items():  # one at a time; what is named is what the nearest snapshot had otherwise
        named = path if path == next(iter(settings)) else f"{home}/"
        assert f"missed because {named}" in reason({path: setting.format("a", "one")}), path
    both = {path: logins("b")[path] + setting.format("b", "one") for path, setting in settings.items()}
    assert reason(both) == "hit"
    for path, setting in settings.items():
        assert f"missed because {home}/" in reason({path: setting.format("b", "two")}), path


def test_stale_byte_code_that_the_command_renews_does_not_count(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: the next start found other byte code, and missed."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    module = node.write("mod.py", "V = 1\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", module], check=True)
    node.write("mod.py", "V = 22\n")
    node.write("s.sh", f"mkdir -p env; {sys.executable} -c 'import mod; print(mod.V)' >env/made\n")
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    assert {os.path.basename(path) for path in node.observed().files} >= {"s.sh", "mod.py"}
    node.release()
    assert node.run().reason == "hit"
    node.release()
    node.write("mod.py", "V = 333\n")
    assert node.run().reason == f"missed because {module}, which the command reads, changed"


@pytest.mark.parametrize("name", ["node", "go", "rustc"])
def test_another_language_of_the_system_counts(node: Node, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As another Python does. Red before: what was built with one version was a hit with another one."""
    place = Path(f"/usr/local/lib/bootseer-test-{os.getpid()}/bin")
    place.mkdir(parents=True)
    try:
        monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
        tools = [place / name, place / "other"]
        for number in (1, 2):
            for tool in tools[: 3 - number]:
                tool.write_text(f"#!/bin/sh\necho {number}\n")
                tool.chmod(0o755)
            node.write("s.sh", f"mkdir -p env; (other; {name}) >env/made\n")
            result = node.run()
            assert result.outcome is Outcome.RAN_AND_PUBLISHED
            assert number == 1 or result.reason == f"missed because {place}/{name}, which the command reads, changed"
            node.release()
        tools[1].write_text("#!/bin/sh\necho 2\n")
        assert node.run().reason == "hit"
    finally:
        shutil.rmtree(place.parent)


@pytest.fixture
def stopped(children: None) -> Iterator[list[int]]:
    """Publications that do nothing until they are told to go on."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stop_children(pids: list[int]) -> None:
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            if b"bootseer.env.publisher" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGSTOP)
                pids.append(pid)


def test_what_the_command_read_is_hashed_beside_the_job(node: Node, stopped: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs.Digests, "of", lambda self, path: pytest.fail(f"{path} is hashed before the job goes on"))
        first = node.run(lambda: stop_children(stopped), background=True)
        assert (first.outcome, len(stopped)) == (Outcome.RAN_AND_PUBLISHING, 1)
        node.write("r.txt", "torch==2.5\n")  # the same again, at another time
        assert node.run(background=True).reason == "already in place on this node"
    os.kill(stopped[0], signal.SIGCONT)
    assert first.publication
    assert first.publication.wait(60) == (True, "")
    assert set(node.observed().files) == {str(node.work / "s.sh"), str(node.work / "r.txt")}
    node.write("r.txt", "torch==2.5\n")
    assert (node.run().reason, node.runs) == ("already in place on this node", 1)
    node.write("r.txt", "torch==2.6\n")
    assert node.run().reason == f"missed because {node.work}/r.txt, which the command reads, changed"


def test_an_input_that_the_job_changes_before_it_is_hashed_stops_publication(node: Node, stopped: list[int]) -> None:
    first = node.run(lambda: stop_children(stopped), background=True)
    node.write("r.txt", "torch==2.6\n")
    os.kill(stopped[0], signal.SIGCONT)
    assert first.publication
    published, why = first.publication.wait(60)
    assert (published, why) == (False, f"not published: {node.work}/r.txt, which the command read, has changed since")
    assert not snapshots.names(FolderStore(node.store))
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    assert (node.target / "made").read_text() == "torch==2.6\n"


@pytest.mark.parametrize("background", [False, True])
def test_what_the_result_leads_to_counts_on_the_node_that_made_it(node: Node, background: bool) -> None:
    outside = node.write("lib/tool", "one")
    node.write("s.sh", "mkdir -p env; ln -sfn ../lib/tool env/tool\n")
    first = node.run(background=background)
    assert not first.publication or first.publication.wait(60) == (True, "")
    assert node.run().reason == "already in place on this node"
    outside.write_text("two")
    assert node.run().reason == f"missed because {node.target}/tool leads to {outside}, which is another one here"
    assert node.runs == 2


def test_what_a_node_lacks_outside_of_the_jobs_folder_does_not_count(node: Node, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("1\n")
    node.write("s.sh", "mkdir -p env; cat r.txt ../tool > env/made\n")
    node.run()
    node.release()
    (tmp_path / "tool").unlink()
    assert node.run().reason == "hit"
    assert (node.target / "made").read_text() == "torch==2.5\n1\n"


@pytest.mark.parametrize("restore", ["mount", "unpack"])
@pytest.mark.parametrize("how", ["ln r.txt env/made", "cp -l r.txt env/made", "chmod 600 r.txt; cat r.txt > env/made"])
def test_an_input_that_is_linked_or_gets_another_mode_is_the_same(node: Node, how: str, restore: str) -> None:
    """As a local `git clone` links it."""
    node.write("s.sh", f"cat r.txt; rm -rf env/*; mkdir -p env; {how}\n")
    for outcome in ("ran-and-published", f"restored-{restore}"):
        result = node.run(restore=restore)
        assert result.outcome == outcome, result.reason
        assert (node.target / "made").read_text() == "torch==2.5\n"
        node.release()
        (node.target / "made").unlink(missing_ok=True)
    node.write("r.txt", "torch==2.6\n")
    assert node.run(restore=restore).outcome is Outcome.RAN_AND_PUBLISHED


@pytest.mark.parametrize("change", ["gone", "renamed"])
def test_a_file_of_the_jobs_folder_that_is_not_there_any_more_counts(node: Node, change: str) -> None:
    extra = node.write("d/extra.txt", "six\n")
    node.write("s.sh", "mkdir -p env; cat r.txt d/* > env/made || true; ls d >> env/made\n")
    node.run()
    node.release()
    if change == "gone":
        extra.unlink()
    else:
        extra.rename(extra.with_name("other.txt"))
    again = node.run()
    assert f"{extra}, which the command reads, is not here" in again.reason
    assert "extra" not in (node.target / "made").read_text()


@pytest.mark.parametrize("restore", ["mount", "unpack"])
def test_what_a_file_of_the_target_held_before_counts(node: Node, restore: str) -> None:
    """Of the same size and name, as another version of a package's metadata is."""
    for number, text in enumerate(("1\n", "2\n", "2\n", "1\n")):
        node.write("env/version", text)
        if number > 2 or restore == "mount":  # else it holds the result, too
            (node.target / "made").unlink(missing_ok=True)
        node.write("s.sh", "cat env/version > env/made\n")
        result = node.run(restore=restore)
        assert (result.outcome is Outcome.RAN_AND_PUBLISHED) == (number < 2), result.reason
        assert (node.target / "made").read_text() == text
        node.release()


def test_what_a_target_held_before_is_read_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write("s.sh", "cat env/version > env/made\n")
    node.write("env/version", "1\n")
    node.run()
    node.release()
    hashed = []

    def hasher() -> blake3:
        hashed.append(1)
        return blake3()

    monkeypatch.setattr(place, "blake3", hasher)
    node.write("env/version", "2\n")
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    assert len(hashed) == 1
    held, target = place.Held(), Target(str(node.target))
    node.release()
    assert held.of(target) == held.of(target)
    before = held.of(target)
    node.write("env/version", "3\n")
    assert held.of(target) != before
    assert len(hashed) == 3


def _no_file(kind: str, text: bytes) -> tuple[int, int]:
    """A standard input that has no name, with ``text`` in it or to be written, and where to write it."""
    if kind == "socket":
        ours, theirs = socket.socketpair()
        return theirs.detach(), ours.detach()
    if kind == "pipe":
        return os.pipe()
    fd = os.memfd_create("text") if kind == "memory" else os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR)
    os.write(fd, text)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd, -1


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "socket", "memory", "unnamed"])
def test_what_comes_through_no_file_is_not_shared(node: Node, kind: str, early: bool) -> None:
    node.write("s.sh", "mkdir -p env; cat > env/made\n")
    kept = os.dup(0)
    try:
        for text in (b"1\n", b"2\n"):
            reading, writing = _no_file(kind, text)
            os.dup2(reading, 0)
            os.close(reading)

            def write(writing: int = writing, text: bytes = text) -> None:
                if writing >= 0:
                    os.write(writing, text)
                    os.close(writing)

            if early:
                write()
            result = node.run(*([] if early else [write]))
            assert "not published: the command read its standard input, which is no file" in result.reason
            assert (node.target / "made").read_bytes() == text
            node.release()
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_file_that_is_the_input_of_a_command_that_is_not_observed(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    monkeypatch.setattr(Opens, "begin", _refuse)
    node.write("s.sh", f"mkdir -p env; {'cat' if is_read else ':'} > env/made\n")
    kept = os.dup(0)
    try:
        with node.write("input", "1\n").open() as file:
            os.dup2(file.fileno(), 0)
        assert (node.run().outcome is Outcome.RAN) == is_read
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_a_pipe_that_nobody_reads_or_writes_does_not_count(node: Node) -> None:
    kept = os.dup(0)
    reading, writing = os.pipe()
    try:
        os.dup2(reading, 0)
        assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
        os.write(writing, b"1")
        node.write("r.txt", "torch==2.6\n")
        assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    finally:
        os.dup2(kept, 0)
        for fd in (kept, reading, writing):
            os.close(fd)


NAMED = {
    "included": (
        "make -s -f a.mk", {"a.mk": "include b.mk\n", "b.mk": "all:; mkdir -p env; echo $(WHICH) > env/made\n"},
    ),
    "module": (
        "python3 a.py",
        {"a.py": "import b\n", "b.py": "import os; os.makedirs('env', exist_ok=True)\nw = os.environ.get('WHICH', '')\n"
         "open('env/made', 'w').write(w + '\\n')\n"},
    ),
    "quoted": (
        "python3 a.py",
        {"a.py": "import os; os.makedirs('env', exist_ok=True); name = 'WHICH'\n"
         "open('env/made', 'w').write(dict(os.environ).get(name, '') + '\\n')\n"},
    ),
    "conditional": (
        "make -s -f a.mk", {"a.mk": "ifdef WHICH\nX = $(WHICH)\nendif\nall:; mkdir -p env; echo $(X) > env/made\n"},
    ),
    "default": (
        "make -s -f a.mk",
        {"a.mk": "include b.mk\nall:; mkdir -p env; echo $(WHICH) > env/made\n", "b.mk": "WHICH ?=\n"},
    ),
    "own name": (
        "python3 a.py",
        {"a.py": "import b\n", "b.py": "import os; os.makedirs('env', exist_ok=True)\n"
         "WHICH = os.environ.get('WHICH', '')\nopen('env/made', 'w').write(WHICH + '\\n')\n"},
    ),
    "program": ("make -s -f a.mk", {"a.mk": "all:; mkdir -p env; (printenv WHICH || echo) > env/made\n"}),
    "destructured": (
        "node a.js",
        {"a.js": "require('./b.js')\n", "b.js": "const { WHICH = '' } = process.env\nconst fs = require('fs')\n"
         "fs.mkdirSync('env', {recursive: true}); fs.writeFileSync('env/made', WHICH + '\\n')\n"},
    ),
    "renamed": (
        "node a.js",
        {"a.js": "const e = process.env, fs = require('fs')\nfs.mkdirSync('env', {recursive: true})\n"
         "fs.writeFileSync('env/made', (e.WHICH || '') + '\\n')\n"},
    ),
    "renamed function": (
        "python3 a.py",
        {"a.py": "import os; from os import getenv as g; os.makedirs('env', exist_ok=True)\n"
         "open('env/made', 'w').write((g('WHICH') or '') + '\\n')\n"},
    ),
    "format": (
        "python3 a.py",
        {"a.py": "import os; os.makedirs('env', exist_ok=True)\n"
         "open('env/made', 'w').write('%(WHICH)s\\n' % {'WHICH': '', **os.environ})\n"},
    ),
    "by its name": ("mkdir -p env; N=WHICH; eval echo \\$$N > env/made", {}),
    "perl": ("perl a.pl", {"a.pl": "mkdir 'env'; open(F, '>', 'env/made'); print F $ENV{WHICH}, \"\\n\";\n"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMED)
def test_a_variable_in_a_file_that_the_command_reads_counts(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    script, files = NAMED[kind]
    for name, text in files.items():
        node.write(name, text)
    node.write("s.sh", f"{script}\n")
    for number, value in enumerate((None, "one", "two", None)):
        monkeypatch.delenv("WHICH", raising=False)
        if value:
            monkeypatch.setenv("WHICH", value)
        result = node.run()
        assert (node.target / "made").read_text() == f"{value or ''}\n", result.reason
        assert (result.outcome is Outcome.RAN_AND_PUBLISHED) == (number < 3), result.reason
        assert ("variable WHICH" in result.reason) == (number in (1, 2)), result.reason
        node.release()


@pytest.mark.parametrize("line", ["pip install -q x", "python3 -m pip --python v install x", "python3 c.py"])
def test_settings_of_an_installer_that_a_file_starts_count(node: Node, line: str) -> None:
    """Also those that were not set. Red before: with an index of its own, a Makefile got what the other index gave."""
    node.write("a.mk", f"all:; mkdir -p env; test -d none && {line}; cat c.py >env/made\n")
    node.write("c.py", 'import subprocess\nsubprocess.run(["false", "pip", "-q", "install", "x"])\n')
    node.write("s.sh", "make -s -f a.mk\n")
    plain = {"PATH": os.environ["PATH"], "HOME": str(node.work)}

    def run(**more: str) -> str:
        node.release()
        return node.run(environ=plain | more).reason

    run()
    assert run(PIP_TIMEOUT="9") == "hit"
    assert run(PIP_INDEX_URL="http://user:one@host/one") == (
        "missed because a variable of pip, which decides what the command reads, has another value"
    )
    assert run(PIP_INDEX_URL="http://user:two@host/one") == "hit"
    assert run(PIP_INDEX_URL="http://user:two@host/two") != "hit"
    assert run() == "hit"


def test_a_hidden_folder_of_the_job_counts(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write(".ws/a.mk", "all:\n\tmkdir -p env; echo $(WHICH) > env/f\n")
    node.write("s.sh", "make -f .ws/a.mk\n")
    monkeypatch.setenv("WHICH", "one")
    node.run()
    monkeypatch.setenv("WHICH", "two")
    assert "the variable WHICH" in node.run().reason


def test_a_variable_in_a_source_that_is_only_copied_does_not_count(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write("setup.py", "import shutil, tools.build; shutil.copytree('pkg', 'env/pkg', dirs_exist_ok=True)\n")
    node.write("pkg/train.py", "import os; os.environ['FOR_JOB']\n")
    node.write("tools/build.py", "import os; print(os.environ.get('FOR_BUILD'))\n")
    node.write("s.sh", "mkdir -p env; python3 setup.py\n")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    node.run()
    monkeypatch.setenv("FOR_JOB", "1")
    assert node.run().reason == "already in place on this node"
    monkeypatch.setenv("FOR_BUILD", "1")
    assert "the variable FOR_BUILD, which" in node.run().reason


def test_a_command_that_failed_for_another_reason_runs_once(node: Node) -> None:
    """A comment, a method of that name with keywords, and a time that is over say nothing of an overlay."""
    for number, (line, code) in enumerate(
        [("python3 a.py", 7), ("timeout 1 sleep 9 # ln a b", 124), ("exit 9 # rename(a, b)", 9),
         ("ln  -s a env/b; cat r.txt; mv r.txt x; exit 7", 7)]
    ):  # fmt: skip
        node.write("a.py", "# df.rename(a)\nx = lambda: df.rename(columns={})\nraise SystemExit(7)\n")
        node.write("s.sh", f"mkdir -p env; echo {number} > env/f; {line}\n")
        before = node.runs
        result = node.run()
        assert (result.exit_code, node.runs - before) == (code, 1), result.reason


def test_a_program_that_could_rename_says_nothing_of_why_the_command_failed(node: Node) -> None:
    """Nearly all programs have such calls in them."""
    program = node.write("build/tool", "")
    for source in ("/usr/bin/false", sys.executable):
        program.write_bytes(Path(source).read_bytes()[: 1 << 20] + b"\0rename\0link(\0")
        program.chmod(0o755)
        node.write("s.sh", f"mkdir -p env; build/tool {source} && exit 1; cat build/tool | wc -c; exit 7\n")
        before = node.runs
        assert (node.run().exit_code, node.runs - before) == (7, 1)


CROSSINGS = {
    "compiled": "python3 -c 'import moves'",
    "folder": "python3 -c \"import os; os.rename('out/d', 'env/d')\"",
    "module": "python3 moves.py",
    "link": "ln out/d/f env/f",
    "copies": "cp -al out/d env/d",
}


@pytest.mark.parametrize("kind", CROSSINGS)
def test_what_is_renamed_or_linked_into_a_target_ends_no_job(node: Node, kind: str) -> None:
    """Below an overlay it cannot be."""
    moves = "Path('out/d').replace('env/d')"
    if kind == "compiled":  # without a traceback, for which the source is read
        moves = f"try:\n    {moves}\nexcept OSError:\n    raise SystemExit(1)"
    node.write("moves.py", f"from pathlib import Path\n{moves}\n")
    if kind == "compiled":
        subprocess.run([sys.executable, "-m", "py_compile", "moves.py"], cwd=node.work, check=True)
    node.write("s.sh", f"set -e; mkdir -p out/d env; echo 1 > out/d/f; {CROSSINGS[kind]}\n")
    result = node.run()
    assert (result.exit_code, result.outcome, node.runs) == (0, Outcome.RAN_AND_PUBLISHED, 2), result.reason
    made = "f" if kind == "link" else "d/f"
    assert (node.target / made).read_text() == "1\n"
    assert node.run().reason == "hit"
    assert ((node.target / made).read_text(), node.runs) == ("1\n", 2)


PLACED = {
    "asked": "if [ ! -d env ]; then mkdir env && echo 1 >env/made; fi",
    "asked by a variable": 'V=${V:-env}; [ -e "$V" ] || { mkdir -p $V; echo 1 >$V/made; }',
    "removed in vain": "set -e; rm -rf x env; mkdir env; echo 1 >env/made",
    "removed": "rm -rf env; mkdir -p env; echo 1 >env/made",
    "another in its place": "rm -rf env; mkdir new; echo 1 >new/made; mv new env",
    "asked by a module": "python3 -c 'import asks'",
    "made by a module": "python3 -c 'import makes'",
}


@pytest.mark.parametrize("kind", PLACED)
def test_a_command_finds_no_target_before_it_has_made_it(node: Node, kind: str) -> None:
    """What is mounted on one is there before, and cannot be removed."""
    makes = "os.mkdir('env'); open('env/made', 'w').write('1\\n')\n"
    node.write("makes.py", f"import os; {makes}")
    node.write("asks.py", f"import os\nif not os.path.isdir('env'):\n    {makes}")
    node.write("s.sh", f"{PLACED[kind]}\n")
    for number in range(2):
        result = node.run()
        assert (result.exit_code, (node.target / "made").read_text()) == (0, "1\n"), result.reason
        assert node.runs == (2 if "module" in kind or "in vain" in kind else 1), result.reason
        node.release()
        if not number:
            shutil.rmtree(node.target, ignore_errors=True)
    assert node.target.exists() == ("module" in kind)


def test_folders_deeper_than_any_path_in_a_new_target_end_no_job(node: Node) -> None:
    node.write("s.py", "import os\nos.makedirs('env', exist_ok=True)\nos.chdir('env')\n"
               "for _ in range(25):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\n")  # fmt: skip
    node.write("s.sh", "python3 s.py\n")
    result = node.run()
    assert (result.exit_code, result.outcome, node.runs) == (0, Outcome.RAN, 1), result.reason


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


_OTHERS = "until [ -e {0}/go ]; do sleep 0.05; done; {1}; : > {0}/done"
_WAITS = ": > go; until [ -e done ]; do sleep 0.05; done\n"
_CHANGES = {"written": "echo y >> r.txt", "replaced": "echo y > n; mv n r.txt", "removed": "rm r.txt"}


@pytest.mark.parametrize(("how", "first"), [*((how, True) for how in _CHANGES), ("written", False)])
def test_an_input_that_changes_meanwhile_stops_publication(node: Node, how: str, first: bool) -> None:
    """By others, before or after the command opened it: nobody knows. A file that is gone at the end may have been
    taken by anybody."""
    reads, waits = "cat r.txt > env/made; ", _CHANGES[how] if how == "removed" else _WAITS
    node.write("s.sh", reads + waits if first else waits + reads)
    others = "true" if how == "removed" else f"cd {node.work}; {_CHANGES[how]}"
    other = subprocess.Popen(["sh", "-c", _OTHERS.format(node.work, others)])
    try:
        result = node.run()
    finally:
        node.write("go", "")
        assert other.wait(20) == 0
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert f"not published: {node.work}/r.txt changed while the command ran" in result.reason
    assert not snapshots.names(FolderStore(node.store))
    node.write("r.txt", "torch==2.5\n")
    node.write("s.sh", "cat r.txt > env/made\n")
    node.run()
    assert node.runs == 2


@pytest.mark.parametrize(
    "change",
    [
        "sleep 1; echo y >> r.txt",
        _CHANGES["replaced"],
        "python3 -c \"import os; r = open('r.txt').read(); open('n', 'w').write(r + 'y'); os.replace('n', 'r.txt')\"",
        "cp r.txt n; mv n r.txt",
        "ln r.txt old; echo y > n; mv n r.txt",
    ],
)
def test_a_file_that_the_command_reads_and_changes_counts_as_it_was(node: Node, change: str) -> None:
    """As installers keep lock files and files of state."""
    node.write("s.sh", f"cat r.txt > env/made; {change}\n")
    for name in ("first", "second"):
        node.write("r.txt", f"{name}\n")
        result = node.run()
        assert result.outcome is Outcome.RAN_AND_PUBLISHED, result.reason
        assert (node.target / "made").read_text() == f"{name}\n"
        node.release()
    assert node.runs == 2
    for name in ("first", "second"):
        node.write("r.txt", f"{name}\n")
        assert node.run().reason == "hit"
        assert (node.target / "made").read_text() == f"{name}\n"
        node.release()
    node.write("r.txt", "third\n")
    node.run()
    assert (node.target / "made").read_text() == "third\n"


def test_of_large_files_that_the_command_changes_nothing_is_kept(node: Node) -> None:
    node.write("r.txt", "x" * (2 << 20))
    node.write("s.sh", "cat r.txt > env/made; cp r.txt n; mv n r.txt\n")
    assert f"not published: {node.work}/r.txt changed while the command ran" in node.run().reason


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


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("", "home/.cargo/registry/index"),
        ("", "home/.npm/_cacache"),
        ("", "home/go/pkg/mod/cache"),
        ("", "home/.rustup/downloads"),
        ("", "home/.conda/pkgs"),
        ("", "elsewhere/_cacache"),
        ("CARGO_HOME", "moved/git"),
        ("UV_CACHE_DIR", "moved"),
        ("npm_config_cache", "moved"),
        ("POETRY_CACHE_DIR", "moved"),
        ("CONDA_PKGS_DIRS", "moved"),
        ("GOMODCACHE", "moved"),
        ("CCACHE_DIR", "moved"),
        ("", "home/.yarn/berry/metadata"),
        ("YARN_GLOBAL_FOLDER", "moved/cache"),
        ("PNPM_HOME", "moved/store"),
        ("TMPDIR", "moved/v8-compile-cache-0"),
    ],
)
def test_caches_of_package_managers_are_no_inputs(node: Node, variable: str, folder: str) -> None:
    """Also when they change while the command runs."""
    cached = node.work / folder / "index.json"
    cached.parent.mkdir(parents=True)
    cached.write_text("a")
    node.write("s.sh", f"cat r.txt > env/made; cat {cached} > seen; echo b >> {cached}\n")
    environ = {"PATH": os.environ["PATH"], "HOME": str(node.work / "home")}
    if variable:
        environ[variable] = str(node.work / folder.split("/")[0])
    result = node.run(environ=environ)
    assert result.outcome is Outcome.RAN_AND_PUBLISHED, result.reason
    assert {os.path.basename(path) for path in node.observed().files} == {"s.sh", "r.txt"}


@pytest.mark.parametrize(
    "option", ["--cache-dir=cached", "--cache-dir \\\n  '{}/cached'", '--cache-dir "$PLACE/cached"']
)
def test_a_cache_that_the_command_names_by_an_option_is_no_input(node: Node, option: str) -> None:
    node.write("cached/index", "a\n")
    node.write("bin/uv", "#!/bin/sh\ncat cached/index r.txt > env/made; echo b >> cached/index\n").chmod(0o755)
    node.write("s.sh", f"mkdir -p env; bin/uv pip install -q {option.format(node.work)} x\n")
    environ = {"PATH": os.environ["PATH"], "PLACE": str(node.work)}
    result = node.run(environ=environ)
    assert result.outcome is Outcome.RAN_AND_PUBLISHED, result.reason
    assert {os.path.basename(path) for path in node.observed().files} == {"s.sh", "r.txt", "uv"}


def test_a_project_in_a_cache_counts(node: Node) -> None:
    environ = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(node.work.parent)}
    assert node.run(environ=environ).outcome is Outcome.RAN_AND_PUBLISHED
    assert {os.path.basename(path) for path in node.observed().files} == {"s.sh", "r.txt"}


@pytest.mark.parametrize("left", ["build/lib/r", "target/release/.fingerprint/r"])
def test_what_an_earlier_build_left_is_refused(node: Node, left: str) -> None:
    place = node.work / left
    place.parent.mkdir(parents=True)
    place.write_text("x")
    node.write("s.sh", f"cat r.txt {left} > env/made\n")
    assert f"not published: {place} is left from an earlier build" in node.run().reason


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
        patch.setattr("bootseer.kernel.libc.file_system", lambda fd: (0x6969, 1))
        assert digest() == first
    assert not (Path(node.config.cache_dir) / "env-facts").exists()  # whatever this node's clock says of a server's
    monkeypatch.setattr(remembered, "_SETTLED", -1.0)
    assert digest() == first
    assert len(list((Path(node.config.cache_dir) / "env-facts").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "blake3", None)
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
    node.write("proj/outputs/train.py", "")
    assert node.run().outcome is Outcome.RESTORED_MOUNT
    node.write("proj/package/__init__.py", "")
    node.release()
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED


def test_a_new_tag_of_a_repository_counts(node: Node) -> None:
    """Versions come from them."""
    git = "git -c user.name=a -c user.email=a@b -c safe.directory=*"
    subprocess.run(f"git init -q && {git} commit -q --allow-empty -m 1", shell=True, cwd=node.work, check=True)
    node.write("s.sh", f"mkdir -p env; {git} describe --tags --always > env/made\n")
    for name in ("v1", "group/v2"):
        node.run()
        node.release()
        assert node.run().reason == "hit"
        node.release()
        subprocess.run(["git", "tag", "-f", name], cwd=node.work, check=True, capture_output=True)
        result = node.run()
        node.release()
        assert result.reason == f"missed because {node.work}/.git/refs/tags/{name.split('/')[0]} is new"


LED = {
    "a folder that is copied": ("cp -r {out}/c/. env", "echo 2 >{out}/c/two", "{out}/c/two is new"),
    "a folder in it": ("tar c -C {out} c | tar x -C env", "mkdir {out}/c/d", "{out}/c/d is new"),
    "a pattern": ("cat {out}/c/*.conf >env/made", "echo 2 >{out}/c/b.conf", "{out}/c/b.conf is new"),
    "a pattern beside others": (
        "cat {out}/w/p*.whl {out}/w/*.conf >env/made", ">{out}/w/b.conf", "{out}/w/b.conf is new",
    ),
    "what find finds": ("find {out}/g -type f -exec cat {{}} +", "mkdir {out}/g/y", "{out}/g/y is new"),
    "a file that is gone": ("cp -r {out}/g/x/. env", "rm {out}/g/x/b", "{out}/g/x/b is not here"),
    "a package": ("ls {out}/w; cat {out}/w/p-1.whl >env/made", ">{out}/w/p-2.whl", "{out}/w/p-2.whl is new"),
    "a branch": (
        "git clone -q {out}/r env/r", "{git} commit -q --allow-empty -m 2", "{out}/r/.git/refs/heads/b is new",
    ),
    "a link to a folder": (
        "cat {out}/v/f >env/made", "ln -sfn v2 {out}/v", "{out}/v/f leads to {out}/v2/f here, not to {out}/v1/f",
    ),
    "a link": ("cat v >env/made", "ln -sfn {out}/v2/f v", "{work}/v leads to {out}/v2/f here, not to {out}/v1/f"),
    "a file that was looked for": ("[ -f {out}/opt ] && cat {out}/opt; :", ">{out}/opt", "{out}/opt is new"),
    "one whose name is put together": (
        "end=$(echo pt); (cd {out}/v2/.. && cd g && cat o$end) 2>/dev/null || :",
        ">{out}/g/opt",
        "{out}/g/opt is new",
    ),
    "one that a program has in itself": (
        "python3 -c 'import os; print(os.access(chr(111) + chr(112), 4))'",
        ">op",
        "{work}/op is new",
    ),
    "a program before that of the system": ("nl /dev/null", "cp /bin/true {out}/v1/nl", "{out}/v1/nl is new"),
    "one of several": (
        "[ -d {out} -a ! -f {out}/no ] && bash -c '[[ -n x && -f {out}/opt ]]'; :", ">{out}/opt", "{out}/opt is new",
    ),
    "a file that Python looked for": ("python3 {out}/look.py", ">opt", "{work}/opt is new"),
    "a program before that of the system in a new folder": (
        "nl /dev/null", "PATH={out}/nl:$PATH", "nl leads to {out}/nl/nl here, not to /usr/bin/nl",
    ),
    "a new file of a package of go": (
        "python3 {out}/walk.py {out}/g o go.mod", ">{out}/go/m/n.go", "{out}/go/m/n.go is new",
    ),
    "a new file of a project of cargo": (
        "python3 {out}/walk.py {out}/r s Cargo.toml", ">{out}/rs/m/n.rs", "{out}/rs/m/n.rs is new",
    ),
    "a new member of a workspace": (
        "python3 {out}/walk.py {out}/j s package.json", "mkdir {out}/js/n; >{out}/js/n/package.json",
        "{out}/js/n is new",
    ),
    "a program": ("tool >env/made", "PATH={out}/v2:$PATH", "tool leads to {out}/v2/tool here, not to {out}/v1/tool"),
    "a path of a program": ("python3 -c 'import mod; print(mod.V)'", "PYTHONPATH={out}/v2", "PYTHONPATH"),
    "a program that is asked for": (
        "command -v some-tool >env/made || :", "cp {out}/v1/tool {out}/v1/some-tool",
        "the program some-tool, which the command looks for, is here",
    ),
    "a program that is gone": (
        "python3 -c 'import shutil; print(shutil.which(\"tool\"))' >env/made", "rm {out}/v1/tool",
        "the program tool, which the command looks for, is not here",
    ),
    "a module that need not be there": (
        "python3 {out}/look.py", ">{out}/local_settings.py", "{out}/local_settings.py is new",
    ),
    "a module before another": (
        "python3 -c 'import mod; print(mod.V)'", "cp {out}/v2/mod.py {out}/g", "{out}/g/mod.py is new",
    ),
    "a header before another": (
        "echo '#include \"f\"' | cpp -P -I {out}/g -I{out}/v1 >env/made", "cp {out}/v2/f {out}/g", "{out}/g/f is new",
    ),
    "a pattern where it works": ("cat *.conf >env/made", "echo 2 >b.conf", "{work}/b.conf is new"),
    "a link that is copied": (
        "cp -a {out}/k/. env", "ln -sfn nowhere {out}/k/l",
        "{out}/k/l leads to {out}/k/nowhere here, not to {out}/k/a",
    ),
    "the text of a link": (
        "readlink v >env/made", "ln -sfn {out}/v2/f v", "{work}/v leads to {out}/v2/f here, not to {out}/v1/f",
    ),
    "the home": ("cat ~/f >env/made", "HOME={out}/v2", "HOME"),
    "one in a folder that it enters": (
        "(cd {out}/g && {{ test -e opt || echo no; }})", ">{out}/g/opt", "{out}/g/opt is new",
    ),
    "what may be missing": ("cat {out}/opt.txt 2>/dev/null || :", ">{out}/opt.txt", "{out}/opt.txt is new"),
    "a pattern with a beginning": ("cat a.c* >env/made", ">a.cfg", "{work}/a.cfg is new"),
    "a pattern of one place": ("cat a.con? >env/made", ">a.conx", "{work}/a.conx is new"),
    "a pattern of nothing": (
        "for one in {out}/g/*.sh; do [ -e $one ]; done; :", ">{out}/g/a.sh", "{out}/g/a.sh is new",
    ),
    "a pattern in no folder": (
        "for one in {out}/h/*.sh; do [ -e $one ]; done; :", "mkdir {out}/h; >{out}/h/a.sh", "{out}/h/a.sh is new",
    ),
    "a folder that is listed": ("ls {out}/g", ">{out}/g/b", "{out}/g/b is new"),
    "a folder that Python lists": (
        "python3 -c 'import os; print(os.listdir(\"{out}/g\"))'", "rm -r {out}/g/x", "{out}/g/x is not here",
    ),
    "a folder below that": ("find {out}/g", ">{out}/g/x/c", "{out}/g/x/c is new"),
    "a folder that is there": (
        "[ -d {out}/c ] || echo no", "mv {out}/c {out}/d", "{out}/c, which the command looks for, is not here",
    ),
    "a folder that is not there": ("[ -d {out}/d ] || echo no", "mkdir {out}/d", "{out}/d is new"),
    "a link to nothing": ("[ -e {out}/n ] || echo no", ">{out}/m", "{out}/n is new"),
    "whether it can be run": (
        "[ -x {out}/c/a.conf ] || echo no", "chmod +x {out}/c/a.conf",
        "the program {out}/c/a.conf, which the command looks for, is here",
    ),
    "what make includes": (
        "make -sf - <<'E'\n-include local.mk\nall:\nE\n:", "echo X=2 >local.mk", "{work}/local.mk is new",
    ),
    "more settings of a project": (
        "(cd {out}/g && python3 -c 'import setuptools as s; s.setup()' -q egg_info -e {work}/env)",
        ">{out}/g/MANIFEST.in", "{out}/g/MANIFEST.in is new",
    ),
    "a name in a list": (
        'python3 -c \'import configparser as c; c.ConfigParser().read(["{out}/z.ini", "{out}/a.ini"])\'',
        ">{out}/a.ini", "{out}/a.ini is new",
    ),
    "by a variable of its own": ("D={out}/c; [ -f $D/opt ] || echo no", ">{out}/c/opt", "{out}/c/opt is new"),
    "by a default": ('F=${{F:-{out}/c/opt}}; [ -f "$F" ] || echo no', ">{out}/c/opt", "{out}/c/opt is new"),
    "in a loop": ("for f in x y; do [ -f {out}/c/$f.1 ] || echo no; done", ">{out}/c/y.1", "{out}/c/y.1 is new"),
    "of a function": (
        'at() {{ [ -f "$1" ] || echo no; }}; at {out}/c/opt.txt', ">{out}/c/opt.txt", "{out}/c/opt.txt is new",
    ),
    "beside the script": (
        'D="$(cd "$(dirname "$0")" && pwd)"; [ -f "$D/opt" ] || echo no', ">opt", "{work}/opt is new",
    ),
    "in braces": ("bash -c 'cat {out}/c/{{a,b}}.conf 2>&1' || :", ">{out}/c/b.conf", "{out}/c/b.conf is new"),
    "what make takes first": (
        "make -sC {out}/mk", "cp {out}/mk/Makefile {out}/mk/GNUmakefile", "{out}/mk/GNUmakefile is new",
    ),
    "a path that a script sets": (
        "export PYTHONPATH={out}/g:{out}/v2; python3 -c 'import mod'", "cp {out}/v1/mod.py {out}/g",
        "{out}/g/mod.py is new",
    ),
    "a header beside the source": (
        "cpp -P -I{out}/v1 {out}/mk/x.c >env/made", "cp {out}/v2/f {out}/mk", "{out}/mk/f is new",
    ),
    "a module before one of Python": ("python3 own.py", ">this.py", "{work}/this.py is new"),
    "a pattern of what is only listed": ("echo {out}/w/*.conf", ">{out}/w/b.conf", "{out}/w/b.conf is new"),
    "folders that a pattern finds": ("echo {out}/g/*", "mkdir {out}/g/y", "{out}/g/y is new"),
    "what git knows of": (
        "git -C {out}/r ls-files", ">{out}/r/new; {git} add new",
        "{out}/r/.git/index, which the command reads, changed",
    ),
    "a settings file of curl": ("curl -sV", "echo '--silent' >{out}/v1/.curlrc", "{out}/v1/.curlrc is new"),
    "a folder whose name is put together": (
        "[ -d {out}/$(echo c) ] || echo no", "mv {out}/c {out}/d", "{out}/c, which the command looks for, is not here",
    ),
    "a folder that it enters": (
        "bash -c 'cd {out}/$(echo c) || :'", "mv {out}/c {out}/d", "{out}/c, which the command looks for, is not here",
    ),
    "a folder in place of which a file is": (
        "test -e {out}/$(echo c)", "rm -r {out}/c; >{out}/c", "{out}/c, which the command looks for, is a file here",
    ),
    "a program in place of a file": (
        'python3 -c \'import os; os.access("{out}/c/a" + ".conf", os.X_OK)\'', "chmod +x {out}/c/a.conf",
        "the program {out}/c/a.conf, which the command looks for, is here",
    ),
    "a program that a program looks for": (
        "python3 -c 'import shutil; print(shutil.which(\"some-\" + \"tool\"))'", "cp {out}/v1/tool {out}/v1/some-tool",
        "the program some-tool, which the command looks for, is here",
    ),
    "a link that a program follows": (
        'python3 -c \'print(open("{out}/" + "v/f").read())\'', "ln -sfn v2 {out}/v",
        "{out}/v/f leads to {out}/v2/f here, not to {out}/v1/f",
    ),
    "what make depends on": (
        "printf 'all: {out}/c/$(X).conf; echo 1' | make -sf - X=a || :", "rm {out}/c/a.conf",
        "{out}/c/a.conf, which the command looks for, is not here",
    ),
    "a file of the home": (
        "[ -e ~/$(echo f) ] || echo no", "HOME={out}/g", "{out}/g/f, which the command looks for, is not here",
    ),
    "what a shell reads first": ("bash -c 'echo $X' >env/made", "BASH_ENV={out}/v2/f", "BASH_ENV"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LED)
def test_what_a_name_leads_to_counts(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The kernel tells only of true paths, and of nothing that is not there."""
    out, command, (script, change, reason) = (
        tmp_path / "out",
        "git -C {out}/r -c user.name=a -c user.email=a@b",
        LED[kind],
    )
    for version in ("1", "2"):
        made = out / f"v{version}"
        made.mkdir(parents=True)
        (made / "f").write_text(f"X={version}\n")
        (made / "mod.py").write_text(f"V = {version}\n")
        (made / "tool").write_text(f"#!/bin/sh\necho {version}\n")
        (made / "tool").chmod(0o755)
    (out / "v").symlink_to("v1")
    (out / "n").symlink_to("m")
    (node.work / "v").symlink_to(out / "v1/f")
    for path in ("c/a.conf", "w/p-1.whl", "w/other.whl", "w/a.conf", "g/x/a", "g/x/b", "p/pyproject.toml"):
        (out / path).parent.mkdir(exist_ok=True, parents=True)
        (out / path).write_text("1\n")
    (out / "look.py").write_text(
        "import pathlib\nif pathlib.Path('opt').exists(): print('is there')\n"
        "try:\n    import local_settings\nexcept ImportError:\n    pass\n"
    )
    node.write("a.conf", "1\n")
    node.write("own.py", "import this\n")
    (out / "k").mkdir()
    (out / "k/a").write_text("1\n")
    (out / "k/l").symlink_to("a")
    (out / "mk").mkdir()
    (out / "mk/Makefile").write_text("all:\n\t@echo 1\n")
    (out / "mk/x.c").write_text('#include "f"\n')
    walk = "import os, sys; at = sys.argv[1] + sys.argv[2]; print([*os.walk(at)], open(f'{at}/{sys.argv[3]}').read())\n"
    (out / "walk.py").write_text(walk)
    (out / "nl").mkdir()
    shutil.copy("/bin/true", out / "nl/nl")
    for name in ("go/go.mod", "go/m/m.go", "rs/Cargo.toml", "rs/m/m.rs", "js/package.json", "js/m/package.json"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("1\n")
    told, of_git = {"out": out, "work": node.work, "git": command.format(out=out)}, "/r" in script
    made = [
        "git init -q -b b {out}/r",
        "touch {out}/r/a",
        "{git} add a",
        "{git} commit -q --allow-empty -m 1",
        "{git} pack-refs --all",
    ]
    if of_git:
        subprocess.run(" && ".join(made).format(**told), shell=True, check=True)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "safe.directory")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "*")
    for name, value in {"HOME": f"{out}/v1", "PYTHONPATH": f"{out}/g:{out}/v1", "BASH_ENV": f"{out}/v1/f"}.items():
        monkeypatch.setenv(name, value)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{out}/v1:{path}")

    node.write("s.sh", f"mkdir -p env; {{ {script.format(**told)}; }} >env/more\n")
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    node.release()
    node.write("notes.txt", "")  # beside the script
    again = ["touch {out}/r/a", "{git} status -s", "{git} repack -adq"]
    if of_git:
        subprocess.run(" && ".join(again).format(**told), shell=True, check=True)
    monkeypatch.setenv("PATH", f"{out}/v1:/nowhere:{path}")
    assert node.run().reason == "hit"
    node.release()
    change = change.format(**told)
    if set_to := re.match(r"(\w+)=(.*)", change):
        monkeypatch.setenv(set_to[1], set_to[2].replace("$PATH", path))
    else:
        subprocess.run(change, shell=True, cwd=node.work, check=True)
    reason = (
        reason.format(**told)
        if " " in reason
        else f"the variable {reason}, which decides what the command reads, has another value"
    )
    result = node.run()
    assert (result.outcome, result.reason) == (Outcome.RAN_AND_PUBLISHED, f"missed because {reason}")
    node.release()
    assert node.run().reason == "hit"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("", "hit"),
        ("cat {out}/w/*.conf", "missed because {out}/w/b.conf is new"),
        ("cp -r {out}/w/. env/w", "missed because {out}/w/b.conf is new"),
    ],
    ids=["alone", "of a kind", "all"],
)
def test_a_new_note_beside_wheels_counts_where_the_command_reads_more_than_these(
    node: Node, tmp_path: Path, script: str, reason: str
) -> None:
    out = tmp_path / "out"
    (out / "w").mkdir(parents=True)
    (out / "w/a.conf").write_text("a\n")
    with zipfile.ZipFile(out / "w/p-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("p.py", "V = 1\n")
        wheel.writestr("p-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: p\nVersion: 1\n")
        wheel.writestr("p-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("p-1.dist-info/RECORD", "p.py,,\n")
    pip = f"python3 -m pip install -q --no-index --find-links {out}/w --target env p"
    node.write("s.sh", f"mkdir -p env; {pip}\n{script.format(out=out)} >env/made\n")
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    node.release()
    (out / "w/b.conf").write_text("b\n")
    assert node.run().reason == reason.format(out=out)


def test_what_is_met_in_a_list_or_of_one_start_is_no_name(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What jobs write, the folder for temporary files, what was only written to, a program that was started."""
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/one")
    node.write("slurm-1.out", "")
    node.write("log", "")
    (tmp_path / "one/x").mkdir(parents=True)
    node.write("s.sh", "mkdir -p env; ls -l . >env/made; echo x >>log; [ -d $TMPDIR/x ]; ls -l $TMPDIR; tool\n")
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    node.release()
    for path in (node.work / "slurm-1.out", node.work / "log", tmp_path / "tool"):
        path.unlink()
    shutil.rmtree(tmp_path / "one")
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/two")
    assert node.run().reason == "hit"


@pytest.mark.parametrize("by", ["command", "read"])
@pytest.mark.parametrize("what", ["cpu", "gpu"])
def test_what_is_made_for_one_processor_is_not_used_on_another(
    node: Node, monkeypatch: pytest.MonkeyPatch, what: str, by: str
) -> None:
    """Red before: a library of ``-march=native`` was a hit where it ends with an illegal instruction."""
    text = (
        "mkdir -p env; : gcc -march=native; cat r.txt >env/made\n"
        if what == "cpu"
        else "mkdir -p env; nvidia-smi; :>env/a\n"
    )
    node.write("build.sh", text)
    node.write("s.sh", text if by == "command" else "f=build; sh $f.sh\n")
    monkeypatch.setattr(hardware, what, lambda: "one")
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    node.release()
    monkeypatch.setattr(hardware, "gpu" if what == "cpu" else "cpu", lambda: "of no matter")
    assert node.run().reason == "hit"
    node.release()
    monkeypatch.setattr(hardware, what, lambda: "another")
    result = node.run()
    shown = "the processor" if what == "cpu" else "the GPU"
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert result.reason.startswith(f"missed because {shown}")


def test_words_of_a_script_that_name_nothing_are_not_asked_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: each word was, in the job's folder, which others share, while the job waited."""
    asked, realpath = list[str](), os.path.realpath
    monkeypatch.setattr(
        os.path, "realpath", lambda path, **named: asked.append(os.fspath(path)) or realpath(path, **named)
    )
    node.write("s.sh", "mkdir -p env; : " + " ".join(f"zz{number}" for number in range(1000)))
    node.run()
    assert [path for path in asked if "/zz" in path] == []


def test_a_secret_that_is_taken_for_a_name_is_not_stored(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CI gives a key in a variable, or in a file that one names. Red before."""
    monkeypatch.setenv("DEPLOY_TOKEN", "hunter2")
    monkeypatch.setenv("GIVEN", "ghp_" + "a1B2" * 9)
    monkeypatch.setenv("WHICH", "opt")
    node.write(
        "s.sh", 'mkdir -p env; for one in 1; do [ -f "$DEPLOY_TOKEN" ] || [ -s "$GIVEN" ] || [ -f $WHICH ]; done; :\n'
    )
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    names = node.observed().names
    assert names[f"{node.work}/opt"] == ""
    assert [name for name in names if "hunter2" in name or "ghp_" in name] == []


def test_a_folder_that_others_fill_is_not_one_that_is_copied(node: Node, tmp_path: Path) -> None:
    """A script beside what it writes, a folder of which not all was read, and a home of which nothing was."""
    node.write(
        "s.sh", "rm -f log; mkdir -p env logs; date > logs/$$.log; cat r.txt sub/a logs/*.log > env/made; ls . sub\n"
    )
    node.write("sub/a", "1")
    node.write("sub/other", "1")
    node.run()
    for name in ("slurm-1.out", "sub/new", "log", "logs/other.log"):
        node.write(name, "")
        node.release()
        assert node.run().reason == "hit"


def test_what_the_command_makes_is_no_name_that_it_finds(node: Node) -> None:
    """Nor a folder that it changes, what it removes, or a target."""
    node.write(
        "s.sh",
        "mkdir -p env; [ -d made ] || mkdir made\n[ -x made/tool ] || cp /bin/true made/tool\n"
        "ls made kept; : > kept/new\n"
        "rm -f kept/*.tmp old.* 2>/dev/null || :\n[ -d env ] && [ -e env/made ] || cat r.txt > env/made\n",
    )
    node.write("kept/a", "1")
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    node.release()
    shutil.rmtree(node.work / "made")
    for name in ("kept/b.tmp", "old.log"):
        node.write(name, "")
    assert node.run().reason == "hit"


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


@pytest.mark.parametrize("name", ["_inputs", "_used"])
def test_what_cannot_be_examined_ends_no_start(node: Node, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(observer.Observer, name, fail)
    result = node.run()
    assert (result.exit_code, result.outcome) == (0, Outcome.RAN)
    assert "too deep" in result.reason
    assert (node.target / "made").read_text() == "torch==2.5\n"


def test_a_lost_event_is_said(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(self: Opens, data: bytes) -> None:
        raise ValueError("no such event")

    monkeypatch.setattr(Opens, "take", lose)
    result = node.run()
    assert result.outcome is Outcome.RAN
    assert result.reason.endswith(
        "; not published: what the command read is not known: an event was lost: no such event"
    )


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
    assert set(node.observed().files) == {str(node.work / "s.sh"), str(node.work / "r.txt")}


def test_what_the_command_leaves_and_never_stops_opening_files_delays_nobody(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.kernel.opens._JOIN_SECONDS", 20.0)
    for number in range(2000):
        node.write(f"many/{number}", "")
    endless = "import os\nwhile True:\n for n in os.listdir(): os.close(os.open(n, os.O_RDONLY))"
    opens = Opens()
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


def test_a_command_that_opens_files_without_end_takes_no_memory_without_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lib_opens, "_MOST", 100)
    opens = Opens()
    opens.begin()
    for number in range(300):
        node.write(f"many/{number}", "")
    opens.end()
    assert len(opens.seen) + len(opens.folders) <= 101
    assert opens.failure == "an event was lost: more than 100 files were opened"


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
    assert result.outcome is Outcome.RAN
    assert "not published: what the command reads cannot be observed now: can't start new thread" in result.reason


def test_without_its_reader_nothing_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Opens, "take", None)
    opens = Opens()
    opens.begin()
    try:
        assert opens._thread
        os.listdir()
        opens._thread.join(10)
        assert os.readlink(f"/proc/self/fd/{opens._fds['events']}") == "anon_inode:[eventfd]"
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


def _refuse(self: Opens) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("why", ["refused", "namespace", "its own", "a child's", "by a record", "mounted", "name"])
def test_what_can_never_be_observed_is_said(node: Node, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start of the same command would not be observed, either."""
    text = {
        "refused": "the kernel refused it: Operation not permitted",
        "namespace": "it started unshare",
        "its own": "it went into other mounts",
        "a child's": "it went into other mounts",
        "by a record": "it went into other mounts",
        "mounted": f"it mounted {node.work}/mnt",
        "name": "it read a file whose name is not UTF-8",
    }[why]
    if why == "refused":
        monkeypatch.setattr(Opens, "begin", _refuse)
    elif why == "name":
        (node.work / "\udcff").write_text("x")
        node.write("s.sh", "mkdir -p env; cat * > env/made 2> env/errors; :\n")
    elif why == "namespace":
        node.write("s.sh", "unshare -m cat r.txt > env/made\n")
    elif why in ("its own", "a child's", "by a record"):  # as sandboxes of builds do
        given = {
            "a child's": "56, 0x20011, 0, 0, 0, 0)",
            "by a record": "435, struct.pack('5Q48x', 1 << 17, 0, 0, 0, 17), 88)",
        }
        call = f"{given[why]} and os._exit(os.wait()[1])" if why in given else "272, 0x20000)"
        code = f"import ctypes, os, struct; ctypes.CDLL(None).syscall({call}; print(open('r.txt').read())"
        node.write("s.sh", f'{sys.executable} -c "{code}" > env/made\n')
    else:
        node.write("s.sh", "cat r.txt > env/made; mkdir mnt; mount --bind . mnt\n")
    result = node.run()
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert result.reason.endswith(f"; only its stated inputs count: {text}")
    assert node.observed() == inputs.Observed(unobserved=text)
    assert not mounts.is_mounted(node.work / "mnt")
    again = node.run()
    assert again.reason == f"already in place on this node; only its stated inputs count: {text}"


def test_a_command_that_looks_for_very_much_does_not_hold_up_the_job(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of a million names was looked at, for a minute, and 5,000 counted."""
    seen, looked = names.seen, list[str]()

    def noted(*args: Any) -> Iterator[tuple[str, str]]:
        for path, real in seen(*args):
            looked.append(path)
            yield path, real

    monkeypatch.setattr(names, "seen", noted)
    monkeypatch.setattr(names, "MOST", 3)
    node.write("s.sh", "mkdir -p env; for i in 1 2 3 4 5 6 7 8 9; do [ -e no$i ]; done; cat r.txt > env/made\n")
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    assert len(node.observed().names) == 3
    assert len(looked) <= 6
    assert "only 3 count" in caplog.text


@pytest.mark.parametrize("why", ["files", "overflow", "groups", "late"])
def test_a_snapshot_of_which_the_inputs_are_unknown_by_accident_is_not_shared(
    node: Node, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {
        "files": "the command read more than 1 files that count",
        "overflow": "what the command read is not known: too many files were opened at once",
        "groups": "what the command reads cannot be observed now: Too many open files",
        "late": f"what the command read is not known: {node.work}/mnt did not answer at first",
    }[why]
    with contextlib.ExitStack() as undo:
        if why == "files":
            monkeypatch.setattr(inputs, "MAX_FILES", 1)
        elif why == "overflow":
            monkeypatch.setattr("bootseer.kernel.opens._OVERFLOW", 0x20)
        elif why == "groups":

            def refuse(self: Opens) -> None:
                raise OSError(24, "Too many open files")

            monkeypatch.setattr(Opens, "begin", refuse)
        else:
            mark, wake = libc.fanotify_mark, threading.Event()
            monkeypatch.setattr("bootseer.kernel.opens._MARK_SECONDS", 0.2)

            def slow(fd: int, flags: int, mask: int, path: str) -> None:
                if path == str(node.work / "mnt"):
                    wake.wait(20)
                mark(fd, flags, mask, path)

            monkeypatch.setattr(libc, "fanotify_mark", slow)
            (node.work / "mnt").mkdir()
            mounts.mount("none", node.work / "mnt", "tmpfs")
            undo.callback(mounts.unmount, node.work / "mnt")
            node.write("s.sh", "sleep 0.5; cat r.txt > env/made\n")
        result = node.run((lambda: wake.set()) if why == "late" else lambda: None)
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert result.reason.endswith(f"; not published: {text}")
    assert not snapshots.names(FolderStore(node.store))
    monkeypatch.undo()
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED


@pytest.mark.parametrize("how", ["gone", "new", "many", "automatic", "automatic, read"])
def test_mounts_that_come_and_go_blind_nobody(
    node: Node, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounts of other namespaces, as those of other environments on the node."""
    shared = tmp_path / "shared"
    shared.mkdir()
    mounts.mount(shared, shared, "", flags=mounts.MS_BIND)
    libc.mount("none", str(shared), "", 1 << 20, "")  # MS_SHARED
    script = {
        "gone": "umount gone; rmdir gone",
        "new": "mkdir new; mount -t tmpfs none new; echo x > new/x.h",
        "many": "for i in $(seq 50); do mkdir $i; mount -t tmpfs none $i; umount $i; done",
    }.get(how, "mkdir auto; mount -t tmpfs none auto; echo x > auto/x.h")
    if how.startswith("automatic"):
        entries = mounts.entries
        monkeypatch.setattr(
            mounts,
            "entries",
            lambda *process: (e._replace(fstype="autofs") if e.target == str(shared) else e for e in entries(*process)),
        )
    if how == "gone":
        (shared / "gone").mkdir()
        mounts.mount("none", shared / "gone", "tmpfs")
    other = subprocess.Popen(["sh", "-c", _OTHERS.format(node.work, f"cd {shared}; {script}")])
    read = "new" if how == "automatic" else "*"
    node.write("s.sh", f"{_WAITS}sleep 0.3; cat r.txt ../shared/{read}/*.h > env/made; :\n")
    try:
        result = node.run()
    finally:
        assert other.wait(20) == 0
        for entry in mounts.below(shared)[::-1]:
            mounts.unmount(entry.target)
        mounts.unmount(shared)
    if how == "automatic, read":
        assert result.reason.endswith(f"is not known: {shared}/auto was mounted as the command came there")
        return
    assert result.outcome is Outcome.RAN_AND_PUBLISHED, result.reason
    found = {os.path.relpath(path, node.work) for path in node.observed().files}
    assert found == {"s.sh", "r.txt", *(["../shared/new/x.h"] if how == "new" else [])}


def test_many_environments_at_once_know_their_inputs_while_mounts_come_and_go(node: Node, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    mounts.mount(shared, shared, "", flags=mounts.MS_BIND)
    libc.mount("none", str(shared), "", 1 << 20, "")  # MS_SHARED
    script = (
        "mkdir {1..50}; until [ -e end ]; do for i in {1..50}; do mount -t tmpfs none $i; done; umount {1..50}; done"
    )
    other = subprocess.Popen(["bash", "-c", script], cwd=shared)
    results: dict[int, EnvResult] = {}

    def start(number: int) -> None:
        work = tmp_path / f"job{number}"
        work.mkdir()
        (work / "r.txt").write_text("x")
        commands = "for i in $(seq 60); do cat r.txt > env/made; sleep 0.1; done"
        spec = EnvSpec(
            targets=(Target(str(work / "env")),), command=("sh", "-c", commands), cwd=str(work), background=False
        )

        def runner() -> int:
            return subprocess.run(spec.command, cwd=work, check=False).returncode

        results[number] = env.run(spec, runner, store_url=str(tmp_path / f"store{number}"), config=node.config)

    try:
        threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        (shared / "end").touch()
        other.wait(30)
        for entry in mounts.below(shared)[::-1]:
            mounts.unmount(entry.target, lazy=True)
        mounts.unmount(shared, lazy=True)
    assert len(results) == 8
    for number, result in results.items():
        assert result.outcome is Outcome.RAN_AND_PUBLISHED, result.reason
        store = FolderStore(tmp_path / f"store{number}")
        (name,) = snapshots.names(store)
        found = snapshots.load(store, name).inputs
        assert (set(found.files), found.unobserved) == ({f"{tmp_path}/job{number}/r.txt"}, "")


def test_files_of_any_size_count(node: Node) -> None:
    """As the libraries of torch with CUDA."""
    large = node.write("large", "")
    os.truncate(large, 1100 << 20)
    node.write("s.sh", "head -c 100 large > env/made\n")
    assert node.run().outcome is Outcome.RAN_AND_PUBLISHED
    assert str(large) in node.observed().files
    with large.open("r+b") as file:
        file.seek(1 << 30)
        file.write(b"x")
    assert node.run().reason == f"missed because {large}, which the command reads, changed"


_WAYS = {
    "read": "cat {}",
    "mapped": "{python} -c 'import mmap; f = open(\"{}\"); print(mmap.mmap(f.fileno(), 0, prot=1)[:])'",
    "sourced": ". ./{}",
    "script": "./{}",
    "descriptor": "exec 3<{}; cat /proc/self/fd/3; exec 3<&-",
    "input": "cat < {}",
    "link": "ln -s {} leads; cat leads",
    "copied": "cp --reflink=auto {} env/",
    "child": "(setsid cat {} &); sleep 0.3",
    "chroot": '{python} -c \'import os; os.chroot("."); print(open("/{}").read())\'',
    "sendfile": "{python} -c 'import os, sys; os.sendfile(1, os.open(\"{}\", 0), 0, 9)'",
    "openat2": "{python} ways.py openat2 {}",
    "handle": "{python} ways.py handle {}",
    "uring": "{python} ways.py uring {}",
}
_WAYS_PROGRAM = """
import ctypes, mmap, os, struct, sys
libc, path = ctypes.CDLL(None, use_errno=True), sys.argv[2].encode()
def call(*arguments):
    done = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if done < 0:
        sys.exit(f"{sys.argv[1]}: {os.strerror(ctypes.get_errno())}")
    return done
if sys.argv[1] == "openat2":
    fd = call(437, -100, path, struct.pack("=QQQ", 0, 0, 0), 24)
elif sys.argv[1] == "handle":
    handle, mount = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 136), ctypes.c_int()
    assert not libc.name_to_handle_at(-100, path, handle, ctypes.byref(mount), 0)
    fd = libc.open_by_handle_at(os.open(".", 0), handle, 0)
else:
    told = ctypes.create_string_buffer(120)
    ring = call(425, 4, told)
    place = struct.unpack_from("=10I", told, 40)
    done = struct.unpack_from("=10I", told, 80)
    queue = mmap.mmap(ring, max(place[6], done[5]) + 256, offset=0)
    work = mmap.mmap(ring, 256, offset=0x10000000)
    name = ctypes.create_string_buffer(path)
    struct.pack_into("=BBHiQQII", work, 0, 18, 0, 0, -100, 0, ctypes.addressof(name), 0, 0)
    struct.pack_into("=I", queue, place[6], 0)
    struct.pack_into("=I", queue, place[1], 1)
    call(426, ring, 1, 1, 1, 0, 0)
    fd = struct.unpack_from("=Qi", queue, done[5])[1]
assert os.read(fd, 9)
"""


def test_each_way_to_read_a_file_is_seen(node: Node) -> None:
    lines = ["mkdir -p env"]
    for way, line in _WAYS.items():
        node.write(f"f-{way}", "#!/bin/sh\n:\n").chmod(0o755)
        line = line.replace("{python}", sys.executable).replace("{}", f"f-{way}")
        lines.append(f"{line} > env/{way} 2> env/{way}.e || echo {way} >> env/no")
    node.write("ways.py", _WAYS_PROGRAM)
    node.write("s.sh", "\n".join(lines))
    result = node.run()
    assert result.outcome is Outcome.RAN_AND_PUBLISHED, result.reason
    found = {os.path.relpath(path, node.work) for path in node.observed().files}
    failed = (node.target / "no").read_text().split() if (node.target / "no").exists() else []
    assert not {*failed} - {"uring"}, [(node.target / f"{way}.e").read_text() for way in failed]
    assert found >= {"s.sh", "ways.py", *(f"f-{way}" for way in _WAYS if way not in failed)}


def test_what_the_command_gets_as_its_input_counts(node: Node) -> None:
    given = os.open(node.write("given", "x"), os.O_RDONLY)
    before = os.dup(0)
    os.dup2(given, 0)
    try:
        node.write("s.sh", "mkdir -p env; cat > env/made")
        node.run()
    finally:
        os.dup2(before, 0)
        os.close(given)
    assert str(node.work / "given") in node.observed().files
    with tempfile.TemporaryFile() as nameless:  # as the text of a shell's here-document
        os.dup2(nameless.fileno(), 0)
        try:
            assert node.run(salt="x").outcome is Outcome.RAN_AND_PUBLISHED
        finally:
            os.dup2(before, 0)
            os.close(before)
    node.write("s.sh", "mkdir -p env; cat given > env/made; rm given")  # gone after it was read
    assert "given changed while the command ran" in node.run().reason


def test_a_snapshot_with_unknown_inputs_does_not_stand_in_for_one_that_changed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.run()
    node.release()
    with monkeypatch.context() as patch:
        patch.setattr(Opens, "begin", _refuse)
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
        drained, take, ended = Opens.drained, Opens.take, threading.Event()
        monkeypatch.setattr(Opens, "take", lambda self, data: (ended.wait(60), take(self, data)))
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
    """One that shows the same folder at the same path."""
    node.write("theirs", "theirs\n")

    def box(script: str, hook: list[str]) -> subprocess.Popen[bytes]:
        tell = f"echo '{{\"pid\": '$$'}}' | {shlex.join(hook)};" if hook else ""
        return subprocess.Popen(["unshare", "-m", "sh", "-c", f"mount --bind {node.work} /mnt; {tell} {script}"])

    def runner() -> int:
        other = box("cat /mnt/r.txt /mnt/theirs; sleep 0.3", [])
        own = box(f"cat /mnt/r.txt > {tmp_path}/target/made; sleep 0.3", lib_opens.hook())
        return other.wait(20) + own.wait(20)

    (tmp_path / "target").mkdir()
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
    assert not lib_opens.hook()


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
