"""The page of a run, and its charts: what they show, for any numbers."""

import dataclasses
import math

import html_checks
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax.dropping import Dropped
from beamjax.pages.charts import Line, chart, plain, shares_bar, stacked_chart, ticks
from beamjax.pages.run_page import run_page, seconds_of, speed
from beamjax.pages.shell import document, fragment
from beamjax.progress import SECONDS, Progress, Tally
from beamjax.report import Curve, Report
from beamjax.timeline import Timeline

EVIL = "<script>alert('x')</script> & \"quotes\""


def report(seconds=30, **more):
    timeline = Timeline()
    for i in range(seconds * 2 + 1):
        done = Tally(
            members=100 * i, shards=i, retries=i // 20, bytes_read=4000 * i, read=0.1 * i,
            transfer=0.01 * i, compile=min(i, 4), compute=0.3 * i, merge=0.02 * i,
        )  # fmt: skip
        progress = Progress(
            done, members=100 * (seconds * 2), shards=60, rounds=i // 10, rounds_total=6,
            dropped=i // 30, step="map", workers=2, seconds=i / 2,
            steps={"map_clients_0": done, "server_0": Tally(compute=1.0)},
        )  # fmt: skip
        timeline.add(progress)
    found = Report(
        "train", "DirectRunner", "done", 1.8e9, progress, timeline.samples,
        tuple(5.0 * i for i in range(1, 7)), (10.0, 20.0),
        (Curve("result['loss']", tuple(range(6)), (5.0, 3.0, 2.0, math.nan, 1.0, 0.5), 6),),
        options={"checkpoint": "/there", "dead_letters": "/letters"}, machine={"jax": "1"},
    )  # fmt: skip
    return dataclasses.replace(found, **more)


def test_what_is_shown():
    dropped = tuple(
        Dropped("clients", i, "map_clients_0", ("error", "nonfinite")[i % 2], EVIL)
        for i in range(30)
    )
    found = html_checks.parsed(document(run_page(report(dropped=dropped, warnings=("be told",)))))
    for text in (
        "run of train", "✓ done", "Members done", "Members a second", "Rounds done",
        "Shards again", "Members dropped", "result['loss']", "Where the time went", "be told",
        "Rounds and checkpoints", "after 20 s", "/there", "/letters", "10 more are not shown",
        "round 5: 0.5", "6000 members at 30 s", "5 s on average",
    ):  # fmt: skip
        assert text in found.text, text
    assert found.data["run"]["curves"][0]["values"][3] is None
    assert len(found.all("path", class_="saved")) == 4
    assert len(found.all("path", class_="mark")) == 6
    assert {"goal"} <= {a.get("class") for a in found.all("path")}


@pytest.mark.parametrize("state", ["running", "failed", "cancelled", "lost"])
def test_texts_of_users_stay_texts(state):
    error = {"type": "ValueError", "message": f"{EVIL}\n" * 9, "traceback": EVIL, "step": EVIL}
    found = report(
        state=state, program=EVIL, runner=EVIL, warnings=(EVIL,), error=error,
        options={EVIL: EVIL}, machine={EVIL: EVIL}, curves=(Curve(EVIL, (0, 1), (1.0, 2.0), 9),),
        dropped=(Dropped(EVIL, 1, EVIL, EVIL, EVIL),),
    )  # fmt: skip
    for html in (document(run_page(found)), fragment(run_page(found))):
        assert "<script>alert" not in html
        told = html_checks.parsed(html)
        assert told.text.count("alert('x')") >= 14
        assert told.data["run"]["program"] == EVIL
        assert "2 of 9 rounds are shown" in told.text


def test_parts_of_a_notebook_come_twice():
    page = run_page(report())
    html_checks.parsed(fragment(page) + fragment(page))


def test_predicted_seconds_are_told_where_they_are_known():
    progress = report().progress
    for name, value in {
        "predicted": {"(total)": 12.0, "server_0": 0.25},
        "advice": "do less",
    }.items():
        object.__setattr__(progress, name, value)
    found = html_checks.parsed(document(run_page(report(progress=progress, plan=None))))
    assert "predicted, without compiling" in found.text
    assert "250 ms" in found.text
    assert "do less" in found.text


def test_speed_is_the_slope():
    seconds = np.arange(0, 100, 0.5)
    middles, speeds = speed(seconds, 7 * seconds)
    np.testing.assert_allclose(speeds, 7)
    assert 30 < len(middles) <= 61
    told = np.floor(seconds)  # as workers do, once a second
    _, speeds = speed(seconds, 10 * told)
    assert min(speeds) > 5
    assert speed([0, 0, 0], [0, 0, 5]) == ([], [])


@given(
    st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.integers(1, 8), st.booleans()
)  # fmt: skip
def test_ticks_are_round_and_around(a, b, about, whole):
    low, high = sorted((round(a), round(b)) if whole else (a, b))
    if high - low < 1e-6 * max(abs(low), abs(high)):
        high = low
    found = ticks(low, high, about, whole)
    assert len(found) >= 2
    room = 1e-6 * (found[-1] - found[0])
    assert found[0] <= low + room
    assert found[-1] >= high - room
    assert len(found) <= about + 3
    assert not whole or all(float(tick).is_integer() for tick in found)


@given(st.lists(st.one_of(st.floats(), st.integers(-9, 9)), min_size=1, max_size=300))
def test_any_line_is_a_chart(values):
    found = html_checks.parsed(chart(Line("t", range(len(values)), values, "round", "y")))
    assert len(found.all("rect")) <= 120
    assert "nan" not in str(found.all("path"))
    for path in found.all("path", class_="curve"):
        assert "inf" not in path["d"]
    if not any(map(math.isfinite, values)):
        assert "no finite values" in found.text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (1234.5, "1234"), (12345, "12.35 k"), (2.5e6, "2.5 M"),
     (3e9, "3 G"), (1e-7, "1e-07"), (math.inf, "inf"), (-12345, "-12.35 k")],
)  # fmt: skip
def test_numbers_for_people(value, text):
    assert plain(value) == text


def test_shares():
    found = html_checks.parsed(shares_bar(Tally(read=1.0, compute=3.0)))
    assert [a["class"] for a in found.all("span")] == ["read", "compute"]
    assert [a["style"] for a in found.all("span")] == ["width:25%", "width:75%"]
    assert found.text == "read 25%, compute 75%"
    assert html_checks.parsed(shares_bar(Tally())).all("div", aria_label=None) is not None
    assert seconds_of(Tally(read=1.0, merge=2.0)) == 3.0
    shares = {kind: [0.2, 0.2] for kind in SECONDS}
    found = html_checks.parsed(stacked_chart("t", [0.0, 1.0], shares, "s"))
    assert [a["class"] for a in found.all("path")][:5] == list(SECONDS)
    assert "Nothing was measured" in html_checks.parsed(stacked_chart("t", [], shares, "s")).text
