"""What is told of choices: what was chosen, why, what it is told to take, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from beamjax._text import aligned, human_bytes
from beamjax.diagnostics.calibration import calibration
from beamjax.diagnostics.fact_types import (
    ChoiceFact,
    PlanFacts,
    PredictionFact,
    StepFact,
    StepSeconds,
    TriedFact,
    WayFact,
    walk_facts,
)
from beamjax.diagnostics.forecast import forecast, small_work
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
    """What could be otherwise in a run of a plan.

    Args:
      plan: to be run.
      steps: the facts of its steps.
      options: of the run.
      runner: its name.
      crossed: the values that cross from a pass to later ones.
    """
    passes = {step.name: step for step in walk(plan.steps) if isinstance(step, Map)}
    sizes = dict.fromkeys(step.placement for step in passes.values())
    for placement in sizes:
        fixed = options.shard_size is not None and options.plan is None
        why = "the option shard_size" if fixed else plan.choices.why
        yield ChoiceFact(
            f"shards of {placement}", f"{plan.shard_sizes[placement]} members", why, "shard_size"
        )
    for name, step in passes.items():
        told = step.vectorization.kind == "vmap" and "all members of a shard at once"
        why = step.loop_reason or told or ""
        yield ChoiceFact(f"members in {name}", str(step.vectorization), why, "member_loop")
    for fact in walk_facts(steps):
        if fact.merge is not None:
            yield _merged(plan, passes[fact.name], fact, fact.merge)
    for crossing in crossed:
        yield _crossing(crossing, options)
    yield from _rounds(plan, options, runner)


def _merged(plan: Plan, step: Map, fact: StepFact, merge: FanOut) -> ChoiceFact:
    """How the partials of a pass come together, and that there are partials at all."""
    chosen, others = _groups(merge.groups), []
    if merge.other:
        others.append(WayFact(_groups(merge.other), merge.other_seconds, merge.merged))
    n = plan.sizes[step.placement]
    if n is not None:
        nbytes = n * fact.partial_bytes
        others.append(WayFact("each member by itself", nbytes / MERGE_RATE, nbytes))
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
    return f"{count} groups" if count > 1 else "one go"


def _crossing(crossing: Crossing, options: Options) -> ChoiceFact:
    """What one pass makes and a later one reads, or makes again."""
    told, later = crossing.predicted, ", ".join(crossing.later)
    kept = f"{human_bytes(told.nbytes)} kept"
    if crossing.is_stored:
        what, chosen = f"results of {crossing.step}", kept
        seconds, nbytes = told.kept, told.nbytes
        others = [WayFact("made again", told.again, 0)] if told.again is not None else []
        why = f"read by {later}"
        if told.again is None:
            why += "; they can't be made again from what is given"
    else:
        what, chosen = f"values of {crossing.step} in {later}", "made again"
        assert told.again is not None
        seconds, nbytes = told.again, 0
        others = [WayFact(kept, told.kept, told.nbytes)]
        why = "elementwise operations make them"
        if not crossing.is_elementwise:
            why = "what makes them is quick"
    if options.recompute is not None:
        why = f"the option recompute={options.recompute!r}; {why}"
    elif options.plan is not None:
        why = f"by the saved plan; {why}"
    elif told.is_clear(again=not crossing.is_stored):
        why = f"clearly less; {why}"
    return ChoiceFact(what, chosen, why, "recompute", seconds, nbytes, tuple(others))


def _rounds(plan: Plan, options: Options, runner: str) -> Iterator[ChoiceFact]:
    from beamjax.plan.graph_sizes import graph_size
    from beamjax.plan.unroll import is_straight

    workers = Workers.of(runner, options)
    for loop in walk(plan.steps):
        if not isinstance(loop, Loop):
            continue
        what = f"rounds of {loop.name}"
        if not workers.beam:
            yield ChoiceFact(what, "in this process", "there is no pipeline", "")
        elif loop.rounds is None or not is_straight(loop.block.steps):
            why = "a condition decides" if loop.rounds is None else "there is control flow in them"
            yield ChoiceFact(what, "1 a pipeline", why, "")
        else:
            found = graph_size(plan, loop, options, workers.shared)
            width = found.chosen
            others = (
                WayFact(f"{other.rounds} a pipeline", other.seconds, other.nbytes)
                for other in found.others
            )
            yield ChoiceFact(
                what, f"{min(width.rounds, loop.rounds)} a pipeline", found.why,
                "rounds_per_graph", width.seconds, width.nbytes, tuple(others),
            )  # fmt: skip


def tried_facts(plan: Plan) -> tuple[TriedFact, ...]:
    """What was timed before a plan was chosen."""
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


def prediction_fact(plan: Plan, options: Options, runner: str) -> PredictionFact | None:
    """What a plan is told to take; None where nobody knows the number of its members."""
    if any(n is None for n in plan.sizes.values()):
        return None
    known = calibration()
    told = forecast(plan, options, runner, known)
    steps = tuple(
        StepSeconds(s.step, s.rounds, s.read, s.compute, s.merge, s.source) for s in told.steps
    )
    return PredictionFact(
        runner, steps, told.pipelines, told.overhead, told.compile, told.seconds, told.guessed,
        known.measured, small_work(plan, options, told).advice,
        forecast(plan, options, "local", known).seconds,
    )  # fmt: skip


# --- as text


def choice_lines(facts: PlanFacts) -> list[str]:
    """Lines of the choices, what was tried, and what is predicted."""
    rows = [
        (c.what, c.chosen, c.why + (f" (option {c.option})" if c.option else ""))
        for c in facts.choices
    ]
    lines = []
    for choice, line in zip(facts.choices, aligned(rows), strict=True):
        told = told_of(choice)
        lines += [line, f"  takes {told}"] if told else [line]
    lines = lines or ["none"]
    if facts.tried:
        lines.append("tried, microseconds a member:")
        lines += [
            f"  {line}"
            for line in aligned(
                (t.step, f"shards of {t.shard_size}", t.member_loop,
                 f"{1e6 * t.member_seconds:.3g}", "chosen" if t.is_chosen else "")
                for t in facts.tried
            )
        ]  # fmt: skip
    return [line.rstrip() for line in lines]


def told_of(choice: ChoiceFact) -> str:
    """What a choice is told to take, and the other ways: `3 ms, 64 B; or one go 5 ms, 64 B`."""
    if choice.seconds is None and choice.nbytes is None:
        return ""
    mine = WayFact("", choice.seconds, choice.nbytes)
    return "; or ".join(map(_way_text, (mine, *choice.others)))


def _way_text(way: WayFact) -> str:
    parts = [] if way.seconds is None else [seconds_text(way.seconds)]
    parts += [human_bytes(way.nbytes)] if way.nbytes else []
    return f"{way.what} {', '.join(parts)}".strip()


def predicted_lines(facts: PlanFacts) -> list[str]:
    """Lines of the seconds of each step."""
    told = facts.predicted
    if told is None:
        return ["nothing, as the number of members is unknown"]
    rows = [
        (
            step.step,
            f"read {seconds_text(step.read)}",
            f"compute {seconds_text(step.compute)}",
            f"merge {seconds_text(step.merge)}",
            f"by {_SOURCES[step.source]}" + (f", {step.rounds} rounds" * (step.rounds > 1)),
        )
        for step in told.steps
    ]
    lines = aligned(rows)
    what = "the runner itself" if not told.pipelines else f"pipelines, {told.pipelines} of them"
    machine = "measured" if told.calibrated else "not measured; `beamjax doctor --measure` does"
    lines += aligned(
        [
            (what, seconds_text(told.overhead)),
            ("all on " + told.runner, seconds_text(told.seconds)),
            *[("all on local", seconds_text(told.local))] * (told.runner != "local"),
            ("compiling, the first time", seconds_text(told.compile)),
            ("this machine", machine),
        ]
    )
    if told.guessed:
        lines.append("a loop goes on while a condition holds; it is taken to have 10 rounds")
    return lines + [told.advice] * bool(told.advice)


_SOURCES = {
    "counted": "counting operations",
    "probe": "a probe",
}


def seconds_text(seconds: float) -> str:
    """Seconds with a unit: `3.1 ms`, `12 s`."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
