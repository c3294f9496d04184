"""What every kind of mount promises, held against each of them through the door that its users have.

Whoever made a mount may be killed, and so may all who serve it; the store may lie; somebody may use what is about to be
unmounted. A read then brings the right bytes or an error, never other bytes, the next mount is whole, and when the last
one ends nothing is left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from bootseer import env, image
from bootseer.config import Config
from bootseer.env import EnvSpec, Outcome, Target, snapshots
from bootseer.kernel import mount as mounts
from bootseer.objects import open_store
from bootseer.served.client import alive
from bootseer.stripefs import open_fs
from support import forked
from support.images import Member, folder, programs, write_image
from support.layouts import push
from support.waits import until

pytestmark = pytest.mark.root

NOISE = random.Random(9).randbytes(6 << 20)
PIECE = 64 << 10
DEAD = (errno.EIO, errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV)


class RefusedError(Exception):
    """What the door says."""


class Kind:
    """A node at ``here`` that mounts one folder, with ``noise``, out of a store; one mount at a time."""

    writable = False
    """What users write goes on top of it, and with it."""
    shared = False
    """Who asks for it again gets it, too."""
    mends = False
    """Who asks for it again when it is dead gets another one."""
    in_use: Literal["refused", "detached", "errors"]
    """What becomes of an unmount while it is in use, or of its users."""

    def __init__(self, here: Path) -> None:
        self.here, self.store, self.state, self.cache = here, here / "store", here / "state", here / "cache"
        self.target, self.log = here / "mnt", here / "log"
        self.mounted = False
        self.environ = {
            "BOOTSEER_STORE": str(self.store),
            "BOOTSEER_CACHE_DIR": str(self.cache),
            "BOOTSEER_STATE_DIR": str(self.state),
            "BOOTSEER_BACKGROUND_FILL": "false",
            "BOOTSEER_DEMAND_DEADLINE": "5",
        }

    def start(self, request: pytest.FixtureRequest) -> None:
        """Fill the store, and start what mounts."""

    def close(self) -> None:
        """End what `start` started."""

    def mount(self) -> Path:
        """The folder. Raises `RefusedError`."""
        self.door("mount")
        self.mounted = True
        return self.target

    def again(self) -> None:
        """Ask for it at the place where it is already. Raises `RefusedError`."""
        self.door("mount")

    def unmount(self) -> None:
        """Safe to call twice. Raises `RefusedError`; then it is still there."""
        if self.mounted:
            self.door("unmount")
            self.mounted = False

    def door(self, what: str) -> None:
        """Mount or unmount. Raises `RefusedError`."""
        raise NotImplementedError

    def kill_maker(self) -> None:
        """``kill -9`` of what made the mount, if that still lives, and another start of it."""

    def kill_servers(self) -> None:
        locks = list(self.state.glob("*/*/server.lock"))
        assert locks
        for lock in locks:
            os.killpg(int(lock.read_text()), signal.SIGKILL)
        until(lambda: not any(alive(lock.parent) for lock in locks), what="their death")

    def replace_servers(self) -> Iterator[None]:
        """``kill -9`` of each process that serves it, one after another, each time until there is another one."""
        for lock in self.state.glob("*/*/server.lock"):
            first = members(lock)
            assert len(first) > 1
            for pid in first:
                os.kill(pid, signal.SIGKILL)
                until(partial(replaced, lock, pid, len(first)), 30.0, "another in its place")
                yield

    def left(self) -> list[str]:
        """Of mounts and of those who serve them."""
        found = [*self.state.glob("trees/*/"), *self.state.glob("fs/*"), *self.state.glob("images/*")]
        return [*map(str, found), *(entry.target for entry in mounts.below(self.here))]

    def bootseer(self, *argv: object, **more: str) -> None:
        done = forked.cli(*argv, env={**os.environ, **self.environ, **more})
        self.log.write_text(done.stderr)
        if done.returncode:
            raise RefusedError(done.stderr)

    def flip(self) -> None:
        """One bit of each large object of the store. What was learnt of earlier starts would mend some."""
        shutil.rmtree(self.store / "profiles", ignore_errors=True)
        for path in self.store.rglob("*"):
            if path.is_file() and path.stat().st_size > 1 << 20:
                with path.open("r+b") as out:
                    out.seek(path.stat().st_size // 2)
                    (byte,) = out.read(1)
                    out.seek(-1, os.SEEK_CUR)
                    out.write(bytes([byte ^ 1]))


class Image(Kind):
    in_use = "detached"

    def start(self, request: pytest.FixtureRequest) -> None:
        write_image(self.here / "layout", [[Member("noise", data=NOISE)]])
        image.ensure(f"oci:{self.here}/layout:v1", str(self.store), work_dir=self.here / "work")

    def door(self, what: str) -> None:
        named = [f"oci:{self.here}/layout:v1"] if what == "mount" else []
        self.bootseer(*(["image", "mount"] if what == "mount" else ["unmount"]), *named, self.target)


class Environment(Kind):
    writable = shared = mends = True
    in_use = "refused"

    def start(self, request: pytest.FixtureRequest) -> None:
        (self.here / "noise").write_bytes(NOISE)
        mine = dict(self.environ)
        for name in ("CACHE", "STATE"):
            self.environ[f"BOOTSEER_{name}_DIR"] = f"{self.here}/maker/{name}"
        self.mount()
        self.unmount()
        self.environ = mine

    def door(self, what: str) -> None:
        if what == "mount":
            command = f"echo >> {self.here}/runs; cp {self.here}/noise {self.target}"
            self.bootseer("env", "run", "--no-background", "--target", self.target, "--", "sh", "-c", command)
        else:
            self.bootseer("unmount", self.target)

    def close(self) -> None:
        assert (self.here / "runs").read_text() == "\n"


class Checkpoint(Kind):
    mends = True
    in_use = "errors"

    def start(self, request: pytest.FixtureRequest) -> None:
        with open_fs(str(self.store)).create("step-1/noise", width=3, unit=1 << 18, striped=True) as out:
            out.write(NOISE)

    def door(self, what: str) -> None:
        self.bootseer(*(["fs", "mount", f"{self.store}/step-1"] if what == "mount" else ["unmount"]), self.target)


class Volume(Kind):
    """An environment as an inline volume of a pod."""

    shared = True
    in_use = "refused"

    def start(self, request: pytest.FixtureRequest) -> None:
        pytest.importorskip("grpc")
        from support.kubelet import Kubelet

        made = self.here / "made"

        def fill() -> int:
            made.mkdir(exist_ok=True)
            (made / "noise").write_bytes(NOISE)
            return 0

        spec = EnvSpec(
            targets=(Target("/opt/env", str(made)),),
            command=("fill",),
            image_digest="sha256:1",
            restore="unpack",
            background=False,
        )
        config = Config(cache_dir=f"{self.here}/maker/cache", state_dir=f"{self.here}/maker/state")
        assert env.run(spec, fill, store_url=str(self.store), config=config).outcome is Outcome.RAN_AND_PUBLISHED
        (self._name,) = snapshots.names(open_store(str(self.store)))
        self._kubelet = Kubelet(self.here, self.environ)
        self._kubelet.start()

    def close(self) -> None:
        self._kubelet.stop()

    def mount(self) -> Path:
        self._volume = self._kubelet.volume(env=self._name, target="/opt/env")
        self.target = self._volume.target
        return super().mount()

    def door(self, what: str) -> None:
        import grpc

        try:
            (self._kubelet.publish if what == "mount" else self._kubelet.unpublish)(self._volume)
        except grpc.RpcError as exc:
            raise RefusedError(exc.details()) from None

    def kill_maker(self) -> None:
        self._kubelet.kill()
        self._kubelet.start()


class Snapshot(Kind):
    """The files of an image under a container of a real containerd."""

    shared = True
    in_use = "detached"

    def start(self, request: pytest.FixtureRequest) -> None:
        pytest.importorskip("grpc")
        from support.containerd import ContainerdNode

        self._ref = f"{request.getfixturevalue('registry').address}/promises/noise:1"
        write_image(self.here / "layout", [programs("sleep"), [folder("data"), Member("data/noise", data=NOISE)]])
        push(f"oci:{self.here}/layout:v1", self._ref)
        image.ensure(self._ref, str(self.store), work_dir=self.here / "work")
        self._node = ContainerdNode(self.here, str(self.store))
        self._node.environ |= self.environ
        self.log = self._node.log
        self._node.start()

    def close(self) -> None:
        self._node.stop()
        self._node.clear()

    def mount(self) -> Path:
        self._node.pull(self._ref)
        super().mount()
        ((point),) = (entry.target for entry in mounts.below(self._node.root))
        return Path(point, "data")

    def door(self, what: str) -> None:
        if what == "mount":
            done = self._node.run(self._ref, "user", "/bin/sleep", "1000", detach=True)
            if done.returncode:
                raise RefusedError(done.stderr)
        else:
            self._node.end("user")
            self._node.remove_image(self._ref)
            until(lambda: not mounts.below(self._node.root), 60.0, "the unmount of a tree that is not needed")

    def again(self) -> None:
        """Another container shares them."""
        assert self._node.run(self._ref, "other", "/bin/sleep", "--version").returncode == 0

    def kill_maker(self) -> None:
        self._node.kill()
        self._node.start()


@pytest.fixture(
    scope="module",
    params=[
        Image,
        Environment,
        Checkpoint,
        Volume,
        pytest.param(Snapshot, marks=[pytest.mark.registry, pytest.mark.runtime]),
    ],
)
def node(request: pytest.FixtureRequest) -> Iterator[Kind]:
    here = Path(tempfile.mkdtemp(prefix="bootseer-pytest-promises-", dir="/var/tmp"))
    here.chmod(0o755)
    made: Kind = request.param(here)
    try:
        made.start(request)
        yield made
        made.close()
    finally:
        for entry in reversed(mounts.below(here)):
            mounts.unmount(entry.target, lazy=True, force=True)
        shutil.rmtree(here, ignore_errors=True)


@pytest.fixture
def kind(node: Kind) -> Iterator[Kind]:
    """With nothing on the node yet; and with nothing left of a mount on it."""
    shutil.rmtree(node.cache / "blocks", ignore_errors=True)
    yield node
    node.unmount()
    until(lambda: not node.left(), 30.0, f"the end of {node.left()}")


def pieces(file: int) -> Counter[int]:
    """How many pieces of the open ``noise`` are right (0), and with which errors the others fail. Not out of the page
    cache."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    found = Counter[int]()
    for at in range(0, len(NOISE), PIECE):
        try:
            assert os.pread(file, PIECE, at) == NOISE[at : at + PIECE]
            found[0] += 1
        except OSError as exc:
            found[exc.errno or -1] += 1
    return found


def members(lock: Path) -> list[int]:
    """Processes of the server that holds ``lock``: its process group, without what has ended."""
    listed = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listed.splitlines())
    return [int(pid) for pid, group, state in rows if group == lock.read_text().strip() and state[0] != "Z"]


def replaced(lock: Path, pid: int, count: int) -> bool:
    found = members(lock)
    return len(found) >= count and pid not in found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


WHOLE = Counter({0: len(NOISE) // PIECE})


def whole(target: Path) -> bool:
    with opened(target / "noise") as file:
        return os.listdir(target) == ["noise"] and pieces(file) == WHOLE


def test_what_is_written_to_it_does_not_come_back(kind: Kind) -> None:
    target = kind.mount()
    assert whole(target)
    for change in (
        lambda: (target / "new").write_bytes(b"new"),
        lambda: (target / "noise").write_bytes(b"other"),
        lambda: (target / "noise").unlink(),
    ):
        if kind.writable:
            change()
            continue
        with pytest.raises(OSError, match="Read-only") as caught:
            change()
        assert caught.value.errno == errno.EROFS
    kind.unmount()
    assert whole(kind.mount())


def test_readers_see_nothing_of_the_death_of_who_made_it(kind: Kind) -> None:
    with opened(kind.mount() / "noise") as file:
        os.pread(file, PIECE, 0)
        kind.kill_maker()
        assert pieces(file) == WHOLE


@pytest.mark.takeover
def test_readers_see_nothing_of_an_upgrade(kind: Kind) -> None:
    """All who serve it are replaced in turn, and who made it, by one that finds records of another version."""
    with opened(kind.mount() / "noise") as file:
        for number, _ in enumerate(kind.replace_servers()):
            assert pieces(file) == WHOLE, number
        records = list(kind.state.rglob("*.json"))
        assert records
        for record in records:
            record.write_bytes(record.read_bytes().replace(b"{", b'{"of_another_version":[1],', 1))
        kind.kill_maker()
        assert pieces(file) == WHOLE


def test_when_all_who_serve_it_are_killed_reads_fail_and_the_next_mount_is_whole(kind: Kind) -> None:
    with opened(kind.mount() / "noise") as file:
        os.pread(file, PIECE, 0)
        kind.kill_servers()
        found = pieces(file)
    assert set(found) <= {0, *DEAD}
    assert found[0] < WHOLE[0]
    if not kind.mends:
        kind.unmount()
    assert whole(kind.mount())


def test_a_second_mount_at_its_place_hides_nothing(kind: Kind) -> None:
    target = kind.mount()
    refused = pytest.raises(RefusedError, match=r"is mounted there|already a mount")
    with contextlib.nullcontext() if kind.shared else refused:
        kind.again()
    assert set(Counter(entry.target for entry in mounts.below(kind.here)).values()) == {1}
    assert whole(target)


def test_what_is_in_use_stays_or_its_users_get_errors(kind: Kind) -> None:
    with opened(kind.mount() / "noise") as file:
        os.pread(file, PIECE, 0)
        with pytest.raises(RefusedError, match="in use") if kind.in_use == "refused" else contextlib.nullcontext():
            kind.unmount()
        assert kind.in_use == "refused" or "is in use; detaching it" in kind.log.read_text()
        found = pieces(file)
        assert found[0] < WHOLE[0] if kind.in_use == "errors" else found == WHOLE
        assert set(found) <= {0, *DEAD}


def test_a_flipped_bit_is_an_error_and_never_another_byte(kind: Kind) -> None:
    """The last one: it leaves the store damaged."""
    kind.flip()
    with opened(kind.mount() / "noise") as file:
        found = pieces(file)
    assert set(found) == {0, errno.EIO}
    assert found[errno.EIO] < WHOLE[0] / 2
