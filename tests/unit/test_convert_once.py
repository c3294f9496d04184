"""An image that many nodes convert at once: one of them does, whatever happens to it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bootseer import image, launch
from bootseer.chunks.manifest import tree_key
from bootseer.cli.verbs import assemble
from bootseer.config import Config
from bootseer.errors import ConfigError
from bootseer.launch.job import ImageTable, Job, JobTable
from bootseer.objects.folder import FolderStore
from support import forked, keys
from support.images import Member, write_image
from support.waits import until

NODES = """
import logging, os, sys
from pathlib import Path
from bootseer import image
from bootseer.errors import BootseerError
from bootseer.objects import lease
ref, store, work, count, wait = sys.argv[1:]
logging.basicConfig(filename=work + ".log")
lease.DEAD, lease.RENEWAL = {dead}, 0.5
for number in range(1, int(count)):
    if not os.fork():
        break
else:
    number = 0
os.environ["BOOTSEER_NODE"] = f"n{{number}}"
try:
    made = image.ensure(ref, store, work_dir=Path(work, str(number)), wait=float(wait))
    said = "converted" if made.fresh else "found"
except BootseerError as exc:
    said = f"{{exc.exit_code}} " + ("elsewhere" if "other nodes" in str(exc) else "here")
os.write(1, said.encode() + b"!")
"""


class Site:
    def __init__(self, place: Path) -> None:
        self.place, self.store = place, FolderStore(place / "store")
        write_image(place / "layout", [[Member("a", data=os.urandom(200_000))]], tag="v1")
        self.ref = f"oci:{place}/layout:v1"

    def nodes(self, count: int, dead: float = 15.0, wait: float = 600.0, **environ: str) -> subprocess.Popen[str]:
        words = (self.ref, self.store.url, str(self.place / "work"), str(count), str(wait))
        return forked.Popen(
            [sys.executable, "-c", NODES.format(dead=dead), *words],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            text=True,
        )

    def record(self) -> bytes:
        (found,) = (self.store.root / "images").iterdir()
        return found.read_bytes()

    def leases(self) -> list[str]:
        return [path.name for path in (self.store.root / "leases").rglob("*") if path.is_file()]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def await_stop(node: subprocess.Popen[str]) -> None:
    until(lambda: Path(f"/proc/{node.pid}/stat").read_text().split(") ")[1][0] == "T", 60)


def said(nodes: subprocess.Popen[str]) -> list[str]:
    return sorted(nodes.communicate(timeout=180)[0].strip("!").split("!"))


@pytest.mark.parametrize("point", ["lease.taken", "image.convert.after-layer", "image.convert.before-record"])
def test_a_leader_that_is_killed_is_replaced_by_one_other(site: Site, point: str) -> None:
    killed = site.nodes(1, BOOTSEER_FAULTS=f"{point}=kill")
    assert said(killed) == [""]
    assert killed.returncode == -signal.SIGKILL
    assert len(site.leases()) == 1
    assert said(site.nodes(3, dead=2.0)) == ["converted"] + ["found"] * 2
    assert site.leases() == []


@pytest.mark.parametrize(("lost", "point"), [(False, "before-record"), (True, "before-publish")])
def test_a_leader_that_was_stopped_and_goes_on_replaces_nothing(site: Site, lost: bool, point: str) -> None:
    """Also when both replace a record whose tree is gone."""
    if lost:
        site.store.delete(tree_key(image.ensure(site.ref, site.store.url, work_dir=site.place / "w").record.tree))
    stopped = site.nodes(1, BOOTSEER_FAULTS=f"image.convert.{point}=stop")
    await_stop(stopped)
    assert said(site.nodes(2, dead=1.0)) == ["converted", "found"]
    before = site.record()
    stopped.send_signal(signal.SIGCONT)
    assert said(stopped) == ["found"]
    assert site.record() == before


def test_after_two_nodes_that_fail_each_tries_it(site: Site) -> None:
    """What others say of a failure is no reason to end."""
    for blob in (site.place / "layout/blobs/sha256").iterdir():
        if blob.stat().st_size > 100_000:
            blob.write_bytes(blob.read_bytes()[:-1000])
    first = site.nodes(1, dead=600.0, BOOTSEER_FAULTS="lease.taken=stop")
    await_stop(first)
    others = site.nodes(3, dead=600.0)
    until(lambda: (site.place / "work.log").read_text().count("waiting for n0") >= 3, 60)
    first.send_signal(signal.SIGCONT)
    assert said(first) == ["65 here"]
    assert said(others) == ["65 here"] * 3


@pytest.mark.parametrize(("wait", "most"), [(None, math.inf), (5.0, 10.0)])
def test_a_start_behind_a_conversion_waits_a_while_for_the_prediction(
    site: Site, monkeypatch: pytest.MonkeyPatch, wait: float | None, most: float
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(
        "bootseer.image.conversion.predict_profiles", lambda *_, seconds, **__: asked.append(seconds) or ""
    )
    assert image.ensure(site.ref, site.store.url, work_dir=site.place / "w", wait=wait).fresh
    assert asked == [most]


def test_a_start_converts_nothing_that_it_would_refuse(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    state, cache = str(site.place / "state"), str(site.place / "cache")
    config = Config(
        cache_dir=cache, state_dir=state, store=site.store.url, verify_key=keys.pair(site.place)["verify_key"]
    )
    job = Job(job=JobTable(name="j", command=["true"]), image=ImageTable(ref=site.ref, convert=True))
    who = launch.identity.identify("j", {})
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError, match="must be signed, and no sign_key"):
        launch.start(job, config=config, identity=who, events_dir=site.place / "events")
    assert not list(site.store.list(""))


def test_the_command_line(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(site.place / "cache"))
    words = ["image", "convert", "--store", site.store.url, "--if-missing"]
    for result in ("converted:", "converted before:"):
        done = CliRunner().invoke(assemble(), [*words, "--wait", "5", site.ref])
        assert done.exit_code == 0
        assert done.stdout.startswith(result)
    for wrong in (["--repair"], ["--wait", "-1"], ["--wait", "nan"]):
        assert CliRunner().invoke(assemble(), [*words, *wrong, site.ref]).exit_code == 2
    assert CliRunner().invoke(assemble(), [*words[:-1], "--wait", "1", site.ref]).exit_code == 2
    assert image.resolve(site.ref, site.store)
