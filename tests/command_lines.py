"""A folder with a file of programs and data, for tests of the command line."""

import json
import sys

import numpy as np
import pytest

from beamjax.commands import cli

N = 40

PROGRAMS = '''
"""Programs of the tests."""

import warnings

import jax
import jax.numpy as jnp

import beamjax as bj

NUMBER = 3


@bj.program(placements={"clinics": None})
def loss(weights, x, y, power=2, *, scale=1.0):
    def at_one(x, y):
        return jnp.mean(jnp.abs(x @ weights - y) ** power)

    return {"loss": bj.reduce_mean(bj.map_fn(at_one, (x, y))) * scale, "weights": weights}


@bj.program(placements={"rows": None})
def embed(w, x):
    return bj.map_fn(lambda v: v * w["scale"], x), bj.reduce_max(x)


def prepared(scale=2, rows=10, reverse=False):
    return embed, {"scale": jnp.int32(-scale if reverse else scale)}, bj.from_range(rows)


def typed(count: int, name: "str" = "", scale: float = 1, other: int | None = None):
    return lambda x: x, [count, len(name), scale]


def nothing():
    return 3


def broken(x):
    return helper(x)


def helper(x):
    raise KeyError("nobody")


@bj.program(placements={"rows": None})
def told(x):
    warnings.warn("be told")
    jax.debug.print("printed")
    return bj.reduce_sum(x)


class Model:
    @staticmethod
    @bj.program(placements={"rows": None})
    def mean(x):
        return bj.reduce_mean(x)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with `programs_here.py` and data."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 5, 3)).astype(np.float32)
    (tmp_path / "programs_here.py").write_text(PROGRAMS)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", x @ np.array([1, -2, 0.5], np.float32))
    np.save(tmp_path / "weights.npy", np.ones(3, np.float32))
    np.save(tmp_path / "three.npy", np.arange(3, dtype=np.int32))
    np.savez(tmp_path / "w.npz", **{"model/weights": np.ones(3, np.float32)})
    (tmp_path / "parts").mkdir()
    for start in range(0, N, 10):
        np.save(tmp_path / "parts" / f"x-{start:02}.npy", x[start : start + 10])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("BEAMJAX_JOBS", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if "programs_here" in name:
            del sys.modules[name]


LOSS = [
    "programs_here.py:loss", "--arg", "weights=weights.npy", "--arg", "x=x.npy", "--arg", "y=y.npy",
]  # fmt: skip


def json_of(capsys, *argv):
    """The exit status of a command with --json, what it prints, and its words on stderr."""
    status = cli.main([*argv, "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err
