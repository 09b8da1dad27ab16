"""Fuses the reductions of a pass that share an accumulator into one flat vector of partials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from beamjax.interpreters.cutting.stages import MapStage
from beamjax.interpreters.program import Var, aval_of
from beamjax.interpreters.rules.by_rows import operation_of
from beamjax.interpreters.rules.sharding_rules import FunctionReductionRule, ReductionRule
from beamjax.numerics.reducers import ACCUMULATED
from beamjax.plan.steps import FusedBuffer, Reduction, ValueType


def fuse_reductions(
    stage: MapStage, served: Callable[[Var], str], values: Mapping[str, ValueType]
) -> tuple[FusedBuffer, ...]:
    """Groups the reductions of a pass by accumulator and dtype of the partials."""
    # sum(a), sum(b), max(c)  become the vector [sum(a)..., sum(b)...] and the vector [max(c)...].
    # `served` gives the name of a result, and adds its type to `values`.
    groups: dict[tuple[str, str], list[Reduction]] = {}
    for emission in stage.emissions:
        eqn, rule = emission.eqn, emission.rule
        if not isinstance(rule, ReductionRule) or isinstance(rule, FunctionReductionRule):
            continue
        reducer = ACCUMULATED[rule.reducer]
        result = served(eqn.outputs[0])
        dtype = np.dtype(values[result].dtype)
        if not rule.selects_members and operation_of(eqn).primitive.name != "dot_general":
            # A mean of ints is a float, but its partials are sums of ints.
            dtype = np.dtype(aval_of(eqn.inputs[-1]).dtype)
        partial = np.dtype(reducer.partial_dtype(dtype)).name
        group = groups.setdefault((reducer.operation, partial), [])
        offset = group[-1].offset + group[-1].size if group else 0
        size = math.prod(values[result].shape)
        group.append(Reduction(result, rule.reducer, dtype.name, offset, size))
    return tuple(
        FusedBuffer(kind, dtype, group[-1].offset + group[-1].size, tuple(group))
        for (kind, dtype), group in groups.items()
    )


def fused_vector(buffer: FusedBuffer, partials: Mapping[str, jax.Array]) -> jax.Array:
    """Concatenates the partials of a buffer, given by name of the result, to one vector."""
    parts = [partials[r.result].astype(buffer.dtype).reshape(-1) for r in buffer.reductions]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
