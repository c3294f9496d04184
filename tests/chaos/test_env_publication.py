"""A publication that is killed at any step beside the job: the job ends right, nothing half-published is seen, nothing
is left, and the next start restores or runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from bootseer.env import overlay
from support.waits import until

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

COMMAND = "mkdir -p env/pkg; head -c 3000000 /dev/zero | tr '\\0' x > env/pkg/data; sleep $SLEEPS; echo made > env/late"
JOB = """
set -e
bootseer env run --target env --json --wait 0 $OPTIONS -- sh -c "$COMMAND" > answer
[ -z "$WRITES" ] || echo of the job > env/late
sleep 1
cat env/pkg/data | wc -c
"""


@pytest.mark.parametrize(
    ("point", "restore"),
    [
        ("early", "mount"),
        ("before-capture", "mount"),
        ("before-manifest", "mount"),
        ("after-manifest", "mount"),
        ("before-capture", "unpack"),
    ],
)
def test_a_publication_killed_beside_the_job_hurts_nobody(tmp_path: Path, point: str, restore: str) -> None:
    """What the store has after each step, see ``unit/test_env_stage``."""
    store = tmp_path / "store"

    def node(name: str, **faults: str) -> tuple[str, Path]:
        home = tmp_path / name
        home.mkdir(exist_ok=True)
        environ = {**os.environ, "BOOTSEER_STORE": str(store), "COMMAND": COMMAND, **faults}
        environ |= {"BOOTSEER_CACHE_DIR": f"{home}/cache", "BOOTSEER_STATE_DIR": f"{home}/state"}
        early = faults and point == "early"  # files that are two seconds old are stored beside the command
        environ |= {"OPTIONS": f"--restore {restore}", "SLEEPS": "3" if early else "0"}
        environ["WRITES"] = "yes" if restore == "mount" else ""  # else the snapshot would be given up
        work = tmp_path / name / "work"
        work.mkdir(exist_ok=True)
        done = subprocess.run(["sh", "-c", JOB], cwd=work, env=environ, capture_output=True, text=True, timeout=90)
        assert (done.returncode, done.stdout.strip()) == (0, "3000000"), done.stderr
        assert (work / "env/late").read_text() == ("of the job\n" if restore == "mount" else "made\n")
        return str(msgspec.json.decode((work / "answer").read_bytes())["outcome"]), home

    def publishing(home: Path) -> bool:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = f"BOOTSEER_STATE_DIR={home}/state\0".encode() in (process / "environ").read_bytes()
                if ours and b"bootseer.env.publisher" in (process / "cmdline").read_bytes():
                    return True
        return False

    def released(home: Path) -> None:
        until(lambda: not publishing(home), 200, "the end of the publication")
        for group in overlay.groups(home / "state"):
            group.unmount()
            assert not group.area.exists()
        left = [path.name for path in (home / "work").iterdir() if path.name.startswith(".bootseer-")]
        assert not left or restore == "unpack"

    outcome, home = node("one", BOOTSEER_FAULTS=f"env.publish.{point}=kill")
    assert outcome == "ran-and-publishing" or point == "early"
    released(home)
    whole = bool(list(store.glob("env/snapshots/*/*.json")))
    assert whole == (point == "after-manifest")
    subprocess.run(["rm", "-rf", str(home / "work/env")], check=True)
    outcome, home = node("one")
    assert outcome == (f"restored-{restore}" if whole else "ran-and-publishing")
    until(lambda: not list((home / "work").glob(".bootseer-*")), 200)  # in which the publication stages, without mounts
    released(home)
    until(lambda: bool(list(store.glob("env/snapshots/*/*.json"))), 200)
    subprocess.run(["rm", "-rf", str(home / "work/env")], check=True)
    assert node("one")[0] == f"restored-{restore}"
    released(home)
