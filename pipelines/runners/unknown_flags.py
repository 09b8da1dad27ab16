"""Refuses flags of Beam that no runner knows."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

from apache_beam.options.pipeline_options import PipelineOptions

from beamjax._text import hint
from beamjax.errors import OptionsError
from beamjax.options import OWN
from beamjax.pipelines.clusters.flags import ClusterOptions
from beamjax.pipelines.runners.runner_table import spec_of

_SLIP = 0.8
"""Similarity (by `difflib`) to a known name from which an unknown flag is refused as a typing
error. `memroy` and `memory` have 0.83, but Flink's flag `checkpointing_interval` and `checkpoint`
only 0.71."""


def check_flags(flags: Sequence[str], runner: str, others: Sequence[str] = ()) -> None:
    """Raises OptionsError for flags of Beam that are unknown, or whose value Beam refuses."""
    if not flags:
        return
    # Beam's Python SDK knows all flags of its in-memory runner and of Dataflow. A run in this
    # process accepts the same flags. Job servers have further flags that it does not know, so for
    # other runners a flag is only refused if its name is close to that of a known flag.
    complete = runner == "local" or spec_of(runner).all_flags_known
    # Beam takes the flags of all classes that are imported.
    known = PipelineOptions([]).view_as(ClusterOptions).get_all_options()
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            values = PipelineOptions(list(flags)).get_all_options(retain_unknown_options=True)
    except SystemExit:
        reason = complaint.getvalue().strip().rpartition("error: ")[2]
        raise OptionsError(f"options: Beam does not take these flags: {reason}") from None
    for name in values.keys() - known.keys():
        close = hint(name, [*OWN, *known, *others], 0.6 if complete else _SLIP)
        if complete or close:
            more = "" if complete else (
                f" If the job server of {runner} has an option {name!r}, give the flags as a Beam "
                "PipelineOptions, which is not checked."
            )  # fmt: skip
            raise OptionsError(
                f"options: found {name!r}, expected an option of beamjax (see beamjax.Options) or "
                f"one of Beam{close}{more}"
            )
