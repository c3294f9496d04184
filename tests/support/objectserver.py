"""A small S3 server in this process: one bucket in memory, as much of the protocol as s3fs uses.

It knows conditional PUT (If-None-Match), multipart uploads, ranges and listings; it asks for no signature. ``ignoring``
makes it like servers that do not know conditions.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
import uuid
from collections.abc import Callable
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from support.web import Answer, Request, WebServer

BUCKET = "bucket"


class _Object(NamedTuple):
    data: bytes
    etag: str
    mtime: float


class ObjectServer(WebServer):
    """``url`` is for ``endpoint_url``. ``log``: method and key of each request.

    While ``silent`` is set none is answered. ``terse``: a refusal does not say which condition was not met.
    """

    def __init__(self, *, ignoring: bool = False, terse: bool = False, host: str = "127.0.0.1") -> None:
        super().__init__(lambda request: _Asked(self, request).answer(), host)
        self.ignoring, self.terse = ignoring, terse
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.log: list[tuple[str, str]] = []
        self.silent = threading.Event()
        self.lock = threading.Lock()
        self.url = f"http://{self.address}"

    @property
    def options(self) -> dict[str, object]:
        """For s3fs."""
        return {"endpoint_url": self.url, "key": "key", "secret": "secret", "client_kwargs": {"region_name": "here"}}

    def put(self, key: str, data: bytes) -> str:
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        self.objects[key] = _Object(data, etag, time.time())
        return etag

    def __exit__(self, *exc: object) -> None:
        self.silent.clear()
        super().__exit__(*exc)


def _xml(name: str, inside: str, status: int = 200) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inside}</{name}>'
    return Answer(status, text.encode(), {"Content-Type": "application/xml"})


def _error(status: int, code: str) -> Answer:
    return _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)


class _Asked:
    """One request."""

    def __init__(self, store: ObjectServer, request: Request) -> None:
        self.store, self.command, self.headers, self.body = store, request.command, request.headers, request.body
        parts = urlsplit(request.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.bucket, _, self.key = unquote(parts.path).lstrip("/").partition("/")

    def answer(self) -> Answer:
        self.store.log.append((self.command, self.key))
        while self.store.silent.is_set():
            time.sleep(0.01)
        ask = {"PUT": self._put, "POST": self._post, "DELETE": self._delete}.get(
            self.command, self._get if self.key else self._list
        )
        with self.store.lock:
            return ask() if self.bucket == BUCKET else _error(404, "NoSuchBucket")

    def _get(self) -> Answer:
        found = self.store.objects.get(self.key)
        if found is None:
            return _error(404, "NoSuchKey")
        headers = {"ETag": found.etag, "Last-Modified": formatdate(found.mtime, usegmt=True)}
        data, status = found.data, 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), int(asked[2] or len(data) - 1)
            if first >= len(data):
                return _error(416, "InvalidRange")
            last, status = min(last, len(data) - 1), 206
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data = data[first : last + 1]
        return Answer(status, data, headers)

    def _list(self) -> Answer:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        contents, folders, encoded = [], set(), self.query.get("encoding-type") == "url"
        name: Callable[[str], str] = quote if encoded else escape  # XML has no control characters
        for key, found in sorted(self.store.objects.items()):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            when = (
                time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(found.mtime)) + f".{int(found.mtime * 1000) % 1000:03}Z"
            )
            contents.append(
                f"<Contents><Key>{name(key)}</Key><LastModified>{when}</LastModified>"
                f"<ETag>{escape(found.etag)}</ETag><Size>{len(found.data)}</Size></Contents>"
            )
        common = [f"<CommonPrefixes><Prefix>{name(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)]
        count = f"<KeyCount>{len(contents) + len(common)}</KeyCount><IsTruncated>false</IsTruncated>"
        encoding = "<EncodingType>url</EncodingType>" if encoded else ""
        return _xml("ListBucketResult", encoding + count + "".join(contents + common))

    def _refused(self) -> Answer | None:
        if self.headers.get("If-None-Match") == "*" and self.key in self.store.objects and not self.store.ignoring:
            which = "" if self.store.terse else "<Condition>If-None-Match</Condition>"
            return _xml("Error", f"<Code>PreconditionFailed</Code><Message>refused</Message>{which}", 412)
        return None

    def _put(self) -> Answer:
        if number := self.query.get("partNumber"):
            self.store.uploads[self.query["uploadId"]][int(number)] = self.body
            return Answer(headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})
        if refused := self._refused():
            return refused
        if source := self.headers.get("x-amz-copy-source"):
            found = self.store.objects.get(unquote(source).partition("?")[0].lstrip("/").partition("/")[2])
            if found is None:
                return _error(404, "NoSuchKey")
            return _xml("CopyObjectResult", f"<ETag>{escape(self.store.put(self.key, found.data))}</ETag>")
        return Answer(headers={"ETag": self.store.put(self.key, self.body)})

    def _post(self) -> Answer:
        if "uploads" in self.query:
            upload = uuid.uuid4().hex
            self.store.uploads[upload] = {}
            inside = f"<Bucket>{BUCKET}</Bucket><Key>{escape(self.key)}</Key><UploadId>{upload}</UploadId>"
            return _xml("InitiateMultipartUploadResult", inside)
        if "delete" in self.query:
            for key in re.findall(r"<Key>(.*?)</Key>", self.body.decode()):
                self.store.objects.pop(key, None)
            return _xml("DeleteResult", "")
        if refused := self._refused():
            return refused
        parts = self.store.uploads.pop(self.query["uploadId"])
        etag = self.store.put(self.key, b"".join(parts[number] for number in sorted(parts)))
        return _xml("CompleteMultipartUploadResult", f"<Key>{escape(self.key)}</Key><ETag>{escape(etag)}</ETag>")

    def _delete(self) -> Answer:
        if upload := self.query.get("uploadId"):
            self.store.uploads.pop(upload, None)
        else:
            self.store.objects.pop(self.key, None)
        return Answer(204)
