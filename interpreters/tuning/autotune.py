"""Chooses shard sizes and vectorization: by options, a saved plan, a cache or a probe.

The first of these that applies decides; without any, the plan of the rules is used.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from beamjax.bodies.export import default_platform
from beamjax.errors import BeamjaxError, OptionsError
from beamjax.interpreters.cutting.stages import Stage
from beamjax.interpreters.lowering.lower import lower_passes
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.tuning import plan_cache, probe
from beamjax.interpreters.tuning.search import (
    Measure,
    Search,
    SearchedPass,
    magnitude,
    obstacle,
    passes_of,
    program_text,
)
from beamjax.options import Options
from beamjax.options.choices import Choices, Trial, Vectorization, read_choices, write_json
from beamjax.plan.steps import Map, Plan, walk
from beamjax.storage import files
from beamjax.storage.partial_cache import PartialCache

WORTH_SECONDS = 5.0
"""Predicted seconds of all passes of a program above which a probe pays for itself. The prediction
uses counted costs and fixed rates, so the decision is the same on all machines."""
SHARE, MIN_BUDGET, MAX_BUDGET = 0.1, 1.0, 10.0
"""Share of the predicted seconds that a probe may take, and bounds of its time in seconds."""
PENDING = "pending"
"""The origin of choices that wait for a call with real arguments, not only types."""
CHECKPOINTED = "choices.json"
"""Name of the file in a checkpoint folder that holds the choices, so that a resumed run makes the
same plan."""

Relower = Callable[[Mapping[str, int], Mapping[str, Vectorization]], Plan]
"""Makes a plan of the same stages with these shard sizes, and this vectorization of each pass."""


def chosen_plan(
    plan: Plan,
    program: PlacedProgram,
    stages: Sequence[Stage],
    options: Options,
    relower: Relower,
    special: str = "",
    abstract: bool = False,
) -> Plan:
    """The plan to run, with its `choices` and the reason for them.

    Args:
      plan: the plan by rules and options.
      program: the placed program of the plan.
      stages: its stages.
      options: options of the run.
      relower: makes a plan with other choices.
      special: why a probe is impossible, "" if it is not.
      abstract: whether there are only types of arguments. Then bodies are only timed with the
        option probe=True.

    Raises:
      OptionsError: the option `plan` holds choices for another program.
    """
    rule = Choices(
        plan.shard_sizes,
        _vectorizations(plan),
        program=plan_cache.digest(program_text(stages, plan.sizes.values())),
        rematerialized=plan.choices.rematerialized,
    )
    if options.plan is not None:
        return _saved(plan, rule, options, relower)
    if options.shard_size is not None and options.member_loop is not None:
        return _with(plan, replace(rule, origin="options", why="fixed by options"))
    reason = special or obstacle(plan, stages, default_platform())
    if reason:
        return _with(plan, replace(rule, why=f"by the rules: {reason}"))
    if options.probe is False:
        return _with(plan, replace(rule, why="by the rules: probe=False"))
    passes = passes_of(plan, stages, options.memory_bytes, program.file_groups)
    total = sum(p.rounds * p.seconds * plan.sizes[p.placement] for p in passes)
    if options.probe is None and total < WORTH_SECONDS:
        why = f"by the rules: passes of about {total:.2g} s are not worth a probe"
        return _with(plan, replace(rule, why=why))
    found = _remembered(plan, rule, options)
    if found is None and options.probe is None:
        if plan_cache.folder() is None:
            why = "by the rules: there is no folder in which the results of a probe could be stored"
            return _with(plan, replace(rule, why=why))
        if abstract:
            why = "by the rules: bodies are timed once there are arguments, or with probe=True"
            return _with(plan, replace(rule, origin=PENDING, why=why))
    if found is None:
        budget = MAX_BUDGET if options.probe else total * SHARE
        budget = min(max(budget, MIN_BUDGET), MAX_BUDGET)
        found = _probed(plan, rule, program, stages, passes, options, budget)
        found = _remember(plan, rule, found, options)
    if found.shard_sizes != rule.shard_sizes or found.passes != rule.passes:
        plan = relower(found.shard_sizes, found.passes)
    return _with(plan, found)


def _with(plan: Plan, choices: Choices) -> Plan:
    return replace(plan, choices=choices)


def _vectorizations(plan: Plan) -> dict[str, Vectorization]:
    return {step.name: step.vectorization for step in walk(plan.steps) if isinstance(step, Map)}


# --- saved


def _saved(plan: Plan, rule: Choices, options: Options, relower: Relower) -> Plan:
    """The plan by the choices of the option `plan`; raises OptionsError if they don't fit."""
    saved = options.plan
    assert isinstance(saved, Choices)
    for what, mine, theirs in (
        ("placements", set(rule.shard_sizes), set(saved.shard_sizes)),
        ("passes", set(rule.passes), set(saved.passes)),
    ):
        if mine != theirs:
            raise OptionsError(
                f"plan: found choices for the {what} {_names(theirs)}, but the program has "
                f"{_names(mine)}; save them again, with beamjax.explain(...).save_choices"
            )
    # By the number of such values, like the names above: a value has no name of its own.
    crossing, then = rule.rematerialized or (), saved.rematerialized
    if options.recompute is None and then is not None and len(then) != len(crossing):
        raise OptionsError(
            f"plan: found choices for {len(then)} values that cross from pass to pass, but the "
            f"program has {len(crossing)}; save them again, with beamjax.explain(...).save_choices"
        )
    sizes = {
        name: size if options.shard_size is None else plan.shard_sizes[name]
        for name, size in saved.shard_sizes.items()
    }
    why = "by the saved plan"
    if saved.program != rule.program:
        why += ", which was saved for other bodies or types"
    plan = relower(sizes, saved.passes)
    found = replace(
        rule, shard_sizes=plan.shard_sizes, passes=_vectorizations(plan), origin="saved", why=why,
        tried=saved.tried,
    )  # fmt: skip
    return _with(plan, found)


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# --- cached


def _cache_name(plan: Plan, rule: Choices, options: Options) -> str:
    """The name of the cached choices: a hash of all that the result of a probe depends on."""
    fixed = [options.shard_size, options.member_loop, options.member_batch, options.memory]
    fixed += [options.recompute, options.reduction, options.on_error, options.on_nonfinite]
    fixed += [options.xla_threads]
    # The sizes to try depend on the files.
    fixed += [f"{name}: {rule.shard_sizes[name]}" for name in plan.file_starts]
    sizes = {name: magnitude(n) for name, n in plan.sizes.items()}
    key = plan_cache.digest(rule.program, plan.x64, sizes, fixed, plan_cache.machine())
    return f"choices-{key}"


def _remembered(plan: Plan, rule: Choices, options: Options) -> Choices | None:
    """The choices of an earlier probe of this program on this machine.

    Choices in its checkpoint folder take precedence over those in the cache.
    """
    found = _checkpointed(options)
    origin = "from the checkpoints"
    name = _cache_name(plan, rule, options)
    if found is None:
        record, origin = _record(name, options), "from an earlier probe on this machine"
        try:
            found = None if record is None else Choices.from_json(record)
        except ValueError as error:
            plan_cache.ignore(name, error)
    if found is None or set(found.shard_sizes) != set(rule.shard_sizes):
        return None
    if set(found.passes) != set(rule.passes):
        return None
    rematerialized = rule.rematerialized
    return replace(
        found, origin="cache", why=f"{found.why}, {origin}", rematerialized=rematerialized
    )


def _record(name: str, options: Options) -> dict[str, Any] | None:
    """The record of a probe on this machine, or one from the option `cache`.

    Each place gets a copy of what the other has. Machines that share a cache of partials so have
    the same shards, which they find there, and a run without the cache has the same bits.
    """
    record = plan_cache.load(name)
    if options.cache is None or plan_cache.folder() is None:
        return record
    shared = PartialCache(options.cache)
    found = shared.find(name)
    if record is None and found is not None:
        record = found[1]
        plan_cache.store(name, record)
    elif record is not None and found is None:
        shared.store(name, [], record)
    return record


def _checkpointed(options: Options) -> Choices | None:
    path = _checkpoint_file(options)
    if path is None or not os.path.exists(path):
        return None
    with contextlib.suppress(OptionsError):  # The run reports a damaged file later.
        return read_choices(path)
    return None


def _checkpoint_file(options: Options) -> str | None:
    """The path of the choices in a local checkpoint folder, else None."""
    folder = options.checkpoint
    if folder is None or "://" in folder:
        return None
    return os.path.join(folder, CHECKPOINTED)


def _remember(plan: Plan, rule: Choices, found: Choices, options: Options) -> Choices:
    """Stores choices and returns them; if another process stored some first, returns those."""
    other = _remembered(plan, rule, options)
    if other is not None:
        return other
    name = _cache_name(plan, rule, options)
    plan_cache.store(name, found.to_json())
    _record(name, options)  # copies it to the cache of partials
    path = _checkpoint_file(options)
    if path is not None:
        with contextlib.suppress(OSError):
            files.make_folder(os.path.dirname(path))
            write_json(path, found.to_json())
    return found


# --- probed


def _probed(
    plan: Plan,
    rule: Choices,
    program: PlacedProgram,
    stages: Sequence[Stage],
    passes: Sequence[SearchedPass],
    options: Options,
    budget: float,
) -> Choices:
    """The choices of the rules, changed where a probe finds faster ones."""
    sizes, vectorizations = dict(rule.shard_sizes), dict(rule.passes)
    tried: list[Trial] = []
    reasons: list[str] = []
    by_placement = {p.placement: [q for q in passes if q.placement == p.placement] for p in passes}
    for placement, mine in by_placement.items():
        end = time.monotonic() + budget * len(mine) / len(passes)
        measure = _measure(program, stages, placement, options, end)
        search = Search(
            mine,
            measure,
            lambda end=end: end - time.monotonic(),  # type: ignore[misc]
            options.shard_size,
            options.member_loop is not None,
        )
        try:
            found = search.run()
        except BeamjaxError as error:
            reasons.append(f"by the rules, as a probe failed: {error}")
            continue
        sizes[placement] = found.size
        vectorizations.update(found.vectorizations)
        tried += found.trials
        reasons.append(
            "by the rules, and a probe found nothing faster"
            if found.speedup == 1.0
            else f"{found.speedup:.1f} x as fast as by the rules in a probe"
        )
    why = "; ".join(dict.fromkeys(reasons))
    return replace(
        rule,
        shard_sizes=sizes,
        passes=vectorizations,
        origin="probe",
        why=why,
        tried=tuple(tried),
    )


def _measure(
    program: PlacedProgram,
    stages: Sequence[Stage],
    placement: str,
    options: Options,
    end: float,
) -> Measure:
    """A function that times the passes over a placement until `end`, by `time.monotonic`."""

    def measure(size: int, vectorizations: Mapping[str, Vectorization]) -> dict[str, float]:
        plan = lower_passes(program, stages, placement, options, size, vectorizations)
        return dict(_seconds(plan, options, end))

    return measure


def _seconds(plan: Plan, options: Options, end: float) -> Iterator[tuple[str, float]]:
    for step in plan.steps:
        assert isinstance(step, Map)
        left = max(end - time.monotonic(), 0.1)
        yield step.name, probe.shard_seconds(plan, step, options, left)
