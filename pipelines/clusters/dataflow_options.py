"""Google Cloud Dataflow: checks and completes its options, and looks for credentials."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    TestOptions,
    WorkerOptions,
)

from beamjax.bodies.load import default_platform
from beamjax.errors import OptionsError
from beamjax.options import Options

_ACCELERATOR = "worker_accelerator="
_ONE_PROCESS = "no_use_multiple_sdk_containers"
_SEVERAL_PROCESSES = "use_nvidia_mps"
_SECONDS_OF_METADATA = 0.5
"""Seconds to wait for a metadata server. Where there is one, it answers much faster."""


def prepare(options: Options, flags: PipelineOptions) -> tuple[Options, PipelineOptions]:
    """The options of a run on Dataflow, checked and completed."""
    flags = copy.deepcopy(flags)  # those of the caller stay as they are
    cloud, setup = flags.view_as(GoogleCloudOptions), flags.view_as(SetupOptions)
    missing = [name for name in ("project", "region", "temp_location") if not getattr(cloud, name)]
    if missing:
        raise OptionsError(f"options: DataflowRunner needs {', '.join(missing)}; found none")
    if flags.view_as(TestOptions).dry_run:
        raise OptionsError(
            "dry_run: a dry run has no results that run could return; call "
            "beamjax.dataflow.dry_run(fn, *args, options=...), which returns the job"
        )
    options = replace(options, work_folder=work_folder(options, flags))
    _check_packages(flags)
    _check_accelerator(options, flags)
    # Steps are pickled by reference to modules of beamjax, and users' callbacks with all that they
    # need, so `__main__` is not needed on workers.
    setup.save_main_session = False
    return options, flags


def check_credentials(flags: PipelineOptions) -> None:
    """Raises OptionsError if there are no credentials."""
    # Without them, Beam would try for minutes to reach the service. This asks the metadata server
    # of a Google Cloud machine, and uses no other network.
    cloud = flags.view_as(GoogleCloudOptions)
    if cloud.no_auth or not find_spec("google.auth"):
        return
    import google.auth
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.auth.transport.requests import Request

    class Impatient(Request):
        """Asks the metadata server once, unless this is a Google Cloud machine."""

        # google-auth asks for many seconds, since the server may be slow on such a machine.
        def __call__(
            self, url: str, method: str = "GET", body: Any = None, headers: Any = None,
            timeout: Any = None, **settings: Any,
        ) -> Any:  # fmt: skip
            is_metadata = any(name.lower() == "metadata-flavor" for name in headers or {})
            if not is_metadata or _is_google_machine():
                return super().__call__(url, method, body, headers, timeout, **settings)
            try:
                return super().__call__(url, method, body, headers, _SECONDS_OF_METADATA)
            except TransportError as error:
                raise _NoMetadataServer("this machine has no metadata server") from error

    try:
        google.auth.default(scopes=cloud.gcp_oauth_scopes, request=Impatient())
    except (GoogleAuthError, _NoMetadataServer) as error:
        raise OptionsError(
            f"runner: found no credentials of Google Cloud for DataflowRunner ({error}); run "
            "`gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to "
            "the path of a key file of a service account"
        ) from error


class _NoMetadataServer(Exception):
    """Ends the search for credentials, since google-auth retries after errors of its own types."""


def _is_google_machine() -> bool:
    """Whether this is a Google Cloud machine, which has a metadata server."""
    try:
        with open("/sys/class/dmi/id/product_name", encoding="utf-8") as file:
            return file.read().startswith("Google")
    except OSError:
        return False


def work_folder(options: Options, flags: PipelineOptions) -> str:
    """The folder for values while a job runs, by default below `temp_location`."""
    folder = options.work_folder
    if folder is None:
        temporary = flags.view_as(GoogleCloudOptions).temp_location or tempfile.gettempdir()
        folder = f"{temporary.rstrip('/')}/beamjax"
    if not folder.startswith("gs://"):
        raise OptionsError(
            f"work_folder: found {folder!r}, expected a folder that workers on Dataflow reach, "
            "gs://BUCKET/FOLDER; leave it out to have one below temp_location"
        )
    return folder


def _check_packages(flags: PipelineOptions) -> None:
    setup, worker = flags.view_as(SetupOptions), flags.view_as(WorkerOptions)
    names = ("requirements_file", "setup_file", "extra_packages")
    if not worker.sdk_container_image and not any(getattr(setup, name) for name in names):
        raise OptionsError(
            "sdk_container_image: found none, expected an image with beamjax and jax, which "
            "Dataflow's own image lacks; see docs/dataflow.md"
        )
    if worker.sdk_container_image and setup.sdk_location == "default":
        setup.sdk_location = "container"  # use the Beam in the image, not one from PyPI


def _check_accelerator(options: Options, flags: PipelineOptions) -> None:
    cloud, debug = flags.view_as(GoogleCloudOptions), flags.view_as(DebugOptions)
    services = [s for s in cloud.dataflow_service_options or [] if s.startswith(_ACCELERATOR)]
    hints = [h for h in _hints(flags) if h.startswith("accelerator=")]
    if services and hints:
        raise OptionsError(
            f"options: found dataflow_service_options {services[0]!r} and resource_hint "
            f"{hints[0]!r}, expected one of them: Dataflow gives accelerators in one way or the "
            "other"
        )
    if not services and not hints:
        return
    accelerator = (services or hints)[0]
    platforms = options.platforms or (default_platform(),)
    if "tpu" not in accelerator and "cuda" not in platforms:
        raise OptionsError(
            f"options: found {accelerator!r}, but the program is exported for "
            f"{', '.join(platforms)} alone; add options={{'platforms': ['cuda']}}"
        )
    # One worker process a machine, so that one process owns the accelerator.
    if _SEVERAL_PROCESSES not in accelerator:
        debug.add_experiment(_ONE_PROCESS)


def _hints(flags: PipelineOptions) -> list[str]:
    return flags.get_all_options().get("resource_hints") or []
