"""Counts the cost of the stages of a program from their equations, without compiling anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core as jex

from beamjax.bodies.jaxprs import evaluate
from beamjax.interpreters.cutting.stages import MapStage, ServerStage
from beamjax.interpreters.dimensions import is_unknown, known_size
from beamjax.interpreters.program import BranchEqn, Eqn, LoopEqn, MemberEqn
from beamjax.interpreters.rules.by_rows import operation_of
from beamjax.plan.cost import Cost

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
    eqn, own = operation_of(eqn), [True] * len(eqn.inputs)
    return _operation(eqn.primitive.name, eqn.params, eqn.inputs, eqn.outputs, own)


def body_cost(closed: Any, own: Sequence[bool] | None = None) -> Cost:
    """The cost of a jaxpr per member; equations that read nothing of `own` are not counted."""
    # Under vmap, equations that read only what is the same for all members are computed once for
    # all of them. `own` says which inputs differ; by default all do.
    jaxpr = getattr(closed, "jaxpr", closed)
    total = Cost()

    def apply(eqn: Any, ins: list[bool]) -> list[bool]:
        nonlocal total
        mine = own is None or any(ins) or not eqn.invars
        if mine:
            total += _operation(eqn.primitive.name, eqn.params, eqn.invars, eqn.outvars, ins)
        return [mine] * len(eqn.outvars)

    constants = [False] * len(jaxpr.constvars)
    evaluate(jaxpr, constants, own or [True] * len(jaxpr.invars), apply, lambda _: False)
    return total


def _operation(
    name: str,
    params: dict[str, Any],
    ins: Sequence[Any],
    outs: Sequence[Any],
    own: Sequence[bool],
) -> Cost:
    inner = list(jex.jaxprs_in_params(params))
    match name:
        case "scan":
            return _inner_cost(params["jaxpr"], own).times(_dim(params["length"]))
        case "while":
            bodies = (body_cost(params[key]) for key in ("body_jaxpr", "cond_jaxpr"))
            once = sum(bodies, Cost()).times(GUESSED_ROUNDS)
            return replace(once, guessed=True)
        case "cond":
            return max((_inner_cost(x, own[1:]) for x in inner), key=lambda c: c.weight + c.nbytes)
    if inner and not name.startswith(("reduce", "scatter", "sort", "bj_", "custom_lin")):
        return sum((_inner_cost(x, own) for x in inner), Cost())
    if name in _FREE:
        return Cost()
    read = [atom for atom, mine in zip(ins, own, strict=True) if mine]
    dense = _dense(name, params, ins, outs)
    if dense is not None:
        convolves = name == "conv_general_dilated"
        extra = GATHERED * _places(params, ins, outs) if convolves else 0.0
        return Cost(dense, float(_bytes(read) + _bytes(outs)), extra=extra)
    made = sum(map(_size, outs))
    if name.startswith(("reduce", "arg", "cum", "bj_reduce", "segment")):
        flops = float(max(sum(map(_size, ins)), made))
        return _loose(flops, _FUSED * (_bytes(read) + _bytes(outs)))
    if name in _BY_OPERAND:
        return _loose(_OPERATIONS[name] * _size(ins[_BY_OPERAND[name]]), _FUSED * _bytes(outs))
    return _loose(_OPERATIONS.get(name, 1.0) * made, _FUSED * _bytes(outs))


def _loose(flops: float, nbytes: float) -> Cost:
    """The cost of operations outside of a library, each of which takes longer (`LOOSE`)."""
    return Cost(flops, nbytes, extra=(LOOSE - 1) * flops)


def _inner_cost(jaxpr: Any, own: Sequence[bool]) -> Cost:
    """The cost of a jaxpr inside an equation; `own` is for the operands of the equation."""
    count = len(getattr(jaxpr, "jaxpr", jaxpr).invars)
    return body_cost(jaxpr, own if len(own) == count else None)


def _dense(
    name: str, params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]
) -> float | None:
    """Arithmetic operations of a primitive that calls a library; None for other primitives."""
    made = sum(map(_size, outs))
    match name:
        case "dot_general":
            (left, _), _ = params["dimension_numbers"]
            return 2.0 * made * known_size(ins[0].aval.shape[axis] for axis in left)
        case "conv_general_dilated":
            out = params["dimension_numbers"].rhs_spec[0]
            return 2.0 * made * _size(ins[1]) / max(_dim(ins[1].aval.shape[out]), 1)
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
    made = sum(map(_size, outs)) / max(_dim(shape[out]), 1)
    return made * known_size(shape[axis] for axis in window)


def _bytes(atoms: Iterable[Any]) -> int:
    return sum(_size(a) * getattr(getattr(a.aval, "dtype", None), "itemsize", 0) for a in atoms)


def _size(atom: Any) -> int:
    return known_size(getattr(atom.aval, "shape", ()))


def _dim(dim: Any) -> int:
    """The length of an axis, 1 if it is unknown."""
    return 1 if is_unknown(dim) else int(dim)
