"""Our tar reader against archives written by the standard library and by GNU tar."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import DataError
from bootseer.oci import tar
from support.images import Member, folder, tar_of


def chunks(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def read(data: bytes, size: int = 1 << 16) -> list[tuple[tar.Entry, bytes]]:
    reader = tar.ChunkReader(chunks(data, size))
    return [(entry, reader.exact(entry.size)) for entry in tar.entries(reader)]


names = st.lists(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60),
                 min_size=1, max_size=6).map("/".join)  # fmt: skip
members = st.builds(
    Member,
    kind=st.just("file"),
    link=st.just(""),
    device=st.just((0, 0)),
    name=names.filter(lambda n: n.strip("/") == n and "\n" not in n),
    data=st.binary(max_size=3000),
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 2**32 - 2),
    gid=st.integers(0, 2**32 - 2),
    mtime_ns=st.integers(0, 2**62),
    xattrs=st.dictionaries(st.from_regex(r"user\.[a-z]{1,9}", fullmatch=True), st.binary(max_size=80), max_size=3),
)


@given(st.lists(members, max_size=5), st.integers(1, 5000))
def test_pax_archives_come_back(wanted: list[Member], size: int) -> None:
    got = read(tar_of(wanted), size)
    assert [
        (m.name.encode(), m.data, m.mode, m.uid, m.gid, m.mtime_ns, {k.encode(): v for k, v in m.xattrs.items()})
        for m in wanted
    ] == [(e.name, data, e.mode, e.uid, e.gid, e.mtime_ns, e.xattrs) for e, data in got]


@pytest.mark.parametrize("fmt", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_non_utf8_names(fmt: int) -> None:
    odd = os.fsdecode(b"caf\xe9-" + b"n" * 200)
    wanted = [
        Member(odd, data=b"x"),
        Member("l" * 180, "symlink", link="t" * 190),
        Member("h", "hardlink", link=odd),
        folder("d" * 120),
        Member("c", "char", device=(1, 3)),
        Member("p", "fifo"),
    ]
    got = [entry for entry, _ in read(tar_of(wanted, fmt))]
    assert [e.name.rstrip(b"/") for e in got] == [os.fsencode(m.name) for m in wanted]
    assert [e.link for e in got[1:3]] == [b"t" * 190, os.fsencode(odd)]
    assert (got[4].major, got[4].minor) == (1, 3)
    assert [e.kind for e in got] == [tar.REGULAR, tar.SYMLINK, tar.HARDLINK, tar.DIRECTORY, tar.CHAR, tar.FIFO]


def test_ustar_prefix_and_large_numbers() -> None:
    name = "p" * 100 + "/" + "n" * 90
    (entry, _), *_ = read(tar_of([Member(name)], tarfile.USTAR_FORMAT))
    assert entry.name == name.encode()
    (entry, _), *_ = read(tar_of([Member("a", uid=2**30, mtime_ns=-5 * 10**9)], tarfile.GNU_FORMAT))
    assert (entry.uid, entry.mtime_ns) == (2**30, -5 * 10**9)


@pytest.mark.parametrize("options", [["--format=gnu"], ["--format=posix"], ["--format=posix", "--sparse-version=0.0"],
                                     ["--format=posix", "--sparse-version=0.1"]])  # fmt: skip
def test_sparse_members_of_gnu_tar(tmp_path: Path, options: list[str]) -> None:
    path = tmp_path / "holes"
    with open(path, "wb") as file:
        for number in range(40):  # more extents than one header holds
            file.seek(number * 100_000 + 4096)
            file.write(bytes([number + 1]) * 3000)
        file.truncate(9_000_001)
    data = subprocess.run(["tar", "-S", *options, "-cf", "-", "-C", tmp_path, "holes"], capture_output=True, check=True)
    ((entry, body),) = read(data.stdout, 777)
    assert entry.extents is not None
    assert entry.size < 1_000_000
    whole, at = bytearray(entry.file_size), 0
    for offset, length in entry.extents:
        whole[offset : offset + length] = body[at : at + length]
        at += length
    assert entry.name == b"holes"
    assert bytes(whole) == path.read_bytes()


def test_every_truncation_is_an_error_or_a_prefix() -> None:
    data = tar_of([Member("a", data=b"1" * 700), Member("b", data=b"2" * 100)])
    whole = read(data)
    content = 512 * (len(data.rstrip(b"\0")) // 512 + 1)
    for end in range(0, len(data) - 1024, 61):
        try:
            got = read(data[:end])
        except DataError:
            continue
        assert got == whole[: len(got)]
        assert end % 512 == 0 or end > content


@given(st.integers(0, 511), st.integers(1, 255))
def test_a_changed_header_byte_is_noticed(at: int, change: int) -> None:
    data = bytearray(tar_of([Member("a", data=b"1" * 700)], tarfile.USTAR_FORMAT))
    data[at] ^= change
    before = tar_of([Member("a", data=b"1" * 700)], tarfile.USTAR_FORMAT)
    try:
        got = read(bytes(data))
    except DataError:
        return
    # the checksum field itself may be written in other ways that mean the same number
    assert 148 <= at < 156
    assert got == read(before)


@given(st.binary(max_size=3000))
def test_noise_never_gives_another_error(noise: bytes) -> None:
    with contextlib.suppress(DataError):
        read(noise)


def test_hostile_extended_headers() -> None:
    def pax(records: bytes) -> bytes:
        info = tarfile.TarInfo("x")
        info.type = tarfile.XHDTYPE
        info.size = len(records)
        body = info.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512)
        return body + tar_of([Member("a")], tarfile.USTAR_FORMAT)

    for records in (b"9999 path=x\n", b"3 x", b"0 a=b\n", b"-5 a=b\n", b"11 size=-9\n", b"12 size=abc\n",
                    b"22 GNU.sparse.map=0,9\n"):  # fmt: skip
        with pytest.raises(DataError):
            read(pax(records))
    big = tarfile.TarInfo("x")
    big.type, big.size = tarfile.XHDTYPE, tar.MAX_EXTENDED + 1
    with pytest.raises(DataError):
        read(big.tobuf(tarfile.USTAR_FORMAT))


def test_bytes_after_the_end_are_read_for_the_digest() -> None:
    reader = tar.ChunkReader(iter([tar_of([Member("a")]), b"x" * 5000]))
    assert len(list(tar.entries(reader))) == 1
    assert reader.at_end()


def test_unconsumed_data_is_a_programming_error() -> None:
    reader = tar.ChunkReader(iter([tar_of([Member("a", data=b"123"), Member("b")])]))
    with pytest.raises(DataError, match="consumed"):
        list(tar.entries(reader))


def test_same_as_tarfile_for_the_host(tmp_path: Path) -> None:
    data = subprocess.run(["tar", "-C", "/etc", "-cf", "-", "--ignore-failed-read", "init.d", "alternatives"],
                          capture_output=True, check=False).stdout  # fmt: skip
    ours = {e.name: (e.kind, e.mode, e.uid, e.gid, e.size, e.link) for e, _ in read(data)}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        theirs = {
            os.fsencode(m.name + ("/" if m.isdir() else "")): (
                m.type,
                m.mode,
                m.uid,
                m.gid,
                m.size,
                m.linkname.encode(),
            )
            for m in archive
        }
    assert ours == theirs


def header(kind: bytes, size: int, pax: dict[str, str] | None = None, **fields: bytes) -> bytes:
    info = tarfile.TarInfo("f")
    info.type, info.size, info.pax_headers = tarfile.REGTYPE, size, pax or {}
    head = bytearray(info.tobuf(tarfile.PAX_FORMAT))
    block = memoryview(head)[-512:]
    block[156:157] = kind
    for at, value in fields.items():
        block[int(at[1:]) : int(at[1:]) + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(head)


def test_an_empty_record_says_nothing() -> None:
    names = dict.fromkeys(("path", "linkpath", "size", "uid", "gid", "mtime"), "")
    ((entry, _),) = read(header(b"0", 3, names | {"SCHILY.xattr.user.a": ""}, _108=b"0000007\0") + bytes(1536))
    assert (entry.name, entry.size, entry.uid, entry.mtime_ns, entry.xattrs) == (b"f", 3, 7, 0, {b"user.a": b""})


def test_a_long_sparse_map_is_read_once() -> None:
    count = 1 << 20
    text = b"%d\n" % count + b"0\n0\n" * count
    text += bytes(-len(text) % 512)
    names = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "0"}
    began = time.process_time()
    ((entry, _),) = read(header(b"0", len(text), names) + text)
    assert time.process_time() - began < 5  # each block once joined to, and counted in, all before it: a minute
    assert entry.extents == []  # empty ones say nothing


def test_sparse_maps_are_bounded() -> None:
    block = b"00000000000\0" * 42 + b"\1" + bytes(7)
    first = header(b"S", 0, _257=b"ustar  \0", _482=b"\1", _483=b"00000000000\0")
    ((entry, _),) = read(first + block * 1000 + bytes(512))
    assert entry.extents == []
    with pytest.raises(DataError, match="sparse map"):
        read(first + block * (tar.MAX_EXTENDED // 512 + 1) + bytes(512))
    names = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    with pytest.raises(DataError, match="sparse map"):
        read(header(b"0", 512, names) + b"9" * 30 + b"\n" + bytes(481))


@pytest.mark.parametrize("size", [1 << 63, 1 << 70])
def test_no_file_is_larger_than_an_offset(size: int) -> None:
    for names in ({"GNU.sparse.map": "0,0"}, {"GNU.sparse.map": f"{size - 1},0"}, {"GNU.sparse.map": ""}):
        with pytest.raises(DataError, match="malformed tar header"):
            read(header(b"0", 0, {**names, "GNU.sparse.size": str(size)}) + bytes(1024))
    with pytest.raises(DataError, match="sparse map does not fit"):
        read(header(b"0", 512, {"GNU.sparse.map": f"{size - 512},512", "GNU.sparse.size": str(size)}) + bytes(1536))


def test_where_an_archive_ends() -> None:
    """As Go's archive/tar, which container engines use, has it: two blocks of zeros, or the end of the stream."""
    one, zero = tar_of([Member("a")])[:512], bytes(512)
    if one[156:157] == b"x":
        one = header(b"0", 0)
    for end in (b"", zero, zero * 2, zero * 20, zero * 2 + one):
        assert len(read(one + end)) == 1
    with pytest.raises(DataError, match="lone"):
        read(one + zero + one)
    with pytest.raises(DataError, match="ends inside"):
        read(one + zero + b"\0" * 100)


def test_what_only_begins_like_the_end_of_a_tar_is_none() -> None:
    """File systems begin with zeros: EROFS with 1,024 of them, ext4 as well."""
    for magic in (b"\xe2\xe1\xf5\xe0", b"\0" * 56 + b"\x53\xef"):
        with pytest.raises(DataError, match="no member, and more than zeros"):
            read(bytes(1024) + magic + bytes(4096))
    assert read(bytes(10240)) == []
    whole = tar_of([Member("a", data=b"x")])
    assert len(read(whole + b"left by some tool" * 99)) == 1  # as other readers have it
