"""The replicas of a running HDFS on its disks: found by block, damaged, and moved from one DataNode to another."""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

from crc32c import crc32c
from google.protobuf.message import Message

from bootseer.errors import BootseerError, UnavailableError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import DataNode
from support.hadoop import HadoopCluster
from support.waits import until
from support.webhdfs import BlockAt, Holder

_META_HEADER = 7
"""Of a ``.meta`` file: version (2 bytes), checksum type (1), bytes per checksum (4); then a CRC for each piece."""
_CRC32C = 2
_TRANSFER_VERSION, _REPLACE_BLOCK = 28, 83
_SUCCESS, _IN_PROGRESS = 0, 12


def datanodes(cluster: HadoopCluster) -> list[DataNode]:
    """All DataNodes that run, in the order of ``cluster.addresses``, as the NameNode tells of them."""
    namenode, path = NameNode.connect(cluster.url), f"/datanodes-{uuid.uuid4().hex}"
    count = sum(daemon.alive() for daemon in cluster.datanodes)
    with FileOutput(namenode, path, replication=count) as out:
        out.write(b"x")
    until(lambda: len(namenode.blocks(path).blocks[0].nodes) == count, 30.0, "a replica on each DataNode")
    (block,) = namenode.blocks(path).blocks
    namenode.delete(path)
    return sorted(block.nodes, key=lambda node: cluster.index_of(node.address))


class Replicas:
    """The replicas that the DataNodes of ``cluster`` have on disk."""

    def __init__(self, cluster: HadoopCluster) -> None:
        self._cluster = cluster

    def files(self, block: BlockAt) -> dict[int, Path]:
        """File of the block's data by DataNode, of those that have all of it."""
        found = {}
        for index in range(len(self._cluster.addresses)):
            for path in self._cluster.root.glob(f"dn{index}/current/BP-*/current/finalized/*/*/blk_{block.id}"):
                found[index] = path
        return found

    def blocks(self, path: str, *, replicas: int = 1) -> list[BlockAt]:
        """The blocks of a file, once each has so many replicas and the NameNode knows of just those on disk."""
        blocks: list[BlockAt] = []

        def known() -> bool:
            blocks[:] = self._cluster.web.blocks(path)
            places = [(set(self.holders(block)), self.files(block).keys()) for block in blocks]
            return all(len(told) >= replicas and told == there for told, there in places)

        until(known, 20.0, f"the {replicas} replicas of each block of {path}", step=0.1)
        return blocks

    def holders(self, block: BlockAt) -> list[int]:
        """The DataNodes that the NameNode named when it was asked for ``block``, in its order."""
        return [self._cluster.index_of(f"{holder.address}:{holder.transfer_port}") for holder in block.holders]

    # -- damage ---------------------------------------------------------------------------------------------------

    def damage(self, block: BlockAt, index: int, offset: int, *, unseen: bool = False) -> None:
        """Change the byte at ``offset`` in DataNode ``index``'s replica, as a bad disk does.

        ``unseen``: HDFS's own checksum is made to fit, as when the bytes were wrong before HDFS had them. Then only a
        checksum above HDFS can tell. (For CRC-32C, which is HDFS's default.)
        """
        path = self.files(block)[index]
        with open(path, "r+b", buffering=0) as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 0x40]))
        if unseen:
            self._mend_checksum(path, block.generation, offset)

    def _mend_checksum(self, path: Path, generation: int, offset: int) -> None:
        with open(path.with_name(f"{path.name}_{generation}.meta"), "r+b", buffering=0) as meta:
            header = meta.read(_META_HEADER)
            kind, piece = header[2], int.from_bytes(header[3:7], "big")
            if kind != _CRC32C:
                raise BootseerError(f"{path} has checksums of type {kind}, not CRC-32C")
            with open(path, "rb") as file:
                file.seek(offset // piece * piece)
                crc = crc32c(file.read(piece))
            meta.seek(_META_HEADER + offset // piece * 4)
            meta.write(crc.to_bytes(4, "big"))

    def reported(self, block: BlockAt) -> set[int]:
        """The DataNodes whose replica of ``block`` somebody reported to the NameNode as damaged, since it started.

        From its log: its count of damaged blocks falls again as soon as a good replica was copied.
        """
        text = self._cluster.namenode.log.read_text(errors="replace")
        lines = re.findall(rf"addToCorruptReplicasMap: blk_{block.id}\S* added as corrupt on (\S+)", text)
        return {self._cluster.index_of(line) for line in lines}

    # -- moving ---------------------------------------------------------------------------------------------------

    def move(self, block: BlockAt, source: int, target: int) -> None:
        """Have DataNode ``target`` copy the block from ``source``, whose replica then goes: what the balancer does.

        Returns when the replica of ``source`` has gone from its disk: who still reads from there finds nothing.
        """
        giver = dict(zip(self.holders(block), block.holders, strict=True))[source]
        request = _replace_block(block, giver)
        host, _, port = self._cluster.addresses[target].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as sock, sock.makefile("rb") as answers:
            sock.sendall(_TRANSFER_VERSION.to_bytes(2, "big") + bytes([_REPLACE_BLOCK]) + _delimited(request))
            while True:
                answer = wire.BlockOpResponse.FromString(answers.read(_varint(answers.read)))
                if answer.status == _SUCCESS:
                    break
                if answer.status != _IN_PROGRESS:
                    raise BootseerError(f"block {block.id} was not moved: {answer.message or answer.status}")
        gone = f"the end of block {block.id} on DataNode {source}"
        until(lambda: source not in self.files(block), 30.0, gone, step=0.05)


def _replace_block(block: BlockAt, giver: Holder) -> bytes:
    """Hadoop's OpReplaceBlockProto: 1 header, 2 id of the DataNode whose replica may go, 3 whom to copy from."""
    header = wire.BaseHeader(
        block=wire.Block(pool=block.pool, id=block.id, generation=block.generation, length=block.length)
    )
    source = wire.NodeInfo(
        id=wire.NodeId(
            address=giver.address,
            hostname=giver.hostname,
            uuid=giver.uuid,
            transfer_port=giver.transfer_port,
            info_port=giver.info_port,
            ipc_port=giver.ipc_port,
        )
    )
    return _field(1, header) + _field(2, giver.uuid.encode()) + _field(3, source)


def _field(number: int, value: Message | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.SerializeToString()
    return bytes([number << 3 | 2]) + _delimited(data)


def _delimited(data: bytes) -> bytes:
    length, head = len(data), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + data


def _varint(read: Callable[[int], bytes]) -> int:
    value = shift = 0
    while True:
        byte = read(1)
        if not byte:
            raise UnavailableError("a DataNode closed the connection while it moved a block")
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if not byte[0] & 0x80:
            return value
