"""HDFS: transfers of our own, and a typed client with deadlines over ``hdfs-native``. Formats and protocols, no policy.

`bootseer.hdfs.access` says which of the two a cluster needs; what is exported here is the second.
"""

from bootseer.hdfs.client import DEADLINE, HdfsClient, HdfsReader, HdfsWriter, connect, split, walk
from bootseer.hdfs.records import FileStatus

__all__ = ["DEADLINE", "FileStatus", "HdfsClient", "HdfsReader", "HdfsWriter", "connect", "split", "walk"]
