"""Columns of Arrow as arrays: every type against what pyarrow itself gives, and what is refused."""

import hypothesis
import hypothesis.extra.numpy as hnp
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from beamjax.errors import SourceError, StructureError
from beamjax.sources.arrow_columns import Batch, arrow_readable, known_shape, to_rows
from beamjax.sources.arrow_types import agree, chosen, row_type

BATCH = Batch("file.parquet", "row group", 3, 0, 100)
NUMBERS = [
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bool"),
]
F32 = np.dtype(np.float32)


def numbers(dtype, shape, seed=0):
    if np.dtype(dtype) == np.bool_:
        return np.random.default_rng(seed).integers(0, 2, shape).astype(bool)
    data = np.random.default_rng(seed).integers(
        0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8
    )
    found = data.view(dtype).reshape(shape)
    return np.nan_to_num(found) if found.dtype.kind == "f" else found


def fixed(array):
    """An Arrow array of fixed-size lists, an axis each."""
    made = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        made = pa.FixedSizeListArray.from_arrays(made, size)
    return made


def rows(column, name="x"):
    """What the library makes of a column, by the shape that its type or its first row tells."""
    shape, dtype = row_type(pa.schema([(name, column.type)]), name, "file")
    if None in shape:
        shape = known_shape(column, name, BATCH)
    found = to_rows(column, name, shape, BATCH)
    assert found.dtype == dtype
    assert found.shape == (len(column), *shape)
    assert not found.flags.writeable
    return found


def listed(column, dtype):
    """The same as pyarrow's own Python objects say."""
    return np.array(column.to_pylist(), dtype)


KINDS = {
    "numbers": lambda dtype: pa.array(numbers(dtype, (7,))),
    "fixed lists": lambda dtype: fixed(numbers(dtype, (7, 3))),
    "nested fixed lists": lambda dtype: fixed(numbers(dtype, (7, 2, 3))),
    "lists": lambda dtype: fixed(numbers(dtype, (7, 3))).cast(pa.list_(pa.from_numpy_dtype(dtype))),
    "large lists": lambda dtype: fixed(numbers(dtype, (7, 3))).cast(
        pa.large_list(pa.from_numpy_dtype(dtype))
    ),
    "lists of lists": lambda dtype: pa.array(
        numbers(dtype, (7, 2, 3)).tolist(), pa.list_(pa.list_(pa.from_numpy_dtype(dtype)))
    ),
    "list views": lambda dtype: pa.array(
        numbers(dtype, (7, 3)).tolist(), pa.list_view(pa.from_numpy_dtype(dtype))
    ),
}


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_what_pyarrow_says(kind, dtype):
    column = KINDS[kind](dtype)
    np.testing.assert_array_equal(rows(column), listed(column, dtype))
    part = column.slice(2, 4)  # begins inside of its buffers, and for bools inside of a byte
    np.testing.assert_array_equal(rows(part), listed(part, dtype))
    chunked = pa.chunked_array([column.slice(0, 3), column.slice(3)])
    found = to_rows(chunked, "x", rows(column).shape[1:], BATCH)
    np.testing.assert_array_equal(found, listed(column, dtype))


def test_dictionaries_are_decoded():
    column = pa.array([1.5, 2.5, 1.5, 8]).dictionary_encode()
    np.testing.assert_array_equal(rows(column), [1.5, 2.5, 1.5, 8])
    lists = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1]), pa.array([[1, 2], [3, 4]]))
    np.testing.assert_array_equal(rows(lists), [[3, 4], [1, 2], [3, 4]])


@pytest.mark.parametrize("permutation", [None, [0, 1, 2], [2, 1, 0], [0, 2, 1]])
def test_tensors(permutation):
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3, 4], permutation=permutation)
    storage = fixed(numbers("int32", (5, 24)))
    column = pa.ExtensionArray.from_storage(kind, storage)
    np.testing.assert_array_equal(rows(column), column.to_numpy_ndarray())
    np.testing.assert_array_equal(rows(column.slice(1, 3)), column.to_numpy_ndarray()[1:4])
    pairs = pa.ListArray.from_arrays(pa.array([0, 2, 4]), column)
    expected = column.to_numpy_ndarray()[:4].reshape(2, 2, *column.to_numpy_ndarray().shape[1:])
    np.testing.assert_array_equal(rows(pairs), expected)


def test_binary_of_one_width_is_bytes():
    values = [b"abcd", b"\x00\x01\x02\xff", b"wxyz"]
    column = pa.array(values, pa.binary(4))
    expected = np.frombuffer(b"".join(values), np.uint8).reshape(3, 4)
    np.testing.assert_array_equal(rows(column), expected)
    np.testing.assert_array_equal(rows(column.slice(1, 1)), expected[1:2])
    assert rows(pa.array([b""] * 3, pa.binary(0))).shape == (3, 0)


def test_numbers_are_not_copied():
    column = fixed(np.arange(60.0).reshape(10, 2, 3))
    assert np.shares_memory(rows(column), column.flatten().flatten().to_numpy())
    lists = column.flatten().slice(4, 10).cast(pa.list_(pa.float64()))
    assert np.shares_memory(rows(lists), lists.flatten().to_numpy())


@hypothesis.settings(deadline=None, derandomize=True, max_examples=100)
@hypothesis.given(
    hnp.arrays(
        st.sampled_from(NUMBERS).map(np.dtype),
        hnp.array_shapes(min_dims=1, max_dims=4, max_side=4),
    ),
    st.data(),
)
def test_any_lists_of_one_shape(array, data):
    made = pa.array(array.reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        size, kind = array.shape[axis], data.draw(st.sampled_from(["fixed", "list", "large"]))
        if kind == "fixed":
            made = pa.FixedSizeListArray.from_arrays(made, size)
        else:
            ends = pa.array(np.arange(len(made) // size + 1) * size)
            cls = pa.ListArray if kind == "list" else pa.LargeListArray
            made = cls.from_arrays(ends.cast(pa.int32() if kind == "list" else pa.int64()), made)
    start = data.draw(st.integers(0, len(array) - 1))
    stop = data.draw(st.integers(start + 1, len(array)))
    np.testing.assert_array_equal(rows(made.slice(start, stop - start)), array[start:stop])


# --- what is refused


@pytest.mark.parametrize(
    ("column", "shape", "message"),
    [
        (pa.array([1, None, 3]), (), r"row 1 of it \(row 101 of the file\): found null, 1 of them"),
        (pa.array([[1, 2], [3]]), (2,), r"row 1 .*found a list of length 1, expected 2 as in the"),
        (pa.array([[1, 2], None]), (2,), "row 1 of it .*found null"),
        (pa.array([[1, 2], [3, None]]), (2,), "row 1 of it .*found null"),
        (pa.array([[[1], [2]], [[3], [4, 5]]]), (2, 1), "row 1 .*found a list of length 2, exp"),
        (pa.array([[[1], [2]], [[3], None]]), (2, 1), "row 1 of it .*found null"),
        (pa.array([[], [1], []]), (0,), "row 1 of it .*found a list of length 1, expected 0"),
        (pa.array([1, 2, None]).dictionary_encode(), (), "row 2 of it .*found null"),
        (
            pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array([None, 2.5])),
            (),
            "row 1 of it .*found null",
        ),
        (pa.array([[1, 2], [3, None]], pa.list_(pa.int8(), 2)), (2,), "row 1 of it .*found null"),
        (pa.array([b"ab", None], pa.binary(2)), (2,), "row 1 of it .*found null"),
        (pa.chunked_array([[1, 2], [3, 4], [5, None]]), (), r"row 5 of it \(row 105 of the file"),
        (pa.chunked_array([[[1]], [[2], [3, 4]]]), (1,), r"row 2 of it .*found a list of length 2"),
    ],
    ids=str,
)
def test_rows_that_are_missing_or_ragged(column, shape, message):
    with pytest.raises(SourceError, match=f"file.parquet: column 'x', row group 3, {message}"):
        to_rows(column, "x", shape, BATCH)


NO_NUMBERS = [
    *(
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.timestamp("ns"),
        pa.date32(),
        pa.time64("us"),
    ),
    *(pa.duration("s"), pa.decimal128(10, 2), pa.null(), pa.struct([("a", pa.int8())])),
    *(pa.map_(pa.int8(), pa.int8()), pa.list_(pa.string()), pa.dictionary(pa.int8(), pa.string())),
    *(
        pa.bool8(),
        pa.fixed_shape_tensor(pa.int8(), [2, 3, 4], permutation=[2, 0, 1]),
        pa.uuid(),
        pa.run_end_encoded(pa.int32(), pa.int8()),
        pa.month_day_nano_interval(),
    ),
]


@pytest.mark.parametrize("kind", NO_NUMBERS, ids=str)
def test_columns_of_other_than_numbers(kind):
    schema = pa.schema([("x", kind), ("a", pa.int8()), ("b", pa.list_(pa.int8()))])
    with pytest.raises(
        StructureError, match=r"file: column 'x' is of the type .*columns=\['a', 'b'\]"
    ):
        row_type(schema, "x", "file")


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        (
            "wieght",
            SourceError,
            "file: found no column 'wieght'; do you mean 'weight'. There are 'x'",
        ),
        (
            ["x", "qqq"],
            SourceError,
            "file: found no column 'qqq'. There are 'x', 'weight', 't', 't'",
        ),
        ("t", SourceError, "found 2 columns named 't'"),
        (None, SourceError, "found 2 columns named 't'"),
        ([], StructureError, "who: found no columns"),
        (3, StructureError, "who: found columns=3, expected the name"),
        ({"x": 1}, StructureError, "who: found columns={'x': 1}, expected"),
        (["x", 1], StructureError, r"who: found columns=\['x', 1\], expected"),
    ],
)
def test_names_that_are_not_there(columns, error, message):
    schema = pa.schema(
        [("x", pa.int8()), ("weight", pa.int8()), ("t", pa.int8()), ("t", pa.int8())]
    )
    with pytest.raises(error, match=message):
        chosen(schema, columns, "file", "who")


def test_names_are_sorted_as_keys_of_dictionaries_are():
    schema = pa.schema([("x", pa.int8()), ("a", pa.int8()), ("m", pa.int8())])
    assert chosen(schema, None, "file", "who") == ["a", "m", "x"]
    assert chosen(schema, ("x", "a", "x"), "file", "who") == ["a", "x"]
    assert chosen(schema, "m", "file", "who") == ["m"]


def test_which_columns_agree():
    assert agree(((2, None), F32), ((2, 3), F32))
    assert agree(((None,), F32), ((None,), F32))
    assert not agree(((2,), F32), ((3,), F32))
    assert not agree(((2,), F32), ((), F32))
    assert not agree(((), F32), ((), np.dtype(np.float64)))


def test_all_errors_of_arrow_name_the_file():
    for name in ("Invalid", "KeyError", "NotImplementedError", "TypeError"):
        with (
            pytest.raises(SourceError, match=r"file: cannot read .*why.*expected a table"),
            arrow_readable("file", "a table"),
        ):
            raise getattr(pa, f"Arrow{name}")("why")
