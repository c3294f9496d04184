"""Folders that other users cannot enter, change or replace."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from bootseer import image
from bootseer.blocks.without_mount import look, prefetch
from bootseer.env import overlay
from bootseer.errors import ConfigError
from bootseer.folders import enterable, private_folder, spread, trusted
from bootseer.objects import open_store
from bootseer.slurm import jobfolder
from support import forked
from support.trees import is_spread


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_new_folders_are_the_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = private_folder(tmp_path / "state", sub="images/one")
    finally:
        os.umask(old)
    assert made == tmp_path / "state/images/one"
    assert {mode(path) for path in (made, made.parent, made.parent.parent)} == {0o700}
    assert private_folder(tmp_path / "state", sub="images/one") == made


def test_a_folder_that_others_may_read_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    private_folder(tmp_path / "state")
    assert mode(tmp_path / "state") == 0o755


@pytest.mark.parametrize("where", [".", "images", "images/one"])
def test_a_folder_that_others_write_to_is_refused(tmp_path: Path, where: str) -> None:
    private_folder(tmp_path / "state", sub="images/one")
    os.chmod(tmp_path / "state" / where, 0o777)
    with pytest.raises(ConfigError, match="others can write to"):
        private_folder(tmp_path / "state", sub="images/one")


@pytest.mark.root
def test_no_verb_of_root_follows_what_is_in_a_cache_of_somebody_else(tmp_path: Path) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    for folder in (cache / "trees", cache / "blocks" / ("b" * 64), cache / "work", outside):
        folder.mkdir(parents=True)
    (outside / "passwd").write_text("root's")
    (cache / "trees" / ("a" * 64)).symlink_to(outside)
    (cache / "blocks" / ("b" * 64) / "lock").symlink_to(outside / "passwd")
    subprocess.run(["chown", "-hR", "65534:65534", cache], check=True)
    environ = {**os.environ, "BOOTSEER_CACHE_DIR": str(cache), "BOOTSEER_STATE_DIR": str(tmp_path / "state")}
    for words in ("cache ls", "cache gc --all", "cache verify --repair", "clean"):
        done = forked.cli(*words.split(), env=environ)
        assert (done.returncode, "user 65534" in done.stderr) == (78, True), done
    for use in (partial(look, open_store(str(tmp_path / "store")), "a" * 64), partial(prefetch, "/none", "a" * 64)):
        with pytest.raises(ConfigError, match="user 65534"):
            use(cache_dir=cache)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"passwd": "root's"}


def test_what_is_made_beside_a_file_has_no_name_that_a_neighbour_can_guess(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("root's")
    for name in (".prolog.new", "env.tar.part"):
        (tmp_path / name).symlink_to(outside)
    environ = {**os.environ, "BOOTSEER_CACHE_DIR": f"{tmp_path}/cache", "BOOTSEER_STATE_DIR": f"{tmp_path}/state"}
    (target := tmp_path / "env").mkdir()
    made = ("env", "run", "--no-background", "--restore=unpack", "--target", str(target), "--", "touch", f"{target}/x")
    assert forked.cli(*made, env=environ).returncode == 0
    (key,) = (one["key"] for one in json.loads(forked.cli("store", "ls", "--json", env=environ).stdout)["environments"])
    done = forked.cli("env", "export", key, "-o", f"{tmp_path}/env.tar", env=environ)
    assert (done.returncode, (tmp_path / "env.tar").stat().st_size > 0) == (0, True), done.stderr
    jobfolder.write(tmp_path / "prolog", b"#!/bin/sh\n", 0o755)
    assert mode(tmp_path / "prolog") == 0o755
    assert outside.read_text() == "root's"


@pytest.mark.parametrize("where", [".", "images"])
def test_a_planted_link_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    place = tmp_path / "state" / where
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        private_folder(tmp_path / "state", sub="images")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_in_the_place_of_a_folder_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file, not a folder"):
        trusted(tmp_path / "file")


def test_a_folder_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    with pytest.raises(ConfigError, match="others can replace"):
        private_folder(tmp_path / "open/state")
    os.chmod(tmp_path / "open", 0o1777)  # as /tmp: they can make others, but not take ours away
    private_folder(tmp_path / "open/state")


@pytest.mark.root
def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    private_folder(tmp_path / "state")
    os.chown(tmp_path / "state", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        private_folder(tmp_path / "state")
    with pytest.raises(ConfigError, match="others can replace"):
        private_folder(tmp_path / "state/below")


@pytest.mark.root
def test_who_can_reach_a_folder(tmp_path: Path) -> None:
    assert enterable(Path("/tmp/some/where"))
    os.chmod(tmp_path, 0o700)
    assert not enterable(tmp_path / "some/where")
    os.chown(tmp_path, 12345, -1)
    os.chmod(tmp_path.parent, 0o755)
    reachable = all(os.stat(parent).st_mode & 0o011 for parent in tmp_path.parents)
    assert enterable(tmp_path / "where") is reachable  # its owner can; whether at all depends on the folders above


@pytest.mark.root
def test_a_group_of_ones_own_is_oneself(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    os.chmod(tmp_path / "state", 0o775)
    private_folder(tmp_path / "state")  # root's own group
    os.chown(tmp_path / "state", -1, 12345)
    with pytest.raises(ConfigError, match="others can write to"):
        private_folder(tmp_path / "state")


@pytest.mark.root
def test_who_ran_sudo_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", 12345, 12345)
    with pytest.raises(ConfigError, match="others can replace"):
        private_folder(tmp_path / "home/cache")
    monkeypatch.setenv("SUDO_UID", "12345")
    private_folder(tmp_path / "home/cache")


def test_the_path_that_is_returned_has_no_links_to_turn(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert private_folder(tmp_path / "link/state") == tmp_path / "real/state"
    assert trusted(tmp_path / "link/state") == tmp_path / "real/state"


def test_shared_folders_above_are_not_made_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        private_folder(tmp_path / "data/cache")
    finally:
        os.umask(old)
    assert (mode(tmp_path / "data"), mode(tmp_path / "data/cache")) == (0o755, 0o700)


@pytest.mark.root
def test_a_group_that_many_have_is_not_oneself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list of members leaves out who has it as first group."""
    group = grp.getgrgid(pwd.getpwnam("nobody").pw_gid)
    assert not group.gr_mem
    monkeypatch.setenv("SUDO_UID", str(pwd.getpwnam("nobody").pw_uid))
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", pwd.getpwnam("nobody").pw_uid, group.gr_gid)
    os.chmod(tmp_path / "state", 0o775)
    with pytest.raises(ConfigError, match="others can write to"):
        private_folder(tmp_path / "state")


@pytest.mark.root
def test_nothing_is_believed_in_a_folder_that_others_made(tmp_path: Path) -> None:
    trusted(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
    proof, state = tmp_path / "proof", tmp_path / "state"
    bundle = state / "containers/bootseer-x"
    bundle.mkdir(parents=True)
    (bundle / "lock").touch()
    (bundle / "program").write_text(str(tmp_path / "evil"))
    (tmp_path / "evil").write_text(f"#!/bin/sh\ntouch {proof}\n")
    os.chmod(tmp_path / "evil", 0o755)
    os.chown(state, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        image.sweep(state)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        image.mounts(state)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        overlay.groups(state)
    assert not proof.exists()


@pytest.mark.root
@pytest.mark.parametrize("named", [False, True])
def test_root_of_a_user_namespace_with_one_id_has_folders_of_its_users(named: bool) -> None:
    """As `unshare -Ur` and enroot make them: /, and the folders of root, belong to nobody there."""
    with tempfile.TemporaryDirectory(prefix="userns-", dir="/var/lib") as base:
        os.chmod(base, 0o755)
        home = Path(base, "home")
        home.mkdir()
        os.chown(home, 12345, 12345)
        program = "; ".join(
            (
                "from bootseer.config import load",
                "from bootseer.folders import private_folder",
                "from pathlib import Path",
                "[print(private_folder(Path(one))) for one in (load().cache_dir, load().state_dir)]",
            )
        )
        own = {"BOOTSEER_CACHE_DIR": f"{home}/c", "BOOTSEER_STATE_DIR": f"{home}/s"} if named else {}
        alice = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "unshare", "-Ur"]
        done = subprocess.run(
            [*alice, sys.executable, "-c", program],
            env={"PATH": os.environ["PATH"], "HOME": str(home), **own},
            cwd=home,
            capture_output=True,
            text=True,
            timeout=60,
        )
        shutil.rmtree("/tmp/bootseer-12345.0", ignore_errors=True)
    wanted = [f"{home}/c", f"{home}/s"] if named else [f"{home}/.cache/bootseer", "/tmp/bootseer-12345.0/bootseer"]
    assert done.stdout.splitlines() == wanted, done.stderr


@pytest.mark.root
@pytest.mark.parametrize(("kind", "uid"), [("folder", 12346), ("link", 12347), ("file", 12348)])
def test_a_neighbour_who_is_quicker_in_tmp_stops_no_starts(kind: str, uid: int) -> None:
    """Red before: where no XDG_RUNTIME_DIR is set, as in jobs of Slurm, mkdir /tmp/bootseer-UID ended each start of a
    user. What was begun in the other folder goes on there."""
    planted, program = (
        Path(f"/tmp/bootseer-{uid}"),
        (
            "from bootseer.config import load; from bootseer.folders import private_folder; from pathlib import Path;"
            " print(private_folder(Path(load().state_dir)))"
        ),
    )

    def ask(home: Path) -> str:
        alice = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", sys.executable, "-c", program]
        env = {"PATH": os.environ["PATH"], "HOME": str(home)}
        done = subprocess.run(alice, env=env, cwd=home, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() or done.stderr

    with tempfile.TemporaryDirectory(prefix="private-", dir="/var/lib") as base:
        os.chmod(base, 0o755)
        home = Path(base, "home")
        home.mkdir()
        os.chown(home, uid, uid)
        try:
            assert ask(home) == str(planted / "bootseer")
            shutil.rmtree(planted)
            if kind == "folder":
                planted.mkdir(mode=0o777)
            elif kind == "link":
                planted.symlink_to(home)
            else:
                planted.touch()
            os.chown(planted, 65534, 65534, follow_symlinks=False)
            other = ask(home)
            assert other.startswith(f"{home}/.cache/bootseer/state-")
            planted.rmdir() if kind == "folder" else planted.unlink()
            assert ask(home) == other
        finally:
            planted.unlink() if planted.is_symlink() or planted.is_file() else shutil.rmtree(planted, True)


def test_folders_are_spread_over_the_disk_where_the_file_system_can(tmp_path: Path) -> None:
    """Of ext4: where thousands of files were just deleted in one of them, others are not made more slowly."""
    for folder in (tmp_path, tmp_path, Path("/proc"), tmp_path / "none"):
        spread(folder)
    assert is_spread(tmp_path)
