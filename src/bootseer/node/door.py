"""The socket of the node daemon: who connects, one request of each, one answer. Users can neither fill it (limits on
the connections of each and of all, and on the time until the request comes) nor break it: a packet is whole or refused,
and what it says is a document of known fields or refused."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from bootseer.errors import BootseerError, UnavailableError, doing
from bootseer.kernel.child import ended
from bootseer.loglimit import USER
from bootseer.node.accounts import ROOT, Accounts
from bootseer.node.loop import Loop
from bootseer.node.protocol import (
    MAX_REPLY,
    MAX_REQUEST,
    MAX_REQUEST_OF_ROOT,
    NodeReply,
    NodeRequest,
    credentials,
    decode_request,
    failure,
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""Of one user; root may have any number."""
_ASK_SECONDS = 10.0
_ACCEPTED_AT_ONCE = 32
_QUEUE = 4096
"""Of those that are not accepted yet: a few hundred threads of one user must not fill it."""
_PAUSE_SECONDS = 1.0
SO_PEERPIDFD = 77


class Client:
    """One connection. ``pidfd`` is readable once the process that made it has ended."""

    def __init__(self, sock: socket.socket) -> None:
        """Raises `OSError` when that process has ended, or lives where this one cannot see it."""
        self.sock = sock
        self.asked = ""
        self.file = -1
        """A descriptor that came with the request, of root only."""
        self.account = ROOT
        """Out of whose share it is served."""
        self.dropped: Callable[[], None] = lambda: None
        """Called when the client goes before its answer."""
        self.pid, self.uid = credentials(sock)
        if self.pid <= 0:
            raise ProcessLookupError(errno.ESRCH, "it is in a process namespace that is not seen from here")
        try:
            self.pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError as exc:
            if exc.errno != errno.ENOPROTOOPT:
                raise  # it has ended: its number may be another process's
            # before Linux 6.5
            self.pidfd = os.pidfd_open(self.pid)


class Door:
    """Listens at ``path``; ``serve`` gets each request, raises `BootseerError` or answers, now or later."""

    def __init__(
        self, path: Path, loop: Loop, accounts: Accounts, most: int, serve: Callable[[Client, NodeRequest], None]
    ) -> None:
        """``most``: connections of all users but root."""
        self._path, self._loop, self._accounts, self._most, self._serve = path, loop, accounts, most, serve
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._clients: set[Client] = set()
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Accept clients meanwhile. Raises `BootseerError`."""
        new = self._path.with_name(f".{self._path.name}")
        with self._sock:
            with doing(f"listen at {self._path}"):
                new.unlink(missing_ok=True)
                self._sock.bind(str(new))
                new.chmod(0o666)
                self._sock.listen(_QUEUE)
                self._sock.setblocking(False)
                new.rename(self._path)  # nobody finds it before it listens
            try:
                self._listen()
                yield
            finally:
                self._path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._clients)

    def _listen(self) -> None:
        self._loop.watch(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno != errno.ECONNABORTED:
                    log.warning("no client is accepted for %.0f s: %s", _PAUSE_SECONDS, exc.strerror)
                    self._loop.forget(self._sock.fileno())
                    self._loop.later(self, _PAUSE_SECONDS, self._listen)
                return
            try:
                sock.setblocking(False)
                self._enter(Client(sock))
            except OSError as exc:
                log.info("a client is not served: %s", exc.strerror)
                sock.close()

    def _enter(self, client: Client) -> None:
        client.account = self._accounts.of(client.uid)
        held = Counter(one.account for one in self._clients)
        others = held.total() - held[ROOT]
        self._clients.add(client)
        if client.account and (held[client.account] >= MAX_CONNECTIONS or others >= self._most):
            whose = client.account if held[client.account] >= MAX_CONNECTIONS else "users"
            count = held.get(whose, others)
            error = UnavailableError(f"the node daemon has {count} connections of {whose}", hint="try again")
            self.answer(client, failure(error))
            return
        self._loop.watch(client.sock.fileno(), lambda: self._hear(client))
        self._loop.watch(client.pidfd, lambda: self._see_end(client))
        self._loop.later(client, _ASK_SECONDS, lambda: self._drop(client))

    def _see_end(self, client: Client) -> None:
        """Others may have inherited its connection, which ends with it all the same."""
        if client in self._clients and ended(client.pidfd):
            self._drop(client)

    def _hear(self, client: Client) -> None:
        """A packet of ``client``, or its end."""
        if client not in self._clients:
            return
        try:
            if client.uid:
                packet, _, flags, _ = client.sock.recvmsg(MAX_REQUEST)
            else:
                packet, fds, flags, _ = socket.recv_fds(client.sock, MAX_REQUEST_OF_ROOT, 1, socket.MSG_CMSG_CLOEXEC)
                if fds and client.file < 0:
                    client.file = fds.pop()
                for fd in fds:
                    os.close(fd)
        except BlockingIOError:
            return
        except OSError:
            packet, flags = b"", 0
        if not packet or client.asked:
            self._drop(client)
            return
        self._loop.cancel(client)
        client.asked = "refused"
        try:
            self._serve(client, decode_request(packet, not flags & socket.MSG_TRUNC))
        except Exception as exc:
            self.answer(client, failure(exc))
            if not isinstance(exc, BootseerError):
                raise

    def answer(self, client: Client, reply: NodeReply) -> bool:
        """Send the only answer and close. Whether the client was there to take it."""
        if client not in self._clients:
            return False
        (self.failed if reply.code else self.done)[client.asked or "refused"] += 1
        if reply.code:
            what = client.asked or "connection"
            log.info("user %d: %s failed: %r", client.uid, what, reply.error, extra={USER: client.account})
        client.dropped = lambda: None
        try:
            if client.uid == 0:
                client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REPLY)
            client.sock.send(msgspec.json.encode(reply), socket.MSG_NOSIGNAL)
        except OSError as exc:
            log.info("user %d does not get the answer: %s", client.uid, exc.strerror, extra={USER: client.account})
            return False
        finally:
            self._drop(client)
        return True

    def _drop(self, client: Client) -> None:
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._loop.cancel(client)
        for fd in (client.sock.fileno(), client.pidfd):
            self._loop.forget(fd)
        client.sock.close()
        os.close(client.pidfd)
        if client.file >= 0:
            os.close(client.file)
        client.dropped()
