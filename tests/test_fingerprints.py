"""Fingerprints are the same in every process, and differ where an answer may."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.fingerprints import differences, input_fingerprints, plan_fingerprint
from beamjax.interpreters.stage import flatten_arguments
from beamjax.options import Options
from beamjax.planning import bind_inputs, make_plan

X = np.arange(60, dtype=np.float32).reshape(20, 3)

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import beamjax as bj

@bj.program(placements={"clients": 20})
def one_round(w, x):
    jax.debug.print("{}", w[0])
    return w - bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ w) * v * FACTOR, x))

def rounds(w, x):
    return jax.lax.fori_loop(0, 3, lambda _, w: one_round(w, x), w)
"""


def prints(fn, *args, **options):
    arguments, _, restore = flatten_arguments(args)
    parsed = Options(**options)
    plan = make_plan(fn, arguments, restore, parsed).plan
    return plan_fingerprint(plan, parsed), input_fingerprints(bind_inputs(plan, arguments))


def in_a_process(folder, text, seed):
    path = folder / f"program_{seed}.py"
    code = f"""
import json, sys
sys.path[:0] = [{str(folder)!r}, {os.path.dirname(__file__)!r}]
import numpy as np
from test_fingerprints import X, prints
from program_{seed} import rounds
print(json.dumps(prints(rounds, np.ones(3, "float32"), X)))
"""
    path.write_text(text)
    env = os.environ | {"PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True).stdout)


def test_the_same_in_every_process_and_on_other_lines(tmp_path):
    text = PROGRAM.replace("FACTOR", "2")
    found = in_a_process(tmp_path, text, 1)
    assert in_a_process(tmp_path, "# a comment\n" * 9 + text, 2) == found
    plan, inputs = in_a_process(tmp_path, PROGRAM.replace("FACTOR", "3"), 3)
    assert differences(plan, found[0]) == ["what its steps compute"]
    assert inputs == found[1]


@bj.program(clients=20)
def mean(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: v @ w, x))


W = jnp.ones(3)


@pytest.mark.parametrize(
    ("fn", "options", "expected"),
    [
        (mean, {}, []),
        (mean, {"rounds_per_graph": 3, "work_folder": "/x", "checkpoint_every": 2}, []),
        (mean, {"reduction": "fast"}, ["the option reduction (exact there, fast now)"]),
        (
            bj.program(clients=20)(lambda w, x: bj.reduce_mean(bj.map_fn(lambda v: v @ w + 1, x))),
            {},
            ["what its steps compute"],
        ),
        (
            bj.program(clients=20)(lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: v @ w, x))),
            {},
            ["its steps", "what its steps compute"],
        ),
    ],
)
def test_what_a_plan_depends_on(fn, options, expected):
    found, _ = prints(fn, W, X, **options)
    assert differences(found, prints(mean, W, X)[0]) == expected


def test_shard_sizes_are_told():
    found, expected = (prints(mean, W, X, shard_size=size)[0] for size in (8, 16))
    assert "the shard size of 'clients' (16 there, 8 now)" in differences(found, expected)


def test_inputs_by_content(tmp_path):
    _, expected = prints(mean, W, X)
    assert prints(mean, np.ones(3, np.float32), bj.from_arrays(X.copy()))[1] == expected
    assert differences(prints(mean, W, X + 1)[1], expected) == ["args[1]"]
    assert differences(prints(mean, W, bj.from_arrays(X + 1))[1], expected) == ["args[1]"]
    assert differences(prints(mean, W + 1, X)[1], expected) == ["args[0]"]
    keys = [jax.random.split(jax.random.key(seed), 20) for seed in (0, 1)]
    drawn = bj.program(clients=20)(
        lambda key: bj.reduce_sum(bj.map_fn(lambda k: jax.random.normal(k), key))
    )
    assert prints(drawn, keys[0])[1] == prints(drawn, bj.from_arrays(keys[0]))[1]
    assert prints(drawn, keys[0])[1] != prints(drawn, keys[1])[1]


def test_big_and_empty_arrays(monkeypatch):
    _, expected = prints(mean, W, X)
    monkeypatch.setattr("beamjax.fingerprints._SCANNED", 16)
    assert prints(mean, W, np.asfortranarray(X))[1] == expected
    assert prints(mean, W, X.astype(">f4").astype("f4"))[1] == expected


def test_files_by_path_size_and_time(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, X)
    _, expected = prints(mean, W, bj.from_npy(path))
    assert prints(mean, W, bj.from_npy(path))[1] == expected
    os.utime(path, ns=(1, 1))
    assert differences(prints(mean, W, bj.from_npy(path))[1], expected) == ["args[1]"]


def test_constants_that_a_program_closes_over():
    def closing(offset):
        return bj.program(clients=20)(lambda x: bj.reduce_sum(bj.map_fn(lambda v: v + offset, x)))

    one, two, again = (prints(closing(np.full(3, i, np.float32)), X) for i in (1, 2, 1))
    assert one == again
    assert one != two
