"""A small client of the OCI distribution API (v1.1): manifests, blobs with resume, uploads.

One `httpx.Client` is shared by all threads (it is thread-safe). Waits are judged by progress: a transfer fails when
no byte came for `STALL` seconds, however long it takes in all; a stretch without progress is retried `RETRIES` times.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import httpx

from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, PrivilegeError, UnavailableError
from bootseer.oci.reference import Reference
from bootseer.oci.spec import MANIFEST_TYPES, MAX_DOCUMENT, Descriptor, digest_of

log = logging.getLogger(__name__)

CONNECT = 10.0
STALL = 30.0
RETRIES = 4
_CHUNK = 1 << 18
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_ALIASES = {"docker.io": "registry-1.docker.io"}


class Registry:
    """The repository of one reference. ``plain_http`` None: HTTP for loopback and private addresses, else HTTPS."""

    def __init__(self, ref: Reference, *, plain_http: bool | None = None) -> None:
        self.ref = ref
        plain = ref.plain_http if plain_http is None else plain_http
        self.base = f"{'http' if plain else 'https'}://{_ALIASES.get(ref.registry, ref.registry)}/v2/{ref.name}"
        self._client = httpx.Client(
            timeout=httpx.Timeout(STALL, connect=CONNECT),
            follow_redirects=True,
            trust_env=not ref.plain_http,
            headers={"User-Agent": "bootseer"},
        )
        self._auth_lock = threading.Lock()
        self._authorization = ""

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def manifest(self, selector: str) -> tuple[bytes, str, str]:
        """The manifest or index named by a tag or digest: its bytes, media type and digest (always recomputed)."""
        headers = {"Accept": ", ".join(MANIFEST_TYPES)}
        what = f"image {self.ref}"
        answer = self._request("GET", f"/manifests/{selector}", what, headers=headers)
        if answer.status_code == 404:
            raise NotFoundError(
                f"{what} does not exist in registry {self.ref.registry}",
                hint="check its name and tag for typing errors",
            )
        self._check(answer, what)
        body = answer.content
        if len(body) > MAX_DOCUMENT:
            raise DataError(f"the manifest of {what} is {len(body)} bytes, more than {MAX_DOCUMENT}")
        digest = digest_of(body)
        if selector.startswith("sha256:") and digest != selector:
            raise DataError(f"registry {self.ref.registry} returned other bytes for {what}")
        return body, answer.headers.get("content-type", "").partition(";")[0].strip(), digest

    def blob(self, item: Descriptor, start: int = 0) -> Iterator[bytes]:
        """The blob's bytes from ``start``, resumed after failures. Digest and size are the caller's to verify."""
        at, failures = start, 0
        while at < item.size:
            try:
                for chunk in self._blob_once(item, at):
                    at += len(chunk)
                    failures = 0
                    yield chunk
                if at < item.size:
                    raise DataError(f"blob {item.digest} of {self.ref} ends after {at} of {item.size} bytes")
            except (httpx.TransportError, _Again) as exc:
                failures += 1
                if failures > RETRIES:
                    raise self._unavailable(exc) from None
                pause = _backoff(failures, exc)
                log.warning("blob %s at byte %d: %s; trying again in %.1f s", item.digest, at, _why(exc), pause)
                time.sleep(pause)

    def _blob_once(self, item: Descriptor, at: int) -> Iterator[bytes]:
        headers = {"Accept-Encoding": "identity"}
        if at:
            headers["Range"] = f"bytes={at}-"
        url, what = f"{self.base}/blobs/{item.digest}", f"layer {item.digest} of {self.ref}"
        with self._client.stream("GET", url, headers=self._with_auth(headers)) as answer:
            if answer.status_code == 401 and self._login(answer):
                raise _Again("the registry wanted a token")
            if answer.status_code == 404:
                raise NotFoundError(f"{what} does not exist in registry {self.ref.registry}")
            if answer.status_code in (429, 500, 502, 503, 504):
                raise _Again(f"HTTP {answer.status_code}", _retry_after(answer))
            if not (answer.status_code == 206 or (answer.status_code == 200 and not at)):
                if answer.status_code != 200:
                    answer.read()
                    self._check(answer, what)
                skip = at
            else:
                skip = 0
            for chunk in answer.iter_raw(_CHUNK):
                if skip:
                    cut = min(skip, len(chunk))
                    skip -= cut
                    chunk = chunk[cut:]
                if chunk:
                    yield chunk

    def has_blob(self, digest: str) -> bool:
        answer = self._request("HEAD", f"/blobs/{digest}", f"blob {digest}")
        if answer.status_code == 404:
            return False
        self._check(answer, f"blob {digest}")
        return True

    def put_blob(self, item: Descriptor, source: Path) -> bool:
        """Upload the file ``source`` as blob ``item`` in one request; False when the registry has it already."""
        if self.has_blob(item.digest):
            return False
        what = f"blob {item.digest} to {self.ref.registry}/{self.ref.name}"
        for attempt in range(1, RETRIES + 1):
            opened = self._request("POST", "/blobs/uploads/", what)
            self._check(opened, what, writing=True)
            place = opened.url.join(opened.headers["location"]).copy_merge_params({"digest": item.digest})
            headers = self._with_auth({"Content-Length": str(item.size), "Content-Type": "application/octet-stream"})
            try:
                with open(source, "rb") as file:
                    answer = self._client.put(place, content=_file_chunks(file), headers=headers)
            except httpx.TransportError as exc:
                if attempt == RETRIES:
                    raise self._unavailable(exc) from None
                log.warning("upload of %s: %s; trying again", what, _why(exc))
                time.sleep(_backoff(attempt, exc))
                continue
            self._check(answer, what, writing=True)
            got = answer.headers.get("docker-content-digest", item.digest)
            if got != item.digest:
                raise DataError(f"registry {self.ref.registry} stored {got} for blob {item.digest}")
            return True
        raise AssertionError("unreachable")

    def put_manifest(self, body: bytes, media_type: str, selector: str) -> str:
        """Store a manifest under a tag or its digest; returns the digest after reading it back."""
        what = f"manifest of {self.ref}"
        answer = self._request(
            "PUT", f"/manifests/{selector}", what, headers={"Content-Type": media_type}, content=body
        )
        self._check(answer, what, writing=True)
        digest = digest_of(body)
        if self.manifest(digest)[0] != body:
            raise DataError(f"registry {self.ref.registry} returned other bytes for the {what}")
        return digest

    def _request(
        self, method: str, path: str, what: str, *, headers: dict[str, str] | None = None, content: bytes | None = None
    ) -> httpx.Response:
        failures = 0
        while True:
            try:
                answer = self._client.request(
                    method, self.base + path, headers=self._with_auth(headers or {}), content=content
                )
                if answer.status_code == 401 and self._login(answer):
                    raise _Again("the registry wanted a token")
                if answer.status_code in (429, 502, 503, 504):
                    raise _Again(f"HTTP {answer.status_code}", _retry_after(answer))
                return answer
            except httpx.ConnectError as exc:
                raise self._unavailable(exc) from None
            except (httpx.TransportError, _Again) as exc:
                failures += 1
                if failures > RETRIES:
                    raise self._unavailable(exc) from None
                pause = _backoff(failures, exc)
                log.log(logging.DEBUG if pause == 0 else logging.WARNING, "%s: %s; again", what, _why(exc))
                time.sleep(pause)

    def _check(self, answer: httpx.Response, what: str, *, writing: bool = False) -> None:
        code = answer.status_code
        if code < 300:
            return
        where = f"registry {self.ref.registry}"
        if code in (401, 403):
            raise PrivilegeError(f"{where} denies access to {what}", hint="log in, e.g. with docker login")
        if code == 404:
            raise NotFoundError(f"{what} does not exist in {where}")
        detail = _detail(answer)
        if writing and code in (405, 507):
            raise NotWritableError(f"{where} does not accept {what}: HTTP {code}{detail}")
        if code >= 500:
            raise UnavailableError(f"{where} failed on {what}: HTTP {code}{detail}", hint="look at the registry's log")
        raise BootseerError(f"{where} refused {what}: HTTP {code}{detail}")

    def _unavailable(self, exc: Exception) -> UnavailableError:
        return UnavailableError(
            f"registry {self.ref.registry} does not answer at {self.base.split('/v2/')[0]}: {_why(exc)}",
            hint="check that it runs and is reachable from here",
        )

    def _with_auth(self, headers: dict[str, str]) -> dict[str, str]:
        return {**headers, "Authorization": self._authorization} if self._authorization else headers

    def _login(self, answer: httpx.Response) -> bool:
        """Follow a 401's challenge once; False when it leads nowhere new (then the 401 stands)."""
        scheme, _, rest = answer.headers.get("www-authenticate", "").partition(" ")
        fields = dict(_CHALLENGE.findall(rest))
        basic = _docker_login(self.ref.registry)
        with self._auth_lock:
            before = self._authorization
            if answer.request.headers.get("authorization", "") != before:
                return True  # another thread has logged in meanwhile
            if scheme.lower() == "basic" and basic:
                self._authorization = f"Basic {basic}"
            elif scheme.lower() == "bearer" and "realm" in fields and not before.startswith("Bearer"):
                query = {key: fields[key] for key in ("service", "scope") if key in fields}
                headers = {"Authorization": f"Basic {basic}"} if basic else {}
                reply = self._client.get(fields["realm"], params=query, headers=headers)
                if reply.status_code == 200:
                    token = self._token(reply)
                    self._authorization = f"Bearer {token}" if token else ""
            elif before.startswith("Bearer"):
                self._authorization = ""  # expired: the next round asks without it and is challenged again
                return True
            return self._authorization != before

    def _token(self, reply: httpx.Response) -> str:
        try:
            fields = reply.json()
            return str(fields.get("token") or fields.get("access_token") or "")
        except (ValueError, AttributeError):
            raise UnavailableError(
                f"registry {self.ref.registry}: {reply.url.host} answers a request for a token with something else",
                hint="a proxy or login page may be in between",
            ) from None


class _Again(Exception):
    """A reason to repeat a request; ``after`` seconds if the server said so."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


def _backoff(failures: int, exc: Exception) -> float:
    if isinstance(exc, _Again):
        if not exc.args[0].startswith("HTTP"):
            return 0.0
        if exc.after:
            return min(exc.after, STALL)
    return float(min(8.0, 0.25 * 2**failures) * random.uniform(0.5, 1.0))


def _retry_after(answer: httpx.Response) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdigit() else 0.0


def _why(exc: Exception) -> str:
    text = str(exc) or type(exc).__name__
    return re.sub(r"^\[Errno -?\d+\] ", "", text)


def _detail(answer: httpx.Response) -> str:
    try:
        errors = answer.json()["errors"]
        return f" ({errors[0]['code']}: {errors[0].get('message', '')})"
    except (ValueError, KeyError, IndexError, TypeError, httpx.ResponseNotRead):
        return ""


def _file_chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(1 << 20):
        yield chunk


def _docker_login(registry: str) -> str:
    """The base64 ``user:password`` that ``docker login`` stored in plain, or empty."""
    folder = os.environ.get("DOCKER_CONFIG", os.path.expanduser("~/.docker"))
    try:
        auths = json.loads(Path(folder, "config.json").read_text()).get("auths", {})
        text = str(auths.get(registry, {}).get("auth", ""))
        base64.b64decode(text, validate=True)
    except (OSError, ValueError, AttributeError):
        return ""
    return text
