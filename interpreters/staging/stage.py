"""Traces a user's function to a jaxpr."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import tree_util

from beamjax import _compat
from beamjax.interpreters.staging import drjax
from beamjax.interpreters.staging.arguments import FlatCall
from beamjax.interpreters.staging.batched_maps import maps_of_members_as_passes
from beamjax.interpreters.staging.tracers import refuse_tracers
from beamjax.interpreters.staging.unknown_sizes import explained
from beamjax.ops.keyed import Keyed
from beamjax.ops.leaves import name_of
from beamjax.ops.placements import observe
from beamjax.ops.tracer_errors import add_advice
from beamjax.storage.buffers import is_immutable


@dataclass(frozen=True, eq=False)
class Staged:
    """A traced function: a closed jaxpr over flat arguments, and the tree of its results."""

    name: str
    closed: _compat.ClosedJaxpr
    out_tree: Any
    placements: tuple[tuple[str, int], ...]  # names and sizes, of the programs that were called

    def __str__(self) -> str:
        return str(self.closed)

    @functools.cached_property
    def returns_keyed(self) -> bool:
        """Whether the tree of its results has a `Keyed`."""
        numbered = tree_util.tree_unflatten(self.out_tree, range(self.out_tree.num_leaves))
        nodes = tree_util.tree_leaves(numbered, is_leaf=lambda node: isinstance(node, Keyed))
        return any(isinstance(node, Keyed) for node in nodes)


def stage(call: FlatCall) -> Staged:
    """Traces the function of a call, which may be a program of beamjax or of DrJAX."""
    fn, restore, avals = call.fn, call.restore, call.avals
    out_tree = None

    # With `wraps`, messages of JAX name the user's function, its file and its parameters.
    @functools.wraps(fn, assigned=(), updated=())
    def flat(*args: Any) -> list[Any]:
        nonlocal out_tree
        results, out_tree = tree_util.tree_flatten(fn(*args))
        return results

    with _staging() as placements:
        try:
            closed = jax.make_jaxpr(flat)(*restore(avals))
        except Exception as error:
            explanation = explained(error, lambda *leaves: flat(*restore(leaves)), avals)
            if explanation is None:
                name = name_of(fn)
                add_advice(
                    error,
                    f"beamjax traces all arguments of {name}, as jax.jit does (bind a value that "
                    f"Python needs with functools.partial({name}, ...))",
                )
                raise
            raise explanation from error
    refuse_tracers("run", fn, {"a value that the function closes over": closed.consts})
    # As under jit, later changes of NumPy arrays that `fn` closes over have no effect.
    closed = _compat.with_constants(closed, _unchanging)
    return Staged(name_of(fn), closed, out_tree, tuple(placements))


@contextlib.contextmanager
def _staging() -> Iterator[dict[tuple[str, Any], None]]:
    """A context to trace a function in; collects the placements of the programs that it calls."""
    with observe() as placements, drjax.operators_of_beamjax(), maps_of_members_as_passes():
        yield placements


def _unchanging(array: np.ndarray) -> np.ndarray:
    """An array with these values that later changes of `array` do not reach."""
    return array if is_immutable(array) else _compat.copied_constant(array)


def declared_sizes(call: FlatCall) -> list[int]:
    """Sizes of the placements of all programs that a call runs, as far as it can be traced."""
    with _staging() as placements, contextlib.suppress(Exception):
        jax.make_jaxpr(lambda *leaves: tree_util.tree_leaves(call.fn(*call.restore(leaves))))(
            *call.avals
        )
    return [n for _, n in placements if isinstance(n, int)]
