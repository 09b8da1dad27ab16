"""The placements that are active while a program runs."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import numpy as np

from beamjax.errors import OutsideProgramError, PlacementError

Size: TypeAlias = Any
"""Number of members: an int or a symbolic dimension of `jax.export.symbolic_shape`. In the
decorator of a program also None or the name of a parameter, if it is taken from the arguments of
each call."""

Placements: TypeAlias = tuple[tuple[str, Size], ...]
"""Names and sizes of the placements of one program."""

MAX_MEMBERS = 2**31 - 1
"""Largest number of members of a placement: the index and the count of members are int32."""

# One entry per running program, the innermost last. With a plain context variable, `jax.jit` could
# reuse a function that was traced under other placements. A user context is part of the key of
# every JAX cache, and thread-local as well.
_active = jax.make_user_context(())


def check_placements(placements: Mapping[str, Any]) -> Placements:
    """Checks the placements that a user gave."""
    if not isinstance(placements, Mapping):
        raise PlacementError(
            f"program: expected placements as a dict such as {{'clients': 10}}, found "
            f"{placements!r}. Write @program(placements={{'clients': 10}}) or @program(clients=10)."
        )
    if not placements:
        raise PlacementError(
            "program: expected at least one placement, found none. Write "
            "@program(placements={'clients': 10}) or @program(clients=10)."
        )
    return tuple((_check_name(name), _check_size(name, n)) for name, n in placements.items())


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise PlacementError(f"program: the name of a placement is a string, found {name!r}.")
    return name


def _check_size(name: str, n: Any) -> Size:
    if n is None or (isinstance(n, str) and n.isidentifier()):
        return n
    if jax.export.is_symbolic_dim(n):
        return n
    try:
        size = None if isinstance(n, bool) else operator.index(n)
    except TypeError:
        size = None
    if size is None or size < 0:
        raise PlacementError(
            f"program: placement {name!r} has size {n!r}, expected the number of members as an "
            f"int >= 0, the name of the parameter that has the members, or None to take the number "
            f"from the arguments of each call."
        )
    return size


def check_limit(name: str, n: Size) -> None:
    """Raises PlacementError if a placement has more than `MAX_MEMBERS` members."""
    if isinstance(n, int) and n > MAX_MEMBERS:
        raise PlacementError(
            f"placement {name!r} has {n} members, expected at most {MAX_MEMBERS}: the index of a "
            "member is an int32. Make a member of several rows, or call the program for one part "
            "of the members after the other."
        )


@contextmanager
def activate(placements: Placements) -> Iterator[None]:
    """Makes `placements` the innermost program for the duration of a `with` block."""
    for name, n in placements:
        check_limit(name, n)
    observed = _observed.get()
    if observed is not None:
        observed.update(dict.fromkeys(placements))
    with _active((*_active.value, placements)):
        yield


_observed: ContextVar[dict[tuple[str, Size], None] | None] = ContextVar("observed", default=None)


@contextmanager
def observe() -> Iterator[dict[tuple[str, Size], None]]:
    """Collects the placements of all programs that are called in a `with` block, in order."""
    observed: dict[tuple[str, Size], None] = {}
    token = _observed.set(observed)
    try:
        yield observed
    finally:
        _observed.reset(token)


@contextmanager
def unobserved() -> Iterator[None]:
    """Keeps the programs that are called in a `with` block from `observe`."""
    token = _observed.set(None)
    try:
        yield
    finally:
        _observed.reset(token)


def known_size(placement: str) -> Size | None:
    """The size of a placement in the innermost running program that has it, if any."""
    for program in reversed(_active.value):
        for known, n in program:
            if known == placement:
                return n
    return None


class SizeFound(BaseException):
    """Raised to end a trace that looks for the size of a placement, once it is found."""

    # It does not derive from `Exception`, so handlers in the user's function do not catch it.

    def __init__(self, placement: str, size: Size):
        super().__init__(f"placement {placement!r} has {size} members")
        self.placement = placement
        self.size = size


_scope = jax.export.SymbolicScope()


@functools.cache
def size_looked_for(placement: str) -> Size:
    """The symbolic dimension that stands for a size while a trace looks for it."""
    # All traces use the same one, so that they share the caches of JAX.
    (n,) = jax.export.symbolic_shape("n_" + re.sub(r"\W", "_", placement), scope=_scope)
    return n


def is_looked_for(placement: str, n: Size) -> bool:
    """Whether `n` stands for the size of the placement while a trace looks for it."""
    return jax.export.is_symbolic_dim(n) and n is size_looked_for(placement)


_in_body = jax.make_user_context(False)


@contextmanager
def body() -> Iterator[None]:
    """A context in which the body of a placed operator is traced."""
    with _in_body(True):
        yield


def has_members(leaves: Sequence[Any]) -> bool:
    """Whether all arrays have a row for each member of a placement, outside of bodies."""
    if _in_body.value or not leaves:
        return False
    sizes = [n for program in _active.value for _, n in program]
    return any(all(np.shape(leaf)[:1] == (n,) for leaf in leaves) for n in sizes)


def resolve(name: str, placement: str | None) -> tuple[str, Size]:
    """Finds the placement that an operator works on."""
    programs = _active.value
    if not programs:
        raise OutsideProgramError(
            f"{name} is only defined inside a program. Decorate the function that calls it with "
            f"@beamjax.program(placements={{'clients': n}}), n being the number of members."
        )
    if placement is None:
        if len(programs[-1]) > 1:
            raise PlacementError(
                f"{name}: the program has more than one placement, {_names(programs[-1:])}; say "
                f"which with placement=."
            )
        return programs[-1][0]
    for program in reversed(programs):
        for known, n in program:
            if known == placement:
                return known, n
    raise PlacementError(
        f"{name}: unknown placement {placement!r}; the program has {_names(programs)}."
    )


def _names(programs: tuple[Placements, ...]) -> str:
    return ", ".join(sorted({repr(name) for program in programs for name, _ in program}))
