"""Arrays that wait in a file."""

import contextlib
import gc
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from beamjax.errors import SourceError
from beamjax.scratch import Scratch, file_array

ARRAYS = [
    np.arange(100, dtype=np.float32),
    np.empty(0, np.int8),
    np.arange(24).reshape(2, 3, 4)[:, ::2],
    np.array([1.5, np.nan], ml_dtypes.bfloat16),
    np.array(True),
]


def test_arrays_come_back_flat(tmp_path):
    scratch = Scratch(str(tmp_path))
    slots = [scratch.write(array) for array in ARRAYS]
    for slot, array in zip(slots, ARRAYS, strict=True):
        found = scratch.read(slot)
        assert (found.dtype, found.shape) == (array.dtype, (array.size,))
        assert found.tobytes() == array.tobytes()


def test_room_is_used_again():
    scratch = Scratch()
    first, second = scratch.write(np.zeros(9)), scratch.write(np.ones(9))
    scratch.free(first)
    third = scratch.write(np.full(9, 3.0))
    assert third.offset == first.offset
    assert scratch.read(second).tolist() == [1.0] * 9
    assert scratch.read(third).tolist() == [3.0] * 9


def test_nothing_is_left(tmp_path):
    scratch = Scratch(str(tmp_path))
    scratch.write(np.zeros(9))
    assert os.listdir(tmp_path) == []
    assert len(opened(tmp_path)) == 1
    del scratch
    gc.collect()
    assert opened(tmp_path) == []


def opened(folder):
    """The files in a folder that this process holds open."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(link))
    return [link for link in links if link.startswith(str(folder))]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(SourceError, match=r"nowhere.*36 bytes.*work_folder"):
        Scratch(str(tmp_path / "nowhere")).write(np.zeros(9, np.int32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_an_array_in_a_file_is_an_array_of_zeros_in_rows(dtype, tmp_path):
    array = file_array((5, 3), np.dtype(dtype), str(tmp_path))
    assert (array.shape, array.dtype) == ((5, 3), np.dtype(dtype))
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert not array.any()
    array[1:3] = 1
    assert array[:, 0].tolist() == [0, 1, 1, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_an_array_in_a_file_needs_a_folder(tmp_path):
    with pytest.raises(SourceError, match=r"missing: cannot write 1 bytes of placed values \("):
        file_array((1,), np.dtype(np.int8), str(tmp_path / "missing"))
