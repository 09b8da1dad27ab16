"""Data that is damaged, gone or of another shape: what a run says, and who is dropped.

`test_bad_tables` and the tests of each source have more of what is refused before a run.
"""

import builtins
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import tfrecords

import beamjax as bj
from beamjax.errors import BeamjaxError, PlacementError, SourceError, StructureError, WorkerError
from beamjax.sources import block_source

N = 24
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
Y = np.arange(N, dtype=np.int32)
FEATURES = {"x": jax.ShapeDtypeStruct((3,), "float32"), "y": jax.ShapeDtypeStruct((), "int32")}
DROP = {"on_error": "drop", "drop_limit": 0.9}


def table(n):
    lists = pa.FixedSizeListArray.from_arrays(pa.array(X[:n].reshape(-1)), 3)
    return pa.table({"x": lists, "y": pa.array(Y[:n])})


def examples(n):
    return [tfrecords.example({"x": X[i], "y": Y[i]}) for i in range(n)]


def write_parquet(path, n):
    pa.parquet.write_table(table(n), path, row_group_size=5)


def write_arrow(path, n):
    pa.feather.write_feather(table(n), path, compression="uncompressed", chunksize=5)


def write_npy(path, n):
    with open(path, "wb") as file:
        np.save(file, X[:n])


def write_npz(path, n):
    with open(path, "wb") as file:
        np.savez(file, x=X[:n], y=Y[:n])


def write_zarr(path, n):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(path, mode="w")
    group.create_array("x", data=X[:n], chunks=(5, 3))
    group.create_array("y", data=Y[:n], chunks=(5,))


def write_tfrecord(path, n):
    tfrecords.write(path, examples(n))


def write_array_record(path, n):
    write_records(path, examples(n))


def write_records(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(path, "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


FORMATS = {
    "parquet": (write_parquet, bj.from_parquet),
    "arrow": (write_arrow, bj.from_arrow),
    "npy": (write_npy, bj.from_npy),
    "npz": (write_npz, bj.from_npz),
    "zarr": (write_zarr, bj.from_zarr),
    "tfrecord": (write_tfrecord, lambda path: bj.from_tfrecord(path, FEATURES)),
    "array_record": (write_array_record, lambda path: bj.from_array_record(path, FEATURES)),
}


@bj.program(placements={"rows": None})
def spread(rows):
    """Two passes."""
    y = bj.map_fn(jnp.sum, rows["x"] if isinstance(rows, dict) else rows)
    mean = bj.broadcast(bj.reduce_mean(y))
    return bj.reduce_mean(bj.map_fn(lambda v, m: (v - m) ** 2, (y, mean)))


def run(source, **options):
    return bj.run(spread, source, options={"shard_size": 8, **options})


@pytest.fixture(params=FORMATS)
def given(request, tmp_path):
    """Where a file is, and what writes and reads it."""
    return str(tmp_path / f"rows.{request.param}"), *FORMATS[request.param]


def test_what_is_whole_is_read(given):
    path, write, read = given
    write(path, N)
    sums = X.astype(np.float64).sum(axis=1)
    np.testing.assert_allclose(run(read(path)), np.var(sums), rtol=1e-5)


def test_what_is_not_there(given):
    path, _, read = given
    with pytest.raises(SourceError, match="rows") as caught:
        read(path)
    assert path in str(caught.value)
    assert "all workers see" in str(caught.value)


def test_what_has_no_members(given):
    path, write, read = given
    write(path, 0)
    with pytest.raises(PlacementError, match=r"found (0 members|no record).*, expected") as caught:
        read(path)
    assert path in str(caught.value)
    assert "  " not in str(caught.value)


def test_what_is_cut_off(given):
    path, write, read = given
    write(path, N)
    cut = Path(path)
    if cut.is_dir():  # one chunk of many
        cut = min(path for path in cut.rglob("c/*/*") if path.is_file())
    cut.write_bytes(cut.read_bytes()[:-7])
    with pytest.raises(SourceError, match=r"rows\.\w+") as caught:
        run(read(path))
    assert path in str(caught.value)


def run_twice(source, change):
    """Two rounds over the members, and `change` of their files in each."""

    @bj.program(placements={"rows": None})
    def rounds(rows):
        def one(_, total):
            jax.debug.callback(change)
            return total + bj.reduce_sum(bj.map_fn(jnp.sum, rows["x"]))

        rows = rows if isinstance(rows, dict) else {"x": rows}
        return jax.lax.fori_loop(0, 2, one, jnp.float32(0))

    return bj.run(rounds, source, options={"shard_size": 8, "rounds_per_graph": 1})


def test_what_has_fewer_members_in_the_next_pass(given):
    path, write, read = given
    write(path, N)
    source = read(path)

    def change():
        write(path, 16)
        block_source.BLOCKS.clear()  # which would go on with what the file was

    with pytest.raises(SourceError, match="the file was changed after the source was made"):
        run_twice(source, change)


def rewrite(path):
    """Writes as many bytes again, in place: by no more than the time is it another file."""
    if os.path.isdir(path):
        zarr = pytest.importorskip("zarr")
        zarr.open_group(path, mode="r+")["x"][:] = X[::-1]
        return
    data, before = Path(path).read_bytes(), os.stat(path)
    with open(path, "r+b") as file:
        file.write(data)
    after = os.stat(path)
    assert (after.st_size, after.st_ino) == (before.st_size, before.st_ino)


def test_what_is_rewritten_in_place_before_it_is_read(given):
    """Of the same shape, so that nothing but the time tells."""
    path, write, read = given
    write(path, N)
    source = read(path)
    rewrite(path)
    with pytest.raises(SourceError, match="the file was changed after the source was made"):
        run(source)
    run(read(path))


def test_what_is_rewritten_in_place_between_rounds(given):
    path, write, read = given
    write(path, N)
    source, done = read(path), []

    def change():
        done.append(1)
        if len(done) == 1:
            rewrite(path)
        block_source.BLOCKS.clear()  # which would go on with what the file was

    with pytest.raises(SourceError, match="the file was changed after the source was made"):
        run_twice(source, change)


def test_several_npy_files_that_are_rewritten(tmp_path):
    for i in range(3):
        np.save(tmp_path / f"x-{i}.npy", X)
    source = bj.from_npy(str(tmp_path / "x-*.npy"))
    again = bj.sources.open_spec(source.to_spec())
    for found in (source, again):
        np.testing.assert_array_equal(found.read(0, 3 * N)[0], np.concatenate([X] * 3))
    np.save(tmp_path / "x-1.npy", X + 1)
    for found in (source, again):
        np.testing.assert_array_equal(found.read(0, N)[0], X)
        with pytest.raises(SourceError, match=r"x-1\.npy: .*the file was changed after"):
            found.read(N - 1, N + 1)


def test_records_that_are_cut_between_two_of_them(tmp_path):
    """The count is that of the beginning: a shorter file is not read as one."""
    path = str(tmp_path / "rows.tfrecord")
    tfrecords.write(path, examples(N))
    source = bj.from_tfrecord(path, FEATURES)
    tfrecords.write(path, examples(N - 1))
    with pytest.raises(SourceError, match="the file was changed after the source was made"):
        run(source)
    # Nothing in the format says how many there were before the first look.
    assert len(bj.from_tfrecord(path, FEATURES)) == N - 1


def test_packed_records_that_are_cut_while_they_are_read(tmp_path):
    import gzip

    path = str(tmp_path / "rows.tfrecord.gz")
    plain = str(tmp_path / "plain")

    def write(n):
        tfrecords.write(plain, examples(n))
        Path(path).write_bytes(gzip.compress(Path(plain).read_bytes()))

    write(N)
    source = bj.from_tfrecord(path, FEATURES)
    chunks = source.chunks(0)
    next(chunks)
    write(N - 1)
    with pytest.raises(SourceError, match="the file was changed after the source was made"):
        list(chunks)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("shards", [None, (10, 3)])
def test_chunks_of_zarr_that_are_others_or_gone(zarr_format, shards, tmp_path):
    zarr = pytest.importorskip("zarr")
    if shards and zarr_format == 2:
        pytest.skip("format 2 has no shards")
    path = str(tmp_path / "x.zarr")
    how = {"chunks": (5, 3), "shards": shards, "zarr_format": zarr_format}
    array = zarr.create_array(path, shape=X.shape, dtype=X.dtype, **how)
    array[:] = X
    source = bj.from_zarr(path)
    again = bj.sources.open_spec(source.to_spec())
    array[21] = 7
    for found in (source, again):
        np.testing.assert_array_equal(found.read(0, 20)[0], X[:20])
        with pytest.raises(SourceError, match="the file was changed after"):
            found.read(0, N)
    source = bj.from_zarr(path)
    files = [p for p in Path(path).rglob("*") if p.is_file() and p.suffix != ".json"]
    last = max(p for p in files if not p.name.startswith(".z"))
    last.unlink()
    with pytest.raises(SourceError, match="is not there, expected a chunk"):
        source.read(0, N)
    # Chunks of the fill value may be left out; such an array has not all of them from the start.
    assert bj.from_zarr(path).read(0, N)[0].shape == X.shape


def test_what_is_gone_when_it_is_read(given):
    path, write, read = given
    write(path, N)
    source = read(path)
    (shutil.rmtree if os.path.isdir(path) else os.unlink)(path)
    with pytest.raises(SourceError, match="members 0 to 7: ") as caught:
        run(source)
    assert path in str(caught.value)
    with pytest.raises(WorkerError, match=r"path\. That is 8 of 24 members, and drop_limit=0\.1"):
        run(source, on_error="drop")


def test_what_nobody_may_read(given, monkeypatch):
    path, write, read = given
    write(path, N)
    if os.geteuid():
        os.chmod(path, 0)
    elif path.endswith((".zarr", ".array_record", ".parquet")):
        pytest.skip("is opened by a library, and nothing is forbidden to this user")
    else:
        real = builtins.open

        def opened(file, *args, **kwargs):
            if str(file) == path:
                raise PermissionError(13, "Permission denied", path)
            return real(file, *args, **kwargs)

        monkeypatch.setattr(builtins, "open", opened)
    with pytest.raises(SourceError, match=r"Permission denied|may not be read") as caught:
        read(path)
    assert path in str(caught.value)


# --- members that are bad alone


def damaged(data, at):
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def short_lists(path):
    lists = [[1.0] * (1 if i == 9 else 3) for i in range(N)]
    return pa.table({"x": pa.array(lists, pa.list_(pa.float32()))})


def bad_parquet(path):
    pa.parquet.write_table(short_lists(path), path, row_group_size=5)


def bad_arrow(path):
    pa.feather.write_feather(short_lists(path), path, compression="uncompressed", chunksize=5)


def bad_tfrecord(path):
    tfrecords.write(path, short_examples())


def bad_array_record(path):
    write_records(path, short_examples())


def flipped_tfrecord(path):
    write_tfrecord(path, N)
    data = Path(path).read_bytes()
    Path(path).write_bytes(damaged(data, data.index(X[9].tobytes())))


def short_examples():
    return [tfrecords.example({"x": X[i][: 2 if i == 9 else 3], "y": Y[i]}) for i in range(N)]


IN_TABLES = (
    r"column 'x', (row group|record batch) 1, row 4 of it \(row 9 of the file\): found a list"
)
BAD_MEMBERS = {
    "parquet": (bad_parquet, IN_TABLES),
    "arrow": (bad_arrow, IN_TABLES),
    "tfrecord": (bad_tfrecord, "record 9, feature 'x': found 2 values in float_list, expected 3"),
    "array_record": (bad_array_record, "record 9, feature 'x': found 2 values in float_list"),
    "tfrecord, damaged": (flipped_tfrecord, r"record 9: found \d+ bytes with a wrong checksum"),
}


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
@pytest.mark.parametrize("case", BAD_MEMBERS)
def test_a_member_that_is_bad_is_named_or_dropped(case, runner, tmp_path):
    write, message = BAD_MEMBERS[case]
    path, letters = str(tmp_path / "rows"), str(tmp_path / "dead.jsonl")
    write(path)
    source = FORMATS[case.split(",")[0]][1](path)
    with pytest.raises(SourceError, match=f"members 8 to 15: {path}(:|,) {message}"):
        bj.run(spread, source, runner=runner, options={"shard_size": 8})
    options = {"shard_size": 8, **DROP, "dead_letters": letters}
    with bj.launch(spread, source, runner=runner, options=options) as job:
        assert np.isfinite(job.result())
        (dropped,) = job.dropped
    assert (dropped.member, dropped.reason) == (9, "error")
    (line,) = Path(letters).read_text().splitlines()
    assert json.loads(line) == dropped.to_json()
    assert path in dropped.message


def test_a_chunk_of_zarr_that_is_cut_off_loses_its_members_only(tmp_path):
    path = str(tmp_path / "rows.zarr")
    write_zarr(path, N)
    chunk = tmp_path / "rows.zarr" / "x" / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-7])
    source = bj.from_zarr(path)
    with pytest.raises(SourceError, match=r"cannot read members 5 to 9 of the array '/?x' \("):
        run(source)
    with bj.launch(spread, source, options={"shard_size": 8, **DROP}) as job:
        job.result()
        assert [each.member for each in job.dropped] == [5, 6, 7, 8, 9]


# --- leaves that are none


def save_npy(path, array):
    np.save(path, array, allow_pickle=True)
    return bj.from_npy


def save_npz(path, array):
    with open(path, "wb") as file:
        np.savez(file, x=array)
    return bj.from_npz


@pytest.mark.parametrize("save", [save_npy, save_npz])
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array(["a", "b"]), "dtype <U1 cannot be stored as raw bytes; expected a dtype"),
        (np.array([{}, []], object), "bjects.* expected numbers"),
        (np.zeros(3, "M8[s]"), "dtype datetime64.s. cannot be stored"),
    ],
)
def test_arrays_of_other_than_numbers(save, array, message, tmp_path):
    path = str(tmp_path / "rows.npy")
    with pytest.raises(BeamjaxError, match=message) as caught:
        save(path, array)(path)
    assert isinstance(caught.value, SourceError | StructureError)
    assert path in str(caught.value)


def test_keys_of_a_join_that_are_there_twice_or_once(tmp_path):
    left = {"id": np.array([1, 2, 2, 3]), "x": np.ones((4, 3), np.float32)}
    right = {"id": np.arange(1, 4), "y": np.arange(3)}
    for number, runner in enumerate(("local", "DirectRunner")):
        options = {"runner": runner, "folder": tmp_path / str(number)}
        with pytest.raises(SourceError, match="key 2 twice in the left table, in rows 1 and 2;"):
            bj.join(left, right, "id", **options)
        with pytest.raises(SourceError, match=r"key 2 twice in the right .* together\.$"):
            bj.join(right, left, "id", **options)
        alone = {"id": np.arange(4), "x": np.ones(4)}
        with pytest.raises(SourceError, match="found the key 0 in the left table only"):
            bj.join(alone, right, "id", **options)
