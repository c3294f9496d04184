"""Calls at a NameNode, or at the NameNodes of a name service, with deadlines and made again when no answer comes.

A NameNode recognises a repeated call by its client id and call id, and answers it from its *retry cache* instead of
doing it again (kept for 10 minutes, over a restart and a failover). So a call that got no answer is sent again under
the same ids until its deadline, whether it changes anything or not: every call of the NameNode's client protocol that
this project makes is either idempotent or guarded by that cache (``dfs.namenode.enable.retrycache``, on unless a site
turns it off).

Of several addresses one is the active NameNode. Calls go to the one that answered last; who does not answer, or is in
standby, makes them go to the next.

Concurrency: any thread may call; a call has a connection for itself, and its own thread reads the answer. More calls
than `CONNECTIONS` wait for one another. A forked child begins with no connections and a client id of its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import Message

from bootseer.errors import DataError, UnavailableError
from bootseer.hdfs.dial import dial, left
from bootseer.hdfs.errors import REACH, RemoteError, remote
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.rpc import CONTEXT_CALL, HELLO, Connection, frame, parse

M = TypeVar("M", bound=Message)

CONNECTIONS = 8
"""Calls that one process has under way at one NameNode."""

FIRST_CONTACT = 2.0
"""Seconds for which a server that never answered this process may refuse: a wrong name or port should fail soon. One
attempt may take longer: a server may be slow to answer, and an address where nobody is does not even refuse."""

_SHARE = 3  # of several addresses, one may keep a call waiting for this part of its time, before the next is asked
_SHORTEST = 2.0  # s, but for this long
_SILENT = 5_000  # ms until bytes that a dead network swallows end a connection

_log = logging.getLogger(__name__)
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forget() -> None:
    for channel in list(_channels):
        channel.forget()


def _close() -> None:
    for channel in list(_channels):
        channel.close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close)


class Channel:
    """Calls of one protocol at one server as one user.

    ``addresses``: (host, port), several for a name service. ``name`` is how messages call it: ``hdfs://host:port``.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        protocol: str,
        *,
        name: str = "",
        version: int = 1,
        user: str,
        real_user: str = "",
    ) -> None:
        host, port = addresses[0]
        self.name = name or f"hdfs://{f'[{host}]' if ':' in host else host}:{port}"
        self._addresses, self._turn = list(addresses), 0
        self._protocol, self._version = protocol, version
        self._user, self._real_user = user, real_user
        self._reached, self._down = False, 0  # since trouble began: the level of the log line that said so
        self.forget()
        _channels.add(self)

    def forget(self) -> None:
        """Begin anew, as another client: nothing of a forked child's parent may be used by both."""
        for _, connection in getattr(self, "_idle", []):
            connection.close()  # this process's copy of the descriptor
        self._idle: list[tuple[int, Connection]] = []
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        self._client_id = uuid.uuid4().bytes
        self._last_call = 0

    def close(self) -> None:
        """Close the connections that no call uses; calls go on working."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def call(self, method: str, request: Message, answer: type[M], doing: str, *, deadline: float) -> M:
        """Call ``method``; ``doing`` is a phrase such as ``"create /a"``.

        Tries again while the server cannot be reached, restarts, is in safe mode or not active, for ``deadline``
        seconds. Raises what `bootseer.hdfs.errors.remote` makes of the server's exception, `UnavailableError` when the
        time is over (the operation may have happened all the same), `DataError` for an answer that makes no sense.
        """
        began = time.monotonic()
        until = began + deadline
        with self._lock:
            self._last_call = call_id = self._last_call % 0x7FFFFFFF + 1
        head = wire.MethodHeader(method=method, protocol=self._protocol, version=self._version)
        where = f"{doing} on {self.name}"
        attempt, told = 0, None
        while True:
            turn = self._turn
            try:
                packed = frame(self._header(call_id, attempt), head, request)
                found = parse(answer, self._attempt(turn, packed, call_id, until, deadline))
                self._note("")
                return found
            except RemoteError as exc:
                if not exc.passing:
                    self._note("")
                    raise remote(exc, where) from exc
                self._reached = True
                problem: Exception = exc
                told, elsewhere = exc, exc.elsewhere
            except DataError as exc:
                raise DataError(f"cannot {where}: {exc.message}", hint="is this the RPC port of a NameNode?") from None
            except OSError as exc:
                problem, elsewhere = exc, True
            attempt += 1
            pause = self._pause(attempt)
            stranger = pause and not self._reached  # every address was asked, and none has ever answered
            if time.monotonic() + pause >= (min(until, began + FIRST_CONTACT) if stranger else until):
                # what a NameNode said explains more than that another, or it later, did not answer
                raise self._late(where, told or problem, time.monotonic() - began) from (told or problem)
            if elsewhere:
                self._pass_on(turn, problem)
            if pause:
                self._note(f"{type(problem).__name__}: {problem}")
                time.sleep(pause)

    def _share(self, until: float, deadline: float) -> float:
        """Until when one attempt may take: with several addresses a frozen one must leave time for the others."""
        if len(self._addresses) == 1:
            return until
        return min(until, time.monotonic() + max(deadline / _SHARE, _SHORTEST))

    def _pause(self, attempt: int) -> float:
        """Seconds to wait after so many attempts: none until every address was asked, then 50 ms and more, to 1 s."""
        rounds, within = divmod(attempt, len(self._addresses))
        return 0.0 if within else min(0.05 * 2 ** min(rounds - 1, 10), 1.0) * random.uniform(0.5, 1.0)

    def _pass_on(self, turn: int, problem: Exception) -> None:
        """From the address ``turn`` to the next, unless another call has done so already."""
        if len(self._addresses) == 1:
            return
        with self._lock:
            if self._turn == turn:
                self._turn = (turn + 1) % len(self._addresses)
                host, port = self._addresses[self._turn]
                _log.info("%s: %s; asking %s:%d", self.name, problem, host, port)

    def _late(self, where: str, problem: Exception, seconds: float) -> Exception:
        if isinstance(problem, RemoteError):
            return remote(problem, where)
        what = (getattr(problem, "strerror", None) or str(problem)).lower()
        return UnavailableError(f"cannot {where}: {what} (tried for {seconds:.1f} s)", hint=REACH)

    def _note(self, problem: str) -> None:
        """One log line when trouble begins, one when it is over."""
        if problem and not self._down:
            # one that was never reached is most likely a wrong address: the error at the end says so in one line
            self._down = logging.WARNING if self._reached else logging.INFO
            _log.log(self._down, "%s does not answer (%s); trying again", self.name, problem)
        elif not problem:
            self._reached = True
            if self._down:
                _log.log(self._down, "%s answers again", self.name)
                self._down = 0

    def _header(self, call_id: int, attempt: int) -> wire.RpcRequestHeader:
        return wire.RpcRequestHeader(
            rpc_kind=2, rpc_op=0, call_id=call_id, client_id=self._client_id, retry_count=attempt
        )

    def _attempt(self, turn: int, packed: bytes, call_id: int, until: float, deadline: float) -> memoryview:
        slots = self._slots
        if not slots.acquire(timeout=left(until)):
            raise TimeoutError(f"{CONNECTIONS} other calls are under way")
        try:
            until = self._share(until, deadline)
            connection = self._connection(turn, until)
            keep = False
            try:
                answer = connection.exchange(packed, call_id, until)
                keep = True
                return answer
            except RemoteError as exc:
                keep = not exc.fatal
                raise
            finally:
                self._give_back(turn, connection, keep)
        finally:
            slots.release()

    def _connection(self, turn: int, until: float) -> Connection:
        while True:
            with self._lock:
                place, connection = self._idle.pop() if self._idle else (turn, None)
            if connection is None:
                break
            if place == turn and connection.usable():
                return connection
            connection.close()
        user = wire.ConnectionContext.User(effective=self._user, real=self._real_user or None)
        context = wire.ConnectionContext(user=user, protocol=self._protocol)
        sock = dial(*self._addresses[turn], until)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT)
        return Connection(sock, HELLO + frame(self._header(CONTEXT_CALL, -1), context))

    def _give_back(self, turn: int, connection: Connection, keep: bool) -> None:
        if keep:
            with self._lock:
                self._idle.append((turn, connection))
        else:
            connection.close()
