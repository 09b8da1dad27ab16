"""Makes a document, or the output of a notebook cell, of a page.

Both contain their styles, their script and their data, and need no network.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from beamjax._version import __version__
from beamjax.diagnostics.pages.markup import Markup, script_json, tag
from beamjax.errors import SourceError

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
      title: the title of the document.
      body: makes the content, given the prefix of its ids.
      data: the data of the page, as JSON values.
    """

    title: str
    body: Callable[[str], Markup]
    data: Any


def document(page: Page) -> str:
    """Returns the page as a document of HTML."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="generator", content=f"beamjax {__version__}"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", page.title),
        tag("style", Markup(_GROUND + _file("style.css"))),
    )
    body = tag("body", tag("main", _part(page, "bjx")))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def fragment(page: Page) -> str:
    """Returns the page as the output of a cell, with unique ids; its styles affect nothing else."""
    return _part(
        page, f"bjx-{os.getpid()}-{next(_numbers)}", tag("style", Markup(_file("style.css")))
    )


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes text to a file, or to a URL of Beam's FileSystems.

    Raises:
      SourceError: the file cannot be written.
    """
    from beamjax.storage import files  # imports Beam only for URLs

    name = os.fspath(path)
    try:
        if files.is_url(name):
            files.write(name, text.encode())
        else:
            Path(name).write_text(text, encoding="utf-8")
    except Exception as error:  # file systems raise errors of many kinds
        raise SourceError(f"{name}: cannot write it ({error})") from error


_GROUND = (
    "html{color-scheme:light dark;background:light-dark(#ffffff,#10151b)}body{margin:0}"
    "@media print{html{color-scheme:light}}@page{margin:14mm}"
)


def _part(page: Page, prefix: str, *styles: Markup) -> Markup:
    run = f'{_file("page.js").strip()}(document.getElementById("{prefix}"));'
    return tag(
        "div",
        *styles,
        page.body(prefix),
        tag("script", script_json(page.data), type="application/json", class_="data"),
        tag("script", Markup(run)),
        id=prefix, class_="bjx",
    )  # fmt: skip


@functools.cache
def _file(name: str) -> str:
    return resources.files("beamjax.diagnostics.pages").joinpath(name).read_text(encoding="utf-8")
