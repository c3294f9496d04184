"""Observed inputs: names that a job lists are looked up nowhere else than where the job sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.config import Config
from bootseer.env import EnvSpec, Target, inputs, names


@pytest.mark.parametrize("contained", [True, False])
def test_the_sources_of_a_private_folder_are_not_named(tmp_path: Path, contained: bool) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private/secret.py").touch()
    mounted = tmp_path / "mounted"
    (mounted / "real").mkdir(parents=True)
    (mounted / "real/own.py").touch()
    (mounted / "real/link.py").symlink_to(tmp_path / "private/secret.py")
    (mounted / "led").symlink_to(tmp_path / "private")
    spec = EnvSpec(targets=(Target("/opt/env"),), command=("x",), cwd="/")
    at = str(mounted)
    if contained:
        mounts = ((at, "/src"),)
        spec = EnvSpec(targets=(Target("/opt/env"),), command=("x",), cwd="/", image_digest="sha256:1", mounts=mounts)
        at = "/src"
    digests = inputs.Digests(spec, Config(cache_dir=str(tmp_path / "cache")))
    led = digests.difference(inputs.Observed(folders={f"{at}/led": []}))
    real = digests.difference(inputs.Observed(folders={f"{at}/real": []}))
    if contained:
        assert (led, real) == ("", "/src/real/own.py is new")
        own = digests.difference(inputs.Observed(folders={f"{at}/real": ["own.py"]}))
        assert own == ""
    else:  # in the user's own tree links are followed
        assert (led, real) == (f"{at}/led/secret.py is new", f"{at}/real/link.py is new")


def test_data_behind_the_text_of_a_script_is_not_looked_into(tmp_path: Path) -> None:
    """Red before: two bytes of it were an option with a folder, whose name no folder can have: nothing was published,
    at each start."""
    (tmp_path / "b").mkdir()
    text = "cc -I a -I b x.c; exit\n\0 -I c\0d"
    found = names.looked_up([text], [], {}, str(tmp_path), {f"{tmp_path}/b/x.h"}, lambda path: True)
    assert found == {f"{tmp_path}/a/x.h": ""}
