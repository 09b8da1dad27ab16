"""Probes: what is timed, on which made-up members, and the search for a faster way."""

import itertools
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import planned
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import BeamjaxError
from beamjax.interpreters.lowering.lower import lower_passes
from beamjax.interpreters.tuning import probe
from beamjax.interpreters.tuning import search as planner
from beamjax.interpreters.tuning.probe import (
    ProbeError,
    random_array,
    run_with_limit,
    shard_seconds,
)
from beamjax.interpreters.tuning.search import Search, SearchedPass, passes_of, program_text
from beamjax.options import parse_options
from beamjax.options.choices import Vectorization
from beamjax.plan.steps import ValueType

# --- the search, with made-up times

LOOP, VMAP = Vectorization("loop"), Vectorization()


def a_pass(name="map_clients_0", size=32, vectorization=VMAP, loops=True, largest=4096, rounds=1.0):
    return SearchedPass(name, "clients", rounds, size, vectorization, loops, largest, 1e-6)


class Machine:
    """Gives the seconds of a shard, and spends time on each trial."""

    def __init__(self, seconds, spent, budget):
        self.seconds, self.spent, self.budget = seconds, spent, budget
        self.asked = []

    def measure(self, size, vectorizations):
        self.asked.append((size, dict(vectorizations)))
        return {name: self.seconds(name, size, way) for name, way in vectorizations.items()}

    def left(self):
        return self.budget - self.spent * len(self.asked)


def search(passes, seconds, spent=0.0, budget=100.0, **kwargs):
    machine = Machine(seconds, spent, budget)
    return Search(passes, machine.measure, machine.left, **kwargs).run(), machine


def found_for(seconds, **changes):
    found, _ = search([a_pass(**changes)], lambda name, n, way: seconds(n, way))
    return found


def test_the_faster_loop_is_chosen():
    found = found_for(lambda n, way: n * (1e-6 if way == LOOP else 1e-5))
    assert found.vectorizations == {"map_clients_0": LOOP}
    assert found.speedup == pytest.approx(10)
    ways = {"vmap": 3e-6, "loop": 2e-6, "batches": 1e-6}
    found = found_for(lambda n, way: n * ways[way.kind])
    assert found.vectorizations["map_clients_0"] == Vectorization("batches", 8)


def test_the_fastest_size_is_chosen():
    assert found_for(lambda n, way: 1e-3 + 1e-6 * n).size == 4096
    assert found_for(lambda n, way: 1.0, largest=128).size == 128
    assert found_for(lambda n, way: n * (1e-6 if n <= 16 else 1e-5), size=64).size in (8, 16)
    # 1e-3 / n + n * 1e-8 is least at about 316.
    assert found_for(lambda n, way: 1e-3 + n * 1e-6 + n**2 * 1e-8).size == 256


def test_what_is_hardly_faster_is_not_chosen():
    for slower, chosen in ((1.1, VMAP), (planner.MIN_SPEEDUP + 0.01, LOOP)):
        found = found_for(lambda n, way, s=slower: n * 1e-6 * (1 if way == LOOP else s))
        assert found.vectorizations["map_clients_0"] == chosen
        assert found.speedup == pytest.approx(slower if chosen == LOOP else 1.0)


def test_passes_choose_their_own_loops_and_one_size():
    fast = {("a", "loop"), ("b", "vmap")}
    seconds = lambda name, n, way: 1e-4 + n * (1e-6 if (name, way.kind) in fast else 1e-5)
    found, _ = search([a_pass("a"), a_pass("b")], seconds)
    assert found.vectorizations == {"a": LOOP, "b": VMAP}
    assert found.size > 32
    # Those in loops count for more.
    passes = [a_pass("rare", loops=False), a_pass("often", loops=False, rounds=1000.0)]
    found, _ = search(passes, lambda name, n, way: n * (n if name == "rare" else 1000 / n) * 1e-6)
    assert found.size > 32


def test_what_is_fixed_stays():
    constant = lambda name, n, way: 1.0
    ways_of = lambda machine: {way for _, ways in machine.asked for way in ways.values()}
    _, machine = search([a_pass(loops=False)], lambda name, n, way: n * 1e-6)
    assert ways_of(machine) == {VMAP}
    found, machine = search([a_pass()], constant, size=32)
    assert {size for size, _ in machine.asked} == {32} == {found.size}
    found, machine = search([a_pass(vectorization=LOOP)], constant, fixed=True)
    assert ways_of(machine) == {LOOP}
    assert found.size > 32


def test_the_search_ends_in_time():
    found, machine = search([a_pass()], lambda name, n, way: 1e-9, spent=1.0, budget=3.0)
    assert len(machine.asked) <= 3
    assert found.size == 32 or found.speedup > 1


class Compiling(Machine):
    """Compiles for a second in each trial, and runs a shard three times."""

    def left(self):
        return self.budget - sum(1 + 3 * self.seconds("", size, VMAP) for size, _ in self.asked)


def test_a_trial_begins_if_there_is_a_fifth_more_time_than_it_takes():
    first, larger = 1 + 3 * 1, 1 + 3 * 4  # The seconds of trials of 32 and of 128 members.
    for times, tried in ((1.19, False), (1.21, True)):
        machine = Compiling(lambda name, n, way: n / 32, 0.0, first + times * larger)
        Search([a_pass(loops=False)], machine.measure, machine.left).run()
        assert (128 in [size for size, _ in machine.asked]) == tried, times


def test_sizes_are_tried_in_steps_of_four_and_then_of_two():
    for seconds, asked in (
        (lambda name, n, way: 1.0, [64, 256, 1024, 4096, 2048]),
        (lambda name, n, way: n**2 * 1e-6, [64, 256, 16, 32, 8]),
    ):
        _, machine = search([a_pass(loops=False, size=64)], seconds)
        assert [size for size, _ in machine.asked] == asked


def test_only_the_first_way_must_not_fail():
    def seconds(name, n, way):
        if way != VMAP:
            raise BeamjaxError("out of memory")
        return n * 1e-6

    found, _ = search([a_pass()], seconds)
    assert found.vectorizations == {"map_clients_0": VMAP}
    with pytest.raises(BeamjaxError, match="out of memory"):
        search([a_pass(vectorization=LOOP)], seconds)


@given(
    st.fixed_dictionaries({way: st.floats(1e-7, 1e-4) for way in ("vmap", "loop", "batches")}),
    st.floats(0, 1e-2),
    st.floats(0, 1e-6),
)
def test_nothing_slower_than_the_rule_is_chosen(ways, call, square):
    seconds = lambda n, way: call + n * ways[way.kind] + n**2 * square
    found = found_for(seconds)
    chosen = seconds(found.size, found.vectorizations["map_clients_0"]) / found.size
    assert chosen <= seconds(32, VMAP) / 32 * (1 + 1e-9)
    assert found.speedup == 1 or found.speedup >= planner.MIN_SPEEDUP


# --- programs


def mean_of(body, n=100):
    prog = bj.program(clients=n)(lambda x: bj.reduce_mean(bj.map_fn(body, x)))
    return planned(prog, jnp.ones((n, 4)))


def test_passes_are_chosen_for_by_their_rounds_and_memory():
    @bj.program(clients=16)
    def rounds(w, x):
        step = lambda w, _: (bj.reduce_mean(bj.map_fn(lambda v: v * w, x)), None)
        w = jax.lax.scan(step, w, None, length=7)[0]
        return bj.reduce_sum(bj.map_fn(lambda v: v - w, x))

    found = planned(rounds, jnp.float32(1), jnp.ones(16))
    passes = passes_of(found.plan, found.stages, None, {})
    assert [(p.name, p.rounds) for p in passes] == [("map_clients_0", 7), ("map_clients_1", 1)]
    assert [p.size for p in passes] == [16, 16]
    assert all(p.loops and p.seconds > 0 for p in passes)
    large = mean_of(lambda v: jnp.outer(v, v), 100_000)
    (free,), (tight,) = (passes_of(large.plan, large.stages, m, {}) for m in (None, 1 << 20))
    assert tight.size <= tight.largest <= free.largest <= 4096


def test_a_program_is_known_by_what_it_computes():
    def text_of(found):
        return program_text(found.stages, found.plan.sizes.values())

    def branch(scale):
        @bj.program(clients=16)
        def prog(p, x):
            taken = lambda x: bj.reduce_sum(bj.map_fn(lambda v: v * scale, x))
            return jax.lax.cond(p, taken, lambda x: bj.reduce_max(x), x)

        return text_of(planned(prog, np.bool_(True), jnp.ones(16)))

    sine, cosine, same = (text_of(mean_of(f)) for f in (jnp.sin, jnp.cos, lambda v: jnp.sin(v)))
    assert sine == same == text_of(mean_of(jnp.sin, 101))
    assert sine != cosine
    assert "0x" not in str(text_of(mean_of(jax.nn.relu)))
    assert branch(2.0) == branch(2.0) != branch(3.0)
    assert planner.magnitude(1000) == planner.magnitude(1001) != planner.magnitude(2000)


# --- the clock


def passes(fn, *args, **options):
    found, parsed = planned(fn, *args, **options), parse_options(options)
    return lower_passes(found.placed, found.stages, "clients", parsed, 16, {}), parsed


@bj.program(clients=40)
def mean(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ w), x))


def test_the_best_run_after_the_first_counts(monkeypatch):
    plan, options = passes(mean, jnp.ones((3, 2)), jnp.ones((40, 3)))
    (step,) = plan.steps
    assert step.name == "map_clients_0"
    for limit, runs, best in (
        (60, [5, 3, 1, 4, 0.5], (1, 4)),  # No more than four of long ones,
        (24, [5] * 4, (5, 2)),  # and only those that surely end in time.
        (23, [5] * 4, (5, 1)),
        (60, [2**-6] * 8, (2**-6, 7)),  # A tenth of a second of short ones,
        (60, [2**-10] * 40, (2**-10, 30)),  # but no more than 30.
    ):
        ends = list(itertools.accumulate(runs, initial=9.0))  # The first run compiles.
        clock = iter([0.0, *(time for pair in itertools.pairwise(ends) for time in pair)])
        fake = types.SimpleNamespace(perf_counter=clock.__next__)
        monkeypatch.setattr(probe, "time", fake)
        found = shard_seconds(plan, step, options, limit)
        assert (found, len(runs) - len(list(clock)) // 2) == best, (limit, runs)


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "fast"}, {"on_nonfinite": "drop"}, {"member_loop": "loop"}],
    ids=str,
)
def test_passes_of_all_kinds_are_timed(options):
    @bj.program(clients=40)
    def two(w, x, i):
        y = bj.map_fn(lambda v, j: v @ w + j, (x, i))
        scale = bj.reduce_max(y)
        total = bj.reduce(lambda a, b: a + b, bj.map_fn(lambda v: v * scale, y))
        return total, bj.reduce_mean(y), y

    plan, parsed = passes(two, jnp.ones(3), jnp.ones((40, 3)), jnp.arange(40.0), **options)
    for step in plan.steps:
        assert 0 < shard_seconds(plan, step, parsed, 60.0) < 60


def test_a_body_that_fails_on_made_up_members(monkeypatch):
    plan, options = passes(mean, jnp.ones((3, 2)), jnp.ones((40, 3)), on_nonfinite="raise")
    nan = lambda rng, value, leading: np.full((*leading, *value.shape), np.nan, value.dtype)
    monkeypatch.setattr(probe, "random_array", nan)
    with pytest.raises(ProbeError, match="a body fails on made-up members"):
        shard_seconds(plan, plan.steps[0], options, 60.0)


def test_what_hangs_is_left_behind():
    assert run_with_limit(lambda: 2.5, 10.0) == 2.5
    over = threading.Event()
    start = time.monotonic()
    with pytest.raises(ProbeError, match=r"takes longer than 0\.1 s"):
        run_with_limit(lambda: over.wait(30) and 1.0, 0.1)
    assert time.monotonic() - start < 10
    over.set()


def test_made_up_values_have_their_types_and_vary():
    names = """bool int8 int32 uint8 uint32 int2 int4 uint4 float16 float32 float64 bfloat16
    float8_e4m3fn complex64"""
    faults = []
    for name in names.split():
        found = random_array(np.random.default_rng(0), ValueType((5, 3), name), (8,))
        varied = len(np.unique(found.astype(np.complex64))) > 1
        if (found.shape, found.dtype.name, varied) != ((8, 5, 3), name, True):
            faults.append((name, found.shape, found.dtype, varied))
    assert faults == []
    keys = random_array(np.random.default_rng(0), ValueType((2,), "uint32", "fry"), (100,))
    assert keys.max() > 2**31
