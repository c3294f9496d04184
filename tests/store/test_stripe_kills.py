"""Writers killed or frozen at every named point: what is published is whole, the rest is named and collected."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import DataError, NotFoundError, NotWritableError
from bootseer.stripefs import open_fs
from bootseer.stripefs.maintenance import check, collect
from bootseer.stripefs.store import StripeFS
from support import forked, hadoop
from support.stripes import content
from support.waits import until

UNIT, WIDTH = 4096, 3
OLD, NEW = b"old." * 9000, b"new!" * 9000

VICTIM = """
import sys
from bootseer.errors import BootseerError
from bootseer.stripefs import open_fs
from bootseer.stripefs.copy import copy_tree
from bootseer.stripefs.maintenance import check, collect, repair as mend

def put(fs, path):
    with fs.create(path, striped=True, unit=4096, width=3) as out:
        out.write(b"new!" * 9000)

def save(fs, folder):
    saving = fs.save(folder)
    with saving.create("state", striped=True, unit=4096, width=3) as out:
        out.write(b"new!" * 9000)
    saving.commit()

def append(fs, path):
    with fs.append(path) as out:
        out.write(b"more")

def rename(fs, src, dst):
    fs.rename(src, dst)

def remove(fs, path):
    fs.remove(path)

def remove_tree(fs, path):
    fs.remove_tree(path)

def commit(fs, path):
    fs.commit(path)

def gc(fs, path):
    collect.gc(fs.backend, path, age=0, taken=True)

def repair(fs, path):
    mend.repair(fs.backend, check.fsck(fs.backend, path))

def make_striped(fs, path):
    copy_tree(fs, path, fs, path, unit=4096, width=3, verify=True)

url, do, *args = sys.argv[1:]
try:
    globals()[do](open_fs(url), *args)
except BootseerError as exc:
    sys.exit(str(exc))
"""


def begin(fs: StripeFS, fault: str, *words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "BOOTSEER_FAULTS": f"stripefs.{fault}"}
    return forked.Popen([sys.executable, "-c", VICTIM, fs.url, *words], env=environ, stderr=-1, text=True)


def kill(fs: StripeFS, point: str, do: str, *args: str) -> None:
    """Let a process ``do`` something and be killed at ``point``."""
    with begin(fs, f"{point}=kill", do, *args) as victim:
        said = victim.communicate(timeout=60)[1]
    assert victim.returncode == -signal.SIGKILL, f"{point}: {said}"


def freeze(fs: StripeFS, point: str, do: str, *args: str) -> Callable[[], str]:
    """Let a process ``do`` something and stop at ``point``; what is returned wakes it and says its error."""
    victim = begin(fs, f"{point}=stop@1", do, *args)
    until(lambda: " T " in Path(f"/proc/{victim.pid}/stat").read_text(), 30, f"a stop at {point}")

    def wake() -> str:
        victim.send_signal(signal.SIGCONT)
        with victim:
            return str(victim.communicate(timeout=60)[1]).strip()

    return wake


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.soak), pytest.param("hdfs", marks=pytest.mark.hdfs)])
def fs(request, tmp_path) -> StripeFS:
    if request.param == "folder":
        return open_fs(str(tmp_path / "store"))
    return open_fs(f"{hadoop.shared().url}/{uuid.uuid4().hex}")


def write(fs: StripeFS, path: str, data: bytes = OLD) -> None:
    with fs.create(path, striped=True, unit=UNIT, width=WIDTH) as out:
        out.write(data)


def on_storage(fs: StripeFS, folder: str = "") -> set[str]:
    """Every file there, the hidden ones too, claims excepted."""
    found = set()
    for entry in fs.backend.list(folder):
        path = f"{folder}/{entry.name}".lstrip("/")
        if entry.is_dir:
            found |= on_storage(fs, path)
        elif not entry.name.startswith("save."):
            found.add(path)
    return found


def settle(fs: StripeFS) -> set[str]:
    """fsck names all garbage and gc removes it and nothing else. Returns the paths that were removed."""
    report = check.fsck(fs.backend)
    assert report.errors == ()
    files = {path: content(fs, path) for path in fs.files()}
    before = on_storage(fs)
    assert all(removal.kept for removal in collect.gc(fs.backend)), "younger than a day"
    assert on_storage(fs) == before
    removed = collect.gc(fs.backend, age=0, taken=True)
    assert {removal.path for removal in removed} == {finding.path for finding in report.garbage}
    assert not any(removal.kept for removal in removed)
    gone = before - on_storage(fs)
    named = [finding.path for finding in report.garbage]
    assert all(any(path.startswith(name) for name in named) for path in gone)
    assert check.fsck(fs.backend).findings == ()
    assert {path: content(fs, path) for path in fs.files()} == files
    fs.verify()
    return gone


WRITE = ["write.stripe", "write.close", "write.intent", "write.pointer", "write.verify", "write.rename"]


def some(fs: StripeFS, points: list[str]) -> list[str]:
    """On HDFS, where each costs seconds, the first and the last: what lies between differs in our own files only."""
    return [points[0], points[-1]] if fs.url.startswith("hdfs") else points


def test_a_replacement_killed_at_every_step(fs):
    for point in [*some(fs, WRITE), "write.cleanup"]:
        write(fs, f"{point}/f")
        kill(fs, point, "put", f"{point}/f")
        assert content(fs, f"{point}/f") == (NEW if point == "write.cleanup" else OLD)
    if fs.url.startswith("hdfs"):  # the dead writer's lease lasts a minute
        kept = {removal.kept for removal in collect.gc(fs.backend, "write.stripe", age=0)}
        assert kept == {"a writer has it open"}
    files = len(fs.files())
    settle(fs)
    assert len(on_storage(fs)) == files * (1 + WIDTH)


def test_a_first_write_killed_at_every_step(fs):
    for point in some(fs, WRITE):
        kill(fs, point, "put", f"{point}/f")
        with pytest.raises(NotFoundError):
            fs.open(f"{point}/f")
    settle(fs)
    assert on_storage(fs) == set()


def test_a_save_killed_at_every_step(fs):
    write(fs, "run/step-1/state")
    fs.commit("run/step-1")
    before = on_storage(fs)
    for point in some(fs, [*WRITE, "save.claim", "commit.write", "commit.rename"]):
        kill(fs, point, "save", "run/step-2")
        assert fs.latest("run") == "run/step-1"
        with pytest.raises(DataError, match="no COMMIT"):
            fs.checkpoint("run/step-2")
    settle(fs)
    fs.remove_tree("run/step-2")
    assert on_storage(fs) == before
    kill(fs, "commit.published", "save", "run/step-2")
    assert fs.latest("run") == "run/step-2"
    assert check.fsck(fs.backend).errors == ()
    settle(fs)
    assert content(fs, "run/step-2/state") == NEW


def test_a_checkpoint_that_is_removed_killed_before_its_files_go(fs):
    for step in (1, 2):
        write(fs, f"run/step-{step}/state")
        fs.commit(f"run/step-{step}")
    before = on_storage(fs)
    write(fs, "run/step-3/state", NEW)
    fs.commit("run/step-3")
    kill(fs, "remove.tree", "remove_tree", "run/step-3")
    assert fs.latest("run") == "run/step-2"
    assert check.fsck(fs.backend).errors == ()
    settle(fs)
    assert on_storage(fs) == before
    fs.verify("run")


def test_renames_removals_and_appends_killed_at_every_step(fs):
    for point in ("rename.rename", "rename.cleanup"):
        write(fs, f"{point}/src", NEW)
        write(fs, f"{point}/dst")
        kill(fs, point, "rename", f"{point}/src", f"{point}/dst")
        assert content(fs, f"{point}/dst") == (OLD if point == "rename.rename" else NEW)
    assert [finding for finding in check.fsck(fs.backend).findings if finding.level == "note"] == []
    settle(fs)
    write(fs, "moved/src", NEW)
    kill(fs, "move.remove", "rename", "moved/src", "elsewhere/dst")
    assert content(fs, "moved/src") == content(fs, "elsewhere/dst") == NEW
    write(fs, "removed/f")
    kill(fs, "remove.stripes", "remove", "removed/f")
    write(fs, "tree/sub/f")
    kill(fs, "remove.tree", "remove_tree", "tree")
    assert fs.files("removed") == []
    with pytest.raises(NotFoundError):
        fs.stat("tree")
    write(fs, "appended")
    kill(fs, "write.rename", "append", "appended")
    assert content(fs, "appended") == OLD
    settle(fs)


def test_imports_killed_at_every_step(fs):
    plain = b"plain" * 900_000
    for point in some(fs, ["copy.check", "write.rename", "write.cleanup"]):
        sink = fs.backend.create(f"{point}/model")
        sink.write(plain)
        sink.close()
        kill(fs, point, "make_striped", point)
        assert fs.stat(f"{point}/model").striped == (point == "write.cleanup")
        assert content(fs, f"{point}/model") == plain
    settle(fs)


def test_repairs_and_collections_killed_at_every_step(fs):
    write(fs, "f")
    fs.backend.delete("f")
    kill(fs, "repair.rename", "repair", "")
    with pytest.raises(NotFoundError):
        fs.open("f")
    # what was to be the pointer is there, so the stripes look unfinished now; a second repair is not offered
    assert {finding.kind for finding in check.fsck(fs.backend).garbage} == {"unreferenced-stripes", "temporary"}
    collect.gc(fs.backend, age=0, taken=True)
    write(fs, "g")
    for point in ("gc.aside", "gc.fenced", "gc.delete"):
        kill(fs, "write.rename", "put", "g")
        kill(fs, point, "gc", "")
        assert content(fs, "g") == OLD
        assert "collected-stripes" in {finding.kind for finding in check.fsck(fs.backend).garbage}
    settle(fs)
    assert len(on_storage(fs)) == 1 + WIDTH


def test_a_writer_that_wakes_up_after_a_takeover_publishes_nothing(fs):
    write(fs, "run/step-1/state")
    fs.commit("run/step-1")
    points = ["write.rename", "write.stripe", "write.intent", "write.verify", "save.claim"]
    points += [
        "commit.begin",
        "commit.begin",
        "commit.write",
        "commit.rename",
    ]  # it wakes up after and before the other
    for step, point in enumerate(some(fs, points), 2):
        folder = f"run/step-{step}"
        wake = freeze(fs, point, "save", folder)
        taker = fs.save(folder)
        with taker.create("state", striped=True, unit=UNIT, width=WIDTH) as out:
            out.write(b"taken over" * 1000)
        if step % 2:
            taker.commit()
            assert "another writer" in (error := wake()) or "COMMIT" in error or "later one" in error, point
        else:  # it wakes up before the other one commits
            assert "another writer" in (error := wake()) or "later one" in error, point
            taker.commit()
        assert fs.latest("run") == folder
        assert content(fs, f"{folder}/state") == b"taken over" * 1000
        assert len(fs.checkpoint(folder).files) == 1
    settle(fs)


def test_a_writer_that_wakes_up_after_a_collection_publishes_nothing(fs):
    for point in some(fs, ["write.rename", "write.verify", "write.intent"]):
        write(fs, f"{point}/f")
        wake = freeze(fs, point, "put", f"{point}/f")
        removed = collect.gc(fs.backend, point, age=0, taken=True)
        assert removed
        assert wake()
        assert content(fs, f"{point}/f") == OLD
    settle(fs)


def test_a_late_writer_of_a_new_file_gives_up(fs):
    wake = freeze(fs, "write.rename", "put", "f")
    write(fs, "f")
    assert "another writer" in wake()
    assert content(fs, "f") == OLD
    settle(fs)


def test_the_takeover_itself_is_fenced(fs):
    first = fs.save("ck")
    writer = first.create("state", striped=True, unit=UNIT, width=WIDTH)
    writer.write(OLD)
    second = fs.save("ck")
    with pytest.raises(NotWritableError, match="save 1 of ck was overtaken"):
        writer.finish()
    with pytest.raises(NotWritableError, match="save 1 of ck was overtaken"):
        first.commit()
    joined = fs.save("ck", epoch=second.epoch)
    with joined.create("other") as out:
        out.write(b"x")
    assert [file.path for file in second.commit().files] == ["other"]
    with pytest.raises(NotWritableError, match="COMMIT"):
        joined.commit()
    with pytest.raises(NotWritableError, match="COMMIT"):
        fs.save("ck")
