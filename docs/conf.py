"""How Sphinx builds the site: `sphinx-build -W docs site`."""

import re
from typing import Any

import beamjax

project = "beamjax"
author = copyright = "the authors of beamjax"
version = release = beamjax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"beamjax {version}"
exclude_patterns = ["site"]
smartquotes = False

myst_heading_anchors = 4

default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_rtype = False


def _as_markdown(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings show code as an indented paragraph, and mean nothing by a `*`."""
    out: list[str] = []
    before, in_code = 0, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip():
            if in_code:
                in_code = indent > before
            elif out and not out[-1].strip() and indent >= before + 4 and not _is_field(out):
                out += [" " * before + "::", ""]
                in_code = True
            if not in_code:
                before = indent
        out.append(line if in_code else _escaped(line))
    lines[:] = out


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(
        x if x.startswith("`") else re.sub(r"(?<![\\*])\*(?!\*)", r"\\*", x) for x in parts
    )


def _is_field(lines: list[str]) -> bool:
    last = next((line for line in reversed(lines) if line.strip()), "")
    return re.match(r"\s*(:\w+[^:]*:|\.\. )", last) is not None


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_markdown, priority=900)
