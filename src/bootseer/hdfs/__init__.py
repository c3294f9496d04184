"""HDFS: transfers of our own, and a typed client with deadlines over ``hdfs-native``. Formats and protocols, no policy.

`bootseer.hdfs.access` says which of the two a cluster needs; what is exported here is the second.
"""

from bootseer.hdfs.client import DEADLINE, FileInfo, HdfsClient, HdfsReader, HdfsWriter, connect, split, walk

__all__ = ["DEADLINE", "FileInfo", "HdfsClient", "HdfsReader", "HdfsWriter", "connect", "split", "walk"]
