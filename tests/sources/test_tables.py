"""Files of tables, of Parquet and of Arrow: the rows that were written, read once."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from helpers import assert_same_bits
from hypothesis import strategies as st
from source_files import (
    TABLES,
    TREE,
    N,
    assert_reads,
    refused,
    save,
    save_parts,
    table_of,
    write_parquet,
)

import beamjax as bj
from beamjax.errors import SourceError, StructureError
from beamjax.sources.arrays.data_files import find_files_in_folders
from beamjax.sources.derived_sources import ShortSource
from beamjax.sources.source_base import open_spec, spec_of, take_members
from beamjax.sources.tables import arrow_files, parquet_files, table_opening
from beamjax.sources.tables.table_source import FORMATS
from beamjax.storage.shared_cache import BLOCKS, nbytes


@pytest.fixture(autouse=True)
def _no_blocks():
    BLOCKS.clear()


@pytest.fixture(params=TABLES)
def form(request):
    return TABLES[request.param]


def test_other_types_of_columns(form, tmp_path):
    i = np.arange(N)
    tensor = np.arange(N * 6, dtype=np.int16).reshape(N, 2, 3)
    table = pa.table({
        "lists": pa.array([[i, i + 1] for i in range(N)]),
        "deep": pa.array([[[i], [i + 1]] for i in range(N)]),
        "large": pa.array([[1.5 * i] for i in range(N)], pa.large_list(pa.float64())),
        "bytes": pa.array([bytes([i, 2 * i]) for i in range(N)], pa.binary(2)),
        "words": pa.array([i % 3 for i in range(N)]).dictionary_encode(),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(tensor),
    })  # fmt: skip
    source = form.read(save(form, tmp_path / "x", table))
    expected = {
        "lists": np.stack([i, i + 1], 1),
        "deep": np.stack([i, i + 1], 1)[..., None],
        "large": 1.5 * i[:, None],
        "bytes": np.stack([i, 2 * i], 1).astype(np.uint8),
        "words": i % 3,
        "tensor": tensor,
    }
    for each in (source, open_spec(spec_of(source))):
        assert_reads(each, expected)


def test_columns_are_chosen(form, tmp_path):
    table = table_of(TREE).append_column("name", pa.array(["a"] * N))
    path = save(form, tmp_path / "x", table)
    source = form.read(path, columns=["x", "label"])
    assert source.treedef == jax.tree.structure({"label": 0, "x": 0})
    assert_reads(source, [TREE["label"], TREE["x"]], 4, 12)
    bare = form.read(path, columns="x")
    assert bare.treedef == jax.tree.structure(0)
    assert bare.leaves[0].path == ""
    assert repr(bare).endswith(f"in {path}>")
    assert_reads(bare, TREE["x"])
    table = pa.table({"a": np.arange(3), "a.b": np.arange(3.0), "a.b.c": np.arange(3) * 2})
    source = form.read(save(form, tmp_path / "x", table), columns=["a", "a.b"])
    assert_reads(source, [np.arange(3), np.arange(3.0)])


def test_files_by_path_pattern_list_folder_and_url(form, tmp_path):
    end = ".parquet" if form.batch == "row group" else ".arrow"
    folder = tmp_path / "d ä"
    folder.mkdir()
    names = [Path(path).name for path in save_parts(form, folder, end=end)]
    (folder / "_SUCCESS").touch()
    for way in (
        folder,
        str(folder / f"*{end}"),
        [folder / name for name in names],
        [str(folder / names[0]), str(folder / f"part-[1-3]{end}")],
        folder.as_uri(),
        f"file://{folder}/part-*{end}",
        f"bjtest:/{folder}/",
        f"bjtest:/{folder}/part-*{end}",
    ):
        source = form.read(way)
        assert_reads(source, TREE)
        assert_reads(source, TREE, 3, 20)
        assert f"{names[0]} and 3 more" in repr(source)
    backwards = form.read([folder / names[3], folder / names[0]])
    label = TREE["label"]
    assert_same_bits(backwards.read(0, 8)[0], np.concatenate([label[19:], label[:4]]))


def read_in_threads(source, tree, rows=8):
    starts = range(len(source) - rows)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda start: source.read(start, start + rows), starts))
    for start, arrays in zip(starts, found, strict=True):
        expected = [array[start : start + rows] for array in jax.tree.leaves(tree)]
        assert_same_bits(arrays, expected)


LONG = {name: np.tile(array, (16, *[1] * (array.ndim - 1))) for name, array in TREE.items()}


@pytest.mark.parametrize("name", ["parquet", "feather"])  # others are maps
def test_each_batch_is_decoded_once_and_what_is_kept_is_bounded(name, tmp_path, monkeypatch):
    form = TABLES[name]
    source = form.read(save(form, tmp_path / "x", LONG, rows=100))
    count, lock, decode = [], threading.Lock(), type(source)._decode

    def counted(self, block):
        with lock:
            count.append(block.number)
        return decode(self, block)

    monkeypatch.setattr(type(source), "_decode", counted)
    read_in_threads(source, LONG)
    assert sorted(count) == [0, 1, 2, 3]
    monkeypatch.setattr(BLOCKS.passing, "limit", 2 * nbytes(source.read(0, 100)))
    BLOCKS.clear()
    for start in range(0, 16 * N, N):
        assert_reads(source, LONG, start, start + N)
    assert len(BLOCKS.passing._values) == 2
    assert_reads(source, LONG)


# --- texts and lists of any length

TEXTS = ["", "a", "\u00e4\u00f6", "0123456789", "x" * 10]


def write(path, table, rows):
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
        return bj.from_parquet
    feather.write_feather(table, str(path), "uncompressed", chunksize=rows)
    return bj.from_arrow


@pytest.mark.parametrize("end", ["parquet", "arrow"])
def test_texts_as_bytes(end, tmp_path):
    texts = [text.encode() for text in TEXTS] * 3
    path = tmp_path / f"x.{end}"
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()):
        binary = "binary" in str(kind)
        column = pa.array(texts if binary else [text.decode() for text in texts], kind)
        read = write(path, pa.table({"t": column, "n": np.arange(15)}), 4)
        source = read(path, text_bytes=12)
        assert [str(leaf) for leaf in source.leaves] == ["int64[]", "uint8[12]"]
        for start, stop in ((0, 15), (3, 9), (14, 15), (4, 4)):
            found = source.read(start, stop)[1]
            assert [bytes(row).rstrip(b"\0") for row in found] == texts[start:stop]
        assert read(path, text_bytes=10).read(0, 15)[1].shape == (15, 10)
        message = "found a text of 10 bytes, expected at most 9"
        refused(SourceError, message, read(path, text_bytes=9).read, 0, 15)
        refused(StructureError, "text_bytes=64", read, path)
        refused(StructureError, "text_bytes: found 0", read, path, text_bytes=0)
    read = write(path, pa.table({"t": [*TEXTS, None]}), 100)
    refused(SourceError, r"row 5 of it .*found null", read(path, text_bytes=12).read, 0, 6)


LISTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [10, 11]] * 4


@pytest.mark.parametrize("end", ["parquet", "arrow"])
def test_lists_of_any_length(end, tmp_path):
    offsets = np.cumsum([0, *map(len, LISTS)])
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2.0 * offsets[-1])), 2)
    table = pa.table({
        "n": np.arange(len(LISTS), dtype=np.int16),
        "t": pa.array(LISTS, pa.list_(pa.int32())),
        "v": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pairs),
    })  # fmt: skip
    path = tmp_path / f"x.{end}"
    made = write(path, table, 7)(path, buckets=[2, 4, 5])
    for source in (made, open_spec(spec_of(made))):
        assert list(map(str, source.leaves)) == ["bool[5]", "int16[]", "int32[5]", "float64[5, 2]"]
        assert [leaf.ragged for leaf in source.leaves] == [True, False, True, True]
        for start, stop in ((0, 20), (5, 9), (10, 11), (4, 6), (3, 3)):
            for short in (False, True):
                mask, numbers, tokens, vectors = (
                    ShortSource(source).read if short else source.read)(start, stop)  # fmt: skip
                longest = max(map(len, LISTS[start:stop]), default=0)
                rows = next(b for b in (2, 4, 5) if b >= longest) if short else 5
                assert tokens.shape == (stop - start, rows)
                assert numbers.tolist() == list(range(start, stop))
                found = [row[known].tolist() for row, known in zip(tokens, mask, strict=True)]
                assert found == LISTS[start:stop]
                assert not tokens[~mask].any()
                expected = np.arange(2.0 * offsets[start], 2.0 * offsets[stop]).reshape(-1, 2)
                np.testing.assert_array_equal(vectors[mask], expected)


def test_a_program_over_lists_of_any_length(tmp_path):
    rows = sorted(LISTS, key=len)
    pq.write_table(pa.table({"t": pa.array(rows, pa.list_(pa.float32()))}), tmp_path / "x.parquet")

    @bj.program(rows=None)
    def total(data):
        return bj.reduce_sum(bj.map_fn(lambda r: (r["t"] ** 2).sum(where=r["mask"]), data))

    source = bj.from_parquet(tmp_path / "x.parquet", buckets=[1, 3, 5])
    assert "padded to 1/3/5 rows" in str(bj.explain(total, source))
    expected = sum(item**2 for row in rows for item in row)
    for runner in ("local", "DirectRunner"):
        assert bj.run(total, source, runner=runner, options={"shard_size": 8}) == expected


def test_lists_that_do_not_fit(tmp_path):
    path = tmp_path / "x.parquet"

    def read(columns, table, buckets, stop=0):
        pq.write_table(pa.table(table), path)
        bj.from_parquet(path, columns, buckets=buckets).read(0, stop)

    table = {"t": LISTS, "u": [row[:1] for row in LISTS]}
    for buckets in ([], [3, 2], [0, 3], [2.5], [2**40]):
        refused(SourceError, "buckets: found", read, ["t"], table, buckets)
    message = r"row 3 .*found a list of length 5, expected at most 4"
    refused(SourceError, message, read, ["t"], table, [4], 20)
    message = "column 'u'.* row 0 .*length 1, expected 3 as in .* 't'"
    refused(SourceError, message, read, None, table, [5], 20)
    holes = [[1, 2], [3, None], None]
    refused(SourceError, "found null, 1 of them", read, None, {"t": holes}, [5], 3)
    refused(SourceError, r"row 1 .*found null, 1 of them", read, None, {"t": holes[:2]}, [5], 2)
    masked = {"n": [1], "mask": [[1]]}
    refused(StructureError, "found a column 'mask'", read, None, masked, [5])
    refused(StructureError, "no column of lists", read, ["n"], masked, [5])
    deep = {"t": [[[1], [2, 3]]]}
    refused(StructureError, "lists of lists of any length", read, None, deep, [5])


# --- Parquet

X = np.arange(600, dtype=np.float32).reshape(100, 6)
WORD = np.arange(100) % 7
TABLE = table_of({"x": X, "word": WORD}).append_column("text", pa.array(["long text " * 50] * 100))


def test_parquet_however_it_is_written(tmp_path):
    for how in [
        *({"compression": codec} for codec in ("none", "snappy", "gzip", "zstd", "brotli", "lz4")),
        {"use_dictionary": False},
        {"use_dictionary": ["word"]},
        {"data_page_version": "2.0", "data_page_size": 64},
        {"version": "1.0", "store_schema": False},  # Lists of fixed size are lists then.
        {"use_byte_stream_split": ["x"], "use_dictionary": False},
        {"row_group_size": 1},
        {"row_group_size": 7, "write_page_checksum": True},
    ]:
        pq.write_table(TABLE, tmp_path / "x.parquet", **how)
        source = bj.from_parquet(tmp_path / "x.parquet", ["x", "word"])
        assert_reads(source, [WORD, X])
        assert_reads(source, [WORD, X], 30, 61)


def test_only_the_columns_and_row_groups_that_are_needed_are_read(tmp_path, monkeypatch):
    write_parquet(tmp_path / "x.parquet", TABLE, 10)
    parquet_files._FOOTERS.clear()
    opened, begin = [], pq.ParquetFile.__init__
    read, original = [], pq.ParquetFile.read_row_group

    def noted(self, number, columns, **options):
        read.append((number, columns))
        return original(self, number, columns, **options)

    def opening(self, *args, metadata=None, **kwargs):
        opened.append(metadata)
        return begin(self, *args, metadata=metadata, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    monkeypatch.setattr(pq.ParquetFile, "__init__", opening)
    bj.from_parquet(tmp_path / "x.parquet", "word").read(35, 52)
    assert read == [(3, ["word"]), (4, ["word"]), (5, ["word"])]
    assert opened.count(None) == 1  # The footer is read once.


def test_each_file_is_opened_once_where_the_cache_holds_few_footers(tmp_path, monkeypatch):
    for number in range(3):
        write_parquet(tmp_path / f"{number}.parquet", TABLE, len(TABLE))
    source = bj.from_parquet(tmp_path, "x")
    monkeypatch.setattr(parquet_files._FOOTERS, "limit", 0)
    parquet_files._FOOTERS.clear()
    opened, begin = [], pq.ParquetFile.__init__

    def opening(self, source, **kwargs):
        opened.append(source)
        return begin(self, source, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "__init__", opening)
    assert_reads(source, [np.concatenate([X, X, X])])
    assert len(opened) == len(set(opened)) == 3


def test_footers_are_cached_unless_they_are_as_fast_to_read_again(tmp_path):
    cached, path = parquet_files._FOOTERS, tmp_path / "x.parquet"
    large = pa.table({"x": np.sin(np.arange(parquet_files._SMALL_BYTES // 8))})
    for table, group, count in ((TABLE, len(TABLE), 0), (TABLE, 10, 1), (large, len(large), 1)):
        cached.clear()
        write_parquet(path, table, group)
        assert (path.stat().st_size > parquet_files._SMALL_BYTES) == (table is large)
        source = bj.from_parquet(path, "x")
        assert len(cached._values) == count
        source.read(0, 2)
        assert len(cached._values) == count


@pytest.mark.parametrize("late", [0.0, 100.0])
@pytest.mark.parametrize("folder", ["", "day={}/"])
def test_files_share_what_they_have_in_common(tmp_path, folder, late, monkeypatch):
    monkeypatch.setattr(table_opening, "_LATE_SECONDS", late)
    monkeypatch.setattr(table_opening, "_FILE_SECONDS", 0.0)
    threads, head = set(), parquet_files.ParquetFormat.head

    def noted(self, path):
        threads.add(threading.current_thread())
        return head(self, path)

    monkeypatch.setattr(parquet_files.ParquetFormat, "head", noted)
    count = 9 * table_opening._FOOTERS_AT_ONCE  # several for each call of a thread
    for number in range(count):
        path = tmp_path / f"{folder.format(number % 2)}{number:04}.parquet"
        path.parent.mkdir(exist_ok=True)
        columns = {"x": pa.array([number], pa.int32())}
        if number == 40:
            columns["more"] = pa.array([0.5], pa.float32())
        pq.write_table(pa.table(columns), path)
    listed = find_files_in_folders(str(tmp_path), "from_parquet", (".parquet",))
    heads = table_opening._heads(FORMATS["parquet"], listed)
    assert [file.file.path for file, _ in heads] == [path for path, _ in listed]
    assert (threads == {threading.current_thread()}) == bool(late)
    other = [number for number, (_, schema) in enumerate(heads) if "more" in schema.names]
    assert [listed[number][0][-12:] for number in other] == ["0040.parquet"]
    assert len({id(schema) for _, schema in heads}) == 3
    if folder:
        assert len({id(file.folders) for file, _ in heads}) == 2
        assert all(schema.names[-1] == "day" for _, schema in heads)
    numbers = [int(path[-12:-8]) for path, _ in listed]
    assert bj.from_parquet(tmp_path, "x").read(0, count)[0].tolist() == numbers


@pytest.fixture
def pieces(monkeypatch):
    """Row groups are cut after ten rows; gives how often one was begun."""
    begun, original = [], parquet_files._Cursor._restart

    def noted(self):
        begun.append(self._where[0])
        return original(self)

    monkeypatch.setattr(parquet_files._Cursor, "_restart", noted)
    monkeypatch.setattr(parquet_files, "PIECE_BYTES", 10 * (24 + 8))
    parquet_files._CURSORS.clear()
    return begun


def test_big_row_groups_are_read_by_pieces_in_their_order(pieces, tmp_path):
    write_parquet(tmp_path / "x.parquet", TABLE, 43)
    source = bj.from_parquet(tmp_path / "x.parquet", ["x", "word"])
    for start in range(0, 100, 3):
        assert_reads(source, [WORD, X], start, min(start + 3, 100))
    assert pieces == [0, 1]  # The last one has 14 rows, which is not much.
    assert len(BLOCKS.passing._values) == 11
    BLOCKS.clear()
    assert_reads(source, [WORD, X], 5, 8)
    assert_reads(source, [WORD, X])
    assert pieces == [0, 1, 0, 1]


@hypothesis.settings(
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(st.integers(1, 100), st.lists(st.integers(0, 100), min_size=8, max_size=8))
def test_any_range_of_pieces(pieces, tmp_path_factory, rows, ends):
    BLOCKS.clear()
    path = tmp_path_factory.mktemp("x") / "x.parquet"
    write_parquet(path, TABLE, rows)
    source = bj.from_parquet(path, ["x", "word"])
    for start, stop in zip(ends[::2], ends[1::2], strict=True):
        start, stop = sorted((start, stop))
        assert_reads(source, [WORD, X], start, stop)
    numbers = np.array(ends) % 100
    assert_same_bits(take_members(source, numbers), [WORD[numbers], X[numbers]])


def test_threads_read_pieces_here_and_at_a_url(pieces, tmp_path, monkeypatch):
    monkeypatch.setattr(BLOCKS.passing, "limit", 0)
    write_parquet(tmp_path / "x.parquet", TABLE, 100)
    source = bj.from_parquet(tmp_path / "x.parquet", "x")
    read_in_threads(source, X)
    assert_reads(open_spec(spec_of(source)), X, 1, 99)
    assert_reads(bj.from_parquet(f"bjtest:/{tmp_path}/x.parquet", "x"), X)
    parquet_files._CURSORS.clear()


def test_errors_in_pieces_name_the_row(pieces, tmp_path):
    rows = [[1, 2, 3, 4]] * 100
    rows[77] = [5]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": pa.array(rows)}), path, row_group_size=60)
    source = bj.from_parquet(path)
    where = r"row group 1, row 17 of it \(row 77 of the file\): found a list of length 1"
    refused(SourceError, where, source.read, 75, 80)
    refused(SourceError, where, take_members, source, np.array([80, 77, 3]))
    assert_same_bits(take_members(source, np.array([78, 3, 76, 78])), [np.array([rows[0]] * 4)])
    pq.write_table(pa.table({"x": pa.array(rows[:70])}), path)
    refused(SourceError, "the file was changed", source.read, 75, 80)


# --- Arrow


def test_numbers_of_a_local_file_are_a_map_of_it(tmp_path):
    big = np.arange(1 << 20)
    path = save(TABLES["arrow"], tmp_path / "x", {"x": big, "y": big.astype(float)}, 1 << 19)
    before = pa.total_allocated_bytes()
    found = bj.from_arrow(path).read(0, 1 << 19)
    assert pa.total_allocated_bytes() - before < 1 << 16
    assert not any(array.flags.owndata for array in found)
    np.testing.assert_array_equal(found[0], big[: 1 << 19])


def test_files_are_kept_open_but_not_too_many(tmp_path, monkeypatch):
    arrow_files._READERS.clear()
    monkeypatch.setattr(arrow_files._READERS, "limit", 4)
    for i in range(10):
        save(TABLES["arrow"], tmp_path / f"{i}.arrow", {"x": X[:, 0] + i}, 30)
    source = bj.from_arrow(str(tmp_path / "*.arrow"), "x")
    assert_reads(source, np.concatenate([X[:, 0] + i for i in range(10)]))
    assert len(arrow_files._READERS._values) <= 4


def test_dictionaries_over_batches_and_streams(tmp_path):
    words = pa.chunked_array([["a", "b", "a"], ["c", "a"]]).dictionary_encode().combine_chunks()
    numbers = pa.DictionaryArray.from_arrays(words.indices, pa.array([1.5, 2.5, 3.5]))
    table = pa.table({"x": numbers})
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert_reads(bj.from_arrow(tmp_path / "x.arrow", "x"), np.array([1.5, 2.5, 1.5, 3.5, 1.5]))
    with pa.ipc.new_stream(str(tmp_path / "y.arrow"), table.schema) as writer:
        writer.write_table(table)
    message = r"y.arrow: cannot read .* Arrow \(IPC with a footer"
    refused(SourceError, message, bj.from_arrow, tmp_path / "y.arrow")


def test_missing_numbers_and_times_by_choice(form, tmp_path):
    stamps = np.array(["2020-01-01T00:00:00.5", "1969-12-31"], "M8[ns]")
    columns = pa.table(
        {
            "f": pa.array([None, 2.5]),
            "i": pa.array([7, None], pa.int16()),
            "l": pa.array([[1, None], [3, 4]], pa.list_(pa.int8(), 2)),
            "t": pa.array(stamps),
            "d": pa.array([None, 3], pa.date32()),
            "r": pa.array([[1], [None, 3]]),
            "b": pa.array([None, True]),
            "c": pa.array([5, None]).dictionary_encode(),
            "n": pa.array([[1], None]),
        }
    )
    path = save(form, tmp_path / "x", columns)
    numbers = ["c", "f", "i", "l"]
    refused(SourceError, "found null.*fill_null=0", form.read(path, numbers).read, 0, 2)
    message = r'found null.*fill_null=float\("nan"\)'
    refused(SourceError, message, form.read(path, "f").read, 0, 2)
    refused(StructureError, "times=True", form.read, path, ["t"])
    for fill in (-1, 0):
        source = form.read(path, [*numbers, "t", "d"], fill_null=fill, times=True)
        tree = {
            "c": np.array([5, fill]),
            "d": np.array([fill, 3], np.int32),
            "f": np.array([fill, 2.5]),
            "i": np.array([7, fill], np.int16),
            "l": np.array([[1, fill], [3, 4]], np.int8),
            "t": stamps.astype(np.int64),
        }
        for each in (source, open_spec(json.loads(json.dumps(spec_of(source))))):
            assert_reads(each, tree)
    padded = form.read(path, ["r"], buckets=[2], fill_null=9).read(0, 2)
    assert_same_bits(padded, [np.array([[1, 0], [1, 1]], bool), np.array([[1, 0], [9, 3]])])
    source = form.read(path, "f", fill_null=np.nan)
    assert_reads(open_spec(spec_of(source)), np.array([np.nan, 2.5]))
    source = form.read(path, "i", fill_null=0.5)
    refused(SourceError, "column 'i': found fill_null=0.5.*int16", source.read, 0, 2)
    assert_reads(form.read(path, "b", fill_null=0), np.array([False, True]))
    refused(SourceError, "fill_null=-1.*bool", form.read(path, "b", fill_null=-1).read, 0, 2)
    message = r"found null.*expected a list<.*> in each row, which fill_null does not replace"
    refused(SourceError, message, form.read(path, "n", fill_null=0).read, 0, 2)
    columns = pa.table({"s": pa.array([[{"a": 1}]])})
    with pytest.raises(StructureError) as failed:
        form.read(save(form, tmp_path / "y", columns))
    assert str(failed.value).endswith("Write it as numbers.")
    refused(StructureError, "fill_null: found 'a'", form.read, path, "i", fill_null="a")
