"""Who is left of a shard: found by halves, and computed with nothing of the others."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax.dropping import MAX_MESSAGE, Guard
from beamjax.errors import WorkerError
from beamjax.plan import Map, ValueType
from beamjax.survivors import compute_rest, failing, filled, message_of, read_rest

places = st.sets(st.integers(0, 12))


def guarded(on_error="drop", on_nonfinite="keep"):
    guard = Guard(on_error, on_nonfinite)
    return Map("map_0", "clients", "body", (), (), (), (), guard=guard)


class Body:
    """Sums the places of the members that count; fails where one of `bad` is computed."""

    def __init__(self, bad=(), wild=None):
        self.bad, self.wild, self.calls = set(bad), wild, 0

    def __call__(self, computed, counted):
        self.calls += 1
        assert counted[computed].all(), "it computes somebody who does not count"
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
def test_who_can_be_computed(bad, before, lost):
    kept = ~np.isin(np.arange(13), list(before))
    body = Body(bad)
    outs, left, dropped = compute_rest(guarded(), 100, kept, dict.fromkeys(lost, "lost"), body)
    gone = (bad | lost) - before
    assert np.flatnonzero(left).tolist() == sorted(set(range(13)) - bad - before - lost)
    assert [each.member - 100 for each in dropped] == sorted(gone)
    assert {each.message for each in dropped} <= {"lost", *(f"ValueError: bad [{k}]" for k in bad)}
    assert {(each.placement, each.step, each.reason) for each in dropped} <= {
        ("clients", "map_0", "error")
    }
    assert kept.sum() == 13 - len(before), "it was changed"
    if left.any():
        assert outs[0] == np.flatnonzero(left).sum()
    else:
        assert outs is None


@given(st.sets(st.integers(0, 1023), max_size=5))
def test_few_calls_find_who_fails(bad):
    body = Body(bad)
    found = failing(np.ones(1024, bool), body)
    assert sorted(found) == sorted(bad)
    assert body.calls <= 1 + 2 * 10 * len(bad)


@given(wild=places)
def test_who_gives_nan(wild):
    body = Body((), wild)
    outs, left, dropped = compute_rest(
        guarded("raise", "drop"), 0, np.ones(13, bool), {}, body
    )  # fmt: skip
    assert [each.member for each in dropped] == np.flatnonzero(~left).tolist() == sorted(wild)
    assert {each.reason for each in dropped} <= {"nonfinite"}
    assert body.calls <= 2
    assert (outs is None) == (len(wild) == 13)


def test_who_gives_nan_is_named():
    message = r"^member 104, 105, .*, 111 and 1 more: found NaN or infinity"
    body = Body((), set(range(4, 13)))
    with pytest.raises(WorkerError, match=message):
        compute_rest(guarded("raise", "raise"), 100, np.ones(13, bool), {}, body)


def test_errors_that_are_nobodys():
    def never_together(computed, counted):
        if len(set(computed.tolist())) > 6:
            raise MemoryError("too many at once")

    with pytest.raises(MemoryError, match="too many at once"):
        compute_rest(guarded(), 0, np.ones(13, bool), {}, never_together)
    with pytest.raises(ValueError, match=r"bad \[3\]"):
        compute_rest(guarded("raise"), 0, np.ones(13, bool), {}, Body({3}))


@given(bad=places, start=st.integers(0, 50))
def test_who_can_be_read(bad, start):
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


@pytest.mark.parametrize(
    ("dtype", "hole"),
    [
        ("float32", np.nan), ("float64", np.nan), ("complex64", np.nan), ("int8", 0), ("bool", 0),
        (ml_dtypes.bfloat16, np.nan), (ml_dtypes.float8_e4m3fn, np.nan), (ml_dtypes.int4, 0),
        (ml_dtypes.float4_e2m1fn, 0),
    ],
)  # fmt: skip
def test_holes_in_results(dtype, hole):
    array = np.ones((3, 2), dtype)
    array.flags.writeable = False
    found = filled(array, np.array([True, False, True]))
    assert found.dtype == array.dtype
    wide = found.astype(np.complex64)
    np.testing.assert_array_equal(wide, np.complex64([[1, 1], [hole, hole], [1, 1]]).real + 0j)


def test_long_messages_keep_their_end():
    text = message_of(ValueError("a" * 10_000 + "the cause"))
    assert text.startswith("ValueError: aaa")
    assert text.endswith("the cause")
    assert len(text) < MAX_MESSAGE + 300
