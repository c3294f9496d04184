"""Reading events: what is dropped is counted, and nothing is ever guessed."""

import json
import os
import random
import subprocess
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import DataError, NotFoundError
from bootseer.profile import events, files
from bootseer.profile.events import State, parse, read
from support.startups import StartUp

GOLDEN = Path(__file__).parents[1] / "golden/events"


def one():
    s = StartUp()
    s.span("n0", "image", 0, 10)
    s.span("n0", "env", 10, 12, outcome="mount")
    return s


def test_golden_files():
    log = read(GOLDEN / "v2.jsonl")
    assert {span.attempt for span in log.spans if span.begin} == {"48211.0.1"}
    expected = json.loads((GOLDEN / "v2.expected.json").read_text())
    counts = {name: getattr(log, name) for name in expected["counts"]}
    assert counts == expected["counts"]
    found = [
        [s.id, s.parent, s.stage, s.node, s.rank, s.gpus, s.state.value, s.duration.ns if s.duration else None, s.attrs]
        for s in log.spans
    ]
    assert found == expected["spans"]


def test_a_torn_last_line_is_dropped_and_counted(tmp_path):
    whole = b"".join(one().lines())
    last = len(one().lines()[-1])
    for cut in range(2, last, 7):
        path = tmp_path / "e.jsonl"
        path.write_bytes(whole[:-cut])
        log = read(path)
        assert (log.torn, log.foreign, log.events) == (1, 0, 3)
        assert log.spans[1].state is State.OPEN
        assert log.spans[1].duration is None


def test_a_last_line_that_lacks_only_its_newline_counts(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(b"".join(one().lines())[:-1])
    assert (read(path).torn, read(path).events) == (0, 4)


def test_reading_resumes_inside_a_torn_line():
    lines = one().lines()
    log = parse([lines[0], lines[1][:40] + lines[2], lines[3]])
    assert (log.foreign, log.events) == (1, 3)
    assert [span.state for span in log.spans] == [State.LOST, State.DONE]


@pytest.mark.parametrize(
    "line",
    [b"step 1 loss 2.5\n", b"{}\n", b'{"bootseer":2}\n',
     b'{"bootseer":1,"ev":"end","span":"a","job":"","node":"n","wall":1}\n',
     b'{"bootseer":"x","ev":"end"}\n', b"\xff\xfe\x00\n", b"[1]\n",
     b'{"bootseer":2,"ev":"begin","span":"a","job":"","node":"n","wall":1}\n',
     b'{"bootseer":2,"ev":"jump","span":"a","job":"","node":"n","wall":1}\n',
     b'{"bootseer":2,"ev":"end","span":"a","job":"","node":"n","wall":1.5}\n',
     b'{"bootseer":2,"ev":"end","span":"a","job":"","node":"n","wall":99999999999999999999999}\n'],
)  # fmt: skip
def test_foreign_lines_are_dropped_and_counted(line):
    log = parse([line, *one().lines(), line])
    assert (log.foreign, log.torn, log.events) == (2, 0, 4)


def test_blank_lines_are_nothing():
    assert parse([b"\n", b"  \n", *one().lines()]).foreign == 0


def test_a_line_without_end_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(one().lines()[0] + b"x" * 1_000_000 + b"\n" + one().lines()[1])
    log = read(path)
    assert (log.foreign, log.events) == (1, 2)


def test_newer_events_are_counted_and_left_out():
    line = one().lines()[0].replace(b'"bootseer":2', b'"bootseer":3')
    log = parse([line, *one().lines()])
    assert (log.newer, log.events) == (1, 4)


def test_an_attempt_that_began_later_is_later_whatever_its_name():
    first, second = StartUp(attempt="9.0.0"), StartUp(attempt="10.0.0", zero=100)
    first.span("n0", "env", 0, None)
    second.span("n0", "image", 0, None)
    assert [span.state.value for span in parse(first.lines() + second.lines()).spans] == ["LOST", "OPEN"]


def test_unknown_keys_are_ignored():
    lines = [line.replace(b'"pid":1', b'"pid":1,"colour":{"a":[1]}') for line in one().lines()]
    assert parse(lines).events == 4


def test_bytes_that_are_no_utf_8_are_replaced():
    lines = [line.replace(b'"node":"n0"', b'"node":"n\xff"') for line in one().lines()]
    assert {span.node for span in parse(lines).spans} == {"n\ufffd"}


def test_duplicates_are_counted_and_the_first_one_holds():
    lines = one().lines()
    log = parse([*lines, *lines])
    assert (log.duplicates, len(log.spans)) == (4, 2)
    assert all(span.state is State.DONE for span in log.spans)


def test_lost_events_and_cut_attributes_are_summed():
    s = one()
    s.events[0]["lost"], s.events[3]["lost"], s.events[1]["cut"] = 2, 1, 4
    assert (s.log().lost, s.log().cut) == (3, 4)


def test_begin_and_end_may_come_from_different_processes_in_any_order():
    lines = one().lines()
    log = parse(lines[::-1])
    assert [(span.stage, span.state) for span in log.spans] == [("env", State.DONE), ("image", State.DONE)]
    assert log.spans[0].attrs == {"outcome": "mount"}


def test_notes_reach_their_span_even_when_they_come_first():
    s = one()
    s.event("note", s.events[0]["span"], "n0", 5, attrs={"bytes": 7})
    assert parse(s.lines()[::-1]).spans[1].attrs == {"bytes": 7}
    assert not parse([s.lines()[-1]]).spans


def test_open_becomes_lost_when_the_end_cannot_come_any_more():
    def state(*, parent_ends=False, later="", boots=False, cycle=False):
        s = StartUp()
        parent = s.span("n0", "init", 0, 50 if parent_ends else None)
        s.span("n0", "import", 1, None, parent=parent)
        if later:
            s.span("n0", later, 10, 11)
        if boots:
            s.event("begin", "ff" * 8, "n0", 99, stage="init", boot="another")
        lines = s.lines()
        if cycle:
            again = StartUp(cycle=1, zero=100)
            again.span("n0", "env", 0, 1)
            lines += again.lines()
        return parse(lines).spans[1].state

    assert state() is State.OPEN
    assert state(later="first_step") is State.OPEN
    assert state(parent_ends=True) is State.LOST
    assert state(boots=True) is State.LOST
    assert state(cycle=True) is State.LOST


def test_other_nodes_progress_says_nothing_of_an_open_span():
    s = StartUp()
    s.span("n0", "image", 0, None)
    s.span("n1", "env", 10, 20)
    assert s.log().spans[0].state is State.OPEN


def test_after_a_boot_durations_use_the_wall_clock_and_say_so():
    s = StartUp()
    s.event("begin", "a", "n0", 0, stage="image", boot="one")
    s.event("end", "a", "n0", 30, boot="two")
    (span,) = s.log().spans
    assert (span.state, span.duration.ns, span.duration.uncertain) == (State.DONE, 30_000_000_000, True)


def test_a_monotonic_clock_that_went_back_is_not_used():
    """A container's time namespace may shift it under one and the same boot id."""
    s = StartUp()
    s.event("begin", "a", "n0", 0, stage="image")
    s.event("end", "a", "n0", 30)
    s.events[1]["mono"] = 5
    (span,) = s.log().spans
    assert (span.duration.ns, span.duration.uncertain) == (30_000_000_000, True)


def test_each_start_up_has_its_own_spans():
    made = [StartUp(cycle=0), StartUp(cycle=1, zero=100), StartUp("other", zero=50)]
    above = made[0].span("n0", "env", 0, 10, outcome="mount")
    for s in made:
        part = s.span("n0", "part", 1, 2, rank=3, parent=above)
        s.span("n0", "deeper", 1, None, parent=part)
    log = parse(line for s in made for line in s.lines())
    logs = log.by_identity()
    assert list(logs) == [("job", "0", 0), ("other", "0", 0), ("job", "0", 1)]
    for (job, _, cycle), one in logs.items():
        assert list(one.spans) == [span for span in log.spans if (span.job, span.cycle) == (job, cycle)]
        assert any(one.spans.detail) == ((job, cycle) == ("job", 0))  # `env` of another start-up accounts for nothing


def test_a_span_takes_little_memory(tmp_path):
    s = StartUp()
    for number in range(8000):
        s.span(f"n{number // 20}", "import", number, number + 1, rank=number // 4)
    path = s.write(tmp_path / "e.jsonl")
    del s
    tracemalloc.start()
    try:
        log = read(path)
        assert tracemalloc.get_traced_memory()[1] / len(log.spans) < 450
    finally:
        tracemalloc.stop()


def test_folders_are_read_whole_and_a_file_given_twice_once(tmp_path):
    s = one()
    deep = tmp_path / "attempt-0" / "events"
    deep.mkdir(parents=True)
    (deep / "n0.jsonl").write_bytes(b"".join(s.lines()[:2]))
    (tmp_path / "n1.jsonl").write_bytes(b"".join(s.lines()[2:]))
    (tmp_path / "notes.txt").write_text("not read\n")
    log = read([tmp_path, deep / "n0.jsonl", deep])
    assert (log.events, log.duplicates, log.foreign) == (4, 0, 0)
    assert read(str(tmp_path)).events == 4


def test_what_is_not_there_or_holds_nothing_is_one_clear_line(tmp_path):
    with pytest.raises(NotFoundError, match="no events file or job folder /"):
        read(tmp_path / "nope")
    with pytest.raises(DataError, match="no events in"):
        read(tmp_path)
    (tmp_path / "log.jsonl").write_text("hello\n" * 3)
    with pytest.raises(DataError, match="3 other lines"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is a pipe or a device"):  # and nobody waits for a writer
        read(tmp_path / "pipe.jsonl")


@given(data=st.binary(max_size=3000), seed=st.integers(0, 1000))
def test_no_bytes_make_reading_fail(data, seed):
    rng = random.Random(seed)
    whole = bytearray(b"".join(one().lines()))
    at = rng.randrange(len(whole))
    whole[at : at + rng.randrange(200)] = data
    log = parse(bytes(whole).splitlines(keepends=True))
    for span in log.spans:
        assert (span.duration is not None) == (span.state is State.DONE)
        assert span.duration is None or span.duration.ns >= 0
    assert events.MAGIC in whole or not log.events


def line(**changed):
    event = {"bootseer": 2, "ev": "begin", "span": "a", "wall": 1, "node": "n", "job": "j", "stage": "part"} | changed
    return json.dumps(event).encode() + b"\n"


def test_a_chain_of_many_parents_costs_seconds():
    count = 200_000
    form = line(span="%d", parent="%d")
    began = time.process_time()
    log = parse(form % (number, number - 1) for number in range(count))
    assert (len(log.spans), any(log.spans.detail)) == (count, False)
    assert time.process_time() - began < 12  # 20 times what it takes alone


@pytest.mark.parametrize("top", [0, 500, 999])
@pytest.mark.parametrize("order", [1, -1])
def test_what_lies_in_a_stage_is_known_from_anywhere_in_a_chain(top, order):
    lines = [
        line(span=str(number), parent=str(number - 1), stage="env" if number == top else "part")
        for number in range(1000)
    ]
    spans = parse(lines[::order]).spans
    detail = dict(zip(spans.id, spans.detail, strict=True))
    assert all(detail[str(number)] == (number > top) for number in range(1000))


def test_parents_in_a_circle_end():
    lines = [line(span=str(number), parent=str((number + 1) % 100)) for number in range(100)]
    assert not any(parse([*lines, line(span="in", parent="7")]).spans.detail)


@pytest.mark.parametrize(
    "bad",
    [
        line()[:-2] + b',"more":' + b"[" * 60_000,
        line(node="n" + "9" * 5000),
        line(attrs={"nodes": 10**400}),
        line(attrs={"seconds": 1e300}),
        line()[:-2] + b',"pid":' + b"9" * 4000 + b"}",
    ],
    ids=["deep", "digits", "large", "float", "pid"],
)
def test_numbers_and_depths_that_nobody_means_are_foreign(bad):
    log = parse([bad + b"\n", *one().lines()])
    assert (log.foreign, log.events) == (1, 4)


@pytest.mark.parametrize("begun", [False, True])
def test_a_file_of_holes_is_read_no_further_than_its_events(tmp_path, begun):
    path = tmp_path / "sparse.jsonl"
    path.write_bytes(b"".join(one().lines()) if begun else b"")
    os.truncate(path, 2 << 40)
    (tmp_path / "good.jsonl").write_bytes(b"".join(one().lines()))
    began = time.monotonic()
    log = read(tmp_path)
    assert time.monotonic() - began < 10
    assert log.events == (8 if begun else 4)
    (said,) = log.unread
    assert str(path) in said
    assert "before it is an event" in said


def test_a_large_file_is_read_to_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MOST", 100_000)
    path = tmp_path / "e.jsonl"
    path.write_bytes(b"".join(line(span=str(number)) for number in range(10_000)))
    log = read(path)
    assert 0 < log.events <= 100_000 // len(line()) + 1
    assert "that much of a file is read" in log.unread[0]


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "away" / "secret.jsonl"
    path.parent.mkdir()
    path.write_bytes(line(job="secret"))
    return path


@pytest.mark.root
def test_links_of_others_are_not_followed_and_our_own_are(tmp_path, secret):
    shown = tmp_path / "shown"
    (shown / "deep").mkdir(parents=True)
    (shown / "deep/plain.jsonl").write_bytes(b"".join(one().lines()))
    link = shown / "deep/link.jsonl"
    link.symlink_to("../../away/secret.jsonl")
    (shown / "folder").symlink_to(secret.parent)
    assert {job for job, _, _ in read(shown).identities()} == {"job", "secret"}
    os.chown(link, 65534, 65534, follow_symlinks=False)
    assert {job for job, _, _ in read(shown).identities()} == {"job"}
    assert {job for job, _, _ in read(link).identities()} == {"secret"}  # it was named


def test_a_link_that_comes_between_a_look_and_the_opening_leads_nowhere(tmp_path, secret):
    for way in ("file", "folder"):
        deep = tmp_path / way / "deep"
        deep.mkdir(parents=True)
        (deep / "secret.jsonl").write_bytes(b"".join(one().lines()))
        (found,) = files.find(tmp_path / way, (".jsonl",))
        if way == "file":
            (deep / "secret.jsonl").unlink()
            (deep / "secret.jsonl").symlink_to(secret)
        else:
            deep.rename(tmp_path / "gone")
            deep.symlink_to(secret.parent)
        with pytest.raises((DataError, OSError)):
            found.open()


def test_folders_without_end_are_looked_through_to_a_depth(tmp_path):
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("a", dir_fd=here)
        below = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (tmp_path / "good.jsonl").write_bytes(b"".join(one().lines()))
    try:
        assert read(tmp_path).events == 4
    finally:
        subprocess.run(["rm", "-r", tmp_path / "a"], check=True, timeout=60)
