"""Where shared bytes live: a local or network folder, HDFS, an OCI registry, or anything fsspec reaches. A store holds
immutable objects under slash-separated keys. Publication is atomic: an object is there whole or not at all, and the
first publication of a key wins."""

from bootseer.backends.interface import Source
from bootseer.objects.base import ObjectInfo, Store
from bootseer.objects.open import open_store

__all__ = ["ObjectInfo", "Source", "Store", "open_store"]
