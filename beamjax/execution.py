"""`run`, `launch` and `transform`: a function of programs, on a Beam runner or in this process.

A call goes through `stage`, `plan`, `choose_runner`, `execute` and `collect`.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from beamjax import _compat
from beamjax.bodies.jax_settings import as_compiled
from beamjax.bodies.load import with_weak_type, with_x64, wrap
from beamjax.bodies.xla_threads import lapack_limit
from beamjax.call import LOCAL, Call, by_position, parsed_options, runner_name, with_lengths
from beamjax.diagnostics.memory import check_memory, sources_of, with_fitting_threads
from beamjax.errors import BeamjaxError, JobCancelledError, OptionsError, StagingError
from beamjax.interpreters.planning import make_plan, plan_for
from beamjax.interpreters.staging.arguments import FlatCall, flatten_call
from beamjax.interpreters.staging.tracers import refuse_compilation, refuse_tracers
from beamjax.jobs.claims import claimed
from beamjax.jobs.job import Job, JobRun
from beamjax.numerics.exact_sum import with_subnormals
from beamjax.options import Options, parse_options
from beamjax.plan.steps import Output, Plan
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.local import LoadedPlan, evaluate
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.sources.canonical import warn_of_changes
from beamjax.sources.source_base import Source
from beamjax.storage import buffers, temporary
from beamjax.telemetry.monitor import Monitor

if TYPE_CHECKING:
    import apache_beam as beam

    from beamjax.pipelines.session_workers import SessionWorkers

Values: TypeAlias = Mapping[str, np.ndarray | Source]
"""The outputs of a plan by name; a `Placed` for each output that stays in files."""


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
    the same function object and types reuses the plan of the first. As under `jax.jit`, arrays that
    the function closes over keep the values of the first call; pass values that change as
    arguments.

    Args:
      fn: a program, a transformation of one (`jax.grad(program)`), or any function that calls
        programs.
      *args: the arguments of `fn` by position: trees of arrays, scalars and `beamjax.Source`s. Bind
        keyword arguments, and arguments that are not data, with `functools.partial`. An array is
        read by shards where the function uses it as a placed value. A `beamjax.StreamSource` is
        read once, before the function is planned: beamjax writes its members to temporary files and
        counts them.
      runner: "DirectRunner" for Beam's in-memory runner, "local" for this process without Beam, or
        any other name or instance of a Beam runner.
      options: None, an `Options`, a dict, a list of flags or a Beam `PipelineOptions`.
      keep: "placed" leaves placed results in files; the same as the option `keep`.

    Returns:
      The tree that `fn(*args)` returns. Its leaves are JAX arrays with the same shapes, dtypes and
      weak types; with `keep="placed"` placed results are `Placed`. Each `Keyed` becomes a
      `KeyedTable`.

    Raises:
      OutsideProgramError: `fn` calls an operator outside a program.
      StagingError: the function can't be turned into a plan; the message names the line. Or the
        call is inside `jax.grad`, `jax.jit` or another transformation.
      PlacementError: a value does not have the members of its placement, or the placement is
        unknown or ambiguous.
      StructureError: an argument, or a value given to an operator, has a tree or dtype that does
        not fit; or an argument of `fn` is given by keyword.
      SourceError: a source can't be read, or a file of results can't be written.
      ArrayFormatError: a file does not hold what was written to it.
      OptionsError: the runner or an option is unknown, or an option has an impossible value.
      WorkerError: a body failed; the message names the step and the shard.
      CheckpointError: the folder of checkpoints belongs to another run, or is in use.
      JobCancelledError: another process cancelled the run through its job folder.
    """
    call = prepare(fn, args, runner, run_options(options, keep, runner))
    job = JobRun(call)
    return job.run(functools.partial(finish, call, job))


@by_position
def launch(
    fn: Callable[..., Any],
    *args: Any,
    runner: Any = "DirectRunner",
    options: Any = None,
    keep: str | None = None,
) -> Job:
    """Starts the run of a function in a thread, and returns a handle to the job.

    The function is staged before `launch` returns; a thread does the rest, and the process waits
    for it before it exits. NumPy arrays among the arguments, including those of `from_arrays`, are
    copied before `launch` returns, so you may write to them while the job runs. JAX arrays,
    read-only arrays (`x.flags.writeable = False`) and files (`from_npy`) are not copied. The object
    given to `from_random_access` and the function given to `from_chunks` are called while the job
    runs.

    The job has a folder: `options={"job_folder": ...}`, or a temporary one that is removed with the
    handle. Any process can follow the job through the folder, see `open_job`.

    Args:
      fn: as for `run`.
      *args: as for `run`.
      runner: as for `run`.
      options: as for `run`.
      keep: as for `run`.

    Returns:
      A `Job` with `state`, `progress()`, `wait()`, `cancel()` and `result()`.

    Raises:
      OutsideProgramError: as for `run`.
      StagingError: as for `run`.
      PlacementError: as for `run`.
      StructureError: as for `run`.
      SourceError: as for `run`, or the folder of the job can't be written.
      OptionsError: as for `run`, or the folder holds a job that is running or done. Errors that
        occur later are raised by `Job.result`.
    """
    parsed = run_options(options, keep, runner)
    if runner != LOCAL:
        from beamjax.pipelines.runners.connect import connect

        connect(runner, parsed)
    call = prepare(fn, args, runner, parsed, snapshot=True)
    job = JobRun(call, launched=True)
    return job.launch(functools.partial(finish, call, job))


def run_options(options: Any, keep: str | None, runner: Any) -> Options:
    """The checked options of a run; the argument `keep` takes precedence over the option."""
    parsed = parsed_options(options, runner)
    if runner != LOCAL:
        from beamjax.pipelines.runners.connect import make_runner

        make_runner(runner)  # its packages may be missing
    if keep is not None:
        parsed = parse_options(replace(parsed, keep=keep))
    if parsed.results_folder is not None and parsed.keep is None:
        raise OptionsError("results_folder: found a folder, but nothing is kept; add keep='placed'")
    return parsed


def finish(call: Call, job: JobRun) -> Any:
    """Runs a call as a job, and returns the tree that its function returns."""
    with call.files, as_compiled():
        if job.folder is None:
            return collect(call, execute(call, job.monitor))
        with job.recorded():
            return job.returned(collect(call, execute(call, job.monitor)))


def prepare(
    fn: Callable[..., Any],
    args: Any,
    runner: Any,
    options: Options,
    snapshot: bool = False,
    workers: SessionWorkers | None = None,
) -> Call:
    """Stages and plans a call, and chooses where it runs. Streams are counted first."""
    # `snapshot`: the caller may write to its arrays before the run is over. `workers` are those of
    # a session.
    began = time.perf_counter()
    # Removes what killed processes have left.
    temporary.sweep_once(options.work_folder or tempfile.gettempdir())
    with contextlib.ExitStack() as files:
        if options.job_folder is not None or options.results_folder is not None:
            files.enter_context(claimed(options))
        flat = stage("run", fn, args)
        known = flat
        if flat.arrays is None and flat.has_streams:
            known = files.enter_context(with_lengths(flat, runner, options))
        call = plan(known, runner, options)
        if known.narrows:
            warn_of_changes(known.arguments, call.plan.x64, stacklevel=4)
        inputs = call.values.snapshot() if snapshot else call.inputs
        backend, options, results = choose_runner(call)
        return replace(
            call, backend=backend, options=options, inputs=inputs, results=results,
            can_replay=known is flat, files=files.pop_all(), workers=workers,
            planning=time.perf_counter() - began,
        )  # fmt: skip


def stage(
    front: str, fn: Callable[..., Any], args: Sequence[Any], abstract: bool = False
) -> FlatCall:
    """Flattens the arguments of a call; refuses tracers, and abstract ones unless `abstract`."""
    flat = flatten_call(fn, args)
    others = flat.arguments if flat.arrays is None else ()
    if others:
        refuse_tracers(front, fn, {argument.path: [argument.value] for argument in others})
    if _compat.is_tracing():
        refuse_compilation(front, fn)
    for argument in others:
        if not abstract and isinstance(argument.value, jax.ShapeDtypeStruct):
            raise StagingError(
                f"{argument.path}: found a jax.ShapeDtypeStruct, expected an array or a source; "
                "only beamjax.transform takes abstract arguments, for values of a PCollection"
            )
    return flat


def plan(flat: FlatCall, runner: Any, options: Options, unroll: bool = False) -> Call:
    """Makes the plan of a call, in the form that other processes run."""
    # `unroll` is for graphs without a driver, which have no loops and branches. An argument whose
    # value is None is an abstract array; then the call has no inputs.
    planned = plan_for(flat, options, unroll)
    ready = planned.plan
    if planned.calls_back:
        from beamjax.bodies.python_bodies import Recipe  # few bodies run as Python

        # Not in the cache of plans, which must not keep the user's function.
        chosen = ready.shard_sizes, ready.vectorizations
        recipe = Recipe(make_plan, flat, options, *chosen, unroll)
        ready = replace(ready, recipe=recipe)
    inputs = bind_inputs(ready, flat) if flat.has_values else None
    name = runner if isinstance(runner, str) else runner_name(runner)
    return Call(flat, runner, name, options, planned, ready, inputs)


def choose_runner(call: Call) -> tuple[Any, Options, MaterializedOutputs]:
    """Chooses where a call runs and where its results go, and checks that it fits in memory."""
    # Stored with the plan, unless it depends on sources as well.
    known = {} if call.flat.has_sources else call.planned.derived
    options = known.get((call.runner, call.options))
    if options is None:
        sources = sources_of(call.values.values)
        options = with_fitting_threads(call.plan, sources, call.options, call.runner)
        check_memory(call.plan, sources, options, call.runner)
        known[call.runner, call.options] = options
    staged = call.planned.staged
    if options.keep is None and not staged.returns_keyed:
        return call.backend, options, NOTHING
    from beamjax.tables.keyed_results import materialized_results  # for few results

    results = materialized_results(call.plan, staged.out_tree, options)
    return call.backend, options, results


def execute(call: Call, monitor: Monitor) -> Values:
    """Runs the plan of a call, and returns its outputs by name."""
    results = call.results
    cleared = contextlib.nullcontext() if results is NOTHING else results.cleared()
    with cleared, lapack_limit, with_subnormals():
        try:
            values = _execute(call, monitor)
        except Exception as error:
            # Errors of other kinds may follow from a cancellation.
            if monitor.is_cancelled:
                raise JobCancelledError("the job was cancelled") from error
            if isinstance(error, BeamjaxError):
                _explain_replay(error, call, monitor)
            raise
    monitor.letters.warn(call.planned.placed.undropped)
    return values


def _explain_replay(error: BeamjaxError, call: Call, monitor: Monitor) -> None:
    if not call.can_replay or error.failure is None or error.failure.shard is None:
        return
    error.run, error.rounds = call, monitor.progress().rounds
    folder = call.options.job_folder
    how = "error" if folder is None else f"{folder!r}, fn, *args"
    error.replay_hint = f"To debug it as Python: beamjax.replay({how})"


def _execute(call: Call, monitor: Monitor) -> Values:
    plan, inputs, options, results = call.plan, call.inputs, call.options, call.results
    assert inputs is not None
    if call.backend != LOCAL:
        from beamjax.pipelines.run import run_plan

        if call.workers is not None:
            return call.workers.run(plan, inputs, options, monitor, results)
        return run_plan(plan, inputs, call.backend, options, monitor, results)
    derived, key = call.planned.derived, ("loaded", options.xla_threads, options.local_threads)
    if key not in derived:
        derived[key] = LoadedPlan(call.planned.plan, options)
    if options.checkpoint is None:
        return evaluate(plan, inputs, options, monitor, None, results, derived[key])
    from beamjax.pipelines.checkpoints.checkpointer import Checkpointer
    from beamjax.pipelines.checkpoints.folder import held

    with held(options.checkpoint):
        checkpointer = Checkpointer(plan, inputs, options, inputs.refs)
        return evaluate(plan, inputs, options, monitor, checkpointer, results, derived[key])


def collect(call: Call, values: Values) -> Any:
    """Builds the tree that the function returns from the outputs of its plan."""
    plan, staged, inputs = call.plan, call.planned.staged, call.inputs
    assert inputs is not None
    leaves = []
    for output, aval in zip(plan.outputs, staged.closed.out_avals, strict=True):
        leaf = _output(plan, output, values, inputs)
        if getattr(aval, "weak_type", False) and not isinstance(leaf, Source):
            leaf = with_weak_type(leaf, plan.x64)
        leaves.append(leaf)
    result = jax.tree_util.tree_unflatten(staged.out_tree, leaves)
    if not staged.returns_keyed:
        return result
    from beamjax.tables.keyed_results import with_tables  # for few results

    return with_tables(result, call.results, call.backend, call.options)


def bind_inputs(plan: Plan, call: FlatCall) -> Inputs:
    """The values of a plan's inputs: the user's arguments, then the closed-over constants."""
    return Inputs(plan, [*call.values, *plan.constants])


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
        if isinstance(array, Source):
            return array
        if spec.placement is not None:
            array = np.moveaxis(array, 0, output.axis)
        # On the CPU, JAX may share the array's memory, which may belong to an argument.
        # `jax.numpy.array` would copy it, but compiles an executable for each shape. JAX copies
        # memory again that is not aligned.
        put = _compat.device_array(array if buffers.is_immutable(array) else buffers.copy(array))
        return wrap(put, spec.key_impl)


def _device_array(inputs: Inputs, index: int) -> Any:
    value = inputs.values[index]
    if not isinstance(value, tuple):
        return jax.numpy.asarray(value)
    source, leaf = value
    return wrap(jax.numpy.asarray(inputs.whole(index)), source.leaves[leaf].key_impl)


def pipeline(runner: Any = "DirectRunner", options: Any = None) -> beam.Pipeline:
    """Creates an empty Beam pipeline on a runner that beamjax sets up as for `run`.

        with beamjax.pipeline("PrismRunner") as mine:
            members = mine | beam.io.ReadFromText("rows.csv") | beam.Map(parse)
            members | beamjax.transform(fn, weights, rows) | beam.Map(print)

    `beam.Pipeline(runner=...)` works as well if Beam finds by itself what the runner needs.
    `pipeline` uses the same Prism, Flink and Spark that `beamjax.run` builds, downloads and
    connects to, and the servers that Beam opens in this process listen on loopback addresses only.

    Args:
      runner: the name or an instance of a Beam runner.
      options: Beam's flags, as a dict, a list or a `PipelineOptions`. Give options of beamjax to
        `transform`.

    Returns:
      A `beam.Pipeline`, which runs at the end of its `with` block.

    Raises:
      OptionsError: the runner is unknown, is "local" or is not available; or an option does not
        fit.
    """
    from beamjax.pipelines.launch import own_pipeline

    if runner == LOCAL:
        raise OptionsError(f"runner: found {LOCAL!r}, which is without Beam; name a runner of Beam")
    return own_pipeline(runner, parsed_options(options, runner))


_NOT_IN_TRANSFORM = {
    "checkpoint": "does not drive rounds; leave it out",
    "job_folder": "records no job: your pipeline runs it; leave it out",
    "report": "records no job: your pipeline runs it; leave it out",
    "keep": "returns PCollections; write them from your own pipeline",
    "results_folder": "returns PCollections; write them from your own pipeline",
    "on_error": "does not report dropped members; drop elements of your own pipeline before",
    "on_nonfinite": "does not report dropped members; drop elements of your own pipeline before",
}
"""Options that `transform` refuses, and why."""


@by_position
def transform(fn: Callable[..., Any], *args: Any, options: Any = None) -> beam.PTransform:
    """Returns the computation of `run` as a Beam transform, for a pipeline of your own.

    NumPy arrays among the arguments are copied before `transform` returns, as by `launch`.

    An argument that is a tree of `jax.ShapeDtypeStruct` of shapes (n, ...) stands for a placed
    input that comes from the pipeline:

        members | beamjax.transform(fn, weights, jax.ShapeDtypeStruct((n, 28, 28), "float32"))

    The number of members need not be known. If the size of the placement is None and n is a
    symbolic dimension, the pipeline counts the members:

        (n,) = jax.export.symbolic_shape("n")

    Then `fn` may map over the members, reduce them, and read `x.shape[0]` as a value. It may not
    need n as a constant, as in `if x.shape[0] > 3`, or in a value that holds all members on the
    server.

    Args:
      fn: as for `run`.
      *args: as for `run`, or trees of `jax.ShapeDtypeStruct`. An element of the PCollection has a
        member of each of these abstract arguments.
      options: as for `run`; Beam's own options are those of the pipeline.

    Returns:
      A transform. If there are abstract arguments, apply it to a PCollection of `(index, member)`.
      The index runs from 0 to n - 1, each once, and the member is a tree like the abstract argument
      without the leading axis (a tuple of trees if there are several abstract arguments).
      Otherwise apply it to a pipeline. Its result is the tree that `fn` returns, with PCollections
      as leaves: a server value is one array, a placed value is `(index, member array)`.

    Raises:
      OutsideProgramError: as for `run`.
      StagingError: as for `run`, or an abstract argument is not used as a placed value, something
        needs an unknown number of members as a constant, or `fn` returns a `Keyed`.
      PlacementError: as for `run`.
      StructureError: as for `run`, or a dimension other than the first one is unknown.
      SourceError: as for `run`. While the pipeline runs, Beam reports it for a member that is
        missing or occurs twice, and for a PCollection without elements.
      OptionsError: as for `run`, or an option does not apply to a transform: `checkpoint`, `keep`,
        `results_folder`, `job_folder`, `report`, or "drop" for `on_error`
        or `on_nonfinite`.
    """
    from beamjax.pipelines.transform import PlanTransform

    parsed = parsed_options(options, LOCAL)
    for name, reason in _NOT_IN_TRANSFORM.items():
        if (value := getattr(parsed, name)) not in (None, "raise", "keep"):
            raise OptionsError(
                f"{name}: found {value!r} in the options of transform, which {reason}, or use "
                "beamjax.run"
            )
    call = plan(stage("transform", fn, args, abstract=True), LOCAL, parsed, unroll=True)
    out_tree = call.planned.staged.out_tree
    if call.planned.staged.returns_keyed:
        from beamjax.tables.keyed_results import keyed_outputs  # for few results

        output = keyed_outputs(out_tree, parsed)[0]
        raise StagingError(
            f"result{output.path}: found reduce_by_key without a number of keys, which transform "
            "does not have; return the keys and values, and use Beam's CombinePerKey, or "
            "beamjax.run"
        )
    warn_of_changes(call.flat.arguments, call.plan.x64, stacklevel=3)
    inputs = call.values.snapshot()
    check_memory(call.plan, sources_of(inputs.values), parsed, "")
    groups = [
        jax.tree_util.tree_structure(arg)
        for arg in args
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree_util.tree_leaves(arg))
    ]
    return PlanTransform(call.plan, inputs, out_tree, groups, parsed)
