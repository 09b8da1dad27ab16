"""What is Parquet's own: encodings and codecs, and that only what is needed is read."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_programs import assert_reads

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
