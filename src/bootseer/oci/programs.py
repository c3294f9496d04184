"""Programs that have logins: they are given some text, and print an answer."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence

from bootseer.closing import descriptor
from bootseer.errors import UnavailableError
from bootseer.kernel.child import watched

_MOST = 1 << 20
"""Bytes of an answer."""


def ask(
    what: str, argv: Sequence[str], text: bytes, seconds: float, env: Mapping[str, str] | None = None
) -> tuple[int, bytes, bytes]:
    """Run ``argv``, which is ``what``, with ``text``, less than a pipe takes; its exit code, its answer, and what else
    it says. What it starts and leaves behind, perhaps with its pipes, is not waited for. Raises `UnavailableError`."""
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env, bufsize=0) as process:
            try:
                return _answer(what, process, text, time.monotonic() + seconds)
            except TimeoutError:
                raise UnavailableError(f"{what} did not answer within {seconds:.0f} s") from None
            finally:
                process.kill()
    except OSError as exc:
        raise UnavailableError(f"{what} cannot run: {exc.strerror}") from None


def _answer(what: str, process: subprocess.Popen[bytes], text: bytes, until: float) -> tuple[int, bytes, bytes]:
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with contextlib.suppress(BrokenPipeError), process.stdin as file:
        file.write(text)
    out, said = process.stdout.fileno(), process.stderr.fileno()
    answer, waiting = {out: b"", said: b""}, select.poll()
    with descriptor(watched(process.pid)) as ended:
        for fd in (ended, out, said):  # so looked at in this order: who has ended has said all
            waiting.register(fd, select.POLLIN)
        while (ready := {fd for fd, _ in waiting.poll(max(0.0, until - time.monotonic()) * 1000)}) != {ended}:
            if not ready:
                raise TimeoutError
            for fd in ready - {ended}:
                if not (more := os.read(fd, _MOST + 1)):
                    waiting.unregister(fd)
                answer[fd] += more
                if len(answer[fd]) > _MOST:
                    raise UnavailableError(f"{what} answered more than {_MOST >> 20} MiB")
    return process.wait(), answer[out], answer[said]
