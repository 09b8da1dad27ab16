"""Counts the cost of the stages of a program from their equations, without compiling anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from beamjax import _compat
from beamjax._compat import scan_counts
from beamjax.bodies.jaxprs import evaluate
from beamjax.interpreters.cutting.stages import MapStage, ServerStage
from beamjax.interpreters.dimensions import is_unknown, known_size
from beamjax.interpreters.program import BranchEqn, Eqn, LoopEqn, MemberEqn
from beamjax.interpreters.rules.by_rows import operation_of
from beamjax.plan.steps import Cost

GUESSED_ROUNDS = 10
"""Assumed number of rounds of a loop whose number of rounds depends on data."""

LOOSE = 8.0
"""Approximate time of an operation outside of matrix products, in units of an operation of a matrix
product."""
GATHERED = 44.0
"""Time that the convolution library takes to gather its operands, in units of an operation of a
matrix product, for each position of the kernel at each position of the result. It adds to the time
of the arithmetic.

Measured as about 2 ns on a CPU core, for kernels of 5 x 5 from 1 to 6 and from 6 to 16 channels, in
the layout of `lowering/convolutions.py`. For 3 x 3 from 1 to 32 channels it is less than 1 ns. With
more channels it is small compared with the arithmetic, which is as fast as in matrix products."""

_OPERATIONS = dict.fromkeys(
    """exp exp2 expm1 log log1p sin cos tan tanh sinh cosh asin acos atan atan2 asinh acosh atanh
    logistic pow erf erfc erf_inv lgamma digamma cbrt rsqrt sqrt div rem""".split(),
    8.0,
)
_OPERATIONS |= {"threefry2x32": 60.0, "random_bits": 60.0, "random_gamma": 400.0, "igamma": 400.0}
_OPERATIONS |= dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul"), 40.0)
_OPERATIONS |= {"gather": 6.0, "sort": 40.0, "top_k": 40.0}
"""Arithmetic operations per element of the result; 1 for all other primitives."""

_BY_OPERAND = dict.fromkeys((name for name in _OPERATIONS if name.startswith("scatter")), -1)
_BY_OPERAND |= {"sort": 0, "top_k": 0}
"""Primitives whose cost depends on the elements of an operand instead: the index of the operand."""

_FREE = frozenset(
    """broadcast_in_dim reshape squeeze expand_dims stop_gradient copy random_wrap random_unwrap
    iota bj_broadcast pvary""".split()
)
"""Primitives without a cost, because XLA fuses them into the operations that read them."""
_FUSED = 0.25
"""Share of the results of elementwise operations that XLA writes to memory; it fuses the others."""
_CUBIC = {"cholesky": 1 / 3, "triangular_solve": 1.0, "lu": 2 / 3, "eigh": 10.0, "svd": 20.0}
_CUBIC |= {"geqrf": 4 / 3, "householder_product": 4 / 3, "eig": 25.0, "qr": 4 / 3}
"""Arithmetic operations of linear algebra on an n x n matrix, in units of n**3."""


Own = list[bool]
"""For each value, whether it differs between members."""


def member_cost(stage: MapStage, n: Any) -> Cost:
    """The cost of one member in a pass over n members."""
    # Equations of a program have all members, so their cost is divided by n; a body has one.
    n = 1 if is_unknown(n) else max(n, 1)
    total = Cost()
    for emission in stage.emissions:
        eqn = emission.eqn
        if eqn.primitive.name == "bj_map":
            own = [axis is not None for axis in emission.rule.in_axes]
            total += body_cost(eqn.params["jaxpr"], own)
        else:
            total += _flat_cost(eqn, n).times(1 / n)
    return total


def server_cost(stage: ServerStage) -> Cost:
    """The cost of a server step."""
    total = Cost()
    for eqn in stage.eqns:
        n = eqn.params.get("n", 1)
        total += _flat_cost(eqn, 1 if is_unknown(n) else n)
    return total


def _flat_cost(eqn: Eqn, n: int) -> Cost:
    """The cost of an equation of a program, for all n members."""
    match eqn:
        case LoopEqn(rounds=rounds):
            blocks = (_flat_cost(inner, n) for block in eqn.blocks for inner in block.eqns)
            total = sum(blocks, Cost()).times(GUESSED_ROUNDS if rounds is None else rounds)
            return replace(total, guessed=total.guessed or rounds is None)
        case BranchEqn(branches=branches):
            sums = (sum((_flat_cost(e, n) for e in block.eqns), Cost()) for block in branches)
            # One block runs, and it may be the costliest.
            return max(sums, key=lambda c: c.weight + c.nbytes)
        case MemberEqn(structure=structure):
            return _flat_cost(structure, n)
    if eqn.primitive.name == "bj_map":
        return body_cost(eqn.params["jaxpr"]).times(n)
    eqn = operation_of(eqn)
    cost, _ = _operation(eqn, eqn.inputs, eqn.outputs, [True] * len(eqn.inputs))
    return replace(cost, grouped=False)  # Only `vmap` of a body makes such convolutions.


def body_cost(closed: Any, own: Sequence[bool] | None = None) -> Cost:
    """The cost of a jaxpr per member; equations that read nothing of `own` are not counted."""
    # Under vmap, equations that read only what is the same for all members are computed once for
    # all of them. `own` says which inputs differ; by default all do, and everything counts.
    return _flow(closed, own)[0]


def _flow(closed: Any, own: Sequence[bool] | None) -> tuple[Cost, Own]:
    """The cost of a jaxpr, and which of its results differ between members."""
    jaxpr = getattr(closed, "jaxpr", closed)
    total = Cost()

    def apply(eqn: Any, ins: Own) -> Own:
        nonlocal total
        if own is not None and not any(ins):
            return [False] * len(eqn.outvars)
        cost, outs = _operation(eqn, eqn.invars, eqn.outvars, ins)
        total += cost
        return outs if own is not None else [True] * len(outs)

    constants = [False] * len(jaxpr.constvars)
    outs = evaluate(jaxpr, constants, own or [True] * len(jaxpr.invars), apply, lambda _: False)
    return total, outs


def _rounds(closed: Any, consts: Own, carried: Own, entries: Own) -> tuple[Cost, Own]:
    """Like `_flow`, for a loop: repeats a round until no further carried value differs."""
    # If each member trains a network, its weights differ from the second step on.
    while True:
        cost, outs = _flow(closed, [*consts, *carried, *entries])
        after = [a or b for a, b in zip(carried, outs[: len(carried)], strict=True)]
        if after == carried:
            return cost, [*carried, *outs[len(carried) :]]
        carried = after


def _calls(inner: Sequence[Any], own: Own, count: int) -> tuple[list[Cost], Own]:
    """The costs of jaxprs inside an equation, and which of its results differ."""
    arity = [len(getattr(jaxpr, "jaxpr", jaxpr).invars) for jaxpr in inner]
    flows = [_flow(x, own if n == len(own) else None) for x, n in zip(inner, arity, strict=True)]
    costs = [cost for cost, _ in flows]
    # With other numbers of operands or results, they can't be matched to those of the equation.
    if any(n != len(own) for n in arity) or any(len(outs) != count for _, outs in flows):
        return costs, [True] * count
    return costs, [any(outs) for outs in zip(*(outs for _, outs in flows), strict=True)]


def _operation(eqn: Any, ins: Sequence[Any], outs: Sequence[Any], own: Own) -> tuple[Cost, Own]:
    """The cost of an equation, of which some operands differ, and which of its results do."""
    name, params = eqn.primitive.name, eqn.params
    inner = list(_compat.jaxprs_in_params(params))
    match name:
        case "scan":
            fixed, carried = scan_counts(eqn)
            split = own[:fixed], own[fixed:][:carried], own[fixed + carried :]
            cost, differ = _rounds(params["jaxpr"], *split)
            return cost.times(_dim(params["length"])), differ
        case "while":
            tested, fixed = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            cost, differ = _rounds(params["body_jaxpr"], own[tested:fixed], own[fixed:], [])
            test, (ends,) = _flow(params["cond_jaxpr"], [*own[:tested], *differ])
            # Members whose condition is False keep their values while others go on.
            once = replace((cost + test).times(GUESSED_ROUNDS), guessed=True)
            return once, [ends or mine for mine in differ]
        case "cond":
            costs, differ = _calls(inner, own[1:], len(outs))
            cost = max(costs, key=lambda c: c.weight + c.nbytes)
            return cost, [own[0] or mine for mine in differ]
    if inner and not name.startswith(("reduce", "scatter", "sort", "bj_", "custom_lin")):
        costs, differ = _calls(inner, own, len(outs))
        return sum(costs, Cost()), differ
    return _primitive_cost(name, params, ins, outs, own), [any(own)] * len(outs)


def _primitive_cost(
    name: str, params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any], own: Own
) -> Cost:
    if name in _FREE:
        return Cost()
    read = [atom for atom, mine in zip(ins, own, strict=True) if mine]
    dense = _dense(name, params, ins, outs)
    if dense is not None:
        convolves = name == "conv_general_dilated"
        extra = GATHERED * _places(params, ins, outs) if convolves else 0.0
        nbytes = float(_bytes(read) + _bytes(outs))
        return Cost(dense, nbytes, extra=extra, grouped=convolves and all(own))
    elements = sum(map(_size, outs))
    if name.startswith(("reduce", "arg", "cum", "bj_reduce", "segment")):
        flops = float(max(sum(map(_size, ins)), elements))
        return _loose(flops, _FUSED * (_bytes(read) + _bytes(outs)))
    if name in _BY_OPERAND:
        return _loose(_OPERATIONS[name] * _size(ins[_BY_OPERAND[name]]), _FUSED * _bytes(outs))
    return _loose(_OPERATIONS.get(name, 1.0) * elements, _FUSED * _bytes(outs))


def _loose(flops: float, nbytes: float) -> Cost:
    """The cost of operations outside of a library, each of which takes longer (`LOOSE`)."""
    return Cost(flops, nbytes, extra=(LOOSE - 1) * flops)


def _dense(
    name: str, params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]
) -> float | None:
    """Arithmetic operations of a primitive that calls a library; None for other primitives."""
    elements = sum(map(_size, outs))
    match name:
        case "dot_general":
            (left, _), _ = params["dimension_numbers"]
            return 2.0 * elements * known_size(ins[0].aval.shape[axis] for axis in left)
        case "conv_general_dilated":
            out = params["dimension_numbers"].rhs_spec[0]
            return 2.0 * elements * _size(ins[1]) / max(_dim(ins[1].aval.shape[out]), 1)
        case "fft":
            return 5.0 * _size(ins[0]) * math.log2(max(_size(ins[0]), 2))
    if name in _CUBIC:
        rows = max(map(_dim, ins[0].aval.shape[-2:]))
        return _CUBIC[name] * _size(ins[0]) * rows
    return None


def _places(params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> float:
    """Positions of a convolution's kernel times positions of its result."""
    out, _, *window = params["dimension_numbers"].rhs_spec
    shape = ins[1].aval.shape
    positions = sum(map(_size, outs)) / max(_dim(shape[out]), 1)
    return positions * known_size(shape[axis] for axis in window)


def _bytes(atoms: Iterable[Any]) -> int:
    return sum(_size(a) * getattr(getattr(a.aval, "dtype", None), "itemsize", 0) for a in atoms)


def _size(atom: Any) -> int:
    return known_size(getattr(atom.aval, "shape", ()))


def _dim(dim: Any) -> int:
    """The length of an axis, 1 if it is unknown."""
    return 1 if is_unknown(dim) else int(dim)
