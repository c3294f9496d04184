"""Out of whose share a user number of the node daemon is served."""

from __future__ import annotations

import os
import pwd
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from bootseer.node import accounts
from bootseer.node.accounts import ROOT, UNKNOWN, Accounts


def test_whose_a_number_is(tmp_path: Path) -> None:
    lent = tmp_path / "subuid"
    lines = [
        "daemon:4000000000:1000",
        "1:4000100000:5",
        "nonesuch:4000200000:9",
        "",
        "noise",
        "a:b:c",
        "daemon:4000300000",
    ]
    lent.write_text("\n".join(lines))
    found = Accounts(lent)
    assert found.of(0) == ROOT
    assert found.of(1) == "user 1"
    for uid in (4000000000, 4000000999, 4000100004):
        assert found.of(uid) == "user 1", "lent to daemon"
    for uid in (4000001000, 4000100005, 4000200000, 4000300000, 1 << 40):
        assert found.of(uid) == UNKNOWN
    lent.unlink()
    assert Accounts(lent).of(4000000000) == UNKNOWN
    assert found.of(4000000000) == "user 1", "it is looked up once a minute"


def test_the_file_is_read_again_only_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the numbers that are lent to somebody are one answer."""
    lent, reads, names = tmp_path / "subuid", list[Path](), list[object]()
    real = Path.read_text

    def read(self: Path, **options: Any) -> str:
        reads.append(self)
        return real(self, **options)

    def named(self: Accounts, person: int | str) -> str:
        names.append(person)
        return "user 1" if person == "daemon" else UNKNOWN

    lent.write_text("daemon:4000000000:1000\n")
    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(Accounts, "_look", named)
    found = Accounts(lent)
    assert {found.of(uid) for uid in range(4000000000, 4000001000)} == {"user 1"}
    assert found.of(4000001000) == UNKNOWN
    assert (len(reads), names) == (1, ["daemon", 4000001000])
    lent.write_text("daemon:4000000000:1000\ndaemon:4000001001:10\n")
    assert found.of(4000001001) == "user 1"
    assert len(reads) == 2


def test_what_is_known_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def nobody(self: Accounts, uid: int) -> str:
        asked.append(uid)
        return UNKNOWN

    monkeypatch.setattr(accounts, "_MOST", 10)
    monkeypatch.setattr(Accounts, "_look", nobody)
    found = Accounts(tmp_path / "none")
    for uid in [*range(1, 31)] * 2:
        assert found.of(uid) == UNKNOWN
    assert len(asked) == 60


def test_a_name_service_that_never_answers_costs_a_second_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = Accounts(tmp_path / "none")
    assert found.of(1) == "user 1"
    assert found.of(1 << 40) == UNKNOWN

    def hangs(_: object) -> pwd.struct_passwd:
        time.sleep(60)
        raise KeyError

    monkeypatch.setattr(accounts.pwd, "getpwuid", hangs)
    began = time.monotonic()
    assert [found.of(uid) for uid in (1, 2, 3, 1 << 40)] == ["user 1", "user 2", "user 3", UNKNOWN]
    for known in (1, 1 << 40):  # what was known is known on when its time is over
        found._known[known] = 0.0, found._known[known][1]
    assert (found.of(1), found.of(1 << 40)) == ("user 1", UNKNOWN)
    assert time.monotonic() - began < 3
    assert caplog.text.count("does not say who user") == 1


def test_a_daemon_with_many_descriptors_knows_its_users(tmp_path: Path) -> None:
    """select(2) takes none above 1023."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most[1], 4096), most[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
    try:
        assert Accounts(tmp_path / "none").of(1) == "user 1"
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


@pytest.mark.parametrize("files", [256, 1024, 65536, 1 << 20])
def test_users_leave_root_enough_descriptors(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    most = accounts.totals()
    assert 2 * most.connections + most.mounts + 2 * most.running <= files * 2 / 3
