"""Renaming: an acknowledged write beside it stays, and stripes go with the last file that names them."""

import contextlib
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from bootseer import faults
from bootseer.backends.folder import FolderBackend
from bootseer.backends.interface import Entry, Permissions
from bootseer.errors import DataError, NotFoundError, NotWritableError
from bootseer.stripefs import layout
from bootseer.stripefs.files.reader import read_pointer
from bootseer.stripefs.maintenance import check, collect
from bootseer.stripefs.store import StripeFS
from support.stripes import content

OLD, NEW = b"old." * 9000, b"new!" * 9000


def write(fs: StripeFS, path: str, data: bytes = OLD) -> None:
    with fs.create(path, striped=True, unit=4096, width=3) as out:
        out.write(data)


def stripes(fs: StripeFS, folder: str = "") -> int:
    return len(list(Path(fs.url, folder, ".bsx").iterdir()))


def at(monkeypatch, names: tuple[str, ...], act) -> None:
    """Call ``act`` at each fault point that begins with one of ``names``."""
    real = faults.point

    def point(name: str) -> None:
        real(name)
        if name.startswith(tuple(f"stripefs.{wanted}" for wanted in names)):
            act()

    monkeypatch.setattr(faults, "point", point)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_write_that_was_acknowledged_while_a_file_got_its_name_stays(fs, monkeypatch, replaces):
    def act() -> None:
        if Path(fs.url, "src").exists():
            return  # before the rename
        written.append(b"%d" % len(written) * 20000)
        write(fs, "dst", written[-1])

    written: list[bytes] = []
    write(fs, "src", NEW)
    if replaces:
        write(fs, "dst")
    at(monkeypatch, ("rename.",), act)
    fs.rename("src", "dst")
    monkeypatch.undo()
    assert written
    assert content(fs, "dst") == written[-1]
    assert stripes(fs) == 3
    assert check.fsck(fs.backend).findings == ()


@pytest.mark.parametrize("point", ["write.verify", "move.remove"])
def test_a_write_that_was_acknowledged_while_a_file_moved_to_another_folder_stays(fs, monkeypatch, point):
    def act() -> None:
        monkeypatch.undo()
        write(fs, "a/f", NEW)

    write(fs, "a/f")
    at(monkeypatch, (point,), act)
    with pytest.raises(NotWritableError, match="a/f was written while it was moved"):
        fs.rename("a/f", "b/f")
    assert content(fs, "a/f") == NEW
    if point == "move.remove":  # the version before was there already
        assert content(fs, "b/f") == OLD
    else:
        with pytest.raises(NotFoundError):
            fs.stat("b/f")
    assert check.fsck(fs.backend).findings == ()


@pytest.mark.parametrize("tool", ["ours", "another"])
@pytest.mark.parametrize("end", ["removed", "replaced", "renamed over"])
def test_the_stripes_of_a_renamed_file_go_with_it(fs, tool, end):
    write(fs, "a")
    write(fs, "other", NEW)
    Path(fs.url, "note").write_text("plain")
    if tool == "ours":
        fs.rename("a", "b")
    else:
        Path(fs.url, "a").rename(Path(fs.url, "b"))
    assert content(fs, "b") == OLD
    assert check.fsck(fs.backend).findings == ()
    if end == "removed":
        fs.remove("b")
    elif end == "replaced":
        write(fs, "b", NEW)
    else:
        fs.rename("other", "b")
    assert stripes(fs) == (6 if end == "replaced" else 3)
    assert check.fsck(fs.backend).findings == ()


@pytest.mark.parametrize("end", ["removed", "replaced", "renamed over"])
def test_stripes_stay_for_the_other_files_that_name_them(fs, end):
    write(fs, "a")
    shutil.copy(Path(fs.url, "a"), Path(fs.url, "copy"))
    fs.rename("a", "b")  # which leaves no file of the name that both pointers say
    if end == "removed":
        fs.remove("copy")
    elif end == "replaced":
        write(fs, "copy", NEW)
    else:
        write(fs, "other", NEW)
        fs.rename("other", "copy")
    assert content(fs, "b") == OLD
    assert not list(Path(fs.url).glob(".tmp-*"))
    fs.remove("b")
    assert stripes(fs) == (0 if end == "removed" else 3)


def taken(fs, end):
    """The file ``b`` has its end."""
    if end == "removed":
        fs.remove("b")
    elif end == "replaced":
        write(fs, "b", NEW)
    elif end == "moved":
        fs.rename("b", "d/b")
    else:
        write(fs, "other", NEW)
        fs.rename("other", "b")


@pytest.mark.parametrize("epoch", [0, 2**64 - 2, 2**64 - 1, 2**64])
def test_a_forged_pointer_can_be_replaced_whatever_its_number(fs, epoch):
    write(fs, "a")
    forged = msgspec.structs.replace(read_pointer(fs.backend, "a"), epoch=epoch)
    Path(fs.url, "a").write_bytes(layout.encode_pointer(forged))
    for data in (NEW, OLD):
        write(fs, "a", data)
        assert content(fs, "a") == data


@pytest.mark.parametrize("size", ["same", "other"])
@pytest.mark.parametrize("end", ["removed", "replaced", "renamed over", "moved"])
def test_a_forged_pointer_takes_no_stripes_of_another_file_along(fs, end, size):
    """It may say whatever name it wants, and whose stripes it has."""
    write(fs, "a")
    found = read_pointer(fs.backend, "a")
    forged = msgspec.structs.replace(found, name="b", epoch=found.epoch + (100 if size == "other" else 0))
    Path(fs.url, "b").write_bytes(layout.encode_pointer(forged))
    taken(fs, end)
    assert content(fs, "a") == OLD
    assert not list(Path(fs.url).glob(".tmp-*"))
    fs.remove("a")
    assert stripes(fs) == (3 if end in ("replaced", "renamed over") else 0)


@pytest.mark.parametrize("end", ["removed", "replaced", "renamed over"])
@pytest.mark.parametrize("names", [True, False])
def test_stripes_that_belong_to_another_user_stay(fs, monkeypatch, end, names):
    """Their own pointer may not be here: it is not published yet, or lost."""

    def told(self: FolderBackend, path: str) -> Entry:
        victim = path.startswith(f".bsx/{found.uuid}.")
        names_of = (("alice" if victim else "bob"), "users") if names else None
        return real(self, path)._replace(permissions=Permissions(1 + victim, 1, 0o644, owner=names_of))

    write(fs, "a")
    found, real = read_pointer(fs.backend, "a"), FolderBackend.stat
    Path(fs.url, "b").write_bytes(layout.encode_pointer(msgspec.structs.replace(found, name="b")))
    Path(fs.url, "a").rename(Path(fs.url).parent / "a")
    monkeypatch.setattr(FolderBackend, "stat", told)
    taken(fs, end)
    monkeypatch.undo()
    collect.gc(fs.backend, age=0)
    (Path(fs.url).parent / "a").rename(Path(fs.url, "a"))
    assert content(fs, "a") == OLD


@pytest.mark.parametrize("end", ["removed", "replaced", "renamed over", "moved"])
def test_a_forged_pointer_takes_no_stripes_of_a_write_along_that_is_not_published(fs, monkeypatch, end):
    def act() -> None:
        monkeypatch.undo()
        (stripe,) = Path(fs.url, ".bsx").glob("*.0")
        forged = layout.Pointer(
            uuid=stripe.name[:32], size=1, unit=4096, width=3, footers=(0, 0, 0), digest="", epoch=1, name="b"
        )
        Path(fs.url, "b").write_bytes(layout.encode_pointer(forged))
        with contextlib.suppress(DataError):  # a move reads it
            taken(fs, end)

    at(monkeypatch, ("write.rename",), act)
    write(fs, "a")
    assert content(fs, "a") == OLD


def test_no_file_is_read_twice_while_a_folder_is_emptied(fs, monkeypatch):
    read, real = list[str](), FolderBackend.open
    for number in range(9):
        write(fs, f"f{number}")
    monkeypatch.setattr(FolderBackend, "open", lambda self, path, **more: read.append(path) or real(self, path, **more))
    for number in range(9):
        fs.remove(f"f{number}")
    assert stripes(fs) == 0
    assert max(Counter(read).values()) <= 3  # itself, when it goes, and once as a neighbour
    assert not list(Path(fs.url).glob(".tmp-*"))


@pytest.mark.parametrize("end", ["removed", "replaced", "renamed over"])
def test_a_removal_among_many_files_reads_hardly_any_of_them(fs, monkeypatch, end):
    """Each rank of a job removes or replaces its own file, and all of them have names and sizes of one length."""
    ranks = 64
    for number in range(ranks):
        write(fs, f"f{number:02}", bytes([number]) * 9000)
    write(fs, "b")
    read, real = list[str](), FolderBackend.open
    monkeypatch.setattr(FolderBackend, "open", lambda self, path, **more: read.append(path) or real(self, path, **more))
    taken(fs, end)
    assert len([path for path in read if path.startswith("f")]) <= ranks // 8


def test_the_length_of_a_pointer_says_whose_stripes_it_may_name(fs):
    """Under any name, and with any other values."""
    write(fs, "a")
    found = read_pointer(fs.backend, "a")
    for change in ({}, {"name": "another"}, {"size": 1 << 40}, {"epoch": 10**9}, {"width": 200, "footers": (1,) * 200}):
        other = msgspec.structs.replace(found, **change)
        encoded = layout.encode_pointer(other)
        assert layout.may_name(len(encoded), found), change
    whole = layout.encode_pointer(found)
    for torn in (whole[:-3], whole[:512], whole + b"\n"):
        assert layout.may_name(len(torn), found)
    stranger = layout.encode_pointer(
        msgspec.structs.replace(found, uuid=f"{int(found.uuid[:8], 16) ^ 1:08x}{'0' * 24}")
    )
    assert not layout.may_name(len(stranger), found)


def test_a_file_renamed_over_a_copy_of_its_pointer(fs):
    write(fs, "a")
    shutil.copy(Path(fs.url, "a"), Path(fs.url, "copy"))
    fs.rename("copy", "a")
    assert content(fs, "a") == OLD
    assert sorted(path.name for path in Path(fs.url).iterdir()) == [".bsx", "a"]


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_stripes_stay_beside_a_damaged_pointer_that_may_name_them(fs, how):
    write(fs, "a")
    shutil.copy(Path(fs.url, "a"), Path(fs.url, "b"))
    whole = Path(fs.url, "a").read_bytes()
    Path(fs.url, "a").write_bytes(whole[:-3])
    if how == "removed":
        fs.remove("b")
    else:
        write(fs, "b", NEW)
    collect.gc(fs.backend, age=0)
    assert stripes(fs) == (3 if how == "removed" else 6)
    Path(fs.url, "a").write_bytes(whole)
    assert content(fs, "a") == OLD
    Path(fs.url, "a").unlink()
    collect.gc(fs.backend, age=0)
    assert stripes(fs) == (0 if how == "removed" else 3)
    assert check.fsck(fs.backend).findings == ()


@pytest.mark.parametrize("how", ["write", "rename"])
def test_a_file_that_is_renamed_just_before_it_is_replaced_keeps_its_stripes(fs, monkeypatch, how):
    def act() -> None:
        monkeypatch.undo()
        fs.rename("latest", "kept")

    write(fs, "latest")
    write(fs, "next", NEW)
    at(monkeypatch, ("write.rename", "rename.rename"), act)
    if how == "write":
        write(fs, "latest", NEW)
    else:
        fs.rename("next", "latest")
    assert content(fs, "kept") == OLD
    assert content(fs, "latest") == NEW
    assert check.fsck(fs.backend).findings == ()


@pytest.mark.parametrize("end", ["removed", "replaced", "renamed over"])
def test_a_damaged_pointer_that_names_others_keeps_no_stripes(fs, end):
    for name in ("a", "other", "damaged"):
        write(fs, name)
    Path(fs.url, "damaged").write_bytes(Path(fs.url, "damaged").read_bytes()[:-3])
    Path(fs.url, "a").rename(Path(fs.url, "b"))
    if end == "removed":
        fs.remove("b")
    elif end == "replaced":
        write(fs, "b", NEW)
    else:
        fs.rename("other", "b")
    assert stripes(fs) == (9 if end == "replaced" else 6)
    assert not list(Path(fs.url).glob(".tmp-*"))


@pytest.mark.parametrize("case", ["own", "shared", "another's folder", "not told", "another name"])
def test_a_file_goes_without_a_look_at_all_others_whoever_can_have_put_it_there(fs, monkeypatch, case):
    def told(self: FolderBackend, path: str) -> Entry:
        mode, uid = (0o777 if case == "shared" else 0o755, int(case == "another's folder")) if not path else (0o644, 0)
        return real_stat(self, path)._replace(permissions=None if case == "not told" else Permissions(uid, 0, mode))

    read, real, real_stat = set[str](), FolderBackend.open, FolderBackend.stat
    for name in ("a", "b"):
        write(fs, name)
    shutil.copy(Path(fs.url, "a"), Path(fs.url, "copy"))
    notes = {f"note{number}" for number in range(32)}
    for name in notes:
        Path(fs.url, name).write_text("plain")
    if case == "another name":
        Path(fs.url, "a").rename(Path(fs.url, "c"))
    monkeypatch.setattr(FolderBackend, "open", lambda self, path, **more: read.add(path) or real(self, path, **more))
    monkeypatch.setattr(FolderBackend, "stat", told)
    write(fs, "c" if case == "another name" else "a", NEW)
    monkeypatch.undo()
    assert not notes & read
    assert (content(fs, "copy"), content(fs, "b"), stripes(fs)) == (OLD, OLD, 9)
