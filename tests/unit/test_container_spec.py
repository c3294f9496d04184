"""The runtime configuration made from an image's configuration."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import oci
from bootseer.errors import ConfigError, NotFoundError, UnsupportedError
from bootseer.image import container
from bootseer.image.cdi import Selection
from bootseer.image.container import Bind


@contextlib.contextmanager
def limited_memory(room: int = 1 << 30) -> Iterator[None]:
    """This process gets at most so many bytes more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def config(**inner: Any) -> oci.ImageConfig:
    return oci.ImageConfig(
        architecture="amd64", os="linux", rootfs=oci.RootFS(diff_ids=()), config=oci.ContainerConfig(**inner)
    )


def make(rootfs: Path, inner: oci.ImageConfig, args: list[str], **more: Any) -> dict[str, Any]:
    given = {"env": {}, "mounts": (), "cwd": "", "network": "host", **more}
    return container.spec(rootfs, inner, args, **given)


def test_a_label_without_a_value_is_one_all_the_same() -> None:
    """As for tools in Go, for which it is empty."""
    raw = b'{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":[]},"config":{"Labels":{"a":null}}}'
    assert oci.spec.decode(raw, oci.ImageConfig, "it").config is not None


@pytest.mark.parametrize(
    ("entrypoint", "cmd", "argv", "wanted"),
    [
        (None, ("a", "b"), [], ["a", "b"]),
        (None, ("a",), ["x"], ["x"]),
        (("e",), ("a",), [], ["e", "a"]),
        (("e",), ("a",), ["x"], ["e", "x"]),
        (("e",), None, [], ["e"]),
        ("e f", ("a",), [], ["e f", "a"]),
        (None, "a", [], ["a"]),
        (("",), ("a",), [], ["a"]),
        (("", "e"), None, ["x"], None),
        (None, ("",), [], None),
        (("",), None, [], None),
        (None, None, [], None),
        ((), (), [], None),
    ],
)
def test_entry_point_and_command(entrypoint: Any, cmd: Any, argv: list[str], wanted: list[str] | None) -> None:
    with contextlib.nullcontext() if wanted else pytest.raises(ConfigError, match="names no command"):
        assert container.command_of(config(entrypoint=entrypoint, cmd=cmd), argv) == wanted


def test_environment_later_wins(tmp_path: Path) -> None:
    said = ("PATH=/x", "A=1", "B=b=c", "C=", "B=\u00e9\n ", " D=1")
    made = make(tmp_path, config(env=said), ["x"], env={"A": "2"})
    assert made["process"]["env"] == ["PATH=/x", "A=2", "B=\u00e9\n ", "C=", " D=1"]
    assert make(tmp_path, config(), ["x"])["process"]["env"] == [f"PATH={container.DEFAULT_PATH}"]


def test_nothing_needs_more_privileges(tmp_path: Path) -> None:
    made = make(tmp_path, config(), ["x"])
    assert "rlimits" not in made["process"]
    assert "oomScoreAdj" not in made["process"]
    assert set(made["linux"]["resources"]) == {"devices"}
    assert [n["type"] for n in made["linux"]["namespaces"]] == ["pid", "mount"]
    assert {n["type"] for n in make(tmp_path, config(), ["x"], network="none")["linux"]["namespaces"]} >= {"network"}
    held = set(made["process"]["capabilities"]["bounding"])
    assert "CAP_SYS_ADMIN" not in held
    assert "CAP_SYS_RESOURCE" not in held


def test_calls_that_reach_what_has_no_namespace_are_denied_and_those_of_jobs_are_not(tmp_path: Path) -> None:
    linux = make(tmp_path, config(), ["x"])["linux"]
    assert linux["seccomp"]["defaultAction"] == "SCMP_ACT_ALLOW"
    assert f"SCMP_ARCH_{platform.machine().upper()}" in linux["seccomp"]["architectures"]
    denied = {name for rule in linux["seccomp"]["syscalls"] if "args" not in rule for name in rule["names"]}
    assert {"keyctl", "add_key", "request_key", "bpf", "userfaultfd", "mount", "open_by_handle_at"} < denied
    needed = {"ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "perf_event_open", "io_uring_setup"}
    needed |= {"clone", "unshare", "mbind", "set_mempolicy", "move_pages", "chroot", "mlock", "personality", "ioctl"}
    assert not needed & denied
    assert {"/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"} < set(linux["maskedPaths"])
    assert {"/proc/sys", "/proc/irq", "/proc/bus"} < set(linux["readonlyPaths"])


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(
        "root:x:0:0::/:/bin/sh\nbroken\nbob:x:12:34::/:/bin/sh\nbob:x:13:35::/:\n+::::\nx:x:\u00b2:\u00b2::/\n", "utf-8"
    )
    (tmp_path / "etc/group").write_text("root:x:0:\nteam:x:55:bob,eve\nteam:x:56:\nbobs:x:34:bob\nodd:x:y:bob\n")
    return tmp_path


@pytest.mark.parametrize(
    ("user", "wanted"),
    [
        ("", {"uid": 0, "gid": 0, "additionalGids": [0]}),
        ("bob", {"uid": 12, "gid": 34, "additionalGids": [34, 55]}),
        ("12", {"uid": 12, "gid": 34, "additionalGids": [34, 55]}),
        ("77", {"uid": 77, "gid": 0, "additionalGids": [0]}),
        ("77:88", {"uid": 77, "gid": 88, "additionalGids": [88]}),
        (":team", {"uid": 0, "gid": 55, "additionalGids": [55]}),
        ("bob:", {"uid": 12, "gid": 34, "additionalGids": [34, 55]}),
        ("0077", {"uid": 77, "gid": 0, "additionalGids": [0]}),
        ("bob:team", {"uid": 12, "gid": 55, "additionalGids": [34, 55]}),
    ],
)
def test_users(rootfs: Path, user: str, wanted: dict[str, Any]) -> None:
    assert container.user_of(rootfs, user) == wanted


@pytest.mark.parametrize(
    "user",
    [
        "eve",
        "bob:nobody",
        "\u0663",
        "bob:\u0663",
        "\u00b2",
        "bob:\u00b2",
        "x",
        "2147483648",
        "bob:4294967295",
        "9" * 5000,
        "bob:" + "9" * 5000,
    ],
)
def test_unknown_users(rootfs: Path, user: str) -> None:
    with pytest.raises(ConfigError, match="of the image is not in its /etc/"):
        container.user_of(rootfs, user)


def test_a_line_with_a_number_of_thousands_of_digits_is_passed_over(rootfs: Path) -> None:
    with (rootfs / "etc/group").open("a") as file:
        file.write(f"vast:x:{'9' * 5000}:bob\n")
    assert container.user_of(rootfs, "bob") == {"uid": 12, "gid": 34, "additionalGids": [34, 55]}


def test_the_hosts_users_are_never_asked(tmp_path: Path) -> None:
    (tmp_path / "etc").symlink_to("/etc")
    with pytest.raises(ConfigError):
        container.user_of(tmp_path, "daemon")


@pytest.mark.parametrize("kind", ["terabytes", "pipe", "link to a device"])
def test_what_else_an_image_may_have_in_the_place_of_its_users_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    (tmp_path / "etc").mkdir()
    for path in (tmp_path / "etc/passwd", tmp_path / "etc/group"):
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "terabytes":
            path.write_text("bob:x:12:34::/:/bin/sh\n")
            os.truncate(path, 1 << 41)
        else:
            path.symlink_to("/dev/zero")
    with limited_memory():
        assert container.user_of(tmp_path, "") == {"uid": 0, "gid": 0, "additionalGids": [0]}
        with pytest.raises(ConfigError, match="not in its /etc/passwd"):
            container.user_of(tmp_path, "bob")
    assert "/etc/passwd of the image is not used: " in caplog.text or kind == "link to a device"


def test_binds(tmp_path: Path) -> None:
    made = make(tmp_path, config(), ["x"], mounts=[Bind(str(tmp_path), "/data", True)])
    assert made["mounts"][-1]["options"] == ["rbind", "rprivate", "ro"]
    for bad in (
        Bind("/no/such", "/data"),
        Bind(str(tmp_path), "data"),
        Bind(str(tmp_path), "/."),
        Bind(str(tmp_path), "//"),
    ):
        with pytest.raises(ConfigError, match="cannot mount"):
            make(tmp_path, config(), ["x"], mounts=[bad])


def test_missing_commands_are_found_before_the_runtime_does(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/there").touch()
    (tmp_path / "bin/link").symlink_to("/bin/there")
    env = {"PATH": "/sbin:/bin"}
    for name in ("there", "link", "/bin/there", "bin/link"):
        container.check_command(make(tmp_path, config(), [name], env=env))
    for name in ("absent", "/absent", "./there"):
        with pytest.raises(NotFoundError, match="the image has no such file"):
            container.check_command(make(tmp_path, config(), [name], env=env))
    for cwd, mounts in (("/new", []), ("/bin/there", [Bind(str(tmp_path), "/bin/there")])):
        container.check_command(make(tmp_path, config(), ["there"], env=env, cwd=cwd, mounts=mounts))
    for cwd in ("/bin/there", "/bin/there/x"):
        with pytest.raises(ConfigError, match="it is no folder"):
            container.check_command(make(tmp_path, config(), ["there"], env=env, cwd=cwd))
    container.check_command(make(tmp_path, config(), ["/t/x"], mounts=[Bind(str(tmp_path), "/t/x")]))
    container.check_command(make(tmp_path, config(), ["x"], env={"PATH": "/t"}, mounts=[Bind(str(tmp_path), "/t")]))


@pytest.mark.parametrize("folder", ["dev", "proc", "sys"])
def test_no_image_leads_a_runtime_out_of_it(tmp_path: Path, folder: str) -> None:
    """runc made its links of /dev in a folder of the host that /dev of the image led to, and removed ptmx there."""
    (tmp_path / folder).symlink_to("/etc")
    with pytest.raises(UnsupportedError, match=f"its /{folder} is a link"):
        make(tmp_path, config(), ["a"])


@pytest.mark.parametrize(
    ("own", "asked", "wanted"), [("", "", "/"), ("a/b", "", "/a/b"), ("/a", "", "/a"), ("/a", "b", "/b")]
)
def test_the_folder_of_a_command(tmp_path: Path, own: str, asked: str, wanted: str) -> None:
    made = make(tmp_path, config(working_dir=own), ["x"], cwd=asked)
    assert made["process"]["cwd"] == wanted


def test_entries_without_a_name_are_no_variables(tmp_path: Path) -> None:
    made = make(tmp_path, config(env=("A", "B=", "=x", "", "C=1", "C=2")), ["x"])
    assert [one for one in made["process"]["env"] if one[0] in "ABC="] == ["A=", "B=", "C=2"]


def test_gpu_and_rdma_devices_of_the_host(tmp_path: Path) -> None:
    dev, rootfs = tmp_path / "dev", tmp_path / "rootfs"
    wanted = ["infiniband/rdma_cm", "infiniband/uverbs0", "nvidia-caps/nvidia-cap1", "nvidia0", "nvidiactl"]
    for name in [*wanted, "sda", "null"]:
        (dev / name).parent.mkdir(parents=True, exist_ok=True)
        (dev / name).touch()
    (dev / "infiniband/by-ibdev").mkdir()
    assert container.devices(dev) == [Bind(f"{dev}/{name}", f"/dev/{name}") for name in wanted]
    own = Bind(str(rootfs), "/own")
    rootfs.mkdir()
    made = make(rootfs, config(), ["x"], dev=dev, mounts=[own])["mounts"]
    places = [mount["destination"] for mount in made]
    assert places[-6:] == [*(f"/dev/{name}" for name in wanted), "/own"]
    assert places.index("/dev") < places.index("/dev/nvidia0")
    assert made[-2]["options"] == ["rbind", "rprivate", "rw"]
    assert container.devices(tmp_path / "none") == []
    assert len(container.devices(dev, gpus=False)) == 2
    chosen = Selection([], 0)
    assert not [m for m in make(rootfs, config(), ["x"], dev=dev, chosen=chosen)["mounts"] if "nvidia" in m["source"]]
    chosen = Selection([], None)  # a device that is no GPU
    assert [m for m in make(rootfs, config(), ["x"], dev=dev, chosen=chosen)["mounts"] if "nvidia" in m["source"]]
