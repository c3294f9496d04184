"""A source of stored bytes: one blob in one store, opened when first needed and again after a failure."""

from __future__ import annotations

import threading
from typing import Protocol

from bootseer.errors import DataError, UnavailableError, from_os_error
from bootseer.store import RangeReader, Store


class Source(Protocol):
    """Where stored bytes come from; used by several threads at once.

    ``read`` returns exactly ``length`` bytes, or raises `UnavailableError` (worth another try), `DataError` (too
    short) or another `BootseerError` (not worth one).
    """

    name: str

    def read(self, offset: int, length: int) -> bytes: ...

    def close(self) -> None: ...


class StoreSource:
    """Ranges of the object ``key``. Opening is put off to the first read: a complete cache needs no store at all."""

    def __init__(self, store: Store, key: str) -> None:
        self.name = f"{store.url}/{key}"
        self._store = store
        self._key = key
        self._lock = threading.Lock()
        self._reader: RangeReader | None = None
        self._retired: list[RangeReader] = []
        self._closed = False

    def _open(self) -> RangeReader:
        with self._lock:
            if self._closed:
                raise UnavailableError(f"source {self.name} is closed")
            if self._reader is None:
                self._reader = self._store.open(self._key)
            return self._reader

    def _drop(self, reader: RangeReader) -> None:
        # Other threads may still read from it, so it is closed at the end only.
        with self._lock:
            if self._reader is reader:
                self._reader = None
                self._retired.append(reader)

    def read(self, offset: int, length: int) -> bytes:
        reader = self._open()
        try:
            data = reader.read(offset, length)
        except (UnavailableError, DataError):
            self._drop(reader)
            raise
        except OSError as exc:
            self._drop(reader)
            raise UnavailableError(str(from_os_error(exc, f"read {self.name}"))) from exc
        if len(data) != length:
            self._drop(reader)
            raise DataError(f"{self.name} gave {len(data)} bytes for {length} at {offset}")
        return data

    def close(self) -> None:
        with self._lock:
            self._closed = True
            readers = [*self._retired, *([self._reader] if self._reader is not None else [])]
            self._retired, self._reader = [], None
        for reader in readers:
            reader.close()
