"""Lines of text in drawings: how wide they are, and how they are made short."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

TITLE, SMALL = 13.0, 11.0
"""Sizes of letters, which all are equally wide: 0.61 of their size."""
LINE, PAD = 15.0, 9.0
MOST = 44
"""Letters of a line in a box."""


@dataclass(frozen=True)
class Words:
    """One line of text in a box: `kind` says how it looks."""

    text: str
    kind: str = ""


def letters(text: str) -> int:
    """Columns that a text takes in letters of one width."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def text_width(words: Words) -> float:
    """Pixels of a line of text."""
    return letters(words.text) * 0.61 * (TITLE if words.kind == "name" else SMALL)


def shortened(text: str, most: int = MOST) -> str:
    """A line with at most so many letters."""
    text = " ".join(text.split())
    if letters(text) <= most:
        return text
    kept = ""
    for character in text:
        if letters(kept + character) > most - 1:
            break
        kept += character
    return kept.rstrip() + "…"


def place_of(line: str) -> str:
    """`file.py:3` of a line of the user, without the folder and the function."""
    return os.path.basename(line.partition(" (")[0])


def label_size(words: Sequence[str]) -> tuple[float, float]:
    """Width and height of the label of a line."""
    widest = max(text_width(Words(word)) for word in words)
    return widest + 8, LINE * len(words) + 4
