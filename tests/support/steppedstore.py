"""A storage in memory with a clock of its own, whose users do one step each when they are told to."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path

from bootseer.backends.interface import FILE_MODE, Backend, Entry, Sink, Source
from bootseer.errors import DataError, NotFoundError
from bootseer.objects.on_backend import ObjectStore


class _Bytes(Source):
    def __init__(self, data: bytes, turn: Callable[[], None]) -> None:
        self._data, self.size, self._turn = data, len(data), turn

    def read(self, offset: int, length: int) -> bytes:
        if offset + length > self.size:
            raise DataError("it ends before")
        return self._data[offset : offset + length]


class SteppedBackend(Backend):
    """``turn`` comes before each step. ``copies``: a rename is a copy, then a deletion, as object stores have it."""

    access = ("memory", "a test")
    exclusive = True

    def __init__(self, *, copies: bool = False) -> None:
        self.url = "memory"
        self.files: dict[str, tuple[bytes, float]] = {}
        self.now = 1e9
        self.copies = copies
        self.copying = 0
        """How many are between copy and deletion."""
        self.turn: Callable[[], None] = lambda: None

    def _file(self, path: str) -> tuple[bytes, float]:
        try:
            return self.files[path]
        except KeyError:
            raise NotFoundError(f"no file {path}") from None

    def stat(self, path: str) -> Entry:
        self.turn()
        data, mtime = self._file(path)
        return Entry(path.rpartition("/")[2], len(data), False, mtime)

    def is_there(self) -> bool:
        return True

    def list(self, path: str) -> list[Entry]:
        self.turn()
        found: dict[str, Entry] = {}
        for name, (data, mtime) in list(self.files.items()):
            if name.startswith(f"{path}/" if path else ""):
                first, _, rest = name.removeprefix(f"{path}/" if path else "").partition("/")
                found[first] = Entry(first, 0 if rest else len(data), bool(rest), mtime)
        return sorted(found.values())

    def open(self, path: str, *, pinned: bool = False) -> Source:
        self.turn()
        return _Bytes(self._file(path)[0], self.turn)

    def read_many(self, pieces: object) -> None:
        raise NotImplementedError

    def create(self, path: str, *, siblings: object = None, mode: int = FILE_MODE) -> Sink:
        raise NotImplementedError

    def put(self, path: str, data: bytes | Path, *, overwrite: bool) -> None:
        self.turn()
        if path in self.files and not overwrite:
            raise FileExistsError(errno.EEXIST, "it exists", path)
        self.files[path] = data if isinstance(data, bytes) else data.read_bytes(), self.now

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        self.turn()
        data, mtime = self._file(src)
        self.files[dst] = data, self.now if self.copies else mtime
        if self.copies:
            self.copying += 1
            try:
                self.turn()
            finally:
                self.copying -= 1
        self.files.pop(src, None)

    def delete(self, path: str) -> None:
        self.turn()
        self.files.pop(path, None)

    def make_folder(self, path: str) -> None:
        self.turn()

    def remove_folder(self, path: str, *, first: object = ()) -> None:
        raise NotImplementedError


class SteppedStore(ObjectStore):
    """A store in a `SteppedBackend`."""

    def __init__(self, *, copies: bool = False) -> None:
        self.place = SteppedBackend(copies=copies)
        super().__init__("memory", self.place)


class Killed(BaseException):
    """What ends an actor in the midst of something."""


class Stage:
    """Actors, threads of which one at a time goes on: at each step of the storage another one may."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._acting: dict[str, threading.Semaphore] = {}
        self._killed: set[str] = set()
        self._back = threading.Semaphore(0)
        self._mine = threading.local()
        self.errors: list[BaseException] = []

    def turn(self) -> None:
        """Called by actors; nothing happens elsewhere."""
        if (name := getattr(self._mine, "name", "")) == "":
            return
        self._back.release()
        self._acting[name].acquire()
        if name in self._killed:
            raise Killed

    def run(self, actors: dict[str, Callable[[], None]], between: Callable[[], None], kills: float) -> None:
        """Until all have ended. ``between`` the steps something else happens; ``kills``: how likely an actor is killed
        in each step, if its name begins with "gc" or "publish"."""

        def act(name: str, what: Callable[[], None]) -> None:
            self._mine.name = name
            self._acting[name].acquire()
            try:
                what()
            except Killed:
                pass
            except BaseException as exc:
                self.errors.append(exc)
            finally:
                del self._acting[name]
                self._back.release()

        threads = []
        for name, what in actors.items():
            self._acting[name] = threading.Semaphore(0)
            threads.append(threading.Thread(target=act, args=(name, what), daemon=True))
            threads[-1].start()
        current = ""
        while self._acting:
            names = sorted(self._acting)
            if current not in names or self._chance.random() < 0.3:
                current = self._chance.choice(names)
            if current.startswith(("gc", "publish")) and self._chance.random() < kills:
                self._killed.add(current)
            between()
            self._acting[current].release()
            if not self._back.acquire(timeout=60):
                raise TimeoutError(f"{current} does not go on")
        for thread in threads:
            thread.join(60)
