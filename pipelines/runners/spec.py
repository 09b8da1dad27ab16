"""What beamjax knows of a Beam runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from beamjax.errors import BeamjaxError, OptionsError
from beamjax.options import Options

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

Look = Callable[[], BeamjaxError | None]
"""Checks a running pipeline; returns or raises an error if the pipeline must end."""


class RunningJob:
    """The job of a running pipeline, as its runner knows it. This class asks no runner."""

    def look(self, attempts: int = 3) -> Look:
        """Looks why the job does not get on; a worker is unreachable after so many failures."""
        return lambda: None

    def goes_on(self) -> bool:
        """Whether the job goes on though its job server is gone."""
        return False

    def wait(self) -> None:
        """Waits for the end of a job that goes on; RuntimeError if it fails."""

    def gone(self) -> BeamjaxError | None:
        """The error of a cluster that does not answer any more, after the pipeline failed."""
        return None

    def cancel(self) -> None:
        """Ends the job, if Beam's own cancellation may leave it running; warns if it goes on."""


class RunnerSpec:
    """What beamjax knows of a Beam runner. This class serves any runner, cautiously."""

    # A runner that needs more has a subclass in a module of its own, and an entry in
    # `runner_table.py`. Its methods import Beam, not its module: names and threads of runners are
    # also needed without Beam.

    name = ""  # by which users choose the runner
    class_name = ""  # of its instances, if it is another one
    in_this_process = False  # the runner itself runs in this process
    holds_elements = False  # it holds the output of a step in memory until another step can start
    one_bundle = False  # it gives a worker one bundle at a time
    replaces_workers = True  # it notices that a worker process died, and starts another one
    # Its workers may be on other hosts, and end if that of the launcher dies. Not for Dataflow,
    # whose launcher is often a laptop that may sleep for a while.
    outlives_launcher = False
    seconds_alone = 30.0  # until a job whose workers all died starts again, the first time
    all_flags_known = False  # Beam's Python SDK knows all of its flags
    packages: tuple[str, ...] = ()  # modules that it needs besides those that Beam always has
    install = ""  # the command that installs them

    def create(self, name: str) -> Any:
        """A new instance of the runner with this name; OptionsError without its packages."""
        import apache_beam as beam

        if not self._has_packages():
            raise OptionsError(
                f"runner: found {name!r}, but its packages are missing; run {self.install}"
            )
        return beam.runners.create_runner(name)

    def connect(
        self, options: Options, flags: PipelineOptions, dry: bool = False
    ) -> tuple[Options, PipelineOptions]:
        """Completes the options of a run. A job server that the runner needs is started."""
        # With `dry`, nothing will be run, so no credentials are needed.
        return options, flags

    def attach(self, options: Options, flags: PipelineOptions) -> Options:
        """Completes the options of a `transform` in a user's own pipeline."""
        return options

    def shares_memory(self, runner: Any, flags: PipelineOptions) -> bool:
        """Whether workers are threads of this process, also if it does not wait for them."""
        return False

    def has_several_workers(self, flags: PipelineOptions) -> bool:
        """Whether elements must be distributed to several workers."""
        return True

    def workers(self, flags: Mapping[str, Any]) -> tuple[bool, int]:
        """Whether the launching process is the worker, and the threads of a worker process."""
        return False, 1

    def missing(self) -> str:
        """What to do, for `beamjax doctor`, to use the runner on this machine; "" if nothing."""
        return "" if self._has_packages() else f"run {self.install}"

    def _has_packages(self) -> bool:
        return all(map(find_spec, self.packages))

    def begin(self, flags: PipelineOptions) -> None:
        """Prepares the options of a new pipeline."""

    def job(self, flags: PipelineOptions) -> RunningJob:
        """The job of a pipeline with these options that runs."""
        return RunningJob()


def number(flags: Mapping[str, Any], name: str, default: int) -> int:
    """A flag as a number, or the default; Beam refuses other text later."""
    text = str(flags.get(name, default))
    return int(text) if text.isdigit() else default
