"""Programs over members of unequal length: as jit computes them padded, with less padding."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import THREADS
from helpers import assert_close, assert_same_bits, planned

import beamjax as bj
from beamjax.errors import CheckpointError
from beamjax.plan.steps import Map, walk

RNG = np.random.default_rng(3)
LENGTHS = np.sort(RNG.integers(0, 60, 90))
LONGEST = int(LENGTHS.max())
TOTAL = int(LENGTHS.sum())
ROWS = {
    "x": RNG.normal(size=(TOTAL, 3)).astype(np.float32),
    "y": RNG.normal(size=TOTAL).astype(np.float32),
}
W = np.array([0.5, -1.0, 2.0], np.float32)
SHARDS = {"shard_size": 8}


def clients(rows=ROWS, **options):
    return bj.from_ragged(rows, LENGTHS, **options)


def padded(source):
    """What jit is given."""
    tree = jax.tree.unflatten(source.treedef, source.read(0, len(source)))
    return jax.tree.map(jnp.asarray, tree)


def local(fn, *args, **options):
    return bj.run(fn, *args, runner="local", options={**SHARDS, **options})


def loss(w, client):
    losses = jnp.square(client["x"] @ w - client["y"])
    count = jnp.sum(client["mask"], dtype=jnp.float32)
    return jnp.sum(losses, where=client["mask"]) / jnp.maximum(count, 1)


@bj.program(clients=None)
def mean_loss(w, data):
    losses = bj.map_fn(loss, (bj.broadcast(w), data))
    return bj.reduce_mean(losses), bj.reduce_max(losses)


@bj.program(clients=None)
def rounds(w, data):
    def local(w, client):
        def step(w, _):
            return w - 0.1 * jax.grad(loss)(w, client), None

        return jax.lax.scan(step, w, length=3)[0] - w

    def one(w, _):
        update = bj.reduce_mean(bj.map_fn(local, (bj.broadcast(w), data)))
        return w + update, jnp.sum(update)

    return jax.lax.scan(one, w, length=4)


def passes(found):
    return [step for step in walk(found.plan.steps) if isinstance(step, Map)]


@pytest.mark.parametrize("program", [mean_loss, jax.grad(lambda *a: mean_loss(*a)[0]), rounds])
def test_shards_are_padded_to_their_bucket(program):
    source = clients(buckets=[8, 16, 32, LONGEST])
    steps = passes(planned(program, W, source, **SHARDS))
    assert [len(step.bucketed) for step in steps] == [3] * len(steps)
    expected = jax.jit(program)(W, padded(source))
    found = local(program, W, source)
    assert_close(found, expected, 2e-5, 1e-6)
    assert_same_bits(bj.run(program, W, source, options={**SHARDS, **THREADS}), found)


def test_members_that_fail_and_short_ones():
    """A second pass reads which members are left, beside members padded to their bucket."""

    @bj.program(clients=None)
    def spread(data):
        mean = lambda c: jnp.sum(c["y"], where=c["mask"]) / jnp.sum(c["mask"], dtype=jnp.float32)
        center = bj.reduce_mean(bj.map_fn(mean, data))
        return bj.reduce_mean(bj.map_fn(lambda c: (mean(c) - center) ** 2, data))

    found = local(spread, clients(), on_nonfinite="drop", drop_limit=0.9)
    parts = np.split(ROWS["y"].astype(np.float64), np.cumsum(LENGTHS)[:-1])
    means = np.array([part.mean() for part in parts if len(part)])
    np.testing.assert_allclose(found, means.var(), rtol=1e-4)
    rows, bad = {"x": ROWS["x"], "y": ROWS["y"].copy()}, [40, 41, 77]
    rows["y"][np.cumsum(LENGTHS)[bad] - 1] = np.nan
    source, options = clients(rows), {"on_nonfinite": "drop"}
    kept = np.setdiff1d(np.arange(len(LENGTHS)), bad)
    expected = jax.jit(mean_loss)(W, jax.tree.map(lambda x: x[kept], padded(source)))
    found = local(mean_loss, W, source, **options)
    assert_close(found, expected, 2e-5, 1e-6)
    assert_same_bits(bj.run(mean_loss, W, source, options={**SHARDS, **options}), found)


def test_programs_that_need_the_length_are_padded_to_the_longest():
    def length(data):
        total = bj.reduce_sum(bj.map_fn(lambda c: jnp.sum(c["y"], where=c["mask"]), data))
        return total / data["y"].shape[1]

    def given(data):
        return bj.map_fn(lambda c: jnp.where(c["mask"], c["y"] + 1, jnp.float32(0)), data)

    reasons = {
        lambda data: (bj.reduce_sum(data["y"]), data["x"]): "needed as a whole",
        length: "depends on the length",
        lambda data: bj.reduce_sum(data["y"]): "depends on the length",
        given: "depends on the length",
        lambda data: (bj.reduce_sum(data["mask"].sum(axis=1)), data["y"].shape[1]): "depends on",
    }
    for body, reason in reasons.items():
        program, source = bj.program(clients=None)(body), clients()
        found = planned(program, source)
        assert not any(step.bucketed for step in passes(found))
        (note,) = found.notes
        assert reason in note
        assert reason in str(bj.explain(program, source))
        expected = jax.jit(program)(padded(source))
        assert_close(bj.run(program, source, runner="local"), expected, 2e-5, 1e-6)

    @bj.program(clients=None)
    def both(a, b):
        dots = bj.map_fn(lambda a, b: jnp.sum(a["y"] * b["y"], where=a["mask"]), (a, b))
        return bj.reduce_sum(dots)

    assert "2 sources" in planned(both, clients(), clients()).notes[0]
    expected = jax.jit(both)(padded(clients()), padded(clients()))
    assert_close(bj.run(both, clients(), clients()), expected, 2e-5, 1e-6)


def test_shards_are_those_of_usual_members():
    lengths = [*np.full(999, 10), 20_000]
    rows = {"x": np.zeros((sum(lengths), 3), np.float32), "y": np.zeros(sum(lengths), np.float32)}
    sizes = lambda *args, **options: planned(*args, **options).plan.shard_sizes["clients"]
    source, alone = (bj.from_ragged(rows, lengths, buckets=b) for b in (None, [20_000]))
    assert sizes(mean_loss, W, alone) == 64
    assert sizes(mean_loss, W, source) == 64  # of the longest, no more fit in 32 MiB
    assert sizes(mean_loss, W, source, shard_size=16) == 16
    huge = bj.from_ragged(np.zeros(2_000_999, np.float32), [*np.full(999, 1), 2_000_000])

    @bj.program(clients=None)
    def total(data):
        return bj.reduce_sum(bj.map_fn(lambda c: c["rows"].sum(where=c["mask"]), data))

    assert sizes(total, huge) == 8  # or they take over 32 MiB


def test_checkpoints_go_on_and_verify_agrees(tmp_path):
    options = {**SHARDS, "checkpoint": str(tmp_path / "c")}
    found = bj.run(rounds, W, clients(), options=options)
    assert_same_bits(found, local(rounds, W, clients()))
    assert_same_bits(bj.run(rounds, W, clients(), options=options), found)
    other = bj.from_ragged(ROWS, LENGTHS[::-1].copy())
    with pytest.raises(CheckpointError, match=r"data\['mask'\]"):
        bj.run(rounds, W, other, options=options)
    assert bj.verify(mean_loss, W, clients())


# --- what is said of padding, before a run and of it


def test_the_cost_of_a_member_is_that_of_the_padded_lengths():
    def cost(lengths):
        @bj.program(clients=None)
        def program(data):
            return bj.reduce_sum(bj.map_fn(lambda c: jnp.sum(jnp.tanh(c["x"])), data))

        rows = {"x": np.zeros((int(np.sum(lengths)), 3), np.float32)}
        source = bj.from_ragged(rows, np.array(lengths), buckets=[8, 64])
        (found,) = planned(program, source, platforms=["cpu"], **SHARDS).plan.costs.values()
        return found.weight

    short, long = cost([8] * 80), cost([64] * 80)
    assert short < long / 6
    assert cost([8] * 40 + [64] * 40) == pytest.approx((short + long) / 2, rel=1e-6)


FEW = np.array([1, 3, 8, 2, 9, 16, 16, 5, 0, 30, 32, 31], np.int64)
ROW = 3 * 4 + 1 + 1  # and the mask
ONES = {"x": np.ones((FEW.sum(), 3), np.float32), "k": np.ones(FEW.sum(), np.int8)}


def few():
    return bj.from_ragged(ONES, FEW, buckets=[8, 16, 32])


def scaled(own):
    @bj.program(clients=None)
    def program(data):
        def one(c):
            x = jnp.sum(c["x"], where=c["mask"][:, None]) * own
            return x + jnp.sum(c["k"]).astype("float32")

        return bj.reduce_sum(bj.map_fn(one, data))

    return program


def test_explain_tells_the_padding_of_a_pass(monkeypatch):
    # More than one range of lengths.
    monkeypatch.setattr("beamjax.interpreters.lowering.buckets.SCANNED_MEMBERS", 8)
    text = lambda program, source: str(bj.explain(program, source, options=SHARDS))
    shards = [FEW[:8], FEW[8:]]
    nbytes = sum(len(s) * b for s, b in zip(shards, [16, 32], strict=True))
    share = 1 - FEW.sum() / nbytes
    (line,) = re.findall("A pass reads .*", text(scaled(1.0), few()))
    assert f"A pass reads {nbytes * ROW / 1024:.1f} KiB of them, {share:.1%} of which" in line
    assert f"for {FEW.sum() * ROW / 1024:.1f} KiB of data" in line
    assert line.endswith("padded to: 1 of 16, 1 of 32.")
    whole = text(scaled(1.0), few())
    assert "members have unequal lengths. Their shards are padded to 8/16/32 rows" in whole
    assert "2 more executables than one for each pass, at most 3 in all" in whole
    taken = text(scaled(1.0), bj.take(few(), [0, 1, 2, 3]))
    assert "padded to: 1 of 8." in taken
    assert f"{1 - 14 / 32:.1%} of which is padding" in taken
    longest = text(bj.program(clients=None)(lambda x: bj.reduce_sum(x["x"])), few())
    assert f"{1 - FEW.sum() / (32 * len(FEW)):.1%} of which is padding" in longest
    assert "padded to: 2 of 32." in longest


@pytest.mark.parametrize(("runner", "own"), [("local", 5.0), ("DirectRunner", 6.0)])
def test_a_run_counts_what_it_reads_and_the_executables(runner, own):
    """With a number of its own, so that nothing of it is compiled yet."""
    with bj.launch(scaled(own), few(), runner=runner, options=SHARDS) as job:
        assert float(job.result()) == (3 * own + 1) * FEW.sum()
        done = job.progress().done
    nbytes = 8 * 16 + 4 * 32
    assert done.bytes_read == nbytes * ROW
    assert done.bytes_padding == pytest.approx((nbytes - FEW.sum()) * ROW, abs=8)
    assert done.executables >= 2  # for the buckets that there are; and to check a short one
    even = bj.from_arrays(np.ones((8, 3), np.float32))
    with bj.launch(bj.program(clients=None)(bj.reduce_sum), even, runner=runner) as job:
        job.result()
        assert job.progress().done.bytes_padding == 0
