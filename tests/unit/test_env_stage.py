"""The stage as a whole without mounts: hits, misses, and every kind of trouble, in which the command simply runs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bootseer import env
from bootseer.config import Config
from bootseer.env import EnvResult, EnvSpec, Outcome, Target, inputs, inventory, manifest, observer, snapshots
from bootseer.env.canonical import canonical, sha256_of
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.unpack import beside, recover
from bootseer.errors import ConfigError, NotFoundError, NotWritableError, UnavailableError
from bootseer.objects import lease
from bootseer.objects.folder import FolderStore
from support import envnode, forked, keys
from support.stores import CheckedStore
from support.waits import until


class Site:
    """A store and any number of nodes, each with its own target, cache and state, as a test sees them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = root / "store"
        self.runs: list[str] = []
        self.target = root / "target"

    def spec(self, node: str, **changed: object) -> EnvSpec:
        # One path as the job sees it, another directory behind it per node: what a container would give.
        return envnode.spec_for(self.host(node), **{"restore": "unpack", **changed})

    def host(self, node: str) -> Path:
        return self.root / node / "target"

    def command(self, node: str, code: int = 0) -> Callable[[], int]:
        def run() -> int:
            self.runs.append(node)
            host = self.host(node)
            host.mkdir(parents=True, exist_ok=True)
            (host / "pkg").mkdir(exist_ok=True)
            (host / "pkg" / "data").write_bytes(bytes(range(256)) * 1000)
            (host / "pkg" / "__init__.py").write_text("x = 1\n")
            (host / "link").unlink(missing_ok=True)
            (host / "link").symlink_to("pkg")
            for path in (*host.rglob("*"), host):  # the same on each node, so that a new snapshot has the old objects
                os.utime(path, (1, 1.6e9), follow_symlinks=False)
            return code

        return run

    def config(self, node: str) -> Config:
        return envnode.config_in(self.root / node)

    def run(self, node: str, *, code: int = 0, store: str = "", **changed: object) -> EnvResult:
        return env.run(
            self.spec(node, **changed),
            self.command(node, code),
            store_url=store or str(self.store),
            config=self.config(node),
        )

    def manifest_file(self) -> Path:
        (found,) = self.store.glob("env/snapshots/*/*.json")
        return found

    def manifest(self) -> SnapshotManifest:
        path = self.manifest_file()
        return manifest.decode(path.read_bytes(), f"{path.parent.name}/{path.stem}")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_target_that_is_a_mount_of_the_job_fits_by_what_it_holds(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it lies on the host does not count, and no image says what is in it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # root does not scan what other containers may change

    def run(node: str) -> EnvResult:
        host = str(site.host(node))
        shown = {"targets": (Target("/opt/env", host, host),), "mounts": ((host, "/opt/env"),)}
        return site.run(node, rootfs=str(site.root / "rootfs"), **shown)

    for node in ("a", "b", "c"):
        site.host(node).mkdir(parents=True)
    (site.host("c") / "old").write_text("of an earlier job\n")
    assert run("a").outcome is Outcome.RAN_AND_PUBLISHED
    assert run("b").outcome is Outcome.RESTORED_UNPACK
    assert run("c").reason.startswith(f"missed because {site.host('c')} holds other files")
    assert site.runs == ["a", "c"]


def test_the_command_runs_once_for_all_nodes(site: Site) -> None:
    first = site.run("a")
    assert (first.outcome, first.exit_code) == (Outcome.RAN_AND_PUBLISHED, 0)
    assert first.reason == "missed because no snapshot of these targets exists yet"
    for node in "bcd":
        result = site.run(node)
        assert (result.outcome, result.reason, result.exit_code) == (Outcome.RESTORED_UNPACK, "hit", 0)
        assert result.key == first.key
        assert files(site.host(node)) == files(site.host("a"))
        assert os.readlink(site.host(node) / "link") == "pkg"
    assert site.runs == ["a"]
    for node in "ab":  # and nothing is left beside the target
        assert {path.name for path in (site.root / node).iterdir()} - {"cache"} == {"state", "target"}


def test_a_failing_command_keeps_its_exit_code_and_publishes_nothing(site: Site) -> None:
    result = site.run("a", code=7)
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 7)
    assert "failed with exit code 7" in result.reason
    assert not list(site.store.glob("env/snapshots/*/*.json"))
    assert (site.host("a") / "pkg" / "data").exists()
    assert site.run("a").outcome is Outcome.RAN_AND_PUBLISHED
    assert not list(site.store.glob("leases/env/*/*"))


@pytest.mark.parametrize("where", ["execution._Attempt.prepare", "execution.Execution._helped"])
def test_an_interrupt_before_the_command_holds_up_no_other_start(
    site: Site, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupted(*_: object) -> None:
        raise SystemExit(130)

    with monkeypatch.context() as patch:
        patch.setattr(f"bootseer.env.{where}", interrupted)
        with pytest.raises(SystemExit):
            site.run("a")
    assert not list(site.store.glob("leases/env/*/*"))
    assert site.run("a").outcome is Outcome.RAN_AND_PUBLISHED


def test_what_the_runner_raises_comes_through(site: Site) -> None:
    def runner() -> int:
        raise UnavailableError("no container runtime")

    with pytest.raises(UnavailableError, match="no container runtime"):
        env.run(site.spec("a"), runner, store_url=str(site.store), config=site.config("a"))


def test_switched_off(site: Site) -> None:
    assert site.run("a", snapshot=False).outcome is Outcome.RAN
    assert not site.store.exists()


def test_a_container_without_a_digest_gets_no_snapshot(site: Site) -> None:
    result = site.run("a", image_digest="")
    assert result.outcome is Outcome.RAN
    assert "not known by a digest" in result.reason


def test_reads_that_cannot_be_observed_are_said(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """As by root, whose runtime tells nobody of its container, and by others."""
    result = site.run("a", mounts=((str(site.root / "nothing"), "/data"),))
    assert "only its stated inputs count" in caplog.text
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert "only its stated inputs count" in result.reason
    assert "only its stated inputs count" in site.run("b", mounts=((str(site.root / "nothing"), "/data"),)).reason


def test_working_folder_and_mounts_below_a_target_count(site: Site) -> None:
    keys = [
        site.run("a", **changed).key
        for changed in (
            {},
            {"cwd": "/job"},
            {"mounts": (("/srv/driver", "/opt/env/driver"),)},
            {"mounts": (("/srv/other", "/opt/env/driver"),)},
        )
    ]
    assert len(set(keys)) == 4
    assert site.run("a", mounts=(("/srv/data", "/opt/env-data"),)).key == keys[0]


def test_a_wrong_spec_is_an_error(site: Site) -> None:
    with pytest.raises(ConfigError):
        site.run("a", key_files=("nope",))
    assert site.runs == []


def test_a_changed_file_is_a_miss_with_its_reason(site: Site, tmp_path: Path) -> None:
    request = tmp_path / "requirements.txt"
    request.write_text("torch==2.5\n")
    site.run("a", key_files=(str(request),))
    request.write_text("torch==2.5\nflash-attn==2.8\n")
    result = site.run("b", key_files=(str(request),))
    assert result.reason == "missed because requirements.txt changed: + flash-attn 2.8"


def test_old_snapshots_are_replaced(site: Site) -> None:
    site.run("a")
    found = site.manifest()
    old = msgspec.structs.replace(found, created=int(time.time()) - 8 * 86400)
    site.manifest_file().write_bytes(old.encode())
    assert site.run("b").outcome is Outcome.RESTORED_UNPACK
    result = site.run("c", max_age=7 * 86400.0)
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert result.reason == "missed because the snapshot is 8 d old, the maximum is 7 d"
    assert site.run("d", max_age=7 * 86400.0).outcome is Outcome.RESTORED_UNPACK


def test_a_new_snapshot_is_made_when_it_is_asked_for(site: Site) -> None:
    site.run("a")
    found = site.manifest()
    site.manifest_file().write_bytes(msgspec.structs.replace(found, created=found.created - 60).encode())
    asked = time.time()
    result = site.run("b", since=asked)
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert result.reason == "missed because a new snapshot was asked for"
    assert site.manifest().created >= int(asked)
    for node in "cd":  # others that ask for it in the same moment, and those that do not
        assert site.run(node, since=asked if node == "c" else 0.0).outcome is Outcome.RESTORED_UNPACK
    assert site.runs == ["a", "b"]


def test_a_frozen_stage_restores_or_fails_in_one_line(site: Site) -> None:
    with pytest.raises(NotFoundError, match="not to be run: missed because no snapshot of these targets") as told:
        site.run("a", frozen=True)
    assert told.value.exit_code == 66
    with pytest.raises(NotFoundError, match="snapshots are off"):
        site.run("a", frozen=True, snapshot=False)
    assert site.runs == []
    assert not [*site.store.glob("leases/**/*")]
    site.run("a")
    assert site.run("b", frozen=True).outcome is Outcome.RESTORED_UNPACK
    for blob in site.store.glob("blobs/*/*"):
        blob.write_bytes(bytes(blob.stat().st_size))
    with pytest.raises(NotFoundError, match="damaged"):
        site.run("c", frozen=True)
    assert site.runs == ["a"]


def test_another_base_is_a_miss(site: Site, tmp_path: Path) -> None:
    # without an image digest, what the target held before is checked on each node
    target = tmp_path / "plain"
    spec = EnvSpec(targets=(Target(str(target)),), command=("x",), restore="unpack", background=False)

    def go() -> EnvResult:
        def runner() -> int:
            target.mkdir(exist_ok=True)
            (target / "made").write_text("made")
            return 0

        return env.run(spec, runner, store_url=str(site.store), config=site.config("a"))

    assert go().outcome is Outcome.RAN_AND_PUBLISHED
    assert go().outcome is Outcome.RESTORED_UNPACK  # holds the result itself: a restart
    (target / "other").write_text("x")
    result = go()
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert "holds other files than when the snapshot was made" in result.reason


def test_deletions_are_restored(site: Site) -> None:
    for node in "ab":
        site.host(node).mkdir(parents=True)
        (site.host(node) / "old-1.dist-info").mkdir()
        (site.host(node) / "old-1.dist-info" / "RECORD").write_text("x")
        (site.host(node) / "kept").write_text("x")

    def runner() -> int:
        (site.host("a") / "old-1.dist-info" / "RECORD").unlink()
        (site.host("a") / "old-1.dist-info").rmdir()
        return site.command("a")()

    env.run(site.spec("a"), runner, store_url=str(site.store), config=site.config("a"))
    assert site.run("b").outcome is Outcome.RESTORED_UNPACK
    assert not (site.host("b") / "old-1.dist-info").exists()
    assert (site.host("b") / "kept").exists()


def test_secrets_stop_publication_not_the_job(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    def runner() -> int:
        site.host("a").mkdir(parents=True)
        (site.host("a") / "pip.conf").write_text("[global]\nindex-url = https://me:hunter2x@index.corp/simple\n")
        return 0

    result = env.run(site.spec("a"), runner, store_url=str(site.store), config=site.config("a"))
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert "not published: password in a URL in pip.conf" in result.reason
    assert "hunter2x" not in caplog.text + result.reason
    assert not list(site.store.glob("env/snapshots/*/*.json"))
    assert not list(site.store.glob("trees/*"))


# -- the store in trouble -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["", "s3-nothing://bucket"], ids=["a file in its place", "down"])
def test_without_a_store(site: Site, caplog: pytest.LogCaptureFixture, store: str) -> None:
    site.store.write_text("a file where the store should be")
    result = site.run("a", store=store)
    assert (result.outcome, result.exit_code, site.runs) == (Outcome.RAN, 0, ["a"])
    assert not store or "the store did not answer" in result.reason
    assert caplog.records
    assert not store or "running the command" in caplog.text


@pytest.mark.parametrize("point", ["store.put.before-sync", "env.publish.before-build", "env.publish.before-manifest"])
def test_store_full(site: Site, point: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", f"{point}=enospc")
    result = site.run("a")
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert "No space left" in result.reason
    assert "was not published" in caplog.text
    assert not list(site.store.glob("env/snapshots/*/*.json"))
    monkeypatch.delenv("BOOTSEER_FAULTS")
    assert site.run("b").outcome is Outcome.RAN_AND_PUBLISHED
    assert site.run("c").outcome is Outcome.RESTORED_UNPACK


def test_node_full_at_restore(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.run("a")
    monkeypatch.setenv("BOOTSEER_FAULTS", "env.unpack.before-place=enospc")
    result = site.run("b")
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert "could not be restored" in result.reason
    assert files(site.host("b")) == files(site.host("a"))


def test_too_little_space_is_a_miss(site: Site) -> None:
    site.run("a")
    found = site.manifest()
    site.manifest_file().write_bytes(msgspec.structs.replace(found, size=1 << 60).encode())
    result = site.run("b")
    assert result.outcome is Outcome.RAN
    assert "MiB free, the snapshot needs" in result.reason


def test_a_damaged_manifest_is_replaced(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.run("a")
    data = bytearray(site.manifest_file().read_bytes())
    data[len(data) // 2] ^= 1
    site.manifest_file().write_bytes(bytes(data))
    result = site.run("b")
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    assert "manifest is damaged" in result.reason
    assert site.run("c").outcome is Outcome.RESTORED_UNPACK


@pytest.mark.parametrize("part", ["blobs", "env/lists", "trees", "gone trees"])
def test_a_flipped_bit_is_seen_and_the_command_runs(site: Site, part: str) -> None:
    site.run("a")
    gone, _, folder = part.rpartition(" ")
    for path in [path for path in (site.store / folder).rglob("*") if path.is_file()]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.unlink() if gone else path.write_bytes(bytes(data))
    time.sleep(1.01 - time.time() % 1)  # one that is the same, of the same second too, would be the quarantined one
    result = site.run("b")
    assert (result.outcome, result.exit_code) == (Outcome.RAN_AND_PUBLISHED, 0)
    assert gone or "quarantined on this node" in result.reason
    assert files(site.host("b")) == files(site.host("a"))
    for node in "bac":  # it has replaced the damaged one, also for who has not met that
        assert site.run(node).outcome is Outcome.RESTORED_UNPACK
        assert files(site.host(node)) == files(site.host("a"))
    assert site.runs == ["a", "b"]


def test_a_hostile_inventory_is_refused_before_the_first_write(site: Site) -> None:
    site.run("a")
    found = site.manifest()
    store = FolderStore(site.store)
    entries = inventory.decode(store.get(manifest.inventory_key(found.inventory), most=1 << 30), targets=1)
    evil = [*entries[:1], msgspec.structs.replace(entries[1], path="0/../../evil"), *entries[1:]]
    data = inventory.encode(evil)
    store.put(manifest.inventory_key(inventory.digest(data)), data)
    site.manifest_file().write_bytes(msgspec.structs.replace(found, inventory=inventory.digest(data)).encode())
    result = site.run("b")
    assert result.outcome is Outcome.RAN_AND_PUBLISHED  # in place of the bad one
    assert "not a plain relative path" in result.reason
    assert not (site.root / "evil").exists()
    assert not (site.root / "b" / "evil").exists()


# -- races and kills ------------------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import test_env_stage as t
site = t.Site(Path({root!r}))
for node in {nodes!r}[1:]:
    if not t.os.fork():
        break
else:
    node = {nodes!r}[0]
t.os.write(1, site.run(node, max_age={max_age}).outcome.value.encode() + b" ")
"""


def child(site: Site, *nodes: str, max_age: float | None = None, **environ: str) -> subprocess.Popen[str]:
    """A process for each of the nodes, which begin at once; each prints its outcome."""
    code = CHILD.format(folder=str(Path(__file__).parent), root=str(site.root), nodes=nodes, max_age=max_age)
    return forked.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environ}, text=True, stdout=-1, stderr=subprocess.DEVNULL
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=180)
    return process.returncode, out.strip()


POINTS = [
    "lease.taken",
    "env.publish.before-build",
    "env.publish.before-capture",
    "env.publish.before-tree",
    "env.publish.before-inventory",
    "env.publish.before-manifest",
    "store.put.before-publish",
    "env.publish.after-manifest",
    "lease.before-end",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_publisher_leaves_a_full_snapshot_or_none(
    site: Site, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "DEAD", 0.5)
    monkeypatch.setattr(lease, "POLL", 0.1)
    assert finish(child(site, "a", BOOTSEER_FAULTS=f"{point}=kill"))[0] == -signal.SIGKILL
    whole = bool(list(site.store.glob("env/snapshots/*/*.json")))
    assert whole == (point in ("env.publish.after-manifest", "lease.before-end"))
    result = site.run("b")
    assert result.outcome is (Outcome.RESTORED_UNPACK if whole else Outcome.RAN_AND_PUBLISHED)
    assert site.run("c").outcome is Outcome.RESTORED_UNPACK
    assert len(files(site.host("c"))) >= 2


@pytest.mark.parametrize("point", ["noted=kill@1", "noted=kill@3", "before-place=kill", "placed=kill"])
@pytest.mark.parametrize("store", ["there", "gone"])
def test_a_killed_restore_is_mended_by_the_next_start(
    site: Site, point: str, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.run("a")
    host = site.host("b")
    (host / "pkg").mkdir(parents=True)
    (host / "pkg" / "data").write_text("of the image")
    host.chmod(0o711)
    assert finish(child(site, "b", BOOTSEER_FAULTS=f"env.unpack.{point}"))[0] == -signal.SIGKILL
    seen: list[object] = []

    def runner() -> int:
        seen.append((files(host), host.stat().st_mode & 0o777))
        return 0

    url = str(site.store) if store == "there" else "s3-nothing://bucket"
    result = env.run(site.spec("b"), runner, store_url=url, config=site.config("b"))
    if store == "gone":  # the command finds what was there before
        assert seen == [({"pkg/data": b"of the image"}, 0o711)]
    else:
        assert result.outcome is Outcome.RESTORED_UNPACK
        assert files(host) == files(site.host("a"))
    assert "was killed" in caplog.text
    assert sorted(path.name for path in host.parent.iterdir()) in (["state", "target"], ["cache", "state", "target"])


def test_a_restore_that_still_runs_is_not_taken_back(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Of another node, into a target on a shared file system: it has another state folder, so no lock is in the way."""
    site.run("a")
    other = child(site, "b", BOOTSEER_FAULTS="env.unpack.placed=stop")
    until(lambda: Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", 60)
    assert (site.host("b") / "link").is_symlink()
    recover(site.spec("b").targets[0])
    assert files(site.host("b")) == files(site.host("a"))
    other.send_signal(signal.SIGCONT)
    assert finish(other) == (0, "restored-unpack")


@pytest.mark.root
def test_what_another_user_left_beside_the_target_is_not_believed(site: Site) -> None:
    site.run("a")
    folder = beside(site.spec("b").targets[0])[0]
    folder.mkdir()
    (folder / (beside(site.spec("b").targets[0])[1] + "x")).mkdir()
    os.chown(folder / (beside(site.spec("b").targets[0])[1] + "x"), 1234, 1234)
    result = site.run("b")
    assert (result.outcome, site.runs) == (Outcome.RAN, ["a", "b"])
    assert "is of another user's restore" in result.reason


def test_a_journal_of_another_user_moves_nothing(site: Site) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs another user's file")
    base, prefix = beside(site.spec("a").targets[0])
    folder = base / f"{prefix}x"  # as if the owner of its parent had renamed a folder of ours that all may write to
    folder.mkdir(parents=True)
    ours = site.root / "ours"
    ours.write_text("ours")
    for name, text in (("lock", ""), ("0", "planted"), ("journal", f'["{ours}", true]\n')):
        (folder / name).write_text(text)
        os.chown(folder / name, 65534, 65534)
    assert site.run("a").exit_code == 0
    assert ours.read_text() == "ours"


def test_removing_many_snapshots_reads_each_once(site: Site) -> None:
    class Counted(CheckedStore):
        reads = 0

        def get(self, key: str, *, most: int) -> bytes:
            self.reads += 1
            return super().get(key, most=most)

    for number in range(6):
        site.run("a", salt=str(number))
    store = Counted(FolderStore(site.store))
    found = snapshots.names(store)
    snapshots.remove(store, found[:4])
    assert store.reads == 4
    assert sorted(snapshots.names(store)) == sorted(found[4:])
    listed = set(site.store.glob("env/lists/*"))
    snapshots.remove(store, found[4:])
    assert set(site.store.glob("env/lists/*")) == listed != set(), "a publication may count on them"


def test_an_inventory_that_a_collection_takes_meanwhile_is_stored_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(site.store)

    def point(name: str) -> None:
        if name == "env.publish.before-manifest":
            store.withdraw([info.key for info in store.list("env/lists")], "0" * 16)
            for info in [*store.list("collection")]:
                store.delete(info.key)

    monkeypatch.setattr("bootseer.env.publish.faults.point", point)
    site.run("a")
    (name,) = snapshots.names(store)
    assert snapshots.entries(store, snapshots.load(store, name))


def test_of_two_publishers_the_first_wins(site: Site) -> None:
    slow = child(site, "a", BOOTSEER_FAULTS="env.publish.before-manifest=sleep:2")
    await_lease(site)
    fast = site.run("b", wait=0.0)
    assert fast.outcome is Outcome.RAN_AND_PUBLISHED, fast.reason
    before = site.manifest_file().read_bytes()
    assert finish(slow) == (0, "ran")
    assert site.manifest_file().read_bytes() == before
    assert site.run("c").outcome is Outcome.RESTORED_UNPACK


def await_lease(site: Site) -> None:
    until(lambda: list(site.store.glob("leases/env/*/0")), 60)


def test_ranks_of_one_node_share_one_run(site: Site) -> None:
    processes = [child(site, "a") for _ in range(3)]
    texts = sorted(finish(process)[1] for process in processes)
    assert texts == ["ran-and-published", "restored-unpack", "restored-unpack"]


# -- leases ---------------------------------------------------------------------------------------------------------


def test_of_nodes_that_meet_a_damaged_snapshot_together_one_replaces_it(site: Site) -> None:
    site.run("x")
    for path in (site.store / "env/lists").iterdir():
        path.write_bytes(b"damaged")
    _, said = finish(child(site, *(f"n{number}" for number in range(6))))
    assert sorted(said.split()) == ["ran-and-published"] + ["restored-unpack"] * 5


@pytest.mark.parametrize("old", [False, True])
def test_a_leader_that_was_stopped_and_goes_on_replaces_nothing(
    site: Site, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when both replace a snapshot that has expired."""
    monkeypatch.setattr(lease, "DEAD", 1.0)
    if old:
        site.run("x")
        expired = msgspec.structs.replace(site.manifest(), created=int(time.time()) - 8 * 86400)
        site.manifest_file().write_bytes(expired.encode())
    stopped = child(site, "a", max_age=7 * 86400.0 if old else None, BOOTSEER_FAULTS="env.publish.before-manifest=stop")
    await_lease(site)
    result = site.run("b", max_age=7 * 86400.0)
    assert result.outcome is Outcome.RAN_AND_PUBLISHED
    before = site.manifest_file().read_bytes()
    stopped.send_signal(signal.SIGCONT)
    assert finish(stopped) == (0, "ran")
    assert site.manifest_file().read_bytes() == before
    assert site.run("c").outcome is Outcome.RESTORED_UNPACK


def on_five_nodes(site: Site, caplog: pytest.LogCaptureFixture, act: Callable[[str], int], **changed: Any) -> list[Any]:
    """The results or errors of ``act`` on node a, once four nodes wait for it that begin when a has the lease, and of
    those four."""

    def start(node: str) -> EnvResult:
        def run() -> int:
            site.runs.append(node)
            if node == "a":
                until(lambda: caplog.text.count("waiting for a, which") >= 4, 60)
            return act(node)

        spec = site.spec(node, **{name: value(node) for name, value in changed.items()})
        return env.run(spec, run, store_url=str(site.store), config=site.config(node))

    with ThreadPoolExecutor(5) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "this_node", lambda: "a")
        calls = [pool.submit(start, "a")]
        await_lease(site)
        calls += [pool.submit(start, node) for node in "bcde"]
        return [call.exception(120) or call.result() for call in calls]


def test_when_the_command_fails_on_two_nodes_the_others_run_it_at_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """What others say of a failure is no reason to end: each runs the command itself, and ends with its own code."""
    at_once = threading.Barrier(3)

    def act(node: str) -> int:
        if len(site.runs) > 2:
            at_once.wait(60)  # only when all three run at the same time
        return ord(node)

    results = on_five_nodes(site, caplog, act)
    assert sorted(site.runs) == list("abcde")
    assert sorted(result.exit_code for result in results) == [ord(node) for node in "abcde"]
    assert {result.outcome for result in results} == {Outcome.RAN}
    assert "reports: the command failed with exit code 97" in caplog.text
    assert site.run("f").outcome is Outcome.RAN_AND_PUBLISHED  # a later start begins anew


def test_a_command_that_cannot_be_run_has_failed_for_those_who_wait(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    def act(node: str) -> int:
        raise UnavailableError("no container runtime")

    errors = on_five_nodes(site, caplog, act)
    assert (len(site.runs), [type(error) for error in errors]) == (5, [UnavailableError] * 5)
    assert "could not be run: no container runtime" in caplog.text


def test_when_nothing_can_be_published_the_others_run_at_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    at_once = threading.Barrier(4)

    def act(node: str) -> int:
        (site.host(node)).mkdir(parents=True)
        (site.host(node) / ".netrc").write_text("machine x login y password z\n")
        if node != "a":
            at_once.wait(60)  # only when all four run at the same time
        return 0

    results = on_five_nodes(site, caplog, act)
    assert {result.outcome for result in results} == {Outcome.RAN}
    assert sorted(site.runs) == list("abcde")


def test_nodes_with_inputs_of_their_own_do_not_take_turns(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    at_once = threading.Barrier(4)

    def observed(self: observer.Observer) -> inputs.Opened:
        digest = inputs.Digests(self._spec, self._config).of("/job/conf")
        return inputs.Opened(inputs.Observed({"/job/conf": digest}))

    monkeypatch.setattr(observer.Observer, "result", observed)

    def shown(node: str) -> tuple[tuple[str, str]]:
        job = site.root / node / "job"
        job.mkdir(parents=True)
        (job / "conf").write_text(node)
        return ((str(job), "/job"),)

    def act(node: str) -> int:
        if node != "a":
            at_once.wait(60)  # only when all four run at the same time
        return site.command(node)()

    results = on_five_nodes(site, caplog, act, mounts=shown)
    assert {result.outcome for result in results} == {Outcome.RAN_AND_PUBLISHED}
    assert len(list(site.store.glob("env/snapshots/*/*.json"))) == 5


def test_a_store_that_takes_no_leases_never_stops_the_start(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: object, key: str, data: bytes, *, overwrite: bool = False) -> bool:
        raise NotWritableError("read-only")

    monkeypatch.setattr(FolderStore, "put", refuse)
    result = site.run("a")
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert "cannot agree with other nodes" in caplog.text


def test_all_waits_on_a_held_target_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from bootseer.env import lock

    targets = site.spec("a").targets
    with (
        lock.locked(targets, Path(site.config("a").state_dir)),
        pytest.raises(UnavailableError, match="too long"),
        lock.locked(targets, Path(site.config("a").state_dir), wait=0.2),
    ):
        pass


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bootseer")


def test_who_claims_to_run_the_command_for_longer_than_it_takes_is_not_believed(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bootseer.env.stage._LEAST_PATIENCE", 1.0)
    site.run("a")
    ended = threading.Event()

    def renew() -> None:
        count = 0
        while not ended.wait(0.2):
            count += 1
            note = lease.Lease(node="mallory", run="1", count=count)
            FolderStore(site.store).put(
                f"leases/env/{site.manifest().key}/0", msgspec.json.encode(note), overwrite=True
            )

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        time.sleep(1.1)
        began = time.monotonic()
        assert site.run("b", max_age=0.5).exit_code == 0
        assert time.monotonic() - began < 60
    finally:
        ended.set()
        thread.join()
    assert "mallory still runs the set-up command; waiting no longer" in caplog.text


def forge(site: Site, **changed: object) -> None:
    """Another manifest beside the good one, with a right checksum: as anybody writes it who may write to the store."""
    good = site.manifest()
    fields = msgspec.to_builtins(good) | changed
    known = fields["inputs"]
    rows = [sorted(known.get("files", {}).items()), sorted(known.get("folders", {}).items()), False]
    name = hashlib.sha256(json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass"))
    fields["created"] = int(time.time()) + 100
    fields.pop("signature", None)
    data = canonical({**fields, "sum": sha256_of(fields)})
    (site.store / "env" / "snapshots" / good.key / f"{name.hexdigest()}.json").write_bytes(data)


HOSTILE = {
    "a NUL in a file name": {"files": {"/a\0b": "0" * 64}},
    "a NUL in a folder": {"folders": {"/a\0b": ["x.py"]}},
    "half a surrogate": {"files": {"/a\ud800": "0" * 64}},
    "a name of the kernel's": {"files": {"/sys/kernel/tracing/trace_pipe": "0" * 64}},
    "an alias": {"files": {"/etc/./passwd": "0" * 64}},
    "a name in a folder that leads out": {"folders": {"/etc": ["../x.py"]}},
    "names without end": {"folders": {"/etc": [f"{number}.py" for number in range(40_000)]}},
}


@pytest.mark.parametrize("inputs_", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_ends_no_start(site: Site, inputs_: dict[str, object]) -> None:
    site.run("a")
    forge(site, inputs={"files": {}, "folders": {}, "unobserved": "", **inputs_})
    assert site.run("b").exit_code == 0
    store = FolderStore(site.store)
    assert len(snapshots.everything(store)) == 1, "what lists snapshots goes on"
    names = snapshots.names(store)
    assert len(names) == 2
    snapshots.remove(store, names)
    assert snapshots.names(store) == []


def test_what_nobody_thought_of_ends_no_start(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder, a comparison or a restore that raises what it should not: the snapshot is not used on this node."""
    site.run("a")

    def broken(*args: object, **more: object) -> object:
        raise KeyError("surprise")

    places = ("inputs.Digests.difference", "manifest.decode", "snapshots.entries", "explain.explain")
    for number, name in enumerate(places):
        with monkeypatch.context() as patch:
            patch.setattr(f"bootseer.env.{name}", broken)
            assert site.run(f"n{number}", salt="new" if name.startswith("explain") else "").exit_code == 0
    assert len(site.runs) >= 4


def test_slow_digests_of_a_lookup_are_bounded(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 10 ms: 10,000 names in each of 32 manifests took hours."""
    monkeypatch.setattr(inputs, "MAX_SLOW", 20)
    spec = msgspec.structs.replace(site.spec("a"), image_digest="", targets=(Target("/x"),))
    digests = inputs.Digests(spec, site.config("a"))
    names = []
    for number in range(30):
        (tmp_path / f"{number}_password.txt").write_text("x")
        names.append(str(tmp_path / f"{number}_password.txt"))
    assert digests.difference(inputs.Observed({name: "0" * 64 for name in names}))
    found = [digests.of(name) for name in names]
    assert found.count("?") == 30 - inputs.MAX_SLOW
    assert digests.unread(names[-1]) == "more than 20 files and variables that the command read may hold a password"


def test_only_signed_environments_are_used_where_there_is_a_key(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, str] = {}
    plain = Site.config
    monkeypatch.setattr(Site, "config", lambda self, node: msgspec.structs.replace(plain(self, node), **settings))
    ours, theirs = keys.pair(tmp_path, "ours"), keys.pair(tmp_path, "theirs")
    assert site.run("a").outcome is Outcome.RAN_AND_PUBLISHED
    settings = {"verify_key": ours["verify_key"]}
    alone = site.run("b")
    assert (alone.outcome, files(site.host("b"))) == (Outcome.RAN, files(site.host("a")))
    assert "is not signed" in alone.reason
    assert "no sign_key is set" in alone.reason
    settings = theirs
    assert site.run("c").outcome is Outcome.RAN_AND_PUBLISHED  # in its place
    settings = {"verify_key": ours["verify_key"]}
    assert "not signed by a key that is trusted here" in site.run("d").reason
    settings = ours
    assert site.run("e").outcome is Outcome.RAN_AND_PUBLISHED
    settings = {"verify_key": ours["verify_key"]}
    assert site.run("f").outcome is Outcome.RESTORED_UNPACK
    settings = {}
    assert site.run("g").outcome is Outcome.RESTORED_UNPACK
    found = site.manifest()
    changed = msgspec.structs.replace(found, tree="0" * 64)
    site.manifest_file().write_bytes(changed.encode())
    settings = {"verify_key": ours["verify_key"]}
    assert "or was changed" in site.run("h").reason
