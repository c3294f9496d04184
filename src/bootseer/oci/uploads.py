"""Uploading blobs: small ones in one request, large ones in pieces. One that broke off is resumed where the registry
says it is; a registry that cannot say (docker-registry 2.8 keeps the offset in the upload's own URL) gets the blob from
its beginning."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from bootseer import faults
from bootseer.errors import DataError, UnavailableError, from_os_error
from bootseer.oci.endpoint import RETRIES, Again, Endpoint, place
from bootseer.oci.spec import Descriptor
from bootseer.oci.transport import Answer
from bootseer.oci.wire import FilePart, TransportError, onward, secured

PIECE = 64 << 20
"""Size of a piece: above every registry's least (5 MiB) and what registries on S3 copy again (10 MB)."""
COMMIT = 300.0
"""Seconds a registry may take to check and move a whole blob before it answers."""
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})\Z")


class _Broken(Exception):
    """The upload cannot go on and must begin again."""


class Uploads:
    """Uploads to one `Endpoint`. Used by any number of threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def put(self, item: Descriptor, source: Path | bytes) -> None:
        """Upload the content of ``source``, which is ``item``. Raises `UnavailableError`, `NotWritableError`, ..."""
        what = f"blob {item.digest} to {self._endpoint.registry}/{self._endpoint.name}"
        failures = 0
        while True:
            try:
                if isinstance(source, Path) and item.size > PIECE:
                    self._pieces(item, source, what)
                else:
                    self._whole(item, source, what)
                return
            except OSError as exc:
                raise from_os_error(exc, f"read {source if isinstance(source, Path) else what}") from exc
            except (TransportError, Again, _Broken) as exc:
                failures += 1
                if failures > RETRIES or (isinstance(exc, TransportError) and exc.fresh):
                    raise self._endpoint.unavailable(exc) from None
                self._endpoint.pause(failures, exc, f"upload of {what}")

    def _whole(self, item: Descriptor, source: Path | bytes, what: str) -> None:
        place = self._begin(what)
        body = FilePart(source, 0, item.size) if isinstance(source, Path) else source
        self._commit(place, item, body, what)

    def _pieces(self, item: Descriptor, source: Path, what: str) -> None:
        place, at, failures = self._begin(what), 0, 0
        while at < item.size:
            length = min(PIECE, item.size - at)
            try:
                place = self._piece(place, FilePart(source, at, length), what)
                at, failures = at + length, 0
            except (TransportError, Again) as exc:
                failures += 1
                if failures > RETRIES:
                    raise
                self._endpoint.pause(failures, exc, f"upload of {what} at byte {at}")
                place, at = self._progress(place, at, length)
            faults.point("registry.upload.after-piece")
        self._commit(place, item, b"", what)

    def _begin(self, what: str) -> str:
        with self._endpoint.request("POST", "/blobs/uploads/", what, body=b"") as answer:
            self._endpoint.check(answer, what, writing=True)
            return self._next(answer)

    def _piece(self, place: str, part: FilePart, what: str) -> str:
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Range": f"{part.offset}-{part.offset + part.length - 1}",
        }
        with self._endpoint.once("PATCH", place, headers=headers, body=part, patience=COMMIT) as answer:
            if answer.status in (404, 416):
                raise _Broken(f"the registry lost the upload (HTTP {answer.status})")
            self._endpoint.check(answer, what, writing=True)
            return self._next(answer)

    def _progress(self, place: str, at: int, length: int) -> tuple[str, int]:
        """Where to go on after a failed piece: the registry's URL and offset; `_Broken` when it does not know."""
        with self._endpoint.once("GET", place) as answer:
            match = _RANGE.match(answer.headers.get("range", "").strip())
            if answer.status not in (202, 204) or not match:
                raise _Broken("the registry cannot resume the upload")
            # "0-0" says both "one byte" and "nothing yet"; nobody sends pieces of one byte.
            reached = int(match[1]) + 1 if int(match[1]) else 0
            if not at <= reached <= at + length:
                raise _Broken(f"the registry is at byte {reached} of the upload, not between {at} and {at + length}")
            return (self._next(answer) if "location" in answer.headers else place), reached

    def _commit(self, place: str, item: Descriptor, body: FilePart | bytes, what: str) -> None:
        place += ("&" if urlsplit(place).query else "?") + urlencode({"digest": item.digest})
        headers = {"Content-Type": "application/octet-stream"}
        with self._endpoint.once("PUT", place, headers=headers, body=body, patience=COMMIT) as answer:
            if answer.status in (404, 416):
                raise _Broken(f"the registry lost the upload (HTTP {answer.status})")
            if answer.status == 400 and isinstance(body, FilePart) and _digest(body.path) != item.digest:
                raise DataError(f"{body.path} changed while it was uploaded")
            self._endpoint.check(answer, what, writing=True)
            got = answer.headers.get("docker-content-digest", item.digest)
        if got != item.digest:
            raise DataError(f"registry {self._endpoint.registry} stored {got} for blob {item.digest}")

    def _next(self, answer: Answer) -> str:
        if "location" not in answer.headers:
            raise UnavailableError(f"registry {self._endpoint.registry} does not say where to upload to")
        there = onward(answer.url, answer.headers["location"])
        if not (safe := secured(answer.url, there)):
            raise UnavailableError(
                f"registry {self._endpoint.registry} wants uploads sent to {place(there)} without TLS",
                hint="that is refused",
            )
        return safe


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
