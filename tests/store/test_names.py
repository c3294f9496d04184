"""A name is bytes: each way in keeps each name apart from all others, in each storage that has it, and says at once
which it cannot have."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import fsspec
import pytest
from typer.main import get_command

from bootseer import fsmount
from bootseer.backends.interface import Backend
from bootseer.cli.fs import app
from bootseer.config import Config
from bootseer.errors import BootseerError
from bootseer.fsspecfs.filesystem import StripeFileSystem
from bootseer.fsspecfs.paths import PROTOCOLS
from bootseer.stripefs import open_fs
from support import hadoop
from support.objectserver import BUCKET, ObjectServer

NAMES = [
    "run", "run#1", "run#2", "run?x=1", "run?x=2", "a%20b", "a b", "a+b", "a%2Bb", "a%2520b", " lead", "trail ", "lead",
    "trail", "\u00e4", "a\u0308", "a\nb", "ab", "a\tb", "a\rb", "a\\b", "a/b", "end\n", "end", "a*b", "[a]", "a;b",
    "a&b", "a=1,b", "'q\"", "$x", "~", "@", "-x", "\U0001f600", "%", "#", "?", "\x01", "..x",
]  # fmt: skip
"""Of one folder; one is in a folder of its own."""


class Way(NamedTuple):
    write: Callable[[str, bytes], object]
    read: Callable[[str], bytes]


FS = get_command(app)


def _cli(*words: str) -> None:
    assert not FS.main(list(words), prog_name="fs", standalone_mode=False)


class Place:
    """A folder of a store, and a mount of it."""

    def __init__(self, url: str, kind: str, scratch: Path) -> None:
        self.url, self.kind, self.scratch = url, kind, scratch
        self.backend: Backend = open_fs(url).backend
        self.mnt = scratch / "mnt"

    def put(self, name: str, data: bytes) -> None:
        (self.scratch / "in").write_bytes(data)
        _cli("put", str(self.scratch / "in"), f"{self.url}/{name}")

    def get(self, name: str) -> bytes:
        _cli("get", f"{self.url}/{name}", str(self.scratch / "out"))
        return (self.scratch / "out").read_bytes()

    def fsspec_write(self, name: str, data: bytes) -> None:
        with fsspec.open(f"bsx+{self.url}/{name}", "wb") as out:
            out.write(data)

    def fsspec_read(self, name: str) -> bytes:
        with fsspec.open(f"bsx+{self.url}/{name}") as file:
            return file.read()

    def torch_write(self, name: str, data: bytes) -> None:
        import bootseer.torch as bt

        bt.save({"is": data.hex()}, f"{self.url}/{name}")

    def torch_read(self, name: str) -> bytes:
        import bootseer.torch as bt

        found = bt.load(f"{self.url}/{name}")
        assert isinstance(found, dict)
        return bytes.fromhex(found["is"])

    def mount_write(self, name: str, data: bytes) -> None:
        (self.mnt / name).parent.mkdir(exist_ok=True)
        (self.mnt / name).write_bytes(data)

    def mount_read(self, name: str) -> bytes:
        return (self.mnt / name).read_bytes()

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        self.backend.make_folder("")
        config = Config(cache_dir=str(self.scratch / "cache"), state_dir=str(self.scratch / "state"))
        made = fsmount.start(self.url, self.mnt, config=config, writable=True)
        try:
            yield
        finally:
            made.unmount()

    @property
    def ways(self) -> dict[str, Way]:
        return {
            "cli": Way(self.put, self.get),
            "fsspec": Way(self.fsspec_write, self.fsspec_read),
            "torch": Way(self.torch_write, self.torch_read),
            "mount": Way(self.mount_write, self.mount_read),
        }

    def stored(self) -> set[str]:
        """As the storage has them."""
        return {path for path, _ in self.backend.walk("") if ".bsx" not in path}


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as running:  # one: clients of it are kept by URL
        yield running


@pytest.fixture(params=["folder", pytest.param("hdfs", marks=pytest.mark.hdfs), "s3"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in PROTOCOLS:
        fsspec.register_implementation(name, StripeFileSystem, clobber=True)
    scratch = Path(tempfile.mkdtemp(prefix="bootseer-pytest-names-", dir="/var/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch)
        url = f"{scratch}/store" if request.param == "folder" else f"{hadoop.shared().url}/{uuid.uuid4().hex}"
        if request.param == "s3":
            monkeypatch.setitem(fsspec.config.conf, "s3", request.getfixturevalue("server").options)
            url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        if request.param == "folder":
            url = f"file://{url}"
        yield Place(url, request.param, scratch)


def _differ(name: str) -> bytes:
    return os.fsencode(name) + b" of its own"


@pytest.mark.root
@pytest.mark.torch
@pytest.mark.parametrize("way", ["cli", "fsspec", "torch", "mount"])
def test_no_two_names_are_one(place: Place, way: str) -> None:
    if place.kind == "s3" and way == "mount":
        pytest.skip("an object store is not mounted for writing")
    names = NAMES + (["a:b"] if place.kind != "hdfs" else [])
    write, read = place.ways[way]
    with place.mounted() if place.kind != "s3" else contextlib.nullcontext():
        for name in names:
            write(name, _differ(name))
        assert place.stored() == set(names)
        for name in names:
            assert read(name) == _differ(name), name
        for other in place.ways if way == "cli" else ():
            if other not in ("torch", "mount" if place.kind == "s3" else ""):
                for name in names:
                    assert place.ways[other].read(name) == _differ(name), (other, name)
        if way == "fsspec":
            fs, path = fsspec.url_to_fs(f"bsx+{place.url}")
            assert {found.removeprefix(f"{path}/") for found in fs.find(path)} == set(names)
            for name in names:
                fs.pipe_file(f"{path}/{name}", b"again " + _differ(name))
                assert fs.cat_file(fs.unstrip_protocol(f"{path}/{name}")) == b"again " + _differ(name)
            assert place.stored() == set(names)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_two_runs_whose_folders_differ_behind_a_sign(place: Place) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    import bootseer.torch as bt

    runs = ["run", "run#1", "run?x", "run "]
    for number, run in enumerate(runs):
        bt.save({"n": run}, f"{place.url}/{run}/state.pt")
        bt.save({"n": run}, f"{place.url}/{run}/step/")
        state = {"w": torch.full((3,), number)}
        dcp.save(state, storage_writer=bt.StorageWriter(f"{place.url}/{run}/dcp"), no_dist=True)
    for number, run in enumerate(runs):
        assert bt.load(f"{place.url}/{run}/state.pt") == {"n": run}
        assert bt.load(f"bsx+{place.url}/{run}/step//") == {"n": run}
        state = {"w": torch.zeros(3, dtype=torch.int64)}
        dcp.load(state, storage_reader=bt.StorageReader(f"{place.url}/{run}/dcp"), no_dist=True)
        assert state["w"].tolist() == [number] * 3
    assert {path.partition("/")[0] for path in place.stored()} == set(runs)


def _refused(kind: str) -> dict[str, int]:
    """Names that are not to be had, with the number that a mount answers with."""
    if kind == "s3":
        return {"x" * 1025: errno.ENAMETOOLONG, "a?versionId=1": errno.EINVAL, "a\udcff": errno.EILSEQ}
    found = {
        "x" * 256: errno.ENAMETOOLONG,
        "\u00e4" * 128: errno.ENAMETOOLONG,
        "a\udcff": errno.EILSEQ,
        ".bsx": errno.EPERM,
    }
    return found | (dict.fromkeys(["a:b", ".snapshot", "a:"], errno.EINVAL) if kind == "hdfs" else {})


@pytest.mark.root
@pytest.mark.torch
def test_a_name_that_is_not_to_be_had_fails_when_it_is_opened(place: Place) -> None:
    import bootseer.torch as bt

    for name in _refused(place.kind):
        with pytest.raises((BootseerError, OSError, ValueError)) as caught:
            fsspec.open(f"bsx+{place.url}/{name}", "wb").open()
        assert len(str(caught.value).splitlines()) == 1
        for url in (f"{place.url}/{name}", f"{place.url}/{name}/"):
            with pytest.raises(BootseerError) as caught:
                bt.save({}, url)
            assert len(str(caught.value).splitlines()) == 1
        with pytest.raises(BootseerError) as caught:
            place.put(name, b"x")
        assert len(str(caught.value).splitlines()) == 1
    assert place.stored() == set()
    if place.kind == "s3":
        return
    with place.mounted():
        (place.mnt / "there").write_bytes(b"x")
        for name, number in _refused(place.kind).items():
            for action in (
                lambda path: os.open(path, os.O_CREAT | os.O_WRONLY),
                lambda path: path.mkdir(),
                lambda path: (place.mnt / "there").rename(path),
            ):
                with pytest.raises(OSError, match="Errno") as failed:
                    action(place.mnt / name)
                assert errno.errorcode[failed.value.errno or 0] == errno.errorcode[number], name
            assert not os.path.exists(place.mnt / name)
    assert place.stored() == {"there"}
