"""What can be wrong with one replica of a block, as the reader of `bootseer.hdfs.datanode` tells it.

What a reader of files should do next differs: ask the NameNode again where the block is (`StaleReplica`), tell the
NameNode of damage and read elsewhere (`CorruptReplica`), only read elsewhere (`UncheckedReplica` and plain
`UnavailableError`), or nothing, since it is its own doing (`Cancelled`)."""

from __future__ import annotations

from typing import ClassVar

from bootseer.errors import BootseerError, DataError, UnavailableError


class StaleReplica(UnavailableError):
    """The DataNode answers, but not with this block: the replica is gone, older or shorter than the NameNode said, or
    the block token is refused. Fresh locations from the NameNode may help."""


class UncheckedReplica(UnavailableError):
    """The DataNode has no checksums for the block (written without, or lost: it does not say which), and the reader
    asked for bytes that are verified."""


class CorruptReplica(DataError):
    """The replica's bytes do not have the checksums that the DataNode keeps of them. ``offset``: where in the block the
    first damaged chunk begins."""

    def __init__(self, message: str, *, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


class OwnLimit(UnavailableError):
    """This process or machine has no socket to ask with: too many open files, no free port. Says nothing of the
    DataNode."""


class Cancelled(BootseerError):
    """The read was cancelled by its owner; how much of the caller's memory it has written is not known."""

    exit_code: ClassVar[int] = 70
