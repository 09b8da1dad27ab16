"""Fingerprints are the same in every process, and differ where an answer may."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from source_files import ARRAYS, TABLES, save, save_npy

import beamjax as bj
from beamjax.errors import SourceError
from beamjax.execution import bind_inputs
from beamjax.interpreters.planning import make_plan
from beamjax.interpreters.staging.arguments import flatten_call
from beamjax.options import Options
from beamjax.runtime.fingerprints import differences, input_fingerprints, plan_fingerprint
from beamjax.sources.arrays.data_files import FileHashes

N = 20
X = np.arange(60, dtype=np.float32).reshape(N, 3)
W = jnp.ones(3)


def prints(fn, *args, **options):
    """The fingerprints of a plan and of its inputs."""
    call, parsed = flatten_call(fn, args), Options(**options)
    plan = make_plan(call, parsed).plan
    return plan_fingerprint(plan, parsed), input_fingerprints(bind_inputs(plan, call))


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
IN_A_PROCESS = """
import json, sys
sys.path[:0] = sys.argv[1:]
import numpy as np
from test_fingerprints import X, prints
import first, second, third
w = np.ones(3, "float32")
print(json.dumps([prints(module.rounds, w, X) for module in (first, second, third)]))
"""


def test_the_same_in_every_process_and_on_other_lines(tmp_path):
    text = PROGRAM.replace("FACTOR", "2")
    (tmp_path / "first.py").write_text(text)
    (tmp_path / "second.py").write_text("# a comment\n" * 9 + text)
    (tmp_path / "third.py").write_text(PROGRAM.replace("FACTOR", "3"))
    found = []
    for seed in (1, 2):
        folders = [tmp_path, *Path(__file__).parents[:2]]  # Of this module and of its helpers.
        command = [sys.executable, "-c", IN_A_PROCESS, *map(str, folders)]
        env = os.environ | {"PYTHONHASHSEED": str(seed)}
        done = subprocess.run(command, env=env, check=True, capture_output=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]
    first, second, third = found[0]
    assert first == second
    assert differences(third[0], first[0]) == ["what its steps compute"]
    assert third[1] == first[1]


def test_what_no_step_reads_does_not_count():
    prog = bj.program(clients=N)(lambda unread, x: bj.reduce_sum(x))
    found, same, other = (prints(prog, w, x)[1] for w, x in ((W, X), (2 * W, X), (W, X + 1)))
    assert found == same != other


@bj.program(clients=N)
def mean(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: v @ w, x))


@bj.program(clients=N)
def mean_and_one(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: v @ w + 1, x))


@bj.program(clients=N)
def total(w, x):
    return bj.reduce_sum(bj.map_fn(lambda v: v @ w, x))


def test_what_a_plan_depends_on():
    small, _ = prints(mean, W, X, shard_size=8)
    for fn, options, expected in (
        (mean, {}, []),
        (mean, {"work_folder": "/x", "checkpoint_every": 2}, []),
        (mean, {"reduction": "fast"}, ["the option reduction (exact there, fast now)"]),
        (mean, {"shard_size": 16}, ["the shard size of 'clients' (8 there, 16 now)"]),
        (mean_and_one, {}, ["what its steps compute"]),
        (total, {}, ["its steps", "what its steps compute"]),
    ):
        found, _ = prints(fn, W, X, **{"shard_size": 8} | options)
        words = differences(found, small)
        assert words == expected or ("shard_size" in options and expected[0] in words)


def test_inputs_by_content(monkeypatch):
    _, expected = prints(mean, W, X)
    of = lambda w, x: differences(prints(mean, w, x)[1], expected)
    assert of(np.ones(3, np.float32), bj.from_arrays(X.copy())) == []
    assert of(W, X + 1) == of(W, bj.from_arrays(X + 1)) == ["input 1"]
    assert of(W + 1, X) == ["input 0"]
    monkeypatch.setattr("beamjax.runtime.fingerprints._BLOCK_BYTES", 8)  # less than a row
    assert of(W, np.asfortranarray(X)) == of(W, X.astype(">f4").astype("f4")) == []
    for place in np.ndindex(X.shape):
        other = X.copy()
        other[place] += 1
        assert of(W, other) == ["input 1"], place
    drawn = bj.program(clients=N)(lambda key: bj.reduce_sum(bj.map_fn(jax.random.normal, key)))
    keys = [jax.random.split(jax.random.key(seed), N) for seed in (0, 1)]
    assert prints(drawn, keys[0])[1] == prints(drawn, bj.from_arrays(keys[0]))[1]
    assert prints(drawn, keys[0])[1] != prints(drawn, keys[1])[1]


def test_constants_that_a_program_closes_over():
    def closing(offset):
        return bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(lambda v: v + offset, x)))

    one, two, again = (prints(closing(np.full(3, i, np.float32)), X) for i in (1, 2, 1))
    assert one == again
    assert one != two


# --- files


def placed(folder, tree):
    copy = bj.program(clients=N)(lambda tree: bj.map_fn(lambda v: v, tree))
    options = {"results_folder": str(folder / str(len(list(folder.iterdir()))))}
    return bj.run(copy, tree, runner="local", keep="placed", options=options)


FILES = {
    "npy": lambda folder, tree: bj.from_npy(save_npy(folder, tree)),
    "npy series": lambda folder, tree: bj.from_npy(save_npy(folder, tree, (0, 7, N))),
    **{
        name: lambda folder, tree, form=form: form.read(save(form, folder / "x", tree))
        for name, form in (ARRAYS | TABLES).items()
    },
    "placed": placed,
}
"""Files with a tree of arrays in a folder, as an input."""


@bj.program(clients=N)
def mean_of_leaves(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.sum(jax.tree.leaves(v)[0] * w), x))


@pytest.mark.parametrize("name", FILES)
def test_files_count_by_content(name, tmp_path):
    def of(folder, x):
        (tmp_path / folder).mkdir(exist_ok=True)
        return prints(mean_of_leaves, W, FILES[name](tmp_path / folder, {"x": x}))[1]

    expected = of("a", X)
    assert of("a", X) == of("b", X) == expected
    changed = X.copy()
    changed[3, 0] += 1
    (where,) = differences(of("a", changed), expected)
    assert where == "input 1"


def test_unchanged_files_are_hashed_once(tmp_path, monkeypatch):
    path = tmp_path / "x.npy"
    np.save(path, X)
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: read.append(1) or digest(*args))
    fresh = FileHashes()
    (first,) = fresh.of([str(path)])
    assert fresh.of([str(path)]) == [first]
    assert (fresh.to_json(), len(read)) == ({}, 1)  # It may change within the same tick.
    monkeypatch.setattr("beamjax.sources.arrays.data_files.SETTLED_NS", 0)
    settled = FileHashes()
    assert settled.of([str(path)]) == [first]
    again = FileHashes(json.loads(json.dumps(settled.to_json())))
    assert again.of([str(path)]) == [first]
    assert len(read) == 2
    os.utime(path, ns=(1, 1))
    assert again.of([str(path)]) == [first]
    assert FileHashes({str(path): ["damaged", 3]}).of([str(path)]) == [first]
    assert len(read) == 4
    with pytest.raises(SourceError, match="missing: is not there"):
        again.of([str(tmp_path / "missing")])
