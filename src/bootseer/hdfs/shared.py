"""One connection to a NameNode for the calls of all threads, many under way at once, as Hadoop's own clients have it: a
login costs both sides more than a call.

There is no thread for it. Of those who wait one reads, and gives each its answer; who has its own leaves the reading to
another one. What has been received of a frame when a reader's time is over stays here for the next one. No new call is
made over a connection that was silent for all the time of a call: what is between here and there may have lost it.

Concurrency: any thread may call. Only the reader receives, and only who holds ``_sending`` sends."""

from __future__ import annotations

import queue
import threading
import time

from bootseer import faults
from bootseer.errors import DataError
from bootseer.hdfs.connection import Connection
from bootseer.hdfs.dial import remaining
from bootseer.hdfs.errors import RemoteError, SaslRequired
from bootseer.hdfs.framing import parse, take, text
from bootseer.hdfs.proto import hdfs_pb2 as wire

LIMIT = 128 << 20
"""The longest answer in bytes; Hadoop's own client has the same limit (``ipc.maximum.response.length``)."""
SASL_CALL = -33
_IDLE = 60.0  # s: firewalls forget connections that were silent for minutes

_Inbox = queue.SimpleQueue["bytearray | None"]
"""What a call waits for: its answer, or None: it is its turn to read."""


def _whose(data: bytearray) -> int:
    """Which call is answered by ``data``, a frame without its length."""
    number = parse(wire.RpcResponseHeader, take(memoryview(data), 0)[0]).call_id
    return number - (1 << 32) if number >> 31 else number


def parse_answer(data: bytes | bytearray, call_id: int) -> memoryview:
    """The answer to call ``call_id`` in ``data``, a frame without its length. Raises `RemoteError` for an exception of
    the server, `SaslRequired` when it wants authentication, `DataError` for anything else."""
    view = memoryview(data)
    head, end = take(view, 0)
    header = parse(wire.RpcResponseHeader, head)
    answered = header.call_id - (1 << 32) if header.call_id >> 31 else header.call_id
    if answered == SASL_CALL:
        raise SaslRequired
    if header.status:
        java, said = text(header.exception), text(header.message)
        if "SIMPLE authentication is not enabled" in said:
            raise SaslRequired
        if header.status == 2 or answered == call_id:
            raise RemoteError(java, said, fatal=header.status == 2)
    if answered != call_id:
        raise DataError(f"an RPC answer is for call {answered}, not {call_id}")
    body, end = take(view, end)
    if end != len(view):
        raise DataError(f"an RPC answer has {len(view) - end} bytes too many")
    return body


class SharedConnection:
    """``connection``: logged in. ``greeting``: what goes before the first call."""

    def __init__(self, connection: Connection, greeting: bytes) -> None:
        self._connection, self._greeting = connection, greeting
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._calls: dict[int, _Inbox] = {}
        self._late = set[int]()  # whose time was over; one that was made again here may be answered more than once
        self._reader: int | None = None  # whose turn it is
        self._open, self._ended = True, False  # whether calls may be made over it; whether no answer comes any more
        self._came, self._used = bytearray(), time.monotonic()
        self._heard = self._used

    def usable(self) -> bool:
        """Whether a call may be made over it; one that may not, and that no call uses, is closed."""
        with self._lock:
            if not self._calls and self._open:
                self._open = time.monotonic() - self._used < _IDLE and self._connection.alive()
                self._close_unused()
            return self._open

    def close(self) -> None:
        """Close it, unless a call uses it."""
        with self._lock:
            self._open = self._open and bool(self._calls)
            self._close_unused()

    def _close_unused(self) -> None:
        if not (self._open or self._calls):
            self._connection.close()

    def call(self, request: bytes, call_id: int, until: float) -> memoryview:
        """Send a frame, wait for its answer. As `parse_answer`; `OSError` or `EOFError` when connection or time end."""
        inbox: _Inbox = queue.SimpleQueue()
        with self._lock:
            if not self._open:
                raise ConnectionResetError("the connection has ended")
            self._calls[call_id] = inbox
            self._pass_on()
        data, began = None, time.monotonic()
        try:
            self._send(request, until)
            faults.point("hdfs.rpc.sent")
            while data is None:
                try:
                    found = inbox.get(timeout=remaining(until))
                except queue.Empty:
                    raise TimeoutError("no answer in time") from None
                data = self._read_until(call_id, until) if found is None else found
            faults.point("hdfs.rpc.answered")
            return parse_answer(data, call_id)
        except (DataError, RemoteError, SaslRequired) as exc:
            if not isinstance(exc, RemoteError) or exc.fatal:
                self._end()
            raise
        finally:
            with self._lock:
                del self._calls[call_id]
                if data is None:
                    self._late.add(call_id)
                    self._open = self._open and self._heard >= began
                if self._reader == call_id:
                    self._reader = None
                self._pass_on()
                self._used = time.monotonic()
                self._close_unused()

    def _pass_on(self) -> None:
        """Make one of those who wait the reader, if there is none."""
        if self._reader is None and self._calls:
            self._reader, inbox = next(iter(self._calls.items()))
            inbox.put(None)

    def _end(self) -> None:
        """No call is made over it any more, and those under way get no answer: each finds so when it reads."""
        self._open, self._ended = False, True
        self._connection.shut()  # wakes the reader

    def _send(self, request: bytes, until: float) -> None:
        if not self._sending.acquire(timeout=remaining(until)):
            raise TimeoutError("other calls are being sent")
        try:
            request, self._greeting = self._greeting + request, b""
            self._connection.push(request, until)
        except BaseException:  # perhaps in the middle of it
            self._end()
            raise
        finally:
            self._sending.release()

    def _read_until(self, call_id: int, until: float) -> bytearray:
        """The frame that answers this call; those that come before it go to others."""
        try:
            while not self._ended:
                data = self._frame(until)
                answered = _whose(data)
                if answered == call_id:
                    return data
                with self._lock:
                    if inbox := self._calls.get(answered):
                        inbox.put(data)
                    elif answered not in self._late:
                        parse_answer(data, call_id)  # an error of the connection, or nonsense: raises
            raise ConnectionResetError("the connection has ended")
        except TimeoutError:
            raise
        except BaseException:
            self._end()
            raise

    def _frame(self, until: float) -> bytearray:
        came = self._came
        while True:
            if len(came) >= 4:
                end = 4 + int.from_bytes(came[:4], "big")
                if end - 4 > LIMIT:
                    raise DataError(f"not Hadoop RPC: an answer that claims {end - 4} bytes")
                if len(came) >= end:
                    found = came[4:end]
                    del came[:end]
                    return found
            came += self._connection.pull(until)
            self._heard = time.monotonic()
