"""Background servers: programs that outlive who starts them, each in a session of its own.

Such a program is a module with a ``main()``, run by ``python -m``. It reads its request (`request`), forks, so that it
is nobody's child, and says one line (`Answer`) when it serves, or cannot. One whose answer nobody hears has to end.

Most of the time until then goes to the loading of modules. So `preloaded` has one process load them for all servers
that are about to be needed, while the caller finds out what these are to serve. That process has one thread and has
opened nothing, and it forks each of them. It is forked itself from a caller that has said `lend`.
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
import threading
import time
import traceback
from collections.abc import Iterator, Sequence

import msgspec

from bootseer.closing import descriptor
from bootseer.errors import doing
from bootseer.kernel.child import Child, close_others
from bootseer.wiretypes import known

log = logging.getLogger(__name__)

_LONGEST_LINE = 1 << 20
_END_SECONDS = 5.0
_DESCRIPTORS = 4
"""Of an order: itself, then standard input, output and errors of the server."""


def program(module: str) -> tuple[str, ...]:
    """The command of a server. -P: else it would import what lies in the caller's working folder."""
    return (sys.executable, "-P", "-m", module)


def _module(command: Sequence[str]) -> str | None:
    """What `program` was given, None for any other command."""
    return command[-1] if tuple(command) == program(command[-1]) else None


def lend() -> None:
    """Say that this process is a short program of ours, which a process that loads servers may be a copy of."""
    _lenders.add(os.getpid())
    gc.freeze()  # the collector would look through all modules more than once before the first server runs


_lenders = set[int]()


@contextlib.contextmanager
def preloaded(*commands: Sequence[str]) -> Iterator[None]:
    """Meanwhile, what this thread starts by `start` is forked from a process that has loaded the modules of
    ``commands``, with the caller's environment as it is then, but the working folder, limits and priority of now.
    Inside of another `preloaded` nothing happens."""
    modules = [module for command in commands if (module := _module(command))]
    with contextlib.ExitStack() as stack:
        if _this_thread.starter is None and modules:
            try:
                _this_thread.starter = stack.enter_context(_starter(modules))
                stack.callback(setattr, _this_thread, "starter", None)
            except OSError as exc:
                log.warning("cannot start a process that loads servers: %s; each loads its own modules", exc)
        yield


def start(
    command: Sequence[str],
    request: bytes,
    *,
    seconds: float,
    stderr: int = 2,
    ending: signal.Signals = signal.SIGTERM,
) -> bytes:
    """Start the server ``command`` and return the line that it answers, without its end; empty when it ended without
    one, or gave none within ``seconds``. Then, and when the caller is interrupted, all its processes get the signal
    ``ending``. Raises `BootseerError` when no process can be started."""
    until = time.monotonic() + seconds
    ours, theirs = socket.socketpair()
    with ours, contextlib.ExitStack() as started:
        with doing(f"start {' '.join(command)}"), theirs, _memory(request) as stdin:
            group = _launch(command, [stdin, theirs.fileno(), stderr], until, ending, started)
        line = b""
        try:
            line = _line(ours, until)
        finally:
            if not line:
                _kill(group, ending)
    return line


def _launch(
    command: Sequence[str], fds: list[int], until: float, ending: signal.Signals, started: contextlib.ExitStack
) -> int:
    """The process group of the server. Until ``started`` is closed its number is nobody else's."""
    module = _module(command)
    if module and (starter := _this_thread.starter):
        try:
            starter.order(module, fds)
            return starter.group(until, ending)
        except ConnectionError as exc:  # each server that it has forked has told its group: there is none
            log.warning("the process that loads servers has ended (%s); this one loads its own modules", exc)
    process = subprocess.Popen(command, stdin=fds[0], stdout=fds[1], stderr=fds[2], start_new_session=True)
    started.callback(_see_out, process)
    return process.pid


def _see_out(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process that has ended, or is about to; kill it when that takes long. One that cannot be
    killed is left."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)


def _kill(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


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
    with descriptor(os.memfd_create("request", os.MFD_CLOEXEC)) as fd:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd


# -- the process that forks servers ------------------------------------------------------------------------------------


class _Order(msgspec.Struct):
    module: str
    environ: list[tuple[bytes, bytes]]


@contextlib.contextmanager
def _starter(modules: Sequence[str]) -> Iterator[Starter]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, contextlib.ExitStack() as after:
        with theirs:
            if os.getpid() in _lenders and len(os.listdir("/proc/self/task")) == 1:
                after.callback(Child("process that loads servers", lambda: _copied(theirs, modules)).end)
            else:
                process = subprocess.Popen(
                    (*program(__name__), str(theirs.fileno()), *modules),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
                after.callback(_see_out, process)
                after.callback(process.kill)
        after.callback(ours.close)
        yield Starter(ours)  # afterwards its servers are not its children any more


def _copied(sock: socket.socket, modules: Sequence[str]) -> int:
    """Be the process that forks servers, in a copy of its owner, of which nothing but modules and errors is used."""
    os.setsid()
    close_others(sock.fileno())
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)
    for caught in {one for one in signal.valid_signals() if callable(signal.getsignal(one))}:
        signal.signal(caught, signal.SIG_DFL)
    for handler in logging.getLogger().handlers[:]:
        logging.getLogger().removeHandler(handler)
    if not sys.flags.safe_path:
        del sys.path[0]
    _load_and_serve(sock, modules)
    return 0


def _load_and_serve(sock: socket.socket, modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # what is loaded is not looked through again, so that the servers share its memory
    with contextlib.suppress(ConnectionError):  # the owner was killed
        _serve(sock)


class Starter:
    """Its owner's end. The process ends when that is closed. Each `order` is followed by `group`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._group = sock, 0

    def order(self, module: str, fds: list[int]) -> None:
        """Ask for a server. Raises `OSError` when the process has ended."""
        with _memory(msgspec.msgpack.encode(_Order(module, list(os.environb.items())))) as fd:
            rights = array.array("i", [fd, *fds])
            self._sock.sendmsg([b"start"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_NOSIGNAL)

    def group(self, until: float, ending: signal.Signals) -> int:
        """The process group of the server that was ordered. Raises `ConnectionError` when there will be none, and
        `TimeoutError`. After an exception the server is ended, and the process takes no more orders."""
        self._group = 0
        try:
            self._hear(until)
            return self._group
        except BaseException:
            with contextlib.suppress(OSError):
                if not self._group:
                    self._hear(time.monotonic() + _END_SECONDS)
                _kill(self._group, ending)
            self._sock.shutdown(socket.SHUT_RDWR)
            raise

    def _hear(self, until: float) -> None:
        self._sock.settimeout(max(0.001, until - time.monotonic()))
        self._group = int(self._sock.recv(64) or 0)
        if not self._group:
            raise ConnectionResetError("nobody has its other end")


class _Thread(threading.local):
    starter: Starter | None = None


_this_thread = _Thread()


def _serve(sock: socket.socket) -> None:
    """Fork a server for each order until the owner has no more."""
    while True:
        raw, fds, _, _ = socket.recv_fds(sock, 64, _DESCRIPTORS)
        if not raw:
            return
        with contextlib.suppress(ChildProcessError):  # the owner has done with those before this one
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not os.fork():
            _become(sock, *fds)
        for fd in fds:
            os.close(fd)


def _become(sock: socket.socket, order_fd: int, *stdio: int) -> None:
    """Be a server, in a process that was forked just now, until it ends."""
    global _is_copy
    code, _is_copy = 70, True
    try:
        os.setsid()
        with sock:
            try:
                sock.send(str(os.getpid()).encode())  # from here on the owner can end this group
            except OSError:  # it has ended
                os._exit(0)
        with open(order_fd, "rb") as file:
            order = msgspec.msgpack.decode(file.read(), type=known(_Order))
        wanted = dict(order.environ)
        for name in [name for name in os.environb if name not in wanted]:
            del os.environb[name]
        os.environb.update({name: value for name, value in wanted.items() if os.environb.get(name) != value})
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
            os.close(fd)
        code = importlib.import_module(order.module).main()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        os._exit(code or 0)


# -- in a server -------------------------------------------------------------------------------------------------------


_is_copy = False
"""Whether this process was forked by one that loads servers and ends in a moment: then it is nobody's child."""


def request(name: str) -> bytes:
    """Read what this server is asked for, and go on as nobody's child, which ``ps`` calls ``name``; a program of its
    own forks for that, and its first process ends."""
    with open(0, "rb", closefd=False) as file:
        asked = file.read()
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)  # a request may be large, and hold a login
    if not _is_copy and os.fork():
        os._exit(0)
    call_it(name)
    return asked


def call_it(name: str) -> None:
    """Have ``ps`` call this process so."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)


class Answer:
    """Answers who has started this server, once. From now on what the server prints goes to its errors."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def __call__(self, line: str) -> bool:
        """Say ``line``, or by "" nothing: a child that is not to answer calls this, so that the end of its parent is
        noticed. False when nobody waits for it any more: the server is to end."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return True
        try:
            return not line or os.write(fd, f"{line}\n".encode()) > 0
        except OSError:
            return False
        finally:
            os.close(fd)


if __name__ == "__main__":
    _load_and_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
