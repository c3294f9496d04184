"""What a pod may ask the CSI driver for, and what nobody may tell it but the kubelet."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bootseer.config import Config, load
from bootseer.csi.volumes import PodVolume, Volumes, checkpoint_url, wish
from bootseer.errors import ConfigError, PrivilegeError, UnavailableError
from bootseer.kernel.parts import Part

UID = "0f2e-77"
TARGET = Path(f"/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~csi/data/mount")
TOLD = {
    "csi.storage.k8s.io/ephemeral": "true",
    "csi.storage.k8s.io/pod.uid": UID,
    "csi.storage.k8s.io/pod.name": "train",
    "csi.storage.k8s.io/pod.namespace": "team",
}


def test_what_is_asked_for() -> None:
    asked = wish({**TOLD, "checkpoint": "hdfs://n/a", "prefetch": "@latest"}, {}, TARGET)
    assert (asked.kind, asked.name, asked.namespace, asked.shown) == ("checkpoint", "hdfs://n/a", "team", "team/train")


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ({"image": "a"}, "which pod"),
        ({**TOLD, "csi.storage.k8s.io/pod.uid": "another", "image": "a"}, "which pod"),
        ({**TOLD, "csi.storage.k8s.io/pod.uid": "", "image": "a"}, "which pod"),
        ({**TOLD, "csi.storage.k8s.io/pod.uid": "pods", "image": "a"}, "which pod"),
        ({**TOLD, "csi.storage.k8s.io/pod.uid": "data", "image": "a"}, "which pod"),
        ({**TOLD, "csi.storage.k8s.io/ephemeral": "false", "image": "a"}, "only inline volumes"),
        (TOLD, "must name one of image, env, checkpoint"),
        ({**TOLD, "image": "a", "env": "b"}, "must name one of"),
        ({**TOLD, "image": "a", "prefetch": "."}, "unknown 'prefetch'"),
        ({**TOLD, "checkpoint": "hdfs://n/a", "rw": "true"}, "unknown 'rw'"),
    ],
)
def test_what_is_not_understood(context: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wish(context, {}, TARGET)


def test_logins_of_a_pull_secret_run_no_programs() -> None:
    document = {
        "auths": {"r.example": {"username": "u", "password": "hidden"}},
        "credsStore": "x",
        "credHelpers": {"r.example": "x"},
    }
    asked = wish({**TOLD, "image": "a"}, {".dockerconfigjson": json.dumps(document)}, TARGET)
    assert list(asked.logins.auths) == ["r.example"]
    assert not asked.logins.creds_store
    assert not asked.logins.cred_helpers
    assert "hidden" not in repr(asked)
    with pytest.raises(ConfigError, match=r"has no \.dockerconfigjson"):
        wish({**TOLD, "image": "a"}, {"password": "hidden"}, TARGET)
    with pytest.raises(ConfigError, match="not JSON") as raised:
        wish({**TOLD, "image": "a"}, {".dockerconfigjson": "hidden"}, TARGET)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["hdfs://n:8020/runs/team", "hdfs://n:8020/runs/team/", "hdfs://n:8020/runs/team/step-1", "s3://pub/any"]
)
def test_checkpoints_of_a_namespace(url: str) -> None:
    allowed = ("hdfs://n:8020/runs/{namespace}", "s3://pub/")
    assert checkpoint_url(wish({**TOLD, "checkpoint": url}, {}, TARGET), allowed) == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "hdfs://n:8020/runs/team-b",
        "hdfs://n:8020/runs",
        "hdfs://n:8020/runs/team/../other",
        "hdfs://n:8020/runs/team/./x",
        "hdfs://n:8020//runs/team",
        "hdfs://root@n:8020/runs/team",
        "hdfs://m:8020/runs/team",
        "HDFS://n:8020/runs/team",
        "hdfs://n:8020/runs/team/.\t./other",
        "hdfs://n:8020/runs/team/x\nERROR",
        "hdfs://n:8020/runs/team/x?y",
        "hdfs://n:8020/runs/team/x::local",
        "/runs/team",
        "file:///runs/team",
    ],
)
def test_checkpoints_of_others(url: str) -> None:
    allowed = ("hdfs://n:8020/runs/{namespace}/", "/runs/{namespace}", "file:///runs/{namespace}")
    with pytest.raises(PrivilegeError) as raised:
        checkpoint_url(wish({**TOLD, "checkpoint": url}, {}, TARGET), allowed)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_volume_counts_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who drains the service waits for it. One that is refused leaves nothing."""
    part, counted = Part(), list[int]()
    volumes = Volumes(Config(state_dir=str(tmp_path / "state")), part)

    def mount(folder: Path, wish: PodVolume) -> Path:
        counted.append(part.mounts)
        raise UnavailableError("nobody answers")

    monkeypatch.setattr(volumes, "_mount", mount)
    asked = wish({**TOLD, "image": "a"}, {}, TARGET)
    with pytest.raises(UnavailableError, match="nobody answers"):
        volumes.publish("volume", tmp_path / "target", asked)
    part.draining = True
    with pytest.raises(UnavailableError, match="drained"):
        volumes.publish("volume", tmp_path / "target", asked)
    assert (counted, part.mounts) == ([1], 0)
    assert not list((tmp_path / "state/csi").iterdir())


def test_the_setting_as_a_variable() -> None:
    assert load({"BOOTSEER_CONFIG": "/dev/null"}).pod_checkpoints == ()
    urls = "hdfs://n/{namespace} s3://pub/"
    found = load({"BOOTSEER_CONFIG": "/dev/null", "BOOTSEER_POD_CHECKPOINTS": urls})
    assert found.pod_checkpoints == ("hdfs://n/{namespace}", "s3://pub/")
