"""Sources of unknown length in files of the store."""

import json

import jax
import numpy as np
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Numbers, stream

from beamjax.errors import ArrayFormatError, SourceError
from beamjax.options import Options
from beamjax.pipelines.spooling import SpooledSource, spooled
from beamjax.sources.source_base import open_spec


def test_pieces_of_several_sources(monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.spooling.FILE_BYTES", 16)
    x = {"x": np.arange(30.0).reshape(10, 3), "k": np.arange(10)}
    with spooled([Numbers([5, 0, 6]), stream(x)], FnApiRunner(), Options()) as (numbers, rows):
        assert len(numbers.parts) == 4
        assert numbers.read(0, 11)[0].tolist() == list(range(11))
        again = open_spec(json.loads(json.dumps(numbers.to_spec())))
        assert again.read(3, 8)[0].tolist() == [3, 4, 5, 6, 7]
        assert again.read(5, 5)[0].shape == (0,)
        assert rows.treedef == jax.tree.structure(x)
        np.testing.assert_array_equal(rows.read(2, 9)[1], x["x"][2:9])
        with pytest.raises(SourceError, match="range within 0 to 11"):
            numbers.read(3, 12)
    with pytest.raises(SourceError, match="cannot read"):
        open_spec(numbers.to_spec()).read(0, 1)


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=6), data=st.data())
@settings(deadline=None, max_examples=50)
def test_any_range(counts, data):
    source = SpooledSource("", [(str(i), c) for i, c in enumerate(counts)], Numbers.leaves)
    n = sum(counts)
    firsts = np.cumsum([0, *counts])
    source._load = lambda name, count: [np.arange(count) + firsts[int(name)]]
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert source.read(start, stop)[0].tolist() == list(range(start, stop))


def test_no_members():
    with (
        pytest.raises(SourceError, match="found no member"),
        spooled([Numbers([0, 0])], FnApiRunner(), Options()),
    ):
        pass


def test_files_that_are_something_else(tmp_path):
    (tmp_path / "a").write_bytes(b"nothing")
    source = SpooledSource(str(tmp_path), [("a", 3)], Numbers.leaves)
    with pytest.raises(ArrayFormatError):
        source.read(0, 3)
