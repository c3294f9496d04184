"""Predicted profiles: which units of a tree the starts of another one foretell, and what lies in the store then."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer import erofs
from bootseer.blocks.fetch.predict import predict_blocks, predict_profiles
from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.blocks.metadata import localize
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.layout import Part, layout_of
from bootseer.blocks.profiles.library import ProfileKey, Target
from bootseer.blocks.profiles.prediction import Side, predict
from bootseer.blocks.publish.tree import publish
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.errors import UnavailableError
from bootseer.objects.folder import FolderStore
from support.stores import RateLimitedStore

JOB = ProfileKey("train")
BLOCK = 4


def side(name: str, files: Mapping[bytes, tuple[int, str]]) -> Side:
    """A tree whose files, one after another, have so many units of a content each; a block is 4 units of one file."""
    parts, hashes, at = [], [], 0
    for path, (units, content) in files.items():
        parts.append(Part(at, units, path, 0))
        for block in range(-(-units // BLOCK)):
            hashes.append(hashing.digest(f"{content} {block}".encode()))
        at += -(-units // BLOCK) * BLOCK
    count = len(hashes)
    pack = ObjectRef("ab" * 32, 10 * count)
    blocks = BlockMap(BLOCK * UNIT, at * UNIT, [pack], b"".join(hashes), range(0, 10 * count, 10), [10] * count)
    return Side(hashing.hexdigest(name.encode()), blocks, parts)


def start(tree: Side, *units: int, complete: bool = True) -> Trace:
    touches = tuple(Touch(ms, 7, unit, 1) for ms, unit in enumerate(units))
    return Trace(tree.tree, tree.map.size, 5, complete, touches)


def units(trace: Trace) -> list[int]:
    return [unit for touch in trace.touches for unit in range(touch.unit, touch.unit + touch.count)]


OLD = {b"a": (4, "A"), b"lib/x-1.2.so": (8, "X"), b"lib/y.so": (4, "Y"), b"gone": (4, "G")}


@pytest.mark.parametrize(
    ("files", "touched", "expected"),
    [
        pytest.param(OLD, [5, 0, 12, 18], [5, 0, 12, 18], id="the same files"),
        pytest.param({b"new": (4, "N"), **OLD}, [5, 0], [9, 4], id="elsewhere"),
        pytest.param({b"a": (4, "other"), b"lib/y.so": (4, "too")}, [1, 13], [1, 5], id="other content"),
        pytest.param({b"lib/x-1.3.1.so": (8, "new")}, [4, 11], [0, 7], id="another version"),
        pytest.param({b"lib/x-1.3.so": (4, "a"), b"lib/x-2.0.so": (4, "b")}, [4], [], id="two versions foretell none"),
        pytest.param({b"v2/x-1.so": (4, "n"), b"lib/x-1.3.so": (4, "a")}, [4], [4], id="the folder counts"),
        pytest.param({b"moved": (4, "Y")}, [14, 12], [2, 0], id="renamed with its content"),
        pytest.param({b"lib/y.so": (2, "cut")}, [13, 15], [1], id="a shorter file"),
        pytest.param({b"z": (4, "Z")}, [0, 4, 12], [], id="nothing of it"),
    ],
)
def test_what_a_start_foretells(files: dict[bytes, tuple[int, str]], touched: list[int], expected: list[int]) -> None:
    old, new = side("old", OLD), side("new", files)
    found = predict([start(old, *touched)], old, new, began=9)
    assert units(found.trace) == expected
    assert found.share == len(expected) / len(touched)
    assert (found.trace.tree, found.trace.size, found.trace.source) == (new.tree, new.map.size, old.tree)
    assert not found.trace.complete
    assert Trace.decode(found.trace.encode()) == found.trace


def test_in_each_version_the_name_besides_its_numbers_decides() -> None:
    old = side("old", {b"p3.11/site/m.so": (4, "1"), b"p3.11/site/n.so": (4, "2")})
    new = side("new", {b"p3.12/site/m.so": (4, "3"), b"p3.13/site/m.so": (4, "4"), b"p3.12/site/n.so": (4, "5")})
    assert units(predict([start(old, 0, 4)], old, new, began=1).trace) == [8], "which m.so is meant nobody knows"


def test_of_predicted_starts_the_tree_that_somebody_started_is_named() -> None:
    old, new, third = (side(name, OLD) for name in ("old", "new", "third"))
    once = predict([start(old, 3)], old, new, began=1).trace
    assert predict([once], new, third, began=1).trace.source == old.tree


FILES = st.dictionaries(
    st.text("ab1./", min_size=1, max_size=4).map(str.encode), st.tuples(st.integers(1, 9), st.sampled_from("XYZ")),
    min_size=1, max_size=6,
)  # fmt: skip


@given(FILES, FILES, st.randoms(use_true_random=False), st.integers(0, 30))
def test_a_prediction_is_a_trace_of_the_new_tree_and_no_larger(
    old_files: dict[bytes, tuple[int, str]], new_files: dict[bytes, tuple[int, str]], rand: random.Random, count: int
) -> None:
    old, new = side("old", old_files), side("new", new_files)
    all_units = range(old.map.size // UNIT)
    touched = rand.sample(all_units, min(count, len(all_units)))
    found = predict([start(old, *touched)], old, new, began=1)
    assert Trace.decode(found.trace.encode()) == found.trace
    assert len(units(found.trace)) == len(set(units(found.trace))) <= len(touched)
    assert 0 <= found.share <= 1
    same = predict([start(old, *touched)], old, old, began=1)
    files = {unit for part in old.parts for unit in range(part.unit, part.unit + part.units)}
    assert units(same.trace) == [unit for unit in touched if unit in files]


# -- in a store ----------------------------------------------------------------------------------------------------


def tree(store: FolderStore, folder: Path, files: Mapping[str, bytes]) -> str:
    for name, content in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    erofs.build(folder / "root", folder / "meta", folder / "data")
    return publish(store, folder / "meta", folder / "data", block_size=BLOCK * UNIT).digest


BEFORE = {f"lib/{n}.so": random.Random(n).randbytes(16 * UNIT) for n in range(6)}


def target(store: FolderStore, digest: str, work: Path) -> tuple[Target, dict[str, Part]]:
    local = localize(store, digest, work)
    parts = {part.path.decode(): part for part in layout_of(local.meta)}
    return Target(digest, local.map_digest.hex(), local.map), parts


class Kin:
    """A store with a tree that was started, and its next build."""

    def __init__(self, tmp_path: Path, after: Mapping[str, bytes] | None = None) -> None:
        self.store, self.work = FolderStore(tmp_path / "store"), tmp_path / "work"
        self.work.mkdir()
        self.old = tree(self.store, tmp_path / "old", BEFORE)
        changed = {**BEFORE, "lib/0.so": bytes(100), "app.py": b"x" * UNIT} if after is None else after
        self.new = tree(self.store, tmp_path / "new", changed)
        self.before, parts = target(self.store, self.old, tmp_path / "look")
        self.after, self.parts = target(self.store, self.new, tmp_path / "look")
        touches = tuple(Touch(n, 7, parts[f"lib/{n}.so"].unit + 4, 8) for n in (3, 1, 4))
        self.trace = Trace(self.old, self.before.map.size, 5, True, touches)
        assert library.publish(self.store, JOB, self.trace, self.before.map) == "published"

    def more_jobs(self, count: int, different: int = 8) -> None:
        """Others, whose names come first in a listing, and that were started long ago."""
        for number in range(count):
            touches = (Touch(number, 7, self.trace.touches[0].unit, 1 + number % different),)
            trace = Trace(self.old, self.before.map.size, 6 + number, True, touches)
            key = ProfileKey(f"job-{number}")
            assert library.publish(self.store, key, trace, self.before.map) == "published"
            for info in self.store.list(key.prefix(self.old)):
                os.utime(self.store.root / info.key, (number, number))

    def predict(self) -> str:
        return predict_profiles(self.store, self.new, [self.new, "ef" * 32, self.old], work=self.work)


def test_the_next_build_has_a_predicted_trace_and_its_hot_pack(tmp_path: Path) -> None:
    kin = Kin(tmp_path)
    assert kin.predict() == kin.old
    (found,) = library.load_own(kin.store, kin.new, JOB, kin.after.map.size)
    first = [kin.parts[f"lib/{n}.so"].unit + 4 for n in (1, 3, 4)]
    assert sorted(touch.unit for touch in found.touches) == sorted(first)
    assert (found.source, found.complete) == (kin.old, False)
    pack = library.newest_pack(kin.store, JOB.prefix(kin.new), kin.after)
    assert pack is not None
    assert set(pack.pack.blocks) == {unit // BLOCK + more for unit in first for more in (0, 1)}
    assert kin.predict() == "", "there is a profile now"


def test_of_many_jobs_those_that_were_started_last_are_predicted(tmp_path: Path) -> None:
    kin = Kin(tmp_path)
    kin.more_jobs(9)
    assert kin.predict() == kin.old
    folders = {info.key.split("/")[2] for info in kin.store.list(f"profiles/{kin.new}")}
    assert folders == {JOB.folder, *(f"job-{number}" for number in range(2, 9))}


def test_jobs_that_touch_the_same_count_as_one(tmp_path: Path) -> None:
    """Of whom each start has a name of its own, as with the day in it, crowds out nobody; and reads end."""
    kin = Kin(tmp_path)
    kin.more_jobs(40, different=1)
    merged = predict_blocks(kin.store, kin.new, [kin.old], ProfileKey("never seen"), cache_dir=kin.work)
    assert set(merged) == {kin.parts[f"lib/{n}.so"].unit // BLOCK + more for n in (1, 3, 4) for more in (1, 2)}
    assert kin.predict() == kin.old
    found = [info.key.split("/")[2:] for info in kin.store.list(f"profiles/{kin.new}")]
    for kind in (".pack", ".trace"):  # with a trace of its own and no pack, a start would not take another's
        assert {job for job, name in found if name.endswith(kind)} == {JOB.folder, "job-39"}


def test_a_first_start_is_foretold_from_its_own_job_alone(tmp_path: Path) -> None:
    kin = Kin(tmp_path)
    kin.more_jobs(9)
    starts = {
        key: predict_blocks(kin.store, kin.new, [kin.old], ProfileKey(key), cache_dir=kin.work)
        for key in ("job-0", JOB.job, "never seen")
    }
    base = {n: kin.parts[f"lib/{n}.so"].unit // BLOCK + 1 for n in (3, 1, 4)}
    assert starts["job-0"] == [base[3]]
    assert starts[JOB.job] == [base[n] + more for n in (1, 3, 4) for more in (0, 1)]
    assert set(starts["never seen"]) == set(starts[JOB.job])


def test_a_recorded_start_takes_the_place_of_the_prediction(tmp_path: Path) -> None:
    kin = Kin(tmp_path)
    kin.predict()
    part = kin.parts["lib/5.so"]
    own = Trace(kin.new, kin.after.map.size, 9, True, (Touch(0, 3, part.unit, 4),))
    assert library.publish(kin.store, JOB, own, kin.after.map) == "published"
    assert library.load_own(kin.store, kin.new, JOB, kin.after.map.size) == [own]


def test_who_shares_next_to_nothing_foretells_nothing(tmp_path: Path) -> None:
    kin = Kin(tmp_path, {"lib/1.so": BEFORE["lib/1.so"], **{f"other/{n}": random.Random(n).randbytes(9) for n in "ab"}})
    assert kin.predict() == ""
    assert not library.has_traces(kin.store, f"profiles/{kin.new}")


def test_of_kin_with_much_more_metadata_none_is_read(tmp_path: Path) -> None:
    """Whoever writes to the store may make a tree kin of others, and a start reads in the background what that has."""
    kin = Kin(tmp_path)
    fat = tree(kin.store, tmp_path / "fat", {**BEFORE, **{f"many/{n}": b"" for n in range(3000)}})
    about, parts = target(kin.store, fat, tmp_path / "look")
    trace = Trace(fat, about.map.size, 5, True, (Touch(0, 7, parts["lib/3.so"].unit + 4, 8),))
    assert library.publish(kin.store, JOB, trace, about.map) == "published"
    assert predict_profiles(kin.store, kin.new, [fat], work=kin.work) == ""
    assert not (kin.work / "trees" / fat / "meta").exists()
    assert predict_profiles(kin.store, kin.new, [fat, kin.old], work=kin.work) == kin.old


def test_without_the_blocks_in_time_there_is_a_trace_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: object, **named: object) -> bool:
        raise UnavailableError("not all came in time")

    monkeypatch.setattr("bootseer.blocks.fetch.predict.fetch_all", late)
    kin = Kin(tmp_path)
    assert kin.predict() == kin.old
    assert library.has_traces(kin.store, JOB.prefix(kin.new))
    assert library.newest_pack(kin.store, JOB.prefix(kin.new), kin.after) is None


def test_a_start_does_not_wait_for_a_slow_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Red before: what was foretold took as long as the store, however long that was."""
    kin = Kin(tmp_path)
    kin.more_jobs(20)
    slow = RateLimitedStore(kin.store, rate=1e6, latency=0.05)
    monkeypatch.setattr("bootseer.blocks.fetch.predict.START_SECONDS", 0.5)
    began = time.monotonic()
    assert predict_profiles(slow, kin.new, [kin.old], work=kin.work, seconds=0.5) == ""
    assert predict_blocks(slow, kin.new, [kin.old], ProfileKey("never seen"), cache_dir=tmp_path / "cache") == []
    assert time.monotonic() - began < 2
    assert not library.has_traces(kin.store, f"profiles/{kin.new}")
    assert caplog.text.count("it takes longer than 0.5 s") == 2
    assert predict_profiles(slow, kin.new, [kin.old], work=kin.work) == kin.old


def test_a_start_does_not_look_for_long_who_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: a store that is slow to list was asked of each tree."""
    kin, asked = Kin(tmp_path), list[str]()
    monkeypatch.setattr(library, "has_traces", lambda _, folder: asked.append(folder) or time.sleep(0.05) or False)
    assert predict_profiles(kin.store, kin.new, [f"{n:064x}" for n in range(15)], work=kin.work, seconds=0.2) == ""
    assert 2 <= len(asked) <= 6


def test_starts_that_read_more_than_can_be_held_foretell_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kin = Kin(tmp_path)
    monkeypatch.setattr("bootseer.blocks.fetch.predict.MAX_UNITS", 23)
    assert kin.predict() == ""
    monkeypatch.setattr("bootseer.blocks.fetch.predict.MAX_UNITS", 24)
    assert kin.predict() == kin.old


def test_trouble_costs_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kin = Kin(tmp_path)
    for info in kin.store.list("blobs"):
        (tmp_path / "store" / info.key).write_bytes(b"damaged")
    assert kin.predict() == ""
    assert "no profile is predicted for tree" in caplog.text
