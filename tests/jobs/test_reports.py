"""Reports of runs: what they record, on any runner and however the run ends, and their pages."""

import dataclasses
import itertools
import json
import logging
import os
import time
from pathlib import Path

import html_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import plan_of
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.call import Call
from beamjax.diagnostics.pages.page import document, fragment
from beamjax.diagnostics.pages.run_page import run_page, speed
from beamjax.errors import ArrayFormatError, JobError, OptionsError, SourceError
from beamjax.jobs import recording
from beamjax.jobs.recording import columns, curves, sample, shown_options
from beamjax.jobs.report import COLUMNS, Curve, Report, read_report
from beamjax.options import parse_options
from beamjax.plan.dropping import Dropped
from beamjax.spans import Thinned
from beamjax.storage.schema import to_plain
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.progress import Progress, Totals

N = 24
X = np.arange(N, dtype=np.float32)
EVIL = "<script>alert('x')</script> & \"quotes\""


@bj.program(clients=N)
def descend(w, x):
    def one(w, rate):
        w = w - rate * bj.reduce_mean(bj.map_fn(lambda v: w - v, x))
        return w, {"loss": jnp.abs(w), "twice": jnp.ones((2,)), "round": jnp.int32(3)}

    return jax.lax.scan(one, w, jnp.full(5, 0.1))


def run(folder, runner="local", **options):
    job_folder = {"job_folder": str(folder), "shard_size": 8}
    return bj.run(descend, jnp.float32(1), X, runner=runner, options=job_folder | options)


def page_of(path):
    return html_checks.parsed(path.read_text(encoding="utf-8"))


# --- what is recorded


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_what_a_report_says_of_a_run(runner, tmp_path):
    handlers = list(logging.getLogger("beamjax").handlers)
    _, stacked = run(tmp_path / "job", runner, checkpoint=str(tmp_path / "c"), checkpoint_every=2)
    assert logging.getLogger("beamjax").handlers == handlers
    found = bj.open_job(tmp_path / "job").report()
    assert (found.program, found.runner, found.state) == ("descend", runner, "done")
    assert abs(found.began - time.time()) < 600
    assert found.started in repr(found)
    done = found.progress.done
    assert (done.members, done.shards, found.progress.rounds) == (5 * N, 5 * 3, 5)
    (name,) = (name for name in found.progress.steps if name.startswith("map_clients"))
    assert found.progress.steps[name].members == 5 * N
    steps = found.progress.steps.values()
    assert sum(step.members for step in steps) == done.members
    assert sum(step.compute for step in steps) == pytest.approx(done.compute)
    assert 0 < found.progress.starting <= found.progress.seconds
    assert found.progress.planning > 0
    assert found.samples["members"][-1] == done.members
    assert len(found.round_ends) in ((5,) if runner == "local" else range(1, 6))
    assert len(found.checkpoints) >= 2
    assert list(found.checkpoints) == sorted(found.checkpoints)
    (curve,) = found.curves
    assert (curve.path, curve.rounds, curve.of) == ("result[1]['loss']", (0, 1, 2, 3, 4), 5)
    np.testing.assert_array_equal(np.float32(curve.values), stacked["loss"])
    assert [step["kind"] for step in found.plan["steps"]] == ["Loop"] or found.plan["passes"] == 1
    assert any("bj.reduce_mean" in line for line in found.plan["source_lines"].values())
    assert found.options["shard_size"] == "8"
    assert found.machine["jax"] == jax.__version__
    assert {"python", "beamjax", "numpy", "apache-beam", "processors"} <= set(found.machine)
    assert found.error is None
    assert found.to_json() == json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert "checkpoints" in html_checks.parsed(found.to_html()).text
    run(tmp_path / "again", runner, checkpoint=str(tmp_path / "c"), checkpoint_every=2)
    again = bj.open_job(tmp_path / "again").progress()
    assert (again.done.members, again.done.shards, again.shards) == (0, 0, 0)
    assert (again.rounds, again.rounds_total) == (5, 5)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_trace_has_each_shard_once(runner, tmp_path):
    with bj.launch(descend, jnp.float32(1), X, runner=runner, options={"shard_size": 8}) as job:
        job.result()
        found = job.report()
    with pytest.raises(OptionsError, match=r"found '\S*trace.pdf', .* ends in .html, .htm, .json"):
        found.save(tmp_path / "trace.pdf")
    found.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    spans = [event for event in trace["traceEvents"] if "cat" in event]
    for kind in ("read", "compute", "merge"):
        shards = [event["args"]["shard"] for event in spans if event["cat"] == kind]
        assert sorted(n for n in shards if n is not None) == sorted([0, 1, 2] * 5)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"]
             if event["ph"] == "M"}  # fmt: skip
    assert {event["pid"] for event in spans} == set(names) - {0}
    whole = next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0)
    tracks = {}
    for event in spans:
        assert event["args"]["step"] in found.progress.steps
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
        assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= whole["dur"] + 1e5
    for track in tracks.values():  # nothing overlaps on a track
        for (start, spent), (after, _) in itertools.pairwise(track):
            assert start + spent <= after + 0.5
    assert any(event["name"] == "end of a round" for event in trace["traceEvents"])


def test_the_option_report(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    run(None, job_folder=None, report=tmp_path / "run.html")
    found = page_of(tmp_path / "run.html")
    assert "✓ done" in found.text
    assert found.data["run"]["progress"]["rounds"] == 5
    assert list(folder.iterdir()) == []
    # A page that can't be written costs no result.
    w, _ = run(tmp_path / "job", report=str(tmp_path / "none" / "run.html"))
    assert w.shape == ()
    assert "run.html: cannot write it" in caplog.text
    with pytest.raises(OptionsError, match="report: found 3, expected the path or URL of a file"):
        parse_options({"report": 3})


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_run_that_fails_has_a_report(runner, tmp_path):
    def check(value):
        if value == 13:
            raise ValueError("found <13>")
        return value

    result = jax.ShapeDtypeStruct((), "float32")
    body = lambda v: jax.pure_callback(check, result, v, vmap_method="sequential")
    fails = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    page = tmp_path / "run.html"
    with pytest.raises(bj.WorkerError, match="found <13>"):
        bj.run(fails, X, runner=runner, options={"report": str(page), "shard_size": 8})
    found = page_of(page)
    for text in ("✗ failed", "ValueError: found <13>", "Traceback"):
        assert text in found.text
    assert found.data["run"]["error"]["step"] == "map_clients_0"
    assert "members 8 to 15" in " ".join(found.text.split())


def test_dropped_members_and_warnings(tmp_path):
    total = bj.program(clients=N)(lambda x: bj.reduce_mean(bj.map_fn(jnp.sqrt, x - 2)))
    letters = tmp_path / "letters.jsonl"
    options = {"on_nonfinite": "drop", "dead_letters": str(letters), "report": tmp_path / "r.html"}
    bj.run(total, X, options=options)
    found = page_of(tmp_path / "r.html")
    data = found.data["run"]
    assert [each["member"] for each in data["dropped"]] == [0, 1]
    assert data["progress"]["dropped"] == 2
    assert "2 members were dropped" in data["warnings"][0]
    assert "nonfinite" in found.text
    assert str(letters) in found.text


def test_a_recording_that_fails_costs_no_result(tmp_path, monkeypatch):
    def wrong(*args):
        raise RuntimeError("wrong")

    monkeypatch.setattr(Call, "plan_json", wrong)
    monkeypatch.setattr(recording, "curves", wrong)
    run(tmp_path / "job")
    found = bj.open_job(tmp_path / "job").report()
    assert (found.plan, found.curves) == (None, ())
    assert html_checks.parsed(found.to_html()).all("span", class_="state done")


def test_secrets_among_options_are_not_shown():
    options = {"shard_size": 16, "some_password": "p", "api_key": "k", "region": "here"}
    hidden = dict.fromkeys(("some_password", "api_key"), "(not shown)")
    expected = {"shard_size": "16", "region": "here"} | hidden
    assert shown_options(parse_options(options)) == expected
    assert shown_options(parse_options(None)) == {}


def test_curves_are_floats_of_the_length_of_a_loop(monkeypatch):
    result = {
        "loss": jnp.array([1, jnp.nan, 3, jnp.inf, 5], jnp.bfloat16), "ints": jnp.arange(5),
        "long": jnp.ones(6), "wide": jnp.ones((5, 1)), "scalar": jnp.float32(1), "not": "x",
        "keys": jax.random.split(jax.random.key(0), 5),
    }  # fmt: skip
    plan = plan_of(descend, jnp.float32(1), X)
    (found,) = curves(plan, result)
    assert found == Curve("result['loss']", (0, 1, 2, 3, 4), (1.0, None, 3.0, None, 5.0), 5)
    monkeypatch.setattr(recording, "MAX_SAMPLES", 3)
    assert list(curves(plan, result)) == [Curve("result['loss']", (0, 2, 4), (1.0, 3.0, 5.0), 5)]


def test_damaged_records_are_clear_errors(tmp_path):
    folder = JobFolder(str(tmp_path))
    with pytest.raises(JobError):
        read_report(folder)
    folder.begin("f", "r")
    assert read_report(folder).samples == {}
    curve = {"path": "a", "rounds": ["x"], "values": [1.0], "of": 1}
    samples = filled(8, range(20))
    for course in (
        {"samples": 3}, {"samples": {"seconds": [1.0]}}, {"samples": samples | {"merge": (1,)}},
        {"samples": samples | {"merge": ("x",) * len(samples["merge"])}}, {"round_ends": "x"},
        {"checkpoints": [True]}, {"spans": [["w", ["s", 0, "read", 1.0, 1.0]]]},
        {"warnings": [3]}, {"curves": [{}]}, {"curves": [curve]}, {"curves": 1},
    ):  # fmt: skip
        folder.write("course", to_plain(course))
        with pytest.raises(ArrayFormatError, match=r"course\.record: found"):
            read_report(folder)
    folder.write(
        "course", to_plain({"samples": samples, "spans": [["w", ["s", 0, "read", 1, 2.0, 8]]]})
    )
    found = read_report(folder)
    assert found.samples == samples
    folder.write("about", {"plan": 3})
    with pytest.raises(ArrayFormatError, match=r"found 3 as Setup\.plan"):
        read_report(folder)


# --- samples over time


def filled(most, seconds):
    samples = Thinned(most)
    for i, second in enumerate(seconds):
        done = Totals(members=i, compute=second / 2)
        last = sample(Progress(done=done, seconds=float(second), rounds=i // 3))
        samples.add(last)
    return columns([*samples.entries, last])


def test_long_runs_have_few_samples_evenly():
    for count in (1, 7, 8, 9, 100, 5000):
        samples = filled(8, np.arange(count) * 0.5)
        seconds = np.array(samples["seconds"])
        assert set(samples) == set(COLUMNS)
        assert len({len(column) for column in samples.values()}) == 1
        assert len(seconds) <= 9
        assert seconds[0] == 0
        assert seconds[-1] == (count - 1) * 0.5  # The newest is always there.
        assert (np.diff(seconds) > 0).all()
        if count >= 100:
            assert len(seconds) >= 4
            gaps = np.diff(seconds)[:-1]
            assert gaps.max() <= 2.1 * gaps.min()
        np.testing.assert_allclose(samples["members"], seconds / 0.5)
        np.testing.assert_allclose(samples["compute"], seconds / 2)
        assert samples["rounds"] == tuple(m // 3 for m in samples["members"])


@given(st.integers(0, 3000), st.integers(2, 50))
def test_moments_are_every_so_many(count, most):
    moments = Thinned(most)
    for i in range(count):
        moments.add(float(i))
    found = np.array(moments.entries)
    assert len(found) <= most
    assert len(set(np.diff(found))) <= 1
    assert count < most or len(found) >= most // 2
    if count:
        assert found[0] == 0


# --- the page


def example_report(seconds=30, **more):
    """The report of a run that went on for so many seconds."""
    samples = []
    for i in range(seconds * 2 + 1):
        done = Totals(
            members=100 * i, shards=i, retries=i // 20, bytes_read=4000 * i, read=0.1 * i,
            transfer=0.01 * i, compile=min(i, 4), compute=0.3 * i, merge=0.02 * i,
        )  # fmt: skip
        progress = Progress(
            done, members=100 * (seconds * 2), shards=60, rounds=i // 10, rounds_total=6,
            dropped=i // 30, step="map", workers=2, seconds=i / 2,
            steps={"map_clients_0": done, "server_0": Totals(compute=1.0)},
        )  # fmt: skip
        samples.append(sample(progress))
    found = Report(
        "train", "DirectRunner", "done", 1.8e9, progress, samples=columns(samples),
        round_ends=tuple(5.0 * i for i in range(1, 7)), checkpoints=(10.0, 20.0),
        curves=(Curve("result['loss']", tuple(range(6)), (5.0, 3.0, 2.0, None, 1.0, 0.5), 6),),
        options={"checkpoint": "/there", "dead_letters": "/letters"}, machine={"jax": "1"},
    )  # fmt: skip
    return dataclasses.replace(found, **more)


def test_what_a_page_shows():
    dropped = tuple(
        Dropped("clients", i, "map_clients_0", ("error", "nonfinite")[i % 2], EVIL)
        for i in range(30)
    )
    given = example_report(dropped=dropped, warnings=("a warning",), plan=None)
    found = html_checks.parsed(document(run_page(given.to_json())))
    for text in (
        "run of train", "✓ done", "Shards done", "Members per second",
        "Shards retried", "Members dropped", "result['loss']", "Where the time went", "a warning",
        "Rounds and checkpoints", "after 20 s", "/there", "/letters", "10 more are not shown",
        "round 5: 0.5", "shards: 60 at 30 s", "time per round", "last checkpoint",
        "read 20%, transfer 2%",
    ):  # fmt: skip
        assert text in found.text, text
    assert found.data["run"]["curves"][0]["values"][3] is None
    charts = {chart["title"]: chart for chart in found.data["charts"]}
    assert len(found.all("figure", class_="chart")) == len(charts) == 6
    shards, loss = charts["Shards done"], charts["result['loss']"]
    assert (shards["goal"], shards["saved"], len(shards["marks"])) == (60, [10, 20], 6)
    assert shards["series"][0]["y"] == list(given.samples["shards"])
    assert loss["series"][0]["y"] == [5.0, 3.0, 2.0, None, 1.0, 0.5]
    assert loss["wide"]
    shares = charts["How workers spend their time"]["series"]
    np.testing.assert_allclose(np.sum([each["y"] for each in shares], axis=0), 1)
    page = run_page(example_report().to_json())
    html_checks.parsed(fragment(page) + fragment(page))  # A notebook may hold both.
    page = Report("f", "r", "lost", 0.0, Progress()).to_html()
    empty = html_checks.parsed(page)
    assert "? lost" in empty.text
    assert "<h2>" not in page  # no headings without content
    nothing = Curve("nothing", (0, 1), (None, None), 2)
    found = html_checks.parsed(document(run_page(example_report(curves=(nothing,)).to_json())))
    assert "There are no finite values" in found.text
    assert found.data["charts"][-1]["series"] == []


def test_one_shard_is_singular():
    progress = dataclasses.replace(example_report().progress, shards=1)
    found = html_checks.parsed(document(run_page(example_report(progress=progress).to_json())))
    assert "of 1 shard" in found.text
    assert "of 1 shards" not in found.text


def test_time_without_workers_is_starting():
    samples = []
    for i in range(41):  # Workers begin after 10 s, and report every second.
        done = Totals(compute=float(max(0, i // 2 - 10)))
        samples.append(sample(Progress(done, seconds=i / 2)))
    given = example_report(samples=columns(samples))
    progress = dataclasses.replace(given.progress, starting=10.0, planning=3.0)
    found = html_checks.parsed(dataclasses.replace(given, progress=progress).to_html())
    assert "planning, before" in found.text
    charts = {chart["title"]: chart for chart in found.data["charts"]}
    chart = charts["How workers spend their time"]
    # Each interval of time has two points.
    series = {each["name"]: np.array(each["y"][::2]) for each in chart["series"]}
    at = np.array(chart["x"]).reshape(-1, 2).mean(axis=1)
    np.testing.assert_array_equal(series["starting"], at <= 10)
    np.testing.assert_array_equal(series["compute"], at > 10)


def test_texts_of_users_stay_texts():
    error = {"type": "ValueError", "message": f"{EVIL}\n" * 9, "traceback": EVIL, "step": EVIL}
    for state in ("running", "failed", "cancelled", "lost"):
        found = example_report(
            state=state, program=EVIL, runner=EVIL, warnings=(EVIL,), error=error,
            options={EVIL: EVIL}, machine={EVIL: EVIL},
            curves=(Curve(EVIL, (0, 1), (1.0, 2.0), 9),),
            dropped=(Dropped(EVIL, 1, EVIL, EVIL, EVIL),),
        )  # fmt: skip
        for html in (found.to_html(), found._repr_html_()):
            assert "<script>alert" not in html
            page = html_checks.parsed(html)
            assert page.text.count("alert('x')") >= 14
            assert page.data["run"]["program"] == EVIL
            assert "2 of 9 rounds are shown" in page.text


def test_speed_is_the_slope():
    seconds = np.arange(0, 100, 0.5)
    middles, speeds = speed(seconds, 7 * seconds)
    np.testing.assert_allclose(speeds, 7)
    assert 30 < len(middles) <= 61
    _, speeds = speed(seconds, 10 * np.floor(seconds))  # Workers write once a second.
    assert min(speeds) > 5
    assert speed([0, 0, 0], [0, 0, 5]) == ([], [])


def test_speed_includes_the_end():
    seconds, members = [0.0, 0.14, 0.2, 0.3, 0.34], [0, 0, 0, 0, 7]
    middles, speeds = speed(seconds, members)
    assert len(middles) == len(speeds) == 3
    assert speeds == [0, 0, pytest.approx(7 / 0.14)]


def test_a_page_is_never_half_written(tmp_path, monkeypatch):
    path = tmp_path / "run.html"
    report = example_report()
    report.save(path)
    whole, mode = path.read_text(), path.stat().st_mode

    def fail(self, text, **how):
        with open(self, "w") as file:
            file.write(text[:1000])
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        with pytest.raises(SourceError, match="the disk is full"):
            report.save(path)
    assert path.read_text() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["run.html"]
    (tmp_path / "link.html").symlink_to(path)
    report.save(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    umask = os.umask(0)
    os.umask(umask)
    assert mode & 0o777 == 0o666 & ~umask
