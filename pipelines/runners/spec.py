"""What beamjax knows of a Beam runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from beamjax.errors import BeamjaxError
from beamjax.options import Options

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

Look = Callable[[], BeamjaxError | None]
"""Checks a running pipeline; returns or raises an error if the pipeline must end."""


class RunnerSpec:
    """What beamjax knows of a Beam runner. This class serves any runner, cautiously.

    A runner that needs more has a subclass in a module of its own, and an entry in `table.py`. Its
    methods import Beam, not its module: names and threads of runners are also needed without Beam.

    Attributes:
      name: the name by which users choose the runner.
      class_name: the name of the class of its instances, if it is another one.
      in_this_process: whether the runner itself runs in this process.
      holds_elements: whether it holds the output of a step in memory until another step can start.
      one_bundle: whether it gives a worker one bundle at a time.
      replaces_workers: whether it notices that a worker process died, and starts another one.
      outlives_launcher: whether its workers may be on other hosts, and end if that of the launcher
        dies. Not for Dataflow, whose launcher is often a laptop that may sleep for a while.
      seconds_alone: seconds after which a job whose workers all died starts again, the first time.
      all_flags_known: whether Beam's Python SDK knows all of its flags.
    """

    name = ""
    class_name = ""
    in_this_process = False
    holds_elements = False
    one_bundle = False
    replaces_workers = True
    outlives_launcher = False
    seconds_alone = 30.0
    all_flags_known = False

    def create(self, name: str) -> Any:
        """A new instance of the runner with this name.

        Raises:
          ValueError, ImportError, AttributeError: Beam can't import it.
        """
        import apache_beam as beam

        return beam.runners.create_runner(name)

    def connect(
        self, options: Options, flags: PipelineOptions, dry: bool = False
    ) -> tuple[Options, PipelineOptions]:
        """Completes the options of a run. A job server that the runner needs is started.

        Args:
          options: beamjax's options.
          flags: Beam's options.
          dry: whether nothing will be run, so that no credentials are needed.

        Raises:
          OptionsError: an option does not fit the runner, or the runner is not available.
        """
        return options, flags

    def attach(self, options: Options, flags: PipelineOptions) -> Options:
        """Completes the options of a `transform` in a user's own pipeline.

        Raises:
          OptionsError: workers can't reach the `work_folder`.
        """
        return options

    def shares_memory(self, runner: Any, flags: PipelineOptions) -> bool:
        """Whether workers are threads of this process, also if it does not wait for them."""
        return False

    def has_several_workers(self, flags: PipelineOptions) -> bool:
        """Whether elements must be distributed to several workers."""
        return True

    def workers(self, flags: Mapping[str, Any]) -> tuple[bool, int]:
        """Whether the launching process is the worker, and the threads of a worker process.

        Args:
          flags: Beam's options by name, as they are given.
        """
        return False, 1

    def missing(self) -> str:
        """What this machine lacks to use the runner, and what to do; "" if nothing."""
        return ""

    # --- a running pipeline

    def begin(self, flags: PipelineOptions) -> None:
        """Prepares the options of a new pipeline."""

    def progress(self, flags: PipelineOptions, attempts: int = 3) -> Look:
        """A look for the reason why a pipeline does not get on.

        Args:
          flags: the options of the pipeline.
          attempts: the number of failures of a worker after which it counts as unreachable.
        """
        return lambda: None

    def goes_on(self, flags: PipelineOptions) -> bool:
        """Whether the job of a pipeline goes on though its job server is gone."""
        return False

    def wait(self, flags: PipelineOptions) -> None:
        """Waits for the end of a job that goes on.

        Raises:
          RuntimeError: it failed.
        """

    def gone(self, flags: PipelineOptions) -> BeamjaxError | None:
        """The error of a cluster that does not answer any more, after a pipeline failed."""
        return None

    def cancel(self, flags: PipelineOptions) -> None:
        """Ends the job of a pipeline, if Beam's own cancellation may leave it running."""


def number(flags: Mapping[str, Any], name: str, default: int) -> int:
    """A flag as a number, or the default; Beam refuses other text later."""
    text = str(flags.get(name, default))
    return int(text) if text.isdigit() else default


def names_job_server(flags: Mapping[str, Any], name: str) -> bool:
    """Whether options name a job server."""
    names = ("job_endpoint", f"{name}_job_server_jar", f"{name}_submit_uber_jar")
    return any(flags.get(flag) for flag in names)
