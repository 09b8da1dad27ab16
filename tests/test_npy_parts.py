"""`from_npy_parts`: .npy files one after the other."""

import gzip
import json

import numpy as np
import pytest

import beamjax as bj
from beamjax.chunks import members_of
from beamjax.errors import SourceError, StructureError
from beamjax.sources.source_base import open_spec

X = np.arange(46, dtype=np.float32).reshape(23, 2)
CUTS = [(0, 4), (4, 4), (4, 19), (19, 23)]


def write(folder, name, array, packed=False):
    for i, (start, stop) in enumerate(CUTS):
        path = folder / f"{name}-{i}.npy"
        np.save(path, array[start:stop])
        if packed:
            (folder / f"{name}-{i}.npy.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()


@pytest.mark.parametrize("packed", [False, True])
def test_patterns_and_lists(tmp_path, packed, monkeypatch):
    monkeypatch.setattr("beamjax.sources.npy_parts.CHUNK_BYTES", 60)
    write(tmp_path, "x", X, packed)
    end = ".npy.gz" if packed else ".npy"
    for paths in (str(tmp_path / f"x-*{end}"), [tmp_path / f"x-{i}{end}" for i in range(4)]):
        source = bj.from_npy_parts(paths)
        assert source.pieces == 4
        np.testing.assert_array_equal(members_of(source, True)[0], X)
        again = open_spec(json.loads(json.dumps(source.to_spec())))
        np.testing.assert_array_equal(members_of(again, True)[0], X)
    assert "3 more" in repr(source)


def test_trees(tmp_path):
    write(tmp_path, "x", X)
    write(tmp_path, "k", np.arange(23))
    source = bj.from_npy_parts({"x": str(tmp_path / "x-*"), "k": str(tmp_path / "k-*")})
    k, x = members_of(source, True)
    np.testing.assert_array_equal(k, np.arange(23))
    np.testing.assert_array_equal(x, X)


def test_leaves_of_different_length(tmp_path):
    write(tmp_path, "x", X)
    write(tmp_path, "k", np.arange(23))
    tree = {"x": str(tmp_path / "x-*"), "k": str(tmp_path / "k-*")}
    np.save(tmp_path / "k-2.npy", np.arange(14))
    with pytest.raises(SourceError, match=r"k-2.npy, .*x-2.npy: found different numbers of rows"):
        members_of(bj.from_npy_parts(tree), True)
    (tmp_path / "k-3.npy").unlink()
    with pytest.raises(StructureError, match=r"\['x'\]: found 4 files, expected 3"):
        bj.from_npy_parts(tree)


def test_what_is_no_such_file(tmp_path):
    with pytest.raises(SourceError, match="found no file"):
        bj.from_npy_parts(str(tmp_path / "x-*"))
    with pytest.raises(SourceError, match=r"none.npy: cannot read"):
        bj.from_npy_parts([tmp_path / "none.npy"])
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(SourceError, match=r"text.npy: cannot read"):
        bj.from_npy_parts([tmp_path / "text.npy"])
    np.save(tmp_path / "scalar.npy", 3.0)
    with pytest.raises(SourceError, match=r"found float64\[\], expected numbers"):
        bj.from_npy_parts([tmp_path / "scalar.npy"])
    np.save(tmp_path / "columns.npy", np.asfortranarray(X))
    with pytest.raises(SourceError, match="in Fortran order"):
        bj.from_npy_parts([tmp_path / "columns.npy"])
    with pytest.raises(StructureError, match="expected a pattern"):
        bj.from_npy_parts(3)
    with pytest.raises(StructureError, match="without leaves"):
        bj.from_npy_parts({})


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_ends_too_early(tmp_path, packed):
    np.save(tmp_path / "x.npy", X)
    data = (tmp_path / "x.npy").read_bytes()
    path = tmp_path / ("x.npy.gz" if packed else "x.npy")
    path.write_bytes(gzip.compress(data)[:-12] if packed else data[:-12])
    source = bj.from_npy_parts([path])
    with pytest.raises(SourceError, match=r"x.npy.*(ends in row 21|cannot read)"):
        members_of(source, True)


def test_later_files_of_another_type(tmp_path):
    write(tmp_path, "x", X)
    np.save(tmp_path / "x-2.npy", X.astype(np.float64))
    with pytest.raises(SourceError, match=r"piece 2, chunk 0.*float64.*expected rows of float32"):
        members_of(bj.from_npy_parts(str(tmp_path / "x-*")), True)
