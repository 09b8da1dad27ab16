"""How many members make a shard."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import plan_of
from hypothesis import example, given
from hypothesis import strategies as st
from jax import export, lax
from streams import stream

import beamjax as bj
from beamjax.interpreters.lowering import shard_size
from beamjax.interpreters.lowering.shard_size import PassSize
from beamjax.plan.shard import SizeReason
from beamjax.plan.steps import Cost


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


def network(n):
    def loss(w, x):
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2

    @bj.program(rows=n)
    def prog(u, v, x):
        return bj.reduce_mean(bj.map_fn(lambda x: jax.grad(loss)((u, v), x), x))

    return prog, jnp.zeros((784, 256)), jnp.zeros(256), array(n, 784)


def outer_products(n, size):
    prog = bj.program(clients=n)(lambda x: bj.reduce_sum(jnp.tanh(x[:, :, None] * x[:, None, :])))
    return prog, array(n, size)


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


def in_order():
    @bj.program(clients=None)
    def prog(w, x):
        return bj.reduce(lambda a, b: a + b, bj.map_fn(lambda v: v @ w, x))

    return prog, jnp.zeros(64), array(10_000, 32, 64)


def without_a_pass():
    return bj.program(clients=100)(lambda x: x + 1), jnp.zeros(3)


VMAP, BATCHES, LOOP = ({"member_loop": kind} for kind in ("vmap", "batches", "loop"))
CUDA, BOTH = {"platforms": ["cuda"]}, {"platforms": ["cpu", "cuda"]}
SIZES = [
    # As few members as pay for a call; at once as many as the cache holds.
    (regression(10), {}, 1024, "batches of 32"),
    (regression(100), {}, 256, "batches of 32"),
    (regression(1000), {}, 32, "vmap"),
    (regression(50, 4096, 64, 256), {}, 128, "loop"),
    (mean_of(sgd(convolution, 1), array(500, 3, 28, 28), shared=array(8, 3, 3, 3)), {}, 64, "loop"),
    (mean_of(repeated_sine, array(1000, 1000)), {}, 64, "vmap"),
    (total(10_000, 65_536), {}, 64, "batches of 8"),
    (waits_for_data(), {}, 2048, "batches of 256"),
    (in_order(), {}, 3360, "vmap"),
    # One after the other if members are large.
    (total(20, 2_500_000), {}, 8, "loop"),
    (total(20, 2_500_000), CUDA, 8, "loop"),
    # The same size for other devices, which compute a shard at once.
    (regression(10), CUDA, 1024, "vmap"),
    (regression(10), BOTH, 1024, "vmap"),
    # At least eight shards, of equal size, unless they would be shorter than four calls.
    (regression(10, n=4096), {}, 512, "batches of 32"),
    (regression(10, n=1000), {}, 512, "batches of 32"),
    (draws(100_000), {}, 100_000, "vmap"),
    (draws(10**9), {}, 4_194_304, "batches of 524288"),
    # At least two if the result of a shard is large.
    (network(4000), {}, 2000, "batches of 1000"),
    (outer_products(1000, 256), {}, 256, "vmap"),
    # A shard reads and returns at most 32 MiB.
    (scaled(10_000, 65_536), {}, 128, "batches of 16"),
    (scaled(10_000, 65_537), {}, 64, "batches of 16"),
    (table(10**9), {}, 262_144, "batches of 32768"),
    # No more than there are members, in eights.
    *((scaled(n, 400), {}, size, "vmap") for n, size in [(1, 8), (8, 8), (9, 16), (63, 64)]),
    (without_a_pass(), {}, 8, ""),
    (two_placements(), {}, (5000, 256), "vmap"),
    # What the user chooses, and no more members than there are.
    (scaled(1000), {"shard_size": 24}, 24, "vmap"),
    (scaled(30), {"shard_size": 64}, 32, "vmap"),
    (regression(10), {"shard_size": 64}, 64, "batches of 32"),
    (regression(10), {"shard_size": 120}, 120, "batches of 24"),
    (regression(10), VMAP, 1024, "vmap"),
    (regression(10), LOOP, 1024, "loop"),
    (regression(1000), BATCHES, 32, "batches of 16"),
]


def test_sizes_follow_from_what_passes_hold_and_compute():
    faults = []
    for number, ((fn, *args), options, size, how) in enumerate(SIZES):
        plan = plan_of(fn, *args, **options)
        found = tuple(plan.shard_sizes.values())
        first = next(map(str, plan.vectorizations.values()), "")
        if (found, first) != (size if isinstance(size, tuple) else (size,), how):
            faults.append((number, options, found, first, size, how))
    assert not faults, "\n".join(map(str, faults))


def test_members_of_unknown_number_come_in_shards_of_the_usual_size():
    fn = bj.program(clients=None)(lambda x: bj.reduce_mean(bj.map_fn(jnp.tanh, x)))
    for size in (1000, 30_000, 300_000):
        known = plan_of(fn, array(10**6, size))
        found = plan_of(fn, stream(np.zeros((3, size), np.float32)))
        assert found.shard_sizes == known.shard_sizes, size
        assert found.vectorizations == known.vectorizations, size


def test_sizes_do_not_depend_on_the_machine(monkeypatch):
    fn, *args = regression(10, n=4096)
    before = plan_of(fn, *args)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    after = plan_of(lambda *args: fn(*args), *args)
    assert (after.shard_sizes, after.vectorizations) == (before.shard_sizes, before.vectorizations)


def running_totals(n):
    return bj.program(clients=n)(lambda x: jnp.cumsum(x, axis=0)), array(n)


def of_unknown_number(size):
    (n,) = export.symbolic_shape("n")
    return mean_of(lambda w, x: jnp.tanh(x) * w, array(n, size))


PAGE = Path(__file__).parents[2] / "docs" / "concepts.md"
PAYS = "as few as pay for a call and for merging, by counted operations"
FEW_CALLS = "fewer would compute less than 4 times their overhead"
BYTES = "a shard reads and returns at most 32.0 MiB"
UNKNOWN = "at most 4,096, since the number of members is unknown"
TWO, EQUAL = "at least 2 shards, since merging costs more than calls", "shards have equal sizes"
ALL, RANGES = "no more than there are", "whole ranges of members in order"
OPTION, SET = "the option shard_size", 'options={"shard_size": 64}'
WHY = [
    # What the page says, a call for which that decides, and what `explain` says.
    ("computes 32 times its overhead", regression(1000), {}, [PAYS]),
    ("has at least eight shards", regression(10, n=4096), {}, ["at least 8 shards"]),
    ("two if merging costs more", network(4000), {}, [TWO, EQUAL]),
    ("less than four times its overhead", waits_for_data(), {}, [FEW_CALLS]),
    ("less than four times its overhead", scaled(9, 400), {}, [FEW_CALLS, ALL]),
    ("reads and returns at most 32 MiB", scaled(10_000, 65_536), {}, [BYTES]),
    ("they have equal sizes", in_order(), {}, [BYTES, EQUAL]),
    ("a power of two from 8 on", total(20, 2_500_000), {}, ["at least 8 members"]),
    ("at most 4,096 members", of_unknown_number(8), {}, [UNKNOWN]),
    ("holds whole ranges of members", running_totals(100), {}, [FEW_CALLS, RANGES, ALL]),
    (SET, scaled(1000), {"shard_size": 24}, [OPTION]),
    (SET, scaled(30), {"shard_size": 64}, [OPTION, ALL]),
]


def test_explain_says_which_rule_decided():
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for words, (fn, *args), options, why in WHY:
        choices = bj.explain(fn, *args, options=options).to_json()["choices"]
        shards = next(x for x in choices if x["what"].startswith("shards of "))
        assert shards["why"] == "; ".join(why)
        assert words in page, words


def test_members_of_unequal_length():
    lengths = np.array([10] * 4000 + [1000] * 20)
    source = bj.from_ragged({"x": np.zeros((lengths.sum(), 64), np.float32)}, lengths)
    rows = lambda _, d: jnp.sum(jnp.where(d["mask"][:, None], jnp.tanh(d["x"]), 0))
    fn, w, _ = mean_of(rows, source)
    (shards, *_) = bj.explain(fn, w, source).to_json()["choices"]
    assert (shards["chosen"], shards["why"]) == ("128 members", BYTES)


def test_the_parts_of_a_group_of_files(tmp_path):
    for number in range(8):
        np.save(tmp_path / f"{number}.npy", np.zeros((1024, 64), np.float32))
    source = bj.from_npy(str(tmp_path / "*.npy"))
    costly = lambda w, x: lax.fori_loop(0, 100, lambda _, x: jnp.sin(x) * w, x)
    fn, w, _ = mean_of(costly, source)
    choices = bj.explain(fn, w, source).to_json()["choices"]
    assert choices[0]["chosen"].endswith("cut at files")
    assert choices[0]["why"] == "at least 4 shards in a group of files"


NBYTES = st.floats(0, 1e9)
PASSES = st.builds(
    lambda moved, inner, looped, reduced, operations: PassSize(
        moved, moved + inner, min(looped, moved + inner), reduced, Cost(operations)
    ),
    NBYTES, NBYTES, NBYTES, st.integers(0, 10**9), st.floats(0, 1e12),
)  # fmt: skip
COUNTS = st.integers(1, 10**9)
SHARDS = SizeReason.FEWEST_SHARDS, SizeReason.TWO_SHARDS


@given(PASSES, COUNTS)
@example(PassSize(2 << 20, 2 << 20, 0, 0, Cost(1e3)), 1000)
def test_each_size_suits_its_members(each, n):
    size = shard_size._shard_size([each], n).members
    assert size % 8 == 0
    assert size == 8 or size * each.moved <= 32 * 2**20
    assert each.at_once == 1 or each.at_once % 8 == 0
    assert each.at_once <= 1 or each.at_once * each.looped <= shard_size.CACHE_BYTES
    # Members come by 8 unless 8 of them do not fit.
    fit = 8 * each.peak <= shard_size.MAX_SHARD_BYTES and 8 * each.looped <= shard_size.CACHE_BYTES
    assert (each.at_once >= 8) == fit
    # There are two shards, unless they would compute less than four times what their calls take.
    calls = shard_size.CALL_OPERATIONS + shard_size.MERGE_OPERATIONS * each.reduced
    if size > 8 and size * each.cost.weight > 8 * calls:
        assert size < n


@given(PASSES, COUNTS)
def test_the_rule_that_decided_holds(each, n):
    size = shard_size._shard_size([each], n)
    why, *more = size.reasons
    overhead = shard_size.CALL_OPERATIONS + shard_size.MERGE_OPERATIONS * each.reduced
    paying = 32 * overhead / max(each.cost.weight, 1)
    merges = overhead > 2 * shard_size.CALL_OPERATIONS
    limits = {
        SizeReason.PAYING: paying,
        SizeReason.FEWEST_SHARDS: n / 8,
        SizeReason.TWO_SHARDS: n / 2,
        SizeReason.FEW_CALLS: paying / 8,
        SizeReason.BYTES: 32 * 2**20 / max(each.moved, 1),
        SizeReason.MULTIPLE: 8,
    }
    # Sizes are the nearest powers of two, and shards of equal sizes are smaller.
    assert more or limits[why] / 2 <= size.members <= 1.5 * limits[why] or why is SizeReason.ALL
    assert merges == (why is SizeReason.TWO_SHARDS) or why not in SHARDS
    assert more == [] or (more == [SizeReason.ALL]) == (size.members >= n)


@given(PASSES, COUNTS, st.floats(1, 1e3), st.sampled_from(["moved", "peak", "looped"]))
def test_members_of_more_bytes_come_in_smaller_shards(each, n, factor, name):
    more = each._replace(**{name: factor * getattr(each, name)})
    assert more.at_once <= each.at_once
    # Up to padding: shards of equal sizes are whole batches.
    sizes = [shard_size._shard_size([passed], n).members for passed in (more, each)]
    assert sizes[0] <= 17 / 16 * sizes[1] + 8


@given(PASSES, st.floats(1, 1e3))
def test_members_of_more_work_come_in_smaller_shards(each, factor):
    more = each._replace(cost=each.cost.times(factor))
    sizes = [shard_size._shard_size([passed], 2**40).members for passed in (more, each)]
    assert sizes[0] <= sizes[1]


@pytest.mark.parametrize(("steps", "how"), [(10, "batches of 32"), (1000, "vmap")])
def test_explain_says_what_is_at_once(steps, how):
    fn, *args = regression(steps)
    choices = {x["what"]: x for x in bj.explain(fn, *args).to_json()["choices"]}
    shards, members = choices["shards of clients"], choices["members in map_clients_0"]
    assert members["chosen"] == how
    assert "KiB at once" in members["why"]
    assert shards["chosen"] in (f"{1024} members", f"{32} members")
