"""Rewrites equations that read windows of consecutive members, such as `jnp.convolve`.

Each shard computes the results of its own members. For the windows that reach into other shards, it
gets copies of the members at their borders. See `sliced` for the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite
from beamjax.interpreters.placement.slices import (
    Extended,
    Slice,
    View,
    exchange_range,
    extended_of,
    view_of,
)
from beamjax.interpreters.program import Eqn, Var, aval_of
from beamjax.interpreters.rules.ordered import with_neighbours
from beamjax.interpreters.rules.sharding_rules import (
    TracedShard,
    bind,
    replaced,
    shape_of,
    with_axes_of,
)
from beamjax.numerics.reducers import REDUCERS

REDUCTIONS = {"reduce_window_sum": "sum", "reduce_window_max": "max", "reduce_window_min": "min"}
"""The primitives that reduce windows, and their reductions."""


def windows(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation whose results each read a window of consecutive members."""
    program = rewriter.program
    if eqn.primitive.name not in (*REDUCTIONS, "conv_general_dilated"):
        return None
    if not rewriter.rewrites.moves or any(map(program.place, eqn.inputs[1:])):
        return None
    # The derivative of windows pads its operand.
    pad = rewriter.maker(eqn.inputs[0], "pad") or rewriter.pads.get(eqn.inputs[0])
    atom = pad.inputs[0] if pad is not None else eqn.inputs[0]
    extended = extended_of(rewriter, atom)
    view = extended.view() if extended else view_of(rewriter, atom) or View.of_all(program, atom)
    sliding = _Sliding.of(eqn, view.axis) if view is not None else None
    if sliding is not None and view is not None and pad is not None:
        sliding = sliding.padded(pad, view.axis)
    layout = _Layout.of(view.part, sliding) if view is not None and sliding is not None else None
    if view is None or sliding is None or layout is None:
        return None
    before, after = layout.before, layout.after
    block = exchange_range(
        rewriter, view.members, view.axis, before + after, fewest=max(before, after)
    )
    if block is None:
        return None
    return _Windows(eqn, pad, view, extended, sliding, layout, block).rewrite()


@dataclass(frozen=True)
class _Sliding:
    """How the results of an equation read windows of its first operand, along one axis.

    Attributes:
      width: the number of entries from the first one of a window to its last one.
      stride: the number of entries from a window to the next one.
      between: the number of entries for each entry of the operand, all but the first of which are
        neutral.
      padding: how many entries there are before the first entry and after the last one.
      neutral: the value of these entries.
      out_axis: the axis of the results.
      number: the number of the axis in the parameters of the equation.
    """

    width: int
    stride: int
    between: int
    padding: tuple[int, int]
    neutral: Any
    out_axis: int
    number: int

    @classmethod
    def of(cls, eqn: Eqn, axis: int) -> _Sliding | None:
        """How an equation reads windows along an axis, if neighbours read neighbouring ones."""
        params, name, out_axis = eqn.params, eqn.primitive.name, axis
        neutral: Any = 0
        if name == "conv_general_dilated":
            numbers = params["dimension_numbers"]
            spatial = numbers.lhs_spec[2:]
            if axis not in spatial or params["batch_group_count"] != 1:
                return None
            k = spatial.index(axis)
            out_axis = numbers.out_spec[2 + k]
            size = shape_of(eqn.inputs[1])[numbers.rhs_spec[2 + k]]
            strides, dilations = params["window_strides"], params["rhs_dilation"]
            between = params["lhs_dilation"]
        else:
            k, size = axis, params["window_dimensions"][axis]
            strides, dilations = params["window_strides"], params["window_dilation"]
            between = params["base_dilation"]
            neutral = REDUCERS[REDUCTIONS[name]].identity(aval_of(eqn.inputs[0]).dtype)
        width = (size - 1) * int(dilations[k]) + 1
        low, high = map(int, params["padding"][k])
        return cls(width, int(strides[k]), int(between[k]), (low, high), neutral, out_axis, k)

    def padded(self, pad: Eqn, axis: int) -> _Sliding | None:
        """The same, where the operand is padded before; None if that is not neutral."""
        before, after, apart = map(int, pad.params["padding_config"][axis])
        fill = pad.inputs[1]
        is_neutral = not isinstance(fill, Var) and fill.val == self.neutral
        if not is_neutral or min(before, after) < 0 or self.between != 1:
            return None
        low, high = self.padding
        return replace(self, padding=(low + before, high + after), between=apart + 1)

    def changes(
        self, eqn: Eqn, padding: tuple[int, int], stride: int, entry: int
    ) -> dict[str, Any]:
        """Parameters to read entries that are `entry` rows apart, a window every `stride` rows."""
        window, base = (
            ("rhs_dilation", "lhs_dilation")
            if eqn.primitive.name == "conv_general_dilated"
            else ("window_dilation", "base_dilation")
        )
        new = {"padding": padding, "window_strides": stride, base: 1}
        new[window] = int(eqn.params[window][self.number]) * entry
        return {key: replaced(eqn.params[key], self.number, value) for key, value in new.items()}


@dataclass(frozen=True)
class _Layout:
    """Which members the results become, and which members their windows hold.

    Attributes:
      made: the members that the results become, but for those that follow the last member.
      count: the number of results.
      entry: the number of members from one entry of a window to the next one.
      stride: the number of members from one result to the next one.
      before: how many members before its own a result reads.
      after: how many members after its own a result reads.
    """

    made: Slice
    count: int
    entry: int
    stride: int
    before: int
    after: int

    @classmethod
    def of(cls, part: Slice, sliding: _Sliding) -> _Layout | None:
        """The layout for windows of a slice; None if it is not a pass."""
        n, between, (low, high) = part.n, sliding.between, sliding.padding
        if part.stride % between or not part.count or part.is_reversed:
            return None
        entry = part.stride // between
        stride, reach = entry * sliding.stride, entry * (sliding.width - 1)
        entries = (part.count - 1) * between + 1 + low + high
        count = (entries - sliding.width) // sliding.stride + 1
        if entries < sliding.width or min(low, high) < 0 or count > 2 * n:
            return None
        # Results begin at the member at which the slice begins, or earlier if there are more.
        span = (count - 1) * stride + 1
        start = max(min(part.start, n - span), 0)
        if span > n and (stride, part.stride) != (1, 1):
            return None
        before = start - part.start + low * entry
        made = Slice(part.placement, start, min(count, n), n, stride)
        layout = cls(made, count, entry, stride, before, reach - before)
        # The server selects few results of windows that are far apart.
        fits = made.is_large or made.count == n or stride > 1
        return layout if fits and min(layout.before, layout.after) >= 0 else None


@dataclass(frozen=True, eq=False)
class _Windows:
    """An equation that reads windows of a view.

    Attributes:
      eqn: the equation.
      pad: the equation that pads its operand before; None if there is none.
      view: the view that is read, without this padding.
      extended: the same as members and a tail; None if there is no tail.
      sliding: how the equation reads windows.
      layout: which members these are.
      block: the number of members per range.
    """

    eqn: Eqn
    pad: Eqn | None
    view: View
    extended: Extended | None
    sliding: _Sliding
    layout: _Layout
    block: int

    def rewrite(self) -> Rewrite:
        made, n = self.layout.made, self.view.part.n
        tails = [self.extended.tail] if self.extended is not None else []
        atoms = [self.view.members, *tails, *self.eqn.inputs[1:]]
        return Rewrite(self.results, atoms, is_view=self.layout.count > n or made.is_large)

    def results(self, x: Any, *others: Any) -> Sequence[Any]:
        """The results, from the members, the tail if there is one, and the other operands."""
        (axis, out_axis), layout = (self.view.axis, self.sliding.out_axis), self.layout
        number = 0 if self.extended is None else 1
        x, tail, kernel = self.padded(x), [*map(self.padded, others[:number])], others[number:]
        found = with_neighbours(
            self.of_shard,
            jnp.moveaxis(x, axis, 0),
            *(jnp.moveaxis(t, axis, 0) for t in tail),
            *kernel,
            before=layout.before,
            after=layout.after,
            block=self.block,
        )
        found, n = jnp.moveaxis(found, 0, out_axis), self.view.part.n
        if layout.count > n:
            high = self.sliding.padding[1]
            rest = self.windows_of(self.last_entries(x, tail), kernel, (0, high), 1, 1)
            return [lax.concatenate([found, rest], out_axis)]
        return [found if layout.count == n else layout.made.of(found, out_axis)]

    def of_shard(self, shard: TracedShard, rows: Any, *others: Any) -> Any:
        """The results of a shard, whose `rows` come with the neighbours that its windows read."""
        part, stride = self.view.part, self.layout.stride
        member = shard.start - self.layout.before + lax.iota(np.dtype("int32"), len(rows))
        if self.extended is not None:
            tail, *others = others  # type: ignore[assignment]
            after_last = jnp.take(tail, member - part.n, axis=0, mode="clip")
            rows = jnp.where(with_axes_of(member >= part.n, rows), after_last, rows)
        inside = with_axes_of(part.has(member), rows)
        rows = jnp.where(inside, rows, jnp.asarray(self.sliding.neutral, rows.dtype))
        first = (np.int32(self.layout.made.start) - shard.start) % np.int32(stride)
        if stride > 1:
            # The first result of the shard is in its row `first`, others every `stride` rows.
            longer = jnp.concatenate([rows, rows[:1].repeat(stride - 1, 0)])
            rows = lax.dynamic_slice_in_dim(longer, first, len(rows))
        rows = jnp.moveaxis(rows, 0, self.view.axis)
        found = self.windows_of(rows, others, (0, 0), stride, self.layout.entry)
        found = jnp.moveaxis(found, self.sliding.out_axis, 0)
        if stride > 1:
            row = (lax.iota(np.dtype("int32"), shard.size) - first) // np.int32(stride)
            found = jnp.take(found, row, axis=0, mode="clip")
        return found

    def windows_of(
        self, rows: Any, others: Sequence[Any], padding: tuple[int, int], stride: int, entry: int
    ) -> Any:
        """The results for some rows; see `_Sliding.changes`."""
        changes = self.sliding.changes(self.eqn, padding, stride, entry)
        return bind(self.eqn, [rows, *others], **changes)[0]

    def padded(self, x: Any) -> Any:
        """The operand with its padding along other axes."""
        if self.pad is None:
            return x
        config = replaced(self.pad.params["padding_config"], self.view.axis, (0, 0, 0))
        return bind(self.pad, [x, self.sliding.neutral], padding_config=config)[0]

    def last_entries(self, x: Any, tail: Sequence[Any]) -> Any:
        """The entries that results after the last member read."""
        (part, _, axis), n = self.view, self.view.part.n
        stop = min(part.start + part.count, n)
        start = min(part.start + n - self.sliding.padding[0], stop)
        return lax.concatenate([lax.slice_in_dim(x, start, stop, axis=axis), *tail], axis)
