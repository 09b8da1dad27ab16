"""The operators of a program.

A server value is a tree of arrays; a placed value is a tree of arrays with the members of a
placement along axis 0. `broadcast` turns a server value into a placed value, `map_fn` applies a
function to each member, and the reductions turn placed values into server values:

    @beamjax.program(placements={"clients": 10})
    def mean_of_squares(x, w):
        return beamjax.reduce_mean(beamjax.map_fn(lambda v: (v * w) ** 2, x))
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from beamjax import _compat
from beamjax.errors import PlacementError, StructureError
from beamjax.numerics.reducers import REDUCTIONS, Fold, wide_dtype

# It registers rules when it is imported.
from beamjax.ops import primitives, sharding
from beamjax.ops import transformations as _transformations  # noqa: F401
from beamjax.ops.combining import folded
from beamjax.ops.leaves import as_array, as_placed, name_of
from beamjax.ops.placements import activate, check_placements, resolve
from beamjax.ops.python_calls import PythonCall
from beamjax.ops.sharding import AnyMesh
from beamjax.ops.sizes import check_parameters, find_sizes
from beamjax.ops.tracer_errors import line_of
from beamjax.ops.weights import weights_for

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@overload
def program(
    fn: Callable[_Args, _Result],
    /,
    placements: Mapping[str, int | str | None] | None = None,
    *,
    use_abstract_mesh: bool = True,
    **sizes: int | str | None,
) -> Callable[_Args, _Result]: ...


@overload
def program(
    placements: Mapping[str, int | str | None],
    /,
    *,
    use_abstract_mesh: bool = True,
    **sizes: int | str | None,
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]: ...


@overload
def program(
    *,
    placements: Mapping[str, int | str | None] | None = None,
    use_abstract_mesh: bool = True,
    **sizes: int | str | None,
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]: ...


def program(
    fn: Any = None, /, placements: Any = None, *, use_abstract_mesh: Any = True, **sizes: Any
) -> Any:
    """Decorates a function as a program: a function that may call the operators of beamjax.

    Write `@program(placements={"clients": 10})`, `@program(clients=10)` or
    `@functools.partial(program, clients=10)`. Programs may call each other; in the inner one, the
    placements of both are known. A program can be transformed and compiled like any other JAX
    function.

    Args:
      fn: the function; without it, the result is a decorator.
      placements: the number of members of each placement: an int >= 0; the name of the parameter
        with the members, all of whose leaves have them along axis 0; or None to take the number
        from the arguments of each call. If the first axes of the arguments differ in length, None
        traces the program up to the first operator that takes one of them as a placed value.
        `beamjax.transform` also takes arguments of unknown length, for programs that do not need
        the number of members as a constant.
      use_abstract_mesh: accepted for programs written for DrJAX; it has no effect.
      **sizes: the same as `placements`, as keywords.

    Returns:
      A function with the signature of `fn`; without `fn`, a decorator that returns one.

    Raises:
      PlacementError: there is no placement, one is given twice, or one has an impossible name or
        size. The decorator raises it if the function has no parameter of the given name, and a call
        if the arguments do not give the number of members.
    """
    if fn is not None and not callable(fn):
        fn, placements = placements, fn  # The placements are the first argument.
    if fn is not None and not callable(fn):
        raise PlacementError(
            f"program: found {fn!r}, expected a function or one dict of placements."
        )
    del use_abstract_mesh
    active = check_placements(sizes if placements is None else placements)
    if placements is not None and sizes:
        active += check_placements(sizes)
    names = [name for name, _ in active]
    if len(set(names)) < len(names):
        raise PlacementError(f"program: a placement is given twice: {', '.join(names)}.")

    def decorate(fn: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        check_parameters(active, fn)

        @functools.wraps(fn)
        def run(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            with activate(find_sizes(active, fn, args, kwargs)):
                return fn(*args, **kwargs)

        return run

    return decorate if fn is None else decorate(fn)


def broadcast(x: Any, *, placement: str | None = None, mesh: AnyMesh | None = None) -> Any:
    """Gives each member of a placement a copy of a server value.

    Args:
      x: a tree of arrays or scalars.
      placement: the placement; None if the program has only one.
      mesh: the mesh on which to lay out the members; None means the one set by `jax.set_mesh`, if
        any.

    Returns:
      A tree like `x`, with leaves of shape `(n, *leaf.shape)` and the same dtypes.

    Raises:
      OutsideProgramError: called outside a program.
      PlacementError: the placement is unknown or ambiguous, or the mesh has an Explicit axis of
        that name that does not divide n.
      StructureError: a leaf is neither an array nor a scalar.
    """
    placement, n = resolve("broadcast", placement)
    mesh = sharding.mesh_for("broadcast", placement, n, mesh)

    def broadcast_leaf(path: Any, leaf: Any) -> jax.Array:
        array = as_array("broadcast", "x", path, leaf)
        return primitives.broadcast_p.bind(array, placement=placement, n=n, mesh=mesh)

    leaves, _ = tree_util.tree_flatten_with_path(x)
    return _compat.batch_of(x, [broadcast_leaf(*leaf) for leaf in leaves], n)


def map_fn(
    fn: Callable[..., Any],
    arg: Any,
    *,
    placement: str | None = None,
    mesh: AnyMesh | None = None,
) -> Any:
    """Applies a function to each member of a placement.

    Args:
      fn: takes one member and returns a tree of arrays or scalars. It may close over server values,
        which are broadcast, and over constants.
      arg: a tree of placed arrays of shapes `(n, ...)`. A tuple is unpacked: `fn` takes one
        argument for each of its entries.
      placement: the placement; None if the program has only one.
      mesh: the mesh on which to lay out the members; None means the one set by `jax.set_mesh`, if
        any.

    Returns:
      The tree that `fn` returns, with leaves of shape `(n, *leaf.shape)`.

    Raises:
      OutsideProgramError: called outside a program.
      PlacementError: the placement is unknown or ambiguous, a leaf of `arg` does not have n
        members, or the mesh has an Explicit axis named like the placement that does not divide n.
      StructureError: a leaf of `arg` or of the result of `fn` is neither an array nor a scalar; or
        `fn` closes over a mutable reference or uses a collective over the placement.
    """
    placement, n = resolve("map_fn", placement)
    mesh = sharding.mesh_for("map_fn", placement, n, mesh)
    name = name_of(fn)
    leaves = tree_util.tree_leaves_with_path(arg)
    placed = [as_placed("map_fn", "arg", path, leaf, placement, n) for path, leaf in leaves]
    arguments = arg if isinstance(arg, tuple) else (arg,)
    tree = tree_util.tree_structure(arguments)
    member_type = None

    def body(*member: Any) -> list[jax.Array]:
        nonlocal member_type
        result = fn(*_compat.member_of(arguments, tree_util.tree_leaves(member)))
        results, result_tree = tree_util.tree_flatten_with_path(result)
        where = f"the result of {name}"
        arrays = [as_array("map_fn", where, path, leaf) for path, leaf in results]
        # Only types: nothing may keep a reference to the tracers of a body.
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        member_type = tree_util.tree_unflatten(result_tree, types)
        return arrays

    # Messages of JAX then name the user's function, its file and its parameters.
    body = functools.wraps(fn, assigned=(), updated=())(body)
    avals = [sharding.member_aval(jax.typeof(x), placement) for x in placed]
    arguments_avals = tree_util.tree_unflatten(tree, avals)
    with _without_collectives(name, placement):
        jaxpr, closed_over = primitives.trace_body(body, arguments_avals)
    for value in closed_over:
        sharding.check_shared(value, placement, mesh)
    jaxpr = PythonCall(fn, name, arguments).mapped(jaxpr, closed_over)
    outs = primitives.bind_map(
        jaxpr, closed_over, placed, placement=placement, n=n, name=name, mesh=mesh
    )
    return _compat.batch_of(member_type, outs, n)


@contextlib.contextmanager
def _without_collectives(name: str, placement: str) -> Iterator[None]:
    """Explains JAX's error on an unknown axis if a body uses its placement as one."""
    try:
        yield
    except NameError as error:
        if f"axis name: {placement}" not in str(error):
            raise
        raise StructureError(
            f"map_fn: {line_of(error)}: {name} calls a collective over {placement!r}, expected a "
            "body of one member. Return the value from the body, reduce it with "
            "beamjax.reduce_sum or its like outside, and pass the result to another map_fn."
        ) from error


def reduce_sum(x: Any, *, placement: str | None = None) -> Any:
    """Sums over the members of a placement, as `jnp.sum` does over axis 0.

    Args:
      x: a tree of placed arrays of shapes `(n, ...)`.
      placement: the placement; None if the program has only one.

    Returns:
      A tree like `x`, with leaves of shapes `leaf.shape[1:]`. As in `jnp.sum`, bool and small int
      leaves become the default int of the same signedness; other leaves keep their dtype.

    Raises:
      OutsideProgramError: called outside a program.
      PlacementError: the placement is unknown or ambiguous, or a leaf does not have n members.
      StructureError: a leaf is neither an array nor a scalar.
    """
    return _reduce("sum", x, placement)


def reduce_mean(x: Any, *, placement: str | None = None) -> Any:
    """Averages over the members of a placement, as `jnp.mean` does over axis 0.

    Args:
      x: as for `reduce_sum`.
      placement: as for `reduce_sum`.

    Returns:
      A tree like `x`, with leaves of shapes `leaf.shape[1:]`. Bool and int leaves become the
      default float; other leaves keep their dtype.

    Raises:
      OutsideProgramError: as for `reduce_sum`.
      PlacementError: as for `reduce_sum`.
      StructureError: as for `reduce_sum`.
    """
    return _reduce("mean", x, placement)


def reduce_max(x: Any, *, placement: str | None = None) -> Any:
    """Takes the largest value over the members of a placement, as `jnp.max` does over axis 0.

    Members that tie share the derivative equally.

    Args:
      x: as for `reduce_sum`.
      placement: as for `reduce_sum`.

    Returns:
      A tree like `x`, with leaves of shapes `leaf.shape[1:]` and the same dtypes. A value is NaN
      where that of any member is NaN.

    Raises:
      OutsideProgramError: as for `reduce_sum`.
      PlacementError: as for `reduce_sum`, or the placement has no members.
      StructureError: as for `reduce_sum`.
    """
    return _reduce("max", x, placement)


def reduce_min(x: Any, *, placement: str | None = None) -> Any:
    """Takes the smallest value over the members of a placement, as `jnp.min` does over axis 0.

    Members that tie share the derivative equally.

    Args:
      x: as for `reduce_sum`.
      placement: as for `reduce_sum`.

    Returns:
      A tree like `x`, with leaves of shapes `leaf.shape[1:]` and the same dtypes. A value is NaN
      where that of any member is NaN.

    Raises:
      OutsideProgramError: as for `reduce_sum`.
      PlacementError: as for `reduce_sum`, or the placement has no members.
      StructureError: as for `reduce_sum`.
    """
    return _reduce("min", x, placement)


def reduce_prod(x: Any, *, placement: str | None = None) -> Any:
    """Multiplies over the members of a placement, as `jnp.prod` does over axis 0.

    The derivative by a member is the product divided by the member, unless the member is zero. So
    it is wrong where the product overflows or underflows.

    Args:
      x: as for `reduce_sum`.
      placement: as for `reduce_sum`.

    Returns:
      A tree like `x`, with leaves of shapes `leaf.shape[1:]`. As in `jnp.prod`, bool and small int
      leaves become the default int of the same signedness; other leaves keep their dtype.

    Raises:
      OutsideProgramError: as for `reduce_sum`.
      PlacementError: as for `reduce_sum`.
      StructureError: as for `reduce_sum`.
    """
    return _reduce("prod", x, placement)


def reduce_any(x: Any, *, placement: str | None = None) -> Any:
    """Tests whether any member of a placement is true, as `jnp.any` does over axis 0.

    Args:
      x: as for `reduce_sum`.
      placement: as for `reduce_sum`.

    Returns:
      A tree like `x`, with bool leaves of shapes `leaf.shape[1:]`. Numbers other than 0 are true.

    Raises:
      OutsideProgramError: as for `reduce_sum`.
      PlacementError: as for `reduce_sum`.
      StructureError: as for `reduce_sum`.
    """
    return _reduce("any", x, placement)


def reduce_all(x: Any, *, placement: str | None = None) -> Any:
    """Tests whether all members of a placement are true, as `jnp.all` does over axis 0.

    Args:
      x: as for `reduce_sum`.
      placement: as for `reduce_sum`.

    Returns:
      A tree like `x`, with bool leaves of shapes `leaf.shape[1:]`. Numbers other than 0 are true.

    Raises:
      OutsideProgramError: as for `reduce_sum`.
      PlacementError: as for `reduce_sum`.
      StructureError: as for `reduce_sum`.
    """
    return _reduce("all", x, placement)


def reduce_argmax(x: Any, *, placement: str | None = None) -> Any:
    """Finds the first member with the largest value, as `jnp.argmax` does over axis 0.

    The first NaN counts as the largest value.

    Args:
      x: as for `reduce_sum`.
      placement: as for `reduce_sum`.

    Returns:
      A tree like `x`, with leaves of shapes `leaf.shape[1:]` and the default int as dtype. For each
      element of a member, they have the index of a member.

    Raises:
      OutsideProgramError: as for `reduce_sum`.
      PlacementError: as for `reduce_sum`, or the placement has no members.
      StructureError: as for `reduce_sum`.
    """
    return _reduce("argmax", x, placement)


def reduce_argmin(x: Any, *, placement: str | None = None) -> Any:
    """Finds the first member with the smallest value, as `jnp.argmin` does over axis 0.

    The first NaN counts as the smallest value.

    Args:
      x: as for `reduce_sum`.
      placement: as for `reduce_sum`.

    Returns:
      A tree like `x`, with leaves of shapes `leaf.shape[1:]` and the default int as dtype. For each
      element of a member, they have the index of a member.

    Raises:
      OutsideProgramError: as for `reduce_sum`.
      PlacementError: as for `reduce_sum`, or the placement has no members.
      StructureError: as for `reduce_sum`.
    """
    return _reduce("argmin", x, placement)


def reduce_var(x: Any, *, ddof: float = 0, placement: str | None = None) -> Any:
    """Computes the variance over the members of a placement, as `jnp.var` does over axis 0.

    One pass over the members computes it, without cancellation where the mean is large.

    Args:
      x: as for `reduce_sum`.
      ddof: what is subtracted from the number of members, by which the sum of squares is divided: 1
        for a sample. The result is NaN if the difference is not positive.
      placement: as for `reduce_sum`.

    Returns:
      A tree like `x`, with leaves of shapes `leaf.shape[1:]`. Bool and int leaves become the
      default float, complex leaves become real; other leaves keep their dtype.

    Raises:
      OutsideProgramError: as for `reduce_sum`.
      PlacementError: as for `reduce_sum`.
      StructureError: as for `reduce_sum`.
    """
    return _reduce("var", x, placement, ddof=ddof)


def reduce_std(x: Any, *, ddof: float = 0, placement: str | None = None) -> Any:
    """Computes the standard deviation over the members, as `jnp.std` does over axis 0.

    It is the square root of `reduce_var`.

    Args:
      x: as for `reduce_sum`.
      ddof: as for `reduce_var`.
      placement: as for `reduce_sum`.

    Returns:
      As for `reduce_var`.

    Raises:
      OutsideProgramError: as for `reduce_sum`.
      PlacementError: as for `reduce_sum`.
      StructureError: as for `reduce_sum`.
    """
    return _reduce("std", x, placement, ddof=ddof)


def reduce_weighted_mean(x: Any, w: Any, *, placement: str | None = None) -> Any:
    """Averages over the members of a placement with weights: `sum(x * w) / sum(w)`.

    Args:
      x: a tree of placed arrays of shapes `(n, ...)`.
      w: the weights: a placed array of shape `(n,)` or `(n, *shape)` whose members broadcast
        against those of each leaf; or a tree of such arrays with the structure of `x` or of a
        prefix of it. If weights sum to zero, the mean is NaN or inf.
      placement: the placement; None if the program has only one.

    Returns:
      A tree like `x`. Its leaves have the shapes of the members of `x * w` (`leaf.shape[1:]` unless
      weights broadcast to more) and the dtypes of `x * w`, such as float32 for bfloat16 leaves and
      float32 weights. If a leaf and its weights are ints or bools, the dtype is the default float.
      Floats of 16 bits are averaged in float32.

    Raises:
      OutsideProgramError: called outside a program.
      PlacementError: the placement is unknown or ambiguous, or a leaf or a weight does not have n
        members.
      StructureError: a leaf is neither an array nor a scalar, the tree of weights does not fit, or
        weights don't broadcast against a leaf.
    """
    op = "reduce_weighted_mean"
    placement, n = resolve(op, placement)
    leaves, tree = tree_util.tree_flatten_with_path(x)
    values = [as_placed(op, "x", path, leaf, placement, n) for path, leaf in leaves]
    weight_leaves, weight_tree = tree_util.tree_flatten_with_path(w)
    weights = [as_placed(op, "w", path, leaf, placement, n) for path, leaf in weight_leaves]
    index = _weight_of_leaf(x, weight_tree, len(weights))
    shapes, dtypes = [], []
    for (path, _), value, i in zip(leaves, values, index, strict=True):
        shapes.append(_mean_shape(path, value, weights[i]))
        dtypes.append(_mean_dtype(value, weights[i]))

    # In their own dtype, totals of int32 weights could wrap, and those of float16 could be inf.
    factors = [
        (i, _dtype_of_total(dtype, weights[i])) for i, dtype in zip(index, dtypes, strict=True)
    ]
    distinct = list(dict.fromkeys(factors))

    def weigh(
        values: list[jax.Array], weights: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        weighted = []
        for value, i, shape, dtype in zip(values, index, shapes, dtypes, strict=True):
            value, weight = jnp.broadcast_to(value, shape), jnp.broadcast_to(weights[i], shape)
            weighted.append(value.astype(wide_dtype(dtype)) * weight.astype(wide_dtype(dtype)))
        return weighted, [weights[i].astype(wide) for i, wide in distinct]

    weighed = map_fn(weigh, (values, weights), placement=placement)
    totals, weight_totals = reduce_sum(weighed, placement=placement)
    total_of = dict(zip(distinct, weight_totals, strict=True))
    means = [
        (total / jnp.broadcast_to(total_of[factor], total.shape).astype(total.dtype)).astype(dtype)
        for total, factor, dtype in zip(totals, factors, dtypes, strict=True)
    ]
    return tree_util.tree_unflatten(tree, means)


def _reduce(op: str, x: Any, placement: str | None, **how: Any) -> Any:
    name, reduction = f"reduce_{op}", REDUCTIONS[op]
    placement, n = resolve(name, placement)

    leaves, tree = tree_util.tree_flatten_with_path(x)
    values = [as_placed(name, "x", path, leaf, placement, n) for path, leaf in leaves]
    if values and isinstance(n, int) and n == 0 and reduction.needs_members:
        raise PlacementError(
            f"{name}: found no members in placement {placement!r}, expected at least one: without "
            "any, it has no value."
        )
    weights = weights_for(name, placement, n)

    def reduced(op: str, values: Sequence[jax.Array]) -> list[jax.Array]:
        return [primitives.REDUCE_PRIMITIVES[op].bind(x, placement=placement) for x in values]

    if isinstance(reduction, Fold):
        array = None if weights is None else weights.array
        results = [folded(reduction, value, array, placement, n, **how) for value in values]
    elif weights is None:
        results = reduced(op, values)
    else:
        results = weights.reduced(op, values, reduced)
    return tree_util.tree_unflatten(tree, results)


def _weight_of_leaf(x: Any, weight_tree: Any, num_weights: int) -> list[int]:
    """For each leaf of `x`, the number of the leaf of weights above it."""
    index = tree_util.tree_unflatten(weight_tree, range(num_weights))
    try:
        return tree_util.tree_leaves(tree_util.tree_broadcast(index, x))
    except ValueError as error:
        raise StructureError(
            f"reduce_weighted_mean: the tree of weights {weight_tree} is neither one array, nor "
            f"the tree of x {tree_util.tree_structure(x)}, nor a prefix of it."
        ) from error


def _mean_shape(path: Any, value: jax.Array, weight: jax.Array) -> tuple[int, ...]:
    """The shape of the mean of values with weights."""
    shape, trailing = weight.shape[1:], value.shape[1:]
    try:
        return np.broadcast_shapes(shape, trailing)
    except ValueError as error:
        raise StructureError(
            f"reduce_weighted_mean: weights of shape {weight.shape} don't fit "
            f"x{tree_util.keystr(path)} of shape {value.shape}: {shape} does not broadcast against "
            f"{trailing}."
        ) from error


def _mean_dtype(value: jax.Array, weight: jax.Array) -> Any:
    """The dtype of a weighted mean: that of `value * weight` if inexact, else the default float."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(value, weight)
    return dtype if jnp.issubdtype(dtype, np.inexact) else jax.dtypes.canonicalize_dtype(float)


def _dtype_of_total(dtype: Any, weight: jax.Array) -> Any:
    """The dtype in which weights are added up for means of type `dtype`: real for real weights."""
    wide = np.dtype(wide_dtype(dtype))
    return wide if jnp.iscomplexobj(weight) else np.dtype(jnp.finfo(wide).dtype)
