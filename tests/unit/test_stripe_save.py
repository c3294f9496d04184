"""Saves, their claims, and what may not be written into a folder that is a checkpoint already."""

import shutil
from pathlib import Path

import pytest

from bootseer.errors import NotWritableError
from bootseer.stripefs import open_fs
from bootseer.stripefs.fs import StripeFS
from bootseer.stripefs.save import Save


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
