"""Data that stays in files, on Prism and on Flink: results, samples, keys."""

import operator

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cluster_runners import params
from helpers import assert_same_bits

import beamjax as bj
from beamjax.numerics import by_key
from beamjax.plan import steps
from beamjax.sources.arrays import part_files

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

N = 60
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
W = np.array([1.0, -1.0, 0.5], np.float32)
RNG = np.random.default_rng(4)
TABLE = {"client": RNG.integers(0, 40, 1500), "y": np.arange(1500, dtype=np.float32)}


@pytest.fixture(params=params("prism", "flink"))
def runner(request, started):
    return started(request.param)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Many parts and blocks for small tables."""
    monkeypatch.setattr(by_key, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(part_files, "PART_BYTES", 700)


def on(runner, fn, *args, keep=None, **flags):
    options = runner.flags(shard_size=8, **flags)
    return bj.run(fn, *args, runner=runner.name, options=options, keep=keep)


def here(fn, *args):
    return bj.run(fn, *args, runner="local", options={"shard_size": 8})


def same_files(left, right):
    found = [{path.name: path.read_bytes() for path in one.iterdir()} for one in (left, right)]
    assert found[0] == found[1]


@bj.program(clients=None)
def total(clients):
    return bj.reduce_sum(bj.map_fn(lambda c: jnp.sum(c["y"], where=c["mask"]), clients))


def test_results_stay_in_files(runner, tmp_path):
    @bj.program(clients=N)
    def rounds(w, x):
        def one(state, _):
            state = bj.map_fn(lambda s, v: s * 0.5 + v @ w, (state, x))
            return state, state

        return jax.lax.scan(one, bj.broadcast(jnp.float32(0)), length=3)

    found = on(runner, rounds, W, X, keep="placed", results_folder=str(tmp_path / "r"))
    assert isinstance(found[0], bj.Placed)
    assert_same_bits(found, here(rounds, W, X))


def test_samples_of_clients_of_unequal_size(runner, tmp_path):
    rows = bj.from_arrays({"y": TABLE["y"]}).spill(tmp_path)
    clients = bj.from_ragged(rows, np.bincount(TABLE["client"]))
    cohort = bj.sample(clients, 7, jax.random.key(1))
    assert_same_bits(on(runner, total, cohort), here(total, cohort))


def test_reductions_in_many_ranges(runner, monkeypatch):
    @bj.program(clients=N)
    def reduced(w, x):
        y = bj.map_fn(jnp.outer, (x, bj.broadcast(w)))
        return bj.reduce_sum(y), bj.reduce_mean(y), bj.reduce_max(y)

    w = RNG.normal(size=500).astype(np.float32)
    expected = here(reduced, w, X)
    monkeypatch.setattr(steps, "RANGE_VALUES", 100)
    assert_same_bits(on(runner, reduced, w, X), expected)


@pytest.mark.parametrize("index", [None, operator.itemgetter("i")])
def test_members_of_a_pipeline(runner, index, tmp_path):
    rows = [{"x": x, "i": i} for i, x in enumerate(X)]
    like = {"x": X[0], "i": np.int32(0)}
    there = bj.from_beam(
        beam.Create(rows) | beam.Reshuffle(),
        like=like,
        folder=tmp_path / "there",
        index=index,
        runner=runner.name,
        options=runner.flags(),
    )
    here = bj.from_beam(beam.Create(rows[::-1]), like=like, folder=tmp_path / "here", index=index)
    same_files(tmp_path / "here", tmp_path / "there")

    @bj.program(placements={"rows": None})
    def draws(key, rows, numbers):
        def one(row, i):
            return row["x"] * jax.random.normal(jax.random.fold_in(key, i), (3,))

        return bj.reduce_mean(bj.map_fn(one, (rows, numbers)))

    key, numbers = jax.random.key(1), bj.from_range(N)
    found = [on(runner, draws, key, data, numbers) for data in (there, here)]
    assert_same_bits(*found)


def test_keys_that_nobody_knows_beforehand(runner):
    @bj.program(rows=None)
    def by_client(rows):
        return bj.reduce_by_key(rows["y"], rows["client"].astype(jnp.int32))

    rows = bj.from_arrays({**TABLE, "client": TABLE["client"].astype(np.int32)})
    assert_same_bits(on(runner, by_client, rows).arrays(), here(by_client, rows).arrays())
