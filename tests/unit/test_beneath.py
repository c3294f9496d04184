"""`bootseer.kernel.beneath` never leads out of a folder, never waits, never reads more than it was told to."""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.kernel import beneath, libc


@pytest.fixture(params=["openat2", "part by part", "refused by a filter"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A folder with one of each kind in it; outside of it lies what nobody may reach."""
    if request.param != "openat2":

        def missing(*_: object) -> int:
            raise OSError(errno.ENOSYS if request.param == "part by part" else errno.EPERM, "no such call")

        monkeypatch.setattr(libc, "open_beneath", missing)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    inside = tmp_path / "inside"
    (inside / "a/b").mkdir(parents=True)
    (inside / "a/file").write_text("right")
    (inside / "a/big").touch()
    os.truncate(inside / "a/big", 1 << 41)
    (inside / "link").symlink_to("a/file")
    (inside / "folder").symlink_to("a")
    (inside / "out").symlink_to("../outside")
    (inside / "absolute").symlink_to(tmp_path / "outside/secret")
    (inside / "magic").symlink_to("/proc/self/root")
    os.mkfifo(inside / "pipe")
    with beneath.folder(inside) as fd:
        yield fd


def number_of(call: Callable[[], object]) -> int:
    """The errno that ``call`` ends with; 0 without one."""
    try:
        call()
    except OSError as exc:
        return exc.errno or 0
    return 0


REFUSED = {
    "link": errno.ELOOP,
    "folder/file": errno.ELOOP,
    "out/secret": errno.ELOOP,
    "absolute": errno.ELOOP,
    "magic/etc/passwd": errno.ELOOP,
    "../outside/secret": errno.EXDEV,
    "a/../../outside/secret": errno.EXDEV,
    "/etc/passwd": errno.EXDEV,
    "pipe": errno.EINVAL,
    "a": errno.EINVAL,
    "missing": errno.ENOENT,
    "a/file/below": errno.ENOTDIR,
    "a/big": errno.EFBIG,
}


def test_a_file_below_a_folder_is_read(root: int) -> None:
    assert beneath.read_regular("a/file", 5, root=root) == b"right"


@pytest.mark.parametrize("name", REFUSED)
def test_what_leads_elsewhere_or_waits_or_is_too_large_is_refused(root: int, name: str) -> None:
    assert number_of(lambda: beneath.read_regular(name, 4096, root=root)) == REFUSED[name]


def test_a_file_of_exactly_the_limit_is_read_and_one_byte_less_is_not_enough(root: int) -> None:
    with pytest.raises(OSError, match="more than 4 bytes"):
        beneath.read_regular("a/file", 4, root=root)


def test_a_file_whose_size_is_unknown_before_it_is_read_has_the_limit_too() -> None:
    assert beneath.read_regular("/proc/self/status", 1 << 20).startswith(b"Name:")
    with pytest.raises(OSError, match="more than 10 bytes"):
        beneath.read_regular("/proc/self/status", 10)


def test_a_file_inside_a_root_folder_stays_inside_whatever_links_say(tmp_path: Path) -> None:
    inside, secret = tmp_path / "inside", tmp_path / "secret"
    (inside / "etc").mkdir(parents=True)
    (inside / "etc/right").write_text("right")
    secret.write_text("secret")
    (inside / "etc/link").symlink_to("/etc/right")
    (inside / "etc/out").symlink_to(f"../../../../../../../..{secret}")
    (inside / "etc/pipe").symlink_to("p")
    os.mkfifo(inside / "etc/p")
    (inside / "etc/big").touch()
    os.truncate(inside / "etc/big", 1 << 41)
    assert beneath.read_inside(inside, "etc/link", 5) == b"right"
    refused = {"etc/out": errno.ENOENT, "etc/pipe": errno.EINVAL, "etc": errno.EINVAL, "etc/big": errno.EFBIG}
    for name, number in refused.items():
        assert number_of(functools.partial(beneath.read_inside, inside, name, 4096)) == number


def test_folders_are_made_below_the_root_only(root: int, tmp_path: Path) -> None:
    os.close(beneath.make_folders(root, "new/er/est", 0o700))
    assert (tmp_path / "inside/new/er/est").is_dir()
    for name in ("out/new", "folder/new", "magic/tmp/new"):
        assert number_of(functools.partial(beneath.make_folders, root, name)) in (errno.ELOOP, errno.ENOTDIR)
    assert os.listdir(tmp_path / "outside") == ["secret"]
    assert not (tmp_path / "inside/a/new").exists()


def test_a_name_is_given_with_the_folder_it_lies_in(root: int, tmp_path: Path) -> None:
    with beneath.parent(root, "a/c/name", make=0o777) as (fd, name):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    assert (tmp_path / "inside/a/c/name").is_file()
    assert number_of(lambda: beneath.parent(root, "out/name").__enter__()) == errno.ENOTDIR
    assert number_of(lambda: beneath.parent(root, "a/..").__enter__()) == errno.EINVAL


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    st.lists(st.sampled_from(["a", "b", "file", "link", "folder", "out", "secret", ".", "..", "", "magic"]), max_size=5)
)
def test_no_path_leads_out(root: int, parts: list[str]) -> None:
    try:
        fd = beneath.open_at(root, "/".join(parts), os.O_PATH)
    except OSError:
        return
    with beneath.folder(".", root=root) as top:
        inside = os.readlink(f"/proc/self/fd/{top}")
    try:
        found = os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    assert found == inside or found.startswith(inside + "/")


def test_a_link_that_comes_and_goes_is_never_followed(root: int, tmp_path: Path) -> None:
    """A neighbour exchanges folder and link as fast as it can."""
    inside, ended = tmp_path / "inside", threading.Event()
    (inside / "x").mkdir()
    (inside / "x/secret").write_text("right")
    (inside / "y").symlink_to("../outside")

    def exchange() -> None:
        while not ended.is_set():
            for name, other in (("x", "t"), ("y", "x"), ("t", "y")):
                os.rename(inside / name, inside / other)

    other = threading.Thread(target=exchange)
    other.start()
    try:
        seen, numbers, tries, end = set(), set(), 0, time.monotonic() + 20
        while (tries < 3000 or not seen or errno.ELOOP not in numbers) and time.monotonic() < end:
            tries += 1
            numbers.add(number_of(lambda: seen.add(beneath.read_regular("x/secret", 100, root=root))))
    finally:
        ended.set()
        other.join()
    assert seen == {b"right"}
    assert numbers <= {0, errno.ELOOP, errno.ENOENT, errno.ENOTDIR}


def test_a_way_with_two_dots_is_found_while_others_rename(tmp_path: Path) -> None:
    """The kernel does not know then whether ``..`` led out, and says so."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/file").write_text("right")
    (tmp_path / "etc/link").symlink_to("../etc/../etc/./file")
    (tmp_path / "other").mkdir()
    other = os.fork()
    if not other:
        libc.die_with_parent()
        while True:
            os.rename(tmp_path / "other", tmp_path / "another")
            os.rename(tmp_path / "another", tmp_path / "other")
    try:
        assert {beneath.read_inside(tmp_path, "etc/link", 10) for _ in range(10_000)} == {b"right"}
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
