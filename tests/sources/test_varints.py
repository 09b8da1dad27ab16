"""Packed integers by NumPy, against an encoder that is not ours to decode with."""

import hypothesis
import numpy as np
from hypothesis import strategies as st
from tfrecords import varint

from beamjax.sources.records.tf_example import decode_varints

INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=200)
@hypothesis.given(st.integers(0, 5), st.data(), st.lists(st.binary(max_size=12), max_size=5))
def test_packed_integers(count, data, others):
    lists = data.draw(st.lists(st.lists(INT64, min_size=count, max_size=count), max_size=8))
    found = decode_varints([b"".join(map(varint, numbers)) for numbers in lists], count)
    assert found.dtype == np.int64
    assert found.tolist() == [number for numbers in lists for number in numbers]
    found = decode_varints(others, count)
    assert found is None or len(found) == count * len(others)


def test_lists_of_another_number_of_integers():
    for lists in (
        [b"\x01", b""], [b"\x01\x02", b"\x01"], [b"\x81", b"\x01\x01"], [b"\x80" * 10 + b"\x01"],
        [b"\x01\x80"], [b"", b"\x01\x02"], [b"\x80", b"\x80"],
    ):  # fmt: skip
        assert decode_varints(lists, 1) is None
