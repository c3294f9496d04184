"""How many requests of the storage a mount makes, and how large those of the kernel are."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.backends.folder import FolderBackend
from bootseer.fsmount.operations import StripeOperations
from bootseer.fsmount.record import ServerSpec
from bootseer.fsmount.server import mount_options
from bootseer.kernel import fuse, mount
from bootseer.stripefs import StripeFS, open_fs
from bootseer.stripefs.files.readahead import ReadAhead
from support.waits import until

pytestmark = pytest.mark.root

DATA = os.urandom(12 << 20)
FILES = 300
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--", "env"]


class Noting(StripeOperations):
    sizes: Counter[int]

    def read(self, fh: int, offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        self.sizes[size] += 1
        return super().read(fh, offset, size, ctx)


@pytest.fixture
def fs(tmp_path: Path) -> StripeFS:
    fs = open_fs(str(tmp_path / "store"))
    with fs.create("big", striped=True) as out:
        out.write(DATA)
    Path(fs.url, "many").mkdir()
    for number in range(FILES):
        Path(fs.url, "many", f"{number:03}").write_bytes(b"x" * number)
    return fs


@pytest.fixture
def served(fs: StripeFS, mountpoint: Path) -> Iterator[Noting]:
    ahead = ReadAhead()
    operations = Noting(fs, ahead)
    operations.sizes = Counter()
    with fuse.Server(operations, mountpoint, options=mount_options(ServerSpec(fs.url, str(mountpoint)))):
        yield operations
    ahead.close()


def test_large_reads_are_requests_of_a_mebibyte(served: Noting, mountpoint: Path) -> None:
    assert (mountpoint / "big").read_bytes() == DATA
    assert max(served.sizes) == 1 << 20
    assert served.sizes[1 << 20] >= 8


def counting(name: str, counts: Counter[str]) -> Callable[..., Any]:
    real = getattr(FolderBackend, name)

    def call(self: FolderBackend, *args: Any, **more: Any) -> Any:
        counts[name] += 1
        return real(self, *args, **more)

    return call


@pytest.mark.serial
def test_attributes_come_with_the_listing(
    served: Noting, mountpoint: Path, fs: StripeFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    for name in ("stat", "list", "open"):
        monkeypatch.setattr(FolderBackend, name, counting(name, counts))
    os.stat(mountpoint / "many")
    for stripes in (False, True):
        if stripes:
            Path(fs.url, "many/.bsx").mkdir()
            time.sleep(0.2)  # a listing is kept for 0.1 ms a name
        before = counts.copy()
        with os.scandir(mountpoint / "many") as entries:
            assert {entry.name: entry.stat().st_size for entry in entries} == {f"{n:03}": n for n in range(FILES)}
        more = counts - before
        assert more["stat"] <= 2, more  # of the folder
        assert 1 <= more["list"] <= 4, more
        assert more["open"] <= (FILES if stripes else 0), more  # to see whether it is a pointer
    fuse_nodes = len(served._nodes._nodes)
    assert fuse_nodes >= FILES
    Path("/proc/sys/vm/drop_caches").write_text("2")
    until(lambda: len(served._nodes._nodes) < fuse_nodes, what="the end of references")


def test_a_name_that_is_missing_is_asked_for_once_a_second(
    served: Noting, mountpoint: Path, fs: StripeFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    lookup = served.lookup

    def noting(parent: int, name: str, ctx: fuse.Context) -> fuse.Entry:
        asked.append(name)
        return lookup(parent, name, ctx)

    monkeypatch.setattr(served, "lookup", noting)
    for _ in range(50):
        assert not (mountpoint / "later").exists()
    assert asked.count("later") <= 2
    Path(fs.url, "later").write_bytes(b"here")
    until(lambda: (mountpoint / "later").exists())


@pytest.mark.takeover
@pytest.mark.usefixtures("open_device")
def test_an_ordinary_user_mounts_reads_and_unmounts(fs: StripeFS, place: Path) -> None:
    """Through fusermount3, with a supervisor of their own; nobody else can look in."""
    home = Path(tempfile.mkdtemp(dir=place))
    store = home / "store"
    subprocess.run(["cp", "-r", fs.url, store], check=True)
    subprocess.run(["chown", "-R", "65534:65534", home], check=True)
    environ = {"BOOTSEER_CACHE_DIR": f"{home}/cache", "BOOTSEER_STATE_DIR": f"{home}/state", "HOME": str(home)}
    body = f"""
import hashlib, os, signal, sys, time
from pathlib import Path
from bootseer.errors import NotWritableError
from bootseer import fsmount
assert os.geteuid() == 65534
made = fsmount.start({str(store)!r}, Path({str(home)!r}, "mnt"))
path = made.mountpoint / "big"
with open(path, "rb") as file:
    before = made.status().server_pid
    os.kill(before, signal.SIGKILL)
    while made.status().server_pid == before:
        time.sleep(0.01)
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    print(hashlib.sha256(file.read()).hexdigest(), flush=True)
try:
    fsmount.start({str(store)!r}, made.mountpoint)
except NotWritableError:
    print("refused", flush=True)
sys.stdin.readline()
made.unmount()
made = fsmount.start({str(store)!r}, made.mountpoint, writable=True)
new = made.mountpoint / "tmp"
new.write_bytes(b"x" * (5 << 20))
new.chmod(0o600)
os.rename(new, made.mountpoint / "new")
stat = os.stat(made.mountpoint / "new")
print(stat.st_uid, stat.st_size, flush=True)
made.unmount()
print(os.listdir(made.mountpoint), os.listdir({str(home / "state/fs")!r}), made.status().alive, flush=True)
"""
    argv = [*NOBODY, *(f"{key}={value}" for key, value in environ.items()), sys.executable, "-c", body]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as user:
        assert user.stdout
        assert user.stdin
        assert user.stdout.readline() == hashlib.sha256(DATA).hexdigest() + "\n"
        assert user.stdout.readline() == "refused\n"
        entry = mount.find(home / "mnt")
        assert entry is not None
        assert "user_id=65534" in entry.options
        with pytest.raises(PermissionError):  # also root: FUSE lets in nobody but who mounted
            os.listdir(home / "mnt")
        user.stdin.write("\n")
        user.stdin.flush()
        assert user.stdout.readline() == "65534 5242880\n"
        assert user.stdout.readline() == "[] [] False\n"
    assert user.returncode == 0
    with open_fs(str(store)).open("new") as file:
        assert file.read(0, file.size) == b"x" * (5 << 20)
    assert not mount.is_mounted(home / "mnt")
