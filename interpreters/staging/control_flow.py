"""Turns scan, while and cond with placed operators into loops and branches, or unrolls them.

The jaxprs of such an equation become blocks, whose equations are cut into steps like those of the
program. A block reads what its equation closes over directly, as a value of an enclosing block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from beamjax import _compat
from beamjax.interpreters.program import Atom, BranchEqn, LoopEqn, Var, effects_of

if TYPE_CHECKING:
    from beamjax.interpreters.staging.flatten import Inliner


def scan_loop(
    inliner: Inliner, eqn: Any, inputs: list[Atom], outputs: list[Var], line: str
) -> LoopEqn:
    """A loop for a scan."""
    # carry, ys = scan[length, reverse, jaxpr] constants carry xs
    # becomes  carry, ys = loop carry xs:  block (carry, x) -> (new carry, y)
    # whose block reads the constants as values of the enclosing block.
    constants, carried = _compat.scan_counts(eqn)
    rounds, reverse, closed = (eqn.params[k] for k in ("length", "reverse", "jaxpr"))
    params = inliner.fresh(closed.jaxpr.invars[constants:])
    block = inliner.nested(
        params, lambda: inliner.inline(closed, [*inputs[:constants], *params], line)
    )
    stacked = [inliner.named(atom) for atom in inputs[constants:]]
    return LoopEqn(eqn.primitive, {}, [*stacked], outputs, line, block, None, carried, rounds,
                   reverse, effects=effects_of(block))  # fmt: skip


def while_loop(
    inliner: Inliner, eqn: Any, inputs: list[Atom], outputs: list[Var], line: str
) -> LoopEqn:
    """A loop for a while."""
    # carry = while[cond_jaxpr, body_jaxpr] test_constants body_constants carry
    # becomes  carry = loop carry:  condition (carry) -> bool[], block (carry) -> new carry
    test, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    init = [inliner.named(atom) for atom in inputs[test + body :]]
    params = inliner.fresh(eqn.params["body_jaxpr"].jaxpr.invars[body:])
    # vmap makes the condition of a while bool[rows], and runs rounds until it holds for no row.
    batched = eqn.params["cond_jaxpr"].jaxpr.outvars[0].aval.shape != ()
    tested = [*inputs[:test], *params]

    def condition() -> list[Atom]:
        (holds,) = inliner.inline(eqn.params["cond_jaxpr"], tested, line)
        return [inliner.applied(jnp.any, [holds], line) if batched else holds]

    def round_() -> list[Atom]:
        fixed = inputs[test : test + body]
        after = inliner.inline(eqn.params["body_jaxpr"], [*fixed, *params], line)
        if not batched:
            return after
        # Under vmap, a round must not change the rows whose condition is False.
        (holds,) = inliner.inline(eqn.params["cond_jaxpr"], tested, line)
        ends = zip(params, after, strict=True)
        return [inliner.applied(_select_rows, [holds, old, new], line) for old, new in ends]

    conditions, block = inliner.nested(params, condition), inliner.nested(params, round_)
    return LoopEqn(eqn.primitive, {}, [*init], outputs, line, block, conditions, len(init),
                   rounds=None, reverse=False, selects=batched,
                   effects=effects_of(conditions, block))  # fmt: skip


def branch(
    inliner: Inliner, eqn: Any, inputs: list[Atom], outputs: list[Var], line: str
) -> BranchEqn:
    """A branch for a cond."""
    # results = cond[branches] index operands  becomes  results = branch index:  () -> results, ...
    index = inliner.named(inputs[0])
    branches = tuple(
        inliner.nested([], functools.partial(inliner.inline, closed, inputs[1:], line))
        for closed in eqn.params["branches"]
    )
    return BranchEqn(
        eqn.primitive, {}, [index], outputs, line, branches, effects=effects_of(*branches)
    )


def unrolled(inliner: Inliner, eqn: Any, inputs: list[Atom], line: str) -> list[Atom]:
    """Inlines all rounds of a scan, in the order in which they run."""
    constants, carried = _compat.scan_counts(eqn)
    fixed, carry = inputs[:constants], inputs[constants : constants + carried]
    xs = inputs[constants + carried :]
    rounds: list[list[Atom]] = []
    for i in range(eqn.params["length"]):
        index = eqn.params["length"] - 1 - i if eqn.params["reverse"] else i
        entries = [inliner.applied(lambda x, k=index: x[k], [x], line) for x in xs]
        results = inliner.inline(eqn.params["jaxpr"], [*fixed, *carry, *entries], line)
        carry = results[:carried]
        rounds.append(results[carried:])
    rounds = rounds[::-1] if eqn.params["reverse"] else rounds
    if not rounds:
        return [*carry, *(_empty(inliner, var.aval, line) for var in eqn.outvars[carried:])]
    # carry2, ys = scan carry xs  becomes, for two rounds,
    # x0 = xs[0]; carry1, y0 = ROUND carry x0
    # x1 = xs[1]; carry2, y1 = ROUND carry1 x1; ys = stack y0 y1
    stack = lambda *ys: jnp.stack(ys)
    return [*carry, *(inliner.applied(stack, ys, line) for ys in zip(*rounds, strict=True))]


def selected(inliner: Inliner, eqn: Any, inputs: list[Atom], line: str) -> list[Atom]:
    """Inlines all branches of a cond and selects among their results."""
    # results = cond index operands  becomes
    # a = FIRST operands; b = SECOND operands; results = select_n index a b
    index, *operands = inputs
    branches = [inliner.inline(closed, operands, line) for closed in eqn.params["branches"]]
    cases = zip(*branches, strict=True)
    return [inliner.applied(jax.lax.select_n, [index, *atoms], line) for atoms in cases]


def _empty(inliner: Inliner, aval: Any, line: str) -> Atom:
    """A stacked result with no entries."""
    return inliner.applied(lambda: jax.lax.empty(aval.shape, aval.dtype), [], line)


def _select_rows(holds: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """`new` where `holds` is True, else `old`; the axes of `holds` are leading axes of both."""
    rows = jax.lax.expand_dims(holds, range(holds.ndim, new.ndim))
    return jnp.where(rows, new, old)


EQUATIONS: dict[str, Callable[..., LoopEqn | BranchEqn]] = {
    "scan": scan_loop,
    "while": while_loop,
    "cond": branch,
}
"""For each primitive, the function that makes a loop or a branch."""
