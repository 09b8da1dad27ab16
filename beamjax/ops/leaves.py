"""Checks the arguments of an operator, leaf by leaf."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from beamjax.errors import PlacementError, StructureError
from beamjax.ops.placements import SizeFound, is_looked_for


def as_array(op: str, where: str, path: Any, leaf: Any) -> jax.Array:
    """Converts a leaf to an array."""
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise StructureError(
            f"{op}: {where}{tree_util.keystr(path)} is of type {type(leaf).__name__}, expected an "
            f"array or a scalar."
        ) from error


def as_placed(op: str, where: str, path: Any, leaf: Any, placement: str, n: Any) -> jax.Array:
    """Converts a leaf to an array, and checks that it has n members along axis 0."""
    array = as_array(op, where, path, leaf)
    if not array.ndim or array.shape[0] != n:
        if array.ndim and is_looked_for(placement, n):
            raise SizeFound(placement, array.shape[0])
        raise PlacementError(
            f"{op}: {where}{tree_util.keystr(path)} has shape {array.shape}, expected ({n}, ...): "
            f"placement {placement!r} has {n} members, along axis 0. To give each member the same "
            f"value, broadcast it.{hint_for_list(path, array.shape)}"
        )
    return array


def hint_for_list(path: Sequence[Any], shape: Sequence[Any]) -> str:
    """Explains lists of numbers in the message about a leaf without an axis of members."""
    if shape or not path or not isinstance(path[-1], tree_util.SequenceKey):
        return ""
    return " A list of numbers is a tree of scalars; numpy.asarray(...) makes one array of it."


def name_of(fn: Callable[..., Any]) -> str:
    """Returns the name of a function for messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)
