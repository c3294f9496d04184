"""Leases in a store: one of the nodes does the work, and every wait for it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bootseer.errors import FullError, UnavailableError
from bootseer.objects import Store, lease, open_store
from bootseer.objects.folder import FolderStore
from bootseer.objects.lease import Lease, Turn, take_turn
from support.waits import later, until

NAME = "env/" + 64 * "a"


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bootseer")
    monkeypatch.setattr(lease, "POLL", 0.02)


def turn(store: Store, settled: Callable[[], bool] = lambda: False, seconds: float = 60.0) -> Turn:
    return take_turn(store, NAME, work="makes it", seconds=seconds, settled=settled)


def leases(store: FolderStore) -> list[str]:
    return [path.name for path in (store.root / "leases" / NAME).glob("*")]


def held(store: Store, number: int, **more: object) -> None:
    """A lease of a node that renews it no more."""
    data = msgspec.json.encode(Lease(node="n0", run="1", **more))  # type: ignore[arg-type]
    store.put(f"leases/{NAME}/{number}", data, overwrite=True)


def test_one_leads_and_what_was_known_before_the_wait_is_looked_at_again(store: FolderStore) -> None:
    lead = turn(store).lead
    assert lead
    made: list[bool] = []
    with lead:
        other = later(lambda: turn(store, lambda: bool(made)))
        until(lambda: leases(store) == ["0"], 60)
        made.append(True)
    assert other.result(60) == Turn()
    assert leases(store) == []
    late = turn(store, lambda: bool(made))  # it looked before the result was there and takes its turn after
    assert late == Turn()
    assert leases(store) == []


def test_a_link_to_nothing_in_the_place_of_a_lease_is_waited_for_as_long_as_a_dead_node(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "DEAD", 0.3)
    folder = store.root / "leases" / NAME
    folder.mkdir(parents=True)
    for number in ("0", "2"):
        (folder / number).symlink_to("/nonexistent/lease")
    began = time.monotonic()
    lead = turn(store).lead
    assert lead
    with lead:
        assert "1" in leases(store)
    assert 0.3 <= time.monotonic() - began < 20


def test_a_node_that_leaves_is_followed_by_one_other(store: FolderStore, caplog: pytest.LogCaptureFixture) -> None:
    lead = turn(store).lead
    assert lead
    others = [later(lambda: turn(store)) for _ in range(2)]
    until(lambda: caplog.text.count("waiting for") >= 2, 60)
    with pytest.raises(KeyboardInterrupt), lead:
        raise KeyboardInterrupt
    until(lambda: any(other.done() for other in others), 60)
    (follower,) = (other.result().lead for other in others if other.done())
    assert follower
    with follower:
        follower.unshared("a secret in .netrc: password=hunter2")
    assert [other.result(60).lead for other in others].count(None) == 1
    assert "a secret in .netrc: password=[redacted]" in caplog.text


class Clock:
    """For the node that waits: ``ticks`` is called at each of its sleeps with the seconds since the begin."""

    def __init__(self, ticks: Callable[[float], None]) -> None:
        self.now, self.ticks = 1e6, ticks

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.ticks(self.now - 1e6)


def test_who_led_and_ended_between_two_looks_is_heard(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def others(seconds: float) -> None:
        if seconds == 2:
            store.delete(f"leases/{NAME}/0")  # the first left without a result
        if seconds == 4:
            held(store, 0, state="unshared", message="a secret")  # the next led for less than a second

    held(store, 0)
    monkeypatch.setattr(lease, "POLL", 2.0)
    monkeypatch.setattr(lease, "time", Clock(others))
    assert turn(store) == Turn()


def test_a_lease_that_is_renewed_is_waited_for_and_one_that_is_not_is_taken_over(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By this node's clock alone; what is no lease, as a renewal under way, does not count."""
    (store.root / "leases" / NAME).mkdir(parents=True)
    for name in (".tmp-77", "8.part", "²", "9999999999", "x"):
        (store.root / "leases" / NAME / name).write_text("half")

    def renew(seconds: float) -> None:
        if seconds < 90 and int(seconds) % 14 == 0:
            held(store, 4, count=int(seconds))

    renew(0)
    monkeypatch.setattr(lease, "POLL", 1.0)
    clock = Clock(renew)
    monkeypatch.setattr(lease, "time", clock)
    assert turn(store, seconds=50.0) == Turn()
    assert "n0 still makes it; waiting no longer" in caplog.text
    lead = turn(store, seconds=1000.0).lead
    assert lead
    assert 84 + lease.DEAD <= clock.now - 1e6 <= 84 + lease.DEAD + 2
    assert "5" in leases(store)
    lead.__exit__()
    store.put(f"leases/{NAME}/6", b'{"node":"\xff"}', overwrite=True)  # no UTF-8
    taken = turn(store, seconds=1000.0).lead
    assert taken
    assert "7" in leases(store)
    taken.__exit__()


def test_a_slow_store_makes_nobody_dead(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it answers may be younger than the question."""

    class Slow(FolderStore):
        calls = 0

        def get(self, key: str, *, most: int) -> bytes:
            self.calls += 1
            clock.now += 20.0
            held(store, 0, count=self.calls // 2)  # each is seen twice
            return super().get(key, most=most)

    clock = Clock(lambda seconds: None)
    monkeypatch.setattr(lease, "time", clock)
    held(store, 0)
    assert turn(Slow(store.root), seconds=200.0) == Turn()
    assert leases(store) == ["0"]


def test_a_store_that_does_not_answer_for_a_while_makes_nobody_dead(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not have answered the leader either."""
    mine = Trouble(store.root)

    def outage(seconds: float) -> None:
        mine.error = UnavailableError("no answer") if 1 <= seconds < 14 else None
        if seconds >= 20:
            held(store, 0, count=int(seconds) // 10)

    monkeypatch.setattr(lease, "POLL", 1.0)
    monkeypatch.setattr(lease, "time", Clock(outage))
    held(store, 0)
    assert turn(mine, seconds=60.0) == Turn()
    assert leases(store) == ["0"]


def test_a_lease_that_another_node_takes_meanwhile_is_waited_for(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settled() -> bool:
        held(store, 3)
        return False

    monkeypatch.setattr(lease, "time", Clock(lambda seconds: store.delete(f"leases/{NAME}/0")))
    held(store, 0)
    assert turn(store, settled, seconds=5.0) == Turn()
    assert leases(store) == ["3"]


def stored(store: FolderStore) -> Lease:
    return msgspec.json.decode(store.get(f"leases/{NAME}/0", most=1 << 20), type=Lease)


def test_a_leader_renews_its_lease(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL", 0.02)
    lead = turn(store).lead
    assert lead
    with lead:
        for count in (1, 2):
            until(lambda: stored(store).count > count, 60)  # noqa: B023


def test_after_two_failures_in_a_row_all_waits_end_and_each_node_tries_it(
    store: FolderStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = turn(store).lead
    assert first
    others = [later(lambda: turn(store)) for _ in range(3)]
    until(lambda: caplog.text.count("waiting for") >= 3, 60)
    with first:
        first.failed("exit code 3")
    until(lambda: any(other.done() for other in others), 60)
    second = next(other for other in others if other.done())
    assert second.result().lead
    joined = later(lambda: turn(store))  # has seen one failure only
    until(lambda: caplog.text.count("waiting for") >= 6, 60)
    with second.result().lead as lead:
        lead.failed("exit code\n4")
    for other in (*others, joined):
        assert other is second or other.result(60) == Turn()
    assert "reports: exit code 4\n" in caplog.text
    again = turn(store).lead  # of a later start
    assert again
    again.__exit__()
    assert leases(store) == []


@pytest.mark.parametrize("message", ["layer a\udcff is damaged", "\x1b[31mno such layer"])
def test_whatever_a_failure_says_is_told(store: FolderStore, message: str) -> None:
    """What was read from a layer or from a registry may be in it."""
    lead = turn(store).lead
    assert lead
    with lead:
        lead.failed(message)
    assert len(stored(store).message) > 10


def test_a_result_that_was_there_first_is_found(store: FolderStore, caplog: pytest.LogCaptureFixture) -> None:
    """The leader drops its own then: there is nothing that the others would have to do."""
    lead = turn(store).lead
    assert lead
    looks: list[bool] = []
    other = later(lambda: turn(store, lambda: bool(looks.append(True)) or True))
    until(lambda: "waiting for" in caplog.text, 60)
    with lead:
        lead.unshared("there is a snapshot of this key already")
    assert other.result(60) == Turn()
    assert looks


@pytest.mark.parametrize("name", ["007", "0/x"])
def test_what_cannot_be_a_lease_holds_nobody_up(store: FolderStore, name: str) -> None:
    """A file that only looks like one, and a folder in its place."""
    store.put(f"leases/{NAME}/{name}", b"{}")
    looks: list[int] = []

    def settled() -> bool:
        looks.append(1)
        if len(looks) > 1000:
            raise UnavailableError("asked without end")
        return False

    found = later(lambda: turn(store, settled, seconds=0.5)).result(60)
    assert len(looks) < 100
    if found.lead:
        found.lead.__exit__()
    assert bool(found.lead) == (name == "007")


def test_a_leader_that_was_stopped_takes_nothing_from_the_next_one(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "DEAD", 0.2)
    stopped = turn(store).lead  # renews after 3 s, which is late
    second = turn(store).lead
    assert stopped
    assert second
    for end in (lambda: stopped.failed("late"), lambda: None):
        end()
        stopped.__exit__()
        assert "1" in leases(store)
    second.__exit__()
    assert leases(store) == []


class Trouble(FolderStore):
    """Raises ``error`` in the methods ``what``."""

    error: Exception | None = None
    what = ("get", "put")

    def get(self, key: str, *, most: int) -> bytes:
        if self.error and "get" in self.what:
            raise self.error
        return super().get(key, most=most)

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        if self.error and "put" in self.what:
            raise self.error
        return super().put(key, data, overwrite=overwrite)


def test_a_store_that_goes_away_or_is_full_ends_the_wait(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Trouble(store.root)
    held(store, 0)

    def gone(seconds: float) -> None:
        mine.error = UnavailableError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(lease, "time", Clock(gone))
        assert turn(mine) == Turn()
    assert "cannot agree with other nodes on the one that makes it: no answer; this node does" in caplog.text
    store.delete(f"leases/{NAME}/0")
    monkeypatch.setattr(lease, "RENEWAL", 0.05)
    full = Trouble(store.root)
    lead = turn(full).lead
    assert lead
    with lead:  # and a failure that cannot be told still frees the others
        full.error, full.what = FullError("no space left"), ("put",)
        until(lambda: "cannot renew the lease" in caplog.text, 60)
        lead.failed("exit code 1")
    assert leases(store) == []
    assert turn(full) == Turn()


def test_where_one_of_two_writers_does_not_lose_each_node_works_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert turn(open_store("registry://127.0.0.1:1/x")) == Turn()
    assert "each node makes it by itself" in caplog.text
    assert open_store("memory://x").exclusive
    assert not open_store(f"dir::file://{tmp_path}").exclusive


def test_only_what_was_seen_is_replaced(store: FolderStore) -> None:
    assert store.put("a", b"old")
    assert store.replace("a", b"new", old=b"old")
    assert not store.replace("a", b"late", old=b"old")
    assert store.get("a", most=1 << 30) == b"new"
    store.delete("a")
    assert store.replace("a", b"again", old=b"old")


def test_of_many_that_start_together_one_leads_at_a_time(store: FolderStore) -> None:
    """Each of them gets its turn, as nothing is ever published."""
    together, inside, most = threading.Barrier(8), [], []

    def node() -> None:
        together.wait(60)
        lead = turn(FolderStore(store.root), seconds=600).lead
        assert lead
        with lead:
            inside.append(1)
            most.append(len(inside))
            inside.pop()

    for done in [later(node) for _ in range(8)]:
        done.result(120)
    assert most == [1] * 8


def test_what_others_say_of_a_failure_ends_nobodys_work(store: FolderStore, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever may write to the store: held for a while, then failed nine times, with a code of his choice."""
    forged = {"format": "bootseer-lease", "version": 1, "node": "n" * 300, "run": "1", "message": "m" * 300}
    store.put(f"leases/{NAME}/0", msgspec.json.encode(forged), overwrite=True)
    victim = later(lambda: turn(store))
    until(lambda: "waiting for" in caplog.text, 60)
    more = {"state": "failed", "failures": 9, "code": 137}
    store.put(f"leases/{NAME}/0", msgspec.json.encode({**forged, **more}), overwrite=True)
    assert victim.result(60) == Turn()
    assert max(map(len, caplog.messages)) < 1000


def test_who_waits_is_told_how_the_result_comes_and_may_wait_no_longer(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEWAL", 0.05)
    monkeypatch.setattr(lease, "POLL", 0.05)
    told: list[lease.Progress] = []
    lead = turn(store).lead
    assert lead
    progress = lease.Progress(elapsed=3.0, since=1.0, left=5e6, rate=1e6)
    with lead.hand_on().resumed(store, lambda: progress):

        def waits(seen: lease.Progress) -> bool:
            told.append(seen)
            return len(told) < 3

        other = take_turn(store, NAME, work="makes it", seconds=60, settled=lambda: False, waits=waits)
    assert other == Turn()
    assert told == [progress] * 3
    with lead:  # it was handed on: this changes nothing
        pass
    assert not list(store.list("leases"))
