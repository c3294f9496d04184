"""Doubles for storage: a store that fails on command, and one behind a slow link. Both wrap any `Store`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.errors import UnavailableError
from bootseer.objects import ObjectInfo, Source, Store
from bootseer.oci.spec import Descriptor


class WrappedReader(Source):
    """Range reads that go through ``around(offset, length, read)``."""

    def __init__(
        self, inner: Source, around: Callable[[int, int, Callable[[], bytes]], bytes], *, streams: bool = False
    ) -> None:
        self.size = inner.size
        self.streams = streams
        self._inner = inner
        self._around = around

    def read(self, offset: int, length: int) -> bytes:
        return self._around(offset, length, lambda: self._inner.read(offset, length))

    def original(self, offset: int, length: int) -> bytes | None:
        return self._inner.original(offset, length)

    def close(self) -> None:
        self._inner.close()


class CheckedStore(Store):
    """Another store, where `_check` may raise before an operation."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url

    def _check(self) -> object: ...

    def check_there(self) -> None:
        self.inner.check_there()

    def get(self, key: str, *, most: int) -> bytes:
        self._check()
        return self.inner.get(key, most=most)

    def open(self, key: str) -> Source:
        return self.inner.open(key)

    def stat(self, key: str) -> ObjectInfo:
        self._check()
        return self.inner.stat(key)

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        self._check()
        return self.inner.put(key, data, overwrite=overwrite)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._check()
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    @contextlib.contextmanager
    def batch(self, *, subject: Descriptor | None = None) -> Iterator[None]:
        with self.inner.batch(subject=subject):
            yield

    def keep(self, key: str) -> None:
        self.inner.keep(key)

    def replicate(self, key: str, copies: int) -> None:
        self._check()
        self.inner.replicate(key, copies)


class FlakyStore(CheckedStore):
    """A store that fails as told; nothing goes wrong until then.

    ``down``: every operation raises `UnavailableError`. ``reads``: the (key, offset, length) of all range reads so far.
    ``streams``: what its readers say of themselves.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.down = False
        self.streams = False
        self.reads: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()
        self._failures = 0
        self._flips: dict[tuple[str, int], float] = {}
        self._gate = threading.Event()
        self._gate.set()

    def fail_next(self, count: int) -> None:
        """The next ``count`` range reads raise `UnavailableError`."""
        self._failures = count

    def flip(self, key: str, offset: int, *, times: float = float("inf")) -> None:
        """The next ``times`` range reads that cover ``offset`` of ``key`` return that byte with a bit flipped."""
        self._flips[key, offset] = times

    def hold(self) -> None:
        """Range reads wait from now on, until `release`."""
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def _check(self) -> None:
        if self.down:
            raise UnavailableError(f"store {self.url} is down")

    def open(self, key: str) -> Source:
        self._check()
        return WrappedReader(
            self.inner.open(key),
            lambda offset, length, read: self._read(key, offset, length, read),
            streams=self.streams,
        )

    def _read(self, key: str, offset: int, length: int, read: Callable[[], bytes]) -> bytes:
        with self._lock:
            self.reads.append((key, offset, length))
        self._gate.wait(60.0)
        with self._lock:
            self._check()
            if self._failures > 0:
                self._failures -= 1
                raise UnavailableError(f"store {self.url} failed on purpose")
        data = bytearray(read())
        with self._lock:
            for (where, at), left in self._flips.items():
                if where == key and left > 0 and offset <= at < offset + length:
                    self._flips[where, at] = left - 1
                    data[at - offset] ^= 1
        return bytes(data)


class RateLimitedStore(CheckedStore):
    """A store behind one link of ``rate`` bytes per second, shared fairly, with ``latency`` seconds per request."""

    _SLICE = 64 << 10

    def __init__(self, inner: Store, *, rate: float, latency: float = 0.0) -> None:
        super().__init__(inner)
        self._rate = rate
        self._latency = latency
        self._lock = threading.Lock()
        self._free = 0.0

    def _pass(self, length: int) -> None:
        time.sleep(self._latency)
        # In slices, so that a small request among large ones gets its share of the link, as with TCP.
        while length > 0:
            piece = min(length, self._SLICE)
            length -= piece
            with self._lock:
                self._free = max(self._free, time.monotonic()) + piece / self._rate
                wait = self._free - time.monotonic()
            if wait > 0:
                time.sleep(wait)

    def get(self, key: str, *, most: int) -> bytes:
        data = super().get(key, most=most)
        self._pass(len(data))
        return data

    def open(self, key: str) -> Source:
        def around(offset: int, length: int, read: Callable[[], bytes]) -> bytes:
            self._pass(length)
            return read()

        return WrappedReader(self.inner.open(key), around)

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        self._pass(data.stat().st_size if isinstance(data, Path) else len(data))
        return super().put(key, data, overwrite=overwrite)
