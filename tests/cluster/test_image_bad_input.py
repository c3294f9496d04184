"""What users meet when something is wrong: one clear line, the right exit code, no traceback, nothing lost or left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bootseer import image
from bootseer.kernel import mount as mounts
from support import forked
from support.images import Member, write_image
from support.registry import DockerRegistry

pytestmark = [pytest.mark.root, pytest.mark.registry]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "BOOTSEER_CACHE_DIR": str(tmp_path / "cache"),
        "BOOTSEER_STATE_DIR": str(tmp_path / "state"),
        "BOOTSEER_STORE": str(tmp_path / "store"),
        "BOOTSEER_BACKGROUND_FILL": "false",
    }


@pytest.fixture
def ref(tmp_path: Path) -> str:
    write_image(tmp_path / "layout", [[Member("f", data=os.urandom(5_000_000))], [Member("g", data=b"small")]])
    return f"oci:{tmp_path}/layout:v1"


def fails(code: int, environ: dict[str, str], *args: str, before: tuple[str, ...] = ()) -> str:
    """Run the command line, expect exit code ``code`` and one line on stderr; returns that line."""
    if before:
        argv = [*before, sys.executable, "-m", "bootseer.cli.main", *args]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)
    else:
        done = forked.cli(*args, env=environ)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if "WARNING" not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("bootseer: ")
    return lines[0]


def test_no_such_image(registry: DockerRegistry, environ: dict[str, str]) -> None:
    name = f"{registry.address}/team/nothing:v1"
    for verb in (["convert", name], ["mount", name, "m"], ["run", name, "--", "true"]):
        line = fails(66, environ, "image", *verb)
        assert f"image {name} does not exist in registry {registry.address}" in line


def test_a_registry_that_does_not_answer(environ: dict[str, str]) -> None:
    line = fails(69, environ, "image", "convert", "127.0.0.1:1/x:v1")
    assert "registry 127.0.0.1:1 does not answer" in line
    assert "Connection refused" in line


def test_a_reference_that_is_none(environ: dict[str, str]) -> None:
    assert "bad image reference 'Torch'" in fails(78, environ, "image", "convert", "Torch")
    assert "is not an OCI layout" in fails(66, environ, "image", "convert", "oci:/nowhere:v1")


def test_not_converted_yet(environ: dict[str, str], ref: str, tmp_path: Path) -> None:
    line = fails(66, environ, "image", "mount", ref, str(tmp_path / "m"))
    assert f"is not converted in store {tmp_path}/store; run bootseer image convert {ref}" in line
    assert not (tmp_path / "m").exists()


def test_a_store_that_cannot_be_written(environ: dict[str, str], ref: str, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    mounts.mount("tmpfs", tmp_path / "store", "tmpfs", flags=mounts.MS_RDONLY)
    try:
        line = fails(73, environ, "image", "convert", ref)
    finally:
        mounts.unmount(tmp_path / "store")
    assert f"{tmp_path}/store" in line
    assert "Read-only file system" in line
    assert list((tmp_path / "cache" / "work").iterdir()) == []


@pytest.mark.parametrize("place", ["store", "cache"])
def test_a_full_disk(environ: dict[str, str], ref: str, tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir()
    mounts.mount("tmpfs", tmp_path / place, "tmpfs", data="size=2m")
    try:
        line = fails(74, environ, "image", "convert", ref)
        left = [path for path in (tmp_path / place).rglob("*") if path.is_file()]
    finally:
        mounts.unmount(tmp_path / place)
    assert "No space left on device" in line or "GB free" in line
    assert place == "store" or left == []
    # What was put already has its final name and hash, and no tree refers to it: the next try finds it there.
    assert all(path.parent.parent.name == "blobs" for path in left)


def test_without_root(environ: dict[str, str]) -> None:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:  # pytest's own folders are closed to others
        os.chmod(place, 0o755)
        write_image(Path(place, "layout"), [[Member("f")]])
        environ.update({f"BOOTSEER_{name}_DIR": f"{place}/{name}" for name in ("CACHE", "STATE")})
        environ["BOOTSEER_STORE"] = f"{place}/store"
        ref = f"oci:{place}/layout:v1"
        assert "needs root" in fails(77, environ, "image", "mount", ref, "m", before=nobody)
        assert "need root" in fails(77, environ, "image", "run", "--gpus", "all", ref, "true", before=nobody)
        assert os.listdir(place) == ["layout"]


def test_without_fuse(environ: dict[str, str], ref: str, tmp_path: Path) -> None:
    image.ensure(ref, environ["BOOTSEER_STORE"], work_dir=tmp_path / "work")
    hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev && mknod /dev/null c 1 3 && exec "$@"', "sh")
    line = fails(71, environ, "image", "mount", ref, str(tmp_path / "m"), before=hidden)
    assert "cannot open /dev/fuse" in line
    assert image.mounts(tmp_path / "state") == []


def test_arguments_that_make_no_sense(environ: dict[str, str], ref: str, tmp_path: Path) -> None:
    image.ensure(ref, environ["BOOTSEER_STORE"], work_dir=tmp_path / "work")
    assert "bad volume" in fails(78, environ, "image", "run", "-v", "x", ref, "true")
    assert "no file or folder /nowhere" in fails(66, environ, "image", "run", "-v", "/nowhere:/x", ref, "true")
    assert "nothing of bootseer is mounted on" in fails(66, environ, "unmount", "/nowhere")
    assert "the image names no command" in fails(78, environ, "image", "run", ref)
    assert "cannot run nothing in the container" in fails(66, environ, "image", "run", ref, "--", "nothing")
