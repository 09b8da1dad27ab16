"""What is Parquet's own: encodings and codecs, and that only what is needed is read."""

import subprocess
import sys

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import url_files  # noqa: F401 - makes bjtest:// known to Beam
from hypothesis import strategies as st
from source_programs import assert_opens_elsewhere, assert_reads, assert_threads_read

import beamjax as bj
from beamjax.sources import block_source, parquet_source

X = np.arange(600, dtype=np.float32).reshape(100, 6)
TABLE = pa.table(
    {
        "x": pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 6),
        "word": pa.array([i % 7 for i in range(100)]),
        "text": pa.array(["long text " * 100] * 100),
    }
)


@pytest.mark.parametrize(
    "how",
    [{"compression": codec} for codec in ("none", "snappy", "gzip", "zstd", "brotli", "lz4")]
    + [
        {"use_dictionary": False},
        {"use_dictionary": ["word"]},
        {"data_page_version": "2.0"},
        {"data_page_size": 64},
        {"version": "1.0"},
        {"store_schema": False},  # fixed-size lists are lists then
        {"use_byte_stream_split": ["x"], "use_dictionary": False},
        {"row_group_size": 1},
        {"row_group_size": 7, "write_page_checksum": True},
    ],
    ids=str,
)
def test_however_it_is_written(how, tmp_path):
    pq.write_table(TABLE, tmp_path / "x.parquet", **how)
    source = bj.from_parquet(tmp_path / "x.parquet", ["x", "word"])
    word = np.arange(100) % 7
    assert_reads(source, [word, X])
    assert_reads(source, [word, X], 30, 61)


def test_only_the_columns_and_row_groups_that_are_needed_are_read(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    pq.write_table(TABLE, path, row_group_size=10)
    source = bj.from_parquet(path, "word")
    read, original = [], pq.ParquetFile.read_row_group

    def noted(self, number, columns):
        read.append((number, columns))
        return original(self, number, columns)

    block_source.BLOCKS.clear()
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    source.read(35, 52)
    assert read == [(3, ["word"]), (4, ["word"]), (5, ["word"])]


def test_footers_are_read_once(tmp_path, monkeypatch):
    pq.write_table(TABLE, tmp_path / "x.parquet", row_group_size=10)
    parquet_source._FOOTERS.clear()
    opened, original = [], pq.ParquetFile.__init__

    def noted(self, *args, metadata=None, **kwargs):
        opened.append(metadata)
        return original(self, *args, metadata=metadata, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "__init__", noted)
    source = bj.from_parquet(tmp_path / "x.parquet", "word")
    source.read(0, 100)
    assert opened.count(None) == 1


def test_importing_beamjax_imports_no_arrow():
    code = "import sys, beamjax; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def pieces(monkeypatch):
    """Row groups are cut after ten rows; gives how often one was begun."""
    begun, original = [], parquet_source._Cursor._restart

    def noted(self):
        begun.append(self._where[0])
        return original(self)

    monkeypatch.setattr(parquet_source._Cursor, "_restart", noted)
    monkeypatch.setattr(parquet_source, "PIECE_BYTES", 10 * (24 + 8))
    parquet_source._CURSORS.clear()
    block_source.BLOCKS.clear()
    return begun


def test_big_row_groups_are_read_by_pieces_in_their_order(pieces, tmp_path):
    pq.write_table(TABLE, tmp_path / "x.parquet", row_group_size=43)
    source = bj.from_parquet(tmp_path / "x.parquet", ["x", "word"])
    word = np.arange(100) % 7
    for start in range(0, 100, 3):
        assert_reads(source, [word, X], start, min(start + 3, 100))
    assert pieces == [0, 1]  # the last one has 14 rows, which is not much
    assert len(block_source.BLOCKS.passing._values) == 11
    block_source.BLOCKS.clear()
    assert_reads(source, [word, X], 5, 8)
    assert_reads(source, [word, X], 0, 100)
    assert pieces == [0, 1, 0, 1]


@hypothesis.settings(
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(st.integers(1, 100), st.lists(st.integers(0, 100), min_size=8, max_size=8))
def test_any_range_of_pieces(pieces, tmp_path_factory, rows, ends):
    block_source.BLOCKS.clear()
    path = tmp_path_factory.mktemp("x") / "x.parquet"
    pq.write_table(TABLE, path, row_group_size=rows)
    source = bj.from_parquet(path, ["x", "word"])
    for start, stop in zip(ends[::2], ends[1::2], strict=True):
        start, stop = sorted((start, stop))
        assert_reads(source, [np.arange(100) % 7, X], start, stop)


def test_threads_read_pieces(pieces, tmp_path, monkeypatch):
    monkeypatch.setattr(block_source.BLOCKS.passing, "limit", 0)
    pq.write_table(TABLE, tmp_path / "x.parquet")
    source = bj.from_parquet(tmp_path / "x.parquet", "x")
    assert_threads_read(source, [X])
    assert_opens_elsewhere(source)


def test_errors_in_pieces_name_the_row(pieces, tmp_path):
    lists = [[1, 2, 3, 4]] * 100
    lists[77] = [5]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": pa.array(lists)}), path, row_group_size=60)
    source = bj.from_parquet(path)
    where = r"row group 1, row 17 of it \(row 77 of the file\): found a list of length 1"
    with pytest.raises(bj.SourceError, match=where):
        source.read(75, 80)
    pq.write_table(pa.table({"x": pa.array(lists[:70])}), path)
    with pytest.raises(bj.SourceError, match="the file was changed"):
        source.read(75, 80)


def test_pieces_at_a_url(pieces, tmp_path):
    pq.write_table(TABLE, tmp_path / "x.parquet")
    source = bj.from_parquet(f"bjtest:/{tmp_path}/x.parquet", "x")
    assert_reads(source, [X])
    parquet_source._CURSORS.clear()
