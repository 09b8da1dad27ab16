"""Results by keys that nobody knows beforehand: as a dict of lists would give them."""

import gc
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import pytest
from helpers import assert_same_bits

import beamjax as bj
from beamjax.errors import (
    ArrayFormatError,
    OptionsError,
    SourceError,
    StagingError,
    StructureError,
)
from beamjax.shuffle import by_key, sorted_blocks
from beamjax.sources.tables.keyed_table import MANIFEST

N = 500
RNG = np.random.default_rng(11)
KEYS = (RNG.integers(-15, 15, N) * 1000).astype(np.int32)
SHARDS = {"shard_size": 64}
VALUES = {
    "float32": RNG.normal(size=(N, 3)).astype(np.float32),
    "bfloat16": RNG.normal(size=N).astype(ml_dtypes.bfloat16),
    "int32": RNG.integers(-3, 3, (N, 2)).astype(np.int32),
    "uint8": RNG.integers(0, 4, N).astype(np.uint8),
    "bool": RNG.integers(0, 2, N).astype(bool),
    "complex64": (RNG.normal(size=N) + 1j * RNG.normal(size=N)).astype(np.complex64),
}
OPS = ["sum", "mean", "max", "min", "prod", "any", "all"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Many parts and blocks for few members."""
    monkeypatch.setattr(sorted_blocks, "PART_BYTES", 1500)
    monkeypatch.setattr(sorted_blocks, "BLOCK_BYTES", 1000)


def near(name, found, expected):
    """Whether values, dtypes and shapes are those of `reduce_by_key` with a number of keys."""
    tolerance = 0.02 if name == "bfloat16" else 1e-5
    wide = [np.asarray(x, np.complex128) for x in (found, expected)]
    same = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return same and np.allclose(*wide, tolerance, tolerance, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
def test_ops_and_dtypes(op):
    values = dict(VALUES)
    if op in ("max", "min"):
        del values["complex64"]  # complex numbers are not ordered
    names, dense = np.unique(KEYS, return_inverse=True)

    @bj.program(clients=N)
    def program(x, keys):
        return bj.reduce_by_key(x, keys, op=op)

    @bj.program(clients=N)
    def known(x, keys):
        return bj.reduce_by_key(x, keys, len(names), op=op)

    arrays = jax.tree.map(jnp.asarray, values)
    expected = jax.jit(known)(arrays, dense.astype(np.int32))
    table = bj.run(program, values, KEYS, runner="local", options=SHARDS)
    assert isinstance(table, bj.KeyedTable)
    in_process = jax.jit(program)(arrays, KEYS).reduced()
    assert table.keys.dtype == np.int32
    faults = []
    for how, found in (("run", table.arrays()), ("jit", in_process)):
        np.testing.assert_array_equal(found["key"], names)
        for name, want in expected.items():
            if not near(name, found["value"][name], want):
                faults.append((how, name, found["value"][name], want))
    assert faults == []


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_sums_and_means_are_rounded_once(dtype):
    """Of numbers that cancel out: in the dtype of the members, ones would be lost."""
    one = np.array(1 + (1j if dtype == "complex64" else 0)).astype(dtype)
    x, keys = one * np.float32([1e10, 1, -1e10, 3]), np.int32([7, 7, 7, 9])
    for op, wanted in (("sum", [1, 3]), ("mean", [np.float32(1 / 3), 3])):
        fn = bj.program(clients=4)(lambda x, k, op=op: bj.reduce_by_key(x, k, op=op))
        found = bj.run(fn, x, keys, runner="local").arrays()["value"]
        assert_same_bits(found, one * np.float32(wanted))


def test_more_keys_than_their_dtype_can_count():
    x, keys = np.float32([1, 2, 3, 4]), np.int8([1, 127, 1, -1])
    fn = bj.program(clients=4)(lambda x, k: bj.reduce_by_key(x, k, 300))
    expected = np.bincount([1, 127, 1], [1, 2, 3], minlength=300)
    np.testing.assert_array_equal(bj.run(fn, x, keys, runner="local"), expected)


@bj.program(clients=N)
def program(w, x, keys):
    y = bj.map_fn(lambda v: {"score": v @ w, "count": jnp.int32(1)}, x)
    return {"by": bj.reduce_by_key(y, keys), "total": bj.reduce_sum(y["score"])}


W = np.array([1.0, -1.0, 0.5], np.float32)
ARGS = W, VALUES["float32"], KEYS
WORKERS = {"direct_running_mode": "multi_threading", "direct_num_workers": 2}


@pytest.mark.parametrize(
    "how",
    [{"runner": "local"}, {"options": WORKERS}],
    ids=["local", "threads"],
)
def test_a_tree_on_any_runner(how, tmp_path):
    options = {**how.get("options", {}), **SHARDS, "results_folder": str(tmp_path / "r")}
    found = bj.run(program, *ARGS, keep="placed", **{**how, "options": options})
    table = found["by"]
    local = bj.run(program, *ARGS, runner="local", options=SHARDS)
    assert_same_bits(table.arrays(), local["by"].arrays())
    assert isinstance(found["total"], jax.Array)
    counts = dict(zip(*np.unique(KEYS, return_counts=True), strict=True))
    assert dict(zip(table.keys.tolist(), table.values["count"].tolist(), strict=True)) == counts
    assert os.listdir(tmp_path / "r") == ["keyed-by"]
    again = bj.open_keyed(table.folder)
    np.testing.assert_array_equal(again.keys, table.keys)
    assert again.treedef == table.treedef

    @bj.program(keys=None)
    def biggest(rows):
        return bj.reduce_argmax(rows["value"]["count"]), bj.reduce_sum(rows["value"]["score"])

    place, total = bj.run(biggest, table, runner="local")
    assert place == np.argmax(table.values["count"])
    np.testing.assert_allclose(total, (VALUES["float32"] @ W).sum(), rtol=1e-4)
    table.remove()
    assert not list((tmp_path / "r").iterdir())


def test_files_go_with_the_handle(tmp_path):
    options = {"work_folder": str(tmp_path)}
    table = bj.run(program, *ARGS, runner="local", options=options)["by"]
    assert Path(table.folder).is_relative_to(tmp_path)
    assert len(table) == len(np.unique(KEYS))
    del table
    gc.collect()
    assert not list(tmp_path.iterdir())
    descriptors = psutil.Process().num_fds()
    bj.run(program, *ARGS, runner="local", options=options)["by"].arrays()
    gc.collect()
    assert psutil.Process().num_fds() == descriptors, "maps of removed files hold their disk space"


@pytest.mark.versions
def test_verify_a_job_and_a_transform(tmp_path):
    report = bj.verify(program, *ARGS)
    assert report.ok
    assert "result['by']['value']['score']" in str(report)
    folder = tmp_path / "j"
    table = bj.launch(program, *ARGS, options={"job_folder": str(folder)}).result()["by"]
    found = bj.open_job(folder).result()["by"]
    assert found.folder == table.folder
    np.testing.assert_array_equal(found.keys, table.keys)
    with pytest.raises(StagingError, match=r"result\['by'\].*CombinePerKey"):
        bj.transform(program, *ARGS)


def test_bad_input(tmp_path):
    with pytest.raises(OptionsError, match="does not know the dropped members"):
        bj.run(program, *ARGS, options={"on_error": "drop"})
    with pytest.raises(StructureError, match="found num_keys 0"):
        bj.run(bj.program(clients=N)(lambda k: bj.reduce_by_key(k, k, 0)), KEYS)
    several = jax.vmap(program, in_axes=(0, None, None))
    with pytest.raises(StructureError, match=r"result\['by'\]: found members with keys along"):
        bj.run(several, np.stack([W, W]), *ARGS[1:], runner="local")
    with pytest.raises(SourceError, match=r"keys\.json: cannot read"):
        bj.open_keyed(tmp_path)
    for text in ("", "[]", "{}", '{"version": 2, "leaves": [], "parts": [], "tree": null}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(ArrayFormatError, match="found no list"):
            bj.open_keyed(tmp_path)


@pytest.mark.parametrize(
    "use",
    [
        lambda k: k + 1, lambda k: 1 / k, lambda k: -k, lambda k: k > 0, lambda k: k[0], len, list,
        jnp.sqrt, lambda k: jnp.add(1, k), np.asarray, bool,
    ],
)  # fmt: skip
def test_a_program_that_computes_with_rows_by_key(use):
    """The message names the ways out."""
    computes = bj.program(clients=N)(lambda x, keys: use(bj.reduce_by_key(x, keys)))
    for call in (
        lambda: bj.run(computes, VALUES["uint8"], KEYS, runner="local"),
        lambda: jax.jit(computes)(VALUES["uint8"], KEYS),
    ):
        with pytest.raises(
            StructureError, match=r"found .* of its result without num_keys.*Give num_keys"
        ):
            call()


def test_the_hash_spreads_neighbours():
    parts = by_key.hashed(np.arange(100_000)) % np.uint64(64)
    counts = np.bincount(parts.astype(np.int64), minlength=64)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 110  # 63 degrees of freedom
    same = {int(by_key.hashed(np.array([7], d))[0]) for d in (np.int8, np.int64, np.uint16)}
    assert len(same) == 1
