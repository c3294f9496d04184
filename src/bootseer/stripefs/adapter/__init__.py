"""Striped files as a file system of fsspec, and as streams."""
