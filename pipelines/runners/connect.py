"""A Beam runner with its options. All questions about a runner are answered here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions

from beamjax._beam_compat import (
    INTERACTIVE,
    EmbeddedPythonEnvironment,
    EmbeddedPythonGrpcEnvironment,
    FlinkRunner,
    FnApiRunner,
    PortableRunner,
    PrismRunner,
    SparkRunner,
    default_environment,
    is_in_ipython,
)
from beamjax.errors import OptionsError
from beamjax.options import Options
from beamjax.pipelines.clusters.job_servers import loops_back
from beamjax.pipelines.runners import dataflow, direct, flink, prism, spark
from beamjax.pipelines.runners.options import QuickOptions
from beamjax.runtime.ordered_pool import computing_threads

RUNNERS: dict[str, Callable[[], Any]] = {
    # Beam's own name for it tries Prism first, and so means another runner on another machine.
    "DirectRunner": direct.FnApiRunner,
    "FnApiRunner": direct.FnApiRunner,
    "PrismRunner": prism.PrismRunner,
    "FlinkRunner": FlinkRunner,
    "SparkRunner": SparkRunner,
}
"""Runners whose names beamjax knows; any other name is passed to Beam."""

CONNECTED: dict[type, Callable[[PipelineOptions], PipelineOptions]] = {
    PrismRunner: prism.connected,
    FlinkRunner: flink.connected,
    SparkRunner: spark.connected,
}
"""Functions that add the address of its job server to the options of a runner."""

IN_PROCESS = (EmbeddedPythonEnvironment, EmbeddedPythonGrpcEnvironment)


@dataclass(frozen=True)
class Connection:
    """A runner as pipelines are made for it.

    Attributes:
      runner: of Beam.
      options: of beamjax; on Dataflow with a `work_folder` that workers there reach.
      flags: of Beam.
      shared: whether workers are threads of this process, and see its memory, as long as the
        pipelines run.
      spread: whether there are several workers over which shards must be distributed.
    """

    runner: Any
    options: Options
    flags: PipelineOptions
    shared: bool
    spread: bool

    @property
    def holds_elements(self) -> bool:
        """Whether the runner holds the output of a step in memory until another step can start."""
        return isinstance(self.runner, FnApiRunner | PrismRunner)

    @property
    def is_one_process(self) -> bool:
        """Whether runner and workers are this process, and each element is processed once."""
        return self.shared and isinstance(self.runner, FnApiRunner)

    @property
    def threads(self) -> int:
        """How many threads compute the shards of a bundle on a CPU, at most: where one worker has
        the machine for itself, as many as in this process without a runner."""
        alone = self.shared and self.holds_elements and not self.spread
        return computing_threads(self.options) if alone else 1


def connect(runner: Any, options: Options, dry: bool = False) -> Connection:
    """A connection for pipelines that beamjax makes and waits for.

    A job server that the runner needs is started, unless this process has it from before.

    Args:
      runner: a name or an instance of a Beam runner.
      options: of the run.
      dry: whether nothing is to be run, so that no credentials are needed.

    Raises:
      OptionsError: the runner is unknown or can't be had, an option does not fit it, or there are
        no credentials for it.
    """
    _check_ipython()
    runner = make_runner(runner)
    flags = beam_options(options, runner)
    if dataflow.is_dataflow(runner):
        options, flags = dataflow.prepare(options, flags)
        if not dry:
            dataflow.check_credentials(flags)
    # A pipeline on a job server may outlive the user's own program, but not these pipelines.
    loopback = isinstance(runner, PortableRunner) and loops_back(flags)
    shared = shares_memory(runner, flags) or loopback
    return Connection(runner, options, flags, shared, spreads(runner, flags))


def connection_of(pipeline: beam.Pipeline, options: Options) -> Connection:
    """The connection of a user's own pipeline, which may run when this process knows nothing of it.

    Raises:
      OptionsError: workers on Dataflow do not reach the `work_folder`.
    """
    runner, flags = pipeline.runner, pipeline.options
    if dataflow.is_dataflow(runner):
        options = replace(options, work_folder=dataflow.work_folder(options, flags))
    return Connection(runner, options, flags, shares_memory(runner, flags), spreads(runner, flags))


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
      OptionsError: a flag names another runner, or the runner can't be had.
    """
    if isinstance(options.beam, PipelineOptions):
        found = options.beam
    else:
        # An empty list, not None, with which Beam would read the flags of this process.
        found = QuickOptions(list(options.beam))
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


def _check_ipython() -> None:
    """OptionsError where Beam would fail as soon as a pipeline is made."""
    if not is_in_ipython():
        return
    try:
        importlib.import_module(INTERACTIVE)
    except Exception as error:  # of many kinds, with versions of pandas that Beam does not know
        raise OptionsError(
            "runner: this is IPython or a notebook, where Beam makes no pipeline without further "
            f"packages ({type(error).__name__}: {error}); run "
            "pip install 'apache-beam[interactive]', or use runner='local', which needs no Beam"
        ) from error


def shares_memory(runner: Any, options: PipelineOptions) -> bool:
    """Whether the workers of a runner are threads of this process."""
    if not isinstance(runner, FnApiRunner):
        return False
    mode = options.view_as(DirectOptions).direct_running_mode
    if mode == "in_memory":
        return isinstance(default_environment(runner), IN_PROCESS)
    return mode == "multi_threading"


def spreads(runner: Any, options: PipelineOptions) -> bool:
    """Whether a runner has several workers to deal elements to."""
    if isinstance(runner, FnApiRunner):
        return options.view_as(DirectOptions).direct_num_workers != 1
    # Prism gives its worker one bundle at a time.
    return not isinstance(runner, PrismRunner)
