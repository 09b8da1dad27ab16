"""What every source of files must do: the bits of arrays in memory, on all kinds of workers."""

import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import beamjax as bj
from beamjax.sources.source_base import open_spec

THREADS = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]


def assert_same(left, right):
    left, right = np.asarray(left), np.asarray(right)
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    assert left.tobytes() == right.tobytes()


def assert_reads(source, leaves, start=0, stop=None):
    """Members start..stop-1 are those of the arrays, which are in the order of the tree."""
    found = source.read(start, len(source) if stop is None else stop)
    for got, leaf in zip(found, leaves, strict=True):
        assert_same(got, leaf[start:stop])
        assert not got.flags.writeable or not len(got)


def assert_opens_elsewhere(source):
    """By its spec and by pickle, with the same members; in another process without JAX and Beam."""
    n = len(source)
    spec = json.loads(json.dumps(source.to_spec()))
    for again in (open_spec(spec), pickle.loads(pickle.dumps(source))):
        assert again.leaves == source.leaves
        assert again.to_spec() == source.to_spec()
        assert again.treedef == jax.tree.structure((0,) * len(source.leaves))
        assert_reads(again, source.read(0, n))
    code = (
        "import sys, json\n"
        "from beamjax.sources.source_base import open_spec\n"
        "source = open_spec(json.loads(sys.stdin.read()))\n"
        "before = 'jax._src.xla_bridge' in sys.modules\n"
        "print(json.dumps([array.tobytes().hex() for array in source.read(1, len(source) - 1)]))\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert 'apache_beam' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(source.to_spec()), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [array.tobytes().hex() for array in source.read(1, n - 1)]


def assert_threads_read(source, leaves):
    """Eight threads, all of the source at the same time."""
    step = max(len(source) // 50, 1)
    with ThreadPoolExecutor(8) as pool:
        starts = range(len(source) - step)
        reads = list(pool.map(lambda start: source.read(start, start + step), starts))
    for start, found in zip(starts, reads, strict=True):
        for got, leaf in zip(found, leaves, strict=True):
            assert_same(got, leaf[start : start + step])


def assert_runs(source, tree, shard_size=8):
    """A program over the source: the bits of arrays in memory, and what jit gives."""
    n = len(source)

    @bj.program(placements={"rows": n})
    def stages(tree):
        total = sum(
            jnp.sum(leaf.reshape(n, -1).astype(jnp.float32), 1) for leaf in jax.tree.leaves(tree)
        )
        mean = bj.reduce_mean(total)
        return (
            mean,
            bj.reduce_sum(bj.map_fn(lambda x: (x - mean) ** 2, total)),
            bj.reduce_max(total),
        )

    flags = [f"--shard_size={shard_size}"]
    expected = bj.run(stages, bj.from_arrays(tree), runner="local", options=flags)
    runs = [
        bj.run(stages, source, runner="local", options=flags),
        bj.run(stages, source, options=[*flags, *THREADS]),
        bj.run(stages, source, options=[*flags, *PROCESSES]),
    ]
    for found in runs:
        jax.tree.map(assert_same, found, expected)
    jitted = jax.jit(stages)(tree)
    for got, leaf in zip(jax.tree.leaves(expected), jax.tree.leaves(jitted), strict=True):
        assert got.dtype == leaf.dtype
        np.testing.assert_allclose(got, leaf, rtol=1e-4)
