"""What a job's comment means, and how the hooks are installed; real jobs are in `tests/cluster/test_slurm.py`."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import ConfigError
from bootseer.slurm import comment, site
from bootseer.slurm.comment import Wish


@pytest.fixture
def prefix() -> Iterator[Path]:
    """A folder to be, which everybody can reach."""
    with tempfile.TemporaryDirectory(prefix="bootseer-pytest-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder, "hooks")


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("bootseer=host:5000/a/b:v1", Wish("host:5000/a/b:v1", "")),
        ("budget=7, bootseer=h.org/a;bootseer.job=llama note", Wish("h.org/a", "llama")),
    ],
)
def test_a_comment_that_names_an_image(text: str, wish: Wish) -> None:
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
        ("bootseer=torch:2.6", "no registry"),
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


def test_scripts_are_written_and_removed_and_other_files_stay(prefix: Path) -> None:
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


def test_a_hook_exits_with_0_when_bootseer_is_gone(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/none/python")
    prolog = site.install(prefix, 60)[0]
    assert "/none/python" in prolog.read_text()
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
