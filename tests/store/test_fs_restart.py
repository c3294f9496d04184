"""A job that is restarted on its node reads its checkpoint from there, not from HDFS."""

from __future__ import annotations

import time
import uuid

import pytest

from bootseer import fsmount
from bootseer.config import Config
from support import hadoop

pytestmark = [pytest.mark.hdfs, pytest.mark.root, pytest.mark.torch]


@pytest.mark.parametrize("mapped", [True, False])
def test_the_second_load_reads_no_byte_from_the_store(tmp_path, mapped):
    torch = pytest.importorskip("torch")
    from bootseer import torch as checkpoints

    url = f"{hadoop.shared().url}/{uuid.uuid4().hex}"
    state = {f"layer{number}": torch.randn(700, 1500) for number in range(6)}  # 25 MB
    checkpoints.save(state, f"{url}/step-1/")
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    fetched = []
    for _ in range(2):
        made = fsmount.start(url, tmp_path / "mnt", config=config)
        try:
            path = made.mountpoint / "step-1/state.pt"
            loaded = torch.load(path, weights_only=True, mmap=mapped)
            assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
            del loaded
            time.sleep(1.0)  # the status is half a second old
            status = made.status()
            assert status.opened_served + status.opened_passthrough > 0
            fetched.append(status.fetched_demand + status.fetched_ahead)
        finally:
            made.unmount()
    assert fetched[0] >= 6 * 700 * 1500 * 4
    assert fetched[1] == 0
    assert status.opened_passthrough > 0
    assert (status.opened_served, status.bytes_read) == (0, 0)
