"""What beamjax adds to Beam's options for runners that are servers of their own."""

from __future__ import annotations

import argparse

from apache_beam.options.pipeline_options import PipelineOptions


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
        # The job server of Flink takes it; Beam's Python would warn that it is not known.
        parser.add_argument(
            "--execution_mode_for_batch",
            help="How Flink passes data between steps: PIPELINED or BATCH_FORCED.",
        )
