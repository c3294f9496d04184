"""Benchmarks. ``scripts/bench`` runs one by its name; `bench.__main__` lists them."""
