"""`from_tfrecord`: files that Beam writes, and files that are damaged."""

import bz2
import gzip
import json
import lzma
import os
import struct

import apache_beam as beam
import hypothesis
import jax
import numpy as np
import pytest
import tfrecords
import url_files  # noqa: F401 - makes bjtest:// known to Beam
from hypothesis import strategies as st
from source_checks import (
    RUNNERS,
    assert_reads,
    check_ranges,
    check_runs,
    check_spec,
    check_threads,
)
from tfrecords import example, write

import beamjax as bj
from beamjax.chunks import members_of
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.pipelines.store import Store
from beamjax.pipelines.uploads import stays_here
from beamjax.sources import tfrecord_frames, tfrecord_source
from beamjax.sources.grouped_source import grouped
from beamjax.sources.source_base import StreamSource, open_spec

N = 60
RNG = np.random.default_rng(0)
TREE = {
    "image": RNG.integers(0, 256, (N, 4, 4), np.uint8),
    "label": RNG.integers(-(2**31), 2**31, N).astype(np.int32),
    "x": RNG.normal(size=(N, 3)).astype(np.float32),
}
FEATURES = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in TREE.items()}
CUTS = [(0, 7), (7, 7), (7, 40), (40, N)]


def rows(start, stop):
    for i in range(start, stop):
        row = {"image": TREE["image"][i].tobytes(), "label": TREE["label"][i], "x": TREE["x"][i]}
        yield example(row | {"name": b"n" * (i % 5)})  # that frames have several lengths


@pytest.fixture
def files(tmp_path):
    for part, cut in enumerate(CUTS):
        write(tmp_path / f"part-{part}.tfrecord", rows(*cut))
    return str(tmp_path / "part-*.tfrecord")


@pytest.fixture(params=[1, 1 << 20])
def source(files, request, monkeypatch):
    """With many marks, and with one a file."""
    monkeypatch.setattr(tfrecord_source, "MARK_BYTES", request.param)
    monkeypatch.setattr(tfrecord_frames, "WINDOW", 300)
    return bj.from_tfrecord(files, FEATURES)


def test_ranges(source):
    check_ranges(source, TREE)
    check_spec(source, TREE)
    check_threads(source, TREE)
    assert "60 members of ['image'] uint8[4, 4], ['label'] int32[]" in repr(source)
    assert "part-0.tfrecord and 3 more" in repr(source)


def test_files_that_beam_writes(tmp_path):
    options = beam.options.pipeline_options.PipelineOptions([])
    with beam.Pipeline(options=options) as pipeline:
        records = pipeline | beam.Create(list(rows(0, N)), reshuffle=False)
        records | beam.io.WriteToTFRecord(str(tmp_path / "x"), num_shards=1)
        records | "gz" >> beam.io.WriteToTFRecord(
            str(tmp_path / "z"), file_name_suffix=".gz", num_shards=1
        )
    keys = np.argsort(TREE["label"])
    for pattern in ("x-*", "z-*"):
        found = members_of(bj.from_tfrecord(str(tmp_path / pattern), FEATURES), True)
        order = np.argsort(found[1])
        expected = [TREE[name][keys] for name in sorted(TREE)]
        assert_reads([array[order] for array in found], expected)


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
        patch.setattr(tfrecord_frames, "WINDOW", window)
        source = bj.from_tfrecord(str(folder / "*"), {"n": jax.ShapeDtypeStruct((), "int32")})
        start = data.draw(st.integers(0, total))
        stop = data.draw(st.integers(start, total))
        assert_reads(source.read(start, stop), [np.arange(start, stop, dtype=np.int32)])


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("end", PACK)
def test_compressed_files_are_streams(end, files, tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord_frames, "CHUNK", 64)
    for path in tmp_path.iterdir():
        (tmp_path / f"{path.name}{end}").write_bytes(PACK[end](path.read_bytes()))
        path.unlink()
    source = bj.from_tfrecord(f"{files}{end}", FEATURES)
    check_stream(source)


@pytest.mark.parametrize("end", PACK)
@pytest.mark.parametrize("root", ["", "bjtest:/"])
def test_compressed_files_whose_names_do_not_say_so(root, end, files, tmp_path):
    for path in tmp_path.iterdir():
        path.write_bytes(PACK[end](path.read_bytes()))
    check_stream(bj.from_tfrecord(f"{root}{files}", FEATURES))


def test_a_record_whose_length_looks_like_gzip(tmp_path):
    nbytes = int.from_bytes(b"\x1f\x8b\x08", "little")
    over = len(example({"a": bytes(nbytes)})) - nbytes
    record = example({"a": bytes(nbytes - over)})
    path = write(tmp_path / "x", [record])
    with open(path, "rb") as file:
        assert file.read(3) == b"\x1f\x8b\x08"
    source = bj.from_tfrecord(path, {"a": jax.ShapeDtypeStruct((nbytes - over,), "uint8")})
    assert (type(source).__name__, len(source)) == ("TFRecordSource", 1)


def test_urls_are_streams(files):
    check_stream(bj.from_tfrecord(f"bjtest:/{files}", FEATURES))


def check_stream(source):
    assert isinstance(source, StreamSource)
    assert source.pieces == len(CUTS)
    assert source.treedef == jax.tree.structure(TREE)
    expected = [TREE[name] for name in sorted(TREE)]
    assert_reads(members_of(source, True), expected)
    again = open_spec(json.loads(json.dumps(source.to_spec())))
    assert again.to_spec() == source.to_spec()
    assert_reads(members_of(again, True), expected)


def test_workers_elsewhere(files, tmp_path):
    source = bj.from_tfrecord(files, FEATURES)
    assert stays_here(source, Store("inmemory://run", lasts=False))
    assert stays_here(grouped(source, 5), Store("inmemory://run", lasts=False))
    assert not stays_here(source, Store(str(tmp_path)))
    assert not stays_here(bj.from_range(5), Store("inmemory://run", lasts=False))


def test_features_of_the_first_record(tmp_path):
    path = write(
        tmp_path / "x", [example({"a": np.float32([i, i]), "b": np.int64([i])}) for i in range(3)]
    )
    source = bj.from_tfrecord(path)
    assert_reads(source.read(0, 3), [np.float32([[0, 0], [1, 1], [2, 2]]), np.int32([0, 1, 2])])
    assert source.treedef == jax.tree.structure({"a": 0, "b": 0})


@pytest.mark.parametrize("runner", RUNNERS)
def test_runs(runner, files):
    check_runs(bj.from_tfrecord(files, FEATURES), TREE, runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_runs_of_streams(runner, files, tmp_path):
    for path in tmp_path.iterdir():
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    check_runs(bj.from_tfrecord(f"{files}.gz", FEATURES), TREE, runner)


# --- what is wrong


def framed(record, length=None, good_length=True, good_data=True):
    header = struct.pack("<Q", len(record) if length is None else length)
    mask = tfrecords.tfrecordio._TFRecordUtil._masked_crc32c
    sums = [mask(header) + (not good_length), mask(record) + (not good_data)]
    return header + struct.pack("<I", sums[0]) + record + struct.pack("<I", sums[1])


ONE = example({"x": np.float32([1])})
GOOD = framed(ONE)
DAMAGED = {
    "a wrong checksum of a length": (framed(ONE, good_length=False), "found a length with a wrong"),
    "a wrong checksum of a record": (framed(ONE, good_data=False), "bytes with a wrong checksum"),
    "a file that ends in a header": (GOOD[:5], "the file ends in it"),
    "a file that ends in a record": (GOOD[:20], "the file ends in it"),
    "a file that ends in a checksum": (GOOD[:-1], "the file ends in it"),
    "a length beyond the file": (framed(ONE, 2**60), "the file ends in it"),
    "a length of 2**64 - 1": (framed(ONE, 2**64 - 1), "the file ends in it"),
    "text": (b"some text that is no record at all", "found a length with a wrong checksum"),
    "no Example": (framed(b"\xff\xff"), "no tf.train.Example"),
    "no feature": (framed(example({"y": np.float32([1])})), r"found the features \['y'\]"),
    "two values": (framed(example({"x": np.float32([1, 2])})), "'x': found 2 values in float_list"),
    "another kind": (framed(example({"x": np.int64([1])})), "'x': found int64_list"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("good", [0, 1, 3])
def test_damaged_files(damage, good, packed, tmp_path):
    data, message = DAMAGED[damage]
    path = tmp_path / ("x.tfrecord.gz" if packed else "x.tfrecord")
    data = GOOD * good + data
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(SourceError, match=rf"x.tfrecord.*, record {good}.*{message}"):
        members_of(bj.from_tfrecord(path, {"x": jax.ShapeDtypeStruct((), "float32")}), True)


def test_damage_is_found_in_what_is_read_only(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(GOOD * 3 + framed(ONE, good_data=False) + GOOD)
    source = bj.from_tfrecord(path)
    assert len(source) == 5
    assert source.read(0, 3)[0].tolist() == source.read(4, 5)[0].tolist() * 3
    with pytest.raises(SourceError, match=r"x, record 3: found .* bytes with a wrong checksum"):
        source.read(2, 5)


def test_a_compressed_file_that_is_cut_off(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(GOOD * 2)[:-4])
    with pytest.raises(SourceError, match=r"x.gz: cannot read \(EOFError"):
        members_of(bj.from_tfrecord(path), True)
    path.write_bytes(b"no gzip")
    with pytest.raises(SourceError, match=r"x.gz: cannot read \(BadGzipFile"):
        bj.from_tfrecord(path)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_files_that_change(end, tmp_path):
    path = tmp_path / f"x{end}"
    pack = gzip.compress if end else bytes
    path.write_bytes(pack(GOOD * 2))
    source = bj.from_tfrecord(path)
    path.write_bytes(pack(GOOD * 3))
    with pytest.raises(SourceError, match="the file was changed after the source was made"):
        members_of(source, True)
    path.unlink()
    with pytest.raises(SourceError, match="is not there"):
        members_of(source, True)


def test_no_files_and_no_records(tmp_path):
    with pytest.raises(SourceError, match="from_tfrecord: found no file"):
        bj.from_tfrecord(tmp_path / "x-*")
    with pytest.raises(StructureError, match="from_tfrecord: found 3, expected a path"):
        bj.from_tfrecord(3)
    for name in ("empty", "empty.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
        with pytest.raises(PlacementError, match=r"found no record in .*empty"):
            bj.from_tfrecord(tmp_path / name)
    with pytest.raises(StructureError, match="expected a dict"):
        bj.from_tfrecord(write(tmp_path / "x", [ONE]), ["x"])


@pytest.mark.parametrize(
    "change",
    [
        {"files": []}, {"files": 3}, {"files": [3]}, {"names": []}, {"names": [3, 4, 5]},
        {"names": ["image"]}, {"leaves": []}, {"marks": [[0, 1]]}, {"marks": [[0, 0], [0, 0]]},
        {"marks": [[0, 0], [2, 1]]}, {"marks": []}, {"marks": [[0, 0], [100, 5]]}, {"count": -1},
        {"count": 8}, {"count": 6}, {"count": 2**40}, {"marks": 3}, {"marks": [[0, 0], [2, 100]]},
    ],
)  # fmt: skip
def test_specs_that_are_none(change, tmp_path):
    spec = bj.from_tfrecord(write(tmp_path / "x", rows(0, 7)), FEATURES).to_spec()
    (file, count) = spec["files"][0]
    spec["files"] = [[file, change.get("count", count)]]
    if "marks" in change:
        change = {"marks": [change["marks"]]}
    with pytest.raises(SourceError):
        open_spec(spec | {k: v for k, v in change.items() if k in spec}).read(0, 7)


def test_a_source_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord_source, "MARK_BYTES", 1)
    monkeypatch.setattr(tfrecord_source, "MAX_MARKS", 4)
    source = bj.from_tfrecord(write(tmp_path / "x", rows(0, N)), FEATURES)
    (marks,) = source.to_spec()["marks"]
    assert len(source) == N
    assert 3 <= len(marks) <= 5
    check_ranges(source, TREE)


def test_local_files_need_no_beam(files):
    import subprocess
    import sys

    code = (
        "import sys, beamjax as bj\n"
        "print(len(bj.from_tfrecord(sys.argv[1])), 'apache_beam' in sys.modules)\n"
    )
    path = files.replace("*", "2")
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.stdout.split() == ["33", "False"]
