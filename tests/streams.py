"""Sources of unknown length for tests; workers in other processes import this module."""

import jax
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


class Numbers(bj.StreamSource, kind="test-numbers"):
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

    def to_spec(self):
        return {**self.spec_head(), "lengths": self.lengths}

    @classmethod
    def from_spec(cls, spec):
        return cls(spec["lengths"])

    @property
    def treedef(self):
        return jax.tree.structure(0)
