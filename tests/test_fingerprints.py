"""Fingerprints are the same in every process, and differ where an answer may."""

import hashlib
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.errors import SourceError
from beamjax.file_hashes import FileHashes
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


def zarr(path, x):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(path, shape=x.shape, chunks=(5, 3), dtype=x.dtype, overwrite=True)
    array[:] = x
    return bj.from_zarr(path)


def npz(path, x):
    np.savez(f"{path}.npz", x=x)
    return bj.from_npz(f"{path}.npz")


def parquet(path, x):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"x": x[:, 0]}), path)
    return bj.from_parquet(path)


def npy(path, x):
    np.save(path, x)
    return bj.from_npy(path)


def npy_series(path, x):
    for number, part in enumerate((x[:7], x[7:])):
        np.save(f"{path}-{number}", part)
    return bj.from_npy(f"{path}-*.npy")


def placed(path, x):
    folder = f"{path}-{len(list(path.parent.iterdir()))}"
    program = bj.program(clients=len(x))(lambda x: bj.map_fn(lambda v: v, x))
    return bj.run(program, x, runner="local", keep="placed", options={"results_folder": folder})


@bj.program(clients=20)
def mean_of_leaves(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.sum(jax.tree.leaves(v)[0] * w), x))


@pytest.mark.parametrize("write", [npy, npy_series, npz, parquet, zarr, placed])
def test_files_count_by_content(write, tmp_path):
    path = tmp_path / ("x.npy" if write is npy else "x")
    first = write(path, X)
    of = lambda source: prints(mean_of_leaves, W, source)[1]
    expected = of(first)
    found = {
        "written again": write(path, X),
        "elsewhere": write(tmp_path / f"other-{path.name}", X),
    }
    for name, source in found.items():
        assert of(source) == expected, name
    changed = X.copy()
    changed[3, 0] += 1
    (name,) = differences(of(write(path, changed)), expected)
    assert name.startswith("args[1]")


def test_unchanged_files_are_hashed_once(tmp_path, monkeypatch):
    path = tmp_path / "x.npy"
    np.save(path, X)
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: read.append(1) or digest(*args))
    fresh = FileHashes()
    (first,) = fresh.of([str(path)])
    assert fresh.of([str(path)]) == [first]
    assert (fresh.to_json(), len(read)) == ({}, 1)  # it may change within the same tick
    monkeypatch.setattr("beamjax.file_hashes._SETTLED", 0)
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


def test_constants_that_a_program_closes_over():
    def closing(offset):
        return bj.program(clients=20)(lambda x: bj.reduce_sum(bj.map_fn(lambda v: v + offset, x)))

    one, two, again = (prints(closing(np.full(3, i, np.float32)), X) for i in (1, 2, 1))
    assert one == again
    assert one != two
