"""What is kept of a run for its report, on any runner, however it ends."""

import json
import logging
import math
import time

import html_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax import recording, report
from beamjax.errors import ArrayFormatError, JobError, OptionsError
from beamjax.job_folder import JobFolder
from beamjax.options import parse_options
from beamjax.recording import curves, options_told
from beamjax.report import Curve, Report, curve_to_json, read_report

N = 24
X = np.arange(N, dtype=np.float32)


@bj.program(clients=N)
def descend(w, x):
    def one(w, rate):
        w = w - rate * bj.reduce_mean(bj.map_fn(lambda v: w - v, x))
        return w, {"loss": jnp.abs(w), "twice": jnp.ones((2,)), "round": jnp.int32(3)}

    return jax.lax.scan(one, w, jnp.full(5, 0.1))


def run(folder, runner="local", **options):
    job_folder = {"job_folder": str(folder), "shard_size": 8}
    return bj.run(descend, jnp.float32(1), X, runner=runner, options=job_folder | options)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_what_is_known_of_a_run(runner, tmp_path):
    w, told = run(tmp_path / "job", runner)
    found = bj.open_job(tmp_path / "job").report()
    assert (found.program, found.runner, found.state) == ("descend", runner, "done")
    assert abs(found.began - time.time()) < 600
    assert found.started in repr(found)
    done = found.progress.done
    assert (done.members, done.shards, found.progress.rounds) == (5 * N, 5 * 3, 5)
    (passed,) = (name for name in found.progress.steps if name.startswith("map_clients"))
    assert found.progress.steps[passed].members == 5 * N
    total = sum(found.progress.steps.values(), report.Progress().done)
    assert total.members == done.members
    assert total.compute == pytest.approx(done.compute)
    assert found.samples["members"][-1] == done.members
    assert len(found.round_ends) in ((5,) if runner == "local" else (1, 5))
    (curve,) = found.curves
    assert (curve.path, curve.rounds, curve.of) == ("result[1]['loss']", (0, 1, 2, 3, 4), 5)
    np.testing.assert_array_equal(np.float32(curve.values), told["loss"])
    assert (
        found.plan == bj.explain(descend, w, X, options={"shard_size": 8}).facts
        or runner == "local"
    )
    assert [step.kind for step in found.plan.steps] == ["Loop"] or found.plan.passes == 1
    assert any("bj.reduce_mean" in line for line in found.source_lines.values())
    assert found.options == {"job_folder": str(tmp_path / "job"), "shard_size": "8"}
    assert found.machine["jax"] == jax.__version__
    assert {"python", "beamjax", "numpy", "apache-beam", "processors"} <= set(found.machine)
    assert found.error is None
    assert found.to_json() == json.loads(json.dumps(found.to_json(), allow_nan=False))


def test_a_report_without_a_folder(tmp_path, empty_tmp):
    page = tmp_path / "run.html"
    run(None, job_folder=None, report=page)
    found = html_checks.parsed(page.read_text(encoding="utf-8"))
    assert "✓ done" in found.text
    assert found.data["run"]["progress"]["rounds"] == 5
    assert list(empty_tmp.iterdir()) == []


@pytest.fixture
def empty_tmp(tmp_path, monkeypatch):
    """A folder for temporary files, to be left empty."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@bj.program(clients=N)
def fails(x):
    def check(value):
        if value == 13:
            raise ValueError("found <13>")
        return value

    result = jax.ShapeDtypeStruct((), "float32")
    body = lambda v: jax.pure_callback(check, result, v, vmap_method="sequential")
    return bj.reduce_sum(bj.map_fn(body, x))


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_run_that_fails_has_a_report(runner, tmp_path):
    page = tmp_path / "run.html"
    with pytest.raises(bj.WorkerError, match="found <13>"):
        bj.run(fails, X, runner=runner, options={"report": str(page), "shard_size": 8})
    html = page.read_text(encoding="utf-8")
    found = html_checks.parsed(html)
    assert "✗ failed" in found.text
    assert "ValueError: found <13>" in found.text
    assert "Traceback" in found.text
    assert found.data["run"]["error"]["step"] == "map_clients_0"


def test_dropped_members_and_warnings(tmp_path):
    total = bj.program(clients=N)(lambda x: bj.reduce_mean(bj.map_fn(jnp.sqrt, x - 2)))
    letters = tmp_path / "letters.jsonl"
    options = {"on_nonfinite": "drop", "dead_letters": str(letters), "report": tmp_path / "r.html"}
    bj.run(total, X, options=options)
    found = html_checks.parsed((tmp_path / "r.html").read_text(encoding="utf-8"))
    told = found.data["run"]
    assert [each["member"] for each in told["dropped"]] == [0, 1]
    assert told["progress"]["dropped"] == 2
    assert "2 members were dropped" in told["warnings"][0]
    assert "nonfinite" in found.text
    assert str(letters) in found.text


def test_checkpoints_are_told(tmp_path):
    run(tmp_path / "job", checkpoint=str(tmp_path / "saved"), checkpoint_every=2)
    found = read_report(JobFolder(str(tmp_path / "job")))
    assert len(found.checkpoints) == 2
    assert list(found.checkpoints) == sorted(found.checkpoints)
    assert "checkpoints" in html_checks.parsed(found.to_html()).text


def test_a_launched_job_can_be_asked_at_any_time():
    with bj.launch(descend, jnp.float32(1), X, runner="local") as job:
        assert job.report().program == "descend"
        job.result()
        assert job.report().state == "done"
        assert len(job.report().curves) == 1


def test_a_page_that_cannot_be_written_costs_no_result(tmp_path, caplog):
    w, _ = run(tmp_path / "job", report=str(tmp_path / "none" / "run.html"))
    assert w.shape == ()
    assert "run.html: cannot write it" in caplog.text
    with pytest.raises(OptionsError, match="report: found 3, expected the path or URL of a file"):
        parse_options({"report": 3})


def test_what_cannot_be_told_costs_no_result(tmp_path, monkeypatch):
    def wrong(*args):
        raise RuntimeError("wrong")

    monkeypatch.setattr(recording, "plain_plan", wrong)
    monkeypatch.setattr(recording, "curves", wrong)
    run(tmp_path / "job")
    found = bj.open_job(tmp_path / "job").report()
    assert found.plan is None
    assert found.curves == ()
    assert html_checks.parsed(found.to_html()).all("span", class_="state done")


def test_secrets_of_options_are_not_told():
    found = options_told(
        parse_options({"shard_size": 16, "some_password": "p", "api_key": "k", "region": "here"})
    )
    assert found == {
        "shard_size": "16", "some_password": "(not shown)", "api_key": "(not shown)",
        "region": "here",
    }  # fmt: skip
    assert options_told(parse_options(None)) == {}


def test_the_log_is_left_as_it_was(tmp_path):
    before = list(logging.getLogger("beamjax").handlers)
    run(tmp_path / "job")
    assert logging.getLogger("beamjax").handlers == before


# --- curves


def plan_of_rounds():
    from beamjax import planning
    from beamjax.interpreters import stage

    arguments, key, restore = stage.flatten_arguments((jnp.float32(1), X))
    return planning.plan_for(descend, arguments, key, restore, parse_options(None)).plan


def test_curves_are_floats_of_the_length_of_a_loop():
    result = {
        "loss": jnp.array([1, jnp.nan, 3, jnp.inf, 5], jnp.bfloat16), "ints": jnp.arange(5),
        "long": jnp.ones(6), "wide": jnp.ones((5, 1)), "scalar": jnp.float32(1), "not": "x",
        "keys": jax.random.split(jax.random.key(0), 5),
    }  # fmt: skip
    (found,) = curves(plan_of_rounds(), result)
    assert found.path == "result['loss']"
    record = curve_to_json(found)
    assert record["values"] == [1.0, None, 3.0, None, 5.0]
    back = report._curve(record, "here")
    assert math.isnan(back.values[1])
    assert back.values[::2] == (1.0, 3.0, 5.0)


# --- records that are not what was written


@pytest.mark.parametrize(
    "course",
    [{"samples": 3}, {"round_ends": "x"}, {"warnings": [3]}, {"curves": [{}]},
     {"curves": [{"path": "a", "rounds": ["x"], "values": [1.0], "of": 1}]}],
)  # fmt: skip
def test_damaged_records_are_clear_errors(course, tmp_path):
    folder = JobFolder(str(tmp_path))
    folder.begin({"name": "f", "runner": "r"})
    assert read_report(folder).samples["seconds"] == ()
    folder.write("course", course)
    with pytest.raises(ArrayFormatError, match=r"course\.record"):
        read_report(folder)


def test_a_damaged_plan_is_a_clear_error(tmp_path):
    folder = JobFolder(str(tmp_path))
    folder.begin({"name": "f", "runner": "r"})
    folder.write("about", {"plan": {"program": 3}})
    with pytest.raises(ArrayFormatError, match="expected str"):
        read_report(folder)
    with pytest.raises(JobError):
        read_report(JobFolder(str(tmp_path / "none")))


def test_an_empty_report_is_a_page():
    found = Report("f", "r", "lost", 0.0, report.Progress())
    text = html_checks.parsed(found.to_html()).text
    assert "too short to be seen" in text
    assert "? lost" in text
    assert repr(found).startswith("run of f on r: lost")
    assert Curve("a", (0,), (math.nan,), 1).of == 1
