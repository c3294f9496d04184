"""Programs of the libraries that jobs save with, on a mount and by URL: save, `kill -9` within a save, go on.

docs/reference/clients.md is the list. Runs with `scripts/test --clients`, which makes their environments.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import fsmount
from bootseer.config import Config
from bootseer.stripefs import open_fs
from support import devcache, hadoop

pytestmark = [pytest.mark.root, pytest.mark.clients, pytest.mark.timeout(600)]

HERE = Path(__file__).parents[1] / "clients"
PAGE = HERE.parents[1] / "docs/reference/clients.md"
PLACES = devcache.folder("clients")
WAYS = {
    "TorchSave": ("mount", "url", "ours"),
    "Dcp": ("mount", "url", "ours"),
    "Safetensors": ("mount", "url", "ours"),
    "Pretrained": ("mount",),
    "trainer": ("mount",),
    "lightning": ("mount", "url"),
    "accelerate": ("mount",),
    "Orbax": ("mount",),
    "Tensorizer": ("mount", "url"),
    "Pyarrow": ("mount", "url"),
    "Pandas": ("mount", "url"),
    "Zarr": ("mount", "url"),
    "Datasets": ("mount", "url"),
}
STEPS, KILLED_AT = 5, 3
CASES = [(client, way, versions) for client, ways in WAYS.items() for way in ways for versions in ("newest", "oldest")]


class Job:
    """One run of a client's program; ``saved``: the number of its last save that came to its end."""

    def __init__(self, versions: str, scratch: Path, *argv: object) -> None:
        self.saved = 0
        self._errors = scratch / f"{uuid.uuid4().hex}.err"
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch / "hf"), "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_VERBOSITY": "error", "JAX_PLATFORMS": "cpu", "PYTHONPATH": "",
            "PATH": "/usr/sbin:/usr/bin:/bin",
        }  # fmt: skip
        command = [PLACES / versions / "bin/python", "-W", "ignore", HERE / "program.py", *map(str, argv)]
        with open(self._errors, "w") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=scratch
            )

    def _until(self, line: str) -> str:
        assert self._process.stdout is not None
        said = ""
        for said in self._process.stdout:
            if said.startswith("saved "):
                self.saved = int(said.split()[1])
            if line and said.strip() == line:
                break
        return said

    def kill_within(self, number: int, delay: float) -> None:
        with self._process:
            self._until(f"saving {number}")
            time.sleep(delay)
            self._process.kill()
            self._until("")

    def result(self) -> dict[str, object]:
        with self._process:
            said = self._until("")
        assert self._process.returncode == 0, self._errors.read_text()[-6000:]
        found: dict[str, object] = json.loads(said)
        return found


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="bootseer-pytest-clients-", dir="/var/tmp"))
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module", params=["folder", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def mounted(request: pytest.FixtureRequest, scratch: Path) -> Iterator[tuple[Path, str]]:
    """A mount for writing, and the URL of its store."""
    place = scratch / request.param
    place.mkdir()
    url = str(place / "store") if request.param == "folder" else f"{hadoop.shared().url}/{uuid.uuid4().hex}"
    open_fs(url).backend.make_folder("")
    config = Config(cache_dir=str(place / "cache"), state_dir=str(place / "state"))
    made = fsmount.start(url, place / "mnt", config=config, writable=True, spool=256 << 20)
    yield made.mountpoint, url
    made.unmount()


@pytest.fixture(scope="module")
def right() -> dict[tuple[str, str], object]:
    """What each client computes on a folder of the node, without bootseer below it."""
    return {}


@pytest.mark.parametrize(("client", "way", "versions"), CASES)
def test_a_killed_job_goes_on(mounted, scratch, right, client, way, versions):
    mountpoint, url = mounted
    name = f"{client}-{way}-{versions}"
    if (client, versions) not in right:
        local = tempfile.mkdtemp(prefix=f"right-{client}-{versions}-", dir=scratch)
        right[client, versions] = Job(versions, scratch, client, "mount", local, local, STEPS).result()["digest"]
    (mountpoint / name).mkdir()
    store = f"{url}/{name}"
    place = mountpoint / name if way == "mount" else f"bsx+{store if '://' in store else f'file://{store}'}"
    delay = random.uniform(0, 0.15)
    first = Job(versions, scratch, client, way, place, store, STEPS)
    first.kill_within(KILLED_AT, delay)
    assert first.saved >= KILLED_AT - 1, first._errors.read_text()[-6000:]
    found = Job(versions, scratch, client, way, place, store, STEPS).result()
    assert first.saved <= found["began"] <= STEPS, (first.saved, found, delay)
    assert found["digest"] == right[client, versions], (found, delay)
    open_fs(store).verify()


def test_the_page_says_these_versions() -> None:
    listed = re.findall(r"^\| ([a-z-]+)[^|]* \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text(), re.MULTILINE)
    for column, versions in ((1, "newest"), (2, "oldest")):
        pinned = dict(line.split("==") for line in (HERE / f"{versions}.txt").read_text().split())
        assert {row[0]: row[column] for row in listed}.items() <= pinned.items()
    assert len(listed) == len(WAYS)
