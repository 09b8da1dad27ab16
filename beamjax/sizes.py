"""Sizes of placements that a program leaves open, found from its arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import tree_util

from beamjax.errors import PlacementError
from beamjax.placements import Placements, activate, known_size, unobserved


def find_sizes(
    placements: Placements,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Placements:
    """The placements of a call of a program, with a size for each.

    An open size is that of the placement of the same name in a program around this one, if there is
    one; otherwise the length of the first axis of some argument. Where arguments differ in it, the
    program is traced with each, and the only one must be right with which it can be. Only where
    none is right are there no members.

    Args:
      placements: of the program; None is an open size.
      fn: the function of the program.
      args, kwargs: of the call.

    Raises:
      PlacementError: no size fits, or more than one does.
    """
    opened = [name for name, n in placements if n is None]
    if not opened:
        return placements
    around = {name: n for name in opened if (n := known_size(name)) is not None}
    lengths = _lengths((args, kwargs))
    if len(opened) == 1:
        # An array of unknown length is one of members.
        lengths = [n for n in lengths if not isinstance(n, int)] or lengths
    choices = [[around[name]] if name in around else lengths for name in opened]
    found: list[Mapping[str, Any]] = [
        dict(zip(opened, sizes, strict=True)) for sizes in itertools.product(*choices)
    ]
    failures: list[str] = []
    may_be_empty = _holds_empty((args, kwargs))
    if len(found) > 1 or may_be_empty:
        found = list(_fitting(placements, found, fn, args, kwargs, failures))
    if not found and may_be_empty:
        no_members = {name: around.get(name, 0) for name in opened}
        found = list(_fitting(placements, [no_members], fn, args, kwargs, failures))
    if len(found) != 1:
        what = f"the first axes of the arguments have the lengths {lengths}" if lengths else (
            "no argument is an array with an axis"
        )  # fmt: skip
        which = f", and {' and '.join(map(_text, found))} all fit" if found else ""
        which = which or "".join(f"\n  {failure}" for failure in failures)
        raise PlacementError(
            f"program {getattr(fn, '__name__', fn)}: found no single size for the placement "
            f"{', '.join(map(repr, opened))}: {what}{which}\n"
            "Give the number of members in the decorator."
        )
    return tuple((name, found[0].get(name, n)) for name, n in placements)


def _fitting(
    placements: Placements,
    candidates: Sequence[Mapping[str, Any]],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    failures: list[str],
) -> Iterator[Mapping[str, Any]]:
    """The candidates with which the program can be traced; appends why the others can't."""
    leaves, tree = tree_util.tree_flatten((args, kwargs))
    arrays = {i: jax.typeof(x) for i, x in enumerate(leaves) if _is_array(x)}

    def call(values: dict[int, Any]) -> Any:
        merged = [values.get(i, leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = tree_util.tree_unflatten(tree, merged)
        return tree_util.tree_map(lambda x: x if _is_array(x) else None, fn(*args, **kwargs))

    for sizes in candidates:
        known = tuple((name, sizes.get(name, n)) for name, n in placements)
        with unobserved(), activate(known):
            try:
                # A new function, since JAX serves one that it has seen from its cache.
                jax.eval_shape(lambda values: call(values), arrays)
            except Exception as error:  # of any kind: the user's code is run with a wrong size
                failures.append(f"{_text(sizes)}: {type(error).__name__}: {error}".split("\n")[0])
            else:
                yield sizes


def _lengths(tree: Any) -> list[Any]:
    """The distinct lengths, at least 1, of the first axes of the arrays in a tree."""
    arrays = [x for x in tree_util.tree_leaves(tree) if _is_array(x) and x.ndim]
    return [n for n in dict.fromkeys(x.shape[0] for x in arrays) if not isinstance(n, int) or n > 0]


def _holds_empty(tree: Any) -> bool:
    """Whether the first axis of an array in a tree has no entries."""
    return any(_is_array(x) and x.shape[:1] == (0,) for x in tree_util.tree_leaves(tree))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _text(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={n}" for name, n in sizes.items())
