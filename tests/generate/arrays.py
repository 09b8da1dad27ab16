"""Operations of one line on whole arrays, those of jnp that mix, move, reduce and make elements."""

from __future__ import annotations

from .operations import (
    axis_of,
    is_array,
    is_float_array,
    is_number,
    is_scalar_key,
    operation,
    same,
    simple,
)
from .scope import LARGEST, MisfitError


def is_number_array(v):
    return is_array(v) and v.numeric


def unlike(x):
    """Facts about a result in which elements of `x` may be more than once."""
    return same(x, distinct=False)


# --- shapes

simple("transpose", "shapes", lambda v: v.ndim > 1,
       "jnp.moveaxis({x}, {k}, 0)", "jnp.moveaxis({x}, 0, {k})", facts=same, weight=2)  # fmt: skip
simple("flip", "shapes", is_number_array, "jnp.flip({x}, {k})", "jnp.roll({x}, 1, {k})", facts=same)
simple("repeat", "shapes", lambda v: is_number_array(v) and v.count < 100,
       "jnp.repeat({x}, 2, axis={k})", facts=unlike)  # fmt: skip


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
    x = s.pick(is_number_array)
    k = axis_of(s, x)
    widths = tuple((1, 2) if i == k else (0, 0) for i in range(x.ndim))
    s.add(f"jnp.pad({x}, {widths})", **unlike(x))


@operation("shapes")
def expand(s):
    x = s.pick(lambda v: v.count < 100 and v.numeric)
    n = s.choose([2, 3, *s.world.placements.values()])
    s.add(f"jnp.broadcast_to({x}, ({n}, *{x.shape}))", **unlike(x))


# --- indexing

simple("static_index", "indexing", lambda v: v.ndim > 0 and v.count > 0,
       *[f"{{x}}[{{at}}{i}]" for i in ("0", "-1", "1:", "::2", ":-1", "::-1")],
       facts=same, weight=2)  # fmt: skip


@operation("indexing")
def index_by_values(s):
    x = s.pick(lambda v: v.ndim > 0 and v.count > 0)
    i = s.pick(lambda v: v.integral and v.ndim < 3 and v.count < 50)
    k = axis_of(s, x)
    s.add(f"{x}[{':, ' * k}{i} % {min(x.shape[k], 100)}]", **unlike(x))


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
    s.add(f"jnp.take_along_axis({x}, {i} % {x.shape[k]}, {k})", **unlike(x))


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


@operation("indexing", weight=3)
def scatter_add(s):
    x = s.pick(lambda v: v.ndim > 0 and (v.floating or v.dtype == "int32"))
    i = s.pick(lambda v: v.integral and v.shape == x.shape[:1])
    s.add(f"jax.ops.segment_sum({x}, {i} % 3, 3)", size=x.size * max(x.shape[0], 1))


# --- reductions along an axis


def is_ranked(v):
    return is_array(v) and v.discrete and v.dtype != "bool"


simple("logic", "reductions", lambda v: is_array(v) and v.discrete,
       *[f"jnp.{name}({{x}}, axis={axis})" for name in ("any", "all") for axis in ("{k}", 0, None)]
       )  # fmt: skip
simple("position", "reductions", lambda v: is_ranked(v) and v.count > 0,
       "jnp.argmax({x}, axis={k})", "jnp.argmin({x}, axis={k})")  # fmt: skip
simple("ranks", "sorting", is_ranked, "jnp.argsort({x}, axis={k})")


@operation("reductions", weight=4)
def reduction(s):
    x = s.pick(is_number_array)
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
def product(s):
    x = s.pick(lambda v: is_array(v) and (v.floating or v.integral))
    text = f"1 + {x} / {8 * x.size + 8:.0f}" if x.floating else x.name
    s.add(f"jnp.prod({text}, axis={axis_of(s, x)})", size=LARGEST)


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
def top(s):
    x = s.pick(lambda v: is_array(v) and (v.exact or v.dtype == "int32") and v.shape[-1] > 1)
    s.add(f"lax.top_k({x}, 2)[{s.integer(0, 1)}]", **unlike(x))


# --- products


@operation("products", weight=2)
def matmul(s):
    x = s.pick(lambda v: v.ndim > 0 and v.floating)
    y = s.pick(lambda v: v.ndim > 0 and v.dtype == x.dtype and v.shape[0] == x.shape[-1])
    s.add(f"jnp.tensordot({x}, {y}, 1)", size=x.size * y.size * max(x.shape[-1], 1))


@operation("products", weight=3)
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
    eye = f"jnp.broadcast_to(jnp.eye({rows}, dtype={x.dtype!r}), {(*x.shape[:-2], rows, rows)})"
    square = f"({x} @ jnp.swapaxes({x}, -1, -2) / {scale:.0f} + {eye})"
    choices = ["jnp.linalg.cholesky({m})", "jnp.linalg.inv({m})", "jnp.linalg.solve({m}, {x})",
               "jnp.linalg.det({m})"]  # fmt: skip
    choices += [] if s.smooth else ["jnp.linalg.eigvalsh({m})",
                                    "jnp.linalg.svd({m}, compute_uv=False)"]  # fmt: skip
    text = s.choose(choices)
    s.add(text.format(m=square, x=x), size=max(4.0, x.size))


# --- creations and random numbers

simple("created_like", "creations", is_number,
       "jnp.ones_like({x})", "jnp.zeros_like({x})", facts=lambda x: {"exact": True})  # fmt: skip
simple("split_keys", "random", lambda v: v.dtype == "key" and v.ndim == 1,
       "jax.vmap(jax.random.split)({x})")  # fmt: skip
simple("key_data", "random", lambda v: v.dtype == "key", "jax.random.key_data({x})")


@operation("creations")
def create(s):
    n = s.choose([*s.world.placements.values(), 2, 3])
    text, exact = s.choose([
        (f"jnp.arange({n})", True), (f"jnp.zeros(({n}, 2))", True),
        (f"jnp.ones({n}, 'int32')", True),
        (f"jnp.eye({n})", True), (f"jnp.full(({n},), 0.5)", True),
        (f"jnp.linspace(0.0, 1.0, {n})", False), (f"np.arange({n}.0, dtype='float32') / 32", False),
        (f"lax.broadcasted_iota('int32', ({n}, 3), {s.integer(0, 1)})", True),
    ])  # fmt: skip
    s.add(text, exact=exact)


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
