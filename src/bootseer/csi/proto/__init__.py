"""Messages of CSI and of the kubelet's registration of plugins, compiled from ``csi.proto`` by ``scripts/protos``."""
