"""Small images made by hand, for tests: tar members as values, written with the standard library's ``tarfile``."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bootseer import oci
from bootseer.errors import UnsupportedError
from support.layouts import Compression, write_layout

_TYPES = {
    "file": tarfile.REGTYPE,
    "dir": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "hardlink": tarfile.LNKTYPE,
    "char": tarfile.CHRTYPE,
    "block": tarfile.BLKTYPE,
    "fifo": tarfile.FIFOTYPE,
}


class Member(NamedTuple):
    """One tar member. ``kind``: file, dir, symlink, hardlink, char, block or fifo. Times in nanoseconds."""

    name: str
    kind: str = "file"
    data: bytes = b""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 1_500_000_000_123_456_789
    link: str = ""
    device: tuple[int, int] = (0, 0)
    xattrs: dict[str, bytes] = {}  # noqa: RUF012 - never written to


def folder(name: str, mode: int = 0o755, **more: object) -> Member:
    return Member(name, "dir", mode=mode, **more)  # type: ignore[arg-type]


_CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


def one_of_each(noise: bytes) -> list[Member]:
    """A layer with each kind of file, odd modes, owners, names and attributes; ``noise`` (3 MB) is the large file's."""
    return [
        folder("./", mtime_ns=1_400_000_000_000_000_001),
        folder("etc"),
        Member("etc/passwd", data=b"root:x:0:0::/:/bin/sh\n"),
        folder("opt", 0o2775, uid=1000, gid=1001),
        Member("opt/large", data=noise, mode=0o640),
        Member("opt/suid", data=b"#!/bin/sh\n", mode=0o6755, uid=7),
        Member("opt/cap", data=b"x" * 5000, mode=0o755, xattrs={"security.capability": _CAPABILITY, "user.a": b"\0b"}),
        Member("opt/link", "symlink", link="../etc/passwd", uid=3),
        Member("opt/hard", "hardlink", link="opt/large"),
        Member("opt/null", "char", mode=0o666, device=(1, 3)),
        Member("opt/pipe", "fifo", mode=0o600),
        Member(os.fsdecode(b"opt/caf\xe9"), data=b"not UTF-8"),
        Member("opt/empty"),
        Member("opt/lost", data=noise[:500_000]),
        folder("opt/opaque"),
        Member("opt/opaque/old", data=b"gone too"),
    ]


CHANGES = [
    folder("opt", 0o2775, uid=1000, gid=1001, mtime_ns=1_450_000_000_000_000_000),
    Member("opt/.wh.lost"),
    folder("opt/opaque"),
    Member("opt/opaque/.wh..wh..opq"),
    Member("opt/opaque/new", data=b"new"),
    Member("etc/passwd", data=b"root:x:0:0::/root:/bin/sh\n", mtime_ns=999_999_999),
]
"""A layer over `one_of_each` that hides and replaces."""


def tar_of(members: Iterable[Member], fmt: int = tarfile.PAX_FORMAT) -> bytes:
    """The members as an uncompressed tar stream."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=fmt, errors="surrogateescape") as archive:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.mode, info.uid, info.gid = _TYPES[member.kind], member.mode, member.uid, member.gid
            info.size = len(member.data)
            info.linkname = member.link
            info.devmajor, info.devminor = member.device
            info.mtime = member.mtime_ns // 1_000_000_000
            if fmt == tarfile.PAX_FORMAT:
                info.pax_headers = {
                    "mtime": f"{member.mtime_ns // 1_000_000_000}.{member.mtime_ns % 1_000_000_000:09d}",
                    **{f"SCHILY.xattr.{k}": v.decode("utf-8", "surrogateescape") for k, v in member.xattrs.items()},
                }
            archive.addfile(info, io.BytesIO(member.data))
    return out.getvalue()


def write_image(
    layout: Path,
    layers: Sequence[Sequence[Member] | bytes],
    *,
    tag: str = "v1",
    config: oci.ContainerConfig | None = None,
    compression: Compression = "gzip",
) -> str:
    """An OCI layout with one image of ``layers`` (members, or ready tar bytes). Returns the manifest's digest."""
    with tempfile.TemporaryDirectory(prefix="bootseer-image-", dir="/var/tmp") as temp:
        paths = []
        for number, layer in enumerate(layers):
            path = Path(temp, f"{number}.tar")
            path.write_bytes(layer if isinstance(layer, bytes) else tar_of(layer))
            paths.append(path)
        return write_layout(layout, paths, config or oci.ContainerConfig(), tag, compression=compression)


def programs(*names: str) -> list[Member]:
    """Programs of this host with the libraries they need, as members below ``bin`` and where the loader looks."""
    files: dict[str, Path] = {}
    for name in names:
        path = shutil.which(name)
        if not path:
            raise UnsupportedError(f"no program {name} here")
        files[f"bin/{name}"] = Path(path)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False, timeout=10).stdout
        for word in listed.split():
            if word.startswith("/"):
                files[word.lstrip("/")] = Path(word)
    folders = sorted({str(parent) for name in files for parent in Path(name).parents if str(parent) != "."})
    return [
        *(folder(name) for name in folders),
        *(Member(name, data=path.read_bytes(), mode=0o755) for name, path in sorted(files.items())),
    ]
