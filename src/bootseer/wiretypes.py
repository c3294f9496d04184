"""Types of messages and documents: what msgspec must know before it decodes one.

msgspec builds what it knows of a struct or a named tuple when it is decoded for the first time, and shows it to other
threads half built: two threads that do so end the process. So each call that decodes or converts names its type through
`known`; ``tests/unit/test_wiretypes.py`` finds one that does not. Readers of documents raise `RecursionError`, which is
no `ValueError`, for one that is nested deeply. So documents are read through `json_as` and `loaded`; the same test
finds one that is not."""

from __future__ import annotations

import errno
import os
import re
import select
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from bootseer.closing import descriptor

Kind = TypeVar("Kind")
Text = TypeVar("Text")

_DEEPEST = 100
"""Levels of a document of YAML."""
MOST = 16 << 20
"""Bytes of a document that people write."""
SILENT = 60.0
"""Seconds in which somebody has to write to a pipe in place of one."""

_known = set[object]()
_building = threading.RLock()


def known(kind: Kind) -> Kind:
    """``kind``, when msgspec has built all that it must know of it and of the types in it."""
    if kind not in _known:
        with _building:
            msgspec.json.Decoder(kind)
            _known.add(kind)
    return kind


def json_as(text: bytes | str | msgspec.Raw, kind: type[Kind]) -> Kind:
    """The JSON document ``text``. Raises `ValueError` for anything but a ``kind``."""
    try:
        return msgspec.json.decode(text, type=known(kind))
    except RecursionError as exc:
        raise msgspec.DecodeError(str(exc)) from None


def yaml_as(text: bytes, kind: type[Kind]) -> Kind:
    """The YAML document ``text``. Raises `ImportError` without PyYAML, and `ValueError`, also for what is nested so
    deeply that PyYAML would end this process."""
    import yaml  # type: ignore[import-untyped]

    deep = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            deep += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if deep > _DEEPEST:
                raise ValueError("it is nested too deeply")
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from None
    return msgspec.yaml.decode(text, type=known(kind))


def loaded(read: Callable[[Text], Kind], text: Text) -> Kind:
    """What ``read``, which is like `json.loads`, makes of ``text``. Raises `ValueError` for what is no document."""
    try:
        return read(text)
    except RecursionError as exc:
        raise msgspec.DecodeError(str(exc)) from None


def document(file: str | os.PathLike[str]) -> bytes:
    """The text of a document that people write, in a file or a pipe. Raises `OSError`: EFBIG for more than `MOST`
    bytes, of which a file of holes may say any number, EAGAIN for a pipe into which nobody writes for `SILENT`."""
    return document_and_owner(file)[0]


def document_and_owner(file: str | os.PathLike[str]) -> tuple[bytes, os.stat_result]:
    """`document`, and what is known of the file: whose it is, and who may change it."""
    with descriptor(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)) as fd:
        waiting, text = select.poll(), b""
        waiting.register(fd, select.POLLIN)
        while len(text) <= MOST:
            if not waiting.poll(1000 * SILENT):
                raise OSError(errno.EAGAIN, f"nobody has written to it for {SILENT:.0f} s")
            if not (more := os.read(fd, MOST + 1 - len(text))):
                return text, os.fstat(fd)
            text += more
    raise OSError(errno.EFBIG, f"it has more than {MOST >> 20} MiB")


def in_words(exc: msgspec.ValidationError) -> str:
    """What is wrong with a value, for who wrote it into a file of TOML."""
    return re.sub(r"`(\w+)`", lambda found: _WORDS.get(found[1], found[0]), str(exc))


_WORDS = {
    "array": 'a list [".."]',
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "a table",
    "str": "a string",
}
"""Type by msgspec's name."""
os.register_at_fork(before=_building.acquire, after_in_parent=_building.release, after_in_child=_building.release)
