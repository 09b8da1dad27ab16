"""Members by their number: what `jit` gives, for indices of any dtype, in bounds or not."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import all_steps, facts_of
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import beamjax as bj

SMALL = {"shard_size": 8}


def members(n, shape=(), dtype="float32"):
    """Small whole numbers, which are exact however they are added or multiplied."""
    return (np.arange(n * int(np.prod(shape))) % 11 + 1).reshape(n, *shape).astype(dtype)


def program_of(n, ops):
    """What operations make of 3 * x and the indices; all of it is exact."""

    @bj.program(clients=n)
    def program(indices, x):
        y = bj.map_fn(lambda v: 3 * v, x)
        return [op(y, indices) for op in ops]

    return program


def wrong(ops, n, indices, options, shape=(), runner="local"):
    """A line for each operation whose result has not the dtype, shape and bits that `jit` gives."""
    program, x = program_of(n, ops.values()), members(n, shape)
    wanted = jax.jit(program)(indices, x)
    found, lines = bj.run(program, indices, x, runner=runner, options=options), []
    for name, a, b in zip(ops, found, wanted, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
            lines.append(f"{name}: found {a!r:.200}, expected {b!r:.200}")
    return lines


# --- operations: of the members, and of a vector of indices or its first entry


def rest(y):
    return (1,) * (y.ndim - 1)


def updates(y, count):
    """`count` rows of small numbers."""
    rows = jnp.arange(2, 2 + count, dtype=y.dtype).reshape(count, *rest(y))
    return jnp.broadcast_to(rows, (count, *y.shape[1:]))


def gathered(mode, y, i, width=1):
    trailing = tuple(range(1, y.ndim))
    numbers = lax.GatherDimensionNumbers(trailing, (0,), (0,))
    if width > 1:
        numbers = lax.GatherDimensionNumbers((1, *(k + 1 for k in trailing)), (), (0,))
    return lax.gather(y, i[:, None], numbers, (width, *y.shape[1:]), mode=mode)


def scattered(scatter, mode, y, i, width=1):
    trailing, rows = tuple(range(1, y.ndim)), updates(y, len(i) * width)
    numbers = lax.ScatterDimensionNumbers(trailing, (0,), (0,))
    if width > 1:
        rows = rows.reshape(len(i), width, *y.shape[1:])
        numbers = lax.ScatterDimensionNumbers((1, *(k + 1 for k in trailing)), (), (0,))
    return getattr(lax, scatter)(y, i[:, None], rows, numbers, mode=mode)


def pairs(mode, y, i):
    """Of two columns of indices, one of which is of an entry of each member."""
    numbers = lax.GatherDimensionNumbers(tuple(range(1, y.ndim - 1)), (0, 1), (0, 1))
    return lax.gather(y, jnp.stack([i, i], -1), numbers, (1, 1, *y.shape[2:]), mode=mode)


def written_pairs(mode, y, i):
    numbers = lax.ScatterDimensionNumbers(tuple(range(1, y.ndim - 1)), (0, 1), (0, 1))
    rows = updates(y, len(i))[:, 0]
    return lax.scatter_add(y, jnp.stack([i, i[::-1]], -1), rows, numbers, mode=mode)


def written(name, mode, y, i):
    return getattr(y.at[i], name)(updates(y, len(i)), mode=mode)


def updated(negative, y, i):
    return lax.dynamic_update_slice_in_dim(
        y, updates(y, 2), i[0], 0, allow_negative_indices=negative
    )


def variants(text, op, *choices):
    """An operation for each combination of choices, by name."""
    return {text.format(*c): functools.partial(op, *c) for c in itertools.product(*choices)}


MODES = ("clip", "fill", "promise_in_bounds")
SCATTERS = ("scatter", "scatter_add", "scatter_mul", "scatter_min", "scatter_max")

TRACED = {
    "y[i]": lambda y, i: y[i],
    "y[i[0]]": lambda y, i: y[i[0]],
    "y[i] * y[:1]": lambda y, i: y[i] * y[:1],
    "take_along_axis": lambda y, i: jnp.take_along_axis(y, i.reshape(-1, *rest(y)), 0),
    "dynamic_index": lambda y, i: lax.dynamic_index_in_dim(y, i[0]),
    "dynamic_update_index": lambda y, i: lax.dynamic_update_index_in_dim(
        y, updates(y, 1)[0], i[0], 0
    ),
    **variants("take {}", lambda m, y, i: jnp.take(y, i, axis=0, mode=m), ("clip", "fill", "wrap")),
    **variants("take {} of one", lambda m, y, i: jnp.take(y, i[0], axis=0, mode=m), MODES[:2]),
    **variants("get {}", lambda m, y, i: y.at[i].get(mode=m), MODES),
    "get fill 7": lambda y, i: y.at[i].get(mode="fill", fill_value=7),
    "get fill 7 of one": lambda y, i: y.at[i[0]].get(mode="fill", fill_value=7),
    **variants("at.{} {}", written, ("set", "add", "multiply", "min", "max"), ("clip", "drop")),
    **variants("gather {}", gathered, MODES),
    **variants("{} {}", scattered, SCATTERS, MODES),
}

# Those that need two members at least.
WIDE = {
    **variants(
        "dynamic_slice {}",
        lambda how, y, i: lax.dynamic_slice_in_dim(y, i[0], 2, allow_negative_indices=how),
        (True, False),
    ),
    **variants("dynamic_update_slice {}", updated, (True, False)),
    **variants("gather of 2 {}", functools.partial(gathered, width=2), MODES),
    **variants("{} of 2 {}", functools.partial(scattered, width=2), SCATTERS, MODES),
}

# Those of which members have an axis that is indexed as well.
PAIRS = variants("gather of pairs {}", pairs, MODES)
PAIRS |= variants("scatter of pairs {}", written_pairs, MODES)


def static(draw, n):
    """Some operations by numbers that are known when they are traced."""
    start, stop = draw(st.integers(0, n - 1)), draw(st.integers(1, n))
    step, k = draw(st.integers(1, 5)), draw(st.integers(-n, n - 1))
    some = np.array(draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=3)))
    return {
        f"y[{start}:{stop}:{step}]": lambda y, i: y[start:stop:step],
        f"y[::-{step}]": lambda y, i: y[:: -(n // 3 + step)],
        f"y[{k}]": lambda y, i: y[k],
        f"y[{some}]": lambda y, i: y[some],
        f"at[{start}:{stop}:{step}].add": lambda y, i: y.at[start:stop:step].add(2),
        f"at[{some}].set": lambda y, i: y.at[some].set(5),
        "update of nothing": lambda y, i: lax.dynamic_update_slice_in_dim(y, y[:0] * 0, i[0], 0),
    }


# --- drawn


NUMBERS = [*range(1, 20), 126, 127, 128, 129, 130, 200, 254, 255, 256, 257, 300]
NARROW = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
LARGE = (2**31 - 1, 2**31, 3 * 10**9, 2**32 - 1, 2**32 + 3, 2**40, 2**63 + 5, 2**64 - 1)


@st.composite
def cases(draw, dtypes):
    n, shape = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from([(), (2,), (3, 2)]))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    limits = np.iinfo(dtype)
    near = {0, 1, n // 2, n - 2, n - 1, n, n + 1, -1, -n, -n - 1, limits.min, limits.max}
    near |= {sign * k for k in LARGE for sign in (1, -1)}
    values = st.sampled_from(sorted(k for k in near if limits.min <= k <= limits.max))
    values |= st.integers(0, min(n - 1, limits.max))
    indices = np.array(draw(st.lists(values, min_size=1, max_size=3)), dtype)
    ops = {**TRACED, **static(draw, n)}
    ops |= WIDE if n > 1 else {}
    ops |= PAIRS if shape else {}
    names = draw(st.lists(st.sampled_from(sorted(ops)), min_size=1, max_size=5, unique=True))
    options = {
        "shard_size": draw(st.sampled_from([8, 16, 64, 256])),
        "member_loop": draw(st.sampled_from(["vmap", "loop"])),
        "on_nonfinite": draw(st.sampled_from(["keep", "raise"])),
    }
    return n, shape, indices, {name: ops[name] for name in names}, options


def check(case):
    jax.config.update("jax_disable_most_optimizations", True)  # Compiles in half of the time.
    n, shape, indices, ops, options = case
    traced = {}
    for name, op in ops.items():
        # JAX refuses indices of some dtypes.
        with contextlib.suppress(TypeError, OverflowError):
            jax.eval_shape(program_of(n, [op]), indices, members(n, shape))
            traced[name] = op
    assert not wrong(traced, n, indices, options, shape)


@examples(4)
@given(cases(NARROW))
def test_drawn_operations_give_what_jit_gives(case):
    check(case)


@examples(3)
@given(cases((*NARROW, "int64", "uint64")))
def test_drawn_operations_with_wide_types(case):
    with jax.enable_x64(True):
        check(case)


# --- fixed


def test_indices_narrower_than_the_members():
    """Where a dtype can't hold the number of members, or of rows of a shard."""
    cases = [
        (200, np.array([3, 90, -1, 127, -128], "int8"), 8),
        (200, np.array([3, 90, -1], "int8"), 256),
        (250, np.array([3, 249, 250, 255], "uint8"), 256),
        (256, np.array([3, 255], "uint8"), 8),
        (300, np.array([3, 90, 255], "uint8"), 64),
        (40_000, np.array([3, 30_000, -4, -(2**15)], "int16"), 40_000),
        (70_000, np.array([3, 65_535], "uint16"), 4096),
    ]
    names = ("take clip", "take fill", "gather clip", "gather fill", "scatter_add clip",
             "scatter fill", "dynamic_slice False", "dynamic_update_slice False")  # fmt: skip
    ops, lines = {name: {**TRACED, **WIDE}[name] for name in names}, []
    for n, indices, size in cases:
        found = wrong(ops, n, indices, {"shard_size": size})
        lines += [f"{indices.dtype}, n = {n}, shard size {size}: {line}" for line in found]
    assert not lines


def test_indices_past_int32():
    """XLA clamps them to the last member: as an int32 they would be one of the first."""
    wide = {"int64": [2**32 + 3, -(2**32) + 3, 2**40], "uint64": [2**32 + 3, 2**63 + 5, 2**64 - 1]}
    cases = {"uint32": [2**31, 3 * 10**9, 2**32 - 1], **wide}
    names = ("gather clip", "gather of 2 clip", "scatter_add clip", "scatter_add of 2 clip",
             "scatter_add fill", "dynamic_slice False", "dynamic_update_slice False")  # fmt: skip
    ops, lines = {name: {**TRACED, **WIDE}[name] for name in names}, []
    for dtype, values in cases.items():
        for k in values:
            with jax.enable_x64(dtype in wide):
                found = wrong(ops, 20, np.array([k], dtype), SMALL)
            lines += [f"{dtype} {k}: {line}" for line in found]
    assert not lines


@pytest.mark.parametrize("shape", [(), (3,)])
def test_single_members(shape):
    ops = {
        "take": lambda y, i: jnp.take(y, 2, axis=0),
        "take outside": lambda y, i: jnp.take(y, 20, axis=0),
        "get": lambda y, i: y.at[i].get(mode="fill"),
        "get of another": lambda y, i: y.at[i - 1].get(mode="fill", fill_value=7),
        "get of an integer": lambda y, i: y.astype("int32").at[i].get(mode="fill"),
        "get clipped": lambda y, i: y.at[i].get(mode="clip"),
        "gradient": lambda y, i: jax.grad(lambda z: jnp.take(z, 2, axis=0).sum())(y),
    }
    for index in (np.int32(20), np.int8(13)):
        assert not wrong(ops, 20, index, SMALL, shape)


def test_more_than_half_of_the_members_are_gathered():
    program = program_of(20, [lambda y, i: y[i]])
    for count in (10, 11):
        plan = bj.explain(program, np.arange(count), members(20), options=SMALL)
        assert ("Gather" in {fact.kind for fact in all_steps(facts_of(plan).steps)}) == (
            count == 11
        )


def test_indices_that_members_make():
    """One entry of an array of four axes, whose four indices are the members."""
    numbers = lax.GatherDimensionNumbers((), (0, 1, 2, 3), (0, 1, 2, 3))

    def entry(y, i):
        i = bj.map_fn(lambda k: k % 3, jnp.asarray([4, 0, 2, 7]))
        return lax.gather(y, i, numbers, (1, 1, 1, 1), mode="clip")

    for runner in ("local", "DirectRunner"):
        assert not wrong({"entry": entry}, 4, np.int32(0), SMALL, (3, 3, 3), runner)


def test_indices_on_a_runner():
    """Nothing of it depends on where a shard is computed."""

    def of(name, op, entry):
        return {name: lambda y, i: op(y, i[entry])}

    ops = {
        **of("take int8", lambda y, i: jnp.take(y, i, axis=0), "int8"),
        **of("take clip", lambda y, i: jnp.take(y, i, axis=0, mode="clip"), "int16"),
        **of("take uint8", lambda y, i: jnp.take(y, i, axis=0), "uint8"),
        **of("dynamic_slice", lambda y, i: lax.dynamic_slice(y, i, (3,)), "uint32"),
        **of("update", lambda y, i: lax.dynamic_update_slice(y, y[:2] * 0, i), "uint32"),
        **of("add", functools.partial(scattered, "scatter_add", "clip"), "uint32"),
        **of("get", lambda y, i: y.at[i[0]].get(mode="fill", fill_value=7), "int16"),
        "take one": lambda y, i: jnp.take(y, 2, axis=0),
        "y[5]": lambda y, i: y[5],
    }
    indices = {
        "int8": np.array([3, 90, -1], "int8"),
        "int16": np.array([3000, -7, 270], "int16"),
        "uint8": np.array([3, 255], "uint8"),
        "uint32": np.array([3 * 10**9], "uint32"),
    }
    guarded = {"shard_size": 64, "on_nonfinite": "raise", "member_loop": "loop"}
    assert not wrong(ops, 300, indices, guarded, runner="DirectRunner")


GUARDS = [{}, {"on_nonfinite": "raise"}, {"on_nonfinite": "drop"}, {"on_error": "drop"}]
LOOPS = ["vmap", "loop", "batches"]
# All guards, and all loops with and without one.
GATE = [(0, "loop"), (0, "batches"), (1, "batches"), (2, "loop"), (3, "vmap")]


@pytest.mark.parametrize(
    ("guard", "loop"),
    [
        pytest.param(guard, loop, marks=() if (guard, loop) in GATE else pytest.mark.table)
        for guard, loop in itertools.product(range(len(GUARDS)), LOOPS)
    ],
)
def test_guarded_loops(guard, loop):
    """A batch of members of a shard begins where it does, also where members may be left out."""
    names = ("y[i]", "take fill", "get clip", "gather of 2 clip", "scatter_add fill",
             "scatter of 2 clip", "dynamic_slice True",
             "dynamic_update_slice True")  # fmt: skip
    ops = {name: {**TRACED, **WIDE}[name] for name in names}
    ops |= {
        "y[5]": lambda y, i: y[5],
        "y[-1]": lambda y, i: y[-1],
        "y[3:11:2]": lambda y, i: y[3:11:2],
        "at[13]": lambda y, i: y.at[13].set(0),
        "table": lambda y, i: jnp.ones(5, y.dtype).at[y.astype(int) % 5].add(y),
        "numbers": lambda y, i: bj.map_fn(lambda v, k: v * k, (y, jnp.arange(40.0))),
        "padded": lambda y, i: bj.map_fn(
            lambda v, k: v + k, (y, jnp.pad(jnp.arange(9.0), (4, 27)))
        ),
    }
    options = {"shard_size": 16, "member_loop": loop, **GUARDS[guard]}
    assert not wrong(ops, 40, np.array([13, 5, 17], "int32"), options)


def test_narrow_indices_of_extremes():
    """Of equal extremes XLA takes the one of the smallest index, as the dtype wraps it around."""
    ops = {
        "all equal": lambda y, i: lax.argmax(jnp.where(y < 0, y, -jnp.inf), 0, jnp.int8),
        "few equal": lambda y, i: lax.argmin(y, 0, jnp.int8),
        "first": lambda y, i: lax.argmax(y, 0, jnp.uint8),
    }
    for n in (100, 128, 200, 300):
        assert not wrong(ops, n, np.int32(0), {"shard_size": 256})
