"""Writing and reading OCI layouts, and decompression of their layers."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from bootseer import oci
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError
from bootseer.oci import inflate as inflate_module
from bootseer.oci.inflate import inflate
from support.images import Member, write_image


def plain(layout: Path, tag: str, index: int = 0) -> bytes:
    with oci.open_image(f"oci:{layout}:{tag}") as image:
        return b"".join(inflate(image.layer_chunks(index), "layer"))


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_layers_come_back_and_the_digest_is_stable(tmp_path: Path, compression: str) -> None:
    layers = [[Member("a", data=os.urandom(3_000_000))], [Member("b", data=bytes(5_000_000))]]
    first = write_image(tmp_path / "one", layers, compression=compression)  # type: ignore[arg-type]
    assert write_image(tmp_path / "two", layers, compression=compression) == first  # type: ignore[arg-type]
    with oci.open_image(f"oci:{tmp_path}/one:v1") as image:
        assert image.digest == first
        assert image.platform == oci.host_platform()
        for index, diff in enumerate(image.config.rootfs.diff_ids):
            assert "sha256:" + hashlib.sha256(plain(tmp_path / "one", "v1", index)).hexdigest() == diff
        blob = (tmp_path / "one/blobs/sha256" / image.layers[0].hex).read_bytes()
        assert b"".join(image.layer_chunks(0)) == blob


def test_tags(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    one = write_image(layout, [[Member("a")]], tag="one")
    assert oci.resolve_digest(f"oci:{layout}") == one
    two = write_image(layout, [[Member("b")]], tag="two")
    assert oci.resolve_digest(f"oci:{layout}:one") == one
    assert oci.resolve_digest(f"oci:{layout}@{two}") == two
    with pytest.raises(ConfigError, match=r"several images.*one, two"):
        oci.open_image(f"oci:{layout}")
    with pytest.raises(NotFoundError, match=r"does not exist in layout.*it has one, two"):
        oci.open_image(f"oci:{layout}:three")
    moved = write_image(layout, [[Member("c")]], tag="one")
    assert oci.resolve_digest(f"oci:{layout}:one") == moved


def test_damaged_documents(tmp_path: Path) -> None:
    digest = write_image(tmp_path / "layout", [[Member("a")]])
    path = tmp_path / "layout/blobs/sha256" / digest[7:]
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError, match="does not match its digest"):
        oci.open_image(f"oci:{tmp_path}/layout")
    path.unlink()
    with pytest.raises(NotFoundError, match=r"manifest of .* is missing"):
        oci.open_image(f"oci:{tmp_path}/layout")
    (tmp_path / "layout/index.json").write_text("[]")
    with pytest.raises(DataError, match="not a valid index"):
        oci.open_image(f"oci:{tmp_path}/layout")


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 3, 1000, 1 << 20])
@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_members_and_frames_one_after_another(kind: str, size: int) -> None:
    parts = [b"one" * 1000, b"", b"two" * 2000]
    pack = gzip.compress if kind == "gzip" else zstandard.ZstdCompressor().compress
    data = b"".join(pack(part) for part in parts)
    assert b"".join(inflate(pieces(data, size), "layer")) == b"".join(parts)
    assert b"".join(inflate(pieces(b"plain", size), "layer")) == b"plain"


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_bomb_comes_in_small_chunks(kind: str) -> None:
    pack = gzip.compress if kind == "gzip" else zstandard.ZstdCompressor().compress
    sizes = [len(chunk) for chunk in inflate(iter([pack(bytes(100 << 20))]), "layer")]
    assert (sum(sizes), max(sizes) <= 1 << 20) == (100 << 20, True)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_bomb_ends_where_no_layer_goes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many times its compressed size, beyond what an honest layer with a file of zeros may have."""
    monkeypatch.setattr(inflate_module, "FREE", 16 << 20)
    pack = gzip.compress if kind == "gzip" else zstandard.ZstdCompressor().compress
    sizes = map(len, inflate(iter([pack(bytes(100 << 20))]), "layer 7"))
    assert sum(itertools.islice(sizes, 16)) <= 16 << 20
    with pytest.raises(DataError, match="layer 7 is a bomb"):
        list(itertools.islice(sizes, 10))
    honest = os.urandom(1 << 20) + bytes(100 << 20)
    assert b"".join(inflate(pieces(pack(honest), 1 << 16), "layer")) == honest


def test_truncated_gzip_is_named() -> None:
    data = gzip.compress(os.urandom(100_000))
    for end in (len(data) - 1, len(data) - 9, 50_000, 5):
        with pytest.raises(DataError, match=r"layer 7 is (truncated|corrupt)"):
            list(inflate(pieces(data[:end], 1000), "layer 7"))


@pytest.mark.parametrize("name", ["index.json", "blob"])
def test_a_layout_of_a_neighbour_holds_nobody_up_and_shows_nothing(tmp_path: Path, name: str) -> None:
    """A pipe, a file without end, a link to what is its reader's."""
    root = tmp_path / "layout"
    digest = write_image(root, [[Member("a")]])
    path = root / "index.json" if name == "index.json" else root / "blobs/sha256" / digest.removeprefix("sha256:")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BootseerError, match="a device, a pipe or a socket"):
        oci.open_image(f"oci:{root}")
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(BootseerError, match="a device, a pipe or a socket"):
        oci.open_image(f"oci:{root}")
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match="is larger than"):
        oci.open_image(f"oci:{root}")
