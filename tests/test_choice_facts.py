"""What `explain` tells of choices and seconds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_run import assert_close, assert_same_bits

import beamjax as bj
from beamjax.choice_facts import seconds_text
from beamjax.errors import OptionsError

N = 200
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)


@bj.program(clients=None)
def spread(x):
    y = bj.map_fn(lambda v: v @ v * v, x)
    mean = bj.reduce_mean(y)
    return bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, y))


def loop(w, x):
    return jax.lax.scan(lambda w, _: (w + spread(x), None), w, length=5)[0]


def choices(fn, *args, **kwargs):
    found = bj.explain(fn, *args, **kwargs).facts.choices
    return {fact.what: fact for fact in found}


def test_every_choice_is_told_with_its_option():
    found = choices(spread, X)
    assert {what: fact.option for what, fact in found.items()} == {
        "shards of clients": "shard_size",
        "members in map_clients_0": "member_loop",
        "members in map_clients_1": "member_loop",
        "reduction of map_clients_0": "merge_fan_out",
        "reduction of map_clients_1": "merge_fan_out",
        "results of map_clients_0": "recompute",
    }
    assert found["results of map_clients_0"].chosen == "3.1 KiB kept"
    assert all(fact.why for fact in found.values())


def test_what_options_fix_is_said_to_be_fixed():
    options = {"shard_size": 24, "member_loop": "loop", "merge_fan_out": 2, "rounds_per_graph": 3}
    found = choices(loop, np.zeros(4, np.float32), X, options=options)
    assert found["shards of clients"].chosen == "24 members"
    assert found["shards of clients"].why == "the option shard_size"
    assert found["members in map_clients_0"].why == "the option member_loop='loop'"
    assert found["reduction of map_clients_0"].chosen == "16 B a shard, merged in 2 groups"
    assert found["rounds of loop_0"].chosen == "3 a pipeline"
    assert found["rounds of loop_0"].why == "the option rounds_per_graph"


def test_rounds_depend_on_where_they_run():
    args = np.zeros(4, np.float32), X
    assert choices(loop, *args, runner="local")["rounds of loop_0"].chosen == "in this process"
    assert choices(loop, *args)["rounds of loop_0"].chosen == "5 a pipeline"

    def until(w, x):
        return jax.lax.while_loop(lambda w: jnp.sum(w) < 9, lambda w: w + spread(x) + 1, w)

    found = choices(until, *args)["rounds of loop_0"]
    assert (found.chosen, found.why) == ("1 a pipeline", "a condition decides")


KEPT = {"elementwise": 1, "nothing": 1, "everything": 0}


@pytest.mark.parametrize("recompute", KEPT)
@pytest.mark.parametrize("rounds", [False, True])
def test_what_is_kept_and_what_is_made_again(rounds, recompute):
    fn, args = (loop, (np.zeros(4, np.float32), X)) if rounds else (spread, (X,))
    options = {"recompute": recompute, "shard_size": 64}
    found = choices(fn, *args, options=options)
    assert sum(what.startswith("results of") for what in found) == KEPT[recompute]
    local = bj.run(fn, *args, runner="local", options=options)
    assert_close(local, jax.jit(fn)(*args))
    assert_same_bits(bj.run(fn, *args, options=options), local)


def test_elementwise_values_are_kept_if_nothing_is_made_again():
    @bj.program(clients=None)
    def program(x):
        y = x * 2.0 + 1.0
        total = bj.reduce_sum(y)
        return bj.reduce_sum(bj.map_fn(lambda v: v - total, y))

    for recompute, count in (("elementwise", 0), ("nothing", 1), ("everything", 0)):
        options = {"recompute": recompute}
        found = choices(program, X, options=options)
        assert sum(what.startswith("results of") for what in found) == count
        assert_close(bj.run(program, X, runner="local", options=options), jax.jit(program)(X))


@pytest.mark.parametrize("groups", [1, 2, 7])
def test_the_fan_out_does_not_change_the_answer(groups):
    expected = bj.run(spread, X, runner="local", options={"shard_size": 8})
    options = {"shard_size": 8, "merge_fan_out": groups}
    assert bj.run(spread, X, options=options).tobytes() == expected.tobytes()


def test_seconds_are_told_for_a_runner():
    found = bj.explain(loop, np.zeros(4, np.float32), X)
    here = bj.explain(loop, np.zeros(4, np.float32), X, runner="local")
    assert found.predicted_seconds > here.predicted_seconds > 0
    told = found.facts.predicted
    assert told.runner == "DirectRunner"
    assert told.local == pytest.approx(here.predicted_seconds)
    assert found.predicted_seconds == pytest.approx(
        sum(s.read + s.compute + s.merge for s in told.steps) + told.overhead
    )
    assert "all on DirectRunner" in str(found)
    assert "all on local" in str(found)
    assert "this machine" in str(found)
    assert json.loads(json.dumps(found.to_json()))["predicted"]["seconds"] == told.seconds


def test_nothing_is_told_of_unknown_numbers_of_members():
    @bj.program(clients=None)
    def total(x):
        return bj.reduce_sum(bj.map_fn(jnp.sin, x))

    found = bj.explain(total, bj.from_chunks(lambda: [X]))
    assert found.facts.placements[0].members is None
    assert found.predicted_seconds is None
    assert "nothing, as the number of members is unknown" in str(found)
    assert "the number of members is found while the program runs" in str(found)


def test_only_plans_have_seconds():
    with pytest.raises(OptionsError, match="predicted_seconds: found an explanation of stage"):
        _ = bj.explain(spread, X, stage="flat").predicted_seconds


def test_a_program_without_passes():
    @bj.program(clients=3)
    def nothing(x):
        return x + 1

    found = bj.explain(nothing, np.float32(1))
    assert found.facts.choices == ()
    assert "\n\nchoices\n  none\n" in str(found)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 us"), (3.14e-5, "31 us"), (2.5e-3, "2.5 ms"), (1.234, "1.23 s"), (240.0, "240 s")],
)
def test_seconds_in_words(seconds, text):
    assert seconds_text(seconds) == text


def test_reductions_tell_what_other_ways_take():
    @bj.program(clients=None)
    def wide(x):
        return bj.reduce_sum(bj.map_fn(jnp.sin, x))

    args = jax.ShapeDtypeStruct((10**5, 1 << 20), np.float32)
    options = {"parallelism": 16, "probe": False}
    found = choices(wide, args, options=options)
    chosen = found["reduction of map_clients_0"]
    assert chosen.chosen == "4.0 MiB a shard, merged in 8 groups"
    one, apart = chosen.others
    assert (one.what, apart.what) == ("one go", "each member by itself")
    assert chosen.seconds + 1 < one.seconds < apart.seconds
    assert chosen.nbytes == one.nbytes == 256 * (8 << 20) < apart.nbytes
    few = choices(wide, args.update(shape=(16, 1 << 20)), options=options)
    assert few["reduction of map_clients_0"].chosen == "4.0 MiB a shard, merged in one go"


def test_rounds_tell_what_other_widths_take():
    args = np.zeros(4, np.float32), X
    for options in ({}, {"rounds_per_graph": 2}):
        explanation = bj.explain(loop, *args, options=options)
        (fact,) = (c for c in explanation.to_json()["choices"] if c["what"] == "rounds of loop_0")
        assert fact["chosen"] == f"{options.get('rounds_per_graph', 5)} a pipeline"
        (slowest, *_) = fact["others"]
        assert slowest["what"] == "1 a pipeline"
        assert slowest["seconds"] > fact["seconds"] > 0
        assert slowest["nbytes"] < fact["nbytes"]
        assert f"1 a pipeline {seconds_text(slowest['seconds'])}" in str(explanation)
