"""Shared by all suites: what a test needs, where it runs, the servers of a run; a check that it left nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from support import needs
from support.registry import DockerRegistry

LONGEST_FIRST = ("cluster", "store", "chaos", "node", "unit")

_MORE = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
hypothesis.settings.register_profile("quick", max_examples=40, stateful_step_count=20, **_MORE)
hypothesis.settings.register_profile("soak", max_examples=400, stateful_step_count=40, **_MORE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also what is slow and rare, and many more examples")


def pytest_configure(config: pytest.Config) -> None:
    """Give the run mounts of its own: other runs do not see them, nor we theirs, and they end with the run."""
    from bootseer.kernel.mount import private_namespace

    hypothesis.settings.load_profile("soak" if config.option.soak else "quick")
    if os.geteuid() == 0 and private_namespace():
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, timeout=10)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Most tests wait more than they compute."""
    return min(2 * len(os.sched_getaffinity(0)), 8)


# -- which tests run, and beside which ---------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, leave out what is for ``--soak``, and group what shares a server."""
    items.sort(key=lambda item: LONGEST_FIRST.index(_suite(item)))
    for item in items:
        for reason in needs.missing({mark.name for mark in item.iter_markers()}):
            item.add_marker(pytest.mark.skip(reason=reason))
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
    if not config.option.soak:
        left = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)
        config.stash[_LEFT] = len(left)


_LEFT = pytest.StashKey[int]()


def _suite(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def _group(item: pytest.Item) -> str:
    """Tests of one group run one after the other in one process; unit tests run anywhere."""
    if item.get_closest_marker("xdist_group") or _suite(item) == "unit":
        return ""
    if item.get_closest_marker("hdfs") and _suite(item) in ("store", "cluster"):
        return "hdfs"  # one cluster for all of them
    return "chaos" if _suite(item) == "chaos" else item.path.stem


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(_LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    output = getattr(node, "workeroutput", {})
    node.config.stash[_LEFT] = output.get("left", 0)  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, 0):
        terminalreporter.write_line(f"{left} slow tests were left to --soak")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a failure for `support.again`, which runs the test once more."""
    path = os.environ.get("BOOTSEER_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        said = "\n".join([report.longreprtext, *(f"-- {name}\n{text}" for name, text in report.sections)])
        with open(path, "a") as out:
            out.write(json.dumps([report.nodeid, said]) + "\n")


# -- servers of the whole run ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def registry() -> Iterator[DockerRegistry]:
    """For all tests of this process: each uses repositories of its own and leaves the server as it is."""
    with DockerRegistry() as running:
        yield running


# -- nothing stays behind ----------------------------------------------------------------------------------------------
def _mounts() -> set[str]:
    """Mount points that are bootseer's or a test's; others on this machine come and go as they like."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split(" ")[4] for line in lines if "bootseer" in line or "pytest" in line}


_RUN = f"BOOTSEER_TEST_RUN={os.getpid()}"
os.environ["BOOTSEER_TEST_RUN"] = str(os.getpid())


def _servers() -> set[int]:
    """Block servers and mounts, however detached, that this test run started and that are still alive."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                ours = _RUN.encode() in (entry / "environ").read_bytes().split(b"\0")
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if ours and (b"bootseer.blocks.serving.server" in line or b"bootseer.stripefs" in line):
                found.add(int(entry.name))
    return found


def _await_packs(before: set[int]) -> None:
    """A server that finishes a hot pack behind the unmount ends by itself."""
    end = time.monotonic() + 20.0
    while time.monotonic() < end and any(_name(pid) == "bootseer-pack" for pid in _servers() - before):
        time.sleep(0.01)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a mount or a server process behind."""
    if not any(mark.name in ("root", "hdfs", "registry", "runtime") for mark in request.node.iter_markers()):
        yield
        return
    mounts, servers = _mounts(), _servers()
    yield
    assert _mounts() - mounts == set()
    _await_packs(servers)
    assert _servers() - servers == set()
