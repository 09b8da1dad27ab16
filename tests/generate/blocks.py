"""Statements that hold functions: maps over members, control flow and transformations."""

from __future__ import annotations

import jax
import numpy as np

from .operations import OPERATIONS, Operation, is_float, members, named, operation, same
from .scope import NAMES, MisfitError, Scope, Value, indent

MAX_DEPTH = 2


def fill(s: Scope, low: int, high: int) -> None:
    """Adds statements to a scope."""
    for _ in range(s.integer(low, high)):
        extend(s)


def fill_rounds(s: Scope, low: int, high: int) -> None:
    """The same for a loop or a branch, which mostly holds placed operators where it may."""
    if s.placements and s.depth < MAX_DEPTH and s.integer(0, 3):
        for names in (["map_fn"], ["reduce_sum", "reduce_mean", "reduce_extreme"]):
            attempt(s, OPERATIONS[s.choose(names)])
    fill(s, low, high)


def attempt(s: Scope, op: Operation) -> bool:
    """Adds a statement, if there are operands for it."""
    try:
        op.apply(s)
    except MisfitError:
        return False
    return True


def extend(s: Scope) -> None:
    """Adds one statement, of the first operation drawn that has operands here."""
    # The first of a list is what is drawn most.
    table = [
        op
        for op in sorted(OPERATIONS.values(), key=lambda op: op.group != "maps")
        if (op.smooth or not s.smooth)
        and (s.placements or op.group not in ("operators", "maps"))
        and (s.depth < MAX_DEPTH or op.group not in BLOCKS)
        for _ in range(op.weight)
    ]
    for _ in range(6):
        if attempt(s, s.choose(table)):
            return


BLOCKS = ("maps", "control_flow", "inner_control_flow", "transformations")


def function(s: Scope, c: Scope, params: list[Value], results: str) -> tuple[str, list[str]]:
    """A name and the lines of a function."""
    name = f"f{s.number()}"
    lines = [f"def {name}({', '.join(map(str, params))}):"]
    return name, lines + indent([*c.body([results]), f"return {results}"])


def outputs(c: Scope, most: int, fits=lambda v: True) -> list[Value]:
    """Values that were made in a scope and that nothing there reads, or others if there are none.

    At most `most` of them, new ones first.
    """
    read = {name for st in c.statements for name in NAMES.findall(st.text)
            if name not in st.defines}  # fmt: skip
    own = [v for v in reversed(c.own) if fits(v)]
    made = [v for v in own if any(v.name in st.defines for st in c.statements)]
    found = [v for v in made if v.name not in read] or made or own
    if not found:
        raise MisfitError
    return found[: c.integer(1, most)] if c.boolean() else found[:most]


def like(c: Scope, v: Value) -> str:
    """An expression of the shape and dtype of `v`, made of what is in a scope."""
    alike = [
        w for w in c.own
        if w.shape == v.shape and w.dtype == v.dtype and w != v
        and w.aval.weak_type == v.aval.weak_type
    ]  # fmt: skip
    if alike and c.boolean():
        return alike[-1].name if not v.floating else f"jnp.tanh({alike[-1]})"
    made = [w for w in c.own if w.numeric and w != v and w.count > 0] or [v]
    w = c.choose(made[-3:])
    if v.floating:
        w = w if w.dtype != "complex64" else v
        return f"jnp.tanh({v} + 0.1 * jnp.sum({w}).astype({v.dtype!r}))"
    if v.integral:
        other = f"jnp.sum({w}).astype({v.dtype!r})" if w.discrete and not w.floating else "1"
        return f"{v} + {other}"
    if v.dtype == "bool":
        return f"~{v}"
    if v.dtype == "key":
        return f"jax.random.fold_in({v}, 3)" if v.ndim == 0 else v.name
    return f"{v} * 0.5 + 0.25"


def scalar_predicate(s: Scope) -> str:
    """A bool that no rounding changes."""
    v = s.pick(lambda v: v.discrete or v.dtype in ("float32", "float64"))
    if v.dtype == "bool":
        return f"jnp.any({v})"
    if v.integral:
        return f"jnp.sum({v}) % 2 == 0"
    return f"jnp.sum({v}) > 0.13719"


# --- maps


@operation("maps", weight=14)
def map_fn(s):
    placement, n = members(s)
    args = [s.pick(lambda v: v.shape[:1] == (n,)) for _ in range(s.integer(1, 3))]
    params = [s.param(_without(a.aval, 0), a) for a in args]
    inner = tuple(p for p in s.placements if p != placement)
    c = s.child(params, placements=inner)
    fill(c, 1, 4)
    found = outputs(c, 2)
    style = s.choose(["tuple", "dict"])
    results = ", ".join(map(str, found)) + ("," if len(found) == 1 else "")
    name, lines = function(s, c, params, f"({results})")
    names = [f"v{s.number()}" for _ in found]
    where = named(s, placement)
    if style == "tuple":
        call = f"bj.map_fn({name}, ({', '.join(map(str, args))},){where})"
    else:
        keys = [f"'k{i}': {a}" for i, a in enumerate(args)]
        unpack = ", ".join(f"d['k{i}']" for i in range(len(args)))
        call = f"bj.map_fn(lambda d: {name}({unpack}), {{{', '.join(keys)}}}{where})"
    s.add_lines([*lines, f"{', '.join(names)}, = {call}"], names, [same(v) for v in found])


# --- control flow


def carried(s: Scope) -> list[Value]:
    return [s.pick(lambda v: v.count < 100) for _ in range(s.integer(1, 2))]


@operation("inner_control_flow", weight=7)
def scan(s):
    init = carried(s)
    length = s.choose([1, 2, 3, *s.world.placements.values()])
    xs = [v for v in s.values if v.ndim and v.shape[0] == length][-2:] if s.boolean() else []
    carries = [s.param(v.aval, size=max(v.size, 1)) for v in init]
    items = [s.param(_without(v.aval, 0), v) for v in xs]
    c = s.child([*carries, *items], placements=s.placements)
    fill_rounds(c, 1, 3)
    updated = ", ".join(like(c, v) for v in carries)
    stacked = [v for v in c.own if v not in carries and v.count < 60][-1:] if s.boolean() else []
    ys = ", ".join(map(str, stacked))
    name, k = f"f{s.number()}", f"v{s.number()}"
    lines = [f"def {name}(c, xs):", f"    {_unpack(carries)} = c"]
    lines += [f"    {_unpack(items)} = xs"] if items else []
    lines += indent([*c.body([updated, ys]), f"return ({updated},), ({ys}{',' * bool(ys)})"])
    given = f"({', '.join(map(str, xs))},)" if xs else "None"
    start = f"({', '.join(map(str, init))},)"
    reverse = ", reverse=True" * (s.integer(0, 3) == 3)
    lines += [f"{k} = lax.scan({name}, {start}, {given}, length={length}{reverse})"]
    names = [f"v{s.number()}" for _ in [*carries, *stacked]]
    lines += [f"{_unpack(names)} = jax.tree.leaves({k})"]
    s.add_lines(lines, names, [{"size": max(v.size, 1)} for v in [*carries, *stacked]])


@operation("inner_control_flow", weight=4)
def fori_loop(s):
    init = carried(s)
    carries = [s.param(v.aval, size=max(v.size, 1)) for v in init]
    i = s.param(jax.eval_shape(lambda: np.int32(0)))
    c = s.child([*carries, i], placements=s.placements)
    fill_rounds(c, 1, 3)
    updated = ", ".join(like(c, v) for v in carries)
    counts = [v for v in s.values if v.dtype == "int32" and v.ndim == 0]
    dynamic = bool(counts) and not s.smooth and s.boolean()
    count = f"abs({s.choose(counts)} % 4)" if dynamic else str(s.integer(1, 3))
    name, names = f"f{s.number()}", [f"v{s.number()}" for _ in init]
    lines = [f"def {name}(i, c):", f"    {_unpack(carries)} = c", f"    {i} = i.astype('int32')"]
    lines += indent([*c.body([updated]), f"return ({updated},)"])
    start = f"({', '.join(map(str, init))},)"
    lines += [f"{_unpack(names)} = lax.fori_loop(0, {count}, {name}, {start})"]
    s.add_lines(lines, names, [{"size": max(v.size, 1)} for v in init])


@operation("inner_control_flow", smooth=False, weight=5)
def while_loop(s):
    init = carried(s)
    carries = [s.param(v.aval, size=max(v.size, 1)) for v in init]
    test = s.child(carries, placements=s.placements)
    test.depth = MAX_DEPTH
    fill(test, 0, 2)
    go_on = scalar_predicate(test)
    c = s.child(carries, placements=s.placements)
    fill_rounds(c, 1, 3)
    updated = ", ".join(like(c, v) for v in carries)
    number = s.number()
    names = [f"v{s.number()}" for _ in init]
    start = ", ".join(map(str, init))
    head = f"    i, {_unpack(carries)} = c"
    lines = [f"def go{number}(c):", head, *indent(test.body([go_on]))]
    lines += [f"    return (i < {s.integer(1, 4)}) & ({go_on})", f"def f{number}(c):", head]
    lines += indent([*c.body([updated]), f"return (i + 1, {updated})"])
    lines += [f"_, {_unpack(names)} = lax.while_loop(go{number}, f{number}, (0, {start}))"]
    s.add_lines(lines, names, [{"size": max(v.size, 1)} for v in init])


@operation("inner_control_flow", weight=6)
def branch(s):
    operands = carried(s)
    kind = s.choose(["cond", "switch"])
    chosen = scalar_predicate(s)
    if kind == "switch":
        i = s.pick(lambda v: v.integral)
        chosen = f"jnp.sum({i}).astype('int32') % 3"
    lines, functions = [], []
    for _ in range(2 if kind == "cond" else 3):
        params = [s.param(v.aval, v) for v in operands]
        c = s.child(params, placements=s.placements)
        fill_rounds(c, 0, 2)
        results = ", ".join(like(c, v) for v in params)
        name, more = function(s, c, params, f"({results},)")
        functions.append(name)
        lines += more
    names = [f"v{s.number()}" for _ in operands]
    given = ", ".join(map(str, operands))
    if kind == "cond":
        call = f"lax.cond({chosen}, {', '.join(functions)}, {given})"
    else:
        call = f"lax.switch({chosen}, [{', '.join(functions)}], {given})"
    lines.append(f"{_unpack(names)} = {call}")
    s.add_lines(lines, names, [{"size": max(v.size, 1)} for v in operands])


# --- transformations of a part of a program


def _part(s: Scope, args: list[Value], avals=None, *, smooth=False) -> tuple[Scope, list[Value]]:
    avals = avals or [a.aval for a in args]
    params = [s.param(aval, a) for aval, a in zip(avals, args, strict=True)]
    c = s.child(params, placements=s.placements, smooth=smooth)
    fill(c, 1, 4)
    return c, params


def _scalar(c: Scope) -> str:
    """A real scalar, of the floats in a scope."""
    found = outputs(c, 3, is_float)
    dtype = "float64" if c.world.x64 else "float32"
    return " + ".join(f"jnp.mean({v}.astype({dtype!r}))" for v in found)


@operation("transformations", weight=2)
def wrapped(s):
    args = [s.pick() for _ in range(s.integer(1, 2))]
    c, params = _part(s, args)
    found = outputs(c, 2)
    name, lines = function(s, c, params, f"({', '.join(map(str, found))},)")
    names = [f"v{s.number()}" for _ in found]
    kind = s.choose(["jax.jit", "jax.checkpoint"])
    lines.append(f"{_unpack(names)} = {kind}({name})({', '.join(map(str, args))})")
    s.add_lines(lines, names, [{"size": v.size, "exact": v.exact} for v in found])


@operation("transformations", weight=4)
def vmap(s):
    first = s.pick(lambda v: v.ndim > 0 and 0 < v.shape[0] < 12)
    lane = s.integer(0, first.ndim - 1)
    size = first.shape[lane]
    if size > 12:
        raise MisfitError
    args, axes = [first], [lane]
    for _ in range(s.integer(0, 2)):
        args.append(s.pick())
        fitting = [k for k, d in enumerate(args[-1].shape) if d == size]
        axes.append(s.choose([None, *fitting]))
    avals = [a.aval if k is None else _without(a.aval, k) for a, k in zip(args, axes, strict=True)]
    c, params = _part(s, args, avals)
    found = outputs(c, 2, lambda v: v.count < 200)
    name, lines = function(s, c, params, f"({', '.join(map(str, found))},)")
    names = [f"v{s.number()}" for _ in found]
    out = s.integer(0, min(v.ndim for v in found))
    call = f"jax.vmap({name}, in_axes=({', '.join(map(str, axes))},), out_axes={out})"
    lines.append(f"{_unpack(names)} = {call}({', '.join(map(str, args))})")
    s.add_lines(lines, names, [{"size": v.size, "exact": v.exact} for v in found])


@operation("transformations", weight=5)
def gradient(s):
    args = [s.pick(is_float), *(s.pick() for _ in range(s.integer(0, 2)))]
    c, params = _part(s, args, smooth=True)
    name, lines = function(s, c, params, _scalar(c))
    argnums = [i for i, a in enumerate(args) if a.floating and (i == 0 or s.boolean())]
    names = [f"v{s.number()}" for _ in argnums]
    given = ", ".join(map(str, args))
    kind = s.choose(["grad", "value_and_grad", "vjp"])
    if kind == "vjp":
        numbers = [f"v{s.number()}", f"v{s.number()}"]
        lines += [f"{numbers[0]}, {numbers[1]} = jax.vjp({name}, {given})"]
        numbers.append(f"v{s.number()}")
        lines += [f"{numbers[2]} = {numbers[1]}({numbers[0]} * 0 + 1)"]
        lines += [f"{_unpack(names)} = {', '.join(f'{numbers[2]}[{i}]' for i in argnums)},"]
    else:
        call = f"jax.{kind}({name}, argnums=({', '.join(map(str, argnums))},))({given})"
        if kind == "value_and_grad":
            lines += [f"_, ({_unpack(names)}) = {call}"]
        else:
            lines += [f"{_unpack(names)} = {call}"]
    s.add_lines(lines, names, [{"size": 32.0} for _ in argnums])


@operation("transformations", weight=2)
def tangents(s):
    args = [s.pick(is_float) for _ in range(s.integer(1, 2))]
    c, params = _part(s, args, smooth=True)
    (found,) = outputs(c, 1, is_float)
    name, lines = function(s, c, params, found.name)
    given = ", ".join(map(str, args))
    ones = ", ".join(f"jnp.ones_like({a})" for a in args)
    kind = s.choose(["jvp", "linearize"])
    names = [f"v{s.number()}", f"v{s.number()}"]
    if kind == "jvp":
        lines += [f"{_unpack(names)} = jax.jvp({name}, ({given},), ({ones},))"]
    else:
        push = f"v{s.number()}"
        lines += [f"{names[0]}, {push} = jax.linearize({name}, {given})"]
        lines += [f"{names[1]} = {push}({ones})"]
    s.add_lines(lines, names, [{"size": found.size}, {"size": 32.0}])


@operation("transformations")
def jacobian(s):
    x = s.pick(lambda v: v.floating and v.count <= 6)
    c, params = _part(s, [x], smooth=True)
    kind = s.choose(["jacfwd", "jacrev", "hessian"])
    if kind == "hessian":
        name, lines = function(s, c, params, _scalar(c))
    else:
        (found,) = outputs(c, 1, lambda v: v.floating and v.count <= 40)
        name, lines = function(s, c, params, found.name)
    result = f"v{s.number()}"
    lines.append(f"{result} = jax.{kind}({name})({x})")
    s.add_lines(lines, [result], [{"size": 64.0}])


def _without(aval, axis: int):
    shape = (*aval.shape[:axis], *aval.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _unpack(values) -> str:
    return ", ".join(map(str, values)) + ","
