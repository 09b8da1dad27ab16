"""A run on Google Cloud Dataflow without Google's service: the job as it would be sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from beamjax.call import by_position, parsed_options
from beamjax.execution import plan, stage


@dataclass(frozen=True)
class DryRun:
    """A job that was not sent.

    Attributes:
      job: the job that Dataflow would receive, as JSON: machines, experiments, images, options.
      pipeline: of the job, a protocol buffer `org.apache.beam.model.pipeline.v1.Pipeline`.
      files: bytes of each file that would be written to the work folder, by name.
    """

    job: dict[str, Any]
    pipeline: Any
    files: Mapping[str, int]

    @property
    def steps(self) -> list[str]:
        """The names of the transforms."""
        found = self.pipeline.components.transforms.values()
        return [transform.unique_name for transform in found if transform.unique_name]


@by_position
def dry_run(fn: Callable[..., Any], *args: Any, options: Any = None) -> DryRun:
    """Makes the job that `run(fn, *args, runner="DataflowRunner")` would send first.

    Takes no account, no network and no machine of Google: only `pip install 'beamjax[dataflow]'`.
    A function with control flow around placed operators is run as several jobs, of which this is
    the first.

    Args:
      fn: as for `run`.
      *args: as for `run`.
      options: as for `run`.

    Raises:
      OptionsError: an option is missing or contradicts another one.
      StagingError, PlacementError, StructureError, SourceError: as by `run`.
    """
    parsed = parsed_options(options, "DataflowRunner")
    call = plan(stage("run", fn, args), "DataflowRunner", parsed)
    from beamjax.pipelines.dry_run import described, first_job

    job, files = first_job(call.plan, call.values, parsed)
    return DryRun(described(job), job.proto_pipeline, files)
