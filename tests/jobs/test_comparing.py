"""`diff`: where two jobs differ, and why."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.diagnostics.fact_types import walk_facts

X = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)


@bj.program(placements={"rows": None})
def totals(x):
    return {"n": jnp.int32(x.shape[0]), "sum": bj.reduce_sum(bj.map_fn(lambda v: v * v, x))}


@bj.program(placements={"rows": None})
def other(x):
    return {"n": jnp.int32(x.shape[0]), "sum": bj.reduce_sum(bj.map_fn(lambda v: v**3, x))}


@bj.program(placements={"rows": None})
def rounds(scales, x):
    def one_round(w, scale):
        w = w + scale * bj.reduce_mean(bj.map_fn(lambda v: jnp.sum(v) - w, x))
        return w, w

    return jax.lax.scan(one_round, jnp.float32(0), scales)


def run(tmp_path, fn=totals, x=X, runner="local", **options):
    folder = str(tmp_path / str(len(list(tmp_path.iterdir()))))
    bj.run(fn, x, runner=runner, options={"job_folder": folder, "shard_size": 8} | options)
    return folder


def test_the_same_bits_on_another_runner(tmp_path):
    found = bj.diff(run(tmp_path), run(tmp_path, runner="DirectRunner"))
    assert not found
    assert str(found) == "all bits of the results are equal"


def test_where_and_why(tmp_path):
    first = run(tmp_path)
    changed, wild = X.copy(), X.copy()
    changed[17, 2] += 1
    wild[5, 0] = np.nan
    drop = {"on_nonfinite": "drop", "drop_limit": 1}
    for second, reasons in [
        (run(tmp_path, x=changed), ["the inputs"]),
        (run(tmp_path, other), ["what its steps compute"]),
    ]:
        found = bj.diff(first, second)
        assert found.where.startswith("result['sum']")
        assert [reason.split(":")[0] for reason in found.reasons] == reasons
    found = bj.diff(first, run(tmp_path, x=changed))
    squares = [np.sum(np.square(x[:, 2].astype(np.float64))) for x in (X, changed)]
    assert (found.where, found.count) == ("result['sum'][2]", 1)
    np.testing.assert_allclose(list(map(float, found.values)), squares, rtol=1e-6)
    a, b = (np.float32(value).view(np.int32) for value in map(float, found.values))
    assert found.ulp == abs(int(a) - int(b))
    found = bj.diff(first, run(tmp_path, x=wild))
    assert (found.where, found.values[1], found.ulp) == ("result['sum'][0]", "nan", None)
    found = bj.diff(run(tmp_path, **drop), run(tmp_path, x=wild, **drop))
    assert found.reasons == ("the members that were dropped: none and rows 5",)
    found = bj.diff(first, run(tmp_path, x=X[:99]))
    assert (found.where, found.values) == ("result['n']", ("100", "99"))
    assert "the size of placement 'rows': 100 and 99" in str(found)
    found = bj.diff(first, run(tmp_path, x=X.astype(np.int32)))
    assert found.values == ("float32[3]", "int32[3]")


@pytest.mark.parametrize("runners", [("local", "local"), ("local", "DirectRunner")], ids=str)
def test_the_first_round_that_differs(runners, tmp_path):
    scales = np.full(6, 0.5, np.float32)
    changed = np.where(np.arange(6) < 3, scales, np.float32(0.25))
    folders = []
    for runner, values in zip(runners, (scales, changed), strict=True):
        folders.append(str(tmp_path / str(len(folders))))
        bj.run(rounds, values, X, runner=runner, options={"job_folder": folders[-1]})
    found = bj.diff(*folders)
    assert re.fullmatch(r"loop_\d+\[3\]/\w+", found.step)
    assert f"first in the step {found.step}, value {found.value}" in str(found)
    steps = walk_facts(bj.explain(rounds, scales, X).facts.steps)
    assert found.value in {value.name for step in steps for value in step.results}
    assert found.where == "result[0]"
    assert found.shard is None  # it is a step of the server


@pytest.mark.parametrize("runners", [("local", "local"), ("DirectRunner", "local")], ids=str)
def test_the_first_shard_that_differs(runners, tmp_path):
    changed = X.copy()
    changed[17, 2] += 1
    changed[90, 0] += 1
    folders = [
        run(tmp_path, x=x, runner=name) for x, name in zip((X, changed), runners, strict=True)
    ]
    found = bj.diff(*folders)
    assert (found.shard, found.members) == (2, (16, 24))
    assert f"first in the step {found.step}, shard 2 (members 16 to 23)" in str(found)
    changed = bj.diff(folders[0], run(tmp_path, other))
    assert changed.shard == 0
    assert not bj.diff(folders[0], run(tmp_path, runner=runners[1]))


@pytest.mark.parametrize("runners", [("local", "local"), ("DirectRunner", "local")], ids=str)
def test_the_first_shard_of_the_first_round_that_differs(runners, tmp_path):
    """Round 12 is the first one that reads the last column."""

    @bj.program(placements={"rows": None})
    def fit(x):
        def one_round(w, scale):
            return w + bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v * scale) - w, x)), None

        return jax.lax.scan(one_round, jnp.zeros(3), jnp.eye(3)[jnp.repeat(jnp.arange(3), 6)])[0]

    folders = []
    for runner, moved in zip(runners, (0, 1), strict=True):
        x = X.copy()
        x[[43, 90], 2] += moved
        folders.append(run(tmp_path, fit, x=x, runner=runner))
    found = bj.diff(*folders)
    assert re.fullmatch(r"loop_\d+\[12\]/map_rows_\d+", found.step)
    assert (found.shard, found.members) == (5, (40, 48))


def test_a_job_without_a_result(tmp_path):
    done, failed = run(tmp_path), str(tmp_path / "failed")
    with pytest.raises(bj.WorkerError):
        bj.run(totals, X * np.inf, runner="local",
               options={"job_folder": failed, "on_nonfinite": "raise"})  # fmt: skip
    with pytest.raises(bj.JobError, match="a job that is failed"):
        bj.diff(done, failed)
