"""Datasets that give a member at a time; workers in other processes import this module."""

import jax
import numpy as np

import beamjax as bj

N = 30


def tree(n=N):
    """What the datasets hold, as arrays."""
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(n, 2, 3)).astype(np.float32),
        "y": [np.arange(n, dtype=np.int32), np.arange(n) % 3 == 0],
    }


class Members:
    """Members one at a time."""

    def __init__(self, whole):
        self.whole = whole
        self.asked = []

    def __len__(self):
        return len(jax.tree.leaves(self.whole)[0])

    def __getitem__(self, index):
        self.asked.append(index)
        return jax.tree.map(lambda x: x[index], self.whole)


class Batches(Members):
    """Several members at a time, as grain and PyTorch ask for them."""

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [jax.tree.map(lambda x, i=index: x[i], self.whole) for index in indices]


opened = []


@bj.opens_dataset
def open_members(n, batches=False):
    opened.append(n)
    return (Batches if batches else Members)(tree(n))


@bj.opens_dataset
def open_nothing():
    raise FileNotFoundError("no such table")


@bj.opens_dataset
def open_another(sizes=[]):  # noqa: B006 - it is to give another size each time
    sizes.append(0)
    return Members(tree(len(sizes)))


def not_marked(n):
    return open_members(n)
