"""Divisions by the number of members, in runs that may drop some of them."""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from beamjax import _compat
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, Var, aval_of
from beamjax.interpreters.rules.by_rows import operation_of
from beamjax.interpreters.rules.sharding_rules import ReductionRule

_SCALAR: Mapping[str, Any] = {"convert_element_type": float, "sub": operator.sub}
_VIEWS = frozenset("broadcast_in_dim convert_element_type reshape squeeze transpose".split())


def divide_by_members_left(program: PlacedProgram) -> None:
    """Divides sums over members by the number of those that are left, in place."""
    # For `jnp.mean` of 4 members of 3 numbers, where the rule of `s` becomes one of a mean over the
    # members that are left:
    #
    #     s = reduce_sum x; m = div s 12.0    ->    s = mean x; m = div s 3.0
    #
    # Other divisions by the number of members are noted in `program.undropped`, such as those of
    # cotangents before a pass over the members has shown which of them are dropped.
    readers = collections.Counter(atom for atom in program.flat.reads() if isinstance(atom, Var))
    makers = {var: eqn for eqn in program.flat.walk() for var in eqn.outputs}
    known = dict[Var, float]()
    for eqn in list(program.flat.walk()):
        _compute(eqn, known)
        if eqn.primitive.name == "bj_size":
            text = f"{eqn.line}: the derivative of reduce_mean divides"
            program.undropped.append((eqn.params["placement"], text))
        divisor = _divisor(eqn, known)
        if not divisor:
            continue
        total = _sum_over_members(eqn.inputs[0], program, makers, readers)
        placement, rule = program.rules[total] if total is not None else ("", None)
        n = program.sizes.get(placement)
        is_mean = total is not None and n and _divides(n, divisor) and divisor in _counts(total, n)
        if total is not None and n and is_mean and isinstance(rule, ReductionRule):
            program.rules[total] = placement, replace(rule, reducer="mean")
            aval = aval_of(eqn.inputs[1])
            eqn.inputs[1] = _compat.Literal(np.asarray(divisor / n, aval.dtype), aval)
            continue
        for name, size in program.sizes.items():
            # `jnp.var(x, ddof=1)` divides by n - 1.
            if _divides(size, divisor) or _divides(size, divisor + 1):
                program.undropped.append((name, f"{eqn.line}: div by {divisor:g} divides"))


def _compute(eqn: Eqn, known: dict[Var, float]) -> None:
    """Adds the result of an equation of known scalars, as `jnp.var` computes `12.0 - ddof`."""
    values = [_number(atom, known) for atom in eqn.inputs]
    if None not in values and eqn.primitive.name in _SCALAR and not aval_of(eqn.outputs[0]).shape:
        known[eqn.outputs[0]] = _SCALAR[eqn.primitive.name](*values)


def _number(atom: Atom, known: Mapping[Var, float]) -> float | None:
    if isinstance(atom, Var):
        return known.get(atom)
    is_real = np.ndim(atom.val) == 0 and np.issubdtype(np.asarray(atom.val).dtype, np.number)
    return float(atom.val) if is_real and np.isrealobj(atom.val) else None


def _divisor(eqn: Eqn, known: Mapping[Var, float]) -> float:
    """The number by which an equation divides floats; 0 if there is none."""
    if eqn.primitive.name != "div" or not _is_float(eqn.outputs[0]):
        return 0
    divisor = _number(eqn.inputs[1], known)
    return 0 if divisor is None or not np.isfinite(divisor) else divisor


def _is_float(atom: Atom) -> bool:
    return jnp.issubdtype(aval_of(atom).dtype, np.inexact)


def _counts(eqn: Eqn, n: int) -> set[int]:
    """The numbers by which a mean divides a sum over n members: members, or all that is added."""
    eqn = operation_of(eqn)
    shape = aval_of(eqn.inputs[0]).shape
    axes = eqn.params.get("axes", ())
    if eqn.primitive.name == "dot_general":
        ((axes, _), _) = eqn.params["dimension_numbers"]
    return {n, math.prod(shape[axis] for axis in axes)}


def _divides(n: Any, divisor: float) -> bool:
    return not is_unknown(n) and n > 1 and divisor > 0 and divisor % n == 0


def _sum_over_members(
    atom: Atom, program: PlacedProgram, makers: Mapping[Var, Eqn], readers: Mapping[Var, int]
) -> Eqn | None:
    """The equation that adds floats of members up to a value that nothing else reads, or None."""
    while isinstance(atom, Var) and readers[atom] == 1 and atom in makers:
        eqn = makers[atom]
        _, rule = program.rules.get(eqn, ("", None))
        if isinstance(rule, ReductionRule):
            return eqn if rule.reducer == "sum" and _is_float(atom) else None
        if eqn.primitive.name not in _VIEWS or rule is not None:
            return None
        atom = eqn.inputs[0]
    return None
