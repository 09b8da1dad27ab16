"""Decides whether a pass has separate executables for full shards and for shards that need a mask.

Reductions mask padding and dropped members. A mask between the members and their sum keeps XLA from
making one matrix product of a sum of products, such as the gradients of a dense layer or the terms
of a covariance, which then takes up to 80 times as long. All shards but the last are full and need
no mask.
"""

from __future__ import annotations

from typing import Any

from beamjax.interpreters.cutting.stages import MapStage
from beamjax.interpreters.dimensions import is_unknown, known_size
from beamjax.interpreters.rules.sharding_rules import ReductionRule, shape_of

MASKED_SECONDS = 1e-9
"""Assumed cost of a mask, in seconds per masked value of a member."""
EXECUTABLE_SECONDS = 0.3
"""Assumed seconds to stage, export and compile one more executable."""
UNKNOWN_MEMBERS = 1 << 20
"""Assumed number of members where it is unknown."""


def are_all_full(n: Any, size: int) -> bool:
    """Whether n members are a whole number of shards."""
    return not is_unknown(n) and n % size == 0


def separate_executables_pay(stage: MapStage, n: Any, size: int) -> bool:
    """Whether a separate executable for full shards saves more time than it takes to make."""
    if not is_unknown(n) and n < size:
        return False
    members = UNKNOWN_MEMBERS if is_unknown(n) else n
    return _masked_values(stage, n) * members * MASKED_SECONDS > EXECUTABLE_SECONDS


def _masked_values(stage: MapStage, n: Any) -> float:
    """The number of values per member that reductions read."""
    values = 0.0
    for emission in stage.emissions:
        if isinstance(emission.rule, ReductionRule):
            for atom, axis in zip(emission.eqn.inputs, emission.rule.in_axes, strict=True):
                if axis is not None:
                    values += known_size(shape_of(atom)) / (1 if is_unknown(n) else n)
    return values
