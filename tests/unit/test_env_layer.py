"""Differences: found by stat, staged as layers, read as inventories, and placed again elsewhere."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.env import scan
from bootseer.env import unpack as unpacking
from bootseer.env.contents import Contents, LayerContent, read_layers
from bootseer.env.layer import check_unchanged, merged, stage_layer
from bootseer.env.spec import Target
from bootseer.env.unpack import Undo, place_entries, verify_stage
from bootseer.errors import DataError, UnsupportedError


def listing(root: Path) -> dict[str, tuple[object, ...]]:
    """All that must survive, by path: kind and mode, owner, mtime, content or link text, hard-linked names."""
    seen: dict[int, str] = {}
    out: dict[str, tuple[object, ...]] = {}
    for path, info in [("", os.lstat(root)), *scan.walk(root)]:
        full = root / path
        if stat.S_ISLNK(info.st_mode):
            content: object = os.readlink(full)
        elif stat.S_ISREG(info.st_mode):
            content = (full.read_bytes(), seen.setdefault(info.st_ino, path))
        else:
            content = None
        names = sorted(os.listxattr(full, follow_symlinks=False))
        xattrs = [(name, os.getxattr(full, name, follow_symlinks=False)) for name in names]
        out[path] = (oct(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns, content, str(xattrs))
    return out


def undoing(tmp_path: Path) -> Undo:
    return Undo(Path(tempfile.mkdtemp(dir=tmp_path)))


def base(root: Path) -> None:
    (root / "lib" / "old-1.dist-info").mkdir(parents=True)
    (root / "lib" / "old-1.dist-info" / "RECORD").write_text("old")
    (root / "lib" / "kept.py").write_text("kept")
    (root / "lib" / "edited.py").write_text("before")
    (root / "turns" / "deep").mkdir(parents=True)
    (root / "turns" / "deep" / "x").write_text("x")
    (root / "file").write_text("becomes a directory")
    for path in (root / "lib/kept.py", root / "lib", root):
        os.utime(path, ns=(5, 1_600_000_000_123_456_789))


def change(root: Path) -> None:
    shutil.rmtree(root / "lib" / "old-1.dist-info")
    (root / "lib" / "edited.py").write_text("after")
    (root / "lib" / "new").mkdir(mode=0o750)
    (root / "lib" / "new" / "a").write_text("a")
    os.link(root / "lib" / "new" / "a", root / "lib" / "same-as-a")
    os.symlink("new/a", root / "lib" / "link")
    os.utime(root / "lib" / "link", ns=(1, 1_500_000_000_000_000_007), follow_symlinks=False)
    (root / "lib" / "new" / "run").write_bytes(b"#!/bin/sh\n")
    (root / "lib" / "new" / "run").chmod(0o4755)
    os.setxattr(root / "lib" / "new" / "a", "user.note", b"n")
    (root / "lib" / "odd \udcff\n").write_text("odd")
    (root / "file").unlink()
    (root / "file").mkdir()
    (root / "file" / "inside").write_text("inside")
    shutil.rmtree(root / "turns")
    (root / "turns").write_text("now a file")
    os.utime(root / "lib" / "new", ns=(1, 1_500_000_000_000_000_001))


class Nowhere:
    def write(self, data: object, /) -> None: ...


def read_layer(layers: Path, targets: int) -> LayerContent:
    return read_layers(Contents(Nowhere()), targets, layers)


def capture(root: Path, work: Path, act: Callable[[Path], object]) -> Path:
    before = scan.snapshot_marks(root)
    act(root)
    changed, deleted = scan.difference(before, scan.snapshot_marks(root))
    stage_layer(root, work / "0", changed, deleted)
    return work


def test_a_difference_makes_another_base_equal(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        base(root)
    inode = os.lstat(two / "lib" / "edited.py").st_ino
    layers = capture(one, tmp_path / "work", change)
    entries = read_layer(layers, 1).entries
    paths = {entry.path: entry.kind for entry in entries}
    assert "0/lib/kept.py" not in paths
    assert paths["0/lib/old-1.dist-info"] == "w"
    assert paths["0/turns"] == "f"
    assert "0/turns/deep" not in paths
    verify_stage(layers, entries)
    place_entries(layers, entries, two, undoing(tmp_path))
    assert listing(two) == listing(one)
    assert os.lstat(two / "lib" / "edited.py").st_ino != inode


def test_a_difference_comes_from_another_file_system(tmp_path: Path) -> None:
    def act(root: Path) -> None:
        change(root)
        (root / "lib" / "same-as-a").unlink()  # a hard link that is moved by itself becomes a file of its own

    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        base(root)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        layers = capture(one, Path(work, "work"), act)
        entries = read_layer(layers, 1).entries
        verify_stage(layers, entries)
        place_entries(layers, entries, two, undoing(tmp_path))
    assert listing(two) == listing(one)


def test_restoring_twice_changes_nothing(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        base(root)
    layers = capture(one, tmp_path / "work", change)
    subprocess.run(["cp", "-a", str(layers), str(tmp_path / "again")], check=True)
    entries = read_layer(layers, 1).entries
    for stage in (layers, tmp_path / "again"):
        verify_stage(stage, entries)
        place_entries(stage, entries, two, undoing(tmp_path))
        assert listing(two) == listing(one)


def test_never_writes_through_a_hard_link(tmp_path: Path) -> None:
    one, two, cache = tmp_path / "one", tmp_path / "two", tmp_path / "cache"
    for root in (one, two):
        base(root)
    os.link(two / "lib" / "edited.py", cache)
    layers = capture(one, tmp_path / "work", change)
    place_entries(
        layers, [entry for entry in read_layer(layers, 1).entries if entry.kind != "w"], two, undoing(tmp_path)
    )
    assert (two / "lib" / "edited.py").read_text() == "after"
    assert cache.read_text() == "before"


def test_never_writes_through_a_symbolic_link(tmp_path: Path) -> None:
    one, two, outside = tmp_path / "one", tmp_path / "two", tmp_path / "outside"
    base(tmp_path / "some")
    for folder in (one, two, outside):
        folder.mkdir()
    (two / "lib").symlink_to(outside)
    layers = capture(one, tmp_path / "work", lambda root: shutil.copytree(tmp_path / "some", root / "lib"))
    place_entries(layers, read_layer(layers, 1).entries, two, undoing(tmp_path))
    assert list(outside.iterdir()) == []
    assert not (two / "lib").is_symlink()


def test_hard_links_out_of_a_package_cache_are_captured(tmp_path: Path) -> None:
    # their mtimes are old: a capture by mtime misses them
    root, cache = tmp_path / "root", tmp_path / "cache"
    root.mkdir()
    cache.write_text("cached")
    os.utime(cache, ns=(1, 1))
    layers = capture(root, tmp_path / "work", lambda at: os.link(cache, at / "file"))
    assert [entry.path for entry in read_layer(layers, 1).entries] == ["0", "0/file"]


def test_an_edit_that_restores_size_and_mtime_is_captured(tmp_path: Path) -> None:
    def act(root: Path) -> None:
        info = os.stat(root / "lib/kept.py")
        (root / "lib/kept.py").write_text("KEPT")
        os.utime(root / "lib/kept.py", ns=(info.st_atime_ns, info.st_mtime_ns))

    base(tmp_path / "root")
    layers = capture(tmp_path / "root", tmp_path / "work", act)
    assert "0/lib/kept.py" in [entry.path for entry in read_layer(layers, 1).entries]


def test_devices_and_sockets_cannot_be_captured(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    layers = capture(tmp_path / "root", tmp_path / "work", lambda root: os.mkfifo(root / "pipe"))
    with pytest.raises(UnsupportedError, match=r"cannot capture pipe"):
        read_layer(layers, 1)


@pytest.mark.parametrize("damage", ["content", "extra", "missing", "kind", "link", "copy"])
def test_a_stage_that_differs_from_its_inventory_is_refused(tmp_path: Path, damage: str) -> None:
    base(tmp_path / "one")
    layers = capture(tmp_path / "one", tmp_path / "work", change)
    entries = read_layer(layers, 1).entries
    root = layers / "0" / "lib"
    match damage:
        case "content":
            (root / "edited.py").unlink()
            (root / "edited.py").write_text("afteR")
        case "extra":
            (root / "evil").write_text("x")
        case "missing":
            (root / "edited.py").unlink()
        case "kind":
            (root / "edited.py").unlink()
            (root / "edited.py").symlink_to("/etc/passwd")
        case "link":
            (root / "link").unlink()
            (root / "link").symlink_to("/etc/passwd")
        case "copy":
            (root / "same-as-a").unlink()
            shutil.copy2(root / "new" / "a", root / "same-as-a")
    with pytest.raises(DataError, match="differs from its inventory"):
        verify_stage(layers, entries)


def test_fingerprints(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert scan.fingerprint(scan.rows(one)) == ""
    one.mkdir()
    assert scan.fingerprint(scan.rows(one)) == ""
    base(one / "x")
    base(two / "x")
    assert scan.fingerprint(scan.rows(one)) == scan.fingerprint(scan.rows(two)) != ""
    (two / "x/lib/__pycache__").mkdir()
    (two / "x/lib/__pycache__/a.pyc").touch()
    assert scan.fingerprint(scan.rows(one)) == scan.fingerprint(scan.rows(two))
    (two / "x/lib/kept.py").write_text("longer")
    assert scan.fingerprint(scan.rows(one)) != scan.fingerprint(scan.rows(two))


@pytest.mark.parametrize("layered", ["base", "deletion", "replaced folder", "opaque"])
def test_the_result_of_a_layer_over_a_base_is_known_without_a_look_at_it(tmp_path: Path, layered: str) -> None:
    def act(root: Path) -> None:
        if layered == "base":
            change(root)
        elif layered == "deletion":
            shutil.rmtree(root / "lib/old-1.dist-info")
        else:
            shutil.rmtree(root / "lib")
            if layered == "opaque":
                (root / "lib").mkdir()
                (root / "lib/kept.py").write_text("other")
            else:
                (root / "lib").write_text("a file")

    root = tmp_path / "root"
    base(root)
    rows = scan.rows(root)
    entries = read_layer(capture(root, tmp_path / "work", act), 1).entries
    assert merged(rows, entries, 0) == scan.rows(root)


@pytest.mark.parametrize(
    "act",
    [
        lambda root: (root / "lib" / "new" / "a").write_text("b"),
        lambda root: (root / "lib" / "new" / "run").unlink(),
        lambda root: (root / "lib" / "extra").write_text("x"),
        lambda root: (root / "lib" / "new" / "run").chmod(0o600),
        lambda root: shutil.rmtree(root),
    ],
)
def test_layers_that_change_after_they_were_read_are_refused(tmp_path: Path, act: Callable[[Path], object]) -> None:
    base(tmp_path / "one")
    layers = capture(tmp_path / "one", tmp_path / "work", change)
    entries = read_layer(layers, 1).entries
    check_unchanged(layers, entries)
    act(layers / "0")
    with pytest.raises(DataError, match="changed while it was captured"):
        check_unchanged(layers, entries)


def test_placing_that_fails_midway_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, plain = tmp_path / "one", tmp_path / "two", unpacking.move_in
    for root in (one, two):
        base(root)
    before = listing(two)
    layers = capture(one, tmp_path / "work", change)
    entries = read_layer(layers, 1).entries
    count = sum(entry.kind not in ("d", "o", "w") for entry in entries)
    failed = 0
    for stop in range(count):
        stage, moves = tmp_path / f"stage{stop}", 0

        def move(source: Path, dest: Path, stop: int = stop) -> None:
            nonlocal moves
            moves += 1
            if moves > stop:
                raise OSError(28, "full")
            plain(source, dest)

        subprocess.run(["cp", "-a", str(layers), str(stage)], check=True)
        monkeypatch.setattr(unpacking, "move_in", move)
        undo = undoing(tmp_path)
        try:
            place_entries(stage, entries, two, undo)
        except OSError:
            failed += 1
        else:
            break
        undo.roll_back(two)
        after = listing(two)
        assert {path: row[-2] for path, row in after.items()} == {path: row[-2] for path, row in before.items()}
    assert failed > 3


@pytest.mark.root
def test_a_restore_that_was_killed_anywhere_is_taken_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        base(root)
        os.chown(root / "lib", 7, 8)
    before = listing(two)
    layers = capture(one, tmp_path / "work", change)
    entries = read_layer(layers, 1).entries
    stop = visits = 0

    def point(name: str) -> None:
        nonlocal visits
        visits += 1
        if name == "env.unpack.noted" and visits == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(unpacking.faults, "point", point)
    while stop <= visits:
        stop, visits = stop + 1, 0
        stage, undo = tmp_path / f"stage{stop}", undoing(tmp_path)
        subprocess.run(["cp", "-a", str(layers), str(stage)], check=True)
        try:
            place_entries(stage, entries, two, undo)
        except KeyboardInterrupt:
            with open(undo.folder / "journal", "ab") as file:
                file.write(b'["lib')  # and the next line was not written to its end
        undo = Undo(undo.folder)  # as the next process has it
        undo.roll_back(two)
        assert listing(two) == before
        undo.roll_back(two)
        assert listing(two) == before
    assert stop > 6


@pytest.mark.root
def test_what_cannot_be_taken_back_is_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.mkdir()
    file = target / "a"
    file.write_text("old")

    def full(steps: Undo, root: int, inner: str, kept: Path, before: object) -> None:
        raise OSError(28, "No space left on device")

    with unpacking.undoing(Target(str(target))) as steps, monkeypatch.context() as patch:
        steps.replace("a", file)
        file.write_text("new")
        patch.setattr(Undo, "_take_back", full)
        steps.roll_back(target)
    assert file.read_text() == "new"
    unpacking.recover(Target(str(target)))
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
