"""Passes whose members convolve with kernels of their own: found, and computed one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_run import assert_close, assert_same_bits

import beamjax as bj

N = 20
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(N, 1, 2, 6, 6)).astype(np.float32)
KERNEL = RNG.normal(size=(3, 2, 3, 3)).astype(np.float32)
KERNELS = RNG.normal(size=(N, 3, 2, 3, 3)).astype(np.float32)


def convolve(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


def loss(kernel, x):
    return jnp.mean(convolve(x, kernel) ** 2)


def step(kernel, x):
    return kernel - 0.1 * jax.grad(loss)(kernel, x)


def in_scan(kernel, x):
    return lax.scan(lambda k, _: (step(k, x), None), kernel, length=2)[0]


def in_while(kernel, x):
    state = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, step(s[1], x)), (0, kernel))
    return state[1]


def late(kernel, x):
    """A kernel that is the members' own from the third round on only."""

    def round_(carry, _):
        first, second = carry
        return (x[:, :, :3, :3], first), jnp.sum(convolve(x, second))

    return jnp.sum(lax.scan(round_, (kernel[:1], kernel[:1]), length=3)[1])


def shared_in_scan(kernel, x):
    """The images change from round to round, the kernel does not."""
    square = kernel[:2]
    return lax.scan(lambda y, _: (jnp.tanh(convolve(y, square)), None), x, length=2)[0]


OWN = {
    "a step of training": lambda w, x, k: step(step(w, x), x),
    "in scan": lambda w, x, k: in_scan(w, x),
    "in while": lambda w, x, k: in_while(w, x),
    "in fori_loop": lambda w, x, k: lax.fori_loop(0, 2, lambda _, v: step(v, x), w),
    "in cond": lambda w, x, k: lax.cond(x[0, 0, 0, 0] > 0, in_scan, lambda w, x: w, w, x),
    "in jit": lambda w, x, k: jax.jit(in_scan)(w, x),
    "in remat": lambda w, x, k: jax.checkpoint(in_scan)(w, x),
    "late": lambda w, x, k: late(w, x),
    "given kernels": lambda w, x, k: convolve(x, k),
}
SHARED = {
    "images": lambda w, x, k: convolve(x, w),
    "in scan": lambda w, x, k: shared_in_scan(w, x),
    "in cond": lambda w, x, k: lax.cond(
        x[0, 0, 0, 0] > 0, convolve, lambda x, w: 2 * convolve(x, w), x, w
    ),
    "kernels over one image": lambda w, x, k: convolve(jnp.ones((1, 2, 6, 6)), k),
    "nothing": lambda w, x, k: jnp.sum(x),
}


def program_of(body):
    @bj.program(clients=N)
    def program(w, x, k):
        return bj.reduce_mean(bj.map_fn(lambda x, k: body(w, x, k), (x, k)))

    return program


def how(program):
    return "members one after the other: convolutions" in str(
        bj.explain(program, KERNEL, IMAGES, KERNELS)
    )


@pytest.mark.parametrize("name", OWN)
def test_own_kernels_are_found_and_computed_one_by_one(name):
    program = program_of(OWN[name])
    assert how(program)
    found = bj.run(program, KERNEL, IMAGES, KERNELS, runner="local")
    assert_close(found, jax.jit(program)(KERNEL, IMAGES, KERNELS))


@pytest.mark.parametrize("name", SHARED)
def test_shared_kernels_are_computed_together(name):
    program = program_of(SHARED[name])
    assert not how(program)
    found = bj.run(program, KERNEL, IMAGES, KERNELS, runner="local")
    assert_close(found, jax.jit(program)(KERNEL, IMAGES, KERNELS))


def test_the_bits_are_those_of_beam():
    program = program_of(OWN["in scan"])
    options = {"shard_size": 8}
    local = bj.run(program, KERNEL, IMAGES, KERNELS, runner="local", options=options)
    assert_same_bits(bj.run(program, KERNEL, IMAGES, KERNELS, options=options), local)


def test_accelerators_get_all_members_at_once():
    program = program_of(OWN["in scan"])
    plan = str(bj.explain(program, KERNEL, IMAGES, KERNELS, options={"platforms": ("cuda",)}))
    assert "one after the other" not in plan
