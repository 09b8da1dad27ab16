"""Loops and branches: what NumPy gives, however many rounds make a graph and whoever computes."""

import jax.numpy as jnp
import numpy as np
import pytest
from plans import Maker, inputs_of

from beamjax.options import Options, parse_options
from beamjax.pipelines import runners
from beamjax.pipelines.launch import Launcher
from beamjax.plan import Block, Carried, Loop, Sliced

N = 21
X = np.random.default_rng(0).integers(-4, 5, (N, 3)).astype(np.float32)
THREADS = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]


def run(plan, flags=(), rounds_per_graph=None, **arrays):
    options = parse_options([*flags]) if flags else Options()
    if rounds_per_graph:
        options = parse_options([*flags, f"--rounds_per_graph={rounds_per_graph}"])
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


@pytest.mark.parametrize(
    ("width", "pipelines"), [(None, 1), (1, 5), (2, 3), (3, 2), (5, 1), (16, 1)]
)
def test_a_server_value_is_carried(width, pipelines, launched):
    found = run(descent(), rounds_per_graph=width, w=W, x=X)
    np.testing.assert_array_equal(found["out"], descent_by_numpy(W, X, 5))
    assert found["out"].dtype == np.float32
    assert len(launched) == pipelines
    assert launched[0][:2] == ["loop_0[0]/map_clients_0", "loop_0[0]/server_0"]
    assert launched[-1][-1] == "loop_0[4]/server_0"


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("flags", [[], THREADS, PROCESSES], ids=["one", "threads", "processes"])
def test_any_workers_give_the_same_bits(flags, width):
    found = run(descent(2), flags, width, w=W / 3, x=X / 7)
    expected = run(descent(2), w=W / 3, x=X / 7)
    assert found["out"].tobytes() == expected["out"].tobytes()


def test_no_rounds_give_the_initial_values(launched):
    np.testing.assert_array_equal(run(descent(0), w=W, x=X)["out"], W)
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


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("width", [None, 1, 3])
def test_values_are_carried_sliced_and_stacked(width, reverse):
    arrays = history_inputs(4)
    found = run(history(4, reverse), rounds_per_graph=width, **arrays)
    expected = history_by_numpy(**arrays, reverse=reverse)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("flags", [THREADS, PROCESSES], ids=["threads", "processes"])
def test_placed_values_go_between_workers(flags):
    arrays = history_inputs(3)
    found = run(history(3), flags, 1, **arrays)
    for name, array in history_by_numpy(**arrays, reverse=False).items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_no_rounds_stack_nothing():
    arrays = history_inputs(0)
    found = run(history(0), **arrays)
    assert found["heads"].shape == (N, 0, 2)
    assert found["pages"].shape == (0, 2)
    np.testing.assert_array_equal(found["out"], arrays["z"])
    assert {array.dtype for array in found.values()} == {np.dtype("float32")}
