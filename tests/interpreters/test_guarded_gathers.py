"""What the server gathers of members that are left out: alike for all outputs, inputs, runners."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from helpers import assert_same_bits
from pyarrow import parquet

import beamjax as bj
from beamjax.errors import WorkerError

N = 21
DROPPED = [2, 9, 20]
RUNNERS = ("local", "DirectRunner")


def values(bad):
    x = np.linspace(0.5, 4.0, N * 3).astype(np.float32).reshape(N, 3)
    x[list(bad), 1] = np.nan
    return x


class Damaged:
    """Members of which two can't be read."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index in (0, 13):
            raise OSError(f"record {index} is damaged")
        return values(())[index]


def mean_of_rounds(x):
    def one(w, _):
        return w + bj.reduce_mean(bj.map_fn(lambda v, w: v - w, (x, bj.broadcast(w)))), None

    return jax.lax.scan(one, jnp.zeros(3), length=2)[0]


def sorted_in_rounds(x):
    """Gathers what a loop carries along the members."""
    one = lambda z, _: (bj.map_fn(lambda v: v * 2, z), jnp.sort(z, 0)[0])
    return jax.lax.scan(one, x, length=2)[1]


REST = np.delete(values(DROPPED), DROPPED, axis=0).astype(np.float64)
HOLED = np.where(np.isin(np.arange(N), DROPPED)[:, None], np.nan, values(DROPPED))
# Outputs, and what they are where members are dropped.
SHARED = {
    "sum": (lambda x: x.sum(0), REST.sum(0)),
    "mean": (bj.reduce_mean, REST.mean(0)),
    "map": (lambda x: bj.reduce_max(bj.map_fn(lambda v: v * 2, x)), 2 * REST.max(0)),
    "loop": (mean_of_rounds, REST.mean(0)),
    "nanmedian": (lambda x: jnp.nanmedian(x, 0), np.median(REST, 0)),
}
OTHERS = {
    "sort": (lambda x: jnp.sort(x, 0), np.sort(HOLED, 0)),
    "median": (lambda x: jnp.median(x, 0), np.full(3, np.nan)),
    "product": (lambda x: x @ x.T, HOLED @ HOLED.T),
    "returned": (lambda x: x, HOLED),
    "placed": (lambda x: bj.map_fn(lambda v: v * 2, x), 2 * HOLED),
    "reduction": (lambda x: bj.reduce_min(x), REST.min(0)),
    "any": (lambda x: jnp.any(jnp.isnan(x)), np.array(False)),
    "rows": (
        lambda x: (jnp.max(x.ravel()), jnp.mean(x.ravel()), x.ravel()[7]),
        (REST.max(), REST.mean(), HOLED[2, 1]),
    ),
    "pick": (lambda x: x[9], HOLED[9]),
    "picks": (
        lambda x: (x[jnp.array([9, 20])], x[2:4], x[0]),
        (HOLED[[9, 20]], HOLED[2:4], HOLED[0]),
    ),
    "loop": (mean_of_rounds, REST.mean(0)),
    "gathers in a loop": (sorted_in_rounds, np.stack([REST.min(0), 2 * REST.min(0)])),
}


def joined(*fns):
    def program(data):
        x = data["x"] if isinstance(data, dict) else data
        return tuple(fn(x) for fn in fns)

    return bj.program(clients=N)(program)


def kinds_of_input(x, folder):
    np.save(folder / "x.npy", x)
    column = pa.FixedSizeListArray.from_arrays(x.ravel(), 3)
    parquet.write_table(pa.table({"x": column}), folder / "x.parquet")
    return {
        "array": x,
        "npy": bj.from_npy(folder / "x.npy"),
        "parquet": bj.from_parquet(folder / "x.parquet"),
    }


def launched(fn, x, runner="local", **more):
    options = {"shard_size": 8, "drop_limit": 0.9, "on_nonfinite": "drop", **more}
    job = bj.launch(fn, x, runner=runner, options=options)
    return job.result(), [each.member for each in job.dropped]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_what_else_is_computed_changes_nothing(every, tmp_path):
    """Pairs of outputs, from arrays and files, in this process and on Beam: all, or one of four."""
    inputs, failures = kinds_of_input(values(DROPPED), tmp_path), []
    alone = {}
    for name, (fn, truth) in {**SHARED, **OTHERS}.items():
        (found,), dropped = alone[name] = launched(joined(fn), inputs["array"])
        if dropped != ([] if name == "any" else DROPPED):
            failures.append((name, dropped))
        if name != "any":
            same_numbers(failures, name, found, truth)
    cases = [(a, b, "array", "local") for a in SHARED for b in OTHERS]
    cases += [("sum", b, kind, "local") for b in OTHERS for kind in ("npy", "parquet")]
    cases = cases[::every]
    for number, b in enumerate(OTHERS):
        cases.append((list(SHARED)[number % 5], b, list(inputs)[number % 3], "DirectRunner"))
    for case in cases:
        a, b, kind, runner = case
        program = joined(SHARED[a][0], OTHERS[b][0])
        (first, second), dropped = launched(program, inputs[kind], runner)
        if dropped != DROPPED:
            failures.append((case, dropped))
        # Loops run after the reductions that need no other one.
        before = (a, b) == ("loop", "any")
        same_numbers(failures, case, second, np.array(True) if before else OTHERS[b][1])
        try:
            assert_same_bits(first, alone[a][0][0])
        except AssertionError as error:
            failures.append((case, str(error)))
    assert not failures, failures


def same_numbers(failures, case, found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if a.dtype != (bool if np.asarray(b).dtype == bool else np.float32):
            failures.append((case, a.dtype))
        elif not np.allclose(a, b, rtol=2e-6, equal_nan=True):
            failures.append((case, a, b))


@pytest.mark.parametrize("all_kinds", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_else_is_computed_raises_alike(all_kinds, tmp_path):
    inputs, failures = kinds_of_input(values([9]), tmp_path), []
    for number, (name, (other, _)) in enumerate(OTHERS.items()):
        shared = list(SHARED)[number % 5]
        for runner in RUNNERS:
            for kind in inputs if all_kinds else list(inputs)[number % 3 :][:1]:
                program = joined(SHARED[shared][0], other)
                try:
                    launched(program, inputs[kind], runner, on_nonfinite="raise")
                    failures.append((shared, name, kind, runner))
                except WorkerError as error:
                    if "member 9: found NaN or infinity" not in str(error):
                        failures.append((shared, name, kind, runner, str(error)))
    assert not failures, failures


def test_all_of_a_shard_is_dropped_and_picked():
    x = values(range(8, 16))
    program = joined(lambda x: (x[9], x[3], x[jnp.array([10, 1])]), bj.reduce_mean)
    ((nine, three, two), mean), dropped = launched(program, x)
    assert dropped == list(range(8, 16))
    np.testing.assert_array_equal(nine, np.full(3, np.nan))
    np.testing.assert_array_equal(three, x[3])
    np.testing.assert_array_equal(two, np.stack([np.full(3, np.nan), x[1]]))
    rest = np.delete(x, range(8, 16), axis=0).astype(np.float64)
    np.testing.assert_allclose(mean, rest.mean(0), rtol=2e-6)


def test_gathered_members_that_cannot_be_read():
    """Integers have 0 in the place of a member that is left out."""

    def program(x, ids):
        return jnp.sort(x, 0), jnp.sort(ids), bj.reduce_sum(x)

    ids = np.arange(1, N + 1, dtype=np.int32)
    for runner in RUNNERS:
        fn = bj.program(clients=N)(program)
        got, numbers, total = bj.run(
            fn,
            bj.from_random_access(Damaged(), member=jax.ShapeDtypeStruct((3,), "float32")),
            ids,
            runner=runner,
            options={"shard_size": 8, "drop_limit": 0.9, "on_error": "drop"},
        )
        kept = np.delete(values(()), [0, 13], axis=0)
        np.testing.assert_array_equal(got[: N - 2], np.sort(kept, 0))
        assert np.isnan(got[N - 2 :]).all()
        np.testing.assert_array_equal(numbers, np.sort(np.where(np.isin(ids - 1, [0, 13]), 0, ids)))
        np.testing.assert_allclose(total, kept.astype(np.float64).sum(0), rtol=2e-6)


def test_server_values_with_as_many_rows_are_no_members():
    """What a program broadcasts is a server value, however many rows it has."""
    w = np.full((N, 3), np.nan, np.float32)

    def program(w, x):
        y = bj.map_fn(lambda v, w: v + jnp.nansum(w), (x, bj.broadcast(w)))
        return bj.reduce_mean(y), jnp.sort(w, 0)

    (mean, _), dropped = launched(
        lambda x: bj.program(clients=N)(program)(jnp.asarray(w), x), values(DROPPED)
    )
    assert dropped == DROPPED
    np.testing.assert_allclose(mean, REST.mean(0), rtol=2e-6)


def test_placed_results_in_files_have_holes(tmp_path):
    inputs = kinds_of_input(values(DROPPED), tmp_path)
    for runner in RUNNERS:
        for kind, x in inputs.items():
            program = joined(*(OTHERS[name][0] for name in ("placed", "returned", "sort")))
            folder = tmp_path / f"{runner}-{kind}"
            (placed, returned, _), dropped = launched(
                program, x, runner, keep="placed", results_folder=folder
            )
            assert dropped == DROPPED
            np.testing.assert_array_equal(placed.read(0, N)[0], (2 * HOLED).astype(np.float32))
            np.testing.assert_array_equal(returned.read(0, N)[0], HOLED.astype(np.float32))
