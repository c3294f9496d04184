"""Which paths a command looks for, by programs in the kernel: those that are not there would change what it does, were
they there, and those that are, were they not.

At the end of each call that takes a path (open, stat, access, readlink, execve, chdir and their kin), when the path was
there (a result, or EACCES) or not (ENOENT, ENOTDIR), its text is handed over if the caller is a child of the observed
thread, or of such a child, and another process; but for those that are there below `_SYSTEM`. Of a program that starts
this is not known. So are changes of the working folder, by which relative paths are understood, and folders that were
made, and that it goes into other mounts (unshare, setns, clone). Paths that are relative to a descriptor are not
followed: who walks a tree by descriptors has listed it. Numbers of processes are the kernel's here, not a container's.
Calls of 32-bit programs and by io_uring are not seen, and in a chroot paths are not what they seem. Needs root, Linux
5.11 and a kernel that allows programs (not ``lockdown=confidentiality``). Concurrency: one thread reads from `begin` to
`end`."""

from __future__ import annotations

import errno
import mmap
import os
import re
import select
import struct
import sys
import threading
import time

from bootseer.closing import descriptor
from bootseer.kernel import bpf, libc

_CALLS: dict[str, tuple[int, int, dict[int, tuple[int, int, int]]]] = {}
"""Machine -> where a call's number lies among the registers that the kernel keeps, how many bytes it has, and, by that
number, where the path and the folder's descriptor lie (0: none), and what it is."""
_LOOKS, _MAKES, _ENTERS, _ENTERS_BY_DESCRIPTOR, _FORKS, _OPENS, _FINDS, _LEAVES, _CLONES = 1, 2, 3, 4, 5, 6, 7, 8, 9
_SYSTEM = ("/usr", ("/lib", "/sha", "/inc"))
"""How names begin, and go on, that are there on each node: most that are looked for."""
_AT_FOLDER, _HEAD, _PATH = -100, struct.Struct("=iiq16s"), 4096
_REMOVES = (b"rm", b"rmdir")
"""Programs to which it is the same whether something is there."""
_LIST_FIRST = (b"make", b"gmake")
"""Programs that list a folder when they want one file in it."""
_ABSENT = (-errno.ENOENT, -errno.ENOTDIR)
_SIZE, _PROCESSES, _NUMBERS = 32 << 20, 1 << 16, 512
"""Bytes of the queue, about 300,000 paths; processes at once; numbers of calls."""
_MOST, _ROOM, _EACH = 1_000_000, 384 << 20, 64
"""Paths that are known again; bytes of all that are kept, each with what a set needs for it."""
_JOIN_SECONDS = 60.0
_PAUSE = 0.05
"""Seconds between two looks at the queue. To be woken for each path would take the command longer than its calls."""
_BUSY, _DISCARDED = 1 << 31, 1 << 30


def _calls() -> None:
    di, si, looks, makes = 112, 104, _LOOKS, _MAKES  # struct pt_regs of x86_64
    one = dict.fromkeys((4, 6, 21, 89, 59), (di, 0, looks))  # stat lstat access readlink execve
    two = dict.fromkeys((262, 267, 269, 322, 332, 439), (si, di, looks))  # newfstatat .. statx faccessat2
    two |= dict.fromkeys((257, 437), (si, di, _OPENS))  # openat openat2
    enter = {2: (di, 0, _OPENS), 80: (di, 0, _ENTERS), 81: (di, 0, _ENTERS_BY_DESCRIPTOR)}
    enter |= {56: (di, di, _LEAVES), 272: (di, di, _LEAVES), 308: (si, si, _LEAVES)}  # clone unshare setns: their flags
    enter[435] = di, di, _CLONES  # clone3: where its flags are
    _CALLS["x86_64"] = 120, 8, {**one, **two, **enter, 83: (di, 0, makes), 258: (si, di, makes)}
    first, second = 272, 8  # struct pt_regs of arm64: the first argument is kept apart, as its place takes the result
    two = dict.fromkeys((79, 78, 48, 281, 291, 439), (second, first, looks))
    two |= dict.fromkeys((56, 437), (second, first, _OPENS))
    enter = {49: (first, 0, _ENTERS), 50: (first, 0, _ENTERS_BY_DESCRIPTOR)}
    enter |= {220: (first, first, _LEAVES), 97: (first, first, _LEAVES), 268: (second, second, _LEAVES)}
    enter[435] = first, first, _CLONES
    _CALLS["aarch64"] = 280, 4, {**two, **enter, 221: (first, 0, looks), 34: (second, first, makes)}


_calls()


class Lookups:
    """Notes, between `begin` and `end`, in ``absent`` the paths (absolute, normal) that children of the calling thread
    looked for in vain, in ``found`` those that they looked at (``opened``: opened) and that were there, but for what is
    below the folders ``ignored`` (each with a ``/`` at its end) and in a folder that they had made, and in ``made`` the
    folders that they made."""

    def __init__(self, ignored: tuple[str, ...] = ()) -> None:
        self._ignored = ignored
        self.absent: set[str] = set()
        self.found: set[str] = set()
        self.opened: set[str] = set()
        self.wanted: set[str] = set()
        """Of those `_LIST_FIRST` looked at."""
        self.made: set[str] = set()
        self.failure = ""
        """By which accident ``absent`` is not whole; empty when by none."""
        self._fds: list[int] = []
        self._attached: list[int] = []
        self.left = ""
        """How it went where opens are not seen; empty when it did not."""
        self._room = _ROOM
        self._known: set[int] = set()
        self._folders: dict[int, str] = {}
        """Where each process works, as far as it is known."""
        self._begun: dict[int, str] = {}
        """Where it began."""
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Raises `OSError` when it is not possible; nothing has changed then."""
        try:
            me = bpf.run(self._kept(bpf.load(bpf.RAW_TRACEPOINT, bpf.Code().call(bpf.TASK).end())))
            own = bpf.run(self._kept(bpf.load(bpf.RAW_TRACEPOINT, bpf.Code().call(bpf.TASK).upper(0).end())))
            self._attach(own)
            self._folders[own] = os.getcwd()
            self._wake = self._kept(os.eventfd(0))
            self._done = mmap.mmap(self._ring, mmap.PAGESIZE, offset=0)
            size = mmap.PAGESIZE + 2 * _SIZE
            self._queue = mmap.mmap(self._ring, size, prot=mmap.PROT_READ, offset=mmap.PAGESIZE)
            bpf.update(self._members, struct.pack("=I", me), b"\1")
            self._thread = threading.Thread(target=self._watch, name="env-lookups", daemon=True)
            self._thread.start()
        except (OSError, RuntimeError, ValueError) as exc:
            self._thread = None
            self.end()
            raise exc if isinstance(exc, OSError) else OSError(errno.EAGAIN, str(exc)) from exc

    def end(self) -> None:
        """May be called twice. The kernel takes tens of milliseconds to let go of the programs: in a thread."""
        if self._thread:
            if not self.failure and bpf.look_up(self._dropped, bytes(4), 8) != bytes(8):
                self.failure = "a lookup was lost: there were too many at once"
            os.eventfd_write(self._wake, 1)
            self._thread.join(_JOIN_SECONDS)
            if self._thread.is_alive():
                self.failure = "what the command looked for could not be read to the end"
                attached, self._attached = self._attached, []
                _close(attached)
                return  # the thread still uses the descriptors
            self._thread = None
            self._done.close()
            self._queue.close()
        fds, self._attached, self._fds = [*self._attached, *reversed(self._fds)], [], []
        try:
            threading.Thread(target=_close, args=[fds], name="env-lookups-end").start()
        except RuntimeError:
            _close(fds)

    def _kept(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _attach(self, process: int) -> None:
        machine = os.uname().machine
        if machine not in _CALLS:
            raise OSError(errno.ENOSYS, f"the calls of {machine} are not known")
        number_at, number_size, calls = _CALLS[machine]
        self._members = self._kept(bpf.create(bpf.HASH, 4, 1, _PROCESSES))
        self._ring = self._kept(bpf.create(bpf.RING, 0, 0, _SIZE))
        self._dropped = self._kept(bpf.create(bpf.ARRAY, 4, 8, 1))
        table = self._kept(bpf.create(bpf.ARRAY, 4, 8, _NUMBERS))
        scratch = self._kept(bpf.create(bpf.SCRATCH, 4, _HEAD.size + _PATH, 1))
        for number, (path, folder, what) in calls.items():
            bpf.update(table, struct.pack("=I", number), struct.pack("=HHI", path, folder, what))
        event, parent, child = _fork_event()
        for name, code in (
            ("sys_exit", self._ends(process, number_at, number_size, table, scratch)),
            ("sched_process_exec", self._execs()),
            ("sched_process_exit", _keyed(bpf.Code().call(bpf.TASK), self._members, bpf.DROP).number(0, 0).end()),
        ):
            self._attached.append(bpf.attach_raw(name, self._kept(bpf.load(bpf.RAW_TRACEPOINT, code))))
        self._attached.append(bpf.attach(event, self._kept(bpf.load(bpf.TRACEPOINT, self._forks(parent, child)))))

    def _ends(self, process: int, number_at: int, number_size: int, table: int, scratch: int) -> bpf.Code:
        """At the end of each call, but of this ``process``: register 6 has the caller's registers, 7 the result, 8 the
        caller, 9 the record."""
        code = bpf.Code().get(6, 1, 0).get(7, 1, 8)
        for result in (*_ABSENT, -errno.EACCES):
            code.if_is(7, result, "wanted")
        code.if_more(7, 0x7FFFFFFF, "out").label("wanted").call(bpf.TASK).copy(8, 0).upper(8).if_is(8, process, "out")
        _keyed(code, self._members, bpf.GET).if_is(0, 0, "out")
        code.number(1, 0).put(10, -16, 1)
        code.stack(1, -16).number(2, number_size).copy(3, 6).add(3, number_at).call(bpf.READ_KERNEL)
        code.stack(2, -16).map(1, table).call(bpf.GET).if_is(0, 0, "out").get(1, 0, 0).put(10, -24, 1)
        code.get(1, 10, -20, 4).if_is(1, 0, "out").if_is(1, _LOOKS, "look").if_is(1, _OPENS, "look")
        code.if_not(1, _CLONES, "other").if_is(7, 0, "out").go("send").label("other")  # a child may share its memory
        code.if_is(7, 0, "send").if_not(1, _ENTERS, "out").number(1, _LOOKS)
        code.label("look").copy(2, 1).number(1, _LOOKS).if_is(7, _ABSENT[0], "kind").if_is(7, _ABSENT[1], "kind")
        code.number(1, _FINDS).if_is(2, _LOOKS, "kind").number(1, _OPENS).label("kind").put(10, -20, 1, 4).label("send")
        code.number(1, 0).put(10, -32, 1, 4).stack(2, -32).map(1, scratch).call(bpf.GET).if_is(0, 0, "out").copy(9, 0)
        code.put(9, 0, 8, 4).get(1, 10, -20, 4).put(9, 4, 1, 4)
        code.number(1, _AT_FOLDER).put(10, -40, 1).get(4, 10, -22, 2).if_is(4, 0, "here")
        code.stack(1, -40).number(2, 8).copy(3, 6).plus(3, 4).call(bpf.READ_KERNEL)
        code.get(1, 10, -20, 4).if_not(1, _CLONES, "here").number(1, _LEAVES).put(9, 4, 1, 4)
        code.stack(1, -40).number(2, 8).get(3, 10, -40).call(bpf.READ_USER)
        code.get(1, 10, -40).if_has(1, libc.CLONE_NEWNS, "here").go("out")
        code.label("here").get(1, 10, -40).put(9, 8, 1)
        code.copy(1, 9).add(1, 16).number(2, 16).call(bpf.PROGRAM)
        code.stack(1, -48).number(2, 8).copy(3, 6).get(4, 10, -24, 2).plus(3, 4).call(bpf.READ_KERNEL)
        code.get(3, 10, -48).copy(1, 9).add(1, _HEAD.size).number(2, _PATH).call(bpf.READ_USER_TEXT)
        code.if_more(0, _PATH, "none").go("whole").label("none").number(0, 0).label("whole")
        code.get(1, 9, 4, 4).if_is(1, _LOOKS, "at").if_is(1, _FINDS, "at").if_not(1, _OPENS, "by")
        code.label("at").get(1, 9, 8, 4).if_more(1, 0x7FFFFFFF, "by")  # else by a folder's descriptor: not known where
        code.get(1, 9, _HEAD.size, 1).if_not(1, ord("/"), "out").label("by")
        code.get(1, 9, 4, 4).if_is(1, _OPENS, "found").if_not(1, _FINDS, "kept")
        code.label("found").if_more(0, 1, "named").go("out").label("named")  # fstat, and execve, whose text has gone
        code.get(1, 9, _HEAD.size, 4).if_not(1, _word(_SYSTEM[0]), "kept").get(1, 9, _HEAD.size + 4, 4)
        for part in _SYSTEM[1]:
            code.if_is(1, _word(part), "out")
        code.label("kept")
        return self._send(code.copy(3, 0).add(3, _HEAD.size).copy(2, 9))

    def _forks(self, parent: int, child: int) -> bpf.Code:
        """At each fork; the record has the parent and the child."""
        code = bpf.Code().copy(6, 1).get(0, 6, parent, 4)
        _keyed(code, self._members, bpf.GET).if_is(0, 0, "out")
        code.get(7, 6, child, 4).put(10, -8, 7, 4).number(1, 1).put(10, -16, 1)
        code.stack(2, -8).stack(3, -16).number(4, 0).map(1, self._members).call(bpf.PUT).if_not(0, 0, "lost")
        code.call(bpf.TASK).upper(0).put(10, -48, 0, 4).number(1, _FORKS).put(10, -44, 1, 4).put(10, -40, 7)
        code.number(1, 0).put(10, -32, 1).put(10, -24, 1)
        return self._send(code.stack(2, -48).number(3, _HEAD.size))

    def _execs(self) -> bpf.Code:
        """At each execve: a thread that is not the first one takes the number of that, which has ended."""
        code = _keyed(bpf.Code().get(0, 1, 8), self._members, bpf.GET).if_is(0, 0, "out")
        code.stack(2, -4).map(1, self._members).call(bpf.DROP).call(bpf.TASK).put(10, -8, 0, 4)
        code.number(1, 1).put(10, -16, 1).stack(2, -8).stack(3, -16).number(4, 0).map(1, self._members).call(bpf.PUT)
        return code.label("out").number(0, 0).end()

    def _send(self, code: bpf.Code) -> bpf.Code:
        """Register 2 has where the record begins, 3 its bytes."""
        code.map(1, self._ring).number(4, bpf.NO_WAKE).call(bpf.SEND).if_is(0, 0, "out").label("lost")
        code.number(1, 0).put(10, -56, 1, 4).stack(2, -56).map(1, self._dropped).call(bpf.GET).if_is(0, 0, "out")
        return code.number(1, 1).count(0, 1).label("out").number(0, 0).end()

    def _watch(self) -> None:
        try:
            (poll := select.poll()).register(self._wake, select.POLLIN)  # select(2) takes no number above 1023
            while not poll.poll(_PAUSE * 1000):
                self._read(self._written())
            until, end = self._written(), time.monotonic() + _JOIN_SECONDS / 2  # what it left behind may go on for ever
            while not self._read(until):  # one of these is just writing
                if time.monotonic() > end:
                    raise TimeoutError("it is not written to its end")
                time.sleep(0.001)
        except Exception as exc:  # whatever it is, ``absent`` is not whole
            self.failure = f"a lookup was lost: {exc}"

    def _written(self) -> int:
        written: int = struct.unpack_from("=Q", self._queue)[0]
        return written

    def _read(self, until: int) -> bool:
        """Whether all was read up to there."""
        at: int = struct.unpack_from("=Q", self._done)[0]
        while at < until:
            begin = mmap.PAGESIZE + (at & (_SIZE - 1))
            length: int = struct.unpack_from("=I", self._queue, begin)[0]
            if length & _BUSY:
                return False  # the next look finds it
            size = length & ~_DISCARDED
            if not length & _DISCARDED:
                self._take(self._queue[begin + 8 : begin + 8 + size])
            at += size + 8 + 7 & ~7
            struct.pack_into("=Q", self._done, 0, at)
        return True

    def _take(self, record: bytes) -> None:
        thread, what, folder, program = _HEAD.unpack_from(record)
        text, here = record[_HEAD.size :].partition(b"\0")[0], self._folders.get(thread, "")
        if what in (_LOOKS, _FINDS, _OPENS):  # most are looked for again and again
            known = hash((record[4:8], record[16:], "" if text.startswith(b"/") else f"{folder} {here}"))
            if known in self._known:
                return
            if len(self._known) >= _MOST:  # each name of a program counts anew, and may be any
                self._known.clear()
            self._known.add(known)
        if what == _LEAVES:  # a namespace of any kind, or one of mounts
            self.left = "it went into other mounts" if not folder or folder & libc.CLONE_NEWNS else self.left
            return
        if what == _FORKS:
            self._folders[folder] = self._begun[folder] = here
            return
        path = self._path(thread, os.fsdecode(text), (folder & 0xFFFFFFFF) - (folder >> 31 & 1) * (1 << 32))
        if what in (_ENTERS, _ENTERS_BY_DESCRIPTOR):
            back = self._begun.get(thread, "")  # most go back by a descriptor, as `find -exec`
            self._folders[thread] = path if what == _ENTERS else back
        if not path or what == _ENTERS_BY_DESCRIPTOR or program.rstrip(b"\0") in _REMOVES:
            return
        kept = {_MAKES: self.made, _LOOKS: self.absent, _OPENS: self.opened}.get(what, self.found)
        if what not in (_MAKES, _LOOKS):
            if path.startswith(self._ignored) or os.path.dirname(path) in self.made:
                return
            if what == _FINDS and program.rstrip(b"\0") in _LIST_FIRST:
                self.wanted.add(path)
        if path not in kept:
            kept.add(path)
            self._room -= sys.getsizeof(path) + _EACH
            if self._room < 0:
                raise OverflowError(f"the names take more than {_ROOM >> 20} MiB")

    def _path(self, thread: int, name: str, folder: int) -> str:
        """Empty when it is not known, as where a text was no longer readable."""
        if not name.startswith("/") and (folder != _AT_FOLDER or not self._folders.get(thread)):
            return ""
        whole = os.path.join(self._folders.get(thread) or "/", name)
        if ".." in name:  # of a link's other end
            whole = os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))
        return os.path.normpath(whole) if name else ""


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _keyed(code: bpf.Code, of: int, helper: int) -> bpf.Code:
    """Calls ``helper`` for the entry of a map whose key is the lower half of register 0."""
    return code.put(10, -4, 0, 4).stack(2, -4).map(1, of).call(helper)


def _word(text: str) -> int:
    """Four characters, as a program compares them."""
    return int.from_bytes(text.encode(), sys.byteorder)


def _fork_event() -> tuple[int, int, int]:
    """The number of the tracepoint of forks, and where its record has the parent's and the child's number."""
    try:
        folder = os.open("/sys/kernel/tracing/events/..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # a new mount takes away the options of one that is there
        folder = libc.unnamed_mount("tracefs")
    texts = list[str]()
    with descriptor(folder):
        for name in ("id", "format"):
            place = f"events/sched/sched_process_fork/{name}"
            with open(place, opener=lambda path, flags: os.open(path, flags, dir_fd=folder)) as file:
                texts.append(file.read())
    found = {name: re.search(rf"{name};\s*offset:(\d+)", texts[1]) for name in ("parent_pid", "child_pid")}
    places = [int(one[1]) for one in found.values() if one]
    if len(places) != len(found):
        raise OSError(errno.ENOSYS, "the kernel's tracepoint of forks has another form")
    return int(texts[0]), places[0], places[1]
