"""What a mount for writing promises and refuses: each row of docs/reference/mount.md, over a folder and over HDFS."""

from __future__ import annotations

import contextlib
import errno
import grp
import mmap
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bootseer import fsmount
from bootseer.backends.interface import exists
from bootseer.config import Config
from bootseer.errors import ConfigError, UnsupportedError
from bootseer.fsmount import FsMount
from bootseer.stripefs import StripeFS, open_fs
from bootseer.stripefs.files.reader import read_pointer
from support import hadoop
from support.waits import later, together, until

pytestmark = pytest.mark.root

PAGE = Path(__file__).parents[2] / "docs/reference/mount.md"
BIG = os.urandom(1 << 20) * 5
HDFS = pytest.param("hdfs", marks=pytest.mark.hdfs)


class Site:
    """A mount for writing, the store below it, and a folder of both for one test."""

    def __init__(self, made: FsMount, fs: StripeFS, name: str) -> None:
        self.made, self.fs, self.name = made, fs, name
        self.dir = made.mountpoint / name

    def stored(self, name: str) -> bytes | None:
        """The content of a file as everybody else sees it."""
        try:
            with self.fs.open(f"{self.name}/{name}") as file:
                return file.read(0, file.size)
        except Exception as exc:
            if type(exc).__name__ == "NotFoundError":
                return None
            raise

    def log(self) -> str:
        return self.made._folder.with_suffix(".log").read_text()


@pytest.fixture(scope="module", params=[pytest.param("folder", marks=pytest.mark.soak), HDFS])
def mounted(request: pytest.FixtureRequest) -> Iterator[tuple[FsMount, StripeFS]]:
    place = Path(tempfile.mkdtemp(prefix="bootseer-pytest-rw-", dir="/var/tmp"))
    url = str(place / "store") if request.param == "folder" else f"{hadoop.shared().url}/{uuid.uuid4().hex}"
    fs = open_fs(url)
    fs.backend.make_folder("")
    config = Config(cache_dir=str(place / "cache"), state_dir=str(place / "state"))
    made = fsmount.start(url, place / "mnt", config=config, writable=True, spool=256 << 20)
    try:
        yield made, fs
    finally:
        made.unmount()
        shutil.rmtree(place)


@pytest.fixture
def site(mounted: tuple[FsMount, StripeFS]) -> Site:
    found = Site(*mounted, uuid.uuid4().hex[:8])
    found.dir.mkdir()
    return found


def refused(code: int, action: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=r"Errno") as caught:
        action()
    assert errno.errorcode[caught.value.errno or 0] == errno.errorcode[code]


# -- the table of the page ---------------------------------------------------------------------------------------------

ROWS: dict[str, Callable[[Site], None]] = {}


def row(check: Callable[[Site], None]) -> Callable[[Site], None]:
    ROWS[check.__name__.replace("_", "-")] = check
    return check


@row
def close_publishes(site: Site) -> None:
    with open(site.dir / "f", "wb", buffering=0) as file:
        file.write(BIG)
        assert site.stored("f") is None
    assert site.stored("f") == BIG
    assert site.fs.stat(f"{site.name}/f").striped
    (site.dir / "small").write_bytes(b"small")
    assert not site.fs.stat(f"{site.name}/small").striped


@row
def replace_at_close(site: Site) -> None:
    (site.dir / "f").write_bytes(b"old")
    with open(site.dir / "f", "wb", buffering=0) as file:
        file.write(BIG)
        assert site.stored("f") == b"old"
    assert site.stored("f") == BIG == (site.dir / "f").read_bytes()
    with open(site.dir / "f", "rb") as before, mmap.mmap(before.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        (site.dir / "f").write_bytes(BIG[::-1])
        assert before.read() == mapped[:] == BIG[::-1]
        (site.dir / "beside").write_bytes(BIG)
        os.replace(site.dir / "beside", site.dir / "f")
        assert mapped[:] == BIG[::-1]
    assert (site.dir / "f").read_bytes() == BIG


@row
def unfinished_is_ours(site: Site) -> None:
    with open(site.dir / "f", "wb", buffering=0) as file:
        file.write(b"abc")
        assert os.listdir(site.dir) == ["f"]
        assert (site.dir / "f").stat().st_size == 3
        assert (site.dir / "f").read_bytes() == b"abc"
        assert site.fs.ls(site.name) == []


@row
def read_back(site: Site) -> None:
    with open(site.dir / "f", "w+b", buffering=0) as file:
        file.write(BIG)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file.fileno(), 100, 2 << 20) == BIG[2 << 20 :][:100]


@row
def rewrite_before_close(site: Site) -> None:
    with open(site.dir / "f", "wb", buffering=0) as file:
        file.write(BIG)
        os.pwrite(file.fileno(), b"header", 0)
        os.pwrite(file.fileno(), b"middle", 3 << 20)
    assert site.stored("f") == b"header" + BIG[6 : 3 << 20] + b"middle" + BIG[(3 << 20) + 6 :]


@row
def rewrite_after_close(site: Site) -> None:
    (site.dir / "f").write_bytes(BIG)
    with open(site.dir / "f", "r+b", buffering=0) as file:
        refused(errno.EOPNOTSUPP, lambda: os.pwrite(file.fileno(), b"x", 100))
        refused(errno.EOPNOTSUPP, lambda: os.pwrite(file.fileno(), b"x", 200))
    assert site.stored("f") == BIG
    assert site.log().count(f"{site.name}/f: byte ") == 1


@row
def append(site: Site) -> None:
    (site.dir / "f").write_bytes(BIG)
    with open(site.dir / "f", "ab", buffering=0) as file:
        file.write(b"more")
        assert site.stored("f") == BIG
    assert site.stored("f") == BIG + b"more" == (site.dir / "f").read_bytes()


@row
def gap(site: Site) -> None:
    with open(site.dir / "f", "wb", buffering=0) as file:
        file.write(b"a")
        os.pwrite(file.fileno(), b"b", 100_000)
    assert site.stored("f") == b"a" + bytes(99_999) + b"b"


@row
def truncate_to_nothing(site: Site) -> None:
    (site.dir / "f").write_bytes(BIG)
    os.truncate(site.dir / "f", 0)
    assert site.stored("f") == b"" == (site.dir / "f").read_bytes()


@row
def truncate_to_same(site: Site) -> None:
    (site.dir / "f").write_bytes(BIG)
    before = site.fs.stat(f"{site.name}/f")
    os.truncate(site.dir / "f", len(BIG))
    assert site.fs.stat(f"{site.name}/f") == before


@row
def truncate_longer(site: Site) -> None:
    (site.dir / "f").write_bytes(b"abc")
    os.truncate(site.dir / "f", 10)
    assert site.stored("f") == b"abc" + bytes(7)


@row
def truncate_shorter(site: Site) -> None:
    (site.dir / "f").write_bytes(BIG)
    refused(errno.EOPNOTSUPP, lambda: os.truncate(site.dir / "f", 10))
    assert site.stored("f") == BIG
    with open(site.dir / "new", "wb", buffering=0) as file:
        file.write(BIG)
        os.ftruncate(file.fileno(), 10)
    assert site.stored("new") == BIG[:10]


@row
def fsync(site: Site) -> None:
    with open(site.dir / "f", "wb", buffering=0) as file:
        file.write(b"abc")
        os.fsync(file.fileno())
        assert site.stored("f") == b"abc"
        file.write(b"def")
        assert site.stored("f") == b"abc"
        os.pwrite(file.fileno(), b"A", 0)
    assert site.stored("f") == b"Abcdef" == (site.dir / "f").read_bytes()
    fd = os.open(site.dir, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@row
def child_closes(site: Site) -> None:
    with open(site.dir / "f", "wb", buffering=0) as file:
        file.write(b"abc")
        subprocess.run(["true"], pass_fds=[file.fileno()], check=True)
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert site.stored("f") is None
        subprocess.run(["true"], check=True)  # one that closes it while it starts a program
        subprocess.run(["echo", "from a child"], stdout=file, check=True)
        assert site.stored("f") is None
        subprocess.run(["touch", site.dir / "f"], check=True)
        assert site.stored("f") is None
    assert site.stored("f") == b"abcfrom a child\n"


@row
def empty_file(site: Site) -> None:
    (site.dir / "f").touch()
    assert (site.dir / "f").read_bytes() == b""
    until(lambda: site.stored("f") == b"")


@row
def exclusive(site: Site) -> None:
    with open(site.dir / "f", "xb"):
        refused(errno.EEXIST, lambda: os.open(site.dir / "f", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    refused(errno.EEXIST, lambda: os.open(site.dir / "f", os.O_WRONLY | os.O_CREAT | os.O_EXCL))


@row
def rename_over(site: Site) -> None:
    (site.dir / "f").write_bytes(b"old")
    (site.dir / "tmp").write_bytes(BIG)
    os.rename(site.dir / "tmp", site.dir / "f")
    assert site.stored("f") == BIG == (site.dir / "f").read_bytes()
    assert site.stored("tmp") is None
    assert os.listdir(site.dir) == ["f"]


@row
def rename_to_another_folder(site: Site) -> None:
    (site.dir / "d").mkdir()
    for content in (b"small", BIG):
        (site.dir / "f").write_bytes(content)
        refused(errno.EXDEV, lambda: os.rename(site.dir / "f", site.dir / "d/f"))
        run(["mv", site.dir / "f", site.dir / "d/f"])
        assert site.stored("d/f") == content
        assert site.stored("f") is None
    with open(site.dir / "new", "wb", buffering=0) as file:
        file.write(b"x")
        refused(errno.EXDEV, lambda: os.rename(site.dir / "new", site.dir / "d/new"))
    (site.dir / "e").mkdir()
    os.rename(site.dir / "d", site.dir / "e/d")
    assert (site.dir / "e/d/f").read_bytes() == BIG


@row
def rename_unfinished(site: Site) -> None:
    with open(site.dir / "tmp", "wb", buffering=0) as file:
        file.write(b"abc")
        os.rename(site.dir / "tmp", site.dir / "f")
        assert site.stored("f") == b"abc"
        file.write(b"def")
    assert site.stored("f") == b"abcdef" == (site.dir / "f").read_bytes()


@row
def rename_folder(site: Site) -> None:
    (site.dir / "a").mkdir()
    (site.dir / "a/big").write_bytes(BIG)
    (site.dir / "a/small").write_bytes(b"small")
    os.rename(site.dir / "a", site.dir / "b")
    assert (site.dir / "b/big").read_bytes() == BIG
    assert (site.dir / "b/small").read_bytes() == b"small"
    with open(site.dir / "b/new", "wb", buffering=0) as file:
        file.write(b"x")
        refused(errno.EBUSY, lambda: os.rename(site.dir / "b", site.dir / "c"))
    (site.dir / "c").mkdir()
    refused(errno.ENOTEMPTY, lambda: os.rename(site.dir / "b", site.dir / "c"))


@row
def rename_flags(site: Site) -> None:
    (site.dir / "a").write_bytes(b"a")
    (site.dir / "b").write_bytes(b"b")
    code = (
        "import ctypes,os,sys; c=ctypes.CDLL(None,use_errno=True);"
        "print(c.renameat2(-100,sys.argv[1].encode(),-100,sys.argv[2].encode(),int(sys.argv[3])), ctypes.get_errno())"
    )
    for flags, expected in ((1, errno.EEXIST), (2, errno.EINVAL)):
        argv = [sys.executable, "-c", code, str(site.dir / "a"), str(site.dir / "b"), str(flags)]
        assert subprocess.check_output(argv, text=True).split() == ["-1", str(expected)]
    argv = [sys.executable, "-c", code, str(site.dir / "a"), str(site.dir / "c"), "1"]
    assert subprocess.check_output(argv, text=True).split()[0] == "0"
    assert site.stored("c") == b"a"


@row
def folders(site: Site) -> None:
    (site.dir / "d").mkdir()
    refused(errno.EEXIST, (site.dir / "d").mkdir)
    (site.dir / "d/f").write_bytes(BIG)
    refused(errno.ENOTEMPTY, (site.dir / "d").rmdir)
    (site.dir / "d/f").unlink()
    (site.dir / "d").rmdir()
    assert os.listdir(site.dir) == []
    refused(errno.ENOENT, (site.dir / "d").rmdir)


@row
def unlink_open(site: Site) -> None:
    (site.dir / "f").write_bytes(BIG)
    with open(site.dir / "f", "rb", buffering=0) as reader:
        assert reader.read(10) == BIG[:10]
        (site.dir / "f").unlink()
        (site.dir / "f").write_bytes(bytes(len(BIG)))
        for offset in range(0, len(BIG), 1 << 20):
            with contextlib.suppress(OSError):
                assert os.pread(reader.fileno(), 4096, offset) == BIG[offset:][:4096]
    with open(site.dir / "t", "w+b", buffering=0) as file:
        (site.dir / "t").unlink()
        file.write(b"temporary")
        assert os.pread(file.fileno(), 9, 0) == b"temporary"
    assert site.stored("t") is None


@row
def times(site: Site) -> None:
    (site.dir / "f").write_bytes(BIG)
    os.utime(site.dir / "f", (1e9, 1e9))
    assert (site.dir / "f").stat().st_mtime == 1e9
    (site.dir / "d").mkdir()
    site.fs.rename(f"{site.name}/f", f"{site.name}/d/f")  # which copies it
    assert site.fs.stat(f"{site.name}/d/f").mtime == 1e9
    for seconds in (-1, 0, -1e9):
        os.utime(site.dir / "d/f", (seconds, seconds))
        kept = max(0, seconds) if site.fs.stat(site.name).permissions else seconds
        until(lambda kept=kept: (site.dir / "d/f").stat().st_mtime == kept)
        assert site.fs.stat(f"{site.name}/d/f").mtime == kept
    with open(site.dir / "g", "wb", buffering=0) as file:
        file.write(b"x")
        os.utime(file.fileno(), (2e9, 2e9))
    assert (site.dir / "g").stat().st_mtime == 2e9
    assert site.fs.stat(f"{site.name}/g").mtime == 2e9


@row
def modes(site: Site) -> None:
    (site.dir / "f").write_bytes(b"x")
    os.chmod(site.dir / "f", 0o700)  # of others none is shown whom this node may not know
    if site.fs.stat(f"{site.name}/f").permissions:
        for mode in (0o755, 0o664, 0o700):
            run(["chmod", f"{mode:o}", site.dir / "f"])
            assert stat.S_IMODE((site.dir / "f").stat().st_mode) == mode
    fd = os.open(site.dir / "g", os.O_WRONLY | os.O_CREAT, 0o600)
    os.close(fd)
    until(lambda: site.stored("g") == b"")
    told = site.fs.stat(f"{site.name}/f").permissions
    assert stat.S_IMODE((site.dir / "f").stat().st_mode) == (0o700 if told else 0o644)
    if told:
        assert told.mode == 0o700
        assert site.fs.stat(f"{site.name}/g").permissions.mode == 0o600  # type: ignore[union-attr]
    (site.dir / "h").write_bytes(BIG)
    os.chmod(site.dir / "h", 0o640)
    (site.dir / "h").write_bytes(BIG)
    assert not told or site.fs.stat(f"{site.name}/h").permissions.kept == 0o640  # type: ignore[union-attr]
    (site.dir / "d").mkdir()
    site.fs.rename(f"{site.name}/h", f"{site.name}/d/h")  # which copies it
    assert not told or site.fs.stat(f"{site.name}/d/h").permissions.kept == 0o640  # type: ignore[union-attr]
    os.chown(site.dir / "f", 12345, 12345)

    def stripes(folder: str) -> set[int]:
        found = site.fs.backend.list(f"{site.name}/{folder}.bsx")
        assert found
        return {entry.permissions.kept for entry in found if entry.permissions}

    (site.dir / "p").mkdir()
    fd = os.open(site.dir / "p/private", os.O_WRONLY | os.O_CREAT, 0o600)
    for mode, close in ((0o600, True), (0o644, False), (0o400, False)):
        if close:
            os.write(fd, BIG)
            os.close(fd)
        else:
            os.chmod(site.dir / "p/private", mode)
        assert stripes("p/") == ({mode} if told else set())
    (site.dir / "q").mkdir()
    site.fs.rename(f"{site.name}/p/private", f"{site.name}/q/private")  # which copies it
    assert stripes("q/") == ({0o400} if told else set())
    (site.dir / "q/private").write_bytes(BIG)
    assert stripes("q/") == ({0o400} if told else set())
    assert (site.dir / "f").stat().st_uid == os.geteuid()


@row
def links_and_special_files(site: Site) -> None:
    (site.dir / "f").write_bytes(b"x")
    refused(errno.EPERM, lambda: os.symlink("f", site.dir / "s"))
    refused(errno.EPERM, lambda: os.mkfifo(site.dir / "p"))


@row
def hard_links(site: Site) -> None:
    (site.dir / "d").mkdir()
    for target in ("l", "d/l"):
        (site.dir / "f").write_bytes(b"abc")
        os.link(site.dir / "f", site.dir / target)
        assert site.stored(target) == b"abc" == (site.dir / target).read_bytes()
        refused(errno.EEXIST, lambda target=target: os.link(site.dir / "f", site.dir / target))
        (site.dir / "f").unlink()
        assert site.stored(target) == b"abc" == (site.dir / target).read_bytes()
    with open(site.dir / "open", "wb", buffering=0) as file:
        file.write(b"xyz")
        refused(errno.EEXIST, lambda: os.link(site.dir / "l", site.dir / "open"))
        refused(errno.EBUSY, lambda: os.link(site.dir / "open", site.dir / "now"))  # it would never get the rest
        os.fsync(file.fileno())
        os.link(site.dir / "open", site.dir / "now")
        assert site.stored("now") == b"xyz"
    (site.dir / "big").write_bytes(BIG)
    refused(errno.EPERM, lambda: os.link(site.dir / "big", site.dir / "b"))
    site.fs.commit(f"{site.name}/d")
    refused(errno.EPERM, lambda: os.link(site.dir / "l", site.dir / "d/new"))
    os.link(site.dir / "d/l", site.dir / "out")


@row
def extended_attributes(site: Site) -> None:
    path = site.dir / "f"
    path.write_bytes(b"x")
    for name in ("user.a", "trusted.t", "security.x"):
        refused(errno.ENOTSUP, lambda name=name: os.setxattr(path, name, b"1"))
        refused(errno.ENOTSUP, lambda name=name: os.getxattr(path, name))
        refused(errno.ENOTSUP, lambda name=name: os.removexattr(path, name))
    refused(errno.ENOTSUP, lambda: os.listxattr(site.dir))
    (site.dir / "d").mkdir()
    run(["cp", "-a", path, site.dir / "d/g"])
    assert site.stored("d/g") == b"x"


@row
def reserved_space(site: Site) -> None:
    with open(site.dir / "f", "wb", buffering=0) as file:
        subprocess.run(["fallocate", "-l", "1M", site.dir / "f"], check=False)
        file.write(b"x")
    assert site.stored("f") == b"x"
    size = os.statvfs(site.dir)
    assert size.f_blocks > size.f_bavail > 0


@row
def mapped_writes(site: Site) -> None:
    with open(site.dir / "f", "w+b", buffering=0) as file:
        os.ftruncate(file.fileno(), len(BIG))
        with mmap.mmap(file.fileno(), len(BIG)) as pages:
            pages[:] = BIG
    assert site.stored("f") == BIG
    for flushed in (True, False):
        with open(site.dir / "g", "w+b", buffering=0) as file:
            file.write(bytes(len(BIG)))
            pages = mmap.mmap(file.fileno(), len(BIG))
        assert site.stored("g") == bytes(len(BIG))
        pages[:] = BIG
        if flushed:
            pages.flush()
        pages.close()
        until(lambda: site.stored("g") == BIG)
    with open(site.dir / "g", "r+b", buffering=0) as file, mmap.mmap(file.fileno(), len(BIG)) as pages:
        pages[:5] = b"other"
        refused(errno.EOPNOTSUPP, pages.flush)
    assert site.stored("g") == BIG


@row
def names_of_the_store(site: Site) -> None:
    for name in (".bsx", ".tmp-x", "COMMIT"):
        refused(errno.EPERM, lambda name=name: (site.dir / name).write_bytes(b"x"))  # type: ignore[misc]
        refused(errno.EPERM, lambda name=name: (site.dir / name).mkdir())  # type: ignore[misc]
    refused(errno.EILSEQ, lambda: os.mkdir(os.fsencode(site.dir) + b"/\xff"))


@row
def finished_checkpoint(site: Site) -> None:
    (site.dir / "step").mkdir()
    (site.dir / "step/f").write_bytes(BIG)
    site.fs.commit(f"{site.name}/step")
    until(lambda: (site.dir / "step/COMMIT").exists())
    for action in (
        lambda: (site.dir / "step/f").write_bytes(b""),
        lambda: (site.dir / "step/new").write_bytes(b""),
        lambda: (site.dir / "step/d").mkdir(),
        lambda: (site.dir / "step/f").unlink(),
        lambda: os.rename(site.dir / "step/COMMIT", site.dir / "step/x"),
        lambda: os.rename(site.dir / "step/f", site.dir / "f"),
        lambda: os.truncate(site.dir / "step/f", 0),
    ):
        refused(errno.EPERM, action)
    assert site.stored("step/f") == BIG
    os.rename(site.dir / "step", site.dir / "other")
    site.fs.checkpoint(f"{site.name}/other")


@row
def remove_checkpoint(site: Site) -> None:
    for name, remove in (("a", shutil.rmtree), ("b", lambda path: subprocess.run(["rm", "-r", path], check=True))):
        step = site.dir / "run" / name
        for inner in ("", ".cache", "1", "x/1"):
            (step / inner).mkdir(parents=True, exist_ok=True)
            for file in (".metadata", "0.bin", "README", "model"):
                (step / inner / file).write_bytes(BIG if file == "model" else b"x")
        site.fs.commit(f"{site.name}/run/{name}")
        until(lambda step=step: (step / "COMMIT").exists())
        assert os.listdir(step)[0] == "COMMIT"
        assert site.fs.latest(f"{site.name}/run") == f"{site.name}/run/{name}"
        remove(step)
        assert not step.exists()
        assert not exists(site.fs.backend, f"{site.name}/run/{name}")
    (site.dir / "outer/inner").mkdir(parents=True)
    (site.dir / "outer/inner/f").write_bytes(b"x")
    site.fs.commit(f"{site.name}/outer/inner")
    site.fs.commit(f"{site.name}/outer")
    until(lambda: (site.dir / "outer/COMMIT").exists())
    refused(errno.EPERM, lambda: shutil.rmtree(site.dir / "outer/inner"))
    site.fs.checkpoint(f"{site.name}/outer")
    shutil.rmtree(site.dir / "outer")


@pytest.mark.parametrize("mounted", ["folder", HDFS], indirect=True)
@pytest.mark.parametrize("name", ROWS)
def test_row(site: Site, name: str) -> None:
    ROWS[name](site)


@pytest.fixture(scope="module")
def second(mounted: tuple[FsMount, StripeFS]) -> Iterator[Path]:
    """Another mount of the same store."""
    place = Path(tempfile.mkdtemp(prefix="bootseer-pytest-rw2-", dir="/var/tmp"))
    config = Config(cache_dir=str(place / "cache"), state_dir=str(place / "state"))
    made = fsmount.start(mounted[1].url, place / "mnt", config=config, writable=True)
    try:
        yield made.mountpoint
    finally:
        made.unmount()
        shutil.rmtree(place)


@pytest.fixture
def other(site: Site, second: Path) -> Path:
    """The folder of ``site`` through a second mount."""
    return second / site.name


def number_of(action: Callable[[], object]) -> str | None:
    """The error that it ends with."""
    try:
        action()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    return None


EXCLUSIVELY = os.O_WRONLY | os.O_CREAT | os.O_EXCL
BOTH = {"small": (b"one", b"two"), "large": (BIG, BIG[::-1]), "mixed": (b"one", BIG)}
both_mounts = pytest.mark.parametrize("mounted", ["folder", HDFS], indirect=True)


@both_mounts
@pytest.mark.parametrize("content", [*BOTH, "empty", "same"])
def test_two_mounts_that_make_one_name_exclusively(site: Site, other: Path, content: str) -> None:
    one, two = {**BOTH, "empty": (b"", b""), "same": (b"same", b"same")}[content]
    fds = [os.open(site.dir / "f", EXCLUSIVELY)]
    assert number_of(lambda: fds.append(os.open(other / "f", EXCLUSIVELY))) in (None, "EEXIST")
    for fd, data in zip(fds, (one, two), strict=False):
        os.write(fd, data)
    assert number_of(lambda: os.close(fds[0])) is None
    if len(fds) > 1:
        assert number_of(lambda: os.close(fds[1])) == "EEXIST"
    assert site.stored("f") == one
    refused(errno.EEXIST, lambda: os.open(other / "f", EXCLUSIVELY))


@both_mounts
@pytest.mark.parametrize("how", ["new", "append", "rewrite", "truncate", "with put"])
@pytest.mark.parametrize("content", BOTH)
def test_two_writers_of_one_file_lose_nothing_without_an_error(
    site: Site, other: Path, content: str, how: str, tmp_path: Path
) -> None:
    one, two = BOTH[content]
    base = b"base" * 100
    if how != "new":
        (site.dir / "f").write_bytes(base)
        until(lambda: (other / "f").read_bytes() == base)
    mode = os.O_WRONLY | {
        "new": os.O_CREAT, "append": os.O_APPEND, "rewrite": os.O_TRUNC, "truncate": 0, "with put": os.O_TRUNC
    }[how]  # fmt: skip
    first = os.open(site.dir / "f", mode)
    second = first if how == "with put" else os.open(other / "f", mode)
    if how == "truncate":
        os.ftruncate(first, 0)
    os.write(first, one)
    if how == "with put":
        (tmp_path / "f").write_bytes(one)
        site.fs.put(tmp_path / "f", f"{site.name}/f")
        expected = one
    else:
        assert number_of(lambda: os.close(first)) is None
        expected = base + one if how == "append" else one
        assert site.stored("f") == expected
        if how == "truncate":
            os.ftruncate(second, 0)
        os.write(second, two)
    code = number_of(lambda: os.close(second))
    if how == "with put" and len(one) < 4 << 20:
        assert code is None, "the same bytes are there"
    else:
        assert code == ("EEXIST" if how == "new" else "ESTALE")
    assert site.stored("f") == expected
    until(lambda: (other / "f").read_bytes() == expected == (site.dir / "f").read_bytes())


@both_mounts
def test_of_writers_that_close_at_one_moment_one_wins(site: Site, other: Path) -> None:
    for number in range(10):
        if number == 5:
            time.sleep(1.1)  # both mounts know by then what there is
        name = f"f{number % 5}"
        old = site.stored(name)
        fds = [os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for folder in (site.dir, other)]
        for fd, data in zip(fds, (b"one", b"other"), strict=True):
            os.write(fd, data + b"%d" % number)
        codes = together(lambda fd: number_of(lambda: os.close(fd)), fds)
        assert sorted(map(str, codes)) == ["EEXIST" if old is None else "ESTALE", "None"]
        assert site.stored(name) == (b"one", b"other")[codes.index(None)] + b"%d" % number


@both_mounts
def test_what_is_appended_to_is_replaced_by_a_rename_or_removed(site: Site, other: Path) -> None:
    for how in ("rename", "unlink"):
        (site.dir / how).write_bytes(b"base")
        until(lambda how=how: (other / how).read_bytes() == b"base")
        fd = os.open(other / how, os.O_WRONLY | os.O_APPEND)
        os.write(fd, b"more")
        if how == "rename":
            (site.dir / "new").write_bytes(b"renamed")
            os.rename(site.dir / "new", site.dir / how)
        else:
            (site.dir / how).unlink()
        assert number_of(lambda fd=fd: os.close(fd)) == "ESTALE"
        assert site.stored(how) == (b"renamed" if how == "rename" else None)


@both_mounts
def test_a_file_is_added_to_after_another_mount_has_set_its_time(site: Site, other: Path) -> None:
    for name, data in (("small", b"base"), ("large", BIG)):
        with open(site.dir / name, "wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
            until(lambda name=name, data=data: (other / name).read_bytes() == data)
            os.utime(other / name, (1e9, 1e9))
            file.write(b"more")
        assert site.stored(name) == data + b"more"


@both_mounts
@pytest.mark.parametrize(
    ("replaces", "size"), [("this mount", 1000), ("another mount", 1000), ("fsspec", 1000), ("another mount", 5 << 20)]
)
def test_an_open_finds_the_old_or_the_new_version_of_what_is_replaced(
    site: Site, other: Path, replaces: str, size: int
) -> None:
    (site.dir / "f").write_bytes(b"0" * size)
    until(lambda: (other / "f").exists())
    trouble, ended = list[str](), threading.Event()

    def read() -> None:
        while not ended.is_set():
            try:
                found = (site.dir / "f").read_bytes()
            except OSError as exc:
                trouble.append(errno.errorcode[exc.errno or 0])
            else:
                if found.count(found[:1]) != len(found) or len(found) % size:
                    trouble.append(f"{len(found)} bytes of {set(found)}")

    readers = [later(read) for _ in range(2)]
    for number in range(15 if size < 10_000 else 5):
        data = b"%d" % (number % 10) * size * (number % 3 + 1)
        if replaces == "fsspec":
            with site.fs.create(f"{site.name}/f") as out:
                out.write(data)
        else:
            folder = site.dir if replaces == "this mount" else other
            (folder / "new").write_bytes(data)
            os.rename(folder / "new", folder / "f")
    ended.set()
    for reader in readers:
        reader.result(60)
    assert trouble == []


@both_mounts
def test_an_open_for_adding_finds_what_is_there_now(site: Site) -> None:
    (site.dir / "f").write_bytes(b"0")
    trouble, ended = list[str | None](), threading.Event()

    def add() -> None:
        while not ended.is_set():
            trouble.append(number_of(lambda: os.close(os.open(site.dir / "f", os.O_WRONLY | os.O_APPEND))))

    adders = [later(add) for _ in range(2)]
    for number in range(25):
        with site.fs.create(f"{site.name}/f") as out:
            out.write(b"%d" % number)
    ended.set()
    for adder in adders:
        adder.result(60)
    assert set(trouble) == {None}


@both_mounts
def test_of_mounts_that_make_one_folder_one_does(site: Site, other: Path) -> None:
    for number in range(10):
        name = f"d{number}"
        codes = together(number_of, [(at / name).mkdir for at in (site.dir, other)])
        assert sorted(map(str, codes)) == ["EEXIST", "None"]
    assert not [entry.name for entry in site.fs.backend.list(site.name) if entry.name.startswith(".tmp-")]


@both_mounts
def test_of_mounts_that_link_to_one_name_one_does(site: Site, other: Path) -> None:
    """As programs do that lock by a link."""
    for number in range(10):
        ways = [(site.dir / "one", site.dir / f"f{number}"), (other / "two", other / f"f{number}")]
        for source, _ in ways:
            source.write_bytes(source.name.encode())
        codes = together(number_of, [partial(os.link, *way) for way in ways])
        assert sorted(map(str, codes)) == ["EEXIST", "None"]
        assert site.stored(f"f{number}") == (b"one", b"two")[codes.index(None)]


@both_mounts
def test_the_same_bytes_of_two_mounts_are_no_error(site: Site, other: Path) -> None:
    """As when all ranks of a job write one small file of settings."""
    for number in range(2):
        time.sleep(1.1 * number)  # both mounts know by then what there is
        fds = [os.open(folder / "f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for folder in (site.dir, other)]
        for fd in fds:
            os.write(fd, b"same")
        assert together(lambda fd: number_of(lambda: os.close(fd)), fds) == [None, None]
        assert site.stored("f") == b"same"


def test_the_page_has_these_rows() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE) == list(ROWS)


@pytest.mark.parametrize(("mode", "expected"), [("ab", BIG + b"more"), ("wb", b"more")])
def test_a_file_that_somebody_else_just_made_is_opened_as_asked(site: Site, mode: str, expected: bytes) -> None:
    assert not (site.dir / "f").exists()  # which the kernel believes for a second
    with site.fs.create(f"{site.name}/f") as out:
        out.write(BIG)
    with open(site.dir / "f", mode, buffering=0) as file:
        file.write(b"more")
    assert site.stored("f") == expected == (site.dir / "f").read_bytes()


# -- writers that die --------------------------------------------------------------------------------------------------

WRITER = """
import os, sys, threading, time
path, step = sys.argv[1], sys.argv[2]
def here():
    print("here", flush=True)
    time.sleep(60)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
file = open(path, "w+b", buffering=0)
if step == "opened": here()
file.write(b"n" * 1000)
if step == "begun": here()
for _ in range(70 if step == "streaming" else 6): file.write(b"n" * (1 << 20))
if step == "streaming": here()
if step == "child":
    if os.fork() == 0: here()
    time.sleep(60)
if step == "mapped":
    import mmap
    os.ftruncate(file.fileno(), 80 << 20)
    pages = mmap.mmap(file.fileno(), 80 << 20)
    pages[:1000] = b"m" * 1000
    here()
if step == "exits": sys.exit(3)
if step == "exits at once": os._exit(0)
if step == "aborts": os.abort()
file.close()
if step == "closed": here()
"""
NEW = b"n" * ((6 << 20) + 1000)


@pytest.mark.parametrize(
    ("step", "old"),
    [("opened", None), ("begun", b"old"), ("streaming", None), ("streaming", b"old"), ("mapped", b"old")],
)
def test_a_killed_writer_leaves_what_was_there(site: Site, step: str, old: bytes | None) -> None:
    if old is not None:
        (site.dir / "f").write_bytes(old)
    argv = [sys.executable, "-c", WRITER, str(site.dir / "f"), step]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"here\n"
        assert site.stored("f") == old
        writer.kill()
    until(lambda: f"{site.name}/f is not published: its writer was killed" in site.log())
    assert site.stored("f") == old
    if old is None:
        until(lambda: not (site.dir / "f").exists())
    else:
        until(lambda: (site.dir / "f").stat().st_size == len(old))
        assert (site.dir / "f").read_bytes() == old
    (site.dir / "f").write_bytes(b"later")
    assert site.stored("f") == b"later"


def test_a_killed_writer_s_half_is_not_published_by_who_only_has_it_open(site: Site) -> None:
    argv = [sys.executable, "-c", WRITER, str(site.dir / "f"), "begun"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"here\n"
        other = os.open(site.dir / "f", os.O_WRONLY)
        writer.kill()
    os.close(other)
    until(lambda: f"{site.name}/f is not published: its writer was killed" in site.log())
    assert site.stored("f") is None


def test_a_writer_that_aborts_leaves_what_was_there(site: Site) -> None:
    argv = [sys.executable, "-c", WRITER, str(site.dir / "f"), "aborts"]
    assert subprocess.run(argv).returncode == -signal.SIGABRT
    until(lambda: f"{site.name}/f is not published: its writer was killed" in site.log())
    assert site.stored("f") is None


@pytest.mark.parametrize("step", ["exits", "exits at once", "closed"])
def test_a_writer_that_ends_publishes(site: Site, step: str) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(site.dir / "f"), step], stdout=subprocess.PIPE) as writer:
        if step == "closed":
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"here\n"
            writer.kill()
        writer.wait()
    until(lambda: site.stored("f") == NEW)


def test_a_child_of_the_writer_that_is_killed_changes_nothing(site: Site) -> None:
    with open(site.dir / "f", "wb", buffering=0) as file:
        file.write(b"abc")
        with subprocess.Popen(["sleep", "60"], pass_fds=[file.fileno()]) as child:
            child.kill()
        assert site.stored("f") is None
        file.write(b"def")
    assert site.stored("f") == b"abcdef"


# -- HDFS -------------------------------------------------------------------------------------------------------------


@pytest.mark.hdfs
@pytest.mark.parametrize("mounted", ["hdfs"], indirect=True)
def test_a_file_whose_close_failed_is_not_published_later(site: Site) -> None:
    """The NameNode stands still at close(2), and is back a moment after that has failed."""
    file = os.open(site.dir / "f", os.O_WRONLY | os.O_CREAT)
    other = os.dup(file)
    os.write(file, b"new")
    with hadoop.shared().frozen_namenode():
        os.write(file, b"er")
        refused(errno.EIO, lambda: os.close(file))
    refused(errno.EIO, lambda: os.close(other))
    until(lambda: site.made.status().unfinished == 0, 60, what="the end of the file")
    assert site.stored("f") is None
    (site.dir / "f").write_bytes(b"later")
    assert site.stored("f") == b"later"


@pytest.mark.hdfs
def test_an_ordinary_user_of_hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """Whom a NameNode answers otherwise than its superuser."""
    fs = open_fs(f"{hadoop.shared().url}/{uuid.uuid4().hex}")
    fs.backend.make_folder("")
    fs.backend.change("", owner=("alice", "staff"))
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config, writable=True)
    monkeypatch.undo()
    try:
        path = made.mountpoint / "f"
        for content in (BIG, BIG[::-1], b"small"):
            path.write_bytes(content)
        path.write_bytes(BIG)
        (made.mountpoint / "d").mkdir()
        shutil.move(path, made.mountpoint / "d/g")
        for mode in (0o755, 0o600):
            run(["chmod", f"{mode:o}", made.mountpoint / "d/g"])
            assert stat.S_IMODE((made.mountpoint / "d/g").stat().st_mode) == mode
            told = fs.backend.stat("d/g").permissions
            assert told is not None
            assert told.kept == mode
        with open(made.mountpoint / "d/g", "ab") as file:
            file.write(b"more")
        (made.mountpoint / "gone").write_bytes(b"x")
        (made.mountpoint / "gone").unlink()
        with fs.open("d/g") as stored:
            assert stored.read(0, stored.size) == BIG + b"more"
        for folder in ("", "d", "d/.bsx"):
            assert {entry.permissions and entry.permissions.owner for entry in fs.backend.list(folder)} == {
                ("alice", "staff")
            }
    finally:
        made.unmount()


@pytest.mark.hdfs
@pytest.mark.soak
def test_a_close_knows_whether_its_last_step_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    """The NameNode stands still for more than a minute before it renames the file: that happens when it goes on."""
    monkeypatch.setenv("BOOTSEER_FAULTS", "stripefs.write.rename=sleep:15")
    cluster = hadoop.shared()
    fs = open_fs(f"{cluster.url}/{uuid.uuid4().hex}")
    fs.backend.make_folder("")
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config, writable=True)
    try:
        closed = later(lambda: (made.mountpoint / "f").write_bytes(BIG))
        until(lambda: any(entry.name.startswith(".tmp-") and entry.size for entry in fs.backend.list("")), 60)
        time.sleep(2)
        with cluster.frozen_namenode():
            time.sleep(90)
            assert not closed.done()
        closed.result(120)
        with fs.open("f") as file:
            assert file.read(0, file.size) == BIG
    finally:
        made.unmount()


@pytest.mark.hdfs
def test_owners_on_a_mount_that_others_may_use() -> None:
    place = Path(tempfile.mkdtemp(prefix="bootseer-pytest-rw-", dir="/var/tmp"))
    place.chmod(0o755)
    fs = open_fs(f"{hadoop.shared().url}/{uuid.uuid4().hex}")
    fs.backend.make_folder("")
    config = Config(cache_dir=str(place / "cache"), state_dir=str(place / "state"))
    made = fsmount.start(fs.url, place / "mnt", config=config, writable=True)
    nobody = pwd.getpwuid(65534).pw_name, grp.getgrgid(65534).gr_name

    def check(name: str, *, mode: int = 0o600) -> None:
        pointer = read_pointer(fs.backend, name)
        assert pointer is not None
        for path in (name, *(pointer.stripe_path(name, index) for index in range(pointer.width))):
            found = fs.backend.stat(path).permissions
            assert found is not None
            assert (found.owner, found.kept) == (nobody, mode)
        until(lambda: (made.mountpoint / name).stat().st_uid == 65534)

    try:
        path = made.mountpoint / "f"
        path.write_bytes(BIG)
        os.chmod(path, 0o600)
        os.chown(path, 65534, 65534)
        check("f")
        for user, code in ((65534, 0), (65533, 1)):
            done = subprocess.run(
                ["cmp", "-n", "10", path, "-"], input=BIG[:10], user=user, group=user, extra_groups=[]
            )
            assert bool(done.returncode) == bool(code)
        path.write_bytes(BIG[::-1])
        check("f")
        with open(path, "ab") as file:
            file.write(b"more")
        check("f")
        os.truncate(path, 5 << 20 | 4096)
        check("f")
        (made.mountpoint / "d").mkdir()
        os.rename(path, made.mountpoint / "e")
        check("e")
        fs.rename("e", "d/f")  # which copies it
        check("d/f")
        with open(made.mountpoint / "g", "wb", buffering=0) as file:
            file.write(BIG)
            os.fchown(file.fileno(), 65534, 65534)
        check("g", mode=0o644)
        fs.backend.change("d/f", owner=("alice", "staff"))  # whom this node does not know
        (made.mountpoint / "d/f").write_bytes(BIG)
        told = fs.backend.stat("d/f").permissions
        assert told is not None
        assert told.owner == ("alice", "staff")
        os.chmod(made.mountpoint / "d/f", 0o755)
        assert fs.stat("d/f").permissions.kept == 0o755  # type: ignore[union-attr]
        until(lambda: stat.S_IMODE((made.mountpoint / "d/f").stat().st_mode) == 0o055)  # a group of that name is here
    finally:
        made.unmount()
        shutil.rmtree(place)


# -- real programs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of all kinds of sizes, with times and modes of their own."""
    root = tmp_path / "tree"
    (root / "deep/er").mkdir(parents=True)
    for i, size in enumerate((0, 1, 4095, 300_000, 4 << 20, (9 << 20) + 7)):
        path = root / "deep" / f"{i}"
        path.write_bytes(os.urandom(size))
        os.utime(path, (1e9 + i, 1e9 + i))
    with open(root / "deep/er/sparse", "wb") as file:
        file.write(b"a")
        os.ftruncate(file.fileno(), 3 << 20)
    return root


def run(argv: list[str | Path], **more: object) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, (argv, done.stdout, done.stderr)
    return str(done.stdout)


def test_cp_tar_and_rsync(site: Site, tree: Path) -> None:
    run(["cp", "-a", tree, site.dir / "cp"])
    run(["tar", "-cf", site.dir / "all.tar", "-C", tree, "."])
    (site.dir / "tar").mkdir()
    run(["tar", "-xf", site.dir / "all.tar", "-C", site.dir / "tar"])
    run(["rsync", "-a", f"{tree}/", site.dir / "rsync"])
    for name in ("cp", "tar", "rsync"):
        run(["diff", "-r", tree, site.dir / name])
        for path in (tree / "deep").glob("[0-9]"):
            assert (site.dir / name / "deep" / path.name).stat().st_mtime == path.stat().st_mtime
    again = run(["rsync", "-a", "--itemize-changes", f"{tree}/", site.dir / "rsync"])
    assert [line for line in again.splitlines() if line.startswith(">f")] == []
    run(["rm", "-r", site.dir / "cp"])
    assert not (site.dir / "cp").exists()


def test_git_clone(site: Site, tree: Path) -> None:
    for argv in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "all"]):
        run(["git", "-C", tree, *argv])
    for number, source in enumerate((f"file://{tree}", str(tree))):
        clone = site.dir / f"clone{number}"
        run(["git", "clone", "-q", source, clone])
        assert run(["git", "-C", clone, "status", "--short"]) == ""
        run(["git", "-C", clone, "fsck", "--full"])
    (clone / "deep/1").write_bytes(b"changed")
    run(["git", "-C", clone, "-c", "user.name=a", "-c", "user.email=b", "commit", "-qam", "changed"])


def test_fio_verifies_what_it_wrote(site: Site) -> None:
    said = run(["fio", "--name=v", f"--filename={site.dir}/f", "--size=24m", "--bs=256k", "--rw=write",
                "--verify=crc32c", "--ioengine=psync", "--verify_fatal=1", "--verify_state_save=0"])  # fmt: skip
    assert "err= 0" in said
    said = run(["fio", "--name=r", f"--filename={site.dir}/g", "--size=8m", "--bs=64k", "--rw=randwrite",
                "--verify=crc32c", "--ioengine=psync", "--verify_fatal=1", "--verify_state_save=0"])  # fmt: skip
    assert "err= 0" in said


@pytest.mark.torch
def test_torch_safetensors_and_dcp(site: Site) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.randn(1500, 1000), "b": torch.ones(7).bfloat16()}
    torch.save(state, site.dir / "state.pt")
    loaded = torch.load(site.dir / "state.pt", weights_only=True, mmap=True)
    assert torch.equal(loaded["w"], state["w"])
    assert site.fs.stat(f"{site.name}/state.pt").striped
    safetensors.save_file(state, site.dir / "m.safetensors")
    assert torch.equal(safetensors.load_file(site.dir / "m.safetensors")["w"], state["w"])
    warnings.simplefilter("ignore")  # pytest undoes it: a save by one process is what is meant
    for number in range(2):  # the second time over the first
        state["w"] += number
        dcp.save(state, storage_writer=dcp.FileSystemWriter(site.dir / "dcp", overwrite=True), no_dist=True)
        target = {"w": torch.zeros(1500, 1000), "b": torch.zeros(7).bfloat16()}
        dcp.load(target, storage_reader=dcp.FileSystemReader(site.dir / "dcp"), no_dist=True)
        assert torch.equal(target["w"], state["w"])
    site.fs.commit(f"{site.name}/dcp")
    site.fs.verify(site.name)


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Mounts of a folder with little room for spools."""
    made: list[FsMount] = []

    def start(spool: int, cache: Path | None = None) -> Site:
        fs = open_fs(str(tmp_path / "store"))
        fs.backend.make_folder("d")
        config = Config(cache_dir=str(cache or tmp_path / "cache"), state_dir=str(tmp_path / "state"))
        made.append(fsmount.start(fs.url, tmp_path / "mnt", config=config, writable=True, spool=spool))
        return Site(made[-1], fs, "d")

    yield start
    for one in made:
        one.unmount()


def without_spool(site: Site) -> None:
    with open(site.dir / "f", "w+b", buffering=0) as file:
        for offset in range(0, len(BIG), 1 << 20):
            file.write(BIG[offset : offset + (1 << 20)])
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        refused(errno.EOPNOTSUPP, lambda: os.pwrite(file.fileno(), b"x", 0))
        file.write(b"end")
        os.fsync(file.fileno())
        file.write(b"more")
    assert site.stored("f") == BIG + b"endmore" == (site.dir / "f").read_bytes()
    assert site.log().count("goes on without a spool") == 1


def test_a_file_larger_than_the_spools_is_written_in_order(narrow: Callable[..., Site]) -> None:
    site = narrow(2 << 20)
    without_spool(site)
    (site.dir / "small").write_bytes(b"room again")
    assert site.stored("small") == b"room again"


def test_a_full_disk_below_the_spool(narrow: Callable[..., Site], tmp_path: Path) -> None:
    cache = tmp_path / "full"
    cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "none", cache], check=True)
    try:
        site = narrow(1 << 30, cache)
        without_spool(site)
        file = os.open(site.dir / "g", os.O_WRONLY | os.O_CREAT)
        os.ftruncate(file, 4 << 20)

        def fill() -> None:
            for offset in range(0, 4 << 20, 1 << 18):
                os.pwrite(file, BIG[offset : offset + (1 << 18)], offset)

        refused(errno.ENOSPC, fill)
        refused(errno.EIO, lambda: os.close(file))
        site.made.unmount()
        assert site.stored("g") is None
    finally:
        subprocess.run(["umount", "-l", cache], check=True)


def test_only_who_mounted_it_writes(tmp_path: Path, config: Config) -> None:
    """A folder that root shows to others, such as containers with users of their own."""
    fs = open_fs(str(tmp_path / "store"))
    with fs.create("f") as out:
        out.write(b"x")
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config, writable=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            subprocess.run(["mount", "--bind", made.mountpoint, folder], check=True)
            try:
                for command in ("cat f", "echo y > f", "echo y > new", "rm -f f", "mkdir d", "mv f g", "touch f"):
                    done = subprocess.run(["sh", "-c", command], cwd=folder, user=65534, group=65534, extra_groups=[])
                    assert (done.returncode == 0) == (command == "cat f"), command
            finally:
                subprocess.run(["umount", folder], check=True)
        assert [(found.path, found.size) for found in fs.ls()] == [("f", 1)]
    finally:
        made.unmount()


def test_bad_input(tmp_path: Path, config: Config) -> None:
    (tmp_path / "store").mkdir()
    for more, error, said in (
        ({"width": 0}, ConfigError, "stripe width 0"),
        ({"commit": True}, ConfigError, "mount it read-only"),
    ):
        with pytest.raises(error, match=said):
            fsmount.start(str(tmp_path / "store"), tmp_path / "mnt", config=config, writable=True, **more)
    with pytest.raises(UnsupportedError, match="cannot be mounted for writing"):
        fsmount.start("memory://x", tmp_path / "mnt", config=config, writable=True)


def test_status_counts_what_was_written(site: Site) -> None:
    before = site.made.status().bytes_written
    (site.dir / "f").write_bytes(b"x" * 1000)
    until(lambda: site.made.status().bytes_written >= before + 1000)
