"""Extraction of trees without a mount: all that a tree has, whole files only, and nothing after a failure."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from bootseer import erofs
from bootseer.blocks import tree
from bootseer.blocks.extract.tree import Extraction, extract
from bootseer.blocks.fetch.source import StoreSource
from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.blocks.metadata import localize
from bootseer.blocks.profiles import library
from bootseer.blocks.without_mount import look
from bootseer.chunks.hashing import Buffer
from bootseer.erofs import xattr
from bootseer.errors import (
    BootseerError,
    DataError,
    FullError,
    NotFoundError,
    NotWritableError,
    PrivilegeError,
    UnavailableError,
)
from bootseer.objects.folder import FolderStore
from support import forked

ROOT = os.geteuid() == 0
EXTRACTION = "bootseer.blocks.extract.tree"


def grow(root: Path) -> None:
    root.mkdir()
    for name, size in (("a-big", 700_000), ("middle", 70_000), ("small", 10), ("empty", 0)):
        (root / name).write_bytes(os.urandom(size))
    (root / "again").write_bytes((root / "a-big").read_bytes())
    (root / "sub" / "deep").mkdir(parents=True)
    for number in range(50):
        (root / "sub" / f"{number:03}").write_bytes(b"%d" % number)
    os.link(root / "middle", root / "sub" / "hard")
    os.link(root / "empty", root / "sub" / "hard-empty")
    (root / "link").symlink_to("sub/deep")
    os.mkfifo(root / "fifo", 0o620)
    os.link(root / "fifo", root / "sub" / "fifo")
    with (root / "sparse").open("wb") as file:
        file.truncate(8 << 20)
        file.seek(4 << 20)
        file.write(b"middle")
    (root / "zeros").write_bytes(bytes(300_000))
    (root / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"z")
    os.setxattr(root / "small", "user.a", b"1")
    os.setxattr(root / "sub", "user.b", b"2")
    (root / "suid").write_bytes(b"#!")
    if ROOT:
        os.mknod(root / "char", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.chown(root / "suid", 123, 456)
        os.chown(root / "link", 7, 8, follow_symlinks=False)
        os.setxattr(root / "suid", "security.thing", b"s")
    (root / "suid").chmod(0o4711)
    (root / "sub" / "deep").chmod(0o1555)
    os.utime(root / "small", ns=(5, 1_500_000_000_123_456_789))
    os.utime(root / "link", ns=(5, 1_400_000_000_123_456_789), follow_symlinks=False)
    os.utime(root / "sub", ns=(5, 1_300_000_000_123_456_789))


def fingerprint(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    links: dict[int, str] = {}
    for folder, folders, files in os.walk(root):
        for name in sorted([".", *folders, *files]):
            path = os.path.join(folder, name)
            info = os.lstat(path)
            key = os.path.relpath(path, root)
            content: object = None
            if stat.S_ISREG(info.st_mode):
                content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            names = [] if stat.S_ISLNK(info.st_mode) else os.listxattr(path)
            xattrs = {attr: os.getxattr(path, attr) for attr in names}
            same = links.setdefault(info.st_ino, key) if not stat.S_ISDIR(info.st_mode) else ""
            found[key] = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, info.st_rdev, content, xattrs, same)
    return found


def powerless(found: dict[str, object]) -> dict[str, object]:
    """What an extraction makes of it: all of this user, no device, no set-id bit, no attribute but the user's own."""
    kept: dict[str, object] = {}
    for name, row in found.items():
        mode, _, _, mtime, rdev, content, xattrs, same = row  # type: ignore[misc]
        if rdev:
            continue
        plain = {attr: value for attr, value in xattrs.items() if attr.startswith("user.")}
        kept[name] = (mode & ~0o6000, os.geteuid(), os.getegid(), mtime, 0, content, plain, same)
    return kept


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "tree"
        grow(self.source)
        erofs.build(self.source, folder / "meta", folder / "data")
        self.store = FolderStore(folder / "store")
        self.digest = tree.publish(self.store, folder / "meta", folder / "data", block_size=64 << 10).digest
        self.want = powerless(fingerprint(self.source))

    def damage(self) -> None:
        """Flip a bit in every data frame's first bytes."""
        local = localize(self.store, self.digest, self.folder / "look")
        for pack in local.map.packs:
            path = self.folder / "store" / pack.key
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 1
            path.write_bytes(raw)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_everything_comes_out(site: Site) -> None:
    seen: list[tuple[int, int]] = []
    extract(site.store, site.digest, site.folder / "plain", progress=lambda done, total: seen.append((done, total)))
    assert fingerprint(site.folder / "plain") == site.want
    assert seen[-1][0] == seen[-1][1] > 700_000
    sparse = os.stat(site.folder / "plain" / "sparse")
    assert sparse.st_blocks * 512 < 1 << 20
    assert os.stat(site.folder / "plain" / "zeros").st_blocks * 512 < 100_000


def test_a_folder_that_a_neighbour_exchanges_meanwhile_is_not_followed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: who can write above it led the files to wherever this user may write."""
    victim, theirs, moved = (site.folder / name for name in ("victim", "theirs", "moved"))
    (victim / "deep").mkdir(parents=True)
    prepare = Extraction.prepare

    (site.folder / "plain").mkdir()
    (site.folder / "plain").chmod(0o2777)

    def exchanged(self: Extraction) -> None:
        assert not (site.folder / "plain").stat().st_mode & 0o022, "nobody else writes in it, either"
        prepare(self)
        os.rename(site.folder / "plain", moved)
        theirs.mkdir()
        for name in moved.glob(".bootseer-extract-*"):
            (theirs / name.name).symlink_to(name)
        (theirs / "sub").symlink_to(victim)
        (site.folder / "plain").symlink_to(theirs)

    monkeypatch.setattr(Extraction, "prepare", exchanged)
    extract(site.store, site.digest, site.folder / "plain")
    assert [path.name for path in victim.iterdir()] == ["deep"]
    assert fingerprint(moved) == site.want


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_or_link_of_another_user_is_refused(site: Site) -> None:
    """Red before: he leads what root writes elsewhere, however few may write there."""
    (empty := site.folder / "empty").mkdir()
    (theirs := site.folder / "theirs").mkdir()
    (link := site.folder / "link").symlink_to(empty)
    (own := site.folder / "own").symlink_to(empty)
    os.chown(theirs, 65534, 65534)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    for dest in (theirs, link):
        with pytest.raises(NotWritableError if dest == theirs else BootseerError, match="extract into"):
            extract(site.store, site.digest, dest)
        assert not [*empty.iterdir(), *theirs.iterdir()]
    (file := site.folder / "file").touch()
    with pytest.raises(NotWritableError, match="it is no folder"):
        extract(site.store, site.digest, file)
    extract(site.store, site.digest, own)
    assert fingerprint(empty) == site.want


def test_a_small_file_is_opened_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = Counter[bytes](), os.open

    def counted(path: Any, *args: Any, **more: Any) -> int:
        opened[os.fsencode(path) if not isinstance(path, int) else b""] += 1
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", counted)
    extract(site.store, site.digest, site.folder / "plain")
    of_files = {path: count for path, count in opened.items() if b"/.bootseer-extract-" in path and path[-1:].isdigit()}
    assert len(of_files) > 50
    assert sum(count > 1 for count in of_files.values()) <= 5  # those of several blocks: a-big, again, middle, ...


def test_files_are_made_one_after_another(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """ext4 locks the folder for each: four threads took twice the processor time of one. And where many files were
    just deleted it looks at each of these first, so the folder lies elsewhere."""
    at_work, most, spread, real = 0, 0, list[Path](), os.open
    names = list[bytes]()

    def slow(path: Any, flags: int, *args: Any, **more: Any) -> int:
        nonlocal at_work, most
        if not flags & os.O_CREAT or b".bootseer-extract-" not in os.fsencode(path):
            return real(path, flags, *args, **more)
        names.append(os.fsencode(path))
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.005)
        at_work -= 1
        return real(path, flags, *args, **more)

    monkeypatch.setattr("bootseer.blocks.extract.tree.spread", spread.append)
    monkeypatch.setattr(os, "open", slow)
    extract(site.store, site.digest, site.folder / "plain")
    files = [name for name in names if name[-1:].isdigit()]
    assert most == 1
    assert len(files) == len(set(files)) > 50
    assert all(spread[0] in Path(os.fsdecode(name)).parent.parents for name in files)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are made by processes of their own, as of a tree that has many."""
    monkeypatch.setattr(f"{EXTRACTION}._MANY", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("seen", [True, False])
def test_small_files_are_made_by_other_processes(site: Site, monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    real, made = os.open, list[bytes]()

    def counted(path: Any, flags: int, *args: Any, **more: Any) -> int:
        made.append(os.path.basename(os.fsencode(path)) if flags & os.O_CREAT else b"")
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", counted)
    extract(site.store, site.digest, site.folder / "plain", seen=seen)
    assert fingerprint(site.folder / "plain") == site.want
    assert len([*filter(None, made)]) < 15  # a-big, again, middle, sparse, what is empty; not the fifty


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("what", ["kill", "enospc", "stop"])
def test_a_process_that_cannot_make_files_ends_the_extraction(
    site: Site, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", f"blocks.extract.place={what}")
    monkeypatch.setattr(f"{EXTRACTION}.Extraction._place", lambda *args: None)  # what this process makes itself
    monkeypatch.setattr(f"{EXTRACTION}._WRITE_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(BootseerError, match={"enospc": "space", "kill": "killed", "stop": "time"}[what]):
        extract(site.store, site.digest, site.folder / "plain")
    assert time.monotonic() - began < 10
    assert os.listdir(site.folder / "plain") == []


@pytest.mark.usefixtures("many")
def test_without_more_processes_the_files_are_made_all_the_same(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", failing(OSError(errno.EAGAIN, "no more processes")))
    extract(site.store, site.digest, site.folder / "plain")
    assert fingerprint(site.folder / "plain") == site.want


def test_ranges_are_long_as_nobody_waits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = list[object](), StoreSource.pieces
    monkeypatch.setattr("bootseer.blocks.fetch.queue._HOT_BYTES", 1)
    monkeypatch.setattr(StoreSource, "pieces", lambda *given: asked.append(given) or real(*given))
    extract(site.store, site.digest, site.folder / "plain")
    assert len(asked) <= 3


def test_into_a_folder_with_things_in_it(site: Site) -> None:
    (site.folder / "plain").mkdir()
    (site.folder / "plain" / "mine").touch()
    with pytest.raises(NotWritableError, match="not empty"):
        extract(site.store, site.digest, site.folder / "plain")
    assert os.listdir(site.folder / "plain") == ["mine"]
    with pytest.raises(NotFoundError):
        extract(site.store, "ab" * 32, site.folder / "other")
    assert os.listdir(site.folder / "other") == []


def failing(error: Exception) -> Callable[..., bytes]:
    def fail(*args: object, **settings: object) -> bytes:
        raise error

    return fail


NO_ROOM = shutil.disk_usage("/")._replace(free=1 << 10)
FAILURES: dict[str, tuple[Callable[[Site, pytest.MonkeyPatch], object], type[Exception], str]] = {
    "damage": (lambda site, _: site.damage(), DataError, r"damaged|bad"),
    "a full disk": (lambda _, to: to.setenv("BOOTSEER_FAULTS", "blocks.extract.place=enospc"), BootseerError, "space"),
    "no room": (lambda _, to: to.setattr(shutil, "disk_usage", lambda _: NO_ROOM), FullError, "0 MiB free"),
    "a failure to write": (
        lambda _, to: to.setattr(f"{EXTRACTION}.Extraction._take", failing(RuntimeError("no"))), RuntimeError, "no",
    ),
    "a refusal": (
        lambda _, to: to.setattr(StoreSource, "pieces", failing(PrivilegeError("not for you"))),
        PrivilegeError,
        "not f",
    ),
    "a file that is not whole": (
        lambda _, to: to.setattr(f"{EXTRACTION}.fetch_all", lambda *args, **settings: True), DataError, "not whole",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAILURES)
def test_what_fails_is_said_soon_and_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    happens, error, text = FAILURES[kind]
    happens(site, monkeypatch)
    began = time.monotonic()
    with pytest.raises(error, match=text):
        extract(site.store, site.digest, site.folder / "plain")
    assert time.monotonic() - began < 10
    assert os.listdir(site.folder / "plain") == []


def test_a_store_that_falls_silent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreSource, "pieces", failing(UnavailableError("the store is away")))
    with pytest.raises(UnavailableError, match="is away"):
        extract(site.store, site.digest, site.folder / "plain", stalled=0.5)
    assert os.listdir(site.folder / "plain") == []
    hanging = threading.Event()

    def hang(*args: object) -> Generator[bytes, None, None]:
        hanging.wait(30)
        yield b""

    monkeypatch.setattr(StoreSource, "pieces", hang)
    with pytest.raises(UnavailableError, match="nothing came"):
        extract(site.store, site.digest, site.folder / "plain", stalled=0.5)
    hanging.set()
    assert os.listdir(site.folder / "plain") == []


def test_short_trouble_is_sat_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, troubles = StoreSource.pieces, [UnavailableError("away"), DataError("short"), UnavailableError("away")]

    def flaky(*args: Any) -> Generator[bytes, None, None]:
        if troubles:
            raise troubles.pop()
        return pieces(*args)

    monkeypatch.setattr(StoreSource, "pieces", flaky)
    extract(site.store, site.digest, site.folder / "plain", streams=1)
    assert not troubles
    assert fingerprint(site.folder / "plain") == site.want


def test_hot_files_come_first_and_files_are_never_half_there(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    local = localize(site.store, site.digest, site.folder / "look")
    reader = look(site.store, site.digest, site.folder / "look").reader
    (extent, *_) = reader.extents(reader.stat(b"middle"))
    touch = Touch(1, 1, extent.data_offset // UNIT, extent.length // UNIT)
    trace = Trace(site.digest, local.map.size, 0, True, (touch,))
    assert library.publish(site.store, library.ProfileKey("me"), trace, local.map) == "published"
    pieces, plain, seen = StoreSource.pieces, site.folder / "plain", []

    def watched(*args: Any) -> Generator[bytes, None, None]:
        seen.append({name: (plain / name).stat().st_size for name in ("middle", "a-big") if (plain / name).exists()})
        return pieces(*args)

    monkeypatch.setattr(StoreSource, "pieces", watched)
    extract(site.store, site.digest, plain, profile=library.ProfileKey("me"), streams=1)
    assert {"middle": 70_000} in seen
    assert {"a-big": 700_000} not in seen
    assert fingerprint(plain) == site.want


@pytest.mark.parametrize(("visit", "least", "most"), [(3, 1, 9), (40, 10, 99)])
def test_a_crash_leaves_whole_files_only(site: Site, visit: int, least: int, most: int) -> None:
    script = (
        "import sys; from pathlib import Path; from bootseer.blocks.extract.tree import extract\n"
        "from bootseer.objects.folder import FolderStore\n"
        f"extract(FolderStore(Path({str(site.folder / 'store')!r})), {site.digest!r}, Path(sys.argv[1]))"
    )
    plain = site.folder / "plain"
    environ = {**os.environ, "BOOTSEER_FAULTS": f"blocks.extract.place=kill@{visit}"}
    assert forked.run("-c", script, plain, env=environ).returncode == -signal.SIGKILL
    found = [path for path in plain.rglob("*") if path.is_file() and not path.is_symlink()]
    whole = [path for path in found if ".bootseer-extract-" not in str(path)]
    assert least <= len(whole) <= most
    for path in whole:
        assert path.read_bytes() == (site.source / path.relative_to(plain)).read_bytes()
    with pytest.raises(NotWritableError, match="not empty"):
        extract(site.store, site.digest, plain)


@pytest.mark.skipif(not ROOT, reason="needs root, to become somebody else")
def test_without_root_it_says_what_is_missing(site: Site) -> None:
    script = (
        "import logging, os, sys; logging.basicConfig()\n"
        "from pathlib import Path; from bootseer.blocks.extract.tree import extract\n"
        "from bootseer.objects.folder import FolderStore\n"
        "os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        f"extract(FolderStore(Path({str(site.folder / 'store')!r})), {site.digest!r}, Path(sys.argv[1]))"
    )
    home = site.folder / "home"
    home.mkdir()
    os.chown(home, 12345, 12345)
    for parent in (site.folder, *site.folder.parents):
        if not parent.stat().st_mode & 1:
            parent.chmod(stat.S_IMODE(parent.stat().st_mode) | 0o001)
    done = forked.run("-c", script, home / "plain")
    assert done.returncode == 0, done.stderr
    assert "1 device nodes" in done.stderr
    assert "owners" in done.stderr
    assert not (home / "plain" / "char").exists()
    assert (home / "plain" / "a-big").read_bytes() == (site.source / "a-big").read_bytes()
    # Set-id bits of somebody else's file would give away this user's rights.
    assert stat.S_IMODE((home / "plain" / "suid").stat().st_mode) == 0o711


def test_a_look_inside(site: Site) -> None:
    with look(site.store, site.digest, site.folder / "look") as opened:
        reader = opened.reader
        for name in ("a-big", "middle", "sparse", "sub/007", "zeros"):
            inode = reader.stat(os.fsencode(name))
            assert reader.read(inode, 0, inode.size) == (site.source / name).read_bytes()
        assert reader.read(reader.stat(b"a-big"), 65_000, 2_000) == (site.source / "a-big").read_bytes()[65_000:67_000]
        assert reader.entries(reader.stat(b"sub/deep")) == []


class Published:
    """A tree made by hand."""

    def __init__(self, folder: Path, fill: Callable[[erofs.Writer], object]) -> None:
        self.folder = folder
        with (folder / "data").open("wb") as file:
            writer = erofs.Writer(Sink(file))
            fill(writer)
            (folder / "meta").write_bytes(writer.finish())
        self.store = FolderStore(folder / "store")
        self.digest = tree.publish(self.store, folder / "meta", folder / "data").digest

    def extract(self) -> Path:
        extract(self.store, self.digest, self.folder / "plain")
        return self.folder / "plain"


class Sink:
    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.position = 0

    def write(self, data: erofs.Buffer, /) -> None:
        self.position += self.file.write(data)


FILE = erofs.Attrs(0o644, os.geteuid(), os.getegid())


def test_files_that_share_all_their_data_are_refused(tmp_path: Path) -> None:
    def fill(writer: erofs.Writer) -> None:
        first = writer.add_file(b"f", FILE, 4 << 20, [os.urandom(4 << 20)])
        for number in range(60):
            node = writer.add_file(b"f%d" % number, FILE, 0, ())
            node.size, node.start = first.size, first.start

    site = Published(tmp_path, fill)
    with pytest.raises(DataError, match="share"):
        site.extract()  # 300 files of 4 MiB were 1.2 GB from 4 MB
    assert os.listdir(tmp_path / "plain") == []


def test_files_that_share_some_data_come_out(tmp_path: Path) -> None:
    data = os.urandom(300_000)

    def fill(writer: erofs.Writer) -> None:
        first = writer.add_file(b"a", FILE, len(data), [data])
        for number, (start, size) in enumerate([(0, 300_000), (65536, 100_000), (131072, 10), (4096, 200_000)]):
            node = writer.add_file(b"b%d" % number, FILE, 0, ())
            node.size, node.start = size, first.start + start

    plain = Published(tmp_path, fill).extract()
    assert (plain / "b0").read_bytes() == data
    assert (plain / "b1").read_bytes() == data[65536:165536]
    assert (plain / "b2").read_bytes() == data[131072:131082]
    assert (plain / "b3").read_bytes() == data[4096:204096]


def test_attributes_that_do_not_fit_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    # a name of 258 bytes in all, which EROFS can hold and Linux cannot
    monkeypatch.setattr(xattr, "representable", lambda name: True)
    names = {b"user." + b"n" * 253: b"1", b"user.big": b"v" * 60_000, b"trusted.overlay.opaque": b"y", b"user.k": b"v"}
    site = Published(tmp_path, lambda writer: writer.add_dir(b"d", FILE._replace(mode=0o755, xattrs=names)))
    plain = site.extract()
    there = os.listxattr(plain / "d")
    assert "user.k" in there
    assert "trusted.overlay.opaque" not in there
    assert "'d'" in caplog.text
    assert "do not fit" in caplog.text


def test_errors_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Published(tmp_path, lambda writer: writer.add_file(b"f", FILE, 3, [b"abc"]))

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "utime", broken)
    with pytest.raises(BootseerError, match="'f'"):
        site.extract()


def test_files_that_share_their_indexes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Published(tmp_path, lambda writer: writer.add_file(b"f", FILE, 3, [b"abc"]))
    monkeypatch.setattr(erofs.Reader, "table_size", lambda self, inode: 1 << 30)
    with pytest.raises(DataError, match="share their chunk indexes"):
        site.extract()


def test_a_failure_at_the_end_leaves_nothing_behind_closed_folders(tmp_path: Path) -> None:
    """Folders are closed before the last one fails; without root they must be opened to be emptied."""

    def fill(writer: erofs.Writer) -> None:
        writer.add_dir(b"z", FILE._replace(mode=0o755))
        writer.add_dir(b"z/closed", FILE._replace(mode=0o555))
        writer.add_dir(b"z/closed/more", FILE._replace(mode=0o000))
        writer.add_file(b"z/closed/f", FILE, 3, [b"abc"])

    site = Published(tmp_path, fill)
    script = (
        "import os, sys; from pathlib import Path; from bootseer.blocks.extract.tree import extract\n"
        "from bootseer.objects.folder import FolderStore\n"
        "if not os.geteuid(): os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "utime = os.utime\n"
        "def broken(what, **k):\n"
        "    if what.endswith(b'/z'): raise OSError(5, 'broken')\n"
        "    utime(what, **k)\n"
        "os.utime = broken\n"
        f"extract(FolderStore(Path({str(tmp_path / 'store')!r})), {site.digest!r}, Path(sys.argv[1]))"
    )
    home = tmp_path / "home"
    home.mkdir()
    if ROOT:
        os.chown(home, 12345, 12345)
        for parent in (tmp_path, *tmp_path.parents):
            if not parent.stat().st_mode & 1:
                parent.chmod(stat.S_IMODE(parent.stat().st_mode) | 0o001)
    done = forked.run("-c", script, home / "plain")
    assert "broken" in done.stderr
    assert os.listdir(home / "plain") == []


def test_nothing_is_taken_after_the_end(site: Site) -> None:
    """The end waits for a write in progress, and none begins after it, even where bytes come later."""
    local = localize(site.store, site.digest, site.folder / "look")
    entered, events = threading.Event(), []

    class Slow(Extraction):
        def _take(self, block: int, data: Buffer) -> None:
            entered.set()
            time.sleep(0.5)
            events.append(block)

    dest = site.folder / "dest"
    sink = Slow(erofs.Reader(local.meta.read_bytes()), local.map, dest, site.folder, dest)
    block = next(block for block in range(local.map.count) if not local.map.is_zero(block))
    writer = threading.Thread(target=sink.write, args=(block, bytes(local.map.length_of(block))))
    writer.start()
    assert entered.wait(20)
    sink.close()
    assert events == [block]
    with pytest.raises(OSError, match="over"):
        sink.write(block + 1, b"x")
    assert events == [block]
    writer.join(20)
