"""The proxy snapshotter of containerd: layers of converted images are not pulled, but mounted lazily."""
