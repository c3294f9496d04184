"""What a registry store remembers of objects whose keys name their content, so that each is asked for once."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from bootseer.oci.spec import Descriptor
from bootseer.store import _artifact

_REMEMBERED = 100_000


def immutable(key: str) -> bool:
    """Whether ``key`` names its content: whoever writes it writes the same."""
    return key.startswith(("blobs/", "trees/")) or (key.startswith("profiles/") and key.endswith((".trace", ".pack")))


class Known:
    """Blobs by key and by tag, of immutable keys only. Used by any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[str, Descriptor] = {}
        self._tags: dict[str, str] = {}

    def remember(self, objects: Mapping[str, Descriptor]) -> None:
        with self._lock:
            if len(self._keys) > _REMEMBERED:
                self._keys.clear()
                self._tags.clear()
            for key, item in objects.items():
                if immutable(key):
                    self._keys[key] = item

    def remember_tag(self, tag: str, key: str, item: Descriptor) -> None:
        """As `remember`, for a key that was found by its tag."""
        if immutable(key):
            self.remember({key: item})
            with self._lock:
                self._tags[tag] = key

    def find(self, key: str) -> Descriptor | None:
        with self._lock:
            return self._keys.get(key)

    def tagged(self, tag: str) -> tuple[str, Descriptor] | None:
        """Key and blob of what is known to have ``tag``."""
        with self._lock:
            key = self._tags.get(tag, "")
            return (key, self._keys[key]) if key in self._keys else None

    def forget(self, key: str) -> None:
        with self._lock:
            self._keys.pop(key, None)
            self._tags.pop(_artifact.tag_of(key), None)
