"""Room for arrays that JAX takes as they are."""

import jax
import numpy as np
import pytest

from beamjax import aligned


@pytest.mark.parametrize("shape", [(), (3,), (1000, 7), (0, 4)])
@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128", "bfloat16"])
def test_the_room(shape, dtype):
    room = aligned.empty(shape, np.dtype(dtype))
    assert (room.shape, room.dtype.name) == (shape, dtype)
    assert room.flags.writeable
    assert room.flags.c_contiguous
    assert not room.size or room.ctypes.data % aligned.ALIGNMENT == 0


def test_jax_takes_it_without_a_copy():
    room = aligned.empty((1 << 16,), np.dtype(np.float32))
    room[:] = 1
    assert jax.device_put(room).unsafe_buffer_pointer() == room.ctypes.data
