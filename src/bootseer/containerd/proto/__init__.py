"""Messages of containerd's snapshots service, compiled from ``snapshots.proto`` by ``scripts/protos``."""
