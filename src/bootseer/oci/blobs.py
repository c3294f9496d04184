"""Reading blobs: whole ones as resumed streams, ranges as bytes. Digests are the caller's to verify. Where a registry
redirects blobs to storage elsewhere, the place is remembered per blob for ``LINK_AGE`` seconds, so a range costs one
request; when such a signed link has expired the registry is asked for a new one."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from bootseer.errors import DataError, NotFoundError, UnavailableError, UnsupportedError
from bootseer.oci.endpoint import RETRIES, Again, Endpoint
from bootseer.oci.spec import Descriptor
from bootseer.oci.transport import Answer
from bootseer.oci.wire import TransportError, number

log = logging.getLogger(__name__)

LINK_AGE = 240.0
RANGE_STALL = 10.0
"""Seconds without progress after which a range is given up: a reader waits for it, and has other sources."""
_MAX_PAUSE = 1.0
"""Seconds a range may sleep because the registry asks for it; the caller may have another source."""
_MOST_SKIPPED = 8 << 20
"""Bytes read and thrown away for one range where a server sends whole blobs: a pack of 1 GB would move per block."""
_CHUNK = 256 << 10
_LINKS = 256
_EXPIRED = (400, 401, 403, 404, 410)
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)\Z")


class Blobs:
    """Blobs of one `Endpoint`. Used by any number of threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._links: dict[str, tuple[str, float]] = {}
        self._told = False

    def stream(self, item: Descriptor, start: int) -> Iterator[bytes]:
        """The blob's bytes from ``start``, resumed where they broke off; `UnavailableError` when no progress is made:
        after ``RETRIES`` failures in a row without a byte between them."""
        at, failures = start, 0
        while at < item.size:
            try:
                for chunk in self._part(item, at, item.size - at):
                    at += len(chunk)
                    failures = 0
                    yield chunk
            except (TransportError, Again) as exc:
                failures += 1
                if failures > RETRIES:
                    raise self._endpoint.unavailable(exc) from None
                self._endpoint.pause(failures, exc, f"blob {item.digest[:19]} at byte {at}")

    def pieces(self, item: Descriptor, offset: int, lengths: Sequence[int]) -> Iterator[bytes]:
        """The bytes from ``offset`` in pieces of these lengths, each as soon as it is there: one request, made again
        once, and only while there is no piece yet. Raises `DataError` past the end, `UnavailableError`,
        `UnsupportedError` when the server sends whole blobs only and the range is far inside."""
        length, came = sum(lengths), 0
        if offset < 0 or min(lengths, default=0) < 0 or offset + length > item.size:
            raise DataError(f"blob {item.digest} ends at {item.size}, wanted {offset + length}")
        again = False
        while length and came < len(lengths):
            try:
                for piece in self._part(item, offset, length, lengths, patience=RANGE_STALL):
                    if len(piece) < lengths[came]:
                        raise TransportError(f"the answer ends inside a piece of blob {item.digest[:19]}")
                    came += 1
                    yield piece
            except (TransportError, Again) as exc:
                if came or again or (isinstance(exc, Again) and (exc.after or 0.0) > _MAX_PAUSE):
                    raise self._endpoint.unavailable(exc) from None
                again = True
                self._endpoint.pause(1, exc, f"{length} bytes of blob {item.digest[:19]}")

    def _part(
        self, item: Descriptor, offset: int, length: int, sizes: Iterable[int] = (), *, patience: float | None = None
    ) -> Iterator[bytes]:
        """``length`` bytes from ``offset`` in one request, or what came of them and then an exception. In pieces of
        ``sizes`` that add up to ``length``, else of some size; the last one before an exception may be shorter."""
        whole = not offset and length == item.size
        headers = {} if whole else {"Range": f"bytes={offset}-{offset + length - 1}"}
        with self._open(item, headers, patience) as answer:
            self._look(answer, item, patience)
            skip = self._skip(answer, item, offset, length)
            if skip > _MOST_SKIPPED and patience is not None:
                raise UnsupportedError(
                    f"registry {self._endpoint.registry} does not serve ranges of blobs: {skip >> 20} MiB would be"
                    f" thrown away for {length} bytes of {item.digest[:19]}",
                    hint="use a registry or mirror that does",
                )
            while skip:
                skip -= len(_some(answer, min(_CHUNK, skip), item))
            for size in sizes or _chunks(length):
                yield _some(answer, size, item)

    def _look(self, answer: Answer, item: Descriptor, patience: float | None) -> None:
        """Whether the answer can be of this blob at all. A page of a proxy is gone by the next try, perhaps, and a
        reader may wait for that; nobody else does."""
        said = {name: answer.headers.get(f"content-{name}", "").lower() for name in ("type", "encoding", "length")}
        size = number(said["length"]) if answer.status == 200 else None
        other = size != item.size if size is not None else said["type"].startswith("text/html")
        if other:  # what is only labelled as encoded is decided by its digest
            what = f"registry {self._endpoint.registry} answers something else than blob {item.digest}"
            told = ", ".join(f"{name} {text[:80]!r}" for name, text in said.items() if text)
            raise (DataError if patience is None else UnavailableError)(
                f"{what} of {item.size} bytes: {told}", hint="a proxy or login page may be in between"
            )

    def _skip(self, answer: Answer, item: Descriptor, offset: int, length: int) -> int:
        """How many bytes of the answer's body come before the wanted ones, after checking that it holds those."""
        where = f"registry {self._endpoint.registry}"
        if answer.status == 206:
            match = _RANGE.match(answer.headers.get("content-range", "").strip())
            if not match:
                raise DataError(f"{where} answers a range of blob {item.digest} without saying which")
            first, last, total = int(match[1]), int(match[2]), match[3]
            if first > offset or last < offset + length - 1 or total not in ("*", str(item.size)):
                raise DataError(
                    f"{where} answers bytes {first}-{last} of {total} for {offset}-{offset + length - 1} of"
                    f" {item.size} of blob {item.digest}"
                )
            return offset - first
        if offset and not self._told:
            self._told = True
            log.warning("%s does not serve ranges of blobs: reading from their beginning", where)
        return offset

    def _open(self, item: Descriptor, headers: dict[str, str], patience: float | None) -> Answer:
        """An answer of 200 or 206, through a remembered link when there is one."""
        what = f"blob {item.digest}"
        with self._lock:
            url, until = self._links.get(item.digest, ("", 0.0))
        known = bool(url) and time.monotonic() < until
        path = url if known else f"/blobs/sha256:{item.hex}"
        answer = self._endpoint.once("GET", path, headers=headers, patience=patience)
        if answer.status in (200, 206):
            if not self._endpoint.own(answer.url) and not known:
                self._remember(item.digest, answer.url)
            return answer
        with answer:
            where = f"registry {self._endpoint.registry}"
            if not self._endpoint.own(answer.url) and answer.status in _EXPIRED:
                self._remember(item.digest, "")
                after = 0.0 if known else None
                raise Again(f"the link to its storage is not accepted (HTTP {answer.status})", after=after)
            if answer.status == 404:
                raise NotFoundError(f"{what} does not exist in {where}/{self._endpoint.name}")
            if answer.status == 416:
                raise DataError(f"{what} in {where} is shorter than its {item.size} bytes")
            self._endpoint.check(answer, what)
            raise UnavailableError(f"{where} answers HTTP {answer.status} for {what}")

    def _remember(self, digest: str, url: str) -> None:
        with self._lock:
            if len(self._links) >= _LINKS:
                self._links.clear()
            self._links[digest] = (url, time.monotonic() + LINK_AGE)


def _chunks(length: int) -> Iterator[int]:
    while length:
        size = min(_CHUNK, length)
        length -= size
        yield size


def _some(answer: Answer, size: int, item: Descriptor) -> bytes:
    piece = answer.read(size)
    if not piece:
        raise TransportError(f"the answer ends before the asked bytes of blob {item.digest[:19]} do")
    return piece
