"""gRPC services on Unix sockets of root: what containerd and the kubelet call."""
