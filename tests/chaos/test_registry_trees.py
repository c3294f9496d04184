"""A tree that comes from a registry whose tokens end, which goes away and which damages what it keeps."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer import image
from bootseer.errors import BootseerError
from bootseer.oci import uploads
from support.crowd import Crowd, Tally, files_of
from support.layouts import push
from support.node import Node, alive, damage
from support.registry import PASSWORD, USER, DockerRegistry
from support.registryproxy import RegistryProxy
from support.tokens import TokenServer
from support.torture import Site
from support.waits import until

pytestmark = [pytest.mark.root, pytest.mark.registry]


@pytest.fixture(autouse=True)
def login(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Logs in to a registry, in a docker configuration of this test's own."""
    folder = place / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))

    def log_in(address: str, password: str = PASSWORD) -> None:
        auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
        path = folder / "config.json"
        known = json.loads(path.read_text())["auths"] if path.exists() else {}
        path.write_text(json.dumps({"auths": {**known, address: {"auth": auth}}}))

    return log_in


@pytest.fixture
def nodes(place: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def new(store: str, tree: str, *, rate: float = 0.0) -> Node:
        made.append(Node(place / f"node{len(made)}", store, tree, rate=rate))
        return made[-1]

    yield new
    for node in made:
        node.close()


def put(site: Site, address: str, place: Path) -> tuple[str, str]:
    """The image in the registry at ``address``, converted there: its store and tree."""
    push(site.ref, f"{address}/torture:v1")
    record = image.ensure(f"{address}/torture:v1", f"registry://{address}/torture", work_dir=place / "work").record
    return f"registry://{address}/torture@{record.image}", record.tree


def crowd_of(site: Site, node: Node, target: Path, *, passes: int = 1) -> Crowd:
    folder = node.folder / f"crowd-{time.monotonic_ns()}"
    return Crowd(target, site.reference, folder, files=files_of(site.reference), readers=4, drop=0.5, passes=passes)


def right(crowd: Crowd, found: Tally) -> None:
    assert (found.mismatches, found.zeros, found.hangs) == (0, 0, 0), crowd.findings


def test_tokens_that_end_soon(small: Site, nodes: Callable[..., Node], place: Path, login: Callable[..., None]) -> None:
    """Two seconds, while the tree needs six to arrive; the fetcher that renews them is killed twice meanwhile."""
    with (
        TokenServer(place / "tokens", users={USER: PASSWORD}) as tokens,
        DockerRegistry(tokens=tokens) as registry,
    ):
        login(registry.address)
        store, tree = put(small, registry.address, place)
        tokens.lifetime, before = 2.0, len(tokens.issued)
        node = nodes(store, tree, rate=1.2e6)
        made = node.mount()
        with crowd_of(small, node, made.target) as crowd:
            for _ in range(2):
                time.sleep(1.5)
                pid = made.status().fetcher_pid
                os.kill(pid, signal.SIGKILL)
                until(lambda pid=pid: not alive(pid) and made.status().fetcher_pid != pid, 20, "another fetcher")  # type: ignore[misc]
            found = crowd.join(60)
        right(crowd, found)
        assert found.errors == 0, crowd.findings
        assert len(tokens.issued) - before >= 4
        node.close()


def test_a_login_that_ends_and_is_renewed_while_blocks_are_lazy(
    small: Site, nodes: Callable[..., Node], place: Path, login: Callable[..., None]
) -> None:
    """As those of clouds, which are good for some hours."""
    with (
        TokenServer(place / "tokens", users={USER: PASSWORD}) as tokens,
        DockerRegistry(tokens=tokens) as registry,
    ):
        login(registry.address)
        store, tree = put(small, registry.address, place)
        tokens.lifetime = 2.0
        node = nodes(store, tree, rate=1.2e6)
        made = node.mount()
        with crowd_of(small, node, made.target) as crowd:
            tokens.users[USER] = "another"
            until(lambda: "refuses the login" in node.log, 20, "the end of the login")
            time.sleep(2)
            login(registry.address, "another")
            found = crowd.join(60)
        right(crowd, found)
        assert found.errors == 0, crowd.findings
        node.close()


def test_tokens_that_end_during_a_conversion(
    small: Site, place: Path, login: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds, while each layer and each piece of an upload takes more than one."""
    monkeypatch.setattr(uploads, "PIECE", 1 << 20)
    with (
        TokenServer(place / "tokens", users={USER: PASSWORD}) as tokens,
        DockerRegistry(tokens=tokens) as registry,
    ):
        login(registry.address)
        push(small.ref, f"{registry.address}/torture:v1")
        tokens.lifetime, before = 2.0, len(tokens.issued)
        monkeypatch.setenv(
            "BOOTSEER_FAULTS", "image.convert.after-layer=sleep:1.2,registry.upload.after-piece=sleep:1.2"
        )
        _, tree = put(small, registry.address, place)
        assert tree == small.tree
        assert len(tokens.issued) - before >= 4


def test_outages(small: Site, nodes: Callable[..., Node], place: Path) -> None:
    with DockerRegistry() as registry, RegistryProxy(registry.address) as proxy:
        store, tree = put(small, proxy.address, place)
        node = nodes(store, tree, rate=3e6)
        proxy.down = True
        with pytest.raises(BootseerError):
            node.mount()
        assert node.left() == []
        proxy.down = False
        made = node.mount()
        with crowd_of(small, node, made.target) as crowd:
            for _ in range(3):
                time.sleep(0.3)
                proxy.down = True
                time.sleep(0.7)
                proxy.down = False
            found = crowd.join(60)
        right(crowd, found)
        assert found.errors == 0, crowd.findings
        node.close()


@pytest.mark.parametrize("how", ["flip", pytest.param("truncate", marks=pytest.mark.soak)])
def test_damaged_blobs(small: Site, nodes: Callable[..., Node], place: Path, how: str) -> None:
    rand = random.Random(how)
    with DockerRegistry(root=place / "registry") as registry:
        store, tree = put(small, registry.address, place)
        node = nodes(store, tree)
        kept = {path: path.read_bytes() for path in (place / "registry").rglob("blobs/sha256/*/*/data")}
        large = [path for path, raw in kept.items() if len(raw) > 200_000]
        assert len(large) >= 4
        made = node.mount(demand_deadline=8.0)
        for path in large:
            raw = kept[path]
            if how == "truncate":  # a little: a registry breaks off such answers, and each read waits for its deadline
                path.write_bytes(raw[: rand.randrange(len(raw) * 15 // 16, len(raw))])
            else:
                for _ in range(5):
                    damage(path, how, rand)
        with crowd_of(small, node, made.target) as crowd:
            found = crowd.join(60)
        right(crowd, found)
        assert found.errors > 0
        made.unmount()
        node.forget_cache()
        for path, raw in kept.items():
            path.write_bytes(raw)
        for path in kept.keys() - set(large):
            damage(path, how, rand, unit=64)
        with pytest.raises(BootseerError):
            node.mount()
        assert node.left() == []
        for path, raw in kept.items():
            path.write_bytes(raw)
        made = node.mount()
        with crowd_of(small, node, made.target) as crowd:
            found = crowd.join(60)
        right(crowd, found)
        assert found.errors == 0
        node.close()


@pytest.mark.parametrize("part", ["blocks", "small parts"])
def test_a_mirror_that_lies(
    small: Site,
    nodes: Callable[..., Node],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
) -> None:
    """Its ranges cannot be checked by the registry's digests, but by those of the tree; then the registry is asked."""
    with DockerRegistry() as registry, DockerRegistry(root=place / "mirror") as mirror:
        store, tree = put(small, registry.address, place)
        oci_store, again = put(small, mirror.address, place)
        assert again == tree != oci_store
        for path in (place / "mirror").rglob("blobs/sha256/*/*/data"):
            if (path.stat().st_size > 200_000) == (part == "blocks"):
                for _ in range(5 if part == "blocks" else 1):
                    damage(path, "flip", random.Random(path.name))
        monkeypatch.setenv("BOOTSEER_REGISTRY_MIRRORS", f"{registry.address}=http://{mirror.address}")
        node = nodes(store, tree)
        made = node.mount()
        with crowd_of(small, node, made.target) as crowd:
            found = crowd.join(60)
        right(crowd, found)
        assert found.errors == 0, crowd.findings
        if part == "blocks":
            assert made.status().bad_blocks > 0
        else:
            assert "gives damaged bytes" in caplog.text + node.log  # of who mounts, of the server
        node.close()
