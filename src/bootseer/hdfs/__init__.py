"""HDFS: transfers of our own, and a typed client with deadlines over ``hdfs-native``; `bootseer.backends.cluster` says
which a file needs. Formats and protocols, no policy. Most modules need the extra ``hdfs``."""
