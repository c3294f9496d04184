"""Extraction of trees without a mount: all that a tree has, whole files only, and nothing after a failure."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.blocks import profiles, tree
from bootseer.blocks.extract import extract
from bootseer.blocks.manifest import localize
from bootseer.blocks.offline import look
from bootseer.blocks.pull import Pull, runs
from bootseer.blocks.source import StoreSource
from bootseer.blocks.trace import UNIT, Touch, Trace
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError
from bootseer.store.folder import FolderStore

ROOT = os.geteuid() == 0


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


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "tree"
        grow(self.source)
        erofs.build(self.source, folder / "meta", folder / "data")
        self.store = FolderStore(folder / "store")
        self.digest = tree.publish(self.store, folder / "meta", folder / "data", block_size=64 << 10).digest
        self.want = fingerprint(self.source)

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


def test_into_a_folder_with_things_in_it(site: Site) -> None:
    (site.folder / "plain").mkdir()
    (site.folder / "plain" / "mine").touch()
    with pytest.raises(BootseerError, match="not empty"):
        extract(site.store, site.digest, site.folder / "plain")
    assert os.listdir(site.folder / "plain") == ["mine"]
    with pytest.raises(NotFoundError):
        extract(site.store, "ab" * 32, site.folder / "other")
    assert os.listdir(site.folder / "other") == []


def test_damage_leaves_nothing(site: Site) -> None:
    site.damage()
    with pytest.raises(DataError, match=r"damaged|bad"):
        extract(site.store, site.digest, site.folder / "plain")
    assert os.listdir(site.folder / "plain") == []


def test_a_store_that_falls_silent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StoreSource, pack: int, offset: int, length: int) -> bytes:
        raise UnavailableError("the store is away")

    monkeypatch.setattr(StoreSource, "read", refuse)
    with pytest.raises(UnavailableError, match="is away"):
        extract(site.store, site.digest, site.folder / "plain", stalled=0.5)
    assert os.listdir(site.folder / "plain") == []
    hanging = threading.Event()
    monkeypatch.setattr(StoreSource, "read", lambda *args: hanging.wait(30))
    with pytest.raises(UnavailableError, match="nothing came"):
        extract(site.store, site.digest, site.folder / "plain", stalled=0.5)
    hanging.set()
    assert os.listdir(site.folder / "plain") == []


def test_short_trouble_is_sat_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    read, troubles = StoreSource.read, [UnavailableError("away"), DataError("short"), UnavailableError("away")]

    def flaky(self: StoreSource, pack: int, offset: int, length: int) -> bytes:
        if troubles:
            raise troubles.pop()
        return read(self, pack, offset, length)

    monkeypatch.setattr(StoreSource, "read", flaky)
    extract(site.store, site.digest, site.folder / "plain", streams=1)
    assert fingerprint(site.folder / "plain") == site.want


def test_hot_files_come_first_and_files_are_never_half_there(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    local = localize(site.store, site.digest, site.folder / "look")
    reader = look(site.store, site.digest, site.folder / "look").reader
    (extent, *_) = reader.extents(reader.stat(b"middle"))
    touch = Touch(1, 1, extent.data_offset // UNIT, extent.length // UNIT)
    trace = Trace(site.digest, local.map.size, 0, True, "fuse", (touch,))
    assert profiles.publish(site.store, profiles.ProfileKey("me"), trace, local.map) == "published"
    read, plain, seen = StoreSource.read, site.folder / "plain", []

    def watched(self: StoreSource, pack: int, offset: int, length: int) -> bytes:
        seen.append({name: (plain / name).stat().st_size for name in ("middle", "a-big") if (plain / name).exists()})
        return read(self, pack, offset, length)

    monkeypatch.setattr(StoreSource, "read", watched)
    extract(site.store, site.digest, plain, profile=profiles.ProfileKey("me"), streams=1)
    assert {"middle": 70_000} in seen
    assert {"a-big": 700_000} not in seen
    assert fingerprint(plain) == site.want


def test_a_crash_leaves_whole_files_only(site: Site) -> None:
    script = (
        "import sys; from pathlib import Path; from bootseer.blocks.extract import extract\n"
        "from bootseer.store.folder import FolderStore\n"
        f"extract(FolderStore(Path({str(site.folder / 'store')!r})), {site.digest!r}, Path(sys.argv[1]))"
    )
    plain = site.folder / "plain"
    for visit in (3, 40):
        environ = {**os.environ, "BOOTSEER_FAULTS": f"blocks.extract.place=kill@{visit}"}
        command = [sys.executable, "-c", script, str(plain)]
        assert subprocess.run(command, env=environ, timeout=60, check=False).returncode == -signal.SIGKILL
        found = [path for path in plain.rglob("*") if path.is_file() and not path.is_symlink()]
        whole = [path for path in found if ".bootseer-extract-" not in str(path)]
        assert visit > 3 or len(whole) < 10
        for path in whole:
            assert path.read_bytes() == (site.source / path.relative_to(plain)).read_bytes()
        with pytest.raises(BootseerError, match="not empty"):
            extract(site.store, site.digest, plain)
        shutil.rmtree(plain)


def test_a_full_disk_in_between(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "blocks.extract.place=enospc")
    with pytest.raises(BootseerError, match="space"):
        extract(site.store, site.digest, site.folder / "plain")
    assert os.listdir(site.folder / "plain") == []


@pytest.mark.skipif(not ROOT, reason="needs root, to become somebody else")
def test_without_root_it_says_what_is_missing(site: Site) -> None:
    script = (
        "import logging, os, sys; logging.basicConfig()\n"
        "from pathlib import Path; from bootseer.blocks.extract import extract\n"
        "from bootseer.store.folder import FolderStore\n"
        "os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        f"extract(FolderStore(Path({str(site.folder / 'store')!r})), {site.digest!r}, Path(sys.argv[1]))"
    )
    home = site.folder / "home"
    home.mkdir()
    os.chown(home, 12345, 12345)
    for parent in (site.folder, *site.folder.parents):
        if not parent.stat().st_mode & 1:
            parent.chmod(stat.S_IMODE(parent.stat().st_mode) | 0o001)
    done = subprocess.run(
        [sys.executable, "-c", script, str(home / "plain")], capture_output=True, text=True, timeout=60, check=False
    )
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
    blocked = site.folder / "file"
    blocked.touch()
    with look(site.store, site.digest, site.folder / "look" / "new") as opened:
        assert opened.reader.listdir(b"sub/deep") == []


def test_runs_keep_the_order_and_leave_zeros_out(site: Site) -> None:
    data = site.folder / "other"
    data.write_bytes(os.urandom(200_000) + bytes(300_000) + os.urandom(400_000))
    digest = tree.publish(site.store, site.folder / "meta", data, block_size=64 << 10).digest
    blocks = localize(site.store, digest, site.folder / "look").map
    zero = next(block for block in range(blocks.count) if blocks.is_zero(block))
    some = [block for block in range(blocks.count) if not blocks.is_zero(block)]
    assert runs(blocks, [some[2], some[0], zero, some[0]], 1 << 20) == [
        range(some[2], some[2] + 1),
        range(some[0], some[0] + 1),
    ]
    together = runs(blocks, range(blocks.count), 128 << 10)
    assert [block for run in together for block in run] == some
    assert max(len(run) for run in together) == 2


def test_what_take_raises_ends_the_pull(site: Site) -> None:
    local = localize(site.store, site.digest, site.folder / "look")

    def take(run: range, data: bytes) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Pull(StoreSource(site.store, local.map), local.map, runs(local.map, range(local.map.count)), take).run()
