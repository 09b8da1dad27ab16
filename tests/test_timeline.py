"""Samples over time: few of them, however long it takes, and evenly over it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax.errors import ArrayFormatError
from beamjax.progress import Progress, Tally
from beamjax.timeline import COLUMNS, Moments, Timeline, numbers, samples_from_json, thinned


def filled(most, seconds):
    timeline = Timeline(most)
    for i, second in enumerate(seconds):
        done = Tally(members=i, compute=second / 2)
        timeline.add(Progress(done=done, seconds=float(second), rounds=i // 3))
    return timeline.samples


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 5000])
def test_long_runs_have_few_samples_evenly(count):
    samples = filled(8, np.arange(count) * 0.5)
    seconds = np.array(samples["seconds"])
    assert set(samples) == set(COLUMNS)
    assert len({len(column) for column in samples.values()}) == 1
    assert len(seconds) <= 9
    assert seconds[0] == 0
    assert seconds[-1] == (count - 1) * 0.5  # the newest is always known
    assert (np.diff(seconds) > 0).all()
    if count >= 100:
        assert len(seconds) >= 4
        gaps = np.diff(seconds)[:-1]
        assert gaps.max() <= 2.1 * gaps.min()
    np.testing.assert_allclose(samples["members"], seconds / 0.5)
    np.testing.assert_allclose(samples["compute"], seconds / 2)
    assert samples["rounds"] == tuple(m // 3 for m in samples["members"])


def test_looks_that_come_at_any_time():
    rng = np.random.default_rng(0)
    seconds = np.sort(np.concatenate([rng.uniform(0, 1, 300), rng.uniform(0, 100, 300)]))
    samples = filled(40, seconds)
    assert len(samples["seconds"]) <= 41
    assert np.diff(samples["seconds"])[10:].max() < 15


@given(st.integers(0, 3000), st.integers(2, 50))
def test_moments_are_every_so_many(count, most):
    moments = Moments(most)
    for i in range(count):
        moments.add(float(i))
    found = np.array(moments.times)
    assert len(found) <= most
    assert len(set(np.diff(found))) <= 1
    assert count < most or len(found) >= most // 2
    if count:
        assert found[0] == 0


def test_samples_as_json():
    samples = filled(8, range(20))
    record = {name: list(column) for name, column in samples.items()}
    assert samples_from_json(record, "here") == samples
    del record["merge"]
    assert samples_from_json(record, "here")["merge"] == (0.0,) * len(samples["seconds"])
    assert samples_from_json({}, "here")["seconds"] == ()


@pytest.mark.parametrize(
    "record",
    [[], "x", {"seconds": "x"}, {"seconds": [1, None]}, {"seconds": [1], "members": [1, 2]},
     {"seconds": [float("nan")]}, {"seconds": [True]}],
)  # fmt: skip
def test_other_records_are_clear_errors(record):
    with pytest.raises(ArrayFormatError, match="here: found"):
        samples_from_json(record, "here")
    with pytest.raises(ArrayFormatError, match="expected a list of finite numbers"):
        numbers({"a": 1}, "here")


@given(st.lists(st.floats(allow_nan=False), max_size=60), st.integers(2, 20))
def test_thinned_values_are_those_of_their_places(values, most):
    places, kept = thinned(values, most)
    assert kept == [values[i] for i in places]
    assert len(places) == min(len(values), most)
    assert places == sorted(set(places))
    if values:
        assert (places[0], places[-1]) == (0, len(values) - 1)
