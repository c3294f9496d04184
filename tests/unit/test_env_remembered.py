"""Remembered facts of files: told while the file is as it was, and found out anew else."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.config import Config
from bootseer.env import EnvSpec, Target, inputs, key, remembered


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are as they were for long."""
    monkeypatch.setattr(remembered, "_SETTLED", -1.0)


def digest(config: Config, path: Path) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return remembered.digest(config, fd)
    finally:
        os.close(fd)


def notes(config: Config) -> list[Path]:
    return [*Path(config.cache_dir).glob("env-facts/*")]


@pytest.mark.usefixtures("old")
def test_a_program_is_hashed_once(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv").write_bytes(b"\0" * (17 << 20))
    spec = EnvSpec(targets=(Target(str(tmp_path / "t")),), command=(str(tmp_path / "uv"),))
    first = key.build(spec, config).key
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert key.build(spec, config).key == first
    os.utime(tmp_path / "uv")
    (tmp_path / "uv").write_bytes(b"\1" * (17 << 20))
    assert key.build(spec, config).key != first
    assert key.build(spec).key == key.build(spec, config).key


@pytest.mark.usefixtures("old")
def test_an_interpreter_is_asked_once_and_a_script_that_chooses_one_each_time(config: Config, tmp_path: Path) -> None:
    other = str(shutil.copy(os.path.realpath(sys.executable), tmp_path / "python"))
    found = key.describe(other, config)
    assert found == key.describe(other)
    (note,) = notes(config)
    note.write_text(note.read_text().replace(found.version, "9.9.9"))
    assert key.describe(other, config).version == "9.9.9"
    script = tmp_path / "python3"
    script.write_text(f'#!/bin/sh\nexec {other} "$@"\n')
    script.chmod(0o755)
    assert key.describe(str(script), config) == found
    assert len(notes(config)) == 1


@pytest.mark.usefixtures("old")
def test_a_program_that_chooses_an_interpreter_is_asked_each_time(config: Config, tmp_path: Path) -> None:
    """Managers of versions (mise, rye) have one for all, and look at the folder."""
    other = str(shutil.copy(os.path.realpath(sys.executable), tmp_path / "python"))
    found = key.describe(other, config)
    (note,) = notes(config)
    note.write_text(note.read_text().replace(found.version, "9.9.9").replace(other, "/opt/3.9/bin/python"))
    assert key.describe(other, config) == found


def test_a_file_that_may_change_in_the_same_tick_is_not_remembered(config: Config, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    assert digest(config, tmp_path / "f") == hashlib.sha256(b"x").hexdigest()
    assert notes(config) == []


@pytest.mark.parametrize("writer", ["none", "open", "mapped", "of a server"])
def test_a_file_that_changed_just_now_is_remembered_when_nobody_can_write_to_it(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    monkeypatch.setattr(remembered, "_TICKS", -1.0, raising=False)
    (tmp_path / "f").write_text("x")
    with contextlib.ExitStack() as stack:
        if writer in ("open", "mapped"):
            file = (tmp_path / "f").open("r+b")
            stack.enter_context(file if writer == "open" else mmap.mmap(file.fileno(), 1))
            if writer == "mapped":
                file.close()
        if writer == "of a server":  # NFS
            monkeypatch.setattr("bootseer.kernel.libc.file_system", lambda fd: (0x6969, 1))
        digest(config, tmp_path / "f")
    assert len(notes(config)) == (writer == "none")


@pytest.mark.usefixtures("old")
def test_where_others_choose_the_times_nothing_is_remembered(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_text("x")
    # EROFS, FUSE, overlayfs, squashfs, tmpfs
    for kind in (0xE0F5E1E2, 0x65735546, 0x794C7630, 0x73717368, 0x01021994):
        monkeypatch.setattr("bootseer.kernel.libc.file_system", lambda fd, kind=kind: (kind, 1))
        digest(config, tmp_path / "f")
    assert notes(config) == []


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("text", [b"", b"x", b'{"a":', b'{"a":1}', b"[" * 100_000, b"\xff", None])
def test_a_torn_note_says_nothing(config: Config, tmp_path: Path, text: bytes | None) -> None:
    (tmp_path / "f").write_text("x")
    first = digest(config, tmp_path / "f")
    (note,) = notes(config)
    note.write_bytes(note.read_bytes()[:-3] if text is None else text)
    assert digest(config, tmp_path / "f") == first


@pytest.mark.usefixtures("old")
def test_what_others_can_write_is_not_believed(config: Config, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    first = digest(config, tmp_path / "f")
    (note,) = notes(config)
    note.write_text(note.read_text().replace(first, "0" * 64))
    assert digest(config, tmp_path / "f") == "0" * 64
    note.parent.chmod(0o777)
    assert digest(config, tmp_path / "f") == first


@pytest.mark.usefixtures("old")
def test_the_notes_are_bounded(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST", 16)
    for number in range(64):
        (tmp_path / "f").write_text(f"{number}")
        digest(config, tmp_path / "f")
    (note,) = notes(config)
    assert len(json.loads(note.read_bytes())) == 16


@pytest.mark.usefixtures("old")
def test_what_two_write_at_once_both_stays(config: Config, tmp_path: Path) -> None:
    for name in "fg":
        (tmp_path / name).write_text(name)
    with remembered.at_hand(config):
        digest(config, tmp_path / "f")
        with ThreadPoolExecutor(1) as other:
            other.submit(digest, config, tmp_path / "g").result()
    (note,) = notes(config)
    assert {*json.loads(note.read_bytes()).values()} == {hashlib.sha256(one).hexdigest() for one in (b"f", b"g")}


@pytest.mark.usefixtures("old")
def test_inputs_are_read_and_guarded_by_a_slow_digest_once(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EnvSpec(targets=(Target(str(tmp_path / "t")),), command=("true",))
    (tmp_path / "r.txt").write_text("six==1.16.0\n" * 20)
    (tmp_path / "more.sh").write_text("export PASSWORD=abc\n" * 20)
    paths = [str(tmp_path / "r.txt"), str(tmp_path / "more.sh")]
    first = [inputs.Digests(spec, config).of(path) for path in paths]
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "slow_digest", None)
        patch.setattr(inputs, "holds_password", None)
        assert [inputs.Digests(spec, config).of(path) for path in paths] == first
    (tmp_path / "r.txt").write_text("six==1.17.0\n" * 20)
    os.replace(tmp_path / "r.txt", tmp_path / "new")
    os.rename(tmp_path / "more.sh", tmp_path / "r.txt")
    assert inputs.Digests(spec, config).of(paths[0]) == inputs.Digests(spec, Config(cache_dir=str(tmp_path / "c"))).of(
        paths[0]
    )
    assert inputs.Digests(spec, config).of(paths[1]) == ""
