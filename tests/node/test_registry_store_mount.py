"""An image converted into the registry it came from, and mounted from there behind a login."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path

import pytest

from bootseer import image, oci
from bootseer.config import Config
from bootseer.errors import PrivilegeError
from bootseer.oci.registry import Registry
from bootseer.store import open_store
from bootseer.testing.registry import PASSWORD, USER, DockerRegistry

pytestmark = [pytest.mark.root, pytest.mark.registry]


def test_convert_mount_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, login = tmp_path / "source", tmp_path / "docker"
    source.mkdir()
    login.mkdir()
    data = os.urandom(3_000_000)
    (source / "file").write_bytes(data)
    monkeypatch.setenv("DOCKER_CONFIG", str(login))
    with DockerRegistry(login=True) as registry:
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (login / "config.json").write_text(json.dumps({"auths": {registry.address: {"auth": auth}}}))
        oci.write_layout(tmp_path / "layout", [oci.LayerDir(source)], oci.ContainerConfig(), "v1")
        oci.push(f"oci:{tmp_path}/layout:v1", f"{registry.address}/x:v1")
        store = f"registry://{registry.address}/x"
        record = image.convert(f"{registry.address}/x:v1", store, work_dir=tmp_path / "work")
        with Registry(oci.Reference.parse(f"{registry.address}/x:v1")) as client:
            (artifact,) = client.referrers(record.image)
        named = f"{store}@{record.image}"
        assert open_store(named).exists(f"trees/{record.tree}.json")

        config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
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
        image.convert(f"{registry.address}/x:v1", str(tmp_path / "store"), work_dir=tmp_path / "work")
        (login / "config.json").unlink()
        with pytest.raises(PrivilegeError, match="denies access"):
            image.mount(
                f"{registry.address}/x@{record.image}", tmp_path / "m", store_url=str(tmp_path / "store"), config=config
            )
        assert not (tmp_path / "m/file").exists()
        assert artifact.size > 0
