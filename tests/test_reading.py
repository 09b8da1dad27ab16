"""`run`, `explain`, `verify` and `transform` over sources of unknown length."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_unknown_sizes as unknown
from apache_beam.testing.util import assert_that
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Counted, Numbers, stream
from test_transforms import pipeline
from test_unknown_sizes import OPTIONS, W, data, opened, raw

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StagingError

THREADS = {**OPTIONS, "direct_running_mode": "multi_threading", "direct_num_workers": 2}
PROCESSES = {**THREADS, "direct_running_mode": "multi_processing"}


def check(fn, *args, tree, bits=True):
    """Runs `fn` over chunks, on all runners that share this process: bits of `run` on arrays."""
    expected = jax.tree.leaves(jax.jit(fn)(*args, tree))
    exact = jax.tree.leaves(bj.run(fn, *args, tree, runner="local", options=OPTIONS))
    local = None
    for runner, options in (
        ("local", OPTIONS),
        ("DirectRunner", OPTIONS),
        ("DirectRunner", THREADS),
    ):
        rows = Counted(tree)
        source = bj.from_chunks(rows)
        found = jax.tree.leaves(bj.run(fn, *args, source, runner=runner, options=options))
        assert rows.reads == 1
        local = local or found
        for x, y, z, same in zip(found, expected, exact, local, strict=True):
            assert (x.dtype, x.shape, x.weak_type) == (y.dtype, y.shape, y.weak_type)
            np.testing.assert_allclose(raw(x), raw(y), rtol=1e-5, atol=1e-4)
            assert raw(x).tobytes() == raw(same).tobytes()
            assert not bits or raw(x).tobytes() == raw(z).tobytes()


def note(fn, *args):
    explanation = bj.explain(fn, *args, options=OPTIONS)
    text = " ".join(explanation.facts.notes)
    assert text in str(explanation).replace("\n  ", " ")
    return text


# --- one pass


@pytest.mark.parametrize("n", [1, 20])
def test_reductions_are_streamed(n):
    assert "in the one pass of the plan" in note(unknown.reductions, W, stream(data(n)))
    check(unknown.reductions, W, tree=data(n))


def errors(w, d):
    return bj.map_fn(lambda e: jnp.sum(jnp.tanh(e["x"] @ w)) ** 2, d)


@opened
def mean_loss(w, d):
    return bj.reduce_mean(errors(w, d))


@opened
def summed_loss(w, d):
    return bj.reduce_sum(errors(w, d))


def test_gradients():
    fn = jax.value_and_grad(summed_loss)
    assert "in the one pass of the plan" in note(fn, W, stream(data(20)))
    check(fn, W, tree=data(20))
    # Each member's share in a mean is one over their number.
    fn = jax.value_and_grad(mean_loss)
    assert "reads their number" in note(fn, W, stream(data(20)))
    check(fn, W, tree=data(20))


@pytest.mark.parametrize("n", [7, 20])
def test_placed_results_and_draws(n):
    check(unknown.creations, jax.random.key(3), tree=data(n))
    check(opened(lambda d: (bj.map_fn(jnp.sin, d["x"]), bj.reduce_sum(d["x"]))), tree=data(n))


def test_the_number_as_a_result():
    check(opened(lambda d: (jnp.int32(d["k"].shape[0]), jnp.max(d["k"]))), tree=data(20))
    check(opened(lambda d: jnp.float32(d["x"].shape[0]) * 2), tree=data(20))
    check(opened(lambda d: bj.reduce_sum(bj.broadcast(W))), tree=data(20))


def test_keys_as_members():
    keys = jax.random.split(jax.random.key(0), 20)
    check(opened(lambda k: bj.reduce_mean(bj.map_fn(jax.random.normal, k))), tree=keys)


def test_wide_types():
    with jax.enable_x64(True):
        check(unknown.loss, W, tree=data(20))


def test_big_blocks_are_dealt_in_several_files(monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.streaming.DEAL_BYTES", 100)
    check(opened(lambda d: (bj.reduce_mean(d["x"]), jnp.sin(d["x"]))), tree=data(50))


@given(
    n=st.integers(1, 30),
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=40)
def test_the_cut_into_chunks_does_not_show(n, sizes):
    tree = data(n)
    exact = bj.run(_summed, W, tree, runner="local", options=OPTIONS)
    found = bj.run(_summed, W, stream(tree, sizes), runner="local", options=OPTIONS)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), found, exact))


@pytest.mark.parametrize("sizes", [[1], [7], [8], [9], [50], [0, 5, 0, 13]])
def test_the_cut_into_chunks_does_not_show_on_beam(sizes):
    tree = data(50)
    for fn in (_summed, unknown.two_passes):
        exact = bj.run(fn, W, tree, runner="local", options=OPTIONS)
        found = bj.run(fn, W, stream(tree, sizes), options=OPTIONS)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), found, exact))


@opened
def _summed(w, d):
    y = bj.map_fn(lambda e: jnp.tanh(e["x"] @ w), d)
    return bj.reduce_mean(y), bj.reduce(lambda a, b: a * 0.5 + b, y), y


# --- counted first


def test_several_passes():
    assert "because 2 passes read them" in note(unknown.two_passes, W, stream(data(20)))
    check(unknown.two_passes, W, tree=data(20))
    check(unknown.numbers, W, tree=data(20))


@pytest.mark.parametrize("fn", unknown.NEEDING, ids=lambda fn: fn.__name__)
def test_the_number_as_a_constant(fn):
    prog, x = opened(fn), unknown.data(20)["x"]
    text = note(prog, stream(x))
    line = fn.__code__.co_firstlineno
    assert any(f"{unknown.__file__}:{line + i} (" in text for i in (1, 2)), text
    assert "this is one for 840" in text
    rows = Counted(x)
    found = bj.run(prog, bj.from_chunks(rows), runner="local", options=OPTIONS)
    exact = bj.run(prog, x, runner="local", options=OPTIONS)
    assert rows.reads == 1
    assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), found, exact))


def test_a_constant_on_beam():
    check(opened(unknown.branches), tree=data(20)["x"])
    check(opened(unknown.in_order), tree=data(20)["x"])
    check(opened(lambda d: d), tree=data(20))


def train(w, d):
    def round_(w, rate):
        value, gradient = jax.value_and_grad(mean_loss)(w, d)
        return w - rate * gradient, value

    return jax.lax.scan(round_, w, jnp.asarray([0.1, 0.05]))


@opened
def until_small(w, d):
    def go_on(state):
        return (state[1] < 3) & (jnp.abs(state[0]).max() > 0.1)

    def round_(state):
        w, i = state
        y = bj.map_fn(lambda e: (e["x"] @ w).sum(), d)
        return w * jnp.where(bj.reduce_mean(y) > 0, 0.5, 0.25), i + 1

    return jax.lax.while_loop(go_on, round_, (w, 0))


@opened
def either(w, d):
    total = bj.reduce_sum(d["k"])
    return (
        jax.lax.cond(total > 3, lambda: bj.reduce_mean(d["x"]), lambda: bj.reduce_max(d["x"])) @ w
    )


@pytest.mark.parametrize("fn", [opened(train), until_small, either], ids=["scan", "while", "cond"])
def test_control_flow(fn):
    assert "around placed operators" in note(fn, W, stream(data(20)))
    check(fn, W, tree=data(20))


# --- sizes that others know


@opened
def paired(x, k):
    return bj.reduce_sum(bj.map_fn(lambda a, b: a.sum() * b.astype("float32"), (x, k)))


RUNNERS = ["local", "DirectRunner"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_beside_an_array(runner):
    tree = data(20)
    expected = bj.run(paired, tree["x"], tree["k"], runner="local", options=OPTIONS)
    for args in (
        (stream(tree["x"]), tree["k"]),
        (tree["x"], stream(tree["k"])),
        (stream(tree["x"]), stream(tree["k"], [7])),
        (bj.from_arrays(tree["x"]), stream(tree["k"])),
    ):
        found = bj.run(paired, *args, runner=runner, options=OPTIONS)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("runner", RUNNERS)
def test_beside_an_array_of_another_length(runner):
    with pytest.raises(PlacementError, match=r"shape \(17,\), expected \(20(.|\n)*has 20 members"):
        bj.run(paired, stream(data(20)["x"]), data(17)["k"], runner=runner, options=OPTIONS)
    args = stream(data(20)["x"]), stream(data(17)["k"])
    with pytest.raises(SourceError, match=r"has 17 members, but .* has 20 or more"):
        bj.run(paired, *args, runner=runner, options=OPTIONS)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_placement_of_fixed_size(runner):
    prog = bj.program(clients=20)(lambda d: bj.reduce_sum(bj.map_fn(jnp.sin, d["x"])))
    tree = data(20)
    found = bj.run(prog, stream(tree), runner=runner, options=OPTIONS)
    exact = bj.run(prog, tree, runner="local", options=OPTIONS)
    assert found.tobytes() == exact.tobytes()
    assert "this is one for 20" in note(prog, stream(tree))
    with pytest.raises(PlacementError, match=r"expected \(20, (.|\n)*has 17 members"):
        bj.run(prog, stream(data(17)), runner=runner, options=OPTIONS)


def test_two_placements_of_unknown_size():
    @bj.program(placements={"a": None, "b": None})
    def prog(x, k):
        total = bj.reduce_sum(x, placement="a").sum()
        return total, bj.reduce_max(k, placement="b")

    x, k = data(20)["x"], data(17)["k"]
    found = bj.run(prog, stream(x), stream(k), options=OPTIONS)
    exact = bj.run(prog, x, k, runner="local", options=OPTIONS)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), found, exact))


# --- what goes wrong


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("fn", [bj.reduce_sum, unknown.in_order], ids=["streamed", "counted"])
def test_errors_of_reading(runner, fn):
    def rows():
        yield np.zeros((4, 3), np.float32)
        raise OSError("connection lost")

    def empty():
        return [np.zeros((0, 3), np.float32)]

    with pytest.raises(SourceError, match=r"rows>, chunk 1: cannot be read .*connection lost"):
        bj.run(opened(fn), bj.from_chunks(rows), runner=runner)
    source = bj.from_chunks(empty, jax.ShapeDtypeStruct((3,), "float32"))
    with pytest.raises(SourceError, match="found no member, expected at least one"):
        bj.run(opened(fn), source, runner=runner)


def test_a_wrong_program_is_traced_a_constant_number_of_times():
    """However many arguments it has besides the source."""
    params = [np.ones(2 + i, np.float32) for i in range(20)]
    for size in (None, "x"):
        calls = []

        @bj.program(placements={"clients": size})
        def wrong(params, x, calls=calls):
            calls.append(1)
            return bj.reduce_sum(bj.map_fn(lambda v: v.no_such_attribute, x))

        rows = Counted(data(20)["x"])
        with pytest.raises(AttributeError, match="no_such_attribute"):
            bj.run(wrong, params, bj.from_chunks(rows, jax.ShapeDtypeStruct((4, 3), "float32")))
        assert len(calls) <= 16


def test_a_check_of_lengths_in_the_program():
    """It fails with one text for all numbers of members but the right one."""
    tree = data(20)
    params = [np.ones(2 + i, np.float32) for i in range(30)]

    @bj.program(placements={"clients": "x"})
    def prog(params, k, x):
        assert x.shape[0] == k.shape[0]
        return bj.reduce_sum(x)

    found = bj.run(prog, params, tree["k"], stream(tree["x"]), runner="local")
    np.testing.assert_allclose(found, tree["x"].sum(0), rtol=1e-5)
    with pytest.raises(AssertionError):
        bj.run(prog, params, tree["k"][1:], stream(tree["x"]), runner="local")


def test_errors_of_the_program_come_before_anything_is_read():
    def wrong(x):
        raise KeyError("mine")

    rows = Counted(data(20)["x"])
    with pytest.raises(KeyError, match="mine"):
        bj.run(opened(wrong), bj.from_chunks(rows, jax.ShapeDtypeStruct((4, 3), "float32")))
    with pytest.raises(ValueError, match="hapes"):
        bj.run(opened(lambda x: bj.reduce_sum(x) + jnp.ones(7)), bj.from_chunks(rows))
    assert rows.reads == 0


def test_nothing_is_left(tmp_path):
    options = {**OPTIONS, "work_folder": str(tmp_path)}
    for runner in RUNNERS:
        bj.run(unknown.two_passes, W, stream(data(20)), runner=runner, options=options)
        bj.run(unknown.loss, W, stream(data(20)), runner=runner, options=options)
    assert not os.listdir(tmp_path)


def test_a_folder_that_cannot_be_written():
    options = {**OPTIONS, "work_folder": "/proc/none"}
    for runner in RUNNERS:
        with pytest.raises(SourceError, match=r"/proc/none.*cannot write here"):
            bj.run(unknown.two_passes, W, stream(data(20)), runner=runner, options=options)


# --- verify, transform, several processes


def test_verify():
    assert bj.verify(unknown.two_passes, W, stream(data(20)), options=OPTIONS).ok


@pytest.mark.parametrize("fn", [unknown.reductions, unknown.two_passes])
def test_transform(fn):
    tree = data(20)
    placed = (0, 2) if fn is unknown.two_passes else ()
    exact = [raw(x) for x in jax.tree.leaves(bj.run(fn, W, tree, runner="local", options=OPTIONS))]
    with pipeline() as p:
        results = p | bj.transform(fn, W, stream(tree), options=OPTIONS)
        for i, result in enumerate(jax.tree.leaves(results)):
            same = unknown.same(exact[i], exact[i], i in placed)
            assert_that(result, same, label=f"check {i}")


def test_transform_refuses_what_it_would_have_to_count():
    with pytest.raises(StagingError, match="needs the number of members as a constant"):
        bj.transform(opened(unknown.branches), stream(data(20)["x"]))
    spec = jax.ShapeDtypeStruct((unknown.UNKNOWN,), "int32")
    with pytest.raises(StagingError, match=r"use beamjax\.run"):
        bj.transform(paired, stream(data(20)["x"]), spec)


def test_several_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))  # so that workers find `streams`
    x = np.arange(21, dtype=np.float32)

    def moments(x):
        center = bj.reduce_mean(x)
        return center, bj.reduce_mean(bj.map_fn(lambda v: (v - center) ** 2, x))

    for fn, tree, source in (
        (opened(bj.reduce_mean), x, Numbers([5, 0, 16])),
        (opened(moments), x, Numbers([5, 0, 16])),
        (opened(moments), x, stream(x)),
    ):
        exact = bj.run(fn, tree, runner="local", options=OPTIONS)
        found = bj.run(fn, source, options=PROCESSES)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), found, exact))
