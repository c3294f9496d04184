"""The parts of a service: one that ends is started again alone, a mistake at the start ends all, and so does the end of
the first."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import ConfigError, PrivilegeError, UnavailableError
from bootseer.kernel import parts
from bootseer.kernel.child import Child
from support.waits import until

SCORES = {"first": 0, "other": 500}


class Service:
    """A first part that ends when the file ``drained`` is there, and another that lives."""

    def __init__(self, here: Path) -> None:
        self.parts, self.drained = parts.shared(["first", "other"]), here / "drained"
        self.runs: dict[str, Callable[[], object]] = {"first": self._first, "other": lambda: self._live("other")}
        self.code = here / "code"

    def _live(self, name: str) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        self.parts[name].serves = True
        while True:
            time.sleep(60)

    def _first(self) -> None:
        self.parts["first"].serves = True
        while not self.drained.exists():
            time.sleep(0.01)

    def start(self) -> Child:
        """The parent."""
        return Child("keeper", lambda: parts.keep(self.parts, self.runs, SCORES))

    def serves(self, name: str, starts: int) -> bool:
        return self.parts[name].serves and self.parts[name].starts == starts


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_one_that_is_killed_is_started_again_alone(service: Service) -> None:
    keeper = service.start()
    try:
        until(lambda: all(service.serves(name, 1) for name in service.parts), 30.0, "the start")
        pid = service.parts["other"].pid
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) >= 500
        assert Path(f"/proc/{pid}/comm").read_text() == "bootseer-other\n"
        for starts in (2, 3):
            os.kill(service.parts["other"].pid, signal.SIGKILL)
            until(lambda starts=starts: service.serves("other", starts), 30.0, "another start")
        os.kill(service.parts["first"].pid, signal.SIGKILL)
        until(lambda: service.serves("first", 2), 30.0, "another start of the first")
        assert service.serves("other", 3)
        pid = service.parts["other"].pid
        service.drained.touch()
        until(lambda: keeper.dead, 30.0, "the end")
        assert keeper.code == 0
        assert not Path(f"/proc/{pid}").exists()
    finally:
        keeper.end()


def test_all_end_with_the_parent(service: Service) -> None:
    keeper = service.start()
    until(lambda: all(service.serves(name, 1) for name in service.parts), 30.0, "the start")
    pids = [part.pid for part in service.parts.values()]
    keeper.end()
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids), 30.0, "their end")


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("no folder", hint="make it"), 78), (PrivilegeError("not root"), 77)]
)
def test_a_mistake_at_the_start(
    service: Service, error: Exception, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    service.runs["other"] = fail
    assert parts.keep(service.parts, service.runs, SCORES) == code
    assert capfd.readouterr().err.startswith("bootseer: ")
    assert not service.parts["other"].serves


@pytest.mark.parametrize("error", [UnavailableError("nobody answers"), OSError(28, "No space"), KeyError("bug")])
def test_what_may_pass_at_the_start(service: Service, tmp_path: Path, error: Exception) -> None:
    def fail_once() -> None:
        if not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise error
        service._live("other")

    service.runs["other"] = fail_once
    keeper = service.start()
    try:
        until(lambda: keeper.dead or service.serves("other", 2), 30.0, "another start")
        assert not keeper.dead
        assert service.serves("first", 1)
    finally:
        keeper.end()


def test_a_folder_is_served_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_LOCK_SECONDS", 0.05)
    with (
        parts.alone(tmp_path, "a snapshotter"),
        pytest.raises(ConfigError, match="a snapshotter serves"),
        parts.alone(tmp_path, "a snapshotter"),
    ):
        pass
    with parts.alone(tmp_path, "a snapshotter"):
        pass
