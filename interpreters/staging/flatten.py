"""Flattens a staged jaxpr to blocks of equations: inlines calls, preserves control flow.

`y = jit[x -> f x] x` becomes the equations of f. This is so for jit, remat, custom_jvp, custom_vjp
and solvers of custom_linear_solve (derivatives are taken before a program is planned, and a call
would hide placed operators), and for primitives of hijax, which have no rules. Mutable references
become the values that they hold. A scan, while or cond with placed operators gets blocks; any
other one stays a single equation.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from beamjax import _compat
from beamjax.bodies.jaxprs import equations_inside, evaluate
from beamjax.errors import StagingError
from beamjax.interpreters import dimensions
from beamjax.interpreters.program import (
    Atom,
    BranchEqn,
    Eqn,
    FlatBlock,
    FlatProgram,
    LoopEqn,
    Var,
    WholeEqn,
    aval_of,
    is_placed_operator,
)
from beamjax.interpreters.staging import control_flow
from beamjax.interpreters.staging.float0 import FLOAT0, without_float0
from beamjax.interpreters.staging.lines import find_equation, user_line
from beamjax.interpreters.staging.simplify import hoist, prune
from beamjax.ops.weights import unweighted

CALLS = frozenset(
    """
    jit pjit closed_call core_call composite custom_jvp_call custom_vjp_call custom_vmap_call
    custom_lin remat remat2 checkpoint linear_call eval_jaxpr
    """.split()
)
"""Primitives that call a jaxpr once."""
CALLED = ("jaxpr", "call_jaxpr", "call", "callee")
"""Parameters that hold the called jaxpr, in all supported versions of JAX."""
IDENTITIES = frozenset(
    """
    copy device_put layout_constraint mesh_cast name optimization_barrier reshard
    sharding_constraint stop_gradient with_memory_space_constraint
    """.split()
)
"""Primitives that return the values of their operands."""
HOST_CALLS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})


def flatten(closed: _compat.ClosedJaxpr, unroll: bool = False) -> FlatProgram:
    """Inlines all calls; `unroll` also inlines scans and conds with placed operators."""
    if _makes_references(closed.jaxpr):
        closed = _compat.without_references(closed)
    # Results of dtype float0 are constants of that dtype; everything else computes with bools.
    types: list[Any] = [v.aval for v in closed.jaxpr.outvars]
    closed = without_float0(closed)
    jaxpr = closed.jaxpr
    arguments = [Var(f"arg{i}", v.aval) for i, v in enumerate(jaxpr.invars)]
    flat = FlatProgram([*arguments], unrolled=unroll)
    inliner = Inliner(flat)
    outputs = inliner.inline(closed, arguments, "")
    for var, atom, aval in zip(jaxpr.outvars, outputs, types, strict=True):
        if aval.dtype == FLOAT0:
            flat.outputs.append(_compat.Literal(np.zeros(aval.shape, FLOAT0), aval))
        elif not isinstance(var, _compat.Literal) and var in jaxpr.invars:
            # The program returns its argument as it is, with any map around it inlined.
            flat.outputs.append(atom)
        else:
            flat.outputs.append(inliner.program_output(atom))
    prune(flat)
    return flat


class Inliner:
    """Appends the equations of a jaxpr, and of all that it calls, to the current block."""

    def __init__(self, flat: FlatProgram):
        self.flat = flat
        self.block: FlatBlock = flat
        self.names = map("v{}".format, itertools.count())
        self.constants: dict[int, Var] = {}
        # For each value that a map returns unchanged, that map.
        self.maps: dict[Var, Eqn] = {}
        # For each result of a broadcast, the placement and the server value.
        self.broadcasts: dict[Atom, tuple[str, Atom]] = {}
        # The name stacks of the current equation and of the calls around it.
        self.name_stack = ""

    def continued(self, flat: FlatProgram) -> Inliner:
        """An inliner that adds to `flat`, a copy of the program of this one."""
        # A shallow copy: names must stay unique, and the facts about values hold in the copy too.
        inliner = copy.copy(self)
        inliner.flat = inliner.block = flat
        constants = flat.inputs[len(flat.arguments) :]
        inliner.constants = dict(zip(map(id, flat.constants), constants, strict=True))
        return inliner

    def inline(self, closed: Any, arguments: Sequence[Atom], caller: str) -> list[Atom]:
        outer = self.name_stack

        def apply(eqn: Any, inputs: list[Atom]) -> Sequence[Atom]:
            self.name_stack = f"{outer}/{eqn.source_info.name_stack}"
            line = user_line(eqn) or caller
            inner, operands = _called(eqn, inputs)
            if inner is not None:
                return self.inline(inner, operands, line)
            return inputs if eqn.primitive.name in IDENTITIES else self.equation(eqn, inputs, line)

        # The jaxpr of remat is open, so it has no constants.
        constants = [self.constant(value) for value in getattr(closed, "consts", ())]
        outputs = evaluate(closed, constants, arguments, apply, lambda literal: literal)
        self.name_stack = outer
        return outputs

    def equation(self, eqn: Any, inputs: list[Atom], line: str) -> Sequence[Atom]:
        """Appends one equation, or the equations that it is inlined to."""
        primitive = eqn.primitive
        outputs = self.fresh(eqn.outvars)
        control = control_flow.EQUATIONS.get(primitive.name)
        if control is not None and contains_placed_operators(eqn):
            # A scan of one round is its body. Without a driver, all rounds are inlined
            # (`unrolled`).
            rounds = eqn.params.get("length")
            if rounds == 1 or (self.flat.unrolled and rounds is not None):
                return control_flow.unrolled(self, eqn, inputs, line)
            # A branch without a driver computes all cases, and selects among them.
            if self.flat.unrolled and primitive.name == "cond":
                return control_flow.selected(self, eqn, inputs, line)
            self.block.eqns.append(control(self, eqn, inputs, outputs, line))
            return outputs
        if primitive.name == "concatenate":
            # `jnp.roll(x, 0)` concatenates all members and none of them.
            axis = eqn.params["dimension"]
            inputs = [atom for atom in inputs if aval_of(atom).shape[axis] != 0] or inputs[:1]
            if len(inputs) == 1 and aval_of(inputs[0]) == outputs[0].aval:
                return inputs
        if primitive.name == "split":
            return self.inline(_as_slices(eqn), inputs, line)
        if _has_no_members(eqn):
            # There is nothing to distribute, and a shard can't be empty.
            return self.inline(_as_arrays(eqn), inputs, line)
        dim = dimensions.size_of(eqn)
        if dim is not None:
            return [self.number(dim, outputs[0].aval.dtype, line)]
        _refuse(eqn, line)
        params = dict(eqn.params)
        if primitive.name == "bj_map":
            params, inputs = self.hoisted(params, inputs, line)
            params, inputs = self.shared(params, inputs)
        elif primitive.name == "bj_broadcast":
            self.broadcasts[outputs[0]] = params["placement"], inputs[0]
        effects = frozenset(_compat.outer_effects(eqn.effects))
        new = Eqn(primitive, params, inputs, outputs, line, effects=effects)
        if not new.is_placed_operator and (weights := unweighted(self.name_stack)):
            self.flat.unweighted.update(dict.fromkeys(outputs, weights))
        if primitive.name == "bj_map":
            dimensions.share_sizes(new, self.number)
        if control is not None:

            def expand(program: FlatProgram) -> LoopEqn | BranchEqn:
                structure = control(self.continued(program), eqn, inputs, outputs, line)
                # What a round computes and nothing reads must not be a reason to gather.
                for block in structure.blocks:
                    prune(block)
                return structure

            new = WholeEqn(primitive, params, inputs, outputs, line, expand, effects=effects)
        self.block.eqns.append(new)
        return self.passed_through(new) if primitive.name == "bj_map" else outputs

    def number(self, dim: Any, dtype: Any, line: str) -> Atom:
        """A server value for a symbolic dimension, such as an unknown number of members."""
        evaluate, sizes = dimensions.size_function(dim, dtype, self.flat.sizes)
        return self.applied(evaluate, sizes, line)

    def hoisted(
        self, params: dict[str, Any], inputs: list[Atom], line: str
    ) -> tuple[dict[str, Any], list[Atom]]:
        """Parameters and operands of a map without computations on all members, see `hoist`."""
        served = params["num_broadcast"]
        hoisted = hoist(params["jaxpr"], served, params["n"])
        if hoisted is None:
            return params, inputs
        before, body = hoisted
        values = self.inline(before, inputs[:served], line)
        params = {**params, "jaxpr": body, "num_broadcast": len(values) + served}
        return params, [*values, *inputs]

    def shared(
        self, params: dict[str, Any], inputs: list[Atom]
    ) -> tuple[dict[str, Any], list[Atom]]:
        """Parameters and operands of a map that reads server values instead of their broadcasts."""
        # b = bj_broadcast w; y = bj_map b x  becomes  y = bj_map[num_broadcast=1] w x.
        # Under vmap, equations of server values are then evaluated once for all members, and shared
        # weights are held once. A broadcast that the body returns stays, since it is a placed
        # result.
        served, body = params["num_broadcast"], params["jaxpr"].jaxpr
        server_values: dict[int, Atom] = {}
        for number, atom in enumerate(inputs[served:], served):
            placement, value = self.broadcasts.get(atom, ("", atom))
            if placement == params["placement"] and body.invars[number] not in body.outvars:
                server_values[number] = value
        # A map needs an operand with members.
        if not server_values or len(server_values) == len(inputs) - served:
            return params, inputs
        rest = [number for number in range(served, len(inputs)) if number not in server_values]
        order = [*range(served), *server_values, *rest]
        names = body.debug_info.with_unknown_names()
        body = body.replace(invars=[body.invars[i] for i in order], debug_info=names)
        closed = _compat.ClosedJaxpr(body, params["jaxpr"].consts)
        params = {**params, "jaxpr": closed, "num_broadcast": served + len(server_values)}
        return params, [server_values.get(number, inputs[number]) for number in order]

    def passed_through(self, eqn: Eqn) -> list[Atom]:
        """The results of a map; one that the body returns unchanged is the operand itself."""
        body = eqn.params["jaxpr"].jaxpr
        operands = dict(zip(body.invars, eqn.inputs, strict=True))
        placed = set(body.invars[eqn.params["num_broadcast"] :])
        results: list[Atom] = []
        for inner, result in zip(body.outvars, eqn.outputs, strict=True):
            same = not isinstance(inner, _compat.Literal) and inner in placed
            results.append(operands[inner] if same else result)
            if same and isinstance(operands[inner], Var):
                self.maps.setdefault(operands[inner], eqn)
                self.flat.mapped[operands[inner]] = eqn.params["placement"], eqn.params["n"]
        return results

    def program_output(self, atom: Atom) -> Atom:
        """An output of the program; an input that a map returned goes through an identity map."""
        # `transform` returns a placed PCollection for the result of a map, but an array for an
        # input.
        eqn = self.maps.get(atom) if isinstance(atom, Var) and atom in self.flat.inputs else None
        if eqn is None or not isinstance(atom, Var):
            return atom
        member = jax.ShapeDtypeStruct(atom.aval.shape[1:], atom.aval.dtype)
        identity = jax.make_jaxpr(lambda v: v)(member)
        params = {**eqn.params, "jaxpr": identity, "num_broadcast": 0}
        (out,) = outputs = [Var(next(self.names), atom.aval)]
        self.block.eqns.append(Eqn(eqn.primitive, params, [atom], outputs, eqn.line))
        return out

    def nested(self, params: list[Var], inline: Callable[[], Sequence[Atom]]) -> FlatBlock:
        """A new block with the equations that `inline` appends; its outputs are variables."""
        outer, self.block = self.block, FlatBlock(params)
        outputs = [self.named(atom) for atom in inline()]
        block, self.block = self.block, outer
        block.outputs = list(outputs)
        return block

    def applied(self, function: Callable[..., Any], atoms: Sequence[Atom], line: str) -> Atom:
        """The result of a function of arrays, whose equations are appended to the current block."""
        (result,) = self.inline(jax.make_jaxpr(function)(*map(aval_of, atoms)), atoms, line)
        return result

    # ---------------------------------------------------------------- values

    def fresh(self, variables: Sequence[Any]) -> list[Var]:
        """New variables with the types of these variables of a jaxpr."""
        return [Var(next(self.names), v.aval) for v in variables]

    def named(self, atom: Atom) -> Var:
        """An atom as a variable."""
        if isinstance(atom, Var):
            return atom
        return self.constant(np.asarray(atom.val, aval_of(atom).dtype))

    def constant(self, value: Any) -> Var:
        # By identity: jaxprs that close over one array share it, and `flat.constants` holds it
        # alive.
        if id(value) not in self.constants:
            var = Var(f"const{len(self.flat.constants)}", jax.typeof(value))
            self.constants[id(value)] = var
            self.flat.inputs.append(var)
            self.flat.constants.append(value)
        return self.constants[id(value)]


def _called(eqn: Any, inputs: list[Atom]) -> tuple[Any, list[Atom]]:
    """The jaxpr that an equation calls, with its operands; None if it must not be inlined."""
    meaning = _compat.meaning_of_high(eqn)
    if meaning is not None:
        return meaning, inputs
    if eqn.primitive.name == "custom_linear_solve":
        # The other jaxprs (products with the matrix, transposed solver) are only for derivatives.
        lengths = eqn.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        last = first + lengths.solve
        right_sides = inputs[last + lengths.transpose_solve :]
        return eqn.params["jaxprs"].solve, [*inputs[first:last], *right_sides]
    if eqn.primitive.name not in CALLS:
        return None, inputs
    inner = next(eqn.params[key] for key in CALLED if key in eqn.params)
    # Mutable references can't be passed between steps, so a call that uses them stays one equation.
    jaxpr = getattr(inner, "jaxpr", inner)
    whole = any(map(_makes_reference, jaxpr.eqns)) and not contains_placed_operators(eqn)
    return (None if whole else inner), inputs


def _has_no_members(eqn: Any) -> bool:
    """Whether an equation is a placed operator of a placement without members."""
    if not is_placed_operator(eqn.primitive):
        return False
    n = eqn.params["n"] if "n" in eqn.params else eqn.invars[0].aval.shape[0]
    return isinstance(n, int) and n == 0


def _as_arrays(eqn: Any) -> _compat.ClosedJaxpr:
    """A jaxpr without placed operators that computes the same as a placed operator."""
    layout = {key: None for key in ("mesh", "spmd_axis_name") if key in eqn.params}
    function = functools.partial(eqn.primitive.impl, **{**eqn.params, **layout})
    return jax.make_jaxpr(function)(*(var.aval for var in eqn.invars))


def _as_slices(eqn: Any) -> _compat.ClosedJaxpr:
    """A jaxpr of slices that computes the same as a split: slices have more rules."""
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    ends = list(itertools.accumulate(sizes))
    pairs = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    function = lambda x: [jax.lax.slice_in_dim(x, *pair, axis=axis) for pair in pairs]
    return jax.make_jaxpr(function)(eqn.invars[0].aval)


def _makes_reference(eqn: Any) -> bool:
    return any(_is_reference(v.aval) for v in eqn.outvars)


def _makes_references(jaxpr: Any) -> bool:
    """Whether a jaxpr makes a reference outside of the bodies of placed operators."""
    return any(
        _makes_reference(eqn)
        or any(
            _makes_references(getattr(sub, "jaxpr", sub))
            for sub in _compat.jaxprs_in_params(eqn.params)
        )
        for eqn in jaxpr.eqns
        if not is_placed_operator(eqn.primitive)
    )


def _is_reference(aval: Any) -> bool:
    return not isinstance(aval, jax.core.ShapedArray)


def _refuse(eqn: Any, line: str) -> None:
    name, where = eqn.primitive.name, line or "in the program"
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
    """The name and the user's line of a call to the host in an equation or its jaxprs, or None."""
    return find_equation(eqn, lambda inner: inner.primitive.name in HOST_CALLS)


def contains_placed_operators(eqn: Any) -> bool:
    """Whether the jaxprs of an equation hold a placed operator."""
    return any(is_placed_operator(inner.primitive) for inner in equations_inside(eqn))
