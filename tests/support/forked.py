"""Python programs as processes of their own, forked from one that has loaded the package: a command line begins after
20 ms of a processor instead of 300, and is as urgent as others: a publication, which runs when nobody else does, would
keep a test waiting on a busy machine. Nothing else about them is other than of those that are started.

``python -m support.forked FD`` is that one process of a test run: it takes requests from the socket FD until that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import inspect
import os
import pkgutil
import resource
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import bootseer

_LATER = (
    "torch",
    "containerd",
    "csi",
    "rpc",
    "demo",
    "doctor",
    "profile.auto",
    "profile.web",
    "hdfs.proto",
    "cli.main",
)
"""Parts of the package that few programs need, or that have threads."""
_DECIDES = (b"PYTHONPATH", b"PYTHONHOME", b"PYTHONDEVMODE", b"LD_PRELOAD", b"LD_LIBRARY_PATH")
"""What an interpreter looks at when it begins."""
_NUMBER = struct.Struct("<i")
_PR_SET_DUMPABLE = 4
_SPACE = "x" * 24000
"""For words and for variables of programs."""
_lock = threading.Lock()


class _Program(msgspec.Struct):
    words: list[bytes]
    environ: dict[bytes, bytes]
    folder: bytes
    session: bool
    group: int
    umask: int
    uid: int | None
    gid: int | None
    gids: list[int] | None
    fds: list[int]
    """What those that come with this are to be."""


def cli(*words: object, **options: Any) -> subprocess.CompletedProcess[Any]:
    """A command line of ``bootseer``; ``options`` as for `run`."""
    return run("-m", "bootseer.cli.main", *words, **options)


def run(
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    input: str | bytes | None = None,
    text: bool = True,
    timeout: float = 120.0,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """As ``subprocess.run([sys.executable, *words], capture_output=True)``; ``words`` begin with ``-c`` or ``-m``."""
    argv, given = [sys.executable, *map(str, words)], subprocess.DEVNULL if input is None else subprocess.PIPE
    with Popen(argv, env=env, cwd=cwd, stdin=given, stdout=-1, stderr=-1, text=text, **more) as process:
        try:
            said, errors = process.communicate(input, timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(argv, process.returncode, said, errors)


class Popen(subprocess.Popen[Any]):
    """As `subprocess.Popen`, which this is for all but a Python program in surroundings like those of the one process.
    It is not a child of this process, and the test run's end ends it."""

    _told = -1

    def _execute_child(self, *given: Any) -> None:
        program, fds = _program(dict(zip(_NAMES, given, strict=True)))
        if program is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        request = msgspec.msgpack.encode(program)
        self._told, theirs = os.pipe()
        with _lock:
            socket.send_fds(_server(), [_NUMBER.pack(len(request))], [theirs, *fds])
            _server().sendall(request)
        os.close(theirs)
        self.pid = self._number()
        self._child_created = True
        self._close_pipe_fds(*given[_NAMES.index("p2cread") : _NAMES.index("errwrite") + 1])  # type: ignore[attr-defined]

    def _number(self) -> int:
        (number,) = _NUMBER.unpack(os.read(self._told, _NUMBER.size) or _NUMBER.pack(-signal.SIGKILL))
        return int(number)

    def _internal_poll(self, *args: Any, **more: Any) -> int | None:
        if self._told < 0:
            return super()._internal_poll(*args, **more)  # type: ignore[misc, no-any-return]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._told < 0:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if self.returncode is None:
            waits = select.poll()
            waits.register(self._told, select.POLLIN)
            if not waits.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:
                    self.returncode = self._number()
        return self.returncode

    def __del__(self, *args: Any, **more: Any) -> None:
        if not sys or sys.is_finalizing():
            return
        super().__del__(*args, **more)
        if self._told >= 0 and self.returncode is not None:
            os.close(self._told)


_NAMES = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]

subprocesses = types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen})
"""The module, for those who start programs of ours."""


def _program(given: dict[str, Any]) -> tuple[_Program | None, list[int]]:
    """What is asked of the one process, and what comes with it; None for what it cannot do."""
    argv = [] if given["shell"] or isinstance(given["args"], str | bytes) else [*map(os.fsencode, given["args"])]
    environ = os.environ if given["env"] is None else given["env"]
    known = {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}
    folder = os.fsencode(given["cwd"] or os.getcwd())
    if (
        argv[:1] != [os.fsencode(sys.executable)]
        or [one for one in argv[1:3] if one != b"-P"][:1] not in ([b"-c"], [b"-m"])
        or any(given[name] is not None for name in ("executable", "preexec_fn"))
        or not given["close_fds"]
        or not os.path.isdir(folder)
        or [known.get(name) for name in _DECIDES] != [os.environb.get(name) for name in _DECIDES]
        or _surroundings() != _of_server()
    ):
        return None, []
    standard = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
    fds = [number if fd < 0 else fd for number, fd in enumerate(standard)] + [*given["pass_fds"]]
    umask = given["umask"]
    if umask < 0:
        umask = int(Path("/proc/self/status").read_text().partition("\nUmask:")[2].split()[0], 8)
    program = _Program(
        argv[1:], known, folder, given["start_new_session"], given["process_group"], umask,
        given["uid"], given["gid"], given["gids"],
        [0, 1, 2, *given["pass_fds"]],
    )  # fmt: skip
    return program, fds


def _surroundings() -> object:
    """What a process has of who starts it and is not told to the one process."""
    limits = [resource.getrlimit(number) for number in range(16)]
    spaces = [os.readlink(f"/proc/thread-self/ns/{name}") for name in ("mnt", "net", "user", "pid")]
    return os.getpid(), os.getresuid(), os.getresgid(), os.getgroups(), limits, spaces, os.stat("/").st_ino


@functools.cache
def _of_server() -> object:
    return _surroundings()


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-m", "support.forked", str(theirs.fileno()), _SPACE]
    environ = {**os.environ, "SPACE": _SPACE}
    process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], env=environ, stdin=-3, stdout=-3)
    theirs.close()
    atexit.register(process.wait, 20)
    atexit.register(ours.close)
    return ours


# -- the one process ---------------------------------------------------------------------------------------------------


def _programs(requests: socket.socket) -> _Program | None:
    """Fork a process for each request; this returns what it is to be in each of them, and None here at the end."""
    waits = selectors.DefaultSelector()
    waits.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waits.select():
            if key.fileobj is not requests:
                pid, told = key.data
                waits.unregister(key.fileobj)
                os.close(key.fd)
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, _NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                os.close(told)
                continue
            size, fds, _, _ = socket.recv_fds(requests, _NUMBER.size, 64)
            if not size:  # as with PR_SET_PDEATHSIG
                for key in waits.get_map().values():
                    if key.data:
                        os.kill(key.data[0], signal.SIGTERM)
                return None
            request = b""
            while len(request) < _NUMBER.unpack(size)[0]:
                request += requests.recv(_NUMBER.unpack(size)[0] - len(request))
            if not (pid := os.fork()):
                requests.close()
                waits.close()
                program = msgspec.msgpack.decode(request, type=_Program)
                _set_up(program, *fds)
                return program
            for fd in fds[1:]:
                os.close(fd)
            waits.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, fds[0]))


def _set_up(program: _Program, told: int, *fds: int) -> None:
    """What happens before whoever asked for the process knows of it."""
    if program.session:
        os.setsid()
    elif program.group >= 0:
        os.setpgid(0, program.group)
    os.umask(program.umask)
    os.chdir(program.folder)
    least = max(200, *program.fds) + 1  # above what they are to be
    told, *fds_there = (fcntl.fcntl(fd, fcntl.F_DUPFD, least) for fd in (told, *fds))
    os.closerange(3, least)
    for fd, wanted in zip(fds_there, program.fds, strict=True):
        os.dup2(fd, wanted)
    with contextlib.suppress(BrokenPipeError):
        os.write(told, _NUMBER.pack(os.getpid()))
    os.closerange(least, 1 << 16)
    if program.gids is not None:
        os.setgroups(program.gids)
    if program.gid is not None:
        os.setgid(program.gid)
    if program.uid is not None:
        os.setuid(program.uid)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(1))


def _become(program: _Program) -> None:
    os.environb.clear()
    os.environb.update(program.environ)
    _show(program)
    how, what, *words = map(os.fsdecode, program.words)
    if how == "-P":
        how, what, *words = what, *words
        del sys.path[0]
    else:
        sys.path[0] = os.fsdecode(program.folder) if how == "-m" else ""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if how == "-m":
        spec = importlib.util.find_spec(what)
        assert spec
        module.__spec__, module.__package__, module.__file__ = spec, spec.parent, spec.origin
        sys.argv = [str(spec.origin), *words]
        code = spec.loader.get_code(what)  # type: ignore[union-attr]
    else:
        sys.argv = [how, *words]
        code = compile(what, "<string>", "exec")
    exec(code, vars(module))


def _show(program: _Program) -> None:
    """Have ``ps``, and who looks at /proc, see the program's own words and variables, where they are short."""
    words = b"".join(word + b"\0" for word in (os.fsencode(sys.executable), *program.words))
    environ = b"".join(b"%s=%s\0" % both for both in program.environ.items())
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for text, at in (words, 45), (environ, 47):
        begin, end = map(int, stat[at : at + 2])
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, min(len(text), end - begin - 1))


def _main(argv: Sequence[str]) -> None:
    for module in pkgutil.walk_packages(bootseer.__path__, "bootseer."):
        if not module.name.removeprefix("bootseer.").startswith(_LATER) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # no collection in a process that is forked from this one looks at what is here
    if program := _programs(socket.socket(fileno=int(argv[0]))):
        code = 1
        try:
            _become(program)
            code = 0
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else exc.code is not None
            if code is True:
                print(exc.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:  # Python's own end would write to all memory that is shared until then
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)


if __name__ == "__main__":
    _main(sys.argv[1:])
