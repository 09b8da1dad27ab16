"""One graph on a Beam runner, to its end."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from beamjax import errors
from beamjax.errors import BeamjaxError
from beamjax.options import Options
from beamjax.pipelines import build
from beamjax.pipelines.store import Ref, Store
from beamjax.pipelines.tasks import StoredBody
from beamjax.pipelines.values import Value
from beamjax.plan import Plan


@dataclass
class Launcher:
    """Runs plans without control flow, each as one pipeline.

    Attributes:
      runner: of Beam.
      flags: Beam's options.
      store: where values are, before and after.
      options: `reduction`.
      shared: whether workers are threads of this process.
      spread: whether there are several workers to which shards must be dealt.
      program: what workers make the bodies from that run as Python.
      bodies: those that are in the store.
    """

    runner: Any
    flags: PipelineOptions
    store: Store
    options: Options
    shared: bool
    spread: bool
    program: Ref | None = None
    bodies: dict[str, StoredBody] = field(default_factory=dict)

    def run(self, plan: Plan, inputs: build.Inputs, stem: str) -> dict[str, Value]:
        """Runs a pipeline and waits for it.

        Args:
          plan: the steps, and as outputs the values that are wanted.
          inputs: what the steps read.
          stem: of the names of the files with the results.

        Returns:
          The outputs that steps compute, by name.

        Raises:
          WorkerError: a body failed.
        """
        inputs = replace(inputs, program=self.program)
        pipeline = beam.Pipeline(runner=self.runner, options=self.flags)
        try:
            graph = build.Graph(
                pipeline, plan, inputs, self.store, self.options, self.spread, self.bodies
            )
            graph.build()
            graph.write_results(stem)
            run_pipeline(pipeline)
            return graph.find_results(stem)
        finally:
            # Beam makes this folder at once, and removes it only if the pipeline gets to run.
            shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)


def run_pipeline(pipeline: beam.Pipeline) -> None:
    """Runs a pipeline and waits for it; raises the errors of beamjax as they are."""
    with _own_errors():
        pipeline.run().wait_until_finish()


_TOLD = re.compile(r"beamjax\.errors\.(\w+): (.*?)(?=\n\S*Traceback|\n\n|\\n|\Z)", re.S)


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Makes errors of beamjax again of those that come as text, from workers elsewhere."""
    try:
        yield
    except BeamjaxError:
        raise
    except RuntimeError as error:
        told = _TOLD.search(str(error))
        kind = getattr(errors, told[1], None) if told else None
        if told is None or kind is None:
            raise
        raise kind(told[2].strip()) from error
