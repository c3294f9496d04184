"""Typed bindings to Linux: `mount`, `fuse`, `loop`. No policy."""
