"""gRPC on Unix sockets that only root can reach, until the process is told to end."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import socket as sockets
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # the processes that are started here have nothing to do with it

import grpc

from bootseer.errors import BootseerError, ConfigError, doing
from bootseer.folders import private_folder
from bootseer.kernel.parts import Part

log = logging.getLogger(__name__)

StatusCode = grpc.StatusCode

Call = Callable[[Any], Awaitable[Any]] | Callable[[Any], AsyncIterator[Any]]
"""Takes a message, and gives one, or several."""
Calls = Mapping[str, tuple[type[Any], Call]]
"""The calls of a service, each with the type of its message."""
Codes = Sequence[tuple[type[Exception], StatusCode]]
"""What errors are answered with; the first that fits."""

_STOP_SECONDS = 5.0
_THREADS = 16
_LONGEST = 2000
"""Characters of what is answered and logged: it may have what a pod asked for in it, and gRPC refuses 16 KiB."""


def serve(paths: Sequence[Path], services: Mapping[str, Calls], codes: Codes, part: Part) -> None:
    """Serve ``services`` at each of ``paths`` until SIGTERM or SIGINT, as ``part`` of a service. Sockets that killed
    processes left there are replaced. Raises `ConfigError` for another file, or a socket in use, and for folders that
    others can write to."""
    paths = [private_folder(path.parent) / path.name for path in paths]
    for path in paths:
        remove_dead(path)
    asyncio.run(_serve(paths, services, codes, part))


def remove_dead(path: Path) -> None:
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
    raise ConfigError(f"{path} is not free: it is in use, or no socket", hint="choose another place for it")


async def _serve(paths: Sequence[Path], services: Mapping[str, Calls], codes: Codes, part: Part) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "call"))
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    for name, calls in services.items():
        handlers = {call: _handler(call, *how, codes) for call, how in calls.items()}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])
    before = os.umask(0o177)
    try:
        for path in paths:
            server.add_insecure_port(f"unix:{path}")
    except RuntimeError as exc:
        raise BootseerError(f"cannot listen on {path}: {exc}") from None
    finally:
        os.umask(before)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await server.start()
    log.info("serving %s", paths[0])
    part.serves = True
    await ended.wait()
    await server.stop(_STOP_SECONDS)


def _handler(name: str, request: type[Any], call: Call, codes: Codes) -> grpc.RpcMethodHandler[Any, Any]:
    async def one(message: Any, context: Any) -> Any:
        try:
            return await call(message)  # type: ignore[misc]
        except Exception as exc:
            await _refuse(context, name, exc, codes)

    async def several(message: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for item in call(message):  # type: ignore[union-attr]
                yield item
        except Exception as exc:
            await _refuse(context, name, exc, codes)

    how = {"request_deserializer": request.FromString, "response_serializer": lambda answer: answer.SerializeToString()}
    if inspect.isasyncgenfunction(call):
        return grpc.unary_stream_rpc_method_handler(several, **how)
    return grpc.unary_unary_rpc_method_handler(one, **how)


async def _refuse(context: Any, name: str, exc: Exception, codes: Codes) -> None:
    """Answer with the code of ``exc``. What no user can have caused has its traceback in the log."""
    for kind, code in codes:
        if isinstance(exc, kind):
            expected = code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS)
            text = str(exc)[:_LONGEST]
            log.log(logging.DEBUG if expected else logging.WARNING, "%s: %s", name, text)
            await context.abort(code, f"bootseer: {text}")
    log.error("%s failed", name, exc_info=exc)
    await context.abort(grpc.StatusCode.UNKNOWN, f"bootseer: {name} failed: {type(exc).__name__}: {exc}")
