"""A real node daemon for tests, and users of the node: sessions of their own, which do as they are told."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from bootseer.config import Config
from bootseer.demo.programs import WITH_US
from bootseer.errors import ConfigError
from bootseer.node import client
from support import forked
from support.waits import until

T = TypeVar("T")

_MAIN = "from bootseer.node import protocol; protocol.PAGE = 2; {}; from bootseer.cli.main import main; main()"
"""The daemon, after a statement. What it lists has several pages, as those of a node with many mounts."""
_SECONDS = 60.0


def listens(config: Config) -> bool:
    """Whether a node daemon listens there."""
    try:
        client.node(config=config)
    except client.AbsentError:
        return False
    except ConfigError:  # it speaks another version
        pass
    return True


class NodeDaemon:
    """Below ``folder``, with the store at ``store``; `stop` ends it, and `start` another in its place."""

    def __init__(self, folder: Path, store: str) -> None:
        self.config = Config(
            node_dir=str(folder / "node"), state_dir=str(folder / "state"), cache_dir=str(folder / "cache"), store=store
        )
        self.log = folder / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, first: str = "pass", *, alone: bool = False) -> None:
        """``first``: a statement that it carries out before anything else; ``alone``: it shares no memory."""
        env = {
            f"BOOTSEER_{name.upper()}": getattr(self.config, name) for name in ("node_dir", "state_dir", "cache_dir")
        }
        env |= {"BOOTSEER_STORE": self.config.store, "DOCKER_CONFIG": "/nonexistent"}
        with self.log.open("ab") as out:
            self.process = forked.Popen(
                [*(WITH_US if alone else ()), sys.executable, "-c", _MAIN.format(first), "-v", "node", "serve"],
                env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        until(lambda: self._listens(), _SECONDS, f"the start of the node daemon ({self.log})", step=0.05)

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        return listens(self.config)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def serves(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(_SECONDS)

    def left(self) -> list[str]:
        """What is there of mounts: folders, records, trees."""
        folders = [Path(self.config.node_dir, name) for name in ("mounts", "records")]
        folders += [Path(self.config.state_dir, "images")]
        return [str(path) for folder in folders if folder.exists() for path in folder.iterdir()]


class User:
    """A session of user ``uid`` that lasts as long as the ``with`` statement, with these ``logins`` (`LOGINS`)."""

    def __init__(self, uid: int, logins: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, uid, dict(logins or {})), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def start(self, call: Callable[..., Any], *args: object, **more: object) -> None:
        """Have the user begin ``call``; `result` waits for it."""
        self._pipe.send((call, args, more))

    def result(self, seconds: float = _SECONDS) -> Any:
        """What the call returned; raises what it raised."""
        assert self._pipe.poll(seconds), "the user does not answer"
        value, exc = self._pipe.recv()
        if exc is not None:
            raise exc
        return value

    def do(self, call: Callable[..., T], *args: object, **more: object) -> T:
        self.start(call, *args, **more)
        found: T = self.result()
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.join(_SECONDS)
        self._pipe.close()

    def __enter__(self) -> User:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.end()


def _live(pipe: Any, uid: int, logins: dict[str, str]) -> None:
    os.setsid()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.environ.pop("DOCKER_CONFIG", None)
    os.environ.update(logins)
    while True:
        try:
            call, args, more = pipe.recv()
        except EOFError:
            return
        answer: tuple[Any, Exception | None]
        try:
            answer = call(*args, **more), None
        except Exception as exc:
            answer = None, _plain(exc)
        pipe.send(answer)


def _plain(exc: Exception) -> Exception:
    """``exc`` as another process can have it: without what it was caused by."""
    made = type(exc)(*exc.args)
    made.__dict__.update(exc.__dict__)
    return made


def command(args: Sequence[str], config: Config) -> tuple[int, str]:
    """``bootseer ARGS`` in this process: its exit code, and what it printed."""
    from typer.testing import CliRunner

    from bootseer.cli.verbs import assemble
    from bootseer.errors import BootseerError

    env = {f"BOOTSEER_{name.upper()}": getattr(config, name) for name in ("node_dir", "state_dir", "cache_dir")}
    done = CliRunner().invoke(assemble(), list(args), env=env)
    if isinstance(done.exception, BootseerError):
        return done.exception.exit_code, str(done.exception)
    return done.exit_code, done.output
