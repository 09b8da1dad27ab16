"""When a run takes the values of arrays that its caller can still write to."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj

N = 24
RUNNERS = ("local", "DirectRunner")


class Gate:
    """A dataset of zeros whose members can only be read once the gate is open."""

    def __init__(self, size):
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


def rows(value=1.0):
    return aligned((N, 16), value)


# Each case makes an argument of `total`, and a function that overwrites what it was made of.
def _array():
    x = rows()
    return x, lambda: x.fill(7)


def _view():
    base = aligned((2 * N, 16), 1)
    return base[::2], lambda: base.fill(7)


def _read_only_view():
    base = rows()
    view = base[:]
    view.flags.writeable = False
    return view, lambda: base.fill(7)


def _repeated():
    base = aligned((16,), 1)
    return np.broadcast_to(base, (N, 16)), lambda: base.fill(7)


def _from_arrays():
    x = rows()
    return bj.from_arrays(x), lambda: x.fill(7)


def _taken():
    x = aligned((2 * N, 16), 1)
    return bj.take(bj.from_arrays(x), np.arange(0, 2 * N, 2)), lambda: x.fill(7)


def _jax_array():
    return jnp.asarray(rows()), lambda: None


CASES = {
    "array": _array,
    "view": _view,
    "read-only view of a writable array": _read_only_view,
    "broadcast array": _repeated,
    "from_arrays": _from_arrays,
    "take of from_arrays": _taken,
    "jax array": _jax_array,
}


@bj.program(placements={"clients": N})
def total(weights, tree, gate):
    x, scale = tree["x"], weights["scale"]
    products = bj.map_fn(lambda v, zero: v * scale + zero, (x, gate))
    return bj.reduce_sum(products), x, scale


@pytest.mark.parametrize("runner", RUNNERS)
def test_launch_reads_arrays_before_it_returns(runner):
    wrong = []
    for name, make in CASES.items():
        gate, scale = Gate(N), aligned((16,), 2)
        x, overwrite = make()
        job = bj.launch(total, {"scale": scale}, {"x": x}, gate.source(), runner=runner)
        overwrite()
        scale[:] = 7
        gate.open.set()
        found = [np.unique(np.asarray(leaf)).tolist() for leaf in job.result()]
        if found != [[2.0 * N], [1.0], [2.0]]:
            wrong.append((name, found))
    assert not wrong


def test_launch_reads_the_arrays_of_ragged_members_before_it_returns():
    x, lengths = aligned((N,), 1), np.full(N // 2, 2)
    source = bj.from_ragged(x, lengths)
    gate = Gate(N // 2)

    @bj.program(placements={"clients": N // 2})
    def ragged(members, zeros):
        def body(member, zero):
            return jnp.sum(member["rows"], where=member["mask"]) + zero

        return bj.reduce_sum(bj.map_fn(body, (members, zeros)))

    job = bj.launch(ragged, source, gate.source(), runner="local")
    x[:] = 7
    gate.open.set()
    assert job.result() == N


def test_launch_does_not_copy_what_nobody_can_write_to(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((N, 16), np.float32))
    owned = np.ones((N, 16), np.float32)
    owned.flags.writeable = False
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    read = bj.from_arrays({"a": owned, "b": mapped, "c": np.asarray(jnp.ones((N, 16)))})
    again = read.snapshot()
    assert again is read
    copied = bj.from_arrays(np.ones((N, 16), np.float32))
    assert copied.snapshot() is not copied
    writable = np.load(tmp_path / "x.npy", mmap_mode="c")
    assert bj.from_arrays(writable).snapshot() is not None
    assert not np.shares_memory(bj.from_arrays(writable).snapshot().read(0, N)[0], writable)


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

    @bj.program(placements={"clients": N})
    def products(w, x):
        return bj.reduce_sum(bj.map_fn(lambda v: v @ w, x))

    with bj.pipeline("DirectRunner") as pipeline:
        transform = bj.transform(products, w, bj.from_arrays(x))
        w[:] = 7
        x[:] = 7
        found = pipeline | transform | beam.Map(float)
        assert_that(found, equal_to([32.0 * N]))


# --- arrays that a program closes over


def _plain(c):
    @bj.program(placements={"clients": N})
    def program(x):
        return bj.reduce_sum(bj.map_fn(lambda v: v + c.sum() + c[1] + jnp.asarray(c)[0], x)) * c

    return program


def _nested(c):
    """Under jit inside of a scan inside of a body."""

    @jax.jit
    def inner(v):
        return v + c

    @bj.program(placements={"clients": N})
    def program(x):
        def body(v):
            out, _ = jax.lax.scan(lambda a, _: (inner(a), None), jnp.full(3, v), None, 2)
            return out + c.sum()

        return bj.reduce_sum(bj.map_fn(body, x)) + c.max()

    return program


def _partial(c):
    @bj.program(placements={"clients": N})
    def program(c, x):
        return bj.reduce_sum(bj.map_fn(lambda v: v + jnp.asarray(c).sum() + c.max(), x))

    return functools.partial(program, c)


class _Model:
    def __init__(self, c):
        self.c = c

    def __call__(self, x):
        @bj.program(placements={"clients": N})
        def program(x):
            return bj.reduce_sum(bj.map_fn(lambda v: (v + self.c).sum() + self.c.sum(), x))

        return program(x)


def _scalar(c):
    """Arrays without axes are literals of the traced program."""
    scalar = c[0:1].reshape(())

    @bj.program(placements={"clients": N})
    def program(x):
        return bj.reduce_sum(bj.map_fn(lambda v: v * scalar + float(scalar), x))

    return program


def _python(c):
    """The body calls back to the host, so it runs as Python."""

    @bj.program(placements={"clients": N})
    def program(x):
        def body(v):
            same = jax.pure_callback(
                lambda v: np.asarray(v), jax.ShapeDtypeStruct((), "float32"), v,
                vmap_method="sequential",
            )  # fmt: skip
            out, _ = jax.lax.scan(
                lambda a, _: (jax.jit(lambda a: a + c)(a), None), same + c, None, 2
            )
            return out.sum() + c.sum()

        return bj.reduce_sum(bj.map_fn(body, x))

    return program


def _returned(c):
    @bj.program(placements={"clients": N})
    def program(x):
        return bj.reduce_sum(x), c, bj.broadcast(c)

    return program


CLOSURES = {
    "body and server": _plain,
    "nested": _nested,
    "partial": _partial,
    "object": _Model,
    "scalar": _scalar,
    "python body": _python,
    "returned": _returned,
}


def _same(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("runner", RUNNERS)
def test_closed_over_arrays_have_the_values_of_the_first_call(runner):
    x, wrong = np.arange(N, dtype=np.float32), []
    for name, make in CLOSURES.items():
        c = aligned((3,), [1, 2, 3])
        program = make(c)
        first = jax.tree.map(np.array, bj.run(program, x, runner=runner))
        expected = jax.tree.map(np.array, jax.jit(program)(x))
        c *= 2
        again = bj.run(program, x, runner=runner)
        fresh = bj.run(make(c), x, runner=runner)
        expected_fresh = jax.jit(make(c))(x)
        checks = _same(first, expected), _same(again, expected), _same(fresh, expected_fresh)
        if checks != (True, True, True):
            wrong.append((name, checks))
    assert not wrong


@bj.program(placements={"clients": N})
def shifted(x, zeros):
    return bj.map_fn(lambda v, zero: v + zero, (x, zeros))


def test_a_launched_job_has_the_closed_over_values_of_its_launch():
    x, wrong = np.arange(N, dtype=np.float32), []
    for name, make in CLOSURES.items():
        c, gate = aligned((3,), [1, 2, 3]), Gate(N)
        program = make(c)
        expected = jax.tree.map(np.array, jax.jit(program)(x))

        def gated(x, zeros, program=program):
            return program(shifted(x, zeros))

        job = bj.launch(gated, x, gate.source(), runner="local")
        c[:] = 7
        gate.open.set()
        if not _same(job.result(), expected):
            wrong.append(name)
    assert not wrong
