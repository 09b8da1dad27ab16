"""Elements of HTML and SVG as text, with everything escaped that is not an element already."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable
from typing import Any


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


VOID = frozenset(("br", "hr", "img", "input", "link", "meta"))
SHORT = 20
"""Letters of a cell that stays on one line."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def escaped(text: Any) -> Markup:
    """Any value as text between tags or in an attribute; what no page may hold becomes U+FFFD."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNPRINTABLE.sub("\ufffd", str(text)), quote=True))


def joined(parts: Iterable[Any]) -> Markup:
    """Parts one after the other; None and False are left out."""
    return Markup(
        "".join(escaped(part) for part in parts if part is not None and part is not False)
    )


def tag(name: str, *parts: Any, **attributes: Any) -> Markup:
    """An element.

    Args:
      name: of the element.
      *parts: what is in it: elements, and values that are escaped.
      **attributes: by name, where `class_` is `class` and `aria_label` is `aria-label`. None and
        False leave one out, True gives it without a value; numbers are rounded to hundredths.
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
    """A number of a drawing, in hundredths at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"


def table(
    rows: Iterable[Iterable[Any]], head: Iterable[Any] = (), class_: str | None = None
) -> Markup:
    """A table in a box of its own, which scrolls if need be; numbers stand to the right."""
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
    """JSON that may stand in a script element; numbers that are not finite are text."""
    text = json.dumps(strict(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def strict(value: Any) -> Any:
    """The same with text for numbers that JSON has no way to write."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): strict(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [strict(child) for child in value]
    return value
