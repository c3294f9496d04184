"""Events that are sent to the server: each body becomes one file, named by what it holds.

So who does not know whether a body has arrived sends it again: the second one changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from bootseer.profile import events

LIMIT = 64 << 20
"""Most bytes of one body."""
_AT_ONCE = 4
_SECONDS = 60
"""For one body: slow senders keep no others away for longer."""


class Inbox:
    """``folder`` is one of those that are shown; it is made when it is not there, and is private."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._busy = 0

    async def take(self, request: Request) -> Response:
        """201 with the number of events, 200 when they were here already; 4xx, 503 or 507 say what is wrong."""
        if self._busy >= _AT_ONCE:
            return PlainTextResponse("too many senders at once\n", 503, {"Retry-After": "5"})
        self._busy += 1
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
                return await run_in_threadpool(self._keep, held, digest.hexdigest())
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse(f"not all of it came within {_SECONDS} s\n", 408)
        except OSError as exc:
            return PlainTextResponse(f"cannot keep the events: {exc.strerror}\n", 507)
        finally:
            self._busy -= 1

    def _keep(self, held: tempfile.SpooledTemporaryFile[bytes], digest: str) -> Response:
        target = self._folder / f"{digest[:32]}.jsonl"
        if target.exists():
            return JSONResponse({"events": 0, "known": True})
        log = events.parse(held)
        if not log.events:
            return PlainTextResponse("no event in it: send lines of bootseer's event files\n", 400)
        held.seek(0)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", suffix=".part", delete=False) as file:
            try:
                while data := held.read(1 << 20):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
        return JSONResponse({"events": log.events, "known": False}, 201)
