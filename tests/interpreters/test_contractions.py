"""Sums over members of per-member products: one product, without the value of any member."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, planned
from jax import lax

import beamjax as bj
from beamjax.interpreters.staging.lines import user_line

pytestmark = pytest.mark.versions

N = 37
RNG = np.random.default_rng(5)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


WEIGHTS, WIDE, X, ROWS = normal(7, 5), normal(5, 6), normal(N, 7), normal(N, 3, 7)
KERNEL, IMAGES = normal(3, 3, 2, 8), normal(N, 4, 6, 2)
MEMBER_WEIGHTS = np.abs(normal(N)) + np.float32(0.5)
CONV = {
    "channels last": ("NHWC", "HWIO", "NHWC"),
    "channels first": ("NCHW", "OIHW", "NCHW"),
}


def gradient(loss, *weights, reduce=bj.reduce_mean):
    """A program of members: the gradient by weights that they share."""

    @bj.program(placements={"m": None})
    def mean(weights, *xs):
        return reduce(bj.map_fn(lambda *xs: loss(*weights, *xs), *xs))

    return lambda *xs: jax.grad(mean)(tuple(map(jnp.asarray, weights)), *xs)


def tanh_loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def twice(w, x):
    return tanh_loss(w, x) + tanh_loss(w, jnp.sin(x))


def perceptron(w, v, x):
    return jnp.sum(jnp.square(jax.nn.relu(x @ w) @ v))


def attention(w, rows):
    q = rows @ w
    return jnp.sum(jax.nn.softmax(q @ q.T) @ q)


def narrow(w, x):
    return jnp.sum((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(np.float32) ** 2)


def sliced(w, x):
    return jnp.sum(jnp.tanh(x[:4] @ w[:4, 1:])) + jnp.sum(jnp.cos(x[:3] @ w[4:, :3]))


def convolved(layout):
    def loss(kernel, image):
        numbers = CONV[layout]
        if layout == "channels first":
            image, kernel = image.transpose(2, 0, 1), kernel.transpose(3, 2, 0, 1)
        y = lax.conv_general_dilated(image[None], kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.sum(jnp.tanh(y))

    return loss


@bj.program(placements={"m": None})
def second_moment(x):
    return bj.reduce_mean(bj.map_fn(lambda x: jnp.outer(x, x), x))


@bj.program(placements={"m": None})
def weighted_moment(x, weights):
    return bj.reduce_sum(bj.map_fn(lambda x, w: w * jnp.outer(x, 2 * x) / 3, (x, weights)))


@bj.program(placements={"m": None})
def crossed_moments(x):
    """Both orders of the axes, one of which is transposed."""
    crossed = lambda x: jnp.sin(x[:4])[None] * x[:, None] + jnp.outer(x, jnp.cos(x[:4]))
    return bj.reduce_mean(bj.map_fn(crossed, x))


@bj.program(placements={"m": None})
def trained(w, x):
    """Gradient steps in a loop that the program drives."""

    def step(w, _):
        loss = lambda w: bj.reduce_mean(bj.map_fn(lambda x: tanh_loss(w, x), x))
        return w - jnp.float32(0.1) * jax.grad(loss)(w), None

    return lax.scan(step, w, length=3)[0]


CONTRACTED = {
    "one layer": (gradient(tanh_loss, WEIGHTS), X),
    "one layer, by a sum": (gradient(tanh_loss, WEIGHTS, reduce=bj.reduce_sum), X),
    "two layers": (gradient(perceptron, WEIGHTS, WIDE), X),
    "weights used twice": (gradient(twice, WEIGHTS), X),
    "rows of a member": (gradient(attention, normal(7, 40)), ROWS),
    "bfloat16": (gradient(narrow, WEIGHTS), X),
    "slices of the weights": (gradient(sliced, WEIGHTS), X),
    "jit inside": (gradient(jax.jit(tanh_loss), WEIGHTS), X),
    "remat inside": (gradient(jax.checkpoint(perceptron), WEIGHTS, WIDE), X),
    "convolution, channels last": (gradient(convolved("channels last"), KERNEL), IMAGES),
    "convolution, channels first": (gradient(convolved("channels first"), KERNEL), IMAGES),
    "second moment": (second_moment, X),
    "scaled by numbers of members": (weighted_moment, X, MEMBER_WEIGHTS),
    "crossed moments": (crossed_moments, X),
    "training loop": (trained, WEIGHTS, X),
    "several at once": (jax.vmap(gradient(tanh_loss, WEIGHTS), 1), np.stack([X, X * 2], 1)),
}  # fmt: skip


def contractions(fn, *args, **options):
    """The products that a program computes outside of the bodies of its maps."""
    eqns = planned(fn, *args, **options).flat.walk()
    return [e for e in eqns if e.primitive.name in ("dot_general", "conv_general_dilated")]


@pytest.mark.parametrize("name", CONTRACTED)
def test_products_are_contracted_over_the_members(name):
    fn, *args = CONTRACTED[name]
    assert contractions(fn, *args), "no sum of products became a contraction"
    options = {"shard_size": 16}  # The last of three shards has padding.
    expected = jax.jit(fn)(*args)
    local = bj.run(fn, *args, runner="local", options=options)
    tolerance = 0.05 if name == "bfloat16" else 5e-5
    assert_close(local, expected, tolerance, tolerance)
    assert_same_bits(bj.run(fn, *args, options=options), local)
    loop = bj.run(fn, *args, runner="local", options=options | {"member_loop": "loop"})
    assert_close(loop, expected, tolerance, tolerance)


def test_bodies_keep_the_lines_of_the_user():
    fn, *args = CONTRACTED["two layers"]
    (mapped,) = (e for e in planned(fn, *args).flat.walk() if e.primitive.name == "bj_map")
    lines = {user_line(eqn) for eqn in mapped.params["jaxpr"].jaxpr.eqns}
    start = perceptron.__code__.co_firstlineno
    assert f"{__file__}:{start + 1} (perceptron)" in lines


@bj.program(placements={"m": None})
def also_read(x):
    outer = bj.map_fn(lambda x: jnp.outer(x, x), x)
    return bj.reduce_sum(outer), bj.reduce_max(outer)


@bj.program(placements={"m": None})
def clipped(x):
    return bj.reduce_sum(bj.map_fn(lambda x: jnp.minimum(jnp.outer(x, x), 1), x))


@bj.program(placements={"m": None})
def of_integers(x):
    return bj.reduce_sum(bj.map_fn(lambda x: jnp.outer(x, x).astype(np.int32), x))


@bj.program(placements={"m": None})
def of_rows(x):
    return bj.reduce_sum(bj.map_fn(lambda rows: rows.T @ rows, x))


@bj.program(placements={"m": None})
def with_effects(x):
    def body(x):
        jax.debug.callback(lambda x: None, x[0])
        return jnp.outer(x, x)

    return bj.reduce_sum(bj.map_fn(body, x))


@bj.program(placements={"m": None})
def narrow_mean(x):
    return bj.reduce_mean(bj.map_fn(lambda x: jnp.outer(x, x).astype(jnp.bfloat16), x))


@bj.program(placements={"m": None})
def of_a_server_value(x):
    total = bj.reduce_sum(x)
    return bj.reduce_sum(bj.map_fn(lambda x: jnp.outer(total, x), x))


@pytest.mark.parametrize(
    ("fn", "x", "options"),
    [
        pytest.param(also_read, X, {}, id="its members are read otherwise"),
        pytest.param(clipped, X, {}, id="not linear"),
        pytest.param(of_integers, X, {}, id="integers"),
        pytest.param(second_moment, X, {"on_nonfinite": "drop"}, id="members are looked at"),
        pytest.param(with_effects, X, {}, id="effects"),
        pytest.param(narrow_mean, X, {}, id="a mean of few bits"),
        pytest.param(of_a_server_value, X, {}, id="a factor that members share"),
        pytest.param(of_rows, normal(N, 60, 2), {}, id="smaller than its factors"),
    ],
)  # fmt: skip
def test_other_sums_stay(fn, x, options):
    assert not contractions(fn, x, **options)
    assert_close(bj.run(fn, x, runner="local", options=options), jax.jit(fn)(x), 2e-4, 2e-4)
