"""Finds out whether the members of a pass have convolution kernels that differ between members.

`vmap` makes one grouped convolution of these, which XLA's CPU backend computes at a fraction of the
speed of separate ones. If each member trains a network, its kernels differ from the second step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from beamjax._compat import scan_counts
from beamjax.interpreters.cutting.pieces import MapPiece

Own = list[bool]
"""For each value, whether it differs between members."""


def convolves_by_member(piece: MapPiece) -> bool:
    """Whether a pass holds a convolution whose input and kernel both differ between members."""
    return any(
        _flow(
            emission.eqn.params["jaxpr"], [axis is not None for axis in emission.reading.in_axes]
        )[0]
        for emission in piece.emissions
        if emission.eqn.primitive.name == "bj_map"
    )


def _flow(closed: Any, own: Sequence[bool]) -> tuple[bool, Own]:
    """Whether a jaxpr holds such a convolution, and which of its outputs differ between members."""
    jaxpr = getattr(closed, "jaxpr", closed)
    env = dict(zip(jaxpr.invars, own, strict=True))
    read = lambda atom: not hasattr(atom, "val") and env.get(atom, False)
    for eqn in jaxpr.eqns:
        ins = list(map(read, eqn.invars))
        if eqn.primitive.name == "conv_general_dilated" and all(ins):
            return True, []
        found, outs = _through(eqn, ins)
        if found:
            return True, []
        env.update(zip(eqn.outvars, outs, strict=True))
    return False, list(map(read, jaxpr.outvars))


def _through(eqn: Any, ins: Own) -> tuple[bool, Own]:
    """Like `_flow`, for one equation."""
    inner = list(jex.jaxprs_in_params(eqn.params))
    everything = [any(ins)] * len(eqn.outvars)
    if not inner or not any(ins):
        return False, everything
    match eqn.primitive.name:
        case "scan":
            fixed, carried = scan_counts(eqn)
            return _rounds(inner[0], ins[:fixed], ins[fixed:][:carried], ins[fixed + carried :])
        case "while":
            fixed = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            consts = ins[eqn.params["cond_nconsts"] : fixed]
            return _rounds(eqn.params["body_jaxpr"], consts, ins[fixed:], [])
        case "cond":
            ins = ins[1:]
    flows = [_flow(j, ins if _arity(j) == len(ins) else [True] * _arity(j)) for j in inner]
    if any(found for found, _ in flows):
        return True, []
    # If a jaxpr has other numbers of operands or results, they can't be matched to the equation's.
    if all(_arity(j) == len(ins) and len(outs) == len(eqn.outvars)
           for j, (_, outs) in zip(inner, flows, strict=True)):  # fmt: skip
        return False, [any(outs) for outs in zip(*(outs for _, outs in flows), strict=True)]
    return False, everything


def _rounds(jaxpr: Any, consts: Own, carried: Own, given: Own) -> tuple[bool, Own]:
    """Like `_flow`, for a loop: repeats rounds until no further carried value differs."""
    while True:
        found, outs = _flow(jaxpr, [*consts, *carried, *given])
        if found:
            return True, []
        after = [a or b for a, b in zip(carried, outs[: len(carried)], strict=True)]
        if after == carried:
            return False, [*carried, *outs[len(carried) :]]
        carried = after


def _arity(jaxpr: Any) -> int:
    return len(getattr(jaxpr, "jaxpr", jaxpr).invars)
