"""Calls to the host: as under `jit`, once a member, in bodies and on the server."""

import collections
import functools
import os
import re
import signal
import threading
import time

import apache_beam as beam
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from helpers import assert_close
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from programs import run_everywhere

import beamjax as bj
from beamjax.errors import StagingError

N = 11  # the last shard holds three members
X = jnp.arange(2.0 * N).reshape(N, 2)
W = jnp.asarray([0.5, -1.0])
HERE = os.path.abspath(__file__)
RUNNERS = ("local", "DirectRunner")
OPTIONS = {"shard_size": 8}


def spec(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


class Seen(collections.Counter):
    """Counts what callbacks are given."""

    def note(self, x):
        for value in np.asarray(x).reshape(-1, 2)[:, 0]:
            self[float(value)] += 1

    def counted(self, x):
        self[float(x)] += 1
        return np.float32(self.total())

    def noted(self, x):
        self.note(x)
        return np.sin(np.asarray(x))


SEEN = Seen()
ONCE = dict.fromkeys(X[:, 0].tolist(), 1)


def program(fn):
    return bj.program(clients=N)(fn)


def mapped(body):
    return program(lambda w, x: bj.map_fn(functools.partial(body, w), x))


def calls_back(w, v):
    return w * jax.pure_callback(SEEN.noted, spec(v), v, vmap_method="expand_dims")  # here


def calls_back_one_by_one(w, v):
    return w * jax.pure_callback(SEEN.noted, spec(v), v, vmap_method="sequential")  # here


def notes(w, v):
    jax.debug.callback(SEEN.note, v)  # here
    return v * w


def does_io(w, v):
    return w * jax.experimental.io_callback(SEEN.noted, spec(v), v)  # here


def scans(w, v):
    def one(u, _):
        return jax.experimental.io_callback(SEEN.noted, spec(v), u), None  # here

    return w * jax.lax.scan(one, v, None, length=1)[0]


def loops(w, v):
    def one(u):
        jax.debug.callback(SEEN.note, u)  # here
        return u + 100.0

    return w * jax.lax.while_loop(lambda u: u[0] < 100.0, one, v)


def branches(w, v):
    def note(u):
        jax.debug.callback(SEEN.note, u)  # here
        return jnp.sin(u)

    return w * jax.lax.cond(True, note, jnp.cos, v)


def draws(w, v):
    return w * jax.pure_callback(
        lambda u: np.asarray(u) + 1, spec(v), jax.random.normal(jax.random.key(0), v.shape),
        vmap_method="sequential",
    )  # fmt: skip


BODIES = {
    calls_back: "pure_callback", calls_back_one_by_one: "pure_callback", notes: "debug_callback",
    does_io: "io_callback", scans: "io_callback", loops: "debug_callback",
    branches: "debug_callback",
}  # fmt: skip


def count(run):
    SEEN.clear()
    result = jax.block_until_ready(run())
    jax.effects_barrier()
    return result, dict(SEEN)


@pytest.mark.versions
def test_a_body_calls_once_a_member():
    faults = []
    for body in BODIES:
        prog = mapped(body)
        expected, by_jit = count(lambda prog=prog: jax.jit(prog)(W, X))
        assert by_jit == ONCE
        for runner in RUNNERS:
            run = functools.partial(bj.run, prog, W, X, runner=runner, options=OPTIONS)
            found, seen = count(run)
            assert_close(found, expected)
            faults += [] if seen == ONCE else [(body.__name__, runner, seen)]
    assert faults == []


def line_of(fn):
    """The line below the head of a function that ends in `# here`."""
    with open(HERE) as file:
        source = file.read().splitlines()
    start = fn.__code__.co_firstlineno
    return next(i for i in range(start, start + 9) if source[i - 1].endswith("# here"))


def prints_on_server(w, x):
    jax.debug.print("w = {w}", w=w)  # here
    return bj.map_fn(lambda v: v * w, x)


def calls_back_on_server(w, x):
    w = jax.jit(lambda w: jax.pure_callback(np.sin, spec(w), w))(w)  # here
    return bj.map_fn(lambda v: v * w, x)


PLACES = {mapped(body): (call, body) for body, call in BODIES.items()} | {
    program(prints_on_server): ("debug_print", prints_on_server),
    program(calls_back_on_server): ("pure_callback", calls_back_on_server),
}


def test_explain_names_the_call():
    for prog, (call, fn) in PLACES.items():
        place = f"{HERE}:{line_of(fn)} "
        text = str(bj.explain(prog, W, X))
        assert re.search(rf"code .*{call} calls back to the host at {re.escape(place)}", text)


def test_other_steps_are_exported():
    @program
    def prog(w, x):
        mean = bj.reduce_mean(bj.map_fn(functools.partial(does_io, w), x))
        return bj.map_fn(lambda v: jnp.sin(v - mean), x)

    code = re.findall("code .*", str(bj.explain(prog, W, X)))
    assert sum("pickled with" in line for line in code) == 1
    assert sum(" for cpu" in line for line in code) >= 1


def test_ordered_calls_in_a_body_are_errors_as_under_jit():
    def body(w, v):
        return jax.experimental.io_callback(np.sin, spec(v), v, ordered=True)

    with pytest.raises(ValueError, match=r"[Oo]rdered"):
        jax.jit(mapped(body))(W, X)
    with pytest.raises(StagingError, match=rf"[Oo]rdered[^$]*{re.escape(HERE)}"):
        bj.run(mapped(body), W, X, runner="local")


# --- effects without results


def unused_prints(x):
    jax.debug.print("before")
    bj.map_fn(lambda v: jax.debug.print("member {}", v[0]), x)
    return bj.reduce_sum(x)


def unused_results(x):
    bj.map_fn(functools.partial(notes, W), x)
    bj.reduce_sum(bj.map_fn(lambda v: jax.debug.print("member {}", v[0]) or v, x))
    return bj.reduce_sum(x) - bj.reduce_sum(jnp.sin(x))


def used_late(x):
    y = bj.map_fn(lambda v: jax.debug.print("member {}", v[0]) or jnp.sin(v), x)
    mean = bj.reduce_mean(x)
    second = bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, x))
    return bj.reduce_sum(y), bj.map_fn(lambda u, v: u / second + v, (y, x)), y


def whole(x):
    jax.debug.print("all {}", jnp.sort(x[:, 0], axis=0))
    return x + 1


def ordered_on_server(x):
    mean = bj.reduce_mean(x)
    jax.debug.print("first {:.3f}", mean[0], ordered=True)
    jax.debug.print("second", ordered=True)
    spread = bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, x))
    jax.debug.print("third {:.3f}", spread[0], ordered=True)
    jax.debug.print("fourth {}", x[0, 1], ordered=True)
    return spread


def ordered_io(x):
    number = jax.ShapeDtypeStruct((), "float32")
    one = jax.experimental.io_callback(SEEN.counted, number, 1.0, ordered=True)
    mean = bj.reduce_mean(bj.map_fn(lambda v: v * one, x))
    two = jax.experimental.io_callback(SEEN.counted, number, mean[0], ordered=True)
    jax.debug.print("io {} {}", one, two, ordered=True)
    return mean, one, two


@pytest.mark.parametrize(
    ("fn", "count_of_lines", "order"),
    [(unused_prints, 12, sorted), (unused_results, 11, sorted), (used_late, 11, sorted),
     (whole, 1, sorted), (ordered_on_server, 4, list), (ordered_io, 1, list)],
)  # fmt: skip
def test_effects_happen_once(fn, count_of_lines, order, capsys):
    prog = program(fn)
    expected, by_jit = count(lambda: jax.jit(prog)(X))
    lines = order(capsys.readouterr().out.splitlines())
    assert len(lines) == count_of_lines
    for runner in RUNNERS:
        found, seen = count(lambda r=runner: bj.run(prog, X, runner=r, options=OPTIONS))
        assert_close(found, expected)
        assert seen == by_jit
        assert order(capsys.readouterr().out.splitlines()) == lines


def test_a_gradient_calls_once_a_member():
    prog = program(lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: jnp.sum(notes(w, v)), x)))
    expected, by_jit = count(lambda: jax.jit(jax.value_and_grad(prog))(W, X))
    run = functools.partial(bj.run, jax.value_and_grad(prog), W, X, runner="local", options=OPTIONS)
    found, seen = count(run)
    assert_close(found, expected)
    assert seen == by_jit == ONCE


def test_a_callback_that_fails_names_step_and_members():
    def fails(x):
        raise RuntimeError("no such host")

    called = functools.partial(jax.pure_callback, fails, vmap_method="sequential")
    for fn, step in (
        (lambda w, x: bj.map_fn(lambda v: called(spec(v), v), x), "map_clients_0.* members 0 to 7"),
        (lambda w, x: called(spec(w), bj.reduce_sum(x)), "server_0'"),
    ):
        with pytest.raises(bj.errors.WorkerError, match=f"{step}: RuntimeError: no such host, "):
            bj.run(program(fn), W, X, runner="local", options=OPTIONS)


def test_an_interrupt_in_a_callback_ends_the_run():
    calls = []

    def interrupted(x):
        calls.append(x)
        if len(calls) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # Ctrl-C
        time.sleep(2 if len(calls) == 1 else 0)  # longer than the caller waits
        return x

    called = functools.partial(jax.pure_callback, interrupted, vmap_method="sequential")
    fn = program(lambda x: bj.reduce_sum(bj.map_fn(lambda v: called(spec(v), v), x)))
    with pytest.raises(KeyboardInterrupt):
        bj.run(fn, X[:, 0], runner="local", options={"on_error": "drop", "local_threads": 1})
    assert len(calls) == 1, "it computed members again to find one that fails"


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_callback_runs_a_program(runner):
    # XLA calls back on threads that flush subnormal numbers to zero, which exact sums refuse.
    total = program(bj.reduce_sum)

    def outer(x):
        inner = lambda x: np.asarray(bj.run(total, x, runner=runner, options=OPTIONS))
        sums = jax.pure_callback(inner, spec(x[0]), bj.map_fn(jnp.sin, x))
        return sums + bj.reduce_sum(x)

    found = bj.run(program(outer), X, runner=runner, options=OPTIONS)
    assert_close(found, (jnp.sin(X) + X).sum(0), rtol=1e-5, atol=1e-5)


SETTINGS = {
    "disable_jit": jax.disable_jit,
    "transfer_guard": functools.partial(jax.transfer_guard, "disallow"),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_do_not_suit_compiled_bodies(name, runner):
    @program
    def rounds(x):
        def once(total, _):
            return total + bj.reduce_sum(x), lax.cond(total[0] > 9, lambda: 1, lambda: 2)

        return lax.scan(once, jnp.zeros(2), length=2), jnp.arange(3), x

    with SETTINGS[name]():
        found = bj.run(rounds, X, runner=runner, options=OPTIONS)
    assert_close(found, jax.jit(rounds)(X))


def test_settings_of_the_launching_thread():
    with jax.threefry_partitionable(False):
        expected = jax.jit(mapped(draws))(W, X)
        for runner in RUNNERS:
            assert_close(bj.run(mapped(draws), W, X, runner=runner), expected)
    assert not np.allclose(bj.run(mapped(draws), W, X, runner="local"), expected)


def test_inside_of_a_users_pipeline():
    SEEN.clear()
    total = program(lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: notes(w, v), x)))
    expected = np.asarray(X * W[None]).sum(axis=0)
    with beam.Pipeline(runner="FnApiRunner", options=PipelineOptions([])) as pipeline:
        members = pipeline | beam.Create(list(enumerate(np.asarray(X))))
        found = members | bj.transform(total, W, spec(X), options=OPTIONS)
        _ = found | beam.Map(functools.partial(np.testing.assert_allclose, expected))
    assert SEEN == ONCE


# --- calls that appear once a primitive is lowered, as that of lineax.linear_solve


def host_sin_p():
    """A primitive that nobody sees to call back to the host before it is lowered."""
    sin_p = Primitive("host_sin")
    sin_p.def_abstract_eval(lambda x: x)

    @sin_p.def_impl
    def of(x):
        return jax.pure_callback(lambda v: np.sin(np.asarray(v)), x, x, vmap_method="expand_dims")

    mlir.register_lowering(sin_p, mlir.lower_fun(of, multiple_results=False))
    batching.primitive_batchers[sin_p] = lambda args, dims: (sin_p.bind(*args), dims[0])
    return sin_p


def test_calls_that_appear_at_lowering():
    sin_p = host_sin_p()

    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: sin_p.bind(v) * w, x)
        mean = bj.reduce_mean(y)
        spread = bj.reduce_sum(bj.map_fn(lambda v: (v - mean) ** 2, x))
        return sin_p.bind(mean), y, spread, jnp.sort(y, axis=0)

    run_everywhere(prog, W, X, **OPTIONS)
    for options in ({"on_error": "raise"}, {"on_nonfinite": "raise"}, {"member_loop": "loop"}):
        run_everywhere(prog, W, X, beam="member_loop" not in options, **OPTIONS, **options)
    code = re.findall("code .*", str(bj.explain(prog, W, X)))
    told = f"prog: JAX can't export host_sin at {re.escape(HERE)}:"
    assert sum(bool(re.search(told, line)) for line in code) == 2
    assert any(" for cpu" in line for line in code)


def test_custom_calls_of_the_user_run_as_python():
    target = "lapack_sgeqp3_ffi"  # registered by JAX, which promises nothing about it

    def pivots(a):
        out = jax.ShapeDtypeStruct((2, 2), np.float32), jax.ShapeDtypeStruct((2,), np.int32)
        call = jax.ffi.ffi_call(
            target, (*out, jax.ShapeDtypeStruct((2,), np.float32)), vmap_method="sequential",
            input_output_aliases={0: 0, 1: 1}, input_layouts=[(0, 1), None],
            output_layouts=[(0, 1), None, None],
        )  # fmt: skip
        return call(a, jnp.zeros(2, np.int32))[1]

    jax.scipy.linalg.qr(jnp.eye(2), pivoting=True)  # loads LAPACK

    @program
    def prog(x):
        return bj.map_fn(lambda v: pivots(jnp.stack([v, -v])), x)

    run_everywhere(prog, X, beam=False)
    reason = r"code .*JAX can't export ffi_call at .* \(\w+ \w"  # The last words are JAX's.
    assert re.search(reason, str(bj.explain(prog, X)))
