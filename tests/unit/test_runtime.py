"""Probes of container runtimes: what is remembered of one that failed."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import pytest

from bootseer.image import runtime


@pytest.mark.parametrize(
    ("reason", "seccomp"), [("fork: out of memory", True), ("unable to load SECCOMP filter", False)]
)
def test_only_a_runtime_that_says_so_has_no_seccomp_until_the_next_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, seccomp: bool
) -> None:
    fails = [True]

    class Bundle:
        def __init__(self, path: str, state: Path, document: dict[str, dict[str, object]]) -> None:
            self.bad = "seccomp" in document["linux"] and fails[0]

        def __enter__(self) -> Bundle:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
        ) -> None:
            pass

        def run(self, **_: object) -> int:
            return int(self.bad)

        def failure(self) -> str:
            return reason

    program = tmp_path / "runc"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setattr(runtime, "Bundle", Bundle)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    found = runtime.find(tmp_path, str(program))
    assert (found.works, found.seccomp) == (True, seccomp)
    fails[0] = False
    again = runtime.find(tmp_path, str(program))
    assert (again.seccomp, again.reason) == (seccomp, "" if seccomp else reason)
