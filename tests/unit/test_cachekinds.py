"""The table of caches, and what decides whether compiled code is of use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bootseer.config import Config
from bootseer.env import cachekey, cachekinds
from bootseer.errors import ConfigError


def test_a_kind_whose_folder_the_job_sets_is_left_alone() -> None:
    given = {"TRITON_CACHE_DIR": "/mine", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    found, own = cachekinds.exported(["inductor", "triton"], "/run/c", given)
    assert own == ["triton"]
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/run/c/inductor"
    assert not found.keys() & given.keys()


def test_an_unknown_kind_is_a_mistake_that_names_those_there_are() -> None:
    assert cachekinds.chosen("auto", "compile") == ["inductor", "triton", "jax", "cuda", "torch-extensions"]
    with pytest.raises(ConfigError, match="no cache 'inducter'"):
        cachekinds.chosen(["inducter"], "compile")


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        ("inductor/ab/cabc.so", True),
        ("inductor/locks/x.lock", False),
        ("inductor/fxgraph/ab/.17.140.tmp", False),
        ("triton/ABC/tmp.pid_17_x/k.cubin", False),
        ("triton/ABC/__grp__k.json", True),
        ("jax/jit_f-0123-cache", True),
        ("jax/jit_f-0123-atime", False),
        ("torch-extensions/py311_cpu/x/lock", False),
        ("torch-extensions/py311_cpu/x/build.ninja", True),
        ("torch-extensions/py311_cpu/x/.ninja_log", True),
        ("torch-extensions/py311_cpu/x/.ninja_deps", True),
        ("torch-extensions/py311_cpu/x/.ninja_lock", False),
        ("elsewhere/file", False),
        ("inductor", False),
    ],
)
def test_what_is_of_one_start_is_no_entry(path: str, entry: bool) -> None:
    assert cachekinds.is_entry(path) is entry


def test_what_differs_from_start_to_start_is_no_fact() -> None:
    plain = cachekey.facts({}, ["torch 2.9"])
    one_start = {
        "HOSTNAME": "n1",
        "SLURM_JOB_ID": "7",
        "RANK": "3",
        "TMPDIR": "/tmp/x",
        "TORCHINDUCTOR_CACHE_DIR": "/x",
    }
    assert cachekey.facts(one_start, ["torch 2.9"]) == plain
    for name, value in {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "XLA_FLAGS": "--x"}.items():
        assert cachekey.facts({name: value}, ["torch 2.9"]) != plain
    assert cachekey.facts({}, ["torch 3.0"]) != plain


def test_frameworks_count_by_version_and_place(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.12/site-packages/torch-2.9.0.dist-info").mkdir(parents=True)
    assert cachekey.installed([(tmp_path, "/env")]) == ["torch-2.9.0 /env/lib/python3.12/site-packages"]
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").touch()
    asked = cachekey.imported([sys.executable, "x.py"], {"PYTHONPATH": str(tmp_path)}, Config())
    assert asked[0].startswith("cpython 3.")
