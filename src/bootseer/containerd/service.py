"""The ten calls of containerd's snapshots service, each a coroutine that takes a message and returns one.

containerd makes some of them (Commit, Update) inside a transaction of its own database, and all of a snapshotter wait
for its garbage collection, which waits for the calls that run: so none may take long. What may, such as mounting a tree
while the store is away, is a task (`tasks`) that a call waits for with a deadline and without a thread; after that the
caller is told to try again, and the next call finds the task or its result."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from bootseer.containerd.images import Images, Match
from bootseer.containerd.proto import snapshots_pb2 as messages
from bootseer.containerd.snapshots import ExistsError, Kind, Layer, Snapshot, Snapshots
from bootseer.errors import BootseerError
from bootseer.rpc.tasks import Tasks, within

log = logging.getLogger(__name__)

REF = "containerd.io/snapshot.ref"
"""The label with the chain id that a pull wants to have."""
MANIFEST = "containerd.io/snapshot/cri.manifest-digest"
IMAGE = "containerd.io/snapshot/cri.image-ref"
_EXTRACT = "extract-"
"""How the keys of pulls begin. Those of containers do not: labels of theirs may come from the annotations of a pod."""
_ASK_SECONDS = 10.0
"""How long a pull waits for the store to say whether the image is converted."""
_IGNORED_SECONDS = 60.0
"""For how long an image counts as not converted after the store did not say."""
_LONGEST_SECONDS = 30.0
_PAGE = 100


class Service:
    """The calls. ``seconds``: how long one may wait for the files of an image; at most 30 are taken."""

    def __init__(self, snapshots: Snapshots, images: Images, seconds: float) -> None:
        self._snapshots, self._images, self._tasks = snapshots, images, Tasks()
        self._seconds = min(seconds, _LONGEST_SECONDS)
        self._ignored: dict[str, float] = {}
        self._index_off = Path("/sys/module/overlay/parameters/index").exists()

    async def prepare(self, request: messages.CreateRequest) -> messages.MountsResponse:
        """A writable snapshot. For a layer of a converted image `ExistsError`: containerd need not pull it."""
        layer = _layer(request)
        match = await self._match(layer) if layer else Match.NONE
        if layer is None or match is Match.NONE:
            return await self._create(request, Kind.ACTIVE)
        name = f"lazy/{secrets.token_hex(8)}/{layer.chain}"
        made = await asyncio.to_thread(self._snapshots.create_lazy, name, request.parent, dict(request.labels), layer)
        if match is Match.WHOLE:
            self._files(made)  # the first container finds it mounted
        raise ExistsError(f"layer {layer.chain} of {layer.image} is here, as {made.name}")

    async def view(self, request: messages.CreateRequest) -> messages.MountsResponse:
        return await self._create(request, Kind.VIEW)

    async def mounts(self, request: messages.KeyRequest) -> messages.MountsResponse:
        """How to mount one that `prepare` or `view` made."""
        found = await asyncio.to_thread(self._snapshots.get, request.key)
        return self._mounts(found, await self._lower(found.parent))

    async def _create(self, request: messages.CreateRequest, kind: Kind) -> messages.MountsResponse:
        lower = await self._lower(request.parent)  # before anything is made: it may fail, or be cancelled
        like = lower[0] if lower and kind == Kind.ACTIVE else None
        made = await asyncio.to_thread(
            self._snapshots.create, request.key, request.parent, kind, dict(request.labels), like
        )
        return self._mounts(made, lower)

    async def _match(self, layer: Layer) -> Match:
        """What the layer is of its image. When the store does not say that in time, the image is pulled."""
        if time.monotonic() < self._ignored.get(layer.manifest, 0.0):
            return Match.NONE
        try:
            task = self._tasks.start(("match", layer), lambda: self._images.match(layer))
            return await within(task, _ASK_SECONDS, f"the record of {layer.image}")
        except BootseerError as exc:
            log.warning("%s is pulled: %s", layer.image, exc)
            self._ignored = {key: until for key, until in self._ignored.items() if until > time.monotonic()}
            self._ignored[layer.manifest] = time.monotonic() + _IGNORED_SECONDS
            return Match.NONE

    async def _lower(self, name: str) -> list[Path]:
        """The folders of the snapshot ``name`` and of what is below it, topmost first; brought here if need be."""
        found = await asyncio.to_thread(self._snapshots.below, name)
        lower = [self._snapshots.files(item) for item in found if not item.layer]
        for item in found[-1:]:
            if item.layer:
                lower.append(await within(self._files(item), self._seconds, f"files of {item.layer.image}"))
        return lower

    def _files(self, snapshot: Snapshot) -> Future[Path]:
        return self._tasks.start(("files", snapshot.id), lambda: self._images.files(snapshot))

    def _mounts(self, snapshot: Snapshot, lower: Sequence[Path]) -> messages.MountsResponse:
        readonly, below = snapshot.kind == Kind.VIEW, [str(path) for path in lower]
        if not below or (readonly and len(below) == 1):
            source = below[0] if below else str(self._snapshots.files(snapshot))
            mount = messages.Mount(type="bind", source=source, options=["ro" if readonly else "rw", "rbind"])
            return messages.MountsResponse(mounts=[mount])
        options = ["index=off"] if self._index_off else []
        if not readonly:
            options += [f"workdir={self._snapshots.work(snapshot)}", f"upperdir={self._snapshots.files(snapshot)}"]
        options.append(f"lowerdir={':'.join(below)}")
        return messages.MountsResponse(mounts=[messages.Mount(type="overlay", source="overlay", options=options)])

    async def commit(self, request: messages.CommitRequest) -> messages.Empty:
        await asyncio.to_thread(self._snapshots.commit, request.key, request.name, dict(request.labels))
        return messages.Empty()

    async def remove(self, request: messages.KeyRequest) -> messages.Empty:
        await asyncio.to_thread(self._snapshots.remove, request.key)
        return messages.Empty()

    async def stat(self, request: messages.KeyRequest) -> messages.InfoResponse:
        return messages.InfoResponse(info=_info(await asyncio.to_thread(self._snapshots.get, request.key)))

    async def update(self, request: messages.UpdateRequest) -> messages.InfoResponse:
        info, paths = request.info, list(request.update_mask.paths)
        return messages.InfoResponse(
            info=_info(await asyncio.to_thread(self._snapshots.relabel, info.name, dict(info.labels), paths))
        )

    async def list(self, _: messages.ListRequest) -> AsyncIterator[messages.ListResponse]:
        """All: containerd filters what it gets."""
        found = await asyncio.to_thread(self._snapshots.listing)
        for at in range(0, len(found), _PAGE):
            yield messages.ListResponse(info=map(_info, found[at : at + _PAGE]))

    async def usage(self, request: messages.KeyRequest) -> messages.UsageResponse:
        found = await asyncio.to_thread(self._snapshots.get, request.key)
        size, inodes = await asyncio.to_thread(self._snapshots.usage, found)
        return messages.UsageResponse(size=size, inodes=inodes)

    async def cleanup(self, _: messages.KeyRequest) -> messages.Empty:
        """Delete the files of what was removed; trees go behind this, since a server may take its time to end."""
        await asyncio.to_thread(self._snapshots.collect)
        for digest in await asyncio.to_thread(self._images.unused):
            self._tasks.start(("release", digest), functools.partial(self._images.release, digest))
        return messages.Empty()


def _layer(request: messages.CreateRequest) -> Layer | None:
    """Which layer a pull wants to have; None where it does not say, and for containers."""
    chain, manifest, image = (request.labels.get(label, "") for label in (REF, MANIFEST, IMAGE))
    if not (chain and manifest and image) or not request.key.rpartition("/")[2].startswith(_EXTRACT):
        return None
    return Layer(chain, manifest, image)


def _info(snapshot: Snapshot) -> messages.Info:
    info = messages.Info(name=snapshot.name, parent=snapshot.parent, kind=snapshot.kind.name, labels=snapshot.labels)
    info.created_at.FromNanoseconds(snapshot.created)
    info.updated_at.FromNanoseconds(snapshot.updated)
    return info
