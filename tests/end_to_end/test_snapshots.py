"""When a run takes the values of arrays that its caller can still write to."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import beamjax as bj

N = 24
RUNNERS = ("local", "DirectRunner")


class Gate:
    """A dataset of zeros whose members can only be read once the gate is open."""

    def __init__(self, size=N):
        self.size = size
        self.open = threading.Event()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert self.open.wait(60)
        return np.float32(0)

    def source(self):
        return bj.from_random_access(self, member=jax.ShapeDtypeStruct((), "float32"))


def aligned(shape, value):
    """A float32 array that JAX puts on the CPU without a copy."""
    nbytes = int(np.prod(shape)) * 4
    buffer = np.zeros(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    array = buffer[start : start + nbytes].view(np.float32).reshape(shape)
    array[...] = value
    return array


def rows():
    return aligned((N, 16), 1)


def read_only(x):
    view = x[:]
    view.flags.writeable = False
    return view


# An array, and the argument of a program that is made from it.
ARGUMENTS = {
    "array": (rows, lambda x: x),
    "view": (lambda: aligned((2 * N, 16), 1), lambda x: x[::2]),
    "read-only view of a writable array": (rows, read_only),
    "broadcast array": (lambda: aligned((16,), 1), lambda x: np.broadcast_to(x, (N, 16))),
    "from_arrays": (rows, bj.from_arrays),
    "take of from_arrays": (
        lambda: aligned((2 * N, 16), 1),
        lambda x: bj.take(bj.from_arrays(x), np.arange(0, 2 * N, 2)),
    ),
    "ragged": (
        lambda: aligned((2 * N, 16), 0.5),
        lambda x: bj.from_ragged(x, np.full(N, 2)),
    ),
}


@bj.program(placements={"clients": N})
def total(weights, tree, gate):
    x, scale = tree["x"], weights["scale"]
    if isinstance(x, dict):
        x = bj.map_fn(lambda m: jnp.sum(m["rows"], 0, where=m["mask"][:, None]), x)
    products = bj.map_fn(lambda v, zero: v * scale + zero, (x, gate))
    return bj.reduce_sum(products), x, scale


@pytest.mark.parametrize("runner", RUNNERS)
def test_launch_reads_arrays_before_it_returns(runner):
    wrong = []
    for name, (make, argument) in ARGUMENTS.items():
        gate, scale, array = Gate(), aligned((16,), 2), make()
        x = argument(array)
        job = bj.launch(total, {"scale": scale}, {"x": x}, gate.source(), runner=runner)
        array.fill(7)
        scale[:] = 7
        gate.open.set()
        found = [np.unique(np.asarray(leaf)).tolist() for leaf in job.result()]
        if found != [[2.0 * N], [1.0], [2.0]]:
            wrong.append((name, found))
    assert wrong == []


def test_launch_does_not_copy_what_cannot_change(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((N, 16), np.float32))
    owned = np.ones((N, 16), np.float32)
    owned.flags.writeable = False
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = bj.from_arrays({"a": owned, "b": mapped, "c": np.asarray(jnp.ones((N, 16)))})
    assert source.snapshot() is source
    writable = np.load(tmp_path / "x.npy", mmap_mode="c")
    for array in (np.ones((N, 16), np.float32), writable):
        copied = bj.from_arrays(array).snapshot()
        assert not np.shares_memory(copied.read(0, N)[0], array)


@pytest.mark.parametrize("runner", RUNNERS)
def test_results_do_not_share_memory_with_arguments(runner):
    @bj.program(placements={"clients": N})
    def passes(k, w, x):
        doubled = lambda v: bj.map_fn(lambda a: a * w, v)
        server = jax.lax.cond(k > 0, lambda: w, lambda: bj.reduce_sum(x))
        carried = jax.lax.fori_loop(0, k - 1, lambda i, v: doubled(v), x)
        chosen = jax.lax.cond(k > 0, lambda: x, lambda: doubled(x))
        return w, x, server, carried, chosen

    w, x = aligned((16,), 2), rows()
    found = bj.run(passes, np.int32(1), w, x, runner=runner)
    w[:] = 7
    x[:] = 7
    assert [np.unique(np.asarray(leaf)).tolist() for leaf in found] == [[2], [1], [2], [1], [1]]


def test_transform_takes_the_values_of_its_arguments_at_once():
    import apache_beam as beam
    from apache_beam.testing.util import assert_that, equal_to

    w, x = aligned((16,), 2), rows()
    products = bj.program(clients=N)(lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: v @ w, x)))
    with bj.pipeline("DirectRunner") as pipeline:
        transform = bj.transform(products, w, bj.from_arrays(x))
        w[:] = 7
        x[:] = 7
        found = pipeline | transform | beam.Map(float)
        assert_that(found, equal_to([32.0 * N]))


# --- arrays that a program closes over


def sum_of(body, x):
    return bj.reduce_sum(bj.map_fn(body, x))


def _plain(c):
    return lambda x: sum_of(lambda v: v + c.sum() + c[1] + jnp.asarray(c)[0], x) * c


def _nested(c):
    """Under jit inside of a scan inside of a body."""
    inner = jax.jit(lambda v: v + c)

    def program(x):
        def body(v):
            out, _ = jax.lax.scan(lambda a, _: (inner(a), None), jnp.full(3, v), None, 2)
            return out + c.sum()

        return sum_of(body, x) + c.max()

    return program


def _partial(c):
    return functools.partial(
        lambda c, x: sum_of(lambda v: v + jnp.asarray(c).sum() + c.max(), x), c
    )


class _Model:
    def __init__(self, c):
        self.c = c

    def __call__(self, x):
        return sum_of(lambda v: (v + self.c).sum() + self.c.sum(), x)


def _scalar(c):
    """Arrays without axes are literals of the traced program."""
    scalar = c[0:1].reshape(())
    return lambda x: sum_of(lambda v: v * scalar + float(scalar), x)


def _python(c):
    """The body calls back to the host, so it runs as Python."""
    kind = jax.ShapeDtypeStruct((), "float32")

    def body(v):
        same = jax.pure_callback(lambda v: np.asarray(v), kind, v, vmap_method="sequential")
        step = lambda a, _: (jax.jit(lambda a: a + c)(a), None)
        return jax.lax.scan(step, same + c, None, 2)[0].sum() + c.sum()

    return lambda x: sum_of(body, x)


def _returned(c):
    return lambda x: (bj.reduce_sum(x), c, bj.broadcast(c))


CLOSURES = {
    "body and server": _plain,
    "nested": _nested,
    "partial": _partial,
    "object": _Model,
    "scalar": _scalar,
    "python body": _python,
    "returned": _returned,
}


def is_same(found, expected):
    try:
        assert_same_bits(found, expected)
    except AssertionError:
        return False
    return True


@bj.program(clients=N)
def shifted(x, zeros):
    return bj.map_fn(lambda v, zero: v + zero, (x, zeros))


@pytest.mark.parametrize("runner", RUNNERS)
def test_closed_over_arrays_have_the_values_of_the_first_call_or_of_the_launch(runner):
    x, wrong = np.arange(N, dtype=np.float32), []
    for name, make in CLOSURES.items():
        c, gate = aligned((3,), [1, 2, 3]), Gate()
        program = bj.program(clients=N)(make(c))
        first = jax.tree.map(np.array, bj.run(program, x, runner=runner))
        expected = jax.tree.map(np.array, jax.jit(program)(x))
        gated = lambda x, zeros, program=program: program(shifted(x, zeros))
        job = bj.launch(gated, x, gate.source(), runner=runner)
        c *= 2
        gate.open.set()
        again = bj.run(program, x, runner=runner)
        fresh = bj.program(clients=N)(make(c))
        checks = [is_same(found, expected) for found in (first, again, job.result())]
        checks.append(is_same(bj.run(fresh, x, runner=runner), jax.jit(fresh)(x)))
        if not all(checks):
            wrong.append((name, checks))
    assert wrong == []
