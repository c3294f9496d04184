"""A store whose weather another process makes: a file says what goes wrong, and may change at any time.

A block server is a process of its own, so a test cannot call its store. `server` is the command of one whose store
obeys such a file.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.errors import UnavailableError
from bootseer.objects import Source, Store
from support.stores import CheckedStore, RateLimitedStore, WrappedReader


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong from now on; chances are from 0 to 1, per range read."""

    down: bool = False
    """Every operation raises `UnavailableError`."""
    fail: float = 0.0
    """Range reads that raise `UnavailableError`."""
    flip: float = 0.0
    """Range reads with one wrong bit."""
    cut: float = 0.0
    """Range reads that come short."""
    stale: float = 0.0
    """Range reads that get the bytes of another one."""
    latency: float = 0.0
    """Seconds before an answer."""

    def make(self, path: Path) -> None:
        """Say so in the file ``path``."""
        tmp = path.with_name(f"{path.name}.tmp")
        tmp.write_bytes(msgspec.json.encode(self))
        os.replace(tmp, path)


class WeatherStore(CheckedStore):
    """``inner``, in the weather that the file ``path`` says; without the file it is fine."""

    _LOOK_SECONDS = 0.02

    def __init__(self, inner: Store, path: Path) -> None:
        super().__init__(inner)
        self._path = path
        self._lock = threading.Lock()
        self._looked = 0.0
        self._weather = Weather()
        self._random = random.Random()
        self._other = b""

    @property
    def weather(self) -> Weather:
        with self._lock:
            now = time.monotonic()
            if now - self._looked > self._LOOK_SECONDS:
                self._looked = now
                try:
                    self._weather = msgspec.json.decode(self._path.read_bytes(), type=Weather)
                except FileNotFoundError:
                    self._weather = Weather()
            return self._weather

    def _check(self) -> Weather:
        weather = self.weather
        if weather.down:
            raise UnavailableError(f"store {self.url} is down")
        return weather

    def open(self, key: str) -> Source:
        self._check()
        return WrappedReader(self.inner.open(key), self._read)

    def _read(self, offset: int, length: int, read: Callable[[], bytes]) -> bytes:
        weather, chance = self._check(), self._random.random
        if weather.latency:
            time.sleep(weather.latency)
        if chance() < weather.fail:
            raise UnavailableError(f"store {self.url} failed on purpose")
        data = bytearray(read())
        self._check()
        self._other, other = bytes(data), self._other
        if len(other) >= length and chance() < weather.stale:
            data[:] = other[:length]
        if data and chance() < weather.flip:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        if data and chance() < weather.cut:
            del data[self._random.randrange(len(data)) :]
        return bytes(data)


def store_for(url: str, path: Path, rate: float) -> Store:
    """The store at ``url`` behind a link of ``rate`` bytes per second (0: as fast as it is), in the weather."""
    from bootseer.objects import open_store

    store = open_store(url)
    return WeatherStore(RateLimitedStore(store, rate=rate) if rate else store, path)


def server(path: Path, *, rate: float = 0.0, before: str = "") -> list[str]:
    """A command for `tree.mount(server=...)`. ``before``: Python statements it begins with."""
    code = (
        "import sys; from pathlib import Path; from bootseer.blocks.serving.server import main\n"
        "from support.weather import store_for\n"
        f"{before}\n"
        f"sys.exit(main(store_for=lambda url: store_for(url, Path({str(path)!r}), {rate!r})))"
    )
    return [sys.executable, "-c", code]
