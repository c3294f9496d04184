"""The unit of the service: which parts it has after they were installed and removed one by one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bootseer.cli.node import app
from bootseer.errors import BootseerError, ConfigError, UnavailableError
from bootseer.kernel import flock


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("bootseer.cli.node_install._LOCK", tmp_path / "run/unit.lock")
    monkeypatch.setenv("SUDO_UID", str(os.getuid()))
    monkeypatch.setattr(sys, "argv", [sys.executable])  # a worker of the tests has no file of its own
    return tmp_path / "bootseer-node.service"


def node(verb: str, unit: Path, *words: str) -> Result:
    done = CliRunner().invoke(app, [verb, f"--unit={unit}", *words])
    if isinstance(done.exception, ConfigError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def served(unit: Path) -> str:
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    return line.partition(" node serve")[2].strip()


def test_parts_come_and_go_one_by_one(unit: Path) -> None:
    node("install", unit, "--csi", "--kubelet-dir=/a b%")
    assert served(unit) == "--csi '--kubelet-dir=/a b%%'"
    missing = unit.parent / "none.toml"
    missing.touch()
    done = node(
        "install", unit, "--containerd", f"--containerd-config={missing}", f"--containerd-root={unit.parent}/root"
    )
    assert served(unit) == f"--containerd --containerd-root={unit.parent}/root --csi '--kubelet-dir=/a b%%'"
    assert "keeps what it had: --csi" in done.output
    assert "systemctl daemon-reload && systemctl enable bootseer-node && systemctl restart bootseer-node" in done.output
    assert "OOMScoreAdjust=-999" in unit.read_text()
    node("install", unit, "--csi")
    assert served(unit) == f"--csi --containerd --containerd-root={unit.parent}/root"
    assert (
        "systemctl restart" in node("uninstall", unit, "--containerd", f"--containerd-root={unit.parent}/root").output
    )
    assert served(unit) == "--csi"
    assert "OOMScoreAdjust=-500" in unit.read_text()
    node("uninstall", unit, "--csi")
    assert served(unit) == ""
    assert "restart" not in node("uninstall", unit, "--csi").output


def test_the_unit_of_something_else_stays(unit: Path) -> None:
    text = "[Service]\nExecStart=/usr/bin/other serve\n"
    unit.write_text(text)
    for verb in ("install", "uninstall"):
        with pytest.raises(ConfigError, match="something else than bootseer node serve"):
            node(verb, unit, "--csi")
    assert unit.read_text() == text


def test_a_slurm_that_does_not_answer_keeps_no_unit_where_it_has_no_scripts(
    unit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent() -> dict[str, str]:
        raise BootseerError("scontrol failed")

    monkeypatch.setattr("bootseer.slurm.site.settings", silent)
    node("install", unit)
    node("uninstall", unit, f"--slurm-dir={unit.parent}/none", f"--containerd-root={unit.parent}/none")
    assert not unit.exists()


@pytest.mark.root
@pytest.mark.parametrize("what", ["settings", "prefix", "program"])
def test_the_service_runs_nothing_that_others_can_change(
    unit: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    theirs = unit.parent / "theirs"
    theirs.mkdir()
    (theirs / "bootseer").write_text("#!/bin/sh\n")
    (theirs / "bootseer").chmod(0o755)
    os.chown(theirs, 65534, 65534)
    if what == "settings":
        monkeypatch.setenv("BOOTSEER_CONFIG", str(theirs / "bootseer"))
    elif what == "prefix":
        monkeypatch.setattr(sys, "prefix", str(theirs))
    else:
        monkeypatch.setattr(sys, "argv", [str(theirs / "bootseer")])
    with pytest.raises(ConfigError, match=r"others can replace|belongs to user 65534"):
        node("install", unit)
    assert not unit.exists()


def test_two_at_once_do_not_drop_each_others_part(unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.cli.node_install._LOCK_SECONDS", 0.1)
    node("install", unit)
    with flock.locked(unit.parent, os.O_RDONLY):  # as any user may, who can read the folder of systemd's units
        node("install", unit)
    with flock.locked(unit.parent / "run/unit.lock", os.O_RDWR | os.O_CREAT) as alone:
        assert alone
        monkeypatch.setenv("BOOTSEER_STATE_DIR", str(unit.parent / "another"))  # red before: the lock was in there
        for verb in ("install", "uninstall"):
            done = CliRunner().invoke(app, [verb, f"--unit={unit}", "--csi"])
            assert isinstance(done.exception, UnavailableError), done.output
        node("install", unit, "--csi", "--unit=-")
    node("install", unit, "--csi")
    assert served(unit) == "--csi"


@pytest.mark.parametrize("which", ["program", "settings"])
def test_what_others_can_write_to_is_not_run_as_root(unit: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Red before: only the folders were looked at, and of the settings only a file that was named."""
    files = {"program": unit.with_name("bootseer"), "settings": unit.with_name("bootseer.toml")}
    for file in files.values():
        file.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(files["program"])])
    monkeypatch.setattr("bootseer.config.DEFAULT_FILE", files["settings"])
    monkeypatch.delenv("BOOTSEER_CONFIG", raising=False)
    node("install", unit)
    unit.unlink()
    files[which].chmod(0o757)
    with pytest.raises(ConfigError, match=f"others can write to {files[which]}"):
        node("install", unit)
    assert not unit.exists()
