"""The search for a faster way, with made-up times; and which programs it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.choices import Looping
from beamjax.errors import BeamjaxError
from beamjax.interpreters import planner, stage
from beamjax.interpreters.planner import Pass, Search, magnitude, obstacle, passes_of, program_text
from beamjax.options import Options, parse_options
from beamjax.planning import plan_for

LOOP = Looping("loop")
VMAP = Looping()


def a_pass(name="map_clients_0", size=32, looping=VMAP, loops=True, largest=4096, rounds=1.0):
    return Pass(name, "clients", rounds, size, looping, loops, largest, 1e-6)


class Machine:
    """Tells the seconds of a shard, and spends time on each trial."""

    def __init__(self, seconds, spent=0.0, budget=100.0):
        self.seconds = seconds
        self.spent = spent
        self.now = 0.0
        self.budget = budget
        self.asked = []

    def measure(self, size, loopings):
        self.asked.append((size, dict(loopings)))
        self.now += self.spent
        return {name: self.seconds(name, size, way) for name, way in loopings.items()}

    def left(self):
        return self.budget - self.now


def search(passes, seconds, **kwargs):
    spent, budget = kwargs.pop("spent", 0.0), kwargs.pop("budget", 100.0)
    machine = Machine(seconds, spent, budget)
    return Search(passes, machine.measure, machine.left, **kwargs).run(), machine


def test_the_faster_of_two_ways_is_chosen():
    found, _ = search([a_pass()], lambda name, n, way: n * (1e-6 if way == LOOP else 1e-5))
    assert found.loopings == {"map_clients_0": LOOP}
    assert found.gain == pytest.approx(10)


def test_large_shards_are_chosen_where_calls_are_dear():
    found, _ = search([a_pass()], lambda name, n, way: 1e-3 + 1e-6 * n)
    assert found.size == 4096


def test_small_shards_are_chosen_where_the_cache_counts():
    found, _ = search([a_pass(size=64)], lambda name, n, way: n * (1e-6 if n <= 16 else 1e-5))
    assert found.size in (8, 16)


def test_the_best_between_is_found():
    found, _ = search([a_pass()], lambda name, n, way: 1e-3 + n * 1e-6 + n**2 * 1e-8)
    assert found.size == 256  # where 1e-3 / n + n * 1e-8 is least, about 316


def test_batches_are_chosen_where_they_are_fastest():
    ways = {"vmap": 3e-6, "loop": 2e-6, "batches": 1e-6}
    found, _ = search([a_pass()], lambda name, n, way: n * ways[way.kind])
    assert found.loopings["map_clients_0"].kind == "batches"


def test_what_is_hardly_faster_is_not_chosen():
    found, _ = search([a_pass()], lambda name, n, way: n * (1e-6 if way == LOOP else 1.1e-6))
    assert (found.size, found.loopings, found.gain) == (32, {"map_clients_0": VMAP}, 1.0)


def test_shards_are_not_larger_than_allowed():
    found, machine = search([a_pass(largest=128)], lambda name, n, way: 1.0)
    assert found.size == 128
    assert max(size for size, _ in machine.asked) == 128


def test_passes_choose_their_own_ways_and_one_size():
    passes = [a_pass("a"), a_pass("b")]
    fast = {("a", "loop"), ("b", "vmap")}
    found, _ = search(
        passes, lambda name, n, way: 1e-4 + n * (1e-6 if (name, way.kind) in fast else 1e-5)
    )
    assert found.loopings == {"a": LOOP, "b": VMAP}
    assert found.size > 32


def test_passes_in_loops_count_for_more():
    passes = [a_pass("rare", loops=False), a_pass("often", loops=False, rounds=1000.0)]
    found, _ = search(passes, lambda name, n, way: n * (n if name == "rare" else 1000 / n) * 1e-6)
    assert found.size > 32


def test_what_can_not_loop_does_not():
    _, machine = search([a_pass(loops=False)], lambda name, n, way: n * 1e-6)
    assert {way for _, ways in machine.asked for way in ways.values()} == {VMAP}


def test_what_is_fixed_stays():
    found, machine = search([a_pass()], lambda name, n, way: 1.0, size=32)
    assert {size for size, _ in machine.asked} == {32} == {found.size}
    found, machine = search([a_pass(looping=LOOP)], lambda name, n, way: 1.0, fixed=True)
    assert {way for _, ways in machine.asked for way in ways.values()} == {LOOP}
    assert found.size > 32


def test_there_is_an_end_when_time_is_out():
    found, machine = search([a_pass()], lambda name, n, way: 1e-9, spent=1.0, budget=3.0)
    assert len(machine.asked) <= 3
    assert found.size == 32 or found.gain > 1


def test_long_shards_are_not_begun_without_time():
    _, machine = (
        search([a_pass()], lambda name, n, way: n / 32, budget=10.0, loops=False)
        if False
        else search([a_pass(loops=False)], lambda name, n, way: n / 32, budget=10.0)
    )
    assert max(size for size, _ in machine.asked) <= 128


def test_a_way_that_fails_is_left_out():
    def seconds(name, n, way):
        if way == LOOP:
            raise BeamjaxError("out of memory")
        return n * 1e-6

    found, _ = search([a_pass()], seconds)
    assert found.loopings == {"map_clients_0": VMAP}


def test_the_first_way_must_not_fail():
    def seconds(name, n, way):
        raise BeamjaxError("no")

    with pytest.raises(BeamjaxError, match="no"):
        search([a_pass()], seconds)


@given(
    st.dictionaries(
        st.sampled_from(["vmap", "loop", "batches"]), st.floats(1e-7, 1e-4), min_size=3
    ),
    st.floats(0, 1e-2),
    st.floats(0, 1e-6),
)
def test_nothing_slower_than_the_rule_is_chosen(ways, call, square):
    seconds = lambda name, n, way: call + n * ways[way.kind] + n**2 * square
    found, _ = search([a_pass()], seconds)
    chosen = seconds("", found.size, found.loopings["map_clients_0"]) / found.size
    assert chosen <= seconds("", 32, VMAP) / 32 * (1 + 1e-9)
    assert found.gain == 1 or found.gain >= planner.GAIN


# --- programs


def planned(fn, *args, **options):
    arguments, key, restore = stage.flatten_arguments(args)
    return plan_for(fn, arguments, key, restore, parse_options(options))


def of(body, n=100):
    @bj.program(clients=n)
    def prog(x):
        return bj.reduce_mean(bj.map_fn(body, x))

    return planned(prog, jnp.ones((n, 4)))


def text_of(found):
    return program_text(found.pieces, found.plan.sizes.values())


def why_not(found, platform="cpu"):
    return obstacle(found.plan, found.pieces, platform)


def test_most_programs_can_be_timed():
    assert why_not(of(jnp.sin)) == ""
    assert why_not(of(lambda v: jax.lax.fori_loop(0, 3, lambda _, x: x * 2, v))) == ""


def test_programs_that_can_not_be_timed():
    waits = lambda v: jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x * 2, v)
    assert "rounds depend on its data" in why_not(of(waits))
    assert "rounds depend on its data" in why_not(of(jax.jit(waits)))

    def calls(v):
        jax.debug.print("{}", v)
        return v

    assert "calls back to Python" in why_not(of(calls))
    assert "for cpu, and this machine has cuda" in why_not(of(jnp.sin), "cuda")

    @bj.program(clients=3)
    def nothing(x):
        return x + 1

    assert "no pass" in why_not(planned(nothing, jnp.ones(2)))


def test_passes_know_how_often_they_run():
    @bj.program(clients=16)
    def rounds(w, x):
        step = lambda w, _: (bj.reduce_mean(bj.map_fn(lambda v: v * w, x)), None)
        w = jax.lax.scan(step, w, None, length=7)[0]
        return bj.reduce_sum(bj.map_fn(lambda v: v - w, x))

    found = planned(rounds, jnp.float32(1), jnp.ones(16))
    passes = passes_of(found.plan, found.pieces, None)
    assert [(p.name, p.rounds) for p in passes] == [("map_clients_0", 7), ("map_clients_1", 1)]
    assert [p.size for p in passes] == [16, 16]
    assert all(p.loops and p.seconds > 0 for p in passes)


def test_what_is_tried_fits_the_memory():
    found = of(lambda v: jnp.outer(v, v), 100_000)
    (free,) = passes_of(found.plan, found.pieces, None)
    (tight,) = passes_of(found.plan, found.pieces, 1 << 20)
    assert tight.largest <= free.largest <= 4096
    assert tight.largest >= tight.size


def test_a_program_is_told_from_others_by_what_it_computes():
    texts = [text_of(of(body)) for body in (jnp.sin, jnp.cos, lambda v: jnp.sin(v))]
    assert texts[0] != texts[1]
    assert texts[0] == texts[2]
    assert "0x" not in str(text_of(of(jax.nn.relu)))


def test_the_number_of_members_counts_by_its_magnitude():
    same = [text_of(of(jnp.sin, n)) for n in (1000, 1001)]
    assert same[0] == same[1]
    assert magnitude(1000) == magnitude(1001) != magnitude(2000)
    assert magnitude(None) == 0


def test_blocks_of_loops_and_branches_count_too():
    def text(scale):
        @bj.program(clients=16)
        def prog(p, x):
            taken = lambda x: bj.reduce_sum(bj.map_fn(lambda v: v * scale, x))
            return jax.lax.cond(p, taken, lambda x: bj.reduce_max(x), x)

        return text_of(planned(prog, np.bool_(True), jnp.ones(16)))

    assert text(2.0) != text(3.0)
    assert text(2.0) == text(2.0)


def test_options_have_no_part_in_the_text():
    assert Options().planning != Options(probe=True).planning
