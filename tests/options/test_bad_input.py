"""Wrong inputs are refused before any work starts; later errors name step, shard and members."""

import functools
import itertools
import re
import subprocess
import sys

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from explained import facts_of
from faults import WAYS

import beamjax as bj
from beamjax.errors import (
    OptionsError,
    OutsideProgramError,
    PlacementError,
    StagingError,
    StructureError,
    WorkerError,
)
from beamjax.pipelines.runners.unknown_flags import check_flags

N = 20
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
RUNNERS = ["local", "DirectRunner"]


@bj.program(clients=N)
def total(x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * 2, x))


def program_of(body):
    return bj.program(clients=N)(lambda x: bj.map_fn(body, x))


def run_here(fn, *args, **kwargs):
    return bj.run(fn, *args, runner="local", **kwargs)


@pytest.fixture
def no_work(monkeypatch):
    """Makes any work an error: shards, stores and pipelines."""

    def work(*args, **kwargs):
        raise AssertionError("work was started")

    monkeypatch.setattr("beamjax.runtime.shard_executor.ShardExecutor.__call__", work)
    monkeypatch.setattr("beamjax.pipelines.values.store.Store.put", work)
    monkeypatch.setattr("apache_beam.Pipeline.run", work)


def faults_of(calls, kind, *parts):
    """What is wrong with the errors of calls by name: each is of a kind and has these parts."""
    found = []
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            text = str(error).replace("\n", " ")
            if type(error) is not kind or not re.search(".*".join(parts), text):
                found.append((name, type(error), text))
        else:
            found.append((name, "no error"))
    return found


# --- arguments and programs: through every front door


@bj.program(clients=N)
def raises(x):
    return bj.map_fn(lambda v: v @ jnp.ones((2, 2)), x)


BAD = {
    "outside": (lambda x: bj.reduce_sum(x), X, OutsideProgramError,
                r"reduce_sum is only defined inside a program"),
    "other n": (total, X[1:], PlacementError,
                r"map_fn: arg has shape \(19, 3\), expected \(20, ...\)"),
    "scalar": (total, 1.0, PlacementError, r"arg has shape \(\), expected \(20, ...\)"),
    "ragged": (total, (X, X[:5]), PlacementError, r"arg\[1\] has shape \(5, 3\), expected \(20"),
    "text": (total, {"a": X, "b": "text"}, StructureError,
             r"x\['b'\]: found a str .*'text'.* expected an array"),
    "object array": (total, np.array([None, 1]), StructureError,
                     r"x: found an array of dtype object.*astype"),
    "byte order": (total, X.astype(">f4"), StructureError,
                   r"x: .*'>f4'.*astype\('float32'\)"),
    "masked": (total, np.ma.masked_array(X), StructureError, r"x: .*masked.*filled"),
    "large int": (total, (X, 2**40), StructureError,
                  r"x\[1\]: found the int 1099511627776"),
    "text result": (program_of(lambda v: {"a": v, "b": "text"}), X, StructureError,
                    r"the result of <lambda>\['b'\] is of type str"),
    "source of other n": (total, bj.from_arrays(X[1:]), PlacementError,
                          r"map_fn: arg has shape \(19, 3\), expected \(20"),
    "callback": (program_of(lambda v: jax.pure_callback(np.sin, v, v)), X, StagingError,
                 r"test_bad_input\.py:\d+"),
    "error in the body": (raises, X, TypeError, r"dot|matmul|shapes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("no_work")
def test_bad_arguments_and_programs(name):
    fn, arg, error, message = BAD[name]
    calls = {front.__name__: functools.partial(front, fn, arg)
             for front in (run_here, bj.run, bj.explain, bj.verify, bj.transform)}  # fmt: skip
    assert faults_of(calls, error, message) == []


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_is_fine_and_what_is_only_for_transform(runner):
    program = program_of(lambda d: d)
    assert bj.run(program, {"x": X, "none": None}, runner=runner)["none"] is None
    how = functools.partial(lambda how, x: bj.reduce_sum(x * 2.0 if how == "double" else x))
    doubled = bj.program(clients=N)(functools.partial(how, "double"))
    np.testing.assert_allclose(bj.run(doubled, X, runner=runner), 2 * X.sum(0))
    with pytest.raises(StagingError, match=r"x: found a jax\.ShapeDtypeStruct.*transform"):
        bj.run(total, jax.ShapeDtypeStruct(X.shape, X.dtype), runner=runner)
    calls = []

    def changing(v):
        calls.append(1)
        return (v, v) if len(calls) % 2 else v

    trees = [bj.run(program, X, runner=runner) for program in [program_of(changing)] * 2]
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])


# --- how a call is made


@bj.program(clients=N)
def loss(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: (v * w).sum(), x))


@pytest.mark.usefixtures("no_work")
def test_calls_inside_of_a_transformation():
    w, two = np.ones(3, np.float32), np.ones((2, 3), np.float32)
    calls = {
        "grad": lambda: jax.grad(lambda w: run_here(loss, w, X))(w),
        "grad, closed over": lambda: jax.grad(lambda w: run_here(lambda x: loss(w, x), X))(w),
        "nested": lambda: jax.grad(lambda w: run_here(loss, {"a": [w]}, X))(w),
        "jit": lambda: jax.jit(lambda w: run_here(loss, w, X))(w),
        "vmap": lambda: jax.vmap(lambda w: run_here(loss, w, X))(two),
        "scan": lambda: jax.lax.scan(lambda w, _: (run_here(loss, w, X), None), w, length=2),
        "Beam": lambda: jax.grad(lambda w: bj.run(loss, w, X))(w),
        "launch": lambda: jax.grad(lambda w: bj.launch(loss, w, X, runner="local"))(w),
        "verify": lambda: jax.grad(lambda w: bj.verify(loss, w, X, runner="local"))(w),
        "transform": lambda: jax.grad(lambda w: bj.transform(loss, w, X))(w),
    }
    ends = (r"\(jax\.grad\(", r"outside of jax\.grad")
    for part in (r"test_bad_input\.py:", "is a tracer", *ends):
        assert faults_of(calls, StagingError, part) == []
    constants = {"jit": lambda: jax.jit(lambda: run_here(loss, w, X))()}
    for part in (r"test_bad_input\.py:", "traces", *ends):
        assert faults_of(constants, StagingError, part) == []


@pytest.mark.usefixtures("no_work")
def test_tracers_that_a_function_has_leaked():
    leaked = []

    @bj.program(clients=N)
    def body_leaks(x):
        bj.map_fn(lambda v: leaked.append(v) or v, x)
        return leaked[0]

    calls = {
        "by a body": lambda: run_here(body_leaks, X),
        "in an earlier call": lambda: run_here(lambda w, x: loss(w, x) + leaked[0], X[0], X),
        "as an argument": lambda: run_here(loss, leaked[0], X),
    }
    for part in ("is a tracer", "leaked it", "Return the value"):
        assert faults_of(calls, StagingError, part) == []


def test_calls_of_values_alone_beside_a_transformation():
    w = np.ones(3, np.float32)
    found = jax.grad(lambda v: (v * run_here(loss, w, X)).sum())(w)
    np.testing.assert_allclose(found, [X.sum(1).mean()] * 3)
    plans = []
    jax.jit(lambda w: plans.append(bj.explain(loss, w, X)))(w)
    assert "plan of loss" in str(plans)


@pytest.mark.usefixtures("no_work")
def test_keyword_arguments_of_the_function():
    for call in (bj.run, bj.launch, bj.transform, bj.verify, bj.explain, bj.dataflow.dry_run):
        with pytest.raises(TypeError) as caught:
            call(loss, X[0], x=X)
        assert isinstance(caught.value, StructureError)
        assert f"{call.__name__}: found the keyword argument 'x'" in str(caught.value)
        assert "functools.partial(loss, x=...)" in str(caught.value)
    with pytest.raises(StructureError, match=r"argument 'option'; did you mean 'options'\?"):
        bj.run(total, X, option={})


def test_values_that_python_needs():
    """JAX says so, of the user's function and the user's name of the argument."""

    def branch(w, x):
        return bj.reduce_sum(x) if w["a"].sum() > 0 else x

    def rounds(n, x):
        return jax.lax.scan(lambda c, _: (c + bj.reduce_sum(x), None), jnp.zeros(3), length=n)[0]

    def times(n, x):
        return [bj.reduce_sum(x) for _ in range(n)]

    def in_numpy(w, x):
        return np.sin(w["a"]) * bj.reduce_sum(x)

    def body(member, scale):
        return member["b"] if scale["s"].sum() > 0 else -member["b"]

    def mapped(w, x):
        return bj.map_fn(body, ({"b": x}, {"s": x}))

    def pair(left, right):
        return left if left["c"].sum() > 0 else right

    def folded(w, x):
        return bj.reduce(pair, {"c": x})

    w = {"a": X[0]}
    cases = [
        (branch, w, "branch", "w['a']"),
        (rounds, 3, "rounds", "n"),
        (times, 3, "times", "n"),
        (in_numpy, w, "in_numpy", "w['a']"),
        (mapped, w, "body", "scale['s']"),
        (folded, w, "pair", "left['c']"),
    ]
    wrong = []
    ways = itertools.product((N, "x", None), (run_here, bj.transform), (X, bj.from_arrays(X)))
    for (fn, first, name, argument), (size, front, x) in itertools.product(cases, list(ways)):
        with pytest.raises(jax.errors.JAXTypeError) as caught:
            front(bj.program({"clients": size})(fn), first, x)
        found = str(caught.value).replace("\n", " ")
        for part in (f"function {name} at {__file__}:", f"value of the argument {argument}."):
            wrong += [(name, size, part, found)] * (part not in found)
        # Members differ, so no value of a body can be known when it is traced.
        way_out = "use jnp.where" if name in ("body", "pair") else "functools.partial("
        assert way_out in "".join(caught.value.__notes__), name
    assert not wrong
    assert run_here(bj.program(clients=N)(functools.partial(times, 2)), X)[1].shape == (3,)


class Stranger:
    """A module of Equinox, as far as JAX sees it."""

    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation


Stranger.__module__ = "equinox._module"
jax.tree_util.register_pytree_node(
    Stranger, lambda m: ((m.weight, m.activation), None), lambda _, leaves: Stranger(*leaves)
)


@pytest.mark.usefixtures("no_work")
def test_arguments_that_are_no_data_yet():
    module = Stranger(X[0], jax.nn.relu)
    for argument in (module, {"model": [module]}):
        with pytest.raises(StructureError, match=r"^w.*found a .*eqx\.partition\(module"):
            run_here(loss, argument, X)
    with pytest.raises(StructureError, match=r"x: found a .*bind .* functools\.partial"):
        run_here(loss, module.weight, jax.nn.relu)
    numbers = [float(i) for i in range(N)]
    for fn in (bj.reduce_sum, lambda x: bj.map_fn(jnp.sin, x)):
        for size in (N, "x", None):
            prog = bj.program(placements={"clients": size})(lambda x, fn=fn: fn(x))
            for call in (prog, functools.partial(run_here, prog)):
                with pytest.raises(PlacementError, match=r"numpy\.asarray\(.*makes one array") as e:
                    call(numbers)
                assert re.search(r"shape \(\)|no argument.* is an array", str(e.value))
    with pytest.raises(PlacementError) as caught:
        run_here(total, 1.0)
    assert "numpy" not in str(caught.value)


# --- options and runners

FLAGS = [
    ({"shard_sise": 8}, "found 'shard_sise', expected an option.*did you mean 'shard_size'"),
    (["--memroy=2GiB"], "found 'memroy'.*did you mean 'memory'"),
    (["--paralelism=3"], "found 'paralelism'.*did you mean 'parallelism'"),
    ({"machin_type": "n2"}, "found 'machin_type'.*did you mean 'machine_type'"),
    (["--direct_num_worker=2"], "found 'direct_num_worker'.*mean 'direct_num_workers'"),
]
VALUES = [
    ({"shard_size": 12}, "shard_size: found 12, expected a positive multiple of 8"),
    (["--direct_running_mode=fast"], "does not take these flags.*direct_running_mode.*'fast'"),
    (["--direct_num_workers=two"], "does not take these flags.*direct_num_workers.*'two'"),
]
UNKNOWN = [({"zzzzz": 1}, "found 'zzzzz', expected an option of beamjax")]


@pytest.mark.usefixtures("no_work")
def test_options_are_refused_by_every_front_door():
    """Before any work. Runners elsewhere may know flags that nobody here knows."""
    runners = ["local", "DirectRunner", "PrismRunner", "FlinkRunner", "SparkRunner"]
    runs = {runner: functools.partial(bj.run, total, X, runner=runner) for runner in runners}
    ways = {
        **runs,
        "launch": functools.partial(bj.launch, total, X, runner="local"),
        "transform": functools.partial(bj.transform, total, X),
        "explain": functools.partial(bj.explain, total, X, runner="local"),
        "verify": functools.partial(bj.verify, total, X, runner="local"),
        "pipeline": bj.pipeline,
        "dry run": functools.partial(bj.dataflow.dry_run, total, X),
    }
    elsewhere = {"PrismRunner", "FlinkRunner", "SparkRunner"}
    wrong = []
    for way, call in ways.items():
        rows = [*FLAGS, *VALUES, *(UNKNOWN if way not in elsewhere else ())]
        for options, message in rows:
            calls = {(way, str(options)): functools.partial(call, options=options)}
            wrong += faults_of(calls, OptionsError, message)
            if (options, message) in FLAGS:
                handed_on = faults_of(calls, OptionsError, "as a Beam PipelineOptions")
                wrong += handed_on if way in elsewhere else []
                wrong += [] if way in elsewhere or handed_on else [(way, options, "handed on")]
    assert wrong == []
    with pytest.raises(OptionsError, match="found runner 'FlinkRunner', but the run is on FnApi"):
        bj.run(total, X, options=["--runner=FlinkRunner"])
    for runner in ("NoSuchRunner", "no.such.Runner", None, 3, dict):
        with pytest.raises(OptionsError, match=r"runner: found .* expected 'local', "):
            bj.run(total, X, runner=runner)


def test_a_runner_is_looked_up_before_anything_is_traced():
    traced = []

    @bj.program(placements={"rows": None})
    def counted(x):
        traced.append(x)
        return bj.reduce_sum(x)

    calls = bj.run, bj.launch, bj.explain, bj.verify
    runners = {"NoSuch": "local", "flink": "FlinkRunner", "directrunner": "DirectRunner"}
    for call, (runner, known) in itertools.product(calls, runners.items()):
        with pytest.raises(OptionsError, match=f"runner: found '{runner}', expected '{known}'"):
            call(counted, X, runner=runner)
    assert traced == []


def test_options_of_other_runners_are_fine_in_this_process():
    options = {"direct_num_workers": 2, "machine_type": "n2", "parallelism": 3, "shard_size": 8}
    np.testing.assert_array_equal(run_here(total, X, options=options), 2 * X.sum(0))
    assert facts_of(bj.explain(total, X, options=PipelineOptions(["--zzzzz=1"]))) is not None
    # Of Flink and Spark in Java: Beam's Python does not have them.
    flags = "checkpointing_interval object_reuse state_backend storage_level cache_disabled"
    check_flags([f"--{name}=1" for name in flags.split()], "FlinkRunner")
    check_flags(["--qqqqq", "3", "--zzzzz=4"], "FlinkRunner")  # A server may know them.


def test_own_flags_of_clusters_are_known_to_the_first_call_of_a_process():
    call = "from beamjax.pipelines.runners.unknown_flags import check_flags as check; "
    call += "check(['--flink_cluster=f', '--pipeline_timeout=3'], 'FlinkRunner')"
    subprocess.run([sys.executable, "-c", call], check=True, timeout=60)


# --- what fails while it runs: step, shard and members are named


WHERE = r"step 'map_clients_0' \(<lambda>\), shard 1 of placement 'clients', members 8 to 15: "
EIGHT = {"shard_size": 8}


def test_an_error_that_no_worker_recorded_is_told_by_the_runner(monkeypatch, tmp_path):
    monkeypatch.setattr("beamjax.pipelines.worker.worker_errors.recorded_error", lambda store: None)
    program, x = faults.in_source("raises", tmp_path)
    runner, flags = WAYS["threads"]
    with pytest.raises(WorkerError, match=f"^{WHERE}ValueError: member nine") as caught:
        bj.run(program, x, runner=runner, options=EIGHT | flags)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "where", ["local", "one", "threads", pytest.param("processes", marks=pytest.mark.long)]
)
def test_what_jax_is_asked_to_check(where, monkeypatch):
    """Wherever a shard is computed: in other threads of this process, or in other processes."""
    for name in ("SHARD", "PASS"):
        monkeypatch.setattr(f"beamjax.runtime.ordered_pool.{name}_OPERATIONS", 0.0)

    inverses = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(lambda v: 1 / v, x)))
    root = bj.program(clients=N)(lambda x: jnp.log(bj.reduce_sum(x) - 1e9))
    x = np.where(np.arange(N)[:, None] == 9, np.float32(0), X + 1)
    runner, flags = WAYS[where]
    with jax.debug_infs(True), pytest.raises(WorkerError, match=WHERE + "FloatingPointError"):
        bj.run(inverses, x, runner=runner, options=EIGHT | flags)
    if where != "processes":
        with jax.debug_nans(True), pytest.raises(WorkerError, match=r"'server_\d': FloatingPoint"):
            bj.run(root, X, runner=runner, options=flags)
