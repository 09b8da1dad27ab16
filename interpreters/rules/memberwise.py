"""Rules for equations that act on each member separately."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.member_indices import clamped
from beamjax.interpreters.rules.member_reads import read_rows
from beamjax.interpreters.rules.member_writes import write_rows
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    any_placed,
    as_is,
    bind,
    draw_by_batch,
    dropping,
    everywhere,
    is_threefry,
    only,
    resizing,
    rule,
    shape_of,
)

# --- placed operators


@rule("bj_map")
def _bj_map(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    # Draws from rbg keys under vmap depend on the whole batch, so a shard can't reproduce them.
    if draw_by_batch(eqn.params["jaxpr"]) is not None:
        return None
    served = eqn.params["num_broadcast"]
    in_axes = (None,) * served + (0,) * (len(eqn.inputs) - served)
    return MemberwiseRule(in_axes, (0,) * len(eqn.outputs), _mapped)


def _mapped(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
    """Emits a map, without vmap if there is one member.

    XLA computes that faster: vmap evaluates both sides of a cond, turns convolutions into grouped
    ones, and adds an axis to products, so that XLA reads transposed operands with a stride.
    """
    closed, served = eqn.params["jaxpr"], eqn.params["num_broadcast"]
    if shard.size > 1 or _asks_for_vmap(closed):
        return at_shard_size(eqn, args, shard)
    member = [jnp.squeeze(x, 0) for x in args[served:]]
    outs = jex.jaxpr_as_fun(closed)(*args[:served], *member)
    return [jnp.expand_dims(x, 0) for x in outs]


def _asks_for_vmap(closed: Any) -> bool:
    """Whether a body holds something that may behave differently without vmap."""
    return any(
        eqn.effects
        or eqn.primitive.name in ("custom_vmap_call", "pure_callback")
        or any(map(_asks_for_vmap, jex.jaxprs_in_params(eqn.params)))
        for eqn in getattr(closed, "jaxpr", closed).eqns
    )


@rule("bj_broadcast")
def _bj_broadcast(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule:
    return MemberwiseRule((None,), (0,), at_shard_size)


def at_shard_size(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
    """Emits a placed operator with the size of the shard as its number of members."""
    return bind(eqn, args, n=shard.size)


# --- elementwise

ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc exp
    exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma
    log log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or
    polygamma polynomial population_count pow random_clone random_fold_in random_gamma_grad
    random_seed real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
    threefry2x32 xor zeta compressed_words
""".split()


@rule(*ELEMENTWISE)
def _elementwise(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis, rank = only(axes), len(shape_of(eqn.outputs[0]))
    if axis is None or any(len(shape_of(atom)) not in (0, rank) for atom in eqn.inputs):
        return None
    # fold_in of unsafe_rbg keys draws bits, which depend on the other keys of the batch.
    if eqn.primitive.name == "random_fold_in" and str(aval_of(eqn.inputs[0]).dtype) == "key<urbg>":
        return None
    # A scalar, or a server operand with size 1 along this axis, is the same for all members.
    in_axes = tuple(
        None if len(shape_of(atom)) == 0 or shape_of(atom)[axis] != n else axis
        for atom in eqn.inputs
    )
    return MemberwiseRule(in_axes, (axis,) * len(eqn.outputs), as_is)


# --- shape


@rule("broadcast_in_dim")
def _broadcast_in_dim(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    if axes[0] is None or len(eqn.inputs) > 1:
        return None
    out = eqn.params["broadcast_dimensions"][axes[0]]
    return MemberwiseRule((axes[0],), (out,), resizing("shape", out))


@rule("reshape")
def _reshape(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis, sizes = axes[0], eqn.params["new_sizes"]
    if axis is None or eqn.params["dimensions"] is not None or len(eqn.inputs) > 1:
        return None
    before = math.prod(shape_of(eqn.inputs[0])[:axis])
    for out, dim in enumerate(sizes):
        if dim == n and math.prod(sizes[:out]) == before:
            return MemberwiseRule((axis,), (out,), resizing("new_sizes", out))
    return None


@rule("transpose")
def _transpose(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    return MemberwiseRule(tuple(axes), (eqn.params["permutation"].index(axes[0]),), as_is)


@rule("squeeze")
def _squeeze(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis, dims = axes[0], eqn.params["dimensions"]
    if axis is None or axis in dims:
        return None
    return MemberwiseRule((axis,), (dropping(axis, dims),), as_is)


@rule("slice")
def _slice(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule | None:
    axis, strides = axes[0], eqn.params["strides"]
    if axis is None:
        return None
    start, limit = eqn.params["start_indices"][axis], eqn.params["limit_indices"][axis]
    if start == 0 and limit == n and (strides is None or strides[axis] == 1):
        return MemberwiseRule((axis,), (axis,), resizing("limit_indices", axis))
    stride = 1 if strides is None else strides[axis]
    return read_rows(eqn, axis, n, lambda args: jnp.arange(start, limit, stride, "int32"))


@rule("dynamic_slice")
def _dynamic_slice(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule | None:
    axis = axes[0]
    if axis is None or any_placed(axes[1:]):
        return None
    size = eqn.params["slice_sizes"][axis]
    if size == n:  # XLA clamps the start to 0, whatever the index is.
        return MemberwiseRule(tuple(axes), (axis,), resizing("slice_sizes", axis))
    first = lambda args: clamped(args[1 + axis], n - size)
    return read_rows(eqn, axis, n, lambda args: first(args) + jnp.arange(size, dtype="int32"))


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis = only(axes[:2])
    if axis is None or any_placed(axes[2:]):
        return None
    if axes[1] is None and shape_of(eqn.inputs[1])[axis] != n:
        return write_rows(eqn, axis, n)
    return MemberwiseRule((axis, axis, *axes[2:]), (axis,), as_is)


@rule("pad")
def _pad(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis = axes[0]
    if axis is None or axes[1] is not None:
        return None
    untouched = tuple(eqn.params["padding_config"][axis]) == (0, 0, 0)
    return MemberwiseRule((axis, None), (axis,), as_is) if untouched else None


@rule("tile")
def _tile(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis = axes[0]
    return everywhere(eqn, axis) if axis is not None and eqn.params["reps"][axis] == 1 else None


@rule("bitcast_convert_type")
def _bitcast(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    shared = min(len(shape_of(eqn.inputs[0])), len(shape_of(eqn.outputs[0])))
    return everywhere(eqn, axes[0]) if axes[0] is not None and axes[0] < shared else None


# --- operators along one axis, which must not be that of the members

ALONG = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "sort": "dimension",
    "concatenate": "dimension",
    "rev": "dimensions",
    "approx_top_k": "reduction_dimension",
}


@rule(*ALONG)
def _along(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis = only(axes)
    busy = eqn.params[ALONG[eqn.primitive.name]]
    busy = busy if isinstance(busy, tuple) else (busy,)
    rank = len(shape_of(eqn.inputs[0]))
    if axis is None or axis in [b % rank for b in busy]:
        return None
    return everywhere(eqn, axis)


@rule("unstack")
def _unstack(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    busy, axis = eqn.params["axis"], axes[0]
    if axis is None or axis == busy:
        return None
    return MemberwiseRule((axis,), (dropping(axis, (busy,)),) * len(eqn.outputs), as_is)


@rule("stack")
def _stack(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    new, axis = eqn.params["axis"], only(axes)
    if axis is None:
        return None
    return MemberwiseRule((axis,) * len(axes), (axis + (new <= axis),), as_is)


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add",
      "select_and_scatter_add")  # fmt: skip
def _windows(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis, p = only(axes), eqn.params
    if axis is None:
        return None
    untouched = (
        p["window_dimensions"][axis] == 1
        and p["window_strides"][axis] == 1
        and tuple(p["padding"][axis]) == (0, 0)
        and ("base_dilation" not in p or p["base_dilation"][axis] == 1)
    )
    return everywhere(eqn, axis) if untouched else None


# --- linear algebra


@rule("cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur",
      "svd", "triangular_solve")  # fmt: skip
def _batched_matrix(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis = only(axes)
    ranks = [len(shape_of(atom)) for atom in eqn.inputs]
    # householder_product takes vectors (taus) as well as matrices.
    if axis is None or axis >= max(ranks) - 2:
        return None
    return everywhere(eqn, axis)


@rule("lu_pivots_to_permutation", "tridiagonal_solve", "random_wrap")
def _batched_vector(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis = only(axes)
    if axis is None or any(axis >= len(shape_of(atom)) - 1 for atom in eqn.inputs):
        return None
    return everywhere(eqn, axis)


@rule("fft")
def _fft(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    batch = len(shape_of(eqn.inputs[0])) - len(eqn.params["fft_lengths"])
    return everywhere(eqn, axes[0]) if axes[0] is not None and axes[0] < batch else None


# --- random keys


@rule("random_bits", "random_split", "random_unwrap")
def _random(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    # A draw from an rbg key under vmap depends on the other keys in the batch, so on the shard.
    if axes[0] is None or not is_threefry(eqn.inputs[0]):
        return None
    return everywhere(eqn, axes[0])


@rule("random_gamma")
def _random_gamma(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    # The shape of the keys is a prefix of that of the parameters, and each key is split for the
    # other axes. So along an axis that the keys don't have, a draw depends on its position.
    axis, keys = only(axes), eqn.inputs[0]
    if axis is None or axis >= len(shape_of(keys)) or not is_threefry(keys):
        return None
    return everywhere(eqn, axis)
