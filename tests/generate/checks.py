"""Runs a drawn program by `jax.jit` and by runners, and compares the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import beamjax as bj

from .programs import Program
from .scope import numbers

OPTIONS = {"shard_size": 8}
RUNNERS = ("local", "DirectRunner")


class RejectedError(Exception):
    """`jax.jit` itself refuses the program."""


class DifferenceError(Exception):
    """A runner gives another result than `jax.jit`, or none."""


def check(program: Program, runners: Sequence[str] = RUNNERS) -> None:
    """Runs a program by each runner.

    Raises:
      RejectedError: JAX can't run it.
      DifferenceError: a runner fails, or differs from `jit` or from the other runner.
    """
    with numbers(program.x64):
        fn, args = program.build()
        compiled = jax.jit(fn)
        try:
            want = compiled(*args)
        except Exception as error:
            raise RejectedError(f"{type(error).__name__}: {error}") from error
        allowed = tolerances(program, compiled, args, want)
        found = {}
        for runner in runners:
            try:
                found[runner] = bj.run(fn, *args, runner=runner, options=OPTIONS)
            except Exception as error:
                raise DifferenceError(f"{runner}: {type(error).__name__}: {error}") from error
            compare(runner, found[runner], want, allowed)
        if len(found) == 2:
            compare("DirectRunner and local", *found.values(), None)


def tolerances(program: Program, compiled: Any, args: Any, want: Any) -> list[float]:
    """For each leaf, how much rounding may change it.

    `jit` runs again on arguments that are a few units in the last place off, which shows how much
    the program amplifies such errors.
    """
    unit = max(float(jnp.finfo(name).eps) for name in program.floats or ["float32"])
    spread = [0.0] * len(jax.tree.leaves(want))
    for seed in range(3):
        moved = [
            _moved(x, np.random.default_rng([seed, i])) if inexact else x
            for i, (x, inexact) in enumerate(zip(args, program.inexact, strict=True))
        ]
        for i, (a, b) in enumerate(zip(raw(compiled(*moved)), raw(want), strict=True)):
            spread[i] = max(spread[i], _difference(a, b))
    return [100 * unit * (2 + _largest(b)) + 50 * s for s, b in zip(spread, raw(want), strict=True)]


def _moved(x: Any, rng: np.random.Generator) -> Any:
    if isinstance(x, float):
        return x * (1 + 1e-6 * rng.uniform(-1, 1))
    eps = float(jnp.finfo(x.dtype).eps)
    return x * jnp.asarray(1 + 4 * eps * rng.uniform(-1, 1, x.shape), x.dtype)


def raw(tree: Any) -> list[np.ndarray]:
    found = []
    for x in jax.tree.leaves(tree):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        found.append(np.asarray(x))
    return found


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _largest(x: np.ndarray) -> float:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return 0.0
    x = np.abs(_wide(x))
    return float(np.max(x, initial=0, where=np.isfinite(x)))


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        return 0.0 if np.array_equal(a, b) else np.inf
    with np.errstate(all="ignore"):
        a, b = _wide(a), _wide(b)
        distance = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
        distance = np.where(np.isnan(distance), np.inf, distance)
    return float(np.max(distance, initial=0))


def compare(who: str, found: Any, want: Any, allowed: list[float] | None) -> None:
    """Compares two trees; without tolerances, bit for bit."""
    trees = jax.tree.structure(found), jax.tree.structure(want)
    if trees[0] != trees[1]:
        raise DifferenceError(f"{who}: found the tree {trees[0]}, expected {trees[1]}")
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True)
    for i, (a, b) in enumerate(leaves):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise DifferenceError(
                f"{who}: leaf {i} is {a.dtype}{a.shape}, expected {b.dtype}{b.shape}"
            )
    for i, (a, b) in enumerate(zip(raw(found), raw(want), strict=True)):
        if allowed is None:
            if a.tobytes() != b.tobytes():
                raise DifferenceError(f"{who}: leaf {i} has other bits: {a} and {b}")
        elif not (worst := _difference(a, b)) <= allowed[i]:
            raise DifferenceError(
                f"{who}: leaf {i} differs by {worst:.3g}, more than {allowed[i]:.3g}: "
                f"found {a}, expected {b}"
            )
