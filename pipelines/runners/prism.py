"""Beam's Prism: finds or builds its program, and starts it as a job server."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from apache_beam.options.pipeline_options import (
    PipelineOptions,
    PortableOptions,
    PrismRunnerOptions,
)
from apache_beam.version import __version__ as beam_version

from beamjax import _beam_compat
from beamjax._beam_compat import PrismJobServer
from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import job_servers, processes
from beamjax.storage.cache_folder import cache_folder

MODULE = "github.com/apache/beam/sdks/v2"
PACKAGE = "go/cmd/prism"
ADVICE = (
    "run `beamjax prism install`, which builds it with Go, or give "
    "options={'prism_location': PATH} with a program that you have; those of Beam's releases "
    "listen at all addresses of this machine"
)

_LOG = logging.getLogger("beamjax")
_SECONDS_TO_TAKE_A_JOB = 60
_SERVER = "go/pkg/beam/runners/prism/internal/jobservices/server.go"
_EVERYWHERE, _HERE = 'Sprintf(":%d", port)', 'Sprintf("localhost:%d", port)'
"""The line by which Prism opens its only port, and its replacement here: the address at which
workers look."""


class PrismRunner(_beam_compat.PrismRunner):
    """Beam's own, for pipelines of any length.

    By default Beam stops listening to a job after the time in which Prism must accept it.
    """

    def create_job_service_handle(self, job_service: Any, options: PipelineOptions) -> Any:
        """The connection for one pipeline."""
        handle = super().create_job_service_handle(job_service, options)
        return _beam_compat.listen_without_limit(handle)


def connected(options: PipelineOptions) -> PipelineOptions:
    """Options with which a `PrismRunner` finds its job server, which is started if need be.

    Raises:
      OptionsError: Prism is not there, cannot be downloaded or built, or does not start.
    """
    options = job_servers.with_defaults(options, environment_type="LOOPBACK")
    if options.view_as(PortableOptions).job_endpoint:
        return options
    program = locate(options)
    server = job_servers.serve(
        "Prism",
        ("prism", program),
        lambda ports, _: [
            program, f"--job_port={ports[0]}", "--serve_http=false", "--log_kind=text",
        ],
    )  # fmt: skip
    # If Prism dies now, Beam would wait for five minutes.
    seconds = {"job_server_timeout": _SECONDS_TO_TAKE_A_JOB}
    return job_servers.with_defaults(options, job_endpoint=server.endpoint, **seconds)


def locate(options: PipelineOptions | None = None) -> str:
    """The path of Prism: as given, or as built by beamjax, now if need be.

    Raises:
      OptionsError: it cannot be had.
    """
    options = PipelineOptions([]) if options is None else options
    given = options.view_as(PrismRunnerOptions)
    location = given.prism_location
    if not location and not given.prism_beam_version_override:
        if processes.find("go") is None and not installed().exists():
            raise OptionsError(
                f"runner: found no Prism at {installed()}, and there is no Go to build it; {ADVICE}"
                f"{_on_path()}"
            )
        return install()
    found = shutil.which(location) if location and os.path.basename(location) == location else None
    if found and not os.path.exists(location):  # a name, which Beam takes for a path
        return found
    try:
        return _by_beam(options)
    except Exception as error:  # file systems and the network raise errors of many types
        raise OptionsError(
            f"prism_location: found {given.prism_location!r}, not to be had ({error}); {ADVICE}"
        ) from error


def _on_path() -> str:
    """A sentence on a Prism on `PATH`; "" if there is none.

    It is not taken unasked: nothing shows which version of Beam it is of, and those of Beam's
    releases listen at all addresses.
    """
    found = shutil.which("prism")
    if found is None:
        return ""
    return (
        f". Also found {found} on PATH, which is used only with options="
        "{'prism_location': 'prism'}: it may be of another version of Beam, and may listen at all "
        "addresses"
    )


def installed() -> Path:
    """Where `install` puts the program."""
    return cache_folder(f"prism-{beam_version}-loopback") / "prism"


def install() -> str:
    """Builds Prism of the version of Beam that is installed here, and returns its path.

    It listens at a loopback address. Beam's own has no option for that and listens at all of them,
    where any client that reaches it may run anything on this machine: one line is changed before it
    is built.

    Raises:
      OptionsError: there is no Go, the build fails, or the line is another one.
    """
    target = installed()
    with processes.locked(target.parent):
        if not target.exists():
            go = processes.require("go", "beamjax prism install")
            _LOG.warning(
                "beamjax: building Prism of Beam %s with Go in %s (about three minutes of CPU, "
                "once)%s", beam_version, target.parent, _on_path(),
            )  # fmt: skip
            with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
                _build(go, Path(folder))
                os.replace(Path(folder) / target.name, target)
    return str(target)


def _build(go: str, folder: Path) -> None:
    """Builds the program into a folder, which then has its source, too."""
    purpose, environment = "beamjax prism install", {"GOWORK": "off"}
    advice = "; it needs the Go module proxy ($GOPROXY)"
    download = [go, "mod", "download", "-json", f"{MODULE}@v{beam_version}"]
    downloaded = json.loads(processes.run(download, purpose, environment, advice, folder))
    _extract(Path(downloaded["Zip"]), folder)
    server = folder / _SERVER
    text = server.read_text(encoding="utf-8") if server.exists() else ""
    times = text.count(_EVERYWHERE)
    if times != 1:
        raise OptionsError(
            f"{purpose}: found {times} times `{_EVERYWHERE}` in {_SERVER} of Beam {beam_version}, "
            f"expected it once, to have Prism listen at a loopback address; use "
            "another version of Beam, or give options={'prism_location': PATH} with a program that "
            "you have"
        )
    server.write_text(text.replace(_EVERYWHERE, _HERE), encoding="utf-8")
    # Without paths of the folder in the program, so that a second build uses Go's cache.
    flags = ["-mod=readonly", "-trimpath", "-buildvcs=false"]
    build = [go, "build", *flags, "-o", installed().name, f"./{PACKAGE}"]
    processes.run(build, purpose, environment, advice, folder)


def _extract(module: Path, folder: Path) -> None:
    """Writes the source in Go from the archive of a module."""
    head = f"{MODULE}@v{beam_version}/"
    with zipfile.ZipFile(module) as archive:
        for entry in archive.infolist():
            entry.filename = entry.filename.removeprefix(head)
            source = entry.filename.startswith("go/") and not entry.filename.endswith("_test.go")
            if source or entry.filename in ("go.mod", "go.sum"):
                archive.extract(entry, folder)


def _by_beam(options: PipelineOptions) -> str:
    path: str = PrismJobServer.local_bin(PrismJobServer(options).path_to_binary())
    return path
