"""EROFS images of directories, in two parts, through ``mkfs.erofs``."""

from bootseer.erofs.build import build

__all__ = ["build"]
