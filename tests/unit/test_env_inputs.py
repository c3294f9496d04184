"""Observed inputs: names that a job lists are looked up nowhere else than where the job sees them."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from bootseer.config import Config
from bootseer.env import EnvSpec, Target, inputs, leads, names
from bootseer.env.inventory import Entry
from bootseer.kernel.lookups import Lookups
from bootseer.kernel.opens import Opens


@pytest.mark.parametrize("contained", [True, False])
def test_the_sources_of_a_private_folder_are_not_named(tmp_path: Path, contained: bool) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private/secret.py").touch()
    mounted = tmp_path / "mounted"
    (mounted / "real").mkdir(parents=True)
    (mounted / "real/own.py").touch()
    (mounted / "real/link.py").symlink_to(tmp_path / "private/secret.py")
    (mounted / "led").symlink_to(tmp_path / "private")
    spec = EnvSpec(targets=(Target("/opt/env"),), command=("x",), cwd="/")
    at = str(mounted)
    if contained:
        mounts = ((at, "/src"),)
        spec = EnvSpec(targets=(Target("/opt/env"),), command=("x",), cwd="/", image_digest="sha256:1", mounts=mounts)
        at = "/src"
    digests = inputs.Digests(spec, Config(cache_dir=str(tmp_path / "cache")))
    led = digests.difference(inputs.Observed(folders={f"{at}/led": []}))
    real = digests.difference(inputs.Observed(folders={f"{at}/real": []}))
    if contained:
        assert (led, real) == ("", "/src/real/own.py is new")
        own = digests.difference(inputs.Observed(folders={f"{at}/real": ["own.py"]}))
        assert own == ""
    else:  # in the user's own tree links are followed
        assert (led, real) == (f"{at}/led/secret.py is new", f"{at}/real/link.py is new")


def test_data_behind_the_text_of_a_script_is_not_looked_into(tmp_path: Path) -> None:
    """Red before: two bytes of it were a list with a folder, whose name no folder can have: nothing was published,
    at each start."""
    (tmp_path / "b").mkdir()
    text = "export PYTHONPATH=a:b\nexit\n\0 PYTHONPATH=c\0d:b"
    found = names.before([text], {}, str(tmp_path), {f"{tmp_path}/b/x.py"}, bool)
    assert found == {f"{tmp_path}/a/x.py": ""}
    data = " ".join(f"x{number}*" for number in range(50))
    assert names.globbed([f"cat a.c*\n\0 {data}"], {}, str(tmp_path)) == {str(tmp_path): {"a.c*"}}


def test_a_folder_with_the_name_of_a_command_has_patterns() -> None:
    assert names.globbed(["cat /git/a.c*; rm b.*; /bin/rm c.*"], {}, "/") == {"/git": {"a.c*"}}


def test_an_index_of_git_is_compared_without_its_times_and_read_with_a_limit(tmp_path: Path) -> None:
    """A neighbour's sparse file of this name may have any size."""
    path = tmp_path / ".git/index"
    path.parent.mkdir()

    def digest(when: int, content: bytes) -> str:
        entry = (
            struct.pack(">10I", when, 0, when, 0, 1, when, 0o100644, 0, 0, 1) + content + struct.pack(">H", 1) + b"a"
        )
        path.write_bytes(struct.pack(">4sII", b"DIRC", 2, 1) + entry.ljust(64 // 8 * 8 + 8, b"\0"))
        return inputs.Digests(spec, config).of(str(path))

    spec = EnvSpec(targets=(Target("/opt/env"),), command=("x",), cwd="/")
    config = Config(cache_dir=str(tmp_path / "cache"))
    assert digest(1, b"\1" * 20) == digest(2, b"\1" * 20) != digest(1, b"\2" * 20)
    os.truncate(path, 300 << 20)
    tracemalloc.start()
    try:
        assert inputs.Digests(spec, config).of(str(path))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def _asked(lookups: Lookups, opens: Opens, path: Path, text: str) -> list[tuple[str, str]]:
    read = {f"{path}/started"}
    yes = lambda _: True  # noqa: E731
    return [*names.asked(lookups, opens, {"PATH": str(path)}, "/", read, [text], yes, yes)]


def test_programs_that_a_text_asks_for_count_where_lookups_are_not_seen(tmp_path: Path) -> None:
    text = 'command -v nvcc; which("gcc-9")'
    assert _asked(Lookups(), Opens(), tmp_path, text) == [("?gcc-9", ""), ("?nvcc", "")]
    lookups = Lookups()
    lookups.absent = {f"{tmp_path}/nvcc"}
    assert _asked(lookups, Opens(), tmp_path, text) == [("?nvcc", "")]


def test_programs_that_started_come_before_those_that_were_looked_for(tmp_path: Path) -> None:
    (tmp_path / "started").touch(mode=0o755)
    lookups, opens = Lookups(), Opens()
    lookups.absent = {f"{tmp_path}/a{number}" for number in range(names.MOST + 10)}
    opens.started = {"started"}
    assert _asked(lookups, opens, tmp_path, "")[0] == ("started", f"{tmp_path}/started")


def test_a_long_word_is_no_pattern_and_takes_no_time(tmp_path: Path) -> None:
    began = time.monotonic()
    assert names.globbed([f"cat {'a' * 20_000}*+ a.c*"], {}, str(tmp_path)) == {str(tmp_path): {"a.c*"}}
    assert time.monotonic() - began < 1


def test_many_variables_and_words_of_a_script_take_no_time_together(tmp_path: Path) -> None:
    """Red before: each word that may name a target had all variables copied."""
    text = "".join(f"a{n}=x\nmv w{n} v{n}\n" for n in range(8000))
    began = time.process_time()
    assert not names.placed([text], {}, "/", [f"{tmp_path}/t"], failed=False)
    assert time.process_time() - began < 0.4


@pytest.mark.parametrize(
    ("at", "start", "place"), [(1 << 63, 0, 0), (64, (1 << 63) - 5, 0), (64, 120, 1 << 63), (999, 0, 0)]
)
def test_a_damaged_library_leads_nowhere(tmp_path: Path, at: int, start: int, place: int) -> None:
    """Red before: nothing was published of a result that holds one, as packages with parsers of ELF do."""
    head = b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<Q", at).ljust(22, b"\0") + struct.pack("<HH", 0, 3)
    part = struct.pack("<IIQQQQ", 2, 0, start, 0, 0, 64).ljust(56, b"\0")
    table = struct.pack("<QQQQ", 5, place, 15, 1 << 63)
    data = head.ljust(64, b"\0") + part + table

    def read(path: str, most: int, begin: int = 0) -> bytes:
        assert begin <= len(data)  # os.pread takes no number of 64 bits
        return data[begin : begin + most]

    entry = Entry("0/x.so", "f", 0o644, 0, 0, len(data), 0)
    spec = EnvSpec(targets=(Target("/opt/env", str(tmp_path)),), command=("x",), cwd="/")
    assert leads.added(spec, Config(cache_dir=str(tmp_path)), inputs.Observed(), [entry], read, 0).leads == {}
