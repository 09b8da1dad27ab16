"""Bytes that a computation holds at once, counted from its jaxpr without compiling it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from beamjax import _compat
from beamjax._compat import scan_counts
from beamjax.bodies.jaxprs import evaluate, nbytes_of

# XLA reports the memory of an executable only after compiling, and without that of its libraries.
# The counts follow two rules of XLA: calls are inlined, and an elementwise operation is computed
# inside of the operations that read it, unless one of them needs its whole result.

_ELEMENTWISE = frozenset(
    """abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim cbrt
    ceil clamp complex concatenate conj convert_element_type copy cos cosh div dynamic_slice eq erf
    erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag integer_pow iota is_finite le log log1p
    logistic lt max min mul ne neg nextafter not or pad pow pvary real reduce_precision rem reshape
    rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    slice sqrt square squeeze stop_gradient sub tan tanh transpose xor""".split()
)
"""Primitives that XLA computes inside of the operation that reads their result."""
_WITH_WORKSPACE = frozenset(
    "cholesky custom_linear_solve eig eigh fft geqrf householder_product lu qr scatter scatter-add "
    "sort svd triangular_solve tridiagonal_solve".split()
)
"""Primitives that copy their operands or need buffers of their own."""
_DRAWS = ("threefry2x32", "random_bits", "random_fold_in")
"""Primitives that XLA's CPU backend computes by a loop over the rounds of a cipher."""
_NOT_CALLS = ("scan", "bj_map", "reduce", "scatter", "select_and", "custom_lin")
"""First letters of primitives that do more with a jaxpr than to evaluate it once."""
WORKSPACE = 3
"""Bytes of such copies and buffers for each byte of the operands, by a rule of thumb."""


class Held(NamedTuple):
    """Bytes that a computation holds at once."""

    peak: float = 0  # the most bytes of values, besides arguments, while an operation runs
    looped: float = 0  # the most that a round of a loop holds, with what it reads; 0 without loops


@dataclass(eq=False)
class Value:
    """A value that counts for each member, or one that is `shared` and does not count."""

    nbytes: float
    shared: bool = False


SHARED = Value(0, shared=True)


class _Operation(NamedTuple):
    name: str
    ins: Sequence[Value]
    outs: Sequence[Value]
    inner: float
    """Bytes that it holds besides its operands and results."""


def held_bytes(closed: Any) -> Held:
    """The bytes that a compiled function holds besides its arguments, results included."""
    jaxpr = getattr(closed, "jaxpr", closed)
    # Here constants, and what is computed from them alone, take memory as well.
    return Operations(Value(0)).inner(closed, [Value(nbytes_of(v.aval)) for v in jaxpr.invars])


@dataclass
class Operations:
    """The operations of a computation in order, with all calls inlined."""

    constant: Value = SHARED  # stands for constants and literals
    _all: list[_Operation] = field(default_factory=list)
    _looped: float = 0

    def call(self, closed: Any, arguments: Sequence[Value]) -> list[Value]:
        """Adds the operations of a jaxpr, and returns its results."""
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = [self.constant] * len(jaxpr.constvars)
        return evaluate(jaxpr, constants, arguments, self._apply, lambda _: self.constant)

    def inner(self, closed: Any, arguments: Sequence[Value]) -> Held:
        """The bytes that a jaxpr holds, which is computed inside of an operation."""
        operations = Operations(self.constant)
        return operations.held(operations.call(closed, arguments))

    def add(self, name: str, ins: Iterable[Value], outs: Sequence[Value], inner: float = 0) -> None:
        """Adds an operation that holds `inner` bytes besides its operands and results."""
        self._all.append(_Operation(name, [v for v in ins if not v.shared], outs, inner))

    def loop(self, entering: Iterable[Value], body: Held) -> float:
        """Adds a loop with the values that a round reads; returns the bytes that it holds."""
        self._looped = max(self._looped, sum(v.nbytes for v in entering) + body.peak, body.looped)
        return body.peak

    def _apply(self, eqn: Any, ins: list[Value]) -> Sequence[Value]:
        if ins and all(value.shared for value in ins):
            return [SHARED] * len(eqn.outvars)
        name, inner = eqn.primitive.name, list(_compat.jaxprs_in_params(eqn.params))
        if len(inner) == 1 and _arity(inner[0]) == len(ins) and not name.startswith(_NOT_CALLS):
            return self.call(inner[0], ins)
        outs = [Value(nbytes_of(var.aval)) for var in eqn.outvars]
        self.add(name, ins, outs, self._inside(eqn, ins, outs, inner))
        return outs

    def _inside(
        self, eqn: Any, ins: Sequence[Value], outs: Sequence[Value], inner: Sequence[Any]
    ) -> float:
        """Bytes that an equation holds besides its operands and results."""
        match eqn.primitive.name:
            case "scan":
                fixed, carried = scan_counts(eqn)
                return self._rounds(inner, eqn.params["jaxpr"], ins[:fixed], ins[fixed:], carried)
            case "while":
                skipped = eqn.params["cond_nconsts"]
                fixed = skipped + eqn.params["body_nconsts"]
                body = eqn.params["body_jaxpr"]
                return self._rounds(inner, body, ins[skipped:fixed], ins[fixed:], len(ins) - fixed)
            case "bj_map":
                held = held_bytes(eqn.params["jaxpr"])
                return max(0, eqn.params["n"] * held.peak - sum(v.nbytes for v in outs))
            case name if name in _DRAWS:
                rounds = WORKSPACE * sum(value.nbytes for value in outs)
                return self.loop([*ins, *outs], Held(rounds))
            case name if name in _WITH_WORKSPACE:
                return WORKSPACE * sum(value.nbytes for value in ins)
        parts = [self._part(x, ins[-_arity(x) :] if _arity(x) else []) for x in inner]
        return max(0, max(parts, default=0) - sum(v.nbytes for v in outs))

    def _part(self, closed: Any, ins: Sequence[Value]) -> float:
        """Bytes that a branch, or another jaxpr inside of an equation, holds."""
        jaxpr = getattr(closed, "jaxpr", closed)
        shared = [v.shared for v in ins] if len(ins) == _arity(closed) else [False] * _arity(closed)
        held = self.inner(closed, _entering(jaxpr.invars, shared))
        self._looped = max(self._looped, held.looped)
        return held.peak

    def _rounds(
        self,
        inner: Sequence[Any],
        closed: Any,
        constants: Sequence[Value],
        others: Sequence[Value],
        carried: int,
    ) -> float:
        """Adds a loop; `others` are the carried values and those of which a round reads a part."""
        shared = [v.shared for v in (*constants, *others)]
        first = len(constants)
        # What is the same for all members at first may differ after a round.
        shared[first : first + carried] = [False] * carried
        entering = _entering(getattr(closed, "jaxpr", closed).invars, shared)
        return self.loop(entering, self.inner(closed, entering))

    def held(self, results: Iterable[Value]) -> Held:
        """The bytes that these operations hold at once, until the last has its results."""
        readers: dict[Value, list[str]] = {}
        for operation in self._all:
            for value in operation.ins:
                readers.setdefault(value, []).append(operation.name)
        returned = {value for value in results if not value.shared}
        # Of each value, those in memory that it is computed from: itself, unless it is fused.
        sources: dict[Value, frozenset[Value]] = {}
        last: dict[Value, int] = {}
        reads: list[frozenset[Value]] = []
        for number, operation in enumerate(self._all):
            # z = add x y; s = reduce_sum z: z is fused, so the reduction reads x and y, which live
            # until then.
            read = frozenset().union(*(sources.get(v, frozenset((v,))) for v in operation.ins))
            fused = operation.name in _ELEMENTWISE and not returned.intersection(operation.outs)
            for value in operation.outs:
                whole = not fused or not _is_fused(readers.get(value, ()))
                sources[value] = frozenset((value,)) if whole else read
            last.update(dict.fromkeys((*read, *operation.outs), number))
            reads.append(read)
        last.update(dict.fromkeys(returned, len(self._all)))
        return Held(self._peak(sources, last), self._looped)

    def _peak(self, sources: dict[Value, frozenset[Value]], last: dict[Value, int]) -> float:
        ends: dict[int, list[Value]] = {}
        for value, number in last.items():
            ends.setdefault(number, []).append(value)
        alive: dict[Value, float] = {}
        now = peak = 0.0
        for number, operation in enumerate(self._all):
            for value in operation.outs:
                if value in sources[value]:
                    alive[value] = value.nbytes
                    now += value.nbytes
            peak = max(peak, now + operation.inner)
            now -= sum(alive.pop(value, 0) for value in ends.get(number, ()))
        return peak


def _entering(variables: Sequence[Any], shared: Sequence[bool]) -> list[Value]:
    pairs = zip(variables, shared, strict=True)
    return [SHARED if same else Value(nbytes_of(var.aval)) for var, same in pairs]


def _is_fused(readers: Sequence[str]) -> bool:
    """Whether XLA computes an elementwise result anew in all operations that read it."""
    # A reduction is another loop, so a value that it reads with others is in memory.
    if len(readers) == 1 and readers[0].startswith(("reduce_", "arg", "bj_reduce_")):
        return True
    return all(name in _ELEMENTWISE for name in readers)


def _arity(closed: Any) -> int:
    return len(getattr(closed, "jaxpr", closed).invars)
