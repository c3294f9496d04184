"""State dicts through the striped store: exact, safe to load, atomic."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bootseer.backends import folder
from bootseer.errors import ConfigError, DataError, FullError, NotFoundError, NotWritableError, UnavailableError
from bootseer.stripefs import open_fs
from bootseer.stripefs.files.stripe import StripeLost
from bootseer.stripefs.files.writer import StripeWriter
from bootseer.stripefs.maintenance import check
from support.waits import together

torch = pytest.importorskip("torch")

from bootseer import torch as bt  # noqa: E402

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return False
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) if a.numel() else True
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bit_for_bit(tmp_path, dtype, mmap):
    raw = torch.randint(0, 256, (64, 16), dtype=torch.uint8)
    state = {"t": (raw % 2).bool() if dtype is torch.bool else raw.view(dtype), "empty": torch.empty(0, dtype=dtype)}
    if dtype is not torch.bool:
        state["turned"] = state["t"].t()
    bt.save(state, f"{tmp_path}/s.pt")
    assert same(bt.load(f"{tmp_path}/s.pt", mmap=mmap), state)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 10)).bfloat16()
    model.register_buffer("steps", torch.tensor(0))
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(model.parameters(), 1)])
    for _ in range(2):
        model(torch.randn(4, 300).bfloat16()).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("mmap", [True, False])
def test_a_training_state_resumes(tmp_path, mmap):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2, "rng": torch.get_rng_state()}
    bt.save(state, f"{tmp_path}/run/step-2/")
    loaded = bt.load(f"{tmp_path}/run/step-2", map_location="cpu", mmap=mmap)
    assert same(dict(loaded["model"]), dict(state["model"]))
    assert same(loaded["optimizer"], state["optimizer"])
    again, other = trained()
    again.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    other.step()  # loaded tensors can be written to


@pytest.mark.parametrize("mmap", [True, False])
def test_shared_tensors_stay_shared(tmp_path, mmap):
    base = torch.arange(2_000_000.0)
    state = {"a": base, "part": base[10:20], "again": base}
    bt.save(state, f"{tmp_path}/s.pt")
    assert open_fs(str(tmp_path)).stat("s.pt").striped
    loaded = bt.load(f"{tmp_path}/s.pt", mmap=mmap)
    assert same(loaded, state)
    loaded["a"][15] = -1
    assert loaded["part"][5] == -1
    assert loaded["again"][15] == -1
    assert same(bt.load(f"{tmp_path}/s.pt"), state)  # what was stored is untouched


def test_a_process_forked_while_another_thread_begins_a_load_can_load(tmp_path, monkeypatch):
    """A worker of a data loader."""
    bt.save({"no": b""}, f"{tmp_path}/s.pt")
    begun, go_on = threading.Event(), threading.Event()
    real = torch.serialization.safe_globals.__enter__

    def begin(self):
        begun.set()
        go_on.wait(60)
        real(self)

    monkeypatch.setattr(torch.serialization.safe_globals, "__enter__", begin)
    beside = threading.Thread(target=bt.load, args=(f"{tmp_path}/s.pt",))
    beside.start()
    assert begun.wait(60)
    pid = os.fork()
    if not pid:
        signal.alarm(10)
        go_on.set()
        try:
            os._exit(bt.load(f"{tmp_path}/s.pt") != {"no": b""})
        finally:
            os._exit(1)
    go_on.set()
    beside.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_it_is_an_ordinary_torch_file(tmp_path):
    state = {"w": torch.randn(600, 2000)}
    bt.save(state, f"{tmp_path}/s.pt", width=3)
    open_fs(str(tmp_path)).get("s.pt", tmp_path / "plain.pt")
    assert same(torch.load(tmp_path / "plain.pt", weights_only=True), state)
    torch.save(state, tmp_path / "theirs.pt")
    assert same(bt.load(f"file://{tmp_path}/theirs.pt"), state)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /nonexistent/evil",))


def test_code_is_not_loaded(tmp_path):
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(DataError, match="holds more than tensors"):
        bt.load(f"{tmp_path}/evil.pt")


def test_code_in_a_file_of_an_old_torch_is_not_loaded(tmp_path):
    torch.save({"x": Evil()}, tmp_path / "evil.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DataError, match="holds more than tensors"):
        bt.load(f"{tmp_path}/evil.pt", mmap=False)


@pytest.mark.parametrize("mmap", [True, False])
def test_wrong_content(tmp_path, mmap):
    cut = b"PK\x03\x04" + b"\0" * 500
    for name, data in (("empty", b""), ("text", b"hello"), ("cut", cut), ("json", b'{"a": 1}'), ("html", b"<html>")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=r"is no file of torch\.save"):
            bt.load(f"{tmp_path}/{name}", mmap=mmap)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("state", [b"", {"a": b"", "b": torch.zeros(0), "c": [b"x", b""]}, {}])
def test_what_is_empty_comes_back(tmp_path, state, mmap):
    bt.save(state, f"{tmp_path}/x.pt")
    assert repr(bt.load(f"{tmp_path}/x.pt", mmap=mmap)) == repr(state)


def test_other_loads_of_the_process_are_as_strict_as_before(tmp_path):
    theirs = set(torch.serialization.get_safe_globals())
    bt.save({"a": b"", "w": torch.ones(3)}, f"{tmp_path}/x.pt")
    assert together(lambda _: len(bt.load(f"{tmp_path}/x.pt")), range(8)) == [2] * 8
    assert set(torch.serialization.get_safe_globals()) == theirs
    with pytest.raises(pickle.UnpicklingError):
        torch.load(f"{tmp_path}/x.pt", weights_only=True)


def test_a_file_of_an_old_torch_needs_no_mmap(tmp_path):
    torch.save({"a": b"", "w": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match=r"before torch 1\.6; load it with mmap=False$"):
        bt.load(f"{tmp_path}/x.pt")
    assert torch.equal(bt.load(f"{tmp_path}/x.pt", mmap=False)["w"], torch.ones(3))


def test_folders(tmp_path):
    url = f"{tmp_path}/run/step-1"
    with pytest.raises(NotFoundError):
        bt.load(url)
    bt.save({"a": torch.ones(3)}, f"{url}/state.pt")
    with pytest.raises(DataError, match="has no COMMIT: its save did not finish"):
        bt.load(url)
    open_fs(url).commit("")
    assert same(bt.load(url), {"a": torch.ones(3)})
    for name in ("", "state.pt"):
        with pytest.raises(NotWritableError, match="has a COMMIT already"):
            bt.save({"a": torch.zeros(3)}, f"{url}/{name}")
    assert same(bt.load(url), {"a": torch.ones(3)})
    fs = open_fs(f"{tmp_path}/run")
    for names in (["a.pt", "b.pt"], ["note"]):
        for name in names:
            with fs.create(f"{names[0]}-dir/{name}") as out:
                out.write(b"x")
        fs.commit(f"{names[0]}-dir")
    with pytest.raises(ConfigError, match=r"several files; name one of a\.pt, b\.pt"):
        bt.load(f"{tmp_path}/run/a.pt-dir")
    with pytest.raises(NotFoundError, match=r"no \.pt file"):
        bt.load(f"{tmp_path}/run/note-dir")


def test_damage_is_an_error(tmp_path):
    bt.save({"w": torch.randn(600, 2000)}, f"{tmp_path}/s.pt")
    part = sorted((tmp_path / ".bsx").iterdir())[1]
    data = bytearray(part.read_bytes())
    data[9000] ^= 1
    part.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        bt.load(f"{tmp_path}/s.pt")


@pytest.mark.parametrize("name", ["", "/state.pt"])
def test_damage_of_a_small_checkpoint_is_an_error(tmp_path, name):
    url = f"{tmp_path}/step-1"
    bt.save({"w": torch.ones(1000)}, f"{url}/")
    assert same(bt.load(url + name), {"w": torch.ones(1000)})
    path = Path(url, "state.pt")
    assert not open_fs(url).stat("state.pt").striped
    data = bytearray(path.read_bytes())
    at = data.index(b"\x00\x00\x80\x3f" * 10)
    data[at + 2] ^= 1  # one bit of a number: torch loads it without a word
    path.write_bytes(data)
    assert not same(torch.load(path, weights_only=True), {"w": torch.ones(1000)})
    with pytest.raises(DataError, match="does not have the digest of its COMMIT"):
        bt.load(url + name)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1."),
        RuntimeError("CUDA error: device-side assert triggered"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_errors_of_devices_are_not_of_the_file(tmp_path, monkeypatch, error):
    bt.save({"a": torch.ones(3)}, f"{tmp_path}/s.pt")

    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(type(error)) as caught:
        bt.load(f"{tmp_path}/s.pt", map_location="cuda:1")
    assert caught.value is error


@pytest.mark.parametrize("mmap", [True, False])
def test_every_cut_is_an_error_of_the_file(tmp_path, mmap):
    bt.save({"a": torch.ones(300)}, f"{tmp_path}/s.pt")
    data = (tmp_path / "s.pt").read_bytes()
    for length in range(0, len(data) - 1, 97):
        (tmp_path / "cut.pt").write_bytes(data[:length])
        with pytest.raises(DataError):
            bt.load(f"{tmp_path}/cut.pt", mmap=mmap)


@pytest.mark.parametrize("name", ["s.pt", "step-1/"])
@pytest.mark.parametrize("failures", [1, 2])
def test_a_lost_stripe_costs_no_checkpoint(tmp_path, monkeypatch, caplog, name, failures):
    state, left = {"w": torch.randn(600, 2000)}, [failures]
    real = folder.FolderSink.write

    def failing(sink: folder.FolderSink, data: bytes | memoryview) -> None:
        if left[0] and sink._path.suffix == ".1" and len(data) > 100_000:
            left[0] -= 1
            raise UnavailableError("every DataNode of a block failed")
        real(sink, data)

    monkeypatch.setattr(folder.FolderSink, "write", failing)
    if failures > 1:
        with pytest.raises(StripeLost, match="every DataNode"):
            bt.save(state, f"{tmp_path}/{name}")
        return
    bt.save(state, f"{tmp_path}/{name}")
    assert left == [0]
    assert same(bt.load(f"{tmp_path}/{name}"), state)
    assert "again from its beginning" in caplog.text
    assert check.fsck(open_fs(str(tmp_path)).backend).findings == ()


@pytest.mark.parametrize("point", ["write.stripe", "write.close", "write.rename"])
def test_a_failed_save_leaves_the_old_state(tmp_path, monkeypatch, point):
    bt.save({"w": torch.ones(600, 2000)}, f"{tmp_path}/s.pt")
    monkeypatch.setenv("BOOTSEER_FAULTS", f"stripefs.{point}=enospc")
    with pytest.raises(FullError):
        bt.save({"w": torch.zeros(600, 2000)}, f"{tmp_path}/s.pt")
    monkeypatch.delenv("BOOTSEER_FAULTS")
    assert same(bt.load(f"{tmp_path}/s.pt"), {"w": torch.ones(600, 2000)})
    assert len(list((tmp_path / ".bsx").iterdir())) == 4


SAVER = """
import sys, torch
from bootseer import torch as bt
bt.save({"w": torch.full((600, 2000), float(sys.argv[2]))}, sys.argv[1])
"""


@pytest.mark.parametrize(
    "point",
    ["commit.rename", *(pytest.param(f"write.{part}", marks=pytest.mark.soak) for part in ("stripe", "rename"))],
)
def test_kill_9_in_a_save_leaves_the_latest_complete_checkpoint(tmp_path, point):
    bt.save({"w": torch.full((600, 2000), 1.0)}, f"{tmp_path}/step-1/")
    done = subprocess.run(
        [sys.executable, "-c", SAVER, f"{tmp_path}/step-2/", "2"],
        env={**os.environ, "BOOTSEER_FAULTS": f"stripefs.{point}=kill"},
        timeout=100,
    )
    assert done.returncode == -9
    latest = open_fs(str(tmp_path)).latest("")
    assert latest == "step-1"
    assert bt.load(str(Path(tmp_path, latest)))["w"][0, 0] == 1.0


def test_small_tensors_reach_the_writer_in_few_pieces(tmp_path, monkeypatch):
    """torch.save writes five times for each: each write of ours has the cost of a digest and of a check."""
    sizes, write = [], StripeWriter.write
    monkeypatch.setattr(StripeWriter, "write", lambda self, data: sizes.append(len(data)) or write(self, data))
    state = {str(n): torch.full((300,), n) for n in range(3000)} | {"large": torch.arange(1 << 20)}
    bt.save(state, f"{tmp_path}/s.pt")
    assert same(bt.load(f"{tmp_path}/s.pt"), state)
    assert len(sizes) < 100


def test_what_a_failed_save_still_held_goes_nowhere(tmp_path, monkeypatch):
    """Also when its buffer is closed later, by a collector."""
    given, write = [], StripeWriter.write
    monkeypatch.setattr(StripeWriter, "write", lambda self, data: given.append(len(data)) or write(self, data))
    kept = []

    def fail(state, out):
        kept.append(out)
        out.write(b"x" * 100)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        bt.save({}, f"{tmp_path}/s.pt")
    kept.pop().close()
    assert not given
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
