"""Plans a function: runs all passes from tracing to lowering, and caches their results."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from beamjax.bodies.jax_settings import settings, with_settings
from beamjax.interpreters.cutting.cut import split
from beamjax.interpreters.cutting.settle_sizes import settle_sizes
from beamjax.interpreters.cutting.stages import Stage
from beamjax.interpreters.lowering.buckets import (
    bucket_notes,
    buckets_of,
    is_ragged,
    with_buckets,
    with_padding_checks,
)
from beamjax.interpreters.lowering.dropped_members import guard_of
from beamjax.interpreters.lowering.lower import lower
from beamjax.interpreters.lowering.shard_size import file_groups
from beamjax.interpreters.placement.divisors import divide_by_members_left
from beamjax.interpreters.placement.places import FileGroups, PlacedProgram
from beamjax.interpreters.placement.propagate import place
from beamjax.interpreters.placement.weight_checks import refuse_unweighted
from beamjax.interpreters.program import FlatProgram
from beamjax.interpreters.staging.arguments import Argument, FlatCall
from beamjax.interpreters.staging.contractions import contract_sums
from beamjax.interpreters.staging.flatten import flatten
from beamjax.interpreters.staging.simplify import fold_scalars
from beamjax.interpreters.staging.stage import Staged, stage
from beamjax.options import Options
from beamjax.plan.steps import Plan, Vectorization
from beamjax.sources.source_base import cut_number
from beamjax.storage.shared_cache import register
from beamjax.telemetry.messages import announced


@dataclass(frozen=True, eq=False)
class Planned:
    """The results of all passes for one program and one set of argument types."""

    staged: Staged  # for members of unequal length, of the longest
    flat: FlatProgram
    placed: PlacedProgram  # a rewritten copy of the flat program, with a place for every value
    stages: list[Stage]
    plan: Plan
    notes: tuple[str, ...] = ()  # for the user, in `explain`

    @functools.cached_property
    def calls_back(self) -> bool:
        """Whether a body runs as Python."""
        return any(body.python for body in self.plan.bodies.values())

    @functools.cached_property
    def derived(self) -> dict[Any, Any]:
        """What runs have made of the plan and their options alone, for later runs."""
        return {}


def plan_for(call: FlatCall, options: Options, unroll: bool = False) -> Planned:
    """Plans a call, or returns the cached plan of its function for arguments of these types."""
    # What a plan depends on, besides the function. Values and paths of arguments are not among it.
    sources = call.arguments if call.has_sources else ()
    buckets = tuple(buckets_of(sources).values()) if sources else ()
    files = tuple(a.file_rows for a in sources)
    full_key = (
        call.structure, call.types, buckets, files, options.planning, tuple(settings().values()),
        unroll,
    )  # fmt: skip
    known = _plans.get(call.fn, full_key)
    if known is not None and not known.plan.file_starts:
        return known
    planned = known
    if planned is None:
        name = getattr(call.fn, "__name__", "a function")
        no_jit = with_settings({"disable_jit": False})
        # Under disable_jit, JAX would compute instead of tracing.
        with announced(f"planning {name}", options.progress), no_jit:
            planned = _with_lengths(call, options, unroll)
    planned = with_file_starts(planned, call.arguments)
    if planned is not known:
        _plans.put(call.fn, full_key, planned)
    return planned


def _with_lengths(call: FlatCall, options: Options, unroll: bool) -> Planned:
    """Plans a call; members of unequal length get a body for each bucket, and checks of padding."""
    planned = make_plan(call, options, unroll)
    arguments = call.arguments
    if not any(map(is_ragged, arguments)):
        return planned

    def planner(arguments: Sequence[Argument], sizes: Mapping[str, int] | None) -> Plan:
        return make_plan(call.with_arguments(arguments), options, unroll, sizes).plan

    plan, notes = planned.plan, planned.notes
    if buckets_of(arguments):
        plan, reason = with_buckets(plan, arguments, planner)
        notes += bucket_notes(plan, arguments, reason)
    plan, reason = with_padding_checks(plan, arguments, planner)
    if reason:
        text = "beamjax can't check whether bodies read the padding of members, because"
        notes += (f"{text} {reason}.",)
    return replace(planned, plan=plan, notes=notes)


def with_file_starts(planned: Planned, arguments: Sequence[Argument]) -> Planned:
    """Sets where shards are cut at files of these arguments; calls of a plan may differ in that."""
    plan = planned.plan
    if not plan.file_starts:
        return planned
    starts: dict[str, dict[int, str]] = {placement: {} for placement in plan.file_starts}
    for argument, spec in zip(arguments, plan.inputs, strict=False):
        placement = plan.values[spec.placed].placement if spec.placed is not None else None
        if placement in starts and argument.is_source:
            starts[placement] = {**argument.value.cuts, **starts[placement]}
    file_starts = {}
    for placement, cuts in starts.items():
        files = planned.placed.file_groups[placement].files
        file_starts[placement] = tuple(
            sorted(at for at, name in cuts.items() if cut_number(name) % files == 0)
        )
    # The same object if nothing changes: sessions know a plan by its identity.
    if file_starts == plan.file_starts:
        return planned
    return replace(planned, plan=replace(plan, file_starts=file_starts))


def _is_abstract(argument: Argument) -> bool:
    return argument.value is None or isinstance(argument.value, jax.ShapeDtypeStruct)


def make_plan(
    call: FlatCall,
    options: Options,
    unroll: bool = False,  # loops and branches, for graphs without a driver
    # For each of these, None leaves it to the rules:
    shard_sizes: Mapping[str, int] | None = None,
    vectorizations: Mapping[str, Vectorization] | None = None,
    cut_at_files: bool | None = None,
) -> Planned:
    """Runs all passes: stage, flatten, place, cut and lower."""
    staged = stage(call)
    flat = flatten(staged.closed, unroll)
    # A guard finds members to drop by their own results, which contractions do not compute.
    if guard_of(options) is None:
        flat = contract_sums(flat)
    placed = placed_program(staged, flat, call.arguments, options)
    stages = split(placed)
    settle_sizes(placed, stages)
    groups, notes = _groups_to_cut_at(placed, call.arguments, stages, options, cut_at_files)
    placed = replace(placed, file_groups=groups)
    paths = _paths(call.arguments, placed)
    plan = lower(placed, stages, paths, staged.name, options, shard_sizes, vectorizations)
    return Planned(staged, flat, placed, stages, plan, notes)


def _groups_to_cut_at(
    placed: PlacedProgram,
    arguments: Sequence[Argument],
    stages: Sequence[Stage],
    options: Options,
    at_each: bool | None,
) -> tuple[dict[str, FileGroups], tuple[str, ...]]:
    """The `file_groups` of a placed program, and notes on placements that are cut otherwise."""
    rows: dict[str, int] = {}
    if at_each is not False and not any(map(_is_abstract, arguments)):
        for var, argument in zip(placed.flat.arguments, arguments, strict=True):
            along, mine = placed.place(var), argument.file_rows
            if along is not None and mine:
                rows[along.placement] = min(mine, rows.get(along.placement, mine))
    groups: dict[str, FileGroups] = {}
    notes = []
    for placement, mine in rows.items():
        grouping: FileGroups | str = FileGroups(1, mine)
        if not at_each:
            grouping = file_groups(placed, placement, mine, stages, options)
        if isinstance(grouping, str):
            notes.append(f"The shards of {placement} are not cut at files, because {grouping}.")
            continue
        groups[placement] = grouping
        if grouping.files > 1:
            notes.append(
                f"The shards of {placement} end where a group of about {grouping.files} files ends."
            )
    return groups, tuple(notes)


def _paths(arguments: Sequence[Argument], placed: PlacedProgram) -> list[str]:
    """The name of each input of a placed program, for messages."""
    paths = [argument.path for argument in arguments]
    return paths + [f"constant {i}" for i in range(len(placed.flat.constants))]


def placed_program(
    staged: Staged,
    flat: FlatProgram,
    arguments: Sequence[Argument],
    options: Options,
) -> PlacedProgram:
    """Places a flat program; inputs that only workers read are placed in any case."""
    known = {
        var: argument.path
        for var, argument in zip(flat.arguments, arguments, strict=True)
        if argument.comes_by_shards
    }
    guard = guard_of(options)
    placed = place(flat, known, staged.placements, guard is not None, options.shard_size)
    refuse_unweighted(flat, placed)
    if guard is not None and guard.drops:
        divide_by_members_left(placed)
    fold_scalars(placed.flat, {})
    return placed


MAX_PLANS = 64
MAX_PLAN_BYTES = 256 * 2**20
"""Bounds of the plan cache: number of plans, and bytes of their executables and constants."""


@dataclass
class _Entry:
    planned: Planned
    used: int  # number of its last use


class _PlanCache:
    """The plans of this process that were used last. It holds functions by weak references."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses = itertools.count()
        self._plans: weakref.WeakKeyDictionary[Any, dict[Any, _Entry]] = weakref.WeakKeyDictionary()
        register(self)

    def get(self, fn: Callable[..., Any], key: Any) -> Planned | None:
        """The cached plan of a function for a key, or None."""
        try:
            with self._lock:
                entry = self._plans.get(fn, {}).get(key)
                if entry is None:
                    return None
                entry.used = next(self._uses)
                return entry.planned
        except TypeError:  # Partials of arrays aren't hashable; builtins have no weak references.
            return None

    def put(self, fn: Callable[..., Any], key: Any, planned: Planned) -> None:
        """Adds a plan, and removes the least recently used ones beyond the bounds."""
        try:
            with self._lock:
                self._plans.setdefault(fn, {})[key] = _Entry(planned, next(self._uses))
                self._shrink()
        except TypeError:
            pass

    def clear(self) -> None:
        """Forgets all plans."""
        with self._lock:
            self._plans.clear()

    def _shrink(self) -> None:
        entries = [(x, key, plans) for plans in self._plans.values() for key, x in plans.items()]
        entries.sort(key=lambda entry: entry[0].used, reverse=True)
        nbytes = 0
        for count, (entry, key, plans) in enumerate(entries):
            nbytes += _nbytes(entry.planned.plan)
            # The last plan stays in any case, or a large program would be planned in each call.
            if count and (count >= MAX_PLANS or nbytes > MAX_PLAN_BYTES):
                del plans[key]


def _nbytes(plan: Plan) -> int:
    """Bytes of the executables and constants of a plan."""
    artefacts = sum(len(data) for body in plan.bodies.values() for data in body.artefacts.values())
    return artefacts + sum(getattr(constant, "nbytes", 0) for constant in plan.constants)


_plans = _PlanCache()
