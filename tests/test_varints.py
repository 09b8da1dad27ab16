"""Packed integers, against an encoder that is not ours to decode with."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tfrecords import varint

from beamjax.sources.varints import decode_varints

INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=200)
@hypothesis.given(st.integers(0, 5), st.data())
def test_lists(count, data):
    lists = data.draw(st.lists(st.lists(INT64, min_size=count, max_size=count), max_size=8))
    packed = [b"".join(map(varint, numbers)) for numbers in lists]
    found = decode_varints(packed, count)
    assert found.dtype == np.int64
    assert found.tolist() == [number for numbers in lists for number in numbers]


@pytest.mark.parametrize(
    "lists",
    [[b"\x01", b""], [b"\x01\x02", b"\x01"], [b"\x81", b"\x01\x01"], [b"\x80" * 10 + b"\x01"],
     [b"\x01\x80"], [b"", b"\x01\x02"], [b"\x80", b"\x80"]],
)  # fmt: skip
def test_what_has_another_number_of_them(lists):
    assert decode_varints(lists, 1) is None


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.binary(max_size=12), max_size=5), st.integers(0, 4))
def test_any_bytes(lists, count):
    found = decode_varints(lists, count)
    assert found is None or len(found) == count * len(lists)
