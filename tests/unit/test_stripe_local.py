"""Loads by URL: they use the node cache, note what a job reads of its checkpoint, and tell what they moved."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from bootseer.chunks import inventory
from bootseer.kernel import mount as mounts
from bootseer.profile import events
from bootseer.stripefs import local, open_fs, waiting
from bootseer.stripefs.checkpoint import jobaccess
from bootseer.stripefs.checkpoint.access import UNIT, AccessRecord, FileAccess
from bootseer.stripefs.checkpoint.jobaccess import VARIABLE
from support.waits import until

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

from bootseer import torch as bt  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
SHAPE = {"width": 3, "unit": 64 << 10}
WEIGHTS = torch.arange(1_600_000.0)


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch) -> Path:
    """Folders of a node that nobody has used."""
    for name in ("cache", "state"):
        monkeypatch.setenv(f"BOOTSEER_{name.upper()}_DIR", str(tmp_path / name))
    monkeypatch.setenv("BOOTSEER_EVENTS", str(tmp_path / "events.jsonl"))
    return tmp_path


def _torch(url: str) -> object:
    return bt.load(f"{url}/state.pt")["w"]


def _dcp(url: str) -> object:
    state = {"w": torch.zeros_like(WEIGHTS)}
    dcp.load(state, storage_reader=bt.StorageReader(url))
    return state["w"]


def _fsspec(url: str) -> object:
    fs = fsspec.filesystem("bsx", url=url, skip_instance_cache=True)
    with fs.open("/state.pt", "rb") as file:
        first = torch.load(file)["w"]
    data = fs.cat_file("/state.pt")
    assert len(data) == fs.size("/state.pt")
    fs.load.tell()
    return first


WAYS: dict[str, Callable[[str], object]] = {
    "torch.load": _torch, "DCP": _dcp, "safetensors": lambda url: bt.load_safetensors(url)["w"], "fsspec": _fsspec
}  # fmt: skip


@pytest.fixture
def url(node) -> str:
    """A checkpoint with the weights in each way."""
    url = f"{node}/run/step-1"
    dcp.save({"w": WEIGHTS}, storage_writer=bt.StorageWriter(url, **SHAPE))
    fs = open_fs(url)
    (node / "run/step-1/COMMIT").unlink()
    bt.save({"w": WEIGHTS}, f"{url}/state.pt", **SHAPE)
    bt.save_safetensors({"w": WEIGHTS}, f"{url}/model.safetensors", **SHAPE)
    fs.commit("")
    return url


def kept() -> None:
    """Wait until what was read is in the node cache."""
    cache = local.caches[os.environ["BOOTSEER_CACHE_DIR"]]
    assert cache is not None
    until(lambda: cache._pending == 0, 60, "the write of what was read")


def told(node: Path, how: str) -> dict[str, events.AttrValue]:
    """What the span of the newest load says."""
    said = [attrs for attrs in events.read([node / "events.jsonl"]).spans.attrs if attrs.get("how") == how]
    return said[-1]


def test_seconds_in_which_several_wait_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    waited = waiting.Waited()
    for _ in range(2):
        with waited:
            now[0] += 1
            with waited:  # as another thread
                now[0] += 1
            now[0] += 1
        now[0] += 10
    assert waited.seconds == 6


def damage_store(url: str) -> None:
    """No chunk of any stripe is right any more; headers and footers are."""
    for path in Path(url, ".bsx").iterdir():
        with open(path, "r+b") as file:
            for at in range(8192, path.stat().st_size - 8192, 32 << 10):
                file.seek(at)
                file.write(b"damage")


@pytest.mark.parametrize("how", WAYS)
def test_a_second_load_on_the_node_reads_nothing_from_the_store(node, url, how):
    assert torch.equal(WAYS[how](url), WEIGHTS)
    kept()
    first = told(node, how) if how != "fsspec" else {}
    damage_store(url)
    assert torch.equal(WAYS[how](url), WEIGHTS)
    if first:
        second = told(node, how)
        assert first["fetched"] >= WEIGHTS.nbytes
        assert second["cached"] >= WEIGHTS.nbytes
        assert (second["fetched"], second["needed"]) == (0, first["needed"])


def test_another_process_finds_it_and_a_damaged_byte_of_it_is_found(node, url, caplog):
    code = "import sys; from bootseer import torch as bt; bt.load(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, f"{url}/state.pt"], check=True, timeout=120)
    (part,) = inventory.parts(node / "cache")
    assert part.blocks_ready == part.blocks_total
    with open(node / "cache/blocks" / part.map / "data", "r+b") as file:
        file.seek(3 * SHAPE["unit"] + 5)
        file.write(b"damage")
    assert torch.equal(_torch(url), WEIGHTS)
    assert told(node, "torch.load")["fetched"] == SHAPE["unit"]
    assert "chunk 3 in the node cache is damaged; it is fetched again" in caplog.text
    kept()
    assert torch.equal(_torch(url), WEIGHTS)
    assert told(node, "torch.load")["fetched"] == 0  # and replaced


def test_the_memory_of_a_load_may_change_at_once(node, url, monkeypatch):
    """What is kept is what was read, not what became of it."""
    cache = local.node_cache()
    assert cache is not None
    hold, write = local.threading.Event(), cache._store
    monkeypatch.setattr(cache, "_store", lambda *given: hold.wait(60) and write(*given))
    state = {"w": torch.zeros_like(WEIGHTS)}
    dcp.load(state, storage_reader=bt.StorageReader(url))
    state["w"].zero_()
    hold.set()
    kept()
    assert torch.equal(_dcp(url), WEIGHTS)
    assert told(node, "DCP")["fetched"] == 0


def test_a_full_disk_costs_the_cache_only(node, url, monkeypatch, caplog):
    monkeypatch.setenv("BOOTSEER_FAULTS", "chunks.write=enospc")
    assert torch.equal(_torch(url), WEIGHTS)
    kept()
    assert torch.equal(_torch(url), WEIGHTS)
    assert told(node, "torch.load")["cached"] == 0
    assert sum("not kept in the node cache any more" in text for text in caplog.messages) == 1


def test_a_folder_that_cannot_be_used_is_a_log_line(node, url, caplog):
    (node / "cache").mkdir()
    (node / "cache").chmod(0o777)
    assert torch.equal(_torch(url), WEIGHTS)
    assert torch.equal(_dcp(url), WEIGHTS)
    assert sum("do not use a node cache: others can write to" in text for text in caplog.messages) == 1
    assert list((node / "cache").iterdir()) == []


def test_the_default_folder_in_a_container_is_not_filled(node, url, monkeypatch, caplog):
    monkeypatch.delenv("BOOTSEER_CACHE_DIR")
    monkeypatch.delenv("BOOTSEER_CONFIG", raising=False)
    monkeypatch.setattr(local, "caches", {})
    monkeypatch.setattr(mounts, "fstype", lambda path: "overlay")
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert torch.equal(_torch(url), WEIGHTS)
        assert told(node, "torch.load")["cached"] == 0
    assert sum("is on overlay; set cache_dir to use one" in text for text in caplog.messages) == 1


@pytest.mark.root
def test_a_cache_that_is_shown_read_only_is_read(node, url, monkeypatch):
    """As the node's own cache in a container."""
    code = "import sys; from bootseer import torch as bt; bt.load(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, f"{url}/state.pt"], check=True, timeout=120)
    damage_store(url)
    (node / "shown").mkdir()
    subprocess.run(["mount", "--bind", node / "cache", node / "shown"], check=True, timeout=10)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", node / "shown"], check=True, timeout=10)
        monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(node / "shown"))
        assert torch.equal(_torch(url), WEIGHTS)
        assert told(node, "torch.load")["fetched"] == 0
        local.caches[str(node / "shown")].close()
    finally:
        mounts.unmount(node / "shown")


FORK = """
import os, sys, time
from bootseer import torch as bt
from bootseer.stripefs import local
file = bt.safe_open(sys.argv[1])
tensor = file.get_tensor("w")
if not (child := os.fork()):
    os.close(1)  # the parent's end is seen by the reader of its output
    time.sleep(600)
print(child, flush=True)
file.close()
"""


def test_a_forked_child_keeps_no_folder_owned(node, url):
    with subprocess.Popen([sys.executable, "-c", FORK, url], stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=120)
        child = int(said)
        try:
            assert process.returncode == 0
            cache = local.node_cache()
            with open_fs(url).open("model.safetensors") as file:
                mine = cache.open(file)
                assert mine._own is not None
                mine.close()
        finally:
            os.kill(child, 9)


def test_what_a_job_reads_by_url_is_noted(node, url, monkeypatch):
    events = node / "attempt-0/node1.jsonl"
    events.parent.mkdir()
    monkeypatch.setenv("BOOTSEER_EVENTS", str(events))
    monkeypatch.setenv(VARIABLE, url)
    with bt.safe_open(url) as file:
        file.get_slice("w")[1_000_000:1_000_010]
    bt.save({"x": 1}, f"{node}/other.pt")
    bt.load(f"{node}/other.pt")  # none of the job's
    size = open_fs(url).stat("model.safetensors").size
    found = jobaccess.collect(events)
    assert found.files == (FileAccess("model.safetensors", size, ((0, UNIT), (3 * UNIT, 4 * UNIT))),)
    # what others put there is no help, and no harm
    (node / "attempt-0/node1.0.access").write_bytes(b" " * (17 << 20))
    (node / "attempt-0/node1.1.access").symlink_to("/etc/passwd")
    (node / "attempt-0/node1.2.access").write_bytes(b"{")
    os.mkfifo(node / "attempt-0/node1.3.access")
    (node / "attempt-0/node1.4.access").write_bytes(b'{"files":[["../x",9,[[0,9]]]],"version":1}')
    (node / "attempt-0/node10.5.access").write_bytes(b'{"files":[{"path":"x","size":9,"ranges":[[0,9]]}],"version":1}')
    assert jobaccess.collect(events) == found
    WAYS["DCP"](url)
    WAYS["fsspec"](url)
    names = {file.path for file in jobaccess.collect(events).files}
    assert names == {"model.safetensors", "__0_0.distcp", "state.pt"}


def test_records_are_merged(node):
    one = FileAccess("a", 4 * UNIT, ((0, UNIT), (2 * UNIT, 3 * UNIT)))
    more = FileAccess("a", 4 * UNIT, ((UNIT, 2 * UNIT), (3 * UNIT, 4 * UNIT)))
    other = FileAccess("a", 5 * UNIT, ((4 * UNIT, 5 * UNIT),))
    from bootseer.stripefs.checkpoint.access import merged

    found = merged([AccessRecord((one,)), AccessRecord((other,)), AccessRecord((more, FileAccess("b", 1, ((0, 1),))))])
    assert found.files == (FileAccess("a", 4 * UNIT, ((0, 4 * UNIT),)), FileAccess("b", 1, ((0, 1),)))


COLLECTED = """
import gc, sys
import fsspec
from bootseer.stripefs import local
fs = fsspec.filesystem("bsx", url=sys.argv[1])
gc.disable()
lost = [fs.open("/f", "rb")]
lost.append(lost)
lost[0].read(1)
del lost
moved = local._LoadedFile.moved.fget
local._LoadedFile.moved = property(lambda here: gc.collect() and 0 or moved(here))
fs.load.tell()
print("told")
"""


def test_a_file_that_nobody_closed_is_collected_in_any_moment(node):
    """Such as while this thread has a lock that closing it takes."""
    with open_fs(f"{node}/store").create("f", **SHAPE, striped=True) as out:
        out.write(bytes(200_000))
    command = [sys.executable, "-c", COLLECTED, f"{node}/store"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("told\n", 0), done.stderr
