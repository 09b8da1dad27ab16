"""Placed values between pipelines: the members that were asked for, from any cut into files."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beamjax.errors import ArrayFormatError, SourceError, WorkerError
from beamjax.pipelines.graph import streaming
from beamjax.pipelines.values.elements import block_of
from beamjax.pipelines.values.members import (
    MembersSource,
)
from beamjax.pipelines.values.store import Store
from beamjax.sources.source_base import LeafSpec, open_spec, spec_of
from beamjax.storage import files
from beamjax.storage.arrays import encode_arrays

N = 20
X = np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3)


def written(folder, array, parts, stem="v"):
    for start, count in parts:
        path = files.join(str(folder), MembersSource.file_name(stem, start, count))
        files.write(path, encode_arrays([array[start : start + count]]))
    return MembersSource(str(folder), stem, parts, leaf(array), len(array))


def test_small_blocks_of_a_stream_travel_together(tmp_path):
    step = streaming.WriteMemberBlocks(Store(str(tmp_path)), ("x",))
    step.start_bundle()
    blocks = [block_of(start, 8, {"x": X[start : start + 8]}) for start in (0, 8)]
    assert [element for block in blocks for element in step.process(block)] == []
    assert len(list(step.finish_bundle())) == 1


def leaf(array):
    return LeafSpec(array.shape[1:], array.dtype)


def check(source, expected):
    """The source gives these members, also where another process opens it."""
    assert len(source) == len(expected)
    again = open_spec(json.loads(json.dumps(spec_of(source))))
    assert spec_of(again) == spec_of(source) == json.loads(json.dumps(spec_of(source)))
    assert [(x.shape, x.dtype) for x in again.leaves] == [(expected.shape[1:], expected.dtype)]
    for start, stop in [(0, len(expected)), (3, 4), (5, 13), (7, 7)]:
        (found,) = again.read(start, stop)
        assert (found.dtype, found.shape) == (expected.dtype, expected[start:stop].shape)
        assert found.tobytes() == expected[start:stop].tobytes()


def test_members_in_files(tmp_path):
    overlapping = [(0, 8), (0, 16), (8, 8), (12, 8)]
    parts = [[(0, 20)], [(16, 4), (0, 8), (8, 8)], overlapping, [(0, 20), (8, 8)]]
    for number, cut in enumerate(parts):
        for dtype in ("float32", "bfloat16", "bool", "uint8"):
            x = (X % 7).astype(np.dtype(dtype))
            source = written(tmp_path, x, cut, f"{dtype}{number}")
            source.check_complete("x")
            check(source, x)
    check(written(tmp_path, X[:, :0], [(0, 20)]), X[:, :0])
    gaps = written(tmp_path, X, [(0, 4), (6, 10)])
    with pytest.raises(WorkerError, match="x: 6 of 20 members are missing, the first one is 4;"):
        gaps.check_complete("x")
    names = ["v-1-0-8.members", "v-10-8-8.members", "v-1-8-4.members", "v-1-8.members", "w-1-0-9.x"]
    assert MembersSource.members_in(names, "v-1") == [(0, 8), (8, 4)]


def test_a_billion_members_are_found_complete_from_the_names_of_their_files():
    n, count = 10**9, 10**6
    parts = [(start, count) for start in range(0, n, count)]
    tracemalloc.start()
    source = MembersSource("/folder", "v", parts, LeafSpec((), np.dtype(np.float32)), n)
    source.check_complete("x")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


@settings(deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_cover_gives_any_range(tmp_path_factory, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, N - 1))))
    parts = list(zip([0, *cuts], np.diff([0, *cuts, N]).tolist(), strict=True))
    starts = data.draw(st.lists(st.integers(0, N - 1), max_size=4))
    parts += [(start, data.draw(st.integers(1, N - start))) for start in starts]
    source = written(tmp_path_factory.mktemp("cover"), X, data.draw(st.permutations(parts)))
    start = data.draw(st.integers(0, N))
    stop = data.draw(st.integers(start, N))
    np.testing.assert_array_equal(source.read(start, stop)[0], X[start:stop])
    assert set(source.files) <= {MembersSource.file_name("v", *part) for part in parts}


def test_damaged_files_are_named(tmp_path):
    source = written(tmp_path, X, [(0, 8), (8, 12)])
    file = tmp_path / "v-8-12.members"
    for damaged, message in [
        (b"short", "bad magic"),
        (bytes(file.stat().st_size), "bad magic"),
        (file.read_bytes()[:-1] + b"1", "checksum mismatch"),
        (encode_arrays([X[:12], X]), "too many values"),
        (encode_arrays([X[:11]]), r"found float32\[11, 2, 3\], expected 12 members of float32"),
    ]:
        file.write_bytes(damaged)
        np.testing.assert_array_equal(source.read(0, 8)[0], X[:8])
        with pytest.raises(ArrayFormatError, match=rf"v-8-12\.members: .*{message}"):
            source.read(0, 20)
    file.unlink()
    with pytest.raises(SourceError, match=r"v-8-12\.members: cannot read members"):
        source.read(9, 10)
    with pytest.raises(SourceError, match="members 3 to 21 were asked for"):
        source.read(3, 21)
