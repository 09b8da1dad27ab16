"""Room for arrays that JAX takes as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax import aligned
from beamjax.shards import ShardExecutor
from beamjax.sources.npy_source import map_file


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


@bj.program(clients=None)
def total(x, y):
    return bj.reduce_sum(bj.map_fn(lambda v, w: jnp.sin(v) * w, (x, y)))


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_shards_of_mapped_files_are_read_where_they_are(runner, tmp_path, monkeypatch):
    n, taken = 44, []
    rows = np.arange(n * 16, dtype=np.float32).reshape(n, 16)
    numbers = np.arange(n * 2, dtype=np.float64)[::2].astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "y.npy", numbers)
    real = ShardExecutor._called

    def called(self, call, shard, heads, arrays):
        taken.append((shard, arrays))
        return real(self, call, shard, heads, arrays)

    monkeypatch.setattr(ShardExecutor, "_called", called)
    sources = [bj.from_npy(tmp_path / name) for name in ("x.npy", "y.npy")]
    found = bj.run(total, *sources, runner=runner, options={"shard_size": 16})
    np.testing.assert_allclose(found, (np.sin(rows) * numbers[:, None]).sum(axis=0), rtol=1e-4)
    maps = [map_file(str(tmp_path / name)) for name in ("x.npy", "y.npy")]
    assert sorted(shard.count for shard, _ in taken) == [12, 16, 16]
    for shard, arrays in taken:
        for array, whole in zip(arrays, maps, strict=True):
            # The last shard is filled up to the size of the others; those are parts of the file.
            assert np.shares_memory(array, whole) == (shard.count == 16)
            taken_as_it_is = jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data
            assert taken_as_it_is or shard.count < 16
