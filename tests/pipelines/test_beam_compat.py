"""What `_beam_compat` uses of Beam is there, in the shape that it expects.

A case fails by its name when an upgrade of Beam removes or changes what it names.
"""

import ast
import importlib
import inspect
import threading
from pathlib import Path

import pytest

import beamjax
from beamjax import _beam_compat

RUNNERS = "apache_beam.runners.portability"
WORKER = "apache_beam.runners.worker.sdk_worker:SdkHarness"
ENVIRONMENTS = "apache_beam.transforms.environments"


def takes(*names):
    """Expects a callable with parameters that begin with these."""

    def check(found):
        assert tuple(inspect.signature(found).parameters)[: len(names)] == names

    return check


def accepts(*names):
    """Expects a callable that takes these parameters by name, wherever they are."""

    def check(found):
        assert set(names) <= set(inspect.signature(found).parameters)

    return check


def names(*attributes):
    """Expects a function whose code uses these attributes or globals."""

    def check(found):
        assert set(attributes) <= set(found.__code__.co_names)

    return check


def holds(*texts):
    """Expects code with these constants, or parts of them."""

    def check(found):
        source = inspect.getsource(found)
        assert not [text for text in texts if text not in source]

    return check


def is_a(kind):
    """Expects a value of this type."""

    def check(found):
        assert isinstance(found, kind)

    return check


USED = [
    (f"{RUNNERS}.fn_api_runner:FnApiRunner.run_via_runner_api",
     takes("self", "pipeline_proto", "options")),
    (f"{RUNNERS}.fn_api_runner:FnApiRunner.__init__", names("_default_environment")),
    (f"{RUNNERS}.fn_api_runner:FnApiRunner",
     holds("'%s -m apache_beam.runners.worker.sdk_worker_main'")),
    (f"{RUNNERS}.flink_runner:FlinkRunner", is_a(type)),
    (f"{RUNNERS}.spark_runner:SparkRunner", is_a(type)),
    (f"{RUNNERS}.portable_runner:PortableRunner", is_a(type)),
    (f"{RUNNERS}.prism_runner:PrismRunner.create_job_service_handle",
     takes("self", "job_service", "options")),
    (f"{RUNNERS}.portable_runner:JobServiceHandle.__init__", names("timeout")),
    (f"{RUNNERS}.portable_runner:PipelineResult.cancel", takes("self")),
    (f"{RUNNERS}.portable_runner:PipelineResult.wait_until_finish", takes("self", "duration")),
    (f"{RUNNERS}.prism_runner:PrismJobServer.__init__", takes("self", "options")),
    (f"{RUNNERS}.prism_runner:PrismJobServer.path_to_binary", takes("self")),
    (f"{RUNNERS}.prism_runner:PrismJobServer.local_bin", takes("url")),
    (f"{ENVIRONMENTS}:EmbeddedPythonEnvironment", is_a(type)),
    (f"{ENVIRONMENTS}:EmbeddedPythonGrpcEnvironment", is_a(type)),
    (f"{ENVIRONMENTS}:python_sdk_dependencies", takes("options", "tmp_dir")),
    (f"{ENVIRONMENTS}:SubprocessSDKEnvironment.from_options", names("python_sdk_dependencies")),
    ("apache_beam.portability.python_urns:SUBPROCESS_SDK", is_a(str)),
    ("apache_beam.runners.worker.sdk_worker_main:main", takes("unused_argv")),
    (f"{WORKER}.__init__",
     accepts("control_address", "worker_id", "state_cache_size", "data_buffer_time_limit_ms")),
    (f"{WORKER}.__init__",
     names("_responses", "_data_channel_factory", "_state_handler_factory",
           "_bundle_processor_cache", "_control_channel")),
    (f"{WORKER}.run", takes("self")),
    (f"{WORKER}._execute", holds("print(traceback_string, file=sys.stderr)")),
    ("apache_beam.runners.worker.data_plane:GrpcClientDataChannelFactory.close", takes("self")),
    ("apache_beam.runners.worker.sdk_worker:GrpcStateHandlerFactory.close", takes("self")),
    ("apache_beam.runners.worker.sdk_worker:BundleProcessorCache.shutdown", takes("self")),
    ("apache_beam.utils.sentinel:Sentinel.sentinel", is_a(object)),
    ("apache_beam.utils.thread_pool_executor:shared_unbounded_instance", takes()),
    ("apache_beam.portability.api:beam_fn_api_pb2.StartWorkerResponse", is_a(type)),
    ("apache_beam.portability.api:beam_fn_api_pb2.StopWorkerResponse", is_a(type)),
    ("apache_beam.portability.api:beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolServicer.StartWorker",
     takes("self", "request", "context")),
    ("apache_beam.portability.api:beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolServicer.StopWorker",
     takes("self", "request", "context")),
    ("apache_beam.portability.api:"
     "beam_fn_api_pb2_grpc.add_BeamFnExternalWorkerPoolServicer_to_server",
     takes("servicer", "server")),
    (f"{RUNNERS}.fn_api_runner.worker_handlers:grpc.server", takes("thread_pool")),
    (f"{RUNNERS}.local_job_service:grpc.server", takes("thread_pool")),
    ("apache_beam.runners.worker.worker_pool_main:grpc.server", takes("thread_pool")),
    (f"{RUNNERS}.local_job_service:SubprocessSdkWorker.__init__", names("_control_address")),
    (f"{RUNNERS}.local_job_service:SubprocessSdkWorker.run", takes("self")),
    (f"{RUNNERS}.fn_api_runner.worker_handlers:SubprocessSdkWorkerHandler",
     holds(f"name='{_beam_compat.WORKER_THREAD}', target=self.worker.run")),
    ("apache_beam.transforms.core:get_function_args_defaults", takes("f")),
    ("apache_beam.transforms.core:get_function_arguments", holds(f"'{_beam_compat.INSPECT}%s'")),
    ("apache_beam.transforms.ptransform:PTransform.pipeline", is_a(type(None))),
    ("apache_beam.transforms.ptransform:_NamedPTransform.__init__",
     takes("self", "transform", "label")),
    ("apache_beam.transforms.ptransform:_NamedPTransform.__init__", names("transform")),
    ("apache_beam.transforms.ptransform:_ChainedPTransform.__init__", names("_parts")),
    ("apache_beam.pipeline:Pipeline.__init__", names("local_tempdir")),
    ("apache_beam.options.pipeline_options:PipelineOptions._add_argparse_args", takes("parser")),
    ("apache_beam.options.pipeline_options:StandardOptions._add_argparse_args", takes("parser")),
    ("apache_beam.utils.interactive_utils:is_in_ipython", takes()),
    ("apache_beam.io.gcp.internal.clients.bigquery", holds(_beam_compat.MISSING_PACKAGES)),
]  # fmt: skip


def found_in_beam(path):
    module, _, attributes = path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, attributes.split(".")):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(
    ("path", "check"), USED, ids=[f"{path}-{i}" for i, (path, _) in enumerate(USED)]
)
def test_beam_still_has_it(path, check):
    check(found_in_beam(path))


def test_dataflow_still_has_it():
    pytest.importorskip("google.auth")
    pytest.importorskip("apitools")
    client = _beam_compat.DataflowApplicationClient
    takes("self", "options", "root_staging_location")(client.__init__)
    takes("self", "job")(client.create_job_description)


@pytest.mark.parametrize("name", [*_beam_compat.ERROR_LOGGERS, _beam_compat.INTERACTIVE])
def test_beam_still_has_the_module(name):
    assert importlib.util.find_spec(name) is not None


def test_each_name_is_in_the_table():
    listed = [path for path, _ in USED]
    missing = [
        name for name, path in _beam_compat.NAMES.items()
        if name != "DataflowApplicationClient" and not any(p.startswith(path) for p in listed)
    ]  # fmt: skip
    assert not missing
    for name in _beam_compat.NAMES.keys() - {"DataflowApplicationClient"}:
        assert getattr(_beam_compat, name) is found_in_beam(_beam_compat.NAMES[name])
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _beam_compat.nothing  # noqa: B018


def test_other_threads_have_no_control_address():
    assert _beam_compat.control_address(threading.current_thread()) is None


PUBLIC = (
    "apache_beam", "apache_beam.coders", "apache_beam.io.filesystem", "apache_beam.io.filesystems",
    "apache_beam.metrics", "apache_beam.ml.inference.base",
    "apache_beam.options.pipeline_options", "apache_beam.pvalue",
    "apache_beam.transforms.window", "apache_beam.typehints.decorators",
    "apache_beam.utils.timestamp", "apache_beam.utils.windowed_value", "apache_beam.version",
)  # fmt: skip
"""Modules of Beam that other files may import."""


def product():
    package = Path(beamjax.__file__).parent
    roots = [package, package / "interpreters", package / "pipelines"]
    return sorted({file.resolve() for root in roots for file in root.rglob("*.py")})


def imports_of(tree):
    """The modules of Beam that a file imports, and those with a private name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("apache_beam"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("apache_beam"):
            yield node.module
            for alias in node.names:
                if alias.name.startswith("_") and not alias.name.startswith("__"):
                    yield f"{node.module}.{alias.name}"


def test_no_other_file_imports_what_beam_does_not_document():
    files = [file for file in product() if file.name != "_beam_compat.py"]
    assert len(files) > 250
    found = {
        f"{file.name}: {name}"
        for file in files
        for name in imports_of(ast.parse(file.read_text(encoding="utf-8")))
        if name not in PUBLIC
    }
    assert not found
