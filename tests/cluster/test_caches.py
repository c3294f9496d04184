"""`bootseer run` with `[caches]`: what the training command compiles is there on the next empty node, and the card says
whether it was used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer import image, oci
from bootseer.kernel import mount as mounts
from support import forked
from support.images import folder, programs, write_image
from support.waits import until

pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.timeout(180)]

TRAIN = """
. /run/bootseer/python/bootseer/profile/emit.sh
compile() {
    mkdir -p $TORCHINDUCTOR_CACHE_DIR/locks && : >$TORCHINDUCTOR_CACHE_DIR/locks/x.lock || exit 9
    for one in $KERNELS; do
        file=$TORCHINDUCTOR_CACHE_DIR/${one}.so
        if [ -e $file ]; then cat $file >/dev/null || exit $DAMAGED; continue; fi
        echo compiled $one && cat /bin/sh >$file || exit 9
    done
}
bootseer_span first_step -- compile
sleep $LASTS
exit ${CODE:-0}
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layouts, and a store with their images."""
    base = tmp_path_factory.mktemp("images")
    files = [folder("tmp", mode=0o1777), folder("job")]
    for user in ("", "1234:1234"):
        config = oci.ContainerConfig(env=("PATH=/bin",), user=user)
        layout = base / f"layout{user[:4]}"
        write_image(layout, [programs("sh", "cat", "mkdir", "date", "env", "sleep"), files], config=config)
        image.ensure(f"oci:{layout}:v1", str(base / "store"), work_dir=base / "work")
    return base


class Site:
    def __init__(self, base: Path, images: Path) -> None:
        self.base, self.images = base, images
        shutil.copytree(images / "store", base / "store")

    def start(
        self,
        node: str,
        kernels: str,
        *,
        user: str = "",
        more: str = "",
        kinds: str = '"auto"',
        damaged: str = "9",
        owner: int = 0,
        variable: str = "",
        lasts: int = 0,
        **environ: str,
    ) -> tuple[int, str, dict]:
        here = self.base / node
        here.mkdir(exist_ok=True)
        (here / "job.toml").write_text(f"""
[job]
name = "small"
command = ["sh", "-c", '''{TRAIN}''']
env = {{ KERNELS = "{kernels}", DAMAGED = "{damaged}", LASTS = "{lasts}", {variable or "UNUSED"} = "/tmp/own" }}
[image]
ref = "oci:{self.images}/layout{user}:v1"
[caches]
kinds = {kinds}
{more}
""")
        os.chown(here / "job.toml", owner, -1)
        env = {k: v for k, v in os.environ.items() if not k.startswith("BOOTSEER_")}
        env |= {"BOOTSEER_CACHE_DIR": str(here / "cache"), "BOOTSEER_STATE_DIR": str(here / "state")}
        env |= {"BOOTSEER_STORE": str(self.base / "store"), "BOOTSEER_NODE": node, **environ}
        argv = [sys.executable, "-m", "bootseer.cli.main", "run", str(here / "job.toml"),
                "--events", str(here / "events"), "--summary", str(here / "summary.json")]  # fmt: skip
        others = []
        with forked.Popen(argv, env=env, stdout=-1, stderr=-1, text=True) as process:
            if lasts:  # mount namespaces that somebody makes meanwhile
                until(lambda: [one for one in mounts.below(here) if "/caches/" in one.target], 60, "the caches' mount")
                for way in ("private", "slave"):
                    others.append(subprocess.Popen(["unshare", "-m", "--propagation", way, "sleep", "100"]))
            out, err = process.communicate(timeout=120)
        left = mounts.below(here)
        for one in others:
            one.kill()
            one.wait()
        assert not left
        summary = json.loads((here / "summary.json").read_text()) if (here / "summary.json").exists() else {}
        return process.returncode, out + err, summary.get("caches", {})


@pytest.fixture
def site(tmp_path: Path, images: Path) -> Site:
    return Site(tmp_path, images)


@pytest.mark.parametrize("user", ["", "1234"])
def test_a_job_on_three_empty_nodes_compiles_once(site: Site, user: str) -> None:
    code, said, caches = site.start("a", "one two", user=user)
    assert (code, caches["compiled"]) == (0, 2), said
    assert "compiled one" in said
    assert caches["how"] == "cold, compiled 2"
    for node in "bc":
        code, said, caches = site.start(node, "one two", user=user)
        assert code == 0, said
        assert "compiled one" not in said
        assert (caches["restored"], caches["used"], caches["compiled"]) == (2, 2, 0), said
        assert "restored 2, used 2, compiled 0 anew" in said  # on the card
    assert len(list((site.base / "store/env/snapshots").glob("*/*.json"))) == 1


def test_a_run_leaves_no_mount_for_namespaces_that_were_made_meanwhile(site: Site) -> None:
    site.start("a", "one")
    code, said, caches = site.start("b", "one", lasts=2)
    assert (code, caches["used"]) == (0, 1), said


def test_what_a_later_start_adds_is_united(site: Site) -> None:
    site.start("a", "one")
    code, said, caches = site.start("b", "one two")
    assert (caches["restored"], caches["used"], caches["compiled"]) == (1, 1, 1), said
    code, said, caches = site.start("a", "two one")  # the first node, again
    assert (code, caches["restored"], caches["used"], caches["compiled"]) == (0, 2, 2, 0), said


def test_a_cache_that_is_not_used_is_restored_all_the_same(site: Site) -> None:
    site.start("a", "one")
    for number, kernel in enumerate(("two", "three", "four")):
        code, said, caches = site.start("b", kernel)
        assert (code, caches["restored"], caches["used"], caches["compiled"]) == (0, number + 1, 0, 1), said
        assert "the cache was restored and not used" in said


def test_a_command_that_was_killed_does_not_start_once_more(site: Site) -> None:
    blobs = site.base / "store/blobs"
    before = set(blobs.rglob("*"))
    site.start("a", "one")
    pack = max(set(blobs.rglob("*")) - before, key=lambda path: path.stat().st_size if path.is_file() else 0)
    pack.write_bytes(bytes(pack.stat().st_size))
    code, said, _ = site.start("b", "one", damaged="137")
    assert code == 137, said
    assert "once more" not in said


def test_a_damaged_block_costs_a_second_begin_of_the_command_and_no_more(site: Site) -> None:
    blobs = site.base / "store/blobs"
    before = set(blobs.rglob("*"))
    site.start("a", "one")
    pack = max(set(blobs.rglob("*")) - before, key=lambda path: path.stat().st_size if path.is_file() else 0)
    pack.write_bytes(bytes(pack.stat().st_size))
    code, said, caches = site.start("b", "one")
    assert code == 0, said
    assert "the training command starts once more, cold" in said
    assert caches["how"] == "cold, compiled 1", said
    code, said, caches = site.start("b", "one")
    assert (code, caches["restored"], caches["used"]) == (0, 1, 1), said  # what the second begin captured


def test_a_start_is_right_when_its_capture_is_killed_and_when_caches_are_off(site: Site) -> None:
    code, said, caches = site.start("a", "one", BOOTSEER_FAULTS="env.gather.before-manifest=kill")
    assert (code, caches["how"]) == (0, "cold, compiled 1"), said
    code, said, caches = site.start("b", "one", more="enabled = false")
    assert (code, caches) == (0, {}), said
    assert site.start("b", "one")[2]["how"] == "cold, compiled 1"


def test_package_caches_without_a_set_up_command_are_named_in_the_log(site: Site) -> None:
    code, said, _ = site.start("a", "one", kinds='["inductor", "pip"]')
    assert (code, "caches of a set-up command are not used, the job has none: pip" in said) == (0, True), said
    assert "set-up command are not used" not in site.start("b", "one")[1]


WAYS = {
    "sets": ("", "TORCHINDUCTOR_CACHE_DIR", "the job says itself where the cache inductor is"),
    "mounts-there": ("/run/bootseer/caches/inductor", "", "the caches hide what"),
    "mounts-above": ("/run/bootseer", "", ""),
}


def test_what_the_job_says_itself_of_the_place(site: Site) -> None:
    site.start("a", "one")
    for way, (target, variable, says) in WAYS.items():
        own = site.base / f"own {way}"
        own.mkdir()
        more = f'[[mounts]]\nsource = "{own}"\nreadonly = false\ntarget = "{target}"\n' if target else ""
        code, said, caches = site.start(way, "one", more=more, variable=variable)
        assert (code, says in said) == (0, True), said
        assert (caches["used"], "compiled one" in said) == ((0, True) if variable else (1, False)), said


def test_tenants_of_one_service_have_caches_of_their_own(site: Site) -> None:
    assert site.start("a", "one", owner=5001)[2]["compiled"] == 1
    for number, (owner, tenant) in enumerate([(5002, ""), (0, ""), (5001, "team-b"), (0, "team-a")]):
        code, said, caches = site.start(f"n{number}", "one", owner=owner, BOOTSEER_TENANT=tenant)
        assert (code, caches["how"]) == (0, "cold, compiled 1"), said
    assert site.start("b", "one", owner=5001)[2]["used"] == 1
    assert site.start("c", "one", owner=5002, BOOTSEER_TENANT="team-a")[2]["used"] == 1
