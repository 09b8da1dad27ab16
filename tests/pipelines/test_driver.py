"""Loops and branches: what NumPy gives, however many rounds make a graph and whoever computes."""

import functools
import operator
import os
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import url_files  # noqa: F401 - makes bjtest:// known to Beam
from helpers import assert_close, assert_same_bits
from plans import Maker, inputs_of

import beamjax as bj
from beamjax.errors import WorkerError
from beamjax.options import parse_options
from beamjax.pipelines import run as runners
from beamjax.pipelines.launch import Launcher
from beamjax.plan.steps import Block, Branch, Carried, Gather, Loop, Scatter, Sliced
from beamjax.storage import files

N = 21
X = np.random.default_rng(0).integers(-4, 5, (N, 3)).astype(np.float32)
THREADS = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]


def run(plan, flags=(), **arrays):
    options = parse_options([*flags, "--resident=false"])
    return runners.run_plan(plan, inputs_of(plan, **arrays), "DirectRunner", options)


def loop(name, rounds, block, carried="", sliced="", stacked="", condition=None, reverse=False):
    """A loop from names: carried as `init:param:result`, sliced as `operand:param`."""
    return Loop(
        name, rounds, condition, block,
        tuple(Carried(*text.split(":")) for text in carried.split()),
        tuple(Sliced(*text.split(":")) for text in sliced.split()),
        tuple(stacked.split()), reverse, "program.py:7 (fn)",
    )  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """The names of the steps of each pipeline that is run."""
    found = []
    run = Launcher.run

    def spy(self, plan, inputs, stem):
        found.append([step.name for step in plan.steps])
        return run(self, plan, inputs, stem)

    monkeypatch.setattr(Launcher, "run", spy)
    return found


# --- descent: a server value carried, a placed one from outside


def descent(rounds=5):
    m = Maker(N, w="f 3", x="f 3@", p="f 3", t="f 3", q="f 3", out="f 3")
    block = Block(
        (
            m.map("map_clients_0", lambda w, x: x * w - x, "p", "x", sums="t"),
            m.server("server_0", lambda w, t: w + jnp.round(t / 8), "p t", "q"),
        ),
        ("q",),
    )
    return m.plan([loop("loop_0", rounds, block, "w:p:out")], "out", "w x")


def descent_by_numpy(w, x, rounds):
    for _ in range(rounds):
        w = w + np.round(np.sum(x * w - x, axis=0) / 8)
    return w


W = np.array([2, -1, 3], np.float32)


def test_a_server_value_is_carried(launched):
    expected = descent_by_numpy(W, X, 5)
    assert_same_bits(run(descent(), w=W, x=X)["out"], expected)
    steps = ("map_clients_0", "server_0")
    assert launched == [[f"loop_0[{number}]/{step}" for step in steps] for number in range(5)]
    launched.clear()
    assert_same_bits(run(descent(0), w=W, x=X)["out"], W)
    assert not launched


# --- placed values that are carried, sliced and stacked


def history(rounds=4, reverse=False, extra="out kept heads pages total"):
    """Carries a placed and a server value, slices and stacks both kinds, then reads a stack."""
    m = Maker(
        N, z="f 2@", s="f", xs=f"f {rounds} 2@", cs=f"f {rounds}",
        zp="f 2@", sp="f", x="f 2@", c="f", z1="f 2@", d="f 2@", t="f 2", s1="f",
        out="f 2@", kept="f", heads=f"f {rounds} 2@", pages=f"f {rounds} 2",
        total=f"f {rounds} 2",
    )  # fmt: skip
    block = Block(
        (
            m.map(
                "map_clients_0",
                lambda s, c, z, x: (z + c * x, z - s, z * x),
                "sp c", "zp x", "z1 d", "t",
            ),
            m.server("server_0", lambda s, t, c: s + t[0] - c, "sp t c", "s1"),
        ),
        ("z1", "s1", "d", "t"),
    )  # fmt: skip
    steps = [
        loop("loop_0", rounds, block, "z:zp:out s:sp:kept", "xs:x cs:c", "heads pages",
             reverse=reverse),
        m.map("map_clients_1", lambda heads: heads, "", "heads", "", "total"),
    ]  # fmt: skip
    return m.plan(steps, extra, "z s xs cs")


def history_by_numpy(z, s, xs, cs, reverse):
    order = range(len(cs))[:: -1 if reverse else 1]
    heads, pages = np.zeros_like(xs), np.zeros((len(cs), 2), np.float32)
    for i in order:
        heads[:, i], pages[i] = z - s, np.sum(z * xs[:, i], axis=0)
        z, s = z + cs[i] * xs[:, i], s + pages[i][0] - cs[i]
    return {"out": z, "kept": s, "heads": heads, "pages": pages, "total": heads.sum(axis=0)}


def history_inputs(rounds):
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.integers(-2, 3, shape).astype(np.float32)
    return {"z": draw(N, 2), "s": draw(), "xs": draw(N, rounds, 2), "cs": draw(rounds)}


def assert_history(reverse=False, flags=(), rounds=4):
    arrays = history_inputs(rounds)
    found = run(history(rounds, reverse), flags, **arrays)
    assert_same_bits(found, history_by_numpy(**arrays, reverse=reverse))


@pytest.mark.versions
def test_values_are_carried_sliced_and_stacked():
    for reverse in (False, True):
        assert_history(reverse)
    assert_history(flags=THREADS)
    assert_history(rounds=0)


@bj.program(clients=N)
def mixed(x, w, hs):
    """Carries what is read from outside, passed on, replaced or sliced, and stacks all of it."""
    y = bj.map_fn(lambda v: v * 2, x)
    u = bj.reduce_sum(bj.map_fn(lambda v, w: v * w, (x, bj.broadcast(w))))

    def step(state, each):
        p, v, a, b, q, h = state
        e, i = each
        t = bj.reduce_sum(bj.map_fn(lambda p, a, b, e: p * a + b + e.astype("f4"), (p, a, b, e)))
        p1 = bj.map_fn(lambda p, y, v: p / 2 + i * y + v / 64, (p, y, bj.broadcast(v)))
        h1 = bj.map_fn(lambda h, e: h + e, (h, e))
        return (p1, v + jnp.round(t / 64), y, b, w, h1), (a, b, w, q, t, h)

    return jax.lax.scan(step, (y, u, x, y, u, hs[0]), (hs, u))


@pytest.mark.versions
def test_values_from_outside_are_carried_sliced_and_stacked():
    hs = (np.arange(3 * N * 3) % 7).reshape(3, N, 3).astype(jnp.bfloat16)
    expected = bj.run(mixed, X, W, hs, runner="local", options={"shard_size": 8})
    assert_close(expected, jax.jit(mixed)(X, W, hs))
    for resident in (True, False):
        options = {"shard_size": 8, "resident": resident}
        assert_same_bits(bj.run(mixed, X, W, hs, options=options), expected)


def exchange(rounds):
    """Gathers, transposes and scatters a placed value in each round."""
    m = Maker(3, x="f 3@", p="f 3@", g="f 3 3", h="f 3 3", s="f 3@", out="f 3@", t="f 3")
    block = Block(
        (
            Gather("gather_0", "p", "g", 0, "", ""),
            m.server("server_0", lambda g: g.T * 2 + g, "g", "h"),
            Scatter("scatter_0", "h", "s", 1, "", ""),
        ),
        ("s",),
    )
    steps = [
        loop("loop_0", rounds, block, "x:p:out"),
        m.map("map_clients_0", lambda x: x, "", "out", "", "t"),
    ]
    return m.plan(steps, "out t", "x")


# --- conditions, branches, nesting


def halving():
    """While the sum over members of x * s is over a limit, halve s; the condition is a pass."""
    m = Maker(N, x="f 3@", s="f", limit="f", p="f", i="i", k="i", t="f", go="b", p1="f", k1="i",
              out="f", count="i")  # fmt: skip
    condition = Block(
        (
            m.map("map_clients_0", lambda p, x: jnp.sum(x * x) * p, "p", "x", "", "t"),
            m.server("server_0", lambda t, limit: t > limit, "t limit", "go"),
        ),
        ("go",),
    )
    block = Block((m.server("server_1", lambda p, k: (p / 2, k + 1), "p k", "p1 k1"),),
                  ("p1", "k1"))  # fmt: skip
    steps = [loop("loop_0", None, block, "s:p:out i:k:count", condition=condition)]
    return m.plan(steps, "out count", "x s i limit")


def test_a_condition_over_members(launched):
    for limit in (1e9, 10.0):
        launched.clear()
        total, s, k = np.sum(X * X), np.float32(1), np.int32(0)
        while total * s > limit:
            s, k = s / 2, k + np.int32(1)
        found = run(halving(), x=X, s=np.float32(1), i=np.int32(0), limit=np.float32(limit))
        assert_same_bits(found, {"out": s, "count": k})
        assert len(launched) == k + 1  # the block is computed in this process


def counting():
    """While i < limit: a pass over members; the condition is computed in this process."""
    m = Maker(N, x="f 3@", w="f 3", i="i", limit="i", p="f 3", k="i", t="f 3", go="b", q="f 3",
              k1="i", out="f 3", count="i")  # fmt: skip
    condition = Block((m.server("server_0", operator.lt, "k limit", "go"),), ("go",))
    block = Block(
        (
            m.map("map_clients_0", lambda p, x: x * p, "p", "x", "", "t"),
            m.server("server_1", lambda t, k: (t / 8, k + 1), "t k", "q k1"),
        ),
        ("q", "k1"),
    )
    steps = [loop("loop_0", None, block, "w:p:out i:k:count", condition=condition)]
    return m.plan(steps, "out count", "x w i limit")


def test_a_condition_on_the_server_costs_no_pipeline(launched):
    found = run(counting(), x=X, w=W, i=np.int32(0), limit=np.int32(3))
    w = functools.reduce(lambda w, _: np.sum(X * w, axis=0) / 8, range(3), W)
    assert_same_bits(found, {"out": w, "count": np.int32(3)})
    assert launched == [[f"loop_0[{i}]/map_clients_0", f"loop_0[{i}]/server_1"] for i in range(3)]


def choice(index_type="i"):
    """One of: a pass over x, a loop of passes, x as it is; both results are used."""
    m = Maker(N, x="f 3@", w="f 3", i=index_type, y0="f 3@", t0="f 3", p="f 3@", p1="f 3@",
              t1="f 3", y1="f 3@", y="f 3@", t="f 3", total="f 3")  # fmt: skip
    first = Block((m.map("map_clients_0", lambda w, x: (x + w, x * w), "w", "x", "y0", "t0"),),
                  ("y0", "t0"))  # fmt: skip
    inner = Block((m.map("map_clients_1", lambda p: p + 1, "", "p", "p1"),), ("p1",))
    second = Block(
        (
            loop("loop_0", 2, inner, "x:p:y1"),
            m.map("map_clients_2", lambda y: y, "", "y1", "", "t1"),
        ),
        ("y1", "t1"),
    )
    branch = Branch("branch_0", "i", (first, second, Block((), ("x", "w"))), ("y", "t"), "p.py:1")
    last = m.map("map_clients_3", lambda t, y: y * t, "t", "y", "", "total")
    return m.plan([branch, last], "y t total", "x w i")


@pytest.mark.versions
def test_branches_run_one_block(launched):
    values = [(X + W, (X * W).sum(0)), (X + 2, (X + 2).sum(0)), (X, W)]
    inner = {"loop_0[0]/map_clients_1", "loop_0[1]/map_clients_1", "map_clients_2"}
    blocks = [{"map_clients_0"}, inner, set()]
    for index, taken in ((-3, 0), (0, 0), (1, 1), (2, 2), (9, 2)):
        launched.clear()
        found = run(choice(), x=X, w=W, i=np.int32(index))
        y, t = values[taken]
        assert_same_bits(found, {"y": y, "t": t, "total": (y * t).sum(0)})
        assert launched[-1] == ["map_clients_3"]
        names = {re.sub(r".*\)/", "", name) for steps in launched[:-1] for name in steps}
        assert names == blocks[taken]
    for index in (False, True):
        found = run(choice("b"), x=X, w=W, i=np.bool_(index))
        assert_same_bits(found["y"], values[index][0])


def nested():
    """for i in 3: w, x = cond(i odd, (2 rounds of x += w), (w, x)); w -> sum; stacks of both."""
    m = Maker(
        N, x="f 3@", w="f 3", js="i 3", j="i", p="f 3@", v="f 3", odd="b", a="f 3@", a1="f 3@",
        as_="f 2 3@", added="f 3@", hist="f 2 3@", q="f 3@", t="f 3", v1="f 3", out="f 3@",
        last="f 3", qs="f 3 3@", hists="f 3 2 3@", vs="f 3 3", flat="f 2 3@",
    )  # fmt: skip
    inner = Block((m.map("map_clients_0", lambda v, a: a + v, "v", "a", "a1"),), ("a1", "a"))
    taken = Block((loop("loop_1", 2, inner, "p:a:added", "", "as_"),), ("added", "as_"))
    flat = m.map("map_clients_2", lambda p: jnp.stack([p, p * 0]), "", "p", "flat")
    other = Block((flat,), ("p", "flat"))
    block = Block(
        (
            m.server("server_0", lambda j: j % 2 == 1, "j", "odd"),
            Branch("branch_0", "odd", (other, taken), ("q", "hist"), "p.py:2"),
            m.map("map_clients_1", lambda q: q / 8, "", "q", "", "t"),
            m.server("server_1", lambda t, v: jnp.round(t + v), "t v", "v1"),
        ),
        ("q", "v1", "q", "hist", "v"),
    )
    steps = [loop("loop_0", 3, block, "x:p:out w:v:last", "js:j", "qs hists vs", reverse=True)]
    return m.plan(steps, "out last qs hists vs", "x w js")


@pytest.mark.versions
def test_loops_and_branches_inside_of_loops():
    js = np.array([0, 1, 3], np.int32)
    x, w = X, W
    qs, hists, vs = np.zeros((N, 3, 3)), np.zeros((N, 3, 2, 3)), np.zeros((3, 3))
    for i in (2, 1, 0):
        if js[i] % 2:
            q, hist = x + 2 * w, np.stack([x, x + w], axis=1)
        else:
            q, hist = x, np.stack([x, x * 0], axis=1)
        qs[:, i], hists[:, i], vs[i] = q, hist, w
        x, w = q, np.round(np.sum(q / 8, axis=0) + w)
    found = run(nested(), x=X, w=W, js=js)
    expected = {"out": x, "last": w, "qs": qs, "hists": hists, "vs": vs}
    assert_same_bits(found, {name: np.float32(array) for name, array in expected.items()})


# --- what is left behind, and what goes wrong


@pytest.fixture
def stored(monkeypatch):
    """How many files the store has when each pipeline starts; all values are files."""
    monkeypatch.setattr("beamjax.pipelines.values.store.INLINE_BYTES", 0)
    found = []
    run = Launcher.run

    def spy(self, *args):
        found.append(len(files.names(self.store.root)))
        return run(self, *args)

    monkeypatch.setattr(Launcher, "run", spy)
    return found


def test_files_of_dead_values_go_as_the_loop_goes_on(stored):
    run(counting(), x=X, w=W, i=np.int32(0), limit=np.int32(8))
    assert len(stored) == 8
    assert len(set(stored[1:])) == 1


def test_placed_states_of_earlier_rounds_are_removed(stored):
    m = Maker(N, x="f 3@", p="f 3@", p1="f 3@", out="f 3@")
    block = Block((m.map("map_clients_0", lambda p: p + 1, "", "p", "p1"),), ("p1",))
    found = run(m.plan([loop("loop_0", 6, block, "x:p:out")], "out", "x"), x=X)
    np.testing.assert_array_equal(found["out"], X + 6)
    assert stored[2:] == [2] * 4  # the body and the last state


def test_a_value_that_shares_its_file_stays(stored):
    """Equal values share a content-hashed file: one is dropped, the other one is still read."""
    m = Maker(N, w="f 3", p="f 3", q="f 3", p1="f 3", t="f 3", x="f 3@", out="f 3", kept="f 3")
    block = Block(
        (m.map("map_clients_0", lambda p, q, x: (x * 0 + q, x * 0), "p q", "x", "", "t p1"),),
        ("p1", "q"),
    )
    m.values["p1"] = m.values["p"]
    steps = [loop("loop_0", 3, block, "w:p:out w:q:kept")]
    found = run(m.plan(steps, "out kept", "w x"), w=W, x=X)
    np.testing.assert_array_equal(found["kept"], W)
    np.testing.assert_array_equal(found["out"], 0 * W)


@pytest.fixture
def empty_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("error", [KeyboardInterrupt, WorkerError])
def test_a_run_that_ends_early_leaves_nothing(error, empty_tmp, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.values.store.INLINE_BYTES", 0)
    run_pipeline = Launcher.run
    left = iter([None, None])

    def broken(self, *args):
        if next(left, error) is error:
            assert os.listdir(self.store.root)
            raise error("stopped")
        return run_pipeline(self, *args)

    monkeypatch.setattr(Launcher, "run", broken)
    with pytest.raises(error, match="stopped"):
        run(history(4), **history_inputs(4))
    assert list(empty_tmp.iterdir()) == []


def test_an_error_names_the_round():
    """A member is missing from round 3 on."""
    arrays = history_inputs(4)
    arrays["xs"] = np.delete(arrays["xs"], -1, axis=1)  # three entries
    step = r"step 'map_clients_0' \(map_clients_0_body\), shard \d of placement"
    for flags in ([], PROCESSES):
        with pytest.raises(WorkerError, match=f"^loop_0, round 3: {step}"):
            run(history(4, extra="out"), flags, **arrays)


def test_an_error_in_this_process_names_the_rounds(monkeypatch):
    def fail(plan, step, *_):
        raise WorkerError(f"step {step.name!r}: broken")

    monkeypatch.setattr("beamjax.pipelines.driver.run_server", fail)
    with pytest.raises(WorkerError, match=r"^loop_0, round 0: step 'server_0': broken$"):
        run(nested(), x=X, w=W, js=np.array([0, 1, 3], np.int32))
