"""Operations of one line that a drawn program is made of: those of beamjax, and those of jnp.

Each takes a scope, picks operands from it and adds a statement. What must not depend on rounding
(comparisons, ranks, casts to integers) only takes integers and floats on a coarse grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .scope import FLOATS, MisfitError, Scope, Value, epsilon, is_narrow


@dataclasses.dataclass(frozen=True)
class Operation:
    """A way to add a statement.

    Attributes:
      feature: the group that a flag turns on and off.
      smooth: whether it may stand in a function that is differentiated.
      weight: how often it is drawn.
    """

    name: str
    feature: str
    apply: Callable[[Scope], object]
    smooth: bool = True
    weight: int = 1


OPERATIONS: dict[str, Operation] = {}


def operation(feature, *, smooth=True, weight=1):
    def register(function):
        OPERATIONS[function.__name__] = Operation(
            function.__name__, feature, function, smooth, weight
        )
        return function

    return register


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
    s.add_lines(
        [f"{', '.join(names)} = {call}"], names, [{"size": v.size * scale} for v in (x, y)]
    )


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
    s.add(f"jnp.{s.choose(['maximum', 'minimum'])}({x}, {y})", size=LARGE)


LARGE = 8.0


@operation("elementwise")
def with_literal(s):
    x = s.pick(is_float)
    s.add(f"{s.literal()} * {x} + {s.literal()}", size=2 * x.size + 2)


@operation("elementwise")
def where(s):
    x = s.pick(lambda v: v.dtype in FLOATS)
    c = s.pick(lambda v: v.dtype == "bool" and v.shape in (x.shape, ()))
    s.add(f"jnp.where({c}, {x}, {partner(s, x)})", size=LARGE)


@operation("integers", weight=2)
def integer(s):
    x = s.pick(lambda v: v.integral)
    s.add(s.choose(INTEGER).format(x=x))


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


@operation("complex")
def make_complex(s):
    x = s.pick(lambda v: v.dtype == "float32")
    s.add(f"lax.complex({x}, jnp.cos({x}))", size=x.size + 1)


@operation("complex")
def of_complex(s):
    x = s.pick(lambda v: v.dtype == "complex64")
    s.add(s.choose(["{x}.real", "{x}.imag", "jnp.conj({x})", "({x} * {x}).real"]).format(x=x),
          size=64)  # fmt: skip


@operation("complex")
def fourier(s):
    x = s.pick(lambda v: v.dtype in ("float32", "complex64") and v.ndim > 0)
    s.add(f"jnp.fft.fft({x}, axis={axis_of(s, x)})", size=64)


# --- shapes


@operation("shapes", weight=2)
def transpose(s):
    x = s.pick(lambda v: v.ndim > 1)
    s.add(f"jnp.moveaxis({x}, {axis_of(s, x)}, {axis_of(s, x)})", **same(x))


@operation("shapes")
def reshape(s):
    x = s.pick(is_array)
    k = axis_of(s, x)
    merged = [*x.shape[:k], x.shape[k] * (x.shape[k + 1] if k + 1 < x.ndim else 1)]
    shapes = [
        (*merged, *x.shape[k + 2 :]), (x.count,), (*x.shape[:k], 1, *x.shape[k:]), x.shape[::-1],
        tuple(d for d in x.shape if d != 1),
    ]  # fmt: skip
    s.add(f"{x}.reshape({s.choose(shapes)})", **same(x))


@operation("shapes")
def flip(s):
    x = s.pick(lambda v: is_array(v) and v.numeric)
    template = s.choose(["jnp.flip({x}, {k})", "jnp.roll({x}, 1, {k})"])
    s.add(template.format(x=x, k=axis_of(s, x)), **same(x))


@operation("shapes")
def concatenate(s):
    x = s.pick(lambda v: is_array(v) and v.count < 200)
    k = axis_of(s, x)

    def fits(v):
        rest = lambda shape: (*shape[:k], *shape[k + 1 :])
        return v.dtype == x.dtype and v.ndim == x.ndim and rest(v.shape) == rest(x.shape)

    y = s.pick(fits)
    s.add(f"jnp.concatenate([{x}, {y}], {k})", size=max(x.size, y.size), exact=x.exact and y.exact)


@operation("shapes")
def stack(s):
    x = s.pick(lambda v: v.ndim < 4 and v.count < 200)
    y = s.pick(lambda v: v.dtype == x.dtype and v.shape == x.shape)
    axis = s.integer(0, x.ndim)
    s.add(f"jnp.stack([{x}, {y}], {axis})", size=max(x.size, y.size), exact=x.exact and y.exact)


@operation("shapes")
def pad(s):
    x = s.pick(lambda v: is_array(v) and v.numeric)
    k = axis_of(s, x)
    widths = tuple((1, 2) if i == k else (0, 0) for i in range(x.ndim))
    s.add(f"jnp.pad({x}, {widths})", **same(x, distinct=False))


@operation("shapes")
def repeat(s):
    x = s.pick(lambda v: is_array(v) and v.numeric and v.count < 100)
    s.add(f"jnp.repeat({x}, 2, axis={axis_of(s, x)})", **same(x, distinct=False))


@operation("shapes")
def expand(s):
    x = s.pick(lambda v: v.count < 100 and v.numeric)
    n = s.choose([2, 3, *s.world.placements.values()])
    s.add(f"jnp.broadcast_to({x}, ({n}, *{x.shape}))", **same(x, distinct=False))


# --- indexing


@operation("indexing", weight=2)
def static_index(s):
    x = s.pick(lambda v: v.ndim > 0 and v.count > 0)
    k = axis_of(s, x)
    index = s.choose(["0", "-1", "1:", "::2", ":-1", "::-1"])
    s.add(f"{x}[{':, ' * k}{index}]", **same(x))


@operation("indexing")
def index_by_values(s):
    x = s.pick(lambda v: v.ndim > 0 and v.count > 0)
    i = s.pick(lambda v: v.integral and v.ndim < 3 and v.count < 50)
    k = axis_of(s, x)
    s.add(f"{x}[{':, ' * k}{i} % {min(x.shape[k], 100)}]", **same(x, distinct=False))


@operation("indexing")
def dynamic_slice(s):
    x = s.pick(lambda v: v.ndim > 0 and v.count > 0)
    i = s.pick(lambda v: v.dtype == "int32" and v.ndim == 0)
    s.add(f"lax.dynamic_index_in_dim({x}, {i}, {axis_of(s, x)}, keepdims={s.boolean()})", **same(x))


@operation("indexing")
def take_along(s):
    x = s.pick(lambda v: v.ndim > 0 and v.count > 0 and v.numeric)
    k = axis_of(s, x)
    i = s.pick(lambda v: v.integral and v.shape == x.shape)
    s.add(f"jnp.take_along_axis({x}, {i} % {x.shape[k]}, {k})", **same(x, distinct=False))


@operation("indexing", weight=2)
def update(s):
    x = s.pick(lambda v: v.ndim > 0 and v.count > 0 and (v.floating or v.integral))
    k = axis_of(s, x)
    where = ":, " * k + s.choose(["0", "-1", "1:", "::2"])
    if x.shape[k] == 1 and where.endswith("1:"):
        raise MisfitError
    if s.boolean():
        s.add(f"{x}.at[{where}].{s.choose(['add', 'multiply', 'set'])}(2)", size=2 * x.size + 2)
        return
    rest = (*x.shape[:k], *x.shape[k + 1 :])
    y = s.pick(lambda v: v.dtype == x.dtype and v.shape == rest)
    s.add(f"{x}.at[{':, ' * k}0].{s.choose(['add', 'set'])}({y})", size=x.size + y.size)


@operation("indexing")
def scatter_add(s):
    x = s.pick(lambda v: v.ndim > 0 and (v.floating or v.dtype == "int32"))
    i = s.pick(lambda v: v.integral and v.shape == x.shape[:1])
    s.add(f"jax.ops.segment_sum({x}, {i} % 3, 3)", size=x.size * max(x.shape[0], 1))


# --- reductions along an axis


@operation("reductions", weight=4)
def reduction(s):
    x = s.pick(lambda v: is_array(v) and v.numeric)
    k = s.choose([0, axis_of(s, x), None])
    count = x.count if k is None else x.shape[k]
    keep = f", keepdims={s.boolean()}"
    name = s.choose(["sum", "mean"])
    size = x.size * max(count, 1) if name == "sum" else x.size if x.floating else 300
    s.add(f"jnp.{name}({x}, axis={k}{keep})", size=size)


@operation("reductions", weight=2)
def extreme(s):
    x = s.pick(lambda v: is_array(v) and v.numeric and v.dtype != "complex64")
    if s.smooth and x.floating and not x.distinct:
        raise MisfitError
    name = s.choose(["max", "min"])
    s.add(f"jnp.{name}({x}, axis={s.choose([0, axis_of(s, x), None])})", **same(x))


@operation("reductions")
def logic(s):
    x = s.pick(lambda v: is_array(v) and v.discrete)
    s.add(f"jnp.{s.choose(['any', 'all'])}({x}, axis={s.choose([0, axis_of(s, x), None])})")


@operation("reductions")
def product(s):
    x = s.pick(lambda v: is_array(v) and (v.floating or v.integral))
    text = f"1 + {x} / {8 * x.size + 8:.0f}" if x.floating else x.name
    s.add(f"jnp.prod({text}, axis={axis_of(s, x)})", size=LARGE)


@operation("reductions")
def position(s):
    x = s.pick(lambda v: is_array(v) and v.discrete and v.dtype != "bool" and v.count > 0)
    s.add(f"jnp.{s.choose(['argmax', 'argmin'])}({x}, axis={axis_of(s, x)})")


@operation("reductions", weight=2)
def normalised(s):
    x = s.pick(is_float_array)
    k = axis_of(s, x)
    template = s.choose(
        ["jax.nn.softmax({x}, axis={k})", "jax.nn.logsumexp({x}, axis={k})",
         "{x} - jnp.mean({x}, axis={k}, keepdims=True)", "jnp.var({x}, axis={k})",
         "jnp.sqrt(1 + jnp.sum({x} ** 2, axis={k}))"]
    )  # fmt: skip
    s.add(template.format(x=x, k=k), size=2 * x.size + 4)


@operation("reductions")
def cumulative(s):
    x = s.pick(lambda v: is_array(v) and (v.floating or v.integral))
    k = axis_of(s, x)
    name = s.choose(["sum", "max"] if x.distinct or not s.smooth else ["sum"])
    text = f"jnp.cumsum({x}, axis={k})" if name == "sum" else f"lax.cummax({x}, axis={k})"
    s.add(text, size=x.size * max(x.shape[k], 1))


@operation("sorting", weight=2)
def sort(s):
    x = s.pick(lambda v: is_array(v) and (v.floating or v.integral))
    if s.smooth and not x.distinct:
        raise MisfitError
    s.add(f"jnp.sort({x}, axis={axis_of(s, x)})", **same(x))


@operation("sorting")
def ranks(s):
    x = s.pick(lambda v: is_array(v) and v.discrete and v.dtype != "bool")
    s.add(f"jnp.argsort({x}, axis={axis_of(s, x)})")


@operation("sorting")
def top(s):
    x = s.pick(lambda v: is_array(v) and (v.exact or v.dtype == "int32") and v.shape[-1] > 1)
    s.add(f"lax.top_k({x}, 2)[{s.integer(0, 1)}]", **same(x, distinct=False))


# --- products


@operation("products", weight=2)
def matmul(s):
    x = s.pick(lambda v: v.ndim > 0 and v.floating)
    y = s.pick(lambda v: v.ndim > 0 and v.dtype == x.dtype and v.shape[0] == x.shape[-1])
    s.add(f"jnp.tensordot({x}, {y}, 1)", size=x.size * y.size * max(x.shape[-1], 1))


@operation("products", weight=2)
def gram(s):
    x = s.pick(lambda v: v.ndim == 2 and (v.floating or v.integral))
    template = s.choose(["{x} @ {x}.T", "{x}.T @ {x}", "jnp.einsum('ij,ij->i', {x}, {x})",
                         "jnp.einsum('ij,kj->ik', {x}, {x})"])  # fmt: skip
    s.add(template.format(x=x), size=x.size**2 * max(x.shape))


@operation("products")
def outer(s):
    x = s.pick(lambda v: v.ndim == 1 and v.floating)
    y = s.pick(lambda v: v.ndim == 1 and v.dtype == x.dtype)
    s.add(f"jnp.outer({x}, {y})", size=x.size * y.size)


@operation("linear_algebra", weight=2)
def linear_algebra(s):
    x = s.pick(lambda v: v.ndim >= 2 and v.dtype in ("float32", "float64") and v.count > 0)
    rows, columns = x.shape[-2:]
    if rows > 6 or columns > 6:
        raise MisfitError
    scale = columns * x.size**2 + 1
    square = f"({x} @ jnp.swapaxes({x}, -1, -2) / {scale:.0f} + jnp.eye({rows}, dtype={x.dtype!r}))"
    choices = ["jnp.linalg.cholesky({m})", "jnp.linalg.inv({m})", "jnp.linalg.solve({m}, {x})",
               "jnp.linalg.det({m})"]  # fmt: skip
    choices += [] if s.smooth else ["jnp.linalg.eigvalsh({m})",
                                    "jnp.linalg.svd({m}, compute_uv=False)"]  # fmt: skip
    text = s.choose(choices)
    add = f"jnp.broadcast_to(jnp.eye({rows}, dtype={x.dtype!r}), {(*x.shape[:-2], rows, rows)})"
    square = f"({x} @ jnp.swapaxes({x}, -1, -2) / {scale:.0f} + {add})"
    s.add(text.format(m=square, x=x), size=max(4.0, x.size))


# --- creations and random numbers


@operation("creations")
def create(s):
    n = s.choose([*s.world.placements.values(), 2, 3])
    text, exact = s.choose([
        (f"jnp.arange({n})", True), (f"jnp.zeros(({n}, 2))", True), (f"jnp.ones({n}, 'int32')", True),
        (f"jnp.eye({n})", True), (f"jnp.full(({n},), 0.5)", True),
        (f"jnp.linspace(0.0, 1.0, {n})", False), (f"np.arange({n}.0, dtype='float32') / 32", False),
        (f"lax.broadcasted_iota('int32', ({n}, 3), {s.integer(0, 1)})", True),
    ])  # fmt: skip
    s.add(text, exact=exact)


@operation("creations")
def created_like(s):
    x = s.pick(is_number)
    s.add(f"jnp.{s.choose(['ones_like', 'zeros_like'])}({x})", exact=True)


@operation("random", weight=2)
def split_key(s):
    key = s.pick(is_scalar_key)
    s.add(f"jax.random.split({key}, {s.choose([*s.world.placements.values(), 2])})")


@operation("random", weight=3)
def draws(s):
    key = s.pick(is_scalar_key)
    n = s.choose([*s.world.placements.values(), 2, 3])
    shape = s.choose([(), (n,), (n, 2), (2, n)])
    text, exact = s.choose([
        (f"jax.random.normal({key}, {shape})", False),
        (f"jax.random.uniform({key}, {shape}, 'float32')", False),
        (f"jax.random.bernoulli({key}, 0.4, {shape})", True),
        (f"jax.random.randint({key}, {shape}, 0, 9)", True),
        (f"jax.random.bits({key}, {shape}, 'uint8')", True),
    ])  # fmt: skip
    s.add(text, size=4, exact=exact, distinct=not exact)


@operation("random")
def fold_in(s):
    key = s.pick(is_scalar_key)
    i = s.pick(lambda v: v.dtype in ("int32", "uint8") and v.ndim == 0)
    s.add(f"jax.random.fold_in({key}, {i})")


@operation("random")
def split_keys(s):
    keys = s.pick(lambda v: v.dtype == "key" and v.ndim == 1)
    s.add(f"jax.vmap(jax.random.split)({keys})")


@operation("random")
def key_data(s):
    s.add(f"jax.random.key_data({s.pick(lambda v: v.dtype == 'key')})")


def narrowest(dtypes: set[str]) -> float:
    """The largest rounding step among float dtypes."""
    return max(map(epsilon, dtypes), default=0.0)


def has_narrow(dtypes: set[str]) -> bool:
    return any(map(is_narrow, dtypes))
