"""The EROFS reader against images of ``mkfs.erofs``, and against damaged ones."""

from __future__ import annotations

import os
import random
import shutil
import stat
import struct
import subprocess
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer import erofs
from bootseer.erofs import Attrs, ExtentIndex, Node, Reader, Writer, build
from bootseer.errors import DataError, NotFoundError
from bootseer.kernel import mount
from support.sinks import Nowhere

needs_mkfs = pytest.mark.skipif(not shutil.which("mkfs.erofs") and not os.environ.get("CI"), reason="needs mkfs.erofs")
ROOT = os.geteuid() == 0
UNCHECKED = 1024 + 8
"""Where a zero says that the superblock has no checksum."""
LAYOUTS = {
    "blobdev": ("--chunksize=65536",),
    "blobdev-4k": ("--chunksize=4096",),
    "blobdev-1m": ("--chunksize=1048576", "-x-1", "--force-uid=5"),
    "one-device": ("--chunksize=4096",),
    "flat": (),
    "flat-noinline": ("-Enoinline_data",),
    "compact": ("-Eforce-inode-compact",),
    "extended": ("-Eforce-inode-extended",),
    "inline-xattrs": ("-x0",),
}


def grow(root: Path, seed: int = 1) -> None:
    """A tree with the things an image may hold."""
    rand = random.Random(seed)
    root.mkdir()
    for size in (0, 1, 100, 4095, 4096, 4097, 65535, 65536, 65537, 300_003):
        (root / f"size-{size}").write_bytes(rand.randbytes(size))
    (root / "again").write_bytes((root / "size-300003").read_bytes())
    (root / "sub" / "deeper").mkdir(parents=True)
    (root / "sub" / "many").mkdir()
    for number in range(400):
        (root / "sub" / "many" / f"name {number:04}").write_bytes(b"%d" % number)
    (root / os.fsdecode(b"not-utf8-\xff\xfe")).write_bytes(b"z")
    (root / "!before the dots").write_bytes(b"z")
    (root / ("n" * 254)).write_bytes(b"long name")
    (root / "suid").write_bytes(b"#!")
    (root / "suid").chmod(0o4711)
    os.link(root / "size-65537", root / "sub" / "hard")
    (root / "link").symlink_to("sub/deeper")
    (root / "circle").symlink_to("circle")
    (root / "absolute").symlink_to("/sub/../link/../..//size-100")
    (root / "long-link").symlink_to("x" * 4000)
    os.mkfifo(root / "fifo")
    (root / "suid").touch()
    os.utime(root / "size-1", ns=(-5, -1_500_000_000_000_000_001))
    os.utime(root / "size-100", ns=(5, 1_500_000_000_123_456_789))
    with (root / "sparse").open("wb") as file:
        file.truncate(10 << 20)
        file.seek(5 << 20)
        file.write(b"middle")
    with (root / "hole").open("wb") as file:
        file.truncate(3 << 20)
    for name in ("size-1", "size-4097", "again"):
        os.setxattr(root / name, "user.shared", b"same" * 30)
        os.setxattr(root / name, f"user.{name}", name.encode() * 5)
    os.setxattr(root / "size-1", "user.empty", b"")
    os.setxattr(root / "sub", "user.of-a-folder", b"\0\1")
    if ROOT:
        os.mknod(root / "char", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.mknod(root / "block", stat.S_IFBLK | 0o640, os.makedev(259, 70000))
        os.setxattr(root / "suid", "trusted.thing", b"t")
        os.setxattr(root / "suid", "security.thing", b"s")
        os.chown(root / "size-1", 70_000, 4_000_000_000)


def make(folder: Path, tree: Path, layout: str) -> tuple[bytes, bytes]:
    """``tree`` as an image: its metadata and its data."""
    meta, data = folder / f"{layout}.meta", folder / f"{layout}.data"
    device = [f"--blobdev={data}"] if layout.startswith("blobdev") else []
    command = ["mkfs.erofs", "--quiet", *device, *LAYOUTS[layout], str(meta), str(tree)]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(2**64 - 2)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return meta.read_bytes(), data.read_bytes() if device else b""


def opened(meta: bytes, data: bytes) -> Reader:
    return Reader(meta, lambda offset, length: data[offset : offset + length])


def compare(reader: Reader, root: Path, *, times: bool = True, xattrs: bool = True, uid: int | None = None) -> None:
    """Everything the image says is what the tree ``root`` has."""
    top = os.fsencode(root)
    seen: dict[bytes, int] = {}
    inodes: dict[int, int] = {}
    for path, inode in reader.walk():
        real = os.path.join(top, path) if path else top
        info = os.lstat(real)
        seen[path] = inode.nid
        assert inode.mode == info.st_mode, path
        assert (inode.uid, inode.gid) == (info.st_uid if uid is None else uid, info.st_gid), path
        assert inode.rdev == info.st_rdev, path
        if times:
            assert inode.mtime_ns == info.st_mtime_ns, path
        if not inode.is_dir:
            assert inode.nlink == info.st_nlink, path
            assert inodes.setdefault(info.st_ino, inode.nid) == inode.nid, path
        if inode.is_symlink:
            assert reader.readlink(inode) == os.readlink(real)
        elif inode.is_file:
            assert inode.size == info.st_size, path
            with open(real, "rb") as file:
                assert reader.read(inode, 0, inode.size) == file.read(), path
                for offset, length in ((1, 5), (4090, 10), (65530, 70_000), (inode.size - 1, 10)):
                    if 0 <= offset < inode.size:
                        assert reader.read(inode, offset, length) == os.pread(file.fileno(), length, offset), path
        elif inode.is_dir:
            assert [entry.name for entry in reader.entries(inode)] == sorted(os.listdir(real))
        if xattrs:
            names = [] if inode.is_symlink else os.listxattr(real, follow_symlinks=False)
            want = {os.fsencode(name): os.getxattr(real, name, follow_symlinks=False) for name in names}
            assert reader.xattrs(inode) == want, path
        assert reader.stat(path) == inode
    want_paths = {b""}
    for folder, folders, files in os.walk(top):
        want_paths |= {os.path.relpath(os.path.join(folder, name), top) for name in (*folders, *files)}
    assert seen.keys() == want_paths


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("erofs") / "tree"
    grow(root)
    return root


@needs_mkfs
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_what_mkfs_wrote(layout: str, tree: Path, tmp_path: Path) -> None:
    image = make(tmp_path, tree, layout)
    # Compact inodes have no time; mkfs.erofs wants extended ones for large ids, whatever it is told.
    compare(
        opened(*image),
        tree,
        times=layout != "compact",
        xattrs="-x-1" not in LAYOUTS[layout],
        uid=5 if "1m" in layout else None,
    )


@pytest.mark.root
@pytest.mark.parametrize("layout", ["blobdev", "compact", "ours"])
def test_reads_what_the_kernel_reads(layout: str, tree: Path, tmp_path: Path) -> None:
    if layout == "ours":
        erofs.build(tree, tmp_path / "ours.meta", tmp_path / "ours.data")
        meta, data = (tmp_path / "ours.meta").read_bytes(), (tmp_path / "ours.data").read_bytes()
    else:
        meta, data = make(tmp_path, tree, layout)
    (tmp_path / "mnt").mkdir()
    device = tmp_path / f"{layout}.data" if data else None
    mount.mount_erofs(tmp_path / f"{layout}.meta", device, tmp_path / "mnt")
    try:
        compare(opened(meta, data), tmp_path / "mnt")
    finally:
        mount.unmount(tmp_path / "mnt")


def test_reads_what_our_writer_wrote(tree: Path, tmp_path: Path) -> None:
    erofs.build(tree, tmp_path / "meta", tmp_path / "data")
    compare(opened((tmp_path / "meta").read_bytes(), (tmp_path / "data").read_bytes()), tree)


names = st.binary(min_size=1, max_size=20).filter(
    lambda name: not set(name) & set(b"\0/") and name not in (b".", b"..")
)
contents = st.tuples(
    st.sampled_from([0, 1, 100, 4000, 4096, 8192, 12_000, 65_536, 70_000]), st.integers(0, 300), st.booleans()
)
trees = st.recursive(
    contents,
    lambda below: st.dictionaries(names, below, max_size=40) | names,
    max_leaves=40,
)


def plant(where: bytes, spec: object, xattrs: bool) -> None:
    if isinstance(spec, dict):
        os.mkdir(where)
        for name, below in spec.items():
            plant(os.path.join(where, name), below, xattrs)
    elif isinstance(spec, bytes):
        os.symlink(spec, where)
        return
    else:
        size, more, hole = spec
        with open(where, "wb") as file:
            file.truncate(size * 3 if hole else size)
            file.seek(size)
            file.write(random.Random(size + more).randbytes(more))
    if xattrs:
        os.setxattr(where, "user.same", b"value")
        os.setxattr(where, f"user.{os.path.basename(where)[:5].hex()}", where[-30:])


@needs_mkfs
@given(st.dictionaries(names, trees, max_size=30), st.sampled_from([*sorted(LAYOUTS), "ours", "ours"]), st.booleans())
def test_any_tree(spec: dict[bytes, object], layout: str, xattrs: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="bootseer-reader-", dir="/var/tmp") as folder:
        root = Path(folder, "tree")
        plant(os.fsencode(root), spec, xattrs)
        if layout == "ours":
            erofs.build(root, Path(folder, "meta"), Path(folder, "data"))
            image = Path(folder, "meta").read_bytes(), Path(folder, "data").read_bytes()
        else:
            image = make(Path(folder), root, layout)
        reader = opened(*image)
        options = LAYOUTS.get(layout, ())
        uid = 5 if "--force-uid=5" in options else None
        compare(reader, root, times=layout != "compact", xattrs="-x-1" not in options, uid=uid)
        index = reader.owner_index()
        assert sum(index.sizes().values()) <= len(image[1])


@needs_mkfs
def test_extents_are_where_the_bytes_are(tree: Path, tmp_path: Path) -> None:
    meta, data = make(tmp_path, tree, "blobdev")
    reader = opened(meta, data)
    for path, inode in reader.walk():
        if inode.is_file:
            want = reader.read(inode, 0, inode.size)
            got = bytearray(inode.size)
            for extent in reader.extents(inode):
                got[extent.file_offset : extent.file_offset + extent.length] = data[
                    extent.data_offset : extent.data_offset + extent.length
                ]
            for at, piece in reader.inline(inode):
                got[at : at + len(piece)] = piece
            assert got == want, path


@needs_mkfs
def test_owners_of_data(tree: Path, tmp_path: Path) -> None:
    meta, data = make(tmp_path, tree, "blobdev")
    reader = opened(meta, data)
    index = reader.owner_index()
    (extent, *_) = reader.extents(reader.stat(b"size-65537"))
    assert index.files(extent.data_offset + 10, 100) == [(b"size-65537", 100)]
    # Equal contents are stored once, and count for the first name.
    assert sum(index.sizes().values()) <= len(data)
    (shared, *_) = reader.extents(reader.stat(b"size-300003"))
    assert index.files(shared.data_offset, 10) == [(b"again", 10)]
    assert index.files(len(data) + 5, 10) == []
    owned = dict(index.files(0, len(data)))
    assert owned == index.sizes()
    assert b"sub/hard" not in owned


@needs_mkfs
def test_paths(tree: Path, tmp_path: Path) -> None:
    reader = opened(*make(tmp_path, tree, "blobdev"))
    assert reader.stat(b"/sub//deeper/").is_dir
    assert reader.stat(b"link").is_symlink
    assert reader.resolve(b"/link")[0] == b"sub/deeper"
    assert reader.resolve(b"absolute")[0] == b"size-100"
    assert reader.resolve(b"../../sub/hard")[0] == b"sub/hard"
    assert [path for path, _ in reader.walk(b"sub/deeper")] == [b"sub/deeper"]
    for missing in (b"nothing", b"size-1/x", b"link/x"):
        with pytest.raises(NotFoundError, match="has no /"):
            reader.stat(missing)
    with pytest.raises(NotFoundError, match="too many symbolic links"):
        reader.resolve(b"circle")


@needs_mkfs
def test_data_that_ends_early(tree: Path, tmp_path: Path) -> None:
    meta, data = make(tmp_path, tree, "blobdev")
    reader = opened(meta, data[: len(data) // 2])
    with pytest.raises(DataError, match="its data ends before"):
        compare(reader, tree)
    with pytest.raises(DataError, match="outside of its data"):
        Reader(meta, data_size=len(data) // 2).owner_index()


@needs_mkfs
def test_compressed_images_are_refused(tree: Path, tmp_path: Path) -> None:
    subprocess.run(["mkfs.erofs", "--quiet", "-zlz4", tmp_path / "z", tree], check=True, capture_output=True)
    reader = Reader((tmp_path / "z").read_bytes())
    with pytest.raises(DataError, match="is it compressed"):
        list(reader.walk())


def exercise(meta: bytes, data: bytes) -> None:
    """Whatever the bytes are: an answer, or `DataError`; never much memory."""
    try:
        reader = opened(meta, data)
        for _, inode in reader.walk():
            try:
                reader.xattrs(inode)
                if inode.is_symlink:
                    reader.readlink(inode)
                elif inode.is_file:
                    reader.read(inode, max(0, inode.size - 5000), 10_000)
                    sum(extent.length for extent in reader.extents(inode))
            except DataError:
                pass
        reader.owner_index()
    except DataError:
        pass


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, bytes]]:
    folder = tmp_path_factory.mktemp("small")
    root = folder / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "file").write_bytes(b"x" * 9000)
    (root / "file").write_bytes(os.urandom(70_000))
    (root / "link").symlink_to("sub/file")
    os.link(root / "file", root / "sub" / "hard")
    os.setxattr(root / "file", "user.a", b"1")
    os.setxattr(root / "sub" / "file", "user.a", b"1")
    return [make(folder, root, layout) for layout in ("blobdev", "one-device", "flat")]


@needs_mkfs
@given(st.data())
def test_damage_is_an_error_and_never_a_crash(small: list[tuple[bytes, bytes]], draw: st.DataObject) -> None:
    meta, data = draw.draw(st.sampled_from(small))
    damaged = bytearray(meta)
    damaged[UNCHECKED] = 0
    # Most of an image is contents: aim at what is structure.
    places = [at for at in range(1024, len(meta)) if meta[at]] + list(range(1024, min(len(meta), 3000)))
    for _ in range(draw.draw(st.integers(1, 6))):
        at = draw.draw(st.sampled_from(places))
        damaged[at] = draw.draw(
            st.one_of(st.integers(0, 255), st.just(damaged[at] ^ 1 << draw.draw(st.integers(0, 7))))
        )
    if draw.draw(st.booleans()):
        del damaged[draw.draw(st.integers(0, len(damaged))) :]
    exercise(bytes(damaged), data)


@needs_mkfs
def test_a_damaged_superblock_is_noticed(small: list[tuple[bytes, bytes]]) -> None:
    meta = bytearray(small[0][0])
    meta[1024 + 90] ^= 1
    with pytest.raises(DataError, match="checksum"):
        Reader(bytes(meta))
    for broken in (b"", bytes(5000), meta[:1100]):
        with pytest.raises(DataError):
            Reader(bytes(broken))


@needs_mkfs
def test_an_emptied_directory_block_is_noticed(small: list[tuple[bytes, bytes]]) -> None:
    meta, data = bytearray(small[0][0]), small[0][1]
    sub = opened(bytes(meta), data).stat(b"sub")
    meta[sub.tail_at + 8 : sub.tail_at + 10] = bytes(2)
    meta[UNCHECKED] = 0
    with pytest.raises(DataError, match="broken block"):
        list(opened(bytes(meta), data).walk())


@needs_mkfs
def test_blocks_of_both_devices_in_one_row(tree: Path, tmp_path: Path) -> None:
    """Addresses without a device, of which those from ``mapped`` on are the second one's."""
    meta, data = make(tmp_path, tree, "blobdev")
    mapped, raw = 1000, bytearray(meta)
    struct.pack_into("<II", raw, 1024 + 128 + 64, len(data) // 4096, mapped)
    raw[UNCHECKED] = 0
    for _, inode in opened(meta, data).walk():
        if inode.is_file and inode.size and inode.layout == 4:
            first = -(-inode.tail_at // 8) * 8
            for at in range(first, first + 8 * -(-inode.size // 65536), 8):
                device, block = struct.unpack_from("<HI", raw, at + 2)
                if device == 1 and block != 0xFFFFFFFF:
                    struct.pack_into("<HI", raw, at + 2, 0, block + mapped)
    compare(opened(bytes(raw), data), tree)


@needs_mkfs
def test_a_directory_in_itself_ends(small: list[tuple[bytes, bytes]]) -> None:
    meta, data = small[0]
    reader = opened(meta, data)
    root, sub = reader.root.nid, reader.stat(b"sub").nid
    looped = bytearray(meta.replace(sub.to_bytes(8, "little"), root.to_bytes(8, "little")))
    looped[UNCHECKED] = 0
    with pytest.raises(DataError, match="is there twice"):
        list(opened(bytes(looped), data).walk())


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=4), max_size=8),
    st.integers(0, 80),
    st.integers(0, 80),
)
def test_the_index_gives_each_byte_to_its_first_file(
    files: list[list[tuple[int, int]]], offset: int, length: int
) -> None:
    index = ExtentIndex((b"%d" % number, ranges) for number, ranges in enumerate(files))
    owner: dict[int, bytes] = {}
    for number, ranges in enumerate(files):
        for start, size in ranges:
            for at in range(start, start + size):
                owner.setdefault(at, b"%d" % number)
    inside = [path for at, path in owner.items() if offset <= at < offset + length]
    assert dict(index.files(offset, length)) == Counter(inside)
    for at in range(150):
        assert index.files(at, 1) == ([(owner[at], 1)] if at in owner else [])


def test_only_folders_have_a_parent(tmp_path: Path) -> None:
    (tmp_path / "d" / "sub").mkdir(parents=True)
    for name in ("f", "g"):
        (tmp_path / "d" / name).write_bytes(b"x")
    (tmp_path / "d" / "up").symlink_to("sub/..")
    (tmp_path / "d" / "through").symlink_to("f/../g")
    build(tmp_path / "d", tmp_path / "meta", tmp_path / "data")
    reader = opened((tmp_path / "meta").read_bytes(), (tmp_path / "data").read_bytes())
    assert reader.resolve(b"sub/../g")[0] == b"g"
    assert reader.resolve(b"up/g")[0] == b"g"
    assert reader.resolve(b"../../g")[0] == b"g"
    for path in (b"f/../g", b"f/..", b"through", b"f/x"):
        with pytest.raises(NotFoundError):
            reader.resolve(path)


def test_links_that_grow_without_end(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for number in range(39):  # fewer than are followed, but 78,000 parts in the end
        (tmp_path / "d" / f"l{number}").symlink_to(f"l{number + 1}/" + "x/" * 2000)
    (tmp_path / "d" / "l39").mkdir()
    build(tmp_path / "d", tmp_path / "meta", tmp_path / "data")
    reader = opened((tmp_path / "meta").read_bytes(), b"")
    with pytest.raises(NotFoundError, match="too many"):
        reader.resolve(b"l0")


def test_a_walk_holds_no_paths_of_folders_not_yet_entered(tmp_path: Path) -> None:
    """Of a chain of folders with many members each, a list of all that is still to come would hold every path."""
    writer = Writer(Nowhere())
    at: Node | None = None
    for _ in range(50):
        for number in range(100):
            writer.add_file(b"f%d" % number, Attrs(0o644), 0, (), at=at)
        at = writer.add_dir(b"a" * 200, Attrs(0o755), at=at)
    reader = Reader(writer.finish())
    tracemalloc.start()
    try:
        assert sum(1 for _ in reader.walk()) == 50 * 101 + 1
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_paths_of_absurd_length_end_a_walk() -> None:
    writer = Writer(Nowhere())
    at: Node | None = None
    for _ in range(300):
        at = writer.add_dir(b"a" * 255, Attrs(0o755), at=at)
    reader = Reader(writer.finish())
    with pytest.raises(DataError, match="absurdly long"):
        list(reader.walk())
