"""Beam's in-memory runner, with worker processes that end when their launcher ends."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

from beamjax import _beam_compat
from beamjax.pipelines.worker import direct_worker


class FnApiRunner(_beam_compat.FnApiRunner):
    """Beam's runner, whose workers in the mode `multi_processing` watch their launcher."""

    # Otherwise a worker that is starting while its launcher is killed would wait in Beam for a
    # minute for each of two connections.

    def run_via_runner_api(self, pipeline_proto: Any, options: PipelineOptions) -> Any:
        """Runs a pipeline."""
        usual = _beam_compat.worker_command().encode()
        for environment in pipeline_proto.components.environments.values():
            if (environment.urn, environment.payload) == (_beam_compat.SUBPROCESS_SDK, usual):
                environment.payload = _command() or usual
        return super().run_via_runner_api(pipeline_proto, options)


def _command() -> bytes | None:
    """The command of a worker; None on systems where a process can't find its parent."""
    if os.name != "posix":
        return None
    words = [sys.executable, "-m", direct_worker.__name__, str(os.getpid())]
    # Beam runs the command in a shell. Without `exec`, the shell would be the parent of the worker,
    # and Beam would kill it instead of the worker. Ctrl-C also reaches workers, which would die
    # with tracebacks while the launcher cancels the job.
    return f"trap '' INT; exec {shlex.join(words)}".encode()
