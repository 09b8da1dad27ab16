"""A Beam runner with its options, and the properties of the runner on which other code depends."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, S3Options, StandardOptions

from beamjax._beam_compat import INTERACTIVE, PortableRunner, is_in_ipython
from beamjax.errors import OptionsError
from beamjax.options import Options
from beamjax.pipelines.clusters import processes
from beamjax.pipelines.clusters.flags import QuickOptions
from beamjax.pipelines.clusters.job_servers import loops_back
from beamjax.pipelines.runners.runner_table import NAMES, spec_of
from beamjax.pipelines.runners.spec import RunnerSpec
from beamjax.plan.merging import workers_of
from beamjax.runtime.ordered_pool import computing_threads

_S3_VARIABLES = {
    "s3_endpoint_url": "AWS_ENDPOINT_URL",
    "s3_access_key_id": "AWS_ACCESS_KEY_ID",
    "s3_secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "s3_session_token": "AWS_SESSION_TOKEN",
    "s3_region_name": "AWS_DEFAULT_REGION",
    "s3_verify": "AWS_CA_BUNDLE",
}
"""Options of Beam's own client for s3://, and the variables that every client reads."""


@dataclass(frozen=True)
class Connection:
    """A Beam runner with its options."""

    runner: Any
    options: Options  # on Dataflow with a `work_folder` that workers can reach
    flags: PipelineOptions
    spec: RunnerSpec
    shared: bool  # workers are threads of this process, which see its memory
    spread: bool  # there are several workers, so that elements must be redistributed

    @property
    def is_one_process(self) -> bool:
        """Whether runner and workers are in this process. Each element is then processed once."""
        return self.shared and self.spec.in_this_process

    @functools.cached_property
    def workers(self) -> int | None:
        """The number of workers that Beam's flags ask for; None if they do not say."""
        return workers_of(self.flags)

    @functools.cached_property
    def threads(self) -> int:
        """The largest number of threads that compute the shards of a bundle on a CPU."""
        # One, unless a single worker has the machine for itself.
        alone = self.shared and self.spec.one_bundle and not self.spread
        return computing_threads(self.options.local_threads) if alone else 1


def connect(runner: Any, options: Options, dry: bool = False) -> Connection:
    """A connection for pipelines that beamjax makes and waits for; see `RunnerSpec.connect`."""
    _check_ipython()
    runner = make_runner(runner)
    spec, flags = spec_of(runner), _flags_of(options)
    _check_folder(runner, options, flags)
    _check_named(runner, flags)
    options, flags = spec.connect(options, flags, dry)
    _check_stores(flags)
    # beamjax waits for these pipelines, so this process and its objects outlive them. That is not
    # so for users' own pipelines, see `connection_of`.
    loopback = isinstance(runner, PortableRunner) and loops_back(flags)
    shared = loopback or spec.shares_memory(runner, flags)
    return Connection(runner, options, flags, spec, shared, spec.has_several_workers(flags))


def connection_of(pipeline: beam.Pipeline, options: Options) -> Connection:
    """The connection of a user's own pipeline, which may run after this process has ended."""
    runner, flags = pipeline.runner, pipeline.options
    spec = spec_of(runner)
    options, shared = spec.attach(options, flags), spec.shares_memory(runner, flags)
    return Connection(runner, options, flags, spec, shared, spec.has_several_workers(flags))


def make_runner(runner: Any) -> Any:
    """The runner for a name or an instance; OptionsError for anything else."""
    if isinstance(runner, beam.runners.PipelineRunner):
        return runner
    if not isinstance(runner, str):
        raise OptionsError(
            f"runner: found {runner!r}, expected 'local', the name of a Beam runner or an instance"
        )
    try:
        return spec_of(runner).create(runner)
    except OptionsError:  # of missing packages
        raise
    except (ValueError, ImportError, AttributeError) as error:
        raise OptionsError(
            f"runner: found {runner!r}, expected 'local', {', '.join(map(repr, NAMES))} or "
            f"another name that Beam knows ({error})"
        ) from error


def _check_named(runner: Any, flags: PipelineOptions) -> None:
    """Raises OptionsError if options name another runner."""
    named = flags.view_as(StandardOptions).runner
    if named is not None and not isinstance(runner, type(make_runner(named))):
        raise OptionsError(
            f"options: found runner {named!r}, but the run is on {type(runner).__name__}; give the "
            f"runner as run(..., runner={named!r})"
        )


def _flags_of(options: Options) -> PipelineOptions:
    """Beam's options as they are given."""
    if isinstance(options.beam, PipelineOptions):
        return options.beam
    # A list even if it is empty: with None, Beam would read the flags of this process.
    return QuickOptions(list(options.beam))


def _check_stores(flags: PipelineOptions) -> None:
    """Raises OptionsError for addresses and keys that workers would not get."""
    values = flags.view_as(S3Options).get_all_options(drop_default=True)
    for name, variable in _S3_VARIABLES.items():
        if name in values:
            raise OptionsError(
                f"{name}: found in the options of a run, but keys do not travel with a pipeline; "
                f"set {variable} in the environment of this process, and of each pool of workers "
                "before it starts, on every host"
            )


def _check_folder(runner: Any, options: Options, flags: PipelineOptions) -> None:
    """Raises OptionsError for workers on other hosts without a folder that they reach."""
    if options.work_folder or options.checkpoint or options.job_folder:
        return
    if not isinstance(runner, PortableRunner) or loops_back(flags):
        return
    values = flags.get_all_options(drop_default=True)
    for name in ("job_endpoint", "flink_master"):
        host = str(values.get(name, "")).rpartition("://")[2].rpartition(":")[0]
        if host and not processes.is_here(host):
            raise OptionsError(
                f"work_folder: found none, but {name}={values[name]!r} is another host; expected a "
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
