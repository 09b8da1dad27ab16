"""Calls to the host: as under `jit`, once a member, in bodies and on the server."""

import collections
import functools
import os
import re

import apache_beam as beam
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

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


def assert_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        np.testing.assert_allclose(left, right, rtol=1e-6)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("body", BODIES, ids=lambda fn: fn.__name__)
def test_a_body_calls_once_a_member(body, runner):
    prog = mapped(body)
    expected, by_jit = count(lambda: jax.jit(prog)(W, X))
    found, seen = count(lambda: bj.run(prog, W, X, runner=runner, options=OPTIONS))
    assert_close(found, expected)
    assert seen == by_jit == ONCE


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


@pytest.mark.parametrize("prog", PLACES, ids=lambda prog: PLACES[prog][1].__name__)
def test_it_is_told_and_can_be_refused(prog):
    call, fn = PLACES[prog]
    line = line_of(fn)
    told = f"{call} calls back to the host at {re.escape(HERE)}:{line} "
    text = str(bj.explain(prog, W, X))
    assert re.search(f"code +runs from cloudpickle of {prog.__name__}: {told}", text)
    with pytest.raises(StagingError, match=f"{call} calls back to this process") as error:
        bj.run(prog, W, X, runner="local", options={"callbacks": False})
    assert str(error.value).startswith(f"{HERE}:{line} ")


def test_other_steps_are_exported():
    @program
    def prog(w, x):
        mean = bj.reduce_mean(bj.map_fn(functools.partial(does_io, w), x))
        return bj.map_fn(lambda v: jnp.sin(v - mean), x)

    code = re.findall("code .*", str(bj.explain(prog, W, X)))
    assert sum("cloudpickle" in line for line in code) == 1
    assert sum(" for cpu" in line for line in code) >= 1
    assert_close(bj.run(prog, W, X, runner="local"), jax.jit(prog)(W, X))


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


def ordered_io_on_server(x):
    step = functools.partial(_append, [])
    one = jax.experimental.io_callback(step, jax.ShapeDtypeStruct((), "float32"), 1.0, ordered=True)
    mean = bj.reduce_mean(bj.map_fn(lambda v: v * one, x))
    two = jax.experimental.io_callback(
        step, jax.ShapeDtypeStruct((), "float32"), mean[0], ordered=True
    )
    jax.debug.print("io {} {}", one, two, ordered=True)
    return mean, one, two


def _append(state, value):
    state.append(float(value))
    return np.float32(len(state))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "fn", [unused_prints, unused_results, used_late, whole], ids=lambda fn: fn.__name__
)
def test_effects_happen_once(fn, runner, capsys):
    prog = program(fn)
    expected, by_jit = count(lambda: jax.jit(prog)(X))
    lines = sorted(capsys.readouterr().out.splitlines())
    found, seen = count(lambda: bj.run(prog, X, runner=runner, options=OPTIONS))
    assert_close(found, expected)
    assert seen == by_jit
    assert sorted(capsys.readouterr().out.splitlines()) == lines
    assert len(lines) + len(seen) >= 1


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("fn", [ordered_on_server, ordered_io_on_server])
def test_ordered_effects_on_the_server(fn, runner, capsys):
    prog = program(fn)
    expected, _ = count(lambda: jax.jit(prog)(X))
    lines = capsys.readouterr().out.splitlines()
    found, _ = count(lambda: bj.run(prog, X, runner=runner, options=OPTIONS))
    assert_close(found, expected)
    assert len(lines) == (4 if fn is ordered_on_server else 1)
    assert capsys.readouterr().out.splitlines() == lines


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

    body = lambda w, v: jax.pure_callback(fails, spec(v), v, vmap_method="sequential")
    with pytest.raises(
        bj.errors.WorkerError, match=r"map_clients_0.* members 0 to 7[^$]*no such h"
    ):
        bj.run(mapped(body), W, X, runner="local", options=OPTIONS)


def test_settings_of_the_launching_thread():
    with jax.threefry_partitionable(False):
        expected = jax.jit(mapped(draws))(W, X)
        for runner in RUNNERS:
            assert_close(bj.run(mapped(draws), W, X, runner=runner), expected)
    assert not np.allclose(bj.run(mapped(draws), W, X, runner="local"), expected)


def test_inside_of_a_users_pipeline():
    SEEN.clear()
    with beam.Pipeline(runner="FnApiRunner", options=PipelineOptions([])) as pipeline:
        members = pipeline | beam.Create(list(enumerate(np.asarray(X))))
        spec_of_all = jax.ShapeDtypeStruct(X.shape, X.dtype)
        total = members | bj.transform(
            program(lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: notes(w, v), x))),
            W, spec_of_all, options=OPTIONS,
        )  # fmt: skip
        total | beam.Map(
            lambda found: np.testing.assert_allclose(
                found, np.sum(np.asarray(X) * np.asarray(W), 0)
            )
        )
    assert SEEN == ONCE
