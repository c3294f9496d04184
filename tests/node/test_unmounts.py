"""The end of a file system is seen, also that of one which was detached."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bootseer.kernel import libc
from bootseer.kernel import mount as mounts
from bootseer.kernel.unmounts import Unmounts

pytestmark = pytest.mark.root


def test_a_detached_one_ends_with_its_last_user(tmp_path: Path) -> None:
    ends = Unmounts()
    places = [tmp_path / "a", tmp_path / "b"]
    numbers = []
    for place in places:
        place.mkdir()
        mounts.mount("x", place, "tmpfs")
        (place / "file").touch()
        numbers.append(ends.watch(place))
    fd = os.open(places[0] / "file", os.O_RDONLY)
    for place in places:
        mounts.unmount(place, lazy=True)
    assert ends.ended() == numbers[1:]
    os.close(fd)
    assert ends.ended() == numbers[:1]
    assert ends.ended() == []
    os.close(ends.fileno())


def test_where_there_are_too_many_watchers_nothing_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On nodes of Kubernetes root has often no more of them."""

    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(libc, "inotify_add_watch", refused)
    ends = Unmounts()
    assert ends.watch(tmp_path) == -1
    os.close(ends.fileno())
    monkeypatch.setattr(libc, "inotify_init", refused)
    ends = Unmounts()
    assert (ends.fileno(), ends.watch(tmp_path), ends.ended()) == (-1, -1, [])
    assert caplog.text.count("seen: Too many open files") == 2
