"""Where shared bytes live: a local or network folder, HDFS, an OCI registry, or anything fsspec reaches.

A store holds immutable objects under slash-separated keys. Publication is atomic: an object is there whole or not at
all, and the first publication of a key wins.
"""

from bootseer.storage.interface import Source
from bootseer.store.base import ObjectInfo, Store
from bootseer.store.open import open_store

__all__ = ["ObjectInfo", "Source", "Store", "open_store"]
