"""What a NameNode's messages become: where DataNodes are reached, and what is shown of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.backends.hdfs_rights import permissions
from bootseer.errors import ConfigError
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import DataNode, FileBlocks, FileStatus, Located


def info(address: str = "10.0.0.7", hostname: str = "dn7.example") -> wire.NodeInfo:
    id = wire.NodeId(address=address, hostname=hostname, uuid="u", transfer_port=9866, info_port=9864, ipc_port=9867)
    return wire.NodeInfo(id=id, location="/rack")


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    return tmp_path / "hdfs-site.xml"


def use_hostnames(file: Path, value: str) -> None:
    key = "dfs.client.use.datanode.hostname"
    file.write_text(f"<configuration><property><name>{key}</name><value>{value}</value></property></configuration>")


@pytest.mark.parametrize(
    ("value", "address"), [("true", "dn7.example:9866"), (" TRUE\n", "dn7.example:9866"), ("false", "10.0.0.7:9866")]
)
def test_datanodes_are_reached_as_the_site_says(site, value, address):
    use_hostnames(site, value)
    assert DataNode.of(info()).address == address
    assert DataNode.of(info()).message.id.address == "10.0.0.7"
    located = wire.LocatedBlock(
        block=wire.Block(pool="p", id=1, generation=1, length=1),
        offset=0,
        nodes=[info()],
        corrupt=False,
        token=wire.Token(identifier=b"", password=b"", kind="", service=""),
    )
    assert Located.of(located).nodes[0].address == address


def test_without_a_site_file_by_address(site, monkeypatch):
    assert DataNode.of(info()).address == "10.0.0.7:9866"
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert DataNode.of(info()).address == "10.0.0.7:9866"


def test_without_a_name_by_address(site):
    use_hostnames(site, "true")
    assert DataNode.of(info(hostname="")).address == "10.0.0.7:9866"


def test_a_damaged_site_file_is_one_line(site):
    site.write_text("<configuration>")
    with pytest.raises(ConfigError, match=r"cannot read .*hdfs-site\.xml"):
        DataNode.of(info())


def test_an_ipv6_address_has_brackets():
    assert DataNode("u", "fd00::7", 9866).address == "[fd00::7]:9866"


def test_tokens_are_not_shown():
    token = wire.Token(identifier=b"who", password=b"secret", kind="BLOCK_TOKEN", service="")
    located = wire.LocatedBlock(
        block=wire.Block(pool="p", id=1, generation=1, length=1), offset=0, nodes=[info()], corrupt=False, token=token
    )
    found = Located.of(located)
    assert found.token == token
    assert "secret" not in repr(FileBlocks(1, (found,)))


@pytest.mark.parametrize("ids", [["s0", "s1"], [], ["s0", "s1", "one too many"]])
def test_the_disks_of_replicas_stay_with_their_datanodes(ids):
    token = wire.Token(identifier=b"", password=b"", kind="", service="")
    block = wire.Block(pool="p", id=1, generation=1, length=1)
    message = wire.LocatedBlock(
        block=block, offset=0, nodes=[info(), info("10.0.0.8")], corrupt=False, token=token, storage_types=[3, 1]
    )
    message.storage_ids.extend(ids)
    found = Located.of(message).picked([1, 0]).message
    assert [node.id.address for node in found.nodes] == ["10.0.0.8", "10.0.0.7"]
    assert (found.storage_types, found.storage_ids) == ([1, 3], ids[1::-1] if ids else [])


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"mode": 0o1754}, (65534, 0, 0o1754)),
        ({"mode": 0o640, "owner": "stranger-of-this-node"}, (0, 0, 0o040)),
        ({"mode": 0o775, "group": "strangers-of-this-node"}, (65534, 0, 0o705)),
        ({"mode": 0o775, "acl": True}, (65534, 0, 0o700)),
        ({"mode": 0o777, "encrypted": True}, (65534, 0, 0)),
    ],
)
def test_permissions_on_this_node_are_never_more_than_those_of_hdfs(said, found):
    status = FileStatus("/f", 1, False, 0, **{"owner": "nobody", "group": "root", **said})
    told = permissions(status)
    assert told is not None
    assert told[:3] == found


@pytest.mark.parametrize(("flags", "acl"), [(0, False), (1, True), (6, False), (7, True)])
def test_an_access_control_list_is_noticed(flags, acl):
    message = wire.FileStatus(kind=2, length=1, permission=wire.Permission(mode=0o640), flags=flags)
    assert FileStatus.of(message, "/f").acl is acl
