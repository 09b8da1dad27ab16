"""How many rounds make a graph follows from what they are told to take."""

import dataclasses

import pytest
import test_driver

from beamjax.options import Options
from beamjax.pipelines import graph_sizes as module
from beamjax.pipelines.graph_sizes import graph_size
from beamjax.pipelines.graph_sizes import rounds_per_graph as chosen_rounds


@pytest.mark.parametrize(
    ("rounds_per_graph", "shared", "expected"), [(None, True, 8), (None, False, 32), (5, True, 5)]
)
def test_rounds_of_a_graph(rounds_per_graph, shared, expected, monkeypatch):
    plan = test_driver.descent()
    (loop,) = plan.steps
    options = Options(rounds_per_graph=rounds_per_graph)
    assert chosen_rounds(plan, loop, options, shared) == expected
    monkeypatch.setattr(module, "MAX_BYTES", 24 * 3)
    limited = chosen_rounds(plan, loop, options, shared)
    assert limited == (rounds_per_graph or 3)  # two server values of 12 bytes a round
    monkeypatch.setattr(module, "MAX_BYTES", 1)
    assert chosen_rounds(plan, loop, Options(), shared) == 1


def test_a_scattered_state_is_never_unrolled():
    plan = test_driver.exchange(4)
    found = graph_size(plan, plan.steps[0], Options(rounds_per_graph=4), True)
    assert (found.chosen.rounds, found.others) == (1, ())
    assert found.why == "a round scatters what the next one reads"


def long_loop(rounds=1000, copies=1):
    """A plan of a loop with as many steps in a round as are asked for."""
    plan = test_driver.descent(rounds)
    (loop,) = plan.steps
    block = dataclasses.replace(loop.block, steps=loop.block.steps * copies)
    return plan, dataclasses.replace(loop, block=block)


def test_more_steps_make_fewer_rounds():
    widths = [
        graph_size(*long_loop(copies=copies), Options(), True).chosen.rounds
        for copies in (1, 2, 4, 8, 40)
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1] == 1


def test_graphs_that_cost_nothing_have_one_round(monkeypatch):
    monkeypatch.setattr(module, "HERE", dataclasses.replace(module.HERE, pipeline=0.0))
    assert graph_size(*long_loop(), Options(), True).chosen.rounds == 1


@pytest.mark.parametrize("shared", [True, False])
def test_hardly_anything_is_gained_past_what_is_chosen(shared):
    plan, loop = long_loop()
    found = graph_size(plan, loop, Options(), shared)
    seconds = {
        n: graph_size(plan, loop, Options(rounds_per_graph=n), shared).chosen.seconds
        for n in (*range(1, 100), 1000)
    }
    assert found.chosen.seconds == seconds[found.chosen.rounds]
    assert found.chosen.seconds <= 1.02 * min(seconds.values())
    assert found.chosen.seconds < min(seconds[1], seconds[1000])
    assert [other.rounds for other in found.others] == [1, 2 * found.chosen.rounds]
    assert [other.seconds for other in found.others] == [
        seconds[1], seconds[2 * found.chosen.rounds]
    ]  # fmt: skip
    assert found.why == "more are hardly faster"


def test_bytes_keep_graphs_small(monkeypatch):
    plan, loop = long_loop()
    free = graph_size(plan, loop, Options(), True).chosen
    monkeypatch.setattr(module, "MAX_BYTES", free.nbytes // 2)
    found = graph_size(plan, loop, Options(), True)
    assert found.chosen.rounds == free.rounds // 2
    assert found.chosen.nbytes <= module.MAX_BYTES
    assert found.why == "more hold too many bytes"
