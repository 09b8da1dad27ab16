"""Text for messages: suggestions for mistyped names, sizes with units, aligned columns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

MAX_CHARACTERS = 10_000
"""Largest length of the text of an error that is not beamjax's own, in messages and records."""
_SHOWN = 12


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar name, if its `difflib` ratio is at least `cutoff`; otherwise None."""
    known = {other.lower(): other for other in names}
    matches = difflib.get_close_matches(name.lower(), known, 1, cutoff)
    return known[matches[0]] if matches else None


def hint(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for the most similar name, or ""."""
    match = closest(name, names, cutoff)
    return f"; did you mean {match!r}?" if match else ""


def listed(names: Iterable[str]) -> str:
    """The first dozen names as text for a message; "none" if there are no names."""
    words = list(names)
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return f"{', '.join(words[:_SHOWN])}{more}" if words else "none"


def printable(text: str, lines: bool = False) -> str:
    """Text for a terminal: characters that control it are escaped, as in `\\x1b`."""
    stay = "\n\t" if lines else ""  # line ends and tabs
    return "".join(
        c if c.isprintable() or c in stay else c.encode("unicode_escape").decode() for c in text
    )


def cut(text: str) -> str:
    """The beginning and the end of a text that is longer than `MAX_CHARACTERS`."""
    if len(text) <= MAX_CHARACTERS:
        return text
    end = MAX_CHARACTERS // 4
    left_out = f"\n... {len(text) - MAX_CHARACTERS:,} characters ...\n"
    return text[: MAX_CHARACTERS - end - len(left_out)] + left_out + text[-end:]


class LongError(Exception):
    """Replaces an error with a long text as the cause of another one, which has the text."""


def as_cause(error: Exception) -> Exception:
    """The error, or a `LongError` if its text is long, as each traceback would repeat it."""
    if len(str(error)) <= MAX_CHARACTERS:
        return error
    text = f"{type(error).__name__}: {str(error)[:200]} ..."
    return LongError(text).with_traceback(error.__traceback__)


def described(error: BaseException) -> str:
    """`Type: message` of an error, after that of the callback that it reports, if any; cut."""
    # XLA puts the error that a callback raised at the end of a long traceback.
    text = f"{type(error).__name__}: {error}"
    of_callback = callback_error(error)
    return cut(f"{of_callback}, raised by a call to the host\n{text}" if of_callback else text)


def callback_error(error: BaseException) -> str:
    """`Type: message` of the error of a callback, from the message of XLA; else ""."""
    _, mark, traceback = str(error).partition("callback: Traceback (most recent call last):\n")
    after_frames = traceback.rpartition("\n  File ")[2].splitlines()[1:]
    return after_frames[0] if mark and after_frames else ""


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell."""
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


Bytes: TypeAlias = int | dict[str, int]
"""A number of bytes. If it depends on an unknown number of members, a dict with the bytes of `each`
member, and other, `fixed` bytes."""


def add_bytes(counts: Iterable[Bytes]) -> Bytes:
    """The sum of numbers of bytes."""
    per_member, fixed, known = 0, 0, True
    for count in counts:
        if isinstance(count, dict):
            per_member, fixed, known = per_member + count["each"], fixed + count["fixed"], False
        else:
            fixed += count
    return fixed if known else {"each": per_member, "fixed": fixed}


def human_bytes(count: Bytes) -> str:
    """A number of bytes with its unit: `20 B`, `1.5 KiB`, `n x 3.0 MiB`."""
    if isinstance(count, dict):
        fixed = f" + {human_bytes(count['fixed'])}" if count["fixed"] else ""
        return f"n x {human_bytes(count['each'])}{fixed}"
    if count < 1024:
        return f"{count} B"
    size, units = count / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while size >= 1023.95 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.1f} {units[0]}"
