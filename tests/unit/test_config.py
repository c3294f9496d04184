import json
import re
from pathlib import Path

import pytest

from bootseer import config
from bootseer.errors import ConfigError


def test_environment_wins_over_the_file(tmp_path):
    file = tmp_path / "bootseer.toml"
    file.write_text('cache_dir = "/a"\nstore = "/s"\nfetch_streams = 3\n')
    found = config.load({"BOOTSEER_CONFIG": str(file), "BOOTSEER_CACHE_DIR": "/b", "BOOTSEER_BACKGROUND_FILL": "false"})
    assert (found.cache_dir, found.store_url, found.fetch_streams) == ("/b", "/s", 3)
    assert found.background_fill is False


def test_the_way_to_hdfs_is_one_of_three():
    assert config.load({}).hdfs_access == "auto"
    assert config.load({"BOOTSEER_HDFS_ACCESS": "native"}).hdfs_access == "native"
    with pytest.raises(ConfigError, match="hdfs_access"):
        config.load({"BOOTSEER_HDFS_ACCESS": "kerberos"})


def test_without_a_store_it_lies_beside_the_cache():
    assert config.load({"BOOTSEER_CACHE_DIR": "/c"}).store_url == "/c/store"


@pytest.mark.parametrize(
    "text",
    [
        *('cach_dir = "/a"', "fetch_streams = []", "not toml", "cache_limit = inf", "cache_keep_free = nan"),
        pytest.param("cache_limit = " + 9999 * "[", id="deep"),
    ],
)
def test_what_is_not_understood_is_one_line(tmp_path, text):
    file = tmp_path / "bootseer.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load({"BOOTSEER_CONFIG": str(file)})
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        config.load({"BOOTSEER_CONFIG": str(tmp_path / "gone.toml")})


def test_the_page_has_every_setting_with_its_default():
    page = Path(__file__).parents[2] / "docs/reference/settings.md"
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page.read_text(), re.M))
    found = config.load({})
    assert set(rows) == set(found.__struct_fields__)
    for name, said in rows.items():
        if re.fullmatch(r"`[^`/]+`", said):
            assert json.loads(said.strip("`")) == getattr(found, name), name
        elif said == "none":
            assert not getattr(found, name), name
