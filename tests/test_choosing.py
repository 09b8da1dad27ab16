"""From the rules' plan to the one that is run: fixed, remembered, probed, or saved."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_run import assert_close, assert_same_bits

import beamjax as bj
from beamjax import choosing, plan_cache, planning, probe
from beamjax.choices import Looping
from beamjax.errors import OptionsError
from beamjax.probe import ProbeError

N = 600
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)


def program():
    """A new one, so that no plan of it is known."""

    @bj.program(clients=None)
    def mean_of(x):
        return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v) * 3.0, x))

    return mean_of


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def probes(monkeypatch):
    """Tells how long shards take, and which were timed: a loop is ten times as fast."""
    timed = []

    def fake(plan, step, mode, limit):
        size = plan.shard_sizes[step.placement]
        timed.append((step.name, size, step.looping.kind))
        return size * (1e-6 if step.looping.kind == "loop" else 1e-5)

    monkeypatch.setattr(probe, "shard_seconds", fake)
    return timed


def refuse(*args):
    raise AssertionError("a body was timed")


def plan_of(fn, x=X, **options):
    bj.explain(fn, x, options=options)
    return list(planning._plans._plans[fn].values())[-1].plan


def test_the_faster_body_is_chosen(cache, probes):
    plan = plan_of(program(), probe=True)
    assert plan.choices.origin == "probe"
    assert plan.choices.why == "10.0 x as fast as by the rules in a probe"
    assert [step.looping for step in plan.steps] == [Looping("loop")]
    assert probes[0] == ("map_clients_0", 600, "vmap")
    assert {kind for _, _, kind in probes} == {"vmap", "loop", "batches"}


def test_the_answer_is_that_of_jit_with_the_same_bits_on_beam(cache, probes):
    fn = program()
    local = bj.run(fn, X, runner="local", options={"probe": True})
    assert_close(local, jax.jit(fn)(X))
    assert_same_bits(bj.run(fn, X, options={"probe": True}), local)
    assert_same_bits(bj.run(fn, X, runner="local", options={"member_loop": "loop"}), local)


def test_explain_says_what_was_tried(cache, probes):
    explanation = bj.explain(program(), X, options={"probe": True})
    told = str(explanation)
    assert "10.0 x as fast as by the rules in a probe (option shard_size)" in told
    assert "members in map_clients_0    loop" in told
    assert "tried, microseconds a member:" in told
    (chosen,) = (fact for fact in explanation.facts.tried if fact.is_chosen)
    assert (chosen.shard_size, chosen.member_loop) == (600, "loop")
    assert {step.source for step in explanation.facts.predicted.steps} == {"probe"}


def test_small_programs_are_not_timed(cache, monkeypatch):
    monkeypatch.setattr(probe, "shard_seconds", refuse)
    monkeypatch.setattr(plan_cache, "load", refuse)
    monkeypatch.setattr(choosing, "_probed", refuse)
    monkeypatch.setattr(choosing, "_remembered", refuse)
    fn = program()
    planned = planning.plan_for
    arguments, key, restore = planning._stage.flatten_arguments((X,))
    plan = planned(fn, arguments, key, restore, bj.Options()).plan
    assert plan.choices.origin == "rule"
    assert "are not worth a probe" in plan.choices.why
    assert not cache.exists()


LONG = jax.ShapeDtypeStruct((2 * 10**9, 4), np.float32)


def test_long_programs_are_timed(cache, probes, monkeypatch):
    monkeypatch.setattr(choosing, "WORTH_SECONDS", 1e-9)
    assert plan_of(program()).choices.origin == "probe"
    assert probes


def test_types_alone_are_timed_if_somebody_asks(cache, probes):
    plan = plan_of(program(), LONG)
    assert "bodies are timed once there are arguments, or with probe=True" in plan.choices.why
    assert not probes
    assert plan_of(program(), LONG, probe=True).choices.origin == "probe"


def test_nothing_is_timed_by_itself_that_can_not_be_remembered(probes, monkeypatch):
    monkeypatch.setattr(choosing, "WORTH_SECONDS", 1e-9)
    assert "could not be remembered" in plan_of(program()).choices.why
    assert not probes


def test_arguments_are_timed_after_their_types(cache, probes, monkeypatch):
    monkeypatch.setattr(choosing, "WORTH_SECONDS", 1e-9)
    fn = program()
    bj.explain(fn, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert not probes
    assert plan_of(fn).choices.origin == "probe"
    assert "10.0 x as fast" in str(bj.explain(fn, X))


def test_what_is_refused_is_not_timed(cache, monkeypatch):
    monkeypatch.setattr(probe, "shard_seconds", refuse)
    monkeypatch.setattr(choosing, "WORTH_SECONDS", 1e-9)
    assert plan_of(program(), probe=False).choices.why == "by the rules: probe=False"
    plan = plan_of(program(), shard_size=64, member_loop="vmap")
    assert (plan.choices.origin, plan.shard_sizes) == ("options", {"clients": 64})


def test_options_fix_one_choice_and_leave_the_other(cache, probes):
    plan = plan_of(program(), probe=True, shard_size=24)
    assert plan.shard_sizes == {"clients": 24}
    assert [step.looping for step in plan.steps] == [Looping("loop")]
    assert {size for _, size, _ in probes} == {24}
    probes.clear()
    plan = plan_of(program(), probe=True, member_loop="vmap")
    assert [step.looping for step in plan.steps] == [Looping("vmap")]
    assert {kind for _, _, kind in probes} == {"vmap"}


# --- remembered


def test_what_was_found_is_found_again_without_a_probe(cache, probes, monkeypatch):
    first = plan_of(program(), probe=True)
    monkeypatch.setattr(probe, "shard_seconds", refuse)
    again = plan_of(program(), probe=True)
    assert again.choices.origin == "cache"
    assert "as was found before on this machine" in again.choices.why
    assert again.shard_sizes == first.shard_sizes
    assert [step.looping for step in again.steps] == [step.looping for step in first.steps]
    assert plan_of(program(), X[:599], probe=True).choices.origin == "cache"
    assert_same_bits(
        bj.run(program(), X, runner="local", options={"probe": True}),
        bj.run(program(), X, runner="local", options={"member_loop": "loop"}),
    )


def test_another_program_is_timed_by_itself(cache, probes):
    plan_of(program(), probe=True)
    before = len(probes)

    @bj.program(clients=None)
    def other(x):
        return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v) * 4.0, x))

    plan_of(other, probe=True)
    assert len(probes) == 2 * before
    plan_of(program(), X[:100], probe=True)  # members of another magnitude
    assert len(probes) > 2 * before


def test_that_nothing_was_faster_is_remembered_too(cache, monkeypatch):
    monkeypatch.setattr(probe, "shard_seconds", lambda plan, *_: 1e-6 * plan.shard_sizes["clients"])
    plan = plan_of(program(), probe=True)
    assert plan.choices.why == "by the rules, and a probe found nothing faster"
    monkeypatch.setattr(probe, "shard_seconds", refuse)
    assert plan_of(program(), probe=True).choices.origin == "cache"


@pytest.mark.parametrize("text", ["{", '{"format": 99}', '{"format": 1}'])
def test_damaged_files_are_told_and_written_anew(cache, probes, text):
    plan_of(program(), probe=True)
    (path,) = cache.iterdir()
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match="will be written anew"):
        plan = plan_of(program(), probe=True)
    assert plan.choices.origin == "probe"
    assert json.loads(path.read_text())["passes"]["map_clients_0"]["member_loop"] == "loop"


def test_files_of_another_program_are_not_used(cache, probes):
    plan_of(program(), probe=True)
    (path,) = cache.iterdir()
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "passes": {"map_x_0": record["passes"].popitem()[1]}}))
    assert plan_of(program(), probe=True).choices.origin == "probe"


def test_checkpoints_keep_the_choices(cache, probes, monkeypatch, tmp_path):
    folder = tmp_path / "checkpoints"
    options = {"probe": True, "checkpoint": str(folder)}
    found = bj.run(program(), X, runner="local", options=options)
    assert (folder / choosing.CHECKPOINTED).exists()
    for file in cache.iterdir():
        file.unlink()
    monkeypatch.setattr(probe, "shard_seconds", refuse)
    assert_same_bits(bj.run(program(), X, runner="local", options=options), found)


# --- what can't be timed


def failing(*args):
    raise ProbeError("a body fails on made-up members (ValueError: no)")


@pytest.mark.parametrize("fails", [failing])
def test_a_probe_that_fails_leaves_the_rules(cache, monkeypatch, fails):
    monkeypatch.setattr(probe, "shard_seconds", fails)
    plan = plan_of(program(), probe=True)
    told = str(bj.explain(program(), X, options={"probe": True}))
    assert "by the rules, as a probe failed: a body fails on made-up members" in told
    assert plan.shard_sizes == {"clients": 600}
    assert bj.run(program(), X, options={"probe": True}).shape == (4,)


def test_a_probe_that_takes_too_long_leaves_the_rules(cache, monkeypatch):
    monkeypatch.setattr(choosing, "MAX_BUDGET", 0.05)
    monkeypatch.setattr(choosing, "MIN_BUDGET", 0.05)
    monkeypatch.setattr(probe, "_timed", lambda *args: __import__("time").sleep(1.0))
    told = str(bj.explain(program(), X, options={"probe": True}))
    assert "as a probe failed: a body takes longer than" in told


def test_bodies_that_depend_on_data_are_not_timed(cache, monkeypatch):
    monkeypatch.setattr(probe, "shard_seconds", refuse)

    @bj.program(clients=None)
    def waits(x):
        body = lambda v: jax.lax.while_loop(lambda v: jnp.sum(v) < 9, lambda v: v + 1, v)
        return bj.reduce_mean(bj.map_fn(body, x))

    told = str(bj.explain(waits, X, options={"probe": True}))
    assert "a body holds a loop whose rounds depend on its data" in told


def test_a_real_probe_gives_a_plan_that_runs(cache):
    fn = program()
    plan = plan_of(fn, probe=True)
    assert plan.choices.tried
    local = bj.run(fn, X, runner="local", options={"probe": True})
    assert_close(local, jax.jit(fn)(X))
    assert_same_bits(bj.run(fn, X, options={"probe": True}), local)


def test_two_placements_are_probed_each_for_itself(cache, probes):
    @bj.program(a=64, b=80)
    def two(x, y):
        left = bj.reduce_mean(bj.map_fn(jnp.sin, x, placement="a"), placement="a")
        return left + bj.reduce_sum(bj.map_fn(jnp.cos, y, placement="b"), placement="b")

    bj.explain(two, X[:64], X[:80], options={"probe": True})
    assert {name for name, _, _ in probes} == {"map_a_0", "map_b_0"}


# --- saved


def test_a_saved_plan_is_that_of_another_process(tmp_path, cache):
    fn = program()
    options = {"shard_size": 48, "member_loop": "batches", "member_batch": 16}
    path = tmp_path / "plan.json"
    bj.explain(fn, X, options=options).save_choices(path)
    expected = bj.run(fn, X, runner="local", options=options)
    np.save(tmp_path / "x.npy", X)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import numpy as np, beamjax as bj\n"
        "from test_choosing import program\n"
        f"x = np.load({str(tmp_path / 'x.npy')!r}); options = {{'plan': {str(path)!r}}}\n"
        "fn = program()\n"
        "for i, runner in enumerate(['local', 'DirectRunner']):\n"
        f"    np.save({str(tmp_path)!r} + f'/{{i}}.npy', bj.run(fn, x, runner=runner,"
        " options=options))\n"
        "print(bj.explain(fn, x, options=options).facts.choices[0].why)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "by the saved plan"
    for number in range(2):
        assert np.load(tmp_path / f"{number}.npy").tobytes() == np.asarray(expected).tobytes()


def test_a_saved_plan_comes_before_the_rules_but_not_before_options(tmp_path):
    path = tmp_path / "plan.json"
    bj.explain(program(), X, options={"shard_size": 48, "member_loop": "loop"}).save_choices(path)
    plan = plan_of(program(), plan=str(path))
    assert (plan.shard_sizes, plan.steps[0].looping) == ({"clients": 48}, Looping("loop"))
    assert plan.choices.origin == "saved"
    plan = plan_of(program(), plan=str(path), shard_size=16, member_loop="vmap")
    assert (plan.shard_sizes, plan.steps[0].looping) == ({"clients": 16}, Looping("vmap"))
    again = tmp_path / "again.json"
    bj.explain(program(), X, options={"plan": path}).save_choices(again)
    assert plan_of(program(), plan=str(again)).shard_sizes == {"clients": 48}


def test_a_saved_plan_of_another_program(tmp_path):
    path = tmp_path / "plan.json"

    @bj.program(draws=None)
    def other(x):
        return bj.reduce_sum(bj.map_fn(jnp.sin, x))

    bj.explain(other, X).save_choices(path)
    with pytest.raises(OptionsError, match="found choices for the placements draws, but the pro"):
        bj.run(program(), X, options={"plan": path})

    @bj.program(clients=None)
    def like(x):
        return bj.reduce_mean(bj.map_fn(jnp.sin, x))

    bj.explain(like, X).save_choices(path)
    told = str(bj.explain(program(), X, options={"plan": path}))
    assert "by the saved plan, which was saved for other bodies or types" in told


def test_members_of_unequal_length_keep_to_a_saved_plan(tmp_path):
    lengths = np.arange(1, 61) % 7 + 1
    rows = np.random.default_rng(0).normal(size=(int(lengths.sum()), 2)).astype(np.float32)
    source = bj.from_ragged(bj.from_arrays(rows), lengths, buckets=(4, 8))

    @bj.program(clients=None)
    def total(members):
        return bj.reduce_sum(
            bj.map_fn(lambda m: jnp.sum(m["rows"] if isinstance(m, dict) else m[0]), members)
        )

    path = tmp_path / "plan.json"
    options = {"shard_size": 16, "member_loop": "loop"}
    bj.explain(total, source, options=options).save_choices(path)
    expected = bj.run(total, source, runner="local", options=options)
    found = bj.run(total, source, runner="local", options={"plan": path})
    assert_same_bits(found, expected)


def test_only_a_plan_is_saved(tmp_path):
    with pytest.raises(OptionsError, match="expected stage 'plan'"):
        bj.explain(program(), X, stage="flat").save_choices(tmp_path / "plan.json")
    with pytest.raises(OptionsError, match="save_choices: cannot write"):
        bj.explain(program(), X).save_choices(tmp_path / "no" / "plan.json")
