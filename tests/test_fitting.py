"""Programs over members of unequal length: as jit computes them padded, with less padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax import planning
from beamjax.errors import CheckpointError, StructureError
from beamjax.interpreters.stage import flatten_arguments
from beamjax.options import parse_options
from beamjax.plan import Map, walk

RNG = np.random.default_rng(3)
LENGTHS = np.sort(RNG.integers(0, 60, 90))
LONGEST = int(LENGTHS.max())
TOTAL = int(LENGTHS.sum())
ROWS = {
    "x": RNG.normal(size=(TOTAL, 3)).astype(np.float32),
    "y": RNG.normal(size=TOTAL).astype(np.float32),
}
W = np.array([0.5, -1.0, 2.0], np.float32)
THREADS = {"direct_running_mode": "multi_threading", "direct_num_workers": 2}
PROCESSES = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}


def clients(**options):
    return bj.from_ragged(ROWS, LENGTHS, **options)


def padded(source):
    """What jit is given."""
    tree = jax.tree_util.tree_unflatten(source.treedef, source.read(0, len(source)))
    return jax.tree_util.tree_map(jnp.asarray, tree)


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


def plan_of(fn, *args, **options):
    arguments, key, restore = flatten_arguments(args)
    return planning.plan_for(fn, arguments, key, restore, parse_options(options))


def passes(planned):
    return [step for step in walk(planned.plan.steps) if isinstance(step, Map)]


def close(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def same_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("program", [mean_loss, jax.grad(lambda *a: mean_loss(*a)[0]), rounds])
def test_shards_are_padded_to_their_bucket(program):
    source = clients(buckets=[8, 16, 32, LONGEST])
    planned = plan_of(program, W, source, shard_size=8)
    assert [len(step.fitted) for step in passes(planned)] == [3] * len(passes(planned))
    expected = jax.jit(program)(W, padded(source))
    local = bj.run(program, W, source, runner="local", options={"shard_size": 8})
    close(local, expected)
    for beam in ({}, THREADS):
        same_bits(bj.run(program, W, source, options={"shard_size": 8, **beam}), local)


def test_in_processes():
    options = {"shard_size": 8, **PROCESSES}
    found = bj.run(rounds, W, clients(), options=options)
    same_bits(found, bj.run(rounds, W, clients(), runner="local", options={"shard_size": 8}))


def test_what_bodies_see(tmp_path):
    seen = []
    source = clients(buckets=[10, LONGEST])
    original = type(source).read_short

    class Watched(type(source)):
        def read_short(self, start, stop):
            arrays = original(self, start, stop)
            seen.append(arrays[0].shape[1])
            return arrays

    source.__class__ = Watched
    bj.run(mean_loss, W, source, runner="local", options={"shard_size": 8})
    assert seen == [10 if longest <= 10 else LONGEST for longest in LENGTHS[7::8]] + [LONGEST]


def test_a_body_that_reads_its_padding_is_told():
    @bj.program(clients=None)
    def careless(data):
        return bj.reduce_mean(bj.map_fn(lambda client: client["y"].mean(), data))

    with pytest.raises(StructureError, match=r"(?s)shard 0 .*do not depend on padding.*mask"):
        bj.run(careless, clients(), runner="local", options={"shard_size": 8})
    with pytest.raises(StructureError, match="do not depend on padding"):
        bj.run(careless, clients(buckets=[LONGEST]), runner="local")


def test_members_that_fail_and_short_ones():
    """A second pass reads which members are left, beside members padded to their bucket."""

    @bj.program(clients=None)
    def spread(data):
        mean = lambda c: jnp.sum(c["y"], where=c["mask"]) / jnp.sum(c["mask"], dtype=jnp.float32)
        center = bj.reduce_mean(bj.map_fn(mean, data))
        return bj.reduce_mean(bj.map_fn(lambda c: (mean(c) - center) ** 2, data))

    found = bj.run(
        spread,
        clients(),
        runner="local",
        options={"shard_size": 8, "on_nonfinite": "drop", "drop_limit": 0.9},
    )
    parts = np.split(ROWS["y"].astype(np.float64), np.cumsum(LENGTHS)[:-1])
    means = np.array([part.mean() for part in parts if len(part)])
    np.testing.assert_allclose(found, means.var(), rtol=1e-4)


def reasons():
    @bj.program(clients=None)
    def whole(data):
        return bj.reduce_sum(data["y"]), data["x"]

    @bj.program(clients=None)
    def length(data):
        total = bj.reduce_sum(bj.map_fn(lambda c: jnp.sum(c["y"], where=c["mask"]), data))
        return total / data["y"].shape[1]

    @bj.program(clients=None)
    def column(data):
        return bj.reduce_sum(data["y"])

    @bj.program(clients=None)
    def given(data):
        return bj.map_fn(lambda c: jnp.where(c["mask"], c["y"] + 1, jnp.float32(0)), data)

    @bj.program(clients=None)
    def constant(data):
        return bj.reduce_sum(data["mask"].sum(axis=1)), data["y"].shape[1]

    return {
        "whole": (whole, "needed as a whole"),
        "length": (length, "depends on the length"),
        "column": (column, "depends on the length"),
        "given": (given, "depends on the length"),
        "constant": (constant, "depends on the length"),
    }


@pytest.mark.parametrize("name", reasons())
def test_what_needs_the_length_is_padded_to_the_longest(name):
    program, reason = reasons()[name]
    source = clients()
    planned = plan_of(program, source)
    assert not any(step.fitted for step in passes(planned))
    (note,) = planned.notes
    assert reason in note
    assert reason in str(bj.explain(program, source))
    expected = jax.jit(program)(padded(source))
    close(bj.run(program, source, runner="local"), expected)
    close(bj.run(program, source), expected)


def test_two_ragged_sources_are_padded_to_the_longest():
    @bj.program(clients=None)
    def both(a, b):
        dots = bj.map_fn(lambda a, b: jnp.sum(a["y"] * b["y"], where=a["mask"]), (a, b))
        return bj.reduce_sum(dots)

    planned = plan_of(both, clients(), clients())
    assert "2 sources" in planned.notes[0]
    close(
        bj.run(both, clients(), clients(), runner="local"),
        jax.jit(both)(padded(clients()), padded(clients())),
    )


def test_shards_are_those_of_usual_members():
    lengths = [*np.full(999, 10), 20_000]
    rows = {"x": np.zeros((sum(lengths), 3), np.float32), "y": np.zeros(sum(lengths), np.float32)}
    source = bj.from_ragged(rows, lengths)
    alone = plan_of(mean_loss, W, bj.from_ragged(rows, lengths, buckets=[20_000]))
    assert alone.plan.shard_sizes == {"clients": 16}  # in batches of 8
    assert plan_of(mean_loss, W, source).plan.shard_sizes == {"clients": 64}
    assert plan_of(mean_loss, W, source, shard_size=16).plan.shard_sizes == {"clients": 16}
    huge = bj.from_ragged(np.zeros(2_000_999, np.float32), [*np.full(999, 1), 2_000_000])

    @bj.program(clients=None)
    def total(data):
        return bj.reduce_sum(bj.map_fn(lambda c: c["rows"].sum(where=c["mask"]), data))

    assert plan_of(total, huge).plan.shard_sizes == {"clients": 8}  # or they take over 32 MiB


def test_explain_tells_the_buckets():
    text = str(bj.explain(mean_loss, W, clients(buckets=[16, 32, LONGEST])))
    assert "members have unequal lengths. Their shards are padded to 16/32/58 rows" in text
    assert "2 executables more than one for each pass" in text


def test_members_that_fail_to_be_read_or_computed_are_dropped():
    rows = {"x": ROWS["x"].copy(), "y": ROWS["y"].copy()}
    ends = np.cumsum(LENGTHS)
    for member in (40, 41, 77):
        rows["y"][ends[member] - 1] = np.nan
    source = bj.from_ragged(rows, LENGTHS)
    options = {"shard_size": 8, "on_nonfinite": "drop"}
    kept = np.setdiff1d(np.arange(len(LENGTHS)), [40, 41, 77])
    whole = padded(source)
    expected = jax.jit(mean_loss)(W, jax.tree_util.tree_map(lambda x: x[kept], whole))
    local = bj.run(mean_loss, W, source, runner="local", options=options)
    close(local, expected)
    same_bits(bj.run(mean_loss, W, source, options=options), local)


def test_checkpoints_and_jobs_go_on(tmp_path):
    options = {"shard_size": 8, "checkpoint": str(tmp_path / "c")}
    found = bj.run(rounds, W, clients(), options=options)
    same_bits(found, bj.run(rounds, W, clients(), runner="local", options={"shard_size": 8}))
    same_bits(bj.run(rounds, W, clients(), options=options), found)
    other = bj.from_ragged(ROWS, LENGTHS[::-1].copy())
    with pytest.raises(CheckpointError, match=r"args\[1\]\['mask'\]"):
        bj.run(rounds, W, other, options=options)


def test_verify_agrees():
    report = bj.verify(mean_loss, W, clients())
    assert report


def test_what_is_told_of_a_member_is_that_of_the_padded_lengths():
    def cost(lengths):
        @bj.program(clients=None)
        def program(data):
            return bj.reduce_sum(bj.map_fn(lambda c: jnp.sum(jnp.tanh(c["x"])), data))

        rows = {"x": np.zeros((int(np.sum(lengths)), 3), np.float32)}
        source = bj.from_ragged(rows, np.array(lengths), buckets=[8, 64])
        arguments, key, restore = flatten_arguments((source,))
        chosen = parse_options({"shard_size": 8, "platforms": ["cpu"]})
        planned = planning.plan_for(program, arguments, key, restore, chosen)
        (found,) = planned.plan.costs.values()
        return found.weight

    short, long = cost([8] * 80), cost([64] * 80)
    assert short < long / 6
    assert cost([8] * 40 + [64] * 40) == pytest.approx((short + long) / 2, rel=1e-6)
