"""How a file of the store would be read now, and why: which access, which replicas, which DataNode how much."""

from __future__ import annotations

import msgspec

from bootseer.backends.engine import engine
from bootseer.backends.engine.datanodes import NodeLook
from bootseer.backends.engine.engine import Snapshot
from bootseer.backends.engine.model import Place
from bootseer.backends.engine.transport import BlockFile, replicas_of
from bootseer.backends.interface import Backend, Source, clean
from bootseer.errors import BootseerError, NotFoundError
from bootseer.stripefs.files.reader import read_pointer
from bootseer.stripefs.store import StripeFS


class BlockLook(msgspec.Struct, frozen=True, kw_only=True):
    """One block. ``replicas``: addresses of its DataNodes, as the NameNode orders them; ``bad``: those of them not to
    be asked, and why; ``planned``: bytes that each would give if the whole file was read now."""

    id: int
    length: int
    replicas: tuple[str, ...]
    bad: dict[str, str]
    planned: dict[str, int]


class StripeLook(msgspec.Struct, frozen=True, kw_only=True):
    """One stripe, or the whole of a plain file. ``access`` is ``direct``, ``native``, ``folder`` or ``fsspec``;
    ``problem``: why it cannot be opened, "" when it can. Only direct ones have ``blocks``."""

    index: int
    path: str
    size: int
    access: str
    problem: str
    blocks: tuple[BlockLook, ...]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """``hedge_seconds``: after how long a read of 1 MiB would be tried at another replica too; ``hedge_bytes``: how
    many bytes may be read twice now;
    both 0 where no DataNodes are read. ``seconds``: how long the whole file would take, None while no rate is known.
    """

    url: str
    path: str
    access: str
    reason: str
    size: int
    width: int
    unit: int
    stripes: tuple[StripeLook, ...]
    nodes: tuple[NodeLook, ...]
    hedge_seconds: float
    hedge_bytes: int
    seconds: float | None


def explain(fs: StripeFS, path: str) -> Explanation:
    """How the file at ``path`` would be read by this process now. Reads its pointer and asks where its blocks are.

    Rates, latencies and breakers are what this process has seen: a fresh one knows none.

    Raises `NotFoundError` for what is no file. A stripe that is missing is told in its ``problem``.
    """
    backend, path = fs.backend, clean(path)
    if backend.stat(path).is_dir:
        raise NotFoundError(f"{path} is a folder, not a file")
    access, reason = backend.access
    pointer = read_pointer(backend, path)
    names = [path] if pointer is None else [pointer.stripe_path(path, index) for index in range(pointer.width)]
    opened = [_open(backend, name) for name in names]
    files = [file for found, _ in opened if (file := _file_of(found)) is not None]
    view = engine.shared().look(files) if files else Snapshot({}, {}, None, 0.0, 0)
    stripes = tuple(
        _stripe(index, name, found, problem, access, view)
        for index, (name, (found, problem)) in enumerate(zip(names, opened, strict=True))
    )
    return Explanation(
        url=fs.url,
        path=path,
        access=access,
        reason=reason,
        size=pointer.size if pointer is not None else stripes[0].size,
        width=pointer.width if pointer is not None else 0,
        unit=pointer.unit if pointer is not None else 0,
        stripes=stripes,
        nodes=tuple(sorted(view.nodes.values(), key=lambda node: node.address)),
        hedge_seconds=view.hedge_seconds,
        hedge_bytes=view.hedge_bytes,
        seconds=view.seconds,
    )


def _file_of(source: Source | None) -> BlockFile | None:
    """What is read from DataNodes directly, as `bootseer.backends.hdfs_direct.DirectSource` is."""
    file = getattr(source, "file", None)
    return file if isinstance(file, BlockFile) else None


def _open(backend: Backend, path: str) -> tuple[Source | None, str]:
    try:
        return backend.open(path), ""
    except BootseerError as exc:
        return None, str(exc)


def _stripe(index: int, name: str, found: Source | None, problem: str, access: str, view: Snapshot) -> StripeLook:
    blocks: tuple[BlockLook, ...] = ()
    if (file := _file_of(found)) is not None:
        blocks = tuple(_block(place, view) for place in file.places)
    elif found is not None:
        found.close()
        access = "native" if access == "direct" else access
    size = found.size if found is not None else 0
    return StripeLook(index=index, path=name, size=size, access=access, problem=problem, blocks=blocks)


def _block(place: Place, view: Snapshot) -> BlockLook:
    block = replicas_of(place).located.block
    address = {key: view.nodes[key].address for key in place.keys}
    return BlockLook(
        id=block.id,
        length=block.length,
        replicas=tuple(address.values()),
        bad={address[key]: why.value for key, why in place.bad.items() if key in address},
        planned={address[key]: share for key, share in view.shares[place].items() if key in address},
    )
