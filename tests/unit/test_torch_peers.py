"""Ranks that meet: what goes wrong before they have, and connections of strangers, hold up nobody."""

import socket
import struct
import threading
import time

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from bootseer.torch import peers, shared_read

pytestmark = pytest.mark.torch


class Failing:
    """A store whose ``set`` comes through, and whose answer is lost."""

    host = "127.0.0.1"

    def __init__(self, came: threading.Event) -> None:
        self._came, self._inner = came, dist.HashStore()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def set(self, key, value):
        self._inner.set(key, value)
        self._came.wait(10)
        raise RuntimeError("connection reset")


def test_a_first_rank_that_fails_while_others_are_with_it_does_not_hang():
    came = threading.Event()
    store = Failing(came)
    first, other = (peers.Rendezvous(store, "read/1", rank, 3) for rank in range(2))
    welcome = first._welcome

    def noted(sock, rank):
        came.set()
        welcome(sock, rank)

    first._welcome = noted
    said = []

    def join_other():
        try:
            other.join(b"", 1, lambda sock, rank: None, 5)
        except OSError as exc:
            said.append(exc)

    def join_first():
        try:
            first.join(b"", 1, lambda sock, rank: None, 5)
        except (OSError, RuntimeError) as exc:  # which of them depends on who was quicker
            said.append(exc)
        first.door.close()

    one = threading.Thread(target=join_first, daemon=True)
    one.start()
    two = threading.Thread(target=join_other, daemon=True)
    two.start()
    one.join(10)
    hung = one.is_alive()
    if hung:
        with first._changed:  # let it go
            first._over = True
            first._changed.notify_all()
    two.join(10)
    other.door.close()
    assert not hung, "the door of a rank that gave up did not close"
    assert len(said) == 2


@pytest.mark.parametrize("length", [1 << 63, 1 << 62, 1 << 40])
def test_a_damaged_length_is_a_broken_connection(length):
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(struct.pack("<QI", length, 0))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match="damaged"):
            peers._receive_message(mine, time.monotonic() + 5)


def test_a_door_without_threads_left_closes(monkeypatch):
    door = peers.Door("127.0.0.1", bytes(16))
    door.open({})
    real, failed = threading.Thread.start, threading.Event()

    def start(thread):
        if thread.name == "bootseer-peer" and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with socket.create_connection((door.host, door.port)) as sock:
        assert failed.wait(5)
        sock.settimeout(5)
        assert sock.recv(1) == b""
    with socket.create_connection((door.host, door.port), 5) as sock:  # it goes on
        sock.sendall(b"\1" * 21)
        sock.settimeout(5)
        assert sock.recv(1) == b""
    door.close()


def test_a_group_that_is_made_anew_begins_to_count_anew(monkeypatch):
    """After a restart within the process (only some ranks are new) all ranks name their meetings alike."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    met = []

    class Meeting:
        door = None

        def __init__(self, store, key, rank, size):
            met.append(key)

        def join(self, *args):
            raise OSError("nobody here")

        def finish(self):
            pass

    monkeypatch.setattr(shared_read, "Rendezvous", Meeting)
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            for group in (dist.group.WORLD, dist.group.WORLD, dist.new_group([0, 1])):
                assert "nobody here" in shared_read.read_shared([], group).alone
        finally:
            del group
            dist.destroy_process_group()
    assert [key.rpartition("/")[2] for key in met] == ["1", "2", "1"] * 2
