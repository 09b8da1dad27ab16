"""`dry_run`: the job that a run on Google Cloud Dataflow would submit, made without Google."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from beamjax.call import by_position, parsed_options
from beamjax.errors import StagingError
from beamjax.execution import plan, stage


@dataclass(frozen=True)
class DryRun:
    """A job that was not submitted.

    Attributes:
      job: the job that Dataflow would receive, as JSON: machines, experiments, images, options.
      pipeline: the pipeline of the job, a protocol buffer
        `org.apache.beam.model.pipeline.v1.Pipeline`.
      files: the size in bytes of each file that would be written to the work folder, by name.
    """

    job: dict[str, Any]
    pipeline: Any
    files: Mapping[str, int]

    @property
    def steps(self) -> list[str]:
        """The names of the transforms."""
        transforms = self.pipeline.components.transforms.values()
        return [transform.unique_name for transform in transforms if transform.unique_name]


@by_position
def dry_run(fn: Callable[..., Any], *args: Any, options: Any = None) -> DryRun:
    """Makes the first job that `run(fn, *args, runner="DataflowRunner")` would submit.

    It needs `pip install -e '.[dataflow]'`, but no account, no network and no machine of Google.
    A function with control flow around placed operators runs as several jobs; this is the first.

    Args:
      fn: as for `run`.
      *args: as for `run`.
      options: as for `run`.

    Returns:
      The job, its pipeline, and the sizes of its files.

    Raises:
      OptionsError: an option is missing or contradicts another one.
      StagingError: as for `run`.
      PlacementError: as for `run`.
      StructureError: as for `run`.
      SourceError: as for `run`.
    """
    parsed = parsed_options(options, "DataflowRunner")
    flat = stage("run", fn, args)
    if flat.has_streams:
        raise StagingError(
            "dry_run: found a source of unknown length, the members of which a run counts before "
            "it makes this job; give a source of known length, or an array of some members"
        )
    call = plan(flat, "DataflowRunner", parsed)
    from beamjax.pipelines.dry_run import described, first_job

    job, files = first_job(call.plan, call.values, parsed)
    return DryRun(described(job), job.proto_pipeline, files)
