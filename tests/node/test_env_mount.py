"""The stage with real overlays: exact capture, mount restore, nesting in a container's root, release."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bootseer import env
from bootseer.config import Config
from bootseer.env import (
    EnvResult,
    EnvSpec,
    Outcome,
    Target,
    manifest,
    observer,
    overlay,
    publication,
    quarantine,
    scan,
    snapshots,
)
from bootseer.env.inventory import Entry
from bootseer.env.unpack import check_mounts
from bootseer.errors import BootseerError, DataError, FullError, NotWritableError, UnsupportedError
from bootseer.kernel import mount as mounts
from bootseer.objects.folder import FolderStore
from support import forked
from support.waits import together, until

pytestmark = pytest.mark.root


class Node:
    """One node of a site: its own cache, state and target directory; the store is shared."""

    def __init__(self, root: Path, name: str, store: Path) -> None:
        self.host = root / name / "env"
        self.config = Config(cache_dir=str(root / name / "cache"), state_dir=str(root / name / "state"))
        self.store = store
        self.runs = 0

    def run(self, act: Callable[[Path], object], **changed: object) -> EnvResult:
        def runner() -> int:
            self.runs += 1
            code = act(self.host)
            return code if isinstance(code, int) else 0

        base = EnvSpec(
            targets=(Target("/opt/env", str(self.host)),),
            command=("make-env",),
            image_digest="sha256:1",
            restore="mount",
            background=False,
        )
        spec = msgspec.structs.replace(base, **changed)
        return env.run(spec, runner, store_url=str(self.store), config=self.config)

    @property
    def environ(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "BOOTSEER_CACHE_DIR": self.config.cache_dir,
            "BOOTSEER_STATE_DIR": self.config.state_dir,
            "BOOTSEER_STORE": str(self.store),
        }

    def release(self) -> None:
        for group in overlay.groups(Path(self.config.state_dir))[::-1]:
            group.unmount()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    made: dict[str, Node] = {}

    def node(name: str) -> Node:
        return made.setdefault(name, Node(tmp_path, name, tmp_path / "store"))

    yield node
    for item in made.values():
        item.release()


@pytest.fixture
def one(nodes: Callable[[str], Node]) -> Node:
    return nodes("one")


@pytest.fixture
def two(nodes: Callable[[str], Node]) -> Node:
    return nodes("two")


@pytest.fixture
def three(nodes: Callable[[str], Node]) -> Node:
    return nodes("three")


node = one


def base(host: Path) -> None:
    (host / "old-1.dist-info").mkdir(parents=True)
    (host / "old-1.dist-info" / "RECORD").write_text("old")
    (host / "emptied").mkdir()
    (host / "emptied" / "x").write_text("x")
    (host / "kept").write_text("kept")


def fill(host: Path) -> None:
    subprocess.run(["rm", "-r", str(host / "old-1.dist-info"), str(host / "emptied")], check=True)
    (host / "emptied").mkdir(mode=0o700)
    (host / "emptied" / "y").write_text("y")
    (host / "pkg").mkdir()
    (host / "pkg" / "big").write_bytes(os.urandom(3_000_000))
    (host / "pkg" / "small").write_text("s")
    os.link(host / "pkg" / "small", host / "pkg" / "same")
    os.symlink("small", host / "pkg" / "link")
    os.setxattr(host / "pkg" / "small", "user.note", b"n")
    os.chown(host / "pkg" / "big", 1234, 5678)
    (host / "pkg" / "big").chmod(0o4711)
    os.utime(host / "pkg" / "small", ns=(1, 1_500_000_000_123_456_789))
    with open(host / "kept", "a") as file:
        file.write("+")


def listing(root: Path) -> dict[str, tuple[object, ...]]:
    out: dict[str, tuple[object, ...]] = {}
    seen: dict[int, str] = {}
    for path, info in scan.walk(root):
        full = root / path
        content: object = None
        if full.is_symlink():
            content = os.readlink(full)
        elif full.is_file():
            content = (full.read_bytes(), seen.setdefault(info.st_ino, path), info.st_mtime_ns)
        note = os.getxattr(full, "user.note") if full.name in ("small", "same") else b""
        out[path] = (info.st_mode, info.st_uid, info.st_gid, content, note)
    return out


@pytest.mark.parametrize("restore", ["mount", "unpack"])
def test_the_other_node_sees_exactly_what_the_command_made(one: Node, two: Node, restore: str) -> None:
    for node in (one, two):
        base(node.host)
    first = one.run(fill)
    assert first.outcome is Outcome.RAN_AND_PUBLISHED
    assert mounts.is_mounted(one.host)
    second = two.run(fill, restore=restore)
    assert second.outcome.value == f"restored-{restore}"
    assert second.reason == "hit"
    assert two.runs == 0
    want = listing(one.host)
    if restore == "unpack":  # neither owners of other users nor set-id bits
        mode, uid, gid, *rest = want["pkg/big"]
        assert (mode, uid, gid) == (stat.S_IFREG | 0o4711, 1234, 5678)
        want["pkg/big"] = (stat.S_IFREG | 0o711, 0, 0, *rest)
    assert listing(two.host) == want
    assert sorted(listing(two.host)) == [
        "emptied", "emptied/y", "kept", "pkg", "pkg/big", "pkg/link", "pkg/same", "pkg/small",
    ]  # fmt: skip


def test_what_was_verified_block_by_block_is_not_read_again(
    one: Node, two: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in (one, two):
        base(node.host)
    one.run(fill)
    monkeypatch.setattr("bootseer.env.layer.blake3", None)
    assert two.run(fill, restore="unpack").outcome is Outcome.RESTORED_UNPACK


def test_a_restored_target_is_writable_and_its_base_untouched(one: Node, two: Node) -> None:
    for node in (one, two):
        base(node.host)
    one.run(fill)
    result = two.run(fill)
    (two.host / "pkg" / "small").write_text("changed by the job")
    (two.host / "mine").write_text("x")
    for mount in result.mounts:
        mount.unmount()
        mount.unmount()
    assert not mounts.is_mounted(two.host)
    assert sorted(path.name for path in two.host.iterdir()) == ["emptied", "kept", "old-1.dist-info"]
    assert (two.host / "kept").read_text() == "kept"
    assert list(Path(two.config.cache_dir, "env").iterdir()) == []
    assert list(Path(two.config.state_dir, "env").glob("*.json")) == []


def test_a_restart_on_the_same_node_finds_it_in_place(node: Node) -> None:
    node.run(fill_plain)
    again = node.run(fill_plain)
    assert (again.outcome, again.reason, node.runs) == (Outcome.RESTORED_MOUNT, "already in place on this node", 1)
    other = node.run(fill_plain, salt="other")
    assert (other.outcome, node.runs) == (Outcome.RAN_AND_PUBLISHED, 2)
    assert len(overlay.groups(Path(node.config.state_dir))) == 1
    back = node.run(fill_plain)
    assert (back.outcome, back.reason, node.runs) == (Outcome.RESTORED_MOUNT, "hit", 2)


def fill_plain(host: Path) -> None:
    (host / "pkg").mkdir()
    (host / "pkg" / "data").write_bytes(b"d" * 100_000)


def test_several_targets_share_a_snapshot(one: Node, two: Node, tmp_path: Path) -> None:
    def spec(node: Node) -> tuple[Target, ...]:
        return (Target("/opt/env", str(node.host)), Target("/cache/triton", str(node.host.parent / "triton")))

    def act(node: Node) -> Callable[[Path], None]:
        def both(host: Path) -> None:
            (host / "a").write_text("a")
            (host.parent / "triton" / "k").write_text("k")

        return both

    assert one.run(act(one), targets=spec(one)).outcome is Outcome.RAN_AND_PUBLISHED
    assert two.run(act(two), targets=spec(two)).outcome is Outcome.RESTORED_MOUNT
    assert (two.host / "a").read_text() == "a"
    assert (two.host.parent / "triton" / "k").read_text() == "k"


def test_a_failed_command_leaves_the_target_as_it_left_it(node: Node) -> None:
    def act(host: Path) -> int:
        (host / "half").write_text("half")
        return 3

    result = node.run(act)
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 3)
    assert (node.host / "half").exists()
    assert not list(node.store.glob("env/snapshots/*/*.json"))
    assert node.run(fill_plain).outcome is Outcome.RAN_AND_PUBLISHED
    assert not (node.host / "half").exists()


def test_an_interrupted_command_leaves_no_mount(node: Node) -> None:
    def act(host: Path) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        node.run(act)
    assert not mounts.is_mounted(node.host)
    assert list(Path(node.config.cache_dir, "env").iterdir()) == []


def test_a_mount_below_the_target_is_never_hidden_or_captured(
    nodes: Callable[[str], Node], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, driver = nodes("one"), tmp_path / "driver"
    driver.mkdir()
    (driver / "libcuda.so").write_text("driver")
    (one.host / "nvidia").mkdir(parents=True)
    subprocess.run(["mount", "--bind", driver, one.host / "nvidia"], check=True)

    def act(host: Path) -> None:
        fill_plain(host)
        (host / "nvidia" / "libcuda.so.2").write_text("written by the command, but not into the target")

    try:
        result = one.run(act, restore="auto")
        assert result.outcome is Outcome.RAN_AND_PUBLISHED
        assert not mounts.is_mounted(one.host)
        assert (one.host / "nvidia" / "libcuda.so").exists()
        assert "has mounts below it" in caplog.text
    finally:
        mounts.unmount(one.host / "nvidia")
    two = nodes("two")
    two.run(fill_plain)
    assert sorted(path.name for path in two.host.iterdir()) == ["pkg"]


def test_unpacking_never_writes_into_a_mount(nodes: Callable[[str], Node], tmp_path: Path) -> None:
    one, two, driver = nodes("one"), nodes("two"), tmp_path / "driver"
    one.run(fill_plain)
    (driver / "pkg").mkdir(parents=True)
    (two.host / "pkg").mkdir(parents=True)
    subprocess.run(["mount", "--bind", driver, two.host / "pkg"], check=True)
    try:
        result = two.run(lambda host: 0, restore="auto")
        assert result.outcome is Outcome.RAN
        assert list(driver.iterdir()) == [driver / "pkg"]
        assert not list(Path(two.config.cache_dir).glob("**/quarantine/*"))
    finally:
        mounts.unmount(two.host / "pkg")


def test_set_uid_programs_of_an_environment_do_nothing(nodes: Callable[[str], Node]) -> None:
    for name in ("one", "two"):  # captured here, restored there
        node = nodes(name)
        node.run(fill_plain)
        assert os.statvfs(node.host).f_flag & os.ST_NOSUID
        assert os.statvfs(node.host).f_flag & os.ST_NODEV


def test_nested_in_a_container_root_and_visible_through_a_recursive_bind(one: Node, two: Node, tmp_path: Path) -> None:
    one.run(fill_plain)
    lower, root = tmp_path / "image", tmp_path / "two" / "rootfs"
    (lower / "opt" / "env").mkdir(parents=True)
    (lower / "opt" / "env" / "base").write_text("base")
    for name in ("up", "wk"):
        (tmp_path / name).mkdir()
    root.mkdir(parents=True)
    mounts.mount_overlay([lower], root, upper=tmp_path / "up", work=tmp_path / "wk")
    two.host = root / "opt" / "env"
    inside = tmp_path / "container"
    inside.mkdir()
    try:
        assert two.run(fill_plain).outcome is Outcome.RESTORED_MOUNT
        for propagation in ("--make-rprivate", "--make-rslave"):
            script = (
                f"mount {propagation} / && mount --rbind {root} {inside} && ls {inside}/opt/env/pkg {inside}/opt/env"
            )
            seen = subprocess.run(
                ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=True, timeout=20
            )
            assert "data" in seen.stdout
            assert "base" in seen.stdout
    finally:
        two.release()
        mounts.unmount(root)


def test_a_lazy_image_below_leaves_room_for_the_environment(one: Node, two: Node, tmp_path: Path) -> None:
    """EROFS under an overlay (a mounted image) may be all that the kernel stacks: then it must still work, unpacked."""
    base(one.host)
    one.run(fill)
    from bootseer import erofs

    image, root = tmp_path / "image", tmp_path / "root"
    base(image / "opt" / "env")
    erofs.build(image, tmp_path / "meta", tmp_path / "data")
    point = tmp_path / "point"
    for folder in (point, root, tmp_path / "up", tmp_path / "wk"):
        folder.mkdir()
    mounts.mount_erofs(tmp_path / "meta", tmp_path / "data", point)
    try:
        mounts.mount_overlay([point], root, upper=tmp_path / "up", work=tmp_path / "wk")
        two.host = root / "opt" / "env"
        result = two.run(fill, restore="auto")
        assert result.outcome in (Outcome.RESTORED_MOUNT, Outcome.RESTORED_UNPACK)
        assert two.runs == 0
        assert listing(two.host) == listing(one.host)
    finally:
        two.release()
        if mounts.is_mounted(root):
            mounts.unmount(root)
        mounts.unmount(point)


def test_what_an_earlier_boot_left_is_swept(node: Node) -> None:
    stale = Path(node.config.cache_dir, "env", "0123456789ab")
    stale.mkdir(parents=True)
    (stale / "boot").write_text("another boot")
    (stale / "upper").mkdir()
    node.run(fill_plain)
    assert not stale.exists()


def test_a_flipped_bit_under_a_mount_is_an_error_and_never_used_again(one: Node, two: Node, three: Node) -> None:
    def act(host: Path) -> None:
        (host / "data").write_bytes(os.urandom(3_000_000))

    one.run(act)
    (blob,) = sorted((path for path in (one.store / "blobs").rglob("*") if path.is_file()), key=os.path.getsize)[-1:]
    data = bytearray(blob.read_bytes())
    for place in range(1000, len(data), 100_000):
        data[place] ^= 1
    blob.write_bytes(bytes(data))
    assert two.run(act).outcome is Outcome.RESTORED_MOUNT
    with pytest.raises(OSError, match="Input/output error"):
        (two.host / "data").read_bytes()
    result = two.run(act)  # a restart on the same node
    assert (result.outcome, two.runs) == (Outcome.RAN_AND_PUBLISHED, 1)
    assert "quarantined on this node" in result.reason
    assert three.run(act).reason == "hit"
    assert (three.host / "data").read_bytes() == (two.host / "data").read_bytes()


def test_damage_that_a_new_snapshot_needs_too_is_replaced(one: Node, two: Node, three: Node) -> None:
    """The command makes the same again, to the nanosecond, so the new snapshot has the objects of the old one."""
    content = os.urandom(3_000_000)

    def act(host: Path) -> None:
        host.mkdir(parents=True, exist_ok=True)
        (host / "data").write_bytes(content)
        for path in (host / "data", host):
            os.utime(path, ns=(1, 1_600_000_000_000_000_000))

    one.run(act)
    for blob in (path for path in (one.store / "blobs").rglob("*") if path.is_file()):
        data = bytearray(blob.read_bytes())
        data[len(data) // 2] ^= 1
        blob.write_bytes(bytes(data))
    assert two.run(act, restore="unpack").outcome is Outcome.RAN_AND_PUBLISHED
    assert three.run(act).reason == "hit"
    assert (three.host / "data").read_bytes() == content


def test_where_mounting_fails_the_snapshot_is_unpacked(
    one: Node, two: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bootseer.blocks import tree
    from bootseer.errors import UnsupportedError

    one.run(fill_plain)

    def refuse(*args: object, **kwargs: object) -> None:
        raise UnsupportedError("no FUSE here")

    monkeypatch.setattr(tree, "mount", refuse)
    result = two.run(fill_plain, restore="auto")
    assert result.outcome is Outcome.RESTORED_UNPACK
    assert "no FUSE here" in caplog.text
    assert not mounts.is_mounted(two.host)


# -- real wheels ----------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: str = "") -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)


def pip(links: Path, host: Path, *args: str) -> int:
    quiet = ["--disable-pip-version-check", "--no-input", "-q"]
    command = [sys.executable, "-m", "pip", "--python", str(host / "bin" / "python"), "install", *quiet, "--no-index"]
    return subprocess.run([*command, "--find-links", str(links), *args], check=False, timeout=60).returncode


@pytest.mark.parametrize("restore", ["mount", "unpack"])
def test_pip_upgrades_a_virtual_environment(one: Node, two: Node, tmp_path: Path, restore: str) -> None:
    links = tmp_path / "links"
    wheel(links, "alpha", "1.0", {"alpha/__init__.py": "import beta\nX = 1\n", "alpha/gone.py": "Y = 1\n"}, "beta")
    wheel(links, "alpha", "2.0", {"alpha/__init__.py": "import beta\nX = 2\n"}, "beta")
    wheel(links, "beta", "0.1", {"beta.py": "Z = 3\n"})
    for node in (one, two):  # what the image brings
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(node.host)], check=True, timeout=60)
        assert pip(links, node.host, "alpha==1.0") == 0

    def upgrade(host: Path) -> int:
        return pip(links, host, "--no-compile", "alpha==2.0")

    first = one.run(upgrade, restore=restore, python=sys.executable)
    assert first.outcome is Outcome.RAN_AND_PUBLISHED, first.reason
    second = two.run(upgrade, restore=restore, python=sys.executable)
    assert second.outcome.value == f"restored-{restore}", second.reason
    (packages,) = two.host.glob("lib/python3*/site-packages")
    names = {path.name for path in packages.iterdir()}
    assert "alpha-2.0.dist-info" in names
    assert "alpha-1.0.dist-info" not in names
    assert not (packages / "alpha" / "gone.py").exists()
    assert list((packages / "alpha" / "__pycache__").glob("__init__.*.pyc")), "the missing .pyc was not compiled"
    shown = subprocess.run(
        [two.host / "bin" / "python", "-v", "-c", "import alpha, beta; print(alpha.X, beta.Z, alpha.__file__)"],
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert shown.stdout.split() == ["2", "3", str(packages / "alpha" / "__init__.py")]
    assert "code object from '" + str(packages / "alpha" / "__init__.py") not in shown.stderr, "a .pyc was stale"


# -- the command line -----------------------------------------------------------------------------------------------


def cli(node: Node, verb: str, *args: str, check: bool = True, ours: bool = False) -> subprocess.CompletedProcess[str]:
    """``ours``: a child of this process, which counts as the one that uses its environments."""
    words = [*verb.split(), *args]
    if ours:
        program = [sys.executable, "-m", "bootseer.cli.main", *words]
        done = subprocess.run(program, env=node.environ, cwd=node.host.parent, capture_output=True, text=True)
    else:
        done = forked.cli(*words, env=node.environ, cwd=node.host.parent)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def test_a_snapshot_as_a_layer(one: Node, two: Node, tmp_path: Path) -> None:
    for node in (one, two):
        base(node.host)
    first = one.run(fill)
    out = tmp_path / "layer.tar"
    for name in ("layer.tar", "again.tar"):
        cli(one, "env export", first.key[:12], "--store", str(one.store), "-o", str(tmp_path / name))
    assert out.read_bytes() == (tmp_path / "again.tar").read_bytes()
    cli(one, "env export", first.key[:12], "--store", str(one.store), "-o", str(tmp_path / "p.tar"), "--format", "tar")
    top = "opt/env"
    with tarfile.open(out) as layer, tarfile.open(tmp_path / "p.tar") as plain:
        names = [item.name for item in layer]
        assert f"{top}/.wh.old-1.dist-info" in names
        assert f"{top}/emptied/.wh..wh..opq" in names
        assert plain.getnames() == [name for name in names if "/.wh." not in name]
        small = layer.getmember(f"{top}/pkg/small")
        same = layer.getmember(f"{top}/pkg/same")
        assert sorted([small.islnk(), same.islnk()]) == [False, True]
        assert layer.getmember(f"{top}/pkg/big").mode == 0o4711
        assert layer.getmember(f"{top}/pkg/big").uid == 1234
        whole = small if small.isreg() else same
        assert whole.pax_headers["mtime"] == "1500000000.123456789"
        assert whole.pax_headers["SCHILY.xattr.user.note"] == "n"
        for item in layer:  # as tools apply one
            path = Path("/", two.host, os.path.relpath(item.name, top))
            if item.name.endswith("/.wh..wh..opq"):
                shutil.rmtree(path.parent, ignore_errors=True)  # new folders are opaque, too
                path.parent.mkdir(mode=layer.getmember(os.path.dirname(item.name)).mode)
            elif "/.wh." in item.name:
                shutil.rmtree(path.with_name(path.name.removeprefix(".wh.")))
    command = ["tar", "-x", "-C", two.host, f"--strip-components={top.count('/') + 1}", "--exclude=.wh.*", "--xattrs"]
    subprocess.run([*command, "--numeric-owner", "-p", "-f", out], check=True)
    assert listing(two.host) == listing(one.host)


def test_what_a_layer_cannot_hold_is_refused(node: Node, tmp_path: Path) -> None:
    def act(host: Path) -> None:
        (host / ".wh.odd").write_text("no whiteout")

    made = node.run(act)
    args = (made.key[:12], "--store", str(node.store), "-o", str(tmp_path / "out"))
    refused = cli(node, "env export", *args, check=False)
    assert (refused.returncode, (tmp_path / "out").exists()) == (71, False)
    cli(node, "env export", *args, "--format", "tar")
    with tarfile.open(tmp_path / "out") as made_of:
        assert "opt/env/.wh.odd" in made_of.getnames()


def test_what_is_in_place_is_made_anew_when_that_is_asked_for(node: Node) -> None:
    node.host.parent.mkdir(parents=True)
    (node.host.parent / "setup.sh").write_text("date +%N > env/made\n")
    run = ("--target", "env", "--no-background")
    cli(node, "env run", *run, "--", "sh", "setup.sh")
    first = (node.host / "made").read_text()
    time.sleep(1.1)  # the age of a snapshot is told in seconds
    told = cli(node, "env run", *run, "--refresh", "--", "sh", "setup.sh").stderr
    assert "ran-and-published (missed because a new snapshot was asked for)" in told
    assert (second := (node.host / "made").read_text()) != first
    assert "already in place" in cli(node, "env run", *run, "--frozen", "--", "sh", "setup.sh").stderr
    cli(node, "unmount", "env")
    assert "hit" in cli(node, "env run", *run, "--frozen", "--", "sh", "setup.sh").stderr
    assert (node.host / "made").read_text() == second
    failed = cli(node, "env run", "--target", "env", "--frozen", "--", "sh", "setup.sh", "more", check=False)
    assert failed.returncode == 66
    assert failed.stderr.splitlines()[-1].startswith("bootseer: no environment to restore, and the command is not to")
    both = cli(node, "env run", "--target", "env", "--frozen", "--refresh", "--", "true", check=False)
    assert both.returncode == 2


def test_a_hit_loads_nothing_of_what_a_miss_needs(node: Node) -> None:
    node.host.parent.mkdir(parents=True)
    (node.host.parent / "setup.sh").write_text("echo made > env/made\n")
    run = ("env", "run", "--target", "env", "--", "sh", "setup.sh")
    cli(node, "env run", "--no-background", *run[2:])
    cli(node, "unmount", "env")
    code = (
        "import atexit, sys, re._compiler\nreal, compiled = re._compiler.compile, []\n"
        "re._compiler.compile = lambda text, flags=0: (compiled.append(sys._getframe(2).f_globals['__name__']),"
        " real(text, flags))[1]\n"
        "from bootseer.cli import main\n"
        "atexit.register(lambda: print(compiled.count('bootseer.patterns'), *sys.modules))\nmain.main()"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, *run], env=node.environ, cwd=node.host.parent, capture_output=True, check=True
    )
    assert b"restored-mount (hit)" in told.stderr
    compiled, *loaded = told.stdout.decode().split()
    heavy = [
        "fractions",
        "rich",
        "asyncio",
        "httpx",
        "email",
        "argparse",
        "cryptography",
        "google.protobuf",
        "grpc",
        "http.client",
    ]
    heavy += [f"bootseer.{name}" for name in ("env.explain", "env.publish", "erofs", "blocks.publish", "blocks.fetch")]
    assert set(heavy) & set(loaded) == set()
    assert int(compiled) < 20


def test_the_command_line(node: Node, tmp_path: Path) -> None:
    node.host.parent.mkdir(parents=True)
    script = node.host.parent / "setup.sh"
    script.write_text("echo working; echo made > env/made\n")
    run = ("--target", "env", "--key-env", "HOME", "--no-background")
    first = cli(node, "env run", *run, "--", "sh", "setup.sh")
    assert first.stdout == "working\n"
    assert "env: ran-and-published (missed because no snapshot of these targets exists yet)" in first.stderr
    answer = msgspec.json.decode(cli(node, "env run", *run, "--json", "--", "sh", "setup.sh").stdout)
    assert answer["reason"] == "already in place on this node"
    assert "unmounted" in cli(node, "unmount", "env").stdout
    assert not (node.host / "made").exists()
    answer = msgspec.json.decode(cli(node, "env run", *run, "--json", "--", "sh", "setup.sh").stdout)
    assert (answer["outcome"], answer["exit_code"]) == ("restored-mount", 0)
    assert (node.host / "made").read_text() == "made\n"
    cli(node, "unmount", "--environments")

    script.write_text("echo working; mkdir -p env; echo other > env/made; echo more > env/more\n")
    told = cli(node, "env run", "--dry-run", "--target", "env", "--key-env", "HOME", "--", "sh", "setup.sh").stdout
    assert "missed because setup.sh changed" in told
    cli(node, "env run", *run, "--restore", "unpack", "--", "sh", "setup.sh")
    assert not mounts.is_mounted(node.host)
    listed = msgspec.json.decode(cli(node, "store ls", "--json").stdout)["environments"]
    assert len(listed) == 2
    new, old = (item["key"] for item in sorted(listed, key=lambda item: -item["entries"]))
    assert "entries are good" in cli(node, "env inspect", new[:10], "--verify").stdout
    told = cli(node, "env inspect", new, "--against", old).stdout
    assert "+ 0/more" in told
    assert "~ 0/made" in told
    assert msgspec.json.decode(cli(node, "env inspect", new, "--json").stdout)["key"] == new
    shown = cli(node, "store ls").stdout.splitlines()
    rows = [line for line in shown if line.strip()[:12] in (old[:12], new[:12])]
    assert len(rows) == 2
    assert all(str(node.host) in row for row in rows)


def test_a_step_of_a_script_ends_with_its_command_and_the_snapshot_follows(node: Node) -> None:
    """The process that publishes outlives the step; the script ends before it, and it holds nothing of the script's."""
    command = "mkdir -p env/pkg; head -c 3000000 /dev/urandom > env/pkg/data"
    script = f"bootseer env run --target env --json -- sh -c '{command}'; echo train"
    node.host.parent.mkdir(parents=True)
    environ = {**node.environ, "BOOTSEER_FAULTS": "env.publish.before-build=sleep:3"}
    done = subprocess.run(
        ["sh", "-c", script], env=environ, cwd=node.host.parent, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.endswith("train\n"), done.stderr
    assert msgspec.json.decode(done.stdout.removesuffix("train\n"))["outcome"] == "ran-and-publishing"
    (group,) = overlay.groups(Path(node.config.state_dir))
    assert publication.users.alive([group.record.publisher])
    assert not list(node.store.glob("env/snapshots/*/*.json"))
    until(lambda: bool(list(node.store.glob("env/snapshots/*/*.json"))), 30)
    until(lambda: not publication.users.alive([group.record.publisher]), 30)
    assert "published" in Path(node.config.state_dir, "env/publications.log").read_text()


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("env run", "--target", "env", "--", "sh", "-c", "exit 9"), 9, "nothing is published"),
        (("env run", "--target", "env", "--", "no-such-command"), 127, "no such command"),
        (("env run", "--target", "env", "--", "./broken"), 126, "Exec format error"),
        (("env run", "--target", "/", "--", "true"), 78, "not a plain absolute path"),
        (("env run", "--target", "env", "--key-file", "nope", "--", "true"), 78, "cannot read key file"),
        (("env run", "--target", "env", "--max-age", "soon", "--", "true"), 2, "is not an age"),
        (("env run", "--target", "env", "--restore", "magic", "--", "true"), 78, "unknown"),
        (("env inspect", "abc"), 66, "no snapshot abc"),
        (("env inspect", "../x"), 78, "not a snapshot key"),
        (("unmount",), 2, "name a DIR"),
        (("unmount", "env"), 66, "nothing of bootseer is mounted"),
    ],
)
def test_exit_codes(node: Node, args: tuple[str, ...], code: int, text: str) -> None:
    node.host.parent.mkdir(parents=True)
    node.store.mkdir()
    (node.host.parent / "broken").write_bytes(b"\x7fELF")
    (node.host.parent / "broken").chmod(0o755)
    done = cli(node, *args, check=False)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_finds_a_flipped_bit(node: Node) -> None:
    key = node.run(fill_plain).key
    (blob,) = sorted((path for path in (node.store / "blobs").rglob("*") if path.is_file()), key=os.path.getsize)[-1:]
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(bytes(data))
    done = cli(node, "env inspect", key, "--verify", check=False)
    assert done.returncode == 65, done.stderr
    assert "Traceback" not in done.stderr


def test_removing_snapshots(node: Node) -> None:
    first, second = (node.run(fill_plain, salt=salt).key for salt in ("1", "2"))
    assert len(list(node.store.glob("env/lists/*"))) == 2
    removed = cli(node, "env rm", first[:10]).stdout
    assert removed == f"removed snapshot {first[:12]}\n"
    left = [path.name for path in (node.store / "env").rglob("*") if path.is_file()]
    assert len(left) == 4  # the inventory goes with the next collections
    assert not [name for name in left if first in name]
    assert (node.host / "pkg" / "data").exists(), "what is mounted goes on"
    assert "no snapshot" in cli(node, "env rm", first[:10], check=False).stderr
    assert cli(node, "store gc", "--age", "1h").stdout == ""
    (name,) = node.store.glob("env/snapshots/*/*.json")
    found = manifest.decode(name.read_bytes(), f"{second}/{name.stem}")
    name.write_bytes(msgspec.structs.replace(found, created=found.created - 7200).encode())
    assert cli(node, "store gc", "--age", "1h", "--dry-run").stdout == "", "it was used later"
    for note in node.store.glob("uses/*"):
        os.utime(note, (found.created - 7200, found.created - 7200))
    assert cli(node, "store gc", "--age", "1h", "--dry-run").stdout == f"would remove snapshot {second[:12]}\n"
    assert cli(node, "store gc", "--age", "1h").stdout == f"removed snapshot {second[:12]}\n"
    assert not list(node.store.glob("env/snapshots/*/*.json"))
    node.release()
    node.run(fill_plain, salt="1")
    (name,) = node.store.glob("env/snapshots/*/*.json")
    name.write_bytes(b"damaged")
    cli(node, "env rm", first)
    assert node.run(fill_plain, salt="2").outcome is Outcome.RAN_AND_PUBLISHED


def test_a_snapshot_that_verifies_is_used_again(one: Node, two: Node) -> None:
    key = one.run(fill_plain).key
    found = snapshots.load(FolderStore(one.store), key)
    cache = Path(two.config.cache_dir)
    quarantine.put(cache, quarantine.mark_of(found), "its node had a bad disk")
    cli(two, "env inspect", "--verify", key)
    assert quarantine.reason(cache, quarantine.mark_of(found)) == ""
    assert two.run(fill_plain).reason == "hit"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bootseer")


# -- a real container -----------------------------------------------------------------------------------------------


def _made_by(run: Callable[[str], int], host: Path) -> int:
    return run("echo made > /opt/bootseer-test-env/made")


@pytest.mark.runtime
def test_a_container_fills_and_sees_the_target(one: Node, two: Node, tmp_path: Path) -> None:
    """The command runs inside a container over the mounted target; the next node's container sees its result."""
    from bootseer import image, oci
    from bootseer.oci.spec import RootFS

    for number in (0, 1):
        root = tmp_path / f"root{number}"
        for folder in (root, tmp_path / f"up{number}", tmp_path / f"wk{number}"):
            folder.mkdir()
        # this host's own root file system stands for an image
        mounts.mount_overlay([Path("/")], root, upper=tmp_path / f"up{number}", work=tmp_path / f"wk{number}")
    try:
        for number, node in enumerate((one, two)):
            root = tmp_path / f"root{number}"
            node.host = root / "opt" / "bootseer-test-env"

            def in_container(script: str, root: Path = root) -> int:
                config = oci.ImageConfig("amd64", "linux", RootFS(()))
                return image.runtime.run(root, config, ["/bin/sh", "-c", script], cwd="/")

            result = node.run(
                partial(_made_by, in_container),
                targets=(Target("/opt/bootseer-test-env", str(node.host)),),
            )
            assert result.outcome is (Outcome.RESTORED_MOUNT if number else Outcome.RAN_AND_PUBLISHED), result.reason
            assert in_container("grep -qx made /opt/bootseer-test-env/made") == 0
            assert in_container("grep -qx other /opt/bootseer-test-env/made") == 1
            node.release()
    finally:
        for node in (one, two):
            node.release()
        for number in (0, 1):
            mounts.unmount(tmp_path / f"root{number}")
    assert two.runs == 0


def test_a_mount_anywhere_stops_unpacking_before_the_first_move(tmp_path: Path) -> None:
    host, driver = tmp_path / "host", tmp_path / "driver"
    (host / "zz").mkdir(parents=True)
    driver.mkdir()
    (driver / "lib").write_text("driver")
    entries = [
        Entry(path, kind, 0o644, 0, 0, 0, 0) for path, kind in [("0", "d"), ("0/a", "f"), ("0/zz", "w")]
    ]  # fmt: skip
    subprocess.run(["mount", "--bind", driver, host / "zz"], check=True)
    try:
        with pytest.raises(UnsupportedError, match="mounted there"):
            check_mounts(entries, host)
        with pytest.raises(UnsupportedError, match="mounted there"):
            check_mounts([entries[0], Entry("0/zz", "f", 0o644, 0, 0, 0, 0)], host)
        check_mounts(entries[:2], host)
    finally:
        mounts.unmount(host / "zz")


@pytest.mark.parametrize("how", ["foreground", "background", "restored"])
def test_what_the_job_changed_is_not_handed_on(node: Node, two: Node, how: str) -> None:
    if how == "restored":
        two.run(fill_plain)
    first = node.run(fill_plain, background=how == "background")
    if first.publication:
        assert first.publication.wait(20)[0]
    runs = node.runs
    assert node.run(fill_plain).reason == "already in place on this node"
    (node.host / "pkg" / "data").write_bytes(b"the job's")
    again = node.run(fill_plain)
    assert (again.outcome, again.reason, node.runs) == (Outcome.RESTORED_MOUNT, "hit", runs)
    assert (node.host / "pkg" / "data").read_bytes() == b"d" * 100_000


def test_a_publication_ends_with_the_overlays_that_it_reads(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "env.publish.before-build=sleep:60")
    result = node.run(fill_plain, background=True)
    assert result.outcome is Outcome.RAN_AND_PUBLISHING
    (group,) = overlay.groups(Path(node.config.state_dir))
    assert (group.upper / "0" / "pkg" / "data").exists()
    assert publication.users.alive([group.record.publisher])
    group.unmount()  # as another process does
    assert not publication.users.alive([group.record.publisher])
    assert result.publication
    assert "cancelled" in result.publication.wait(0)[1]
    assert not list(node.store.glob("env/snapshots/*/*.json"))
    assert not group.area.exists()


def test_a_publication_that_runs_the_interpreter_in_the_target_stops_no_start(node: Node) -> None:
    def with_interpreter(host: Path) -> None:
        (host / "lib/python3.99/site-packages").mkdir(parents=True)
        (host / "bin").mkdir()
        (host / "bin/python").write_text("#!/bin/sh\nsleep 20; exit 1\n")
        (host / "bin/python").chmod(0o755)

    plain = {"targets": (Target(str(node.host)),), "image_digest": ""}
    node.run(with_interpreter, background=True, **plain)
    (group,) = overlay.groups(Path(node.config.state_dir))
    until(lambda: bool(group.in_use))
    began = time.monotonic()
    assert node.run(fill_plain, salt="other", **plain).outcome is Outcome.RAN_AND_PUBLISHED
    assert time.monotonic() - began < 10


def test_what_the_job_writes_beside_the_publication_is_not_in_it(
    node: Node, two: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "env.publish.before-capture=sleep:1")
    result = node.run(fill_plain, background=True)
    (node.host / "pkg" / "data").write_bytes(b"the job's")
    (node.host / "pkg" / "new").write_bytes(b"the job's")
    assert result.publication
    assert result.publication.wait(30) == (True, "")
    assert two.run(fill_plain).outcome is Outcome.RESTORED_MOUNT
    assert (two.host / "pkg" / "data").read_bytes() == b"d" * 100_000
    assert not (two.host / "pkg" / "new").exists()


def test_what_settles_while_the_command_runs_is_stored_before_it_ends(
    node: Node, two: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = os.urandom(5_000_000)

    def act(host: Path) -> None:
        (host / "pkg").mkdir(parents=True)
        (host / "pkg" / "early").write_bytes(noise)
        until(lambda: any(path.stat().st_size > 4_000_000 for path in node.store.rglob("*")), 30)
        (host / "pkg" / "late").write_bytes(b"late" * 1000)

    result = node.run(act, background=True)
    assert result.publication
    assert result.publication.wait(30) == (True, "")
    assert sum(path.stat().st_size for path in node.store.rglob("*") if path.is_file()) < 2 * len(noise)
    assert two.run(act).outcome is Outcome.RESTORED_MOUNT
    assert (two.host / "pkg" / "early").read_bytes() == noise
    assert (two.host / "pkg" / "late").read_bytes() == b"late" * 1000


def test_a_target_that_is_a_link_is_unmounted_before_its_area_goes(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    group = overlay.new_group("k" * 64, (Target(str(tmp_path / "link")),), config)
    group.mount_targets()
    assert mounts.is_mounted(tmp_path / "real")
    group.unmount()
    assert not mounts.is_mounted(tmp_path / "real")


def test_an_area_in_use_is_never_deleted(node: Node) -> None:
    result = node.run(fill_plain)
    (group,) = overlay.groups(Path(node.config.state_dir))
    with open(node.host / "pkg" / "data", "rb") as file:
        for mount in (*result.mounts, *result.mounts, *overlay.groups(Path(node.config.state_dir))):
            mount.unmount()
        assert not mounts.is_mounted(node.host)
        assert (group.upper / "0" / "pkg" / "data").exists()
        assert len(file.read()) == 100_000
    assert node.run(fill_plain).reason == "hit"


@pytest.mark.parametrize("worse", [False, True])
def test_a_freeze_that_fails_keeps_the_job_going(node: Node, monkeypatch: pytest.MonkeyPatch, worse: bool) -> None:
    mount, failed = mounts.mount_overlay, []

    def fail(*args: Any, **how: Any) -> None:
        if Path(os.path.realpath(args[1])) != node.host or (failed and not worse):
            return mount(*args, **how)
        failed.append(args)
        raise BootseerError("no")

    def act(host: Path) -> int:
        monkeypatch.setattr(mounts, "mount_overlay", fail)
        fill_plain(host)
        host.chmod(0o711)
        return 0

    result = node.run(act, background=True)
    assert (result.exit_code, result.publication, node.runs) == (0, None, 1 + worse)
    assert result.outcome is (Outcome.RAN if worse else Outcome.RAN_AND_PUBLISHED)
    assert (node.host / "pkg" / "data").read_bytes() == b"d" * 100_000
    assert node.host.stat().st_mode & 0o777 == 0o711
    assert mounts.is_mounted(node.host) is not worse
    assert len(overlay.groups(Path(node.config.state_dir))) == (0 if worse else 1)


def test_an_unmount_waits_for_no_disk(node: Node) -> None:
    node.run(fill_plain, background=True)
    entry = mounts.find(node.host)
    assert entry
    assert any("volatile" in option for option in entry.options)


def test_a_target_goes_also_when_the_restore_was_killed_that_had_made_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: a command that asks whether it is there would have found it, empty."""
    target = Target("/opt/env", str(node.host))
    group = overlay.new_group("k" * 64, (target,), node.config)
    group.record.users = []  # it has ended
    group.save()
    group.record.leaves = False
    with monkeypatch.context() as patch:
        patch.setattr(mounts, "mount_overlay", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            group.mount_targets()
    assert node.host.is_dir()
    overlay.sweep(node.config, [target])
    assert not node.host.exists()


def test_folders_as_deep_as_a_job_likes_go_with_the_overlay(node: Node) -> None:
    node.run(fill_plain)
    fd = os.open(node.host, os.O_RDONLY)
    for _ in range(2500):  # deeper than Python recurses, and than a path may be long
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    try:
        result = node.run(fill_plain)
        assert (result.reason, node.runs) == ("hit", 1)
        assert sorted(path.name for path in node.host.iterdir()) == ["pkg"]
        for mount in result.mounts:
            mount.unmount()
        assert not mounts.is_mounted(node.host)
        assert list(Path(node.config.cache_dir, "env").iterdir()) == []
    finally:  # pytest could not
        subprocess.run(["rm", "-rf", Path(node.config.cache_dir, "env")], check=True)


# -- other processes: what they use is shared or left alone ----------------------------------------------------------

OTHER = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from test_env_mount import Node, fill_plain
node = Node(Path({root!r}), "one", Path({root!r}) / "store")
result = node.run(fill_plain, salt={salt!r})
(node.host / "pkg" / "data").write_bytes(b"the job's")
print(result.outcome.value, flush=True)
for line in sys.stdin:
    if line == "read\\n":
        print((node.host / "pkg" / "data").read_bytes().decode(), flush=True)
    else:
        for mount in result.mounts:
            mount.unmount()
        print("unmounted", flush=True)
"""


class Other:
    """Another process that set up the target of node ``one``, wrote to it and goes on; it has no file open there."""

    def __init__(self, root: Path, salt: str = "", prefix: tuple[str, ...] = ()) -> None:
        code = OTHER.format(folder=str(Path(__file__).parent), root=str(root), salt=salt)
        self.process = forked.Popen(
            [*prefix, sys.executable, "-c", code], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.outcome = self._line()

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, what: str) -> str:
        assert self.process.stdin
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._line()

    def end(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait(60)
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[..., Other]]:
    made: list[Other] = []

    def start(**how: object) -> Other:
        made.append(Other(tmp_path, **how))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for item in made:
        item.end()


def test_another_environment_never_replaces_one_in_use(
    one: Node, other: Callable[..., Other], caplog: pytest.LogCaptureFixture
) -> None:
    job = other()
    assert job.outcome == "ran-and-published"
    with pytest.raises(NotWritableError, match=f"process {job.process.pid} .* uses the environment"):
        one.run(fill_plain, salt="other")
    assert (job.ask("read"), one.runs) == ("the job's", 0)
    job.end()
    assert one.run(fill_plain, salt="other").outcome is Outcome.RAN_AND_PUBLISHED
    assert "with what was written to it" in caplog.text


def test_a_rank_shares_what_another_uses_and_the_last_one_takes_it_down(
    one: Node, other: Callable[..., Other], caplog: pytest.LogCaptureFixture
) -> None:
    job = other()
    result = one.run(fill_plain)
    assert (result.outcome, result.reason) == (Outcome.RESTORED_MOUNT, "already in place on this node")
    assert "was changed since" in caplog.text
    assert (one.host / "pkg" / "data").read_bytes() == b"the job's"
    assert job.ask("unmount") == "unmounted"
    assert (one.host / "pkg" / "data").read_bytes() == b"the job's"
    job.end()
    (group,) = result.mounts
    group.unmount()
    assert not mounts.is_mounted(one.host)
    assert not list(Path(one.config.cache_dir, "env").iterdir())


def test_what_is_not_published_is_shared_while_it_is_used_and_then_made_anew(
    one: Node, other: Callable[..., Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(self: object) -> None:
        raise DataError("/job/x changed while the command ran")

    monkeypatch.setattr(observer.Observer, "result", changed)
    assert one.run(fill_plain).outcome is Outcome.RAN
    rank = other()
    assert rank.outcome == "restored-mount"
    assert other(salt="other").outcome == ""  # refused
    rank.end()
    assert (one.run(fill_plain).outcome, one.runs) == (Outcome.RAN, 2)


def test_who_looks_at_what_a_failed_command_left_may_try_again(one: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: Path) -> int:
        fill_plain(host)
        return 1

    assert one.run(fail).exit_code == 1
    monkeypatch.chdir(one.host)
    try:
        assert one.run(fill_plain).outcome is Outcome.RAN_AND_PUBLISHED
    finally:
        os.chdir("/")


def test_a_rank_that_cannot_note_itself_shares_all_the_same(
    one: Node, other: Callable[..., Other], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other()

    def full(self: object) -> None:
        raise FullError("no space is left")

    with monkeypatch.context() as patch:
        patch.setattr(overlay.Group, "save", full)
        assert one.run(fill_plain).outcome is Outcome.RESTORED_MOUNT
    assert one.runs == 0
    assert "no space is left" in caplog.text


def test_who_has_files_open_is_left_alone(one: Node) -> None:
    one.run(fill_plain)
    with open(one.host / "pkg" / "data", "rb") as file:
        with pytest.raises(NotWritableError, match="files open in"):
            one.run(fill_plain, salt="other")
        assert mounts.is_mounted(one.host)
        assert len(file.read()) == 100_000
        assert one.run(fill_plain).reason == "already in place on this node"
    assert one.run(fill_plain, salt="other").outcome is Outcome.RAN_AND_PUBLISHED


def test_two_pods_with_the_same_folders_leave_each_other_alone(one: Node, other: Callable[..., Other]) -> None:
    job = other(prefix=("unshare", "-m", "--propagation", "private"))
    (area,) = Path(one.config.cache_dir, "env").iterdir()
    for salt in ("", "other", ""):
        one.run(fill_plain, salt=salt)
        assert len((one.host / "pkg" / "data").read_bytes()) == 100_000
        assert area.exists()
        assert job.ask("read") == "the job's"
    cli(one, "unmount", "--environments", ours=True)
    assert not mounts.is_mounted(one.host)
    assert job.ask("read") == "the job's"
    assert [path.name for path in area.parent.iterdir()] == [area.name]


def test_two_pods_may_restore_one_snapshot(one: Node, two: Node, other: Callable[..., Other]) -> None:
    two.run(fill_plain)
    job = other(prefix=("unshare", "-m", "--propagation", "private"))
    assert job.outcome == "restored-mount"
    (area,) = Path(one.config.cache_dir, "env").iterdir()
    for _ in range(2):
        assert one.run(fill_plain).outcome is Outcome.RESTORED_MOUNT
        assert (one.host / "pkg" / "data").read_bytes() == b"d" * 100_000
        one.release()
        assert [path.name for path in area.parent.iterdir()] == [area.name]
        assert job.ask("read") == "the job's"
    assert job.ask("unmount") == "unmounted"
    assert not list(area.parent.iterdir())


def test_what_a_pod_left_that_was_killed_is_removed_a_day_later(one: Node, other: Callable[..., Other]) -> None:
    job = other(prefix=("unshare", "-m", "--propagation", "private"))
    (area,) = Path(one.config.cache_dir, "env").iterdir()
    os.utime(area / "boot", (0, 0))
    cli(one, "clean")
    assert area.exists(), "its overlay lives"
    job.process.kill()
    job.process.wait(60)
    until(lambda: cli(one, "clean") and not area.exists(), 20)  # the kernel may take a moment to end the namespace
    assert not list(Path(one.config.state_dir, "env").glob("*.json"))


def test_files_that_another_namespace_shows_are_kept(one: Node) -> None:
    """As a container does that was given the target: its mounts are copies."""
    result = one.run(fill_plain)
    (area,) = Path(one.config.cache_dir, "env").iterdir()
    script = f"echo; read line; cat {one.host}/pkg/data"
    with subprocess.Popen(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as container:
        assert container.stdout
        container.stdout.readline()
        for mount in result.mounts:
            mount.unmount()
        assert not mounts.is_mounted(one.host)
        assert area.exists()
        assert container.communicate(b"\n", timeout=20)[0] == b"d" * 100_000
    overlay.sweep(one.config)
    assert not area.exists()


def test_a_target_may_have_another_name(one: Node, tmp_path: Path) -> None:
    one.run(fill_plain)
    (tmp_path / "link").symlink_to(one.host)
    other_name = (Target("/opt/env", str(tmp_path / "link")),)
    with open(one.host / "pkg" / "data", "rb"), pytest.raises(NotWritableError, match="files open in"):
        one.run(fill_plain, targets=other_name, salt="other")
    cli(one, "unmount", str(tmp_path / "link"), ours=True)
    assert not mounts.is_mounted(one.host)


def test_the_script_that_ran_it_uses_it(one: Node) -> None:
    one.host.parent.mkdir(parents=True)
    run = f"{sys.executable} -m bootseer.cli.main env run --target {one.host}"
    script = f"{run} -- sh -c 'echo 1 > {one.host}/made'; echo ready; read line; cat {one.host}/made"
    with subprocess.Popen(
        ["sh", "-c", script], env=one.environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as job:
        assert job.stdout
        assert job.stdout.readline() == "ready\n"
        done = cli(one, "env run", "--target", str(one.host), "--", "true", check=False)
        assert done.returncode == 73
        assert f"process {job.pid} (sh) uses" in done.stderr
        done = cli(one, "unmount", "--environments", check=False)
        assert done.returncode == 73
        assert "still in use" in done.stderr
        assert job.communicate("\n", timeout=20)[0] == "1\n"
    assert "unmounted" in cli(one, "unmount", "--environments").stdout


def test_release_by_force(one: Node, other: Callable[..., Other]) -> None:
    other()
    cli(one, "unmount", str(one.host), "--force")
    assert not mounts.is_mounted(one.host)


def test_an_environment_on_two_targets_is_taken_down_by_one_start(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Target(f"/opt/{name}", str(tmp_path / name)) for name in ("first", "second"))
    for target in (first, second):
        target.host.mkdir()
    both = node.run(lambda host: 0, targets=(first, second)).mounts[0]
    taken: list[str] = []
    real = overlay.Group.take_down

    def slow(group: overlay.Group) -> None:
        taken.append(group.record.id)
        time.sleep(0.3)
        real(group)

    monkeypatch.setattr(overlay.Group, "take_down", slow)
    together(lambda target: node.run(lambda host: 0, targets=(target,), command=(target.path,)), (first, second))
    assert taken.count(both.record.id) == 1
    assert node.runs == 3
    assert mounts.is_mounted(first.host)
    assert mounts.is_mounted(second.host)
