"""Striped files: one file spread over several storage files, so that a read has the bandwidth of many DataNodes.

The format is described in docs/internals/stripe.md.
"""

from bootseer.stripefs import mount
from bootseer.stripefs.backend import split_url
from bootseer.stripefs.commit import Commit, CommittedFile
from bootseer.stripefs.fs import FileStat, StripeFS, open_fs
from bootseer.stripefs.fsck import Finding, Report
from bootseer.stripefs.gc import Removal
from bootseer.stripefs.mount import FsMount, FsStatus
from bootseer.stripefs.read import ChunkFile, StripedFile
from bootseer.stripefs.repair import Repair
from bootseer.stripefs.save import Save
from bootseer.stripefs.write import StripeWriter, Written

__all__ = [
    "ChunkFile",
    "Commit",
    "CommittedFile",
    "FileStat",
    "Finding",
    "FsMount",
    "FsStatus",
    "Removal",
    "Repair",
    "Report",
    "Save",
    "StripeFS",
    "StripeWriter",
    "StripedFile",
    "Written",
    "mount",
    "open_fs",
    "split_url",
]
