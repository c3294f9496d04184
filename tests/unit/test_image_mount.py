"""What `image.mount` does before anything is mounted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bootseer import image, oci
from bootseer.config import Config
from bootseer.errors import NotFoundError, PrivilegeError

_REF = "registry.example/x:v1"


@pytest.fixture(autouse=True)
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def start(tmp_path: Path) -> None:
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    image.mount(_REF, tmp_path / "mnt", store_url=str(tmp_path / "store"), config=config, server=("none",))


def test_who_may_not_read_the_image_gets_no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preflight(*_: object, **__: object) -> None:
        raise PrivilegeError("no access")

    monkeypatch.setattr(oci, "preflight", preflight)
    monkeypatch.setattr(sys.modules[image.mount.__module__], "resolve", lambda *_, **__: None)
    with pytest.raises(PrivilegeError, match="no access"):
        start(tmp_path)


def test_an_image_that_is_not_converted_waits_for_no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise NotFoundError("not converted")

    monkeypatch.setattr(oci, "preflight", lambda *_, **__: pytest.fail("the registry is asked"))
    monkeypatch.setattr(sys.modules[image.mount.__module__], "resolve", resolve)
    with pytest.raises(NotFoundError, match="not converted"):
        start(tmp_path)
