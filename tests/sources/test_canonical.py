"""64-bit values of sources and of arrays while JAX computes with 32 bits."""

import warnings

import jax
import numpy as np
import pyarrow as pa
import pytest
import tfrecords
from pyarrow import parquet

import beamjax as bj
from beamjax.sources.canonical import may_wrap
from beamjax.sources.source_base import open_spec, spec_of
from beamjax.sources.streams.spool import spilled

N = 40
KEY = 5 + 2**33
ROW = 29
"""Of the key that does not fit: past the first shard, row group and file."""
OPTIONS = {"shard_size": 8}


def keys(dtype="int64"):
    found = (np.arange(N) % 3).astype(dtype)
    found[ROW] = KEY
    return found


@bj.program(placements={"rows": None})
def counts(k):
    return bj.reduce_by_key(bj.map_fn(lambda k: k * 0 + 1, k), k % 8, 8)


@bj.program(placements={"rows": None})
def totals(data):
    return bj.reduce_sum(bj.map_fn(lambda row: row["k"], data))


@bj.program(placements={"rows": None})
def masked(data):
    return bj.reduce_sum(bj.map_fn(lambda row: row["k"].sum(where=row["mask"]), data))


@bj.program(placements={"rows": None})
def needs_number(k):
    """Needs the number of the members before it reads them."""
    return bj.reduce_sum(bj.map_fn(lambda k: k + jax.numpy.ones(len(range(1)), k.dtype), k)), sum(
        1 for _ in range(k.shape[0])
    )


@bj.program(placements={"rows": None})
def by_key(k):
    """The keys are not known before the members are read."""
    return bj.reduce_by_key(bj.map_fn(lambda k: k * 0 + 1, k), k)


class Rows(bj.StreamSource):
    """A stream of a user, whose module workers in this process have."""

    leaves = (bj.from_arrays(np.zeros(1, np.int64)).leaves[0],)
    treedef = jax.tree.structure(0)

    def chunks(self, piece):
        yield [keys()[:20]]
        yield [keys()[20:]]


def sources(folder):
    """Programs, sources with a key that does not fit, and what the error names."""
    k = keys()
    paths = {name: str(folder / name) for name in ("k.npy", "k.npz", "k.parquet", "k.arrow")}
    np.save(paths["k.npy"], k)
    np.savez(paths["k.npz"], k=k)
    np.save(folder / "big.npy", k.astype(">i8"))
    np.save(folder / "u.npy", keys("uint64"))
    np.save(folder / "wide.npy", np.stack([k % 3, k], axis=1))
    for i, part in enumerate(np.split(k, [20])):
        np.save(folder / f"part-{i}.npy", part)
    table = pa.table({"k": k})
    parquet.write_table(table, paths["k.parquet"], row_group_size=16)
    with pa.ipc.new_file(paths["k.arrow"], table.schema) as file:
        file.write_table(table, max_chunksize=16)
    lists = pa.table({"k": pa.array([[int(v)] * (1 + i % 2) for i, v in enumerate(k)])})
    parquet.write_table(lists, folder / "lists.parquet", row_group_size=16)
    npy = bj.from_npy(paths["k.npy"])
    yield counts, npy, f"{paths['k.npy']}, row {ROW}"
    yield totals, bj.from_npz(paths["k.npz"]), f"{paths['k.npz']}, array 'k', row {ROW}"
    yield counts, bj.from_npy(folder / "big.npy"), f"big.npy, row {ROW}"
    yield counts, bj.from_npy(folder / "u.npy"), f"u.npy, row {ROW}"
    wide = bj.program(placements={"rows": None})(lambda x: bj.reduce_sum(x))
    yield wide, bj.from_npy(folder / "wide.npy"), f"wide.npy, row {ROW}, at [1] of it"
    yield counts, bj.from_npy(str(folder / "part-*.npy")), f"part-1.npy, row {ROW - 20}"
    for source, kind in (
        (bj.from_parquet(paths["k.parquet"]), "row group"),
        (bj.from_arrow(paths["k.arrow"]), "record batch"),
    ):
        at = f"column 'k', {kind} 1, row {ROW - 16} of it (row {ROW} of the file)"
        yield totals, source, at
    padded = bj.from_parquet(folder / "lists.parquet", buckets=[2])
    yield masked, padded, f"column 'k', row group 1, row {ROW - 16} of it"
    yield counts, bj.from_random_access(k), f"from_random_access, member {ROW}"
    yield counts, bj.from_chunks(lambda: iter(np.split(k, [20]))), f"row {ROW}"
    chunks = np.split(np.load(folder / "wide.npy"), [20])
    yield wide, bj.from_chunks(lambda: iter(chunks)), f"row {ROW}, at [1] of it"
    yield counts, Rows(), f"row {ROW}"
    yield counts, bj.take(npy, np.arange(ROW - 2, ROW + 2)), f"{paths['k.npy']}, row {ROW}"
    ragged = bj.from_ragged(bj.from_npz(paths["k.npz"]), np.full(N // 4, 4))
    yield masked, ragged, f"{paths['k.npz']}, array 'k', row {ROW}"
    yield needs_number, Rows(), f"row {ROW}"
    yield by_key, npy, f"{paths['k.npy']}, row {ROW}"
    yield by_key, bj.from_arrays(k).spill(folder / "spilled"), f"row {ROW}"
    record = [tfrecords.example({"k": v}) for v in k]
    tfrecords.write(folder / "k.tfrecord", record)
    types = {"k": jax.ShapeDtypeStruct((), np.int64)}
    yield totals, bj.from_tfrecord(folder / "k.tfrecord", types), f"k.tfrecord, record {ROW}"
    try:
        import zarr
    except ImportError:
        return
    zarr.create_array(folder / "k.zarr", data=k, chunks=(16,))
    yield counts, bj.from_zarr(folder / "k.zarr"), f"k.zarr, row {ROW}"


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_integers_of_sources_that_would_wrap_are_refused(runner, tmp_path):
    wrong = []
    for program, source, where in sources(tmp_path):
        try:
            found = bj.run(program, source, runner=runner, options=OPTIONS)
        except bj.BeamjaxError as error:
            parts = where, str(KEY), "jax_enable_x64"
            missing = [part for part in parts if part not in str(error)]
        else:
            missing = found
        if len(missing):
            wrong.append((repr(source), where, missing))
    assert not wrong


def test_integers_that_fit_and_64_bits_are_read_as_they_are(tmp_path):
    ends = np.array([-(2**31), 2**31 - 1, 0, 7])
    np.save(tmp_path / "ends.npy", ends)
    np.save(tmp_path / "k.npy", keys())
    maximum = bj.program(placements={"rows": None})(lambda k: (bj.reduce_min(k), bj.reduce_max(k)))
    found = bj.run(maximum, bj.from_npy(tmp_path / "ends.npy"), runner="local")
    assert [int(x) for x in found] == [-(2**31), 2**31 - 1]
    with jax.enable_x64(True):
        for runner in ("local", "DirectRunner"):
            low, high = bj.run(maximum, bj.from_npy(tmp_path / "k.npy"), runner=runner)
            assert (int(low), int(high), high.dtype) == (0, KEY, np.int64)


def test_a_member_that_does_not_fit_is_dropped_like_one_that_cannot_be_read(tmp_path):
    np.save(tmp_path / "k.npy", keys())
    job = bj.launch(
        counts, bj.from_npy(tmp_path / "k.npy"), runner="local",
        options={**OPTIONS, "on_error": "drop"},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert job.result().sum() == N - 1
    ((placement, member),) = [(x.placement, x.member) for x in job.dropped]
    assert (placement, member) == ("rows", ROW)


# --- one warning a call


def warned(program, *args, **kwargs):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = bj.run(program, *args, **kwargs)
    texts = [str(w.message) for w in found if "jax_enable_x64" in str(w.message)]
    assert all(w.filename == __file__ for w in found if "jax_enable_x64" in str(w.message))
    return result, texts


@bj.program(placements={"rows": None})
def sums(x, y):
    return bj.reduce_sum(x), bj.reduce_sum(y)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_what_is_in_memory_wraps_as_under_jit_with_a_warning(runner):
    k, seconds = keys(), 1.7e9 + np.arange(N)
    for args in [
        (k, seconds),
        (bj.from_arrays(k), bj.from_arrays(seconds)),
        (bj.take(k, np.arange(N)), bj.take(seconds, np.arange(N))),
    ]:
        found, texts = warned(sums, *args, runner=runner)
        expected = jax.jit(sums)(k, seconds)
        assert [int(x) for x in found] == [int(x) for x in expected]
        (text,) = texts
        assert f"1 of {N} int64 values wrap as int32" in text
        changed = np.count_nonzero(seconds.astype("f4") != seconds)
        assert f"{changed} of {N} float64 values are whole numbers that change" in text


def test_what_was_in_memory_wraps_in_the_files_of_a_run(tmp_path):
    source = bj.take(bj.from_arrays(keys()), np.arange(N))
    for each in source, bj.from_ragged(source, np.ones(N, int)):
        again = open_spec(spec_of(spilled(each, str(tmp_path))))
        assert may_wrap(again, again.leaves.index(each.leaves[-1]))
        assert not may_wrap(bj.take(bj.from_arrays(keys()).spill(tmp_path), np.arange(N)), 0)


def test_floats_of_sources_are_rounded_with_a_warning(tmp_path):
    seconds = 1.7e9 + np.arange(N)
    np.savez(tmp_path / "t.npz", x=np.stack([seconds] * 3, axis=1), y=np.ones(N, np.float32))
    source = bj.from_npz(tmp_path / "t.npz")
    both = bj.program(placements={"rows": None})(lambda d: (bj.reduce_sum(d["x"]), d["y"][0]))
    _, texts = warned(both, source, runner="local")
    (text,) = texts
    assert f"d['x']: {3 * N} float64 values" in text
    assert "t.npz" in text
    assert "['y']" not in text
    with jax.enable_x64(True):
        assert warned(both, source, runner="local")[1] == []


@pytest.mark.parametrize("value", [np.ones(N), np.arange(N), np.full(N, np.nan), 1e30 * np.ones(N),
                                   np.full(N, 2**24), np.full(N, -(2**31))])  # fmt: skip
def test_what_keeps_its_value_is_no_warning(value):
    assert warned(sums, value, value + 0.1, runner="local")[1] == []
