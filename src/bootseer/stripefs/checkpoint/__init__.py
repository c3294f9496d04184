"""Checkpoints that appear whole or not at all: saves, what they commit, and the latest of them."""
