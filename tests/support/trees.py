"""Comparing file trees: the demo's own scan of one."""

from bootseer.demo.tree import Found, scan

__all__ = ["Found", "scan"]
