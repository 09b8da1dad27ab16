"""Programs that go wrong at member nine, for tests: `python faults.py fault way folder` runs one.

What they call on workers is made within functions, so that it travels by value to any process.
"""

import json
import sys

import jax
import numpy as np

import beamjax as bj
from beamjax.sources import source_base

N = 20
X = np.repeat(np.arange(N, dtype=np.float32)[:, None], 3, axis=1)
TOTAL = X.sum(axis=0)
WHERE = ("map_clients_0", 1, (8, 15))
"""Step, shard and members of what goes wrong, in shards of eight."""

THREADS = {"direct_running_mode": "multi_threading", "direct_num_workers": 2}
PROCESSES = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}
WAYS = {
    "local": ("local", {}),
    "one": ("DirectRunner", {}),
    "threads": ("DirectRunner", THREADS),
    "processes": ("DirectRunner", PROCESSES),
}
"""Ways to run workers: the runner and its options."""


def fault(name, folder):
    """A function that goes wrong; names that end with "once" do at the first call only.

    A hang ends when there is a file "over" in the folder.
    """
    folder = str(folder)

    def go_wrong():
        import ctypes
        import os
        import signal
        import time

        kind, _, once = name.partition(" ")
        mark = os.path.join(folder, "been here")
        if once and os.path.exists(mark):
            return
        with open(mark, "a") as file:
            file.write(f"{os.getpid()}\n")
        if kind == "raises":
            raise ValueError("member nine")
        if kind == "hangs":
            while not os.path.exists(os.path.join(folder, "over")):
                time.sleep(0.05)
        if kind == "segfaults":
            ctypes.string_at(0)
        if kind == "killed":
            time.sleep(1)  # Which thread it was leaves no trace: others are through by then.
            os.kill(os.getpid(), signal.SIGKILL)

    return go_wrong


def in_body(name, folder):
    """A program, and its input, with a body that goes wrong."""
    go_wrong = fault(name, folder)

    def note(v):
        if v[0] == 9:
            go_wrong()
        return v

    out = jax.ShapeDtypeStruct((3,), "float32")
    body = lambda v: jax.pure_callback(note, out, v, vmap_method="sequential")
    return bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(body, x))), X


def in_source(name, folder):
    """The same where it is the input that can't be read."""
    program = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(lambda v: v * 1, x)))
    return program, Faulty(name, str(folder))


class Faulty(source_base.HoldsLeaves):
    """Goes wrong when member 8 is read."""

    def __init__(self, name, folder):
        leaf = source_base.LeafSpec((3,), np.dtype("float32"))
        super().__init__([leaf], jax.tree.structure(0))
        self.name, self.folder = name, folder

    def __len__(self):
        return N

    def read(self, start, stop):
        if start == 8:
            fault(self.name, self.folder)()
        return [X[start:stop]]

    def spec(self):
        return {**super().spec(), "class": "faults:Faulty"}  # also where this is the script


def main(name, way, folder, options="{}"):
    runner, flags = WAYS[way]
    program, x = in_body(name, folder)
    options = {"shard_size": 8, **flags, **json.loads(options)}
    bj.run(program, x, runner=runner, options=options)


if __name__ == "__main__":
    main(*sys.argv[1:])
