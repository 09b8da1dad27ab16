"""`from_npy` with patterns: several files by index as one. Single files are in test_sources."""

import itertools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from source_programs import (
    assert_opens_elsewhere,
    assert_reads,
    assert_runs,
    assert_threads_read,
)

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.npy_source import NpySeries, NpySource
from beamjax.sources.source_base import open_spec

N = 23
X = np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3)
K = np.arange(N)


def save_parts(folder, name, array, cuts):
    edges = [0, *cuts, len(array)]
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        np.save(folder / f"{name}-{i:02d}.npy", array[start:stop])
    return str(folder / f"{name}-*.npy")


def test_patterns_and_single_files_in_a_tree(tmp_path):
    np.save(tmp_path / "k.npy", K)
    paths = {"x": save_parts(tmp_path, "x", X, [4, 4, 19]), "k": tmp_path / "k.npy"}
    source = bj.from_npy(paths)
    assert source.treedef == jax.tree.structure(paths)
    assert_reads(source, [K, X])
    assert_reads(source, [K, X], 3, 20)
    assert np.shares_memory(source.read(5, 9)[1], source.read(6, 10)[1])
    assert_threads_read(source, [K, X])
    assert_opens_elsewhere(source)
    assert "and 4 more" in repr(source)


def test_one_file_is_as_ever(tmp_path):
    source = bj.from_npy(save_parts(tmp_path, "x", X, []))
    assert isinstance(source, NpySource)
    np.save(tmp_path / "x[1].npy", K)
    assert_reads(bj.from_npy(tmp_path / "x[1].npy"), [K])


@hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
@hypothesis.given(st.data())
def test_any_range_of_any_files(tmp_path_factory, data):
    cuts, others = (data.draw(st.lists(st.integers(0, N), max_size=4)) for _ in range(2))
    folder = tmp_path_factory.mktemp("x")
    paths = [save_parts(folder, "x", X, sorted(cuts)), save_parts(folder, "k", K, sorted(others))]
    source = bj.from_npy(paths)
    start = data.draw(st.integers(0, N))
    assert_reads(source, [X, K], start, data.draw(st.integers(start, N)))


def test_programs(tmp_path):
    paths = {"x": save_parts(tmp_path, "x", X, [10]), "k": save_parts(tmp_path, "k", K, [5, 6])}
    assert_runs(bj.from_npy(paths), {"x": X, "k": K})


def test_what_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"from_npy: found no file '.*/z-\*.npy'"):
        bj.from_npy(tmp_path / "z-*.npy")
    for url in ("gs://bucket/x.npy", "https://host/x-*.npy"):
        with pytest.raises(StructureError, match=r"leaf \['a'\]: found the URL .*, expected a loc"):
            bj.from_npy({"a": url})
    pattern = save_parts(tmp_path, "x", X, [4])
    np.save(tmp_path / "x-05.npy", X[:, 0])
    with pytest.raises(
        StructureError, match=r"found float32\[3\] in .*x-05.npy, expected float32\["
    ):
        bj.from_npy(pattern)
    np.save(tmp_path / "x-05.npy", X.astype(float))
    with pytest.raises(StructureError, match=r"found float64\[2, 3\] in .*x-05.npy, expected"):
        bj.from_npy(pattern)
    np.save(tmp_path / "x-05.npy", X[:3])
    np.save(tmp_path / "k.npy", K)
    with pytest.raises(PlacementError, match=r"\(.*x-00.npy and 2 more\): found 26 members, exp"):
        bj.from_npy([tmp_path / "k.npy", pattern])
    (tmp_path / "x-05.npy").write_bytes(b"text")
    with pytest.raises(SourceError, match=r"x-05.npy: found 4 bytes that are not a whole .npy"):
        bj.from_npy(pattern)


def test_files_that_change(tmp_path):
    source = bj.from_npy(save_parts(tmp_path, "x", X, [4]))
    np.save(tmp_path / "x-01.npy", X[:2])
    assert_reads(source, [X], 0, 4)
    with pytest.raises(SourceError, match=r"x-01.npy: found 176 bytes .*the file was changed"):
        source.read(3, 5)
    # Files of our own have no times in their specs.
    spec = {**source.to_spec(), "stamps": None}
    with pytest.raises(SourceError, match=r"x-01.npy: found float32\[2, 2, 3\], expected float32"):
        open_spec(spec).read(3, 5)


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": [[["x", -1]]]},
        {"files": [[["x", 0]]]},
        {"files": 3},
        {"leaves": []},
        {"stamps": 3},
        {"stamps": []},
        {"stamps": [["x", 1, "2"], ["y", 1, "2"]]},
    ],
    ids=str,
)
def test_specs_that_are_none(change, tmp_path):
    spec = bj.from_npy(save_parts(tmp_path, "x", X, [4])).to_spec()
    assert isinstance(open_spec(spec), NpySeries)
    with pytest.raises(SourceError, match="which its to_spec does not give"):
        open_spec({**spec, **change})
