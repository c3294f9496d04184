"""Without the extras ``hdfs`` and ``containerd`` the rest works; what needs them says in one line what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hdfs_native", "grpc") or name == "google.protobuf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""
EVERYTHING = """
import bootseer
for found in pkgutil.walk_packages(bootseer.__path__, "bootseer."):
    extras = "bootseer.hdfs.", "bootseer.backends.hdfs_", "bootseer.backends.cluster"
    extras += "bootseer.containerd.", "bootseer.csi.server", "bootseer.csi.proto", "bootseer.rpc.server"
    if not found.name.startswith(extras):
        importlib.import_module(found.name)
"""
VERB = """
from bootseer.cli.main import main
main()
"""


def run(script: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED + script, *args], capture_output=True, text=True, timeout=120)


def test_every_module_but_those_of_extras_is_imported() -> None:
    done = run(EVERYTHING)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["put", "get", "ls", "inspect", "fsck", "gc", "cp"])
def test_verbs_work_on_a_folder(tmp_path: Path, verb: str) -> None:
    (tmp_path / "local").write_bytes(b"x" * 100)
    (tmp_path / "store").mkdir()
    (tmp_path / "store/there").write_bytes(b"x" * 100)
    store, file = tmp_path / "store", tmp_path / "store/there"
    args = {
        "put": [tmp_path / "local", store / "new"],
        "get": [file, tmp_path / "back"],
        "cp": [file, store / "copy"],
        "inspect": [file],
    }
    done = run(VERB, "fs", verb, *args.get(verb, [store]))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("args", [["fs", "ls"], ["fs", "inspect"], ["store", "ls", "--store"]])
def test_hdfs_is_one_line(args: list[str]) -> None:
    done = run(VERB, *args, "hdfs://127.0.0.1:1/a")
    assert done.returncode == 71
    assert done.stderr.startswith("bootseer: HDFS needs more packages: ")
    assert done.stderr.endswith("; pip install 'bootseer[hdfs]'\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("group", "what"), [("containerd", "the snapshotter"), ("csi", "the CSI driver")])
def test_kubernetes_is_one_line(group: str, what: str) -> None:
    done = run(VERB, "node", "serve", f"--{group}")
    assert done.returncode == 71
    assert done.stderr.startswith(f"bootseer: {what} needs more packages: ")
    assert done.stderr.endswith("; pip install 'bootseer[containerd]'\n")
    assert run(VERB, "node", "install", "--unit=-").returncode == 0
