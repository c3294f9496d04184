"""An index of Python packages (PEP 503) that tells what was asked of it, and packages for it."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import tarfile
import threading
import zipfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_BACKEND = """
import os, zipfile

NAME, VERSION = {name!r}, {version!r}

def build_wheel(folder, config_settings=None, metadata_directory=None):
    made, info = f"{{NAME}}-{{VERSION}}-py3-none-any.whl", f"{{NAME}}-{{VERSION}}.dist-info"
    files = {{
        f"{{NAME}}.py": "X = 1\\n",
        f"{{info}}/METADATA": f"Metadata-Version: 2.1\\nName: {{NAME}}\\nVersion: {{VERSION}}\\n",
        f"{{info}}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }}
    files[f"{{info}}/RECORD"] = "".join(f"{{one}},,\\n" for one in [*files, f"{{info}}/RECORD"])
    with zipfile.ZipFile(os.path.join(folder, made), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return made
"""


def wheel(name: str, version: str, *, size: int = 10_000, files: int = 1, seed: int = 0) -> tuple[str, bytes]:
    """The name and the bytes of a wheel with about so many random bytes in so many modules and a data file."""
    made, info = random.Random(f"{name} {version} {seed}"), f"{name}-{version}.dist-info"
    content = {f"{name}/m{number}.py": b"X = %d\n" % number for number in range(files)}
    content |= {f"{name}/__init__.py": f"VERSION = {version!r}\n".encode(), f"{name}/data.bin": made.randbytes(size)}
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"]).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            archive.writestr(path, data)
    return f"{name}-{version}-py3-none-any.whl", out.getvalue()


def sdist(name: str, version: str) -> tuple[str, bytes]:
    """A source package that builds its wheel itself, with nothing else."""
    backend = _BACKEND.format(name=name, version=version)
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n',
        "backend.py": backend,
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path, text in files.items():
            item = tarfile.TarInfo(f"{name}-{version}/{path}")
            item.size = len(text.encode())
            archive.addfile(item, io.BytesIO(text.encode()))
    return f"{name}-{version}.tar.gz", out.getvalue()


class PackageIndex:
    """Serves from ``__enter__`` to ``__exit__``. With a ``login`` (``user:password``) for those alone who have it.
    ``headers`` go with each answer."""

    def __init__(
        self,
        *packages: tuple[str, bytes],
        host: str = "127.0.0.1",
        login: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.packages, self.login, self.headers = dict(packages), login, dict(headers or {})
        self.asked: list[str] = []
        """The paths of all answers with a body."""
        index = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                index._answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.host, self.port = host, self._server.server_address[1]

    @property
    def fetched(self) -> list[str]:
        """The packages that were fetched since somebody has cleared `asked`."""
        return sorted(path.rpartition("/")[2] for path in self.asked if path.endswith((".whl", ".gz")))

    @property
    def url(self) -> str:
        return f"http://{self.login + '@' if self.login else ''}{self.host}:{self.port}/simple/"

    def __enter__(self) -> PackageIndex:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, ask: BaseHTTPRequestHandler) -> None:
        given = ask.headers.get("Authorization", "")
        if self.login and given != "Basic " + base64.b64encode(self.login.encode()).decode():
            self._send(ask, 401, b"", {"WWW-Authenticate": 'Basic realm="packages"'})
            return
        path = ask.path.partition("?")[0]
        parts = path.strip("/").split("/")
        if parts[0] == "simple" and len(parts) == 2:
            links = [
                f'<a href="/files/{file}#sha256={hashlib.sha256(data).hexdigest()}"'
                f"{' data-core-metadata=true data-dist-info-metadata=true' * file.endswith('.whl')}>{file}</a>"
                for file, data in self.packages.items()
                if file.split("-")[0] == parts[1].replace("-", "_")
            ]
            found = "<!DOCTYPE html><html><body>" + "".join(links) + "</body></html>" if links else ""
            self._send(
                ask,
                200 if found else 404,
                found.encode(),
                {"Content-Type": "text/html", "Cache-Control": "max-age=600"},
            )
        elif parts[0] == "files" and parts[-1].removesuffix(".metadata") in self.packages:
            data = self.packages[parts[-1].removesuffix(".metadata")]
            if parts[-1].endswith(".metadata"):
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    data = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA")))
            self._send(
                ask,
                200,
                data,
                {"Content-Type": "application/octet-stream", "Cache-Control": "max-age=365000000, immutable"},
            )
        else:
            self._send(ask, 404, b"", {})

    def _send(self, ask: BaseHTTPRequestHandler, code: int, body: bytes, headers: Mapping[str, str]) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        if code == 200 and ask.headers.get("If-None-Match") == tag:
            code, body = 304, b""
        ask.send_response(code)
        for name, value in {**headers, **self.headers, "ETag": tag}.items():
            ask.send_header(name, value)
        ask.send_header("Content-Length", str(len(body)))
        ask.end_headers()
        if ask.command == "GET" and body:
            self.asked.append(ask.path)
            ask.wfile.write(body)
