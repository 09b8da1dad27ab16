"""Sharding rules: how an equation can be computed a shard at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax import _compat
from beamjax.interpreters.program import Atom, Eqn, Var
from beamjax.interpreters.staging.lines import find_equation

OUTSIDE = -1
"""The index that stands for members and rows that are out of bounds, or in other shards. Gathers
fill what they read there, and scatters drop what they write there."""

Axes = Sequence[int | None]
"""For each operand of an equation, the axis of the members; None for a server value."""


@dataclass(frozen=True, eq=False)
class TracedShard:
    """The shard that an equation is emitted for."""

    start: jax.Array  # The index of its first member, an int32 scalar (traced).
    size: int  # The number of members in it, padding included (static).
    # bool[size], False for padding and for dropped members; None if all members count, so that
    # nothing is traced to mask them.
    counted: jax.Array | None
    # int32[size], the index of the member in each row, where rows of dropped members hold copies of
    # others; None if no member is dropped and padding comes last.
    members: jax.Array | None = None

    @property
    def mask(self) -> jax.Array:
        """bool[size]: which members count."""
        return jnp.ones(self.size, np.bool_) if self.counted is None else self.counted

    def indices(self) -> jax.Array:
        """int32[size]: the index of each row's member in the placement."""
        if self.members is not None:
            return self.members
        return self.start + lax.iota(np.dtype("int32"), self.size)

    def rows(self, index: jax.Array) -> jax.Array:
        """The rows of members with these int32 indices; `OUTSIDE` for members of other shards."""
        row = index - self.start
        return jnp.where((index >= 0) & (row >= 0) & (row < self.size), row, OUTSIDE)

    def has(self, rows: jax.Array) -> jax.Array:
        """Which rows, as `rows` returns them, are in this shard, not padding and not dropped."""
        inside = rows != OUTSIDE
        if self.counted is None:
            return inside
        return inside & jnp.take(self.counted, rows, mode="clip")

    def left_out(self, rows: jax.Array) -> jax.Array:
        """Which rows, as `rows` returns them, are dropped members of this shard."""
        if self.members is None or self.counted is None:
            return jnp.zeros(rows.shape, np.bool_)
        return (rows != OUTSIDE) & ~jnp.take(self.counted, rows, mode="clip")

    def in_front(self, args: Sequence[Any], axes: Axes) -> tuple[TracedShard, list[Any]]:
        """The shard and values with members along `axes`, with dropped members moved to the end."""
        # There, they are padding, which a function that takes the first rows of a shard ignores.
        if self.members is None or self.counted is None:
            return self, list(args)
        order = jnp.argsort(~self.counted, stable=True)
        moved = [
            x if axis is None else jnp.take(x, order, axis)
            for x, axis in zip(args, axes, strict=True)
        ]
        mask = lax.iota(np.dtype("int32"), self.size) < self.count()
        return TracedShard(self.start, self.size, mask, self.members[order]), moved

    def by_rows(self, rows: int) -> TracedShard:
        """The rows of the members as a shard, where each member has several."""

        def repeated(x: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(x, (self.size, rows), (0,)).reshape(-1)

        members = self.members
        if members is not None:
            own = lax.broadcasted_iota(members.dtype, (self.size, rows), 1).reshape(-1)
            members = repeated(members) * np.int32(rows) + own
        start = self.start * np.int32(rows)
        counted = None if self.counted is None else repeated(self.counted)
        return TracedShard(start, self.size * rows, counted, members)

    def count(self) -> jax.Array:
        """An int32 scalar: the number of members, without padding and dropped members."""
        if self.counted is None:
            return jnp.int32(self.size)
        return jnp.sum(self.counted, dtype=np.int32)

    def masked(self, x: Any, axis: int, fill: Any = 0) -> Any:
        """`x` with `fill` in the rows of padding, such as the neutral 0 of a sum."""
        if self.counted is None:
            return x
        mask = lax.broadcast_in_dim(self.counted, x.shape, (axis,))
        return jnp.where(mask, x, jnp.asarray(fill, x.dtype))


def all_members(n: int) -> TracedShard:
    """One shard of all members of a placement."""
    return TracedShard(jnp.int32(0), n, None)


Emit = Callable[[Eqn, Sequence[Any], TracedShard], list[Any]]


@dataclass(frozen=True, eq=False)
class MemberwiseRule:
    """An equation that acts on each member; `emit(eqn, args, shard)` evaluates it for one shard."""

    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]  # A result whose axis is None must not be read.
    emit: Emit
    # Whether the equation must be evaluated for all members of a shard at once.
    by_shard: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, eq=False)
class ReductionRule:
    """An equation that reduces over the members to one result."""

    in_axes: tuple[int | None, ...]
    reducer: str
    # Computes the partial of a shard without padding, in the dtype of the reducer's accumulator.
    partial: Callable[[Eqn, Sequence[Any], TracedShard], Any]
    # Whether the equation only selects members. That is no reason to move a whole server array to
    # the workers.
    selects_members: bool = field(default=False, kw_only=True)
    # Whether the equation must be evaluated for all members of a shard at once.
    by_shard: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, eq=False)
class FunctionReductionRule(ReductionRule):
    """A reduction by a function, `reducer`, of partials that are lists of arrays."""

    # combine(eqn, served, left, right) merges the partials of two adjacent ranges of members;
    # `served` are the operands of the equation on the server.
    combine: Callable[[Eqn, Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]
    leaves: tuple[Any, ...]  # The type of each array.
    results: tuple[int, ...]  # For each result of the equation, the index of its array.


Labels = Sequence[Hashable]
"""A label for each axis; None, or no entry, for an axis without one."""
Factors = tuple[list[Labels], list[Labels]]
"""The labels of the operands and of the results."""
Rule = Callable[[Eqn, Axes, Any], MemberwiseRule | ReductionRule | None]
"""Takes an equation, the axes of its operands and the number of members; None if it has no rule."""


class ExpansionMembers(NamedTuple):
    """The members that an expansion is for."""

    placement: str  # The name in the program.
    n: Any
    shard_size: int | None  # Members per shard, if the user gives it.


Expand = Callable[[Eqn, Axes, ExpansionMembers], Callable[..., Sequence[Any]] | None]
"""Takes an equation without a rule, the axes of its operands and the members. Returns a function of
the operands with the same results, all of whose equations have rules; None if there is none."""


class Answers(NamedTuple):
    """What is known of the equations of a primitive."""

    # Which axes run over the same indices; see `rules.factors`.
    factors: Callable[[Eqn], Factors | None] | None = None
    # The rule of a reduction that the factors find. It takes the `in_axes` that they find.
    reduction: Callable[[Eqn, Axes, Any], ReductionRule | None] | None = None
    # The rule of an equation that has no factors, or whose factors have no answer.
    rule: Rule | None = None
    # The rule by which a shard creates its part of a server value with n members along an axis.
    creation: Callable[[Eqn, int, Any], MemberwiseRule | None] | None = None
    # Other equations, which have rules, for an equation without one.
    expansion: Expand | None = None
    # Whether the expansion needs all members in order. Dropped members leave gaps, so where members
    # may be dropped, it is not used.
    ordered: bool = False


NO_ANSWERS = Answers()
TABLE: dict[str, Answers] = {}
"""The answers for each primitive, by name."""


def answers_of(eqn: Eqn) -> Answers:
    """The answers for the primitive of an equation."""
    return TABLE.get(eqn.primitive.name, NO_ANSWERS)


Function = TypeVar("Function", bound=Callable[..., Any])


def _answer(kind: str, *names: str, **more: Any) -> Callable[[Function], Function]:
    """Registers a function as the answer of a kind for the primitives with these names."""

    def register(function: Function) -> Function:
        changes: dict[str, Any] = {kind: function, **more}
        for name in names:
            TABLE[name] = TABLE.get(name, NO_ANSWERS)._replace(**changes)
        return function

    return register


# Decorators, with the names of primitives; `expansion` also takes `ordered`.
factors = functools.partial(_answer, "factors")
reduction = functools.partial(_answer, "reduction")
rule = functools.partial(_answer, "rule")
creation = functools.partial(_answer, "creation")
expansion = functools.partial(_answer, "expansion")


# --- helpers to emit equations


def bind(eqn: Eqn, args: Sequence[Any], **changes: Any) -> list[Any]:
    """Evaluates `eqn` on `args`, with some parameters changed."""
    # Without parameters for shardings: workers don't have the mesh of the process that staged the
    # program.
    layouts = ("mesh", "spmd_axis_name") if eqn.is_placed_operator else ("sharding", "out_sharding")
    off = {key: None for key in layouts if key in eqn.params}
    return _compat.bind(eqn.primitive, args, eqn.params | off | changes)


def as_is(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
    """Emits the equation unchanged."""
    return bind(eqn, args)


def read(env: Mapping[Var, Any], atom: Atom) -> Any:
    """The value of an atom."""
    return env[atom] if isinstance(atom, Var) else atom.val


def evaluate(
    eqns: Iterable[tuple[Eqn, MemberwiseRule | None]],
    env: dict[Var, Any],
    shard: TracedShard | None,
) -> None:
    """Adds the results of equations to `env`; an equation with a rule is evaluated for a shard."""
    for eqn, rule in eqns:
        args = [read(env, atom) for atom in eqn.inputs]
        # Without a rule there may be no shard.
        outs = bind(eqn, args) if rule is None else rule.emit(eqn, args, shard)  # type: ignore[arg-type]
        env.update(zip(eqn.outputs, outs, strict=True))


# --- shapes and axes


def replaced(sequence: Sequence[Any], index: int, value: Any) -> tuple[Any, ...]:
    """`sequence` with another value at `index`."""
    return (*sequence[:index], value, *sequence[index + 1 :])


def shape_of(atom: Any) -> tuple[Any, ...]:
    """The shape of an operand or a result."""
    return getattr(atom.aval, "shape", ())


def only(axes: Axes) -> int | None:
    """The axis of the members if all placed operands have the same one, else None."""
    placed = {axis for axis in axes if axis is not None}
    return placed.pop() if len(placed) == 1 else None


def with_axes_of(marks: jax.Array, x: jax.Array) -> jax.Array:
    """Marks along the first axes of `x`, with as many axes as `x`."""
    return marks.reshape(marks.shape + (1,) * (x.ndim - marks.ndim))


def any_placed(axes: Axes) -> bool:
    """Whether some operand is placed."""
    return any(axis is not None for axis in axes)


def dropping(axis: int, dropped: Sequence[int]) -> int:
    """The number of an axis after the axes `dropped` are removed."""
    return axis - sum(d < axis for d in dropped)


def is_threefry(atom: Any) -> bool:
    """Whether an atom holds threefry keys, whose draws don't depend on other keys of a batch."""
    return str(atom.aval.dtype) == "key<fry>"


def draw_by_batch(closed: Any) -> tuple[str, str] | None:
    """The primitive and line of a random draw in a body that, under vmap, depends on the batch."""
    draws = (find_equation(eqn, _draws_by_batch) for eqn in getattr(closed, "jaxpr", closed).eqns)
    return next(filter(None, draws), None)


def _draws_by_batch(eqn: Any) -> bool:
    keys = str(getattr(eqn.invars[0].aval, "dtype", "")) if eqn.invars else ""
    return eqn.primitive.name in BATCH_DEPENDENT.get(keys, ("rng_bit_generator",))


BATCH_DEPENDENT = {
    "key<rbg>": ("random_bits", "random_gamma"),
    "key<urbg>": ("random_bits", "random_gamma", "random_split", "random_fold_in"),
}
"""Primitives that are lowered to rng_bit_generator, by the dtype of the keys. Under vmap, their
draws depend on the whole batch."""
