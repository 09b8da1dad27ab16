"""`run`, `launch` and `transform`: a function of programs, on a Beam runner or in this process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from beamjax.bodies.export import with_weak_type, with_x64, wrap
from beamjax.bodies.python_bodies import Recipe
from beamjax.bodies.xla_threads import with_lapack_threads
from beamjax.call_checks import by_position, parsed_options
from beamjax.diagnostics import topology
from beamjax.diagnostics.fact_types import PlanFacts
from beamjax.diagnostics.facts import facts_of
from beamjax.diagnostics.forecast import prediction
from beamjax.diagnostics.memory import check_memory, sources_of, with_fitting_threads
from beamjax.errors import BeamjaxError, OptionsError, StagingError
from beamjax.interpreters.planning import Planned, make_plan, plan_for
from beamjax.interpreters.staging.stage import Argument, FlatCall, flatten_call
from beamjax.interpreters.staging.tracers import refuse_compilation, refuse_tracers
from beamjax.jobs.job import Job, launch_work, run_work
from beamjax.options import Options, parse_options
from beamjax.plan.one_pass import open_placements
from beamjax.plan.steps import Output, Plan
from beamjax.reading import choose, counted
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.local import evaluate
from beamjax.runtime.materialized_outputs import MaterializedOutputs, materialized_outputs
from beamjax.sources.arrays.placed import Placed
from beamjax.sources.canonical import warn_of_changes
from beamjax.storage.snapshots import is_immutable
from beamjax.tables.keyed_results import kept_numbers, keyed_outputs, with_tables
from beamjax.telemetry.monitor import Monitor

if TYPE_CHECKING:
    import apache_beam as beam

    from beamjax.pipelines.session_workers import SessionWorkers

LOCAL = "local"


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
    return run_work(prepare(fn, args, runner, run_options(options, keep, runner)))


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

    The job lives in a folder: `options={"job_folder": ...}`, or a temporary one that goes with the
    handle. Any process can look on there, see `open_job`.

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
    return launch_work(prepare(fn, args, runner, parsed, snapshot=True))


def run_options(options: Any, keep: str | None, runner: Any) -> Options:
    """The options of a run; raises OptionsError."""
    parsed = parsed_options(options, runner)
    if keep is not None:
        parsed = parse_options(replace(parsed, keep=keep))
    if parsed.results_folder is not None and parsed.keep is None:
        raise OptionsError("results_folder: found a folder, but nothing is kept; add keep='placed'")
    return parsed


@dataclass(frozen=True)
class PreparedRun:
    """A call that is staged, planned and checked: the `Work` of a job.

    Attributes:
      planned: the plan with what it was made from.
      plan: the same plan, as other processes need it.
      call: the function and its arguments, those of unknown length as they are read.
      inputs: the values of the plan's inputs.
      backend: the user's runner, or "local".
      options: of the run.
      results: where results that are kept go.
      files: with members that were counted before; they go when the run is over.
      can_replay: whether the members can be read again, which those of streams can't.
      workers: those of a session, in place of those that a run starts.
    """

    planned: Planned
    plan: Plan
    call: FlatCall
    inputs: Inputs
    backend: Any
    options: Options
    results: MaterializedOutputs
    files: contextlib.ExitStack
    can_replay: bool
    workers: SessionWorkers | None = None

    @property
    def runner(self) -> str:
        """The name of the runner."""
        return _name_of(self.backend)

    def compute(self, monitor: Monitor) -> Any:
        """Runs the plan, and collects the tree that the function returns."""
        with self.files:
            with self.results.cleared(), with_lapack_threads():
                try:
                    values = self._values(monitor)
                except BeamjaxError as error:
                    self._note_replay(error, monitor)
                    raise
            monitor.letters.warn()
            types = self.planned.staged.closed.out_avals
            leaves = [
                _with_weak_type(
                    output_array(self.plan, output, values, self.inputs),
                    getattr(aval, "weak_type", False),
                    self.plan.x64,
                )
                for output, aval in zip(self.plan.outputs, types, strict=True)
            ]
            result = jax.tree_util.tree_unflatten(self.planned.staged.out_tree, leaves)
            return with_tables(result, self.results, self.backend, self.options)

    def _note_replay(self, error: BeamjaxError, monitor: Monitor) -> None:
        """Lets `beamjax.replay` run again what failed."""
        if error.failure is not None and error.failure.shard is not None and self.can_replay:
            error.run, error.rounds = self, monitor.progress().rounds
            error.add_note("beamjax.replay(error) calls its members as Python, for pdb and print.")

    def _values(self, monitor: Monitor) -> dict[str, np.ndarray | Placed]:
        """Runs the plan; its outputs by name."""
        arguments = (self.options, monitor, self.results)
        if self.backend != LOCAL:
            from beamjax.pipelines.run import run_plan

            if self.workers is not None and not open_placements(self.plan):
                return self.workers.run(self.plan, self.inputs, *arguments)
            return run_plan(self.plan, self.inputs, self.backend, *arguments)
        if self.options.checkpoint is None:
            return evaluate(self.plan, self.inputs, self.options, monitor, results=self.results)
        from beamjax.pipelines.run import local_checkpointer

        with local_checkpointer(self.plan, self.inputs, self.options) as checkpointer:
            return evaluate(
                self.plan, self.inputs, self.options, monitor, checkpointer, self.results
            )

    def plan_facts(self) -> PlanFacts:
        """What `explain` shows of the plan."""
        notes = self.planned.notes
        return facts_of(self.planned, self.call.arguments, self.options, notes, self.runner)

    def prediction(self) -> tuple[dict[str, float], str]:
        """Predicted seconds by step, and what would be quicker."""
        predicted = prediction(self.plan, self.options, self.runner)
        return predicted.by_name(), predicted.advice


def prepare(
    fn: Callable[..., Any],
    args: Any,
    runner: Any,
    options: Options,
    snapshot: bool = False,
    workers: SessionWorkers | None = None,
) -> PreparedRun:
    """Stages and plans a call, chooses where it runs, and checks that it can.

    Members of unknown number are counted first, if the program needs their number. With `snapshot`,
    the caller may write to its arrays before the run is over. `workers` are those of a session.
    """
    call = _concrete_call(fn, args)
    can_replay = not call.has_streams
    if options.checkpoint is not None:
        _refuse_streams_with_checkpoint(call)
    with contextlib.ExitStack() as files:
        if call.has_streams and _must_count(call, runner, options):
            args = files.enter_context(counted(args, runner, options, local=runner == LOCAL))
            call = flatten_call(fn, args)
        planned = plan_for(call, options)
        plan = _with_recipe(planned.plan, call, options)
        inputs = bind_inputs(plan, call.arguments)
        warn_of_changes(call.arguments, plan.x64, stacklevel=4)
        if snapshot:
            inputs = inputs.snapshot()
        if options.small_work == "here" and _is_small(plan, options, _name_of(runner)):
            runner = LOCAL
        name, read = _name_of(runner), sources_of(inputs.values)
        options = with_fitting_threads(plan, read, options, name)
        check_memory(plan, read, options, topology.Workers.of(name, options))
        results = _materialized_outputs(planned, plan, options)
        return PreparedRun(
            planned, plan, call, inputs, runner, options, results, files.pop_all(), can_replay,
            workers,
        )  # fmt: skip


def _name_of(runner: Any) -> str:
    return runner if isinstance(runner, str) else type(runner).__name__


def _is_small(plan: Plan, options: Options, runner: str) -> bool:
    """Whether a plan is predicted to be quicker in this process than on its runner."""
    return prediction(plan, options, runner).is_small


def _materialized_outputs(planned: Planned, plan: Plan, options: Options) -> MaterializedOutputs:
    """Which results stay in files, by their paths in the tree that the function returns."""
    tree = planned.staged.out_tree
    numbered = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    found = jax.tree_util.tree_flatten_with_path(numbered)[0]
    paths = [jax.tree_util.keystr(path) for path, _ in found]
    return materialized_outputs(plan, paths, options, kept_numbers(keyed_outputs(tree, options)))


def pipeline(runner: Any = "DirectRunner", options: Any = None) -> beam.Pipeline:
    """A pipeline of Beam, to be filled by you, on a runner as `run` has it.

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
            "leave it away, or use beamjax.run"
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
    call = _flat_call("transform", fn, args)
    planned = plan_for(call, parsed, unroll=True)
    for output in keyed_outputs(planned.staged.out_tree, parsed):
        raise StagingError(
            f"result{output.path}: found reduce_by_key without a number of keys, which transform "
            "does not have; return the keys and values, and use Beam's CombinePerKey, or "
            "beamjax.run"
        )
    plan = _with_recipe(planned.plan, call, parsed, unroll=True)
    warn_of_changes(call.arguments, plan.x64, stacklevel=3)
    inputs = bind_inputs(plan, call.arguments).snapshot()
    check_memory(plan, sources_of(inputs.values), parsed, topology.Workers.of("", parsed))
    groups = [
        jax.tree_util.tree_structure(arg)
        for arg in args
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree_util.tree_leaves(arg))
    ]
    return PlanTransform(plan, inputs, planned.staged.out_tree, groups, parsed)


def plan_of(fn: Callable[..., Any], args: Sequence[Any], options: Options) -> tuple[Plan, Inputs]:
    """The plan of `fn(*args)` and its inputs, as other processes run it; raises as `run` does."""
    call = _concrete_call(fn, args)
    plan = _with_recipe(plan_for(call, options).plan, call, options)
    return plan, bind_inputs(plan, call.arguments)


def bind_inputs(plan: Plan, arguments: Sequence[Argument]) -> Inputs:
    """The values of a plan's inputs: the user's arguments, then the closed-over constants."""
    values = [(a.value, a.leaf) if a.is_source else a.value for a in arguments]
    return Inputs(plan, [*values, *plan.constants])


def _refuse_streams_with_checkpoint(call: FlatCall) -> None:
    stream = next((argument for argument in call.arguments if argument.is_stream), None)
    if stream is not None:
        raise OptionsError(
            f"checkpoint: {stream.path} is a source of unknown length, of which no run can know on "
            "the next start that its members are still the same; write them to files of known "
            "length (beamjax.from_npy) for a run that can go on, or leave out the option"
        )


def _must_count(call: FlatCall, runner: Any, options: Options) -> bool:
    """Whether sources of unknown length have to be counted before the program can run."""
    reading = choose(call, functools.partial(plan_for, options=options))
    if reading.counted_because or runner == LOCAL:
        return bool(reading.counted_because)
    from beamjax.pipelines.tables.spool import open_on_workers

    streams = [argument.value for argument in call.arguments if argument.is_stream]
    return not open_on_workers(streams, runner, options)


def _with_recipe(plan: Plan, call: FlatCall, options: Options, unroll: bool = False) -> Plan:
    """The plan as other processes need it; a cached one must not keep the user's function."""
    if not any(body.python for body in plan.bodies.values()):
        return plan
    return replace(plan, recipe=Recipe(make_plan, call, options, plan.choices, unroll))


def output_array(
    plan: Plan, output: Output, values: Mapping[str, np.ndarray | Placed], inputs: Inputs
) -> Any:
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


def _with_weak_type(leaf: Any, weak: bool, x64: bool) -> Any:
    return leaf if isinstance(leaf, Placed) else with_weak_type(leaf, weak, x64)


def _device_array(inputs: Inputs, index: int) -> Any:
    value = inputs.values[index]
    if not isinstance(value, tuple):
        return jax.numpy.asarray(value)
    source, leaf = value
    return wrap(jax.numpy.asarray(inputs.whole(index)), source.leaves[leaf].key_impl)


def _flat_call(front: str, fn: Callable[..., Any], args: Sequence[Any]) -> FlatCall:
    """A call with its arguments flattened; raises StagingError if JAX traces it."""
    call = flatten_call(fn, args)
    refuse_tracers(front, fn, {argument.path: [argument.value] for argument in call.arguments})
    refuse_compilation(front, fn)
    return call


def _concrete_call(fn: Callable[..., Any], args: Sequence[Any]) -> FlatCall:
    """A call whose arguments have values, flattened; raises StagingError if one has none."""
    call = _flat_call("run", fn, args)
    for argument in call.arguments:
        if isinstance(argument.value, jax.ShapeDtypeStruct):
            raise StagingError(
                f"{argument.path}: found a jax.ShapeDtypeStruct, expected an array or a source; "
                "only beamjax.transform takes abstract arguments, for values of a PCollection"
            )
    return call
