"""The ranks that came to read together: a gloo group of their own, and what each of them needs. They find each other
through the job's store. It is not `torch.distributed.new_group`, which is a collective of every rank of the job, and
what goes wrong in it is not the job's: docs/internals/shared-read.md."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from crc32c import crc32c

from bootseer import faults
from bootseer.errors import UnavailableError
from bootseer.hdfs.deadline import Workers
from bootseer.wiretypes import known

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

_GRACE = 5.0
"""Seconds by which the first rank may have come later than another one thinks."""
_POLL = (0.005, 0.1)
_MOST = 64 << 20
"""Bytes of what one rank says that it needs: a run of chunks takes about ten."""
_UNUSED = (1 << 31) - 1
"""A tag with which nobody sends anything."""
_store_calls = Workers("the store of the job")
_calls: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many reads each group has had; every rank counts the same, also one that is new in a group made anew."""

Wait = Callable[[], None]
"""Returns when the bytes have gone, or come. Raises `UnavailableError`."""


class Peers:
    """Those who came. ``ranks`` of the job's group and their encoded ``needs``, both by number in the group of their
    own, in which this rank has the number ``me``. Any thread may send and receive; each wait has the ``deadline``."""

    def __init__(self, store: Store, me: int, count: int, deadline: float, rank: int, needs: bytes) -> None:
        """Raises `RuntimeError`, and `UnavailableError` when what they say is damaged."""
        import torch.distributed as dist

        self.me, self._deadline = me, timedelta(seconds=deadline)
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_device(store)], self._deadline
        self._group = dist.ProcessGroupGloo(store, me, count, options)
        body = msgspec.msgpack.encode((rank, needs))
        told = [msgspec.msgpack.decode(_checked(data), type=known(tuple[int, bytes])) for data in self.gather(body)]
        self.ranks, self.needs = [rank for rank, _ in told], [needs for _, needs in told]

    def gather(self, body: bytes) -> list[bytes]:
        """What each rank says here, with its CRC-32C before it."""
        import torch

        mine = bytearray(crc32c(body).to_bytes(4) + body)
        count = self._group.size()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
        self._group.allgather([lengths], [torch.tensor([len(mine)])]).wait()
        sizes = [int(length) for length in lengths]
        if not 4 <= min(sizes) <= max(sizes) <= _MOST:
            raise UnavailableError("what another rank needs is no such thing")
        padded = torch.frombuffer(mine.ljust(max(sizes)), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(count)]
        self._group.allgather([found], [padded]).wait()
        return [bytes(one[:size].numpy()) for one, size in zip(found, sizes, strict=True)]

    def send(self, data: memoryview, to: int, tag: int) -> Wait:
        """The memory must not change before the wait has ended. Raises `UnavailableError`."""
        # a receiver asks for what comes after a bucket of ours only when it has that one
        return self._begin(self._group.send, data, to, tag, 2 * self._deadline)

    def receive(self, data: memoryview, owner: int, tag: int, *, buckets: int = 1) -> Wait:
        """Fill ``data`` with what ``owner`` sends with this ``tag``, once it has read so many ``buckets``: it has the
        deadline for each. Raises `UnavailableError`."""
        return self._begin(self._group.recv, data, owner, tag, buckets * self._deadline)

    def _begin(self, call: Any, data: memoryview, other: int, tag: int, deadline: timedelta) -> Wait:
        import torch

        try:
            work = call([torch.frombuffer(data, dtype=torch.uint8)], other, tag)
        except RuntimeError as exc:
            why = _said(exc)
            work = None

        def wait() -> None:
            if work is None:
                raise UnavailableError(why)
            try:
                work.wait(deadline)
            except RuntimeError as exc:
                raise UnavailableError(_said(exc)) from None

        return wait

    def finish(self) -> None:
        """Wait until every rank has all that the others send: the end of one breaks its connections."""
        with contextlib.suppress(RuntimeError):  # then somebody has gone already
            self._group.barrier().wait(self._deadline)

    def close(self) -> None:
        """Break all connections. Nothing is received any more, and nobody waits for this rank."""
        # gloo breaks all of a group when one receive is too late; one from a rank that has gone fails before that
        size, soon = self._group.size(), timedelta(milliseconds=1)
        for step in range(1, size):
            with contextlib.suppress(UnavailableError):
                other = (self.me + step) % size
                self._begin(self._group.recv, memoryview(bytearray(1)), other, _UNUSED, soon)()


def _said(exc: BaseException) -> str:
    """The first line, without the place in gloo's source."""
    return str(exc).partition("\n")[0].rpartition("] ")[2].partition(". This")[0] or type(exc).__name__


def _checked(data: bytes) -> bytes:
    if crc32c(data[4:]) != int.from_bytes(data[:4]):
        raise UnavailableError("what another rank needs is damaged on the way")
    return data[4:]


def meet(group: ProcessGroup, needs: bytes, deadline: float) -> Peers:
    """Those of the ranks of ``group`` that come within ``deadline`` seconds, of which this is one. Raises
    `UnavailableError` with the reason when this rank is to read by itself."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_available() or not dist.is_initialized():
        raise UnavailableError("torch.distributed is not initialized")
    if (rank := dist.get_rank(group)) < 0 or (size := dist.get_world_size(group)) < 2:
        raise UnavailableError("it is the only rank of its group")
    if not dist.is_gloo_available():
        raise UnavailableError("this torch has no gloo")
    _calls[group] = call = _calls.get(group, 0) + 1
    store = dist.PrefixStore(f"bootseer.read/{call}", distributed_c10d._get_process_group_store(group))
    try:
        me, count = _store_calls.call(lambda: arrive(store, size, deadline), deadline + 2 * _GRACE)
        faults.point("stripefs.shared.joined")
        return _store_calls.call(lambda: Peers(store, me, count, deadline, rank, needs), 2 * deadline)
    except TimeoutError:
        raise UnavailableError("the store of the job does not answer") from None
    except (RuntimeError, msgspec.MsgspecError) as exc:
        raise UnavailableError(f"cannot meet the other ranks: {_said(exc)}") from exc


def arrive(store: Store, size: int, deadline: float) -> tuple[int, int]:
    """(how many came before this rank, how many came in time): the first of them waits, and says so to the others."""
    until, pause = time.monotonic() + deadline, _POLL[0]
    came: int = store.add("came", 1)
    faults.point("stripefs.shared.arrived")
    while True:  # not Store.wait: it keeps other threads from the store
        if came > 1 and store.check(["count"]):
            count = int(said) if (said := bytes(store.get("count"))).isdigit() else 0
            break
        if came == 1 and ((count := store.add("came", 0)) >= size or time.monotonic() > until):
            faults.point("stripefs.shared.collected")
            store.set("count", str(count))
            break
        if time.monotonic() > until + _GRACE:
            raise UnavailableError("the rank that came first did not say who is there")
        time.sleep(pause)
        pause = min(2 * pause, _POLL[1])
    if count > size:
        raise UnavailableError(f"{count} came, and the group has {size} ranks")
    if came > count:
        raise UnavailableError("the others did not wait for it")
    if count < 2:
        raise UnavailableError("no other rank came")
    return came - 1, count


def _device(store: Any) -> Any:
    """Where gloo listens: the interface in ``GLOO_SOCKET_IFNAME``, else the address from which this machine reaches
    the job's store. (Gloo takes that of the machine's name, which often is its loopback.)"""
    import torch.distributed as dist

    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo.create_device(interface=names.split(",")[0])
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    address = "127.0.0.1"
    with contextlib.suppress(OSError):
        host = getattr(store, "host", "") or socket.gethostname()
        family, kind, proto, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as sock:
            sock.connect(there)  # sends nothing: it asks the routing table
            address = sock.getsockname()[0]
    return dist.ProcessGroupGloo.create_device(hostname=address)
