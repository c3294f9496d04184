"""Reading a file from start to end, one piece ahead of its user."""

import os
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.errors import DataError
from bootseer.stripefs import open_fs
from bootseer.stripefs.files.reader import in_order

UNIT = 4096


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, 12 * UNIT), piece=st.integers(UNIT // 3, 5 * UNIT))
def test_all_bytes_in_order(tmp_path, size, piece):
    fs, data = open_fs(str(tmp_path)), os.urandom(size)
    with fs.create("f", striped=True, unit=UNIT, width=3) as out:
        out.write(data)
    with fs.open("f") as file:
        assert b"".join(bytes(view) for view in in_order(file, piece=piece)) == data


def test_an_error_comes_after_the_pieces_before_it_and_no_thread_stays(tmp_path):
    fs, data = open_fs(str(tmp_path)), os.urandom(9 * UNIT)
    with fs.create("f", striped=True, unit=UNIT, width=1) as out:
        out.write(data)
    (stripe,) = (tmp_path / ".bsx").iterdir()
    content = bytearray(stripe.read_bytes())
    content[4096 + 5 * UNIT] ^= 1
    stripe.write_bytes(content)
    seen = []
    with fs.open("f") as file, pytest.raises(DataError, match="chunk 5"):
        seen.extend(bytes(view) for view in in_order(file, piece=UNIT))
    with fs.open("f") as file:
        pieces = in_order(file, piece=UNIT)
        assert bytes(next(pieces)) == data[:UNIT]
        pieces.close()
    assert not [thread for thread in threading.enumerate() if "inorder" in thread.name]
