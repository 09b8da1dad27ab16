"""What tests of all kinds share: comparisons of results, and the plan of a call."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np

from beamjax.interpreters.planning import plan_for
from beamjax.interpreters.staging.arguments import flatten_call
from beamjax.numerics.reducers import decode_accumulator
from beamjax.options import parse_options


def raw(x):
    """A value as a NumPy array; typed keys as their data."""
    dtype = getattr(x, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _pairs(found, expected):
    """Leaves side by side, with their paths, where trees, shapes and dtypes agree."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves = zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    for (path, right), left in leaves:
        where = jax.tree_util.keystr(path)
        if hasattr(right, "dtype"):
            assert (left.shape, left.dtype) == (right.shape, right.dtype), where
        yield where, left, right


def assert_same_types(found, expected):
    """Asserts one tree, with the shapes, dtypes, weak types and kinds of arrays of the other."""
    for where, left, right in _pairs(found, expected):
        assert isinstance(left, jax.Array) == isinstance(right, jax.Array), where
        assert getattr(left, "weak_type", False) == getattr(right, "weak_type", False), where


def assert_same_bits(found, expected):
    """Asserts equal trees, shapes, dtypes and bits."""
    for where, left, right in _pairs(found, expected):
        left, right = raw(left), raw(right)
        if left.tobytes() != right.tobytes():
            np.testing.assert_array_equal(left, right, err_msg=where)  # Shows the values.
            raise AssertionError(f"{where}: equal values, other bits")


def assert_close(found, expected, rtol=5e-5, atol=5e-5):
    """Asserts equal trees, shapes, dtypes, integers and bools, and floats within a tolerance.

    Of floats of two bytes or fewer, the tolerance is 2e-2.
    """
    for where, left, right in _pairs(found, expected):
        left, right = raw(left), raw(right)
        if not jnp.issubdtype(right.dtype, jnp.inexact):
            np.testing.assert_array_equal(left, right, err_msg=where)
            continue
        wide = np.complex128 if right.dtype.kind == "c" else np.float64
        narrow = (
            {} if right.dtype.itemsize > 2 else {"rtol": max(rtol, 2e-2), "atol": max(atol, 2e-2)}
        )
        np.testing.assert_allclose(
            left.astype(wide),
            right.astype(wide),
            **{"rtol": rtol, "atol": atol} | narrow,
            err_msg=where,
        )


def examples(count):
    """Settings with as many examples, and with five times as many in the nightly tests."""
    return hypothesis.settings(max_examples=count * hypothesis.settings.default.max_examples // 100)


def planned(fn, *args, **options):
    """What `bj.run(fn, *args, options=options)` makes of `fn` before it runs anything."""
    return plan_for(flatten_call(fn, args), parse_options(options))


def plan_of(fn, *args, **options):
    """The plan that `bj.run(fn, *args, options=options)` runs."""
    return planned(fn, *args, **options).plan


def in_any_tree(vectors, make, rng):
    """Vectors as shards 0, 1, ... in a random order, in accumulators merged and encoded at random.

    Args:
      vectors: what is accumulated.
      make: makes an empty accumulator.
      rng: draws the order, and the tree of merges.
    """
    order = list(enumerate(vectors))
    rng.shuffle(order)
    parts = [make() for _ in range(rng.randint(1, len(order) + 1))]
    for shard, vector in order:
        rng.choice(parts).add(vector, shard)
    while True:
        if rng.random() < 0.3 and hasattr(parts[0], "compact"):
            parts[0].compact()
        if rng.random() < 0.3:
            parts[0] = decode_accumulator(parts[0].encode())
        if len(parts) == 1:
            return parts[0]
        rng.shuffle(parts)
        other = parts.pop()
        parts[0].merge(decode_accumulator(other.encode()) if rng.random() < 0.3 else other)
