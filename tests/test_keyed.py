"""Results by keys that nobody knows beforehand: as a dict of lists would give them."""

import gc
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import beamjax as bj
from beamjax import table_parts
from beamjax.errors import (
    ArrayFormatError,
    OptionsError,
    SourceError,
    StagingError,
    StructureError,
)
from beamjax.sources.keyed_table import MANIFEST

N = 500
RNG = np.random.default_rng(11)
KEYS = (RNG.integers(-15, 15, N) * 1000).astype(np.int32)
RUNNERS = {
    "local": {"runner": "local"},
    "one": {},
    "processes": {"options": {"direct_running_mode": "multi_processing", "direct_num_workers": 2}},
}
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
    monkeypatch.setattr(table_parts, "PART_BYTES", 1500)
    monkeypatch.setattr(table_parts, "BLOCK_BYTES", 1000)


def known(op, value):
    """By `reduce_by_key` with a number of keys, under jit."""
    names, dense = np.unique(KEYS, return_inverse=True)

    @bj.program(clients=N)
    def program(x, keys):
        return bj.reduce_by_key(x, keys, len(names), op=op)

    return names, jax.jit(program)(jnp.asarray(value), dense.astype(np.int32))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", VALUES)
def test_ops_and_dtypes(op, dtype):
    if dtype == "complex64" and op in ("max", "min"):
        pytest.skip("complex numbers are not ordered")
    value = VALUES[dtype]

    @bj.program(clients=N)
    def program(x, keys):
        return bj.reduce_by_key(x, keys, op=op)

    names, expected = known(op, value)
    table = bj.run(program, value, KEYS, runner="local", options={"shard_size": 64})
    assert isinstance(table, bj.KeyedTable)
    found = table.arrays()
    np.testing.assert_array_equal(found["key"], names)
    assert found["key"].dtype == np.int32
    assert found["value"].dtype == expected.dtype
    assert found["value"].shape == expected.shape
    tolerance = 0.02 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(
        np.asarray(found["value"], np.complex128),
        np.asarray(expected, np.complex128),
        rtol=tolerance,
        atol=tolerance,
    )
    in_process = jax.jit(program)(jnp.asarray(value), KEYS).reduced()
    assert found["value"].dtype == in_process["value"].dtype
    np.testing.assert_allclose(
        np.asarray(in_process["value"], np.complex128),
        np.asarray(found["value"], np.complex128),
        rtol=tolerance,
        atol=tolerance,
    )


@bj.program(clients=N)
def program(w, x, keys):
    y = bj.map_fn(lambda v: {"score": v @ w, "count": jnp.int32(1)}, x)
    return {"by": bj.reduce_by_key(y, keys), "total": bj.reduce_sum(y["score"])}


W = np.array([1.0, -1.0, 0.5], np.float32)


@pytest.mark.parametrize("how", RUNNERS)
def test_a_tree_on_any_runner(how, tmp_path):
    options = {"shard_size": 64, "results_folder": str(tmp_path / "r")}
    how = dict(RUNNERS[how])
    how["options"] = {**how.get("options", {}), **options}
    found = bj.run(program, W, VALUES["float32"], KEYS, keep="placed", **how)
    table = found["by"]
    local = bj.run(program, W, VALUES["float32"], KEYS, runner="local", options={"shard_size": 64})
    for left, right in zip(
        jax.tree.leaves(table.arrays()), jax.tree.leaves(local["by"].arrays()), strict=True
    ):
        assert left.tobytes() == right.tobytes()
    assert isinstance(found["total"], jax.Array)
    counts = dict(zip(*np.unique(KEYS, return_counts=True), strict=True))
    assert dict(zip(table.keys.tolist(), table.values["count"].tolist(), strict=True)) == counts
    assert os.listdir(tmp_path / "r") == ["keyed-by"]
    again = bj.open_keyed(table.folder)
    np.testing.assert_array_equal(again.keys, table.keys)
    assert again.treedef == table.treedef
    table.remove()
    assert not list((tmp_path / "r").iterdir())


def test_the_rows_are_members_of_another_program():
    table = bj.run(program, W, VALUES["float32"], KEYS)["by"]

    @bj.program(keys=None)
    def biggest(rows):
        return bj.reduce_argmax(rows["value"]["count"]), bj.reduce_sum(rows["value"]["score"])

    _, total = bj.run(biggest, table)
    np.testing.assert_allclose(total, (VALUES["float32"] @ W).sum(), rtol=1e-4)


def test_files_go_with_the_handle(tmp_path):
    table = bj.run(
        program, W, VALUES["float32"], KEYS, runner="local", options={"work_folder": str(tmp_path)}
    )["by"]
    assert Path(table.folder).is_relative_to(tmp_path)
    assert len(table) == len(np.unique(KEYS))
    del table
    gc.collect()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_verify_a_job_and_a_transform(tmp_path):
    report = bj.verify(program, W, VALUES["float32"], KEYS)
    assert report.ok
    assert "result['by']['value']['score']" in str(report)
    folder = tmp_path / "j"
    job = bj.launch(program, W, VALUES["float32"], KEYS, options={"job_folder": str(folder)})
    table = job.result()["by"]
    found = bj.open_job(folder).result()["by"]
    assert found.folder == table.folder
    np.testing.assert_array_equal(found.keys, table.keys)
    with pytest.raises(StagingError, match=r"result\['by'\].*CombinePerKey"):
        bj.transform(program, W, VALUES["float32"], KEYS)


def test_bad_input(tmp_path):
    with pytest.raises(OptionsError, match="does not know who was dropped"):
        bj.run(program, W, VALUES["float32"], KEYS, options={"on_error": "drop"})
    with pytest.raises(StructureError, match="found num_keys 0"):
        bj.run(bj.program(clients=N)(lambda k: bj.reduce_by_key(k, k, 0)), KEYS)
    several = jax.vmap(program, in_axes=(0, None, None))
    with pytest.raises(StructureError, match=r"result\['by'\]: found members with keys along"):
        bj.run(several, np.stack([W, W]), VALUES["float32"], KEYS, runner="local")
    with pytest.raises(SourceError, match=r"keys\.json: cannot read"):
        bj.open_keyed(tmp_path)
    for text in ("", "[]", "{}", '{"version": 1, "leaves": [], "parts": [], "tree": null}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(ArrayFormatError, match="found no list"):
            bj.open_keyed(tmp_path)
