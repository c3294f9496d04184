"""The node daemon: one root service that mounts images for the users of a node (docs/howto/node.md)."""
