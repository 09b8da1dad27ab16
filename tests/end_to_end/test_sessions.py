"""Sessions: workers that stay between calls give what `beamjax.run` gives."""

import os
import pickle
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from helpers import assert_same_bits

import beamjax as bj
from beamjax.errors import OptionsError, WorkerError

# Threads of Beam may raise an error when a session closes their connection.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

N = 40
OPTIONS = {"shard_size": 8}
PROCESSES = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
Y = X @ np.float32([1, -2, 3])


@bj.program(placements={"rows": N})
def gradient(w, x, y):
    one = jax.grad(lambda w, x, y: 0.5 * (x @ w - y) ** 2)
    return bj.reduce_mean(bj.map_fn(lambda x, y: one(w, x, y), (x, y)))


@bj.program(placements={"rows": N})
def residuals(w, x, y):
    return bj.map_fn(lambda x, y: x @ w - y, (x, y))


def descent(w, x, y):
    return jax.lax.fori_loop(0, 3, lambda _, w: w - 0.1 * gradient(w, x, y), w)


def train(call, rounds=4):
    """A Python loop over three programs, of which one returns placed values."""
    w = jnp.zeros(3)
    for _ in range(rounds):
        w = w - 0.1 * call(gradient, w, X, Y)
    return w, call(descent, w, X, Y), call(residuals, w, X, Y)


@pytest.fixture(scope="module")
def expected():
    return train(lambda fn, *args: bj.run(fn, *args, runner="local", options=OPTIONS))


@pytest.mark.parametrize(
    ("runner", "more"),
    [
        ("local", {}),
        ("DirectRunner", {}),
        pytest.param("DirectRunner", PROCESSES, marks=pytest.mark.long),
        pytest.param("PrismRunner", {}, marks=pytest.mark.prism),
        pytest.param("FlinkRunner", {}, marks=pytest.mark.flink),
    ],
    ids=["local", "threads", "processes", "prism", "flink"],
)
def test_calls_have_the_bits_of_runs(runner, more, expected):
    with bj.session(runner, {**OPTIONS, **more}) as s:
        assert_same_bits(train(s.run), expected)
        assert_same_bits(train(s.run), expected)


def test_a_failed_call_leaves_the_session_usable(expected):
    def fails(w, x, y):
        def refuse(v):
            raise ValueError("no such thing")

        like = jax.ShapeDtypeStruct((), jnp.float32)
        return bj.reduce_sum(
            bj.map_fn(
                lambda x: jax.pure_callback(refuse, like, x.sum(), vmap_method="sequential"), x
            )
        )

    with bj.session("DirectRunner", OPTIONS) as s:
        with pytest.raises(WorkerError, match="no such thing"):
            s.run(bj.program(placements={"rows": N})(fails), jnp.zeros(3), X, Y)
        assert_same_bits(train(s.run), expected)


def test_arrays_that_change_are_read_again():
    x = X.copy()
    with bj.session("DirectRunner", {**OPTIONS, **PROCESSES}) as s:
        for _ in range(2):
            found = s.run(gradient, jnp.zeros(3), x, Y)
            local = bj.run(gradient, jnp.zeros(3), x, Y, runner="local", options=OPTIONS)
            assert_same_bits(found, local)
            x += 1


def test_placed_results_go_to_files_of_their_call(tmp_path):
    """The workers use the program of the first call again, but not its folder."""
    own = [{**OPTIONS, "results_folder": str(tmp_path / name)} for name in "ab"]
    with bj.session("DirectRunner", OPTIONS) as s:
        kept = [s.run(residuals, jnp.full(3, w), X, Y, keep="placed") for w in range(3)]
        kept += [
            s.run(residuals, jnp.full(3, w), X, Y, keep="placed", options=own[w]) for w in range(2)
        ]
        with pytest.raises(bj.OptionsError, match="found a result of another run"):
            s.run(residuals, jnp.full(3, 2), X, Y, keep="placed", options=own[0])
        found = [np.asarray(each) for each in kept]
    expected = [
        bj.run(residuals, jnp.full(3, w), X, Y, runner="local", options=OPTIONS) for w in range(3)
    ]
    assert_same_bits(found, [np.asarray(expected[w]) for w in (0, 1, 2, 0, 1)])
    assert kept[-1].folder.startswith(str(tmp_path))


def test_an_idle_session_ends_and_starts_again(expected):
    def workers():
        return [t for t in threading.enumerate() if t.name == "beamjax rounds" and t.is_alive()]

    with bj.session("DirectRunner", OPTIONS, idle_seconds=0.2) as s:
        assert_same_bits(train(s.run), expected)
        assert workers()
        deadline = time.monotonic() + 60
        while workers() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not workers()
        assert_same_bits(train(s.run), expected)


def test_killed_workers_are_replaced(expected):
    """All of them, between calls; the new ones find the bodies of earlier programs."""
    known = {p.pid for p in psutil.Process().children(recursive=True)}
    with bj.session("DirectRunner", {**OPTIONS, **PROCESSES}) as s:
        assert_same_bits(train(s.run), expected)
        for process in psutil.Process().children(recursive=True):
            if process.pid not in known and any("worker" in a for a in process.cmdline()):
                process.kill()
        assert_same_bits(train(s.run), expected)


def test_a_session_that_is_never_closed_leaves_no_files(tmp_path):
    script = """if True:
        import beamjax as bj, numpy as np
        mean = bj.program(placements={"rows": None})(lambda x: bj.reduce_mean(x))
        s = bj.session("DirectRunner")
        s.run(mean, np.ones((16, 3), np.float32))
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert not list(tmp_path.glob("beamjax*"))


def test_what_a_session_refuses():
    with pytest.raises(OptionsError, match="idle_seconds"):
        bj.session("local", idle_seconds=0)
    with pytest.raises(OptionsError, match="belongs to one run"):
        bj.session("DirectRunner", {"checkpoint": "x"})
    for runner in ("local", "DirectRunner"):
        with bj.session(runner, OPTIONS) as s, pytest.raises(TypeError, match="another session"):
            pickle.dumps(s)
        s.close()
        with pytest.raises(OptionsError, match="after its end"):
            s.run(gradient, jnp.zeros(3), X, Y)
