"""What `explain` says on the choices of a plan: by options, or by rules."""

import jax
import jax.numpy as jnp
import numpy as np
from explained import facts_of

import beamjax as bj

X = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)
W = np.zeros(4, np.float32)


@bj.program(clients=None)
def spread(x):
    y = bj.map_fn(lambda v: v @ v * v, x)
    mean = bj.reduce_mean(y)
    return bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, y))


def rounds(w, x):
    return jax.lax.scan(lambda w, _: (w + spread(x), None), w, length=5)[0]


def explained(fn, *args, **kwargs):
    return {fact.what: fact for fact in facts_of(bj.explain(fn, *args, **kwargs)).choices}


def test_each_choice_has_its_option_and_its_reason():
    found = explained(spread, X)
    assert {what: fact.option for what, fact in found.items()} == {
        "shards of clients": "shard_size",
        "members in map_clients_0": "member_loop",
        "members in map_clients_1": "member_loop",
        "threads of map_clients_0": "local_threads",
        "threads of map_clients_1": "local_threads",
        "reduction of map_clients_0": "",
        "reduction of map_clients_1": "",
        "results of map_clients_0": "",
    }
    assert all(fact.why for fact in found.values())
    assert found["results of map_clients_0"].chosen == "9.4 KiB stored"
    options = {"shard_size": 24, "member_loop": "loop"}
    found = explained(rounds, W, X, options=options)
    expected = {
        "shards of clients": ("24 members", "the option shard_size"),
        "members in map_clients_0": ("loop", "the option member_loop='loop': 800 B at once"),
        "reduction of map_clients_0": ("16 B a shard, merged in one step", "on one worker"),
        "rounds of loop_0": ("on resident workers", "one job serves all rounds"),
    }
    assert {what: (found[what].chosen, found[what].why) for what in expected} == expected


def test_the_threads_of_a_pass_follow_from_its_work():
    def threads(n, runner="DirectRunner", **options):
        x = jax.ShapeDtypeStruct((n, 256), "float32")
        choices = explained(spread, x, runner=runner, options={"shard_size": 64, **options})
        fact = choices.get("threads of map_clients_0")
        return fact and (fact.chosen, fact.why)

    own, little = "the thread that reads shards", "the pass has little work, by counted operations"
    many = "3 threads", "as many as compute in this process"
    assert threads(64, local_threads=3) == (own, "there is one shard")
    assert threads(128, local_threads=3) == (own, little)
    assert threads(1 << 20, shard_size=8192, local_threads=3) == many
    assert threads(1 << 20, "local", shard_size=8192, local_threads=3) == many
    assert threads(1 << 20, local_threads=1) is threads(1 << 20, "FlinkRunner") is None


def test_shards_of_large_members_are_as_large_as_a_shard_may_be():
    fn = bj.program(clients=None)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sum, x)))
    shards = explained(fn, jax.ShapeDtypeStruct((4000, 512, 512), "float32"))["shards of clients"]
    assert (shards.chosen, shards.why) == (
        "32 members",
        "a shard reads and returns at most 32.0 MiB",
    )


def test_operations_and_bytes_are_counted():
    """2 * 4 * 3 operations of a product and a few elementwise ones, for each member."""
    fn = bj.program(clients=None)(
        lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: jnp.tanh(w @ v), x))
    )
    told = bj.explain(fn, np.ones((3, 4), np.float32), X)
    (step,) = (step for step in facts_of(told).steps if step.kind == "Map")
    assert 2 * 4 * 3 <= step.cost.operations <= 2 * 4 * 3 + 3 * 16
    assert f"a member: {step.cost.operations:,.0f} operations, " in str(told)
    assert told.to_json()["steps"][0]["cost"]["operations"] == step.cost.operations
