"""A check of the result: before a publication, and after a restore, where it puts a snapshot in quarantine for all."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bootseer import env
from bootseer.config import Config
from bootseer.env import EnvResult, Outcome, quarantine, snapshots
from bootseer.errors import NotFoundError, UnavailableError
from bootseer.objects.folder import FolderStore
from support import envnode, keys

CHECK_FAILS = "missed because the snapshot is quarantined on this node: its check ended with exit code 3"
FOR_ALL = "the snapshot is quarantined for all nodes: its check ended with exit code 3"


class Site:
    """Nodes that unpack; the command writes how often it ran."""

    def __init__(self, root: Path) -> None:
        self.root, self.store, self.runs, self.seen = root, root / "store", 0, list[str]()
        self.settings: dict[str, str] = {}

    def made(self, node: str) -> Path:
        return self.root / node / "target/made"

    def run(self, node: str, code: int | None = None, **changed: object) -> EnvResult:
        """The check ends with ``code``; None: there is none."""

        def command() -> int:
            self.runs += 1
            self.made(node).parent.mkdir(parents=True, exist_ok=True)
            self.made(node).write_text(f"{self.runs}")
            return 0

        def check() -> int:
            assert code is not None
            self.seen.append(self.made(node).read_text())
            return code

        return env.run(
            envnode.spec_for(self.root / node / "target", restore="unpack", **changed),
            command,
            store_url=str(self.store),
            config=msgspec.structs.replace(envnode.config_in(self.root / node), **self.settings),
            check=None if code is None else check,
        )

    def marks(self) -> list[Path]:
        return list(self.store.glob("env/snapshots/*/*.refused"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("background", [False, True])
def test_what_fails_its_check_is_not_published(site: Site, background: bool) -> None:
    result = site.run("a", 3, background=background)
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert result.reason.endswith("; not published: its check ended with exit code 3")
    assert not snapshots.names(FolderStore(site.store))
    assert site.run("b", 0).outcome is Outcome.RAN_AND_PUBLISHED
    assert site.run("c", 0).outcome is Outcome.RESTORED_UNPACK
    assert site.seen == ["1", "2", "2"]


def test_a_check_that_cannot_be_run_publishes_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise UnavailableError("no container runtime")

    site.run("a")
    monkeypatch.setattr("bootseer.env.execution.Execution.checked", fails)
    result = site.run("b", 0)
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert not site.marks()


def test_a_restored_snapshot_that_fails_its_check_is_in_quarantine_for_all_until_the_next(site: Site) -> None:
    assert site.run("a").outcome is Outcome.RAN_AND_PUBLISHED
    assert site.run("b", 3).reason.startswith(CHECK_FAILS)
    assert len(site.marks()) == 1
    assert site.made("b").read_text() == "2"
    result = site.run("c")  # which has no check
    assert (result.outcome, result.reason) == (Outcome.RAN_AND_PUBLISHED, "missed because " + FOR_ALL)
    assert site.runs == 3
    for node in "bd":
        assert site.run(node, 0).reason == "hit"
        assert site.made(node).read_text() == "3"
    (name,) = snapshots.names(FolderStore(site.store))
    snapshots.remove(FolderStore(site.store), [name])
    assert not [path for path in site.store.glob("env/snapshots/**/*") if path.is_file()]


def test_what_was_unpacked_is_taken_back_before_the_command_runs(site: Site) -> None:
    site.run("a")
    target = site.root / "b/target"
    seen = []

    def check() -> int:
        seen.append(sorted(path.name for path in target.iterdir()))
        (target / "pyc").touch()
        return 1

    def command() -> int:
        seen.append([path.name for path in target.iterdir() if path.name != "pyc"])
        return 7

    spec, config = envnode.spec_for(target, restore="unpack", background=True), envnode.config_in(site.root / "b")
    assert env.run(spec, command, store_url=str(site.store), config=config, check=check).exit_code == 7
    assert seen == [["made"], []]


@pytest.mark.parametrize("code", [126, 127, 137])
def test_who_was_ended_or_could_not_be_run_says_nothing_to_others(site: Site, code: int) -> None:
    site.run("a")
    assert f"exit code {code}" in site.run("b", code).reason
    assert not site.marks()


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 60000, b'{"snapshot":"x","why":"y"}', b"\xff", b"x" * (1 << 20)])
def test_a_mark_that_is_none_is_not_believed(site: Site, text: bytes) -> None:
    site.run("a")
    store = FolderStore(site.store)
    (name,) = snapshots.names(store)
    mark = site.store / quarantine.shared_key(snapshots.load(store, name))
    mark.write_bytes(text)
    assert site.run("b").reason == "hit"


def test_a_mark_ends_no_start_that_may_not_run_the_command(site: Site) -> None:
    site.run("a")
    site.run("b", 3)
    for mark in site.marks():
        found = snapshots.names(FolderStore(site.store))
        assert len(found) == 1
        # as if a neighbour had marked the good one
        one = snapshots.load(FolderStore(site.store), found[0])
        mark.unlink()
        quarantine.tell(FolderStore(site.store), one, "out of malice", Config())
    assert site.run("c", 0, frozen=True).reason == "hit"
    with pytest.raises(NotFoundError, match="exit code 3"):
        site.run("d", 3, frozen=True)


def test_with_keys_only_signed_marks_count(site: Site, tmp_path: Path) -> None:
    site.settings = both = keys.pair(tmp_path)
    site.run("a")
    store = FolderStore(site.store)
    (name,) = snapshots.names(store)
    quarantine.tell(store, snapshots.load(store, name), "out of malice", Config())
    (mark,) = site.marks()
    assert site.run("b").reason == "hit"

    mark.unlink()
    site.settings = {"verify_key": both["verify_key"]}
    assert CHECK_FAILS in site.run("c", 3).reason
    assert CHECK_FAILS in site.run("c", 0).reason
    assert not site.marks()
    assert site.run("d", 0).reason == "hit"

    quarantine.tell(
        store,
        snapshots.load(store, name),
        "its check ended with exit code 3",
        msgspec.structs.replace(Config(), **both),
    )
    assert FOR_ALL in site.run("e").reason
