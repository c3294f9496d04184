"""Connections to daemons: whom they reach, what is no host, and what a forked child keeps of them."""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator

import pytest

from bootseer.errors import ConfigError
from bootseer.hdfs import dial as dial_module
from bootseer.hdfs.dial import dial
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.rpc import RpcClient


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def soon() -> float:
    return time.monotonic() + 5.0


def test_by_address_and_by_name(server):
    for host in ("127.0.0.1", "localhost"):
        with dial(host, server.getsockname()[1], soon()) as sock:
            assert sock.getpeername() == server.getsockname()
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
def test_what_cannot_be_a_host(host):
    with pytest.raises(ConfigError, match="cannot be the name of a host"):
        dial(host, 8020, soon())
    channel = RpcClient([(host, 8020)], "a.Protocol", user="ann")
    with pytest.raises(ConfigError, match="cannot be the name of a host"):
        channel.call("mkdirs", wire.Empty(), wire.Result, "make /a", deadline=5.0)


def test_refused_late_and_all_sockets_closed(server):
    port = server.getsockname()[1]
    with pytest.raises(TimeoutError):
        dial("127.0.0.1", port, time.monotonic() - 1)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        dial("127.0.0.1", port, soon())


def test_a_connection_to_itself_is_none(monkeypatch):
    """The kernel gives it to who connects from the very port that it connects to."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    class Bound(socket.socket):
        def connect(self, address: object) -> None:
            self.bind(("127.0.0.1", port))
            super().connect(("127.0.0.1", port))

    monkeypatch.setattr(dial_module.socket, "socket", Bound)
    with pytest.raises(ConnectionRefusedError) as caught:
        dial("127.0.0.1", port, soon())
    assert caught.value.errno == errno.ECONNREFUSED


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_none_of_its_parents_connections_open(server):
    with dial("127.0.0.1", server.getsockname()[1], soon()) as sock:
        number = sock.fileno()
        if not (child := os.fork()):
            with contextlib.suppress(OSError):
                os.fstat(number)
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        peer = server.accept()[0]
        sock.sendall(b"x")  # the parent's own goes on
        assert peer.recv(1) == b"x"
        peer.close()
