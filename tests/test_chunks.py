"""Chunks of streams: what they must be, and how they are cut anew."""

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Numbers, stream

from beamjax.chunks import Streams, blocks_of, checked_chunks, members_of
from beamjax.errors import SourceError
from beamjax.sources import from_arrays
from beamjax.sources.source_base import LeafSpec, StreamSource

X = (LeafSpec((2,), np.dtype("float32"), path="['x']"),)


class Given(StreamSource):
    """Chunks as they are, right or wrong."""

    def __init__(self, chunks, leaves=X):
        self.given, self._leaves = chunks, leaves

    @property
    def leaves(self):
        return self._leaves

    def chunks(self, piece):
        return iter(self.given)

    def to_spec(self):
        return self.spec_head()

    @classmethod
    def from_spec(cls, spec):
        raise NotImplementedError


@given(
    n=st.integers(1, 40),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    size=st.integers(1, 16),
)
@settings(deadline=None, max_examples=60)
def test_blocks_have_the_members_in_order(n, sizes, size):
    tree = {"k": np.arange(n), "x": np.arange(2.0 * n).reshape(n, 2)}
    found = list(blocks_of(stream(tree, sizes), size, [1, 0], True))
    assert [count for count, _ in found] == [min(size, n - i) for i in range(0, n, size)]
    for name, arrays in zip(("x", "k"), zip(*(a for _, a in found), strict=True), strict=True):
        whole = np.concatenate(arrays)
        assert whole.dtype == tree[name].dtype
        np.testing.assert_array_equal(whole, tree[name])


def test_a_buffer_may_be_used_again():
    def chunks():
        buffer = np.empty((3, 2), np.float32)
        for i in range(4):
            buffer[:] = i
            yield [buffer]

    blocks = list(blocks_of(Given(chunks()), 5, [0], True))
    expected = np.repeat(np.arange(4), 3)
    np.testing.assert_array_equal(np.concatenate([a[0][:, 0] for _, a in blocks]), expected)


def test_pieces_follow_each_other():
    assert members_of(Numbers([3, 0, 2, 1]), True)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert members_of(from_arrays(np.arange(3)), True)[0].tolist() == [0, 1, 2]


def test_other_byte_orders_and_small_floats():
    source = Given([[np.ones((2, 2), ">f4")], [np.zeros((1, 2), "<f4")]])
    (array,) = members_of(source, True)
    assert array.dtype == np.dtype("float32")
    assert array.sum() == 4
    leaf = LeafSpec((), np.dtype(ml_dtypes.bfloat16))
    (array,) = members_of(Given([[np.ones(3, ml_dtypes.bfloat16)]], (leaf,)), True)
    assert array.dtype == ml_dtypes.bfloat16


TWO = (LeafSpec((), np.dtype("int32"), path="['a']"), LeafSpec((), np.dtype("int32"), path="['b']"))


@pytest.mark.parametrize(
    ("chunk", "leaves", "message"),
    [
        ([np.zeros((3, 2))], None, r"chunk 1, leaf \['x'\]: found float64\[3, 2\], expected rows"),
        ([np.zeros((3, 4), "f4")], None, r"found float32\[3, 4\], .* float32\[2\]"),
        ([np.float32(3)], None, r"found float32\[\], expected rows"),
        ([], None, "found 0 arrays, expected a list of 1 arrays"),
        (np.zeros((3, 2), "f4"), None, "expected a list of 1 arrays"),
        ([np.zeros(3, "i4"), np.zeros(2, "i4")], TWO, r"leaf \['b'\]: found 2 rows, expected 3"),
    ],
)
def test_what_is_no_chunk(chunk, leaves, message):
    leaves = leaves or X
    good = [np.zeros((1, *leaf.shape), leaf.dtype) for leaf in leaves]
    with pytest.raises(SourceError, match=message):
        list(checked_chunks(Given([good, chunk], leaves), 0, [0], True))


def test_errors_of_the_reading_say_where():
    def chunks():
        yield [np.zeros((1, 2), "f4")]
        raise OSError("connection lost")

    with pytest.raises(SourceError, match=r"chunk 1: cannot be read \(OSError: connection lost\)"):
        list(checked_chunks(Given(chunks()), 0, [0], True))


def test_no_members():
    with pytest.raises(SourceError, match="found no member, expected at least one"):
        list(Streams((Given([]),), {"x": (0, 0)}, True).blocks(8))
    with pytest.raises(SourceError, match="found no member"):
        members_of(Given([[np.zeros((0, 2), "f4")]]), True)


@pytest.mark.parametrize("lengths", [(20, 17), (17, 20), (16, 17), (8, 16)])
def test_sources_side_by_side_have_the_same_length(lengths):
    sources = tuple(stream(np.arange(n)) for n in lengths)
    streams = Streams(sources, {"a": (0, 0), "b": (1, 0)}, True)
    with pytest.raises(SourceError, match=rf"has {min(lengths)} members, but .* or more") as caught:
        list(streams.blocks(8))
    assert len(re.findall("ChunkSource", str(caught.value))) == 2


def test_sources_side_by_side():
    a, b = np.arange(20), np.arange(20.0)
    streams = Streams((stream(a, [1]), stream(b, [7])), {"a": (0, 0), "b": (1, 0)}, True)
    for block in streams.blocks(8):
        stop = block.start + block.count
        np.testing.assert_array_equal(block.values["a"], a[block.start : stop])
        np.testing.assert_array_equal(block.values["b"], b[block.start : stop])


def test_a_stream_has_no_length():
    source = Numbers([3])
    with pytest.raises(SourceError, match="known only when all of them have been read"):
        len(source)
    with pytest.raises(SourceError, match="not by index"):
        source.read(0, 1)
    assert "their number is unknown" in repr(source)
