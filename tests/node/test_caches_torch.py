"""What a real torch does with a cache that was restored: what it passes over, and that a start is right and says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bootseer import image
from bootseer.kernel import mount as mounts
from support.images import Member, folder, write_image

pytestmark = [pytest.mark.root, pytest.mark.torch, pytest.mark.timeout(400)]

TRAIN = """
import torch
step = torch.compile(lambda x: (x.sin() + x.cos()).sum())
x = torch.ones(64, 8, requires_grad=True)
step(x).backward()
print("right", torch.allclose(x.grad, x.cos() - x.sin()), flush=True)
"""
ONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # without processes that import torch to compile

RANK = """
import os, sys, torch
sys.path.append("/run/bootseer/python")
from bootseer.profile import emit
x = torch.ones(64 + int(os.environ["LOCAL_RANK"]), 8)
with emit.span("first_step"):
    y = torch.compile(lambda x: x.sin() + 1)(x)
print("right", torch.allclose(y, x.sin() + 1), flush=True)
"""


class Site:
    """Empty nodes with one store."""

    def __init__(self, base: Path) -> None:
        self.base = base
        (base / "train.py").write_text(TRAIN)

    def start(self, node: str, *command: str, before: Sequence[str] = (), **environ: str) -> tuple[str, str]:
        """What the command wrote, and what was said of the caches."""
        here = self.base / node
        (here / "tmp").mkdir(parents=True, exist_ok=True)
        known = {
            name: value for name, value in os.environ.items() if not name.startswith(("BOOTSEER_", "TORCH", "OMP_"))
        }
        known |= {f"BOOTSEER_{name.upper()}_DIR": str(here / name) for name in ("cache", "state")}
        known |= {"BOOTSEER_STORE": str(self.base / "store"), "TMPDIR": str(here / "tmp"), **ONE, **environ}
        argv = [*before, sys.executable, "-m", "bootseer.cli.main"]
        if not command or command[0] != "run":
            argv += ["env", "run", "--cache", "inductor", "--"]
        argv += command or (sys.executable, str(self.base / "train.py"))
        done = subprocess.run(argv, env=known, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert not mounts.below(here)
        return done.stdout, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(tmp_path_factory.mktemp("torch"))
    out, said = site.start("first")
    assert (out, "caches: cold, compiled" in said) == ("right True\n", True), said
    return site


def script(site: Site, name: str, old: str, new: str) -> tuple[str, ...]:
    path = site.base / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(TRAIN.replace(old, new) if old else f"{new}\n{TRAIN}")
    return sys.executable, str(path)


class Row(NamedTuple):
    """A start that differs: by its ``script`` (name, what is replaced, by what), or its variables. Whether
    it is ``cold``, or compiles all ``anew``, and what it ``says``, for which its command need not compile a thing."""

    script: tuple[str, str, str] = ("same.py", "", "")
    environ: Mapping[str, str] = {}
    cold: bool = False
    anew: bool = False
    says: str = ""


TABLE = {
    "the script elsewhere, a comment more, another home": Row(("elsewhere/a.py", "", "# one"), {"HOME": "own"}),
    "another model": Row(("model.py", "x.cos())", "x.cos() * 2 - x.cos())"), anew=True),
    "threads": Row(environ={"OMP_NUM_THREADS": "1"}, cold=True, says="variable OMP_NUM_THREADS changed: unset -> "),
    "processor": Row(environ={"ATEN_CPU_CAPABILITY": "avx2"}, cold=True, says="ATEN_CPU_CAPABILITY changed: unset -> "),
    "torch elsewhere": Row(environ={"PYTHONPATH": "links"}, cold=True, says="variable packages changed"),
    "its own folder": Row(environ={"TORCHINDUCTOR_CACHE_DIR": "own"}, says="left alone"),
}


@pytest.mark.parametrize("what", TABLE)
def test_what_torch_ignores_of_a_cache(site: Site, what: str) -> None:
    row, node = TABLE[what], what.replace(" ", "-")
    command = (sys.executable, "-c", "print('right True')") if row.says else script(site, *row.script)
    environ = {name: value.replace("own", str(site.base / node / "own")) for name, value in row.environ.items()}
    if "PYTHONPATH" in environ:
        (links := site.base / "links").mkdir()
        (links / "torch").symlink_to(Path(torch.__file__).parent)
        environ["PYTHONPATH"] = str(links)
    out, said = site.start(node, *command, **environ)
    found = re.search("caches: restored ([0-9]+), used ([0-9]+), compiled ([0-9]+) anew", said)
    assert (out, row.says in said, bool(found)) == ("right True\n", True, not row.cold), said
    if found:
        used = not row.anew and "folder" not in what
        assert (int(found[1]) > 0, int(found[2]) > 0, int(found[3]) > 0) == (True, used, row.anew), said


def test_ranks_under_torchrun_share_what_is_restored_and_one_of_them_counts_it(site: Site) -> None:
    """torchrun sets OMP_NUM_THREADS=1, which compiles for other programs: its starts find those of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node=2"]
    (site.base / "rank.py").write_text(RANK)
    for node in ("torchrun-a", "torchrun-b"):
        out, said = site.start(node, sys.executable, str(site.base / "rank.py"), before=torchrun)
        lines = sorted(line for line in said.splitlines() if line.startswith("caches: "))
        assert (out, len(lines)) == ("right True\n" * 2, 2), said
    assert re.fullmatch("caches: restored ([0-9]+), used ([0-9]+), compiled 0 anew.*", lines[0]), said
    assert lines[1].startswith("caches: shared with others on this node, compiled 0"), said


JOB = """
[job]
name = "ranks"
command = ["{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "{train}"]
env = {{ TORCHINDUCTOR_COMPILE_THREADS = "1" }}
[image]
ref = "oci:{layout}:v1"
[caches]
kinds = ["inductor"]
"""


@pytest.mark.runtime
@pytest.mark.soak
def test_torchrun_in_the_command_of_a_job(site: Site) -> None:
    """All ranks are in one container, with one folder."""
    layout, store, job = site.base / "layout", str(site.base / "store"), site.base / "job.toml"
    links = [Member(name, "symlink", link=f"usr/{name}") for name in ("bin", "lib", "lib64")]
    write_image(layout, [[folder("tmp", mode=0o1777), folder("usr"), *links]])
    image.ensure(f"oci:{layout}:v1", store, work_dir=site.base / "work")
    (train := site.base / "rank.py").write_text(RANK)
    shown = [f'[[mounts]]\nsource = "{place}"\ntarget = "{place}"\n' for place in ("/usr", sys.prefix, site.base)]
    job.write_text(JOB.format(python=sys.executable, train=train, layout=layout) + "".join(shown))
    hows = []
    for node in ("job-a", "job-b"):
        summary, events = (site.base / node / name for name in ("summary.json", "events"))
        out, said = site.start(node, "run", str(job), "--summary", str(summary), "--events", str(events))
        assert out.count("right True") == 2, out + said
        hows.append(json.loads(summary.read_text())["caches"]["how"])
    assert re.fullmatch("cold.*, compiled [1-9][0-9]*", hows[0]), hows
    assert re.fullmatch("restored ([0-9]+), used [1-9][0-9]*, compiled 0 anew.*", hows[1]), hows
