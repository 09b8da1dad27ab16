"""Rows by index of sources and stored values: what `jit` gives, and which members are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import all_steps, facts_of
from helpers import assert_close, assert_same_bits, examples
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax

import beamjax as bj

SMALL = {"shard_size": 8}
N, K = 40, 6


def members(n, shape, dtype):
    """Small whole numbers."""
    values = np.arange(n * int(np.prod(shape))).reshape(n, *shape) % 7 + 1
    return values.astype(jnp.dtype(dtype))


def column(x, i):
    return x.reshape(len(x), -1)[i, 0]


READS = {
    "x[i]": lambda x, i: x[i],
    "take": lambda x, i: jnp.take(x, i, axis=0),
    "clip": lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
    "wrap": lambda x, i: jnp.take(x, i, axis=0, mode="wrap"),
    "fill": lambda x, i: x.at[i].get(mode="fill", fill_value=3),
    "sorted": lambda x, i: x.at[jnp.sort(i)].get(mode="drop", indices_are_sorted=True),
    "twice": lambda x, i: x[jnp.concatenate([i, i])],
    "square": lambda x, i: jnp.take(x, jnp.stack([i, i], 1), axis=0),
    "column": column,
    "dynamic_slice": lambda x, i: lax.dynamic_slice_in_dim(x, i.sum(), min(5, len(x))),
    "index": lambda x, i: lax.dynamic_index_in_dim(x, i.max() if i.size else 0, keepdims=False),
    "x[i[0]]": lambda x, i: x[i[0]] if i.size else x[0],
}
DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "int16", "bool", "complex64"]


def by_index(read, k):
    """A program that reads rows of an input and of a stored value, in and outside of a loop."""

    @bj.program(placements={"clients": N, "cohort": k})
    def program(x, kept, indices):
        kept = bj.map_fn(jnp.flip, kept, placement="clients")

        def step(carry, i):
            rows = read(x, i), read(kept, i)
            if rows[0].shape[:1] == (k,):
                rows = bj.map_fn(lambda a, b: (a, b), rows, placement="cohort")
            return carry + 1, rows

        return read(x, indices[0]), lax.scan(step, 0, indices)

    return program


@pytest.mark.versions
@examples(5)
@given(
    read=st.sampled_from(sorted(READS)),
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(), (3,), (2, 2)]),
    index_dtype=st.sampled_from(["int32", "int8", "uint8", "uint32", "int16"]),
    numbers=st.lists(st.integers(-N - 3, N + 3), min_size=K, max_size=K),
)
@example(read="take", dtype="bfloat16", shape=(3,), index_dtype="int8", numbers=[N, -N - 1] * 3)
@example(read="fill", dtype="uint8", shape=(), index_dtype="int32", numbers=[0, 0, 0, -1, N, 5])
@example(read="take", dtype="bool", shape=(), index_dtype="uint32", numbers=[N, 1, 2, 1, 2, N - 1])
def test_rows_are_those_of_jit(read, dtype, shape, index_dtype, numbers):
    indices = np.array([numbers, numbers[::-1]]).astype(index_dtype)
    x, program = members(N, shape, dtype), by_index(READS[read], K)
    wanted = jax.jit(program)(x, x, indices)
    source = bj.from_arrays(x)
    assert_same_bits(
        bj.run(program, source, source, indices, runner="local", options=SMALL), wanted
    )


@pytest.mark.parametrize("read", sorted(READS))
def test_the_runner_makes_no_difference(read):
    indices = np.array([[3, 3, -1, 39, 40, -41], [0, 1, 2, 3, 4, 5]])
    x, program = members(N, (3,), "float32"), by_index(READS[read], K)
    found = bj.run(program, bj.from_arrays(x), x, indices, options=SMALL)
    assert_same_bits(found, jax.jit(program)(x, x, indices))


def test_no_rows():
    @bj.program(placements={"clients": N})
    def program(x, i):
        return x[i], jnp.take(x, i, axis=0), x[i, 0]

    x, i = members(N, (3,), "float32"), np.zeros(0, np.int32)
    assert_same_bits(bj.run(program, bj.from_arrays(x), i, runner="local"), jax.jit(program)(x, i))


# --- cohorts


class Clients:
    """A dataset that records which members are read."""

    def __init__(self, n):
        rng = np.random.default_rng(0)
        self.data = {
            "x": rng.normal(size=(n, 4)).astype("f4"),
            "y": rng.normal(size=n).astype("f4"),
        }
        self.read = []

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, index):
        self.read.append(index)
        return {"x": self.data["x"][index], "y": self.data["y"][index]}


def rounds(n, k, count):
    @bj.program(placements={"clients": n, "cohort": k})
    def train(weights, clients, key):
        def one_round(weights, key):
            index = jax.random.choice(key, n, (k,), replace=False)
            cohort = jax.tree.map(lambda leaf: leaf[index], clients)

            def loss(weights, client):
                return jnp.square(client["x"] @ weights - client["y"])

            def total(weights):
                losses = bj.map_fn(lambda c: loss(weights, c), cohort, placement="cohort")
                return bj.reduce_mean(losses, placement="cohort")

            value, slope = jax.value_and_grad(total)(weights)
            return weights - 0.01 * slope, (value, index)

        return lax.scan(one_round, weights, jax.random.split(key, count))

    return train


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_cohort_in_a_scan_reads_its_members_only(runner):
    data, train = Clients(20_000), rounds(20_000, 50, 4)
    start, key = jnp.zeros(4), jax.random.key(3)
    source = bj.from_random_access(data)
    data.read.clear()
    found = bj.run(train, start, source, key, runner=runner)
    (_, (_, index)) = found
    assert sorted(data.read) == sorted(np.asarray(index).ravel().tolist())
    assert len(data.read) == 200
    assert_close(found, jax.jit(train)(start, data.data, key))
    assert_same_bits(found, bj.run(train, start, source, key, runner="local"))


@pytest.mark.versions
def test_explain_says_which_rows_are_read():
    plan = bj.explain(rounds(20_000, 50, 4), jnp.zeros(4), Clients(20_000).data, jax.random.key(0))
    steps = list(all_steps(facts_of(plan).steps))
    assert [step.rule for step in steps if step.kind == "Rows"] == [
        "reads 50 rows by index of arg1", "reads 50 rows by index of arg2"
    ]  # fmt: skip
    assert {step.placement for step in steps if step.kind == "Map"} == {"cohort"}
    assert not {"Gather", "Scatter"} & {step.kind for step in steps}


def test_workers_in_processes_read_rows_of_files(tmp_path):
    train, data = rounds(400, 30, 2), Clients(400).data
    np.savez(tmp_path / "clients.npz", **data)
    args = jnp.zeros(4), bj.from_npz(tmp_path / "clients.npz"), jax.random.key(5)
    processes = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}
    found = bj.run(train, *args, options={**SMALL, **processes})
    assert_same_bits(found, bj.run(train, *args, runner="local", options=SMALL))


def test_verify_agrees():
    train, data = rounds(64, 8, 2), Clients(64)
    assert bj.verify(train, jnp.zeros(4), bj.from_arrays(data.data), jax.random.key(1)).ok


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_session_reads_only_rows(runner):
    data, train = Clients(500), rounds(500, 10, 2)
    source, key = bj.from_random_access(data), jax.random.key(1)
    with bj.session(runner=runner) as session:
        data.read.clear()
        first = session.run(train, jnp.zeros(4), source, key)
        session.run(train, first[0], source, jax.random.fold_in(key, 1))
    assert len(data.read) == 40


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_checkpoints(tmp_path, runner):
    data, train = Clients(60), rounds(60, 8, 6)
    args = jnp.zeros(4), bj.from_random_access(data), jax.random.key(1)
    options = {"checkpoint": str(tmp_path), "checkpoint_every": 1}
    found = bj.run(train, *args, runner=runner, options=options)
    data.read.clear()
    assert_same_bits(bj.run(train, *args, runner=runner, options=options), found)
    assert_close(found, jax.jit(train)(args[0], data.data, args[2]))


def test_states_of_clients_are_read_and_written_by_index():
    @bj.program(placements={"clients": N, "cohort": K})
    def program(states, key):
        def one_round(states, key):
            index = jax.random.choice(key, N, (K,), replace=False)
            new = bj.map_fn(lambda s: 2 * s + 1, states[index], placement="cohort")
            return states.at[index].set(new), bj.reduce_sum(new, placement="cohort")

        states = bj.map_fn(lambda s: s + jnp.sum(s), states, placement="clients")
        states, sums = lax.scan(one_round, states, jax.random.split(key, 3))
        return bj.reduce_sum(states, placement="clients"), sums

    x, key = members(N, (3,), "float32"), jax.random.key(0)
    wanted = jax.jit(program)(x, key)
    assert_same_bits(bj.run(program, x, key, runner="local", options=SMALL), wanted)
    assert_same_bits(bj.run(program, x, key, options=SMALL), wanted)


class Damaged:
    """Members of which one can't be read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.read.append(index)
        if index == 5:
            raise OSError("damaged")
        return np.float32(index + 1)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
@pytest.mark.parametrize("kind", ["memory", "source", "damaged"])
def test_a_row_that_fails_is_left_out_in_its_round_only(kind, runner):
    """Its place in the cohort has another row in the next round."""

    @bj.program(placements={"clients": 12, "cohort": 4})
    def sums(x, indices):
        def one_round(c, i):
            doubled = bj.map_fn(lambda v: 2 * v, x[i], placement="cohort")
            return c, bj.reduce_sum(doubled, placement="cohort")

        return lax.scan(one_round, 0.0, indices)[1]

    x = np.arange(1, 13, dtype="float32")
    x[5] = np.nan
    indices = np.int32([[5, 1, 2, 3], [0, 1, 2, 3], [8, 9, 10, 11]])
    data, option = Damaged(), "on_error" if kind == "damaged" else "on_nonfinite"
    member = jax.ShapeDtypeStruct((), "float32")
    source = {
        "memory": lambda: x,
        "source": lambda: bj.from_arrays(x),
        "damaged": lambda: bj.from_random_access(data, member=member),
    }[kind]()
    options = {option: "drop", "drop_limit": 0.5}
    job = bj.launch(sums, source, indices, runner=runner, options=options)
    np.testing.assert_array_equal(job.result(), np.nansum(2 * x[indices], axis=1))
    assert [(each.placement, each.member) for each in job.dropped] == [("cohort", 0)]
    assert set(data.read) <= set(indices.ravel().tolist())


# --- batches


def epochs(n, b, rows_of):
    @bj.program(placements={"rows": n, "batch": b})
    def train(weights, data, key):
        def step(weights, batch):
            losses = lambda w: bj.reduce_mean(
                bj.map_fn(lambda r: jnp.square(r["x"] @ w - r["y"]), batch, placement="batch"),
                placement="batch",
            )
            return weights - 0.01 * jax.grad(losses)(weights), None

        return rows_of(step, weights, data, key)

    return train


def by_shuffled_index(n, b):
    def scanned(step, weights, data, key):
        order = jax.random.permutation(key, n).reshape(-1, b)
        take = lambda i: jax.tree.map(lambda leaf: leaf[i], data)
        return lax.scan(lambda w, i: step(w, take(i)), weights, order)[0]

    return scanned


def by_slices(n, b):
    def scanned(step, weights, data, key):
        take = lambda i: jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * b, b), data)
        return lax.scan(lambda w, i: step(w, take(i)), weights, jnp.arange(n // b))[0]

    return scanned


@pytest.mark.parametrize("make", [by_shuffled_index, by_slices])
def test_an_epoch_reads_each_row_once(make):
    data, train = Clients(64), epochs(64, 16, make(64, 16))
    args = jnp.zeros(4), bj.from_random_access(data), jax.random.key(1)
    data.read.clear()
    found = bj.run(train, *args, runner="local")
    assert sorted(data.read) == list(range(64))
    assert_close(found, jax.jit(train)(args[0], data.data, args[2]))
    assert_same_bits(found, bj.run(train, *args))


def _while(step, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(*c)), (0, x))[1]


LOOPS = {
    "fori_loop": lambda step, x: lax.fori_loop(0, 3, step, x),
    "while_loop": _while,
    "scan": lambda step, x: lax.scan(lambda c, i: (step(i, c), None), x, jnp.arange(3))[0],
    "scan in a scan": lambda step, x: lax.scan(
        lambda c, _: (lax.fori_loop(0, 2, step, c), None), x, length=2
    )[0],
    "cond in a scan": lambda step, x: lax.scan(
        lambda c, i: (lax.cond(i > 0, lambda c: step(i, c), lambda c: c, c), None), x, jnp.arange(3)
    )[0],
}


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_loop_of_members_reads_rows_of_what_it_carries(loop, runner):
    """Without the row, each shard would compute the whole loop by itself."""

    @bj.program(placements={"clients": N})
    def program(x):
        def step(i, c):
            return 1 - c + lax.dynamic_index_in_dim(c, N // 2 + i)

        return LOOPS[loop](step, bj.map_fn(lambda v: 2 * v, x))

    x = members(N, (3,), "float32")
    found = bj.run(program, x, runner=runner, options=SMALL)
    assert_same_bits(found, jax.jit(program)(x))
