"""`explain`: what a function of programs becomes, as text, a flowchart, HTML or plain data.

A plan is first turned to facts (`plan_facts`), which hold every number that is shown; the formats
only lay them out.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from beamjax import reading as reading_of
from beamjax._text import aligned, human_bytes
from beamjax.call_checks import by_position, parsed_options
from beamjax.diagnostics.choice_facts import (
    choice_facts,
    choice_lines,
    predicted_lines,
    prediction_fact,
    tried_facts,
)
from beamjax.diagnostics.fact_types import PlanFacts, StepFact, ValueFact, source_lines, walk_facts
from beamjax.diagnostics.facts import input_facts, memory_fact, plan_facts
from beamjax.diagnostics.memory_text import memory_sections
from beamjax.diagnostics.mermaid import plan_mermaid, rounds_text
from beamjax.diagnostics.piece_text import graph_text
from beamjax.diagnostics.total_text import move_lines, total_rows
from beamjax.errors import OptionsError
from beamjax.interpreters import planning
from beamjax.interpreters.cutting import cut as _split
from beamjax.interpreters.cutting.remat import Decisions, crossings
from beamjax.interpreters.staging import flatten as _flatten
from beamjax.interpreters.staging import stage as _stage
from beamjax.interpreters.staging.stage import Argument
from beamjax.interpreters.tuning import search
from beamjax.interpreters.tuning.buckets import padding_notes
from beamjax.jobs.job import Job
from beamjax.jobs.report import Report
from beamjax.options import Options
from beamjax.options.choices import Choices, write_json
from beamjax.plan.merging import workers_of

if TYPE_CHECKING:
    from beamjax.diagnostics.pages.shell import Page

STAGES = ("staged", "flat", "placed", "graph", "plan")

# --- formats


def plan_text(facts: PlanFacts) -> str:
    """A plan for people to read."""
    steps = list(walk_facts(facts.steps))
    lines = [
        f"plan of {facts.program}",
        f"  jax {facts.jax_version}, 64-bit types {'on' if facts.x64 else 'off'}",
        f"  {_count(facts.passes, 'pass', 'es')} over members, {_count(len(steps), 'step')}",
    ]
    lines += [
        f"  {p.name}: {_count(p.members, 'member')} in {_count(p.shards, 'shard')} of "
        f"{p.shard_size}"
        for p in facts.placements
    ]
    lines += [f"  {note}" for note in facts.notes]
    lines += _section(
        "inputs",
        [(i.path, " ".join(i.values), i.type, human_bytes(i.nbytes), i.read) for i in facts.inputs],
    )
    lines += ["", "steps", *(line for step in facts.steps for line in _step_lines(step, facts))]
    lines += _section(
        "edges",
        [(e.source, "->", e.target, e.value, human_bytes(e.nbytes)) for e in facts.edges],
    )
    lines += ["", "gathered and scattered", *move_lines(facts)]
    lines += _section(
        "outputs",
        [(o.path, o.type, human_bytes(o.nbytes), f"from {o.source}") for o in facts.outputs],
    )
    lines += _section("totals", total_rows(facts))
    for title, told in (("choices", choice_lines), ("predicted", predicted_lines)):
        lines += ["", title, *(f"  {line}" for line in told(facts))]
    for title, rows in memory_sections(facts.memory) if facts.memory else ():
        lines += _section(title, rows)
    return "\n".join(lines)


def _count(number: int | None, noun: str, ending: str = "s") -> str:
    if number is None:
        return f"n {noun}{ending}" if noun == "member" else f"{noun}{ending}"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"


def _section(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    return ["", title, *(f"  {line}" for line in (aligned(rows) if rows else ["none"]))]


def _value_bytes(value: ValueFact) -> str:
    if value.member_bytes is None or value.shard_bytes is None:
        return human_bytes(value.nbytes)
    member, shard = human_bytes(value.member_bytes), human_bytes(value.shard_bytes)
    return f"{member} a member, {human_bytes(value.nbytes)} in all, {shard} a shard"


def _step_lines(step: StepFact, facts: PlanFacts) -> list[str]:
    served = "broadcast" if step.kind == "Map" else "reads"
    groups = [(served, step.served), ("reads", step.placed), ("makes", step.results)]
    cells = [(label, v.name, v.type, _value_bytes(v)) for label, vs in groups for v in vs]
    if step.kind == "Loop":
        cells = _handed_cells(step)
    for r in step.reductions:
        how = f"{r.reducer} in lane {r.lane}, {human_bytes(r.nbytes)} a shard, {r.exactness}"
        cells.append(("reduces", r.result.name, r.result.type, how))
    notes = [("holds", ", ".join(step.functions))] if step.functions else []
    notes += [("why", step.reason)] if step.reason else []
    notes += [("line", line) for line in step.lines if line]
    if step.python:
        notes.append(("code", f"runs from cloudpickle of {facts.program}: {step.python}"))
    notes += [("code", f"{human_bytes(size)} for {p}") for p, size in step.executables.items()]
    rows = aligned((f"{label:<9}", *rest) for label, *rest in cells)
    if step.merge is not None:
        notes.insert(0, ("merges", step.merge.text(human_bytes(step.merge.nbytes))))
    rows += [f"{label:<9}  {text}" for label, text in notes]
    for block in step.blocks:
        gives = ", ".join(value.name for value in block.outputs) or "nothing"
        rows.append(f"{block.title}, gives {gives}")
        rows += [line for inner in block.steps for line in _step_lines(inner, facts)]
    return [f"  {step.name}: {_title(step, facts)}", *(f"    {row}" for row in rows)]


def _title(step: StepFact, facts: PlanFacts) -> str:
    if step.kind == "Map":
        (placement,) = (p for p in facts.placements if p.name == step.placement)
        shards = f"shards of {placement.shard_size}"
        if placement.shards is not None:
            shards = _count(placement.shards, "shard")
        return f"Map, a pass over {placement.name}, {shards}"
    if step.kind == "Loop":
        return f"Loop, {rounds_text(step)}"
    if step.kind == "Branch":
        return f"Branch, one of {_count(len(step.blocks), 'block')}"
    return step.kind


def _handed_cells(step: StepFact) -> list[tuple[str, str, str, str]]:
    """What the rounds of a loop hand on: name before, in a round, and after."""
    cells = []
    for fact in step.handed:
        names = (fact.outside, fact.inside.name, fact.afterwards)
        names_text = " -> ".join(name for name in names if name is not None)
        cells.append((fact.how, names_text, fact.inside.type, _value_bytes(fact.inside)))
    return cells


# --- the front


@dataclass(frozen=True, repr=False)
class Explanation:
    """One stage of a program, as text; `facts` is None for all stages but "plan"."""

    stage: str
    text: str
    facts: PlanFacts | None = None
    choices: Choices | None = None

    @property
    def predicted_seconds(self) -> float | None:
        """What a run on the given runner is told to take, without compiling.

        None where nobody knows the number of members before.

        Raises:
          OptionsError: the stage is not "plan".
        """
        told = self._plan_facts("predicted_seconds").predicted
        return None if told is None else told.seconds

    def save_choices(self, path: str | os.PathLike[str]) -> None:
        """Writes what the plan was fixed to, for the option `plan` of other runs.

        Args:
          path: of a file of JSON.

        Raises:
          OptionsError: the stage is not "plan", or the file can't be written.
        """
        self._plan_facts("save_choices")
        assert self.choices is not None
        try:
            write_json(path, self.choices.to_json())
        except OSError as error:
            raise OptionsError(f"save_choices: cannot write {os.fspath(path)} ({error})") from error

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from beamjax.diagnostics.pages.shell import fragment

        return fragment(self._page(None))

    def to_html(self, run: Job | Report | None = None) -> str:
        """A page that stands alone: the graph of the steps, with all that is told of each.

        It asks for nothing of the network, and its data are in it as JSON too. Of other stages than
        "plan" it shows the text.

        Args:
          run: of the same plan, whose measured seconds stand beside those of the plan.
        """
        from beamjax.diagnostics.pages.shell import document

        return document(self._page(run))

    def save(self, path: str | os.PathLike[str], run: Job | Report | None = None) -> None:
        """Writes the page to a file.

        Args:
          path: of the file, or its URL.
          run: as for `to_html`.

        Raises:
          SourceError: it can't be written.
        """
        from beamjax.diagnostics.pages.shell import write

        write(path, self.to_html(run))

    def _page(self, run: Job | Report | None) -> Page:
        from beamjax.diagnostics.pages import plan_page

        if self.facts is None:
            return plan_page.text_page(f"stage {self.stage}", self.text)
        report = run.report() if isinstance(run, Job) else run
        sources = source_lines(self.facts)
        if report is None:
            return plan_page.plan_page(self.facts, sources)
        return plan_page.plan_page(
            self.facts, sources, report.progress.steps, report.progress.seconds
        )

    def to_json(self) -> dict[str, Any]:
        """The facts as dicts, lists, text and numbers.

        Raises:
          OptionsError: the stage is not "plan".
        """
        facts = dataclasses.asdict(self._plan_facts("to_json"))
        return json.loads(json.dumps(facts))

    def to_mermaid(self) -> str:
        """A Mermaid flowchart of the steps.

        Raises:
          OptionsError: the stage is not "plan".
        """
        return plan_mermaid(self._plan_facts("to_mermaid"))

    def _plan_facts(self, wanted: str) -> PlanFacts:
        if self.facts is None:
            raise OptionsError(
                f"{wanted}: found an explanation of stage {self.stage!r}, expected stage 'plan'; "
                "use str() for the others"
            )
        return self.facts


@by_position
def explain(
    fn: Callable[..., Any],
    *args: Any,
    stage: str = "plan",
    runner: Any = "DirectRunner",
    options: Any = None,
) -> Explanation:
    """Tells how a function of programs would be run. No data is read.

    Nothing is computed but what `run` computes before it starts: bodies of long passes are timed on
    made-up data, see the option `probe`.

    Args:
      fn: as for `run`.
      *args: as for `run`, or with a `jax.ShapeDtypeStruct` in place of any array.
      stage: "plan" for the steps, their bytes, and what is gathered and why; or how it came to be:
        "staged" (the jaxpr), "flat" (calls inlined), "placed" (a place for every value), "graph"
        (cut at the reductions).
      runner: as for `run`: for which seconds are predicted, and memory of its workers and of the
        launching process, as far as its name and the options say what they are. It is neither
        started nor asked. Where this process computes on an accelerator that the plan is for,
        bodies are compiled, to find what they take there.
      options: as for `run`.

    Returns:
      What `print` and notebooks show, and a page for `to_html()` and `save(path)`; for the plan
      also `to_mermaid()`, `to_json()`, `predicted_seconds` and `save_choices(path)`.

    Raises:
      OptionsError: there is no such stage.
      BeamjaxError: what `run` raises before it computes; a stage is shown even if a later one
        fails.
    """
    if stage not in STAGES:
        raise OptionsError(f"stage: found {stage!r}, expected one of {', '.join(STAGES)}")
    parsed = parsed_options(options, runner)
    arguments, key, restore = _stage.flatten_arguments(args)
    arguments = [_as_array(argument) for argument in arguments]
    if stage != "plan":
        return Explanation(stage, _stage_text(fn, arguments, restore, stage, parsed))
    planned, notes = _planned(fn, arguments, key, restore, parsed)
    name = runner if isinstance(runner, str) else type(runner).__name__
    facts = told_facts(planned, arguments, parsed, notes, name)
    return Explanation(stage, plan_text(facts), facts, planned.plan.choices)


def told_facts(
    planned: planning.Planned,
    arguments: Sequence[Argument],
    parsed: Options,
    notes: tuple[str, ...],
    runner: str,
) -> PlanFacts:
    """All that is told of a plan for these arguments."""
    tree = planned.staged.out_tree
    leaves = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    paths = [
        f"result{jax.tree_util.keystr(path)}"
        for path, _ in jax.tree_util.tree_flatten_with_path(leaves)[0]
    ]
    inputs = input_facts(planned.plan, arguments)
    sources = {i: a.value for i, a in enumerate(arguments) if a.is_source}
    plan, workers = planned.plan, workers_of(parsed.beam)
    crossed = crossings(planned.placed, search.named_passes(planned.stages))
    facts = plan_facts(plan, inputs, paths, parsed.reduction, workers, parsed.merge_fan_out)
    return dataclasses.replace(
        facts,
        notes=notes + padding_notes(plan, arguments),
        memory=memory_fact(plan, sources, parsed, runner),
        choices=tuple(choice_facts(plan, facts.steps, parsed, runner, crossed)),
        tried=tried_facts(plan),
        predicted=prediction_fact(plan, parsed, runner),
    )


def _planned(
    fn: Callable[..., Any],
    arguments: Sequence[Argument],
    key: Any,
    restore: Callable[..., Any],
    options: Options,
) -> tuple[planning.Planned, tuple[str, ...]]:
    """The plan for arguments, and what there is to say of how they are read."""

    def plan(known: Sequence[Argument]) -> planning.Planned:
        return planning.plan_for(fn, known, key, restore, options)

    if not any(argument.is_stream for argument in arguments):
        planned = plan(arguments)
        return planned, planned.notes
    reading = reading_of.choose(fn, arguments, restore, plan)
    planned = reading.planned or plan(reading_of.with_number(arguments, reading.number))
    return planned, reading_of.notes(arguments, reading)


def _as_array(argument: Argument) -> Argument:
    """Without its value if it is abstract, so that it is placed as an array would be."""
    abstract = isinstance(argument.value, jax.ShapeDtypeStruct)
    return dataclasses.replace(argument, value=None) if abstract else argument


def _stage_text(
    fn: Callable[..., Any],
    arguments: Sequence[Argument],
    restore: Callable[..., Any],
    stage: str,
    options: Options,
) -> str:
    staged = _stage.stage(fn, arguments, restore)
    if stage == "staged":
        return str(staged)
    flat = _flatten.flatten(staged.closed)
    if stage == "flat":
        return str(flat)
    placed = planning.placed_program(staged, flat, arguments, options)
    if stage == "placed":
        return str(placed)
    return graph_text(_split.split(placed, Decisions(options.recompute)))
