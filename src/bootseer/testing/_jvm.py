"""Hadoop's jars, the command line of a JVM that runs them, and one such JVM as a process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from bootseer.errors import BootseerError, UnsupportedError

VERSION = "3.4.2"
# Hadoop's daemons and its client reflect on these packages, which Java 17 keeps closed
_OPENED = (
    "java.io java.lang java.lang.reflect java.math java.net java.text java.util java.util.concurrent java.util.zip "
    "sun.security.util sun.security.x509"
)


def jars() -> Path:
    """The folder of Hadoop's jars; `UnsupportedError` when ``scripts/hadoop-jars`` has not been run."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(os.environ.get("BOOTSEER_DEV_CACHE") or os.path.join(home, "bootseer-dev"))
    folder = cache / f"hadoop-{VERSION}"
    if not folder.is_dir():
        raise UnsupportedError(f"no Hadoop jars in {folder}", hint="run scripts/hadoop-jars")
    if not shutil.which("java"):
        raise UnsupportedError("java is not installed", hint="apt-get install openjdk-17-jre-headless")
    return folder


def java_argv(heap_mb: int, classpath: Sequence[str]) -> list[str]:
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED.split()]
    return ["java", "-XX:+UseSerialGC", f"-Xmx{heap_mb}m", *opened, "-cp", ":".join(classpath)]


class Daemon:
    """One JVM. ``name`` is ``namenode`` or ``datanode-N``; its log is ``log``."""

    def __init__(self, name: str, argv: Sequence[str], folder: Path) -> None:
        self.name, self.argv = name, list(argv)
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BootseerError(f"{self.name} is not running")
        return self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        if self.alive():
            return
        argv = self.argv
        # the signal comes when the starting *thread* ends, so only the main thread may ask for it
        if shutil.which("setpriv") and threading.current_thread() is threading.main_thread():
            argv = ["setpriv", "--pdeathsig", "KILL", *argv]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.log.parent
            )

    def signal(self, number: signal.Signals) -> None:
        if self.alive():
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30)
            self._process = None

    def last_line(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "(no output)"
