"""What a COMMIT names stays, whoever removes or renames; a whole checkpoint goes and moves."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from bootseer.backends.fsspec import FsspecBackend
from bootseer.backends.interface import Backend, join
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError
from bootseer.fsspecfs.filesystem import StripeFileSystem
from bootseer.stripefs import StripeFS, open_fs
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.copy import copy_tree
from bootseer.stripefs.maintenance import check


@pytest.fixture
def memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


@pytest.fixture(params=["folder", "memory"])
def url(request, tmp_path, memory) -> str:
    return str(tmp_path / "run") if request.param == "folder" else "memory://bucket/run"


@pytest.fixture
def fs(url) -> StripeFS:
    return open_fs(url)


def checkpoint(fs: StripeFS, folder: str, *names: str) -> None:
    save = fs.save(folder)
    for name in names or ("a", "conf", "sub/b"):
        with save.create(name, striped=not name.endswith("conf"), unit=4096, width=2) as out:
            out.write(name.encode() * 5000)
    save.commit()


def names(fs: StripeFS, folder: str = "") -> list[str]:
    try:
        return [path for path, _ in commit.walk(fs.backend, folder)]
    except NotFoundError:  # an object store has no empty folder
        return []


NAMED = ("step-1/a", "step-1/conf", "step-1/sub/b", "step-1/sub", "step-1/COMMIT")


@pytest.mark.parametrize(
    ("base", "path"),
    [*((base, path) for base in ("", "step-1") for path in NAMED), ("step-1/sub", "step-1/sub/b")],
)
def test_what_a_commit_names_is_not_removed_or_renamed(url, fs, path, base):
    checkpoint(fs, "step-1")
    before = names(fs)
    inner = open_fs(f"{url}/{base}".rstrip("/"))
    name = path.removeprefix(base).strip("/")
    remove = inner.remove_tree if path == "step-1/sub" else inner.remove
    for attempt in (lambda: remove(name), lambda: inner.rename(name, "elsewhere")):
        with pytest.raises(NotWritableError, match=r"checkpoint .*step-1") as caught:
            attempt()
        assert "--force" in caught.value.hint
        assert "\n" not in str(caught.value)
        assert names(fs) == before
    fs.verify("step-1")
    remove(name, force=True)
    assert path not in names(fs)
    with pytest.raises(DataError):
        fs.checkpoint("step-1")


def test_the_stripes_of_a_checkpoint_are_not_removed(fs):
    checkpoint(fs, "step-1")
    for attempt in (lambda: fs.remove_tree("step-1/.bsx"), lambda: fs.rename("step-1/.bsx", "x")):
        with pytest.raises(NotWritableError, match=r"COMMIT of checkpoint .*step-1"):
            attempt()
    fs.verify("step-1")


def test_what_no_commit_names_goes_as_before(fs):
    checkpoint(fs, "step-1")
    for path in ("step-1/extra", "step-1/more/x", "plain"):
        with fs.create(path) as out:
            out.write(b"x")
    fs.rename("step-1/extra", "extra")
    fs.remove_tree("step-1/more")
    fs.remove("plain")
    fs.verify("step-1")


def test_a_commit_with_a_damaged_byte_still_protects(tmp_path):
    fs = open_fs(str(tmp_path))
    checkpoint(fs, "step-1")
    manifest = tmp_path / "step-1/COMMIT"
    right = manifest.read_bytes()
    for position in range(1, len(right)):
        flipped = bytearray(right)
        flipped[position - 1] ^= 0x20
        for broken in (bytes(flipped), right[:position]):
            manifest.write_bytes(broken)
            with pytest.raises(NotWritableError):
                fs.remove("step-1/a")
            with pytest.raises(NotWritableError):
                fs.refuse_committed("step-1/sub/c")
            with pytest.raises(DataError):
                fs.get("step-1/conf", tmp_path / "got")
    fs.remove("step-1/a", force=True)


@pytest.mark.parametrize("left", [b"", bytes(300)])
def test_a_commit_of_which_nothing_is_left_still_protects(tmp_path, left):
    fs = open_fs(str(tmp_path))
    checkpoint(fs, "step-1")
    (tmp_path / "step-1/COMMIT").write_bytes(left)
    with pytest.raises(NotWritableError):
        fs.remove("step-1/a")
    with pytest.raises(NotWritableError):
        fs.refuse_committed("step-1/sub/c")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/COMMIT").write_bytes(left)  # somebody else's
    fs.refuse_committed("plain/sub/c")
    fs.remove("plain/COMMIT")


def test_a_checkpoint_in_a_checkpoint_is_named_by_the_outer_one(fs):
    checkpoint(fs, "outer/inner")
    fs.commit("outer")
    for attempt in (lambda: fs.remove_tree("outer/inner"), lambda: fs.remove("outer/inner/COMMIT")):
        with pytest.raises(NotWritableError, match=r"checkpoint .*outer"):
            attempt()
    fs.verify("")
    fs.remove_tree("outer")
    assert names(fs) == []


def test_a_whole_checkpoint_goes(fs):
    for number in (1, 2, 3):
        checkpoint(fs, f"step-{number}")
    fs.remove_tree("step-3")
    assert fs.latest() == "step-2"
    assert not check.fsck(fs.backend).errors
    for number in (1, 2):
        fs.remove_tree(f"step-{number}")
    assert names(fs) == []


@pytest.mark.parametrize("folder", ["step-2", "all"])
def test_a_removal_that_dies_leaves_no_commit_that_names_missing_files(fs, monkeypatch, folder):
    for path in ("step-1", "step-2", "all/step-3", "all/step-4"):
        checkpoint(fs, path)
    monkeypatch.setenv("BOOTSEER_FAULTS", "stripefs.remove.rest=eio")
    with pytest.raises((BootseerError, OSError)):
        fs.remove_tree(folder)
    monkeypatch.delenv("BOOTSEER_FAULTS")
    left = everything(fs.backend)
    assert [path for path in left if path.endswith("/a") and "step-1/" not in path]
    assert {path for path in left if path.endswith("COMMIT")} == {
        "step-1/COMMIT",
        *({"step-2/COMMIT"} if folder == "all" else {f"all/{name}" for name in MANIFESTS}),
    }
    assert fs.latest() == ("step-2" if folder == "all" else "step-1")


MANIFESTS = ("step-3/COMMIT", "step-4/COMMIT")


def everything(backend: Backend, folder: str = "") -> list[str]:
    """Paths of all files, hidden ones too."""
    found = []
    for entry in backend.list(folder):
        path = join(folder, entry.name)
        found += everything(backend, path) if entry.is_dir else [path]
    return found


def test_a_link_to_a_checkpoint_elsewhere_is_removed_alone(tmp_path):
    fs = open_fs(str(tmp_path / "run"))
    other = open_fs(str(tmp_path / "other"))
    checkpoint(other, "step-9")
    checkpoint(fs, "old/step-1")
    Path(fs.url, "old/link").symlink_to(tmp_path / "other")
    fs.remove_tree("old")
    assert other.latest() == "step-9"
    Path(fs.url, "link").symlink_to(tmp_path / "other/step-9")
    fs.remove_tree("link")
    other.verify("step-9")


def test_a_whole_checkpoint_moves(tmp_path):
    fs = open_fs(str(tmp_path / "run"))
    for number in (1, 2, 3):
        checkpoint(fs, f"a/step-{number}")
    fs.rename("a/step-3", "b/step-3")
    assert (fs.latest("a"), fs.latest("b")) == ("a/step-2", "b/step-3")
    fs.rename("a/step-2", "step-2")
    assert (fs.latest("a"), fs.latest()) == ("a/step-1", "step-2")
    fs.verify("")
    assert not check.fsck(fs.backend).errors


def test_nothing_is_moved_into_a_checkpoint(fs):
    checkpoint(fs, "step-1")
    with fs.create("x") as out:
        out.write(b"x")
    with pytest.raises(NotWritableError, match="has a COMMIT already"):
        fs.rename("x", "step-1/conf")
    fs.rename("x", "step-1/conf", force=True)
    with pytest.raises(DataError, match="changed after COMMIT"):
        fs.checkpoint("step-1")


def test_fsspec_protects_too(url):
    there = StripeFileSystem(url=url)
    checkpoint(there.store, "step-1")
    before = names(there.store)
    there.makedirs("elsewhere")
    for attempt in (
        lambda: there.rm("step-1/a"),
        lambda: there.rm_file("step-1/conf"),
        lambda: there.rm("step-1/sub", recursive=True),
        lambda: there.rm("step-1/*"),
        lambda: there.rm("step-1", recursive=True, maxdepth=2),
        lambda: there.mv("step-1/a", "elsewhere/a"),
        lambda: there.mv(["/step-1/a", "/step-1/conf"], ["/elsewhere/a", "/elsewhere/conf"]),
        lambda: there.mv("step-1/*", "elsewhere/", recursive=True),
        lambda: there.mv("step-1/sub", "elsewhere/sub", recursive=True),
    ):
        with pytest.raises(PermissionError, match="step-1"):
            attempt()
        assert names(there.store) == before
    there.store.verify("step-1")
    there.rm("step-1", recursive=True)
    assert [path for path in names(there.store) if "step-1" in path] == []


def test_fsspec_moves_a_whole_checkpoint(url):
    there = StripeFileSystem(url=url)
    for number in (1, 2):
        checkpoint(there.store, f"step-{number}")
    there.mv("step-2", "old/step-2", recursive=True)
    there.store.verify("old/step-2")
    there.store.checkpoint("old/step-2")
    assert (there.store.latest(), there.store.latest("old")) == ("step-1", "old/step-2")
    assert "step-2/a" not in names(there.store)
    for number in (3, 4):
        checkpoint(there.store, f"run/step-{number}")
    there.makedirs("all")
    there.mv("run/step-*", "all/", recursive=True)
    there.store.verify("")
    assert there.store.latest("all") == "all/step-4"
    assert not [name for name in names(there.store) if name.startswith("run/step")]
    with pytest.raises(ValueError, match="maxdepth"):
        there.mv("all", "x", recursive=True, maxdepth=1)


def test_fsspec_empties_a_store_that_is_a_checkpoint(url):
    there = StripeFileSystem(url=f"{url}/step-1")
    checkpoint(open_fs(url), "step-1")
    there.rm("/", recursive=True)
    assert names(there.store) == []


@pytest.mark.parametrize("base", ["step-1", "step-1/sub", "step-1/sub/deep"])
def test_a_commit_above_the_base_counts_on_any_store(url, fs, base):
    checkpoint(fs, "step-1", "a", "conf", "sub/deep/conf")
    name = "step-1/sub/deep/conf".removeprefix(base).strip("/")
    inner = open_fs(f"{url}/{base}")
    assert inner.committed_digest(name) == fs.committed_digest("step-1/sub/deep/conf") != ""
    with pytest.raises(NotWritableError, match=f"checkpoint {url}/step-1 has a COMMIT"):
        inner.refuse_committed(f"{name}.new")
    with pytest.raises(PermissionError, match="has a COMMIT already"):
        StripeFileSystem(url=f"{url}/{base}").pipe_file(name, b"new")
    fs.verify("step-1")
    open_fs(f"{url}/step-2/{base}").refuse_committed(name)


def test_a_store_whose_credentials_end_at_its_prefix_still_works(memory, monkeypatch, caplog):
    checkpoint(open_fs("memory://bucket/run"), "step-1", "sub/conf")
    inner = open_fs("memory://bucket/run/step-1/sub")
    real = fsspec.implementations.memory.MemoryFileSystem.info

    def info(self, path, **options):
        if "/step-1/sub" not in path:
            raise PermissionError(13, "Forbidden", path)
        return real(self, path, **options)

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "info", info)
    assert inner.committed_digest("conf") == ""
    inner.refuse_committed("new")
    assert sum("above the URL given may not be looked at" in record.message for record in caplog.records) == 1


def test_the_root_of_an_object_store_is_the_bucket(monkeypatch):
    made = FsspecBackend("s3://bucket/run/x", {"anon": True})
    monkeypatch.setattr(FsspecBackend, "call", lambda self, doing, function, seconds=0: function(self._filesystem()[0]))
    root, path = made.whole()
    assert (root.url, root.full("COMMIT"), path) == ("s3://bucket/", "bucket/COMMIT", "run/x")
    assert [folder for _, folder, _ in commit.above(made, "f")] == ["", "run", ""]
    assert FsspecBackend("s3://bucket", {"anon": True}).whole()[1] == ""
    assert FsspecBackend("http://host/a").whole()[1] == ""


@pytest.mark.parametrize("target", ["copy", "there/", "over"])
def test_fsspec_copies_a_whole_checkpoint(url, target):
    there = StripeFileSystem(url=url)
    checkpoint(there.store, "run/step-1")
    there.makedirs("over")
    there.copy("run/step-1", target, recursive=True)
    copied = {"copy": "copy", "there/": "there/step-1", "over": "over/step-1"}[target]
    there.store.verify("")
    assert [file.digest for file in there.store.checkpoint(copied).files] == [
        file.digest for file in there.store.checkpoint("run/step-1").files
    ]
    with pytest.raises(PermissionError, match="names the files beside it"):
        there.cp_file("run/step-1/COMMIT", "elsewhere")
    with pytest.raises(PermissionError, match="COMMIT"):
        there.copy("run/step-1", "run/step-1/copy", recursive=True)
    there.store.verify("")


@pytest.mark.parametrize("how", ["copy_tree", "resumed", "fsspec", "base"])
def test_a_checkpoint_in_a_checkpoint_is_copied(url, how):
    there = StripeFileSystem(url=url)
    fs = there.store
    checkpoint(fs, "out/in-1")
    checkpoint(fs, "out")
    assert "in-1/COMMIT" in [file.path for file in fs.checkpoint("out").files]
    if how == "fsspec":
        there.copy("out", "copy", recursive=True)
    elif how == "base":
        copy_tree(open_fs(f"{url}/out"), "", fs, "copy")
    else:
        copy_tree(fs, "out", fs, "copy")
        if how == "resumed":
            copy_tree(fs, "out", fs, "copy", resume=True)
    fs.verify("")
    assert [file.path for file in fs.checkpoint("copy").files] == [file.path for file in fs.checkpoint("out").files]
    fs.checkpoint("copy/in-1")


@pytest.mark.parametrize(("what", "lacks"), [("run/step-1", "a"), ("run/step-1/*", "sub/b")])
def test_fsspec_does_not_commit_a_copy_that_lacks_a_file(url, what, lacks):
    there = StripeFileSystem(url=url)
    checkpoint(there.store, "run/step-1")
    if lacks == "a":
        there.store.remove("run/step-1/a", force=True)
    with pytest.raises(OSError, match=f"lacks {lacks}"):
        there.copy(what, "copy/", recursive=lacks == "a")
    assert lacks == "a" or "copy/a" in names(there.store)
    assert not [name for name in names(there.store) if name.startswith("copy/") and name.endswith("COMMIT")]
