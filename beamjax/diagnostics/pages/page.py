"""Pages: HTML from templates of Jinja2, as a document or as the output of a notebook cell.

Both contain their styles, their script and their data, and need no network. Everything that a
template prints is escaped, except for `Markup`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from beamjax._text import human_bytes
from beamjax._version import __version__
from beamjax.diagnostics import text as texts
from beamjax.diagnostics.plan_json import all_steps
from beamjax.errors import SourceError
from beamjax.spans import KINDS as SECONDS
from beamjax.storage import files

KINDS = {
    "Map": "a pass over members",
    "Server": "computes on the server",
    "Gather": "gathers members to the server",
    "Rows": "reads rows by index",
    "Scatter": "scatters a value over members",
    "Loop": "repeats a block",
    "Branch": "runs one of several blocks",
}
STATES = {
    "running": "▶ running",
    "done": "✓ done",
    "failed": "✗ failed",
    "cancelled": "■ cancelled",
    "lost": "? lost",
}

SHORT = 20
"""Largest number of letters of a cell that stays on one line."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Page:
    """A page: the title of the document, a template, and what the template and the script read."""

    title: str
    template: str  # the file name of the template of its content, without `.html`
    values: Mapping[str, Any]
    data: Mapping[str, Any]  # JSON values; `page.js` draws its "graph" and its "charts"


def document(page: Page) -> str:
    """Returns the page as a document of HTML."""
    return _rendered("document", page, "bjx")


def fragment(page: Page) -> str:
    """Returns the page as the output of a cell; its ids are unique, and its tables are folded."""
    return _rendered("fragment", page, f"bjx-{os.getpid()}-{next(_numbers)}")


def _rendered(name: str, page: Page, prefix: str) -> str:
    html = _templates().get_template(f"{name}.html").render(
        page=page, prefix=prefix, version=__version__, folded=name == "fragment", **page.values
    )  # fmt: skip
    return _UNPRINTABLE.sub("\ufffd", html)  # HTML forbids these characters


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes text to a file, or to a URL of fsspec; raises SourceError if it cannot."""
    name = os.fspath(path)
    try:
        if files.is_url(name):
            files.write(name, text.encode())
        elif os.path.isfile(target := os.path.realpath(name)) or not os.path.exists(target):
            # A browser may load a page while a later run writes it again.
            temporary = Path(f"{target}.{uuid.uuid4().hex}.tmp")
            try:
                temporary.write_text(text, encoding="utf-8")
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
        else:  # such as /dev/stdout
            Path(name).write_text(text, encoding="utf-8")
    except Exception as error:  # file systems raise errors of many kinds
        raise SourceError(f"{name}: cannot write it ({error})") from error


def _cell(value: Any) -> Markup:
    """Returns a cell of a table: integers are aligned to the right, short texts do not wrap."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Markup('<td class="number">{:,}</td>').format(value)
    kind = "short" if len(str(value)) <= SHORT else "long"
    return Markup('<td class="{}">{}</td>').format(kind, value)


def _json(data: Any) -> Markup:
    """Returns JSON that is safe in a script element."""
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("beamjax.diagnostics.pages"),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "cell": _cell, "json": _json, "bytes": human_bytes, "seconds": texts.human_seconds,
        "number": lambda n: "n" if n is None else f"{n:,}",
        "capitalized": lambda text: text[:1].upper() + text[1:],
        "kinds": lambda tally: {kind: tally[kind] for kind in SECONDS},
        "seconds_of": lambda kinds: sum(kinds.values()),
    }  # fmt: skip
    environment.globals |= {
        "bundled": _bundled, "all_steps": all_steps, "KINDS": KINDS, "STATES": STATES,
        "SECONDS": SECONDS, "count": texts.count, "tables": texts.tables,
        "step_notes": texts.step_notes, "step_values": texts.step_values,
        "rounds_text": texts.rounds_text, "parts_text": texts.parts_text,
    }  # fmt: skip
    return environment


@functools.cache
def _bundled(name: str) -> Markup:
    """Returns a file of this package, which the template does not escape."""
    file = resources.files("beamjax.diagnostics.pages").joinpath(name)
    return Markup(file.read_text(encoding="utf-8").strip())
