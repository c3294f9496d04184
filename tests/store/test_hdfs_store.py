"""What only an HDFS store can meet: names in the way, a server that is not there. What every store promises:
`test_promises.py`."""

from __future__ import annotations

import uuid

import pytest

from bootseer.errors import BootseerError, ConfigError, NotWritableError, UnavailableError
from bootseer.hdfs import client as hdfs
from bootseer.hdfs.namenode import NameNode
from bootseer.objects import Store, open_store
from support import hadoop

pytestmark = pytest.mark.hdfs


@pytest.fixture
def store() -> Store:
    return open_store(f"{hadoop.shared().url}/{uuid.uuid4().hex}")


def test_names_in_the_way(store: Store) -> None:
    store.put("a/b", b"x")
    with pytest.raises(NotWritableError):
        store.put("a/b/c", b"x")
    with pytest.raises(NotWritableError):
        store.put("a", b"x", overwrite=True)


def test_an_object_gets_more_replicas_and_never_fewer(store: Store) -> None:
    store.put("k", b"x")
    client, path = NameNode.connect(store.url), f"{hdfs.split(store.url)[1]}/k"
    before = client.info(path).replication
    store.replicate("k", before + 1)
    store.replicate("k", 1)
    assert client.info(path).replication == before + 1
    with pytest.raises(BootseerError, match="replication"):
        store.replicate("k", 10_000)  # dfs.replication.max is 512
    assert store.get("k", most=1 << 30) == b"x"


def test_no_server_is_one_line_at_once() -> None:
    with pytest.raises(UnavailableError, match="connection refused"):
        open_store("hdfs://127.0.0.1:9/x").get("k", most=1 << 20)
    with pytest.raises(ConfigError, match="not an HDFS URL"):
        open_store("hdfs:///x")
