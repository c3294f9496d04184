"""fsck, repair and gc: every kind of damage is named, what can be mended is, and nothing in doubt is removed."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bootseer import faults
from bootseer.backends.interface import Entry, Source
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, NotWritableError, UnavailableError
from bootseer.fsspecfs.filesystem import StripeFileSystem
from bootseer.stripefs import layout, open_fs
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.copy import copy_file
from bootseer.stripefs.maintenance import check, collect, repair, scan
from bootseer.stripefs.maintenance.check import Finding
from bootseer.stripefs.store import StripeFS
from support import forked
from support.modes import KeepsModes
from support.stripes import content, flip

UNIT, WIDTH = 4096, 3
DATA = bytes(i % 251 for i in range(10 * UNIT + 5))


def write(fs: StripeFS, path: str, data: bytes = DATA) -> None:
    with fs.create(path, striped=True, unit=UNIT, width=WIDTH) as out:
        out.write(data)


def local(fs: StripeFS, path: str) -> Path:
    return Path(fs.url, path)


def stripe(fs: StripeFS, path: str, index: int) -> Path:
    return local(fs, f"{Path(path).parent}/.bsx/{fs.stat(path).uuid}.{index}")


def kinds(fs: StripeFS, level: str = "") -> list[str]:
    return [finding.kind for finding in check.fsck(fs.backend).findings if level in ("", finding.level)]


def only(fs: StripeFS) -> Finding:
    (found,) = check.fsck(fs.backend).findings
    return found


def another(stripe: Path) -> Path:
    """One of another file in the same folder."""
    return next(path for path in stripe.parent.glob("*.1") if path != stripe)


def with_other_checksums(data: bytes) -> bytes:
    """Of the stripe 1 of `DATA`."""
    at = layout.Geometry(len(DATA), UNIT, WIDTH).footer_offset(1)
    footer, _ = layout.decode_footer(data[at:], "f")
    return data[:at] + layout.encode_footer(footer._replace(crcs=footer.crcs[::-1]))[0]


def test_a_sound_store_has_no_findings(fs):
    write(fs, "run/step-1/state")
    with fs.create("run/step-1/small") as out:
        out.write(b"x")
    fs.commit("run/step-1")
    report = check.fsck(fs.backend)
    assert (report.folders, report.files, report.findings) == (3, 3, ())
    assert check.fsck(fs.backend, "run/step-1/state").findings == ()
    assert collect.gc(fs.backend, age=0) == []
    with pytest.raises(NotFoundError):
        check.fsck(fs.backend, "none")


@pytest.mark.parametrize(
    ("kind", "break_it"),
    [
        ("missing-stripe", lambda path: path.unlink()),
        ("wrong-length", lambda path: os.truncate(path, 5000)),
        ("damaged-header", lambda path: flip(path, 20)),
        ("damaged-header", lambda path: flip(path, 66)),  # the name
        ("damaged-footer", lambda path: flip(path, path.stat().st_size - 30)),
        ("foreign-stripe", lambda path: path.write_bytes(another(path).read_bytes())),
        ("foreign-stripe", lambda path: path.write_bytes(with_other_checksums(path.read_bytes()))),
    ],
)
def test_damaged_stripes(fs, kind, break_it):
    write(fs, "d/f")
    write(fs, "d/g")
    break_it(stripe(fs, "d/f", 1))
    found = only(fs)
    assert (found.kind, found.level, found.path, found.repair) == (kind, "error", "d/f", "")
    assert check.fsck(fs.backend, "d/f").findings == (found,)
    assert repair.repair(fs.backend, check.fsck(fs.backend)) == []
    assert collect.gc(fs.backend, age=0) == []


@pytest.mark.parametrize("leave", ["ck/*", "ck/[a-z]*"])
def test_what_was_copied_without_its_stripes_says_so_once(fs, leave):
    """As `cp -r ck/* copy` does. Red before: each stripe was missing, and the file was to be restored from a copy."""
    write(fs, "ck/f")
    local(fs, "copy").mkdir()
    subprocess.run(f"cp -r {leave} copy", shell=True, cwd=fs.url, check=True)
    found = only(fs)
    assert (found.kind, found.level, found.path, found.repair) == ("stripes-elsewhere", "error", "copy/f", "")
    with pytest.raises(DataError, match=r"copied with its \.bsx folder"):
        content(fs, "copy/f")
    subprocess.run(["cp", "-r", "ck/.bsx", "copy"], cwd=fs.url, check=True)
    assert kinds(fs) == []
    assert content(fs, "copy/f") == DATA


@pytest.mark.parametrize("unit", [UNIT, 128 << 10])
def test_a_file_of_an_earlier_version_says_so(fs, unit):
    """It had no checksums of sectors: its stripes looked too short."""
    with fs.create("f", striped=True, unit=unit, width=1) as out:
        out.write(bytes(5 * unit))
    path, geometry = stripe(fs, "f", 0), layout.Geometry(5 * unit, unit, 1)
    data, table, footer = bytearray(path.read_bytes()), geometry.table_offset(0), geometry.footer_offset(0)
    data[8] = data[footer + 8] = 1
    path.write_bytes(data[:table] + data[footer:])
    found = only(fs)
    assert (found.kind, found.level, found.repair) == ("other-version", "error", "")
    assert collect.gc(fs.backend, age=0) == []
    with pytest.raises(
        DataError, match=r"^f \(.bsx/\w+.0\) was written by an earlier version of bootseer; write it again$"
    ):
        fs.open("f")
    with fs.create("f", striped=True, unit=unit, width=1) as out:
        out.write(bytes(5 * unit))
    assert kinds(fs) == []


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_that_changes_while_it_is_looked_at_is_no_finding(fs, monkeypatch, how):
    write(fs, "f")
    real, once = fs.backend.open, threading.Lock()

    def late(path: str, *, pinned: bool = False) -> Source:
        if path.startswith(".bsx/") and once.acquire(blocking=False):
            monkeypatch.setattr(fs.backend, "open", real)
            write(fs, "f", b"new") if how == "replaced" else fs.remove("f")
        return real(path, pinned=pinned)

    monkeypatch.setattr(fs.backend, "open", late)
    assert check.fsck(fs.backend).findings == ()
    assert once.locked()
    assert check.fsck(fs.backend).findings == ()


def test_a_file_that_is_published_after_its_folder_was_listed_is_not_lost(fs, monkeypatch):
    late = fs.create("f", striped=True, unit=UNIT, width=WIDTH)
    late.write(DATA)
    real, once = scan.inspect, threading.Lock()

    def inspect(*args: object) -> layout.Pointer:
        if once.acquire(blocking=False):
            late.finish()
        return real(*args)

    monkeypatch.setattr(scan, "inspect", inspect)
    while len(list(local(fs, ".bsx").iterdir())) < WIDTH:
        time.sleep(0.01)
    assert check.fsck(fs.backend).findings == ()


@pytest.mark.parametrize("how", ["gone", "cut", "flipped", "flipped-first-line", "empty-in-a-checkpoint"])
def test_a_lost_pointer_is_rebuilt_from_its_stripes(fs, how):
    write(fs, "d/f")
    write(fs, "d/other")
    pointer = local(fs, "d/f")
    before = pointer.read_bytes()
    if how == "gone":
        pointer.unlink()
    elif how == "cut":
        os.truncate(pointer, 60)
    elif how.startswith("flipped"):
        flip(pointer, 40 if how == "flipped" else 3)
        with pytest.raises(DataError) as caught:
            fs.open("d/f")
        assert "fsck --repair" in caught.value.hint
        assert "damaged-pointer" in kinds(fs)
    else:
        fs.commit("d")
        pointer.unlink()
    assert collect.gc(fs.backend, age=0) == []  # not garbage, whatever its age
    assert "error" in {finding.level for finding in check.fsck(fs.backend).findings}
    (made,) = repair.repair(fs.backend, check.fsck(fs.backend))
    assert made.done
    assert pointer.read_bytes() == before
    assert check.fsck(fs.backend).findings == ()
    fs.verify()


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_rebuilt_pointer_is_as_private_as_its_stripes(tmp_path, how):
    backend = KeepsModes(tmp_path)
    fs = StripeFS(backend)
    with fs.create("f", striped=True, unit=UNIT, width=WIDTH, mode=0o600) as out:
        out.write(DATA)
    for path, _ in list(backend.walk("")):
        backend.change(path, owner=("alice", "research"))
    before = backend.rights()
    if how == "gone":
        local(fs, "f").unlink()
    else:
        os.truncate(local(fs, "f"), 60)
    (made,) = repair.repair(fs.backend, check.fsck(fs.backend))
    assert made.done
    assert backend.rights() == before == {(0o600, ("alice", "research"))}


def test_a_pointer_is_not_rebuilt_from_damaged_chunks(fs):
    write(fs, "f")
    flip(stripe(fs, "f", 1), 4096 + 7)
    local(fs, "f").unlink()
    (made,) = repair.repair(fs.backend, check.fsck(fs.backend))
    assert not made.done
    assert "chunk 1 of f is damaged" in made.failed
    assert not local(fs, "f").exists()


def test_a_pointer_is_not_rebuilt_when_its_commit_has_another_digest(fs):
    write(fs, "d/f")
    made = fs.commit("d")
    other = msgspec.structs.replace(made, files=(msgspec.structs.replace(made.files[0], digest="ab" * 32),))
    local(fs, "d/COMMIT").write_bytes(commit.encode(other))
    local(fs, "d/f").unlink()
    (failed,) = [
        made.failed for made in repair.repair(fs.backend, check.fsck(fs.backend)) if made.kind == "lost-pointer"
    ]
    assert "does not have the digest of its COMMIT" in failed
    assert not local(fs, "d/f").exists()


def test_what_is_not_whole_is_not_rebuilt(fs):
    write(fs, "f")
    stripe(fs, "f", 2).unlink()
    local(fs, "f").unlink()
    found = only(fs)
    assert (found.kind, found.level) == ("unreferenced-stripes", "garbage")
    assert "1 of 3 stripes are missing" in found.detail
    assert repair.repair(fs.backend, check.fsck(fs.backend)) == []


def test_a_pointer_is_not_guessed_for_a_name_that_is_taken(fs):
    write(fs, "f")
    lost = local(fs, "f").read_bytes()
    local(fs, "f").unlink()
    write(fs, "f", b"another")  # same epoch: the first one is an older version
    assert kinds(fs) == ["unreferenced-stripes"]
    local(fs, "f").write_bytes(b"")  # as after a power cut
    assert "lost-pointer" in kinds(fs)
    for made in repair.repair(fs.backend, check.fsck(fs.backend)):
        assert made.path.startswith("recovered-")
    assert local(fs, "f").read_bytes() == b""
    uuid = layout.decode_pointer(lost, "f").uuid
    assert content(fs, f"recovered-{uuid}") == DATA


@pytest.mark.parametrize("name", ["", "../e/f"])
def test_stripes_that_do_not_say_their_name_are_rebuilt_under_none(fs, name):
    """As those of too long a name, or of one in another folder."""
    write(fs, "d/f")
    uuid = fs.stat("d/f").uuid
    local(fs, "d/f").unlink()
    for path in local(fs, "d/.bsx").iterdir():
        header = layout.decode_header(path.read_bytes()[: layout.HEADER_SIZE], "f")
        data = layout.encode_header(header._replace(name=name)) + path.read_bytes()[layout.HEADER_SIZE :]
        path.write_bytes(data)
    assert only(fs).path == f"d/recovered-{uuid}"
    assert repair.repair(fs.backend, check.fsck(fs.backend))[0].done
    assert content(fs, f"d/recovered-{uuid}") == DATA


def test_two_damaged_pointers_are_told_apart_or_left_alone(fs):
    write(fs, "f")
    write(fs, "g", DATA[::-1])
    for name in ("f", "g"):
        local(fs, name).write_bytes(layout.POINTER_LINE + b"rubbish")
    assert all(made.done for made in repair.repair(fs.backend, check.fsck(fs.backend)))
    assert (content(fs, "f"), content(fs, "g")) == (DATA, DATA[::-1])


def test_nothing_is_removed_beside_a_damaged_pointer_that_may_own_it(fs):
    write(fs, "f")
    write(fs, "g")
    os.truncate(local(fs, "f"), 30)
    stripe_of_f = next(local(fs, ".bsx").glob(f"{check.fsck(fs.backend).errors[0].uuid}.0"))
    stripe_of_f.unlink()
    assert collect.gc(fs.backend, age=0) == []
    assert "kept-stripes" in kinds(fs)


def test_copies_and_renamed_files(fs):
    write(fs, "f")
    local(fs, "copy").write_bytes(local(fs, "f").read_bytes())
    assert (only(fs).kind, only(fs).level) == ("pointer-copy", "note")
    local(fs, "f").unlink()
    assert check.fsck(fs.backend).findings == ()
    fs.remove("copy")
    assert list(local(fs, ".bsx").iterdir()) == []


def test_manifests(fs):
    for step in (1, 2):
        write(fs, f"run/step-{step}/a")
        write(fs, f"run/step-{step}/b")
        fs.commit(f"run/step-{step}")
    write(fs, "run/step-2/a")
    fs.remove("run/step-2/b", force=True)
    assert kinds(fs, "error") == ["commit-other-file", "commit-lacks-file"]
    assert repair.repair(fs.backend, check.fsck(fs.backend)) == []
    flip(local(fs, "run/step-1/COMMIT"), 50)
    assert "damaged-commit" in kinds(fs, "error")


def test_a_name_that_is_not_ours_is_kept(fs):
    write(fs, "f")
    local(fs, ".bsx/notes.txt").write_text("mine")
    assert (only(fs).kind, only(fs).level) == ("unknown-file", "note")
    assert collect.gc(fs.backend, age=0) == []


def test_gc_leaves_alone_what_is_young_and_says_why(fs):
    write(fs, "f")
    for stripe_file in local(fs, ".bsx").iterdir():
        stripe_file.rename(stripe_file.with_name("ab" * 16 + stripe_file.suffix))
    local(fs, ".tmp-" + "cd" * 16).write_bytes(b"")
    old = time.time() - 7200
    os.utime(local(fs, ".tmp-" + "cd" * 16), (old, old))
    local(fs, "f").unlink()
    found = {removal.kind: removal for removal in collect.gc(fs.backend, age=3600)}
    assert found["unreferenced-stripes"].kept == "its writer may be under way"
    assert found["temporary"].kept == ""
    assert 7100 < found["temporary"].age < 7300
    assert kinds(fs) == ["unreferenced-stripes"]
    assert [removal.kept for removal in collect.gc(fs.backend, age=0, dry_run=True)] == [""]
    assert kinds(fs) == ["unreferenced-stripes"]
    collect.gc(fs.backend, age=0)
    assert check.fsck(fs.backend).findings == ()
    with pytest.raises(ConfigError):
        collect.gc(fs.backend, age=-1)
    write(fs, "g")
    with pytest.raises(NotFoundError, match="is a file"):
        collect.gc(fs.backend, "g")


def test_a_temporary_file_that_is_written_to_meanwhile_is_kept(fs, monkeypatch):
    path = local(fs, ".tmp-" + "cd" * 16)
    write(fs, "f")
    path.write_bytes(b"")
    os.utime(path, (1, 1))
    real = fs.backend.stat

    def stat(name: str) -> Entry:
        if name == path.name:
            os.utime(path)
        return real(name)

    monkeypatch.setattr(fs.backend, "stat", stat)
    (found,) = collect.gc(fs.backend, age=3600)
    assert found.kept == "its writer is under way"
    assert path.exists()


def test_gc_of_files_removed_with_other_tools_has_to_be_asked_for(fs):
    write(fs, "f")
    local(fs, "f").unlink()
    assert collect.gc(fs.backend, age=0) == []
    assert [removal.kind for removal in collect.gc(fs.backend, age=0, lost=True)] == ["lost-pointer"]
    assert check.fsck(fs.backend).findings == ()
    assert list(local(fs, ".bsx").iterdir()) == []


def test_a_broken_off_gc_of_a_file_that_was_published_is_undone(fs):
    write(fs, "f")
    uuid = fs.stat("f").uuid
    for index in (0, 2):
        stripe(fs, "f", index).rename(local(fs, f".bsx/{scan.TRASH}{uuid}.{index}"))
    assert kinds(fs) == ["missing-stripe", "missing-stripe"]
    assert collect.gc(fs.backend, age=0) == []
    assert all(made.done for made in repair.repair(fs.backend, check.fsck(fs.backend)))
    assert content(fs, "f") == DATA


class Meeting:
    """Two threads that stop at fault points of their own: ``reached`` and ``go`` of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, points: list[str]) -> None:
        self.reached = {point: threading.Event() for point in points}
        self.go = {point: threading.Event() for point in points}
        monkeypatch.setattr(faults, "point", self._point)

    def _point(self, name: str) -> None:
        name = name.removeprefix("stripefs.")
        if name in self.go and not self.reached[name].is_set():
            self.reached[name].set()
            assert self.go[name].wait(20)


@pytest.mark.parametrize("collector", ["gc.aside", "gc.fenced", "gc.delete"])
@pytest.mark.parametrize("writer", ["write.stripe", "write.intent", "write.pointer", "write.verify", "write.rename"])
def test_a_collection_and_a_writer_that_is_under_way_after_all(fs, monkeypatch, writer, collector):
    """Whatever the order of their steps: the file is the old or the new version, whole, and the writer knows which."""
    write(fs, "f")
    meeting = Meeting(monkeypatch, [writer, collector])
    outcome: list[str] = []

    def save() -> None:
        try:
            write(fs, "f", DATA[::-1])
            outcome.append("published")
        except (BootseerError, OSError):
            outcome.append("failed")

    writing, collecting = threading.Thread(target=save), threading.Thread(target=lambda: collect.gc(fs.backend, age=0))
    writing.start()
    assert meeting.reached[writer].wait(20)
    collecting.start()
    while not meeting.reached[collector].wait(0.02) and collecting.is_alive():
        pass  # it may find no stripe yet, only the temporary file
    meeting.go[writer].set()
    writing.join(20)
    meeting.go[collector].set()
    collecting.join(20)
    assert content(fs, "f") == (DATA[::-1] if outcome == ["published"] else DATA)
    fs.verify()
    assert check.fsck(fs.backend).errors == ()
    collect.gc(fs.backend, age=0)
    assert check.fsck(fs.backend).findings == ()


def test_what_appears_between_check_and_repair_is_not_overwritten(fs):
    write(fs, "f")
    local(fs, "f").unlink()
    report = check.fsck(fs.backend)
    local(fs, "f").write_bytes(b"somebody's")
    (made,) = repair.repair(fs.backend, report)
    assert "has changed since it was checked" in made.failed
    assert local(fs, "f").read_bytes() == b"somebody's"


def test_a_storage_that_cannot_be_read_is_no_reason_to_remove(fs, monkeypatch):
    write(fs, "f")
    local(fs, ".tmp-" + "cd" * 16).write_bytes(b"")

    def broken(path: str, *, pinned: bool = False) -> None:
        raise BootseerError("input/output error")

    monkeypatch.setattr(fs.backend, "open", broken)
    with pytest.raises(BootseerError):
        collect.gc(fs.backend, age=0)
    assert local(fs, ".tmp-" + "cd" * 16).exists()


def test_a_repair_says_what_it_cannot_do(fs):
    write(fs, "f")
    report = check.fsck(fs.backend)
    odd = Finding(kind="odd", level="error", path="f", detail="", repair="do something")
    (made,) = repair.repair(fs.backend, type(report)(url="", path="", folders=1, files=1, findings=(odd,)))
    assert "has changed since it was checked" in made.failed


def test_a_repair_does_not_replace_what_was_written_while_it_read(fs, monkeypatch):
    write(fs, "f")
    flip(local(fs, "f"), 40)
    report = check.fsck(fs.backend)
    real = scan.check_content

    def check_content(*args):
        digest = real(*args)
        write(fs, "f", b"newer")
        return digest

    monkeypatch.setattr(scan, "check_content", check_content)
    (made,) = repair.repair(fs.backend, report)
    assert "was written since it was checked" in made.failed
    assert content(fs, "f") == b"newer"
    assert not list(local(fs, "").glob(".tmp-*"))


@pytest.mark.parametrize("offset", [40, 60, -5])
def test_a_version_over_a_damaged_one_is_the_newer_one(fs, offset):
    for _ in range(3):
        write(fs, "f")
    pointer = local(fs, "f")
    flip(pointer, offset % pointer.stat().st_size)
    write(fs, "f", b"newer")
    assert kinds(fs) == ["unreferenced-stripes"]  # and no pointer that was lost
    assert repair.repair(fs.backend, check.fsck(fs.backend)) == []
    assert content(fs, "f") == b"newer"


def test_hidden_names_are_the_stores_alone(fs):
    write(fs, "f")
    for path in (".tmp-notes", ".bsx/x", "d/.tmp-notes/x", "d/.bsx"):
        with pytest.raises(ConfigError, match="the store's own"):
            fs.create(path)
        with pytest.raises(ConfigError, match="the store's own"):
            fs.rename("f", path)
    local(fs, ".tmp-notes").write_bytes(b"mine")
    local(fs, ".tmp-dir").mkdir()
    local(fs, ".tmp-dir/x").write_bytes(b"mine")
    assert collect.gc(fs.backend, age=0) == []
    assert [(finding.kind, finding.level) for finding in check.fsck(fs.backend).findings] == [
        ("unknown-file", "note")
    ] * 2
    fs.commit("")
    assert local(fs, ".tmp-notes").read_bytes() == b"mine"


@pytest.mark.parametrize("base", ["", "run", "run/step-1", "run/step-1/sub"])
def test_a_commit_above_counts_from_any_base(fs, base):
    write(fs, "run/step-1/sub/f")
    fs.create("run/step-1/sub/conf").finish()
    fs.commit("run/step-1")
    local(fs, "run/step-1/sub/f").unlink()
    local(fs, "run/step-1/sub/f").write_bytes(b"something else")  # so that only COMMIT says that the stripes were used
    inner = open_fs(f"{fs.url}/{base}")
    path = "run/step-1/sub".removeprefix(base).strip("/")
    assert [(it.kind, it.level) for it in check.fsck(inner.backend, path).findings][-1:] == [("lost-pointer", "error")]
    assert collect.gc(inner.backend, path, age=0) == []
    local(fs, "run/step-1/sub/conf").write_bytes(b"changed")
    for what in (path, f"{path}/conf".strip("/")):
        with pytest.raises(DataError, match="does not have its digest"):
            inner.verify(what)


def test_an_old_version_does_not_come_back_under_a_name_that_it_had(fs):
    for _ in range(2):
        write(fs, "a")
    fs.rename("a", "b")
    code = (
        "import sys; from bootseer.stripefs import open_fs\n"
        "with open_fs(sys.argv[1]).create('b', striped=True, unit=4096, width=3) as out: out.write(b'newer')"
    )
    env = {**os.environ, "BOOTSEER_FAULTS": "stripefs.write.cleanup=kill"}
    assert forked.run("-c", code, fs.url, env=env).returncode == -9
    assert not check.fsck(fs.backend).errors
    assert repair.repair(fs.backend, check.fsck(fs.backend)) == []
    assert not local(fs, "a").exists()
    assert content(fs, "b") == b"newer"
    collect.gc(fs.backend, age=0)
    assert len(list(local(fs, "").rglob("*.*"))) == WIDTH + 1  # its stripes and their folder


def test_a_write_that_fails_at_its_end_leaves_no_mark(fs, monkeypatch):
    write(fs, "a")
    before = sorted(local(fs, "").rglob("*"))

    def fail(*args, **options):
        raise NotWritableError("no")

    writer = fs.create("a", striped=True)
    monkeypatch.setattr(fs.backend, "rename", fail)
    with pytest.raises(NotWritableError):
        writer.finish()
    assert sorted(local(fs, "").rglob("*")) == before


def test_garbage_that_cannot_be_removed_is_no_reason_to_leave_the_rest(fs, monkeypatch):
    names = [f".tmp-{digit * 32}" for digit in "abc"]
    for name in names:
        fs.backend.create(name).close()
    real = type(fs.backend).delete

    def delete(self, path):
        if path == names[1]:
            raise NotWritableError(f"cannot delete {path}: permission denied")
        real(self, path)

    monkeypatch.setattr(type(fs.backend), "delete", delete)
    made = collect.gc(fs.backend, age=0)
    assert [bool(removal.kept) for removal in made] == [False, True, False]
    assert "permission denied" in made[1].kept
    assert [entry.name for entry in fs.backend.list("")] == [names[1]]


def torn(fs: StripeFS, uuid: str) -> None:
    """The stripes and the temporary file of a writer that was killed."""
    local(fs, ".bsx").mkdir(parents=True, exist_ok=True)
    for index in range(2):
        local(fs, f".bsx/{uuid}.{index}").write_bytes(b"half")
    local(fs, f".tmp-{uuid}").write_bytes(b"")


def uuids(count: int) -> list[str]:
    return [f"{number:032x}" for number in range(count)]


def test_many_sets_are_collected_with_few_listings(fs, monkeypatch):
    monkeypatch.setattr(collect, "_BATCH", 25, raising=False)
    write(fs, "f")
    for uuid in uuids(60):
        torn(fs, uuid)
    listed: list[str] = []
    read: list[str] = []
    for seen, name in ((listed, "list"), (read, "open")):
        real = getattr(fs.backend, name)

        def noted(path, seen=seen, real=real, **more):
            seen.append(path)
            return real(path, **more)

        monkeypatch.setattr(fs.backend, name, noted)
    assert [removal.kept for removal in collect.gc(fs.backend, age=0)] == [""] * 120
    assert len(listed) == 4 + 2 * 3  # fsck and the survey, each with the stripes; twice for each batch of 25
    assert read.count("f") == 2
    assert check.fsck(fs.backend).findings == ()
    assert content(fs, "f") == DATA


def test_a_pointer_without_a_version_is_read_again(fs, monkeypatch):
    write(fs, "f")
    real, alike = fs.backend.list, {"version": "", "mtime": 1.0, "size": 270}
    monkeypatch.setattr(fs.backend, "list", lambda path: [entry._replace(**alike) for entry in real(path)])
    known = scan.folder(fs.backend, "")
    write(fs, "f")
    again = scan.folder(fs.backend, "", known=known)
    assert again.entries["f"] == known.entries["f"]
    assert again.pointers["f"].uuid == fs.stat("f").uuid != known.pointers["f"].uuid


@pytest.mark.parametrize("how", ["published", "cannot be fenced"])
def test_one_of_a_batch_that_is_no_garbage_after_all_comes_back(fs, monkeypatch, how):
    write(fs, "f")
    uuid = fs.stat("f").uuid
    local(fs, "f").rename(local(fs, f".tmp-{uuid}"))  # a writer that sleeps before its rename
    for other in uuids(6):
        torn(fs, other)
    real, tried = type(fs.backend).delete, []

    def delete(self, path):
        if path == f".tmp-{uuid}" and not tried:
            tried.append(path)
            raise NotWritableError(f"cannot delete {path}: permission denied")
        real(self, path)

    def point(name: str) -> None:
        if name == "stripefs.gc.aside":
            assert not list(local(fs, ".bsx").glob(f"{uuid}.*"))
            if how == "published":
                local(fs, f".tmp-{uuid}").rename(local(fs, "f"))
        if name == "stripefs.gc.fenced" and how != "published":
            local(fs, f".tmp-{uuid}").rename(local(fs, "f"))

    monkeypatch.setattr(faults, "point", point)
    if how != "published":
        monkeypatch.setattr(type(fs.backend), "delete", delete)
    made = [removal for removal in collect.gc(fs.backend, age=0) if removal.kind == "unreferenced-stripes"]
    assert [bool(removal.kept) for removal in made if uuid in removal.path] == [True]
    assert [removal.kept for removal in made if uuid not in removal.path] == [""] * 6
    assert content(fs, "f") == DATA
    collect.gc(fs.backend, age=0)
    assert check.fsck(fs.backend).findings == ()


def test_a_published_set_that_cannot_be_renamed_back_is_an_error_and_mended(fs, monkeypatch, caplog):
    write(fs, "f")
    uuid = fs.stat("f").uuid
    local(fs, "f").rename(local(fs, f".tmp-{uuid}"))
    real = fs.backend.rename

    def point(name: str) -> None:
        if name == "stripefs.gc.aside":
            local(fs, f".tmp-{uuid}").rename(local(fs, "f"))

    def rename(src: str, dst: str, *, overwrite: bool) -> None:
        if scan.TRASH in src:
            raise UnavailableError("no answer")
        real(src, dst, overwrite=overwrite)

    monkeypatch.setattr(faults, "point", point)
    monkeypatch.setattr(fs.backend, "rename", rename)
    with pytest.raises(UnavailableError):
        collect.gc(fs.backend, age=0)
    assert "is still set aside" in caplog.text
    monkeypatch.undo()
    assert all(made.done for made in repair.repair(fs.backend, check.fsck(fs.backend)))
    assert content(fs, "f") == DATA


@pytest.mark.parametrize("when", ["set aside", "fence", "look", "back"])
def test_a_batch_is_renamed_back_when_the_storage_is_silent(fs, monkeypatch, caplog, when):
    for uuid in uuids(3):
        torn(fs, uuid)
    before = sorted(local(fs, ".bsx").iterdir())
    asked = {"set aside": "rename", "fence": "delete", "look": "list", "back": "list"}[when]
    where = {"set aside": f".bsx/{uuids(3)[2]}.1", "fence": f".tmp-{uuids(3)[1]}"}.get(when, "")
    begun: list[str] = []
    refused = f"{scan.TRASH}{uuids(3)[0]}.0"

    def point(name: str) -> None:
        begun.append(name)

    for name in ("rename", "delete", "list"):
        real = getattr(fs.backend, name)

        def silent(path, *more, name=name, real=real, **flags):
            aside = "stripefs.gc.aside" in begun
            if name == asked and path == where and (aside or when == "set aside"):
                raise UnavailableError("no answer")
            if when == "back" and name == "rename" and path.endswith(refused):
                raise NotWritableError("permission denied")
            return real(path, *more, **flags)

        monkeypatch.setattr(fs.backend, name, silent)
    monkeypatch.setattr(faults, "point", point)
    with pytest.raises(UnavailableError):
        collect.gc(fs.backend, age=0)
    left = {path.stem for path in before if not path.exists()}
    assert left == ({uuids(3)[0]} if when == "back" else set())
    said = [record.getMessage() for record in caplog.records if "still set aside" in record.getMessage()]
    assert len(said) == len(left)
    monkeypatch.undo()
    collect.gc(fs.backend, age=0)
    assert check.fsck(fs.backend).findings == ()


def test_whole_sets_cost_one_listing_more_for_all_of_them(fs, monkeypatch):
    for number in range(5):
        write(fs, f"f{number}")
        local(fs, f"f{number}").unlink()
    real, listed = fs.backend.list, []
    monkeypatch.setattr(fs.backend, "list", lambda path: listed.append(path) or real(path))
    assert kinds(fs) == ["lost-pointer"] * 5
    assert len(listed) == 4


def test_ages_do_not_grow_with_the_time_of_the_scan(fs, monkeypatch):
    """What a writer touched just before a long listing is young after it."""
    write(fs, "lost")
    local(fs, "lost").unlink()
    walk = scan.walk

    def slow(*args):
        yield from walk(*args)
        time.sleep(1.5)

    monkeypatch.setattr(scan, "walk", slow)
    assert all(finding.age < 1.0 for finding in check.fsck(fs.backend, "").findings)


def test_a_broken_footer_is_not_read_whole():
    class Tail(Source):
        def __init__(self) -> None:
            self.size, self.version = 1 << 30, ""

        def read(self, offset: int, length: int) -> bytes:
            assert length <= 64 << 10
            return b"\xff" * length

        def readinto(self, offset, parts) -> None:
            for part in parts:
                part[:] = self.read(offset, len(part))

        def close(self) -> None:
            pass

    with pytest.raises(DataError, match="footer"):
        scan.read_footer(Tail(), "s.0", UNIT)


def damages(pointer: bytes, mask: int) -> Iterator[bytes]:
    """Every flip of a byte by ``mask``, and every truncation."""
    for position in range(len(pointer)):
        flipped = bytearray(pointer)
        flipped[position] ^= mask
        yield bytes(flipped)
        yield pointer[:position]


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_a_damaged_pointer_is_never_a_plain_file_and_costs_no_stripe(fs, mask):
    with fs.create("f", striped=True, unit=UNIT, width=1) as out:
        out.write(DATA)
    (stripe_file,) = local(fs, ".bsx").iterdir()
    for broken in damages(local(fs, "f").read_bytes(), mask):
        local(fs, "f").write_bytes(broken)
        with pytest.raises(DataError):
            content(fs, "f")
        assert check.fsck(fs.backend).errors, broken
        assert check.fsck(fs.backend, "f").errors, broken
        collect.gc(fs.backend, age=0)
        assert stripe_file.exists(), broken


def test_nothing_takes_what_is_left_of_a_pointer_for_the_file(fs, tmp_path):
    write(fs, "f")
    os.truncate(local(fs, "f"), 0)
    for take in (
        lambda: fs.get("f", tmp_path / "got"),
        fs.verify,
        lambda: copy_file(fs, "f", fs, "g"),
        lambda: fs.append("f"),
    ):
        with pytest.raises(DataError, match="the pointer f is damaged"):
            take()
    with pytest.raises(OSError, match="the pointer f is damaged"):
        StripeFileSystem(url=fs.url).cp_file("f", "g")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_what_is_left_of_a_pointer_is_not_committed(fs):
    write(fs, "step-1/f")
    os.truncate(local(fs, "step-1/f"), 0)
    with pytest.raises(DataError, match="the pointer step-1/f is damaged"):
        fs.commit("step-1")
    (mended,) = repair.repair(fs.backend, check.fsck(fs.backend))
    fs.rename(mended.path, "step-1/f")  # as the hint says
    assert [(file.path, file.size) for file in fs.commit("step-1").files] == [("f", len(DATA))]


@pytest.mark.parametrize("remnant", [b"", b"boot", bytes(290)])
def test_stripes_stay_when_a_file_may_be_left_of_their_pointer(fs, remnant):
    """They are no older version of the next file of that name."""
    write(fs, "f")
    fs.rename("f", "g")  # the headers still say f
    write(fs, "f", DATA[:UNIT])
    local(fs, "g").write_bytes(remnant)
    assert kinds(fs) == ["kept-stripes"]
    assert collect.gc(fs.backend, age=0) == []


@pytest.mark.parametrize("remnant", [b"", b"boot", bytes(290)])
def test_small_files_that_only_look_like_what_is_left_of_a_pointer(fs, remnant):
    for path in ("d/small", "beside/small"):
        with fs.create(path) as out:
            out.write(remnant)
    write(fs, "beside/f")
    assert content(fs, "d/small") == content(fs, "beside/small") == remnant
    assert check.fsck(fs.backend).findings == ()


def test_an_empty_file_is_opened_without_a_look_into_the_others(fs, monkeypatch):
    def count(self, path: str, **kwargs: bool) -> Source:
        opened.append(path)
        return real(self, path, **kwargs)

    write(fs, "f")
    for index in range(10):
        fs.create(f"empty-{index}").finish()
    real, opened = type(fs.backend).open, list[str]()
    monkeypatch.setattr(type(fs.backend), "open", count)
    assert content(fs, "empty-0") == b""
    assert set(opened) == {"empty-0", "f"}


def test_an_empty_file_whose_name_other_stripes_say_is_empty(fs):
    write(fs, "f")
    fs.rename("f", "g")
    uuid = fs.stat("g").uuid
    fs.create("f").finish()
    assert content(fs, "f") == b""
    local(fs, "g").rename(local(fs, f".tmp-{uuid}"))  # as of a writer that replaced f and was killed
    assert content(fs, "f") == b""
    local(fs, f".tmp-{uuid}").unlink()
    with pytest.raises(DataError, match="the pointer f is damaged"):
        content(fs, "f")


def older_version(fs: StripeFS) -> list[Path]:
    """The stripes of a whole older version of f, beside a newer one."""
    write(fs, "f")
    kept = {path: path.read_bytes() for path in local(fs, ".bsx").iterdir()}
    write(fs, "f", DATA[::-1])
    for path, data in kept.items():
        path.write_bytes(data)
    return list(kept)


@pytest.mark.parametrize("broken", ["", "stripe", "footer", "pointer", "trash"])
def test_an_older_version_is_garbage_only_beside_a_sound_newer_one(fs, broken):
    old = older_version(fs)
    local(fs, "iteration.txt").write_bytes(b"200")  # short, and no part of a pointer
    marker = local(fs, f".tmp-{old[0].stem}")
    if broken == "stripe":
        stripe(fs, "f", 1).unlink()
    elif broken == "footer":
        marker.write_bytes(b"")
        flip(stripe(fs, "f", 1), -30)
    elif broken == "pointer":
        marker.write_bytes(b"")
        flip(local(fs, "f"), local(fs, "f").read_bytes().index(b'"uuid"') + 10)
    elif broken == "trash":
        flip(local(fs, "f"), 60)
        for path in old:
            path.rename(path.with_name(f"{scan.TRASH}{path.name}"))
    before = sorted(local(fs, "").rglob("*"))
    collect.gc(fs.backend, age=0)
    if broken:
        assert sorted(local(fs, "").rglob("*")) == before
        assert "kept-stripes" in kinds(fs)
    else:
        assert not any(path.exists() for path in old)
        assert check.fsck(fs.backend).findings == ()


def test_a_commit_that_cannot_be_read_may_list_an_older_version(fs):
    older_version(fs)
    write(fs, "d/g")
    fs.backend.make_folder("e")
    fs.commit("d")
    before = sorted(local(fs, "").rglob("*"))
    local(fs, "COMMIT").write_bytes(local(fs, "d/COMMIT").read_bytes()[:-3])
    for _ in range(2):
        assert {removal.kind for removal in collect.gc(fs.backend, age=0)} == set()
        assert "kept-stripes" in kinds(fs)
        inner = open_fs(f"{fs.url}/d")
        assert collect.gc(inner.backend, age=0) == []
    local(fs, "COMMIT").unlink()
    assert sorted(local(fs, "").rglob("*")) == before
    collect.gc(fs.backend, age=0)
    assert sorted(local(fs, "").rglob("*")) != before


def test_stripes_whose_file_was_replaced_by_a_plain_one_with_other_tools_are_no_garbage(fs):
    write(fs, "f")
    uuid = fs.stat("f").uuid
    local(fs, "f").write_bytes(b"plain")
    assert collect.gc(fs.backend, age=0) == []
    assert (only(fs).kind, only(fs).path) == ("lost-pointer", f"recovered-{uuid}")
    assert content(fs, "f") == b"plain"
    assert repair.repair(fs.backend, check.fsck(fs.backend))[0].done
    assert content(fs, f"recovered-{uuid}") == DATA
