"""Tables as columns: only those that are read, fields of structs, names of folders, ORC and CSV."""

import cProfile
import datetime as dt
import decimal
import pstats
import urllib.parse

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import url_files  # noqa: F401 - makes bjtest:// known
from pyarrow import csv, dataset, orc
from source_files import TABLES, N, assert_reads, refused, save

import beamjax as bj
from beamjax.errors import SourceError, StructureError
from beamjax.sources.arrays.data_files import DataFile
from beamjax.sources.source_base import open_spec, spec_of
from beamjax.sources.tables import csv_files
from beamjax.sources.tables.table_files import TableFile, check_unchanged
from beamjax.storage.shared_cache import BLOCKS


@pytest.fixture(autouse=True)
def _no_blocks():
    BLOCKS.clear()


def write_orc(path, table, rows=5):
    orc.write_table(table, str(path), stripe_size=1024, batch_size=rows)


def write_csv(path, table, rows=5):
    csv.write_csv(table, str(path))


FORMATS = {
    **{name: (form.write, form.read) for name, form in TABLES.items()},
    "orc": (write_orc, bj.from_arrow),
    "csv": (write_csv, bj.from_csv),
}


@pytest.fixture(params=FORMATS)
def form(request):
    return FORMATS[request.param]


# --- the columns that are read


@bj.program(placements={"rows": None})
def total(data):
    return bj.reduce_sum(data["b"])


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_program_reads_only_the_columns_that_it_uses(runner, tmp_path, monkeypatch):
    table = pa.table({name: np.arange(N) * (i + 1) for i, name in enumerate("abcd")})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=5)
    read, original = [], pq.ParquetFile.read_row_group

    def noted(self, number, columns, **options):
        read.append(columns)
        return original(self, number, columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    source = bj.from_parquet(tmp_path / "x.parquet")
    assert bj.run(total, source, runner=runner) == 2 * np.arange(N).sum()
    assert read
    assert all(columns == ["b"] for columns in read)
    # A column that can't be read does not matter where it is not used.
    holes = table.append_column("e", pa.nulls(N, pa.int64()))
    pq.write_table(holes, tmp_path / "y.parquet")
    assert bj.run(total, bj.from_parquet(tmp_path / "y.parquet"), runner=runner) == 2 * N * 11


def test_columns_are_selected_with_their_mask(tmp_path):
    lists = [[1], [2, 3], [], [4, 5, 6]]
    table = pa.table({"a": lists, "n": np.arange(4), "z": [[-x for x in row] for row in lists]})
    pq.write_table(table, tmp_path / "x.parquet")
    source = bj.from_parquet(tmp_path / "x.parquet", buckets=[2, 3])
    whole = source.read(0, 4)  # a, mask, n, z
    for used, expected in {
        (0,): [0, 1], (1,): [0, 1], (2,): [2], (3,): [1, 3], (1, 2): [0, 1, 2], (2, 3): [1, 2, 3],
        (0, 1, 2, 3): [0, 1, 2, 3],
    }.items():  # fmt: skip
        selected, leaves = source.select(used)
        assert list(leaves) == expected
        for each in (selected, open_spec(spec_of(selected))):
            assert_reads(each, [whole[leaf] for leaf in leaves])


def calls_with(columns, folder):
    """The function calls of opening and reading a table of so many columns."""
    table = pa.table({f"c{i:04}": np.arange(8.0) for i in range(columns)})
    pq.write_table(table, path := folder / f"{columns}.parquet", row_group_size=4)
    profile = cProfile.Profile()
    profile.enable()
    source = bj.from_parquet(path)
    source.read(0, 8)
    profile.disable()
    return pstats.Stats(profile).total_calls


def test_wide_tables_take_time_in_proportion_to_their_columns(tmp_path):
    calls_with(10, tmp_path)
    few, many = calls_with(50, tmp_path), calls_with(400, tmp_path)
    assert many < 10 * few


class Rows(tuple):
    """The rows of the batches of a file, which are not to be compared one by one."""

    __hash__ = tuple.__hash__

    def __iter__(self):
        raise AssertionError("all batches are looked at")

    __eq__ = __ne__ = __iter__


def test_a_batch_of_a_file_of_many_is_checked_alone():
    file = DataFile("/rows.parquet", 0, "")
    schema = pa.schema({"x": pa.float32()})

    def check(number, rows):
        old = TableFile(file, Rows([5] * 1000))
        check_unchanged(old, "row group", number, rows, schema, ["x"])

    check(3, Rows([5] * 1000))
    check(3, Rows([5] * 4 + [7] * 996))
    with pytest.raises(SourceError, match="found 7 rows in row group 4, expected 5;"):
        check(4, Rows([5] * 4 + [7] * 996))
    with pytest.raises(SourceError, match="found 999 row groups, expected 1000;"):
        check(4, Rows([5] * 999))


# --- fields of structs, decimals, names of folders


def test_fields_of_structs_are_columns(tmp_path):
    rows = [{"x": i, "in": {"y": [i, -i], "z": i / 2}} for i in range(N)]
    table = pa.table({"a": rows, "a.x": np.arange(N) * 10, "n": np.arange(N)})
    numbers = np.arange(N)
    expected = {
        "a.in.y": np.stack([numbers, -numbers], 1),
        "a.in.z": numbers / 2,
        "a.x": numbers * 10,  # The column with this name, rather than the field.
        "n": numbers,
    }
    for name, form in TABLES.items():
        path = save(form, tmp_path / name, table)
        source = form.read(path, ["a.in.y", "a.in.z", "a.x", "n"])
        assert source.treedef == jax.tree.structure(expected)
        assert_reads(source, expected)
        assert_reads(source, expected, 3, 14)
        assert_reads(form.read(path, "a.in.z"), numbers / 2)
        message = r"found no column 'a.in.q'; did you mean '?a.in.[yz]"
        refused(SourceError, message, form.read, path, "a.in.q")
        message = r"column 'a' is of the type struct.*columns=\['a.x', 'a.in.y', 'a.in.z'"
        refused(StructureError, message, form.read, path, "a")
    plain = table.drop_columns(["a.x"])
    names = ["a.in.y", "a.in.z", "a.x", "n"]
    for form in (*TABLES.values(),):
        source = form.read(save(form, tmp_path / "plain", plain))
        assert source.treedef == jax.tree.structure(dict.fromkeys(names, 0))
    path = tmp_path / "x.orc"
    write_orc(path, plain)
    assert_reads(bj.from_arrow(path), [*list(expected.values())[:2], numbers, numbers])


def test_fields_of_missing_structs_are_missing(tmp_path):
    table = pa.table({"a": pa.array([{"x": 1}, None, {"x": None}])})
    for name, form in TABLES.items():
        path = save(form, tmp_path / name, table)
        refused(SourceError, r"column 'a.x'.* row 1 of it.*found null", form.read(path).read, 0, 3)
        assert_reads(form.read(path, fill_null=7), [np.array([1, 7, 7])])


@pytest.mark.parametrize(
    "kind",
    [pa.decimal32(9, 2), pa.decimal64(18, 2), pa.decimal128(12, 2), pa.decimal256(60, 2)],
    ids=str,
)
def test_decimals_by_choice(kind, tmp_path):
    cents = np.random.default_rng(0).integers(-(10**8), 10**8, 500)
    exact = [decimal.Decimal(int(c)).scaleb(-2) for c in cents]
    table = pa.table({"p": pa.array([*exact, None], kind), "l": pa.array([exact[:2]] * 501)})
    for name, form in TABLES.items():
        if name == "parquet" and kind.bit_width < 128:
            continue  # Files of Parquet do not say how many bits a decimal had.
        path = save(form, tmp_path / name, table, rows=100)
        refused(StructureError, r"decimals='float64'", form.read, path, "p")
        source = form.read(path, decimals="float64", fill_null=0)
        floats = np.array([float(value) for value in exact])
        assert_reads(source, {"l": np.tile(floats[:2], (501, 1)), "p": np.array([*floats, 0])})
        source = form.read(path, "p", decimals="int64", fill_null=0)
        assert_reads(open_spec(spec_of(source)), np.array([*cents, 0]))
        refused(
            SourceError,
            r"row 500 of|found null",
            form.read(path, "p", decimals="int64").read,
            0,
            501,
        )


def test_decimals_that_do_not_fit(tmp_path):
    large = pa.array([decimal.Decimal(10) ** 25], pa.decimal128(38, 2))
    for name, form in TABLES.items():
        path = save(form, tmp_path / name, pa.table({"p": large}))
        assert_reads(form.read(path, "p", decimals="float64"), np.array([1e25]))
        refused(
            SourceError,
            "column 'p'.*out of bounds",
            form.read(path, "p", decimals="int64").read,
            0,
            1,
        )
        refused(StructureError, "decimals: found 'float32'", form.read, path, decimals="float32")
        other = pa.table({"p": pa.array([decimal.Decimal("1.5")], pa.decimal128(38, 1))})
        files = [path, save(form, tmp_path / f"{name}-1", other)]
        assert_reads(form.read(files, "p", decimals="float64"), np.array([1e25, 1.5]))
        refused(SourceError, "found the column 'p' of the type", form.read, files, decimals="int64")


def write_partitions(folder, form):
    """Writes a table by the values of two columns; returns it, sorted by the column x."""
    year, country = np.arange(N) % 3 + 2020, np.array(["DE", "a b/ä"])[np.arange(N) % 2]
    table = pa.table({"x": np.arange(N), "year": year, "country": country})
    if form != "orc":  # which pyarrow reads from such folders, but does not write
        kind = dataset.partitioning(table.select(["year", "country"]).schema, flavor="hive")
        dataset.write_dataset(table, folder, format=form, partitioning=kind)
    else:
        for i in range(6):
            part = folder / f"year={year[i]}" / f"country={urllib.parse.quote(country[i], safe='')}"
            part.mkdir(parents=True)
            write_orc(part / "0.orc", table.select(["x"]).take(np.arange(i, N, 6)))
    return dataset.dataset(folder, format=form, partitioning="hive").to_table().sort_by("x")


@pytest.mark.parametrize("form", ["parquet", "feather", "orc", "csv"])
def test_names_of_folders_are_columns(form, tmp_path):
    read = {"parquet": bj.from_parquet, "csv": bj.from_csv}.get(form, bj.from_arrow)
    truth = write_partitions(tmp_path / "t", form)
    for way in (tmp_path / "t", f"bjtest:/{tmp_path}/t/", str(tmp_path / "t/*/*/*")):
        source = read(way, ["x", "year"])
        x, year = source.read(0, len(source))
        at = np.argsort(x)
        np.testing.assert_array_equal(x[at], truth["x"].to_numpy())
        np.testing.assert_array_equal(year[at], truth["year"].to_numpy())
        assert year.dtype == np.int32  # as pyarrow infers it
        alone = read(way, "year")
        np.testing.assert_array_equal(open_spec(spec_of(alone)).read(0, N)[0], year)
    country = read(tmp_path / "t", ["country", "x"], text_bytes=8).read(0, N)
    texts = [bytes(row).rstrip(b"\0").decode() for row in country[0]]
    assert dict(zip(country[1].tolist(), texts, strict=True)) == dict(
        zip(truth["x"].to_pylist(), truth["country"].to_pylist(), strict=True)
    )
    refused(StructureError, "column 'country' is of the type string", read, tmp_path / "t")
    file = next((tmp_path / "t").glob("*/*/*"))
    assert read(file).treedef == jax.tree.structure({"x": 0})  # a file is no folder of them


def test_folders_with_missing_values_and_with_columns_of_the_files(tmp_path):
    for name, x in {"k=1": 1, "k=__HIVE_DEFAULT_PARTITION__": 2}.items():
        (tmp_path / "t" / name).mkdir(parents=True)
        pq.write_table(pa.table({"x": [x]}), tmp_path / "t" / name / "a.parquet")
    refused(SourceError, "column 'k'.*found null", bj.from_parquet(tmp_path / "t").read, 0, 2)
    k, x = bj.from_parquet(tmp_path / "t", fill_null=-1).read(0, 2)
    assert dict(zip(x.tolist(), k.tolist(), strict=True)) == {1: 1, 2: -1}
    (tmp_path / "u" / "x=9").mkdir(parents=True)
    pq.write_table(pa.table({"x": [5]}), tmp_path / "u" / "x=9" / "a.parquet")
    assert_reads(bj.from_parquet(tmp_path / "u"), {"x": np.array([5])})
    pq.write_table(pa.table({"x": [5]}), tmp_path / "t" / "a.parquet")
    refused(SourceError, "found files in folders named k=", bj.from_parquet, tmp_path / "t")


# --- ORC and CSV

NUMBERS = {
    "b": np.arange(N) % 2 == 0,
    "f": np.arange(N) / 4,
    "i": np.arange(N) - 5,
}
DAYS = [dt.datetime(2020, 1, 1) + dt.timedelta(hours=i) for i in range(N)]


def test_every_format_gives_the_same(form, tmp_path):
    write, read = form
    table = pa.table(
        {**NUMBERS, "w": [f"w{i}" for i in range(N)], "t": pa.array(DAYS, "timestamp[s]")}
    )
    first, second = (tmp_path / f"x-{i}.{'orc' if write is write_orc else 'x'}" for i in range(2))
    write(first, table.slice(0, 9))
    write(second, table.slice(9))
    source = read([first, second], text_bytes=3, times=True)
    found = source.read(0, N)

    np.testing.assert_array_equal(found[0], NUMBERS["b"])
    np.testing.assert_array_equal(found[1], NUMBERS["f"])
    np.testing.assert_array_equal(found[2], NUMBERS["i"])
    epoch = np.array(DAYS, "M8[s]").astype(np.int64)
    assert any(np.array_equal(found[3], epoch * factor) for factor in (1, 1000, 10**9))
    assert [bytes(row).rstrip(b"\0") for row in found[4]] == [b"w%d" % i for i in range(N)]
    for each in (source, open_spec(spec_of(source))):
        assert_reads(each, found)
        assert_reads(each, found, 7, 15)
    assert list(source.cuts) == [9]
    message = r"x-0.*: column 'w', .* row 0 of it .*: found a text of 2 bytes"
    refused(SourceError, message, read([first, second], "w", text_bytes=1).read, 0, 3)
    second.write_bytes(first.read_bytes())
    refused(SourceError, "x-1.*: found .* the file was changed", source.read, 9, 12)


def test_stripes_of_orc(tmp_path):
    x = np.random.default_rng(0).normal(size=20000)
    lists = pa.array(list(x.reshape(-1, 2)), pa.list_(pa.float64()))
    orc.write_table(
        pa.table({"x": lists, "n": np.arange(10000)}),
        str(tmp_path / "x.orc"),
        stripe_size=1 << 14,
        batch_size=512,
        compression="zlib",
    )
    source = bj.from_arrow(tmp_path)
    assert orc.ORCFile(str(tmp_path / "x.orc")).nstripes > 1
    assert_reads(source, [np.arange(10000), x.reshape(-1, 2)])
    assert_reads(
        bj.from_arrow(f"bjtest:/{tmp_path}/x.orc"), [np.arange(10000), x.reshape(-1, 2)], 2000, 9000
    )
    (tmp_path / "x.orc").write_bytes(b"ORC")
    refused(SourceError, r"x\.orc: cannot read .*a file of ORC", bj.from_arrow, tmp_path / "x.orc")


def test_blocks_of_csv(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 64)
    lines = [f"{i},{i / 4 if i > 50 else i},{i % 7 or ''}" for i in range(100)]
    (tmp_path / "x.csv").write_text("\n".join(["i,f,m", *lines]))
    source = bj.from_csv(tmp_path / "x.csv", fill_null=0)
    i = np.arange(100)
    expected = [np.where(i > 50, i / 4, i), i, i % 7]
    assert [str(leaf) for leaf in source.leaves] == ["float64[]", "int64[]", "int64[]"]
    for each in (
        source,
        open_spec(spec_of(source)),
        bj.from_csv(f"bjtest:/{tmp_path}/x.csv", fill_null=0),
    ):
        assert_reads(each, expected)
        for start in range(0, 100, 9):
            assert_reads(each, expected, start, min(start + 10, 100))
    where = r"x.csv: column 'm', block \d+, row \d+ of it \(row 14 of the file\): found null"
    refused(SourceError, where, bj.from_csv(tmp_path / "x.csv", "m").read, 14, 15)
    truth = csv.read_csv(tmp_path / "x.csv")
    np.testing.assert_array_equal(truth["f"].to_numpy(), expected[0])
    total = bj.program(lambda x: bj.reduce_sum(x), rows=None)
    assert bj.run(total, bj.from_csv(tmp_path / "x.csv", "i"), runner="DirectRunner") == 4950


def test_csv_of_other_programs(tmp_path):
    (tmp_path / "x.tsv").write_bytes(b'a\t"b c"\r\n1\t"2"\r\n\r\n3\t4\r\n')
    assert_reads(bj.from_csv(tmp_path / "x.tsv"), {"a": np.array([1, 3]), "b c": np.array([2, 4])})
    (tmp_path / "x.csv").write_text("zip\n00123\nABC\n")
    refused(StructureError, "column 'zip' is of the type string", bj.from_csv, tmp_path / "x.csv")
    (tmp_path / "y.csv").write_text("zip\n00123\n")
    files = [tmp_path / "x.csv", tmp_path / "y.csv"]  # A text in one file is a text in all.
    found = bj.from_csv(files, "zip", text_bytes=5).read(0, 3)[0]
    assert [bytes(row).rstrip(b"\0") for row in found] == [b"00123", b"ABC", b"00123"]
    (tmp_path / "x.csv.gz").write_bytes(b"\x1f\x8b")
    refused(SourceError, "compressed file.*from_chunks", bj.from_csv, tmp_path / "x.csv.gz")
    (tmp_path / "z.csv").write_text("a,b\n1,2\n3\n")
    refused(
        SourceError, r"z\.csv: cannot read .*Expected 2 columns", bj.from_csv, tmp_path / "z.csv"
    )
    (tmp_path / "z.csv").write_text("")
    refused(SourceError, r"z\.csv: cannot read", bj.from_csv, tmp_path / "z.csv")
    (tmp_path / "z.csv").write_text("a,b\n")
    refused(StructureError, "column 'a' is of the type null", bj.from_csv, tmp_path / "z.csv")
