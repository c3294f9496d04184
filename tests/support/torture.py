"""An image with everything that is hard to keep: for tests that compare a mount with the unpacked image.

Four layers, of each compression (gzip, zstd, none). What each path is for is said where it is made.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bootseer import image, oci
from support.images import Member, folder, programs, tar_of
from support.layouts import write_layout

SIZES = (0, 1, 4095, 4096, 4097, 65535, 65536, 65537, (1 << 20) + 1)
"""Around the borders of pages, EROFS chunks and blocks."""
SPARSE = 5 << 30
"""Size of ``sparse/huge``, whose offsets need more than 32 bits."""
PROGRAM = "bin/sha256sum"
"""A program of this host, to be executed from the mount: ``PROGRAM FILE``."""
SCRIPT = "bin/script"
"""A script that prints ``42``."""


class Site(NamedTuple):
    """A converted image and what it must look like."""

    ref: str
    reference: Path
    """The image as `oci.unpack` makes it."""
    store: Path
    image: str
    tree: str


def prepare(ref: str, folder: Path) -> Site:
    """Convert the image ``ref`` into ``folder/store`` and unpack it to ``folder/root``. Needs root."""
    record = image.ensure(ref, str(folder / "store"), work_dir=folder / "work").record
    with oci.open_image(ref) as opened:
        oci.unpack(opened, folder / "root")
    return Site(ref, folder / "root", folder / "store", record.image, record.tree)


_CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
_ENTRIES = 20_000


def _acl(*entries: tuple[int, int, int]) -> bytes:
    """A POSIX ACL as the kernel stores it: version 2, then (tag, permissions, id) each."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


_NOBODY = 0xFFFFFFFF
_ACL = _acl((1, 6, _NOBODY), (2, 4, 1234), (4, 4, _NOBODY), (16, 4, _NOBODY), (32, 0, _NOBODY))
"""user::rw- user:1234:r-- group::r-- mask::r-- other::---"""


def write(layout: Path, *, entries: int = _ENTRIES, bulk: int = 10) -> str:
    """Write the image to the OCI layout ``layout`` and return its reference (``oci:DIR:TAG``).

    About ``bulk`` MB of random data and 4 MB of other; ``entries`` files in ``large/``. Needs GNU tar, for members
    with holes. The same arguments give the same image on the same machine.
    """
    rand = random.Random(3)
    with tempfile.TemporaryDirectory(prefix="bootseer-torture-", dir="/var/tmp") as temp:
        place = Path(temp)
        layers = [place / f"{number}.tar" for number in range(4)]
        layers[0].write_bytes(tar_of(_lower(rand)))
        layers[1].write_bytes(tar_of(_middle(rand, entries, bulk)))
        _write_sparse(place / "source", layers[2])
        layers[3].write_bytes(tar_of(_upper(rand)))
        write_layout(layout, layers, oci.ContainerConfig(), "v1", compression=("gzip", "zstd", "zstd", "none"))
    return f"oci:{layout}:v1"


def _lower(rand: random.Random) -> Iterator[Member]:
    yield folder("./", 0o755, mtime_ns=1_400_000_000_000_000_001)
    yield folder("sizes")
    for size in SIZES:
        yield Member(f"sizes/random-{size}", data=rand.randbytes(size))
        yield Member(f"sizes/zero-{size}", data=bytes(size))
        yield Member(f"sizes/text-{size}", data=(b"%d all work and no play " % size * (size // 20 + 1))[:size])
        yield Member(f"sizes/half-{size}", data=bytes(size // 2) + rand.randbytes(size - size // 2))
    yield from programs("sha256sum")
    yield Member(SCRIPT, data=b"#!/bin/sh\necho 42\n", mode=0o755)
    yield folder("names")
    yield Member("names/" + "n" * 255, data=b"255 bytes")
    yield Member("names/" + os.fsdecode(b"\xff" * 255), data=b"255 bytes that are no UTF-8")
    yield Member("names/" + os.fsdecode(b"caf\xe9"), data=b"Latin 1")
    yield Member("names/" + "\u00e9" * 127, data=b"UTF-8")
    yield Member("names/new\nline", data=b"a new line")
    yield Member("names/ space and \"quotes' \\ ", data=b"quotes")
    yield Member("deep/" * 100 + "file", data=rand.randbytes(5000))
    yield folder("links")
    for number in range(4):
        yield Member(f"links/loop-{number}", "symlink", link=f"loop-{(number + 1) % 4}")
    yield Member("links/self", "symlink", link="self")
    yield Member("links/dangling", "symlink", link="/no/such/place")
    yield Member("links/out", "symlink", link="../../../../../etc")
    yield Member("links/long", "symlink", link="../sizes/./" * 300 + "random-1")
    yield Member("links/one", data=rand.randbytes(70_000))
    yield Member("links/two", "hardlink", link="links/one")
    yield folder("attributes")
    yield Member("attributes/capability", data=b"c" * 5000, mode=0o755, xattrs={"security.capability": _CAPABILITY})
    yield Member("attributes/user", data=b"u", xattrs={"user.a": b"\0b\xff\n", "user.empty": b"", "user.b": b"v" * 900})
    yield Member("attributes/acl", data=b"a", mode=0o640, xattrs={"system.posix_acl_access": _ACL})
    yield folder("attributes/acls", 0o750, xattrs={"user.d": b"1"})
    yield Member("attributes/trusted", data=b"t", xattrs={"trusted.t": b"1"})
    yield folder("special")
    yield Member("special/null", "char", mode=0o666, device=(1, 3))
    yield Member("special/big", "char", mode=0o600, device=(259, 70_000))
    yield Member("special/disk", "block", mode=0o660, gid=6, device=(7, 200))
    yield Member("special/pipe", "fifo", mode=0o622, uid=7)
    yield Member("special/setuid", data=b"#!/bin/sh\n", mode=0o4755, uid=7)
    yield Member("special/setgid", data=b"#!/bin/sh\n", mode=0o2755, gid=7)
    yield folder("special/sticky", 0o1777, uid=65534, gid=65534)
    yield Member("special/nothing", data=b"mode 0", mode=0)
    yield Member("special/old", data=b"before 1970", mtime_ns=-1_000_000_001)
    yield Member("special/owner", data=b"o", uid=3_000_000_000, gid=2_000_000)
    yield folder("changed")
    for name in ("gone", "replaced", "grown", "to-folder", "kept"):
        yield Member(f"changed/{name}", data=rand.randbytes(90_000))
    yield folder("changed/to-file")
    yield Member("changed/to-file/inside", data=b"goes with its folder")
    yield folder("opaque")
    yield Member("opaque/below", data=rand.randbytes(200_000))
    yield folder("opaque/folder")
    yield Member("opaque/folder/below", data=b"hidden")


def _middle(rand: random.Random, entries: int, bulk: int) -> Iterator[Member]:
    yield folder("large")
    for number in range(entries):
        yield Member(f"large/{number:06}-{'x' * (number % 40)}", data=b"%d\n" % number if number % 100 == 0 else b"")
    yield folder("bulk")
    for number in range(2 * bulk):
        yield Member(f"bulk/{number:03}", data=rand.randbytes(500_000 + rand.randrange(20_000)))
    yield Member("changed/kept", data=rand.randbytes(90_001))


def _upper(rand: random.Random) -> Iterator[Member]:
    yield Member("changed/.wh.gone")
    yield Member("changed/replaced", data=rand.randbytes(91_000))
    yield Member("changed/grown", data=rand.randbytes(400_000))
    yield folder("changed/to-folder")
    yield Member("changed/to-folder/inside", data=b"new")
    yield Member("changed/to-file", data=b"was a folder")
    yield folder("opaque", 0o700)
    yield Member("opaque/.wh..wh..opq")
    yield Member("opaque/above", data=rand.randbytes(100_000))
    yield Member("links/three", "hardlink", link="links/one")
    yield Member("links/kept", "hardlink", link="changed/kept")
    yield Member("bulk/.wh.001")
    yield Member("bulk/000", data=rand.randbytes(300_000))
    yield Member("sizes/random-4096", data=rand.randbytes(4096), mode=0o600)


def _write_sparse(source: Path, archive: Path) -> None:
    """A tar with members that have holes: none but ``tar`` itself writes these."""
    folder = source / "sparse"
    folder.mkdir(parents=True)
    rand = random.Random(5)
    for name, size, at in (
        ("huge", SPARSE, (0, 1 << 20, (4 << 30) - 5000, (4 << 30) + 123_456, SPARSE - 10_000)),
        ("islands", 40 << 20, tuple(range(12_288, 40 << 20, 1_500_000))),
        ("hole", 1 << 20, ()),
        ("tail", (3 << 20) + 77, (0,)),
    ):
        with (folder / name).open("wb") as file:
            file.truncate(size)
            for offset in at:
                file.seek(offset)
                file.write(rand.randbytes(10_000))
    options = ["--format=posix", "--sparse-version=1.0", "--sort=name", "--mtime=@1500000000", "--numeric-owner"]
    subprocess.run(["tar", "-cSf", str(archive), *options, "-C", str(source), "sparse"], check=True, timeout=120)
