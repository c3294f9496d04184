"""A store in a folder where others can write too: root that reads, writes and removes there stays in it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from bootseer.backends.folder import FolderBackend
from bootseer.backends.open import open_storage
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError
from bootseer.objects import open_store
from bootseer.stripefs import layout, open_fs
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.localcopy import replaced, written
from bootseer.stripefs.maintenance import scan
from support import forked, neighbour
from support.startups import StartUp

pytestmark = pytest.mark.root
ALICE = 1001
OLD = time.time() - 7 * 86400


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """In it ``profiles`` and ``ck`` are alice's. Beside it is ``etc``, with what is root's alone."""
    etc, store = tmp_path / "etc", tmp_path / "store"
    etc.mkdir(mode=0o700)
    for name in ("secret", ".tmp-precious", "hot-1.pack", "COMMIT"):
        (etc / name).write_text("only root may read this")
        os.chmod(etc / name, 0o600)
        os.utime(etc / name, (OLD, OLD))
    for folder in ("profiles/T", "ck/step-1"):
        (store / folder).mkdir(parents=True)
        for path in (store / folder, (store / folder).parent):
            os.chown(path, ALICE, ALICE)
    return store


def link(path: Path, target: str) -> None:
    path.symlink_to(target)
    os.chown(path, ALICE, ALICE, follow_symlinks=False)


def state(folder: Path) -> list[tuple[str, bytes]]:
    return sorted((path.name, path.read_bytes()) for path in folder.iterdir())


def test_links_of_a_tenant_show_root_nothing_that_is_not_the_tenants(store: Path) -> None:
    (store / "ck/step-1/real").write_bytes(b"weights")
    os.chown(store / "ck/step-1/real", ALICE, ALICE)
    for name, target in {
        "last": "real", "secret": "../../../etc/secret", "absolute": str(store.parent / "etc/secret"),
        "folder": "../../../etc", "loop": "loop", "gone": "nothing", "root": "/",
    }.items():  # fmt: skip
        link(store / "ck/step-1" / name, target)
    for backend, at in ((open_storage(str(store / "ck")), "step-1"), open_storage(str(store / "ck/step-1")).whole()):
        listed = {entry.name: entry for entry in backend.list(at)}
        assert sorted(listed) == ["absolute", "folder", "last", "loop", "real", "root", "secret"]
        assert [name for name, entry in listed.items() if entry.size or entry.is_dir] == ["last", "real"]
        with backend.open(f"{at}/last") as file:
            assert file.read(0, file.size) == b"weights"
        calls: list[Callable[[str], object]] = [backend.open, backend.stat, backend.list]
        for call in calls:
            for name in ("secret", "absolute", "folder", "folder/secret", "root/etc/passwd", "loop"):
                with pytest.raises(BootseerError, match=r"not followed|symbolic links"):
                    call(f"{at}/{name}")
            with pytest.raises(NotFoundError):
                call(f"{at}/gone")
        assert sorted(path for path, _ in backend.walk(at)) == sorted(f"{at}/{name}" for name in listed)


def test_a_store_that_a_tenant_replaces_by_a_link_is_none(store: Path) -> None:
    os.rename(store / "ck/step-1", store / "ck/before")
    link(store / "ck/step-1", str(store.parent / "etc"))
    for call in (
        lambda: open_fs(str(store / "ck/step-1")).files(),
        lambda: open_store(str(store / "ck/step-1")).get("secret", most=99),
    ):
        with pytest.raises(NotWritableError, match="the link step-1, which user 1001 made, is not followed"):
            call()


@pytest.mark.parametrize("to", ["default", "inside"])
def test_nothing_is_written_or_removed_behind_links_of_a_tenant(store: Path, to: str) -> None:
    """As what a block server puts into a profile at the end of a recording, and removes there."""
    etc = store.parent / "etc"
    before = state(etc)
    link(store / "profiles/T/default", str(etc))
    link(store / "profiles/T/inside", "../../ck")
    link(store / "ck/step-1/f", str(etc / "secret"))
    objects, backend = open_store(str(store)), open_storage(str(store))
    at = f"profiles/T/{to}"
    calls: list[Callable[[], object]] = [
        lambda: objects.put(f"{at}/x.trace", b"x"),
        lambda: objects.put(f"{at}/secret", b"x", overwrite=True),
        lambda: objects.delete(f"{at}/hot-1.pack"),
        lambda: backend.create(f"{at}/new/x"),
        lambda: backend.make_folder(f"{at}/new"),
        lambda: backend.rename(f"{at}/secret", "stolen", overwrite=True),
        lambda: backend.rename("ck/step-1/f", f"{at}/f", overwrite=False),
        lambda: backend.remove_folder(f"{at}/x"),
        lambda: backend.remove_empty_folder(f"{at}/x"),
        lambda: backend.change(f"{at}/secret", mtime_ns=1),
    ]
    for call in calls:
        with pytest.raises(NotWritableError, match="not followed"):
            call()
    assert objects.put("ck/step-1/f", b"mine", overwrite=True)
    assert objects.get("ck/step-1/f", most=9) == b"mine"
    backend.remove_folder("profiles/T/default", first=("COMMIT",))
    link(store / "profiles/T/a", str(etc))
    backend.remove_folder("profiles/T", first=("COMMIT",))
    assert state(etc) == before
    assert (etc / "secret").stat().st_mtime == OLD


def test_only_own_old_temporary_files_are_swept(store: Path) -> None:
    folder = store / "profiles/T/j"
    folder.mkdir()
    for name, owner in ((".tmp-alices", ALICE), (".tmp-roots", 0), (".tmp-new", 0), (".tmp-folder", 0)):
        path = folder / name
        path.mkdir() if name == ".tmp-folder" else path.write_bytes(b"x")
        os.chown(path, owner, owner)
        if name != ".tmp-new":
            os.utime(path, (OLD, OLD))
    link(folder / ".tmp-link", str(store.parent / "etc/.tmp-precious"))
    os.utime(folder / ".tmp-link", (OLD, OLD), follow_symlinks=False)
    open_store(str(store)).put("profiles/T/j/k", b"")
    assert sorted(os.listdir(folder)) == [".tmp-alices", ".tmp-folder", ".tmp-link", ".tmp-new", "k"]


@pytest.fixture
def exchanging(store: Path) -> Iterator[Path]:
    """A file that a neighbour makes a pipe, a link, a folder and a file again, all the time."""
    path, end = store / "ck/step-1/f", threading.Event()
    new, etc = path.with_name("new"), store.parent / "etc/secret"

    def turns() -> None:
        while not end.is_set():
            for make in (lambda: os.mkfifo(new), lambda: link(new, str(etc)), lambda: new.write_bytes(b"right")):
                make()
                os.replace(new, path)

    path.write_bytes(b"right")
    thread = threading.Thread(target=turns)
    thread.start()
    yield path
    end.set()
    thread.join()


def test_nobody_waits_for_a_pipe_that_comes_between_the_look_and_the_opening(store: Path, exchanging: Path) -> None:
    objects, ended = open_store(str(store / "ck")), threading.Event()
    seen: list[object] = []

    def read() -> None:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            try:
                seen.append(objects.get("step-1/f", most=100))
            except BootseerError as exc:
                seen.append(type(exc))
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    assert ended.wait(30.0), "it waits for the pipe"
    assert {one for one in seen if isinstance(one, bytes)} <= {b"right", b""}  # before it is written it is empty
    assert NotWritableError in seen
    assert b"right" in seen


@pytest.mark.parametrize("form", ["html", "parquet"])
@pytest.mark.parametrize("how", ["link", "folder", "pipe"])
def test_a_file_that_root_writes_in_a_folder_of_another_is_there_and_nowhere_else(
    store: Path, tmp_path: Path, how: str, form: str
) -> None:
    """Red before: -o wrote over what a neighbour's link led to, a file of an image with any content among it."""
    before, theirs, events = state(store.parent / "etc"), store / "ck/step-1", tmp_path / "a.jsonl"
    made = StartUp()
    made.span("n1", "image", 0, 5)
    made.write(events)
    output = theirs / "out"
    if how == "link":
        link(output, "../../../etc/secret")
    elif how == "pipe":
        os.mkfifo(output)
        os.chown(output, ALICE, ALICE)
    else:
        link(theirs / "sub", "../../../etc")
        output = theirs / "sub/secret"
    done = forked.cli("profile", "export", events, "--format", form, "-o", output, timeout=30)
    assert state(store.parent / "etc") == before
    assert "Traceback" not in done.stderr
    if how == "link":
        assert done.returncode == 0
        assert not output.is_symlink()
        assert output.stat().st_size > 100
    else:
        assert done.returncode not in (0, 1)
        assert len(done.stderr.splitlines()) == 1


def test_root_writes_where_its_own_links_and_devices_lead(store: Path, tmp_path: Path) -> None:
    theirs = store / "ck/step-1"
    (theirs / "plain").write_text("old")
    os.chown(theirs / "plain", ALICE, ALICE)
    (tmp_path / "mine").symlink_to(theirs / "plain")
    read, write = os.pipe()
    for output in (
        theirs / "new",
        theirs / "plain",
        tmp_path / "mine",
        tmp_path / "own",
        Path(f"/dev/fd/{write}"),
        Path("/dev/null"),
    ):
        with written(output) as file:
            file.write(b"some bytes")
        if output.is_relative_to("/dev"):
            continue
        assert output.read_bytes() == b"some bytes"
    assert (tmp_path / "mine").is_symlink()
    assert os.read(read, 99) == b"some bytes"
    os.close(read)
    os.close(write)


def test_what_a_neighbour_puts_beside_them_hides_no_files(store: Path) -> None:
    """Red before: a listing ended at a link that is not followed, a pipe or what is no whole pointer; fsspec's find was
    empty then, and so was the newest checkpoint of a folder that others write to."""
    theirs = store / "ck"
    (theirs / "good").write_bytes(b"weights")
    link(theirs / "away", "../../etc/secret")
    link(theirs / "loop", "loop")
    os.mkfifo(theirs / "pipe")
    with open_fs(str(theirs)).create("torn") as out:
        out.write(bytes(layout.PLAIN_BELOW))
    (theirs / "torn").write_bytes((theirs / "torn").read_bytes()[:-9])
    found = {one.path: one.size for one in open_fs(str(theirs)).ls() if not one.is_dir}
    assert found["good"] == 7
    assert found.keys() >= {"away", "torn"}
    files = fsspec.filesystem("bsx+file", url=f"file://{theirs}")
    assert files.cat("good") == b"weights"
    assert "/good" in files.find("/")
    with pytest.raises(DataError):
        open_fs(str(theirs)).open("torn")


def test_a_user_replaces_a_neighbours_link_and_nothing_behind_it() -> None:
    """As `env export -o` does in a folder of a group."""
    with neighbour.place() as shared:
        shared.chmod(0o777)
        (shared / "mine").write_text("precious")
        os.chown(shared / "mine", ALICE, ALICE)
        (shared / "out").symlink_to("mine")
        os.chown(shared / "out", neighbour.NOBODY, neighbour.NOBODY, follow_symlinks=False)
        os.seteuid(ALICE)
        try:
            with replaced(shared / "out") as out:
                out.write(b"new")
        finally:
            os.seteuid(0)
        assert (shared / "mine").read_text() == "precious"
        assert (shared / "out").read_text() == "new"
        assert not (shared / "out").is_symlink()


def test_links_to_folders_that_they_lie_in_are_no_paths_without_end(tmp_path: Path) -> None:
    """A tenant had root's `fs fsck`, `fs cp` and `fs get` walk for ever: 2^40 paths. Links to elsewhere still count."""
    (tmp_path / "store/a/b").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for folder in ("store/a/b", "other"):
        (tmp_path / folder / "file").touch()
    for name, target in {"one": ".", "two": "..", "three": "../../store/a", "away": "../../other"}.items():
        (tmp_path / "store/a" / name).symlink_to(target)
    (tmp_path / "store/a/b/again").symlink_to("..")
    backend = FolderBackend(tmp_path / "store")
    assert [path for path, _ in itertools.islice(commit.walk(backend, ""), 1000)] == ["a/away/file", "a/b/file"]
    assert len([*itertools.islice(scan.walk(backend, ""), 1000)]) == 4
