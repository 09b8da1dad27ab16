"""What is told of choices: what was chosen, why, what it is told to take, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from beamjax.calibration import calibration
from beamjax.costs import Cost
from beamjax.fact_types import (
    ChoiceFact,
    PlanFacts,
    PredictionFact,
    StepFact,
    StepSeconds,
    TriedFact,
    human_bytes,
    walk_facts,
)
from beamjax.forecast import forecast, small_work
from beamjax.options import Options
from beamjax.plan import Loop, Map, Plan, walk
from beamjax.verification import aligned
from beamjax.worker_processes import Workers


def choice_facts(
    plan: Plan, steps: Sequence[StepFact], options: Options, runner: str
) -> Iterator[ChoiceFact]:
    """What could be otherwise in a run of a plan.

    Args:
      plan: to be run.
      steps: the facts of its steps.
      options: of the run.
      runner: its name.
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
        told = step.looping.kind == "vmap" and "all members of a shard at once"
        why = step.turns or told or ""
        yield ChoiceFact(f"members in {name}", str(step.looping), why, "member_loop")
    for fact in walk_facts(steps):
        if fact.merge is not None:
            yield ChoiceFact(
                f"reduction of {fact.name}",
                f"{human_bytes(fact.partial_bytes)} a shard, merged in "
                + (f"{fact.merge.groups} groups" if fact.merge.groups > 1 else "one go"),
                fact.merge.why,
                "merge_fan_out",
            )
    yield from _kept(plan)
    yield from _rounds(plan, options, runner)


def _kept(plan: Plan) -> Iterator[ChoiceFact]:
    """Placed values that one pass makes and another one reads."""
    steps = [step for step in walk(plan.steps) if isinstance(step, Map)]
    read = {name for step in steps for name in step.operands}
    for step in steps:
        kept = [name for name in step.results if name in read and plan.sizes[step.placement]]
        if kept:
            nbytes = sum(map(plan.nbytes, kept))
            known, cost = calibration(), plan.costs.get(step.name, Cost())
            again = seconds_text(plan.sizes[step.placement] * known.rates.seconds(cost))
            moved = seconds_text(2 * nbytes / known.read)
            why = f"a later pass reads them; to write and read them takes {moved}, to make them "
            why += f"again {again}"
            yield ChoiceFact(
                f"results of {step.name}", f"{human_bytes(nbytes)} kept", why, "recompute"
            )


def _rounds(plan: Plan, options: Options, runner: str) -> Iterator[ChoiceFact]:
    from beamjax.pipelines.unroll import is_straight, rounds_per_graph

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
            width = min(rounds_per_graph(plan, loop, options, workers.shared), loop.rounds)
            why = "by the steps and the bytes of a round"
            if options.rounds_per_graph is not None:
                why = "the option rounds_per_graph"
            yield ChoiceFact(what, f"{width} a pipeline", why, "rounds_per_graph")


def tried_facts(plan: Plan) -> tuple[TriedFact, ...]:
    """What was timed before a plan was chosen."""
    chosen = {
        (step.name, plan.shard_sizes[step.placement], step.looping)
        for step in walk(plan.steps)
        if isinstance(step, Map)
    }
    return tuple(
        TriedFact(
            t.step, t.size, str(t.looping), t.member_seconds, (t.step, t.size, t.looping) in chosen
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
    lines = aligned(rows) if rows else ["none"]
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
    "earlier runs": "an earlier run",
}


def seconds_text(seconds: float) -> str:
    """Seconds with a unit: `3.1 ms`, `12 s`."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
