"""The same bits whatever the number of cores, and what is said of machines that differ."""

import itertools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import PROCESSES, THREADS

import beamjax as bj
from beamjax.bodies.provenance import MAX_HOSTS, MAX_KINDS, MAX_TEXT, UNKNOWN, Provenance, merged
from beamjax.errors import ArrayFormatError
from beamjax.pipelines.graph.collect_results import find_provenance
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import record_provenance
from beamjax.storage import files
from beamjax.storage.arrays import encode_arrays

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

PROGRAMS = """
import json, os, sys
cores, pretended = json.loads(sys.argv[1])
os.sched_setaffinity(0, cores)
if pretended:  # threads and clients for so many cores, though there are fewer
    os.sched_getaffinity, os.cpu_count = lambda _: set(range(pretended)), lambda: pretended
import jax, jax.numpy as jnp, numpy as np
import beamjax as bj

rng = np.random.default_rng(0)
normal = lambda *shape: rng.normal(size=shape).astype("float32")
program = bj.program(placements={"c": None})


@program
def loss(w, x):
    return bj.reduce_mean(bj.map_fn(lambda x: jnp.mean(jnp.tanh(x @ w) ** 2), x))


@program
def members(x):
    def one(x):
        flat = x.ravel()
        image = jax.lax.conv_general_dilated(x[None, None], x[None, None, :5, :5], (1, 1), "SAME")
        found = jnp.linalg.svd(x, compute_uv=False), jnp.linalg.qr(x)[1]
        return *found, jnp.sort(flat), jnp.cumsum(flat), jnp.sum(flat), image

    return jax.tree.map(bj.reduce_sum, bj.map_fn(one, x))


@program
def on_the_server(x):
    x = bj.reduce_sum(x)
    return x.T @ x, jnp.linalg.svd(x[:160, :150], compute_uv=False)


@program
def rounds(w, x):
    def step(w, _):
        return w - 0.1 * jax.grad(loss)(w, x), jnp.sum(w)

    return jax.lax.scan(step, w, None, length=2)


w = normal(64, 48) / 20
cases = {
    "grad": (jax.grad(loss), w, normal(9, 2048, 64)),
    "members": (members, normal(3, 160, 160)),
    "server": (on_the_server, normal(9, 4096, 160)),
    "rounds": (rounds, w, normal(3, 2048, 64)),
    "shards": (loss, w, normal(256, 512, 64)),
}
both = [("local", {"member_loop": "loop"}), ("DirectRunner", {"member_loop": "loop"})]
ways = [("local", {"member_loop": "vmap"}), ("local", {"member_loop": "vmap", "xla_threads": 3})]
for name, (fn, *args) in cases.items():
    for runner, options in both if name in ("members", "rounds") else both + ways:
        out = bj.run(fn, *args, runner=runner, options={"shard_size": 8, **options})
        leaves = [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(out)]
        print(json.dumps([name, runner, options, leaves]))

import scipy.linalg, threadpoolctl

threads = lambda: [x["num_threads"] for x in threadpoolctl.threadpool_info()]
before, during = threads(), []

class Rows:
    def __len__(self): return 20

    def __getitem__(self, i):
        during.append(threads())
        return np.eye(4, dtype="float32")

svd = program(lambda x: bj.reduce_sum(bj.map_fn(lambda x: jnp.linalg.svd(x)[1], x)))
bj.run(svd, bj.from_random_access(Rows()), runner="local", options={"shard_size": 8})
print(json.dumps([before, during[-1], threads()]))

from beamjax.runtime.ordered_pool import usual_threads
print(json.dumps(usual_threads()))
"""


def started(cores, pretended=0):
    """A process that computes on these cores alone."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-c", PROGRAMS, json.dumps([cores, pretended])]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def printed(process):
    out, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-3000:]
    return list(map(json.loads, out.splitlines()))


@pytest.mark.skipif(len(CORES) < 2, reason="there is one core")
def test_the_number_of_cores_does_not_show_in_the_bits():
    processes = started(CORES[:1]), started(CORES), started(CORES, 16)
    (*one, _, _), (*several, threads, _), (*many, _, count) = map(printed, processes)
    assert count == 16
    for others in (several, many):
        assert [a[:3] for a, b in zip(one, others, strict=True) if a != b] == []
    of = {(name, runner, *options.values()): leaves for name, runner, options, leaves in one}
    on_beam = [key for key in of if key[1] == "DirectRunner"]
    assert [key for key in on_beam if of[key] != of[key[0], "local", *key[2:]]] == []
    before, during, after = threads  # of LAPACK, which has them back after a run
    assert set(during) == {1}
    assert after == before


# --- provenance

A, B, C = (Provenance({kind: (f"host-{kind}",)}) for kind in "abc")
MANY = Provenance({f"k{i:02}": (f"h{i}",) for i in range(MAX_KINDS)})


def test_provenance_is_a_union_in_any_order():
    parts = [A, B, A, UNKNOWN, C, Provenance({"a": ("h1", "h2")}), Provenance({"a": ("h0",)}), MANY]
    expected = merged(parts)
    assert len(expected.kinds) == MAX_KINDS
    assert expected.kinds["a"] == ("h0", "h1")
    assert len(expected.kinds["a"]) == MAX_HOSTS
    for order in itertools.islice(itertools.permutations(parts), 0, None, 997):
        cut = len(order) // 2
        assert merged(order) == expected
        assert merged(order[:cut]) | merged(order[cut:]) == expected
    assert expected | expected == expected
    assert (A | A, A | UNKNOWN, UNKNOWN | A) == (A, A, A)
    assert [x.is_mixed for x in (UNKNOWN, A, A | B)] == [False, False, True]
    longest = Provenance({"a" * MAX_TEXT: ("b" * MAX_TEXT,)})
    assert Provenance.from_json(longest.to_json()) == longest


@pytest.mark.parametrize(
    "bad",
    ["a", ["a"], {"a": "b"}, {"a": [1]}, {"a": ["h"] * 9}, {"a" * (MAX_TEXT + 1): []}],
    ids=str,
)
def test_damaged_provenance_is_refused(bad, tmp_path):
    store = Store(str(tmp_path))
    record_provenance(store, A)
    record_provenance(store, B)
    (first, second) = files.names(store.root)
    assert find_provenance(store, [first, second, "other.arrays"]) == A | B
    files.write(str(tmp_path / first), encode_arrays([], {"provenance": bad}))
    with pytest.raises(ArrayFormatError, match=f"{first}: provenance: found"):
        find_provenance(store, [first, second])


@bj.program(placements={"c": None})
def program(x):
    y = bj.map_fn(jnp.tanh, x)
    return bj.reduce_mean(y), y, jnp.sin(bj.reduce_sum(y))


X = np.linspace(0, 1, 200, dtype=np.float32)


@pytest.mark.parametrize(("runner", "flags"), [("local", {}), ("DirectRunner", PROCESSES)])
def test_a_report_has_the_provenance_and_the_fingerprint(runner, flags):
    options = {"shard_size": 8, "xla_threads": 2, **flags}
    with bj.launch(program, X, runner=runner, options=options) as job:
        job.result()
        report = job.report()
    (kind,) = report.provenance.kinds
    assert "XLA threads 2, LAPACK threads 1" in kind
    assert f"jax {jax.__version__}" in kind
    assert report.fingerprint["the version of JAX"] == jax.__version__
    assert "what its steps compute" in report.fingerprint
    plain = report.to_json()
    assert (list(plain["provenance"]), plain["is_mixed"]) == ([kind], False)
    assert kind in report.to_html()


@pytest.fixture
def two_kinds(monkeypatch):
    """Workers that are of two kinds by turns."""
    kinds = itertools.cycle([A, B])
    monkeypatch.setattr(
        "beamjax.pipelines.worker.tasks.provenance_here", lambda threads: next(kinds)
    )


def test_a_mixture_is_reported(two_kinds, caplog):
    options = {"shard_size": 8, **THREADS}
    with bj.launch(program, X, options=options) as job:
        mean, values, _ = job.result()
        report = job.report()
    np.testing.assert_allclose(mean, np.tanh(X.astype(np.float64)).mean(), rtol=1e-6)
    np.testing.assert_allclose(values, np.tanh(X), rtol=1e-5)
    assert report.provenance.kinds == {"a": ("host-a",), "b": ("host-b",)}
    assert report.to_json()["is_mixed"]
    expected = "may give different last bits: found host-a (a); host-b (b), expected one kind"
    assert expected in repr(report)
    assert expected in caplog.text


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_run_that_goes_on_from_the_checkpoint_of_another_kind_says_so(runner, tmp_path, caplog):
    @bj.program(placements={"c": None})
    def rounds(w, x):
        def step(w, _):
            return w + bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v * w), x)), w

        return jax.lax.scan(step, w, None, length=3)

    def run(**more):
        options = {"checkpoint": str(tmp_path), "shard_size": 8, "checkpoint_every": 2, **more}
        return bj.run(rounds, np.float32(1), X, runner=runner, options=options)

    first = run()
    again = run(xla_threads=2)  # it is done, and nothing is computed
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert "different last bits" not in caplog.text
    sorted(tmp_path.glob("*.checkpoint"))[-1].unlink()
    run(xla_threads=2)
    assert re.search(r"different last bits: .*XLA threads 2.*XLA threads 4", caplog.text)
