"""Shared by all suites: what a test needs, where it runs, the servers of a run; a check that it left nothing behind."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from bootseer.config import Config
from bootseer.env import publication
from bootseer.hdfs.namenode import NameNode
from bootseer.kernel import background, mount
from support import forked, hadoop, needs
from support.hadoop import HadoopCluster
from support.registry import DockerRegistry
from support.waits import until

LONGEST_FIRST = ("store", "cluster", "chaos", "node", "unit")
"""The suites, in the order of their start."""
ALONE = tuple(
    f"test_{name}.py" for name in ("stripefs_faults", "registry_access", "registry_store", "imports", "package")
)
"""Modules with servers of their own, in suites whose modules share one; and two that read or build all sources once."""
WITH_STORES = "test_csi.py"
"""A module of another suite that needs the HDFS of the suite ``store``: five JVMs less to start."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that imports torch compiles it anew
sys.dont_write_bytecode = False
# JVMs that live for a minute: the second compiler costs more than it saves. Benchmarks run without this.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")

_STARTING = (background, publication)
for module in _STARTING:  # servers and publications of tests
    module.subprocess = forked.subprocesses  # type: ignore[attr-defined]

_MORE = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
hypothesis.settings.register_profile("quick", max_examples=40, stateful_step_count=20, **_MORE)
hypothesis.settings.register_profile("soak", max_examples=400, stateful_step_count=40, **_MORE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also what is slow and rare, and many more examples")
    parser.addoption("--clients", action="store_true", help="also those of client programs (scripts/test --clients)")
    parser.addoption("--fuzz-seconds", type=float, default=600.0, help="with --soak: for all decoders that are fuzzed")


def pytest_configure(config: pytest.Config) -> None:
    """Give the run mounts of its own: other runs do not see them, nor we theirs, and they end with the run; and a node
    cache, which reads of striped files fill."""
    cache = tempfile.mkdtemp(prefix="bootseer-pytest-", dir="/var/tmp")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["BOOTSEER_CACHE_DIR"] = cache
    hypothesis.settings.load_profile("soak" if config.option.soak else "quick")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what we start would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.geteuid() == 0 and mount.private_namespace():
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, timeout=10)


# -- which tests run, and beside which ---------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Most tests wait more than they compute."""
    return min(2 * len(os.sched_getaffinity(0)), 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Tests that share a server or an image run in one process, one after the other; unit tests in any."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path, suite = nodeid.partition("::")[0], _suite(nodeid)
            if path.endswith(WITH_STORES) or (suite == "unit" and "[hdfs" in nodeid):  # one HDFS less to start
                return "store"
            if suite == "unit" and not path.endswith(ALONE):
                return nodeid
            return path if suite in ("node", "cluster") or path.endswith(ALONE) else suite

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason, and leave out what is for ``--soak`` and ``--clients``."""
    items.sort(key=lambda item: LONGEST_FIRST.index(_suite(item.nodeid)))
    for item in items:
        for reason in needs.missing({mark.name for mark in item.iter_markers()}):
            item.add_marker(pytest.mark.skip(reason=reason))
    without = [name for name in ("soak", "clients") if not config.getoption(name)]
    if left := [item for item in items if any(map(item.get_closest_marker, without))]:
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)
        config.stash[_LEFT] = len(left)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All that is collected stays; to look through it again and again would take half of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


_LEFT = pytest.StashKey[int]()


def _suite(nodeid: str) -> str:
    return nodeid.split("/")[1]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(_LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    output = getattr(node, "workeroutput", {})
    node.config.stash[_LEFT] = output.get("left", 0)  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, 0):
        terminalreporter.write_line(f"{left} tests were left to --soak and --clients")


def pytest_runtest_logreport(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Note a failure for `support.again`, which runs the test, or the module that was not read, once more."""
    path = os.environ.get("BOOTSEER_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        said = "\n".join([report.longreprtext, *(f"-- {name}\n{text}" for name, text in report.sections)])
        with open(path, "a") as out:
            out.write(json.dumps([report.nodeid, said]) + "\n")


pytest_collectreport = pytest_runtest_logreport


# -- servers of the whole run ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def cluster() -> HadoopCluster:
    """HDFS for all tests of this process: who freezes or kills a DataNode brings it back."""
    return hadoop.shared()


@pytest.fixture
def namenode(cluster: HadoopCluster) -> NameNode:
    return NameNode.connect(cluster.url)


@pytest.fixture
def folder() -> str:
    """A folder in HDFS that nobody has used."""
    return f"/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def registry() -> Iterator[DockerRegistry]:
    """For all tests of this process: each uses repositories of its own and leaves the server as it is."""
    with DockerRegistry() as running:
        yield running


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a node that has nothing yet."""
    return Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and publications of this process are children of it, and load their modules."""
    for module in _STARTING:
        monkeypatch.setattr(module, "subprocess", subprocess)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder on a disk, where EROFS mounts files, that everybody can enter; mounts in it end with the test."""
    path = Path(tempfile.mkdtemp(prefix="bootseer-pytest-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    for entry in reversed(mount.below(path)):
        mount.unmount(entry.target, lazy=True, force=True)

    def gone() -> bool:  # a server may still store or remove its last recording there
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()

    until(gone, 10)


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
    for name in os.listdir("/proc"):  # no paths: all processes of the machine, twice for each test
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/cmdline", "rb", 0) as file:
                    line = file.read()
                server = b"bootseer.blocks.serving.server" in line or b"bootseer.fsmount" in line
                if server and _RUN.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.add(int(name))
            except OSError:
                continue
    return found


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
    mounts, servers, began = _mounts(), _servers(), 0.0
    yield
    while (left := (_mounts() - mounts, _servers() - servers)) != (set(), set()):
        # a server ends behind an unmount that waited for it long enough, or finishes a hot pack there
        began = began or time.monotonic()
        patience = 20.0 if left[0] or any(_name(pid) == "bootseer-pack" for pid in left[1]) else 1.0
        if time.monotonic() > began + patience:
            break
        time.sleep(0.01)
    assert left == (set(), set())
