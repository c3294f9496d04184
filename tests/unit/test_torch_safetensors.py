"""safetensors in a striped store: what the library says of the same file, and only the bytes that are needed."""

import json
import struct

import hypothesis
import hypothesis.strategies as st
import pytest

from bootseer.errors import ConfigError, DataError, NotFoundError, NotWritableError, UnsupportedError
from bootseer.stripefs import ChunkFile, open_fs

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import safetensors  # noqa: E402
import safetensors.torch  # noqa: E402

from bootseer import torch as bt  # noqa: E402

pytestmark = pytest.mark.torch
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (x.contiguous().reshape(-1) for x in (a, b))
    return not a.numel() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def written(path, header: object, data: bytes = b"", length: int | None = None) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return str(path)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_that_of_the_library(tmp_path, name):
    data = bytes(range(256)) if name != "BOOL" else bytes([0, 1] * 128)
    count = 2 * 256 if name == "F4" else 256 // DTYPES[name].itemsize
    url = written(tmp_path / "m.safetensors", {"a": entry(name, [4, count // 4], 0, 256)}, data)
    with safetensors.safe_open(url, "pt") as theirs, bt.safe_open(url) as ours:
        assert same(ours.get_tensor("a"), theirs.get_tensor("a"))
        assert ours.get_tensor("a").dtype == DTYPES[name]
        assert ours.get_slice("a").get_dtype() == name
        if name != "F4":
            assert ours.get_slice("a").get_shape() == theirs.get_slice("a").get_shape()
            assert same(ours.get_slice("a")[1:3], theirs.get_slice("a")[1:3])


@st.composite
def models(draw):
    names = draw(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4, unique=True))
    torch.manual_seed(draw(st.integers(0, 99)))
    model = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 9), max_size=4))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int16, torch.uint8]))
        model[name] = torch.randint(0, 100, shape).to(dtype)
    return model


@hypothesis.given(
    model=models(), metadata=st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3)
)
def test_what_the_library_writes(tmp_path_factory, model, metadata):
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    hypothesis.assume("__metadata__" not in model)
    bt.save_safetensors(model, str(path), metadata)
    theirs = safetensors.torch.load(open_fs(str(path.parent)).open("m.safetensors").read(0, path.stat().st_size))
    assert theirs.keys() == model.keys()
    ours = bt.load_safetensors(str(path))
    assert ours.keys() == model.keys()
    assert all(same(ours[name], model[name]) and same(theirs[name], model[name]) for name in model)
    with safetensors.safe_open(path, "pt") as library, bt.safe_open(str(path)) as file:
        assert file.metadata() == (library.metadata() or {})
        assert file.keys() == sorted(library.keys())


INDEXES = st.one_of(
    st.integers(-12, 12),
    st.builds(slice, st.none() | st.integers(-12, 12), st.none() | st.integers(-12, 12), st.none() | st.integers(1, 4)),
)


@pytest.fixture(scope="module")
def striped(tmp_path_factory):
    """A striped file of one tensor, with the library's copy beside it."""
    folder = tmp_path_factory.mktemp("striped")
    tensor = torch.arange(9 * 8 * 50 * 7, dtype=torch.int32).reshape(9, 8, 50, 7)
    safetensors.torch.save_file({"first": torch.ones(123, dtype=torch.uint8), "t": tensor}, folder / "plain")
    store = open_fs(str(folder))
    with store.create("m.safetensors", striped=True, unit=4096, width=3) as out:
        out.write((folder / "plain").read_bytes())
    return folder, tensor


@hypothesis.given(index=INDEXES | st.tuples() | st.lists(INDEXES | st.just(...), max_size=4).map(tuple))
def test_any_slice_is_that_of_torch(striped, index):
    folder, tensor = striped
    try:
        expected = tensor[index]
    except (IndexError, ValueError) as exc:
        expected = exc
    with bt.safe_open(f"{folder}/m.safetensors") as file:
        lazy = file.get_slice("t")
        if isinstance(expected, Exception):
            with pytest.raises(type(expected)):
                lazy[index]
        else:
            assert same(lazy[index], expected)


def test_other_indexes(striped):
    folder, tensor = striped
    with bt.safe_open(f"{folder}/m.safetensors") as file:
        lazy = file.get_slice("t")
        for index in ([0, 3], (slice(2, 4), [1, 2]), (2, None, 3), None, (1, torch.tensor([2, 0]))):
            assert same(lazy[index], tensor[index])
        for index, kind in ((9, IndexError), ((0, 0, 0, 0, 0), IndexError), (slice(None, None, -1), ValueError)):
            with pytest.raises(kind):
                lazy[index]


def test_a_slice_reads_only_its_chunks(striped, monkeypatch):
    folder, tensor = striped
    read: list[int] = []
    real = ChunkFile.by_stripe
    monkeypatch.setattr(ChunkFile, "by_stripe", lambda file, wanted, **more: read.extend(wanted) or real(file, wanted))
    with bt.safe_open(f"{folder}/m.safetensors") as file:
        lazy = file.get_slice("t")
        read.clear()
        assert same(lazy[4], tensor[4])
        assert len(read) <= tensor[4].nbytes // 4096 + 2
        assert len(set(read)) == len(read)


def test_a_file_with_any_name_is_loaded(tmp_path):
    bt.save_safetensors({"w": torch.arange(4.0)}, f"{tmp_path}/step-2")
    assert bt.load_safetensors(f"{tmp_path}/step-2")["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(NotFoundError):
        bt.load_safetensors(f"{tmp_path}/step-3")


def test_a_model_of_several_files(tmp_path):
    model = {f"layer.{n}": torch.full((300, 1000), float(n)) for n in range(4)}
    weights = {}
    for number in range(2):
        name = f"model-{number}.safetensors"
        part = {f"layer.{n}": model[f"layer.{n}"] for n in (2 * number, 2 * number + 1)}
        bt.save_safetensors({**part, "unused": torch.ones(3)}, f"{tmp_path}/{name}")
        weights |= dict.fromkeys(part, name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 4800000}, "weight_map": weights}))
    for url in (tmp_path, index):
        loaded = bt.load_safetensors(str(url))
        assert loaded.keys() == model.keys()
        assert all(same(loaded[name], model[name]) for name in model)
    open_fs(str(tmp_path.parent)).commit(tmp_path.name)
    assert bt.load_safetensors(str(tmp_path)).keys() == model.keys()
    with pytest.raises(ConfigError, match=r"is of safetensors; load it with bootseer\.torch\.load_safetensors\(url\)"):
        bt.load(str(tmp_path))
    (tmp_path / "COMMIT").unlink()
    with pytest.raises(DataError, match="has no COMMIT"):
        bt.load_safetensors(str(tmp_path))


def test_a_wrong_index(tmp_path):
    bt.save_safetensors({"a": torch.ones(3)}, f"{tmp_path}/m.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    for content in ("", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 100000):
        index.write_text(content)
        with pytest.raises(DataError, match=r"is no index of safetensors files|names no tensor"):
            bt.load_safetensors(str(index))
    for name in ("../m.safetensors", "/etc/passwd", "m.json"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(DataError, match="which is no"):
            bt.load_safetensors(str(index))
    index.write_text(json.dumps({"weight_map": {"b": "m.safetensors"}}))
    with pytest.raises(DataError, match=r"lacks b: m\.safetensors does not have it"):
        bt.load_safetensors(str(index))
    index.write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    with pytest.raises(NotFoundError):
        bt.load_safetensors(str(index))


GOOD = {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 16, 32)}
HOSTILE = {
    "empty": (b"", b"", None),
    "header of 2^63 bytes": (GOOD, bytes(32), 1 << 63),
    "header longer than the file": (GOOD, bytes(32), 1 << 20),
    "no json": (b"hello", b"", None),
    "no utf-8": (b'{"\xff": 1}', b"", None),
    "a list": (b"[]", b"", None),
    "deep": (b'{"a":' + b"[" * 200_000, b"", None),
    "overlap": ({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 12, 28)}, bytes(28), None),
    "the same bytes": ({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 0, 16)}, bytes(16), None),
    "a hole": ({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 20, 36)}, bytes(36), None),
    "past the end": (GOOD, bytes(31), None),
    "more bytes": (GOOD, bytes(33), None),
    "another size": ({"a": entry("F32", [5], 0, 16)}, bytes(16), None),
    "negative": ({"a": entry("F32", [-2, -2], 0, 16)}, bytes(16), None),
    "backwards": ({"a": entry("F32", [4], 16, 0)}, bytes(16), None),
    "huge shape": ({"a": entry("F32", [1 << 62, 1 << 62], 0, 16)}, bytes(16), None),
    "many dimensions": ({"a": entry("F32", [1 << 62] * 200_000, 0, 16)}, bytes(16), None),
    "unknown dtype": ({"a": entry("F31", [4], 0, 16)}, bytes(16), None),
    "odd bits": ({"a": entry("F4", [3], 0, 1)}, bytes(1), None),
    "text for a number": ({"a": entry("F32", ["4"], 0, 16)}, bytes(16), None),
    "metadata of numbers": ({"__metadata__": {"a": 1}, **GOOD}, bytes(32), None),
    "no offsets": ({"a": {"dtype": "F32", "shape": [4]}}, bytes(16), None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path, case):
    header, data, length = HOSTILE[case]
    url = written(tmp_path / "m.safetensors", header, data, length)
    with pytest.raises(DataError, match="is no safetensors file"):
        bt.load_safetensors(url)
    if case != "odd bits":
        with pytest.raises(Exception):  # noqa: B017, PT011 the library refuses it, too
            safetensors.safe_open(url, "pt").__enter__()


def test_a_good_header(tmp_path):
    assert bt.load_safetensors(written(tmp_path / "m.safetensors", GOOD, bytes(32)))["a"].tolist() == [0.0] * 4


def test_checkpoints_and_folders(tmp_path):
    model = {"w": torch.randn(1500, 1000)}
    bt.save_safetensors(model, f"{tmp_path}/ck/", {"step": "3"})
    assert [file.path for file in open_fs(str(tmp_path)).checkpoint("ck").files] == ["model.safetensors"]
    assert open_fs(str(tmp_path)).stat("ck/model.safetensors").striped
    for url in (f"{tmp_path}/ck", f"{tmp_path}/ck/model.safetensors"):
        assert same(bt.load_safetensors(url)["w"], model["w"])
    with bt.safe_open(f"{tmp_path}/ck") as file:
        assert file.metadata() == {"step": "3"}
        with pytest.raises(NotFoundError, match="has no tensor 'x'"):
            file.get_tensor("x")
    with pytest.raises(NotWritableError, match="has a COMMIT already"):
        bt.save_safetensors(model, f"{tmp_path}/ck/")
    with pytest.raises(ConfigError, match="is of safetensors"):
        bt.load(f"{tmp_path}/ck")
    with pytest.raises(ConfigError, match="gives tensors of torch, not of 'np'"):
        bt.safe_open(f"{tmp_path}/ck", framework="np")
    with pytest.raises(NotFoundError):
        bt.load_safetensors(f"{tmp_path}/missing")
    (tmp_path / "none").mkdir()
    with pytest.raises(NotFoundError, match=r"has no \.safetensors file"):
        bt.load_safetensors(f"{tmp_path}/none")
    for name in "ab":
        bt.save_safetensors(model, f"{tmp_path}/none/{name}.safetensors")
    with pytest.raises(ConfigError, match=r"has several models; name one of a\.safetensors, b\.safetensors"):
        bt.load_safetensors(f"{tmp_path}/none")


def test_a_model_is_written_tensor_by_tensor(tmp_path, monkeypatch):
    from bootseer.stripefs import StripeWriter

    sizes, write = [], StripeWriter.write
    monkeypatch.setattr(StripeWriter, "write", lambda out, data: sizes.append(len(data)) or write(out, data))
    whole = torch.randn(3000, 2000)
    model = {"a": whole[:, 1000:], "b": torch.randn(7), "t": torch.randn(50, 9).t()}
    model["n"] = torch.nn.Parameter(torch.ones(3).bfloat16())
    bt.save_safetensors(model, f"{tmp_path}/m.safetensors")
    assert max(sizes) <= 16 << 20
    assert len(sizes) == 1 + len(model)
    theirs = safetensors.torch.load(open_fs(str(tmp_path)).open("m.safetensors").read(0, sum(sizes)))
    assert theirs.keys() == model.keys()
    assert all(same(theirs[name], model[name].detach()) for name in model)


def test_what_a_safetensors_file_cannot_hold(tmp_path):
    base = torch.ones(100)
    for wrong, error in (
        ({"a": base, "b": base}, "a and b share memory"),
        ({"a": base[:60], "b": base[50:]}, "a and b share memory"),
        ({"a": 3}, "cannot hold int 'a'"),
        ({3: base}, "cannot hold Tensor 3"),
        ({"__metadata__": base}, "cannot hold Tensor '__metadata__'"),
        ({"a": base.to_sparse()}, "a is sparse"),
        ({"a": torch.empty(3, device="meta")}, "a is a meta tensor, whose elements are not here"),
        ({"\ud800": base}, "must be valid Unicode"),
        ({"a": torch.ones(3, dtype=torch.complex128)}, r"have no torch\.complex128, which a has"),
    ):
        with pytest.raises((ConfigError, UnsupportedError), match=error):
            bt.save_safetensors(wrong, f"{tmp_path}/m.safetensors")
    with pytest.raises(ConfigError, match="are text"):
        bt.save_safetensors({"a": base}, f"{tmp_path}/m.safetensors", {"step": 3})
    bt.save_safetensors({"a": base[:50], "b": base[50:]}, f"{tmp_path}/m.safetensors")
    assert list(tmp_path.iterdir()) == [tmp_path / "m.safetensors"]


def test_damaged_bytes_are_an_error(tmp_path):
    bt.save_safetensors({"w": torch.randn(1500, 1000)}, f"{tmp_path}/m.safetensors")
    part = max((tmp_path / ".bsx").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(DataError, match="is damaged"):
        bt.load_safetensors(f"{tmp_path}/m.safetensors")


def test_a_dtype_that_torch_does_not_have(tmp_path):
    url = written(tmp_path / "m.safetensors", {"a": entry("F6_E2M3", [8], 0, 6), "b": entry("U8", [2], 6, 8)}, bytes(8))
    with bt.safe_open(url) as file:
        assert file.keys() == ["a", "b"]
        assert file.get_tensor("b").tolist() == [0, 0]
        with pytest.raises(UnsupportedError, match="no dtype F6_E2M3"):
            file.get_tensor("a")
