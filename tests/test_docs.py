"""The pages of docs/: each block of code runs and prints what the page shows; links lead somewhere.

See tests/doc_pages.py for how a page says what it shows, and what can't be run here.
"""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import doc_pages
import pytest
from doc_pages import DOCS, PAGES

ROOT = DOCS.parent
MAX_NOT_RUN = 12
"""Blocks of all pages that are shown only."""

REASONS = (
    "needs Dataflow",
    "needs a GPU",
    "needs Docker",
    "needs a cluster",
    "installs",
    "builds this site",
    "options only",
    "tests/",
    "written for another package",
)


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


def with_included(page: Path) -> str:
    """The text of a page and of the files that it includes."""
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"^```\{include\} (.*)$", text, re.M)
    return "\n".join([text, *((page.parent / file).read_text("utf-8") for file in files)])


RUNNING = [
    page
    for page in PAGES
    if any(b.language in doc_pages.RUN and b.not_run is None for b in doc_pages.blocks(page))
]


@pytest.mark.filterwarnings("ignore:jax.interpreters.pxla:DeprecationWarning")  # of drjax
@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_the_page_runs_and_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        doc_pages.run_page(page, tmp_path)
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]


def test_what_is_shown_only_is_little_and_says_why() -> None:
    shown = [b for page in PAGES for b in doc_pages.blocks(page) if b.not_run is not None]
    told = "\n".join(f"{block.where}: {block.not_run}" for block in shown)
    assert len(shown) <= MAX_NOT_RUN, told
    assert [block.where for block in shown if not str(block.not_run).startswith(REASONS)] == []


def test_markers_are_known_and_before_a_block() -> None:
    for page in PAGES:
        text, found = page.read_text(encoding="utf-8"), doc_pages.blocks(page)
        assert text.count("<!--") == sum(block.marker != "" for block in found), page
        assert text.count("*Not run with this page") == sum(b.not_run is not None for b in found), (
            page
        )
        for block in doc_pages.blocks(page):
            assert block.marker in ("", "numbers vary"), f"{block.where}: {block.marker}"


def test_every_fence_is_a_block_of_a_known_language() -> None:
    for page in PAGES:
        fences = re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.M)
        found = doc_pages.blocks(page)
        directives = len(re.findall(r"^```\{", page.read_text(encoding="utf-8"), re.M))
        assert len(fences) == 2 * (len(found) + directives), page
        assert {b.language for b in found} <= {"python", "sh", "text", "dockerfile"}


def test_a_page_that_shows_something_else_fails(tmp_path: Path) -> None:
    page = DOCS / "wrong.md"  # is not written: only its name is used
    wrong = tmp_path / page.name
    wrong.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n", encoding="utf-8")
    blocks = doc_pages.blocks(wrong)
    assert [b.language for b in blocks] == ["python", "text"]
    assert not doc_pages.same(blocks[1].text, "2\n", vary=False)
    assert doc_pages.same("a 3.5 ms\n...\nend\n", "a  17 ms\nx\ny\nend\n", vary=True)
    assert not doc_pages.same("a 3.5 ms\n...\nend\n", "b 17 ms\nx\nend\n", vary=True)
    assert not doc_pages.same("a 3.5 ms\n", "a 17 ms\n", vary=False)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page}: {link}"
        assert DOCS in target.parents, f"{page}: {link} leaves the site"
        if heading:
            titles = re.findall(r"^#+ (.*)$", with_included(target), re.M)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    folders = "benchmarks|docker|examples|interpreters|pipelines|tests"
    names = re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text(encoding="utf-8"))
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_pictures_are_drawn_without_the_network() -> None:
    pictures = sorted((DOCS / "images").glob("*.svg"))
    assert pictures
    for picture in pictures:
        told = [
            value
            for element in ElementTree.parse(picture).iter()
            for value in (*element.attrib.values(), element.text or "")
            if element.tag.rpartition("}")[2] not in ("type", "title", "creator", "format")
        ]  # of metadata, which nothing draws
        assert [text for text in told if re.search(r"https?:|^//|@import|url\((?!#)", text)] == []


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = {"index"}
    for page in PAGES:
        for tree in re.findall(
            r"^```\{toctree\}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S
        ):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {name_of((page.parent / name).resolve()) for name in names}
    assert {name_of(page) for page in PAGES} == listed
