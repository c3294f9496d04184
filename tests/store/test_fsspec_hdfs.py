"""The file system of fsspec over real HDFS: fsspec's own suites, and the clients for which it is there."""

import io
import os
import pickle
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.tests import abstract

from bootseer.fsspecfs.filesystem import StripeFileSystem
from bootseer.fsspecfs.paths import PROTOCOLS
from support import hadoop

DATA = os.urandom((9 << 20) + 123)


@pytest.fixture(autouse=True)
def registered():
    """As the entry points of an installed bootseer do; this checkout may be newer than what is installed."""
    for name in PROTOCOLS:
        fsspec.register_implementation(name, StripeFileSystem, clobber=True)


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.soak), pytest.param("hdfs", marks=pytest.mark.hdfs)])
def url(request, tmp_path) -> str:
    if request.param == "folder":
        return f"bsx+file://{tmp_path}/store"
    return f"bsx+{hadoop.shared().url}/{uuid.uuid4().hex}"


@pytest.fixture
def fs(url) -> StripeFileSystem:
    return StripeFileSystem(url=url)


class HdfsSuite(abstract.AbstractFixtures):
    """Without the 96 cases of globs, which take most of the time and are about names only: they run over a folder
    (tests/unit/test_fsspec_fs.py; with --soak, over memory, too), and pass over HDFS too.
    """

    @pytest.fixture
    def fs(self) -> StripeFileSystem:
        return StripeFileSystem(url=f"{hadoop.shared().url}/suite")

    @pytest.fixture
    def fs_path(self, fs) -> str:
        path = f"/{uuid.uuid4().hex}"
        fs.makedirs(path)
        return path


@pytest.mark.hdfs
class TestHdfsCopy(abstract.AbstractCopyTests, HdfsSuite):
    test_copy_glob_edge_cases = None


@pytest.mark.hdfs
class TestHdfsGet(abstract.AbstractGetTests, HdfsSuite):
    test_get_glob_edge_cases = None


@pytest.mark.hdfs
class TestHdfsPut(abstract.AbstractPutTests, HdfsSuite):
    test_put_glob_edge_cases = None


@pytest.mark.hdfs
class TestHdfsOpen(abstract.AbstractOpenTests, HdfsSuite):
    pass


@pytest.mark.hdfs
class TestHdfsPipe(abstract.AbstractPipeTests, HdfsSuite):
    pass


def test_a_url_is_all_that_a_user_needs(url):
    with fsspec.open(f"{url}/a/x", "wb") as out:
        for offset in range(0, len(DATA), 700_000):
            out.write(DATA[offset : offset + 700_000])
    with fsspec.open(f"{url}/a/x") as file:
        assert b"".join(iter(lambda: file.read(100_000), b"")) == DATA
        assert file.seek(5 << 20) == file.tell() == 5 << 20
        part = bytearray(3 << 20)
        assert file.readinto(part) == len(part)
        assert part == DATA[5 << 20 : 8 << 20]
    fs, path = fsspec.url_to_fs(f"{url}/a/x")
    assert fs.info(path)["striped"]
    assert fs.cat_ranges([path] * 3, [0, 7 << 20, -5], [10, (7 << 20) + 10, None]) == [
        DATA[:10],
        DATA[7 << 20 : (7 << 20) + 10],
        DATA[-5:],
    ]


def test_names(fs):
    fs.pipe({"d/x": DATA, "d/small": b"small"})
    assert fs.ls("d", detail=False) == ["/d/small", "/d/x"]
    fs.mv("d/x", "d/y")
    fs.mv("d/y", "e/z")
    assert fs.cat("e/z") == DATA
    fs.mv("e", "f")
    assert fs.find("/") == ["/d/small", "/f/z"]
    fs.cp("f", "g", recursive=True)
    fs.rm("f", recursive=True)
    assert fs.cat("g/z") == DATA
    with pytest.raises(FileNotFoundError):
        fs.open("f/z")
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir("d")
    with pytest.raises(NotADirectoryError):
        fs.mkdir("d/small/x")
    with pytest.raises(FileExistsError):
        fs.pipe_file("g/z", b"", mode="create")


FORKED = """
import os, pickle, sys
fs = pickle.loads(bytes.fromhex(sys.argv[1]))
data = fs.cat("x")
file = fs.open("x")
assert file.read(100_000) == data[:100_000]
child = os.fork()
if not child:
    assert file.read(300_000) == data[100_000:400_000]
    fs.pipe("y", data)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert file.read() == data[100_000:]
assert fs.cat("y") == data
"""


def test_other_processes(fs):
    fs.pipe("x", DATA)
    subprocess.run([sys.executable, "-c", FORKED, pickle.dumps(fs).hex()], check=True, timeout=100)


@pytest.mark.torch
def test_torch_save_and_load(url):
    import torch

    state = {"w": torch.randn(600, 1000), "step": 7, "nested": [torch.arange(10)]}
    with fsspec.open(f"{url}/state.pt", "wb") as out:
        torch.save(state, out)
    with fsspec.open(f"{url}/state.pt") as file:
        found = torch.load(file, weights_only=True)
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["nested"][0], state["nested"][0])
    assert found["step"] == 7


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("threads", [1, 3])
def test_distributed_checkpoint(url, threads):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter

    def save(state):
        writer = FsspecWriter(
            f"{url}/step-1", sync_files=False, thread_count=threads, single_file_per_rank=threads == 1
        )
        dcp.save(state, storage_writer=writer, no_dist=True)

    state = {"a": torch.randn(1200, 1000), "b": {"c": torch.arange(50)}, "n": 3}
    save({"a": torch.zeros(2), "b": {"c": torch.zeros(1)}, "n": 0})
    save(state)  # over the first one
    found = {"a": torch.zeros(1200, 1000), "b": {"c": torch.zeros(50, dtype=torch.int64)}, "n": 0}
    dcp.load(found, storage_reader=FsspecReader(f"{url}/step-1"), no_dist=True)
    assert torch.equal(found["a"], state["a"])
    assert torch.equal(found["b"]["c"], state["b"]["c"])
    assert found["n"] == 3
    fs, path = fsspec.url_to_fs(f"{url}/step-1")
    assert f"{path}/.metadata" in fs.find(path)
    fs.store.commit(path)  # and it can be one of ours
    assert next(file.path for file in fs.store.checkpoint(path).files) == ".metadata"


@pytest.mark.torch
def test_safetensors(fs):
    import torch
    from safetensors.torch import load, save

    state = {"w": torch.randn(1500, 1000), "b": torch.arange(10)}
    fs.pipe_file("m.safetensors", save(state))
    found = load(fs.cat_file("m.safetensors"))
    assert all(torch.equal(found[name], state[name]) for name in state)
    header = int.from_bytes(fs.cat_file("m.safetensors", 0, 8), "little")
    assert b'"w"' in fs.cat_file("m.safetensors", 8, 8 + header)


def test_array_files(fs):
    np = pytest.importorskip("numpy")
    array = np.arange(700_000, dtype=np.float64)
    with fs.open("a.npy", "wb") as out:
        np.save(out, array)
    with fs.open("a.npy", "rb") as file:
        assert np.array_equal(np.load(io.BufferedReader(file)), array)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*the default process group")
def test_the_guide_runs(tmp_path, url):
    """docs/howto/fsspec.md, all of it."""
    text = (Path(__file__).parents[2] / "docs/howto/fsspec.md").read_text()
    text = text.replace("hdfs://namenode:8020", url.removeprefix("bsx+")).replace("/var/tmp/", f"{tmp_path}/")
    names: dict[str, object] = {}
    for block in text.split("```python\n")[1:]:
        exec(compile(block.partition("```")[0], "fsspec.md", "exec"), names)
    assert names["state"]["step"] == 100
    assert names["tensors"]["weight"].shape == (2000, 1000)
