"""`build`: a directory as an EROFS image of two files, ``meta`` (all but file contents) and ``data`` (contents)."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bootseer import faults
from bootseer.errors import BootseerError, NotFoundError, UnsupportedError, from_os_error

MKFS = "mkfs.erofs"
_UUID = "626f6f74-7365-6572-8000-000000000000"
_LONGEST_NAME = 254
_STALL_SECONDS = 600.0

# mkfs.erofs stamps the image with this time instead of now, and lowers later mtimes to it. It compares them unsigned,
# so the largest value but one (the largest means "not set") leaves them alone, also those before 1970.
_SOURCE_DATE_EPOCH = str(2**64 - 2)

_ERROR = re.compile(r"\[Error (\d+)\]")


def build(
    tree: Path, meta: Path, data: Path, *, chunk_size: int = 65536, progress: Callable[[int], None] | None = None
) -> None:
    """Write the directory ``tree`` as an EROFS image: ``meta`` and ``data``, to be mounted with
    `bootseer.kernel.mount.mount_erofs(meta, data, target)`.

    ``data`` holds the content of every regular file, small ones too, uncompressed, each file at a multiple of 4 KiB;
    equal chunks of ``chunk_size`` bytes (a power of two, 4096 or more) are stored once, and holes take no room.
    ``meta`` holds the rest: inodes with nanosecond mtimes, names of any bytes, extended attributes (file capabilities
    too), symbolic and hard links, device nodes, fifos, set-id bits, chunk indexes. The same tree gives the same bytes
    with the same version of mkfs.erofs. Needs no root.

    ``meta`` appears last, when both are complete; after a failure there is neither. Nothing is synced to disk.
    ``progress`` gets the bytes of ``data`` written so far, several times a second.

    Traps (erofs-utils 1.5): access and change times become the mtime; names of 255 bytes are refused here, as
    mkfs.erofs cuts them; whiteouts and ``trusted.overlay.*`` attributes in ``tree`` are kept, so an overlayfs over
    the image obeys them; ``tree`` must not change meanwhile.

    Raises `UnsupportedError` (no mkfs.erofs, a name too long), `NotFoundError` (no such folder), `FullError` (no
    space), `NotWritableError`, `BootseerError` (mkfs.erofs failed, or wrote nothing for 10 minutes).
    """
    tree, meta, data = tree.absolute(), meta.absolute(), data.absolute()
    if chunk_size < 4096 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk size {chunk_size} is not a power of two of at least 4096")
    if not tree.is_dir():
        raise NotFoundError(f"cannot build an image of {tree}: it is no folder")
    for part in (meta, data):
        if not part.parent.is_dir():
            raise NotFoundError(f"cannot build {part}: there is no such folder")
        if part.is_relative_to(tree):
            raise BootseerError(f"cannot build {part}: it lies in {tree}, which it is to hold", hint="put it elsewhere")
    tool = shutil.which(MKFS)
    if tool is None:
        raise UnsupportedError(f"cannot build an image of {tree}: no {MKFS}", hint="apt install erofs-utils")
    _check_names(tree)
    new_meta, new_data = (part.with_name(f".{part.name}.{os.getpid()}") for part in (meta, data))
    command = [tool, "--quiet", f"--blobdev={new_data}", f"--chunksize={chunk_size}", "--preserve-mtime", f"-U{_UUID}"]
    complete = False
    try:
        _run([*command, str(new_meta), str(tree)], f"build an image of {tree}", new_data, progress)
        faults.point("erofs.build.before-rename")
        meta.unlink(missing_ok=True)  # never an old meta beside a new data
        os.replace(new_data, data)
        faults.point("erofs.build.between-renames")
        os.replace(new_meta, meta)
        complete = True
    except OSError as exc:
        raise from_os_error(exc, f"build {meta}") from None
    finally:
        new_meta.unlink(missing_ok=True)
        new_data.unlink(missing_ok=True)
        if not complete and not meta.exists():
            data.unlink(missing_ok=True)


def _check_names(tree: Path) -> None:
    def stop(exc: OSError) -> None:
        raise from_os_error(exc, f"read {exc.filename}") from None

    for folder, folders, files in os.walk(os.fsencode(tree), onerror=stop):
        for name in (*folders, *files):
            if len(name) > _LONGEST_NAME:
                where = os.fsdecode(os.path.join(folder, name))
                hint = f"{MKFS} holds up to {_LONGEST_NAME} bytes; rename it"
                raise UnsupportedError(f"cannot build an image with {where}: its name is too long", hint=hint)


def _run(command: list[str], what: str, written: Path, progress: Callable[[int], None] | None) -> None:
    environ: Mapping[str, str] = {**os.environ, "SOURCE_DATE_EPOCH": _SOURCE_DATE_EPOCH, "LC_ALL": "C"}
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        ) as process,
    ):
        try:
            _watch(process, what, written, progress)
        except BaseException:
            process.kill()
            raise
        if process.returncode:
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - 4096))
            raise _failure(what, process.returncode, stderr.read().decode(errors="replace"))


def _watch(process: subprocess.Popen[bytes], what: str, written: Path, progress: Callable[[int], None] | None) -> None:
    size, since = -1, time.monotonic()
    while True:
        try:
            process.wait(0.2)
            return
        except subprocess.TimeoutExpired:
            pass
        # allocated, not apparent: the tool may extend the file first
        now = written.stat().st_blocks * 512 if written.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
            if progress:
                progress(size)
        elif time.monotonic() - since > _STALL_SECONDS:
            raise BootseerError(f"cannot {what}: {MKFS} wrote nothing for {_STALL_SECONDS:.0f} s")


def _failure(what: str, code: int, text: str) -> BootseerError:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if found := _ERROR.search(text):
        number = int(found[1])
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            return from_os_error(OSError(number, os.strerror(number)), what)
    reason = lines[-1].removeprefix("<E> erofs:").strip() if lines else f"exit code {code}"
    return BootseerError(f"cannot {what}: {MKFS}: {reason}")
