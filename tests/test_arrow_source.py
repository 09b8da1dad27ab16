"""What is Arrow's own: maps of local files, and files that look like it."""

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from source_programs import assert_reads

import beamjax as bj
from beamjax.errors import SourceError
from beamjax.sources import arrow_source, block_source

X = np.arange(100.0)
TABLE = pa.table({"x": X, "y": np.arange(100)})


def test_numbers_of_a_local_file_are_a_map_of_it(tmp_path):
    path = str(tmp_path / "x.arrow")
    big = np.arange(1 << 20)
    table = pa.table({"x": big, "y": big.astype(float)})
    pyarrow.feather.write_feather(table, path, compression="uncompressed", chunksize=1 << 19)
    before = pa.total_allocated_bytes()
    found = bj.from_arrow(path).read(0, 1 << 19)
    assert pa.total_allocated_bytes() - before < 1 << 16
    assert not any(array.flags.owndata for array in found)
    np.testing.assert_array_equal(found[0], big[: 1 << 19])


def test_files_are_kept_open_but_not_too_many(tmp_path, monkeypatch):
    arrow_source._READERS.clear()
    monkeypatch.setattr(arrow_source._READERS, "limit", 4)
    for i in range(10):
        path = str(tmp_path / f"{i}.arrow")
        pyarrow.feather.write_feather(pa.table({"x": X + i}), path, chunksize=30)
    source = bj.from_arrow(str(tmp_path / "*.arrow"), "x")
    block_source.BLOCKS.clear()
    assert_reads(source, [np.concatenate([X + i for i in range(10)])])
    assert len(arrow_source._READERS._values) <= 4


def test_dictionaries(tmp_path):
    words = pa.chunked_array([["a", "b", "a"], ["c", "a"]]).dictionary_encode().combine_chunks()
    numbers = pa.DictionaryArray.from_arrays(words.indices, pa.array([1.5, 2.5, 3.5]))
    with (
        pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file,
        pa.ipc.new_file(file, pa.schema([("x", numbers.type)])) as writer,
    ):
        writer.write_table(pa.table({"x": numbers}), max_chunksize=2)
    assert_reads(bj.from_arrow(tmp_path / "x.arrow", "x"), [np.array([1.5, 2.5, 1.5, 3.5, 1.5])])


def test_streams_have_no_footer(tmp_path):
    with (
        pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file,
        pa.ipc.new_stream(file, TABLE.schema) as writer,
    ):
        writer.write_table(TABLE)
    with pytest.raises(SourceError, match=r"x.arrow: cannot read .* Arrow \(IPC with a footer"):
        bj.from_arrow(tmp_path / "x.arrow")
