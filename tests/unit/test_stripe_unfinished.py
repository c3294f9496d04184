"""A file that is being written through a mount, when the disk below its spool or the store refuses."""

import contextlib
import errno
import os

import pytest

from bootseer.errors import FullError
from bootseer.fsmount.spool import Spool, Spools
from bootseer.fsmount.unfinished import Unfinished
from bootseer.stripefs import open_fs
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.files.reader import content_of

PIECE = memoryview(b"a" * 1000)


def name(writer, pointer):
    return content_of(writer._backend.stat(writer.temporary).version, pointer.uuid if pointer else "")


def no_room(*args, **kwargs):
    raise FullError("the quota of the store is used up")


def test_a_write_that_neither_spool_nor_store_could_take_is_not_taken_the_next_time(tmp_path, monkeypatch):
    fs = open_fs(str(tmp_path / "store"))
    fs.backend.make_folder("")
    file = Unfinished(fs, "f", spools := Spools(tmp_path, 1500), width=2, unit=4096)
    file.write(0, PIECE)
    with monkeypatch.context() as full:
        full.setattr(type(fs), "create", no_room)
        for _ in range(2):
            with pytest.raises(FullError):
                file.write(1000, PIECE)
    file.write(1000, PIECE)  # there is room in the store now
    file.publish(name)
    with fs.open("f") as stored:
        assert stored.read(0, stored.size) == bytes(PIECE) * 2
    file.discard()
    assert spools.try_take(1500)


def test_what_is_stored_is_read_on_after_an_append_that_failed(tmp_path, monkeypatch):
    fs = open_fs(str(tmp_path / "store"))
    with fs.create("f") as out:
        out.write(b"b" * 5000)
    base = fs.open("f")
    file = Unfinished(fs, "f", spools := Spools(tmp_path, 100), width=2, unit=4096, base=base)
    ahead = ReadAhead()
    try:
        with monkeypatch.context() as full:
            full.setattr(type(fs), "create", no_room)
            with pytest.raises(FullError):
                file.write(5000, PIECE)
        assert (file.size, file.changed) == (5000, False)
        assert bytes(file.read(ahead, 0, 6000)) == b"b" * 5000
        file.write(5000, PIECE)
        file.publish(name)
    finally:
        ahead.close()
    with fs.open("f") as stored:
        assert stored.read(0, stored.size) == b"b" * 5000 + bytes(PIECE)
    file.discard()
    assert spools.try_take(100)


def test_while_the_stored_bytes_are_fetched_for_an_append_the_size_is_that_of_all(tmp_path, monkeypatch):
    fs = open_fs(str(tmp_path / "store"))
    with fs.create("f") as out:
        out.write(b"b" * 5000)
    file = Unfinished(fs, "f", Spools(tmp_path), width=2, unit=4096, base=fs.open("f"))
    sizes = []
    real = Spool.keep

    def keep(self, offset, data):
        sizes.append((file.size, file.changed))
        return real(self, offset, data)

    monkeypatch.setattr(Spool, "keep", keep)
    file.write(5000, PIECE)
    assert {size for size, _ in sizes} == {5000}
    assert file.size == 6000
    file.discard()


@pytest.mark.parametrize("spool", [1 << 20, 0])
def test_stored_bytes_can_change_once_something_was_added_to_them_in_a_spool(tmp_path, spool):
    fs = open_fs(str(tmp_path / "store"))
    with fs.create("f") as out:
        out.write(b"b" * 5000)
    file = Unfinished(fs, "f", Spools(tmp_path, spool), width=2, unit=4096, base=fs.open("f"))
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        file.write(0, PIECE)
    file.write(5000, PIECE)
    with contextlib.nullcontext() if spool else pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        file.write(0, PIECE)
    file.publish(name)
    with fs.open("f") as stored:
        assert stored.read(0, stored.size) == bytes(PIECE if spool else b"b" * 1000) + b"b" * 4000 + bytes(PIECE)
    file.discard()


@pytest.mark.parametrize("size", [5000, 5 << 20])
def test_what_another_writer_put_in_its_place_is_not_added_to(tmp_path, size):
    """Not even when it has the same size."""
    fs, data = open_fs(str(tmp_path / "store")), b"a" * size
    fs.backend.make_folder("")
    file = Unfinished(fs, "f", Spools(tmp_path, 0), width=2, unit=4096)
    file.write(0, memoryview(data))
    file.publish(name)
    with fs.create("f", unit=4096, width=2) as out:
        out.write(b"b" * size)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        file.write(size, PIECE)
    file.discard()
