"""The file system of fsspec over striped stores: fsspec's own suites, and what our promises add to them."""

import errno
import gc
import importlib.metadata
import io
import itertools
import os
import pickle
import random
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import fsspec
import pytest
from fsspec.tests import abstract
from hypothesis import given
from hypothesis import strategies as st

from bootseer.backends.engine import memory as budget
from bootseer.backends.folder import FolderBackend
from bootseer.backends.open import Location
from bootseer.backends.pool import read_each
from bootseer.errors import DataError, UnavailableError
from bootseer.fsspecfs.filesystem import StripeFileSystem
from bootseer.fsspecfs.paths import PROTOCOLS, split
from bootseer.ranges import merge
from support.stripes import flip
from support.waits import together

UNIT = 4096
DATA = random.Random(1).randbytes(200 * UNIT + 123)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """As the entry points of an installed bootseer do; this checkout may be newer than what is installed."""
    for name in PROTOCOLS:
        fsspec.register_implementation(name, StripeFileSystem, clobber=True)


@pytest.fixture
def memory():
    from fsspec.implementations.memory import MemoryFileSystem

    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path, memory) -> str:
    return f"bsx+file://{tmp_path}/store" if request.param == "file" else "bsx+memory://store"


@pytest.fixture
def fs(url) -> StripeFileSystem:
    """Relative to the folder of the store, with small chunks."""
    return StripeFileSystem(url=url, unit=UNIT)


class Suite(abstract.AbstractFixtures):
    @pytest.fixture(params=["folder", pytest.param("memory", marks=pytest.mark.soak)])
    def fs(self, request, tmp_path, memory) -> StripeFileSystem:
        return StripeFileSystem(url=str(tmp_path / "store") if request.param == "folder" else "memory://")

    @pytest.fixture
    def fs_path(self, fs) -> str:
        fs.makedirs("/base")
        return "/base"


class TestCopy(abstract.AbstractCopyTests, Suite):
    pass


class TestGet(abstract.AbstractGetTests, Suite):
    pass


class TestPut(abstract.AbstractPutTests, Suite):
    pass


class TestOpen(abstract.AbstractOpenTests, Suite):
    pass


class TestPipe(abstract.AbstractPipeTests, Suite):
    pass


def store(fs: StripeFileSystem, path: str, data: bytes = DATA, **options: object) -> None:
    with fs.open(path, "wb", striped=True, **options) as out:
        out.write(data)


# Names and registration


def test_entry_points_name_what_the_class_says():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["fsspec.specs"]
    assert tuple(points) == PROTOCOLS == StripeFileSystem.protocol
    for name, value in points.items():
        assert importlib.metadata.EntryPoint(name, value, "fsspec.specs").load() is StripeFileSystem


def test_an_installed_bootseer_is_known_to_fsspec(tmp_path):
    installed = {point.name for point in importlib.metadata.entry_points(group="fsspec.specs")}
    if not set(PROTOCOLS) <= installed and not os.environ.get("CI"):
        pytest.skip("what is installed is older than pyproject.toml: install again")
    script = "import fsspec, sys; fsspec.open(sys.argv[1], 'wb').open().close(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script, f"bsx+file://{tmp_path}/x"], check=True, timeout=60)
    assert (tmp_path / "x").exists()


def test_the_package_does_not_load_fsspec():
    script = "import sys, bootseer.stripefs; sys.exit('fsspec' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("bsx+hdfs://host:8020/ckpt/x", Location("hdfs://host:8020", "/ckpt/x")),
        ("hdfs://host:8020", Location("hdfs://host:8020", "/")),
        ("bsx+hdfs://nameservice//a//b/", Location("hdfs://nameservice", "/a/b")),
        ("bsx+file:///data/x", Location("file://", "/data/x")),
        ("/data/x/", Location("file://", "/data/x")),
        ("bsx+memory://a/b", Location("memory://", "/a/b")),
        ("bsx+s3://bucket/a/b", Location("s3://", "/bucket/a/b")),
        ("bsx+s3://bucket", Location("s3://", "/bucket")),
        ("ftp://me@host:21/a/b", Location("ftp://me@host:21", "/a/b")),
    ],
)
def test_urls(url, place):
    assert split(url) == place
    assert split(place.url) == place


def test_a_relative_file_url_is_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split("bsx+file://a/b").path == f"{tmp_path}/a/b"


def test_a_url_is_all_that_a_user_needs(url):
    with fsspec.open(f"{url}/a/x", "wb", unit=UNIT) as out:
        out.write(DATA)
    with fsspec.open(f"{url}/a/x") as file:
        assert file.read() == DATA
    fs, path = fsspec.url_to_fs(f"{url}/a/x")
    assert fs.unstrip_protocol(path) == f"{url}/a/x"
    assert fs.cat(f"{url}/a/x") == fs.cat(path) == DATA
    assert [file.path for file in fsspec.open_files(f"{url}/a/*")] == [path]
    inside = StripeFileSystem(url=f"{url}/a")
    assert inside.cat("x") == inside.cat("/x") == inside.cat(f"{url}/a/x") == DATA
    assert inside.unstrip_protocol("/x") == f"{url}/a/x"


def test_another_store_is_refused(fs):
    for wrong in ("bsx+hdfs://other:8020/store/x", "bsx+file:///elsewhere/x"):
        with pytest.raises(ValueError, match="is not in the striped store"):
            fs.open(wrong)


def test_chains(url, tmp_path):
    store(StripeFileSystem(url=url), "x")
    cached = fsspec.open(f"simplecache::{url}/x", simplecache={"cache_storage": str(tmp_path / "cache")})
    with cached as file:
        assert file.read() == DATA
    with pytest.raises((TypeError, ValueError), match=r"no striped store|has no option"):
        fsspec.open(f"bsx://x::{url.removeprefix('bsx+')}")
    with fsspec.open(f"{url}/y.gz", "wb", compression="infer") as out:
        out.write(DATA)
    with fsspec.open(f"{url}/y.gz", "rb", compression="infer") as file:
        assert file.read() == DATA


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # fsspec closes no file of its MMapCache
@pytest.mark.parametrize("cache", ["blockcache", "simplecache", "filecache", "cached"])
@pytest.mark.parametrize("striped", [True, False])
def test_caches_of_fsspec(fs, url, tmp_path, cache, striped):
    with fs.open("x", "wb", striped=striped) as out:
        out.write(DATA)
    for _ in range(2):
        with fsspec.open(f"{cache}::{url}/x", **{cache: {"cache_storage": str(tmp_path / "cache")}}) as file:
            assert file.read(10) == DATA[:10]
            file.seek(5 * UNIT + 7)
            assert file.read() == DATA[5 * UNIT + 7 :]
        assert file.closed


def test_rsync_of_fsspec(url, tmp_path):
    from fsspec.generic import rsync

    local, back = tmp_path / "local", tmp_path / "back"
    (local / "b").mkdir(parents=True)
    (local / "1").write_bytes(DATA)
    (local / "b" / "2").write_bytes(b"two")
    options = {"inst_kwargs": {"default_method": "options", "storage_options": {}}}
    assert len(rsync(f"file://{local}", f"{url}/r", **options)) == 2
    assert len(rsync(f"{url}/r", f"file://{back}", **options)) == 2
    assert ((back / "1").read_bytes(), (back / "b" / "2").read_bytes()) == (DATA, b"two")
    assert not rsync(f"{url}/r", f"file://{back}", **options)


def test_instances_are_cached_and_pickled(fs):
    assert StripeFileSystem(url=fs.storage_options["url"], unit=UNIT) is fs
    again = pickle.loads(pickle.dumps(fs))
    assert (again.url, again.unit) == (fs.url, UNIT)
    assert fsspec.AbstractFileSystem.from_json(fs.to_json()).url == fs.url
    store(fs, "x")
    with fs.open("x") as file:
        file.seek(1000)
        with pickle.loads(pickle.dumps(file)) as other:
            assert other.read(10) == file.read(10) == DATA[1000:1010]


def test_one_instance_serves_many_threads(fs):
    store(fs, "x")

    def work(number: int) -> None:
        with fs.open("x", block_size=4 * UNIT) as file:
            for turn in range(20):
                place = number * 77_777 * turn % len(DATA)
                file.seek(place)
                assert file.read(50_000) == DATA[place : place + 50_000]
        fs.pipe(f"d/{number}", DATA[: number * 1000])
        assert fs.cat(f"d/{number}") == DATA[: number * 1000]
        assert f"/d/{number}" in fs.ls("d", detail=False)

    together(work, range(8))


def test_wrong_options_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no striped store"):
        StripeFileSystem()
    with pytest.raises(TypeError, match="no option endpoint_url"):
        StripeFileSystem(url=str(tmp_path), endpoint_url="x")
    fs = StripeFileSystem(url=str(tmp_path))
    with pytest.raises(TypeError):
        fs.open("x", "wb", colour="red")
    with pytest.raises(ValueError, match="mode"):
        fs.open("x", "r+b")


# Reading


@given(data=st.data(), size=st.sampled_from([0, 1, UNIT, 10 * UNIT, len(DATA)]), striped=st.booleans())
def test_a_reader_is_a_file(tmp_path_factory, data, size, striped):
    fs = StripeFileSystem(url=str(tmp_path_factory.getbasetemp() / "reader"), unit=UNIT)
    path = f"f-{size}-{striped}"
    if not fs.exists(path):
        with fs.open(path, "wb", striped=striped) as out:
            out.write(DATA[:size])
    model = io.BytesIO(DATA[:size])
    with fs.open(path, "rb", block_size=data.draw(st.sampled_from([UNIT, 5 * UNIT, 1 << 20]))) as file:
        for _ in range(data.draw(st.integers(1, 12))):
            match data.draw(st.sampled_from(["read", "readinto", "seek", "line", "all", "on", "on", "end"])):
                case "read":
                    count = data.draw(st.integers(0, size + 10))
                    assert file.read(count) == model.read(count)
                case "readinto":
                    one = bytearray(data.draw(st.integers(0, 20 * UNIT)))
                    two = bytearray(len(one))
                    assert file.readinto(one) == model.readinto(two)
                    assert one == two
                case "seek":
                    place = data.draw(st.integers(0, size + 10))
                    assert file.seek(place) == model.seek(place)
                case "line":
                    assert file.readline() == model.readline()
                case "on":
                    count = data.draw(st.sampled_from([100, 1000, UNIT, 9999]))
                    for _ in range(data.draw(st.integers(1, 60))):
                        assert file.read(count) == model.read(count)
                case "all":
                    assert file.read() == model.read()
                case "end":
                    assert file.seek(-min(5, size), 2) == model.seek(-min(5, size), 2)
            assert file.tell() == model.tell()
    wait_for_budget()


class Counting(FolderBackend):
    def __init__(self, root):
        super().__init__(root)
        self.read, self.requests = 0, 0

    def read_many(self, pieces):
        self.requests += 1
        self.read += sum(len(part) for piece in pieces for part in piece.parts)
        read_each(pieces)


@pytest.fixture
def counted(tmp_path) -> tuple[StripeFileSystem, Counting]:
    fs = StripeFileSystem(url=str(tmp_path / "store"), unit=UNIT)
    store(fs, "x")
    backend = Counting(tmp_path / "store")
    fs.store.backend = backend
    return fs, backend


@pytest.mark.serial  # it counts on the read-ahead being as quick as the reader
@pytest.mark.parametrize("piece", [100, 5000, UNIT, 3 * UNIT, 70_000, len(DATA)])
def test_reading_on_fetches_each_chunk_once_and_many_at_a_time(counted, piece):
    fs, backend = counted
    with fs.open("x", block_size=16 * UNIT) as file:
        before = backend.read  # footers
        while file.read(piece):
            pass
    assert backend.read - before == len(DATA)
    assert backend.requests < 40  # of 201 chunks


def test_what_was_read_ahead_is_given_back(fs):
    store(fs, "x")
    with fs.open("x", block_size=16 * UNIT) as file:
        most = 0
        for _ in range(100):
            assert file.read(UNIT)
            most = max(most, budget.process().used)
        assert 0 < most <= 32 * UNIT
    wait_for_budget()


def wait_for_budget() -> None:
    deadline = time.monotonic() + 10
    while budget.process().used and time.monotonic() < deadline:  # what was on its way when the file was closed
        time.sleep(0.001)
    assert budget.process().used == 0


def test_ranges_are_one_request_per_file(counted):
    fs, backend = counted
    store(fs, "y")
    backend.read = backend.requests = 0
    starts = [10, 20, 5 * UNIT, 9 * UNIT + 1, 9 * UNIT, 0, 100 * UNIT, -10, 50, len(DATA) + 5]
    ends = [30, 40, 5 * UNIT + 100, 9 * UNIT + 2, 9 * UNIT + 4, UNIT + 1, 101 * UNIT, None, 50, None]
    found = fs.cat_ranges(["x", "y"] * 5, starts, ends)
    assert found == [DATA[start:end] for start, end in zip(starts, ends, strict=True)]
    assert backend.requests == 4  # footers and data of each
    assert backend.read < 13 * UNIT


def test_ranges_that_cannot_be_read(fs):
    store(fs, "x")
    found = fs.cat_ranges(["x", "none", "x"], 0, 10)
    assert found[0] == found[2] == DATA[:10]
    assert isinstance(found[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(["x", "none"], 0, 10, on_error="raise")
    assert fs.cat(["x", "x"]) == {"/x": DATA}
    assert fs.cat("*", on_error="omit") == {"/x": DATA}


SHORT = st.tuples(st.integers(0, 300), st.integers(0, 15)).map(lambda found: (found[0], found[0] + found[1]))


@given(st.lists(SHORT, max_size=20), st.integers(0, 10))
def test_merged_ranges_cover_what_is_wanted_and_lie_apart(ranges, gap):
    found = merge(ranges, gap)
    for start, end in ranges:
        assert any(block[0] <= start <= end <= block[1] for block in found)
    for before, after in itertools.pairwise(found):
        assert after[0] - before[1] > gap


def damage(fs: StripeFileSystem, offset: int) -> None:
    stripe = sorted(Path(fs.url.removeprefix("file://"), ".bsx").iterdir())[0]
    flip(stripe, offset)


def test_damaged_bytes_are_an_error_and_never_read(tmp_path, caplog):
    fs = StripeFileSystem(url=str(tmp_path), unit=UNIT)
    store(fs, "x")
    damage(fs, 4096 + 20 * UNIT + 5)  # chunk 80
    with fs.open("x", block_size=8 * UNIT) as file:
        assert file.read(79 * UNIT) == DATA[: 79 * UNIT]
        for _ in range(2):  # also when it was read ahead before
            with pytest.raises(OSError, match="chunk 80 of x is damaged") as found:
                file.read(3 * UNIT)
            assert found.value.errno == errno.EIO
            assert isinstance(found.value.__cause__, DataError)
        file.seek(81 * UNIT)
        assert file.read() == DATA[81 * UNIT :]
    assert isinstance(fs.cat_ranges(["x"], [80 * UNIT], [80 * UNIT + 1])[0], OSError)


def test_a_store_that_does_not_answer_is_not_an_empty_one(fs, monkeypatch):
    def silent(path):
        raise UnavailableError("no answer")

    monkeypatch.setattr(fs.store.backend, "stat", silent)
    for ask in (fs.exists, fs.isfile, fs.isdir):
        with pytest.raises(TimeoutError):
            ask("x")


def test_without_memory_to_spare_reads_go_on(fs, monkeypatch):
    store(fs, "x")
    monkeypatch.setattr(budget, "_process", budget.ByteBudget(0))
    with fs.open("x") as file:
        assert b"".join(iter(lambda: file.read(999), b"")) == DATA


FORKED = """
import os, sys
from bootseer.fsspecfs.filesystem import StripeFileSystem
fs = StripeFileSystem(url=sys.argv[1])
data = fs.cat("x")
file = fs.open("x", block_size=65536)
assert file.read(100_000) == data[:100_000]
child = os.fork()
if not child:
    assert file.read(300_000) == data[100_000:400_000]
    assert fs.cat("x") == data
    fs.pipe("y", data)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert file.read() == data[100_000:]
assert fs.cat("y") == data
"""


def test_a_forked_child_reads_on_and_writes(tmp_path):
    store(StripeFileSystem(url=str(tmp_path), unit=UNIT), "x")
    subprocess.run([sys.executable, "-W", "error", "-c", FORKED, str(tmp_path)], check=True, timeout=60)


# Writing


@pytest.mark.parametrize("how", ["with", "open", "text", "exit", "forgotten"])
def test_half_a_file_does_not_replace_a_whole_one(fs, url, how, caplog):
    store(fs, "x")
    if how == "forgotten":
        out = fs.open("x", "wb")
        out.write(b"half")
        del out
    else:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012  the writing is the test
            if how == "with":
                with fs.open("x", "wb") as out:
                    out.write(b"half" * UNIT)
                    raise ZeroDivisionError
            elif how == "open":
                with fsspec.open(f"{url}/x", "wb") as out:
                    out.write(b"half")
                    raise ZeroDivisionError
            elif how == "text":
                with fs.open("x", "w") as out:
                    out.write("half")
                    raise ZeroDivisionError
            else:
                out = fs.open("x", "wb")
                try:
                    out.write(b"half")
                    raise ZeroDivisionError
                finally:
                    out.close()
    assert fs.cat("x") == DATA
    assert "x is not published" in caplog.text
    assert len(fs.store.backend.list(".bsx")) == 4


def test_a_file_written_while_another_error_is_handled_is_published(fs):
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        with fs.open("x", "wb") as out:
            out.write(b"report")
    assert fs.cat("x") == b"report"


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_file_that_is_closed_in_an_unrelated_except_is_published_or_an_error(fs, autocommit):
    store(fs, "x")
    out = fs.open("x", "wb", autocommit=autocommit)
    out.write(b"report")
    with pytest.raises(KeyError) as caught:  # noqa: PT012  the handling is the test
        try:
            {}["cache"]
        except KeyError:
            out.close()
    assert "x is not published" in caught.value.__notes__[0]
    out.close()
    assert fs.cat("x") == DATA


def test_nothing_is_seen_before_the_close(fs):
    out = fs.open("x", "wb")
    out.write(DATA)
    assert out.tell() == len(DATA)
    assert not fs.exists("x")
    out.close()
    assert fs.cat("x") == DATA
    with pytest.raises(ValueError, match="closed"):
        out.write(b"x")


def test_append_begins_with_what_is_there(fs):
    for part in (b"one", b"two", DATA):
        with fs.open("x", "ab") as out:
            out.write(part)
    assert fs.cat("x") == b"onetwo" + DATA


def test_an_exclusive_file_that_comes_second_replaces_nothing(fs):
    out = fs.open("x", "xb")
    out.write(b"late")
    fs.pipe("x", b"first")
    with pytest.raises(FileExistsError, match="another writer"):
        out.close()
    assert fs.cat("x") == b"first"
    with pytest.raises(FileExistsError):
        fs.pipe_file("x", b"no", mode="create")


def test_transactions_are_all_or_nothing(fs):
    fs.pipe("old", b"old")
    with fs.transaction:
        fs.pipe("a", DATA)
        fs.pipe("d/b", b"b")
        fs.pipe("old", b"new")
        assert not fs.exists("a")
        assert fs.cat("old") == b"old"
    assert (fs.cat("a"), fs.cat("d/b"), fs.cat("old")) == (DATA, b"b", b"new")
    with pytest.raises(ZeroDivisionError), fs.transaction:  # noqa: PT012
        fs.pipe("a", b"other")
        fs.pipe("c", DATA)
        raise ZeroDivisionError
    assert fs.cat("a") == DATA
    assert not fs.exists("c")
    fs.pipe("c", b"c")  # no longer held back
    assert fs.cat("c") == b"c"


def test_names_of_the_store_are_not_written(fs):
    for name in (".bsx/x", "d/.tmp-x"):
        with pytest.raises(PermissionError, match="keeps names"):
            fs.open(name, "wb")
        with pytest.raises(PermissionError):
            fs.mkdir(name)


# Names


def test_moves(fs):
    store(fs, "d/x")
    info = fs.info("d/x")
    fs.mv("d/x", "d/y")
    assert fs.info("d/y")["uuid"] == info["uuid"]  # a rename, no copy
    fs.mv("d/y", "e/z")  # its stripes move too
    assert fs.cat("e/z") == DATA
    fs.mv("e", "f/")
    assert fs.find("/") == ["/f/e/z"]
    fs.mv("f/e", "g")
    assert fs.cat("g/z") == DATA
    fs.pipe({"a": b"a", "b": b"b"})
    fs.mv("a", "b")
    assert fs.cat("b") == b"a"
    fs.mv(["b"], "g", recursive=True)
    assert fs.find("/") == ["/g/b", "/g/z"]
    with pytest.raises(FileNotFoundError):
        fs.mv("none", "h")
    with pytest.raises(ValueError, match="into itself"):
        fs.mv("g", "g/h")


def test_copies_have_stripes_of_their_own(fs):
    store(fs, "x", width=2)
    fs.cp_file("x", "y")
    assert (fs.info("y")["width"], fs.info("y")["digest"]) == (2, fs.info("x")["digest"])
    fs.rm("x")
    assert fs.cat("y") == DATA


def test_a_name_with_the_signs_of_a_pattern_is_meant_as_it_is(fs, tmp_path):
    for name in ("q?x", "qax", "[a]", "a", "d?/x", "dd/x", "s[1]*", "s1", "t1", "t2"):
        fs.pipe_file(f"g/{name}", name.encode())
    assert fs.cat("g/[a]") == b"[a]"
    assert fs.cat("g/q?x") == b"q?x"
    fs.get("g/s[1]*", str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == b"s[1]*"
    fs.cp("g/s[1]*", "g/copied")
    fs.mv("g/[a]", "g/moved")
    fs.cp("g/d?", "g/d3", recursive=True)
    fs.rm("g/q?x")
    fs.rm("g/d?", recursive=True)
    fs.rm("g/t?")  # of that name is none
    found = {name: fs.cat_file(name) for name in fs.find("g")}
    left = {"qax": b"qax", "a": b"a", "dd/x": b"dd/x", "s[1]*": b"s[1]*", "s1": b"s1"}
    new = {"copied": b"s[1]*", "moved": b"[a]", "d3/x": b"d?/x"}
    assert found == {f"/g/{name}": data for name, data in (left | new).items()}


def test_folders(fs, url):
    with pytest.raises(FileNotFoundError):
        fs.mkdir("a/b", create_parents=False)
    fs.mkdir("a/b")
    assert fs.isdir("a/b")
    with pytest.raises(FileExistsError):
        fs.mkdir("a")
    with pytest.raises(FileExistsError):
        fs.makedirs("a")
    fs.makedirs("a/b", exist_ok=True)
    store(fs, "a/x")
    with pytest.raises(NotADirectoryError):
        fs.mkdir("a/x/y")
    with pytest.raises(FileExistsError):
        fs.makedirs("a/x", exist_ok=True)
    for wrong in (fs.rmdir, fs.rm):
        with pytest.raises(OSError, match="not empty"):
            wrong("a")
    with pytest.raises(IsADirectoryError):
        fs.open("a")
    with pytest.raises(IsADirectoryError):
        fs.rm_file("a")
    with pytest.raises(FileNotFoundError):
        fs.rm("none")
    fs.rmdir("a/b")
    assert fs.ls("a", detail=False) == ["/a/x"]
    fs.rm("a/x")
    fs.rm("a")  # empty but for what the store keeps there
    assert not fs.exists("a")
    store(fs, "a/x")
    fs.rm("a", recursive=True)
    assert fs.find("/") == []


def test_many_make_one_folder_at_once(fs):
    for turn in range(20):
        together(lambda path: fs.makedirs(path, exist_ok=True), [f"{turn}/a/b"] * 4)
        assert fs.isdir(f"{turn}/a/b")
    with pytest.raises(FileExistsError):
        fs.makedirs("1/a/b")
    fs.pipe("file", b"x")
    with pytest.raises(FileExistsError):
        fs.makedirs("file", exist_ok=True)


@pytest.mark.parametrize("verb", ["mkdir", "makedirs"])
def test_of_many_who_make_one_new_folder_one_does(tmp_path, verb):
    """A folder may be a lock. Object stores have none."""
    fs = StripeFileSystem(url=str(tmp_path / "store"))

    def make(path: str) -> bool:
        try:
            getattr(fs, verb)(path)
        except FileExistsError:
            return False
        return True

    for turn in range(20):
        assert sorted(together(make, [f"{turn}/a/b"] * 4)) == [False] * 3 + [True]
    assert [fs.store.backend.list(f"{turn}/a")[0].name for turn in range(20)] == ["b"] * 20
    getattr(StripeFileSystem(url=str(tmp_path / "other")), verb)("/")
    with pytest.raises(FileExistsError):
        getattr(StripeFileSystem(url=str(tmp_path / "other")), verb)("/")
    assert list((tmp_path / "other").iterdir()) == []


def test_what_a_file_is(fs):
    store(fs, "d/x", width=3)
    fs.pipe("d/small", b"small")
    info = fs.info("d/x")
    assert (info["name"], info["size"], info["type"]) == ("/d/x", len(DATA), "file")
    assert (info["striped"], info["width"], info["unit"]) == (True, 3, UNIT)
    assert fs.du("/") == len(DATA) + 5
    assert fs.du("/", total=False) == {"/d/small": 5, "/d/x": len(DATA)}
    assert fs.glob("d/*") == ["/d/small", "/d/x"]
    assert fs.walk("/").__next__()[1:] == (["d"], [])
    before = {name: (fs.checksum(name), fs.ukey(name)) for name in ("d/x", "d/small")}
    assert before == {name: (fs.checksum(name), fs.ukey(name)) for name in before}
    assert fs.modified("d/x") == fs.created("d/x")
    store(fs, "d/x")
    fs.pipe("d/small", b"other")
    for name, (checksum, ukey) in before.items():
        assert fs.checksum(name) != checksum
        assert fs.ukey(name) != ukey


def test_get_and_put_are_whole(fs, tmp_path):
    (tmp_path / "in").write_bytes(DATA)
    fs.put_file(str(tmp_path / "in"), "d/x")
    fs.get_file("d/x", str(tmp_path / "out/x"))
    assert (tmp_path / "out/x").read_bytes() == DATA
    held = io.BytesIO()
    fs.get_file("d/x", held)
    assert held.getvalue() == DATA
    with pytest.raises(FileExistsError):
        fs.put_file(str(tmp_path / "in"), "d/x", mode="create")
    with pytest.raises(FileNotFoundError):
        fs.get_file("d/none", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_a_mapper_and_text(fs, url):
    mapper = fsspec.get_mapper(f"{url}/map")
    mapper["a"] = b"1"
    mapper["b/c"] = DATA
    assert dict(mapper) == {"a": b"1", "b/c": DATA}
    fs.write_text("t", "süß\nzwei\n")
    with fs.open("t", "r") as file:
        assert list(file) == ["süß\n", "zwei\n"]
    assert fs.head("t", 3) == b"s\xc3\xbc"
    assert fs.read_block("t", 0, 100, b"\n") == "süß\nzwei\n".encode()


@pytest.mark.parametrize(("mode", "name", "how"), [("wb", "x.gz", "gzip"), ("wt", "x.bz2", "infer"), ("wb", "x", "xz")])
def test_what_is_compressed_is_published_when_it_is_closed(fs, mode, name, how):
    """Python's compressors leave the file below them open: nothing was stored, and no error said so."""
    data = "many words " * 1000 if "t" in mode else b"many words " * 1000
    with fs.open(name, mode, compression=how) as out:
        out.write(data)
    with fs.open(name, mode.replace("w", "r"), compression=how) as file:
        assert file.read() == data
    out = fs.open(name, mode, compression=how)
    out.write(data[:5])
    del out
    gc.collect()

    def half() -> None:
        with fs.open(name, mode, compression=how) as out:
            out.write(data[:5])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    with fs.open(name, mode.replace("w", "r"), compression=how) as file:
        assert file.read() == data
