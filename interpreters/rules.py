"""Which primitives act along the members: a table from primitive to rule.

A rule is asked "if these operands have their members along these axes, can the equation be computed
a shard at a time?" and answers with one of

* `Local`: yes; it says along which axis each operand must have its members, along which axis the
  results have them, and how to emit the equation for a shard;
* `Fold`: it reduces over the members; a shard gives a partial, and partials are combined;
* `None`: it mixes members (or nobody has written a rule), so its operands are gathered.

`None` is always right, only slower: a rule must be sound for every number of members.
"""

from __future__ import annotations

from typing import Any

from beamjax.interpreters import combinations, folds, indexing, memberwise
from beamjax.interpreters.creations import CREATE
from beamjax.interpreters.flat_program import Eqn
from beamjax.interpreters.memberwise import ELEMENTWISE
from beamjax.interpreters.readings import (
    RULES,
    Axes,
    Combination,
    Fold,
    Local,
    Shard,
    bind,
    shape_of,
)

__all__ = ["ELEMENTWISE", "RULES", "Axes", "Combination", "Fold", "Local", "Shard", "bind",
           "classify", "combinations", "create", "folds", "indexing", "invert",
           "memberwise"]  # fmt: skip


def classify(eqn: Eqn, axes: Axes, n: Any) -> Local | Fold | None:
    """How to compute `eqn`, whose placed operands have their n members along `axes`."""
    found = RULES.get(eqn.primitive.name)
    reading = found(eqn, axes, n) if found else None
    return reading if reading is None or _fits(eqn, reading, n) else None


def _fits(eqn: Eqn, reading: Local | Fold, n: Any) -> bool:
    """Whether each axis that a reading cuts has n entries; n = None asks for nothing.

    It may not where one operand is broadcast against another, or written into a larger one.
    """
    pairs = list(zip(eqn.inputs, reading.in_axes, strict=True))
    if isinstance(reading, Local):
        pairs += zip(eqn.outputs, reading.out_axes, strict=True)
    return n is None or all(axis is None or shape_of(atom)[axis] == n for atom, axis in pairs)


def create(eqn: Eqn, axis: int, n: Any) -> Local | None:
    """The reading of `eqn` that makes members along `axis` out of server values alone."""
    found = CREATE.get(eqn.primitive.name)
    return found(eqn, axis, n) if found else None


def invert(eqn: Eqn, out: int, axis: int, n: Any) -> Local | None:
    """The member-wise reading of `eqn` that gives result number `out` its members along `axis`."""
    created = create(eqn, axis, n)
    if created is not None:
        return created
    for i, atom in enumerate(eqn.inputs):
        for k, dim in enumerate(shape_of(atom)):
            if dim == n:
                axes: list[int | None] = [None] * len(eqn.inputs)
                axes[i] = k
                found = classify(eqn, axes, n)
                if isinstance(found, Local) and found.out_axes[out] == axis:
                    return found
    return None
