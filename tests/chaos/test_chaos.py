"""Readers compare every byte while processes die and the store fails: the short form of ``scripts/chaos``."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import BootseerError
from bootseer.kernel import mount as mounts
from support import ways
from support.chaos import Chaos, Plan
from support.crowd import Crowd, files_of
from support.node import Node, pids
from support.torture import Site
from support.waits import until
from support.weather import Weather

pytestmark = pytest.mark.root

NodeOf = Callable[..., Node]
RATE = 5e6


@pytest.mark.takeover
def test_killed_again_and_again(site: Site, node_of: NodeOf) -> None:
    """Nothing but deaths: not even an error."""
    node = node_of(site, rate=RATE)
    outcome = Chaos(node, site.reference, Plan(fetcher=20, server=8, supervisor=3, seconds=60)).run()
    assert outcome.clean, outcome.findings
    assert outcome.done == {"fetcher": 20, "server": 8, "supervisor": 3}
    assert (outcome.lost, outcome.tally.errors) == (0, 0), outcome.findings
    assert outcome.restarts >= 25
    assert outcome.tally.files > 30


@pytest.mark.takeover
def test_bad_weather(site: Site, node_of: NodeOf) -> None:
    """Errors are allowed: of readers that met a server without descriptors."""
    node = node_of(site, rate=RATE)
    plan = Plan(fetcher=2, server=1, stop=2, outage=2, squall=2, poor=2, torn=0.5, seconds=60, seed=2)
    outcome = Chaos(node, site.reference, plan).run()
    assert outcome.clean, outcome.findings
    assert outcome.done == plan.todo
    assert outcome.bad_blocks > 0
    assert outcome.tally.files > 30


# -- controls: what the tests above would see ------------------------------------------------------------------------


def test_control_zeros_are_seen(site: Site, node_of: NodeOf, place: Path) -> None:
    """The data file without the server has zeros where blocks are missing."""
    node = node_of(site)
    made = node.mount()
    (made.target / "bulk/003").read_bytes()
    made.unmount()
    (place / "bare").mkdir()
    mounts.mount_erofs(node.cache / "trees" / site.tree / "meta", node.data / "data", place / "bare")
    try:
        with Crowd(place / "bare", site.reference, place / "crowd", files=["bulk/018"], readers=1, passes=1) as crowd:
            found = crowd.join(20)
    finally:
        mounts.unmount(place / "bare")
    assert found.zeros > 0
    assert found.mismatches >= found.zeros
    assert "wrong" in crowd.findings


@pytest.mark.parametrize("way", ways.WAYS)
def test_control_one_wrong_byte_is_seen(place: Path, way: str) -> None:
    for name in ("right", "wrong"):
        (place / name).mkdir()
        (place / name / "f").write_bytes(os.urandom(1) * 300_000)
    data = bytearray((place / "right/f").read_bytes())
    data[123_456] ^= 1
    (place / "wrong/f").write_bytes(data)
    with Crowd(place / "wrong", place / "right", place / "c", files=["f"], readers=1, some=[way], passes=1) as crowd:
        found = crowd.join(20)
    assert (found.mismatches, found.zeros, found.errors) == (1, 0, 0)


def test_control_hangs_are_seen(site: Site, node_of: NodeOf, place: Path) -> None:
    made = node_of(site).mount()
    server = pids(made.status())["server"]
    os.kill(server, signal.SIGSTOP)
    try:
        with Crowd(
            made.target, site.reference, place / "crowd", files=["bulk/003"], readers=2, passes=1, limit=0.5
        ) as crowd:
            assert crowd.join(20).hangs == 2
    finally:
        os.kill(server, signal.SIGCONT)


def test_all_processes_dead_at_once(site: Site, node_of: NodeOf, place: Path) -> None:
    """Nobody is left to serve: errors, no zeros and no hangs. The unmount cleans up, and the tree can be mounted."""
    node = node_of(site, rate=2e6)
    made = node.mount()
    files = files_of(site.reference, largest=64 << 20)
    with Crowd(made.target, site.reference, place / "crowd", files=files) as crowd:
        time.sleep(0.5)
        node.kill_all(made)
        until(lambda: crowd.tally().errors > 5, 20, "errors")
        found = crowd.stop()
    assert (found.mismatches, found.zeros, found.hangs) == (0, 0, 0), crowd.findings
    made.unmount()
    assert node.left() == []
    node.rate = 0.0
    assert (node.mount().target / "bulk/003").read_bytes() == (site.reference / "bulk/003").read_bytes()


# -- outages ---------------------------------------------------------------------------------------------------------


def test_a_store_that_is_down_before_the_start(site: Site, node_of: NodeOf) -> None:
    node = node_of(site, copy=True)
    store, hidden = Path(node.store_url), Path(f"{node.store_url}.hidden")
    store.rename(hidden)
    with pytest.raises(BootseerError):
        node.mount()
    assert node.left() == []
    hidden.rename(store)
    assert (node.mount().target / "bulk/003").read_bytes() == (site.reference / "bulk/003").read_bytes()


def test_a_store_that_goes_and_comes_back(site: Site, node_of: NodeOf) -> None:
    """What is on the node is served; the rest is an error by its deadline, and right once the store is back."""
    node = node_of(site)
    made = node.mount(demand_deadline=1.0)
    want = (site.reference / "bulk/003").read_bytes()
    assert (made.target / "bulk/003").read_bytes() == want
    Weather(down=True).make(node.weather)
    time.sleep(0.1)
    assert (made.target / "bulk/003").read_bytes() == want
    began = time.monotonic()
    with pytest.raises(OSError, match="Input/output") as caught:
        (made.target / "bulk/015").read_bytes()
    assert caught.value.errno == errno.EIO
    assert time.monotonic() - began < 10
    made.unmount()
    again = node.mount("again")  # small parts and bitmap are here
    assert (again.target / "bulk/003").read_bytes() == want
    Weather().make(node.weather)
    until(lambda: again.status(), 10, "an answer")
    assert (again.target / "bulk/015").read_bytes() == (site.reference / "bulk/015").read_bytes()


# -- callers that come at a bad moment -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["mount", "unmount", "status"])
def test_a_dead_fetcher_is_no_dead_server(site: Site, node_of: NodeOf, place: Path, what: str) -> None:
    """Nobody listens until another fetcher is there. Who takes that for the end of the server and cleans up after it
    ends the mount under its readers."""
    node = node_of(site, rate=RATE)
    made, other = node.mount(), node.mount("other")
    before = made.status()
    with Crowd(made.target, site.reference, place / "crowd", files=files_of(site.reference), readers=4) as crowd:
        os.kill(before.pid, signal.SIGSTOP)
        os.kill(before.fetcher_pid, signal.SIGKILL)
        timer = threading.Timer(0.5, os.kill, (before.pid, signal.SIGCONT))
        timer.start()
        try:
            if what == "mount":
                assert node.mount("third").status().pid == before.pid
            elif what == "unmount":
                other.unmount()
            else:
                assert made.status().pid == before.pid
        finally:
            timer.join()
        time.sleep(1.0)
        found = crowd.stop()
    assert (found.mismatches, found.zeros, found.hangs, found.errors) == (0, 0, 0, 0), crowd.findings
    assert made.status().pid == before.pid
