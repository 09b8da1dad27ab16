"""How many members make a shard."""

import jax
import jax.numpy as jnp
import pytest

import beamjax as bj
from beamjax.errors import OptionsError
from beamjax.interpreters import flatten, place, sizing, split, stage
from beamjax.interpreters.sizing import MAX_SHARD_BYTES, shard_sizes
from beamjax.options import Options
from beamjax.planning import plan_for


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def sizes_of(fn, *args, platforms=(), **options):
    arguments, _, restore = stage.flatten_arguments(args)
    staged = stage.stage(fn, arguments, restore)
    placed = place.place(flatten.flatten(staged.closed), {}, staged.placements)
    return shard_sizes(placed, split.split(placed), Options(**options), platforms)


def mean_of(body, n):
    @bj.program(clients=n)
    def prog(w, *xs):
        return bj.reduce_mean(bj.map_fn(lambda *x: body(w, *x), xs))

    return prog


def sgd(loss, steps):
    def body(w, *x):
        one = lambda w, _: (w - 0.1 * jax.grad(loss)(w, *x), None)
        return jax.lax.scan(one, w, None, length=steps)[0]

    return body


def squares(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def test_small_regressions_fill_the_cache():
    prog = mean_of(sgd(squares, 10), 10_000)
    sizes = sizes_of(prog, array(64), array(10_000, 32, 64), array(10_000, 32))
    assert sizes == {"clients": 64}


def test_members_of_64_KiB_come_in_eights():
    prog = mean_of(sgd(squares, 50), 4096)
    sizes = sizes_of(prog, array(256), array(4096, 64, 256), array(4096, 64))
    assert sizes == {"clients": 8}


def test_convolutions():
    def loss(kernel, image):
        out = jax.lax.conv_general_dilated(image[None], kernel, (1, 1), "SAME")
        return jnp.mean(out**2)

    sizes = sizes_of(mean_of(sgd(loss, 1), 500), array(8, 3, 3, 3), array(500, 3, 28, 28))
    assert sizes["clients"] in (8, 16)


def test_scalar_members_come_in_thousands():
    @bj.program(draws=100_000)
    def prog(x):
        return bj.reduce_mean(bj.map_fn(jnp.sin, x))

    assert sizes_of(prog, array(100_000)) == {"draws": 4096}


@pytest.mark.parametrize(("n", "size"), [(262_144, 4096), (524_288, 8192), (10**9, 65_536)])
def test_shards_of_many_scalar_members_fill_the_cache(n, size):
    @bj.program(draws=None)
    def prog(i):
        return bj.reduce_mean(bj.map_fn(lambda k: jnp.sin(k.astype("float32")) ** 2, i))

    assert sizes_of(prog, array(n, dtype="int32")) == {"draws": size}


def test_huge_members_come_in_eights():
    prog = mean_of(lambda w, x: jnp.sum(x) * w, 20)
    assert sizes_of(prog, array(), array(20, 2_500_000)) == {"clients": 8}


def test_operands_and_results_of_a_shard_are_bounded():
    @bj.program(clients=10_000)
    def prog(x):
        return [bj.map_fn(lambda v, i=i: jnp.sin(v * i), x) for i in range(1, 200)]

    x = array(10_000, 2048)
    member = 200 * 2048 * 4
    (size,) = sizes_of(prog, x).values()
    assert size == 16
    assert size * member <= MAX_SHARD_BYTES < 2 * size * member


def test_values_made_outside_of_bodies_count():
    @bj.program(clients=1000)
    def prog(x):
        outer = x[:, :, None] * x[:, None, :]
        return bj.reduce_sum(jnp.tanh(outer))

    assert sizes_of(prog, array(1000, 256)) == {"clients": 8}


def test_the_largest_pass_of_a_placement_counts():
    @bj.program(a=5000, b=5000)
    def prog(x, y):
        scale = bj.reduce_mean(bj.map_fn(jnp.sin, x, placement="a"), placement="a")
        other = bj.map_fn(lambda v: v * scale, y, placement="b")
        first = bj.reduce_sum(other, placement="b")
        return bj.reduce_sum(bj.map_fn(lambda v: v + first[0], x, placement="a"), placement="a")

    assert sizes_of(prog, array(5000), array(5000, 30_000)) == {"a": 4096, "b": 8}


def test_values_that_die_inside_a_body_are_counted_once():
    def chain(w, x):
        for _ in range(100):
            x = jnp.sin(x)
        return jnp.sum(x) * w

    assert sizes_of(mean_of(chain, 1000), array(), array(1000, 1000)) == {"clients": 64}


@pytest.mark.parametrize(("n", "size"), [(1, 8), (7, 8), (8, 8), (9, 16), (63, 64), (65, 64)])
def test_a_shard_is_no_larger_than_all_members_padded(n, size):
    assert sizes_of(mean_of(lambda w, x: x * w, n), array(), array(n, 400)) == {"clients": size}


def test_the_size_that_the_user_gives():
    prog = mean_of(lambda w, x: x * w, 1000)
    assert sizes_of(prog, array(), array(1000), shard_size=24) == {"clients": 24}


REGRESSION = array(64), array(10_000, 32, 64), array(10_000, 32)


def test_short_shards_have_several_batches_on_a_cpu():
    prog = mean_of(sgd(squares, 10), 10_000)
    assert sizes_of(prog, *REGRESSION, platforms=("cpu",)) == {"clients": 512}
    assert sizes_of(prog, *REGRESSION, platforms=("cpu",), member_loop="batches")["clients"] == 512
    assert sizes_of(prog, *REGRESSION, platforms=("cpu",), member_loop="vmap")["clients"] == 64
    assert sizes_of(prog, *REGRESSION, platforms=("cuda",))["clients"] == 64
    assert sizes_of(prog, *REGRESSION, platforms=("cpu", "cuda"))["clients"] == 64


def test_work_and_bytes_bound_the_batches():
    long = mean_of(sgd(squares, 1000), 10_000)
    assert sizes_of(long, *REGRESSION, platforms=("cpu",)) == {"clients": 64}
    few = mean_of(sgd(squares, 10), 4096)
    arrays = array(64), array(4096, 32, 64), array(4096, 32)
    assert sizes_of(few, *arrays, platforms=("cpu",)) == {"clients": 256}
    wide = mean_of(lambda w, x: jnp.sum(jnp.tanh(x)) * w, 10_000)
    assert sizes_of(wide, array(), array(10_000, 65_536), platforms=("cpu",)) == {"clients": 32}


@pytest.mark.parametrize(("n", "size"), [(100_000, 4096), (2_000_000, 65_536), (10**9, 65_536)])
def test_tables_that_are_only_read_come_by_8_MiB(n, size):
    @bj.program(rows=n)
    def prog(x):
        mean = bj.reduce_mean(x)
        return (x - mean[None]).T @ (x - mean[None])

    assert sizes_of(prog, array(n, 32), platforms=("cpu",)) == {"rows": size}
    assert sizes_of(prog, array(n, 32), platforms=("cuda",))["rows"] <= 4096


def test_many_small_batches_make_a_shard():
    def loss(w, x):
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2

    @bj.program(rows=10**6)
    def prog(u, v, x):
        return bj.reduce_mean(bj.map_fn(lambda x: jax.grad(loss)((u, v), x), x))

    arrays = array(16, 32), array(32), array(10**6, 16)
    assert sizes_of(prog, *arrays, platforms=("cpu",)) == {"rows": 8192}
    assert sizes_of(prog, *arrays, platforms=("cpu",), member_loop="vmap") == {"rows": 64}


def test_what_waits_for_data_calls_back_or_has_an_order_comes_at_once():
    def waits(w, x, y):
        return jax.lax.while_loop(lambda w: (w**2).sum() > 1, lambda w: w - y.mean(), x[0])

    def calls(w, x, y):
        jax.debug.callback(lambda v: None, y[0])
        return w * x[0]

    for body in (waits, calls):
        prog = mean_of(body, 10_000)
        assert sizes_of(prog, *REGRESSION, platforms=("cpu",)) == {"clients": 64}

    @bj.program(clients=10_000)
    def ordered(w, x, y):
        return bj.reduce(lambda a, b: a + b, bj.map_fn(lambda v: v @ w, x))

    assert sizes_of(ordered, *REGRESSION, platforms=("cpu",)) == {"clients": 64}


@pytest.mark.parametrize("size", [-8, 4, 12])
def test_sizes_that_are_no_multiple_of_8(size):
    prog = mean_of(lambda w, x: x * w, 1000)
    with pytest.raises(OptionsError, match=f"shard_size: found {size}, expected a positive multi"):
        sizes_of(prog, array(), array(1000), shard_size=size)


def test_a_placement_without_a_pass():
    @bj.program(clients=100)
    def prog(x):
        return x + 1

    assert sizes_of(prog, array(3)) == {"clients": sizing.MULTIPLE}


def test_the_plan_holds_the_sizes():
    prog = mean_of(lambda w, x: x * w, 30)
    arguments, key, restore = stage.flatten_arguments((2.0, array(30)))
    plan = plan_for(prog, arguments, key, restore, Options(shard_size=16)).plan
    assert plan.shard_sizes == {"clients": 16}
    assert plan.shards("clients") == 2
