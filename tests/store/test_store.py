"""Stores in a folder and over fsspec: publications that fail, and what cannot be opened. What every store promises:
`test_promises.py`."""

import errno
import os
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from bootseer.errors import (
    BootseerError,
    ConfigError,
    FullError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.kernel import libc
from bootseer.objects import open_store


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOTSEER_FAULTS", "store.put.before-sync=enospc")
    store = open_store(str(tmp_path))
    with pytest.raises(FullError, match="free some space"):
        store.put("a/k", b"x")
    assert [path for path in Path(tmp_path).rglob("*") if path.is_file()] == []


def test_a_store_that_is_a_file_cannot_be_written(tmp_path):
    (tmp_path / "s").write_text("in the way")
    with pytest.raises((NotWritableError, NotFoundError)) as caught:
        open_store(str(tmp_path / "s")).put("a", b"x")
    assert str(tmp_path / "s") in str(caught.value)


@pytest.mark.root
def test_a_read_only_store_is_said(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(tmp_path)], check=True)
    try:
        with pytest.raises(NotWritableError, match="read-only"):
            open_store(str(tmp_path)).put("a", b"x")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_an_unknown_protocol_is_one_line():
    with pytest.raises(UnsupportedError, match="nosuch"):
        open_store("nosuch://x")


@pytest.mark.parametrize("name", ["registry", "hdfs", "memory"])
def test_a_folder_may_be_named_like_a_protocol(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    open_store(name).put("k", b"x")
    assert (tmp_path / name / "k").read_bytes() == b"x"


def test_no_store_given():
    with pytest.raises(ConfigError, match="BOOTSEER_STORE"):
        open_store("")


def test_a_folder_store_ends_at_links(tmp_path):
    """A link to a folder leads to what is not the store's."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_bytes(b"not ours")
    store = open_store(str(tmp_path / "store"))
    store.put("a/b", b"x")
    (tmp_path / "store/link").symlink_to(tmp_path / "other")
    (tmp_path / "store/a/loop").symlink_to(".")
    assert [info.key for info in store.list("")] == ["a/b"]
    (tmp_path / "store/folder").mkdir()
    with pytest.raises(NotWritableError, match="a folder is in the way"):
        store.put("folder", b"x", overwrite=True)


class TestFsspec:
    def test_opening_touches_no_network_and_shows_no_password(self):
        store = open_store("ftp://user:hunter2@127.0.0.1:1/x")
        for call in (lambda: store.get("a", most=1 << 30), lambda: store.put("a", b""), lambda: list(store.list(""))):
            with pytest.raises(BootseerError) as caught:
                call()
            assert "hunter2" not in str(caught.value)
            assert caught.value.__cause__ is None

    def test_what_is_missing_is_said_without_the_password(self, tmp_path):
        store = open_store(f"memory://user:hunter2@{uuid.uuid4().hex}")
        with pytest.raises(NotFoundError, match=r"no object a in store memory://\*\*\*@") as caught:
            store.get("a", most=1 << 30)
        assert "hunter2" not in str(caught.value)
        assert "hunter2" not in store.shown
        with pytest.raises(BootseerError) as failed:
            store.put("a", tmp_path / "none")
        assert "hunter2" not in str(failed.value)

    def test_in_place_protocols_write_beside(self, tmp_path, monkeypatch):
        import fsspec.implementations.local as local

        store = open_store(f"local://{tmp_path}/s")
        assert store.put("k/a", b"1")
        assert not store.put("k/a", b"2")
        assert store.get("k/a", most=1 << 30) == b"1"
        monkeypatch.setattr(local.LocalFileSystem, "mv", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "no")))
        with pytest.raises(BootseerError):
            store.put("k/b", b"3")
        assert [info.key for info in store.list("k")] == ["k/a"]
        assert sorted(path.name for path in (tmp_path / "s/k").iterdir()) == ["a"]

    def test_protocols_that_cannot_rename_in_one_step_are_refused(self, tmp_path):
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        fsspec.register_implementation("copying", type("Copying", (LocalFileSystem,), {"protocol": "copying"}))
        with pytest.raises(UnsupportedError, match="cannot publish"):
            open_store(f"copying://{tmp_path}/s").put("a", b"1")
        assert list(tmp_path.iterdir()) == []


class TestFolder:
    def test_no_permission_is_an_error_of_ours(self, tmp_path, monkeypatch):
        store = open_store(str(tmp_path / "s"))
        store.put("a", b"12345")

        def refused(*_, **__):
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr(libc, "open_without_links", refused)
            for call in (lambda: store.stat("a"), lambda: store.put("b", b"")):
                with pytest.raises(NotWritableError):
                    call()

    def test_a_handle_that_went_stale_may_be_opened_again(self, tmp_path, monkeypatch):
        store = open_store(str(tmp_path / "s"))
        store.put("a", b"12345")

        def stale(*_):
            raise OSError(errno.ESTALE, "Stale file handle")

        with store.open("a") as reader, monkeypatch.context() as patch:
            patch.setattr(os, "pread", stale)
            with pytest.raises(UnavailableError):
                reader.read(0, 5)

    def test_what_killed_writers_left_is_removed(self, tmp_path):
        (tmp_path / "s").mkdir()
        for name, age in ((".tmp-old", 100_000), (".tmp-new", 10), ("old", 100_000)):
            (tmp_path / "s" / name).write_bytes(b"")
            os.utime(tmp_path / "s" / name, (time.time() - age,) * 2)
        open_store(str(tmp_path / "s")).put("a", b"")
        assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [".tmp-new", "a", "old"]
