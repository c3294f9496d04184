"""Upkeep of a store: what its objects are needed for, what they take, and the collection of what nothing needs."""
