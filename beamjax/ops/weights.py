"""Weights of members: a member with weight w counts w times.

Weights of 0, 1, 2, … leave members out or count them several times, as cross-validation and the
bootstrap do. The derivative by the weights at 1 is the influence of each member on the result, and
gives standard errors.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from beamjax.errors import PlacementError, StructureError
from beamjax.numerics.reducers import REDUCERS, REDUCTIONS, Choice, Reducer
from beamjax.ops import sharding
from beamjax.ops.leaves import as_placed, name_of
from beamjax.ops.placements import Size, observe
from beamjax.ops.primitives import map_members

# Influences: Hampel, "The Influence Curve and its Role in Robust Estimation", 1974. Standard errors
# by them, the infinitesimal jackknife: Efron, "The Jackknife, the Bootstrap and Other Resampling
# Plans", 1982, chapter 6.

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


# --- the active weights


@dataclass(eq=False)
class _Weights:
    """The weights of one call of a reweighted function."""

    # An array (n,), or a function from the index of a member to its weight.
    weights: Any
    # The placement of the members; None if the program has only one.
    placement: str | None
    # The placement of the reductions that have used the weights so far.
    used: str | None = None


# The weights of the reweighted functions that are being called. The value of a user context is part
# of the key of JAX's tracing caches, and each call has an object of its own, so JAX never reuses a
# function that was traced with other weights.
_calls = jax.make_user_context(())


@contextmanager
def _in_force(weights: _Weights) -> Iterator[None]:
    try:
        with _calls((*_calls.value, weights)):
            yield
    finally:
        weights.weights = None  # JAX's caches outlive the call.


def weights_for(op: str, placement: str, n: Size) -> MemberWeights | None:
    """The weights that apply to a reduction that is called now; None without any."""
    # With several reweighted functions around the call, the product of their weights.
    product = None
    for weights in _calls.value:
        if weights.placement is None and weights.used not in (None, placement):
            raise PlacementError(
                f"reweight: the program reduces over the placements {weights.used!r} and "
                f"{placement!r}; say which of them has the weights with placement=."
            )
        if weights.placement in (None, placement):
            weights.used = placement
            array = _placed_weights(op, weights.weights, placement, n)
            with jax.numpy_dtype_promotion("standard"):
                product = array if product is None else _widened(product) * _widened(array)
    return None if product is None else MemberWeights(product, placement, n)


def _widened(weights: jax.Array) -> jax.Array:
    """Weights in a dtype of at least 32 bits, in which they can be multiplied."""
    is_bool = weights.dtype == np.bool_
    return weights if is_bool else weights.astype(REDUCERS["prod"].partial_dtype(weights.dtype))


def refuse_weights(op: str, placement: str, n: Size, why: str) -> None:
    """Raises StructureError if the members of a reduction that takes no weights have some."""
    if weights_for(op, placement, n) is not None:
        raise StructureError(
            f"{op}: found it in a function with weights (beamjax.reweight), expected "
            f"beamjax.reduce_sum or its like: {why}."
        )


def _placed_weights(op: str, weights: Any, placement: str, n: Size) -> jax.Array:
    if callable(weights):
        mesh = sharding.mesh_for(op, placement, n, None)
        (array,) = map_members(
            lambda index: [_as_weights(weights(index), ())], [], [jnp.arange(n, dtype=np.int32)],
            placement=placement, n=n, name=name_of(weights), mesh=mesh,
        )  # fmt: skip
        return array
    array = as_placed("reweight", "weights", (), weights, placement, n)
    return _as_weights(array, (n,))


def _as_weights(weights: Any, shape: tuple[Size, ...]) -> jax.Array:
    array = jnp.asarray(weights)
    is_real = array.dtype == np.bool_ or jnp.issubdtype(array.dtype, np.integer) or _is_float(array)
    if array.shape != shape or not is_real:
        where = "the function of weights gives" if not shape else "weights is"
        raise StructureError(
            f"reweight: {where} {array.dtype}{list(array.shape)}, expected real numbers of shape "
            f"{shape}: one weight for each member."
        )
    return array


# --- equations of functions with weights

# Under these names, the name stacks of equations say where they come from.
_SCOPE = "bj_weights"
_OPERATOR = "bj_operator"


def scope_of_operator() -> Any:
    """A context for equations of an operator that has weighted their operands."""
    return jax.named_scope(_OPERATOR)


def unweighted(name_stack: str) -> set[str] | None:
    """The placements that have weights where a program computes an equation."""
    # "" is the only placement of a function. None if the equation is of no function with weights,
    # or if its operands already have them: those of an operator, and those of reverse mode, where
    # weights have scaled the cotangents.
    if _SCOPE not in name_stack or _OPERATOR in name_stack or "transpose(" in name_stack:
        return None
    return set(re.findall(rf"{_SCOPE}<(.*?)>", name_stack))


# --- weighted reductions

Reduce = Callable[[str, Sequence[jax.Array]], list[jax.Array]]
"""Reduces placed arrays by the reduction of a name."""


@dataclass(frozen=True, eq=False)
class MemberWeights:
    """The weights of the members in a reduction, a placed array (n,) of real numbers."""

    array: jax.Array
    placement: str
    n: Size

    def reduced(self, op: str, values: Sequence[jax.Array], plain: Reduce) -> list[jax.Array]:
        """Reduces placed arrays (n, ...) with the weights, by `plain`, which has none."""
        reduction = REDUCTIONS[op]
        if isinstance(reduction, Choice):
            return self._chosen(reduction, values, plain)
        reducer = REDUCERS[op]
        if not reducer.adds:
            if_present = lambda weight, *members: [
                reducer.weighted(x, weight, reducer.identity(np.dtype(x.dtype))) for x in members
            ]
            return plain(op, self._mapped(if_present, values))
        weighed, factors, dtypes = self.weighed(reducer, values)
        if not reducer.divides:
            totals = plain(op, weighed)
        else:
            sums = plain("sum", [*weighed, *factors])
            pairs = zip(sums[: len(values)], sums[len(values) :], strict=True)
            totals = [x / w.reshape(*w.shape, *[1] * (x.ndim - w.ndim)) for x, w in pairs]
        return [total.astype(dtype) for total, dtype in zip(totals, dtypes, strict=True)]

    def _chosen(
        self, choice: Choice, values: Sequence[jax.Array], plain: Reduce
    ) -> list[jax.Array]:
        best = self.reduced(choice.extreme, values, plain)

        def is_best(weight: jax.Array, *members: jax.Array) -> list[jax.Array]:
            pairs = zip(members, best, strict=True)
            return [(weight != 0) & ((x == top) | jnp.isnan(x)) for x, top in pairs]

        return plain("argmax", self._mapped(is_best, values))

    def weighed(
        self, reducer: Reducer, values: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array], list[np.dtype]]:
        """Members times their weights, or to that power; the weights; the dtypes of the results."""
        # Both have the dtypes in which they are summed: float32 for floats of 16 bits. Sums and
        # products of ints and bools stay ints if the weights are ints or bools. If the weights are
        # floats, they become floats, so that they have a derivative. Floats of 16 bits can't hold
        # sums of ints: 65,504 is the largest number of float16.
        of_ints = REDUCERS["sum"].partial_dtype(self.array.dtype)
        dtypes = [
            np.dtype(of_ints if _is_inexact(of_ints) and not _is_inexact(dtype) else dtype)
            for dtype in (reducer.result_dtype(x.dtype) for x in values)
        ]
        wide = list(map(REDUCERS["sum"].partial_dtype, dtypes))

        def of_member(weight: jax.Array, *members: jax.Array) -> list[jax.Array]:
            factors = [weight.astype(dtype) for dtype in wide]
            pairs = zip(members, factors, strict=True)
            weighed = [reducer.weighted(x.astype(w.dtype), w, None) for x, w in pairs]
            return [*weighed, *(factors if reducer.divides else [])]

        results = self._mapped(of_member, values)
        return results[: len(values)], results[len(values) :], dtypes

    def _mapped(
        self, fn: Callable[..., list[jax.Array]], values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Maps a function of the weight and the values of a member."""
        mesh = sharding.mesh_for("reweight", self.placement, self.n, None)
        results = map_members(
            fn, [], [self.array, *values],
            placement=self.placement, n=self.n, name="weights", mesh=mesh,
        )  # fmt: skip
        return [sharding.whole(array) for array in results]


def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.inexact)


# --- what users call


def reweight(
    fn: Callable[_Args, _Result], *, placement: str | None = None
) -> Callable[..., _Result]:
    """Transforms a function so that each member has a weight.

    `reweight(fn)(weights, *args)` is `fn(*args)` in which every reduction over the placement counts
    member i `weights[i]` times:

    - `reduce_sum` adds `weights[i] * x[i]`, `reduce_prod` multiplies `x[i] ** weights[i]`;
    - `reduce_mean` divides by the sum of the weights, as `reduce_weighted_mean` does by the sum of
      the products of both kinds of weights, and `reduce_var` and `reduce_std` by that sum less
      `ddof`;
    - `reduce_max`, `reduce_min`, `reduce_any`, `reduce_all`, `reduce_argmax` and `reduce_argmin`
      leave out members with weight 0;
    - `reduce_by_key` does the same for each key.

    A member with weight 0 never changes a result, even if its value is not finite. If weights are
    ints or bools, all results keep their dtypes. If they are floats, sums and products of ints
    become floats, so that they have derivatives.

    The transformation composes with those of JAX. The derivative by the weights, at weights of 1,
    is the influence of each member; see `influence` and `standard_error`. `jax.vmap` over several
    sets of weights computes all of them in one pass over the data.

    Only the reductions of beamjax use weights. `beamjax.run` refuses a function that also calls a
    function like `jnp.mean` on placed values, and names its line. Under `jax.jit` alone, such a
    call counts each member once, as `len(x)` does.

    Args:
      fn: a program, or any function of programs, such as one that trains in rounds.
      placement: the placement that has the weights; None if `fn` reduces over only one.

    Returns:
      A function of the weights and the arguments of `fn`, with the result of `fn`. The weights are
      an array of real numbers or bools of shape (n,); or a function from the index of a member, an
      int32 scalar, to its weight. The workers call this function, and no array of n weights is
      made. See `bootstrap_weights`.

    Raises:
      PlacementError: when called: there are not n weights, or `fn` reduces over several placements
        and `placement` is None.
      StructureError: when called: the weights are not real numbers or not of shape (n,); or `fn`
        calls no reduction, or one that does not support weights: `beamjax.reduce`,
        `beamjax.neighbours`, or `reduce_by_key` without `num_keys` for other than "sum" and "prod".

    Example:
      The mean without the first member::

        >>> mean = bj.program(clients=3)(bj.reduce_mean)
        >>> float(bj.reweight(mean)(jnp.array([0, 1, 1]), jnp.array([5.0, 1.0, 2.0])))
        1.5
    """

    @functools.wraps(fn, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def reweighted(weights: Any, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        weighted = _Weights(weights, placement)
        with _in_force(weighted), jax.named_scope(f"{_SCOPE}<{placement or ''}>"):
            result = fn(*args, **kwargs)
        if weighted.used is None:
            where = f" over the placement {placement!r}" if placement else ""
            raise StructureError(
                f"reweight: {name_of(fn)} calls no reduction of beamjax{where}, so the weights of "
                "members change nothing. Reduce with beamjax.reduce_sum and its like."
            )
        return result

    del reweighted.__wrapped__  # its signature has no weights
    return reweighted


def bootstrap_weights(key: jax.Array, replicates: int) -> tree_util.Partial:
    """Returns weights of the Poisson bootstrap, for `jax.vmap` over `reweight`.

    In each replicate, the weight of a member is an independent Poisson variable of mean 1, drawn
    from `key`, the number of the replicate and the index of the member. Workers draw the weights of
    the members that they read, so no array of n weights is made for a replicate. (Hanley and
    MacGibbon, "Creating non-parametric bootstrap samples using Poisson frequencies", 2006.)

    Args:
      key: a key of `jax.random`.
      replicates: the number of replicates, an int >= 1.

    Returns:
      A function from the index of a member to its weight, an int32 scalar. It is a pytree whose
      only leaf is an array of `replicates` keys, over which `jax.vmap` maps.

    Example:
      The standard error of a mean, from 1,000 replicates in one pass over the data::

        >>> weights = bj.bootstrap_weights(jax.random.key(0), 1000)
        >>> means = jax.vmap(bj.reweight(mean), in_axes=(0, None))(weights, x)
        >>> error = means.std()
    """
    return tree_util.Partial(_poisson_weight, jax.random.split(key, replicates))


def _poisson_weight(key: jax.Array, index: jax.Array) -> jax.Array:
    """A Poisson variable of mean 1, int32, by the inverse of its distribution function."""
    bits = jax.random.bits(jax.random.fold_in(key, index), dtype=np.uint32)
    return (bits >= _POISSON_BOUNDS).sum(dtype=np.int32)


def _poisson_bounds() -> np.ndarray:
    """2**32 times the distribution function of the Poisson distribution with mean 1, rounded."""
    terms = np.cumsum([math.exp(-1) / math.factorial(k) for k in range(13)])
    bounds = np.round(terms * 2.0**32)
    return bounds[bounds < 2.0**32].astype(np.uint32)


_POISSON_BOUNDS = _poisson_bounds()


def influence(
    fn: Callable[..., Any],
    output: Callable[[Any], Any] | None = None,
    *,
    placement: str | None = None,
) -> Callable[..., Any]:
    """Transforms a function to one that returns the influence of each member on its result.

    The influence of member i is the derivative of the result by the weight of the member, where all
    members have weight 1. To first order, the result without member i is the result minus the
    influence of i. One reverse pass computes the influence of all members on one number of the
    result, also through rounds of training.

    Args:
      fn: a program, or any function of programs.
      output: selects the numbers of interest from the result of `fn`; None for all of it.
      placement: the placement of the members; None if `fn` has only one.

    Returns:
      A function with the arguments of `fn`. It returns a tree like the output, with placed leaves
      of shapes `(n, *leaf.shape)` and the default float as dtype. With the option `keep="placed"`,
      `beamjax.run` leaves them on disk.

    Raises:
      PlacementError: when called: `fn` has several placements and `placement` is None, or `fn` does
        not have that placement.
      StructureError: when called: a leaf of the output is not a real float; or as for `reweight`.
    """

    def influences(*args: Any, **kwargs: Any) -> Any:
        numbers = lambda result: (_floats(result if output is None else output(result)), None)
        return _jacobian(fn, numbers, args, kwargs, placement)[0]

    return influences


def standard_error(
    fn: Callable[..., _Result], *, placement: str | None = None
) -> Callable[..., tuple[_Result, Any]]:
    """Transforms a function to one that returns its result with standard errors.

    They are the standard errors of the infinitesimal jackknife: with the influence `u[i]` of member
    i on a number of the result, the square root of the sum of `(u[i] - mean(u)) ** 2`. They are
    valid if members are independent and the result is a smooth function of them. They take one
    reverse pass for each number of the result, and no second fit. For the mean, this is the usual
    standard error with n in place of n - 1; for least squares, the sandwich estimate (HC0).

    Args:
      fn: a program, or any function of programs.
      placement: the placement of the members; None if `fn` has only one.

    Returns:
      A function with the arguments of `fn`. It returns a pair of the result of `fn` and the
      standard errors, a tree like it with the same shapes and the default float as dtype. The
      errors of ints and bools, which have no derivative, are NaN.

    Raises:
      PlacementError: as for `influence`.
      StructureError: when called: as for `reweight`.

    Example:
      A mean with its error::

        >>> value, error = bj.standard_error(mean)(jnp.array([5.0, 1.0, 2.0]))
    """

    def with_error(*args: Any, **kwargs: Any) -> tuple[_Result, Any]:
        def numbers(result: _Result) -> tuple[list[Any], _Result]:
            floats = [x for x in tree_util.tree_leaves(result) if _is_float(x)]
            # `jacrev` needs a leaf.
            return floats or [jnp.zeros(0)], result

        influences, result = _jacobian(fn, numbers, args, kwargs, placement)
        errors = iter(list(map(_error, influences)))
        return result, tree_util.tree_map(
            lambda x: next(errors) if _is_float(x) else jnp.full(jnp.shape(x), jnp.nan), result
        )

    return with_error


def _jacobian(
    fn: Callable[..., Any],
    numbers: Callable[[Any], Any],
    args: Sequence[Any],
    kwargs: Any,
    placement: str | None,
) -> Any:
    """The derivatives, with members first, of `numbers` of the result of `fn`; what it adds."""
    of_weights = lambda weights: numbers(
        reweight(fn, placement=placement)(weights, *args, **kwargs)
    )
    jacobian, rest = jax.jacrev(of_weights, has_aux=True)(_ones(fn, args, kwargs, placement))
    return tree_util.tree_map(lambda leaf: jnp.moveaxis(leaf, -1, 0), jacobian), rest


def _error(influences: jax.Array) -> jax.Array:
    # In float16, squares of numbers below 2e-4 are zero.
    influences = influences.astype(REDUCERS["sum"].partial_dtype(influences.dtype))
    centred = influences - jnp.mean(influences, axis=0, keepdims=True)
    return jnp.sqrt(jnp.sum(centred**2, axis=0))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), np.floating)


def _floats(tree: Any) -> Any:
    for path, leaf in tree_util.tree_leaves_with_path(tree):
        if not _is_float(leaf):
            raise StructureError(
                f"influence: output{tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}, "
                "expected a float, which has a derivative. Pick the floats with output=."
            )
    return tree


def _ones(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Any, placement: str | None
) -> jax.Array:
    """An array of weights of 1 for the members of the placement of a function."""
    with observe() as placements:
        jax.eval_shape(lambda: fn(*args, **kwargs))
    sizes = {size for name, size in placements if placement in (None, name)}
    if len(sizes) != 1:
        names = ", ".join(sorted({repr(name) for name, _ in placements})) or "none"
        raise PlacementError(
            f"{name_of(fn)} has the placements {names}, expected one"
            + (f" of the name {placement!r}." if placement else "; say which with placement=.")
        )
    return jnp.ones(sizes.pop(), jnp.result_type(float))
