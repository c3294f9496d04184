"""nginx before a registry, as ``deploy/nginx/registry-cache.conf`` sets it up."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.service import free_port, service, wait_for_port

_CONFIG = Path(__file__).parents[2] / "deploy/nginx/registry-cache.conf"
_PORT = 5000
"""In a network of its own, where it is free."""


class RegistryCache:
    """Starts in ``__enter__``, stops in ``__exit__``, and keeps nothing.

    ``upstream``: the address of a registry without TLS. ``prefix`` begins the command line, and may put it into another
    network, of which ``host`` is an address. Raises `UnsupportedError` when nginx is missing and `UnavailableError`
    when it does not answer in time.
    """

    def __init__(self, upstream: str, *, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        self._upstream, self._host, self._prefix = upstream, host, prefix
        self._stack = contextlib.ExitStack()
        self.address = f"{host}:{_PORT if prefix else free_port(host)}"
        """``host:port``."""

    def __enter__(self) -> RegistryCache:
        with self._stack as stack:
            folder = Path(tempfile.mkdtemp(prefix="bootseer-nginx-", dir="/var/tmp"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.chmod(0o755)  # its workers are no root
            text = _CONFIG.read_text()
            for theirs, ours in (
                ("registry.example.org:5000", self._upstream),
                ("0.0.0.0:5000", self.address),
                ("/var/cache/bootseer-registry", str(folder)),
                ("/run/bootseer-registry-cache.pid", f"{folder}/pid"),
            ):
                assert theirs in text
                text = text.replace(theirs, ours)
            (folder / "nginx.conf").write_text(text)
            own = "daemon off; error_log stderr;"
            argv = [*self._prefix, "nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", own]
            process = stack.enter_context(service(argv, folder / "log"))
            host, _, port = self.address.rpartition(":")
            wait_for_port(host, int(port), "nginx", process)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
