"""What is wrong with an input is told before any work starts, where that can be known."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from faults import WAYS

import beamjax as bj
from beamjax.errors import (
    ArrayFormatError,
    OptionsError,
    OutsideProgramError,
    PlacementError,
    SourceError,
    StagingError,
    StructureError,
    WorkerError,
)
from beamjax.pipelines import files
from beamjax.pipelines.flags import check_flags
from beamjax.pipelines.store import Store
from beamjax.sources import source_base

N = 20
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
RUNNERS = ["local", "DirectRunner"]


@bj.program(clients=N)
def total(x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * 2, x))


def program_of(body):
    return bj.program(clients=N)(lambda x: bj.map_fn(body, x))


def changing_body():
    calls = []

    def body(v):
        calls.append(1)
        return (v, v) if len(calls) % 2 else v

    return body


@pytest.fixture
def no_work(monkeypatch):
    """Makes any work an error: shards, stores and pipelines."""

    def work(*args, **kwargs):
        raise AssertionError("work was started")

    monkeypatch.setattr("beamjax.shards.ShardExecutor.__call__", work)
    monkeypatch.setattr("beamjax.pipelines.store.Store.put", work)
    monkeypatch.setattr("apache_beam.Pipeline.run", work)


# --- arguments and programs: through every front door


@bj.program(clients=N)
def unknown_placement(x):
    return bj.reduce_sum(x, placement="server")


@bj.program(clients=N, silos=3)
def ambiguous(x):
    return bj.reduce_sum(x)


@bj.program(clients=N)
def raises(x):
    return bj.map_fn(lambda v: v @ jnp.ones((2, 2)), x)


def none_of_the_members(x):
    return bj.program(clients=0)(lambda x: bj.reduce_sum(x))(x)


BAD = {
    "outside": (lambda x: bj.reduce_sum(x), X, OutsideProgramError,
                r"reduce_sum is only defined inside a program"),
    "other n": (total, X[1:], PlacementError,
                r"map_fn: arg has shape \(19, 3\), expected \(20, ...\)"),
    "other axis": (total, X.T, PlacementError, r"arg has shape \(3, 20\), expected \(20"),
    "scalar": (total, 1.0, PlacementError, r"arg has shape \(\), expected \(20, ...\)"),
    "ragged": (total, (X, X[:5]), PlacementError, r"arg\[1\] has shape \(5, 3\), expected \(20"),
    "text": (total, {"a": X, "b": "text"}, StructureError,
             r"args\[0\]\['b'\]: found a str .*'text'.* expected an array"),
    "object": (total, object(), StructureError, r"args\[0\]: found a object"),
    "object array": (total, np.array([None, 1]), StructureError, r"args\[0\]: found a ndarray"),
    "unknown placement": (unknown_placement, X, PlacementError,
                          r"unknown placement 'server'; the program has 'clients'"),
    "ambiguous": (ambiguous, X, PlacementError, r"more than one placement, 'clients', 'silos'"),
    "no members": (none_of_the_members, X, PlacementError,
                   r"x has shape \(20, 3\), expected \(0, ...\)"),
    "text result": (program_of(lambda v: {"a": v, "b": "text"}), X, StructureError,
                    r"the result of <lambda>\['b'\] is of type str"),
    "object result": (program_of(lambda v: object()), X, StructureError,
                      r"the result of <lambda> is of type object"),
    "source of other n": (total, bj.from_arrays(X[1:]), PlacementError,
                          r"map_fn: arg has shape \(19, 3\), expected \(20"),
    "callback": (program_of(lambda v: jax.pure_callback(np.sin, v, v)), X, StagingError,
                 r"test_bad_input\.py:\d+"),
    "error in the body": (raises, X, TypeError, r"dot|matmul|shapes"),
}  # fmt: skip


@pytest.mark.parametrize("front", ["local", "DirectRunner", "explain", "verify", "transform"])
@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("no_work")
def test_bad_arguments_and_programs(name, front):
    fn, arg, error, message = BAD[name]
    call = functools.partial(bj.run, runner=front) if front in RUNNERS else getattr(bj, front)
    with pytest.raises(error, match=message) as caught:
        call(fn, arg)
    assert caught.type is error


@pytest.mark.parametrize("runner", RUNNERS)
def test_none_is_a_tree_without_leaves(runner):
    program = program_of(lambda d: d)
    assert bj.run(program, {"x": X, "none": None}, runner=runner)["none"] is None


@pytest.mark.parametrize("runner", RUNNERS)
def test_abstract_arguments_are_only_for_transform(runner):
    with pytest.raises(StagingError, match=r"args\[0\]: found a jax\.ShapeDtypeStruct.*transform"):
        bj.run(total, jax.ShapeDtypeStruct(X.shape, X.dtype), runner=runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_body_that_changes_its_tree_keeps_the_one_that_was_traced(runner):
    """A body is traced once a plan: what it does in later calls in Python is never seen."""
    program = program_of(changing_body())
    found = bj.run(program, X, runner=runner)
    again = bj.run(program, X, runner=runner)
    assert jax.tree.structure(found) == jax.tree.structure(again)


def test_branches_that_differ_in_structure():
    fn = program_of(lambda v: jax.lax.cond(v[0] > 0, lambda: (v, v), lambda: (v,)))
    with pytest.raises(TypeError, match="structure"):
        bj.run(fn, X)


def test_a_partial_of_what_is_not_data_is_fine():
    @bj.program(clients=N)
    def scaled(how, x):
        return bj.reduce_sum(x * 2.0 if how == "double" else x)

    np.testing.assert_allclose(bj.run(functools.partial(scaled, "double"), X), 2 * X.sum(0))


# --- how a call is made


@bj.program(clients=N)
def loss(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: (v * w).sum(), x))


def run_here(fn, *args):
    return bj.run(fn, *args, runner="local")


@pytest.mark.usefixtures("no_work")
def test_calls_inside_of_a_transformation():
    w, two = np.ones(3, np.float32), np.ones((2, 3), np.float32)
    here = functools.partial(bj.verify, runner="local")
    calls = {
        "grad": lambda: jax.grad(lambda w: run_here(loss, w, X))(w),
        "grad, closed over": lambda: jax.grad(lambda w: run_here(lambda x: loss(w, x), X))(w),
        "nested": lambda: jax.grad(lambda w: run_here(loss, {"a": [w]}, X))(w),
        "jit": lambda: jax.jit(lambda w: run_here(loss, w, X))(w),
        "jit, of constants": lambda: jax.jit(lambda: run_here(loss, w, X))(),
        "vmap": lambda: jax.vmap(lambda w: run_here(loss, w, X))(two),
        "scan": lambda: jax.lax.scan(lambda w, _: (run_here(loss, w, X), None), w, length=2),
        "Beam": lambda: jax.grad(lambda w: bj.run(loss, w, X))(w),
        "launch": lambda: jax.grad(lambda w: bj.launch(loss, w, X, runner="local"))(w),
        "verify": lambda: jax.grad(lambda w: here(loss, w, X))(w),
        "transform": lambda: jax.grad(lambda w: bj.transform(loss, w, X))(w),
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
        except StagingError as error:
            parts = ("test_bad_input.py:", "traces" if "const" in name else "is a tracer",
                     "(jax.grad(", "outside of jax.grad")  # fmt: skip
            wrong += [(name, part, str(error)) for part in parts if part not in str(error)]
        else:
            wrong.append((name, "no error"))
    assert not wrong


def test_calls_beside_a_transformation():
    """Inside of one, but of values alone."""
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
        message = f"{call.__name__}: found the keyword argument 'x'. The arguments of loss are"
        assert message in str(caught.value)
        assert "functools.partial(loss, x=...)" in str(caught.value)
    with pytest.raises(StructureError, match=r"argument 'option'; did you mean 'options'\?"):
        bj.run(total, X, option={})


def test_values_that_python_needs():
    """JAX says so, of the user's function and the user's name of the argument."""

    def branch(w, x):
        return bj.reduce_sum(x) if w["a"].sum() > 0 else x

    def number(w, x):
        return bj.reduce_sum(x) * float(w["a"][0])

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

    def single(w, x):
        return bj.map_fn(lambda member: body(member, member), {"b": x, "s": x})

    def pair(left, right):
        return left if left["c"].sum() > 0 else right

    def folded(w, x):
        return bj.reduce(pair, {"c": x})

    w = {"a": X[0]}
    cases = [
        (branch, w, "branch", "w['a']"),
        (jax.grad(lambda w, x: branch(w, x).sum()), w, "<lambda>", "w['a']"),
        (number, w, "number", "w['a']"),
        (rounds, 3, "rounds", "n"),
        (times, 3, "times", "n"),
        (in_numpy, w, "in_numpy", "w['a']"),
        (mapped, w, "body", "scale['s']"),
        (single, w, "<lambda>", "member['s']"),
        (folded, w, "pair", "left['c']"),
    ]
    fronts = [run_here, bj.explain, bj.transform]
    kinds = jax.errors.JAXTypeError
    wrong = []
    for fn, first, name, argument in cases:
        for placements in ({"clients": N}, {"clients": "x"}, {"clients": None}):
            for front in fronts:
                for x in (X, bj.from_arrays(X)):
                    with pytest.raises(kinds) as caught:
                        front(bj.program(placements)(fn), first, x)
                    found = str(caught.value).replace("\n", " ")
                    for part in (f"tracing the function {name} at {__file__}:",
                                 f"the value of the argument {argument}."):  # fmt: skip
                        wrong += [(name, placements, part, found)] * (part not in found)
                    assert "functools.partial(" in "".join(caught.value.__notes__)
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
        with pytest.raises(StructureError, match=r"args\[0\].*found a .*eqx\.partition\(module"):
            run_here(loss, argument, X)
    with pytest.raises(StructureError, match=r"args\[1\]: found a .*bind .* functools\.partial"):
        run_here(loss, module.weight, jax.nn.relu)


def test_lists_of_numbers():
    numbers = [float(i) for i in range(N)]
    reduced, mapped = bj.reduce_sum, lambda x: bj.map_fn(jnp.sin, x)
    for fn in (reduced, mapped):
        for size in (N, "x", None):
            prog = bj.program(placements={"clients": size})(lambda x, fn=fn: fn(x))
            for call in (prog, functools.partial(run_here, prog)):
                with pytest.raises(
                    PlacementError, match=r"shape \(\)|no argument.* is an array"
                ) as e:
                    call(numbers)
                assert "numpy.asarray(...) makes one array of it" in str(e.value)
    with pytest.raises(PlacementError) as caught:
        run_here(total, 1.0)
    assert "numpy" not in str(caught.value)


# --- options and runners


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_size": 12}, "shard_size: found 12, expected a positive multiple of 8"),
        ({"shard_size": -8}, "shard_size: found -8"),
        (["--shard_size=many"], "shard_size: found 'many', expected a number"),
        ({"reduction": "quick"}, "reduction: found 'quick', expected one of exact, fast"),
        ({"platforms": ["abacus"]}, r"platforms: found \['abacus'\]"),
        ("--shard_size=8", "options: found a str, expected a dict"),
        ([8], "options: found the flag 8, expected text"),
    ],
    ids=str,
)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.usefixtures("no_work")
def test_options_of_beamjax(options, message, runner):
    with pytest.raises(OptionsError, match=message):
        bj.run(total, X, options=options, runner=runner)


FLAGS = [
    ({"shard_sise": 8}, "found 'shard_sise', expected an option.*did you mean 'shard_size'"),
    ({"on_eror": "drop"}, "found 'on_eror'.*did you mean 'on_error'"),
    ({"checkpiont": "folder"}, "found 'checkpiont'.*did you mean 'checkpoint'"),
    (["--memroy=2GiB"], "found 'memroy'.*did you mean 'memory'"),
    ({"machin_type": "n2"}, "found 'machin_type'.*did you mean 'machine_type'"),
    (["--direct_num_worker=2"], "found 'direct_num_worker'.*mean 'direct_num_workers'"),
]
VALUES = [
    (["--direct_running_mode=fast"], "does not take these flags.*direct_running_mode.*'fast'"),
    (["--direct_num_workers=two"], "does not take these flags.*direct_num_workers.*'two'"),
]
UNKNOWN = [({"zzzzz": 1}, "found 'zzzzz', expected an option of beamjax")]


@pytest.mark.usefixtures("no_work")
def test_options_of_beam(tmp_path):
    """Those that nobody knows are refused by all runners, before any work."""
    runs = {
        runner: functools.partial(bj.run, total, X, runner=runner)
        for runner in ["local", "DirectRunner", "PrismRunner", "FlinkRunner", "SparkRunner"]
    }
    ways = {
        **runs,
        "launch": functools.partial(bj.launch, total, X, runner="local"),
        "small work": lambda options: bj.run(total, X, options={"small_work": "here", **options}),
        "transform": functools.partial(bj.transform, total, X),
        "explain": functools.partial(bj.explain, total, X, runner="local"),
        "verify": functools.partial(bj.verify, total, X, runner="local"),
        "pipeline": bj.pipeline,
        "dry run": functools.partial(bj.dataflow.dry_run, total, X),
        "group_by": functools.partial(
            bj.group_by, {"k": X[:, 0], "x": X}, "k", folder=tmp_path / "g"
        ),
    }
    elsewhere = {"PrismRunner", "FlinkRunner", "SparkRunner"}
    wrong = []
    for way, call in ways.items():
        for options, message in [*FLAGS, *VALUES, *(UNKNOWN if way not in elsewhere else ())]:
            if way == "small work" and isinstance(options, list):
                continue
            try:
                call(options=options)
            except OptionsError as error:
                if not re.search(message, str(error)):
                    wrong.append((way, options, str(error)))
                if (way in elsewhere) != ("as a Beam PipelineOptions" in str(error)):
                    wrong += [(way, options, str(error))] * ((options, message) in FLAGS)
            else:
                wrong.append((way, options, "no error"))
    assert not wrong
    with pytest.raises(OptionsError, match="found runner 'FlinkRunner', but the run is on FnApi"):
        bj.run(total, X, options=["--runner=FlinkRunner"])


def test_options_of_other_runners_are_fine_in_this_process():
    options = {"direct_num_workers": 2, "machine_type": "n2", "parallelism": 3, "shard_size": 8}
    np.testing.assert_array_equal(bj.run(total, X, runner="local", options=options), 2 * X.sum(0))
    assert bj.explain(total, X, options=PipelineOptions(["--zzzzz=1"])).facts is not None


def test_flags_of_job_servers():
    """As they are in the options of Flink and Spark in Java, which Beam's Python does not have."""
    names = """
        checkpointing_interval checkpointing_mode checkpoint_timeout_millis object_reuse
        min_pause_between_checkpoints fail_on_checkpointing_errors state_backend savepoint_path
        externalized_checkpoints_enabled state_backend_storage_path max_bundle_size
        auto_watermark_interval latency_tracking_interval allow_non_restored_state
        shutdown_sources_after_idle_ms disable_metrics storage_level batch_interval_millis
        enable_spark_metric_sinks cache_disabled spark_history_dir attach_to_running_job
    """.split()
    check_flags([f"--{name}=1" for name in names], "FlinkRunner")


@pytest.mark.parametrize("runner", ["NoSuchRunner", "no.such.Runner", None, 3, dict])
@pytest.mark.usefixtures("no_work")
def test_unknown_runners(runner):
    with pytest.raises(OptionsError, match=r"runner: found .* expected 'local', "):
        bj.run(total, X, runner=runner)


# --- what fails while it runs: step, shard and members are named


@dataclasses.dataclass(frozen=True)
class Broken(bj.Source, kind="test-broken"):
    """A source that can't be read from member 8 to 15."""

    how: str

    @property
    def leaves(self):
        return (source_base.LeafSpec((3,), np.dtype("float32")),)

    @property
    def treedef(self):
        return jax.tree.structure(0)

    def __len__(self):
        return N

    def read(self, start, stop):
        if start == 8 and self.how == "raises":
            raise OSError("the disk is gone")
        if start == 8 and self.how == "refuses":
            raise SourceError("file.npy is not what it was")
        return [X[start : stop - (start == 8)]]

    def to_spec(self):
        return {**self.spec_head(), "how": self.how}

    @classmethod
    def from_spec(cls, spec):
        return cls(spec["how"])


WHERE = r"step 'map_clients_0' \(<lambda>\), shard 1 of placement 'clients', members 8 to 15: "


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raises", WorkerError, WHERE + "OSError: the disk is gone"),
        ("refuses", SourceError, "file.npy is not what it was"),
        ("lacks one", SourceError, "asked for members 8 to 15, found 7 of them"),
    ],
)
def test_a_source_that_fails(runner, how, error, message):
    with pytest.raises(error, match=message) as caught:
        bj.run(total, Broken(how), runner=runner, options={"shard_size": 8})
    assert caught.type is error


@pytest.mark.parametrize("how", ["raises", "refuses"])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "in the text of the runner"])
def test_errors_that_come_as_text_keep_their_type(how, recorded, monkeypatch):
    flags = ["--direct_running_mode=multi_threading", "--direct_num_workers=2", "--shard_size=8"]
    error, message = (WorkerError, WHERE)
    if how == "refuses":
        error, message = (SourceError, WHERE if recorded else r"file\.npy")
    if not recorded:
        monkeypatch.setattr("beamjax.pipelines.failures.recorded_error", lambda store: None)
    with pytest.raises(error, match=f"^{message}") as caught:
        bj.run(total, Broken(how), options=flags)
    assert caught.type is error
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_body_that_fails_on_a_member(runner):
    @bj.program(clients=N)
    def roots(x):
        return bj.reduce_sum(bj.map_fn(lambda v: jnp.log(v), x))

    x = np.where(np.arange(N)[:, None] == 9, np.float32(-1), X + 1)
    with jax.debug_nans(True), pytest.raises(WorkerError, match=WHERE + "FloatingPointError"):
        bj.run(roots, x, runner=runner, options={"shard_size": 8})


@pytest.mark.parametrize("where", WAYS)
def test_what_jax_is_told_to_check(where, monkeypatch):
    """Wherever a shard is computed: in other threads of this process, or in other processes."""
    monkeypatch.setattr("beamjax.pace.pays_in_bundle", lambda body: True)
    monkeypatch.setattr("beamjax.pace.pays", lambda body, left: left is None or left > 1)
    monkeypatch.setattr("beamjax.pace.threads", lambda body, most: 2)
    monkeypatch.setattr("beamjax.pace.threads_in_bundle", lambda body, most: most)

    @bj.program(clients=N)
    def inverses(x):
        return bj.reduce_sum(bj.map_fn(lambda v: 1 / v, x))

    x = np.where(np.arange(N)[:, None] == 9, np.float32(0), X + 1)
    runner, flags = WAYS[where]
    with jax.debug_infs(True), pytest.raises(WorkerError, match=WHERE + "FloatingPointError"):
        bj.run(inverses, x, runner=runner, options={"shard_size": 8} | flags)


@pytest.mark.parametrize("where", WAYS)
def test_a_server_step_that_fails(where):
    @bj.program(clients=N)
    def root(x):
        return jnp.log(bj.reduce_sum(x) - 1e9)

    runner, flags = WAYS[where]
    with jax.debug_nans(True), pytest.raises(WorkerError, match=r"'server_\d': FloatingPointError"):
        bj.run(root, X, runner=runner, options=flags)


def test_messages_of_beam_are_the_cause_of_those_of_beamjax():
    with pytest.raises(WorkerError, match=f"^{WHERE}OSError: the disk is gone$") as caught:
        bj.run(total, Broken("raises"), options={"shard_size": 8})
    assert "[while running 'map_clients_0" in str(caught.value.__cause__)


# --- files that change while it runs


DAMAGE = {
    "truncated": lambda data: data[:-5],
    "longer": lambda data: data + b"12345",
    "another shape": lambda data: data.replace(b'"shape":[', b'"shape":[9,', 1),
    "another dtype": lambda data: data.replace(b"float32", b"float64", 1),
    "no header": lambda data: bytes(len(data)),
}


@bj.program(clients=N)
def with_table(x, table):
    return bj.reduce_sum(bj.map_fn(lambda v: v * jnp.sum(table), x))


@bj.program(clients=N)
def placed_result(x):
    return bj.map_fn(lambda v: v + 1, x)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("program", "args", "written"),
    [
        (with_table, (X, np.ones((30, 3), np.float32)), "-arg"),
        (total, (X,), "segment-0-served-0.arrays"),
        (placed_result, (X,), "segment-0-placed-0-"),
    ],
    ids=["server value", "result", "placed result"],
)
def test_a_damaged_file_in_the_work_folder(damage, program, args, written, monkeypatch, tmp_path):
    write = files.write
    paths = []

    def write_damaged(path, data, **kwargs):
        paths.append(path)
        write(path, DAMAGE[damage](data) if written in path else data, **kwargs)

    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
    monkeypatch.setattr("beamjax.pipelines.runners.store_budget", lambda limit: 0)
    monkeypatch.setattr(files, "write", write_damaged)
    with pytest.raises(ArrayFormatError, match=r"(arrays|members): .*(found|bad) .*expected"):
        bj.run(program, *args, options={"work_folder": str(tmp_path)})
    assert any(written in path for path in paths), paths
    assert list(tmp_path.iterdir()) == []


def test_a_work_folder_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SourceError, match=r"cannot write .* expected a\s+folder"):
        bj.run(
            with_table, X, np.ones(3, np.float32), options={"work_folder": str(tmp_path / "file")}
        )


def test_files_removed_while_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
    get = Store.get

    def get_after_removal(self, ref, **kwargs):
        files.remove(self.root, ".arrays")
        return get(self, ref, **kwargs)

    monkeypatch.setattr(Store, "get", get_after_removal)
    with pytest.raises(SourceError, match=r"cannot read a stored value.*was it not cleaned up"):
        bj.run(with_table, X, np.ones(3, np.float32), options={"work_folder": str(tmp_path)})
