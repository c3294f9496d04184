"""What a hot pack is made of after the unmount: a data file that is given back as soon as somebody wants it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blocks.cache.blockfile import CacheFile, in_use
from bootseer.blocks.cache.borrowed import Borrowed
from bootseer.blocks.cache.locks import maintain
from bootseer.errors import UnavailableError
from bootseer.testing import lazy

COUNT = 16


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheFile]:
    blob = lazy.make(tmp_path / "blob", lazy.content(COUNT * 4096, zeros=0.0))
    cache = blob.open_cache(tmp_path / "cache")
    for block in range(COUNT - 1):
        cache.write(block, blob.content[block * 4096 : (block + 1) * 4096])
    yield cache
    cache.close()


@pytest.fixture
def lent(cache: CacheFile) -> Iterator[Borrowed]:
    lent = Borrowed(cache)
    yield lent
    lent.close()


def leave(cache: CacheFile, lent: Borrowed) -> None:
    lent.leave()
    cache.close()


def open_anew(cache: CacheFile) -> CacheFile:
    return CacheFile.open(cache.folder, cache.map, cache.digest)


def read_on(lent: Borrowed, until: float) -> None:
    while time.monotonic() < until:
        lent.read(0, 4096)
        time.sleep(0.01)


def test_it_reads_the_same_before_and_after(cache: CacheFile, lent: Borrowed) -> None:
    before = [lent.read(block * 4096, 4096) for block in range(COUNT - 1)]
    leave(cache, lent)
    assert [lent.read(block * 4096, 4096) for block in range(COUNT - 1)] == before
    assert lent.is_ready(0, COUNT - 2)
    assert not lent.is_ready(COUNT - 1, COUNT - 1)


def test_what_becomes_ready_later_is_seen_until_then(cache: CacheFile, lent: Borrowed) -> None:
    cache.write(COUNT - 1, bytes(4096))
    assert lent.is_ready(0, COUNT - 1)
    leave(cache, lent)
    assert lent.is_ready(0, COUNT - 1)


def test_who_opens_the_cache_waits_a_moment_and_guards_a_file_nobody_else_has(cache: CacheFile, lent: Borrowed) -> None:
    leave(cache, lent)
    lent.read(0, 4096)
    found: list[CacheFile] = []
    opener = threading.Thread(target=lambda: found.append(open_anew(cache)))
    opener.start()
    opener.join(0.3)
    assert opener.is_alive(), "the file was not borrowed under a lease"
    lent.give_way()
    opener.join(5.0)
    (again,) = found
    try:
        assert not in_use(again.fileno())
        with pytest.raises(UnavailableError, match="used again"):
            lent.read(0, 4096)
        assert not in_use(again.fileno())
    finally:
        again.close()


def test_a_reader_gives_way_by_itself(cache: CacheFile, lent: Borrowed) -> None:
    leave(cache, lent)
    lent.read(0, 4096)
    opener = threading.Thread(target=lambda: open_anew(cache).close())
    opener.start()
    until = time.monotonic() + 5.0
    with pytest.raises(UnavailableError, match="used again"):
        read_on(lent, until)
    opener.join(5.0)
    assert not opener.is_alive()


def test_a_cache_that_is_owned_again_is_left_alone(
    cache: CacheFile, lent: Borrowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.blocks.cache.borrowed._FREE_SECONDS", 0.1)
    leave(cache, lent)
    with open_anew(cache) as again:
        with pytest.raises(UnavailableError, match="used again"):
            lent.read(0, 4096)
        assert not in_use(again.fileno())


def test_a_server_that_is_about_to_end_is_waited_for(cache: CacheFile, lent: Borrowed) -> None:
    """Its holder has the lock and the data file a moment longer than the fetcher."""
    held = os.dup(cache.lock_fd), os.dup(cache.fileno())
    leave(cache, lent)
    threading.Timer(0.2, lambda: [os.close(fd) for fd in held]).start()
    assert len(lent.read(0, 4096)) == 4096


def test_maintenance_is_told_that_it_is_used(cache: CacheFile, lent: Borrowed) -> None:
    leave(cache, lent)
    lent.read(0, 4096)
    with maintain(cache.folder) as quiet:
        assert quiet is None
    lent.give_way()
    with maintain(cache.folder) as quiet:
        assert quiet is not None


def test_a_file_cut_short_is_an_error(cache: CacheFile, lent: Borrowed) -> None:
    leave(cache, lent)
    os.truncate(cache.folder / "data", 100)
    with pytest.raises(OSError, match="cut short"):
        lent.read(4096, 4096)
