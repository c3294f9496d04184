"""What users pass for a store: text, paths of Python and URLs, at each door that takes one."""

import os
import pathlib
import warnings

import pytest

from bootseer.backends.fsspec_place import RENAMING, WHOLE
from bootseer.backends.open import Location, locate
from bootseer.errors import ConfigError
from bootseer.fsspecfs.filesystem import StripeFileSystem
from bootseer.objects import open_store
from bootseer.stripefs import open_fs, place
from support import forked


class Path:
    """Another library's."""

    def __init__(self, text: str | bytes) -> None:
        self.text = text

    def __fspath__(self) -> str | bytes:
        return self.text


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("/data/x", ("file://", "/data/x")),
        ("/data//x/", ("file://", "/data/x")),
        ("file:///data/x", ("file://", "/data/x")),
        ("bsx+file:///data/x#1?y=%20", ("file://", "/data/x#1?y=%20")),
        ("/data/hdfs:x/a:b/c::d", ("file://", "/data/hdfs:x/a:b/c::d")),
        ("/data/any://x", ("file://", "/data/any:/x")),
        (pathlib.Path("/data/x"), ("file://", "/data/x")),
        (Path("/data/x"), ("file://", "/data/x")),
        (Path(b"/data/\xff"), ("file://", "/data/\udcff")),
        ("file:///data/hdfs:/x", ("file://", "/data/hdfs:/x")),
        ("hdfs://n:8020", ("hdfs://n:8020", "/")),
        ("hdfs://n:8020//a//b/", ("hdfs://n:8020", "/a/b")),
        ("bsx+hdfs://service/a", ("hdfs://service", "/a")),
        (Path("hdfs://n:8020/a"), ("hdfs://n:8020", "/a")),
        ("hdfs://n/run#1", ("hdfs://n", "/run#1")),
        ("hdfs://n/q?x=1/%41+ b\n\t;[", ("hdfs://n", "/q?x=1/%41+ b\n\t;[")),
        ("hdfs://n/ lead\r\n", ("hdfs://n", "/ lead\r\n")),
        ("hdfs://n/a://b", ("hdfs://n", "/a:/b")),
        ("s3://bucket", ("s3://bucket", "/")),
        ("bsx+s3://bucket/run#1/q?x", ("s3://bucket", "/run#1/q?x")),
        ("local:///data/x/", ("local://", "/data/x")),
        ("memory://a/b/", ("memory://a", "/b")),
        ("file:///", ("file://", "/")),
        ("simplecache::s3://bucket/x", ("simplecache::s3://bucket", "/x")),
        ("simplecache::file:///data/x", ("simplecache::file://", "/data/x")),
        ("bsx+bsx+file:///data/x", ("file://", "/data/x")),
        ("HDFS://n:8020/A", ("hdfs://n:8020", "/A")),
        ("bsx+File:///A", ("file://", "/A")),
        ("S3://bucket/A", ("s3://bucket", "/A")),
    ],
)
def test_where_it_is(given, place):
    assert locate(given) == place
    assert locate(locate(given).url) == place


def test_the_url_of_a_place_is_absolute():
    assert locate("simplecache::file:///data/x").url == "simplecache::file:///data/x"


def test_a_tilde_is_the_home_folder_as_no_shell_reads_it_in_an_option(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for given, path in (("~/x", "/home/me/x"), (pathlib.Path("~/x"), "/home/me/x"), ("~", "/home/me"), ("./~", None)):
        assert locate(given).path == (path or os.path.abspath("~"))
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(ConfigError, match="no home folder is known here"):
        locate("~/x")


def test_a_relative_path_is_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("bsx+data", "bsx+/data", "./bsx+data", "local//x", "file//x", "a:b/c", "./s3:b", "x/hdfs:y", "x:1"):
        assert locate(given).path == os.path.abspath(given)  # a folder of that name
    for given in ("a/b", "./a/b", "file://a/b", pathlib.Path("a/b")):
        assert locate(given).path == f"{tmp_path}/a/b"
    assert locate("./hdfs:/b").path == f"{tmp_path}/hdfs:/b"


def test_folder_and_name():
    found = locate("hdfs://n:8020/a/b")
    assert (found.parent, found.name) == (Location("hdfs://n:8020", "/a"), "b")
    root = locate("hdfs://n:8020")
    assert (root.parent, root.name) == (root, "")
    fs, path = place("/data/x")
    assert (fs.url, path) == ("/data", "x")


CUT = (
    "hdfs://n:8020/run",
    "s3://bucket/run",
    "bsx+hdfs://n/run",
    "file:///x/run",
    "any://x",
    "registry://h/n",
    "registry+http://h/n",
    *(f"{scheme}://h/n" for scheme in sorted(WHOLE | RENAMING | {"hdfs", "webhdfs"})),
    "hdfs://",
)


@pytest.mark.parametrize("url", CUT)
def test_a_url_that_was_made_a_path_is_refused(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cut = pathlib.Path(url)
    for given in (cut, str(cut), f"{cut}/", cut / "step-1", Path(str(cut))):
        with pytest.raises(ConfigError, match="made a path"):
            locate(given)
    if not url.startswith("any"):
        with pytest.raises(ConfigError, match="made a path"):
            locate(os.path.abspath(url))


@pytest.mark.parametrize(
    "given",
    [
        " hdfs://n:1/x",
        "'hdfs://n:1/x'",
        "hdfs ://n:1/x",
        "1hdfs://n/x",
        "./hdfs://n:1/x",
        "../hdfs://n:1/x",
        "out/hdfs://n:1/x",
        "out/any://n/x",
        "hdfs//n:1/x",
        "s3//bucket/x",
        "hdfs:n:1/x",
        "s3:bucket/x",
        "bsx+hdfs:n/x",
        "hdfs:\\\\n\\x",
        "bsx+out/hdfs://n/x",
        pathlib.Path("out") / "hdfs://n:1/x",
        pathlib.Path("..") / "s3://bucket/x",
        pathlib.Path("out") / "file:///x",
        os.path.join("out", "bsx+hdfs://n/x"),
        os.path.relpath("s3://bucket/x", ".."),
    ],
)
def test_a_misspelt_url_is_no_folder_of_this_machine(given):
    with pytest.raises(ConfigError, match="misspelt or made a path"):
        locate(given)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file://",
        "bsx+file://",
        "hdfs://n:x/a",
        "hdfs://n#1",
        "hdfs://n?x/a",
        "hdfs://n:8020#1/a",
        "hdfs://n/a/../b",
        "hdfs://n/./b",
        "a\0b",
    ],
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError):
        locate(url)


def test_the_default_file_system_of_the_site(tmp_path, monkeypatch):
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(ConfigError, match="not an HDFS URL"):
        locate("hdfs:///a")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    for value, known in (("hdfs://n:8020/", True), ("hdfs://service", True), ("file:///", False)):
        property_ = f"<property><name>fs.defaultFS</name><value>{value}</value></property>"
        (tmp_path / "core-site.xml").write_text(f"<configuration>{property_}</configuration>")
        if known:
            assert locate("hdfs:///a") == (value.rstrip("/"), "/a")
        else:
            with pytest.raises(ConfigError, match="not an HDFS URL"):
                locate("hdfs:///a")


class TestDoors:
    """Each door is given a URL that was made a path: none makes anything on this machine."""

    @pytest.fixture(autouse=True)
    def here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").write_bytes(b"x")
        yield
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]

    CUT = pathlib.Path("hdfs://127.0.0.1:1/run")

    def test_stores(self):
        for door in (open_fs, open_store, place):
            with pytest.raises(ConfigError, match="made a path"):
                door(self.CUT)

    def test_fsspec(self):
        with pytest.raises(ValueError, match="made a path"):
            StripeFileSystem(url=self.CUT)
        fs = StripeFileSystem(url="memory://x")
        for path in (self.CUT, str(self.CUT), pathlib.Path("bsx+memory://x/y")):
            for action in (fs.pipe_file, fs.open, fs.ls, fs.rm):
                with pytest.raises(ValueError, match="made a path"):
                    action(path, b"1") if action == fs.pipe_file else action(path)
        with pytest.raises(ValueError, match="not in the striped store"):
            fs.pipe_file("hdfs://127.0.0.1:1/run", b"1")

    @pytest.mark.parametrize(
        "command",
        [
            ["fs", "put", "file", CUT],
            ["fs", "get", "file", CUT],
            ["fs", "get", CUT, "out"],
            ["fs", "cp", "file", CUT],
            ["fs", "cp", CUT, "out"],
            ["fs", "mv", "file", CUT],
            ["fs", "ls", CUT],
            ["fs", "inspect", CUT],
            ["fs", "rm", CUT],
            ["fs", "commit", CUT],
            ["fs", "gc", CUT],
            ["fs", "fsck", CUT],
            ["fs", "mount", CUT, "mnt"],
            ["fs", "mount", "/", CUT],
            ["image", "inspect", "x:1", "--store", CUT],
            ["store", "ls", "--store", CUT],
        ],
        ids=lambda words: " ".join(map(str, words)),
    )
    def test_commands(self, command):
        done = forked.cli(*command)
        assert (done.returncode, done.stdout) == (78, "")
        assert "made a path" in done.stderr
        assert len(done.stderr.splitlines()) == 1

    @pytest.mark.torch
    def test_torch(self):
        import torch
        import torch.distributed.checkpoint as dcp

        import bootseer.torch as bt

        warnings.simplefilter("ignore")
        cut = self.CUT
        for action in (
            lambda: bt.save({"a": 1}, cut),
            lambda: bt.save({"a": 1}, f"{cut}/"),
            lambda: bt.load(cut),
            lambda: bt.save_safetensors({"a": torch.ones(1)}, cut),
            lambda: bt.load_safetensors(cut),
            lambda: bt.safe_open(cut),
            lambda: bt.StorageWriter(cut),
            lambda: bt.StorageReader(cut),
            lambda: bt.StorageReader("x").reset(cut),
            lambda: dcp.save({"w": torch.ones(1)}, checkpoint_id=cut, storage_writer=bt.StorageWriter("x")),
        ):
            with pytest.raises(ConfigError, match="made a path"):
                action()


@pytest.mark.torch
@pytest.mark.parametrize("how", ["bsx+file://{}", "file://{}", "{}"])
@pytest.mark.parametrize("kind", [str, pathlib.Path, Path])
def test_save_takes_what_load_takes(how, kind, tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    import bootseer.torch as bt

    if kind is pathlib.Path and "://" in how:
        pytest.skip("no path")
    warnings.simplefilter("ignore")
    base = how.format(tmp_path / "ck")
    bt.save({"a": 1}, kind(f"{base}/s.pt"))
    bt.save({"a": 2}, kind(f"{base}/step/") if kind is not pathlib.Path else f"{base}/step/")
    bt.save_safetensors({"a": torch.ones(1)}, kind(f"{base}/m.safetensors"))
    dcp.save({"w": torch.ones(3)}, storage_writer=bt.StorageWriter(kind(f"{base}/dcp")))
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=bt.StorageReader(kind(f"{base}/dcp")))
    assert bool(state["w"].all())
    assert (bt.load(kind(f"{base}/s.pt")), bt.load(kind(f"{base}/step"))) == ({"a": 1}, {"a": 2})
    assert bt.load_safetensors(kind(f"{base}/m.safetensors"))["a"].item() == 1
    assert {"s.pt", "step", "m.safetensors", "dcp"} <= {entry.name for entry in (tmp_path / "ck").iterdir()}
