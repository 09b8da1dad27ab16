"""What a row of the table of programs is, and what programs are built with: operators and data."""

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from explained import all_steps, facts_of
from helpers import assert_close, assert_same_bits, assert_same_types

import beamjax as bj
from beamjax.numerics.reducers import REDUCTIONS

N, M = 11, 7  # Sizes of placements: a full shard of 8 and a short one; no other axis has them.
KINDS = {
    "Map": "maps", "Gather": "gathers", "Scatter": "scatters", "Loop": "loops", "Branch": "branches"
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Program:
    """A row of the table.

    Attributes:
      build: a function of the operators, `beamjax` or `reference`, that gives a function and its
        arguments.
      plan: the steps of its plan but those of the server, as `steps_of` writes them.
      eqns: how many of our primitives its jaxpr has; None where that is not checked.
      strays: primitives of JAX on placed values in that jaxpr.
      own: whether it is built with the operators of beamjax alone.
      guarded: whether it is run with members that may be dropped, too.
      x64: whether it takes numbers of 64 bits.
      promotes: whether it needs the promotion of dtypes and ranks that JAX has by default.
      rtol, atol: the tolerance for what `jax.jit` gives.
    """

    build: Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]
    plan: str = "maps 1"
    eqns: dict[str, int] | None = None
    strays: tuple[str, ...] = ()
    own: bool = False
    guarded: bool = False
    x64: bool = False
    promotes: bool = False
    rtol: float = 2e-4
    atol: float = 5e-5

    @contextlib.contextmanager
    def settings(self):
        """The settings of JAX for this program."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            if self.promotes:
                stack.enter_context(jax.numpy_dtype_promotion("standard"))
                stack.enter_context(jax.numpy_rank_promotion("allow"))
            yield


PROGRAMS: dict[str, Program] = {}


def add(name, build, **facts):
    assert name not in PROGRAMS
    PROGRAMS[name] = Program(build, **facts)


def built(**facts):
    """Adds a function of the operators."""

    def decorate(build):
        add(build.__name__, build, **facts)
        return build

    return decorate


def case(*args, called=None, **facts):
    """Adds a function that calls the operators of beamjax, with its arguments."""

    def decorate(fn):
        add(called or fn.__name__, lambda ops: (fn, args), own=True, **facts)
        return fn

    return decorate


def counted(**eqns):
    """Counts of our primitives, as `eqns` of a row."""
    return {f"bj_{name}": count for name, count in eqns.items()}


# --- operators that compute the same without beamjax


def _vmap(fn, arg, *, placement=None):
    size = None if jax.tree.leaves(arg) else N
    call = lambda v: fn(*v) if isinstance(arg, tuple) else fn(v)
    return jax.vmap(call, axis_size=size, axis_name=placement or "clients")(arg)


def _over_members(function):
    return lambda x, *, placement=None, **more: jax.tree.map(
        lambda leaf: function(leaf, axis=0, **more), x
    )


def _weighted_mean(x, w, *, placement=None):
    return jax.tree.map(lambda v: jnp.average(v, axis=0, weights=w), x)


def _by_key(x, keys, num_keys, *, op="sum", placement=None):
    def by_key(v):
        v = v.astype("int8") if v.dtype == "int4" else v  # jnp.sum refuses int4
        v = v.astype(getattr(jnp, op)(v, axis=0).dtype)  # segment_sum adds int8 as int8
        return getattr(jax.ops, f"segment_{op}")(v, keys, num_keys)

    return jax.tree.map(by_key, x)


def _by_a_function(combine, x, *, placement=None):
    members = [jax.tree.map(lambda v, i=i: v[i], x) for i in range(len(jax.tree.leaves(x)[0]))]
    return functools.reduce(combine, members)


def _broadcast(x, *, placement=None):
    return _vmap(lambda: x, (), placement=placement)


def _neighbours(x, before=0, after=0, fill=0, wrap=False):
    def around(leaf):
        mode = {"mode": "wrap"} if wrap else {"constant_values": jnp.asarray(fill, leaf.dtype)}
        padding = [(before, after), *[(0, 0)] * (leaf.ndim - 1)]
        rows = jnp.pad(leaf, padding, **mode)
        return jnp.stack([rows[j : j + len(leaf)] for j in range(before + 1 + after)], 1)

    return jax.tree.map(around, x)


reference = types.SimpleNamespace(
    program=lambda placements: lambda fn: fn,
    broadcast=_broadcast,
    map_fn=_vmap,
    reduce_weighted_mean=_weighted_mean,
    reduce_by_key=_by_key,
    reduce=_by_a_function,
    neighbours=_neighbours,
    **{f"reduce_{name}": _over_members(kind.function) for name, kind in REDUCTIONS.items()},
)


# --- data and parts


def rnd(*shape, seed=0):
    """Numbers of NumPy: nothing is compiled for them while tests are imported."""
    return jax.device_put(np.random.default_rng([seed, *shape]).normal(size=shape).astype("f4"))


KEY = jax.random.key(3)
W, X, Y = rnd(3), rnd(N, 5, 3, seed=1), rnd(N, 5, seed=2)
WS = rnd(4, 3, seed=3)


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def step_loss(ops):
    """The mean over clients of the loss after one step of gradient descent."""

    @ops.program(placements={"clients": N})
    def prog(w, x, y):
        stepped = lambda x, y: loss(w - 0.1 * jax.grad(loss)(w, x, y), x, y)
        return ops.reduce_mean(ops.map_fn(stepped, (x, y)))

    return prog


def sum_over(ops, body):
    """The program (w, x) -> sum over clients of body(w, x)."""

    @ops.program(placements={"clients": N})
    def prog(w, x):
        return ops.reduce_sum(ops.map_fn(lambda v: body(w, v), x))

    return prog


@jax.custom_vjp
def sin_vjp(x):
    return jnp.sin(x)


sin_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2.0 * jnp.cos(x) * ct,))


@jax.custom_jvp
def sin_jvp(x):
    return jnp.sin(x)


sin_jvp.defjvp(lambda p, t: (sin_jvp(*p), 3.0 * jnp.cos(p[0]) * t[0]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    a: jax.Array
    b: jax.Array
    tag: str = dataclasses.field(metadata={"static": True}, default="tag")


# --- checks


def step_kinds(fn, *args, **options):
    """How many steps of each kind the plan has, as `bj.explain` shows it."""
    return kinds_of(facts_of(bj.explain(fn, *args, options=options)))


def kinds_of(facts):
    return collections.Counter(step.kind for step in all_steps(facts.steps))


def steps_of(facts):
    """The steps of a plan but those of the server: "maps 2, loops 1"."""
    counts = kinds_of(facts)
    return ", ".join(f"{words} {counts[kind]}" for kind, words in KINDS.items() if counts[kind])


def run_everywhere(fn, *args, rtol=5e-5, atol=5e-5, beam=True, **options):
    """Runs a program once with `jit`, runner "local" and Beam, and returns the result of "local".

    Asserts the types and values of `jit`, and that Beam gives the same bits as "local".
    """
    expected = jax.jit(fn)(*args)
    local = bj.run(fn, *args, runner="local", options=options)
    assert_same_types(local, expected)
    assert_close(local, expected, rtol, atol)
    if beam:
        found = bj.run(fn, *args, options=options)
        assert_same_types(found, expected)
        assert_same_bits(found, local)
    return local
