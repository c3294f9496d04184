"""Trees without a lazy mount: the hot set into a node cache beforehand, or the whole tree into a plain folder."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from bootseer.blocks import profiles
from bootseer.blocks.cache import CacheFile
from bootseer.blocks.fetch import Fetcher
from bootseer.blocks.manifest import LocalTree, localize
from bootseer.blocks.pack import Progress
from bootseer.blocks.profiles import ProfileKey
from bootseer.blocks.source import StoreSource
from bootseer.errors import BootseerError, DataError, FullError, UnavailableError, UnsupportedError, from_os_error
from bootseer.store import Store, open_store

log = logging.getLogger(__name__)

_STALLED_SECONDS = 60.0


def prefetch(
    store_url: str,
    digest: str,
    *,
    cache_dir: Path,
    profile: ProfileKey | None = None,
    streams: int = 6,
    progress: Progress | None = None,
) -> int:
    """Pull the hot blocks of a tree into the node cache (all blocks when there is no profile); returns how many are
    ready. ``progress(done, total)`` counts blocks. Raises `UnavailableError` also when a block server owns the cache.
    """
    store = open_store(store_url)
    tree = localize(store, digest, Path(os.path.abspath(cache_dir)))
    traces = profiles.load(store, digest, profile, tree.map.size) if profile is not None else []
    wanted = profiles.merge(traces, tree.map) if traces else list(range(tree.map.count))
    with CacheFile.open(tree.cache, tree.map, tree.map_digest) as cache:
        _fill(store, tree, cache, wanted, streams, progress)
        return sum(cache.ready[block] for block in wanted)


def _fill(
    store: Store, tree: LocalTree, cache: CacheFile, wanted: list[int], streams: int, progress: Progress | None
) -> None:
    """Fetch ``wanted``; gives up when nothing arrives for a minute."""
    fetcher = Fetcher(cache, [StoreSource(store, tree.manifest.data_stored.key)], streams=streams)
    try:
        fetcher.hot(wanted)
        seen, since = -1, time.monotonic()
        while not fetcher.wait(0.2):
            if cache.ready_count != seen:
                seen, since = cache.ready_count, time.monotonic()
            elif time.monotonic() - since > _STALLED_SECONDS:
                raise UnavailableError(f"no block of tree {tree.digest[:12]} came from {store.url} for a minute")
            if progress is not None:
                progress(sum(cache.ready[block] for block in wanted), len(wanted))
        missing = [block for block in wanted if not cache.ready[block]]
        if fetcher.full:
            raise FullError(f"no space for tree {tree.digest[:12]} in {cache.folder}", hint="free some space there")
        if missing:
            raise DataError(f"{len(missing)} blocks of tree {tree.digest[:12]} are damaged in store {store.url}")
        if progress is not None:
            progress(len(wanted), len(wanted))
    finally:
        fetcher.close()


def extract(store: Store, digest: str, dest: Path, *, streams: int = 6, progress: Progress | None = None) -> None:
    """Write the whole tree into ``dest`` (made when missing, must be empty), without any mount.

    Needs ``fsck.erofs`` and space for the tree twice in the file system of ``dest``. Extended attributes are not
    written. Raises `UnsupportedError`, `DataError`, `UnavailableError`, `FullError`.
    """
    tool = shutil.which("fsck.erofs")
    if tool is None:
        raise UnsupportedError("extracting a tree needs fsck.erofs", hint="install erofs-utils")
    dest = Path(os.path.abspath(dest))
    try:
        dest.mkdir(parents=True, exist_ok=True)
        if any(dest.iterdir()):
            raise BootseerError(f"cannot extract into {dest}: it is not empty")
        work = Path(tempfile.mkdtemp(prefix=".extract-", dir=dest.parent))
    except OSError as exc:
        raise from_os_error(exc, f"extract into {dest}") from exc
    try:
        tree = localize(store, digest, work)
        with CacheFile.open(tree.cache, tree.map, tree.map_digest) as cache:
            _fill(store, tree, cache, list(range(tree.map.count)), streams, progress)
        done = subprocess.run(
            [tool, f"--extract={dest}", "--overwrite", f"--device={tree.cache / 'data'}", str(tree.meta)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise DataError(f"fsck.erofs cannot extract tree {digest[:12]} into {dest}: {last}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
