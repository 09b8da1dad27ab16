"""Random programs of beamjax: a strategy of hypothesis that gives Python source."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from . import arrays, blocks  # noqa: F401
from .scope import FLOATS, NAMESPACE, MisfitError, Scope, Value, World, indent, numbers

PREAMBLE = """\
import collections

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import beamjax as bj
"""

ARGUMENTS = """\
Pair = collections.namedtuple("Pair", "left right")


def floats(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, shape), dtype)


def grid(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, shape) / 4, dtype)


def ints(seed, *shape, dtype="int32"):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 10, shape), dtype)


def bools(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2, shape), "bool")


def keys(seed, *shape):
    return jax.random.split(jax.random.key(seed), shape) if shape else jax.random.key(seed)
"""

FOOTER = """
want = jax.jit(fn)(*args)
print("jit:", want)
for runner in ("local", "DirectRunner"):
    print(f"{runner}:", bj.run(fn, *args, runner=runner, options={"shard_size": 8}))
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """A drawn program.

    Attributes:
      body: source that defines `fn` and `args`, after `PREAMBLE` and `ARGUMENTS`.
      x64: whether it is run with 64-bit numbers.
      floats: names of the float dtypes that occur in it.
      inexact: for each argument, whether rounding errors may be added to it.
    """

    body: str
    x64: bool
    floats: frozenset[str]
    inexact: tuple[bool, ...]

    def script(self) -> str:
        """The program as a file that runs by itself and prints the results of all runners."""
        x64 = 'jax.config.update("jax_enable_x64", True)\n' if self.x64 else ""
        return f"{PREAMBLE}\n{x64}\n{ARGUMENTS}\n\n{self.body}\n{FOOTER}"

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        """The function and its arguments. Call it where `jax_enable_x64` is `x64`."""
        namespace = dict(NAMESPACE, __name__="generated")
        exec(compile(f"{ARGUMENTS}\n\n{self.body}", "<generated program>", "exec"), namespace)
        return namespace["fn"], namespace["args"]


def _arguments(world: World) -> list[tuple[Value, str]]:
    """Values and the expressions that make them."""
    scope = Scope(world, [], ())
    dims = [2, 3, 1, 4, *world.placements.values(), 0]
    kinds = ["floats", "floats", "floats", "grid", "ints", "ints", "bools", "keys"]
    dtypes = {
        "floats": ["float32"] * 8 + ["bfloat16", "float16"] + ["float64"] * 8 * world.x64,
        "grid": ["float32"],
        "ints": ["int32", "int32", "int8", "uint8"] + ["int64"] * world.x64,
        "bools": ["bool"],
        "keys": [None],
    }
    sizes = [*world.placements.values()]
    found = []
    for i in range(scope.integer(2, 5)):
        kind = "floats" if i == 0 else scope.choose(kinds)
        dtype = scope.choose(dtypes[kind])
        n = scope.choose(sizes)
        d, e = scope.choose(dims), scope.choose(dims)
        layouts = [(n, d), (n,), (d,), (), (n, d, e), (d, n), (d, n, e), (n, d, d)]
        layouts = {"keys": [(), (n,), (n, d)], "ints": [(n,), (), *layouts]}.get(kind, layouts)
        shape = (n, d) if i == 0 else scope.choose(layouts)
        given = ", ".join(map(str, [i, *shape]))
        text = f"{kind}({given}" + (f", dtype={dtype!r})" if kind in ("floats", "grid", "ints")
                                    else ")")  # fmt: skip
        if kind == "keys":
            aval = jax.ShapeDtypeStruct(shape, jax.random.key(0).dtype)
        else:
            aval = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            if jnp.issubdtype(aval.dtype, jnp.inexact):
                world.seen.add(aval.dtype.name)
        value = Value(f"a{i}", aval, 2.0, exact=kind == "grid",
                      distinct=kind == "floats" and dtype in ("float32", "float64"))  # fmt: skip
        value = dataclasses.replace(value, placed=bool(set(sizes) & set(shape)))
        found.append((value, text))
    if scope.integer(0, 4) == 4:
        aval = jax.eval_shape(lambda: jnp.asarray(0.5))
        found.append((Value(f"a{len(found)}", aval, 1.0), "0.5"))
    return found


def _placements(draw: Any) -> dict[str, int]:
    sizes = st.sampled_from([3, 9, 1, 2, 4, 5, 7, 8, 11, 16, 17, 20])
    found = {"clients": draw(sizes)}
    if draw(st.integers(0, 3)) == 3:
        found["items"] = draw(sizes)
    return found


def _reduce_first(s: Scope) -> None:
    """Adds an operator that always fits."""
    n = s.values[0].shape[0]
    placement = next(name for name, size in s.world.placements.items() if size == n)
    s.add(f"bj.reduce_mean({s.values[0]}, placement={placement!r})")


def _result_tree(s: Scope) -> str:
    """The results of a program, as the text of a tree."""
    found = blocks.outputs(s, 6)
    if s.integer(0, 7) == 7:
        found.append(s.choose([v for v in s.values if v.name.startswith("a")]))
    names = [str(v) for v in found]
    kind = s.choose(["tuple", "dict", "nested", "pair"])
    if kind == "dict":
        return "{" + ", ".join(f"'r{i}': {name}" for i, name in enumerate(names)) + "}"
    if kind == "pair":
        return f"Pair({names[0]}, [{', '.join(names[1:])}])"
    if kind == "nested":
        return f"[{names[0]}, {{'rest': ({', '.join(names[1:])}), 'none': None}}]"
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _function(s: Scope, arguments: list[tuple[Value, str]]) -> list[str]:
    """The lines that define `prog`, and `fn`, which may transform it."""
    kind = s.choose([None, None, "grad", "vmap", "jit"])
    args = [v for v, _ in arguments]
    if kind == "vmap":
        return _vmapped(s, args)
    s.smooth = kind == "grad"
    blocks.fill(s, 3, 9)
    if not any("bj." in statement.text for statement in s.statements):
        _reduce_first(s)
    head = f"def prog({', '.join(map(str, args))}):"
    if kind != "grad":
        result = _result_tree(s)
        lines = [head, *indent([*s.body([result]), f"return {result}"])]
        return [*lines, "", "fn = jax.jit(prog)" if kind == "jit" else "fn = prog"]
    result = blocks._scalar(s)
    argnums = tuple(i for i, v in enumerate(args) if v.floating and (i == 0 or s.boolean()))
    how = s.choose(["grad", "value_and_grad"])
    lines = [head, *indent([*s.body([result]), f"return {result}"])]
    return [*lines, "", f"fn = jax.{how}(prog, argnums={argnums})"]


def _vmapped(s: Scope, args: list[Value]) -> list[str]:
    """`fn` maps `prog` over a new leading axis of some of its arguments."""
    axes = [s.choose([None, 0]) for _ in args[1:]]
    lanes = [0, *axes]
    blocks.fill(s, 3, 7)
    if not any("bj." in statement.text for statement in s.statements):
        _reduce_first(s)
    found = ", ".join(map(str, blocks.outputs(s, 4)))
    lines = [f"def prog({', '.join(map(str, args))}):"]
    lines += indent([*s.body([found]), f"return ({found},)"])
    batch = ", ".join(
        f"jnp.stack([{v}, {_varied(v)}])" if k == 0 else str(v)
        for v, k in zip(args, lanes, strict=True)
    )
    lines += ["", f"def fn({', '.join(map(str, args))}):"]
    lines += [f"    return jax.vmap(prog, in_axes={tuple(lanes)})({batch})"]
    return lines


def _varied(v: Value) -> str:
    if v.dtype == "key":
        return f"jax.random.clone({v})"
    return f"~{v}" if v.dtype == "bool" else f"{v} + 1" if v.integral else f"-{v}"


@st.composite
def programs(draw: Any) -> Program:
    """A program."""
    x64 = draw(st.integers(0, 9)) == 9
    with numbers(x64):
        world = World(draw, _placements(draw), x64)
        arguments = _arguments(world)
        scope = Scope(world, [v for v, _ in arguments], tuple(world.placements))
        try:
            lines = _function(scope, arguments)
        except MisfitError:
            scope.statements.clear()
            scope.smooth = False
            _reduce_first(scope)
            results = scope.own[-1].name
            names = ", ".join(str(v) for v, _ in arguments)
            lines = [f"def prog({names}):", *indent([*scope.body([results]), f"return {results}"])]
            lines += ["", "fn = prog"]
    return _assemble(world, arguments, lines)


def _assemble(world: World, arguments: list[tuple[Value, str]], lines: list[str]) -> Program:
    """The program of a drawn function; arguments that it does not read are left out."""
    decorator = f"@bj.program(placements={world.placements})"
    source = "\n".join([decorator, *lines])
    texts = "".join(f"    {text},\n" for _, text in arguments)
    body = f"{source}\n\nargs = (\n{texts})"
    inexact = tuple(v.floating and not v.exact for v, _ in arguments)
    floats = frozenset(name for name in FLOATS if name in world.seen or f"'{name}'" in body)
    return Program(body, world.x64, floats, inexact)
