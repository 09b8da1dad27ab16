"""The same bits with one worker and with two, threads and processes, for the programs of the suite.

Starting processes takes longer than most programs, so that many programs make one pipeline here.
"""

import functools

import jax
import pytest
from helpers import assert_same_bits
from programs import CASES

import beamjax as bj

pytestmark = pytest.mark.long

PROGRAMS_A_PIPELINE = 12
NAMES = [name for name, case in CASES.items() if case.eqns is not None]
PARTS = -(-len(NAMES) // PROGRAMS_A_PIPELINE)


MODES = ["in_memory", "multi_threading", "multi_processing"]


@functools.cache
def together(part):
    """A function of the arguments of several programs, these arguments, and what it gives here."""
    built = {}
    for name in NAMES[part::PARTS]:
        try:
            built[name] = CASES[name].build(bj)
        except pytest.skip.Exception:  # a library that is not installed
            continue

    def program(args):
        return {name: fn(*args[name]) for name, (fn, _) in built.items()}

    args = {name: args for name, (_, args) in built.items()}
    return program, args, bj.run(program, args, runner="local", options={"shard_size": 8})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", range(PARTS))
def test_workers_never_show_in_the_bits(part, mode):
    program, args, expected = together(part)
    assert jax.tree.leaves(expected)
    workers = 1 if mode == "in_memory" else 2
    flags = [f"--direct_running_mode={mode}", f"--direct_num_workers={workers}"]
    flags += ["--shard_size=8", "--rounds_per_graph=8"]
    assert_same_bits(bj.run(program, args, options=flags), expected)
