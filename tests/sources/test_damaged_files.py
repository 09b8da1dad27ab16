"""Files that are damaged, gone, changed or of another shape: what is said, and what is dropped."""

import builtins
import gzip
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tfrecords
from source_files import (
    ARRAYS,
    FEATURES,
    RECORDS,
    TABLES,
    TREE,
    Format,
    N,
    assert_reads,
    examples,
    part,
    refused,
    save,
    write_parquet,
    write_zarr,
)

import beamjax as bj
from beamjax.errors import BeamjaxError, PlacementError, SourceError, StructureError, WorkerError
from beamjax.sources.source_base import open_spec, spec_of, take_members
from beamjax.storage.schema import to_plain
from beamjax.storage.shared_cache import BLOCKS

X = TREE["x"]
OPTIONS = {"shard_size": 8}
DROP = {**OPTIONS, "on_error": "drop", "drop_limit": 0.9}


def write_npy(path, tree, rows=5):
    with open(path, "wb") as file:
        np.save(file, tree["x"])


FORMATS = {
    "parquet": TABLES["parquet"],
    "arrow": TABLES["arrow"],
    "npy": Format(write_npy, bj.from_npy),
    "npz": ARRAYS["npz"],
    "zarr": ARRAYS["zarr"],
    **RECORDS,
}


@bj.program(placements={"rows": None})
def spread(rows):
    """Two passes."""
    y = bj.map_fn(jnp.sum, rows["x"] if isinstance(rows, dict) else rows)
    mean = bj.broadcast(bj.reduce_mean(y))
    return bj.reduce_mean(bj.map_fn(lambda v, m: (v - m) ** 2, (y, mean)))


def run(source, **options):
    return bj.run(spread, source, options={**OPTIONS, **options})


@pytest.fixture(params=FORMATS)
def form(request):
    BLOCKS.clear()
    return FORMATS[request.param]


@pytest.fixture
def path(form, tmp_path):
    """Where a file of the format is."""
    return save(form, tmp_path / "rows.bin")


CHANGED = "the file was changed after the source was made"


# --- every format


def test_what_is_whole_is_read(form, path):
    sums = X.astype(np.float64).sum(axis=(1, 2))
    np.testing.assert_allclose(run(form.read(path)), np.var(sums), rtol=1e-5)


def test_what_is_not_there(form, path, tmp_path):
    error = refused(SourceError, "none.bin", form.read, str(tmp_path / "none.bin"))
    assert "all workers see" in str(error)


def test_what_is_cut_off(form, path):
    cut = Path(path)
    if cut.is_dir():  # one chunk of many
        cut = min(path for path in cut.rglob("x/c/*/*/*") if path.is_file())
    cut.write_bytes(cut.read_bytes()[:-7])
    error = refused(SourceError, r"rows\.bin", lambda: run(form.read(path)))
    assert path in str(error)


def run_twice(source, change):
    """Two rounds over the members, and `change` of their files in each."""

    @bj.program(placements={"rows": None})
    def rounds(rows):
        def one(_, total):
            jax.debug.callback(change)
            return total + bj.reduce_sum(bj.map_fn(jnp.sum, rows["x"]))

        rows = rows if isinstance(rows, dict) else {"x": rows}
        return jax.lax.fori_loop(0, 2, one, jnp.float32(0))

    return bj.run(rounds, source, options={**OPTIONS})


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


@pytest.mark.parametrize("how", ["shorter", "in place"])
def test_what_changes_between_rounds(form, path, how):
    done = []

    def change():
        done.append(1)
        if how == "shorter":
            form.write(path, part(TREE, 0, 16))
        elif len(done) == 1:
            rewrite(path)
        BLOCKS.clear()  # which would go on with what the file was

    refused(SourceError, CHANGED, run_twice, form.read(path), change)


def test_what_changes_before_it_is_read(form, path):
    """Another time alone, or another length."""
    source = form.read(path)
    rewrite(path)
    for each in (source, open_spec(spec_of(source))):
        refused(SourceError, CHANGED, each.read, 0, N)
        refused(SourceError, CHANGED, take_members, each, np.array([9, 2]))
    run(form.read(path))
    source = form.read(path)
    BLOCKS.clear()
    form.write(path, part(TREE, 0, N - 1))
    refused(SourceError, CHANGED, source.read, 0, 1)
    assert len(form.read(path)) == N - 1


def test_what_is_gone_when_it_is_read(form, path):
    source = form.read(path)
    spec = spec_of(source)
    (shutil.rmtree if os.path.isdir(path) else os.unlink)(path)
    error = refused(SourceError, "members 0 to 7: ", run, source)
    assert path in str(error)
    assert len(open_spec(spec)) == N
    refused(SourceError, "is not there", open_spec(spec).read, 0, 1)
    message = rf"path\. That is 8 of {N} members, and drop_limit=0\.1"
    refused(WorkerError, message, run, source, on_error="drop")


def forbid(*args, **kwargs):
    raise PermissionError(13, "Permission denied")


def test_what_nobody_may_read(form, path, monkeypatch, tmp_path):
    source = form.read(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", forbid)  # The user of the tests may be root.
        message = r"rows\.bin.*: may not be read by user \d+ \(Permission"
        refused(SourceError, message, source.read, 0, 1)
    real = builtins.open

    def opened(file, *args, **kwargs):
        return forbid() if str(file) == path else real(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", opened)
    for where in ("pyarrow.parquet.ParquetFile", "pyarrow.memory_map", "zarr.open"):
        monkeypatch.setattr(where, forbid)
    BLOCKS.clear()
    again = save(form, tmp_path / "again.bin")
    path = again
    error = refused(SourceError, r"Permission denied|may not be read", form.read, again)
    assert again in str(error)


# --- members that are bad alone


def short_lists():
    rows = [[1.0] * (1 if i == 9 else 3) for i in range(N)]
    return pa.table({"x": pa.array(rows, pa.list_(pa.float32()))})


def short_examples():
    return [
        tfrecords.example(part(TREE, i, i + 1) | {"x": X[i][: 1 if i == 9 else 2]})
        for i in range(N)
    ]


def flipped(path):
    data = bytearray(Path(tfrecords.write(path, examples(TREE))).read_bytes())
    data[data.index(X[9].tobytes())] ^= 0xFF
    Path(path).write_bytes(data)


IN_TABLES = r"column 'x', (row group|record batch) 1, row 4 of it \(row 9 of the file\): found a"
IN_RECORDS = "record 9, feature 'x': found 3 values in float_list, expected 6"
BAD_MEMBERS = {
    "parquet": (lambda path: write_parquet(path, short_lists()), IN_TABLES),
    "arrow": (lambda path: TABLES["arrow"].write(path, short_lists()), IN_TABLES),
    "tfrecord": (lambda path: tfrecords.write(path, short_examples()), IN_RECORDS),
    "tfrecord, damaged": (flipped, r"record 9: found \d+ bytes with a wrong checksum"),
}


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
@pytest.mark.parametrize("case", BAD_MEMBERS)
def test_a_bad_member_is_named_or_dropped(case, runner, tmp_path):
    write, message = BAD_MEMBERS[case]
    path, letters = str(tmp_path / "rows"), str(tmp_path / "dead.jsonl")
    write(path)
    source = FORMATS[case.split(",")[0]].read(path)
    message = f"members 8 to 15: {path}(:|,) {message}"
    refused(SourceError, message, bj.run, spread, source, runner=runner, options=OPTIONS)
    options = {**DROP, "dead_letters": letters}
    with bj.launch(spread, source, runner=runner, options=options) as job:
        assert np.isfinite(job.result())
        (dropped,) = job.dropped
    assert (dropped.member, dropped.reason) == (9, "error")
    (line,) = Path(letters).read_text().splitlines()
    assert json.loads(line) == to_plain(dropped)
    assert path in dropped.message


def test_a_chunk_of_zarr_that_is_cut_off_loses_its_members_only(tmp_path):
    write_zarr(tmp_path / "rows.zarr", TREE)
    chunk = tmp_path / "rows.zarr" / "x" / "c" / "1" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-7])
    source = bj.from_zarr(tmp_path / "rows.zarr")
    refused(SourceError, r"cannot read members 5 to 9 of the array '/?x' \(", run, source)
    with bj.launch(spread, source, options=DROP) as job:
        job.result()
        assert [each.member for each in job.dropped] == [5, 6, 7, 8, 9]
    write_zarr(tmp_path / "one.zarr", TREE, rows=1)
    chunk = tmp_path / "one.zarr" / "x" / "c" / "1" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-7])
    source = bj.from_zarr(tmp_path / "one.zarr")
    assert_reads(source, TREE, 0, 1)
    assert_reads(source, TREE, 2, N)
    refused(SourceError, "cannot read member", source.read, 1, 2)


# --- what is of one format


def test_one_of_several_npy_files_that_is_rewritten(tmp_path):
    for i in range(3):
        np.save(tmp_path / f"x-{i}.npy", X)
    source = bj.from_npy(str(tmp_path / "x-*.npy"))
    again = open_spec(spec_of(source))
    np.save(tmp_path / "x-1.npy", X + 1)
    for found in (source, again):
        assert_reads(found, X, 0, N)
        refused(SourceError, rf"x-1\.npy: .*{CHANGED}", found.read, N - 1, N + 1)


def test_packed_records_that_are_cut_while_they_are_read(tmp_path):
    def write(n):
        plain = Path(tfrecords.write(tmp_path / "plain", examples(part(TREE, 0, n))))
        (tmp_path / "rows.gz").write_bytes(gzip.compress(plain.read_bytes()))

    write(N)
    chunks = bj.from_tfrecord(tmp_path / "rows.gz", FEATURES).chunks(0)
    next(chunks)
    write(N - 1)
    refused(SourceError, CHANGED, list, chunks)


@pytest.mark.parametrize(
    "how", [{"zarr_format": 2}, {}, {"shards": (10, 2, 3)}, {"chunks": (1, 1, 3)}], ids=str
)
def test_chunks_of_zarr_that_are_others_or_gone(how, tmp_path):
    zarr = pytest.importorskip("zarr")
    path = str(tmp_path / "x.zarr")
    how = {"chunks": (5, 2, 3), **how}
    array = zarr.create_array(path, shape=X.shape, dtype=X.dtype, **how)
    array[:] = X
    source = bj.from_zarr(path)
    again = open_spec(spec_of(source))
    array[21] = 7
    for found in (source, again):
        assert_reads(found, X, 0, 20)
        for start, stop in ((0, N), (21, 22)):
            refused(SourceError, "the file was changed after", found.read, start, stop)
    source = bj.from_zarr(path)
    files = [p for p in Path(path).rglob("*") if p.is_file() and p.suffix != ".json"]
    chunk = max(p for p in files if not p.name.startswith(".z"))
    chunk.unlink()
    refused(SourceError, "is not there, expected a chunk", source.read, 0, N)
    chunk.symlink_to(chunk)
    refused(SourceError, f"{chunk}: cannot check a chunk", source.read, 0, N)
    chunk.unlink()
    # Chunks of the fill value may be left out; such an array has not all of them from the start.
    assert bj.from_zarr(path).read(0, N)[0].shape == X.shape


# --- tables


@pytest.fixture(params=TABLES)
def table(request):
    BLOCKS.clear()
    return TABLES[request.param]


def test_no_files_of_tables(table, tmp_path):
    name = table.read.__name__
    for error, message, given in [
        (SourceError, "found no file '.*/none'", tmp_path / "none"),
        (SourceError, "found no file that ends in", tmp_path),
        (SourceError, "found no files in an empty list", []),
        (StructureError, "found 3, expected a path", 3),
    ]:
        refused(error, f"{name}: {message}", table.read, given)
    path = tmp_path / "x.csv"
    whole = Path(save(table, tmp_path / "x")).read_bytes()
    cut = [whole[:size] for size in range(0, len(whole), max(len(whole) // 40, 1))]
    for content in (b"", b"a,b\n1,2\n" * 50, b"PAR1PAR1", b"ARROW1\0\0" * 4, *cut):
        path.write_bytes(content)
        refused(
            SourceError, r"x\.csv: cannot read .* expected a file of (Parq|Arr)", table.read, path
        )


def test_damage_in_the_middle_never_ends_the_process(table, tmp_path):
    path = Path(save(table, tmp_path / "x"))
    data, errors = path.read_bytes(), []
    for at in range(8, len(data) - 8, max(len(data) // 60, 1)):
        wrong = bytes(byte ^ 255 for byte in data[at : at + 6])
        path.write_bytes(data[:at] + wrong + data[at + 6 :])
        try:
            source = table.read(path)
            source.read(0, min(len(source), N))
        except BeamjaxError as error:
            errors.append(str(error))
    assert len(errors) > 5
    assert all("/x" in message for message in errors)


def test_pages_are_compared_with_their_checksums(tmp_path):
    path, values = tmp_path / "x.parquet", np.arange(N)
    plain = {"compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"x": values}), path, write_page_checksum=True, **plain)
    data = bytearray(path.read_bytes())
    data[data.index(values.tobytes())] ^= 1
    path.write_bytes(data)
    refused(SourceError, r"x\.parquet: cannot read .*CRC", bj.from_parquet(path).read, 0, N)


def test_damaged_names_in_a_row_group(tmp_path):
    path = tmp_path / "x.parquet"
    write_parquet(path, {"column": np.arange(N)}, N)
    before, found, after = path.read_bytes().rpartition(b"\x19\x18\x06column")
    assert found  # a list of one name of 6 bytes
    path.write_bytes(before + b"\x19\x18\x06\x80olumn" + after)
    # Columns are found by the schema; the names in row groups are not read.
    assert_reads(bj.from_parquet(path), {"column": np.arange(N)})


@pytest.mark.parametrize("bad", [None, [5.0]])
def test_rows_beside_a_bad_one_can_be_read(table, bad, tmp_path):
    rows = [[float(i), 1.0] for i in range(N)]
    value = np.array(rows)
    rows[12] = bad
    source = table.read(save(table, tmp_path / "x", pa.table({"x": pa.array(rows)})))
    where = f"/x: column 'x', {table.batch} 2, row 2 of it .row 12 of the file.: found "
    what = "null, 1 of them" if bad is None else "a list of length 1, expected 2"
    for start in range(N):
        for stop in range(start, N + 1):
            if start <= 12 < stop:
                refused(SourceError, where + what, source.read, start, stop)
            else:
                assert_reads(source, value, start, stop)


def test_files_of_a_table_that_do_not_agree(table, tmp_path):
    first = save(table, tmp_path / "a", pa.table({"x": [1, 2]}))
    for columns, other, message in [
        (None, {"y": [1]}, "/b: found the column 'y', which /.*/a has not"),
        (None, {}, "/b: found no column 'x'. There are none"),
        (["x"], {"xx": [1]}, "/b: found no column 'x'; did you mean 'xx'"),
        (None, {"x": pa.array([1], pa.int32())}, "/b: .*'x' of the type int32, expected int64"),
        (None, {"x": [[1]]}, "/b: .*'x' of the type list.*expected int64 as in /.*/a"),
    ]:
        other = save(table, tmp_path / "b", pa.table(other))
        refused(SourceError, message, table.read, [first, other], columns)
    pairs = save(table, tmp_path / "a", pa.table({"x": [[1, 2]] * 3}))
    other = save(table, tmp_path / "b", pa.table({"x": [[1, 2, 3]] * 3}))
    message = r"/b: column 'x', .* row 0 of it .* length 3, expected 2"
    refused(SourceError, message, table.read([pairs, other]).read, 0, 6)
    first = save(table, tmp_path / "a", pa.table({"x": [1], "y": [2.0]}))
    other = save(table, tmp_path / "b", pa.table({"y": [4.0], "x": [3]}))
    assert_reads(table.read([first, other]), [np.array([1, 3]), np.array([2.0, 4.0])])


def test_files_of_a_table_without_rows(table, tmp_path):
    schema = pa.schema([("x", pa.list_(pa.int64()))])
    empty = save(table, tmp_path / "a", schema.empty_table())
    for files in (empty, [empty, empty]):
        more = " and 1 more" if isinstance(files, list) else ""
        refused(PlacementError, rf"{empty}{more}: column 'x' has lists of", table.read, files)
    full = save(table, tmp_path / "b", pa.table({"x": [[1, 2], [3, 4]]}))
    assert_reads(table.read([empty, full, empty, full]), np.array([[1, 2], [3, 4]] * 2))


def test_decoded_blocks_of_a_table_are_not_read_after_it_changed(table, tmp_path):
    path = save(table, tmp_path / "x", rows=10)
    source = table.read(path)
    source.read(0, 1)
    save(table, path, part(TREE, 3, N), rows=10)
    refused(SourceError, CHANGED, source.read, 0, 10)
    refused(SourceError, r"/x: found \d+ bytes .*" + CHANGED, source.read, 0, N)
    shutil.move(save(table, tmp_path / "y", rows=10), path)
    refused(SourceError, CHANGED, source.read, 10, 11)
