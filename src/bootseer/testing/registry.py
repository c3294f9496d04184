"""A real registry for tests and demos: Debian's ``docker-registry`` on an address of this machine."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from bootseer.errors import UnavailableError, UnsupportedError
from bootseer.testing.tokens import ISSUER, SERVICE, TokenServer

_CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: "{root}"}}
  delete: {{enabled: true}}
http: {{addr: "{address}", secret: "bootseer"}}
{auth}
"""
_HTPASSWD = """\
auth: {{htpasswd: {{realm: tests, path: "{path}"}}}}
"""
_TOKENS = """\
auth: {{token: {{realm: "{realm}", service: {service}, issuer: {issuer}, rootcertbundle: "{certificate}"}}}}
"""
USER, PASSWORD = "trainer", "correct-horse"
_BCRYPT = "$2y$05$abcdefghijklmnopqrstuuZ0Fx87Pb/Aqb0E90lfvCwzXnaFKUHpS"
"""``PASSWORD``, as docker-registry wants it."""


class DockerRegistry:
    """Starts in ``__enter__``, stops in ``__exit__``. ``root`` keeps its images (default: a temporary folder).

    ``namespace`` runs it inside that network namespace (``ip netns``). ``login`` wants ``USER`` and ``PASSWORD`` of
    everybody, ``tokens`` a token of that server. Raises `UnsupportedError` when the program is
    missing and `UnavailableError` when it does not answer within ``deadline`` seconds.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        root: Path | None = None,
        namespace: str | None = None,
        login: bool = False,
        tokens: TokenServer | None = None,
        deadline: float = 15.0,
    ) -> None:
        self.host = host
        self.port = port
        self._keep = root
        self._namespace = namespace
        self._login, self._tokens = login, tokens
        self._deadline = deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._temp: str | None = None

    @property
    def address(self) -> str:
        """``host:port``, as references begin."""
        return f"{self.host}:{self.port}"

    def start(self) -> DockerRegistry:
        program = shutil.which("docker-registry") or shutil.which("registry")
        if not program:
            raise UnsupportedError("no docker-registry here", hint="apt-get install docker-registry")
        self._program = program
        self._temp = tempfile.mkdtemp(prefix="bootseer-registry-", dir="/var/tmp")
        root = self._keep or Path(self._temp, "data")
        root.mkdir(parents=True, exist_ok=True)
        if not self.port:
            with socket.create_server((self.host if not self._namespace else "127.0.0.1", 0)) as probe:
                self.port = probe.getsockname()[1]
        config = Path(self._temp, "config.yml")
        config.write_text(_CONFIG.format(root=root, address=self.address, auth=self._auth(Path(self._temp))))
        self._launch()
        return self

    def _auth(self, folder: Path) -> str:
        if self._login:
            (folder / "htpasswd").write_text(f"{USER}:{_BCRYPT}\n")
            return _HTPASSWD.format(path=folder / "htpasswd")
        if self._tokens:
            return _TOKENS.format(
                realm=self._tokens.realm, service=SERVICE, issuer=ISSUER, certificate=self._tokens.certificate
            )
        return ""

    def _launch(self) -> None:
        assert self._temp
        argv = [self._program, "serve", str(Path(self._temp, "config.yml"))]
        if self._namespace:
            argv = ["ip", "netns", "exec", self._namespace, *argv]
        argv = ["setpriv", "--pdeathsig", "TERM", "--", *argv]  # it ends when this process is killed
        self._log = Path(self._temp, "log")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """The registry is gone meanwhile, connections and all, and comes back with its images at the same address."""
        self._kill()
        try:
            yield
        finally:
            self._launch()

    def stop(self) -> None:
        """Stop the server and delete the temporary folder; safe to call twice."""
        self._kill()
        if self._temp:
            shutil.rmtree(self._temp, ignore_errors=True)
            self._temp = None

    def _kill(self) -> None:
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def __enter__(self) -> DockerRegistry:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _wait(self) -> None:
        assert self._process is not None
        end = time.monotonic() + self._deadline
        while time.monotonic() < end:
            if self._process.poll() is not None:
                text = self._log.read_text(errors="replace").strip()[-300:]
                raise UnavailableError(f"docker-registry at {self.address} ended at once: {text}")
            if self._answers():
                return
            time.sleep(0.05)
        raise UnavailableError(f"docker-registry at {self.address} did not answer within {self._deadline:.0f} s")

    def _answers(self) -> bool:
        if self._namespace:
            probe = ["ip", "netns", "exec", self._namespace, "bash", "-c", f"exec 3<>/dev/tcp/{self.host}/{self.port}"]
            return subprocess.run(probe, capture_output=True, check=False, timeout=5).returncode == 0
        connection = http.client.HTTPConnection(self.host, self.port, timeout=1)
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status in (200, 401)
        except OSError:
            return False
        finally:
            connection.close()
