"""Finds the sizes of placements that a program takes from the arguments of each call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util

from beamjax._text import hint
from beamjax.errors import PlacementError
from beamjax.ops.leaves import hint_for_list, name_of
from beamjax.ops.placements import (
    Placements,
    SizeFound,
    activate,
    known_size,
    size_looked_for,
    unobserved,
)


def check_parameters(placements: Placements, fn: Callable[..., Any]) -> None:
    """Checks that `fn` has the parameters that placements name."""
    for name, parameter in placements:
        if not isinstance(parameter, str):
            continue
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):  # a callable that is not written in Python
            signature = inspect.Signature()
        if parameter not in signature.parameters:
            raise PlacementError(
                f"program {name_of(fn)}: placement {name!r} has the size {parameter!r}, expected "
                f"the name of a parameter of {name_of(fn)}{signature}"
                f"{hint(parameter, signature.parameters)}"
            )


def find_sizes(
    placements: Placements,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Placements:
    """Finds the size of each placement in a call of a program."""
    # A placement that names a parameter has the length of the first axis of that argument. The size
    # None stands for the size of the placement of the same name in an enclosing program, if there
    # is one. Otherwise it is the length of the first axis of the arguments, or, if these lengths
    # differ, of the first value that the program gives to an operator of the placement.
    sizes = dict(placements)
    for name, n in placements:
        if isinstance(n, str):
            sizes[name] = _members_of(name, n, fn, args, kwargs)
        elif n is None:
            sizes[name] = known_size(name)
    opened = [name for name, n in sizes.items() if n is None]
    if opened:
        lengths = _lengths((args, kwargs))
        if len(opened) == 1:
            # If an argument has an unknown length, its first axis is that of the members.
            lengths = [n for n in lengths if not isinstance(n, int)] or lengths
        if len(lengths) == 1:
            sizes |= dict.fromkeys(opened, lengths[0])
        elif lengths:
            _find_in_use(sizes, lengths, fn, args, kwargs)
        else:
            leaves = tree_util.tree_leaves_with_path((args, kwargs))
            listed = [text for path, x in leaves if (text := hint_for_list(path[2:], np.shape(x)))]
            raise _not_found(fn, opened, "no argument is an array with members", *listed[:1])
    return tuple(sizes.items())


def _members_of(
    placement: str,
    parameter: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """The length of the first axis of all leaves of an argument."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name_of(fn)}() {error}") from None
    bound.apply_defaults()
    first: tuple[str, Sequence[Any]] | None = None
    for path, leaf in tree_util.tree_leaves_with_path(bound.arguments[parameter]):
        where = f"{parameter}{tree_util.keystr(path)}"
        shape = np.shape(leaf)
        if not shape:
            raise PlacementError(
                f"program {name_of(fn)}: {where} has shape (), expected an array with the members "
                f"of placement {placement!r} along axis 0.{hint_for_list(path, shape)}"
            )
        if first is None:
            first = where, shape
        elif shape[0] != first[1][0]:
            raise PlacementError(
                f"program {name_of(fn)}: {first[0]} has shape {first[1]} and {where} has shape "
                f"{shape}, expected one number of members of placement {placement!r} along axis 0 "
                f"of all leaves of {parameter!r}."
            )
    if first is None:
        raise PlacementError(
            f"program {name_of(fn)}: {parameter} has no leaves, expected arrays with the members "
            f"of placement {placement!r} along axis 0."
        )
    return first[1][0]


def _find_in_use(
    sizes: dict[str, Any],
    lengths: Sequence[Any],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Gives each placement without a size the length of the first value used as its members."""
    # A trace ends when it finds one size, so there are as many traces as unknown sizes.
    while opened := [name for name, n in sizes.items() if n is None]:
        known = ((name, size_looked_for(name) if n is None else n) for name, n in sizes.items())
        try:
            with unobserved(), activate(tuple(known)):
                _trace(fn, args, kwargs)
        except SizeFound as signal:
            if signal.placement not in opened:  # a placement of an enclosing program
                raise
            sizes[signal.placement] = signal.size
        except Exception as error:
            error.add_note(
                f"beamjax raised this while it looked for the number of members of "
                f"{' and '.join(map(repr, opened))}: the first axes of the arguments have the "
                f"lengths {lengths}, so it traced {name_of(fn)} to see which of them are members. "
                f"{_advice(opened)} makes this trace needless."
            )
            raise
        else:
            why = f"the first axes of the arguments have the lengths {lengths}"
            raise _not_found(fn, opened, f"{why}, and no operator is given any of them as members")


def _trace(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Traces a function; arguments that are not arrays stay as they are."""
    leaves, tree = tree_util.tree_flatten((args, kwargs))

    # Messages of JAX then name the user's function and its parameters instead of this one.
    @functools.wraps(fn, assigned=(), updated=())
    def call(*arrays: Any, **named_arrays: Any) -> Any:
        traced: Iterator[Any] = iter(tree_util.tree_leaves((arrays, named_arrays)))
        merged = [next(traced) if _is_array(leaf) else leaf for leaf in leaves]
        all_args, all_kwargs = tree_util.tree_unflatten(tree, merged)
        result = fn(*all_args, **all_kwargs)
        return tree_util.tree_map(lambda x: x if _is_array(x) else None, result)

    types = [jax.typeof(leaf) if _is_array(leaf) else None for leaf in leaves]
    type_args, type_kwargs = tree_util.tree_unflatten(tree, types)
    jax.eval_shape(call, *type_args, **type_kwargs)


def _not_found(
    fn: Callable[..., Any], opened: Sequence[str], why: str, more: str = ""
) -> PlacementError:
    return PlacementError(
        f"program {name_of(fn)}: found no single size for the placement "
        f"{', '.join(map(repr, opened))}: {why}. Give the number of members in the decorator, or "
        f"name the parameter that has them: {_advice(opened)}.{more}"
    )


def _advice(opened: Sequence[str]) -> str:
    return f"placements={{{', '.join(f'{name!r}: PARAMETER' for name in opened)}}}"


def _lengths(tree: Any) -> list[Any]:
    """The distinct lengths of the first axes of the arrays in a tree."""
    arrays = [x for x in tree_util.tree_leaves(tree) if _is_array(x) and x.ndim]
    return list(dict.fromkeys(x.shape[0] for x in arrays))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
