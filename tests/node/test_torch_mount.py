"""Training frameworks on a mount of a striped store: their own readers, their own files."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import fsmount
from bootseer.config import Config
from bootseer.fsmount import FsMount
from bootseer.stripefs import StripeFS, open_fs

pytestmark = [pytest.mark.root, pytest.mark.torch]


@pytest.fixture
def fs(tmp_path) -> StripeFS:
    return open_fs(str(tmp_path / "store"))


@pytest.fixture
def mounted(fs, tmp_path) -> Iterator[FsMount]:
    Path(fs.url).mkdir()
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config)
    yield made
    made.unmount()


def trained(*argv: object) -> dict[str, object]:
    """What `support.trainerjob` printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.trainerjob", *map(str, argv)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_trainer_goes_on_from_a_checkpoint_on_the_mount(mounted, fs, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    through = trained(tmp_path / "first", 4)
    checkpoint = tmp_path / "first/checkpoint-2"
    for path in checkpoint.iterdir():
        fs.put(path, f"run/checkpoint-2/{path.name}")
    fs.commit("run/checkpoint-2")
    assert fs.stat("run/checkpoint-2/model.safetensors").striped
    assert fs.stat("run/checkpoint-2/optimizer.pt").striped
    shutil.rmtree(tmp_path / "first")
    resumed = trained(tmp_path / "second", 4, mounted.mountpoint / fs.latest("run"))
    assert resumed == through


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_ours_from_the_mount(mounted, fs):
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint as dcp

    from bootseer.torch import StorageReader, StorageWriter

    state = {"w": torch.randn(1500, 1000), "b": torch.ones(7).bfloat16(), "step": 3}
    dcp.save(state, storage_writer=StorageWriter(f"{fs.url}/ck", width=3))
    for reader in (dcp.FileSystemReader(mounted.mountpoint / "ck"), StorageReader(str(mounted.mountpoint / "ck"))):
        loaded = {"w": torch.zeros(1500, 1000), "b": torch.zeros(7).bfloat16(), "step": 0}
        dcp.load(loaded, storage_reader=reader)
        assert torch.equal(loaded["w"], state["w"])
        assert torch.equal(loaded["b"], state["b"])
        assert loaded["step"] == 3
