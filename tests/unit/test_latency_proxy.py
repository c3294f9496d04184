import contextlib
import os
import socket
import threading
import time

import pytest

from support.latency import LatencyProxy

RTT = 0.05


@pytest.fixture(scope="module")
def proxy():
    """A proxy before a server that answers with what it got, and closes when its client has stopped sending."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo(peer):
            with peer, contextlib.suppress(OSError):
                while data := peer.recv(1 << 20):
                    peer.sendall(data)

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        with LatencyProxy(f"127.0.0.1:{server.getsockname()[1]}", rtt=RTT) as made:
            yield made
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def connect(proxy):
    return socket.create_connection((proxy.host, proxy.port), timeout=20)


def timed(sock):
    began = time.monotonic()
    sock.sendall(b"ping")
    assert sock.recv(16) == b"ping"
    return time.monotonic() - began


def test_each_exchange_takes_a_round_trip_and_the_first_one_the_handshake_too(proxy):
    with connect(proxy) as sock:
        assert timed(sock) >= 2 * RTT
        later = [timed(sock) for _ in range(3)]
    assert all(seconds >= RTT for seconds in later)
    assert min(later) < 2 * RTT


def test_long_transfers_arrive_whole_in_order_and_not_a_round_trip_per_piece(proxy):
    data = os.urandom(1 << 20) * 24
    got = bytearray()
    with connect(proxy) as sock:

        def receive():
            while piece := sock.recv(1 << 20):
                got.extend(piece)

        reader = threading.Thread(target=receive)
        began = time.monotonic()
        reader.start()
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        reader.join(20)
    assert bytes(got) == data
    assert time.monotonic() - began < 10


def test_a_target_that_is_not_there_resets_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with (
        LatencyProxy(f"127.0.0.1:{port}", rtt=0.001) as proxy,
        connect(proxy) as sock,
        contextlib.suppress(ConnectionResetError),
    ):
        assert sock.recv(1) == b""


def test_ended_connections_leave_no_descriptor_behind(proxy):
    def descriptors():
        return len(os.listdir(f"/proc/{proxy.pid}/fd"))

    before = descriptors()
    for _ in range(20):
        with connect(proxy) as sock:
            timed(sock)
    deadline = time.monotonic() + 10
    while descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert descriptors() <= before
