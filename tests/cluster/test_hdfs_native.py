"""Files in encryption zones, which go through ``hdfs-native``: a DataNode has their bytes only encrypted."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError
from bootseer.hdfs.namenode import NameNode
from bootseer.stripefs import open_fs
from support.hadoop import HadoopCluster
from support.kms import KEY, Kms

pytestmark = pytest.mark.hdfs
DATA = os.urandom(9 << 20)


@pytest.fixture(scope="module")
def kms() -> Iterator[Kms]:
    with Kms() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, kms: Kms) -> Iterator[HadoopCluster]:
    settings = {"hadoop.security.key.provider.path": kms.url}
    with HadoopCluster(tmp_path_factory.mktemp("hdfs") / "root", 3, settings=settings) as running:
        NameNode.connect(running.url).mkdirs("/zone")
        running.make_encrypted("/zone", KEY)
        yield running


@pytest.fixture
def site(cluster: HadoopCluster, kms: Kms, tmp_path: Path, monkeypatch) -> Path:
    """Settings of a site that names its key server."""
    rows = f"<property><name>hadoop.security.key.provider.path</name><value>{kms.url}</value></property>"
    (tmp_path / "core-site.xml").write_text(f"<configuration>{rows}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    return tmp_path


def test_files_in_an_encryption_zone_are_read_and_written(cluster, site, tmp_path):
    """Hadoop's own client agrees on the bytes, both ways."""
    fs = open_fs(f"{cluster.url}/zone")
    for name, size in (("plain", 1000), ("striped", len(DATA))):
        with fs.create(name) as out:
            out.write(DATA[:size])
        with fs.open(name) as file:
            back = bytearray(size)
            file.readinto(0, memoryview(back))
        assert back == DATA[:size]
    cluster.fs_shell(["-get", "/zone/plain", str(tmp_path / "got")])
    assert (tmp_path / "got").read_bytes() == DATA[:1000]
    (tmp_path / "put").write_bytes(DATA[:5000])
    cluster.fs_shell(["-put", str(tmp_path / "put"), "/zone/theirs"])
    with fs.open("theirs") as file:
        back = bytearray(5000)
        file.readinto(0, memoryview(back))
    assert back == DATA[:5000]


def test_without_the_key_server_of_a_zone_it_is_one_line(cluster, site):
    (site / "core-site.xml").write_text("<configuration/>")
    fs = open_fs(f"{cluster.url}/zone")
    with pytest.raises(BootseerError, match=r"hadoop\.security\.key\.provider\.path") as caught, fs.create("no") as out:
        out.write(DATA)
    assert "\n" not in str(caught.value)
