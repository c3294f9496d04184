"""HDFS: transfers of our own, and a typed client with deadlines over ``hdfs-native``; `bootseer.hdfs.access` says which
a cluster needs. Formats and protocols, no policy. Most modules need the extra ``hdfs``."""
