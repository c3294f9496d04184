"""Mounts that are really made: EROFS from files and loop devices, overlays, and what is said when they fail."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.errors import BootseerError, DataError, NotFoundError, PrivilegeError, UnsupportedError
from bootseer.kernel import fuse, libc, loop, mount

pytestmark = pytest.mark.root

BIG = os.urandom(300_000)


@pytest.fixture
def image(place: Path) -> tuple[Path, Path]:
    tree = place / "tree"
    tree.mkdir()
    (tree / "big").write_bytes(BIG)
    (tree / "small").write_text("small")
    erofs.build(tree, place / "meta", place / "data")
    return place / "meta", place / "data"


def _folder(place: Path, name: str) -> Path:
    path = place / name
    path.mkdir()
    return path


def _loops() -> int:
    return sum(1 for path in Path("/sys/block").glob("loop*/loop/backing_file"))


def test_erofs_from_files(place: Path, image: tuple[Path, Path]) -> None:
    target, before = _folder(place, "target"), _loops()
    way = mount.mount_erofs(*image, target)
    assert (target / "big").read_bytes() == BIG
    if way == "file":
        assert _loops() == before
    with pytest.raises(OSError, match="Read-only"):
        (target / "new").touch()
    mount.unmount(target)
    assert not mount.is_mounted(target)


@pytest.mark.parametrize("code", [errno.ENOTBLK, errno.EINVAL])
def test_erofs_through_loop_devices(
    place: Path,
    image: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    """Where the kernel cannot mount files; the devices free themselves after the unmount."""
    real, target, before = libc.mount, _folder(place, "target"), _loops()

    def old_kernel(source: str, *rest: object) -> None:
        if not source.startswith("/dev/loop"):
            raise OSError(code, os.strerror(code))
        real(source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(libc, "mount", old_kernel)
    assert mount.mount_erofs(*image, target) == "loop"
    assert (target / "big").read_bytes() == BIG
    assert _loops() == before + 2
    assert "loop devices" in caplog.text
    mount.unmount(target)
    assert _loops() == before


def test_erofs_on_a_file_system_that_cannot_back_it(place: Path, image: tuple[Path, Path]) -> None:
    memory, target = _folder(place, "memory"), _folder(place, "target")
    mount.mount("tmpfs", memory, "tmpfs")
    copies = [Path(shutil.copy(part, memory)) for part in image]
    mount.mount_erofs(copies[0], copies[1], target)
    assert (target / "small").read_text() == "small"
    mount.unmount(target)
    mount.unmount(memory)


def test_erofs_over_fuse(place: Path, image: tuple[Path, Path]) -> None:
    served, target = _folder(place, "served"), _folder(place, "target")
    data = image[1].read_bytes()
    operations = fuse.SingleFile("data", len(data), lambda offset, size, ctx: memoryview(data)[offset : offset + size])
    with fuse.Server(operations, served):
        mount.mount_erofs(image[0], served / "data", target)
        assert (target / "big").read_bytes() == BIG
        mount.unmount(target)


def test_direct_reads_ask_for_what_is_read_and_no_more(place: Path, image: tuple[Path, Path]) -> None:
    """The readahead of the data file itself, which is another one each time, would reach beyond."""
    served, target = _folder(place, "served"), _folder(place, "target")
    data = image[1].read_bytes()
    asked: list[tuple[int, int]] = []

    def read(offset: int, size: int, ctx: fuse.Context) -> memoryview:
        asked.append((offset, size))
        return memoryview(data)[offset : offset + size]

    with fuse.Server(fuse.SingleFile("data", len(data), read), served):
        mount.mount_erofs(image[0], served / "data", target, direct=True)
        if "directio" not in Path("/proc/self/mounts").read_text():
            mount.unmount(target)
            pytest.skip("this kernel reads backing files through their page cache only")
        with open(target / "big", "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            assert os.pread(file.fileno(), 4096, 8192) == BIG[8192:12288]
            assert os.pread(file.fileno(), 8192, 65536) == BIG[65536:73728]
        assert [size for _, size in asked] == [4096, 8192]
        assert asked[1][0] - asked[0][0] == 65536 - 8192
        assert (target / "big").read_bytes() == BIG
        mount.unmount(target)


def test_a_kernel_that_cannot_read_directly_mounts_all_the_same(
    place: Path, image: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = libc.mount

    def older(source: str, target: str, fstype: str, flags: int, data: str) -> None:
        if "directio" in data:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(source, target, fstype, flags, data)

    monkeypatch.setattr(libc, "mount", older)
    target = _folder(place, "target")
    mount.mount_erofs(*image, target, direct=True)
    assert (target / "big").read_bytes() == BIG
    mount.unmount(target)


@pytest.mark.parametrize("name", ["plain", "a,b", "a:b", "a b", "a\\b", "ü", "a=b"])
def test_paths_of_any_name(place: Path, image: tuple[Path, Path], name: str) -> None:
    odd = _folder(place, f"odd-{name}")
    parts = [Path(shutil.copy(part, odd)) for part in image]
    target, upper, work, over = (_folder(odd, f"{part}-{name}") for part in ("target", "upper", "work", "over"))
    mount.mount_erofs(parts[0], parts[1], target)
    assert mount.is_mounted(target)
    mount.mount_overlay([target], over, upper=upper, work=work)
    (over / "small").write_text("changed")
    assert (upper / "small").read_text() == "changed"
    assert (over / "big").read_bytes() == BIG
    mount.unmount(over)
    mount.unmount(target)


def test_unmount_says_why_not(place: Path) -> None:
    target = _folder(place, "target")
    with pytest.raises(BootseerError, match="is not a mount"):
        mount.unmount(target)
    with pytest.raises(NotFoundError):
        mount.unmount(place / "absent")
    mount.mount("tmpfs", target, "tmpfs")
    with (target / "file").open("w"):
        with pytest.raises(BootseerError, match=r"in use.*fuser"):
            mount.unmount(target)
        mount.unmount(target, lazy=True)
    assert not mount.is_mounted(target)


def test_links_lead_to_the_mount(place: Path) -> None:
    """mount(2) follows them: who then looks for a mount on the link itself deletes what is beneath a mount in use."""
    target = _folder(place, "tar get")
    (place / "link").symlink_to(place)
    (place / "loop").symlink_to("loop")
    (place / "sub").mkdir()
    for name, to in (("one", target), ("two", "one"), ("three", "sub/../tar get/"), ("four", "link/./two")):
        (place / name).symlink_to(to)
        mount.mount("tmpfs", place / name, "tmpfs")
        entry = mount.find(place / name)
        assert entry is not None
        assert entry.target == str(target)
        assert mount.real(place / name) == str(target)
        mount.unmount(place / name)
        assert not mount.is_mounted(target)
    assert not mount.is_mounted(place / "loop")
    (place / "up").symlink_to("sub/..")
    assert (mount.real("/"), mount.real(place / "up")) == ("/", str(place))
    assert not mount.is_mounted(target)
    mount.mount("tmpfs", target, "tmpfs")
    assert mount.is_mounted(place / "link" / "tar get")
    assert mount.is_mounted("/proc")
    entry = mount.find(target)
    assert entry
    assert (entry.fstype, entry.target) == ("tmpfs", str(target))
    mount.unmount(target)


def test_bad_input(place: Path, image: tuple[Path, Path]) -> None:
    target, other = _folder(place, "target"), place / "other"
    other.write_bytes(b"no image" * 1000)
    with pytest.raises(DataError, match="not an EROFS image"):
        mount.mount_erofs(other, None, target)
    with pytest.raises(NotFoundError):
        mount.mount_erofs(place / "absent", None, target)
    with pytest.raises(NotFoundError):
        mount.mount_erofs(image[0], place / "absent", target)
    with pytest.raises(NotFoundError):
        mount.mount_erofs(*image, place / "absent")
    with pytest.raises(UnsupportedError, match=r"no nosuchfs.*modprobe"):
        mount.mount("x", target, "nosuchfs")
    with pytest.raises(UnsupportedError, match="4095"):
        mount.mount("x", target, "tmpfs", data="x" * 4096)
    with pytest.raises(NotFoundError):
        mount.mount_overlay([place / "absent"], target, upper=_folder(place, "up"), work=_folder(place, "work"))
    assert not mount.is_mounted(target)


def test_without_privileges(place: Path) -> None:
    """A root without capabilities, which is what root is in most containers."""
    script = """
import sys
from pathlib import Path
from bootseer.errors import PrivilegeError
from bootseer.kernel import fuse, mount
place = Path(sys.argv[1])
tries = (
    lambda: mount.mount("x", place, "tmpfs"),
    lambda: mount.unmount("/proc"),
    lambda: fuse.Server(fuse.SingleFile("x", 1, lambda *a: b""), place).start(),
)
for action in tries:
    try:
        action()
    except PrivilegeError as exc:
        print(exc)
print(mount.private_namespace())
"""
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", script, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done
    assert lines[-1] == "False"
    assert all("root" in line for line in lines[:-1])


def test_a_private_namespace_takes_its_mounts_along(place: Path) -> None:
    script = (
        "import sys; from bootseer.kernel import mount; assert mount.private_namespace();"
        "mount.mount('x', sys.argv[1], 'tmpfs'); assert mount.is_mounted(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", script, str(place)], timeout=30, check=True)
    assert not mount.is_mounted(place)


def test_loop_device_frees_itself(place: Path, image: tuple[Path, Path]) -> None:
    before = _loops()
    with loop.attached(image[0]) as device:
        assert _loops() == before + 1
        assert Path(device).read_bytes()[:4096] == image[0].read_bytes()[:4096]
        assert Path(f"/sys/block/{device[5:]}/ro").read_text() == "1\n"
    assert _loops() == before


def test_privilege_error_names_the_way_out() -> None:
    error = mount.translate(OSError(errno.EPERM, "Operation not permitted"), "mount erofs on /x", "erofs")
    assert isinstance(error, PrivilegeError)
    assert error.exit_code == 77
