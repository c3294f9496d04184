"""What a node cache holds: folders of blocks, per block map with the trees made of it, per striped file with its chunk
list (`CHUNKS`). Looking changes nothing and takes no lock; what it says of use is a hint. Whoever wants to change a
folder asks `locks.maintain`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from bootseer.chunks import bitmap, hashing
from bootseer.chunks.blockmap import BlockMap, Blocks
from bootseer.chunks.chunklist import ChunkList
from bootseer.chunks.manifest import TreeManifest
from bootseer.errors import BootseerError, DataError, logged
from bootseer.kernel import mount as mounts

log = logging.getLogger(__name__)

CHUNKS, ORIGIN, COMPARED = "chunks", "origin", "compared"
"""In the cache folder of a striped file: its chunk list, whose BLAKE3 names the folder; where it came from (advice);
in which state of the data file every chunk had its checksum."""
_Owners = Mapping[tuple[int, int], int]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of blocks and the trees that use it, or (``map`` empty) one tree without blocks. Sizes in bytes."""

    map: str
    """Digest of the block map, or of the chunk list."""
    file: str = ""
    """Of a striped file: where it was when it was opened last; "?" when that is not known. Empty for trees."""
    trees: list[str]
    """Digests of the trees with this map, as far as their manifests are here."""
    disk_bytes: int
    """What the blocks and the trees' metadata take on disk."""
    blocks_ready: int
    blocks_total: int
    hot_ready: int | None
    """Blocks that starts on this node touched; None where that is not known."""
    hot_total: int | None
    last_use: float
    """Seconds since 1970."""
    owner: int
    """A process that serves it; 0: none."""
    mounts: list[str]
    """Mount points that this process sees."""

    @property
    def in_use(self) -> bool:
        return bool(self.owner or self.mounts)


def parts(cache_dir: Path) -> list[Part]:
    """Everything in the cache, longest unused first. What cannot be read counts as unknown, never as an error."""
    owners, targets = _owners(), _targets()
    trees: dict[str, list[str]] = {}
    bare: list[str] = []
    for digest in _names(cache_dir / "trees"):
        manifest = manifest_of(cache_dir, digest)
        if manifest is not None and (cache_dir / "blocks" / manifest.map.digest).is_dir():
            trees.setdefault(manifest.map.digest, []).append(digest)
        else:
            bare.append(digest)
    found = [_part(cache_dir, name, trees.get(name, []), owners, targets) for name in _names(cache_dir / "blocks")]
    found += [_part(cache_dir, "", [digest], owners, targets) for digest in bare]
    return sorted(found, key=lambda part: (part.last_use, part.map, part.trees))


def disk_bytes(folders: Iterable[Path]) -> int:
    """What the files in ``folders`` and below take on disk."""
    return sum(info.st_blocks * 512 for folder in folders for info in _files(folder))


def used(cache_dir: Path) -> int:
    """Bytes on disk that the node cache may give back: blocks and trees."""
    return disk_bytes([cache_dir / "blocks", cache_dir / "trees"])


def manifest_of(cache_dir: Path, digest: str) -> TreeManifest | None:
    """The intact manifest of a tree in the cache."""
    try:
        return TreeManifest.decode((cache_dir / "trees" / digest / "manifest.json").read_bytes(), digest)
    except (OSError, BootseerError):
        return None


def map_of(cache_dir: Path, part: Part) -> Blocks | None:
    """The intact chunk list of a striped file, or block map of the first of the trees (which share one) that has it."""
    if part.file:
        with contextlib.suppress(OSError, DataError):
            raw = (cache_dir / "blocks" / part.map / CHUNKS).read_bytes()
            return ChunkList.decode(raw) if hashing.hexdigest(raw) == part.map else None
    for digest in part.trees:
        manifest = manifest_of(cache_dir, digest)
        with contextlib.suppress(OSError, BootseerError):
            raw = (cache_dir / "trees" / digest / "map").read_bytes()
            if manifest is not None and hashing.hexdigest(raw) == manifest.map.digest:
                return BlockMap.decode(raw)
    return None


def keep_hot(folder: Path, digest: bytes, count: int, hot: Iterable[int]) -> None:
    """Remember the hot blocks of a cache folder for the time when space is short. Best effort."""
    flags = bytearray(count)
    for block in hot:
        flags[block] = 1
    raw = bitmap.encode(bitmap.HOT, digest, flags)
    path = folder / "hot"
    with logged(log.info, "cannot keep the hot list of block cache %s", folder, kinds=OSError):
        if not path.exists() or path.read_bytes() != raw:
            # Not synced, as its checksum tells when it is torn: this is at the time when a job gets ready.
            tmp = folder / "hot.tmp"
            tmp.write_bytes(raw)
            os.replace(tmp, path)


def _part(cache_dir: Path, name: str, trees: list[str], owners: _Owners, targets: Mapping[str, list[str]]) -> Part:
    folder = cache_dir / "blocks" / name
    places = [cache_dir / "trees" / digest for digest in trees]
    ready = hot = None
    if name:
        with contextlib.suppress(OSError, ValueError):
            ready = bitmap.read(folder / "bitmap", bitmap.READY, bytes.fromhex(name))
            hot = bitmap.read(folder / "hot", bitmap.HOT, bytes.fromhex(name))
    owner, last = 0, 0.0
    for path in [*([folder / "lock"] if name else []), *places]:
        with contextlib.suppress(OSError):
            info = path.stat()
            last = max(last, info.st_mtime)
            owner = owner or owners.get((info.st_dev, info.st_ino), 0)
    both = None
    if hot is not None:
        both = sum(map(int.__and__, hot, ready)) if ready is not None and len(ready) == len(hot) else 0
    file = ""
    if name and (folder / CHUNKS).exists():
        with contextlib.suppress(OSError):
            file = (folder / ORIGIN).read_text(errors="replace")
        file = file or "?"
    return Part(
        map=name,
        file=file,
        trees=trees,
        disk_bytes=disk_bytes([*([folder] if name else []), *places]),
        blocks_ready=ready.count(1) if ready is not None else 0,
        blocks_total=len(ready) if ready is not None else 0,
        hot_ready=both,
        hot_total=hot.count(1) if hot is not None else None,
        last_use=last,
        owner=owner,
        mounts=[target for place in places for target in targets.get(str(place / "meta"), [])],
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if hashing.is_hexdigest(name))
    except OSError:
        return []


def _files(folder: Path) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(Path(entry.path))
                yield entry.stat(follow_symlinks=False)


def _owners() -> _Owners:
    """(device, inode) -> process, of all files with an exclusive flock."""
    found = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/locks") as lines:
        for line in lines:
            fields = line.split()
            if fields[1:4] == ["FLOCK", "ADVISORY", "WRITE"]:
                major, minor, inode = fields[5].split(":")
                found[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = int(fields[4])
    return found


def mount_points(meta: Path) -> list[str]:
    """Where the tree with this ``meta`` is mounted, as far as this process sees."""
    return _targets().get(str(meta), [])


def _targets() -> dict[str, list[str]]:
    """Source -> mount points, of all EROFS mounts."""
    found: dict[str, list[str]] = {}
    for entry in mounts.entries():
        if entry.fstype == "erofs":
            found.setdefault(entry.source, []).append(entry.target)
    return found
