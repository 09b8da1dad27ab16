"""Arrays of .npz files, mapped where they are; against np.load."""

import os
import zipfile
from pathlib import Path

import hypothesis
import jax
import ml_dtypes
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
from beamjax.sources.source_base import open_spec

N = 23
DTYPES = [
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bool", "complex64", ">f4"),
]


def numbers(dtype, shape):
    return np.random.default_rng(0).integers(0, 2, shape).astype(dtype)


@pytest.fixture
def tree():
    return {
        "x": np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3),
        "columns": np.asfortranarray(np.arange(N * 4.0).reshape(N, 4)),
        "label": np.arange(N, dtype=np.int8),
    }


def save(path, tree):
    np.savez(path, **tree)
    return str(path)


def test_round_trip_of_every_dtype(tmp_path):
    tree = {dtype.replace(">", "big"): numbers(dtype, (N, 3)) for dtype in DTYPES}
    source = bj.from_npz(save(tmp_path / "x.npz", tree))
    assert source.treedef == jax.tree.structure(tree)
    loaded = {name: array for name, array in np.load(tmp_path / "x.npz").items()}  # noqa: C416
    native = [a.astype(a.dtype.newbyteorder("=")) for a in jax.tree.leaves(loaded)]
    assert_reads(source, native)
    assert_reads(source, native, 4, 19)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=30)
@hypothesis.given(st.integers(0, N), st.integers(0, N), st.booleans())
def test_any_range(tmp_path_factory, start, stop, columns):
    start, stop = sorted((start, stop))
    x = np.arange(N * 6.0).reshape(N, 3, 2)
    tree = {"x": np.asfortranarray(x) if columns else x}
    source = bj.from_npz(save(tmp_path_factory.mktemp("x") / "x.npz", tree))
    assert_reads(source, [x], start, stop)


def test_arrays_are_mapped_and_files_opened_elsewhere(tree, tmp_path):
    source = bj.from_npz(save(tmp_path / "x.npz", tree))
    first, again = source.read(0, 9), source.read(4, 12)
    assert all(np.shares_memory(*pair) for pair in zip(first, again, strict=True))
    assert repr(source).endswith("x.npz>")
    assert_threads_read(source, jax.tree.leaves(tree))
    assert_opens_elsewhere(source)


def test_programs(tree, tmp_path):
    assert_runs(bj.from_npz(save(tmp_path / "x.npz", tree)), tree)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, StructureError, "from_npz: found int, expected the path"),
        ("gs://b/x.npz", StructureError, "found the URL gs://b/x.npz, expected a local path"),
        ("/none/x.npz", SourceError, "/none/x.npz: is not there"),
    ],
)
def test_paths_that_are_none(given, error, message):
    with pytest.raises(error, match=message):
        bj.from_npz(given)


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({}, StructureError, "found a tree without leaves"),
        (
            {"a": np.float32(1)},
            StructureError,
            r"leaf \['a'\]: found an array of shape \(\) in .*a",
        ),
        (
            {"a": np.array(["x"])},
            StructureError,
            r"leaf \['a'\] in .*, array 'a': dtype <U1 cannot",
        ),
        ({"a": np.array([{}])}, StructureError, r"array 'a': dtype object cannot|no whole array"),
        ({"a": numbers(ml_dtypes.bfloat16, (3,))}, StructureError, "np.savez loses bfloat16"),
        ({"a": np.zeros((0, 2))}, PlacementError, r"\['a'\] \(.*x.npz\): found 0 members"),
        (
            {"a": np.zeros(3), "b": np.zeros(4)},
            PlacementError,
            r"leaf \['b'\] .*: found 4 members, expected 3 as in placed input, leaf \['a'\]",
        ),
    ],
    ids=str,
)
def test_arrays_that_are_refused(tree, error, message, tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, **tree)
    if "no whole" in message:
        error = (StructureError, SourceError)
    with pytest.raises(error, match=message):
        bj.from_npz(path)


def test_compressed_and_other_files(tree, tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, **tree)
    with pytest.raises(SourceError, match=r"x.npz, 'x.npy': is compressed.*np.savez\('new.npz'"):
        bj.from_npz(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "text")
    with pytest.raises(SourceError, match=r"x.npz, 'notes.txt': expected arrays only"):
        bj.from_npz(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.npy", "text")
    with pytest.raises(SourceError, match=r"x.npz, 'a.npy': found no whole array"):
        bj.from_npz(path)
    path.write_bytes(b"text")
    with pytest.raises(
        SourceError, match=r"x.npz: cannot read .*expected an .npz file of np.savez"
    ):
        bj.from_npz(path)


def test_files_that_are_cut_off(tree, tmp_path):
    path = Path(save(tmp_path / "x.npz", tree))
    data = path.read_bytes()
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(SourceError, match=r"x.npz"):
            bj.from_npz(path)


def test_files_that_change_or_may_not_be_read(tree, tmp_path, monkeypatch):
    source = bj.from_npz(save(tmp_path / "x.npz", tree))
    save(tmp_path / "x.npz", {"x": np.zeros(3)})
    with pytest.raises(SourceError, match=r"x.npz: found .* the file was changed after the source"):
        source.read(0, 1)

    def forbidden(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", forbidden)
    with pytest.raises(SourceError, match=r"x.npz: may not be read by user"):
        source.read(0, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0},
        {"arrays": []},
        {"arrays": [[0, "<f8", False]]},
        {"arrays": [[-1, "<f4", False]]},
        {"arrays": [[0, "what", False]]},
        {"arrays": [[0, "<f4", 0]]},
        {"arrays": [], "leaves": []},
        {"file": []},
    ],
    ids=str,
)
def test_specs_that_are_none(change, tmp_path):
    path = save(tmp_path / "x.npz", {"x": np.zeros(3, np.float32)})
    spec = bj.from_npz(path).to_spec()
    with pytest.raises(SourceError, match="which its to_spec does not give"):
        open_spec({**spec, **change})
    with pytest.raises(SourceError, match=r"x.npz: found \d+ bytes, expected float32\[9999\] at"):
        open_spec({**spec, "size": 9999}).read(0, 1)
