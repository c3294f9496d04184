"""What a striped store promises, held against each kind of storage."""

import contextlib
import os
import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bootseer.backends.fsspec import FsspecBackend
from bootseer.backends.interface import read_all
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, UnsupportedError
from bootseer.stripefs import open_fs
from bootseer.stripefs.store import StripeFS
from support import hadoop
from support.objectserver import BUCKET, ObjectServer
from support.stripes import content

DATA = os.urandom(700_001)


@pytest.fixture(scope="module")
def server():
    with ObjectServer() as started:
        yield started


@pytest.fixture
def memory():
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["folder", "memory", "local", "dir", "s3", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def fs(request, tmp_path, memory) -> StripeFS:
    name = uuid.uuid4().hex
    if request.param == "s3":
        return StripeFS(FsspecBackend(f"s3://{BUCKET}/{name}", request.getfixturevalue("server").options))
    if request.param == "dir":
        target = {"target_protocol": "file", "target_options": {"auto_mkdir": True}}
        return StripeFS(FsspecBackend("dir://store", {"path": str(tmp_path), **target}))
    if request.param == "hdfs":
        return open_fs(f"{hadoop.shared().url}/{name}")
    return open_fs({"folder": "", "memory": "memory://base", "local": "local://"}[request.param] + f"{tmp_path}/store")


def protocols(fs: StripeFS) -> frozenset[str]:
    return fs.backend.protocols if isinstance(fs.backend, FsspecBackend) else frozenset()


def objects(fs: StripeFS) -> bool:
    return isinstance(fs.backend, FsspecBackend) and fs.backend.objects()


def write(fs: StripeFS, path: str, data: bytes = DATA, **options: int) -> None:
    with fs.create(path, striped=True, **{"unit": 65536, **options}) as out:
        out.write(data)


def names(fs: StripeFS, folder: str) -> list[str]:
    return [entry.name for entry in fs.backend.list(folder)]


def test_files_of_all_kinds(fs, tmp_path):
    for name, size in {"empty": 0, "small": 1000, "large": len(DATA)}.items():
        write(fs, f"d/{name}", DATA[:size], width=3)
        with fs.create(f"d/{name}-plain") as out:
            out.write(DATA[:size])
        assert content(fs, f"d/{name}") == content(fs, f"d/{name}-plain") == DATA[:size]
    assert [(stat.path, stat.size, stat.striped) for stat in fs.ls("d")] == [
        ("d/empty", 0, True),
        ("d/empty-plain", 0, False),
        ("d/large", len(DATA), True),
        ("d/large-plain", len(DATA), False),
        ("d/small", 1000, True),
        ("d/small-plain", 1000, False),
    ]
    assert all(stat.version == fs.stat(stat.path).version != "" for stat in fs.ls("d"))
    with fs.open("d/large") as file:
        for offset in (0, 1, 65535, 65536, 400_000, len(DATA) - 10):
            assert file.read(offset, 10) == DATA[offset : offset + 10]
    assert fs.get("d/large", tmp_path / "back") == len(DATA)
    assert (tmp_path / "back").read_bytes() == DATA
    assert len(fs.verify("")) == 6


def test_large_files_are_striped_where_they_are_put(fs, tmp_path):
    (tmp_path / "large").write_bytes(DATA * 14)
    (tmp_path / "small").write_bytes(DATA)
    for name in ("large", "small"):
        fs.put(tmp_path / name, f"d/{name}", width=3)
        assert content(fs, f"d/{name}") == (tmp_path / name).read_bytes()
    assert [stat.striped for stat in fs.ls("d")] == [True, False]


def test_replacing_removing_renaming(fs):
    write(fs, "d/f")
    write(fs, "d/f", DATA[::-1])
    assert content(fs, "d/f") == DATA[::-1]
    assert len(names(fs, "d/.bsx")) == 4
    fs.rename("d/f", "d/g")
    fs.rename("d/g", "e/h")
    assert content(fs, "e/h") == DATA[::-1]
    with fs.append("e/h") as out:
        out.write(b"tail")
    assert content(fs, "e/h") == DATA[::-1] + b"tail"
    write(fs, "e/f")
    with pytest.raises(NotWritableError):
        fs.rename("e/f", "e/h", overwrite=False)
    fs.rename("e/f", "e/h")
    assert content(fs, "e/h") == DATA
    fs.backend.put("e/plain", b"x", overwrite=False)  # a folder of an object store needs something in it
    fs.remove("e/h")
    assert [name for name in names(fs, "e") if name != ".bsx"] == ["plain"]
    with pytest.raises(NotFoundError):
        fs.open("e/h")


def test_missing_names(fs):
    write(fs, "d/f")
    for ask in (fs.stat, fs.open, fs.ls, fs.remove):
        with pytest.raises(NotFoundError):
            ask("d/none")
    with pytest.raises(NotFoundError, match="file"):
        fs.backend.list("d/f")
    fs.backend.delete("d/none")
    fs.backend.remove_folder("none")


def test_names_in_the_way(fs):
    write(fs, "d/f", b"x")
    with pytest.raises(NotWritableError, match="folder"):
        fs.create("d")
    with pytest.raises(NotFoundError, match="folder"):
        fs.open("d")
    if not objects(fs):
        with pytest.raises(BootseerError):
            write(fs, "d/f/g", b"x")


def test_checkpoints(fs):
    write(fs, "step-1/f")
    with pytest.raises(NotFoundError):
        fs.latest("")
    write(fs, "step-2/f")
    fs.commit("step-1")
    with pytest.raises(NotWritableError, match="has a COMMIT already"):
        fs.commit("step-1")
    assert fs.latest("") == "step-1"
    assert fs.checkpoint("step-1").size == len(DATA)
    with pytest.raises(DataError) as caught:
        fs.checkpoint("step-2")
    said = "checkpoint step-2 has no COMMIT: its save did not finish; use `bootseer fs ls --latest`"
    assert (str(caught.value), caught.value.exit_code) == (said, 65)
    with pytest.raises(NotFoundError, match="no checkpoint step-3"):
        fs.checkpoint("step-3")


def test_an_overtaken_writer_gives_up(fs):
    write(fs, "f")
    late = fs.create("f", striped=True, unit=65536)
    late.write(DATA)
    write(fs, "f", b"two" * 50_000)
    with pytest.raises(NotWritableError, match="another writer"):
        late.finish()
    assert content(fs, "f") == b"two" * 50_000
    assert len(names(fs, ".bsx")) == 4


def test_an_ended_writer_publishes_nothing(fs):
    """Its temporary file is gone: there is nothing to put in place."""
    late = fs.create("f", striped=True, unit=65536)
    late.write(DATA)
    # as a later save does, after the last look of this one
    late._before = lambda pointer: [fs.backend.delete(name) for name in names(fs, "") if name.startswith(".tmp-")]
    with pytest.raises(BootseerError):
        late.finish()
    with pytest.raises(NotFoundError):
        fs.stat("f")


def test_an_abandoned_write_leaves_nothing(fs):
    with contextlib.suppress(ZeroDivisionError), fs.create("d/f", striped=True, unit=65536) as out:
        out.write(DATA)
        raise ZeroDivisionError
    with pytest.raises(NotFoundError, match="no file d/f"):
        fs.open("d/f")
    try:
        left = names(fs, "d/.bsx")
    except NotFoundError:
        left = []
    assert left == []


def test_damage_is_seen(fs):
    write(fs, "f")
    stripe = f".bsx/{names(fs, '.bsx')[0]}"
    whole = bytearray(read_all(fs.backend, stripe, limit=1 << 30))
    whole[5000] ^= 1
    fs.backend.put(stripe, bytes(whole), overwrite=True)
    with pytest.raises(DataError, match="damaged"):
        content(fs, "f")


def test_folders_on_the_way(fs):
    fs.backend.make_folder("a/b")
    if not protocols(fs) & {"s3"}:  # an object store has no empty folders
        assert fs.stat("a/b").is_dir
        fs.backend.make_folder("a/b")
    write(fs, "a/b/f")
    assert fs.stat("a").is_dir
    fs.backend.remove_folder("a")
    with pytest.raises(NotFoundError):
        fs.stat("a")
    if objects(fs):
        write(fs, "a/b/f")
        with pytest.raises(UnsupportedError, match="object store has no folders"):
            fs.rename("a", "c")
        fs.remove_tree("a")  # which does not need that
        with pytest.raises(NotFoundError):
            fs.stat("a")
