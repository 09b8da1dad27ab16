"""Padding of members: added, and noticed where it shows in results."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import beamjax as bj
from beamjax.errors import StructureError
from beamjax.padding import check_padding, padded_rows, without_padding
from beamjax.shards import ShardExecutor


def test_rows_are_padded_with_zeros():
    members = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    longer = padded_rows(members, (5, 2))
    assert longer.dtype == members.dtype
    np.testing.assert_array_equal(longer[:, :3], members)
    assert not longer[:, 3:].any()
    assert padded_rows(members, (3, 2)) is members
    numbers = np.ones(3)
    assert padded_rows(numbers, ()) is numbers


def check(left, right):
    check_padding([(3, 2), ()], [(np.asarray(left), np.asarray(right))])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([1.0, 2.0], [1.0, 2.0000002]),
        ([0.0, 100.0], [1.0, 100.0]),  # less than the errors of a sum in another order may be
        ([np.nan, 1.0], [np.nan, 1.0]),
        ([True, False], [True, False]),
        (np.empty((0, 3)), np.empty((0, 3))),
        (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)),
        ([1 + 2j], [1 + 2j]),
        (np.uint32([2**32 - 1]), np.uint32([2**32 - 1])),
    ],
)
def test_results_that_agree(left, right):
    check(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([1.0, 2.0], [0.5, 1.0]),
        ([np.nan], [1.0]),
        ([np.inf], [1.0]),
        ([True], [False]),
        ([3], [4]),
        ([1 + 2j], [1 - 2j]),
        (np.ones(2), np.ones(3)),
    ],
)
def test_results_that_have_nothing_to_do_with_each_other(left, right):
    with pytest.raises(StructureError, match=r"members of shapes \[3, 2\], \[\], found .* mask"):
        check(left, right)


def test_rows_take_the_place_of_padding():
    x = np.float32([[1, 2, 0, 0, 0], [0, 0, 0, 0, 0], [3, 0, 4, 5, 6]])
    mask = np.array([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
    weights = np.arange(3)
    found, masks, same = without_padding([x, mask, weights], [0, 1])
    np.testing.assert_array_equal(found, [[1, 2, 1, 2, 1], [1, 2, 1, 2, 1], [3, 0, 4, 5, 6]])
    assert masks.all()
    assert same is weights
    assert without_padding([np.zeros((2, 3))], [0]) is None


def test_rounding_errors_of_large_operands_are_no_evidence():
    operands = [np.float32([1000.0, np.nan]), np.arange(3)]
    pairs = [(np.float32([1e-3]), np.float32([-5e-4]))]
    check_padding([(3,)], pairs, operands)
    with pytest.raises(StructureError):
        check_padding([(3,)], pairs)


# --- bodies that read padding, in all runs

PROCESSES = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}


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


def clients_of(lengths, folder, kind):
    rows = 1 + np.random.default_rng(0).uniform(size=sum(lengths)).astype(np.float32)
    if kind == "ragged":
        return bj.from_ragged({"x": rows}, lengths)
    if kind == "one bucket":
        return bj.from_ragged({"x": rows}, lengths, buckets=[max(lengths)])
    if kind == "group_by":
        table = {"key": np.repeat(np.arange(len(lengths)), lengths), "x": rows}
        return bj.group_by(table, "key", folder=str(folder / f"groups-{len(rows)}"))
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


def is_refused(found):
    return isinstance(found, StructureError) and "do not depend on padding" in str(found)


def test_bodies_that_read_padding_are_refused_in_all_runs(tmp_path):
    failures = []
    for name, body in CARELESS.items():
        for case, lengths in LENGTHS.items():
            found = outcome(body, clients_of(lengths, tmp_path, "ragged"))
            if not is_refused(found):
                failures.append((name, case, found))
    source = clients_of(LENGTHS["one shard"], tmp_path, "ragged")
    body = CARELESS["mean"]
    for kind in ("one bucket", "group_by", "lists"):
        for case in ("one shard", "full members"):
            found = outcome(body, clients_of(LENGTHS[case], tmp_path, kind))
            if not is_refused(found):
                failures.append((kind, case, found))
    for options in ({"on_nonfinite": "drop"}, {"on_error": "drop"}, {"member_loop": "loop"}):
        if not is_refused(found := outcome(body, source, **options)):
            failures.append((options, found))
    for options in ({}, PROCESSES):
        for case in ("one shard", "full members"):
            found = outcome(body, clients_of(LENGTHS[case], tmp_path, "ragged"), "DirectRunner")
            if not is_refused(found):
                failures.append((options, case, found))
    assert not failures, failures


def test_verify_does_not_agree_with_a_body_that_reads_padding(tmp_path):
    for case in ("one shard", "full members", "one bucket"):
        source = clients_of(LENGTHS[case], tmp_path, "ragged")
        for runner in ("local", "DirectRunner"):
            with pytest.raises(StructureError, match="do not depend on padding"):
                bj.verify(program_of(CARELESS["mean"]), source, runner=runner)


def test_two_ragged_inputs_are_checked():
    @bj.program(clients=None)
    def both(a, b):
        return bj.reduce_sum(bj.map_fn(lambda a, b: a["x"].mean() + jnp.sum(b["x"]), (a, b)))

    rows = np.ones(9, np.float32)
    sources = [bj.from_ragged({"x": rows}, [2, 3, 4]) for _ in range(2)]
    with pytest.raises(StructureError, match="do not depend on padding"):
        bj.run(both, *sources, runner="local")


def test_bodies_that_leave_padding_out(tmp_path):
    failures = []
    for name, body in CAREFUL.items():
        for case, lengths in LENGTHS.items():
            source = clients_of(lengths, tmp_path, "ragged")
            tree = jax.tree.unflatten(source.treedef, source.read(0, len(source)))
            expected = jax.jit(program_of(body))(jax.tree.map(jnp.asarray, tree))
            found = outcome(body, source)
            if isinstance(found, Exception) or not np.allclose(
                found, expected, rtol=2e-5, atol=1e-6
            ):
                failures.append((name, case, found, expected))
    assert not failures, failures


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
    assert "padding of members can't be checked, because" in str(bj.explain(fixed, source))
    assert bj.run(fixed, source, runner="local") == 6
