"""Write start-up events. Standard library only, Python 3.8 or later, importable alone in any container.

Format: ``docs/internals/events.md``. Nothing happens unless ``BOOTSEER_EVENTS`` names the events file. No function
here raises, prints or waits, whatever happens to that file; events that could not be written are counted and the count
travels on the next one. Identity comes from ``BOOTSEER_JOB``, ``_ATTEMPT``, ``_CYCLE``, ``_NODE``, ``_RANK`` (else
``RANK``, which torchrun sets) and ``_GPUS`` (the GPUs of the node), the enclosing span from ``BOOTSEER_SPAN`` or
``TRACEPARENT``. Restarts that torchrun or NVRx counts are added to the cycle.

What others may have put in the place of the file (a link, a pipe, a further name of another file) is not written to,
and no shell that sources an events file finds anything to expand in what is written here. Files of other users are
written to: where network file systems and user namespaces map users, one's own file is another user's.

Concurrency: safe from threads and after fork; an event is one ``open``/``write``/``close`` with ``O_APPEND``: no lock,
and no descriptor that the host program could close and reuse. Measured by ``scripts/bench emit``."""

from __future__ import annotations

import os
import stat
import time
from contextvars import ContextVar

try:
    from _json import encode_basestring_ascii as _quote  # json itself costs 5 ms of import, mostly for re
except ImportError:
    from json.encoder import encode_basestring_ascii as _quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import TypeAlias

    AttrValue: TypeAlias = str | int | float | bool | None

__all__ = ["annotate", "begin", "child_env", "end", "hold", "span"]

LINE_LIMIT = 4096
_VALUE_LIMIT = 512
_IDENTITY_LIMIT = 128
# O_NONBLOCK: a FIFO without a reader must not block the job
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_CLOCK = getattr(time, "CLOCK_BOOTTIME", None) or time.CLOCK_MONOTONIC
_SECRET_NAMES = (
    "passw",
    "secret",
    "token",
    "credential",
    "apikey",
    "api_key",
    "access_key",
    "private_key",
    "authorization",
)
_REDACTED = "[redacted]"

_current: ContextVar[str] = ContextVar("bootseer_span", default="")
_held = -1
_lost = 0
_named: dict[str, bool] = {}
"""Whether names of attributes are those of secrets: a job uses few, and again and again."""
_boot = ""
_host = ""
_rank = ""
"""Of this process, where no variable says it: `bootseer.profile.auto.hooks` sets it."""


def hold(fd: int) -> None:
    """Events of this process go to the open file ``fd`` from now on, whatever is at the place that ``BOOTSEER_EVENTS``
    names; -1: to what is there."""
    global _held
    _held = fd


def begin(stage: str, /, *, parent: str | None = None, **attrs: AttrValue) -> str:
    """Write the begin of a span; returns its id (16 hex digits), or ``""`` when events go nowhere. ``parent`` defaults
    to the span around this code (`span`), then to the one this process was started in."""
    return _begin(stage, parent, attrs)


def _begin(stage: str, parent: str | None, attrs: dict[str, AttrValue]) -> str:
    path = os.environ.get("BOOTSEER_EVENTS")
    if not path:
        return ""
    try:
        span_id = os.urandom(8).hex()
        above = _parent() if parent is None else parent
        world = os.environ.get("WORLD_SIZE", "")
        if stage == "first_step" and "ranks" not in attrs and world.isdecimal():
            attrs = {"world": int(world[:9]), **attrs}
    except Exception:
        return ""
    _write("begin", span_id, attrs, stage, above, path)
    return span_id


def end(span_id: str, /, **attrs: AttrValue) -> None:
    """Write the end of a span, from this or any other process of the job. ``""`` is ignored."""
    if span_id:
        _write("end", span_id, attrs)


def annotate(span_id: str, /, **attrs: AttrValue) -> None:
    """Add attributes to a span. ``""`` is ignored."""
    if span_id:
        _write("note", span_id, attrs)


class span:
    """Context manager: one span around a block; yields the span id. An exception adds its type as ``error``."""

    __slots__ = ("_attrs", "_id", "_stage", "_token")

    def __init__(self, stage: str, /, **attrs: AttrValue) -> None:
        self._stage = stage
        self._attrs = attrs

    def __enter__(self) -> str:
        self._id = _begin(self._stage, None, self._attrs)
        self._token = _current.set(self._id) if self._id else None
        return self._id

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._token is not None:
            try:
                _current.reset(self._token)
            except ValueError:  # left in another context than it was entered in (an asyncio task, a generator)
                _current.set("")
        if kind is None:
            end(self._id)
        else:
            end(self._id, error=kind.__name__)


def child_env(span_id: str) -> dict[str, str]:
    """Variables that make ``span_id`` the parent of what a child process emits. Empty for ``""``."""
    if not span_id:
        return {}
    held = os.environ.get("TRACEPARENT", "").split("-")
    if len(held) == 4 and len(held[1]) == 32:
        trace = held[1]
    else:  # one trace per start-up, the same on every node without talking to them
        import hashlib

        name = "|".join((os.environ.get("BOOTSEER_JOB", ""), os.environ.get("BOOTSEER_ATTEMPT", ""), _cycle()))
        trace = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:32]
    return {"BOOTSEER_SPAN": span_id, "TRACEPARENT": "00-" + trace + "-" + span_id + "-01"}


def _parent() -> str:
    above = _current.get() or os.environ.get("BOOTSEER_SPAN", "")
    if above:
        return above
    held = os.environ.get("TRACEPARENT", "").split("-")
    return held[2] if len(held) == 4 and len(held[2]) == 16 else ""


def _write(
    kind: str, span_id: str, attrs: dict[str, AttrValue], stage: str = "", parent: str = "", path: str | None = None
) -> None:
    global _lost
    path = path or os.environ.get("BOOTSEER_EVENTS")
    if not path:
        return
    try:
        lost = _lost
        line = _line(kind, span_id, attrs, stage, parent, lost)
        if _held >= 0:
            written = os.write(_held, line)
        else:
            fd = os.open(path, _FLAGS, 0o666)
            try:
                found = os.fstat(fd)
                written = os.write(fd, line) if found.st_nlink <= 1 and stat.S_ISREG(found.st_mode) else 0
            finally:
                os.close(fd)
        if written == len(line):
            _lost -= lost
        else:
            _lost += 1
    except Exception:
        _lost += 1


def _line(kind: str, span_id: str, attrs: dict[str, AttrValue], stage: str, parent: str, lost: int) -> bytes:
    global _boot, _host
    get = os.environ.get
    if not _boot:
        _boot = _read_boot_id()
    node = get("BOOTSEER_NODE")
    if not node:
        if not _host:
            _host = os.uname().nodename
        node = _host
    head = '{"bootseer":2,"ev":"' + kind + '","span":' + _quote(span_id[:_IDENTITY_LIMIT])
    if parent:
        head += ',"parent":' + _quote(parent[:_IDENTITY_LIMIT])
    if stage:
        head += ',"stage":' + _quote(stage[:_IDENTITY_LIMIT])
    head += ',"job":' + _quote(get("BOOTSEER_JOB", "")[:_IDENTITY_LIMIT])
    head += ',"attempt":' + _quote((get("BOOTSEER_ATTEMPT") or "0")[:_IDENTITY_LIMIT])
    head += ',"cycle":' + _cycle()
    head += ',"node":' + _quote(node[:_IDENTITY_LIMIT])
    rank = get("BOOTSEER_RANK") or get("RANK") or _rank
    if rank and rank.isdigit():
        head += ',"rank":' + _int(rank)
    head += ',"gpus":' + _int(get("BOOTSEER_GPUS"))
    head += ',"wall":' + str(time.time_ns()) + ',"mono":' + str(time.clock_gettime_ns(_CLOCK))
    if _boot:
        head += ',"boot":' + _quote(_boot)
    head += ',"pid":' + str(os.getpid())
    if lost:
        head += ',"lost":' + str(lost)
    if "$" in head or "`" in head:
        head = inert(head)
    if not attrs:
        return (head + "}\n").encode("ascii")
    room = LINE_LIMIT - len(head) - 40  # 40: ,"attrs":{ } ,"cut":NNN and the newline
    kept, cut = [], 0
    for name, value in attrs.items():
        pair = _quote(str(name)[:_IDENTITY_LIMIT]) + ":" + _value(name, value)
        if "$" in pair or "`" in pair:
            pair = inert(pair)
        room -= len(pair) + 1
        if room > 0:
            kept.append(pair)
        else:
            room += len(pair) + 1
            cut += 1
    head += ',"attrs":{' + ",".join(kept) + "}"
    if cut:
        head += ',"cut":' + str(cut)
    return (head + "}\n").encode("ascii")


def _value(name: str, value: AttrValue) -> str:
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, int):
        return int.__repr__(value) if -(2**62) < value < 2**62 else _quote(str(value)[:_VALUE_LIMIT])
    if isinstance(value, float):
        text = repr(float(value))
        return text if -1e100 < value < 1e100 else _quote(text)  # as readers have it; inf and nan are not JSON
    return _quote(redact(str(name), str(value))[:_VALUE_LIMIT])


def inert(text: str) -> str:
    """JSON as ``text`` is, in which a shell expands nothing."""
    return text.replace("$", "\\u0024").replace("`", "\\u0060")


def redact(name: str, text: str) -> str:
    """``text`` without what looks like a secret: see "Secrets" in the format's page."""
    secret = _named.get(name)
    if secret is None:
        low = name.lower()
        secret = any(word in low for word in _SECRET_NAMES)
        if len(_named) < 1000 and len(name) < 100:
            _named[name] = secret
    if secret:
        return _REDACTED
    if "://" in text or "=" in text or "earer " in text:
        import re  # here: most values have nothing to redact, and re is most of an import's cost

        # Only what stands before the first slash is user information, so image references (host/name@sha256:...) pass.
        # Each search begins at one place of a word only, so that long ones take no time.
        text = re.sub(r"(?<=[A-Za-z0-9+.-]://)[^/\s]+@", _REDACTED + "@", text)
        words = r"(?:passw|secret|token|credential|api_?key|access_?key|private_?key|signature|authorization)"
        text = re.sub(
            r"(?i)((?<![\w.-])[\w.-]*" + words + r"[\w.-]*=|[?&](?:sig|key|auth)=)[^&\s]+", r"\1" + _REDACTED, text
        )
        text = re.sub(r"(?i)(\bbearer )\S+", r"\1" + _REDACTED, text)
    return text


def _cycle() -> str:
    get = os.environ.get
    restarts = get("NVRX_CYCLE") or get("TORCHELASTIC_RESTART_COUNT")
    return str(int(_int(get("BOOTSEER_CYCLE"))) + int(_int(restarts)))


def _int(text: str | None) -> str:
    return str(int(text)) if text and text.isdigit() and text.isascii() and len(text) < 10 else "0"


def _read_boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except Exception:
        return ""
