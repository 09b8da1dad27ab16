"""A staged jaxpr as one straight line of equations: calls are inlined, control flow is kept whole.

`jit`, `remat`, `custom_jvp` and `custom_vjp` calls are inlined, because differentiation is over by
the time a program is planned and a call boundary would hide the placed operators inside it. Scans,
whiles and conds stay single equations.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

import beamjax
from beamjax import _compat
from beamjax.errors import StagingError

# Primitives that call a jaxpr once, and the parameters that hold it in some version of JAX.
CALLS = frozenset(
    """
    jit pjit closed_call core_call composite custom_jvp_call custom_vjp_call custom_vmap_call
    custom_lin remat remat2 checkpoint
    """.split()
)
CALLED = ("jaxpr", "call_jaxpr", "call")
# Primitives whose results are their operands, as far as values go.
IDENTITIES = frozenset(
    """
    copy device_put layout_constraint mesh_cast name optimization_barrier reshard
    sharding_constraint stop_gradient with_memory_space_constraint
    """.split()
)
CONTROL_FLOW = frozenset({"scan", "while", "cond"})
HOST_CALLS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})
PLACED_OPERATOR_PREFIX = "bj_"


@dataclass(eq=False, slots=True)
class Var:
    """One value of a flat program. Compared and hashed by identity."""

    name: str
    aval: Any

    def __repr__(self) -> str:
        return f"{self.name}:{self.aval.str_short()}"


Atom = Var | jex.Literal


def aval_of(atom: Atom) -> Any:
    """The type of an atom, which JAX declares for literals more loosely than it is."""
    return atom.aval


@dataclass(eq=False, slots=True)
class Eqn:
    """One primitive applied to atoms.

    `line` is the user's `file:line (function)` or empty; an equation with `effects` is evaluated
    once, whether its results are used or not.
    """

    primitive: jex.Primitive
    params: dict[str, Any]
    inputs: list[Atom]
    outputs: list[Var]
    line: str
    effects: frozenset[Any] = frozenset()

    def __repr__(self) -> str:
        outs = " ".join(map(repr, self.outputs))
        ins = " ".join(atom.name if isinstance(atom, Var) else str(atom) for atom in self.inputs)
        return f"{outs} = {self.primitive.name} {ins}".rstrip() + f"    # {self.line}"


@dataclass(eq=False)
class FlatProgram:
    """Equations in order, over inputs (arguments first, then closed-over constants)."""

    inputs: list[Var]
    constants: list[Any]
    eqns: list[Eqn] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)

    @property
    def arguments(self) -> list[Var]:
        return self.inputs[: len(self.inputs) - len(self.constants)]

    def __str__(self) -> str:
        outs = " ".join(atom.name if isinstance(atom, Var) else str(atom) for atom in self.outputs)
        lines = [f"inputs {' '.join(map(repr, self.inputs))}", *map(repr, self.eqns)]
        return "\n  ".join(lines) + f"\noutputs {outs}"


def flatten(closed: jex.ClosedJaxpr) -> FlatProgram:
    """Inlines every call of `closed`.

    Raises:
      StagingError: placed operators stand inside a scan, while or cond, or an equation has an
        effect that is no call to the host; the message names the user's line.
    """
    jaxpr = closed.jaxpr
    flat = FlatProgram([Var(f"arg{i}", v.aval) for i, v in enumerate(jaxpr.invars)], [])
    arguments = list(flat.inputs)
    inliner = _Inliner(flat)
    flat.outputs = inliner.inline(closed, arguments, "")
    return flat


class _Inliner:
    """Appends the equations of a jaxpr, and of all that it calls, to a flat program."""

    def __init__(self, flat: FlatProgram):
        self.flat = flat
        self.names = map("v{}".format, itertools.count())
        self.constants: dict[int, Var] = {}

    def inline(self, closed: Any, arguments: Sequence[Atom], caller: str) -> list[Atom]:
        # remat holds an open jaxpr, which has no constants.
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = [self.constant(value) for value in getattr(closed, "consts", ())]
        env: dict[Any, Atom] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            line = user_line(eqn) or caller
            inputs = [read(v) for v in eqn.invars]
            inner = _called(eqn)
            if inner is not None:
                env.update(zip(eqn.outvars, self.inline(inner, inputs, line), strict=True))
                continue
            if eqn.primitive.name in IDENTITIES:
                env.update(zip(eqn.outvars, inputs, strict=True))
                continue
            _refuse(eqn, line)
            outputs = [Var(next(self.names), v.aval) for v in eqn.outvars]
            effects = frozenset(_compat.outer_effects(eqn.effects))
            flat_eqn = Eqn(eqn.primitive, dict(eqn.params), inputs, outputs, line, effects)
            self.flat.eqns.append(flat_eqn)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def constant(self, value: Any) -> Var:
        if id(value) not in self.constants:
            var = Var(f"const{len(self.flat.constants)}", jax.typeof(value))
            self.constants[id(value)] = var
            self.flat.inputs.append(var)
            self.flat.constants.append(value)
        return self.constants[id(value)]


def _called(eqn: Any) -> Any:
    """The jaxpr that an equation calls, if it is to be inlined."""
    if eqn.primitive.name not in CALLS:
        return None
    inner = next(eqn.params[key] for key in CALLED if key in eqn.params)
    # Mutable references can't cross the border of a step, so what makes and uses them stays whole.
    jaxpr = getattr(inner, "jaxpr", inner)
    whole = any(map(_makes_reference, jaxpr.eqns)) and not contains_placed_operators(eqn)
    return None if whole else inner


def _makes_reference(eqn: Any) -> bool:
    return any(_is_reference(v.aval) for v in eqn.outvars)


def _is_reference(aval: Any) -> bool:
    return not isinstance(aval, jax.core.ShapedArray)


def _refuse(eqn: Any, line: str) -> None:
    name, where = eqn.primitive.name, line or "in the program"
    if name in CONTROL_FLOW and contains_placed_operators(eqn):
        raise StagingError(
            f"{where}: a {name} holds placed operators (map_fn, broadcast, reduce_*). A plan can't "
            "hold that yet: write the rounds as a Python loop, or call the program once a round. "
            "Control flow inside a map_fn body is no problem, and the program as it stands runs "
            "under jax.jit"
        )
    if any(_is_reference(v.aval) for v in eqn.outvars):
        raise StagingError(
            f"{where}: {name} makes a mutable reference outside of the body of a map_fn. Use it "
            "inside one, or in a function that is decorated with jax.jit and holds no placed "
            "operators"
        )
    effects = _compat.outer_effects(eqn.effects)
    if effects and host_call(eqn) is None:
        kinds = ", ".join(sorted(str(effect) for effect in effects))
        raise StagingError(
            f"{where}: {name} has a side effect ({kinds}), which a plan can't hold: take it out of "
            "the function to run it on Beam"
        )


def host_call(eqn: Any) -> tuple[str, str] | None:
    """The name and the user's line of a call to the host in an equation, or in what it calls."""
    if eqn.primitive.name in HOST_CALLS:
        return eqn.primitive.name, _line(eqn)
    for sub in jex.jaxprs_in_params(eqn.params):
        for inner in getattr(sub, "jaxpr", sub).eqns:
            found = host_call(inner)
            if found:
                return found[0], found[1] or _line(eqn)
    return None


def _line(eqn: Any) -> str:
    return eqn.line if isinstance(eqn, Eqn) else user_line(eqn)


def contains_placed_operators(eqn: Any) -> bool:
    """Whether a placed operator stands anywhere in the jaxprs that an equation holds."""
    return any(
        inner.primitive.name.startswith(PLACED_OPERATOR_PREFIX) or contains_placed_operators(inner)
        for sub in jex.jaxprs_in_params(eqn.params)
        for inner in getattr(sub, "jaxpr", sub).eqns
    )


def user_line(eqn: Any) -> str:
    """`file:line (function)` of the innermost frame that is no library's."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def _libraries() -> tuple[str, ...]:
    packages = [os.path.dirname(os.path.abspath(str(m.__file__))) for m in (jax, beamjax, np)]
    # In a checkout, the sub-packages lie beside `beamjax/` and not in it.
    interpreters = os.path.dirname(os.path.abspath(__file__))
    pipelines = os.path.join(os.path.dirname(interpreters), "pipelines")
    return (*(folder + os.sep for folder in (*packages, interpreters, pipelines)), "<frozen ")


_LIBRARIES = _libraries()
