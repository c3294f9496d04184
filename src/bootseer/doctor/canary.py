"""The canary: a small image read the way real ones are, then its server is killed in the middle.

The data file of an EROFS image is served by a FUSE server in a process of its own (this module's ``__main__``, which
ends with its standard input). EROFS is mounted over it, one file is read and compared, the server gets SIGKILL, and the
other file must give errors, not zeros."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bootseer import erofs
from bootseer.errors import BootseerError, DataError, UnavailableError, UnsupportedError
from bootseer.kernel import fuse, mount

FILE_SIZE = 1 << 20
_DEADLINE = 20.0
_PIECE = 64 << 10


def contents(name: str) -> bytes:
    """The bytes of a canary file: no two chunks alike, none zero."""
    return hashlib.shake_128(name.encode()).digest(FILE_SIZE)


def make(folder: Path) -> tuple[Path, Path]:
    """Write the canary image into ``folder``: its meta and its data. Raises as `erofs.build`."""
    tree = folder / "tree"
    tree.mkdir()
    for name in ("before", "after"):
        (tree / name).write_bytes(contents(name))
    meta, data = folder / "canary.meta", folder / "canary.data"
    erofs.build(tree, meta, data)
    return meta, data


def whole(folder: Path, meta: Path, data: Path) -> str:
    """Try the whole way in ``folder``; one line about what was seen. Raises `BootseerError` where it fails."""
    started = time.monotonic()
    served, target = folder / "served", folder / "target"
    target.mkdir()
    with _served(data, served) as server, ExitStack() as stack:
        way = mount.mount_erofs(meta, served / "data", target)
        stack.callback(mount.unmount, target, lazy=True)
        if (target / "before").read_bytes() != contents("before"):
            raise DataError("the canary image read through FUSE and EROFS is not what was put in")
        mounted = time.monotonic() - started
        server.kill()
        server.wait(_DEADLINE)
        expect_errors(target / "after", contents("after"))
    how = "as a file" if way == "file" else "through a loop device"
    return f"read through FUSE and EROFS (mounted {how}) in {mounted * 1000:.0f} ms; an error, not zeros, after a kill"


def fuse_only(folder: Path, data: Path) -> str:
    """Try the FUSE half, which needs no root where fusermount3 is installed."""
    served = folder / "served"
    with _served(data, served):
        if (served / "data").read_bytes() != data.read_bytes():
            raise DataError("the canary file read through FUSE is not what was put in")
    return "read through FUSE"


def expect_errors(path: Path, right: bytes) -> None:
    """Read all of ``path``: right bytes (readahead brought them before) or errors, and an error at the end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        failed = False
        for offset in range(0, FILE_SIZE, _PIECE):
            try:
                got = os.pread(fd, _PIECE, offset)
            except OSError:
                failed = True
                continue
            failed = False
            if got != right[offset : offset + _PIECE]:
                kind = "zeros" if not any(got) else "wrong bytes"
                raise DataError(f"a read through EROFS gave {kind} after the FUSE server was killed")
        if not failed:
            raise DataError("a read through EROFS succeeded though the FUSE server was killed")
    finally:
        os.close(fd)


@contextmanager
def _served(data: Path, mountpoint: Path) -> Iterator[subprocess.Popen[bytes]]:
    mountpoint.mkdir()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", "bootseer.doctor.canary", str(data), str(mountpoint)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, process_group=0
    )
    # a read of the mount cannot be given up from here; killing the server ends it with an error
    watch = threading.Timer(_DEADLINE, server.kill)
    with server:
        try:
            watch.start()
            _await_ready(server)
            yield server
        finally:
            watch.cancel()
            if server.stdin:
                server.stdin.close()
            try:
                server.wait(_DEADLINE / 2)
            except subprocess.TimeoutExpired:
                server.kill()
            if mount.is_mounted(mountpoint):
                mount.unmount(mountpoint, lazy=True)


def _await_ready(server: subprocess.Popen[bytes]) -> None:
    assert server.stdout
    assert server.stderr
    readable, _, _ = select.select([server.stdout], [], [], _DEADLINE)
    if readable and server.stdout.readline() == b"ready\n":
        return
    if not readable:
        server.kill()
        raise UnavailableError(f"the canary's FUSE server was not ready within {_DEADLINE:g} s")
    lines = server.stderr.read().decode(errors="replace").strip().splitlines() or ["it ended without a word"]
    raise UnsupportedError(lines[-1])


def _serve(data: Path, mountpoint: Path) -> None:
    with data.open("rb") as file:
        size, fd = os.fstat(file.fileno()).st_size, file.fileno()
        operations = fuse.SingleFile("data", size, lambda offset, length, ctx: (fd, offset))
        with fuse.Server(operations, mountpoint, workers=2, options=fuse.Options(name="bootseer-canary")):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            sys.stdin.buffer.read()


if __name__ == "__main__":
    try:
        _serve(Path(sys.argv[1]), Path(sys.argv[2]))
    except BootseerError as exc:
        sys.exit(str(exc))
