"""Striped stores as a file system of fsspec."""
