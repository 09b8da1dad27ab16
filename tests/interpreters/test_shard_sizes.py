"""How many members make a shard."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import plan_of
from jax import lax
from streams import stream

import beamjax as bj


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


def mean_of(body, *arrays, shared=None):
    """The mean of `body(shared, *members)`, and its arguments."""

    @bj.program(clients=None)
    def prog(w, *xs):
        return bj.reduce_mean(bj.map_fn(lambda *x: body(w, *x), xs))

    # What is abstract comes by shards; what is shared does not.
    return prog, np.zeros(() if shared is None else shared.shape, np.float32), *arrays


def sgd(loss, steps):
    def body(w, *x):
        one = lambda w, _: (w - 0.1 * jax.grad(loss)(w, *x), None)
        return lax.scan(one, w, None, length=steps)[0]

    return body


def squares(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def regression(steps, n=10_000, rows=32, features=64):
    arrays = array(n, rows, features), array(n, rows)
    return mean_of(sgd(squares, steps), *arrays, shared=array(features))


def convolution(kernel, image):
    out = lax.conv_general_dilated(image[None], kernel, (1, 1), "SAME")
    return jnp.mean(out**2)


def repeated_sine(w, x):
    for _ in range(100):
        x = jnp.sin(x)
    return jnp.sum(x) * w


def draws(n):
    return mean_of(lambda w, k: jnp.sin(k.astype("float32")) ** 2, array(n, dtype="int32"))


def scaled(n, *shape):
    return mean_of(lambda w, x: x * w, array(n, *shape))


def total(n, size):
    return mean_of(lambda w, x: jnp.sum(jnp.tanh(x)) * w, array(n, size))


def table(n):
    @bj.program(rows=n)
    def prog(x):
        mean = bj.reduce_mean(x)
        return (x - mean[None]).T @ (x - mean[None])

    return prog, array(n, 32)


def small_network(n):
    def loss(w, x):
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2

    @bj.program(rows=n)
    def prog(u, v, x):
        return bj.reduce_mean(bj.map_fn(lambda x: jax.grad(loss)((u, v), x), x))

    return prog, jnp.zeros((16, 32)), jnp.zeros(32), array(n, 16)


def outer_products(n, size):
    prog = bj.program(clients=n)(lambda x: bj.reduce_sum(jnp.tanh(x[:, :, None] * x[:, None, :])))
    return prog, array(n, size)


def many_results(count):
    @bj.program(clients=10_000)
    def prog(x):
        return [bj.map_fn(lambda v, i=i: jnp.sin(v * i), x) for i in range(1, count)]

    return prog, array(10_000, 2048)


def two_placements():
    @bj.program(a=5000, b=5000)
    def prog(x, y):
        scale = bj.reduce_mean(bj.map_fn(jnp.sin, x, placement="a"), placement="a")
        first = bj.reduce_sum(bj.map_fn(lambda v: v * scale, y, placement="b"), placement="b")
        return bj.reduce_sum(bj.map_fn(lambda v: v + first[0], x, placement="a"), placement="a")

    return prog, array(5000), array(5000, 30_000)


def waits_for_data():
    body = lambda w, x, y: lax.while_loop(lambda w: (w**2).sum() > 1, lambda w: w - y.mean(), x[0])
    return mean_of(body, *regression(10)[2:], shared=array(64))


def calls_back():
    def body(w, x, y):
        jax.debug.callback(lambda v: None, y[0])
        return w * x[0]

    return mean_of(body, *regression(10)[2:], shared=array(64))


def in_order():
    @bj.program(clients=None)
    def prog(w, x):
        return bj.reduce(lambda a, b: a + b, bj.map_fn(lambda v: v @ w, x))

    return prog, jnp.zeros(64), array(10_000, 32, 64)


def without_a_pass():
    return bj.program(clients=100)(lambda x: x + 1), jnp.zeros(3)


AT_ONCE = {"member_loop": "vmap"}
BATCHES = {"member_loop": "batches"}
CUDA, BOTH = {"platforms": ["cuda"]}, {"platforms": ["cpu", "cuda"]}
SIZES = [
    # All members of a shard at once: as many as the cache holds, at most 64.
    (regression(10), AT_ONCE, 64),
    (regression(50, 4096, 64, 256), AT_ONCE, 8),
    (mean_of(sgd(convolution, 1), array(500, 3, 28, 28), shared=array(8, 3, 3, 3)), AT_ONCE, 8),
    (mean_of(repeated_sine, array(1000, 1000)), AT_ONCE, 64),
    (total(20, 2_500_000), AT_ONCE, 8),
    (outer_products(1000, 256), AT_ONCE, 8),
    (small_network(10**6), AT_ONCE, 1024),
    # A shard reads and gives at most 32 MiB: so many arrays of 8 KiB a member.
    (many_results(128), AT_ONCE, 32),
    (many_results(129), AT_ONCE, 16),
    # Tiny members come in thousands, and in more where there are many.
    (draws(100_000), AT_ONCE, 4096),
    (draws(262_144), AT_ONCE, 4096),
    (draws(524_287), AT_ONCE, 4096),
    (draws(524_288), AT_ONCE, 8192),
    (draws(10**9), AT_ONCE, 65_536),
    # No more than there are members, in eights.
    *((scaled(n, 400), AT_ONCE, size) for n, size in [(1, 8), (8, 8), (9, 16), (63, 64), (65, 64)]),
    (without_a_pass(), {}, 8),
    (two_placements(), AT_ONCE, (4096, 8)),
    # On a CPU, a shard has many batches of such a size; work, bytes and n bound their number.
    (regression(10), {}, 512),
    (regression(10), BATCHES, 512),
    (regression(10), CUDA, 64),
    (regression(10), BOTH, 64),
    (regression(1000), {}, 64),
    (regression(10, n=4096), {}, 256),
    (total(10_000, 65_536), {}, 32),
    (small_network(10**6), {}, 32_768),
    (waits_for_data(), {}, 64),
    (calls_back(), {}, 64),
    (in_order(), {}, 64),
    # Tables that are only read come by 8 MiB.
    (table(100_000), {}, 4096),
    (table(2_000_000), {}, 65_536),
    (table(10**9), {}, 65_536),
    # The user's size, and no more members than there are.
    (scaled(1000), {"shard_size": 24}, 24),
    (scaled(30), {"shard_size": 64}, 32),
]


def test_sizes_fit_the_members_the_cache_and_the_platform():
    faults = []
    for number, ((fn, *args), options, expected) in enumerate(SIZES):
        found = tuple(plan_of(fn, *args, **options).shard_sizes.values())
        if found != (expected if isinstance(expected, tuple) else (expected,)):
            faults.append((number, args, options, found, expected))
    assert faults == []


def test_members_of_unknown_number_come_in_shards_of_the_usual_size():
    fn = bj.program(clients=None)(lambda x: bj.reduce_mean(bj.map_fn(jnp.tanh, x)))
    for size in (1000, 30_000, 300_000):
        known = plan_of(fn, array(10_000, size), **AT_ONCE).shard_sizes
        members = stream(np.zeros((3, size), np.float32))
        assert plan_of(fn, members, **AT_ONCE).shard_sizes == known, size
