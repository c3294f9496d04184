"""Lengths before messages are varints, as protobuf itself writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.hdfs.framing import delimited, locate
from bootseer.hdfs.proto import hdfs_pb2 as wire


@pytest.mark.parametrize("length", [0, 1, 127, 128, 300, 1 << 21])
def test_a_message_lies_behind_its_length(length):
    message = wire.BlockOpResponse(status=0, message="x" * length)
    raw, data = delimited(message), message.SerializeToString()
    begin = len(raw) - len(data)
    assert raw[begin:] == data
    assert locate(raw) == locate(raw[:begin]) == (begin, len(raw))
    assert locate(b"123" + raw, 3) == (begin + 3, len(raw) + 3)
    assert locate(raw[: begin - 1]) is None


@given(st.integers(0, 2**35 - 1))
def test_lengths_are_those_of_protobuf(number):
    raw = wire.Block(pool="", id=number, generation=0).SerializeToString()[3:]
    found = locate(raw)
    assert found is not None
    assert found[1] - found[0] == number


def test_what_is_no_length():
    with pytest.raises(ValueError, match="5 bytes"):
        locate(b"\xff" * 5)
