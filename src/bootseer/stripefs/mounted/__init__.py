"""Striped files as a FUSE mount: its server, and what it reads ahead and keeps."""
