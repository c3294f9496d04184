"""Events that are sent to the server: each body becomes one file, named by what it holds, in a folder for its sender.
So who does not know whether a body has arrived sends it again: the second one changes nothing. What is kept is bounded,
for all and for each sender, which is an address; a file that somebody removes makes room."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import tempfile
import threading
import time
from collections import Counter
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from bootseer.closing import descriptor
from bootseer.kernel import beneath
from bootseer.profile import events, files
from bootseer.units import size_text

LIMIT = 64 << 20
"""Most bytes of one body."""
MOST_BYTES, MOST_FILES = 16 << 30, 100_000
"""That are kept; of one sender a quarter."""
_SHARE = 4
_RECOUNT = 10.0
"""Seconds after which a full folder is looked through again."""
_AT_ONCE, _IN_ALL = 4, 32
"""Bodies on their way, of one sender and of all; so many as of one are looked through, which takes memory."""
_SECONDS = 60
"""For one body: slow senders keep no others away for longer."""


class _Held(NamedTuple):
    files: int = 0
    size: int = 0

    def more(self, size: int) -> _Held:
        return _Held(self.files + 1, self.size + size)


class Inbox:
    """``folder`` is one of those that are shown; it is made when it is not there, and is private."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._busy: Counter[str] = Counter()
        self._looking = asyncio.Semaphore(_AT_ONCE)
        self._keeping = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._counted = float("-inf")

    async def take(self, request: Request) -> Response:
        """201 with the number of events, 200 when they were here already; 4xx, 503 or 507 say what is wrong, and 507
        that there is no room."""
        sender = _sender(request)
        if self._busy[sender] >= _AT_ONCE or self._busy.total() >= _IN_ALL:
            return PlainTextResponse("too many senders at once\n", 503, {"Retry-After": "5"})
        self._busy[sender] += 1
        try:
            with tempfile.SpooledTemporaryFile(1 << 20) as held:
                digest, size = hashlib.sha256(), 0
                async with asyncio.timeout(_SECONDS):
                    async for part in request.stream():
                        if (size := size + len(part)) > LIMIT:
                            return PlainTextResponse(f"more than {LIMIT} bytes: send parts\n", 413)
                        digest.update(part)
                        held.write(part)
                held.seek(0)
                async with self._looking:
                    return await run_in_threadpool(self._keep, held, size, digest.hexdigest(), sender)
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse(f"not all of it came within {_SECONDS} s\n", 408)
        except OSError as exc:
            return PlainTextResponse(f"cannot keep the events: {exc.strerror}\n", 507)
        finally:
            self._busy[sender] -= 1
            self._busy += Counter()  # without senders that have none

    def _keep(self, held: tempfile.SpooledTemporaryFile[bytes], size: int, digest: str, sender: str) -> Response:
        name = f"{digest[:32]}.jsonl"
        log = events.parse(held)
        if not log.events:
            return PlainTextResponse("no event in it: send lines of bootseer's event files\n", 400)
        with (
            self._keeping,
            beneath.folder(self._folder) as top,
            descriptor(beneath.make_folders(top, sender, 0o700)) as folder,
        ):
            if _there(folder, name):
                return JSONResponse({"events": 0, "known": True})
            if (why := self._full(sender, size)) is not None:
                return PlainTextResponse(f"{why}: remove old ones\n", 507)
            held.seek(0)
            _write(folder, name, held)
            self._held[sender] = self._held.get(sender, _Held()).more(size)
        return JSONResponse({"events": log.events, "known": False}, 201)

    def _full(self, sender: str, size: int) -> str | None:
        """Why nothing more is kept, of this sender or at all."""
        why = self._too_much(sender, size)
        if self._counted < 0 or (why and time.monotonic() - self._counted > _RECOUNT):
            self._held.clear()
            for found in files.find(self._folder, (".jsonl",)):
                theirs = found.name.partition("/")[0]
                self._held[theirs] = self._held.get(theirs, _Held()).more(found.mark()[0])
            self._counted = time.monotonic()
            why = self._too_much(sender, size)
        return why

    def _too_much(self, sender: str, size: int) -> str | None:
        mine = self._held.get(sender, _Held()).more(size)
        count, total = (sum(part) for part in zip(*self._held.values(), (1, size), strict=True))
        if mine.files > MOST_FILES // _SHARE or mine.size > MOST_BYTES // _SHARE:
            return f"{sender} has sent {mine.files - 1} files of {size_text(mine.size - size)}"
        if count > MOST_FILES or total > MOST_BYTES:
            return f"there are {count - 1} files of {size_text(total - size)}"
        return None


def _sender(request: Request) -> str:
    """The address of the one who sends, as far as a proxy says it; a name of a folder."""
    try:
        return str(ip_address(request.client.host if request.client else "")).replace("%", "-")
    except ValueError:
        return "unknown"


def _there(folder: int, name: str) -> bool:
    try:
        os.close(beneath.open_regular(name, root=folder))
    except FileNotFoundError:
        return False
    return True


def _write(folder: int, name: str, held: tempfile.SpooledTemporaryFile[bytes]) -> None:
    """Whole or not at all."""
    part = f".{secrets.token_hex(8)}.part"
    with open(beneath.open_at(folder, part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        try:
            while data := held.read(1 << 20):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(part, dir_fd=folder)
            raise
