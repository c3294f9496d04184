"""An image converted into the registry it came from, and mounted from there behind a login."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootseer import image, oci
from bootseer.config import Config
from bootseer.errors import PrivilegeError
from bootseer.objects import open_store
from bootseer.oci.registry import Registry
from support.layouts import LayerDir, push, write_layout
from support.registry import PASSWORD, USER, DockerRegistry

pytestmark = [pytest.mark.root, pytest.mark.registry]


def test_convert_mount_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    source, login = tmp_path / "source", tmp_path / "docker"
    source.mkdir()
    login.mkdir()
    data = os.urandom(3_000_000)
    (source / "file").write_bytes(data)
    monkeypatch.setenv("DOCKER_CONFIG", str(login))
    with DockerRegistry(login=True) as registry:
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (login / "config.json").write_text(json.dumps({"auths": {registry.address: {"auth": auth}}}))
        write_layout(tmp_path / "layout", [LayerDir(source)], oci.ContainerConfig(), "v1")
        push(f"oci:{tmp_path}/layout:v1", f"{registry.address}/x:v1")
        store = f"registry://{registry.address}/x"
        record = image.ensure(f"{registry.address}/x:v1", store, work_dir=tmp_path / "work").record
        with Registry(oci.Reference.parse(f"{registry.address}/x:v1")) as client:
            (artifact,) = client.referrers(record.image)
        named = f"{store}@{record.image}"
        assert open_store(named).exists(f"trees/{record.tree}.json")

        mounted = image.mount(
            f"{registry.address}/x@{record.image}", tmp_path / "m", store_url=named, config=config, writable=False
        )
        try:
            assert (tmp_path / "m/file").read_bytes() == data
            mounted.ready()
            until = time.monotonic() + 10
            while not list(open_store(named).list("profiles")) and time.monotonic() < until:
                time.sleep(0.1)
            assert list(open_store(named).list(f"profiles/{record.tree}"))
        finally:
            mounted.unmount()

        # A store that asks for no login is no way round the registry's: the job has no access, and nothing is mounted.
        image.ensure(f"{registry.address}/x:v1", str(tmp_path / "store"), work_dir=tmp_path / "work")
        (login / "config.json").unlink()
        with pytest.raises(PrivilegeError, match="denies access"):
            image.mount(
                f"{registry.address}/x@{record.image}", tmp_path / "m", store_url=str(tmp_path / "store"), config=config
            )
        assert not (tmp_path / "m/file").exists()
        assert artifact.size > 0


_ELSEWHERE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from bootseer import image, oci
from bootseer.config import Config
from bootseer.errors import UnavailableError
from support.layouts import push
from support.registry import DockerRegistry, without_tls

here = Path(sys.argv[1])
subprocess.run("ip link set lo up && ip addr add 10.77.9.1/32 dev lo", shell=True, check=True)
with DockerRegistry(host="10.77.9.1") as registry:
    ref, store = f"{registry.address}/x:v1", f"registry://{registry.address}/x"
    try:
        push(f"oci:{here}/layout:v1", ref)
    except UnavailableError as exc:
        assert "BOOTSEER_PLAIN_HTTP" in str(exc)
    else:
        raise AssertionError("a private address was asked without TLS")
    config = Config(cache_dir=f"{here}/cache", state_dir=f"{here}/state", background_fill=False)
    with without_tls(registry.address):
        push(f"oci:{here}/layout:v1", ref)
        image.ensure(ref, store, work_dir=here / "work")
        mounted = image.mount(ref, here / "m", store_url=store, config=config, writable=False)
    try:
        before = mounted.status()
        assert before.blocks_ready < before.blocks_total
        for pid in (before.fetcher_pid, before.server_pid):
            os.kill(pid, signal.SIGKILL)
        assert (here / "m/file").read_bytes() == (here / "source/file").read_bytes()
        assert mounted.status().fetcher_pid != before.fetcher_pid
    finally:
        mounted.unmount()
"""


@pytest.mark.takeover
def test_servers_that_are_restarted_still_know_who_has_no_tls(tmp_path: Path) -> None:
    """At a private address, in a network of its own."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_bytes(os.urandom(3_000_000))
    write_layout(tmp_path / "layout", [LayerDir(tmp_path / "source")], oci.ContainerConfig(), "v1")
    argv = ["unshare", "--net", sys.executable, "-c", _ELSEWHERE, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
