"""The plan in this process: members in any company, types, and a mesh of the caller."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits
from jax import lax
from programs import run_everywhere

import beamjax as bj
from beamjax import execution
from beamjax.jobs.job import JobRun
from beamjax.options import parse_options
from beamjax.runtime.shard_executor import LoadedPass


def program(n, fn):
    return bj.program(clients=n)(fn)


def run(fn, *args, size=8, **options):
    return bj.run(fn, *args, runner="local", options={"shard_size": size, **options})


def test_members_are_the_same_in_any_company():
    x = jax.random.normal(jax.random.key(0), (30, 5, 3))
    body = lambda v: jax.grad(lambda w: jnp.sum(jnp.tanh(v @ w) ** 2))(v[0])
    prog = program(30, lambda x: bj.map_fn(body, x))
    others = x.at[:20].set(jnp.nan)
    assert_same_bits(run(prog, x)[20:], run(prog, others)[20:])
    first = program(17, lambda x: bj.map_fn(body, x))
    assert_same_bits(run(prog, x)[:17], run(first, x[:17]))


# --- types


@pytest.mark.versions
def test_64_bit_numbers():
    with jax.enable_x64(True):
        x, ids = jnp.asarray(np.random.default_rng(0).normal(size=(11, 3))), jnp.arange(11)
        assert (x.dtype, ids.dtype) == ("float64", "int64")

        @bj.program(clients=11)
        def prog(w, x, ids):
            keys = jax.random.split(jax.random.key(0), 11)
            body = lambda v, i, k: v * w + i.astype(v.dtype) + jax.random.normal(k)
            y = bj.map_fn(body, (x, ids, keys))
            big = bj.map_fn(lambda i: i + 2**40, ids)
            return (
                bj.reduce_mean(y), bj.reduce_sum(big), y[2], jnp.sum(ids.astype("float32"), 0),
                y.at[:, 1].add(1.0), jnp.take_along_axis(y, (ids % 3)[:, None], 1),
                jnp.arange(11) + ids, jax.ops.segment_sum(y, ids % 3, 4), y.T @ y,
                lax.reduce_sum(ids.astype("int32"), (0,)), jnp.cumsum(y, 0),
                lax.dynamic_slice(y, (0, 1), (11, 2)),
            )  # fmt: skip

        run_everywhere(prog, jnp.ones(3), x, ids, rtol=1e-12, atol=1e-12, beam=False, shard_size=8)


def test_one_program_at_both_widths():
    prog = program(9, lambda x: (bj.reduce_sum(x), bj.reduce_mean(x), bj.map_fn(jnp.sin, x)))
    x = np.arange(9.0)
    assert {y.dtype.name for y in run(prog, x)} == {"float32"}
    with jax.enable_x64(True):
        assert {y.dtype.name for y in run(prog, x)} == {"float64"}
    assert {y.dtype.name for y in run(prog, x)} == {"float32"}


def test_python_scalars_as_arguments():
    prog = program(9, lambda rate, x: (bj.map_fn(lambda v: v * rate, x), rate * 2, rate + x[0]))
    for x in (np.arange(9.0, dtype="float32"), jnp.arange(9, dtype="bfloat16")):
        run_everywhere(prog, 0.5, x, beam=False, shard_size=8)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_at_home_does_not_matter(kind):
    types = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((2,), ("clients",), axis_types=types, devices=jax.devices()[:2])
    prog = program(
        16, lambda w, x: (bj.reduce_mean(bj.map_fn(lambda v: v * w, x)), x * 2, bj.broadcast(w) + x)
    )
    x, w = jnp.arange(16.0 * 3).reshape(16, 3), jnp.ones(3)
    want = jax.jit(prog)(w, x)
    with jax.set_mesh(mesh):
        again = program(16, prog.__wrapped__)
        assert_close(run(again, w, x), want)


# --- what a call goes through


def test_a_warm_call_enters_few_functions_in_few_files():
    prog = program(3, lambda x: (bj.reduce_sum(x), bj.reduce_mean(x)))
    x, root, entered = np.arange(3, dtype=np.float32), os.path.dirname(bj.__file__), set()

    def call():  # as `bj.run`, but without a thread
        call = execution.prepare(prog, (x,), "local", parse_options(None))
        return execution.finish(call, JobRun(call))

    def profile(frame, event, _):
        code = frame.f_code
        named = not code.co_name.startswith("<")  # comprehensions differ between versions of Python
        if event == "call" and named and code.co_filename.startswith(root):
            entered.add((code.co_filename, code.co_qualname))

    for _ in range(3):
        expected = call()
    sys.setprofile(profile)
    try:
        found = call()
    finally:
        sys.setprofile(None)
    assert_same_bits(found, expected)
    files = {file for file, _ in entered}
    assert 90 < len(entered) <= 124, len(entered)
    assert 20 < len(files) <= 28, len(files)


def test_calls_at_the_same_time_share_what_is_loaded(monkeypatch):
    loaded = []
    load = LoadedPass.__init__
    monkeypatch.setattr(
        LoadedPass, "__init__", lambda self, *args: loaded.append(1) or load(self, *args)
    )
    prog = program(20, lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: jnp.tanh(v * w), x)))
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    weights = [np.float32(w) for w in range(8)]
    expected = [run(prog, w, x) for w in weights]
    assert loaded == [1]
    with ThreadPoolExecutor(4) as threads:
        for got, want in zip(
            threads.map(lambda w: run(prog, w, x), weights), expected, strict=True
        ):
            assert_same_bits(got, want)
    assert loaded == [1]
