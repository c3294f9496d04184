"""The read scheduler in virtual time: nothing is lost or done twice, nobody waits for ever, the load is spread well."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bootseer.backends.engine.hedging import BURST, SHARE
from bootseer.backends.engine.memory import ByteBudget
from bootseer.backends.engine.model import BlockRange, Outcome, Place, ReadRequest, Tuning
from bootseer.backends.engine.policy import Scheduler
from bootseer.errors import DataError, UnavailableError
from support.readsim import Cluster, SimNode

MB = 1 << 20
AROUND = ["abc", "bcd", "cda", "dab"]
COLLIDING = ["abc", "abd", "acb", "acd"]


def request(replicas, total, unit=MB, *, file=None, name="r", split=False) -> ReadRequest:
    """``split``: one more part lies at the end of each block and at the beginning of the next one."""
    file = file or object()
    count = -(-total // unit // len(replicas))
    spans = [BlockRange(Place(file, keys), [i * unit for i in range(count + 1)]) for keys in replicas]
    if split:
        for span, after in list(itertools.pairwise(spans)):
            end = span.starts[-1]
            spans.append(BlockRange(span.place, [end, end + unit // 3], split=True))
            spans.append(BlockRange(after.place, [end + unit, end + 2 * unit], split=True))
    return ReadRequest(spans, name)


def nodes(rate=60 * MB, names="abcd", **special) -> dict[str, SimNode]:
    return {key: special.get(key, SimNode(rate)) for key in names}


def run(cluster: Cluster, *requests: ReadRequest, scheduler: Scheduler | None = None) -> list[float]:
    took = cluster.run(scheduler or Scheduler(), [(cluster.now, request) for request in requests])
    return [took[request] for request in requests]


def fine(request: ReadRequest) -> bool:
    return request.error is None and not request.left and all(not span.pending for span in request.spans)


def taken(scheduler):
    """The sizes of the attempts that it takes from now on."""
    sizes, take = [], scheduler._take

    def noted(now):
        if (attempt := take(now)) is not None:
            sizes.append(attempt.size)
        return attempt

    scheduler._take = noted
    return sizes


@pytest.mark.parametrize("replicas", [AROUND, COLLIDING, ["ab", "ab", "cd", "cd"], ["abc", "bcd"], ["abcd"]])
def test_all_datanodes_work_until_the_end(replicas):
    wanted = request(replicas, 256 * MB)
    (took,) = run(Cluster(nodes()), wanted)
    assert fine(wanted)
    assert took < 1.08 * 256 / 240


def test_a_datanode_with_one_stripe_is_left_that_stripe():
    # all but d could read everything; d can help only with the last
    wanted = request(["abc", "abc", "abc", "abd"], 256 * MB)
    (took,) = run(Cluster(nodes()), wanted)
    assert took < 1.08 * 256 / 240


SLOW = {
    "slow": (SimNode(6 * MB), 186),
    "frozen from the start": (SimNode(60 * MB, frozen=(0.0, 1e9)), 180),
    "frozen later": (SimNode(60 * MB, frozen=(0.4, 1e9)), 180),
    "frozen for a while": (SimNode(60 * MB, frozen=(0.2, 0.5)), 180),
    "dead from the start": (SimNode(60 * MB, dead_from=0.0), 180),
    "dies": (SimNode(60 * MB, dead_from=0.3), 180),
    "slow to begin": (SimNode(60 * MB, latency=0.5), 180),
}


@pytest.mark.parametrize("how", SLOW)
@pytest.mark.parametrize("replicas", [AROUND, COLLIDING])
def test_one_bad_datanode_costs_little_more_than_its_share(how, replicas):
    bad, rate = SLOW[how]
    for key in "ad":
        scheduler, cluster = Scheduler(), Cluster(nodes(**{key: bad}))
        for _ in range(3):
            wanted = request(replicas, 256 * MB)
            (took,) = run(cluster, wanted, scheduler=scheduler)
            assert fine(wanted)
            assert took < 256 / rate + 0.12
            assert took < 1.5 * 256 / 240


@pytest.mark.parametrize("bad", [{}, {"frozen": (0.2, 1e9)}, {"frozen": (0.2, 0.5)}, {"dead_from": 0.2}])
def test_quick_datanodes_give_longer_runs(bad):
    rate, size = 250 * MB, 640 * MB
    scheduler, cluster = Scheduler(), Cluster(nodes(rate, a=SimNode(rate, **bad)))
    wanted = request(AROUND, size)
    sizes = taken(scheduler)
    (took,) = run(cluster, wanted, scheduler=scheduler)
    assert fine(wanted)
    assert took < 1.42 * size / (4 * rate)
    assert max(sizes) == Tuning().long_run
    assert len(sizes) < 125  # 180 of at most 4 MiB, at the end 1 MiB


def test_datanodes_that_are_not_quick_give_runs_as_before():
    scheduler = Scheduler()
    sizes = taken(scheduler)
    run(Cluster(nodes()), request(AROUND, 256 * MB), scheduler=scheduler)
    assert (min(sizes), max(sizes)) == (Tuning().min_run, Tuning().max_run)


def test_small_reads_do_not_wait_for_large_ones():
    scheduler, cluster = Scheduler(), Cluster(nodes())
    large = [request(AROUND, 256 * MB) for _ in range(4)]
    small = [request(["abc"], 65536, 65536) for _ in range(20)]
    arrivals = [(0.0, one) for one in large] + [(0.5 + i * 0.05, one) for i, one in enumerate(small)]
    took = cluster.run(scheduler, arrivals)
    assert max(took[one] for one in small) < 0.05
    assert max(took[one] for one in large) < 1.1 * 4 * 256 / 240


def test_equal_requests_get_equal_shares():
    large = [request(AROUND, 128 * MB) for _ in range(6)]
    took = run(Cluster(nodes()), *large)
    assert max(took) < 1.15 * 6 * 128 / 240
    assert min(took) > 0.65 * max(took)


def test_hundreds_of_datanodes_need_few_transfers():
    names = [f"n{i}" for i in range(300)]
    ring = itertools.cycle(names)
    replicas = [[next(ring) for _ in range(3)] for _ in range(100)]
    cluster = Cluster({name: SimNode(60 * MB) for name in names})
    wanted = request(replicas, 800 * MB)
    run(cluster, wanted)
    assert fine(wanted)
    assert cluster.most_flying <= Tuning().total


# -- replicas ---------------------------------------------------------------------------------------------------------


def test_a_replica_that_is_gone_is_read_elsewhere_and_not_asked_again():
    wanted = request(AROUND, 64 * MB)
    place = wanted.spans[0].place
    cluster = Cluster(nodes(), gone={("a", place)})
    run(cluster, wanted)
    assert fine(wanted)
    assert place.bad == {"a": Outcome.REFUSED}
    assert cluster.relocations == 0


def test_fresh_locations_are_asked_for_when_all_replicas_are_gone():
    wanted = request(["ab", "bc"], 64 * MB)
    place = wanted.spans[0].place
    cluster = Cluster(nodes(), gone={("a", place), ("b", place)}, moves={place: "cd"})
    run(cluster, wanted)
    assert fine(wanted)
    assert cluster.relocations >= 1


def test_a_block_without_replicas_is_an_error_after_some_rounds():
    wanted = request(["", "bc"], 16 * MB)
    cluster = Cluster(nodes())
    (took,) = run(cluster, wanted)
    assert isinstance(wanted.error, UnavailableError)
    assert cluster.relocations == Tuning().rounds
    assert took < 30


@pytest.mark.parametrize("others", [["bc"], [], ["", ""]])
def test_pauses_between_questions_where_nobody_has_a_block(others):
    wanted, asked = request(["", *others], 16 * MB), []

    class Asked(Cluster):
        def _relocate(self, scheduler, job):
            asked.append(self.now)
            super()._relocate(scheduler, job)

    (took,) = run(Asked(nodes()), wanted)
    assert isinstance(wanted.error, UnavailableError)
    assert [later - sooner for sooner, later in itertools.pairwise(asked)] == pytest.approx(
        [0.25, 0.75, 2.25], abs=0.05
    )
    assert took == pytest.approx(3.25, abs=0.2)


def test_a_block_that_is_named_again_is_read():
    wanted = request(["", "bc"], 16 * MB)
    place = wanted.spans[0].place

    class Late(Cluster):
        def _relocate(self, scheduler, job):
            if self.now > 0.2:
                self.moves = {place: "ab"}
            super()._relocate(scheduler, job)

    (took,) = run(Late(nodes()), wanted)
    assert fine(wanted)
    assert took < 1.5


def test_a_block_that_comes_back_is_waited_for():
    wanted = request(["a"], 16 * MB)
    cluster = Cluster(nodes(a=SimNode(60 * MB, dead_from=0.0)))
    place = wanted.spans[0].place
    cluster.moves = {place: "ab"}
    run(cluster, wanted)
    assert fine(wanted)


@pytest.mark.parametrize("kind", ["corrupt", "unsound"])
def test_damage_is_read_elsewhere_and_an_error_only_when_no_replica_is_left(kind):
    wanted = request(AROUND, 64 * MB)
    place = wanted.spans[0].place
    cluster = Cluster(nodes())
    getattr(cluster, kind).update({("a", place), ("b", place)})
    scheduler = Scheduler()
    run(cluster, wanted, scheduler=scheduler)
    assert fine(wanted)
    assert scheduler.nodes["a"].breaker.closed
    if kind == "corrupt":
        assert place.bad.get("a", Outcome.CORRUPT) is Outcome.CORRUPT
    wanted = request(["ab"], 16 * MB)
    place = wanted.spans[0].place
    cluster = Cluster(nodes())
    getattr(cluster, kind).update({("a", place), ("b", place)})
    (took,) = run(cluster, wanted)
    assert isinstance(wanted.error, DataError)
    assert took < 2.0


# -- second tries, giving up ------------------------------------------------------------------------------------------


def test_hedges_keep_to_their_budget_and_give_their_memory_back():
    scratch = ByteBudget(64 * MB)
    scheduler = Scheduler(scratch=scratch)
    cluster = Cluster(nodes(rate=300 * MB, a=SimNode(3 * MB), b=SimNode(300 * MB, latency=0.2)))
    total = 0
    for _ in range(30):
        wanted = request(AROUND, 16 * MB)
        run(cluster, wanted, scheduler=scheduler)
        total += 16 * MB
        assert fine(wanted)
    assert scheduler.budget.spent <= BURST + SHARE * total
    assert scheduler.hedges_won > 0
    assert scratch.used == 0


def test_hedges_end_with_their_budget(monkeypatch):
    """Every transfer seems late here."""
    scheduler = Scheduler()
    monkeypatch.setattr(scheduler.durations, "late", lambda size: 0.02)
    cluster = Cluster(nodes(**{key: SimNode(300 * MB, latency=0.1) for key in "abcd"}))
    for _ in range(60):
        run(cluster, request(["ab"], MB), scheduler=scheduler)
    assert BURST / MB - 1 <= scheduler.hedged <= (BURST + SHARE * 60 * MB) / MB


def test_without_memory_there_are_no_hedges_and_a_frozen_datanode_is_survived():
    scheduler = Scheduler(scratch=ByteBudget(0))
    wanted = request(AROUND, 64 * MB)
    (took,) = run(Cluster(nodes(a=SimNode(60 * MB, frozen=(0.0, 1e9)))), wanted, scheduler=scheduler)
    assert fine(wanted)
    assert scheduler.hedged == 0
    assert took < 1.5


def test_an_only_replica_is_waited_for_not_given_up():
    wanted = request(["a"], 16 * MB)
    scheduler = Scheduler()
    (took,) = run(Cluster(nodes(a=SimNode(60 * MB, frozen=(0.1, 5.0)))), wanted, scheduler=scheduler)
    assert fine(wanted)
    assert took == pytest.approx(5 + 16 / 60, abs=0.3)


def test_a_request_fails_when_nothing_comes():
    wanted = request(["a", "b"], 16 * MB)
    frozen = SimNode(60 * MB, frozen=(0.0, 1e9))
    (took,) = run(Cluster(nodes(a=frozen, b=frozen), deadline=200.0), wanted)
    assert isinstance(wanted.error, UnavailableError)
    assert took < 61


@pytest.mark.parametrize("rate", [3, 1])
@pytest.mark.parametrize("replicas", [AROUND, "abcd"])
def test_large_chunks_over_slow_links_come(rate, replicas):
    wanted = request(replicas, 512 * MB, 64 * MB)
    (took,) = run(Cluster(nodes(rate * MB)), wanted, scheduler=Scheduler())
    assert fine(wanted)
    assert took < 1.6 * 512 / (4 * rate)


def test_one_chunk_that_takes_minutes_comes_while_it_comes():
    wanted = request(["a"], 64 * MB, 64 * MB)
    (took,) = run(Cluster(nodes(0.7 * MB)), wanted)
    assert fine(wanted)
    assert took > Tuning().patience


@pytest.mark.parametrize("unit", [MB, 65536])
def test_frozen_datanodes_with_only_replicas_keep_no_others_waiting(unit):
    frozen = [f"f{i}" for i in range(16)]
    cluster = Cluster(nodes() | {key: SimNode(60 * MB, frozen=(0.0, 1e9)) for key in frozen})
    scheduler, size = Scheduler(), 4 * unit
    stuck = [request([[key]], size, unit) for key in frozen for _ in range(4)]
    well = [request(AROUND, 4 * size, unit) for _ in range(8)]
    took = cluster.run(scheduler, [(0.0, one) for one in stuck] + [(2.0 + i, one) for i, one in enumerate(well)])
    assert all(map(fine, well))
    assert max(took[one] for one in well) < 1.0
    assert all(isinstance(one.error, UnavailableError) for one in stuck)
    assert not scheduler.nodes["f0"].breaker.closed
    assert cluster.most_flying <= 2 * Tuning().total
    assert not any(scheduler._silent.values())


def test_a_request_that_is_given_up_is_finished_when_its_last_transfer_has_ended():
    scheduler, wanted, now = Scheduler(), request(AROUND, 64 * MB), 0.0
    for key in "abcd":
        scheduler.node(key, key)
    scheduler.submit(wanted, now)
    attempts = [scheduler.take(now) for _ in range(8)]
    scheduler.fail(wanted, KeyboardInterrupt())
    assert not wanted.finished
    assert {*scheduler.cancels()} == {*attempts}
    assert scheduler.take(now) is None
    for attempt in attempts:
        assert not wanted.finished
        scheduler.ended(attempt, Outcome.CANCELLED, None, now)
    assert wanted.finished
    assert not scheduler.busy


def test_a_datanode_that_was_frozen_is_used_again():
    scheduler = Scheduler()
    cluster = Cluster(nodes(a=SimNode(60 * MB, frozen=(0.2, 3.0))))
    for _ in range(6):
        run(cluster, request(AROUND, 256 * MB), scheduler=scheduler)
    assert cluster.now > 6
    assert scheduler.nodes["a"].breaker.closed
    before = cluster.given["a"]
    run(cluster, request(AROUND, 256 * MB), scheduler=scheduler)
    assert cluster.given["a"] - before > 48 * MB


def test_a_tick_looks_only_at_the_datanodes_of_live_requests(monkeypatch):
    names = [f"n{i}" for i in range(500)]
    scheduler, cluster = Scheduler(), Cluster({name: SimNode(60 * MB) for name in names})
    run(cluster, request([[name] for name in names], 500 * 65536, 65536), scheduler=scheduler)
    assert len(scheduler.nodes) == 500
    cluster.nodes = nodes()
    looked, rate = [], type(scheduler.nodes["n0"]).rate
    monkeypatch.setattr(
        type(scheduler.nodes["n0"]), "rate", property(lambda node: looked.append(node) or rate.fget(node))
    )
    run(cluster, request(AROUND, 64 * MB), scheduler=scheduler)
    assert {node.key for node in looked} == {*"abcd"}


# -- anything ---------------------------------------------------------------------------------------------------------

KEYS = "abcde"
BYTES = st.integers(1, 24)
NODE = st.builds(
    SimNode,
    rate=st.sampled_from([6 * MB, 60 * MB, 300 * MB]),
    latency=st.sampled_from([0.001, 0.02, 0.3]),
    frozen=st.sampled_from([(-1.0, -1.0), (-1.0, -1.0), (0.0, 1e9), (0.1, 0.6), (0.3, 1e9)]),
    dead_from=st.sampled_from([1e9, 1e9, 1e9, 0.0, 0.2]),
)
FROZEN = SimNode(6 * MB, frozen=(0.0, 1e9))


@given(
    cluster=st.lists(NODE, min_size=5, max_size=5),
    files=st.lists(
        st.tuples(st.lists(st.sets(st.sampled_from(KEYS), min_size=1, max_size=3), min_size=1, max_size=5), BYTES),
        min_size=1,
        max_size=4,
    ),
    at=st.lists(st.sampled_from([0.0, 0.05, 0.4]), min_size=4, max_size=4),
    unit=st.sampled_from([65536, MB, 3 * MB]),
    bad=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 30), st.sampled_from(["gone", "corrupt", "unsound"]))),
    split=st.booleans(),
)
@example(  # a run of two DataNodes of which one is frozen for ever, and the other for a moment
    cluster=[SimNode(6 * MB), SimNode(6 * MB), FROZEN, SimNode(6 * MB), SimNode(6 * MB, 0.3, frozen=(0.1, 0.6))],
    files=[([{"a"}, {"a", "b"}, {"a", "b", "c"}, {"c", "e"}], 1)],
    at=[0.0] * 4,
    unit=3 * MB,
    bad=[],
    split=False,
)
@example(  # a run that has failed at c, and not yet at e, which a transfer of somebody else has found frozen
    cluster=[FROZEN, SimNode(6 * MB, dead_from=0.0), SimNode(300 * MB, 0.3), SimNode(6 * MB), FROZEN],
    files=[([{"a", "b", "c"}, {"e"}], 1), ([{"a"}], 1), ([{"a"}], 1), ([{"b", "c", "e"}, {"d"}], 1)],
    at=[0.0, 0.4, 0.0, 0.0],
    unit=3 * MB,
    bad=[],
    split=True,
)
@example(  # b takes longer for its first byte than anybody else, and is the only one that works
    cluster=[FROZEN, SimNode(6 * MB, 0.3), SimNode(6 * MB), SimNode(6 * MB, dead_from=0.0), SimNode(6 * MB)],
    files=[([{"a", "b", "c"}, {"a", "b", "c"}], 1), ([{"a", "b", "d"}], 1)],
    at=[0.0] * 4,
    unit=65536,
    bad=[],
    split=False,
)
def test_every_request_ends_right_or_with_an_error(cluster, files, at, unit, bad, split):
    requests = [request([sorted(keys) for keys in blocks], size * MB, unit, split=split) for blocks, size in files]
    simulated = Cluster(dict(zip(KEYS, cluster, strict=True)))
    places = [span.place for one in requests for span in one.spans]
    for key, index, kind in bad:
        getattr(simulated, kind).add((key, places[index % len(places)]))
    scratch = ByteBudget(64 * MB)
    scheduler = Scheduler(Tuning(patience=25.0), scratch=scratch)
    simulated.run(scheduler, list(zip(at, requests, strict=False)), limit=400.0)
    total = 0
    for one in requests:
        total += one.size
        good = all(_sound(simulated, span.place) for span in one.spans)
        assert fine(one) or one.error is not None
        assert fine(one) or not good, f"healthy replicas of everything, but {one.error!r}"
    assert not scheduler.busy
    assert scratch.used == 0
    assert scheduler.budget.spent <= BURST + SHARE * total
    assert all(node.flying == node.bulk == node.bytes == 0 for node in scheduler.nodes.values())


def _sound(cluster: Cluster, place: Place) -> bool:
    """Whether a DataNode that works for ever has a good replica."""
    wrong = cluster.gone | cluster.corrupt | cluster.unsound
    return any(
        cluster.nodes[key].dead_from > 1e8 and cluster.nodes[key].frozen[1] < 1e8 and (key, place) not in wrong
        for key in place.keys
    )


@given(
    rates=st.lists(st.sampled_from([20 * MB, 60 * MB, 100 * MB]), min_size=4, max_size=4),
    replicas=st.lists(st.sets(st.sampled_from("abcd"), min_size=1, max_size=3), min_size=2, max_size=6),
)
@example(rates=[20 * MB, 60 * MB, 20 * MB, 20 * MB], replicas=[{"a"}, {"b"}, {"b"}, {"a", "b"}])
def test_the_load_is_spread_nearly_as_well_as_can_be(rates, replicas):
    simulated = Cluster({key: SimNode(rate) for key, rate in zip("abcd", rates, strict=True)})
    scheduler = Scheduler()
    size = 48 * MB
    best = 0.0
    for count in range(1, 5):
        for some in itertools.combinations("abcd", count):
            only = sum(size for keys in replicas if keys <= set(some))
            best = max(best, only / sum(simulated.nodes[key].rate for key in some))
    for repeat in range(2):  # the first time no rate is known
        wanted = request([sorted(keys) for keys in replicas], size * len(replicas))
        (took,) = run(simulated, wanted, scheduler=scheduler)
        assert fine(wanted)
        assert took < best * (1.3 if repeat == 0 else 1.12) + 0.1
