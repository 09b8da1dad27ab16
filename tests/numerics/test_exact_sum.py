"""Exact sums against whole-number arithmetic, in any order, bundling and tree of merges."""

import ctypes
import itertools
import math
import mmap
import platform
import random
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from helpers import examples, in_any_tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beamjax.errors import WorkerError
from beamjax.numerics import exact_add as exact_adds
from beamjax.numerics.exact_sum import check_subnormals
from beamjax.numerics.reducers import decode_accumulator, make_accumulator
from beamjax.numerics.rounding import divide_to_float32
from beamjax.numerics.superaccumulator import BLOCK, CAPACITY, WIDTH, Digits

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
NARROW = [BF16, F16, *(np.dtype(getattr(ml_dtypes, f"float8_{e}")) for e in ("e5m2", "e4m3fn"))]
BOTH = pytest.mark.parametrize("dtype", [F32, F64], ids=str)
MANY = examples(80)
RNG = st.randoms(use_true_random=False)
COUNTS = (1, 2, 3, 7, 10, 1000, 65537, 2**26 - 1, 2**26, 2**40 + 1)
LARGE = BLOCK // 2 + 3
"""Partials of this size wait as they are."""

SPECIAL = {
    F32: [0x0, 0x80000000, 0x1, 0x80000001, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000],
    F64: [
        *(0x0, 1 << 63, 0x1, (1 << 63) + 1, (1 << 52) - 1, 1 << 52, 0x3FF << 52),
        *((0x7FF << 52) - 1, (0xFFF << 52) - 1),
    ],
}


def exact(values):
    """The sum as a fraction, or as an infinity or NaN."""
    values = [float(value) for value in values]
    if all(math.isfinite(value) for value in values):
        return sum(map(Fraction, values), Fraction(0))
    total = sum(value for value in values if not math.isfinite(value))
    return total if math.isinf(total) else math.nan


def rounded(value, dtype):
    """Rounds to nearest even in whole numbers, without any float on the way."""
    if isinstance(value, float) or value == 0:
        return np.float32(value).astype(dtype)
    limits = ml_dtypes.finfo(dtype)
    lowest = int(limits.minexp) - int(limits.nmant)
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    for guess in (exponent + 1, exponent, exponent - 1):
        unit = max(guess - int(limits.nmant), lowest)
        units = abs(value) / Fraction(2) ** unit
        if units >= 1 << int(limits.nmant) or unit == lowest:
            break
    whole = round(units)  # half to even, as Fraction does
    sign = -1 if value < 0 else 1
    if whole * Fraction(2) ** unit > Fraction(float(limits.max)):
        return np.float32(sign * np.inf).astype(dtype)
    result = np.array(sign * math.ldexp(whole, unit)).astype(dtype)[()]
    assert abs(Fraction(float(result))) == whole * Fraction(2) ** unit
    return result


def assert_bits(found, expected):
    wanted = np.array(expected, found.dtype)
    assert found.tobytes() == wanted.tobytes(), (found, wanted)


def summed(rows, dtype=F32, total=None):
    """An exact sum of rows, or of numbers as rows of one."""
    rows = [np.atleast_1d(np.asarray(row, dtype)) for row in rows]
    total = make_accumulator("sum", np.dtype(dtype), rows[0].size) if total is None else total
    for row in rows:
        total.add(row)
    return total


def read_only(row):
    row = np.array(row)
    row.flags.writeable = False
    return row


def from_bits(bits, dtype):
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)


@st.composite
def bit_patterns(draw, dtype, max_terms=14):
    """(terms, 3) of floats of any bits, with a liking for the ends and for cancellation."""
    bits = 8 * dtype.itemsize
    word = st.sampled_from(SPECIAL[dtype]) | st.integers(0, 2**bits - 1)
    if draw(st.booleans()):
        mantissa = 2 ** (23 if dtype == F32 else 52) - 1
        finite = st.integers(0, 2**bits - 1).filter(
            lambda each: from_bits([each & ~mantissa], dtype)[0] not in (np.inf, -np.inf)
        )
        word = st.sampled_from(SPECIAL[dtype]) | finite
    rows = draw(st.lists(st.tuples(word, word, word), min_size=1, max_size=max_terms))
    values = from_bits([each for row in rows for each in row], dtype).reshape(-1, 3)
    if draw(st.booleans()):
        values = np.concatenate([values, -values[: len(values) // 2 + 1]])
    return values


# --- any terms, in any tree


@BOTH
@MANY
@given(data=st.data(), rng=RNG)
def test_sum_is_correctly_rounded_in_any_tree(dtype, data, rng):
    values = data.draw(bit_patterns(dtype))
    sums = [exact(column) for column in values.T]
    total = in_any_tree(values, lambda: make_accumulator("sum", dtype, 3), rng)
    for result in (F32, *NARROW) if dtype == F32 else (F64,):
        assert_bits(total.total(0, 3, result), [rounded(each, result) for each in sums])


@BOTH
@MANY
@given(data=st.data(), count=st.sampled_from(COUNTS), rng=RNG)
def test_mean_is_correctly_rounded_in_any_tree(dtype, data, count, rng):
    values = data.draw(bit_patterns(dtype))
    means = [each if isinstance(each, float) else each / count for each in map(exact, values.T)]
    total = in_any_tree(values, lambda: make_accumulator("sum", dtype, 3), rng)
    for result in (F32, BF16) if dtype == F32 else (F64,):
        assert_bits(total.mean(0, 3, count, result), [rounded(mean, result) for mean in means])


@pytest.fixture(params=["flag", "digits"])
def adds(request, monkeypatch):
    """With additions that report whether they are exact, and without."""
    exact_adds._adder.cache_clear()
    if request.param != "flag":
        monkeypatch.setattr(exact_adds, "_with_flag", lambda: None)
    yield
    exact_adds._adder.cache_clear()


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), rng=RNG)
def test_partials_that_wait_are_added_in_any_tree(adds, data, rng):
    """Values of any bits at the ends of vectors that are long enough to wait as they are."""
    values = data.draw(bit_patterns(F32))
    rows = np.zeros((len(values), LARGE), np.float32)
    rows[:, :2], rows[:, -1:] = values[:, :2], values[:, 2:]
    rows[:, 2:-1] = np.linspace(-1, 1, LARGE - 3, dtype=np.float32)
    views = [row[:] if rng.random() < 0.3 else read_only(row) for row in rows]
    total = in_any_tree(views, lambda: make_accumulator("sum", F32, LARGE), rng)
    sums = [exact(column) for column in values.T]
    for result in (F32, BF16, F16):
        found = total.total(0, LARGE, result)
        assert_bits(found[[0, 1, -1]], [rounded(each, result) for each in sums])
    means = [each if isinstance(each, float) else each / 7 for each in sums]
    assert_bits(total.mean(0, LARGE, 7, F32)[[0, 1, -1]], [rounded(mean, F32) for mean in means])
    assert summed(rows[::-1]).encode() == total.encode()


# --- next to the middle of two floats


def pieces(value, dtype):
    """Floats whose exact sum is `value`."""
    parts = []
    while value != 0:
        parts.append(rounded(value, dtype))
        value -= Fraction(float(parts[-1]))
    return parts


@BOTH
@MANY
@given(data=st.data())
def test_mean_next_to_the_middle_of_two_floats(dtype, data):
    bits = 24 if dtype == F32 else 53
    count = data.draw(st.integers(1, 2**26 - 1) | st.sampled_from(COUNTS))
    odd = 2 * data.draw(st.integers(2 ** (bits - 1), 2**bits - 1)) + 1
    middle = Fraction(odd) * Fraction(2) ** data.draw(st.integers(-60, 40))
    offset = data.draw(st.sampled_from([-1, 0, 1])) * Fraction(2) ** -(100 if dtype == F32 else 900)
    total = summed(pieces(middle * count + offset, dtype), dtype)
    assert_bits(total.mean(0, 1, count, dtype), [rounded(middle + offset / count, dtype)])


def test_means_over_whole_numbers_next_to_the_middle_of_two_floats():
    """Counts that are divided as Python integers."""
    for count in (2**26, 2**26 + 1, 2**40 + 1):
        middles = (2**24 + 1, -(2**24) - 1, 2**24 + 3)
        for odd, tiny, exponent in itertools.product(middles, (-1, 0, 1), (-100, -149)):
            value = Fraction(odd * count) + tiny * Fraction(2) ** exponent
            found = summed(pieces(value, F32)).mean(0, 1, count, F32)
            assert_bits(found, [rounded(value / count, F32)])


@MANY
@given(data=st.data())
def test_quotients_of_doubles_next_to_the_middle_of_two_floats(data):
    """Normal and subnormal ones."""
    count = data.draw(st.integers(2, 2**26 - 1) | st.sampled_from([2, 3, 63, 1000]))
    if data.draw(st.booleans()):
        odd, exponent = st.integers(2**23, 2**24 - 1), data.draw(st.integers(-60, 100))
    else:
        odd, exponent = st.integers(1, 24).flatmap(lambda n: st.integers(2**n // 2, 2**n - 1)), -150
    values = [0.0]
    for half in data.draw(st.lists(odd, min_size=1, max_size=4)):
        near = float((2 * half + 1) * count) * 2.0**exponent
        for _ in range(data.draw(st.integers(0, 2))):
            near = math.nextafter(near, data.draw(st.sampled_from([-math.inf, math.inf])))
        values.append(near * data.draw(st.sampled_from([1, -1])))
    wanted = [rounded(Fraction(value) / count, F32) for value in values]
    with np.errstate(over="ignore"):
        assert_bits(divide_to_float32(np.array(values), count), wanted)


def test_narrow_results_are_rounded_once():
    for narrow in NARROW:
        half_unit = 2.0 ** -(int(ml_dtypes.finfo(narrow).nmant) + 1)
        for base, tiny in [(1.0, 2.0**-40), (1.0, -(2.0**-40)), (-1.0, -(2.0**-100))]:
            terms = base, math.copysign(half_unit, base), tiny
            total, wanted = summed(terms), [rounded(exact(terms), narrow)]
            assert_bits(total.total(0, 1, narrow), wanted)
            assert_bits(total.mean(0, 1, 1, narrow), wanted)


def test_the_ends_of_float64():
    top, half_unit = np.finfo(np.float64).max, 2.0**970
    cases = {
        (top, top, -top): top,
        (top, half_unit): np.inf,
        (top, half_unit, -5e-324): top,
        (-top, -half_unit): -np.inf,
        (top, top, top, -top, -top): top,
        (5e-324, top, 3e-310, -top): 3e-310 + 5e-324,
        (1.0, 5e-324, 2.0**-53): 1 + 2.0**-52,
    }
    for values, wanted in cases.items():
        assert summed(values, F64).total(0, 1, F64)[0] == wanted
    assert summed((1.0, 5e-324, 2.0**-53), F64).mean(0, 1, 1, F64)[0] == 1 + 2.0**-52
    total = summed([top] * 9, F64)
    assert (total.total(0, 1, F64)[0], total.mean(0, 1, 9, F64)[0]) == (np.inf, top)
    assert total.mean(0, 1, 10, F64)[0] == rounded(Fraction(top) * 9 / 10, F64)


def test_usual_quotients_are_not_those_of_whole_numbers(monkeypatch):
    """Which take a thousand times as long."""
    values = np.array([0.0, -0.0, 1.0, 2.0**-700, 2.0**990, -(2.0**990), np.pi])
    total, expected = summed([values], F64), values / 3
    monkeypatch.setattr(Digits, "integer", lambda *_: pytest.fail("a whole number was asked for"))
    assert_bits(total.mean(0, len(values), 3, F64), expected + 0.0)


# --- carries


@BOTH
def test_digits_are_carried_before_they_are_full(dtype):
    lowest, bits = (-149, 24) if dtype == F32 else (-1074, 53)
    for size in (1, BLOCK):
        unit = 2.0 ** (-lowest // WIDTH * WIDTH + lowest)
        largest = (1 - 2.0**-bits) * 2.0 ** (WIDTH - 1) * unit  # fills a digit as no other number
        vectors = [np.full(size, value, dtype) for value in (largest, unit, largest / 3)]
        adds = 2500 if size == 1 else 1100
        sums = [make_accumulator("sum", dtype, size) for _ in range(3)]
        terms = [[], [], []]
        for number in range(adds):
            vector = vectors[2 if number % 7 == 0 else number % 5 == 0]
            target = number % 3 if number > adds // 2 else 0
            sums[target].add(vector)
            terms[target].append(float(vector[0]))
        held = [sums[1].total(0, 1, dtype), sums[2].total(0, 1, dtype)]
        for other in (1, 2, 1):
            sums[0].merge(sums[other])
        value = exact([*terms[0], *terms[1], *terms[2], *terms[1]])
        for place in (0, size // 2, size - 1):
            assert sums[0].total(place, place + 1, dtype)[0] == rounded(value, dtype)
        assert sums[0].mean(0, 1, adds, dtype)[0] == rounded(value / adds, dtype)
        assert [sums[1].total(0, 1, dtype), sums[2].total(0, 1, dtype)] == held


def test_digits_are_carried_in_a_copy_of_what_is_merged():
    full = [make_accumulator("sum", F64, BLOCK) for _ in range(2)]
    row = np.full(BLOCK, 1.75)
    adds = CAPACITY // 2
    for each in full:
        for _ in range(adds):
            each.add(row)
    digits = full[1]._blocks[0]
    bound, before = digits.bound, {key: each.tobytes() for key, each in digits.vectors.items()}
    full[0].merge(full[1])
    assert full[0].total(0, 1, F64)[0] == 2 * 1.75 * adds
    assert digits.bound == bound == CAPACITY
    assert {key: each.tobytes() for key, each in digits.vectors.items()} == before


def test_decoded_digits_are_carried_too():
    one = summed([(2.0**43 - 1) * 2.0 ** (44 * (key + 20) - 1074) for key in range(10)], F64)
    one.compact()
    value = one._blocks[0].integer(0)
    again, total = decode_accumulator(one.encode()), make_accumulator("sum", F64, 1)
    for _ in range(1500):
        total.merge(again)
    assert total.total(0, 1, F64)[0] == rounded(Fraction(1500 * value, 2**1074), F64)
    assert total._blocks[0].integer(0) == 1500 * value


# --- vectors, complex numbers, infinities


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_long_vectors_have_digits_where_they_need_them(dtype):
    size = 2 * BLOCK + 77
    rng = np.random.default_rng(3)
    values = rng.standard_normal((5, size)).astype(dtype)
    values[:, BLOCK:] *= 1e-30
    values[:, 2 * BLOCK :] = 0
    total = in_any_tree(
        values, lambda: make_accumulator("sum", np.dtype(dtype), size), random.Random(4)
    )
    real = values.real.dtype
    for place in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, size - 1):
        found = total.total(place, place + 1, values.dtype)[0]
        assert found.real == rounded(exact(values[:, place].real), real)
        assert found.imag == rounded(exact(values[:, place].imag), real)
    whole = total.total(0, size, values.dtype)
    assert (total.total(BLOCK - 9, BLOCK + 9, values.dtype) == whole[BLOCK - 9 : BLOCK + 9]).all()
    total.compact()
    assert total.nbytes <= 3 * 8 * 2 * BLOCK * (2 if values.dtype.kind == "c" else 1)


def test_infinities_nan_and_zeros():
    inf, nan = np.inf, np.nan
    columns = {
        (inf, 1): inf, (-inf, 1): -inf, (inf, -inf): nan, (nan, 1): nan, (inf, nan): nan,
        (-0.0, -0.0): 0.0,
    }  # fmt: skip
    values = np.array(list(columns), np.float32).T.copy()
    values[:, 3].view(np.uint32)[0] = 0xFFC01234  # a NaN with a sign and a payload
    total = summed(values)
    for dtype in (F32, BF16, F16):
        wanted = np.array(list(columns.values()), np.float32).astype(dtype)
        assert_bits(total.total(0, 6, dtype), wanted)
        assert_bits(total.mean(0, 6, 2, dtype), wanted)
    assert np.isnan(total.mean(0, 6, 0, F32)).all()
    assert_bits(make_accumulator("sum", F32, 3).total(0, 3, F32), np.zeros(3, np.float32))
    nothing = decode_accumulator(summed([[]]).encode())
    assert nothing.total(0, 0, BF16).shape == (0,)


def test_infinities_are_the_same_bytes_however_they_were_added(monkeypatch):
    """In doubles as IEEE 754 adds them, or beside numbers."""
    rows = np.ones((6, LARGE), np.float32)
    rows[1, 3], rows[2, 4], rows[4, 4], rows[5, 5] = np.inf, np.inf, -np.inf, np.nan
    rows[3, 6] = 2.0**-100  # which no double holds beside the others
    found = set()
    for use_flag in (True, False):
        exact_adds._adder.cache_clear()
        if not use_flag:
            monkeypatch.setattr(exact_adds, "_with_flag", lambda: None)
        for order in (range(6), range(5, -1, -1), (3, 1, 0, 2, 5, 4)):
            total = make_accumulator("sum", F32, LARGE)
            for row in order:
                total.add(read_only(rows[row]))
            found.add(total.encode())
            assert_bits(total.total(3, 6, F32), [np.inf, np.nan, np.nan])
    exact_adds._adder.cache_clear()
    assert len(found) == 1


# --- bytes, and the ways to hold a sum


def test_bytes_depend_on_the_sum_alone():
    terms = {
        "few bits": np.float32([1.5, -2.0, 0.0, 1024.0]),
        "one bit far down": np.float32([1.5, -2.0, 2.0**-149, 1024.0]),
        "infinity": np.float32([1.5, -np.inf, 0.0, 1024.0]),
    }
    for first in terms.values():
        for second in terms.values():
            finite = np.isfinite(second).all()
            rows = first, second, -second if finite else np.zeros(4, np.float32)
            plain, other = summed(rows), make_accumulator("sum", F32, 4)
            for row in rows:
                other.merge(decode_accumulator(summed([row]).encode()))
            assert plain.encode() == other.encode()
            assert plain.total(0, 4, F32).tobytes() == other.total(0, 4, F32).tobytes()
            assert not finite or plain.encode() == summed([first]).encode()


def test_partials_and_merged_accumulators_stay_as_they_are():
    for size in (3, BLOCK + 1):
        partial = np.linspace(-1, 1, size, dtype=np.float32)
        partial[0] = np.inf
        before = partial.copy()
        first, second = summed([partial]), summed([partial])
        partial[:] = 7
        first.merge(second)
        first.add(partial)
        assert_bits(second.total(0, size, F32), before)
        again = make_accumulator("sum", F32, size)
        again.merge(first)
        first.merge(first)
        assert again.total(1, 2, F32)[0] == rounded(exact([before[1], before[1], 7]), F32)
        assert first.total(1, 2, F32)[0] == rounded(2 * exact([before[1], before[1], 7]), F32)


def test_sums_are_held_in_doubles_as_long_as_these_are_exact():
    row = np.full(BLOCK + 1, 1.0, np.float32)
    total = summed([row] * 9)
    assert total.nbytes == 8 * (BLOCK + 1)
    row[0] = 2.0**-60
    total.add(row)
    assert total.nbytes > 8 * (BLOCK + 1)
    assert total.total(0, 1, F64)[0] == 9.0 + 2.0**-60
    wanted = [(9.0 + 2.0**-60) / (1 << 27), 10.0 / (1 << 27)]
    assert total.mean(0, 2, 1 << 27, F64).tolist() == wanted
    assert total.total(1, 2, F32)[0] == 10.0


def test_sums_leave_the_doubles_and_come_back(adds):
    total = make_accumulator("sum", F32, LARGE)
    rows = [2.0**100, 1.0, 2.0**-149, -(2.0**100), 3.0, -(2.0**-149), 5.0, 2.0**127, 2.0**127]
    terms = np.zeros(LARGE, np.float32)
    for value in rows:
        terms[::2], terms[1::2] = value, 1.0
        total.add(read_only(terms))
    assert_bits(total.total(0, 2, F32), [np.inf, np.float32(9)])
    for value in (-(2.0**127), -(2.0**127)):
        terms[::2], terms[1::2] = value, 0.0
        total.add(read_only(terms))
    assert_bits(total.total(0, 2, F32), [np.float32(9), np.float32(9)])
    total.compact()
    assert total.nbytes == 8 * LARGE


def test_zeros_are_merged_with_numbers_of_any_size():
    total = summed([[2.0**-149, 2.0**127, 1.0]])
    zeros = summed(np.full(3, value) for value in (2.0**-149, 0.0, -(2.0**-149)))
    zeros, total = (decode_accumulator(each.encode()) for each in (zeros, total))
    total.merge(zeros)
    zeros.merge(total)
    for found in (total, zeros):
        assert found.total(0, 3, F32).tolist() == [2.0**-149, 2.0**127, 1.0]


def test_only_vectors_that_cannot_change_wait_and_merging_adds_them():
    total = make_accumulator("sum", F32, LARGE)
    row = np.ones(LARGE, np.float32)
    total.add(row)
    row[:] = 7
    total.add(read_only(row))
    assert total.nbytes == 12 * LARGE
    for _ in range(2):
        total.add(read_only(row))
    row[:] = -2
    total.add(row)
    assert total.nbytes == 8 * LARGE
    assert (total.total(0, LARGE, F32) == 20).all()
    first, second = make_accumulator("sum", F32, LARGE), make_accumulator("sum", F32, LARGE)
    row = read_only(np.full(LARGE, 2.0**-30, np.float32))
    for total in (first, second, second):
        total.add(row)
    first.merge(second)
    first.merge(first)
    assert (first.total(0, LARGE, F32) == 6 * 2.0**-30).all()
    assert (second.total(0, LARGE, F32) == 2 * 2.0**-30).all()


# --- what is refused


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code is for x86-64")
def test_flushing_of_subnormals_is_noticed():
    try:
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except PermissionError:
        pytest.skip("no executable memory here")
    page.write(b"\x0f\xae\x17\xc3")  # ldmxcsr [rdi]; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    set_mxcsr = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_uint32))(address)
    usual = 0x1F80
    for flags in (0x8000, 0x0040):  # flush to zero, denormals are zero
        set_mxcsr(ctypes.c_uint32(usual | flags))
        try:
            with pytest.raises(WorkerError, match="1e-40"):
                check_subnormals()
        finally:
            set_mxcsr(ctypes.c_uint32(usual))
    check_subnormals()
