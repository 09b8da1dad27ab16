"""The same bits with one worker and with two, threads and processes, for the programs of the suite.

Starting processes takes longer than most programs, so that many programs make one pipeline here.
"""

import functools

import jax
import numpy as np
import pytest
from programs import CASES

import beamjax as bj

pytestmark = pytest.mark.long

PROGRAMS_A_PIPELINE = 12
NAMES = [name for name, case in CASES.items() if case.eqns is not None]
GROUPS = [NAMES[i : i + PROGRAMS_A_PIPELINE] for i in range(0, len(NAMES), PROGRAMS_A_PIPELINE)]
WORKERS = {
    "one": [],
    "threads": ["--direct_running_mode=multi_threading", "--direct_num_workers=2"],
    "processes": ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
}


@functools.cache
def together(number):
    """A function of the arguments of several programs, and these arguments."""
    built = {}
    for name in GROUPS[number]:
        try:
            built[name] = CASES[name].build(bj)
        except pytest.skip.Exception:  # a library that is not installed
            continue
    functions = {name: fn for name, (fn, _) in built.items()}

    def prog(args):
        return {name: functions[name](*args[name]) for name in functions}

    return prog, {name: args for name, (_, args) in built.items()}


@functools.cache
def in_process(number):
    prog, args = together(number)
    return contents(bj.run(prog, args, runner="local", options={"shard_size": 8}))


def contents(tree):
    """Path to dtype, shape and bytes of each leaf."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        raw = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        found[jax.tree_util.keystr(path)] = str(leaf.dtype), leaf.shape, raw.tobytes()
    return found


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_workers_never_show_in_the_bits(number, workers):
    prog, args = together(number)
    flags = ["--shard_size=8", "--rounds_per_graph=8", *WORKERS[workers]]
    found = contents(bj.run(prog, args, options=flags))
    expected = in_process(number)
    assert found.keys() == expected.keys()
    assert [path for path in found if found[path] != expected[path]] == []
