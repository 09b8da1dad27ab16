"""Which placed values later passes compute again, instead of reading them where they are stored.

The rule: what elementwise operations compute from inputs is computed again, everything else is
stored. A `map_fn` is elementwise if all operations of its body are.
"""

from __future__ import annotations

from beamjax.bodies.jaxprs import equations
from beamjax.interpreters.program import Eqn
from beamjax.interpreters.rules.by_rows import operation_of
from beamjax.interpreters.rules.factors import ELEMENTWISE
from beamjax.interpreters.staging.flatten import CALLS

RECOMPUTED = frozenset(ELEMENTWISE) - {"threefry2x32", "random_gamma"} | {
    "bj_broadcast", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "pad", "rev",
    "concatenate", "split", "stack", "unstack", "random_wrap", "random_unwrap", "iota",
}  # fmt: skip
"""Elementwise primitives, and those that only move entries."""


def is_elementwise(eqn: Eqn) -> bool:
    """Whether an equation computes its results entry by entry."""
    if eqn.effects:
        return False
    if eqn.primitive.name != "bj_map":
        return operation_of(eqn).primitive.name in RECOMPUTED
    body = equations(eqn.params["jaxpr"])
    return all(inner.primitive.name in RECOMPUTED | CALLS for inner in body)
