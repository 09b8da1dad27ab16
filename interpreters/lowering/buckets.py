"""Plans for members of unequal length, with a body for each bucket of lengths.

A program is planned for the longest members, as `jax.jit` would run it, and once more for each
shorter bucket. If these plans differ only in the bodies of passes and the shapes of their operands,
they are merged to one plan, whose passes choose a body by the shapes of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np

from beamjax._text import human_bytes
from beamjax.bodies.load import raw_array
from beamjax.errors import BeamjaxError
from beamjax.interpreters.lowering.shard_size import MAX_SHARD_BYTES, power_of_two
from beamjax.interpreters.staging.arguments import Argument
from beamjax.plan.shard import SizeReason
from beamjax.plan.steps import (
    Block,
    Branch,
    Bucketed,
    Cost,
    FusedBuffer,
    Loop,
    Map,
    PaddingCheck,
    Plan,
    Vectorization,
    walk,
)
from beamjax.sources.padding import MORE_PADDING
from beamjax.sources.source_kinds import RaggedMembers

Planner = Callable[[Sequence[Argument], Mapping[str, int] | None], Plan]
"""Makes the plan of a function for other arguments, with these shard sizes if they are not None."""


def buckets_of(arguments: Sequence[Argument]) -> dict[int, tuple[int, ...]]:
    """The buckets of ragged sources with more than one bucket, by `id` of the source."""
    sources = {id(a.value): a.value for a in arguments if isinstance(a.value, RaggedMembers)}
    return {key: source.buckets for key, source in sources.items() if len(source.buckets) > 1}


def with_buckets(plan: Plan, arguments: Sequence[Argument], planner: Planner) -> tuple[Plan, str]:
    """A plan with bodies for each bucket and "", or the same plan and why it has none."""
    # Two sources would need a body for each pair of buckets.
    ragged = buckets_of(arguments)
    if len(ragged) > 1:
        return plan, f"{len(ragged)} sources have members of unequal length, expected one"
    ((source, buckets),) = ragged.items()
    mine = [i for i, a in enumerate(arguments) if id(a.value) == source and _leaf(a).ragged]
    reason = _obstacle(plan, mine)
    if reason:
        return plan, reason

    def make(rows: int, sizes: Mapping[str, int] | None) -> Plan:
        shorter = [_of_length(a, rows) if i in mine else a for i, a in enumerate(arguments)]
        return planner(shorter, sizes)

    usual = arguments[mine[0]].value
    try:
        # All plans must have the same shards. The longest members alone would make them small.
        sizes, reasons = _sizes(plan, usual, make)
        longest = plan if sizes == plan.shard_sizes else make(buckets[-1], sizes)
        shorter = [make(rows, sizes) for rows in buckets[:-1]]
    except BeamjaxError as error:
        return plan, f"it can't be staged for fewer rows ({error})".split("\n")[0]
    together = _together(longest, shorter, mine)
    if isinstance(together, str):
        return plan, together
    costs = _mean_costs(usual, [*shorter, longest], mine)
    return replace(together, costs=costs, size_reasons=reasons), ""


def with_padding_checks(
    plan: Plan, arguments: Sequence[Argument], planner: Planner
) -> tuple[Plan, str]:
    """Adds checks whether bodies read padding; also returns why there are none, or ""."""
    # A body that does not read padding gives the same results for members with more of it. So the
    # program is planned once more for longer padding, and a run compares results of both bodies.
    mine = [i for i, a in enumerate(arguments) if is_ragged(a)]
    longer = [
        _of_length(a, MORE_PADDING * a.value.buckets[-1]) if i in mine else a
        for i, a in enumerate(arguments)
    ]
    try:
        other = planner(longer, plan.shard_sizes)
    except Exception as error:  # any error: the user's function may require a certain length
        return plan, f"it can't be staged for longer members ({error})".split("\n")[0]
    padded = {plan.inputs[i].placed for i in mine}
    pairs = {step.name: step for step in _passes(other)}
    checks = {}
    for step in _passes(plan):
        check = _padding_check(plan, step, other, pairs.get(step.name), padded)
        if check is not None:
            checks[step.name] = check
    bodies = {key: other.bodies[key] for x in checks.values() for key in _bodies_of(x)}
    steps = _changed(plan.steps, lambda step: replace(step, padding_check=checks.get(step.name)))
    return replace(plan, steps=steps, bodies={**bodies, **plan.bodies}), ""


def is_ragged(argument: Argument) -> bool:
    """Whether an argument has members of unequal length, which are padded."""
    value = argument.value
    return (
        isinstance(value, RaggedMembers)
        and bool(value.buckets)
        and value.leaves[argument.leaf].ragged
    )


def _padding_check(
    plan: Plan, step: Map, other: Plan, longer: Map | None, padded: set[str | None]
) -> PaddingCheck | None:
    """The check for a pass, or None if it reads no padding or can't be compared with `longer`."""
    names = "operands", "broadcasts", "results"
    if longer is None or any(getattr(step, x) != getattr(longer, x) for x in names):
        return None
    if not padded.intersection(step.operands) or _calls_back(plan, step):
        return None
    # A body whose other operands depend on the length has other inputs, so its results differ.
    fixed = [*step.broadcasts, *(name for name in step.operands if name not in padded)]
    if any(plan.values[name] != other.values[name] for name in fixed):
        return None
    if [_kinds(buffer) for buffer in step.buffers] != [_kinds(buffer) for buffer in longer.buffers]:
        return None
    shapes = tuple(other.values[name].shape for name in longer.operands)
    return PaddingCheck(shapes, longer.body, longer.short_body, longer.buffers)


def _kinds(buffer: FusedBuffer) -> tuple[Any, ...]:
    return buffer.kind, buffer.dtype, [(r.result, r.reducer) for r in buffer.reductions]


def _bodies_of(check: PaddingCheck) -> list[str]:
    return [check.body] if check.short_body is None else [check.body, check.short_body]


def _calls_back(plan: Plan, step: Map) -> bool:
    """Whether a body calls the host; it must not be run twice for a member."""
    return plan.bodies[step.body].python is not None


def _mean_costs(
    source: RaggedMembers, plans: Sequence[Plan], mine: Sequence[int]
) -> Mapping[str, Cost]:
    """The average costs per member, from the plans for all buckets."""
    longest = plans[-1]
    placed = (longest.inputs[i].placed for i in mine)
    sizes = [longest.shard_sizes[longest.values[x].placement or ""] for x in placed if x]
    # The cost of a member is the average over buckets, by the share of shards that each gets. For a
    # source that does not know its lengths, it is that of the bucket of usual lengths.
    shares = _bucket_shares(source, min(sizes)) if sizes else None
    if shares is None:
        pairs = zip(source.buckets, plans, strict=True)
        return next((p.costs for rows, p in pairs if rows >= source.usual_rows), longest.costs)
    weighted = list(zip(shares.tolist(), plans, strict=True))
    return {
        step: sum((p.costs[step].times(share) for share, p in weighted), Cost())
        for step in longest.costs
    }


def _sizes(
    plan: Plan, source: RaggedMembers, make: Callable[..., Plan]
) -> tuple[Mapping[str, int], Mapping[str, tuple[SizeReason, ...]]]:
    """Shard sizes that suit members of usual length, bounded by the bytes of the longest ones."""
    rows = next((b for b in source.buckets if b >= source.usual_rows), source.buckets[-1])
    member = max(sum(leaf.nbytes for leaf in source.leaves), 1)
    most = power_of_two(MAX_SHARD_BYTES // member)
    usual = make(rows, None)
    sizes, reasons = dict(plan.shard_sizes), dict(plan.size_reasons)
    for name, size in usual.shard_sizes.items():
        if min(size, most) > sizes[name]:
            sizes[name] = min(size, most)
            reasons[name] = usual.size_reasons[name] if size <= most else (SizeReason.BYTES,)
    return sizes, reasons


def _together(plan: Plan, others: Sequence[Plan], mine: Sequence[int]) -> Plan | str:
    """The merged plan for all buckets, of which `plan` is for the longest; or why there is none."""
    names = [plan.inputs[i].placed for i in mine if plan.inputs[i].placed is not None]
    bodies = dict(plan.bodies)
    bucketed: dict[str, list[Bucketed]] = {}
    for other in others:
        pairs = _pairs(plan, other, names)
        if pairs is None:
            return "a value between passes, or on the server, depends on the length"
        for step, shorter in pairs:
            if step.body != shorter.body:
                shapes = tuple(other.values[name].shape for name in shorter.operands)
                bucketed.setdefault(step.name, []).append(
                    Bucketed(shapes, shorter.body, shorter.short_body)
                )
        bodies |= other.bodies
    if any(body.python for body in bodies.values()):
        return "a body runs as Python"
    steps = _changed(
        plan.steps, lambda step: replace(step, bucketed=tuple(bucketed.get(step.name, ())))
    )
    inputs = tuple(x._replace(short=True) if i in mine else x for i, x in enumerate(plan.inputs))
    return replace(plan, steps=steps, inputs=inputs, bodies=bodies)


def _leaf(argument: Argument) -> Any:
    return argument.value.leaves[argument.leaf]


def _of_length(argument: Argument, rows: int) -> Argument:
    """The argument as if its members had this many rows."""
    n, _, *rest = argument.aval.shape
    return argument._replace(aval=jax.ShapeDtypeStruct((n, rows, *rest), argument.aval.dtype))


def _obstacle(plan: Plan, mine: Sequence[int]) -> str:
    """Why shards of inputs can't be padded to a bucket; "" if they can."""
    for i in mine:
        spec = plan.inputs[i]
        if spec.server is not None or any(out.input == i for out in plan.outputs):
            return f"{spec.path} is needed as a whole"
        if spec.views:
            return f"{spec.path} is read in groups of members"
    return ""


def _pairs(plan: Plan, other: Plan, names: Sequence[str | None]) -> list[tuple[Map, Map]] | None:
    """Pairs of passes of two plans; None if more differs than bodies and the types of `names`."""
    short = {name: value for name, value in plan.values.items() if name in names}
    if (
        plan.values != {**other.values, **short}
        or plan.inputs != other.inputs
        or _changed(plan.steps, _without_body) != _changed(other.steps, _without_body)
        or not _same_arrays(plan.constants, other.constants)
        or [out._replace(constant=None) for out in plan.outputs]
        != [out._replace(constant=None) for out in other.outputs]
        or not _same_arrays(
            [out.constant for out in plan.outputs], [out.constant for out in other.outputs]
        )
    ):
        return None
    return list(zip(_passes(plan), _passes(other), strict=True))


def _passes(plan: Plan) -> list[Map]:
    return [step for step in walk(plan.steps) if isinstance(step, Map)]


def _same_arrays(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(
        (a is None) == (b is None) and (a is None or _bits(a) == _bits(b))
        for a, b in zip(left, right, strict=True)
    )


def _bits(value: Any) -> tuple[Any, ...]:
    array = raw_array(value)
    return array.dtype, array.shape, array.tobytes()


def _without_body(step: Map) -> Map:
    return replace(step, body="", short_body=None, vectorization=Vectorization(), loop_reason="")


def _changed(tree: Any, change: Callable[[Map], Map]) -> Any:
    """Steps (or parts of them) with `change` applied to all passes."""
    if isinstance(tree, Map):
        return change(tree)
    if type(tree) is tuple:  # a named tuple holds no passes
        return tuple(_changed(part, change) for part in tree)
    if isinstance(tree, Loop | Branch | Block):
        parts = {field.name: _changed(getattr(tree, field.name), change) for field in fields(tree)}
        return replace(tree, **parts)
    return tree


def bucket_notes(plan: Plan, arguments: Sequence[Argument], reason: str) -> tuple[str, ...]:
    """A note for the user on the buckets of members of unequal length."""
    paths = [a.path for a in arguments if id(a.value) in buckets_of(arguments) and _leaf(a).ragged]
    ladder = "/".join(map(str, next(iter(buckets_of(arguments).values()))))
    what = f"{', '.join(paths)}: members have unequal lengths. Their shards are padded"
    if reason:
        return (f"{what} to the longest, because {reason}.",)
    # Two buckets may share an executable, if it does not depend on the length.
    count = sum(len(step.bucketed) for step in _passes(plan))
    most = count + len(_passes(plan))
    more = f"this takes {count} more executables than one for each pass, at most {most} in all"
    return (f"{what} to {ladder} rows; {more}.",)


def padding_notes(plan: Plan, arguments: Sequence[Argument]) -> tuple[str, ...]:
    """Notes for the user on the padding of members of unequal length."""
    texts: dict[int, str] = {}
    for argument, spec in zip(arguments, plan.inputs, strict=False):
        source = argument.value
        if not isinstance(source, RaggedMembers) or not source.buckets or id(source) in texts:
            continue
        if spec.placed is None or not _leaf(argument).ragged:
            continue
        size = plan.shard_sizes[plan.values[spec.placed].placement or ""]
        texts[id(source)] = _padding_text(source, size, spec.short)
    return tuple(filter(None, texts.values()))


# --- the share of padding in the bytes that are read

SCANNED_MEMBERS = 1 << 20
"""Members whose lengths are read at a time."""
SAMPLED_SHARDS = 64
"""Number of shards that are sampled to estimate the padding of all."""


def _bucket_shares(source: RaggedMembers, shard_size: int) -> np.ndarray | None:
    """Estimates the share of the members that are padded to each bucket."""
    n, buckets = len(source), np.array(source.buckets)
    counts = np.zeros(len(buckets))
    starts = range(0, n, shard_size)
    for k in np.unique(np.linspace(0, len(starts) - 1, SAMPLED_SHARDS).astype(int)):
        lengths = source.rows_of(slice(starts[k], min(starts[k] + shard_size, n)))
        if lengths is None:
            return None
        counts[np.searchsorted(buckets, lengths.max())] += len(lengths)
    return counts / counts.sum()


def _padding_text(source: RaggedMembers, shard_size: int, short: bool) -> str:
    """The bytes that a pass over ragged members reads, and the share of padding; "" if unknown."""
    n, buckets = len(source), np.array(source.buckets)
    shards = np.zeros(len(buckets), np.int64)
    rows = padded = 0
    step = max(1, SCANNED_MEMBERS // shard_size) * shard_size
    for start in range(0, n, step):
        lengths = source.rows_of(slice(start, min(start + step, n)))
        if lengths is None:
            return ""
        firsts = np.arange(0, len(lengths), shard_size)
        longest = np.maximum.reduceat(lengths, firsts)
        chosen = np.searchsorted(buckets, longest) if short else np.full(len(firsts), -1)
        rows += int(lengths.sum())
        padded += int((buckets[chosen] * np.diff([*firsts, len(lengths)])).sum())
        np.add.at(shards, chosen, 1)
    ragged = [leaf for leaf in source.leaves if leaf.ragged]
    row = sum(leaf.nbytes // leaf.shape[0] for leaf in ragged if leaf.shape[0])
    share = 1 - rows / padded if padded else 0.0
    padded_to = ", ".join(f"{m} of {b}" for m, b in zip(shards, buckets.tolist(), strict=True) if m)
    return (
        f"A pass reads {human_bytes(padded * row)} of them, {share:.1%} of which is padding, for "
        f"{human_bytes(rows * row)} of data; shards and the rows they are padded to: {padded_to}."
    )
