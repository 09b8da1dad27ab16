"""A Beam runner with its options, and the properties of the runner on which other code depends."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    S3Options,
    StandardOptions,
)

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
from beamjax.pipelines.clusters import processes
from beamjax.pipelines.clusters.job_servers import loops_back
from beamjax.pipelines.runners import dataflow, direct, flink, prism, spark
from beamjax.pipelines.runners.options import QuickOptions
from beamjax.runtime.ordered_pool import computing_threads

RUNNERS: dict[str, Callable[[], Any]] = {
    # Beam's DirectRunner tries Prism first, so it would be different runners on different machines.
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
"""Functions that add the address of a job server to the options of a runner."""

_S3_VARIABLES = {
    "s3_endpoint_url": "AWS_ENDPOINT_URL",
    "s3_access_key_id": "AWS_ACCESS_KEY_ID",
    "s3_secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "s3_session_token": "AWS_SESSION_TOKEN",
    "s3_region_name": "AWS_DEFAULT_REGION",
    "s3_verify": "AWS_CA_BUNDLE",
}
"""Options of Beam's own client for s3://, and the variables that every client reads."""

IN_PROCESS = (EmbeddedPythonEnvironment, EmbeddedPythonGrpcEnvironment)


@dataclass(frozen=True)
class Connection:
    """A runner with its options.

    Attributes:
      runner: Beam's runner.
      options: beamjax's options; on Dataflow with a `work_folder` that workers can reach.
      flags: Beam's options.
      shared: whether workers are threads of this process, which see its memory.
      spread: whether there are several workers, so that elements must be redistributed.
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
        """Whether runner and workers are in this process. Each element is then processed once."""
        return self.shared and isinstance(self.runner, FnApiRunner)

    @property
    def threads(self) -> int:
        """The largest number of threads that compute the shards of a bundle on a CPU.

        One, unless a single worker has the machine for itself.
        """
        alone = self.shared and self.holds_elements and not self.spread
        return computing_threads(self.options) if alone else 1


def connect(runner: Any, options: Options, dry: bool = False) -> Connection:
    """A connection for pipelines that beamjax makes and waits for.

    A job server that the runner needs is started, unless this process has started it before.

    Args:
      runner: a name or an instance of a Beam runner.
      options: the options of the run.
      dry: whether nothing will be run, so that no credentials are needed.

    Raises:
      OptionsError: the runner is unknown or not available, an option does not fit it, or there are
        no credentials for it.
    """
    _check_ipython()
    runner = make_runner(runner)
    _check_folder(runner, options)
    flags = beam_options(options, runner)
    _check_stores(flags)
    if dataflow.is_dataflow(runner):
        options, flags = dataflow.prepare(options, flags)
        if not dry:
            dataflow.check_credentials(flags)
    # beamjax waits for these pipelines, so this process and its objects outlive them. That is not
    # so for users' own pipelines, see `connection_of`.
    loopback = isinstance(runner, PortableRunner) and loops_back(flags)
    shared = shares_memory(runner, flags) or loopback
    return Connection(runner, options, flags, shared, spreads(runner, flags))


def connection_of(pipeline: beam.Pipeline, options: Options) -> Connection:
    """The connection of a user's own pipeline, which may run after this process has ended.

    Raises:
      OptionsError: workers on Dataflow can't reach the `work_folder`.
    """
    runner, flags = pipeline.runner, pipeline.options
    if dataflow.is_dataflow(runner):
        options = replace(options, work_folder=dataflow.work_folder(options, flags))
    return Connection(runner, options, flags, shares_memory(runner, flags), spreads(runner, flags))


def make_runner(runner: Any) -> Any:
    """The runner for a name or an instance.

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
        # Like Beam, in any case, and without "Runner".
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
    """Beam's options for a run. A job server that the runner needs is started.

    Raises:
      OptionsError: a flag names another runner, or the job server is not available.
    """
    found = _flags_of(options)
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


def _flags_of(options: Options) -> PipelineOptions:
    """Beam's options as they are given."""
    if isinstance(options.beam, PipelineOptions):
        return options.beam
    # A list even if it is empty: with None, Beam would read the flags of this process.
    return QuickOptions(list(options.beam))


def _check_stores(flags: PipelineOptions) -> None:
    """Raises OptionsError for addresses and keys that workers would not get."""
    given = flags.view_as(S3Options).get_all_options(drop_default=True)
    for name, variable in _S3_VARIABLES.items():
        if name in given:
            raise OptionsError(
                f"{name}: found in the options of a run, but keys do not travel with a pipeline; "
                f"set {variable} in the environment of this process, and of each pool of workers "
                "before it starts, on every host"
            )


def _check_folder(runner: Any, options: Options) -> None:
    """Raises OptionsError for workers on other hosts without a folder that they reach."""
    if options.work_folder or options.checkpoint or options.job_folder:
        return
    flags = _flags_of(options)
    if not isinstance(runner, PortableRunner) or loops_back(flags):
        return
    given = flags.get_all_options(drop_default=True)
    for name in ("job_endpoint", "flink_master"):
        host = str(given.get(name, "")).rpartition("://")[2].rpartition(":")[0]
        if host and not processes.is_here(host):
            raise OptionsError(
                f"work_folder: found none, but {name}={given[name]!r} is another host; expected a "
                "path or URL that this process and all workers can write and read"
            )


def _check_ipython() -> None:
    """Raises OptionsError in a notebook in which Beam can't create a pipeline."""
    if not is_in_ipython():
        return
    try:
        importlib.import_module(INTERACTIVE)
    except Exception as error:  # unsuitable versions of pandas raise errors of many types
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
    """Whether a runner has several workers that elements must be distributed to."""
    if isinstance(runner, FnApiRunner):
        return options.view_as(DirectOptions).direct_num_workers != 1
    # Prism gives its worker one bundle at a time.
    return not isinstance(runner, PrismRunner)
