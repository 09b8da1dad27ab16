"""Files of TFRecord with Examples; right, damaged and changed."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import apache_beam as beam
import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import strategies as st
from source_files import (
    FEATURES,
    RECORDS,
    TREE,
    N,
    assert_reads,
    examples,
    members,
    random_bits,
    refused,
    save,
    save_parts,
)
from tfrecords import Encoded, delimited, example, feature, framed, varint, write

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.records import tfrecord_frames, tfrecord_source
from beamjax.sources.records.tf_example import (
    ExampleParser,
    feature_leaves,
    infer_features,
)
from beamjax.sources.source_base import LeafSpec, StreamSource, open_spec, spec_of

CHANGED = "the file was changed after the source was made"


def of(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


# --- Examples


def parse(records, features):
    leaves, _ = feature_leaves(features, "from_x")
    parser = ExampleParser(sorted(features), leaves)
    return parser.parse(records, lambda i: f"file, record {i}")


INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "bool"]


def test_lists_of_numbers():
    for packed in (True, False):
        for shape in ((), (3,), (2, 3), (0,), (2, 0)):
            tree = {name: random_bits(name, (N, *shape)) for name in INTEGERS}
            tree["f"] = np.random.default_rng(0).normal(size=(N, *shape)).astype(np.float32)
            rows = [{name: x[i].astype("f4" if name == "f" else "i8") for name, x in tree.items()}
                    for i in range(N)]  # fmt: skip
            features = {name: of(shape, x.dtype) for name, x in tree.items()}
            found = parse([example(row, packed) for row in rows], features)
            assert_same_bits(found, [tree[name] for name in sorted(tree)])


def test_bytes_of_arrays_and_wide_integers():
    with jax.enable_x64(True):
        values = np.array([-(2**63), 2**63 - 1, 0, -1, 5])
        found = parse([example({"x": v}) for v in values], {"x": of((), "int64")})
        assert_same_bits(found, [values])
        for name in ("uint8", "float32", "bfloat16", "float16", "int64", "bool", "int4"):
            dtype = np.dtype(getattr(ml_dtypes, name, name))
            values = np.random.default_rng(0).integers(0, 2, (5, 2, 3)).astype(dtype)
            records = [example({"x": v.tobytes()}) for v in values]
            assert_same_bits(parse(records, {"x": of((2, 3), dtype)}), [values])
    for name in ("float32", "int32", "uint8"):
        assert_same_bits(parse([], {"x": of((3,), name)}), [np.empty((0, 3), name)])


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_packed_and_not_packed_together(packed):
    rows = [{"x": np.float32([i, -i]), "y": np.int64([i, 1 << i * 9])} for i in range(len(packed))]
    records = [example(row, p) for row, p in zip(rows, packed, strict=True)]
    with jax.enable_x64(True):
        found = parse(records, {"x": of((2,), "float32"), "y": of((2,), "int64")})
    assert_same_bits(found, [np.stack([row[k] for row in rows]) for k in "xy"])


def test_encodings_that_are_seldom():
    """A packed list and an Example may come in parts, and each record says how it is stored."""
    assert (varint(150), feature(b"ab")) == (b"\x96\x01", b"\x0a\x04\x0a\x02ab")
    parts = delimited(1, np.float32([1, 2]).tobytes()) + delimited(1, np.float32([3]).tobytes())
    record = example({"x": Encoded(delimited(2, parts)), "y": np.int64([3])})
    assert_same_bits(parse([record], {"x": of((3,), "float32")}), [np.float32([[1, 2, 3]])])
    both = example({"x": np.float32([1])}) + example({"y": np.int64([7])})
    found = parse([both], {"x": of((), "float32"), "y": of((), "int32")})
    assert_same_bits(found, [np.float32([1]), np.int32([7])])
    rows = [np.int64([1, 2]), bytes([3, 4]), np.int64([5, 6])]
    found = parse([example({"x": row}) for row in rows], {"x": of((2,), "uint8")})
    assert_same_bits(found, [np.uint8([[1, 2], [3, 4], [5, 6]])])


GOOD = {"x": np.float32([1, 2]), "y": np.int64([3])}


def test_records_that_do_not_fit():
    def coded(number, data):
        return Encoded(delimited(number, data))

    for row, message in [
        ({"x": GOOD["x"]}, r"found the features \['x'\], expected 'y' among them"),
        ({}, r"found the features \[\]"),
        (GOOD | {"x": np.float32([1])}, "feature 'x': found 1 values in float_list, expected 2"),
        (GOOD | {"x": np.float32([1, 2, 3])}, "feature 'x': found 3 values in float_list"),
        (GOOD | {"x": np.float32([])}, "feature 'x': found 0 values in float_list"),
        (GOOD | {"y": np.int64([1, 2])}, "feature 'y': found 2 values in int64_list, expected 1"),
        (GOOD | {"y": np.int64([])}, "feature 'y': found 0 values in int64_list"),
        (GOOD | {"x": np.int64([1, 2])}, r"'x': found int64_list.*expected float32\[2\]"),
        (GOOD | {"y": np.float32([1])}, r"'y': found float_list.*expected int32\[\]"),
        (GOOD | {"x": b"1234"}, r"'x': found 1 values in bytes_list, of 4 bytes, expected"),
        (GOOD | {"y": np.int64([2**31])}, "'y': found 2147483648, expected -2147483648 to 2147"),
        (GOOD | {"y": np.int64([-(2**31) - 1])}, "'y': found -2147483649, expected"),
        (GOOD | {"x": Encoded(b"")}, r"'x': found no list, expected float32\[2\]"),
        (GOOD | {"x": coded(1, b"")}, "'x': found 0 values in bytes_list, of 0"),
        (GOOD | {"x": coded(2, delimited(1, b"12345"))}, "no tf.train"),
        (GOOD | {"y": coded(3, delimited(1, b"\x80"))}, "no tf.train"),
        (GOOD | {"y": coded(3, delimited(1, b"\xff" * 11 + b"\0"))}, ""),
        (GOOD | {"y": Encoded(b"\x0a\xff")}, "found .* bytes that"),
    ]:  # fmt: skip
        records = [example(GOOD), example(GOOD), example(row)]
        features = {"x": of((2,), "float32"), "y": of((), "int32")}
        refused(SourceError, f"file, record 2.*{message}", parse, records, features)
    ends = example({"x": np.int64([-(2**31), 2**31 - 1])})
    assert parse([ends], {"x": of((2,), "int32")})[0].tolist() == [[-(2**31), 2**31 - 1]]
    for record in (b"text", b"\x0a\x05", b"\xff" * 20):
        message = r"record 0: .*no tf.train.Example"
        refused(SourceError, message, parse, [record], {"x": of((), "int32")})
    features = {"x": of((2**40,), "float32")}
    message = "found 1 values in float_list, expected 1099511627776"
    refused(SourceError, message, parse, [example({"x": np.float32([1])})], features)


def test_features_that_are_none():
    number = of((), "int32")
    for features, message in [
        (3, "found the features 3, expected a dict"),
        (["x"], "expected a dict"),
        ({1: number}, "expected a dict"),
        ({"x": "int32"}, r"member\['x'\]: found 'int32', expected a jax.ShapeDtypeStruct"),
        ({"x": {"y": number}, "z": [number, number]}, "is a tree"),
        ({"x": {"y": number}}, "is a tree"),
        ({}, "without leaves"),
        ({"x": jax.random.key(0)}, "expected numbers"),
    ]:
        refused(StructureError, message, feature_leaves, features, "from_x")


def test_features_of_the_first_record(tmp_path):
    vector = np.float32([1, 2])
    record = example({"s": vector[:1], "v": vector, "i": np.int64([3]), "b": b"123"})
    expected = {"b": of((3,), "uint8"), "i": of((), "int32"), "s": of((), "float32")}
    assert infer_features(record, "file") == expected | {"v": of((2,), "float32")}
    with jax.enable_x64(True):
        assert infer_features(record, "file")["i"].dtype == np.int64
    for row in ({"x": np.float32([])}, {"x": Encoded(b"")}, {}):
        message = r"file.*found (0 val|an Example with)"
        refused(SourceError, message, infer_features, example(row), "file")
    several = example({"x": Encoded(delimited(1, delimited(1, b"a") + delimited(1, b"b")))})
    refused(SourceError, "'x': found 2 values in bytes_list", infer_features, several, "file")
    rows = {"a": np.float32([[i, i] for i in range(3)]), "b": np.arange(3, dtype=np.int32)}
    source = bj.from_tfrecord(write(tmp_path / "x", examples(rows)))
    assert source.treedef == jax.tree.structure(rows)
    assert_reads(source, rows)


INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=100)
@hypothesis.given(st.integers(0, 5), st.data())
def test_lists_of_integers(count, data):
    lists = data.draw(st.lists(st.lists(INT64, min_size=count, max_size=count), max_size=8))
    parser = ExampleParser(["x"], [LeafSpec((count,), np.dtype(np.int64))])
    (found,) = parser.parse([example({"x": np.array(x, np.int64)}) for x in lists], str)
    assert (found.dtype, found.shape) == (np.int64, (len(lists), count))
    assert found.tolist() == lists


# --- frames of TFRecord


def rows():
    """Examples of several lengths."""
    for i, record in enumerate(examples(TREE)):
        yield record + example({"name": b"n" * (i % 5)})


def test_files_that_beam_writes(tmp_path):
    options = beam.options.pipeline_options.PipelineOptions([])
    with beam.Pipeline(options=options) as pipeline:
        records = pipeline | beam.Create(list(rows()), reshuffle=False)
        records | beam.io.WriteToTFRecord(str(tmp_path / "x"), num_shards=1)
        packed = beam.io.WriteToTFRecord(str(tmp_path / "z"), file_name_suffix=".gz", num_shards=1)
        records | "gz" >> packed
    order = np.argsort(TREE["label"])
    plain = bj.from_tfrecord(str(tmp_path / "x-*"), FEATURES)
    packed = bj.from_tfrecord(str(tmp_path / "z-*"), FEATURES)
    for arrays in (plain.read(0, N), members(packed)):
        by_label = np.argsort(arrays[0])
        expected = [array[order] for array in TREE.values()]
        assert_same_bits([array[by_label] for array in arrays], expected)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=25)
@hypothesis.given(
    st.lists(st.lists(st.integers(0, 400), max_size=8), min_size=1, max_size=4),
    st.integers(1, 500), st.integers(16, 900), st.data(),
)  # fmt: skip
def test_any_lengths(tmp_path_factory, lengths, apart, window, data):
    folder = tmp_path_factory.mktemp("records")
    total = sum(map(len, lengths))
    hypothesis.assume(total)
    numbers = iter(range(total))
    for part, sizes in enumerate(lengths):
        records = [example({"n": np.int64([next(numbers)]), "z": b"z" * size}) for size in sizes]
        write(folder / f"{part}", records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord_source, "MARK_BYTES", apart)
        patch.setattr(tfrecord_frames, "WINDOW_BYTES", window)
        source = bj.from_tfrecord(str(folder / "*"), {"n": of((), "int32")})
        start = data.draw(st.integers(0, total))
        stop = data.draw(st.integers(start, total))
        assert_reads(source, np.arange(total, dtype=np.int32), start, stop)


def test_marks_are_few(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord_source, "MARK_BYTES", 1)
    monkeypatch.setattr(tfrecord_source, "MAX_MARKS", 4)
    monkeypatch.setattr(tfrecord_frames, "WINDOW_BYTES", 300)
    source = bj.from_tfrecord(write(tmp_path / "x", rows()), FEATURES)
    (marks,) = spec_of(source)["marks"]
    assert 3 <= len(marks) <= 5
    for start in range(N):
        assert_reads(source, TREE, start, start + 1)
    assert_reads(source, TREE)


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("end", PACK)
def test_compressed_files_are_streams_whatever_their_names(end, tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord_frames, "CHUNK_BYTES", 64)
    for path in map(Path, save_parts(RECORDS["tfrecord"], tmp_path)):
        data = PACK[end](path.read_bytes())
        path.write_bytes(data)
        path.with_name(f"{path.name}{end}").write_bytes(data)
    for pattern in (f"{tmp_path}/*{end}", f"{tmp_path}/part-?", f"bjtest:/{tmp_path}/part-?"):
        source = bj.from_tfrecord(pattern, FEATURES)
        assert isinstance(source, StreamSource)
        for each in (source, open_spec(json.loads(json.dumps(spec_of(source))))):
            assert each.pieces == 4
            assert_same_bits(members(each), list(TREE.values()))


def test_a_record_whose_length_looks_like_gzip(tmp_path):
    nbytes = int.from_bytes(b"\x1f\x8b\x08", "little")
    over = len(example({"a": bytes(nbytes)})) - nbytes
    path = write(tmp_path / "x", [example({"a": bytes(nbytes - over)})])
    assert Path(path).read_bytes()[:3] == b"\x1f\x8b\x08"
    source = bj.from_tfrecord(path, {"a": of((nbytes - over,), "uint8")})
    assert (type(source).__name__, len(source)) == ("TFRecordSource", 1)


# --- what is wrong

ONE = example({"x": np.float32([1])})
X = {"x": of((), "float32")}


FRAME = framed(ONE)
DAMAGED = {
    "a wrong checksum of a length": (framed(ONE, good_length=False), "found a length with a wrong"),
    "a wrong checksum of a record": (framed(ONE, good_data=False), "bytes with a wrong checksum"),
    "a file that ends in a header": (FRAME[:5], "the file ends in it"),
    "a file that ends in a record": (FRAME[:20], "the file ends in it"),
    "a file that ends in a checksum": (FRAME[:-1], "the file ends in it"),
    "a length beyond the file": (framed(ONE, 2**60), "the file ends in it"),
    "a length of 2**64 - 1": (framed(ONE, 2**64 - 1), "the file ends in it"),
    "text": (b"some text that is no record at all", "found a length with a wrong checksum"),
    "no Example": (framed(b"\xff\xff"), "no tf.train.Example"),
    "no feature": (framed(example({"y": np.float32([1])})), r"found the features \['y'\]"),
}


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_frames(packed, tmp_path):
    path = tmp_path / ("x.tfrecord.gz" if packed else "x.tfrecord")

    def read():
        source = bj.from_tfrecord(path, X)
        return members(source) if packed else source.read(0, len(source))

    for damage, message in DAMAGED.values():
        for good in (0, 1, 3):
            data = FRAME * good + damage
            path.write_bytes(gzip.compress(data) if packed else data)
            refused(SourceError, f"x.tfrecord.*, record {good}.*{message}", read)


def test_damage_is_found_only_in_what_is_read(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(FRAME * 3 + framed(ONE, good_data=False) + FRAME)
    source = bj.from_tfrecord(path)
    assert len(source) == 5
    assert source.read(0, 3)[0].tolist() == source.read(4, 5)[0].tolist() * 3
    message = "x, record 3: found .* bytes with a wrong checksum"
    refused(SourceError, message, source.read, 2, 5)


def test_compressed_records_that_are_cut_or_change(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(FRAME * 2)[:-4])
    message = r"x.gz: cannot read \(EOFError"
    refused(SourceError, message, lambda: members(bj.from_tfrecord(path)))
    path.write_bytes(b"no gzip")
    refused(SourceError, r"x.gz: cannot read \(BadGzipFile", bj.from_tfrecord, path)
    path.write_bytes(gzip.compress(FRAME * 2))
    source = bj.from_tfrecord(path)
    path.write_bytes(gzip.compress(FRAME * 3))
    refused(SourceError, CHANGED, members, source)
    path.unlink()
    refused(SourceError, "is not there", members, source)


def test_no_files_and_no_records(tmp_path):
    form, read = RECORDS["tfrecord"], bj.from_tfrecord
    refused(SourceError, "from_tfrecord: found no file", read, tmp_path / "x-*")
    refused(StructureError, "from_tfrecord: found 3, expected a path", read, 3)
    empty = save(form, tmp_path / "empty", {"x": np.zeros((0, 1), np.float32)})
    refused(PlacementError, "found no record in .*empty", read, empty)
    path = save(form, tmp_path / "x", {"x": np.ones((1, 1), np.float32)})
    refused(StructureError, "expected a dict", read, path, ["x"])
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    refused(PlacementError, "found no record in .*empty", read, tmp_path / "empty.gz")
