"""Folders that were there before a snapshot: they get its attributes where the file system has any."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bootseer.env import unpack
from bootseer.env.inventory import Entry


def test_a_file_system_without_attributes_stops_no_unpacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> list[str]:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(os, "listxattr", none)
    stage, host = tmp_path / "stage", tmp_path / "host"
    (stage / "0/lib").mkdir(parents=True, mode=0o750)
    (host / "lib").mkdir(parents=True)
    entry = Entry("0/lib", "d", 0o750, os.getuid(), os.getgid(), 0, 1, "", {})
    (tmp_path / "undo").mkdir()
    unpack.place_entries(stage, [entry], host, unpack.Undo(tmp_path / "undo"))
    assert (host / "lib").stat().st_mode & 0o777 == 0o750
