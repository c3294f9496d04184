"""A snapshot as a layer of its image: the image with its environment, for bootseer and for other tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bootseer import image, oci
from bootseer.env import snapshots
from bootseer.objects.folder import FolderStore
from support import forked
from support.images import Member, programs, write_image

pytestmark = [
    pytest.mark.root,
    pytest.mark.runtime,
    pytest.mark.skipif(not shutil.which("umoci"), reason="needs umoci (scripts/setup does it)"),
]

FILL = "cd /opt/env; echo made > made; chmod 750 made; ln -s made link; ln made hard; rm old; rm -r sub; mkdir sub"
SHOW = "cd /opt/env; cat link; [ ! -e old ]; [ made -ef hard ]; ls; ls sub; stat -c '%a %h %Y' made"


def test_an_image_with_the_layer_of_a_snapshot_has_its_environment(tmp_path: Path) -> None:
    ref, store = f"oci:{tmp_path}/layout", tmp_path / "store"
    files = [Member("opt/env/old", data=b"old\n"), Member("opt/env/sub/old", data=b"old\n")]
    config = oci.ContainerConfig(env=("PATH=/bin",), cmd=("sh", "-ec", SHOW))
    programs_layer = programs("sh", "cat", "stat", "ln", "rm", "ls", "mkdir", "chmod")
    write_image(tmp_path / "layout", [programs_layer, files], config=config)
    image.ensure(f"{ref}:v1", str(store), work_dir=tmp_path / "work")
    (tmp_path / "job.toml").write_text(
        f'[job]\nname = "x"\ncommand = ["sh", "-ec", {json.dumps(SHOW)}]\n[image]\nref = "{ref}:v1"\n'
        f'[env]\ntargets = ["/opt/env"]\ncommand = ["sh", "-ec", {json.dumps(FILL)}]\n'
    )
    environ = dict(os.environ)
    environ |= {f"BOOTSEER_{name.upper()}": str(tmp_path / name) for name in ("cache_dir", "state_dir", "store")}

    def run(*words: str) -> str:
        done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    def cli(*words: str) -> str:
        done = forked.cli(*words, env=environ, cwd=tmp_path)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    expected = cli("run", "job.toml")
    (name,) = snapshots.names(FolderStore(store))
    for out in ("layer.tar", "again.tar"):
        cli("env", "export", name[:12], "-o", out)
    assert (tmp_path / "layer.tar").read_bytes() == (tmp_path / "again.tar").read_bytes()

    run("umoci", "raw", "add-layer", "--image", "layout:v1", "--tag", "env", "layer.tar")
    image.ensure(f"{ref}:env", str(store), work_dir=tmp_path / "work")
    assert cli("image", "run", f"{ref}:env") == expected

    run("umoci", "unpack", "--image", "layout:env", "bundle")
    settings = json.loads((tmp_path / "bundle/config.json").read_text())
    settings["process"]["terminal"] = False
    settings["linux"].pop("resources", None)
    (tmp_path / "bundle/config.json").write_text(json.dumps(settings))
    runtime = shutil.which("runc") or "crun"
    assert run(runtime, "--root", str(tmp_path / "runtime"), "run", "-b", "bundle", f"env-{os.getpid()}") == expected
