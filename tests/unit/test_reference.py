from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.config import Config
from bootseer.csi.volumes import PodVolume, Volumes
from bootseer.errors import ConfigError, NotFoundError, PrivilegeError, UnsupportedError
from bootseer.kernel.parts import Part
from bootseer.node.daemon import Daemon
from bootseer.node.protocol import NodeRequest
from bootseer.oci import Reference
from bootseer.oci.credentials import Logins
from bootseer.oci.names import chosen
from bootseer.slurm import comment

D = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "registry", "name", "tag", "digest"),
    [
        ("127.0.0.1:5000/team/torch:2.5", "127.0.0.1:5000", "team/torch", "2.5", ""),
        ("localhost/x", "localhost", "x", "latest", ""),
        ("[::1]:5000/x:v1", "[::1]:5000", "x", "v1", ""),
        (f"r.example.org/a/b-c_d.e@{D}", "r.example.org", "a/b-c_d.e", "", D),
        (f"r.example.org/a:t@{D}", "r.example.org", "a", "t", D),
        ("python:3-slim", "docker.io", "library/python", "3-slim", ""),
        ("docker.io/python", "docker.io", "library/python", "latest", ""),
        ("team/busybox", "docker.io", "team/busybox", "latest", ""),
        ("index.docker.io/library/busybox:1", "docker.io", "library/busybox", "1", ""),
        ("index.docker.io/busybox", "docker.io", "library/busybox", "latest", ""),
        ("docker://busybox", "docker.io", "library/busybox", "latest", ""),
        ("docker://docker.io/library/python:3-slim", "docker.io", "library/python", "3-slim", ""),
        ("docker://r.io:5000/a/b:v1", "r.io:5000", "a/b", "v1", ""),
        ("dir:v1", "docker.io", "library/dir", "v1", ""),
    ],
)
def test_registry_references(text: str, registry: str, name: str, tag: str, digest: str) -> None:
    ref = Reference.parse(text)
    assert (ref.registry, ref.name, ref.tag, ref.digest, ref.layout) == (registry, name, tag, digest, "")
    assert Reference.parse(str(ref)) == ref


@pytest.mark.parametrize(
    ("text", "layout", "archive", "tag"),
    [
        ("oci:/a/b:v1", "/a/b", "", "v1"),
        ("oci:/a/b", "/a/b", "", ""),
        ("oci:/a/b:host:5000/team/x:v1", "/a/b", "", "host:5000/team/x:v1"),
        ("oci:/a:x/b:v2", "/a", "", "x/b:v2"),
        ("docker-archive:/a/b.tar", "", "/a/b.tar", ""),
        ("docker-archive:/a/b.tar:v1", "", "/a/b.tar", "v1"),
        ("oci-archive:/a/b.tar", "", "/a/b.tar", ""),
        ("oci-archive:/a/b.tar:host:5000/team/x:v1", "", "/a/b.tar", "host:5000/team/x:v1"),
        ("docker-archive:/a/b.tar:host:5000/team/x:v1", "", "/a/b.tar", "host:5000/team/x:v1"),
    ],
)
def test_references_of_files(text: str, layout: str, archive: str, tag: str) -> None:
    ref = Reference.parse(text)
    assert (ref.layout, ref.archive, ref.tag, ref.registry) == (layout, archive, tag, "")
    assert Reference.parse(str(ref)) == ref


@pytest.mark.parametrize("scheme", ["oci", "docker-archive", "oci-archive"])
def test_a_name_means_the_same_whatever_files_there_are(scheme: str, tmp_path: Path) -> None:
    text = f"{scheme}:{tmp_path}/x.tar:team/x:v1"
    before = Reference.parse(text)
    for name in ("x.tar", "x.tar:team", "x.tar:team/x:v1"):
        (tmp_path / name).mkdir(parents=True)
        assert Reference.parse(text) == before
    assert (before.layout or before.archive, before.tag) == (f"{tmp_path}/x.tar", "team/x:v1")


@pytest.mark.parametrize(
    "text",
    ["", "Busybox", "-x", "r.io/", "r.io/Upper", "r.io/a:", "r.io/a:bad tag", "r.io/../a", "oci:",
     "oci:/a:ba d", "r.io/a@sha256:12", "r.io/a@md5:" + "a" * 64, "r.io//a", "r io/a", "r.io/a:b/c",
     "docker-archive:", "docker-archive:/a:", "oci-archive:", "oci-archive:/a:ba d", "docker://",
     "docker://dir:/a", "docker://docker://x", "sha256:00", "sha256:" + "a" * 64, "sha512:ab", "docker://sha256:00"],
)  # fmt: skip
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(ConfigError):
        Reference.parse(text)


@pytest.mark.parametrize("form", ["http://{}r.io/a", "http://{}r.io/a@sha256:12", "docker://{}r.io/A", "oci:/a:{}b d"])
def test_a_login_in_what_is_no_reference_is_told_nobody(form: str) -> None:
    """Red before: Slurm's hooks, the node daemon and the CSI driver wrote it into the log of the node."""
    with pytest.raises(ConfigError) as found:
        Reference.parse(form.format("https://user:geheim@" if "oci" in form else "user:geheim@"))
    assert "geheim" not in str(found.value)


@pytest.mark.parametrize(
    ("registry", "plain"),
    [
        ("127.0.0.1:5000", True),
        ("localhost:1", True),
        ("127.8.8.8", True),
        ("10.1.2.3", False),
        ("10.1.2.3:5000", True),
        ("10.1.2.3:5001", False),
        ("plain.example.org", True),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org:80", False),
        ("0.0.0.0:5000", False),
        ("169.254.1.1:5000", False),
        ("[::1]:5000", True),
        ("192.168.0.9:80", False),
        ("[fe80::1]:5000", False),
        ("r.example.org", False),
        ("8.8.8.8:5000", False),
    ],
)
def test_plain_http_is_for_loopback_and_what_is_named(registry: str, plain: bool) -> None:
    named = ("10.1.2.3:5000", "plain.example.org")
    assert Reference.parse(f"{registry}/x").plain_http(named) is plain


@pytest.mark.parametrize("text", ["x.tar", "x.tgz", "x.tar.gz", "x.tar.xz", "x.tar.zst", "./x", "/x"])
def test_paths_are_no_images_of_docker_io(text: str) -> None:
    with pytest.raises(ConfigError, match="is a path"):
        Reference.parse(text)


@pytest.mark.parametrize("text", ["docker-daemon:x:v1", "dir:/a/b", "containers-storage:x:v1"])
def test_names_of_other_tools_are_no_images_of_docker_io(text: str) -> None:
    with pytest.raises(ConfigError, match="is not known"):
        Reference.parse(text)


@pytest.mark.parametrize("text", ["oci:/hung/x", "docker-archive:/hung/x:1", "oci-archive:/hung/x@sha256:1"])
def test_services_look_for_no_path_that_a_user_names(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lie where nothing answers, and then everybody would wait."""
    looked: list[str] = []
    monkeypatch.setattr("os.path.exists", looked.append)
    daemon: Any = object.__new__(Daemon)
    client, request = SimpleNamespace(uid=0, file=-1), NodeRequest(do="mount", version=1, ref=text)
    with pytest.raises(UnsupportedError, match="images of registries"):
        daemon._mount(client, request)
    with pytest.raises(ConfigError, match="no image in a registry"):
        daemon._digest(client, request)
    volumes = Volumes(Config(state_dir=str(tmp_path / "state")), Part())
    with pytest.raises(PrivilegeError, match="is in no registry"):
        volumes.publish("volume", tmp_path / "target", PodVolume("image", text, {}, "team", Logins(), "team/train"))
    with pytest.raises(ConfigError, match="is no image in a registry"):
        comment.parse(f"bootseer={text}")
    with pytest.raises(NotFoundError):
        chosen([((text,), 1)], "x:1", "an archive")
    assert not any("/hung" in str(path) for path in looked)
