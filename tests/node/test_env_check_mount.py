"""`env run --check` with mounts: what is tried is what the job will see, and what it writes is in no snapshot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import envnode
from support.waits import until

pytestmark = pytest.mark.root


class Nodes:
    """Which share a store, and one path of the target."""

    def __init__(self, root: Path) -> None:
        self.root, self.target, self.node = root, root / "t", ""
        (root / "work").mkdir()

    def run(self, node: str, check: str, *more: str) -> str:
        """What is said of the result; the exit code is 0."""
        self.node = node
        environ = {**os.environ, "BOOTSEER_STORE": f"{self.root}/store"}
        environ |= {"BOOTSEER_CACHE_DIR": f"{self.root}/{node}/c", "BOOTSEER_STATE_DIR": f"{self.root}/{node}/s"}
        script = f"mkdir -p {self.target}; date +%s%N > {self.target}/made"
        words = [sys.executable, "-m", "bootseer.cli.main", "env", "run", "--target", str(self.target), *more]
        words += ["--check", check] if check else []
        done = subprocess.run(
            [*words, "--", "sh", "-c", script],
            cwd=self.root / "work", env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stderr

    def published(self) -> bool:
        return bool(list(self.root.glob("store/env/snapshots/*/*.json")))

    def release(self) -> None:
        envnode.release(self.root / self.node / "s")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.release()


def test_a_result_is_tried_before_others_get_it(nodes: Nodes) -> None:
    good, bad = f"sh -c 'cat {nodes.target}/made && touch {nodes.target}/tried'", "sh -c 'exit 3'"
    assert "not published: its check ended with exit code 3" in nodes.run("a", bad)
    assert "missed" in nodes.run("a", good)  # and not "already in place"
    until(nodes.published, 60)
    assert (nodes.target / "tried").exists()
    first = (nodes.target / "made").read_text()
    nodes.release()

    assert "restored-mount" in nodes.run("b", "")
    assert {path.name for path in nodes.target.iterdir()} == {"made"}
    assert (nodes.target / "made").read_text() == first
    nodes.release()

    other = f"sh -c '! grep -q {first.strip()} {nodes.target}/made'"
    said = nodes.run("c", other, "--no-background")
    assert "quarantined on this node: its check ended with exit code 1" in said
    assert "ran-and-published" in said
    second = (nodes.target / "made").read_text()
    assert second != first
    nodes.release()

    assert "restored-mount" in nodes.run("d", other)
    nodes.release()
    assert "restored-mount" in nodes.run("b", "")
    assert (nodes.target / "made").read_text() == second
