"""Package caches: a set-up command gets what earlier ones fetched and built, on any node, and no login of theirs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer import env
from bootseer.config import Config
from bootseer.env import EnvResult, EnvSpec, Target, generation, overlay, snapshots
from bootseer.env.generation import Cache
from bootseer.env.packagecache import PackageCaches
from bootseer.kernel import mount as mounts
from bootseer.objects import open_store
from support.packageindex import PackageIndex, sdist, wheel
from support.waits import until

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

UV = str(Path(sys.executable).with_name("uv"))
COMMANDS = {
    "pip": "-m pip install -q --disable-pip-version-check --root-user-action=ignore --trusted-host 127.0.0.1",
    "uv": f"{UV} pip install -q --no-config",
}
OWN = [wheel("alpha", "1", files=30), wheel("beta", "1"), wheel("beta", "2"), sdist("gamma", "1")]
LOGIN = "me:hunter2secret"
SECRETS = (b"hunter2secret", b"verysecretcookie", b"bWU6aHVudGVyMnNlY3JldA")


class Nodes:
    """Empty nodes that run one command after the other."""

    def __init__(self, root: Path, kind: str, python: Path) -> None:
        self.root, self.kind, self.count = root, kind, 0
        self.command = f"{python} {COMMANDS[kind]}" if kind == "pip" else COMMANDS[kind]
        self.target, self.store = root / "target", str(root / "store")
        self.index = PackageIndex(
            *OWN, login=LOGIN, headers={"Set-Cookie": "session=verysecretcookie", "Vary": "Authorization, Cookie"}
        )
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        self.environ |= {"PIP_INDEX_URL": self.index.url, "UV_INDEX_URL": self.index.url, "HOME": str(root)}
        self.configs: list[Config] = []
        self.said = ""

    def run(
        self,
        *names: str,
        meanwhile: Callable[[PackageCaches], object] = lambda _: None,
        owner: tuple[int, int] = (0, 0),
        expect: int = 0,
        **changed: object,
    ) -> EnvResult:
        """The result of the command on a new node; `index.fetched` says what it fetched."""
        self.count += 1
        node = self.root / f"node{self.count}"
        config = Config(cache_dir=str(node / "cache"), state_dir=str(node / "state"))
        self.configs.append(config)
        command = ["sh", "-ec", f"{self.command} --target {self.target} $*", "sh", *names]
        base = EnvSpec(
            targets=(Target(str(self.target)),), command=tuple(command), cwd=str(self.root), background=False,
            environ=self.environ,
        )  # fmt: skip
        spec = EnvSpec(**{**{name: getattr(base, name) for name in base.__struct_fields__}, **changed})
        caches = PackageCaches([self.kind], spec, owner, self.store, config)
        self.index.asked.clear()

        def runner() -> int:
            meanwhile(caches)
            done = subprocess.run(
                command, env={**self.environ, **caches.variables}, capture_output=True, text=True, check=False
            )
            self.said = done.stderr
            return done.returncode

        result = env.run(spec, runner, store_url=self.store, config=config, caches=caches)
        assert result.exit_code == expect, self.said
        self.said = caches.said
        return result

    def leave(self) -> None:
        for config in self.configs:
            for group in overlay.groups(Path(config.state_dir))[::-1]:
                group.unmount()
        shutil.rmtree(self.target, ignore_errors=True)

    def next(self, *names: str, **how: object) -> EnvResult:
        self.leave()
        return self.run(*names, **how)  # type: ignore[arg-type]


@pytest.fixture(params=["pip", "uv"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path, python_with_pip: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, request.param, python_with_pip)
    with made.index:
        yield made
    made.leave()


whichever = pytest.mark.parametrize("nodes", ["uv"], indirect=True)
"""What is the same for each installer."""


def test_one_changed_requirement_costs_one_download_on_an_empty_node(nodes: Nodes) -> None:
    nodes.run("alpha", "beta==1", "gamma")
    assert nodes.said == "cold"
    assert nodes.index.fetched == ["alpha-1-py3-none-any.whl", "beta-1-py3-none-any.whl", "gamma-1.tar.gz"]
    nodes.next("alpha", "beta==2", "gamma")
    assert nodes.said == "restored generation 1"
    assert set(nodes.index.fetched) == {"beta-2-py3-none-any.whl"}
    for name in ("alpha/m29.py", "beta/data.bin", "gamma.py"):
        assert (nodes.target / name).exists()
    nodes.next("gamma", "beta==2", "alpha")
    assert nodes.said == "restored generation 2"
    assert all(path.startswith("/simple/") for path in nodes.index.asked), "it asks the index for metadata alone"


def test_no_login_and_no_cookie_is_in_what_others_get(nodes: Nodes) -> None:
    direct = nodes.index.url.replace("/simple/", "/files/")
    nodes.run(f"{direct}alpha-1-py3-none-any.whl", "beta==1", f"{direct}gamma-1.tar.gz")

    def look(caches: PackageCaches) -> None:
        assert caches.folder
        files = [path for path in caches.folder.rglob("*") if path.is_file()]
        assert any("beta" in str(path) or "http" in str(path) for path in files)
        assert not [path for path in files for secret in SECRETS if secret in path.read_bytes()]
        assert not [path for path in files if "simple-" in str(path) or path.name in (".lock", "config")]

    nodes.next("beta==1", "alpha", meanwhile=look)
    assert nodes.said == "restored generation 1"


@whichever
def test_what_cannot_be_read_costs_no_more_than_the_command_without_it(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run("alpha", "beta==1", "gamma")

    def lose(caches: PackageCaches) -> None:
        for path in (tmp_path / "store/blobs").rglob("*"):
            if path.is_file():
                path.write_bytes(b"\0" * path.stat().st_size)

    nodes.next("alpha", "beta==2", "gamma", meanwhile=lose)
    assert (nodes.target / "alpha/m29.py").read_bytes() == b"X = 29\n"
    assert nodes.said in ("none: not all of them could be read", "restored generation 1")


@whichever
def test_a_failed_command_leaves_nothing_and_others_of_another_owner_get_nothing(nodes: Nodes) -> None:
    nodes.run("alpha", "nothing-like-it", expect=1)
    nodes.next("alpha", "beta==1")
    assert nodes.said == "cold"
    nodes.next("alpha", "beta==2", owner=(12345, 12345))
    assert nodes.said == "cold"
    nodes.next("alpha", "beta==2", salt="x")
    assert nodes.said == "cold: missed because salt changed: none -> x"


def test_where_the_job_says_itself_where_its_cache_is_it_is_left_alone(nodes: Nodes, tmp_path: Path) -> None:
    nodes.environ |= {f"{nodes.kind.upper()}_CACHE_DIR": str(tmp_path / "own")}
    nodes.run("alpha")
    assert any((tmp_path / "own").iterdir())
    assert len(snapshots.names(open_store(nodes.store))) == 1, "there is more than the environment"


@whichever
def test_a_cache_folder_that_cannot_be_is_no_reason_not_to_start(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generation, "restore", full)
    nodes.run("alpha")
    assert nodes.said.startswith("none: ")


@whichever
def test_the_command_waits_for_no_capture_and_nothing_stays_mounted(nodes: Nodes, tmp_path: Path) -> None:
    own = {name: str(tmp_path / name) for name in ("cache", "state")}
    environ = {**nodes.environ, "BOOTSEER_STORE": nodes.store}
    environ |= {f"BOOTSEER_{name.upper()}_DIR": path for name, path in own.items()}
    nodes.configs.append(Config(cache_dir=own["cache"], state_dir=own["state"]))
    argv = [sys.executable, "-m", "bootseer.cli.main", "env", "run", "--json", "--cache", nodes.kind]
    argv += ["--target", str(nodes.target), "--", *nodes.command.split(), "--target", str(nodes.target), "alpha"]
    answer = json.loads(subprocess.run(argv, env=environ, capture_output=True, check=True).stdout)
    assert (answer["outcome"], answer["caches"]) == ("ran-and-publishing", "cold")
    caches = tmp_path / "cache/caches"
    until(
        lambda: len(snapshots.names(open_store(nodes.store))) == 2, 60, "the environment's and the caches' publication"
    )
    until(lambda: not mounts.below(caches), 30, f"{caches}: that nothing is mounted there")
    nodes.next("beta==1", "alpha")
    assert nodes.said == "restored generation 1"
    assert "alpha-1-py3-none-any.whl" not in nodes.index.fetched


def archive(folder: Path, name: str, **files: str) -> None:
    """A package that uv has unpacked, and its pointer."""
    texts = {f"wheels-v7/pypi/{name.lower()}/1-py3-none-any.http": f"https://host/x.whl {name}"}
    for path, text in {**texts, **{f"archive-v0/{name}/x/{inner}.py": text for inner, text in files.items()}}.items():
        (folder / "uv" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "uv" / path).write_text(text)


def handed_on(tmp_path: Path, most_bytes: int, *archives: tuple[str, dict[str, str]]) -> set[str]:
    """The files of archives that the next node gets."""
    cache = Cache(group="packages", path="/run/bootseer/packages", owner=(0, 0), most_bytes=most_bytes)
    for number in range(2):
        config = Config(cache_dir=str(tmp_path / f"c{number}"), state_dir=str(tmp_path / f"s{number}"))
        held = generation.restore(cache, str(tmp_path / "store"), config)
        if not number:
            for name, files in archives:
                archive(held.folder, name, **files)
            publication = held.capture(last=True)
            assert publication
            assert publication.wait(60) == (True, "")
        found = {str(path.relative_to(held.folder / "uv")) for path in (held.folder / "uv").glob("archive-v0/**/*.py")}
        empty = [path for path in (held.folder / "uv").glob("archive-v0/*") if not any(path.rglob("*.py"))]
        held.close()
    assert not empty, "uv would take it for a package without files"
    return found


def test_a_package_stays_or_goes_as_a_whole(tmp_path: Path) -> None:
    three = dict.fromkeys("abc", "x" * 100_000)
    found = handed_on(tmp_path, 500_000, ("One", three), ("Two", three))
    assert found == {f"archive-v0/One/x/{name}.py" for name in "abc"}


def test_a_package_with_a_secret_is_left_out_as_a_whole(tmp_path: Path) -> None:
    secret = {"a": "X = 'https://deploy:hunter2x@git.corp/x'\n", "b": "Y = 1\n"}
    found = handed_on(tmp_path, 1 << 30, ("One", {"a": "X = 1\n"}), ("Two", secret))
    assert found == {"archive-v0/One/x/a.py"}
