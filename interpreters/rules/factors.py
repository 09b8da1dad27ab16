"""The table of axis factors: which axes of operands and results run over the same indices.

As in einsum, each axis has a label. If the members lie along the axes of one label, the equation
acts on each member if all results have the label, and reduces over the members if no result has it.
"""

# `dot_general` of x[i, k] and w[k, j] has the labels `ik, kj -> ij`. Members along i: x[i, :] @ w
# is one row of the result. Members along k: a sum over members of outer products x[:, k] w[k, :].
#
# The entries of an axis without a label (None) are mixed, so members along it must be gathered. The
# table is read forward, from the placed operands, and backward, from a result that is to be placed.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    Factors,
    Labels,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    answers_of,
    as_is,
    bind,
    factors,
    is_threefry,
    replaced,
    shape_of,
)
from beamjax.numerics.reducers import REDUCTIONS


def _factors(eqn: Eqn) -> Factors | None:
    """The factors of an equation, or None."""
    of_primitive = answers_of(eqn).factors
    axis_labels = of_primitive(eqn) if of_primitive else None
    if axis_labels is None:
        return None
    operands, results = axis_labels
    return list(map(_plain, operands)), list(map(_plain, results))


def _plain(labels: Labels) -> Labels:
    # Parameters of JAX may be NumPy integers, and NumPy compares those entry by entry with a tuple,
    # which other labels are.
    return [int(label) if isinstance(label, np.integer) else label for label in labels]


def forward(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule | None:
    """The rule of an equation whose operands have their n members along these axes, or None."""
    axis_labels = _factors(eqn)
    pairs = zip(axis_labels[0], axes, strict=True) if axis_labels else ()
    labels = {_at(labels, axis) for labels, axis in pairs if axis is not None}
    return (
        _of_label(eqn, axis_labels, labels.pop(), n) if axis_labels and len(labels) == 1 else None
    )


def backward(eqn: Eqn, out: int, axis: int, n: Any) -> MemberwiseRule | ReductionRule | None:
    """The rule by which result number `out` has its n members along an axis, or None."""
    axis_labels = _factors(eqn)
    return _of_label(eqn, axis_labels, _at(axis_labels[1][out], axis), n) if axis_labels else None


def _of_label(
    eqn: Eqn, axis_labels: Factors, label: Hashable, n: Any
) -> MemberwiseRule | ReductionRule | None:
    # An axis that no operand has is new. Only a broadcast fills it with equal entries.
    is_new = eqn.primitive.name != "broadcast_in_dim" and not any(
        label in e for e in axis_labels[0]
    )
    if label is None or is_new:
        return None
    operands = zip(eqn.inputs, map(_axis_of, axis_labels[0], itertools.repeat(label)), strict=True)
    # An operand of size 1 along this axis is the same for all members.
    in_axes = tuple(
        axis if axis is not None and shape_of(atom)[axis] == n else None for atom, axis in operands
    )
    out_axes = tuple(_axis_of(labels, label) for labels in axis_labels[1])
    # If only some results have the label, the equation is neither memberwise nor a reduction.
    if None not in out_axes:
        return MemberwiseRule(in_axes, out_axes, _emit(eqn, in_axes, out_axes))
    reduction, reduces = answers_of(eqn).reduction, all(axis is None for axis in out_axes)
    return reduction(eqn, in_axes, n) if reduction and reduces else None


def _at(labels: Labels, axis: int) -> Hashable:
    return labels[axis] if axis < len(labels) else None


def _axis_of(labels: Labels, label: Hashable) -> int | None:
    return list(labels).index(label) if label in labels else None


RESIZED = {
    "broadcast_in_dim": "shape",
    "dynamic_slice": "slice_sizes",
    "reshape": "new_sizes",
    "slice": "limit_indices",
    "tile": "reps",
}
"""Parameters with an entry for each axis of the result. The entry for the axis of the members is
their number, which is replaced by the size of the shard."""


def _emit(eqn: Eqn, in_axes: Axes, out_axes: Axes) -> Callable[..., list[Any]]:
    # For a shard of 8 of 100 members, `reshape[new_sizes=(100, 6)] x` becomes
    # `reshape[new_sizes=(8, 6)] x`.
    (axis, *_), param = out_axes, RESIZED.get(eqn.primitive.name)
    # A gather takes whole members: `slice_sizes` has the axes of its operand.
    if eqn.primitive.name == "gather" and in_axes[1] is None:
        axis, param = in_axes[0], "slice_sizes"
    # A tile of members repeats them once. It makes members of a single entry: `reps` of them.
    if param is None or axis is None or (param == "reps" and in_axes[0] is not None):
        return as_is

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        return bind(eqn, args, **{param: replaced(eqn.params[param], axis, shard.size)})

    return emit


def _ranks(atoms: Sequence[Any]) -> list[int]:
    return [len(shape_of(atom)) for atom in atoms]


def _all(eqn: Eqn, labels: Labels) -> Factors:
    """All operands and results have the same labels."""
    return [labels] * len(eqn.inputs), [labels] * len(eqn.outputs)


def _without(rank: int, axes: Sequence[int]) -> list[int]:
    """The labels of all axes but these, which are removed."""
    return [k for k in range(rank) if k not in axes]


def _masked(rank: int, axes: Sequence[int]) -> list[int | None]:
    """A label for each axis but these, whose entries are mixed."""
    mixed = [axis % rank for axis in axes]
    return [None if k in mixed else k for k in range(rank)]


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


@factors(*ELEMENTWISE)
def _elementwise(eqn: Eqn) -> Factors | None:
    rank = len(shape_of(eqn.outputs[0]))
    # fold_in of unsafe_rbg keys draws bits, which depend on the other keys of the batch.
    draws = eqn.primitive.name == "random_fold_in" and "urbg" in str(aval_of(eqn.inputs[0]).dtype)
    if draws or any(k not in (0, rank) for k in _ranks(eqn.inputs)):
        return None
    return [range(k) for k in _ranks(eqn.inputs)], [range(rank)] * len(eqn.outputs)


# --- shapes


@factors("broadcast_in_dim")
def _broadcast_in_dim(eqn: Eqn) -> Factors | None:
    if len(eqn.inputs) > 1:
        return None
    return [eqn.params["broadcast_dimensions"]], [range(len(eqn.params["shape"]))]


@factors("reshape")
def _reshape(eqn: Eqn) -> Factors | None:
    if eqn.params["dimensions"] is not None or len(eqn.inputs) > 1:
        return None
    # An axis is the same in both shapes if as many elements come before it.
    return [_positions(shape_of(eqn.inputs[0]))], [_positions(eqn.params["new_sizes"])]


def _positions(shape: Sequence[Any]) -> Labels:
    """For each axis, the number of elements before it, and its size."""
    pairs = [(math.prod(shape[:k]), dim) for k, dim in enumerate(shape)]
    # Axes of size 1 share a position, so equal pairs are numbered.
    return [(*pair, pairs[:k].count(pair)) for k, pair in enumerate(pairs)]


@factors("transpose")
def _transpose(eqn: Eqn) -> Factors:
    return [range(len(shape_of(eqn.inputs[0])))], [eqn.params["permutation"]]


@factors("squeeze")
def _squeeze(eqn: Eqn) -> Factors:
    (rank,), gone = _ranks(eqn.inputs), eqn.params["dimensions"]
    return [_masked(rank, gone)], [_without(rank, gone)]


@factors("tile")
def _tile(eqn: Eqn) -> Factors:
    pairs = zip(eqn.params["reps"], shape_of(eqn.inputs[0]), strict=True)
    return _all(eqn, [k if reps == 1 or dim == 1 else None for k, (reps, dim) in enumerate(pairs)])


@factors("slice", "dynamic_slice")
def _slice(eqn: Eqn) -> Factors:
    """Axes that are taken as a whole; XLA clamps the start of such a dynamic slice to 0."""
    before, after = shape_of(eqn.inputs[0]), shape_of(eqn.outputs[0])
    # A stride of more than 1 may take the whole of one member, but not of a shard.
    strides = eqn.params.get("strides") or [1] * len(before)
    entries = enumerate(zip(before, after, strides, strict=True))
    labels = [k if size == taken and stride == 1 else None for k, (size, taken, stride) in entries]
    return [labels, *[()] * (len(eqn.inputs) - 1)], [labels]


@factors("dynamic_update_slice")
def _dynamic_update_slice(eqn: Eqn) -> Factors:
    shapes = zip(shape_of(eqn.inputs[0]), shape_of(eqn.inputs[1]), strict=True)
    labels = [k if before == after else None for k, (before, after) in enumerate(shapes)]
    return [labels, labels, *[()] * (len(eqn.inputs) - 2)], [labels]


@factors("pad")
def _pad(eqn: Eqn) -> Factors:
    config = enumerate(eqn.params["padding_config"])
    labels = [k if tuple(widths) == (0, 0, 0) else None for k, widths in config]
    return [labels, ()], [labels]


@factors("bitcast_convert_type")
def _bitcast(eqn: Eqn) -> Factors:
    return _all(eqn, range(min(_ranks([*eqn.inputs, *eqn.outputs]))))


@factors("stack")
def _stack(eqn: Eqn) -> Factors:
    labels: list[int | None] = list(range(len(shape_of(eqn.inputs[0]))))
    axis = eqn.params["axis"]
    return [labels] * len(eqn.inputs), [[*labels[:axis], None, *labels[axis:]]]


@factors("unstack")
def _unstack(eqn: Eqn) -> Factors:
    (rank,), axes = _ranks(eqn.inputs), [eqn.params["axis"]]
    return [_masked(rank, axes)], [_without(rank, axes)] * len(eqn.outputs)


# --- operators along some axes

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
"""For each primitive that mixes entries along some axes, the parameter that names these."""


@factors(*ALONG)
def _along(eqn: Eqn) -> Factors:
    axes = eqn.params[ALONG[eqn.primitive.name]]
    axes = axes if isinstance(axes, tuple) else (axes,)
    return _all(eqn, _masked(len(shape_of(eqn.inputs[0])), axes))


@factors("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add",
         "select_and_scatter_add")  # fmt: skip
def _windows(eqn: Eqn) -> Factors:
    p = eqn.params
    dilation = p.get("base_dilation") or [1] * len(p["window_dimensions"])
    windows = zip(p["window_dimensions"], p["window_strides"], p["padding"], dilation, strict=True)
    labels = [
        k if (size, stride, *padding, by) == (1, 1, 0, 0, 1) else None
        for k, (size, stride, padding, by) in enumerate(windows)
    ]
    return _all(eqn, labels)


# --- reductions and products


@factors("reduce_xor", *(name for entry in REDUCTIONS.values() for name in entry.primitives))
def _reduce(eqn: Eqn) -> Factors:
    (rank,) = _ranks(eqn.inputs)
    return [range(rank)], [_without(rank, eqn.params["axes"])]


@factors("reduce")
def _reduce_by_function(eqn: Eqn) -> Factors:
    rank, size = len(shape_of(eqn.inputs[0])), len(eqn.outputs)
    outs: list[Labels] = [_without(rank, eqn.params["dimensions"])] * size
    return [*[range(rank)] * size, *[()] * size], outs


@factors("top_k")
def _top_k(eqn: Eqn) -> Factors:
    (rank,) = _ranks(eqn.inputs)
    return [range(rank)], [_masked(rank, [eqn.params.get("axis", -1)])] * 2


@factors("dot_general")
def _dot_general(eqn: Eqn) -> Factors:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    ranks, paired = _ranks(eqn.inputs), dict(zip(rhs_contract, lhs_contract, strict=True))
    paired |= dict(zip(rhs_batch, lhs_batch, strict=True))
    rhs = [paired.get(k, ranks[0] + k) for k in range(ranks[1])]
    out: list[Hashable] = list(lhs_batch)
    out += _without(ranks[0], (*lhs_contract, *lhs_batch))
    out += [rhs[k] for k in _without(ranks[1], (*rhs_contract, *rhs_batch))]
    return [range(ranks[0]), rhs], [out]


@factors("conv_general_dilated")
def _conv(eqn: Eqn) -> Factors | None:
    numbers, rank = eqn.params["dimension_numbers"], len(shape_of(eqn.outputs[0]))
    if eqn.params["batch_group_count"] != 1:
        return None
    lhs, rhs, out = (list[str | None]([None] * rank) for _ in range(3))
    lhs[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = "batch"
    if eqn.params["feature_group_count"] == 1:
        rhs[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = "kernel"
        # The gradient of a kernel that the members share contracts over the members.
        lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[1]] = "contracted"
    return [lhs, rhs], [out]


# --- indexing


@factors("gather")
def _gather(eqn: Eqn) -> Factors:
    d, shape = eqn.params["dimension_numbers"], shape_of(eqn.inputs[0])
    windows = _without(len(shape), (*d.collapsed_slice_dims, *d.operand_batching_dims))
    whole = [
        k
        for k in windows
        if eqn.params["slice_sizes"][k] == shape[k] and k not in d.start_index_map
    ]
    operand = [k if k in (*whole, *d.operand_batching_dims) else None for k in range(len(shape))]
    index = _index_labels(eqn, d.start_indices_batching_dims, d.operand_batching_dims)
    return [operand, index], [_merged(eqn.outputs[0], d.offset_dims, windows, operand, index)]


@factors("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub")
def _scatter(eqn: Eqn) -> Factors:
    d, shape = eqn.params["dimension_numbers"], shape_of(eqn.inputs[0])
    windows = _without(len(shape), (*d.inserted_window_dims, *d.operand_batching_dims))
    # Along an indexed axis, an index decides which member is written; see `rules.indexing`.
    whole = [k for k in windows if k not in d.scatter_dims_to_operand_dims]
    operand = [k if k in (*whole, *d.operand_batching_dims) else None for k in range(len(shape))]
    index = _index_labels(eqn, d.scatter_indices_batching_dims, d.operand_batching_dims)
    updates = _merged(eqn.inputs[2], d.update_window_dims, windows, operand, index)
    return [operand, index, updates], [operand]


def _index_labels(eqn: Eqn, batching: Sequence[int], operand: Sequence[int]) -> Labels:
    """The labels of indices, whose last axis has an index for each indexed axis."""
    pairs = dict(zip(batching, operand, strict=True))
    return [pairs.get(k, ("index", k)) for k in range(len(shape_of(eqn.inputs[1])) - 1)]


def _merged(
    atom: Any, dims: Sequence[int], windows: Sequence[int], operand: Labels, index: Labels
) -> Labels:
    """The labels of the result of a gather, or of the updates of a scatter."""
    # Its axes `dims` run over the windows of the operand, the others over the indices.
    of_windows, rest = iter([operand[k] for k in windows]), iter(index)
    return [next(of_windows if k in dims else rest) for k in range(len(shape_of(atom)))]


# --- linear algebra: matrices or vectors along the last axes


@factors("cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr",
         "schur", "svd", "triangular_solve")  # fmt: skip
def _batched_matrix(eqn: Eqn) -> Factors:
    # householder_product takes vectors (taus) as well as matrices.
    return _all(eqn, range(max(_ranks(eqn.inputs)) - 2))


@factors("lu_pivots_to_permutation", "tridiagonal_solve", "random_wrap")
def _batched_vector(eqn: Eqn) -> Factors:
    return _all(eqn, range(min(_ranks(eqn.inputs)) - 1))


@factors("fft")
def _fft(eqn: Eqn) -> Factors:
    return _all(eqn, range(len(shape_of(eqn.inputs[0])) - len(eqn.params["fft_lengths"])))


# --- random keys


@factors("random_bits", "random_split", "random_unwrap", "random_gamma")
def _random(eqn: Eqn) -> Factors | None:
    """Only axes of the keys have labels: along others, draws depend on the position."""
    # A draw from an rbg key under vmap depends on the other keys in the batch, hence on the shard.
    keys = eqn.inputs[0]
    return _all(eqn, range(len(shape_of(keys)))) if is_threefry(keys) else None
