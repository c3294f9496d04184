"""The CSI driver, called as a kubelet does, with a real registry that wants logins and a real HDFS."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bootseer import env, image
from bootseer.config import Config
from bootseer.env import EnvSpec, Outcome, Target, snapshots
from bootseer.kernel import mount
from bootseer.node import client
from bootseer.objects import open_store
from bootseer.stripefs.store import open_fs
from support.hadoop import HadoopCluster
from support.images import Member, folder, write_image
from support.layouts import push
from support.registry import PASSWORD, USER, DockerRegistry
from support.waits import later, together, until

pytestmark = [pytest.mark.root, pytest.mark.registry, pytest.mark.hdfs]
grpc = pytest.importorskip("grpc")

from bootseer.csi.proto import csi_pb2 as messages  # noqa: E402
from support.kubelet import EMPTY, Kubelet  # noqa: E402

NOISE = random.Random(5).randbytes(8 << 20)
SUM = hashlib.sha256(NOISE).hexdigest()
NO_PROVIDERS = '{"providers": []}'


class Site(NamedTuple):
    kubelet: Kubelet
    private: str
    """An image that the registry gives to those with a login."""
    registry: str
    env: str
    checkpoints: str


@pytest.fixture(scope="module")
def site(cluster: HadoopCluster) -> Iterator[Site]:
    here = Path(tempfile.mkdtemp(prefix="bootseer-pytest-csi-", dir="/var/tmp"))
    try:
        with DockerRegistry(login=True) as registry:
            (here / "logins").mkdir()
            login = {"auths": {registry.address: {"username": USER, "password": PASSWORD}}}
            (here / "logins/config.json").write_text(str(login).replace("'", '"'))
            private = f"{registry.address}/team/private:1"
            write_image(here / "layout", [[folder("data"), Member("data/noise", data=NOISE)]])
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("DOCKER_CONFIG", str(here / "logins"))
                push(f"oci:{here}/layout", private)
                image.ensure(private, str(here / "store"), work_dir=here / "work")
            checkpoints = f"{cluster.url}/csi-{here.name}"
            (here / "model").write_bytes(b"weights" * 1000)
            open_fs(checkpoints).put(here / "model", "team/step-1/model")
            (here / "providers.json").write_text(NO_PROVIDERS)
            kubelet = Kubelet(
                here,
                {
                    "BOOTSEER_CREDENTIAL_PROVIDERS": f"{here}/providers.json:{here}",
                    "BOOTSEER_STORE": str(here / "store"),
                    "BOOTSEER_POD_CHECKPOINTS": f"{checkpoints}/{{namespace}}/",
                    "BOOTSEER_PLAIN_HTTP": registry.address,  # at loopback: asked for pods because it is named
                    "DOCKER_CONFIG": str(here / "logins"),  # root's: no pod may profit by them
                },
            )
            name = _environment(here)
            kubelet.start()
            try:
                yield Site(kubelet, private, registry.address, name, checkpoints)
            finally:
                kubelet.stop()
            assert not kubelet.registration.exists()
            assert not kubelet.endpoint.exists()
    finally:
        for entry in reversed(mount.below(here)):
            mount.unmount(entry.target, lazy=True, force=True)
        shutil.rmtree(here)


def _environment(here: Path) -> str:
    """The name of a snapshot with two targets, one of which the image has files in."""
    empty, full = here / "target/empty", here / "target/full"
    full.mkdir(parents=True)
    (full / "of-the-image").write_text("x")

    def fill() -> int:
        empty.mkdir(exist_ok=True)
        (empty / "package.py").write_text("answer = 42\n")
        (full / "package.py").write_text("")
        return 0

    spec = EnvSpec(
        targets=(Target("/opt/env", str(empty)), Target("/opt/full", str(full))),
        command=("fill",),
        image_digest="sha256:1",
        background=False,
        restore="unpack",
    )
    config = Config(cache_dir=str(here / "maker/cache"), state_dir=str(here / "maker/state"))
    assert env.run(spec, fill, store_url=str(here / "store"), config=config).outcome is Outcome.RAN_AND_PUBLISHED
    (name,) = snapshots.names(open_store(str(here / "store")))
    return name


def test_the_kubelet_finds_the_driver(site: Site) -> None:
    kubelet = site.kubelet
    info = kubelet.call("pluginregistration.Registration/GetInfo", EMPTY, messages.PluginInfo, at=kubelet.registration)
    assert (info.type, info.name, info.supported_versions) == ("CSIPlugin", "bootseer.io", ["1.0.0"])
    assert Path(info.endpoint).samefile(kubelet.endpoint)
    assert kubelet.call("csi.v1.Identity/GetPluginInfo", EMPTY, messages.PluginInfoResponse).name == "bootseer.io"
    assert kubelet.call("csi.v1.Node/NodeGetInfo", EMPTY, messages.NodeInfoResponse).node_id == os.uname().nodename
    for path in (kubelet.endpoint, kubelet.registration):
        assert path.stat().st_mode & 0o777 == 0o600
    done = kubelet.run()
    assert done.returncode == 78
    assert "a CSI driver serves" in done.stderr


def test_an_image_is_mounted_with_the_logins_of_the_pod(site: Site) -> None:
    kubelet = site.kubelet
    volume = kubelet.volume(image=site.private)
    for logins in ({}, {"at": site.registry, USER: "wrong"}, {"at": "registry.example.org", USER: PASSWORD}):
        code, said = kubelet.refused(volume, **logins)
        assert code == "PERMISSION_DENIED", said
        assert PASSWORD not in said
    with kubelet.published(volume, at=site.registry, **{USER: PASSWORD}) as target:
        assert hashlib.sha256((target / "data/noise").read_bytes()).hexdigest() == SUM
        with pytest.raises(OSError, match="Read-only"):
            (target / "new").touch()
    version, login = "credentialprovider.kubelet.k8s.io/v1", {"username": USER, "password": PASSWORD}
    answer = {"kind": "CredentialProviderResponse", "apiVersion": version, "auth": {site.registry: login}}
    here, provider = (
        kubelet.root.parent,
        {"name": "own", "apiVersion": version, "matchImages": [f"{site.registry}/team"]},
    )
    (here / "own").write_text(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps(answer)}'\n")
    (here / "own").chmod(0o755)
    (here / "providers.json").write_text(json.dumps({"providers": [provider]}))
    with kubelet.published(volume) as target:  # as pods get images of containers that a provider has a login for
        assert (target / "data/noise").stat().st_size == len(NOISE)
    (here / "providers.json").write_text(NO_PROVIDERS)
    assert kubelet.refused(volume)[0] == "PERMISSION_DENIED"
    log = Path(kubelet.root.parent / "driver.log").read_text()
    assert PASSWORD not in log
    assert base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode() not in log


def test_an_environment_is_mounted_by_its_whole_name(site: Site) -> None:
    kubelet = site.kubelet
    with kubelet.published(kubelet.volume(env=site.env, target="/opt/env")) as target:
        assert (target / "package.py").read_text() == "answer = 42\n"
    assert kubelet.refused(kubelet.volume(env=site.env[:20], target="/opt/env"))[0] == "INVALID_ARGUMENT"
    code, said = kubelet.refused(kubelet.volume(env=site.env))
    assert (code, "must be one of /opt/env, /opt/full" in said) == ("INVALID_ARGUMENT", True)
    code, said = kubelet.refused(kubelet.volume(env=site.env, target="/opt/full"))
    assert (code, "is a change to files of the image" in said) == ("INVALID_ARGUMENT", True)
    unknown = f"{'0' * 64}/{'0' * 64}"
    assert kubelet.refused(kubelet.volume(env=unknown, target="/opt/env"))[0] == "NOT_FOUND"
    code, said = kubelet.refused(kubelet.volume(env="x" * 100_000))
    assert (code, len(said) < 3000) == ("INVALID_ARGUMENT", True)


def test_a_checkpoint_is_mounted_for_its_namespace(site: Site) -> None:
    kubelet, url = site.kubelet, f"{site.checkpoints}/team/step-1"
    with kubelet.published(kubelet.volume(checkpoint=url, prefetch=".")) as target:
        assert (target / "model").read_bytes() == b"weights" * 1000
        script = f"mount --bind {target} /mnt && exec setpriv --reuid 4711 --regid 4711 --clear-groups cat /mnt/model"
        done = subprocess.run(  # a pod sees it elsewhere, and may have a user that no node knows
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script], capture_output=True, check=True
        )
        assert done.stdout == b"weights" * 1000
    code, said = kubelet.refused(kubelet.volume(checkpoint=url, namespace="others"))
    assert (code, "pods of namespace others may not mount" in said) == ("PERMISSION_DENIED", True)
    assert kubelet.refused(kubelet.volume(checkpoint=f"{site.checkpoints}/team/step-2"))[0] == "NOT_FOUND"


def test_asked_for_twice_and_at_once(site: Site) -> None:
    kubelet = site.kubelet
    volume = kubelet.volume(env=site.env, target="/opt/env")
    together(lambda _: kubelet.publish(volume), range(4))
    kubelet.publish(volume)
    assert len([entry for entry in mount.entries() if entry.target == mount.real(volume.target)]) == 1
    together(lambda _: kubelet.unpublish(volume), range(4))
    kubelet.unpublish(volume)


def test_a_volume_that_is_gone_before_it_is_there(site: Site) -> None:
    """The kubelet gives a publish up and asks for the end while it still runs."""
    kubelet = site.kubelet
    kubelet.stop()
    kubelet.start(BOOTSEER_FAULTS="csi.publish.before-bind=sleep:3")
    volume = kubelet.volume(env=site.env, target="/opt/env")
    publishing = later(lambda: kubelet.publish(volume))
    until(lambda: list((kubelet.state / "csi").glob("*/*")), 30.0, "the mount")
    kubelet.unpublish(volume)
    publishing.result(30)
    assert not volume.target.exists()
    assert not list((kubelet.state / "csi").iterdir())
    kubelet.stop()
    kubelet.start()


def test_the_next_driver_ends_what_it_finds(site: Site) -> None:
    """Of each kind; what readers see of a driver that is killed, see ``node/test_mount_promises``."""
    kubelet = site.kubelet
    lazy = kubelet.volume(image=site.private)
    striped = kubelet.volume(checkpoint=f"{site.checkpoints}/team/step-1")
    kubelet.publish(lazy, at=site.registry, **{USER: PASSWORD})
    kubelet.publish(striped)
    kubelet.kill()
    kubelet.start()
    assert hashlib.sha256((lazy.target / "data/noise").read_bytes()).hexdigest() == SUM
    assert (striped.target / "model").read_bytes() == b"weights" * 1000
    kubelet.unpublish(lazy)
    kubelet.unpublish(striped)


def test_a_full_disk(site: Site) -> None:
    """A volume that is refused for it leaves nothing, and is there as soon as there is room."""
    kubelet, filler = site.kubelet, site.kubelet.state / "filler"
    kubelet.stop()
    mount.mount("tmpfs", kubelet.state, "tmpfs", data="size=8m,mode=700")
    try:
        kubelet.start()
        volume = kubelet.volume(env=site.env, target="/opt/env")
        with filler.open("wb", buffering=0) as out, contextlib.suppress(OSError):
            while True:
                out.write(bytes(4096))
        code, said = kubelet.refused(volume)
        assert code == "RESOURCE_EXHAUSTED"
        assert re.search(f"bootseer: cannot .*{kubelet.state}.*No space left on device; free some space", said), said
        filler.unlink()
        with kubelet.published(volume) as target:
            assert (target / "package.py").read_text() == "answer = 42\n"
    finally:
        kubelet.stop()
        until(lambda: not mount.below(kubelet.state), 30.0, "the end of all mounts")
        mount.unmount(kubelet.state)
        kubelet.start()


@pytest.mark.parametrize("point", ["csi.publish.before-mount", "csi.publish.before-bind", "csi.publish.after-bind"])
def test_a_driver_killed_while_it_mounts_leaves_nothing(site: Site, point: str) -> None:
    kubelet = site.kubelet
    kubelet.stop()
    kubelet.start(BOOTSEER_FAULTS=f"{point}=kill")
    gone, again = (kubelet.volume(env=site.env, target="/opt/env") for _ in range(2))
    with pytest.raises(grpc.RpcError):
        kubelet.publish(gone)
    kubelet.stop()
    kubelet.start(BOOTSEER_FAULTS=f"{point}=kill@2")
    kubelet.publish(again)
    kubelet.unpublish(gone)
    with pytest.raises(grpc.RpcError):
        kubelet.publish(gone)
    kubelet.stop()
    kubelet.start()
    kubelet.publish(gone)
    assert (gone.target / "package.py").read_text() == "answer = 42\n"
    kubelet.unpublish(gone)
    kubelet.unpublish(again)


def test_a_service_that_is_drained(site: Site) -> None:
    """It mounts nothing more, tells what it waits for, and ends when the last volume is gone."""
    kubelet = site.kubelet
    config = Config(node_dir=kubelet.environ["BOOTSEER_NODE_DIR"])
    kubelet.stop()
    kubelet.start()
    volume, late = (kubelet.volume(env=site.env, target="/opt/env") for _ in range(2))
    kubelet.publish(volume)
    client.drain(config=config)
    kubelet.publish(volume)  # it is there already
    code, said = kubelet.refused(late, left={volume.id})
    assert (code, "drained" in said) == ("UNAVAILABLE", True), said
    found = client.node(config=config)
    assert (found.draining, found.mounts, found.parts["csi"].mounts) == (True, 0, 1)
    kubelet.unpublish(volume)
    assert kubelet.ended() == 0
    kubelet.stop()
    kubelet.start()
