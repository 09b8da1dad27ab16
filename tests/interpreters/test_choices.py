"""What a plan is fixed to, by options, a saved plan, an earlier probe, a probe or the rules."""

import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, plan_of
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.interpreters.tuning import autotune as choosing
from beamjax.interpreters.tuning import plan_cache, probe
from beamjax.interpreters.tuning.probe import ProbeError
from beamjax.options import parse_options
from beamjax.options.choices import Choices, Trial, Vectorization

X = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)
W = np.zeros(4, np.float32)


def program(scale=3.0):
    """A new function, for which this process has no plan."""

    @bj.program(clients=None)
    def mean_of(x):
        return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v) * scale, x))

    return mean_of


@bj.program(clients=None)
def spread(x):
    y = bj.map_fn(lambda v: v @ v * v, x)
    mean = bj.reduce_mean(y)
    return bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, y))


def rounds(w, x):
    return jax.lax.scan(lambda w, _: (w + spread(x), None), w, length=5)[0]


def loops(plan):
    return [step.vectorization for step in plan.steps]


# --- options


def explained(fn, *args, **kwargs):
    return {fact.what: fact for fact in bj.explain(fn, *args, **kwargs).facts.choices}


def test_each_choice_has_its_option_and_its_reason():
    found = explained(spread, X)
    assert {what: fact.option for what, fact in found.items()} == {
        "shards of clients": "shard_size",
        "members in map_clients_0": "member_loop",
        "members in map_clients_1": "member_loop",
        "reduction of map_clients_0": "merge_fan_out",
        "reduction of map_clients_1": "merge_fan_out",
        "results of map_clients_0": "recompute",
    }
    assert all(fact.why for fact in found.values())
    assert found["results of map_clients_0"].chosen == "9.4 KiB stored"
    options = {"shard_size": 24, "member_loop": "loop", "merge_fan_out": 2}
    found = explained(rounds, W, X, options=options)
    expected = {
        "shards of clients": ("24 members", "the option shard_size"),
        "members in map_clients_0": ("loop", "the option member_loop='loop'"),
        "reduction of map_clients_0": (
            "16 B a shard, merged in 2 groups",
            "the option merge_fan_out=2",
        ),
        "rounds of loop_0": ("on resident workers", "one job serves all rounds"),
    }
    assert {what: (found[what].chosen, found[what].why) for what in expected} == expected


@pytest.mark.parametrize("recompute", ["elementwise", "nothing", "everything"])
@pytest.mark.parametrize("in_rounds", [False, True])
def test_values_that_cross_passes_are_kept_or_recomputed(in_rounds, recompute):
    @bj.program(clients=None)
    def centred(x):
        y = x * 2.0 + 1.0
        total = bj.reduce_sum(y)
        return bj.reduce_sum(bj.map_fn(lambda v: v - total, y))

    fn, args = (rounds, (W, X)) if in_rounds else (spread, (X,))
    options = {"recompute": recompute, "shard_size": 64, "merge_fan_out": 2}
    kept = lambda *call: sum(w.startswith("results") for w in explained(*call, options=options))
    assert kept(fn, *args) == (recompute != "everything")
    assert kept(centred, X) == (recompute == "nothing")  # It is elementwise.
    local = bj.run(fn, *args, runner="local", options=options)
    assert_close(local, jax.jit(fn)(*args))
    assert_same_bits(bj.run(fn, *args, options=options | {"merge_fan_out": 7}), local)


# --- files of choices

NAMES = st.text(min_size=1, max_size=8)
SIZES = st.integers(1, 512).map(lambda n: 8 * n)
LOOPINGS = st.one_of(
    st.sampled_from([Vectorization("vmap"), Vectorization("loop")]),
    SIZES.map(lambda n: Vectorization("batches", n)),
)
TRIALS = st.builds(Trial, NAMES, SIZES, LOOPINGS, st.floats(0, 1e6))
CHOICES = st.builds(
    Choices,
    st.dictionaries(NAMES, SIZES),
    st.dictionaries(NAMES, LOOPINGS),
    st.sampled_from(["rule", "probe"]),
    st.text(),
    st.lists(TRIALS).map(tuple),
    st.text(),
    st.none() | st.lists(st.booleans()).map(tuple),
)


@given(CHOICES)
def test_choices_survive_json(choices):
    again = Choices.from_json(json.loads(json.dumps(choices.to_json())))
    assert again == choices
    assert hash(again) == hash(choices)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "plan.json"
    options = {"shard_size": 48, "member_loop": "batches", "member_batch": 16}
    bj.explain(program(), X, options=options).save_choices(path)
    return path


def test_files_of_something_else_are_refused(saved, tmp_path):
    record = json.loads(saved.read_text())
    a_pass = lambda **found: {"passes": {"map_clients_0": found}}
    changes = [
        ({"format": 99}, "found format 99, expected 1"),
        ({"shard_sizes": {"clients": 12}}, "multiple of 8"),
        ({"shard_sizes": {"clients": True}}, r"found True as Choices.shard_sizes\['clients'\]"),
        (a_pass(member_loop="fast", batch=0), "'fast'.* expected a member_loop of vmap, batches"),
        (a_pass(member_loop="loop", batch=8), "as batch, 0 for 'loop'"),
        (a_pass(member_loop="batches", batch=12), "multiple of 8"),
        ({"passes": {"a": 3}}, r"found 3 as Choices.passes\['a'\]"),
        ({"tried": [3]}, r"found 3 as Choices.tried\[0\]"),
        ({"tried": [{"pass": "a", "shard_size": 8, "seconds": -1}]}, "expected seconds from 0"),
        ({"rematerialized": [1]}, r"found 1 as Choices.rematerialized\[0\], expected bool"),
    ]
    texts = [(json.dumps(record | change), message) for change, message in changes]
    texts += [(text, r"a file that beamjax\.explain") for text in ("", "[]", "{", '"x"')]
    path = tmp_path / "other.json"
    for text, message in texts:
        path.write_text(text)
        with pytest.raises(bj.OptionsError, match=message) as raised:
            parse_options({"plan": path})
        assert str(path) in str(raised.value)


def run_saved(x, path):
    fn, options = program(), {"plan": path}
    found = [bj.run(fn, x, runner=name, options=options) for name in ("local", "DirectRunner")]
    return [np.asarray(x) for x in found], bj.explain(fn, x, options=options).facts.choices[0].why


def test_another_process_runs_a_saved_plan_to_the_same_bits(saved, other_process):
    found, why = other_process(run_saved, X, str(saved))
    assert why == "by the saved plan"
    options = {"shard_size": 48, "member_loop": "batches", "member_batch": 16}
    expected = np.asarray(bj.run(program(), X, runner="local", options=options))
    assert_same_bits(found, [expected] * 2)


def test_options_come_before_a_saved_plan_and_that_before_the_rules(saved, tmp_path):
    plan = plan_of(program(), X, plan=str(saved))
    assert (plan.shard_sizes, loops(plan)) == ({"clients": 48}, [Vectorization("batches", 16)])
    assert plan.choices.origin == "saved"
    again = tmp_path / "again.json"
    bj.explain(program(), X, options={"plan": saved}).save_choices(again)
    assert json.loads(again.read_text())["shard_sizes"] == {"clients": 48}
    options = parse_options({"plan": saved, "shard_size": 16, "member_loop": "vmap"})
    saved.unlink()  # Files are read once.
    found = explained(program(), X, options=parse_options(options))
    assert found["shards of clients"].chosen == "16 members"
    assert found["members in map_clients_0"].chosen == "vmap"


def test_a_saved_plan_of_another_program(saved):
    other = bj.program(draws=None)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
    with pytest.raises(
        bj.OptionsError, match="choices for the placements clients, but the program"
    ):
        bj.run(other, X, options={"plan": saved})
    with pytest.raises(bj.OptionsError, match="choices for the passes map_clients_0, but the prog"):
        bj.run(spread, X, options={"plan": saved})
    text = str(bj.explain(program(4.0), X, options={"plan": saved}))
    assert "by the saved plan, which was saved for other bodies or types" in text


def test_members_of_unequal_length_keep_to_a_saved_plan(tmp_path):
    lengths = np.arange(1, 61) % 7 + 1
    rows = np.random.default_rng(0).normal(size=(int(lengths.sum()), 2)).astype(np.float32)
    source = bj.from_ragged(bj.from_arrays(rows), lengths, buckets=(4, 8))
    total = bj.program(clients=None)(
        lambda members: bj.reduce_sum(
            bj.map_fn(lambda m: jnp.sum(m["rows"] if isinstance(m, dict) else m[0]), members)
        )
    )
    path, options = tmp_path / "plan.json", {"shard_size": 16, "member_loop": "loop"}
    bj.explain(total, source, options=options).save_choices(path)
    expected = bj.run(total, source, runner="local", options=options)
    assert_same_bits(bj.run(total, source, runner="local", options={"plan": path}), expected)


def test_only_a_plan_is_saved_as_a_whole_or_not_at_all(tmp_path):
    with pytest.raises(bj.OptionsError, match="expected stage 'plan'"):
        bj.explain(program(), X, stage="flat").save_choices(tmp_path / "plan.json")
    with pytest.raises(bj.OptionsError, match="save_choices: cannot write"):
        bj.explain(program(), X).save_choices(tmp_path / "no" / "plan.json")
    with pytest.raises(TypeError):
        choosing.write_json(tmp_path / "plan.json", object())
    assert list(tmp_path.iterdir()) == []


# --- probes


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BEAMJAX_PLANNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def probes(monkeypatch):
    """The passes, shards and loops that were timed: a loop is ten times as fast."""
    timed = []

    def fake(plan, step, mode, limit):
        size = plan.shard_sizes[step.placement]
        timed.append((step.name, size, step.vectorization.kind))
        return size * (1e-6 if step.vectorization.kind == "loop" else 1e-5)

    monkeypatch.setattr(probe, "shard_seconds", fake)
    return timed


def refuse(*args):
    raise AssertionError("a body was timed")


PROBE = {"probe": True}


def test_the_faster_body_is_chosen_with_the_same_answer(cache, probes):
    fn = program()
    explanation = bj.explain(fn, X, options=PROBE)
    assert probes[0] == ("map_clients_0", 600, "vmap")
    assert {kind for _, _, kind in probes} == {"vmap", "loop", "batches"}
    assert "10.0 x as fast as by the rules in a probe (option shard_size)" in str(explanation)
    (chosen,) = (fact for fact in explanation.facts.tried if fact.is_chosen)
    assert (chosen.shard_size, chosen.member_loop) == (600, "loop")
    assert chosen.member_seconds == pytest.approx(1e-6)
    assert "measured by a probe" in str(explanation)
    assert {step.source for step in explanation.facts.predicted.steps} == {"probe"}
    local = bj.run(fn, X, runner="local", options=PROBE)
    assert_close(local, jax.jit(fn)(X))
    assert_same_bits(bj.run(fn, X, options=PROBE), local)
    assert_same_bits(bj.run(fn, X, runner="local", options={"member_loop": "loop"}), local)


def test_each_placement_is_probed_by_itself(cache, probes):
    @bj.program(a=64, b=80)
    def two(x, y):
        left = bj.reduce_mean(bj.map_fn(jnp.sin, x, placement="a"), placement="a")
        return left + bj.reduce_sum(bj.map_fn(jnp.cos, y, placement="b"), placement="b")

    bj.explain(two, X[:64], X[:80], options=PROBE)
    assert {name for name, _, _ in probes} == {"map_a_0", "map_b_0"}


def test_options_fix_one_choice_and_leave_the_other(cache, probes):
    plan = plan_of(program(), X, probe=True, shard_size=24)
    assert (plan.shard_sizes, loops(plan)) == ({"clients": 24}, [Vectorization("loop")])
    assert {size for _, size, _ in probes} == {24}
    probes.clear()
    assert loops(plan_of(program(), X, probe=True, member_loop="vmap")) == [Vectorization("vmap")]
    assert {kind for _, _, kind in probes} == {"vmap"}


LONG = jax.ShapeDtypeStruct((2 * 10**9, 4), np.float32)


def test_only_what_is_worth_it_is_timed(cache, probes, monkeypatch):
    why = lambda x=X, **options: plan_of(program(), x, **options).choices.why
    assert "are not worth a probe" in why()
    assert "bodies are timed once there are arguments, or with probe=True" in why(LONG)
    assert why(LONG, probe=False) == "by the rules: probe=False"
    plan = plan_of(program(), X, probe=True, shard_size=64, member_loop="vmap")
    assert (plan.choices.origin, plan.shard_sizes) == ("options", {"clients": 64})
    assert probes == []
    assert not cache.exists() or not list(cache.iterdir())
    assert plan_of(program(), LONG, probe=True).choices.origin == "probe"
    monkeypatch.setattr(choosing, "WORTH_SECONDS", 1e-9)
    probes.clear()
    fn = program(5.0)
    bj.explain(fn, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert probes == []
    assert "10.0 x as fast" in str(bj.explain(fn, X))  # Arguments are timed after their types.
    monkeypatch.setenv("BEAMJAX_PLANNER_CACHE", "")
    probes.clear()
    assert "could be stored" in why()
    assert probes == []


def test_what_cannot_be_timed_is_left_to_the_rules(cache, monkeypatch):
    text = lambda fn: str(bj.explain(fn, X, options=PROBE))
    waits = lambda v: jax.lax.while_loop(lambda v: jnp.sum(v) < 9, lambda v: v + 1, v)
    for body in (waits, jax.jit(waits)):
        fn = bj.program(clients=None)(lambda x, body=body: bj.reduce_mean(bj.map_fn(body, x)))
        assert "a body holds a loop whose rounds depend on its data" in text(fn)

    def calls(v):
        jax.debug.print("{}", v)
        return v

    fn = bj.program(clients=None)(lambda x: bj.reduce_mean(bj.map_fn(calls, x)))
    assert "a body calls back to Python" in text(fn)
    assert (
        "there is no pass" in plan_of(bj.program(c=3)(lambda x: x + 1), X, probe=True).choices.why
    )
    on_cuda = plan_of(program(), X, probe=True, platforms=["cuda"]).choices.why
    assert "for cuda, and this machine has cpu" in on_cuda

    def failing(*args):
        raise ProbeError("a body fails on made-up members (ValueError: no)")

    monkeypatch.setattr(probe, "shard_seconds", failing)
    fn = program()
    assert "by the rules, as a probe failed: a body fails on made-up members" in text(fn)
    assert bj.run(fn, X, options=PROBE).shape == (4,)


def test_a_probe_that_takes_too_long_is_left_to_the_rules(cache, monkeypatch):
    monkeypatch.setattr(choosing, "MAX_BUDGET", 0.05)
    monkeypatch.setattr(choosing, "MIN_BUDGET", 0.05)
    monkeypatch.setattr(probe, "_timed", lambda *args: time.sleep(1.0))
    text = str(bj.explain(program(), X, options=PROBE))
    assert "as a probe failed: a body takes longer than" in text


# --- what is remembered


def test_what_a_probe_found_is_used_again(cache, probes, monkeypatch):
    first = plan_of(program(), X, probe=True)
    count = len(probes)
    plan_of(program(4.0), X, probe=True)
    assert len(probes) == 2 * count  # Another program is timed by itself,
    plan_of(program(), X[:100], probe=True)
    assert len(probes) > 2 * count  # and members of another magnitude.
    monkeypatch.setattr(probe, "shard_seconds", refuse)
    again = plan_of(program(), X, probe=True)
    assert again.choices.origin == "cache"
    assert "from an earlier probe on this machine" in again.choices.why
    assert (again.shard_sizes, loops(again)) == (first.shard_sizes, loops(first))
    assert plan_of(program(), X[:599], probe=True).choices.origin == "cache"


def test_that_nothing_was_faster_is_remembered_too(cache, monkeypatch):
    monkeypatch.setattr(probe, "shard_seconds", lambda plan, *_: 1e-6 * plan.shard_sizes["clients"])
    plan = plan_of(program(), X, probe=True)
    assert plan.choices.why == "by the rules, and a probe found nothing faster"
    monkeypatch.setattr(probe, "shard_seconds", refuse)
    assert plan_of(program(), X, probe=True).choices.origin == "cache"


def test_damaged_files_and_those_of_other_programs_are_written_anew(cache, probes):
    plan_of(program(), X, probe=True)
    (path,) = cache.iterdir()
    good = json.loads(path.read_text())
    for text in ("", "{", "[1]", '{"format": 99}', '{"format": 1}', "[" * 10**5, " " * (2**20 + 1)):
        path.write_text(text)
        with pytest.warns(RuntimeWarning, match="will write it anew"):
            assert plan_of(program(), X, probe=True).choices.origin == "probe"
        assert json.loads(path.read_text())["passes"] == good["passes"]
    path.write_text(json.dumps(good | {"passes": {"map_x_0": good["passes"]["map_clients_0"]}}))
    assert plan_of(program(), X, probe=True).choices.origin == "probe"


@pytest.mark.parametrize("option", ["checkpoint", "cache"])
def test_checkpoints_and_partials_keep_the_choices(option, cache, probes, monkeypatch, tmp_path):
    options = PROBE | {option: str(tmp_path / "stored")}
    found = bj.run(program(), X, runner="local", options=options)
    for file in cache.iterdir():
        file.unlink()
    monkeypatch.setattr(probe, "shard_seconds", refuse)
    assert_same_bits(bj.run(program(), X, runner="local", options=options), found)
    if option == "cache":  # It stores them for other runs, too.
        assert_same_bits(bj.run(program(), X, runner="local", options=PROBE), found)


def test_where_it_is_remembered(tmp_path, monkeypatch):
    monkeypatch.delenv("BEAMJAX_PLANNER_CACHE")
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path))
    assert plan_cache.folder() == tmp_path / "planner"
    assert os.stat(tmp_path / "planner").st_mode & 0o077 == 0
    (tmp_path / "file").write_text("")
    for nowhere in ("", str(tmp_path / "file" / "cache")):
        monkeypatch.setenv("BEAMJAX_PLANNER_CACHE", nowhere)
        plan_cache.store("x", {"a": 1})
        assert (plan_cache.folder(), plan_cache.load("x")) == (None, None)
    assert plan_cache.machine()["cores"] == os.cpu_count()
