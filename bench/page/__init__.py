"""The pages of measured figures: ``python -m bench.page`` writes them from the reports in ``bench/results``.

``docs/benchmarks.md`` is the first screen (`overview`), ``docs/benchmarks/SCENARIO.md`` have every figure and variant
(`detail`), ``misses.toml`` says of each figure that missed its target why, in one sentence. The table of the first
screen stands in the README, too.
"""
