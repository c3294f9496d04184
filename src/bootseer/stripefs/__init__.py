"""Striped files: one file spread over several storage files, so that a read has the bandwidth of many DataNodes. The
format: docs/internals/stripe.md."""

from bootseer.backends.open import Given, locate
from bootseer.stripefs.checkpoint.claim import Save
from bootseer.stripefs.checkpoint.commit import Commit, CommittedFile
from bootseer.stripefs.files.reader import ChunkFile
from bootseer.stripefs.files.stat import FileStat
from bootseer.stripefs.files.striped import StripedFile
from bootseer.stripefs.files.writer import StripeWriter, Written
from bootseer.stripefs.store import StripeFS, open_fs, place

__all__ = [
    "ChunkFile",
    "Commit",
    "CommittedFile",
    "FileStat",
    "Given",
    "Save",
    "StripeFS",
    "StripeWriter",
    "StripedFile",
    "Written",
    "locate",
    "open_fs",
    "place",
]
