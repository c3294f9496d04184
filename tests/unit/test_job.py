import re
from pathlib import Path

import msgspec
import pytest

from bench.demo.full import WORKLOADS, Addresses
from bench.demo.ingredients import Ingredients
from bootseer.demo.starts import to_toml
from bootseer.errors import ConfigError, NotFoundError
from bootseer.launch import job

PAGE = Path(__file__).parents[2] / "docs/reference/job-file.md"
SMALL = """
[job]
name = "j"
command = ["python3", "train.py"]
[image]
ref = "localhost:5000/a:1"
"""


@pytest.fixture
def load(tmp_path):
    def from_text(text: str) -> job.Job:
        (tmp_path / "job.toml").write_text(text)
        return job.load(tmp_path / "job.toml")[0]

    return from_text


def test_the_smallest_job(load):
    found = load(SMALL)
    assert found.job.command == ["python3", "train.py"]
    assert found.image.enabled
    assert found.env is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[image]", "[image]\nlazy = true"), "lazy"),
        (('name = "j"', 'nmae = "j"'), "nmae"),
        (("[image]", "[imag]"), "imag"),
        (('name = "j"', 'name = "../j"'), "name"),
        (('["python3", "train.py"]', "[]"), "command"),
        (
            ('["python3", "train.py"]', '"python3 train.py"'),
            'Expected a list [".."], got a string - at `$.job.command`',
        ),
        (("[job]", "[job"), "TOML"),
        (('name = "j"', "name = " + 9999 * "["), "TOML"),
        (('name = "j"', 'name = "j"\nstop_grace = inf'), "stop_grace"),
        (('name = "j"', 'name = "j"\nenv = {"A=B" = "1"}'), "$.job.env"),
        (('name = "j"', 'name = "j"\nenv = {A = "1\\u0000"}'), "$.job.env"),
        (("[image]", '[env]\ncommand = ["x"]\ntargets = ["e"]\n[image]'), "target 'e' is not a plain absolute path"),
        (("[image]", '[env]\ncommand = ["x"]\ntargets = ["/a/../e"]\n[image]'), "target '/a/../e' is not"),
        (("[image]", '[env]\ncommand = ["x"]\ntargets = ["/e"]\nmax_age = "7 days"\n[image]'), "write 7d"),
        (("[image]", '[caches]\nkinds = ["inductr"]\n[image]'), "there is no cache 'inductr'"),
        (("[image]", '[checkpoint]\nurl = "/c"\npath = "c"\n[image]'), "$.checkpoint.path"),
        (("[image]", '[[mounts]]\nsource = "/c"\ntarget = "c"\n[image]'), "$.mounts[0].target"),
    ],
)
def test_what_is_not_understood_is_named_in_one_line(load, change, says):
    with pytest.raises(ConfigError) as caught:
        load(SMALL.replace(*change))
    assert says in str(caught.value)
    assert "job.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_job_file(tmp_path):
    with pytest.raises(NotFoundError, match="nothing"):
        job.load(tmp_path / "nothing.toml")


def test_without_switches_techniques_off_and_leaves_the_rest(load):
    text = SMALL + '[env]\ncommand = ["true"]\ntargets = ["/e"]\n'
    found = load(text).without({"env", "checkpoint"})
    assert found.env is not None
    assert not found.env.enabled
    assert found.image.enabled
    assert found.checkpoint is None


def test_every_key_is_documented_and_no_other():
    text = PAGE.read_text()
    for name, table in (
        ("job", job.JobTable),
        ("image", job.ImageTable),
        ("env", job.EnvTable),
        ("checkpoint", job.CheckpointTable),
        ("mounts", job.MountTable),
    ):
        section = re.search(rf"^## `\[+{name}\]+`\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert section, name
        assert re.findall(r"^\| `(\w+)` \|", section[1], re.M) == list(table.__struct_encode_fields__), name


def test_the_example_is_a_job():
    example = re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.S)
    assert example
    import tomllib

    msgspec.convert(tomllib.loads(example[1]), job.Job)


def test_the_demos_job_survives_its_file(load):
    site = Addresses(
        ref="10.0.0.1:5000/a:1", index_url="http://i:1/simple", store="/s", striped="hdfs://s", plain="hdfs://p",
        hdfs_client="hdfs dfs", containerd="/c.sock",
    )  # fmt: skip
    for wanted in (site.job(), site.job(plain=True), site.job(local=Ingredients(WORKLOADS["small"], Path("/a cache")))):
        assert load(to_toml(wanted)) == wanted
