"""Background servers: programs that outlive who starts them, each in a session of its own.

Such a program is a module with a ``main()``, run by ``python -m``. It takes its request (`request`) from standard
input, forks, so that it is nobody's child, and says one line on standard output (`answer`) when it serves, or cannot.

Most of the time until then goes to the loading of modules. So `preloaded` has one process load them for all servers
that are about to be needed, while the caller finds out what these are to serve. That process has one thread and has
opened nothing, and it forks each of them.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import msgspec

from bootseer.errors import from_os_error
from bootseer.kernel.child import close_others

log = logging.getLogger(__name__)

_LONGEST_LINE = 1 << 20
_END_SECONDS = 5.0


def program(module: str) -> tuple[str, ...]:
    """The command of a server."""
    return (sys.executable, "-m", module)


def _module(command: Sequence[str]) -> str | None:
    """What `program` was given, None for any other command."""
    return command[-1] if tuple(command) == program(command[-1]) else None


@contextlib.contextmanager
def preloaded(*commands: Sequence[str]) -> Iterator[None]:
    """Meanwhile, what this thread starts by `start` is forked from a process that has loaded the modules of
    ``commands``. Inside of another `preloaded` nothing happens."""
    modules = [module for command in commands if (module := _module(command))]
    with contextlib.ExitStack() as stack:
        if _starter.get() is not None or not modules:
            yield
            return
        try:
            starter = stack.enter_context(_Starter(modules))
        except OSError as exc:
            log.warning("cannot start a process that loads servers: %s; each loads its own modules", exc)
        else:
            stack.callback(_starter.reset, _starter.set(starter))
        yield


def start(
    command: Sequence[str],
    request: bytes,
    *,
    seconds: float,
    stderr: int = 2,
    ending: signal.Signals = signal.SIGTERM,
) -> bytes:
    """Start the server ``command`` and return the line that it answers, without its end.

    Empty when it ended without an answer, or gave none within ``seconds``. Then, and when the caller is interrupted,
    all its processes get the signal ``ending``. Raises what starting a process raises.
    """
    until = time.monotonic() + seconds
    ours, theirs = socket.socketpair()
    with ours, contextlib.ExitStack() as started:
        try:
            with theirs, _memory(request) as stdin:
                group = _launch(command, [stdin, theirs.fileno(), stderr], request, until, started)
        except OSError as exc:
            raise from_os_error(exc, f"start {' '.join(command)}") from exc
        line = b""
        try:
            line = _line(ours, until)
        finally:
            if not line:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, ending)
    return line


def _launch(command: Sequence[str], fds: list[int], request: bytes, until: float, started: contextlib.ExitStack) -> int:
    """The process group of the server, whose number nobody else gets before ``started`` is closed."""
    starter, module = _starter.get(), _module(command)
    if starter is not None and module:
        order = _Order(module, list(os.environb.items()), request)
        try:
            return starter.fork(order, fds[1:], until)
        except OSError as exc:
            log.warning("the process that loads servers has failed (%s); this one loads its own modules", exc)
    process = subprocess.Popen(command, stdin=fds[0], stdout=fds[1], stderr=fds[2], start_new_session=True)
    started.callback(_see_out, process)
    return process.pid


def _see_out(process: subprocess.Popen[bytes]) -> None:
    """Its first process has forked and ended, or gets killed."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_SECONDS)


def _line(sock: socket.socket, until: float) -> bytes:
    got = b""
    while not got.endswith(b"\n") and len(got) < _LONGEST_LINE:
        sock.settimeout(max(0.001, until - time.monotonic()))
        try:
            more = sock.recv(1 << 16)
        except OSError:  # too late, or its end was reset
            return b""
        if not more:
            return b""
        got += more
    return got.removesuffix(b"\n")


@contextlib.contextmanager
def _memory(data: bytes) -> Iterator[int]:
    """A descriptor that ``data`` is read from."""
    fd = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


# -- the process that forks servers ------------------------------------------------------------------------------------


class _Order(msgspec.Struct):
    module: str
    environ: list[tuple[bytes, bytes]]
    request: bytes


class _Starter:
    """Its owner's end. The process ends when that is closed."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = (*program(__name__), str(theirs.fileno()), *modules)
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                self._sock.close()
                raise

    def __enter__(self) -> _Starter:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self._process.kill()  # it has nothing to see to; its servers are not its children
        self._process.wait()

    def fork(self, order: _Order, fds: list[int], until: float) -> int:
        """The process group of the new server. Raises `OSError`."""
        with _memory(msgspec.msgpack.encode(order)) as fd:
            rights = array.array("i", [fd, *fds])
            self._sock.sendmsg([b"start"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_NOSIGNAL)
        self._sock.settimeout(max(0.001, until - time.monotonic()))
        answer = self._sock.recv(64)
        if not answer:
            raise ConnectionResetError("it has ended")
        return int(answer)


_starter: ContextVar[_Starter | None] = ContextVar("starter", default=None)


def _serve(sock: socket.socket) -> None:
    """Fork a server for each order until the owner has no more."""
    size = socket.CMSG_SPACE(3 * array.array("i").itemsize)
    while True:
        raw, ancillary, _, _ = sock.recvmsg(64, size, socket.MSG_CMSG_CLOEXEC)
        if not raw:
            return
        with contextlib.suppress(ChildProcessError):  # the owner asks nothing about those before this one any more
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        fds = array.array("i")
        fds.frombytes(ancillary[0][2])
        pid = os.fork()
        if not pid:
            _become(*fds)
        for fd in fds:
            os.close(fd)
        sock.send(str(pid).encode())


def _become(order_fd: int, stdout: int, stderr: int) -> None:
    """Be a server, in a process that was forked just now, until it ends."""
    code = 70
    try:
        os.setsid()
        with open(order_fd, "rb") as file:
            order = msgspec.msgpack.decode(file.read(), type=_Order)
        os.environb.clear()
        os.environb.update(order.environ)
        with _memory(order.request) as stdin:
            for number, fd in enumerate((stdin, stdout, stderr)):
                os.dup2(fd, number)
        close_others()
        code = importlib.import_module(order.module).main()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        os._exit(code or 0)


# -- in a server -------------------------------------------------------------------------------------------------------


def request() -> bytes:
    """What this server was asked; it has forked then."""
    with open(0, "rb", closefd=False) as file:
        asked = file.read()
    if os.fork():
        os._exit(0)
    return asked


class Answer:
    """Answers who has started this server; once."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def __call__(self, line: str) -> None:
        """Say ``line``, or nothing if that is empty, as in a child that is not to answer."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # nobody waits any more
                os.write(fd, f"{line}\n".encode() if line else b"")
            os.close(fd)


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    gc.freeze()  # what is loaded is not looked through again, so that the servers share its memory
    _serve(socket.socket(fileno=int(sys.argv[1])))
