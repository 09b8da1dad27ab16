"""Pipelines that users write, on runners as beamjax names and connects them."""

from __future__ import annotations

from typing import Any

import apache_beam as beam

from beamjax._beam_compat import temporary_folder
from beamjax.errors import OptionsError
from beamjax.options import Options
from beamjax.pipelines.runners import submission_files
from beamjax.pipelines.runners.connect import connect
from beamjax.pipelines.runners.loopback import loopback_only


class OwnPipeline(beam.Pipeline):
    """A pipeline of Beam for which nothing of this process listens beyond loopback addresses."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with loopback_only(), submission_files.made_in(temporary_folder(self)):
            return super().run(*args, **kwargs)


def own_pipeline(runner: Any, options: Options) -> OwnPipeline:
    """An empty pipeline; see `beamjax.pipeline`."""
    found = [name for name, value in vars(options).items() if value != getattr(Options, name, ())]
    if misplaced := [name for name in found if name != "beam"]:
        raise OptionsError(
            f"{misplaced[0]}: found in the options of a pipeline, which are Beam's; give it to "
            "beamjax.transform in the pipeline"
        )
    connection = connect(runner, options)
    return OwnPipeline(connection.runner, connection.flags)
