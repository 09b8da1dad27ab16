"""`from_array_record`: files that the package `array_record` writes."""

import json
import os
import subprocess
import sys

import hypothesis
import jax
import numpy as np
import pytest
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
from tfrecords import example

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.source_base import open_spec

try:
    from array_record.python import array_record_module
except ImportError as error:
    pytest.skip(
        f"ARRAY_RECORD IS NOT TESTED: {error}; pip install 'beamjax[array-record]'",
        allow_module_level=True,
    )

N = 60
RNG = np.random.default_rng(0)
TREE = {
    "image": RNG.integers(0, 256, (N, 4, 4), np.uint8),
    "label": RNG.integers(-(2**31), 2**31, N).astype(np.int32),
    "x": RNG.normal(size=(N, 3)).astype(np.float32),
}
FEATURES = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in TREE.items()}


def write(path, records, options="group_size:4"):
    writer = array_record_module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def rows(start, stop):
    for i in range(start, stop):
        row = {"image": TREE["image"][i].tobytes(), "label": TREE["label"][i], "x": TREE["x"][i]}
        yield example(row)


@pytest.fixture(params=["group_size:1", "group_size:16,uncompressed"])
def files(tmp_path, request):
    for part, cut in enumerate([(0, 7), (7, 7), (7, 40), (40, N)]):
        write(tmp_path / f"part-{part}.array_record", rows(*cut), request.param)
    return str(tmp_path / "part-*.array_record")


def test_ranges(files):
    source = bj.from_array_record(files, FEATURES)
    check_ranges(source, TREE)
    check_spec(source, TREE)
    check_threads(source, TREE)
    assert "60 members of ['image'] uint8[4, 4], ['label'] int32[]" in repr(source)
    assert "part-0.array_record and 3 more" in repr(source)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=25)
@hypothesis.given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_any_files(tmp_path_factory, counts, data):
    folder = tmp_path_factory.mktemp("records")
    hypothesis.assume(total := sum(counts))
    numbers = iter(range(total))
    for part, count in enumerate(counts):
        write(folder / f"{part}", [example({"n": np.int64([next(numbers)])}) for _ in range(count)])
    source = bj.from_array_record(str(folder / "*"))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert_reads(source.read(start, stop), [np.arange(start, stop, dtype=np.int32)])


@pytest.mark.parametrize("runner", RUNNERS)
def test_runs(runner, tmp_path):
    path = write(tmp_path / "x", rows(0, N))
    check_runs(bj.from_array_record(path, FEATURES), TREE, runner)


ONE = example({"x": np.float32([1])})
X = {"x": jax.ShapeDtypeStruct((), "float32")}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"\xff\xff", "no tf.train.Example"),
        (example({"y": np.float32([1])}), r"found the features \['y'\]"),
        (example({"x": np.float32([1, 2])}), "'x': found 2 values in float_list, expected 1"),
        (example({"x": np.int64([1])}), "'x': found int64_list"),
    ],
)
@pytest.mark.parametrize("good", [0, 1, 5])
def test_records_that_do_not_fit(record, message, good, tmp_path):
    path = write(tmp_path / "x.ar", [ONE] * good + [record])
    with pytest.raises(SourceError, match=rf"x.ar, record {good}.*{message}"):
        bj.from_array_record(path, X).read(0, good + 1)


@pytest.mark.parametrize("change", ["cut", "half", "text", "empty"])
def test_what_is_no_file_of_records(change, tmp_path):
    path = tmp_path / "x.ar"
    write(path, [ONE] * 9)
    data = path.read_bytes()
    damaged = {"cut": data[:-3], "half": data[: len(data) // 2], "text": b"text", "empty": b""}
    path.write_bytes(damaged[change])
    with pytest.raises(SourceError, match=r"x.ar: found \d+ bytes, expected a file of ArrayRecord"):
        bj.from_array_record(path)


def test_damage_in_a_chunk(tmp_path):
    """What a flipped byte makes of a file is an error, or the same numbers."""
    path = tmp_path / "x.ar"
    records = [example({"x": np.float32([i, i])}) for i in range(200)]
    write(path, records, "group_size:8,uncompressed")
    data = path.read_bytes()
    refused = 0
    for position in range(64, len(data), max(1, len(data) // 150)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        try:
            (found,) = bj.from_array_record(path).read(0, 200)
        except SourceError:
            refused += 1
        else:
            assert found[:, 0].tolist() == list(range(200))
    assert refused


def test_files_that_change(tmp_path):
    path = write(tmp_path / "x.ar", [ONE] * 3)
    source = bj.from_array_record(path)
    spec = json.loads(json.dumps(source.to_spec()))
    write(path, [ONE] * 4)
    with pytest.raises(SourceError, match="the file was changed after the source was made"):
        source.read(0, 3)
    spec["files"] = [[bj.from_array_record(path).to_spec()["files"][0][0], 5]]
    with pytest.raises(SourceError, match=r"x.ar: found 4 records, expected 5"):
        open_spec(spec).read(0, 3)
    os.unlink(path)
    with pytest.raises(SourceError, match="is not there"):
        source.read(0, 3)


def test_no_files_and_no_records(tmp_path):
    with pytest.raises(SourceError, match="from_array_record: found no file"):
        bj.from_array_record(tmp_path / "x-*")
    with pytest.raises(StructureError, match="from_array_record: found 3, expected a path"):
        bj.from_array_record(3)
    with pytest.raises(PlacementError, match=r"found no record in .*x"):
        bj.from_array_record(write(tmp_path / "x", []))
    path = write(tmp_path / "y", [ONE])
    with pytest.raises(StructureError, match="expected a dict"):
        bj.from_array_record(path, ["x"])
    with pytest.raises(SourceError, match=r"found the URL .*expected files of this machine"):
        bj.from_array_record(f"bjtest:/{path}")


@pytest.mark.parametrize(
    "change",
    [
        {"files": []}, {"files": 3}, {"files": [3]}, {"names": []}, {"names": [3]}, {"leaves": []},
        {"files": [[["/none", 3, "5"], 3]]}, {"files": [[["/none", 3, "5"], -1]]},
    ],
)  # fmt: skip
def test_specs_that_are_none(change, tmp_path):
    spec = bj.from_array_record(write(tmp_path / "x", [ONE] * 3)).to_spec()
    with pytest.raises(SourceError):
        open_spec(spec | change).read(0, 3)


def test_without_the_package(tmp_path):
    code = (
        "import sys\n"
        "sys.modules['array_record'] = None\n"
        "import beamjax as bj\n"
        "try:\n"
        "    bj.from_array_record(sys.argv[1])\n"
        "except bj.SourceError as error:\n"
        "    print(error)\n"
    )
    path = write(tmp_path / "x", [ONE])
    command = [sys.executable, "-c", code, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot import the package array_record" in done.stdout
    assert "pip install 'beamjax[array-record]'" in done.stdout
