"""Lines of text in drawings: their widths, and how long ones are shortened."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

TITLE, SMALL = 13.0, 11.0
"""Font sizes in pixels. All letters of the font are 0.61 of its size wide."""
LINE, PAD = 15.0, 9.0
MOST = 44
"""Largest number of letters of a line in a box."""


@dataclass(frozen=True)
class Words:
    """A line of text in a box; `kind` is its CSS class."""

    text: str
    kind: str = ""


def letters(text: str) -> int:
    """Returns the columns of a text in a monospaced font."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def text_width(words: Words) -> float:
    """Returns the width of a line of text in pixels."""
    return letters(words.text) * 0.61 * (TITLE if words.kind == "name" else SMALL)


def shortened(text: str, most: int = MOST) -> str:
    """Returns a line with at most so many letters."""
    text = " ".join(text.split())
    if letters(text) <= most:
        return text
    short = ""
    for character in text:
        if letters(short + character) > most - 1:
            break
        short += character
    return short.rstrip() + "…"


def place_of(line: str) -> str:
    """Returns `file.py:3` of a line of the user, without the folder and the function."""
    return os.path.basename(line.partition(" (")[0])


def label_size(words: Sequence[str]) -> tuple[float, float]:
    """Returns the width and height of the label of a line."""
    widest = max(text_width(Words(word)) for word in words)
    return widest + 8, LINE * len(words) + 4
