"""A folder as the store of several users: who can publish, and what `bootseer doctor` says of it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.backends.folder import FolderBackend
from bootseer.objects.folder import FolderStore
from support import forked

pytestmark = pytest.mark.root

USERS, GROUP = (54321, 54322), 54399


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "store"
        folder.chmod(0o755)
        for user in USERS:
            for name in ("home", "target"):
                (folder / f"{name}-{user}").mkdir()
                os.chown(folder / f"{name}-{user}", user, user)

    def run(self, user: int, *words: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
        env = {"HOME": f"{self.folder}/home-{user}", "PATH": os.environ["PATH"], "BOOTSEER_STORE": str(self.store)}
        env |= {
            "BOOTSEER_CACHE_DIR": f"{self.folder}/home-{user}/c",
            "BOOTSEER_STATE_DIR": f"{self.folder}/home-{user}/s",
        }
        who = {"user": user, "group": user, "extra_groups": [GROUP]} if user else {}
        return forked.cli(*words, env=env, umask=umask, **who)

    def start(self, user: int, text: str, umask: int) -> bool:
        """Whether a start of an environment ran its set-up command."""
        target = self.folder / f"target-{user}"
        if not user:
            target.mkdir(exist_ok=True)
        command = f"echo {text} > {target}/a; echo it runs"
        done = self.run(user, "env", "run", "--target", str(target), "sh", "-c", command, umask=umask)
        assert done.returncode == 0, done
        return "it runs" in done.stdout

    def doctor(self, user: int) -> tuple[int, dict[str, str]]:
        done = self.run(user, "doctor", "--json")
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, next(one for one in json.loads(done.stdout)["checks"] if one["name"] == "store")


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="bootseer-shared-") as folder:  # other users do not enter pytest's
        yield Site(Path(folder))


def test_a_shared_store_serves_each_of_its_group(site: Site) -> None:
    assert site.doctor(0)[1]["status"] == "missing"
    site.store.mkdir(mode=0o755)
    FolderStore(site.store).put("blobs/aa/first", b"by root")
    for user in USERS:
        _, found = site.doctor(user)
        assert (found["status"], "store init --shared" in found["fix"]) == ("limited", True), found
    done = site.run(0, "store", "init", "--shared", str(GROUP))
    assert done.returncode == 0, done
    for user in (0, *USERS):
        assert site.doctor(user)[1]["status"] == "ok"
    store = FolderStore(site.store)
    for number, umask in ((0, 0o022), (1, 0o077)):
        for user in (*USERS, 0):
            home = site.folder / f"home-{user}"
            home.mkdir(exist_ok=True)
            done = site.run(user, "store", "ls", umask=umask)
            assert done.returncode == 0, done
            code = f"from bootseer.objects import open_store; s = open_store({str(site.store)!r})\n"
            code += f"s.put('env/new{number}/{user}', b'x'); s.put('uses/{number}', b'x', overwrite=True)"
            before = ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={GROUP}"] if user else []
            subprocess.run([*before, sys.executable, "-c", code], check=True, umask=umask, timeout=60)
    for user in USERS:  # each reads what each of the others wrote
        code = f"from bootseer.objects import open_store; s = open_store({str(site.store)!r})\n"
        code += "assert [s.get(one.key, most=99) for one in s.list('')]"
        before = ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={GROUP}"]
        subprocess.run([*before, sys.executable, "-c", code], check=True, timeout=60)
    for folder, _, _ in os.walk(store.root):
        found = os.stat(folder)
        assert found.st_gid == GROUP, folder
        assert found.st_mode & 0o2070 == 0o2070, folder
        assert not found.st_mode & stat.S_IWOTH, folder


def test_a_store_that_was_private_is_shared_with_all_that_is_in_it(site: Site) -> None:
    """A private umask made it: then others are told how to have it in common, by every verb, and can after that."""
    first, second = USERS
    site.store.mkdir()
    os.chown(site.store, first, first)
    assert site.start(first, "a", 0o077)
    image = "a" * 64
    code = f"""
from bootseer.image import record
from bootseer.objects import open_store
from support.records import record_of
record.save(open_store({str(site.store)!r}), record_of('a', {"b" * 64!r}))
"""
    before = ["setpriv", f"--reuid={first}", f"--regid={first}", "--clear-groups"]
    env = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": os.environ["PATH"]}
    subprocess.run([*before, sys.executable, "-c", code], check=True, umask=0o077, timeout=60, env=env)
    for path in site.store.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    for words in (("ls",), ("du",), ("gc",)):
        done = site.run(second, "store", *words)
        assert (done.returncode, len(done.stderr.splitlines())) == (73, 1), done
        assert "store init --shared GROUP" in done.stderr
    done = site.run(second, "image", "inspect", image)
    assert (done.returncode, "store init --shared GROUP" in done.stderr) == (73, True), done
    found = site.doctor(second)[1]
    assert (found["status"], "store init --shared" in found["fix"]) == ("missing", True), found
    done = site.run(second, "store", "init", "--shared", str(GROUP))
    assert (done.returncode, "run it as root" in done.stderr, len(done.stderr.splitlines())) == (73, True, 1), done
    elsewhere = site.folder / "elsewhere"
    elsewhere.write_text("x")
    elsewhere.chmod(0o600)
    os.link(elsewhere, site.store / "planted")
    assert site.run(0, "store", "init", "--shared", str(GROUP)).returncode == 0
    assert (elsewhere.stat().st_gid, elsewhere.stat().st_mode & 0o777) == (0, 0o600)
    for words in (("ls",), ("du",)):
        done = site.run(second, "store", *words)
        assert (done.returncode, "denied" in done.stderr) == (0, False), done
    assert site.run(second, "image", "inspect", image).returncode == 0
    assert site.start(second, "a", 0o022)  # into another target
    assert not site.start(second, "a", 0o022)


def test_no_program_gets_the_rights_of_the_group_by_being_shared(site: Site) -> None:
    """Red before: one that anybody put into a store that all could write to ran as the group afterwards."""
    site.store.mkdir()
    planted = site.store / "planted"
    planted.write_text("x")
    os.chown(planted, USERS[0], USERS[0])
    planted.chmod(0o6757)
    FolderBackend(site.store).share(GROUP)
    assert (planted.stat().st_gid, stat.S_IMODE(planted.stat().st_mode)) == (GROUP, 0o755)


def test_each_user_publishes_environments_in_a_shared_store(site: Site) -> None:
    assert site.run(0, "store", "init", "--shared", str(GROUP)).returncode == 0
    first, second = USERS
    assert site.start(first, "a", 0o022)
    assert not site.start(first, "a", 0o022)
    assert site.start(second, "b", 0o022)
    assert not site.start(second, "b", 0o022)


def test_who_is_not_in_the_group_hears_of_it(site: Site) -> None:
    assert site.run(0, "store", "init", "--shared", str(GROUP + 1)).returncode == 0
    found = site.doctor(USERS[0])[1]
    assert (found["status"], found["fix"]) == ("limited", f"join group {GROUP + 1}, which alone may write there")


def test_what_is_not_shared_keeps_its_modes(tmp_path: Path) -> None:
    for mode in (0o755, 0o1777, 0o775, 0o2755):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        FolderBackend(folder).make_folder("a/b")
        assert not (folder / "a").stat().st_mode & 0o022


@pytest.mark.parametrize("words", [("--shared",), ("research",), ("--shared", "no-such-group")])
def test_a_mistake_is_one_line_and_changes_nothing(site: Site, words: tuple[str, ...]) -> None:
    done = site.run(0, "store", "init", *words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not site.store.exists()


@pytest.mark.parametrize(
    "url", ["/nonexistent/store", "registry://localhost:59999/r", "http://localhost:59999/", "nosuch://x"]
)
def test_doctor_says_works_only_where_the_store_does(site: Site, url: str) -> None:
    site.store = url  # type: ignore[assignment]
    code, found = site.doctor(0)
    assert code == 71
    assert (found["status"], found["essential"]) == ("missing", True)
