"""Elements of HTML and SVG as text. Everything that is not `Markup` is escaped."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable
from typing import Any


class Markup(str):
    """Text that is HTML or SVG."""

    __slots__ = ()


VOID = frozenset(("br", "hr", "img", "input", "link", "meta"))
SHORT = 20
"""Largest number of letters of a cell that stays on one line."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def escaped(text: Any) -> Markup:
    """Returns a value as escaped text; characters that HTML forbids become U+FFFD."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNPRINTABLE.sub("\ufffd", str(text)), quote=True))


def joined(parts: Iterable[Any]) -> Markup:
    """Joins parts; None and False are left out."""
    return Markup(
        "".join(escaped(part) for part in parts if part is not None and part is not False)
    )


def tag(name: str, *parts: Any, **attributes: Any) -> Markup:
    """Makes an element.

    Args:
      name: the name of the element.
      *parts: its content: elements, and values that are escaped.
      **attributes: its attributes, where `class_` is `class` and `aria_label` is `aria-label`. None
        and False omit an attribute, True gives it no value; floats are rounded to hundredths.
    """
    found = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        found.append(f" {key}" if value is True else f' {key}="{escaped(_plain(value))}"')
    opened = f"<{name}{''.join(found)}>"
    return Markup(opened if name in VOID else f"{opened}{joined(parts)}</{name}>")


def _plain(value: Any) -> Any:
    return number(value) if isinstance(value, float) else value


def number(value: float) -> str:
    """Returns a number of a drawing, rounded to hundredths."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"


def table(
    rows: Iterable[Iterable[Any]], head: Iterable[Any] = (), class_: str | None = None
) -> Markup:
    """Makes a table in a box that scrolls; integers are aligned to the right."""
    body = [tag("tr", *(_cell("td", cell) for cell in row)) for row in rows]
    top = [tag("th", cell, scope="col") for cell in head]
    inner = [tag("thead", tag("tr", *top))] if top else []
    made = tag("table", *inner, tag("tbody", *body))
    return tag("div", made, class_=f"table {class_ or ''}".rstrip(), tabindex=0)


def _cell(name: str, cell: Any) -> Markup:
    if isinstance(cell, int) and not isinstance(cell, bool):
        return tag(name, f"{cell:,}", class_="number")
    if isinstance(cell, Markup) or not isinstance(cell, str):
        return tag(name, cell)
    return tag(name, cell, class_="short" if len(cell) <= SHORT else "long")


def script_json(data: Any) -> Markup:
    """Returns JSON that is safe in a script element; numbers that are not finite become text."""
    text = json.dumps(strict(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def strict(value: Any) -> Any:
    """Returns a value with text in place of numbers that JSON cannot represent."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): strict(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [strict(child) for child in value]
    return value
