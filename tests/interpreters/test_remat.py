"""Values that cross passes: computed again or stored, by what both take."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits

import beamjax as bj
from beamjax.interpreters.cutting import remat as module
from beamjax.interpreters.cutting.remat import RematerializationTimes

MANY, FEW = 10**6, 96
X = np.random.default_rng(0).normal(size=(FEW, 1024)).astype(np.float32)


def variance_of(body, x):
    y = bj.map_fn(body, x)
    mean = bj.reduce_mean(y)
    return bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, y))


@bj.program(clients=None)
def quick(x):
    """A map that is no elementwise operation, but hardly any work."""
    return variance_of(lambda v: jnp.flip(v) * 2.0, x)


@bj.program(clients=None)
def long(x):
    """The same that is much work."""
    return variance_of(lambda v: jax.lax.fori_loop(0, 50, lambda _, w: jnp.sin(w) * 2.0, v), x)


@bj.program(clients=None)
def exponential(x):
    y = jnp.exp(x)
    return bj.reduce_mean((y - bj.reduce_mean(y)[None]) ** 2)


@bj.program(clients=None)
def chain(x):
    """Elementwise, but a lot of it."""
    y = x
    for _ in range(40):
        y = jnp.sin(jnp.exp(-y * y))
    return bj.reduce_mean((y - bj.reduce_mean(y)[None]) ** 2)


def crossing(fn, n, **options):
    args = jax.ShapeDtypeStruct((n, 1024), np.float32)
    told = bj.explain(fn, args, options={"probe": False, **options})
    (found,) = (c for c in told.facts.choices if c.option == "recompute")
    return found, told


CHOSEN = {
    quick: ("rematerialized", "stored"),
    long: ("stored", "stored"),
    exponential: ("rematerialized", "rematerialized"),
    chain: ("stored", "rematerialized"),
}


@pytest.mark.parametrize("fn", CHOSEN, ids=lambda fn: fn.__name__)
def test_costs_decide_where_they_clearly_do(fn):
    for n, expected in zip((MANY, FEW), CHOSEN[fn], strict=True):
        found, told = crossing(fn, n)
        assert found.chosen.endswith(expected)
        (other,) = found.others
        assert other.what.endswith("stored" if expected == "rematerialized" else "rematerialized")
        nbytes = 4 * 1024 * n
        assert {found.nbytes, other.nbytes} == {0, nbytes}
        clearly = 3 * found.seconds < other.seconds and other.seconds > 1
        assert found.why.startswith("clearly faster") == clearly
        by_rule = "rematerialized" if fn in (exponential, chain) else "stored"
        assert clearly or expected == by_rule
        kept = found if expected == "stored" else other
        assert kept.seconds == pytest.approx(2 * nbytes / module.STORE_RATE)
        (fact,) = (c for c in told.to_json()["choices"] if c["option"] == "recompute")
        assert fact == json.loads(json.dumps(dataclasses.asdict(found)))
        assert found.chosen in str(told)
        assert other.what in str(told)


def test_what_is_rematerialized_is_not_read():
    for n in (MANY, FEW):
        steps = [s for s in crossing(quick, n)[1].facts.steps if s.kind == "Map"]
        assert [len(s.placed) for s in steps] == [1, 1]
        if n == MANY:
            assert [s.results for s in steps] == [(), ()]
            assert steps[1].placed == steps[0].placed


def test_the_option_wins():
    for fn in CHOSEN:
        for recompute in ("elementwise", "nothing", "everything"):
            elementwise = fn in (exponential, chain) and recompute == "elementwise"
            found, _ = crossing(fn, MANY, recompute=recompute)
            again = elementwise or recompute == "everything"
            assert found.chosen.endswith("rematerialized" if again else "stored"), (fn, recompute)
            assert found.why.startswith(f"the option recompute={recompute!r}")


def test_answers_are_the_same_either_way(monkeypatch):
    for fn, (chosen, _) in CHOSEN.items():
        for worth in (module.WORTH_SECONDS, 0.0):
            monkeypatch.setattr(module, "WORTH_SECONDS", worth)
            fresh = bj.program(clients=None)(lambda x, fn=fn: fn(x))
            local = bj.run(fresh, X, runner="local")
            assert_close(local, jax.jit(fn)(X))
        assert_same_bits(bj.run(fresh, X, runner="DirectRunner"), local)
        (found,) = (c for c in bj.explain(fresh, X).facts.choices if c.option == "recompute")
        assert found.chosen.endswith(chosen)


def test_calls_to_the_host_are_not_rematerialized(monkeypatch):
    monkeypatch.setattr(module, "WORTH_SECONDS", 0.0)
    seen = []

    def host(v):
        seen.append(1)
        return v

    @bj.program(clients=None)
    def program(x):
        of = jax.ShapeDtypeStruct((1024,), np.float32)
        return variance_of(lambda v: jax.pure_callback(host, of, v, vmap_method="sequential"), x)

    (found,) = (c for c in bj.explain(program, X).facts.choices if c.option == "recompute")
    assert found.chosen.endswith("stored")
    assert found.others == ()
    assert "cannot rematerialize" in found.why
    bj.run(program, X[:16], runner="local", options={"shard_size": 8})
    assert len(seen) == 16


def test_what_is_an_output_is_stored():
    @bj.program(clients=None)
    def program(x):
        y = bj.map_fn(lambda v: jnp.flip(v) * 2.0, x)
        return variance_of(lambda v: v, y), y

    found, _ = crossing(program, MANY)
    assert found.chosen.endswith("stored")


def test_rounds_of_a_loop_count():
    def fn(x):
        return jax.lax.scan(lambda c, _: (c + exponential(x), None), jnp.zeros(1024), length=7)[0]

    once, _ = crossing(exponential, FEW)
    found, _ = crossing(fn, FEW)
    assert found.seconds == pytest.approx(7 * once.seconds)
    assert found.others[0].seconds == pytest.approx(7 * once.others[0].seconds)


def test_what_is_clear():
    cases = {(10.0, 3.0): True, (10.0, 4.0): None, (0.9, 0.0): None, (3.0, 10.0): False,
             (4.0, 10.0): None, (10.0, None): False}  # fmt: skip
    for (kept, again), expected in cases.items():
        told = RematerializationTimes(1, kept, again)
        assert [told.is_clear(way) for way in (True, False)] == [
            expected is True,
            expected is False,
        ]


@pytest.mark.parametrize("fn", [quick, chain], ids=lambda fn: fn.__name__)
def test_a_saved_plan_keeps_what_it_says(fn, tmp_path):
    path = tmp_path / "choices.json"
    _, told = crossing(fn, MANY)
    told.save_choices(path)
    expected = CHOSEN[fn][0]
    assert json.loads(path.read_text())["rematerialized"] == [expected == "rematerialized"]
    assert not crossing(fn, FEW)[0].chosen.endswith(expected)
    found, _ = crossing(fn, FEW, plan=str(path))
    assert found.chosen.endswith(expected)
    assert found.why.startswith("by the saved plan")
    by_option, _ = crossing(fn, FEW, plan=str(path), recompute="everything")
    assert by_option.chosen.endswith("rematerialized")
    options = {"shard_size": 8, "plan": str(path)}
    assert_same_bits(bj.run(fn, X, options=options), bj.run(fn, X, runner="local", options=options))
    assert_close(bj.run(fn, X, options=options), jax.jit(fn)(X))


def test_a_saved_plan_for_other_values(tmp_path):
    path = tmp_path / "choices.json"
    _, told = crossing(quick, MANY)
    told.save_choices(path)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "rematerialized": [True, False]}))
    with pytest.raises(bj.OptionsError, match=r"for 2 values that cross .* but the program has 1"):
        crossing(quick, FEW, plan=str(path))
    path.write_text(json.dumps({**record, "rematerialized": "no"}))
    with pytest.raises(bj.OptionsError, match=r"found 'no' as Choices\.rematerialized"):
        crossing(quick, FEW, plan=str(path))
    del record["rematerialized"]  # as an earlier version wrote it
    path.write_text(json.dumps(record))
    assert crossing(quick, FEW, plan=str(path))[0].chosen.endswith("stored")
