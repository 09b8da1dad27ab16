"""The page of a plan: the graph of its steps, and tables on each step beside it."""

from __future__ import annotations

from beamjax.diagnostics.pages.graph import plan_graph
from beamjax.diagnostics.pages.page import Page
from beamjax.diagnostics.plan_json import Json
from beamjax.spans import KINDS


def plan_page(plan: Json, run: Json | None = None) -> Page:
    """Returns the page of a plan; a report of its run, as JSON, adds measured times."""
    spent = {} if run is None else spent_by_step(run)
    data = {"plan": plan, "graph": plan_graph(plan, spent)}
    values = {"plan": plan, "run": run, "spent": spent}
    return Page(f"plan of {plan['program']}", "plan", values, data)


def text_page(title: str, text: str) -> Page:
    """Returns a page of text alone."""
    return Page(title, "text", {"text": text}, {"text": text})


def spent_by_step(run: Json) -> dict[str, dict[str, float]]:
    """Returns the seconds of each kind of work, by step."""
    steps = run["progress"]["steps"]
    return {name: {kind: step[kind] for kind in KINDS} for name, step in steps.items()}
