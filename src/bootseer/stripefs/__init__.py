"""Striped files: one file spread over several storage files, so that a read has the bandwidth of many DataNodes.

The format is described in docs/internals/stripe.md.
"""

from bootseer.stripefs.care.fsck import Finding, Report
from bootseer.stripefs.care.gc import Removal
from bootseer.stripefs.care.repair import Repair
from bootseer.stripefs.checkpoint.commit import Commit, CommittedFile
from bootseer.stripefs.checkpoint.save import Save
from bootseer.stripefs.fs import FileStat, StripeFS, open_fs
from bootseer.stripefs.mounted import mount
from bootseer.stripefs.mounted.mount import FsMount, FsStatus
from bootseer.stripefs.read import ChunkFile, StripedFile
from bootseer.stripefs.storage.backend import split_url
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
