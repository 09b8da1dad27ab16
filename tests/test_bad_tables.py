"""Tables that can't be read, of Parquet and of Arrow: errors that say where, and what to do."""

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_programs import assert_reads, assert_same
from table_files import (
    FORMS,
    N,
    in_order,
    table_of,
    tree_of,
)

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources import block_source
from beamjax.sources.source_base import open_spec


@pytest.fixture(params=FORMS)
def form(request):
    block_source.BLOCKS.clear()
    return FORMS[request.param]


def test_no_such_files(form, tmp_path):
    name = form.read.__name__
    with pytest.raises(SourceError, match=f"{name}: found no file '.*/none'"):
        form.read(tmp_path / "none")
    with pytest.raises(SourceError, match=f"{name}: found no file that ends in"):
        form.read(tmp_path)
    with pytest.raises(SourceError, match=f"{name}: found no files in an empty list"):
        form.read([])
    with pytest.raises(StructureError, match=f"{name}: found 3, expected a path"):
        form.read(3)


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n" * 50, b"PAR1PAR1", b"ARROW1\0\0" * 4])
def test_other_files(form, content, tmp_path):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(SourceError, match=r"x\.csv: cannot read .* expected a file of (Parq|Arr)"):
        form.read(tmp_path / "x.csv")


def test_files_that_are_cut_off(form, tmp_path):
    path = Path(form.save(table_of(tree_of()), tmp_path / "x"))
    data = path.read_bytes()
    for size in range(0, len(data), max(len(data) // 40, 1)):
        path.write_bytes(data[:size])
        with pytest.raises(SourceError, match=r"/x: cannot read .* expected a file of"):
            form.read(path)


def test_damage_in_the_middle_never_ends_the_process(form, tmp_path):
    tree = tree_of()
    path = Path(form.save(table_of(tree), tmp_path / "x"))
    data, refused = path.read_bytes(), []
    for at in range(8, len(data) - 8, max(len(data) // 60, 1)):
        path.write_bytes(
            data[:at] + bytes(byte ^ 255 for byte in data[at : at + 6]) + data[at + 6 :]
        )
        try:
            source = form.read(path)
            source.read(0, min(len(source), N))
        except bj.BeamjaxError as error:
            refused.append(str(error))
    assert len(refused) > 5
    assert all("/x" in message for message in refused)


def test_damaged_names_in_a_row_group_are_told(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"column": np.arange(N)}), path)
    data = path.read_bytes()
    before, found, after = data.rpartition(b"\x19\x18\x06column")  # a list of one name of 6 bytes
    assert found
    path.write_bytes(before + b"\x19\x18\x06\x80olumn" + after)
    source = bj.from_parquet(path)
    with pytest.raises(SourceError, match=r"x\.parquet: cannot read .* row group 0 of a file"):
        source.read(0, N)


def test_rows_that_are_missing_or_ragged_are_named(form, tmp_path):
    ragged = pa.array([[1, 2]] * 12 + [[1, 2, 3]] + [[1, 2]] * 3)
    path = form.save(pa.table({"x": ragged}), tmp_path / "x")
    source = form.read(path)
    assert_same(source.read(0, 10)[0], np.array([[1, 2]] * 10))
    where = f"column 'x', {form.batch} 2, row 2 of it .row 12 of the file.: found"
    with pytest.raises(SourceError, match=rf"/x: {where} a list of length 3, expected 2"):
        source.read(11, 13)
    nulls = pa.array([1.0] * 12 + [None] + [1.0] * 3)
    source = form.read(form.save(pa.table({"x": nulls}), tmp_path / "x"))
    with pytest.raises(SourceError, match=rf"/x: {where} null, 1 of them in this {form.batch}"):
        source.read(0, 16)


@pytest.mark.parametrize("bad", [None, [5.0]])
def test_rows_beside_one_that_is_none_can_be_read(form, bad, tmp_path):
    lists = [[float(i), 1.0] for i in range(N)]
    value = np.array(lists)
    lists[12] = bad
    source = form.read(form.save(pa.table({"x": pa.array(lists)}), tmp_path / "x"))
    for start in range(N):
        for stop in range(start, N + 1):
            if start <= 12 < stop:
                with pytest.raises(SourceError, match=r"row 2 of it .row 12 of the file.: found"):
                    source.read(start, stop)
            else:
                assert_same(source.read(start, stop)[0], value[start:stop])


def test_members_that_are_none_are_dropped_alone(tmp_path):
    x = pa.array([float(i) if i != 12 else None for i in range(N)])
    path = FORMS["parquet"].save(pa.table({"x": x}), tmp_path / "x")
    total = bj.program(placements={"rows": N})(lambda x: bj.reduce_sum(x))
    options = {"on_error": "drop", "shard_size": 8}
    job = bj.launch(total, bj.from_parquet(path, "x"), runner="local", options=options)
    assert job.result() == sum(range(N)) - 12
    assert [each.member for each in job.dropped] == [12]


def test_other_lengths_of_lists_in_another_file(form, tmp_path):
    first = form.save(pa.table({"x": pa.array([[1, 2]] * 3)}), tmp_path / "a")
    other = form.save(pa.table({"x": pa.array([[1, 2, 3]] * 3)}), tmp_path / "b")
    source = form.read([first, other])
    with pytest.raises(
        SourceError, match=r"/b: column 'x', .* row 0 of it .* length 3, expected 2"
    ):
        source.read(0, 6)


@pytest.mark.parametrize(
    ("columns", "other", "message"),
    [
        (None, {"y": [1]}, "/b: found the column 'y', which /.*/a has not"),
        (None, {}, "/b: found no column 'x'. There are none"),
        (["x"], {"xx": [1]}, "/b: found no column 'x'; do you mean 'xx'. There are 'xx'"),
        (
            None,
            {"x": pa.array([1], pa.int32())},
            "/b: found .*'x' of the type int32, expected int64",
        ),
        (
            None,
            {"x": [[1]]},
            "/b: found the column 'x' of the type list.*expected int64 as in /.*/a",
        ),
    ],
)
def test_files_that_do_not_agree(form, columns, other, message, tmp_path):
    first = form.save(pa.table({"x": [1, 2]}), tmp_path / "a")
    other = form.save(pa.table(other), tmp_path / "b")
    with pytest.raises(SourceError, match=message):
        form.read([first, other], columns)


def test_the_order_of_columns_may_differ(form, tmp_path):
    first = form.save(pa.table({"x": [1], "y": [2.0]}), tmp_path / "a")
    other = form.save(pa.table({"y": [4.0], "x": [3]}), tmp_path / "b")
    assert_reads(form.read([first, other]), [np.array([1, 3]), np.array([2.0, 4.0])])


def test_columns_of_other_than_numbers(form, tmp_path):
    table = pa.table({"x": [1, 2], "name": ["a", "b"]})
    path = form.save(table, tmp_path / "a")
    with pytest.raises(StructureError, match=r"/a: column 'name' is of .*string.*columns=\['x'\]"):
        form.read(path)
    with pytest.raises(SourceError, match=r"/a: found no column 'nam'; do you mean 'name'\?"):
        form.read(path, ["nam"])


def test_files_without_rows(form, tmp_path):
    schema = pa.schema([("x", pa.list_(pa.int64()))])
    empty = form.save(schema.empty_table(), tmp_path / "a")
    for files in (empty, [empty, empty]):
        with pytest.raises(PlacementError, match=r"placed input \(.*/a.*\): found 0 members"):
            form.read(files)
    full = form.save(pa.table({"x": [[1, 2], [3, 4]]}), tmp_path / "b")
    assert_reads(form.read([empty, full, empty, full]), [np.array([[1, 2], [3, 4]] * 2)])


def test_files_that_change(form, tmp_path):
    tree = tree_of()
    path = form.save(table_of(tree), tmp_path / "x", rows=10)
    source = form.read(path)
    source.read(0, 1)
    form.save(table_of(tree_of(30, seed=1)), path, rows=10)
    if form.batch == "row group":
        assert_reads(source, in_order(tree), 0, 10)  # decoded before, and kept
    for stop in (N,) if form.batch == "row group" else (1, N):
        with pytest.raises(SourceError, match=r"/x: found \d+ bytes .* the file was changed after"):
            source.read(0, stop)
    assert_reads(form.read(path), in_order(tree_of(30, seed=1)))
    shutil.move(form.save(table_of(tree), tmp_path / "y", rows=10), path)
    with pytest.raises(SourceError, match="the file was changed"):
        source.read(10, 11)


def test_files_that_nobody_may_read(form, tmp_path, monkeypatch):
    path = form.save(table_of(tree_of()), tmp_path / "x")
    source = form.read(path)

    def forbidden(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", forbidden)  # the user of the tests may be root
        with pytest.raises(SourceError, match=r"/x: may not be read by user \d+ \(Permission"):
            source.read(0, 1)
    for where in ("pyarrow.parquet.ParquetFile", "pyarrow.memory_map"):
        monkeypatch.setattr(where, forbidden)
    again = form.save(table_of(tree_of()), tmp_path / "again")
    with pytest.raises(SourceError, match=r"/again: may not be read by user"):
        form.read(again)


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": [["x", 1]]},
        {"rows": []},
        {"rows": [[-1]]},
        {"rows": [["1"]]},
        {"rows": 3},
        {"columns": []},
        {"columns": [1, 2, 3]},
        {"columns": None},
        {"leaves": []},
        {"leaves": None},
        {"rows": [[2**62, 2**62]]},
        {"rows": [[0]]},
    ],
    ids=str,
)
def test_specs_that_are_none(form, change, tmp_path):
    spec = form.read(form.save(table_of(tree_of()), tmp_path / "x")).to_spec()
    with pytest.raises(SourceError, match="which its to_spec does not give"):
        open_spec({**spec, **change})


def test_specs_of_other_data_are_found_when_it_is_read(form, tmp_path):
    spec = form.read(form.save(table_of(tree_of()), tmp_path / "x")).to_spec()
    for change, message in [
        ({"rows": [[5, 5, 5, 5, 4]]}, "expected"),
        ({"rows": [[5, 5, 5, 5, 3, 2]]}, "expected"),
        ({"columns": ["label", "ok", "z"]}, "found no column 'z'"),
        ({"columns": ["ok", "label", "x"]}, "expected int8.* for leaf"),
    ]:
        other = open_spec({**spec, **change})
        with pytest.raises(SourceError, match=message):
            other.read(0, len(other))
