"""Padding of members: added, and noticed where it shows in results."""

import jax.numpy as jnp
import numpy as np
import pytest

from beamjax.errors import StructureError
from beamjax.padding import check_padding, padded_rows


def test_rows_are_padded_with_zeros():
    members = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    longer = padded_rows(members, (5, 2))
    assert longer.dtype == members.dtype
    np.testing.assert_array_equal(longer[:, :3], members)
    assert not longer[:, 3:].any()
    assert padded_rows(members, (3, 2)) is members
    numbers = np.ones(3)
    assert padded_rows(numbers, ()) is numbers


def check(left, right):
    check_padding([(3, 2), ()], [np.asarray(left)], [np.asarray(right)])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([1.0, 2.0], [1.0, 2.0000002]),
        ([0.0, 100.0], [1.0, 100.0]),  # less than the errors of a sum in another order may be
        ([np.nan, 1.0], [np.nan, 1.0]),
        ([True, False], [True, False]),
        (np.empty((0, 3)), np.empty((0, 3))),
        (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)),
        ([1 + 2j], [1 + 2j]),
        (np.uint32([2**32 - 1]), np.uint32([2**32 - 1])),
    ],
)
def test_results_that_agree(left, right):
    check(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([1.0, 2.0], [0.5, 1.0]),
        ([np.nan], [1.0]),
        ([np.inf], [1.0]),
        ([True], [False]),
        ([3], [4]),
        ([1 + 2j], [1 - 2j]),
        (np.ones(2), np.ones(3)),
    ],
)
def test_results_that_have_nothing_to_do_with_each_other(left, right):
    with pytest.raises(StructureError, match=r"members of shapes \[3, 2\], \[\], found .* mask"):
        check(left, right)
