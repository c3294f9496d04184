"""EROFS images in two devices: ``meta`` (all but file contents) and ``data`` (contents), written in pure Python."""

from bootseer.erofs.build import attributes, build, contents
from bootseer.erofs.data import Buffer, DataSink, Hole
from bootseer.erofs.extents import ExtentIndex
from bootseer.erofs.node import Attrs, Node
from bootseer.erofs.reader import Reader
from bootseer.erofs.reader_disk import Inode
from bootseer.erofs.tree import Tree
from bootseer.erofs.writer import Writer

__all__ = [
    "Attrs",
    "Buffer",
    "DataSink",
    "ExtentIndex",
    "Hole",
    "Inode",
    "Node",
    "Reader",
    "Tree",
    "Writer",
    "attributes",
    "build",
    "contents",
]
