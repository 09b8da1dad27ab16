"""Which members of a shard are left: found by halves, and computed with nothing of the others."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax.errors import WorkerError
from beamjax.plan.dropping import MAX_MESSAGE
from beamjax.plan.steps import Guard, Map, ValueType
from beamjax.runtime.failing_members import compute_rest, failing, filled, message_of, read_rest

places = st.sets(st.integers(0, 12))
ALL = np.ones(13, bool)


def guarded(on_error="drop", on_nonfinite="keep"):
    guard = Guard(on_error, on_nonfinite)
    return Map("map_0", "clients", "body", (), (), (), (), guard=guard)


class Body:
    """Sums the places of the members that count; fails where one of `bad` is computed."""

    def __init__(self, bad=(), wild=None):
        self.bad, self.wild, self.calls = set(bad), wild, 0

    def __call__(self, computed, counted):
        self.calls += 1
        assert counted[computed].all(), "it computes a member that does not count"
        found = self.bad & set(computed.tolist())
        if found:
            raise ValueError(f"bad {sorted(found)}")
        outs = [np.array([np.flatnonzero(counted).sum()])]
        if self.wild is not None:
            # Padding comes after the members.
            finite = ~np.isin(computed, list(self.wild))
            outs.append(np.concatenate([finite, np.zeros(3, bool)]))
        return outs


@given(bad=places, before=places, lost=places)
def test_members_that_can_be_computed(bad, before, lost):
    kept = ~np.isin(np.arange(13), list(before))
    body = Body(bad)
    outs, left, dropped = compute_rest(guarded(), 100, kept, dict.fromkeys(lost, "lost"), body)
    gone = (bad | lost) - before
    assert np.flatnonzero(left).tolist() == sorted(set(range(13)) - bad - before - lost)
    assert [each.member - 100 for each in dropped] == sorted(gone)
    assert {each.message for each in dropped} <= {"lost", *(f"ValueError: bad [{k}]" for k in bad)}
    where = {(each.placement, each.step, each.reason) for each in dropped}
    assert where <= {("clients", "map_0", "error")}
    assert kept.sum() == 13 - len(before), "it was changed"
    assert outs is None if not left.any() else outs[0] == np.flatnonzero(left).sum()


@given(st.sets(st.integers(0, 1023), max_size=5))
def test_few_calls_find_members_that_fail(bad):
    body = Body(bad)
    assert sorted(failing(np.ones(1024, bool), body)) == sorted(bad)
    assert body.calls <= 1 + 2 * 10 * len(bad)


@given(wild=places)
def test_members_that_give_nan(wild):
    body = Body((), wild)
    outs, left, dropped = compute_rest(guarded("raise", "drop"), 0, ALL, {}, body)
    assert [each.member for each in dropped] == np.flatnonzero(~left).tolist() == sorted(wild)
    assert {each.reason for each in dropped} <= {"nonfinite"}
    assert body.calls <= 2
    assert (outs is None) == (len(wild) == 13)


def test_members_that_give_nan_are_named():
    for wild, message in [
        (range(4, 13), "104, 105, 106, 107, 108, 109, 110, 111 and 1 more: found NaN or infinity"),
        (range(4, 12), "104, 105, 106, 107, 108, 109, 110, 111: found NaN or infinity"),
    ]:
        with pytest.raises(WorkerError, match=f"^member {message}"):
            compute_rest(guarded("raise", "raise"), 100, ALL, {}, Body((), set(wild)))


def test_errors_of_no_member():
    def never_together(computed, counted):
        if len(set(computed.tolist())) > 6:
            raise MemoryError("too many at once")

    with pytest.raises(MemoryError, match="too many at once"):
        compute_rest(guarded(), 0, ALL, {}, never_together)
    with pytest.raises(ValueError, match=r"bad \[3\]"):
        compute_rest(guarded("raise"), 0, ALL, {}, Body({3}))


@given(bad=places, start=st.integers(0, 50))
def test_members_that_can_be_read(bad, start):
    rows = np.arange(200, dtype=np.int16).reshape(100, 2)

    def read(first, last):
        for k in range(first, last):
            if k - start in bad:
                raise OSError(f"record {k}")
        return {"x": rows[first:last], "y": rows[first:last, 0]}

    types = {"x": ValueType((2,), "int16"), "y": ValueType((), "int16")}
    found, lost = read_rest(read, types, start, 13)
    assert lost == {k: f"OSError: record {start + k}" for k in bad}
    expected = rows[start : start + 13].copy()
    expected[list(bad)] = 0
    np.testing.assert_array_equal(found["x"], expected)
    np.testing.assert_array_equal(found["y"], expected[:, 0])
    assert (found["x"].dtype, found["y"].dtype) == (np.int16, np.int16)


def test_holes_in_results():
    with_nan = ["float32", "float64", "complex64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
    for dtype in (*with_nan, "int8", "bool", ml_dtypes.int4, ml_dtypes.float4_e2m1fn):
        hole = np.nan if dtype in with_nan else 0
        array = np.ones((3, 2), dtype)
        array.flags.writeable = False
        found = filled(array, np.array([True, False, True]))
        assert found.dtype == array.dtype
        wide = np.complex64([[1, 1], [hole, hole], [1, 1]]).real + 0j
        np.testing.assert_array_equal(found.astype(np.complex64), wide)


def test_long_messages_keep_their_end():
    text = message_of(ValueError("a" * 10_000 + "the cause"))
    assert text.startswith("ValueError: aaa")
    assert text.endswith("the cause")
    assert len(text) < MAX_MESSAGE + 300
