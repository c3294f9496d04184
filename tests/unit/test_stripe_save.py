"""Saves, their claims, and what may not be written into a folder that is a checkpoint already."""

import shutil
from pathlib import Path

import pytest

from bootseer import faults
from bootseer.errors import DataError, NotWritableError
from bootseer.stripefs import layout, open_fs
from bootseer.stripefs.checkpoint.claim import Save
from bootseer.stripefs.files.copy import copy_tree
from bootseer.stripefs.fsspec.filesystem import StripeFileSystem
from bootseer.stripefs.store import StripeFS


@pytest.fixture
def fs(tmp_path) -> StripeFS:
    return open_fs(str(tmp_path / "store"))


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


@pytest.mark.parametrize("base", ["", "A", "A/sub"])
def test_a_commit_is_seen_from_any_base(fs, base):
    save = fs.save("A")
    with save.create("sub/conf") as out:
        out.write(b"x")
    digest = save.commit().files[0].digest
    inner = open_fs(f"{fs.url}/{base}")
    name = "A/sub/conf".removeprefix(base).strip("/")
    assert inner.committed_digest(name) == digest
    for path in (name, "A/sub/new".removeprefix(base).strip("/")):
        with pytest.raises(NotWritableError, match="has a COMMIT already"):
            inner.refuse_committed(path)
    fs.refuse_committed("B/x")


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
