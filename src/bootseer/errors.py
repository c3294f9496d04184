"""Errors a user can meet: one line that says what failed, on what, and what to do, with a documented exit code: those
of BSD ``sysexits.h``, which training commands usually do not return. The table in ``docs/reference/exit-codes.md`` is
checked against this module by a test."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable, Iterator
from typing import ClassVar


class BootseerError(Exception):
    """Base of every error bootseer raises on purpose. ``message`` says what failed and on what; ``hint`` (optional)
    what to do about it; neither with a full stop. The command line prints ``bootseer: <message>; <hint>`` and exits
    with ``exit_code``."""

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class DataError(BootseerError):
    """Bytes that are not what they must be: truncated layer, flipped bit, checkpoint without COMMIT, image without the
    signature that is required."""

    exit_code = 65


class NotFoundError(BootseerError):
    """A named thing does not exist: image reference, checkpoint, store key, job."""

    exit_code = 66


class UnavailableError(BootseerError):
    """A server did not answer within its deadline, or refused the connection. ``retry_after``: seconds after which it
    asked to be asked again, if it said so."""

    exit_code = 69

    def __init__(self, message: str, *, hint: str = "", retry_after: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class UnsupportedError(BootseerError):
    """This machine lacks something: FUSE, EROFS, a container runtime, a tool."""

    exit_code = 71


class NotWritableError(BootseerError):
    """A store or a folder cannot be written to."""

    exit_code = 73


class ReplacedError(NotWritableError):
    """Another writer replaced the file that was to be replaced, or made the one that was to be made."""


class FullError(BootseerError):
    """No space left in a store or cache."""

    exit_code = 74


class PrivilegeError(BootseerError):
    """The operation needs root or a capability this process does not hold."""

    exit_code = 77


class ConfigError(BootseerError):
    """A configuration file, key or value that is not understood."""

    exit_code = 78


class NameTooLongError(ConfigError):
    """A name, or a whole path, has more bytes than the storage takes."""


def from_os_error(exc: OSError, doing: str) -> BootseerError:
    """Translate an ``OSError`` met while ``doing`` (a phrase such as ``"write store /data"``) into one line."""
    text = f"cannot {doing}: {exc.strerror or exc}"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return FullError(text, hint="free some space there and run again")
    if exc.errno in (errno.EACCES, errno.EPERM):
        return NotWritableError(text, hint="check its owner and mode, or choose another place")
    if exc.errno == errno.EBUSY:
        return NotWritableError(text, hint="end what uses it, or unmount it")
    if exc.errno == errno.EROFS:
        return NotWritableError(text, hint="it is on a read-only file system; choose another place")
    if exc.errno == errno.EISDIR:
        return NotWritableError(text, hint="name a file, not a folder")
    if exc.errno == errno.EEXIST:
        return NotWritableError(text, hint="something else has this name: choose another one")
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFoundError(text)
    if exc.errno in (
        errno.ECONNREFUSED,
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ECONNRESET,
        errno.ESTALE,
        errno.EHOSTDOWN,
        errno.ENOTCONN,  # a FUSE mount whose server has gone
        errno.ESHUTDOWN,
    ):
        return UnavailableError(text, hint="check that the server runs and is reachable from here")
    return BootseerError(text)


def from_exit_code(code: int, message: str, *, hint: str = "") -> BootseerError:
    """The error of this module with exit code ``code``, as another process met it; `BootseerError` for other codes."""
    kinds = {kind.exit_code: kind for kind in BootseerError.__subclasses__() if kind.__module__ == __name__}
    return kinds.get(code, BootseerError)(message, hint=hint)


@contextlib.contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """An import inside that fails without the extra ``name``, which ``what`` needs, is an `UnsupportedError`."""
    try:
        yield
    except ImportError as exc:
        raise UnsupportedError(f"{what} needs more packages: {exc}", hint=f"pip install 'bootseer[{name}]'") from None


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """What `from_os_error` makes of an ``OSError`` inside."""
    try:
        yield
    except OSError as exc:
        raise from_os_error(exc, what) from exc


class logged:
    """An error of ``kinds`` inside ends the block, and becomes a line of ``log`` after ``what`` with its ``args``."""

    def __init__(
        self,
        log: Callable[..., None],
        what: str,
        *args: object,
        kinds: type[Exception] | tuple[type[Exception], ...] = (BootseerError, OSError),
    ) -> None:
        self._say, self._kinds = functools.partial(log, f"{what}: %s", *args), kinds

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> bool:
        if not isinstance(exc, self._kinds):
            return False
        self._say(exc)
        return True
