"""Rounds an exact number once, from a pair of doubles `head + tail` with the tail rounded to odd.

`head` is a double near the exact number. `tail` is the exact rest, or, where that is no double, its
neighbour whose last bit is 1. It is 0 if and only if the rest is 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

# Why to odd: two roundings to nearest may differ from one, as the first may move a number onto the
# middle between two shorter numbers, where the second no longer sees on which side it was. A number
# whose last bit is 1 is no such middle, nor a shorter number, so rounding to odd preserves the
# side. A second rounding, to 51 bits or fewer or by one addition to `head`, then gives the same as
# one rounding of the exact value (Boldo and Melquiond, "Emulation of FMA and correctly rounded
# sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008,
# sections 2 and 3).

Pair = tuple[np.ndarray, np.ndarray | None]
"""Head and tail; the tail is None if it is zero everywhere."""

DIVISOR_LIMIT = 1 << 26
"""`divide` is correct for smaller divisors: their product with half of the bits of a double is a
double."""

# The upper half of a double, the range in which float32 has full precision, and the doubles that
# are midway between two neighbours in float32 (by the 29 bits that float32 lacks).
_LOW_27_BITS = np.int64((1 << 27) - 1)
_SMALLEST_NORMAL = np.float64(2.0**-126)
_LOW_29_BITS, _MIDWAY = np.int64((1 << 29) - 1), np.int64(1 << 28)


def to_odd(rounded: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Rounds `rounded + error` to odd, in place."""
    # `rounded` is the sum rounded to nearest, and `error` is less than one unit in its last place.
    # Where the error is not 0 and the last bit is 0, the other neighbour has the last bit 1: it is
    # one step towards the error. As integers, the bits of a float go up with its absolute value, so
    # a step is +1 if both have the same sign and else -1.
    bits = rounded.view(np.int64)
    towards = ((error.view(np.int64) ^ bits) >> 63) | 1
    bits += towards * ((error != 0) & ((bits & 1) == 0))
    return rounded


def fast_two_sum(large: np.ndarray, small: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum rounded to nearest, and its exact error, for |large| >= |small| or large 0."""
    # T. J. Dekker, "A floating-point technique for extending the available precision", Numerische
    # Mathematik 18, 1971, section 4.
    total = large + small
    return total, small - (total - large)


def append(head: np.ndarray, tail: np.ndarray | None, term: np.ndarray) -> Pair:
    """Adds a term to a pair; the tail is None while it is zero everywhere."""
    # Terms come from the highest digit down: each is smaller than the lowest unit that any earlier
    # term is a multiple of.
    if tail is None:
        total, error = fast_two_sum(head, term)
        return total, error if error.any() else None
    has_tail = tail != 0
    total, error = fast_two_sum(np.where(has_tail, tail, head), term)
    head = np.where(has_tail, head, total)
    # A tail that was inexact before is odd, and the term is below its last bit, so it stays.
    return head, np.where(has_tail, to_odd(total, error), error)


def total_of(terms: Iterable[np.ndarray], size: int) -> Pair:
    """The sum of terms (size,) that `append` takes, as a pair."""
    head, tail = np.zeros(size), None
    for term in terms:
        head, tail = append(head, tail, term)
    return head, tail


def divide(head: np.ndarray, tail: np.ndarray | None, divisor: int | np.ndarray) -> Pair:
    """The quotient of a pair by a whole number below `DIVISOR_LIMIT`, as a pair."""
    # `head` is 0, or between 2^-700 and 2^990 in absolute value, and `tail` at most one unit in its
    # last place. With q = head / divisor rounded to nearest, the remainder r = head - q·divisor is
    # a double, and the rest of the quotient is (r + tail) / divisor, which is rounded to odd in two
    # steps. A later rounding compares it with multiples of a quarter unit in the last place of q.
    # Times the divisor, these have at least 24 bits less than the tail can hold. If the share
    # underflows, only its sign matters, which remains.
    n = np.asarray(divisor, np.float64)
    quotient = head / n
    rest = _remainder(head, quotient, n)
    if tail is not None:
        # The sum and its exact error for terms in any order (Knuth's two-sum).
        total = rest + tail
        back = total - rest
        error = (rest - (total - back)) + (tail - back)
        rest = to_odd(total, error)
    share = rest / n
    return quotient, to_odd(share, _remainder(rest, share, n))


def _remainder(dividend: np.ndarray, quotient: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """dividend - quotient·divisor, exactly, for a quotient rounded to nearest."""
    # Half of the bits of the quotient times the divisor is a double, so the error of the product is
    # computed without rounding, as in Dekker's product.
    product = quotient * divisor
    upper = (quotient.view(np.int64) & ~_LOW_27_BITS).view(np.float64)
    error = (upper * divisor - product) + (quotient - upper) * divisor
    return (dividend - product) - error


def divide_to_float32(values: np.ndarray, divisor: int) -> np.ndarray:
    """Quotients of float64 numbers, as `divide` takes them, rounded once to float32."""
    # A quotient rounded to a double is on the same side of all shorter numbers as the exact one, or
    # is one of them. So a second rounding is in doubt only if the double is midway between two
    # neighbours in float32: its last 29 bits are a one and zeros, or it is so small that float32
    # has fewer bits.
    quotients = values / float(divisor)
    result = quotients.astype(np.float32)
    doubtful = (quotients.view(np.int64) & _LOW_29_BITS) == _MIDWAY
    small = np.abs(quotients) < _SMALLEST_NORMAL
    if small.any():
        doubtful |= small & (quotients != 0)
    (doubts,) = np.nonzero(doubtful)
    if len(doubts):
        result[doubts] = round_pair(*divide(values[doubts], None, divisor), result.dtype)
    return result


def round_pair(head: np.ndarray, tail: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
    """Rounds a pair, with a tail of at most two units of the head, once to nearest even."""
    # Numbers past the range of a dtype become what a cast from float32 gives: an infinity, or in
    # dtypes without infinities NaN or the largest number.
    if dtype == np.float64:
        return head + (0.0 if tail is None else tail)
    odd = head if tail is None else to_odd(*fast_two_sum(head, tail))
    if dtype == np.float32:
        return odd.astype(np.float32)
    return odd_to_float32(odd).astype(dtype)


def odd_to_float32(values: np.ndarray) -> np.ndarray:
    """Rounds finite float64 numbers to odd at float32, for casts to narrower dtypes."""
    # ml_dtypes casts float64 by way of float32, and two roundings to nearest differ from one: 1 +
    # 2^-8 + 2^-40 would become 1 in bfloat16.
    nearest = values.astype(np.float32)
    bits = nearest.view(np.int32)
    inexact = nearest != values
    # Truncates, by a step back if it was rounded away from zero, and sets the last bit.
    bits -= np.abs(nearest) > np.abs(values)
    bits |= inexact
    return nearest
