"""`erofs.build`: what a tree that changes meanwhile, and a crash, can do. Needs no root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.erofs import build
from bootseer.erofs.data import Stream
from bootseer.errors import DataError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(b"content")
    return tmp_path / "tree"


@pytest.mark.parametrize("change", ["size", "time"])
def test_a_file_that_changes_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    place = Stream.file

    def placing(self: Stream, *args: object, **kwargs: object) -> object:
        placed = place(self, *args, **kwargs)  # type: ignore[arg-type]
        if change == "size":
            with (tree / "f").open("ab") as file:
                file.write(b"more")
        else:
            os.utime(tree / "f", ns=(1, 1))
        return placed

    monkeypatch.setattr(Stream, "file", placing)
    with pytest.raises(DataError, match="changed while"):
        build(tree, tree.parent / "meta", tree.parent / "data")
    assert sorted(os.listdir(tree.parent)) == ["tree"]


def test_a_fifo_in_place_of_a_file_does_not_hang(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listxattr = os.listxattr

    def swap(path: bytes, *, follow_symlinks: bool = True) -> list[str]:
        if path.endswith(b"/f"):  # between lstat and open
            os.unlink(path)
            os.mkfifo(path)
        return listxattr(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "listxattr", swap)
    signal.alarm(20)  # an open that waits for a writer cannot be ended otherwise
    try:
        with pytest.raises(DataError, match="replaced"):
            build(tree, tree.parent / "meta", tree.parent / "data")
    finally:
        signal.alarm(0)


def test_a_crash_between_the_parts_leaves_no_meta_of_other_data(tree: Path) -> None:
    meta, data = tree.parent / "meta", tree.parent / "data"
    build(tree, meta, data)
    (tree / "f").write_bytes(b"longer content" * 1000)
    script = "import sys; from pathlib import Path; from bootseer.erofs import build\nbuild(*map(Path, sys.argv[1:]))"
    for point, left in (("before-rename", True), ("between-renames", False)):
        env = {**os.environ, "BOOTSEER_FAULTS": f"erofs.build.{point}=kill"}
        done = subprocess.run(
            [sys.executable, "-c", script, str(tree), str(meta), str(data)], env=env, timeout=60, check=False
        )
        assert done.returncode == -signal.SIGKILL
        assert meta.exists() == left
