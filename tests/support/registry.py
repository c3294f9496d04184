"""A real registry for tests and demos: Debian's ``docker-registry`` on an address of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from bootseer.errors import UnsupportedError
from support.service import free_port, service, wait_for_port
from support.tokens import ISSUER, SERVICE, TokenServer

_CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: "{root}"}}
  delete: {{enabled: true}}
http: {{addr: "{address}", secret: "bootseer"}}
{more}
"""
_HTPASSWD = """\
auth: {{htpasswd: {{realm: tests, path: "{path}"}}}}
"""
_TOKENS = """\
auth: {{token: {{realm: "{realm}", service: {service}, issuer: {issuer}, rootcertbundle: "{certificate}"}}}}
"""
_PORT = 5000
"""In a network of its own, where it is free."""
USER, PASSWORD = "trainer", "correct-horse"
_BCRYPT = "$2y$05$abcdefghijklmnopqrstuuZ0Fx87Pb/Aqb0E90lfvCwzXnaFKUHpS"
"""``PASSWORD``, as docker-registry wants it."""


@contextlib.contextmanager
def without_tls(*addresses: str) -> Iterator[None]:
    """This process, and those it starts, ask the registries at these addresses (``host:port``) without TLS."""
    before = os.environ.get("BOOTSEER_PLAIN_HTTP")
    os.environ["BOOTSEER_PLAIN_HTTP"] = ",".join(addresses)
    try:
        yield
    finally:
        del os.environ["BOOTSEER_PLAIN_HTTP"]
        if before is not None:
            os.environ["BOOTSEER_PLAIN_HTTP"] = before


class DockerRegistry:
    """Starts in ``__enter__``, stops in ``__exit__``. ``root`` keeps its images (default: a temporary folder).

    ``login`` wants ``USER`` and ``PASSWORD`` of everybody, ``tokens`` a token of that server. ``prefix`` begins the
    command line, and may put it into another network, of which ``host`` is an address. Raises `UnsupportedError` when
    the program is missing and `UnavailableError` when it does not answer in time.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        root: Path | None = None,
        login: bool = False,
        tokens: TokenServer | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.host = host
        self.port = 0
        self._prefix = prefix
        self._keep = root
        self._login, self._tokens = login, tokens
        self._running = contextlib.ExitStack()
        self._temp: Path | None = None

    @property
    def address(self) -> str:
        """``host:port``, as references begin."""
        return f"{self.host}:{self.port}"

    def __enter__(self) -> DockerRegistry:
        program = shutil.which("docker-registry") or shutil.which("registry")
        if not program:
            raise UnsupportedError("no docker-registry here", hint="apt-get install docker-registry")
        self._temp = Path(tempfile.mkdtemp(prefix="bootseer-registry-", dir="/var/tmp"))
        root = self._keep or self._temp / "data"
        root.mkdir(parents=True, exist_ok=True)
        self.port = _PORT if self._prefix else free_port(self.host)
        config = self._temp / "config.yml"
        config.write_text(_CONFIG.format(root=root, address=self.address, more=self._more(self._temp)))
        self._argv, self._log = [*self._prefix, program, "serve", str(config)], self._temp / "log"
        try:
            self._launch()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._running.close()
        self._remove()

    def _more(self, folder: Path) -> str:
        if self._login:
            (folder / "htpasswd").write_text(f"{USER}:{_BCRYPT}\n")
            return _HTPASSWD.format(path=folder / "htpasswd")
        if self._tokens:
            return _TOKENS.format(
                realm=self._tokens.realm, service=SERVICE, issuer=ISSUER, certificate=self._tokens.certificate
            )
        return ""

    def _launch(self) -> None:
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(service(self._argv, self._log))
            wait_for_port(self.host, self.port, "docker-registry", process)
            self._running = stack.pop_all()

    def _remove(self) -> None:
        if self._temp:
            shutil.rmtree(self._temp, ignore_errors=True)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """The registry is gone meanwhile, connections and all, and comes back with its images at the same address."""
        self._running.close()
        try:
            yield
        finally:
            self._launch()
