"""Sources of unknown length in .npy files."""

import os

import ml_dtypes
import numpy as np
import pytest
from streams import Numbers, stream

from beamjax.errors import SourceError
from beamjax.options import Options
from beamjax.spool import spool, spooled_here


def test_all_types(tmp_path):
    tree = [
        np.arange(20, dtype=np.int8),
        np.arange(40.0).reshape(20, 2).astype(ml_dtypes.bfloat16),
        np.arange(20).astype(">i4"),
        np.zeros((20, 0), np.float32),
        np.arange(20) % 2 == 0,
    ]
    source = spool(stream(tree), tmp_path / "new")
    assert len(source) == 20
    for found, expected in zip(source.read(3, 17), tree, strict=True):
        assert found.dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, expected[3:17])
    assert np.load(source.files[0]).tolist() == tree[0].tolist()


def test_pieces_and_the_end_of_the_folder(tmp_path):
    options = Options(work_folder=str(tmp_path))
    with spooled_here([Numbers([3, 0, 2]), Numbers([1])], options) as (first, second):
        assert first.read(0, 5)[0].tolist() == [0, 1, 2, 3, 4]
        assert (len(first), len(second)) == (5, 1)
    assert not os.listdir(tmp_path)


def test_no_members(tmp_path):
    with pytest.raises(SourceError, match="found no member"):
        spool(Numbers([0, 0]), tmp_path)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match=r"file/0.*cannot write|cannot write"):
        spool(Numbers([1]), tmp_path / "file" / "0")
