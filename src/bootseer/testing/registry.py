"""A real registry for tests and demos: Debian's ``docker-registry`` on an address of this machine."""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from bootseer.errors import UnavailableError, UnsupportedError

_CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: "{root}"}}
  delete: {{enabled: true}}
http: {{addr: "{address}"}}
"""


class DockerRegistry:
    """Starts in ``__enter__``, stops in ``__exit__``. ``root`` keeps its images (default: a temporary folder).

    ``namespace`` runs it inside that network namespace (``ip netns``). Raises `UnsupportedError` when the program is
    missing and `UnavailableError` when it does not answer within ``deadline`` seconds.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        root: Path | None = None,
        namespace: str | None = None,
        deadline: float = 15.0,
    ) -> None:
        self.host = host
        self.port = port
        self._keep = root
        self._namespace = namespace
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
        self._temp = tempfile.mkdtemp(prefix="bootseer-registry-", dir="/var/tmp")
        root = self._keep or Path(self._temp, "data")
        root.mkdir(parents=True, exist_ok=True)
        if not self.port:
            with socket.create_server((self.host if not self._namespace else "127.0.0.1", 0)) as probe:
                self.port = probe.getsockname()[1]
        config = Path(self._temp, "config.yml")
        config.write_text(_CONFIG.format(root=root, address=self.address))
        argv = [program, "serve", str(config)]
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
        return self

    def stop(self) -> None:
        """Stop the server and delete the temporary folder; safe to call twice."""
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._temp:
            shutil.rmtree(self._temp, ignore_errors=True)
            self._temp = None

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
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()
