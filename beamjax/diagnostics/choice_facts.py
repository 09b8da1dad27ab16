"""The choices of the planner: what was chosen, why, its cost, and the option that fixes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from beamjax._text import human_bytes
from beamjax.diagnostics.fact_types import ChoiceFact, StepFact, TriedFact, WayFact, walk_facts
from beamjax.diagnostics.topology import Workers
from beamjax.interpreters.cutting.remat import Crossing
from beamjax.options import Options
from beamjax.plan.merging import MERGE_RATE, FanOut
from beamjax.plan.steps import Loop, Map, Plan, walk


def choice_facts(
    plan: Plan,
    steps: Sequence[StepFact],
    options: Options,
    runner: str,
    crossed: Iterable[Crossing] = (),
) -> Iterator[ChoiceFact]:
    """Yields the choices of a plan.

    Args:
      plan: the plan.
      steps: the facts of its steps.
      options: the options of the run.
      runner: the name of the runner.
      crossed: the values that cross from a pass to later ones.
    """
    passes = {step.name: step for step in walk(plan.steps) if isinstance(step, Map)}
    sizes = dict.fromkeys(step.placement for step in passes.values())
    for placement in sizes:
        fixed = options.shard_size is not None and options.plan is None
        why = "the option shard_size" if fixed else plan.choices.why
        cut = ", cut at files" if placement in plan.file_starts else ""
        chosen = f"{plan.shard_sizes[placement]} members{cut}"
        yield ChoiceFact(f"shards of {placement}", chosen, why, "shard_size")
    for name, step in passes.items():
        at_once = step.vectorization.kind == "vmap"
        why = step.loop_reason or ("all members of a shard at once" if at_once else "")
        yield ChoiceFact(f"members in {name}", str(step.vectorization), why, "member_loop")
    for fact in walk_facts(steps):
        if fact.merge is not None:
            yield _merged(plan, passes[fact.name], fact, fact.merge)
    for crossing in crossed:
        yield _crossing(crossing, options)
    yield from _rounds(plan, options, runner)


def _merged(plan: Plan, step: Map, fact: StepFact, merge: FanOut) -> ChoiceFact:
    """Returns how the partials of a pass are merged, with the alternatives."""
    chosen, others = _groups(merge.groups), []
    if merge.other:
        others.append(WayFact(_groups(merge.other), merge.other_seconds, merge.merged))
    n = plan.sizes[step.placement]
    if n is not None:
        nbytes = n * fact.partial_bytes
        others.append(WayFact("each member separately", nbytes / MERGE_RATE, nbytes))
    return ChoiceFact(
        f"reduction of {fact.name}",
        f"{human_bytes(fact.partial_bytes)} a shard, merged in {chosen}",
        merge.why,
        "merge_fan_out",
        merge.seconds,
        merge.merged,
        tuple(others),
    )


def _groups(count: int) -> str:
    return f"{count} groups" if count > 1 else "one step"


def _crossing(crossing: Crossing, options: Options) -> ChoiceFact:
    """Returns how later passes get the values of a pass: stored, or rematerialized."""
    times, later = crossing.predicted, ", ".join(crossing.later)
    stored = WayFact(f"{human_bytes(times.nbytes)} stored", times.stored, times.nbytes)
    again = None if times.recomputed is None else WayFact("rematerialized", times.recomputed, 0)
    if crossing.is_stored:
        what, chosen, other = f"results of {crossing.step}", stored, again
        why = f"read by {later}"
        if again is None:
            why += "; the later pass cannot rematerialize them from its inputs"
    else:
        assert again is not None
        what, chosen, other = f"values of {crossing.step} in {later}", again, stored
        why = "they are results of elementwise operations"
        if not crossing.is_elementwise:
            why = "they take little time to compute"
    if options.recompute is not None:
        why = f"the option recompute={options.recompute!r}; {why}"
    elif options.plan is not None:
        why = f"by the saved plan; {why}"
    elif times.is_clear(recompute=not crossing.is_stored):
        why = f"clearly faster; {why}"
    others = () if other is None else (other,)
    return ChoiceFact(what, chosen.what, why, "recompute", chosen.seconds, chosen.nbytes, others)


def _rounds(plan: Plan, options: Options, runner: str) -> Iterator[ChoiceFact]:
    is_beam = Workers.of(runner, options).beam
    for loop in walk(plan.steps):
        if not isinstance(loop, Loop):
            continue
        what = f"rounds of {loop.name}"
        if not is_beam:
            yield ChoiceFact(what, "in this process", "no pipeline is needed", "")
        else:
            yield ChoiceFact(what, "on resident workers", "one job serves all rounds", "")


def tried_facts(plan: Plan) -> tuple[TriedFact, ...]:
    """Returns what a probe measured."""
    chosen = {
        (step.name, plan.shard_sizes[step.placement], step.vectorization)
        for step in walk(plan.steps)
        if isinstance(step, Map)
    }
    return tuple(
        TriedFact(
            t.step,
            t.size,
            str(t.vectorization),
            t.member_seconds,
            (t.step, t.size, t.vectorization) in chosen,
        )
        for t in plan.choices.tried
    )
