"""Images in archives of ``docker save`` and ``podman save``: tar files with a ``manifest.json``, also compressed."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from bootseer.errors import ConfigError, DataError, NotFoundError, from_os_error
from bootseer.oci.inflate import COMPRESSED, inflate
from bootseer.oci.spec import (
    CONFIG,
    LAYER,
    MANIFEST,
    MAX_DOCUMENT,
    Descriptor,
    ImageConfig,
    Manifest,
    decode,
    digest_of,
)

log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_MOST = 1 << 50
_EXTENDED = tuple(kind.encode() for kind in "xgXLK")
_DAMAGED = (tarfile.TarError, ValueError, OverflowError)
_NAMED_BY_DIGEST = re.compile(r"(?:.*/)?([0-9a-f]{64})(?:\.tar(?:\.gz)?)?\Z")
"""Layers of podman, and of docker since 25. Before, the name was something else, and layers were not compressed."""


class _Saved(msgspec.Struct, frozen=True, rename="pascal"):
    """One image in ``manifest.json``; ``config`` and ``layers`` are members of the archive."""

    config: str
    layers: tuple[str, ...]
    repo_tags: tuple[str, ...] | None = None


class _Header(tarfile.TarInfo):
    def _block(self, count: int) -> int:
        """How far a member reaches; all of the headers with long names and PAX records is read to memory."""
        if not 0 <= count <= (MAX_DOCUMENT if self.type in _EXTENDED else _MOST):
            raise tarfile.ReadError(f"a member of {count} bytes")  # back to an earlier one would have no end
        return -(-count // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


class Archive:
    """An archive to read from. A compressed one is decompressed to a temporary file first.

    There is no manifest in it: one is made of what it says, so that the digest of an image is another than in a
    registry. Not safe for use by several threads. Raises `NotFoundError`, and `DataError` when it is no archive.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, str] = {}
        """Digest -> name."""
        with contextlib.ExitStack() as undo:
            try:
                file: IO[bytes] = undo.enter_context(open(path, "rb", opener=_open))
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise DataError(f"{path} is not a file")
                if file.read(4).startswith(COMPRESSED):
                    file = undo.enter_context(self._decompressed(file))
                file.seek(0)
                self._tar = undo.enter_context(tarfile.open(fileobj=file, mode="r:", tarinfo=_Header))
            except _DAMAGED as exc:
                raise DataError(f"{path} is not an archive of docker save: {exc}") from None
            except OSError as exc:
                raise from_os_error(exc, f"read the archive {path}") from exc
            images = decode(self._document("manifest.json"), list[_Saved], f"manifest.json of {path}")
            self._images = [(saved.repo_tags or (), self._manifest(saved)) for saved in images]
            self._open = undo.pop_all()

    def _decompressed(self, file: IO[bytes]) -> IO[bytes]:
        file.seek(0)
        where = tempfile.gettempdir()
        log.info("decompressing %s to a temporary file in %s", self._path, where)
        try:
            with contextlib.ExitStack() as undo:
                plain = undo.enter_context(tempfile.TemporaryFile())
                for chunk in inflate(iter(functools.partial(file.read, _CHUNK), b""), f"archive {self._path}"):
                    plain.write(chunk)
                undo.pop_all()
                return plain
        except OSError as exc:
            raise from_os_error(exc, f"decompress {self._path} to {where}") from exc

    @contextlib.contextmanager
    def _member(self, name: str) -> Iterator[tuple[IO[bytes], int]]:
        """A file of the archive and its size, also by the name of a link to it."""
        try:
            file = self._tar.extractfile(name)
            if file is None:
                raise KeyError(name)
            with file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                yield file, size
        except (KeyError, RecursionError):
            hint = "docker save and podman save write it; unpack an OCI archive, and name it oci:DIR"
            raise DataError(f"archive {self._path} has no file {name}", hint=hint) from None
        except _DAMAGED as exc:
            raise DataError(f"archive {self._path} is damaged: {exc}") from None

    def _document(self, name: str) -> bytes:
        with self._member(name) as (file, size):
            if size > MAX_DOCUMENT:
                raise DataError(f"{name} in archive {self._path} is larger than {MAX_DOCUMENT} bytes")
            return file.read()

    def _manifest(self, saved: _Saved) -> bytes:
        raw = self._document(saved.config)
        config = Descriptor(CONFIG, digest_of(raw), len(raw))
        self._members[config.digest] = saved.config
        diff_ids = decode(raw, ImageConfig, f"{saved.config} in archive {self._path}").rootfs.diff_ids
        if len(diff_ids) != len(saved.layers):
            raise DataError(f"archive {self._path} has {len(saved.layers)} layers but {len(diff_ids)} diff ids")
        layers = []
        for name, diff_id in zip(saved.layers, diff_ids, strict=True):
            named = _NAMED_BY_DIGEST.match(name)
            digest = f"sha256:{named[1]}" if named else diff_id
            with self._member(name) as (_, size):
                layers.append(Descriptor(LAYER, digest, size))
            self._members[digest] = name
        return msgspec.json.encode(Manifest(schema_version=2, config=config, layers=tuple(layers)))

    def manifest(self, selector: str) -> tuple[bytes, Descriptor]:
        """The manifest of the image with a name, tag or digest; of the only one when nothing is said.

        Raises `ConfigError` when there are several to choose from, `NotFoundError`.
        """
        found = [body for names, body in self._images if selector in ("", digest_of(body), *names, *map(_tag, names))]
        if len(found) == 1:
            return found[0], Descriptor(MANIFEST, digest_of(found[0]), len(found[0]))
        known = ", ".join(sorted(name for names, _ in self._images for name in names)) or "none with a name"
        if found:
            raise ConfigError(f"archive {self._path} holds several images", hint=f"name one of {known}")
        raise NotFoundError(f"image {selector} does not exist in archive {self._path}", hint=f"it has {known}")

    def blob(self, item: Descriptor) -> Iterator[bytes]:
        """The bytes of a layer or configuration, unverified."""
        with self._member(self._members[item.digest]) as (file, _):
            while chunk := file.read(_CHUNK):
                yield chunk

    def close(self) -> None:
        self._open.close()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # nobody may ever write to a pipe


def _tag(name: str) -> str:
    return name.rpartition(":")[2]
