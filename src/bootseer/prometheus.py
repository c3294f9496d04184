"""Prometheus' text format (exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def metric(name: str, kind: str, said: str, samples: Iterable[tuple[str, object]]) -> Iterator[str]:
    """The lines of one metric: what it is, and each of its ``samples``, the rest of a name with labels and a value."""
    yield f"# HELP {name} {said}"
    yield f"# TYPE {name} {kind}"
    for more, value in samples:
        yield f"{name}{more} {value}"


def labels(**values: object) -> str:
    """Labels whose values need no escapes."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in values.items()) + "}"
