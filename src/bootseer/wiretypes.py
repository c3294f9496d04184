"""Types of messages and documents: what msgspec must know before it decodes one.

msgspec builds what it knows of a struct or a named tuple when it is decoded for the first time, and shows it to other
threads half built: two threads that decode the same type for the first time end the process. So each call that decodes
or converts names its type through `known`; ``tests/unit/test_wiretypes.py`` finds one that does not.
"""

from __future__ import annotations

import os
import threading
from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")

_known = set[object]()
_building = threading.RLock()


def known(kind: Kind) -> Kind:
    """``kind``, when msgspec has built all that it must know of it and of the types in it."""
    if kind not in _known:
        with _building:
            msgspec.json.Decoder(kind)
            _known.add(kind)
    return kind


os.register_at_fork(before=_building.acquire, after_in_parent=_building.release, after_in_child=_building.release)
