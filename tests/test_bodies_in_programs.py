"""Whatever JAX can do in a body, on every executor: tree, types and values of `jit`, equal bits."""

import dataclasses
import functools
import operator
from collections import namedtuple

import jax
import jax.experimental
import jax.numpy as jnp
import jax.scipy as jsp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import beamjax as bj

N = 11
OPTIONS = {"shard_size": 8}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(N, *shape)).astype(np.float32)


X = jnp.asarray(normal(3))
M = jnp.asarray(normal(3, 3))
W = jnp.asarray([0.5, -1.0, 2.0])
KEYS = jax.random.split(jax.random.key(5), N)
RAW = jax.random.split(jax.random.PRNGKey(5), N)
INTS = jnp.arange(3 * N, dtype="int32").reshape(N, 3) * 7 % 11

# name -> (body, placed arguments); every body takes `W` first.
CASES = {}


def add(*placed, **bodies):
    for name, body in bodies.items():
        assert name not in CASES
        CASES[name] = (body, placed)


# --- derivatives


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct, -0.5, 0.5) * x,))


@jax.custom_jvp
def log1pexp(x):
    return jnp.log(1.0 + jnp.exp(x))


log1pexp.defjvp(lambda p, t: (log1pexp(*p), t[0] * jax.nn.sigmoid(p[0])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(factor, x):
    return factor * x


scaled.defvjp(lambda factor, x: (factor * x, None), lambda factor, _, ct: (ct * factor,))


def layers(w, x):
    for _ in range(3):
        x = jnp.tanh(x * w + jnp.sum(x))
    return jnp.sum(x)


def remat(policy):
    return lambda w, x: jax.grad(jax.checkpoint(layers, policy=policy))(w, x)


def float0(w, x):
    _, pull = jax.vjp(lambda i, v: i * v, 3, x)
    return pull(x)


def float0_tangent(w, x):
    zero = np.zeros((), jax.dtypes.float0)
    return jax.jvp(lambda i, v: (v * i, i), (3, x), (zero, x))


policies = jax.checkpoint_policies
add(
    X,
    custom_vjp=lambda w, x: jax.grad(lambda v: jnp.sum(clipped(v * w)))(x),
    custom_vjp_nondiff=lambda w, x: jax.value_and_grad(lambda v: jnp.sum(scaled(2.0, v)))(x),
    custom_jvp=lambda w, x: jax.vmap(jax.value_and_grad(log1pexp))(x),
    second_order=lambda w, x: jax.hessian(lambda v: jnp.sum(log1pexp(v * w)))(x),
    jacobians=lambda w, x: (jax.jacfwd(jnp.cumsum)(x), jax.jacrev(jnp.cumprod)(x)),
    linearize=lambda w, x: jax.linearize(jnp.sin, x)[1](w),
    remat=remat(None),
    remat_saves_dots=remat(policies.dots_saveable),
    remat_saves_nothing=remat(policies.nothing_saveable),
    remat_saves_all=remat(policies.everything_saveable),
    float0=float0,
    float0_tangent=float0_tangent,
    custom_root=lambda w, x: lax.custom_root(
        lambda y: y**3 - jnp.abs(x) - 1.0,
        jnp.ones_like(x),
        lambda f, y: lax.fori_loop(0, 30, lambda _, y: y - f(y) / (3 * y**2), y),
        lambda g, y: y / g(jnp.ones_like(y)),
    ),
)

# --- control flow


def collatz(w, x):
    start = jnp.asarray(jnp.abs(x[0]) * 9 + 2, "int32")
    step = lambda c: (jnp.where(c[0] % 2, 3 * c[0] + 1, c[0] // 2), c[1] + 1)
    return lax.while_loop(lambda c: c[0] > 1, step, (start, 0))


add(
    X,
    scan=lambda w, x: lax.scan(lambda c, v: (c * 0.5 + v, c), 0.0, x, reverse=True),
    scan_gradient=lambda w, x: jax.grad(
        lambda w: lax.scan(lambda c, v: (jnp.sin(c * w[0] + v), None), 1.0, x, unroll=2)[0]
    )(w),
    while_loop=collatz,
    fori_loop=lambda w, x: lax.fori_loop(0, 4, lambda i, c: c + i * x, w),
    fori_dynamic=lambda w, x: lax.fori_loop(
        0, jnp.asarray(jnp.abs(x[0]) * 5, "int32"), lambda i, c: c * 1.5 + x, w
    ),
    cond=lambda w, x: lax.cond(x[0] > 0, jnp.sin, lambda v: v * w, x),
    switch=lambda w, x: lax.switch(
        jnp.asarray(x[0] * 3, "int32"), [jnp.sin, jnp.cos, lambda v: v * w], x
    ),
    lax_map=lambda w, x: lax.map(lambda v: v * w, x, batch_size=2),
    associative_scan=lambda w, x: lax.associative_scan(jnp.maximum, x * w),
    cond_in_scan=lambda w, x: lax.scan(
        lambda c, v: (lax.cond(v > c, lambda: v, lambda: c), v > c), x[0], x
    ),
)

# --- linear algebra

positive = lambda m: m @ m.T + 3 * jnp.eye(3)
add(
    M,
    qr=lambda w, m: jnp.linalg.qr(m),
    svd=lambda w, m: jnp.linalg.svd(m)[1],
    svd_vectors=lambda w, m: jnp.linalg.svd(m, full_matrices=False),
    eigh=lambda w, m: jnp.linalg.eigh(positive(m)),
    eig=lambda w, m: jnp.linalg.eig(m),
    cholesky=lambda w, m: jnp.linalg.cholesky(positive(m)),
    lu=lambda w, m: jsp.linalg.lu(m),
    lu_solve=lambda w, m: jsp.linalg.lu_solve(jsp.linalg.lu_factor(m), w),
    solve=lambda w, m: jnp.linalg.solve(positive(m), w),
    solve_gradient=lambda w, m: jax.grad(lambda w: jnp.sum(jnp.linalg.solve(positive(m), w)))(w),
    solve_triangular=lambda w, m: jsp.linalg.solve_triangular(positive(m), w, lower=True),
    cho_solve=lambda w, m: jsp.linalg.cho_solve(jsp.linalg.cho_factor(positive(m)), w),
    inv=lambda w, m: jnp.linalg.inv(positive(m)),
    pinv=lambda w, m: jnp.linalg.pinv(m),
    det=lambda w, m: jnp.linalg.det(m),
    slogdet=lambda w, m: jnp.linalg.slogdet(m),
    slogdet_gradient=lambda w, m: jax.grad(lambda m: jnp.linalg.slogdet(m)[1])(positive(m)),
    expm=lambda w, m: jsp.linalg.expm(m),
    sqrtm=lambda w, m: jsp.linalg.sqrtm(positive(m)),
    schur=lambda w, m: jsp.linalg.schur(m),
    hessenberg=lambda w, m: jsp.linalg.hessenberg(m),
    lstsq=lambda w, m: jnp.linalg.lstsq(m[:, :2], w),
    norm=lambda w, m: (jnp.linalg.norm(m), jnp.linalg.norm(m, 2), jnp.linalg.cond(positive(m))),
    matrix_rank=lambda w, m: jnp.linalg.matrix_rank(m),
    matrix_power=lambda w, m: jnp.linalg.matrix_power(m, 3),
    tridiagonal=lambda w, m: lax.linalg.tridiagonal_solve(
        jnp.zeros(3).at[1:].set(m[0, 1:]), jnp.abs(m[1]) + 5.0, jnp.zeros(3).at[:2].set(m[2, :2]),
        m,
    ),
    cg=lambda w, m: jsp.sparse.linalg.cg(lambda v: positive(m) @ v, w)[0],
    einsum=lambda w, m: jnp.einsum("ij,jk,k->i", m, m, w),
)  # fmt: skip

# --- Fourier

add(
    M,
    fft=lambda w, m: jnp.fft.fft(m),
    ifft2=lambda w, m: jnp.fft.ifft2(m),
    rfft=lambda w, m: jnp.fft.rfft(m, 8),
    irfft=lambda w, m: jnp.fft.irfft(jnp.fft.rfft(m), 3),
    fftn=lambda w, m: jnp.fft.fftn(m),
    fftshift=lambda w, m: jnp.fft.fftshift(m),
    fft_gradient=lambda w, m: jax.grad(lambda m: jnp.sum(jnp.abs(jnp.fft.fft(m))))(m),
    dct=lambda w, m: jsp.fft.dct(m),
)

# --- sorting, searching, indexing

add(
    X,
    INTS,
    sort=lambda w, x, i: (jnp.sort(x), jnp.sort(i, descending=True)),
    argsort=lambda w, x, i: jnp.argsort(i, stable=True),
    sort_pairs=lambda w, x, i: lax.sort((i % 2, x), num_keys=2),
    top_k=lambda w, x, i: lax.top_k(x, 2),
    approx_max_k=lambda w, x, i: lax.approx_max_k(x, 2),
    unique=lambda w, x, i: jnp.unique(i, size=3, return_counts=True, fill_value=-1),
    searchsorted=lambda w, x, i: jnp.searchsorted(jnp.sort(x), w),
    nonzero=lambda w, x, i: jnp.nonzero(i > 4, size=3, fill_value=9),
    histogram=lambda w, x, i: jnp.histogram(x, bins=4, range=(-2, 2)),
    bincount=lambda w, x, i: jnp.bincount(i, length=11),
    argmax=lambda w, x, i: (jnp.argmax(x), jnp.argmin(i)),
    median=lambda w, x, i: (jnp.median(x), jnp.quantile(x, 0.3)),
    gather=lambda w, x, i: (x[i % 3], jnp.take(x, i, mode="clip"), x.at[i].get(mode="fill")),
    scatter=lambda w, x, i: (x.at[i % 3].add(w), x.at[i].set(1.0, mode="drop")),
    scatter_gradient=lambda w, x, i: jax.grad(lambda x: jnp.sum(x.at[i % 3].mul(w)))(x),
    segment_sum=lambda w, x, i: jax.ops.segment_sum(x, i % 2, num_segments=2),
    interp=lambda w, x, i: jnp.interp(w, jnp.arange(3.0), x),
    one_hot=lambda w, x, i: jax.nn.one_hot(i, 11),
    dynamic_slice=lambda w, x, i: lax.dynamic_slice(x, (i[0],), (2,)),
    cumulative=lambda w, x, i: (jnp.cumsum(i), lax.cumlogsumexp(x), lax.cummax(x)),
    where=lambda w, x, i: jnp.select([x > 1, x > 0], [x, w], 0.0),
    bits=lambda w, x, i: (lax.population_count(i), lax.clz(i), i << 2, ~i, i ^ 3),
    bitcast=lambda w, x, i: lax.bitcast_convert_type(x, "int32"),
    divisions=lambda w, x, i: (i // 2, i % -3, jnp.divmod(x, 0.7), jnp.gcd(i, 6)),
)

# --- transformations inside


def over_own_devices(w, x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")
    body = lambda v: lax.psum(jnp.sin(v), "i")
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())(x * w)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("power",))
def raised(times, x, *, power):
    return x**power * times


def references(w, x):
    ref = jax.new_ref(jnp.zeros(3))

    def add_one(i, _):
        ref[i] = x[i] * 2
        return None

    lax.fori_loop(0, 3, add_one, None)
    ref[...] += w
    return ref[...]


add(
    X,
    vmap=lambda w, x: jax.vmap(lambda a: a * w)(x),
    vmap_collectives=lambda w, x: jax.vmap(lambda a: a - lax.pmean(a, "k"), axis_name="k")(x),
    jit=lambda w, x: jax.jit(jax.jit(jnp.sin))(x),
    shard_map=over_own_devices,
    static_arguments=lambda w, x: raised(2, x, power=3),
    donated=lambda w, x: jax.jit(lambda a, b: a + b, donate_argnums=0)(x * 2, w),
    inlined=lambda w, x: jax.jit(lambda a: a + 1, inline=True)(x),
    partial=functools.partial(lambda scale, w, x: x * scale, 3),
    references=references,
    debug_callback=lambda w, x: jax.debug.callback(lambda v: None, x) or x * 2,
    pure_callback=lambda w, x: jax.pure_callback(
        lambda v: np.asarray(v) * 2, x, x, vmap_method="expand_dims"
    ),
    switches_x64=lambda w, x: jnp.sum(x.astype("float32")),
    error_free=lambda w, x: jnp.nan_to_num(jnp.log(x)),
    constants=lambda w, x: (np.float32(3), 2, 1.5, True, jnp.arange(2)),
    named_scope=lambda w, x: jax.named_call(jnp.sin, name="sine")(x),
    optimization_barrier=lambda w, x: lax.optimization_barrier(x) + 1,
    stop_gradient=lambda w, x: jax.grad(lambda v: jnp.sum(lax.stop_gradient(v) * v))(x),
    precision=lambda w, x: jnp.dot(x, w, precision="highest"),
    reduce_precision=lambda w, x: lax.reduce_precision(x, 5, 7),
    accumulate=lambda w, x: jnp.dot(
        x.astype("bfloat16"), w.astype("bfloat16"), preferred_element_type="float32"
    ),
)

# --- random numbers

DISTRIBUTIONS = {
    "uniform": lambda k: jax.random.uniform(k, (3,)),
    "normal": lambda k: jax.random.normal(k, (3,)),
    "bits": lambda k: jax.random.bits(k, (3,), "uint8"),
    "randint": lambda k: jax.random.randint(k, (3,), 0, 9),
    "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (3,)),
    "binomial": lambda k: jax.random.binomial(k, 9.0, 0.4, (3,)),
    "ball": lambda k: jax.random.ball(k, 3),
    "beta": lambda k: jax.random.beta(k, 0.5, 2.0, (3,)),
    "categorical": lambda k: jax.random.categorical(k, W, shape=(3,)),
    "cauchy": lambda k: jax.random.cauchy(k, (3,)),
    "chisquare": lambda k: jax.random.chisquare(k, 3.0, (3,)),
    "choice": lambda k: jax.random.choice(k, 9, (3,), replace=False),
    "choice_weighted": lambda k: jax.random.choice(k, W, (4,), p=jnp.asarray([0.1, 0.2, 0.7])),
    "dirichlet": lambda k: jax.random.dirichlet(k, jnp.ones(3)),
    "double_sided_maxwell": lambda k: jax.random.double_sided_maxwell(k, 0.0, 1.0, (3,)),
    "exponential": lambda k: jax.random.exponential(k, (3,)),
    "f": lambda k: jax.random.f(k, 2.0, 3.0, (3,)),
    "gamma": lambda k: jax.random.gamma(k, 0.7, (3,)),
    "loggamma": lambda k: jax.random.loggamma(k, 0.7, (3,)),
    "generalized_normal": lambda k: jax.random.generalized_normal(k, 2.0, (3,)),
    "geometric": lambda k: jax.random.geometric(k, 0.3, (3,)),
    "gumbel": lambda k: jax.random.gumbel(k, (3,)),
    "laplace": lambda k: jax.random.laplace(k, (3,)),
    "logistic": lambda k: jax.random.logistic(k, (3,)),
    "lognormal": lambda k: jax.random.lognormal(k, 1.0, (3,)),
    "maxwell": lambda k: jax.random.maxwell(k, (3,)),
    "multinomial": lambda k: jax.random.multinomial(k, 5.0, jnp.asarray([0.2, 0.3, 0.5])),
    "multivariate_normal": lambda k: jax.random.multivariate_normal(k, W, jnp.eye(3)),
    "orthogonal": lambda k: jax.random.orthogonal(k, 3),
    "pareto": lambda k: jax.random.pareto(k, 2.0, (3,)),
    "permutation": lambda k: jax.random.permutation(k, 5),
    "permutation_rows": lambda k: jax.random.permutation(k, jnp.eye(3), independent=True),
    "poisson": lambda k: jax.random.poisson(k, 4.0, (3,)),
    "rademacher": lambda k: jax.random.rademacher(k, (3,)),
    "rayleigh": lambda k: jax.random.rayleigh(k, 1.0, (3,)),
    "t": lambda k: jax.random.t(k, 3.0, (3,)),
    "triangular": lambda k: jax.random.triangular(k, 0.0, 0.5, 1.0, (3,)),
    "truncated_normal": lambda k: jax.random.truncated_normal(k, -1.0, 2.0, (3,)),
    "wald": lambda k: jax.random.wald(k, 1.0, (3,)),
    "weibull_min": lambda k: jax.random.weibull_min(k, 1.0, 2.0, (3,)),
    "split_and_fold": lambda k: jax.random.fold_in(jax.random.split(k)[1], 7),
    "gamma_gradient": lambda k: jax.grad(lambda a: jnp.sum(jax.random.gamma(k, a, (3,))))(0.7),
}
for name, draw in DISTRIBUTIONS.items():
    add(KEYS, **{f"random_{name}": lambda w, k, draw=draw: draw(k)})
add(RAW, random_raw_keys=lambda w, k: (jax.random.normal(k, (2,)), jax.random.split(k)))
for impl in ("rbg", "unsafe_rbg"):
    keys = jax.random.split(jax.random.key(5, impl=impl), N)
    add(keys, **{f"random_{impl}": lambda w, k: (jax.random.normal(k, (2,)), jax.random.split(k))})

# --- special functions and layers

IMAGES = jnp.asarray(normal(6, 6, 2))
KERNEL = jnp.asarray(normal(3, 2, 4, seed=1)[:3])


def convolved(x, kernel, **options):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x[None], kernel.astype(x.dtype), (1, 1), "SAME", dimension_numbers=dims, **options
    )[0]


def pooled(x, init, op):
    return lax.reduce_window(x, init, op, (2, 2, 1), (2, 2, 1), "VALID")


add(
    jnp.abs(X) + 0.1,
    gamma_functions=lambda w, x: (jsp.special.gammaln(x), jsp.special.digamma(x),
                                  jsp.special.polygamma(1, x), jsp.special.gammainc(2.0, x)),
    beta_functions=lambda w, x: (jsp.special.betainc(1.5, 2.0, x % 1), jsp.special.betaln(x, 2.0)),
    error_functions=lambda w, x: (jsp.special.erf(x), jsp.special.erfc(x),
                                  jsp.special.erfinv(x % 1), jsp.special.ndtri(x % 1)),
    bessel=lambda w, x: (jsp.special.i0(x), jsp.special.i1e(x)),
    zeta=lambda w, x: (jsp.special.zeta(x + 1.5, 1.0), jsp.special.expi(x)),
    softmax=lambda w, x: (jax.nn.softmax(x), jax.nn.logsumexp(x), jax.nn.gelu(x), jax.nn.silu(x)),
    distributions=lambda w, x: (jsp.stats.norm.logpdf(x), jsp.stats.gamma.cdf(x, 2.0)),
    powers=lambda w, x: (x**2.5, x**-2, jnp.cbrt(x), jnp.hypot(x, w), jnp.logaddexp(x, w)),
)  # fmt: skip
add(
    IMAGES,
    convolution=lambda w, x: convolved(x, KERNEL),
    convolution_dilated=lambda w, x: convolved(x, KERNEL, rhs_dilation=(2, 2)),
    convolution_gradient=lambda w, x: jax.grad(
        lambda k, x: jnp.sum(jnp.tanh(convolved(x, k))), (0, 1)
    )(KERNEL, x),
    max_pool=lambda w, x: pooled(x, -jnp.inf, lax.max),
    average_pool=lambda w, x: pooled(x, 0.0, lax.add) / 4,
    pool_gradient=lambda w, x: jax.grad(lambda x: jnp.sum(pooled(x, -jnp.inf, lax.max) ** 2))(x),
    resize=lambda w, x: jax.image.resize(x, (4, 5, 2), "bilinear"),
    attention=lambda w, x: jax.nn.dot_product_attention(x[None], x[None], x[None]),
    pad_and_roll=lambda w, x: (jnp.pad(x, 1, mode="reflect"), jnp.roll(x, 2, 1), jnp.flip(x)),
)

# --- types

FLOATS = "float16 bfloat16 float32 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e3m4".split()
INTEGERS = "int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 bool".split()
OTHERS = ["complex64", "float4_e2m1fn", "float8_e8m0fnu"]


def of_dtype(name):
    values = np.arange(3 * N).reshape(N, 3) % 3
    return jnp.asarray(values.astype(np.float32).astype(getattr(ml_dtypes, name, name)))


def typed(w, x):
    return x, x.real.astype("float32") + w, x[::-1], x == x[0], (w * w > 1).astype(x.dtype)


for name in [*FLOATS, *INTEGERS, *OTHERS]:
    add(of_dtype(name), **{f"dtype_{name}": typed})
for name in [*FLOATS[:3], "complex64"]:
    add(of_dtype(name), **{f"math_{name}": lambda w, x: (x * 2, jnp.exp(x), jnp.sum(x), x @ x)})
for name in "int8 uint8 int32 uint16".split():
    add(of_dtype(name), **{f"math_{name}": lambda w, x: (x * 3, x // 2, jnp.sum(x), x - 5, x @ x)})

# --- trees

Pair = namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    at: jax.Array
    unit: str = dataclasses.field(metadata={"static": True}, default="m")


class Custom:
    def __init__(self, *items):
        self.items = items


jax.tree_util.register_pytree_node(Custom, lambda c: (c.items, None), lambda _, xs: Custom(*xs))

add(Pair(X, X[:, 0]), namedtuple=lambda w, p: Pair(p.right, p.left * w))
add(Point(X, "km"), dataclass=lambda w, p: Point(p.at * len(p.unit), "cm"))
add(Custom(X, (INTS, None)), custom_node=lambda w, c: Custom(c.items[1][0], {"b": c.items[0]}))
add(X, {"a": [], "b": None}, nothing=lambda w, x, y: (None, {"x": x, "y": y}, []))
add(X, no_results=lambda w, x: None)
add(
    jnp.zeros((N, 0, 3)), zero_size=lambda w, x: (x, jnp.sum(x), x.reshape(3, 0) @ jnp.ones((0, 2)))
)
add(X, zero_size_result=lambda w, x: x[:0])


# --- the table

SIZE = 8
"""Bodies in one program: each costs a compilation more, a program costs a run on Beam more."""


def groups():
    """Names of bodies with the same placed arguments, at most `SIZE` together."""
    found = []
    for name, (_, placed) in CASES.items():
        before = CASES[found[-1][0]][1] if found else ()
        same = len(before) == len(placed) and all(map(operator.is_, before, placed))
        if not same or len(found[-1]) == SIZE:
            found.append([])
        found[-1].append(name)
    return found


def program_of(names):
    @bj.program(clients=N)
    def prog(w, *xs):
        bodies = {name: functools.partial(CASES[name][0], w) for name in names}
        return {
            name: bj.map_fn(lambda *xs, body=body: body(*xs), xs) for name, body in bodies.items()
        }

    return prog, (W, *CASES[names[0]][1])


def raw(x):
    if x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape, bool)
    return np.asarray(jax.random.key_data(x) if isinstance(x, jax.Array) and is_key(x) else x)


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def assert_same_types(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for path, left, right in pairs(found, expected):
        types = [(x.dtype, x.shape, getattr(x, "weak_type", False)) for x in (left, right)]
        assert types[0] == types[1], path


def pairs(found, expected):
    for (path, left), right in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        yield jax.tree_util.keystr(path), left, right


def assert_close(found, expected):
    for path, left, right in pairs(found, expected):
        left, right = raw(left), raw(right)
        if not jnp.issubdtype(right.dtype, np.inexact):
            np.testing.assert_array_equal(left, right, err_msg=path)
            continue
        eps = float(ml_dtypes.finfo(right.real.dtype).eps)
        wide = np.complex128 if right.dtype.kind == "c" else np.float64
        left, right = left.astype(wide), right.astype(wide)
        finite = np.abs(right[np.isfinite(right)])
        atol = 64 * eps * finite.max(initial=0.0)
        np.testing.assert_allclose(left, right, rtol=64 * eps, atol=atol, err_msg=path)


def assert_same_bits(found, expected):
    for path, left, right in pairs(found, expected):
        assert raw(left).tobytes() == raw(right).tobytes(), path


def check(fn, args, beam=True):
    expected = jax.jit(fn)(*args)
    local = bj.run(fn, *args, runner="local", options=OPTIONS)
    assert_same_types(local, expected)
    assert_close(local, expected)
    if beam:
        by_beam = bj.run(fn, *args, options=OPTIONS)
        assert_same_types(by_beam, expected)
        assert_same_bits(by_beam, local)


@pytest.mark.table
@pytest.mark.parametrize("names", groups(), ids=lambda names: f"{names[0]}-{names[-1]}")
def test_bodies(names):
    check(*program_of(names))


# --- 64 bits

WIDE = """scan while_loop fori_loop qr eigh svd solve expm fft rfft sort top_k unique histogram bits
    random_normal random_randint random_choice random_poisson gamma_functions convolution
    custom_jvp references pure_callback debug_callback shard_map namedtuple""".split()


def widened(x):
    if is_key(x) or not jnp.issubdtype(x.dtype, np.number):
        return x
    return x.astype({"f": "float64", "i": "int64", "u": x.dtype}[np.dtype(x.dtype).kind])


@pytest.mark.table
@pytest.mark.parametrize("names", [WIDE[i::4] for i in range(4)], ids=lambda names: names[0])
def test_bodies_in_64_bits(names):
    with jax.enable_x64(True):
        for name in names:
            prog, args = program_of([name])
            check(prog, jax.tree.map(widened, args), beam=name in names[:2])


@pytest.mark.parametrize("dtype", ["float64", "complex128", "int64", "uint64"])
def test_types_of_64_bits(dtype):
    with jax.enable_x64(True):
        x = of_dtype(dtype)

        @bj.program(clients=N)
        def prog(x, scalar, y):
            mapped = bj.map_fn(lambda v: (v * 2, v @ v, v.real.astype("float32"), v + scalar), x)
            return mapped, bj.reduce_sum(x), bj.broadcast(y), bj.reduce_mean(x), y * scalar

        check(prog, (x, 3, x[0]))


# --- reductions and broadcasts of every type

REDUCE = {op: getattr(bj, f"reduce_{op}") for op in "sum mean max min prod any all".split()}


def works(stage, reduce, x):
    try:
        stage(jax.jit(bj.program(clients=N)(reduce)), x)
    except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return False
    return True


def those_that_work(x):
    """The reductions that JAX can stage and XLA can compile; most often it can compile all."""
    trace = lambda fn, x: fn.trace(x)
    compiled = lambda fn, x: fn.lower(x).compile()
    staged = {op: fn for op, fn in REDUCE.items() if works(trace, fn, x)}
    if works(compiled, lambda x: [fn(x) for fn in staged.values()], x):
        return staged
    return {op: fn for op, fn in staged.items() if works(compiled, fn, x)}


@pytest.mark.table
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *OTHERS])
def test_reductions_and_broadcasts(dtype):
    x = of_dtype(dtype)
    reduce = those_that_work(x)
    if jnp.dtype(dtype).itemsize == 1:
        reduce.pop("mean", None)  # `jit` overflows before it divides, a run is right
    if dtype == "float8_e8m0fnu":
        reduce.pop("sum", None)  # `jit` adds to a zero, which this type has not
    if dtype not in ("int2", "uint2", "float8_e8m0fnu", "float4_e2m1fn"):
        assert {"sum", "max", "min"} & set(reduce)

    @bj.program(clients=N)
    def prog(y, x):
        return {op: fn(x) for op, fn in reduce.items()}, bj.broadcast(y), x[:, ::-1], y

    check(prog, (x[1], x))


# --- the function that is run


@bj.program(clients=N)
def scaled_sum(power, w, x):
    y = bj.map_fn(lambda v: w * v**power, x)
    return bj.reduce_sum(y), {"y": y, "n": bj.reduce_sum(bj.broadcast(1.0))}, w * 2


FUNCTIONS = {
    "partial": (functools.partial(scaled_sum, 2), W, X),
    "static_argnums": (
        functools.partial(jax.jit(scaled_sum, static_argnums=0), 3), W, X
    ),
    "donated": (jax.jit(functools.partial(scaled_sum, 2), donate_argnums=1), 2.0, X),
    "weak types": (functools.partial(scaled_sum, 2), 3.0, X),
    "weak integers": (functools.partial(scaled_sum, 1), 3, INTS),
    "numpy": (functools.partial(scaled_sum, 2), np.float32(2), np.asarray(X)),
    "weak results": (
        bj.program(clients=N)(
            lambda s, x: (bj.map_fn(lambda v: s * 2, x), bj.broadcast(s), bj.reduce_sum(x) * s, s)
        ), 2.5, X,
    ),
    "random seeds": (
        bj.program(clients=N)(
            lambda s, x: bj.map_fn(lambda v: jax.random.normal(jax.random.key(s), v.shape) * v, x)
        ), 7, X,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_functions(name):
    fn, *args = FUNCTIONS[name]
    copies = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args)
    expected = jax.jit(lambda *args: fn(*args))(*copies)
    for runner in ("local", "DirectRunner"):
        found = bj.run(fn, *args, runner=runner, options=OPTIONS)
        assert_same_types(found, expected)
        assert_close(found, expected)
    np.testing.assert_array_equal(args[-1], copies[-1]) if name != "donated" else None
