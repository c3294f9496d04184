"""Stores that fsspec reaches: object stores (real s3fs against a small S3 server), and what each cannot.

What all promise: `tests/store/test_stripefs.py`.
"""

import errno
import functools
import os
import subprocess
import sys
import threading
import time

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from bootseer.backends import fsspec as fsspec_storage
from bootseer.backends.fsspec import FsspecBackend
from bootseer.backends.interface import read_all
from bootseer.errors import (
    BootseerError,
    DataError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.fsspecfs.filesystem import StripeFileSystem
from bootseer.fsspecfs.paths import PROTOCOLS
from bootseer.objects.on_backend import ObjectStore
from bootseer.stripefs import open_fs
from bootseer.stripefs.store import StripeFS
from support import forked
from support.objectserver import BUCKET, ObjectServer
from support.stripes import content
from support.waits import together

DATA = os.urandom(700_001)


@pytest.fixture
def memory():
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def started():
    with ObjectServer() as server:
        yield server


@pytest.fixture
def server(started) -> ObjectServer:
    started.objects.clear()
    started.log.clear()
    return started


@pytest.fixture(params=["memory", "local", "dir", "s3"])
def fs(request, tmp_path, memory) -> StripeFS:
    if request.param == "memory":
        return open_fs("memory://base/store")
    if request.param == "local":
        return open_fs(f"local://{tmp_path}/store")
    if request.param == "dir":
        target = {"target_protocol": "file", "target_options": {"auto_mkdir": True}}
        return StripeFS(FsspecBackend("dir://store", {"path": str(tmp_path), **target}))
    server = request.getfixturevalue("server")
    return StripeFS(FsspecBackend(f"s3://{BUCKET}/base", server.options))


def write(fs: StripeFS, path: str, data: bytes = DATA, **options: int) -> None:
    with fs.create(path, striped=True, **{"unit": 65536, **options}) as out:
        out.write(data)


def test_one_of_many_claims_a_name(fs):
    won, lost, start = [], [], threading.Barrier(6)

    def claim(number):
        start.wait()
        try:
            sink = fs.backend.create(".tmp-claim")
            won.append(number)
            sink.close()
        except FileExistsError:
            lost.append(number)

    if not fs.backend.objects():
        pytest.skip("only a store that takes conditions decides this")
    together(claim, range(6))
    assert (len(won), len(lost)) == (1, 5)


def test_a_plain_file_replaced_while_it_is_read_is_an_error(fs, monkeypatch):
    monkeypatch.setattr(fsspec_storage, "SMALL", 1000)
    with fs.create("f") as out:
        out.write(DATA)
    with fs.open("f") as file:
        assert file.read(0, 100) == DATA[:100]
        time.sleep(0.01)  # stores tell times of a millisecond
        with fs.create("f") as out:
            out.write(DATA[::-1])
        with pytest.raises(DataError, match="was replaced"):
            file.read(100, 100)


def test_a_small_file_is_read_whole_while_it_is_replaced_again_and_again(fs):
    if not fs.backend.objects():
        pytest.skip("files of a folder are not put at once")
    versions = [bytes([number]) * (100 + number) for number in range(20)]
    fs.backend.put("f", versions[0], overwrite=True)
    stop = threading.Event()

    def replace():
        while not stop.is_set():
            for version in versions:
                fs.backend.put("f", version, overwrite=True)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(50):
            assert read_all(fs.backend, "f", limit=1000) in versions
    finally:
        stop.set()
        writer.join(30)


# Object stores


@pytest.fixture
def s3(server) -> StripeFS:
    return StripeFS(FsspecBackend(f"s3://{BUCKET}/base", server.options))


def test_a_pointer_is_one_put_of_its_name(s3, server):
    write(s3, "f")
    server.log.clear()
    write(s3, "f", DATA[::-1])
    assert [entry for entry in server.log if entry[1] == "base/f" and entry[0] != "HEAD"].count(("PUT", "base/f")) == 1
    assert not [key for key in server.objects if ".tmp-" in key]


def test_large_stripes_are_uploaded_in_parts_and_abandoned_ones_are_not_left(s3, server, monkeypatch):
    monkeypatch.setattr(fsspec_storage, "BLOCK", 5 << 20)
    data = os.urandom(13 << 20)
    out = s3.create("f", width=2)
    out.write(data * 2)
    out.abandon()
    assert not server.uploads
    assert [method for method, _ in server.log].count("POST") == 2  # begun, not completed and removed again
    assert not [key for key in server.objects if ".bsx" in key]
    with s3.create("f", width=2) as out:
        out.write(data)
    assert ("POST", next(key for key in server.objects if ".bsx" in key)) in server.log
    assert content(s3, "f") == data


@pytest.mark.parametrize("kind", ["terse", "ignoring"])
def test_servers_that_know_less(kind):
    with ObjectServer(**{kind: True}) as server:
        backend = FsspecBackend(f"s3://{BUCKET}/base", server.options)
        backend.put("a", b"one", overwrite=False)
        seen, backend.stat = backend.stat, lambda path: seen("none")  # as if it came after the look
        if kind == "terse":
            with pytest.raises(BootseerError):
                backend.put("a", b"two", overwrite=False)
        del backend.stat
        with pytest.raises(FileExistsError):
            backend.put("a", b"two", overwrite=False)
        assert server.objects["base/a"].data == b"one"


def test_a_put_whose_answer_was_lost_is_not_another_writers(s3, server, monkeypatch):
    s3.backend.put("t", b"manifest", overwrite=True)
    put = FsspecBackend.put

    def twice(self, path, data, *, overwrite):
        put(self, path, data, overwrite=overwrite)
        put(self, path, data, overwrite=overwrite)

    monkeypatch.setattr(FsspecBackend, "put", twice)
    s3.backend.rename("t", "COMMIT", overwrite=False)
    assert server.objects["base/COMMIT"].data == b"manifest"
    assert "base/t" not in server.objects


def test_a_silent_store_is_an_error_in_time(s3, server, monkeypatch):
    write(s3, "f")
    monkeypatch.setattr(fsspec_storage, "DEADLINE", 0.3)
    monkeypatch.setattr(FsspecBackend.call, "__defaults__", (0.3,))
    server.silent.set()
    started = time.monotonic()
    for ask in (s3.stat, functools.partial(ObjectStore(s3.url, s3.backend).get, most=100)):
        with pytest.raises(UnavailableError, match="no answer within"):
            ask("f")
    assert time.monotonic() - started < 10
    server.silent.clear()
    monkeypatch.undo()
    assert content(s3, "f") == DATA


def test_s3_through_the_file_system(server):
    url = f"bsx+s3://{BUCKET}/base"
    for name in PROTOCOLS:
        fsspec.register_implementation(name, StripeFileSystem, clobber=True)
    with fsspec.open(f"{url}/d/x", "wb", unit=65536, **server.options) as out:
        out.write(DATA)
    fs, path = fsspec.url_to_fs(f"{url}/d/x", **server.options)
    assert fs.cat(path) == DATA
    assert fs.unstrip_protocol(path) == f"{url}/d/x"
    fs.mv(f"{url}/d", f"{url}/e")  # file by file: there is no folder to rename
    assert fs.find(f"{url}/") == [f"/{BUCKET}/base/e/x"]
    assert fs.cat(f"{url}/e/x") == DATA
    fs.rm(f"{url}/e", recursive=True)
    assert not server.objects


def test_the_command_line_on_s3(server, tmp_path):
    """What the URL does not say, the environment of fsspec does (docs/howto/fsspec.md)."""
    (tmp_path / "in").write_bytes(DATA * 8)
    settings = {"FSSPEC_S3_ENDPOINT_URL": server.url, "FSSPEC_S3_KEY": "k", "FSSPEC_S3_SECRET": "s"}

    for args in (("put", f"{tmp_path}/in", f"s3://{BUCKET}/d/x"), ("get", f"s3://{BUCKET}/d/x", f"{tmp_path}/out")):
        command = [sys.executable, "-m", "bootseer.cli.main", "fs", *args]  # fsspec reads it when it is loaded
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_bytes() == DATA * 8


KILLED = """
import sys
from bootseer.stripefs import StripeFS
from bootseer.backends.fsspec import FsspecBackend
options = {"endpoint_url": sys.argv[1], "key": "k", "secret": "s", "client_kwargs": {"region_name": "here"}}
with StripeFS(FsspecBackend("s3://bucket/base", options)).create("f", striped=True, unit=65536) as out:
    out.write(b"new!" * 90_000)
"""


@pytest.mark.parametrize(("point", "published"), [("put", False), ("delete", True)])
def test_kill_9_leaves_the_old_version_or_the_new(s3, server, point, published):
    write(s3, "f")
    environ = {**os.environ, "BOOTSEER_FAULTS": f"stripefs.objects.{point}=kill"}
    assert forked.run("-c", KILLED, server.url, env=environ).returncode == -9
    assert content(s3, "f") == (b"new!" * 90_000 if published else DATA)
    write(s3, "f", b"next")
    assert content(s3, "f") == b"next"


FORKED = """
import os, sys
from bootseer.fsspecfs.filesystem import StripeFileSystem
from bootseer.fsspecfs.paths import PROTOCOLS
fs = StripeFileSystem(url="s3://bucket/base", endpoint_url=sys.argv[1], key="k", secret="s",
                      client_kwargs={"region_name": "here"})
data = fs.cat("x")
child = os.fork()
if not child:
    assert fs.cat("x") == data
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert fs.cat("x") == data
"""


def test_a_forked_child_has_connections_of_its_own(s3, server):
    write(s3, "x")
    subprocess.run([sys.executable, "-c", FORKED, server.url], check=True, timeout=60)


# What cannot work


def test_unknown_protocols_and_stores_that_cannot_publish(monkeypatch):
    with pytest.raises(UnsupportedError, match="cannot open store nosuch://"):
        open_fs("nosuch://x")
    with pytest.raises(UnsupportedError, match="write it like hdfs://"):
        open_fs("hfds://n:8020/x")
    readable = StripeFS(FsspecBackend("reference://", {"fo": {"version": 1, "refs": {"f": "text", "folder/g": "x"}}}))
    assert content(readable, "f") == b"text"
    removed: list[object] = []
    monkeypatch.setattr(type(readable.backend._filesystem()[0]), "rm", lambda *args, **flags: removed.append(args))
    monkeypatch.setattr(type(readable.backend._filesystem()[0]), "rm_file", lambda *args: removed.append(args))
    for attempt in (
        lambda: write(readable, "g"),
        lambda: readable.remove("f"),
        lambda: readable.remove_tree("folder"),
        lambda: readable.remove_tree("folder", force=True),
        lambda: readable.backend.remove_folder("folder"),
    ):
        with pytest.raises(UnsupportedError, match="cannot publish a file at once"):
            attempt()
    assert not removed


class Failing(MemoryFileSystem):
    error: BaseException = OSError()

    def info(self, path, **kwargs):
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(), NotFoundError),
        (NotADirectoryError(), NotFoundError),
        (PermissionError(errno.EACCES, "no"), NotWritableError),
        (TimeoutError("slow"), UnavailableError),
        (ConnectionRefusedError(errno.ECONNREFUSED, "no"), UnavailableError),
        (OSError("of a library that has no number for it"), UnavailableError),
        (RuntimeError("token=secret://user:pass@host"), UnavailableError),
    ],
)
def test_errors_of_stores(error, kind, monkeypatch):
    monkeypatch.setattr(Failing, "error", error)
    fsspec.register_implementation("failing", Failing, clobber=True)
    with pytest.raises(kind) as found:
        FsspecBackend("failing://me:password@x").stat("f")
    assert "pass@" not in str(found.value)
    assert "password" not in str(found.value)


class Listed(LocalFileSystem):
    """Of these fsspec lists what is below a folder by itself."""

    protocol = "listed"
    error: BaseException = OSError()

    def ls(self, path, detail=False, **kwargs):
        if path.endswith("/images"):
            raise self.error
        return super().ls(path, detail, **kwargs)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError(errno.EACCES, "no"), NotWritableError),
        (ConnectionResetError(errno.ECONNRESET, "no"), UnavailableError),
        (OSError("of a library that has no number for it"), UnavailableError),
        (FileNotFoundError(), None),
    ],
)
def test_a_folder_that_cannot_be_listed_is_no_empty_one(error, kind, tmp_path, monkeypatch):
    """Else what collects takes a store whose images it was not shown for one that has none."""
    monkeypatch.setattr(Listed, "error", error)
    fsspec.register_implementation("listed", Listed, clobber=True)
    for name in ("images/a", "blobs/b"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    backend = FsspecBackend(f"listed://{tmp_path}")
    if kind is None:
        assert [path for path, _ in backend.walk("")] == ["blobs/b"]
        return
    with pytest.raises(kind):
        list(backend.walk(""))


def test_a_store_that_says_less_is_said_so_once(memory, monkeypatch, caplog):
    info = MemoryFileSystem.info
    monkeypatch.setattr(
        MemoryFileSystem,
        "info",
        lambda self, path, **kwargs: {k: v for k, v in info(self, path).items() if k != "created"},
    )
    fs = open_fs("memory://base")
    fs.backend.put("f", b"x", overwrite=True)
    for _ in range(2):
        fs.open("f").close()
    assert caplog.text.count("neither times nor tags") == 1


def test_a_folder_goes_though_another_removes_its_manifest_meanwhile(fs, monkeypatch):
    for name in ("run/a", "run/sub/COMMIT", "run/sub/b"):
        write(fs, name)
    below = fs.backend.call("look", lambda found: found)
    real = below.find

    def find(path, *more, **flags):
        found = real(path, *more, **flags)
        monkeypatch.setattr(below, "find", real)
        below.rm_file(fs.backend.full("run/sub/COMMIT"))
        return found

    monkeypatch.setattr(below, "find", find)
    fs.backend.remove_folder("run", first=("COMMIT",))
    with pytest.raises(NotFoundError):
        fs.backend.stat("run")


def test_a_finished_checkpoint_is_whole_until_all_of_it_goes(fs):
    save = fs.save("run/step-1")
    for name in ("a", "sub/b"):
        with save.create(name, striped=True, unit=65536) as out:
            out.write(DATA)
    save.commit()
    backend = fs.backend
    inner = StripeFS(FsspecBackend(f"{backend._location}/run/step-1/sub", backend._options))
    assert inner.committed_digest("b") == fs.stat("run/step-1/sub/b").digest
    for attempt in (
        lambda: fs.remove("run/step-1/a"),
        lambda: fs.rename("run/step-1/sub/b", "b"),
        lambda: inner.remove("b"),
        lambda: inner.refuse_committed("new"),
    ):
        with pytest.raises(NotWritableError, match=r"checkpoint .*/run/step-1"):
            attempt()
    fs.verify("run")
    assert fs.latest("run") == "run/step-1"
    fs.remove_tree("run/step-1")
    with pytest.raises(NotFoundError):
        fs.stat("run/step-1")


def test_a_folder_goes_alone_whatever_signs_its_name_has(fs):
    """Those of patterns: fsspec's own ``rm`` takes every folder that matches."""
    for folder in ("run?1", "run11", "run[1]", "run1", "s*", "step"):
        for name in ("f", "below/f?"):
            write(fs, f"{folder}/{name}")
    for folder in ("run?1", "run[1]", "s*"):
        fs.remove_tree(folder)
    assert {path.partition("/")[0] for path, _ in fs.backend.walk("")} == {"run11", "run1", "step"}
    assert {entry.name for entry in fs.backend.list("")} - {".bsx"} == {"run11", "run1", "step"}


def test_what_is_too_much_for_one_listing_is_listed_by_folders(fs, monkeypatch, caplog):
    wanted = {"a": 1, "b/c": 1, "b/d/e": 1}
    for name in wanted:
        fs.backend.put(name, b"x", overwrite=True)
    below, ended = fs.backend.call("look", lambda found: found), threading.Event()
    monkeypatch.setattr(below, "find", lambda *path, **flags: ended.wait(60))
    monkeypatch.setattr(fsspec_storage, "_FIND_SECONDS", 0.2)
    try:
        assert {path: entry.size for path, entry in fs.backend.walk("")} == wanted
    finally:
        ended.set()
    asked = type(below).__module__.rpartition(".")[2] not in ("local", "dirfs")  # of which fsspec lists each folder
    for said in ("no answer within 0 s", "folder by folder"):
        assert (said in caplog.text) is asked
