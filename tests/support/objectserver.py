"""A small S3 server in this process: one bucket in memory, as much of the protocol as s3fs uses.

It knows conditional PUT (If-None-Match), multipart uploads, ranges and listings; it asks for no signature. ``ignoring``
makes it like servers that do not know conditions.
"""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
import time
import uuid
from collections.abc import Callable
from email.utils import formatdate
from types import TracebackType
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"


class _Object(NamedTuple):
    data: bytes
    etag: str
    mtime: float


class ObjectServer:
    """``url`` is for ``endpoint_url``. ``log``: method and key of each request.

    While ``silent`` is set none is answered. ``terse``: a refusal does not say which condition was not met.
    """

    def __init__(self, *, ignoring: bool = False, terse: bool = False, host: str = "127.0.0.1") -> None:
        self.ignoring, self.terse = ignoring, terse
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.log: list[tuple[str, str]] = []
        self.silent = threading.Event()
        self._server = http.server.ThreadingHTTPServer((host, 0), type("Handler", (_Handler,), {"store": self}))
        self._server.daemon_threads = True
        self.lock = threading.Lock()
        self.url = f"http://{host}:{self._server.server_address[1]}"

    @property
    def options(self) -> dict[str, object]:
        """For s3fs."""
        return {"endpoint_url": self.url, "key": "key", "secret": "secret", "client_kwargs": {"region_name": "here"}}

    def put(self, key: str, data: bytes) -> str:
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        self.objects[key] = _Object(data, etag, time.time())
        return etag

    def __enter__(self) -> ObjectServer:
        threading.Thread(target=self._server.serve_forever, name="object-server", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.silent.clear()
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are written apart: each answer would wait 40 ms
    store: ObjectServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        bucket, _, self.key = unquote(parts.path).lstrip("/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.store.log.append((self.command, self.key))
        while self.store.silent.is_set():
            time.sleep(0.01)
        with self.store.lock:
            if bucket != BUCKET:
                self._error(404, "NoSuchBucket")
            elif self.command in ("GET", "HEAD"):
                self._get() if self.key else self._list()
            else:
                getattr(self, f"_{self.command.lower()}")(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _xml(self, name: str, inside: str, status: int = 200) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inside}</{name}>'
        self._answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _error(self, status: int, code: str) -> None:
        self._xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)

    def _get(self) -> None:
        found = self.store.objects.get(self.key)
        if found is None:
            self._error(404, "NoSuchKey")
            return
        headers = {"ETag": found.etag, "Last-Modified": formatdate(found.mtime, usegmt=True)}
        data, status = found.data, 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), int(asked[2] or len(data) - 1)
            if first >= len(data):
                self._error(416, "InvalidRange")
                return
            last, status = min(last, len(data) - 1), 206
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data = data[first : last + 1]
        self._answer(status, data, {**headers, "Content-Length": str(len(data))})

    def _list(self) -> None:
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
        self._xml("ListBucketResult", encoding + count + "".join(contents + common))

    def _refused(self) -> bool:
        if self.headers.get("If-None-Match") == "*" and self.key in self.store.objects and not self.store.ignoring:
            which = "" if self.store.terse else "<Condition>If-None-Match</Condition>"
            self._xml("Error", f"<Code>PreconditionFailed</Code><Message>refused</Message>{which}", 412)
            return True
        return False

    def _put(self, body: bytes) -> None:
        if number := self.query.get("partNumber"):
            self.store.uploads[self.query["uploadId"]][int(number)] = body
            self._answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        elif self._refused():
            pass
        elif source := self.headers.get("x-amz-copy-source"):
            found = self.store.objects.get(unquote(source).partition("?")[0].lstrip("/").partition("/")[2])
            if found is None:
                self._error(404, "NoSuchKey")
            else:
                self._xml("CopyObjectResult", f"<ETag>{escape(self.store.put(self.key, found.data))}</ETag>")
        else:
            self._answer(200, b"", {"ETag": self.store.put(self.key, body)})

    def _post(self, body: bytes) -> None:
        if "uploads" in self.query:
            upload = uuid.uuid4().hex
            self.store.uploads[upload] = {}
            inside = f"<Bucket>{BUCKET}</Bucket><Key>{escape(self.key)}</Key><UploadId>{upload}</UploadId>"
            self._xml("InitiateMultipartUploadResult", inside)
        elif "delete" in self.query:
            for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                self.store.objects.pop(key, None)
            self._xml("DeleteResult", "")
        elif not self._refused():
            parts = self.store.uploads.pop(self.query["uploadId"])
            etag = self.store.put(self.key, b"".join(parts[number] for number in sorted(parts)))
            self._xml("CompleteMultipartUploadResult", f"<Key>{escape(self.key)}</Key><ETag>{escape(etag)}</ETag>")

    def _delete(self, body: bytes) -> None:
        if upload := self.query.get("uploadId"):
            self.store.uploads.pop(upload, None)
        else:
            self.store.objects.pop(self.key, None)
        self._answer(204)
