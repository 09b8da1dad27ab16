"""`run`, `launch` and `transform`: a function of programs, on a Beam runner or in this process.

A call goes through `stage`, `plan`, `choose_runner`, `execute` and `collect`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from beamjax.bodies.export import with_weak_type, with_x64, wrap
from beamjax.bodies.python_bodies import Recipe
from beamjax.bodies.xla_threads import with_lapack_threads
from beamjax.call import LOCAL, Call, by_position, parsed_options
from beamjax.diagnostics import topology
from beamjax.diagnostics.memory import check_memory, sources_of, with_fitting_threads
from beamjax.errors import BeamjaxError, OptionsError, StagingError
from beamjax.interpreters.planning import make_plan, plan_for
from beamjax.interpreters.staging.stage import Argument, FlatCall, flatten_call
from beamjax.interpreters.staging.tracers import refuse_compilation, refuse_tracers
from beamjax.jobs.job import Job, JobRun
from beamjax.options import Options, parse_options
from beamjax.plan.one_pass import open_placements
from beamjax.plan.steps import Output, Plan
from beamjax.reading import with_lengths
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.local import evaluate
from beamjax.runtime.materialized_outputs import materialized_outputs
from beamjax.sources.arrays.placed import Placed
from beamjax.sources.canonical import warn_of_changes
from beamjax.storage.snapshots import is_immutable
from beamjax.tables.keyed_results import kept_numbers, keyed_outputs, with_tables
from beamjax.telemetry.monitor import Monitor

if TYPE_CHECKING:
    import apache_beam as beam

    from beamjax.pipelines.session_workers import SessionWorkers

Values: TypeAlias = Mapping[str, np.ndarray | Placed]
"""The outputs of a plan by name; those that are kept are handles to their files."""


@by_position
def run(
    fn: Callable[..., Any],
    *args: Any,
    runner: Any = "DirectRunner",
    options: Any = None,
    keep: str | None = None,
) -> Any:
    """Runs a function of programs and returns what `fn(*args)` would.

    The function is staged once for each set of argument types, as by `jax.jit`: a second call with
    the same function object and types runs the plan that was made for the first. As under
    `jax.jit`, arrays that the function closes over then have the values of the first call; pass
    what changes as an argument.

    Args:
      fn: a program, a transformation of one (`jax.grad(program)`), or any composition.
      *args: trees of arrays, scalars and `beamjax.Source`s, by position; `functools.partial` binds
        what is not data, and keyword arguments. An array is read by shards where the
        function uses it as a placed value. A `beamjax.StreamSource`, of unknown length, is read
        once: in the one pass of a program that does not need the number of members before; for any
        other program into files of the run, and the program is planned when they are counted.
      runner: "DirectRunner" for Beam's in-memory runner, "local" for this process without Beam, or
        any other name or instance of a Beam runner.
      options: None, a dict, a list of flags or a Beam `PipelineOptions`; see `Options`.
      keep: "placed" leaves placed results in files; as the option of this name.

    Returns:
      The tree that `fn(*args)` returns, of JAX arrays with the same shapes, dtypes and weak types;
      and of a `Placed` for each result that is kept in files.

    Raises:
      StagingError: the function can't be made a plan; the message names the line. Or the call is
        inside of `jax.grad`, `jax.jit` or another transformation.
      PlacementError, StructureError, SourceError: the arguments don't fit.
      OptionsError: the runner or an option is unknown, or has an impossible value.
      WorkerError: a body failed; the message names step and shard.
      CheckpointError: the folder of checkpoints is that of another run, or in use.
      JobCancelledError: another process cancelled the run through its folder.
    """
    call = prepare(fn, args, runner, run_options(options, keep, runner))
    return finish(call, JobRun(call))


@by_position
def launch(
    fn: Callable[..., Any],
    *args: Any,
    runner: Any = "DirectRunner",
    options: Any = None,
    keep: str | None = None,
) -> Job:
    """Starts what `run` does, and returns at once.

    The function is staged before this returns; the rest is done by a thread, which the process
    waits for at its end. NumPy arrays among the arguments, those of `from_arrays` included, are
    copied before this returns, so you may write to them while the job runs. To save the memory of
    the copies, pass JAX arrays, read-only arrays (`x.flags.writeable = False`) or files
    (`from_npy`), which are not copied. The object of a `from_random_access` and the function of a
    `from_chunks` are called while the job runs.

    The job has a folder: `options={"job_folder": ...}`, or a temporary one that is removed with the
    handle. Any process can follow the job there, see `open_job`.

    Args:
      fn: as for `run`, and likewise the other arguments.

    Returns:
      A handle with `state`, `progress()`, `wait()`, `cancel()` and `result()`.

    Raises:
      StagingError, PlacementError, StructureError, SourceError: as `run`.
      OptionsError: the runner or an option is unknown, or a job in the folder still runs, or is
        done.
    """
    parsed = run_options(options, keep, runner)
    if runner != LOCAL:
        from beamjax.pipelines.runners.connect import connect

        connect(runner, parsed)
    call = prepare(fn, args, runner, parsed, snapshot=True)
    job = JobRun(call, launched=True)
    return job.in_thread(functools.partial(finish, call, job))


def run_options(options: Any, keep: str | None, runner: Any) -> Options:
    """The options of a run; raises OptionsError."""
    parsed = parsed_options(options, runner)
    if keep is not None:
        parsed = parse_options(replace(parsed, keep=keep))
    if parsed.results_folder is not None and parsed.keep is None:
        raise OptionsError("results_folder: found a folder, but nothing is kept; add keep='placed'")
    return parsed


def finish(call: Call, job: JobRun) -> Any:
    """Runs a call as a job, and gives the tree that its function returns."""
    with call.files, job.recorded():
        return job.returned(collect(call, execute(call, job.monitor)))


def prepare(
    fn: Callable[..., Any],
    args: Any,
    runner: Any,
    options: Options,
    snapshot: bool = False,
    workers: SessionWorkers | None = None,
) -> Call:
    """Stages and plans a call, and chooses where it runs.

    Members of unknown number are counted first, if the program needs their number. With `snapshot`,
    the caller may write to its arrays before the run is over. `workers` are those of a session.
    """
    flat = stage("run", fn, args)
    with contextlib.ExitStack() as files:
        known = files.enter_context(with_lengths(flat, runner, options))
        call = plan(known, runner, options)
        warn_of_changes(known.arguments, call.plan.x64, stacklevel=4)
        inputs = call.values.snapshot() if snapshot else call.inputs
        call = choose_runner(replace(call, inputs=inputs, can_replay=not flat.has_streams))
        return replace(call, files=files.pop_all(), workers=workers)


def stage(
    front: str, fn: Callable[..., Any], args: Sequence[Any], abstract: bool = False
) -> FlatCall:
    """A call with its arguments flattened.

    Raises:
      StagingError: JAX traces the call, or an argument has no value and may not be `abstract`.
    """
    flat = flatten_call(fn, args)
    refuse_tracers(front, fn, {argument.path: [argument.value] for argument in flat.arguments})
    refuse_compilation(front, fn)
    for argument in flat.arguments:
        if not abstract and isinstance(argument.value, jax.ShapeDtypeStruct):
            raise StagingError(
                f"{argument.path}: found a jax.ShapeDtypeStruct, expected an array or a source; "
                "only beamjax.transform takes abstract arguments, for values of a PCollection"
            )
    return flat


def plan(flat: FlatCall, runner: Any, options: Options, unroll: bool = False) -> Call:
    """Plans a call, as other processes run it.

    Args:
      flat: the call; an argument whose value is None is an array that nobody has.
      runner: the user's.
      options: of the run.
      unroll: whether loops and branches are unrolled, for graphs without a driver.
    """
    planned = plan_for(flat, options, unroll)
    found = planned.plan
    if any(body.python for body in found.bodies.values()):
        # Not in the cache of plans, which must not keep the user's function.
        recipe = Recipe(make_plan, flat, options, found.choices, unroll)
        found = replace(found, recipe=recipe)
    given = all(argument.value is not None for argument in flat.arguments)
    inputs = bind_inputs(found, flat.arguments) if given else None
    return Call(flat, runner, options, planned, found, inputs)


def choose_runner(call: Call) -> Call:
    """Chooses where a call runs and where its results go, and checks that its memory is enough."""
    if call.options.small_work == "here" and call.prediction().is_small:
        call = replace(call, backend=LOCAL)
    sources = sources_of(call.values.values)
    options = with_fitting_threads(call.plan, sources, call.options, call.runner)
    check_memory(call.plan, sources, options, topology.Workers.of(call.runner, options))
    tree = call.planned.staged.out_tree
    numbered = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    found = jax.tree_util.tree_flatten_with_path(numbered)[0]
    paths = [jax.tree_util.keystr(path) for path, _ in found]
    kept = kept_numbers(keyed_outputs(tree, options))
    results = materialized_outputs(call.plan, paths, options, kept)
    return replace(call, options=options, results=results)


def execute(call: Call, monitor: Monitor) -> Values:
    """Runs the plan of a call; its outputs by name."""
    with call.results.cleared(), with_lapack_threads():
        try:
            values = _execute(call, monitor)
        except BeamjaxError as error:
            if call.can_replay and error.failure is not None and error.failure.shard is not None:
                error.run, error.rounds = call, monitor.progress().rounds
                folder = call.options.job_folder
                how = "error" if folder is None else f"{folder!r}, fn, *args"
                error.replay_hint = f"To debug it as Python: beamjax.replay({how})"
            raise
    monitor.letters.warn()
    return values


def _execute(call: Call, monitor: Monitor) -> Values:
    plan, inputs, options, results = call.plan, call.values, call.options, call.results
    if call.backend != LOCAL:
        from beamjax.pipelines.run import run_plan

        if call.workers is not None and not open_placements(plan):
            return call.workers.run(plan, inputs, options, monitor, results)
        return run_plan(plan, inputs, call.backend, options, monitor, results)
    if options.checkpoint is None:
        return evaluate(plan, inputs, options, monitor, results=results)
    from beamjax.pipelines.run import local_checkpointer

    with local_checkpointer(plan, inputs, options) as checkpointer:
        return evaluate(plan, inputs, options, monitor, checkpointer, results)


def collect(call: Call, values: Values) -> Any:
    """The tree that the function returns, of the outputs of its plan."""
    plan, staged = call.plan, call.planned.staged
    leaves = []
    for output, aval in zip(plan.outputs, staged.closed.out_avals, strict=True):
        leaf = _output(plan, output, values, call.values)
        if not isinstance(leaf, Placed):
            leaf = with_weak_type(leaf, getattr(aval, "weak_type", False), plan.x64)
        leaves.append(leaf)
    result = jax.tree_util.tree_unflatten(staged.out_tree, leaves)
    return with_tables(result, call.results, call.backend, call.options)


def bind_inputs(plan: Plan, arguments: Sequence[Argument]) -> Inputs:
    """The values of a plan's inputs: the user's arguments, then the closed-over constants."""
    values = [(a.value, a.leaf) if a.is_source else a.value for a in arguments]
    return Inputs(plan, [*values, *plan.constants])


def _output(plan: Plan, output: Output, values: Values, inputs: Inputs) -> Any:
    """One output as `jax.jit` would give it, or the handle to its files."""
    with with_x64(plan.x64):
        if output.input is not None:
            value = inputs.values[output.input]
            return value if isinstance(value, jax.Array) else _device_array(inputs, output.input)
        if output.value is None:
            constant = output.constant
            assert constant is not None
            return constant if constant.dtype == jax.dtypes.float0 else jax.numpy.asarray(constant)
        array, spec = values[output.value], plan.values[output.value]
        if output.members is not None:
            array = array[slice(*output.members)]
        if isinstance(array, Placed):
            return array
        if spec.placement is not None:
            array = np.moveaxis(array, 0, output.axis)
        # On the CPU, device_put may share the array's memory, which may belong to an argument.
        put = jax.device_put(array) if is_immutable(array) else jax.numpy.array(array)
        return wrap(put, spec.key_impl)


def _device_array(inputs: Inputs, index: int) -> Any:
    value = inputs.values[index]
    if not isinstance(value, tuple):
        return jax.numpy.asarray(value)
    source, leaf = value
    return wrap(jax.numpy.asarray(inputs.whole(index)), source.leaves[leaf].key_impl)


def pipeline(runner: Any = "DirectRunner", options: Any = None) -> beam.Pipeline:
    """An empty Beam pipeline of your own, on a runner that beamjax sets up as for `run`.

        with beamjax.pipeline("PrismRunner") as mine:
            members = mine | beam.io.ReadFromText("rows.csv") | beam.Map(parse)
            members | beamjax.transform(fn, weights, rows) | beam.Map(print)

    `beam.Pipeline(runner=...)` does as well, where Beam finds by itself what the runner needs. Here
    Prism, Flink and Spark are those that `beamjax.run` builds, fetches and connects to, and the
    servers that Beam opens in this process are at loopback addresses only.

    Args:
      runner: the name or an instance of a Beam runner.
      options: flags of Beam: a dict, a list or a `PipelineOptions`. Those of beamjax go to
        `transform`.

    Raises:
      OptionsError: the runner is unknown or can't be had, or an option does not fit.
    """
    from beamjax.pipelines.launch import own_pipeline

    if runner == LOCAL:
        raise OptionsError(f"runner: found {LOCAL!r}, which is without Beam; name a runner of Beam")
    return own_pipeline(runner, parsed_options(options, runner))


@by_position
def transform(fn: Callable[..., Any], *args: Any, options: Any = None) -> beam.PTransform:
    """The same as `run`, as a Beam transform for use inside a user's own pipeline.

    NumPy arrays among the arguments are copied before this returns, as by `launch`.

    Arguments that are trees of `jax.ShapeDtypeStruct` of shapes (n, ...) stand for placed inputs
    that come from the pipeline:

        members | beamjax.transform(fn, weights, jax.ShapeDtypeStruct((n, 28, 28), "float32"))

    The number of members need not be known. Where the size of the placement is None and n is a
    symbolic dimension, the pipeline counts them:

        (n,) = jax.export.symbolic_shape("n")

    Then `fn` may use n in all that is computed a member at a time or reduced over the members, and
    read `x.shape[0]` as a value, but it may not need n as a constant: for `if x.shape[0] > 3`, or
    for a value that holds all members on the server.

    Args:
      fn: as for `run`.
      *args: as for `run`. All abstract arguments together are what one element holds.
      options: as for `run`; Beam's own options are those of the pipeline.

    Returns:
      A transform. It is applied to a PCollection of `(index, member)`, with the index from 0 to
      n - 1, each once, and the member a tree like the abstract argument without the leading axis
      (a tuple of trees if there are several abstract arguments); or to a pipeline if there is no
      abstract argument. It gives the tree that `fn` returns, with PCollections as leaves: a server
      value is one array, a placed value is `(index, member array)`.

    Raises:
      StagingError: as `run`, or an abstract argument is not used as a placed value, or something
        needs an unknown number of members as a constant.
      StructureError: another dimension than the first one is unknown.
      SourceError: while the pipeline runs: a member is missing or there twice, or there is none.
    """
    from beamjax.pipelines.transform import PlanTransform

    parsed = parsed_options(options, LOCAL)
    if parsed.checkpoint is not None:
        raise OptionsError(
            "checkpoint: found a folder in the options of transform, which does not drive rounds; "
            "leave it out, or use beamjax.run"
        )
    if parsed.keep is not None or parsed.results_folder is not None:
        raise OptionsError(
            "keep: found it in the options of transform, whose results are PCollections; write "
            "them from your own pipeline, or use beamjax.run"
        )
    for name in ("on_error", "on_nonfinite"):
        if getattr(parsed, name) == "drop":
            raise OptionsError(
                f"{name}: found 'drop' in the options of transform, which does not report "
                "dropped members; drop elements of your own pipeline before, or use beamjax.run"
            )
    call = plan(stage("transform", fn, args, abstract=True), LOCAL, parsed, unroll=True)
    out_tree = call.planned.staged.out_tree
    for output in keyed_outputs(out_tree, parsed):
        raise StagingError(
            f"result{output.path}: found reduce_by_key without a number of keys, which transform "
            "does not have; return the keys and values, and use Beam's CombinePerKey, or "
            "beamjax.run"
        )
    warn_of_changes(call.flat.arguments, call.plan.x64, stacklevel=3)
    inputs = call.values.snapshot()
    check_memory(call.plan, sources_of(inputs.values), parsed, topology.Workers.of("", parsed))
    groups = [
        jax.tree_util.tree_structure(arg)
        for arg in args
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree_util.tree_leaves(arg))
    ]
    return PlanTransform(call.plan, inputs, out_tree, groups, parsed)
