"""torch.distributed.checkpoint in a striped store: exact parts, verified, nothing of a checkpoint is run."""

import copy
import io
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile

import hypothesis
import hypothesis.strategies as st
import pytest

from bootseer.errors import ConfigError, DataError, NotFoundError, NotWritableError, UnsupportedError
from bootseer.stripefs import ChunkFile, open_fs
from bootseer.stripefs.maintenance import check

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorProperties  # noqa: E402
from torch.distributed.checkpoint.planner import LoadPlan  # noqa: E402

from bootseer import torch as bt  # noqa: E402
from bootseer.torch.pickles import DATA_OFFSET, load_metadata, tensor_layout  # noqa: E402
from bootseer.torch.reads import Stored, TensorReads  # noqa: E402
from bootseer.torch.shared_read import read_shared  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
SHAPE = {"width": 3, "unit": 64 << 10}


def a_state() -> dict[str, object]:
    torch.manual_seed(0)
    return {
        "w": torch.randn(900, 1500),
        "half": torch.randn(400, 500).bfloat16(),
        "turned": torch.randn(300, 200).t(),
        "part": torch.randn(100, 100)[10:30, 5:50],
        "fp8": torch.randn(64, 64).to(torch.float8_e4m3fn),
        "conj": torch.randn(50, dtype=torch.complex64).conj(),
        "flags": torch.tensor([True, False]),
        "number": torch.tensor(3.5),
        "none": torch.empty(0, 7),
        "step": 17,
        "nested": {"list": [1, torch.arange(6), {"lr": 0.1}], "text": "x"},
    }


def blank(state: object) -> object:
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return type(state)()


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        a, b = (x.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def error(call) -> BaseException:
    """What of ours DCP says in its own exception."""
    with pytest.raises(CheckpointException) as caught:
        call()
    return caught.value.failures[0][0]


def load(url: object, reader=None, **options) -> dict[str, object]:
    state = blank(a_state())
    dcp.load(state, storage_reader=reader or bt.StorageReader(str(url), **options))
    return state


def save(url: object, state: dict[str, object] | None = None, **options) -> dict[str, object]:
    state = a_state() if state is None else state
    dcp.save(state, storage_writer=bt.StorageWriter(str(url), **{**SHAPE, **options}))
    return state


def test_a_state_comes_back_bit_for_bit(tmp_path):
    state = save(tmp_path / "run/step-1")
    fs = open_fs(f"{tmp_path}/run")
    assert fs.latest() == "step-1"
    assert [file.path for file in fs.checkpoint("step-1").files] == [".metadata", "__0_0.distcp"]
    assert fs.stat("step-1/__0_0.distcp").striped
    assert same(load(tmp_path / "run/step-1"), state)
    # what is loaded may have another memory: turned, of another type, part of something larger
    other = blank(state)
    other["w"] = torch.zeros(1500, 900, dtype=torch.float64).t()
    other["half"] = torch.zeros(400, 1000, dtype=torch.bfloat16)[:, ::2]
    dcp.load(other, storage_reader=bt.StorageReader(f"{tmp_path}/run/step-1"))
    assert torch.equal(other["w"], state["w"].double())
    assert torch.equal(other["half"], state["half"])


def test_torch_reads_ours_and_we_read_torchs(tmp_path):
    state = save(tmp_path / "ours")
    open_fs(str(tmp_path))
    copied = tmp_path / "copied"
    copied.mkdir()
    fs = open_fs(str(tmp_path / "ours"))
    for name in fs.files():
        fs.get(name, copied / name)
    assert same(load("", reader=FileSystemReader(str(copied))), state)
    assert same(load("", reader=FsspecReader(f"bsx+file://{tmp_path}/ours")), state)
    dcp.save(state, storage_writer=FileSystemWriter(str(tmp_path / "theirs"), thread_count=3, sync_files=False))
    assert same(load(tmp_path / "theirs"), state)
    dcp.save(state, storage_writer=FsspecWriter(f"bsx+file://{tmp_path}/striped", sync_files=False, **SHAPE))
    assert open_fs(f"{tmp_path}/striped").stat("__0_0.distcp").striped
    assert same(load(tmp_path / "striped"), state)
    open_fs(str(tmp_path)).commit("striped")
    assert same(load(tmp_path / "striped"), state)


def test_async_save(tmp_path):
    state = a_state()
    del state["conj"]  # torch's own staging loses what it means
    future = dcp.async_save(state, storage_writer=bt.StorageWriter(f"{tmp_path}/ck", **SHAPE))
    state["w"].zero_()  # the job goes on
    future.result()
    loaded = blank(state)
    dcp.load(loaded, storage_reader=bt.StorageReader(f"{tmp_path}/ck"))
    assert same(loaded, {key: value for key, value in a_state().items() if key != "conj"})


def test_one_writer_for_many_checkpoints(tmp_path):
    writer, reader = bt.StorageWriter(f"{tmp_path}/1", **SHAPE), bt.StorageReader(f"{tmp_path}/1")
    for step in (1, 2):
        dcp.save({"x": torch.full((3,), step)}, checkpoint_id=f"{tmp_path}/{step}", storage_writer=writer)
    for step in (2, 1):
        state = {"x": torch.zeros(3, dtype=torch.int64)}
        dcp.load(state, checkpoint_id=f"{tmp_path}/{step}", storage_reader=reader)
        assert state["x"].tolist() == [step] * 3


class Counted:
    """Reads of a store: how often each (file, chunk) was read."""

    def __init__(self, monkeypatch):
        self.chunks: dict[tuple[str, int], int] = {}
        real = ChunkFile.by_stripe

        def counted(file, wanted, **more):
            for chunk in wanted:
                key = file.path, chunk
                self.chunks[key] = self.chunks.get(key, 0) + 1
            return real(file, wanted, **more)

        monkeypatch.setattr(ChunkFile, "by_stripe", counted)


def test_each_chunk_is_read_once_and_only_what_is_needed(tmp_path, monkeypatch):
    state = {f"t{i:03d}": torch.randn(50, 77) for i in range(100)}  # 15 kB each: several in a chunk
    state["large"] = torch.randn(4000, 1000)
    save(tmp_path / "ck", state)
    size = open_fs(str(tmp_path)).stat("ck/__0_0.distcp").size
    seen = Counted(monkeypatch)
    loaded = blank(state)
    dcp.load(loaded, storage_reader=bt.StorageReader(f"{tmp_path}/ck"))
    assert same(loaded, state)
    assert set(seen.chunks.values()) == {1}
    assert len(seen.chunks) in (size // SHAPE["unit"], -(-size // SHAPE["unit"]))  # the last: the end of a zip file
    seen.chunks.clear()
    few = {"large": torch.zeros(4000, 1000)}
    dcp.load(few, storage_reader=bt.StorageReader(f"{tmp_path}/ck"))
    assert same(few["large"], state["large"])
    assert len(seen.chunks) <= state["large"].nbytes // SHAPE["unit"] + 2


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.float8_e5m2]


@st.composite
def parts(draw):
    sizes = draw(st.lists(st.integers(1, 9), max_size=4))
    if sizes and draw(st.booleans()):
        sizes[draw(st.integers(0, len(sizes) - 1))] *= 700
    lows = [draw(st.integers(0, size - 1)) for size in sizes]
    highs = [draw(st.integers(low, size)) for low, size in zip(lows, sizes, strict=True)]
    return sizes, lows, highs


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_fs(str(tmp_path_factory.mktemp("store")))


@pytest.mark.parametrize("staging", [100_000, None], ids=["in-turns", "at-once"])
@hypothesis.given(
    parts=parts(),
    dtype=st.sampled_from(DTYPES),
    other=st.sampled_from(["same", "turned", "dtype"]),
    lead=st.integers(0, 9000),
)
def test_any_part_of_any_tensor(store, staging, parts, dtype, other, lead):
    sizes, lows, highs = parts
    count = 1
    for size in sizes:
        count *= size
    source = torch.arange(count * dtype.itemsize, dtype=torch.int32).mul(37).to(torch.uint8).view(dtype).reshape(sizes)
    with store.create("t", striped=True, unit=4096, width=3) as out:
        out.write(bytes(lead) + bytes(source.reshape(-1).view(torch.uint8).tolist()))
    expected = source[tuple(slice(low, high) for low, high in zip(lows, highs, strict=True))]
    lengths = tuple(high - low for low, high in zip(lows, highs, strict=True))
    target = torch.zeros(lengths, dtype=dtype)
    if other == "turned" and len(lengths) > 1:
        target = torch.zeros(lengths[::-1], dtype=dtype).permute(*range(len(lengths))[::-1])
    elif other == "dtype" and dtype == torch.uint8:
        target = torch.zeros(lengths, dtype=torch.int64)
    calls = []
    with store.open("t") as file:
        reads = TensorReads(lambda ranges: (calls.append(len(ranges)), read_shared(ranges, None)), staging=staging)
        reads.tensor(Stored(file, lead, dtype, sizes), lows, lengths, target)
        reads.flush()
    assert same(target.to(dtype), expected)
    if staging is None:
        assert len(calls) == 1


def test_a_slice_reads_only_its_chunks(store, monkeypatch):
    source = torch.arange(300 * 4096, dtype=torch.int32).reshape(300, 4096)  # a row is 4 chunks
    with store.create("rows", striped=True, unit=4096, width=3) as out:
        out.write(bytes(source.reshape(-1).view(torch.uint8).numpy().data))
    seen = Counted(monkeypatch)
    target = torch.zeros(300, 1024, dtype=torch.int32)
    with store.open("rows") as file:
        reads = TensorReads(lambda requests: read_shared(requests, None))
        reads.tensor(Stored(file, 0, torch.int32, (300, 4096)), (0, 1024), (300, 1024), target)
        reads.flush()
    assert torch.equal(target, source[:, 1024:2048])
    assert len(seen.chunks) == 300
    assert set(seen.chunks.values()) == {1}


def test_where_the_elements_of_a_saved_tensor_are(tmp_path):
    for tensor in (torch.randn(3000), torch.randn(50, 60), torch.nn.Parameter(torch.randn(9)), torch.tensor(3)):
        out = io.BytesIO()
        torch.save(tensor, out)
        data = out.getvalue()
        found = tensor_layout(data[:4096], data[-4096:], len(data))
        assert (found.dtype, found.sizes) == (tensor.dtype, tuple(tensor.shape))
        raw = bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())
        assert data[found.offset : found.offset + len(raw)] == raw
    for tensor in (
        torch.randn(50, 60).t(),
        torch.randn(9, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        [3],
    ):
        out = io.BytesIO()
        torch.save(tensor, out)
        assert tensor_layout(out.getvalue()[:4096], out.getvalue()[-4096:], len(out.getvalue())) is None
    assert tensor_layout(b"", b"", 0) is None
    assert tensor_layout(b"PK" * 2000, b"PK" * 2000, 10**9) is None


def test_our_writer_says_where_the_elements_are(tmp_path):
    save(tmp_path / "ck")
    found = bt.StorageReader(f"{tmp_path}/ck").read_metadata()
    without = {index.fqn for index, info in found.storage_data.items() if not hasattr(info, DATA_OFFSET)}
    assert without == {"step", "nested.list.0", "nested.list.2.lr", "nested.text"}


def test_errors_keep_their_kind(tmp_path):
    def kind(name: str) -> type:
        found = error(lambda: dcp.load({"w": torch.zeros(3)}, storage_reader=bt.StorageReader(f"{tmp_path}/{name}")))
        assert "\n" not in str(found)
        return type(found)

    assert kind("nothing") is NotFoundError
    with open_fs(str(tmp_path)).save("unfinished").create("x.pt") as out:
        out.write(b"x")
    assert kind("unfinished") is DataError
    bt.save({"a": 1}, f"{tmp_path}/pt/")
    assert kind("pt") is NotFoundError
    reader = bt.StorageReader(f"{tmp_path}/later")
    assert type(error(lambda: load("", reader))) is NotFoundError
    state = save(tmp_path / "later")
    assert same(load("", reader), state)
    assert type(error(lambda: save(tmp_path / "later"))) is NotWritableError


def test_what_is_empty_comes_back(tmp_path):
    state = {"tensor": torch.zeros(0, 3), "bytes": b"", "text": "", "nested": {"list": [b"", None]}}
    save(tmp_path / "ck", state)
    loaded = {"tensor": torch.zeros(0, 3), "bytes": b"?", "text": "?", "nested": {"list": [b"?", 1]}}
    dcp.load(loaded, storage_reader=bt.StorageReader(f"{tmp_path}/ck"))
    assert same(loaded, state)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /nonexistent/evil",))


def test_code_in_a_checkpoint_is_not_run(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(os, "system", ran.append)
    state = save(tmp_path / "bytes", {"x": torch.ones(3), "evil": 3}, **SHAPE)
    dcp.save(
        {"x": torch.ones(3), "evil": Evil()},
        storage_writer=FileSystemWriter(str(tmp_path / "theirs"), sync_files=False),
    )
    ran.clear()
    found = error(lambda: dcp.load({**blank(state)}, storage_reader=bt.StorageReader(f"{tmp_path}/theirs")))
    assert isinstance(found, DataError)
    assert "holds more than tensors" in str(found)
    metadata = tmp_path / "theirs/.metadata"
    good = pickle.loads(metadata.read_bytes())
    for evil in (Evil(), {"planner": Evil()}, torch.load, os.path.join):
        bad = copy.copy(good)
        bad.planner_data = evil
        metadata.write_bytes(pickle.dumps(bad))
        with pytest.raises(DataError, match="is not loaded: it holds"):
            bt.StorageReader(f"{tmp_path}/theirs").read_metadata()
    assert ran == []


def test_wrong_metadata(tmp_path):
    dcp.save({"x": torch.ones(3)}, storage_writer=FileSystemWriter(str(tmp_path), sync_files=False))
    metadata = tmp_path / ".metadata"
    data = metadata.read_bytes()
    good = pickle.loads(data)
    reader = bt.StorageReader(str(tmp_path))
    for wrong in (b"", b"hello", data[:-20], pickle.dumps({"a": 1}), b"(" * 10**5):
        metadata.write_bytes(wrong)
        with pytest.raises(DataError):
            reader.read_metadata()
    bad = copy.copy(good)
    bad.version = "2.0.0"
    metadata.write_bytes(pickle.dumps(bad))
    with pytest.raises(DataError, match=r"has version 2\.0\.0 of DCP's format; this version of bootseer reads 1"):
        reader.read_metadata()
    for name in ("../secret", "/etc/passwd", "missing", ".bsx/x"):
        bad = copy.deepcopy(good)
        next(iter(bad.storage_data.values())).relative_path = name
        metadata.write_bytes(pickle.dumps(bad))
        assert isinstance(
            error(lambda: dcp.load({"x": torch.zeros(3)}, storage_reader=reader)),
            ConfigError | DataError | NotFoundError,
        )
    for offset, length in ((-1, 10), (0, 10**12), (5, 100), (10**12, 10)):
        bad = copy.deepcopy(good)
        info = next(iter(bad.storage_data.values()))
        info.offset, info.length = offset, length
        metadata.write_bytes(pickle.dumps(bad))
        with pytest.raises(CheckpointException, match=r"damaged|ends at|is nowhere"):
            dcp.load({"x": torch.zeros(3)}, storage_reader=reader)


def test_damaged_bytes_are_an_error(tmp_path):
    save(tmp_path / "ck")
    part = max((tmp_path / "ck/.bsx").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[5000] ^= 1
    part.write_bytes(data)
    found = error(lambda: load(tmp_path / "ck"))
    assert isinstance(found, DataError)
    assert "is damaged" in str(found)
    small = save(tmp_path / "small", {"x": torch.ones(300)})
    (file,) = (tmp_path / "small").glob("*.distcp")
    file.write_bytes(file.read_bytes().replace(b"\x00\x00\x80?" * 3, b"\x01\x00\x80?" * 3))
    found = error(lambda: dcp.load(blank(small), storage_reader=bt.StorageReader(f"{tmp_path}/small")))
    assert "does not have the digest of its COMMIT" in str(found)


def test_a_checkpoint_is_not_replaced(tmp_path):
    state = save(tmp_path / "ck")
    found = error(lambda: save(tmp_path / "ck", {"x": torch.ones(3)}))
    assert isinstance(found, NotWritableError)
    assert "has a COMMIT already" in str(found)
    assert same(load(tmp_path / "ck"), state)
    dcp.save(state, storage_writer=FileSystemWriter(str(tmp_path / "theirs"), sync_files=False))
    found = error(lambda: save(tmp_path / "theirs", {"x": torch.ones(3)}))
    assert isinstance(found, NotWritableError)
    assert "which another program wrote" in str(found)
    assert same(load(tmp_path / "theirs"), state)


def test_a_save_that_did_not_finish(tmp_path):
    save(tmp_path / "ck")
    (tmp_path / "ck/COMMIT").unlink()
    with pytest.raises(DataError, match="has no COMMIT: its save did not finish"):
        bt.StorageReader(f"{tmp_path}/ck").read_metadata()
    # the next try uses the folder
    state = save(tmp_path / "ck", {"x": torch.ones(3)})
    loaded = blank(state)
    dcp.load(loaded, storage_reader=bt.StorageReader(f"{tmp_path}/ck"))
    assert same(loaded, state)
    assert check.fsck(open_fs(str(tmp_path)).backend).errors == ()


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/__0.metadata").write_text("x")
    for name, kind, said in (
        ("missing", NotFoundError, "no file or folder missing"),
        ("empty", NotFoundError, r"is no checkpoint of torch\.distributed\.checkpoint"),
        ("file", NotFoundError, "is a file"),
        ("ranks", UnsupportedError, "use_collectives=False"),
    ):
        with pytest.raises(kind, match=said):
            bt.StorageReader(f"{tmp_path}/{name}").read_metadata()
    with pytest.raises(UnsupportedError, match="saved by all ranks together"):
        dcp.save({"x": 1}, storage_writer=bt.StorageWriter(f"{tmp_path}/x"), use_collectives=False)
    with pytest.raises(ConfigError, match="width 0"):
        bt.StorageWriter(f"{tmp_path}/x", width=0)


def test_load_says_what_to_call(tmp_path):
    save(tmp_path / "ck")
    for url in (f"{tmp_path}/ck", f"{tmp_path}/ck/.metadata", f"{tmp_path}/ck/__0_0.distcp"):
        with pytest.raises(
            ConfigError, match=r"dcp\.load\(state, storage_reader=bootseer\.torch\.StorageReader\(url\)\)"
        ):
            bt.load(url)


def test_torch_is_imported_only_when_it_is_used(tmp_path):

    code = (
        "import sys, bootseer.torch, bootseer.cli.main; assert 'torch' not in sys.modules; bootseer.torch.StorageReader"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class Patch:
    """A pickle that sets an attribute of a class (or function), which stays set when it was refused."""

    def __init__(self, module, name, attribute):
        self.module, self.name, self.attribute = module, name, attribute

    def pickled(self) -> bytes:
        def text(value):
            return b"\x8c" + bytes([len(value)]) + value.encode()

        named = text(self.module) + text(self.name) + b"\x93"
        return b"\x80\x04" + named + b"N}" + text(self.attribute) + b"K\x07s\x86b."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("builtins", "getattr"),
    ],
)
def test_a_checkpoint_changes_nothing_in_the_process(module, name):
    import importlib
    import pathlib

    from bootseer.torch import pickles

    with pytest.raises(DataError):
        load_metadata(Patch(module, name, "planted").pickled(), "x")
    held = [getattr(importlib.import_module(module), name), pathlib.PurePath, *pickles.CLASSES.values()]
    assert not any(hasattr(one, "planted") for one in (*held, pickles.member))


def test_a_checkpoint_does_not_change_the_members_of_an_enumeration():
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as FORMATS

    (member, *_), before = FORMATS, [dict(vars(one)) for one in FORMATS]
    good = pickle.dumps(member)
    planted = good[:-1] + b"}\x8c\x06_name_\x8c\x07plantedsb."
    with pytest.raises(DataError):
        load_metadata(planted, "x")
    assert [dict(vars(one)) for one in FORMATS] == before
    assert pickle.loads(good) is member


def test_a_saved_tensor_changes_nothing_in_the_process():
    from bootseer.torch import pickles

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/byteorder", "little")
        archive.writestr("a/data.pkl", Patch("torch._utils", "_rebuild_tensor_v2", "planted").pickled())
    data = out.getvalue()
    assert tensor_layout(data, data, len(data)) is None
    assert not any(hasattr(one, "planted") for one in (pickles.tensor_v2, *pickles.MAKERS.values()))


COPIES = b"q\x00ctorch\nSize\nq\x010" + b"h\x01h\x00\x85R" * 100_000 + b"."
PROPERTIES = pickle.dumps(TensorProperties(), 3)[:-1] + b"0"  # whose state is a tuple
HUGE = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "copies": pickle.dumps(list(range(100_000)), 2)[:-1] + COPIES,
    "bytearray": b"\x80\x05\x96" + (40 << 30).to_bytes(8, "little") + b".",
    "behind-a-tensor": PROPERTIES + b"\x96" + (40 << 30).to_bytes(8, "little") + b".",
    "behind-a-type": b"\x80\x05ctorch\nfloat32\nNb0\x96" + (40 << 30).to_bytes(8, "little") + b".",
}
LOAD = """
import resource, sys
from bootseer.torch import StorageReader
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for url in sys.argv[1:]:
    try:
        StorageReader(url).read_metadata()
    except Exception as exc:
        print(type(exc).__name__, exc)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_a_small_metadata_takes_no_gigabytes(tmp_path):
    for name, planted in HUGE.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(planted)
    command = [sys.executable, "-c", LOAD, *(str(tmp_path / name) for name in HUGE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    *said, grown = done.stdout.splitlines()
    for name, line in zip(HUGE, said, strict=True):
        assert line.startswith(f"DataError {name}/.metadata is not loaded: decoding its {len(HUGE[name])} bytes takes")
    assert int(grown) < 512  # MiB
    assert "Traceback" not in done.stderr


def test_files_of_holes_take_no_memory(tmp_path):
    """Red before: `MemoryError`, or as much memory as a file says that takes none on the disk."""
    dcp.save({"x": [1]}, storage_writer=FileSystemWriter(str(tmp_path), sync_files=False))
    good = pickle.loads((tmp_path / ".metadata").read_bytes())
    next(iter(good.storage_data.values())).length = 1 << 40
    (tmp_path / ".metadata").write_bytes(pickle.dumps(good))
    for name, said in (("__0_0.distcp", "x in "), (".metadata", "")):
        os.truncate(tmp_path / name, 1 << 40)
        found = error(lambda: dcp.load({"x": [0]}, storage_reader=bt.StorageReader(str(tmp_path))))
        assert isinstance(found, DataError)
        assert str(found).startswith(f"{said}{tmp_path.name}/{name} is not loaded: it has {1 << 40} bytes")


def test_a_saved_tensor_takes_no_gigabytes():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/byteorder", "little")
        archive.writestr("a/data.pkl", b"\x80\x02Nr" + (50 << 20).to_bytes(4, "little") + b".")
    tracemalloc.start()
    try:
        assert tensor_layout(out.getvalue(), out.getvalue(), len(out.getvalue())) is None
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_saved_tensor_of_odd_sizes_is_none():
    tensor = io.BytesIO()
    torch.save(torch.ones(3, 2), tensor)
    with zipfile.ZipFile(tensor) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    assert parts[name].count(b"K\x03K\x02\x86") == 1
    for odd in (b"]]\x86", b"NN\x86", b"N", b"K\x03", b"K\x03\x85", b"J\xff\xff\xff\xffK\x02\x86"):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for path, content in parts.items():
                archive.writestr(path, content.replace(b"K\x03K\x02\x86", odd) if path == name else content)
        data = out.getvalue()
        assert tensor_layout(data, data, len(data)) is None


def test_a_length_past_the_end_takes_no_memory(tmp_path):
    dcp.save({"x": 3}, storage_writer=FileSystemWriter(str(tmp_path), sync_files=False))
    metadata = tmp_path / ".metadata"
    bad = pickle.loads(metadata.read_bytes())
    next(iter(bad.storage_data.values())).length = 10**15
    metadata.write_bytes(pickle.dumps(bad))
    found = error(lambda: dcp.load({"x": 0}, storage_reader=bt.StorageReader(str(tmp_path))))
    assert isinstance(found, DataError)
    assert "ends at" in str(found)


def test_tensors_of_the_job_that_share_memory(tmp_path):
    """Of what was stored for them the last is there, as torch's reader has it, and not a bit of each."""
    count = 1_000_000
    save(tmp_path / "ck", {"a": torch.full((count,), 1.0), "b": torch.full((count,), 2.0)})
    one = torch.zeros(count)
    for _ in range(3):
        dcp.load({"a": one, "b": one}, storage_reader=bt.StorageReader(f"{tmp_path}/ck"))
        assert one.unique().tolist() == [2.0]
    with open_fs(str(tmp_path / "ck")).open("__0_0.distcp") as file:
        memory, parts = torch.zeros(100, dtype=torch.uint8), []
        reads = TensorReads(lambda ranges: parts.extend(len(view) for _, _, view in ranges))
        for low, high in ((10, 20), (30, 40), (20, 30), (0, 10), (5, 6), (15, 35), (39, 50), (40, 50), (0, 100)):
            reads.tensor(Stored(file, 0, torch.uint8, (100,)), (low,), (high - low,), memory[low:high])
        begin = memory.data_ptr()
        assert [at - begin for at in reads._taken] == [0, 10, 10, 20, 20, 30, 30, 40, 40, 50]
        reads.flush()


def test_files_are_opened_side_by_side(tmp_path, monkeypatch):
    import threading

    from bootseer.stripefs import StripeFS
    from bootseer.torch.folder import CheckpointFolder

    fs = open_fs(str(tmp_path))
    for name in "ab":
        with fs.create(name) as out:
            out.write(b"x")
    together, real = threading.Barrier(2), StripeFS.open

    def opened(self, path):
        together.wait(10)
        return real(self, path)

    monkeypatch.setattr(StripeFS, "open", opened)
    with CheckpointFolder(str(tmp_path), "DCP") as folder:
        threads = [threading.Thread(target=folder.open, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not together.broken
        assert folder.open("a") is folder.open("a")


def test_a_checkpoint_that_is_replaced_while_it_is_loaded(tmp_path):
    """Its metadata of one version and its bytes of another would be numbers that nobody saved."""
    import shutil

    save(tmp_path / "ck", {"a": torch.full((50_000,), 1.0), "b": torch.full((50_000,), 2.0)})
    reader = bt.StorageReader(f"{tmp_path}/ck")
    real = reader.read_data

    def replaced(plan, planner):
        shutil.rmtree(tmp_path / "ck")
        save(tmp_path / "ck", {"b": torch.full((50_000,), 3.0), "a": torch.full((50_000,), 4.0)})
        return real(plan, planner)

    reader.read_data = replaced
    state = {"a": torch.zeros(50_000), "b": torch.zeros(50_000)}
    found = error(lambda: dcp.load(state, storage_reader=reader))
    assert isinstance(found, DataError)
    assert "was replaced while it was loaded" in str(found)
    # nor may two ranks have two versions
    plans = []
    for value in (5.0, 6.0):
        shutil.rmtree(tmp_path / "ck")
        save(tmp_path / "ck", {"a": torch.full((50_000,), value)})
        reader = bt.StorageReader(f"{tmp_path}/ck")
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    assert reader.prepare_global_plan(plans[1:] * 2) == plans[1:] * 2
    with pytest.raises(DataError, match="was replaced while it was loaded"):
        reader.prepare_global_plan(plans)


def test_torchs_own_checkpoint_that_is_replaced_while_it_is_loaded(tmp_path):
    import shutil

    for name, value in (("ck", 1.0), ("next", 2.0)):
        state = {"a": torch.full((5000,), value), "b": torch.full((5000,), 2 * value)}
        dcp.save(state, storage_writer=FileSystemWriter(f"{tmp_path}/{name}", sync_files=False))

    def replaced(plan, planner):
        shutil.rmtree(tmp_path / "ck")
        (tmp_path / "next").rename(tmp_path / "ck")
        return real(plan, planner)

    reader = bt.StorageReader(f"{tmp_path}/ck")
    real, reader.read_data = reader.read_data, replaced
    found = error(lambda: dcp.load({"a": torch.zeros(5000), "b": torch.zeros(5000)}, storage_reader=reader))
    assert "was replaced while it was loaded" in str(found)
