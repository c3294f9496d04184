"""Keys: what is part of them, what is not, and how a miss is explained."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from bootseer.env import EnvSpec, Target, caches, hardware, key, keyfile, resolve_in, variables
from bootseer.env.canonical import canonical
from bootseer.env.explain import changes, explain
from bootseer.env.key import KeyDocument, document_from
from bootseer.errors import ConfigError, DataError
from bootseer.units import parse_age

GOLDEN = Path(__file__).parent.parent / "golden" / "env"


def spec(folder: Path, **changed: object) -> EnvSpec:
    base = EnvSpec(
        targets=(Target("/opt/env"),),
        command=("pip", "install", "-r", "requirements.txt"),
        cwd=str(folder),
        environ={"PATH": "/usr/bin:/bin", "CUDA": "12.4"},
    )
    return msgspec.structs.replace(base, **changed)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(variables.SETTINGS, "pip", variables.SETTINGS["pip"][1:])  # not those of this machine
    (tmp_path / "requirements.txt").write_text("torch==2.5.0\n-r more.txt\n")
    (tmp_path / "more.txt").write_text("numpy==2.0\n")
    return tmp_path


def test_the_golden_document_keeps_its_key() -> None:
    raw = (GOLDEN / "document.json").read_bytes()
    document = document_from(json.loads(raw))
    assert document.key == "2088628c59b07f1d91b7b24fbacdca650295ca15b038cf4e733214bf92c63dda"
    assert canonical(msgspec.to_builtins(document)) == raw.rstrip(b"\n")


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["venv/bin/python", "-m", "pip"], "venv/bin/python"),
        (["venv/bin/pip", "install"], "venv/bin/python3"),
        (["python3.9", "setup.py"], "bin/python3.9"),
        (["uv", "pip", "install", "-p", "3.9"], "bin/python3.9"),
        (["uv", "pip", "install", "--python=venv"], "venv/bin/python3"),
        (["uv", "pip", "install", "-p", "target/bin/python3"], "bin/python3"),
        (["mkdir", "-p", "venv/bin/pip"], "bin/python3"),
        (["sh", "s.sh"], "bin/python3"),
    ],
)
def test_the_python_that_the_command_names_counts(tmp_path: Path, command: list[str], found: str) -> None:
    for name in ("venv/bin/python", "venv/bin/python3", "bin/python3.9", "bin/python3", "bin/uv", "target/bin/python3"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\necho cpython 3.9.1 {name}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "venv/bin/pip").write_text(f"#!{tmp_path}/venv/bin/python3\n")
    (tmp_path / "venv/bin/pip").chmod(0o755)
    environ = {"PATH": str(tmp_path / "bin")}
    one = spec(tmp_path, command=tuple(command), environ=environ, targets=(Target(str(tmp_path / "target")),))
    assert key.build(one).python.soabi == found


@pytest.mark.parametrize("made", ["script", "program"])
def test_a_python_that_does_not_answer_is_said(tmp_path: Path, made: str) -> None:
    """Red before: ``list index out of range``, and of a script nothing."""
    python = tmp_path / "python3"
    python.write_bytes(b"#!/bin/sh\n" if made == "script" else Path("/bin/true").read_bytes())
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=f"cannot ask the interpreter {python} for its version: it says ''"):
        key.build(spec(tmp_path, command=("sh", "s.sh"), environ={"PATH": str(tmp_path)}))


def test_same_inputs_same_key(folder: Path) -> None:
    assert key.build(spec(folder)).key == key.build(spec(folder)).key


@pytest.mark.parametrize(
    "changed",
    [
        {"command": ("pip", "install", "x")},
        {"salt": "1"},
        {"image_digest": "sha256:1"},
        {"targets": (Target("/opt/other"),)},
        {"key_env": ("CUDA",)},
        {"key_env": ("ABSENT",)},
        {"key_files": ("more.txt",), "command": ("true",)},
    ],
)
def test_each_input_is_part_of_the_key(folder: Path, changed: dict[str, object]) -> None:
    assert key.build(spec(folder)).key != key.build(spec(folder, **changed)).key


def test_what_is_not_part_of_the_key(folder: Path) -> None:
    base = key.build(spec(folder)).key
    for changed in ({"max_age": 5.0}, {"job": "j"}, {"wait": 9.0}, {"restore": "unpack"}):
        assert key.build(spec(folder, **changed)).key == base


def test_content_of_scripts_and_included_files_counts(folder: Path) -> None:
    document = key.build(spec(folder))
    assert set(document.files) == {"requirements.txt", "more.txt"}
    assert document.machine == platform.machine()
    (folder / "more.txt").write_text("numpy==2.1\n")
    assert key.build(spec(folder)).key != document.key


def test_includes_that_include_each_other_end(folder: Path) -> None:
    (folder / "more.txt").write_text("-r requirements.txt\n")
    assert set(key.build(spec(folder)).files) == {"requirements.txt", "more.txt"}


def test_what_a_long_file_includes_counts(folder: Path) -> None:
    with (folder / "requirements.txt").open("a") as file:  # as pip-compile writes them, with hashes
        file.writelines(f"package-{number}==1.0 --hash=sha256:{number:064x}\n" for number in range(1000))
    document = key.build(spec(folder))
    assert not document.files["requirements.txt"].text
    assert set(document.files) == {"requirements.txt", "more.txt"}


def test_a_file_the_command_makes_is_no_input(folder: Path) -> None:
    target = folder / "target"
    one = spec(folder, targets=(Target(str(target)),), command=("cp", "more.txt", str(target / "made")))
    before = key.build(one).key
    target.mkdir()
    (target / "made").write_text("x")
    assert key.build(one).key == before


def test_key_folder_counts_whole(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "a.py").write_text("1")
    one = spec(folder, key_files=("pkg",))
    before = key.build(one)
    (folder / "pkg" / "a.py").write_text("2")
    after = key.build(one)
    assert before.key != after.key
    (folder / "pkg" / "link").symlink_to(folder)
    assert key.build(one).key != after.key
    assert any(line.startswith("pkg changed") for line in changes(before, after))


@pytest.mark.timeout(60)
def test_a_folder_of_too_many_entries_of_any_kind_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folders were counted apart, behind a listing that was cut off: two contents had one key."""
    monkeypatch.setattr(keyfile, "_FOLDER_LIMIT", 10)
    for number in range(6):
        (folder / f"more/folder{number}").mkdir(parents=True)
        (folder / f"more/file{number}").write_text("x")
    with pytest.raises(ConfigError, match="more than"):
        key.build(spec(folder, key_files=("more",)))


def test_projects_have_together_no_more_files_than_a_key_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Red before: each of 100 had as many, while the start waited."""
    monkeypatch.setattr(keyfile, "_FOLDER_LIMIT", 10)
    for name in "abcd":
        (folder / f"p{name}").mkdir()
        for number in range(4):
            (folder / f"p{name}/{number}.py").write_text("x")
    files = keyfile.KeyFiles(spec(folder))
    for name in ("pa", "pb", "pc", "pd"):
        files.add_project(name, folder / name)
    assert sorted(files.found) == ["pa", "pb"]
    assert caplog.text.count("does not count for the key") == 2


def test_a_pipe_that_takes_the_place_of_a_folder_is_not_waited_for(folder: Path) -> None:
    (folder / "pkg/inner").mkdir(parents=True)
    os.mkfifo(folder / "pkg/pipe")
    exchange = ctypes.CDLL(None).renameat2
    names = [os.fsencode(folder / "pkg" / name) for name in ("inner", "pipe")]
    stop = threading.Event()

    def race() -> None:
        while not stop.is_set():
            exchange(-100, names[0], -100, names[1], 2)

    racing = threading.Thread(target=race, daemon=True)
    racing.start()
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            with contextlib.suppress(ConfigError):
                key.build(spec(folder, key_files=("pkg",), command=("x",)))
    finally:
        stop.set()
        racing.join()


def test_missing_key_file_is_the_users_mistake(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read key file .*nope"):
        key.build(spec(folder, key_files=("nope",)))


def test_in_a_container_the_hosts_files_and_python_do_not_count(folder: Path) -> None:
    one = spec(folder, image_digest="sha256:1", targets=(Target("/opt/env", "/var/x1/rootfs/opt/env"),))
    two = msgspec.structs.replace(one, targets=(Target("/opt/env", "/var/x2/rootfs/opt/env"),))
    document = key.build(one)
    assert document.files == {}
    assert document.python.version == ""
    assert document.libc == ""
    assert document.key == key.build(two).key


def test_absolute_key_files_count_by_content_not_by_place(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("elsewhere")
    (other / "more.txt").write_text("numpy==2.0\n")
    one, two = (spec(folder, command=("x",), key_files=(str(at / "more.txt"),)) for at in (folder, other))
    assert key.build(one).key == key.build(two).key


@pytest.mark.parametrize("content", [b"numpy==2.0\n" * 9, b"numpy==2.0\n", b"a\0" * 99])
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_digest_of_a_file_depends_on_no_place_and_no_mode(folder: Path, content: bytes, mode: int) -> None:
    (folder / "in").mkdir()
    (folder / "in/more.txt").write_bytes(content)
    (folder / "out.txt").write_bytes(content)
    (folder / "out.txt").chmod(mode)
    one, two = (
        key.build(spec(folder / "in", command=("x",), key_files=(name,)))
        for name in ("more.txt", str(folder / "out.txt"))
    )
    assert {file.digest for file in one.files.values()} == {file.digest for file in two.files.values()}


def test_the_text_of_a_file_is_no_part_of_the_key(folder: Path) -> None:
    """Who may see a file decides about its text."""
    one = key.build(spec(folder))
    files = {name: msgspec.structs.replace(file, text="") for name, file in one.files.items()}
    assert files != one.files
    assert msgspec.structs.replace(one, files=files).key == one.key


def test_what_may_be_nothing_but_a_password_has_no_fast_digest(folder: Path) -> None:
    (folder / "word").write_text("hunter2\n")
    (found,) = key.build(spec(folder, command=("x",), key_files=("word",))).files.values()
    assert found.digest != hashlib.sha256(b"hunter2\n").hexdigest()


def test_an_include_whose_links_have_no_end_does_not_count(folder: Path) -> None:
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "requirements.txt").write_text("-r loop.txt\n")
    contained = spec(folder, key_files=("requirements.txt",), image_digest="sha256:1", mounts=((str(folder), "/src"),))
    assert [*key.build(contained).files] == ["requirements.txt"]


@pytest.mark.parametrize(
    "content",
    [
        *("\n" * (1 << 20), " \n" * (1 << 19), "-r\n" * (1 << 19)),
        *("password" + " " * 60_000, "mysql " * 10_000, "a-" * 30_000, "-u " * 20_000, "bearer\n" * 9_000),
    ],
    ids=lambda text: repr(text[:8]),
)
def test_a_file_takes_no_longer_than_its_size_asks_for(folder: Path, content: str) -> None:
    (folder / "requirements.txt").write_text(content)
    began = time.process_time()
    key.build(spec(folder))
    assert time.process_time() - began < 10


def test_credentials_stay_out_of_the_document(folder: Path) -> None:
    (folder / "requirements.txt").write_text("--index-url https://bob:hunter2@index.corp/simple\nx==1\n")
    one = spec(
        folder,
        command=(
            "pip",
            "install",
            "-r",
            "requirements.txt",
            "--extra-index-url=https://t0ken@h/s",
            "--token",
            "s3cret",
        ),
        key_env=("PIP_INDEX_URL", "API_TOKEN"),
        environ={"PIP_INDEX_URL": "https://u:hunter2@h/simple", "API_TOKEN": "hunter2", "PATH": "/usr/bin"},
    )
    document = key.build(one)
    text = canonical(msgspec.to_builtins(document)).decode()
    for secret in ("hunter2", "t0ken", "s3cret", "bob"):
        assert secret not in text
    (folder / "requirements.txt").write_text("--index-url https://bob:rotated@index.corp/simple\nx==1\n")
    assert key.build(one).key == document.key


def test_a_secret_in_a_set_up_script_is_not_published(folder: Path) -> None:
    script, secrets = folder / "s.sh", folder / "secrets.env"
    script.write_text(
        "export HF_TOKEN=hf_aB3dE5gH7jK9mN1pQ2sT4vW6xY8zA0cD5f\nexport X_PASSWORD=hunter2\npip install x\n"
    )
    secrets.write_text("X_USER=hunter3\n")
    one = spec(folder, command=("sh", "s.sh"), key_files=("secrets.env",), key_env=("OWN",), environ={"OWN": "hunter4"})
    document = key.build(one)
    text = canonical(msgspec.to_builtins(document)).decode()
    for secret in ("aB3dE5gH7jK9", "hunter2", "hunter3", "hunter4"):
        assert secret not in text
    for path, old, new in ((script, "pip install x", "pip install y"), (script, "hunter2", "z"), (secrets, "3", "5")):
        path.write_text(path.read_text().replace(old, new))
        later = key.build(one)
        assert later.key != document.key
        document = later
    assert "export X_PASSWORD=<hidden>" in document.files["s.sh"].text


def test_a_miss_names_the_requirement(folder: Path) -> None:
    old = key.build(spec(folder))
    (folder / "requirements.txt").write_text("torch==2.5.0\nflash-attn==2.8\n-r more.txt\n")
    new = key.build(spec(folder))
    assert explain(new, [old]) == "missed because requirements.txt changed: + flash-attn 2.8"


def test_the_nearest_document_is_compared(folder: Path) -> None:
    far = key.build(spec(folder, command=("other",), salt="9", key_env=("CUDA",)))
    near = key.build(spec(folder, salt="1"))
    new = key.build(spec(folder, salt="2"))
    assert explain(new, [near, far]) == "missed because salt changed: 1 -> 2"
    assert explain(new, []) == "missed because no snapshot of these targets exists yet"


def test_every_difference_is_explained(folder: Path) -> None:
    old = key.build(spec(folder, key_env=("CUDA",)))
    new = key.build(spec(folder, key_env=("CUDA",), environ={"PATH": "/usr/bin", "CUDA": "12.6"}, command=("uv", "x")))
    assert changes(old, new) == [
        "more.txt is no longer an input",
        "requirements.txt is no longer an input",
        "command changed: pip install -r requirements.txt -> uv x",
        "variable CUDA changed: 12.4 -> 12.6",
    ]


def test_unknown_documents_are_refused() -> None:
    with pytest.raises(DataError):
        document_from({"format": "bootseer-env-key"})
    with pytest.raises(DataError, match="version 1"):
        document_from({"targets": [], "command": [], "version": 1})


def test_lineage_joins_keys_of_the_same_targets() -> None:
    one = KeyDocument(targets=["/a"], command=["x"])
    assert one.lineage == KeyDocument(targets=["/a"], command=["y"], salt="s").lineage
    assert one.lineage != KeyDocument(targets=["/b"], command=["x"]).lineage


@pytest.mark.parametrize(("text", "seconds"), [("7d", 604800), ("1.5h", 5400), ("30m", 1800), ("45s", 45)])
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "nand", "7 days", "infd"])
def test_bad_ages(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an age"):
        parse_age(text)


@pytest.mark.parametrize(
    "targets",
    [(), ("relative",), ("/",), ("/a/../b",), ("/a//b",), ("/a", "/a/b"), ("/a", "/a"), ("/a\0",)],
)
def test_bad_targets(targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        EnvSpec(targets=tuple(Target(item) for item in targets), command=("x",)).check()


def test_no_command() -> None:
    with pytest.raises(ConfigError, match="no set-up command"):
        EnvSpec(targets=(Target("/a"),), command=()).check()


def test_neighbours_are_not_nested() -> None:
    EnvSpec(targets=(Target("/a"), Target("/a-b"), Target("/ab")), command=("x",)).check()


def test_links_of_a_container_stay_inside_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr").mkdir(parents=True)
    (root / "opt").symlink_to("/usr")
    (root / "usr" / "up").symlink_to("../../../../etc")
    (root / "loop").symlink_to("loop")
    assert resolve_in(root, "/opt/env/x") == root / "usr/env/x"
    assert resolve_in(root, "/opt/up/passwd") == root / "etc/passwd"
    assert resolve_in(root, "/../../x") == root / "x"
    with pytest.raises(ConfigError, match="too many symbolic links"):
        resolve_in(root, "/loop/x")


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["sh", "-c", "pip install -r ${REQ}/r.txt"], ""),
        (["sh", "-c", "echo $REQ"], ""),
        (["bash", "setup.sh"], "pip install -r $REQ/r.txt\n"),
        (["bash", "setup.sh"], ". ./inner.sh\n"),
        (["bash", "setup.sh"], 'source "$(dirname "$0")/inner.sh"\n'),
        (["bash", "setup.sh"], '. "$(cd "$(dirname "$0")" && pwd)/inner.sh"\n'),
        (["bash", "setup.sh"], "if true; then\nREQ=1\nfi\necho $REQ\n"),
        (["bash", "setup.sh"], "echo ${REQ:-default}\nREQ=1\n"),
        (["python3", "setup.sh"], "import os\nprint(os.environ['REQ'])\n"),
        (["python3", "setup.sh"], "import os\nprint(os.environ.get('REQ'), os.getenv('X'))\n"),
        (["pip", "install", "-r", "setup.sh"], "https://${REQ}@host/x.whl\n"),
        (["bash", "setup.sh"], "REQ=${REQ:-default}\necho $REQ\n"),
        (["bash", "setup.sh"], ': "${REQ:=default}"; echo $REQ\n'),
        (["bash", "setup.sh"], "REQ=1 true; echo $REQ\n"),
        (["bash", "setup.sh"], "false &&\nREQ=1\necho $REQ\n"),
        (["bash", "setup.sh"], "echo a \\\nREQ=1\necho $REQ\n"),
        (["bash", "setup.sh"], "cat <<'X'\nREQ=1\nX\necho $REQ\n"),
        (["bash", "setup.sh"], "echo '\nREQ=1\n'; echo $REQ\n"),
        (["bash", "setup.sh"], "true | REQ=1; echo $REQ\n"),
        (["bash", "setup.sh"], "printenv REQ; [[ -v REQ ]]\n"),
        (["python3", "setup.sh"], "import os\nREQ=os.environ['REQ']\nprint(REQ)\n"),
        (["python3", "setup.sh"], "from os import environ as e\nprint(e['REQ'])\n"),
        (["node", "setup.sh"], "const {\n a,\n REQ: b } = process.env\n"),
        (["awk", "-f", "setup.sh"], 'BEGIN { print ENVIRON["REQ"] }\n'),
    ],
)
def test_a_variable_in_the_text_counts(folder: Path, command: list[str], script: str) -> None:
    """Its value decides what is read or done; it is kept as a digest alone."""
    (folder / "setup.sh").write_text(script)
    (folder / "inner.sh").write_text("echo $REQ")
    documents = [
        key.build(spec(folder, command=tuple(command), environ=environ))
        for environ in ({"REQ": "/data/first"}, {"REQ": "/data/second"}, {"REQ": "/data/first", "OTHER": "1"}, {})
    ]
    assert len({document.key for document in documents}) == 3
    assert documents[0].key == documents[2].key
    assert "/data" not in str([document.env for document in documents])
    assert changes(documents[0], documents[1])[0].startswith("variable REQ changed: <digest ")
    assert changes(documents[0], documents[3])[0].endswith("-> unset")


@pytest.mark.parametrize(
    "text",
    [
        "REQ=1; echo $REQ",
        "set -e\nexport REQ=/x\nif true; then echo $REQ; fi",
        "for REQ in a b; do echo $REQ; done",
        "REQ='a b'\nexport REQ=\"$HOME/x\"; echo $REQ",
        "REQ=$(cat x | head -1) && echo $REQ",
        'cat <<X > y\nits\nX\necho "it is"; REQ=${HOME%/}/a # comment\necho $REQ',
        "echo REQ $HOME $SLURM_JOB_ID $RANK $PATH $TMPDIR ${SLURM_NODELIST%%,*} $HOSTNAME $RANDOM",
    ],
)
def test_what_a_script_sets_and_what_is_of_one_start_does_not_count(folder: Path, text: str) -> None:
    names = ("REQ", "HOME", "SLURM_JOB_ID", "RANK", "PATH", "TMPDIR", "SLURM_NODELIST", "HOSTNAME", "RANDOM")
    found = [
        key.build(spec(folder, command=("sh", "-c", text), python=sys.executable, environ=dict.fromkeys(names, value)))
        for value in ("1", "2")
    ]
    assert found[0] == found[1]


def test_settings_of_the_installers_that_are_named_count(folder: Path) -> None:
    home = folder / "home"
    (home / ".config/pip").mkdir(parents=True)

    def build(command: str, **environ: str) -> str:
        asked = spec(folder, command=("sh", "-c", command), environ={"HOME": str(home), **environ})
        return key.build(asked).key

    for tool, name in (
        ("pip install x", "PIP_INDEX_URL"),
        ("python3 -m pip install x", "PIP_CONSTRAINT"),
        ("pip install --user x", "PYTHONUSERBASE"),
        ("/opt/uv pip sync r.txt", "UV_LINK_MODE"),
        ("npm ci", "npm_config_registry"),
        ("cargo install x", "RUSTFLAGS"),
        ("cargo install x", "RUSTC_WRAPPER"),
        ("cargo install x", "CARGO_TARGET_DIR"),
        ("go build ./...", "GOPROXY"),
        ("go install x", "GOOS"),
        ("go build", "CGO_ENABLED"),
        ("apt-get install -y x", "APT_CONFIG"),
        ("uv pip install x && pip install y", "PIP_INDEX_URL"),
        ("uv run pip install x", "PIP_INDEX_URL"),
        ("micromamba create", "CONDA_CHANNELS"),
        ("pipx install x", "PIP_INDEX_URL"),
        ("pipx install x", "PIPX_DEFAULT_PYTHON"),
        ("pnpm install", "npm_config_registry"),
        ("yarn install", "npm_config_registry"),
        ("yarn install", "YARN_NPM_REGISTRY_SERVER"),
        ("bundle install", "BUNDLE_MIRROR__ALL"),
    ):
        assert build(tool) == build(tool, PIP_CACHE_DIR="/x", UV_CACHE_DIR="/x", CARGO_HOME="/x", PIP_TIMEOUT="9")
        how_many = ("POETRY_INSTALLER_MAX_WORKERS", "npm_config_maxsockets", "CONDA_FETCH_THREADS", "BUNDLE_JOBS")
        how_many += ("npm_config_jobs", "CARGO_BUILD_JOBS", "MAKEFLAGS")
        own_things = ("PNPM_HOME", "npm_config_store_dir", "YARN_GLOBAL_FOLDER", "PDM_CHECK_UPDATE")
        own_things += ("PIP_ROOT_USER_ACTION", "PDM_INSTALL_PARALLEL", "YARN_ENABLE_TELEMETRY")
        others = dict.fromkeys((*how_many, *own_things), "4")
        assert build(f"{tool}; poetry; pdm; npm", **others) == build(f"{tool}; poetry; pdm; npm")
        assert build(tool) != build(tool, **{name: "https://index/one"})
        assert build("make") == build("make", **{name: "https://index/one"})
        builds_in = [{"CARGO_TARGET_DIR": f"{place}/1/target", "TMPDIR": "/scratch"} for place in ("/tmp", "/scratch")]
        assert build(tool, **builds_in[0]) == build(tool, **builds_in[1]) == build(tool)
        assert build(tool) != build(tool, CFLAGS="-O2") != build(tool, CFLAGS="-O3")
        first, second = (build(tool, **{name: f"https://user:{word}@index/one"}) for word in ("a", "b"))
        assert first == second
    made = [build("make", MAKEFLAGS=flags) for flags in ("-j4", "--jobs=8 -O", "-j4 CC=gcc", "-j4 CC=clang")]
    assert made[0] == made[1] == build("make")
    assert len({*made}) == 3
    for tool, path, lines in (
        ("bundle install", ".bundle/config", ("---", 'BUNDLE_GEMS__CORP__COM: "me:{}"', 'BUNDLE_PATH__SYSTEM: "true"')),
        (
            "pip install x",
            ".config/pip/pip.conf",
            ("[global]", "index-url = https://u:{}@one", "index-url = https://two"),
        ),
        ("npm ci", ".npmrc", ("x=1", "//host/:_authToken={}", "registry=https://two")),
        ("uv sync", ".config/uv/uv.toml", ("", "index-url = 'https://u:{}@one'", "index-url = 'https://two'")),
    ):
        keys = []
        for text in (
            f"{lines[0]}\n",
            *(f"{lines[0]}\n{lines[1].format(word)}\n" for word in "ab"),
            f"{lines[0]}\n{lines[2]}\n",
        ):
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
            keys.append(build(tool))
        assert keys[1] == keys[2] != keys[3]
        assert build("make") == build("make")
        assert (keys[0] == keys[1]) is (tool in ("npm ci", "bundle install")), "of logins alone nothing counts"


def test_uv_reads_nothing_of_pips(folder: Path) -> None:
    """Red before: another index of pip was another environment of uv's."""
    (folder / "r.sh").write_text("uv --quiet pip install x\n")
    for command in (("uv", "pip", "install", "x"), ("sh", "-c", "uv -q  pip sync r.txt"), ("sh", "r.sh")):
        keys = []
        for index in ("one", "two"):
            environ = {"PIP_INDEX_URL": f"https://{index}", "VIRTUAL_ENV": str(folder)}
            (folder / "pip.conf").write_text(f"[global]\nindex-url = https://{index}\n")
            keys.append(key.build(spec(folder, command=command, environ=environ, python=sys.executable)).key)
        assert keys[0] == keys[1], command
    listed = 'run(["uv", "pip", "install"]); run(["uv", "-q", "pip", "sync"])'
    assert variables.mentioned(listed, {}) == {"_uv"}
    assert variables.mentioned(listed + '; run(["pip", "install"])', {}) == {"_pip", "_uv"}


@pytest.mark.parametrize("path", ["~/.npmrc", ".npmrc", "~/.config/pip/pip.conf", "~/.yarnrc", ".cargo/config.toml"])
@pytest.mark.parametrize("root", [False, True])
def test_settings_of_logins_alone_are_as_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, root: bool
) -> None:
    if not root:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    place = folder / path.replace("~", "home")
    place.parent.mkdir(parents=True, exist_ok=True)

    def build() -> str:
        command = ("sh", "-c", "pip install x; npm ci; yarn install; cargo install x")
        return key.build(spec(folder, command=command, environ={"HOME": f"{folder}/home"})).key

    before = build()
    place.write_text("# mine\n" if "pip" in path else "# mine\n//one/:_authToken = abc\ntoken = 'abc'\n")
    assert build() == before
    place.write_text("registry = one\n")
    assert build() != before


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("uv venv", ".python-version"),
        ("uv pip install x", "../uv.toml"),
        ("cargo install x", "../../rust-toolchain.toml"),
        ("poetry install", "../poetry.toml"),
    ],
)
def test_settings_that_were_not_there_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tool: str, name: str
) -> None:
    """In the folder where the command starts, or above."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # what is above is private here, which root does not read
    work = folder / "a/b"
    work.mkdir(parents=True)
    asked = spec(work, command=("sh", "-c", tool), environ={"HOME": "/nowhere"})
    before = key.build(asked).key
    (work / name).write_text("3.12\n")
    assert key.build(asked).key != before


@pytest.mark.parametrize(
    ("command", "name", "counts"),
    [
        ("uv sync", "uv.lock", True),
        ("npm ci", "package-lock.json", True),
        ("poetry install", "poetry.lock", True),
        ("cargo install --path .", "Cargo.lock", True),
        ("pnpm install", "pnpm-lock.yaml", True),
        ("pnpm install", ".npmrc", True),
        ("yarn install", "yarn.lock", True),
        ("yarn install", ".yarnrc.yml", True),
        ("bundle install", "Gemfile.lock", True),
        ("bundle install", ".bundle/config", True),
        ("pip install x", "limits.txt", True),
        ("pip install ./own && make", "own/a.json", True),
        ("pip install ./own", "own/build/lib/a", False),
        ("pip install ./own", "own/own.egg-info/PKG-INFO", False),
        ("pip install -t ./own/env ./own", "own/env/a", False),
        ("pip install .", "run.log", False),
        ("mkdir -p logs", "logs/1", False),
    ],
)
def test_without_root_what_an_installer_reads_of_a_project_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, counts: bool
) -> None:
    """Its opens are not seen."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for path in ("own/pyproject.toml", "pyproject.toml", name):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("1\n")
    target = Target(str(folder / "own/env" if "-t" in command else "/opt/env"))
    environ = {"HOME": "/nowhere", "PIP_CONSTRAINT": str(folder / "limits.txt")}
    asked = spec(folder, command=("sh", "-c", command), environ=environ, targets=(target,))
    before = key.build(asked).key
    (folder / name).write_text("2\n")
    assert (key.build(asked).key != before) is counts


def test_all_of_a_key_folder_counts_also_where_it_is_a_project_that_the_command_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: without root what builds leave in it did not count, though the folder was named as a key file."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (folder / "own/dist").mkdir(parents=True)
    (folder / "own/setup.py").write_text("1\n")
    asked = spec(folder, command=("sh", "-c", "pip install own/dist/* -e own"), key_files=("own",))
    (folder / "own/dist/a.txt").write_text("1\n")
    before = key.build(asked).key
    (folder / "own/dist/a.txt").write_text("2\n")
    assert key.build(asked).key != before


def test_a_private_file_that_a_script_names_is_not_read_by_root(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if os.geteuid() != 0:
        pytest.skip("for root")
    secret = tmp_path_factory.mktemp("other") / "login.sh"
    secret.write_text("export A=correct-horse")
    secret.chmod(0o600)
    (folder / "setup.sh").write_text(f". {secret}\n")
    document = key.build(spec(folder, command=("bash", "setup.sh")))
    assert list(document.files) == ["setup.sh"]


def test_a_long_script_takes_as_long_as_its_size_asks_for(folder: Path) -> None:
    text = "A=1\n" + "echo $A $B; sh x.sh\n" * 40_000 + "if (" * 20_000
    (folder / "setup.sh").write_text(text)
    began = time.process_time()
    document = key.build(spec(folder, command=("bash", "setup.sh"), environ={"A": "1", "B": "2"}))
    assert time.process_time() - began < 10
    assert set(document.env) == {"B"}


def test_a_variable_that_is_set_in_too_many_places_counts():
    """Each place is looked at with all that stands before it: a script of a megabyte of them took minutes."""
    often = "if a; then\nV=1\nfi\n" * 500
    assert variables.counted([f"V=2\n{often}echo $V"], {"V": "3"}, all_tools=False) == set()
    assert variables.counted([f"{often}V=2\necho $V"], {"V": "3"}, all_tools=False) == {"V"}


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("env | grep ^APP_", True),
        ("for name in ${!APP_@}; do :; done", True),
        ("env | grep ^SLURM_", False),
        ("print({k: v for k, v in os.environ.items() if k.startswith('APP_')})", True),
        ("N=APP_ONE; eval echo \\$$N", True),
        ("N=APP_ONE; echo ${!N}", True),
        ("echo APP_; N=APP_ONE", False),
    ],
)
def test_a_variable_that_is_found_by_how_it_begins_or_by_another_one_counts(text: str, counts: bool) -> None:
    environ = {"APP_ONE": "1", "APPLE": "2", "SLURM_JOB_ID": "3", "TZ": "UTC"}
    found = variables.counted([text], environ, all_tools=False)
    assert found == ({"APP_ONE", "TZ"} if counts else {"TZ"})
    assert "APP_ONE" in variables.mentioned(text, environ) or not counts


def test_a_text_that_looks_like_many_assignments_takes_as_long_as_its_size_asks_for() -> None:
    for odd in ('$a"', '"$a', "a$(b)", "X=", "{a,", "'", "\\", "<<X\n", "a=b "):
        text = "X=" + odd * (200_000 // len(odd)) + "\n$X"
        began = time.process_time()
        variables.counted([text], {"X": "1"}, all_tools=False)
        variables.mentioned(text, {"X": "1"})
        assert len([*caches.named(text + " pip --cache-dir x" * 10_000, {}, "/x")]) == 10_000
        assert time.process_time() - began < 4, odd


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("make -j$(grep -c ^processor /proc/cpuinfo)", set()),
        ("make -j`grep -c processor /proc/cpuinfo`; make CFLAGS=-march=native", {"_cpu"}),
        ("grep -c avx512 /proc/cpuinfo && pip install x-avx", {"_cpu"}),
        ("grep -q avx2 /proc/cpuinfo && pip install x-avx", {"_cpu"}),
    ],
)
def test_how_many_processors_there_are_says_nothing_of_what_they_can(text, counted):
    assert hardware.counted(text) == counted
