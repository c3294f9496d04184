"""Laying out the ``meta`` device: superblock, inodes in the order of a walk, directory blocks, shared attributes.

```
0        1024         1152            1280                                  4 KiB aligned
| zeros | superblock | device slot 1 | inodes with what lies behind them | directory blocks | shared attributes |
```
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import crc32c

from bootseer.erofs import format as fmt
from bootseer.erofs import xattr
from bootseer.erofs.node import Node
from bootseer.errors import UnsupportedError

_FIRST_INODE = fmt.SUPER_OFFSET + fmt.SUPER.size + fmt.DEVICE.size
_VOLUME = b"bootseer"
_SECOND = 1_000_000_000
_NO_BLOCK = 0xFFFFFFFF
_DIR = 2


class _Item(NamedTuple):
    """An inode with what its bytes are made of."""

    node: Node
    compact: bool
    body: bytes
    names: list[bytes]
    ends: list[int]
    parent: Node
    tail: int
    """Bytes behind the inode: last block of a directory, target of a link; or of chunk indexes."""
    size: int
    layout: int
    value: int
    """The union: first block, device number or chunk format."""


def assemble(root: Node, data_size: int) -> bytes:
    """The meta device of the tree ``root`` over a data device of ``data_size`` bytes (a multiple of 4 KiB). Sets
    ``nid`` and ``links`` of every node. The same tree gives the same bytes."""
    order = _walk(root)
    epoch = _epoch(node for node, _ in order)
    bodies = xattr.Bodies(node.xattrs for node, _ in order)
    items: list[_Item] = []
    at, block = _FIRST_INODE, 0
    for node, parent in order:
        item = _plan(node, parent, epoch, bodies, block)
        head = (fmt.COMPACT.size if item.compact else fmt.EXTENDED.size) + len(item.body)
        at = _place(at, head, item)
        node.nid = at // fmt.SLOT
        at += head + item.tail if item.layout != fmt.CHUNKED else -(-head // 8) * 8 + item.tail
        at = -(-at // fmt.SLOT) * fmt.SLOT
        if item.layout != fmt.CHUNKED:
            block += -(-(item.size - (item.tail if item.layout == fmt.INLINE else 0)) // fmt.BLOCK)
        items.append(item)
    first_block = -(-at // fmt.BLOCK)
    shared_at = first_block + block
    # fsck.erofs 1.5 reads a header behind the last inode even where it has no attributes: there must be something
    total = max(shared_at + -(-len(bodies.shared) // fmt.BLOCK), at // fmt.BLOCK + 1)
    if total >= _NO_BLOCK:
        raise UnsupportedError(f"a tree whose metadata is {total} blocks of 4 KiB is too large for EROFS")
    meta = bytearray(total * fmt.BLOCK)
    meta[shared_at * fmt.BLOCK : shared_at * fmt.BLOCK + len(bodies.shared)] = bodies.shared
    for number, item in enumerate(items, 1):
        _write(meta, item, number, first_block)
    _finish(meta, root, len(items), epoch, shared_at if bodies.shared else 0, data_size)
    return bytes(meta)


def _walk(root: Node) -> list[tuple[Node, Node]]:
    """Every inode once with its (first) parent: a directory, its children by name, then below each. Counts links."""
    order = [(root, root)]
    root.links, root.nid = 2, 0
    stack = [root]
    seen: set[int] = {id(root)}
    while stack:
        parent = stack.pop()
        children = parent.children
        assert children is not None
        folders = []
        for name in sorted(children):
            node = children[name]
            if id(node) in seen:
                node.links += 1
                continue
            seen.add(id(node))
            order.append((node, parent))
            if node.children is not None:
                node.links = 2
                parent.links += 1
                folders.append(node)
            else:
                node.links = 1
        stack += reversed(folders)
    return order


def _epoch(nodes: Iterator[Node]) -> int:
    """The most frequent time, for the superblock: inodes with it need no time of their own."""
    count = Counter(node.mtime_ns for node in nodes)
    return max((time for time in count if time >= 0), key=lambda time: (count[time], -time), default=0)


def _plan(node: Node, parent: Node, epoch: int, bodies: xattr.Bodies, block: int) -> _Item:
    names: list[bytes] = []
    ends: list[int] = []
    tail = 0
    layout = fmt.PLAIN
    value = 0
    kind = node.kind
    size = 0
    if kind == stat.S_IFDIR:
        assert node.children is not None
        names = sorted([b".", b"..", *node.children])
        ends, tail = _split(names)
        size = (len(ends) - 1) * fmt.BLOCK + tail
    elif kind == stat.S_IFLNK:
        size = tail = len(node.target)
    elif kind == stat.S_IFREG:
        size = node.size
        if size:
            layout = fmt.CHUNKED
            bits = node.chunk_bits if node.chunks else _bits(size)
            value = fmt.CHUNK_INDEXES | bits
            tail = fmt.CHUNK.size * -(-size // (fmt.BLOCK << bits))
        else:
            value = _NO_BLOCK
    else:
        major, minor = os.major(node.rdev), os.minor(node.rdev)
        value = minor & 0xFF | major << 8 | (minor & ~0xFF) << 12
    if kind in (stat.S_IFDIR, stat.S_IFLNK):
        # behind an inode the tail must not cross a block; the room that `_place` can make is two slots less than one
        layout = fmt.INLINE if tail <= fmt.BLOCK - 2 * fmt.SLOT else fmt.PLAIN
        value = block if layout == fmt.PLAIN or size > tail else _NO_BLOCK
        tail = tail if layout == fmt.INLINE else 0
    compact = (
        node.mtime_ns == epoch
        and node.uid <= 0xFFFF
        and node.gid <= 0xFFFF
        and node.links <= 0xFFFF
        and size <= 0xFFFFFFFF
    )
    return _Item(node, compact, bodies.body(node.xattrs), names, ends, parent, tail, size, layout, value)


def _split(names: Iterable[bytes]) -> tuple[list[int], int]:
    """Where the blocks of a directory with these sorted names (with ``.`` and ``..``) end, as numbers of entries, and
    the bytes used in the last block."""
    ends: list[int] = []
    used = count = 0
    for name in names:
        need = 12 + len(name)
        if used + need > fmt.BLOCK:
            ends.append(count)
            used = 0
        used += need
        count += 1
    ends.append(count)
    return ends, used


def _bits(size: int) -> int:
    """Of the smallest chunk that holds ``size`` bytes."""
    return min(((size - 1) // fmt.BLOCK).bit_length(), fmt.MAX_CHUNK_BITS)


def _place(at: int, head: int, item: _Item) -> int:
    """The first fit from ``at`` on for an inode with ``head`` bytes before its tail."""
    if not item.compact and at % fmt.BLOCK == fmt.BLOCK - fmt.SLOT:
        at += fmt.SLOT  # no inode crosses a block
    room = fmt.BLOCK - (at + head) % fmt.BLOCK
    if item.layout == fmt.INLINE and item.tail > room:
        at += -(-room // fmt.SLOT) * fmt.SLOT
        if not item.compact and at % fmt.BLOCK == fmt.BLOCK - fmt.SLOT:
            at += fmt.SLOT
    return at


def _write(meta: bytearray, item: _Item, number: int, first_block: int) -> None:
    node = item.node
    at = node.nid * fmt.SLOT
    count = xattr.icount(item.body)
    value = item.value
    if node.kind in (stat.S_IFDIR, stat.S_IFLNK) and value != _NO_BLOCK:
        value += first_block
    if item.compact:
        form = item.layout << 1
        rest = (item.size, 0, value, number, node.uid, node.gid, 0)
        fmt.COMPACT.pack_into(meta, at, form, count, node.mode, node.links, *rest)
        at += fmt.COMPACT.size
    else:
        form = item.layout << 1 | 1
        seconds, ns = divmod(node.mtime_ns, _SECOND)
        owner = (node.uid, node.gid, seconds, ns, node.links)
        fmt.EXTENDED.pack_into(meta, at, form, count, node.mode, 0, item.size, value, number, *owner)
        at += fmt.EXTENDED.size
    meta[at : at + len(item.body)] = item.body
    at += len(item.body)
    if item.layout == fmt.CHUNKED:
        _write_chunks(meta, -(-at // 8) * 8, node, item.tail // fmt.CHUNK.size)
    elif item.size and node.kind in (stat.S_IFDIR, stat.S_IFLNK):
        content = _directory(item) if item.names else node.target
        split = len(content) - item.tail
        meta[at : at + item.tail] = content[split:]
        if split:
            meta[value * fmt.BLOCK : value * fmt.BLOCK + split] = content[:split]


def _write_chunks(meta: bytearray, at: int, node: Node, count: int) -> None:
    if node.chunks:
        for block in node.chunks:
            fmt.CHUNK.pack_into(meta, at, 0, int(block != fmt.HOLE), block)
            at += fmt.CHUNK.size
        return
    step = 1 << fmt.MAX_CHUNK_BITS
    for number in range(count):
        if node.start < 0:
            fmt.CHUNK.pack_into(meta, at, 0, 0, fmt.HOLE)
        else:
            fmt.CHUNK.pack_into(meta, at, 0, 1, node.start // fmt.BLOCK + number * step)
        at += fmt.CHUNK.size


def _directory(item: _Item) -> bytes:
    """The content of a directory, sorted within and across blocks; all but the last block are full blocks."""
    names, node = item.names, item.node
    children = node.children
    assert children is not None
    pack_into = fmt.DIRENT.pack_into
    blocks: list[bytes | bytearray] = []
    begin = 0
    for end in item.ends:
        part = names[begin:end]
        at, offset = 0, 12 * len(part)
        head = bytearray(offset)
        for name in part:
            child = children.get(name)
            if child is None:
                pack_into(head, at, (node if name == b"." else item.parent).nid, offset, _DIR, 0)
            else:
                pack_into(head, at, child.nid, offset, child.file_type, 0)
            at += 12
            offset += len(name)
        blocks += [head, *part]
        if end != item.ends[-1]:
            blocks.append(bytes(fmt.BLOCK - offset))
        begin = end
    return b"".join(blocks)


def _finish(meta: bytearray, root: Node, inodes: int, epoch: int, shared_at: int, data_size: int) -> None:
    fmt.DEVICE.pack_into(meta, fmt.SUPER_OFFSET + fmt.SUPER.size, b"", data_size // fmt.BLOCK, 0)

    def superblock(uuid: bytes, checksum: int) -> None:
        fmt.SUPER.pack_into(
            meta,
            fmt.SUPER_OFFSET,
            fmt.MAGIC,
            checksum,
            fmt.COMPAT_CHECKSUM | fmt.COMPAT_MTIME,
            fmt.BLOCK.bit_length() - 1,
            0,
            root.nid,
            inodes,
            *divmod(epoch, _SECOND),
            len(meta) // fmt.BLOCK,
            0,
            shared_at,
            uuid,
            _VOLUME,
            fmt.INCOMPAT_CHUNKS | fmt.INCOMPAT_DEVICES,
            0,
            1,
            (fmt.SUPER_OFFSET + fmt.SUPER.size) // fmt.DEVICE.size,
            0,
            0,
            0,
            0,
            0,
        )

    superblock(bytes(16), 0)
    digest = bytearray(hashlib.blake2b(meta, digest_size=16).digest())
    digest[6], digest[8] = digest[6] & 0x0F | 0x80, digest[8] & 0x3F | 0x80  # RFC 9562, version 8
    superblock(bytes(digest), 0)
    # as the kernel computes it: without the final inversion
    superblock(bytes(digest), crc32c.crc32c(bytes(meta[fmt.SUPER_OFFSET : fmt.BLOCK])) ^ 0xFFFFFFFF)
