import json
import os
import re
from pathlib import Path

import pytest

from bootseer import config
from bootseer.errors import ConfigError


def test_environment_wins_over_the_file(tmp_path):
    file = tmp_path / "bootseer.toml"
    file.write_text('cache_dir = "/a"\nstore = "/s"\nfill_quiet = 3\n')
    found = config.load({"BOOTSEER_CONFIG": str(file), "BOOTSEER_CACHE_DIR": "/b", "BOOTSEER_BACKGROUND_FILL": "false"})
    assert (found.cache_dir, found.store_url, found.fill_quiet) == ("/b", "/s", 3)
    assert found.background_fill is False


def test_without_a_store_it_lies_beside_the_cache():
    assert config.load({"BOOTSEER_CACHE_DIR": "/c"}).store_url == "/c/store"


@pytest.mark.parametrize(
    "text",
    [
        *('cach_dir = "/a"', "fill_quiet = []", "not toml", "cache_limit = inf", "cache_keep_free = nan"),
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


def _settings(tmp_path, text, **more):
    file = tmp_path / "bootseer.toml"
    file.write_text(text)
    return {"BOOTSEER_CONFIG": str(file), **more}


@pytest.mark.parametrize("name", ["cache_dir", "state_dir", "node_dir", "store", "sign_key", "verify_key"])
def test_a_place_is_a_whole_path_and_a_tilde_is_the_home_folder(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", "/home/me")
    for text in ("~/x", "/home/me/x"):
        assert getattr(config.load(_settings(tmp_path, f'{name} = "{text}"')), name) == "/home/me/x"
        assert getattr(config.load({f"BOOTSEER_{name.upper()}": text}), name) == "/home/me/x"
    for text in ("x", "./x", "~nobody-has-this-name/x"):
        with pytest.raises(ConfigError, match=f"{name} = '{re.escape(text)}' .from .*bootseer.toml. is no whole path"):
            config.load(_settings(tmp_path, f'{name} = "{text}"'))
        with pytest.raises(ConfigError, match=f"BOOTSEER_{name.upper()}"):
            config.load({f"BOOTSEER_{name.upper()}": text})
    assert config.load({"BOOTSEER_STORE": "s3://bucket/~/x"}).store == "s3://bucket/~/x"


@pytest.mark.parametrize("name", ["cache_dir", "state_dir", "node_dir"])
def test_a_folder_of_our_own_is_never_that_of_who_calls(tmp_path, name):
    for environ in ({f"BOOTSEER_{name.upper()}": ""}, _settings(tmp_path, f'{name} = ""')):
        with pytest.raises(ConfigError, match=f"{name} = '' .* is no whole path"):
            config.load(environ)
    assert config.load({"BOOTSEER_STORE": ""}).store_url.startswith("/")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('record_seconds = "2m"', "Expected a number, got a string"),
        ('background_fill = "yes"', "Expected true or false, got a string"),
        ("cache_limit = true", "Expected a number, got true or false"),
        ('plain_http = "a:1"', 'Expected a list [".."], got a string'),
        ("store = { url = 1 }", "Expected a string, got a table"),
        ("cache_limit = -1", "Expected a number >= 0"),
        ('store = "hdfs:/a/b"', "write hdfs://"),
    ],
)
def test_a_value_of_the_wrong_kind_says_which_is_wanted(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        config.load(_settings(tmp_path, text))
    assert said in f"{caught.value}; {caught.value.hint}"


@pytest.mark.parametrize("uid", [0, 54321])
@pytest.mark.parametrize(
    "set", [{}, {"HOME": ""}, {"HOME": "relative"}, {"XDG_CACHE_HOME": "x", "XDG_RUNTIME_DIR": "y"}]
)
def test_no_folder_is_ever_relative(monkeypatch, uid, set):
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("os.getuid", lambda: uid)  # which passwd does not know
    found = config.load({})
    assert found.cache_dir.startswith("/")
    assert found.state_dir.startswith("/")


@pytest.mark.parametrize("name", ["cache_dir", "state_dir"])
@pytest.mark.parametrize("there", [True, False])
def test_the_folder_of_roots_settings_is_not_a_users(tmp_path, monkeypatch, name, there):
    folder = tmp_path / "roots"
    if there:
        folder.mkdir(mode=0o755)
    else:
        monkeypatch.setattr("os.access", lambda path, mode: False)
    environ = _settings(tmp_path, f'{name} = "{folder}"')
    assert getattr(config.load(environ), name) == str(folder)
    monkeypatch.setattr("os.geteuid", lambda: 54321)
    found, sources = config.trace(environ)
    assert getattr(found, name) == getattr(config.load({}), name)
    assert "another user" in sources[name]
    assert getattr(config.load({**environ, f"BOOTSEER_{name.upper()}": str(folder)}), name) == str(folder)
    if there:
        os.chown(folder, 54321, 54321)
        assert getattr(config.load(environ), name) == str(folder)


@pytest.mark.parametrize("name", ["cache_limit", "cache_keep_free"])
def test_sizes_are_shares_or_sizes_and_a_slip_is_refused(tmp_path, name):
    for text, size in (
        ("0.5", 0.5),
        ("1", 1),
        ("0", 0),
        ("50G", 50 << 30),
        ("1.5 TiB", 3 << 39),
        ("53687091200", 50 << 30),
    ):
        assert getattr(config.load({f"BOOTSEER_{name.upper()}": text}), name) == size
        assert getattr(config.load(_settings(tmp_path, f'{name} = "{text}"')), name) == size
    for text in ("80", "1.5", "2"):
        with pytest.raises(ConfigError, match=f"{name} = {text} ") as caught:
            config.load(_settings(tmp_path, f"{name} = {text}"))
        assert "%" in caught.value.hint
        assert f'"{text}G"' in caught.value.hint
    for text in ("80%", "much", "-1"):
        with pytest.raises(ConfigError, match=name):
            config.load({f"BOOTSEER_{name.upper()}": text})


@pytest.mark.parametrize("text", ["stroe", "STORE", "BOOTSEER_STORE", "bootseer_stroe"])
def test_what_is_misspelt_is_named(text, tmp_path):
    with pytest.raises(ConfigError, match=f"no setting '{text}'") as caught:
        config.load(_settings(tmp_path, f'{text} = "/x"'))
    assert caught.value.hint == "did you mean store?"


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("BOOTSEER_STROE", "BOOTSEER_STORE"),
        ("BOOTSEER_CACHEDIR", "BOOTSEER_CACHE_DIR"),
        ("BOOTSEER_CACHE_DIRECTORY", "BOOTSEER_CACHE_DIR"),
        ("BOOTSEER_CACHE_LIMIT_BYTES", "BOOTSEER_CACHE_LIMIT"),
        ("BOOTSEER_STORE_URL", "BOOTSEER_STORE"),
        ("bootseer_store", "BOOTSEER_STORE"),
        ("Bootseer_Cache_Dir", "BOOTSEER_CACHE_DIR"),
        *((name, "") for name in ("BOOTSEER_STORE", "BOOTSEER_NODE", "BOOTSEER_NODES", "BOOTSEER_SITE_THING")),
        *((name, "") for name in ("BOOTSEER_LOG", "BOOTSEER_STORE_SERVICE_HOST", "BOOTSEER_STORE_PORT_80_TCP")),
    ],
)
def test_variables_that_are_misspelt_are_named(variable, meant, caplog):
    """Not those that Kubernetes sets for a service of that name."""
    config.load({variable: "/x"})
    assert [one.getMessage() for one in caplog.records] == [f"{variable} is no setting; did you mean {meant}?"] * bool(
        meant
    )
    with pytest.raises(ConfigError, match=r"fill_quiet = 'many' .from BOOTSEER_FILL_QUIET"):
        config.load({"BOOTSEER_FILL_QUIET": "many"})


def test_no_variable_of_ours_is_taken_for_a_slip(caplog):
    source = Path(config.__file__).parent
    used = {
        name for path in source.rglob("*.py") for name in re.findall(r"\bBOOTSEER_[A-Z_]+[A-Z]\b", path.read_text())
    }
    settings = {f"BOOTSEER_{name.upper()}" for name in config.Config.__struct_fields__}
    config.load(dict.fromkeys(used - settings - {"BOOTSEER_CONFIG"}, "x"))
    assert not caplog.text


def test_what_a_neighbour_makes_in_tmp_may_be_gone_in_a_moment(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(config, "_has_roots_folders", lambda: False)
    monkeypatch.setattr(config, "_own_temporary", lambda: f"{tmp_path}/gone")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.path.lexists", lambda path: True)
    assert config.load({}).state_dir == f"{tmp_path}/gone/bootseer"
