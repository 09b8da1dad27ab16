"""Sources that are read together, by the same index."""

import numpy as np
import pytest

import beamjax as bj
from beamjax.errors import PlacementError, SourceError
from beamjax.sources.source_base import open_spec
from beamjax.sources.zipped_source import ZippedSource

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6)


def test_leaves_stand_side_by_side(tmp_path):
    zipped = ZippedSource([bj.from_arrays(X), bj.from_arrays({"y": Y, "z": Y * 2})])
    assert [str(leaf) for leaf in zipped.leaves] == ["float64[2]", "int64[]", "int64[]"]
    assert len(zipped) == 6
    again = open_spec(zipped.spilled(str(tmp_path)).to_spec())
    for source in (zipped, again):
        for found, expected in zip(source.read(1, 4), (X, Y, Y * 2), strict=True):
            np.testing.assert_array_equal(found, expected[1:4])


def test_lengths_must_agree():
    with pytest.raises(PlacementError, match=r"sources of \[6, 5\] members"):
        ZippedSource([bj.from_arrays(X), bj.from_arrays(Y[:5])])


def test_bad_specs(tmp_path):
    spec = ZippedSource([bj.from_arrays(X).spill(tmp_path)]).to_spec()
    for sources in ([], None, [3]):
        with pytest.raises(SourceError):
            open_spec({**spec, "sources": sources})
