"""How fast this machine is: measured, kept, and mended."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax import calibration as module
from beamjax import plan_cache
from beamjax.calibration import Calibration, calibrated, calibration, measure, remember
from beamjax.costs import Cost, Rates


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(module, "_known", {})
    return tmp_path


@pytest.fixture
def measured(monkeypatch):
    """Counts how often the machine is measured."""
    calls = []

    def fake():
        calls.append(1)
        return Rates(1e9, 2e9, 3e-6, 4e-5), 5e9, 6e8

    monkeypatch.setattr(module, "measure", fake)
    return calls


def test_a_machine_is_measured_once(cache, measured):
    assert not calibration().measured
    found = calibrated()
    assert (found.rates, found.read, found.merge) == (Rates(1e9, 2e9, 3e-6, 4e-5), 5e9, 6e8)
    module._known.clear()  # as in another process
    assert calibrated() == calibration() == found
    assert measured == [1]


def test_it_is_measured_once_a_process_where_nothing_is_remembered(monkeypatch, measured):
    monkeypatch.setattr(module, "_known", {})
    assert calibrated() == calibrated()
    assert measured == [1]


def test_what_is_measured_can_be():
    rates, read, merge = measure()
    for found in (*vars(rates).values(), read, merge):
        assert 0 < found < math.inf
    assert rates.flops > 1e7


def test_files_of_older_versions_are_left_alone(cache, measured, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(module, "FORMAT", module.FORMAT - 1)
        remember(Calibration(read=7.0))
    module._known.clear()
    assert calibration() == Calibration()


def test_slower_operations_have_a_rate_of_their_own():
    slow = Rates(extra=1e9)
    assert slow.seconds(Cost(flops=5e10)) == Rates().seconds(Cost(flops=5e10)) == 1.0
    assert slow.seconds(Cost(extra=1e9)) == 1.0
    assert Rates().seconds(Cost(flops=2.0, extra=3.0)) == pytest.approx(5.0 / Rates().flops)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 7}, {"rates": None}, {"rates": {"flops": 1.0}}, {"read": -1.0}, {"merge": "x"},
        {"factors": {"compute": 0}}, {"factors": []}, {"read": True}, {"merge": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_files_of_something_else_are_ignored(cache, change):
    remember(Calibration())
    (path,) = cache.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    module._known.clear()
    with pytest.warns(RuntimeWarning, match="will be written anew"):
        assert calibration() == Calibration()


def test_runs_mend_it(cache):
    known = Calibration()
    for _ in range(30):
        known = known.mended("compute", known.factor("compute") * 2.0, 6.0)
    assert known.factor("compute") == pytest.approx(3.0, rel=1e-3)
    remember(known)
    module._known.clear()
    assert calibration() == known


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), max_size=20))
def test_factors_stay_numbers(pairs):
    known = Calibration()
    for predicted, measured in pairs:
        known = known.mended("read", predicted, measured)
        assert 0.99 / module.MAX_FACTOR <= known.factor("read") <= 1.01 * module.MAX_FACTOR
    assert Calibration.from_json(json.loads(json.dumps(known.to_json()))) == known


def test_runners_take_something_for_themselves():
    known = Calibration(factors={"FlinkRunner": 2.0})
    assert known.fixed("local").pipeline == 0
    assert known.fixed("FnApiRunner") == known.fixed("DirectRunner")
    assert known.fixed("FlinkRunner").pipeline == 2 * Calibration().fixed("FlinkRunner").pipeline
    assert known.fixed("SomeRunner") == module.ELSEWHERE
