"""Bodies over a shard: how members go through them, their masks, and their convolutions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, plan_of
from jax import export, lax
from jax.extend import core as jex

import beamjax as bj
from beamjax.bodies.jaxprs import equations
from beamjax.bodies.load import load_body
from beamjax.interpreters.lowering import lower
from beamjax.interpreters.lowering import shard_size as sizing
from beamjax.interpreters.lowering.convolutions import with_channels_last
from beamjax.interpreters.program import Eqn
from beamjax.plan.shard import Shard
from beamjax.runtime.shard_executor import LoadedPass, ShardExecutor

N, D = 20, 16
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


@pytest.fixture
def large(monkeypatch):
    """All members are taken to be large."""
    monkeypatch.setattr(sizing, "MAX_SHARD_BYTES", 0)


@pytest.fixture
def apart(monkeypatch):
    """Masks are taken to cost so much that short shards always have an executable of their own."""
    monkeypatch.setattr(lower, "MASKED_VALUES", 0)


# --- all members of a shard at once, or, where they are large, one after the other


def is_one_by_one(fn, *args, **options):
    return "members sequentially" in str(bj.explain(fn, *args, options=options))


def test_large_members_go_one_after_the_other(large):
    """Which takes the memory of one, besides arguments and results."""
    wide = bj.program(clients=64)(
        lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: jnp.sin(w) * v, x))
    )
    w, x = np.ones(1 << 16, np.float32), np.ones(64, np.float32)
    assert is_one_by_one(wide, w, x, shard_size=64)
    plan = plan_of(wide, w, x, shard_size=64)
    (step,) = plan.steps
    exported = jax.export.deserialize(bytearray(plan.bodies[step.body].artefacts["cpu"]))
    compiled = jax.jit(exported.call).lower(*exported.in_avals).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * w.nbytes


# --- full shards have no mask


def scatter():
    """A program of its own, as plans are remembered by program."""
    return bj.program(r=None)(lambda x: bj.reduce_sum(bj.map_fn(lambda v: jnp.outer(v, v), x)))


def executables(fn, *args, **options):
    plan = plan_of(fn, *args, platforms=["cpu"], **options)
    (step,) = plan.steps
    return plan, step


@pytest.mark.usefixtures("apart")
def test_full_shards_select_nothing():
    x = jax.ShapeDtypeStruct((64, D), np.float32)
    plan, step = executables(scatter(), normal(70, D), shard_size=64)
    number = jax.ShapeDtypeStruct((), np.int32)
    texts = [
        load_body(key, plan.bodies[key]).lower(number, number, x).compile().as_text()
        for key in (step.body, step.short_body)
    ]
    assert [" select(" in text for text in texts] == [False, True]
    assert step.executables == (step.body, step.short_body)
    text = "full shards by a separate executable, without a mask"
    for n in (70, 64):
        told = str(bj.explain(scatter(), normal(n, D), options={"shard_size": 64}))
        assert (text in told) == (n == 70)


def test_which_executables_there_are(monkeypatch):
    cases = [(64, 0, "full"), (8, 0, "full"), (64, 1e9, "full"),
             (70, 0, "both"), (70, 1e9, "one"), (7, 0, "one")]  # fmt: skip
    for n, values, which in cases:
        monkeypatch.setattr(lower, "MASKED_VALUES", values)
        _, step = executables(scatter(), normal(n, D), shard_size=8)
        found = {None: "full", step.body: "one"}.get(step.short_body, "both")
        assert found == which, (n, values)
        assert len(step.executables) == (2 if which == "both" else 1)


def test_masks_of_much_that_is_reduced_are_worth_an_executable():
    of = lambda n: jax.ShapeDtypeStruct((n, D), np.float32)
    total = bj.program(r=None)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sum, x)))
    squares = bj.program(r=None)(
        lambda x: bj.reduce_sum(bj.map_fn(lambda v: jnp.outer(v, v) ** 2, x))
    )
    many, few = 2_000_003, 1_003
    found = [executables(fn, of(n))[1].executables
             for fn, n in ((squares, many), (squares, few), (total, many))]  # fmt: skip
    assert [len(keys) for keys in found] == [2, 1, 1]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_members_that_full_shards_leave_out(runner):
    """Those that are dropped, and rows of members of unequal length."""
    x = normal(32, D)
    x[5, 3] = np.nan
    x[24:] = np.inf  # a whole shard
    options = {"shard_size": 8, "on_nonfinite": "drop", "drop_limit": 0.9}
    found = bj.run(scatter(), x, runner=runner, options=options)
    rest = np.delete(x[:24], 5, axis=0).astype(np.float64)
    np.testing.assert_allclose(found, rest.T @ rest, rtol=1e-5, atol=1e-5)
    lengths = np.sort(RNG.integers(1, 60, 45))
    data = normal(int(lengths.sum()), 3)

    @bj.program(clients=None)
    def program(client):
        def one(client):
            masked = jnp.where(client["mask"][:, None], client["x"], 0)
            return masked.T @ masked

        return bj.reduce_sum(bj.map_fn(one, client))

    source = bj.from_ragged({"x": data}, lengths)
    found = bj.run(program, source, runner=runner, options={"shard_size": 8})
    np.testing.assert_allclose(found, data.T.astype(np.float64) @ data, rtol=1e-5, atol=1e-4)


def test_a_short_shard_of_a_plan_for_full_ones_is_refused():
    x = normal(16, D)
    plan, step = executables(scatter(), x, shard_size=8)
    execute = ShardExecutor(LoadedPass(plan, step), {})
    assert execute(Shard(0, 0, 8), [x[:8]]).partials[0].shape == (D * D,)
    with pytest.raises(bj.WorkerError, match="found a shard of 5 members, expected 8"):
        execute(Shard(1, 8, 5), [x[8:13]])


# --- convolutions with kernels of the members' own are computed one by one

IMAGES, KERNEL, KERNELS = normal(N, 1, 2, 6, 6), normal(3, 2, 3, 3), normal(N, 3, 2, 3, 3)


def convolve(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


def step(kernel, x):
    return kernel - 0.1 * jax.grad(lambda k: jnp.mean(convolve(x, k) ** 2))(kernel)


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


def is_dark(x):
    return x[0, 0, 0, 0] > 0


OWN = {
    "a step of training": lambda w, x, k: step(step(w, x), x),
    "in scan": lambda w, x, k: in_scan(w, x),
    "in while": lambda w, x, k: in_while(w, x),
    "in fori_loop": lambda w, x, k: lax.fori_loop(0, 2, lambda _, v: step(v, x), w),
    "in cond": lambda w, x, k: lax.cond(is_dark(x), in_scan, lambda w, x: w, w, x),
    "in jit": lambda w, x, k: jax.jit(in_scan)(w, x),
    "in remat": lambda w, x, k: jax.checkpoint(in_scan)(w, x),
    "late": lambda w, x, k: late(w, x),
    "given kernels": lambda w, x, k: convolve(x, k),
}
SHARED = {
    "images": lambda w, x, k: convolve(x, w),
    "shared in scan": lambda w, x, k: shared_in_scan(w, x),
    "shared in cond": lambda w, x, k: lax.cond(
        is_dark(x), convolve, lambda x, w: 2 * convolve(x, w), x, w
    ),
    "kernels over one image": lambda w, x, k: convolve(jnp.ones((1, 2, 6, 6)), k),
    "nothing": lambda w, x, k: jnp.sum(x),
}


@pytest.mark.parametrize("name", [*OWN, *SHARED])
def test_members_with_kernels_of_their_own_go_one_by_one(name):
    body = {**OWN, **SHARED}[name]
    program = bj.program(clients=N)(
        lambda w, x, k: bj.reduce_mean(bj.map_fn(lambda x, k: body(w, x, k), (x, k)))
    )
    args = KERNEL, IMAGES, KERNELS
    text = str(bj.explain(program, *args))
    assert ("members sequentially: convolutions" in text) == (name in OWN)
    local = bj.run(program, *args, runner="local", options={"shard_size": 8})
    assert_close(local, jax.jit(program)(*args))
    if name == "in scan":
        assert_same_bits(bj.run(program, *args, options={"shard_size": 8}), local)
        assert not is_one_by_one(program, *args, platforms=("cuda",))


# --- convolutions in loops are laid out as XLA's libraries for CPUs take them


def in_rounds(convolve):
    """Two steps down the slope of a convolution, in a scan."""

    def steps(kernel, image):
        slope = jax.grad(lambda kernel: jnp.mean(jnp.tanh(convolve(image, kernel)) ** 2))
        return lax.scan(lambda k, _: (k - 0.1 * slope(k), None), kernel, length=2)[0]

    return steps


def convolution(dimensions=None, strides=(1, 1), padding="SAME", **params):
    return lambda x, k: lax.conv_general_dilated(
        x, k, strides, padding, dimension_numbers=dimensions, **params
    )


LAYOUTS = {
    "channels first": (convolution(), (6, 3, 5, 5), (2, 3, 9, 8)),
    "channels last": (convolution(("NHWC", "HWIO", "NHWC")), (5, 5, 3, 6), (2, 9, 8, 3)),
    "mixed": (convolution(("CHWN", "OIHW", "NWHC")), (6, 3, 5, 5), (3, 9, 8, 2)),
    "strides": (convolution(strides=(2, 3), padding="VALID"), (6, 3, 2, 5), (2, 3, 9, 11)),
    "padding": (convolution(padding=[(0, 3), (1, 2)]), (6, 3, 4, 3), (2, 3, 9, 8)),
    "dilated": (
        convolution(padding=[(1, 1)] * 2, lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
        (6, 3, 3, 3),
        (2, 3, 9, 8),
    ),
    "groups": (convolution(feature_group_count=3), (6, 1, 3, 3), (2, 3, 9, 8)),
    "one axis": (convolution(strides=(1,)), (6, 3, 5), (2, 3, 9)),
    "three axes": (convolution(strides=(1, 1, 1)), (2, 3, 3, 3, 3), (2, 3, 5, 4, 6)),
}


def rewritten(function, *arguments):
    """The function, the same with other layouts, and the convolutions of this."""
    closed = jax.make_jaxpr(function)(*arguments)
    eqns = [Eqn(e.primitive, e.params, [], [], "") for e in closed.jaxpr.eqns]
    before = jex.jaxpr_as_fun(closed)
    after = with_channels_last(before, [v.aval for v in closed.jaxpr.invars], eqns)
    eqns = equations(jax.make_jaxpr(after)(*arguments))
    convolved = [eqn.params for eqn in eqns if eqn.primitive.name == "conv_general_dilated"]
    return before, after, convolved


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_stay_and_channels_come_last(name):
    convolve, *shapes = LAYOUTS[name]
    arguments = [normal(*shape) for shape in shapes]
    before, after, found = rewritten(in_rounds(convolve), *arguments)
    results = jax.jit(after)(*arguments)[0], jax.jit(before)(*arguments)[0]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
    rank = len(shapes[1])
    last = (0, rank - 1, *range(1, rank - 1))
    kernel = (rank - 1, rank - 2, *range(rank - 2))
    assert len(found) == 2
    for params in found:
        if params["feature_group_count"] == params["batch_group_count"] == 1:
            assert tuple(params["dimension_numbers"]) == (last, kernel, last)
        else:
            assert name == "groups"


def test_convolutions_are_found_in_whatever_holds_them():
    mean = lambda image: lambda k: k + jnp.mean(convolution()(image, k))
    holders = {
        "cond": lambda flag, k, i: lax.cond(flag, mean(i), lambda k: k * 2, k),
        "jit": lambda flag, k, i: jax.jit(mean(i))(k),
        "remat": lambda flag, k, i: jax.checkpoint(mean(i))(k),
        "while": lambda flag, k, i: lax.while_loop(
            lambda k: jnp.max(k) < 3, lambda k: mean(i)(k) + 1, k
        ),
    }
    arguments = jnp.array(True), normal(6, 3, 5, 5), normal(2, 3, 9, 8)
    for name, function in holders.items():
        before, after, (params,) = rewritten(function, *arguments)
        assert tuple(params["dimension_numbers"].lhs_spec) == (0, 3, 1, 2), name
        np.testing.assert_allclose(after(*arguments)[0], before(*arguments)[0], atol=1e-5)
    kernel = jnp.full((1, 1, 3, 3), -0.1).at[0, 0, 1, 1].set(1)
    solve = lambda x: jax.scipy.sparse.linalg.cg(lambda v: convolution()(v, kernel), x, maxiter=3)
    before, after, found = rewritten(solve, normal(1, 1, 5, 5))
    assert {tuple(params["dimension_numbers"].lhs_spec) for params in found} == {(0, 3, 1, 2)}
    image = normal(1, 1, 5, 5)
    np.testing.assert_allclose(after(image)[0], before(image)[0], atol=1e-5)
    # What libraries do not compute stays, and a function without convolutions.
    ints = np.ones((6, 3, 5, 5), np.int32), np.ones((2, 3, 9, 8), np.int32)
    _, _, (params,) = rewritten(lambda k, x: convolution()(x, k), *ints)
    assert tuple(params["dimension_numbers"].lhs_spec) == (0, 1, 2, 3)
    before, after, _ = rewritten(lambda x: jnp.tanh(x) @ x, normal(3, 3))
    assert after is before


def test_plans_for_cpus_alone_have_channels_last():
    @bj.program(clients=None)
    def training(kernel, images):
        steps = in_rounds(convolution(("NHWC", "HWIO", "NHWC")))
        return bj.reduce_mean(bj.map_fn(steps, (bj.broadcast(kernel), images)))

    args, layouts = (normal(5, 5, 3, 6), normal(21, 2, 9, 8, 3)), {}
    for platform in ("cpu", "cuda"):
        bodies = plan_of(training, *args, platforms=[platform]).bodies.values()
        artefacts = [bytearray(body.artefacts[platform]) for body in bodies]
        text = "".join(str(export.deserialize(body).mlir_module()) for body in artefacts)
        layouts[platform] = set(re.findall(r"dim_numbers = (\S.*?), window", text))
    assert layouts["cpu"] == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}
    assert len(layouts["cuda"]) > 1
    for loop in ("loop", "vmap"):
        local = bj.run(training, *args, runner="local", options={"member_loop": loop})
        assert_close(local, jax.jit(training)(*args))
        assert_same_bits(bj.run(training, *args, options={"member_loop": loop}), local)
