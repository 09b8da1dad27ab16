"""`explain`: the stages of a function and its plan, as text, a page, a flowchart or JSON."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from beamjax import execution
from beamjax.call import by_position, parsed_options, some_number, stream_note, with_number
from beamjax.diagnostics.text import graph_text, plan_mermaid, plan_text
from beamjax.errors import OptionsError
from beamjax.interpreters import planning
from beamjax.interpreters.cutting import cut as _split
from beamjax.interpreters.staging import flatten as _flatten
from beamjax.interpreters.staging.arguments import Argument, FlatCall, flatten_call
from beamjax.interpreters.staging.stage import stage as _trace
from beamjax.jobs.job import Job
from beamjax.jobs.report import Report
from beamjax.options import Options, rules

if TYPE_CHECKING:
    from beamjax.diagnostics.pages.page import Page
    from beamjax.diagnostics.plan_json import Json

STAGES = ("staged", "flat", "placed", "graph", "plan")


@dataclass(frozen=True, repr=False)
class Explanation:
    """One stage of a program, as `explain` returns it.

    `print` and notebooks show it.

    Attributes:
      stage: the name of the stage.
      text: the stage as text.
    """

    stage: str
    text: str
    _plan: Json | None = field(default=None, hash=False)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from beamjax.diagnostics.pages.page import fragment

        return fragment(self._page(None))

    def to_html(self, run: Job | Report | None = None) -> str:
        """Returns a page with the graph of the steps, and tables on each step.

        The page is a single HTML file that needs no network and contains its data as JSON. For
        stages other than "plan" it shows the text.

        Args:
          run: a job that ran the same plan, or its report. The page then shows measured
            seconds.

        Returns:
          The HTML text.

        Raises:
          JobError: the folder of the job holds no job any more.
          ArrayFormatError: a file in the folder of the job is damaged.
        """
        from beamjax.diagnostics.pages.page import document

        return document(self._page(run))

    def save(self, path: str | os.PathLike[str], run: Job | Report | None = None) -> None:
        """Writes the page of `to_html` to a file.

        Args:
          path: the path or URL of the file, whose name ends in `.html` or `.htm`.
          run: as for `to_html`.

        Raises:
          OptionsError: the name has another ending.
          SourceError: the file can't be written.
          JobError: as for `to_html`.
          ArrayFormatError: as for `to_html`.
        """
        from beamjax.diagnostics.pages.page import write

        rule = rules.path("file", ".html", ".htm")
        try:
            rule.read(path)
        except ValueError:
            raise OptionsError(f"found {os.fspath(path)!r}, expected {rule.expected}") from None
        write(path, self.to_html(run))

    def _page(self, run: Job | Report | None) -> Page:
        from beamjax.diagnostics.pages import plan_page

        if self._plan is None:
            return plan_page.text_page(f"stage {self.stage}", self.text)
        report = run.report() if isinstance(run, Job) else run
        return plan_page.plan_page(self._plan, None if report is None else report.to_json())

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values: dicts, lists, strings and numbers.

        Raises:
          OptionsError: the stage is not "plan".
        """
        return copy.deepcopy(self._plan_of("to_json"))

    def to_mermaid(self) -> str:
        """Returns a Mermaid flowchart of the steps.

        Raises:
          OptionsError: the stage is not "plan".
        """
        return plan_mermaid(self._plan_of("to_mermaid"))

    def _plan_of(self, method: str) -> Json:
        if self._plan is None:
            raise OptionsError(
                f"{method}: found an explanation of stage {self.stage!r}, expected stage 'plan'; "
                "use str() for the others"
            )
        return self._plan


@by_position
def explain(
    fn: Callable[..., Any],
    *args: Any,
    stage: str = "plan",
    runner: Any = "DirectRunner",
    options: Any = None,
) -> Explanation:
    """Explains how beamjax would run a function, without reading or computing data.

    Args:
      fn: as for `run`.
      *args: as for `run`; a `jax.ShapeDtypeStruct` can replace any array.
      stage: "plan" for the steps, their bytes, and what is gathered and why; or an earlier stage:
        "staged" (the jaxpr), "flat" (calls inlined), "placed" (the placement of each value),
        "graph" (cut at the reductions).
      runner: the runner for which memory is estimated, as for `run`. It is not started. If this
        process uses an accelerator of the platform of the plan, bodies are compiled to find out how
        much device memory they need.
      options: as for `run`.

    Returns:
      An `Explanation`. `to_html()` and `save(path)` make a page. For the stage "plan" it also has
      `to_mermaid()` and `to_json()`.

    Raises:
      OptionsError: there is no such stage, or an option is unknown or has an impossible value.
      BeamjaxError: any error that `run` would raise before it computes. A stage is shown even if a
        later stage fails.
    """
    if stage not in STAGES:
        raise OptionsError(f"stage: found {stage!r}, expected one of {', '.join(STAGES)}")
    parsed = parsed_options(options, runner)
    call = flatten_call(fn, args)
    call = call.with_arguments([_as_array(argument) for argument in call.arguments])
    if stage != "plan":
        return Explanation(stage, _stage_text(call, stage, parsed))
    notes = None
    if call.has_streams:
        number = some_number(call)
        notes = (stream_note(call, number),)
        call = with_number(call, number)
    planned = execution.plan(call, runner, parsed)
    plan_json = planned.plan_json(notes, cached=True)
    return Explanation(stage, plan_text(plan_json), plan_json)


def _as_array(argument: Argument) -> Argument:
    """Returns an abstract argument without its value, so that it is placed as an array."""
    abstract = isinstance(argument.value, jax.ShapeDtypeStruct)
    return argument._replace(value=None) if abstract else argument


def _stage_text(call: FlatCall, stage: str, options: Options) -> str:
    staged = _trace(call)
    if stage == "staged":
        return str(staged)
    flat = _flatten.flatten(staged.closed)
    if stage == "flat":
        return str(flat)
    placed = planning.placed_program(staged, flat, call.arguments, options)
    if stage == "placed":
        return str(placed)
    return graph_text(_split.split(placed))
