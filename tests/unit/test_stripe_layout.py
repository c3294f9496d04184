"""Geometry and codecs of striped files, and their golden files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import ConfigError, DataError
from bootseer.stripefs import layout, open_fs
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.layout import Footer, Geometry, Header, Pointer
from bootseer.stripefs.maintenance import check

GOLDEN = Path(__file__).parent.parent / "golden" / "stripe"
UUID = bytes(range(16))
HEADER = Header(UUID, 2, 4, 1 << 20, 7)
NAMED = Header(UUID, 2, 4, 1 << 20, 7, "größe-état.pt")
FOOTER = Footer(UUID, 2, 3 << 20, 11 << 20, (1, 0xFFFFFFFF, 0x12345678))
POINTER = Pointer(
    uuid=UUID.hex(),
    size=11 << 20,
    unit=1 << 20,
    width=4,
    footers=(1, 2, 3, 0xFFFFFFFF),
    digest="ab" * 32,
    epoch=7,
    name="state.pt",
)
COMMIT = commit.Commit(
    created=1750000000.5,
    files=(
        commit.CommittedFile(path="config.json", size=2, digest="cd" * 32, uuid=""),
        commit.CommittedFile(path="state.pt", size=11 << 20, digest="ab" * 32, uuid=UUID.hex()),
    ),
)


def geometries():
    return st.builds(Geometry, st.integers(0, 5000), st.integers(1, 64), st.integers(1, 20))


@given(geometries())
def test_stripes_hold_every_byte_once(geometry):
    assert sum(geometry.stripe_data(stripe) for stripe in range(geometry.width)) == geometry.size
    assert sum(geometry.stripe_chunks(stripe) for stripe in range(geometry.width)) == geometry.chunks


@given(st.binary(min_size=16, max_size=16), st.integers(0, 255), st.integers(1, 256), st.integers(0, 2**63), st.text())
def test_header_round_trip(uuid, stripe, width, epoch, name):
    header = Header(uuid, stripe, width, 1 << 20, epoch, name.encode("utf-8", "ignore").decode())
    encoded = layout.encode_header(header)
    assert len(encoded) == layout.HEADER_SIZE
    assert layout.decode_header(encoded, "x") == header


def test_names_of_any_bytes_and_names_that_are_too_long():
    odd = NAMED._replace(name="\udcff\udc80x")  # not UTF-8 on disk
    assert layout.decode_header(layout.encode_header(odd), "x") == odd
    longest = NAMED._replace(name="n" * layout.MAX_NAME)
    assert layout.decode_header(layout.encode_header(longest), "x") == longest
    assert layout.decode_header(layout.encode_header(longest._replace(name=longest.name + "n")), "x").name == ""


@pytest.mark.parametrize("length", [1, 1025, 2**32 - 1])
def test_a_name_that_does_not_fit_is_damage(length):
    data = bytearray(layout.encode_header(HEADER))
    data[60:64] = length.to_bytes(4, "little")
    with pytest.raises(DataError, match="header of x is damaged"):
        layout.decode_header(bytes(data), "x")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.integers(0, 2**60))
def test_footer_round_trip(crcs, size):
    footer = Footer(UUID, 1, size // 4, size, tuple(crcs))
    encoded, crc = layout.encode_footer(footer)
    assert len(encoded) == layout.footer_length(len(crcs))
    assert layout.decode_footer(encoded, "x") == (footer, crc)


@given(
    st.integers(0, 2**60),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=256),
    st.integers(1, 16384),
    st.integers(0, 2**40),
)
def test_pointer_round_trip(size, footers, pages, epoch):
    pointer = Pointer(
        uuid=UUID.hex(),
        size=size,
        unit=4096 * pages,
        width=len(footers),
        footers=tuple(footers),
        digest="",
        epoch=epoch,
        name="f" * (epoch % 3),
    )
    encoded = layout.encode_pointer(pointer)
    assert layout.is_pointer(encoded)
    assert layout.decode_pointer(encoded, "x") == pointer


@pytest.mark.parametrize("name", ["header", "named", "footer", "pointer", "commit"])
def test_every_flipped_byte_and_every_truncation_is_seen(name):
    encoded, decode = {
        "header": (layout.encode_header(HEADER)[:60], lambda data: layout.decode_header(data.ljust(4096, b"\0"), "x")),
        # up to the end of its name: what follows are zeros that say nothing
        "named": (
            layout.encode_header(NAMED)[: 64 + len(NAMED.name.encode()) + 4],
            lambda data: layout.decode_header(data.ljust(4096, b"\0"), "x"),
        ),
        "footer": (layout.encode_footer(FOOTER)[0], lambda data: layout.decode_footer(data, "x")),
        "pointer": (layout.encode_pointer(POINTER), lambda data: layout.decode_pointer(data, "x")),
        "commit": (commit.encode(COMMIT), lambda data: commit.decode(data, "x")),
    }[name]
    decode(encoded)
    for position in range(len(encoded)):
        broken = bytearray(encoded)
        broken[position] ^= 0x20
        with pytest.raises(DataError):
            decode(bytes(broken))
        if (name, position) == ("named", 60):
            continue  # zeros from there on are a header without name
        with pytest.raises(DataError):
            decode(encoded[:position])


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("header-2", layout.encode_header(HEADER)),
        ("named-header-2", layout.encode_header(NAMED)),
        ("footer-2", layout.encode_footer(FOOTER)[0]),
        ("pointer-1", layout.encode_pointer(POINTER)),
        ("commit-1", commit.encode(COMMIT)),
    ],
)
def test_golden_files(name, encoded):
    """Files written by this version stay readable, and the format does not change unseen."""
    golden = (GOLDEN / name).read_bytes()
    assert encoded == golden


def test_golden_files_decode():
    assert layout.decode_header((GOLDEN / "header-2").read_bytes(), "x") == HEADER
    assert layout.decode_header((GOLDEN / "named-header-2").read_bytes(), "x") == NAMED
    assert layout.decode_footer((GOLDEN / "footer-2").read_bytes(), "x")[0] == FOOTER
    assert layout.decode_pointer((GOLDEN / "pointer-1").read_bytes(), "x") == POINTER
    assert commit.decode((GOLDEN / "commit-1").read_bytes(), "x") == COMMIT


def test_the_golden_store_is_read_and_sound():
    """A whole store as this version wrote it: a striped file, a small one, COMMIT and a claim."""
    fs = open_fs(str(GOLDEN / "store-1"))
    assert fs.latest("run") == "run/step-1"
    with fs.open("run/step-1/state.pt") as file:
        assert file.read(0, file.size) == bytes(i * 7 % 251 for i in range(10_000))
    assert [file.path for file in fs.checkpoint("run/step-1").files] == ["config.json", "state.pt"]
    assert len(fs.verify()) == 3
    assert check.fsck(fs.backend).findings == ()


def test_a_later_format_says_so():
    data = bytearray(layout.encode_header(HEADER))
    data[8] += 1
    with pytest.raises(DataError, match="format 3"):
        layout.decode_header(bytes(data), "x")


@pytest.mark.parametrize(
    "change",
    [
        {"width": 0, "footers": ()},
        {"width": 3},
        {"unit": 4097},
        {"size": -1},
        {"uuid": "AB" * 16},
        {"uuid": "zz"},
        {"dir": ""},
        {"dir": "a//b"},
        {"dir": "other"},
        {"dir": "../.bsx"},
        {"dir": "../../home/somebody/.bsx"},
    ],
)
def test_a_pointer_with_impossible_values_is_damaged(change):
    import msgspec

    bad = layout.encode_text(layout.POINTER_LINE, msgspec.to_builtins(POINTER) | change)
    with pytest.raises(DataError, match="pointer x is damaged"):
        layout.decode_pointer(bad, "x")


@pytest.mark.parametrize(("width", "unit"), [(0, 4096), (257, 4096), (1, 0), (1, 5000), (1, 128 << 20)])
def test_shapes_that_the_format_has_not(width, unit):
    with pytest.raises(ConfigError):
        layout.check_shape(width, unit)
