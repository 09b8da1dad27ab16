"""The text of the user's lines that steps come from."""

from __future__ import annotations

import linecache
import re

from beamjax.diagnostics.fact_types import PlanFacts, walk_facts

_LINE = re.compile(r"(.+):(\d+)(?: \(|$)")


def source_lines(facts: PlanFacts) -> dict[str, str]:
    """The text of lines by `file:line (function)`, of those that can be read here."""
    found = {}
    for line in dict.fromkeys(line for step in walk_facts(facts.steps) for line in step.lines):
        match = _LINE.match(line)
        text = linecache.getline(match[1], int(match[2])).strip() if match else ""
        if text:
            found[line] = text
    return found
