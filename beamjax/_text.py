"""Suggestions for names that were mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 12


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that is most like this one, if any has at least this ratio of `difflib` to it."""
    known = {other.lower(): other for other in names}
    found = difflib.get_close_matches(name.lower(), known, 1, cutoff)
    return known[found[0]] if found else None


def hint(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?`, or nothing."""
    found = closest(name, names, cutoff)
    return f"; did you mean {found!r}?" if found else ""


def listed(names: Iterable[str]) -> str:
    """Names for a message, the first dozen of them; `none` if there are none."""
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(found[:_SHOWN])}{more}" if found else "none"
