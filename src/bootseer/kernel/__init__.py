"""Typed bindings to Linux: `mount`, `fuse`, `loop`, `fanotify`. No policy."""
