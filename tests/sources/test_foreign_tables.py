"""Tables of other programs: files that differ, old types, and columns that cannot be read."""

import base64
import contextlib
import datetime as dt
import os
import resource
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from pyarrow import csv, orc
from source_files import TABLES, N, assert_reads, refused, save

import beamjax as bj
from beamjax.errors import SourceError, StructureError
from beamjax.sources.tables import parquet_files
from beamjax.storage.shared_cache import BLOCKS

DAYS = [dt.datetime(2020, 1, 1), dt.datetime(1969, 12, 31)]


@pytest.fixture(params=TABLES)
def form(request):
    BLOCKS.clear()
    return TABLES[request.param]


def times(unit, zone=None):
    return pa.array(DAYS, pa.timestamp(unit, zone))


DIFFERENT = {
    "units": (times("ms"), times("us")),
    "units of lists": (pa.array([DAYS], pa.list_(pa.timestamp("us"))),
                       pa.array([DAYS], pa.list_(pa.timestamp("ns")))),
    "units in dictionaries": (times("us"), times("ns").dictionary_encode()),
    "a number and a time": (pa.array([1, 2]), times("us")),
    "a time and a number": (times("us"), pa.array([1, 2])),
    "without and with a zone": (times("us"), times("us", "UTC")),
    "a date and a time of day": (pa.array([0], pa.date32()), pa.array([0], pa.time32("ms"))),
    "units of durations": (pa.array([1], pa.duration("ms")), pa.array([1], pa.duration("us"))),
    "signs": (pa.array([1], pa.int32()), pa.array([1], pa.uint32())),
    "widths": (pa.array([1], pa.int32()), pa.array([1], pa.int64())),
    "sizes of lists": (pa.array([[1, 2]], pa.list_(pa.int8(), 2)),
                       pa.array([[1]], pa.list_(pa.int8(), 1))),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_files_with_different_types_of_a_column(form, case, tmp_path):
    columns = DIFFERENT[case]
    # Parquet stores durations and zones of Arrow as metadata only, and each unit as it is.
    files = [
        save(form, tmp_path / name, pa.table({"n": pa.array([0] * len(column)), "t": column}))
        for name, column in zip("ab", columns, strict=True)
    ]
    for chosen in (None, "t"):
        error = refused(
            SourceError, "/b: found the column 't'", form.read, files, chosen, times=True
        )
        assert f"as in {files[0]}" in str(error)
    assert_reads(form.read(files, "n"), np.zeros(sum(map(len, columns)), np.int64))


def test_files_that_store_the_same_values_in_other_ways(form, tmp_path):
    moments = np.array(DAYS, "M8[us]").astype(np.int64)
    tables = [
        {"i": pa.array([1, 2]), "t": times("us", "UTC")},
        {"i": pa.array([3, 4]).dictionary_encode(), "t": times("us", "Asia/Tokyo")},
        pa.table(
            [pa.array([5, 6]), times("us", "UTC")],
            pa.schema([pa.field("i", pa.int64(), False), ("t", pa.timestamp("us", "UTC"))]),
        ),
    ]
    files = [save(form, tmp_path / str(n), pa.table(t)) for n, t in enumerate(tables)]
    source = form.read(files, times=True)
    assert_reads(source, {"i": np.arange(1, 7), "t": np.tile(moments, 3)})


def test_scales_of_decimals(form, tmp_path):
    files = [
        save(form, tmp_path / name, pa.table({"x": pa.array([1], kind)}))
        for name, kind in {"a": pa.float64(), "b": pa.decimal128(9, 2)}.items()
    ]
    refused(StructureError, "/b: column 'x' is of the type decimal128", form.read, files)


# --- times of INT96, as Spark and Impala write them


def write_int96(path, moments, **options):
    column = pa.array(moments, pa.timestamp("us"))
    table = pa.table(
        {"l": pa.array([[m] for m in moments]), "n": np.arange(len(column)), "t": column}
    )
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, **options)
    return str(path)


def test_times_of_int96_are_nanoseconds(tmp_path):
    moments = [dt.datetime(1678, 1, 1), dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
               dt.datetime(2262, 1, 1)]  # fmt: skip
    path = write_int96(tmp_path / "x.parquet", moments)
    expected = np.array(moments, "M8[ns]").astype(np.int64)
    source = bj.from_parquet(path, times=True)
    assert_reads(source, {"l": expected[:, None], "n": np.arange(3), "t": expected})
    other = save(
        TABLES["parquet"], tmp_path / "y", pa.table({"t": pa.array(moments, "timestamp[us]")})
    )
    refused(
        SourceError, r"/y: found the column 't'", bj.from_parquet, [path, other], "t", times=True
    )


@pytest.mark.parametrize("year", [1, 1500, 2263, 9999])
@pytest.mark.parametrize("column", ["t", "l"])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_times_of_int96_do_not_wrap_around(year, column, in_pieces, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "PIECE_BYTES", 16 if in_pieces else 1 << 26)
    path = write_int96(tmp_path / "x.parquet", [*DAYS * 3, dt.datetime(year, 6, 1)])
    message = rf"x\.parquet: column '{column}', row group 0: found a time of INT96 outside"
    refused(SourceError, message, lambda: bj.from_parquet(path, column, times=True).read(0, 7))
    assert_reads(bj.from_parquet(path, "n"), np.arange(7))


# --- columns that can't be read, beside others


class Keys(encryption.KmsClient):
    def wrap_key(self, key, master):
        return base64.b64encode(key)

    def unwrap_key(self, wrapped, master):
        return base64.b64decode(wrapped)


def write_encrypted(path, table, columns):
    config = encryption.EncryptionConfiguration(
        "footer", column_keys={"column": columns}, plaintext_footer=True, double_wrapping=False
    )
    factory = encryption.CryptoFactory(lambda _: Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), config)
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_column_beside_an_encrypted_one(in_pieces, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "PIECE_BYTES", 16 if in_pieces else 1 << 26)
    table = pa.table({"plain": np.arange(N), "secret": np.arange(N), "words": ["a"] * N})
    write_encrypted(path := tmp_path / "x.parquet", table, ["secret"])
    assert_reads(bj.from_parquet(path, "plain"), np.arange(N))
    for columns in ("secret", ["plain", "secret"]):
        source = bj.from_parquet(path, columns)
        error = refused(SourceError, r"x\.parquet: cannot read .*ecrypt", source.read, 0, N)
        assert "'secret' can't be read" in str(error)


def with_months(table):
    """The bytes of a table whose interval is of months, which pyarrow reads but does not write."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    for at in range(len(data) - 1, 0, -1):
        if data[at] == 2:
            changed = data[:at] + b"\0" + data[at + 1 :]
            with contextlib.suppress(pa.ArrowException):
                if "month_interval" in str(pa.ipc.open_file(pa.BufferReader(changed)).schema):
                    return changed
    raise AssertionError("no byte is that of the unit")


@pytest.mark.parametrize("first", ["span", "x"])
def test_a_column_beside_an_interval(first, tmp_path):
    spans = pa.array([pa.MonthDayNano([1, 2, 3])] * N, pa.month_day_nano_interval())
    columns = {"span": spans, "x": np.arange(N)}
    table = pa.table({first: columns.pop(first), **columns})
    (path := tmp_path / "x.arrow").write_bytes(with_months(table))
    assert_reads(bj.from_arrow(path, "x"), np.arange(N))
    message = r"x\.arrow: column 'span' is of the type month_interval, expected bool"
    for chosen in (None, "span"):
        refused(StructureError, message, bj.from_arrow, path, chosen)
    whole = pa.table({"s": spans, "x": np.arange(N)})
    path = save(TABLES["arrow"], tmp_path / "y", whole)
    assert_reads(bj.from_arrow(path, "x"), np.arange(N))
    refused(StructureError, "/y: column 's' is of the type month_day_nano", bj.from_arrow, path)


# --- texts


def padded(words, width):
    """Texts as uint8 with zeros after them."""
    flat = [list(word.encode().ljust(width, b"\0")) for word in np.ravel(words)]
    return np.array(flat, np.uint8).reshape(*np.shape(words), width)


def test_lists_of_texts(form, tmp_path):
    words = [["ab", "c"], ["d", "é"], ["", "xyz"]]
    path = save(form, tmp_path / "x", pa.table({"w": words}))
    assert_reads(form.read(path, "w", text_bytes=4), padded(words, 4))
    message = r"/x: column 'w', .* row 2 of it .*: found a text of 3 bytes, expected at most 2"
    refused(SourceError, message, form.read(path, "w", text_bytes=2).read, 0, 3)
    words = [["ab"], [], ["d", "ef"], ["g", "too long"]]
    path = save(form, tmp_path / "x", pa.table({"w": words}))
    source = form.read(path, text_bytes=2, buckets=[1, 2])
    mask = np.array([[1, 0], [0, 0], [1, 1]], bool)
    full = padded([["ab", ""], ["", ""], ["d", "ef"]], 2)
    assert_reads(source, {"mask": mask, "w": full}, 0, 3)
    refused(SourceError, r"/x: column 'w', .* row 3 of it .*: found a text", source.read, 3, 4)
    path = save(form, tmp_path / "x", pa.table({"w": [["a"], ["b", None]]}))
    for fill in (None, 0):
        source = form.read(path, text_bytes=2, buckets=[2], fill_null=fill)
        refused(SourceError, r"/x: column 'w', .* row 1 of it .*: found null", source.read, 0, 2)


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary_view", "binary"])
def test_categoricals(kind, tmp_path):
    words = pa.array(["a", "bb", "ccc"]).cast(getattr(pa, kind)())
    codes = np.array([2, 0, 1, 0, 2], np.uint32)
    column = pa.DictionaryArray.from_arrays(pa.array(codes), words)
    path = save(TABLES["arrow"], tmp_path / "x", pa.table({"w": column}))
    source = bj.from_arrow(path, "w", text_bytes=4)
    assert_reads(source, padded(np.array(["a", "bb", "ccc"])[codes], 4))
    refused(
        SourceError,
        "/x: column 'w'.*a text of 3",
        bj.from_arrow(path, "w", text_bytes=2).read,
        0,
        5,
    )
    with_null = pa.DictionaryArray.from_arrays(pa.array([0, None], pa.uint32()), words)
    path = save(TABLES["arrow"], tmp_path / "y", pa.table({"w": with_null}))
    refused(
        SourceError, "/y: column 'w'.*found null", bj.from_arrow(path, "w", text_bytes=4).read, 0, 2
    )


def test_deltas_of_dictionaries(tmp_path):
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    words = ["a", "b", "c", "d"]
    schema = pa.schema([("w", pa.dictionary(pa.int32(), pa.string()))])
    with pa.ipc.new_file(str(path := tmp_path / "x.arrow"), schema, options=options) as writer:
        for known in (2, 3, 4):
            codes = pa.array([known - 1, 0], pa.int32())
            batch = pa.DictionaryArray.from_arrays(codes, pa.array(words[:known]))
            writer.write_batch(pa.record_batch([batch], schema))
        assert writer.stats.num_dictionary_deltas == 2
    source = bj.from_arrow(path, "w", text_bytes=1)
    assert_reads(source, padded(["b", "a", "c", "a", "d", "a"], 1))
    assert_reads(source, padded(["b", "a"], 1), 0, 2)


# --- many row groups, many files, no rows


def test_row_groups_of_one_row(tmp_path):
    rows = np.arange(1500.0)
    table = pa.table({"x": rows, "y": -rows})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1)
    source = bj.from_parquet(tmp_path / "x.parquet")
    assert_reads(source, [rows, -rows])
    assert_reads(bj.take(source, [3, 700, 1499]), [rows[[3, 700, 1499]], -rows[[3, 700, 1499]]])


@pytest.mark.parametrize("end", ["parquet", "arrow", "orc", "csv"])
def test_more_files_than_a_process_may_open(end, tmp_path):
    write = {
        "parquet": lambda table, path: pq.write_table(table, path),
        "arrow": lambda table, path: save(TABLES["arrow"], path, table),
        "orc": lambda table, path: orc.write_table(table, str(path)),
        "csv": lambda table, path: csv.write_csv(table, str(path)),
    }[end]
    write(pa.table({"x": np.arange(2)}), tmp_path / f"0.{end}")
    for number in range(1, 300):
        shutil.copy(tmp_path / f"0.{end}", tmp_path / f"{number}.{end}")
    read = {"parquet": bj.from_parquet, "csv": bj.from_csv}.get(end, bj.from_arrow)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd" if os.path.isdir("/proc") else "/dev/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 120, limits[1]))
    try:
        source = read(tmp_path)
        assert_reads(source, {"x": np.tile([0, 1], 300)})
        assert_reads(source, {"x": np.tile([0, 1], 300)}, 137, 411)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_files_without_rows(tmp_path):
    full, none = pa.table({"x": np.arange(3.0)}), pa.table({"x": np.zeros(0)})
    for end, write, read in (
        ("parquet", pq.write_table, bj.from_parquet),
        ("orc", lambda table, path: orc.write_table(table, str(path)), bj.from_arrow),
    ):
        paths = [tmp_path / f"{number}.{end}" for number in range(3)]
        for table, path in zip((none, full, none), paths, strict=True):
            write(table, path)
        assert_reads(read(paths), {"x": np.arange(3.0)})
        assert_reads(read(paths[0]), {"x": np.zeros(0)})
