"""Examples, encoded from the definition of protocol buffers, parsed to arrays."""

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from source_checks import assert_reads
from tfrecords import Encoded, delimited, example, feature, varint

from beamjax.errors import SourceError, StructureError
from beamjax.sources.tf_example import ExampleParser, feature_leaves, infer_features

N = 5


def parse(records, features):
    leaves, _ = feature_leaves(features, "from_x")
    parser = ExampleParser(sorted(features), leaves)
    return parser.parse(records, lambda i: f"file, record {i}")


def of(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "bool"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0)])
def test_lists_of_numbers(packed, shape):
    rng = np.random.default_rng(0)
    floats = rng.normal(size=(N, *shape)).astype(np.float32)
    columns = {"f": floats}
    for name in INTEGERS:
        high = 2 if name == "bool" else np.iinfo(name).max + 1
        low = 0 if name == "bool" else np.iinfo(name).min
        columns[name] = rng.integers(low, high, (N, *shape)).astype(name)
    rows = [{k: v[i] for k, v in columns.items()} for i in range(N)]
    rows = [
        {k: v.astype(np.int64) if v.dtype.kind in "bu" else v for k, v in row.items()}
        for row in rows
    ]
    records = [example(row, packed) for row in rows]
    found = parse(records, {k: of(shape, v.dtype) for k, v in columns.items()})
    assert_reads(found, [columns[name] for name in sorted(columns)])


def test_int64_with_x64():
    values = [-(2**63), 2**63 - 1, 0, -1, 5]
    records = [example({"x": np.int64(v)}) for v in values]
    with jax.enable_x64(True):
        found = parse(records, {"x": of((), "int64")})
    assert_reads(found, [np.array(values)])


@pytest.mark.parametrize(
    "dtype", ["uint8", "float32", "bfloat16", "float16", "int64", "bool", "int4"]
)
def test_bytes_of_arrays(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.random.default_rng(0).integers(0, 2, (N, 2, 3)).astype(dtype)
    records = [example({"x": v.tobytes()}) for v in values]
    with jax.enable_x64(True):
        found = parse(records, {"x": of((2, 3), dtype)})
    assert_reads(found, [values])


def test_no_records_at_all():
    for dtype in ("float32", "int32", "uint8"):
        assert_reads(parse([], {"x": of((3,), dtype)}), [np.empty((0, 3), dtype)])


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_packed_and_not_packed_together(packed):
    rows = [{"x": np.float32([i, -i]), "y": np.int64([i, 1 << i * 9])} for i in range(len(packed))]
    records = [example(row, p) for row, p in zip(rows, packed, strict=True)]
    with jax.enable_x64(True):
        found = parse(records, {"x": of((2,), "float32"), "y": of((2,), "int64")})
    assert_reads(found, [np.stack([row[k] for row in rows]) for k in "xy"])


def test_lists_in_parts():
    """A packed list may come in several parts, and so may an Example."""
    parts = delimited(1, np.float32([1, 2]).tobytes()) + delimited(1, np.float32([3]).tobytes())
    records = [example({"x": Encoded(delimited(2, parts)), "y": np.int64([3])})]
    assert_reads(parse(records, {"x": of((3,), "float32")}), [np.float32([[1, 2, 3]])])
    both = example({"x": np.float32([1])}) + example({"y": np.int64([7])})
    found = parse([both], {"x": of((), "float32"), "y": of((), "int32")})
    assert_reads(found, [np.float32([1]), np.int32([7])])


def test_numbers_and_bytes_in_one_feature():
    """Each record tells how its values are stored."""
    rows = [np.int64([1, 2]), bytes([3, 4]), np.int64([5, 6])]
    found = parse([example({"x": row}) for row in rows], {"x": of((2,), "uint8")})
    assert_reads(found, [np.uint8([[1, 2], [3, 4], [5, 6]])])


GOOD = {"x": np.float32([1, 2]), "y": np.int64([3])}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"x": GOOD["x"]}, r"record 2: found the features \['x'\], expected 'y' among them"),
        ({}, r"record 2: found the features \[\]"),
        (GOOD | {"x": np.float32([1])}, "feature 'x': found 1 values in float_list, expected 2"),
        (GOOD | {"x": np.float32([1, 2, 3])}, "feature 'x': found 3 values in float_list"),
        (GOOD | {"x": np.float32([])}, "feature 'x': found 0 values in float_list"),
        (GOOD | {"y": np.int64([1, 2])}, "feature 'y': found 2 values in int64_list, expected 1"),
        (GOOD | {"y": np.int64([])}, "feature 'y': found 0 values in int64_list"),
        (GOOD | {"x": np.int64([1, 2])}, r"'x': found int64_list.*expected float32\[2\]"),
        (GOOD | {"y": np.float32([1])}, r"'y': found float_list.*expected int32\[\]"),
        (
            GOOD | {"x": b"1234"},
            r"'x': found 1 values in bytes_list, of 4 bytes, expected",
        ),
        (GOOD | {"y": np.int64([2**31])}, r"'y': found 2147483648, expected -2147483648 to 214748"),
        (GOOD | {"x": Encoded(b"")}, r"'x': found no list, expected float32\[2\]"),
        (GOOD | {"x": Encoded(delimited(1, b""))}, "'x': found 0 values in bytes_list, of 0"),
        (GOOD | {"x": Encoded(delimited(2, delimited(1, b"12345")))}, "record 2.*no tf.train"),
        (GOOD | {"y": Encoded(delimited(3, delimited(1, b"\x80")))}, "record 2.*no tf.train"),
        (GOOD | {"y": Encoded(delimited(3, delimited(1, b"\xff" * 11 + b"\0")))}, "record 2"),
        (
            GOOD | {"y": Encoded(b"\x0a\xff")},
            "record 2: found .* bytes that",
        ),
    ],
)
def test_records_that_do_not_fit(row, message):
    records = [example(GOOD), example(GOOD), example(row)]
    with pytest.raises(SourceError, match=f"file, record 2.*{message.replace('record 2', '')}"):
        parse(records, {"x": of((2,), "float32"), "y": of((), "int32")})


def test_what_is_no_example():
    for record in (b"text", b"\x0a\x05", b"\xff" * 20):
        with pytest.raises(SourceError, match=r"record 0: .*no tf.train.Example"):
            parse([record], {"x": of((), "int32")})
    too_big = example({"x": np.float32([1])})
    with pytest.raises(SourceError, match="found 1 values in float_list, expected 1099511627776"):
        parse([too_big], {"x": of((2**40,), "float32")})


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (3, "found the features 3, expected a dict"),
        (["x"], "expected a dict"),
        ({1: of((), "int32")}, "expected a dict"),
        ({"x": "int32"}, r"member\['x'\]: found 'int32', expected a jax.ShapeDtypeStruct"),
        ({"x": {"y": of((), "int32")}, "z": [of((), "int32"), of((), "int32")]}, "is a tree"),
        ({"x": {"y": of((), "int32")}}, "is a tree"),
        ({}, "without leaves"),
        ({"x": jax.random.key(0)}, "expected numbers"),
    ],
)
def test_features_that_are_none(features, message):
    with pytest.raises(StructureError, match=message):
        feature_leaves(features, "from_x")


def test_features_of_a_record():
    vector = np.float32([1, 2])
    record = example({"s": vector[:1], "v": vector, "i": np.int64([3]), "b": b"123"})
    expected = {"b": of((3,), "uint8"), "i": of((), "int32"), "s": of((), "float32")}
    expected["v"] = of((2,), "float32")
    assert infer_features(record, "file") == expected
    with jax.enable_x64(True):
        assert infer_features(record, "file")["i"].dtype == np.int64
    for row in ({"x": np.float32([])}, {"x": Encoded(b"")}, {}):
        with pytest.raises(SourceError, match=r"file.*found (0 val|an Example with)"):
            infer_features(example(row), "file")
    several = Encoded(delimited(1, delimited(1, b"a") + delimited(1, b"b")))
    with pytest.raises(SourceError, match="'x': found 2 values in bytes_list"):
        infer_features(example({"x": several}), "file")


def test_the_encoder_of_the_tests():
    """The Example of the documentation of protocol buffers: a varint of 150."""
    assert varint(150) == b"\x96\x01"
    assert feature(b"ab") == b"\x0a\x04\x0a\x02ab"
