"""Conversion of an image to a lazy tree in a store, once per digest. Layers stream: registry or layout -> inflate ->
tar members -> EROFS writer -> blocks -> packs -> store; nothing is unpacked on the way. Concurrency: the caller's
thread applies members; threads of `oci.pipeline` bring their bytes, those of `blocks.publish.packs` take the data."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bootseer import erofs, faults, oci
from bootseer.blocks.fetch.predict import START_SECONDS, predict_profiles
from bootseer.blocks.publish.dedup import MAX_TREES, KnownBlocks
from bootseer.blocks.publish.spool import FOLDER_BYTES
from bootseer.blocks.publish.tree import TreeWriter
from bootseer.chunks.blockmap import DEFAULT_BLOCK
from bootseer.chunks.manifest import tree_key
from bootseer.errors import BootseerError, ConfigError, NotFoundError, doing
from bootseer.folders import adopted, clear, make, owned_folder, remove, settled
from bootseer.image import record as records
from bootseer.image.record import ImageRecord
from bootseer.objects import Store, lease, open_store, signature
from bootseer.objects.signature import UnsignedError
from bootseer.oci.image import past_mirrors
from bootseer.oci.layers import LayeredTree
from bootseer.oci.pipeline import Layers, Progress

log = logging.getLogger(__name__)

_WORK = "bootseer-convert-"


class Ensured(NamedTuple):
    """A converted image. ``fresh``: this call converted it."""

    record: ImageRecord
    fresh: bool


def ensure(
    ref: oci.Reference | str,
    store_url: str,
    *,
    work_dir: Path,
    progress: Progress | None = None,
    platform: str = "",
    plain_http: bool | None = None,
    repair: bool = False,
    sign_key: Path | None = None,
    wait: float | None = None,
) -> Ensured:
    """Convert ``ref`` into the store, unless that image has been converted before and its tree is still there.

    ``platform`` (``os/architecture[/variant]``; default: this machine's): for which machines; those find it by that.
    Uses up to the image's compressed size (and that of an archive which is compressed itself, decompressed) and 2 GiB
    more under ``work_dir`` while it runs, and leaves nothing there. The same layers give the same tree, but for blocks
    that other images in the store have already: those are referred to. ``repair`` converts it again, and shares
    nothing. ``sign_key``: the private key to sign the record with; a record that is not signed with it may be
    anybody's, and is replaced by that of another conversion. ``wait``: seconds to wait at most for another node that
    converts the image; None: do not wait, and let nobody wait for this node.

    Raises `NotFoundError`, `UnavailableError`, `DataError` (naming the layer), `FullError`, `NotWritableError`,
    `ConfigError` for what is no key, and, after two failures on nodes that it waited for, the last one's."""
    key = signature.signing_key(sign_key) if sign_key else None
    keys = [key.public_key()] if key else []
    store = open_store(store_url)
    with doing(f"work in {work_dir}"):
        make(work_dir)
    with oci.open_image(ref, platform=platform, plain_http=plain_http, spool=work_dir) as image:
        name = records.key_of(image.digest, image.platform)
        before: ImageRecord | None = None
        useless: bytes | None = None  # a record that another conversion is to replace

        def look() -> bool:
            nonlocal before, useless
            before = useless = None
            try:
                data = store.get(name, most=records.MAX_STORED)
            except NotFoundError:
                return False
            try:
                found = records.read(data, image.digest, image.platform, keys, where=f"in store {store.shown}")
            except UnsignedError as exc:
                log.warning("%s; converting again", exc.message)
            else:
                if store.exists(tree_key(found.tree)):
                    before = records.with_origin(store, found, data, image.ref, key, lambda: _read_all(image))
                    return True
                log.warning("tree %s of %s is missing in store %s; converting again", found.tree, ref, store.shown)
            useless = data
            return False

        def convert_now() -> Ensured:
            with work_folder(work_dir) as work:
                with store.batch(subject=image.descriptor):
                    result, kin = _convert(image, store, work, progress, repair)
                    faults.point("image.convert.before-record")
                    if not records.save(store, result, overwrite=repair, old=useless, key=key):
                        log.info("another conversion of %s was first", image.ref)
                        return Ensured(records.load(store, image.digest, image.platform, keys), False)
                seconds = math.inf if wait is None else START_SECONDS  # a start goes on behind this
                predict_profiles(store, result.tree, kin, work=work, subject=image.descriptor, seconds=seconds)
            return Ensured(result, True)

        turn = lease.Turn()
        if not repair and not look() and wait is not None:
            turn = lease.take_turn(
                store, name.removesuffix(".json"), work=f"converts {image.ref}", seconds=wait, settled=look
            )
        if before:
            return Ensured(before, False)
        with turn.lead or contextlib.nullcontext():
            try:
                return past_mirrors(image.source, convert_now)
            except (BootseerError, OSError) as exc:
                if turn.lead:
                    turn.lead.failed(str(exc))
                raise


def _convert(
    image: oci.Image, store: Store, work: Path, progress: Progress | None, repair: bool
) -> tuple[ImageRecord, list[str]]:
    """The record, and the trees that are likely to share blocks with this one, the likeliest first."""
    began = time.monotonic()
    layer_bytes = sum(layer.size for layer in image.layers)
    # Packs take about what compressed layers do, and never more than 2 GiB at a time.
    with Layers(image, work, more=min(FOLDER_BYTES, layer_bytes), progress=progress) as layers:
        kin = [] if repair else records.related(store, image.ref, image.config)
        known = KnownBlocks.of_trees(store, kin, DEFAULT_BLOCK) if kin else None
        looked = time.monotonic() - began
        published = (lambda done, total: progress("publish", done, total)) if progress else None
        with TreeWriter(store, work, known=known, progress=published) as out:
            writer = erofs.Writer(out.packs, align=DEFAULT_BLOCK)
            tree = LayeredTree(writer)

            def put(chunks: Iterator[bytes]) -> None:
                tree.apply(_reported(chunks, writer, progress))
                faults.point("image.convert.after-layer")

            for index in range(len(image.layers)):
                writer.begin_layer()
                out.packs.next_pack()
                layers.apply(index, put, "convert")
            meta = writer.finish()
            faults.point("image.convert.before-publish")
            applied, packed = time.monotonic() - began, out.packs.waited
            made = out.seal(meta, writer.dead_ranges())
    total = time.monotonic() - began
    seconds = {
        "layers": layers.waited,
        "tree": applied - looked - layers.waited - packed,
        "pack": packed,
        "publish": total - applied + looked,
    }
    record = ImageRecord(
        image=image.digest,
        platform=image.platform,
        reference=str(image.ref),
        tree=made.digest,
        config=image.config,
        layer_bytes=layer_bytes,
        tree_bytes=made.size,
        stored_bytes=made.stored,
        shared_bytes=made.shared,
        packs=made.packs,
        members=tree.members,
        converted=int(time.time()),
        seconds={step: round(value, 3) for step, value in seconds.items()},
        kin=tuple(one for one in kin if one != made.digest)[:MAX_TREES],
    )
    return record, kin


def _read_all(image: oci.Image) -> None:
    for index in range(len(image.layers)):
        for _ in image.layer_chunks(index):
            pass


@contextlib.contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A folder of our own below ``parent``, removed at the end; those of conversions that were killed go first. Raises
    `ConfigError` as root where others could put a link in place of one just while it is written to; a user's own are
    left there."""
    with contextlib.ExitStack() as undo:
        with doing(f"work in {parent}"):
            make(parent)
            try:
                parent = settled(parent / _WORK).parent
            except ConfigError:
                if os.geteuid() == 0:
                    raise
            else:
                for old in parent.glob(f"{_WORK}*"):
                    with contextlib.suppress(OSError):
                        _remove_left(old)
            folder = undo.enter_context(owned_folder(parent, _WORK))
            undo.callback(clear, folder)
        yield folder


def _remove_left(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    with adopted(folder) as ours:
        if ours:
            log.warning("removing %s, left by an interrupted conversion", folder)
            clear(folder)
            remove(folder)


def _reported(chunks: Iterator[bytes], writer: erofs.Writer, progress: Progress | None) -> Iterator[bytes]:
    for chunk in chunks:
        if progress:
            progress("convert", writer.position, 0)
        yield chunk
