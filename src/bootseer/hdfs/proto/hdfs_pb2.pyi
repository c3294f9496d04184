from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RpcRequestHeader(_message.Message):
    __slots__ = ("rpc_kind", "rpc_op", "call_id", "client_id", "retry_count")
    RPC_KIND_FIELD_NUMBER: _ClassVar[int]
    RPC_OP_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    RETRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    rpc_kind: int
    rpc_op: int
    call_id: int
    client_id: bytes
    retry_count: int
    def __init__(self, rpc_kind: _Optional[int] = ..., rpc_op: _Optional[int] = ..., call_id: _Optional[int] = ..., client_id: _Optional[bytes] = ..., retry_count: _Optional[int] = ...) -> None: ...

class RpcResponseHeader(_message.Message):
    __slots__ = ("call_id", "status", "server_version", "exception", "message", "detail")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    status: int
    server_version: int
    exception: str
    message: str
    detail: int
    def __init__(self, call_id: _Optional[int] = ..., status: _Optional[int] = ..., server_version: _Optional[int] = ..., exception: _Optional[str] = ..., message: _Optional[str] = ..., detail: _Optional[int] = ...) -> None: ...

class RpcSasl(_message.Message):
    __slots__ = ("version", "state", "token", "auths")
    class Auth(_message.Message):
        __slots__ = ("method", "mechanism", "protocol", "server_id", "challenge")
        METHOD_FIELD_NUMBER: _ClassVar[int]
        MECHANISM_FIELD_NUMBER: _ClassVar[int]
        PROTOCOL_FIELD_NUMBER: _ClassVar[int]
        SERVER_ID_FIELD_NUMBER: _ClassVar[int]
        CHALLENGE_FIELD_NUMBER: _ClassVar[int]
        method: str
        mechanism: str
        protocol: str
        server_id: str
        challenge: bytes
        def __init__(self, method: _Optional[str] = ..., mechanism: _Optional[str] = ..., protocol: _Optional[str] = ..., server_id: _Optional[str] = ..., challenge: _Optional[bytes] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    AUTHS_FIELD_NUMBER: _ClassVar[int]
    version: int
    state: int
    token: bytes
    auths: _containers.RepeatedCompositeFieldContainer[RpcSasl.Auth]
    def __init__(self, version: _Optional[int] = ..., state: _Optional[int] = ..., token: _Optional[bytes] = ..., auths: _Optional[_Iterable[_Union[RpcSasl.Auth, _Mapping]]] = ...) -> None: ...

class ConnectionContext(_message.Message):
    __slots__ = ("user", "protocol")
    class User(_message.Message):
        __slots__ = ("effective", "real")
        EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
        REAL_FIELD_NUMBER: _ClassVar[int]
        effective: str
        real: str
        def __init__(self, effective: _Optional[str] = ..., real: _Optional[str] = ...) -> None: ...
    USER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    user: ConnectionContext.User
    protocol: str
    def __init__(self, user: _Optional[_Union[ConnectionContext.User, _Mapping]] = ..., protocol: _Optional[str] = ...) -> None: ...

class MethodHeader(_message.Message):
    __slots__ = ("method", "protocol", "version")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    method: str
    protocol: str
    version: int
    def __init__(self, method: _Optional[str] = ..., protocol: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("identifier", "password", "kind", "service")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    identifier: bytes
    password: bytes
    kind: str
    service: str
    def __init__(self, identifier: _Optional[bytes] = ..., password: _Optional[bytes] = ..., kind: _Optional[str] = ..., service: _Optional[str] = ...) -> None: ...

class Credentials(_message.Message):
    __slots__ = ("tokens",)
    class Entry(_message.Message):
        __slots__ = ("alias", "token")
        ALIAS_FIELD_NUMBER: _ClassVar[int]
        TOKEN_FIELD_NUMBER: _ClassVar[int]
        alias: str
        token: Token
        def __init__(self, alias: _Optional[str] = ..., token: _Optional[_Union[Token, _Mapping]] = ...) -> None: ...
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Credentials.Entry]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Credentials.Entry, _Mapping]]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("pool", "id", "generation", "length")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    pool: str
    id: int
    generation: int
    length: int
    def __init__(self, pool: _Optional[str] = ..., id: _Optional[int] = ..., generation: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class NodeId(_message.Message):
    __slots__ = ("address", "hostname", "uuid", "transfer_port", "info_port", "ipc_port", "info_secure_port")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PORT_FIELD_NUMBER: _ClassVar[int]
    INFO_PORT_FIELD_NUMBER: _ClassVar[int]
    IPC_PORT_FIELD_NUMBER: _ClassVar[int]
    INFO_SECURE_PORT_FIELD_NUMBER: _ClassVar[int]
    address: str
    hostname: str
    uuid: str
    transfer_port: int
    info_port: int
    ipc_port: int
    info_secure_port: int
    def __init__(self, address: _Optional[str] = ..., hostname: _Optional[str] = ..., uuid: _Optional[str] = ..., transfer_port: _Optional[int] = ..., info_port: _Optional[int] = ..., ipc_port: _Optional[int] = ..., info_secure_port: _Optional[int] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("id", "capacity", "used", "remaining", "pool_used", "last_update", "transfers", "location", "other_used", "admin_state")
    ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    POOL_USED_FIELD_NUMBER: _ClassVar[int]
    LAST_UPDATE_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    OTHER_USED_FIELD_NUMBER: _ClassVar[int]
    ADMIN_STATE_FIELD_NUMBER: _ClassVar[int]
    id: NodeId
    capacity: int
    used: int
    remaining: int
    pool_used: int
    last_update: int
    transfers: int
    location: str
    other_used: int
    admin_state: int
    def __init__(self, id: _Optional[_Union[NodeId, _Mapping]] = ..., capacity: _Optional[int] = ..., used: _Optional[int] = ..., remaining: _Optional[int] = ..., pool_used: _Optional[int] = ..., last_update: _Optional[int] = ..., transfers: _Optional[int] = ..., location: _Optional[str] = ..., other_used: _Optional[int] = ..., admin_state: _Optional[int] = ...) -> None: ...

class LocatedBlock(_message.Message):
    __slots__ = ("block", "offset", "nodes", "corrupt", "token", "cached", "storage_types", "storage_ids", "block_indices", "block_tokens")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDICES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    block: Block
    offset: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    corrupt: bool
    token: Token
    cached: _containers.RepeatedScalarFieldContainer[bool]
    storage_types: _containers.RepeatedScalarFieldContainer[int]
    storage_ids: _containers.RepeatedScalarFieldContainer[str]
    block_indices: bytes
    block_tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, block: _Optional[_Union[Block, _Mapping]] = ..., offset: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., corrupt: bool = ..., token: _Optional[_Union[Token, _Mapping]] = ..., cached: _Optional[_Iterable[bool]] = ..., storage_types: _Optional[_Iterable[int]] = ..., storage_ids: _Optional[_Iterable[str]] = ..., block_indices: _Optional[bytes] = ..., block_tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class ErasurePolicy(_message.Message):
    __slots__ = ("name", "cell_size", "id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CELL_SIZE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    cell_size: int
    id: int
    def __init__(self, name: _Optional[str] = ..., cell_size: _Optional[int] = ..., id: _Optional[int] = ...) -> None: ...

class Encryption(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class LocatedBlocks(_message.Message):
    __slots__ = ("length", "blocks", "under_construction", "last_block", "last_block_complete", "encryption", "erasure")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNDER_CONSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    LAST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    LAST_BLOCK_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTION_FIELD_NUMBER: _ClassVar[int]
    ERASURE_FIELD_NUMBER: _ClassVar[int]
    length: int
    blocks: _containers.RepeatedCompositeFieldContainer[LocatedBlock]
    under_construction: bool
    last_block: LocatedBlock
    last_block_complete: bool
    encryption: Encryption
    erasure: ErasurePolicy
    def __init__(self, length: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[LocatedBlock, _Mapping]]] = ..., under_construction: bool = ..., last_block: _Optional[_Union[LocatedBlock, _Mapping]] = ..., last_block_complete: bool = ..., encryption: _Optional[_Union[Encryption, _Mapping]] = ..., erasure: _Optional[_Union[ErasurePolicy, _Mapping]] = ...) -> None: ...

class Permission(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: int
    def __init__(self, mode: _Optional[int] = ...) -> None: ...

class FileStatus(_message.Message):
    __slots__ = ("kind", "path", "length", "permission", "owner", "group", "mtime", "atime", "symlink", "replication", "block_size", "locations", "file_id", "encryption", "erasure", "flags")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PERMISSION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MTIME_FIELD_NUMBER: _ClassVar[int]
    ATIME_FIELD_NUMBER: _ClassVar[int]
    SYMLINK_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTION_FIELD_NUMBER: _ClassVar[int]
    ERASURE_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    kind: int
    path: bytes
    length: int
    permission: Permission
    owner: str
    group: str
    mtime: int
    atime: int
    symlink: bytes
    replication: int
    block_size: int
    locations: LocatedBlocks
    file_id: int
    encryption: Encryption
    erasure: ErasurePolicy
    flags: int
    def __init__(self, kind: _Optional[int] = ..., path: _Optional[bytes] = ..., length: _Optional[int] = ..., permission: _Optional[_Union[Permission, _Mapping]] = ..., owner: _Optional[str] = ..., group: _Optional[str] = ..., mtime: _Optional[int] = ..., atime: _Optional[int] = ..., symlink: _Optional[bytes] = ..., replication: _Optional[int] = ..., block_size: _Optional[int] = ..., locations: _Optional[_Union[LocatedBlocks, _Mapping]] = ..., file_id: _Optional[int] = ..., encryption: _Optional[_Union[Encryption, _Mapping]] = ..., erasure: _Optional[_Union[ErasurePolicy, _Mapping]] = ..., flags: _Optional[int] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Result(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: bool
    def __init__(self, result: bool = ...) -> None: ...

class GetBlockLocationsRequest(_message.Message):
    __slots__ = ("src", "offset", "length")
    SRC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    src: str
    offset: int
    length: int
    def __init__(self, src: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class GetBlockLocationsResponse(_message.Message):
    __slots__ = ("locations",)
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    locations: LocatedBlocks
    def __init__(self, locations: _Optional[_Union[LocatedBlocks, _Mapping]] = ...) -> None: ...

class ServerDefaults(_message.Message):
    __slots__ = ("block_size", "bytes_per_checksum", "write_packet_size", "replication", "file_buffer_size", "encrypt_data_transfer", "trash_interval", "checksum_type")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    WRITE_PACKET_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FIELD_NUMBER: _ClassVar[int]
    FILE_BUFFER_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENCRYPT_DATA_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TRASH_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_TYPE_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    bytes_per_checksum: int
    write_packet_size: int
    replication: int
    file_buffer_size: int
    encrypt_data_transfer: bool
    trash_interval: int
    checksum_type: int
    def __init__(self, block_size: _Optional[int] = ..., bytes_per_checksum: _Optional[int] = ..., write_packet_size: _Optional[int] = ..., replication: _Optional[int] = ..., file_buffer_size: _Optional[int] = ..., encrypt_data_transfer: bool = ..., trash_interval: _Optional[int] = ..., checksum_type: _Optional[int] = ...) -> None: ...

class GetServerDefaultsResponse(_message.Message):
    __slots__ = ("defaults",)
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    defaults: ServerDefaults
    def __init__(self, defaults: _Optional[_Union[ServerDefaults, _Mapping]] = ...) -> None: ...

class DataKey(_message.Message):
    __slots__ = ("id", "pool", "nonce", "key", "expires")
    ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    id: int
    pool: str
    nonce: bytes
    key: bytes
    expires: int
    def __init__(self, id: _Optional[int] = ..., pool: _Optional[str] = ..., nonce: _Optional[bytes] = ..., key: _Optional[bytes] = ..., expires: _Optional[int] = ...) -> None: ...

class GetDataEncryptionKeyResponse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: DataKey
    def __init__(self, key: _Optional[_Union[DataKey, _Mapping]] = ...) -> None: ...

class GetFileInfoRequest(_message.Message):
    __slots__ = ("src",)
    SRC_FIELD_NUMBER: _ClassVar[int]
    src: str
    def __init__(self, src: _Optional[str] = ...) -> None: ...

class GetFileInfoResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: FileStatus
    def __init__(self, status: _Optional[_Union[FileStatus, _Mapping]] = ...) -> None: ...

class GetListingRequest(_message.Message):
    __slots__ = ("src", "start_after", "need_location")
    SRC_FIELD_NUMBER: _ClassVar[int]
    START_AFTER_FIELD_NUMBER: _ClassVar[int]
    NEED_LOCATION_FIELD_NUMBER: _ClassVar[int]
    src: str
    start_after: bytes
    need_location: bool
    def __init__(self, src: _Optional[str] = ..., start_after: _Optional[bytes] = ..., need_location: bool = ...) -> None: ...

class DirectoryListing(_message.Message):
    __slots__ = ("entries", "remaining")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[FileStatus]
    remaining: int
    def __init__(self, entries: _Optional[_Iterable[_Union[FileStatus, _Mapping]]] = ..., remaining: _Optional[int] = ...) -> None: ...

class GetListingResponse(_message.Message):
    __slots__ = ("listing",)
    LISTING_FIELD_NUMBER: _ClassVar[int]
    listing: DirectoryListing
    def __init__(self, listing: _Optional[_Union[DirectoryListing, _Mapping]] = ...) -> None: ...

class CreateRequest(_message.Message):
    __slots__ = ("src", "masked", "client", "flags", "create_parent", "replication", "block_size")
    SRC_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    CREATE_PARENT_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    src: str
    masked: Permission
    client: str
    flags: int
    create_parent: bool
    replication: int
    block_size: int
    def __init__(self, src: _Optional[str] = ..., masked: _Optional[_Union[Permission, _Mapping]] = ..., client: _Optional[str] = ..., flags: _Optional[int] = ..., create_parent: bool = ..., replication: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class CreateResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: FileStatus
    def __init__(self, status: _Optional[_Union[FileStatus, _Mapping]] = ...) -> None: ...

class SetReplicationRequest(_message.Message):
    __slots__ = ("src", "replication")
    SRC_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FIELD_NUMBER: _ClassVar[int]
    src: str
    replication: int
    def __init__(self, src: _Optional[str] = ..., replication: _Optional[int] = ...) -> None: ...

class AddBlockRequest(_message.Message):
    __slots__ = ("src", "client", "previous", "exclude", "file_id", "favoured", "flags")
    SRC_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    FILE_ID_FIELD_NUMBER: _ClassVar[int]
    FAVOURED_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    src: str
    client: str
    previous: Block
    exclude: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    file_id: int
    favoured: _containers.RepeatedScalarFieldContainer[str]
    flags: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, src: _Optional[str] = ..., client: _Optional[str] = ..., previous: _Optional[_Union[Block, _Mapping]] = ..., exclude: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., file_id: _Optional[int] = ..., favoured: _Optional[_Iterable[str]] = ..., flags: _Optional[_Iterable[int]] = ...) -> None: ...

class AddBlockResponse(_message.Message):
    __slots__ = ("block",)
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    block: LocatedBlock
    def __init__(self, block: _Optional[_Union[LocatedBlock, _Mapping]] = ...) -> None: ...

class GetAdditionalDataNodeRequest(_message.Message):
    __slots__ = ("src", "block", "existing", "exclude", "count", "client", "storage_ids")
    SRC_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    EXISTING_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    STORAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    src: str
    block: Block
    existing: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    exclude: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    count: int
    client: str
    storage_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, src: _Optional[str] = ..., block: _Optional[_Union[Block, _Mapping]] = ..., existing: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., exclude: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., count: _Optional[int] = ..., client: _Optional[str] = ..., storage_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbandonBlockRequest(_message.Message):
    __slots__ = ("block", "src", "holder", "file_id")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SRC_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    FILE_ID_FIELD_NUMBER: _ClassVar[int]
    block: Block
    src: str
    holder: str
    file_id: int
    def __init__(self, block: _Optional[_Union[Block, _Mapping]] = ..., src: _Optional[str] = ..., holder: _Optional[str] = ..., file_id: _Optional[int] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("src", "client", "last", "file_id")
    SRC_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FILE_ID_FIELD_NUMBER: _ClassVar[int]
    src: str
    client: str
    last: Block
    file_id: int
    def __init__(self, src: _Optional[str] = ..., client: _Optional[str] = ..., last: _Optional[_Union[Block, _Mapping]] = ..., file_id: _Optional[int] = ...) -> None: ...

class UpdateBlockForPipelineRequest(_message.Message):
    __slots__ = ("block", "client")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    block: Block
    client: str
    def __init__(self, block: _Optional[_Union[Block, _Mapping]] = ..., client: _Optional[str] = ...) -> None: ...

class UpdateBlockForPipelineResponse(_message.Message):
    __slots__ = ("block",)
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    block: LocatedBlock
    def __init__(self, block: _Optional[_Union[LocatedBlock, _Mapping]] = ...) -> None: ...

class UpdatePipelineRequest(_message.Message):
    __slots__ = ("client", "old", "new", "nodes", "storage_ids")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    client: str
    old: Block
    new: Block
    nodes: _containers.RepeatedCompositeFieldContainer[NodeId]
    storage_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, client: _Optional[str] = ..., old: _Optional[_Union[Block, _Mapping]] = ..., new: _Optional[_Union[Block, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeId, _Mapping]]] = ..., storage_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReportBadBlocksRequest(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[LocatedBlock]
    def __init__(self, blocks: _Optional[_Iterable[_Union[LocatedBlock, _Mapping]]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: str
    def __init__(self, client: _Optional[str] = ...) -> None: ...

class RecoverLeaseRequest(_message.Message):
    __slots__ = ("src", "client")
    SRC_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    src: str
    client: str
    def __init__(self, src: _Optional[str] = ..., client: _Optional[str] = ...) -> None: ...

class RenameRequest(_message.Message):
    __slots__ = ("src", "dst", "overwrite")
    SRC_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    src: str
    dst: str
    overwrite: bool
    def __init__(self, src: _Optional[str] = ..., dst: _Optional[str] = ..., overwrite: bool = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("src", "recursive")
    SRC_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    src: str
    recursive: bool
    def __init__(self, src: _Optional[str] = ..., recursive: bool = ...) -> None: ...

class MkdirsRequest(_message.Message):
    __slots__ = ("src", "masked", "create_parent")
    SRC_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    CREATE_PARENT_FIELD_NUMBER: _ClassVar[int]
    src: str
    masked: Permission
    create_parent: bool
    def __init__(self, src: _Optional[str] = ..., masked: _Optional[_Union[Permission, _Mapping]] = ..., create_parent: bool = ...) -> None: ...

class SetPermissionRequest(_message.Message):
    __slots__ = ("src", "permission")
    SRC_FIELD_NUMBER: _ClassVar[int]
    PERMISSION_FIELD_NUMBER: _ClassVar[int]
    src: str
    permission: Permission
    def __init__(self, src: _Optional[str] = ..., permission: _Optional[_Union[Permission, _Mapping]] = ...) -> None: ...

class SetOwnerRequest(_message.Message):
    __slots__ = ("src", "owner", "group")
    SRC_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    src: str
    owner: str
    group: str
    def __init__(self, src: _Optional[str] = ..., owner: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class SetTimesRequest(_message.Message):
    __slots__ = ("src", "mtime", "atime")
    SRC_FIELD_NUMBER: _ClassVar[int]
    MTIME_FIELD_NUMBER: _ClassVar[int]
    ATIME_FIELD_NUMBER: _ClassVar[int]
    src: str
    mtime: int
    atime: int
    def __init__(self, src: _Optional[str] = ..., mtime: _Optional[int] = ..., atime: _Optional[int] = ...) -> None: ...

class FsStats(_message.Message):
    __slots__ = ("capacity", "used", "remaining")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    capacity: int
    used: int
    remaining: int
    def __init__(self, capacity: _Optional[int] = ..., used: _Optional[int] = ..., remaining: _Optional[int] = ...) -> None: ...

class TransferSasl(_message.Message):
    __slots__ = ("status", "payload", "message", "ciphers", "token_error")
    class Cipher(_message.Message):
        __slots__ = ("suite", "in_key", "in_iv", "out_key", "out_iv")
        SUITE_FIELD_NUMBER: _ClassVar[int]
        IN_KEY_FIELD_NUMBER: _ClassVar[int]
        IN_IV_FIELD_NUMBER: _ClassVar[int]
        OUT_KEY_FIELD_NUMBER: _ClassVar[int]
        OUT_IV_FIELD_NUMBER: _ClassVar[int]
        suite: int
        in_key: bytes
        in_iv: bytes
        out_key: bytes
        out_iv: bytes
        def __init__(self, suite: _Optional[int] = ..., in_key: _Optional[bytes] = ..., in_iv: _Optional[bytes] = ..., out_key: _Optional[bytes] = ..., out_iv: _Optional[bytes] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CIPHERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ERROR_FIELD_NUMBER: _ClassVar[int]
    status: int
    payload: bytes
    message: str
    ciphers: _containers.RepeatedCompositeFieldContainer[TransferSasl.Cipher]
    token_error: bool
    def __init__(self, status: _Optional[int] = ..., payload: _Optional[bytes] = ..., message: _Optional[str] = ..., ciphers: _Optional[_Iterable[_Union[TransferSasl.Cipher, _Mapping]]] = ..., token_error: bool = ...) -> None: ...

class BaseHeader(_message.Message):
    __slots__ = ("block", "token")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    block: Block
    token: Token
    def __init__(self, block: _Optional[_Union[Block, _Mapping]] = ..., token: _Optional[_Union[Token, _Mapping]] = ...) -> None: ...

class ClientHeader(_message.Message):
    __slots__ = ("base", "client")
    BASE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    base: BaseHeader
    client: str
    def __init__(self, base: _Optional[_Union[BaseHeader, _Mapping]] = ..., client: _Optional[str] = ...) -> None: ...

class CachingStrategy(_message.Message):
    __slots__ = ("drop_behind", "readahead")
    DROP_BEHIND_FIELD_NUMBER: _ClassVar[int]
    READAHEAD_FIELD_NUMBER: _ClassVar[int]
    drop_behind: bool
    readahead: int
    def __init__(self, drop_behind: bool = ..., readahead: _Optional[int] = ...) -> None: ...

class Checksum(_message.Message):
    __slots__ = ("type", "bytes_per_checksum")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    type: int
    bytes_per_checksum: int
    def __init__(self, type: _Optional[int] = ..., bytes_per_checksum: _Optional[int] = ...) -> None: ...

class ReadBlock(_message.Message):
    __slots__ = ("header", "offset", "length", "send_checksums", "caching")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SEND_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    CACHING_FIELD_NUMBER: _ClassVar[int]
    header: ClientHeader
    offset: int
    length: int
    send_checksums: bool
    caching: CachingStrategy
    def __init__(self, header: _Optional[_Union[ClientHeader, _Mapping]] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., send_checksums: bool = ..., caching: _Optional[_Union[CachingStrategy, _Mapping]] = ...) -> None: ...

class WriteBlock(_message.Message):
    __slots__ = ("header", "targets", "source", "stage", "pipeline_size", "min_bytes", "max_bytes", "generation", "checksum", "caching", "storage_type", "target_storage_types", "allow_lazy_persist", "pinning", "target_pinnings", "storage_id", "target_storage_ids")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CACHING_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    TARGET_STORAGE_TYPES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_LAZY_PERSIST_FIELD_NUMBER: _ClassVar[int]
    PINNING_FIELD_NUMBER: _ClassVar[int]
    TARGET_PINNINGS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_STORAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    header: ClientHeader
    targets: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    source: NodeInfo
    stage: int
    pipeline_size: int
    min_bytes: int
    max_bytes: int
    generation: int
    checksum: Checksum
    caching: CachingStrategy
    storage_type: int
    target_storage_types: _containers.RepeatedScalarFieldContainer[int]
    allow_lazy_persist: bool
    pinning: bool
    target_pinnings: _containers.RepeatedScalarFieldContainer[bool]
    storage_id: str
    target_storage_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, header: _Optional[_Union[ClientHeader, _Mapping]] = ..., targets: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., source: _Optional[_Union[NodeInfo, _Mapping]] = ..., stage: _Optional[int] = ..., pipeline_size: _Optional[int] = ..., min_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., generation: _Optional[int] = ..., checksum: _Optional[_Union[Checksum, _Mapping]] = ..., caching: _Optional[_Union[CachingStrategy, _Mapping]] = ..., storage_type: _Optional[int] = ..., target_storage_types: _Optional[_Iterable[int]] = ..., allow_lazy_persist: bool = ..., pinning: bool = ..., target_pinnings: _Optional[_Iterable[bool]] = ..., storage_id: _Optional[str] = ..., target_storage_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class TransferBlock(_message.Message):
    __slots__ = ("header", "targets", "target_storage_types", "target_storage_ids")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    TARGET_STORAGE_TYPES_FIELD_NUMBER: _ClassVar[int]
    TARGET_STORAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    header: ClientHeader
    targets: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    target_storage_types: _containers.RepeatedScalarFieldContainer[int]
    target_storage_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, header: _Optional[_Union[ClientHeader, _Mapping]] = ..., targets: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., target_storage_types: _Optional[_Iterable[int]] = ..., target_storage_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadChecksum(_message.Message):
    __slots__ = ("checksum", "chunk_offset")
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    checksum: Checksum
    chunk_offset: int
    def __init__(self, checksum: _Optional[_Union[Checksum, _Mapping]] = ..., chunk_offset: _Optional[int] = ...) -> None: ...

class BlockOpResponse(_message.Message):
    __slots__ = ("status", "first_bad_link", "read_checksum", "message")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BAD_LINK_FIELD_NUMBER: _ClassVar[int]
    READ_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: int
    first_bad_link: str
    read_checksum: ReadChecksum
    message: str
    def __init__(self, status: _Optional[int] = ..., first_bad_link: _Optional[str] = ..., read_checksum: _Optional[_Union[ReadChecksum, _Mapping]] = ..., message: _Optional[str] = ...) -> None: ...

class ReadStatus(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: int
    def __init__(self, status: _Optional[int] = ...) -> None: ...

class PacketHeader(_message.Message):
    __slots__ = ("offset", "number", "last", "length", "sync")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    offset: int
    number: int
    last: bool
    length: int
    sync: bool
    def __init__(self, offset: _Optional[int] = ..., number: _Optional[int] = ..., last: bool = ..., length: _Optional[int] = ..., sync: bool = ...) -> None: ...

class PipelineAck(_message.Message):
    __slots__ = ("number", "reply", "downstream_nanoseconds", "flag")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    DOWNSTREAM_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    number: int
    reply: _containers.RepeatedScalarFieldContainer[int]
    downstream_nanoseconds: int
    flag: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., reply: _Optional[_Iterable[int]] = ..., downstream_nanoseconds: _Optional[int] = ..., flag: _Optional[_Iterable[int]] = ...) -> None: ...
