"""Event files to a `bootseer profile serve --receive`, at least once: what arrives twice counts once there."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import ConfigError, DataError, PrivilegeError, UnavailableError, doing
from bootseer.profile.events import LINE_LIMIT
from bootseer.profile.files import Found, find

PART = 32 << 20
"""Most bytes of one body."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0


def send(paths: list[Path], url: str, token: str = "", *, timeout: float = 60.0) -> int:
    """POST all lines of the event files ``paths``, or of those below them, to ``url``; returns the number of bytes.
    Raises `UnavailableError` ``timeout`` seconds after it began, `PrivilegeError` when the token is wrong,
    `ConfigError` when the server refuses what is sent or there is no such address, `DataError`
    for a file that has no events."""
    until = time.monotonic() + timeout
    sent = 0
    for path in paths:
        for file in find(path, (".jsonl",), "events file or job folder"):
            for part in _parts(file):
                _post(url, part, token, until)
                sent += len(part)
    return sent


def _parts(file: Found) -> Iterator[bytes]:
    """Whole lines. The last one is left out while its end is not written: a later call sends it. `DataError`."""
    with doing(f"read {file}"), os.fdopen(file.open(), "rb") as lines:
        held = bytearray()
        while line := lines.readline(LINE_LIMIT):
            if not line.endswith(b"\n"):
                if len(line) == LINE_LIMIT:
                    raise DataError(f"{file} has a line of more than {LINE_LIMIT >> 10} KiB: it is no file of events")
                break
            if held and len(held) + len(line) > PART:
                yield bytes(held)
                held.clear()
            held += line
        if held:
            yield bytes(held)


def _post(url: str, body: bytes, token: str, until: float) -> None:
    headers = {"Content-Type": "application/x-ndjson"} | ({"Authorization": f"Bearer {token}"} if token else {})
    pause = _FIRST_PAUSE
    while True:
        why = "its time was over"
        if (left := until - time.monotonic()) > 0:
            try:
                request = urllib.request.Request(url, body, headers, method="POST")
                with _NO_REDIRECTS.open(request, timeout=left):
                    return
            except urllib.error.HTTPError as exc:
                with exc:
                    said = exc.read(200).decode(errors="replace").strip()
                if exc.code in (401, 403):
                    raise PrivilegeError(
                        f"{url} does not accept the token", hint="name the server's --token-file"
                    ) from None
                if exc.code < 500 and exc.code not in (408, 429):
                    raise ConfigError(
                        f"{url} refuses the events: {exc.code} {said}",
                        hint="the address ends with /events",
                    ) from None
                why = f"{exc.code} {said}"
            except (OSError, http.client.HTTPException) as exc:
                reason = getattr(exc, "reason", exc)
                why = str(getattr(reason, "strerror", None) or reason)
            except ValueError as exc:
                raise ConfigError(f"cannot use the address {url}: {exc}") from None
        if time.monotonic() + pause > until:
            raise UnavailableError(
                f"{url} did not take the events: {why}", hint="send them again later: nothing is lost"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A token goes to the server that was named, and nowhere else."""

    def redirect_request(self, *_: object) -> None:
        return None


_NO_REDIRECTS = urllib.request.build_opener(_NoRedirects)
