"""Sources of unknown length for tests, and programs over members of unknown number.

Workers in other processes import this module.
"""

import jax
import jax.numpy as jnp
import numpy as np

import beamjax as bj
from beamjax.sources.source_base import LeafSpec


def cut(tree, sizes):
    """Chunks of these sizes, the last one again and again."""
    n, start = len(jax.tree.leaves(tree)[0]), 0
    for size in [*sizes, *[max(sizes[-1], 1)] * n]:
        if start < n:
            yield jax.tree.map(lambda x, a=start, b=start + size: x[a:b], tree)
            start += size


class Counted:
    """A function for `from_chunks` that knows how often it was read to its end."""

    def __init__(self, tree, sizes=(3, 0, 8, 1)):
        self.tree, self.sizes, self.reads = tree, sizes, 0

    def __call__(self):
        yield from cut(self.tree, self.sizes)
        self.reads += 1


def stream(tree, sizes=(3, 0, 8, 1)):
    return bj.from_chunks(Counted(tree, sizes))


class Numbers(bj.StreamSource):
    """Members 0, 1, ... as float32, in several pieces: a source of a user's own."""

    leaves = (LeafSpec((), np.dtype(np.float32)),)

    def __init__(self, lengths):
        self.lengths = lengths

    @property
    def pieces(self):
        return len(self.lengths)

    def chunks(self, piece):
        first = sum(self.lengths[:piece])
        for member in range(first, first + self.lengths[piece]):
            yield [np.asarray([member], np.float32)]

    @property
    def treedef(self):
        return jax.tree.structure(0)


# --- programs

W = np.asarray([0.5, -1.25, 2.0], np.float32)
opened = bj.program(placements={"clients": None})


def data(n):
    x = np.random.default_rng(n).normal(size=(n, 4, 3)).astype(np.float32)
    return {"x": x, "k": np.random.default_rng(n).integers(0, 3, size=n).astype(np.int32)}


@opened
def reductions(w, d):
    y = bj.map_fn(lambda e: jnp.tanh(e["x"] @ w), d)
    return [
        *(f(y) for f in (bj.reduce_sum, bj.reduce_mean, bj.reduce_max, bj.reduce_min)),
        *(f(y > 0) for f in (bj.reduce_any, bj.reduce_all)),
        *(f(y) for f in (bj.reduce_prod, bj.reduce_argmax, bj.reduce_argmin)),
        bj.reduce_mean(d["k"]),
        bj.reduce_weighted_mean(y, d["k"] + 1),
        bj.reduce_by_key(y, d["k"], num_keys=3),
        bj.reduce(lambda a, b: a * 0.5 + b, y),
        jnp.sum(y, axis=(0, 1)),
        jnp.max(d["x"], axis=(0, 1)),
    ]


@opened
def two_passes(w, d):
    y = bj.map_fn(lambda e: jnp.tanh(e["x"] @ w), d)
    mean = bj.reduce_mean(y)
    z = bj.map_fn(lambda e, v: jnp.sum(v - mean) * e["k"].astype("float32"), (d, y))
    return z, bj.reduce_max(z), y


@opened
def creations(w, d):
    n = d["k"].shape[0]
    keys = jax.random.split(jax.random.key(3), n)
    noise = bj.map_fn(
        lambda k, i: jax.random.normal(k) * i.astype("float32"), (keys, jnp.arange(n))
    )
    y = bj.map_fn(lambda e, w, s: (e["x"] @ w).sum() + s, (d, bj.broadcast(w), noise))
    return bj.reduce_sum(y), jnp.zeros(n) + noise, bj.reduce_sum(jnp.ones(n))
