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
    """The leaf as an array.

    Args:
      op: the operator, for messages.
      where: the argument that holds `leaf`, for messages.
      path: the path of `leaf` in that argument, for messages.
      leaf: an array or a scalar.

    Raises:
      StructureError: it is neither.
    """
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
    """The leaf as an array with n members along axis 0; arguments as for `as_array`.

    Raises:
      PlacementError: it has another number of members.
      StructureError: it is neither an array nor a scalar.
      SizeFound: a trace looks for the size of the placement, which is the length of this leaf.
    """
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
    """A sentence on lists of numbers, for the message of a leaf that has no axis for members.

    Args:
      path: of the leaf in its tree.
      shape: of the leaf.
    """
    if shape or not path or not isinstance(path[-1], tree_util.SequenceKey):
        return ""
    return " A list of numbers is a tree of scalars; numpy.asarray(...) makes one array of it."


def name_of(fn: Callable[..., Any]) -> str:
    """Returns the name of a function for messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)
