"""The only file that uses undocumented parts of Beam: modules of its runners and workers, and
attributes that start with `_`. Tested on Beam 2.77.0.
"""

# `tests/pipelines/test_beam_compat.py` checks each of these names, so it fails if an upgrade of
# Beam removes or changes one. The end of each description, after the semicolon, says what no longer
# works in that case. The file is in the lowest layer, like `_compat` for JAX, because `storage`
# needs one of the names.
#
# Beam is imported only when one of the names is used. `log_filters` must run before that, and a
# starting worker needs few of the names.

from __future__ import annotations

import copy
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

_RUNNERS = "apache_beam.runners.portability"
_WORKER = "apache_beam.runners.worker"

NAMES = {
    # Beam's in-memory runner, whose worker command `direct` replaces; no run on it works without.
    "FnApiRunner": f"{_RUNNERS}.fn_api_runner:FnApiRunner",
    # Makes `connect` start a job server of Flink; no run on Flink works without.
    "FlinkRunner": f"{_RUNNERS}.flink_runner:FlinkRunner",
    # Lists which runners have a job server and may loop back; `connect` can't be imported without.
    "PortableRunner": f"{_RUNNERS}.portable_runner:PortableRunner",
    # Beam's runner for Prism, whose time limit `prism` lifts; no run on Prism works without.
    "PrismRunner": f"{_RUNNERS}.prism_runner:PrismRunner",
    # Makes `connect` start a job server of Spark; no run on Spark works without.
    "SparkRunner": f"{_RUNNERS}.spark_runner:SparkRunner",
    # A running job on a job server; without it, timeouts and lost clusters go unnoticed.
    "PipelineResult": f"{_RUNNERS}.portable_runner:PipelineResult",
    # Finds or downloads a Prism that an option names; without it, only beamjax's own build runs.
    "PrismJobServer": f"{_RUNNERS}.prism_runner:PrismJobServer",
    # Workers in the launcher's process; without it, values in memory can't be shared with them.
    "EmbeddedPythonEnvironment": "apache_beam.transforms.environments:EmbeddedPythonEnvironment",
    # The same with gRPC between runner and worker (direct_running_mode=multi_threading).
    "EmbeddedPythonGrpcEnvironment":
        "apache_beam.transforms.environments:EmbeddedPythonGrpcEnvironment",
    # The URN of workers that are processes; without it, they outlive a launcher that was killed.
    "SUBPROCESS_SDK": "apache_beam.portability.python_urns:SUBPROCESS_SDK",
    # Runs a worker process; without it, direct_running_mode=multi_processing fails.
    "sdk_worker_main": f"{_WORKER}.sdk_worker_main:main",
    # One worker of `worker_pool`; without it, Flink clusters of `beamjax flink up` have no workers.
    "SdkHarness": f"{_WORKER}.sdk_worker:SdkHarness",
    # The messages by which a runner asks `worker_pool` for a worker; as above.
    "beam_fn_api_pb2": "apache_beam.portability.api:beam_fn_api_pb2",
    # The service of these messages; as above.
    "beam_fn_api_pb2_grpc": "apache_beam.portability.api:beam_fn_api_pb2_grpc",
    # Threads without a limit, so that no worker of `worker_pool` waits for another; as above.
    "shared_unbounded_instance":
        "apache_beam.utils.thread_pool_executor:shared_unbounded_instance",
    # Finds the parameters of a DoFn's method, which `signatures` caches; no DoFn works without.
    "get_function_args_defaults": "apache_beam.transforms.core:get_function_args_defaults",
    # Raised where Beam needs its interactive packages; without it, notebooks get Beam's own error.
    "is_in_ipython": "apache_beam.utils.interactive_utils:is_in_ipython",
    # Describes a job as Dataflow would get it; without it, `dataflow.dry_run` fails.
    "DataflowApplicationClient":
        "apache_beam.runners.dataflow.internal.apiclient:DataflowApplicationClient",
}  # fmt: skip
"""Where each name is in Beam, as `module:attribute`; each is an attribute of this module."""

INTERACTIVE = "apache_beam.runners.interactive.interactive_environment"
"""Beam imports it in IPython for each pipeline; renamed, notebooks get Beam's own error."""

ERROR_LOGGERS = (
    "apache_beam.runners.common",
    f"{_WORKER}.sdk_worker",
    f"{_RUNNERS}.local_job_service",
)
"""Loggers to which Beam reports the errors of a DoFn; renamed, cancelled jobs fill the log."""

CONNECTION_LOGGERS = (f"{_WORKER}.data_plane", f"{_RUNNERS}.fn_api_runner.worker_handlers")
"""Loggers to which Beam reports closed connections; renamed, such reports fill the log."""

KILLED_WORKER = "Worker subprocess exited with return code -9"
"""The error of the thread that waits for a worker process that was killed; changed, it is shown."""

MISSING_PACKAGES = "apitools not found"
"""How Beam's warning about Google's packages begins; changed, each run without them shows it."""

WORKER_THREAD = "run_worker"
"""Names the threads that wait for worker processes; renamed, a run hangs if one dies early."""

INSPECT = "_inspect_"
"""Beam asks a DoFn's `_inspect_METHOD` for its parameters; renamed, it inspects each one again."""


def __getattr__(name: str) -> Any:
    """Imports a name of Beam when it is first used."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = NAMES[name].partition(":")
    return getattr(import_module(module), attribute)


def worker_command() -> str:
    """Beam's command of a worker process; changed, workers outlive a launcher that was killed."""
    return f"{sys.executable} -m {_WORKER}.sdk_worker_main"


def default_environment(runner: Any) -> Any:
    """Where an in-memory runner has its workers; without it, their shared memory is not known."""
    return runner._default_environment


def listen_without_limit(handle: Any) -> Any:
    """Lifts the limit of a job service handle; without it, Prism's jobs end after 60 seconds."""
    handle.timeout = None
    return handle


def server_modules() -> tuple[Any, ...]:
    """Modules that open servers by their global `grpc`; without them, other machines reach them."""
    # `loopback` replaces the global.
    names = ("fn_api_runner.worker_handlers", "local_job_service")
    modules = [import_module(f"{_RUNNERS}.{name}") for name in names]
    return (*modules, import_module(f"{_WORKER}.worker_pool_main"))


def redirect_submission_files(folder: Callable[[], str | None]) -> None:
    """Makes Beam submit from folders in `folder()`; without it, these are never removed."""
    # If that is None, Beam makes them where it likes.
    from apache_beam.transforms import environments

    original = environments.python_sdk_dependencies

    def dependencies(options: Any, tmp_dir: str | None = None) -> Any:
        if tmp_dir is None and (parent := folder()) is not None:
            tmp_dir = tempfile.mkdtemp(dir=parent)
        return original(options, tmp_dir)

    environments.python_sdk_dependencies = dependencies


def temporary_folder(pipeline: Any) -> str:
    """The folder that Beam makes with a pipeline; without it, one stays for each that fails."""
    folder: str = pipeline.local_tempdir
    return folder


def control_address(thread: threading.Thread) -> str | None:
    """Where the worker process of a `WORKER_THREAD` gets its work; None once it has ended."""
    # Without this name, runs that hang look like any other.
    worker = getattr(getattr(thread, "_target", None), "__self__", None)
    return getattr(worker, "_control_address", None)


def print_errors_with(show: Callable[..., None]) -> None:
    """Has workers print errors with `show`; without it, cancelled jobs print tracebacks."""
    vars(import_module(f"{_WORKER}.sdk_worker"))["print"] = show


def end_worker(worker: Any) -> None:
    """Ends a `SdkHarness` as Beam's own pool does; without it, ended jobs leave their workers."""
    from apache_beam.utils.sentinel import Sentinel

    worker._responses.put(Sentinel.sentinel)


def close_worker(worker: Any) -> None:
    """Closes what a `SdkHarness` leaves open when it fails; without it, the pool leaks sockets."""
    worker._data_channel_factory.close()
    worker._state_handler_factory.close()
    worker._bundle_processor_cache.shutdown()


def close_control_channel(worker: Any) -> None:
    """Closes the connection of an ended `SdkHarness`; without it, the pool leaks sockets."""
    worker._control_channel.close()


def unused_transform(transform: Any) -> Any:
    """A copy that no pipeline has applied; without it, `from_beam` works once per transform."""
    # Beam applies a transform in a single pipeline only, which it notes in the transform.
    from apache_beam.transforms.ptransform import _ChainedPTransform, _NamedPTransform

    if isinstance(transform, _NamedPTransform):
        return _NamedPTransform(unused_transform(transform.transform), transform.label)
    own = copy.copy(transform)
    own.pipeline = None
    if isinstance(own, _ChainedPTransform):
        own._parts = tuple(map(unused_transform, own._parts))
    return own
