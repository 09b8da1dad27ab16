"""Rewrites equations that add rows to the members, and those that read the result.

A value may have a few more rows than there are members, as that of `jnp.pad` or of a full
`jnp.convolve`. It is moved past equations as the concatenation of all members and a *tail*, which
is a server value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite
from beamjax.interpreters.placement.slices import (
    Extended,
    Slice,
    View,
    extended_of,
    mover,
    view_of,
)
from beamjax.interpreters.program import Atom, Eqn, Var
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.sharding_rules import (
    FunctionReductionRule,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    bind,
    replaced,
    shape_of,
)

JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add, "prod": lax.mul, "max": lax.max, "min": lax.min,
    "any": lax.bitwise_or, "all": lax.bitwise_and,
}  # fmt: skip
"""For each reduction, its function of two values."""


def appended(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites a concatenation of one view of the members and server values."""
    program = rewriter.program
    if eqn.primitive.name != "concatenate" or Extended.of(program, eqn) is not None:
        return None
    axis, atoms = eqn.params["dimension"], list(eqn.inputs)
    found = [i for i, atom in enumerate(atoms) if program.place(atom) or view_of(rewriter, atom)]
    if len(found) != 1:
        return None
    (at,) = found
    view = view_of(rewriter, atoms[at]) or View.of_all(program, atoms[at])
    others = atoms[:at] + atoms[at + 1 :]

    def ends(*others: Any) -> list[Any]:
        return [lax.concatenate(x, axis) if x else None for x in (others[:at], others[at:])]

    heads = sum(shape_of(atom)[axis] for atom in atoms[:at])
    tails = sum(shape_of(atom)[axis] for atom in atoms[at + 1 :])
    return _with_ends(rewriter, view, axis, (heads, tails), others, ends)


def padded(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites a padding of all members before the first and after the last one."""
    if eqn.primitive.name != "pad":
        return None
    (atom, fill), config = eqn.inputs, eqn.params["padding_config"]
    view = View.of_all(rewriter.program, atom)
    if view is None or rewriter.program.place(fill) is not None:
        return None
    axis = view.axis
    low, high, between = map(int, config[axis])
    others_padded = any(any(map(int, c)) for k, c in enumerate(config) if k != axis)
    if between or others_padded or min(low, high) < 0:
        return None
    rewriter.pads[eqn.outputs[0]] = eqn

    def fills(fill: Any) -> list[Any]:
        shape = shape_of(atom)
        return [lax.full(replaced(shape, axis, k), fill) if k else None for k in (low, high)]

    return _with_ends(rewriter, view, axis, (low, high), [fill], fills)


def _with_ends(
    rewriter: BlockRewriter,
    view: View | None,
    axis: int,
    sizes: tuple[int, int],
    served: Sequence[Atom],
    ends: Callable[..., Sequence[Any]],
    before: Callable[[Any], Any] = lambda x: x,
) -> Rewrite | None:
    """Rewrites a view with further rows before and after it.

    Args:
      rewriter: of the block.
      view: the members of the view.
      axis: the axis along which there are further rows.
      sizes: the number of rows before and after the view.
      served: server values.
      ends: computes these rows from the server values; None for no rows.
      before: is applied to the members before they are moved. It keeps their axis.
    """
    if view is None or view.axis != axis or not rewriter.rewrites.moves:
        return None
    if view.part.stride > 1 or view.part.is_reversed:
        return None
    part, (head, after), n = view.part, sizes, view.part.n
    total = head + part.count + after
    # Row r of the result becomes member `first + r`, but for the rows of the tail.
    first = min(max(part.start - head, 0), max(n - total, 0))
    stop = first + head + part.count
    inside = min(after, max(n - stop, 0))
    made = replace(part, start=first, count=min(total, n))
    move = mover(rewriter, view.members, axis, part.start - head - first)
    if move is None or not (made.is_large or made.count == n) or total > 2 * n:
        return None

    def function(x: Any, *served: Any) -> Sequence[Any]:
        x, (front, back) = before(x), ends(*served)
        rows = move(x)
        if front is not None:
            rows = lax.dynamic_update_slice_in_dim(rows, front, first, axis)
        if inside:
            placed = lax.slice_in_dim(back, 0, inside, axis=axis)
            rows = lax.dynamic_update_slice_in_dim(rows, placed, stop, axis)
        if total <= n:
            return [rows if total == n else made.of(rows, axis)]
        tail = []
        if stop > n:
            # The last members of the view.
            end = part.start + part.count
            tail.append(lax.slice_in_dim(x, end - (stop - n), end, axis=axis))
        if inside < after:
            tail.append(lax.slice_in_dim(back, inside, after, axis=axis))
        return [lax.concatenate([rows, lax.concatenate(tail, axis)], axis)]

    return Rewrite(function, [view.members, *served], is_view=total != n)


# --- equations that read members with a tail


def tailed(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation that reads members with a tail: computes both parts."""
    found = [extended_of(rewriter, atom) for atom in eqn.inputs]
    given = next(filter(None, found), None)
    if given is None:
        return None
    if eqn.primitive.name == "slice":
        return _slice_with_tail(rewriter, eqn, given)
    n, count = given.n, given.count
    rule = rules.classify(eqn, [x.along.axis if x else None for x in found], count)
    # All must have the same placement, or the operands have different numbers of rows.
    if rule is None or len({x.along.placement for x in found if x is not None}) > 1:
        return None
    if isinstance(rule, ReductionRule) and not _joins(eqn, rule):
        return None
    operands = [
        _operand(rewriter, atom, extended, axis, count)
        for atom, extended, axis in zip(eqn.inputs, found, rule.in_axes, strict=True)
    ]
    both = [operand for operand in operands if operand is not None]
    if len(both) < len(operands):
        return None

    def function(*args: Any) -> Sequence[Any]:
        parts = []
        for start, stop in (0, n), (n, count):
            shard = TracedShard(np.int32(start), stop - start, jnp.ones(stop - start, bool))  # type: ignore[arg-type]
            rest = iter(args)
            values = [operand(rest, shard) for operand, _ in both]
            if isinstance(rule, MemberwiseRule):
                parts.append(rule.emit(eqn, values, shard))
            else:
                parts.append(bind(eqn, values))
        if isinstance(rule, ReductionRule):
            return [JOINS[rule.reducer](x, y) for x, y in zip(*parts, strict=True)]
        pairs = zip(*parts, rule.out_axes, strict=True)
        return [lax.concatenate([x, y], axis) for x, y, axis in pairs if axis is not None]

    atoms = [atom for _, read in both for atom in read]
    return Rewrite(function, atoms, is_view=isinstance(rule, MemberwiseRule))


def _joins(eqn: Eqn, rule: ReductionRule) -> bool:
    """Whether the reductions of two parts can be joined by `JOINS`."""
    plain = not (isinstance(rule, FunctionReductionRule) or rule.selects_members)
    return plain and rule.reducer in JOINS and not eqn.primitive.name.startswith("scatter")


_Operand = tuple[Callable[[Iterator[Any], TracedShard], Any], list[Atom]]
"""A function of the values that it takes from an iterator, and of the part that it returns. The
list has the values to give it. The part is a shard: all members, or the rows of the tail."""


def _operand(
    rewriter: BlockRewriter, atom: Atom, extended: Extended | None, axis: int | None, count: int
) -> _Operand | None:
    """Either part of an operand; None if it has other members."""
    if rewriter.program.place(atom) is not None or view_of(rewriter, atom) is not None:
        return None
    if extended is None:
        return _part_of_server_value(rewriter, atom, axis, count)
    if axis != extended.along.axis:
        return None
    return _either_part, [extended.members, extended.tail]


def _either_part(args: Iterator[Any], shard: TracedShard) -> Any:
    """The members or the tail, which are the next two arguments."""
    members, tail = next(args), next(args)
    return tail if shard.start else members


def _part_of_server_value(
    rewriter: BlockRewriter, atom: Atom, axis: int | None, count: int
) -> _Operand:
    """A part of a server value. Shards create values such as `jnp.arange(count)`."""
    maker = rewriter.makers.get(atom) if isinstance(atom, Var) else None
    if axis is None:
        return lambda args, shard: next(args), [atom]
    if isinstance(atom, Var) and maker is not None and not maker.blocks:
        out = maker.outputs.index(atom)
        made = rules.invert(maker, out, axis, count)
        values = [a.val for a in maker.inputs if not isinstance(a, Var)]
        if made is not None and len(values) == len(maker.inputs):
            return lambda args, shard: made.emit(maker, values, shard)[out], []

    def cut(args: Iterator[Any], shard: TracedShard) -> Any:
        start = int(shard.start)
        return lax.slice_in_dim(next(args), start, start + shard.size, axis=axis)

    return cut, [atom]


def _slice_with_tail(rewriter: BlockRewriter, eqn: Eqn, given: Extended) -> Rewrite | None:
    """Rewrites a slice of members with a tail."""
    p, axis, n = eqn.params, given.along.axis, given.n
    start, stop = (int(p[f"{end}_indices"][axis]) for end in ("start", "limit"))
    if stop <= n:
        return Rewrite(lambda x: bind(eqn, [x]), [given.members], is_view=True)
    if start >= n or (p["strides"] is not None and p["strides"][axis] != 1):
        return None

    def cut(x: Any, start: int, stop: int) -> Any:
        starts, limits = (
            replaced(p[f"{end}_indices"], axis, k) for end, k in (("start", start), ("limit", stop))
        )
        return bind(eqn, [x], start_indices=starts, limit_indices=limits)[0]

    view = View(Slice(given.along.placement, start, n - start, n), given.members, axis)
    return _with_ends(
        rewriter, view, axis, (0, stop - n), [given.tail],
        lambda tail: (None, cut(tail, 0, stop - n)), before=lambda x: cut(x, 0, n),
    )  # fmt: skip
