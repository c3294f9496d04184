"""Ranks that meet in the job's store: who is there, and what goes wrong before all are."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from bootseer.errors import UnavailableError
from bootseer.torch import peers, shared_read
from bootseer.torch.shared_plan import FileId, Span

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    monkeypatch.setattr(peers, "_GRACE", 0.1)


def test_all_know_how_many_came():
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(peers.arrive, store, 4, 10) for _ in range(4)]
        assert sorted(each.result() for each in found) == [(n, 4) for n in range(4)]


def test_who_comes_late_is_not_among_them():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(peers.arrive, store, 3, 0.3) for _ in range(2)]
        assert sorted(each.result() for each in found) == [(0, 2), (1, 2)]
    with pytest.raises(UnavailableError, match="did not wait for it"):
        peers.arrive(store, 3, 0.3)


def test_nobody_else_comes():
    with pytest.raises(UnavailableError, match="no other rank came"):
        peers.arrive(dist.HashStore(), 2, 0.1)


def test_the_first_rank_dies_before_it_says_who_is_there():
    store = dist.HashStore()
    store.add("came", 1)
    with pytest.raises(UnavailableError, match="first did not say"):
        peers.arrive(store, 2, 0.1)


@pytest.mark.parametrize("said", ["1000000000", "-1", "many", "3"])
def test_nobody_believes_that_more_came_than_there_are(said):
    store = dist.HashStore()
    store.add("came", 1)
    store.set("count", said)
    with pytest.raises(UnavailableError):
        peers.arrive(store, 2, 0.1)


class Broken:
    """A store that fails, or does not answer until it is ``let_go``."""

    def __init__(self, *, hangs):
        self._hangs, self.let_go = hangs, threading.Event()

    def add(self, key, number):
        if self._hangs:
            self.let_go.wait(20)
        raise RuntimeError("connection reset")


@pytest.mark.parametrize(("hangs", "said"), [(False, "connection reset"), (True, "does not answer")])
def test_a_broken_store_costs_reads_alone(monkeypatch, hangs, said):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = Broken(hangs=hangs)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        monkeypatch.setattr(dist, "PrefixStore", lambda prefix, inner: store)
        assert said in shared_read.read_shared([], dist.group.WORLD, deadline=0.1).alone
    finally:
        store.let_go.set()
        dist.destroy_process_group()


def test_a_group_that_is_made_anew_begins_to_count_anew(monkeypatch):
    """After a restart within the process (only some ranks are new) all ranks name their meetings alike."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    met = []
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: met.append(prefix) or Broken(hangs=False))
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            for group in (dist.group.WORLD, dist.group.WORLD, dist.new_group([0, 1])):
                assert "connection reset" in shared_read.read_shared([], group).alone
        finally:
            del group
            dist.destroy_process_group()
    assert [key.rpartition("/")[2] for key in met] == ["1", "2", "1"] * 2


def together(count, deadline):
    store = dist.HashStore()
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda me: peers.Peers(store, me, count, deadline, me, b""), range(count)))


def seconds_until_nothing_comes(peer, owner, **options):
    began = time.monotonic()
    with pytest.raises(UnavailableError):
        peer.receive(memoryview(bytearray(1)), owner, 0, **options)()
    return time.monotonic() - began


def test_who_leaves_after_its_neighbour_is_not_waited_for():
    """Its connections to all others are broken, whichever of them had gone before."""
    first, second, third = together(3, 10.0)
    third.close()
    assert seconds_until_nothing_comes(second, 2) < 5
    second.close()
    assert seconds_until_nothing_comes(first, 1) < 5


def test_a_rank_has_the_deadline_for_each_bucket_that_it_must_read():
    first, second = together(2, 0.4)
    assert 1.1 < seconds_until_nothing_comes(first, 1, buckets=3) < 5
    second.close()


def test_how_many_buckets_a_rank_reads_between_the_pieces_of_another_one():
    needed, others = ([Span(FileId("f", 1 << 20, 1 << 40), 0, 8, ranks)] for ranks in (0b11, 0b101))
    found = shared_read.awaited([others, others, needed, needed, others, needed], 1)
    assert [(tag, buckets) for tag, _, buckets in found] == [(4, 3), (5, 1), (6, 1), (7, 1), (10, 2), (11, 1)]
    assert [buckets for _, _, buckets in shared_read.awaited([needed, others], 1)] == [1, 1]
