"""Directories as EROFS stores them: blocks of entries and names, sorted by bytes within and across blocks."""

from __future__ import annotations

from collections.abc import Iterable

from bootseer.erofs import format as fmt
from bootseer.erofs.node import Node

_DIR = 2


def split(names: Iterable[bytes]) -> tuple[list[int], int]:
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


def sorted_names(node: Node) -> list[bytes]:
    """The names of a directory with ``.`` and ``..`` among them, in the order of the disk."""
    assert node.children is not None
    return sorted([b".", b"..", *node.children])


def encode(names: list[bytes], ends: list[int], node: Node, parent: Node) -> bytes:
    """The directory's content; all but the last block are full blocks."""
    children = node.children
    assert children is not None
    pack_into = fmt.DIRENT.pack_into
    blocks: list[bytes | bytearray] = []
    begin = 0
    for end in ends:
        part = names[begin:end]
        at, offset = 0, 12 * len(part)
        head = bytearray(offset)
        for name in part:
            child = children.get(name)
            if child is None:
                pack_into(head, at, (node if name == b"." else parent).nid, offset, _DIR, 0)
            else:
                pack_into(head, at, child.nid, offset, child.file_type, 0)
            at += 12
            offset += len(name)
        blocks += [head, *part]
        if end != ends[-1]:
            blocks.append(bytes(fmt.BLOCK - offset))
        begin = end
    return b"".join(blocks)
