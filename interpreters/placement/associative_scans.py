"""Rewrites `lax.associative_scan` over the members to two passes.

JAX has no primitive for it: its equations are slices of every second member, calls of the function
on half of the members, on a quarter, and so on. The function is read from the first call. Tracing
`lax.associative_scan` of it again must give the same equations. So no other program is mistaken for
a scan, whatever the version of JAX.

The first pass scans each range of members, and fills a table with the last row of each. The server
scans the table. The second pass scans each range again, and applies what comes before the range.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite
from beamjax.interpreters.program import Atom, Eqn, Var, aval_of
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.by_shard import mapped_by_shard, range_size, reduced_by_shard
from beamjax.interpreters.rules.sharding_rules import (
    MemberwiseRule,
    TracedShard,
    default_promotion,
    evaluate,
    shape_of,
    with_axes_of,
)
from beamjax.interpreters.staging.flatten import flatten
from beamjax.numerics.reducers import PICK

MAX_CALLS = 4
"""Largest number of slices that are tried as the end of the function's first call. The function
itself may slice, so the first slice after its beginning need not be JAX's own."""
FEWEST = 8
"""Fewest members per range. With fewer, the table would have almost as many rows as there are
members."""

JOINS = ("add", "or")
"""The primitives by which JAX joins the results of even and odd members, padded with zeros."""

Leaves = Sequence[jax.Array]
Combine = Callable[[Leaves, Leaves, Sequence[Any]], Leaves]
"""The function of a scan: takes two lists of leaves with equally many members, and server values.
"""


def associative_scans(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation that computes a leaf of an associative scan."""
    reverse = eqn.primitive.name == "rev"
    last: Eqn | None = eqn
    if reverse:
        last = rewriter.original(eqn.inputs[0])
    operand = None if last is None else _first_operand(rewriter, last)
    if operand is None or not rewriter.rewrites.moves:
        return None
    # Its equations may have been rewritten, as views or as other leaves of the scan.
    eqns = list(dict.fromkeys(rewriter.originals.values()))
    if eqn not in eqns:
        return None
    eqns = eqns[: eqns.index(eqn) + 1]
    for index, each in enumerate(eqns):
        if operand in each.inputs and _halved_axis(each) is not None:
            found = _rewritten(rewriter.program, eqns, index, reverse)
            if found is not None:
                return found
    return None


def _first_operand(rewriter: BlockRewriter, eqn: Eqn) -> Var | None:
    """The operand whose scan an equation may complete, by joining the even and the odd results."""
    if eqn.primitive.name not in JOINS:
        return None
    atom: Atom = eqn.inputs[0]
    for name in ("pad", "concatenate", "slice"):
        maker = rewriter.original(atom)
        if maker is None or maker.primitive.name != name:
            return None
        atom = maker.inputs[0]
    return atom if isinstance(atom, Var) else None


def _halved_axis(eqn: Eqn) -> int | None:
    """The axis along which an equation takes every second entry from the first one on, or None."""
    if eqn.primitive.name != "slice" or eqn.params["strides"] is None:
        return None
    shape, params = shape_of(eqn.inputs[0]), eqn.params
    axes = [k for k, stride in enumerate(params["strides"]) if stride != 1]
    if len(axes) != 1 or params["strides"][axes[0]] != 2 or any(params["start_indices"]):
        return None
    limits = (*shape[: axes[0]], shape[axes[0]] - 1, *shape[axes[0] + 1 :])
    return axes[0] if params["limit_indices"] == limits else None


def _rewritten(
    program: PlacedProgram, eqns: Sequence[Eqn], index: int, reverse: bool
) -> Rewrite | None:
    """The rewrite of the last equation, if it ends a scan of which another one is a first slice."""
    axis = _halved_axis(eqns[index])
    assert axis is not None
    rows = shape_of(eqns[index].inputs[0])[axis]

    def begins(eqn: Eqn) -> bool:
        return _halved_axis(eqn) == axis and shape_of(eqn.inputs[0])[axis] == rows

    # A scan begins with one such slice for each leaf, in reverse after a `rev` for each leaf. The
    # slices of the odd entries follow, then the call of the function.
    while index > 0 and begins(eqns[index - 1]):
        index -= 1
    evens = list(itertools.takewhile(begins, eqns[index:]))
    count, start = len(evens), index - len(evens) if reverse else index
    called = index + 2 * count
    operands = [eqn.inputs[0] for eqn in evens]
    leaves = [eqn.inputs[0] for eqn in eqns[start:index]] if reverse else operands
    if len(leaves) != count or not are_members(program, leaves, axis):
        return None
    halves = [eqn.outputs[0] for eqn in eqns[index:called]]
    calls = (
        stop
        for stop in range(called, len(eqns))
        if _halved_axis(eqns[stop]) == axis and shape_of(eqns[stop].inputs[0])[axis] == rows // 2
    )
    for stop in itertools.islice(calls, MAX_CALLS):
        results = [eqn.inputs[0] for eqn in eqns[stop : stop + count]]
        combine = _Function.of(program, eqns[called:stop], halves, results, axis)
        scan = _Scan.of(program, combine, leaves, axis, reverse) if combine else None
        if combine is None or scan is None:
            continue
        leaf = _verified(eqns[start:], scan, [*leaves, *combine.served], count)
        if leaf is not None:
            return Rewrite(functools.partial(scan.passes, leaf), [*leaves, *combine.served])
    return None


def are_members(program: PlacedProgram, leaves: Sequence[Atom], axis: int) -> bool:
    """Whether these have the members along an axis, and some of them are placed."""
    places = {along for along in map(program.place, leaves) if along is not None}
    if len(places) != 1:
        return False
    (along,) = places
    n = program.sizes[along.placement]
    plain = all(shape_of(x)[axis] == n and PICK.takes(aval_of(x).dtype) for x in leaves)
    return along.axis == axis and not is_unknown(n) and plain


# --- the two passes


@dataclass(frozen=True)
class _Scan:
    """A scan over the n members, with `count` leaves that have their members along `axis`."""

    combine: Combine
    count: int
    axis: int
    reverse: bool
    n: int
    block: int

    @classmethod
    def of(
        cls,
        program: PlacedProgram,
        combine: Combine,
        leaves: Sequence[Atom],
        axis: int,
        reverse: bool,
    ) -> _Scan | None:
        """A scan, or None if no size of ranges keeps the table and the ranges small enough."""
        n = shape_of(leaves[0])[axis]
        member = sum(aval_of(x).dtype.itemsize * math.prod(shape_of(x)) for x in leaves) // n
        block = range_size(n, member, member, program.shard_size, fewest=FEWEST)
        return None if block is None else cls(combine, len(leaves), axis, reverse, n, block)

    def whole(self, leaves: Leaves, served: Sequence[Any]) -> Sequence[jax.Array]:
        """The scan itself, of any number of members."""
        found: Sequence[jax.Array] = lax.associative_scan(
            lambda left, right: list(self.combine(left, right, served)),
            list(leaves), axis=self.axis, reverse=self.reverse,
        )  # fmt: skip
        return found

    def passes(self, leaf: int, *args: Any) -> list[jax.Array]:
        """A leaf of the scan, by two passes over the members.

        Each leaf of the table is a separate reduction, which scans all leaves. They are in one
        body, so XLA does the common work once.
        """
        leaves, served = args[: self.count], args[self.count :]
        operands = [*(jnp.moveaxis(x, self.axis, 0) for x in leaves), *served]
        kinds: dict[str, Any] = {"block": self.block, "members": self.count}

        def totals(leaf: int) -> jax.Array:
            def table(shard: TracedShard, *operands: Any) -> tuple[Any, Any]:
                found = self._of_ranges(shard, operands)[leaf]
                found = found[:, 0 if self.reverse else self.block - 1]
                rows = lax.iota(np.dtype("int32"), -(-self.n // self.block))
                rows -= shard.start // self.block
                mine = (rows >= 0) & (rows < len(found))
                return jnp.take(found, rows, axis=0, mode="clip"), mine

            return reduced_by_shard(table, *operands, **kinds)

        ends = [jnp.moveaxis(totals(k), 0, self.axis) for k in range(self.count)]
        ends = [jnp.moveaxis(x, self.axis, 0) for x in self.whole(ends, served)]

        def applied(shard: TracedShard, *operands: Any) -> jax.Array:
            table = operands[len(operands) - self.count :]
            return self._applied(shard, operands[: len(args)], table, leaf)

        return [jnp.moveaxis(mapped_by_shard(applied, *operands, *ends, **kinds), 0, self.axis)]

    def _of_ranges(self, shard: TracedShard, operands: Sequence[Any]) -> Sequence[jax.Array]:
        """Leaves (ranges of the shard, block, ...): the scan of each range of a shard."""
        leaves, served = operands[: self.count], operands[self.count :]
        rows = np.arange(-(-shard.size // self.block) * self.block)
        shape = -1, self.block

        def split(x: jax.Array) -> jax.Array:
            # A single shard of few members may be shorter than a range.
            whole = jnp.take(x, np.minimum(rows, shard.size - 1), axis=0)
            return whole.reshape(*shape, *x.shape[1:])

        # Padding comes last. It changes nothing before it, but a reverse scan begins with it.
        inside = jnp.take(shard.mask, np.minimum(rows, shard.size - 1)) & (rows < shard.size)

        def one(inside: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
            if self.reverse:
                return self._reverse_range(inside, leaves, served)
            return self._range(leaves, served)

        return jax.vmap(one)(inside.reshape(shape), *map(split, leaves))

    def _range(self, leaves: Leaves, served: Sequence[Any]) -> list[jax.Array]:
        scanned = self.whole([jnp.moveaxis(x, 0, self.axis) for x in leaves], served)
        return [jnp.moveaxis(x, self.axis, 0) for x in scanned]

    def _reverse_range(
        self, inside: jax.Array, leaves: Leaves, served: Sequence[Any]
    ) -> list[jax.Array]:
        """The reverse scan of a range, without the rows that are not `inside`."""

        def combine(left: Any, right: Any) -> Any:
            (*left, in_left), (*right, in_right) = left, right
            both = self.combine(left, right, served)
            single = [
                jnp.where(with_axes_of(in_left, x), x, y) for x, y in zip(left, right, strict=True)
            ]
            found = [
                jnp.where(with_axes_of(in_left & in_right, x), x, y)
                for x, y in zip(both, single, strict=True)
            ]
            return *found, in_left | in_right

        moved = [jnp.moveaxis(x, 0, self.axis) for x in leaves]
        marks = inside.reshape((1,) * self.axis + (-1,))
        *found, _ = lax.associative_scan(combine, (*moved, marks), axis=self.axis, reverse=True)
        return [jnp.moveaxis(x, self.axis, 0) for x in found]

    def _applied(
        self, shard: TracedShard, operands: Sequence[Any], ends: Leaves, leaf: int
    ) -> jax.Array:
        """A leaf of the scan for a shard, with the scan (ranges, ...) of the ends of all ranges."""
        served = operands[self.count :]
        own = self._of_ranges(shard, operands)
        ranges = shard.start // self.block + lax.iota(np.dtype("int32"), len(own[0]))
        first, step = (len(ends[0]) - 1, 1) if self.reverse else (0, -1)

        def one(index: jax.Array, *leaves: jax.Array) -> jax.Array:
            other = index + np.int32(step)
            before = [
                jnp.broadcast_to(jnp.take(end, other, axis=0, mode="clip")[None], x.shape)
                for end, x in zip(ends, leaves, strict=True)
            ]
            left, right = (
                [jnp.moveaxis(x, 0, self.axis) for x in side] for side in (before, leaves)
            )
            both = jnp.moveaxis(self.combine(left, right, served)[leaf], self.axis, 0)
            return jnp.where(index == first, leaves[leaf], both)

        found = jax.vmap(one)(ranges, *own)
        return found.reshape(-1, *found.shape[2:])[: shard.size]


# --- the function


@dataclass(frozen=True)
class _Function:
    """The function of a scan, read from a call of it.

    Attributes:
      eqns: its equations, each with its rule; None for an equation that reads only server values.
      halves: the variables of its two operands.
      results: the variables of its result.
      served: the server values that it reads.
      axis: the axis of the members.
    """

    eqns: Mapping[Eqn, MemberwiseRule | None]
    halves: Sequence[Var]
    results: Sequence[Var]
    served: Sequence[Var]
    axis: int

    @classmethod
    def of(
        cls,
        program: PlacedProgram,
        eqns: Sequence[Eqn],
        halves: Sequence[Var],
        results: Sequence[Any],
        axis: int,
    ) -> _Function | None:
        """A function, if it acts on each member."""
        axes: dict[Any, int | None] = dict.fromkeys(halves, axis)
        rows, served = shape_of(halves[0])[axis], dict[Var, None]()
        found: dict[Eqn, MemberwiseRule | None] = {}
        # Others compute what only a derivative reads.
        needed, used = {atom for atom in results if isinstance(atom, Var)}, list[Eqn]()
        for eqn in reversed(eqns):
            if not needed.isdisjoint(eqn.outputs):
                used.insert(0, eqn)
                needed.update(atom for atom in eqn.inputs if isinstance(atom, Var))
        for eqn in used:
            if eqn.blocks or eqn.effects or eqn.is_placed_operator:
                return None
            for atom in eqn.inputs:
                if isinstance(atom, Var) and atom not in axes:
                    if program.place(atom) is not None:
                        return None
                    served[atom], axes[atom] = None, None
            given = [axes[atom] if isinstance(atom, Var) else None for atom in eqn.inputs]
            rule: Any = None
            if any(k is not None for k in given):
                rule = rules.classify(eqn, given, rows)
                if not isinstance(rule, MemberwiseRule) or list(rule.in_axes) != given:
                    return None
            elif shape_of(eqn.outputs[0])[axis : axis + 1] == (rows,):
                rule = rules.invert(eqn, 0, axis, rows)
                if rule is not None and list(rule.in_axes) != given:
                    return None
            found[eqn] = rule
            axes.update(zip(eqn.outputs, rule.out_axes if rule else [None], strict=False))
        if any(axes.get(atom) != axis for atom in results) or 2 * len(results) != len(halves):
            return None
        return cls(found, halves, results, list(served), axis)

    def __call__(self, left: Leaves, right: Leaves, served: Sequence[Any]) -> list[jax.Array]:
        size = left[0].shape[self.axis]
        # In NumPy, so that nothing is traced for rules that do not read it.
        shard = TracedShard(np.int32(0), size, np.ones(size, bool))  # type: ignore[arg-type]
        env: dict[Var, Any] = dict(zip(self.halves, (*left, *right), strict=True))
        env.update(zip(self.served, served, strict=True))
        evaluate(self.eqns.items(), env, shard)
        return [env[var] for var in self.results]


# --- comparing equations

call_p = jex.Primitive("call_of_one_row")
"""Stands for a call of the function with one row, for which JAX may trace other equations than for
more rows. Any equations of the program match it."""
call_p.multiple_results = True
call_p.def_abstract_eval(lambda *leaves: leaves[: len(leaves) // 2])


def _verified(eqns: Sequence[Eqn], scan: _Scan, atoms: Sequence[Atom], count: int) -> int | None:
    """The number of the leaf that the last of some equations computes; None if they are no scan.

    Args:
      eqns: the equations from the first one of the scan on.
      scan: the scan that they may be.
      atoms: the leaves, then the server values that the function reads.
      count: the number of leaves.
    """

    def combine(left: Leaves, right: Leaves, served: Sequence[Any]) -> Leaves:
        many = left[0].shape[scan.axis] > 1
        return scan.combine(left, right, served) if many else call_p.bind(*left, *right)

    def function(*args: Any) -> Sequence[Any]:
        traced = _Scan(combine, count, scan.axis, scan.reverse, scan.n, scan.block)
        return traced.whole(args[:count], args[count:])

    with default_promotion():
        flat = flatten(jax.make_jaxpr(function)(*map(aval_of, atoms)))
    mine = {var: each for each in flat.eqns for var in each.outputs}
    makers = {var: each for each in eqns for var in each.outputs}
    for leaf, atom in enumerate(flat.outputs):
        env: dict[Var, Atom] = dict(zip(flat.arguments, atoms, strict=True))
        if not flat.constants and same_values(atom, eqns[-1].outputs[0], mine, makers, env):
            return leaf
    return None


def same_values(
    one: Atom,
    other: Atom,
    mine: Mapping[Any, Eqn],
    makers: Mapping[Any, Eqn],
    env: dict[Var, Atom],
    free: Sequence[Var] = (),
) -> bool:
    """Whether equal equations compute a traced value and one of the program, in any order.

    Args:
      one: the traced value.
      other: that of the program.
      mine: the equation of each traced value.
      makers: the equation of each value of the program.
      env: for traced values, those of the program; values that correspond are added.
      free: traced arguments; each stands for any value of the program of its type.
    """
    agenda = [(one, other)]
    while agenda:
        one, other = agenda.pop()
        if not isinstance(one, Var) or not isinstance(other, Var):
            if not _same(one, other):
                return False
            continue
        if one in env:
            if env[one] is not other:
                return False
            continue
        env[one] = other
        if one in free:
            if (one.aval.shape, one.aval.dtype) != (other.aval.shape, other.aval.dtype):
                return False
            continue
        made, eqn = mine.get(one), makers.get(other)
        if made is None or eqn is None:
            return False
        if made.primitive is call_p:
            continue
        if eqn.blocks or eqn.effects or not _alike(made, eqn):
            return False
        if made.outputs.index(one) != eqn.outputs.index(other):
            return False
        if len(made.inputs) != len(eqn.inputs):
            return False
        agenda += zip(made.inputs, eqn.inputs, strict=True)
    return True


def _alike(one: Eqn, other: Eqn) -> bool:
    """Whether two equations are the same but for their variables."""
    ignored = ("sharding", "out_sharding")
    params = [
        {key: str(value) for key, value in eqn.params.items() if key not in ignored}
        for eqn in (one, other)
    ]
    return one.primitive is other.primitive and params[0] == params[1]


def _same(one: Atom, other: Atom) -> bool:
    if isinstance(one, jex.Literal) and isinstance(other, jex.Literal):
        return aval_of(one) == aval_of(other) and str(one.val) == str(other.val)
    return one is other
