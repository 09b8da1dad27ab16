"""What several cores gain."""

import pytest

from beamjax.choices import Looping
from beamjax.costs import Cost
from beamjax.gains import DIVIDED, Gain, alone, gain, side_by_side, times_as_fast

LOOP, VMAP = Looping("loop"), Looping("vmap")
SMALL = Cost(flops=1e4, calls=10.0)
LARGE = Cost(flops=5e8, calls=10.0, extra=5e8, shared=5e8)


@pytest.mark.parametrize(
    ("shards", "threads", "expected"), [(8, 2, 2), (3, 2, 1.5), (1, 4, 1), (5, 4, 2.5), (0, 2, 1)]
)
def test_threads_wait_for_the_last_shards(shards, threads, expected):
    assert side_by_side(shards, threads) == expected


def test_threads_share_small_operations():
    found = gain(SMALL, LOOP, 8, 4, 2, 2)
    assert found == Gain(1.0, pytest.approx(times_as_fast(2)), 1.0)
    assert gain(SMALL, LOOP, 8, 4, 1, 2) == Gain()
    assert gain(None, LOOP, 8, 4, 2, 2) == Gain()


def test_large_products_are_divided_in_one_thread_too():
    assert alone(SMALL, 2) == alone(LARGE, 1) == 1.0
    assert alone(LARGE, 2) == pytest.approx(0.5 + 0.5 / times_as_fast(2))
    found = gain(LARGE, LOOP, 8, 4, 2, 2)
    assert found.busy == pytest.approx(1 / found.alone)
    assert found.alone / found.threads == pytest.approx(1 / times_as_fast(2))
    assert gain(LARGE, LOOP, 8, 1, 2, 2).threads == 1.0


def test_threads_gain_nothing_of_what_stands_in_no_loop():
    assert gain(SMALL, VMAP, 4096, 100, 2, 2) == Gain(1.0, 1.0, 2.0)
    many = gain(SMALL, VMAP, 4096, 100, 16, 16)
    assert many == Gain(1 / (DIVIDED * times_as_fast(16)), 1.0, 16.0)


def test_products_over_members_are_as_large_as_what_is_computed_at_once():
    over = Cost(flops=2e3, calls=1.0, shared=2e3)
    assert gain(over, VMAP, 4096, 100, 1, 2).alone == pytest.approx(1 / times_as_fast(2))
    assert gain(over, Looping("batches", 8), 4096, 100, 1, 2) == Gain()
