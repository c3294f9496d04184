"""`bootseer run` with package caches: what a set-up command has fetched is there when another one runs elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bootseer import image, oci
from bootseer.kernel import mount as mounts
from support import forked
from support.images import folder, programs, write_image

pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.timeout(180)]

SETUP = """
entry=$UV_CACHE_DIR/wheels-v7/pypi/a
echo "$(cd $entry && echo *) $UV_LINK_MODE $UV_NO_CACHE" >/env/known
mkdir -p $entry ${entry}b && echo https://host/a.whl >$entry/$VERSION.http
echo https://me:pw@host/b.whl >${entry}b/1.http
exit ${CODE:-0}
"""


def start(base: Path, node: str, kinds: str = '["uv"]', **variables: str) -> tuple[int, str, dict[str, str]]:
    here = base / node
    here.mkdir()
    shown = ", ".join(f'{name} = "{value}"' for name, value in variables.items())
    (here / "job.toml").write_text(f"""
[job]
name = "small"
command = ["sh", "-c", "cat /env/known; echo cache ${{UV_CACHE_DIR:-none}}; [ ! -e /run/bootseer/packages/uv ]"]
env = {{ {shown} }}
[image]
ref = "oci:{base}/layout:v1"
[env]
command = ["sh", "-c", '''{SETUP}''']
targets = ["/env"]
key_env = ["VERSION"]
[caches]
kinds = {kinds}
""")
    env = {k: v for k, v in os.environ.items() if not k.startswith("BOOTSEER_")}
    env |= {"BOOTSEER_CACHE_DIR": str(here / "cache"), "BOOTSEER_STATE_DIR": str(here / "state")}
    env |= {"BOOTSEER_STORE": str(base / "store"), "BOOTSEER_NODE": node}
    argv = ("run", here / "job.toml", "--events", here / "events", "--summary", here / "summary.json")
    done = forked.cli(*argv, env=env)
    assert not mounts.below(here), mounts.below(here)
    summary = json.loads((here / "summary.json").read_text()) if (here / "summary.json").exists() else {}
    return done.returncode, done.stdout + done.stderr, summary.get("env", {})


@pytest.mark.parametrize("user", ["", "1234:1234"])
def test_a_set_up_command_in_a_container_finds_what_another_one_fetched(tmp_path: Path, user: str) -> None:
    files = [folder("tmp", mode=0o1777), folder("env", mode=0o777)]
    config = oci.ContainerConfig(env=("PATH=/bin",), user=user)
    write_image(tmp_path / "layout", [programs("sh", "cat", "mkdir"), files], config=config)
    image.ensure(f"oci:{tmp_path}/layout:v1", str(tmp_path / "store"), work_dir=tmp_path / "work")
    code, said, env = start(tmp_path, "a", VERSION="1")
    assert (code, env["caches"]) == (0, "cold"), said
    assert " copy 0\ncache none" in said
    code, said, env = start(tmp_path, "b", VERSION="2", kinds='"auto"')
    assert (code, env["caches"], env["how"]) == (0, "restored generation 1", "ran-and-published"), said
    assert "1.http copy 0\ncache none" in said
    code, said, env = start(tmp_path, "c", VERSION="2")
    assert (code, env["caches"], env["how"]) == (0, "", "restored-mount"), said
    code, said, env = start(tmp_path, "d", VERSION="3", CODE="7")
    assert (code, env["caches"]) == (7, "restored generation 2"), said
