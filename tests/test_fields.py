"""Integers in the fields of words: exact sums of all of them by one sum."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from beamjax.fields import bits_for, compressed_p, fields_of, num_words, pack, unpack


@settings(max_examples=25)
@given(
    values=st.lists(st.integers(-127, 127), min_size=0, max_size=40),
    members=st.integers(1, 300),
    x64=st.booleans(),
)
def test_sums_of_words_are_the_sums_of_all_fields(values, members, x64):
    """Also at the ends of the range, where a negative field lends from all above it."""
    with jax.enable_x64(x64):
        bits = bits_for(127 * members)
        words = pack(jnp.asarray(values, np.int8), bits)
        assert words.shape == (num_words(len(values), bits),)
        assert words.dtype == (np.int64 if x64 else np.int32)
        sums = jnp.sum(jnp.broadcast_to(words, (members, *words.shape)), axis=0, dtype=words.dtype)
        found = unpack(sums, bits, len(values))
    np.testing.assert_array_equal(found, np.asarray(values, np.int64) * members)


@pytest.mark.parametrize("bits", [2, 3, 8, 9, 16, 17, 31, 32])
def test_extremes_of_a_field_come_back(bits):
    largest = 2 ** (bits - 1) - 1
    values = jnp.asarray([largest, -largest, 0, -largest, largest, -1, 1], np.int32)
    np.testing.assert_array_equal(unpack(pack(values, bits), bits, 7), values)


def test_fields_hold_what_they_are_for():
    assert [bits_for(n) for n in (1, 127, 128, 127 * 258)] == [2, 8, 9, 16]
    assert [fields_of(b) for b in (2, 8, 9, 16, 32, 33)] == [16, 4, 3, 2, 1, 0]


def test_axes_in_front_stay():
    values = np.arange(-30, 30, dtype=np.int32).reshape(3, 4, 5)
    words = jax.vmap(jax.vmap(lambda v: pack(v, 7)))(values)
    np.testing.assert_array_equal(unpack(words, 7, 5), values)


def test_marked_words_are_as_they_are_under_each_transformation():
    words = jnp.arange(12, dtype=np.int32).reshape(3, 4)
    mark = lambda x: compressed_p.bind(x, instead=8)
    for fn in (mark, jax.jit(mark), jax.vmap(mark)):
        np.testing.assert_array_equal(fn(words), words)
    (eqn,) = jax.make_jaxpr(jax.vmap(mark))(words).eqns
    assert eqn.params["instead"] == 24
