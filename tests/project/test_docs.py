"""The pages of docs/: each block of code runs and prints what the page shows; links lead somewhere.

See tests/doc_pages.py for how a page says what it shows, and what can't be run here.
"""

import ast
import importlib
import json
import pydoc
import re
import sys
from collections import Counter
from pathlib import Path

import doc_pages
import pytest
from doc_pages import DOCS, PAGES

ROOT = DOCS.parent
IN_THE_GATE = {"index", "tutorial", "howto/sources", "howto/results", "howto/failing-members"}
MAX_NOT_RUN = 12
"""Blocks of all pages that are shown only."""

NEEDS = {
    "howto/libraries": {"numpyro": "the extra 'libraries'"},
    "howto/other-formats": dict.fromkeys(
        ("h5py", "PIL", "datasets", "xarray", "netCDF4"), "the group 'formats'"
    ),
}
"""Packages that a page needs and the tests do not have."""

REASONS = (
    "needs Dataflow", "needs a GPU", "needs Docker", "needs a cluster", "installs",
    "builds this site", "options only", "tests/", "written for another package",
)  # fmt: skip


def name_of(page):
    return page.relative_to(DOCS).with_suffix("").as_posix()


def with_included(page):
    """The text of a page and of the files that it includes."""
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"^```\{include\} (.*)$", text, re.M)
    return "\n".join([text, *((page.parent / file).read_text("utf-8") for file in files)])


RUNNING = [
    pytest.param(page, marks=[] if name_of(page) in IN_THE_GATE else pytest.mark.long)
    for page in PAGES
    if any(b.language in doc_pages.RUN and b.not_run is None for b in doc_pages.blocks(page))
]


@pytest.mark.filterwarnings("ignore:jax.interpreters.pxla:DeprecationWarning")  # of drjax
@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_the_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    for package, source in NEEDS.get(name_of(page), {}).items():
        pytest.importorskip(package, reason=f"needs {source}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        doc_pages.run_page(page, tmp_path)
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]


def test_blocks_are_marked_and_few_are_not_run():
    shown = [b for page in PAGES for b in doc_pages.blocks(page) if b.not_run is not None]
    assert len(shown) <= MAX_NOT_RUN
    assert [block.where for block in shown if not str(block.not_run).startswith(REASONS)] == []
    for page in PAGES:
        text, found = page.read_text(encoding="utf-8"), doc_pages.blocks(page)
        hidden = sum(block.not_run is not None for block in found)
        assert text.count("<!-- not run: ") == hidden, page
        assert {block.marker for block in found} <= {"", "numbers vary"}, page
        assert {b.language for b in found} <= {"python", "sh", "text", "dockerfile"}, page


def test_a_page_that_shows_something_else_fails(tmp_path):
    wrong = tmp_path / "wrong.md"
    wrong.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="it printed\n2"):
        doc_pages.run_page(wrong, tmp_path)
    assert doc_pages.same("a 3.5 ms\n...\nend\n", "a  17 ms\nx\ny\nend\n", vary=True)
    assert not doc_pages.same("a 3.5 ms\n...\nend\n", "b 17 ms\nx\nend\n", vary=True)
    assert not doc_pages.same("a 3.5 ms\n", "a 17 ms\n", vary=False)


def test_links_and_names_of_files_lead_somewhere():
    faults = []
    folders = "benchmarks|docker|examples|interpreters|pipelines|tests"
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(rf"`((?:{folders})/[\w./-]+)`", text)
        faults += [(page, name) for name in named if not (ROOT / name).exists()]
        prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.is_file() or DOCS not in target.parents:
                faults.append((page, link))
            elif heading:
                titles = re.findall(r"^#+ (.*)$", with_included(target), re.M)
                anchors = [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]
                faults += [(page, link)] * (heading not in anchors)
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text("utf-8"))
    assert len(links) > 10
    faults += [("README.md", link) for link in links if not (ROOT / link).exists()]
    assert faults == []


def test_each_public_name_is_in_an_example_that_is_run():
    """Errors are shown by a few of them."""
    api = (DOCS / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^\.\. auto(?:function|class):: beamjax\.(?:pipelines\.)?(\w+)$", api, re.M)
    code = "\n".join(
        block.text
        for page in PAGES
        for block in doc_pages.blocks(page)
        if block.language == "python" and block.not_run is None
    )
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", code)] == []


@pytest.mark.parametrize("name", ["bayes", "climate", "federated", "influence"])
def test_notebooks_are_stored_with_what_they_print_and_draw(name):
    notebook = json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs), "docs/notebooks.py"
    assert any(output.get("name") == "stdout" for output in outputs)
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    last = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"][-1]
    assert last["execution_count"] is not None


def test_each_word_of_the_glossary_names_one_class():
    text = (DOCS / "concepts.md").read_text(encoding="utf-8").partition("## Words")[2]
    words = dict(re.findall(r"^\| ([a-z ]+) \| .* \| `?(\w*)`? ?\|$", text, re.M))
    assert 20 <= len(words) <= 25
    found = {(name or word).lower().removesuffix("s"): set() for word, name in words.items()}
    for folder in ("beamjax", "pipelines", "interpreters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.M):
                word = name.strip("_").lower().removesuffix("s")
                if word in found:
                    found[word].add((str(path.relative_to(ROOT)), name))
    # A word and its plural may be two classes of one module.
    several = {w: c for w, c in found.items() if len({module for module, _ in c}) > 1}
    assert several == {}
    classes = {name for entries in found.values() for _, name in entries}
    assert {name for name in words.values() if name} <= classes


def test_no_two_modules_have_one_name():
    names = Counter(
        path.stem
        for folder in ("beamjax", "pipelines", "interpreters")
        for path in (ROOT / folder).rglob("*.py")
        if not path.stem.startswith("__")
    )
    assert [name for name, number in names.items() if number > 1] == []


VAGUE = {"found", "made", "given", "each", "one"}
IN_JSON = {"Finding", "Row"}
"""Classes whose fields are keys of JSON that commands print, and so keep their names."""


def _bound_name(node):
    """The name that a node of a syntax tree gives to a value or a function."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ExceptHandler(name=name):
            return name
        case ast.MatchAs(name=name) | ast.MatchStar(name=name) | ast.MatchMapping(rest=name):
            return name
        case ast.alias(name=name, asname=other):
            return other or name
    return None


def test_names_say_what_a_value_is():
    vague, kept = [], 0
    for folder in ("beamjax", "pipelines", "interpreters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            fields = {
                statement.target
                for node in nodes
                if isinstance(node, ast.ClassDef) and node.name in IN_JSON
                for statement in node.body
                if isinstance(statement, ast.AnnAssign)
            }
            hits = [node for node in nodes if _bound_name(node) in VAGUE]
            kept += sum(node in fields for node in hits)
            vague += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {_bound_name(node)}"
                for node in hits
                if node not in fields
            ]
    assert vague == []
    assert kept == len(IN_JSON)


def test_docstrings_of_internals_are_one_line():
    """But of public names, which ruff checks, and of commands, whose docstrings are their help."""
    api = (DOCS / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^\.\. auto\w+:: (\S+)$", api, re.M)
    modules = {"beamjax.dataflow", "beamjax.sources.arrays.part_files"}  # the latter of `from_beam`
    modules |= {pydoc.locate(name).__module__ for name in names}
    assert len(modules) > 30
    public = {Path(importlib.import_module(module).__file__).resolve() for module in modules}
    commands = set((ROOT / "beamjax" / "commands").glob("*.py"))
    longer = []
    for folder in ("beamjax", "pipelines", "interpreters"):
        for path in sorted(set((ROOT / folder).rglob("*.py")) - public - commands):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_internal = isinstance(node, ast.FunctionDef | ast.ClassDef)
                if is_internal and "\n" in (ast.get_docstring(node) or ""):
                    longer.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not longer, f"expected one line, or a name in docs/api.md: {longer}"
