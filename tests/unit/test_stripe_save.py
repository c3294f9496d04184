"""Saves, their claims, and what may not be written into a folder that is a checkpoint already."""

import shutil
import uuid
from pathlib import Path

import pytest

from bootseer import faults
from bootseer.backends import fsspec
from bootseer.backends.interface import Entry
from bootseer.errors import DataError, NotWritableError
from bootseer.fsspecfs.filesystem import StripeFileSystem
from bootseer.stripefs import layout, open_fs
from bootseer.stripefs.checkpoint.claim import Save
from bootseer.stripefs.copy import copy_tree
from bootseer.stripefs.store import StripeFS


def put(save: Save, name: str, seed: bytes = b"x") -> None:
    with save.create(name, striped=True, unit=4096, width=2) as out:
        out.write(seed * 20000)


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_save_does_not_outlive_its_folder(fs, how):
    save = fs.save("step-1")
    put(save, "a")
    if how == "removed":
        fs.remove_tree("step-1")
    else:
        fs.rename("step-1", "old-1")
    with pytest.raises(NotWritableError, match="lost its folder"):
        put(save, "b")
    with pytest.raises(NotWritableError, match="lost its folder"):
        save.commit()
    assert not Path(fs.url, "step-1/COMMIT").exists()


def test_a_save_whose_number_was_given_again_publishes_nothing(fs):
    old = fs.save("step-1")
    put(old, "a")
    shutil.rmtree(Path(fs.url, "step-1"))
    new = fs.save("step-1")
    assert new.epoch == old.epoch
    put(new, "a", b"n")
    with pytest.raises(NotWritableError, match="lost its folder"):
        old.commit()
    put(new, "b", b"n")
    assert [file.path for file in new.commit().files] == ["a", "b"]


def test_a_save_is_joined_only_where_there_is_one(fs):
    Path(fs.url, "f").mkdir(parents=True)
    with pytest.raises(NotWritableError, match="no save 7 of f"):
        fs.save("f", epoch=7)
    begun = fs.save("f")
    put(fs.save("f", epoch=begun.epoch), "a")
    assert [file.path for file in begun.commit().files] == ["a"]


def checkpoint(fs: StripeFS, folder: str, seed: bytes, extra: str = "") -> None:
    save = fs.save(folder)
    put(save, "a", seed)
    with save.create("conf") as out:
        out.write(seed)
    if extra:
        put(save, extra, seed)
    save.commit()


def tree(fs: StripeFS) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(fs.url).rglob("*") if path.is_file()}


def test_a_copy_over_a_checkpoint_is_refused_before_its_first_file(fs):
    checkpoint(fs, "A", b"a")
    checkpoint(fs, "B", b"b")
    before = tree(fs)
    for flags in ({}, {"resume": True}):
        with pytest.raises(NotWritableError, match="has a COMMIT already"):
            copy_tree(fs, "A", fs, "B", **flags)
        assert tree(fs) == before
    copy_tree(fs, "A", fs, "B", force=True)
    assert [file.digest for file in fs.checkpoint("B").files] == [file.digest for file in fs.checkpoint("A").files]
    fs.verify("")


def test_an_import_in_place_leaves_the_files_of_a_checkpoint_alone(fs):
    folder = Path(fs.url, "ck")
    folder.mkdir(parents=True)
    folder.joinpath("model").write_bytes(b"m" * layout.PLAIN_BELOW)
    fs.commit("ck")
    folder.joinpath("later").write_bytes(b"l" * layout.PLAIN_BELOW)
    made = copy_tree(fs, "ck", fs, "ck")
    assert {copied.path: bool(copied.skipped) for copied in made} == {"ck/later": False, "ck/model": True}
    fs.checkpoint("ck")
    fs.verify("ck")


def test_a_plain_file_that_is_not_what_was_committed_does_not_replace_a_good_copy(fs):
    checkpoint(fs, "A", b"a")
    copy_tree(fs, "A/conf", fs, "copy")
    Path(fs.url, "A/conf").write_bytes(b"X")
    with pytest.raises(DataError, match="does not have its digest"):
        copy_tree(fs, "A/conf", fs, "copy")
    assert Path(fs.url, "copy").read_bytes() == b"a"
    assert not list(Path(fs.url).rglob(".tmp-*"))


def test_fsspec_does_not_write_into_a_checkpoint(fs):
    checkpoint(fs, "A", b"a")
    put_outside = Path(fs.url, "x")
    put_outside.write_bytes(b"x")
    there = StripeFileSystem(url=fs.url)
    for attempt in (
        lambda: there.pipe_file("A/conf", b"y"),
        lambda: there.pipe_file("A/sub/new", b"y"),
        lambda: there.cp_file("x", "A/conf"),
        lambda: there.mv("x", "A/conf"),
        lambda: there.open("A/a", "ab").close(),
    ):
        with pytest.raises(PermissionError, match="has a COMMIT already"):
            attempt()
    fs.verify("A")


def test_a_claim_that_was_lost_before_it_was_used_is_not_taken_for_anothers(fs, monkeypatch):
    def point(name: str) -> None:
        if name == "stripefs.save.claim" and not others:
            others.append(None)
            shutil.rmtree(Path(fs.url, "f"))
            others.append(fs.save("f"))

    others: list = []
    monkeypatch.setattr(faults, "point", point)
    with pytest.raises(NotWritableError, match="lost its folder"):
        fs.save("f")
    put(others[1], "a")
    others[1].commit()


def test_a_checkpoint_is_not_replaced_by_one_that_is_not_whole(fs):
    checkpoint(fs, "A", b"a")
    checkpoint(fs, "B", b"b")
    Path(fs.url, "A/conf").unlink()
    before = tree(fs)
    with pytest.raises(DataError, match="lacks conf"):
        copy_tree(fs, "A", fs, "B", force=True)
    assert tree(fs) == before


def committed(made) -> list[str]:
    return [file.path for file in made.files]


def test_what_a_killed_save_left_is_not_committed_by_the_next_one(fs, caplog):
    killed = fs.save("step-1")
    for name in ("rank-0", "rank-1", "sub/rank-2"):
        put(killed, name)
    save = fs.save("step-1")
    put(save, "rank-0", b"n")
    assert committed(save.commit()) == ["rank-0"]
    assert "step-1/rank-1 was not written by this save" in caplog.text
    assert "step-1/sub/rank-2 was not written by this save" in caplog.text
    fs.verify("step-1")


def test_what_a_save_wrote_again_is_committed_where_versions_are_not_told(monkeypatch):
    def sizes_only(name: str, info: dict[str, object]) -> Entry:
        return real(name, {key: info[key] for key in ("size", "type")})

    real = fsspec.entry_of
    monkeypatch.setattr(fsspec, "entry_of", sizes_only)
    fs = open_fs(f"memory://{uuid.uuid4().hex}")
    for seed in (b"a", b"b"):
        save = fs.save("f")
        with save.create("plain") as out:
            out.write(seed)
    assert committed(save.commit()) == ["plain"]


def test_what_was_in_the_folder_before_its_first_save_is_committed(fs):
    with fs.create("step-1/tokenizer") as out:
        out.write(b"t")
    save = fs.save("step-1")
    put(save, "rank-0")
    assert committed(save.commit()) == ["rank-0", "tokenizer"]
    with fs.create("step-2/tokenizer") as out:
        out.write(b"t")
    put(fs.save("step-2"), "rank-0")
    assert committed(fs.commit("step-2")) == ["rank-0", "tokenizer"]  # who says commit says everything


def test_a_copy_of_a_checkpoint_lists_only_what_that_lists(fs):
    checkpoint(fs, "A", b"a")
    with fs.create("B/left") as out:
        out.write(b"of an earlier copy")
    copy_tree(fs, "A", fs, "B")
    assert committed(fs.checkpoint("B")) == ["a", "conf"]


def test_a_commit_ends_the_writes_of_its_own_save(fs):
    save = fs.save("step-1")
    put(save, "a")
    late = [fs.save("step-1", epoch=save.epoch).create("a"), save.create("a")]
    for out in late:
        out.write(b"late")
    assert committed(save.commit()) == ["a"]
    for out in late:
        with pytest.raises(NotWritableError, match="has a COMMIT already"):
            out.finish()
    fs.verify("step-1")


def test_a_writer_that_passed_its_checks_before_a_commit_publishes_nothing_after_it(fs, monkeypatch):
    save = fs.save("step-1")
    put(save, "a", b"first")
    mine = fs.save("step-1", epoch=save.epoch)
    real = faults.point

    def point(name: str) -> None:
        real(name)
        if name == "stripefs.write.rename":
            monkeypatch.setattr(faults, "point", real)
            save.commit()

    monkeypatch.setattr(faults, "point", point)
    with pytest.raises(NotWritableError, match="another writer"):
        put(mine, "a", b"second")
    fs.checkpoint("step-1")
    fs.verify("step-1")


def test_a_save_is_committed_by_who_began_it(fs):
    begun = fs.save("f")
    joined = fs.save("f", epoch=begun.epoch)
    put(joined, "a")
    with pytest.raises(NotWritableError, match="begun by another process"):
        joined.commit()
    assert committed(begun.commit()) == ["a"]


@pytest.mark.parametrize("claimed", [False, True])
def test_a_commit_that_failed_may_be_tried_again(fs, monkeypatch, claimed):
    def refuse(made) -> None:
        raise OSError("not yet")

    put(fs.save("f"), "left")
    save = fs.save("f")
    put(save, "a")
    if claimed:
        monkeypatch.setenv("BOOTSEER_FAULTS", "stripefs.save.claim=eio")
    with pytest.raises(OSError, match=r"stripefs\.save\.claim" if claimed else "not yet"):
        save.commit(before=refuse)
    monkeypatch.delenv("BOOTSEER_FAULTS", raising=False)
    with pytest.raises(NotWritableError, match="is being committed"):
        put(save, "b")
    assert committed(save.commit()) == ["a"]


def test_a_file_that_is_still_being_written_is_not_committed(fs, monkeypatch):
    def unfinished(self, path, *, pinned=False):
        source = real(self, path, pinned=pinned)
        source.unfinished = path.endswith("log")
        return source

    save = fs.save("f")
    put(save, "a")
    Path(fs.url, "f/log").write_bytes(b"half of it")
    real = type(fs.backend).open
    monkeypatch.setattr(type(fs.backend), "open", unfinished)
    with pytest.raises(NotWritableError, match="f/log is still being written"):
        save.commit()
    with pytest.raises(NotWritableError, match="f/log is still being written"):
        fs.commit("f")
    monkeypatch.undo()
    assert committed(fs.commit("f")) == ["a", "log"]


@pytest.mark.parametrize("how", ["grown", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_committed(fs, how):
    save = fs.save("f")
    put(save, "a")
    log = Path(fs.url, "f/log")
    log.write_bytes(b"one")

    def change(made) -> None:
        if how == "grown":
            log.write_bytes(b"one two")
        elif how == "replaced":
            log.with_name(".other").write_bytes(b"two")
            log.with_name(".other").replace(log)
        else:
            log.unlink()

    with pytest.raises(NotWritableError, match="f/log was changed while its checkpoint was committed"):
        save.commit(before=change)
    with pytest.raises(DataError, match="no COMMIT"):
        fs.checkpoint("f")
    assert not list(Path(fs.url).rglob(".tmp-*"))


def test_a_claim_that_could_not_be_written_still_counts(fs, monkeypatch):
    """Else its number is free again when a later save has the next one, and nothing ends the save before both."""
    first = fs.save("f")
    put(first, "a")
    real = type(fs.backend).create

    def create(self, path, **flags):
        sink = real(self, path, **flags)
        if path == "f/.bsx/save.2":
            sink.write = lambda data: (later.append(fs.save("f")), 1 / 0)
        return sink

    later: list = []
    monkeypatch.setattr(type(fs.backend), "create", create)
    with pytest.raises(ZeroDivisionError):
        fs.save("f")
    monkeypatch.undo()
    assert later[0].epoch == 3
    with pytest.raises(NotWritableError, match="overtaken"):
        put(first, "b")
    with pytest.raises(NotWritableError, match="overtaken"):
        first.commit()
    put(later[0], "a", b"n")
    assert committed(later[0].commit()) == ["a"]


def test_a_commit_sees_any_later_claim(fs):
    first = fs.save("f")
    put(first, "a")
    fs.save("f")
    later = fs.save("f")
    Path(fs.url, "f/.bsx/save.2").unlink()  # by hand: no code of ours does it
    with pytest.raises(NotWritableError, match="overtaken"):
        first.commit()
    put(later, "a")
    later.commit()
