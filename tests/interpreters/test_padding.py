"""Padding of members: added, and noticed where it shows in results."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import beamjax as bj
from beamjax.errors import StructureError
from beamjax.runtime.shard_executor import ShardExecutor
from beamjax.sources.padding import NOISE, check_padding, padded_rows, without_padding


def test_rows_are_padded_with_zeros_and_take_the_place_of_padding():
    members = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    longer = padded_rows(members, (5, 2))
    assert longer.dtype == members.dtype
    np.testing.assert_array_equal(longer[:, :3], members)
    assert not longer[:, 3:].any()
    assert padded_rows(members, (3, 2)) is members
    numbers = np.ones(3)
    assert padded_rows(numbers, ()) is numbers
    x = np.float32([[1, 2, 0, 0, 0], [0, 0, 0, 0, 0], [3, 0, 4, 5, 6]])
    mask = np.array([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
    weights = np.arange(3)
    found, masks, same = without_padding([x, mask, weights], [0, 1])
    np.testing.assert_array_equal(found, [[1, 2, 1, 2, 1], [1, 2, 1, 2, 1], [3, 0, 4, 5, 6]])
    assert masks.all()
    assert same is weights
    for nothing in (np.zeros((2, 3)), np.zeros((0, 3))):
        assert without_padding([nothing], [0]) is None


def test_results_agree_but_for_rounding():
    eps = float(np.finfo(np.float32).eps)
    agree = [
        ([1.0, 2.0], [1.0, 2.0000002]),
        ([0.0, 100.0], [1.0, 100.0]),  # less than the errors of a sum in another order may be
        ([95.0], [100.0]),
        ([np.nan, 1.0], [np.nan, 1.0]),
        ([True, False], [True, False]),
        (np.empty((0, 3)), np.empty((0, 3))),
        (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)),
        ([1 + 2j], [1 + 2j]),
        (np.uint32([2**32 - 1]), np.uint32([2**32 - 1])),
    ]
    differ = [
        ([1.0, 2.0], [0.5, 1.0]),
        ([94.9], [100.0]),
        ([np.nan], [1.0]),
        ([np.inf], [1.0]),
        ([True], [False]),
        ([3], [4]),
        ([1 + 2j], [1 - 2j]),
        (np.ones(2), np.ones(3)),
    ]
    both = lambda pair: check_padding([(3, 2), ()], [tuple(map(np.asarray, pair))])
    for pair in agree:
        both(pair)
    for pair in differ:
        with pytest.raises(StructureError, match=r"members of shapes \[3, 2\], \[\], found .* mas"):
            both(pair)
    operands = [np.float32([1000.0, np.nan]), np.arange(3)]
    noise = NOISE * 1000 * eps  # of operands as large as these
    check_padding([(3,)], [(np.float32([noise]), np.float32([0]))], operands)
    for pair, given in [((noise, 0), ()), ((1.2 * noise, 0), operands)]:
        with pytest.raises(StructureError):
            check_padding([(3,)], [tuple(map(np.float32, ([pair[0]], [pair[1]])))], given)


# --- bodies that read padding, in all runs


def rows(client):
    return jnp.sum(client["mask"], dtype=jnp.float32)


CARELESS = {
    "mean": lambda c: c["x"].mean(),
    "max": lambda c: (-jnp.abs(c["x"])).max(),
    "length": lambda c: jnp.sum(c["x"], where=c["mask"]) / c["x"].shape[0],
    "small beside large": lambda c: (c["x"].mean(), 1e9 * rows(c)),
    "result": lambda c: {"rows": c["x"] * 2, "mean": c["x"].mean()},
}
CAREFUL = {
    "where": lambda c: jnp.sum(c["x"], where=c["mask"]) / jnp.maximum(rows(c), 1),
    "zeros add nothing": lambda c: jnp.sum(c["x"]) / jnp.maximum(rows(c), 1),
    "last": lambda c: c["x"][jnp.maximum(c["mask"].sum() - 1, 0)],
    "zero by rounding": lambda c: jnp.sum(c["x"] * 0.1 - c["x"] / 10),
    "draws": lambda c: jnp.sum(
        jax.random.normal(jax.random.key(0), c["x"].shape) * c["x"], where=c["mask"]
    ),
}
LENGTHS = {
    "one shard": [3, 5, 2, 7],
    "full members": [8] * 24,
    "one bucket": [3, 5, 2, 7, 8, 8, 1, 4, 2, 5, 7, 6],
    "buckets": [1] * 8 + [20] * 8 + [30],
    "empty members": [0, 0, 5, 3],
    "one row": [1] * 9,
}
FEW = ("one shard", "full members")


def clients_of(case, folder, kind="ragged"):
    lengths = LENGTHS[case]
    rows = 1 + np.random.default_rng(0).uniform(size=sum(lengths)).astype(np.float32)
    if kind == "ragged":
        return bj.from_ragged({"x": rows}, lengths)
    if kind == "one bucket":
        return bj.from_ragged({"x": rows}, lengths, buckets=[max(lengths)])
    path = folder / f"lists-{len(rows)}.parquet"
    lists = np.split(rows, np.cumsum(lengths)[:-1])
    parquet.write_table(pa.table({"x": pa.array(lists, pa.list_(pa.float32()))}), path)
    return bj.from_parquet(path, buckets=[max(lengths)])


def program_of(body):
    @bj.program(clients=None)
    def program(data):
        found = bj.map_fn(body, data)
        if isinstance(found, dict):
            return found["rows"], bj.reduce_mean(found["mean"])
        return jax.tree.map(bj.reduce_mean, found)

    return program


def outcome(body, source, runner="local", **options):
    """What a run gives, or the error that it ends with."""
    try:
        return bj.run(program_of(body), source, runner=runner, options={"shard_size": 8, **options})
    except bj.BeamjaxError as error:
        return error


def test_bodies_that_read_padding_are_refused_in_all_runs(tmp_path):
    body = CARELESS["mean"]
    runs = [
        *((name, case, "ragged", {}) for name in CARELESS for case in FEW),
        *(("mean", case, "ragged", {}) for case in LENGTHS if case not in FEW),
        *(("mean", case, kind, {}) for kind in ("one bucket", "lists") for case in FEW),
        ("mean", "one shard", "ragged", {"on_nonfinite": "drop"}),
        ("mean", "one shard", "ragged", {"on_error": "drop"}),
        ("mean", "one shard", "ragged", {"member_loop": "loop"}),
        *(("mean", case, "ragged", {"runner": "DirectRunner"}) for case in FEW),
    ]
    faults = []
    for name, case, kind, options in runs:
        found = outcome(CARELESS[name], clients_of(case, tmp_path, kind), **options)
        if not (isinstance(found, StructureError) and "do not depend on padding" in str(found)):
            faults.append((name, case, kind, options, found))
    assert faults == []
    for case in (*FEW, "one bucket"):
        with pytest.raises(StructureError, match="do not depend on padding"):
            bj.verify(program_of(body), clients_of(case, tmp_path), runner="local")

    @bj.program(clients=None)
    def both(a, b):
        return bj.reduce_sum(bj.map_fn(lambda a, b: a["x"].mean() + jnp.sum(b["x"]), (a, b)))

    sources = [bj.from_ragged({"x": np.ones(9, np.float32)}, [2, 3, 4]) for _ in range(2)]
    with pytest.raises(StructureError, match="do not depend on padding"):
        bj.run(both, *sources, runner="local")


def test_bodies_that_leave_padding_out(tmp_path):
    faults = []
    for case in LENGTHS:
        source = clients_of(case, tmp_path)
        tree = jax.tree.unflatten(source.treedef, source.read(0, len(source)))
        every = lambda c: {name: body(c) for name, body in CAREFUL.items()}
        program = bj.program(clients=None)(
            lambda data, every=every: jax.tree.map(bj.reduce_mean, bj.map_fn(every, data))
        )
        expected = jax.jit(program)(jax.tree.map(jnp.asarray, tree))
        found = bj.run(program, source, runner="local", options={"shard_size": 8})
        for name, value in expected.items():
            if not np.allclose(found[name], value, rtol=2e-5, atol=1e-6):
                faults.append((name, case, found[name], value))
        if isinstance(alone := outcome(CAREFUL["zero by rounding"], source), Exception):
            faults.append((case, alone))
    assert faults == []


def test_a_check_is_made_once(monkeypatch):
    """Each pass over the members computes one shard twice more, whatever the number of rounds."""
    longer, called = [], ShardExecutor._called

    def watch(self, call, shard, heads, arrays):
        longer.append(max(array.shape[1] for array in arrays) > 8)
        return called(self, call, shard, heads, arrays)

    monkeypatch.setattr(ShardExecutor, "_called", watch)

    @bj.program(clients=None)
    def rounds(w, data):
        def one(w, _):
            step = lambda c, w: w + jnp.sum(c["x"], where=c["mask"])
            return bj.reduce_mean(bj.map_fn(step, (data, bj.broadcast(w)))), None

        return jax.lax.scan(one, w, length=4)[0]

    source = bj.from_ragged({"x": np.ones(24, np.float32)}, [1] * 24)
    for runner in ("local", "DirectRunner"):
        longer.clear()
        bj.run(rounds, np.float32(0), source, runner=runner, options={"shard_size": 8})
        assert (len(longer), sum(longer)) == (14, 1)


def test_members_that_cannot_be_longer_are_not_checked():
    @bj.program(clients=None)
    def fixed(data):
        assert data["x"].shape[1] == 8
        return bj.reduce_sum(bj.map_fn(lambda c: jnp.sum(c["x"], where=c["mask"]), data))

    source = bj.from_ragged({"x": np.ones(6, np.float32)}, [1, 2, 3])
    assert "can't check whether bodies read the padding of members, because" in str(
        bj.explain(fixed, source)
    )
    assert bj.run(fixed, source, runner="local") == 6
