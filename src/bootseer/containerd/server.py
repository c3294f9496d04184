"""The process of the snapshotter: gRPC on a Unix socket that only root can reach, until it is told to end.

Mounts and block servers outlive it: containers go on, and the next one finds its state in the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import signal
import socket as sockets
import sqlite3
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # the processes that are started here have nothing to do with it

import grpc

from bootseer.config import Config
from bootseer.containerd.images import Images
from bootseer.containerd.proto import snapshots_pb2 as messages
from bootseer.containerd.service import Service
from bootseer.containerd.snapshots import ExistsError, MissingError, Snapshots, StateError
from bootseer.errors import BootseerError, ConfigError, FullError, PrivilegeError, UnavailableError, doing
from bootseer.private import private_folder

log = logging.getLogger(__name__)

_SERVICE = "containerd.services.snapshots.v1.Snapshots"
_STOP_SECONDS = 5.0
_THREADS = 16
_LOCK = "lock"
_CALLS: dict[str, type[Any]] = {
    "Prepare": messages.CreateRequest,
    "View": messages.CreateRequest,
    "Mounts": messages.KeyRequest,
    "Commit": messages.CommitRequest,
    "Remove": messages.KeyRequest,
    "Stat": messages.KeyRequest,
    "Update": messages.UpdateRequest,
    "Usage": messages.KeyRequest,
    "Cleanup": messages.KeyRequest,
}
_CODES = (
    (MissingError, grpc.StatusCode.NOT_FOUND),
    (ExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (StateError, grpc.StatusCode.FAILED_PRECONDITION),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (FullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (BootseerError, grpc.StatusCode.UNKNOWN),
)
"""containerd goes by the first three: no other error may look like one of them."""


def serve(root: Path, socket: Path, config: Config) -> None:
    """Serve snapshots in the folder ``root`` at ``socket`` until SIGTERM or SIGINT.

    Raises `PrivilegeError` without root, `ConfigError` for folders that others can write to and bad settings,
    `BootseerError` when another process serves this ``root`` or ``socket``.
    """
    if os.geteuid() != 0:
        raise PrivilegeError("the snapshotter needs root", hint="run it as a service of root")
    root = private_folder(root)
    if re.search(r"[,:\\\s]", str(root)):
        raise ConfigError(f"the folder {root} has a character that mounts cannot name", hint="choose another --root")
    with alone(root), contextlib.closing(Snapshots(root)) as snapshots:
        service = Service(snapshots, Images(snapshots, config), config.demand_deadline)
        socket = private_folder(socket.parent) / socket.name
        _remove_dead(socket)
        asyncio.run(_serve(service, socket))


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """In this context no other process serves ``root``. Raises `BootseerError` when one does."""
    with doing(f"use {root / _LOCK}"), open(root / _LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BootseerError(
                f"a snapshotter serves {root} already", hint="systemctl stop bootseer-containerd ends the service"
            ) from None
        yield


def _remove_dead(path: Path) -> None:
    """Remove the socket of a process that was killed; nothing else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISSOCK(found.st_mode):
        with sockets.socket(sockets.AF_UNIX) as probe, doing(f"use the socket {path}"):
            probe.settimeout(5.0)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                return
    raise ConfigError(f"{path} is not free: it is in use, or no socket", hint="choose another --socket")


async def _serve(service: Service, socket: Path) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "call"))
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, _handlers(service))])
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{socket}")
    except RuntimeError as exc:
        raise BootseerError(f"cannot listen on {socket}: {exc}") from None
    finally:
        os.umask(before)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await server.start()
    log.info("serving %s", socket)
    await ended.wait()
    await server.stop(_STOP_SECONDS)


def _handlers(service: Service) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            _unary(name, getattr(service, name.lower())),
            request_deserializer=request.FromString,
            response_serializer=_bytes,
        )
        for name, request in _CALLS.items()
    }
    handlers["List"] = grpc.unary_stream_rpc_method_handler(
        _stream(service), request_deserializer=messages.ListRequest.FromString, response_serializer=_bytes
    )
    return handlers


def _bytes(message: Any) -> bytes:
    found: bytes = message.SerializeToString()
    return found


def _unary(name: str, call: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def handler(request: Any, context: Any) -> Any:
        try:
            return await call(request)
        except Exception as exc:
            await _refuse(context, name, exc)

    return handler


def _stream(service: Service) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def handler(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for item in service.list(request):
                yield item
        except Exception as exc:
            await _refuse(context, "List", exc)

    return handler


async def _refuse(context: Any, name: str, exc: Exception) -> None:
    """Answer with the code of ``exc``. What no user can have caused has its traceback in the log."""
    for kind, code in _CODES:
        if isinstance(exc, kind):
            expected = code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS)
            log.log(logging.DEBUG if expected else logging.WARNING, "%s: %s", name, exc)
            await context.abort(code, f"bootseer: {exc}")
    log.error("%s failed", name, exc_info=exc)
    what = "its database" if isinstance(exc, sqlite3.Error) else type(exc).__name__
    await context.abort(grpc.StatusCode.UNKNOWN, f"bootseer: {name} failed: {what}: {exc}")
