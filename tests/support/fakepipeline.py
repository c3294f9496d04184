"""The first DataNode of a write pipeline that says what a test wants, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from bootseer.hdfs import checksum
from bootseer.hdfs.framing import delimited
from bootseer.hdfs.pipeline import Packet
from bootseer.hdfs.proto import hdfs_pb2 as wire


def ack(number: int, *states: int) -> bytes:
    return delimited(wire.PipelineAck(number=number, reply=states, flag=states))


Answer = Callable[[Packet], list[bytes]]


class FakeWriterNode:
    """The first DataNode of a pipeline. ``setup``: its answer to the request; ``answer``: what it sends for a packet.

    Probes (operation 81) get an answer unless ``mute``. ``packets``: what arrived.
    """

    def __init__(self, answer: Answer | None = None, setup: bytes | None = None, **more: Any) -> None:
        self.behave(answer, setup, **more)
        self.packets: list[Packet] = []
        self.request, self.copy = wire.WriteBlock(), wire.TransferBlock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.alive = True
        self.port: int = self._server.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def behave(
        self, answer: Answer | None = None, setup: bytes | None = None, *, mute: bool = False, replicas: int = 3
    ) -> None:
        self._answer = answer or (lambda packet: [ack(packet.number, *(0,) * replicas)])
        self._setup = delimited(wire.BlockOpResponse(status=0)) if setup is None else setup
        self._mute = mute

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            self._open.append(sock)
            self._threads.append(threading.Thread(target=self._serve, args=(sock,), daemon=True))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error), sock, sock.makefile("rb") as stream:
            _, operation = struct.unpack(">HB", stream.read(3))
            length = shift = 0
            while True:
                byte = stream.read(1)[0]
                length |= (byte & 0x7F) << shift
                shift += 7
                if byte < 128:
                    break
            request = stream.read(length)
            if operation == 81:
                if self._mute:
                    stream.read(1)
                else:
                    sock.sendall(delimited(wire.BlockOpResponse(status=1)))
                return
            if operation == 86:
                self.copy = wire.TransferBlock.FromString(request)
            else:
                self.request = wire.WriteBlock.FromString(request)
            sock.sendall(self._setup)
            if operation == 86:
                stream.read(bool(self._setup))
            if not self._setup or operation == 86:
                return
            while True:
                size, head = struct.unpack(">IH", stream.read(6))
                header = wire.PacketHeader.FromString(stream.read(head))
                sums = stream.read(size - 4 - header.length)
                data = stream.read(header.length)
                assert sums == checksum.of([memoryview(data)], self.request.checksum.bytes_per_checksum)
                packet = Packet(header.number, header.offset, header.length, sums, (memoryview(data),), header.last)
                self.packets.append(packet)
                for piece in self._answer(packet):
                    if not piece:
                        return
                    sock.sendall(piece)

    def close(self) -> None:
        self.alive = False
        self._server.shutdown(socket.SHUT_RDWR)  # closing alone does not end an accept under way
        self._threads[0].join(10)
        self._server.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join(10)
