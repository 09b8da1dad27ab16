"""What accelerators hold: of the plan alone, on machines that have none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import facts_of
from helpers import plan_of

import beamjax as bj
from beamjax.bodies.export import export_body
from beamjax.diagnostics import memory
from beamjax.diagnostics.memory import compiled_bytes, device_estimates
from beamjax.options import parse_options

KIB = 1 << 10
ON_CPU = jax.default_backend() == "cpu"
pytestmark = pytest.mark.skipif(not ON_CPU, reason="is about machines without accelerators")


@bj.program(clients=None)
def total(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.outer(v @ w, v @ w) ** 2, x))


@bj.program(clients=None)
def placed(w, x):
    y = bj.map_fn(lambda v: v @ w, x)
    return y, jnp.linalg.norm(bj.reduce_sum(y))


def args(n=100, width=16, out=256):
    return np.zeros((width, out), np.float32), np.zeros((n, width), np.float32)


def devices(fn, *values, beam=True, **options):
    options = {"platforms": ["cuda"], "shard_size": 8, **options}
    return device_estimates(plan_of(fn, *values, **options), parse_options(options), beam)


def test_bytes_of_a_device_grow_with_shards_and_not_with_members():
    (found,) = devices(total, *args())
    assert found.platform == "cuda"
    assert "the equations of the bodies" in found.made_from
    assert found.kept == {"broadcasts": 16 * KIB}
    (of,) = found.steps.values()
    assert of["members of a shard, twice"] == 2 * 8 * 16 * 4
    assert of["results of the previous shard"] == 256 * 256 * 4
    assert of["computing"] >= 256 * 256 * 4
    assert found.nbytes == 16 * KIB + sum(of.values())
    assert devices(total, *args(n=1000))[0].nbytes == found.nbytes
    assert devices(total, *args(), shard_size=64)[0].nbytes > found.nbytes
    assert devices(total, *args(out=512))[0].nbytes > 2 * found.nbytes
    several = devices(total, *args(), platforms=["cuda", "cpu", "tpu"])
    assert [estimate.platform for estimate in several] == ["cuda", "tpu"]
    assert devices(total, *args(), platforms=["cpu"]) == []  # which has no memory of its own
    assert facts_of(bj.explain(total, *args(), options={"platforms": ["cpu"]})).memory.devices == []


def test_servers_placed_results_and_broadcasts_of_several_rounds():
    (found,) = devices(placed, *args())
    steps = found.steps
    results = 8 * 256 * 4 + 256 * 4  # and the partial of the sum
    assert [of["results of the previous shard"] for of in steps.values() if len(of) == 3] == [
        results
    ]
    server = next(of for of in steps.values() if "inputs" in of)
    assert server["inputs"] == 256 * 4

    @bj.program(clients=None)
    def rounds(w, x):
        step = lambda w, _: (w + bj.reduce_mean(bj.map_fn(lambda v: jnp.outer(v, v @ w), x)), None)
        return jax.lax.scan(step, w, length=20)[0]

    (beam,), (local,) = (devices(rounds, *args(), beam=beam) for beam in (True, False))
    assert list(beam.kept.values()) == [8 * 16 * KIB]
    assert local.kept == {}
    steps = local.steps
    assert [of["broadcasts"] for name, of in steps.items() if "map" in name] == [16 * KIB]


def test_xla_reports_the_memory_where_it_compiles(monkeypatch):
    """The same code on a CPU, against the memory analysis of JAX for the function."""
    function = lambda x: jnp.sort(x @ x.T, axis=0)
    spec = jax.ShapeDtypeStruct((64, 64), np.float32)
    _, body = export_body("f", lambda x: [function(x)], [spec], ["cpu"])
    of_jax = jax.jit(lambda x: [function(x)]).lower(spec).compile().memory_analysis()
    expected = of_jax.temp_size_in_bytes + of_jax.output_size_in_bytes
    found = compiled_bytes(body, "cpu", False)
    assert expected <= found <= expected + of_jax.generated_code_size_in_bytes + 64 * KIB
    assert compiled_bytes(body, "cuda", False) is None
    monkeypatch.setattr(memory, "compiled_bytes", lambda body, platform, x64: 12345)
    (found,) = devices(total, *args())
    assert [of["computing"] for of in found.steps.values()] == [12345]
    assert found.made_from.startswith("the memory that XLA reports")


def test_explain_shows_the_memory_of_devices():
    options = {"platforms": ["cuda"], "shard_size": 8}
    explanation = bj.explain(total, *args(), runner="DataflowRunner", options=options)
    text = str(explanation).split("\npeak memory of a device (estimate), cuda\n")[1]
    for word in (
        "during map_clients_0",
        "broadcasts 16.0 KiB",
        "a device",
        "the equations of the bod",
    ):
        assert word in text
    (device,) = explanation.to_json()["memory"]["devices"]
    assert device["platform"] == "cuda"
    assert device["nbytes"] == sum(device["kept"].values()) + max(
        sum(of.values()) for of in device["steps"].values()
    )
