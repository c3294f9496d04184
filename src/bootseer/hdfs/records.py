"""Blocks, and the DataNodes that have their replicas, as a NameNode tells of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import NamedTuple

from bootseer.hdfs import nameservice
from bootseer.hdfs.dial import host_port
from bootseer.hdfs.framing import text
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.sasl.transfer import OPEN, Guard

# of Hadoop's own policies the NameNode tells the number only (SystemErasureCodingPolicies)
_POLICIES = ("", "RS-6-3-1024k", "RS-3-2-1024k", "RS-LEGACY-6-3-1024k", "XOR-2-1-1024k", "RS-10-4-1024k")


def erasure_name(policy: wire.ErasurePolicy) -> str:
    """The name of an erasure coding policy; "" for the one that means replication, which has number 0."""
    if policy.name or policy.id >= len(_POLICIES):
        return "" if policy.name == "REPLICATION" else text(policy.name) or f"policy {policy.id}"
    return _POLICIES[policy.id]


@dataclass(frozen=True, slots=True)
class FileStatus:
    """One file or folder. ``path`` is absolute; ``size`` in bytes (0 for a folder); ``mtime_ms`` since 1970.

    ``file_id`` names this very file as long as it exists, also after a rename; one that replaces it has another.
    ``erasure``: the name of its erasure coding policy, or of the policy that new files in this folder get; else "".
    ``encrypted``: in an encryption zone. ``acl``: it has an access control list, and the group bits of ``mode`` are
    only the mask of that. What ``hdfs-native`` does not tell is 0 or ""."""

    path: str
    size: int
    is_dir: bool
    mtime_ms: int
    file_id: int = 0
    replication: int = 0
    block_size: int = 0
    erasure: str = ""
    encrypted: bool = False
    owner: str = ""
    group: str = ""
    mode: int = 0
    acl: bool = False

    @property
    def version(self) -> str:
        """Tells a file from one that replaced it, or that it was before a change."""
        return f"{self.file_id}-{self.size}-{self.mtime_ms}"

    @classmethod
    def of(cls, message: wire.FileStatus, path: str) -> FileStatus:
        return cls(
            path,
            message.length,
            message.kind == 1,
            message.mtime,
            message.file_id,
            message.replication,
            message.block_size,
            erasure_name(message.erasure) if message.HasField("erasure") else "",
            message.HasField("encryption"),
            text(message.owner),
            text(message.group),
            message.permission.mode,
            bool(message.flags & 1),
        )


@dataclass(frozen=True, slots=True)
class DataNode:
    """One DataNode; two are equal when their ``uuid`` is. ``message`` is what the NameNode said of it. ``storage_type``
    and ``storage_id``: of its disk with the replica, when it is one of a `Located`."""

    uuid: str
    host: str = field(compare=False)
    port: int = field(compare=False)
    rack: str = field(compare=False, default="")
    message: wire.NodeInfo = field(compare=False, repr=False, default_factory=wire.NodeInfo)
    storage_type: int = field(compare=False, default=1)
    storage_id: str = field(compare=False, default="")

    @property
    def address(self) -> str:
        """Where it transfers data: ``host:port``, with brackets around an IPv6 address."""
        return host_port((self.host, self.port))

    @classmethod
    def of(cls, message: wire.NodeInfo, storage_type: int = 1, storage_id: str = "") -> DataNode:
        """`ConfigError` for a damaged site file, which may say that DataNodes are reached by their names."""
        id = message.id
        host = text(id.hostname if nameservice.by_hostname() and id.hostname else id.address)
        rack, storage_id = text(message.location), text(storage_id)
        return cls(text(id.uuid), host, id.transfer_port, rack, message, storage_type, storage_id)


class Block(NamedTuple):
    """A block's identity and length in bytes."""

    pool: str
    id: int
    generation: int
    length: int

    @classmethod
    def of(cls, message: wire.Block) -> Block:
        return cls(text(message.pool), message.id, message.generation, message.length)

    @property
    def message(self) -> wire.Block:
        return wire.Block(pool=self.pool, id=self.id, generation=self.generation, length=self.length)


@dataclass(frozen=True, slots=True)
class Located:
    """A block of a file: where it begins in the file, and the DataNodes with a replica, nearest first. ``token`` lets
    its holder read or write the block (empty where there are none). ``guard``: how connections to its DataNodes
    begin."""

    block: Block
    offset: int
    nodes: tuple[DataNode, ...]
    token: wire.Token = field(repr=False)  # it has a password
    guard: Guard = field(repr=False, compare=False, default=OPEN)

    @classmethod
    def of(cls, message: wire.LocatedBlock, guard: Guard = OPEN) -> Located:
        storages = chain(message.storage_types, repeat(1)), chain(message.storage_ids, repeat(""))
        nodes = tuple(map(DataNode.of, message.nodes, *storages))
        return cls(Block.of(message.block), message.offset, nodes, message.token, guard)

    @property
    def message(self) -> wire.LocatedBlock:
        """As a report of bad blocks wants it."""
        return wire.LocatedBlock(
            block=self.block.message,
            offset=self.offset,
            nodes=[node.message for node in self.nodes],
            corrupt=False,
            token=self.token,
            storage_types=[node.storage_type for node in self.nodes],
            storage_ids=storage_ids(self.nodes),
        )

    def picked(self, order: Iterable[int]) -> Located:
        """The same block, with only the DataNodes at the positions ``order``, in that order."""
        return replace(self, nodes=tuple(self.nodes[i] for i in order))


def storage_ids(nodes: Iterable[DataNode]) -> list[str]:
    """Those that are known: of all, or of none."""
    return [node.storage_id for node in nodes if node.storage_id]


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """All blocks of one file in order. ``length``: bytes of the file, without a last block that is being written.
    ``erasure``: name of its erasure coding policy, "" for replicated files. ``encrypted``: in an encryption zone."""

    length: int
    blocks: tuple[Located, ...]
    under_construction: bool = False
    erasure: str = ""
    encrypted: bool = False

    @classmethod
    def of(cls, message: wire.LocatedBlocks, guard: Guard = OPEN) -> FileBlocks:
        blocks = [Located.of(block, guard) for block in message.blocks]
        return cls(
            message.length,
            tuple(blocks),
            message.under_construction,
            erasure_name(message.erasure) if message.HasField("erasure") else "",
            message.HasField("encryption"),
        )
