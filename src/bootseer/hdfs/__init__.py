"""HDFS: transfers of our own, and a typed client with deadlines over ``hdfs-native``. Formats and protocols, no policy.

`bootseer.hdfs.access` says which of the two a cluster needs. Most modules need the extra ``hdfs``.
"""
