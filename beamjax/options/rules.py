"""Rules for the values of options: how to read them, and what error messages expect."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from beamjax.storage import files

MEMBER_LOOPS = ("vmap", "batches", "loop")
"""How a shard is computed: all members at once, some at once, or sequentially."""
MULTIPLE = 8
"""Shard sizes and batches are multiples of this, so that the bits of a member do not depend on its
row in the batch."""


class Rule(NamedTuple):
    """A rule for the values of one option."""

    expected: str  # what is expected, in words, for messages
    # Returns the value for what a user gave, which may be text, and returns its own results
    # unchanged; raises ValueError for anything else.
    read: Callable[[Any], Any]
    choices: tuple[str, ...] = ()  # the possible values as text, if they are few
    is_path: bool = False


def one_of(*choices: str | bool) -> Rule:
    """A rule for one of a few values."""

    def read(chosen: Any) -> Any:
        # Text is compared by value, True and False by identity: 1 is equal to True.
        text = chosen.lower() if isinstance(chosen, str) else None
        for choice in choices:
            if chosen is choice or text == str(choice).lower():
                return choice
        raise ValueError

    words = ", ".join(map(str, choices))
    return Rule(f"one of {words}", read, tuple(str(choice).lower() for choice in choices))


def number(kind: type[int] | type[float], expected: str, fits: Callable[[Any], bool]) -> Rule:
    """A rule for a number; an int is also accepted as a `float`."""

    def read(chosen: Any) -> int | float:
        value = kind(chosen) if isinstance(chosen, str) else chosen
        if type(value) not in {int, kind} or not fits(value):
            raise ValueError
        return value

    return Rule(expected, read)


def path(what: str, *endings: str) -> Rule:
    """A rule for the path or URL of a file or a folder, perhaps with one of some endings."""

    def read(chosen: Any) -> str:
        if not isinstance(chosen, str | os.PathLike) or not os.fspath(chosen):
            raise ValueError
        if endings and not os.fspath(chosen).lower().endswith(endings):
            raise ValueError
        return files.local_path(os.fspath(chosen))

    with_ending = f" that ends in {', '.join(endings)}" if endings else ""
    return Rule(f"the path or URL of a {what}{with_ending}", read, is_path=True)


eights = number(int, "a positive multiple of 8", lambda n: n > 0 and n % MULTIPLE == 0)
at_least_1 = number(int, "a number from 1", lambda n: n >= 1)
seconds = number(float, "a number of seconds above 0", lambda x: 0 < x < math.inf)
share = number(float, "a share from 0 to 1", lambda x: 0 <= x <= 1)
nbytes = number(int, "a number of bytes", lambda n: n >= 0)
boolean = one_of(True, False)

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("kMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate("KMGT", 1)}


def _memory(chosen: Any) -> int:
    value = chosen
    if isinstance(chosen, str):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]?i?B|)", chosen)
        if match is None or match[2] not in _UNITS:
            raise ValueError
        from fractions import Fraction  # few options are text

        value = int(Fraction(match[1]) * _UNITS[match[2]])
    if type(value) is not int or value <= 0:
        raise ValueError
    return value


memory = Rule(
    "a number of bytes, or a text such as '2GiB' or '500MB' with one of "
    + ", ".join(filter(None, _UNITS)),
    _memory,
)

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def _platforms(chosen: Any) -> tuple[str, ...]:
    names = chosen.split(",") if isinstance(chosen, str) else chosen
    if not isinstance(names, Sequence) or not names or not set(names) <= set(PLATFORMS):
        raise ValueError
    return tuple(names)


platforms = Rule(f"a list of {', '.join(PLATFORMS)}", _platforms)
