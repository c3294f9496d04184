"""The EROFS writer without a mount: placement of contents, what it refuses, the same bytes every time, fsck.erofs."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
import subprocess
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bootseer.erofs import Attrs, Buffer, Hole, Node, Reader, Writer
from bootseer.erofs import format as fmt
from bootseer.erofs.data import Stream
from bootseer.errors import DataError
from support.sinks import Memory, Nowhere

FILE, FOLDER = Attrs(0o644), Attrs(0o755)


def content(node: Node, data: bytes | bytearray) -> bytes:
    """A file's content as its chunk indexes say."""
    if node.chunks is None:
        return bytes(data[node.start : node.start + node.size]) if node.start >= 0 else bytes(node.size)
    unit = fmt.BLOCK << node.chunk_bits
    parts = [
        bytes(unit) if block == fmt.HOLE else bytes(data[block * fmt.BLOCK : block * fmt.BLOCK + unit])
        for block in node.chunks
    ]
    return b"".join(parts)[: node.size].ljust(node.size, b"\0")


def put(writer: Writer, path: bytes, data: bytes, attrs: Attrs = FILE) -> Node:
    return writer.add_file(path, attrs, len(data), [data] if data else [])


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def test_where_contents_go() -> None:
    sink = Memory()
    writer = Writer(sink)
    small = [put(writer, b"a%d" % size, noise(size)) for size in (1, 4096, 4097, 65535)]
    large = [put(writer, b"b%d" % size, noise(size)) for size in (65536, 65537)]
    after = put(writer, b"c", b"c")
    assert [node.start for node in small] == [0, 4096, 8192, 16384]
    assert [node.start for node in large] == [131072, 196608]
    assert after.start == 196608 + 69632
    writer.begin_layer()
    assert sink.position == writer.position == 327680
    assert put(writer, b"d", b"d").start == 327680
    assert put(writer, b"e", b"").start == -1
    writer.finish()
    assert sink.position == 327680 + 4096
    for node in (*small, *large):
        assert content(node, sink.data) == noise(node.size)


def test_buffers_are_handed_on_uncopied() -> None:
    class Keep(Nowhere):
        def write(self, data: Buffer, /) -> None:
            super().write(data)
            kept.append(data)

    kept: list[Buffer] = []
    piece = noise(1 << 20)
    Writer(Keep()).add_file(b"f", FILE, 2 << 20, [piece, bytearray(piece)])
    assert [len(data) for data in kept] == [1 << 20, 1 << 20]
    assert isinstance(kept[0], memoryview)
    assert kept[0].obj is piece


UNIT = 4096
RUNS = st.lists(st.tuples(st.sampled_from(["zero", "hole", "data", "speck"]), st.integers(0, 4 * UNIT + 5)), max_size=8)


@given(RUNS, st.lists(st.integers(1, 3 * UNIT), max_size=6), st.sampled_from([UNIT, 2 * UNIT]))
@example([("hole", UNIT), ("data", UNIT), ("hole", UNIT)], [], UNIT)
@example([("data", UNIT), ("zero", UNIT), ("data", 1)], [1, UNIT], UNIT)
@example([("zero", UNIT - 1), ("speck", UNIT + 1), ("hole", 3 * UNIT), ("zero", 2)], [100], UNIT)
def test_any_pieces_with_any_zeros_come_back(runs: list[tuple[str, int]], cuts: list[int], unit: int) -> None:
    wanted = b""
    pieces: list[Buffer | Hole] = []
    for number, (kind, length) in enumerate(runs):
        if kind == "hole":
            wanted += bytes(length)
            pieces.append(Hole(length))
            continue
        data = noise(length, number) if kind == "data" else bytearray(length)
        if kind == "speck" and length:
            data = bytearray(data)
            data[length // 3] = 1
        wanted += data
        view = memoryview(data)
        for cut in cuts:
            pieces.append(view[:cut])
            view = view[cut:]
        pieces.append(view)
    sink = Memory()
    writer = Writer(sink, align=unit)
    put(writer, b"before", b"x" * (len(runs) + 1))
    node = writer.add_file(b"f", FILE, len(wanted), pieces)
    put(writer, b"after", b"y")
    meta = writer.finish()
    assert content(node, sink.data) == wanted
    units = [wanted[at : at + unit] for at in range(0, len(wanted), unit)]
    stored = sum(-(-len(part) // fmt.BLOCK) * fmt.BLOCK for part in units if any(part))
    assert sink.position <= 4096 + (unit if len(wanted) >= unit else 0) + stored + 4096
    if node.start >= 0:
        assert node.start % (unit if node.size >= unit else fmt.BLOCK) == 0
    reader = Reader(meta, sink.read)
    assert reader.read(reader.stat(b"f"), 0, len(wanted)) == wanted


def test_a_contiguous_file_has_one_index_and_holes_make_few() -> None:
    writer = Writer(Nowhere())
    assert put(writer, b"whole", noise(1 << 20)).chunks is None
    gib = 1 << 30
    half = writer.add_file(b"half", FILE, 4 * gib, [Hole(2 * gib), *[b"x" * (1 << 20)] * 2048])
    assert (half.chunks, fmt.BLOCK << half.chunk_bits) == (array("I", [fmt.HOLE, half.start // 4096]), 2 * gib)
    huge = writer.add_file(b"huge", FILE, 8 << 40, [b"a" * 4096, Hole((8 << 40) - 4096)])
    assert huge.chunks is not None
    assert len(huge.chunks) <= 1 << 16
    assert huge.chunks.count(fmt.HOLE) == len(huge.chunks) - 1


def test_data_beyond_32_bits_of_blocks_is_refused() -> None:
    stream = Stream(Nowhere(), 65536)
    stream.position = (0xFFFFFFFF << 12) - 4096
    assert stream.file(4096, [b"x" * 4096]).start == stream.position - 4096
    with pytest.raises(DataError, match="does not fit"):
        stream.file(1, [b"x"])


@pytest.mark.parametrize(
    ("size", "pieces"),
    [(3, [b"ab"]), (3, [b"abcd"]), (3, []), (0, [b"a"]), (1 << 20, [Hole(1 << 19)]), (5, [Hole(6)]), (2, [b"\0"])],
)
def test_a_wrong_size_is_noticed_and_leaves_the_tree_alone(size: int, pieces: Iterable[Buffer | Hole]) -> None:
    sink = Memory()
    writer = Writer(sink)
    old = put(writer, b"f", b"old")
    with pytest.raises(DataError, match="content"):
        writer.add_file(b"f", FILE, size, pieces)
    assert writer.lookup(b"f") is old
    put(writer, b"g", b"new")
    reader = Reader(writer.finish(), sink.read)
    assert reader.read(reader.stat(b"f"), 0, 9) == b"old"
    assert reader.read(reader.stat(b"g"), 0, 9) == b"new"


BAD: dict[str, Callable[[Writer], object]] = {
    "missing parent": lambda w: put(w, b"absent/f", b""),
    "file as parent": lambda w: put(w, b"f/x", b""),
    "file over folder": lambda w: put(w, b"d", b""),
    "link over folder": lambda w: w.add_symlink(b"d", FILE, b"x"),
    "hard link over folder": lambda w: w.add_hardlink(b"d", b"f"),
    "hard link to folder": lambda w: w.add_hardlink(b"x", b"d"),
    "hard link to nothing": lambda w: w.add_hardlink(b"x", b"absent"),
    "root as file": lambda w: put(w, b"", b""),
    "root removed": lambda w: w.remove(b"/"),
    "long name": lambda w: put(w, b"n" * 256, b""),
    "dot": lambda w: put(w, b"d/./x", b""),
    "dot dot": lambda w: w.add_dir(b"d/../x", FOLDER),
    "empty part": lambda w: put(w, b"d//x", b""),
    "NUL": lambda w: put(w, b"d/a\0b", b""),
    "empty target": lambda w: w.add_symlink(b"l", FILE, b""),
    "long target": lambda w: w.add_symlink(b"l", FILE, b"x" * 4096),
    "target with NUL": lambda w: w.add_symlink(b"l", FILE, b"a\0b"),
    "owner": lambda w: w.add_dir(b"x", Attrs(0o755, uid=-1)),
    "group": lambda w: w.add_dir(b"x", Attrs(0o755, gid=1 << 32)),
    "time": lambda w: w.add_dir(b"x", Attrs(0o755, mtime_ns=10**9 << 63)),
    "device": lambda w: w.add_device(b"x", FILE, stat.S_IFCHR, os.makedev(4096, 0)),
    "attribute without name": lambda w: w.add_dir(b"x", Attrs(0o755, xattrs={b"user.": b""})),
    "attribute without prefix": lambda w: w.add_dir(b"x", Attrs(0o755, xattrs={b"com.apple.x": b""})),
    "attribute's name": lambda w: w.add_dir(b"x", Attrs(0o755, xattrs={b"user." + b"n" * 256: b""})),
    "attribute's value": lambda w: w.add_dir(b"x", Attrs(0o755, xattrs={b"user.a": bytes(65536)})),
    "attributes": lambda w: w.add_dir(b"x", Attrs(0o755, xattrs={b"user.%d" % i: bytes(65000) for i in range(5)})),
}


@pytest.mark.parametrize("action", BAD.values(), ids=BAD.keys())
def test_what_no_image_holds_is_refused(action: Callable[[Writer], object]) -> None:
    writer = Writer(Nowhere())
    writer.add_dir(b"d", FOLDER)
    put(writer, b"f", b"f")
    with pytest.raises(DataError):
        action(writer)
    assert sorted(writer.root.children or ()) == [b"d", b"f"]


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="power of two"):
        Writer(Nowhere(), align=5000)


def test_names_are_replaced_removed_and_linked() -> None:
    writer = Writer(Nowhere())
    writer.add_dir(b"/d/", FOLDER)
    first = put(writer, b"d/f", b"1")
    writer.add_hardlink(b"h", b"d/f")
    second = put(writer, b"d/f", b"2")
    assert (writer.lookup(b"h"), writer.lookup(b"d/f")) == (first, second)
    writer.add_dir(b"d", Attrs(0o700, uid=5))
    assert writer.root.children is not None
    assert writer.root.children[b"d"].children == {b"f": second}
    assert writer.root.children[b"d"].uid == 5
    writer.remove(b"d")
    writer.remove(b"d/f")
    writer.remove(b"absent/x")
    assert writer.root.children == {b"h": first}
    assert writer.lookup(b"d/f") is None


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(0, 5), st.integers(0, 200_000))))
def test_dead_ranges_are_what_no_file_has(steps: list[tuple[bytes, int, int]]) -> None:
    sink = Memory()
    writer = Writer(sink)
    for number, (name, what, size) in enumerate(steps):
        if what == 0:
            writer.remove(name)
        elif what == 1:
            if writer.lookup(name) is not None and name != b"c":
                writer.add_hardlink(b"c", name)
        elif what == 2:
            half = size // 2
            writer.add_file(name, FILE, size + half, [noise(size, number), Hole(half)])
        elif what == 3:
            writer.add_file(name, FILE, size + 100_000, [Hole(100_000), noise(size, number)])
        else:
            put(writer, name, noise(size, number))
    meta = writer.finish()
    dead = bytearray(sink.position)
    last = -1
    for offset, length in writer.dead_ranges():
        assert last < offset
        assert length > 0
        last = offset + length
        dead[offset:last] = b"\1" * length
    reader = Reader(meta, sink.read)
    live = bytearray(sink.position)
    assert writer.root.children is not None
    for name in writer.root.children:
        for extent in reader.extents(reader.stat(name)):
            end = extent.data_offset + extent.length
            live[extent.data_offset : -(-end // 4096) * 4096] = b"\1" * (-(-end // 4096) * 4096 - extent.data_offset)
    assert all(a != b for a, b in zip(dead, live, strict=True))


def everything(writer: Writer) -> None:
    """A tree with about everything, also what only the layout of metadata must get right."""
    time = 1_600_000_000_000_000_000
    put(writer, b"compact", b"x", Attrs(0o644, 1, 2, time))
    put(writer, b"other time", b"x", Attrs(0o644, 1, 2, time + 1))
    put(writer, b"large owner", b"x", Attrs(0o4755, 70_000, 4_000_000_000, time))
    put(writer, b"old", b"x", Attrs(0o644, mtime_ns=-1_500_000_000))
    put(writer, b"big", noise(200_000), Attrs(0o600, mtime_ns=time))
    put(writer, b"empty", b"", Attrs(0o600, mtime_ns=time))
    writer.add_file(b"hole", FILE, 3 << 20, [Hole(3 << 20)])
    writer.add_file(b"sparse", FILE, 3 << 20, [Hole(1 << 20), noise(1 << 20), Hole(1 << 20)])
    capability = {b"security.capability": bytes.fromhex("0100000200200000000000000000000000000000")}
    for number in range(40):
        put(writer, b"capable%d" % number, b"x", Attrs(0o755, mtime_ns=time, xattrs=capability))
        xattrs = {b"user.%d.%d" % (number, i): noise(number * 40, i) for i in range(number % 7)}
        put(writer, b"attributes%d" % number, b"x", Attrs(0o755, mtime_ns=time, xattrs=xattrs | capability))
        size = (number * 211) % 4096
        writer.add_symlink(b"link%d" % number, Attrs(0, mtime_ns=time + number % 2), b"t" * max(size, 1))
        writer.add_dir(b"dir%d" % number, Attrs(0o755, mtime_ns=time + number % 3, xattrs=xattrs))
        for child in range(number * 3):
            put(writer, b"dir%d/%s" % (number, b"n" * (number * 5) + b"%d" % child), b"")
    for size in (1, 4031, 4032, 4033, 4094, 4095):
        writer.add_symlink(b"target%d" % size, FILE, b"t" * size)
    writer.add_dir(b"edges", FOLDER)
    for size in range(200, 256):
        for count in (14, 15, 16, 17):
            path = b"edges/%d-%d" % (size, count)
            writer.add_dir(path, FOLDER)
            for number in range(count):
                put(writer, path + b"/" + (b"%02d" % number).ljust(size, b"n"), b"")
    put(writer, b"\xff\xfe not utf-8\n", b"x")
    put(writer, b"!sorts before the dots", b"x")
    writer.add_device(b"null", Attrs(0o666), stat.S_IFCHR, os.makedev(1, 3))
    writer.add_device(b"disk", Attrs(0o660), stat.S_IFBLK, os.makedev(259, 70_000))
    writer.add_device(b"fifo", Attrs(0o622), stat.S_IFIFO)
    writer.add_device(b"socket", Attrs(0o755), stat.S_IFSOCK)
    writer.add_hardlink(b"hard", b"big")
    writer.add_hardlink(b"dir1/hard", b"big")
    writer.add_hardlink(b"hard fifo", b"fifo")


def paths(node: Node, path: bytes = b"") -> dict[bytes, Node]:
    found = {path: node}
    for name, child in (node.children or {}).items():
        found |= paths(child, path + b"/" + name if path else name)
    return found


def test_everything_comes_back_through_the_reader() -> None:
    sink = Memory()
    writer = Writer(sink)
    everything(writer)
    meta = writer.finish()
    reader = Reader(meta, sink.read)
    wanted, found = paths(writer.root), dict(reader.walk())
    assert wanted.keys() == found.keys()
    assert len(wanted) > 1000
    for path, inode in found.items():
        node = wanted[path]
        assert (inode.mode, inode.uid, inode.gid, inode.mtime_ns) == (node.mode, node.uid, node.gid, node.mtime_ns)
        assert inode.nlink == node.links
        assert reader.xattrs(inode) == dict(node.xattrs)
        if stat.S_ISLNK(node.mode):
            assert reader.readlink(inode) == node.target
        elif stat.S_ISREG(node.mode):
            assert inode.size == node.size
            assert reader.read(inode, 0, node.size) == content(node, sink.data)
    for node in wanted.values():
        size = 64 if meta[node.nid * 32] & 1 else 32
        assert node.nid * 32 // 4096 == (node.nid * 32 + size - 1) // 4096, "an inode crosses a block"
    sizes = {node.links for node in (writer.lookup(b"hard"), writer.lookup(b"dir1/hard")) if node}
    assert sizes == {3}


needs_fsck = pytest.mark.skipif(
    shutil.which("fsck.erofs") is None and not os.environ.get("CI"), reason="needs fsck.erofs"
)


def fsck(folder: Path, meta: bytes, data: bytes | bytearray) -> None:
    (folder / "meta").write_bytes(meta)
    (folder / "data").write_bytes(data)
    command = ["fsck.erofs", f"--device={folder}/data", "--extract", f"{folder}/meta"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_fsck
def test_everything_passes_fsck(tmp_path: Path) -> None:
    sink = Memory()
    writer = Writer(sink)
    everything(writer)
    meta = writer.finish()
    fsck(tmp_path, meta, sink.data)
    damaged = bytearray(meta)
    damaged[1024 + 40] ^= 1
    with pytest.raises(AssertionError):
        fsck(tmp_path, bytes(damaged), sink.data)


@needs_fsck
@pytest.mark.parametrize("count", [34, 35, 36])
def test_inodes_that_end_with_a_block_pass_fsck(tmp_path: Path, count: int) -> None:
    writer = Writer(Nowhere())
    for number in range(count):
        writer.add_device(b"%02d" % number, Attrs(0o600, mtime_ns=-1), stat.S_IFIFO)
    meta = writer.finish()
    assert len(meta) == 4096 * (1 if count == 34 else 2)
    fsck(tmp_path, meta, b"")


def test_an_empty_image_is_one_block() -> None:
    writer = Writer(Nowhere())
    meta = writer.finish()
    assert len(meta) == 4096
    assert Reader(meta).entries(Reader(meta).root) == []


def test_a_frequent_time_makes_small_inodes() -> None:
    sizes = []
    for times in (1, 2):
        writer = Writer(Nowhere())
        for number in range(1000):
            put(writer, b"%d" % number, b"x", Attrs(0o644, mtime_ns=number % times))
        sizes.append(len(writer.finish()))
    assert sizes[0] < sizes[1] - 15_000


def test_links_of_directories() -> None:
    writer = Writer(Nowhere())
    for path in (b"a", b"a/b", b"a/c", b"a/c/d"):
        writer.add_dir(path, FOLDER)
    put(writer, b"a/f", b"")
    reader = Reader(writer.finish())
    found = {path: reader.stat(path).nlink for path in (b"", b"a", b"a/b", b"a/c", b"a/c/d", b"a/f")}
    assert found == {b"": 3, b"a": 4, b"a/b": 2, b"a/c": 3, b"a/c/d": 2, b"a/f": 1}


def test_what_no_small_inode_holds_has_a_large_one() -> None:
    writer = Writer(Nowhere())
    for uid, gid in ((65535, 0), (65536, 0), (0, 65535), (0, 65536), (fmt.HOLE - 1, fmt.HOLE - 1)):
        put(writer, b"%d-%d" % (uid, gid), b"x", Attrs(0o644, uid, gid))
    for size in (0xFFFFFFFF, 1 << 32):
        writer.add_file(b"%d" % size, FILE, size, [Hole(size)])
    put(writer, b"links", b"x")
    for number in range(65_535):
        writer.add_hardlink(b"l%d" % number, b"links")
    reader = Reader(writer.finish())
    for name in (b"65535-0", b"65536-0", b"0-65535", b"0-65536", b"%d-%d" % (fmt.HOLE - 1, fmt.HOLE - 1)):
        inode = reader.stat(name)
        assert b"%d-%d" % (inode.uid, inode.gid) == name
    assert [reader.stat(b"%d" % size).size for size in (0xFFFFFFFF, 1 << 32)] == [0xFFFFFFFF, 1 << 32]
    assert reader.stat(b"links").nlink == 65_536


def test_equal_attributes_are_stored_once() -> None:
    writer = Writer(Nowhere())
    label = noise(3000)
    for number in range(1000):
        put(writer, b"%d" % number, b"x", Attrs(0o644, xattrs={b"security.selinux": label, b"user.n": b"%d" % number}))
    meta = writer.finish()
    assert meta.count(label) == 1
    assert len(meta) < 150_000


SCRIPT = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import test_erofs_writer as t
sink = t.Memory()
writer = t.Writer(sink)
t.everything(writer)
print(hashlib.sha256(writer.finish() + sink.data).hexdigest())
"""


def test_the_same_bytes_whatever_the_hash_seed() -> None:
    found = set()
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
        found.add(done.stdout)
    sink = Memory()
    writer = Writer(sink)
    everything(writer)
    found.add(hashlib.sha256(writer.finish() + sink.data).hexdigest() + "\n")
    assert len(found) == 1


def small(writer: Writer) -> None:
    time = 1_600_000_000_000_000_000
    writer.add_dir(b"", Attrs(0o755, mtime_ns=time))
    writer.add_dir(b"d", Attrs(0o2750, 1, 2, time, {b"user.a": b"1", b"trusted.b": b"2"}))
    put(writer, b"d/empty", b"", Attrs(0o600, mtime_ns=time))
    put(writer, b"d/one", b"x" * 5000, Attrs(0o4755, 70_000, 0, time + 1, {b"user.a": b"1"}))
    writer.add_file(b"holes", Attrs(0o644), 300_000, [Hole(100_000), b"y" * 70_000, Hole(130_000)])
    writer.add_symlink(b"link", Attrs(0, mtime_ns=-1), b"d/one")
    writer.add_device(b"null", Attrs(0o666, mtime_ns=time), stat.S_IFCHR, os.makedev(1, 3))
    writer.add_hardlink(b"\xff", b"d/one")
    for number in range(300):
        writer.add_device(b"d/%d" % number, Attrs(0o600, mtime_ns=time), stat.S_IFIFO)


def test_golden_image() -> None:
    """Images written once stay the same: a converted image is known by the digest of its bytes."""
    golden = Path(__file__).parent.parent / "golden" / "erofs" / "meta-1.zlib"
    sink = Memory()
    writer = Writer(sink)
    small(writer)
    meta = writer.finish()
    assert meta == zlib.decompress(golden.read_bytes())
    assert hashlib.sha256(sink.data).hexdigest() == "ef472edd173c5e538effc0d1ebe20d6b428f076d3aba998171f1dfdb6906f095"


def test_the_order_of_calls_changes_data_only() -> None:
    """Names sort in metadata whatever order they came in."""
    metas = []
    for order in ([b"a", b"b", b"c"], [b"c", b"a", b"b"]):
        writer = Writer(Nowhere())
        for name in order:
            writer.add_dir(name, FOLDER)
            writer.add_symlink(name + b"/l", FILE, name)
        metas.append(writer.finish())
    assert metas[0] == metas[1]


def test_memory_does_not_grow_with_contents() -> None:
    import tracemalloc

    piece = noise(1 << 20)
    writer = Writer(Nowhere())
    tracemalloc.start()
    for number in range(8):
        writer.add_file(b"%d" % number, FILE, 128 << 20, [piece] * 128)
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()
