"""The table of programs under `jit`, in this process and on Beam; docs/conformance.md shows it.

What a program gives is compared with the same program by `jax.vmap` and `jnp`, where it has one,
and with `jax.jit`.
"""

import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import PATH, TEXT, VERSION, cells, markdown, without_bytes
from explained import all_steps, check_explanation, facts_of
from faults import PROCESSES, THREADS
from helpers import assert_close, assert_same_bits, assert_same_types
from jax import lax
from jax.extend import core as jex
from programs import PROGRAMS, M, N, W, reference, run_everywhere, step_kinds, steps_of
from programs.bodies import FLOATS, INTEGERS, OTHERS, of_dtype
from programs.rounds import X, program

import beamjax as bj
from beamjax.numerics.reducers import REDUCERS
from beamjax.ops.combining import reduce_p
from beamjax.ops.primitives import REDUCE_PRIMITIVES, broadcast_p, map_p, size_p

OPTIONS = {"shard_size": 8}
GUARDED = {"on_error": "drop", "on_nonfinite": "drop"}
GATE = list(PROGRAMS)[::3]
"""Those that run on Beam for every change; the others do in the nightly tests."""


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name):
    jax.config.update("jax_disable_most_optimizations", True)  # Compiles in half of the time.
    case = PROGRAMS[name]
    with case.settings():
        fn, args = case.build(bj)
        close = functools.partial(assert_close, rtol=case.rtol, atol=case.atol)
        expected = jax.jit(fn)(*args)
        if not case.own:
            other, arguments = case.build(reference)
            close(expected, jax.jit(other)(*arguments))
        local = bj.run(fn, *args, runner="local", options=OPTIONS)
        assert_same_types(local, expected)
        close(local, expected)
        if name in GATE:
            assert_same_bits(bj.run(fn, *args, options=OPTIONS), local)
        if case.guarded:
            close(bj.run(fn, *args, runner="local", options={**OPTIONS, **GUARDED}), expected)
        explanation = bj.explain(fn, *args, options=OPTIONS)
        check_explanation(explanation)
        assert steps(steps_of(facts_of(explanation))) == steps(case.plan)
        if case.eqns is not None:
            check_jaxpr(fn, args, case)


@pytest.mark.table
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in GATE])
def test_a_program_on_beam(name):
    case = PROGRAMS[name]
    with case.settings():
        fn, args = case.build(bj)
        local = bj.run(fn, *args, runner="local", options=OPTIONS)
        assert_same_bits(bj.run(fn, *args, options=OPTIONS), local)


def steps(plan):
    """The steps that are the same with each version of JAX: 0.10 makes more passes of a branch."""
    kinds = plan.split(", ")
    return [kind for kind in kinds if VERSION == "0.12" or kind.startswith(("gathers", "scatters"))]


# --- jaxprs: maps of one member

OURS = {map_p, broadcast_p, size_p, reduce_p, *REDUCE_PRIMITIVES.values()}


def check_jaxpr(fn, args, case):
    """JAX checks the types of all equations, and that no tracer is left."""
    with jax.enable_checks(True), jax.checking_leaks():
        jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    counts, strays = collections.Counter(), set()
    walk(jaxpr, counts, strays)
    assert counts == case.eqns
    assert strays <= set(case.strays)


def walk(jaxpr, counts, strays):
    """Counts our equations, and collects others that touch a placed value."""
    for eqn in jaxpr.eqns:
        inner = list(jex.jaxprs_in_params(eqn.params))
        if eqn.primitive in OURS:
            counts[eqn.primitive.name] += 1
        elif inner:
            for sub in inner:
                walk(sub, counts, strays)
        elif any({N, M} & set(v.aval.shape) for v in [*eqn.invars, *eqn.outvars]):
            strays.add(eqn.primitive.name)
        if eqn.primitive is map_p:
            check_body(eqn.params["jaxpr"].jaxpr, eqn.params["n"])


def check_body(jaxpr, n):
    """Checks that a body has no axis of all members, nor constants."""
    assert not jaxpr.constvars
    for eqn in jaxpr.eqns:
        for v in [*eqn.invars, *eqn.outvars]:
            assert n not in getattr(v.aval, "shape", ())
        for sub in jex.jaxprs_in_params(eqn.params):
            check_body(sub, n)


# --- docs/conformance.md


@pytest.mark.filterwarnings("ignore")
def test_the_table_of_the_docs_is_that_of_the_plans():
    found, written = markdown(cells()), TEXT
    if f"with JAX {VERSION}." not in TEXT:  # Other versions gather other bytes.
        found, written = without_bytes(found), without_bytes(written)
    assert found == written, f"write {PATH.name}: python tests/conformance.py"


# --- other ways to run


@pytest.mark.parametrize(
    ("name", "options"),
    [("scan_with_placed_state", PROCESSES), ("switch_in_rounds", THREADS),
     ("keys_as_state", THREADS)],
)  # fmt: skip
def test_workers_do_not_change_the_bits(name, options):
    fn, args = PROGRAMS[name].build(bj)
    found = bj.run(fn, *args, options={**OPTIONS, **options})
    assert_same_bits(found, bj.run(fn, *args, runner="local", options=OPTIONS))


def test_float0_is_verified():
    fn, args = PROGRAMS["float0_inputs"].build(bj)
    assert "float0" in str(bj.verify(fn, *args, runner="local"))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_arguments():
    total = bj.program(clients=20)(lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: v * w, x)))
    expected = jax.jit(total)(2.0, X)
    for runner in ("local", "DirectRunner"):
        donating = jax.jit(total, donate_argnums=1)
        found = bj.run(donating, 2.0, X.copy(), runner=runner, options=OPTIONS)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


# --- what a plan holds


def facts(fn, *args):
    return facts_of(bj.explain(fn, *args, options=OPTIONS))


def blocks_of(name, kind):
    """The kinds of steps in each block of the one loop or branch of a program."""
    fn, args = PROGRAMS[name].build(bj)
    (step,) = [step for step in all_steps(facts(fn, *args).steps) if step.kind == kind]
    return step, [[inner.kind for inner in all_steps(block.steps)] for block in step.blocks]


def test_what_a_round_reads_from_around_the_loop_is_gathered_once():
    @program
    def fn(w, x):
        y = bj.map_fn(jnp.sin, x)
        one = lambda c, i: (c + jnp.sort(y, 0)[i] + bj.reduce_sum(bj.map_fn(jnp.cos, y)), None)
        return lax.scan(one, w, jnp.arange(4))[0]

    steps = [step.kind for step in facts(fn, W, X).steps]  # Without those in the loop.
    assert steps.count("Gather") == step_kinds(fn, W, X, **OPTIONS)["Gather"] == 1


def test_a_loop_that_nothing_reads_is_not_run():
    @program
    def fn(w, x):
        lax.scan(lambda c, _: (c + bj.reduce_sum(x), None), w, None, length=3)
        return w + bj.reduce_mean(x)

    assert "Loop" not in step_kinds(fn, W, X, **OPTIONS)


def test_a_loop_makes_one_pass_a_round_and_has_its_line():
    for name in ("scan_over_rounds", "conjugate_gradients"):
        loop, blocks = blocks_of(name, "Loop")
        assert [block.count("Map") for block in blocks] in ([1], [0, 1])
        assert name == "conjugate_gradients" or loop.rounds == 5
        assert "rounds.py:" in loop.lines[0]
        assert f"({name})" in loop.lines[0]


def test_only_the_branch_that_is_taken_is_computed():
    _, blocks = blocks_of("rounds_in_a_branch", "Branch")
    assert sorted(block.count("Loop") for block in blocks) == [0, 1]


# --- no members


def test_reductions_without_a_result():
    none = jnp.zeros((0, 3))
    for reduce in (bj.reduce_max, bj.reduce_min, bj.reduce_argmax):
        fn = bj.program(clients=0)(reduce)
        wrong = f"{reduce.__name__}: found no members in placement 'clients', expected at least one"
        for call in (jax.jit(fn), lambda x, fn=fn: bj.run(fn, x, runner="local")):
            with pytest.raises(bj.PlacementError, match=wrong):
                call(none)
    with pytest.raises(bj.PlacementError, match=r"found no members .* identity"):
        jax.jit(bj.program(clients=0)(lambda x: bj.reduce(jnp.add, x)))(none)


def test_an_empty_array_is_only_the_last_resort_for_an_open_size():
    fn = bj.program(clients=None)(lambda x, unused: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
    np.testing.assert_allclose(
        fn(jnp.ones((4, 2)), jnp.zeros((0, 3))), np.full(2, 4 * np.sin(1)), rtol=1e-6
    )


# --- types: all bodies in 64 bits, all reductions and broadcasts of each type


def widened(x):
    kinds = {"f": "float64", "i": "int64", "c": "complex128"}
    return x.astype(kinds.get(np.dtype(x.dtype).kind, x.dtype))


@pytest.mark.table
@pytest.mark.parametrize("name", "control_flow sorting transformations host".split())
def test_bodies_in_64_bits(name):
    with jax.enable_x64(True):
        prog, args = PROGRAMS[f"body_{name}"].build(bj)
        run_everywhere(prog, *jax.tree.map(widened, args), shard_size=8, beam=name == "host")


REDUCE = {op: getattr(bj, f"reduce_{op}") for op in REDUCERS}


def compiles(reduce, x):
    with contextlib.suppress(
        TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError
    ):
        jax.jit(bj.program(clients=N)(reduce)).lower(x).compile()
        return True
    return False


@pytest.mark.table
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *OTHERS])
def test_reductions_and_broadcasts(dtype):
    x = of_dtype(dtype)
    reduce = {op: fn for op, fn in REDUCE.items() if compiles(fn, x)}
    if dtype not in ("int2", "uint2", "float8_e8m0fnu", "float4_e2m1fn"):
        assert {"sum", "max", "min"} & set(reduce)
    # Of single bytes `jit` rounds each sum, or overflows before it divides; a run does not.
    single = ["mean", "sum"] if dtype.startswith("float") else ["mean"]
    exact = {op: reduce.pop(op) for op in single if op in reduce and x.dtype.itemsize == 1}

    @bj.program(clients=N)
    def prog(y, x):
        return {op: fn(x) for op, fn in reduce.items()}, bj.broadcast(y), x[:, ::-1], y

    run_everywhere(prog, x[1], x, shard_size=8)
    if dtype == "float8_e8m0fnu":  # It has no zero.
        return
    for op, fn in exact.items():
        found = bj.run(bj.program(clients=N)(fn), x, runner="local", options=OPTIONS)
        expected = getattr(np, op)(np.asarray(x).astype(np.float64), axis=0).astype(found.dtype)
        assert_close(found, jnp.asarray(expected), rtol=1e-6, atol=0)
