"""Values and statements of a program that is being drawn: straight lines of Python, with types.

Every statement is a few lines of source. Its types are those that JAX infers for that source, so a
table of operations needs no rules for shapes, and what is drawn is always a well-typed program.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import beamjax as bj

NAMES = re.compile(r"\b[av]\d+\b")
NAMESPACE = {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "bj": bj, "collections": collections}
LARGEST = 8.0  # Floats above are squashed, so that errors of rounding stay small.
MAX_SIZE = 4000
FLOATS = {"float16", "bfloat16", "float32", "float64"}
INTS = {"int8", "uint8", "int32", "int64", "uint32"}


@contextlib.contextmanager
def numbers(x64: bool) -> Iterator[None]:
    """Programs are drawn and run where dtypes and ranks only change by what is written down."""
    with (
        warnings.catch_warnings(action="ignore"),
        jax.enable_x64(x64),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield


class MisfitError(Exception):
    """An operation has no operands here, or JAX refuses those that were drawn."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A name in a drawn program, and what is known about it.

    Attributes:
      aval: its type.
      size: a bound on the magnitude of floats.
      exact: floats on a coarse grid that no order of computation changes. Only those may be
        compared, rounded or ranked.
      distinct: random floats; no two are equal, so that max and sort have a derivative.
      placed: it may have the members of a placement along an axis.
    """

    name: str
    aval: Any
    size: float = 1.0
    exact: bool = False
    distinct: bool = False
    placed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def ndim(self) -> int:
        return len(self.aval.shape)

    @property
    def count(self) -> int:
        return int(np.prod(self.aval.shape))

    @property
    def dtype(self) -> str:
        key = jax.dtypes.issubdtype(self.aval.dtype, jax.dtypes.prng_key)
        return "key" if key else np.dtype(self.aval.dtype).name

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATS

    @property
    def integral(self) -> bool:
        return self.dtype in INTS

    @property
    def numeric(self) -> bool:
        return self.dtype != "key"

    @property
    def discrete(self) -> bool:
        return self.exact or self.integral or self.dtype == "bool"

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Statement:
    """Lines of source, and the names that they define."""

    lines: tuple[str, ...]
    defines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclasses.dataclass
class World:
    """What all scopes of one program share."""

    draw: Callable[..., Any]
    placements: dict[str, int]
    x64: bool = False
    seen: set[str] = dataclasses.field(default_factory=set)
    numbers: Any = dataclasses.field(default_factory=itertools.count)


@dataclasses.dataclass
class Scope:
    """The values that a statement may read, and the statements so far.

    Attributes:
      values: of outer scopes too.
      statements: of this scope.
      placements: whose operators may be called here.
      smooth: the scope is differentiated, so only operations with a derivative that no rounding
        changes are drawn; `forward` allows loops that have a derivative in forward mode alone.
      depth: number of functions around.
      own: the values that were made here, parameters among them.
    """

    world: World
    values: list[Value]
    placements: tuple[str, ...]
    smooth: bool = False
    depth: int = 0
    statements: list[Statement] = dataclasses.field(default_factory=list)
    own: list[Value] = dataclasses.field(default_factory=list)

    # --- draws

    def integer(self, low: int, high: int) -> int:
        return self.world.draw(st.integers(low, high))

    def boolean(self) -> bool:
        return self.world.draw(st.booleans())

    def choose(self, options: Sequence[Any]) -> Any:
        if not options:
            raise MisfitError
        return options[self.integer(0, len(options) - 1)]

    def pick(self, fits: Callable[[Value], bool] = lambda v: True) -> Value:
        """One of the values that fit; new ones and placed ones are drawn more often."""
        found = [v for v in self.values if fits(v)]
        new = [v for v in found[-3:] if v in self.own]
        return self.choose(found + new + [v for v in found if v.placed and self.placements] * 2)

    def literal(self) -> str:
        return self.choose(["0.5", "-0.75", "1.25", "2.0", "0.1"])

    # --- parts

    def child(
        self, params: Sequence[Value], *, placements: tuple[str, ...], smooth: bool = False
    ) -> Scope:
        """The scope of a function in this one, which closes over some of its values."""
        closed = self.values if self.boolean() else [v for v in self.values if v.count <= 4]
        values = [*closed, *params]
        smooth = smooth or self.smooth
        return Scope(self.world, values, placements, smooth, self.depth + 1, own=list(params))

    def number(self) -> int:
        return next(self.world.numbers)

    def param(self, aval: Any, like: Value | None = None, **facts: Any) -> Value:
        if like is not None:
            facts = {"size": like.size, "exact": like.exact, "distinct": like.distinct, **facts}
        return Value(f"v{self.number()}", aval, **facts)

    # --- statements

    def add(self, expression: str, *, size: float = 1.0, **facts: Any) -> Value:
        """Adds `name = expression`, with the type that JAX gives it."""
        name = f"v{self.number()}"
        (aval,) = self.infer([f"{name} = {expression}"], [name])
        value = Value(name, aval, size, **facts)
        if value.floating and size > LARGEST and not value.exact:
            expression, value = f"jnp.tanh({expression})", dataclasses.replace(value, size=1.0)
        elif value.dtype == "complex64" and size > LARGEST:
            expression = f"({expression}) / {size:.0f}"
            value = dataclasses.replace(value, size=1.0)
        self._append((f"{name} = {expression}",), (name,))
        return self._keep(value)

    def add_lines(
        self, lines: Sequence[str], names: Sequence[str], facts: Sequence[dict[str, Any]] = ()
    ) -> list[Value]:
        """Adds a statement of several lines that defines `names`."""
        avals = self.infer(lines, names)
        self._append(tuple(lines), tuple(names))
        known = facts or [{}] * len(names)
        return [
            self._keep(Value(name, aval, **fact))
            for name, aval, fact in zip(names, avals, known, strict=True)
        ]

    def _append(self, lines: tuple[str, ...], names: tuple[str, ...]) -> None:
        self.statements.append(Statement(lines, names))

    def _keep(self, value: Value) -> Value:
        read = set(NAMES.findall(self.statements[-1].text))
        mapped = (
            "bj.map_fn" in self.statements[-1].text or "bj.broadcast" in self.statements[-1].text
        )
        if mapped or any(v.placed and v.name in read for v in self.values):
            members = set(self.world.placements.values()) & set(value.shape)
            value = dataclasses.replace(value, placed=bool(members))
        self.values.append(value)
        self.own.append(value)
        return value

    def infer(self, lines: Sequence[str], names: Sequence[str]) -> list[Any]:
        read = set(NAMES.findall("\n".join(lines)))
        values = [v for v in self.values if v.name in read]
        source = [f"def probe({', '.join(v.name for v in values)}):"]
        source += indent([*lines, f"return [{', '.join(names)}]"])
        namespace = dict(NAMESPACE)
        exec("\n".join(source), namespace)
        probe = bj.program(placements=self.world.placements)(namespace["probe"])
        try:
            avals = jax.eval_shape(probe, *(v.aval for v in values))
        except (TypeError, ValueError, NotImplementedError, ZeroDivisionError) as error:
            raise MisfitError(f"{error}") from error
        if any(np.prod(aval.shape) > MAX_SIZE or len(aval.shape) > 5 for aval in avals):
            raise MisfitError("large")
        for aval in avals:
            if jax.dtypes.issubdtype(aval.dtype, jnp.inexact):
                real = np.dtype(aval.dtype).name
                self.world.seen.add(
                    {"complex64": "float32", "complex128": "float64"}.get(real, real)
                )
        return avals

    def body(self, results: Sequence[str]) -> list[str]:
        """The lines of a function with these results, without what they don't need."""
        needed = set(NAMES.findall(" ".join(results)))
        kept = []
        for statement in reversed(self.statements):
            if needed & set(statement.defines):
                needed |= set(NAMES.findall(statement.text))
                kept.append(statement)
        return [line for statement in reversed(kept) for line in statement.lines]


def indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
