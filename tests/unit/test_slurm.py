"""What a job's comment means, and how the hooks are installed; real jobs are in `tests/cluster/test_slurm.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, ConfigError, UnavailableError
from bootseer.slurm import comment, jobfolder, site
from bootseer.slurm.comment import JobImage


@pytest.fixture
def prefix() -> Iterator[Path]:
    """A folder to be, which everybody can reach."""
    with tempfile.TemporaryDirectory(prefix="bootseer-pytest-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder, "hooks")


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("bootseer=host:5000/a/b:v1", JobImage("host:5000/a/b:v1", "")),
        ("budget=7, bootseer=h.org/a;bootseer.job=llama note", JobImage("h.org/a", "llama")),
    ],
)
def test_a_comment_that_names_an_image(text: str, wish: JobImage) -> None:
    assert comment.concerns_us(text)
    assert comment.parse(text) == wish


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bootseer", "'bootseer' in the job's comment is not known"),
        ("bootseer=h.org/a bootseer.image=h.org/b", "'bootseer.image=h.org/b' in the job's comment is not known"),
        ("bootseer=h.org/a,bootseer=h.org/b", "twice"),
        ("bootseer.job=llama", "names no image"),
        ("bootseer=", "names no image"),
        ("bootseer=oci:/home/other/image", "no image in a registry"),
    ],
)
def test_a_comment_that_is_not_understood_says_what_to_change(text: str, said: str) -> None:
    assert comment.concerns_us(text)
    with pytest.raises(ConfigError, match=said) as caught:
        comment.parse(text)
    assert caught.value.hint


def test_comments_of_others_are_not_ours() -> None:
    assert not any(map(comment.concerns_us, ("", "budget=7", "note=bootseer", "see:bootseer")))


def test_scripts_are_written_and_removed_and_other_files_stay(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "settings", dict)
    paths = site.install(prefix, 60)
    assert {path.name: path.stat().st_mode & 0o777 for path in paths} == dict.fromkeys(
        ("prolog", "epilog", "task-prolog"), 0o755
    )
    for path in paths:
        subprocess.run(["sh", "-n", path], check=True)
    assert site.install(prefix, 90) == paths
    (prefix / "epilog").write_text("#!/bin/sh\necho the site's own\n")
    with pytest.raises(ConfigError, match="epilog is not bootseer's"):
        site.install(prefix, 60)
    assert {path.name for path in site.uninstall(prefix)} == {"prolog", "task-prolog"}
    assert [path.name for path in prefix.iterdir()] == ["epilog"]


def test_a_folder_that_is_there_keeps_its_mode_and_must_be_reachable(prefix: Path) -> None:
    prefix.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="users cannot reach"):
        site.install(prefix, 60)
    assert prefix.stat().st_mode & 0o777 == 0o700
    assert list(prefix.iterdir()) == []


def test_scripts_stay_while_it_is_not_known_whether_slurm_runs_them(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = site.install(prefix, 60)
    (scontrol := tmp_path / "scontrol").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UnavailableError, match="Unable to contact") as caught:
        site.uninstall(prefix)
    assert caught.value.hint
    assert all(path.exists() for path in paths)


def test_scripts_stay_while_an_image_of_a_job_is_mounted(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would unmount it once they are gone."""
    monkeypatch.setattr(jobfolder, "BASE", tmp_path)
    monkeypatch.setattr(site, "settings", dict)
    paths = site.install(prefix, 60)
    (folder := tmp_path / "7.0").mkdir()
    (folder / "began").touch()
    with pytest.raises(BootseerError, match="job 7") as caught:
        site.uninstall(prefix)
    assert f"{prefix}/epilog" in caught.value.hint
    shutil.rmtree(folder)
    assert site.uninstall(prefix) == paths


def test_hooks_that_cannot_run_are_not_installed(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with 0 whatever happens, so that nobody would see it."""
    (prefix.parent / "broken.toml").write_text("store = [nonsense\n")
    monkeypatch.setenv("BOOTSEER_CONFIG", str(prefix.parent / "broken.toml"))
    with pytest.raises(ConfigError, match=r"cannot run here: .*broken.toml"):
        site.install(prefix, 60)
    assert not prefix.exists()


def test_settings_that_the_hooks_use_are_not_another_users(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = prefix.with_name("own.toml")
    own.touch(mode=0o644)
    monkeypatch.chdir(own.parent)
    monkeypatch.setenv("BOOTSEER_CONFIG", own.name)
    assert f"BOOTSEER_CONFIG={own}\n" in site.install(prefix, 60)[0].read_text()  # the hooks run in /
    own.chmod(0o666)
    with pytest.raises(ConfigError, match=r"own\.toml"):
        site.install(prefix, 60)
    own.chmod(0o644)
    own.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="can write to"):
        site.install(prefix, 60)


def test_the_user_of_a_job_holds_up_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: the mark of the end was for all to read, thus for the job's user to lock, and the mount stayed."""
    monkeypatch.setattr(jobfolder, "BASE", tmp_path)
    (tmp_path / "7.0").mkdir()
    (tmp_path / "7.0/began").write_text("1")
    jobfolder.end(7, 2.0)
    (folder,) = jobfolder.ended()
    assert (folder / jobfolder.ENDED).stat().st_mode & 0o077 == 0


def test_a_task_prolog_takes_no_orders_from_an_error(prefix: Path, tmp_path: Path) -> None:
    """Slurm carries out each line that it prints, as ``export NAME=VALUE``."""
    (folder := tmp_path / "7.0").mkdir()
    (folder / "error").write_text("no\\nexport LD_PRELOAD=evil\n")
    text = site.install(prefix, 60)[2].read_text().replace("/run/bootseer-slurm", str(tmp_path))
    environ = {"SLURM_JOB_ID": "7", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1", "PATH": os.environ["PATH"]}
    done = subprocess.run(["sh", "-c", text], env=environ, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "print bootseer: no image on n1: no\\nexport LD_PRELOAD=evil\n"


def test_a_hook_exits_with_0_when_bootseer_is_gone(prefix: Path) -> None:
    prolog = site.install(prefix, 60)[0]
    text = prolog.read_text()
    assert f" {sys.executable} -I" in text
    prolog.write_text(text.replace(sys.executable, "/none/python"))
    done = subprocess.run([prolog], env={"SLURM_JOB_COMMENT": "bootseer=h.org/a"}, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_settings_of_slurm_that_do_not_suit(prefix: Path) -> None:
    good = {"Prolog": f"{prefix}/prolog", "Epilog": f"{prefix}/epilog", "TaskProlog": f"{prefix}/task-prolog",
            "PrologFlags": "Alloc,Contain", "BatchStartTimeout": "120 sec", "PrologEpilogTimeout": "65534"}  # fmt: skip
    assert site.check(good, prefix, 60) == []
    bad = {"Prolog": "/etc/own", "PrologFlags": "NoHold", "BatchStartTimeout": "10 sec", "PrologEpilogTimeout": "60"}
    found = site.check({**good, **bad}, prefix, 60)
    assert [line.split()[0] for line in found] == list(bad)
    assert str(prefix / "prolog") in found[0]
