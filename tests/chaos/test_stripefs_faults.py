"""Striped files on a real HDFS whose parts fail: every byte right, no error where a replica is left, nothing hangs.

The short form of ``scripts/chaos --stripefs``. One cluster for all tests: each leaves it whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer import fsmount
from bootseer.config import Config
from bootseer.errors import DataError
from bootseer.fsmount import FsMount
from bootseer.hdfs import placement
from bootseer.stripefs import StripeFS, layout, open_fs
from bootseer.stripefs.files import striped
from support import forked, hadoop, stripechaos
from support.replicas import Replicas, datanodes
from support.shapedhdfs import ShapedHadoop
from support.stripecrowd import StripeCrowd

pytestmark = [pytest.mark.hdfs, pytest.mark.root]

UNIT = stripechaos.UNIT
SIZE = (9 << 20) + 321
DATANODES = range(4)


@pytest.fixture(scope="module")
def site() -> Iterator[ShapedHadoop]:
    folder = Path(tempfile.mkdtemp(prefix="bootseer-pytest-chaos-", dir="/var/tmp"))
    try:
        with ShapedHadoop(
            folder / "hdfs", "bsfault", "10.81.0.0/24", mib_per_s=40, settings=stripechaos.SETTINGS | hadoop.EVEN
        ) as site:
            yield site
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def crowded(site: ShapedHadoop) -> str:
    """The folder with the files of a crowd."""
    stripechaos.prepare(site, "/crowd")
    return "/crowd"


@pytest.fixture
def folder() -> str:
    return f"/{uuid.uuid4().hex[:12]}"


@pytest.fixture
def fs(site: ShapedHadoop, folder: str) -> StripeFS:
    return open_fs(f"{site.cluster.url}{folder}")


@pytest.fixture
def mounted(site: ShapedHadoop, place: Path) -> Iterator[Callable[[str], FsMount]]:
    """Mounts a folder of the cluster; little memory for read-ahead, so that reads go to HDFS."""
    made: list[FsMount] = []

    def start(folder: str) -> FsMount:
        config = Config(cache_dir=str(place / "cache"), state_dir=str(place / "state"))
        made.append(fsmount.start(f"{site.cluster.url}{folder}", place / "mnt", config=config, memory=8 << 20))
        return made[-1]

    yield start
    for one in made:
        one.unmount()


def put(fs: StripeFS, path: str = "f", size: int = SIZE, *, width: int = 4) -> bytes:
    data = os.urandom(size)
    with fs.create(path, unit=UNIT, width=width, striped=True) as out:
        out.write(data)
    return data


def whole(fs: StripeFS, path: str = "f") -> bytes:
    with fs.open(path) as file:
        return file.read(0, file.size)


# -- one DataNode after another --------------------------------------------------------------------------------------


@contextlib.contextmanager
def killed(site: ShapedHadoop, index: int) -> Iterator[None]:
    site.cluster.kill(index)
    try:
        yield
    finally:
        site.cluster.restart(index)


FAULTS: dict[str, Callable[[ShapedHadoop, int], contextlib.AbstractContextManager[None]]] = {
    "frozen": lambda site, index: site.cluster.frozen(index),
    "slow": lambda site, index: site.slowed(index, 0.1),
    "killed": killed,
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "fault", ["frozen", *(pytest.param(fault, marks=pytest.mark.soak) for fault in ("killed", "slow"))]
)
def test_readers_and_writers_notice_nothing_but_time(site, crowded, mounted, place, fault):
    """One through StripeFS, one through the mount, one that writes and reads back; each DataNode in turn: no error."""
    made = mounted(crowded)
    url = f"{site.cluster.url}{crowded}"
    tasks = stripechaos.tasks(url, readers=1, mountpoint=str(made.mountpoint), writers=1)
    with StripeCrowd(tasks, place / "log", limit=60) as crowd:
        for index in (1, 3):  # each takes seconds; the long form has all
            crowd.wait(1)  # a write that began under the last fault may have ended with one replica
            site.cluster.wait_whole()
            with FAULTS[fault](site, index):
                crowd.wait(2)
        tally = crowd.tally()
        assert (tally.wrong, tally.errors, tally.hangs) == (0, 0, 0), crowd.findings()


def test_avoiding_datanodes_costs_no_replica(site, fs, folder):
    """Three of four failed lately: new blocks have two replicas all the same, or the next fault takes the only one."""
    nodes = datanodes(site.cluster)[:3]
    placement.shun(nodes)
    try:
        put(fs)
    finally:
        placement.shunned_nodes.clear()
    log = site.cluster.namenode.log.read_text()
    for stripe in stripechaos.stripes(site.cluster.url, folder, "f"):
        for block in site.cluster.web.blocks(stripe):
            allocated = re.findall(rf"allocate blk_{block.id}_\d+, replicas=(.*) for {stripe}", log)
            assert [len(found.split(", ")) for found in allocated] == [2], allocated


# -- the NameNode ----------------------------------------------------------------------------------------------------


def test_a_namenode_that_pauses_costs_time(site, crowded, mounted, place):
    made = mounted(crowded)
    tasks = stripechaos.tasks(f"{site.cluster.url}{crowded}", readers=1, mountpoint=str(made.mountpoint), writers=1)
    with StripeCrowd(tasks, place / "log", limit=60) as crowd:
        crowd.wait(1)
        with site.cluster.frozen_namenode():
            time.sleep(2.0)
        crowd.wait(1)
        tally = crowd.tally()
        assert (tally.wrong, tally.errors, tally.hangs) == (0, 0, 0), crowd.findings()


def test_a_namenode_that_dies_and_comes_back(site, crowded, place):
    """Meanwhile loads and saves may fail, in time; a failed save has changed nothing; afterwards all is well."""
    tasks = stripechaos.tasks(f"{site.cluster.url}{crowded}", readers=1, writers=1)
    with StripeCrowd(tasks, place / "log", limit=90) as crowd:
        crowd.wait(1)
        site.cluster.kill_namenode()
        time.sleep(1.0)
        site.cluster.restart_namenode()
        crowd.wait(1, deadline=120)  # what was under way may end with an error
        before = crowd.tally()
        crowd.wait(2)
        tally = crowd.tally()
        assert (tally.wrong, tally.hangs, tally.errors - before.errors) == (0, 0, 0), crowd.findings()


# -- damage ----------------------------------------------------------------------------------------------------------


def damage(site: ShapedHadoop, folder: str, where: Callable[[int], bool], *, unseen: bool) -> list[tuple[object, int]]:
    """Change a byte in every chunk of each replica of the file ``f`` on the DataNodes that ``where`` says."""
    replicas, done = Replicas(site.cluster), []
    for stripe in stripechaos.stripes(site.cluster.url, folder, "f"):
        for block in replicas.blocks(stripe, replicas=2):
            for index in filter(where, replicas.holders(block)):
                first = layout.HEADER_SIZE + 100 - block.offset
                for offset in range(first % UNIT, block.length - 5000, UNIT):
                    replicas.damage(block, index, offset, unseen=unseen)
                    done.append((block, index))
    assert done
    return done


@pytest.mark.parametrize("unseen", [False, True], ids=["bad-disk", "also-its-checksums"])
def test_damage_on_one_datanode_is_not_seen(site, fs, folder, unseen, caplog):
    """Right bytes from the other replicas. What HDFS's own checksums confirm, the NameNode hears of, and mends."""
    data = put(fs)
    damaged = damage(site, folder, lambda index: index == 1, unseen=unseen)
    for _ in range(3):
        assert whole(fs) == data
    if not unseen:
        replicas = Replicas(site.cluster)
        until = time.monotonic() + 20
        while not any(index in replicas.reported(block) for block, index in damaged):
            assert time.monotonic() < until, "nobody told the NameNode of a damaged replica"
            assert whole(fs) == data
            time.sleep(0.2)
        assert "a replica of" in caplog.text


@pytest.mark.parametrize("unseen", [False, True], ids=["bad-disk", "also-its-checksums"])
def test_damage_everywhere_is_an_error(site, fs, folder, mounted, unseen):
    put(fs)
    made = mounted(folder)
    damage(site, folder, lambda index: True, unseen=unseen)
    with pytest.raises(DataError):
        whole(fs)
    with pytest.raises(OSError, match="Input/output") as caught:
        (made.mountpoint / "f").read_bytes()
    assert caught.value.errno == errno.EIO


def test_control_without_the_chunk_checksums_damage_is_seen(site, fs, folder, monkeypatch):
    """What the tests above rest on: these bytes do reach us, and only our own checksums stop them."""
    data = put(fs)
    damage(site, folder, lambda index: True, unseen=True)

    class Blind:
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = None  # type: ignore[assignment]

    monkeypatch.setattr(striped, "crc32c", lambda data: Blind())
    found = whole(fs)
    assert len(found) == len(data)
    assert found != data


# -- blocks that are elsewhere ---------------------------------------------------------------------------------------


def test_blocks_that_move_while_the_file_is_open(site, fs, folder):
    """Every replica goes to another DataNode: all that the reader knows of places is stale."""
    data = put(fs)
    replicas = Replicas(site.cluster)
    with fs.open("f") as file:
        assert file.read(0, 1 << 20) == data[: 1 << 20]
        for stripe in stripechaos.stripes(site.cluster.url, folder, "f"):
            for block in replicas.blocks(stripe, replicas=2):
                holders = replicas.holders(block)
                free = [index for index in DATANODES if index not in holders]
                for source, target in zip(holders, free, strict=True):
                    replicas.move(block, source, target)
        assert file.read(0, file.size) == data


# -- a writer that dies ----------------------------------------------------------------------------------------------

WRITER = """
import sys
from bootseer.stripefs import open_fs
with open_fs(sys.argv[1]).create("f", unit=1 << 18, striped=True) as out:
    out.write(b"late" * (3 << 20))
"""


@pytest.mark.parametrize("point", ["write.stripe", "write.close", "write.rename"])
def test_the_lease_of_a_dead_writer_stops_nobody(site, fs, point):
    """Its stripes stay open, with a lease that nobody renews; the next writer has names of its own."""
    data = put(fs)
    faults = f"stripefs.{point}=kill@{5 if point == 'write.stripe' else 1}"
    assert forked.run("-c", WRITER, fs.url, env={**os.environ, "BOOTSEER_FAULTS": faults}).returncode == -9
    assert whole(fs) == data
    began = time.monotonic()
    data = put(fs)
    assert whole(fs) == data
    fs.verify()
    assert time.monotonic() - began < 30
