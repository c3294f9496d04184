"""`bootseer.kernel.links` follows a link only where who made it gains nothing by that."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer import folders
from bootseer.errors import ConfigError
from bootseer.kernel import libc, links

pytestmark = pytest.mark.root
ROOT, ALICE, BOB = 0, 1001, 1002


@pytest.fixture(params=["openat2", "part by part"], autouse=True)
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "part by part":

        def missing(*_: object) -> int:
            raise OSError(errno.ENOSYS, "no such call")

        monkeypatch.setattr(libc, "open_without_links", missing)


class Place:
    """``home/`` of alice has her store; ``other/`` is a user's folder beside it, with a file ``secret``."""

    def __init__(self, top: Path) -> None:
        self.home, self.base, self.other = top / "home", top / "home/store", top / "other"
        (self.base / "d").mkdir(parents=True)
        self.other.mkdir()
        self.put(self.base / "d/file", ALICE)
        for folder in (self.home, self.base, self.base / "d"):
            os.chown(folder, ALICE, ALICE)

    @staticmethod
    def put(path: Path, owner: int) -> None:
        path.write_text("right")
        os.chown(path, owner, owner)

    def theirs(self, owner: int) -> Path:
        """A file of that user, in a folder of that user, out of the store."""
        os.chown(self.other, owner, owner)
        self.put(self.other / "secret", owner)
        return self.other / "secret"

    def link(self, path: str, target: Path | str, maker: int) -> None:
        (self.base / path).symlink_to(target)
        os.chown(self.base / path, maker, maker, follow_symlinks=False)

    def opens(self, path: str, *, writing: bool = False, shown: bool = False) -> bool:
        flags = os.O_PATH | os.O_DIRECTORY if writing else os.O_RDONLY
        try:
            fd = links.open_followed(str(self.base / path), flags, base=str(self.base), writing=writing, shown=shown)
        except PermissionError:
            return False
        try:
            assert writing or os.read(fd, 10) == b"right"
        finally:
            os.close(fd)
        return True


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process takes itself for bob's."""
    monkeypatch.setattr(links.os, "geteuid", lambda: BOB)
    yield
    monkeypatch.undo()


@pytest.mark.parametrize("maker", [ROOT, ALICE, BOB])
@pytest.mark.parametrize("shown", [False, True])
def test_root_follows_links_that_stay_in_the_store(place: Place, maker: int, shown: bool) -> None:
    """As Lightning's ``last.ckpt``, also one that root made in a container."""
    place.link("last", "d/file", maker)
    place.link("here", "../store/./d", maker)  # it leaves the store, though it comes back
    assert place.opens("last", shown=shown)
    assert place.opens("d/../last", shown=shown)
    assert place.opens("here/file", shown=shown) is (maker == ALICE)


@pytest.mark.parametrize("maker", [ROOT, ALICE, BOB])
@pytest.mark.parametrize("owner", [ROOT, ALICE, BOB])
def test_root_follows_links_out_of_the_store_to_what_is_their_makers(place: Place, maker: int, owner: int) -> None:
    """Alice's blobs beside her snapshot. What is root's own may have been linked by root in a container."""
    place.link("link", place.theirs(owner), maker)
    place.link("folder", "../../other", maker)
    place.link("twice", "link", ALICE)
    for path in ("link", "folder/secret"):
        for shown in (False, True):
            assert place.opens(path, shown=shown) is (maker == owner != ROOT), (path, shown)
    assert place.opens("twice") is (maker == owner == ALICE)


@pytest.mark.parametrize("shown", [False, True])
def test_root_follows_links_of_root_where_nobody_else_can_write(place: Place, shown: bool) -> None:
    """A folder of root that lies on another disk. Not where others will see it: a container may write there."""
    for folder in (place.home, place.base):
        os.chown(folder, ROOT, ROOT)
    place.link("link", place.theirs(ROOT), ROOT)
    assert place.opens("link", shown=shown) is not shown
    os.chmod(place.home, 0o777)
    assert not place.opens("link", shown=shown)
    os.chmod(place.home, 0o1777)  # here others cannot move what is root's
    assert place.opens("link", shown=shown) is not shown


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize("owner", [ROOT, ALICE, BOB])
def test_a_user_follows_own_links_and_those_of_root_anywhere(place: Place, owner: int) -> None:
    target = place.theirs(owner)
    for name, maker in (("mine", BOB), ("roots", ROOT), ("hers", ALICE)):
        place.link(name, target, maker)
    assert place.opens("mine")
    assert place.opens("roots")
    assert place.opens("hers") is (owner != BOB)  # her folder does not show bob's files


@pytest.mark.parametrize("maker", [ROOT, ALICE, BOB])
def test_the_way_to_the_store_may_have_links_too(place: Place, maker: int) -> None:
    """As a folder ``/scratch`` that root has made, and ``/home/alice/scratch`` that she has. A store that alice
    replaces by a link to what is root's is no store of hers."""
    real = place.other / "real"
    place.base.rename(real)
    place.home.joinpath("store").symlink_to(real)
    os.chown(place.base, maker, maker, follow_symlinks=False)
    assert place.opens("d/file") is (maker == ALICE)
    assert place.opens("d", writing=True) is (maker == ALICE)
    os.chown(real, ROOT, ROOT)
    assert not place.opens("d/file")
    os.chown(place.home, ROOT, ROOT)
    assert place.opens("d/file", shown=True) is (maker == ROOT)
    assert place.opens("d", writing=True, shown=True) is (maker == ROOT)


@pytest.mark.parametrize("maker", [ROOT, ALICE, BOB])
def test_nothing_is_written_behind_the_links_of_others(place: Place, maker: int) -> None:
    """Not even in the store: who may write to a part of it would write to all of it with root's rights."""
    os.chown(place.other, maker, maker)
    place.link("out", "../../other", maker)
    place.link("in", "d", maker)
    assert not place.opens("out", writing=True)
    assert not place.opens("in", writing=True)
    for folder in (place.home, place.base):
        os.chown(folder, ROOT, ROOT)
    assert place.opens("out", writing=True) is (maker == ROOT)


@pytest.mark.usefixtures("user")
def test_a_user_writes_behind_own_links_where_nobody_else_moves_them(place: Place) -> None:
    """Alice moves bob's link to his home to where he writes."""
    for name, maker in (("mine", BOB), ("roots", ROOT), ("hers", ALICE)):
        place.link(name, "../../other", maker)
        assert not place.opens(name, writing=True)
    for folder in (place.home, place.base):
        os.chown(folder, BOB, BOB)
    assert [place.opens(name, writing=True) for name in ("mine", "roots", "hers")] == [True, True, False]


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize("mode", [0o755, 0o2775, 0o1777])
def test_on_the_way_to_a_store_a_user_follows_what_the_kernel_lets_all_follow(place: Place, mode: int) -> None:
    """A colleague has linked to what a service account owns."""
    real = place.home.rename(place.home.with_name("disk"))
    os.chown(real / "store/d/file", ROOT, ROOT)
    ways = real.parent / "ways"
    ways.mkdir()
    ways.chmod(mode)
    (ways / "home").symlink_to(real)
    os.chown(ways / "home", 1003, 1003, follow_symlinks=False)
    place.base = ways / "home/store"
    assert place.opens("d/file") is (mode != 0o1777)
    assert place.opens("d", writing=True) is (mode != 0o1777)


def test_who_ran_sudo_follows_own_links(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.link("link", place.theirs(ROOT), ALICE)
    place.link("bobs", place.other / "secret", BOB)
    monkeypatch.setenv("SUDO_UID", str(ALICE))
    assert place.opens("link")
    assert not place.opens("link", shown=True)
    assert not place.opens("bobs")


def as_root_of_a_namespace(place: Place, look: Callable[[], object]) -> str:
    """What ``look`` finds as alice, who is root of a user namespace in which nobody else has a number."""
    for path in (place.home, *place.home.parents):
        path.chmod(path.stat().st_mode | 0o001)
    end, told = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setresgid(ALICE, ALICE, ALICE)
            os.setresuid(ALICE, ALICE, ALICE)
            ctypes.CDLL(None).prctl(4, 1)  # dumpable again, so that its files in /proc are its own
            libc.unshare(libc.CLONE_NEWUSER)
            Path("/proc/self/uid_map").write_text(f"0 {ALICE} 1")
            os.write(told, str(look()).encode())
        finally:
            os._exit(0)
    os.close(told)
    os.waitpid(pid, 0)
    with open(end) as file:
        return file.read()


def test_root_of_a_user_namespace_follows_what_its_user_follows(place: Place) -> None:
    place.link("mine", place.theirs(ROOT), ALICE)
    place.link("moved", "d", ALICE)
    place.link("roots", place.other / "secret", ROOT)
    place.link("bobs", "d/file", BOB)

    def look() -> list[bool]:
        return [place.opens("moved", writing=True), *map(place.opens, ("mine", "roots", "bobs")), not os.geteuid()]

    assert as_root_of_a_namespace(place, look) == str([True] * 5)


def test_root_of_a_user_namespace_believes_no_neighbour(place: Place) -> None:
    """Nobody but alice has a number there: root has the same one as bob."""
    place.theirs(ALICE)
    bobs = place.base / "bobs"
    bobs.mkdir()
    os.chown(bobs, BOB, BOB)
    place.link("bobs/secret", place.other / "secret", BOB)
    place.link("bobs/folder", place.other, BOB)
    place.link("bobs/moved", place.other, ALICE)  # bob can rename it
    tmp = place.home.parent / "tmp"
    tmp.mkdir()
    tmp.chmod(0o1777)
    for folder, owner in ((tmp / "bootseer-1", BOB), (tmp / "bootseer-1/bootseer", ALICE)):
        folder.mkdir()
        os.chown(folder, owner, owner)

    def trusted(folder: Path) -> bool:
        try:
            return bool(folders.trusted(folder))
        except ConfigError:
            return False

    def look() -> list[bool]:
        found = [place.opens(f"bobs/{name}", writing=True) for name in ("folder", "moved")]
        found += [trusted(bobs), trusted(tmp / "bootseer-1/bootseer"), not trusted(Path(own))]
        return [place.opens("bobs/secret"), *found]

    with tempfile.TemporaryDirectory() as own:
        os.chown(own, ALICE, ALICE)
        assert as_root_of_a_namespace(place, look) == str([False] * 6)


def test_loops_and_chains_end(place: Place) -> None:
    place.link("loop", "loop", ALICE)
    for number in range(40):
        place.link(f"n{number}", f"n{number - 1}" if number else "d/file", ALICE)
    place.link("n40", "n39", ALICE)
    assert place.opens("n39")
    for name in ("loop", "n40"):
        with pytest.raises(OSError, match="Too many levels"):
            place.opens(name)


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/proc/self/root"])
def test_devices_and_pipes_are_not_opened_behind_links_either(place: Place, name: str) -> None:
    os.mkfifo(place.base / "pipe")
    place.link("link", name, ALICE)
    flags, base = os.O_RDONLY, str(place.base)
    for path in (str(place.base / "link"), str(place.base / "pipe")):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the numbers are below
            links.open_followed(path, flags, base=base)
        assert caught.value.errno in (errno.EINVAL, errno.EACCES)


def test_a_file_that_others_have_leased_is_waited_for(place: Place) -> None:
    """As the server does that exports it. A pipe is not."""
    path = place.base / "d/file"
    os.chown(path, ROOT, ROOT)
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the kernel asks for it
    with open(path, "rb+") as leased:
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        free = threading.Timer(0.3, fcntl.fcntl, (leased, fcntl.F_SETLEASE, fcntl.F_UNLCK))
        free.start()
        assert place.opens("d/file")
        free.join()


def test_a_way_of_many_parts_takes_few_descriptors(place: Place) -> None:
    """Of links that go to and fro, too; a way without end is refused."""
    place.link("0", "d/", ALICE)
    for number in range(1, 4):
        place.link(str(number), "d/../" * 60 + str(number - 1), ALICE)
    place.link("long", "d/../" * 800 + "0", ALICE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        assert place.opens("3/file")
        with pytest.raises(OSError, match="Too many levels") as caught:
            place.opens("long/file")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.ELOOP


def test_no_descriptor_is_left(place: Place) -> None:
    place.link("last", "../store/d/../d/file", ALICE)
    place.link("bad", "/etc/passwd", ALICE)
    before = sorted(os.listdir("/proc/self/fd"))
    for name in ("last", "bad", "d/file"):
        place.opens(name)
    assert sorted(os.listdir("/proc/self/fd")) == before
