"""Devices that vendors describe: which are chosen, and what becomes of their description."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import ConfigError, NotFoundError, PrivilegeError
from bootseer.image import cdi

pytestmark = pytest.mark.root  # descriptions have to be root's


def describe(path: Path, kind: str, devices: dict[str, dict[str, Any]], **edits: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    listed = [{"name": name, "containerEdits": edit} for name, edit in devices.items()]
    path.write_text(json.dumps({"cdiVersion": "0.6.0", "kind": kind, "devices": listed, "containerEdits": edits}))


def nodes(*paths: Path | str) -> dict[str, Any]:
    return {"deviceNodes": [{"path": f"/dev/{Path(path).name}", "hostPath": str(path)} for path in paths]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four GPUs, of which the second may not be used (a cgroup says so on real nodes)."""
    gpus = {}
    for number in (0, 1, 2, 10):
        (tmp_path / f"gpu{number}").touch()
        gpus[str(number)] = nodes(tmp_path / f"gpu{number}")
    os.unlink(tmp_path / "gpu1")
    everything = nodes(*(tmp_path / f"gpu{number}" for number in (0, 1, 2, 10)))
    describe(
        tmp_path / "cdi/v.json", "v.com/gpu", {**gpus, "all": everything, "uuid-of-2": gpus["2"]}, env=["SHARED=1"]
    )
    return tmp_path / "cdi"


def chosen(folder: Path, gpus: Any, visible: str | None = None) -> tuple[list[str], str | None]:
    """The numbers of the GPUs that were chosen, and what the container is told of them."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = cdi.select(gpus, environ=environ, folders=[folder])
    assert found is not None
    paths = [node.path.removeprefix("/dev/gpu") for edit in found.edits for node in edit.device_nodes]
    assert found.gpus == len(paths)
    told = [item.partition("=")[2] for edit in found.edits for item in edit.env if item.startswith("CUDA")]
    return paths, told[0] if told else None


def test_all_gpus_are_those_that_this_job_may_use(folder: Path) -> None:
    assert chosen(folder, "all") == (["0", "2", "10"], None)
    assert chosen(folder, "all", "2,0") == (["10", "0"], "1,0")  # numbers count what may be used
    assert chosen(folder, "all", "1") == (["2"], "0")
    assert chosen(folder, "all", "0,-1,1") == (["0"], "0")
    assert chosen(folder, "all", "0,7,1") == (["0"], "0")
    assert chosen(folder, "all", "") == ([], "")
    assert chosen(folder, "all", "GPU-8a56a4bc") == (["0", "2", "10"], "GPU-8a56a4bc")


def test_named_gpus(folder: Path) -> None:
    assert chosen(folder, ["10", "v.com/gpu=0"]) == (["10", "0"], None)
    assert chosen(folder, ["10", "0"], "5") == (["10", "0"], "1,0")
    with pytest.raises(PrivilegeError, match=r"cannot use device v.com/gpu=1: .*gpu1 is missing, or this job may not"):
        chosen(folder, ["1"])
    with pytest.raises(NotFoundError, match="no GPU 5 is described"):
        chosen(folder, ["5"])
    describe(folder / "w.json", "w.com/gpu", {"0": {}})
    with pytest.raises(ConfigError, match=r"GPU 0 may be v.com/gpu=0 or w.com/gpu=0"):
        chosen(folder, ["0"])


def test_gpus_that_uuids_name_are_counted_by_their_nodes(tmp_path: Path) -> None:
    """As ``nvidia-ctk cdi generate --device-name-strategy=uuid`` describes them."""
    for number in (0, 1, 2, 10):
        (tmp_path / f"gpu{number}").touch()
    named = {"GPU-d": "gpu0", "GPU-b": "gpu1", "GPU-c": "gpu2", "GPU-a": "gpu10"}
    describe(tmp_path / "cdi/v.json", "v.com/gpu", {uuid: nodes(tmp_path / file) for uuid, file in named.items()})
    folder = tmp_path / "cdi"
    assert chosen(folder, "all") == (["0", "1", "2", "10"], None)
    assert chosen(folder, "all", "0") == (["0"], "0")
    assert chosen(folder, "all", "3,1") == (["10", "1"], "1,0")


def test_nothing_is_wanted_or_described(tmp_path: Path) -> None:
    assert cdi.select(None) is None
    for gpus, devices in (("all", []), (["0"], []), (None, ["v.com/net=1"])):
        with pytest.raises(NotFoundError, match=r"described in .*/none \(there are none\)"):
            cdi.select(gpus, devices, folders=[tmp_path / "none"])  # type: ignore[arg-type]


def test_the_later_folder_wins(tmp_path: Path) -> None:
    for name in ("etc", "run"):
        describe(tmp_path / name / "v.json", "v.com/net", {"1": {"env": [f"FROM={name}"]}})
    found = cdi.select(None, ["v.com/net=1"], folders=[tmp_path / "etc", tmp_path / "run"])
    assert found is not None
    assert [edit.env for edit in found.edits if edit.env] == [["FROM=run"]]
    assert found.gpus is None


def test_a_file_that_is_passed_over_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "broken.json").write_text("{")
    assert chosen(folder, ["0"]) == (["0"], None)
    assert "broken.json is no description" in caplog.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no description of devices that is understood"),
        ('{"cdiVersion": "1.1.0", "kind": "v.com/net", "devices": [{"name": "1", "containerEdits":'
         ' {"netDevices": []}}]}', "netDevices"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_not_half_applied(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "v.json").write_text(text)
    with pytest.raises(NotFoundError, match=says):
        cdi.select(None, ["v.com/net=1"], folders=[tmp_path])


@pytest.mark.parametrize("text", ["[" * 50_000 + "]" * 50_000, "- " * 50_000, "{", "a: b"])
def test_yaml_that_is_none_ends_no_process(tmp_path: Path, text: str) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "v.yaml").write_text(text)
    with pytest.raises(NotFoundError, match="no description of devices that is understood"):
        cdi.select(None, ["v.com/net=1"], folders=[tmp_path])
    (tmp_path / "v.yaml").write_text(
        "cdiVersion: 1.0.0\nkind: v.com/net\ndevices: [{name: '1', containerEdits: {env: [A=b]}}]"
    )
    assert cdi.select(None, ["v.com/net=1"], folders=[tmp_path])


def test_what_others_can_change_is_not_believed(tmp_path: Path) -> None:
    describe(tmp_path / "v.json", "v.com/net", {"1": {}})
    for change in (lambda path: os.chmod(path, 0o666), lambda path: (os.chmod(path, 0o644), os.chown(path, 1234, 0))):
        change(tmp_path / "v.json")
        with pytest.raises(NotFoundError, match="can be changed by others than root"):
            cdi.select(None, ["v.com/net=1"], folders=[tmp_path])


def test_what_is_merged_into_the_configuration(tmp_path: Path) -> None:
    describe(
        tmp_path / "v.json", "v.com/net",
        {"1": {"env": ["A=new"], "deviceNodes": [{"path": "/dev/net1", "hostPath": "/dev/null", "permissions": "rwm"}],
               "mounts": [{"hostPath": "/x/lib", "containerPath": "/lib/x", "options": ["ro", "bind"]},
                          {"hostPath": "/x", "containerPath": "/x"}],
               "additionalGids": [7]}},
        hooks=[{"hookName": "createContainer", "path": "/bin/true", "args": ["true", "x"]}],
    )  # fmt: skip
    document: dict[str, Any] = {
        "process": {"env": ["A=old", "B=1"], "user": {"uid": 0, "gid": 0, "additionalGids": [9]}},
        "mounts": [{"destination": "/lib/x", "source": "/old"}, {"destination": "/proc"}],
        "linux": {"resources": {"devices": []}},
    }
    found = cdi.select(None, ["v.com/net=1", "v.com/net=1"], folders=[tmp_path])
    assert found is not None
    found.apply(document)
    assert document["process"] == {"env": ["A=new", "B=1"], "user": {"uid": 0, "gid": 0, "additionalGids": [7, 9]}}
    assert [mount["destination"] for mount in document["mounts"]] == ["/proc", "/x", "/lib/x"]
    assert document["mounts"][-1]["source"] == "/x/lib"
    (node,) = document["linux"]["devices"]
    assert (node["path"], node["type"], node["major"], node["minor"]) == ("/dev/net1", "c", 1, 3)
    assert document["linux"]["resources"]["devices"] == [
        {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rw"}
    ]
    assert document["hooks"] == {"createContainer": [{"path": "/bin/true", "args": ["true", "x"]}]}


def test_the_cgroup_is_asked(tmp_path: Path) -> None:
    top = Path("/sys/fs/cgroup/devices")
    if not (top / "cgroup.procs").exists():
        pytest.skip("no device cgroup of version 1")
    describe(tmp_path / "v.json", "v.com/gpu", {"0": nodes("/dev/zero"), "1": nodes("/dev/null")})
    group = top / f"bootseer-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "devices.deny").write_text("c 1:5 rwm")
        code = (
            "import os, sys; from pathlib import Path; from bootseer.image import cdi\n"
            "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
            "found = cdi.select('all', environ={}, folders=[Path(sys.argv[2])])\n"
            "print(found.gpus, [node.path for edit in found.edits for node in edit.device_nodes])"
        )
        argv = [sys.executable, "-c", code, str(group), str(tmp_path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "1 ['/dev/null']\n"
    finally:
        group.rmdir()
