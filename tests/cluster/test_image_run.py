"""Commands in real containers: what they see, their exit codes and signals, and that nothing stays behind."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bootseer import config as settings
from bootseer import image, oci
from bootseer.errors import ConfigError, NotFoundError, UnsupportedError
from bootseer.image import bundle, cdi, runtime
from bootseer.image.runtime import Bind
from bootseer.stripefs import open_fs
from support import forked
from support.images import Member, folder, programs, write_image
from support.node import alive
from support.waits import until

pytestmark = [pytest.mark.root, pytest.mark.runtime]

CLI = [sys.executable, "-m", "bootseer.cli.main"]
CONFIG = oci.ContainerConfig(
    env=("PATH=/bin", "FROM_IMAGE=1"), cmd=("sh", "-c", "cat /hello"), working_dir="/work", user="worker"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a converted image and the environment for the command line."""
    base = tmp_path_factory.mktemp("run")
    files = [folder("etc"), Member("etc/passwd", data=b"root:x:0:0::/root:/bin/sh\nworker:x:12:34::/work:/bin/sh\n"),
             Member("etc/group", data=b"team:x:34:\nextra:x:99:worker\n"), folder("work", uid=12),
             Member("hello", data=b"hello from the image\n")]  # fmt: skip
    write_image(
        base / "layout",
        [programs("sh", "cat", "id", "sleep", "env", "ls", "mknod", "tty", "stty", "grep"), files],
        config=CONFIG,
    )
    image.ensure(f"oci:{base}/layout:v1", str(base / "store"), work_dir=base / "work")
    return base


@pytest.fixture
def environ(place: Path) -> dict[str, str]:
    return {
        **os.environ,
        "BOOTSEER_CACHE_DIR": str(place / "cache"),
        "BOOTSEER_STATE_DIR": str(place / "state"),
        "BOOTSEER_STORE": str(place / "store"),
    }


def cli(environ: dict[str, str], *args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return forked.cli(*args, env=environ, timeout=timeout)


@pytest.fixture
def rootfs(place: Path) -> Iterator[image.ImageMount]:
    config = settings.Config(cache_dir=str(place / "cache"), state_dir=str(place / "state"))
    mounted = image.mount(f"oci:{place}/layout:v1", place / "rootfs", store_url=str(place / "store"), config=config)
    yield mounted
    mounted.unmount()


@contextlib.contextmanager
def started(argv: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A running command; on the way out it is interrupted (the second time kills its container) if it still runs."""
    with forked.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
                if child.poll() is None:
                    child.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(2)


def left_over(state: Path) -> list[Path]:
    """Containers the runtime still knows, and bundles."""
    return [*state.glob("runtime/*/*"), *state.glob("containers/*")]


def test_the_images_own_command_and_user(place: Path, environ: dict[str, str]) -> None:
    done = cli(environ, "-v", "image", "run", f"oci:{place}/layout:v1")
    assert (done.returncode, done.stdout) == (0, "hello from the image\n")
    assert "blocks " in done.stderr
    done = cli(
        environ, "image", "run", f"oci:{place}/layout:v1", "--", "sh", "-c", "id -u; id -g; id -G; echo $PWD; exit 7"
    )
    assert (done.returncode, done.stdout.split()) == (7, ["12", "34", "34", "99", "/work"])
    assert done.stderr == ""


@pytest.mark.parametrize("between", [[], ["--"]])
def test_options_after_the_image_are_the_commands(place: Path, environ: dict[str, str], between: list[str]) -> None:
    ref = f"oci:{place}/layout:v1"
    argv = [*between, "sh", "-c", 'echo "$@"', "sh", "--job", "x", "-e", "A=1", "--", "--summary"]
    done = cli(environ, "image", "run", ref, *argv)
    assert (done.returncode, done.stdout) == (0, "--job x -e A=1 -- --summary\n"), done.stderr
    done = cli(environ, "image", "run", ref, "--job", "x")
    assert done.returncode == 66
    assert "options of bootseer go before the image" in done.stderr


def test_what_a_container_sees(place: Path, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "in").write_text("from the host")
    tmp_path.chmod(0o777)
    script = "echo $FROM_IMAGE $GIVEN ${NOWHERE-none}; cat /data/in; "
    script += "ls /proc/self/ns >&2 && ls /dev/shm /sys/class/net; echo > /data/x"
    done = cli(environ, "image", "run", "-e", "GIVEN=2", "-e", "NOWHERE", "-v", f"{tmp_path}:/data:ro",
               f"oci:{place}/layout:v1", "sh", "-c", script)  # fmt: skip
    assert done.stdout.startswith("1 2 none\nfrom the host/dev/shm:")
    assert set(os.listdir("/sys/class/net")) <= set(done.stdout.split())
    assert done.returncode != 0
    assert not (tmp_path / "x").exists()


CALLS = """
import ctypes, mmap, os, signal, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    return libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args)), ctypes.get_errno()
threading.Thread(target=print).start()
held = ctypes.create_string_buffer(b"mine", 4)
child = os.fork()
if not child:
    signal.pause()
to = ctypes.create_string_buffer(4)
vectors = [(ctypes.c_size_t * 2)(ctypes.addressof(one), 4) for one in (to, held)]
read = libc.process_vm_readv(child, vectors[0], 1, vectors[1], 1, 0)
ring = ctypes.create_string_buffer(120)
event = ctypes.create_string_buffer(128)
ctypes.memmove(event, (ctypes.c_uint32 * 2)(1, 128), 8)  # a software event
ctypes.memmove(ctypes.addressof(event) + 40, (ctypes.c_uint64 * 1)(1 << 5 | 1 << 6), 8)  # of the program alone
found = {
    "process_vm_readv": (read, to.raw),
    "ptrace": libc.ptrace(16, child, 0, 0),
    "io_uring": call(425, 4, ctypes.addressof(ring))[1],
    "perf": call(298 if os.uname().machine == "x86_64" else 241, ctypes.addressof(event), 0, -1, -1, 0)[1],
    "mempolicy": call(238 if os.uname().machine == "x86_64" else 237, 0, 0, 0)[1],
    "keyctl": call(250 if os.uname().machine == "x86_64" else 219, 0, -4, 1)[1],
    "user namespace": (libc.unshare(0x10000000), ctypes.get_errno()),
    "clone3": call(435, 0, 0)[1],
    "bpf": call(321 if os.uname().machine == "x86_64" else 280, 0, 0, 0)[1],
}
os.kill(child, signal.SIGKILL)
found["child"] = subprocess.run([sys.executable, "-Sc", "print('child')"], capture_output=True).stdout
print(repr(found))
"""


def test_what_jobs_need_of_the_kernel_works_and_what_reaches_beyond_does_not(
    place: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    """As on the host: profilers, memory of other processes, io_uring, NUMA. As with other runtimes: keys, user
    namespaces, BPF."""
    tmp_path.chmod(0o755)
    (tmp_path / "calls.py").write_text(CALLS)
    here = subprocess.run(["/usr/bin/python3", "-S", tmp_path / "calls.py"], capture_output=True, text=True, check=True)
    shown = [word for folder in ("/usr", "/lib", "/lib64", str(tmp_path)) for word in ("-v", f"{folder}:{folder}:ro")]
    write_image(place / "root", [programs("sh")], config=oci.ContainerConfig())
    image.ensure(f"oci:{place}/root:v1", str(place / "store"), work_dir=place / "work")
    done = cli(environ, "image", "run", *shown, f"oci:{place}/root:v1", "/usr/bin/python3", "-S",
               str(tmp_path / "calls.py"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    host, inside = (ast.literal_eval(said.stdout.splitlines()[-1]) for said in (here, done))
    assert inside["child"] == b"child\n"
    for name in ("process_vm_readv", "ptrace", "io_uring", "perf", "mempolicy"):
        assert inside[name] == host[name], name
    assert inside["process_vm_readv"] == (4, b"mine")
    assert inside["ptrace"] == 0
    assert (inside["keyctl"], inside["bpf"], inside["clone3"]) == (errno.EPERM, errno.EPERM, errno.ENOSYS)
    assert inside["user namespace"] == (-1, errno.EPERM)


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("os.execv('/bin/sh', ['sh', '-c', 'exit 5'])", 5),
        ("signal.signal(signal.SIGUSR1, lambda *_: os._exit(6)); os.kill(os.getpid(), signal.SIGUSR1)", 6),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("os.abort()", 134),
    ],
)
def test_a_command_that_has_itself_traced_goes_on(place: Path, environ: dict[str, str], then: str, code: int) -> None:
    """As programs do that look for a debugger: process 1 is who traces it."""
    write_image(place / "root", [programs("sh")], config=oci.ContainerConfig())
    image.ensure(f"oci:{place}/root:v1", str(place / "store"), work_dir=place / "work")
    shown = [word for folder in ("/usr", "/lib", "/lib64") for word in ("-v", f"{folder}:{folder}:ro")]
    script = f"import ctypes, os, signal; assert not ctypes.CDLL(None).ptrace(0, 0, 0, 0); {then}; print('on')"
    done = cli(environ, "image", "run", *shown, f"oci:{place}/root:v1", "/usr/bin/python3", "-S", "-c", script)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr


def test_a_runtime_without_seccomp_runs_containers_without_a_profile_and_says_so(
    place: Path, environ: dict[str, str]
) -> None:
    program = place / "runtime-without"
    program.write_text(f"""#!/bin/sh
for word; do
    [ ! -e "$word/config.json" ] || ! grep -q '"seccomp"' "$word/config.json" || {{
        echo '{{"level": "error", "msg": "seccomp is not supported"}}' >"$word/log"; exit 1; }}
done
exec {shutil.which("runc")} "$@"
""")
    program.chmod(0o755)
    done = cli(environ, "image", "run", "--runtime", str(program), f"oci:{place}/layout:v1")
    assert (done.returncode, done.stdout) == (0, "hello from the image\n"), done.stderr
    assert "has no seccomp here, the container may use all system calls" in done.stderr


@pytest.fixture
def tenant(tmp_path: Path) -> Path:
    """A folder of another user's, which root mounts something of."""
    tmp_path.chmod(0o755)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/in").write_text("the host's")
    (tmp_path / "tenant/data").mkdir(parents=True)
    (tmp_path / "tenant/data/in").write_text("the tenant's")
    for path in (tmp_path / "tenant", tmp_path / "tenant/data"):
        os.chown(path, 65534, 65534)
    return tmp_path / "tenant"


def test_a_source_that_others_can_replace_is_mounted_and_their_links_are_not_followed(
    place: Path, environ: dict[str, str], tenant: Path
) -> None:
    before = Path("/proc/self/mounts").read_text()

    def run(source: Path, script: str) -> subprocess.CompletedProcess[str]:
        ref = f"oci:{place}/layout:v1"
        return cli(environ, "image", "run", "-v", f"{source}:/data", ref, "sh", "-c", script)

    done = run(tenant / "data", "cat /data/in; echo new > /data/new")
    assert (done.returncode, done.stdout) == (2, "the tenant's"), done.stderr  # uid 12 may not write there
    done = run(tenant / "data/in", "cat /data")
    assert (done.returncode, done.stdout) == (0, "the tenant's"), done.stderr
    (tenant / "link").symlink_to("../secret")
    for source in ("link", "link/in"):
        done = run(tenant / source, "cat /data/in /data")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1), done.stderr
        assert "has a link in it that others can change" in done.stderr
    (tenant.parent / "ours").symlink_to(tenant)
    assert run(tenant.parent / "ours/data", "cat /data/in").stdout == "the tenant's"
    assert left_over(place / "state") == []
    assert Path("/proc/self/mounts").read_text() == before


def test_a_source_that_is_exchanged_all_the_time_never_leads_elsewhere(
    place: Path, environ: dict[str, str], tenant: Path
) -> None:
    script = """
import os, sys
os.setuid(65534)
os.symlink("../secret", "link")
while True:
    for name, other in (("data", "t"), ("link", "data"), ("t", "link")):
        os.rename(name, other)
    for name, other in (("data", "t"), ("link", "data"), ("t", "link")):
        os.rename(name, other)
"""
    seen = []
    with subprocess.Popen([sys.executable, "-c", script], cwd=tenant) as other:
        try:
            for _ in range(12):
                ref = f"oci:{place}/layout:v1"
                seen.append(cli(environ, "image", "run", "-v", f"{tenant}/data:/data", ref, "cat", "/data/in"))
        finally:
            other.kill()
    assert {done.stdout for done in seen} <= {"", "the tenant's"}
    assert all(done.returncode in (0, 66, 78) and done.stderr.count("\n") <= 1 for done in seen), seen


def test_two_starts_leave_a_profile_and_the_second_prefetches(place: Path, environ: dict[str, str]) -> None:
    ref = f"oci:{place}/layout:v1"
    environ["BOOTSEER_CACHE_DIR"] = str(place / "first")  # a tree that is complete on the node is not recorded
    cli(environ, "image", "run", "--job", "twice", ref)
    shown = json.loads(cli(environ, "image", "touched", ref, "--json").stdout)
    assert [row["complete"] for row in shown["traces"] if row["job"] == "twice"]
    environ["BOOTSEER_CACHE_DIR"] = str(place / "cold")
    environ["BOOTSEER_BACKGROUND_FILL"] = "false"
    mounted = cli(environ, "image", "mount", "--rw", "--job", "twice", ref, str(place / "m"))
    assert mounted.returncode == 0, mounted.stderr
    try:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            status = json.loads(cli(environ, "image", "status", str(place / "m"), "--json").stdout)["status"]
            if 0 < status["hot_total"] == status["hot_ready"]:
                break
            time.sleep(0.1)
        assert 0 < status["hot_ready"] == status["hot_total"] <= status["blocks_total"]
    finally:
        assert cli(environ, "unmount", str(place / "m")).returncode == 0


def test_exit_codes_and_reasons(rootfs: image.ImageMount) -> None:
    def run(*argv: str, **more: object) -> int:
        return runtime.run(rootfs.rootfs, rootfs.config, argv, state_dir=rootfs._state_dir, **more)  # type: ignore[arg-type]

    assert run("sh", "-c", "exit 0") == 0
    assert run("sh", "-c", "exit 93") == 93
    assert run("sh", "-c", "sleep 60 & exit 3") == 3
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGALRM, signal.SIGABRT, signal.SIGUSR2):
        assert run("sh", "-c", f"kill -{int(number)} $$; exit 3") == 128 + number
    dead = "for i in /proc/[0-9]*; do grep -q 'State:.Z' $i/status && exit 4; done; exit 0"
    assert run("sh", "-c", f"(sh -c 'sleep 0.1' &) ; sleep 0.4; {dead}") == 0  # reaped, although its parent ended
    assert run("sh", "-c", "trap 'exit 9' TERM; kill -TERM 0; exit 3") == 9
    own = [Bind(str(rootfs.rootfs / "etc"), "/mounted")]
    assert run("/mounted/no-such-thing", mounts=own) == 127
    assert run("/mounted/passwd", mounts=own) == 126
    with pytest.raises(NotFoundError, match="cannot run no-such-thing in the container"):
        run("no-such-thing")
    with pytest.raises(ConfigError, match="unknown container network"):
        run("true", network="bridge")
    with pytest.raises(UnsupportedError, match="no-such-runtime: not installed"):
        run("sh", runtime="no-such-runtime")
    assert left_over(rootfs._state_dir) == []


def test_figures_of_a_node_without_its_daemon(place: Path, environ: dict[str, str], tmp_path: Path) -> None:
    own = {"cache_dir": tmp_path / "cache", "state_dir": tmp_path / "state", "node_dir": tmp_path / "no-daemon"}
    environ |= {f"BOOTSEER_{name.upper()}": str(path) for name, path in own.items()}
    assert cli(environ, "image", "mount", f"oci:{place}/layout:v1", str(tmp_path / "m")).returncode == 0
    mounted = image.attach(tmp_path / "m", tmp_path / "state")
    assert (tmp_path / "m/hello").read_bytes()

    def figures() -> dict[str, float]:
        done = cli(environ, "node", "status", "--metrics")
        assert (done.returncode, done.stderr) == (0, "")
        return {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines() if line[0] != "#"}

    seen = figures()
    assert seen["bootseer_node_up"] == 0
    assert seen['bootseer_node_servers{kind="tree",state="serving"}'] == 1
    assert seen["bootseer_node_cache_bytes"] > 0
    assert seen["bootseer_node_cache_limit_bytes"] > 1 << 20
    assert sum(value for name, value in seen.items() if name.startswith("bootseer_node_moved_bytes")) > 0
    os.killpg(os.getpgid(mounted.status().pid), signal.SIGKILL)
    until(lambda: figures()['bootseer_node_servers{kind="tree",state="dead"}'] == 1, 20)
    assert figures()['bootseer_node_servers{kind="tree",state="serving"}'] == 0
    assert cli(environ, "node", "status").returncode == 69
    mounted.unmount()
    assert figures()['bootseer_node_servers{kind="tree",state="dead"}'] == 0


def test_unmount_all_ends_what_nobody_uses_and_no_container(
    place: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    environ |= {"BOOTSEER_CACHE_DIR": str(tmp_path / "cache"), "BOOTSEER_STATE_DIR": str(tmp_path / "state")}
    ref, made = f"oci:{place}/layout:v1", open_fs(str(tmp_path / "striped"))
    with made.create("step/weights") as out:
        out.write(b"weights")
    for name in ("used", "unused"):
        assert cli(environ, "image", "mount", "--rw", ref, f"{tmp_path}/image-{name}").returncode == 0
        assert cli(environ, "fs", "mount", made.url, f"{tmp_path}/striped-{name}").returncode == 0
    paths = tmp_path / "image-used/hello", tmp_path / "striped-used/step/weights"
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open()) for path in paths]
        child = stack.enter_context(started([*CLI, "image", "run", ref, "--", "sh", "-c", LOOP], environ))
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        rows = json.loads(cli(environ, "image", "status", "--json").stdout)
        striped = {(row["state"], row["what"], row["folder"]) for row in rows if row["kind"] == "striped"}
        assert striped == {("mounted", made.url, f"{tmp_path}/striped-{name}") for name in ("used", "unused")}
        done = cli(environ, "unmount", "--all")
        assert done.returncode == 73
        assert f"{tmp_path}/image-used" in done.stderr
        assert f"{tmp_path}/striped-used" in done.stderr
        assert done.stdout.splitlines() == [f"unmounted {tmp_path}/{one}-unused" for one in ("striped", "image")]
        assert [one.read() for one in files] == ["hello from the image\n", "weights"]
        for file in files:
            file.close()
        done = cli(environ, "unmount", "--all")
        assert (done.returncode, done.stderr) == (0, "")
        assert child.poll() is None
    assert cli(environ, "unmount", "--all").stdout == "nothing was unmounted\n"


def test_unmount_all_leaves_what_somebody_mounted_on_top(place: Path, environ: dict[str, str], tmp_path: Path) -> None:
    """Red before: it was unmounted, with all that a tmpfs had, and ours then was detached under its users."""
    environ |= {"BOOTSEER_CACHE_DIR": str(tmp_path / "cache"), "BOOTSEER_STATE_DIR": str(tmp_path / "state")}
    made = open_fs(str(tmp_path / "striped"))
    with made.create("step/weights") as out:
        out.write(b"weights")
    tops = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for options, top in zip(([], ["--rw"]), tops, strict=False):
        assert cli(environ, "image", "mount", *options, f"oci:{place}/layout:v1", str(top)).returncode == 0
    assert cli(environ, "fs", "mount", made.url, str(tops[2])).returncode == 0
    try:
        for top in tops:
            subprocess.run(["mount", "-t", "tmpfs", "none", str(top)], check=True)
            (top / "precious").touch()
        done = cli(environ, "unmount", "--all")
        assert (done.returncode, done.stdout) == (73, "nothing was unmounted\n")
        assert all(f"{top} (" in done.stderr and (top / "precious").exists() for top in tops)
    finally:
        for top in tops:
            subprocess.run(["umount", str(top)], check=False)
        done = cli(environ, "unmount", "--all")
    assert (done.returncode, done.stdout.count("\n")) == (0, 3)


def test_a_probe_is_remembered_for_this_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = runtime.find(tmp_path)
    assert found.works
    monkeypatch.setattr(runtime, "probe", lambda *args: pytest.fail("probed again"))
    assert runtime.find(tmp_path) == found
    note = tmp_path / f"runtime-{found.name}.json"
    note.write_text(note.read_text().replace('"stamp":"', '"stamp":"another boot'))
    with pytest.raises(pytest.fail.Exception, match="probed again"):
        runtime.find(tmp_path)


def test_no_process_of_a_container_shows_the_host(place: Path, environ: dict[str, str]) -> None:
    """Root in a container may trace, and so look through every process that it sees."""
    script = "for one in /proc/[0-9]*; do ls $one/root/ 2>/dev/null; cat $one/environ 2>/dev/null; done"
    argv = ["image", "run", "--user", "root", f"oci:{place}/layout:v1", "--", "sh", "-c", script]
    seen = cli({**environ, "OF_THE_HOST": "1"}, *argv).stdout
    assert "hello" in seen
    assert "OF_THE_HOST" not in seen
    assert "boot" not in seen.split()


@pytest.mark.parametrize("name", ["runc", "crun"])
def test_process_1_is_of_the_container(place: Path, rootfs: image.ImageMount, tmp_path: Path, name: str) -> None:
    """It has the rights of the command and no descriptor more, and nobody can write its program. Its state may lie
    where nothing may be executed, as in /run of Debian."""
    if not shutil.which(name):
        pytest.skip(f"no {name}")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec,nosuid,nodev,mode=755", "none", str(tmp_path)], check=True)
    try:
        out = tmp_path / "out"
        out.mkdir()
        script = (
            "cd /proc; { ls 1/fd; ls self/fd; } >/out/fds; for i in 1 self; do grep -E '^(Cap|Uid|Gid)' $i/status; done"
            " >/out/rights; for i in /proc/1/exe /dev/init; do (echo x >>$i) 2>/dev/null && exit 4; done;"
            " ls -l /dev/init >/out/owner; exit 0"
        )
        config = msgspec.structs.replace(rootfs.config, config=oci.ContainerConfig(env=("PATH=/bin",)))
        where = [Bind(str(out), "/out")]
        try:
            runtime.find(tmp_path, name)
        except UnsupportedError as exc:
            pytest.skip(str(exc))
        code = runtime.run(
            rootfs.rootfs, config, ["sh", "-c", script], state_dir=tmp_path, runtime=name, mounts=where, readonly=True
        )
        assert code == 0
        fds = (out / "fds").read_text().split()
        assert fds[:3] == ["0", "1", "2"]
        assert fds[3:6] == ["0", "1", "2"]  # then that of the folder that is listed
        rights = (out / "rights").read_text().splitlines()
        assert len(rights) == 2 * 7
        assert rights[:7] == rights[7:]
        assert (out / "owner").read_text().startswith("-r-xr-xr-x")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("at", ["/dev/init", "//dev/./init", "/dev"])
def test_what_is_mounted_in_its_place_is_no_process_1(place: Path, environ: dict[str, str], at: str) -> None:
    done = cli(environ, "image", "run", "-v", f"/dev:{at}", f"oci:{place}/layout:v1", "--", "sh", "-c", "echo $$")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "the command is process 1" in done.stderr


def test_a_command_that_is_often_process_1_is_told_how_it_gets_that(place: Path, environ: dict[str, str]) -> None:
    write_image(place / "root", [[*programs("sh"), Member("init", "symlink", link="bin/sh")]])
    image.ensure(f"oci:{place}/root:v1", str(place / "store"), work_dir=place / "work")
    words = (f"oci:{place}/root:v1", "--", "/init", "-c", "echo $$")
    done = cli(environ, "image", "run", *words)
    (line,) = done.stderr.splitlines()
    assert "/init may insist on being process 1" in line
    assert int(done.stdout) > 1
    how = line.rpartition(": ")[2].split()[:2]
    done = cli(environ, "image", "run", *how, *words)
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize("kind", ["x86_64", "aarch64"])
def test_the_program_of_process_1_is_what_its_source_says(tmp_path: Path, kind: str) -> None:
    source = Path(bundle.__file__).parent / "init"
    compiler = "gcc" if os.uname().machine == kind else f"{kind}-linux-gnu-gcc"
    if not shutil.which(compiler) or "12.2.0" not in subprocess.check_output([compiler, "--version"], text=True):
        pytest.skip("no gcc 12.2.0, which made the program")
    subprocess.run([str(source / "build.sh"), kind, str(tmp_path / kind)], check=True, timeout=60)
    assert (tmp_path / kind).read_bytes() == (source / kind).read_bytes()


LOOP = "echo up; while :; do sleep 0.1; done"


@pytest.mark.parametrize(
    ("options", "script", "number", "code"),
    [
        ([], f"trap 'exit 22' INT; {LOOP}", signal.SIGINT, 22),
        # process 1 has no default actions: the kernel drops what it has no handler for
        *(([], "echo up; exec sleep 60", one, 128 + one) for one in (signal.SIGTERM, signal.SIGUSR1)),
        (["--stop-grace", "0.5"], f"trap 'sleep 3; exit 21' TERM; {LOOP}", signal.SIGTERM, 137),
        ([], f"trap 'sleep 3; exit 24' TERM; {LOOP}", signal.SIGTERM, 24),
    ],
)
def test_signals_reach_the_container(
    place: Path, environ: dict[str, str], options: list[str], script: str, number: signal.Signals, code: int
) -> None:
    argv = [*CLI, "image", "run", *options, f"oci:{place}/layout:v1", "--", "sh", "-c", script]
    with started(argv, environ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        if "exec" in script:
            time.sleep(0.2)  # sh has become sleep
        child.send_signal(number)
        assert child.wait(20) == code
    assert left_over(place / "state") == []
    assert list((place / "state" / "run").iterdir()) == []


def test_only_who_asks_for_it_reads_the_standard_input(place: Path, environ: dict[str, str]) -> None:
    ref = f"oci:{place}/layout:v1"
    for options, wanted in (([], ""), (["-i"], "abc"), (["--interactive", "--user", "0"], "abc")):
        done = forked.cli("image", "run", *options, ref, "cat", env=environ, input="abc")
        assert (done.returncode, done.stdout) == (0, wanted), done.stderr
    loop = [
        "sh",
        "-c",
        'while read x; do "$@"; echo line $x; done',
        "sh",
        *CLI,
        "image",
        "run",
        ref,
        "sh",
        "-c",
        "exit",
    ]
    done = subprocess.run(loop, env=environ, input="a\nb\nc\n", capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "line a\nline b\nline c\n"), done.stderr


def test_a_terminal_of_its_own(place: Path, environ: dict[str, str]) -> None:
    ref, script = f"oci:{place}/layout:v1", "tty; stty size; ls -l /dev/console; kill -INT $$; exit 5"
    argv = [*CLI, "image", "run", "-it", "--user", "0", ref, "sh", "-c", script]
    done = forked.run(*argv[1:], env=environ)
    assert done.returncode == 78
    assert "the standard input is no terminal" in done.stderr
    terminal, far = pty.openpty()
    termios.tcsetwinsize(far, (31, 77))
    before = termios.tcgetattr(far)
    run = ["setsid", "--ctty", "--wait", *argv]
    process = subprocess.Popen(run, env=environ, stdin=far, stdout=far, stderr=far)
    seen = b""
    while b"console" not in seen and select.select([terminal], [], [], 30)[0]:
        seen += os.read(terminal, 4096)
    assert process.wait(30) in (5, 130)
    assert b"/dev/pts/0" in seen
    assert b"31 77" in seen
    assert termios.tcgetattr(far) == before
    os.close(far)
    os.close(terminal)
    assert left_over(place / "state") == []


def test_entry_point_user_and_a_root_that_is_only_read(place: Path, environ: dict[str, str]) -> None:
    ref = f"oci:{place}/layout:v1"
    for options, command, wanted in (
        (["--entrypoint", "id"], ["-u"], "12\n"),
        (["--entrypoint", "/bin/id"], [], "uid=12"),
        (["--user", "0"], ["id", "-u"], "0\n"),
        (["--user", "1000:34"], ["sh", "-c", "id -u; id -g"], "1000\n34\n"),
        (["-u", "worker"], ["sh", "-c", "id -u; id -g"], "12\n34\n"),
        (["--user", "0", "--read-only"], ["sh", "-c", "echo a >/a || echo b >/dev/shm/b; cat /a /dev/shm/b"], "b\n"),
    ):
        done = cli(environ, "image", "run", *options, ref, *command)
        assert done.stdout.startswith(wanted), (options, done)
    done = cli(environ, "image", "run", "--user", "nosuch", ref, "id")
    assert (done.returncode, done.stdout) == (78, "")
    assert "user 'nosuch' of the image is not in its /etc/passwd" in done.stderr


@pytest.mark.parametrize("readonly", [[], ["--read-only"]])
def test_volumes_are_there_and_written(
    place: Path, environ: dict[str, str], tmp_path: Path, readonly: list[str]
) -> None:
    files = [programs("sh", "cat", "ls"), [folder("run"), folder("tmp"), folder("var"),
             Member("var/run", "symlink", link="/run"), folder("etc"), Member("etc/x", data=b"x"),
             folder("own", 0o711, uid=7), Member("file"),
             Member("nowhere", "symlink", link="/missing/it"),
             Member("up", "symlink", link="../../../../tmp")]]  # fmt: skip
    good = ("/etc", "/own", "/a/b c/d", "relative/one", "/var/run/lock", "/up/2")
    bad = ("/", "/file", "/file/below", "/nowhere", "/a/../..", "", "/x" * 3000)
    config = oci.ContainerConfig(env=("PATH=/bin",), volumes=dict.fromkeys((*good, *bad)))
    write_image(tmp_path / "layout", files, config=config)
    ref = f"oci:{tmp_path}/layout:v1"
    assert cli(environ, "image", "convert", ref).returncode == 0
    script = 'for x; do cd / && cd "$x" && echo 1 >new && cat new; done; cat /etc/x; ls -nd /own; ls -d /run/lock; ls /'
    done = cli(environ, "image", "run", *readonly, ref, "sh", "-c", script, "sh", *good)
    assert (done.returncode, done.stdout[:13]) == (0, "1\n" * 6 + "x"), done
    assert "drwx--x--x" in done.stdout
    assert " 7 " in done.stdout
    assert "/run/lock" in done.stdout
    assert "the volume /file of the image is not made" in done.stderr
    assert not Path("/tmp/2").exists()


@pytest.mark.parametrize("kind", ["argument", "variable", "name", "folder"])
def test_what_is_no_utf8_is_refused(place: Path, environ: dict[str, str], kind: str) -> None:
    odd = os.fsdecode(b"caf\xe9")
    ref, options, command = f"oci:{place}/layout:v1", list[str](), ["sh", "-c", "exit"]
    if kind == "argument":
        command = ["sh", "-c", "exit", odd]
    elif kind == "folder":
        options = ["-w", f"/{odd}"]
    else:
        options = ["-e", f'A="se"cret{odd}' if kind == "variable" else f"{odd}=1"]
    done = cli(environ, "image", "run", *options, ref, *command)
    assert done.returncode == 78
    assert "no text in UTF-8" in done.stderr
    assert "cret" not in done.stderr  # of a variable the name alone
    assert done.stderr.count("\n") == 1
    if kind == "variable":
        assert cli({**environ, "ODD": odd}, "image", "run", "-e", "ODD", ref, *command).returncode == 78
    assert left_over(place / "state") == []


@pytest.mark.skipif(not os.path.ismount("/sys/fs/cgroup"), reason="no cgroups are mounted here")
def test_a_container_sees_its_limits_and_changes_none(place: Path, environ: dict[str, str]) -> None:
    script = (
        "cd /sys/fs/cgroup; ls; echo; for x in cgroup.procs memory/cgroup.procs; do [ ! -e $x ] || echo $$ >$x; done"
    )
    for name in filter(shutil.which, ("runc", "crun")):
        done = cli(
            environ, "image", "run", "--runtime", name, "--user", "0", f"oci:{place}/layout:v1", "sh", "-c", script
        )
        if done.returncode == 71:
            continue
        listed = done.stdout.split("\n\n")[0].split()
        assert {"memory", "memory.max", "cgroup.procs"} & set(listed), (name, done)
        assert "Read-only file system" in done.stderr, done


@pytest.mark.parametrize("delay", [0, 1], ids=["", "a-runtime-that-tells-states-late"])
def test_a_terminal_reaches_the_container(place: Path, environ: dict[str, str], delay: int) -> None:
    """The exit code is that of the command, also when this has ended before the runtime says whether it runs."""
    program = place / "runc"
    late = f'case "$*" in *" state "*) sleep {delay} ;; esac'
    program.write_text(f'#!/bin/sh\n{late}\nexec {shutil.which("runc")} "$@"\n')
    program.chmod(0o755)
    script = "trap 'exit 22' INT; echo up; read line; echo got $line; while :; do sleep 0.1; done"
    # setsid --ctty rather than pty.fork: other tests of this process have started threads that a fork does not survive
    argv = [*CLI, "image", "run", "--runtime", str(program), f"oci:{place}/layout:v1", "--", "sh", "-c", script]
    run = ["setsid", "--ctty", "--wait", *argv]
    terminal, far = pty.openpty()
    process = subprocess.Popen(run, env=environ, stdin=far, stdout=far, stderr=far)
    os.close(far)
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        until = time.monotonic() + 30
        while text not in seen:
            assert select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0], seen
            seen += os.read(terminal, 4096)

    wait_for(b"up\r\n")
    os.write(terminal, b"hello\n")
    wait_for(b"got hello")
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while os.read(terminal, 4096):
            pass
    assert process.wait(30) == 22
    os.close(terminal)
    assert left_over(place / "state") == []


def test_a_signal_reaches_the_command_once(place: Path, environ: dict[str, str]) -> None:
    script = "trap 'echo got' USR1; trap 'exit 5' TERM; echo up; while :; do sleep 0.1; done"
    argv = [*CLI, "image", "run", f"oci:{place}/layout:v1", "--", "sh", "-c", script]
    with started(argv, environ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        (listed,) = json.loads(cli(environ, "image", "status", "--json").stdout)[:1]
        assert (listed["kind"], listed["state"], listed["what"]) == ("container", "running", f"sh -c {script}")
        child.send_signal(signal.SIGUSR1)
        assert child.stdout.readline() == "got\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGTERM)
        assert child.stdout.read() == ""
        assert child.wait(20) == 5


def test_a_container_stays_in_the_cgroups_of_its_caller(place: Path, environ: dict[str, str]) -> None:
    mounted = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    tops = [Path(fields[1]) for fields in mounted if fields[2] in ("cgroup", "cgroup2")]
    made = [top / f"bootseer-test-{os.getpid()}" for top in tops if not (top / "cpuset.cpus").exists()]
    try:
        for group in made:
            group.mkdir()
        enter = " && ".join(f"echo $$ > {group}/cgroup.procs" for group in made)
        run = f"{' '.join(CLI)} image run oci:{place}/layout:v1 -- cat /proc/self/cgroup"
        script = f"{enter} && cat /proc/self/cgroup && exec {run}"
        done = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=True)
        lines = [line.split(":", 2) for line in done.stdout.splitlines()]
        assert len(lines) % 2 == 0, done.stdout
        callers = {number: path for number, _, path in lines[: len(lines) // 2]}
        assert any(path.endswith(f"bootseer-test-{os.getpid()}") for path in callers.values())
        if callers.keys() != {"0"}:
            del lines[
                -1
            ]  # runc and hybrid cgroups: the hierarchy of v2, which has no controllers then, is its own choice
        for number, _, path in lines[len(callers) :]:
            assert path.startswith((callers[number].rstrip("/") + "/bootseer-", callers[number])), (number, path)
    finally:
        # a block server that makes a hot pack
        until(lambda: not any((group / "cgroup.procs").read_text() for group in made), 30)
        for group in made:
            group.rmdir()  # fails where the container left a cgroup


def test_a_container_has_the_usual_devices_and_makes_none(rootfs: image.ImageMount) -> None:
    root = msgspec.structs.replace(rootfs.config, config=oci.ContainerConfig(env=("PATH=/bin",), user="0"))

    def works(script: str, *binds: runtime.Bind) -> bool:
        argv = ["sh", "-c", script]
        return runtime.run(rootfs.rootfs, root, argv, mounts=binds, state_dir=rootfs._state_dir) == 0

    assert works("test $(id -u) = 0 && : < /dev/zero && : > /dev/null && : < /dev/urandom")
    assert not works("mknod /dev/mine c 1 3")
    assert not works(": < /host/fuse", runtime.Bind("/dev", "/host"))  # it hides behind a folder
    assert works(": < /fuse", runtime.Bind("/dev/fuse", "/fuse"))  # the caller names it


def test_a_device_as_its_vendor_describes_it(rootfs: image.ImageMount, tmp_path: Path) -> None:
    """A harmless one; runtimes do the same for a GPU."""
    (tmp_path / "library").write_text("from the driver")
    hook = {"hookName": "createRuntime", "path": "/bin/sh", "args": ["sh", "-c", f"cat > {tmp_path}/hooked"]}
    edits = {
        "env": ["DRIVER=1"],
        "deviceNodes": [{"path": "/dev/vendor0", "hostPath": "/dev/zero"}],
        "mounts": [
            {"hostPath": f"{tmp_path}/library", "containerPath": "/usr/lib/vendor.so", "options": ["ro", "bind"]}
        ],
        "hooks": [hook],
    }
    device = {"name": "0", "containerEdits": edits}
    (tmp_path / "v.json").write_text(json.dumps({"cdiVersion": "0.6.0", "kind": "v.com/gpu", "devices": [device]}))
    chosen = cdi.select("all", folders=[tmp_path])
    script = """
        test "$DRIVER" = 1 && test "$(cat /usr/lib/vendor.so)" = 'from the driver' && test -c /dev/vendor0 &&
        : < /dev/vendor0 && : > /dev/vendor0 && ! 2> /dev/null > /usr/lib/vendor.so
    """
    for name in ("runc", "crun"):
        if runtime.probe(name, rootfs._state_dir).works:
            run = runtime.run(rootfs.rootfs, rootfs.config, ["sh", "-c", script], devices=chosen, runtime=name,
                              state_dir=rootfs._state_dir)  # fmt: skip
            assert run == 0, name
            assert json.loads((tmp_path / "hooked").read_text())["status"]
            (tmp_path / "hooked").unlink()


def test_a_gpu_that_nobody_describes(place: Path, environ: dict[str, str]) -> None:
    done = cli(environ, "image", "run", "--gpus", "no-such-gpu", f"oci:{place}/layout:v1")
    assert done.returncode == 66
    assert "no GPU no-such-gpu is described in /etc/cdi or /var/run/cdi" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def command_of(state: Path) -> int:
    """The process of the only container; the runtime writes it down after the command has begun."""
    (bundle,) = state.glob("containers/*")
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            return int((bundle / "pid").read_text())
        time.sleep(0.01)
    raise AssertionError("no container runs")


def test_a_killed_start_leaves_no_container_and_the_next_one_removes_the_rest(
    place: Path, environ: dict[str, str]
) -> None:
    state = place / "state"
    argv = [*CLI, "image", "run", f"oci:{place}/layout:v1", "--", "sh", "-c", "echo up; exec sleep 600"]
    with started(argv, environ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        command = command_of(state)
        child.kill()
    until(lambda: not alive(command), 15, "the end of the container")
    assert list((state / "run").iterdir())
    done = cli(environ, "image", "run", f"oci:{place}/layout:v1")
    assert (done.returncode, done.stdout) == (0, "hello from the image\n")
    assert "left" in done.stderr
    assert left_over(state) == []
    assert list((state / "run").iterdir()) == []
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(state) in line]


def test_a_guard_that_is_killed_too_leaves_it_to_the_next_start(place: Path, environ: dict[str, str]) -> None:
    state = place / "state"
    argv = [*CLI, "image", "run", f"oci:{place}/layout:v1", "--", "sh", "-c", "echo up; exec sleep 600"]
    with started(argv, environ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        command = command_of(state)
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        for pid in children:
            if Path(f"/proc/{pid}/comm").read_text() == "sh\n":
                os.kill(int(pid), signal.SIGKILL)
        child.kill()
    time.sleep(1.0)
    assert alive(command)
    # A start that goes on is left alone.
    with started([*argv[:-1], "echo up; sleep 3; echo still here"], environ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        assert not alive(command)
        assert cli(environ, "image", "run", f"oci:{place}/layout:v1").returncode == 0
        assert other.stdout.read() == "still here\n"
    assert left_over(state) == []
    assert list((state / "run").iterdir()) == []


def mounts_below(*folders: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if any(f" {folder}/" in line for folder in folders)]


@pytest.mark.parametrize("where", ["before-overlay", "before-release"])
def test_a_start_killed_while_it_mounts_is_ended_by_the_next(
    place: Path, environ: dict[str, str], where: str, tmp_path: Path
) -> None:
    state, ref = place / "state", f"oci:{place}/layout:v1"
    killed = {**environ, "BOOTSEER_FAULTS": f"image.mount.{where}=kill"}
    for argv in (["run", ref], ["mount", "--rw", ref, str(tmp_path / "m")]):  # the second ends what the first left
        assert cli(killed, "image", *argv).returncode == -signal.SIGKILL
        assert mounts_below(state, tmp_path)
        found = json.loads(cli(environ, "image", "status", "--json").stdout)
        assert [(item["kind"], item["state"], item["what"]) for item in found] == [("mount", "stale", ref)]
    done = cli(environ, "image", "run", ref)
    assert (done.returncode, done.stdout) == (0, "hello from the image\n"), done.stderr
    assert not mounts_below(state, tmp_path)
    assert [list((state / name).iterdir()) for name in ("images", "run", "containers")] == [[], [], []]
    assert not list((place / "cache/overlays").glob("*"))


def test_the_guard_stays_when_every_process_gets_a_signal(place: Path, environ: dict[str, str]) -> None:
    """As service managers and some schedulers send it; the command here takes its time to end."""
    script = "trap : TERM; echo up; while :; do sleep 0.1; done"
    argv = [*CLI, "image", "run", f"oci:{place}/layout:v1", "--", "sh", "-c", script]
    with started(argv, environ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        command = command_of(place / "state")
        for pid in [*Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split(), child.pid]:
            os.kill(int(pid), signal.SIGTERM)
        time.sleep(0.5)
        child.kill()
    until(lambda: not alive(command), 15, "the end of the container")
    assert cli(environ, "clean").returncode == 0


def test_the_cgroup_of_what_a_scheduler_killed_whole_goes_with_the_next_start(
    place: Path, environ: dict[str, str]
) -> None:
    """At the end of its grace time it kills every process of the job at once, the guard, too."""
    state = place / "state"
    argv = [*CLI, "image", "run", f"oci:{place}/layout:v1", "--", "sh", "-c", "echo up; exec sleep 600"]
    with started(argv, environ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        (bundle,) = state.glob("containers/*")
        for pid in (child.pid, *children, command_of(state)):
            os.kill(int(pid), signal.SIGKILL)
    assert list(Path("/sys/fs/cgroup").rglob(bundle.name))
    assert cli(environ, "image", "run", f"oci:{place}/layout:v1").returncode == 0
    assert not list(Path("/sys/fs/cgroup").rglob(bundle.name))
    assert left_over(state) == []


def test_what_is_stale_is_shown_and_ended(place: Path, environ: dict[str, str], tmp_path: Path) -> None:
    ref, state = f"oci:{place}/layout:v1", place / "state"
    argv = [*CLI, "image", "run", ref, "--", "sh", "-c", "echo up; exec sleep 600"]
    assert cli(environ, "image", "mount", ref, str(tmp_path / "mine")).returncode == 0

    def states() -> list[str]:
        return sorted(item["state"] for item in json.loads(cli(environ, "image", "status", "--json").stdout))

    with started(argv, environ) as child, started([*argv[:-1], "echo up; exec sleep 500"], environ) as other:
        for one in (child, other):
            assert one.stdout is not None
            assert one.stdout.readline() == "up\n"
        child.kill()
        child.wait()
        assert states() == ["mounted", "mounted", "running", "stale", "stale"]
        shown = cli(environ, "image", "status").stdout
        assert "sh -c echo up; exec sleep 500" in shown
        assert str(tmp_path / "mine") in shown
        said = json.loads(cli(environ, "clean", "--dry-run", "--json").stdout)
        assert [said["dry_run"], len(said["removed"]), states().count("stale")] == [True, 2, 2]
        done = cli(environ, "clean")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("ended ") == 2
        assert states() == ["mounted", "mounted", "running"]
    assert cli(environ, "image", "rm").returncode == 2
    assert cli(environ, "unmount", str(tmp_path / "mine")).returncode == 0
    assert not mounts_below(state)


def test_what_cannot_be_tidied_changes_no_exit_code(place: Path, environ: dict[str, str]) -> None:
    code = (
        "import runpy, sys\n"
        "from bootseer.errors import UnavailableError\n"
        "from bootseer.image.mount import ImageMount\n"
        "unmount = ImageMount.unmount\n"
        "def busy(self):\n    unmount(self)\n    raise UnavailableError('it is busy')\n"
        "ImageMount.unmount = busy\n"
        f"sys.argv = ['bootseer', 'image', 'run', 'oci:{place}/layout:v1', 'sh', '-c', sys.argv[1]]\n"
        "runpy.run_module('bootseer.cli.main', run_name='__main__')\n"
    )
    for wanted in (0, 7):
        done = forked.run("-c", code, f"exit {wanted}", env=environ)
        assert (done.returncode, "tidied later: it is busy" in done.stderr) == (wanted, True), done.stderr


def test_what_could_not_be_tidied_is_swept_later(place: Path, environ: dict[str, str]) -> None:
    """A block server that does not answer at the end: the container's root is unmounted, the tree below it is not."""
    code = (
        "import runpy, sys\n"
        "from bootseer.blocks.tree import TreeMount\n"
        "from bootseer.errors import UnavailableError\n"
        "def silent(self):\n    raise UnavailableError('it does not answer')\n"
        "TreeMount.unmount = silent\n"
        f"sys.argv = ['bootseer', 'image', 'run', 'oci:{place}/layout:v1', 'sh', '-c', 'echo 1 >/dev/shm/x']\n"
        "runpy.run_module('bootseer.cli.main', run_name='__main__')\n"
    )
    done = forked.run("-c", code, env=environ)
    assert (done.returncode, "tidied later: it does not answer" in done.stderr) == (0, True), done.stderr
    (left,) = json.loads(cli(environ, "image", "status", "--json").stdout)
    assert (left["kind"], left["state"]) == ("mount", "stale")
    assert mounts_below(place / "state")
    done = cli(environ, "clean")
    assert done.returncode == 0, done
    assert json.loads(cli(environ, "image", "status", "--json").stdout) == []
    assert mounts_below(place / "state") == []
    assert [*(place / "state" / "run").iterdir(), *(place / "cache" / "overlays").iterdir()] == []


def test_who_could_not_read_its_image_is_told_so(tmp_path: Path, environ: dict[str, str]) -> None:
    """Red before: only what the kernel makes of it, which takes the command for no program."""
    write_image(tmp_path / "layout", [programs("sh", "cat")], config=CONFIG)
    ref = f"oci:{tmp_path}/layout:v1"
    record = image.ensure(ref, str(tmp_path / "store"), work_dir=tmp_path / "work").record
    pack = max((tmp_path / "store/blobs").glob("*/*"), key=lambda path: path.stat().st_size)
    pack.unlink()
    done = cli(
        {**environ, "BOOTSEER_STORE": str(tmp_path / "store")}, "image", "run", "--user", "0", ref, "sh", "-c", ""
    )
    assert done.returncode == 126
    assert f"reads of tree {record.tree[:16]} failed, as bytes did not come or were damaged" in done.stderr


def test_a_read_waits_for_a_store_whose_folder_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on a network that is not mounted for some seconds; blocks of each layer are in a file of their own."""
    layers = [[Member("one", data=os.urandom(5 << 20))], [Member("two", data=os.urandom(5 << 20))]]
    write_image(tmp_path / "layout", layers, compression="none")
    monkeypatch.setenv("BOOTSEER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BOOTSEER_BACKGROUND_FILL", "false")
    name, store = f"oci:{tmp_path}/layout:v1", tmp_path / "store"
    image.ensure(name, str(store), work_dir=tmp_path / "work")
    (tmp_path / "m").mkdir()
    mounted = image.mount(name, tmp_path / "m", store_url=str(store), config=settings.load())
    try:
        assert (mounted.rootfs / "one").read_bytes() == layers[0][0].data
        store.rename(tmp_path / "away")
        back = threading.Timer(3, (tmp_path / "away").rename, [store])
        back.start()
        began = time.monotonic()
        assert (mounted.rootfs / "two").read_bytes() == layers[1][0].data
        assert time.monotonic() - began > 2
        back.join()
    finally:
        mounted.unmount()
