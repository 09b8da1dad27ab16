"""The table of reductions: all that is stated about a reduction of members to a server value.

On the device, `partial` reduces a shard of members to one array. On the host, partials meet in an
accumulator, from which `finish` computes the result. The results have the dtypes and the rules for
NaN of the `jnp` function of the same name over axis 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from beamjax import _compat
from beamjax.errors import ArrayFormatError, OptionsError, StructureError
from beamjax.numerics.accumulators import (
    Accumulator,
    Extreme,
    OrderedProduct,
    Running,
    fail,
    lowest_value,
)
from beamjax.numerics.exact_sum import ExactSum
from beamjax.storage.arrays import Buffer, decode_arrays, dtype_from_name

# Primitives, derivatives, weights, reductions by key and the rules of JAX's own reductions follow
# from `REDUCTIONS`, at the end.

Weighted = Callable[[jax.Array, jax.Array, Any], jax.Array]
"""A function of a member's value, its weight, and the identity of the reduction."""


class Derivative(NamedTuple):
    """The derivative of a reduction that is not linear."""

    # The tangent of the result is the sum over the members of their tangents times `factor`.

    # From a member's value and the result to the reductions that the factors need: for each, the
    # name and what it reduces.
    parts: Callable[[jax.Array, jax.Array], Sequence[tuple[str, jax.Array]]]
    # From a member's value, the result and the results of `parts`.
    factor: Callable[..., jax.Array]
    # Whether the sum is divided by the result of the first part.
    divides: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class ReductionKind:
    """A reduction over the members of a placement."""

    # As in `jnp` or `jax.nn`; the operator is `reduce_<name>`, its primitive `bj_reduce_<name>`.
    name: str
    # The names of JAX's primitives that are this reduction, also over other axes.
    primitives: tuple[str, ...] = ()
    # Whether it has no value without any members.
    needs_members: bool = False
    # None if it is zero.
    derivative: Derivative | Literal["linear"] | None = None

    def result_dtype(self, dtype: Any) -> np.dtype:
        """The dtype that the `jnp` function gives for operands of `dtype`."""
        # It depends on whether 64-bit numbers are enabled at the moment of the call.
        return _result_dtype(self.function, np.dtype(dtype), _compat.config.jax_enable_x64)

    def result_type(self, dtype: np.dtype, weak_type: bool = False) -> jax.ShapeDtypeStruct:
        """The type that the `jnp` function gives for one number of each member."""
        return _result_type(self.function, dtype, weak_type, _compat.config.jax_enable_x64)

    @functools.cached_property
    def function(self) -> Callable[..., jax.Array]:
        """The function of JAX that it is over axis 0."""
        return getattr(jnp, self.name, None) or getattr(jax.nn, self.name)


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice(ReductionKind):
    """The index of the first member with the "max" or the "min", where NaN is both."""

    extreme: Literal["max", "min"] = "max"

    def replaces(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Whether `y`, of a later member, is chosen instead of `x`."""
        return (y > x if self.extreme == "max" else y < x) | ((y != y) & (x == x))


@dataclass(frozen=True, eq=False, kw_only=True)
class Reducer(ReductionKind):
    """A reduction that an accumulator does, by a function of two values."""

    # The NumPy function that reduces two values of a `partial_dtype` to one.
    ufunc: np.ufunc
    # For the mode "exact".
    accumulator: type[Accumulator]
    # The names of the primitives of JAX that reduce two values.
    pairs: tuple[str, ...] = ()
    # What `array.at[...]` and the primitives of JAX call it.
    scatter: Literal["add", "mul", "max", "min"]
    # How a member with a weight is reduced.
    weighted: Weighted
    # Whether it is a sum over the number of members.
    divides: bool = False

    @property
    def operation(self) -> str:
        """The reduction that its accumulator does."""
        return "sum" if self.divides else self.name

    @property
    def fold(self) -> Callable[..., jax.Array]:
        """The `jnp` function that reduces an array."""
        return getattr(jnp, self.operation)

    @property
    def merge(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """The `jnp` function that reduces two values to one."""
        return getattr(jnp, self.ufunc.__name__)

    @property
    def segments(self) -> Callable[..., jax.Array]:
        """The function of `jax.ops` that reduces the values of each key."""
        name = {"add": "sum", "mul": "prod"}.get(self.scatter, self.scatter)
        return getattr(jax.ops, f"segment_{name}")

    @property
    def adds(self) -> bool:
        """Whether it adds or multiplies, which rounds floats."""
        return self.operation in ("sum", "prod")

    @property
    def is_logical(self) -> bool:
        """Whether it reduces bools."""
        return self.ufunc in (np.logical_or, np.logical_and)

    def partial_dtype(self, dtype: Any) -> np.dtype:
        """The dtype in which the partials of operands of `dtype` leave the device."""
        # As in `jnp`, floats narrower than float32 are summed and multiplied in float32, and means
        # of integers are sums of floats, also those of int2, which are int2.
        result = self.result_dtype(dtype)
        if self.divides and not jnp.issubdtype(result, np.inexact):
            return np.dtype(np.float32)
        return np.dtype(wide_dtype(result)) if self.adds else result

    def prepared(self, x: jax.Array) -> jax.Array:
        """Values in their `partial_dtype`."""
        dtype = self.partial_dtype(x.dtype)
        return x != 0 if dtype == np.bool_ and x.dtype != np.bool_ else x.astype(dtype)

    def partial(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Reduces the members (members, ...) of a shard that `mask` (members,) marks; None: all."""
        x = self.prepared(x)
        dtype = np.dtype(x.dtype)
        identity = self.identity(dtype)
        if mask is not None:
            rows = jnp.reshape(mask, (-1,) + (1,) * (x.ndim - 1))
            x = jnp.where(rows, x, jnp.asarray(identity))
        if dtype.kind == "c" and self.accumulator is Extreme:
            return _complex_extreme(self.fold, x, identity.imag)
        return self.fold(x, axis=0, dtype=dtype) if self.adds else self.fold(x, axis=0)

    def identity(self, dtype: np.dtype) -> np.generic:
        """The scalar of `dtype` that changes no result of the reduction."""
        if self.ufunc.identity is None:
            return lowest_value(self.operation, np.dtype(dtype))
        return np.dtype(dtype).type(self.ufunc.identity)

    def finish(
        self, accumulator: Accumulator, lo: int, hi: int, count: int, dtype: Any
    ) -> np.ndarray:
        """The result at the coordinates [lo, hi) of an accumulator."""
        result = self.result_dtype(dtype)
        if self.divides:
            return accumulator.mean(lo, hi, count, result)
        return accumulator.total(lo, hi, result)


@dataclass(frozen=True, eq=False, kw_only=True)
class Fold(ReductionKind):
    """A reduction by a state: a list of arrays for some consecutive members."""

    # States merge in the order of a fixed binary tree over the members, as in `beamjax.reduce`.
    # `ops.combining.folded` calls these functions, and casts the result to its dtype.

    # From a member's value, in an inexact dtype of at least 32 bits, and its weight to its state.
    # The weight is the int 1 without weights. A member with weight 0 may have any value, also NaN.
    begin: Callable[[jax.Array, Any], list[Any]]
    # From the states of two neighbouring ranges of members to that of both.
    merge: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    # From a state, and the parameters of the operator, to the result.
    finish: Callable[..., jax.Array]
    # The state of no members, as scalars.
    nothing: tuple[float, ...]
    # The derivative: the tangent of a state is `moved` of the state and of sums over the members.
    # `terms` gives what is added up, from a state, and a member's value, weight and their tangents.
    terms: Callable[..., list[Any]]
    moved: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    # From members' values and weights, a function that adds members up by key, and one that gives
    # its results to the members, to the states of the keys; None if sums by key do not give
    # the states, and it is not done by key.
    of_sums: Callable[..., list[Any]] | None = None
    # From variances, in NumPy, to the results, for keys that are not known. Only `var` and `std`
    # have it.
    of_variance: Callable[[np.ndarray], np.ndarray] | None = None


class Picker(Reducer):
    """Selects single members: a maximum of their bits as integers, where others give 0."""

    @property
    def operation(self) -> str:
        return "max"

    def result_dtype(self, dtype: Any) -> np.dtype:
        return np.dtype(dtype)

    def partial_dtype(self, dtype: Any) -> np.dtype:
        """The unsigned integer with as many bytes."""
        return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")

    def partial(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """The bits of `x` where `mask`, which has the first axes of `x`, holds, else zeros."""
        bits = self.partial_dtype(x.dtype)
        x = x.astype(bits) if x.dtype == np.bool_ else jax.lax.bitcast_convert_type(x, bits)
        if mask is None:
            return x
        rows = jnp.reshape(mask, mask.shape + (1,) * (x.ndim - mask.ndim))
        return jnp.where(rows, x, jnp.zeros((), bits))

    def finish(
        self, accumulator: Accumulator, lo: int, hi: int, count: int, dtype: Any
    ) -> np.ndarray:
        bits = accumulator.total(lo, hi, self.partial_dtype(dtype))
        return bits.astype(bool) if np.dtype(dtype) == np.bool_ else bits.view(np.dtype(dtype))

    @staticmethod
    def takes(dtype: Any) -> bool:
        """Whether it can select values of `dtype`: JAX can convert them to unsigned integers."""
        if jax.dtypes.issubdtype(dtype, np.complexfloating):
            return False
        whole = jax.dtypes.issubdtype(dtype, np.bool_) or jax.dtypes.itemsize_bits(dtype) >= 8
        return whole and np.dtype(dtype).itemsize <= 8


def _complex_extreme(
    fold: Callable[..., jax.Array], x: jax.Array, identity: np.generic
) -> jax.Array:
    """The extreme over axis 0 by the real and then the imaginary part, where NaN wins."""
    # In `jnp.max` and `jnp.min`, it depends on the position of a complex NaN whether it wins.
    real = fold(x.real, axis=0, keepdims=True)
    first = (x.real == real) | jnp.isnan(x.real)
    imag = fold(jnp.where(first, x.imag, jnp.asarray(identity)), axis=0)
    return jax.lax.complex(real[0], imag)


@functools.cache
def _result_dtype(function: Callable[..., jax.Array], dtype: np.dtype, x64: bool) -> np.dtype:
    # `jnp` does not sum integers below 8 bits, but `lax` does, and with it `jax.ops`.
    if function in (jnp.sum, jnp.prod) and dtype.name in ("int2", "int4", "uint2", "uint4"):
        dtype = np.dtype("uint8" if dtype.name.startswith("u") else "int8")
    return np.dtype(_result_type(function, dtype, False, x64).dtype)


@functools.cache
def _result_type(
    function: Callable[..., jax.Array], dtype: np.dtype, weak_type: bool, x64: bool
) -> jax.ShapeDtypeStruct:
    """The result type of a function over axis 0; `x64` is in the key of the cache."""
    operand = jax.ShapeDtypeStruct((1,), dtype, weak_type=weak_type)
    result: jax.ShapeDtypeStruct = jax.eval_shape(functools.partial(function, axis=0), operand)
    return result


# --- derivatives


def wide_dtype(dtype: Any) -> Any:
    """The dtype in which floats of a dtype are added up: of at least 32 bits; others stay."""
    is_narrow = jnp.issubdtype(dtype, np.inexact) and jnp.finfo(dtype).bits < 32
    return np.dtype("float32") if is_narrow else dtype


def _ties(x: jax.Array, best: jax.Array) -> jax.Array:
    # In float16, the number of more than 65,504 members that tie would be inf.
    return (x == best).astype(wide_dtype(x.dtype))


EXTREME = Derivative(
    lambda x, best: [("sum", _ties(x, best))], lambda x, best, count: _ties(x, best), divides=True
)
"""Members that tie share the derivative, as in `jnp.max`."""


def _factors_of_product(x: jax.Array, product: jax.Array) -> list[tuple[str, jax.Array]]:
    is_zero, ones, none = x == 0, jnp.ones_like(x), jnp.zeros_like(x)
    nonzero, zero = jnp.where(is_zero, ones, x), jnp.where(is_zero, x, none)
    return [("sum", is_zero.astype(np.int32)), ("prod", nonzero), ("sum", zero)]


def _product_of_others(
    x: jax.Array, out: jax.Array, count: jax.Array, product: jax.Array, zeros: jax.Array
) -> jax.Array:
    # If one member is zero, only the derivative by that member can be nonzero. If two are zero, all
    # first derivatives are zero, but second derivatives need not be. `zeros`, the sum of the zero
    # members, carries them: its value is zero, and its derivative by each zero member is one. So
    # first and second derivatives are correct for any number of zeros.
    is_zero, none = x == 0, jnp.zeros_like(x)
    rest = product / jnp.where(is_zero, jnp.ones_like(x), x)
    one_zero = jnp.where(is_zero, product, zeros * rest)
    two_zeros = jnp.where(is_zero, (zeros - x) * product, none)
    return jnp.select([count == 0, count == 1, count == 2], [rest, one_zero, two_zeros], none)


PRODUCT = Derivative(_factors_of_product, _product_of_others)
"""The derivative by a member is the product of the others, even if members are zero."""


# --- members with weights


def _times(x: jax.Array, weight: jax.Array, identity: Any) -> jax.Array:
    return (_finite(x, weight) if jnp.issubdtype(x.dtype, np.inexact) else x) * weight


def _finite(x: jax.Array, weight: Any) -> jax.Array:
    # 0 * inf and 0 * nan are NaN, but a member with weight 0 must not change the result.
    if isinstance(weight, int):
        return x
    return jnp.where((weight == 0) & ~jnp.isfinite(x), jnp.zeros_like(x), x)


def _power(x: jax.Array, weight: jax.Array, identity: Any) -> jax.Array:
    return jnp.where(weight == 0, jnp.ones_like(x), jnp.power(x, weight))


def _if_present(x: jax.Array, weight: jax.Array, identity: Any) -> jax.Array:
    return jnp.where(weight != 0, x, jnp.asarray(identity, x.dtype))


# --- variances

# The state of members with weights w, where the mean is the sum of p and d: the sum of w; p, which
# is the value of one member; d; and m2, the sum of w * |x - mean|**2. With the mean in two parts,
# x - p is exact where members are close to each other but far from zero, and no sum cancels. States
# merge as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
# sample variances", 1982.


def _spread_begin(x: jax.Array, weight: Any) -> list[Any]:
    x, real = _finite(x, weight), x.real.dtype
    return [jnp.asarray(weight, real), x, jnp.zeros_like(x), jnp.zeros(x.shape, real)]


def _spread_merge(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    (v, p, d, m), (w, q, e, k) = left, right
    total = v + w
    share = w / jnp.where(total == 0, 1, total)
    delta = (q - p) + (e - d)
    # A member with weight 0 may be far from all others.
    is_first = v == 0
    mean = jnp.where(is_first, q, p), jnp.where(is_first, e, d + delta * share)
    return [total, *mean, m + k + _inner(delta, delta) * (v * share)]


def _spread_terms(
    state: Sequence[Any], x: jax.Array, weight: Any, t: jax.Array, weight_t: Any
) -> list[Any]:
    _, p, d, _ = state
    away = (x - p) - d
    return [
        jnp.asarray(weight_t, x.real.dtype),
        weight * t + weight_t * away,
        2 * weight * _inner(away, t) + weight_t * _inner(away, away),
    ]


def _spread_moved(state: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
    count, p, _, _ = state
    moved_count, moved_mean, moved_squares = sums
    return [moved_count, jnp.zeros_like(p), moved_mean / count, moved_squares]


def _spread_of_sums(x: jax.Array, weight: jax.Array, add: Any, of_member: Any) -> list[Any]:
    weight = weight.reshape(-1, *[1] * (x.ndim - 1))
    x, count = _finite(x, weight), add(weight)
    p = add(weight * x) / count
    away = x - of_member(p)
    d = add(weight * away) / count
    return [count, p, d, add(weight * _inner(away, away)) - count * _inner(d, d)]


def _inner(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x.conj() * y).real


def _variance(state: Sequence[Any], ddof: Any = 0) -> jax.Array:
    count, _, _, squares = state
    left = count - jnp.asarray(ddof, count.dtype)
    return jnp.where(left > 0, squares / left, np.nan)


def _deviation(state: Sequence[Any], ddof: Any = 0) -> jax.Array:
    return jnp.sqrt(_variance(state, ddof))


_SPREAD: dict[str, Any] = {
    "begin": _spread_begin, "merge": _spread_merge, "nothing": (0, 0, 0, 0),
    "terms": _spread_terms, "moved": _spread_moved, "of_sums": _spread_of_sums,
}  # fmt: skip


# --- the table

REDUCTIONS: dict[str, ReductionKind] = {
    reduction.name: reduction
    for reduction in (
        Reducer(
            name="sum", ufunc=np.add, accumulator=ExactSum, scatter="add",
            primitives=("reduce_sum", "psum"), pairs=("add", "add_any"),
            derivative="linear", weighted=_times,
        ),
        Reducer(
            name="mean", ufunc=np.add, accumulator=ExactSum, scatter="add", divides=True,
            derivative="linear", weighted=_times,
        ),
        Reducer(
            name="max", ufunc=np.maximum, accumulator=Extreme, scatter="max",
            primitives=("reduce_max", "pmax"), pairs=("max",),
            derivative=EXTREME, weighted=_if_present, needs_members=True,
        ),
        Reducer(
            name="min", ufunc=np.minimum, accumulator=Extreme, scatter="min",
            primitives=("reduce_min", "pmin"), pairs=("min",),
            derivative=EXTREME, weighted=_if_present, needs_members=True,
        ),
        Reducer(
            name="prod", ufunc=np.multiply, accumulator=OrderedProduct, scatter="mul",
            primitives=("reduce_prod",), pairs=("mul",),
            derivative=PRODUCT, weighted=_power,
        ),
        Reducer(
            name="any", ufunc=np.logical_or, accumulator=Running, scatter="max",
            primitives=("reduce_or",), weighted=_if_present,
        ),
        Reducer(
            name="all", ufunc=np.logical_and, accumulator=Running, scatter="min",
            primitives=("reduce_and",), weighted=_if_present,
        ),
        Fold(name="var", finish=_variance, of_variance=np.asarray, **_SPREAD),
        Fold(name="std", finish=_deviation, of_variance=np.sqrt, **_SPREAD),
        Choice(name="argmax", extreme="max", primitives=("argmax",), needs_members=True),
        Choice(name="argmin", extreme="min", primitives=("argmin",), needs_members=True),
    )
}  # fmt: skip
"""The reductions by name."""

BY_KEY = [
    name
    for name, reduction in REDUCTIONS.items()
    if isinstance(reduction, Reducer) or (isinstance(reduction, Fold) and reduction.of_sums)
]
"""The names of those that `reduce_by_key` does."""

REDUCERS = {
    name: reduction for name, reduction in REDUCTIONS.items() if isinstance(reduction, Reducer)
}
"""Those that accumulators do."""

PICK = Picker(
    name="pick", ufunc=np.maximum, accumulator=Extreme, scatter="max",
    weighted=_if_present,
)  # fmt: skip
"""Selects members. It is no reduction that a program can name."""


ACCUMULATED = {**REDUCERS, PICK.name: PICK}
"""What accumulators do, by name: the reductions, and the picker."""

JAX_REDUCTIONS = {name: reducer for reducer in REDUCERS.values() for name in reducer.primitives}
"""Those that JAX has, by the names of its primitives."""


# --- the accumulators of reductions

MODES = ("exact", "fast")


def accumulator_kind(reduction: str, dtype: np.dtype, mode: str = "exact") -> type[Accumulator]:
    """The kind of accumulator of partials of a dtype."""
    reducer = REDUCERS[reduction]
    is_exact = mode == "exact" and dtype.kind in "fc"
    return reducer.accumulator if is_exact or not reducer.adds else Running


def make_accumulator(
    reduction: str, dtype: np.dtype, size: int, *, mode: str = "exact"
) -> Accumulator:
    """A new accumulator of a reduction, without any partials."""
    dtype = np.dtype(dtype)
    if reduction not in _OPERATIONS or mode not in MODES:
        raise OptionsError(
            f"accumulator: found reduction {reduction!r} and mode {mode!r}, expected one of "
            f"{_OPERATIONS} and {MODES}."
        )
    return accumulator_kind(reduction, dtype, mode)(REDUCERS[reduction], dtype, size)


_OPERATIONS = [reducer.name for reducer in REDUCERS.values() if not reducer.divides]


def decode_accumulator(data: Buffer) -> Accumulator:
    """The accumulator that `Accumulator.encode` wrote."""
    arrays, meta = decode_arrays(data)
    reduction, name = meta.get("reduction"), meta.get("accumulator")
    if reduction not in _OPERATIONS:
        fail(f"reduction {reduction!r}", f"one of {_OPERATIONS}")
    try:
        dtype = dtype_from_name(meta.get("dtype"))
        kinds = {
            kind.name: kind for kind in (accumulator_kind(reduction, dtype, mode) for mode in MODES)
        }
        if not isinstance(name, str) or name not in kinds:
            fail(f"kind {name!r}", f"one of {sorted(kinds)}")
        return kinds[name].decode(REDUCERS[reduction], dtype, arrays, meta)
    except StructureError as error:
        raise ArrayFormatError(f"accumulator: {error}") from None
