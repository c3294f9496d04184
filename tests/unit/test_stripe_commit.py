"""COMMIT: what makes a folder a checkpoint, and which is the newest."""

import os
import shutil
from pathlib import Path

import pytest
from crc32c import crc32c

from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, UnavailableError
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.store import StripeFS
from support.waits import together


def save(fs: StripeFS, folder: str, seed: bytes = b"x", *, finish: bool = True) -> None:
    with fs.create(f"{folder}/state.pt", striped=True, unit=4096, width=2) as out:
        out.write(seed * 20000)
    with fs.create(f"{folder}/sub/config.json") as out:
        out.write(seed)
    if finish:
        fs.commit(folder)


def test_a_commit_lists_files_sizes_and_digests(fs):
    save(fs, "step-1")
    found = fs.checkpoint("step-1")
    assert [(file.path, file.size, bool(file.uuid)) for file in found.files] == [
        ("state.pt", 20000, True),
        ("sub/config.json", 1, False),
    ]
    assert found.size == 20001
    for file in found.files:
        assert file.digest == commit.digest_of(fs.backend, f"step-1/{file.path}")


def test_the_first_commit_wins(fs):
    save(fs, "step-2", finish=False)

    def race(number: int) -> bool:
        try:
            fs.commit("step-2")
        except NotWritableError:
            return False
        return True

    assert together(race, range(8)).count(True) == 1
    assert not list(Path(fs.url).rglob(".tmp-*"))


def test_nothing_to_commit(fs):
    (Path(fs.url) / "empty").mkdir(parents=True)
    with pytest.raises(DataError, match="no files"):
        fs.commit("empty")
    with pytest.raises(NotFoundError):
        fs.commit("none")
    save(fs, "step-1")
    with pytest.raises(BootseerError, match="is a file"):
        fs.commit("step-1/state.pt")


def test_a_text_with_a_right_crc_that_is_no_utf8_is_damaged(fs):
    save(fs, "step-1")
    path = Path(fs.url) / "step-1/COMMIT"
    line, body, _ = path.read_bytes().splitlines(keepends=True)
    text = line + body.replace(b"st", b"\xff\xff")
    path.write_bytes(text + b"crc32c %08x\n" % crc32c(text))
    with pytest.raises(DataError, match="COMMIT is damaged"):
        fs.checkpoint("step-1")


@pytest.mark.parametrize("how", ["replaced", "removed", "plain-changed"])
def test_a_file_changed_after_commit_is_seen(fs, how):
    save(fs, "step-1")
    if how == "replaced":
        with fs.create("step-1/state.pt", striped=True, unit=4096, width=2) as out:
            out.write(b"x" * 20000)
    elif how == "removed":
        fs.remove("step-1/state.pt", force=True)
    else:
        (Path(fs.url) / "step-1/sub/config.json").write_bytes(b"longer")
    with pytest.raises(DataError, match=r"after COMMIT|lacks state\.pt"):
        fs.checkpoint("step-1")


def test_verify_finds_a_plain_file_of_a_checkpoint_that_changed_in_place(fs):
    save(fs, "step-1")
    fs.verify("")
    (Path(fs.url) / "step-1/sub/config.json").write_bytes(b"y")
    fs.checkpoint("step-1")  # same size: only reading sees it
    with pytest.raises(DataError, match="digest"):
        fs.verify("")


def test_latest_is_by_number_and_walks_back_to_a_complete_one(fs, caplog):
    for step in (9, 10, 100):
        save(fs, f"runs/step-{step}")
    save(fs, "runs/step-200", finish=False)
    assert fs.latest("runs") == "runs/step-100"
    assert "step-200 has no COMMIT" in caplog.text
    (Path(fs.url) / "runs/step-100/COMMIT").write_bytes(b"bootseer checkpoint 1\n")
    assert fs.latest("runs") == "runs/step-10"
    fs.remove("runs/step-10/state.pt", force=True)
    assert fs.latest("runs") == "runs/step-9"


def test_latest_without_numbers_is_the_one_committed_last(fs):
    for name in ("b", "c", "a"):
        save(fs, name)
    os.utime(Path(fs.url) / "b")  # as after a removal in it: times of folders say nothing
    assert fs.latest("") == "a"
    fs.remove("a/state.pt", force=True)
    assert fs.latest("") == "c"


def test_latest_of_nothing(fs):
    with pytest.raises(NotFoundError, match="no folder"):
        fs.latest("")
    save(fs, "runs/step-1", finish=False)
    with pytest.raises(NotFoundError, match="no complete checkpoint in runs"):
        fs.latest("runs")
    with pytest.raises(NotFoundError, match="is a file"):
        fs.latest("runs/step-1/state.pt")


def test_latest_does_not_go_back_because_the_store_is_silent(fs, monkeypatch):
    save(fs, "step-1")
    save(fs, "step-2")

    def silent(backend, folder):
        raise UnavailableError("no answer")

    monkeypatch.setattr(commit, "check", silent)
    with pytest.raises(UnavailableError):
        fs.latest("")


def test_hidden_names_are_not_listed(fs):
    save(fs, "step-1")
    (Path(fs.url) / "step-1/.tmp-left").write_bytes(b"")
    assert [stat.path for stat in fs.ls("step-1")] == ["step-1/COMMIT", "step-1/state.pt", "step-1/sub"]
    assert fs.files("") == ["step-1/COMMIT", "step-1/state.pt", "step-1/sub/config.json"]


@pytest.mark.parametrize("how", ["one", "all", "short"])
def test_a_checkpoint_without_its_stripes_is_not_complete(fs, how):
    save(fs, "step-1")
    save(fs, "step-2")
    stripes = Path(fs.url, "step-2/.bsx")
    last = next(stripes.glob("*.0"))
    if how == "one":
        last.unlink()
    elif how == "all":
        shutil.rmtree(stripes)
    else:
        last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(DataError, match="lacks its stripe" if how != "short" else "bytes of"):
        fs.checkpoint("step-2")
    assert fs.latest("") == "step-1"


def test_the_stripes_of_a_folder_are_listed_once(fs, monkeypatch):
    for name in "abc":
        with fs.create(f"step-1/{name}", striped=True, unit=4096, width=2) as out:
            out.write(b"x" * 20000)
    fs.commit("step-1")
    listed = []
    real = type(fs.backend).list
    monkeypatch.setattr(type(fs.backend), "list", lambda self, path: listed.append(path) or real(self, path))
    fs.checkpoint("step-1")
    assert listed == ["step-1/.bsx"]


def test_latest_while_retention_removes_checkpoints(fs, monkeypatch):
    for name in ("a", "b", "c"):
        save(fs, name)
    real = commit.read

    def read(backend, folder):
        if folder == "b" and Path(fs.url, "b").exists():
            fs.remove_tree("b")
        return real(backend, folder)

    monkeypatch.setattr(commit, "read", read)
    assert fs.latest("") == "c"
