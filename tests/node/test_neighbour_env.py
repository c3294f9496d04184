"""What a neighbour on the node, or in the store, does to an environment that root sets up."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from bootseer import env, folders
from bootseer.config import Config
from bootseer.env import EnvResult, EnvSpec, Outcome, Target, overlay
from bootseer.errors import ConfigError
from bootseer.kernel import mount as mounts

pytestmark = pytest.mark.root

ALICE = 65534


class Site:
    """A folder of root's with a folder of the user alice in it, and a folder of the host that is nobody's business."""

    def __init__(self, root: Path) -> None:
        self.alice = root / "alice"
        self.alice.mkdir()
        os.chown(self.alice, ALICE, ALICE)
        root.chmod(0o755)
        self.etc = root / "etc"
        self.etc.mkdir()
        (self.etc / "passwd").write_text("root")
        self.config = Config(cache_dir=str(root / "cache"), state_dir=str(root / "state"))
        self.store = root / "store"

    def spec(self, host: Path, **changed: object) -> EnvSpec:
        base = EnvSpec(
            targets=(Target("/alice/env", str(host)),), command=("make-env",), image_digest="sha256:1", background=False
        )
        return msgspec.structs.replace(base, **changed)

    def run(self, spec: EnvSpec, command: Callable[[], int] | None = None) -> EnvResult:
        return env.run(spec, command or (lambda: 0), store_url=str(self.store), config=self.config)

    def etc_is_untouched(self) -> bool:
        return os.listdir(self.etc) == ["passwd"] and not mounts.is_mounted(self.etc) and self.etc.stat().st_uid == 0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    for group in overlay.groups(Path(made.config.state_dir))[::-1]:
        group.take_down()


def fill(folder: Path) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "ld.so.preload").write_text("evil")
    return 0


@pytest.mark.parametrize("restore", ["auto", "unpack"])
@pytest.mark.parametrize("where", ["the target", "a folder above"])
@pytest.mark.parametrize("contained", [True, False])
def test_root_follows_no_link_of_a_user_to_a_target(site: Site, restore: str, where: str, contained: bool) -> None:
    good = site.etc.parent / "good"
    target = site.alice / "env" if where == "the target" else site.alice / "x" / "env"
    given = {"restore": restore, "image_digest": "sha256:1" if contained else ""}
    if contained:  # there is a snapshot
        assert site.run(site.spec(good, **given), lambda: fill(good)).outcome is Outcome.RAN_AND_PUBLISHED
    (site.alice / target.relative_to(site.alice).parts[0]).symlink_to(site.etc if target.name == "env" else "")
    os.chown(site.alice / target.relative_to(site.alice).parts[0], ALICE, ALICE, follow_symlinks=False)
    if where == "a folder above":
        (site.etc / "env").mkdir()
        (site.alice / "x").unlink()
        (site.alice / "x").symlink_to(site.etc)
    path = "/alice/env" if contained else str(target)
    seen: list[bool] = []
    result = site.run(
        site.spec(target, targets=(Target(path, str(target)),), **given),
        lambda: seen.append(mounts.is_mounted(site.etc) or mounts.is_mounted(site.etc / "env")) or 0,
    )
    assert (result.outcome, result.exit_code, seen, result.mounts) == (Outcome.RAN, 0, [False], [])
    assert "others can replace" in result.reason
    if where == "a folder above":
        assert os.listdir(site.etc / "env") == []
        (site.etc / "env").rmdir()
    assert site.etc_is_untouched()


def test_root_uses_no_target_that_somebody_else_can_replace(site: Site) -> None:
    (site.alice / "env").mkdir()
    result = site.run(site.spec(site.alice / "env"))
    assert (result.outcome, result.mounts) == (Outcome.RAN, [])
    assert f"others can replace {site.alice}/env" in result.reason
    os.chown(site.alice, 0, 0)
    assert site.run(site.spec(site.alice / "env")).outcome is Outcome.RAN_AND_PUBLISHED


@pytest.mark.parametrize("restore", ["auto", "unpack"])
def test_no_link_is_followed_below_what_a_container_sees(site: Site, restore: str) -> None:
    """Its root is this root: it puts links that look like root's own."""
    shown = site.etc.parent / "shown"
    shown.mkdir()
    (shown / "env").symlink_to(site.etc)
    (shown / "x").symlink_to("..")
    for name in ("env", "x/etc"):
        target = Target("/shown/env", str(shown / name), str(shown))
        result = site.run(site.spec(shown, targets=(target,), mounts=((str(shown), "/shown"),), restore=restore))
        assert (result.outcome, result.mounts) == (Outcome.RAN, [])
        assert "is a link or no folder, or lies behind one" in result.reason
    assert site.etc_is_untouched()


def test_root_neither_unpacks_nor_scans_where_a_container_changes_names(site: Site) -> None:
    shown, good = site.etc.parent / "shown", site.etc.parent / "good"
    (shown / "env").mkdir(parents=True)
    assert site.run(site.spec(good, restore="unpack"), lambda: fill(good)).outcome is Outcome.RAN_AND_PUBLISHED
    target = Target("/alice/env", str(shown / "env"), str(shown))
    shared = site.spec(shown, targets=(target,), mounts=((str(shown), "/shown"),))
    result = site.run(msgspec.structs.replace(shared, restore="unpack"))
    assert (result.outcome, os.listdir(shown / "env")) == (Outcome.RAN, [])
    assert "other containers may change /alice/env while root unpacks there" in result.reason
    result = site.run(shared)  # mounted, it is used
    assert (result.outcome, os.listdir(shown / "env")) == (Outcome.RESTORED_MOUNT, ["ld.so.preload"])


def test_links_of_roots_own_are_followed(site: Site) -> None:
    (site.etc.parent / "disk").mkdir()
    (site.etc.parent / "opt").symlink_to("disk")
    target = site.etc.parent / "opt" / "env"
    assert site.run(site.spec(target), lambda: fill(target)).outcome is Outcome.RAN_AND_PUBLISHED
    assert mounts.is_mounted(site.etc.parent / "disk" / "env")


def test_a_target_swapped_while_root_works_leads_nowhere_else(site: Site) -> None:
    """A container's root exchanges folder and link without end; each look is the folder or an error."""
    from bootseer.env import place

    shown = site.etc.parent / "shown"
    (shown / "env").mkdir(parents=True)
    (shown / "link").symlink_to(site.etc)
    script = (
        "import ctypes, os; c = ctypes.CDLL(None)\n"
        f"while True: c.renameat2(-100, b'{shown}/env', -100, b'{shown}/link', 2)"
    )
    racer = subprocess.Popen([sys.executable, "-c", script])
    target = Target("/shown/env", str(shown / "env"), str(shown))
    seen = {"folder": 0, "refused": 0}
    try:
        for _ in range(3000):
            try:
                with place.opened(target, make=True) as path:
                    assert os.listdir(path) == []
                    seen["folder"] += 1
            except (ConfigError, FileNotFoundError, FileExistsError):
                seen["refused"] += 1
    finally:
        racer.kill()
        racer.wait()
    assert min(seen.values()) > 100, seen
    assert site.etc_is_untouched()


@pytest.mark.parametrize("restore", ["auto", "unpack"])
def test_from_the_command_line(site: Site, restore: str) -> None:
    """The shell command that a user asks root to run."""
    target = site.alice / "env"
    environ = {
        "PATH": os.environ["PATH"],
        "BOOTSEER_CACHE_DIR": site.config.cache_dir,
        "BOOTSEER_STATE_DIR": site.config.state_dir,
    }
    target.symlink_to(site.etc)
    command = [
        "bootseer",
        "env",
        "run",
        "--no-background",
        "--target",
        target,
        "--restore",
        restore,
        "--store",
        site.store,
    ]
    done = subprocess.run([*command, "true"], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert f"others can replace {target}" in done.stderr
    assert site.etc_is_untouched()


def test_what_a_snapshot_says_of_rights_is_not_unpacked(site: Site) -> None:
    """Set-id bits, capabilities, access lists and owners of others; and the target stays whose it is."""
    one, two = site.etc.parent / "one", site.etc.parent / "two"

    def command() -> int:
        fill(one)
        for name, mode in (("sh", 0o6755), ("caps", 0o755)):
            shutil.copy("/bin/true", one / name)
            (one / name).chmod(mode)
        # CAP_SETUID, permitted and effective
        os.setxattr(one / "caps", "security.capability", bytes.fromhex("0100000280000000000000000000000000000000"))
        os.setxattr(one / "caps", "user.note", b"kept")
        (one / "sub").mkdir()
        (one / "sub").chmod(0o2777)
        os.chown(one / "sub", ALICE, ALICE)
        (one / "sub" / "link").symlink_to("x")
        os.chown(one / "sub" / "link", ALICE, ALICE, follow_symlinks=False)
        os.chown(one / "caps", 1234, 1234)
        os.setxattr(one / "caps", "security.capability", bytes.fromhex("0100000280000000000000000000000000000000"))
        os.chown(one, ALICE, ALICE)
        one.chmod(0o777)
        return 0

    assert site.run(site.spec(one, restore="unpack"), command).outcome is Outcome.RAN_AND_PUBLISHED
    two.mkdir(mode=0o711)
    (two / "sub").mkdir()
    os.chown(two, 1234, 77)
    assert site.run(site.spec(two, restore="unpack")).outcome is Outcome.RESTORED_UNPACK
    info = {path.name: os.lstat(path) for path in (two, *two.rglob("*"))}
    assert (info["two"].st_uid, info["two"].st_gid, stat.S_IMODE(info["two"].st_mode)) == (1234, 77, 0o711)
    assert {name: found.st_uid for name, found in info.items() if found.st_uid} == {"two": 1234, "caps": 1234}
    assert not [name for name, found in info.items() if found.st_mode & 0o6000 or (found.st_gid and name != "two")]
    assert os.listxattr(two / "caps") == ["user.note"]


def test_owners_in_a_containers_root_file_system_are_the_images_users(site: Site) -> None:
    one, root = site.etc.parent / "one", site.etc.parent / "rootfs"

    def command() -> int:
        fill(one)
        os.chown(one / "ld.so.preload", 1000, 1000)
        return 0

    assert site.run(site.spec(one, restore="unpack"), command).outcome is Outcome.RAN_AND_PUBLISHED
    root.mkdir(mode=0o700)
    spec = site.spec(root, targets=(Target("/alice/env", str(root / "opt" / "env"), str(root)),), restore="unpack")
    assert site.run(spec).outcome is Outcome.RESTORED_UNPACK
    assert (root / "opt" / "env" / "ld.so.preload").stat().st_uid == 1000


def test_a_forged_journal_moves_nothing_outside_of_the_target(site: Site) -> None:
    """As the root of a container writes it, whose files are root's."""
    from bootseer.env.unpack import beside

    base, prefix = beside(Target(str(site.etc.parent / "good")))
    folder = base / f"{prefix}x"
    folder.mkdir()
    for name, text in (("lock", ""), ("0", "planted"), ("1", "planted"), ("journal", "")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    lines = [f'["{site.etc}/passwd", true]', '["../etc/passwd", true]', '["../etc", [511, 1, 1, [0, 0]]]', "[]", "{"]
    (folder / "journal").write_text("\n".join([*lines, ""]))
    good = site.etc.parent / "good"
    with contextlib.suppress(Exception):
        site.run(site.spec(good), lambda: fill(good))
    assert (site.etc / "passwd").read_text() == "root"
    assert site.etc_is_untouched()


SHADOW = "root:$6$abc$hashhashhash:19000:0:99999:7:::\nthe plan: buy all GPUs\n"


def published(site: Site) -> str:
    return "".join(
        path.read_text(errors="replace") for path in site.store.rglob("*") if path.is_file() and "env" in path.parts
    )


@pytest.mark.parametrize("contained", [True, False])
@pytest.mark.parametrize("how", ["an absolute path", "a way up", "a link", "the key file is a link", "a key folder"])
def test_what_root_alone_may_read_is_no_part_of_a_key(site: Site, contained: bool, how: str) -> None:
    """Alice's requirements file includes a file of root's, or is one."""
    secret, reqs, good = site.etc / "shadow", site.alice / "requirements.txt", site.etc.parent / "good"
    secret.write_text(SHADOW)
    secret.chmod(0o600)
    include = {"an absolute path": secret, "a way up": "../etc/shadow", "a link": "more.txt"}.get(how, "")
    (site.alice / "more.txt").symlink_to(secret)
    if how == "the key file is a link":
        reqs.symlink_to(secret)
    else:
        reqs.write_text(f"-r {include}\n")
        os.chown(reqs, ALICE, ALICE)
    given = site.alice if how == "a key folder" else reqs
    if contained:
        spec = site.spec(good, key_files=(str(given),), mounts=((str(site.alice), "/alice"),))
    else:
        spec = site.spec(good, targets=(Target(str(good)),), key_files=(str(given),), cwd=str(site.alice))
        spec = msgspec.structs.replace(spec, image_digest="")
    if how == "the key file is a link":
        with pytest.raises(ConfigError, match="cannot read key file"):
            site.run(spec, lambda: fill(good))
        return
    assert site.run(spec, lambda: fill(good)).outcome is Outcome.RAN_AND_PUBLISHED
    text = published(site)
    assert "buy all GPUs" not in text
    assert "hashhash" not in text
    assert f'"size":{len(SHADOW)}' not in text


def test_files_that_everybody_may_read_count_without_their_text(site: Site) -> None:
    """A requirements file beside the job's folder is ordinary; only what the job's folder holds is explained."""
    good, shared = site.etc.parent / "good", site.etc.parent / "shared.txt"
    (site.etc / "requirements.txt").write_text("-r ../shared.txt\nours==1\n")
    shared.write_text("theirs==1\n")
    site.etc.parent.chmod(0o755)
    spec = site.spec(good, targets=(Target(str(good)),), key_files=("requirements.txt",), cwd=str(site.etc))
    spec = msgspec.structs.replace(spec, image_digest="")
    from bootseer.env import key

    document = key.build(spec)
    files = {name: entry.text for name, entry in document.files.items()}
    hidden = not folders.enterable(shared)  # as pytest's folders are
    assert files == {"requirements.txt": "-r ../shared.txt\nours==1\n"} | ({} if hidden else {"../shared.txt": ""})
    shared.write_text("theirs==2\n")
    assert (key.build(spec).key != document.key) is not hidden


@pytest.mark.parametrize("required", [True, False])
def test_a_pipe_in_place_of_a_key_file_holds_nobody_up(site: Site, required: bool) -> None:
    good = site.etc.parent / "good"
    os.mkfifo(site.alice / "pipe")
    (site.alice / "requirements.txt").write_text("-r pipe\n")
    name = "pipe" if required else "requirements.txt"
    spec = site.spec(good, key_files=(str(site.alice / name),), mounts=((str(site.alice), "/alice"),))
    if required:
        with pytest.raises(ConfigError, match=r"cannot read key file .*: it is no regular file"):
            site.run(spec)
    else:
        assert site.run(spec, lambda: fill(good)).outcome is Outcome.RAN_AND_PUBLISHED
    with open(site.alice / "huge", "wb") as file:
        file.truncate(2 << 40)
    spec = site.spec(good, key_files=(str(site.alice / "huge"),), mounts=((str(site.alice), "/alice"),))
    with pytest.raises(ConfigError, match="more than 8 GiB"):
        site.run(spec)


def test_a_mounted_snapshot_does_not_say_whose_roots_target_is(site: Site) -> None:
    good = site.etc.parent / "good"

    def give_away() -> int:
        code = fill(good)
        os.chown(good, ALICE, ALICE)
        good.chmod(0o2777)
        return code

    assert site.run(site.spec(good), give_away).outcome is Outcome.RAN_AND_PUBLISHED
    for group in overlay.groups(Path(site.config.state_dir))[::-1]:
        group.take_down()
    os.chown(good, 0, 0)
    good.chmod(0o755)
    assert site.run(site.spec(good)).outcome is Outcome.RESTORED_MOUNT
    assert (good.stat().st_uid, stat.S_IMODE(good.stat().st_mode)) == (0, 0o755)
