"""Beam's Prism: where its program is, and a job server of it."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from apache_beam.options.pipeline_options import (
    PipelineOptions,
    PortableOptions,
    PrismRunnerOptions,
)
from apache_beam.runners.portability.prism_runner import PrismJobServer
from apache_beam.version import __version__ as beam_version

from beamjax.errors import OptionsError
from beamjax.pipelines import job_servers, tools

PACKAGE = "github.com/apache/beam/sdks/v2/go/cmd/prism"
ADVICE = (
    "run `beamjax prism install`, which builds it with Go, or give "
    "options={'prism_location': PATH} with a program that you have"
)


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
    return job_servers.with_defaults(options, job_endpoint=server.endpoint)


def locate(options: PipelineOptions | None = None) -> str:
    """The path of Prism: as given, as installed by beamjax, as Beam has it, or built now.

    Raises:
      OptionsError: it cannot be had.
    """
    options = PipelineOptions([]) if options is None else options
    given = options.view_as(PrismRunnerOptions)
    if not given.prism_location and not given.prism_beam_version_override:
        if installed().exists():
            return str(installed())
        told: Exception
        try:
            return _by_beam(options)
        except Exception as error:  # whatever its file systems and the network raise
            told = error
        if tools.find("go") is None:
            raise OptionsError(
                f"runner: Beam has no Prism for this machine ({told}), and there is no Go to "
                f"build it; {ADVICE}"
            ) from told
        return install()
    try:
        return _by_beam(options)
    except Exception as error:
        raise OptionsError(
            f"prism_location: found {given.prism_location!r}, not to be had ({error}); {ADVICE}"
        ) from error


def installed() -> Path:
    """Where `install` puts the program."""
    return tools.cache_folder(f"prism-{beam_version}") / "prism"


def install() -> str:
    """Builds Prism of the version of Beam that is installed here, and returns its path.

    Raises:
      OptionsError: there is no Go, or the build fails.
    """
    go = tools.require("go", "beamjax prism install")
    target = installed()
    with tools.locked(target.parent):
        if not target.exists():
            build = target.parent / "build"
            tools.run(
                [go, "install", f"{PACKAGE}@v{beam_version}"],
                "beamjax prism install",
                {"GOBIN": str(build)},
                "; it needs the Go module proxy ($GOPROXY)",
            )
            os.replace(build / "prism", target)
            shutil.rmtree(build, ignore_errors=True)
    return str(target)


def _by_beam(options: PipelineOptions) -> str:
    return PrismJobServer.local_bin(PrismJobServer(options).path_to_binary())


# ----------------------------------------------------------------------------------- command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `beamjax prism`."""
    parser.add_argument(
        "action", choices=["install", "where"],
        help="install: build Prism with Go into beamjax's cache; where: print the path that "
        "runner='PrismRunner' uses",
    )  # fmt: skip


def command(arguments: argparse.Namespace) -> int:
    """Runs `beamjax prism`."""
    print(install() if arguments.action == "install" else locate())
    return 0
