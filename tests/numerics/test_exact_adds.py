"""Additions that report whether they have rounded, against fractions; parts on several threads."""

import ctypes
import threading
from fractions import Fraction

import numpy as np
import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from beamjax.numerics import accumulators
from beamjax.numerics import exact_add as exact_adds
from beamjax.numerics.accumulators import LONG, in_parts
from beamjax.numerics.exact_add import PROBED, add_exactly

FINITE = st.floats(-(2.0**127), 2.0**127, width=32)
WHOLE = st.integers(-(2**24), 2**24)
DYADIC = st.builds(lambda whole, exponent: whole * 2.0**exponent, WHOLE, st.integers(-60, 60))


WITH_FLAG = pytest.mark.skipif(exact_adds._with_flag() is None, reason="no flag on this machine")


def is_double(value):
    return value.denominator & (value.denominator - 1) == 0 and Fraction(float(value)) == value


@WITH_FLAG
@examples(60)
@given(data=st.data(), terms=st.integers(1, 6), together=st.booleans())
def test_it_is_exact_or_says_so(data, terms, together):
    values = data.draw(st.lists(st.tuples(*[FINITE | DYADIC] * terms), min_size=1, max_size=4))
    rows = np.array(values, np.float32).T.copy()
    start = np.array(data.draw(st.lists(FINITE, min_size=len(values), max_size=len(values))))
    total, sums = start.copy(), [Fraction(value) for value in start]
    exact = 0
    for count, row in enumerate(rows, 1):
        sums = [total + Fraction(float(value)) for total, value in zip(sums, row, strict=True)]
        if not all(map(is_double, sums)):
            break
        exact = count
    with np.errstate(all="ignore"):
        added = add_exactly(total, rows if together else list(rows))
    known = [Fraction(value) for value in start.tolist()]
    for row in rows[:added]:
        known = [a + Fraction(float(b)) for a, b in zip(known, row, strict=True)]
    assert [Fraction(value) for value in total.tolist()] == known
    if together:
        # Rows may be added to one another first, and round where one by one they do not.
        assert added in (0, terms)
        assert added or terms > 1 or not exact
    else:
        assert added == (exact if exact >= terms - 1 else 0)


@WITH_FLAG
@given(st.lists(WHOLE, min_size=3, max_size=3), st.sampled_from([np.inf, -np.inf, np.nan]))
def test_infinities_and_nan_are_added_as_numpy_does_or_not_at_all(values, bad):
    row = np.array(values, np.float32)
    row[1] = bad
    ones = np.ones(3, np.float32)
    for rows in ([ones, row], [row, ones], [row, -row], row[None], np.stack([row, -row])):
        total, expected = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])
        with np.errstate(all="ignore"):
            for each in rows[: add_exactly(total, rows)]:
                expected += each
        np.testing.assert_array_equal(total, expected)


@WITH_FLAG
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_sum_that_rounds_is_noticed_wherever_it_is(dtype):
    for size in (1, 7, 4096, PROBED, 3 * PROBED + 5):
        total, ones = np.ones(size), np.ones(size, dtype)
        for place in {0, size // 3, size // 2, size - 1}:
            for odd in (2.0**-52, 2.0**-53, -(2.0**-54), 2.0**-149, 3e-39):
                row = ones.copy()
                row[place] = odd
                exact = is_double(1 + Fraction(float(row[place])))
                rows = [row] if exact else [row, ones]
                assert (add_exactly(total.copy(), rows) > 0) == exact
        assert add_exactly(total, [ones, ones])
        assert (total == 3).all()


@WITH_FLAG
def test_zeros_subnormals_and_overflow():
    total = np.zeros(3)
    assert add_exactly(total, [np.float32([-0.0, 1, -1]), np.float32([-0.0, -1, 1])])
    assert not np.signbit(total).any()
    total, row = np.zeros(2), np.float32([1e-45, -1e-40])
    assert add_exactly(total, [row, row])
    assert total.tolist() == [2 * float(row[0]), 2 * float(row[1])]
    total = np.ones(3)
    assert np.float64(1) + np.float64(2.0**-60) == 1  # raises the flag before
    assert add_exactly(total, [np.ones(3, np.float32)])
    total = np.full(2, np.finfo(np.float64).max)
    with np.errstate(all="ignore"):
        assert not add_exactly(total, [total.copy()])
    assert np.isfinite(total).all()


@WITH_FLAG
def test_threads_do_not_see_the_sums_of_others():
    """One rounds all the time, and the others never."""
    stop, found = threading.Event(), []
    tiny, ones = np.full(PROBED, 2.0**-60, np.float32), np.ones(PROBED, np.float32)

    def rounds():
        while not stop.is_set():
            found.append(not add_exactly(np.ones(PROBED), [tiny]))

    other = threading.Thread(target=rounds)
    other.start()
    total = np.zeros(PROBED)
    try:
        assert all(add_exactly(total, [ones, ones]) for _ in range(200))
    finally:
        stop.set()
        other.join()
    assert (total == 400).all()
    assert all(found)


@WITH_FLAG
@pytest.mark.parametrize("misses", range(5))
def test_a_flag_that_misses_anything_is_not_used(monkeypatch, misses):
    """As if NumPy added on threads of its own, or the processor had no flag."""

    add = exact_adds._with_flag()

    def adds(total, rows, out):
        cut = PROBED * misses // 4
        rows = list(rows)
        exact = add(total[:cut], [row[:cut] for row in rows], out[:cut])
        add(total[cut:], [row[cut:] for row in rows], out[cut:])
        return exact

    monkeypatch.setattr(exact_adds, "_with_flag", lambda: adds)
    exact_adds._adder.cache_clear()
    try:
        assert exact_adds._adder() is (adds if misses == 4 else None)
    finally:
        exact_adds._adder.cache_clear()


def test_no_library_with_flags(monkeypatch):
    for error in (OSError, AttributeError, TypeError):

        def fail(name, error=error):
            raise error(name)

        monkeypatch.setattr(ctypes, "PyDLL", fail)
        assert exact_adds._with_flag() is None


# --- parts of long vectors


@given(st.integers(0, 40), st.sampled_from([1, LONG]), st.integers(1, 6))
def test_every_part_is_worked_on_once(count, values, threads):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulators, "_threads", lambda: threads)
        in_parts(count, values, lambda first, last: seen.extend(range(first, last)))
    assert sorted(seen) == list(range(count))


def test_only_long_vectors_are_on_several_threads(monkeypatch):
    monkeypatch.setattr(accumulators, "_threads", lambda: 2)
    together = threading.Barrier(2, timeout=60)
    in_parts(2, LONG, lambda first, last: together.wait())
    seen = []
    in_parts(2, LONG - 1, lambda first, last: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]


@pytest.mark.parametrize("bad", [0, 3])
def test_errors_of_any_thread_are_raised(monkeypatch, bad):
    monkeypatch.setattr(accumulators, "_threads", lambda: 4)
    done = []

    def work(first, last):
        if first == bad:
            raise ValueError(f"part {first}")
        done.append(first)

    with pytest.raises(ValueError, match=f"part {bad}"):
        in_parts(4, LONG, work)
    assert sorted([*done, bad]) == [0, 1, 2, 3]
