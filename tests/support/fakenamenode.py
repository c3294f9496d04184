"""A NameNode that answers what a test says: right, late, torn, hostile, or not at all; over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from google.protobuf.message import Message

from bootseer.hdfs.framing import frame, take
from bootseer.hdfs.proto import hdfs_pb2 as wire


class Call:
    """One call as the server got it."""

    def __init__(self, connection: socket.socket, data: bytes) -> None:
        self.connection = connection
        head, end = take(memoryview(data), 0)
        self.header = wire.RpcRequestHeader.FromString(bytes(head))
        if self.header.call_id >= 0:
            head, end = take(memoryview(data), end)
            self.method = wire.MethodHeader.FromString(bytes(head)).method
        body, end = take(memoryview(data), end)
        self.body = bytes(body)
        assert end == len(data)

    def answer(self, message: Message) -> None:
        header = wire.RpcResponseHeader(call_id=self.header.call_id, status=0)
        self.connection.sendall(frame(header, message))

    def fail(self, java: str, text: str = "", status: int = 1) -> None:
        call_id = self.header.call_id % (1 << 32)
        header = wire.RpcResponseHeader(call_id=call_id, status=status, exception=java, message=text)
        self.connection.sendall(frame(header))


def whole(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data


class Server:
    """Answers with ``act(call)``, which ends the connection by returning False. ``calls``, ``contexts``, ``logins``:
    what came."""

    def __init__(self, act: Callable[[Call], object], port: int = 0) -> None:
        self.act = act
        self.calls: list[Call] = []
        self.contexts: list[wire.ConnectionContext] = []
        self.logins: list[bool] = []
        self.connections: list[socket.socket] = []
        self._listen = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listen.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listen.accept()[0]
                self.connections.append(connection)
                thread = threading.Thread(target=self._serve, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            hello = whole(connection, 7)
            assert hello[:6] == b"hrpc\x09\x00"
            self.logins.append(hello[6] == 0xDF)
            while True:
                call = Call(connection, whole(connection, int.from_bytes(whole(connection, 4), "big")))
                if call.header.call_id == -3:
                    self.contexts.append(wire.ConnectionContext.FromString(call.body))
                    continue
                self.calls.append(call)
                if self.act(call) is False:
                    return

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listen.shutdown(socket.SHUT_RDWR)
        self._listen.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
