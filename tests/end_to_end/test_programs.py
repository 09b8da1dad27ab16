"""Programs of users and trainers: what `jit` gives, the same bits on Beam, and what it costs."""

import jax
import jax.lax as lax
import jax.numpy as jnp
import pytest
from explained import check_explanation
from helpers import assert_close, assert_same_bits, assert_same_types
from programs import step_kinds
from trainers import TRAINERS
from user_programs import GUARDED, PROGRAMS, W, X, program

import beamjax as bj
from beamjax.diagnostics.fact_types import walk_facts

OPTIONS = {"shard_size": 8}
THREADS = {"direct_running_mode": "multi_threading", "direct_num_workers": 2}
PROCESSES = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}


@pytest.mark.versions
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_what_jit_gives_and_only_what_mixes_members_is_gathered(name):
    jax.config.update("jax_disable_most_optimizations", True)  # Compiles in half of the time.
    case = PROGRAMS[name]
    expected = jax.jit(case.fn)(*case.args)
    local = bj.run(case.fn, *case.args, runner="local", options=OPTIONS)
    assert_same_types(local, expected)
    assert_close(local, expected, rtol=2e-4, atol=2e-5)
    assert_same_bits(bj.run(case.fn, *case.args, options=OPTIONS), local)
    if case.guarded:
        guarded = bj.run(case.fn, *case.args, runner="local", options={**OPTIONS, **GUARDED})
        assert_close(guarded, expected, rtol=2e-4, atol=2e-5)
    check_explanation(bj.explain(case.fn, *case.args, options=OPTIONS))
    kinds = step_kinds(case.fn, *case.args, **OPTIONS)
    assert (kinds["Gather"], kinds["Scatter"]) == (case.gathers, case.scatters)


def test_float0_is_verified():
    case = PROGRAMS["float0_inputs"]
    assert "float0" in str(bj.verify(case.fn, *case.args, runner="local"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scan_with_placed_state", PROCESSES),
        ("scan_with_placed_state", THREADS),
        ("switch_in_rounds", THREADS),
        ("keys_as_state", THREADS),
    ],
)
def test_workers_do_not_change_the_bits(name, options):
    case = PROGRAMS[name]
    found = bj.run(case.fn, *case.args, options={**OPTIONS, **options})
    assert_same_bits(found, bj.run(case.fn, *case.args, runner="local", options=OPTIONS))


# --- what a plan holds


def facts_of(fn, *args):
    return bj.explain(fn, *args, options=OPTIONS).facts


def kinds_in(block):
    return [step.kind for step in walk_facts(block.steps)]


def test_what_a_round_reads_from_around_the_loop_is_gathered_once():
    @program
    def fn(w, x):
        y = bj.map_fn(jnp.sin, x)
        one = lambda c, i: (c + jnp.sort(y, 0)[i] + bj.reduce_sum(bj.map_fn(jnp.cos, y)), None)
        return lax.scan(one, w, jnp.arange(4))[0]

    steps = [step.kind for step in facts_of(fn, W, X).steps]  # Without those in the loop.
    assert steps.count("Gather") == step_kinds(fn, W, X, **OPTIONS)["Gather"] == 1


def test_a_loop_that_nothing_reads_is_not_run():
    @program
    def fn(w, x):
        lax.scan(lambda c, _: (c + bj.reduce_sum(x), None), w, None, length=3)
        return w + bj.reduce_mean(x)

    assert "Loop" not in step_kinds(fn, W, X, **OPTIONS)


def test_a_loop_makes_one_pass_a_round_and_has_its_line():
    steps = facts_of(PROGRAMS["scan_over_rounds"].fn, W, X).steps
    (loop,) = [step for step in steps if step.kind == "Loop"]
    assert loop.rounds == 5
    (block,) = loop.blocks
    assert kinds_in(block).count("Map") == 1
    assert "user_programs.py:" in loop.lines[0]
    assert "(scan_over_rounds)" in loop.lines[0]


def test_only_the_branch_that_is_taken_is_computed():
    @program
    def fn(w, x, flag):
        bad = lambda: bj.reduce_sum(bj.map_fn(lambda v: v[0] + w.sum(), x))
        return lax.cond(flag, bad, lambda: w.sum())

    (branch,) = [step for step in facts_of(fn, W, X, True).steps if step.kind == "Branch"]
    assert sorted(kinds_in(block).count("Map") for block in branch.blocks) == [0, 1]


def test_the_products_of_a_solver_are_one_pass_a_round():
    case = PROGRAMS["conjugate_gradients"]
    (loop,) = [step for step in facts_of(case.fn, *case.args).steps if step.kind == "Loop"]
    assert [kind for block in loop.blocks for kind in kinds_in(block)].count("Map") == 1


def test_what_a_body_computes_of_few_numbers_stays_in_it():
    @program
    def fn(w, x):
        return bj.reduce_sum(bj.map_fn(lambda v: v * jnp.outer(w, w).sum(), x))

    assert step_kinds(fn, W, X, **OPTIONS) == {"Map": 1}


# --- trainers


@pytest.fixture
def promotion():
    """That of JAX as it comes; optimizers rely on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


ON_BEAM = ("diloco", "modules_with_generators", "partitioned")
BEAM = [
    pytest.param(name, "DirectRunner", marks=() if name in ON_BEAM else pytest.mark.long)
    for name in TRAINERS
]


@pytest.mark.parametrize(("name", "runner"), [*((name, "local") for name in TRAINERS), *BEAM])
def test_rounds_of_trainers(name, runner, promotion):
    """With other types of the state than before, a round would be staged anew each time."""
    step, state, batches = TRAINERS[name].build()
    compiled = jax.jit(step, donate_argnums=0)
    mine = state
    for batch in batches:
        types = jax.eval_shape(lambda tree: tree, state)
        found = bj.run(step, mine, *batch, runner=runner, options=OPTIONS)
        expected = compiled(jax.tree.map(jnp.copy, state), *batch)
        assert_same_types(found, expected)
        assert_close(found, expected, rtol=1e-4, atol=2e-6)
        assert jax.eval_shape(lambda tree: tree, expected[0]) == types
        mine, state = found[0], expected[0]
    kinds = step_kinds(step, state, *batches[0], **OPTIONS)
    assert [kinds[kind] for kind in ("Gather", "Scatter", "Map")] == [0, 0, TRAINERS[name].passes]
