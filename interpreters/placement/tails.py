"""Rewrites equations that concatenate or pad members, and those that read the result.

A value may have a few more rows than there are members, as that of `jnp.pad` or of a full
`jnp.convolve`. It is moved past equations as the concatenation of all members and a *tail*, which
is a server value. Other concatenations, such as `jnp.concatenate([x, y])`, are moved as well.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite
from beamjax.interpreters.placement.slices import (
    MAX_PARTS,
    Extended,
    Slice,
    View,
    extended_of,
    mover,
    view_of,
)
from beamjax.interpreters.program import Atom, Eqn, Var
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.factors import ELEMENTWISE
from beamjax.interpreters.rules.sharding_rules import (
    FunctionReductionRule,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    any_placed,
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


# --- equations that read concatenated members


@dataclass(frozen=True)
class _Parts:
    """A concatenation along the members, some of whose `parts` are members or views of them.

    `bounds` has the first row of each part, and then the number of rows of all parts.
    """

    parts: tuple[Atom, ...]
    bounds: tuple[int, ...]
    axis: int

    @staticmethod
    def of(rewriter: BlockRewriter, atom: Atom) -> _Parts | None:
        """The parts of a value of the block, or None."""
        maker, program = rewriter.maker(atom, "concatenate"), rewriter.program
        if maker is None:
            return None
        parts, axis = tuple(maker.inputs), int(maker.params["dimension"])
        views = [View.of_all(program, part) or view_of(rewriter, part) for part in parts]
        found = {(view.part.placement, view.axis) for view in views if view is not None}
        if len(found) != 1 or found.pop()[1] != axis:
            return None
        sizes = (int(shape_of(part)[axis]) for part in parts)
        return _Parts(parts, tuple(itertools.accumulate(sizes, initial=0)), axis)

    def part(self, args: Iterator[Any], shard: TracedShard) -> Any:
        """The part with the rows of a shard, where `args` has all parts."""
        values = [next(args) for _ in self.parts]
        return values[self.bounds.index(int(shard.start))]


def tiled(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites `jnp.tile` along the members to a concatenation."""
    if eqn.primitive.name != "tile":
        return None
    (atom,), reps = eqn.inputs, eqn.params["reps"]
    view = View.of_all(rewriter.program, atom) or view_of(rewriter, atom)
    if view is None or not 1 < reps[view.axis] <= MAX_PARTS:
        return None

    def function(x: Any) -> Sequence[Any]:
        (part,) = bind(eqn, [x], reps=replaced(reps, view.axis, 1))
        return [lax.concatenate([part] * reps[view.axis], view.axis)]

    return Rewrite(function, [atom], is_view=True)


def concatenated(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation that reads concatenated members: computes each part."""
    extended = extended_of(rewriter, eqn.inputs[0]) if eqn.inputs else None
    if eqn.primitive.name == "slice" and extended is not None:
        return _slice_with_tail(rewriter, eqn, extended)
    found = [_Parts.of(rewriter, atom) for atom in eqn.inputs]
    bounds = next((parts.bounds for parts in found if parts), None)
    if bounds is None:
        return None
    rule = rules.classify(eqn, [parts.axis if parts else None for parts in found], bounds[-1])
    if rule is None or (isinstance(rule, ReductionRule) and not _joins(eqn, rule)):
        return None
    operands = [
        _operand(rewriter, atom, parts, axis, bounds)
        for atom, parts, axis in zip(eqn.inputs, found, rule.in_axes, strict=True)
    ]
    given = [operand for operand in operands if operand is not None]
    if len(given) < len(operands):
        return None

    def function(*args: Any) -> Sequence[Any]:
        # By the ids of operands, which the entries keep alive.
        known: dict[tuple[int, ...], tuple[Sequence[Any], Sequence[Any]]] = {}
        results: list[Sequence[Any]] = []
        for start, stop in itertools.pairwise(bounds):
            shard = TracedShard(np.int32(start), stop - start, jnp.ones(stop - start, bool))  # type: ignore[arg-type]
            rest = iter(args)
            values = [operand(rest, shard) for operand, _ in given]
            # Results of these do not depend on the position, so equal parts have equal results.
            same = isinstance(rule, ReductionRule) or eqn.primitive.name in ELEMENTWISE
            key = tuple(map(id, values)) if same else (start,)
            if key not in known:
                if isinstance(rule, MemberwiseRule):
                    known[key] = values, rule.emit(eqn, values, shard)
                else:
                    known[key] = values, bind(eqn, values)
            results.append(known[key][1])
        if isinstance(rule, ReductionRule):
            join = JOINS[rule.reducer]
            return [functools.reduce(join, each) for each in zip(*results, strict=True)]
        pairs = zip(*results, rule.out_axes, strict=True)
        return [lax.concatenate(each, axis) for *each, axis in pairs if axis is not None]

    atoms = [atom for _, read in given for atom in read]
    return Rewrite(function, atoms, is_view=isinstance(rule, MemberwiseRule))


def _joins(eqn: Eqn, rule: ReductionRule) -> bool:
    """Whether the reductions of two parts can be joined by `JOINS`."""
    plain = not (isinstance(rule, FunctionReductionRule) or rule.selects_members)
    return plain and rule.reducer in JOINS and not eqn.primitive.name.startswith("scatter")


_Operand = tuple[Callable[[Iterator[Any], TracedShard], Any], list[Atom]]
"""A function of the values that it takes from an iterator, and of the part that it returns, as a
shard. The list has the values to give it."""


def _operand(
    rewriter: BlockRewriter,
    atom: Atom,
    parts: _Parts | None,
    axis: int | None,
    bounds: tuple[int, ...],
) -> _Operand | None:
    """Any part of an operand; None if it has other members."""
    if rewriter.program.place(atom) is not None or view_of(rewriter, atom) is not None:
        return None
    if parts is None:
        return _part_of_server_value(rewriter, atom, axis, bounds[-1])
    if (axis, bounds) != (parts.axis, parts.bounds):
        return None
    return parts.part, list(parts.parts)


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
        if made is not None and not any_placed(made.in_axes):
            emit = lambda args, shard: made.emit(maker, [next(args) for _ in maker.inputs], shard)
            return lambda args, shard: emit(args, shard)[out], list(maker.inputs)

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
