"""How Sphinx builds the site: `sphinx-build -W docs site`."""

import re
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import beamjax

project = "beamjax"
author = copyright = "the authors of beamjax"
version = release = beamjax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"beamjax {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"
exclude_patterns = ["site"]
smartquotes = False

myst_heading_anchors = 4

# Notebooks are stored with outputs by notebooks.py; only the tutorial is run. To run all:
# `sphinx-build -D nb_execution_mode=force docs site`, as .ci/nightly does.
nb_execution_mode = "auto"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_output_stderr = "remove"
# Beam's interactive module loads jQuery from the network; no page needs it.
nb_mime_priority_overrides = [("html", "application/javascript", None)]
suppress_warnings = ["mystnb.mime_priority"]  # that it is left out

default_role = "code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autosummary_generate = False
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
napoleon_use_rtype = False


def _as_literals(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what is before a colon for a type, except in double backticks."""
    lines[:] = [re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line) for line in lines]


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
    parts = re.split(r"(`+[^`]*`+)", line)
    return "".join(
        x if x.startswith("`") else re.sub(r"(?<![\\*])\*(?!\*)", r"\\*", x) for x in parts
    )


def _is_field(lines: list[str]) -> bool:
    last = next((line for line in reversed(lines) if line.strip()), "")
    return re.match(r"\s*(:\w+[^:]*:|\.\. )", last) is not None


_BLOCK = re.compile(r"(?:<!-- .*? -->\n)?```(\w+)\n(.*?)```\n", re.S)


def _write_tutorial(app: Any) -> None:
    """Writes the tutorial as a notebook too, with its code in cells and without its outputs."""
    folder = Path(app.srcdir)
    text = (folder / "tutorial.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!http)(\S+\.md)", r"](../\1", text)
    cells, start = [], 0
    for block in _BLOCK.finditer(text):
        language, code = block.groups()
        if language == "sh" and not code.startswith("beamjax"):
            continue
        cells.append(new_markdown_cell(text[start : block.start()].strip()))
        start = block.end()
        code = re.sub(r"\A# (\w+\.py)$", r"%%writefile \1", code.strip(), flags=re.M)
        if language == "sh":
            code = "import sys\n\n" + code.replace("beamjax", "!{sys.executable} -m beamjax", 1)
        if language != "text":
            cells.append(new_code_cell(code))
    cells.append(new_markdown_cell(text[start:].strip()))
    cells = [cell for cell in cells if cell.source]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "notebooks" / "tutorial.ipynb")


def _wrap_long_lines(app: Any, tree: Any) -> None:
    """Wraps output with a long line that is a message, not a row of a table."""
    for block in tree.findall(nodes.literal_block):
        long = [line for line in block.astext().splitlines() if len(line) > 100]
        if block.get("language") == "text" and any("  " not in line.strip() for line in long):
            block["classes"].append("wrapped")


def _summarize(app: Any, name: str, source: list[str]) -> None:
    """Begins the reference with a table of its names, each with its first sentence."""
    if name == "api":
        names = re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)$", source[0], re.M)
        rows = "".join(f"   ~{name}\n" for name in names)
        table = f"```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{rows}```\n\n"
        source[0] = source[0].replace("## Programs", f"{table}## Programs", 1)


def setup(app: Any) -> None:
    app.connect("source-read", _summarize)
    app.connect("doctree-read", _wrap_long_lines)
    app.connect("builder-inited", _write_tutorial)
    app.connect("autodoc-process-docstring", _as_literals, priority=100)
    app.connect("autodoc-process-docstring", _as_markdown, priority=900)
