"""Which placed values later passes compute again, instead of reading them where they are stored.

The rule: what at most `MOST_OPERATIONS` elementwise operations compute from inputs is computed
again, everything else is stored. A `map_fn` is elementwise if all operations of its body are.
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


MOST_OPERATIONS = 256
"""Most operations by which a value is computed again. Without a bound, each of n passes would
compute all that the passes before it did, as in rounds of a loop that Python unrolls."""


def elementwise_operations(eqn: Eqn) -> int:
    """The number of operations of an equation that computes entry by entry, 0 for any other."""
    if eqn.effects:
        return 0
    if eqn.primitive.name != "bj_map":
        return int(operation_of(eqn).primitive.name in RECOMPUTED)
    names = [inner.primitive.name for inner in equations(eqn.params["jaxpr"])]
    return max(len(names), 1) if all(name in RECOMPUTED | CALLS for name in names) else 0
