"""Programs in the kernel (bpf(2)), put together from instructions: no compiler is needed, and no library.

Only what `lookups` uses. Each call raises `OSError` with the call's errno; descriptors keep maps, programs and what
they are attached to, and nothing of them is left when the process has ended. Source: ``include/uapi/linux/bpf.h``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from typing import Self

_libc = ctypes.CDLL(None, use_errno=True)
_CALLS = {"x86_64": (321, 298), "aarch64": (280, 241)}
"""Numbers of bpf(2) and perf_event_open(2)."""
_CREATE, _LOOK_UP, _UPDATE, _DELETE, _LOAD, _RUN, _ATTACH_RAW = 0, 1, 2, 3, 5, 10, 17
HASH, ARRAY, SCRATCH, RING = 1, 2, 6, 27
"""Kinds of maps: a hash; numbers to values; the same for each processor; a queue that is read by `mmap`."""
TRACEPOINT, RAW_TRACEPOINT = 5, 17
"""Kinds of programs."""
GET, PUT, DROP, TASK, PROGRAM, READ_USER, READ_KERNEL, READ_USER_TEXT, SEND = 1, 2, 3, 14, 16, 112, 113, 114, 130
"""Helpers of the kernel, for `Code.call`."""
NO_WAKE = 1
"""For `SEND`: who waits for the queue is not woken."""
_LICENSE = b"Dual MIT/GPL"
_ATTRIBUTES = 144
"""Bytes; zeros behind what a kernel knows are allowed."""
_IOC_SET_BPF, _PERF_TRACEPOINT, _PERF_SIZE, _CLOSE_ON_EXEC = 0x40042408, 2, 128, 8


def _call(number: int, *arguments: object) -> int:
    calls = _CALLS.get(os.uname().machine)
    if calls is None:
        raise OSError(38, f"programs in the kernel are not known for {os.uname().machine}")
    if (result := _libc.syscall(calls[number], *arguments)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), ("bpf", "perf_event_open")[number])
    return int(result)


def _bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    buffer = ctypes.create_string_buffer(attributes.ljust(_ATTRIBUTES, b"\0"), _ATTRIBUTES)
    return _call(0, command, buffer, _ATTRIBUTES), buffer.raw


def create(kind: int, key: int, value: int, most: int) -> int:
    """A map: bytes of a key, and of a value."""
    return _bpf(_CREATE, struct.pack("=IIII", kind, key, value, most))[0]


def _entry(command: int, of: int, key: bytes, value: bytes = b"") -> bytes:
    held = [ctypes.create_string_buffer(data, max(len(data), 1)) for data in (key, value)]
    _bpf(command, struct.pack("=I4xQQQ", of, *map(ctypes.addressof, held), 0))
    return held[1].raw


def look_up(of: int, key: bytes, size: int) -> bytes:
    return _entry(_LOOK_UP, of, key, bytes(size))


def update(of: int, key: bytes, value: bytes) -> None:
    _entry(_UPDATE, of, key, value)


def delete(of: int, key: bytes) -> None:
    _entry(_DELETE, of, key)


def load(kind: int, code: Code) -> int:
    """A program, which the kernel has verified."""
    text = code.packed()
    held = [ctypes.create_string_buffer(data) for data in (text, _LICENSE)]
    return _bpf(_LOAD, struct.pack("=IIQQ", kind, len(text) // 8, *map(ctypes.addressof, held)))[0]


def run(program: int) -> int:
    """What a raw program returns to the calling thread, unsigned, 32 bits."""
    found: int = struct.unpack_from("=I", _bpf(_RUN, struct.pack("=I", program))[1], 4)[0]
    return found


def attach_raw(name: str, program: int) -> int:
    """A descriptor: the program runs at each raw tracepoint ``name`` while it is open."""
    text = ctypes.create_string_buffer(name.encode())
    return _bpf(_ATTACH_RAW, struct.pack("=QI", ctypes.addressof(text), program))[0]


def attach(event: int, program: int) -> int:
    """A descriptor: the program runs at each tracepoint whose number is ``event`` while it is open."""
    attributes = struct.pack("=IIQQ", _PERF_TRACEPOINT, _PERF_SIZE, event, 1).ljust(_PERF_SIZE, b"\0")
    everybody, first, no_group = ctypes.c_long(-1), ctypes.c_long(0), ctypes.c_long(-1)
    buffer = ctypes.create_string_buffer(attributes, _PERF_SIZE)
    fd = _call(1, buffer, everybody, first, no_group, ctypes.c_ulong(_CLOSE_ON_EXEC))
    try:
        fcntl.ioctl(fd, _IOC_SET_BPF, program)
    except OSError:
        os.close(fd)
        raise
    return fd


class Code:
    """Instructions. Registers are numbers: 0 has results, 1 to 5 arguments, which a call loses; 6 to 9 stay; 10 is the
    end of a stack of 512 bytes. Offsets of jumps are names of `label`."""

    def __init__(self) -> None:
        self._out: list[tuple[int, int, int, int, int]] = []
        self._jumps: dict[int, str] = {}
        self._labels: dict[str, int] = {}

    def _add(self, code: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> Self:
        self._out.append((code, to, source, offset, value))
        return self

    def _jump(self, code: int, register: int, label: str, value: int) -> Self:
        self._jumps[len(self._out)] = label
        return self._add(code, register, 0, 0, value)

    def label(self, name: str) -> Self:
        self._labels[name] = len(self._out)
        return self

    def copy(self, to: int, source: int) -> Self:
        return self._add(0xBF, to, source)

    def number(self, to: int, value: int) -> Self:
        return self._add(0xB7, to, value=value)

    def add(self, to: int, value: int) -> Self:
        return self._add(0x07, to, value=value)

    def plus(self, to: int, source: int) -> Self:
        return self._add(0x0F, to, source)

    def stack(self, to: int, offset: int) -> Self:
        """The address of what lies on the stack."""
        return self.copy(to, 10).add(to, offset)

    def upper(self, of: int) -> Self:
        """Only the upper half of a register stays."""
        return self._add(0x77, of, value=32)

    def get(self, to: int, source: int, offset: int, size: int = 8) -> Self:
        return self._add({1: 0x71, 2: 0x69, 4: 0x61, 8: 0x79}[size], to, source, offset)

    def put(self, to: int, offset: int, source: int, size: int = 8) -> Self:
        return self._add({4: 0x63, 8: 0x7B}[size], to, source, offset)

    def count(self, to: int, source: int) -> Self:
        """Adds to a number in memory, at once."""
        return self._add(0xDB, to, source)

    def map(self, to: int, fd: int) -> Self:
        return self._add(0x18, to, 1, value=fd)._add(0)

    def call(self, helper: int) -> Self:
        return self._add(0x85, value=helper)

    def if_is(self, register: int, value: int, label: str) -> Self:
        return self._jump(0x15, register, label, value)

    def if_not(self, register: int, value: int, label: str) -> Self:
        return self._jump(0x55, register, label, value)

    def if_more(self, register: int, value: int, label: str) -> Self:
        """As unsigned numbers."""
        return self._jump(0x25, register, label, value)

    def if_has(self, register: int, bits: int, label: str) -> Self:
        """Any of them."""
        return self._jump(0x45, register, label, bits)

    def go(self, label: str) -> Self:
        return self._jump(0x05, 0, label, 0)

    def end(self) -> Self:
        return self._add(0x95)

    def packed(self) -> bytes:
        parts = list[bytes]()
        for at, (code, to, source, offset, value) in enumerate(self._out):
            if at in self._jumps:
                offset = self._labels[self._jumps[at]] - at - 1
            parts.append(struct.pack("=BBhi", code, to | source << 4, offset, value))
        return b"".join(parts)
