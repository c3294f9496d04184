"""The place of withdrawn objects: where a collection puts what it is about to delete, and whence it may come back:
``collection/withdrawn/<run>/<key, with commas for slashes>``. Who reads an object finds it there too. ``<run>`` is
another one for each collection: who stood still for long deletes nothing that was put back and withdrawn again."""

from __future__ import annotations

import re

FOLDER = "collection/withdrawn"
_KEY = re.compile(r"trees/[0-9a-f]{64}\.json|blobs/[0-9a-f]{2}/[0-9a-f]{64}|env/lists/[0-9a-f]{64}\.zst")
_PLACE = re.compile(rf"{FOLDER}/[0-9a-f]{{16}}/([^/]*)")


def may_go(key: str) -> bool:
    """Whether it is an object that a collection withdraws."""
    return _KEY.fullmatch(key) is not None


def place_of(run: str, key: str) -> str:
    return f"{FOLDER}/{run}/{key.replace('/', ',')}"


def key_at(place: str) -> str:
    """The key of what lies at ``place``; "" for what no collection has put there."""
    found = _PLACE.fullmatch(place)
    key = found[1].replace(",", "/") if found else ""
    return key if may_go(key) else ""
