"""HDFS: a typed client with deadlines over ``hdfs-native``. Formats and protocols only, no policy."""

from bootseer.hdfs.client import DEADLINE, FileInfo, HdfsClient, HdfsReader, HdfsWriter, connect, split, walk

__all__ = ["DEADLINE", "FileInfo", "HdfsClient", "HdfsReader", "HdfsWriter", "connect", "split", "walk"]
