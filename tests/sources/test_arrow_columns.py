"""Columns of Arrow as arrays: every type against what pyarrow itself gives, and what is refused."""

import numpy as np
import pyarrow as pa
from source_files import NUMBERS, lists, random_bits, refused

from beamjax.errors import SourceError, StructureError
from beamjax.sources.source_base import LeafSpec
from beamjax.sources.tables.arrow_columns import Batch, arrow_readable, known_shape, to_rows
from beamjax.sources.tables.arrow_types import RowType, agree, chosen, row_type

BATCH = Batch("file.parquet", "row group", 3, 0, 100)
F32 = np.dtype(np.float32)


def numbers(dtype, shape):
    found = random_bits(dtype, shape)
    return np.nan_to_num(found) if found.dtype.kind == "f" else found


def rows(column):
    """What the library makes of a column, by the shape that its type or its first row tells."""
    found_type = row_type(pa.schema([("x", column.type)]), "x", "file")
    shape, dtype, _ = found_type
    if None in shape:
        shape = known_shape(column, "x", BATCH, found_type)
    found = to_rows(column, "x", LeafSpec(shape, dtype), BATCH)
    assert (found.dtype, found.shape) == (dtype, (len(column), *shape))
    assert not found.flags.writeable
    return found


KINDS = {
    "numbers": lambda dtype, kind: pa.array(numbers(dtype, (7,))),
    "fixed lists": lambda dtype, kind: lists(numbers(dtype, (7, 3))),
    "nested fixed lists": lambda dtype, kind: lists(numbers(dtype, (7, 2, 3))),
    "lists": lambda dtype, kind: lists(numbers(dtype, (7, 3))).cast(pa.list_(kind)),
    "large lists": lambda dtype, kind: lists(numbers(dtype, (7, 3))).cast(pa.large_list(kind)),
    "list views": lambda dtype, kind: pa.array(numbers(dtype, (7, 3)).tolist(), pa.list_view(kind)),
    "lists of lists": lambda dtype, kind: pa.array(
        numbers(dtype, (7, 2, 3)).tolist(), pa.list_(pa.list_(kind))
    ),
    "lists of fixed lists": lambda dtype, kind: pa.array(
        numbers(dtype, (7, 2, 3)).tolist(), pa.list_(pa.list_(kind, 3))
    ),
    "fixed lists of large lists": lambda dtype, kind: pa.array(
        numbers(dtype, (7, 2, 3)).tolist(), pa.list_(pa.large_list(kind), 2)
    ),
}


def test_every_type_is_what_pyarrow_says():
    faults = []
    for name, make in KINDS.items():
        for dtype in NUMBERS:
            column = make(dtype, pa.from_numpy_dtype(np.dtype(dtype)))
            expected = np.array(column.to_pylist(), dtype)
            part = column.slice(2, 4)  # Begins inside of its buffers, and of a byte of bools.
            chunked = pa.chunked_array([column.slice(0, 3), column.slice(3)])
            found = to_rows(chunked, "x", LeafSpec(rows(column).shape[1:], F32), BATCH)
            good = [
                np.array_equal(rows(column), expected),
                np.array_equal(rows(part), expected[2:6]),
                np.array_equal(found, expected),
            ]
            if not all(good):
                faults.append((name, dtype, good))
    assert faults == []


def test_dictionaries_tensors_and_binary():
    column = pa.array([1.5, 2.5, 1.5, 8]).dictionary_encode()
    np.testing.assert_array_equal(rows(column), [1.5, 2.5, 1.5, 8])
    pairs = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1]), pa.array([[1, 2], [3, 4]]))
    np.testing.assert_array_equal(rows(pairs), [[3, 4], [1, 2], [3, 4]])
    for permutation in (None, [0, 1, 2], [2, 1, 0], [0, 2, 1]):
        kind = pa.fixed_shape_tensor(pa.int32(), [2, 3, 4], permutation=permutation)
        column = pa.ExtensionArray.from_storage(kind, lists(numbers("int32", (5, 24))))
        expected = column.to_numpy_ndarray()
        np.testing.assert_array_equal(rows(column), expected)
        np.testing.assert_array_equal(rows(column.slice(1, 3)), expected[1:4])
        pairs = pa.ListArray.from_arrays(pa.array([0, 2, 4]), column)
        expected = expected[:4].reshape(2, 2, *expected.shape[1:])
        np.testing.assert_array_equal(rows(pairs), expected)
    values = [b"abcd", b"\x00\x01\x02\xff", b"wxyz"]
    column = pa.array(values, pa.binary(4))
    expected = np.frombuffer(b"".join(values), np.uint8).reshape(3, 4)
    np.testing.assert_array_equal(rows(column), expected)
    np.testing.assert_array_equal(rows(column.slice(1, 1)), expected[1:2])
    assert rows(pa.array([b""] * 3, pa.binary(0))).shape == (3, 0)


def test_numbers_are_not_copied():
    column = lists(np.arange(60.0).reshape(10, 2, 3))
    assert np.shares_memory(rows(column), column.flatten().flatten().to_numpy())
    ragged = column.flatten().slice(4, 10).cast(pa.list_(pa.float64()))
    assert np.shares_memory(rows(ragged), ragged.flatten().to_numpy())


def test_rows_that_are_missing_or_ragged():
    null, dictionary = r"row {} of it \(row 10{} of the file\): found null", pa.DictionaryArray
    length = "row {} .*found a list of length {}, expected {}"
    for column, shape, message in [
        (pa.array([1, None, 3]), (), null.format(1, 1) + ", 1 of them"),
        (pa.array([[1, 2], [3]]), (2,), length.format(1, 1, 2)),
        (pa.array([[1, 2], None]), (2,), null.format(1, 1)),
        (pa.array([[1, 2], [3, None]]), (2,), null.format(1, 1)),
        (pa.array([[[1], [2]], [[3], [4, 5]]]), (2, 1), length.format(1, 2, 1)),
        (pa.array([[[1], [2]], [[3], None]]), (2, 1), null.format(1, 1)),
        (pa.array([[], [1], []]), (0,), length.format(1, 1, 0)),
        (pa.array([1, 2, None]).dictionary_encode(), (), null.format(2, 2)),
        (dictionary.from_arrays(pa.array([1, 0]), pa.array([None, 2.5])), (), null.format(1, 1)),
        (pa.array([[1, 2], [3, None]], pa.list_(pa.int8(), 2)), (2,), null.format(1, 1)),
        (pa.array([b"ab", None], pa.binary(2)), (2,), null.format(1, 1)),
        (pa.chunked_array([[1, 2], [3, 4], [5, None]]), (), null.format(5, 5)),
        (pa.chunked_array([[[1]], [[2], [3, 4]]]), (1,), length.format(2, 2, 1)),
    ]:
        message = f"file.parquet: column 'x', row group 3, {message}"
        refused(SourceError, message, to_rows, column, "x", LeafSpec(shape, F32), BATCH)


def test_columns_of_other_than_numbers():
    tensor = pa.fixed_shape_tensor(pa.int8(), [2, 3, 4], permutation=[2, 0, 1])
    for kind in (
        *(pa.string(), pa.large_string(), pa.binary(), pa.list_(pa.string()), pa.null()),
        *(pa.timestamp("ns"), pa.date32(), pa.time64("us"), pa.duration("s"), pa.uuid()),
        *(pa.decimal128(10, 2), pa.struct([]), pa.map_(pa.int8(), pa.int8())),
        *(pa.dictionary(pa.int8(), pa.string()), pa.run_end_encoded(pa.int32(), pa.int8())),
        *(pa.bool8(), tensor, pa.month_day_nano_interval()),
    ):
        schema = pa.schema([("x", kind), ("a", pa.int8()), ("b", pa.list_(pa.int8()))])
        message = r"file: column 'x' is of the type .*columns=\['a', 'b'\]"
        refused(StructureError, message, row_type, schema, "x", "file")


def test_which_columns_are_chosen():
    schema = pa.schema([(name, pa.int8()) for name in ("x", "weight", "a", "t", "t")])
    for columns, error, message in [
        ("wieght", SourceError, "file: found no column 'wieght'; did you mean 'weight'. There are"),
        (
            ["x", "qqq"],
            SourceError,
            "found no column 'qqq'. There are 'x', 'weight', 'a', 't', 't'",
        ),
        ("t", SourceError, "found 2 columns named 't'"),
        (None, SourceError, "found 2 columns named 't'"),
        ([], StructureError, "who: found no columns"),
        (3, StructureError, "who: found columns=3"),
        ({"x": 1}, StructureError, "who: found columns={'x': 1}"),
        (["x", 1], StructureError, r"who: found columns=\['x', 1\]"),
    ]:
        refused(error, message, chosen, schema, columns, "file", "who")
    # In the order of the keys of dictionaries.
    for columns, names in [(("x", "a", "x"), ["a", "x"]), ("a", ["a"])]:
        assert chosen(schema, columns, "file", "who") == names
    assert chosen(pa.schema(list(schema)[:3]), None, "file", "who") == ["a", "weight", "x"]


def test_which_columns_agree():
    def same(first, other):
        return agree(RowType(*first), RowType(*other))

    assert same(((2, None), F32), ((2, 3), F32))
    assert same(((None,), F32), ((None,), F32))
    assert not same(((2,), F32), ((3,), F32))
    assert not same(((2,), F32), ((), F32))
    assert not same(((), F32), ((), np.dtype(np.float64)))
    assert not same(((), F32, "time32[s]"), ((), F32, "time32[ms]"))


def test_all_errors_of_arrow_name_the_file():
    def fails(name):
        with arrow_readable("file", "a table"):
            raise getattr(pa, f"Arrow{name}")("why")

    for name in ("Invalid", "KeyError", "NotImplementedError", "TypeError"):
        refused(SourceError, "file: cannot read .*why.*expected a table", fails, name)
