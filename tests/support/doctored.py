"""A small HDFS whose NameNode gives the answers that a test puts together, right or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import strategies as st

from bootseer.backends.cluster import HdfsBackend
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.proto import hdfs_pb2 as wire
from support.fakenamenode import Call, Server


def raw(data: bytes) -> Any:
    """As a message."""
    return SimpleNamespace(SerializeToString=lambda: data)


class Doctored:
    """``answers``, by method: a message, `raw` bytes, or the Java class of an error. ``asked``: methods in order."""

    answers: dict[str, Any]

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.server = Server(self.act)
        self.url = f"hdfs://127.0.0.1:{self.server.port}"
        self.backend = HdfsBackend(f"{self.url}/")

    def act(self, call: Call) -> None:
        self.asked.append(call.method)
        answer = self.answers.get(call.method, "org.apache.hadoop.ipc.RpcNoSuchMethodException")
        call.fail(answer, "said so") if isinstance(answer, str) else call.answer(answer)

    def alter(self, data: st.DataObject, methods: Sequence[str]) -> None:
        """Change some bytes of one answer."""
        method = data.draw(st.sampled_from(methods))
        message: Message = self.answers[method]
        answer = bytearray(message.SerializeToString())
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, len(answer)))
            cut, put = data.draw(st.sampled_from([(1, 1), (0, 1), (1, 0), (len(answer), 0)]))
            answer[place : place + cut] = data.draw(st.binary(min_size=put, max_size=put))
        self.answers[method] = raw(bytes(answer))

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Without settings of a site; its server ends with the context."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_TOKEN_FILE_LOCATION"):
                patch.delenv(name, raising=False)
            try:
                yield
            finally:
                NameNode.connect(self.url).close()
                self.server.close()


def defaults(block_size: int) -> wire.GetServerDefaultsResponse:
    found = wire.ServerDefaults(
        block_size=block_size, bytes_per_checksum=512, write_packet_size=65536, replication=1, file_buffer_size=4096
    )
    return wire.GetServerDefaultsResponse(defaults=found)


def info(port: int, uuid: str = "there", host: str = "127.0.0.1") -> wire.NodeInfo:
    id = wire.NodeId(address=host, hostname="host", uuid=uuid, transfer_port=port, info_port=1, ipc_port=2)
    return wire.NodeInfo(id=id, location="/rack")


def block(*nodes: wire.NodeInfo, number: int = 1, at: int = 0, length: int = 0, token: wire.Token) -> wire.LocatedBlock:
    made = wire.Block(pool="BP-1", id=number, generation=1, length=length)
    found = wire.LocatedBlock(block=made, offset=at, nodes=nodes, corrupt=False, token=token)
    found.storage_types.extend([1] * len(nodes))
    found.storage_ids.extend(["disk"] * len(nodes))
    return found


def status(length: int, block_size: int, replication: int = 1) -> wire.FileStatus:
    """Of the file ``a``."""
    mode = wire.Permission(mode=0o644)
    return wire.FileStatus(kind=2, path=b"a", length=length, permission=mode, owner="owner", group="group", mtime=1,
                           atime=1, replication=replication, block_size=block_size, file_id=5)  # fmt: skip
