"""What this project asks of a NameNode, typed: files and folders, blocks and their DataNodes, leases and pipelines.

The messages are in ``proto/hdfs.proto``; ``scripts/protos`` makes their module.

Every operation has a deadline in seconds (`DEADLINE` where its caller sets none) and is tried again until then while
the NameNode cannot be reached, restarts or is in safe mode; `bootseer.hdfs.rpc` says why that is right also for
operations that change something.

Errors of every operation: `NotFoundError`, `FileExistsError`, `NotWritableError` (permission; another name in the way;
the lease is lost), `FullError` (quota), `UnavailableError` (also when the deadline passes), `UnsupportedError`,
`PrivilegeError` (no ticket, no token), `DataError` for an answer that makes no sense. Their ``__cause__`` is the
`RemoteError` that the NameNode answered with, if it did.

Concurrency: any thread; see `bootseer.hdfs.rpc`. After a fork the child's objects are other clients, with other
leases.
"""

from __future__ import annotations

import builtins
import functools
import os
import pwd
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from google.protobuf.message import Message

from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError
from bootseer.hdfs import nameservice
from bootseer.hdfs.dial import remaining
from bootseer.hdfs.errors import is_below_a_file
from bootseer.hdfs.nameservice import split
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import Block, DataNode, FileBlocks, FileStatus, Located, storage_ids
from bootseer.hdfs.rpc import RpcClient
from bootseer.hdfs.sasl.login import VARIABLES
from bootseer.hdfs.sasl.transfer import Guard

M = TypeVar("M", bound=Message)

DEADLINE = 10.0
"""Seconds an operation may take unless its caller says otherwise."""

_PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_CREATE = 1
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755
_KEEP_DEFAULTS = 300.0
_SETTINGS = ("KRB5_CLIENT_KTNAME", "KRB5_CONFIG", "HADOOP_CONF_DIR", "HADOOP_HOME")

_known: dict[tuple[str, ...], NameNode] = {}


def login_user() -> tuple[str, str]:
    """Whom the NameNode is told we are, as (user, real user): ``HADOOP_USER_NAME``, else the login name. With
    ``HADOOP_PROXY_USER`` the operations are that user's and the other is the real user; else that is empty."""
    user = os.environ.get("HADOOP_USER_NAME", "")
    if not user:
        try:
            user = _name(os.geteuid())
        except KeyError:
            raise ConfigError(
                f"user id {os.geteuid()} has no name here, which HDFS wants to know", hint="set HADOOP_USER_NAME"
            ) from None
    proxied = os.environ.get("HADOOP_PROXY_USER", "")
    return (proxied, user) if proxied else (user, "")


def caller() -> tuple[str, ...]:
    """Who this process is for HDFS, as its environment says now: user, real user, place of tickets and tokens. Clients
    are kept by it, and none serves another one."""
    return *login_user(), *(os.environ.get(name, "") for name in (*VARIABLES, *_SETTINGS))


def _text(path: str) -> str:
    """``path`` as the NameNode can be asked for it. Names in HDFS are UTF-8; others cannot be spoken of."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path!r} is not UTF-8, as names in HDFS must be") from None
    return path


@functools.cache
def _name(uid: int) -> str:
    """Asked for once: it is wanted for each operation, and a directory service may have it."""
    return pwd.getpwuid(uid).pw_name


class NameNode:
    """The NameNode at one address, or of one name service, as one user. Use `connect`."""

    def __init__(self, addresses: Sequence[tuple[str, int]], user: str, real_user: str = "", *, name: str = "") -> None:
        self.user = user
        self._rpc = RpcClient(addresses, _PROTOCOL, name=name, user=user, real_user=real_user)
        self.url = self._rpc.name
        self._defaults: tuple[float, wire.ServerDefaults] | None = None
        self._guard = Guard(lambda: bool(self._rpc.login), self._data_key)

    @classmethod
    def connect(cls, url: str) -> NameNode:
        """The NameNode of ``hdfs://host:port/...`` or ``hdfs://service/...``; touches no network but DNS for a service.
        One object per process, address or service, and `caller`. Raises `ConfigError` for another URL, and for a
        service whose NameNodes the site's configuration does not tell."""
        base = split(url)[0]
        parts = urlsplit(base)
        host, port = parts.hostname or "", parts.port
        key = (base, *caller())
        known = _known.get(key)
        if known is None:
            # name services are case-sensitive, which hostname is not
            addresses = [(host, port)] if port is not None else nameservice.addresses(parts.netloc)
            made = cls(addresses, *key[1:3], name="" if port is not None else base)
            known = _known.setdefault(key, made)
        return known

    @property
    def client_name(self) -> str:
        """Who holds the leases of the files that this process writes; no two processes have the same."""
        return f"bootseer_{socket.gethostname()}_{os.getpid()}_{self._rpc.client_id.hex()[:12]}"

    def close(self) -> None:
        """Close idle connections; the object goes on working."""
        self._rpc.close()

    def _call(self, method: str, request: Message, answer: type[M], doing: str, deadline: float = DEADLINE) -> M:
        return self._rpc.call(method, request, answer, doing, deadline=deadline)

    # -- files and folders ----------------------------------------------------------------------------------------

    def info(self, path: str, *, deadline: float = DEADLINE) -> FileStatus | None:
        """One file or folder; None when there is none."""
        request = wire.GetFileInfoRequest(src=_text(path))
        try:
            found = self._call("getFileInfo", request, wire.GetFileInfoResponse, f"look up {path}", deadline)
        except NotFoundError:
            return None
        except BootseerError as exc:
            if is_below_a_file(exc):
                return None
            raise
        return FileStatus.of(found.status, path) if found.HasField("status") else None

    def list(self, path: str) -> builtins.list[FileStatus]:
        """What is in the folder ``path``, in the order of the names' bytes; a file lists itself. By pages of the
        NameNode (``dfs.ls.limit``, 1000), each with the deadline: entries that come or go meanwhile may be in it or
        not. Raises `NotFoundError` when there is no such folder."""
        return [status for page in self.pages(path) for status, _ in page]

    def pages(
        self, path: str, after: bytes = b"", *, located: bool = False
    ) -> Iterator[builtins.list[tuple[FileStatus, FileBlocks | None]]]:
        """`list`, a page at a time: of the names behind ``after``, and with ``located`` with the blocks of files."""
        while True:
            request = wire.GetListingRequest(src=_text(path), start_after=after, need_location=located)
            try:
                found = self._call("getListing", request, wire.GetListingResponse, f"list {path}")
            except BootseerError as exc:
                if is_below_a_file(exc):
                    raise NotFoundError(f"cannot list {path} on {self.url}: a part of it is a file") from None
                raise
            if not found.HasField("listing"):
                raise NotFoundError(f"cannot list {path} on {self.url}: no such file or folder")
            page: builtins.list[tuple[FileStatus, FileBlocks | None]] = []
            for entry in found.listing.entries:
                name = entry.path.decode("utf-8", "surrogateescape")
                if name in (".", "..") or "/" in name or "\0" in name:
                    raise DataError(f"{self.url} lists {path} with the name {name!r}, which none has")
                status = FileStatus.of(entry, f"{path.rstrip('/')}/{name}" if name else path)
                page.append(
                    (status, FileBlocks.of(entry.locations, self._guard) if entry.HasField("locations") else None)
                )
            yield page
            if not found.listing.remaining:
                return
            last = found.listing.entries[-1].path if found.listing.entries else b""
            if last <= after:
                raise DataError(f"{self.url} lists {path} without end")
            after = last

    def mkdirs(self, path: str, *, deadline: float = DEADLINE) -> None:
        """Make the folder and its parents; nothing to do when it exists."""
        request = wire.MkdirsRequest(src=_text(path), masked=wire.Permission(mode=_FOLDER_MODE), create_parent=True)
        self._call("mkdirs", request, wire.Result, f"make folder {path}", deadline)

    def rename(self, src: str, dst: str, overwrite: bool = False, *, deadline: float = DEADLINE) -> None:
        """One atomic step. `FileExistsError` when ``dst`` exists and may not be replaced."""
        request = wire.RenameRequest(src=_text(src), dst=_text(dst), overwrite=overwrite)
        self._call("rename2", request, wire.Empty, f"rename {src} to {dst}", deadline)

    def delete(self, path: str, recursive: bool = False, *, deadline: float = DEADLINE) -> bool:
        """Remove a file or folder; False when there was none."""
        request = wire.DeleteRequest(src=_text(path), recursive=recursive)
        return self._call("delete", request, wire.Result, f"delete {path}", deadline).result

    def set_permission(self, path: str, mode: int) -> None:
        """``mode``: the nine bits of chmod(1)."""
        request = wire.SetPermissionRequest(src=_text(path), permission=wire.Permission(mode=mode))
        self._call("setPermission", request, wire.Empty, f"change the mode of {path}")

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        """None: stays."""
        request = wire.SetOwnerRequest(src=_text(path), owner=owner, group=group)
        self._call("setOwner", request, wire.Empty, f"change the owner of {path}")

    def set_times(self, path: str, mtime_ms: int) -> None:
        """The modification time, in milliseconds since 1970; the time of access becomes the same."""
        request = wire.SetTimesRequest(src=_text(path), mtime=mtime_ms, atime=mtime_ms)
        self._call("setTimes", request, wire.Empty, f"change the time of {path}")

    def set_replication(self, path: str, replication: int) -> None:
        """Have that many replicas of each block; the NameNode makes or removes replicas later."""
        request = wire.SetReplicationRequest(src=_text(path), replication=replication)
        self._call("setReplication", request, wire.Result, f"change the replication of {path}")

    # -- reading --------------------------------------------------------------------------------------------------

    def blocks(self, path: str, offset: int = 0, length: int = 1 << 62) -> FileBlocks:
        """The blocks of a file that touch ``length`` bytes from ``offset``, and the DataNodes that have them."""
        request = wire.GetBlockLocationsRequest(src=_text(path), offset=offset, length=length)
        answer = wire.GetBlockLocationsResponse
        try:
            found = self._call("getBlockLocations", request, answer, f"locate {path}")
        except BootseerError as exc:
            if is_below_a_file(exc):
                raise NotFoundError(f"cannot locate {path} on {self.url}: a part of it is a file") from None
            raise
        if not found.HasField("locations"):
            raise NotFoundError(f"cannot locate {path} on {self.url}: no such file or folder")
        return FileBlocks.of(found.locations, self._guard)

    def report_bad_blocks(self, blocks: Sequence[Located]) -> None:
        """Tell of damaged replicas: those on ``nodes`` of each block. The NameNode replaces them from good ones."""
        request = wire.ReportBadBlocksRequest(blocks=[block.message for block in blocks])
        self._call("reportBadBlocks", request, wire.Empty, "report damaged replicas")

    # -- writing --------------------------------------------------------------------------------------------------

    def create(
        self,
        path: str,
        *,
        replication: int | None = None,
        block_size: int | None = None,
        mode: int | None = None,
        deadline: float = DEADLINE,
    ) -> FileStatus:
        """A new, empty file whose lease `client_name` holds; missing parent folders are made. In a folder with an
        erasure coding policy the file has that policy. `FileExistsError` when it exists."""
        if replication is None or block_size is None:
            defaults = self.defaults(deadline=deadline)
            replication, block_size = replication or defaults.replication, block_size or defaults.block_size
        request = wire.CreateRequest(
            src=_text(path),
            masked=wire.Permission(mode=_FILE_MODE if mode is None else mode),
            client=self.client_name,
            flags=_CREATE,
            create_parent=True,
            replication=replication,
            block_size=block_size,
        )
        found = self._call("create", request, wire.CreateResponse, f"create {path}", deadline)
        return FileStatus.of(found.status, path)

    def add_block(
        self,
        path: str,
        file_id: int,
        previous: Block | None = None,
        exclude: Iterable[DataNode] = (),
        wanted: Iterable[DataNode] = (),
        *,
        deadline: float = DEADLINE,
    ) -> Located:
        """A new last block, and where to write it: not on the DataNodes ``exclude``, and on those ``wanted`` that are
        alive and have room, however busy. ``previous``: the last block, with its final length."""
        request = wire.AddBlockRequest(
            src=_text(path),
            client=self.client_name,
            previous=previous.message if previous else None,
            exclude=[node.message for node in exclude],
            file_id=file_id,
            favoured=[node.address for node in wanted],
        )
        found = self._call("addBlock", request, wire.AddBlockResponse, f"add a block to {path}", deadline)
        return Located.of(found.block, self._guard)

    def additional_datanode(
        self,
        block: Block,
        path: str,
        nodes: Sequence[DataNode],
        exclude: Iterable[DataNode] = (),
        *,
        deadline: float = DEADLINE,
    ) -> Located:
        """The block, which ``nodes`` have and is being written, with one more DataNode, if there is one beside those to
        ``exclude``; its token lets ``nodes`` copy the block there."""
        request = wire.GetAdditionalDataNodeRequest(
            src=_text(path),
            block=block.message,
            existing=[node.message for node in nodes],
            exclude=[node.message for node in exclude],
            count=1,
            client=self.client_name,
            storage_ids=storage_ids(nodes),
        )
        doing = f"find another DataNode for block {block.id} of {path}"
        found = self._call("getAdditionalDatanode", request, wire.AddBlockResponse, doing, deadline)
        return Located.of(found.block, self._guard)

    def abandon_block(self, block: Block, path: str, file_id: int, *, deadline: float = DEADLINE) -> None:
        """Give up the last block, of which nothing was acknowledged."""
        request = wire.AbandonBlockRequest(
            block=block.message, src=_text(path), holder=self.client_name, file_id=file_id
        )
        self._call("abandonBlock", request, wire.Empty, f"abandon a block of {path}", deadline)

    def complete(self, path: str, file_id: int, last: Block | None, *, deadline: float = DEADLINE) -> bool:
        """Finish the file; ``last`` with its final length. False: too few DataNodes told of a block yet; ask again."""
        request = wire.CompleteRequest(
            src=_text(path), client=self.client_name, last=last.message if last else None, file_id=file_id
        )
        return self._call("complete", request, wire.Result, f"finish {path}", deadline).result

    def update_block_for_pipeline(self, block: Block, path: str, *, deadline: float = DEADLINE) -> Located:
        """A new generation (and token) for the block, with which a pipeline goes on without a failed DataNode.
        ``path``: the file that it belongs to, for messages."""
        request = wire.UpdateBlockForPipelineRequest(block=block.message, client=self.client_name)
        answer = wire.UpdateBlockForPipelineResponse
        doing = f"renew block {block.id} of {path}"
        found = self._call("updateBlockForPipeline", request, answer, doing, deadline)
        return Located.of(found.block, self._guard)

    def update_pipeline(
        self,
        old: Block,
        new: Block,
        nodes: Sequence[DataNode],
        path: str,
        *,
        deadline: float = DEADLINE,
    ) -> None:
        """From now on ``new`` (the same block of a newer generation) is what ``nodes`` have. ``path``: for messages."""
        request = wire.UpdatePipelineRequest(
            client=self.client_name,
            old=old.message,
            new=new.message,
            nodes=[node.message.id for node in nodes],
            storage_ids=storage_ids(nodes),
        )
        doing = f"change the DataNodes of block {new.id} of {path}"
        self._call("updatePipeline", request, wire.Empty, doing, deadline)

    def renew_lease(self, *, deadline: float = DEADLINE) -> None:
        """Keep the lease of every file that this process writes: HDFS takes them after 20 minutes of silence, and
        lets others take them after a minute."""
        self._call("renewLease", wire.RenewLeaseRequest(client=self.client_name), wire.Empty, "renew leases", deadline)

    def recover_lease(self, path: str) -> bool:
        """Take the lease from whoever holds it and close the file; False: under way, ask again."""
        request = wire.RecoverLeaseRequest(src=_text(path), client=self.client_name)
        return self._call("recoverLease", request, wire.Result, f"recover the lease of {path}").result

    # -- the cluster ----------------------------------------------------------------------------------------------

    def defaults(self, *, deadline: float = DEADLINE) -> wire.ServerDefaults:
        """What the cluster uses where a client does not choose; asked for at most every `_KEEP_DEFAULTS` seconds."""
        known = self._defaults
        if known is None or time.monotonic() - known[0] > _KEEP_DEFAULTS:
            answer = wire.GetServerDefaultsResponse
            found = self._call("getServerDefaults", wire.Empty(), answer, "ask for defaults", deadline).defaults
            self._defaults = known = time.monotonic(), found
        return known[1]

    @property
    def login(self) -> str:
        """Who this process is by its login, as a phrase (``ticket of a@SITE``); "" where the NameNode wants none."""
        return self._rpc.login

    def way(self) -> str:
        """How the cluster is reached, in words: by which login, and whether transfers are encrypted. Asks it."""
        encrypts = self.defaults().encrypt_data_transfer
        if not self.login and not encrypts:
            return "neither authentication nor wire encryption"
        return f"{self.login or 'no authentication'}{', encrypted transfers' if encrypts else ''}"

    def _data_key(self, until: float) -> wire.DataKey | None:
        # what it said once is enough: a read must not wait for a NameNode that is away
        defaults = self._defaults[1] if self._defaults else self.defaults(deadline=min(remaining(until), DEADLINE))
        if not defaults.encrypt_data_transfer:
            return None
        answer, doing, left = wire.GetDataEncryptionKeyResponse, "ask for the key of transfers", remaining(until)
        return self._call("getDataEncryptionKey", wire.Empty(), answer, doing, min(left, DEADLINE)).key

    def space(self) -> tuple[int, int]:
        """Bytes of the cluster in all, and free ones; replicas count."""
        found = self._call("getFsStats", wire.Empty(), wire.FsStats, "ask for free space")
        return found.capacity, found.remaining
