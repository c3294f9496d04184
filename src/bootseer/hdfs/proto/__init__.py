"""Messages of Hadoop RPC and data transfer, compiled from ``hdfs.proto`` by ``scripts/protos``."""
