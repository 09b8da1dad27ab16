"""Checks flags of a run that are not beamjax's own: whether Beam knows them."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

from beamjax._text import hint
from beamjax.errors import OptionsError
from beamjax.options import OWN

_ALL_IN_PYTHON = ("local", "direct", "fnapi", "dataflow")

_SLIP = 0.8
"""Similarity (of `difflib`) to a known name above which an unknown flag is refused as a typing
error. `memroy` has 0.83 to `memory`; `checkpointing_interval`, a flag of Flink, has only 0.71 to
`checkpoint`."""


def check_flags(flags: Sequence[str], runner: str, others: Sequence[str] = ()) -> None:
    """Refuses unknown flags.

    Beam's Python has all flags of its in-memory runner and of Dataflow; a run in this process takes
    the same ones. Job servers have more of their own, so for other runners only what is nearly the
    name of a known flag is refused.

    Args:
      flags: such as `--direct_num_workers=2`; none of beamjax's own.
      runner: its name.
      others: further names for suggestions.

    Raises:
      OptionsError: a flag is unknown, or Beam does not take its value.
    """
    if not flags:
        return
    known = PipelineOptions([]).get_all_options()
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            found = PipelineOptions(list(flags)).get_all_options(retain_unknown_options=True)
    except SystemExit:
        reason = complaint.getvalue().strip().rpartition("error: ")[2]
        raise OptionsError(f"options: Beam does not take these flags: {reason}") from None
    complete = runner.lower().removesuffix("runner") in _ALL_IN_PYTHON
    for name in found.keys() - known.keys():
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


class ClusterOptions(PipelineOptions):
    """Options of beamjax that are given like Beam's own."""

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--flink_cluster",
            help="Folder of a cluster that `beamjax flink up` started; runner='FlinkRunner' uses "
            "the one in its default folder if it runs.",
        )
        parser.add_argument(
            "--pipeline_timeout",
            type=float,
            help="Seconds after which one pipeline on Prism, Flink or Spark is cancelled; a run "
            "with control flow may be several pipelines. By default they may take any time.",
        )
        # A flag of Flink's job server; Beam's Python would warn that it does not know it.
        parser.add_argument(
            "--execution_mode_for_batch",
            help="How Flink passes data between steps: PIPELINED or BATCH_FORCED.",
        )


class QuickOptions(PipelineOptions):
    """The same options; all requests for a view of one type get the same one.

    Views share their values in any case: what is set in one is seen in all.
    """

    def __init__(self, flags: list[str]):
        # Beam's class refuses to set attributes that are not options.
        self.__dict__["_views"] = {}
        super().__init__(flags)

    def view_as(self, cls: Any) -> Any:
        """As in `PipelineOptions`."""
        views: dict[Any, Any] = self.__dict__["_views"]
        if cls not in views:
            views[cls] = super().view_as(cls)
        return views[cls]
