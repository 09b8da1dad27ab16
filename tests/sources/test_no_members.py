"""Sources without members: every kind gives what `jax.jit` gives for an array without members."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import tfrecords
from helpers import assert_same_bits
from source_files import (
    ARRAYS,
    FEATURES,
    TABLES,
    TREE,
    Members,
    open_members,
    part,
    refused,
    save,
    save_npy,
)

import beamjax as bj
from beamjax.errors import PlacementError
from beamjax.sources.derived_sources import grouped
from beamjax.sources.source_base import open_spec, spec_of

NONE = part(TREE, 0, 0)
MEMBER = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), NONE)


def tables(name):
    return lambda folder: TABLES[name].read(save(TABLES[name], folder / "x", NONE))


def arrays(name):
    return lambda folder: ARRAYS[name].read(save(ARRAYS[name], folder / "x", NONE))


def records(folder):
    tfrecords.write(path := folder / "x.tfrecord", [])
    return bj.from_tfrecord(path, FEATURES)


SOURCES = {
    "arrays": lambda folder: bj.from_arrays(NONE),
    "npy": lambda folder: bj.from_npy(save_npy(folder, NONE)),
    **{name: arrays(name) for name in ARRAYS},
    **{name: tables(name) for name in TABLES},
    "tfrecord": records,
    "members": lambda folder: bj.from_random_access(Members(NONE), member=MEMBER),
    "opened": lambda folder: bj.from_random_access(open_members, {"n": 0}, member=MEMBER),
    "taken": lambda folder: bj.take(TREE, np.zeros(0, int)),
    "sampled": lambda folder: bj.sample(TREE, 0, jax.random.key(0)),
}
"""From a folder to a source of no members of `TREE`."""


def means(rows):
    def member(row):
        return jnp.where(row["ok"], row["x"].sum(), jnp.float32(row["label"]))

    values = bj.map_fn(member, rows)
    return values, bj.reduce_sum(values), bj.reduce_mean(rows["x"])


PROGRAM = bj.program(placements={"rows": None})(means)


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_without_members_is_an_array_without_members(name, tmp_path):
    expected = jax.jit(PROGRAM)(NONE)
    source = SOURCES[name](tmp_path)
    assert len(source) == 0
    assert_same_bits(source.read(0, 0), jax.tree.leaves(NONE))
    if source.spec() is not None and name not in ("taken", "sampled"):
        assert len(open_spec(spec_of(source))) == 0
    for runner in ("local", "DirectRunner"):
        assert_same_bits(bj.run(PROGRAM, source, runner=runner), expected)
    assert "0 passes over members" in str(bj.explain(PROGRAM, source))
    with bj.session("local") as session:
        assert_same_bits(session.run(PROGRAM, source), expected)
    program = bj.program(placements={"rows": None})(lambda rows: bj.reduce_max(rows["x"]))
    refused(PlacementError, "reduce_max: found no members", bj.run, program, source)


def test_other_leaves_without_members(tmp_path):
    lengths, x = np.zeros(0, int), np.zeros((0, 2, 3), np.float32)
    keys = jax.random.split(jax.random.key(0), 3)[:0]
    np.save(tmp_path / "x.npy", x)
    padded = {"mask": np.zeros((0, 8), bool), "rows": np.zeros((0, 8, 2, 3), np.float32)}
    program = bj.program(placements={"rows": None})(lambda rows: bj.map_fn(lambda row: row, rows))
    for source, expected in [
        (bj.from_range(0), jnp.arange(0)),
        (grouped(bj.from_npy(tmp_path / "x.npy"), 4), x.reshape(0, 4, 2, 3)),
        (bj.from_arrays(keys), keys),
        (bj.from_ragged(x, lengths), padded),
        (bj.from_ragged(x, lengths, buckets=[2, 8]), padded),
    ]:
        assert_same_bits(bj.run(program, source, runner="local"), expected)


def test_types_of_members_that_are_not_there(tmp_path):
    tfrecords.write(path := tmp_path / "x.tfrecord", [])
    refused(PlacementError, r"no record in .*x\.tfrecord.*`features`", bj.from_tfrecord, path)
    refused(PlacementError, "found 0 members.*`member`", bj.from_random_access, [])
    for name, form in TABLES.items():
        path = save(form, tmp_path / name, pa.table({"x": pa.array([], pa.list_(pa.int64()))}))
        refused(PlacementError, f"/{name}: column 'x' has lists of any length", form.read, path)
        assert form.read(path, buckets=[2, 4]).leaves[1].shape == (4,)
        assert len(form.read(path, buckets=[2, 4])) == 0
        assert bj.run(PROGRAM_OF_LISTS, form.read(path, buckets=[4]), runner="local").shape == (4,)
    refused(PlacementError, "found 3 to 3, expected some from 0 to -1", bj.take, TREE["x"][:0], [3])


PROGRAM_OF_LISTS = bj.program(placements={"rows": None})(lambda rows: bj.reduce_sum(rows["x"]))
