"""The striped store, the same promises over a folder and over real HDFS."""

import os
import uuid

import pytest

from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError
from bootseer.stripefs import open_fs
from bootseer.stripefs.store import StripeFS
from support import hadoop
from support.stripes import content


@pytest.fixture(params=["folder", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def fs(request, tmp_path) -> StripeFS:
    if request.param == "folder":
        return open_fs(str(tmp_path / "store"))
    return open_fs(f"{hadoop.shared().url}/{uuid.uuid4().hex}")


def write(fs: StripeFS, path: str, data: bytes, **options: int) -> None:
    with fs.create(path, striped=True, **{"unit": 65536, **options}) as out:
        out.write(data)


def names(fs: StripeFS, folder: str) -> list[str]:
    return [entry.name for entry in fs.backend.list(folder)]


def test_round_trip_of_files_of_all_kinds(fs, tmp_path):
    sizes = {"empty": 0, "small": 1000, "large": (9 << 20) + 5}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
        fs.put(tmp_path / name, f"d/{name}", width=3)
    for name, size in sizes.items():
        assert fs.get(f"d/{name}", tmp_path / "back") == size
        assert (tmp_path / "back").read_bytes() == (tmp_path / name).read_bytes()
    assert [(stat.path, stat.size, stat.striped) for stat in fs.ls("d")] == [
        ("d/empty", 0, False),
        ("d/large", sizes["large"], True),
        ("d/small", 1000, False),
    ]
    assert len(fs.verify("d")) == 3
    with fs.open("d/large") as file:
        data = (tmp_path / "large").read_bytes()
        for offset in (0, 1, 1 << 20, (5 << 20) - 1, sizes["large"] - 10):
            assert file.read(offset, 10) == data[offset : offset + 10]


def test_checkpoints(fs):
    write(fs, "step-1/state.pt", os.urandom(300_000))
    with pytest.raises(DataError, match="has no COMMIT"):
        fs.checkpoint("step-1")
    with pytest.raises(NotFoundError):
        fs.latest("")
    fs.commit("step-1")
    with pytest.raises(NotWritableError):
        fs.commit("step-1")
    write(fs, "step-2/state.pt", os.urandom(300_000))
    assert fs.latest("") == "step-1"
    assert fs.checkpoint("step-1").size == 300_000
    with pytest.raises(NotFoundError, match="no checkpoint step-3"):
        fs.checkpoint("step-3")


def test_an_overtaken_writer_gives_up(fs):
    write(fs, "f", b"one" * 50_000)
    late = fs.create("f", striped=True, unit=65536)
    late.write(b"late" * 50_000)
    write(fs, "f", b"two" * 50_000)
    with pytest.raises(NotWritableError, match="another writer"):
        late.finish()
    assert content(fs, "f") == b"two" * 50_000
    assert len(names(fs, ".bsx")) == 4


def test_names_in_the_way(fs):
    write(fs, "d/f", b"x")
    with pytest.raises(NotWritableError, match="folder"):
        fs.create("d")
    with pytest.raises(NotFoundError, match="folder"):
        fs.open("d")
    with pytest.raises(BootseerError):
        write(fs, "d/f/g", b"x")
    with pytest.raises(NotFoundError):
        fs.ls("none")
