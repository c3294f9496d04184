"""Conversion of an image to a lazy tree in a store, once per digest; and finding a converted image again."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer import erofs, faults, oci
from bootseer.blocks import tree
from bootseer.errors import FullError, NotFoundError, PrivilegeError, from_os_error
from bootseer.image import record as records
from bootseer.image.record import ImageRecord
from bootseer.store import open_store

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""``progress(step, done, total)`` in bytes (total 0: unknown); steps ``download``, ``build``, ``publish``."""
_PREFIX = "convert-"


def convert(
    ref: oci.Reference | str,
    store_url: str,
    *,
    work_dir: Path,
    progress: Progress | None = None,
    plain_http: bool | None = None,
    repair: bool = False,
) -> ImageRecord:
    """Convert ``ref`` into the store, or return the record at once when that image has been converted before.

    Uses about twice the image's unpacked size under ``work_dir`` while it runs, and leaves nothing there, whatever
    happens. ``repair`` converts it again and replaces what is damaged in the store. Needs root. Raises
    `NotFoundError`, `UnavailableError`, `DataError` (naming the layer), `FullError`, `NotWritableError`,
    `PrivilegeError`.
    """
    store = open_store(store_url)
    with oci.open_image(ref, plain_http=plain_http) as image:
        if not repair:
            with contextlib.suppress(NotFoundError):
                return records.load(store, image.digest, image.platform)
        if os.geteuid() != 0:
            raise PrivilegeError(f"converting {image.ref} needs root: files get their owners", hint="run with sudo")
        seconds: dict[str, float] = {}
        layer_bytes = sum(layer.size for layer in image.layers)
        with _work_folder(work_dir) as work:
            # spool + files + data part: at least three times the compressed size, checked again when it is known
            _check_space(work, 3 * layer_bytes, f"unpack {image.ref}")
            root, meta, data = work / "root", work / "meta", work / "data"
            root.mkdir()
            with _timed(seconds, "unpack"):
                unpacked = oci.unpack(image, root, progress=progress)
            _check_space(work, unpacked.bytes, f"convert {image.ref}")
            with _timed(seconds, "build"):
                if progress:
                    progress("build", 0, 0)
                erofs.build(root, meta, data)
            faults.point("image.convert.before-publish")
            shutil.rmtree(root)
            with _timed(seconds, "publish"):
                step = (lambda done, total: progress("publish", done, total)) if progress else None
                made = tree.publish(store, meta, data, progress=step, repair=repair)
        result = ImageRecord(
            image=image.digest,
            platform=image.platform,
            reference=str(image.ref),
            tree=made.digest,
            config=image.config,
            layer_bytes=layer_bytes,
            tree_bytes=made.size,
            stored_bytes=made.stored,
            members=unpacked.members,
            seconds=seconds,
        )
        faults.point("image.convert.before-record")
        if not records.save(store, result, overwrite=repair):
            log.info("another conversion of %s was first", image.ref)
            return records.load(store, image.digest, image.platform)
        return result


def resolve(ref: oci.Reference | str, store_url: str, *, plain_http: bool | None = None) -> ImageRecord:
    """The record of what ``ref`` names now. A tag is looked up at its registry, as it may have moved.

    Raises `NotFoundError` (no such image, or not converted into this store), `UnavailableError`.
    """
    parsed = oci.Reference.parse(ref) if isinstance(ref, str) else ref
    store = open_store(store_url)
    platform = oci.host_platform()
    if parsed.digest:
        with contextlib.suppress(NotFoundError):
            return records.load(store, parsed.digest, platform)
    digest = oci.resolve_digest(parsed, plain_http=plain_http)
    try:
        return records.load(store, digest, platform)
    except NotFoundError:
        raise NotFoundError(
            f"image {parsed} ({digest[:19]}) is not converted in store {store.url}",
            hint=f"run bootseer image convert {parsed}",
        ) from None


@contextlib.contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[step] = round(time.monotonic() - start, 3)


def _check_space(folder: Path, wanted: int, doing: str) -> None:
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < wanted:
        raise FullError(
            f"cannot {doing}: {folder.parent} has {free / 1e9:.1f} GB free, {wanted / 1e9:.1f} GB are needed",
            hint="free some space there or choose another --work-dir",
        )


@contextlib.contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """A private folder, removed at the end; removes what a killed conversion left (its lock is free then)."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for old in parent.glob(f"{_PREFIX}*"):
            _sweep(old)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as exc:
        raise from_os_error(exc, f"work in {parent}") from exc
    try:
        with open(folder / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(folder: Path) -> None:
    try:
        with open(folder / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.warning("removing %s, left by an interrupted conversion", folder)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # in use, or not ours
