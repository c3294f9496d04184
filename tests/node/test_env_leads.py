"""What a result names outside of the targets: there with the same content, or a miss that names the link."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.config import Config
from bootseer.env import EnvResult, EnvSpec, Outcome, Target, leads, snapshots
from bootseer.env.inputs import Observed
from bootseer.env.inventory import Entry
from bootseer.errors import DataError
from bootseer.objects.folder import FolderStore
from support import envnode

RAN, RESTORED = Outcome.RAN_AND_PUBLISHED, (Outcome.RESTORED_MOUNT, Outcome.RESTORED_UNPACK)


class Place:
    """The target ``env``, and the folder ``out`` that results lead to; each `run` is a node's first."""

    def __init__(self, root: Path, restore: str) -> None:
        self.root, self.restore = root, restore
        self.out, self.target = root / "out", root / "env"
        self.nodes = 0
        self.out.mkdir()
        (self.out / "program").write_text("1\n")

    def run(self, script: str) -> EnvResult:
        self.release()
        self.nodes += 1
        node = self.root / f"node-{self.nodes}"
        command = ("sh", "-ec", script)
        return envnode.run(
            node, self.root / "store", lambda: subprocess.run(command, cwd=self.root, check=False).returncode,
            targets=(Target(str(self.target)),), command=command, image_digest="", cwd=str(self.root),
            restore=self.restore,
        )  # fmt: skip

    def release(self) -> None:
        envnode.release(self.root / f"node-{self.nodes}" / "state")
        shutil.rmtree(self.target, ignore_errors=True)

    def leads(self) -> list[dict[str, tuple[str, str]]]:
        store = FolderStore(self.root / "store")
        return [snapshots.load(store, name).inputs.leads for name in snapshots.names(store)]


@pytest.fixture(params=["mount", "unpack"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(tmp_path, request.param)
    yield made
    made.release()


FILES = {
    "absolute link": ("link", "ln -s $PWD/out/program env/link"),
    "relative link": ("lib/x/link", "mkdir -p env/lib/x; ln -s ../../../out/program env/lib/x/link"),
    "chain": ("a", "ln -s b env/a; ln -s $PWD/out/link env/b; ln -sfn program out/link"),
    "shebang": ("bin/x", "mkdir env/bin; printf '#!%s/out/program -E\\n' $PWD > env/bin/x; chmod +x env/bin/x"),
    "long shebang": (
        "bin/x",
        "mkdir env/bin; cat >env/bin/x <<X; chmod +x env/bin/x"
        "\n#!/bin/sh\n'''exec' $PWD/out/program \"\\$0\" \"\\$@\"\n' '''\nX",
    ),
}


@pytest.mark.root
@pytest.mark.parametrize("kind", FILES)
def test_a_file_outside_must_be_there_with_the_same_content(place: Place, kind: str) -> None:
    name, script = FILES[kind]
    script = f"mkdir -p env; {script}"
    assert place.run(script).outcome is RAN
    assert place.run(script).outcome in RESTORED
    (place.out / "program").write_text("2\n")
    changed = place.run(script)
    says = (f"{place.target / name} leads to", "which is another one here")
    if kind == "chain":
        says = (f"{place.target / 'b'} leads to", says[1])
    assert changed.outcome is RAN
    assert all(text in changed.reason for text in says), changed.reason
    assert place.run(script).outcome in RESTORED  # each has its snapshot
    (place.out / "program").rename(place.root / "gone")
    lost = place.run(script)
    assert lost.outcome is RAN
    assert "which is not here" in lost.reason


FOLDERS = {
    "link": ("data", "ln -s $PWD/out env/data"),
    "pth": ("x.pth", "printf 'import os\\n# no\\n%s/out\\n' $PWD > env/x.pth"),
    "editable": (
        "p-1.dist-info/direct_url.json",
        'mkdir env/p-1.dist-info; printf \'{"url":"file://%s/out","dir_info":{"editable":true}}\' $PWD'
        " > env/p-1.dist-info/direct_url.json",
    ),
    "venv": ("pyvenv.cfg", "printf 'home = %s/out\\nversion = 3\\n' $PWD > env/pyvenv.cfg"),
    "library": ("m.so", "echo 'int f;' | cc -x c - -shared -Wl,-rpath,/nowhere:$PWD/out -o env/m.so"),
    "egg-link": ("p.egg-link", "printf '%s/out\\n.' $PWD > env/p.egg-link"),
}


@pytest.mark.root
@pytest.mark.parametrize("kind", FOLDERS)
def test_of_a_folder_outside_what_the_command_wrote_must_be_there(place: Place, kind: str) -> None:
    name, script = FOLDERS[kind]
    (place.out / "source.py").write_text("a = 1\n")
    script = f"mkdir -p env; echo 1 > out/made.so; echo log > out/log; {script}"
    assert place.run(script).outcome is RAN
    (place.out / "source.py").write_text("a = 2\n")
    (place.out / "log").unlink()
    assert place.run(script).outcome in RESTORED
    (place.out / "made.so").unlink()
    lost = place.run(script)
    assert f"{place.target / name} leads to {place.out}/made.so, which is not here" in lost.reason


TRUE_PLACES = {
    "link": "ln -s $(realpath shown)/env/lib shown/env/x",
    "shebang": "printf '#!%s/env/lib\\n' $(realpath shown) > shown/env/x; chmod +x shown/env/x",
    "venv": "printf 'home = %s/env\\n' $(realpath shown) > shown/env/pyvenv.cfg",
}


@pytest.mark.root
@pytest.mark.parametrize("kind", TRUE_PLACES)
def test_a_result_that_names_the_true_place_of_its_target_fits_there_alone(place: Place, kind: str) -> None:
    """Nodes may have the target behind a link, each on a disk of its own."""
    script = f"mkdir -p shown/env; echo 1 > shown/env/lib; {TRUE_PLACES[kind]}"
    shown, place.target = place.root / "shown", place.root / "shown/env"
    for disk, expected in (("disk1", (RAN,)), ("disk2", (RAN,)), ("disk1", RESTORED)):
        place.release()
        shown.unlink(missing_ok=True)
        (place.root / disk).mkdir(exist_ok=True)
        shown.symlink_to(disk)
        result = place.run(script)
        assert result.outcome in expected, result.reason
    place.release()
    assert place.run("mkdir -p shown/env; echo 1 > shown/env/a; ln -s a shown/env/b").outcome is RAN
    place.release()
    shown.unlink()
    shown.symlink_to("disk2")
    assert place.run("mkdir -p shown/env; echo 1 > shown/env/a; ln -s a shown/env/b").outcome in RESTORED


@pytest.mark.root
def test_a_link_through_a_link_leads_where_the_kernel_goes(place: Place) -> None:
    (place.out / "lib").mkdir()
    script = "mkdir -p env; ln -s $PWD/out/lib env/lib64; ln -s lib64/../program env/x"
    assert place.run(script).outcome is RAN
    (place.out / "program").unlink()
    assert f"{place.target}/x leads to {place.out}/program, which is not here" in place.run(script).reason


@pytest.mark.root
def test_the_metadata_beside_the_source_of_an_egg_link_must_be_there(place: Place) -> None:
    script = "mkdir -p env out/p.egg-info; echo Name: p > out/p.egg-info/PKG-INFO; echo $PWD/out > env/p.egg-link"
    assert place.run(script).outcome is RAN
    assert place.run(script).outcome in RESTORED
    shutil.rmtree(place.out / "p.egg-info")
    assert "leads to" in place.run(script).reason


@pytest.mark.root
def test_what_leads_nowhere_or_into_the_targets_needs_nothing(place: Place) -> None:
    script = """mkdir -p env/lib; cd env; echo 1 > lib/a; ln -s lib lib64; ln -s ../lib64/a lib/b; ln -s $PWD/lib/a abs
    ln -s /nonexistent/x dangling; ln -s /dev/null null; ln a hard 2>/dev/null || ln lib/a hard
    printf '#!%s/lib/a\\n' $PWD > run; chmod +x run; printf '/nonexistent\\nlib\\n' > x.pth"""
    assert place.run(script).outcome is RAN
    assert place.leads() == [{}]
    assert place.run(script).outcome in RESTORED


@pytest.mark.root
def test_links_into_the_system_fit_where_they_are_equal(place: Place) -> None:
    """A venv on the system's Python, with scripts for its shell."""
    script = f"{sys.executable} -m venv --without-pip env; printf '#!/bin/sh\\n' > env/bin/x; chmod +x env/bin/x"
    assert place.run(script).outcome is RAN
    (found,) = place.leads()
    assert found["/bin/sh"] == (leads.FILE, str(place.target / "bin/x"))
    assert all(len(wanted) == 64 for path, (wanted, _) in found.items() if "bin/python" in path)
    assert len(found) >= 3
    assert place.run(script).outcome in RESTORED
    done = subprocess.run(
        [place.target / "bin/python", "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True
    )
    assert done.stdout == f"{place.target}\n"


def test_in_a_container_what_the_command_made_outside_of_the_targets_is_not_there_elsewhere(tmp_path: Path) -> None:
    rootfs, shown = tmp_path / "rootfs", tmp_path / "shown"
    (rootfs / "usr/bin").mkdir(parents=True)
    (rootfs / "usr/bin/python3").write_text("x")
    (rootfs / "bin").symlink_to("/usr/bin")
    shown.mkdir()
    (shown / "config").write_text("1\n")
    began = os.stat(rootfs / "usr/bin/python3").st_ctime_ns + 1
    spec = EnvSpec(
        targets=(Target("/opt/env", str(rootfs / "opt/env"), str(rootfs)),), command=("x",), image_digest="sha256:1",
        rootfs=str(rootfs), mounts=((str(shown), "/job"),),
    )  # fmt: skip
    config = Config(cache_dir=str(tmp_path / "cache"))

    def added(*links: str) -> Observed:
        entries = [Entry(f"0/{number}", "l", 0o777, 0, 0, 0, 0, text) for number, text in enumerate(links)]
        return leads.added(spec, config, Observed(), entries, lambda *_: b"", began)

    known = (
        added("/bin/python3", "/job/config", "/lib", "../../nowhere") if os.geteuid() == 0 else added("/bin/python3")
    )
    assert set(known.leads) >= {"/bin/python3"}
    assert known.leads["/bin/python3"] == (leads.FILE, "/opt/env/0")
    if os.geteuid() == 0:
        assert len(known.leads["/job/config"][0]) == 64
        assert len(known.leads) == 2
    os.utime(rootfs / "usr/bin/python3")
    with pytest.raises(DataError, match="the command made"):
        added("/bin/python3")


@pytest.mark.parametrize("user", [0, 1000])
def test_folders_of_the_machine_where_a_library_was_built_are_missed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    """Red before: in a user's container nothing with such a library, as PyTorch has some, was published."""
    library = (b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<Q", 64)).ljust(54, b"\0") + struct.pack("<HH", 56, 2)
    library = library.ljust(64, b"\0") + struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, 512, 512, 512)
    library += struct.pack("<IIQQQQQQ", 2, 4, 176, 176, 176, 48, 48, 8) + struct.pack("<QQQQQQ", 5, 224, 29, 1, 0, 0)
    library += b"\0/build/triton/_C:/opt/lib\0"
    (tmp_path / "rootfs/opt/lib").mkdir(parents=True)
    shown = str(tmp_path / "shown")
    spec = EnvSpec(
        targets=(Target("/job/env", f"{shown}/env", shown),), command=("x",), image_digest="sha256:1",
        rootfs=str(tmp_path / "rootfs"), mounts=((shown, "/job"),),
    )  # fmt: skip
    entry = Entry("0/m.so", "f", 0o644, 0, 0, len(library), 0)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    read = lambda path, most, at=0: library[at : at + most]  # noqa: E731
    known = leads.added(spec, Config(cache_dir=str(tmp_path / "c")), Observed(), [entry], read, time.time_ns())
    assert known.leads == {"/opt/lib": (leads.FOLDER, "/job/env/m.so")}
