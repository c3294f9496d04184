"""The read-only mount of a striped store: real mounts, real clients, and what happens when things die."""

import json
import mmap
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer import fsmount
from bootseer.config import Config
from bootseer.errors import ConfigError, DataError, NotFoundError, UnavailableError
from bootseer.fsmount import FsMount, FsStatus, client
from bootseer.fsmount.record import MountRecord, ServerSpec
from bootseer.kernel import mount as mounts
from bootseer.served.client import records
from bootseer.stripefs import StripeFS, open_fs
from support import forked
from support.waits import together, until

pytestmark = pytest.mark.root

DATA = os.urandom((9 << 20) + 123)


@pytest.fixture
def fs(tmp_path) -> StripeFS:
    fs = open_fs(str(tmp_path / "store"))
    with fs.create("step-1/state.pt", width=3, unit=1 << 18, striped=True) as out:
        out.write(DATA)
    with fs.create("step-1/config.json") as out:
        out.write(b"{}")
    (Path(fs.url) / "step-1/plain.bin").write_bytes(DATA)
    fs.commit("step-1")
    return fs


@pytest.fixture
def mounted(fs, tmp_path, config) -> Iterator[FsMount]:
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config)
    yield made
    made.unmount()


def prefetched(made: FsMount) -> FsStatus:
    until(lambda: made.status().prefetch != "running", 60, "the end of the prefetch")
    return made.status()


def test_names_sizes_and_contents(mounted, fs):
    folder = mounted.mountpoint / "step-1"
    assert sorted(os.listdir(mounted.mountpoint)) == ["step-1"]
    assert sorted(os.listdir(folder)) == ["COMMIT", "config.json", "plain.bin", "state.pt"]
    assert (folder / "state.pt").stat().st_size == len(DATA)
    assert (folder / "state.pt").read_bytes() == DATA
    assert (folder / "plain.bin").read_bytes() == DATA
    assert (folder / "config.json").read_bytes() == b"{}"
    assert not (folder / ".bsx").exists()
    with pytest.raises(FileNotFoundError):
        (folder / "none").read_bytes()


def test_a_read_of_a_name_that_is_not_utf8_leaves_the_mount_alone(mounted, fs):
    for number in (b"\xff", b"1"):
        Path(os.fsdecode(os.fsencode(fs.url) + b"/step-1/plain-" + number)).write_bytes(DATA)
    for number in (b"\xff", b"1"):
        assert Path(os.fsdecode(os.fsencode(mounted.mountpoint) + b"/step-1/plain-" + number)).read_bytes() == DATA
    until(lambda: mounted.accessed().files, what="a record of what was read")
    assert [file.path for file in mounted.accessed().files] == ["step-1/plain-1"]
    assert (mounted.mountpoint / "step-1/config.json").read_bytes() == b"{}"


def test_a_checkpoint_of_more_files_than_a_process_may_have_open(fs, tmp_path, config):
    for number in range(100):
        with fs.create(f"step-2/part-{number}", width=3, unit=4096, striped=True) as out:
            out.write(DATA[:20000])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        made = fsmount.start(fs.url, tmp_path / "mnt", config=config, prefetch=["step-2"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        assert prefetched(made).prefetch == "done"
    finally:
        made.unmount()


def test_reads_that_fail_again_and_again_do_not_fill_the_log(mounted, fs, config):
    for stripe in Path(fs.url, "step-1/.bsx").iterdir():
        if stripe.stat().st_size > 1 << 20:
            with open(stripe, "r+b") as out:
                out.write(bytes(2 << 20))
    with open(mounted.mountpoint / "step-1/state.pt", "rb", buffering=0) as file:
        for _ in range(300):
            with pytest.raises(OSError, match="Input/output error"):
                os.pread(file.fileno(), 100, 1 << 20)
    (log,) = Path(config.state_dir, "fs").glob("*.log")
    assert 50 < log.read_text().count("cannot read") <= 100


def test_a_store_that_tells_no_owners_is_for_who_mounted_it_alone(fs, config, tmp_path):
    with tempfile.TemporaryDirectory() as folder:  # one that everybody can enter
        os.chmod(folder, 0o755)
        made = fsmount.start(fs.url, Path(folder, "mnt"), config=config)
        try:
            assert (made.mountpoint / "step-1/config.json").read_bytes() == b"{}"
            for argv in (["ls", str(made.mountpoint)], ["cat", f"{made.mountpoint}/step-1/config.json"]):
                done = subprocess.run(argv, user=65534, group=65534, extra_groups=[], capture_output=True)
                assert b"Permission denied" in done.stderr
                assert done.stdout == b""
        finally:
            made.unmount()


def test_a_mount_in_a_closed_folder_is_for_those_to_whom_root_shows_it(mounted):
    """A container whose processes are not root's, for one."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        subprocess.run(["mount", "--bind", mounted.mountpoint, folder], check=True)
        try:
            argv = ["cat", f"{folder}/step-1/config.json"]
            assert subprocess.check_output(argv, user=65534, group=65534, extra_groups=[]) == b"{}"
        finally:
            subprocess.run(["umount", folder], check=True)


def test_links_of_a_job_show_nothing_of_the_host(tmp_path, config):
    """What may write to a checkpoint folder, a user or a container of root's, puts links into it; root shows it."""
    (tmp_path / "secret").write_text("only root may read this")
    folder = tmp_path / "ck"
    folder.mkdir()
    for owner, name in ((0, "roots"), (65534, "theirs")):
        (folder / name).write_text("weights")
        (folder / f"{name}.pt").symlink_to("../secret")
        (folder / f"{name}-last.pt").symlink_to(name)
        for path in (name, f"{name}.pt", f"{name}-last.pt"):
            os.chown(folder / path, owner, owner, follow_symlinks=False)
    made = fsmount.start(str(folder), tmp_path / "mnt", config=config)
    try:
        for name in ("roots", "theirs"):
            assert (made.mountpoint / f"{name}-last.pt").read_text() == "weights"
            with pytest.raises(PermissionError):
                (made.mountpoint / f"{name}.pt").read_text()
    finally:
        made.unmount()


def test_mmap_from_many_threads(mounted):
    with (
        open(mounted.mountpoint / "step-1/state.pt", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
    ):

        def reader(seed: int) -> None:
            for step in range(200):
                offset = (seed * 7919 * 4096 + step * 104729) % (len(DATA) - 5000)
                assert pages[offset : offset + 5000] == DATA[offset : offset + 5000]

        together(reader, range(32))


def test_cp_and_tar(mounted, tmp_path):
    subprocess.run(["cp", "-r", mounted.mountpoint / "step-1", tmp_path / "copy"], check=True, timeout=60)
    assert (tmp_path / "copy/state.pt").read_bytes() == DATA
    tar = subprocess.run(["tar", "-C", mounted.mountpoint, "-c", "step-1"], capture_output=True, check=True, timeout=60)
    assert DATA[:100_000] in tar.stdout


@pytest.mark.torch
@pytest.mark.parametrize("mapped", [True, False])
def test_torch_loads_from_it(mounted, fs, mapped):
    torch = pytest.importorskip("torch")
    from bootseer import torch as bt

    state = {"w": torch.randn(500, 3000), "b": torch.ones(7).bfloat16()}
    bt.save(state, f"{fs.url}/step-2/")
    loaded = torch.load(mounted.mountpoint / "step-2/state.pt", weights_only=True, mmap=mapped)
    assert torch.equal(loaded["w"], state["w"])
    assert torch.equal(loaded["b"], state["b"])


@pytest.mark.torch
def test_safetensors_maps_from_it(mounted, fs, tmp_path):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"w": torch.randn(500, 3000)}
    safetensors.save_file(state, tmp_path / "m.safetensors")
    fs.put(tmp_path / "m.safetensors", "st/m.safetensors")
    assert fs.stat("st/m.safetensors").striped
    loaded = safetensors.load_file(mounted.mountpoint / "st/m.safetensors")
    assert torch.equal(loaded["w"], state["w"])


def test_prefetch_fills_the_node_cache(fs, tmp_path, config):
    for again in (False, True):
        made = fsmount.start(f"{fs.url}/step-1", tmp_path / "mnt", config=config, prefetch=True, commit=True)
        try:
            status = prefetched(made)
            assert (status.prefetch, status.prefetch_done) == ("done", status.prefetch_total)
            assert status.prefetch_total == 2 * len(DATA) + 2
            assert (made.mountpoint / "state.pt").read_bytes() == DATA
            assert (made.mountpoint / "plain.bin").read_bytes() == DATA
            time.sleep(0.5)
            status = made.status()
            assert status.fetched_demand == 0
            # the second mount finds the striped file on disk; a plain one has nothing to check it with
            assert status.fetched_ahead == (len(DATA) + 2 if again else 2 * len(DATA) + 2)
            assert (status.opened_passthrough, status.opened_served) == (1, 1), "the striped file is in the cache"
            assert len(DATA) <= status.bytes_read < 2 * len(DATA)  # the kernel may drop a page, and ask again
        finally:
            made.unmount()


def test_prefetch_of_the_latest_checkpoint(fs, tmp_path, config):
    with fs.create("step-2/state.pt") as out:
        out.write(b"unfinished" * 1000)
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config, prefetch=[fsmount.LATEST])
    try:
        assert prefetched(made).prefetch_total == 2 * len(DATA) + 2
    finally:
        made.unmount()


def test_a_failed_prefetch_does_not_hurt(fs, tmp_path, config):
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config, prefetch=["none"])
    try:
        assert prefetched(made).prefetch == "failed"
        assert (made.mountpoint / "step-1/state.pt").read_bytes() == DATA
    finally:
        made.unmount()


def test_bad_input(fs, tmp_path, config):
    target = tmp_path / "mnt"
    with pytest.raises(NotFoundError, match="no folder"):
        fsmount.start(f"{fs.url}/none", target, config=config)
    with pytest.raises(NotFoundError, match="no checkpoint"):
        fsmount.start(f"{fs.url}/none", target, config=config, commit=True)
    with pytest.raises(NotFoundError, match="is a file"):
        fsmount.start(f"{fs.url}/step-1/state.pt", target, config=config)
    os.unlink(f"{fs.url}/step-1/COMMIT")
    with pytest.raises(DataError, match="has no COMMIT: its save did not finish"):
        fsmount.start(f"{fs.url}/step-1", target, config=config, commit=True)
    assert not mounts.is_mounted(target)
    assert fsmount.find(target, config=config) is None


def is_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_start_that_is_given_up_leaves_no_server(fs, tmp_path, config, monkeypatch):
    silent = tmp_path / "silent"
    silent.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 60 &\n")
    silent.chmod(0o700)
    monkeypatch.setattr("bootseer.served.client._START_SECONDS", 1.0)
    monkeypatch.setattr(client, "SERVER", (str(silent),))
    with pytest.raises(UnavailableError, match="did not start"):
        fsmount.start(fs.url, tmp_path / "mnt", config=config)
    group = int((tmp_path / "pid").read_text())
    until(lambda: not is_group(group))


def test_a_replaced_file_is_seen_and_never_mixed(mounted, fs):
    path = mounted.mountpoint / "step-1/state.pt"
    assert path.read_bytes() == DATA
    new = DATA[::-1]
    with open(path, "rb") as old:
        with fs.create("step-1/state.pt", width=2, unit=1 << 18, striped=True) as out:
            out.write(new)
        time.sleep(1.1)  # names are believed for a second
        assert path.read_bytes() == new
        assert old.read() == DATA  # from the page cache: whole, and the old version


def test_root_mounts_nothing_where_somebody_else_leads_the_name(fs, tmp_path, config):
    """The mount would lie on any folder of the machine."""
    home, outside = tmp_path / "home", tmp_path / "etc"
    home.mkdir()
    outside.mkdir()
    (home / "mnt").symlink_to(outside)
    for path in (home, home / "mnt"):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    with pytest.raises(ConfigError, match="others can replace"):
        fsmount.start(fs.url, home / "mnt", config=config)
    assert mounts.below(tmp_path) == []


@pytest.mark.parametrize("name", ["state", "cache"])
def test_folders_that_others_can_write_to_are_refused(fs, tmp_path, config, name):
    """The state names processes to end and logs to write; the cache has the bytes that are served."""
    inner = tmp_path / name / ("fs" if name == "state" else "blocks")
    inner.mkdir(parents=True)
    inner.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to"):
        fsmount.start(fs.url, tmp_path / "mnt", config=config)
    (tmp_path / name).chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to"):
        fsmount.start(fs.url, tmp_path / "mnt", config=config)
    assert not mounts.is_mounted(tmp_path / "mnt")


@pytest.mark.parametrize("state", ["state", "another"])
def test_a_second_unmount_leaves_a_later_mount_alone(fs, tmp_path, config, state):
    first = fsmount.start(fs.url, tmp_path / "mnt", config=config)
    first.unmount()
    later = fsmount.start(fs.url, tmp_path / "mnt", config=replace(config, state_dir=str(tmp_path / state)))
    try:
        first.unmount()
        assert later.status().alive
        assert (later.mountpoint / "step-1/config.json").read_bytes() == b"{}"
    finally:
        later.unmount()


def test_a_server_gets_the_login_of_its_store_and_says_it_to_nobody(fs, tmp_path, config, monkeypatch):
    """The storage is opened by the server anew, from what it is told on its standard input."""

    def open_store(url: str) -> StripeFS:
        opened = open_fs(fs.url)
        opened.url = url.replace("me:secret@", "***@")
        return opened

    def start(
        folder: Path, server: object, spec: ServerSpec, kind: type, *, record: MountRecord, **more: object
    ) -> bool:
        told.append((spec, record))
        return True

    told: list[tuple[ServerSpec, MountRecord]] = []
    monkeypatch.setattr(client, "open_fs", open_store)
    monkeypatch.setattr("bootseer.served.client.start", start)
    made = fsmount.start("sftp://me:secret@host/run", tmp_path / "mnt", config=config)
    assert told[0][0].url == "sftp://me:secret@host/run"
    assert told[0][1].url == made.url == "sftp://***@host/run"


def test_an_unmount_from_elsewhere_ends_the_server(fs, tmp_path, config):
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config)
    mounts.unmount(made.mountpoint)
    until(lambda: not made.status().alive, what="the end of the server")
    assert not mounts.is_mounted(made.mountpoint)
    made.unmount()
    made.unmount()
    assert not list(Path(config.state_dir, "fs").iterdir())


def cli(*args: object, config: Config, group: Sequence[str] = ("fs",)) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "BOOTSEER_CACHE_DIR": config.cache_dir, "BOOTSEER_STATE_DIR": config.state_dir}
    return forked.cli(*group, *args, env=env)


def test_the_commands(fs, tmp_path, config):
    done = cli("mount", fs.url, tmp_path / "mnt", "--prefetch", "@latest", config=config)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mnt/step-1/state.pt").read_bytes() == DATA
    assert json.loads(cli("inspect", tmp_path / "mnt", "--json", config=config).stdout)["alive"]
    assert cli("unmount", tmp_path / "mnt", config=config, group=()).returncode == 0


def test_what_was_read_is_all_that_the_next_mount_prefetches(fs, tmp_path, config):
    """Also of a later checkpoint. It waits for nobody; what was never read does."""
    made = fsmount.start(f"{fs.url}/step-1", tmp_path / "mnt", config=config)
    try:
        with open(made.mountpoint / "state.pt", "rb") as file:
            file.seek(7 << 20)
            assert file.read(1000) == DATA[7 << 20 :][:1000]
        until(lambda: made.accessed().files)
        read = made.accessed()
    finally:
        made.unmount()
    assert [file.path for file in read.files] == ["state.pt"]
    assert read.files[0].ranges[0][0] == 7 << 20
    with fs.create("step-2/state.pt", width=3, unit=1 << 18, striped=True) as out:
        out.write(DATA[::-1])
    fs.commit("step-2")
    made = fsmount.start(f"{fs.url}/step-2", tmp_path / "mnt", config=config, prefetch=read, hold=True)
    try:
        until(lambda: made.status().prefetch_total)
        time.sleep(0.7)  # longer than a status is old
        assert (made.status().prefetch, made.status().fetched_ahead) == ("running", 0)
        made.release()
        status = prefetched(made)
        assert status.prefetch == "done"
        assert status.prefetch_done == status.prefetch_total == read.bytes
        assert (made.mountpoint / "state.pt").read_bytes() == DATA[::-1]
        assert (made.mountpoint / "config.json").exists() is False
    finally:
        made.unmount()
    with fs.create("step-3/weights.pt", width=3, unit=1 << 18, striped=True) as out:
        out.write(DATA)
    fs.commit("step-3")
    made = fsmount.start(f"{fs.url}/step-3", tmp_path / "mnt", config=config, prefetch=read, hold=True)
    try:
        assert (made.status().prefetch, made.status().fetched_ahead) == ("running", 0)
        made.release()
        assert prefetched(made).prefetch_done == len(DATA)
    finally:
        made.unmount()
    assert [path.name for path in (Path(config.state_dir) / "fs").iterdir()] == []


def test_the_figures_of_a_node_do_not_wait_for_a_folder_above_a_mount_that_hangs(tmp_path: Path) -> None:
    """As below an NFS whose server is gone. One is mounted there by that name, of another nobody knows."""
    names = {name: tmp_path / "hung" / name for name in ("mounted", "unknown")}
    for name, place in names.items():
        place.mkdir(parents=True)
        (tmp_path / "state/fs" / name).mkdir(parents=True, mode=0o700)
        record = MountRecord(id=name, url="/x", mountpoint=str(place), began=1)
        records(tmp_path / "state/fs", MountRecord).save(record)
    mounts.mount("x", names["mounted"], "tmpfs")
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,default_permissions"
    mounts.mount("hung", tmp_path / "hung", "fuse", data=options)
    try:
        environ = {f"BOOTSEER_{one.upper()}_DIR": str(tmp_path / one) for one in ("state", "cache", "node")}
        done = forked.cli("node", "status", "--metrics", env={**os.environ, **environ}, timeout=30)
    finally:
        os.close(device)
        mounts.unmount(tmp_path / "hung", lazy=True)
        mounts.unmount(names["mounted"])
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"whether {names['unknown']} is still mounted" in line
    assert 'bootseer_node_servers{kind="fs",state="dead"} 1\n' in done.stdout
    assert 'bootseer_node_servers{kind="fs",state="silent"} 1\n' in done.stdout
