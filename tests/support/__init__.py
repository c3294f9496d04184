"""Doubles and small real clusters that the demo, the tests and users share: registry, Hadoop, network namespaces."""
