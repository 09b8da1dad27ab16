"""Beam's Prism: finds or builds its program, and starts it as a job server."""

from __future__ import annotations

import hashlib
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
from beamjax.pipelines.clusters import guard, job_servers, processes
from beamjax.storage import locks
from beamjax.storage.trust import cache_folder

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
_EVERYWHERE = 'net.Listen("tcp", fmt.Sprintf(":%d", port))'
_HERE = 'listenForOwnUser(fmt.Sprintf("localhost:%d", port))'
"""Code with which Prism opens its only port, and its replacement. Workers connect to localhost."""
_OWN_USER = Path(guard.__file__).parent / "go" / "own_user.go"
"""The file with this function, which is added to the source."""
SUMS = {"2.77.0": "h1:RsC61pHEvtySEHAURQyP/+CVOJm/hy5hewuG9JF0+Ow="}
"""Go's hashes of the source, by the version of Beam. Go compares others with its own database."""


class PrismRunner(_beam_compat.PrismRunner):
    """Beam's runner, for pipelines of any duration."""

    # Beam's own stops listening to a job after `job_server_timeout`, the time limit for Prism to
    # accept it.
    def create_job_service_handle(self, job_service: Any, options: PipelineOptions) -> Any:
        """The connection for one pipeline."""
        handle = super().create_job_service_handle(job_service, options)
        return _beam_compat.listen_without_limit(handle)


def connected(options: PipelineOptions) -> PipelineOptions:
    """Options with the job server of a `PrismRunner`, which is started if need be."""
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
    # If Prism dies before it accepts the job, Beam's default is to wait for five minutes.
    seconds = {"job_server_timeout": _SECONDS_TO_TAKE_A_JOB}
    return job_servers.with_defaults(options, job_endpoint=server.endpoint, **seconds)


def locate(options: PipelineOptions | None = None) -> str:
    """The path of Prism: the one that the options name, or one that beamjax builds."""
    options = PipelineOptions([]) if options is None else options
    prism = options.view_as(PrismRunnerOptions)
    location = prism.prism_location
    if not location and not prism.prism_beam_version_override:
        if processes.find("go") is None and not is_installed():
            raise OptionsError(
                f"runner: found no Prism at {installed()}, and there is no Go to build it; {ADVICE}"
                f"{_on_path()}"
            )
        return install()
    program = (
        shutil.which(location) if location and os.path.basename(location) == location else None
    )
    if program and not os.path.exists(location):  # a program on PATH; Beam would expect a path
        return program
    try:
        return _by_beam(options)
    except Exception as error:  # file systems and the network raise errors of many types
        raise OptionsError(
            f"prism_location: found {prism.prism_location!r}, which can't be used ({error}); "
            f"{ADVICE}"
        ) from error


def _on_path() -> str:
    """A sentence about a Prism on `PATH`, which is not used by default; "" if there is none."""
    program = shutil.which("prism")
    if program is None:
        return ""
    return (
        f". Also found {program} on PATH, which is used only with options="
        "{'prism_location': 'prism'}: it may be of another version of Beam, and may listen at all "
        "addresses"
    )


def installed() -> Path:
    """Where `install` puts the program."""
    digest = hashlib.sha256(_OWN_USER.read_bytes()).hexdigest()[:12]
    return cache_folder(f"prism-{beam_version}-{digest}") / "prism"


def is_installed() -> bool:
    """Whether the program is there."""
    return installed().exists()


def install() -> str:
    """Builds Prism from the installed version of Beam, and returns its path."""
    # One line of its source is changed, so that it listens at a loopback address, and answers its
    # own user only. Beam's Prism listens at all addresses and has no option to change that, and any
    # client that reaches it can run any code on this machine.
    target = installed()
    with locks.locked(target.parent):
        if not target.exists():
            go = processes.require("go", "beamjax prism install")
            _LOG.warning(
                "building Prism of Beam %s with Go in %s (about three minutes of CPU, "
                "once)%s", beam_version, target.parent, _on_path(),
            )  # fmt: skip
            with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
                _build(go, Path(folder))
                os.replace(Path(folder) / target.name, target)  # atomic: never half a program
    return str(target)


def _build(go: str, folder: Path) -> None:
    """Builds the program in a folder, into which its source is extracted as well."""
    purpose, environment = "beamjax prism install", {"GOWORK": "off"}
    advice = "; it needs the Go module proxy ($GOPROXY)"
    download = [go, "mod", "download", "-json", f"{MODULE}@v{beam_version}"]
    downloaded = json.loads(processes.run(download, purpose, environment, advice, folder))
    expected = SUMS.get(beam_version, downloaded["Sum"])
    if downloaded["Sum"] != expected:
        raise OptionsError(
            f"{purpose}: found a source of Beam {beam_version} with the hash {downloaded['Sum']}, "
            f"expected {expected}; does $GOPROXY name a server that changes it?"
        )
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
    shutil.copy(_OWN_USER, server.parent)
    # Without `-trimpath`, the temporary folder would be part of what is compiled, and Go's build
    # cache would be of no use for a second build.
    flags = ["-mod=readonly", "-trimpath", "-buildvcs=false"]
    build = [go, "build", *flags, "-o", installed().name, f"./{PACKAGE}"]
    processes.run(build, purpose, environment, advice, folder)


def _extract(module: Path, folder: Path) -> None:
    """Extracts the Go source, without tests, from the archive of a module."""
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
