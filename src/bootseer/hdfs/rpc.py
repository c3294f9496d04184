"""Hadoop RPC, version 9: calls at a NameNode, or at the NameNodes of a name service, with deadlines.

    connection: "hrpc" 09 00 00 | frame(header, context) | frame(header, method, request) ...
    frame:      length as 4 bytes, big-endian | messages, each behind its length as a varint
    answer:     frame(answer header, answer)

A NameNode recognises a repeated call by its client id and call id, and answers it from its *retry cache* instead of
doing it again (kept for 10 minutes, over a restart and a failover). So a call that got no answer is sent again under
the same ids until its deadline, whether it changes anything or not: every call of the NameNode's client protocol that
this project makes is either idempotent or guarded by that cache (``dfs.namenode.enable.retrycache``, on unless a site
turns it off).

Of several addresses one is the active NameNode. Calls go to the one that answered last; who does not answer, or is in
standby, makes them go to the next.

A NameNode that wants a login is logged in at (`bootseer.hdfs.sasl.negotiation`), at once where the site's settings want
Kerberos, else when it says so: from then on every connection of this client is.

Concurrency: any thread may call. Calls at one address share a connection (`bootseer.hdfs.shared`): a process logs in
once. A forked child begins with no connections and a client id of its own."""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Sequence

from google.protobuf.message import Message

from bootseer.errors import DataError, UnavailableError, UnsupportedError
from bootseer.hdfs import nameservice
from bootseer.hdfs.connection import Connection, Transfer, connect
from bootseer.hdfs.dial import Address, host_port, remaining
from bootseer.hdfs.errors import REACH, RemoteError, SaslRequired, remote
from bootseer.hdfs.framing import M, frame, parse
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.sasl import negotiation
from bootseer.hdfs.sasl.login import Identity, LoginFailed
from bootseer.hdfs.shared import SharedConnection

FIRST_CONTACT = 2.0
"""Seconds for which a server that never answered this process may refuse: a wrong name or port should fail soon. One
attempt may take longer: a server may be slow to answer, and an address where nobody is does not even refuse."""

_HELLO = b"hrpc\x09\x00\x00"
"""Magic, version, service class, and 0 for "no SASL"."""

_CONTEXT_CALL = -3
_CONNECT = 10.0  # s for one connection and its login: others wait for it, who have less time than this call
_SHARE = 3  # of several addresses, one may keep a call waiting for this part of its time, before the next is asked
_SHORTEST = 2.0  # s, but for this long
_SILENT = 5_000  # ms until bytes that a dead network swallows end a connection

_log = logging.getLogger(__name__)


class RpcClient:
    """Calls of one protocol at one server as one user. ``addresses``: (host, port), several for a name service.
    ``name`` is how messages call it: ``hdfs://host:port``. ``client_id``: 16 random bytes, others in a forked child."""

    def __init__(
        self,
        addresses: Sequence[Address],
        protocol: str,
        *,
        name: str = "",
        user: str,
        real_user: str = "",
    ) -> None:
        self.name = name or f"hdfs://{host_port(addresses[0])}"
        self._addresses, self._turn = list(addresses), 0
        self._protocol = protocol
        self._user, self._real_user = user, real_user
        self.login = ""
        """Who this process is by its login, as a phrase; "" before, and where the NameNode wants none."""
        self._secured = nameservice.setting("hadoop.security.authentication").lower() == "kerberos"
        self._identity = Identity.now(self.name.removeprefix("hdfs://") if name else "", user if real_user else "")
        self._reached = self._down = False
        self.forget()
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.close)

    def forget(self) -> None:
        """Begin anew, as another client: a NameNode would take a forked child's calls for its parent's, made again."""
        self._shared: dict[Address, SharedConnection] = {}
        self._turns = {address: threading.Lock() for address in self._addresses}
        self._lock = threading.Lock()
        self.client_id = uuid.uuid4().bytes
        self._last_call = 0

    def close(self) -> None:
        """Close the connections that no call uses; calls go on working."""
        for shared in list(self._shared.values()):
            shared.close()

    def call(self, method: str, request: Message, answer: type[M], doing: str, *, deadline: float) -> M:
        """Call ``method``; ``doing`` is a phrase such as ``"create /a"``. Tries again while the server cannot be
        reached, restarts, is in safe mode or not active, for ``deadline`` seconds. Raises what
        `bootseer.hdfs.errors.remote` makes of the server's exception, `UnavailableError` when the time is over (the
        operation may have happened all the same), `DataError` for an answer that makes no sense."""
        began = time.monotonic()
        until = began + deadline
        with self._lock:
            self._last_call = call_id = self._last_call % 0x7FFFFFFF + 1
        head = wire.MethodHeader(method=method, protocol=self._protocol, version=1)
        where = f"{doing} on {self.name}"
        attempt, told = 0, None
        while True:
            turn, secured = self._turn, self._secured
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
            except SaslRequired:
                if secured:
                    raise UnsupportedError(f"cannot {where}: it wants a login that is not offered") from None
                self._secured = True
                continue
            except LoginFailed as exc:
                if not (exc.passing and self.login):
                    raise exc.error(where) from None
                problem, elsewhere = exc, False
            except DataError as exc:
                raise DataError(f"cannot {where}: {exc.message}", hint="is this the RPC port of a NameNode?") from None
            except (OSError, EOFError) as exc:
                problem, elsewhere = exc, True
            attempt += 1
            pause = self._pause(attempt)
            stranger = pause and not self._reached  # every address was asked, and none has ever answered
            if time.monotonic() + pause >= (min(until, began + FIRST_CONTACT) if stranger else until):
                # what a NameNode said explains more than that another, or it later, did not answer
                raise self._late(where, told or problem, time.monotonic() - began) from (told or problem)
            if elsewhere:
                self._fail_over(turn, problem)
            if pause:
                self._note(f"{type(problem).__name__}: {problem}")
                time.sleep(pause)

    def _pause(self, attempt: int) -> float:
        """Seconds to wait after so many attempts: none until every address was asked, then 50 ms and more, to 1 s."""
        rounds, within = divmod(attempt, len(self._addresses))
        return 0.0 if within else min(0.05 * 2 ** min(rounds - 1, 10), 1.0) * random.uniform(0.5, 1.0)

    def _fail_over(self, turn: int, problem: Exception) -> None:
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
        if isinstance(problem, LoginFailed):
            return problem.error(where)
        what = (getattr(problem, "strerror", None) or str(problem)).lower()
        return UnavailableError(f"cannot {where}: {what} (tried for {seconds:.1f} s)", hint=REACH)

    def _note(self, problem: str) -> None:
        """One log line when trouble begins, one when it is over; none of a server that was never reached: its address
        is most likely wrong, and the error at the end says so."""
        if problem and self._reached and not self._down:
            self._down = True
            _log.warning("%s does not answer (%s); trying again", self.name, problem)
        elif not problem:
            self._reached = True
            if self._down:
                self._down = False
                _log.warning("%s answers again", self.name)

    def _header(self, call_id: int, attempt: int) -> wire.RpcRequestHeader:
        return wire.RpcRequestHeader(
            rpc_kind=2, rpc_op=0, call_id=call_id, client_id=self.client_id, retry_count=attempt
        )

    def _attempt(self, turn: int, packed: bytes, call_id: int, until: float, deadline: float) -> memoryview:
        if len(self._addresses) > 1:  # a frozen one must leave time for the others
            until = min(until, time.monotonic() + max(deadline / _SHARE, _SHORTEST))
        return self._connected(self._addresses[turn], until).call(packed, call_id, until)

    def _connected(self, address: Address, until: float) -> SharedConnection:
        """The connection to ``address``: one thread makes it, and others wait for that one."""
        if not self._turns[address].acquire(timeout=remaining(until)):
            raise TimeoutError("no connection in time")
        try:
            if (found := self._shared.get(address)) and found.usable():
                return found
            until = min(until, time.monotonic() + _CONNECT)
            connection = connect(address, until, Transfer(), silent_ms=_SILENT)
            try:
                connection.begin(until, Transfer())
                found = self._shared[address] = SharedConnection(connection, self._greeting(connection))
                connection.end()
            except BaseException:
                connection.close()
                raise
            return found
        finally:
            self._turns[address].release()

    def _greeting(self, connection: Connection) -> bytes:
        """What goes before the first call of a connection: `_HELLO` or a login, and who calls whom."""
        hello, user = _HELLO, wire.ConnectionContext.User(effective=self._user, real=self._real_user or None)
        if self._secured:
            login = negotiation.log_in(connection, self._identity)
            if login and login != self.login:
                self.login = login
                negotiation.ignored(login)
                _log.info("%s: logged in by the %s", self.name, login)
            if login:  # it says who we are; for whom we act is said here
                user = wire.ConnectionContext.User(effective=self._user if self._real_user else None)
            hello = b""
        context = wire.ConnectionContext(user=user, protocol=self._protocol)
        return hello + frame(self._header(_CONTEXT_CALL, -1), context)
