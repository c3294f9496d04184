"""What `image.mount` does before anything is mounted: it asks the registry beside, and waits only for a yes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
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


@pytest.mark.parametrize("error", [NotFoundError, KeyboardInterrupt])
def test_an_error_waits_for_no_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    asked, over = threading.Event(), threading.Event()

    def preflight(*_: object, **__: object) -> None:
        asked.set()
        over.wait(20)

    def resolve(*_: object, **__: object) -> None:
        assert asked.wait(10)
        raise error("not converted")

    monkeypatch.setattr(oci, "preflight", preflight)
    monkeypatch.setattr(sys.modules[image.mount.__module__], "resolve", resolve)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            start(tmp_path)
        except BaseException as exc:
            raised.append(exc)

    caller = threading.Thread(target=run, daemon=True)
    caller.start()
    try:
        caller.join(10)
        assert [type(exc) for exc in raised] == [error]
    finally:
        over.set()
        caller.join(10)


_ENDS = """
import os, sys, time
from pathlib import Path
from bootseer import image, oci
from bootseer.config import Config

def resolve(*_, **__):
    raise SystemExit(3)

os.geteuid = lambda: 0
oci.preflight = lambda *_, **__: time.sleep(60)
sys.modules[image.mount.__module__].resolve = resolve
config = Config(cache_dir="cache", state_dir="state")
image.mount("registry.example/x:v1", Path("mnt"), store_url=os.path.abspath("store"), config=config, server=("none",))
"""


def test_nor_does_the_end_of_the_program(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _ENDS], cwd=tmp_path, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (3, b"")


def test_who_may_not_read_the_image_gets_no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preflight(*_: object, **__: object) -> None:
        raise PrivilegeError("no access")

    monkeypatch.setattr(oci, "preflight", preflight)
    monkeypatch.setattr(sys.modules[image.mount.__module__], "resolve", lambda *_, **__: None)
    with pytest.raises(PrivilegeError, match="no access"):
        start(tmp_path)
