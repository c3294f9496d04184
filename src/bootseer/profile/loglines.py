"""A line of a log: its text, and the time, rank and node that the line names, without what carried it. Carriers stand
in front of a program's own text: container runtimes, kubectl, collectors, launchers, loggers. A line has several frames
where a progress bar drew itself anew; each has the head of its line."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any, NamedTuple

from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

_PIECE = 1 << 20
"""Characters of a line that are read at once."""
_ENDLESS = 256 << 20
"""Characters without an end: of a sparse file, which costs its maker nothing."""
_LONGEST = 1 << 16
"""Characters of a frame that are looked at."""
LOOK_AHEAD = 2000
"""Lines in which the year is looked for that the first ones do not name."""

_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_TIME = (
    r"(?:(?:[IWEFVDC]|[A-Z][a-z][a-z] )?(?P<y>\d{4})(?P<by>[-/]?)(?P<m>\d\d)(?P=by)(?P<d>\d\d)(?:[T _]|, )"
    r"|(?P<m1>\d\d)/(?P<d1>\d\d)/(?P<y1>\d{4}|\d\d),? "
    r"|[IWEFVDC](?P<m2>\d\d)(?P<d2>\d\d) "
    r"|(?P<d4>\d\d)[-/](?P<m4>" + "|".join(_MONTHS) + r")[-/](?P<y4>\d{4})[ :]"
    r"|(?:[A-Z][a-z][a-z] )?(?P<m3>" + "|".join(_MONTHS) + r") +(?P<d3>\d\d?) )?"
    r"(?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9})\d*)?(?: (?P<half>[AP]M)\b)?"
    r"(?P<zone> ?(?:Z|UTC|GMT)\b| ?[+-]\d\d:?\d\d\b)?(?(m3)(?: (?P<y3>\d{4})\b)?)(?![\w/]|:\d)"
)  # fmt: skip
# Brackets, level and logger may stand before a line's time. Anything else is prose, and a time in it is not the line's.
_TIMED = re.compile(
    r"\s*+\"?(?:\[[^\[\]]{0,80}\]:?\s*"
    r"|\(?(?i:trace|debug|info|notice|warn(?:ing)?|error|critical|fatal)\b\)?[ \t:|-]+(?:[\w.]+:)?)*?"
    r"(?P<open>[\[(])?(?:NeMo [A-Z] |[A-Z]+[ |])?(?:" + _TIME + r"|(?P<epoch>\d{10}\.\d{1,9}"
    r"|\d\.\d{1,16}e\+09|\d{13}(?=\t))\b)"
    r"(?(open)(?:[^\[\]]{0,80}?[\])])?)\"?[:,]?\s?"
)  # fmt: skip
_OWN_TIME = re.compile(r"\b(?:datetime:|CANCELLED AT) " + _TIME)
_DATED = re.compile(r"(?<![\w/.-])(?P<y>\d{4})([-/])(?P<m>\d\d)\2(?P<d>\d\d)[T ](?P<h>[01]\d|2[0-3]):\d\d:\d\d")
_CARRIER = re.compile(
    r"\[pod/(?P<pod>[^/\]]+)/[^\]]*\] ?"
    r"|(?P<stern>[a-z0-9][a-z0-9.]*-[a-z0-9.-]+) [a-z0-9][a-z0-9-]* (?=\d{4}-\d\d-\d\d[T ]|\{\")"
    r"|(?P<compose>[a-z][\w.-]*-\d+(?:-[a-z0-9]{5})?) +\| "
    r"|(?P<pdsh>(?!rank)[a-z][\w.-]*|\d+\.\d+\.\d+\.\d+): (?=\[?\d{4}-\d\d-\d\d[T ])"
    r"|(?P<torchx>[a-z][\w.-]*/\d+) (?=[\[\d])"
    r"|\[(?:[\w.@-]+@)?\d+,(?:mpirank:(?P<mpi>\d{1,9})(?:,(?P<algo>[\w.-]+))?|(?P<tag>\d{1,9}))\](?:<std\w+>)?:? ?"
    r"|\([\w.:<>-]+,? (?:rank=\d+, )?pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\w.:]+))?\) ?"
    r"| *+(?P<label>\d{1,9}): "
    r"|<(?:trace|debug|info|warn(?:ing)?|error)> *|EVENTS\t"
    r"|<\d{1,3}>(?:1 (?P<stamp>\S+) (?P<syslog>\S+) \S+ \S+ \S+ (?:-|\[[^\]]*\]) )?"
    r"|\[(?:(?!node|host|step|epoch|iter)[a-z_]+(?P<short>\d{1,9})(?:/\d+)?\]:"
    r"|(?P<plain>\d{1,5})\](?:<std\w+>:|:?(?= ))) ?"
    r"|(?:[A-Z]+ *|- (?:[\w.]+ - )*|\| *)?(?:\[(?![^\]]*\d\d:\d\d:\d\d)[^\[\]]*\] ?)*?"
    r"[\[(](?:[^\[\]]*[, ])?(?P<word>rank|Rank|RANK)(?P<is>[:= ]{0,2})(?P<rank>\d{1,9})(?:/\d+)?[\])]:? ?"
    r"|(?:[Gg]lobal[_ ])?(?:rank|Rank|RANK)[ :=_]?(?P<bare>\d{1,9})(?:/\d+)?(?:\[\d+\]\[\w+\])? ?[:|>] ?"
)
# What stands behind the time of a carrier: streams of container runtimes, hosts of syslog, streams of CloudWatch.
_BEHIND = re.compile(
    r"(?P<piece>(?:stdout|stderr) [FP]) "
    r"|(?P<host>[\w.-]+) [\w./-]+\[\d+\]: "
    r"|\{[\w.]+:\d+\} [A-Z]+ - "
    r"|(?P<task>workerpool\d+-\d+\t|[0-9a-f]{8} (?=\|\||\[))"
    r"|[\w.-]+[:\t] ?(?=\{\")"
    r"|(?P<stream>[\w.$-]+(?:/[\w.\[\]$-]+)+) "
)
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-Z]|[ -~])")
_REDRAWN = re.compile(r"\x1b\[\d*[A-HJK]")
_SPELT = re.compile(r"#0(15|33|11)|\^(M(?![a-z])|\[(?=[\[\]]))")
_MEANT = {"15": "\r", "M": "\r", "33": "\x1b", "[": "\x1b", "11": "\t"}
# A logger's line often goes on behind a bar that another stream drew.
_FRAMES = re.compile(r"[\r\n\x08]+|(?<=\])(?=\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)")
_BAR = re.compile(
    r"\b(?P<done>\d{1,12})/[\d?]+ \[(?:(?P<h>\d{1,6}):)?(?P<m>\d\d):(?P<s>\d\d)<"
    r"(?:[^,\]]*, *(?P<rate>\d+(?:\.\d+)?)(?P<unit>[a-z]+/[a-z]+))?"
)
_BAR_END = 400
"""Characters at the end of a frame in which its bar's figures are."""

_TEXTS = (
    "log", "message", "msg", "textpayload", "text", "line", "body", "event", "logmessage", "logentry", "raw", "m",
    "stringvalue",
)  # fmt: skip
_TIMES = (
    "time", "timestamp", "asctime", "ts", "realtime_timestamp", "timestamp_ns", "timeunixnano", "timestampseconds",
    "timegenerated", "date", "datetime", "created", "t",
)  # fmt: skip
_NODES = (
    "pod_name", "podname", "pod", "hostname", "host", "logstreamname", "logstream", "node_name", "computer",
    "task_name",
)  # fmt: skip
_RANKS = ("rank", "world_rank", "global_rank")
_LEVELS = 32
"""Objects of one line of JSON that are looked into."""
_PAIR = re.compile(r'([\w.@-]+)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?:\s+|$)')


class Frame(NamedTuple):
    """What one frame of a line says. The times are in ns since 1970."""

    text: str
    when: int | None
    rank: int | None = None
    node: str = ""
    label: int | None = None
    """The task that ``srun --label`` names."""
    process: str = ""
    """What tells it from other processes of the node where none names a rank."""
    soft: bool = False
    """Whether the rank is part of the message, such as DeepSpeed's ``[Rank 0]``, which only some of its lines have."""


def read(file: io.BufferedReader) -> Iterator[str]:
    """The lines of a file; only ``\\n`` ends one. A longer one comes in pieces, and one of `_ENDLESS` is the last."""
    wide = file.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff")
    text = io.TextIOWrapper(file, "utf-16" if wide else "utf-8-sig", errors="replace", newline="\n")
    try:
        going = 0
        while (line := text.readline(_PIECE)) and going < _ENDLESS:
            going = 0 if line.endswith("\n") else going + len(line)
            yield line
        if line:
            log.warning("a log is not read on: %d MiB of it are no line", _ENDLESS >> 20)
    finally:
        text.detach()


class Reader:
    """Reads the lines of one log, in their order. ``zone`` is that of times without one (None: this machine's), and
    ``latest`` when the log was last written: no time without a year or a day is later."""

    def __init__(self, zone: tzinfo | None, latest: datetime) -> None:
        self._zone, self._latest = zone, latest
        self._near: datetime | None = None
        """A time nearby, which says the year and the day of those that do not."""
        self._begun = 0
        """When the last bar began."""
        self._parts: dict[tuple[str, str], str] = {}
        """Of each stream of a container, what its runtime has written of a line that goes on."""

    @property
    def goes_on(self) -> bool:
        """Whether a line is known in part."""
        return bool(self._parts)

    def ahead(self, lines: Iterable[str]) -> None:
        """Look for the year in the lines that come."""
        found = next((found for line in lines if (found := _DATED.search(line[:_LONGEST]))), None)
        if found is not None:
            try:
                day = datetime(int(found["y"]), int(found["m"]), int(found["d"]), int(found["h"]), tzinfo=UTC)
            except ValueError:
                return
            self._near = day

    def frames(self, line: str) -> Iterator[Frame]:
        """Those of a line, each with the head of the line. Raises nothing."""
        head = Frame("", None)
        text = line.rstrip("\r\n").lstrip("\0")
        head, text = self._unwrapped(text, head)
        head, text, piece = self._head(_plain(text), head)
        if piece:
            text = self._parts.pop((head.node, piece[:6]), "") + text
            if piece.endswith("P"):
                text, self._parts[head.node, piece[:6]] = _cut(text[-_LONGEST:])
        inner = self._unwrapped(text, head)
        if inner[1] != text:  # one in the other, as of a container's runtime
            head, text, _piece = self._head(_plain(inner[1]), inner[0])
        parts = [part for part in _FRAMES.split(text) if part.strip()] or [""]
        bars = [_BAR.search(part[-_BAR_END:]) for part in parts]
        last = next((_elapsed(bar) for bar in reversed(bars) if bar), 0)
        for part, bar in zip(parts, bars, strict=True):
            mine, rest, _piece = (head, part, "") if len(parts) == 1 else self._head(part, head)
            when = mine.when
            if when is None and (own := _OWN_TIME.search(rest[:_LONGEST])):
                when = self._when(own)
            elif when is not None and bar is not None:
                when = self._drawn(bar, when, last)
            yield mine._replace(text=rest[:_LONGEST], when=when)

    def _drawn(self, bar: re.Match[str], when: int, last: float) -> int:
        """When a frame of a bar was drawn whose line was written at ``when``, after ``last`` seconds of the bar: by its
        rate where its begin was seen, and else by its seconds."""
        passed = _elapsed(bar)
        if not int(bar["done"]):
            self._begun = when - int(last * 1e9)
        elif passed < last and self._begun and passed % 1:
            return min(self._begun + int(passed * 1e9), when)
        elif passed < last:
            return when - (int(last) - int(passed)) * 10**9
        return when

    def _unwrapped(self, text: str, head: Frame) -> tuple[Frame, str]:
        """What a line of JSON or of logfmt carries; a head that is known already counts before what is inside."""
        levels = _levels(text)
        said = next((one for level in levels for name in _TEXTS if (one := _text(level.get(name)))), None)
        if said is None:
            return head, text
        when = head.when
        for value in (level[name] for level in levels for name in _TIMES if level.get(name)):
            when = self._stamp(value) if when is None else when
        nodes = (level.get(name) for name in _NODES for level in levels)
        named = (one.get("name") if isinstance(one, dict) else one for one in nodes)
        node = head.node or next((one for one in named if one and isinstance(one, str)), "")
        ranks = (str(level.get(name)) for level in levels for name in _RANKS)
        rank = next((int(one) for one in ranks if len(one) < 10 and one.isdecimal()), None)
        rank = rank if head.rank is None else head.rank
        return head._replace(when=when, node=node, rank=rank), said.rstrip("\r\n")

    def _stamp(self, value: object) -> int | None:
        """A time as JSON has it: text, or a number of seconds, ms, us or ns."""
        if isinstance(value, dict):
            value = value.get("seconds")
        if isinstance(value, (int, float)):
            return _epoch(value)
        stamp = _TIMED.match(value) if isinstance(value, str) else None
        return self._when(stamp) if stamp else _epoch(str(value))

    def _head(self, text: str, head: Frame) -> tuple[Frame, str, str]:
        """What stands in front of a text: the frame without it, the rest, and which piece of a line that is."""
        at, piece, more = 0, "", True
        when, rank, node, label, process, soft = head.when, head.rank, head.node, head.label, head.process, head.soft
        while more:
            more = False
            if (found := _CARRIER.match(text, at)) and found.end() > at:
                at, more, said = found.end(), True, found.groupdict()
                node = next(
                    filter(None, map(said.get, ("pod", "stern", "compose", "pdsh", "torchx", "algo", "ip", "syslog"))),
                    node,
                )
                if said["stamp"] and when is None and (stamp := _TIMED.match(said["stamp"])):
                    when = self._when(stamp)
                process = f"mpi{said['mpi']}" if said["mpi"] else said["pid"] or process
                if said["label"] and label is None and rank is None:
                    label = int(said["label"])
                number = said["tag"] or said["short"] or said["plain"] or said["rank"] or said["bare"]
                if number and (rank is None or soft):
                    rank, soft = int(number), said["word"] == "Rank" and said["is"] == " "
            elif found := _TIMED.match(text, at):
                when = self._when(found) if when is None else when
                at, more = found.end(), True
                if behind := _BEHIND.match(text, at):
                    if behind["stream"] and not (found["zone"] or "").strip(" ZUTCGM"):
                        continue  # a path
                    at, piece = behind.end(), behind["piece"] or ""
                    node = behind["host"] or behind["stream"] or (behind["task"] or "").strip() or node
        return Frame("", when, rank, node, label, process, soft), text[at:], piece

    def _when(self, found: re.Match[str]) -> int | None:
        said = found.groupdict()
        epoch = said.get("epoch") or ""
        if "e" in epoch or len(epoch) == 13:
            return _epoch(epoch)
        if epoch:
            seconds, _, part = epoch.partition(".")
            return int(seconds) * 10**9 + int(part.ljust(9, "0"))
        year = said["y"] or said["y1"] or said["y3"] or said["y4"]
        month, name = said["m"] or said["m1"] or said["m2"], said["m3"] or said["m4"]
        month = month or (name and str(_MONTHS.index(name) + 1))
        turned = bool(said["y1"]) and len(said["y1"]) == 2  # Spark's 26/09/01
        day = said["d"] or said["d1"] or said["d2"] or said["d3"] or said["d4"]
        hour, minute, second = map(int, said["clock"].split(":"))
        if said["half"]:
            hour = hour % 12 + (12 if said["half"] == "PM" else 0)
        zone = _zone(said["zone"]) or self._zone
        near = (self._near or self._latest).astimezone(zone)
        guesses: list[datetime] = []
        for step in (0, 1) if turned else (0,) if year else (-1, 0, 1):
            try:
                if month and day:
                    of = int(year) + (2000 if len(year) == 2 else 0) if year else near.year + step
                    if turned and step:
                        of, month, day = 2000 + int(month), day, year or ""
                    guess = datetime(of, int(month), int(day), hour, minute, min(second, 59), tzinfo=zone)
                else:
                    guess = near.replace(hour=hour, minute=minute, second=min(second, 59), microsecond=0)
                    guess += timedelta(days=step)
                guesses.append(guess if zone else guess.replace(tzinfo=None).astimezone())
            except (ValueError, OverflowError, OSError):
                continue
        if not year or turned:
            limit = self._latest + timedelta(days=1 if month else 0)
            guesses = [one for one in guesses if one <= limit] or guesses[:1]
        if not guesses:
            return None
        best = min(guesses, key=lambda one: abs(one - near))
        self._near = best
        seconds_ = int(best.timestamp())
        return seconds_ * 10**9 + int((said["part"] or "").ljust(9, "0")) if seconds_ >= 0 else None


def _plain(text: str) -> str:
    """Without colours and cursor codes; what redraws a line is a carriage return."""
    if "#0" in text or "^" in text:
        text = _SPELT.sub(lambda found: _MEANT[found[1] or found[2]], text)
    if "\x1b" in text:
        text = _ESCAPE.sub("", _REDRAWN.sub("\r", text))
    return text.lstrip("\r\x08")


def _levels(text: str) -> list[dict[str, Any]]:
    """The objects in a line of JSON, the outermost first, or the pairs of one of logfmt, with names as in `_TEXTS`."""
    stripped = text.strip().removeprefix("[").rstrip(",]")
    if stripped[:1] == "{" and '"' in stripped[:3]:
        try:
            found = [json_as(stripped.encode("utf-8", "replace"), dict[str, Any])]
        except ValueError:
            return []
    elif pair := _PAIR.match(text):
        pairs: dict[str, Any] = {}
        while pair and len(pairs) < _LEVELS:
            pairs.setdefault(pair[1], _unquoted(pair[2]))
            pair = _PAIR.match(text, pair.end())
        found = [pairs]
    else:
        return []
    levels = []
    for one in found:
        level: dict[str, Any] = {}
        for name, value in one.items():
            level.setdefault(name.lower().strip("@_"), value)
            if isinstance(value, dict) and len(found) < _LEVELS:
                found.append(value)
        levels.append(level)
    return levels


def _epoch(value: str | float) -> int | None:
    """Seconds, ms, us or ns since 1970, as ns."""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    while 1e11 <= number < 1e30:
        number /= 1000
    return int(number * 10**6) * 1000 if 1e9 <= number < 1e11 else None


def _unquoted(value: str) -> str:
    if value[:1] != '"':
        return value
    try:
        return json_as(value.encode("utf-8", "replace"), str)
    except ValueError:
        return value[1:-1]


def _text(value: object) -> str:
    """A line's text, as JSON has it: journald makes numbers of one with control characters."""
    if isinstance(value, list) and all(isinstance(one, int) and 0 <= one < 256 for one in value):
        return bytes(value).decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def _zone(text: str | None) -> tzinfo | None:
    said = (text or "").strip()
    if not said:
        return None
    if said[0] not in "+-":
        return UTC
    minutes = int(said[1:3]) * 60 + int(said[-2:])
    return timezone(timedelta(minutes=-minutes if said[0] == "-" else minutes)) if minutes < 24 * 60 else UTC


def _cut(text: str) -> tuple[str, str]:
    """The frames that are complete, and what goes on."""
    at = text.rfind("\r") + 1
    return text[:at], text[at:]


def _elapsed(bar: re.Match[str]) -> float:
    """Seconds that a progress bar of ``tqdm`` says, with their fraction where its rate agrees with them."""
    whole = int(bar["h"] or 0) * 3600 + int(bar["m"]) * 60 + int(bar["s"])
    rate, done = bar["rate"] or "", int(bar["done"])
    if len(rate.partition(".")[2]) < 2:
        return whole
    took = done * float(rate) if bar["unit"].startswith("s") else done / (float(rate) or 1)
    return took if whole <= took < whole + 1 else whole
