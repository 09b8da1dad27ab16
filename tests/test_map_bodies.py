"""Bodies over a shard: all members at once, or, where they are large, one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import CASES
from test_run import assert_close, assert_same_bits

import beamjax as bj
from beamjax import planning
from beamjax.interpreters import map_bodies, sizing
from beamjax.interpreters.stage import flatten_arguments
from beamjax.options import parse_options

N = 20
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 5)).astype(np.float32)


@pytest.fixture
def large(monkeypatch):
    """All members are large; gives the passes whose members go one after the other."""
    found = []
    original = map_bodies.one_by_one

    def watched(program, piece, *rest, **batch):
        found.append(piece)
        return original(program, piece, *rest, **batch)

    monkeypatch.setattr(sizing, "LARGE_MEMBER_BYTES", 0)
    monkeypatch.setattr("beamjax.interpreters.lower.one_by_one", watched)
    return found


@pytest.mark.table
@pytest.mark.parametrize("name", CASES)
def test_programs_give_what_jit_gives(name, large):
    fn, args = CASES[name].build(bj)
    assert_close(bj.run(fn, *args, runner="local"), jax.jit(fn)(*args))


def everything(options):
    @bj.program(clients=N)
    def program(w, x):
        y = bj.map_fn(lambda v: {"a": jnp.tanh(v * w), "b": jnp.argmax(v)}, x)
        a = y["a"]
        return (
            y,
            bj.reduce_sum(a),
            bj.reduce_max(a),
            bj.reduce_min(y["b"]),
            bj.reduce_prod(a[:, 0]),
            bj.reduce_any(a > 1),
            bj.reduce_all(a > -2),
            bj.reduce_mean(y["b"]),
        )

    return program, {"shard_size": 8, **options}


@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "drop"}])
def test_all_kinds_of_results(options, large):
    x = X.copy()
    if options:
        x[7] = np.nan
    program, options = everything(options)
    w = np.linspace(1, 2, 5, dtype=np.float32)
    found = bj.run(program, w, x, runner="local", options=options)
    assert large
    assert_same_bits(bj.run(program, w, x, options=options), found)
    kept = np.arange(N) != 7 if options.get("on_nonfinite") else np.full(N, True)
    with jax.numpy_rank_promotion("allow"):
        a = np.tanh(x * w)
    np.testing.assert_allclose(found[1], a[kept].sum(axis=0, dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(found[2], a[kept].max(axis=0), rtol=1e-6)
    assert np.isnan(found[0]["a"][~kept]).all()


def test_small_members_go_together(monkeypatch):
    def refuse(*args):
        raise AssertionError("small members, one after the other")

    monkeypatch.setattr("beamjax.interpreters.lower.one_by_one", refuse)
    program, options = everything({})
    bj.run(program, np.ones(5, np.float32), X, runner="local", options=options)


def test_wide_members_take_the_memory_of_one(large):
    """Of what XLA needs besides arguments and results, in the body of a pass."""

    @bj.program(clients=64)
    def wide(w, x):
        return bj.reduce_sum(bj.map_fn(lambda v: jnp.sin(w) * v, x))

    w, x = np.ones(1 << 16, np.float32), np.ones(64, np.float32)
    arguments, _, restore = flatten_arguments((w, x))

    def temporary():
        plan = planning.make_plan(wide, arguments, restore, parse_options({"shard_size": 64})).plan
        (step,) = plan.steps
        exported = jax.export.deserialize(bytearray(plan.bodies[step.body].artefacts["cpu"]))
        compiled = jax.jit(exported.call).lower(*exported.in_avals).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary() < 4 * w.nbytes
