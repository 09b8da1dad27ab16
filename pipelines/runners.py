"""Beam runners by name, and a plan run on one of them to its end."""

from __future__ import annotations

import contextlib
import difflib
import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions
from apache_beam.runners.portability.flink_runner import FlinkRunner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.runners.portability.prism_runner import PrismRunner
from apache_beam.runners.portability.spark_runner import SparkRunner
from apache_beam.transforms import environments

from beamjax.errors import JobCancelledError, OptionsError
from beamjax.inputs import Inputs
from beamjax.monitor import Monitor
from beamjax.one_pass import open_placements
from beamjax.options import OWN, Options
from beamjax.pipelines import build, dataflow, files, flink, prism, spark, uploads
from beamjax.pipelines.checkpoint_folder import work_folder
from beamjax.pipelines.driver import Driver
from beamjax.pipelines.job_servers import loops_back
from beamjax.pipelines.keepers import DriverKeeper, folder_of
from beamjax.pipelines.launch import Launcher
from beamjax.pipelines.store import Ref, Store
from beamjax.pipelines.tasks import Sources, forget
from beamjax.pipelines.values import Served, Value, placed
from beamjax.plan import Output, Plan, ValueType, size_name
from beamjax.source_base import StreamSource
from beamjax.sources import ArraySource, live_spec, register, release
from beamjax.tracker import starts_anew

RUNNERS: dict[str, Callable[[], Any]] = {
    # Beam's own name for it tries Prism first, and so means another runner on another machine.
    "DirectRunner": FnApiRunner,
    "FnApiRunner": FnApiRunner,
    "PrismRunner": PrismRunner,
    "FlinkRunner": FlinkRunner,
    "SparkRunner": SparkRunner,
}
"""Runners that beamjax names by itself; any other name goes to Beam as it is."""

CONNECTED: dict[type, Callable[[PipelineOptions], PipelineOptions]] = {
    PrismRunner: prism.connected,
    FlinkRunner: flink.connected,
    SparkRunner: spark.connected,
}
"""How options for a runner come to say where its job server is."""

IN_PROCESS = (environments.EmbeddedPythonEnvironment, environments.EmbeddedPythonGrpcEnvironment)


def make_runner(runner: Any) -> Any:
    """A runner for what a user gave.

    Raises:
      OptionsError: Beam does not know the name, or `runner` is something else.
    """
    if isinstance(runner, beam.runners.PipelineRunner):
        return runner
    if not isinstance(runner, str):
        raise OptionsError(
            f"runner: found {runner!r}, expected 'local', the name of a Beam runner or an instance"
        )
    for name, make in RUNNERS.items():
        # Beam takes its names in any case, and without "Runner".
        if runner.lower() in (name.lower(), name.lower().removesuffix("runner")):
            return make()
    if runner.lower() in ("dataflow", "dataflowrunner") and not find_spec("apitools"):
        raise OptionsError(
            f"runner: found {runner!r}, but its packages are missing; run {dataflow.INSTALL}"
        )
    try:
        return beam.runners.create_runner(runner)
    except (ValueError, ImportError, AttributeError) as error:
        raise OptionsError(
            f"runner: found {runner!r}, expected 'local', {', '.join(map(repr, RUNNERS))} or "
            f"another name that Beam knows ({error})"
        ) from error


def beam_options(options: Options, runner: Any) -> PipelineOptions:
    """Beam's own options. A job server that the runner needs is started.

    Raises:
      OptionsError: a flag names another runner, or nobody knows it; or the runner can't be had.
        Only Beam's in-memory runner has all its flags in Python; those of others are not checked.
    """
    if isinstance(options.beam, PipelineOptions):
        found = options.beam
    else:
        # Never None: Beam would read the flags of this process instead.
        found = PipelineOptions(list(options.beam))
        if options.beam and isinstance(runner, FnApiRunner):
            _check_flags(found)
    named = found.view_as(StandardOptions).runner
    if named is not None and not isinstance(runner, type(make_runner(named))):
        raise OptionsError(
            f"options: found runner {named!r}, but the run is on {type(runner).__name__}; give the "
            f"runner as run(..., runner={named!r})"
        )
    for kind, connected in CONNECTED.items():
        if isinstance(runner, kind):
            return connected(found)
    return found


def _check_flags(options: PipelineOptions) -> None:
    known = PipelineOptions([]).get_all_options()
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            found = options.get_all_options(retain_unknown_options=True)
    except SystemExit:
        reason = complaint.getvalue().strip().rpartition("error: ")[2]
        raise OptionsError(f"options: Beam does not take these flags: {reason}") from None
    for name in found:
        if name not in known:
            close = difflib.get_close_matches(name, [*OWN, *known], 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise OptionsError(
                f"options: found {name!r}, expected an option of beamjax ({', '.join(OWN)}) or one "
                f"of Beam{hint}"
            )


def run_plan(
    plan: Plan, inputs: Inputs, runner: Any, options: Options, monitor: Monitor | None = None
) -> dict[str, np.ndarray]:
    """Runs a plan on a Beam runner and waits for it.

    Args:
      plan: what to run.
      inputs: its inputs.
      runner: of Beam.
      options: of the run.
      monitor: of the job, with its folder, if there is one.

    Returns:
      The raw array of each output that is a value of the plan, by name; placed values have their
      members along axis 0.

    Raises:
      OptionsError: the runner or an option is unknown.
      WorkerError: a body failed.
      JobCancelledError: the job was cancelled.
    """
    runner = make_runner(runner)
    flags = beam_options(options, runner)
    if dataflow.is_dataflow(runner):
        options, flags = dataflow.prepare(options, flags)
    # A pipeline on a job server may outlive what a user's own program knows of it, but not this.
    portable = isinstance(runner, PortableRunner)
    shared = shares_memory(runner, flags) or (portable and loops_back(flags))
    folder = monitor.folder.path if monitor and monitor.folder else None
    with (
        folder_of(options),
        temporary_store(options, folder) as store,
        sources_for(inputs, store, shared) as sources,
    ):
        program = store_program(plan, store, shared)
        launcher = Launcher(
            runner, flags, store, options, shared, spreads(runner, flags), program, monitor=monitor
        )
        try:
            return drive(plan, inputs, sources, launcher)
        finally:
            forget()


def drive(
    plan: Plan, inputs: Inputs, sources: Sources, launcher: Launcher
) -> dict[str, np.ndarray]:
    """Runs a plan with its inputs; see `run_plan`."""
    if open_placements(plan):
        if launcher.monitor is not None:
            launcher.monitor.letters.begin(anew=True)
        return _run_one_pass(plan, inputs, launcher, sources)
    values: dict[str, Value] = {
        name: placed(sources.specs[source], leaf) for name, (source, leaf) in sources.where.items()
    }
    store = launcher.store
    values |= {name: Served(store, array) for name, array in inputs.server().items()}
    options = launcher.options
    keeper = DriverKeeper(plan, inputs, options, store, values) if options.checkpoint else None
    if launcher.monitor is not None:
        launcher.monitor.letters.begin(anew=starts_anew(keeper))
    return Driver(plan, values, launcher, keeper).run()


def _run_one_pass(
    plan: Plan, inputs: Inputs, launcher: Launcher, sources: Sources
) -> dict[str, np.ndarray]:
    """Runs a plan without control flow over sources of unknown length, as one pipeline."""
    static = {name: launcher.store.put([a], name) for name, a in inputs.server().items()}
    number = [size_name(placement) for placement in open_placements(plan)]
    plan = replace(
        plan,
        values={**plan.values, **dict.fromkeys(number, ValueType((), "int32"))},
        inputs=(),
        outputs=tuple(
            Output(value=name)
            for name in (*number, *(out.value for out in plan.outputs))
            if name is not None
        ),
        constants=(),
    )
    streams = inputs.streams()
    assert streams is not None
    with opened_streams(streams.sources, launcher.shared) as specs:
        bound = build.Inputs(static, sources, streams=Sources(specs, dict(streams.where)))
        found = launcher.run(plan, bound, "result")
        return {
            name: value.array() if isinstance(value, Served) else value.whole()
            for name, value in found.items()
        }


def stream_specs(
    sources: Sequence[StreamSource], shared: bool
) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    """The specs by which workers open sources of unknown length, and the tokens of live ones."""
    if not shared:
        return tuple(source.to_spec() for source in sources), []
    tokens = [register(source) for source in sources]
    return tuple(map(live_spec, tokens)), tokens


@contextlib.contextmanager
def opened_streams(
    sources: Sequence[StreamSource], shared: bool
) -> Iterator[tuple[dict[str, Any], ...]]:
    """The same specs, while a pipeline runs."""
    specs, tokens = stream_specs(sources, shared)
    try:
        yield specs
    finally:
        for token in tokens:
            release(token)


@contextlib.contextmanager
def temporary_store(options: Options, job_folder: str | None = None) -> Iterator[Store]:
    """A store in a new folder for one run, removed at its end unless it is to be kept.

    Args:
      options: `work_folder` and `keep_folder`.
      job_folder: where to make it unless there is a `work_folder`.
    """
    parent = options.work_folder
    if parent is None and options.checkpoint is not None:  # where links reach the checkpoints
        parent = work_folder(options.checkpoint)
    store = Store.temporary(parent or job_folder)
    keep = options.keep_folder == "always"
    try:
        yield store
    except Exception as error:
        keep = keep or (
            options.keep_folder == "failed" and not isinstance(error, JobCancelledError)
        )
        raise
    finally:
        if not keep:
            remove_store(store)


def remove_store(store: Store) -> None:
    """Removes a temporary store with all that is in it, the files of sources included."""
    if files.is_url(store.root):
        store.cleanup()
    else:
        shutil.rmtree(store.root, ignore_errors=True)


@contextlib.contextmanager
def sources_for(inputs: Inputs, store: Store, shared: bool) -> Iterator[Sources]:
    """Placed inputs as workers open them, while a run lasts; see `source_specs`."""
    sources, tokens = source_specs(inputs, store, shared)
    try:
        yield sources
    finally:
        for token in tokens:
            release(token)


def source_specs(inputs: Inputs, store: Store, shared: bool) -> tuple[Sources, list[str]]:
    """Placed inputs as plain data.

    Args:
      inputs: of the plan.
      store: where arrays are written if workers don't share the memory of this process.
      shared: whether workers are threads of this process, and see its arrays.

    Returns:
      The specs, and the tokens of live sources, to be released at the end.
    """
    reader = inputs.reader()
    tokens: list[str] = []
    specs: list[dict[str, Any]] = []
    # Where each leaf of a source is: its spec, and its number there.
    leaves: list[list[tuple[int, int]]] = []
    for number, source in enumerate(reader.sources):
        first, count = len(specs), len(source.leaves)
        leaves.append([(first, leaf) for leaf in range(count)])
        if shared:
            tokens.append(register(source))
            specs.append(live_spec(tokens[-1]))
        elif uploads.stays_here(source, store):
            specs += [leaf.to_spec() for leaf in uploads.upload(source, store)]
            leaves[-1] = [(first + leaf, 0) for leaf in range(count)]
        elif isinstance(source, ArraySource):
            specs.append(source.spill(f"{store.root}/source-{number}").to_spec())
        else:
            specs.append(source.to_spec())
    where = {name: leaves[source][leaf] for name, (source, leaf) in reader.where.items()}
    return Sources(tuple(specs), where), tokens


def store_program(plan: Plan, store: Store, shared: bool) -> Ref | None:
    """Puts what other processes make bodies from that run as Python into the store.

    Raises:
      StagingError: the user's function can't be pickled.
    """
    if plan.recipe is None or shared:
        return None
    return store.put([np.frombuffer(plan.recipe.pickled(), np.uint8)], "program")


def shares_memory(runner: Any, options: PipelineOptions) -> bool:
    """Whether the workers of a runner are threads of this process."""
    if not isinstance(runner, FnApiRunner):
        return False
    mode = options.view_as(DirectOptions).direct_running_mode
    if mode == "in_memory":
        return isinstance(runner._default_environment, IN_PROCESS)
    return mode == "multi_threading"


def spreads(runner: Any, options: PipelineOptions) -> bool:
    """Whether a runner has several workers to deal elements to."""
    if isinstance(runner, FnApiRunner):
        return options.view_as(DirectOptions).direct_num_workers != 1
    # Prism gives its worker one bundle at a time.
    return not isinstance(runner, PrismRunner)
