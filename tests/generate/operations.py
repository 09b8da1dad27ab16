"""Operations of one line that a drawn program is made of: those of beamjax, and elementwise ones.

Each takes a scope, picks operands from it and adds a statement. What must not depend on rounding
(comparisons, ranks, casts to integers) only takes integers and floats on a coarse grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .scope import FLOATS, LARGEST, MisfitError, Scope, Value


@dataclasses.dataclass(frozen=True)
class Operation:
    """A way to add a statement.

    Attributes:
      group: of similar ones.
      smooth: whether it may stand in a function that is differentiated.
      weight: how often it is drawn.
    """

    name: str
    group: str
    apply: Callable[[Scope], object]
    smooth: bool = True
    weight: int = 1


OPERATIONS: dict[str, Operation] = {}


def operation(group, *, smooth=True, weight=1):
    def register(function):
        OPERATIONS[function.__name__] = Operation(
            function.__name__, group, function, smooth, weight
        )
        return function

    return register


def simple(name, group, fits, *templates, facts=lambda x: {}, **settings):
    """An operation of one operand {x}, perhaps along an axis {k} of it, with {at} before its index.

    `facts` says what is known about the result.
    """

    def apply(s):
        x = s.pick(fits)
        k = axis_of(s, x) if x.ndim else 0
        s.add(s.choose(templates).format(x=x, k=k, at=":, " * k), **facts(x))

    OPERATIONS[name] = Operation(name, group, apply, **settings)


def is_float(v: Value) -> bool:
    return v.floating


def is_float_array(v: Value) -> bool:
    return v.floating and v.ndim > 0


def is_array(v: Value) -> bool:
    return v.ndim > 0


def is_number(v: Value) -> bool:
    return v.numeric


def is_scalar_key(v: Value) -> bool:
    return v.dtype == "key" and v.ndim == 0


def same(x: Value, **changes):
    """Facts about a result that has the elements of `x`, in another order or fewer of them."""
    return {"size": x.size, "exact": x.exact, "distinct": x.distinct, **changes}


def members(s: Scope) -> tuple[str, int]:
    name = s.choose(s.placements)
    return name, s.world.placements[name]


def named(s: Scope, placement: str) -> str:
    """The argument that names the placement, where it must be or may be given."""
    single = len(s.world.placements) == 1 and not s.boolean()
    return "" if single else f", placement={placement!r}"


def axis_of(s: Scope, x: Value) -> int:
    return s.integer(0, x.ndim - 1)


def partner(s: Scope, x: Value) -> str:
    """Another operand for an elementwise operation with `x`."""

    def fits(v: Value) -> bool:
        return v.dtype == x.dtype and v.shape in (x.shape, x.shape[1:], x.shape[:1], ())

    y = s.pick(fits)
    if y.shape in (x.shape, ()):
        return y.name
    if y.shape == x.shape[1:]:
        return f"{y}[None]"
    return f"{y}.reshape({', '.join(map(str, [-1, *[1] * (x.ndim - 1)]))})"


# --- operators of beamjax


@operation("operators", weight=4)
def broadcast(s):
    placement, n = members(s)
    x = s.pick(lambda v: v.ndim < 4 and v.count * n < 1000)
    s.add(f"bj.broadcast({x}{named(s, placement)})", **same(x, distinct=False))


def placed(s: Scope, fits=lambda v: True) -> tuple[Value, str]:
    placement, n = members(s)
    x = s.pick(lambda v: v.shape[:1] == (n,) and fits(v))
    return x, named(s, placement)


@operation("operators", weight=5)
def reduce_sum(s):
    x, where = placed(s, is_number)
    s.add(f"bj.reduce_sum({x}{where})", size=x.size * x.shape[0])


@operation("operators", weight=5)
def reduce_mean(s):
    x, where = placed(s, is_number)
    s.add(f"bj.reduce_mean({x}{where})", size=x.size if x.floating else 300)


@operation("operators", weight=2)
def reduce_var(s):
    x, where = placed(s, is_number)
    s.add(f"bj.reduce_var({x}{where})", size=max(x.size, 20) ** 2)


@operation("operators", weight=3)
def reduce_extreme(s):
    x, where = placed(s, lambda v: v.numeric and v.dtype != "complex64")
    if s.smooth and x.floating and not (x.distinct or x.exact):
        raise MisfitError
    s.add(f"bj.reduce_{s.choose(['max', 'min'])}({x}{where})", **same(x))


@operation("operators", weight=2)
def reduce_prod(s):
    x, where = placed(s, is_number)
    text = f"(1 + {x} / {8 * x.size + 8:.0f})" if x.floating or x.dtype == "complex64" else x.name
    s.add(f"bj.reduce_prod({text}{where})", size=3.0)


@operation("operators", weight=2)
def reduce_any_all(s):
    x, where = placed(s, lambda v: v.discrete)
    s.add(f"bj.reduce_{s.choose(['any', 'all'])}({x}{where})")


@operation("operators", weight=2)
def reduce_weighted_mean(s):
    x, where = placed(s, lambda v: is_number(v) and v.dtype != "bool")
    w = s.pick(lambda v: is_float(v) and v.shape in (x.shape[:1], x.shape))
    s.add(f"bj.reduce_weighted_mean({x}, 1.5 + jnp.tanh({w}){where})", size=max(x.size, 9))


@operation("trees", weight=2)
def reduce_tree(s):
    placement, n = members(s)
    x, y = (s.pick(lambda v: v.shape[:1] == (n,) and is_float(v)) for _ in range(2))
    name = s.choose(["sum", "mean"])
    names = [f"v{s.number()}" for _ in range(2)]
    tree = s.choose(["({}, {{'q': {}}})", "{{'p': {}, 'q': [{}, None]}}"]).format(x, y)
    call = f"jax.tree.leaves(bj.reduce_{name}({tree}{named(s, placement)}))"
    scale = n if name == "sum" else 1
    s.add_lines([f"{', '.join(names)} = {call}"], names, [{"size": v.size * scale} for v in (x, y)])


# --- elementwise

UNARY = {
    "jnp.tanh({x})": 1, "jnp.sin({x})": 1, "jnp.cos({x})": 1, "jax.nn.sigmoid({x})": 1,
    "jnp.exp(-{x} * {x})": 1, "jnp.sqrt(1 + {x} * {x})": 9, "jnp.log1p({x} * {x})": 6,
    "-{x}": None, "{x} * 0.5": None, "1 - {x}": 9, "jax.nn.softplus({x})": 9,
    "{x} / (1 + {x} ** 2)": 1, "jnp.arctan({x})": 2, "jax.scipy.special.erf({x})": 1,
    "lax.stop_gradient({x})": None, "jax.nn.gelu({x})": 8,
}  # fmt: skip
KINKED = {"jnp.abs({x})": None, "jax.nn.relu({x})": None, "jnp.clip({x}, -0.53, 0.61)": 1}
INTEGER = ["{x} + 1", "{x} * 3", "{x} // 2", "{x} % 5", "{x} ^ 3", "{x} >> 1", "-{x}",
           "jnp.minimum({x}, 2)", "{x} & 6", "lax.population_count({x})", "{x} * {x}"]  # fmt: skip


@operation("elementwise", weight=4)
def unary(s):
    x = s.pick(is_float)
    kinked = not s.smooth or x.distinct
    template = s.choose([*UNARY, *(KINKED if kinked else ())])
    size = (UNARY | KINKED)[template] or x.size
    s.add(template.format(x=x), size=size)


@operation("elementwise", weight=3)
def binary(s):
    x = s.pick(lambda v: v.floating or v.dtype == "complex64")
    y = partner(s, x)
    template, size = s.choose(
        [("{x} + {y}", 16), ("{y} - {x}", 16), ("{x} * {y}", 64), ("{x} / (2 + jnp.sin({y}))", 8)]
    )
    s.add(template.format(x=x, y=y), size=size)


@operation("elementwise")
def larger(s):
    x = s.pick(lambda v: v.floating and (v.distinct or not s.smooth))
    y = partner(s, x)
    if s.smooth and y == x.name:
        raise MisfitError
    s.add(f"jnp.{s.choose(['maximum', 'minimum'])}({x}, {y})", size=LARGEST)


@operation("elementwise")
def with_literal(s):
    x = s.pick(is_float)
    s.add(f"{s.literal()} * {x} + {s.literal()}", size=2 * x.size + 2)


@operation("elementwise")
def where(s):
    x = s.pick(lambda v: v.dtype in FLOATS)
    c = s.pick(lambda v: v.dtype == "bool" and v.shape in (x.shape, ()))
    s.add(f"jnp.where({c}, {x}, {partner(s, x)})", size=LARGEST)


simple("integer", "integers", lambda v: v.integral, *INTEGER, weight=2)


@operation("integers")
def integer_binary(s):
    x = s.pick(lambda v: v.integral)
    template = s.choose(["{x} + {y}", "{x} * {y}", "{x} ^ {y}", "jnp.maximum({x}, {y})"])
    s.add(template.format(x=x, y=partner(s, x)))


@operation("integers", weight=2)
def compare(s):
    x = s.pick(lambda v: v.discrete and v.dtype != "bool")
    y = s.choose([None, partner(s, x)]) or "2"
    s.add(f"{x} {s.choose(['<', '>=', '==', '!='])} {y}")


@operation("integers")
def logical(s):
    x = s.pick(lambda v: v.dtype == "bool")
    s.add(s.choose(["~{x}", "{x} & {y}", "{x} ^ {y}", "{x} | {y}"]).format(x=x, y=partner(s, x)))


@operation("integers", weight=2)
def from_integers(s):
    x = s.pick(lambda v: v.integral or v.dtype == "bool")
    y = f"({x} % 8)" if x.integral else x
    s.add(f"{y}.astype({s.choose(sorted(s.world.seen)) if s.world.seen else 'float32'!r}) / 4",
          size=2, exact=True)  # fmt: skip


@operation("integers")
def to_integers(s):
    x = s.pick(lambda v: v.exact or v.integral or v.dtype == "bool")
    s.add(f"({x} * 4).astype({s.choose(['int32', 'int8', 'uint8'])!r})" if x.floating
          else f"{x}.astype({s.choose(['int32', 'int8', 'uint8', 'bool'])!r})")  # fmt: skip


@operation("narrow_floats")
def cast(s):
    x = s.pick(is_float)
    dtypes = ["float32", "bfloat16", "float16"] + ["float64"] * s.world.x64
    s.add(f"{x}.astype({s.choose(dtypes)!r})", **same(x, distinct=False))


def is_complex(v: Value) -> bool:
    return v.dtype == "complex64"


simple("make_complex", "complex", lambda v: v.dtype == "float32",
       "lax.complex({x}, jnp.cos({x}))", facts=lambda x: {"size": x.size + 1})  # fmt: skip
simple("of_complex", "complex", is_complex, "{x}.real", "{x}.imag", "jnp.conj({x})",
       "({x} * {x}).real", facts=lambda x: {"size": 64})  # fmt: skip
simple("fourier", "complex", lambda v: (v.dtype == "float32" or is_complex(v)) and v.ndim > 0,
       "jnp.fft.fft({x}, axis={k})", facts=lambda x: {"size": 64})  # fmt: skip
